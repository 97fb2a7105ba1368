//! Who waits for which lock, and whose turn it is.
//!
//! Pure: it knows neither connections nor keys. `C` is whatever the shell unblocks a client by. The shell
//! polls keys and writes them, and reports to the queue; the queue decides whose turn it is and when to poll
//! again. It is never borrowed while the shell writes, so who is granted leaves the queue before the write and
//! is put back if the server refuses it.
//!
//! - here: who is next
//! - [`schedule`]: when to poll the keys
//! - [`unconfirmed`]: grants that are not confirmed yet

mod schedule;
mod unconfirmed;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;

use crate::lock::{
    Fence, Fences, Holder, Holders, LeaseRequest, Limit, LockId, OwnedOwner, Owner, Value,
};
use crate::time::{MonoUs, Now, Ttl, UnixMs};
use schedule::{ContendedKey, Schedule};
use unconfirmed::UnconfirmedGrants;

pub use schedule::{BACK_OFF_MS, Cause, Seen};
pub use unconfirmed::{GrantId, take_back};

/// How many clients are unblocked in one turn of the server's loop, when many waits end at once, and how many
/// join a key in one step: a reply costs the server about 10 us, and who does not wait must not be held up by
/// those who do.
const BATCH: usize = 100;

/// The order of arrival, over all keys.
type Ticket = u64;

/// One client's wait.
#[derive(Clone, Debug)]
struct Waiter<C> {
    lock: Rc<LockId>,
    owner: OwnedOwner,
    ttl: Ttl,
    limit: Limit,
    deadline: MonoUs,
    since: MonoUs,
    client: C,
}

/// What a client asks for when it joins.
#[derive(Clone, Copy, Debug)]
pub struct JoinRequest<'a, C> {
    pub lease: LeaseRequest<'a>,
    /// When to give up.
    pub deadline: MonoUs,
    pub client: C,
}

/// One who waits, as others see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queued<'q> {
    pub owner: Owner<'q>,
    pub limit: Limit,
    pub waited_us: u64,
}

/// What one waiter is granted.
#[derive(Clone, Debug)]
pub struct Grant<C> {
    ticket: Ticket,
    waiter: Waiter<C>,
    pub id: GrantId,
    ends_at: UnixMs,
}

impl<C: Copy> Grant<C> {
    fn holder(&self) -> Holder<'_> {
        Holder {
            owner: self.id.owner.borrowed(),
            fence: self.id.fence,
            limit: self.waiter.limit,
            ends_at: self.ends_at,
        }
    }

    /// What the key is to hold if it is granted to this one alone.
    fn alone(&self) -> Option<Value> {
        let value = || Value::exclusive(self.id.fence, self.id.owner.borrowed(), self.ends_at);
        (self.waiter.limit == Limit::EXCLUSIVE).then(value)
    }

    pub fn client(&self) -> C {
        self.waiter.client
    }

    pub fn waited_us(&self, now: MonoUs) -> u64 {
        now.since_us(self.waiter.since)
    }
}

/// What is to be written, and then who is to be notified.
#[derive(Clone, Debug)]
pub struct Turn<C> {
    /// None if the key is to go.
    pub value: Option<Value>,
    /// In the order of arrival. They have left the queue.
    pub grants: Vec<Grant<C>>,
    /// Why there was room for them.
    pub cause: Cause,
    /// When the key was to end before, as far as the last poll could see.
    ended_at: Option<UnixMs>,
}

/// Those who wait for one key.
#[derive(Clone, Debug, Default)]
struct KeyQueue {
    order: BTreeSet<Ticket>,
    owners: HashMap<OwnedOwner, Ticket>,
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
    /// This client has left, and is to learn why.
    Dismissed(C, Dismissal),
    /// Look whether the key is free, and serve whose turn it is.
    Poll(Rc<LockId>),
    /// The replies of these grants of one key are lost: take back those that the key still carries.
    TakeBack(Vec<GrantId>),
}

/// All who wait.
#[derive(Clone, Debug)]
pub struct Queue<C> {
    waiters: BTreeMap<Ticket, Waiter<C>>,
    /// Those who wait, and those who are dismissed.
    clients: BTreeMap<C, Ticket>,
    /// They have left, and have no reply yet.
    dismissed: BTreeMap<Ticket, (C, Dismissal)>,
    deadlines: BTreeSet<(MonoUs, Ticket)>,
    next_ticket: Ticket,
    schedule: Schedule<KeyQueue>,
    unconfirmed: UnconfirmedGrants,
}

impl<C: Copy + Ord> Default for Queue<C> {
    fn default() -> Queue<C> {
        Queue {
            waiters: BTreeMap::new(),
            clients: BTreeMap::new(),
            dismissed: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            next_ticket: 0,
            schedule: Schedule::default(),
            unconfirmed: UnconfirmedGrants::default(),
        }
    }
}

