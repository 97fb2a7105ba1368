//! The handle: proof that a lock is held, and the only way to give it up.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use redis::Value;
use tokio::sync::{mpsc, watch};

use crate::asking::show;
use crate::clock;
use crate::error::Error;
use crate::lease::{Lost, Moment, checked_ttl};
use crate::pending::Pending;
use crate::watchdog::{LeaseId, Message};
use crate::wire;

/// A lock that is held, and renewed by the watchdog until it is given up.
///
/// Dropping it releases in the background; [`release`](Held::release) does the same and tells how
/// it went. Neither happens when the process ends first: then the lock ends by its ttl; see
/// [`Lockkeeper::close`](crate::Lockkeeper::close). After a fork only the parent holds it: in the
/// child it counts as lost, and dropping it does nothing.
#[must_use = "a lock is released when its handle is dropped"]
pub struct Held {
    id: LeaseId,
    key: Arc<[u8]>,
    owner: Arc<str>,
    fence: u64,
    handle: Handle,
    watchdog: mpsc::UnboundedSender<Message>,
    /// The process that acquired.
    pid: u32,
}

/// How a renewal ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the lock may be lost"]
pub enum Renewed {
    /// The server said that we still hold it: the lease counts from this question.
    Yes,
    /// It is lost, which is final.
    Lost(Lost),
}

/// How a release ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "what was done under the lock may have been done without it"]
pub enum Released {
    /// We held it to the end.
    Yes,
    /// It had been lost before.
    Lost(Lost),
}

impl Released {
    /// The answer to a RELEASE.
    pub(crate) fn read(reply: Value) -> Result<Released, Error> {
        Ok(wire::refused(reply)?.map_or(Released::Yes, Released::Lost))
    }
}

/// The watchdog's end of what it shares with a handle.
pub(crate) struct Grip {
    ends_at: Arc<AtomicU64>,
    told: watch::Sender<Told>,
}

/// What the watchdog has told the holder.
#[derive(Clone, Copy, Debug)]
enum Told {
    Nothing,
    Lost(Lost),
    /// The holder has let go, so there is nothing to lose any more.
    LetGo,
}

/// The handle's end.
pub(crate) struct Handle {
    /// Microseconds after boot: the handle reads it on any thread, without asking the watchdog.
    ends_at: Arc<AtomicU64>,
    told: watch::Receiver<Told>,
}

pub(crate) fn join(ends_at: Moment) -> (Grip, Handle) {
    let ends_at = Arc::new(AtomicU64::new(micros(ends_at)));
    let (sender, receiver) = watch::channel(Told::Nothing);
    let grip = Grip {
        ends_at: Arc::clone(&ends_at),
        told: sender,
    };
    (
        grip,
        Handle {
            ends_at,
            told: receiver,
        },
    )
}

/// Rounded down: the handle may end too early, never too late.
fn micros(moment: Moment) -> u64 {
    u64::try_from(moment.since_boot().as_micros()).unwrap_or(u64::MAX)
}

impl Grip {
    pub(crate) fn extend(&self, ends_at: Moment) {
        self.ends_at.store(micros(ends_at), Ordering::Release);
    }

    pub(crate) fn lose(&self, lost: Lost) {
        if lost != Lost::MaxHold {
            self.ends_at.store(0, Ordering::Release);
        }
        self.told.send_replace(Told::Lost(lost));
    }

    pub(crate) fn let_go(self) {
        self.told.send_replace(Told::LetGo);
    }
}

impl Handle {
    fn ends_at(&self) -> Moment {
        Moment::after_boot(Duration::from_micros(self.ends_at.load(Ordering::Acquire)))
    }
}

impl Held {
    pub(crate) fn new(
        id: LeaseId,
        key: Arc<[u8]>,
        owner: Arc<str>,
        fence: u64,
        handle: Handle,
        watchdog: mpsc::UnboundedSender<Message>,
    ) -> Held {
        let pid = std::process::id();
        Held {
            id,
            key,
            owner,
            fence,
            handle,
            watchdog,
            pid,
        }
    }

