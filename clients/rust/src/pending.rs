//! The result of a message to the watchdog that is still to come.

use std::pin::{Pin, pin};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use tokio::sync::oneshot;

use crate::error::Error;

/// Resolves with the watchdog's result; needs no particular runtime.
#[derive(Debug)]
pub(crate) struct Pending<T> {
    receiver: oneshot::Receiver<Result<T, Error>>,
    /// Gone when nobody waits for the result any more.
    caller: Arc<()>,
    /// The process that asked: in a fork of it there is no watchdog.
    pid: u32,
}

impl<T> Pending<T> {
    pub(crate) fn new() -> (oneshot::Sender<Result<T, Error>>, Pending<T>) {
        let (responder, receiver) = oneshot::channel();
        let pending = Pending {
            receiver,
            caller: Arc::default(),
            pid: std::process::id(),
        };
        (responder, pending)
    }

    /// Shows whether somebody still waits for the result, without holding the responder.
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

    /// As [`blocking`](Pending::blocking), but anywhere: the watchdog runs in its own thread,
    /// so the runtime that is blocked is not needed for it.
    pub(crate) fn park(self) -> Result<T, Error> {
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        let mut pending = pin!(self);
        loop {
            match pending.as_mut().poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(result) => return result,
                Poll::Pending => thread::park(),
            }
        }
    }
}

impl<T> Future for Pending<T> {
    type Output = Result<T, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match Pin::new(&mut self.receiver).poll(cx) {
            Poll::Ready(result) => Poll::Ready(result.unwrap_or_else(|_| Err(no_watchdog()))),
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