impl<C: Copy + Ord> Queue<C> {
    /// Nobody waits and every grant is confirmed: there is nothing to do for anybody.
    pub fn is_idle(&self) -> bool {
        self.clients.is_empty() && self.unconfirmed.is_empty()
    }

    /// How many clients wait, for a lock or for the reply that they have to leave.
    pub fn waiters(&self) -> usize {
        self.clients.len()
    }

    pub fn contended_keys(&self) -> usize {
        self.schedule.keys.len()
    }

    pub fn oldest_waiter_us(&self, now: MonoUs) -> u64 {
        self.waiters
            .values()
            .next()
            .map_or(0, |waiter| now.since_us(waiter.since))
    }

    pub fn waiters_of(&self, lock: &LockId) -> usize {
        self.schedule
            .queue(lock)
            .map_or(0, |queue| queue.order.len())
    }

    /// Those who wait for a key, in order.
    pub fn list<'q>(
        &'q self,
        lock: &LockId,
        now: MonoUs,
    ) -> impl Iterator<Item = Queued<'q>> + use<'q, C> {
        let tickets = self.schedule.queue(lock).map(|queue| queue.order.iter());
        tickets.into_iter().flatten().map(move |ticket| {
            let waiter = &self.waiters[ticket];
            Queued {
                owner: waiter.owner.borrowed(),
                limit: waiter.limit,
                waited_us: now.since_us(waiter.since),
            }
        })
    }

    /// Whether this owner waits for the key already.
    pub fn waits(&self, lock: &LockId, owner: Owner) -> bool {
        self.ticket(lock, owner).is_some()
    }

    fn ticket(&self, lock: &LockId, owner: Owner) -> Option<Ticket> {
        self.schedule
            .queue(lock)?
            .owners
            .get(owner.bytes())
            .copied()
    }

    /// Joins at the end of the key's queue, or takes over the turn that the owner has: the order stays, all
    /// else is new. Returns the client that waited for that turn before.
    pub fn join(&mut self, lock: &LockId, request: JoinRequest<C>, now: MonoUs) -> Option<C> {
        let JoinRequest {
            lease: LeaseRequest { owner, ttl, limit },
            deadline,
            client,
        } = request;
        self.schedule.active(now);
        let before = self.ticket(lock, owner);
        if let Some(ticket) = before
            && let Some(waiter) = self.waiters.get_mut(&ticket)
        {
            let earlier = std::mem::replace(&mut waiter.client, client);
            let allowed = std::mem::replace(&mut waiter.limit, limit);
            self.deadlines.remove(&(waiter.deadline, ticket));
            (waiter.ttl, waiter.deadline) = (ttl, deadline);
            self.deadlines.insert((deadline, ticket));
            self.clients.remove(&earlier);
            self.clients.insert(client, ticket);
            if self.first(lock) == Some(ticket) {
                self.follows(lock, allowed);
            }
            return Some(earlier);
        }
        let lock = match self.schedule.keys.get_key_value(lock) {
            Some((lock, _)) => Rc::clone(lock),
            None => Rc::new(lock.clone()),
        };
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let waiter = Waiter {
            lock,
            owner: owner.into(),
            ttl,
            limit,
            deadline,
            since: now,
            client,
        };
        self.insert(ticket, waiter);
        None
    }

    fn insert(&mut self, ticket: Ticket, waiter: Waiter<C>) {
        let queue = self.schedule.queue_or_new(&waiter.lock);
        queue.order.insert(ticket);
        queue.owners.insert(waiter.owner.clone(), ticket);
        self.deadlines.insert((waiter.deadline, ticket));
        self.clients.insert(waiter.client, ticket);
        self.waiters.insert(ticket, waiter);
    }

    fn remove(&mut self, ticket: Ticket) -> Option<Waiter<C>> {
        let waiter = self.waiters.remove(&ticket)?;
        self.deadlines.remove(&(waiter.deadline, ticket));
        self.clients.remove(&waiter.client);
        if let Some(ContendedKey { queue, .. }) = self.schedule.keys.get_mut(&waiter.lock) {
            queue.order.remove(&ticket);
            queue.owners.remove(&waiter.owner);
            if queue.order.is_empty() {
                self.schedule.remove(&waiter.lock);
            }
        }
        Some(waiter)
    }

    fn first(&self, lock: &LockId) -> Option<Ticket> {
        self.schedule.queue(lock)?.order.first().copied()
    }

    /// One who waits gives up its turn. If it was first, it may have been in the way of those behind it.
    fn give_up(&mut self, ticket: Ticket) -> Option<Waiter<C>> {
        let lock = Rc::clone(&self.waiters.get(&ticket)?.lock);
        let was_first = self.first(&lock) == Some(ticket);
        let waiter = self.remove(ticket)?;
        if was_first {
            self.follows(&lock, waiter.limit);
        }
        Some(waiter)
    }

    /// Whoever is first now comes after one with this limit, whom the holders did not admit. With a larger
    /// one it may be admitted.
    fn follows(&mut self, lock: &LockId, allowed: Limit) {
        if let Some(first) = self.first(lock)
            && self.waiters[&first].limit > allowed
        {
            self.schedule.look_again(lock, Cause::Release);
        }
    }

    /// A client is gone: it will not be granted anything. Returns whether it waited.
    pub fn leave(&mut self, client: C) -> bool {
        let Some(ticket) = self.clients.remove(&client) else {
            return false;
        };
        if self.dismissed.remove(&ticket).is_none() {
            self.give_up(ticket);
        }
        true
    }

    /// The owner gives up its turn for this key. Returns the client that waited for it.
    pub fn leave_owner(&mut self, lock: &LockId, owner: Owner) -> Option<C> {
        let ticket = self.ticket(lock, owner)?;
        self.give_up(ticket).map(|waiter| waiter.client)
    }

    /// Everybody leaves at once, those of one key or all, and learns why, some at a time
    /// ([`Task::Dismissed`]).
    pub fn dismiss(&mut self, lock: Option<&LockId>, why: Dismissal) {
        let tickets: Vec<Ticket> = match lock {
            Some(lock) => self
                .schedule
                .queue(lock)
                .into_iter()
                .flat_map(|queue| &queue.order)
                .copied()
                .collect(),
            None => self.waiters.keys().copied().collect(),
        };
        for ticket in tickets {
            if let Some(waiter) = self.remove(ticket) {
                self.clients.insert(waiter.client, ticket);
                self.dismissed.insert(ticket, (waiter.client, why));
            }
        }
    }

    /// A key was found with these holders, showing this. Returns what is to be written if the first in its queue
    /// is admitted, as [`Queue::serve`] does.
    pub fn look(
        &mut self,
        lock: &LockId,
        holders: Holders,
        seen: Option<Seen>,
        now: Now,
        fences: &mut Fences,
    ) -> Option<Turn<C>> {
        if self.admitted(lock, &holders).is_some() {
            let cause = self.schedule.cause_of_room(lock, seen, now.wall);
            return Some(self.let_in(lock, holders, cause, now, fences));
        }
        let key_ends_at = seen.and_then(|seen| seen.ends_at);
        let ends_at = holders.next_end().into_iter().chain(key_ends_at).min();
        self.held(lock, seen, ends_at, now);
        None
    }

    /// A key is to have these holders. Those who wait join them, in order, as long as the first is admitted; a
    /// hundred at most, and the rest soon. The shell must write the turn and then notify who is granted, or
    /// [`Queue::put_back`] it.
    pub fn serve(
        &mut self,
        lock: &LockId,
        holders: Holders,
        now: Now,
        fences: &mut Fences,
    ) -> Turn<C> {
        let cause = match self.schedule.has_expired(lock, now.wall) {
            true => Cause::Expiry,
            false => Cause::Release,
        };
        self.let_in(lock, holders, cause, now, fences)
    }

    fn let_in(
        &mut self,
        lock: &LockId,
        mut holders: Holders,
        cause: Cause,
        now: Now,
        fences: &mut Fences,
    ) -> Turn<C> {
        let ended_at = self.schedule.ends_at(lock);
        let (mut grants, mut alone) = (vec![], None);
        while alone.is_none()
            && grants.len() < BATCH
            && let Some(first) = self.admitted(lock, &holders)
            && let Some(grant) = self.take(first, holders.highest(), now, fences)
        {
            // Nobody is admitted beside it, and so it needs no list.
            alone = grant.alone();
            if alone.is_none() {
                holders.join(grant.holder());
            }
            grants.push(grant);
        }
        let next_end = match &alone {
            Some(value) => Some(value.ends_at),
            None => holders.next_end(),
        };
        let value = alone.or_else(|| holders.value());
        let written = value.as_ref().map(|value| Seen {
            len: value.bytes.len(),
            ends_at: Some(value.ends_at),
        });
        self.held(lock, written, next_end, now);
        if grants.len() == BATCH {
            // The rest has room for the same reason.
            self.schedule.look_again(lock, cause);
        }
        Turn {
            value,
            grants,
            cause,
            ended_at,
        }
    }

    /// The first in the queue of the key, if these holders admit it.
    fn admitted(&self, lock: &LockId, holders: &Holders) -> Option<Ticket> {
        let first = self.first(lock)?;
        let Waiter { owner, limit, .. } = &self.waiters[&first];
        holders.admits(owner.borrowed(), *limit).then_some(first)
    }

    /// Takes a waiter out of the queue: it is granted. `before`: the highest fence of the value that is replaced.
    fn take(
        &mut self,
        ticket: Ticket,
        before: Option<Fence>,
        now: Now,
        fences: &mut Fences,
    ) -> Option<Grant<C>> {
        let waiter = self.remove(ticket)?;
        self.schedule.active(now.mono);
        let id = GrantId {
            lock: Rc::clone(&waiter.lock),
            owner: waiter.owner.clone(),
            fence: fences.next(now.wall, before),
        };
        self.unconfirmed.add(&id);
        Some(Grant {
            ticket,
            id,
            ends_at: now.wall.plus(waiter.ttl),
            waiter,
        })
    }

    /// The server refused to write a turn: who was granted waits again, in the order of before, and the key is
    /// left alone for a while.
    pub fn put_back(&mut self, lock: &LockId, turn: Turn<C>, now: Now) {
        for grant in turn.grants {
            self.forget(&grant.id);
            self.insert(grant.ticket, grant.waiter);
        }
        self.schedule.back_off(lock, turn.ended_at, now);
    }

    /// The key is held, until `ends_at` if it ends: it is polled when it has expired. `seen`: what shows of it;
    /// none if that is not known.
    pub fn held(&mut self, lock: &LockId, seen: Option<Seen>, ends_at: Option<UnixMs>, now: Now) {
        self.schedule.held(lock, seen, ends_at, now);
    }

    /// A poll sees this of the key. Returns whether it can leave it at that, and need not read the value.
    pub fn settle(&mut self, lock: &LockId, seen: Option<Seen>, now: Now) -> bool {
        self.schedule.settle(lock, seen, now)
    }

    /// The reply of this grant is lost, or the server refused to take it back: it is taken back then, unless
    /// its owner has confirmed it or does so before.
    pub fn take_back_at(&mut self, grant: &GrantId, at: MonoUs) {
        self.unconfirmed.take_back_at(grant, at);
    }

    /// The owner of the key has shown that it knows of its lock: no grant to it will be taken back.
    pub fn confirm(&mut self, lock: &LockId, owner: Owner) {
        self.unconfirmed.confirm(lock, owner);
    }

    /// Whether any grant is still to be confirmed, by its reply or by its owner.
    pub fn has_unconfirmed(&self) -> bool {
        !self.unconfirmed.is_empty()
    }

    /// This grant needs no confirmation any more: its reply is out, or it was taken back, or the key does not
    /// carry it.
    pub fn forget(&mut self, grant: &GrantId) {
        self.unconfirmed.forget(grant);
    }

    /// Nothing will be taken back: another server is master, or the module is about to go.
    pub fn forget_grants(&mut self) {
        self.unconfirmed.forget_all();
    }

    /// What is to be done now, or some of it. While the server must not write, only waits end.
    pub fn due(&mut self, now: MonoUs, may_write: bool) -> Vec<Task<C>> {
        let mut tasks = vec![];
        while tasks.len() < BATCH
            && let Some((_, (client, why))) = self.dismissed.pop_first()
        {
            self.clients.remove(&client);
            tasks.push(Task::Dismissed(client, why));
        }
        while tasks.len() < BATCH
            && let Some(&(deadline, ticket)) = self.deadlines.first()
            && deadline <= now
        {
            self.deadlines.pop_first();
            tasks.extend(
                self.give_up(ticket)
                    .map(|waiter| Task::TimedOut(waiter.client)),
            );
        }
        if !may_write {
            self.schedule.pause(now);
            return tasks;
        }
        let mut take_backs = self.unconfirmed.due(now, BATCH);
        // Those of a key together: a list is written whole, and can be long.
        take_backs.sort_by(|one, next| one.lock.cmp(&next.lock));
        let of_keys = take_backs.chunk_by(|one, next| one.lock == next.lock);
        tasks.extend(of_keys.map(|of_key| Task::TakeBack(of_key.to_vec())));
        tasks.extend(self.schedule.due(now).into_iter().map(Task::Poll));
        tasks
    }

    /// When [`Queue::due`] has something next, which may be past; none if there is nothing to wait for.
    pub fn next_due(&self) -> Option<MonoUs> {
        let deadline = match self.dismissed.is_empty() {
            true => self.deadlines.first().map(|(at, _)| *at),
            false => Some(MonoUs(0)),
        };
        let take_back = self.unconfirmed.next_due().into_iter();
        let writing = take_back.chain(self.schedule.next_due()).min();
        let writing = writing.map(|at| at.max(self.schedule.paused_until));
        deadline.into_iter().chain(writing).min()
    }
}

#[cfg(test)]
mod tests;
