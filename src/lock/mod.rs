//! The lock: what the value of a key says, and what each command does to it.
//!
//! Pure: std only, no clock, no I/O, no Redis. The server's clock comes in as `now`, the key as a
//! [`Found`]; what is to be done goes out as a [`Decision`], which the shell carries out.
//!
//! - here: one holder, and what the commands do
//! - [`holders`]: several of them

mod holders;

use std::borrow::Borrow;
use std::rc::Rc;

use crate::time::{MAX_INTEGER, Ttl, UnixMs, UnixUs};

use holders::is_list;
pub use holders::{Holder, Holders, Limit, Value, may_be_list};

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

    fn is_at_most_a_day_ahead(self, now: UnixUs) -> bool {
        self.0 <= now.0.saturating_add(DAY_US)
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
/// - Beside a holder whose fence is ahead of the clock, as after such a move from a server whose clock was
///   ahead, two owners can have the same fence, one after the other: it is above that of the holder, and is
///   forgotten when its owner has left.
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
            .filter(|fence| fence.is_at_most_a_day_ahead(now))
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
        Some((Fence::new(number(digits)?)?, owner.bytes()))
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
    value.resize(PREFIX, b':');
    digits(&mut value[..FENCE_DIGITS], fence.0);
    value.extend_from_slice(owner.bytes());
    value
}

/// Reads digits and nothing else, at most 19.
fn number(digits: &[u8]) -> Option<u64> {
    digits.iter().try_fold(0, |sum: u64, byte| {
        byte.is_ascii_digit()
            .then(|| sum * 10 + u64::from(byte - b'0'))
    })
}

/// Writes a number with as many digits as there is room for.
fn digits(room: &mut [u8], mut number: u64) {
    for digit in room.iter_mut().rev() {
        *digit = b'0' + (number % 10) as u8;
        number /= 10;
    }
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

#[inline]
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

/// What an ACQUIRE asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseRequest<'a> {
    pub owner: Owner<'a>,
    pub ttl: Ttl,
    pub limit: Limit,
}

/// What comes of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The caller was granted the lock, under this fence.
    Acquired(Fence),
    /// The caller holds the lock already, with this limit and under this fence.
    Confirmed(Fence),
    /// Others hold it, or wait for it.
    Busy,
    /// The caller holds the lock with another limit, and the other holders do not admit the one it asks for. It
    /// must not wait for that: two of them would wait for each other.
    NotAdmitted,
    Renewed,
    Released,
    /// RENEW or RELEASE: another holds it.
    NotOwner,
    /// RENEW or RELEASE: nobody holds it.
    NotHeld,
    WrongType,
}

/// What happens to the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    Nothing,
    /// The key gets this value and its end.
    Set(Value),
    /// The value stays and ends at this time.
    Expire {
        ends_at: UnixMs,
    },
    /// The key is held by these, and by those who wait and are admitted beside them; it goes if there is nobody.
    Hold(Holders),
}

/// What the reply is and what happens to the key: both, or the shell does neither.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    pub outcome: Outcome,
    pub effect: Effect,
}

impl Decision {
    fn new(outcome: Outcome, effect: Effect) -> Decision {
        Decision { outcome, effect }
    }

    fn refuse(outcome: Outcome) -> Decision {
        Decision::new(outcome, Effect::Nothing)
    }
}

/// LOCK.ACQUIRE: takes a lock that is free or has room, or confirms one that the caller holds. A lease that the
/// caller has never ends earlier than before.
///
/// `key_ends_at`: when the key ends, if there is one and it does. `queued`: somebody waits for the key; asked
/// only where the key has or may have room.
pub fn acquire(
    found: Found,
    key_ends_at: Option<UnixMs>,
    request: LeaseRequest,
    queued: bool,
    now: UnixUs,
    fences: &mut Fences,
) -> Decision {
    let LeaseRequest { owner, ttl, limit } = request;
    let ends_at = now.plus(ttl);
    let grant = |fence, ends_at| {
        Decision::new(
            Outcome::Acquired(fence),
            hold_alone(fence, request, ends_at),
        )
    };
    let no_earlier = || key_ends_at.map_or(ends_at, |before| before.max(ends_at));
    match found {
        Found::Nobody => grant(fences.next(now, None), ends_at),
        Found::Another => Decision::refuse(Outcome::Busy),
        Found::WrongType => Decision::refuse(Outcome::WrongType),
        Found::Value(bytes) => match Holders::read(bytes, now) {
            Some(holders) => acquire_beside(holders, key_ends_at, request, queued, now, fences),
            None => match claim(bytes, owner) {
                Claim::Owner(fence) if limit == Limit::EXCLUSIVE => Decision::new(
                    Outcome::Confirmed(fence),
                    match key_ends_at {
                        Some(before) if before >= ends_at => Effect::Nothing,
                        _ => Effect::Expire { ends_at },
                    },
                ),
                Claim::Owner(fence) => grant(fences.next(now, Some(fence)), no_earlier()),
                Claim::ByHand(fence) => grant(fences.next(now, fence), no_earlier()),
                Claim::Other => Decision::refuse(Outcome::Busy),
            },
        },
    }
}

