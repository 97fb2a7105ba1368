//! The four commands: every line of their tables, on a server with nobody waiting, also in transactions
//! and scripts.

use redis::{Connection, from_redis_value};
use testkit::*;

/// Value and deadline of a key: what a refused command must not change.
fn state(redis: &mut Connection, key: &str) -> (Reply, Reply) {
    (ask!(redis, "GET", key), ask!(redis, "PEXPIRETIME", key))
}

/// The milliseconds a key has left, which must be `ttl` but for the time the test itself took.
#[track_caller]
fn assert_ttl(redis: &mut Connection, key: &str, ttl: i64) {
    let left = number(ask!(redis, "PTTL", key));
    let slack = PATIENCE.as_millis() as i64;
    assert!(
        (ttl - slack..=ttl).contains(&left),
        "{left} ms left of {ttl}"
    );
}

/// Well apart from each other, and from the time a test takes.
const SHORT: i64 = 100_000;
const LONG: i64 = 500_000;

#[test]
fn a_free_key_is_granted_and_the_reply_is_the_fence() {
    let server = Server::start();
    let mut redis = server.connect();

    let fence = fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", SHORT));

    assert_eq!(ask!(redis, "GET", "k"), text(lock_value(fence, "alice")));
    assert_ttl(&mut redis, "k", SHORT);
}

#[test]
fn a_lock_is_free_again_when_its_ttl_is_over() {
    let server = Server::start();
    let mut redis = server.connect();
    fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", 20));

    eventually("bob gets the lock alice let lapse", || {
        ask!(redis, "LOCK.ACQUIRE", "k", "bob", SHORT) != NULL
    });

    assert_eq!(ask!(redis, "LOCK.RENEW", "k", "alice", SHORT), NO);
    assert_eq!(ask!(redis, "LOCK.RENEW", "k", "bob", SHORT), YES);
}

#[test]
fn a_key_held_by_another_is_refused_and_not_touched() {
    let server = Server::start();
    let mut redis = server.connect();
    fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", SHORT));
    let before = state(&mut redis, "k");

    assert_eq!(ask!(redis, "LOCK.ACQUIRE", "k", "bob", LONG), NULL);

    assert_eq!(state(&mut redis, "k"), before);
}

#[test]
fn acquiring_again_keeps_the_fence_and_lengthens_the_lease() {
    let server = Server::start();
    let mut redis = server.connect();
    let first = fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", SHORT));

    assert_eq!(
        ask!(redis, "LOCK.ACQUIRE", "k", "alice", LONG),
        Ok(Value::Int(first))
    );

    assert_eq!(ask!(redis, "GET", "k"), text(lock_value(first, "alice")));
    assert_ttl(&mut redis, "k", LONG);
}

#[test]
fn acquiring_again_never_shortens_the_lease() {
    let server = Server::start();
    let mut redis = server.connect();
    let first = fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", LONG));
    let before = state(&mut redis, "k");

    assert_eq!(
        ask!(redis, "LOCK.ACQUIRE", "k", "alice", SHORT),
        Ok(Value::Int(first))
    );

    assert_eq!(state(&mut redis, "k"), before);
}

#[test]
fn acquiring_again_gives_an_expiry_to_a_lock_that_lost_it() {
    let server = Server::start();
    let mut redis = server.connect();
    let first = fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", LONG));
    assert_eq!(ask!(redis, "PERSIST", "k"), YES);

    assert_eq!(
        ask!(redis, "LOCK.ACQUIRE", "k", "alice", SHORT),
        Ok(Value::Int(first))
    );

    assert_ttl(&mut redis, "k", SHORT);
}

#[test]
fn renewal_replaces_the_ttl_up_and_down() {
    let server = Server::start();
    let mut redis = server.connect();
    let fence = fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", SHORT));

    assert_eq!(ask!(redis, "LOCK.RENEW", "k", "alice", LONG), YES);
    assert_ttl(&mut redis, "k", LONG);
    assert_eq!(ask!(redis, "LOCK.RENEW", "k", "alice", SHORT), YES);
    assert_ttl(&mut redis, "k", SHORT);

    assert_eq!(ask!(redis, "GET", "k"), text(lock_value(fence, "alice")));
}

