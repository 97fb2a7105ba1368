//! What leaves the master, and what others see of a lock: nothing but `SET … PXAT`, `PEXPIREAT`
//! and `DEL`, with the deadline the master itself holds, and nothing at all for a refusal.

use std::sync::mpsc;

use redis::Connection;
use testkit::stream::{Propagated, Stream, append_only_file, command};
use testkit::*;

const SHORT: i64 = 100_000;
const LONG: i64 = 500_000;

fn deadline(redis: &mut Connection, key: &str) -> i64 {
    number(ask!(redis, "PEXPIRETIME", key))
}

/// Every way to change something, and what must be propagated to replicas and AOF, to the byte.
fn every_effect(redis: &mut Connection) -> Vec<Propagated> {
    let mut propagated = Vec::new();
    for name in [&b"alice"[..], b"\0 \xff\r\n", b"12345"] {
        // A grant.
        let fence = fence(ask!(redis, "LOCK.ACQUIRE", "k", name, SHORT));
        let value = lock_value(fence, name);
        propagated.push(command!("SET", "k", &value, "PXAT", deadline(redis, "k")));
        // The same again, longer; shorter changes nothing.
        assert_eq!(
            ask!(redis, "LOCK.ACQUIRE", "k", name, LONG),
            Ok(Value::Int(fence))
        );
        propagated.push(command!("PEXPIREAT", "k", deadline(redis, "k")));
        assert_eq!(
            ask!(redis, "LOCK.ACQUIRE", "k", name, SHORT),
            Ok(Value::Int(fence))
        );
        // Renewal, down and up.
        for ttl in [SHORT, LONG] {
            assert_eq!(ask!(redis, "LOCK.RENEW", "k", name, ttl), YES);
            propagated.push(command!("PEXPIREAT", "k", deadline(redis, "k")));
        }
        assert_eq!(ask!(redis, "LOCK.RELEASE", "k", name), YES);
        propagated.push(command!("DEL", "k"));
    }
    propagated
}

#[test]
fn a_replica_receives_absolute_effects_and_nothing_else() {
    let server = Server::start();
    let mut stream = Stream::of(&server);

    let propagated = every_effect(&mut server.connect());

    assert_eq!(stream.take(), propagated);
}

#[test]
fn the_append_only_file_holds_absolute_effects_and_nothing_else() {
    let server = Server::with(&["--appendonly", "yes", "--appendfsync", "always"]);

    let propagated = every_effect(&mut server.connect());

    assert_eq!(append_only_file(&server), propagated);
}

#[test]
fn a_lock_taken_by_hand_becomes_ours_in_one_set() {
    let server = Server::start();
    let mut redis = server.connect();
    assert_eq!(ask!(redis, "SET", "k", "token", "PX", LONG), OK);
    let by_hand = deadline(&mut redis, "k");
    let mut stream = Stream::of(&server);

    let fence = fence(ask!(redis, "LOCK.ACQUIRE", "k", "token", SHORT));

    let value = lock_value(fence, "token");
    assert_eq!(
        stream.take(),
        [command!("SET", "k", value, "PXAT", by_hand)]
    );
}

#[test]
fn an_expired_key_met_on_the_way_is_removed_before_the_grant() {
    let server = Server::start();
    let mut redis = server.connect();
    assert_eq!(ask!(redis, "DEBUG", "SET-ACTIVE-EXPIRE", 0), OK);
    fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", 20));
    let over = clock_us(&mut redis) + 20_000;
    let mut stream = Stream::of(&server);
    // Not by looking at the key, which would remove it.
    eventually("the lease is over", || clock_us(&mut redis) > over);
    assert_eq!(stream.take(), []);

    let fence = fence(ask!(redis, "LOCK.ACQUIRE", "k", "bob", SHORT));

    // How the core removes an expired key is its own affair: DEL or UNLINK, in a transaction or not.
    let propagated = stream.take();
    let set = command!(
        "SET",
        "k",
        lock_value(fence, "bob"),
        "PXAT",
        deadline(&mut redis, "k")
    );
    let at = propagated
        .iter()
        .position(|command| *command == set)
        .expect("the grant");
    assert!(
        propagated[..at].contains(&command!("DEL", "k"))
            || propagated[..at].contains(&command!("UNLINK", "k"))
    );
}

