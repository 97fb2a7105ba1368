//! What goes out: outcomes as replies, and every error sentence once.
//!
//! An error is `CODE what was wrong, what would be right, got '…'`. Redis counts errors by their first
//! word, so each kind has a word of its own.

use crate::lock::{Limit, MAX_OWNER, Outcome};
use crate::queue::Dismissal;
use crate::request::BadRequest;
use crate::time::MAX_INTEGER;

/// A reply, not yet in any protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    Integer(i64),
    Null,
    /// Code word first; one line, printable.
    Error(String),
    /// Redis' own words for a wrong number of arguments.
    WrongCount,
    Info(Box<Info>),
}

/// The reply of LOCK.INFO.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Info {
    /// `None` if the lock has a list of holders, or if nobody holds it but somebody waits.
    pub owner: Option<Vec<u8>>,
    /// `None` for a lock that was taken by hand, too.
    pub fence: Option<i64>,
    pub held_ms: Option<i64>,
    /// As PTTL: -1 without an expiry, -2 if nobody holds the lock.
    pub ttl_ms: i64,
    /// How many wait.
    pub waiters: i64,
    /// The first of them.
    pub queue: Vec<QueuedInfo>,
    /// Of a lock with a list.
    pub list: Option<ListInfo>,
}

/// One who waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueuedInfo {
    pub owner: Vec<u8>,
    pub waited_ms: i64,
    /// `None` for one that does not share.
    pub limit: Option<i64>,
}

/// The holders of a lock with a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListInfo {
    /// The smallest of theirs.
    pub limit: i64,
    /// How many hold.
    pub holding: i64,
    /// The first of them.
    pub holders: Vec<HolderInfo>,
}

/// One of several holders.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HolderInfo {
    pub owner: Vec<u8>,
    pub fence: i64,
    pub held_ms: i64,
    pub ttl_ms: i64,
    pub limit: i64,
}

/// As many clients wait as may.
pub fn queue_full(max_waiters: u64) -> Reply {
    Reply::Error(format!(
        "QUEUEFULL lockkeeper.max-waiters is {max_waiters} and as many clients wait, \
         try again later or raise it"
    ))
}

/// As many clients wait for this key as may.
pub fn queue_of_key_full(max_waiters_per_key: u64) -> Reply {
    Reply::Error(format!(
        "QUEUEFULL lockkeeper.max-waiters-per-key is {max_waiters_per_key} and as many clients wait \
         for this key, try again later or raise it"
    ))
}

/// The reply to a client that has to leave.
impl From<Dismissal> for Reply {
    fn from(why: Dismissal) -> Reply {
        match why {
            Dismissal::Drained => Reply::Null,
            // Clients of a cluster ask again, and elsewhere.
            Dismissal::NotHere => Reply::Error(TRY_AGAIN.to_owned()),
            Dismissal::Demoted => Reply::Error(DEMOTED.to_owned()),
        }
    }
}

const TRY_AGAIN: &str =
    "TRYAGAIN the slot of this key is served elsewhere or not at all, ask the cluster again";

/// What the servers themselves say to those who are blocked when they become replicas, word for word:
/// Valkey 9 leaves some of those who wait to us.
const DEMOTED: &str = "UNBLOCKED force unblock from blocking operation, instance state changed \
                       (master -> replica?)";

/// The words of Redis, byte for byte.
const WRONG_TYPE: &str = "WRONGTYPE Operation against a key holding the wrong kind of value";

/// What the client gets when a handler of ours panicked.
pub const PANIC: &str = "PANIC the command failed inside the module and may have been carried out, \
                         look with LOCK.INFO and report the server's log";

impl From<Outcome> for Reply {
    fn from(outcome: Outcome) -> Reply {
        match outcome {
            Outcome::Acquired(fence) | Outcome::Confirmed(fence) => {
                Reply::Integer(fence.number().cast_signed())
            }
            Outcome::Renewed | Outcome::Released => Reply::Integer(1),
            Outcome::NotOwner => Reply::Integer(0),
            Outcome::Busy | Outcome::NotAdmitted | Outcome::NotHeld => Reply::Null,
            Outcome::WrongType => Reply::Error(WRONG_TYPE.to_owned()),
        }
    }
}

impl From<BadRequest<'_>> for Reply {
    fn from(bad: BadRequest) -> Reply {
        let most = Limit::SHARED.number();
        let (problem, got): (String, &[u8]) = match bad {
            BadRequest::WrongCount => return Reply::WrongCount,
            BadRequest::OwnerEmpty => (
                format!("BADOWNER owner is empty, give 1 to {MAX_OWNER} bytes"),
                b"",
            ),
            BadRequest::OwnerTooLong(got) => (
                format!(
                    "BADOWNER owner is longer than {MAX_OWNER} bytes, give 1 to {MAX_OWNER} bytes"
                ),
                got,
            ),
            BadRequest::TtlNotANumber(got) => (
                format!(
                    "BADTTL ttl is not a whole number of milliseconds, give 1 to {MAX_INTEGER} in digits"
                ),
                got,
            ),
            BadRequest::TtlOutOfRange(got) => (
                format!("BADTTL ttl is out of range, give 1 to {MAX_INTEGER} milliseconds"),
                got,
            ),
            BadRequest::OptionUnknown(got) => (
                "BADOPTION option is unknown, give WAIT timeout-ms, LIMIT n, SHARED or nothing"
                    .to_owned(),
                got,
            ),
            BadRequest::OptionTwice(name, got) => (
                format!("BADOPTION {name} is given twice, give it once"),
                got,
            ),
            BadRequest::LimitWithoutNumber(got) => (
                "BADOPTION LIMIT has no number, give LIMIT n".to_owned(),
                got,
            ),
            BadRequest::LimitAndShared(got) => (
                "BADOPTION LIMIT and SHARED are both given, give one".to_owned(),
                got,
            ),
            BadRequest::WaitWithoutTimeout(got) => (
                "BADOPTION WAIT has no timeout, give WAIT timeout-ms".to_owned(),
                got,
            ),
            BadRequest::TimeoutNotANumber(got) => (
                format!(
                    "BADTIMEOUT timeout is not a whole number of milliseconds, \
                     give 0 to {MAX_INTEGER} in digits"
                ),
                got,
            ),
            BadRequest::TimeoutOutOfRange(got) => (
                format!("BADTIMEOUT timeout is out of range, give 0 to {MAX_INTEGER} milliseconds"),
                got,
            ),
            BadRequest::LimitNotANumber(got) => (
                format!("BADLIMIT limit is not a whole number, give 1 to {most} in digits"),
                got,
            ),
            BadRequest::LimitOutOfRange(got) => (
                format!("BADLIMIT limit is out of range, give 1 to {most}"),
                got,
            ),
        };
        Reply::Error(format!("{problem}, got '{}'", printable(got)))
    }
}

/// At most this many bytes of an argument are shown in an error.
const SHOWN: usize = 32;

/// An argument cut and escaped, so that no argument can break the protocol, a log or a terminal.
fn printable(arg: &[u8]) -> String {
    match arg.get(..SHOWN) {
        Some(start) if arg.len() > SHOWN => format!("{}...", start.escape_ascii()),
        _ => arg.escape_ascii().to_string(),
    }
}

#[cfg(test)]
mod tests;
