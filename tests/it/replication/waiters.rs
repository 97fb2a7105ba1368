//! What leaves the master while clients wait, and what becomes of those who wait when the server is
//! demoted, paused, reloaded, or may not write.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::thread;
use std::time::Instant;

use fastrand::Rng;
use redis::{Connection, ConnectionLike as _};
use testkit::waiting::*;
use testkit::*;

const CLIENTS: u64 = 20;
const KEYS: u64 = 6;
const DBS: u64 = 2;

/// Leases of this or less end before a round is compared, so that nothing expires meanwhile.
const SHORTEST_LASTING_TTL: i64 = 1_000_000;

/// What all clients share.
struct Everybody<'t> {
    master: &'t Server,
    /// By number of the client.
    ids: [AtomicI64; CLIENTS as usize],
    /// What DUMP gave for a string.
    dump: Vec<u8>,
}

impl Everybody<'_> {
    fn connect(&self, client: u64) -> Connection {
        let mut redis = self.master.connect();
        let id = number(ask!(redis, "CLIENT", "ID"));
        self.ids[client as usize].store(id, Relaxed);
        redis
    }
}

/// One client does one thing to the locks of all.
fn operate(redis: &mut Connection, random: &mut Rng, round: u64, everybody: &Everybody) -> Reply {
    let somebody = everybody.ids[random.u64(..CLIENTS) as usize].load(Relaxed);
    let key = format!("k{}", random.u64(..KEYS));
    let other = format!("k{}", random.u64(..KEYS));
    let owner = format!("{}", random.u64(..CLIENTS));
    let short = 1 + random.u64(..20);
    let ttl = match random.u64(..3) {
        0 => SHORTEST_LASTING_TTL as u64 + random.u64(..1_000_000),
        _ => short,
    };
    match random.u64(..39) {
        0..=11 => {
            let reply = ask!(redis, "LOCK.ACQUIRE", &key, &owner, ttl, "WAIT", short);
            match random.u64(..2) {
                0 if matches!(reply, Ok(Value::Int(_))) => ask!(redis, "LOCK.RELEASE", key, owner),
                _ => reply,
            }
        }
        12..=13 => ask!(redis, "LOCK.ACQUIRE", key, owner, ttl),
        14..=16 => ask!(redis, "LOCK.RELEASE", key, owner),
        17..=19 => ask!(redis, "EVAL", RELEASE_WHOEVER_HOLDS_IT, 1, key),
        20 => ask!(redis, "LOCK.RENEW", key, owner, ttl),
        21 => ask!(redis, "DEL", key, other),
        22 => ask!(redis, "UNLINK", key),
        23 => ask!(redis, "GETDEL", key),
        24 => ask!(redis, "RENAME", key, other),
        25 => ask!(redis, "MOVE", key, random.u64(..DBS)),
        26 => ask!(redis, "COPY", key, other, "REPLACE"),
        27 => ask!(redis, "RESTORE", key, ttl, &everybody.dump, "REPLACE"),
        28 => ask!(redis, "PEXPIRE", key, ttl),
        29 => ask!(redis, "PERSIST", key),
        30 => ask!(redis, "SET", key, owner, "NX", "PX", ttl),
        31 => ask!(redis, "SWAPDB", 0, 1),
        32 => ask!(redis, "SELECT", random.u64(..DBS)),
        33 => ask!(redis, "LOCK.ACQUIRE", key, owner, ttl, "WAIT", 0),
        34 => redis::pipe()
            .atomic()
            .cmd("LOCK.RELEASE")
            .arg(&[&key, &owner])
            .cmd("LOCK.ACQUIRE")
            .arg(&[&other, &owner])
            .arg(ttl)
            .query(redis)
            .map_err(|error| error.to_string()),
        // Not both in one round: Redis 7.0 panics when it is to unblock a client that is paused.
        35 if round.is_multiple_of(2) => ask!(redis, "CLIENT", "PAUSE", 3, "WRITE"),
        35 => ask!(redis, "CLIENT", "UNBLOCK", somebody),
        36 => ask!(redis, "CLIENT", "KILL", "ID", somebody),
        37 => ask!(redis, "PEXPIREAT", key, 1),
        // Seldom, as they leave little to compare.
        _ => match random.u64(..20) {
            0 => ask!(redis, "FLUSHALL", "ASYNC"),
            // Redis 7.4 lets the client of FLUSHDB wait, and ends when CLIENT UNBLOCK meets it.
            1 if round.is_multiple_of(2) => ask!(redis, "FLUSHDB"),
            1 => ask!(redis, "FLUSHDB", "ASYNC"),
            2 => pipeline("CONFIG SET maxmemory 1; CONFIG SET maxmemory 0")
                .exec(redis)
                .map(|()| Value::Okay)
                .map_err(|error| error.to_string()),
            _ => ask!(redis, "LOCK.INFO", key),
        },
    }
}

