//! Through a client library that is not ours, redis-py: the problem this project comes from, and time-outs
//! of its own. One that is longer than the wait leaves a client in the queue; a shorter one costs it its
//! turn.

use std::thread;

use testkit::waiting::*;
use testkit::*;

/// Runs a script of tests/python against a server of its own.
#[track_caller]
fn run(script: &str, options: &[&str]) -> String {
    let server = Server::start();
    let port = server.port().to_string();
    python(&[&[script, &port], options].concat())
}

/// What `lost_updates.py` reports: 8 processes × 200 changes of one number.
struct Report {
    lost: u32,
    killed: u32,
    stopped: u32,
    refused: u32,
}

#[track_caller]
fn lost_updates(options: &[&str]) -> Report {
    let report = run("lost_updates.py", options);
    let number = |name: &str| {
        let word = report
            .split_whitespace()
            .find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        word.unwrap_or_else(|| panic!("no {name} in {report}"))
            .parse()
            .unwrap()
    };
    assert_eq!(number("updates"), 8 * 200);
    Report {
        lost: number("lost"),
        killed: number("killed"),
        stopped: number("stopped"),
        refused: number("refused"),
    }
}

#[test]
fn without_a_lock_updates_are_lost() {
    assert!(lost_updates(&[]).lost > 0);
}

#[test]
fn with_the_lock_no_update_is_lost_though_holders_are_killed() {
    let report = lost_updates(&["lock", "kill"]);
    assert_eq!((report.lost, report.killed), (0, 3));
}

#[test]
fn a_holder_stopped_past_its_ttl_destroys_updates_if_the_storage_ignores_the_fence() {
    let report = lost_updates(&["lock", "stop"]);
    assert_eq!(report.stopped, 3);
    assert!(report.lost > 0);
}

#[test]
fn a_holder_stopped_past_its_ttl_harms_nothing_if_the_storage_checks_the_fence() {
    let report = lost_updates(&["lock", "fence", "stop", "kill"]);
    assert_eq!((report.lost, report.killed, report.stopped), (0, 3, 3));
    assert!(report.refused >= 3);
}

#[test]
fn of_two_requests_for_one_copy_one_has_to_wait_and_nobody_frees_the_lock_of_another() {
    assert_eq!(
        run("book_loan.py", &["lock"]).lines().collect::<Vec<_>>(),
        [
            "bob: borrowing in progress",
            "cyd: borrowing in progress",
            "ada: enjoy the book",
            "dan: no copy left",
            "borrowers: ada",
        ]
    );
}

#[test]
fn with_a_lock_by_set_and_del_the_second_frees_the_lock_of_the_first_and_one_copy_goes_twice() {
    assert_eq!(
        run("book_loan.py", &["by-hand"])
            .lines()
            .collect::<Vec<_>>(),
        [
            "bob: borrowing in progress",
            "cyd: enjoy the book",
            "ada: enjoy the book",
            "dan: no copy left",
            "borrowers: cyd ada",
        ]
    );
}

/// Whoever waits in redis-py with this socket timeout, and what becomes of it, while the lock is held and
/// another waits behind it; the lock is released when `until` holds.
fn wait_in_redis_py(
    timeout: &str,
    until: impl FnOnce(&mut redis::Connection, &thread::ScopedJoinHandle<String>),
) -> (Server, Waiter, String) {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let (behind, report) = thread::scope(|threads| {
        let port = server.port().to_string();
        let waiter = threads.spawn(move || python(&["long_wait.py", &port, timeout]));
        eventually_wait(&mut redis, 1);
        let behind = join(&server, "k", "behind");
        until(&mut redis, &waiter);
        assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "holder"), YES);
        (behind, waiter.join().unwrap())
    });
    (server, behind, report)
}

#[test]
fn in_redis_py_a_socket_timeout_longer_than_the_wait_keeps_the_place() {
    let (server, _behind, report) = wait_in_redis_py("90", |redis, _| {
        eventually("it has waited a second", || {
            gauge(redis, "oldest_waiter_ms") >= 1_000
        });
        assert_eq!(queue(redis, "k"), ["waiter", "behind"]);
    });

    let mut redis = server.connect();
    let fence: i64 = report.trim().parse().unwrap();
    assert_eq!(ask!(redis, "GET", "k"), text(lock_value(fence, "waiter")));
    assert_eq!(queue(&mut redis, "k"), ["behind"]);
    assert_eq!(gauge(&mut redis, "waiters_gone_total"), 0);
}

#[test]
fn in_redis_py_a_socket_timeout_shorter_than_the_wait_costs_the_place_and_leaves_no_lock_behind() {
    let (server, mut behind, report) = wait_in_redis_py("0.1", |redis, waiter| {
        eventually("it asks again, at the end of the queue", || {
            queue(redis, "k") == ["behind", "waiter"]
        });
        eventually("it has given up", || waiter.is_finished());
        eventually("it is out of the queue", || queue(redis, "k") == ["behind"]);
    });

    assert_eq!(report.trim(), "TimeoutError");
    fence(behind.reply());
    let mut redis = server.connect();
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "behind"), YES);
    assert_eq!(ask!(redis, "LOCK.INFO", "k"), NULL);
    let asked = gauge(&mut redis, "waiters_gone_total");
    println!("redis-py asked {asked} times");
    assert!(asked > 1);
}
