//! Clients that wait: how they are blocked, woken, served and let go.
//!
//! Wake-ups come by three ways. RELEASE, and an ACQUIRE that finds the key free, hand over in their own
//! step ([`serve_next`]). One timer fires when a wait is over, when a contended key should have expired,
//! and every 10 ms for all that others may do to a key ([`timer_fired`]). The server's cron does the same
//! by the monotonic clock, whatever became of the timer ([`cron`]).

use super::State;
use std::ffi::CStr;

use super::api::{Blocked, ClientId, Ctx, Key, Kind, Parting, Refusal, Setting, Text, Timer};
use super::info::Cause;
use super::load::ClientUnblock;
use crate::lock::{self, Fence, LockId, Owner};
use crate::queue::{BACK_OFF_MS, Dismissal, Grant, GrantId, JoinRequest, Queue, Task};
use crate::reply::{self, Reply};
use crate::request::Acquire;
use crate::time::{MonoUs, UnixMs, Wait};

/// Default of `lockkeeper.max-waiters`, over all keys. One waiter and its connection cost the server
/// 40 to 75 kB that count for maxmemory.
const DEFAULT_MAX_WAITERS: u64 = 1_000;

/// Default of `lockkeeper.max-waiters-per-key`: half of all, so that one key leaves as many places to the
/// others as it can take.
const DEFAULT_MAX_WAITERS_PER_KEY: u64 = 500;

/// Upper bound of both: more connections than any server has.
const MOST_MAX_WAITERS: u64 = 1_000_000;

/// What the server's timers, which count in milliseconds, are late by at least: they look once before
/// their time and once after it. Asked for so much less, one in five comes a millisecond sooner.
const TIMER_LATE_US: u64 = 200;

/// A timer that is late by this much has been lost, or the wall clock was stepped back.
const OVERDUE_MS: u64 = 50;

/// What the module remembers of those who wait.
pub struct Waiting {
    queue: Queue<Blocked>,
    max_waiters: u64,
    max_waiters_per_key: u64,
    /// The server became a replica, and its loop has not turned since.
    demoted: bool,
    /// The timer that is running, and when it is to fire.
    timer: Option<(Timer, MonoUs)>,
    client_unblock: ClientUnblock,
    /// Clients that CLIENT UNBLOCK may have let go without an answer: their connections are closed, so
    /// that they ask again.
    unanswered: Vec<ClientId>,
    /// For tests: nobody is woken but by the cron.
    pub deaf: bool,
}

impl Waiting {
    pub fn new(client_unblock: ClientUnblock) -> Waiting {
        Waiting {
            queue: Queue::default(),
            max_waiters: DEFAULT_MAX_WAITERS,
            max_waiters_per_key: DEFAULT_MAX_WAITERS_PER_KEY,
            demoted: false,
            timer: None,
            client_unblock,
            unanswered: vec![],
            deaf: false,
        }
    }

    pub fn queue(&self) -> &Queue<Blocked> {
        &self.queue
    }

    pub fn max_waiters(&self) -> u64 {
        self.max_waiters
    }

    pub fn max_waiters_per_key(&self) -> u64 {
        self.max_waiters_per_key
    }

    /// Why nobody may join the queue of this key now, if so.
    fn full(&self, name: &LockId) -> Option<Reply> {
        if self.queue.waiters() as u64 >= self.max_waiters {
            Some(reply::queue_full(self.max_waiters))
        } else if self.queue.waiters_of(name) as u64 >= self.max_waiters_per_key {
            Some(reply::queue_of_key_full(self.max_waiters_per_key))
        } else {
            None
        }
    }

    /// An owner has shown that it knows of its lock.
    pub fn spoke(&mut self, ctx: &Ctx, name: Text, owner: Owner) {
        if self.queue.has_unconfirmed() {
            self.queue.confirm(&name.in_db(ctx.db()), owner);
        }
    }

    /// The owner gives up its place. Answers the client that waited in it.
    pub fn leave(&mut self, ctx: &Ctx, name: Text, owner: Owner) -> Option<Blocked> {
        if self.queue.waiters() == 0 {
            return None;
        }
        self.queue.leave_owner(&name.in_db(ctx.db()), owner)
    }
}

