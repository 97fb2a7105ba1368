//! Who may do what to which lock: by command, key and category, in scripts and transactions, and with
//! rights that change during a wait.

use redis::Connection;
use testkit::waiting::*;
use testkit::*;

/// A connection of a user with these rules, who has no others.
fn limited_to(server: &Server, user: &str, rules: &[&str]) -> Connection {
    let mut redis = server.connect();
    let set = ask!(
        redis,
        "ACL",
        "SETUSER",
        user,
        "reset",
        "on",
        ">secret",
        "+client|id",
        rules
    );
    assert_eq!(set, OK);
    assert_eq!(ask!(redis, "AUTH", user, "secret"), OK);
    redis
}

#[track_caller]
fn assert_no_permission(reply: Reply) {
    let refusal = error(reply);
    // Of a script, or of the server itself.
    let is_refusal = [
        "NOPERM ",
        "ERR The user executing the script can't",
        "ERR ACL failure in script",
    ]
    .iter()
    .any(|words| refusal.starts_with(words));
    assert!(is_refusal, "{refusal}");
}

#[test]
fn whoever_has_not_authenticated_may_do_nothing() {
    let server = Server::start();
    let mut redis = server.connect();
    assert_eq!(ask!(redis, "CONFIG", "SET", "requirepass", "secret"), OK);
    let mut redis = server.connect();
    for reply in [
        ask!(redis, "LOCK.ACQUIRE", "k", "alice", LONG),
        ask!(redis, "LOCK.ACQUIRE", "k", "alice", LONG, "WAIT", LONG),
        ask!(redis, "LOCK.RENEW", "k", "alice", LONG),
        ask!(redis, "LOCK.RELEASE", "k", "alice"),
        ask!(redis, "LOCK.INFO", "k"),
    ] {
        assert_eq!(error(reply), "NOAUTH Authentication required.");
    }
    assert_eq!(ask!(redis, "AUTH", "secret"), OK);
    assert_eq!(ask!(redis, "LOCK.INFO", "k"), NULL);
}

#[test]
fn nobody_waits_in_a_queue_that_they_may_not_join() {
    let server = Server::start();
    let mut redis = server.connect();
    for key in ["locks:k", "other"] {
        hold(&mut redis, key);
    }
    let mut limited = limited_to(
        &server,
        "limited",
        &["~locks:*", "+lock.acquire", "+lock.release"],
    );

    let refused = ask!(limited, "LOCK.ACQUIRE", "other", "x", LONG, "WAIT", LONG);
    assert_no_permission(refused);
    // Nor sends anybody out of one.
    let mut waiter = join(&server, "other", "waiter");
    assert_no_permission(ask!(limited, "LOCK.RELEASE", "other", "waiter"));
    assert_eq!(queue(&mut redis, "other"), ["waiter"]);
    assert_eq!(
        ask!(limited, "LOCK.ACQUIRE", "locks:k", "x", LONG, "WAIT", 1),
        NULL
    );

    assert_eq!(ask!(redis, "LOCK.RELEASE", "other", "holder"), YES);
    fence(waiter.reply());
}

#[test]
fn a_script_may_not_do_more_than_who_runs_it() {
    let server = Server::start();
    let mut redis = server.connect();
    let by_command = &["~*", "+eval", "+lock.info"];
    let by_key = &["~locks:*", "+eval", "+lock.acquire", "+lock.info"];
    let take = "return redis.call('LOCK.ACQUIRE', ARGV[1], 'x', 60000)";

    let mut limited = limited_to(&server, "by-command", by_command);
    assert_no_permission(ask!(limited, "EVAL", take, 0, "k"));
    let script = "return redis.call('LOCK.INFO', KEYS[1])";
    assert_eq!(ask!(limited, "EVAL", script, 1, "k"), NULL);

    // The keys that a script does not declare are looked at, too.
    let mut limited = limited_to(&server, "by-key", by_key);
    assert_no_permission(ask!(limited, "EVAL", take, 0, "other"));
    fence(ask!(limited, "EVAL", take, 0, "locks:k"));
    assert_eq!(ask!(redis, "EXISTS", "k", "other"), NO);
}

