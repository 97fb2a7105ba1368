//! The commands behave as Redis' own: transactions, scripts, replicas, access rules, memory limit,
//! and what COMMAND tells about them.

use std::collections::BTreeMap;

use redis::{Connection, FromRedisValue, from_redis_value};
use testkit::*;

const TTL: i64 = 100_000;
const COMMANDS: [&str; 4] = ["lock.acquire", "lock.info", "lock.release", "lock.renew"];

#[test]
fn the_commands_work_in_a_transaction() {
    let server = Server::start();
    let mut redis = server.connect();
    assert_eq!(ask!(redis, "MULTI"), OK);
    for queued in [
        ask!(redis, "LOCK.ACQUIRE", "k", "alice", TTL),
        ask!(redis, "LOCK.ACQUIRE", "k", "bob", TTL),
        ask!(redis, "LOCK.RENEW", "k", "bob", TTL),
        ask!(redis, "LOCK.RENEW", "k", "alice", TTL),
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

    let Ok(Value::Array(replies)) = ask!(redis, "EVAL", script, 1, "k", TTL) else {
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

#[test]
fn a_replica_refuses_to_write_and_tells_who_holds_a_lock() {
    let master = Server::start();
    let replica = Server::replica_of(&master);
    let (mut on_master, mut on_replica) = (master.connect(), replica.connect());
    let fence = fence(ask!(on_master, "LOCK.ACQUIRE", "k", "alice", TTL));
    assert_eq!(ask!(on_master, "WAIT", 1, 30_000), YES);

    for reply in [
        ask!(on_replica, "LOCK.ACQUIRE", "k", "alice", TTL),
        ask!(on_replica, "LOCK.RENEW", "k", "alice", TTL),
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

/// A connection of a user with these rules.
fn limited_to(server: &Server, rules: &[&str]) -> Connection {
    let mut redis = server.connect();
    assert_eq!(
        ask!(
            redis, "ACL", "SETUSER", "limited", "reset", "on", ">secret", rules
        ),
        OK
    );
    assert_eq!(ask!(redis, "AUTH", "limited", "secret"), OK);
    redis
}

#[track_caller]
fn assert_no_permission(reply: Reply) {
    let refusal = error(reply);
    assert!(refusal.starts_with("NOPERM "), "{refusal}");
}

#[test]
fn access_is_limited_by_command() {
    let server = Server::start();
    let mut redis = limited_to(&server, &["~*", "+lock.acquire", "+lock.info"]);

    fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", TTL));
    ask!(redis, "LOCK.INFO", "k").unwrap();
    assert_no_permission(ask!(redis, "LOCK.RENEW", "k", "alice", TTL));
    assert_no_permission(ask!(redis, "LOCK.RELEASE", "k", "alice"));
    assert_no_permission(ask!(redis, "SET", "k", "x"));
}

#[test]
fn access_is_limited_by_key_pattern() {
    let server = Server::start();
    let mut redis = limited_to(&server, &["~locks:*", "+@all"]);

    fence(ask!(redis, "LOCK.ACQUIRE", "locks:k", "alice", TTL));
    assert_eq!(ask!(redis, "LOCK.RENEW", "locks:k", "alice", TTL), YES);
    assert_eq!(ask!(redis, "LOCK.RELEASE", "locks:k", "alice"), YES);
    assert_eq!(ask!(redis, "LOCK.INFO", "locks:k"), NULL);

    assert_no_permission(ask!(redis, "LOCK.ACQUIRE", "other", "alice", TTL));
    assert_no_permission(ask!(redis, "LOCK.RENEW", "other", "alice", TTL));
    assert_no_permission(ask!(redis, "LOCK.RELEASE", "other", "alice"));
    assert_no_permission(ask!(redis, "LOCK.INFO", "other"));
}

#[test]
fn whoever_may_only_read_a_key_may_only_look_at_its_lock() {
    let server = Server::start();
    let mut redis = limited_to(&server, &["%R~*", "+@all"]);

    assert_eq!(ask!(redis, "LOCK.INFO", "k"), NULL);
    assert_no_permission(ask!(redis, "LOCK.ACQUIRE", "k", "alice", TTL));
    assert_no_permission(ask!(redis, "LOCK.RENEW", "k", "alice", TTL));
    assert_no_permission(ask!(redis, "LOCK.RELEASE", "k", "alice"));
}

#[test]
fn the_commands_have_a_category_of_their_own_where_a_module_can_make_one() {
    let server = Server::start();
    if !is_at_least(&mut server.connect(), (7, 4), (8, 0)) {
        let refused = ask!(
            server.connect(),
            "ACL",
            "SETUSER",
            "limited",
            "on",
            "+@lock"
        );
        assert!(error(refused).contains("Unknown command or category name in ACL"));
        return;
    }

    let mut redis = limited_to(&server, &["~*", "+@lock"]);
    fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", TTL));
    assert_eq!(ask!(redis, "LOCK.RENEW", "k", "alice", TTL), YES);
    ask!(redis, "LOCK.INFO", "k").unwrap();
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "alice"), YES);
    assert_no_permission(ask!(redis, "SET", "k", "x"));
}

#[test]
fn the_commands_are_in_the_categories_of_redis_where_those_of_a_module_can_be() {
    let server = Server::start();
    let mut reader = limited_to(&server, &["~*", "+@read"]);
    if !is_at_least(&mut server.connect(), (7, 2), (7, 2)) {
        assert_no_permission(ask!(reader, "LOCK.INFO", "k"));
        return;
    }

    assert_eq!(ask!(reader, "LOCK.INFO", "k"), NULL);
    assert_no_permission(ask!(reader, "LOCK.ACQUIRE", "k", "alice", TTL));
    assert_no_permission(ask!(reader, "LOCK.RENEW", "k", "alice", TTL));
    assert_no_permission(ask!(reader, "LOCK.RELEASE", "k", "alice"));

    let mut writer = limited_to(&server, &["~*", "+@write"]);
    fence(ask!(writer, "LOCK.ACQUIRE", "k", "alice", TTL));
    assert_eq!(ask!(writer, "LOCK.RENEW", "k", "alice", TTL), YES);
    assert_eq!(ask!(writer, "LOCK.RELEASE", "k", "alice"), YES);
    assert_no_permission(ask!(writer, "LOCK.INFO", "k"));

    let mut hasty = limited_to(&server, &["~*", "+@fast", "-@blocking"]);
    assert_no_permission(ask!(hasty, "LOCK.ACQUIRE", "k", "alice", TTL));
    assert_eq!(ask!(hasty, "LOCK.RENEW", "k", "alice", TTL), NULL);
    assert_eq!(ask!(hasty, "LOCK.RELEASE", "k", "alice"), NULL);
    assert_eq!(ask!(hasty, "LOCK.INFO", "k"), NULL);
}

#[test]
fn a_full_server_grants_no_lock_but_renews_and_releases() {
    let server = Server::start();
    let mut redis = server.connect();
    fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", TTL));
    assert_eq!(
        ask!(redis, "CONFIG", "SET", "maxmemory-policy", "noeviction"),
        OK
    );
    assert_eq!(ask!(redis, "CONFIG", "SET", "maxmemory", 1), OK);

    let refusal = error(ask!(redis, "LOCK.ACQUIRE", "k2", "alice", TTL));
    assert!(refusal.starts_with("OOM command not allowed"), "{refusal}");
    assert_eq!(ask!(redis, "LOCK.RENEW", "k", "alice", TTL), YES);
    ask!(redis, "LOCK.INFO", "k").unwrap();
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "alice"), YES);
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "alice"), NULL);

    assert_eq!(ask!(redis, "CONFIG", "SET", "maxmemory", 0), OK);
    fence(ask!(redis, "LOCK.ACQUIRE", "k2", "alice", TTL));
}

