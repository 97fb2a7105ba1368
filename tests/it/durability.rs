//! What comes back after a restart is the lease as it was, owner, fence and absolute deadline, or
//! nothing; and no fence is older than one that was granted before.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use redis::{Connection, Pipeline, RedisError};
use testkit::waiting::{LONG, gauge, hold, join, owner};
use testkit::*;

const CLIENTS: usize = 8;
const TTL: i64 = 60_000;

/// The value of a key and when it ends; neither if it is not there.
type State = (Option<Vec<u8>>, i64);

const FREE: State = (None, -2);

fn state(redis: &mut Connection, key: &str) -> State {
    let mut query = redis::pipe();
    query.atomic().get(key).cmd("PEXPIRETIME").arg(key);
    query.query(redis).unwrap()
}

fn now_ms() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    now.as_millis().try_into().unwrap()
}

/// What the only client of a key got replies about, and what it asked for last without a reply.
#[derive(Default)]
struct Confirmed {
    states: Vec<State>,
    newest_fence: i64,
    in_flight: Option<InFlight>,
}

struct InFlight {
    owner: String,
    asked_ms: i64,
    releases: bool,
}

struct Load {
    confirmed: Vec<Mutex<Confirmed>>,
    answers: AtomicUsize,
    stop: AtomicBool,
}

impl Load {
    fn new() -> Load {
        Load {
            confirmed: (0..CLIENTS).map(|_| Mutex::default()).collect(),
            answers: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
        }
    }

