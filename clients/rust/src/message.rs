//! What a handle or a builder asks of the watchdog, and what it gets for a lock that was granted.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::sync::{mpsc, oneshot};

use crate::acquisition::Request;
use crate::error::Error;
use crate::lease::{Downgraded, Lost, Released, Renewed, Upgraded};
use crate::pending::Pending;
use crate::status::Status;
use crate::wire::Limit;

/// Names a lease for as long as the watchdog knows it.
pub(crate) type LeaseId = u64;

/// The way to a watchdog, whose thread lives as long as there is one.
pub(crate) type MessageSender = mpsc::UnboundedSender<Message>;

/// Where the result of a message goes.
pub(crate) type Responder<T> = oneshot::Sender<Result<T, Error>>;

/// Gone when nobody waits for the result any more.
pub(crate) type Caller = Weak<()>;

/// What a handle or a builder asks for.
pub(crate) enum Message {
    /// A lock; none is the result if it is busy. The sender is for the handle, and keeps the thread
    /// alive until then.
    Acquire(
        Box<Request>,
        MessageSender,
        Caller,
        Responder<Option<Granted>>,
    ),
    /// A renewal now, for another ttl than agreed if there is one.
    Renew(LeaseId, Option<Duration>, Responder<Renewed>),
    /// A grant with another limit in place of the one that is held.
    Change(LeaseId, Change),
    /// Give it up, but keep it until so long after the grant.
    Release(LeaseId, Duration, Responder<Released>),
    /// Give it up; nobody waits for the result.
    Drop(LeaseId),
    /// Forget it; it ends by its ttl.
    Leave(LeaseId),
    /// Any other command about a key.
    Ask(Vec<u8>, Cmd, Caller, Responder<Value>),
    /// Notify when all that was given up before this message has ended: true, or false after so
    /// long.
    Settled(Duration, Responder<bool>),
    /// Give up everything, and end. True when nothing is left, or false after so long.
    Close(Duration, Responder<bool>),
}

/// What the holder of a lock wants to be from now on.
pub(crate) enum Change {
    /// The only one.
    Upgrade(Responder<Upgraded>),
    /// One of those who share it.
    Downgrade(Responder<Downgraded>),
}

impl Change {
    pub(crate) fn limit(&self) -> Limit {
        match self {
            Change::Upgrade(_) => Limit::EXCLUSIVE,
            Change::Downgrade(_) => Limit::SHARED,
        }
    }

    /// Whether nobody waits for the result any more.
    pub(crate) fn is_cancelled(&self) -> bool {
        match self {
            Change::Upgrade(responder) => responder.is_closed(),
            Change::Downgrade(responder) => responder.is_closed(),
        }
    }

    pub(crate) fn granted(self) {
        match self {
            Change::Upgrade(responder) => drop(responder.send(Ok(Upgraded::Yes))),
            Change::Downgrade(responder) => drop(responder.send(Ok(Downgraded::Yes))),
        }
    }

    /// Others hold the lock too: of no interest to who shares it.
    pub(crate) fn busy(self) {
        match self {
            Change::Upgrade(responder) => drop(responder.send(Ok(Upgraded::Busy))),
            Change::Downgrade(responder) => drop(responder.send(Ok(Downgraded::Yes))),
        }
    }

    pub(crate) fn lost(self, lost: Lost) {
        match self {
            Change::Upgrade(responder) => drop(responder.send(Ok(Upgraded::Lost(lost)))),
            Change::Downgrade(responder) => drop(responder.send(Ok(Downgraded::Lost(lost)))),
        }
    }

    pub(crate) fn failed(self, error: Error) {
        match self {
            Change::Upgrade(responder) => drop(responder.send(Err(error))),
            Change::Downgrade(responder) => drop(responder.send(Err(error))),
        }
    }
}

/// A lock that was granted. Dropped, it is released in the background, also when nobody takes it
/// out of the result.
pub(crate) struct Granted {
    pub(crate) id: LeaseId,
    pub(crate) key: Arc<[u8]>,
    pub(crate) owner: Arc<str>,
    pub(crate) status: Status,
    pub(crate) watchdog: MessageSender,
    /// The process that acquired: a fork of it holds nothing.
    pub(crate) pid: u32,
}

impl Granted {
    pub(crate) fn is_forked(&self) -> bool {
        self.pid != std::process::id()
    }

    /// Sends a message of the holder.
    pub(crate) fn send<T>(&self, message: impl FnOnce(Responder<T>) -> Message) -> Pending<T> {
        let (responder, pending) = Pending::new();
        if self.is_forked() {
            let _ = responder.send(Err(Error::Forked));
        } else {
            let _ = self.watchdog.send(message(responder));
        }
        pending
    }
}

impl std::fmt::Debug for Granted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Granted").finish_non_exhaustive()
    }
}

impl Drop for Granted {
    fn drop(&mut self) {
        if !self.is_forked() {
            let _ = self.watchdog.send(Message::Drop(self.id));
        }
    }
}

/// How a [`Lockkeeper`](crate::Lockkeeper) reaches its watchdog.
#[derive(Clone)]
pub(crate) struct WatchdogSender {
    sender: MessageSender,
    /// Whether any clone was closed.
    closed: Arc<AtomicBool>,
    /// The process that opened it: in a fork of it there is no watchdog.
    pid: u32,
}

impl WatchdogSender {
    pub(crate) fn new(sender: MessageSender) -> WatchdogSender {
        WatchdogSender {
            sender,
            closed: Arc::default(),
            pid: std::process::id(),
        }
    }

    /// The sender for the handle of a lock.
    pub(crate) fn sender(&self) -> MessageSender {
        self.sender.clone()
    }

    /// Asks for something that is not to be had once it is closed.
    pub(crate) fn ask<T>(
        &self,
        message: impl FnOnce(Responder<T>, Caller) -> Message,
    ) -> Result<Pending<T>, Error> {
        if self.closed.load(Ordering::Relaxed) {
            return Err(Error::closed());
        }
        Ok(self.send(message))
    }

    /// A watchdog that has ended drops the message, and with it the responder.
    pub(crate) fn send<T>(
        &self,
        message: impl FnOnce(Responder<T>, Caller) -> Message,
    ) -> Pending<T> {
        let (responder, pending) = Pending::new();
        if self.pid == std::process::id() {
            let _ = self.sender.send(message(responder, pending.caller()));
        } else {
            let _ = responder.send(Err(Error::Forked));
        }
        pending
    }

    pub(crate) fn close(&self, limit: Duration) -> Pending<bool> {
        // A child must not close its parent's.
        if self.pid == std::process::id() {
            self.closed.store(true, Ordering::Relaxed);
        }
        self.send(|responder, _| Message::Close(limit, responder))
    }
}

impl std::fmt::Debug for WatchdogSender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WatchdogSender").finish_non_exhaustive()
    }
}
