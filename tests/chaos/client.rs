//! Raw clients: plain redis-rs, the commands as they are, and a way to the current master.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::cluster::{ClusterClient, ClusterConnection};
use redis::{Cmd, Connection, ConnectionLike, ErrorKind, RedisError, Value};

use super::run::SHARED;

/// What became of a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    Fence(u64),
    Yes,
    No,
    Failed(String),
    /// No reply, long after one was due.
    Silence,
}

pub trait Client: Send {
    /// Gives up after `patience`, and with it the connection.
    fn acquire(&mut self, request: &Request, patience: Duration) -> Outcome;
    fn renew(&mut self, request: &Request) -> Outcome;
    fn release(&mut self, request: &Request) -> Outcome;
}

#[derive(Clone)]
pub struct Request {
    pub key: String,
    pub owner: String,
    pub ttl: Duration,
    pub wait: Duration,
    pub limit: u16,
}

/// How long after the end of a wait silence counts as no reply.
pub const SILENCE: Duration = Duration::from_secs(10);

/// Where the master is.
#[derive(Clone)]
pub enum Endpoint {
    /// Where the operator points to, who may change that.
    At(Arc<Mutex<String>>),
    /// At one of these: the one whose ROLE is master.
    Either(Vec<String>),
    /// Where these sentinels point to.
    Sentinels(Vec<String>),
    Cluster(Vec<String>),
}

impl Endpoint {
    pub fn at(url: String) -> Endpoint {
        Endpoint::At(Arc::new(Mutex::new(url)))
    }

    fn connect(&self) -> Result<AnyConnection, RedisError> {
        match self {
            Endpoint::At(url) => {
                let url = url.lock().unwrap().clone();
                connect(&url).map(AnyConnection::One)
            }
            Endpoint::Either(urls) => {
                let mut masters = urls.iter().rev().filter_map(|url| {
                    let mut redis = connect(url).ok()?;
                    let role: Vec<Value> = redis::cmd("ROLE").query(&mut redis).ok()?;
                    (role[0] == Value::BulkString(b"master".to_vec())).then_some(redis)
                });
                masters.next().map(AnyConnection::One).ok_or_else(nobody)
            }
            Endpoint::Sentinels(hosts) => {
                let mut answers = hosts.iter().filter_map(|host| {
                    let mut sentinel = connect(&format!("redis://{host}/")).ok()?;
                    let mut ask = redis::cmd("SENTINEL");
                    ask.arg("GET-MASTER-ADDR-BY-NAME")
                        .arg(testkit::sentinels::MASTER);
                    ask.query::<(String, u16)>(&mut sentinel).ok()
                });
                let (host, port) = answers.next().ok_or_else(nobody)?;
                connect(&format!("redis://{host}:{port}/")).map(AnyConnection::One)
            }
            Endpoint::Cluster(urls) => ClusterClient::builder(urls.clone())
                .retries(4)
                .connection_timeout(Duration::from_secs(1))
                .build()?
                .get_connection()
                .map(|cluster| AnyConnection::Cluster(Box::new(cluster))),
        }
    }
}

fn nobody() -> RedisError {
    (ErrorKind::Io, "none of these is a master").into()
}

fn connect(url: &str) -> Result<Connection, RedisError> {
    redis::Client::open(url)?.get_connection_with_timeout(Duration::from_secs(1))
}

enum AnyConnection {
    One(Connection),
    Cluster(Box<ClusterConnection>),
}

impl AnyConnection {
    fn ask(&mut self, command: &Cmd, patience: Duration) -> Result<Value, RedisError> {
        match self {
            AnyConnection::One(redis) => {
                redis.set_read_timeout(Some(patience))?;
                redis.req_command(command)
            }
            AnyConnection::Cluster(redis) => {
                redis.set_read_timeout(Some(patience))?;
                redis.req_command(command)
            }
        }
        .and_then(Value::extract_error)
    }
}

pub struct Raw {
    endpoint: Endpoint,
    connection: Option<AnyConnection>,
}

impl Raw {
    pub fn at(endpoint: Endpoint) -> Raw {
        Raw {
            endpoint,
            connection: None,
        }
    }

    pub fn ask(&mut self, command: &Cmd, patience: Duration) -> Result<Value, RedisError> {
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            // Who cannot connect has asked nothing, however long that took: no time-out.
            None => self.endpoint.connect().map_err(|error| {
                RedisError::from((ErrorKind::Io, "cannot connect", error.to_string()))
            })?,
        };
        let answer = connection.ask(command, patience);
        if answer.is_ok() {
            self.connection = Some(connection);
        }
        answer
    }
}

pub fn command(name: &str, request: &Request) -> Cmd {
    let mut command = redis::cmd(name);
    command.arg(&request.key).arg(&request.owner);
    command
}

fn yes_or_no(answer: Result<Value, RedisError>) -> Outcome {
    match answer {
        Ok(Value::Int(1)) => Outcome::Yes,
        Ok(Value::Int(0) | Value::Nil) => Outcome::No,
        Ok(other) => panic!("not a reply of ours: {other:?}"),
        Err(error) if error.is_timeout() => Outcome::Silence,
        Err(error) => Outcome::Failed(error.to_string()),
    }
}

impl Client for Raw {
    fn acquire(&mut self, request: &Request, patience: Duration) -> Outcome {
        let mut acquire = command("LOCK.ACQUIRE", request);
        acquire.arg(request.ttl.as_millis() as u64);
        if !request.wait.is_zero() {
            acquire.arg("WAIT").arg(request.wait.as_millis() as u64);
        }
        match request.limit {
            1 => {}
            SHARED => drop(acquire.arg("SHARED")),
            limit => drop(acquire.arg("LIMIT").arg(limit)),
        }
        match self.ask(&acquire, patience) {
            Ok(Value::Int(fence)) => Outcome::Fence(fence.try_into().unwrap()),
            Ok(Value::Nil) => Outcome::No,
            Ok(other) => panic!("not a reply of ours: {other:?}"),
            Err(error) if error.is_timeout() && patience >= request.wait + SILENCE => {
                Outcome::Silence
            }
            Err(error) => Outcome::Failed(error.to_string()),
        }
    }

    fn renew(&mut self, request: &Request) -> Outcome {
        let mut renew = command("LOCK.RENEW", request);
        yes_or_no(self.ask(renew.arg(request.ttl.as_millis() as u64), SILENCE))
    }

    fn release(&mut self, request: &Request) -> Outcome {
        yes_or_no(self.ask(&command("LOCK.RELEASE", request), SILENCE))
    }
}
