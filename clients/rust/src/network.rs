//! The connections: one per node that all share, made anew whenever it fails, and one of its own
//! for whoever waits in the queue.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::{Cmd, RedisError, Value};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout, timeout_at};

use crate::connection::{Connection, Unanswered};
use crate::error::Error;
use crate::topology::{self, Node, Topology};
use idle::Idle;
use pipeline::{Pipeline, Replies};
use shared::SharedConnection;

mod idle;
mod pipeline;
mod shared;

/// A server that has not taken a connection by then is as good as down. TCP repeats a lost SYN
/// after 1 s and after 3 s, so two of them may get lost.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// MOVED, ASK and once more MOVED is as far as a slot can run away while we ask. Two nodes that each say
/// the other has it would send us to and fro until the second is told.
const MAX_REDIRECTS: usize = 4;

/// What a server replies that is not the master, or not yet: where it is, another may be soon.
const ELSEWHERE: [&str; 4] = ["READONLY", "LOADING", "MASTERDOWN", "UNBLOCKED"];

/// A request that got no reply.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) error: Error,
    /// The connection, which was given up, may still carry the request. Else it was not sent, or
    /// the server has ended the connection.
    pub(crate) is_silent: bool,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure {
            error,
            is_silent: false,
        }
    }
}

impl From<RedisError> for Failure {
    fn from(error: RedisError) -> Failure {
        Failure {
            // Not the server has ended the connection then, but our own system.
            is_silent: error.is_timeout(),
            error: Error::from(error),
        }
    }
}

/// What became of the connection to a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Health {
    /// How often it was replaced: another server may be there now.
    pub(crate) replaced: u64,
    /// How often it kept silent: so may others to the same node.
    pub(crate) silent: u64,
}

/// When somebody last polled at a node, and whether it replied.
type LastPoll = Option<(Instant, Result<(), Error>)>;

pub(crate) struct Network {
    topology: Topology,
    /// What the shared connections are called on the server, after `lockkeeper:`.
    label: String,
    /// Whether the server was ever there. One that never was is more likely a wrong address, which
    /// a caller who does not say how long to wait wants to hear at once.
    reached: AtomicBool,
    /// Whether LOCK.INFO was refused, so that nobody sends it again and again.
    info_refused: AtomicBool,
    shared: Mutex<HashMap<Node, SharedConnection>>,
    health: Mutex<HashMap<Node, Health>>,
    polls: Mutex<HashMap<Node, Arc<tokio::sync::Mutex<LastPoll>>>>,
    /// Connections on which a WAIT for replicas may block; see `exchange`.
    idle: Idle<Connection>,
}

impl Network {
    pub(crate) fn new(topology: Topology, label: String) -> Network {
        Network {
            topology,
            label,
            reached: AtomicBool::new(false),
            info_refused: AtomicBool::new(false),
            shared: Mutex::default(),
            health: Mutex::default(),
            polls: Mutex::default(),
            idle: Idle::default(),
        }
    }

    pub(crate) fn was_reached(&self) -> bool {
        self.reached.load(Ordering::Relaxed)
    }

    pub(crate) fn may_use_info(&self) -> bool {
        !self.info_refused.load(Ordering::Relaxed)
    }

    pub(crate) fn note_info_refused(&self) {
        self.info_refused.store(true, Ordering::Relaxed);
    }

    pub(crate) fn node_of(&self, key: &[u8]) -> Node {
        self.topology.node_of(key)
    }

    pub(crate) fn health(&self, node: &Node) -> Health {
        lock(&self.health).get(node).copied().unwrap_or_default()
    }

    /// The connection to the node was replaced, or leads to another server now: what is known of it
    /// may not be true of others any more.
    pub(crate) fn note_replaced(&self, node: &Node) {
        lock(&self.health).entry(node.clone()).or_default().replaced += 1;
    }