/// The client of this command joins the queue of the key, which ends at `ends_at` if it does.
pub fn wait(
    ctx: &Ctx,
    name: Text,
    request: &Acquire,
    wait: Wait,
    ends_at: Option<UnixMs>,
) -> Reply {
    let Acquire { owner, ttl, .. } = *request;
    let one_try = || {
        State::get(ctx).stats.refusals += 1;
        Reply::Null
    };
    if !ctx.can_block() {
        return one_try();
    }
    let name = name.in_db(ctx.db());
    let client_unblock = {
        let State { waiting, stats, .. } = &mut *State::get(ctx);
        if let Some(full) = waiting.full(&name)
            && !waiting.queue.waits(&name, owner)
        {
            stats.queue_full += 1;
            return full;
        }
        waiting.client_unblock
    };
    let Some(client) = ctx.block(client_unblock != ClientUnblock::Crashes) else {
        return one_try();
    };
    let now = ctx.clocks();
    let earlier = {
        let queue = &mut State::get(ctx).waiting.queue;
        let deadline = now.mono.plus(wait);
        let earlier = queue.join(
            &name,
            JoinRequest {
                owner,
                ttl,
                deadline,
                client,
            },
            now.mono,
        );
        queue.held(&name, ends_at, now);
        earlier
    };
    ctx.queued();
    if let Some(earlier) = earlier {
        earlier.answer(Reply::Null);
    }
    rearm(ctx);
    Reply::Later
}

/// Gives the key to the next in line, in the step of the running command. Answers the key if nobody
/// waits for it.
pub fn serve_next<'c>(
    ctx: &'c Ctx,
    name: Text,
    key: Key<'c>,
    replaced: Option<Fence>,
    cause: Option<Cause>,
) -> Option<Key<'c>> {
    let (grant, cause) = {
        let State {
            waiting, fences, ..
        } = &mut *State::get(ctx);
        if waiting.queue.waiters() == 0 || waiting.deaf {
            return Some(key);
        }
        let now = ctx.clocks();
        let id = name.in_db(ctx.db());
        let cause = cause.unwrap_or(Cause::of_free_key(&waiting.queue, &id, now.wall));
        match waiting.queue.next(&id, replaced, now, fences) {
            Some(grant) => (grant, cause),
            None => return Some(key),
        }
    };
    key.give(name, grant.lease());
    tell(ctx, grant, cause);
    rearm(ctx);
    None
}

/// The lease of a key ends at another time, which may be sooner than those who wait for it expect.
pub fn renewed(ctx: &Ctx, name: Text, ends_at: UnixMs) {
    {
        let queue = &mut State::get(ctx).waiting.queue;
        if queue.waiters() == 0 {
            return;
        }
        queue.held(&name.in_db(ctx.db()), Some(ends_at), ctx.clocks());
    }
    rearm(ctx);
}

/// The key is written: tells the client.
fn tell(ctx: &Ctx, grant: Grant<Blocked>, cause: Cause) {
    let waited_us = grant.waited_us(ctx.clocks().mono);
    State::get(ctx).stats.granted(cause, waited_us);
    let reply = lock::Outcome::Acquired(grant.id.fence).into();
    grant.client().grant(reply, grant.id);
}

/// The timer has fired.
pub fn timer_fired(ctx: &Ctx) {
    {
        let waiting = &mut State::get(ctx).waiting;
        waiting.timer = None;
        if waiting.deaf {
            return;
        }
    }
    work(ctx);
}

/// The server's cron, ten times a second by default: whatever was missed is made good here.
pub fn cron(ctx: &Ctx) {
    let now = ctx.clocks().mono;
    let overdue = {
        let waiting = &mut State::get(ctx).waiting;
        if waiting.queue.is_idle() {
            return;
        }
        waiting
            .timer
            .take_if(|(_, at)| at.plus_ms(OVERDUE_MS) < now)
    };
    if let Some((timer, _)) = overdue {
        ctx.stop_timer(timer);
    }
    work(ctx);
}

