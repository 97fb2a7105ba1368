//! The door: a lockkeeper is opened once, and asked for locks.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use redis::Value;
use tokio::sync::{mpsc, oneshot};

use crate::asking::{Request, Wait};
use crate::bytes::ToBytes;
use crate::clock;
use crate::error::Error;
use crate::held::{Held, Released};
use crate::lease::{Lost, Terms, checked_ttl};
use crate::network::Network;
use crate::pending::Pending;
use crate::place::{Credentials, Place};
use crate::watchdog::{self, Message};
use crate::wire::{self, Info};

/// The longest owner that the module takes, in bytes.
const MAX_OWNER: usize = 512;

/// A colon and a UUID as text.
const OWNER_SUFFIX: usize = 37;

/// Where locks are asked for: one server, and the watchdog thread that does all talking to it.
/// Cloning gives another way to the same watchdog, whose thread ends with the last clone and handle,
/// or when it is [closed](Lockkeeper::close).
///
/// Whatever asks the server has a twin that blocks, for code without async calls; see
/// [Code that blocks](crate#code-that-blocks).
#[derive(Clone)]
pub struct Lockkeeper {
    watchdog: mpsc::UnboundedSender<Message>,
    label: Arc<str>,
    /// Whether `close` was called on any clone.
    closed: Arc<AtomicBool>,
    pid: u32,
}

/// How a [`Lockkeeper`] is opened when a URL alone does not say it.
#[must_use = "nothing happens before `open`"]
pub struct Builder {
    url: String,
    label: Option<String>,
    credentials: Credentials,
}

impl Builder {
    /// The first part of every owner, and the name of our connections in CLIENT LIST after
    /// `lockkeeper:`. By default `host:pid`.
    pub fn label(mut self, label: impl Into<String>) -> Builder {
        self.label = Some(label.into());
        self
    }

    /// The password, if the URL is to go without it.
    pub fn password(mut self, password: impl Into<String>) -> Builder {
        self.credentials.password = Some(password.into());
        self
    }

    /// For `rediss://`: trust only servers with a certificate of this authority (PEM), instead of
    /// those that the system trusts.
    #[cfg(feature = "tls")]
    pub fn root_ca(mut self, pem: impl Into<Vec<u8>>) -> Builder {
        self.tls().root_cert = Some(pem.into());
        self
    }

    /// For `rediss://`: the certificate and key (PEM) that prove to the server who we are.
    #[cfg(feature = "tls")]
    pub fn client_certificate(
        mut self,
        certificate: impl Into<Vec<u8>>,
        key: impl Into<Vec<u8>>,
    ) -> Builder {
        let (client_cert, client_key) = (certificate.into(), key.into());
        self.tls().client_tls = Some(redis::ClientTlsConfig {
            client_cert,
            client_key,
        });
        self
    }

    /// For `rediss://`: take whatever certificate the server shows, as `#insecure` at the end of the
    /// URL does. Whoever stands in between can then read and change everything.
    #[cfg(feature = "tls")]
    pub fn insecure(mut self) -> Builder {
        self.credentials.insecure = true;
        self
    }

    /// For `redis+sentinel://`: the password of the sentinels, if they have one and the URL is to go
    /// without it. That of the servers is not sent to them.
    #[cfg(feature = "sentinel")]
    pub fn sentinel_password(mut self, password: impl Into<String>) -> Builder {
        self.credentials.sentinel_password = Some(password.into());
        self
    }

    #[cfg(feature = "tls")]
    fn tls(&mut self) -> &mut redis::TlsCertificates {
        let nothing = || redis::TlsCertificates {
            client_tls: None,
            root_cert: None,
        };
        self.credentials.tls.get_or_insert_with(nothing)
    }

    /// Starts the watchdog. Connects to nothing: the first question does.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the URL, a certificate or the label cannot be used,
    /// [`Error::NoWatchdog`] if the system has no thread left.
    pub fn open(self) -> Result<Lockkeeper, Error> {
        let label = self.label.unwrap_or_else(default_label);
        check_label(&label)?;
        let place = Place::parse(&self.url, &self.credentials)?;
        Ok(Lockkeeper {
            watchdog: watchdog::start(Network::new(place, label.clone()))?,
            label: Arc::from(label),
            closed: Arc::default(),
            pid: std::process::id(),
        })
    }
}

