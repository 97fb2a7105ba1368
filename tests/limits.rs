//! How many may wait, draining the line, unloading with people in it, and that nothing is left behind.

use std::fs;

use redis::{Connection, pipe};
use testkit::waiting::*;
use testkit::*;

fn set_max_waiters(redis: &mut Connection, number: i64) {
    let set = ask!(redis, "CONFIG", "SET", "lockkeeper.max-waiters", number);
    assert_eq!(set, OK);
}

fn try_to_wait(redis: &mut Connection, owner: &str) -> Reply {
    ask!(redis, "LOCK.ACQUIRE", "k", owner, LONG, "WAIT", LONG)
}

#[test]
fn who_finds_the_line_full_is_told_so_at_once() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    hold(&mut redis, "other");
    set_max_waiters(&mut redis, 2);
    let mut first = join(&server, "k", "first");
    let _second = join(&server, "other", "second");

    // Over all keys.
    assert_eq!(
        error(try_to_wait(&mut redis, "third")),
        "QUEUEFULL lockkeeper.max-waiters is 2 and as many clients wait, try again later or raise it"
    );
    assert_eq!(gauge(&mut redis, "queue_full_total"), 1);
    assert_eq!(gauge(&mut redis, "waiters"), 2);
    assert!(info::<String>(&mut redis, "errorstats", "errorstat_QUEUEFULL").contains("count=1"));

    // One try is not refused, and who has a place keeps it.
    assert_eq!(ask!(redis, "LOCK.ACQUIRE", "k", "third", LONG), NULL);
    let mut again = Waiter::of(&server);
    again.ask("k", "first", LONG, LONG);
    assert_eq!(first.reply(), NULL);
    assert_eq!(queue(&mut redis, "k"), ["first"]);

    // Whoever leaves makes room.
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "holder"), YES);
    fence(again.reply());
    let _third = join(&server, "k", "third");
}

#[test]
fn a_crowd_for_one_key_leaves_room_for_the_others() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    hold(&mut redis, "other");
    let per_key = ["CONFIG", "SET", "lockkeeper.max-waiters-per-key", "2"];
    assert_eq!(ask!(redis, &per_key), OK);
    let mut first = join(&server, "k", "first");
    let _second = join(&server, "k", "second");

    assert_eq!(
        error(try_to_wait(&mut redis, "third")),
        "QUEUEFULL lockkeeper.max-waiters-per-key is 2 and as many clients wait for this key, try again \
         later or raise it"
    );
    assert_eq!(gauge(&mut redis, "queue_full_total"), 1);
    let _other = join(&server, "other", "third");
    // The same key of another database is another key.
    assert_eq!(ask!(redis, "SELECT", 1), OK);
    hold(&mut redis, "k");
    let mut elsewhere = server.connect();
    assert_eq!(ask!(elsewhere, "SELECT", 1), OK);
    let mut elsewhere = Waiter::on(elsewhere);
    elsewhere.ask("k", "third", LONG, LONG);
    eventually_wait(&mut redis, 4);
    assert_eq!(ask!(redis, "SELECT", 0), OK);

    // Who has a place keeps it, and whoever leaves makes room.
    let mut again = Waiter::of(&server);
    again.ask("k", "first", LONG, LONG);
    assert_eq!(first.reply(), NULL);
    assert_eq!(queue(&mut redis, "k"), ["first", "second"]);
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "holder"), YES);
    fence(again.reply());
    let _third = join(&server, "k", "third");
    assert_eq!(queue(&mut redis, "k"), ["second", "third"]);
}

#[test]
fn how_many_may_wait_is_set_in_redis_conf_and_by_config_set() {
    let conf = tempfile::NamedTempFile::new().unwrap();
    let seven = "lockkeeper.max-waiters 7\nlockkeeper.max-waiters-per-key 6\n";
    fs::write(&conf, seven).unwrap();
    let configured = Server::with(&["--include", conf.path().to_str().unwrap()]);
    for (server, all, of_key) in [(Server::start(), 1_000, 500), (configured, 7, 6)] {
        for (name, field, expected, too_few) in [
            ("lockkeeper.max-waiters", "max_waiters", all, "-1"),
            (
                "lockkeeper.max-waiters-per-key",
                "max_waiters_per_key",
                of_key,
                "0",
            ),
        ] {
            let mut redis = server.connect();
            let mut assert_setting = |expected: i64| {
                let setting: (String, i64) = redis::cmd("CONFIG")
                    .arg(&["GET", name])
                    .query(&mut redis)
                    .unwrap();
                assert_eq!(setting, (name.to_owned(), expected));
                assert_eq!(gauge(&mut redis, field), expected);
            };
            assert_setting(expected);
            let most = ask!(server.connect(), "CONFIG", "SET", name, 1_000_000);
            assert_eq!(most, OK);
            assert_setting(1_000_000);
            for wrong in [too_few, "1000001", "many"] {
                error(ask!(server.connect(), "CONFIG", "SET", name, wrong));
            }
            assert_setting(1_000_000);
        }
    }
}

