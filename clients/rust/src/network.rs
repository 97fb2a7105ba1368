//! The connections: one per node that all share, made anew whenever it fails, and one of its own
//! for whoever has to wait.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Cmd, RedisError, Value};
use tokio::sync::watch;
use tokio::time::{Instant, timeout, timeout_at};

use crate::error::Error;
use crate::place::{self, Node, Place};

/// A server that has not taken a connection by then is as good as down. TCP repeats a lost SYN
/// after 1 s and after 3 s, so two of them may get lost.
const DIAL_TIMEOUT: Duration = Duration::from_secs(5);

/// A server that refuses connections is tried at most a hundred times a second, however many
/// locks want to be renewed.
const DIAL_PAUSE: Duration = Duration::from_millis(10);

/// How long a connection is kept on which something unanswered may still be under way. One that waits in
/// the server's queue is not answered, and gives up its place by being closed.
const FAREWELL: Duration = Duration::from_secs(5);

/// MOVED, ASK and once more MOVED is as far as a slot can run away while we ask.
const MAX_REDIRECTS: usize = 4;

pub(crate) struct Network {
    place: Place,
    /// What the shared connections are called on the server, after `lockkeeper:`.
    label: String,
    /// Whether the server was ever there. One that was is waited for; one that never was is more
    /// likely a wrong address, which the caller wants to hear at once.
    reached: AtomicBool,
    shared: Mutex<HashMap<Node, Line>>,
    /// Connections on which a WAIT for replicas may block; see `exchange`.
    idle: Mutex<Vec<(Node, MultiplexedConnection)>>,
}

impl Network {
    pub(crate) fn new(place: Place, label: String) -> Network {
        Network {
            place,
            label,
            reached: AtomicBool::new(false),
            shared: Mutex::default(),
            idle: Mutex::default(),
        }
    }

    pub(crate) fn was_reached(&self) -> bool {
        self.reached.load(Ordering::Relaxed)
    }

    pub(crate) fn node_of(&self, key: &[u8]) -> Node {
        self.place.node_of(key)
    }

    /// Asks one question about `key`; see [`Network::exchange`].
    pub(crate) async fn ask(
        self: &Arc<Self>,
        key: &[u8],
        command: Cmd,
        min_replicas: u32,
        within: Duration,
    ) -> Result<Value, Error> {
        let node = self.node_of(key);
        let mut answers = self
            .exchange(node, vec![command], min_replicas, within)
            .await;
        answers.pop().unwrap_or_else(|| Err(no_answer()))
    }

    /// Sends the commands in one pipeline and gives their answers, in order.
    ///
    /// With `min_replicas` a WAIT follows, and a yes counts only if so many replicas acknowledged
    /// it. A WAIT holds up all that comes after it on its connection, so such a pipeline has a
    /// connection for itself while it lasts.
    pub(crate) async fn exchange(
        self: &Arc<Self>,
        node: Node,
        commands: Vec<Cmd>,
        min_replicas: u32,
        within: Duration,
    ) -> Vec<Result<Value, Error>> {
        let until = Instant::now() + within;
        let mut answers = vec![Err(no_answer()); commands.len()];
        let mut todo = HashMap::from([((node, false), (0..commands.len()).collect::<Vec<_>>())]);
        for _ in 0..MAX_REDIRECTS {
            for ((node, asking), which) in std::mem::take(&mut todo) {
                let chosen = which.iter().map(|&index| &commands[index]);
                let pipeline = Pipeline::new(chosen, asking, min_replicas, within / 2);
                let (values, shortfall) = match self.send(&node, &pipeline, until).await {
                    Ok(values) => values,
                    Err(error) => {
                        which
                            .iter()
                            .for_each(|&index| answers[index] = Err(error.clone()));
                        continue;
                    }
                };
                for (index, value) in which.into_iter().zip(values) {
                    answers[index] = match (value, &shortfall) {
                        (Value::ServerError(error), _) => {
                            if let Some(to) = self.place.redirect(&node, &error) {
                                todo.entry((to.node, to.asking)).or_default().push(index);
                            }
                            Err(self.refusal(&node, &error))
                        }
                        (Value::Int(1..), Some(shortfall)) => Err(shortfall.clone()),
                        (value, _) => Ok(value),
                    };
                }
            }
            if todo.is_empty() {
                break;
            }
        }
        answers
    }

