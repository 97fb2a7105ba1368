//! The four commands as they are sent, and their replies as they are read: the one module
//! that knows the protocol.

use std::time::Duration;

use redis::{Cmd, Value, cmd};

use crate::error::Error;
use crate::lease::{Lost, Reply};

/// The longest owner that the module takes, in bytes: see `docs/commands/lock.acquire.md`.
pub const MAX_OWNER: usize = 512;

/// The longest ttl and the longest WAIT that the module takes, see `docs/commands/lock.acquire.md`:
/// 2^53 - 1 ms, up to which a double, and so every language, counts exactly.
pub(crate) const MAX_TTL: Duration = Duration::from_millis((1 << 53) - 1);

/// Rounded down, so that we never count on more than the server was asked for.
fn ms(duration: Duration) -> u64 {
    duration.min(MAX_TTL).as_millis() as u64
}

/// `LOCK.ACQUIRE key owner ttl-ms [WAIT timeout-ms]`. A `wait` of none is one try.
pub(crate) fn acquire(key: &[u8], owner: &str, ttl: Duration, wait: Option<Duration>) -> Cmd {
    let mut command = cmd("LOCK.ACQUIRE");
    command.arg(key).arg(owner).arg(ms(ttl));
    if let Some(wait) = wait {
        command.arg("WAIT").arg(ms(wait));
    }
    command
}

/// `LOCK.RENEW key owner ttl-ms`, of at least 1 ms: the module takes no 0.
pub(crate) fn renew(key: &[u8], owner: &str, ttl: Duration) -> Cmd {
    let mut command = cmd("LOCK.RENEW");
    command.arg(key).arg(owner).arg(ms(ttl).max(1));
    command
}

/// `LOCK.RELEASE key owner`.
pub(crate) fn release(key: &[u8], owner: &[u8]) -> Cmd {
    let mut command = cmd("LOCK.RELEASE");
    command.arg(key).arg(owner);
    command
}

/// `LOCK.INFO key`.
pub(crate) fn info(key: &[u8]) -> Cmd {
    let mut command = cmd("LOCK.INFO");
    command.arg(key);
    command
}

fn unexpected(value: &Value) -> Error {
    Error::Unreachable(format!("what answers is not Lockkeeper, it said {value:?}"))
}

/// The reply to ACQUIRE: the fence, or none when the lock is busy.
pub(crate) fn fence(value: Value) -> Result<Option<u64>, Error> {
    match value {
        Value::Int(fence) if fence > 0 => Ok(Some(fence as u64)),
        Value::Nil => Ok(None),
        other => Err(unexpected(&other)),
    }
}

/// The reply to RENEW or RELEASE. Only exactly 1 is a yes.
pub(crate) fn reply(value: Value) -> Result<Reply, Error> {
    match value {
        Value::Int(1) => Ok(Reply::Yes),
        Value::Int(0) => Ok(Reply::Lost(Lost::Taken)),
        Value::Nil => Ok(Reply::Lost(Lost::Gone)),
        other => Err(unexpected(&other)),
    }
}

/// Who holds a lock and who waits for it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Info {
    /// Who holds it; none if nobody does and somebody waits.
    pub owner: Option<Vec<u8>>,
    /// The fence of the grant; none for a lock that was taken by hand.
    pub fence: Option<u64>,
    /// How long it has been held, by the server's clock; none for a lock that was taken by hand.
    pub held: Option<Duration>,
    /// When it ends unless it is renewed; none if it never does, or nobody holds it.
    pub ttl: Option<Duration>,
    /// How many wait.
    pub waiters: u64,
    /// The first of those who wait, in order.
    pub queue: Vec<Waiter>,
}

/// Somebody who waits for a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waiter {
    /// The owner it will be.
    pub owner: Vec<u8>,
    /// How long it has been waiting.
    pub waited: Duration,
}

impl Info {
    /// None if nobody holds the lock and nobody waits.
    pub(crate) fn read(value: Value) -> Result<Option<Info>, Error> {
        if value == Value::Nil {
            return Ok(None);
        }
        let shown = unexpected(&value);
        Info::fields(value).ok_or(shown).map(Some)
    }

    /// Unknown fields are skipped: a later module may tell more.
    fn fields(value: Value) -> Option<Info> {
        let mut info = Info {
            owner: None,
            fence: None,
            held: None,
            ttl: None,
            waiters: 0,
            queue: Vec::new(),
        };
        for (name, value) in value.into_map_iter().ok()? {
            match bytes(name)?.as_slice() {
                b"owner" => info.owner = bytes(value),
                b"fence" => info.fence = number(&value),
                b"held-ms" => info.held = number(&value).map(Duration::from_millis),
                b"ttl-ms" => info.ttl = number(&value).map(Duration::from_millis),
                b"waiters" => info.waiters = number(&value)?,
                b"queue" => {
                    for waiter in value.into_sequence().ok()? {
                        info.queue.push(Waiter::read(waiter)?);
                    }
                }
                _ => {}
            }
        }
        Some(info)
    }
}

impl Waiter {
    fn read(value: Value) -> Option<Waiter> {
        let (mut owner, mut waited) = (None, None);
        for (name, value) in value.into_map_iter().ok()? {
            match bytes(name)?.as_slice() {
                b"owner" => owner = bytes(value),
                b"waited-ms" => waited = number(&value).map(Duration::from_millis),
                _ => {}
            }
        }
        Some(Waiter {
            owner: owner?,
            waited: waited?,
        })
    }
}

fn bytes(value: Value) -> Option<Vec<u8>> {
    match value {
        Value::BulkString(bytes) => Some(bytes),
        Value::SimpleString(text) => Some(text.into_bytes()),
        _ => None,
    }
}

fn number(value: &Value) -> Option<u64> {
    match value {
        Value::Int(number) => u64::try_from(*number).ok(),
        _ => None,
    }
}
