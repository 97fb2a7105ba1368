//! How those who wait leave the queue, and that nobody who has left is granted, nor two for one lock.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use redis::{Connection, Value, pipe};
use testkit::waiting::*;
use testkit::*;

#[test]
fn a_wait_ends_by_its_timer_and_not_earlier_than_asked() {
    let server = with_a_slow_cron().start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut waiter = Waiter::of(&server);
    let mut timeouts = 0;
    for wait in [1, 20, 55] {
        assert_woken(&format!("after WAIT {wait}"), || {
            let start = Instant::now();
            waiter.ask("k", "waiter", LONG, wait);
            assert_eq!(waiter.reply(), NULL);
            timeouts += 1;
            let lateness = start
                .elapsed()
                .checked_sub(Duration::from_millis(wait as u64));
            lateness.expect("not earlier than asked")
        });
    }
    assert_eq!(gauge(&mut redis, "wait_timeouts_total"), timeouts);
    assert_never_granted(&mut redis, waiter);
}

/// The lock, which "holder" has and for which one waited that has left, goes to nobody.
#[track_caller]
fn assert_never_granted(redis: &mut Connection, mut left: Waiter) {
    assert_eq!(waiters(redis, "k"), 0);
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "holder"), YES);
    assert_eq!(ask!(redis, "LOCK.INFO", "k"), NULL);
    left.assert_no_more_replies();
}

#[test]
fn an_owner_that_releases_gives_up_its_place_whoever_holds_the_lock() {
    let server = Server::start();
    let mut redis = server.connect();

    // Another holds it.
    hold(&mut redis, "k");
    let mut waiter = join(&server, "k", "waiter");
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "waiter"), NO);
    assert_eq!(waiter.reply(), NULL);
    assert_never_granted(&mut redis, waiter);

    // Nobody does, and nobody was served yet.
    hold(&mut redis, "k");
    let mut waiter = join(&server, "k", "waiter");
    let mut second = join(&server, "k", "second");
    let (_, released): (i64, Option<i64>) = pipe()
        .atomic()
        .cmd("DEL")
        .arg("k")
        .cmd("LOCK.RELEASE")
        .arg(&["k", "waiter"])
        .query(&mut redis)
        .unwrap();
    assert_eq!(released, None);
    assert_eq!(waiter.reply(), NULL);
    fence(second.reply());

    // The key is of another type.
    assert_eq!(ask!(redis, "DEL", "k"), YES);
    hold(&mut redis, "k");
    let mut waiter = join(&server, "k", "waiter");
    pipeline("MULTI; DEL k; RPUSH k x; EXEC")
        .exec(&mut redis)
        .unwrap();
    assert_eq!(error(ask!(redis, "LOCK.RELEASE", "k", "waiter")), WRONGTYPE);
    assert_eq!(waiter.reply(), NULL);
    assert_eq!(gauge(&mut redis, "waiters"), 0);
}

#[test]
fn an_owner_that_releases_elsewhere_keeps_its_place_here() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut waiter = join(&server, "k", "waiter");

    assert_eq!(ask!(redis, "LOCK.RELEASE", "other", "waiter"), NULL);
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "another"), NO);

    assert_eq!(queue(&mut redis, "k"), ["waiter"]);
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "holder"), YES);
    fence(waiter.reply());
}

#[test]
fn client_unblock_ends_a_wait_with_null_or_an_error() {
    let server = Server::start();
    let mut redis = server.connect();
    let works = may_be_unblocked(&mut redis);
    for how in ["TIMEOUT", "ERROR"] {
        hold(&mut redis, "k");
        let mut waiter = join(&server, "k", "waiter");

        let unblocked = ask!(redis, "CLIENT", "UNBLOCK", waiter.id, how);

        if !works {
            assert_eq!(unblocked, NO);
            assert_eq!(queue(&mut redis, "k"), ["waiter"]);
            assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "waiter"), NO);
        } else {
            assert_eq!(unblocked, YES);
        }
        match waiter.reply() {
            Err(error) if works && how == "ERROR" => {
                assert_eq!(error, "UNBLOCKED client unblocked via CLIENT UNBLOCK");
            }
            reply => assert_eq!(reply, NULL),
        }
        assert_never_granted(&mut redis, waiter);
    }
}