    /// Asks one question that may be answered late, on a connection of its own: whoever stops
    /// listening closes it, and with it gives up the place in the queue. Before that, `farewell` is
    /// sent behind the question, and given a moment to be answered.
    pub(crate) async fn wait(
        &self,
        key: &[u8],
        label: &str,
        command: &Cmd,
        farewell: &Cmd,
    ) -> Result<Value, Error> {
        let (mut node, mut asking) = (self.node_of(key), false);
        for _ in 0..MAX_REDIRECTS {
            let line = self.dial(&node, label).await?;
            let pipeline = Pipeline::new([command].into_iter(), asking, 0, Duration::ZERO);
            let mut waiting = Waiting {
                line,
                farewell: Some(farewell.clone()),
            };
            let answer = pipeline.query(&mut waiting.line).await;
            // Whoever goes on asking in the same name must not be released by an earlier question.
            waiting.farewell = None;
            let (mut values, _) = answer?;
            match values.pop() {
                Some(Value::ServerError(error)) => match self.place.redirect(&node, &error) {
                    Some(to) => (node, asking) = (to.node, to.asking),
                    None => return Err(self.refusal(&node, &error)),
                },
                Some(value) => return Ok(value),
                None => return Err(no_answer()),
            }
        }
        Err(Error::Unreachable(
            "the key moves from node to node".to_owned(),
        ))
    }

    /// One exchange with one node. A connection that failed or kept silent is not used again:
    /// behind a middle box that forgot it, it would keep silent for ever.
    async fn send(
        self: &Arc<Self>,
        node: &Node,
        pipeline: &Pipeline,
        until: Instant,
    ) -> Result<Values, Error> {
        if pipeline.min_replicas > 0 {
            let mut line = match self.take_idle(node) {
                Some(line) => line,
                None => within(until, self.dial(node, &self.label)).await?,
            };
            let values = within(until, pipeline.query(&mut line)).await?;
            lock(&self.idle).push((node.clone(), line));
            return Ok(values);
        }
        let line = self.line(node);
        // Should the time run out while it still rings, it rings on for the next attempt.
        let mut connection = within(until, line.connection()).await?;
        let values = within(until, pipeline.query(&mut connection)).await;
        if values.is_err() {
            self.hang_up(node, &line);
        }
        values
    }

    /// What an error reply means. A server that takes no writes is, where there are others, the
    /// wrong one: the next attempt looks for the right one.
    fn refusal(&self, node: &Node, error: &redis::ServerError) -> Error {
        let refused = self.place.refusal(node, error);
        if self.place.fails_over() && error.code() == "READONLY" {
            lock(&self.shared).remove(node);
            lock(&self.idle).retain(|(idle, _)| idle != node);
            self.place.failed(node);
            return Error::Unreachable(format!("the master has changed: {refused}"));
        }
        refused
    }

    fn take_idle(&self, node: &Node) -> Option<MultiplexedConnection> {
        let mut idle = lock(&self.idle);
        let index = idle.iter().position(|(of, _)| of == node)?;
        Some(idle.swap_remove(index).1)
    }

    fn line(self: &Arc<Self>, node: &Node) -> Line {
        let mut shared = lock(&self.shared);
        if let Some(line) = shared.get(node).filter(|line| line.is_usable()) {
            return line.clone();
        }
        let (dial, line) = watch::channel(Dial::Ringing);
        let line = Line(line);
        shared.insert(node.clone(), line.clone());
        let (network, node) = (Arc::clone(self), node.clone());
        tokio::spawn(async move {
            let dialled = network.dial_shared(&node).await;
            dial.send_replace(match dialled {
                Ok(connection) => Dial::Connected(connection),
                Err(error) => Dial::Failed(error, Instant::now()),
            });
        });
        line
    }

    fn hang_up(&self, node: &Node, line: &Line) {
        let mut shared = lock(&self.shared);
        if shared
            .get(node)
            .is_some_and(|current| current.0.same_channel(&line.0))
        {
            shared.remove(node);
            self.place.failed(node);
        }
    }

    async fn dial_shared(&self, node: &Node) -> Result<MultiplexedConnection, Error> {
        let mut connection = self.dial(node, &self.label).await?;
        let _ = timeout(DIAL_TIMEOUT, self.place.learn(node, &mut connection)).await;
        Ok(connection)
    }

