//! `INFO lockkeeper`: what has happened since the module was loaded, and how things stand.

use super::State;
use super::api::{Blocked, InfoCtx};
use crate::lock::LockId;
use crate::queue::Queue;
use crate::time::UnixUs;

/// What has happened since the module was loaded.
#[derive(Debug, Default)]
pub struct Stats {
    pub grants_direct: u64,
    grants_by_release: u64,
    grants_by_expiry: u64,
    grants_by_deletion: u64,
    pub grants_taken_back: u64,
    /// ACQUIRE answered null at once.
    pub refusals: u64,
    pub renewals: u64,
    pub renewals_refused: u64,
    pub releases: u64,
    pub wait_timeouts: u64,
    pub waiters_gone: u64,
    pub queue_full: u64,
    wait_time_us: u64,
}

/// How a lock came to the next in line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    Release,
    Expiry,
    Deletion,
    /// Counted as taken back.
    TakeBack,
}

impl Cause {
    /// Why a contended key is free.
    pub fn of_free_key(queue: &Queue<Blocked>, lock: &LockId, now: UnixUs) -> Cause {
        match queue.has_expired(lock, now) {
            true => Cause::Expiry,
            false => Cause::Deletion,
        }
    }
}

impl Stats {
    /// A client that waited was granted its lock.
    pub fn granted(&mut self, cause: Cause, waited_us: u64) {
        self.wait_time_us += waited_us;
        match cause {
            Cause::Release => self.grants_by_release += 1,
            Cause::Expiry => self.grants_by_expiry += 1,
            Cause::Deletion => self.grants_by_deletion += 1,
            Cause::TakeBack => {}
        }
    }
}

/// Writes our section of INFO. Allocates nothing: the server may be crashing.
pub fn write(info: &InfoCtx) {
    let Some(state) = State::try_get(info) else {
        return;
    };
    let State { stats, waiting, .. } = &*state;
    let queue = waiting.queue();
    let ctx = info.ctx();
    let now = ctx.clocks().mono;
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
        (c"max_waiters", waiting.max_waiters()),
        (c"max_waiters_per_key", waiting.max_waiters_per_key()),
    ] {
        info.field(name, number);
    }
    if !info.for_crash_report {
        info.field(c"eviction_possible", u64::from(ctx.may_evict()));
    }
}
