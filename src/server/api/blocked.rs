//! Clients that are blocked: their command has no reply yet.
//!
//! The life of a blocked client: [`Ctx::block`]; then one of its callbacks, or we ourselves, unblock it, once.
//! If it is still connected the server calls `reply_callback` in the next turn of its loop, and then, also for
//! one that is gone, `free_privdata`. For a client that goes, and for one that the server itself unblocks,
//! `disconnect_callback` is called; for CLIENT UNBLOCK … TIMEOUT, `timeout_callback`. Both are also called for a client that we
//! unblocked in this turn of the loop.

use std::cell::Cell;
use std::cmp::Ordering;
use std::ffi::{c_int, c_void};
use std::fmt::Debug;
use std::marker::PhantomData;
use std::ptr;

use redis_module::raw;

use super::{ConnectionKind, Ctx, OK, flags, guarded};

/// Those who are blocked for one purpose, and what the callbacks of `RedisModule_BlockClient` do for them.
pub trait BlockedClient: Copy + Debug + 'static {
    /// What a client learns by being unblocked: its private data.
    type Message;

    /// The client is being unblocked and is still there: sends the reply. Returns whether the client will
    /// get it, as far as anybody can tell.
    fn reply_callback(ctx: &Ctx, message: &Self::Message, kind: ConnectionKind) -> bool;

    /// The client was unblocked with this message. `replied`: what `reply_callback` returned; false for a
    /// client that was gone by then.
    fn free_privdata(ctx: &Ctx, message: Self::Message, replied: bool);

    /// The client is gone, or is about to have a reply from the server itself (CLIENT UNBLOCK … ERROR, a server that
    /// becomes a replica). Unblocks it, unless it is unblocked already.
    fn disconnect_callback(ctx: &Ctx, client: Blocked<Self>);

    /// CLIENT UNBLOCK … TIMEOUT: unblocks the client, unless it is unblocked already, and replies.
    fn timeout_callback(ctx: &Ctx, client: Blocked<Self>);

    /// The command that blocked the client panicked before it was [`JustBlocked::kept`]: unblocks it.
    fn abandoned(ctx: &Ctx, client: Blocked<Self>);
}

/// A blocked client. Unblock it exactly once: twice is a double free, never and the module cannot be
/// unloaded.
#[derive(Clone, Copy, Debug)]
pub struct Blocked<B> {
    raw: *mut raw::RedisModuleBlockedClient,
    /// Known only where it was blocked: the server's callbacks name a client by its pointer alone.
    kind: ConnectionKind,
    callbacks: PhantomData<B>,
}

impl<B> PartialEq for Blocked<B> {
    fn eq(&self, other: &Blocked<B>) -> bool {
        self.raw == other.raw
    }
}

impl<B> Eq for Blocked<B> {}

impl<B> PartialOrd for Blocked<B> {
    fn partial_cmp(&self, other: &Blocked<B>) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<B> Ord for Blocked<B> {
    fn cmp(&self, other: &Blocked<B>) -> Ordering {
        self.raw.cmp(&other.raw)
    }
}

/// The private data of a client that is being unblocked.
struct PrivateData<B: BlockedClient> {
    message: B::Message,
    kind: ConnectionKind,
    /// Set by the reply callback, which is not called for a client that has gone.
    replied: Cell<bool>,
}

impl<B: BlockedClient> Blocked<B> {
    /// Unblocks the client before the server sleeps again.
    pub fn unblock(self, message: B::Message) {
        let data = PrivateData::<B> {
            message,
            kind: self.kind,
            replied: Cell::new(false),
        };
        self.unblock_raw(Box::into_raw(Box::new(data)));
    }

    /// The same for a client that gets no message: neither `reply_callback` nor `free_privdata` are called.
    /// In a callback of this client only.
    pub fn unblock_silently(self) {
        self.unblock_raw(ptr::null_mut());
    }

    fn unblock_raw(self, data: *mut PrivateData<B>) {
        // SAFETY: the client was blocked, and is unblocked once: whoever keeps clients promises that, as
        // `Blocked` says. The data is null or a box of the type that the callbacks of this client expect,
        // which is bound to `B`.
        unsafe { api!(RedisModule_UnblockClient)(self.raw, data.cast()) };
    }

    /// The client that the server names to a callback.
    fn named(raw: *mut raw::RedisModuleBlockedClient) -> Blocked<B> {
        Blocked {
            raw,
            kind: ConnectionKind::default(),
            callbacks: PhantomData,
        }
    }
}

/// A client that was blocked by this command, and that nobody will unblock yet. Dropped like this, by a
/// panic, it would hang for ever: so it is given to [`BlockedClient::abandoned`].
#[must_use]
pub struct JustBlocked<'c, B: BlockedClient> {
    client: Blocked<B>,
    ctx: &'c Ctx,
}

impl<B: BlockedClient> JustBlocked<'_, B> {
    pub fn client(&self) -> Blocked<B> {
        self.client
    }

    /// Somebody else will unblock the client.
    pub fn kept(self) {
        std::mem::forget(self);
    }
}