    /// Sends one command about `key`; see [`Network::exchange`]. If nobody waits for the reply any more
    /// before it comes, `cleanup` is sent after the command.
    pub(crate) async fn ask(
        self: &Arc<Self>,
        key: &[u8],
        command: Cmd,
        cleanup: Option<Cmd>,
        min_replicas: u32,
        within: Duration,
    ) -> Result<Value, Failure> {
        let node = self.node_of(key);
        let commands = vec![command];
        let mut replies = self
            .exchange(node, commands, cleanup, min_replicas, within)
            .await;
        replies
            .pop()
            .unwrap_or_else(|| Err(Error::no_answer().into()))
    }

    /// Sends the commands in one pipeline and returns the replies, in order.
    ///
    /// With `min_replicas` a WAIT follows, and a yes counts only if so many replicas acknowledged
    /// it. A WAIT holds up all that comes after it on its connection, so such a pipeline has a
    /// connection of its own while it lasts.
    pub(crate) async fn exchange(
        self: &Arc<Self>,
        node: Node,
        commands: Vec<Cmd>,
        cleanup: Option<Cmd>,
        min_replicas: u32,
        within: Duration,
    ) -> Vec<Result<Value, Failure>> {
        let until = Instant::now() + within;
        let mut replies = vec![Err(Error::no_answer().into()); commands.len()];
        let mut todo = HashMap::from([((node, false), (0..commands.len()).collect::<Vec<_>>())]);
        for _ in 0..MAX_REDIRECTS {
            // Side by side: a node that keeps silent must not hold up the replies of another.
            let mut exchanges = JoinSet::new();
            for ((node, asking), which) in std::mem::take(&mut todo) {
                let chosen = which.iter().map(|&index| &commands[index]);
                let pipeline = Pipeline::new(chosen, asking, min_replicas, within / 2);
                let (network, cleanup) = (Arc::clone(self), cleanup.clone());
                exchanges.spawn(async move {
                    let sent = network.send(&node, &pipeline, cleanup, until).await;
                    (node, which, sent)
                });
            }
            while let Some(exchanged) = exchanges.join_next().await {
                let Ok((node, which, sent)) = exchanged else {
                    continue;
                };
                let (values, shortfall) = match sent {
                    Ok(values) => values,
                    Err(failure) => {
                        which
                            .iter()
                            .for_each(|&index| replies[index] = Err(failure.clone()));
                        continue;
                    }
                };
                for (index, value) in which.into_iter().zip(values) {
                    replies[index] = match (value, &shortfall) {
                        (Value::ServerError(error), _) => {
                            Err(match self.topology.redirect(&node, &error) {
                                Some(to) => {
                                    todo.entry((to.node, to.asking)).or_default().push(index);
                                    Error::moving().into()
                                }
                                None => self.refusal(&node, &error).into(),
                            })
                        }
                        (Value::Int(1..), Some(shortfall)) => Err(shortfall.clone().into()),
                        (value, _) => Ok(value),
                    };
                }
            }
            if todo.is_empty() {
                break;
            }
        }
        replies
    }

    /// Sends one command that may be replied to late, on a connection of its own: whoever drops this
    /// closes it, and so leaves the queue. What is in `cleanup` is sent after the command then;
    /// `release` is put there when the command is sent.
    pub(crate) async fn wait(
        &self,
        key: &[u8],
        label: &str,
        command: &Cmd,
        release: &Cmd,
        cleanup: &Mutex<Option<Cmd>>,
    ) -> Result<Value, Failure> {
        let (mut node, mut asking) = (self.node_of(key), false);
        for _ in 0..MAX_REDIRECTS {
            let connection = self.connect(&node, label).await?;
            let pipeline = Pipeline::new([command].into_iter(), asking, 0, Duration::ZERO);
            let mut waiting = WaitRequest {
                unanswered: Unanswered {
                    connection,
                    cleanup: None,
                },
                cleanup,
            };
            *lock(cleanup) = Some(release.clone());
            let replies = pipeline.query(&mut waiting.unanswered.connection).await;
            let replies = replies.map_err(Failure::from);
            // Whoever goes on asking in the same name must not be released by an earlier request.
            if !matches!(&replies, Err(failure) if failure.is_silent) {
                *lock(cleanup) = None;
            }
            let (mut values, _) = replies?;
            match values.pop() {
                Some(Value::ServerError(error)) => match self.topology.redirect(&node, &error) {
                    Some(to) => (node, asking) = (to.node, to.asking),
                    None => return Err(self.refusal(&node, &error).into()),
                },
                Some(value) => return Ok(value),
                None => return Err(Error::no_answer().into()),
            }
        }
        Err(Error::moving().into())
    }