    async fn dial(&self, node: &Node, label: &str) -> Result<MultiplexedConnection, Error> {
        // Boxed: what Sentinel does inside is too deep for the compiler to lay out in one piece.
        let connected = timeout(DIAL_TIMEOUT, Box::pin(self.connect(node, label))).await;
        let connected = connected.unwrap_or_else(|_| {
            let limit = DIAL_TIMEOUT.as_secs();
            Err(Error::Unreachable(format!(
                "no connection within {limit} s"
            )))
        });
        match &connected {
            Ok(_) => self.reached.store(true, Ordering::Relaxed),
            Err(_) => self.place.failed(node),
        }
        connected
    }

    async fn connect(&self, node: &Node, label: &str) -> Result<MultiplexedConnection, Error> {
        let client = self.place.client(node).await?;
        // All our waiting is bounded by who waits, so the library need not bound it again.
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(None);
        let mut line = place::connect(&client, &config).await?;
        // For whoever looks at CLIENT LIST. Not awaited: a user who may not do this may still lock.
        let mut name = redis::cmd("CLIENT");
        name.arg("SETNAME")
            .arg(connection_name(label))
            .set_no_response(true);
        line.send_packed_command(&name).await?;
        Ok(line)
    }
}

/// A connection on which a question is under way.
struct Waiting {
    line: MultiplexedConnection,
    farewell: Option<Cmd>,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some(farewell) = self.farewell.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let mut line = self.line.clone();
            runtime.spawn(async move {
                let _ = timeout(FAREWELL, line.send_packed_command(&farewell)).await;
            });
        }
    }
}

/// The shared connection to a node, or the attempt to make one.
#[derive(Clone)]
struct Line(watch::Receiver<Dial>);

enum Dial {
    Ringing,
    Connected(MultiplexedConnection),
    Failed(Error, Instant),
}

impl Line {
    fn is_usable(&self) -> bool {
        match &*self.0.borrow() {
            Dial::Ringing | Dial::Connected(_) => true,
            Dial::Failed(_, at) => at.elapsed() < DIAL_PAUSE,
        }
    }

    async fn connection(&self) -> Result<MultiplexedConnection, Error> {
        let mut state = self.0.clone();
        let state = state.wait_for(|dial| !matches!(dial, Dial::Ringing)).await;
        match state.as_deref() {
            Ok(Dial::Connected(connection)) => Ok(connection.clone()),
            Ok(Dial::Failed(error, _)) => Err(error.clone()),
            Ok(Dial::Ringing) | Err(_) => Err(no_answer()),
        }
    }
}

/// The answers of a pipeline, and what is wrong with them if too few replicas acknowledged.
type Values = (Vec<Value>, Option<Error>);

struct Pipeline {
    commands: redis::Pipeline,
    asking: bool,
    min_replicas: u32,
}

impl Pipeline {
    fn new<'a>(
        commands: impl Iterator<Item = &'a Cmd>,
        asking: bool,
        min_replicas: u32,
        replicas_within: Duration,
    ) -> Pipeline {
        let mut pipeline = redis::pipe();
        for command in commands {
            if asking {
                pipeline.cmd("ASKING");
            }
            pipeline.add_command(command.clone());
        }
        if min_replicas > 0 {
            // WAIT takes 0 ms for ever.
            let within = (replicas_within.as_millis() as u64).max(1);
            pipeline.cmd("WAIT").arg(min_replicas).arg(within);
        }
        Pipeline {
            commands: pipeline,
            asking,
            min_replicas,
        }
    }

    async fn query(&self, line: &mut MultiplexedConnection) -> Result<Values, RedisError> {
        let mut values = line
            .send_packed_commands(&self.commands, 0, self.commands.len())
            .await?;
        let mut shortfall = None;
        if self.min_replicas > 0 {
            let wanted = i64::from(self.min_replicas);
            shortfall = match values.pop() {
                Some(Value::Int(acknowledged)) if acknowledged >= wanted => None,
                Some(Value::Int(acknowledged)) => Some(Error::Refused(format!(
                    "NOREPLICAS {acknowledged} of {wanted} replicas acknowledged"
                ))),
                Some(Value::ServerError(error)) => Some(Error::from(&error)),
                _ => Some(no_answer()),
            };
        }
        if self.asking {
            values = values.into_iter().skip(1).step_by(2).collect();
        }
        Ok((values, shortfall))
    }
}

fn no_answer() -> Error {
    Error::Unreachable("no answer in time".to_owned())
}

async fn within<T, E: Into<Error>>(
    until: Instant,
    future: impl Future<Output = Result<T, E>>,
) -> Result<T, Error> {
    match timeout_at(until, future).await {
        Ok(result) => result.map_err(Into::into),
        Err(_) => Err(no_answer()),
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
