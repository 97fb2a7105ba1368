//! When to poll the contended keys, those for which somebody waits: to look whether they are free.
//!
//! A key has a poll of its own when it should have expired, or when the server may let us write it again. And
//! sweeps poll all contended keys, some at a time, for what others may have done to them: DEL, a shorter
//! PEXPIRE, RENAME …

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::rc::Rc;

use crate::lock::LockId;
use crate::time::{MonoUs, Now, UnixMs, UnixUs};

/// How often all contended keys are polled for what others may have done to them. A DEL by somebody else then
/// hands over within 10 ms; polling costs 0.7 % of a core with one contended key, 2 % with 200.
const SWEEP_MS: u64 = 10;

/// The same once no client has joined and none was granted for [`ACTIVE_MS`]: standbys wait for days, and
/// ten sweeps a second cost less than 0.2 % of a core. A renewal does not count: that is what a leader does
/// while its standbys wait, every second with a short ttl.
const QUIET_SWEEP_MS: u64 = 100;

/// How long after a client joined or was granted the contended keys are polled often.
const ACTIVE_MS: u64 = 1_000;

/// How long a key that shows the same is not read again. It makes good whatever was missed, in at most two reads
/// a second of each key.
const UNREAD_MS: u64 = 500;

/// How many contended keys one sweep polls, so that it takes well under a millisecond. As many polls of single
/// keys are done at a time.
pub const SWEEP_KEYS: usize = 200;

/// How long to leave a key alone after the server refused to let us write it.
pub const BACK_OFF_MS: u64 = 100;

/// How long to leave all keys alone while the server must not write (CLIENT PAUSE, FAILOVER).
const PAUSED_MS: u64 = 20;

/// Why a contended key is free or has room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// A holder released it or was taken back, or the first in the queue asks for less than who left it.
    Release,
    /// It has ended by itself, or the lease of a holder has.
    Expiry,
    /// Others have deleted or changed it.
    Deletion,
}

/// What shows of a key without reading its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Of the value, in bytes.
    pub len: usize,
    pub ends_at: Option<UnixMs>,
}

/// A contended key, and `Q`, those who wait for it.
#[derive(Clone, Debug)]
pub struct ContendedKey<Q> {
    pub queue: Q,
    lock: Rc<LockId>,
    /// When the key, or the first lease of its holders, was to end, as the last poll saw it; none if it was
    /// not to end.
    ends_at: Option<UnixMs>,
    /// What else the last poll saw of the key; none if it was missing, or has been written since.
    seen: Option<Seen>,
    /// When the value of the key, or as much of it as matters, was last known.
    known_at: MonoUs,
    /// The first in the queue may be admitted by the same holders as before.
    look_again: bool,
    /// Why, when that was last so.
    room: Cause,
    /// When the key has a poll of its own, besides the sweeps.
    pub poll_at: Option<MonoUs>,
    /// Not to be polled before this.
    pub back_off_until: Option<MonoUs>,
}

/// When each contended key is to be polled.
#[derive(Clone, Debug)]
pub struct Schedule<Q> {
    pub keys: BTreeMap<Rc<LockId>, ContendedKey<Q>>,
    /// Those that have a poll of their own.
    pub polls: BTreeSet<(MonoUs, Rc<LockId>)>,
    next_sweep: MonoUs,
    /// Until when the sweeps follow one another quickly.
    active_until: MonoUs,
    /// The last key of the sweep before; the next sweep goes on after it.
    swept_to: Option<Rc<LockId>>,
    pub paused_until: MonoUs,
}

impl<Q> Default for Schedule<Q> {
    fn default() -> Schedule<Q> {
        Schedule {
            keys: BTreeMap::new(),
            polls: BTreeSet::new(),
            next_sweep: MonoUs(0),
            active_until: MonoUs(0),
            swept_to: None,
            paused_until: MonoUs(0),
        }
    }
}

impl<Q: Default> Schedule<Q> {
    /// Those who wait for this key.
    pub fn queue(&self, lock: &LockId) -> Option<&Q> {
        self.keys.get(lock).map(|key| &key.queue)
    }