#[test]
fn renewal_gives_an_expiry_to_a_lock_that_lost_it() {
    let server = Server::start();
    let mut redis = server.connect();
    fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", SHORT));
    assert_eq!(ask!(redis, "PERSIST", "k"), YES);

    assert_eq!(ask!(redis, "LOCK.RENEW", "k", "alice", SHORT), YES);

    assert_ttl(&mut redis, "k", SHORT);
}

#[test]
fn a_stranger_cannot_renew() {
    let server = Server::start();
    let mut redis = server.connect();
    fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", SHORT));
    let before = state(&mut redis, "k");

    assert_eq!(ask!(redis, "LOCK.RENEW", "k", "bob", LONG), NO);
    // A part of the name, or the name and more, is another name.
    assert_eq!(ask!(redis, "LOCK.RENEW", "k", "alic", LONG), NO);
    assert_eq!(ask!(redis, "LOCK.RENEW", "k", "alice2", LONG), NO);
    assert_eq!(ask!(redis, "LOCK.RENEW", "k", "ALICE", LONG), NO);

    assert_eq!(state(&mut redis, "k"), before);
}

#[test]
fn renewal_of_a_lock_that_nobody_holds_is_null_and_creates_nothing() {
    let server = Server::start();
    let mut redis = server.connect();

    assert_eq!(ask!(redis, "LOCK.RENEW", "k", "alice", SHORT), NULL);

    assert_eq!(ask!(redis, "EXISTS", "k"), NO);
}

#[test]
fn release_frees_the_key() {
    let server = Server::start();
    let mut redis = server.connect();
    fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", SHORT));

    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "alice"), YES);

    assert_eq!(ask!(redis, "EXISTS", "k"), NO);
    fence(ask!(redis, "LOCK.ACQUIRE", "k", "bob", SHORT));
}

#[test]
fn a_stranger_cannot_release() {
    let server = Server::start();
    let mut redis = server.connect();
    fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", SHORT));
    let before = state(&mut redis, "k");

    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "bob"), NO);

    assert_eq!(state(&mut redis, "k"), before);
}

#[test]
fn release_of_a_lock_that_nobody_holds_is_null() {
    let server = Server::start();
    let mut redis = server.connect();
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "alice"), NULL);

    fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", SHORT));
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "alice"), YES);
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "alice"), NULL);
}

#[test]
fn one_key_name_in_two_databases_is_two_locks() {
    let server = Server::start();
    let (mut zero, mut one) = (server.connect(), server.connect());
    assert_eq!(ask!(one, "SELECT", 1), OK);
    fence(ask!(zero, "LOCK.ACQUIRE", "k", "alice", SHORT));

    fence(ask!(one, "LOCK.ACQUIRE", "k", "bob", SHORT));

    assert_eq!(ask!(zero, "LOCK.RELEASE", "k", "bob"), NO);
    assert_eq!(ask!(one, "LOCK.RELEASE", "k", "bob"), YES);
    assert_eq!(ask!(zero, "LOCK.RENEW", "k", "alice", SHORT), YES);
}

/// The fields of LOCK.INFO, which RESP2 gives as a flat array.
fn lock_info(redis: &mut Connection, key: &str) -> Vec<(String, Value)> {
    let Ok(Value::Array(fields)) = ask!(redis, "LOCK.INFO", key) else {
        panic!("LOCK.INFO of a lock is an array");
    };
    let pairs = fields.chunks_exact(2);
    assert!(pairs.remainder().is_empty());
    pairs
        .map(|pair| {
            (
                redis::from_redis_value(pair[0].clone()).unwrap(),
                pair[1].clone(),
            )
        })
        .collect()
}

fn names(info: &[(String, Value)]) -> Vec<&str> {
    info.iter().map(|(name, _)| name.as_str()).collect()
}

const INFO_FIELDS: [&str; 6] = ["owner", "fence", "held-ms", "ttl-ms", "waiters", "queue"];