#[test]
fn lowering_the_number_sends_nobody_away_who_waits() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut line = ["a", "b", "c"].map(|owner| join(&server, "k", owner));

    set_max_waiters(&mut redis, 1);

    assert_eq!(queue(&mut redis, "k"), ["a", "b", "c"]);
    assert!(error(try_to_wait(&mut redis, "d")).starts_with("QUEUEFULL "));
    let mut before = "holder";
    for (waiter, owner) in line.iter_mut().zip(["a", "b", "c"]) {
        assert_eq!(ask!(redis, "LOCK.RELEASE", "k", before), YES);
        fence(waiter.reply());
        before = owner;
    }
}

#[test]
fn a_server_is_drained_and_the_module_replaced_while_holders_keep_their_locks() {
    let server = Server::start();
    let mut redis = server.connect();
    for round in 0..3 {
        let fence = fence(ask!(redis, "LOCK.ACQUIRE", "k", "holder", LONG));
        let mut line = ["a", "b"].map(|owner| join(&server, "k", owner));
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
        for waiter in &mut line {
            assert_eq!(waiter.reply(), NULL);
        }
        assert!(error(try_to_wait(&mut redis, "c")).starts_with("QUEUEFULL "));
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

/// How many are answered in one turn of the server's loop.
const SHARE: i64 = 100;

#[test]
fn a_crowd_is_drained_a_share_at_a_time_and_the_module_can_be_unloaded_when_nobody_waits() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut crowd: Vec<Waiter> = (0..4 * SHARE)
        .map(|n| {
            let mut waiter = Waiter::of(&server);
            waiter.ask("k", &format!("{n}"), LONG, LONG);
            waiter
        })
        .collect();
    eventually_wait(&mut redis, 4 * SHARE);

    let (info,): (String,) = pipe()
        .atomic()
        .cmd("CONFIG")
        .arg(&["SET", "lockkeeper.max-waiters", "0"])
        .ignore()
        .cmd("INFO")
        .arg("lockkeeper")
        .query(&mut redis)
        .unwrap();
    let unloaded = ask!(redis, "MODULE", "UNLOAD", "lockkeeper");

    // Nobody is in line any more, and the first share has its answer.
    assert!(
        info.contains(&format!("lockkeeper_waiters:{}\r", 3 * SHARE)),
        "{info}"
    );
    assert!(info.contains("lockkeeper_contended_keys:0\r"), "{info}");
    if unloaded != OK {
        let refused = error(unloaded);
        assert!(
            refused.starts_with("ERR Error unloading module"),
            "{refused}"
        );
        eventually_wait(&mut redis, 0);
        assert_eq!(ask!(redis, "MODULE", "UNLOAD", "lockkeeper"), OK);
    }
    for waiter in &mut crowd {
        assert_eq!(waiter.reply(), NULL);
        waiter.assert_no_more_replies();
    }
}

#[test]
fn a_client_that_dies_while_its_crowd_is_drained_is_forgotten() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut crowd: Vec<Waiter> = (0..2 * SHARE)
        .map(|n| join_nth(&server, &mut redis, n))
        .collect();
    let last = crowd.pop().unwrap();

    let drain = "CONFIG SET lockkeeper.max-waiters 0";
    pipeline(&format!("MULTI; {drain}; CLIENT KILL ID {}; EXEC", last.id))
        .exec(&mut redis)
        .unwrap();

    for waiter in &mut crowd {
        assert_eq!(waiter.reply(), NULL);
    }
    eventually("the module is unloaded", || {
        ask!(redis, "MODULE", "UNLOAD", "lockkeeper") == OK
    });
}

