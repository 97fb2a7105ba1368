//! What is done when the timer fires, outside of any command: waits end, contended keys are polled, grants are
//! taken back.

use super::callbacks::{notify, refuse};
use super::timer::{QueueTimer, rearm, stop_if_overdue};
use crate::lock::LockId;
use crate::queue::{BACK_OFF_MS, Dismissal, Grant, GrantId, Task};
use crate::reply::Reply;
use crate::server::api::{Blocked, Ctx, Kind, Refusal, Text, TimerCallback, clocks};
use crate::server::state::{State, Waiter};
use crate::server::stats::Cause;
use crate::server::{effects, faults, keys};

impl TimerCallback for QueueTimer {
    fn fired(ctx: &Ctx) {
        State::with(ctx, |state| state.timer = None);
        if !faults::only_the_cron_wakes() {
            work(ctx);
        }
    }
}

/// The server's cron, ten times a second by default: whatever was missed is made good here.
pub fn cron(ctx: &Ctx) {
    if State::with(ctx, |state| state.queue.is_idle()) {
        return;
    }
    stop_if_overdue(ctx, clocks().mono);
    work(ctx);
}

/// Does what is due, and sees to it that the timer fires for what is due next.
pub fn work(ctx: &Ctx) {
    let without_reply = State::with(ctx, |state| std::mem::take(&mut state.without_reply));
    for client in without_reply {
        ctx.close(client);
    }
    let is_master = ctx.is_master();
    let may_write = is_master && !ctx.must_not_write();
    let now = clocks().mono;
    let tasks = State::with(ctx, |state| {
        state.demoted = false;
        if !is_master {
            // Another server is: it does not know of grants whose reply was lost here.
            state.queue.forget_grants();
        }
        state.queue.due(now, may_write)
    });
    for task in tasks {
        match task {
            Task::TimedOut(client) => {
                State::with(ctx, |state| state.stats.wait_timeouts += 1);
                refuse(client, Reply::Null);
            }
            Task::Dismissed(client, why) => refuse(client, why.into()),
            Task::Poll(lock) => poll(ctx, &lock),
            Task::TakeBack(grant) => take_back(ctx, &grant),
        }
    }
    rearm(ctx);
}

/// Looks whether a contended key is free, and if so serves the next in its queue.
fn poll(ctx: &Ctx, lock: &LockId) {
    ctx.select(lock.db);
    let name = ctx.text(&lock.name);
    let (free, ends_at) = {
        let key = ctx.open(name.text());
        (key.kind() == Kind::Empty, key.ends_at())
    };
    let now = clocks();
    let next = State::with(ctx, |state| {
        if !free {
            state.queue.held(lock, ends_at, now);
            return None;
        }
        let cause = state.cause_of_free_key(lock, now);
        state.next(lock, None, now).map(|grant| (grant, cause))
    });
    if let Some((grant, cause)) = next
        && let Some(grant) = write(ctx, name.text(), grant)
    {
        notify(ctx, grant, cause);
    }
}

/// Writes a grant. If the server refuses, the grant is gone: its waiter is first again, or all who wait for the
/// key are sent to ask the cluster.
fn write(ctx: &Ctx, name: Text, grant: Grant<Blocked<Waiter>>) -> Option<Grant<Blocked<Waiter>>> {
    let Err(refusal) = effects::call_grant(ctx, name, grant.lease()) else {
        return Some(grant);
    };
    let now = clocks();
    State::with(ctx, |state| {
        let lock = grant.id.lock.clone();
        state.queue.put_back(grant, now);
        match refusal {
            Refusal::NotHere => state.queue.dismiss(Some(&lock), Dismissal::NotHere),
            Refusal::NotNow => {}
        }
    });
    None
}

/// The reply of this grant was lost and its owner has not confirmed it: the key goes to the next in its
/// queue, or is deleted, if it still carries that grant.
fn take_back(ctx: &Ctx, unconfirmed: &GrantId) {
    let lock = &*unconfirmed.lock;
    ctx.select(lock.db);
    let name = ctx.text(&lock.name);
    let carried = {
        let key = ctx.open(name.text());
        unconfirmed.owner.borrowed().may_hold(key.len())
            && keys::value(ctx, &key).is_some_and(|value| unconfirmed.is_carried_by(value))
    };
    if !carried {
        return State::with(ctx, |state| state.queue.forget(unconfirmed));
    }
    let now = clocks();
    let replaced = Some(unconfirmed.fence);
    let next = State::with(ctx, |state| state.next(lock, replaced, now));
    let taken = match next {
        Some(grant) => write(ctx, name.text(), grant)
            .map(|grant| notify(ctx, grant, Cause::TakeBack))
            .is_some(),
        None => ctx.call_del(name.text()).is_ok(),
    };
    State::with(ctx, |state| {
        if taken {
            state.queue.forget(unconfirmed);
            state.stats.grants_taken_back += 1;
        } else {
            let again_at = now.mono.plus_ms(BACK_OFF_MS);
            state.queue.take_back_at(unconfirmed, again_at);
        }
    });
}
