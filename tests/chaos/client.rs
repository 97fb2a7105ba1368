//! Raw clients: plain redis-rs, the commands as they are, and a way to the server of the moment.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::cluster::{ClusterClient, ClusterConnection};
use redis::{Cmd, Connection, ConnectionLike, ErrorKind, RedisError, Value};

/// What a server says to any of the three questions.
#[derive(Clone, Debug, PartialEq)]
pub enum Said {
    Fence(u64),
    Yes,
    No,
    Failed(String),
    /// Nothing, long after it should have.
    Silence,
}

pub trait Client: Send {
    /// Gives up after `patience`, and with it the connection.
    fn acquire(&mut self, wish: &Wish, patience: Duration) -> Said;
    fn renew(&mut self, wish: &Wish) -> Said;
    fn release(&mut self, wish: &Wish) -> Said;
}

pub struct Wish {
    pub key: String,
    pub owner: String,
    pub ttl: Duration,
    pub wait: Duration,
}

/// How long after the end of a wait silence counts as no answer.
pub const SILENCE: Duration = Duration::from_secs(10);

/// Where the master is.
#[derive(Clone)]
pub enum Place {
    /// Where the operator says, who may say otherwise.
    At(Arc<Mutex<String>>),
    /// At one of these; each knows of itself.
    Either(Vec<String>),
    /// Where these sentinels say.
    Sentinels(Vec<String>),
    Cluster(Vec<String>),
}

impl Place {
    pub fn at(url: String) -> Place {
        Place::At(Arc::new(Mutex::new(url)))
    }

    fn connect(&self) -> Result<Line, RedisError> {
        match self {
            Place::At(url) => {
                let url = url.lock().unwrap().clone();
                connect(&url).map(Line::One)
            }
            Place::Either(urls) => {
                let mut masters = urls.iter().rev().filter_map(|url| {
                    let mut redis = connect(url).ok()?;
                    let role: Vec<Value> = redis::cmd("ROLE").query(&mut redis).ok()?;
                    (role[0] == Value::BulkString(b"master".to_vec())).then_some(redis)
                });
                masters.next().map(Line::One).ok_or_else(nobody)
            }
            Place::Sentinels(hosts) => {
                let mut answers = hosts.iter().filter_map(|host| {
                    let mut sentinel = connect(&format!("redis://{host}/")).ok()?;
                    let mut ask = redis::cmd("SENTINEL");
                    ask.arg("GET-MASTER-ADDR-BY-NAME")
                        .arg(super::sentinels::MASTER);
                    ask.query::<(String, u16)>(&mut sentinel).ok()
                });
                let (host, port) = answers.next().ok_or_else(nobody)?;
                connect(&format!("redis://{host}:{port}/")).map(Line::One)
            }
            Place::Cluster(urls) => ClusterClient::builder(urls.clone())
                .retries(4)
                .connection_timeout(Duration::from_secs(1))
                .build()?
                .get_connection()
                .map(|cluster| Line::Cluster(Box::new(cluster))),
        }
    }
}

fn nobody() -> RedisError {
    (ErrorKind::Io, "nobody says that it is master").into()
}

fn connect(url: &str) -> Result<Connection, RedisError> {
    redis::Client::open(url)?.get_connection_with_timeout(Duration::from_secs(1))
}

enum Line {
    One(Connection),
    Cluster(Box<ClusterConnection>),
}

impl Line {
    fn ask(&mut self, command: &Cmd, patience: Duration) -> Result<Value, RedisError> {
        match self {
            Line::One(redis) => {
                redis.set_read_timeout(Some(patience))?;
                redis.req_command(command)
            }
            Line::Cluster(redis) => {
                redis.set_read_timeout(Some(patience))?;
                redis.req_command(command)
            }
        }
        .and_then(Value::extract_error)
    }
}

pub struct Raw {
    place: Place,
    line: Option<Line>,
}

impl Raw {
    pub fn at(place: Place) -> Raw {
        Raw { place, line: None }
    }

    pub fn ask(&mut self, command: &Cmd, patience: Duration) -> Result<Value, RedisError> {
        let mut line = match self.line.take() {
            Some(line) => line,
            None => self.place.connect()?,
        };
        let answer = line.ask(command, patience);
        if answer.is_ok() {
            self.line = Some(line);
        }
        answer
    }
}

pub fn command(name: &str, wish: &Wish) -> Cmd {
    let mut command = redis::cmd(name);
    command.arg(&wish.key).arg(&wish.owner);
    command
}

fn yes_or_no(answer: Result<Value, RedisError>) -> Said {
    match answer {
        Ok(Value::Int(1)) => Said::Yes,
        Ok(Value::Int(0) | Value::Nil) => Said::No,
        Ok(other) => panic!("no answer of ours: {other:?}"),
        Err(error) if error.is_timeout() => Said::Silence,
        Err(error) => Said::Failed(error.to_string()),
    }
}

impl Client for Raw {
    fn acquire(&mut self, wish: &Wish, patience: Duration) -> Said {
        let mut acquire = command("LOCK.ACQUIRE", wish);
        acquire.arg(wish.ttl.as_millis() as u64);
        if !wish.wait.is_zero() {
            acquire.arg("WAIT").arg(wish.wait.as_millis() as u64);
        }
        match self.ask(&acquire, patience) {
            Ok(Value::Int(fence)) => Said::Fence(fence.try_into().unwrap()),
            Ok(Value::Nil) => Said::No,
            Ok(other) => panic!("no answer of ours: {other:?}"),
            Err(error) if error.is_timeout() && patience > wish.wait => Said::Silence,
            Err(error) => Said::Failed(error.to_string()),
        }
    }

    fn renew(&mut self, wish: &Wish) -> Said {
        let mut renew = command("LOCK.RENEW", wish);
        yes_or_no(self.ask(renew.arg(wish.ttl.as_millis() as u64), SILENCE))
    }

    fn release(&mut self, wish: &Wish) -> Said {
        yes_or_no(self.ask(&command("LOCK.RELEASE", wish), SILENCE))
    }
}
