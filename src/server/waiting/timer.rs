//! The one timer of the queue. What happens when it fires: [`work`](super::work).

use crate::server::api::{Ctx, Timer, clocks};
use crate::server::state::State;
use crate::time::MonoUs;

/// What the server's timers, which count in milliseconds, are late by at least: they look once before
/// their time and once after it. Asked for so much less, one in five comes a millisecond sooner.
const TIMER_LATE_US: u64 = 200;

/// A timer that is late by this much has been lost, or the wall clock was stepped back.
const OVERDUE_MS: u64 = 50;

/// The timer, among all that modules have. Its callback is in `work`.
pub struct QueueTimer;

/// Sees to it that the timer fires when something is due next, and does not run for nothing.
pub fn rearm(ctx: &Ctx) {
    let now = clocks().mono;
    let Some((late, due)) = State::with(ctx, |state| change(state, now)) else {
        return;
    };
    if let Some(timer) = late {
        ctx.stop_timer(timer);
    }
    if let Some(due) = due {
        let timer = ctx.start_timer::<QueueTimer>(match due.since_us(now) {
            0 => 0,
            // Not 0: what came too early after all would be tried again without a pause.
            us => us.saturating_sub(TIMER_LATE_US).div_ceil(1000).max(1),
        });
        State::with(ctx, |state| state.timer = Some((timer, due)));
    }
}

/// The timer to stop, and when the next one is to fire; none if the one that runs will do.
fn change(state: &mut State, now: MonoUs) -> Option<(Option<Timer>, Option<MonoUs>)> {
    let due = match state.without_reply.is_empty() && !state.demoted {
        true => state.queue.next_due().map(|due| due.max(now)),
        false => Some(now),
    };
    match (state.timer, due) {
        (Some((_, at)), Some(due)) if at <= due => None,
        (None, None) => None,
        (_, due) => Some((state.timer.take().map(|(timer, _)| timer), due)),
    }
}

/// Stops a timer that should have fired long ago.
pub fn stop_if_overdue(ctx: &Ctx, now: MonoUs) {
    let overdue = State::with(ctx, |state| {
        state.timer.take_if(|(_, at)| at.plus_ms(OVERDUE_MS) < now)
    });
    if let Some((timer, _)) = overdue {
        ctx.stop_timer(timer);
    }
}