/// Redis 7.0 lets such a client go without any answer, and its next reply would be taken for it: its
/// connection is closed instead. Later servers answer.
#[test]
fn client_unblock_in_the_turn_of_the_grant_leaves_nobody_unanswered() {
    let server = Server::start();
    let mut redis = server.connect();
    for how in ["TIMEOUT", "ERROR"] {
        hold(&mut redis, "k");
        let mut waiter = join(&server, "k", "waiter");
        let unblock = format!("LOCK.RELEASE k holder; CLIENT UNBLOCK {} {how}", waiter.id);
        pipeline(&unblock).exec(&mut redis).unwrap();
        let answer = waiter.reply();
        if matches!(answer, Ok(Value::Int(_))) {
            assert_eq!(owner(&mut redis, "k").as_deref(), Some("waiter"));
        } else {
            eventually("the grant is taken back", || {
                ask!(redis, "LOCK.INFO", "k") == NULL
            });
        }
        ask!(redis, "DEL", "k").unwrap();
    }
}

#[test]
fn a_waiter_whose_connection_ends_is_out_of_the_queue() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut killed = join(&server, "k", "killed");
    let closed = join(&server, "k", "closed");
    let mut last = join(&server, "k", "last");

    assert_eq!(ask!(redis, "CLIENT", "KILL", "ID", killed.id), YES);
    eventually("the killed one is out", || {
        queue(&mut redis, "k") == ["closed", "last"]
    });
    assert!(killed.is_closed());
    drop(closed);
    eventually("the closed one is out", || {
        queue(&mut redis, "k") == ["last"]
    });

    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "holder"), YES);
    fence(last.reply());
    assert_eq!(gauge(&mut redis, "waiters_gone_total"), 2);
    assert_eq!(gauge(&mut redis, "grants_taken_back_total"), 0);
}

#[test]
fn when_all_but_the_last_of_a_hundred_are_killed_the_last_is_granted_at_once() {
    let server = with_a_slow_cron().start();
    let mut redis = server.connect();
    assert_woken("after the release, with 99 of 100 dead", || {
        hold(&mut redis, "k");
        let mut processes: Vec<_> = (0..99)
            .map(|n| {
                Command::new("redis-cli")
                    .arg("-s")
                    .arg(server.socket())
                    .args([
                        "LOCK.ACQUIRE",
                        "k",
                        &format!("{n}"),
                        "60000",
                        "WAIT",
                        "60000",
                    ])
                    .stdout(Stdio::null())
                    .spawn()
                    .unwrap()
            })
            .collect();
        eventually_wait(&mut redis, 99);
        let mut last = join(&server, "k", "last");

        for process in &mut processes {
            process.kill().unwrap();
        }
        for process in &mut processes {
            process.wait().unwrap();
        }
        let start = Instant::now();
        assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "holder"), YES);
        fence(last.reply());
        let lateness = start.elapsed();
        assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "last"), YES);
        lateness
    });
}

/// How many rounds the slow tests go: many more with LOCKKEEPER_TEST_LONG set.
fn rounds(usual: usize, long: usize) -> usize {
    match std::env::var_os("LOCKKEEPER_TEST_LONG") {
        Some(_) => long,
        None => usual,
    }
}

/// "k" was granted to "first", whose connection was killed before it was notified; "second" waits.
struct Unconfirmed {
    first: Waiter,
    second: Waiter,
}