#[test]
fn info_tells_who_holds_a_lock_since_when_and_for_how_long() {
    let server = Server::start();
    let mut redis = server.connect();
    let fence = fence(ask!(redis, "LOCK.ACQUIRE", "k", b"al\xffice", SHORT));

    let info = lock_info(&mut redis, "k");

    assert_eq!(names(&info), INFO_FIELDS);
    assert_eq!(Ok(info[0].1.clone()), text(b"al\xffice"));
    assert_eq!(info[1].1, Value::Int(fence));
    let held = number(Ok(info[2].1.clone()));
    let left = number(Ok(info[3].1.clone()));
    assert!(
        held >= 0 && held + left <= SHORT,
        "held {held} ms, {left} ms left"
    );
    assert_eq!(info[4].1, Value::Int(0));
    assert_eq!(info[5].1, Value::Array(vec![]));

    eventually("time passes", || {
        let later = number(Ok(lock_info(&mut redis, "k")[2].1.clone()));
        later > held
    });
}

#[test]
fn info_of_a_lock_without_expiry_has_ttl_minus_1() {
    let server = Server::start();
    let mut redis = server.connect();
    fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", SHORT));
    assert_eq!(ask!(redis, "PERSIST", "k"), YES);

    assert_eq!(lock_info(&mut redis, "k")[3].1, Value::Int(-1));
}

#[test]
fn info_of_a_lock_taken_by_hand_knows_neither_fence_nor_since_when() {
    let server = Server::start();
    let mut redis = server.connect();
    assert_eq!(ask!(redis, "SET", "k", "token", "NX", "PX", SHORT), OK);

    let info = lock_info(&mut redis, "k");

    assert_eq!(names(&info), INFO_FIELDS);
    assert_eq!(Ok(info[0].1.clone()), text("token"));
    assert_eq!(info[1].1, Value::Nil);
    assert_eq!(info[2].1, Value::Nil);
    assert!((1..=SHORT).contains(&number(Ok(info[3].1.clone()))));
}

#[test]
fn info_is_null_if_nobody_holds_and_nobody_waits() {
    let server = Server::start();
    let mut redis = server.connect();
    assert_eq!(ask!(redis, "LOCK.INFO", "k"), NULL);
    assert_eq!(ask!(redis, "EXISTS", "k"), NO);
}

#[test]
fn a_lock_taken_by_hand_excludes_ours_and_ours_excludes_it() {
    let server = Server::start();
    let mut redis = server.connect();
    assert_eq!(ask!(redis, "SET", "k", "token", "NX", "PX", SHORT), OK);
    let before = state(&mut redis, "k");
    assert_eq!(ask!(redis, "LOCK.ACQUIRE", "k", "alice", LONG), NULL);
    assert_eq!(ask!(redis, "LOCK.RENEW", "k", "alice", LONG), NO);
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "alice"), NO);
    assert_eq!(state(&mut redis, "k"), before);

    fence(ask!(redis, "LOCK.ACQUIRE", "ours", "alice", SHORT));
    assert_eq!(ask!(redis, "SET", "ours", "token", "NX", "PX", SHORT), NULL);
}

#[test]
fn whoever_took_a_lock_by_hand_renews_and_releases_it() {
    let server = Server::start();
    let mut redis = server.connect();
    // As digits, as Redis stores short texts, and as it stores long ones.
    for token in ["1234567", "token", &"long ".repeat(100)] {
        assert_eq!(ask!(redis, "SET", "k", token, "NX", "PX", SHORT), OK);

        assert_eq!(ask!(redis, "LOCK.RENEW", "k", token, LONG), YES);
        assert_ttl(&mut redis, "k", LONG);
        assert_eq!(ask!(redis, "GET", "k"), text(token));

        assert_eq!(ask!(redis, "LOCK.RELEASE", "k", token), YES);
        assert_eq!(ask!(redis, "EXISTS", "k"), NO);
    }
}

