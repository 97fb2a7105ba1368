//! What is limited: how many may wait, for all keys and for one, and the memory of the server.

use std::fs;

use redis::{Connection, pipe};
use testkit::waiting::*;
use testkit::*;

fn try_to_wait(redis: &mut Connection, owner: &str) -> Reply {
    ask!(redis, "LOCK.ACQUIRE", "k", owner, LONG, "WAIT", LONG)
}

#[test]
fn who_finds_the_queue_full_is_refused_at_once() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    hold(&mut redis, "other");
    set_max_waiters(&mut redis, 2);
    let mut first = join(&server, "k", "first");
    let _second = join(&server, "other", "second");

    // Over all keys.
    assert_eq!(
        error(try_to_wait(&mut redis, "third")),
        "QUEUEFULL lockkeeper.max-waiters is 2 and as many clients wait, try again later or raise it"
    );
    assert_eq!(gauge(&mut redis, "queue_full_total"), 1);
    assert_eq!(gauge(&mut redis, "waiters"), 2);
    assert!(info::<String>(&mut redis, "errorstats", "errorstat_QUEUEFULL").contains("count=1"));

    // One try is not refused, and who has a place keeps it.
    assert_eq!(ask!(redis, "LOCK.ACQUIRE", "k", "third", LONG), NULL);
    let mut again = Waiter::of(&server);
    again.ask("k", "first", LONG, LONG);
    assert_eq!(first.reply(), NULL);
    assert_eq!(queue(&mut redis, "k"), ["first"]);

    // Whoever leaves makes room.
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "holder"), YES);
    fence(again.reply());
    let _third = join(&server, "k", "third");
}

#[test]
fn a_crowd_for_one_key_leaves_room_for_the_others() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    hold(&mut redis, "other");
    let per_key = ["CONFIG", "SET", "lockkeeper.max-waiters-per-key", "2"];
    assert_eq!(ask!(redis, &per_key), OK);
    let mut first = join(&server, "k", "first");
    let _second = join(&server, "k", "second");

    assert_eq!(
        error(try_to_wait(&mut redis, "third")),
        "QUEUEFULL lockkeeper.max-waiters-per-key is 2 and as many clients wait for this key, try again \
         later or raise it"
    );
    assert_eq!(gauge(&mut redis, "queue_full_total"), 1);
    let _other = join(&server, "other", "third");
    // The same key of another database is another key.
    assert_eq!(ask!(redis, "SELECT", 1), OK);
    hold(&mut redis, "k");
    let mut elsewhere = server.connect();
    assert_eq!(ask!(elsewhere, "SELECT", 1), OK);
    let mut elsewhere = Waiter::on(elsewhere);
    elsewhere.ask("k", "third", LONG, LONG);
    eventually_wait(&mut redis, 4);
    assert_eq!(ask!(redis, "SELECT", 0), OK);

    // Who has a place keeps it, and whoever leaves makes room.
    let mut again = Waiter::of(&server);
    again.ask("k", "first", LONG, LONG);
    assert_eq!(first.reply(), NULL);
    assert_eq!(queue(&mut redis, "k"), ["first", "second"]);
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "holder"), YES);
    fence(again.reply());
    let _third = join(&server, "k", "third");
    assert_eq!(queue(&mut redis, "k"), ["second", "third"]);
}

#[test]
fn how_many_may_wait_is_set_in_redis_conf_and_by_config_set() {
    let conf = tempfile::NamedTempFile::new().unwrap();
    let seven = "lockkeeper.max-waiters 7\nlockkeeper.max-waiters-per-key 6\n";
    fs::write(&conf, seven).unwrap();
    let configured = Server::with(&["--include", conf.path().to_str().unwrap()]);
    for (server, all, of_key) in [(Server::start(), 1_000, 500), (configured, 7, 6)] {
        for (name, field, expected, too_few) in [
            ("lockkeeper.max-waiters", "max_waiters", all, "-1"),
            (
                "lockkeeper.max-waiters-per-key",
                "max_waiters_per_key",
                of_key,
                "0",
            ),
        ] {
            let mut redis = server.connect();
            let mut assert_setting = |expected: i64| {
                let setting: (String, i64) = redis::cmd("CONFIG")
                    .arg(&["GET", name])
                    .query(&mut redis)
                    .unwrap();
                assert_eq!(setting, (name.to_owned(), expected));
                assert_eq!(gauge(&mut redis, field), expected);
            };
            assert_setting(expected);
            let most = ask!(server.connect(), "CONFIG", "SET", name, 1_000_000);
            assert_eq!(most, OK);
            assert_setting(1_000_000);
            for wrong in [too_few, "1000001", "many"] {
                error(ask!(server.connect(), "CONFIG", "SET", name, wrong));
            }
            assert_setting(1_000_000);
        }
    }
}