#[test]
fn info_is_a_map_in_resp3() {
    let server = Server::start();
    let mut redis = server.connect_resp3();
    let fence = fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", TTL));

    let Ok(Value::Map(fields)) = ask!(redis, "LOCK.INFO", "k") else {
        panic!("LOCK.INFO is a map in RESP3");
    };

    assert_eq!(fields.len(), 6);
    assert_eq!(Ok(fields[0].0.clone()), text("owner"));
    assert_eq!(Ok(fields[0].1.clone()), text("alice"));
    assert_eq!(fields[1].1, Value::Int(fence));
    assert_eq!(fields[5].1, Value::Array(vec![]));
    assert_eq!(ask!(redis, "LOCK.ACQUIRE", "k", "bob", TTL), NULL);
    assert_eq!(ask!(redis, "LOCK.INFO", "missing"), NULL);
}

#[test]
fn there_are_four_commands() {
    let server = Server::start();
    let mut redis = server.connect();
    let mut names: Vec<String> = redis::cmd("COMMAND")
        .arg(&["LIST", "FILTERBY", "MODULE", "lockkeeper"])
        .query(&mut redis)
        .unwrap();
    names.sort();
    assert_eq!(names, COMMANDS);
}

#[test]
fn command_info_tells_arity_flags_and_keys() {
    let server = Server::start();
    let mut redis = server.connect();
    for (name, arity, flags) in [
        (
            "lock.acquire",
            -4,
            &["blocking", "denyoom", "fast", "module", "write"][..],
        ),
        ("lock.renew", 4, &["fast", "module", "write"]),
        ("lock.release", 3, &["fast", "module", "write"]),
        ("lock.info", 2, &["fast", "module", "readonly"]),
    ] {
        let reply = ask!(redis, "COMMAND", "INFO", name).unwrap();
        let [command]: [Vec<Value>; 1] = from_redis_value::<Vec<Vec<Value>>>(reply)
            .unwrap()
            .try_into()
            .unwrap();
        assert_eq!(Ok(command[0].clone()), text(name));
        assert_eq!(command[1], Value::Int(arity), "{name}");
        let mut actual: Vec<String> = from_redis_value(command[2].clone()).unwrap();
        actual.sort();
        assert_eq!(actual, flags, "{name}");
        // The first argument is the key, the only one.
        assert_eq!(command[3..6], [1, 1, 1].map(Value::Int), "{name}");
    }
}

