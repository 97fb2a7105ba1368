//! `lockkeeper info` and `lockkeeper release`.

use std::fmt::Write;
use std::time::Duration;

use lockkeeper::{Info, Lockkeeper, Released};
use serde_json::json;

use crate::exit::{CONFLICT, Exit};

pub async fn info(lockkeeper: Lockkeeper, key: &[u8], json: bool) -> Result<Exit, Exit> {
    let info = lockkeeper.info(key).await?;
    let text = match (info, json) {
        (info, true) => format!("{}\n", as_json(info.as_ref())),
        (Some(info), false) => as_text(&info),
        (None, false) => "free\n".to_owned(),
    };
    Exit::after_printing(text.as_bytes())
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
        Some(owner) => line("owner", &owner.escape_ascii()),
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
            &format!("{}, {waited}", waiter.owner.escape_ascii()),
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
    let name = key.escape_ascii();
    let info = lockkeeper.info(key).await?;
    let Some(owner) = info.and_then(|info| info.owner) else {
        return Ok(Exit::saying(0, format!("nobody holds {name}")));
    };
    let released = lockkeeper.release_for(key, &owner).await?;
    let owner = owner.escape_ascii();
    Ok(match released {
        Released::Yes => Exit::saying(0, format!("released {name}, which {owner} held")),
        Released::Lost(why) => Exit::saying(
            CONFLICT,
            format!("{owner} has lost {name} meanwhile: {why}"),
        ),
    })
}
