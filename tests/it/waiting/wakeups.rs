//! What wakes those who wait: a release in the same step, the end of a lease, whatever others do to the
//! key; and the server's cron, should one of these be missed.

use std::time::{Duration, Instant, SystemTime};

use redis::Connection;
use testkit::stream::{Propagated, Stream, command};
use testkit::waiting::*;
use testkit::*;

/// The SET of a grant, as it must be propagated.
fn grant(redis: &mut Connection, key: &str, fence: i64, owner: &str) -> Propagated {
    let ends_at = number(ask!(redis, "PEXPIRETIME", key));
    command!("SET", key, lock_value(fence, owner), "PXAT", ends_at)
}

fn without_multi_and_exec(mut propagated: Vec<Propagated>) -> Vec<Propagated> {
    propagated.retain(|command| *command != command!("MULTI") && *command != command!("EXEC"));
    propagated
}

#[test]
fn a_release_hands_over_in_the_same_step_with_one_set_and_no_gap() {
    let server = Server::start();
    let mut redis = server.connect();
    let mut stream = Stream::of(&server);
    let release_and_look = [
        // By itself, pipelined with a GET of the key.
        redis::pipe()
            .cmd("LOCK.RELEASE")
            .arg(&["k", "holder"])
            .cmd("GET")
            .arg("k")
            .clone(),
        // From a transaction.
        redis::pipe()
            .atomic()
            .cmd("LOCK.RELEASE")
            .arg(&["k", "holder"])
            .cmd("GET")
            .arg("k")
            .clone(),
    ];
    for release_and_look in release_and_look {
        hold(&mut redis, "k");
        let mut waiter = join(&server, "k", "waiter");
        stream.take();

        let (released, value): (i64, Vec<u8>) = release_and_look.query(&mut redis).unwrap();

        assert_eq!(released, 1);
        let fence = fence(waiter.reply());
        assert_eq!(value, lock_value(fence, "waiter"));
        assert_eq!(
            without_multi_and_exec(stream.take()),
            [grant(&mut redis, "k", fence, "waiter")]
        );
        assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "waiter"), YES);
    }
}

#[test]
fn a_release_in_a_script_hands_over_in_the_same_step_with_one_set() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut waiter = join(&server, "k", "waiter");
    let mut stream = Stream::of(&server);

    let script = "assert(redis.call('LOCK.RELEASE', KEYS[1], 'holder') == 1)
                  return redis.call('GET', KEYS[1])";
    let value = ask!(redis, "EVAL", script, 1, "k");

    let fence = fence(waiter.reply());
    assert_eq!(value, text(lock_value(fence, "waiter")));
    assert_eq!(
        without_multi_and_exec(stream.take()),
        [grant(&mut redis, "k", fence, "waiter")]
    );
}

#[test]
fn a_release_in_a_transaction_passes_the_lock_down_the_queue_at_once() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut waiters = ["a", "b", "c"].map(|owner| join(&server, "k", owner));

    // The first two receive the fence of a lock that is gone by then: a storage refuses it.
    let released: Vec<i64> = redis::pipe()
        .atomic()
        .cmd("LOCK.RELEASE")
        .arg(&["k", "holder"])
        .cmd("LOCK.RELEASE")
        .arg(&["k", "a"])
        .cmd("LOCK.RELEASE")
        .arg(&["k", "b"])
        .query(&mut redis)
        .unwrap();

    assert_eq!(released, [1, 1, 1]);
    let fences = waiters.each_mut().map(|waiter| fence(waiter.reply()));
    assert!(fences.is_sorted(), "{fences:?}");
    assert_eq!(ask!(redis, "GET", "k"), text(lock_value(fences[2], "c")));
}

/// How long ago that was, on a server with the true clock.
#[track_caller]
fn since(unix_ms: i64) -> Duration {
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap();
    now.checked_sub(Duration::from_millis(unix_ms as u64))
        .expect("granted before the lease had ended")
}

#[test]
fn the_end_of_a_lease_wakes_the_next() {
    let server = with_a_slow_cron().start();
    let mut redis = server.connect();
    let mut waiter = Waiter::of(&server);
    for active in [1, 0] {
        assert_eq!(ask!(redis, "DEBUG", "SET-ACTIVE-EXPIRE", active), OK);
        let what = format!("after the end of a lease, active expiry {active}");
        assert_woken(&what, || {
            // In one write: whatever comes between, the lease has not ended when its end is asked for.
            waiter.send_all(&pipeline("LOCK.ACQUIRE k holder 20; PEXPIRETIME k"));
            waiter.ask("k", "waiter", LONG, LONG);
            fence(waiter.reply());
            let ends_at = number(waiter.reply());
            fence(waiter.reply());
            let lateness = since(ends_at);
            assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "waiter"), YES);
            lateness
        });
    }
}

