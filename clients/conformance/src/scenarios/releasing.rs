//! How a lock is given up, and how a body that runs under one ends.

use std::time::Instant;

use serde_json::json;
use testkit::proxy::Proxy;
use testkit::{Server, YES, ask, eventually, number};

use super::{
    calls, eventually_free, eventually_renewed, eventually_waiting, exists, ms, renewals, sleep,
};
use crate::agent::Kind;

pub fn nothing_is_renewed_after_the_release(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let held = agent.open(&server).hold("book", 900);
    eventually_renewed(&server, 1);
    assert_eq!(held.release(), "yes");
    let renewals = renewals(&server);
    sleep(900);
    let since = super::renewals(&server) - renewals;
    assert_eq!(since, 0, "renewed after its release");
    assert_eq!(calls(&server, "lock.release"), 1);
}

pub fn a_lock_that_is_left_lapses_by_itself(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let held = agent.open(&server).hold("book", 600);
    assert_eq!(held.ask("leave"), "yes");
    let renewals = renewals(&server);
    eventually_free(&server, "book");
    assert_eq!(super::renewals(&server), renewals);
    assert_eq!(calls(&server, "lock.release"), 0);
}

pub fn release_after_keeps_the_lock_until_so_long_after_the_grant(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let client = agent.open(&server);
    let held = client.hold("minutely", 2000);
    assert_eq!(held.release_after(50_000), "yes", "it does not wait");
    let ttl = number(ask!(server.connect(), "PTTL", "minutely"));
    assert!((40_000..=50_000).contains(&ttl), "{ttl}");
    let held = client.hold("quick", 30_000);
    assert_eq!(held.release_after(0), "yes");
    assert!(!exists(&server, "quick"), "it was held as long as that");
}

pub fn a_dropped_handle_is_released(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let held = agent.open(&server).hold("book", 600_000);
    assert_eq!(held.ask("drop"), "yes");
    eventually_free(&server, "book");
    assert_eq!(held.times_lost(), 0);
}

pub fn a_release_is_tried_on_until_it_arrives(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let proxy = Proxy::to(&server);
    let held = agent.open(&proxy).hold("book", 60_000);
    proxy.cut();
    let (start, releasing) = (Instant::now(), held.begin("release", json!({})));
    // The caller is told first.
    assert_eq!(releasing.answer(), "unreachable");
    assert!(
        exists(&server, "book") && start.elapsed() < ms(6500),
        "{:?}",
        start.elapsed()
    );
    proxy.mend();
    eventually_free(&server, "book");
}

pub fn a_release_whose_reply_is_lost_is_a_release(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let proxy = Proxy::to(&server);
    let client = agent.open(&proxy);
    for _ in 0..3 {
        let held = client.hold("book", 6000);
        let releases = calls(&server, "lock.release");
        proxy.cut_at_next_reply();
        let releasing = held.begin("release", json!({}));
        eventually("it arrives", || calls(&server, "lock.release") > releases);
        proxy.mend();
        assert_eq!(releasing.answer(), "yes");
    }
}

pub fn a_release_that_nobody_answers_is_told_within_5_s(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let proxy = Proxy::to(&server);
    let held = agent.open(&proxy).hold("book", 600_000);
    proxy.stop();
    let start = Instant::now();
    assert_eq!(held.release(), "unreachable");
    assert!(start.elapsed() < ms(6500), "{:?}", start.elapsed());
    proxy.mend();
    eventually_free(&server, "book");
}

pub fn a_release_of_a_lost_lock_says_so_and_harms_nobody(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let proxy = Proxy::to(&server);
    let (near, far) = (agent.open(&server), agent.open(&proxy));
    let held = far.hold("book", 900);
    proxy.stop();
    let next = near.acquire("book").ttl(30_000).wait(20_000).held();
    assert_eq!(held.lost().0, "expired");
    proxy.mend();
    assert_eq!(held.release(), "lost: expired");
    agent.settled();
    assert_eq!(next.renew(), "yes");
    assert_eq!(next.release(), "yes");
}

pub fn settled_waits_for_what_was_given_up_before(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let proxy = Proxy::to(&server);
    let client = agent.open(&proxy);
    for _ in 0..5 {
        let held = client.hold("book", 60_000);
        proxy.delay_replies(ms(200));
        assert_eq!(held.ask("drop"), "yes");
        agent.settled();
        assert!(!exists(&server, "book"));
        proxy.mend();
    }
}

pub fn settled_does_not_wait_for_what_others_wait_for(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let client = agent.open(&server);
    let busy = client.hold("busy", 60_000);
    let waiting = client.acquire("busy").wait_forever().begin();
    eventually_waiting(&server, "busy", 1);
    assert_eq!(client.hold("book", 60_000).ask("drop"), "yes");
    agent.settled();
    assert!(!exists(&server, "book"));
    assert!(!waiting.is_answered());
    assert_eq!(busy.release(), "yes");
    assert_eq!(waiting.held().release(), "yes");
}

pub fn settled_is_bounded(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let proxy = Proxy::to(&server);
    let client = agent.open(&proxy);
    let held = client.hold("book", 60_000);
    assert_eq!(client.settled(0), "yes", "nothing was given up");
    proxy.stop();
    assert_eq!(held.ask("drop"), "yes");
    let start = Instant::now();
    assert_eq!(client.settled(300), "no");
    let took = start.elapsed();
    assert!(took >= ms(300) && took < ms(3000), "{took:?}");
    proxy.mend();
    agent.settled();
    assert!(!exists(&server, "book"));
}

pub fn run_holds_the_lock_while_the_body_runs(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let client = agent.open(&server);
    let running = client.run("book", "return", 500).begin();
    running.body("began");
    assert!(exists(&server, "book"));
    assert_eq!(
        client.run("book", "return", 0).answer(),
        "busy",
        "its body does not run"
    );
    assert_eq!(running.answer(), "yes");
    running.body("ended");
    assert!(!exists(&server, "book"));
}

pub fn the_error_of_the_body_wins_over_that_of_the_release(kind: &Kind) {
    let (mut server, agent) = (Server::start(), kind.start());
    let asked = agent.open(&server).run("book", "fail", 300);
    let running = asked.ttl(1500).begin();
    running.body("began");
    server.kill9();
    assert_eq!(running.answer(), "failed");
}

pub fn a_body_that_panics_releases(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let running = agent.open(&server).run("book", "panic", 0).begin();
    running.body("ended");
    assert_eq!(running.answer(), "failed");
    eventually_free(&server, "book");
}

pub fn a_body_is_told_that_the_lock_was_lost(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let running = agent.open(&server).run("book", "return", 300).begin();
    running.body("began");
    assert_eq!(ask!(server.connect(), "DEL", "book"), YES);
    assert_eq!(
        running.answer(),
        "lost: gone",
        "although it came to its end"
    );
}

pub fn a_body_is_ended_when_the_lock_is_lost(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let asked = agent.open(&server).run("book", "return", 600_000);
    let running = asked.ttl(900).begin();
    running.body("began");
    assert_eq!(ask!(server.connect(), "DEL", "book"), YES);
    running.body("ended");
    assert_eq!(running.answer(), "lost: gone");
}
