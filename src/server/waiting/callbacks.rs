//! How a client that waits is unblocked, and what the server's callbacks then do.

use super::timer::rearm;
use crate::lock::Outcome;
use crate::queue::GrantId;
use crate::reply::{self, Reply};
use crate::server::api::{Blocked, BlockedClient, ClientId, ConnectionKind, Ctx, clocks};
use crate::server::quirks::Quirk;
use crate::server::replies;
use crate::server::state::{State, Turn, Waiter};

/// What a client that waited learns by being unblocked.
pub struct Message {
    reply: Reply,
    /// The grant of which the reply notifies the client.
    grant: Option<GrantId>,
}

/// Unblocks a client that is granted nothing.
pub fn refuse(client: Blocked<Waiter>, reply: Reply) {
    client.unblock(Message { reply, grant: None });
}

/// Unblocks the clients of a turn that is written.
pub fn notify(ctx: &Ctx, turn: Turn) {
    for grant in turn.grants {
        let waited_us = grant.waited_us(clocks().mono);
        State::with(ctx, |state| state.stats.granted(turn.cause, waited_us));
        grant.client().unblock(Message {
            reply: Outcome::Acquired(grant.id.fence).into(),
            grant: Some(grant.id),
        });
    }
    rearm(ctx);
}

impl BlockedClient for Waiter {
    type Message = Message;

    fn reply_callback(ctx: &Ctx, message: &Message, kind: ConnectionKind) -> bool {
        replies::send(ctx, &message.reply);
        // Asked for grants only, and after the reply, which may itself exceed the buffer's limit.
        message.grant.is_none() || !ctx.is_closing(kind)
    }

    fn free_privdata(ctx: &Ctx, message: Message, replied: bool) {
        let Some(grant) = message.grant else { return };
        let now = clocks().mono;
        State::with(ctx, |state| match replied {
            true => state.queue.forget(&grant),
            false => state.queue.take_back_at(&grant, now),
        });
        rearm(ctx);
    }

    fn disconnect_callback(ctx: &Ctx, client: Blocked<Waiter>) {
        if leave(ctx, client) {
            client.unblock_silently();
        } else {
            close_later(ctx, ctx.client());
        }
    }

    fn timeout_callback(ctx: &Ctx, client: Blocked<Waiter>) {
        if leave(ctx, client) {
            client.unblock_silently();
        }
        ctx.reply_null();
    }

    fn abandoned(ctx: &Ctx, client: Blocked<Waiter>) {
        State::with(ctx, |state| state.queue.leave(client));
        refuse(client, Reply::Error(reply::PANIC.to_owned()));
        rearm(ctx);
    }
}

/// A client is gone. Returns whether it waited, so that it must be unblocked now.
fn leave(ctx: &Ctx, client: Blocked<Waiter>) -> bool {
    let waited = State::with(ctx, |state| {
        let waited = state.queue.leave(client);
        state.stats.waiters_gone += u64::from(waited);
        waited
    });
    rearm(ctx);
    waited
}

/// A client that we had unblocked already is being unblocked by the server: it is gone, or CLIENT UNBLOCK came
/// between its grant and its reply.
fn close_later(ctx: &Ctx, client: ClientId) {
    let close = State::with(ctx, |state| {
        let close = state.quirks.has(Quirk::ClientUnblockMayLeaveNoReply);
        if close {
            state.without_reply.push(client);
        }
        close
    });
    if close {
        rearm(ctx);
    }
}
