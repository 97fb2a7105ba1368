//! Several holders of one key: the list that the value of the key is, and who may join it.
//!
//! Pure. One rule decides: *no holder has more company than it allows*. Each holder brings its own limit, so
//! nothing is set up and nothing is left behind; where they differ, the smallest counts.
//!
//! A list is a `+` and then for each holder, in the order of their grants,
//! `<fence>:<end>:<limit>:<weight>:<length>:<owner>`: the numbers in 16, 16, 4, 4 and 3 digits, the end in
//! milliseconds since 1970, the length of the owner in bytes. The key ends with the latest of them. One holder
//! that allows no company is no list but `<fence>:<owner>`, as [`lock::write`](super::write) makes it.

use std::ops::{Range, RangeInclusive};

use super::{Fence, MAX_OWNER, Owner, digits, write};
use crate::time::{UnixMs, UnixUs};

/// What a list begins with, and no fence does.
const MARK: u8 = b'+';

/// What is before the owner in a record: each 0 stands for any digit.
const HEAD_FORM: &[u8; HEAD] = b"0000000000000000:0000000000000000:0000:0000:000:";
const HEAD: usize = 48;

// Where the numbers are in it.
const FENCE: Range<usize> = 0..16;
const END: Range<usize> = 17..33;
const LIMIT: Range<usize> = 34..38;
const WEIGHT: Range<usize> = 39..43;
const LENGTH: Range<usize> = 44..47;

// What they can be; who is alone has no list.
const FENCES: RangeInclusive<Sixteen> =
    Sixteen::of(*b"0000000000000001")..=Sixteen::of(*b"9007199254740991");
const LIMITS: RangeInclusive<Four> = Four::of(*b"0002")..=Four::of(*b"1000");
const WEIGHTS: RangeInclusive<Four> = Four::of(*b"0001")..=Four::of(*b"1000");

const LONGEST_RECORD: usize = HEAD + MAX_OWNER;

/// Fewer bytes are no list: one holder with an owner of one byte.
const SHORTEST: usize = 1 + HEAD + 1;

/// More bytes are no list that we wrote. It bounds what a forged one costs to read.
const LONGEST: usize = 1 + Limit::SHARED.0 as usize * LONGEST_RECORD;

/// The last end that there is room for: in the year 318857.
const LAST_END: i64 = 9_999_999_999_999_999;

/// How much of a limit one holder takes. The format has room for others.
const ONE: u64 = 1;

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

/// What a key is to hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Value {
    pub bytes: Vec<u8>,
    pub ends_at: UnixMs,
}

impl Value {
    /// Of a key with one holder that allows no company.
    pub fn exclusive(fence: Fence, owner: Owner, ends_at: UnixMs) -> Value {
        let bytes = write(fence, owner);
        Value { bytes, ends_at }
    }
}

/// Those who hold a key together and whose lease has not ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holders {
    /// A list of them, or nothing. Kept as it is written, since most of it stays as it was read.
    list: Vec<u8>,
    highest: Option<Fence>,
}

/// A record of a list.
#[derive(Clone, Copy)]
struct Record<'l> {
    head: &'l [u8; HEAD],
    owner: &'l [u8],
}

impl<'l> Record<'l> {
    /// The first of these records, and the others; none if they do not begin with one.
    fn split(records: &'l [u8]) -> Option<(Record<'l>, &'l [u8])> {
        let (head, rest) = records.split_first_chunk()?;
        let (owner, rest) = rest.split_at_checked(owner_len(head))?;
        Some((Record { head, owner }, rest))
    }

    fn len(&self) -> usize {
        HEAD + self.owner.len()
    }

    fn fence(&self) -> Sixteen {
        Sixteen::of(self.digits(FENCE))
    }

    fn end(&self) -> Sixteen {
        Sixteen::of(self.digits(END))
    }

    fn limit(&self) -> Four {
        Four::of(self.digits(LIMIT))
    }

    fn weight(&self) -> Four {
        Four::of(self.digits(WEIGHT))
    }

    fn digits<const WIDTH: usize>(&self, of: Range<usize>) -> [u8; WIDTH] {
        *self.head[of].first_chunk().expect("it is as wide")
    }

