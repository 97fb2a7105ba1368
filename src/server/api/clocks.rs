//! The server's two clocks. Neither needs a context.

use std::time::SystemTime;

use redis_module::raw;

use crate::time::{MonoUs, Now, UnixUs};

/// The server's wall clock, by which keys expire.
pub fn unix_time() -> UnixUs {
    // SAFETY: reading the pointer is sound, see the front page of this folder.
    match unsafe { raw::RedisModule_Microseconds } {
        // SAFETY: takes no argument.
        Some(microseconds) => UnixUs(unsafe { microseconds() }.cast_unsigned()),
        // Redis 7.0 gives modules milliseconds only; it reads the same clock.
        None => UnixUs(
            SystemTime::now()
                .duration_since(SystemTime::UNIX_EPOCH)
                .map_or(0, |since| since.as_micros() as u64),
        ),
    }
}

/// Both clocks.
pub fn clocks() -> Now {
    Now {
        wall: unix_time(),
        // SAFETY: takes no argument.
        mono: MonoUs(unsafe { api!(RedisModule_MonotonicMicroseconds)() }),
    }
}