fn default_label() -> String {
    #[cfg(unix)]
    let uname = rustix::system::uname();
    #[cfg(unix)]
    let host = uname.nodename().to_string_lossy();
    #[cfg(not(unix))]
    let host = std::env::var("COMPUTERNAME").unwrap_or_else(|_| "localhost".to_owned());
    format!("{host}:{}", std::process::id())
}

fn check_label(label: &str) -> Result<(), Error> {
    let longest = MAX_OWNER - OWNER_SUFFIX;
    if label.len() > longest {
        let length = label.len();
        return Err(Error::Invalid(format!(
            "the label must not be longer than {longest} bytes, got {length}"
        )));
    }
    Ok(())
}

impl Lockkeeper {
    /// Opens the server at `url`, without connecting to it yet. See [`Builder::open`] for errors.
    ///
    /// | URL | reaches |
    /// |---|---|
    /// | `redis://[user:password@]host[:port][/db]` | one server |
    /// | `rediss://…` | the same over TLS, with the feature `tls` |
    /// | `unix:///path/to/socket` | the same over a unix socket |
    /// | `redis+sentinel://[user:password@]host[:26379],host…/master[/db]` | the master of that name, found again after a failover; with the feature `sentinel` |
    /// | `redis+cluster://[user:password@]host[:port],host…` | a cluster, with the feature `cluster` |
    ///
    /// The last two also begin with `rediss+` for TLS. A user without a password sends an empty one.
    /// In a user and a password `/`, `?`, `#`, `@` and `%` are written as `%2F`, `%3F`, `%23`, `%40`
    /// and `%25`.
    ///
    /// | behind a `?` | says |
    /// |---|---|
    /// | `db=3` | the database, as `/3` does |
    /// | `protocol=resp3` | which protocol to speak: `resp2` (the default) or `resp3` |
    /// | `user=…`, `pass=…` | who we are, for `unix://` only |
    /// | `sentinel_user=…`, `sentinel_password=…` | who we are to the sentinels |
    ///
    /// Any other is refused. `#insecure` at the end of `rediss://…` takes any certificate.
    pub fn open(url: impl Into<String>) -> Result<Lockkeeper, Error> {
        Lockkeeper::builder(url).open()
    }

    /// Opens a server that needs more than a URL.
    pub fn builder(url: impl Into<String>) -> Builder {
        Builder {
            url: url.into(),
            label: None,
            credentials: Credentials::default(),
        }
    }

    /// The first part of the owners that it makes; see [`Builder::label`].
    pub fn label(&self) -> &str {
        &self.label
    }

    /// Begins to ask for the lock `key`; await the [`Acquire`].
    pub fn acquire(&self, key: impl ToBytes) -> Acquire {
        Acquire {
            lockkeeper: self.clone(),
            key: key.to_bytes(),
            label: self.label.to_string(),
            terms: Terms {
                ttl: Acquire::DEFAULT_TTL,
                max_hold: None,
            },
            wait: Wait::No,
            min_replicas: 0,
            asked: None,
        }
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
    /// in the queue. Harms nobody else: if another holds the lock by now, the answer is
    /// [`Lost::Taken`].
    pub async fn release_for(
        &self,
        key: impl ToBytes,
        owner: impl ToBytes,
    ) -> Result<Released, Error> {
        Released::read(self.ask_release(key, owner)?.await?)
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
        Released::read(self.ask_release(key, owner)?.blocking()?)
    }

    /// Waits until all that was dropped or given up before has been released or has ended by
    /// itself, but not longer than `limit`: true if that was enough. What others hold, wait for or
    /// give up meanwhile does not matter.
    ///
    /// A program that is about to end wants [`close`](Lockkeeper::close).
    pub async fn settled(&self, limit: Duration) -> bool {
        self.settle(limit).await.unwrap_or(true)
    }

    /// See [`settled`](Lockkeeper::settled).
    ///
    /// # Panics
    /// Inside an asynchronous task, where it would block all others: await `settled` there.
    pub fn blocking_settled(&self, limit: Duration) -> bool {
        self.settle(limit).blocking().unwrap_or(true)
    }

    /// Gives back all that was taken through this lockkeeper and its clones, ends the watchdog and
    /// its connections, and waits for that, but not longer than `limit`: true if that was enough.
    /// Else a warning is logged, the watchdog goes on trying if the program goes on, and what it
    /// leaves ends by its ttl.
    ///
    /// A lock that is still held is lost to its holder with [`Lost::Gone`] *before* it is released.
    /// What is being asked for, and whatever is asked later, gets [`Error::Invalid`].
    ///
    /// The end of a program takes the watchdog with it, so a handle that was dropped just before
    /// may not be released yet. Call this last, or let
    /// [`close_on_drop`](Lockkeeper::close_on_drop) do it.
    pub async fn close(&self, limit: Duration) -> bool {
        self.begin_to_close(limit).await.unwrap_or(true)
    }

    /// See [`close`](Lockkeeper::close).
    ///
    /// # Panics
    /// Inside an asynchronous task, where it would block all others: await `close` there.
    pub fn blocking_close(&self, limit: Duration) -> bool {
        self.begin_to_close(limit).blocking().unwrap_or(true)
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
            lockkeeper: self.clone(),
            limit,
        }
    }

