//! How a reply is sent.

use super::api::Ctx;
use crate::reply::{Info, Reply};

/// Sends the reply to the client of this callback.
pub fn send(ctx: &Ctx, reply: &Reply) {
    match reply {
        Reply::Integer(number) => ctx.reply_integer(*number),
        Reply::Null => ctx.reply_null(),
        Reply::Error(message) => ctx.reply_error(message),
        Reply::WrongCount => ctx.reply_wrong_arity(),
        Reply::Info(info) => send_info(ctx, info),
    }
}

fn send_info(ctx: &Ctx, info: &Info) {
    ctx.reply_map(6);
    ctx.reply_bytes(b"owner");
    match &info.owner {
        Some(owner) => ctx.reply_bytes(owner),
        None => ctx.reply_null(),
    }
    ctx.reply_bytes(b"fence");
    send_integer_or_null(ctx, info.fence);
    ctx.reply_bytes(b"held-ms");
    send_integer_or_null(ctx, info.held_ms);
    ctx.reply_bytes(b"ttl-ms");
    ctx.reply_integer(info.ttl_ms);
    ctx.reply_bytes(b"waiters");
    ctx.reply_integer(info.waiters);
    ctx.reply_bytes(b"queue");
    ctx.reply_array(info.queue.len());
    for (owner, waited_ms) in &info.queue {
        ctx.reply_map(2);
        ctx.reply_bytes(b"owner");
        ctx.reply_bytes(owner);
        ctx.reply_bytes(b"waited-ms");
        ctx.reply_integer(*waited_ms);
    }
}

fn send_integer_or_null(ctx: &Ctx, number: Option<i64>) {
    match number {
        Some(number) => ctx.reply_integer(number),
        None => ctx.reply_null(),
    }
}