    /// Polls at the node that serves `key`, unless somebody else did so a moment ago: then none. Once
    /// for all who wait there, however many they are.
    pub(crate) async fn poll(
        self: &Arc<Self>,
        key: &[u8],
        command: Cmd,
        every: Duration,
    ) -> Result<Option<Value>, Error> {
        let asked = Instant::now();
        let last = Arc::clone(lock(&self.polls).entry(self.node_of(key)).or_default());
        let mut last = last.lock().await;
        match &*last {
            // While we waited for the lock, or, if the node replied then, not long before.
            Some((at, replied)) if *at >= asked => return replied.clone().map(|()| None),
            Some((at, Ok(()))) if at.elapsed() < every / 2 => return Ok(None),
            _ => {}
        }
        let reply = self.ask(key, command, None, 0, every).await;
        let reply = reply.map_err(|failure| failure.error);
        *last = Some((Instant::now(), reply.clone().map(|_| ())));
        reply.map(Some)
    }

    /// One exchange with one node. A connection that failed or kept silent is not used again:
    /// behind a middle box that forgot it, it would keep silent for ever.
    async fn send(
        self: &Arc<Self>,
        node: &Node,
        pipeline: &Pipeline,
        cleanup: Option<Cmd>,
        until: Instant,
    ) -> Result<Replies, Failure> {
        if pipeline.has_wait() {
            let connection = match self.idle.take(node, Connection::has_ended) {
                Some(connection) => connection,
                None => within(until, self.connect(node, &self.label)).await?,
            };
            let mut unanswered = Unanswered {
                connection,
                cleanup,
            };
            let replies = query(&mut unanswered, pipeline, until).await?;
            self.idle.keep(node, unanswered.connection.clone());
            return Ok(replies);
        }
        let shared = self.shared(node);
        let connection = match within(until, shared.connection()).await {
            Ok(connection) => connection,
            Err(failure) => {
                // This attempt goes on for the next request, and another one beside it.
                if failure.is_silent {
                    shared.connect_beside();
                    self.topology.failed(node);
                }
                return Err(Failure {
                    is_silent: false,
                    ..failure
                });
            }
        };
        let mut unanswered = Unanswered {
            connection,
            cleanup,
        };
        let replies = query(&mut unanswered, pipeline, until).await;
        if let Err(failure) = &replies {
            self.discard(node, &shared, failure.is_silent);
        }
        replies
    }

    /// What an error reply means. A server that takes no writes is the wrong one, where there are
    /// others or behind an address that leads to another by now: the next attempt looks for it.
    fn refusal(&self, node: &Node, error: &redis::ServerError) -> Error {
        let refused = self.topology.refusal(node, error);
        if ELSEWHERE.contains(&error.code()) {
            lock(&self.shared).remove(node);
            self.idle.discard(node);
            self.note_replaced(node);
            self.topology.failed(node);
            if self.topology.fails_over() && error.code() == "READONLY" {
                return Error::Unreachable(format!("the master has changed: {refused}"));
            }
        }
        refused
    }

