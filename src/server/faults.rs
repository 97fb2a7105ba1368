//! What LOCK.DEBUG breaks on purpose, on servers that load the module for tests.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

static ONLY_THE_CRON_WAKES: AtomicBool = AtomicBool::new(false);

/// Whether neither the timer nor a command serves who waits.
pub fn only_the_cron_wakes() -> bool {
    ONLY_THE_CRON_WAKES.load(Relaxed)
}

pub fn let_only_the_cron_wake(only: bool) {
    ONLY_THE_CRON_WAKES.store(only, Relaxed);
}
