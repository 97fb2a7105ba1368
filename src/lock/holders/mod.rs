//! Several holders of one key: the list that the value of the key is, and who may join it.
//!
//! Pure. One rule decides: *no holder has more company than it allows*. Each holder brings its own limit, so
//! nothing is set up and nothing is left behind; where they differ, the smallest counts.
//!
//! A list is a `+` and then for each holder, in the order of their grants,
//! `<fence>:<end>:<limit>:<weight>:<length>:<owner>`: the numbers in 16, 16, 4, 4 and 3 digits, the end in
//! milliseconds since 1970, the length of the owner in bytes. The key ends with the latest of them. One holder
//! that allows no company is no list but `<fence>:<owner>`, as [`lock::write`](super::write) makes it.

use std::ops::Range;

use super::{FENCE_DIGITS, Fence, MAX_OWNER, Owner, digits, number, write};
use crate::time::{UnixMs, UnixUs};

/// What a list begins with, and no fence does.
const MARK: u8 = b'+';

const END_DIGITS: usize = 16;
const LIMIT_DIGITS: usize = 4;
const WEIGHT_DIGITS: usize = 4;
const LENGTH_DIGITS: usize = 3;

/// Bytes before the owner in a record: the numbers, each with a colon.
const HEAD: usize = FENCE_DIGITS + END_DIGITS + LIMIT_DIGITS + WEIGHT_DIGITS + LENGTH_DIGITS + 5;

/// Fewer bytes are no list: one holder with an owner of one byte.
const SHORTEST: usize = 1 + HEAD + 1;

/// More bytes are no list that we wrote. It bounds what a forged one costs to read.
const LONGEST: usize = 1 + Limit::SHARED.0 as usize * (HEAD + MAX_OWNER);

/// The last end that has [`END_DIGITS`] digits: in the year 318857.
const LAST_END: i64 = 9_999_999_999_999_999;

/// How much of a limit one holder takes. The format has room for others.
const WEIGHT: u16 = 1;

/// How many may hold a key together, in the eyes of one of them, itself counted: 1 to 1,000.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Limit(u16);

impl Limit {
    /// Nobody else.
    pub const EXCLUSIVE: Limit = Limit(1);
    /// As many as a key can have.
    pub const SHARED: Limit = Limit(1_000);

    /// `None` outside of 1 to 1,000.
    pub fn new(number: u64) -> Option<Limit> {
        let number = u16::try_from(number).ok()?;
        (1..=Limit::SHARED.0)
            .contains(&number)
            .then_some(Limit(number))
    }

    pub fn number(self) -> u16 {
        self.0
    }
}

/// One of those who hold a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder<'h> {
    pub owner: Owner<'h>,
    pub fence: Fence,
    pub limit: Limit,
    pub ends_at: UnixMs,
}

/// A holder, in the list.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Record {
    fence: Fence,
    ends_at: UnixMs,
    limit: Limit,
    weight: u16,
    /// Where its owner is in [`Holders::owners`].
    owner: Range<usize>,
}

/// What a key is to hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Value {
    pub bytes: Vec<u8>,
    pub ends_at: UnixMs,
}

/// Those who hold a key together and whose lease has not ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holders {
    living: Vec<Record>,
    /// The owners' bytes, in one piece: a list of a thousand is read without a thousand allocations.
    owners: Vec<u8>,
    highest: Option<Fence>,
}

/// Whether a value of this many bytes can be a list. Shorter ones need not be read, which would change their
/// encoding.
pub fn may_be_list(value_len: usize) -> bool {
    value_len >= SHORTEST
}

/// Whether a value begins as a list, so that it has to be read to know whether it is one.
#[inline]
pub fn is_list(value: &[u8]) -> bool {
    value.first() == Some(&MARK)
}

impl Holders {
    /// Nobody, where this fence was before.
    pub fn none_after(fence: Option<Fence>) -> Holders {
        Holders {
            highest: fence,
            ..Holders::default()
        }
    }

    pub fn one(holder: Holder) -> Holders {
        let mut holders = Holders::default();
        holders.join(holder);
        holders
    }

    /// Reads a list, without those who have ended by now; none if the value is no list from end to end.
    // Inlined as far as it concerns exclusive locks.
    #[inline]
    pub fn read(value: &[u8], now: UnixUs) -> Option<Holders> {
        match value {
            [MARK, records @ ..] => Holders::read_records(records, now),
            _ => None,
        }
    }

    fn read_records(mut rest: &[u8], now: UnixUs) -> Option<Holders> {
        if !(SHORTEST..=LONGEST).contains(&(1 + rest.len())) {
            return None;
        }
        let mut holders = Holders::default();
        let mut records = 0;
        while !rest.is_empty() {
            holders.read_record(&mut rest, now)?;
            records += 1;
        }
        (records <= Limit::SHARED.0).then_some(holders)
    }

    fn read_record(&mut self, rest: &mut &[u8], now: UnixUs) -> Option<()> {
        let fence = Fence::new(field(rest, FENCE_DIGITS)?)?;
        let ends_at = UnixMs(field(rest, END_DIGITS)?.cast_signed());
        let limit = Limit::new(field(rest, LIMIT_DIGITS)?)?;
        let weight = Limit::new(field(rest, WEIGHT_DIGITS)?)?.0;
        let length = field(rest, LENGTH_DIGITS)?;
        let (owner, after) = rest.split_at_checked(usize::try_from(length).ok()?)?;
        let owner = Owner::new(owner).filter(|_| limit > Limit::EXCLUSIVE)?;
        *rest = after;
        // A fence that cannot be ours must not hide the highest of those that can.
        if fence.is_at_most_a_day_ahead(now) {
            self.highest = self.highest.max(Some(fence));
        }
        if ends_at >= now.ms() {
            self.push(owner, fence, limit, weight, ends_at);
        }
        Some(())
    }