const RELEASE_WHOEVER_HOLDS_IT: &str = "
    local value = redis.call('GET', KEYS[1])
    return value and redis.call('LOCK.RELEASE', KEYS[1], string.sub(value, 18))";

/// Value and end of every key of every database.
fn contents(redis: &mut Connection) -> BTreeMap<(u64, Vec<u8>), (Reply, Reply)> {
    let mut contents = BTreeMap::new();
    for db in 0..DBS {
        ask!(redis, "SELECT", db).unwrap();
        let keys: Vec<Vec<u8>> = redis::cmd("KEYS").arg("*").query(redis).unwrap();
        for key in keys {
            let state = (ask!(redis, "GET", &key), ask!(redis, "PEXPIRETIME", &key));
            contents.insert((db, key), state);
        }
    }
    ask!(redis, "SELECT", 0).unwrap();
    contents
}

/// The contents of a server once all leases that end soon have ended.
fn lasting_contents(redis: &mut Connection) -> BTreeMap<(u64, Vec<u8>), (Reply, Reply)> {
    let mut lasting = BTreeMap::new();
    eventually("only lasting leases are left", || {
        lasting = contents(redis);
        let soon = clock_us(redis) / 1000 + SHORTEST_LASTING_TTL / 2;
        lasting.values().all(|(_, end)| {
            let end = number(end.clone());
            end == -1 || end > soon
        })
    });
    lasting
}

#[test]
fn replica_and_append_only_file_equal_the_master_whatever_happened() {
    let mut master = Server::with(&[
        "--appendonly",
        "yes",
        "--databases",
        "2",
        "--maxmemory-policy",
        "allkeys-random",
        "--repl-diskless-sync-delay",
        "0",
    ]);
    let replica = Server::replica_of(&master);
    let mut on_master = master.connect();
    let mut on_replica = replica.connect();
    assert_eq!(ask!(on_master, "SET", "dumped", "restored"), OK);
    let dump = ask!(on_master, "DUMP", "dumped").unwrap();
    let dump: Vec<u8> = redis::from_redis_value(dump).unwrap();
    let everybody = Everybody {
        master: &master,
        ids: Default::default(),
        dump,
    };
    let mut compared = 0;

    // 10,000 operations, and a comparison after every 1,000.
    for round in 0..10 {
        thread::scope(|threads| {
            for client in 0..CLIENTS {
                let everybody = &everybody;
                threads.spawn(move || {
                    let mut random = Rng::with_seed(client + CLIENTS * round);
                    let mut redis = everybody.connect(client);
                    for _ in 0..1_000 / CLIENTS {
                        // An error is as good as an answer here; who was killed comes again.
                        let answer = operate(&mut redis, &mut random, round, everybody);
                        if answer.is_err() && !redis.is_open() {
                            redis = everybody.connect(client);
                        }
                    }
                });
            }
        });
        eventually_wait(&mut on_master, 0);
        let expected = lasting_contents(&mut on_master);
        compared += expected.len();
        eventually("the replica has all", || {
            ask!(on_master, "WAIT", 1, 1_000) == YES
        });
        assert_eq!(contents(&mut on_replica), expected, "round {round}");
        assert_eq!(contents(&mut on_master), expected, "a grant to nobody");
    }

    println!("{compared} keys compared");
    for cause in ["direct", "by_release", "by_expiry", "by_deletion"] {
        let grants = gauge(&mut on_master, &format!("grants_{cause}_total"));
        println!("grants {cause}: {grants}");
        assert!(grants > 0, "{cause}");
    }
    let expected = contents(&mut on_master);
    master.stop();
    master.start_again();
    assert_eq!(contents(&mut master.connect()), expected);
}