    /// Whether it could be one of ours.
    fn is_well_formed(&self) -> bool {
        let of_form = |(byte, form): (&u8, &u8)| match form {
            b'0' => byte.is_ascii_digit(),
            _ => byte == form,
        };
        let bytes = self.head.iter().zip(HEAD_FORM).map(of_form);
        // Not `all`: that would look at one byte after the other.
        bytes.fold(true, |all, one| all & one)
            && FENCES.contains(&self.fence())
            && LIMITS.contains(&self.limit())
            && WEIGHTS.contains(&self.weight())
            && (1..=MAX_OWNER).contains(&self.owner.len())
    }

    fn holder(&self) -> Holder<'l> {
        Holder {
            owner: Owner(self.owner),
            fence: self.fence().into(),
            limit: self.limit().into(),
            ends_at: self.end().into(),
        }
    }
}

fn owner_len(head: &[u8; HEAD]) -> usize {
    number(&head[LENGTH]) as usize
}

/// Reads digits. Of other bytes it makes some number.
fn number(digits: &[u8]) -> u64 {
    let digit = |byte: &u8| u64::from(byte & 0x0f);
    digits.iter().fold(0, |sum, byte| 10 * sum + digit(byte))
}

/// A number as it is written, in sixteen digits, the first in the highest byte. So they compare as their numbers do,
/// and most of a list is never turned into numbers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Sixteen(u128);

/// The same in four digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Four(u32);

impl Sixteen {
    const fn of(digits: [u8; 16]) -> Sixteen {
        Sixteen(u128::from_be_bytes(digits))
    }

    /// In each half four pairs at once, then two pairs of them, then one.
    fn number(self) -> u64 {
        let half = |digits: u64| {
            let ones = digits & 0x0f0f_0f0f_0f0f_0f0f;
            let twos = (10 * (ones >> 8) + ones) & 0x00ff_00ff_00ff_00ff;
            let fours = (100 * (twos >> 16) + twos) & 0x0000_ffff_0000_ffff;
            (10_000 * (fours >> 32) + fours) & 0xffff_ffff
        };
        100_000_000 * half((self.0 >> 64) as u64) + half(self.0 as u64)
    }
}

impl Four {
    const fn of(digits: [u8; 4]) -> Four {
        Four(u32::from_be_bytes(digits))
    }

    fn number(self) -> u64 {
        number(&self.0.to_be_bytes())
    }
}

impl From<Sixteen> for Fence {
    fn from(written: Sixteen) -> Fence {
        Fence(written.number())
    }
}

impl From<Sixteen> for UnixMs {
    fn from(written: Sixteen) -> UnixMs {
        UnixMs(written.number().cast_signed())
    }
}

