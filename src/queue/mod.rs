//! Who waits for which lock, in which order, and which grants may have gone into the void.
//!
//! Pure: it knows neither clients nor keys. `C` is whatever the shell answers a client by. The shell
//! looks at keys and writes them, and tells the queue; the queue says whose turn it is and when to look
//! again. It is never borrowed while the shell writes, so a grant leaves the queue before the write and
//! is put back if the server refuses it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound;
use std::rc::Rc;

use crate::lock::{Fence, Fences, Owner, Ttl, UnixMs, UnixUs};

/// A point in time by a clock that nobody can step, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MonoUs(pub u64);

impl MonoUs {
    pub fn plus_ms(self, ms: u64) -> MonoUs {
        MonoUs(self.0.saturating_add(ms.saturating_mul(1000)))
    }

    /// Microseconds since an earlier point; 0 since a later one.
    pub fn since_us(self, earlier: MonoUs) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// Now, by both clocks: keys end by the wall clock, waits by the one that nobody can step.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    pub wall: UnixUs,
    pub mono: MonoUs,
}

impl Now {
    /// When a key that ends at `end` has expired: for the server it lives through that millisecond.
    fn when_expired(self, end: UnixMs) -> MonoUs {
        let over_us = end.0.saturating_add(1).saturating_mul(1000).max(0);
        let left_us = over_us.cast_unsigned().saturating_sub(self.wall.0);
        MonoUs(self.mono.0.saturating_add(left_us))
    }
}

/// How often everything that others may have done to a contended key is looked for. A foreign DEL then
/// hands over within 10 ms; looking costs 0.7 % of a core with one contended key, 2 % with 200.
const ROUND_MS: u64 = 10;

/// The same once no client has joined and none was granted for [`ACTIVE_MS`]: standbys wait for days, and
/// ten looks a second cost less than 0.2 % of a core. A renewal does not count: that is what a leader does
/// while its standbys wait, every second with a short ttl.
const QUIET_ROUND_MS: u64 = 100;

/// How long after a client joined or was granted the contended keys are looked at often.
const ACTIVE_MS: u64 = 1_000;

/// How many contended keys one round looks at, so that one round takes well under a millisecond.
const ROUND_KEYS: usize = 200;

/// How many clients are answered in one turn of the server's loop, when many waits end at once: an answer
/// costs the server about 10 us, and who does not wait must not be held up by those who do.
const ANSWERS: usize = 100;

/// How long to leave a key alone after the server refused to let us write it.
pub const REFUSED_MS: u64 = 100;

/// How long to leave all keys alone while the server must not write (CLIENT PAUSE, FAILOVER).
const PAUSED_MS: u64 = 20;

/// Which lock: a key of a database.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name {
    pub db: i32,
    pub key: Box<[u8]>,
}

/// Place in the order of arrival, over all keys.
type Ticket = u64;

/// One client's wait.
#[derive(Clone, Debug)]
pub struct Place<C> {
    name: Rc<Name>,
    owner: Rc<[u8]>,
    ttl: Ttl,
    deadline: MonoUs,
    since: MonoUs,
    client: C,
}

/// What a client asks for when it joins.
#[derive(Clone, Copy, Debug)]
pub struct Wish<'a, C> {
    pub owner: Owner<'a>,
    pub ttl: Ttl,
    /// When to give up.
    pub deadline: MonoUs,
    pub client: C,
}

/// The turn of one place: what is to be written, and who is to be told.
#[derive(Clone, Debug)]
pub struct Grant<C> {
    ticket: Ticket,
    place: Place<C>,
    pub id: GrantId,
    pub ends_at: UnixMs,
    /// Where the key ended before, as far as the last look could tell.
    ended_at: Option<UnixMs>,
}

/// Which grant: what a key holds after it, and nothing else ever does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrantId {
    pub name: Rc<Name>,
    owner: Rc<[u8]>,
    pub fence: Fence,
}

impl GrantId {
    pub fn owner(&self) -> Owner<'_> {
        Owner::new(&self.owner).expect("a place was made from an owner")
    }

    fn place(&self) -> (Rc<Name>, Rc<[u8]>) {
        (Rc::clone(&self.name), Rc::clone(&self.owner))
    }

    /// Whether a key with this value still carries this grant.
    pub fn is_carried_by(&self, value: &[u8]) -> bool {
        value == crate::lock::write(self.fence, self.owner())
    }
}

