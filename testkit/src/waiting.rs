//! Clients that wait for a lock, and what the server shows of them.

use std::time::Duration;

use redis::{Cmd, Connection, Pipeline, from_redis_value};

use super::{Reply, Server, Setup, Value, ask, eventually, info, reply};

/// A ttl or timeout that no test lives to see the end of.
pub const LONG: i64 = 3_600_000;

/// A client whose commands are sent without waiting for the answer.
pub struct Waiter {
    redis: Connection,
    pub id: i64,
}

impl Waiter {
    pub fn of(server: &Server) -> Waiter {
        Waiter::on(server.connect())
    }

    pub fn on(mut redis: Connection) -> Waiter {
        let id = super::number(ask!(redis, "CLIENT", "ID"));
        Waiter { redis, id }
    }

    pub fn send(&mut self, command: &Cmd) {
        self.redis
            .send_packed_command(&command.get_packed_command())
            .unwrap();
    }

    /// Sends all in one write, so that the server reads and carries them out together.
    pub fn send_all(&mut self, pipeline: &Pipeline) {
        self.redis
            .send_packed_command(&pipeline.get_packed_pipeline())
            .unwrap();
    }

    /// Sends LOCK.ACQUIRE … WAIT, which may not have arrived when this returns.
    pub fn ask(&mut self, key: &str, owner: &str, ttl: i64, wait: i64) {
        let mut acquire = redis::cmd("LOCK.ACQUIRE");
        self.send(acquire.arg(key).arg(owner).arg(ttl).arg("WAIT").arg(wait));
    }

    /// The answer to the next command that was sent; fails the test when none comes.
    #[track_caller]
    pub fn reply(&mut self) -> Reply {
        reply(self.redis.recv_response())
    }

    /// Fails unless all that was sent has been answered and the connection works.
    #[track_caller]
    pub fn assert_no_more_replies(&mut self) {
        assert_eq!(
            ask!(self.redis, "ECHO", "the next"),
            Ok(Value::BulkString(b"the next".to_vec()))
        );
    }

    /// Whether the server closes the connection without another reply.
    pub fn is_closed(&mut self) -> bool {
        let end = self.redis.recv_response();
        end.is_err_and(|error| error.is_connection_dropped())
    }
}

/// A client that is in the queue of `key` when this returns.
#[track_caller]
pub fn join(server: &Server, key: &str, owner: &str) -> Waiter {
    let mut waiter = Waiter::of(server);
    waiter.ask(key, owner, LONG, LONG);
    let mut redis = server.connect();
    eventually(format!("{owner} is in the queue"), || {
        queue(&mut redis, key).iter().any(|name| name == owner)
    });
    waiter
}

/// A client that sent this LOCK.ACQUIRE with a WAIT, and that is the last in the queue when this returns.
#[track_caller]
pub fn join_by(server: &Server, acquire: &str) -> Waiter {
    let [_, key, owner, ..] = acquire.split(' ').collect::<Vec<_>>()[..] else {
        panic!("no LOCK.ACQUIRE: {acquire}");
    };
    let mut waiter = Waiter::of(server);
    waiter.send(&words(acquire));
    let mut redis = server.connect();
    eventually(format!("{owner} is in the queue"), || {
        queue(&mut redis, key)
            .last()
            .is_some_and(|name| name == owner)
    });
    waiter
}

/// So many clients that wait for `key`, in this order, as the owners "0", "1" and so on. Nobody waits before them.
#[track_caller]
pub fn join_many(server: &Server, key: &str, count: i64) -> Vec<Waiter> {
    join_many_by(server, count, |n| {
        format!("LOCK.ACQUIRE {key} {n} {LONG} WAIT {LONG}")
    })
}

/// The same by a LOCK.ACQUIRE for each of them.
#[track_caller]
pub fn join_many_by(server: &Server, count: i64, acquire: impl Fn(i64) -> String) -> Vec<Waiter> {
    let mut redis = server.connect();
    let join = |n: i64| {
        let mut waiter = Waiter::of(server);
        waiter.send(&words(&acquire(n)));
        eventually_wait(&mut redis, n + 1);
        waiter
    };
    (0..count).map(join).collect()
}

/// A lock held by "holder", for as long as the test likes; its fence.
#[track_caller]
pub fn hold(redis: &mut Connection, key: &str) -> i64 {
    super::fence(ask!(redis, "LOCK.ACQUIRE", key, "holder", LONG))
}

/// The reply to a command that is written as in redis-cli.
pub fn run(redis: &mut Connection, command: &str) -> Reply {
    reply(words(command).query(redis))
}

/// The fence that a LOCK.ACQUIRE is granted.
#[track_caller]
pub fn granted(redis: &mut Connection, command: &str) -> i64 {
    super::fence(run(redis, command))
}

