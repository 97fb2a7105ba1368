//! The entry: a lockkeeper is opened once, and asked for locks.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Value};

use crate::acquire::Acquire;
use crate::bytes::ToBytes;
use crate::error::Error;
use crate::lease::Released;
use crate::message::{Message, MessageSender, WatchdogSender};
use crate::pending::Pending;
use crate::wire::{self, Info};

/// Where locks are asked for: one server, and the watchdog thread that does all talking to it.
/// Cloning gives another way to the same watchdog, whose thread ends with the last clone and handle,
/// or when it is [closed](Lockkeeper::close).
///
/// Whatever asks the server has a twin that blocks, for code without async calls; see
/// [Code that blocks](crate#code-that-blocks).
#[derive(Clone)]
pub struct Lockkeeper {
    watchdog: WatchdogSender,
    label: Arc<str>,
}

impl Lockkeeper {
    pub(crate) fn new(watchdog: MessageSender, label: &str) -> Lockkeeper {
        Lockkeeper {
            watchdog: WatchdogSender::new(watchdog),
            label: Arc::from(label),
        }
    }

    /// The first part of the owners that it makes; see [`Builder::label`](crate::Builder::label).
    pub fn label(&self) -> &str {
        &self.label
    }

    /// Begins to ask for the lock `key`; await the [`Acquire`].
    pub fn acquire(&self, key: impl ToBytes) -> Acquire {
        Acquire::new(self.watchdog.clone(), key.to_bytes(), &self.label)
    }

    /// Who holds the lock and who waits for it; none if nobody does either.
    pub async fn info(&self, key: impl ToBytes) -> Result<Option<Info>, Error> {
        Info::read(self.ask_info(key)?.await?)
    }

    /// See [`info`](Lockkeeper::info).
    ///
    /// # Panics
    /// Inside an asynchronous task, where it would block all others: await `info` there.
    pub fn blocking_info(&self, key: impl ToBytes) -> Result<Option<Info>, Error> {
        Info::read(self.ask_info(key)?.blocking()?)
    }

    /// Releases the lock in the name of `owner`, whoever that is, and gives up that owner's place
    /// in the queue. Harms nobody else: if another holds the lock by now, the result is
    /// [`Lost::Taken`](crate::Lost::Taken).
    pub async fn release_for(
        &self,
        key: impl ToBytes,
        owner: impl ToBytes,
    ) -> Result<Released, Error> {
        wire::reply(self.ask_release(key, owner)?.await?)
    }

    /// See [`release_for`](Lockkeeper::release_for).
    ///
    /// # Panics
    /// Inside an asynchronous task, where it would block all others: await `release_for` there.
    pub fn blocking_release_for(
        &self,
        key: impl ToBytes,
        owner: impl ToBytes,
    ) -> Result<Released, Error> {
        wire::reply(self.ask_release(key, owner)?.blocking()?)
    }

    /// Waits until all that was dropped or given up before has been released or has ended by
    /// itself, but not longer than `limit`: true if that was enough. What others hold, wait for or
    /// give up meanwhile does not matter.
    ///
    /// A program that is about to end wants [`close`](Lockkeeper::close).
    pub async fn settled(&self, limit: Duration) -> bool {
        self.send_settled(limit).await.unwrap_or(true)
    }

    /// See [`settled`](Lockkeeper::settled).
    ///
    /// # Panics
    /// Inside an asynchronous task, where it would block all others: await `settled` there.
    pub fn blocking_settled(&self, limit: Duration) -> bool {
        self.send_settled(limit).blocking().unwrap_or(true)
    }

    /// Gives back all that was taken through this lockkeeper and its clones, ends the watchdog and
    /// its connections, and waits for that, but not longer than `limit`: true if that was enough.
    /// Else a warning is logged, the watchdog goes on trying if the program goes on, and what it
    /// leaves ends by its ttl.
    ///
    /// A lock that is still held is lost to its holder with [`Lost::Gone`](crate::Lost::Gone) *before* it is released.
    /// What is being asked for, and whatever is asked later, gets [`Error::Invalid`].
    ///
    /// The end of a program takes the watchdog with it, so a handle that was dropped just before
    /// may not be released yet. Call this last, or let
    /// [`close_on_drop`](Lockkeeper::close_on_drop) do it.
    pub async fn close(&self, limit: Duration) -> bool {
        self.watchdog.close(limit).await.unwrap_or(true)
    }

    /// See [`close`](Lockkeeper::close).
    ///
    /// # Panics
    /// Inside an asynchronous task, where it would block all others: await `close` there.
    pub fn blocking_close(&self, limit: Duration) -> bool {
        self.watchdog.close(limit).blocking().unwrap_or(true)
    }

    /// [Closes](Lockkeeper::close) when the guard is dropped, and blocks the thread meanwhile. Made
    /// first in `main`, it is dropped last, however `main` ends: at its end, by `?` or by a panic;
    /// not by [`std::process::exit`], which drops nothing.
    ///
    /// ```no_run
    /// use std::time::Duration;
    /// use lockkeeper::{Acquired, Error, Lockkeeper};
    ///
    /// # async fn copy_table() -> Result<(), Error> { Ok(()) }
    /// #[tokio::main]
    /// async fn main() -> Result<(), Error> {
    ///     let lockkeeper = Lockkeeper::open("redis://127.0.0.1/")?;
    ///     let _guard = lockkeeper.close_on_drop(Duration::from_secs(5));
    ///     let Acquired::Yes(_held) = lockkeeper.acquire("job:export").await? else {
    ///         return Ok(()); // somebody else is at it
    ///     };
    ///     copy_table().await // even if this fails, the lock is free when the program has ended
    /// }
    /// ```
    pub fn close_on_drop(&self, limit: Duration) -> CloseOnDrop {
        CloseOnDrop {
            watchdog: self.watchdog.clone(),
            limit,
        }
    }

    fn ask_info(&self, key: impl ToBytes) -> Result<Pending<Value>, Error> {
        let key = key.to_bytes();
        let command = wire::info(&key);
        self.ask(key, command)
    }

    fn ask_release(&self, key: impl ToBytes, owner: impl ToBytes) -> Result<Pending<Value>, Error> {
        let key = key.to_bytes();
        let command = wire::release(&key, &owner.to_bytes());
        self.ask(key, command)
    }

    fn ask(&self, key: Vec<u8>, command: Cmd) -> Result<Pending<Value>, Error> {
        self.watchdog
            .ask(|responder, caller| Message::Ask(key, command, caller, responder))
    }

    fn send_settled(&self, limit: Duration) -> Pending<bool> {
        self.watchdog
            .send(|responder, _| Message::Settled(limit, responder))
    }
}

impl std::fmt::Debug for Lockkeeper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lockkeeper")
            .field("label", &self.label)
            .finish_non_exhaustive()
    }
}

/// Closes a [`Lockkeeper`] when it is dropped; see [`Lockkeeper::close_on_drop`].
#[must_use = "the lockkeeper is closed when this is dropped"]
#[derive(Debug)]
pub struct CloseOnDrop {
    watchdog: WatchdogSender,
    limit: Duration,
}

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        // What is left is logged by the watchdog.
        let _ = self.watchdog.close(self.limit).park();
    }
}
