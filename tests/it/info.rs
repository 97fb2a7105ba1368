//! What the server shows: holder and queue in LOCK.INFO, counters and gauges in `INFO lockkeeper`.

use redis::{Connection, from_redis_value};
use testkit::waiting::*;
use testkit::*;

#[test]
fn lock_info_lists_the_first_hundred_in_order_and_counts_all() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let _waiters = join_many(&server, "k", 120);

    let first_hundred: Vec<String> = (0..100).map(|n| n.to_string()).collect();
    assert_eq!(queue(&mut redis, "k"), first_hundred);
    assert_eq!(waiters(&mut redis, "k"), 120);
    assert_eq!(owner(&mut redis, "k").as_deref(), Some("holder"));
}

#[test]
fn lock_info_shows_how_long_each_has_waited() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let _first = join(&server, "k", "first");
    eventually("it has waited 100 ms", || {
        gauge(&mut redis, "oldest_waiter_ms") >= 100
    });
    let _second = join(&server, "k", "second");

    let waiters: Vec<(String, String, String, i64)> =
        from_redis_value(lock_info(&mut redis, "k", "queue")).unwrap();

    let [first, second] = &waiters[..] else {
        panic!("{waiters:?}");
    };
    for (waiter, name) in [(first, "first"), (second, "second")] {
        assert_eq!(
            [&*waiter.0, &*waiter.1, &*waiter.2],
            ["owner", name, "waited-ms"]
        );
    }
    assert!(first.3 >= 100 && first.3 > second.3, "{waiters:?}");

    // In RESP3 a waiter is a map.
    let Ok(Value::Map(fields)) = ask!(server.connect_resp3(), "LOCK.INFO", "k") else {
        panic!("LOCK.INFO is a map in RESP3");
    };
    let Value::Array(waiters) = &fields[5].1 else {
        panic!("the queue is an array");
    };
    assert!(matches!(&waiters[..], [Value::Map(first), Value::Map(_)] if first.len() == 2));
}

#[test]
fn lock_info_shows_the_queue_of_a_lock_that_nobody_holds() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let _waiter = join(&server, "k", "waiter");
    // So that nobody is served when the lease ends.
    pipeline("PEXPIRE k 100; CLIENT PAUSE 60000 WRITE")
        .exec(&mut redis)
        .unwrap();

    eventually("the lease has ended", || owner(&mut redis, "k").is_none());

    for (field, value) in [
        ("fence", Value::Nil),
        ("held-ms", Value::Nil),
        ("ttl-ms", Value::Int(-2)),
        ("waiters", Value::Int(1)),
    ] {
        assert_eq!(lock_info(&mut redis, "k", field), value, "{field}");
    }
    assert_eq!(queue(&mut redis, "k"), ["waiter"]);
}

/// Every counter of `INFO lockkeeper` but the time waited.
const COUNTERS: [&str; 12] = [
    "grants_direct",
    "grants_by_release",
    "grants_by_expiry",
    "grants_by_deletion",
    "grants_taken_back",
    "refusals",
    "renewals",
    "renewals_refused",
    "releases",
    "wait_timeouts",
    "waiters_gone",
    "queue_full",
];

fn counters(redis: &mut Connection) -> [i64; 12] {
    COUNTERS.map(|counter| gauge(redis, &format!("{counter}_total")))
}