/// Does what is due, and sees to it that the timer fires for what is due next.
fn work(ctx: &Ctx) {
    let unanswered = std::mem::take(&mut State::get(ctx).waiting.unanswered);
    for client in unanswered {
        ctx.close(client);
    }
    let is_master = ctx.is_master();
    {
        let waiting = &mut State::get(ctx).waiting;
        waiting.demoted = false;
        if !is_master {
            // Another server is: it does not know of grants whose reply was lost here.
            waiting.queue.forget_grants();
        }
    }
    let may_write = is_master && !ctx.must_not_write();
    let tasks = State::get(ctx)
        .waiting
        .queue
        .due(ctx.clocks().mono, may_write);
    for task in tasks {
        match task {
            Task::TimedOut(client) => {
                State::get(ctx).stats.wait_timeouts += 1;
                client.answer(Reply::Null);
            }
            Task::Dismissed(client, why) => client.answer(why.into()),
            Task::Poll(name) => look(ctx, &name),
            Task::TakeBack(grant) => take_back(ctx, &grant),
        }
    }
    rearm(ctx);
}

/// Looks at a contended key, and serves the next in line if it is free.
fn look(ctx: &Ctx, name: &LockId) {
    ctx.select(name.db);
    let text = ctx.text(&name.name);
    let (free, ends_at) = {
        let key = ctx.open(text.text());
        (key.kind() == Kind::Empty, key.ends_at())
    };
    let now = ctx.clocks();
    let (grant, cause) = {
        let State {
            waiting, fences, ..
        } = &mut *State::get(ctx);
        if !free {
            waiting.queue.held(name, ends_at, now);
            return;
        }
        let cause = Cause::of_free_key(&waiting.queue, name, now.wall);
        match waiting.queue.next(name, None, now, fences) {
            Some(grant) => (grant, cause),
            None => return,
        }
    };
    if let Some(grant) = write(ctx, text.text(), grant) {
        tell(ctx, grant, cause);
    }
}

/// Writes a grant outside of a command. If the server refuses, the grant is gone: its place is first in
/// line again, or all of the key's line were told to ask the cluster.
fn write(ctx: &Ctx, text: Text, grant: Grant<Blocked>) -> Option<Grant<Blocked>> {
    let lease = grant.lease();
    let Err(refusal) = ctx.call_set(text, &lease.value(), lease.ends_at) else {
        return Some(grant);
    };
    let now = ctx.clocks();
    let name = grant.id.lock.clone();
    let queue = &mut State::get(ctx).waiting.queue;
    queue.put_back(grant, now);
    match refusal {
        Refusal::NotHere => queue.dismiss(Some(&name), Dismissal::NotHere),
        Refusal::NotNow => {}
    }
    None
}

/// The owner was never told of its grant and has not spoken since: the key goes to the next in line, or
/// is deleted, if it still carries that grant.
fn take_back(ctx: &Ctx, doubted: &GrantId) {
    let name = &doubted.lock;
    ctx.select(name.db);
    let text = ctx.text(&name.name);
    let carried = {
        let key = ctx.open(text.text());
        doubted.owner.borrowed().may_hold(key.len())
            && key
                .value()
                .is_some_and(|value| doubted.is_carried_by(value))
    };
    let now = ctx.clocks();
    let next = {
        let State {
            waiting, fences, ..
        } = &mut *State::get(ctx);
        if !carried {
            waiting.queue.forget(doubted);
            return;
        }
        waiting.queue.next(name, Some(doubted.fence), now, fences)
    };
    let taken = match next {
        Some(grant) => write(ctx, text.text(), grant)
            .map(|grant| tell(ctx, grant, Cause::TakeBack))
            .is_some(),
        None => ctx.call_del(text.text()).is_ok(),
    };
    let State { waiting, stats, .. } = &mut *State::get(ctx);
    if taken {
        waiting.queue.forget(doubted);
        stats.grants_taken_back += 1;
    } else {
        waiting
            .queue
            .take_back_at(doubted, now.mono.plus_ms(BACK_OFF_MS));
    }
}

/// A client that waited was unblocked, and told unless it had gone.
pub fn parted(ctx: &Ctx, parting: Parting, told: bool) {
    let Some(grant) = parting.grant else { return };
    let now = ctx.clocks().mono;
    {
        let queue = &mut State::get(ctx).waiting.queue;
        match told {
            true => queue.forget(&grant),
            false => queue.take_back_at(&grant, now),
        }
    }
    rearm(ctx);
}

/// A client has gone. Answers whether it waited, so that it must be unblocked now.
pub fn gone(ctx: &Ctx, client: Blocked) -> bool {
    let waited = {
        let State { waiting, stats, .. } = &mut *State::get(ctx);
        let waited = waiting.queue.leave(client);
        stats.waiters_gone += u64::from(waited);
        waited
    };
    rearm(ctx);
    waited
}