impl From<Four> for Limit {
    fn from(written: Four) -> Limit {
        Limit(written.number() as u16)
    }
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
            [MARK, ..] => Holders::read_records(value, now),
            _ => None,
        }
    }

    fn read_records(value: &[u8], now: UnixUs) -> Option<Holders> {
        if !(SHORTEST..=LONGEST).contains(&value.len()) {
            return None;
        }
        let (mut highest, mut first_end) = (Sixteen::of([b'0'; 16]), Sixteen::of([b'9'; 16]));
        let mut count = 0;
        let mut rest = &value[1..];
        while !rest.is_empty() {
            let (record, after) = Record::split(rest).filter(|(of, _)| of.is_well_formed())?;
            highest = highest.max(record.fence());
            first_end = first_end.min(record.end());
            count += 1;
            rest = after;
        }
        if count > Limit::SHARED.0 {
            return None;
        }
        let mut list = Vec::with_capacity(value.len() + LONGEST_RECORD);
        list.extend_from_slice(value);
        let highest = Fence::from(highest);
        let mut holders = Holders {
            list,
            highest: Some(highest),
        };
        // A fence that cannot be ours must not hide the highest of those that can.
        if !highest.is_at_most_a_day_ahead(now) {
            let fences = holders.records().map(|record| Fence::from(record.fence()));
            holders.highest = fences
                .filter(|fence| fence.is_at_most_a_day_ahead(now))
                .max();
        }
        if UnixMs::from(first_end) < now.ms() {
            holders.remove(|record| UnixMs::from(record.end()) < now.ms());
        }
        Some(holders)
    }

    /// In the order of their grants.
    fn records(&self) -> impl Iterator<Item = Record<'_>> {
        let mut rest = self.list.get(1..).unwrap_or_default();
        std::iter::from_fn(move || {
            let (record, after) = Record::split(rest)?;
            rest = after;
            Some(record)
        })
    }

    /// Nobody holds the key any more.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// In the order of their grants.
    pub fn iter(&self) -> impl Iterator<Item = Holder<'_>> {
        self.records().map(|record| record.holder())
    }

    pub fn find(&self, owner: Owner) -> Option<Holder<'_>> {
        let own = self.records().find(|record| record.owner == owner.bytes());
        own.map(|record| record.holder())
    }

    /// The rule. What the owner itself holds does not count: it would be replaced.
    pub fn admits(&self, owner: Owner, limit: Limit) -> bool {
        let others = self
            .records()
            .filter(|record| record.owner != owner.bytes());
        let (weight, least) = others.fold((ONE, limit), |(weight, least), record| {
            let weight = weight + record.weight().number();
            (weight, least.min(record.limit().into()))
        });
        weight <= u64::from(least.0)
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
        self.list.reserve(1 + HEAD + owner.bytes().len());
        if self.is_empty() {
            self.list.push(MARK);
        }
        let mut head = *HEAD_FORM;
        digits(&mut head[FENCE], fence.0);
        digits(&mut head[END], writable(ends_at));
        digits(&mut head[LIMIT], limit.0.into());
        digits(&mut head[WEIGHT], ONE);
        digits(&mut head[LENGTH], owner.bytes().len() as u64);
        self.list.extend_from_slice(&head);
        self.list.extend_from_slice(owner.bytes());
        self.highest = self.highest.max(Some(fence));
    }

    /// Takes an owner out. Returns whether it held the key.
    pub fn leave(&mut self, owner: Owner) -> bool {
        self.remove(|record| record.owner == owner.bytes())
    }

    /// Takes out what an owner holds under this fence. Returns whether it did.
    pub fn leave_grant(&mut self, owner: Owner, fence: Fence) -> bool {
        self.remove(|record| record.owner == owner.bytes() && fence == record.fence().into())
    }

    fn remove(&mut self, matches: impl Fn(Record) -> bool) -> bool {
        let before = self.list.len();
        let (mut kept, mut at) = (1, 1);
        while let Some((record, _)) = self.list.get(at..).and_then(Record::split) {
            let (goes, len) = (matches(record), record.len());
            if !goes {
                if kept < at {
                    self.list.copy_within(at..at + len, kept);
                }
                kept += len;
            }
            at += len;
        }
        self.list.truncate(if kept > 1 { kept } else { 0 });
        self.list.len() < before
    }

    /// The lease of this owner ends then. Returns whether it holds the key.
    pub fn renew(&mut self, owner: Owner, ends_at: UnixMs) -> bool {
        let mut renewed = false;
        let mut rest = self.list.get_mut(1..).unwrap_or_default();
        while let Some((head, after)) = rest.split_first_chunk_mut() {
            let (of, after) = after.split_at_mut(owner_len(head));
            if of == owner.bytes() {
                digits(&mut head[END], writable(ends_at));
                renewed = true;
            }
            rest = after;
        }
        renewed
    }

    /// The fence that the next one must be above. Those who have ended count too.
    pub fn highest(&self) -> Option<Fence> {
        self.highest
    }

    /// When the first of the leases ends.
    pub fn next_end(&self) -> Option<UnixMs> {
        let first = self.records().map(|record| record.end()).min()?;
        Some(first.into())
    }

    /// When the last of the leases ends, and so the key.
    pub fn last_end(&self) -> Option<UnixMs> {
        let last = self.records().map(|record| record.end()).max()?;
        Some(last.into())
    }

    /// The smallest of the limits.
    pub fn limit(&self) -> Option<Limit> {
        let least = self.records().map(|record| record.limit()).min()?;
        Some(least.into())
    }

    /// What the key is to hold; none if it is to go.
    pub fn value(self) -> Option<Value> {
        let ends_at = self.last_end()?;
        match Record::split(&self.list[1..]) {
            Some((only, [])) if Limit::from(only.limit()) == Limit::EXCLUSIVE => {
                let owner = Owner(only.owner);
                Some(Value::exclusive(only.fence().into(), owner, ends_at))
            }
            _ => Some(Value {
                bytes: self.list,
                ends_at,
            }),
        }
    }
}

/// This end, or the nearest that there is room for.
fn writable(ends_at: UnixMs) -> u64 {
    ends_at.0.clamp(0, LAST_END).cast_unsigned()
}

#[cfg(test)]
mod tests;
