//! What the server tells us without being asked.

use super::api::Ctx;
use super::{State, waiting};

/// The server became a master: its fences must be above those that the old master gave out.
pub fn promoted(ctx: &Ctx) {
    State::get(ctx).fences.restart(ctx.now());
}

/// The server became a replica. It has told all who wait and closed their connections itself.
pub fn demoted(ctx: &Ctx) {
    waiting::forget_grants(ctx);
}
