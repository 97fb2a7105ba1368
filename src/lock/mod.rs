//! The lock: what the value of a key says, and what each command does to it.
//!
//! Pure: std only, no clock, no I/O, no Redis. The server's clock comes in as `now`, the key as a
//! [`Found`]; what is to be done goes out as a [`Decision`], which the shell carries out.

use std::borrow::Borrow;
use std::rc::Rc;

use crate::time::{MAX_INTEGER, Ttl, UnixMs, UnixUs};

/// Longest owner, in bytes. With the 17 bytes before it the value fits a small allocation.
pub const MAX_OWNER: usize = 512;

/// Digits of the fence in a value: 2^53 − 1 has 16.
const FENCE_DIGITS: usize = 16;

/// Bytes before the owner in a value of ours: the fence and a colon.
const PREFIX: usize = FENCE_DIGITS + 1;

/// How far ahead of the clock a replaced fence may be and still be counted on from: one day, in µs.
/// More than any clock is wrong by, and a forged value cannot use up the numbers below 2^53.
const DAY_US: u64 = 24 * 60 * 60 * 1_000_000;

/// What a restarted server, or a new master, puts between the old fences and its own: 1 s, in µs.
/// It covers clocks that differ by less than a second.
const HEAD_START_US: u64 = 1_000_000;

/// Which lock: a key of a database.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LockId {
    pub db: i32,
    pub name: Box<[u8]>,
}

/// Who holds or wants a lock: 1 to 512 arbitrary bytes that name one tenure of one holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Owner<'a>(&'a [u8]);

impl<'a> Owner<'a> {
    /// `None` if empty or longer than 512 bytes.
    pub fn new(bytes: &'a [u8]) -> Option<Owner<'a>> {
        (1..=MAX_OWNER)
            .contains(&bytes.len())
            .then_some(Owner(bytes))
    }

    pub fn bytes(self) -> &'a [u8] {
        self.0
    }

    /// Whether a value of this many bytes can belong to this owner. Reading a string unshares it, which
    /// changes its encoding, and a command that is refused should change nothing: so ask for the length first.
    pub fn may_hold(self, value_len: usize) -> bool {
        value_len == self.0.len() || value_len == PREFIX + self.0.len()
    }
}

/// An owner to keep. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OwnedOwner(Rc<[u8]>);

impl OwnedOwner {
    pub fn borrowed(&self) -> Owner<'_> {
        Owner(&self.0)
    }
}

impl From<Owner<'_>> for OwnedOwner {
    fn from(owner: Owner) -> OwnedOwner {
        OwnedOwner(owner.0.into())
    }
}

/// So that a map of owners is asked without making an [`OwnedOwner`].
impl Borrow<[u8]> for OwnedOwner {
    fn borrow(&self) -> &[u8] {
        &self.0
    }
}

/// Fencing number: grows with every grant of a key. 1 to 2^53 − 1; in microseconds since 1970, give or
/// take, so it also shows since when the lock is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fence(u64);

impl Fence {
    fn new(number: u64) -> Option<Fence> {
        (1..=MAX_INTEGER).contains(&number).then_some(Fence(number))
    }

    pub fn number(self) -> u64 {
        self.0
    }

    /// How long the lock has been held, in milliseconds; 0 for a fence ahead of the clock.
    pub fn held_ms(self, now: UnixUs) -> u64 {
        now.0.saturating_sub(self.0) / 1000
    }
}

/// Where fences come from: the clock, and never the same number twice.
///
/// It needs no key of its own. A counter in Redis would promise less: asynchronous failover repeats it.
/// What the fences of one key promise, and no more:
///
/// - While one server runs they grow, over release, expiry and DEL, and however its clock is stepped.
/// - From a holder to whoever waited for it they grow wherever that happens, since the fence is in the
///   value that is replaced; unless it is more than a day ahead of the clock.
/// - Over a restart, or a failover, they grow if the clock of the server that goes on is behind that of
///   the one before by less than a second, and the one before had been master for a second.
/// - Over a slot move, to a server that has been master for long, they grow if its clock is behind by less
///   than the time between the two grants.
#[derive(Debug)]
pub struct Fences {
    last: u64,
}