#[test]
fn a_transaction_and_a_script_propagate_the_same_effects() {
    let server = Server::start();
    let mut redis = server.connect();
    let mut stream = Stream::of(&server);

    let (fence, _): (i64, i64) = redis::pipe()
        .atomic()
        .cmd("LOCK.ACQUIRE")
        .arg("k")
        .arg("alice")
        .arg(SHORT)
        .cmd("LOCK.RELEASE")
        .arg("k")
        .arg("alice")
        .query(&mut redis)
        .unwrap();
    let propagated = stream.take();
    assert_eq!(propagated.len(), 4, "{propagated:?}");
    assert_eq!(
        (&propagated[0], &propagated[3]),
        (&command!("MULTI"), &command!("EXEC"))
    );
    assert_eq!(
        propagated[1].0[..4],
        command!("SET", "k", lock_value(fence, "alice"), "PXAT").0[..]
    );
    assert_eq!(propagated[2], command!("DEL", "k"));

    let script = "return redis.call('LOCK.ACQUIRE', KEYS[1], 'bob', ARGV[1])";
    let fence = testkit::fence(ask!(redis, "EVAL", script, 1, "k", SHORT));
    let set = command!(
        "SET",
        "k",
        lock_value(fence, "bob"),
        "PXAT",
        deadline(&mut redis, "k")
    );
    assert_eq!(stream.take(), [set]);
}

#[test]
fn master_and_replica_agree_on_value_and_deadline_to_the_millisecond() {
    let master = Server::start();
    let replica = Server::replica_of(&master);
    let (mut on_master, mut on_replica) = (master.connect(), replica.connect());
    let both = |on_master: &mut Connection, on_replica: &mut Connection| {
        assert_eq!(ask!(on_master, "WAIT", 1, 30_000), YES);
        let state =
            |redis: &mut Connection| (ask!(redis, "GET", "k"), ask!(redis, "PEXPIRETIME", "k"));
        let (master, replica) = (state(on_master), state(on_replica));
        assert_eq!(master, replica);
        master
    };

    fence(ask!(on_master, "LOCK.ACQUIRE", "k", "alice", SHORT));
    let granted = both(&mut on_master, &mut on_replica);
    assert_eq!(ask!(on_master, "LOCK.RENEW", "k", "alice", LONG), YES);
    let renewed = both(&mut on_master, &mut on_replica);
    assert_ne!(granted.1, renewed.1);
    assert_eq!(ask!(on_master, "LOCK.RELEASE", "k", "alice"), YES);
    let released = both(&mut on_master, &mut on_replica);
    assert_eq!(released.0, NULL);
}

#[test]
fn locks_come_back_from_the_append_only_file_as_they_were() {
    let mut server = Server::with(&["--appendonly", "yes", "--appendfsync", "always"]);
    let mut redis = server.connect();
    let fence = fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", SHORT));
    assert_eq!(ask!(redis, "LOCK.RENEW", "k", "alice", LONG), YES);
    ask!(
        redis,
        "LOCK.ACQUIRE",
        "for ever",
        "alice",
        9_007_199_254_740_991_i64
    )
    .unwrap();
    ask!(redis, "LOCK.ACQUIRE", "released", "alice", LONG).unwrap();
    assert_eq!(ask!(redis, "LOCK.RELEASE", "released", "alice"), YES);
    let before = [deadline(&mut redis, "k"), deadline(&mut redis, "for ever")];

    server.kill9();
    server.start_again();

    let mut redis = server.connect();
    assert_eq!(ask!(redis, "GET", "k"), text(lock_value(fence, "alice")));
    assert_eq!(
        [deadline(&mut redis, "k"), deadline(&mut redis, "for ever")],
        before
    );
    assert_eq!(ask!(redis, "EXISTS", "released"), NO);
    assert_eq!(ask!(redis, "LOCK.RENEW", "k", "alice", LONG), YES);
}

#[test]
fn a_server_without_the_module_loads_the_locks_as_plain_keys() {
    for setting in [["--appendonly", "yes"], ["--appendonly", "no"]] {
        let mut server = Server::with(&setting);
        let mut redis = server.connect();
        let fence = fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", LONG));
        let deadline_before = deadline(&mut redis, "k");
        assert_eq!(ask!(redis, "SAVE"), OK);
        server.stop();

        let dir = server.dir().to_str().unwrap();
        let bare = Setup::new()
            .without_module()
            .args(&["--dir", dir])
            .args(&setting)
            .start();

        let mut redis = bare.connect();
        assert!(error(ask!(redis, "LOCK.INFO", "k")).starts_with("ERR unknown command"));
        assert_eq!(ask!(redis, "GET", "k"), text(lock_value(fence, "alice")));
        assert_eq!(deadline(&mut redis, "k"), deadline_before);
        assert_eq!(ask!(redis, "DEL", "k"), YES);
    }
}