impl Unconfirmed {
    /// In one read of the server: the grant, the end of the connection that it goes to, and `then`, whose
    /// replies `actor` gets next.
    fn grant(
        server: &Server,
        redis: &mut Connection,
        actor: &mut Waiter,
        then: &str,
    ) -> Unconfirmed {
        hold(redis, "k");
        let [first, second] = ["first", "second"].map(|owner| join(server, "k", owner));
        let id = first.id;
        actor.send_all(&pipeline(&format!(
            "LOCK.RELEASE k holder; CLIENT KILL ID {id}{then}"
        )));
        Unconfirmed { first, second }
    }
}

#[test]
fn a_grant_to_a_client_that_was_gone_goes_to_the_next() {
    let server = Server::start();
    let mut redis = server.connect();
    let mut actor = Waiter::of(&server);
    let count = rounds(200, 1_000);
    for _ in 0..count {
        let mut grant = Unconfirmed::grant(&server, &mut redis, &mut actor, "");

        assert_eq!([actor.reply(), actor.reply()], [YES, YES]);
        assert!(grant.first.is_closed());
        let fence = fence(grant.second.reply());
        assert_eq!(ask!(redis, "GET", "k"), text(lock_value(fence, "second")));
        assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "second"), YES);
    }
    assert_eq!(gauge(&mut redis, "grants_taken_back_total"), count as i64);
}

#[test]
fn a_grant_to_the_only_client_that_was_gone_frees_the_key() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let waiter = join(&server, "k", "waiter");

    pipeline(&format!(
        "LOCK.RELEASE k holder; CLIENT KILL ID {}",
        waiter.id
    ))
    .exec(&mut redis)
    .unwrap();

    eventually("the key is free", || ask!(redis, "EXISTS", "k") == NO);
    assert_eq!(gauge(&mut redis, "grants_taken_back_total"), 1);
}

#[test]
fn an_unconfirmed_grant_is_kept_when_its_owner_sends_a_command_at_once() {
    let server = Server::start();
    let mut redis = server.connect();
    let mut actor = Waiter::of(&server);
    for _ in 0..rounds(100, 1_000) {
        for command in ["LOCK.ACQUIRE", "LOCK.RENEW"] {
            // As if the owner came back on a connection that is read in the same turn of the loop.
            let command = format!("; {command} k first 100000");
            let mut grant = Unconfirmed::grant(&server, &mut redis, &mut actor, &command);

            assert_eq!([actor.reply(), actor.reply()], [YES, YES]);
            let answer = number(actor.reply());
            assert!(answer > 0, "{command}: {answer}");
            // Whatever was to be taken back has been by now: a waiter of a later turn is served.
            let mut delay = Waiter::of(&server);
            delay.ask("k", "delay", LONG, 2);
            assert_eq!(delay.reply(), NULL);
            assert_eq!(owner(&mut redis, "k").as_deref(), Some("first"));
            assert_eq!(queue(&mut redis, "k"), ["second"]);
            assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "first"), YES);
            fence(grant.second.reply());
            assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "second"), YES);
        }
    }
    assert_eq!(gauge(&mut redis, "grants_taken_back_total"), 0);
}

#[test]
fn of_the_owner_of_an_unconfirmed_grant_and_the_next_in_the_queue_exactly_one_is_granted() {
    let server = Server::start();
    let mut redis = server.connect();
    let mut actor = Waiter::of(&server);
    let mut returned = Waiter::of(&server);
    let (mut to_first, mut to_second) = (0, 0);
    for round in 0..rounds(300, 1_000) as u64 {
        let mut grant = Unconfirmed::grant(&server, &mut redis, &mut actor, "");

        // The owner asks again on another connection, more or less before the grant is taken back.
        let start = Instant::now();
        while start.elapsed() < Duration::from_micros(round % 50 * 2) {}
        returned.send(redis::cmd("LOCK.ACQUIRE").arg(&["k", "first", "100000"]));

        assert_eq!([actor.reply(), actor.reply()], [YES, YES]);
        let answer = returned.reply();
        if answer == NULL {
            to_second += 1;
            fence(grant.second.reply());
            assert_eq!(owner(&mut redis, "k").as_deref(), Some("second"));
        } else {
            to_first += 1;
            fence(answer);
            assert_eq!(owner(&mut redis, "k").as_deref(), Some("first"));
            assert_eq!(queue(&mut redis, "k"), ["second"]);
            assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "first"), YES);
            fence(grant.second.reply());
        }
        assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "second"), YES);
        grant.second.assert_no_more_replies();
    }
    println!("granted: the owner {to_first} times, the next {to_second} times");
    assert_eq!(gauge(&mut redis, "grants_taken_back_total"), to_second);
    assert!(to_first > 0 && to_second > 0, "no race");
}

