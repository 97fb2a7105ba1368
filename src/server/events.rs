//! What the server tells us without being asked.

use super::State;
use super::api::Ctx;

/// The server became a master: its fences must be above those that the old master gave out.
pub fn promoted(ctx: &Ctx) {
    State::get(ctx).fences.restart(ctx.now());
}