/// Asks for everything that must be refused while alice holds "k" and "other" is of another type.
/// No owner here has the length of alice's name, so even the encoding of the value must stay.
fn every_refusal(redis: &mut Connection) {
    for (refused, answer) in [
        (ask!(redis, "LOCK.ACQUIRE", "k", "bob", LONG), NULL),
        (ask!(redis, "LOCK.RENEW", "k", "bob", LONG), NO),
        (ask!(redis, "LOCK.RELEASE", "k", "bob"), NO),
        (ask!(redis, "LOCK.RENEW", "missing", "bob", LONG), NULL),
        (ask!(redis, "LOCK.RELEASE", "missing", "bob"), NULL),
    ] {
        assert_eq!(refused, answer);
    }
    for refused in [
        ask!(redis, "LOCK.ACQUIRE", "k", "alice", 0),
        ask!(redis, "LOCK.RENEW", "k", "alice", "x"),
        ask!(redis, "LOCK.ACQUIRE", "k", "alice", LONG, "foo"),
        ask!(redis, "LOCK.RELEASE", "k", ""),
        ask!(redis, "LOCK.RELEASE", "k"),
        ask!(redis, "LOCK.ACQUIRE", "other", "alice", LONG),
        ask!(redis, "LOCK.RENEW", "other", "alice", LONG),
        ask!(redis, "LOCK.RELEASE", "other", "alice"),
    ] {
        error(refused);
    }
}

/// A server where everything that [`every_refusal`] asks for is refused.
fn server_with_a_holder(args: &[&str]) -> (Server, Connection) {
    let server = Server::with(args);
    let mut redis = server.connect();
    ask!(redis, "LOCK.ACQUIRE", "k", "alice", SHORT).unwrap();
    ask!(redis, "RPUSH", "other", "x").unwrap();
    (server, redis)
}

#[test]
fn a_refusal_leaves_keys_stream_and_offset_as_they_were() {
    // Else the core's own PING moves the offset.
    let (server, mut redis) = server_with_a_holder(&["--repl-ping-replica-period", "3600"]);
    let mut stream = Stream::of(&server);
    let snapshot = |redis: &mut Connection| {
        let keys =
            ["k", "other"].map(|key| (ask!(redis, "DUMP", key), ask!(redis, "PEXPIRETIME", key)));
        let offset: i64 = info(redis, "replication", "master_repl_offset");
        let changes: i64 = info(redis, "persistence", "rdb_changes_since_last_save");
        (keys, ask!(redis, "DBSIZE"), offset, changes)
    };
    let before = snapshot(&mut redis);

    every_refusal(&mut redis);

    assert_eq!(snapshot(&mut redis), before);
    assert_eq!(stream.take(), []);

    assert_eq!(ask!(redis, "LOCK.RENEW", "k", "alice", LONG), YES);
    assert_ne!(snapshot(&mut redis), before, "or this test sees nothing");
}

#[test]
fn a_refusal_leaves_the_encoding_as_it_was() {
    let (_server, mut redis) = server_with_a_holder(&[]);
    for value in [&lock_value(1, "alice")[..], b"1234567", b"short text"] {
        assert_eq!(ask!(redis, "SET", "k", value, "PX", SHORT), OK);
        let before = ask!(redis, "OBJECT", "ENCODING", "k");

        every_refusal(&mut redis);

        assert_eq!(ask!(redis, "OBJECT", "ENCODING", "k"), before);
    }
}

#[test]
fn a_refusal_does_not_disturb_a_transaction_that_watches_the_key() {
    let (server, mut redis) = server_with_a_holder(&[]);
    let mut watcher = server.connect();
    let mut survives = |change: &mut dyn FnMut()| {
        assert_eq!(ask!(watcher, "WATCH", "k", "missing", "other"), OK);
        change();
        assert_eq!(ask!(watcher, "MULTI"), OK);
        ask!(watcher, "PING").unwrap();
        ask!(watcher, "EXEC") != NULL
    };

    assert!(survives(&mut || every_refusal(&mut redis)));

    for change in [
        &["LOCK.RENEW", "k", "alice", "500000"][..],
        &["LOCK.RELEASE", "k", "alice"],
        &["LOCK.ACQUIRE", "k", "alice", "100000"],
    ] {
        let change = &mut || _ = number(ask!(redis, change));
        assert!(!survives(change));
    }
}

#[test]
fn a_refusal_does_not_empty_the_cache_of_a_client() {
    let (server, mut redis) = server_with_a_holder(&[]);
    let mut cache = server.connect_resp3();
    let (sender, pushes) = mpsc::channel();
    cache.set_push_sender(sender);
    assert_eq!(ask!(cache, "CLIENT", "TRACKING", "ON"), OK);
    let mut invalidated_by = |change: &mut dyn FnMut()| {
        for key in ["k", "missing"] {
            ask!(cache, "GET", key).unwrap();
        }
        change();
        // Whatever was pushed comes before this answer.
        ask!(cache, "PING").unwrap();
        pushes.try_iter().count()
    };

    assert_eq!(invalidated_by(&mut || every_refusal(&mut redis)), 0);

    assert_eq!(
        invalidated_by(&mut || assert_eq!(ask!(redis, "LOCK.RENEW", "k", "alice", LONG), YES)),
        1
    );
}

