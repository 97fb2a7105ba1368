//! `lockkeeper info`: who holds a lock, and who waits for it.

use std::fmt::Write;
use std::time::Duration;

use lockkeeper::{Error, Holder, Info, Lockkeeper, printable};
use serde_json::json;

use crate::exit::{Exit, UNAVAILABLE};
use crate::format::rounded;

/// The codes of `info`, of which 0 and 1 are those of grep: found, not found.
const HELD: u8 = 0;
const FREE: u8 = 1;
const WAITED_FOR: u8 = 2;

pub async fn run(
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

/// Asks the server about the lock.
pub async fn ask(lockkeeper: &Lockkeeper, key: &[u8]) -> Result<Option<Info>, Exit> {
    lockkeeper.info(key).await.map_err(|error| match error {
        Error::Refused(line) if line.starts_with("WRONGTYPE ") => Exit::with_message(
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
            .map(|waiter| json!({
                "owner": lossy(&waiter.owner), "waited-ms": ms(waiter.waited), "limit": waiter.limit,
            }));
        let holders = info.holders.iter().map(|holder| {
            json!({
                "owner": lossy(&holder.owner),
                "fence": holder.fence,
                "held-ms": holder.held.map(ms),
                "ttl-ms": holder.ttl.map(ms),
                "limit": holder.limit,
            })
        });
        json!({
            "owner": info.owner.as_deref().map(lossy),
            "fence": info.fence,
            "held-ms": info.held.map(ms),
            "ttl-ms": info.ttl.map(ms),
            "waiters": info.waiters,
            "queue": queue.collect::<Vec<_>>(),
            "limit": info.limit,
            "holding": info.holding,
            "holders": holders.collect::<Vec<_>>(),
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
    match (&info.owner, info.limit) {
        (Some(owner), _) => line("owner", &printable(owner)),
        (None, Some(limit)) => line("holders", &format!("{} of {limit}", info.holding)),
        (None, None) => line("owner", &"nobody"),
    }
    if info.owner.is_none() {
        for (index, holder) in info.holders.iter().enumerate() {
            line(&format!("{:>6}", index + 1), &about(holder));
        }
    }
    if let Some(fence) = info.fence {
        line("fence", &fence);
    }
    if let Some(held) = info.held {
        line("held", &rounded(held));
    }
    match info.ttl {
        Some(ttl) => line("ttl", &rounded(ttl)),
        None if info.holding > 0 => line("ttl", &"none, it never ends by itself"),
        None => {}
    }
    line("waiters", &info.waiters);
    for (index, waiter) in info.queue.iter().enumerate() {
        let waited = rounded(waiter.waited);
        line(
            &format!("{:>6}", index + 1),
            &format!("{}, {waited}", printable(&waiter.owner)),
        );
    }
    text
}

/// One of several: who, for how long, and when the lease ends.
fn about(holder: &Holder) -> String {
    let mut text = printable(&holder.owner);
    if let Some(fence) = holder.fence {
        // Writing into a String cannot fail.
        let _ = write!(text, ", fence {fence}");
    }
    if let Some(held) = holder.held {
        let _ = write!(text, ", held {}", rounded(held));
    }
    if let Some(ttl) = holder.ttl {
        let _ = write!(text, ", ttl {}", rounded(ttl));
    }
    text
}