#[test]
fn a_grant_after_expiry_reaches_replicas_as_one_set_that_nothing_follows() {
    let server = Server::start();
    let mut redis = server.connect();
    let mut stream = Stream::of(&server);
    hold(&mut redis, "k");
    let mut waiter = join(&server, "k", "waiter");
    assert_eq!(ask!(redis, "PEXPIRE", "k", 20), YES);
    stream.take();

    let fence = fence(waiter.reply());

    // How the core removes an expired key, if it does, is its own affair.
    let propagated = without_multi_and_exec(stream.take());
    let (set, before) = propagated.split_last().expect("the grant");
    assert_eq!(*set, grant(&mut redis, "k", fence, "waiter"));
    for removal in before {
        let removals = [command!("DEL", "k"), command!("UNLINK", "k")];
        assert!(removals.contains(removal), "{propagated:?}");
    }
}

/// A waiter for "k", which is held for long, and how long it waits once others have done this to the key.
fn lateness_after(server: &Server, waiter: &mut Waiter, operation: &redis::Pipeline) -> Duration {
    let mut redis = server.connect();
    waiter.ask("k", "waiter", LONG, LONG);
    eventually_wait(&mut redis, 1);
    let start = Instant::now();
    operation.query::<()>(&mut redis).unwrap();
    fence(waiter.reply());
    let lateness = start.elapsed();
    assert_eq!(ask!(redis, "FLUSHALL"), OK);
    lateness
}

#[test]
fn whatever_others_do_to_free_the_key_wakes_the_next() {
    let server = with_a_slow_cron().start();
    let mut redis = server.connect();
    let mut waiter = Waiter::of(&server);
    let evict = ["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"];
    assert_eq!(ask!(redis, &evict), OK);
    for operation in [
        "DEL k",
        "UNLINK k",
        "GETDEL k",
        "RENAME k other",
        "MOVE k 1",
        "FLUSHDB",
        "FLUSHDB ASYNC",
        "FLUSHALL",
        "FLUSHALL ASYNC",
        "SWAPDB 0 1",
        "PEXPIREAT k 1",
        "CONFIG SET maxmemory 1; CONFIG SET maxmemory 0",
    ] {
        assert_woken(&format!("after {operation}"), || {
            hold(&mut redis, "k");
            lateness_after(&server, &mut waiter, &pipeline(operation))
        });
    }
}

/// The ttl of what others put in the place of the lock.
const THEIRS: Duration = Duration::from_millis(40);

#[test]
fn what_others_put_in_the_place_of_the_lock_is_waited_for_and_no_longer() {
    let server = with_a_slow_cron().start();
    let mut redis = server.connect();
    let mut waiter = Waiter::of(&server);
    assert_eq!(ask!(redis, "SET", "other", "theirs"), OK);
    let dump = ask!(redis, "DUMP", "other").unwrap();
    let dump: Vec<u8> = redis::from_redis_value(dump).unwrap();
    let mut restore = redis::cmd("RESTORE");
    restore.arg(&["k", "40"]).arg(dump).arg("REPLACE");
    for (what, operation) in [
        ("PEXPIRE", pipeline("PEXPIRE k 40")),
        ("LOCK.RENEW", pipeline("LOCK.RENEW k holder 40")),
        ("SET", pipeline("SET k thief PX 40")),
        // In one step: nobody can be served in between.
        (
            "SET NX",
            pipeline("MULTI; DEL k; SET k thief NX PX 40; EXEC"),
        ),
        ("RENAME", pipeline("SET other theirs PX 40; RENAME other k")),
        (
            "COPY",
            pipeline("SET other theirs PX 40; COPY other k REPLACE"),
        ),
        (
            "RESTORE",
            redis::pipe().add_command(restore).ignore().clone(),
        ),
    ] {
        assert_woken(&format!("after {what} of 40 ms"), || {
            hold(&mut redis, "k");
            let lateness = lateness_after(&server, &mut waiter, &operation).checked_sub(THEIRS);
            lateness.expect("it was granted while another had the key")
        });
    }
}

#[test]
fn a_lease_that_was_made_longer_is_waited_for_to_its_new_end() {
    let server = with_a_slow_cron().start();
    let mut redis = server.connect();
    let mut waiter = Waiter::of(&server);
    for longer in ["PEXPIRE k 1100", "LOCK.RENEW k holder 1100"] {
        assert_woken(&format!("after {longer}"), || {
            fence(ask!(redis, "LOCK.ACQUIRE", "k", "holder", 1_000));
            waiter.ask("k", "waiter", LONG, LONG);
            eventually_wait(&mut redis, 1);
            words(longer).query::<()>(&mut redis).unwrap();
            let ends_at = number(ask!(redis, "PEXPIRETIME", "k"));
            fence(waiter.reply());
            let lateness = since(ends_at);
            assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "waiter"), YES);
            lateness
        });
    }
}