#[test]
fn a_refusal_counts_neither_as_a_use_nor_as_a_hit() {
    let (_server, mut redis) = server_with_a_holder(&COUNT_EVERY_USE);
    let uses = ask!(redis, "OBJECT", "FREQ", "k");
    let hits: i64 = info(&mut redis, "stats", "keyspace_hits");

    every_refusal(&mut redis);

    assert_eq!(info::<i64>(&mut redis, "stats", "keyspace_hits"), hits);
    assert_eq!(ask!(redis, "OBJECT", "FREQ", "k"), uses);
    ask!(redis, "GET", "k").unwrap();
    assert_ne!(
        ask!(redis, "OBJECT", "FREQ", "k"),
        uses,
        "or this test sees nothing"
    );
}

#[test]
fn a_refusal_does_not_reset_the_idle_time() {
    let (_server, mut redis) = server_with_a_holder(&[]);
    let idle = |redis: &mut Connection| number(ask!(redis, "OBJECT", "IDLETIME", "k"));
    eventually("the key is idle for a second", || idle(&mut redis) >= 1);

    every_refusal(&mut redis);

    assert!(idle(&mut redis) >= 1);
}

/// The keyspace events of whatever `act` does, in order.
fn events(server: &Server, act: impl FnOnce(&mut Connection)) -> Vec<(String, String)> {
    let mut redis = server.connect();
    let mut listener = server.connect();
    let mut listener = listener.as_pubsub();
    listener.psubscribe("__keyevent@0__:*").unwrap();
    listener.subscribe("the end").unwrap();

    act(&mut redis);

    ask!(redis, "PUBLISH", "the end", "").unwrap();
    let mut events = Vec::new();
    loop {
        let message = listener.get_message().unwrap();
        if message.get_channel_name() == "the end" {
            return events;
        }
        let event = message
            .get_channel_name()
            .trim_start_matches("__keyevent@0__:");
        events.push((event.to_owned(), message.get_payload().unwrap()));
    }
}

#[test]
fn keyspace_events_are_those_of_the_native_commands() {
    // Every event there is; those of new keys are not among A.
    let server = Server::with(&["--notify-keyspace-events", "KEAn"]);

    let ours = events(&server, |redis| {
        ask!(redis, "LOCK.ACQUIRE", "k", "alice", SHORT).unwrap();
        ask!(redis, "LOCK.RENEW", "k", "alice", LONG).unwrap();
        ask!(redis, "LOCK.RELEASE", "k", "alice").unwrap();
    });
    let native = events(&server, |redis| {
        let far_away = "32503680000000";
        ask!(redis, "SET", "k", "token", "PXAT", far_away).unwrap();
        ask!(redis, "PEXPIREAT", "k", far_away).unwrap();
        ask!(redis, "DEL", "k").unwrap();
    });

    assert!(native.len() >= 4);
    assert_eq!(ours, native);
}

#[test]
fn a_refusal_is_no_keyspace_event() {
    let (server, _) = server_with_a_holder(&["--notify-keyspace-events", "KEAn"]);

    assert_eq!(events(&server, every_refusal), []);
}

#[test]
fn a_replica_refuses_to_write_and_shows_who_holds_a_lock() {
    let master = Server::start();
    let replica = Server::replica_of(&master);
    let (mut on_master, mut on_replica) = (master.connect(), replica.connect());
    let fence = fence(ask!(on_master, "LOCK.ACQUIRE", "k", "alice", LONG));
    assert_eq!(ask!(on_master, "WAIT", 1, 30_000), YES);

    for reply in [
        ask!(on_replica, "LOCK.ACQUIRE", "k", "alice", LONG),
        ask!(on_replica, "LOCK.RENEW", "k", "alice", LONG),
        ask!(on_replica, "LOCK.RELEASE", "k", "alice"),
    ] {
        assert_eq!(
            error(reply),
            "READONLY You can't write against a read only replica."
        );
    }
    let Ok(Value::Array(info)) = ask!(on_replica, "LOCK.INFO", "k") else {
        panic!("LOCK.INFO of a lock is an array");
    };
    assert_eq!(Ok(info[1].clone()), text("alice"));
    assert_eq!(info[3], Value::Int(fence));
}