impl Fences {
    /// For a server that was just loaded or promoted: one second ahead of the clock.
    pub fn starting(now: UnixUs) -> Fences {
        let mut fences = Fences { last: 0 };
        fences.restart(now);
        fences
    }

    /// Gets ahead of the fences that another server, or this one before, may have given out.
    pub fn restart(&mut self, now: UnixUs) {
        self.last = self
            .last
            .max(now.0.saturating_add(HEAD_START_US))
            .min(MAX_INTEGER);
    }

    /// The fence of a new grant, above that of the value it replaces.
    ///
    /// A replaced fence is not remembered: one forged value must not lift the fences of other keys, and
    /// what could be remembered safely, a fence of a second ahead at most, would promise more over a release
    /// but not over an expiry or a DEL.
    pub fn next(&mut self, now: UnixUs, replaced: Option<Fence>) -> Fence {
        self.last = (self.last + 1).max(now.0).min(MAX_INTEGER);
        let above = replaced
            .filter(|fence| fence.0 <= now.0.saturating_add(DAY_US))
            .map_or(0, |fence| fence.0 + 1);
        Fence(self.last.max(above).min(MAX_INTEGER))
    }
}

/// What the value of a key says. A function of the value alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading<'v> {
    /// `None` for a lock that was taken by hand (`SET key token NX PX ttl`).
    pub fence: Option<Fence>,
    /// The bytes after the fence, or the whole value of a lock taken by hand.
    pub owner: &'v [u8],
}

/// Reads a value: 16 digits (1 to 2^53 − 1), a colon and 1 to 512 bytes are ours.
pub fn read(value: &[u8]) -> Reading<'_> {
    let ours = || {
        let (digits, rest) = value.split_at_checked(FENCE_DIGITS)?;
        let owner = Owner::new(rest.strip_prefix(b":")?)?;
        let number = digits.iter().try_fold(0, |sum: u64, byte| {
            byte.is_ascii_digit()
                .then(|| sum * 10 + u64::from(byte - b'0'))
        })?;
        Some((Fence::new(number)?, owner.bytes()))
    };
    match ours() {
        Some((fence, owner)) => Reading {
            fence: Some(fence),
            owner,
        },
        None => Reading {
            fence: None,
            owner: value,
        },
    }
}

/// Writes the value that [`read`] reads.
pub fn write(fence: Fence, owner: Owner) -> Vec<u8> {
    let mut value = Vec::with_capacity(PREFIX + owner.bytes().len());
    value.resize(PREFIX, b'0');
    let mut number = fence.0;
    for digit in value[..FENCE_DIGITS].iter_mut().rev() {
        *digit = b'0' + (number % 10) as u8;
        number /= 10;
    }
    value[FENCE_DIGITS] = b':';
    value.extend_from_slice(owner.bytes());
    value
}

/// The key as one caller finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found<'v> {
    /// The key is missing or has expired.
    Nobody,
    /// A value whose length alone shows that it is not the caller's ([`Owner::may_hold`]).
    Another,
    /// A value, which may be the caller's.
    Value(&'v [u8]),
    /// The key holds a list, a hash …
    WrongType,
}

/// How a caller stands to the value it found.
enum Claim {
    /// The owner of a lock of ours.
    Owner(Fence),
    /// The one who took the lock by hand: the whole value is its name, even if it reads as one of ours.
    ByHand(Option<Fence>),
    Other,
}

fn claim(value: &[u8], owner: Owner) -> Claim {
    match read(value) {
        Reading {
            fence: Some(fence),
            owner: holder,
        } if holder == owner.bytes() => Claim::Owner(fence),
        Reading { fence, .. } if value == owner.bytes() => Claim::ByHand(fence),
        _ => Claim::Other,
    }
}

/// What comes of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The caller holds the lock under this fence.
    Acquired(Fence),
    /// Another holds it.
    Busy,
    Renewed,
    Released,
    /// RENEW or RELEASE: another holds it.
    NotOwner,
    /// RENEW or RELEASE: nobody holds it.
    NotHeld,
    WrongType,
}