#[test]
fn acquiring_a_lock_that_one_took_by_hand_gives_it_a_fence_and_no_shorter_lease() {
    let server = Server::start();
    let mut redis = server.connect();

    assert_eq!(ask!(redis, "SET", "k", "token", "NX", "PX", LONG), OK);
    let deadline = ask!(redis, "PEXPIRETIME", "k");
    let first = fence(ask!(redis, "LOCK.ACQUIRE", "k", "token", SHORT));
    assert_eq!(
        state(&mut redis, "k"),
        (text(lock_value(first, "token")), deadline)
    );

    assert_eq!(ask!(redis, "SET", "k", "token", "PX", SHORT), OK);
    let second = fence(ask!(redis, "LOCK.ACQUIRE", "k", "token", LONG));
    assert!(second > first);
    assert_ttl(&mut redis, "k", LONG);

    assert_eq!(ask!(redis, "SET", "k", "token"), OK);
    fence(ask!(redis, "LOCK.ACQUIRE", "k", "token", SHORT));
    assert_ttl(&mut redis, "k", SHORT);
}

#[test]
fn a_value_is_ours_only_if_every_byte_of_its_form_is() {
    let server = Server::start();
    let mut redis = server.connect();
    let longest_owner = "o".repeat(512);
    let ours = [
        (1, "x"),
        (9007199254740991, "x"),
        (1, ":"),
        (1, "0000000000000002:x"),
        (1, longest_owner.as_str()),
    ];
    for (fence, owner) in ours {
        assert_eq!(ask!(redis, "SET", "k", lock_value(fence, owner)), OK);
        let info = lock_info(&mut redis, "k");
        assert_eq!(
            (Ok(info[0].1.clone()), &info[1].1),
            (text(owner), &Value::Int(fence))
        );
        assert_eq!(
            ask!(redis, "LOCK.RELEASE", "k", owner),
            YES,
            "{fence}:{owner}"
        );
    }

    let too_long_owner = format!("0000000000000001:{}", "o".repeat(513));
    let by_hand = [
        "",
        "x",
        ":x",
        "000000000000001:x",
        "00000000000000001:x",
        "0000000000000001 x",
        "0000000000000001x",
        "0000000000000001",
        "0000000000000001:",
        "0000000000000000:x",
        "9007199254740992:x",
        "9999999999999999:x",
        "+000000000000001:x",
        " 000000000000001:x",
        "000000000000000a:x",
        &too_long_owner,
    ];
    for value in by_hand {
        assert_eq!(ask!(redis, "SET", "k", value), OK);
        let info = lock_info(&mut redis, "k");
        assert_eq!(
            (Ok(info[0].1.clone()), &info[1].1),
            (text(value), &Value::Nil)
        );
        assert_eq!(
            ask!(redis, "LOCK.RELEASE", "k", "x"),
            if value == "x" { YES } else { NO }
        );
    }
}

#[test]
fn whoever_gives_the_whole_value_of_a_lock_is_its_owner_too() {
    let server = Server::start();
    let mut redis = server.connect();
    let fence = fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", SHORT));
    let whole = lock_value(fence, "alice");

    assert_eq!(ask!(redis, "LOCK.RENEW", "k", &whole, LONG), YES);
    assert_ttl(&mut redis, "k", LONG);
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", &whole), YES);
}

#[test]
fn a_key_of_another_type_is_refused_by_every_command_and_not_touched() {
    let server = Server::start();
    let mut redis = server.connect();
    ask!(redis, "RPUSH", "list", "alice").unwrap();
    ask!(redis, "SADD", "set", "alice").unwrap();
    ask!(redis, "ZADD", "zset", 1, "alice").unwrap();
    ask!(redis, "HSET", "hash", "alice", "alice").unwrap();
    ask!(redis, "XADD", "stream", "*", "alice", "alice").unwrap();

    for key in ["list", "set", "zset", "hash", "stream"] {
        assert_eq!(ask!(redis, "PEXPIRE", key, LONG), YES);
        let before = (ask!(redis, "DUMP", key), ask!(redis, "PEXPIRETIME", key));

        for reply in [
            ask!(redis, "LOCK.ACQUIRE", key, "alice", SHORT),
            ask!(redis, "LOCK.RENEW", key, "alice", SHORT),
            ask!(redis, "LOCK.RELEASE", key, "alice"),
            ask!(redis, "LOCK.INFO", key),
        ] {
            assert_eq!(error(reply), WRONGTYPE);
        }

        assert_eq!(
            (ask!(redis, "DUMP", key), ask!(redis, "PEXPIRETIME", key)),
            before
        );
    }
}

