//! Random LOCK commands among random commands of Redis on the same few keys: after each, the server and
//! a model that was written from the manual agree on the reply, on every value and on every deadline.
//!
//! `make model` runs a million commands. `LOCKKEEPER_MODEL_SEED` repeats a run,
//! `LOCKKEEPER_MODEL_COMMANDS` sets its length.

use std::collections::HashMap;
use std::ops::RangeInclusive;

use fastrand::Rng;
use redis::{Cmd, Connection, pipe};
use testkit::*;

const KEYS: [&str; 3] = ["a", "b", "c"];

/// How many commands go out together.
const BATCH: usize = 50;

const DAY_US: i64 = 86_400_000_000;
const MAX: i64 = (1 << 53) - 1;

fn pick<T: Clone>(random: &mut Rng, from: &[T]) -> T {
    random
        .choice(from)
        .expect("something to choose from")
        .clone()
}

type Bytes = Vec<u8>;

#[derive(Clone, Debug)]
enum Op {
    /// Key, owner, ttl, limit, wait.
    Acquire(&'static str, Bytes, i64, i64, Option<i64>),
    Renew(&'static str, Bytes, i64),
    Release(&'static str, Bytes),
    Info(&'static str),
    /// One of the three with an argument that is refused under this code word.
    Wrong(Vec<Bytes>, &'static str),
    Set(&'static str, Bytes),
    SetFor(&'static str, Bytes, i64),
    SetKeepTtl(&'static str, Bytes),
    /// As locks are taken by hand.
    SetIfFree(&'static str, Bytes, i64),
    GetSet(&'static str, Bytes),
    GetDel(&'static str),
    Del(&'static str),
    Unlink(&'static str),
    PExpire(&'static str, i64),
    Persist(&'static str),
    Rename(&'static str, &'static str),
    Copy(&'static str, &'static str),
    Append(&'static str, Bytes),
    Overwrite(&'static str, Bytes),
    Incr(&'static str),
    LPush(&'static str),
    LPop(&'static str),
    FlushDb,
}

impl Op {
    fn command(&self) -> Cmd {
        let mut command = Cmd::new();
        match self {
            Op::Acquire(key, owner, ttl, limit, wait) => {
                command.arg("LOCK.ACQUIRE").arg(key).arg(owner).arg(ttl);
                match limit {
                    1 => {}
                    1_000 => _ = command.arg("SHARED"),
                    _ => _ = command.arg("LIMIT").arg(limit),
                }
                if let Some(wait) = wait {
                    command.arg("WAIT").arg(wait);
                }
                &mut command
            }
            Op::Renew(key, owner, ttl) => command.arg("LOCK.RENEW").arg(key).arg(owner).arg(ttl),
            Op::Release(key, owner) => command.arg("LOCK.RELEASE").arg(key).arg(owner),
            Op::Info(key) => command.arg("LOCK.INFO").arg(key),
            Op::Wrong(args, _) => command.arg(args),
            Op::Set(key, value) => command.arg("SET").arg(key).arg(value),
            Op::SetFor(key, value, ms) => command.arg("SET").arg(key).arg(value).arg("PX").arg(ms),
            Op::SetKeepTtl(key, value) => command.arg("SET").arg(key).arg(value).arg("KEEPTTL"),
            Op::SetIfFree(key, value, ms) => {
                let set = command.arg("SET").arg(key).arg(value);
                set.arg("NX").arg("PX").arg(ms)
            }
            Op::GetSet(key, value) => command.arg("GETSET").arg(key).arg(value),
            Op::GetDel(key) => command.arg("GETDEL").arg(key),
            Op::Del(key) => command.arg("DEL").arg(key),
            Op::Unlink(key) => command.arg("UNLINK").arg(key),
            Op::PExpire(key, ms) => command.arg("PEXPIRE").arg(key).arg(ms),
            Op::Persist(key) => command.arg("PERSIST").arg(key),
            Op::Rename(from, to) => command.arg("RENAME").arg(from).arg(to),
            Op::Copy(from, to) => command.arg("COPY").arg(from).arg(to).arg("REPLACE"),
            Op::Append(key, value) => command.arg("APPEND").arg(key).arg(value),
            Op::Overwrite(key, value) => command.arg("SETRANGE").arg(key).arg(0).arg(value),
            Op::Incr(key) => command.arg("INCR").arg(key),
            Op::LPush(key) => command.arg("LPUSH").arg(key).arg("x"),
            Op::LPop(key) => command.arg("LPOP").arg(key),
            Op::FlushDb => command.arg("FLUSHDB"),
        };
        command
    }
}

/// The next command. `values` are those that the keys had lately: who gives a whole value matches, too.
fn next_op(random: &mut Rng, values: &[Bytes], now_us: i64) -> Op {
    let key = pick(random, &KEYS);
    let to = pick(random, &KEYS);
    let ttl = 1000 * pick(random, &[3_600, 7_200, 100_000, MAX / 1000 - 2_000_000_000]);
    let name = match random.usize(..8) {
        0 => b"12345".to_vec(),
        1 => b"0000000000000001:x".to_vec(),
        2 => vec![0xff; 512],
        3 if !values.is_empty() => pick(random, values),
        4 => b"x".to_vec(),
        _ => pick(random, &[&b"alice"[..], b"bob", b"carol"]).to_vec(),
    };
    // A value of ours may be too long for an owner; it is refused as such.
    let owner: Bytes = name.iter().copied().take(512).collect();
    let owner = if owner.is_empty() {
        b"y".to_vec()
    } else {
        owner
    };
    let forged = pick(
        random,
        &[
            0,
            1,
            now_us,
            now_us + DAY_US / 2,
            now_us + 2 * DAY_US,
            MAX,
            MAX + 1,
        ],
    );
    let limit = pick(random, &[1, 1, 1, 2, 3, 1_000]);
    let value = match random.usize(..6) {
        0 => lock_value(forged, &owner),
        2 | 3 => forged_list(random, forged, &owner, now_us),
        1 => b"9".to_vec(),
        _ => name.clone(),
    };
    match random.usize(..40) {
        0..8 => {
            let wait = pick(random, &[None, None, Some(0)]);
            Op::Acquire(key, owner, ttl, limit, wait)
        }
        8..13 => Op::Renew(key, owner, ttl),
        13..18 => Op::Release(key, owner),
        18 => Op::Info(key),
        // A wait of 1 ms in the middle of a pipeline: what follows must wait for it.
        19 if random.usize(..20) == 0 => Op::Acquire(key, owner, ttl, limit, Some(1)),
        19 => wrong(random, key),
        20 => Op::Set(key, value),
        21 => Op::SetFor(key, value, ttl.min(1 << 40)),
        22 => Op::SetKeepTtl(key, value),
        23..25 => Op::SetIfFree(key, value, ttl.min(1 << 40)),
        25 => Op::GetSet(key, value),
        26 => Op::GetDel(key),
        27 => Op::Del(key),
        28 => Op::Unlink(key),
        29..31 => Op::PExpire(key, pick(random, &[ttl.min(1 << 40), 5_000_000, 0, -1])),
        31 => Op::Persist(key),
        32 => Op::Rename(key, to),
        33 => Op::Copy(key, to),
        34 => Op::Append(key, pick(random, &[&b"x"[..], b"", b":"]).to_vec()),
        35 => Op::Overwrite(key, pick(random, &[&b"1"[..], b"x", b"00"]).to_vec()),
        36 => Op::Incr(key),
        37 => Op::LPush(key),
        38 => Op::LPop(key),
        _ if random.usize(..10) == 0 => Op::FlushDb,
        _ => Op::Persist(key),
    }
}

/// A list of up to three, some of whose leases have ended; now and then a damaged one.
fn forged_list(random: &mut Rng, fence: i64, owner: &[u8], now_us: i64) -> Bytes {
    let record = |random: &mut Rng| Record {
        fence: pick(random, &[fence, 1, 2, now_us]),
        ends_at: pick(
            random,
            &[0, 1, now_us / 1000 - 1, now_us / 1000 + 5_000_000],
        ),
        limit: pick(random, &[2, 2, 3, 1_000, 1]),
        weight: pick(random, &[1, 1, 1, 2, 0]),
        owner: pick(random, &[owner, b"alice", b"bob"]).to_vec(),
    };
    let records: Vec<Record> = (0..random.usize(1..4)).map(|_| record(random)).collect();
    list_value(&records)
}

fn wrong(random: &mut Rng, key: &str) -> Op {
    let cases: [(&[&str], &str); 12] = [
        (&["LOCK.ACQUIRE", key, "", "1"], "BADOWNER"),
        (&["LOCK.ACQUIRE", key, "alice", "0"], "BADTTL"),
        (
            &["LOCK.ACQUIRE", key, "alice", "9007199254740992"],
            "BADTTL",
        ),
        (&["LOCK.ACQUIRE", key, "alice", "1", "WAIT"], "BADOPTION"),
        (&["LOCK.ACQUIRE", key, "alice", "1", "NX"], "BADOPTION"),
        (
            &["LOCK.ACQUIRE", key, "alice", "1", "SHARED", "LIMIT", "2"],
            "BADOPTION",
        ),
        (
            &["LOCK.ACQUIRE", key, "alice", "1", "LIMIT", "1001"],
            "BADLIMIT",
        ),
        (
            &["LOCK.ACQUIRE", key, "alice", "1", "WAIT", "-1"],
            "BADTIMEOUT",
        ),
        (&["LOCK.RENEW", key, "alice", "+5"], "BADTTL"),
        (&["LOCK.RENEW", key, "alice"], "ERR"),
        (&["LOCK.RELEASE", key, ""], "BADOWNER"),
        (&["LOCK.RELEASE", key], "ERR"),
    ];
    let (args, code) = pick(random, &cases);
    Op::Wrong(
        args.iter().map(|arg| arg.as_bytes().to_vec()).collect(),
        code,
    )
}

#[derive(Clone, Debug, PartialEq)]
enum Content {
    Text(Bytes),
    /// Of this many elements.
    List(i64),
}

#[derive(Clone, Debug, PartialEq)]
struct Entry {
    content: Content,
    /// Unix time in milliseconds.
    ends_at: Option<i64>,
}

/// Between which two readings of its own clock the server carried a command out, in microseconds.
type When = (i64, i64);

/// Where a deadline may be. It is as wide as the server took between two readings of its clock around
/// the command, and a clock in milliseconds cannot show less: no tolerance is guessed.
type Deadline = Option<RangeInclusive<i64>>;

fn after(when: When, ms: i64) -> Deadline {
    Some(when.0 / 1000 + ms..=when.1 / 1000 + ms)
}

fn exactly(ends_at: Option<i64>) -> Deadline {
    ends_at.map(|end| end..=end)
}

/// The later of the two, which are both deadlines of one key.
fn later(before: Option<i64>, new: RangeInclusive<i64>) -> Deadline {
    let before = before.unwrap_or(i64::MIN);
    Some(before.max(*new.start())..=before.max(*new.end()))
}

/// What a reply must be.
#[derive(Debug)]
enum Expected {
    Exactly(Reply),
    /// A new fence.
    Between(RangeInclusive<i64>),
    /// An error with this code word.
    Code(&'static str),
    /// LOCK.INFO: owner, fence, deadline.
    Info(Bytes, Option<i64>, Option<i64>),
    /// LOCK.INFO of a list: holders, deadline.
    List(Vec<Record>, Option<i64>),
}

/// One of several holders.
#[derive(Clone, Debug, PartialEq)]
struct Record {
    fence: i64,
    /// Unix time in milliseconds.
    ends_at: i64,
    limit: i64,
    weight: i64,
    owner: Bytes,
}

/// A list of ours, by the manual.
fn parse_list(value: &[u8]) -> Option<Vec<Record>> {
    let mut rest = value.strip_prefix(b"+")?;
    let mut records = vec![];
    while !rest.is_empty() {
        let mut field = |digits: usize, from: i64, to: i64| {
            let (number, after) = (rest.get(..digits)?, rest.get(digits..)?);
            rest = after.strip_prefix(b":")?;
            let is_digits = number.iter().all(u8::is_ascii_digit);
            let number: i64 = std::str::from_utf8(number).ok()?.parse().ok()?;
            (is_digits && (from..=to).contains(&number)).then_some(number)
        };
        let fence = field(16, 1, MAX)?;
        let ends_at = field(16, 0, i64::MAX)?;
        let (limit, weight) = (field(4, 2, 1_000)?, field(4, 1, 1_000)?);
        let length = field(3, 1, 512)? as usize;
        let owner = rest.get(..length)?.to_vec();
        rest = &rest[length..];
        records.push(Record {
            fence,
            ends_at,
            limit,
            weight,
            owner,
        });
    }
    (1..=1_000).contains(&records.len()).then_some(records)
}

/// What a key with these holders has.
fn list_value(records: &[Record]) -> Bytes {
    let mut value = b"+".to_vec();
    for record in records {
        let (end, length) = (record.ends_at, record.owner.len());
        let numbers = format!(
            "{:016}:{end:016}:{:04}:{:04}:{length:03}:",
            record.fence, record.limit, record.weight
        );
        value.extend_from_slice(numbers.as_bytes());
        value.extend_from_slice(&record.owner);
    }
    value
}

/// The rule: whether nobody would have more company than it allows.
fn admits(others: &[Record], limit: i64) -> bool {
    let weight: i64 = others.iter().map(|record| record.weight).sum();
    let limits = others.iter().map(|record| record.limit);
    weight < limits.chain([limit]).min().unwrap()
}

/// What the server shows of the key of a command, after it: of this only the end of a new lease is taken,
/// which must be where the model expects it.
type Shown = (Option<Bytes>, i64);

/// A value of ours, by the manual.
fn parse(value: &[u8]) -> Option<(i64, &[u8])> {
    let (digits, owner) = (value.get(..16)?, value.get(17..)?);
    let is_ours = digits.iter().all(u8::is_ascii_digit)
        && value[16] == b':'
        && (1..=512).contains(&owner.len());
    let fence = std::str::from_utf8(digits).ok()?.parse().ok()?;
    (is_ours && (1..=MAX).contains(&fence)).then_some((fence, owner))
}

impl Op {
    /// The key of a command of ours.
    fn key(&self) -> Option<&'static str> {
        match self {
            Op::Acquire(key, ..) | Op::Renew(key, ..) | Op::Release(key, _) => Some(key),
            _ => None,
        }
    }
}

/// The server as the manual describes it.
#[derive(Default)]
struct Model {
    keys: HashMap<&'static str, Entry>,
    /// Between which the highest fence is that counts for all keys.
    last: Option<(i64, i64)>,
}

impl Model {
    fn text(&self, key: &str) -> Option<&Bytes> {
        match &self.keys.get(key)?.content {
            Content::Text(value) => Some(value),
            Content::List(_) => None,
        }
    }

    fn is_list(&self, key: &str) -> bool {
        self.keys.contains_key(key) && self.text(key).is_none()
    }

    fn ends_at(&self, key: &str) -> Option<i64> {
        self.keys.get(key)?.ends_at
    }

    fn matches(&self, key: &str, owner: &[u8]) -> Option<bool> {
        let value = self.text(key)?;
        let named = parse(value).is_some_and(|(_, holder)| holder == owner);
        Some(named || value == owner)
    }

    /// The fence of a new grant.
    fn next_fence(&mut self, when: When, replaced: Option<i64>) -> RangeInclusive<i64> {
        // A server that was just loaded begins a second ahead of its clock, within the patience of a test.
        let patience = PATIENCE.as_micros() as i64;
        let last = self.last.unwrap_or((0, when.1 + 1_000_000 + patience));
        let next = (when.0.max(last.0 + 1), when.1.max(last.1 + 1));
        self.last = Some(next);
        match replaced {
            Some(fence) if fence <= when.0 + DAY_US => {
                next.0.max(fence + 1)..=next.1.max(fence + 1)
            }
            _ => next.0..=next.1,
        }
    }

    fn put(&mut self, key: &'static str, value: Bytes, ends_at: Deadline) -> Deadline {
        let content = Content::Text(value);
        // The very deadline is filled in when the server has replied.
        self.keys.insert(
            key,
            Entry {
                content,
                ends_at: None,
            },
        );
        ends_at
    }

    /// Gives the key to these holders, the newest of which ends somewhere in this range, where the server
    /// shows it. The deadline that the key has then.
    fn hold(
        &mut self,
        key: &'static str,
        mut records: Vec<Record>,
        newest: (&[u8], RangeInclusive<i64>),
        shown: &Shown,
    ) -> Deadline {
        let (owner, range) = newest;
        let alone = matches!(&records[..], [only] if only.limit == 1);
        let shown_end = match alone {
            true => shown.1,
            false => {
                let shown = shown.0.as_deref().and_then(parse_list).unwrap_or_default();
                let of_owner = shown.iter().rfind(|record| record.owner == owner);
                of_owner.map_or(0, |record| record.ends_at)
            }
        };
        // A wrong end makes another value than the server has.
        let end = shown_end.clamp(*range.start(), *range.end());
        let of_owner = records.iter_mut().filter(|record| record.owner == owner);
        of_owner.for_each(|record| record.ends_at = end);
        let latest = records.iter().map(|record| record.ends_at).max();
        let value = match &records[..] {
            [only] if alone => lock_value(only.fence, &only.owner),
            _ => list_value(&records),
        };
        self.put(key, value, exactly(latest))
    }

    /// The living holders of a list, and the highest of its fences that can be real.
    fn list(&self, key: &str, when: When) -> Option<(Vec<Record>, Option<i64>)> {
        let mut records = parse_list(self.text(key)?)?;
        let fences = records.iter().map(|record| record.fence);
        let highest = fences.filter(|fence| *fence <= when.0 + DAY_US).max();
        records.retain(|record| record.ends_at >= when.1 / 1000);
        Some((records, highest))
    }

    /// Whether any key has several holders.
    fn has_several(&self, when: When) -> bool {
        KEYS.iter().any(|key| {
            self.list(key, when)
                .is_some_and(|(living, _)| living.len() > 1)
        })
    }

    /// LOCK.ACQUIRE where it is a new grant beside these, in place of what the owner had until `before`.
    #[expect(clippy::too_many_arguments)]
    fn grant(
        &mut self,
        (key, owner, ttl, limit): (&'static str, &[u8], i64, i64),
        mut others: Vec<Record>,
        before: Option<i64>,
        replaced: Option<i64>,
        when: When,
        actual: &Reply,
        shown: &Shown,
    ) -> (Expected, Option<(&'static str, Deadline)>) {
        let fence = self.next_fence(when, replaced);
        let Ok(Value::Int(given)) = *actual else {
            return (Expected::Between(fence), None);
        };
        others.push(Record {
            fence: given,
            ends_at: 0,
            limit,
            weight: 1,
            owner: owner.to_vec(),
        });
        let end = later(before, after(when, ttl).unwrap()).unwrap();
        let deadline = self.hold(key, others, (owner, end), shown);
        if replaced.is_none() {
            self.last = Some((given, given));
        }
        (Expected::Between(fence), Some((key, deadline)))
    }

    /// Carries a command out: the reply, the key that changed, and the deadline that it has then. `actual`
    /// is the server's reply, from which nothing but the number of a new fence is taken.
    fn apply(
        &mut self,
        op: &Op,
        when: When,
        actual: &Reply,
        shown: &Shown,
    ) -> (Expected, Option<(&'static str, Deadline)>) {
        use Expected::{Code, Exactly};
        let wrong_type = || (Exactly(Err(WRONGTYPE.into())), None);
        let same = |reply| (Exactly(reply), None);
        let count = |number: usize| Ok(Value::Int(number as i64));
        match op.clone() {
            Op::Wrong(_, code) => (Code(code), None),
            Op::Acquire(key, ..) | Op::Renew(key, ..) | Op::Release(key, _) | Op::Info(key)
                if self.is_list(key) =>
            {
                wrong_type()
            }
            Op::Acquire(key, owner, ttl, limit, _) => {
                let asked = (key, &owner[..], ttl, limit);
                let new_end = after(when, ttl).unwrap();
                let key_ends = self.ends_at(key);
                if let Some((living, highest)) = self.list(key, when) {
                    let own = living.iter().find(|record| record.owner == owner).cloned();
                    let mut others = living.clone();
                    others.retain(|record| record.owner != owner);
                    let own_ends = own.as_ref().map(|own| own.ends_at);
                    return match own {
                        Some(own) if own.limit == limit => {
                            let range = later(own_ends, new_end).unwrap();
                            let lasts = own.ends_at >= *range.start()
                                && key_ends.is_none_or(|end| end >= *range.start());
                            // Within the millisecond both are right.
                            let same = shown.0.as_ref() == self.text(key)
                                && shown.1 == key_ends.unwrap_or(-1);
                            let deadline = match lasts && same {
                                true => exactly(key_ends),
                                false => self.hold(key, living, (&owner, range), shown),
                            };
                            (Exactly(Ok(Value::Int(own.fence))), Some((key, deadline)))
                        }
                        _ if !admits(&others, limit) => same(NULL),
                        _ => self.grant(asked, others, own_ends, highest, when, actual, shown),
                    };
                }
                let value = self.text(key).cloned();
                let ours = value.as_deref().and_then(parse);
                match (self.matches(key, &owner), ours) {
                    (Some(false), _) => same(NULL),
                    (Some(true), Some((fence, holder))) if holder == owner && limit == 1 => {
                        let deadline = later(key_ends, new_end);
                        (Exactly(Ok(Value::Int(fence))), Some((key, deadline)))
                    }
                    _ => {
                        let replaced = ours.map(|(fence, _)| fence);
                        self.grant(asked, vec![], key_ends, replaced, when, actual, shown)
                    }
                }
            }
            Op::Renew(key, owner, ttl) if self.list(key, when).is_some() => {
                let (living, _) = self.list(key, when).unwrap();
                if living.is_empty() {
                    return same(NULL);
                }
                if !living.iter().any(|record| record.owner == owner) {
                    return same(NO);
                }
                let range = after(when, ttl).unwrap();
                let deadline = self.hold(key, living, (&owner, range), shown);
                (Exactly(YES), Some((key, deadline)))
            }
            Op::Release(key, owner) if self.list(key, when).is_some() => {
                let (mut living, _) = self.list(key, when).unwrap();
                let before = living.len();
                living.retain(|record| record.owner != owner);
                match living.last().map(|last| (last.owner.clone(), last.ends_at)) {
                    None if before == 0 => same(NULL),
                    _ if living.len() == before => same(NO),
                    None => {
                        self.keys.remove(key);
                        (Exactly(YES), Some((key, None)))
                    }
                    Some(_) => {
                        let latest = living.iter().map(|record| record.ends_at).max();
                        let deadline = self.put(key, list_value(&living), exactly(latest));
                        (Exactly(YES), Some((key, deadline)))
                    }
                }
            }
            Op::Info(key) if self.list(key, when).is_some() => {
                let (living, _) = self.list(key, when).unwrap();
                match living.is_empty() {
                    true => same(NULL),
                    false => (Expected::List(living, self.ends_at(key)), None),
                }
            }
            Op::Renew(key, owner, ttl) => match self.matches(key, &owner) {
                None => same(NULL),
                Some(false) => same(NO),
                Some(true) => (Exactly(YES), Some((key, after(when, ttl)))),
            },
            Op::Release(key, owner) => match self.matches(key, &owner) {
                None => same(NULL),
                Some(false) => same(NO),
                Some(true) => {
                    self.keys.remove(key);
                    (Exactly(YES), Some((key, None)))
                }
            },
            Op::Info(key) => match self.text(key) {
                None => same(NULL),
                Some(value) => {
                    let (fence, owner) = match parse(value) {
                        Some((fence, owner)) => (Some(fence), owner),
                        None => (None, &value[..]),
                    };
                    let info = Expected::Info(owner.to_vec(), fence, self.ends_at(key));
                    (info, None)
                }
            },
            Op::Set(key, value) => {
                let deadline = self.put(key, value, None);
                (Exactly(OK), Some((key, deadline)))
            }
            Op::SetFor(key, value, ms) => {
                let deadline = self.put(key, value, after(when, ms));
                (Exactly(OK), Some((key, deadline)))
            }
            Op::SetKeepTtl(key, value) => {
                let kept = exactly(self.ends_at(key));
                let deadline = self.put(key, value, kept);
                (Exactly(OK), Some((key, deadline)))
            }
            Op::SetIfFree(key, ..) if self.keys.contains_key(key) => same(NULL),
            Op::SetIfFree(key, value, ms) => {
                let deadline = self.put(key, value, after(when, ms));
                (Exactly(OK), Some((key, deadline)))
            }
            Op::GetSet(key, _)
            | Op::GetDel(key)
            | Op::Append(key, _)
            | Op::Overwrite(key, _)
            | Op::Incr(key)
                if self.is_list(key) =>
            {
                wrong_type()
            }
            Op::GetSet(key, value) => {
                let before = self.text(key).map_or(NULL, text);
                let deadline = self.put(key, value, None);
                (Exactly(before), Some((key, deadline)))
            }
            Op::GetDel(key) => {
                let before = self.text(key).map_or(NULL, text);
                self.keys.remove(key);
                (Exactly(before), Some((key, None)))
            }
            Op::Del(key) | Op::Unlink(key) => {
                let removed = self.keys.remove(key);
                (Exactly(count(removed.iter().count())), Some((key, None)))
            }
            Op::PExpire(key, _) if !self.keys.contains_key(key) => same(NO),
            Op::PExpire(key, ms) if ms <= 0 => {
                self.keys.remove(key);
                (Exactly(YES), Some((key, None)))
            }
            Op::PExpire(key, ms) => (Exactly(YES), Some((key, after(when, ms)))),
            Op::Persist(key) => match self.ends_at(key) {
                None => same(NO),
                Some(_) => (Exactly(YES), Some((key, None))),
            },
            Op::Rename(from, _) if !self.keys.contains_key(from) => {
                same(Err("ERR no such key".into()))
            }
            Op::Rename(from, to) => {
                let entry = self.keys.remove(from).unwrap();
                let deadline = exactly(entry.ends_at);
                self.keys.insert(to, entry);
                (Exactly(OK), Some((to, deadline)))
            }
            Op::Copy(from, to) if from == to => {
                let refused = "ERR source and destination objects are the same";
                same(Err(refused.into()))
            }
            Op::Copy(from, to) => match self.keys.get(from).cloned() {
                None => same(NO),
                Some(entry) => {
                    let deadline = exactly(entry.ends_at);
                    self.keys.insert(to, entry);
                    (Exactly(YES), Some((to, deadline)))
                }
            },
            Op::Append(key, more) => {
                let value = [self.text(key).cloned().unwrap_or_default(), more].concat();
                let (length, kept) = (value.len(), exactly(self.ends_at(key)));
                let deadline = self.put(key, value, kept);
                (Exactly(count(length)), Some((key, deadline)))
            }
            Op::Overwrite(key, new) => {
                let mut value = self.text(key).cloned().unwrap_or_default();
                value.resize(value.len().max(new.len()), 0);
                value[..new.len()].copy_from_slice(&new);
                let (length, kept) = (value.len(), exactly(self.ends_at(key)));
                let deadline = self.put(key, value, kept);
                (Exactly(count(length)), Some((key, deadline)))
            }
            Op::Incr(key) => {
                let value = self.text(key).cloned().unwrap_or(b"0".to_vec());
                let old = String::from_utf8(value).ok();
                let old =
                    old.and_then(|old| Some((old.parse::<i64>().ok()?.to_string() == old, old)));
                let Some(old) = old.and_then(|(is_plain, old)| is_plain.then_some(old)) else {
                    return same(Err("ERR value is not an integer or out of range".into()));
                };
                let new = old.parse::<i64>().unwrap() + 1;
                let kept = exactly(self.ends_at(key));
                let deadline = self.put(key, new.to_string().into_bytes(), kept);
                (Exactly(Ok(Value::Int(new))), Some((key, deadline)))
            }
            Op::LPush(key) | Op::LPop(key) if self.text(key).is_some() => wrong_type(),
            Op::LPush(key) => {
                let new = Entry {
                    content: Content::List(0),
                    ends_at: None,
                };
                let entry = self.keys.entry(key).or_insert(new);
                let Content::List(length) = &mut entry.content else {
                    unreachable!()
                };
                *length += 1;
                let reply = Exactly(Ok(Value::Int(*length)));
                (reply, Some((key, exactly(entry.ends_at))))
            }
            Op::LPop(key) => match self.keys.get_mut(key) {
                None => same(NULL),
                Some(entry) => {
                    let Content::List(length) = &mut entry.content else {
                        unreachable!()
                    };
                    *length -= 1;
                    let (left, deadline) = (*length, exactly(entry.ends_at));
                    if left == 0 {
                        self.keys.remove(key);
                    }
                    (Exactly(text("x")), Some((key, deadline)))
                }
            },
            Op::FlushDb => {
                self.keys.clear();
                (Exactly(OK), None)
            }
        }
    }
}

/// Whether the server's reply is what the model expects.
fn is_as_expected(actual: &Reply, expected: &Expected, when: When) -> bool {
    match expected {
        Expected::Exactly(reply) => actual == reply,
        Expected::Between(range) => {
            matches!(actual, Ok(Value::Int(fence)) if range.contains(fence))
        }
        Expected::Code(code) => actual
            .as_ref()
            .is_err_and(|line| line.split(' ').next() == Some(code)),
        Expected::List(holders, ends_at) => {
            let Ok(Value::Array(fields)) = actual else {
                return false;
            };
            let [
                _,
                _,
                _,
                _,
                _,
                _,
                _,
                ttl,
                _,
                _,
                _,
                _,
                _,
                limit,
                _,
                holding,
                _,
                listed,
            ] = &fields[..]
            else {
                return false;
            };
            let within = |value: &Value, end: i64| {
                let range = end - when.1 / 1000..=end - when.0 / 1000;
                matches!(value, Value::Int(number) if range.contains(number))
            };
            let Value::Array(listed) = listed else {
                return false;
            };
            let is_listed = |(holder, listed): (&Record, &Value)| {
                let Value::Array(fields) = listed else {
                    return false;
                };
                Ok(fields[1].clone()) == text(&holder.owner)
                    && fields[3] == Value::Int(holder.fence)
                    && within(&fields[7], holder.ends_at)
                    && fields[9] == Value::Int(holder.limit)
            };
            let smallest = holders.iter().map(|holder| holder.limit).min();
            *limit == Value::Int(smallest.unwrap())
                && *holding == Value::Int(holders.len() as i64)
                && listed.len() == holders.len()
                && holders.iter().zip(listed).all(is_listed)
                && match ends_at {
                    None => *ttl == Value::Int(-1),
                    Some(end) => within(ttl, *end),
                }
        }
        Expected::Info(owner, fence, ends_at) => {
            let Ok(Value::Array(fields)) = actual else {
                return false;
            };
            let [
                _,
                actual_owner,
                _,
                actual_fence,
                _,
                held,
                _,
                ttl,
                _,
                waiters,
                _,
                queue,
            ] = &fields[..]
            else {
                return false;
            };
            let within = |value: &Value, range: RangeInclusive<i64>| matches!(value, Value::Int(number) if range.contains(number));
            let held_is_right = match fence {
                None => *held == Value::Nil,
                // A fence may be ahead of the clock.
                Some(fence) => {
                    let held_ms = |now: i64| (now - fence).max(0) / 1000;
                    within(held, held_ms(when.0)..=held_ms(when.1))
                }
            };
            let ttl_is_right = match ends_at {
                None => *ttl == Value::Int(-1),
                Some(end) => within(ttl, end - when.1 / 1000..=end - when.0 / 1000),
            };
            Ok(actual_owner.clone()) == text(owner)
                && *actual_fence == fence.map_or(Value::Nil, Value::Int)
                && held_is_right
                && ttl_is_right
                && (waiters, queue) == (&Value::Int(0), &Value::Array(vec![]))
        }
    }
}

/// The server's clock, in microseconds.
fn clock(time: &Value) -> i64 {
    let (seconds, micros): (i64, i64) = redis::from_redis_value(time.clone()).unwrap();
    seconds * 1_000_000 + micros
}

/// How many replies follow each command: its own, GET and PEXPIRETIME of every key, TIME.
const REPLIES: usize = 2 + 2 * KEYS.len();

/// Runs the commands in one pipeline, and reads every key and the clock after each.
fn run(redis: &mut Connection, ops: &[Op]) -> Vec<Value> {
    let mut pipeline = pipe();
    pipeline.ignore_errors().cmd("TIME");
    for op in ops {
        pipeline.add_command(op.command());
        for key in KEYS {
            pipeline.cmd("GET").arg(key).cmd("PEXPIRETIME").arg(key);
        }
        pipeline.cmd("TIME");
    }
    pipeline.query(redis).unwrap()
}

fn compare(seed: u64, commands: usize) {
    println!("LOCKKEEPER_MODEL_SEED={seed} LOCKKEEPER_MODEL_COMMANDS={commands}");
    let mut server = Server::start();
    let mut redis = server.connect();
    let (mut random, mut model) = (Rng::with_seed(seed), Model::default());
    let (mut granted, mut shared) = (0, 0);
    for batch in 0..commands.div_ceil(BATCH) {
        let now = clock(&ask!(redis, "TIME").unwrap());
        let values: Vec<Bytes> = KEYS
            .iter()
            .filter_map(|key| model.text(key).cloned())
            .collect();
        let ops: Vec<Op> = (0..BATCH)
            .map(|_| next_op(&mut random, &values, now))
            .collect();
        let replies = run(&mut redis, &ops);
        let mut start = clock(&replies[0]);
        for (n, (op, replies)) in ops
            .iter()
            .zip(replies[1..].chunks_exact(REPLIES))
            .enumerate()
        {
            let when = (start, clock(&replies[REPLIES - 1]));
            start = when.1;
            let reply = testkit::reply(Ok(replies[0].clone()));
            let before = model.keys.clone();
            let shown = KEYS.iter().zip(replies[1..].chunks_exact(2));
            let mut shown = shown.filter(|(key, _)| op.key() == Some(**key));
            let shown = shown.next().map_or((None, -2), |(_, seen)| {
                let value = redis::from_redis_value(seen[0].clone()).ok();
                (value, number(Ok(seen[1].clone())))
            });
            let (expected, changed) = model.apply(op, when, &reply, &shown);
            shared += usize::from(model.has_several(when));
            granted += usize::from(matches!(expected, Expected::Between(_)));
            let wrong = |what: &str| -> ! {
                panic!(
                    "seed {seed}, command {}: {op:?}\nat {when:?} the keys were {before:?}\n\
                     {what}\nanswered {reply:?}, expected {expected:?}",
                    batch * BATCH + n
                )
            };
            if !is_as_expected(&reply, &expected, when) {
                wrong("the reply is another");
            }
            for (key, seen) in KEYS.iter().zip(replies[1..].chunks_exact(2)) {
                let value = testkit::reply(Ok(seen[0].clone()));
                let due = model.keys.get(key).map(|entry| match &entry.content {
                    Content::Text(value) => text(value),
                    Content::List(_) => Err(WRONGTYPE.into()),
                });
                if value != due.clone().unwrap_or(NULL) {
                    wrong(&format!("{key} holds {value:?}, not {due:?}"));
                }
                let Some(entry) = model.keys.get_mut(key) else {
                    continue;
                };
                let deadline = match &changed {
                    Some((changed, deadline)) if changed == key => deadline.clone(),
                    _ => exactly(entry.ends_at),
                };
                let seen = number(Ok(seen[1].clone()));
                match deadline {
                    None if seen == -1 => entry.ends_at = None,
                    Some(range) if range.contains(&seen) => entry.ends_at = Some(seen),
                    other => wrong(&format!("{key} ends at {seen}, not {other:?}")),
                }
            }
        }
    }
    println!("{commands} commands, {granted} grants, {shared} times several held, no difference");
    assert!(shared * 50 > commands, "only {shared} times several held");
    assert!(
        granted * 50 > commands,
        "only {granted} grants: a model of nothing"
    );
    assert_eq!(
        info::<i64>(&mut redis, "lockkeeper", "lockkeeper_waiters"),
        0
    );
    server.stop();
}

#[test]
fn server_and_model_agree_after_every_random_command() {
    // Always the same ones in `make test`, so that it is repeatable; `make model` takes new ones.
    let seed = setting("LOCKKEEPER_MODEL_SEED", 1);
    compare(seed, setting("LOCKKEEPER_MODEL_COMMANDS", 20_000));
}