impl<C: Copy> Grant<C> {
    pub fn client(&self) -> C {
        self.place.client
    }

    pub fn waited_us(&self, now: Now) -> u64 {
        now.mono.since_us(self.place.since)
    }
}

/// The places of one key.
#[derive(Clone, Debug, Default)]
struct Line {
    order: BTreeSet<Ticket>,
    owners: HashMap<Rc<[u8]>, Ticket>,
    /// Where the key ended at the last look, if it did.
    ends_at: Option<UnixMs>,
    /// When the key is to be looked at by itself, besides the rounds.
    look_at: Option<MonoUs>,
    /// No look before this.
    rest_until: Option<MonoUs>,
}

/// Why a client has to leave that was neither granted nor has timed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dismissal {
    /// `lockkeeper.max-waiters` was set to 0.
    Drained,
    /// The cluster serves the key elsewhere, or not at all.
    NotHere,
    /// The server is not master any more.
    Demoted,
}

/// Something the shell is to do now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Task<C> {
    /// The wait of this client is over; it has left.
    TimedOut(C),
    /// This client has left, and is to be told why.
    Dismissed(C, Dismissal),
    /// Look at the key and serve whose turn it is.
    Look(Rc<Name>),
    /// The owner was never told: take the grant back if the key still carries it.
    TakeBack(GrantId),
}

/// A grant whose reply is not known to be out.
#[derive(Clone, Debug)]
struct Undelivered {
    fence: Fence,
    /// Set once the reply is known to be lost.
    take_back_at: Option<MonoUs>,
}

/// All who wait.
#[derive(Clone, Debug)]
pub struct Queue<C> {
    places: BTreeMap<Ticket, Place<C>>,
    lines: BTreeMap<Rc<Name>, Line>,
    /// Those who have a place, and those who are dismissed.
    clients: BTreeMap<C, Ticket>,
    /// They have left, and are not answered yet.
    dismissed: BTreeMap<Ticket, (C, Dismissal)>,
    deadlines: BTreeSet<(MonoUs, Ticket)>,
    looks: BTreeSet<(MonoUs, Rc<Name>)>,
    undelivered: BTreeMap<(Rc<Name>, Rc<[u8]>), Undelivered>,
    /// Those of them whose reply is lost, by when they are to be taken back.
    take_backs: BTreeSet<(MonoUs, Rc<Name>, Rc<[u8]>)>,
    next_ticket: Ticket,
    next_round: MonoUs,
    /// Until when the rounds follow one another quickly.
    active_until: MonoUs,
    /// The last key of the round before; the next round goes on after it.
    round_after: Option<Rc<Name>>,
    paused_until: MonoUs,
}

impl<C: Copy + Ord> Default for Queue<C> {
    fn default() -> Queue<C> {
        Queue {
            places: BTreeMap::new(),
            lines: BTreeMap::new(),
            clients: BTreeMap::new(),
            dismissed: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            looks: BTreeSet::new(),
            undelivered: BTreeMap::new(),
            take_backs: BTreeSet::new(),
            next_ticket: 0,
            next_round: MonoUs(0),
            active_until: MonoUs(0),
            round_after: None,
            paused_until: MonoUs(0),
        }
    }
}

impl<C: Copy + Ord> Queue<C> {
    /// Nobody waits and no grant is in doubt: there is nothing to do for anybody.
    pub fn is_idle(&self) -> bool {
        self.clients.is_empty() && self.undelivered.is_empty()
    }

    /// How many clients wait, for a lock or for the answer that they have to leave.
    pub fn waiters(&self) -> usize {
        self.clients.len()
    }

    pub fn contended_keys(&self) -> usize {
        self.lines.len()
    }

    pub fn oldest_waiter_us(&self, now: MonoUs) -> u64 {
        self.places
            .values()
            .next()
            .map_or(0, |place| now.since_us(place.since))
    }

    pub fn waiters_of(&self, name: &Name) -> usize {
        self.lines.get(name).map_or(0, |line| line.order.len())
    }