/// The client that joins the queue of "k" behind so many.
fn join_nth(server: &Server, redis: &mut Connection, before: i64) -> Waiter {
    let mut waiter = Waiter::of(server);
    waiter.ask("k", &format!("{before}"), LONG, LONG);
    eventually_wait(redis, before + 1);
    waiter
}

#[test]
fn a_setting_that_is_refused_with_others_sends_nobody_away() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut waiter = join(&server, "k", "waiter");
    let busy = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let busy_port = busy.local_addr().unwrap().port().to_string();
    for other in [["port", &busy_port], ["maxmemory-policy", "nonsense"]] {
        for ours in ["lockkeeper.max-waiters", "lockkeeper.max-waiters-per-key"] {
            let number = if ours.ends_with("key") { "1" } else { "0" };
            for together in [
                [ours, number, other[0], other[1]],
                [other[0], other[1], ours, number],
            ] {
                let refused = error(ask!(redis, "CONFIG", "SET", &together));
                assert!(refused.starts_with("ERR CONFIG SET failed"), "{refused}");
                assert_eq!(queue(&mut redis, "k"), ["waiter"], "{together:?}");
            }
        }
    }
    assert_eq!(gauge(&mut redis, "max_waiters"), 1_000);
    assert_eq!(gauge(&mut redis, "max_waiters_per_key"), 500);
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "holder"), YES);
    fence(waiter.reply());
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

/// Resident memory of the server, in bytes.
fn resident(server: &Server) -> i64 {
    let status = fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS:"))
        .unwrap();
    let kib: i64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kib * 1024
}

/// Clients of a round of [`come_and_go`].
const CLIENTS: usize = 100;

/// A hundred wait for one lock, and each leaves in one of five ways, one of them with the lock.
fn come_and_go(server: &Server, redis: &mut Connection, line: &mut [Waiter]) {
    let unblock = may_be_unblocked(redis);
    hold(redis, "k");
    for (n, waiter) in line.iter_mut().enumerate() {
        let wait = if n % 5 == 0 { 1 } else { LONG };
        waiter.ask("k", &format!("{n}"), LONG, wait);
    }
    eventually_wait(redis, CLIENTS as i64 / 5 * 4);
    let mut leave = pipe();
    for (n, waiter) in line.iter().enumerate() {
        match n % 5 {
            1 if unblock => leave.cmd("CLIENT").arg("UNBLOCK").arg(waiter.id),
            1 | 2 => leave.cmd("LOCK.RELEASE").arg("k").arg(n),
            // The connection of every 50th is lost as well: connecting is slow.
            3 if n % 50 == 3 => leave.cmd("CLIENT").arg("KILL").arg("ID").arg(waiter.id),
            _ => continue,
        };
    }
    leave.cmd("LOCK.RELEASE").arg("k").arg("holder");
    for n in 0..CLIENTS {
        if n % 5 >= 3 && n % 50 != 3 {
            leave.cmd("LOCK.RELEASE").arg("k").arg(n);
        }
    }
    leave.query::<()>(redis).unwrap();
    for (n, waiter) in line.iter_mut().enumerate() {
        match n % 5 {
            3 if n % 50 == 3 => *waiter = Waiter::of(server),
            3 | 4 => drop(fence(waiter.reply())),
            _ => assert_eq!(waiter.reply(), NULL),
        }
    }
    assert_eq!(ask!(redis, "LOCK.INFO", "k"), NULL);
}

#[test]
fn a_hundred_thousand_who_came_and_went_leave_nothing_behind() {
    let server = Server::start();
    let mut redis = server.connect();
    let mut line: Vec<Waiter> = (0..CLIENTS).map(|_| Waiter::of(&server)).collect();
    let rounds = 100_000 / CLIENTS;
    let mut after_warm_up = 0;
    for round in 0..rounds {
        if round == rounds / 5 {
            after_warm_up = resident(&server);
        }
        come_and_go(&server, &mut redis, &mut line);
    }
    let grown = resident(&server) - after_warm_up;

    println!("resident memory grew by {grown} bytes in 80,000 waits");
    // The least that malloc gives takes 32 bytes; half of that, as it may settle in late.
    assert!(grown < 80_000 * 16, "{grown} bytes");
    assert_eq!(gauge(&mut redis, "waiters"), 0);
    assert_eq!(ask!(redis, "MODULE", "UNLOAD", "lockkeeper"), OK);
}
