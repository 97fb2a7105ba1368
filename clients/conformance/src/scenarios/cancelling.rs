//! What is cancelled, at whatever moment, leaves nothing behind.

use std::time::Duration;

use serde_json::json;
use testkit::proxy::Proxy;
use testkit::{NO, Server, YES, ask, eventually, fence};

use super::{calls, connections, eventually_free, eventually_waiting, exists, ms, sleep};
use crate::agent::Kind;

pub fn what_was_granted_to_nobody_is_released(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let proxy = Proxy::to(&server);
    let client = agent.open(&proxy);
    client.connect();
    proxy.swallow_replies();
    let asked = client.acquire("book").ttl(600_000).begin();
    eventually("it is granted unheard", || exists(&server, "book"));
    asked.cancel();
    assert_eq!(asked.answer(), "cancelled");
    eventually_free(&server, "book");
}

pub fn a_cancelled_request_that_arrives_late_leaves_no_lock(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let proxy = Proxy::to(&server);
    let client = agent.open(&proxy);
    client.connect();
    proxy.stop_old_connections();
    let requests = proxy.requests();
    let asked = client.acquire("book").ttl(600_000).begin();
    eventually("it is on its way", || proxy.requests() > requests);
    asked.cancel();
    assert_eq!(asked.answer(), "cancelled");
    // What is released over a new connection comes before it.
    sleep(300);
    proxy.mend();
    eventually("it arrives", || calls(&server, "lock.acquire") > 0);
    eventually_free(&server, "book");
}

pub fn a_try_that_is_cancelled_at_any_moment_leaves_nothing(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let client = agent.open(&server);
    client.connect();
    let mut granted = Vec::new();
    for micros in (0..3000).step_by(15) {
        let asked = client.acquire(&format!("book:{micros}")).ttl(600_000);
        let asked = asked.begin().cancel_after(Duration::from_micros(micros));
        if asked.answer() == "yes" {
            granted.push(asked.held());
        }
    }
    for held in granted {
        assert_eq!(held.release(), "yes");
    }
    agent.settled();
    let mut redis = server.connect();
    eventually("no key is left", || ask!(redis, "DBSIZE") == NO);
    assert!(calls(&server, "lock.acquire") > 0, "some were sent before");
}

pub fn a_wait_that_is_cancelled_leaves_no_place_in_the_queue(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let client = agent.open(&server);
    let held = client.hold("book", 600_000);
    for _ in 0..5 {
        let waiting = client.wait_for("book", 600_000, 60_000);
        eventually_waiting(&server, "book", 1);
        waiting.cancel();
        assert_eq!(waiting.answer(), "cancelled");
        eventually_waiting(&server, "book", 0);
    }
    assert_eq!(held.release(), "yes");
    assert!(!exists(&server, "book"), "nobody was granted");
}

pub fn a_wait_that_is_cancelled_at_any_moment_leaves_nothing(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let client = agent.open(&server);
    let held = client.hold("book", 600_000);
    for micros in (0..6000).step_by(60) {
        let asked = client.wait_for("book", 600_000, 60_000);
        let asked = asked.cancel_after(Duration::from_micros(micros));
        assert_eq!(asked.answer(), "cancelled");
    }
    agent.settled();
    eventually_waiting(&server, "book", 0);
    assert_eq!(held.release(), "yes");
    let mut redis = server.connect();
    eventually("no key is left", || ask!(redis, "DBSIZE") == NO);
    eventually("connections are closed", || connections(&server) <= 4);
}

pub fn a_cancelled_wait_is_released_however_late_its_request_arrives(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let proxy = Proxy::to(&server);
    let client = agent.open(&proxy);
    client.connect();
    // On the way of the waits, not of what goes over the connection that is there.
    proxy.delay_requests_of_new_connections(ms(20));
    let mut holder = server.connect();
    let before = connections(&server);
    for moment in 0..10 {
        fence(ask!(holder, "LOCK.ACQUIRE", "book", "holder", 60_000));
        let waiting = client.wait_for("book", 600_000, 20_000);
        sleep(12 * moment);
        waiting.cancel();
        assert_eq!(ask!(holder, "LOCK.RELEASE", "book", "holder"), YES);
        if waiting.answer() == "yes" {
            // It was faster than the cancellation.
            assert_eq!(waiting.held().release(), "yes");
        }
        agent.settled();
        // By then everything that was sent has arrived.
        eventually("the connection of the wait is closed", || {
            connections(&server) <= before
        });
        assert!(!exists(&server, "book"), "after {moment} × 12 ms");
    }
}

pub fn a_release_that_is_cancelled_at_any_moment_is_carried_out(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let client = agent.open(&server);
    for micros in (0..1000).step_by(20) {
        let held = client.hold("book", 600_000);
        let releasing = held.begin("release", json!({}));
        let releasing = releasing.cancel_after(Duration::from_micros(micros));
        let answer = releasing.answer();
        assert!(answer == "yes" || answer == "cancelled", "{answer:?}");
        eventually_free(&server, "book");
    }
}