#[test]
fn a_lock_is_an_ordinary_key_for_everything_else() {
    let server = Server::start();
    let mut redis = server.connect();
    fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", SHORT));
    assert_eq!(
        ask!(redis, "TYPE", "k"),
        Ok(Value::SimpleString("string".into()))
    );

    assert_eq!(ask!(redis, "RENAME", "k", "k2"), OK);
    assert_eq!(ask!(redis, "LOCK.RENEW", "k", "alice", SHORT), NULL);
    assert_eq!(ask!(redis, "LOCK.RENEW", "k2", "alice", SHORT), YES);

    assert_eq!(ask!(redis, "PEXPIRE", "k2", LONG), YES);
    assert_eq!(ask!(redis, "DEL", "k2"), YES);
    assert_eq!(ask!(redis, "LOCK.RENEW", "k2", "alice", SHORT), NULL);
    fence(ask!(redis, "LOCK.ACQUIRE", "k2", "bob", SHORT));
}

#[test]
fn the_commands_work_in_a_transaction() {
    let server = Server::start();
    let mut redis = server.connect();
    assert_eq!(ask!(redis, "MULTI"), OK);
    for queued in [
        ask!(redis, "LOCK.ACQUIRE", "k", "alice", LONG),
        ask!(redis, "LOCK.ACQUIRE", "k", "bob", LONG),
        ask!(redis, "LOCK.RENEW", "k", "bob", LONG),
        ask!(redis, "LOCK.RENEW", "k", "alice", LONG),
        ask!(redis, "LOCK.RELEASE", "k", "alice"),
        ask!(redis, "LOCK.RELEASE", "k", "alice"),
        ask!(redis, "LOCK.INFO", "k"),
    ] {
        assert_eq!(queued, Ok(Value::SimpleString("QUEUED".into())));
    }

    let Ok(Value::Array(replies)) = ask!(redis, "EXEC") else {
        panic!("EXEC answers an array");
    };

    fence(Ok(replies[0].clone()));
    assert_eq!(
        replies[1..],
        [
            Value::Nil,
            Value::Int(0),
            Value::Int(1),
            Value::Int(1),
            Value::Nil,
            Value::Nil
        ]
    );
}

#[test]
fn the_commands_work_in_a_script() {
    let server = Server::start();
    let mut redis = server.connect();
    let script = "
        local fence = redis.call('LOCK.ACQUIRE', KEYS[1], 'alice', ARGV[1])
        return {
            string.format('%.0f', fence),
            redis.call('LOCK.ACQUIRE', KEYS[1], 'bob', ARGV[1]),
            redis.call('LOCK.RENEW', KEYS[1], 'bob', ARGV[1]),
            redis.call('LOCK.RENEW', KEYS[1], 'alice', ARGV[1]),
            redis.call('LOCK.INFO', KEYS[1])[2],
            redis.call('LOCK.RELEASE', KEYS[1], 'alice'),
            redis.call('LOCK.RELEASE', KEYS[1], 'alice'),
            redis.pcall('LOCK.RENEW', KEYS[1], 'alice', 0)['err'],
        }";

    let Ok(Value::Array(replies)) = ask!(redis, "EVAL", script, 1, "k", LONG) else {
        panic!("the script answers an array");
    };

    let fence: String = from_redis_value(replies[0].clone()).unwrap();
    assert_eq!(fence.len(), 16, "{fence}");
    assert_eq!(replies[1..4], [Value::Nil, Value::Int(0), Value::Int(1)]);
    assert_eq!(Ok(replies[4].clone()), text("alice"));
    assert_eq!(replies[5..7], [Value::Int(1), Value::Nil]);
    let refusal: String = from_redis_value(replies[7].clone()).unwrap();
    assert!(refusal.starts_with("BADTTL "), "{refusal}");
}
