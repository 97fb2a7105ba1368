//! What wakes those who wait, and how soon: a release in the same step, the end of a lease, and whatever
//! others do to the key.

use std::time::{Duration, Instant, SystemTime};

use redis::Connection;
use testkit::stream::{Propagated, Stream, command};
use testkit::waiting::*;
use testkit::*;

/// How late a grant after the end of a lease may be, at the median.
const ON_TIME: Duration = Duration::from_millis(5);

/// How late a grant may be, at the median, after others took the key away.
const SOON: Duration = Duration::from_millis(30);

/// The SET of a grant, as a replica must be told.
fn grant(redis: &mut Connection, key: &str, fence: i64, owner: &str) -> Propagated {
    let ends_at = number(ask!(redis, "PEXPIRETIME", key));
    command!("SET", key, lock_value(fence, owner), "PXAT", ends_at)
}

fn without_brackets(mut told: Vec<Propagated>) -> Vec<Propagated> {
    told.retain(|command| *command != command!("MULTI") && *command != command!("EXEC"));
    told
}

#[test]
fn a_release_hands_over_in_the_same_step_with_one_set_and_no_gap() {
    let server = Server::start();
    let mut redis = server.connect();
    let mut stream = Stream::of(&server);
    let release_and_look = [
        // By itself, pipelined with a look at the key.
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
            without_brackets(stream.take()),
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
        without_brackets(stream.take()),
        [grant(&mut redis, "k", fence, "waiter")]
    );
}

