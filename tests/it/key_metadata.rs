//! What the commands leave at a key besides its value and end: idle time, LFU counter, encoding. The
//! same on every server, and as docs/operations.md has it ("What is left at a key").

use redis::Connection;
use testkit::waiting::{LONG, Waiter, eventually_wait, join};
use testkit::*;

/// The LFU counter of a new key.
const NEW: i64 = 5;

fn idle_s(redis: &mut Connection) -> i64 {
    number(ask!(redis, "OBJECT", "IDLETIME", "k"))
}

fn uses(redis: &mut Connection) -> i64 {
    number(ask!(redis, "OBJECT", "FREQ", "k"))
}

fn encoding(redis: &mut Connection) -> Reply {
    ask!(redis, "OBJECT", "ENCODING", "k")
}

/// Values by hand of every encoding and of lengths around the one where the encoding changes.
fn values() -> Vec<String> {
    let mut values = vec!["7".to_owned(), "123456789".to_owned(), "a token".to_owned()];
    values.extend([40, 44, 45, 64, 100, 200].map(|length| "x".repeat(length)));
    values
}

/// Owners whose values are short and long.
const OWNERS: [&str; 2] = ["alice", "5f0c9c5e-6f0e-4a57-9d0c-2f1f4a3f9b11"];

/// Does something with a key that has been idle for two seconds or more, since the server's clock for it
/// may tick in between: idle times before and after.
fn idle_before_and_after(
    redis: &mut Connection,
    prepare: impl Fn(&mut Connection),
    act: impl Fn(&mut Connection),
) -> [i64; 2] {
    prepare(redis);
    eventually("the key is idle", || idle_s(redis) >= 2);
    let before = idle_s(redis);
    act(redis);
    [before, idle_s(redis)]
}

/// Grown by no more than the test took.
fn is_kept(before: i64, after: i64) -> bool {
    (before..before + 60).contains(&after)
}

fn set(value: &str) -> impl Fn(&mut Connection) {
    move |redis| assert_eq!(ask!(redis, "SET", "k", value, "PX", LONG), OK)
}

fn acquire(owner: &str) -> impl Fn(&mut Connection) {
    move |redis| {
        ask!(redis, "DEL", "k").unwrap();
        fence(ask!(redis, "LOCK.ACQUIRE", "k", owner, LONG));
    }
}

/// Asks in vain, by an owner whose name is as long as the holder's.
fn refused(owner: &str) -> impl Fn(&mut Connection) {
    let other = "z".repeat(owner.len());
    move |redis| {
        assert_eq!(ask!(redis, "LOCK.ACQUIRE", "k", &other, LONG), NULL);
        assert_eq!(ask!(redis, "LOCK.RENEW", "k", &other, LONG), NO);
        assert_eq!(ask!(redis, "LOCK.RELEASE", "k", &other), NO);
    }
}

fn lock_info(redis: &mut Connection) {
    ask!(redis, "LOCK.INFO", "k").unwrap();
}

/// Valkey 9 cannot set an idle time: there the value is read in a way that keeps it, and unpacks the value.
fn unpacks_what_it_looks_at(redis: &mut Connection) -> bool {
    is_at_least(redis, (99, 0), (9, 0))
}

#[test]
fn looking_changes_no_encoding() {
    let server = Server::start();
    let mut redis = server.connect();
    if unpacks_what_it_looks_at(&mut redis) {
        acquire("alice")(&mut redis);
        lock_info(&mut redis);
        assert_eq!(encoding(&mut redis), text("raw"));
        return;
    }
    for value in values() {
        set(&value)(&mut redis);
        let before = encoding(&mut redis);

        lock_info(&mut redis);

        assert_eq!(encoding(&mut redis), before, "{value}");
        assert_eq!(waiting::owner(&mut redis, "k"), Some(value));
    }
    for owner in OWNERS {
        acquire(owner)(&mut redis);
        let before = encoding(&mut redis);

        lock_info(&mut redis);

        assert_eq!(encoding(&mut redis), before, "{owner}");
    }
}

#[test]
fn looking_resets_no_idle_time() {
    let server = Server::start();
    let mut redis = server.connect();
    for value in ["123456789", "a token", &"x".repeat(100)] {
        let [before, after] = idle_before_and_after(&mut redis, set(value), lock_info);
        assert!(is_kept(before, after), "{value}: {after} after {before}");
    }
    for owner in OWNERS {
        let [before, after] = idle_before_and_after(&mut redis, acquire(owner), lock_info);
        assert!(is_kept(before, after), "{owner}: {after} after {before}");
    }
}

