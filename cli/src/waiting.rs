//! What a `run` that waits prints, and that it does not wait for itself.

use std::convert::Infallible;
use std::ffi::OsString;
use std::future::pending;
use std::io::Write;
use std::time::Duration;

use lockkeeper::{Info, Lockkeeper, printable};
use tokio::time::{sleep, timeout};

use crate::args::{Run, Wait};
use crate::exit::{Exit, USAGE};
use crate::format::rounded;

/// The owners in whose names this process runs, the innermost last, a line each. One with a line
/// break in its label is not recognized.
pub const OWNERS: &str = "LOCKKEEPER_OWNERS";

/// The innermost of them.
pub const OWNER: &str = "LOCKKEEPER_OWNER";

/// How long a wait must have lasted to be worth a line.
const REPORTED_AFTER: Duration = Duration::from_millis(300);

/// How long asking the server may take for a line that is only a courtesy.
const INFO_TIMEOUT: Duration = Duration::from_secs(2);

/// The limit of those who share a lock, see docs/commands/lock.acquire.md.
const SHARED: u32 = 1000;

/// The owners of this process with one more.
pub fn owners(owner: &str) -> OsString {
    let mut owners = std::env::var_os(OWNERS).unwrap_or_default();
    if !owners.is_empty() {
        owners.push("\n");
    }
    owners.push(owner);
    owners
}

/// Who runs under a lock and asks for the same lock waits until its own end. Known by the owner, so
/// that neither another server nor another database with a key of the same name is meant, nor a lock
/// that the run around this one has lost.
pub async fn refuse_to_wait_for_itself(lockkeeper: &Lockkeeper, plan: &Run) -> Result<(), Exit> {
    let owners = [OWNERS, OWNER].map(|name| std::env::var_os(name).unwrap_or_default());
    if owners.iter().all(|it| it.is_empty()) {
        return Ok(());
    }
    let key = plan.key.as_slice();
    let within = match plan.wait {
        Wait::For(wait) => wait.min(INFO_TIMEOUT),
        Wait::No | Wait::ForEver => INFO_TIMEOUT,
    };
    let info = timeout(within, lockkeeper.info(key)).await;
    let Some(info) = info.ok().and_then(|info| info.ok()?) else {
        return Ok(());
    };
    let mut owners = owners
        .iter()
        .flat_map(|it| it.as_encoded_bytes().split(|byte| *byte == b'\n'));
    let holds = |owner: &[u8]| info.holders.iter().any(|holder| holder.owner == owner);
    if owners.any(holds) {
        return Err(Exit::with_message(
            USAGE,
            format!(
                "this command already runs under {}, and would wait for itself",
                printable(key)
            ),
        ));
    }
    Ok(())
}

/// After a moment prints once, on standard error, that we wait, for whom, and behind how many.
pub async fn report(lockkeeper: &Lockkeeper, plan: &Run) -> Infallible {
    let ask = async || {
        sleep(REPORTED_AFTER).await;
        timeout(INFO_TIMEOUT, lockkeeper.info(plan.key.as_slice())).await
    };
    let label = lockkeeper.label();
    let mut info = ask().await;
    // That is our own grant, most likely, whose reply a busy machine still has.
    if let Ok(Ok(Some(told))) = &info
        && (told.holders.iter()).any(|holder| has_label(&holder.owner, label))
    {
        info = ask().await;
    }
    let name = printable(&plan.key);
    let line = match info {
        Ok(Ok(Some(info))) => {
            let holder = match (holder(&info), places(&info)) {
                (Some(holder), _) => format!(", held by {holder}"),
                (None, Some(places)) => format!(", {places}"),
                (None, None) => String::new(),
            };
            let position = position(&info, label);
            let position =
                position.map_or(String::new(), |it| format!(", number {it} in the queue"));
            format!("waiting for {name}{holder}{position}")
        }
        Ok(Err(error)) => format!("waiting for {name}: {error}"),
        Ok(Ok(None)) | Err(_) => format!("waiting for {name}"),
    };
    // Nobody may be there to read it.
    let _ = writeln!(std::io::stderr(), "lockkeeper: {line}");
    pending().await
}

/// How many of its places are taken, if there may be several, and when the first is free.
pub fn places(info: &Info) -> Option<String> {
    let (limit, holding) = (info.limit.filter(|limit| *limit > 1)?, info.holding);
    let taken = match limit {
        SHARED => format!("{holding} share it"),
        limit => format!("{holding} of {limit} places taken"),
    };
    let first = info.holders.iter().filter_map(|holder| holder.ttl).min();
    let first = first.map_or(String::new(), |ttl| {
        format!(", the first ends in {} at the latest", rounded(ttl))
    });
    Some(taken + &first)
}

/// Who holds the lock alone, and for how long.
pub fn holder(info: &Info) -> Option<String> {
    let owner = printable(info.owner.as_deref()?);
    Some(match info.held {
        Some(held) => format!("{owner} for {}", rounded(held)),
        None => owner,
    })
}

/// The last of our label: we have only just come. None if we are not among those that are shown.
fn position(info: &Info, label: &str) -> Option<usize> {
    let mut queue = info.queue.iter();
    let last = queue.rposition(|waiter| has_label(&waiter.owner, label));
    last.map(|index| index + 1)
}

fn has_label(owner: &[u8], label: &str) -> bool {
    let rest = owner.strip_prefix(label.as_bytes());
    rest.is_some_and(|rest| rest.first() == Some(&b':'))
}
