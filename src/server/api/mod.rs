//! The server's module API, made safe: the only folder with `unsafe` in it, and it knows nothing of locks.
//!
//! What is above it is reached through traits: [`Command`], [`BlockedClient`], [`TimerCallback`],
//! [`ServerEvents`], [`InfoSection`], [`Setting`] and [`Module`]. Each file has the wrappers of one subject,
//! named as in the redis-module crate.
//!
//! Three promises of the server stand behind every `SAFETY` line here:
//!
//! - It calls a module on its main thread only, one callback at a time.
//! - What it hands to a callback (the context, the arguments) stays valid until that callback returns.
//!   A [`Ctx`] is made only from it, at the beginning of a callback, and cannot leave that callback: it is
//!   lent, never given away. So "the context is live" is true wherever there is a [`Ctx`].
//! - A pointer to an API function is filled in before our load function goes on, or stays null where the
//!   server is too old to have it. Nothing writes it later, so reading it is sound.

use std::cell::{Cell, RefCell, RefMut};
use std::ffi::{CString, c_int};
use std::panic::{self, AssertUnwindSafe};
use std::ptr;

use redis_module::raw;

/// The function of the module API with this name, to be called in the `unsafe` block around it. Panics, into
/// the guard of the running callback, where the server has no such function; the functions used here are
/// all in Redis 7.0.5 unless said.
macro_rules! api {
    ($function:ident) => {
        raw::$function.expect(stringify!($function))
    };
}

mod blocked;
mod call_reply;
mod client;
mod clocks;
mod commands;
mod configuration;
mod info;
mod key;
mod module;
mod reply;
mod server_events;
mod string;
mod timer;

pub use blocked::{Blocked, BlockedClient};
pub use call_reply::Refusal;
pub use client::{ClientId, ConnectionKind, client_field};
pub use clocks::{clocks, unix_time};
pub use commands::{Access, Arg, ArgKind, Args, Command, Spec};
pub use configuration::{ConfigCtx, Setting};
pub use info::{InfoCtx, InfoSection};
pub use key::{Key, Kind};
pub(crate) use module::module;
pub use module::{Module, on_load, on_unload};
pub use server_events::ServerEvents;
pub use string::Text;
pub use timer::{Timer, TimerCallback};

const OK: c_int = raw::REDISMODULE_OK as c_int;
const ERR: c_int = raw::REDISMODULE_ERR as c_int;

/// The context of the running callback: the way to everything else. Never null.
pub struct Ctx {
    raw: *mut raw::RedisModuleCtx,
    /// The client of this command was blocked: a reply to it is no longer the command's business.
    client_blocked: Cell<bool>,
}

impl Ctx {
    /// # Safety
    ///
    /// `raw` is the context that the server gave to the running callback, and the `Ctx` is dropped before
    /// that callback returns.
    unsafe fn new(raw: *mut raw::RedisModuleCtx) -> Ctx {
        Ctx {
            raw,
            client_blocked: Cell::new(false),
        }
    }

    /// Writes a warning into the server's log.
    pub fn warn(&self, message: &str) {
        warn(Some(self), message);
    }

    /// Whether the server has a memory limit and a policy that takes keys away when it is reached.
    pub fn may_evict(&self) -> bool {
        flags(Some(self)) & raw::REDISMODULE_CTX_FLAGS_EVICT != 0
    }

    /// Whether the server decides for itself. Not for the uncontended path: see [`flags`].
    pub fn is_master(&self) -> bool {
        flags(Some(self)) & raw::REDISMODULE_CTX_FLAGS_MASTER != 0
    }

    /// Whether the server must not write of its own accord: it crashes or breaks its replicas if a
    /// timer writes during CLIENT PAUSE or FAILOVER.
    pub fn must_not_write(&self) -> bool {
        // SAFETY: takes no argument and reads the server's own state.
        unsafe { api!(RedisModule_AvoidReplicaTraffic)() != 0 }
    }

    /// The database that this callback works on.
    pub fn db(&self) -> i32 {
        // SAFETY: the context is live.
        unsafe { api!(RedisModule_GetSelectedDb)(self.raw) }
    }

    pub fn select(&self, db: i32) {
        // SAFETY: the context is live; the server refuses a database that it does not have.
        unsafe { api!(RedisModule_SelectDb)(self.raw, db) };
    }
}

/// The context as the API wants it where it takes null for "none".
fn raw_or_null(ctx: Option<&Ctx>) -> *mut raw::RedisModuleCtx {
    ctx.map_or(ptr::null_mut(), |ctx| ctx.raw)
}

/// Writes a warning into the server's log.
fn warn(ctx: Option<&Ctx>, message: &str) {
    let level = raw::REDISMODULE_LOGLEVEL_WARNING.as_ptr().cast();
    let message = CString::new(message.replace('\0', "\\0")).unwrap_or_default();
    // The message is an argument of "%s": in the format's place a percent sign in it would be read as a
    // directive.
    //
    // SAFETY: the context is live, or null, which the API takes; all strings are live C strings, and the
    // format has the one directive that the one argument is for.
    unsafe {
        api!(RedisModule_Log)(raw_or_null(ctx), level, c"%s".as_ptr(), message.as_ptr());
    }
}

/// What the server and the client are doing. Not for the uncontended path: the server computes its whole
/// memory state for it.
fn flags(ctx: Option<&Ctx>) -> u32 {
    // SAFETY: the context is live, or null, which the API takes.
    unsafe { api!(RedisModule_GetContextFlags)(raw_or_null(ctx)) }.cast_unsigned()
}

/// Proof that a callback of the server runs, and so that we are on its main thread.
///
/// # Safety
///
/// A value of this type exists only inside a callback, and cannot be sent to another thread.
pub unsafe trait OnMainThread {}

// SAFETY: made at the beginning of a callback, only lent, and not `Send` (it holds a raw pointer).
unsafe impl OnMainThread for Ctx {}

/// A value that only the server's main thread touches.
pub struct MainThread<T>(RefCell<T>);

// SAFETY: whoever borrows the value shows an `OnMainThread`, so it is only borrowed on the main thread.
unsafe impl<T> Sync for MainThread<T> {}

impl<T> MainThread<T> {
    pub const fn new(value: T) -> MainThread<T> {
        MainThread(RefCell::new(value))
    }

    /// Panics if the value is borrowed.
    pub fn borrow_mut(&self, _: &impl OnMainThread) -> RefMut<'_, T> {
        self.0.borrow_mut()
    }

    /// The same for a crash report, which may come while the value is borrowed.
    pub fn try_borrow_mut(&self, _: &impl OnMainThread) -> Option<RefMut<'_, T>> {
        self.0.try_borrow_mut().ok()
    }
}

/// Runs the body of a callback. A panic must not reach the server, which it would end.
fn guarded<R>(body: impl FnOnce() -> R) -> Option<R> {
    panic::catch_unwind(AssertUnwindSafe(body)).ok()
}

/// The server refused what we asked for; the text says what.
pub struct Refused(pub String);

/// Turns the API's OK or ERR into a result.
fn accepted(status: c_int, what: &str) -> Result<(), Refused> {
    (status == OK)
        .then_some(())
        .ok_or_else(|| Refused(format!("the server refused {what}")))
}
