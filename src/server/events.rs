//! What we do at events of the server.

use super::api::{Ctx, ServerEvents, unix_time};
use super::state::State;
use super::waiting;

pub struct Events;

impl ServerEvents for Events {
    /// The fences of a new master must be above those that the old one gave out.
    fn promoted(ctx: &Ctx) {
        let now = unix_time();
        State::with(ctx, |state| state.fences.restart(now));
    }

    fn demoted(ctx: &Ctx) {
        waiting::demoted(ctx);
    }

    fn configured(ctx: &Ctx) {
        waiting::configured(ctx);
        warn_of_eviction(ctx);
    }

    fn cron(ctx: &Ctx) {
        waiting::cron(ctx);
    }
}

/// Warns when the server has become able to evict locks.
pub fn warn_of_eviction(ctx: &Ctx) {
    let may_evict = ctx.may_evict();
    let could_before = State::with(ctx, |state| {
        std::mem::replace(&mut state.may_evict, may_evict)
    });
    if may_evict && !could_before {
        ctx.warn("maxmemory-policy lets the server evict keys, and an evicted lock is free while its owner \
             works: set maxmemory-policy noeviction on a server that keeps locks",
        );
    }
}