#[test]
fn one_forbidden_command_undoes_a_whole_transaction() {
    let server = Server::start();
    let mut limited = limited_to(
        &server,
        "limited",
        &["~locks:*", "+multi", "+exec", "+lock.acquire"],
    );
    assert_eq!(ask!(limited, "MULTI"), OK);
    ask!(limited, "LOCK.ACQUIRE", "locks:k", "x", LONG).unwrap();
    assert_no_permission(ask!(limited, "LOCK.RELEASE", "locks:k", "x"));

    let refused = error(ask!(limited, "EXEC"));

    assert!(refused.starts_with("EXECABORT "), "{refused}");
    assert_eq!(ask!(server.connect(), "EXISTS", "locks:k"), NO);
}

#[test]
fn a_selector_gives_other_rights_on_other_keys() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "theirs");
    let rules = &[
        "~mine:*",
        "+lock.acquire",
        "+lock.release",
        "(+lock.info ~*)",
    ];
    let mut limited = limited_to(&server, "limited", rules);

    fence(ask!(limited, "LOCK.ACQUIRE", "mine:k", "x", LONG));
    ask!(limited, "LOCK.INFO", "theirs").unwrap();
    ask!(limited, "LOCK.INFO", "mine:k").unwrap();
    assert_no_permission(ask!(limited, "LOCK.ACQUIRE", "theirs", "x", LONG));
    assert_no_permission(ask!(limited, "LOCK.RELEASE", "theirs", "holder"));
    assert_no_permission(ask!(limited, "LOCK.RENEW", "mine:k", "x", LONG));
}

#[test]
fn whoever_may_only_write_a_key_may_do_nothing_that_shows_what_is_in_it() {
    let server = Server::start();
    let mut limited = limited_to(&server, "limited", &["%W~*", "+@all"]);
    for reply in [
        ask!(limited, "LOCK.ACQUIRE", "k", "x", LONG),
        ask!(limited, "LOCK.RENEW", "k", "x", LONG),
        ask!(limited, "LOCK.RELEASE", "k", "x"),
        ask!(limited, "LOCK.INFO", "k"),
    ] {
        assert_no_permission(reply);
    }
}

#[test]
fn a_refusal_is_in_the_acl_log_and_a_dry_run_shows_it_before() {
    let server = Server::start();
    let mut redis = server.connect();
    let mut limited = limited_to(&server, "limited", &["~locks:*", "+lock.acquire"]);
    assert_no_permission(ask!(limited, "LOCK.ACQUIRE", "other", "x", LONG));
    assert_no_permission(ask!(limited, "LOCK.INFO", "locks:k"));

    let log: Vec<Vec<Value>> = redis::cmd("ACL").arg("LOG").query(&mut redis).unwrap();
    let objects: Vec<Reply> = log.iter().map(|entry| Ok(entry[7].clone())).collect();
    assert_eq!(objects, [text("lock.info"), text("other")]);

    let mut dry_run = |args: &[&str]| ask!(redis, "ACL", "DRYRUN", "limited", args);
    assert_eq!(dry_run(&["LOCK.ACQUIRE", "locks:k", "x", "1"]), OK);
    assert_ne!(dry_run(&["LOCK.ACQUIRE", "other", "x", "1"]), OK);
    assert_ne!(dry_run(&["LOCK.RELEASE", "locks:k", "x"]), OK);
}

