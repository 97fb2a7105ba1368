//! `lockkeeper info` and `lockkeeper release`.

use std::fmt::Write;
use std::time::Duration;

use lockkeeper::{Error, Info, Lockkeeper, Released, printable};
use serde_json::json;

use crate::exit::{CONFLICT, Exit, UNAVAILABLE};

/// The codes of `info`, of which 0 and 1 are those of grep: found, not found.
const HELD: u8 = 0;
const FREE: u8 = 1;
const WAITED_FOR: u8 = 2;

/// The longest owner that the module takes, in bytes.
const MAX_OWNER: usize = 512;

pub async fn info(
    lockkeeper: Lockkeeper,
    key: &[u8],
    json: bool,
    quiet: bool,
) -> Result<Exit, Exit> {
    let info = ask(&lockkeeper, key).await?;
    let code = match &info {
        None => FREE,
        Some(info) if info.waiters > 0 => WAITED_FOR,
        Some(_) => HELD,
    };
    if quiet {
        return Ok(Exit::with(code));
    }
    let text = match (info, json) {
        (info, true) => format!(
            "{}\n",
            without_controls(&as_json(info.as_ref()).to_string())
        ),
        (Some(info), false) => as_text(&info),
        (None, false) => "free\n".to_owned(),
    };
    Exit::after_printing(code, text.as_bytes())
}

async fn ask(lockkeeper: &Lockkeeper, key: &[u8]) -> Result<Option<Info>, Exit> {
    lockkeeper.info(key).await.map_err(|error| match error {
        Error::Refused(line) if line.starts_with("WRONGTYPE ") => Exit::saying(
            UNAVAILABLE,
            format!(
                "{} is no lock but a value of another type (redis-cli TYPE tells); if nobody \
                 needs it, redis-cli DEL removes it",
                printable(key)
            ),
        ),
        error => Exit::from(error),
    })
}

/// JSON escapes the control characters of ASCII, but not those that follow it.
fn without_controls(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for c in json.chars() {
        if c.is_control() {
            // Writing into a String cannot fail.
            let _ = write!(text, "\\u{:04x}", c as u32);
        } else {
            text.push(c);
        }
    }
    text
}

fn as_json(info: Option<&Info>) -> serde_json::Value {
    let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    info.map_or(serde_json::Value::Null, |info| {
        let queue = info
            .queue
            .iter()
            .map(|waiter| json!({"owner": lossy(&waiter.owner), "waited-ms": ms(waiter.waited)}));
        json!({
            "owner": info.owner.as_deref().map(lossy),
            "fence": info.fence,
            "held-ms": info.held.map(ms),
            "ttl-ms": info.ttl.map(ms),
            "waiters": info.waiters,
            "queue": queue.collect::<Vec<_>>(),
        })
    })
}

fn lossy(owner: &[u8]) -> String {
    String::from_utf8_lossy(owner).into_owned()
}

fn as_text(info: &Info) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: &dyn std::fmt::Display| {
        // Writing into a String cannot fail.
        let _ = writeln!(text, "{name:8}{value}");
    };
    match &info.owner {
        Some(owner) => line("owner", &printable(owner)),
        None => line("owner", &"nobody"),
    }
    if let Some(fence) = info.fence {
        line("fence", &fence);
    }
    if let Some(held) = info.held {
        line("held", &rounded(held));
    }
    match info.ttl {
        Some(ttl) => line("ttl", &rounded(ttl)),
        None if info.owner.is_some() => line("ttl", &"none, it never ends by itself"),
        None => {}
    }
    line("waiters", &info.waiters);
    for (place, waiter) in info.queue.iter().enumerate() {
        let waited = rounded(waiter.waited);
        line(
            &format!("{:>6}", place + 1),
            &format!("{}, {waited}", printable(&waiter.owner)),
        );
    }
    text
}

/// As people say it: milliseconds below ten seconds, seconds above.
pub fn rounded(time: Duration) -> humantime::FormattedDuration {
    let unit = if time < Duration::from_secs(10) {
        1
    } else {
        1000
    };
    let ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX) / unit * unit;
    humantime::format_duration(Duration::from_millis(ms))
}

pub async fn release(lockkeeper: Lockkeeper, key: &[u8]) -> Result<Exit, Exit> {
    let name = printable(key);
    let info = ask(&lockkeeper, key).await?;
    let Some(owner) = info.and_then(|info| info.owner) else {
        return Ok(Exit::saying(0, format!("nobody holds {name}")));
    };
    // Only a lock taken by hand can have such a token.
    if owner.is_empty() || owner.len() > MAX_OWNER {
        return Err(Exit::saying(
            UNAVAILABLE,
            format!(
                "{name} is held by a token of {} bytes, and only one of 1 to {MAX_OWNER} can be \
                 named in a release; if its holder is dead, redis-cli DEL removes it",
                owner.len()
            ),
        ));
    }
    let released = lockkeeper.release_for(key, &owner).await?;
    let owner = printable(&owner);
    Ok(match released {
        Released::Yes => Exit::saying(0, format!("released {name}, which {owner} held")),
        Released::Lost(why) => Exit::saying(
            CONFLICT,
            format!("{owner} has lost {name} meanwhile: {why}"),
        ),
    })
}
