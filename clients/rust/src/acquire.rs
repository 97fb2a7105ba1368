//! One acquire: what is asked for, how it ended, and a body that runs under the lock.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::acquisition::{Request, Wait};
use crate::error::Error;
use crate::held::Held;
use crate::lease::{Lost, Released, Terms};
use crate::limits::{check_label, checked_limit, checked_ttl};
use crate::message::{Granted, Message, WatchdogSender};
use crate::pending::Pending;

/// How an acquire ended.
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

fn acquired(granted: Option<Granted>) -> Acquired {
    granted.map(Held::new).into()
}

/// A lock that is being asked for: set what is to be different, then await it, or call
/// [`blocking`](Acquire::blocking).
///
/// It is a future as any other, for `spawn`, `select!` or `join!`, and needs no particular runtime.
/// Dropping it at any point leaves neither a lock nor a place in the queue behind, or, while the
/// server cannot be reached, none that outlives one ttl.
///
/// # Errors
/// - [`Error::Invalid`] if the ttl, the label or the limit cannot be used, or the lockkeeper was closed.
/// - [`Error::Unreachable`] if nobody answered in time, so that it is not known whether the lock is
///   busy.
/// - [`Error::Refused`] if the server does not want to: no permission, out of memory, too many
///   waiters, a module that is not loaded.
/// - [`Error::Forked`] in a fork of the process that opened the lockkeeper.
#[must_use = "nothing is asked before it is awaited"]
#[derive(Debug)]
pub struct Acquire {
    watchdog: WatchdogSender,
    key: Vec<u8>,
    label: String,
    terms: Terms,
    wait: Wait,
    min_replicas: u32,
    limit: Option<u32>,
    shared: bool,
    /// None before the first poll.
    pending: Option<Pending<Option<Granted>>>,
}

impl Acquire {
    /// Long enough to ride out a failover or a restart, short enough to wait for after a crash.
    const DEFAULT_TTL: Duration = Duration::from_secs(30);

    pub(crate) fn new(watchdog: WatchdogSender, key: Vec<u8>, label: &str) -> Acquire {
        Acquire {
            watchdog,
            key,
            label: label.to_owned(),
            terms: Terms {
                ttl: Acquire::DEFAULT_TTL,
                max_hold: None,
            },
            wait: Wait::No,
            min_replicas: 0,
            limit: None,
            shared: false,
            pending: None,
        }
    }

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

    /// Lets so many hold the lock at a time, 1 to 1000, this holder included: one of `limit` places. By
    /// default the holder is alone. Nothing is set up or left behind: each request brings its limit,
    /// and where holders disagree the smallest counts.
    ///
    /// No [fence](Held::fence) protects against one who has lost its place: it looks as the others
    /// do who hold one. A module that knows no limits refuses this with `BADOPTION`.
    pub fn limit(mut self, limit: u32) -> Acquire {
        self.limit = Some(limit);
        self
    }

    /// Shares the lock with all who share it, up to 1000, as readers do; who does not is alone, as a
    /// writer is. All are served first come, first served: a reader who comes after a waiting writer
    /// waits. See [`Held::upgrade`] and [`Held::downgrade`].
    ///
    /// A storage that remembers the highest [fence](Held::fence) of a writer, and refuses everybody
    /// below it, is safe from readers and writers of before.
    pub fn shared(mut self) -> Acquire {
        self.shared = true;
        self
    }

    /// Asks, and blocks this thread until the reply is there.
    ///
    /// # Panics
    /// Inside an asynchronous task, where it would block all others: await it there.
    pub fn blocking(mut self) -> Result<Acquired, Error> {
        Ok(acquired(self.send()?.blocking()?))
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

    fn send(&mut self) -> Result<Pending<Option<Granted>>, Error> {
        check_label(&self.label)?;
        self.terms.ttl = checked_ttl(self.terms.ttl)?;
        let limit = checked_limit(self.limit, self.shared)?;
        let request = Box::new(Request {
            key: std::mem::take(&mut self.key),
            label: std::mem::take(&mut self.label),
            terms: self.terms,
            wait: self.wait,
            min_replicas: self.min_replicas,
            limit,
        });
        let sender = self.watchdog.sender();
        self.watchdog
            .ask(|responder, caller| Message::Acquire(request, sender, caller, responder))
    }
}

impl Future for Acquire {
    type Output = Result<Acquired, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if self.pending.is_none() {
            self.pending = Some(self.send()?);
        }
        match &mut self.pending {
            Some(pending) => Pin::new(pending).poll(cx).map_ok(acquired),
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
