//! Clients that wait: how they are blocked, woken, served and unblocked.
//!
//! The life of a waiter: [`wait`] blocks it and puts it into the queue. It leaves the queue when it is served,
//! when its time is up, when its owner gives up, or when the server reports that it is gone; whoever takes it out
//! unblocks it ([`callbacks`]). A grant is written before its waiter is unblocked, and is confirmed when the
//! reply is out. All who are granted in one step are written at once.
//!
//! Wake-ups come by three ways. Commands that let others in hand over in their own step: RELEASE and all that
//! change who holds a key ([`carry_out`]), and an ACQUIRE that finds room ([`serve_before`]). One [`timer`] fires when a wait is over, when a contended key should have expired,
//! and every 10 ms for all that others may do to a key ([`work`]). The server's cron does the same
//! by the monotonic clock, whatever became of the timer ([`cron`]).

mod callbacks;
mod timer;
mod work;

use super::api::{Blocked, Ctx, Key, Text, clocks};
use super::keys::lock_id;
use super::quirks::Quirk;
use super::state::{State, Waiter};
use super::{effects, faults, keys};
use crate::lock::{Effect, Holders, LeaseRequest, Limit, LockId, Owner};
use crate::queue::{Dismissal, JoinRequest, Queued, Seen};
use crate::reply::{self, QueuedInfo, Reply};
use crate::time::{MonoUs, UnixMs, Wait};
use callbacks::notify;
use timer::rearm;
use work::work;

pub use callbacks::refuse;
pub use work::cron;

/// The client of this command joins the queue of the key, which shows this, and whose first lease ends at `ends_at`
/// if it does. Returns the reply to a client that may not wait, none to one that waits.
pub fn wait(
    ctx: &Ctx,
    name: Text,
    lease: LeaseRequest,
    wait: Wait,
    seen: Option<Seen>,
    ends_at: Option<UnixMs>,
) -> Option<Reply> {
    let one_try = || {
        State::with(ctx, |state| state.stats.refusals += 1);
        Some(Reply::Null)
    };
    if !ctx.can_block() {
        return one_try();
    }
    let lock = lock_id(ctx, name);
    let may_be_unblocked = match State::with(ctx, |state| admit(state, &lock, lease.owner)) {
        Ok(may_be_unblocked) => may_be_unblocked,
        Err(full) => return Some(full),
    };
    let Some(blocked) = ctx.block(may_be_unblocked) else {
        return one_try();
    };
    let now = clocks();
    let request = JoinRequest {
        lease,
        deadline: now.mono.plus(wait),
        client: blocked.client(),
    };
    let earlier = State::with(ctx, |state| {
        let earlier = state.queue.join(&lock, request, now.mono);
        state.queue.held(&lock, seen, ends_at, now);
        earlier
    });
    blocked.kept();
    if let Some(earlier) = earlier {
        refuse(earlier, Reply::Null);
    }
    rearm(ctx);
    None
}

/// Whether CLIENT UNBLOCK is to work for a client that joins the queue now, or why it may not join.
fn admit(state: &mut State, lock: &LockId, owner: Owner) -> Result<bool, Reply> {
    let queue = &state.queue;
    let full = if queue.waiters() as u64 >= state.max_waiters {
        Some(reply::queue_full(state.max_waiters))
    } else if queue.waiters_of(lock) as u64 >= state.max_waiters_per_key {
        Some(reply::queue_of_key_full(state.max_waiters_per_key))
    } else {
        None
    };
    match full {
        Some(full) if !queue.waits(lock, owner) => {
            state.stats.queue_full += 1;
            Err(full)
        }
        _ => Ok(!state.quirks.has(Quirk::ClientUnblockCrashes)),
    }
}

/// A key that is free or has room is for those who wait for it before it is for a newcomer. Returns the key, and
/// whether somebody still waits for it; false for one with an exclusive holder, which is nobody else's anyhow.
#[inline]
pub fn serve_before<'c>(ctx: &'c Ctx, name: Text<'c>, key: Key<'c>) -> (Key<'c>, bool) {
    match nobody_waits(ctx) || faults::only_the_cron_wakes() {
        true => (key, false),
        false => serve_if_room(ctx, name, key),
    }
}