/// Who holds a lock, under which fence, until when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease<'a> {
    pub owner: Owner<'a>,
    pub fence: Fence,
    pub ends_at: UnixMs,
}

impl Lease<'_> {
    /// What the key then holds.
    pub fn value(self) -> Vec<u8> {
        write(self.fence, self.owner)
    }
}

/// What happens to the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect<'a> {
    Nothing,
    /// The key gets the value of this lease, and its end.
    Set(Lease<'a>),
    /// The value stays and ends at this time.
    Expire {
        ends_at: UnixMs,
    },
    /// The key goes, or becomes the next one's, whose fence must be above the one that the value carried.
    Delete {
        replaced: Option<Fence>,
    },
}

/// What the reply is and what happens to the key: both, or the shell does neither.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision<'a> {
    pub outcome: Outcome,
    pub effect: Effect<'a>,
}

impl Decision<'_> {
    fn refuse(outcome: Outcome) -> Self {
        Decision {
            outcome,
            effect: Effect::Nothing,
        }
    }
}

/// LOCK.ACQUIRE: takes a free lock, or confirms one that the caller holds. A confirmed lease never ends
/// earlier than `before`, the end that it has, if any.
pub fn acquire<'a>(
    found: Found,
    before: Option<UnixMs>,
    owner: Owner<'a>,
    ttl: Ttl,
    now: UnixUs,
    fences: &mut Fences,
) -> Decision<'a> {
    let ends_at = now.plus(ttl);
    let grant = |fence, ends_at| Decision {
        outcome: Outcome::Acquired(fence),
        effect: Effect::Set(Lease {
            owner,
            fence,
            ends_at,
        }),
    };
    match found {
        Found::Nobody => grant(fences.next(now, None), ends_at),
        Found::Another => Decision::refuse(Outcome::Busy),
        Found::WrongType => Decision::refuse(Outcome::WrongType),
        Found::Value(bytes) => match claim(bytes, owner) {
            Claim::Owner(fence) => Decision {
                outcome: Outcome::Acquired(fence),
                effect: match before {
                    Some(before) if before >= ends_at => Effect::Nothing,
                    _ => Effect::Expire { ends_at },
                },
            },
            Claim::ByHand(replaced) => grant(
                fences.next(now, replaced),
                before.map_or(ends_at, |before| before.max(ends_at)),
            ),
            Claim::Other => Decision::refuse(Outcome::Busy),
        },
    }
}

/// LOCK.RENEW: the lease ends `ttl` from now, sooner or later than before.
pub fn renew<'a>(found: Found, owner: Owner<'a>, ttl: Ttl, now: UnixUs) -> Decision<'a> {
    let ends_at = now.plus(ttl);
    only_for(owner, found, |_| Decision {
        outcome: Outcome::Renewed,
        effect: Effect::Expire { ends_at },
    })
}

/// LOCK.RELEASE: the lock is free, or the next one's.
pub fn release<'a>(found: Found, owner: Owner<'a>) -> Decision<'a> {
    only_for(owner, found, |replaced| Decision {
        outcome: Outcome::Released,
        effect: Effect::Delete { replaced },
    })
}

/// What RENEW and RELEASE share: only who matches gets what it asks for, given the fence at the key.
fn only_for<'a>(
    owner: Owner<'a>,
    found: Found,
    granted: impl FnOnce(Option<Fence>) -> Decision<'a>,
) -> Decision<'a> {
    match found {
        Found::Nobody => Decision::refuse(Outcome::NotHeld),
        Found::Another => Decision::refuse(Outcome::NotOwner),
        Found::WrongType => Decision::refuse(Outcome::WrongType),
        Found::Value(bytes) => match claim(bytes, owner) {
            Claim::Owner(fence) => granted(Some(fence)),
            Claim::ByHand(fence) => granted(fence),
            Claim::Other => Decision::refuse(Outcome::NotOwner),
        },
    }
}

#[cfg(test)]
mod tests;