#[test]
fn looking_counts_as_no_use() {
    let server = Server::with(&COUNT_EVERY_USE);
    let mut redis = server.connect();
    for value in values() {
        set(&value)(&mut redis);
        let before = uses(&mut redis);

        lock_info(&mut redis);

        assert_eq!(uses(&mut redis), before, "{value}");
        ask!(redis, "GET", "k").unwrap();
        assert_ne!(uses(&mut redis), before, "or this test sees nothing");
    }
}

#[test]
fn looking_on_a_replica_leaves_no_trace() {
    let master = Server::start();
    let replica = Server::replica_of(&master);
    let mut on_master = master.connect();
    acquire("alice")(&mut on_master);
    assert_eq!(ask!(on_master, "WAIT", 1, 30_000), YES);
    let mut redis = replica.connect();
    let before = encoding(&mut redis);

    let [idle_before, idle] = idle_before_and_after(&mut redis, |_| (), lock_info);

    assert!(is_kept(idle_before, idle), "{idle} after {idle_before}");
    if !unpacks_what_it_looks_at(&mut redis) {
        assert_eq!(encoding(&mut redis), before);
    }
    assert_eq!(waiting::owner(&mut redis, "k"), Some("alice".to_owned()));
}

/// There it cannot be read without a trace, but it can be read.
#[test]
fn looking_works_where_get_has_another_name() {
    let server = Server::with(&["--rename-command", "GET", "hidden"]);
    let mut redis = server.connect();
    acquire("alice")(&mut redis);
    assert_eq!(waiting::owner(&mut redis, "k"), Some("alice".to_owned()));
}

/// Of all keys that have an end, LRU eviction takes those first that were idle for longest.
#[test]
fn a_renewal_resets_the_idle_time() {
    let server = Server::start();
    let mut redis = server.connect();
    for owner in OWNERS {
        acquire(owner)(&mut redis);
        let renew = |redis: &mut Connection| {
            assert_eq!(ask!(redis, "LOCK.RENEW", "k", owner, LONG), YES);
        };
        let longer = |redis: &mut Connection| {
            fence(ask!(redis, "LOCK.ACQUIRE", "k", owner, 2 * LONG));
        };
        let no_longer = |redis: &mut Connection| {
            fence(ask!(redis, "LOCK.ACQUIRE", "k", owner, 1));
        };
        // Renewed twice, as the first time may change the encoding of the value.
        for use_it in [
            &renew as &dyn Fn(&mut Connection),
            &renew,
            &longer,
            &no_longer,
        ] {
            let [before, after] = idle_before_and_after(&mut redis, |_| (), use_it);
            assert!(after < before, "{owner}: {after} after {before}");
        }
    }
    let renew = |redis: &mut Connection| {
        assert_eq!(ask!(redis, "LOCK.RENEW", "k", "123456789", LONG), YES);
    };
    let [before, after] = idle_before_and_after(&mut redis, set("123456789"), renew);
    assert!(after < before, "by hand: {after} after {before}");
}

#[test]
fn a_renewal_counts_as_one_use() {
    let server = Server::with(&COUNT_EVERY_USE);
    let mut redis = server.connect();
    for owner in OWNERS {
        acquire(owner)(&mut redis);
        assert_eq!(uses(&mut redis), NEW);

        assert_eq!(ask!(redis, "LOCK.RENEW", "k", owner, LONG), YES);
        assert_eq!(uses(&mut redis), NEW + 1);
        fence(ask!(redis, "LOCK.ACQUIRE", "k", owner, 1));
        assert_eq!(uses(&mut redis), NEW + 2);
        fence(ask!(redis, "LOCK.ACQUIRE", "k", owner, 2 * LONG));
        assert_eq!(uses(&mut redis), NEW + 3);
        // As the native command does.
        assert_eq!(ask!(redis, "PEXPIRE", "k", LONG), YES);
        assert_eq!(uses(&mut redis), NEW + 4);
    }
}

