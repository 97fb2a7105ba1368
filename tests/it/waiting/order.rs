//! First come, first served: in what order those who wait are granted a lock, what they get, and who
//! does not wait at all.

use redis::Connection;
use testkit::stream::Stream;
use testkit::waiting::*;
use testkit::*;

#[test]
fn two_hundred_are_served_in_the_order_of_their_arrival() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut clients = join_many(&server, "k", 200);

    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "holder"), YES);
    let mut last = 0;
    for (n, waiter) in clients.iter_mut().enumerate() {
        let fence = fence(waiter.reply());
        assert!(fence > last, "{fence} after {last}");
        last = fence;
        let name = format!("{n}");
        assert_eq!(ask!(redis, "GET", "k"), text(lock_value(fence, &name)));
        assert_eq!(waiters(&mut redis, "k"), 199 - n as i64);
        assert_eq!(ask!(redis, "LOCK.RELEASE", "k", name), YES);
    }

    assert_eq!(ask!(redis, "LOCK.INFO", "k"), NULL);
    for waiter in &mut clients {
        waiter.assert_no_more_replies();
    }
}

#[test]
fn the_old_holder_cannot_pass_the_queue_by_asking_in_the_same_pipeline() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut waiter = join(&server, "k", "waiter");

    // One read of the server: nothing comes between the two.
    let (released, again): (i64, Option<i64>) = redis::pipe()
        .cmd("LOCK.RELEASE")
        .arg(&["k", "holder"])
        .cmd("LOCK.ACQUIRE")
        .arg(&["k", "holder", "1000"])
        .query(&mut redis)
        .unwrap();

    assert_eq!((released, again), (1, None));
    fence(waiter.reply());
    assert_eq!(owner(&mut redis, "k").as_deref(), Some("waiter"));
}

#[test]
fn the_old_holder_who_waits_again_is_last_in_the_queue() {
    let server = Server::start();
    let mut redis = server.connect();
    let mut old = Waiter::of(&server);
    old.ask("k", "old", LONG, LONG);
    fence(old.reply());
    let mut first = join(&server, "k", "first");
    let mut second = join(&server, "k", "second");

    old.send(redis::cmd("LOCK.RELEASE").arg(&["k", "old"]));
    old.ask("k", "old", LONG, LONG);

    assert_eq!(old.reply(), YES);
    fence(first.reply());
    eventually("the old holder is in the queue", || {
        queue(&mut redis, "k") == ["second", "old"]
    });
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "first"), YES);
    fence(second.reply());
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "second"), YES);
    fence(old.reply());
}

#[test]
fn a_newcomer_who_finds_the_key_free_does_not_pass_the_queue() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut first = join(&server, "k", "first");
    let _second = join(&server, "k", "second");

    // In one step, so that nobody can have served the queue between the DEL and the newcomer.
    let (_, newcomer): (i64, Option<i64>) = redis::pipe()
        .atomic()
        .cmd("DEL")
        .arg("k")
        .cmd("LOCK.ACQUIRE")
        .arg(&["k", "newcomer", "1000"])
        .query(&mut redis)
        .unwrap();

    assert_eq!(newcomer, None);
    fence(first.reply());
    assert_eq!(owner(&mut redis, "k").as_deref(), Some("first"));
    assert_eq!(queue(&mut redis, "k"), ["second"]);
}

#[test]
fn who_is_first_in_the_queue_and_asks_again_when_the_key_is_free_is_granted() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut first = join(&server, "k", "first");

    let (_, granted): (i64, i64) = redis::pipe()
        .atomic()
        .cmd("DEL")
        .arg("k")
        .cmd("LOCK.ACQUIRE")
        .arg(&["k", "first", "1000"])
        .query(&mut redis)
        .unwrap();

    assert_eq!(first.reply(), Ok(Value::Int(granted)));
}

