//! The clock that leases are counted by. It runs through suspend: with one that stands still
//! meanwhile, a laptop that wakes up would believe in a lease that the server gave away hours ago.

use crate::lease::Moment;

#[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
pub(crate) fn now() -> Moment {
    use rustix::time::{ClockId, clock_gettime};

    #[cfg(not(target_vendor = "apple"))]
    const CLOCK: ClockId = ClockId::Boottime;
    // There it counts the time asleep as well.
    #[cfg(target_vendor = "apple")]
    const CLOCK: ClockId = ClockId::Monotonic;

    let time = clock_gettime(CLOCK);
    // Since boot, so never negative.
    Moment::after_boot(time.try_into().unwrap_or_default())
}

/// Elsewhere no clock is known to do so.
#[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
pub(crate) fn now() -> Moment {
    use std::sync::{Mutex, PoisonError};
    use std::time::{Instant, SystemTime};

    static CLOCKS: Mutex<Option<larger::Larger>> = Mutex::new(None);
    let mut clocks = CLOCKS.lock().unwrap_or_else(PoisonError::into_inner);
    let clocks = clocks.get_or_insert_default();
    Moment::after_boot(clocks.read(Instant::now(), SystemTime::now()))
}

#[cfg(any(
    test,
    not(any(target_os = "linux", target_os = "android", target_vendor = "apple"))
))]
mod larger {
    use std::time::{Duration, Instant, SystemTime};

    /// Counts the larger of what two clocks say has passed between two readings: one stands still
    /// while the machine sleeps, the other may be set back. Too large a step ends a lease too
    /// early, which is safe.
    #[derive(Default)]
    pub(super) struct Larger {
        elapsed: Duration,
        last: Option<(Instant, SystemTime)>,
    }

    impl Larger {
        pub(super) fn read(&mut self, monotonic: Instant, wall: SystemTime) -> Duration {
            if let Some((was, said)) = self.last.replace((monotonic, wall)) {
                let awake = monotonic.saturating_duration_since(was);
                self.elapsed += awake.max(wall.duration_since(said).unwrap_or_default());
            }
            self.elapsed
        }
    }

    #[test]
    fn what_one_clock_misses_the_other_counts() {
        let s = Duration::from_secs;
        let (monotonic, wall, mut clock) = (Instant::now(), SystemTime::now(), Larger::default());
        assert_eq!(clock.read(monotonic, wall), s(0));
        assert_eq!(clock.read(monotonic + s(1), wall + s(1)), s(1));
        assert_eq!(
            clock.read(monotonic + s(2), wall + s(3602)),
            s(3602),
            "asleep"
        );
        assert_eq!(clock.read(monotonic + s(3), wall), s(3603), "set back");
        assert_eq!(
            clock.read(monotonic + s(3), wall + s(60)),
            s(3663),
            "asleep again"
        );
    }
}
