//! What the server tells us without being asked.

use super::api::Ctx;
use super::{State, waiting};

/// The server became a master: its fences must be above those that the old master gave out.
pub fn promoted(ctx: &Ctx) {
    State::get(ctx).fences.restart(ctx.now());
}

/// The server became a replica.
pub fn demoted(ctx: &Ctx) {
    waiting::demoted(ctx);
}

/// Settings of the server or of ours have changed, all that were given together.
pub fn configured(ctx: &Ctx) {
    waiting::configured(ctx);
    warn_of_eviction(ctx);
}

/// Warns when the server has become able to evict locks.
pub fn warn_of_eviction(ctx: &Ctx) {
    let may_evict = ctx.may_evict();
    let could_before = std::mem::replace(&mut State::get(ctx).may_evict, may_evict);
    if may_evict && !could_before {
        ctx.warn("maxmemory-policy lets the server evict keys, and an evicted lock is free while its owner \
             works: set maxmemory-policy noeviction on a server that keeps locks",
        );
    }
}