#[test]
fn a_master_that_becomes_a_replica_sends_those_who_wait_away_and_grants_nothing() {
    let server = Server::start();
    let mut redis = server.connect();
    for key in ["ends", "lasts"] {
        hold(&mut redis, key);
    }
    let mut waiters = ["ends", "lasts"].map(|key| join(&server, key, "waiter"));

    // Of nobody: what counts is that it is no master any more, when the lease ends.
    pipeline("PEXPIRE ends 100; REPLICAOF 127.0.0.1 1")
        .exec(&mut redis)
        .unwrap();

    for waiter in &mut waiters {
        let reply = error(waiter.reply());
        assert!(reply.starts_with("UNBLOCKED "), "{reply}");
        assert!(waiter.is_closed());
    }
    assert_eq!(gauge(&mut redis, "waiters"), 0);
    eventually("the lease has ended", || {
        number(ask!(redis, "PTTL", "ends")) == -2
    });
    let mut late = Waiter::of(&server);
    late.ask("ends", "late", LONG, LONG);
    assert!(error(late.reply()).starts_with("READONLY "));
    assert_eq!(ask!(redis, "LOCK.INFO", "ends"), NULL);

    // And promoted again it serves as before.
    assert_eq!(ask!(redis, "REPLICAOF", "NO", "ONE"), OK);
    let mut waiter = join(&server, "lasts", "waiter");
    assert_eq!(ask!(redis, "LOCK.RELEASE", "lasts", "holder"), YES);
    fence(waiter.reply());
}

#[test]
fn after_a_failover_the_new_master_serves_those_who_come_to_it() {
    let master = Server::start();
    let replica = Server::replica_of(&master);
    let mut on_master = master.connect();
    let mut on_replica = replica.connect();
    let old = hold(&mut on_master, "k");
    let mut waiters = ["a", "b"].map(|owner| join(&master, "k", owner));

    assert_eq!(ask!(on_master, "FAILOVER"), OK);

    for waiter in &mut waiters {
        assert!(error(waiter.reply()).starts_with("UNBLOCKED "));
    }
    eventually("the replica is master", || {
        info::<String>(&mut on_replica, "replication", "role") == "master"
    });
    let mut waiter = join(&replica, "k", "a");
    assert_eq!(ask!(on_replica, "LOCK.RELEASE", "k", "holder"), YES);
    assert!(fence(waiter.reply()) > old);
}

#[test]
fn a_failover_that_is_given_up_leaves_those_who_wait_in_the_queue() {
    let master = Server::start();
    let mut replica = Server::replica_of(&master);
    let mut on_master = master.connect();
    hold(&mut on_master, "k");
    let mut waiter = join(&master, "k", "waiter");
    // A replica that does not read keeps the failover from coming about.
    replica.signal("STOP");

    // The PEXPIRE is what it does not acknowledge.
    pipeline("PEXPIRE k 500; FAILOVER")
        .exec(&mut on_master)
        .unwrap();
    eventually("the lease has ended", || {
        number(ask!(on_master, "PTTL", "k")) == -2
    });
    let state: String = info(&mut on_master, "replication", "master_failover_state");
    assert_eq!(state, "waiting-for-sync");
    assert_eq!(
        waiters(&mut on_master, "k"),
        1,
        "nobody is granted during a failover"
    );
    assert_eq!(ask!(on_master, "FAILOVER", "ABORT"), OK);

    fence(waiter.reply());
    replica.signal("CONT");
    assert!(replica.is_running());
}

#[test]
fn without_enough_replicas_nobody_is_granted_by_a_timer_either() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut waiter = join(&server, "k", "waiter");
    let mut delay = Waiter::of(&server);
    delay.ask("k", "delay", LONG, 2_000);
    eventually_wait(&mut redis, 2);

    pipeline("PEXPIRE k 100; CONFIG SET min-replicas-to-write 1")
        .exec(&mut redis)
        .unwrap();

    let refused = error(ask!(redis, "LOCK.ACQUIRE", "k", "late", 1000));
    assert!(refused.starts_with("NOREPLICAS "), "{refused}");
    // Well after the end of the lease.
    assert_eq!(delay.reply(), NULL);
    assert_eq!(queue(&mut redis, "k"), ["waiter"]);
    assert_eq!(ask!(redis, "EXISTS", "k"), NO);

    assert_eq!(ask!(redis, "CONFIG", "SET", "min-replicas-to-write", 0), OK);
    fence(waiter.reply());
}