    /// The key of the lock.
    pub fn key(&self) -> &[u8] {
        &self.key
    }

    /// The name under which this handle holds the lock, `<label>:<uuid>`: no other ever has it.
    pub fn owner(&self) -> &str {
        &self.owner
    }

    /// A number that grows with every grant of this key. A storage that refuses a smaller one than
    /// it has seen is safe even from a holder that was paused past its ttl.
    pub fn fence(&self) -> u64 {
        self.fence
    }

    /// For how long, from now, nobody else can hold the lock; zero if it is lost. Computed from a
    /// clock that runs through suspend, without asking anybody, and on the safe side: counted
    /// from before the last acknowledged request was sent, less 1 % and 2 ms.
    pub fn remaining(&self) -> Duration {
        if self.is_forked() {
            return Duration::ZERO;
        }
        self.handle.ends_at().since(clock::now())
    }

    /// Why the lock is lost, if it is.
    pub fn loss(&self) -> Option<Lost> {
        match *self.handle.told.borrow() {
            Told::Lost(lost) => Some(lost),
            // The clock is believed before the watchdog, which may not have run yet after a pause.
            Told::Nothing | Told::LetGo => self.remaining().is_zero().then_some(Lost::Expired),
        }
    }

    /// Resolves when the lock is lost, and says why; at once if it is lost already. A loss by
    /// silence is told before the server can give the lock to another; a deletion or a takeover
    /// by force is learnt at the next renewal, a third of the ttl later at most.
    ///
    /// In time means: as soon as the machine lets a thread run. With eight busy threads per
    /// processor every sleeping thread, ours too, was woken up to 11 ms late, while the margin is
    /// 1 % of the ttl and 2 ms. [`remaining`](Held::remaining) and [`loss`](Held::loss) look at the
    /// clock and are right even then: ask one of them right before what must not go wrong.
    ///
    /// Borrows nothing, needs no particular runtime, and may be dropped and asked for again. Once
    /// the lock is released or left it does not resolve any more.
    pub fn lost(&self) -> impl Future<Output = Lost> + Send + Sync + use<> {
        let (loss, pid) = (self.loss(), self.pid);
        let mut told = self.handle.told.clone();
        async move {
            if let Some(lost) = loss {
                return lost;
            }
            let mut told = pin!(told.wait_for(|told| !matches!(told, Told::Nothing)));
            let told = std::future::poll_fn(|cx| match told.as_mut().poll(cx) {
                Poll::Ready(told) => Poll::Ready(told.ok().map(|told| *told)),
                // The watchdog is our parent's and tells us nothing.
                Poll::Pending if pid != std::process::id() => Poll::Ready(None),
                Poll::Pending => Poll::Pending,
            });
            match told.await {
                Some(Told::Lost(lost)) => lost,
                Some(Told::LetGo) => std::future::pending().await,
                // The watchdog is gone and nobody renews.
                Some(Told::Nothing) | None => Lost::Expired,
            }
        }
    }

    /// Asks the server now whether we still hold it, and renews. An error is no loss: the watchdog
    /// goes on trying until the lease ends.
    pub async fn renew(&self) -> Result<Renewed, Error> {
        let renewed = self.send_renew(None).await;
        known(renewed, &self.handle.told, Renewed::Lost)
    }

    /// See [`renew`](Held::renew).
    ///
    /// # Panics
    /// Inside an asynchronous task, where it would block all others: await `renew` there.
    pub fn blocking_renew(&self) -> Result<Renewed, Error> {
        let renewed = self.send_renew(None).blocking();
        known(renewed, &self.handle.told, Renewed::Lost)
    }