    /// Acquires, renews and releases one key until the server is gone.
    fn client(&self, server: &str, number: usize, round: usize) -> Result<(), RedisError> {
        let key = key(number);
        let mut redis = redis::Client::open(server)?.get_connection()?;
        for turn in 0.. {
            let owner = format!("{number}:{round}:{turn}");
            for (command, ttl) in [
                ("LOCK.ACQUIRE", Some(TTL)),
                ("LOCK.RENEW", Some(TTL + turn % 1000)),
                ("LOCK.RELEASE", None),
            ] {
                if self.stop.load(Ordering::Relaxed) {
                    return Ok(());
                }
                let mut confirmed = self.confirmed[number].lock().unwrap();
                confirmed.in_flight = Some(InFlight {
                    owner: owner.clone(),
                    asked_ms: now_ms(),
                    releases: ttl.is_none(),
                });
                let mut ask = Pipeline::new();
                ask.atomic().cmd(command).arg(&key).arg(&owner).arg(ttl);
                ask.get(&key).cmd("PEXPIRETIME").arg(&key);
                let (answer, value, end): (i64, Option<Vec<u8>>, i64) = ask.query(&mut redis)?;
                if command == "LOCK.ACQUIRE" {
                    assert!(answer > confirmed.newest_fence);
                    confirmed.newest_fence = answer;
                }
                confirmed.states.push((value, end));
                confirmed.in_flight = None;
                self.answers.fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(())
    }
}

fn key(number: usize) -> String {
    format!("k{number}")
}

/// Runs the load, kills the server in the midst of it after `disturb`, starts it again, and judges
/// what came back. With `all`, nothing that was confirmed may be missing.
fn kill_under_load(settings: &[&str], all: bool, disturb: impl Fn(&mut Connection)) {
    let mut server = Server::with(settings);
    let mut newest_fence = 0;
    for round in 0..3 {
        let load = Load::new();
        let url = server.url();
        thread::scope(|threads| {
            for number in 0..CLIENTS {
                let (load, url) = (&load, &url);
                // It ends with an error, when the server is killed.
                threads.spawn(move || load.client(url, number, round));
            }
            let answered = |more: usize| {
                let before = load.answers.load(Ordering::Relaxed);
                eventually("the load goes on", || {
                    load.answers.load(Ordering::Relaxed) >= before + more
                });
            };
            answered(300);
            disturb(&mut server.connect());
            answered(300);
            server.kill9();
            load.stop.store(true, Ordering::Relaxed);
        });
        let killed_ms = now_ms();
        server.start_again();

        let mut redis = server.connect();
        for number in 0..CLIENTS {
            let confirmed = load.confirmed[number].lock().unwrap();
            let back = state(&mut redis, &key(number));
            judge(&confirmed, &back, all, killed_ms);
            newest_fence = newest_fence.max(confirmed.newest_fence);
        }
        assert_eq!(ask!(redis, "FLUSHALL"), OK);
        let next = fence(ask!(redis, "LOCK.ACQUIRE", "k0", "next", TTL));
        assert!(next > newest_fence, "{next} after {newest_fence}");
        assert_eq!(ask!(redis, "LOCK.RELEASE", "k0", "next"), YES);
    }
}

#[track_caller]
fn judge(confirmed: &Confirmed, back: &State, all: bool, killed_ms: i64) {
    let as_confirmed = match all {
        true => confirmed.states.last().unwrap_or(&FREE) == back,
        false => *back == FREE || confirmed.states.contains(back),
    };
    if as_confirmed {
        return;
    }
    // Else it is the effect of what was asked for last.
    let in_flight = confirmed
        .in_flight
        .as_ref()
        .expect("something else was confirmed");
    let (Some(value), end) = back else {
        assert!(in_flight.releases, "a lock has gone");
        return;
    };
    assert!(value.ends_with(in_flight.owner.as_bytes()), "{back:?}");
    let fence: i64 = std::str::from_utf8(&value[..16]).unwrap().parse().unwrap();
    assert!(fence >= confirmed.newest_fence, "an older fence: {back:?}");
    let ttls = in_flight.asked_ms + TTL..=killed_ms + TTL + 1000;
    assert!(ttls.contains(end), "a fresh ttl: {back:?}");
}

#[test]
fn with_fsync_always_a_kill_under_load_loses_nothing() {
    kill_under_load(
        &["--appendonly", "yes", "--appendfsync", "always"],
        true,
        |_| {},
    );
}

#[test]
fn with_fsync_every_second_what_comes_back_after_a_kill_is_as_it_was() {
    kill_under_load(
        &["--appendonly", "yes", "--appendfsync", "everysec"],
        false,
        |_| {},
    );
}

#[test]
fn with_snapshots_only_what_comes_back_after_a_kill_is_as_it_was() {
    kill_under_load(&[], false, |redis| {
        ask!(redis, "BGSAVE").unwrap();
        eventually("the snapshot is there", || {
            info::<i64>(redis, "persistence", "rdb_bgsave_in_progress") == 0
        });
    });
}

#[test]
fn a_rewrite_of_the_append_only_file_under_load_loses_nothing() {
    for wait in [true, false] {
        kill_under_load(
            &["--appendonly", "yes", "--appendfsync", "always"],
            true,
            |redis| {
                ask!(redis, "BGREWRITEAOF").unwrap();
                eventually("the file is rewritten", || {
                    !wait || info::<i64>(redis, "persistence", "aof_rewrite_in_progress") == 0
                });
            },
        );
    }
}

#[test]
fn a_lease_that_ends_while_the_server_is_down_does_not_come_back() {
    for setting in [["--appendonly", "yes"], ["--appendonly", "no"]] {
        let mut server = Server::with(&setting);
        let mut redis = server.connect();
        let before = fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", 300));
        let end = number(ask!(redis, "PEXPIRETIME", "k"));
        assert_eq!(ask!(redis, "SAVE"), OK);
        server.kill9();
        eventually("the lease has ended", || now_ms() > end);

        server.start_again();

        let mut redis = server.connect();
        assert_eq!(ask!(redis, "LOCK.INFO", "k"), NULL);
        assert_eq!(ask!(redis, "LOCK.RENEW", "k", "alice", TTL), NULL);
        assert!(fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", TTL)) > before);
    }
}

#[test]
fn who_waited_at_a_server_that_was_killed_is_disconnected_at_once_and_in_no_queue_after() {
    let mut server = Server::with(&["--appendonly", "yes", "--appendfsync", "always"]);
    hold(&mut server.connect(), "k");
    let mut waiters = ["a", "b"].map(|owner| join(&server, "k", owner));

    server.kill9();

    for waiter in &mut waiters {
        assert!(waiter.is_closed());
    }
    server.start_again();
    let mut redis = server.connect();
    assert_eq!(gauge(&mut redis, "waiters"), 0);
    assert_eq!(owner(&mut redis, "k").as_deref(), Some("holder"));
    let mut again = join(&server, "k", "a");
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "holder"), YES);
    fence(again.reply());
}

/// Locks of every kind, by key.
fn various_locks(redis: &mut Connection) -> HashMap<&'static str, State> {
    fence(ask!(redis, "LOCK.ACQUIRE", "held", "alice", TTL));
    fence(ask!(redis, "LOCK.ACQUIRE", "renewed", "bob", TTL));
    assert_eq!(ask!(redis, "LOCK.RENEW", "renewed", "bob", 2 * TTL), YES);
    fence(ask!(redis, "LOCK.ACQUIRE", "binary", b"\0\xff\r\n", LONG));
    assert_eq!(ask!(redis, "SET", "by hand", "token", "PX", TTL), OK);
    fence(ask!(redis, "LOCK.ACQUIRE", "persisted", "carol", TTL));
    assert_eq!(ask!(redis, "PERSIST", "persisted"), YES);
    fence(ask!(redis, "LOCK.ACQUIRE", "released", "dave", TTL));
    assert_eq!(ask!(redis, "LOCK.RELEASE", "released", "dave"), YES);
    KEYS.map(|key| (key, state(redis, key))).into()
}

