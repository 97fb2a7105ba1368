//! The four commands as they are sent, and their replies as they are read: the one place that
//! knows the protocol.

use std::time::Duration;

use redis::{Cmd, Value, cmd};

use crate::error::Error;
use crate::lease::{Lost, MAX_TTL};

/// Rounded down, so that we never count on more than the server was asked for, and at most what the module
/// takes, of a timeout as of a ttl.
fn ms(duration: Duration) -> u64 {
    duration.min(MAX_TTL).as_millis() as u64
}

/// `wait` of none is one try.
pub(crate) fn acquire(key: &[u8], owner: &str, ttl: Duration, wait: Option<Duration>) -> Cmd {
    let mut command = cmd("LOCK.ACQUIRE");
    command.arg(key).arg(owner).arg(ms(ttl));
    if let Some(wait) = wait {
        command.arg("WAIT").arg(ms(wait));
    }
    command
}

/// At least 1 ms: the module takes no 0.
pub(crate) fn renew(key: &[u8], owner: &str, ttl: Duration) -> Cmd {
    let mut command = cmd("LOCK.RENEW");
    command.arg(key).arg(owner).arg(ms(ttl).max(1));
    command
}

pub(crate) fn release(key: &[u8], owner: &[u8]) -> Cmd {
    let mut command = cmd("LOCK.RELEASE");
    command.arg(key).arg(owner);
    command
}

pub(crate) fn info(key: &[u8]) -> Cmd {
    let mut command = cmd("LOCK.INFO");
    command.arg(key);
    command
}

fn unexpected(value: &Value) -> Error {
    Error::Unreachable(format!("what answers is not Lockkeeper, it said {value:?}"))
}

/// What ACQUIRE answered: the fence, or none when the lock is busy.
pub(crate) fn fence(value: Value) -> Result<Option<u64>, Error> {
    match value {
        Value::Int(fence) if fence > 0 => Ok(Some(fence as u64)),
        Value::Nil => Ok(None),
        other => Err(unexpected(&other)),
    }
}

/// How RENEW or RELEASE was refused; none if it was not. Only exactly 1 is a yes.
pub(crate) fn refused(value: Value) -> Result<Option<Lost>, Error> {
    match value {
        Value::Int(1) => Ok(None),
        Value::Int(0) => Ok(Some(Lost::Taken)),
        Value::Nil => Ok(Some(Lost::Gone)),
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
                    for place in value.into_sequence().ok()? {
                        info.queue.push(Waiter::read(place)?);
                    }
                }
                _ => {}
            }
        }
        Some(info)
    }
}

impl Waiter {
    fn read(place: Value) -> Option<Waiter> {
        let (mut owner, mut waited) = (None, None);
        for (name, value) in place.into_map_iter().ok()? {
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
