//! Points in time and lengths of time, each with its clock and its unit.
//!
//! Pure: no function here reads a clock.

use std::num::NonZeroU64;

/// Largest ttl, timeout and fence: 2^53 − 1, the last integer that a double holds exactly, so that no
/// client language (JavaScript, Lua) rounds one.
pub const MAX_INTEGER: u64 = (1 << 53) - 1;

/// Now, by the server's wall clock, in microseconds since 1970. Fences count in these: two nodes of a
/// cluster can grant a key that moves from one to the other within a millisecond.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct UnixUs(pub u64);

impl UnixUs {
    pub fn ms(self) -> UnixMs {
        UnixMs((self.0 / 1000).cast_signed())
    }

    /// The end of a lease of `ttl` that begins now.
    pub fn plus(self, ttl: Ttl) -> UnixMs {
        UnixMs(self.ms().0.saturating_add_unsigned(ttl.ms()))
    }
}

/// The end of a lease, by the server's wall clock, in milliseconds since 1970: so keys end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct UnixMs(pub i64);

/// A point in time by a clock that nobody can step, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MonoUs(pub u64);

impl MonoUs {
    /// The end of a wait that begins now.
    pub fn plus(self, wait: Wait) -> MonoUs {
        self.plus_ms(wait.ms())
    }

    pub fn plus_ms(self, ms: u64) -> MonoUs {
        MonoUs(self.0.saturating_add(ms.saturating_mul(1000)))
    }

    /// Microseconds since an earlier point; 0 since a later one.
    pub fn since_us(self, earlier: MonoUs) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// Now, by both clocks: keys end by the wall clock, waits by the one that nobody can step.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    pub wall: UnixUs,
    pub mono: MonoUs,
}

impl Now {
    /// When a key that ends at `end` has expired: for the server it lives through that millisecond.
    pub fn when_expired(self, end: UnixMs) -> MonoUs {
        let over_us = end.0.saturating_add(1).saturating_mul(1000).max(0);
        let left_us = over_us.cast_unsigned().saturating_sub(self.wall.0);
        MonoUs(self.mono.0.saturating_add(left_us))
    }
}

/// Time to live of a lease: 1 to 2^53 − 1 milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ttl(NonZeroU64);

impl Ttl {
    /// `None` outside of 1 to 2^53 − 1.
    pub fn from_ms(ms: u64) -> Option<Ttl> {
        NonZeroU64::new(ms)
            .filter(|ms| ms.get() <= MAX_INTEGER)
            .map(Ttl)
    }

    pub fn ms(self) -> u64 {
        self.0.get()
    }
}

/// How long to wait for a lock that another holds: 1 to 2^53 − 1 milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait(NonZeroU64);

impl Wait {
    /// `None` outside of 1 to 2^53 − 1.
    pub fn from_ms(ms: u64) -> Option<Wait> {
        NonZeroU64::new(ms)
            .filter(|ms| ms.get() <= MAX_INTEGER)
            .map(Wait)
    }

    pub fn ms(self) -> u64 {
        self.0.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_expired_in_the_microsecond_after_its_last_millisecond() {
        let now = Now {
            wall: UnixUs(1_000_900),
            mono: MonoUs(50),
        };
        assert_eq!(now.when_expired(UnixMs(1_005)), MonoUs(50 + 5_100));
        assert_eq!(now.when_expired(UnixMs(1_000)), MonoUs(50 + 100));
        assert_eq!(now.when_expired(UnixMs(-1)), now.mono);
        assert!(now.when_expired(UnixMs(i64::MAX)) > MonoUs(i64::MAX as u64 / 2));
    }
}