/// A client that we had unblocked already is being let go by somebody else: it is gone, or CLIENT UNBLOCK
/// has met our answer.
pub fn gone_twice(ctx: &Ctx, client: ClientId) {
    {
        let waiting = &mut State::get(ctx).waiting;
        if waiting.client_unblock != ClientUnblock::MayLeaveUnanswered {
            return;
        }
        waiting.unanswered.push(client);
    }
    rearm(ctx);
}

/// Lets a client go that was just blocked, and is not known to the queue.
pub fn send_away(ctx: &Ctx, client: Blocked, reply: Reply) {
    State::get(ctx).waiting.queue.leave(client);
    client.answer(reply);
    rearm(ctx);
}

/// `lockkeeper.max-waiters`: how many clients may wait, over all keys. At 0 all who wait are answered null
/// and no timer runs any more, so that the module can be unloaded; a grant in doubt that the server does
/// not let us take back is left to its ttl.
pub struct MaxWaiters;

impl Setting for MaxWaiters {
    const NAME: &CStr = c"max-waiters";
    const DEFAULT: u64 = DEFAULT_MAX_WAITERS;
    const LEAST: u64 = 0;
    const MOST: u64 = MOST_MAX_WAITERS;

    fn get(ctx: &Ctx) -> u64 {
        State::get(ctx).waiting.max_waiters
    }

    fn set(ctx: &Ctx, number: u64) {
        State::get(ctx).waiting.max_waiters = number;
    }
}

/// `lockkeeper.max-waiters-per-key`: how many of them may wait for one key.
pub struct MaxWaitersPerKey;

impl Setting for MaxWaitersPerKey {
    const NAME: &CStr = c"max-waiters-per-key";
    const DEFAULT: u64 = DEFAULT_MAX_WAITERS_PER_KEY;
    const LEAST: u64 = 1;
    const MOST: u64 = MOST_MAX_WAITERS;

    fn get(ctx: &Ctx) -> u64 {
        State::get(ctx).waiting.max_waiters_per_key
    }

    fn set(ctx: &Ctx, number: u64) {
        State::get(ctx).waiting.max_waiters_per_key = number;
    }
}

/// Settings have changed: nobody waits where nobody may.
pub fn configured(ctx: &Ctx) {
    {
        let waiting = &mut State::get(ctx).waiting;
        if waiting.max_waiters > 0 || waiting.queue.is_idle() {
            return;
        }
        waiting.queue.forget_grants();
        waiting.queue.dismiss(None, Dismissal::Drained);
    }
    // The first share in this very step: on most servers that is all of them.
    work(ctx);
}

/// The server became a replica, which grants nothing. Most servers have told all who wait themselves by
/// now, and closed their connections; Valkey 9 leaves those to us who are in a cluster or can be redirected.
/// A grant in doubt is forgotten in the next turn of the loop, when the server may be master again.
pub fn demoted(ctx: &Ctx) {
    {
        let waiting = &mut State::get(ctx).waiting;
        waiting.demoted = true;
        waiting.queue.dismiss(None, Dismissal::Demoted);
    }
    rearm(ctx);
}

/// Sees to it that the timer fires when something is due next, and does not run for nothing.
fn rearm(ctx: &Ctx) {
    let now = ctx.clocks().mono;
    let (late, due) = {
        let waiting = &mut State::get(ctx).waiting;
        let due = match waiting.unanswered.is_empty() && !waiting.demoted {
            true => waiting.queue.next_due().map(|due| due.max(now)),
            false => Some(now),
        };
        match (waiting.timer, due) {
            (Some((_, at)), Some(due)) if at <= due => return,
            (None, None) => return,
            (_, due) => (waiting.timer.take(), due),
        }
    };
    if let Some((timer, _)) = late {
        ctx.stop_timer(timer);
    }
    if let Some(due) = due {
        let timer = ctx.start_timer(match due.since_us(now) {
            0 => 0,
            // Not 0: what came too early after all would be tried again without a pause.
            us => us.saturating_sub(TIMER_LATE_US).div_ceil(1000).max(1),
        });
        State::get(ctx).waiting.timer = Some((timer, due));
    }
}
