//! What the watchdog has been asked and has not answered yet.

use std::pin::{Pin, pin};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use tokio::sync::oneshot;

use crate::error::Error;

/// Resolves when the watchdog answers; needs no particular runtime.
#[derive(Debug)]
pub(crate) struct Pending<T> {
    receiver: oneshot::Receiver<Result<T, Error>>,
    /// Gone when nobody waits for the answer any more.
    caller: Arc<()>,
    /// The process that asked: in a fork of it there is no watchdog that could answer.
    pid: u32,
}

impl<T> Pending<T> {
    pub(crate) fn new() -> (oneshot::Sender<Result<T, Error>>, Pending<T>) {
        let (reply, receiver) = oneshot::channel();
        let pending = Pending {
            receiver,
            caller: Arc::default(),
            pid: std::process::id(),
        };
        (reply, pending)
    }

    /// Tells whether somebody still waits for the answer, without holding its sender.
    pub(crate) fn caller(&self) -> Weak<()> {
        Arc::downgrade(&self.caller)
    }

    /// # Panics
    /// Inside an asynchronous task, which it would block.
    pub(crate) fn blocking(self) -> Result<T, Error> {
        self.receiver
            .blocking_recv()
            .unwrap_or_else(|_| Err(no_watchdog()))
    }

    /// As [`blocking`](Pending::blocking), but anywhere: the watchdog answers from its own thread,
    /// so the runtime that is blocked is not needed for it.
    pub(crate) fn park(self) -> Result<T, Error> {
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        let mut pending = pin!(self);
        loop {
            match pending.as_mut().poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(answer) => return answer,
                Poll::Pending => thread::park(),
            }
        }
    }
}

impl<T> Future for Pending<T> {
    type Output = Result<T, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match Pin::new(&mut self.receiver).poll(cx) {
            Poll::Ready(answer) => Poll::Ready(answer.unwrap_or_else(|_| Err(no_watchdog()))),
            Poll::Pending if self.pid != std::process::id() => Poll::Ready(Err(Error::Forked)),
            Poll::Pending => Poll::Pending,
        }
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn no_watchdog() -> Error {
    Error::Unreachable("the watchdog has ended".to_owned())
}