#[test]
fn every_event_counts_in_its_own_number_and_in_no_other() {
    let server = Server::start();
    let mut redis = server.connect();
    let mut waiter = Waiter::of(&server);
    let mut before = counters(&mut redis);
    assert_eq!(before, [0; 12]);
    let mut counted = |redis: &mut Connection, expected: &[&str]| {
        let now = counters(redis);
        let mut changed: Vec<&str> = Vec::new();
        for (n, counter) in COUNTERS.iter().enumerate() {
            changed.extend((before[n]..now[n]).map(|_| counter));
        }
        assert_eq!(changed, expected);
        before = now;
    };

    hold(&mut redis, "k");
    counted(&mut redis, &["grants_direct"]);
    hold(&mut redis, "k");
    counted(&mut redis, &[]);
    assert_eq!(ask!(redis, "LOCK.ACQUIRE", "k", "bob", LONG), NULL);
    assert_eq!(
        ask!(redis, "LOCK.ACQUIRE", "k", "bob", LONG, "WAIT", 0),
        NULL
    );
    counted(&mut redis, &["refusals"; 2]);
    assert_eq!(ask!(redis, "LOCK.RENEW", "k", "holder", LONG), YES);
    counted(&mut redis, &["renewals"]);
    assert_eq!(ask!(redis, "LOCK.RENEW", "k", "bob", LONG), NO);
    assert_eq!(ask!(redis, "LOCK.RENEW", "missing", "bob", LONG), NULL);
    counted(&mut redis, &["renewals_refused"; 2]);
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "bob"), NO);
    counted(&mut redis, &[]);

    waiter.ask("k", "bob", LONG, 1);
    assert_eq!(waiter.reply(), NULL);
    counted(&mut redis, &["wait_timeouts"]);
    drop(join(&server, "k", "bob"));
    eventually_wait(&mut redis, 0);
    counted(&mut redis, &["waiters_gone"]);
    set_max_waiters(&mut redis, 0);
    waiter.ask("k", "bob", LONG, LONG);
    assert!(error(waiter.reply()).starts_with("QUEUEFULL "));
    counted(&mut redis, &["queue_full"]);
    set_max_waiters(&mut redis, 10);

    waiter.ask("k", "bob", LONG, LONG);
    eventually_wait(&mut redis, 1);
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "holder"), YES);
    fence(waiter.reply());
    counted(&mut redis, &["grants_by_release", "releases"]);
    waiter.ask("k", "cyd", LONG, LONG);
    eventually_wait(&mut redis, 1);
    assert_eq!(ask!(redis, "PEXPIRE", "k", 20), YES);
    fence(waiter.reply());
    counted(&mut redis, &["grants_by_expiry"]);
    waiter.ask("k", "dan", LONG, LONG);
    eventually_wait(&mut redis, 1);
    assert_eq!(ask!(redis, "DEL", "k"), YES);
    fence(waiter.reply());
    counted(&mut redis, &["grants_by_deletion"]);

    let killed = join(&server, "k", "killed");
    waiter.ask("k", "eve", LONG, LONG);
    eventually_wait(&mut redis, 2);
    pipeline(&format!("LOCK.RELEASE k dan; CLIENT KILL ID {}", killed.id))
        .exec(&mut redis)
        .unwrap();
    fence(waiter.reply());
    counted(
        &mut redis,
        // Two grants: one to each.
        &[
            "grants_by_release",
            "grants_by_release",
            "grants_taken_back",
            "releases",
        ],
    );
}

#[test]
fn the_gauges_show_how_many_wait_for_how_many_keys_since_when_and_the_total_how_long_it_took() {
    let server = Server::start();
    let mut redis = server.connect();
    let gauges = |redis: &mut Connection| {
        ["waiters", "contended_keys", "oldest_waiter_ms"].map(|name| gauge(redis, name))
    };
    assert_eq!(gauges(&mut redis), [0, 0, 0]);
    assert_eq!(gauge(&mut redis, "wait_time_us_total"), 0);
    hold(&mut redis, "k");
    hold(&mut redis, "other");
    let mut waiters =
        [("k", "a"), ("k", "b"), ("other", "a")].map(|(key, owner)| join(&server, key, owner));
    eventually("one has waited 50 ms", || {
        gauge(&mut redis, "oldest_waiter_ms") >= 50
    });
    assert_eq!(gauges(&mut redis)[..2], [3, 2]);

    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "holder"), YES);
    fence(waiters[0].reply());
    let waited_us = gauge(&mut redis, "wait_time_us_total");
    assert!(waited_us >= 50_000, "{waited_us}");
    assert_eq!(gauges(&mut redis)[..2], [2, 2]);
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "b"), NO);
    assert_eq!(ask!(redis, "LOCK.RELEASE", "other", "a"), NO);
    assert_eq!(gauges(&mut redis), [0, 0, 0]);
    // Those who got nothing do not count.
    assert_eq!(gauge(&mut redis, "wait_time_us_total"), waited_us);
}

#[test]
fn info_is_a_map_in_resp3() {
    let server = Server::start();
    let mut redis = server.connect_resp3();
    let fence = fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", LONG));

    let Ok(Value::Map(fields)) = ask!(redis, "LOCK.INFO", "k") else {
        panic!("LOCK.INFO is a map in RESP3");
    };

    assert_eq!(fields.len(), 6);
    assert_eq!(Ok(fields[0].0.clone()), text("owner"));
    assert_eq!(Ok(fields[0].1.clone()), text("alice"));
    assert_eq!(fields[1].1, Value::Int(fence));
    assert_eq!(fields[5].1, Value::Array(vec![]));
    assert_eq!(ask!(redis, "LOCK.ACQUIRE", "k", "bob", LONG), NULL);
    assert_eq!(ask!(redis, "LOCK.INFO", "missing"), NULL);
}