#[test]
fn while_writes_are_paused_nobody_is_granted_and_waits_end_on_time() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut patient = join(&server, "k", "patient");
    let mut hasty = Waiter::of(&server);
    hasty.ask("k", "hasty", LONG, 2_000);
    eventually_wait(&mut redis, 2);

    pipeline("PEXPIRE k 100; CLIENT PAUSE 60000 WRITE")
        .exec(&mut redis)
        .unwrap();

    assert_eq!(hasty.reply(), NULL);
    assert_eq!(queue(&mut redis, "k"), ["patient"]);
    assert!(number(ask!(redis, "PTTL", "k")) <= 0, "the lease has ended");
    assert_eq!(ask!(redis, "CLIENT", "UNPAUSE"), OK);
    fence(patient.reply());
}

#[test]
fn an_unconfirmed_grant_during_a_pause_is_taken_back_after_it() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let first = join(&server, "k", "first");
    let mut second = join(&server, "k", "second");

    let doubt = format!(
        "LOCK.RELEASE k holder; CLIENT KILL ID {}; CLIENT PAUSE 300 WRITE",
        first.id
    );
    pipeline(&doubt).exec(&mut redis).unwrap();

    fence(second.reply());
    assert_eq!(gauge(&mut redis, "grants_taken_back_total"), 1);
}

#[test]
fn those_who_wait_outlast_a_reload_a_rewrite_a_save_and_a_sleep_of_the_server() {
    let mut server = Server::with(&["--appendonly", "yes"]);
    let mut redis = server.connect();
    for disturbance in [
        &["DEBUG", "RELOAD"][..],
        &["DEBUG", "LOADAOF"],
        &["DEBUG", "SLEEP", "0.1"],
        &["BGREWRITEAOF"],
        &["BGSAVE", "SCHEDULE"],
    ] {
        hold(&mut redis, "released");
        hold(&mut redis, "ends");
        let mut waiters = ["released", "ends"].map(|key| join(&server, key, "waiter"));
        assert_eq!(ask!(redis, "PEXPIRE", "ends", 300), YES);

        ask!(redis, disturbance).unwrap();

        assert_eq!(ask!(redis, "LOCK.RELEASE", "released", "holder"), YES);
        for (waiter, key) in waiters.iter_mut().zip(["released", "ends"]) {
            let fence = fence(waiter.reply());
            assert_eq!(ask!(redis, "GET", key), text(lock_value(fence, "waiter")));
        }
        eventually("nothing is being saved", || {
            info::<i64>(&mut redis, "persistence", "aof_rewrite_in_progress") == 0
                && info::<i64>(&mut redis, "persistence", "aof_rewrite_scheduled") == 0
                && info::<i64>(&mut redis, "persistence", "rdb_bgsave_in_progress") == 0
        });
        let before = contents_of_two(&mut redis);
        ask!(redis, "DEBUG", "LOADAOF").unwrap();
        assert_eq!(contents_of_two(&mut redis), before, "after {disturbance:?}");
        assert_eq!(ask!(redis, "FLUSHALL"), OK);
    }
    assert!(server.is_running());
}

fn contents_of_two(redis: &mut Connection) -> [(Reply, Reply); 2] {
    ["released", "ends"].map(|key| (ask!(redis, "GET", key), ask!(redis, "PEXPIRETIME", key)))
}

#[test]
fn with_io_threads_nobody_is_lost() {
    let mut server = Server::with(&["--io-threads", "4", "--io-threads-do-reads", "yes"]);
    let start = Instant::now();
    let mut redis = server.connect();
    let threads: (String, i64) = redis::cmd("CONFIG")
        .arg(&["GET", "io-threads"])
        .query(&mut redis)
        .unwrap();
    assert_eq!(threads.1, 4);
    // Each has its turn at each of the locks, twenty-five times.
    thread::scope(|threads| {
        for client in 0..CLIENTS {
            let server = &server;
            threads.spawn(move || {
                let mut redis = server.connect();
                for turn in 0..25 {
                    let (key, owner) = (turn % 3, format!("{client}:{turn}"));
                    let granted = ask!(redis, "LOCK.ACQUIRE", key, &owner, LONG, "WAIT", LONG);
                    fence(granted);
                    assert_eq!(ask!(redis, "LOCK.RELEASE", key, &owner), YES);
                }
            });
        }
    });
    println!("500 turns with io-threads in {:?}", start.elapsed());
    assert_eq!(gauge(&mut redis, "waiters"), 0);
    assert!(server.is_running());
}

