//! The clock that leases are counted by.

use rustix::time::{ClockId, clock_gettime};

use crate::lease::Moment;

/// Runs through suspend: with a clock that stands still meanwhile, a laptop that wakes up would
/// believe in a lease that the server gave away hours ago.
#[cfg(any(target_os = "linux", target_os = "android"))]
const CLOCK: ClockId = ClockId::Boottime;
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const CLOCK: ClockId = ClockId::Monotonic;

pub(crate) fn now() -> Moment {
    let time = clock_gettime(CLOCK);
    // Neither part of a time since boot is negative, so both conversions are exact.
    Moment::after_boot(std::time::Duration::new(
        time.tv_sec as u64,
        time.tv_nsec as u32,
    ))
}
