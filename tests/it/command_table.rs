//! What COMMAND, COMMAND DOCS and COMMAND GETKEYS show of the commands.

use std::collections::BTreeMap;

use redis::{Connection, FromRedisValue, from_redis_value};
use testkit::*;

const COMMANDS: [&str; 4] = ["lock.acquire", "lock.info", "lock.release", "lock.renew"];

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
fn command_info_shows_arity_flags_and_keys() {
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
            &["key", "owner", "ttl-ms", "timeout-ms", "limit"][..],
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

#[test]
fn command_docs_describes_each_option() {
    let server = Server::start();
    let mut redis = server.connect();
    let docs: BTreeMap<String, BTreeMap<String, Value>> =
        ask_for(&mut redis, &["COMMAND", "DOCS"], &["lock.acquire"]);
    let args = |value: &Value| -> Vec<BTreeMap<String, Value>> {
        from_redis_value(value.clone()).unwrap()
    };
    let acquire = args(&docs["lock.acquire"]["arguments"]);
    let [.., wait, limit] = &acquire[..] else {
        panic!("{acquire:?}");
    };
    for (arg, field, value) in [
        (wait, "token", "WAIT"),
        (wait, "type", "integer"),
        (limit, "type", "oneof"),
    ] {
        assert_eq!(Ok(arg[field].clone()), text(value));
        let flags: Vec<String> = from_redis_value(arg["flags"].clone()).unwrap();
        assert_eq!(flags, ["optional"]);
    }
    let one_of = args(&limit["arguments"]);
    let types_and_tokens = one_of
        .iter()
        .map(|arg| [&arg["type"], &arg["token"]].map(|value| Ok(value.clone())));
    assert_eq!(
        types_and_tokens.collect::<Vec<_>>(),
        [["integer", "LIMIT"], ["pure-token", "SHARED"]].map(|names| names.map(text))
    );
}

fn ask_for<T: FromRedisValue>(redis: &mut Connection, command: &[&str], args: &[&str]) -> T {
    from_redis_value(ask!(redis, command, args).unwrap()).unwrap()
}