    /// The same, for a key that is contended or becomes so.
    pub fn queue_or_new(&mut self, lock: &Rc<LockId>) -> &mut Q {
        let new = || ContendedKey {
            queue: Q::default(),
            lock: Rc::clone(lock),
            ends_at: None,
            seen: None,
            known_at: MonoUs(0),
            look_again: false,
            room: Cause::Release,
            poll_at: None,
            back_off_until: None,
        };
        let key = self.keys.entry(Rc::clone(lock)).or_insert_with(new);
        &mut key.queue
    }

    /// Nobody waits for this key any more.
    pub fn remove(&mut self, lock: &LockId) {
        if let Some(ContendedKey {
            lock,
            poll_at: Some(at),
            ..
        }) = self.keys.remove(lock)
        {
            self.polls.remove(&(at, lock));
        }
    }

    /// A client joined or was granted, so a contended key may soon be free again: all are polled often for a
    /// while.
    pub fn active(&mut self, now: MonoUs) {
        self.active_until = now.plus_ms(ACTIVE_MS);
        let soon = now.plus_ms(SWEEP_MS);
        if self.keys.is_empty() || self.next_sweep > soon {
            self.next_sweep = soon;
        }
    }

    /// When the key, or the first lease of its holders, was to end, as the last poll saw it.
    pub fn ends_at(&self, lock: &LockId) -> Option<UnixMs> {
        self.keys.get(lock)?.ends_at
    }

    /// The key is held, and the first of its leases ends at `ends_at`, if it does: it is polled when that has
    /// expired.
    pub fn held(&mut self, lock: &LockId, seen: Option<Seen>, ends_at: Option<UnixMs>, now: Now) {
        if let Some(key) = self.keys.get_mut(lock) {
            (key.seen, key.ends_at, key.known_at) = (seen, ends_at, now.mono);
            poll_when_expired(&mut self.polls, key, now);
        }
    }

    /// The first in the queue may be admitted by the same holders as before: the key is polled at once, and
    /// whatever shows of it. `why` it may have room.
    pub fn look_again(&mut self, lock: &LockId, why: Cause) {
        if let Some(key) = self.keys.get_mut(lock) {
            if !key.look_again {
                key.room = why;
            }
            key.look_again = true;
            let at = key.back_off_until.unwrap_or(MonoUs(0));
            poll_at(&mut self.polls, key, Some(at));
        }
    }

    /// A poll sees this of the key. Returns whether it need not read the value, which can be long: then the key
    /// is polled again when the first of its leases has expired. What shows can stay the same while the value
    /// changes, so now and then it is to be read all the same.
    pub fn settle(&mut self, lock: &LockId, seen: Option<Seen>, now: Now) -> bool {
        let settled = self.is_settled(lock, seen, now);
        if let Some(key) = self.keys.get_mut(lock) {
            key.look_again = false;
            if settled {
                poll_when_expired(&mut self.polls, key, now);
            }
        }
        settled
    }

    /// Whether a key that shows this has the holders that it had a moment ago, so that they admit nobody.
    pub fn is_settled(&self, lock: &LockId, seen: Option<Seen>, now: Now) -> bool {
        let known = |key: &ContendedKey<Q>| now.mono < key.known_at.plus_ms(UNREAD_MS);
        self.is_as_seen(lock, seen)
            && !self.has_expired(lock, now.wall)
            && (self.keys.get(lock)).is_some_and(|key| known(key) && !key.look_again)
    }

    /// Whether the key shows the same as at the last poll, or after the last write of ours.
    pub fn is_as_seen(&self, lock: &LockId, seen: Option<Seen>) -> bool {
        seen.is_some() && self.keys.get(lock).is_some_and(|key| key.seen == seen)
    }

    /// Why the key, which shows this, is free or has room.
    pub fn cause_of_room(&self, lock: &LockId, seen: Option<Seen>, now: UnixUs) -> Cause {
        match self.keys.get(lock) {
            _ if self.has_expired(lock, now) => Cause::Expiry,
            Some(key) if self.is_as_seen(lock, seen) => key.room,
            _ => Cause::Deletion,
        }
    }

