//! The clock that leases are counted by.

use nix::time::{ClockId, clock_gettime};

use crate::lease::Moment;

/// Runs through suspend: with a clock that stands still meanwhile, a laptop that wakes up would
/// believe in a lease that the server gave away hours ago.
#[cfg(any(target_os = "linux", target_os = "android"))]
const CLOCK: ClockId = ClockId::CLOCK_BOOTTIME;
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const CLOCK: ClockId = ClockId::CLOCK_MONOTONIC;

pub(crate) fn now() -> Moment {
    // It can only fail for a clock that the kernel lacks; every Linux since 2.6.39 has this one.
    let time = clock_gettime(CLOCK).expect("the system has a clock");
    Moment::after_boot(time.into())
}