/// Rounds in which a wait ends and the lock is released at the same instant.
struct Instants {
    waiter: Waiter,
    key: String,
    /// How long after the waiter's question the release is sent; drifts to where both are as likely.
    release_after: Duration,
    granted: usize,
    timed_out: usize,
}

const WAIT: Duration = Duration::from_millis(10);

#[test]
fn when_a_wait_ends_as_the_lock_is_released_there_is_one_answer_and_it_is_true() {
    let server = Server::start();
    let mut redis = server.connect();
    let mut all: Vec<Instants> = (0..200)
        .map(|n| Instants {
            waiter: Waiter::of(&server),
            key: format!("k{n}"),
            release_after: WAIT,
            granted: 0,
            timed_out: 0,
        })
        .collect();
    let mut holder = Waiter::of(&server);
    for _ in 0..rounds(100, 1_000) {
        for Instants { key, .. } in &all {
            holder.send(redis::cmd("LOCK.ACQUIRE").arg(&[key, "holder", "600000"]));
        }
        for _ in &all {
            fence(holder.reply());
        }
        let asked: Vec<Instant> = all
            .iter_mut()
            .map(|Instants { waiter, key, .. }| {
                waiter.ask(key, "waiter", LONG, WAIT.as_millis() as i64);
                Instant::now()
            })
            .collect();
        for (
            Instants {
                key, release_after, ..
            },
            asked,
        ) in all.iter().zip(asked)
        {
            // The one thing here that is timed is the coincidence.
            std::thread::sleep((asked + *release_after).saturating_duration_since(Instant::now()));
            holder.send(redis::cmd("LOCK.RELEASE").arg(&[key, "holder"]));
        }
        for instants in &mut all {
            assert_eq!(holder.reply(), YES);
            let reply = instants.waiter.reply();
            let value = ask!(redis, "GET", &instants.key);
            let step = Duration::from_micros(50);
            if reply == NULL {
                assert_eq!(value, NULL, "who got null does not own the key");
                instants.timed_out += 1;
                instants.release_after = instants.release_after.saturating_sub(step);
            } else {
                assert_eq!(value, text(lock_value(fence(reply), "waiter")));
                instants.granted += 1;
                instants.release_after += step;
                let released = ask!(redis, "LOCK.RELEASE", &instants.key, "waiter");
                assert_eq!(released, YES);
            }
        }
    }
    let granted: usize = all.iter().map(|instants| instants.granted).sum();
    let timed_out: usize = all.iter().map(|instants| instants.timed_out).sum();
    println!("granted {granted} times, timed out {timed_out} times");
    assert!(
        granted.min(timed_out) * 10 > granted + timed_out,
        "no coincidence"
    );
    for mut instants in all {
        instants.waiter.assert_no_more_replies();
    }
    assert_eq!(gauge(&mut redis, "waiters"), 0);
}

/// A client of a user of its own, "u", that is in the queue for "k" when this returns.
fn join_as_user(server: &Server, owner: &str) -> Waiter {
    let mut redis = server.connect();
    assert_eq!(ask!(redis, "AUTH", "u", "secret"), OK);
    let mut waiter = Waiter::on(redis);
    waiter.ask("k", owner, LONG, LONG);
    let mut redis = server.connect();
    eventually(format!("{owner} is in the queue"), || {
        queue(&mut redis, "k").iter().any(|name| name == owner)
    });
    waiter
}

