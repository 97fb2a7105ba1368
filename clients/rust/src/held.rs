//! The handle: proof that a lock is held, and the only way to give it up.

use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use crate::clock;
use crate::error::Error;
use crate::lease::{Downgraded, Lost, Released, Renewed, Reply, Upgraded};
use crate::limits::checked_ttl;
use crate::message::{Change, Granted, Message, Responder};
use crate::pending::Pending;
use crate::printable::printable;
use crate::status::{Notice, Status};

/// A lock that is held, and renewed by the watchdog until it is given up.
///
/// Dropping it releases in the background; [`release`](Held::release) does the same and tells how
/// it went. Neither happens when the process ends first: then the lock ends by its ttl; see
/// [`Lockkeeper::close`](crate::Lockkeeper::close). After a fork only the parent holds it: in the
/// child it counts as lost, and dropping it does nothing.
#[must_use = "a lock is released when its handle is dropped"]
pub struct Held {
    /// Releases when it is dropped.
    granted: Granted,
}

impl Held {
    pub(crate) fn new(granted: Granted) -> Held {
        Held { granted }
    }

    /// The key of the lock.
    pub fn key(&self) -> &[u8] {
        &self.granted.key
    }

    /// The name under which this handle holds the lock, `<label>:<uuid>`: no other ever has it.
    pub fn owner(&self) -> &str {
        &self.granted.owner
    }

    /// A number that grows with every grant of this key. A storage that refuses a smaller one than
    /// it has seen is safe even from a holder that was paused past its ttl.
    ///
    /// Another after an [`upgrade`](Held::upgrade) or a [`downgrade`](Held::downgrade).
    pub fn fence(&self) -> u64 {
        self.granted.status.fence()
    }

    /// For how long, from now, nobody else can hold the lock; zero if it is lost. Computed from a
    /// clock that runs through suspend, without asking anybody, and on the safe side: counted
    /// from before the last acknowledged request was sent, less 1 % and 2 ms.
    pub fn remaining(&self) -> Duration {
        if self.granted.is_forked() {
            return Duration::ZERO;
        }
        self.granted.status.ends_at().since(clock::now())
    }

    /// Why the lock is lost, if it is.
    pub fn loss(&self) -> Option<Lost> {
        match self.granted.status.notice() {
            Notice::Lost(lost) => Some(lost),
            // The clock is believed before the watchdog, which may not have run yet after a pause.
            Notice::Nothing | Notice::GivenUp => {
                self.remaining().is_zero().then_some(Lost::Expired)
            }
        }
    }

