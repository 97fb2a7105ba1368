//! How times are shown.

use std::time::Duration;

/// As people write it: milliseconds below ten seconds, seconds above.
pub fn rounded(time: Duration) -> humantime::FormattedDuration {
    let unit = if time < Duration::from_secs(10) {
        1
    } else {
        1000
    };
    let ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX) / unit * unit;
    humantime::format_duration(Duration::from_millis(ms))
}
