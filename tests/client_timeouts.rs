//! A client library has time-outs of its own. One that is longer than the wait leaves a client in line;
//! a shorter one costs it its place.

use std::thread;

use testkit::waiting::*;
use testkit::*;

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
        let patient = threads.spawn(move || python(&["patient.py", &port, timeout]));
        eventually_wait(&mut redis, 1);
        let behind = join(&server, "k", "behind");
        until(&mut redis, &patient);
        assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "holder"), YES);
        (behind, patient.join().unwrap())
    });
    (server, behind, report)
}

#[test]
fn in_redis_py_a_socket_timeout_longer_than_the_wait_keeps_the_place() {
    let (server, _behind, report) = wait_in_redis_py("90", |redis, _| {
        eventually("it has waited a second", || {
            gauge(redis, "oldest_waiter_ms") >= 1_000
        });
        assert_eq!(queue(redis, "k"), ["patient", "behind"]);
    });

    let mut redis = server.connect();
    let fence: i64 = report.trim().parse().unwrap();
    assert_eq!(ask!(redis, "GET", "k"), text(lock_value(fence, "patient")));
    assert_eq!(queue(&mut redis, "k"), ["behind"]);
    assert_eq!(gauge(&mut redis, "waiters_gone_total"), 0);
}

#[test]
fn in_redis_py_a_socket_timeout_shorter_than_the_wait_costs_the_place_and_leaves_no_lock_behind() {
    let (server, mut behind, report) = wait_in_redis_py("0.1", |redis, patient| {
        eventually("it asks again, at the end of the line", || {
            queue(redis, "k") == ["behind", "patient"]
        });
        eventually("it has given up", || patient.is_finished());
        eventually("it is out of the line", || queue(redis, "k") == ["behind"]);
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