    /// Resolves when the lock is lost, and says why; at once if it is lost already. A loss by
    /// silence is reported before the server can give the lock to another; a deletion or a takeover
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
        let (loss, pid) = (self.loss(), self.granted.pid);
        let mut status = self.granted.status.clone();
        async move {
            if let Some(lost) = loss {
                return lost;
            }
            let mut notice = pin!(status.first_notice());
            let notice = std::future::poll_fn(|cx| match notice.as_mut().poll(cx) {
                Poll::Ready(notice) => Poll::Ready(notice),
                // The watchdog is our parent's and notifies us of nothing.
                Poll::Pending if pid != std::process::id() => Poll::Ready(None),
                Poll::Pending => Poll::Pending,
            });
            match notice.await {
                Some(Notice::Lost(lost)) => lost,
                Some(Notice::GivenUp) => std::future::pending().await,
                // The watchdog is gone and nobody renews.
                Some(Notice::Nothing) | None => Lost::Expired,
            }
        }
    }

    /// Asks the server now whether we still hold it, and renews. An error is no loss: the watchdog
    /// goes on trying until the lease ends.
    pub async fn renew(&self) -> Result<Renewed, Error> {
        let renewed = self.send_renew(None).await;
        known(renewed, &self.granted.status, Reply::Lost)
    }

    /// See [`renew`](Held::renew).
    ///
    /// # Panics
    /// Inside an asynchronous task, where it would block all others: await `renew` there.
    pub fn blocking_renew(&self) -> Result<Renewed, Error> {
        let renewed = self.send_renew(None).blocking();
        known(renewed, &self.granted.status, Reply::Lost)
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
        known(renewed, &self.granted.status, Reply::Lost)
    }

    /// See [`extend`](Held::extend).
    ///
    /// # Panics
    /// Inside an asynchronous task, where it would block all others: await `extend` there.
    pub fn blocking_extend(&self, ttl: Duration) -> Result<Renewed, Error> {
        let renewed = self.send_renew(Some(checked_ttl(ttl)?)).blocking();
        known(renewed, &self.granted.status, Reply::Lost)
    }

    fn send_renew(&self, ttl: Option<Duration>) -> Pending<Renewed> {
        let id = self.granted.id;
        self.granted
            .send(|responder| Message::Renew(id, ttl, responder))
    }

    /// Makes this the only holder, as a reader that wants to write: with a new [fence](Held::fence),
    /// and a lease that counts from this request. [`Upgraded::Busy`] if others hold the lock too: then
    /// it is held on as it was, since two readers who waited to write would wait for each other. Who
    /// waits in the queue does not matter.
    ///
    /// The lock is renewed first, so that what is lost is told as lost and not taken anew. Both
    /// take two attempts of a renewal at most, in which what is not answered is begun again.
    ///
    /// # Errors
    /// An error is no loss, the lock is renewed on, and this holder must not count on being alone.
    /// Whether it is, is not known then; nor if this future is dropped. A lock that it makes of one
    /// that was released meanwhile ends by its ttl.
    ///
    /// [`Error::Unreachable`] too, without asking, after a downgrade of this lock that kept silent: it
    /// may arrive at any time, and let others in. Release the lock, and acquire it anew.
    pub async fn upgrade(&self) -> Result<Upgraded, Error> {
        let upgraded = self.send_change(Change::Upgrade).await;
        known(upgraded, &self.granted.status, Upgraded::Lost)
    }

    /// See [`upgrade`](Held::upgrade).
    ///
    /// # Panics
    /// Inside an asynchronous task, where it would block all others: await `upgrade` there.
    pub fn blocking_upgrade(&self) -> Result<Upgraded, Error> {
        let upgraded = self.send_change(Change::Upgrade).blocking();
        known(upgraded, &self.granted.status, Upgraded::Lost)
    }

    /// Shares the lock from now on, as a writer that goes on reading: with a new
    /// [fence](Held::fence), and a lease that counts from this request. Readers who wait are let
    /// in. It takes as long as an [`upgrade`](Held::upgrade) at most.
    ///
    /// # Errors
    /// An error is no loss, and the lock is renewed on, but others may share it: whether they do is
    /// not known; nor if this future is dropped.
    pub async fn downgrade(&self) -> Result<Downgraded, Error> {
        let downgraded = self.send_change(Change::Downgrade).await;
        known(downgraded, &self.granted.status, Reply::Lost)
    }

    /// See [`downgrade`](Held::downgrade).
    ///
    /// # Panics
    /// Inside an asynchronous task, where it would block all others: await `downgrade` there.
    pub fn blocking_downgrade(&self) -> Result<Downgraded, Error> {
        let downgraded = self.send_change(Change::Downgrade).blocking();
        known(downgraded, &self.granted.status, Reply::Lost)
    }

    fn send_change<T>(&self, change: impl FnOnce(Responder<T>) -> Change) -> Pending<T> {
        let id = self.granted.id;
        self.granted
            .send(|responder| Message::Change(id, change(responder)))
    }

    /// Releases the lock and tells whether it was held to the end. Renewal stops first.
    ///
    /// Returns within 5 s: [`Error::Unreachable`] means that nobody answered; the
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
        let (status, released) = self.send_release(hold);
        known(released.await, &status, Reply::Lost)
    }

    /// See [`release_after`](Held::release_after).
    ///
    /// # Panics
    /// Inside an asynchronous task, where it would block all others: await `release_after` there.
    pub fn blocking_release_after(self, hold: Duration) -> Result<Released, Error> {
        let (status, released) = self.send_release(hold);
        known(released.blocking(), &status, Reply::Lost)
    }

    fn send_release(self, hold: Duration) -> (Status, Pending<Released>) {
        let id = self.granted.id;
        let released = self
            .granted
            .send(|responder| Message::Release(id, hold, responder));
        (self.granted.status.clone(), released)
    }

    /// Stops renewing and lets the lock lapse by itself, a ttl from the last renewal at most.
    pub fn leave(self) {
        if !self.granted.is_forked() {
            let _ = self.granted.watchdog.send(Message::Leave(self.granted.id));
        }
    }
}

impl std::fmt::Debug for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Held")
            .field("key", &format_args!("{}", printable(self.key())))
            .field("owner", &self.owner())
            .field("fence", &self.fence())
            .field("remaining", &self.remaining())
            .finish()
    }
}

/// A loss that the holder was notified of is the result even when the watchdog has ended since, as it
/// does when the lockkeeper is closed.
fn known<T>(
    result: Result<T, Error>,
    status: &Status,
    as_lost: impl FnOnce(Lost) -> T,
) -> Result<T, Error> {
    match (result, status.notice()) {
        (Err(Error::Unreachable(_)), Notice::Lost(lost)) => Ok(as_lost(lost)),
        (result, _) => result,
    }
}