#[test]
fn a_lease_that_lost_its_end_is_waited_for_until_it_is_released() {
    let server = Server::start();
    let mut redis = server.connect();
    let mut waiter = Waiter::of(&server);
    fence(ask!(redis, "LOCK.ACQUIRE", "k", "holder", 1_000));
    waiter.ask("k", "waiter", LONG, LONG);
    eventually_wait(&mut redis, 1);
    assert_eq!(ask!(redis, "PERSIST", "k"), YES);

    let mut delay = Waiter::of(&server);
    delay.ask("k", "delay", LONG, 1_100);
    assert_eq!(delay.reply(), NULL);

    assert_eq!(queue(&mut redis, "k"), ["waiter"]);
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "holder"), YES);
    fence(waiter.reply());
}

#[test]
fn a_thief_between_a_deletion_and_the_grant_leaves_the_order_as_it_was() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut waiters = ["a", "b"].map(|owner| join(&server, "k", owner));

    pipeline("MULTI; DEL k; SET k thief NX PX 40; EXEC")
        .query::<()>(&mut redis)
        .unwrap();

    fence(waiters[0].reply());
    assert_eq!(queue(&mut redis, "k"), ["b"]);
    assert_eq!(ask!(redis, "DEL", "k"), YES);
    fence(waiters[1].reply());
}

#[test]
fn a_deletion_is_noticed_among_two_hundred_contended_keys() {
    let server = with_a_slow_cron().start();
    let mut redis = server.connect();
    let mut waiters: Vec<Waiter> = (0..200)
        .map(|n| {
            let key = format!("{n}");
            hold(&mut redis, &key);
            let mut waiter = Waiter::of(&server);
            waiter.ask(&key, "waiter", LONG, LONG);
            waiter
        })
        .collect();
    eventually_wait(&mut redis, 200);
    assert_eq!(gauge(&mut redis, "contended_keys"), 200);

    let mut keys = 0..;
    assert_woken("after a DEL among 200 contended keys", || {
        let n: usize = keys.next().unwrap();
        let start = Instant::now();
        assert_eq!(ask!(redis, "DEL", n), YES);
        fence(waiters[n].reply());
        start.elapsed()
    });
}

/// How often the server's main thread has gone to sleep.
fn sleeps(server: &Server) -> i64 {
    let path = format!("/proc/{0}/task/{0}/status", server.pid());
    let status = std::fs::read_to_string(path).unwrap();
    let switches = status
        .lines()
        .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    switches.unwrap().trim().parse().unwrap()
}

#[test]
fn a_server_on_which_nothing_happens_polls_seldom() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let _waiter = join(&server, "k", "waiter");
    let mut delay = Waiter::of(&server);
    delay.ask("k", "delay", LONG, 4_000);
    let before = sleeps(&server);
    assert_eq!(delay.reply(), NULL);
    let slept = sleeps(&server) - before;

    // One second of a hundred polls, three of ten, and the server's own clock, ten times a second.
    println!("slept {slept} times in four seconds");
    assert!(slept < 330, "{slept}");
}

#[test]
fn what_others_do_wakes_the_next_though_nothing_happened_before() {
    let server = with_a_slow_cron().start();
    let mut redis = server.connect();
    for command in ["DEL k", "LOCK.RENEW k holder 1"] {
        assert_woken(&format!("after {command}"), || {
            hold(&mut redis, "k");
            let mut waiter = join(&server, "k", "waiter");
            eventually("it has waited until the server polls seldom", || {
                gauge(&mut redis, "oldest_waiter_ms") > 1_300
            });
            let start = Instant::now();
            words(command).exec(&mut redis).unwrap();
            fence(waiter.reply());
            let lateness = start.elapsed();
            assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "waiter"), YES);
            lateness
        });
    }
}

/// A server whose module gets no wake-up, so that all is left to the cron.
fn without_wake_ups() -> Server {
    let server = with_a_slow_cron().module_arg("enable-debug-command");
    server.start()
}

#[test]
fn a_waiter_whom_no_wake_up_reaches_is_served_by_the_cron() {
    let server = without_wake_ups();
    let mut redis = server.connect();
    let mut waiter = Waiter::of(&server);
    let release = ["LOCK.RELEASE", "k", "holder"];
    for (ttl, command) in [(1, &[][..]), (LONG, &release), (LONG, &["DEL", "k"])] {
        fence(ask!(redis, "LOCK.ACQUIRE", "k", "holder", ttl));
        assert_eq!(ask!(redis, "LOCK.DEBUG", "DEAF"), YES);
        waiter.ask("k", "waiter", LONG, LONG);
        if !command.is_empty() {
            eventually_wait(&mut redis, 1);
            ask!(redis, command).unwrap();
        }

        fence(waiter.reply());

        assert_eq!(ask!(redis, "LOCK.DEBUG", "HEAR"), YES);
        assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "waiter"), YES);
    }
}

#[test]
fn a_wait_is_ended_by_the_cron_though_no_timer_fires() {
    let server = without_wake_ups();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    assert_eq!(ask!(redis, "LOCK.DEBUG", "DEAF"), YES);
    let mut waiter = Waiter::of(&server);

    waiter.ask("k", "waiter", LONG, 20);

    assert_eq!(waiter.reply(), NULL);
}