const KEYS: [&str; 6] = [
    "held",
    "renewed",
    "binary",
    "by hand",
    "persisted",
    "released",
];

#[track_caller]
fn assert_the_same(redis: &mut Connection, locks: &HashMap<&str, State>, when: &str) {
    for (key, lock) in locks {
        assert_eq!(state(redis, key), *lock, "{key} {when}");
    }
}

#[test]
fn a_reload_and_a_rewrite_leave_every_lease_as_it_was() {
    let server = Server::with(&["--appendonly", "yes"]);
    let mut redis = server.connect();
    let locks = various_locks(&mut redis);
    for operation in [
        &["DEBUG", "RELOAD"][..],
        &["BGREWRITEAOF"],
        &["DEBUG", "LOADAOF"],
    ] {
        ask!(redis, operation).unwrap();
        eventually("the file is rewritten", || {
            info::<i64>(&mut redis, "persistence", "aof_rewrite_in_progress") == 0
                && info::<i64>(&mut redis, "persistence", "aof_rewrite_scheduled") == 0
        });
        assert_the_same(&mut redis, &locks, &format!("after {operation:?}"));
    }
    assert_eq!(ask!(redis, "LOCK.RENEW", "held", "alice", TTL), YES);
    assert_eq!(ask!(redis, "LOCK.ACQUIRE", "held", "bob", TTL), NULL);
}

fn eventually_follows(replica: &mut Connection, master: &Server) {
    assert_eq!(ask!(replica, "REPLICAOF", "127.0.0.1", master.port()), OK);
    eventually("the replica is in sync", || {
        info::<String>(replica, "replication", "master_link_status") == "up"
    });
}

#[test]
fn a_full_resync_by_disk_or_without_gives_the_replica_every_lease_and_no_other() {
    for (sync, load) in [
        ("no", "disabled"),
        ("yes", "disabled"),
        ("yes", "swapdb"),
        ("yes", "on-empty-db"),
    ] {
        let master = Server::with(&["--repl-diskless-sync", sync]);
        let locks = various_locks(&mut master.connect());
        // It was a master of its own, where others held these locks.
        let replica = Server::with(&["--repl-diskless-load", load]);
        let mut redis = replica.connect();
        let mut newest = 0;
        for key in ["held", "released", "its own"] {
            newest = fence(ask!(redis, "LOCK.ACQUIRE", key, "mallory", TTL));
        }

        eventually_follows(&mut redis, &master);

        let how = format!("with diskless sync {sync}, load {load}");
        assert_the_same(&mut redis, &locks, &how);
        assert_eq!(ask!(redis, "EXISTS", "its own"), NO, "{how}");
        assert_eq!(ask!(redis, "REPLICAOF", "NO", "ONE"), OK);
        assert_eq!(ask!(redis, "LOCK.RENEW", "held", "mallory", TTL), NO);
        assert_eq!(ask!(redis, "LOCK.RENEW", "held", "alice", TTL), YES);
        let next = fence(ask!(redis, "LOCK.ACQUIRE", "released", "erin", TTL));
        assert!(next > newest, "{how}");
    }
}

#[test]
fn a_replica_without_the_module_keeps_the_leases_and_gives_them_back() {
    let master = Server::start();
    let mut on_master = master.connect();
    let bare = Setup::new().without_module().start();
    let mut on_bare = bare.connect();
    eventually_follows(&mut on_bare, &master);
    // Over the stream, not in the snapshot.
    let locks = various_locks(&mut on_master);
    assert_eq!(ask!(on_master, "WAIT", 1, 30_000), YES);
    assert_the_same(&mut on_bare, &locks, "on a replica without the module");

    assert_eq!(ask!(on_bare, "REPLICAOF", "NO", "ONE"), OK);
    let by_hand = ask!(on_bare, "SET", "held", "mallory", "NX", "PX", TTL);
    assert_eq!(by_hand, NULL, "still held");

    // And back to a server with the module.
    let newest = fence(ask!(on_master, "LOCK.ACQUIRE", "released", "frank", TTL));
    eventually_follows(&mut on_master, &bare);
    assert_the_same(&mut on_master, &locks, "back from it");
    assert_eq!(ask!(on_master, "REPLICAOF", "NO", "ONE"), OK);
    assert_eq!(ask!(on_master, "LOCK.RENEW", "held", "alice", TTL), YES);
    assert!(fence(ask!(on_master, "LOCK.ACQUIRE", "released", "gina", TTL)) > newest);
}
