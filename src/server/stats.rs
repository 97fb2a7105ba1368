//! What has happened since the module was loaded.

use crate::queue::Cause;

/// Counters, each shown by INFO under its name and `_total`.
#[derive(Debug, Default)]
pub struct Stats {
    pub grants_direct: u64,
    pub grants_by_release: u64,
    pub grants_by_expiry: u64,
    pub grants_by_deletion: u64,
    pub grants_taken_back: u64,
    /// ACQUIRE returned null at once.
    pub refusals: u64,
    pub renewals: u64,
    pub renewals_refused: u64,
    pub releases: u64,
    pub wait_timeouts: u64,
    pub waiters_gone: u64,
    pub queue_full: u64,
    pub wait_time_us: u64,
}

impl Stats {
    /// A client that waited was granted its lock.
    pub fn granted(&mut self, cause: Cause, waited_us: u64) {
        self.wait_time_us += waited_us;
        match cause {
            Cause::Release => self.grants_by_release += 1,
            Cause::Expiry => self.grants_by_expiry += 1,
            Cause::Deletion => self.grants_by_deletion += 1,
        }
    }
}
