//! No single command holds up the server: the slowest of each kind, with 1,000 clients waiting for one
//! lock and with 1,000 waiting for a lock each.

use std::time::Duration;

use redis::{Connection, pipe};
use testkit::waiting::*;
use testkit::*;

/// As many as may wait, by default.
const WAITERS: usize = 1_000;

const MAX_WAITERS: &str = "lockkeeper.max-waiters";

/// Half a millisecond for each who waits: far more than any command needs, and than a busy machine adds. How
/// long a server stalls at most is measured in benches/suite/crowd.rs.
const BOUND: Duration = Duration::from_millis(500);

fn settings(redis: &mut Connection) {
    for (name, value) in [
        ("slowlog-log-slower-than", "0"),
        ("slowlog-max-len", "100000"),
        // All for one key as well.
        ("lockkeeper.max-waiters-per-key", "1000"),
    ] {
        assert_eq!(ask!(redis, "CONFIG", "SET", name, value), OK);
    }
}

/// How long the server took for the slowest of the commands with this name since the last time.
fn slowest(redis: &mut Connection, name: &str) -> Duration {
    let log: Vec<Vec<Value>> = redis::cmd("SLOWLOG")
        .arg("GET")
        .arg(-1)
        .query(redis)
        .unwrap();
    let took = log.iter().filter_map(|entry| {
        let args: Vec<Vec<u8>> = redis::from_redis_value(entry[3].clone()).unwrap();
        let took: u64 = redis::from_redis_value(entry[2].clone()).unwrap();
        args[0]
            .eq_ignore_ascii_case(name.as_bytes())
            .then_some(took)
    });
    let slowest = took
        .max()
        .unwrap_or_else(|| panic!("no {name} in {} commands", log.len()));
    assert_eq!(ask!(redis, "SLOWLOG", "RESET"), OK);
    Duration::from_micros(slowest)
}

/// All ask for these locks in turn, which "holder" has, and are in the queue when this returns.
fn ask_all(redis: &mut Connection, waiters: &mut [Waiter], keys: usize) {
    let mut holds = pipe();
    for key in 0..keys {
        let hold = holds.cmd("LOCK.ACQUIRE").arg(key).arg("holder");
        hold.arg(LONG).ignore();
    }
    holds.exec(redis).unwrap();
    for (n, waiter) in waiters.iter_mut().enumerate() {
        waiter.ask(&(n % keys).to_string(), &format!("w{n}"), LONG, LONG);
    }
    eventually_wait(redis, waiters.len() as i64);
}

/// Nobody waits and nobody holds anything.
fn start_again(redis: &mut Connection) {
    assert_eq!(ask!(redis, "CONFIG", "SET", MAX_WAITERS, 0), OK);
    assert_eq!(ask!(redis, "FLUSHALL"), OK);
    assert_eq!(ask!(redis, "CONFIG", "SET", MAX_WAITERS, WAITERS), OK);
}

/// What was measured: for how many keys they waited, how long it took, what it was.
#[derive(Default)]
struct Table(Vec<(usize, Duration, &'static str)>);

impl Table {
    /// The slowest of the commands `name` that were asked since the last time.
    fn note(&mut self, redis: &mut Connection, keys: usize, what: &'static str, name: &str) {
        self.0.push((keys, slowest(redis, name), what));
    }
}

/// Runs each command, or kind of it, with all waiting for one key and with each waiting for its own.
fn slowest_of_each_kind() -> Table {
    let server = Server::with(&["--maxclients", "5000"]);
    let mut redis = server.connect();
    settings(&mut redis);
    let mut table = Table::default();
    for keys in [1, WAITERS] {
        let mut waiters: Vec<Waiter> = (0..WAITERS).map(|_| Waiter::of(&server)).collect();
        ask_all(&mut redis, &mut waiters, keys);
        let first = "0".to_owned();
        let last = (keys - 1).to_string();
        let mut note =
            |redis: &mut Connection, what, name: &str| table.note(redis, keys, what, name);
        note(&mut redis, "ACQUIRE WAIT, joining", "lock.acquire");

        ask!(redis, "LOCK.ACQUIRE", &last, "stranger", LONG).unwrap();
        note(&mut redis, "ACQUIRE, refused", "lock.acquire");
        error(ask!(
            redis,
            "LOCK.ACQUIRE",
            &last,
            "stranger",
            LONG,
            "WAIT",
            LONG
        ));
        note(&mut redis, "ACQUIRE WAIT, queue full", "lock.acquire");
        fence(ask!(redis, "LOCK.ACQUIRE", &last, "holder", LONG));
        note(&mut redis, "ACQUIRE by the holder", "lock.acquire");
        assert_eq!(ask!(redis, "LOCK.RENEW", &last, "holder", LONG), YES);
        note(&mut redis, "RENEW", "lock.renew");
        ask!(redis, "LOCK.INFO", &last).unwrap();
        note(&mut redis, "LOCK.INFO", "lock.info");
        assert_eq!(ask!(redis, "LOCK.RELEASE", &last, "w999"), NO);
        note(&mut redis, "RELEASE, leaving", "lock.release");
        assert_eq!(waiters.pop().unwrap().reply(), NULL);
        assert_eq!(ask!(redis, "LOCK.RELEASE", &first, "holder"), YES);
        note(&mut redis, "RELEASE, handing over", "lock.release");
        fence(waiters.remove(0).reply());
        ask!(redis, "INFO", "lockkeeper").unwrap();
        note(&mut redis, "INFO lockkeeper", "info");

        assert_eq!(ask!(redis, "CONFIG", "SET", MAX_WAITERS, 0), OK);
        note(&mut redis, "CONFIG SET max-waiters 0", "config");
        for waiter in &mut waiters {
            assert_eq!(waiter.reply(), NULL);
        }
        start_again(&mut redis);

        let served = keys.min(waiters.len());
        ask_all(&mut redis, &mut waiters, keys);
        assert_eq!(ask!(redis, "SLOWLOG", "RESET"), OK);
        assert_eq!(ask!(redis, "FLUSHALL"), OK);
        note(&mut redis, "FLUSHALL", "flushall");
        eventually_wait(&mut redis, (waiters.len() - served) as i64);
        note(&mut redis, "INFO, while each queue is served", "info");
        start_again(&mut redis);
        for waiter in &mut waiters {
            waiter.reply().unwrap();
        }

        ask_all(&mut redis, &mut waiters, keys);
        assert_eq!(ask!(redis, "SLOWLOG", "RESET"), OK);
        ask!(redis, "CLIENT", "KILL", "TYPE", "normal").unwrap();
        note(&mut redis, "CLIENT KILL of all who wait", "client");
        eventually_wait(&mut redis, 0);
        start_again(&mut redis);
    }
    table
}

#[test]
fn no_command_holds_up_the_server_while_a_thousand_wait() {
    let mut table = slowest_of_each_kind();
    // What is slow because the machine is busy is not so in every run.
    for _ in 0..4 {
        if table.0.iter().all(|(_, took, _)| *took < BOUND) {
            break;
        }
        for ((_, took, _), (_, again, _)) in table.0.iter_mut().zip(slowest_of_each_kind().0) {
            *took = again.min(*took);
        }
    }
    println!("keys   slowest  command, with {WAITERS} waiting");
    for (keys, took, what) in &table.0 {
        println!("{keys:5} {:6} µs  {what}", took.as_micros());
    }
    for (keys, took, what) in &table.0 {
        assert!(took < &BOUND, "{what} took {took:?} with {keys} keys");
    }
}
