//! The connection to a node that all share, or the attempts to make it.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::connection::Connection;
use crate::error::Error;

/// One attempt may hang while the next one would succeed, so a request that has waited for it in
/// vain starts another one beside it; no more than so many.
const MOST_ATTEMPTS: usize = 4;

/// A server that refuses connections is tried at most a hundred times a second, however many locks
/// want to be renewed.
const BACK_OFF: Duration = Duration::from_millis(10);

#[derive(Clone)]
pub(super) struct SharedConnection {
    state: watch::Receiver<State>,
    /// Asks for another attempt beside those that are going on.
    beside: Arc<Notify>,
}

enum State {
    Connecting,
    Connected(Connection),
    Failed(Error, Instant),
}

impl SharedConnection {
    /// Begins to connect, in the background.
    pub(super) fn new<F>(connect: impl Fn() -> F + Send + 'static) -> SharedConnection
    where
        F: Future<Output = Result<Connection, Error>> + Send + 'static,
    {
        let (sender, state) = watch::channel(State::Connecting);
        let beside = Arc::new(Notify::new());
        let shared = SharedConnection {
            state,
            beside: Arc::clone(&beside),
        };
        tokio::spawn(async move {
            sender.send_replace(match first_to_succeed(connect, &beside).await {
                Ok(connection) => State::Connected(connection),
                Err(error) => State::Failed(error, Instant::now()),
            });
        });
        shared
    }

    pub(super) fn is_usable(&self) -> bool {
        match &*self.state.borrow() {
            State::Connecting => true,
            State::Connected(connection) => !connection.has_ended(),
            State::Failed(_, at) => at.elapsed() < BACK_OFF,
        }
    }

    pub(super) fn is(&self, other: &SharedConnection) -> bool {
        self.state.same_channel(&other.state)
    }

    pub(super) fn connect_beside(&self) {
        self.beside.notify_one();
    }

    pub(super) async fn connection(&self) -> Result<Connection, Error> {
        let mut state = self.state.clone();
        let is_over = |state: &State| !matches!(state, State::Connecting);
        let state = state.wait_for(is_over).await;
        match state.as_deref() {
            Ok(State::Connected(connection)) => Ok(connection.clone()),
            Ok(State::Failed(error, _)) => Err(error.clone()),
            Ok(State::Connecting) | Err(_) => Err(Error::no_answer()),
        }
    }
}

async fn first_to_succeed<F>(connect: impl Fn() -> F, beside: &Notify) -> Result<Connection, Error>
where
    F: Future<Output = Result<Connection, Error>> + Send + 'static,
{
    let mut attempts = JoinSet::new();
    attempts.spawn(connect());
    let mut error = Error::no_answer();
    loop {
        tokio::select! {
            ended = attempts.join_next() => match ended {
                Some(Ok(Ok(connection))) => return Ok(connection),
                Some(Ok(Err(failed))) => error = failed,
                Some(Err(_)) => {}
                None => return Err(error),
            },
            () = beside.notified(), if attempts.len() < MOST_ATTEMPTS => {
                attempts.spawn(connect());
            }
        }
    }
}