/// A lock held by two with `LIMIT 2`, each as long as the test likes.
#[track_caller]
pub fn hold_by_two(redis: &mut Connection, key: &str, owners: [&str; 2]) {
    for owner in owners {
        granted(redis, &format!("LOCK.ACQUIRE {key} {owner} {LONG} LIMIT 2"));
    }
}

/// "DEL k" as a command.
pub fn words(command: &str) -> Cmd {
    let (name, arguments) = command.split_once(' ').unwrap_or((command, ""));
    let mut command = redis::cmd(name);
    for argument in arguments.split_terminator(' ') {
        command.arg(argument);
    }
    command
}

/// "DEL k; SET k thief" as two commands that the server reads and carries out together.
pub fn pipeline(commands: &str) -> Pipeline {
    let mut pipeline = redis::pipe();
    for command in commands.split("; ") {
        pipeline.add_command(words(command)).ignore();
    }
    pipeline
}

/// One field of LOCK.INFO; nil if nobody holds the lock and nobody waits.
pub fn lock_info(redis: &mut Connection, key: &str, field: &str) -> Value {
    let Value::Array(fields) = ask!(redis, "LOCK.INFO", key).unwrap() else {
        return Value::Nil;
    };
    let name = Value::BulkString(field.as_bytes().to_vec());
    let at = fields.iter().position(|field| *field == name).unwrap();
    fields[at + 1].clone()
}

/// The owners in the queue of a key, the first 100.
pub fn queue(redis: &mut Connection, key: &str) -> Vec<String> {
    let queue: Vec<Vec<Value>> = match lock_info(redis, key, "queue") {
        Value::Nil => return vec![],
        queue => from_redis_value(queue).unwrap(),
    };
    queue
        .into_iter()
        .map(|waiter| from_redis_value(waiter[1].clone()).unwrap())
        .collect()
}

/// Those who hold a lock together, in the order of their grants, the first 100. None if it has no list.
pub fn holders(redis: &mut Connection, key: &str) -> Vec<String> {
    let Ok(Value::Array(fields)) = ask!(redis, "LOCK.INFO", key) else {
        return vec![];
    };
    let Some(Value::Array(holders)) = fields.get(17) else {
        return vec![];
    };
    let owner = |holder: &Value| {
        let fields: Vec<Value> = from_redis_value(holder.clone()).unwrap();
        from_redis_value(fields[1].clone()).unwrap()
    };
    holders.iter().map(owner).collect()
}

/// Sets how many may wait; 0 ends all waits.
#[track_caller]
pub fn set_max_waiters(redis: &mut Connection, number: i64) {
    let set = ask!(redis, "CONFIG", "SET", "lockkeeper.max-waiters", number);
    assert_eq!(set, super::OK);
}

/// How many wait for a key.
pub fn waiters(redis: &mut Connection, key: &str) -> i64 {
    from_redis_value(lock_info(redis, key, "waiters")).unwrap_or(0)
}

/// Who holds a lock.
pub fn owner(redis: &mut Connection, key: &str) -> Option<String> {
    from_redis_value(lock_info(redis, key, "owner")).unwrap()
}

/// A number of `INFO lockkeeper`.
pub fn gauge(redis: &mut Connection, field: &str) -> i64 {
    info(redis, "lockkeeper", &format!("lockkeeper_{field}"))
}

#[track_caller]
pub fn eventually_wait(redis: &mut Connection, number: i64) {
    eventually(format!("{number} wait"), || {
        gauge(redis, "waiters") == number
    });
}

/// Whether CLIENT UNBLOCK works on those who wait: on 7.2 it would crash the server.
pub fn may_be_unblocked(redis: &mut Connection) -> bool {
    let about: String = redis::cmd("INFO").arg("server").query(redis).unwrap();
    about.contains("valkey_version:") || !about.contains("redis_version:7.2.")
}

/// How often the cron of [`with_a_slow_cron`] runs.
const CRON: Duration = Duration::from_secs(1);

/// A server whose cron, in which the module serves whoever no wake-up has reached, runs once a second only.
pub fn with_a_slow_cron() -> Setup {
    Setup::new().args(&["--hz", "1", "--dynamic-hz", "no"])
}

/// Fails when what `round` waits for, and how long that took, is left to the cron of a server
/// [`with_a_slow_cron`]. How soon it comes is measured in benches/suite/lateness.rs.
#[track_caller]
pub fn assert_woken(what: &str, mut round: impl FnMut() -> Duration) {
    // The first may end just before the cron runs. If it is the cron that ends it, each of the others takes
    // a second; one that does not is proof, so a busy machine gets more than one.
    round();
    let mut rounds = Vec::new();
    while rounds.len() < 5 {
        rounds.push(round());
        if rounds.last() < Some(&(CRON / 2)) {
            return;
        }
    }
    panic!("{what}: {rounds:?}, as if nothing but the cron had come");
}
