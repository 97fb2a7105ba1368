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

/// How many may hold a lock at a time, as one of its holders allows, itself included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limit(u32);

impl Limit {
    /// The holder is alone.
    pub(crate) const EXCLUSIVE: Limit = Limit(1);

    /// The most that the module takes, see `docs/commands/lock.acquire.md`.
    pub(crate) const SHARED: Limit = Limit(1000);

    /// None if the module would not take it.
    pub(crate) fn of(number: u32) -> Option<Limit> {
        (1..=Limit::SHARED.0)
            .contains(&number)
            .then_some(Limit(number))
    }
}

/// Rounded down, so that we never count on more than the server was asked for.
fn ms(duration: Duration) -> u64 {
    duration.min(MAX_TTL).as_millis() as u64
}

/// `LOCK.ACQUIRE key owner ttl-ms [WAIT timeout-ms] [LIMIT n | SHARED]`. A `wait` of none is one try. Who
/// wants to be alone says nothing of it, and is understood by a module that knows no limits.
pub(crate) fn acquire(
    key: &[u8],
    owner: &str,
    ttl: Duration,
    wait: Option<Duration>,
    limit: Limit,
) -> Cmd {
    let mut command = cmd("LOCK.ACQUIRE");
    command.arg(key).arg(owner).arg(ms(ttl));
    if let Some(wait) = wait {
        command.arg("WAIT").arg(ms(wait));
    }
    match limit {
        Limit::EXCLUSIVE => {}
        Limit::SHARED => drop(command.arg("SHARED")),
        Limit(number) => drop(command.arg("LIMIT").arg(number)),
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
    /// Who holds it alone; none if nobody does and somebody waits, or if several may hold it: then
    /// they are the `holders`.
    pub owner: Option<Vec<u8>>,
    /// The fence of the grant; none for a lock that was taken by hand, or that several may hold.
    pub fence: Option<u64>,
    /// How long it has been held, by the server's clock; none for a lock that was taken by hand, or
    /// that several may hold.
    pub held: Option<Duration>,
    /// When it ends unless it is renewed, the last of its holders' leases; none if it never does, or
    /// nobody holds it.
    pub ttl: Option<Duration>,
    /// How many wait.
    pub waiters: u64,
    /// The first of those who wait, in order.
    pub queue: Vec<Waiter>,
    /// How many may hold it at a time: the smallest limit of its holders, 1 to 1000; none if nobody
    /// holds it.
    pub limit: Option<u32>,
    /// How many hold it.
    pub holding: u64,
    /// The first 100 of those who hold it, in the order of their grants; also one who is alone.
    pub holders: Vec<Holder>,
}

/// Somebody who holds a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// In whose name it is held.
    pub owner: Vec<u8>,
    /// The fence of this grant; none for a lock that was taken by hand.
    pub fence: Option<u64>,
    /// How long this owner has held it, by the server's clock; none for a lock that was taken by
    /// hand.
    pub held: Option<Duration>,
    /// When this owner's lease ends unless it is renewed; none if it never does.
    pub ttl: Option<Duration>,
    /// How many this owner lets hold it, itself included.
    pub limit: u32,
}

/// Somebody who waits for a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waiter {
    /// The owner it will be.
    pub owner: Vec<u8>,
    /// How long it has been waiting.
    pub waited: Duration,
    /// How many this owner will let hold it, itself included.
    pub limit: u32,
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
            limit: None,
            holding: 0,
            holders: Vec::new(),
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
                b"limit" => info.limit = limit(&value),
                b"holding" => info.holding = number(&value)?,
                b"holders" => {
                    for holder in value.into_sequence().ok()? {
                        info.holders.push(Holder::read(holder)?);
                    }
                }
                _ => {}
            }
        }
        if let Some(owner) = info.owner.clone() {
            // The server tells of one who is alone what it told before there were several.
            info.limit = Some(1);
            info.holding = 1;
            info.holders = vec![Holder {
                owner,
                fence: info.fence,
                held: info.held,
                ttl: info.ttl,
                limit: 1,
            }];
        }
        Some(info)
    }
}

impl Holder {
    fn read(value: Value) -> Option<Holder> {
        let (mut owner, mut fence, mut held, mut ttl, mut allowed) = (None, None, None, None, None);
        for (name, value) in value.into_map_iter().ok()? {
            match bytes(name)?.as_slice() {
                b"owner" => owner = bytes(value),
                b"fence" => fence = number(&value),
                b"held-ms" => held = number(&value).map(Duration::from_millis),
                b"ttl-ms" => ttl = number(&value).map(Duration::from_millis),
                b"limit" => allowed = limit(&value),
                _ => {}
            }
        }
        Some(Holder {
            owner: owner?,
            fence,
            held,
            ttl,
            limit: allowed?,
        })
    }
}

impl Waiter {
    fn read(value: Value) -> Option<Waiter> {
        // The server says nothing of one who wants to be alone.
        let (mut owner, mut waited, mut allowed) = (None, None, 1);
        for (name, value) in value.into_map_iter().ok()? {
            match bytes(name)?.as_slice() {
                b"owner" => owner = bytes(value),
                b"waited-ms" => waited = number(&value).map(Duration::from_millis),
                b"limit" => allowed = limit(&value)?,
                _ => {}
            }
        }
        Some(Waiter {
            owner: owner?,
            waited: waited?,
            limit: allowed,
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

fn limit(value: &Value) -> Option<u32> {
    number(value)?.try_into().ok()
}

fn number(value: &Value) -> Option<u64> {
    match value {
        Value::Int(number) => u64::try_from(*number).ok(),
        _ => None,
    }
}
