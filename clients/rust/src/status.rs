//! What the watchdog tells the handle of a lock: until when it is held, by which fence, and whether it
//! was lost.
//! The handle reads it on any thread, without asking the watchdog.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::watch;

use crate::lease::{Lost, Moment};

/// What the holder is notified of.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Notice {
    Nothing,
    Lost(Lost),
    /// The holder has given the lock up, so there is nothing to lose any more.
    GivenUp,
}

/// The watchdog's end.
pub(crate) struct StatusSender {
    ends_at: Arc<AtomicU64>,
    fence: Arc<AtomicU64>,
    notice: watch::Sender<Notice>,
}

/// The handle's end.
#[derive(Clone)]
pub(crate) struct Status {
    /// Microseconds after boot.
    ends_at: Arc<AtomicU64>,
    /// Of the last grant: who changes from reader to writer gets another.
    fence: Arc<AtomicU64>,
    notice: watch::Receiver<Notice>,
}

pub(crate) fn channel(ends_at: Moment, fence: u64) -> (StatusSender, Status) {
    let ends_at = Arc::new(AtomicU64::new(micros(ends_at)));
    let fence = Arc::new(AtomicU64::new(fence));
    let (sender, receiver) = watch::channel(Notice::Nothing);
    let status = Status {
        ends_at: Arc::clone(&ends_at),
        fence: Arc::clone(&fence),
        notice: receiver,
    };
    let sender = StatusSender {
        ends_at,
        fence,
        notice: sender,
    };
    (sender, status)
}

/// Rounded down: the handle may end too early, never too late.
fn micros(moment: Moment) -> u64 {
    u64::try_from(moment.since_boot().as_micros()).unwrap_or(u64::MAX)
}

impl StatusSender {
    pub(crate) fn extend(&self, ends_at: Moment) {
        self.ends_at.store(micros(ends_at), Ordering::Release);
    }

    pub(crate) fn grant(&self, fence: u64) {
        self.fence.store(fence, Ordering::Release);
    }

    pub(crate) fn lose(&self, lost: Lost) {
        if lost != Lost::MaxHold {
            self.ends_at.store(0, Ordering::Release);
        }
        self.notice.send_replace(Notice::Lost(lost));
    }

    pub(crate) fn give_up(self) {
        self.notice.send_replace(Notice::GivenUp);
    }
}

impl Status {
    pub(crate) fn ends_at(&self) -> Moment {
        Moment::after_boot(Duration::from_micros(self.ends_at.load(Ordering::Acquire)))
    }

    pub(crate) fn fence(&self) -> u64 {
        self.fence.load(Ordering::Acquire)
    }

    pub(crate) fn notice(&self) -> Notice {
        *self.notice.borrow()
    }

    /// Resolves with the first notice; none if the watchdog has ended without any.
    pub(crate) async fn first_notice(&mut self) -> Option<Notice> {
        let notice = self.notice.wait_for(|it| !matches!(it, Notice::Nothing));
        notice.await.ok().map(|notice| *notice)
    }
}