/// Valkey has clients that want to be sent to the new master, and lets them wait on: they get the error of all
/// others, also where a replica may be written to.
#[test]
fn who_can_be_redirected_is_sent_away_by_a_replica_and_granted_nothing() {
    for read_only in ["yes", "no"] {
        let server = Server::with(&["--replica-read-only", read_only]);
        let mut redis = server.connect();
        for key in ["ends", "lasts"] {
            hold(&mut redis, key);
        }
        let mut waiters = ["ends", "lasts"].map(|key| {
            let mut redis = server.connect();
            // Unknown to Redis.
            let _ = ask!(redis, "CLIENT", "CAPA", "REDIRECT");
            let mut waiter = Waiter::on(redis);
            waiter.ask(key, "waiter", LONG, LONG);
            waiter
        });
        eventually_wait(&mut redis, 2);

        pipeline("PEXPIRE ends 100; REPLICAOF 127.0.0.1 1")
            .exec(&mut redis)
            .unwrap();

        for waiter in &mut waiters {
            assert_eq!(error(waiter.reply()), SENT_AWAY);
        }
        assert_eq!(gauge(&mut redis, "waiters"), 0);
        eventually("the lease has ended", || {
            number(ask!(redis, "PTTL", "ends")) == -2
        });
        assert_eq!(ask!(redis, "LOCK.INFO", "ends"), NULL);
        assert_eq!(gauge(&mut redis, "grants_by_expiry_total"), 0);

        assert_eq!(ask!(redis, "REPLICAOF", "NO", "ONE"), OK);
        let mut waiter = join(&server, "lasts", "waiter");
        assert_eq!(ask!(redis, "LOCK.RELEASE", "lasts", "holder"), YES);
        fence(waiter.reply());
    }
}

const SENT_AWAY: &str = "UNBLOCKED force unblock from blocking operation, instance state changed \
                         (master -> replica?)";

#[test]
fn a_grant_that_a_server_made_just_before_it_was_a_replica_for_an_instant_is_not_lost() {
    let server = Server::start();
    let mut redis = server.connect();
    let instant = "REPLICAOF 127.0.0.1 1; REPLICAOF NO ONE";
    hold(&mut redis, "k");
    let mut waiter = join(&server, "k", "waiter");

    pipeline(&format!("MULTI; LOCK.RELEASE k holder; {instant}; EXEC"))
        .exec(&mut redis)
        .unwrap();

    // Redis 7.0 closes its connection without a word, as it does when any client is unblocked twice.
    let reply = error(waiter.reply());
    assert!(
        [SENT_AWAY, "unexpected end of file"].contains(&&*reply),
        "{reply}"
    );
    eventually("the grant is taken back", || {
        ask!(redis, "EXISTS", "k") == NO
    });
    assert_eq!(gauge(&mut redis, "grants_taken_back_total"), 1);
    assert_eq!(gauge(&mut redis, "waiters"), 0);
    fence(ask!(redis, "LOCK.ACQUIRE", "k", "next", LONG));
}

#[test]
fn a_replica_takes_no_grant_back_and_forgets_that_it_was_unconfirmed() {
    let server = Server::with(&["--replica-read-only", "no"]);
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let waiter = join(&server, "k", "waiter");
    let killed = format!("LOCK.RELEASE k holder; CLIENT KILL ID {}", waiter.id);
    pipeline(&format!("MULTI; {killed}; REPLICAOF 127.0.0.1 1; EXEC"))
        .exec(&mut redis)
        .unwrap();

    // Nothing is ours to do any more, so the module could be unloaded.
    eventually("the module has forgotten it", || {
        ask!(redis, "MODULE", "UNLOAD", "lockkeeper") == OK
    });
    let value = ask!(redis, "GET", "k").unwrap();
    let value: String = redis::from_redis_value(value).unwrap();
    assert!(value.ends_with(":waiter"), "{value}");
}