impl<B: BlockedClient> Drop for JustBlocked<'_, B> {
    fn drop(&mut self) {
        guarded(|| B::abandoned(self.ctx, self.client));
    }
}

impl Ctx {
    /// Whether the client of this command can wait: not in a transaction, a script or a function, and
    /// not on a server that does not decide. Blocking there is refused with an error by the API
    /// itself while our command runs on.
    pub fn can_block(&self) -> bool {
        let flags = flags(Some(self));
        let one_step = raw::REDISMODULE_CTX_FLAGS_MULTI
            | raw::REDISMODULE_CTX_FLAGS_LUA
            | raw::REDISMODULE_CTX_FLAGS_DENY_BLOCKING;
        flags & one_step == 0 && flags & raw::REDISMODULE_CTX_FLAGS_MASTER != 0
    }

    /// Blocks the client of this command. The server's own timeout is not used: it comes up to 100 ms
    /// late, and crashes Redis 7.2 when it meets a grant.
    ///
    /// `may_be_unblocked`: whether CLIENT UNBLOCK is to work. None if the server refuses: Valkey does so
    /// for a client that is subscribed to a channel.
    pub fn block<B: BlockedClient>(&self, may_be_unblocked: bool) -> Option<JustBlocked<'_, B>> {
        let timeout = may_be_unblocked.then_some(timeout_callback::<B> as CommandCallback);
        // SAFETY: the context is live and that of a command (`can_block`); the callbacks are those of `B`, for
        // which `Blocked::unblock` makes the private data.
        let raw = unsafe {
            api!(RedisModule_BlockClient)(
                self.raw,
                Some(reply_callback::<B>),
                timeout,
                Some(free_privdata::<B>),
                0,
            )
        };
        if raw.is_null() {
            return None;
        }
        self.client_blocked.set(true);
        // SAFETY: the client was just blocked.
        unsafe {
            api!(RedisModule_SetDisconnectCallback)(raw, Some(disconnect_callback::<B>));
        }
        let client = Blocked {
            kind: self.connection_kind(),
            ..Blocked::named(raw)
        };
        Some(JustBlocked { client, ctx: self })
    }
}

type CommandCallback = unsafe extern "C" fn(
    *mut raw::RedisModuleCtx,
    *mut *mut raw::RedisModuleString,
    c_int,
) -> c_int;

extern "C" fn reply_callback<B: BlockedClient>(
    ctx: *mut raw::RedisModuleCtx,
    _: *mut *mut raw::RedisModuleString,
    _: c_int,
) -> c_int {
    // SAFETY: the context of this callback.
    let ctx = unsafe { Ctx::new(ctx) };
    // SAFETY: the context is live, and that of a reply callback.
    let data = unsafe { api!(RedisModule_GetBlockedClientPrivateData)(ctx.raw) };
    // SAFETY: null, or made by `Blocked::unblock` of the same `B`; `free_privdata` frees it after this.
    if let Some(data) = unsafe { data.cast::<PrivateData<B>>().as_ref() } {
        guarded(|| {
            let replied = B::reply_callback(&ctx, &data.message, data.kind);
            data.replied.set(replied);
        });
    }
    OK
}

extern "C" fn free_privdata<B: BlockedClient>(ctx: *mut raw::RedisModuleCtx, data: *mut c_void) {
    // SAFETY: the context of this callback.
    let ctx = unsafe { Ctx::new(ctx) };
    // SAFETY: made by `Blocked::unblock` of the same `B`; the server calls this once, at the end, and not
    // for null.
    let data = unsafe { Box::from_raw(data.cast::<PrivateData<B>>()) };
    // SAFETY: the context is live, and that of a client that was blocked.
    let gone = unsafe { api!(RedisModule_BlockedClientDisconnected)(ctx.raw) != 0 };
    let replied = !gone && data.replied.get();
    guarded(|| B::free_privdata(&ctx, data.message, replied));
}

extern "C" fn disconnect_callback<B: BlockedClient>(
    ctx: *mut raw::RedisModuleCtx,
    client: *mut raw::RedisModuleBlockedClient,
) {
    // SAFETY: the context of this callback.
    let ctx = unsafe { Ctx::new(ctx) };
    guarded(|| B::disconnect_callback(&ctx, Blocked::named(client)));
}

extern "C" fn timeout_callback<B: BlockedClient>(
    ctx: *mut raw::RedisModuleCtx,
    _: *mut *mut raw::RedisModuleString,
    _: c_int,
) -> c_int {
    // SAFETY: the context of this callback.
    let ctx = unsafe { Ctx::new(ctx) };
    // SAFETY: the context is live, and that of a timeout callback.
    let client = unsafe { api!(RedisModule_GetBlockedClientHandle)(ctx.raw) };
    guarded(|| B::timeout_callback(&ctx, Blocked::named(client)));
    OK
}