#[test]
fn lowering_the_number_sends_nobody_away_who_waits() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut waiters = ["a", "b", "c"].map(|owner| join(&server, "k", owner));

    set_max_waiters(&mut redis, 1);

    assert_eq!(queue(&mut redis, "k"), ["a", "b", "c"]);
    assert!(error(try_to_wait(&mut redis, "d")).starts_with("QUEUEFULL "));
    let mut before = "holder";
    for (waiter, owner) in waiters.iter_mut().zip(["a", "b", "c"]) {
        assert_eq!(ask!(redis, "LOCK.RELEASE", "k", before), YES);
        fence(waiter.reply());
        before = owner;
    }
}

/// How many are answered in one turn of the server's loop.
const SHARE: i64 = 100;

#[test]
fn a_crowd_is_drained_a_share_at_a_time_and_the_module_can_be_unloaded_when_nobody_waits() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut crowd: Vec<Waiter> = (0..4 * SHARE)
        .map(|n| {
            let mut waiter = Waiter::of(&server);
            waiter.ask("k", &format!("{n}"), LONG, LONG);
            waiter
        })
        .collect();
    eventually_wait(&mut redis, 4 * SHARE);

    let (info,): (String,) = pipe()
        .atomic()
        .cmd("CONFIG")
        .arg(&["SET", "lockkeeper.max-waiters", "0"])
        .ignore()
        .cmd("INFO")
        .arg("lockkeeper")
        .query(&mut redis)
        .unwrap();
    let unloaded = ask!(redis, "MODULE", "UNLOAD", "lockkeeper");

    // Nobody is in the queue any more, and the first share has its answer.
    assert!(
        info.contains(&format!("lockkeeper_waiters:{}\r", 3 * SHARE)),
        "{info}"
    );
    assert!(info.contains("lockkeeper_contended_keys:0\r"), "{info}");
    if unloaded != OK {
        let refused = error(unloaded);
        assert!(
            refused.starts_with("ERR Error unloading module"),
            "{refused}"
        );
        eventually_wait(&mut redis, 0);
        assert_eq!(ask!(redis, "MODULE", "UNLOAD", "lockkeeper"), OK);
    }
    for waiter in &mut crowd {
        assert_eq!(waiter.reply(), NULL);
        assert!(waiter.is_closed());
    }
}

#[test]
fn a_client_that_dies_while_its_crowd_is_drained_is_forgotten() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut crowd: Vec<Waiter> = (0..2 * SHARE)
        .map(|n| join_nth(&server, &mut redis, n))
        .collect();
    let last = crowd.pop().unwrap();

    let drain = "CONFIG SET lockkeeper.max-waiters 0";
    pipeline(&format!("MULTI; {drain}; CLIENT KILL ID {}; EXEC", last.id))
        .exec(&mut redis)
        .unwrap();

    for waiter in &mut crowd {
        assert_eq!(waiter.reply(), NULL);
    }
    eventually("the module is unloaded", || {
        ask!(redis, "MODULE", "UNLOAD", "lockkeeper") == OK
    });
}

/// The client that joins the queue of "k" behind so many.
fn join_nth(server: &Server, redis: &mut Connection, before: i64) -> Waiter {
    let mut waiter = Waiter::of(server);
    waiter.ask("k", &format!("{before}"), LONG, LONG);
    eventually_wait(redis, before + 1);
    waiter
}

#[test]
fn a_setting_that_is_refused_with_others_sends_nobody_away() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut waiter = join(&server, "k", "waiter");
    let busy = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let busy_port = busy.local_addr().unwrap().port().to_string();
    for other in [["port", &busy_port], ["maxmemory-policy", "nonsense"]] {
        for ours in ["lockkeeper.max-waiters", "lockkeeper.max-waiters-per-key"] {
            let number = if ours.ends_with("key") { "1" } else { "0" };
            for together in [
                [ours, number, other[0], other[1]],
                [other[0], other[1], ours, number],
            ] {
                let refused = error(ask!(redis, "CONFIG", "SET", &together));
                assert!(refused.starts_with("ERR CONFIG SET failed"), "{refused}");
                assert_eq!(queue(&mut redis, "k"), ["waiter"], "{together:?}");
            }
        }
    }
    assert_eq!(gauge(&mut redis, "max_waiters"), 1_000);
    assert_eq!(gauge(&mut redis, "max_waiters_per_key"), 500);
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "holder"), YES);
    fence(waiter.reply());
}

#[test]
fn a_full_server_grants_no_lock_but_renews_and_releases() {
    let server = Server::start();
    let mut redis = server.connect();
    fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", LONG));
    assert_eq!(
        ask!(redis, "CONFIG", "SET", "maxmemory-policy", "noeviction"),
        OK
    );
    assert_eq!(ask!(redis, "CONFIG", "SET", "maxmemory", 1), OK);

    let refusal = error(ask!(redis, "LOCK.ACQUIRE", "k2", "alice", LONG));
    assert!(refusal.starts_with("OOM command not allowed"), "{refusal}");
    assert_eq!(ask!(redis, "LOCK.RENEW", "k", "alice", LONG), YES);
    ask!(redis, "LOCK.INFO", "k").unwrap();
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "alice"), YES);
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "alice"), NULL);

    assert_eq!(ask!(redis, "CONFIG", "SET", "maxmemory", 0), OK);
    fence(ask!(redis, "LOCK.ACQUIRE", "k2", "alice", LONG));
}