#[test]
fn command_getkeys_finds_the_key_and_how_it_is_used() {
    let server = Server::start();
    let mut redis = server.connect();
    for (command, uses) in [
        (
            &["LOCK.ACQUIRE", "k", "alice", "1"][..],
            &["RW", "access", "update"][..],
        ),
        (
            &["LOCK.RENEW", "k", "alice", "1"],
            &["RW", "access", "update"],
        ),
        (&["LOCK.RELEASE", "k", "alice"], &["RW", "access", "update"]),
        (&["LOCK.INFO", "k"], &["RO", "access"]),
    ] {
        let keys: Vec<String> = ask_for(&mut redis, &["COMMAND", "GETKEYS"], command);
        assert_eq!(keys, ["k"]);

        let keys: Vec<(String, Vec<String>)> =
            ask_for(&mut redis, &["COMMAND", "GETKEYSANDFLAGS"], command);
        let [(key, mut how)] = <[_; 1]>::try_from(keys).unwrap();
        how.sort();
        assert_eq!(key, "k");
        assert_eq!(how, uses, "{command:?}");
    }
}

#[test]
fn command_docs_describes_every_command_and_argument() {
    let server = Server::start();
    let mut redis = server.connect();
    for (name, args) in [
        (
            "lock.acquire",
            &["key", "owner", "ttl-ms", "timeout-ms"][..],
        ),
        ("lock.renew", &["key", "owner", "ttl-ms"]),
        ("lock.release", &["key", "owner"]),
        ("lock.info", &["key"]),
    ] {
        let docs: BTreeMap<String, BTreeMap<String, Value>> =
            ask_for(&mut redis, &["COMMAND", "DOCS"], &[name]);
        let docs = &docs[name];
        let word = |field: &str| from_redis_value::<String>(docs[field].clone()).unwrap();
        assert!(word("summary").len() > 20, "{name}: {}", word("summary"));
        assert_eq!(word("since"), "0.1.0");
        assert!(
            word("complexity").starts_with("O("),
            "{name}: {}",
            word("complexity")
        );
        assert_eq!(word("module"), "lockkeeper");

        let described: Vec<BTreeMap<String, Value>> =
            from_redis_value(docs["arguments"].clone()).unwrap();
        let described: Vec<String> = described
            .iter()
            .map(|argument| from_redis_value(argument["name"].clone()).unwrap())
            .collect();
        assert_eq!(described, args, "{name}");
    }
}

fn ask_for<T: FromRedisValue>(redis: &mut Connection, command: &[&str], args: &[&str]) -> T {
    from_redis_value(ask!(redis, command, args).unwrap()).unwrap()
}
