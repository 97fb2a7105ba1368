//! The connections: one per node that all share, made anew whenever it fails, and one of its own
//! for whoever has to wait.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::{Cmd, RedisError, Value};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout, timeout_at};

use crate::connection::{Connection, Unanswered};
use crate::error::Error;
use crate::place::{self, Node, Place};

/// A server that has not taken a connection by then is as good as down. TCP repeats a lost SYN
/// after 1 s and after 3 s, so two of them may get lost.
const DIAL_TIMEOUT: Duration = Duration::from_secs(5);

/// A dial may hang while the next one would succeed, so an attempt that has waited for it in vain
/// starts another one beside it; no more than so many.
const MOST_DIALS: usize = 4;

/// A server that refuses connections is tried at most a hundred times a second, however many
/// locks want to be renewed.
const DIAL_PAUSE: Duration = Duration::from_millis(10);

/// Connections on which a WAIT for replicas may block are kept for so long, so that the renewals
/// of a lock with the usual ttl find one, and so many of them per node.
const IDLE: Duration = Duration::from_secs(15);
const MOST_IDLE: usize = 4;

/// MOVED, ASK and once more MOVED is as far as a slot can run away while we ask.
const MAX_REDIRECTS: usize = 4;

/// What a server says that is not the master, or not yet: where it is, another may be soon.
const ELSEWHERE: [&str; 4] = ["READONLY", "LOADING", "MASTERDOWN", "UNBLOCKED"];

/// A request that got no answer.
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
            // Not the server has ended it then, but our own system.
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

/// When it was last asked whether a node answers, and how that ended.
type Probe = Option<(Instant, Result<(), Error>)>;

pub(crate) struct Network {
    place: Place,
    /// What the shared connections are called on the server, after `lockkeeper:`.
    label: String,
    /// Whether the server was ever there. One that never was is more likely a wrong address, which
    /// a caller who does not say how long to wait wants to hear at once.
    reached: AtomicBool,
    /// Whether LOCK.INFO was refused, so that nobody asks it again and again.
    may_not_look: AtomicBool,
    shared: Mutex<HashMap<Node, Line>>,
    health: Mutex<HashMap<Node, Health>>,
    probes: Mutex<HashMap<Node, Arc<tokio::sync::Mutex<Probe>>>>,
    /// Connections on which a WAIT for replicas may block; see `exchange`.
    idle: Mutex<Vec<(Node, Connection, Instant)>>,
}

impl Network {
    pub(crate) fn new(place: Place, label: String) -> Network {
        Network {
            place,
            label,
            reached: AtomicBool::new(false),
            may_not_look: AtomicBool::new(false),
            shared: Mutex::default(),
            health: Mutex::default(),
            probes: Mutex::default(),
            idle: Mutex::default(),
        }
    }

    pub(crate) fn was_reached(&self) -> bool {
        self.reached.load(Ordering::Relaxed)
    }

    pub(crate) fn may_look(&self) -> bool {
        !self.may_not_look.load(Ordering::Relaxed)
    }

    pub(crate) fn note_that_looking_is_refused(&self) {
        self.may_not_look.store(true, Ordering::Relaxed);
    }

    pub(crate) fn node_of(&self, key: &[u8]) -> Node {
        self.place.node_of(key)
    }

    pub(crate) fn health(&self, node: &Node) -> Health {
        lock(&self.health).get(node).copied().unwrap_or_default()
    }

    /// What is known about the connection to the node may be true of others no more.
    pub(crate) fn suspect(&self, node: &Node) {
        lock(&self.health).entry(node.clone()).or_default().replaced += 1;
    }

