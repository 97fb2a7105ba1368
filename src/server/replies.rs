//! How a reply is sent.

use super::api::Ctx;
use crate::reply::{Info, ListInfo, Reply};

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
    ctx.reply_map(if info.list.is_some() { 9 } else { 6 });
    ctx.reply_bytes(b"owner");
    match &info.owner {
        Some(owner) => ctx.reply_bytes(owner),
        None => ctx.reply_null(),
    }
    ctx.reply_bytes(b"fence");
    send_integer_or_null(ctx, info.fence);
    ctx.reply_bytes(b"held-ms");
    send_integer_or_null(ctx, info.held_ms);
    send_integer(ctx, b"ttl-ms", info.ttl_ms);
    send_integer(ctx, b"waiters", info.waiters);
    ctx.reply_bytes(b"queue");
    ctx.reply_array(info.queue.len());
    for queued in &info.queue {
        ctx.reply_map(if queued.limit.is_some() { 3 } else { 2 });
        ctx.reply_bytes(b"owner");
        ctx.reply_bytes(&queued.owner);
        send_integer(ctx, b"waited-ms", queued.waited_ms);
        if let Some(limit) = queued.limit {
            send_integer(ctx, b"limit", limit);
        }
    }
    if let Some(list) = &info.list {
        send_list(ctx, list);
    }
}

fn send_list(ctx: &Ctx, list: &ListInfo) {
    send_integer(ctx, b"limit", list.limit);
    send_integer(ctx, b"holding", list.holding);
    ctx.reply_bytes(b"holders");
    ctx.reply_array(list.holders.len());
    for holder in &list.holders {
        ctx.reply_map(5);
        ctx.reply_bytes(b"owner");
        ctx.reply_bytes(&holder.owner);
        send_integer(ctx, b"fence", holder.fence);
        send_integer(ctx, b"held-ms", holder.held_ms);
        send_integer(ctx, b"ttl-ms", holder.ttl_ms);
        send_integer(ctx, b"limit", holder.limit);
    }
}

fn send_integer(ctx: &Ctx, name: &[u8], number: i64) {
    ctx.reply_bytes(name);
    ctx.reply_integer(number);
}

fn send_integer_or_null(ctx: &Ctx, number: Option<i64>) {
    match number {
        Some(number) => ctx.reply_integer(number),
        None => ctx.reply_null(),
    }
}
