//! What is done when the timer fires, outside of any command: waits end, contended keys are polled, grants are
//! taken back.

use super::callbacks::{notify, refuse};
use super::timer::{QueueTimer, rearm, stop_if_overdue};
use crate::lock::{Found, LockId};
use crate::queue::{self, BACK_OFF_MS, Dismissal, GrantId, Task};
use crate::reply::Reply;
use crate::server::api::{Ctx, Refusal, Text, TimerCallback, clocks};
use crate::server::state::{State, Turn};
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
            Task::TakeBack(grants) => take_back(ctx, &grants),
        }
    }
    rearm(ctx);
}

/// Looks whether a contended key is free or has room, and if so serves those who wait for it.
fn poll(ctx: &Ctx, lock: &LockId) {
    ctx.select(lock.db);
    let name = ctx.text(&lock.name);
    let key = ctx.open(name.text());
    let (now, seen) = (clocks(), keys::seen(&key));
    let settled = State::with(ctx, |state| state.queue.settle(lock, seen, now));
    if settled {
        return;
    }
    let holders = keys::holders(ctx, &key, now.wall);
    drop(key);
    let served = State::with(ctx, |state| match holders {
        Some(holders) => state.look(lock, holders, seen, now),
        None => {
            let ends_at = seen.and_then(|seen| seen.ends_at);
            state.queue.held(lock, seen, ends_at, now);
            None
        }
    });
    if let Some(turn) = served {
        write(ctx, lock, name.text(), turn);
    }
}

/// Writes a turn and notifies those who are granted. If the server refuses, they wait again, or all who wait for
/// the key are sent to ask the cluster. Returns whether it was written.
fn write(ctx: &Ctx, lock: &LockId, name: Text, turn: Turn) -> bool {
    let Err(refusal) = effects::call_write(ctx, name, turn.value.as_ref()) else {
        notify(ctx, turn);
        return true;
    };
    let now = clocks();
    State::with(ctx, |state| {
        state.queue.put_back(lock, turn, now);
        match refusal {
            Refusal::NotHere => state.queue.dismiss(Some(lock), Dismissal::NotHere),
            Refusal::NotNow => {}
        }
    });
    false
}

/// The replies of these grants of one key were lost and their owners have not confirmed them: their holders leave
/// the key, as far as it still carries those grants, and those who wait are served.
fn take_back(ctx: &Ctx, unconfirmed: &[GrantId]) {
    let Some(GrantId { lock, .. }) = unconfirmed.first() else {
        return;
    };
    ctx.select(lock.db);
    let name = ctx.text(&lock.name);
    let now = clocks();
    let left = {
        let key = ctx.open(name.text());
        let value = |of: &GrantId| match keys::find(ctx, &key, of.owner.borrowed()) {
            Found::Value(value) => Some(value),
            _ => None,
        };
        let value = unconfirmed.iter().find_map(value);
        value.and_then(|value| queue::take_back(unconfirmed, value, now.wall))
    };
    let forget = |state: &mut State| {
        unconfirmed
            .iter()
            .for_each(|grant| state.queue.forget(grant));
    };
    let Some((others, taken)) = left else {
        return State::with(ctx, forget);
    };
    let turn = State::with(ctx, |state| state.serve(lock, others, now));
    let written = write(ctx, lock, name.text(), turn);
    State::with(ctx, |state| {
        if written {
            forget(state);
            state.stats.grants_taken_back += taken as u64;
        } else {
            let again_at = now.mono.plus_ms(BACK_OFF_MS);
            for grant in unconfirmed {
                state.queue.take_back_at(grant, again_at);
            }
        }
    });
}