/// The first holder of a key, and the only one. Exclusive locks have no list, here and everywhere: most locks
/// are, and so they cost nothing more.
fn hold_alone(fence: Fence, request: LeaseRequest, ends_at: UnixMs) -> Effect {
    let LeaseRequest { owner, limit, .. } = request;
    if limit == Limit::EXCLUSIVE {
        return Effect::Set(Value::exclusive(fence, owner, ends_at));
    }
    Effect::Hold(Holders::one(Holder {
        owner,
        fence,
        limit,
        ends_at,
    }))
}

/// [`acquire`], of a key with a list.
fn acquire_beside(
    mut holders: Holders,
    key_ends_at: Option<UnixMs>,
    request: LeaseRequest,
    queued: bool,
    now: UnixUs,
    fences: &mut Fences,
) -> Decision {
    let LeaseRequest { owner, ttl, limit } = request;
    let own = holders.find(owner);
    let ends_at = own.map_or(now.plus(ttl), |own| own.ends_at.max(now.plus(ttl)));
    match own {
        Some(own) if own.limit == limit => {
            let outcome = Outcome::Confirmed(own.fence);
            // The key may end before the lease, or not at all: others can shorten and persist it.
            if own.ends_at == ends_at && key_ends_at.is_some_and(|end| end >= ends_at) {
                return Decision::refuse(outcome);
            }
            holders.renew(owner, ends_at);
            Decision::new(outcome, Effect::Hold(holders))
        }
        Some(_) if !holders.admits(owner, limit) => Decision::refuse(Outcome::NotAdmitted),
        None if queued || !holders.admits(owner, limit) => Decision::refuse(Outcome::Busy),
        _ => {
            let fence = fences.next(now, holders.highest());
            holders.join(Holder {
                owner,
                fence,
                limit,
                ends_at,
            });
            Decision::new(Outcome::Acquired(fence), Effect::Hold(holders))
        }
    }
}

/// LOCK.RENEW: the lease ends `ttl` from now, sooner or later than before.
pub fn renew(found: Found, owner: Owner, ttl: Ttl, now: UnixUs) -> Decision {
    let ends_at = now.plus(ttl);
    only_for(
        owner,
        found,
        || now,
        Outcome::Renewed,
        |_| Effect::Expire { ends_at },
        |holders| holders.renew(owner, ends_at),
    )
}

/// LOCK.RELEASE: the lock is free, or the next one's. `now`: asked only where there are several holders, since most
/// releases need no clock.
pub fn release(found: Found, owner: Owner, now: impl FnOnce() -> UnixUs) -> Decision {
    only_for(
        owner,
        found,
        now,
        Outcome::Released,
        |fence| Effect::Hold(Holders::none_after(fence)),
        |holders| holders.leave(owner),
    )
}

/// What RENEW and RELEASE share: only who matches gets what it asks for. `alone`: what happens to a key that the
/// owner does not share, given its fence. `together`: what happens to a list, and whether the owner is in it.
fn only_for(
    owner: Owner,
    found: Found,
    now: impl FnOnce() -> UnixUs,
    outcome: Outcome,
    alone: impl FnOnce(Option<Fence>) -> Effect,
    together: impl FnOnce(&mut Holders) -> bool,
) -> Decision {
    match found {
        Found::Nobody => Decision::refuse(Outcome::NotHeld),
        Found::Another => Decision::refuse(Outcome::NotOwner),
        Found::WrongType => Decision::refuse(Outcome::WrongType),
        Found::Value(bytes) => match is_list(bytes)
            .then(now)
            .and_then(|now| Holders::read(bytes, now))
        {
            Some(holders) if holders.is_empty() => Decision::refuse(Outcome::NotHeld),
            Some(mut holders) => match together(&mut holders) {
                true => Decision::new(outcome, Effect::Hold(holders)),
                false => Decision::refuse(Outcome::NotOwner),
            },
            None => match claim(bytes, owner) {
                Claim::Owner(fence) => Decision::new(outcome, alone(Some(fence))),
                Claim::ByHand(fence) => Decision::new(outcome, alone(fence)),
                Claim::Other => Decision::refuse(Outcome::NotOwner),
            },
        },
    }
}

/// Who still holds the key once these very grants are taken back, and how many of them the value carried; none if
/// it carried none.
pub fn take_back<'g>(
    value: &[u8],
    mut grants: impl Iterator<Item = (Owner<'g>, Fence)>,
    now: UnixUs,
) -> Option<(Holders, usize)> {
    match Holders::read(value, now) {
        Some(mut holders) => {
            let taken = grants.filter(|(owner, fence)| holders.leave_grant(*owner, *fence));
            let taken = taken.count();
            (taken > 0).then_some((holders, taken))
        }
        None => grants
            .find(|(owner, fence)| value == write(*fence, *owner))
            .map(|(_, fence)| (Holders::none_after(Some(fence)), 1)),
    }
}

#[cfg(test)]
mod tests;