const USER: &[&str] = &["on", ">secret", "~*", "+@all"];

/// The server sends nothing more to a connection that it is about to close, whatever closes it, and whether
/// the grant comes before or after that in the same turn of its loop.
#[test]
fn a_grant_to_a_client_that_is_being_closed_goes_to_the_next() {
    let server = Server::start();
    let mut redis = server.connect();
    for commands in [
        "MULTI; ACL DELUSER u; LOCK.RELEASE k holder; EXEC",
        "MULTI; LOCK.RELEASE k holder; ACL DELUSER u; EXEC",
        // An ACQUIRE that serves the first in the queue.
        "MULTI; ACL DELUSER u; DEL k; LOCK.ACQUIRE k late 1000; EXEC",
        "MULTI; DEL k; LOCK.ACQUIRE k late 1000; ACL DELUSER u; EXEC",
        // The timer, which is due when the server has slept.
        "DEL k; DEBUG SLEEP 0.03; ACL DELUSER u",
    ] {
        assert_eq!(ask!(redis, "ACL", "SETUSER", "u", USER), OK);
        hold(&mut redis, "k");
        let mut first = join_as_user(&server, "first");
        let mut second = join(&server, "k", "second");

        pipeline(commands).exec(&mut redis).unwrap();

        assert!(first.is_closed(), "{commands}");
        let fence = fence(second.reply());
        assert_eq!(ask!(redis, "GET", "k"), text(lock_value(fence, "second")));
        assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "second"), YES);
        assert_eq!(ask!(redis, "LOCK.INFO", "k"), NULL);
    }
}

/// As another module may do it from its own listener.
#[test]
fn a_grant_to_a_client_that_is_closed_in_the_middle_of_it_goes_to_the_next() {
    let (release, by_timer) = ("LOCK.RELEASE k holder", "DEL k");
    let by_acquire = "DEL k; LOCK.ACQUIRE k late 1000";
    let twice = "MULTI; LOCK.RELEASE k holder; LOCK.RELEASE k first; EXEC";
    let at_the_end = "PEXPIRE k 20";
    for (event, operations) in [
        (
            "set",
            &[release, twice, by_acquire, by_timer, at_the_end][..],
        ),
        ("expire", &[release, twice, by_acquire, by_timer]),
        // Just before the grant, as the server finds for us that the key has ended.
        ("expired", &[at_the_end]),
    ] {
        let killer = killer().to_str().unwrap();
        let server = Server::with(&["--loadmodule", killer, event, "u"]);
        let mut redis = server.connect();
        assert_eq!(ask!(redis, "ACL", "SETUSER", "u", USER), OK);
        for operation in operations {
            hold(&mut redis, "k");
            let mut killed = ["first", "second"].map(|owner| join_as_user(&server, owner));
            let mut last = join(&server, "k", "last");

            pipeline(operation).exec(&mut redis).unwrap();

            let fence = fence(last.reply());
            let value = text(lock_value(fence, "last"));
            assert_eq!(ask!(redis, "GET", "k"), value, "{event}: {operation}");
            assert!(killed.iter_mut().all(Waiter::is_closed));
            assert_eq!(gauge(&mut redis, "waiters"), 0);
            assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "last"), YES);
            assert_eq!(ask!(redis, "LOCK.INFO", "k"), NULL);
        }
    }
}