    /// Makes the lease last for `ttl` from now, this once, for a time in which nobody can renew: the
    /// machine is about to be suspended, or the network to be changed. The watchdog goes on with
    /// the ttl that was agreed when that is what remains. A shorter one is renewed when a third of
    /// it has passed.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the ttl cannot be used; nothing was sent then. Any other is no loss.
    pub async fn extend(&self, ttl: Duration) -> Result<Renewed, Error> {
        let renewed = self.send_renew(Some(checked_ttl(ttl)?)).await;
        known(renewed, &self.handle.told, Renewed::Lost)
    }

    /// See [`extend`](Held::extend).
    ///
    /// # Panics
    /// Inside an asynchronous task, where it would block all others: await `extend` there.
    pub fn blocking_extend(&self, ttl: Duration) -> Result<Renewed, Error> {
        let renewed = self.send_renew(Some(checked_ttl(ttl)?)).blocking();
        known(renewed, &self.handle.told, Renewed::Lost)
    }

    fn send_renew(&self, ttl: Option<Duration>) -> Pending<Renewed> {
        let (reply, renewed) = Pending::new();
        if self.is_forked() {
            let _ = reply.send(Err(Error::Forked));
        } else {
            let _ = self.watchdog.send(Message::Renew(self.id, ttl, reply));
        }
        renewed
    }

    /// Releases the lock and tells whether it was held to the end. Renewal stops first.
    ///
    /// Answers within 5 s: [`Error::Unreachable`] means that nobody answered; the
    /// release is tried on in the background, as it is when this future is dropped, until the lock
    /// has ended by itself.
    pub async fn release(self) -> Result<Released, Error> {
        self.release_after(Duration::ZERO).await
    }

    /// See [`release`](Held::release).
    ///
    /// # Panics
    /// Inside an asynchronous task, where it would block all others: await `release` there.
    pub fn blocking_release(self) -> Result<Released, Error> {
        self.blocking_release_after(Duration::ZERO)
    }

    /// As [`release`](Held::release), but the lock stays taken until `hold` after it was granted.
    /// It does not wait: what is left becomes the lock's ttl on the server.
    ///
    /// For a job that runs at the same minute on several machines and is done sooner than their
    /// clocks differ.
    pub async fn release_after(self, hold: Duration) -> Result<Released, Error> {
        let (told, released) = self.send_release(hold);
        known(released.await, &told, Released::Lost)
    }

    /// See [`release_after`](Held::release_after).
    ///
    /// # Panics
    /// Inside an asynchronous task, where it would block all others: await `release_after` there.
    pub fn blocking_release_after(self, hold: Duration) -> Result<Released, Error> {
        let (told, released) = self.send_release(hold);
        known(released.blocking(), &told, Released::Lost)
    }

    fn send_release(self, hold: Duration) -> (watch::Receiver<Told>, Pending<Released>) {
        let (reply, released) = Pending::new();
        if self.is_forked() {
            let _ = reply.send(Err(Error::Forked));
        } else {
            let _ = self.watchdog.send(Message::Release(self.id, hold, reply));
        }
        (self.handle.told.clone(), released)
    }

    /// Stops renewing and lets the lock lapse by itself, a ttl from the last renewal at most.
    pub fn leave(self) {
        if !self.is_forked() {
            let _ = self.watchdog.send(Message::Leave(self.id));
        }
    }

    fn is_forked(&self) -> bool {
        self.pid != std::process::id()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if !self.is_forked() {
            let _ = self.watchdog.send(Message::Drop(self.id));
        }
    }
}

impl std::fmt::Debug for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Held")
            .field("key", &format_args!("{}", show(&self.key)))
            .field("owner", &self.owner)
            .field("fence", &self.fence)
            .field("remaining", &self.remaining())
            .finish()
    }
}

/// A loss that was told is the answer even when the watchdog has ended since, as it does when the
/// lockkeeper is closed.
fn known<T>(
    answer: Result<T, Error>,
    told: &watch::Receiver<Told>,
    lost: impl FnOnce(Lost) -> T,
) -> Result<T, Error> {
    match (answer, *told.borrow()) {
        (Err(Error::Unreachable(_)), Told::Lost(why)) => Ok(lost(why)),
        (answer, _) => answer,
    }
}