    /// Asks one question about `key`; see [`Network::exchange`]. If nobody listens any more
    /// before it is answered, `behind` is sent behind it.
    pub(crate) async fn ask(
        self: &Arc<Self>,
        key: &[u8],
        command: Cmd,
        behind: Option<Cmd>,
        min_replicas: u32,
        within: Duration,
    ) -> Result<Value, Failure> {
        let node = self.node_of(key);
        let commands = vec![command];
        let mut answers = self
            .exchange(node, commands, behind, min_replicas, within)
            .await;
        answers.pop().unwrap_or_else(|| Err(no_answer().into()))
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
        behind: Option<Cmd>,
        min_replicas: u32,
        within: Duration,
    ) -> Vec<Result<Value, Failure>> {
        let until = Instant::now() + within;
        let mut answers = vec![Err(no_answer().into()); commands.len()];
        let mut todo = HashMap::from([((node, false), (0..commands.len()).collect::<Vec<_>>())]);
        for _ in 0..MAX_REDIRECTS {
            // Side by side: a node that keeps silent must not hold up what another answers.
            let mut exchanges = JoinSet::new();
            for ((node, asking), which) in std::mem::take(&mut todo) {
                let chosen = which.iter().map(|&index| &commands[index]);
                let pipeline = Pipeline::new(chosen, asking, min_replicas, within / 2);
                let (network, behind) = (Arc::clone(self), behind.clone());
                exchanges.spawn(async move {
                    let sent = network.send(&node, &pipeline, behind, until).await;
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
                            .for_each(|&index| answers[index] = Err(failure.clone()));
                        continue;
                    }
                };
                for (index, value) in which.into_iter().zip(values) {
                    answers[index] = match (value, &shortfall) {
                        (Value::ServerError(error), _) => {
                            if let Some(to) = self.place.redirect(&node, &error) {
                                todo.entry((to.node, to.asking)).or_default().push(index);
                            }
                            Err(self.refusal(&node, &error).into())
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
        answers
    }

    /// Asks one question that may be answered late, on a connection of its own: whoever stops
    /// listening closes it, and with it gives up the place in the queue. What stands in `behind` is
    /// sent behind the question then; it is set when the question is sent.
    pub(crate) async fn wait(
        &self,
        key: &[u8],
        label: &str,
        command: &Cmd,
        farewell: &Cmd,
        behind: &Mutex<Option<Cmd>>,
    ) -> Result<Value, Failure> {
        let (mut node, mut asking) = (self.node_of(key), false);
        for _ in 0..MAX_REDIRECTS {
            let connection = self.dial(&node, label).await?;
            let pipeline = Pipeline::new([command].into_iter(), asking, 0, Duration::ZERO);
            let mut waiting = Waiting {
                unanswered: Unanswered {
                    connection,
                    behind: None,
                },
                behind,
            };
            *lock(behind) = Some(farewell.clone());
            let answer = pipeline.query(&mut waiting.unanswered.connection).await;
            let answer = answer.map_err(Failure::from);
            // Whoever goes on asking in the same name must not be released by an earlier question.
            if !matches!(&answer, Err(failure) if failure.is_silent) {
                *lock(behind) = None;
            }
            let (mut values, _) = answer?;
            match values.pop() {
                Some(Value::ServerError(error)) => match self.place.redirect(&node, &error) {
                    Some(to) => (node, asking) = (to.node, to.asking),
                    None => return Err(self.refusal(&node, &error).into()),
                },
                Some(value) => return Ok(value),
                None => return Err(no_answer().into()),
            }
        }
        Err(Error::Unreachable("the key moves from node to node".to_owned()).into())
    }

    /// Asks whether whoever serves `key` answers, unless somebody else did so a moment ago: then
    /// none. Once for all who wait there, however many they are.
    pub(crate) async fn probe(
        self: &Arc<Self>,
        key: &[u8],
        question: Cmd,
        every: Duration,
    ) -> Result<Option<Value>, Error> {
        let asked = Instant::now();
        let probe = Arc::clone(lock(&self.probes).entry(self.node_of(key)).or_default());
        let mut probe = probe.lock().await;
        match &*probe {
            // While we stood here, or, if it answered then, not long before.
            Some((at, answered)) if *at >= asked => return answered.clone().map(|()| None),
            Some((at, Ok(()))) if at.elapsed() < every / 2 => return Ok(None),
            _ => {}
        }
        let answer = self.ask(key, question, None, 0, every).await;
        let answer = answer.map_err(|failure| failure.error);
        *probe = Some((Instant::now(), answer.clone().map(|_| ())));
        answer.map(Some)
    }

    /// One exchange with one node. A connection that failed or kept silent is not used again:
    /// behind a middle box that forgot it, it would keep silent for ever.
    async fn send(
        self: &Arc<Self>,
        node: &Node,
        pipeline: &Pipeline,
        behind: Option<Cmd>,
        until: Instant,
    ) -> Result<Values, Failure> {
        if pipeline.min_replicas > 0 {
            let connection = match self.take_idle(node) {
                Some(connection) => connection,
                None => within(until, self.dial(node, &self.label)).await?,
            };
            let mut unanswered = Unanswered { connection, behind };
            let values = unanswered.query(pipeline, until).await?;
            self.keep_idle(node, unanswered.connection.clone());
            return Ok(values);
        }
        let line = self.line(node);
        let connection = match within(until, line.connection()).await {
            Ok(connection) => connection,
            Err(failure) => {
                // It rings on for the next attempt, and another one beside it.
                if failure.is_silent {
                    line.again.notify_one();
                    self.place.failed(node);
                }
                return Err(Failure {
                    is_silent: false,
                    ..failure
                });
            }
        };
        let mut unanswered = Unanswered { connection, behind };
        let values = unanswered.query(pipeline, until).await;
        if let Err(failure) = &values {
            self.hang_up(node, &line, failure.is_silent);
        }
        values
    }

    /// What an error reply means. A server that takes no writes is the wrong one, where there are
    /// others or behind an address that leads to another by now: the next attempt looks for it.
    fn refusal(&self, node: &Node, error: &redis::ServerError) -> Error {
        let refused = self.place.refusal(node, error);
        if ELSEWHERE.contains(&error.code()) {
            lock(&self.shared).remove(node);
            lock(&self.idle).retain(|(idle, ..)| idle != node);
            self.suspect(node);
            self.place.failed(node);
            if self.place.fails_over() && error.code() == "READONLY" {
                return Error::Unreachable(format!("the master has changed: {refused}"));
            }
        }
        refused
    }

    fn take_idle(&self, node: &Node) -> Option<Connection> {
        let mut idle = lock(&self.idle);
        idle.retain(|(_, connection, since)| !connection.has_ended() && since.elapsed() < IDLE);
        let index = idle.iter().rposition(|(of, ..)| of == node)?;
        Some(idle.remove(index).1)
    }

    fn keep_idle(self: &Arc<Self>, node: &Node, connection: Connection) {
        let mut idle = lock(&self.idle);
        let was_empty = idle.is_empty();
        idle.push((node.clone(), connection, Instant::now()));
        if idle.iter().filter(|(of, ..)| of == node).count() > MOST_IDLE
            && let Some(oldest) = idle.iter().position(|(of, ..)| of == node)
        {
            idle.remove(oldest);
        }
        if was_empty {
            let network = Arc::clone(self);
            tokio::spawn(async move {
                while !lock(&network.idle).is_empty() {
                    tokio::time::sleep(IDLE).await;
                    lock(&network.idle).retain(|(.., since)| since.elapsed() < IDLE);
                }
            });
        }
    }

    fn line(self: &Arc<Self>, node: &Node) -> Line {
        let mut shared = lock(&self.shared);
        if let Some(line) = shared.get(node) {
            if line.is_usable() {
                return line.clone();
            }
            self.suspect(node);
        }
        let (dial, state) = watch::channel(Dial::Ringing);
        let again = Arc::new(Notify::new());
        let line = Line {
            state,
            again: Arc::clone(&again),
        };
        shared.insert(node.clone(), line.clone());
        let (network, node) = (Arc::clone(self), node.clone());
        tokio::spawn(async move {
            dial.send_replace(match network.dial_until_one_succeeds(&node, &again).await {
                Ok(connection) => Dial::Connected(connection),
                Err(error) => Dial::Failed(error, Instant::now()),
            });
        });
        line
    }

    async fn dial_until_one_succeeds(
        self: &Arc<Self>,
        node: &Node,
        again: &Notify,
    ) -> Result<Connection, Error> {
        let mut dials = JoinSet::new();
        let dial = |dials: &mut JoinSet<_>| {
            let (network, node) = (Arc::clone(self), node.clone());
            dials.spawn(async move { network.dial_shared(&node).await });
        };
        dial(&mut dials);
        let mut error = no_answer();
        loop {
            tokio::select! {
                dialled = dials.join_next() => match dialled {
                    Some(Ok(Ok(connection))) => return Ok(connection),
                    Some(Ok(Err(failed))) => error = failed,
                    Some(Err(_)) => {}
                    None => return Err(error),
                },
                () = again.notified(), if dials.len() < MOST_DIALS => dial(&mut dials),
            }
        }
    }

    fn hang_up(&self, node: &Node, line: &Line, is_silent: bool) {
        let mut shared = lock(&self.shared);
        if shared
            .get(node)
            .is_some_and(|current| current.state.same_channel(&line.state))
        {
            shared.remove(node);
            self.suspect(node);
            if is_silent {
                lock(&self.health).entry(node.clone()).or_default().silent += 1;
            }
            self.place.failed(node);
        }
    }

    async fn dial_shared(&self, node: &Node) -> Result<Connection, Error> {
        let mut connection = self.dial(node, &self.label).await?;
        let _ = timeout(DIAL_TIMEOUT, self.place.learn(node, connection.redis())).await;
        Ok(connection)
    }

    async fn dial(&self, node: &Node, label: &str) -> Result<Connection, Error> {
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

    async fn connect(&self, node: &Node, label: &str) -> Result<Connection, Error> {
        let client = self.place.client(node).await?;
        let mut connection = place::connect(&client).await?;
        // For whoever looks at CLIENT LIST. Not awaited: a user who may not do this may still lock.
        let mut name = redis::cmd("CLIENT");
        name.arg("SETNAME")
            .arg(connection_name(label))
            .set_no_response(true);
        connection.send(&name).await?;
        Ok(connection)
    }
}

/// A connection on which somebody waits in the queue.
struct Waiting<'a> {
    unanswered: Unanswered,
    behind: &'a Mutex<Option<Cmd>>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.unanswered.behind = lock(self.behind).take();
    }
}

impl Unanswered {
    async fn query(&mut self, pipeline: &Pipeline, until: Instant) -> Result<Values, Failure> {
        let answer = within(until, pipeline.query(&mut self.connection)).await;
        if !matches!(&answer, Err(failure) if failure.is_silent) {
            self.behind = None;
        }
        answer
    }
}

/// The shared connection to a node, or the attempts to make one.
#[derive(Clone)]
struct Line {
    state: watch::Receiver<Dial>,
    /// Asks for another attempt beside those that are going on.
    again: Arc<Notify>,
}

enum Dial {
    Ringing,
    Connected(Connection),
    Failed(Error, Instant),
}

impl Line {
    fn is_usable(&self) -> bool {
        match &*self.state.borrow() {
            Dial::Ringing => true,
            Dial::Connected(connection) => !connection.has_ended(),
            Dial::Failed(_, at) => at.elapsed() < DIAL_PAUSE,
        }
    }

    async fn connection(&self) -> Result<Connection, Error> {
        let mut state = self.state.clone();
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

    async fn query(&self, connection: &mut Connection) -> Result<Values, RedisError> {
        let mut values = connection.send_all(&self.commands).await?;
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

async fn within<T, E: Into<Failure>>(
    until: Instant,
    future: impl Future<Output = Result<T, E>>,
) -> Result<T, Failure> {
    match timeout_at(until, future).await {
        Ok(result) => result.map_err(Into::into),
        Err(_) => Err(Failure {
            error: no_answer(),
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