    fn ask_info(&self, key: impl ToBytes) -> Result<Pending<Value>, Error> {
        let key = key.to_bytes();
        let command = wire::info(&key);
        self.ask(|reply, caller| Message::Ask(key, command, caller, reply))
    }

    fn ask_release(&self, key: impl ToBytes, owner: impl ToBytes) -> Result<Pending<Value>, Error> {
        let key = key.to_bytes();
        let command = wire::release(&key, &owner.to_bytes());
        self.ask(|reply, caller| Message::Ask(key, command, caller, reply))
    }

    fn settle(&self, limit: Duration) -> Pending<bool> {
        let until = clock::now() + limit;
        self.send(|reply, _| Message::Settled(until, reply))
    }

    fn begin_to_close(&self, limit: Duration) -> Pending<bool> {
        // A child must not close its parent's.
        if self.pid == std::process::id() {
            self.closed.store(true, Ordering::Relaxed);
        }
        let until = clock::now() + limit;
        self.send(|reply, _| Message::Close(until, reply))
    }

    fn ask<T>(
        &self,
        message: impl FnOnce(oneshot::Sender<Result<T, Error>>, Weak<()>) -> Message,
    ) -> Result<Pending<T>, Error> {
        if self.closed.load(Ordering::Relaxed) {
            return Err(Error::closed());
        }
        Ok(self.send(message))
    }

    /// A watchdog that has ended drops the message, and with it the way to reply.
    fn send<T>(
        &self,
        message: impl FnOnce(oneshot::Sender<Result<T, Error>>, Weak<()>) -> Message,
    ) -> Pending<T> {
        let (reply, pending) = Pending::new();
        if self.pid == std::process::id() {
            let _ = self.watchdog.send(message(reply, pending.caller()));
        } else {
            let _ = reply.send(Err(Error::Forked));
        }
        pending
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
    lockkeeper: Lockkeeper,
    limit: Duration,
}

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        // What is left is logged by the watchdog.
        let _ = self.lockkeeper.begin_to_close(self.limit).park();
    }
}

/// What became of asking for a lock.
///
/// Who does not take the handle out of it holds nothing, since a dropped handle releases. So it
/// cannot be ignored, and there is no way to only ask whether it was granted:
///
/// ```no_run
/// # use lockkeeper::{Acquired, Error, Lockkeeper};
/// # async fn lend() {}
/// # async fn example(lockkeeper: &Lockkeeper) -> Result<(), Error> {
/// let Acquired::Yes(held) = lockkeeper.acquire("book:7").await? else {
///     return Ok(()); // busy
/// };
/// lend().await;
/// # drop(held);
/// # Ok(())
/// # }
/// ```
///
/// ```compile_fail
/// #![deny(unused_must_use)]
/// # use lockkeeper::{Acquired, Error, Lockkeeper};
/// # async fn lend() {}
/// # async fn example(lockkeeper: &Lockkeeper) -> Result<(), Error> {
/// lockkeeper.acquire("book:7").await?; // nothing is held from here on
/// lend().await;
/// # Ok(())
/// # }
/// ```
#[must_use = "the lock is released at once unless the handle is kept: `let Acquired::Yes(held) = … else`"]
#[derive(Debug)]
pub enum Acquired {
    /// It is ours as long as the handle lives.
    Yes(Held),
    /// Another holds it, or somebody is queued before us, and the wait, if any, is over.
    Busy,
}

impl Acquired {
    /// The handle, or `error` if the lock is busy: for callers to whom that is a failure.
    pub fn ok_or<E>(self, error: E) -> Result<Held, E> {
        match self {
            Acquired::Yes(held) => Ok(held),
            Acquired::Busy => Err(error),
        }
    }