    fn push(&mut self, owner: Owner, fence: Fence, limit: Limit, weight: u16, ends_at: UnixMs) {
        let start = self.owners.len();
        self.owners.extend_from_slice(owner.bytes());
        self.living.push(Record {
            fence,
            ends_at: writable(ends_at),
            limit,
            weight,
            owner: start..self.owners.len(),
        });
    }

    fn owner(&self, record: &Record) -> &[u8] {
        &self.owners[record.owner.clone()]
    }

    /// Nobody holds the key any more.
    pub fn is_empty(&self) -> bool {
        self.living.is_empty()
    }

    /// In the order of their grants.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Holder<'_>> {
        self.living.iter().map(|record| Holder {
            owner: Owner(self.owner(record)),
            fence: record.fence,
            limit: record.limit,
            ends_at: record.ends_at,
        })
    }

    pub fn find(&self, owner: Owner) -> Option<Holder<'_>> {
        self.iter().find(|holder| holder.owner == owner)
    }

    /// The rule. What the owner itself holds does not count: it would be replaced.
    pub fn admits(&self, owner: Owner, limit: Limit) -> bool {
        let others = self
            .living
            .iter()
            .filter(|record| self.owner(record) != owner.bytes());
        let (weight, least) = others.fold((u32::from(WEIGHT), limit), |(weight, least), record| {
            (weight + u32::from(record.weight), least.min(record.limit))
        });
        weight <= u32::from(least.0)
    }

    /// Adds a holder, in place of what its owner held before.
    pub fn join(&mut self, holder: Holder) {
        let Holder {
            owner,
            fence,
            limit,
            ends_at,
        } = holder;
        self.leave(owner);
        self.push(owner, fence, limit, WEIGHT, ends_at);
        self.highest = self.highest.max(Some(fence));
    }

    /// Takes an owner out. Returns whether it held the key.
    pub fn leave(&mut self, owner: Owner) -> bool {
        self.remove(|of, _| of == owner.bytes())
    }

    /// Takes out what an owner holds under this fence. Returns whether it did.
    pub fn leave_grant(&mut self, owner: Owner, fence: Fence) -> bool {
        self.remove(|of, record| of == owner.bytes() && record.fence == fence)
    }

    fn remove(&mut self, matches: impl Fn(&[u8], &Record) -> bool) -> bool {
        let (before, owners) = (self.living.len(), &self.owners);
        self.living
            .retain(|record| !matches(&owners[record.owner.clone()], record));
        self.living.len() < before
    }

    /// The lease of this owner ends then. Returns whether it holds the key.
    pub fn renew(&mut self, owner: Owner, ends_at: UnixMs) -> bool {
        let owners = &self.owners;
        let of_owner = |record: &&mut Record| owners[record.owner.clone()] == *owner.bytes();
        let renewed = self.living.iter_mut().filter(of_owner);
        renewed
            .map(|record| record.ends_at = writable(ends_at))
            .count()
            > 0
    }

    /// The fence that the next one must be above. Those who have ended count too.
    pub fn highest(&self) -> Option<Fence> {
        self.highest
    }

    /// When the first of the leases ends.
    pub fn next_end(&self) -> Option<UnixMs> {
        self.living.iter().map(|record| record.ends_at).min()
    }

    /// When the last of the leases ends, and so the key.
    pub fn last_end(&self) -> Option<UnixMs> {
        self.living.iter().map(|record| record.ends_at).max()
    }

    /// The smallest of the limits.
    pub fn limit(&self) -> Option<Limit> {
        self.living.iter().map(|record| record.limit).min()
    }

    /// What the key is to hold; none if it is to go.
    pub fn value(&self) -> Option<Value> {
        let ends_at = self.last_end()?;
        let bytes = match &self.living[..] {
            [only] if only.limit == Limit::EXCLUSIVE => write(only.fence, Owner(self.owner(only))),
            _ => self.list(),
        };
        Some(Value { bytes, ends_at })
    }

    fn list(&self) -> Vec<u8> {
        let mut list = Vec::with_capacity(1 + self.living.len() * HEAD + self.owners.len());
        list.push(MARK);
        for record in &self.living {
            let owner = self.owner(record);
            for (number, digits) in [
                (record.fence.0, FENCE_DIGITS),
                (record.ends_at.0.cast_unsigned(), END_DIGITS),
                (record.limit.0.into(), LIMIT_DIGITS),
                (record.weight.into(), WEIGHT_DIGITS),
                (owner.len() as u64, LENGTH_DIGITS),
            ] {
                put_field(&mut list, number, digits);
            }
            list.extend_from_slice(owner);
        }
        list
    }
}

/// This end, or the nearest that has [`END_DIGITS`] digits.
fn writable(ends_at: UnixMs) -> UnixMs {
    UnixMs(ends_at.0.clamp(0, LAST_END))
}

/// Reads so many digits and a colon.
fn field(rest: &mut &[u8], digits: usize) -> Option<u64> {
    let (field, after) = rest.split_at_checked(digits)?;
    *rest = after.strip_prefix(b":")?;
    number(field)
}

fn put_field(list: &mut Vec<u8>, number: u64, len: usize) {
    let start = list.len();
    list.resize(start + len, 0);
    digits(&mut list[start..], number);
    list.push(b':');
}

#[cfg(test)]
mod tests;