/// Each of these writes the value anew.
#[test]
fn who_renews_beside_others_uses_the_key_and_who_comes_or_goes_keeps_its_uses() {
    let server = Server::with(&COUNT_EVERY_USE);
    let mut redis = server.connect();
    let shared = |redis: &mut Connection, owner: &str, ttl: i64| {
        fence(ask!(redis, "LOCK.ACQUIRE", "k", owner, ttl, "SHARED"));
    };
    shared(&mut redis, "alice", LONG);
    assert_eq!(uses(&mut redis), NEW);
    assert_eq!(ask!(redis, "LOCK.RENEW", "k", "alice", LONG), YES);
    assert_eq!(uses(&mut redis), NEW + 1);
    shared(&mut redis, "alice", 2 * LONG);
    assert_eq!(uses(&mut redis), NEW + 2);
    shared(&mut redis, "bob", LONG);
    assert_eq!(uses(&mut redis), NEW + 2);
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "bob"), YES);
    assert_eq!(uses(&mut redis), NEW + 2);
}

#[test]
fn a_refusal_resets_no_idle_time_though_the_lengths_are_equal() {
    let server = Server::start();
    let mut redis = server.connect();
    for owner in OWNERS {
        let [before, after] = idle_before_and_after(&mut redis, acquire(owner), refused(owner));
        assert!(after >= before, "{owner}: {after} after {before}");
    }
    for value in ["123456789", "a token"] {
        let [before, after] = idle_before_and_after(&mut redis, set(value), refused(value));
        assert!(after >= before, "{value}: {after} after {before}");
    }
}

#[test]
fn a_refusal_counts_as_no_use_though_the_lengths_are_equal() {
    let server = Server::with(&COUNT_EVERY_USE);
    let mut redis = server.connect();
    for owner in OWNERS {
        acquire(owner)(&mut redis);
        refused(owner)(&mut redis);
        assert_eq!(uses(&mut redis), NEW, "{owner}");
    }
}

/// The only trace of a refusal: the server hands out a value to compare only after it has unpacked it.
#[test]
fn a_refusal_unpacks_a_value_of_equal_length_or_one_that_could_be_a_list_and_no_other() {
    let server = Server::start();
    let mut redis = server.connect();
    for owner in OWNERS {
        for (asked_by, unpacked) in [(owner, true), ("one of another length", false)] {
            acquire(owner)(&mut redis);
            let before = encoding(&mut redis);

            refused(asked_by)(&mut redis);

            // Whatever could be a list is looked at too. Only Valkey 9.1 has packed values so long.
            let unpacked = unpacked || lock_value(1, owner).len() >= 50;
            let expected = if unpacked { text("raw") } else { before };
            assert_eq!(encoding(&mut redis), expected, "{owner}, {asked_by}");
        }
    }
}

#[test]
fn a_waiting_client_resets_no_idle_time_and_changes_no_encoding() {
    let server = Server::start();
    let mut redis = server.connect();
    for value in ["a token", "123456789"] {
        set(value)(&mut redis);
        let before = encoding(&mut redis);
        // Looked for among all who wait: a look at the key would leave a trace on some servers.
        let mut waiter = Waiter::of(&server);
        waiter.ask("k", "one of another length", LONG, LONG);
        eventually_wait(&mut redis, 1);

        eventually("the key is idle for a second", || idle_s(&mut redis) >= 1);

        assert_eq!(encoding(&mut redis), before);
        drop(waiter);
        eventually_wait(&mut redis, 0);
        ask!(redis, "DEL", "k").unwrap();
    }
}

#[test]
fn a_grant_resets_the_idle_time_and_counts_as_no_use() {
    let server = Server::with(&COUNT_EVERY_USE);
    let mut redis = server.connect();
    // The next value is of another length, and of the same.
    let [short, long] = OWNERS;
    let of_same_length = "n".repeat(long.len());
    let pairs = [[short, "next"], [long, "next"], [long, &of_same_length]];
    for [owner, next] in pairs {
        acquire(owner)(&mut redis);
        for _ in 0..3 {
            assert_eq!(ask!(redis, "LOCK.RENEW", "k", owner, LONG), YES);
        }
        let mut waiter = join(&server, "k", next);

        assert_eq!(ask!(redis, "LOCK.RELEASE", "k", owner), YES);

        fence(waiter.reply());
        // As SET does.
        assert_eq!(uses(&mut redis), NEW + 3, "{owner} {next}");
    }
    let server = Server::start();
    let mut redis = server.connect();
    for [owner, next] in pairs {
        let hand_over = |redis: &mut Connection| {
            let mut waiter = join(&server, "k", next);
            assert_eq!(ask!(redis, "LOCK.RELEASE", "k", owner), YES);
            fence(waiter.reply());
        };
        let [before, after] = idle_before_and_after(&mut redis, acquire(owner), hand_over);
        assert!(after < before, "{owner} {next}: {after} after {before}");
    }
}