#[test]
fn one_key_name_in_two_databases_is_two_queues() {
    let server = Server::start();
    let mut zero = server.connect();
    let mut one = server.connect();
    assert_eq!(ask!(one, "SELECT", 1), OK);
    hold(&mut zero, "k");
    hold(&mut one, "k");
    let mut in_zero = join(&server, "k", "in zero");
    let mut in_one = Waiter::on({
        let mut redis = server.connect();
        assert_eq!(ask!(redis, "SELECT", 1), OK);
        redis
    });
    in_one.ask("k", "in one", LONG, LONG);
    eventually("the second is in the queue", || {
        queue(&mut one, "k") == ["in one"]
    });
    assert_eq!(queue(&mut zero, "k"), ["in zero"]);

    assert_eq!(ask!(one, "LOCK.RELEASE", "k", "holder"), YES);

    fence(in_one.reply());
    assert_eq!(queue(&mut zero, "k"), ["in zero"]);
    assert_eq!(owner(&mut zero, "k").as_deref(), Some("holder"));
    assert_eq!(ask!(zero, "LOCK.RELEASE", "k", "holder"), YES);
    fence(in_zero.reply());
}

#[test]
fn an_owner_that_asks_again_takes_over_its_own_place_in_the_queue() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut earlier = join(&server, "k", "first");
    let mut second = join(&server, "k", "second");

    let mut later = Waiter::of(&server);
    later.ask("k", "first", 50_000, LONG);

    assert_eq!(earlier.reply(), NULL);
    assert_eq!(queue(&mut redis, "k"), ["first", "second"]);
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "holder"), YES);
    let fence = fence(later.reply());
    assert_eq!(ask!(redis, "GET", "k"), text(lock_value(fence, "first")));
    let ttl = number(ask!(redis, "PTTL", "k"));
    assert!((1..=50_000).contains(&ttl), "the new ttl, not {ttl}");
    earlier.assert_no_more_replies();

    // And its place is gone: it is not granted a second time.
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "first"), YES);
    testkit::fence(second.reply());
    assert_eq!(queue(&mut redis, "k"), [""; 0]);
}

#[test]
fn whoever_takes_over_a_place_waits_as_long_as_it_asks_itself() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");

    // Shorter.
    let mut earlier = join(&server, "k", "patient");
    let mut later = Waiter::of(&server);
    later.ask("k", "patient", LONG, 20);
    assert_eq!(earlier.reply(), NULL);
    assert_eq!(later.reply(), NULL);

    // Longer: the earlier deadline passes, as another's that is after it shows.
    let mut earlier = Waiter::of(&server);
    earlier.ask("k", "hasty", LONG, 1_000);
    eventually_wait(&mut redis, 1);
    let mut later = Waiter::of(&server);
    later.ask("k", "hasty", LONG, LONG);
    assert_eq!(earlier.reply(), NULL);
    let mut delay = Waiter::of(&server);
    delay.ask("k", "delay", LONG, 1_100);
    assert_eq!(delay.reply(), NULL);
    assert_eq!(queue(&mut redis, "k"), ["hasty"]);
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "holder"), YES);
    fence(later.reply());
}

#[test]
fn the_ttl_runs_from_the_grant() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut waiter = Waiter::of(&server);
    waiter.ask("k", "waiter", 50_000, LONG);
    eventually("it has waited 50 ms", || {
        gauge(&mut redis, "oldest_waiter_ms") >= 50
    });

    let before = clock_us(&mut redis) / 1000;
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "holder"), YES);
    fence(waiter.reply());
    let after = clock_us(&mut redis) / 1000;

    let granted_at = number(ask!(redis, "PEXPIRETIME", "k")) - 50_000;
    assert!(
        (before..=after).contains(&granted_at),
        "{before} {granted_at} {after}"
    );
}

/// A held lock, and a client that gets null for every ACQUIRE … WAIT without being in the queue.
#[track_caller]
fn assert_one_try(redis: &mut Connection, ask: impl FnOnce(&mut Connection) -> Reply) {
    let refused_before = gauge(redis, "refusals_total");
    assert_eq!(ask(redis), NULL);
    assert_eq!(gauge(redis, "waiters"), 0);
    assert_eq!(gauge(redis, "refusals_total"), refused_before + 1);
}