#[test]
fn an_unconfirmed_grant_passes_by_whoever_is_being_closed() {
    let server = Server::start();
    let mut redis = server.connect();
    let mut actor = Waiter::of(&server);
    assert_eq!(ask!(redis, "ACL", "SETUSER", "u", USER), OK);
    hold(&mut redis, "k");
    let first = join(&server, "k", "first");
    let _doomed = [join_as_user(&server, "a"), join_as_user(&server, "b")];
    let mut last = join(&server, "k", "last");

    // The take-back comes after this read of the server, and so does the rest of what is sent.
    let (kill, id) = ("LOCK.RELEASE k holder; CLIENT KILL ID", first.id);
    actor.send_all(&pipeline(&format!("{kill} {id}; ACL DELUSER u")));

    let fence = fence(last.reply());
    assert_eq!(ask!(redis, "GET", "k"), text(lock_value(fence, "last")));
}

#[test]
fn a_grant_to_a_client_whose_user_another_connection_takes_away_goes_to_the_next() {
    let users = tempfile::NamedTempFile::new().unwrap();
    let path = users.path().to_str().unwrap();
    let everybody = "user default on nopass ~* &* +@all\n";
    std::fs::write(path, format!("{everybody}user u on >secret ~* &* +@all\n")).unwrap();
    let server = Server::with(&["--aclfile", path]);
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut first = join_as_user(&server, "first");
    let mut second = join(&server, "k", "second");
    std::fs::write(path, everybody).unwrap();

    // While the server sleeps both arrive, and are carried out in one turn of its loop.
    let mut sleeper = Waiter::of(&server);
    let mut actors = [Waiter::of(&server), Waiter::of(&server)];
    sleeper.send(&words("DEBUG SLEEP 0.2"));
    actors[0].send(&words("LOCK.RELEASE k holder"));
    actors[1].send(&words("ACL LOAD"));

    assert_eq!(actors[0].reply(), YES);
    assert_eq!(actors[1].reply(), OK);
    assert!(first.is_closed());
    let fence = fence(second.reply());
    assert_eq!(ask!(redis, "GET", "k"), text(lock_value(fence, "second")));
}

#[test]
fn a_grant_to_a_client_with_more_output_than_it_may_have_goes_to_the_next() {
    let server = Server::start();
    let mut redis = server.connect();
    let keys: Vec<String> = (0..100).map(|n| format!("{n:0500}")).collect();
    let mut listener = server.connect_resp3();
    assert_eq!(ask!(listener, "CLIENT", "TRACKING", "ON"), OK);
    ask!(listener, "MGET", &keys).unwrap();
    hold(&mut redis, "k");
    let mut first = Waiter::on(listener);
    first.ask("k", "first", LONG, LONG);
    eventually_wait(&mut redis, 1);
    let mut second = join(&server, "k", "second");
    let limit = ["client-output-buffer-limit", "normal 20000 0 0"];
    assert_eq!(ask!(redis, "CONFIG", "SET", &limit), OK);

    // The invalidations of those keys are more than it may be sent at once, before or after its grant.
    pipe()
        .atomic()
        .cmd("MSET")
        .arg(
            keys.iter()
                .flat_map(|key| [key.as_str(), ""])
                .collect::<Vec<_>>(),
        )
        .cmd("LOCK.RELEASE")
        .arg(&["k", "holder"])
        .exec(&mut redis)
        .unwrap();

    let fence = fence(second.reply());
    assert_eq!(ask!(redis, "GET", "k"), text(lock_value(fence, "second")));
    drop(first);
}

/// On Valkey since 8.1 that goes through all clients.
#[test]
fn no_list_of_clients_is_asked_for_a_grant_to_who_gets_nothing_but_replies() {
    let server = Server::start();
    let mut redis = server.connect();
    assert_eq!(ask!(redis, "ACL", "SETUSER", "u", USER), OK);
    for user in [false, true] {
        hold(&mut redis, "k");
        let mut waiter = match user {
            true => join_as_user(&server, "waiter"),
            false => join(&server, "k", "waiter"),
        };
        assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "holder"), YES);
        fence(waiter.reply());
        assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "waiter"), YES);
    }
    let stats: String = redis::cmd("INFO")
        .arg("commandstats")
        .query(&mut redis)
        .unwrap();
    assert!(!stats.contains("client|list"), "{stats}");
}