    /// The handle of a lock that must be free.
    ///
    /// # Panics
    /// If it is busy.
    #[track_caller]
    pub fn unwrap(self) -> Held {
        self.expect("no handle")
    }

    /// The handle of a lock that must be free.
    ///
    /// # Panics
    /// With `message` if it is busy.
    #[track_caller]
    pub fn expect(self, message: &str) -> Held {
        match self {
            Acquired::Yes(held) => held,
            Acquired::Busy => panic!("{message}: the lock is busy"),
        }
    }
}

impl From<Option<Held>> for Acquired {
    fn from(held: Option<Held>) -> Acquired {
        held.map_or(Acquired::Busy, Acquired::Yes)
    }
}

/// A lock that is being asked for: set what is to be different, then await it, or call
/// [`blocking`](Acquire::blocking).
///
/// It is a future as any other, for `spawn`, `select!` or `join!`, and needs no particular runtime.
/// Dropping it at any point leaves neither a lock nor a place in the queue behind, or, while the
/// server cannot be reached, none that outlives one ttl.
///
/// # Errors
/// - [`Error::Invalid`] if the ttl or the label cannot be used, or the lockkeeper was closed.
/// - [`Error::Unreachable`] if nobody answered in time, so that it is not known whether the lock is
///   busy.
/// - [`Error::Refused`] if the server does not want to: no permission, out of memory, too many
///   waiters, a module that is not loaded.
/// - [`Error::Forked`] in a fork of the process that opened the lockkeeper.
#[must_use = "nothing is asked before it is awaited"]
#[derive(Debug)]
pub struct Acquire {
    lockkeeper: Lockkeeper,
    key: Vec<u8>,
    label: String,
    terms: Terms,
    wait: Wait,
    min_replicas: u32,
    /// None before the first poll.
    asked: Option<Pending<Option<Held>>>,
}

impl Acquire {
    /// Long enough to ride out a failover or a restart, short enough to wait for after a crash.
    const DEFAULT_TTL: Duration = Duration::from_secs(30);

    /// How long the lock outlives a holder that is gone, 100 ms to 2^53 - 1 ms, by default 30 s. A
    /// living holder renews every third of it, and has two thirds of it to get through to a server
    /// that does not answer. A holder that is killed while it is being granted the lock also keeps
    /// it that long.
    pub fn ttl(mut self, ttl: Duration) -> Acquire {
        self.terms.ttl = ttl;
        self
    }

    /// Waits in the server's queue, first come, first served, and returns within `wait` + 100 ms
    /// whatever the server does. A server that cannot be reached, that is not the master or lets
    /// nobody wait is asked again while there is time left. By default there is one try, which
    /// ends within 5 s, and at once if the server was never reached.
    pub fn wait(mut self, wait: Duration) -> Acquire {
        self.wait = Wait::For(wait);
        self
    }

    /// Waits without bound. Only for a server that was reached before: else this would hang for
    /// ever on a wrong address. While the server cannot be asked, that is logged as a warning at
    /// once and then every 30 s, as in any wait.
    pub fn wait_forever(mut self) -> Acquire {
        self.wait = Wait::ForEver;
        self
    }

    /// The first part of the owner of this lock, instead of the lockkeeper's label.
    pub fn label(mut self, label: impl Into<String>) -> Acquire {
        self.label = label.into();
        self
    }

    /// Ends renewal so long after the grant: then the lock counts as lost, with
    /// [`Lost::MaxHold`], whatever became of the holder. By default it is renewed for ever.
    pub fn max_hold(mut self, max_hold: Duration) -> Acquire {
        self.terms.max_hold = Some(max_hold);
        self
    }

    /// Counts only what so many replicas acknowledged, so that a failover to one of them keeps the
    /// lock. A lock for which the replicas do not answer in time is lost, even if the master has
    /// renewed it; the grant itself is refused with `NOREPLICAS`. Needs
    /// the right to call WAIT.
    pub fn min_replicas(mut self, min_replicas: u32) -> Acquire {
        self.min_replicas = min_replicas;
        self
    }

    /// Asks, and blocks this thread until the answer is there.
    ///
    /// # Panics
    /// Inside an asynchronous task, where it would block all others: await it there.
    pub fn blocking(mut self) -> Result<Acquired, Error> {
        Ok(self.send()?.blocking()?.into())
    }