#[test]
fn a_release_in_a_transaction_passes_the_lock_down_the_line_at_once() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut line = ["a", "b", "c"].map(|owner| join(&server, "k", owner));

    // The first two hear of a lock that is gone when they hear of it: their fences tell.
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
    let fences = line.each_mut().map(|waiter| fence(waiter.reply()));
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
fn the_end_of_a_lease_wakes_the_next_on_time() {
    let server = Server::start();
    let mut redis = server.connect();
    let mut waiter = Waiter::of(&server);
    for active in [1, 0] {
        assert_eq!(ask!(redis, "DEBUG", "SET-ACTIVE-EXPIRE", active), OK);
        let what = format!("after the end of a lease, active expiry {active}");
        assert_median(&what, ON_TIME, || {
            waiter.send(&words("LOCK.ACQUIRE k holder 20"));
            waiter.send(&words("PEXPIRETIME k"));
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
    fence(ask!(redis, "LOCK.ACQUIRE", "k", "holder", 20));
    stream.take();
    let mut waiter = Waiter::of(&server);
    waiter.ask("k", "waiter", LONG, LONG);

    let fence = fence(waiter.reply());

    // How the core removes an expired key, if it does, is its own affair.
    let told = without_brackets(stream.take());
    let (set, before) = told.split_last().expect("the grant");
    assert_eq!(*set, grant(&mut redis, "k", fence, "waiter"));
    for removal in before {
        let removals = [command!("DEL", "k"), command!("UNLINK", "k")];
        assert!(removals.contains(removal), "{told:?}");
    }
}

/// A waiter for "k", which is held for long, and how long it waits once others have done this to the key.
fn lateness_after(server: &Server, waiter: &mut Waiter, deed: &redis::Pipeline) -> Duration {
    let mut redis = server.connect();
    waiter.ask("k", "waiter", LONG, LONG);
    eventually_wait(&mut redis, 1);
    let start = Instant::now();
    deed.query::<()>(&mut redis).unwrap();
    fence(waiter.reply());
    let lateness = start.elapsed();
    assert_eq!(ask!(redis, "FLUSHALL"), OK);
    lateness
}

#[test]
fn whatever_others_do_to_free_the_key_wakes_the_next_soon() {
    let server = Server::start();
    let mut redis = server.connect();
    let mut waiter = Waiter::of(&server);
    let evict = ["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"];
    assert_eq!(ask!(redis, &evict), OK);
    for deed in [
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
        assert_median(&format!("after {deed}"), SOON, || {
            hold(&mut redis, "k");
            lateness_after(&server, &mut waiter, &pipeline(deed))
        });
    }
}

/// The ttl of what others put in the place of the lock.
const THEIRS: Duration = Duration::from_millis(40);

#[test]
fn what_others_put_in_the_place_of_the_lock_is_waited_for_and_no_longer() {
    let server = Server::start();
    let mut redis = server.connect();
    let mut waiter = Waiter::of(&server);
    assert_eq!(ask!(redis, "SET", "other", "theirs"), OK);
    let dump = ask!(redis, "DUMP", "other").unwrap();
    let dump: Vec<u8> = redis::from_redis_value(dump).unwrap();
    let mut restore = redis::cmd("RESTORE");
    restore.arg(&["k", "40"]).arg(dump).arg("REPLACE");
    for (what, deed) in [
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
        assert_median(&format!("after {what} of 40 ms"), SOON, || {
            hold(&mut redis, "k");
            let lateness = lateness_after(&server, &mut waiter, &deed).checked_sub(THEIRS);
            lateness.expect("it was granted while another had the key")
        });
    }
}

#[test]
fn a_lease_that_was_made_longer_is_waited_for_to_its_new_end() {
    let server = Server::start();
    let mut redis = server.connect();
    let mut waiter = Waiter::of(&server);
    for longer in ["PEXPIRE k 220", "LOCK.RENEW k holder 220"] {
        assert_median(&format!("after {longer}"), ON_TIME, || {
            fence(ask!(redis, "LOCK.ACQUIRE", "k", "holder", 200));
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
    fence(ask!(redis, "LOCK.ACQUIRE", "k", "holder", 200));
    waiter.ask("k", "waiter", LONG, LONG);
    eventually_wait(&mut redis, 1);
    assert_eq!(ask!(redis, "PERSIST", "k"), YES);

    let mut hourglass = Waiter::of(&server);
    hourglass.ask("k", "hourglass", LONG, 250);
    assert_eq!(hourglass.reply(), NULL);

    assert_eq!(queue(&mut redis, "k"), ["waiter"]);
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "holder"), YES);
    fence(waiter.reply());
}

#[test]
fn a_thief_between_a_deletion_and_the_grant_leaves_the_order_as_it_was() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut line = ["a", "b"].map(|owner| join(&server, "k", owner));

    pipeline("MULTI; DEL k; SET k thief NX PX 40; EXEC")
        .query::<()>(&mut redis)
        .unwrap();

    fence(line[0].reply());
    assert_eq!(queue(&mut redis, "k"), ["b"]);
    assert_eq!(ask!(redis, "DEL", "k"), YES);
    fence(line[1].reply());
}

#[test]
fn a_deletion_is_noticed_as_soon_among_two_hundred_contended_keys() {
    let server = Server::start();
    let mut redis = server.connect();
    let mut line: Vec<Waiter> = (0..200)
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
    assert_median("after a DEL among 200 contended keys", SOON, || {
        let n: usize = keys.next().unwrap();
        let start = Instant::now();
        assert_eq!(ask!(redis, "DEL", n), YES);
        fence(line[n].reply());
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
fn a_server_on_which_nothing_happens_looks_seldom_and_still_notices_what_others_do() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut waiter = join(&server, "k", "waiter");
    let mut hourglass = Waiter::of(&server);
    hourglass.ask("k", "hourglass", LONG, 4_000);
    let before = sleeps(&server);
    assert_eq!(hourglass.reply(), NULL);
    let slept = sleeps(&server) - before;

    // One second of a hundred looks, three of ten, and the server's own clock, ten times a second.
    println!("slept {slept} times in four seconds");
    assert!(slept < 330, "{slept}");

    let start = Instant::now();
    assert_eq!(ask!(redis, "DEL", "k"), YES);
    fence(waiter.reply());
    println!("noticed after {:?}", start.elapsed());
    assert!(start.elapsed() < Duration::from_secs(1));
}

#[test]
fn a_renewal_that_shortens_a_lease_wakes_the_next_on_time_though_nothing_happened_before() {
    let server = Server::start();
    let mut redis = server.connect();
    let mut late = Vec::new();
    // Found by a look only, it would be up to 100 ms late; a busy machine gets more rounds.
    while late.len() < 15 {
        hold(&mut redis, "k");
        let mut waiter = join(&server, "k", "waiter");
        eventually("it has waited quietly", || {
            gauge(&mut redis, "oldest_waiter_ms") > 1_300
        });
        let start = Instant::now();
        assert_eq!(ask!(redis, "LOCK.RENEW", "k", "holder", 1), YES);
        fence(waiter.reply());
        late.push(start.elapsed());
        assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "waiter"), YES);
        let last: Vec<_> = late.iter().rev().take(3).collect();
        if last.len() == 3 && last.iter().all(|late| **late < Duration::from_millis(15)) {
            return;
        }
    }
    panic!("{late:?}");
}