#[test]
fn categories_can_be_taken_away_where_a_module_can_be_in_them() {
    let server = Server::start();
    let mut redis = server.connect();
    let commands: [&[&str]; 4] = [
        &["LOCK.ACQUIRE", "k", "x", "1"],
        &["LOCK.RENEW", "k", "x", "1"],
        &["LOCK.RELEASE", "k", "x"],
        &["LOCK.INFO", "k"],
    ];
    let mut cases = vec![];
    if is_at_least(&mut redis, (7, 2), (7, 2)) {
        cases.extend([
            ("-@write", [false, false, false, true]),
            ("-@read", [true, true, true, false]),
            ("-@blocking", [false, true, true, true]),
            ("-@fast", [false; 4]),
        ]);
    }
    if is_at_least(&mut redis, (7, 4), (8, 0)) {
        cases.push(("-@lock", [false; 4]));
    }
    // They are not dangerous, and no work for administrators.
    cases.extend([("-@dangerous", [true; 4]), ("-@admin", [true; 4])]);
    for (rule, expected) in cases {
        let set = ask!(
            redis, "ACL", "SETUSER", "limited", "reset", "~*", "+@all", rule
        );
        assert_eq!(set, OK);
        let may = commands.map(|command| ask!(redis, "ACL", "DRYRUN", "limited", command) == OK);
        assert_eq!(may, expected, "{rule}");
    }
}

/// Somebody with a user of their own who waits for "k", which the holder has.
fn a_limited_waiter(server: &Server) -> Waiter {
    hold(&mut server.connect(), "k");
    let limited = limited_to(server, "limited", &["~k", "+lock.acquire"]);
    let mut waiter = Waiter::on(limited);
    waiter.ask("k", "limited", LONG, LONG);
    eventually_wait(&mut server.connect(), 1);
    waiter
}

#[test]
fn access_is_checked_when_asked_and_not_when_granted() {
    let server = Server::start();
    let mut redis = server.connect();
    let mut waiter = a_limited_waiter(&server);
    let set = ask!(redis, "ACL", "SETUSER", "limited", "-@all", "resetkeys");
    assert_eq!(set, OK);

    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "holder"), YES);

    fence(waiter.reply());
    waiter.ask("k", "limited", LONG, LONG);
    assert_no_permission(waiter.reply());
}

#[test]
fn a_user_who_is_killed_or_deleted_has_left_the_queue() {
    let server = Server::start();
    let mut redis = server.connect();
    for end in [
        &["CLIENT", "KILL", "USER", "limited"][..],
        &["ACL", "DELUSER", "limited"],
    ] {
        let mut waiter = a_limited_waiter(&server);

        assert_eq!(ask!(redis, end), YES);

        assert!(waiter.is_closed());
        eventually_wait(&mut redis, 0);
        assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "holder"), YES);
        assert_eq!(ask!(redis, "EXISTS", "k"), NO);
    }
}

#[test]
fn who_waits_is_served_even_if_the_default_user_may_do_nothing() {
    let server = Server::start();
    let mut redis = limited_to(&server, "admin", &["~*", "+@all"]);
    fence(ask!(redis, "LOCK.ACQUIRE", "k", "holder", LONG));
    let mut waiters: Vec<Waiter> = ["first", "second"]
        .iter()
        .map(|owner| {
            let mut waiter = Waiter::on(limited_to(&server, owner, &["~k", "+lock.acquire"]));
            waiter.ask("k", owner, LONG, LONG);
            waiter
        })
        .collect();
    eventually_wait(&mut redis, 2);
    let first = queue(&mut redis, "k").remove(0);
    if first != "first" {
        waiters.reverse();
    }
    assert_eq!(ask!(redis, "ACL", "SETUSER", "default", "reset"), OK);

    // From a timer, by nobody's command: a lease that ends, and a key that others delete.
    assert_eq!(ask!(redis, "PEXPIRE", "k", 1), YES);
    fence(waiters[0].reply());
    assert_eq!(ask!(redis, "DEL", "k"), YES);
    fence(waiters[1].reply());
}

#[test]
fn access_is_limited_by_command() {
    let server = Server::start();
    let mut redis = limited_to(&server, "limited", &["~*", "+lock.acquire", "+lock.info"]);

    fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", LONG));
    ask!(redis, "LOCK.INFO", "k").unwrap();
    assert_no_permission(ask!(redis, "LOCK.RENEW", "k", "alice", LONG));
    assert_no_permission(ask!(redis, "LOCK.RELEASE", "k", "alice"));
    assert_no_permission(ask!(redis, "SET", "k", "x"));
}