#[test]
fn wait_0_a_transaction_a_script_and_a_function_try_once() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");

    assert_one_try(&mut redis, |redis| {
        ask!(redis, "LOCK.ACQUIRE", "k", "bob", LONG, "WAIT", 0)
    });
    assert_one_try(&mut redis, |redis| {
        ask!(redis, "MULTI").unwrap();
        ask!(redis, "LOCK.ACQUIRE", "k", "bob", LONG, "WAIT", LONG).unwrap();
        let Ok(Value::Array(mut replies)) = ask!(redis, "EXEC") else {
            panic!("EXEC answers an array");
        };
        Ok(replies.remove(0))
    });
    assert_one_try(&mut redis, |redis| {
        let script = "return redis.call('LOCK.ACQUIRE', KEYS[1], 'bob', ARGV[1], 'WAIT', ARGV[1])";
        ask!(redis, "EVAL", script, 1, "k", LONG)
    });
    assert_one_try(&mut redis, |redis| {
        let library = "#!lua name=l\nredis.register_function('f', function(keys, args)
            return redis.call('LOCK.ACQUIRE', keys[1], 'bob', args[1], 'WAIT', args[1])
        end)";
        ask!(redis, "FUNCTION", "LOAD", library).unwrap();
        ask!(redis, "FCALL", "f", 1, "k", LONG)
    });
}

#[test]
fn a_replica_that_takes_writes_tries_once() {
    let master = Server::start();
    hold(&mut master.connect(), "k");
    let replica = Server::replica_of(&master);
    let mut redis = replica.connect();
    assert_eq!(ask!(redis, "CONFIG", "SET", "replica-read-only", "no"), OK);

    assert_one_try(&mut redis, |redis| {
        ask!(redis, "LOCK.ACQUIRE", "k", "bob", LONG, "WAIT", LONG)
    });
}

/// RESP3 lets a connection with subscriptions send commands. Valkey lets none of those wait, from 8.1 on.
#[test]
fn a_subscriber_waits_where_the_server_lets_it_and_tries_once_elsewhere() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut subscriber = Waiter::on(server.connect_resp3());
    subscriber.send(redis::cmd("SUBSCRIBE").arg("channel"));
    assert!(matches!(subscriber.reply(), Ok(Value::Push { .. })));

    subscriber.ask("k", "subscriber", LONG, 20);

    assert_eq!(subscriber.reply(), NULL);
    let waited = gauge(&mut redis, "wait_timeouts_total");
    let tried = gauge(&mut redis, "refusals_total");
    match is_at_least(&mut redis, (99, 0), (8, 1)) {
        true => assert_eq!([waited, tried], [0, 1]),
        false => assert_eq!([waited, tried], [1, 0]),
    }
}

#[test]
fn joining_and_leaving_the_queue_changes_nothing_for_anybody_else() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let before = (ask!(redis, "GET", "k"), ask!(redis, "PEXPIRETIME", "k"));
    assert_eq!(ask!(redis, "WATCH", "k"), OK);
    let mut stream = Stream::of(&server);

    let mut waiter = Waiter::of(&server);
    waiter.ask("k", "waiter", LONG, 30);
    assert_eq!(waiter.reply(), NULL);

    assert_eq!(stream.take(), []);
    ask!(redis, "MULTI").unwrap();
    ask!(redis, "PING").unwrap();
    assert_ne!(ask!(redis, "EXEC"), NULL, "what is watched has not changed");
    assert_eq!(
        (ask!(redis, "GET", "k"), ask!(redis, "PEXPIRETIME", "k")),
        before
    );
}

#[test]
fn waiting_for_a_key_of_another_type_is_refused_and_those_who_wait_for_it_wait_on() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut waiter = join(&server, "k", "waiter");

    pipeline("MULTI; DEL k; RPUSH k x; EXEC")
        .exec(&mut redis)
        .unwrap();

    let refused = ask!(redis, "LOCK.ACQUIRE", "k", "bob", LONG, "WAIT", LONG);
    assert_eq!(error(refused), WRONGTYPE);
    assert_eq!(gauge(&mut redis, "waiters"), 1);
    assert_eq!(ask!(redis, "DEL", "k"), YES);
    fence(waiter.reply());
}

#[test]
fn those_who_wait_wait_on_when_the_key_comes_to_hold_their_own_name_by_foreign_hand() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut waiter = join(&server, "k", "waiter");

    assert_eq!(ask!(redis, "SET", "k", "waiter"), OK);
    let mut delay = Waiter::of(&server);
    delay.ask("k", "delay", LONG, 30);
    assert_eq!(delay.reply(), NULL);

    assert_eq!(queue(&mut redis, "k"), ["waiter"]);
    // RELEASE gives up both the key, which is free then, and the place in the queue.
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "waiter"), YES);
    assert_eq!(waiter.reply(), NULL);
    assert_eq!(ask!(redis, "LOCK.INFO", "k"), NULL);
}