    /// Whether the key, which is free now or has room, has ended by itself, or the lease of a holder has, as
    /// far as the last poll could see.
    pub fn has_expired(&self, lock: &LockId, now: UnixUs) -> bool {
        self.ends_at(lock).is_some_and(|end| end < now.ms())
    }

    /// The server refused to let us write the key, which ended at `ended_at`: it is left alone for a while.
    pub fn back_off(&mut self, lock: &LockId, ended_at: Option<UnixMs>, now: Now) {
        if let Some(key) = self.keys.get_mut(lock) {
            let until = now.mono.plus_ms(BACK_OFF_MS);
            key.ends_at = ended_at;
            key.back_off_until = Some(until);
            poll_at(&mut self.polls, key, Some(until));
        }
    }

    /// The server must not write: all keys are left alone for a while.
    pub fn pause(&mut self, now: MonoUs) {
        self.paused_until = now.plus_ms(PAUSED_MS);
    }

    /// The keys to poll now, or some of them.
    pub fn due(&mut self, now: MonoUs) -> Vec<Rc<LockId>> {
        let mut due = vec![];
        while due.len() < SWEEP_KEYS
            && self.polls.first().is_some_and(|(at, _)| *at <= now)
            && let Some((_, lock)) = self.polls.pop_first()
        {
            if let Some(key) = self.keys.get_mut(&lock) {
                key.poll_at = None;
            }
            due.push(lock);
        }
        if !self.keys.is_empty() && self.next_sweep <= now {
            let quiet = self.active_until <= now;
            self.next_sweep = now.plus_ms(if quiet { QUIET_SWEEP_MS } else { SWEEP_MS });
            self.sweep(now, &mut due);
        }
        due
    }

    /// The next contended keys after those of the sweep before, each once.
    fn sweep(&mut self, now: MonoUs, due: &mut Vec<Rc<LockId>>) {
        let after = self.swept_to.take();
        let rest = after.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
        let again = after
            .as_ref()
            .map(|after| self.keys.range(..=Rc::clone(after)));
        let keys: Vec<_> = self
            .keys
            .range::<Rc<LockId>, _>((rest, Bound::Unbounded))
            .chain(again.into_iter().flatten())
            .take(SWEEP_KEYS)
            .collect();
        self.swept_to = keys.last().map(|(lock, _)| Rc::clone(lock));
        let backs_off = |key: &ContendedKey<Q>| key.back_off_until.is_some_and(|until| until > now);
        // Once is enough, also for a key that has a poll of its own now: each lets in as many as one step may.
        let polls = due.len();
        for (lock, key) in keys {
            let polled = due[..polls].iter().any(|poll| Rc::ptr_eq(poll, lock));
            if !polled && !backs_off(key) {
                due.push(Rc::clone(lock));
            }
        }
    }

    /// When [`Schedule::due`] has something next, which may be past; none if no key is contended.
    pub fn next_due(&self) -> Option<MonoUs> {
        let sweep = (!self.keys.is_empty()).then_some(self.next_sweep);
        let poll = self.polls.first().map(|(at, _)| *at);
        sweep.into_iter().chain(poll).min()
    }
}

/// The key is polled when it, or the first lease of its holders, has expired; not later than if it is to be
/// looked at again.
fn poll_when_expired<Q>(
    polls: &mut BTreeSet<(MonoUs, Rc<LockId>)>,
    key: &mut ContendedKey<Q>,
    now: Now,
) {
    if !key.look_again {
        let at = key.ends_at.map(|end| now.when_expired(end));
        poll_at(polls, key, at);
    }
}

/// Keeps the two notes of when a key is polled the same.
fn poll_at<Q>(
    polls: &mut BTreeSet<(MonoUs, Rc<LockId>)>,
    key: &mut ContendedKey<Q>,
    at: Option<MonoUs>,
) {
    let before = std::mem::replace(&mut key.poll_at, at);
    if before == at {
        return;
    }
    if let Some(before) = before {
        polls.remove(&(before, Rc::clone(&key.lock)));
    }
    if let Some(at) = at {
        polls.insert((at, Rc::clone(&key.lock)));
    }
}