    /// Owner and waited µs of those who wait for a key, in order.
    pub fn list<'q>(
        &'q self,
        name: &Name,
        now: MonoUs,
    ) -> impl Iterator<Item = (&'q [u8], u64)> + use<'q, C> {
        let tickets = self.lines.get(name).map(|line| line.order.iter());
        tickets.into_iter().flatten().map(move |ticket| {
            let place = &self.places[ticket];
            (&*place.owner, now.since_us(place.since))
        })
    }

    /// Whether this owner waits for the key already.
    pub fn waits(&self, name: &Name, owner: Owner) -> bool {
        self.lines
            .get(name)
            .is_some_and(|line| line.owners.contains_key(owner.bytes()))
    }

    /// Joins at the end of the line, or takes over the place that the owner has: the order stays, all
    /// else is new. Answers the client that had the place before.
    pub fn join(&mut self, name: &Name, wish: Wish<C>, now: MonoUs) -> Option<C> {
        let Wish {
            owner,
            ttl,
            deadline,
            client,
        } = wish;
        self.something_happened(now);
        let before = self
            .lines
            .get(name)
            .and_then(|line| line.owners.get(owner.bytes()))
            .copied();
        if let Some(ticket) = before {
            let place = self
                .places
                .get_mut(&ticket)
                .expect("a line names only places");
            let earlier = std::mem::replace(&mut place.client, client);
            self.deadlines.remove(&(place.deadline, ticket));
            (place.ttl, place.deadline) = (ttl, deadline);
            self.deadlines.insert((deadline, ticket));
            self.clients.remove(&earlier);
            self.clients.insert(client, ticket);
            return Some(earlier);
        }
        let name = match self.lines.get_key_value(name) {
            Some((name, _)) => Rc::clone(name),
            None => Rc::new(name.clone()),
        };
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let owner = Rc::from(owner.bytes());
        self.insert(
            ticket,
            Place {
                name,
                owner,
                ttl,
                deadline,
                since: now,
                client,
            },
        );
        None
    }

    /// A key that clients wait for may soon be free again: it is looked at often for a while.
    fn something_happened(&mut self, now: MonoUs) {
        self.active_until = now.plus_ms(ACTIVE_MS);
        let soon = now.plus_ms(ROUND_MS);
        if self.lines.is_empty() || self.next_round > soon {
            self.next_round = soon;
        }
    }

    fn insert(&mut self, ticket: Ticket, place: Place<C>) {
        let line = self.lines.entry(Rc::clone(&place.name)).or_default();
        line.order.insert(ticket);
        line.owners.insert(Rc::clone(&place.owner), ticket);
        self.deadlines.insert((place.deadline, ticket));
        self.clients.insert(place.client, ticket);
        self.places.insert(ticket, place);
    }

    fn remove(&mut self, ticket: Ticket) -> Option<Place<C>> {
        let place = self.places.remove(&ticket)?;
        self.deadlines.remove(&(place.deadline, ticket));
        self.clients.remove(&place.client);
        if let Some(line) = self.lines.get_mut(&place.name) {
            line.order.remove(&ticket);
            line.owners.remove(&place.owner);
            if line.order.is_empty() {
                self.set_look(&place.name, None);
                self.lines.remove(&place.name);
            }
        }
        Some(place)
    }

    /// A client has gone, or is told so: it will not be granted anything. Answers whether it waited.
    pub fn leave(&mut self, client: C) -> bool {
        let Some(ticket) = self.clients.remove(&client) else {
            return false;
        };
        if self.dismissed.remove(&ticket).is_none() {
            self.remove(ticket);
        }
        true
    }

    /// The owner gives up its place for this key. Answers the client that waited in it.
    pub fn leave_owner(&mut self, name: &Name, owner: Owner) -> Option<C> {
        let ticket = *self.lines.get(name)?.owners.get(owner.bytes())?;
        self.remove(ticket).map(|place| place.client)
    }

    /// Everybody leaves at once, those of one key or all, and is told why a share at a time
    /// ([`Task::Dismissed`]).
    pub fn dismiss(&mut self, name: Option<&Name>, why: Dismissal) {
        let tickets: Vec<Ticket> = match name {
            Some(name) => self
                .lines
                .get(name)
                .into_iter()
                .flat_map(|line| &line.order)
                .copied()
                .collect(),
            None => self.places.keys().copied().collect(),
        };
        for ticket in tickets {
            if let Some(place) = self.remove(ticket) {
                self.clients.insert(place.client, ticket);
                self.dismissed.insert(ticket, (place.client, why));
            }
        }
    }

    /// Takes the first in line out of it: its turn. The shell must write the key and then tell the
    /// client, or [`Queue::put_back`] the grant.
    ///
    /// `replaced` is the fence of the value that the write replaces.
    pub fn next(
        &mut self,
        name: &Name,
        replaced: Option<Fence>,
        now: Now,
        fences: &mut Fences,
    ) -> Option<Grant<C>> {
        let line = self.lines.get(name)?;
        let (ticket, ended_at) = (*line.order.first()?, line.ends_at);
        let place = self.remove(ticket)?;
        self.something_happened(now.mono);
        let fence = fences.next(now.wall, replaced);
        let id = GrantId {
            name: Rc::clone(&place.name),
            owner: Rc::clone(&place.owner),
            fence,
        };
        let ends_at = now.wall.plus(place.ttl);
        let unconfirmed = Undelivered {
            fence,
            take_back_at: None,
        };
        self.settle(id.place());
        self.undelivered.insert(id.place(), unconfirmed);
        // Whoever is next in line waits for the end of this lease.
        self.held(name, Some(ends_at), now);
        Some(Grant {
            ticket,
            place,
            id,
            ends_at,
            ended_at,
        })
    }

    /// The server refused to write a grant: the place is first in line again, and the key is left alone
    /// for a while.
    pub fn put_back(&mut self, grant: Grant<C>, now: Now) {
        self.forget(&grant.id);
        let name = Rc::clone(&grant.place.name);
        self.insert(grant.ticket, grant.place);
        if let Some(line) = self.lines.get_mut(&name) {
            line.ends_at = grant.ended_at;
        }
        self.rest(&name, now);
    }

    /// The key is held, until `ends_at` if it ends: when to look at it next.
    pub fn held(&mut self, name: &Name, ends_at: Option<UnixMs>, now: Now) {
        if let Some(line) = self.lines.get_mut(name) {
            line.ends_at = ends_at;
            self.set_look(name, ends_at.map(|end| now.when_expired(end)));
        }
    }

    /// Whether the key, which is free now, has ended by itself, as far as the last look could tell.
    pub fn has_expired(&self, name: &Name, now: UnixUs) -> bool {
        self.lines
            .get(name)
            .and_then(|line| line.ends_at)
            .is_some_and(|end| end < now.ms())
    }

    /// The server refuses to let us write this key: leave it alone for a while.
    fn rest(&mut self, name: &Name, now: Now) {
        let until = now.mono.plus_ms(REFUSED_MS);
        if let Some(line) = self.lines.get_mut(name) {
            line.rest_until = Some(until);
            self.set_look(name, Some(until));
        }
    }

    fn set_look(&mut self, name: &Name, at: Option<MonoUs>) {
        let Some((name, _)) = self.lines.get_key_value(name) else {
            return;
        };
        let name = Rc::clone(name);
        let Some(line) = self.lines.get_mut(&name) else {
            return;
        };
        let before = std::mem::replace(&mut line.look_at, at);
        if before == at {
            return;
        }
        if let Some(before) = before {
            self.looks.remove(&(before, Rc::clone(&name)));
        }
        if let Some(at) = at {
            self.looks.insert((at, name));
        }
    }

    /// The reply of this grant is lost, or the server refused to take it back: take it back then, unless
    /// the owner has spoken or speaks before.
    pub fn take_back_at(&mut self, grant: &GrantId, at: MonoUs) {
        if self.is_undelivered(grant) {
            self.forget(grant);
            let (name, owner) = grant.place();
            self.take_backs.insert((at, name, owner));
            let undelivered = Undelivered {
                fence: grant.fence,
                take_back_at: Some(at),
            };
            self.undelivered.insert(grant.place(), undelivered);
        }
    }

    /// The owner of the key has shown that it knows of its lock: no grant to it is in doubt.
    pub fn spoke(&mut self, name: &Name, owner: Owner) {
        self.settle((Rc::new(name.clone()), Rc::from(owner.bytes())));
    }

    /// Whether any grant is still to be confirmed, by its reply or by its owner.
    pub fn has_undelivered(&self) -> bool {
        !self.undelivered.is_empty()
    }

    /// No grant will be taken back: another server is master, or the module is about to go.
    pub fn forget_grants(&mut self) {
        self.undelivered.clear();
        self.take_backs.clear();
    }

    /// The grant is settled: its reply is out, or it was taken back, or the key does not carry it.
    pub fn forget(&mut self, grant: &GrantId) {
        if self.is_undelivered(grant) {
            self.settle(grant.place());
        }
    }

    fn is_undelivered(&self, grant: &GrantId) -> bool {
        let undelivered = self.undelivered.get(&grant.place());
        undelivered.is_some_and(|undelivered| undelivered.fence == grant.fence)
    }

    fn settle(&mut self, place: (Rc<Name>, Rc<[u8]>)) {
        let settled = self.undelivered.remove(&place);
        if let Some(at) = settled.and_then(|undelivered| undelivered.take_back_at) {
            self.take_backs.remove(&(at, place.0, place.1));
        }
    }

    /// What is to be done now, or a share of it. While the server must not write, only waits end.
    pub fn due(&mut self, now: MonoUs, may_write: bool) -> Vec<Task<C>> {
        let mut tasks = vec![];
        while tasks.len() < ANSWERS
            && let Some((_, (client, why))) = self.dismissed.pop_first()
        {
            self.clients.remove(&client);
            tasks.push(Task::Dismissed(client, why));
        }
        while tasks.len() < ANSWERS
            && let Some(&(deadline, ticket)) = self.deadlines.first()
            && deadline <= now
        {
            self.deadlines.pop_first();
            tasks.extend(
                self.remove(ticket)
                    .map(|place| Task::TimedOut(place.client)),
            );
        }
        if !may_write {
            self.paused_until = now.plus_ms(PAUSED_MS);
            return tasks;
        }
        let mut grants = 0;
        while grants < ANSWERS
            && self.take_backs.first().is_some_and(|(at, ..)| *at <= now)
            && let Some((_, name, owner)) = self.take_backs.pop_first()
        {
            if let Some(undelivered) = self.undelivered.get_mut(&(name.clone(), owner.clone())) {
                undelivered.take_back_at = None;
                let fence = undelivered.fence;
                tasks.push(Task::TakeBack(GrantId { name, owner, fence }));
                grants += 1;
            }
        }
        for _ in 0..ROUND_KEYS {
            let Some((_, name)) = self.looks.first().filter(|(at, _)| *at <= now).cloned() else {
                break;
            };
            self.set_look(&name, None);
            tasks.push(Task::Look(name));
        }
        if !self.lines.is_empty() && self.next_round <= now {
            let quiet = self.active_until <= now;
            self.next_round = now.plus_ms(if quiet { QUIET_ROUND_MS } else { ROUND_MS });
            self.round(now, &mut tasks);
        }
        tasks
    }

    /// The next contended keys after those of the round before, each once.
    fn round(&mut self, now: MonoUs, tasks: &mut Vec<Task<C>>) {
        let after = self.round_after.take();
        let rest = after.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
        let again = after
            .as_ref()
            .map(|after| self.lines.range(..=Rc::clone(after)));
        let lines: Vec<_> = self
            .lines
            .range::<Rc<Name>, _>((rest, Bound::Unbounded))
            .chain(again.into_iter().flatten())
            .take(ROUND_KEYS)
            .collect();
        self.round_after = lines.last().map(|(name, _)| Rc::clone(name));
        let awake = |line: &Line| line.rest_until.is_none_or(|until| until <= now);
        tasks.extend(
            lines
                .into_iter()
                .filter(|(_, line)| awake(line))
                .map(|(name, _)| Task::Look(Rc::clone(name))),
        );
    }

    /// When [`Queue::due`] has something next, which may be past; none if there is nothing to wait for.
    pub fn next_due(&self) -> Option<MonoUs> {
        let deadline = match self.dismissed.is_empty() {
            true => self.deadlines.first().map(|(at, _)| *at),
            false => Some(MonoUs(0)),
        };
        let round = (!self.lines.is_empty()).then_some(self.next_round);
        let look = self.looks.first().map(|(at, _)| *at);
        let take_back = self.take_backs.first().map(|(at, ..)| *at);
        let writing = [take_back, round, look].into_iter().flatten().min();
        let writing = writing.map(|at| at.max(self.paused_until));
        deadline.into_iter().chain(writing).min()
    }
}

#[cfg(test)]
mod tests;