    /// The connection to the node that all share, made anew if it has ended.
    fn shared(self: &Arc<Self>, node: &Node) -> SharedConnection {
        let mut shared = lock(&self.shared);
        if let Some(connection) = shared.get(node) {
            if connection.is_usable() {
                return connection.clone();
            }
            self.note_replaced(node);
        }
        let (network, of) = (Arc::clone(self), node.clone());
        let connection = SharedConnection::new(move || {
            let (network, node) = (Arc::clone(&network), of.clone());
            async move { network.connect_shared(&node).await }
        });
        shared.insert(node.clone(), connection.clone());
        connection
    }

    /// Gives up the connections that nobody uses at present, when nobody will for a while.
    pub(crate) fn disconnect(&self) {
        lock(&self.shared).clear();
        self.idle.clear();
    }

    fn discard(&self, node: &Node, failed: &SharedConnection, is_silent: bool) {
        let mut shared = lock(&self.shared);
        if shared.get(node).is_some_and(|current| current.is(failed)) {
            shared.remove(node);
            self.note_replaced(node);
            if is_silent {
                lock(&self.health).entry(node.clone()).or_default().silent += 1;
            }
            self.topology.failed(node);
        }
    }

    async fn connect_shared(&self, node: &Node) -> Result<Connection, Error> {
        let mut connection = self.connect(node, &self.label).await?;
        let learn = self.topology.learn(node, connection.redis());
        let _ = timeout(CONNECT_TIMEOUT, learn).await;
        Ok(connection)
    }

    async fn connect(&self, node: &Node, label: &str) -> Result<Connection, Error> {
        // Boxed: what Sentinel does inside is too deep for the compiler to lay out in one piece.
        let connected = timeout(CONNECT_TIMEOUT, Box::pin(self.log_in(node, label))).await;
        let connected = connected.unwrap_or_else(|_| {
            let limit = CONNECT_TIMEOUT.as_secs();
            Err(Error::Unreachable(format!(
                "no connection within {limit} s"
            )))
        });
        match &connected {
            Ok(_) => self.reached.store(true, Ordering::Relaxed),
            Err(_) => self.topology.failed(node),
        }
        connected
    }

    async fn log_in(&self, node: &Node, label: &str) -> Result<Connection, Error> {
        let client = self.topology.client(node).await?;
        let mut connection = topology::connect(&client).await?;
        // For whoever looks at CLIENT LIST. Not awaited: a user who may not do this may still lock.
        let mut name = redis::cmd("CLIENT");
        name.arg("SETNAME")
            .arg(connection_name(label))
            .set_no_response(true);
        connection.send(&name).await?;
        Ok(connection)
    }
}

/// A request of somebody who waits in the queue, on a connection of its own.
struct WaitRequest<'a> {
    unanswered: Unanswered,
    cleanup: &'a Mutex<Option<Cmd>>,
}

impl Drop for WaitRequest<'_> {
    fn drop(&mut self) {
        self.unanswered.cleanup = lock(self.cleanup).take();
    }
}

async fn query(
    unanswered: &mut Unanswered,
    pipeline: &Pipeline,
    until: Instant,
) -> Result<Replies, Failure> {
    let replies = within(until, pipeline.query(&mut unanswered.connection)).await;
    if !matches!(&replies, Err(failure) if failure.is_silent) {
        unanswered.cleanup = None;
    }
    replies
}

async fn within<T, E: Into<Failure>>(
    until: Instant,
    future: impl Future<Output = Result<T, E>>,
) -> Result<T, Failure> {
    match timeout_at(until, future).await {
        Ok(result) => result.map_err(Into::into),
        Err(_) => Err(Failure {
            error: Error::no_answer(),
            is_silent: true,
        }),
    }
}

/// CLIENT SETNAME takes no blanks and nothing that does not print.
fn connection_name(label: &str) -> String {
    let plain = |c: char| if c.is_ascii_graphic() { c } else { '_' };
    format!(
        "lockkeeper:{}",
        label.chars().map(plain).collect::<String>()
    )
}

/// Nothing panics while it holds one of these locks, so what they guard is always whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