#[test]
fn access_is_limited_by_key_pattern() {
    let server = Server::start();
    let mut redis = limited_to(&server, "limited", &["~locks:*", "+@all"]);

    fence(ask!(redis, "LOCK.ACQUIRE", "locks:k", "alice", LONG));
    assert_eq!(ask!(redis, "LOCK.RENEW", "locks:k", "alice", LONG), YES);
    assert_eq!(ask!(redis, "LOCK.RELEASE", "locks:k", "alice"), YES);
    assert_eq!(ask!(redis, "LOCK.INFO", "locks:k"), NULL);

    assert_no_permission(ask!(redis, "LOCK.ACQUIRE", "other", "alice", LONG));
    assert_no_permission(ask!(redis, "LOCK.RENEW", "other", "alice", LONG));
    assert_no_permission(ask!(redis, "LOCK.RELEASE", "other", "alice"));
    assert_no_permission(ask!(redis, "LOCK.INFO", "other"));
}

#[test]
fn whoever_may_only_read_a_key_may_only_ask_for_its_info() {
    let server = Server::start();
    let mut redis = limited_to(&server, "limited", &["%R~*", "+@all"]);

    assert_eq!(ask!(redis, "LOCK.INFO", "k"), NULL);
    assert_no_permission(ask!(redis, "LOCK.ACQUIRE", "k", "alice", LONG));
    assert_no_permission(ask!(redis, "LOCK.RENEW", "k", "alice", LONG));
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
        return skip("no module has an ACL category of its own before Redis 7.4 and Valkey 8");
    }

    let mut redis = limited_to(&server, "limited", &["~*", "+@lock"]);
    fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", LONG));
    assert_eq!(ask!(redis, "LOCK.RENEW", "k", "alice", LONG), YES);
    ask!(redis, "LOCK.INFO", "k").unwrap();
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "alice"), YES);
    assert_no_permission(ask!(redis, "SET", "k", "x"));
}

#[test]
fn the_commands_are_in_the_categories_of_redis_where_those_of_a_module_can_be() {
    let server = Server::start();
    let mut reader = limited_to(&server, "reader", &["~*", "+@read"]);
    if !is_at_least(&mut server.connect(), (7, 2), (7, 2)) {
        assert_no_permission(ask!(reader, "LOCK.INFO", "k"));
        return skip("no command of a module is in an ACL category before 7.2");
    }

    assert_eq!(ask!(reader, "LOCK.INFO", "k"), NULL);
    assert_no_permission(ask!(reader, "LOCK.ACQUIRE", "k", "alice", LONG));
    assert_no_permission(ask!(reader, "LOCK.RENEW", "k", "alice", LONG));
    assert_no_permission(ask!(reader, "LOCK.RELEASE", "k", "alice"));

    let mut writer = limited_to(&server, "writer", &["~*", "+@write"]);
    fence(ask!(writer, "LOCK.ACQUIRE", "k", "alice", LONG));
    assert_eq!(ask!(writer, "LOCK.RENEW", "k", "alice", LONG), YES);
    assert_eq!(ask!(writer, "LOCK.RELEASE", "k", "alice"), YES);
    assert_no_permission(ask!(writer, "LOCK.INFO", "k"));

    let mut hasty = limited_to(&server, "hasty", &["~*", "+@fast", "-@blocking"]);
    assert_no_permission(ask!(hasty, "LOCK.ACQUIRE", "k", "alice", LONG));
    assert_eq!(ask!(hasty, "LOCK.RENEW", "k", "alice", LONG), NULL);
    assert_eq!(ask!(hasty, "LOCK.RELEASE", "k", "alice"), NULL);
    assert_eq!(ask!(hasty, "LOCK.INFO", "k"), NULL);
}
