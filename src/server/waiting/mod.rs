//! Clients that wait: how they are blocked, woken, served and unblocked.
//!
//! The life of a waiter: [`wait`] blocks it and puts it into the queue. It leaves the queue when it is served,
//! when its time is up, when its owner gives up, or when the server reports that it is gone; whoever takes it out
//! unblocks it ([`callbacks`]). A grant is written before its waiter is unblocked, and is confirmed when the
//! reply is out.
//!
//! Wake-ups come by three ways. RELEASE, and an ACQUIRE that finds the key free, hand over in their own
//! step ([`serve_next`]). One [`timer`] fires when a wait is over, when a contended key should have expired,
//! and every 10 ms for all that others may do to a key ([`work`]). The server's cron does the same
//! by the monotonic clock, whatever became of the timer ([`cron`]).

mod callbacks;
mod timer;
mod work;

use super::api::{Blocked, Ctx, Key, Text, clocks};
use super::keys::lock_id;
use super::quirks::Quirk;
use super::state::{State, Waiter};
use super::stats::Cause;
use super::{effects, faults};
use crate::lock::{Fence, LockId, Owner};
use crate::queue::{Dismissal, JoinRequest};
use crate::reply::{self, Reply};
use crate::request::Acquire;
use crate::time::{MonoUs, UnixMs, Wait};
use callbacks::notify;
use timer::rearm;
use work::work;

pub use callbacks::refuse;
pub use work::cron;

/// The client of this command joins the queue of the key, which ends at `ends_at` if it does. Returns the reply
/// to a client that may not wait, none to one that waits.
pub fn wait(
    ctx: &Ctx,
    name: Text,
    request: &Acquire,
    wait: Wait,
    ends_at: Option<UnixMs>,
) -> Option<Reply> {
    let one_try = || {
        State::with(ctx, |state| state.stats.refusals += 1);
        Some(Reply::Null)
    };
    if !ctx.can_block() {
        return one_try();
    }
    let Acquire { owner, ttl, .. } = *request;
    let lock = lock_id(ctx, name);
    let may_be_unblocked = match State::with(ctx, |state| admit(state, &lock, owner)) {
        Ok(may_be_unblocked) => may_be_unblocked,
        Err(full) => return Some(full),
    };
    let Some(blocked) = ctx.block(may_be_unblocked) else {
        return one_try();
    };
    let now = clocks();
    let request = JoinRequest {
        owner,
        ttl,
        deadline: now.mono.plus(wait),
        client: blocked.client(),
    };
    let earlier = State::with(ctx, |state| {
        let earlier = state.queue.join(&lock, request, now.mono);
        state.queue.held(&lock, ends_at, now);
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

/// Gives the key to the next in its queue, in the step of the running command. Returns the key if nobody
/// waits for it.
///
/// `replaced`: the fence of the value that goes. `cause`: none for a key that was found free.
pub fn serve_next<'c>(
    ctx: &'c Ctx,
    name: Text,
    key: Key<'c>,
    replaced: Option<Fence>,
    cause: Option<Cause>,
) -> Option<Key<'c>> {
    if nobody_waits(ctx) || faults::only_the_cron_wakes() {
        return Some(key);
    }
    let (lock, now) = (lock_id(ctx, name), clocks());
    let next = State::with(ctx, |state| {
        let cause = cause.unwrap_or(state.cause_of_free_key(&lock, now));
        state.next(&lock, replaced, now).map(|grant| (grant, cause))
    });
    let Some((grant, cause)) = next else {
        return Some(key);
    };
    effects::grant(name, key, grant.lease());
    notify(ctx, grant, cause);
    rearm(ctx);
    None
}

fn nobody_waits(ctx: &Ctx) -> bool {
    State::with(ctx, |state| state.queue.waiters() == 0)
}

/// The lease of a key ends at another time, which may be sooner than those who wait for it expect.
pub fn renewed(ctx: &Ctx, name: Text, ends_at: UnixMs) {
    if nobody_waits(ctx) {
        return;
    }
    let (lock, now) = (lock_id(ctx, name), clocks());
    State::with(ctx, |state| state.queue.held(&lock, Some(ends_at), now));
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
    State::with(ctx, |state| state.queue.leave_owner(&lock, owner))
}

/// How many clients wait for the key, and the first of them, at most so many: owner, and how long it has waited,
/// in milliseconds.
pub fn list(ctx: &Ctx, name: Text, at_most: usize, now: MonoUs) -> (i64, Vec<(Vec<u8>, i64)>) {
    if nobody_waits(ctx) {
        return (0, vec![]);
    }
    let lock = lock_id(ctx, name);
    State::with(ctx, |state| {
        let first = state.queue.list(&lock, now).take(at_most);
        let waited_ms = |us: u64| (us / 1000).cast_signed();
        let first = first.map(|(owner, us)| (owner.bytes().to_vec(), waited_ms(us)));
        (state.queue.waiters_of(&lock) as i64, first.collect())
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
