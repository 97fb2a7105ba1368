//! `INFO lockkeeper`: what has happened since the module was loaded, and how things stand.

use super::api::{InfoCtx, InfoSection, clocks};
use super::state::State;

pub struct LockkeeperSection;

impl InfoSection for LockkeeperSection {
    /// Allocates nothing: the server may be crashing.
    fn write(info: &InfoCtx) {
        let Some(()) = State::try_with(info, |state| write(info, state)) else {
            return;
        };
        if !info.for_crash_report {
            info.field(c"eviction_possible", u64::from(info.may_evict()));
        }
    }
}

fn write(info: &InfoCtx, state: &State) {
    let State { stats, queue, .. } = state;
    let now = clocks().mono;
    for (name, number) in [
        (c"grants_direct_total", stats.grants_direct),
        (c"grants_by_release_total", stats.grants_by_release),
        (c"grants_by_expiry_total", stats.grants_by_expiry),
        (c"grants_by_deletion_total", stats.grants_by_deletion),
        (c"grants_taken_back_total", stats.grants_taken_back),
        (c"refusals_total", stats.refusals),
        (c"renewals_total", stats.renewals),
        (c"renewals_refused_total", stats.renewals_refused),
        (c"releases_total", stats.releases),
        (c"wait_timeouts_total", stats.wait_timeouts),
        (c"waiters_gone_total", stats.waiters_gone),
        (c"queue_full_total", stats.queue_full),
        (c"wait_time_us_total", stats.wait_time_us),
        (c"waiters", queue.waiters() as u64),
        (c"contended_keys", queue.contended_keys() as u64),
        (c"oldest_waiter_ms", queue.oldest_waiter_us(now) / 1000),
        (c"max_waiters", state.max_waiters),
        (c"max_waiters_per_key", state.max_waiters_per_key),
    ] {
        info.field(name, number);
    }
}