fn serve_if_room<'c>(ctx: &'c Ctx, name: Text<'c>, key: Key<'c>) -> (Key<'c>, bool) {
    let now = clocks();
    let Some(holders) = keys::holders(ctx, &key, now.wall) else {
        return (key, false);
    };
    let (lock, seen) = (lock_id(ctx, name), keys::seen(&key));
    let served = State::with(ctx, |state| state.look(&lock, holders, seen, now));
    let key = match served {
        Some(turn) => {
            effects::write(name, key, turn.value.as_ref());
            notify(ctx, turn);
            ctx.open(name)
        }
        None => key,
    };
    let queued = State::with(ctx, |state| state.queue.waiters_of(&lock) > 0);
    (key, queued)
}

/// Carries out what a command decided, which the server has checked: nothing can fail.
#[inline]
pub fn carry_out(ctx: &Ctx, name: Text, key: Key, effect: Effect) {
    match effect {
        Effect::Nothing => {}
        Effect::Set(value) => effects::write(name, key, Some(&value)),
        Effect::Expire { ends_at } => {
            key.expire(name, ends_at);
            renewed(ctx, name, ends_at);
        }
        Effect::Hold(holders) => hold(ctx, name, key, holders),
    }
}

/// The key has these holders now, and those who wait and are admitted beside them.
fn hold(ctx: &Ctx, name: Text, key: Key, holders: Holders) {
    if nobody_waits(ctx) || faults::only_the_cron_wakes() {
        return effects::write(name, key, holders.value().as_ref());
    }
    let (lock, now) = (lock_id(ctx, name), clocks());
    let turn = State::with(ctx, |state| state.serve(&lock, holders, now));
    effects::write(name, key, turn.value.as_ref());
    notify(ctx, turn);
}

fn nobody_waits(ctx: &Ctx) -> bool {
    State::with(ctx, |state| state.queue.waiters() == 0)
}

/// The lease of a key ends at another time, which may be sooner than those who wait for it expect.
fn renewed(ctx: &Ctx, name: Text, ends_at: UnixMs) {
    if nobody_waits(ctx) {
        return;
    }
    let (lock, now) = (lock_id(ctx, name), clocks());
    State::with(ctx, |state| {
        state.queue.held(&lock, None, Some(ends_at), now)
    });
    rearm(ctx);
}

/// An owner has shown that it knows of its lock.
pub fn confirm(ctx: &Ctx, name: Text, owner: Owner) {
    if State::with(ctx, |state| state.queue.has_unconfirmed()) {
        let lock = lock_id(ctx, name);
        State::with(ctx, |state| state.queue.confirm(&lock, owner));
    }
}

/// The owner gives up its turn for the key. Returns the client that waited for it, to be [`refuse`]d.
pub fn leave(ctx: &Ctx, name: Text, owner: Owner) -> Option<Blocked<Waiter>> {
    if nobody_waits(ctx) {
        return None;
    }
    let lock = lock_id(ctx, name);
    let client = State::with(ctx, |state| state.queue.leave_owner(&lock, owner));
    if client.is_some() {
        rearm(ctx);
    }
    client
}

/// How many clients wait for the key, and the first of them, at most so many.
pub fn list(ctx: &Ctx, name: Text, at_most: usize, now: MonoUs) -> (i64, Vec<QueuedInfo>) {
    if nobody_waits(ctx) {
        return (0, vec![]);
    }
    let lock = lock_id(ctx, name);
    State::with(ctx, |state| {
        let first = state.queue.list(&lock, now).take(at_most);
        let info = |queued: Queued| QueuedInfo {
            owner: queued.owner.bytes().to_vec(),
            waited_ms: (queued.waited_us / 1000).cast_signed(),
            limit: (queued.limit != Limit::EXCLUSIVE).then(|| queued.limit.number().into()),
        };
        let first = first.map(info).collect();
        (state.queue.waiters_of(&lock) as i64, first)
    })
}

/// Settings have changed: nobody waits where nobody may.
pub fn configured(ctx: &Ctx) {
    let drained = State::with(ctx, |state| {
        if state.max_waiters > 0 || state.queue.is_idle() {
            return false;
        }
        state.queue.forget_grants();
        state.queue.dismiss(None, Dismissal::Drained);
        true
    });
    if drained {
        // The first of them in this very step: on most servers that is all of them.
        work(ctx);
    }
}

/// The server became a replica, which grants nothing. Most servers have unblocked all who wait themselves by
/// now, and closed their connections; Valkey 9 leaves those to us who are in a cluster or can be redirected.
/// An unconfirmed grant is forgotten in the next turn of the loop, when the server may be master again.
pub fn demoted(ctx: &Ctx) {
    State::with(ctx, |state| {
        state.demoted = true;
        state.queue.dismiss(None, Dismissal::Demoted);
    });
    rearm(ctx);
}