    /// Runs `body` under the lock, and ends it, at its next await, when the lock is lost.
    ///
    /// Whatever `body` returns comes back as it is, be it a number, nothing, or a `Result` of any
    /// kind. A body with `?` in it says what it returns:
    ///
    /// ```no_run
    /// use lockkeeper::{Error, Lockkeeper, Ran};
    ///
    /// # async fn example(lockkeeper: &Lockkeeper) -> Result<(), Error> {
    /// let copied = lockkeeper.acquire("report").run(async |held| -> std::io::Result<u64> {
    ///     std::fs::write("fence", held.fence().to_string())?;
    ///     std::fs::copy("report.new", "report")
    /// });
    /// match copied.await? {
    ///     Ran::Done(Ok(bytes)) => println!("{bytes} bytes"),
    ///     Ran::Done(Err(error)) => println!("not copied: {error}"),
    ///     Ran::Busy => println!("somebody else is at it"),
    ///     Ran::Lost { why, .. } => println!("perhaps copied twice: {why}"),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As awaiting it: then the body did not run. That nobody answers the release is no error,
    /// since the body ran under the lock, which ends by its ttl; it is logged.
    pub async fn run<T>(self, body: impl AsyncFnOnce(&Held) -> T) -> Result<Ran<T>, Error> {
        let Acquired::Yes(held) = self.await? else {
            return Ok(Ran::Busy);
        };
        let lost = held.lost();
        let done = tokio::select! {
            biased;
            why = lost => return Ok(Ran::Lost { why, done: None }),
            done = body(&held) => done,
        };
        // A body that never awaits outlives its lease unseen.
        if let Some(why) = held.loss() {
            return Ok(Ran::done_but_lost(done, why));
        }
        let released = held.release().await;
        Ok(Ran::released(done, released))
    }

    /// As [`run`](Acquire::run), for a body that blocks. Nothing can end it when the lock is lost:
    /// one that takes long looks at [`Held::loss`] now and then, and gives the
    /// [fence](Held::fence) to what it writes to.
    ///
    /// # Panics
    /// Inside an asynchronous task, where it would block all others: await `run` there.
    pub fn blocking_run<T>(self, body: impl FnOnce(&Held) -> T) -> Result<Ran<T>, Error> {
        let Acquired::Yes(held) = self.blocking()? else {
            return Ok(Ran::Busy);
        };
        let done = body(&held);
        if let Some(why) = held.loss() {
            return Ok(Ran::done_but_lost(done, why));
        }
        let released = held.blocking_release();
        Ok(Ran::released(done, released))
    }

    fn send(&mut self) -> Result<Pending<Option<Held>>, Error> {
        check_label(&self.label)?;
        self.terms.ttl = checked_ttl(self.terms.ttl)?;
        let request = Box::new(Request {
            key: std::mem::take(&mut self.key),
            label: std::mem::take(&mut self.label),
            terms: self.terms,
            wait: self.wait,
            min_replicas: self.min_replicas,
        });
        let watchdog = self.lockkeeper.watchdog.clone();
        self.lockkeeper
            .ask(|reply, caller| Message::Acquire(request, watchdog, caller, reply))
    }
}

impl Future for Acquire {
    type Output = Result<Acquired, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if self.asked.is_none() {
            self.asked = Some(self.send()?);
        }
        match &mut self.asked {
            Some(asked) => Pin::new(asked).poll(cx).map_ok(Acquired::from),
            None => Poll::Pending,
        }
    }
}

/// What became of a body that was to run under a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the body may not have run, or not under the lock"]
pub enum Ran<T> {
    /// It ran to its end, and held the lock until then. This is what it returned: if that is an
    /// error, it is told whatever became of the release.
    Done(T),
    /// The lock was busy: it did not run.
    Busy,
    /// The lock was lost while it ran.
    Lost {
        /// Why it is lost.
        why: Lost,
        /// What it returned, if it came to its end all the same.
        done: Option<T>,
    },
}

impl<T> Ran<T> {
    fn done_but_lost(done: T, why: Lost) -> Ran<T> {
        let done = Some(done);
        Ran::Lost { why, done }
    }

    fn released(done: T, released: Result<Released, Error>) -> Ran<T> {
        match released {
            Ok(Released::Lost(why)) => Ran::done_but_lost(done, why),
            // An error is logged by the watchdog, and by its clock the lock was held.
            Ok(Released::Yes) | Err(_) => Ran::Done(done),
        }
    }
}
