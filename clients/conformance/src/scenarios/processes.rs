//! The process that a helper lives in: it blocks, forks, is stopped, ends, and is killed.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;
use testkit::{NULL, Server, ask, eventually, fence, text};

use super::{calls, eventually_free, eventually_renewed, exists, ms, renewals, sleep};
use crate::agent::Kind;

pub fn code_that_blocks_loses_nothing(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let held = agent.open(&server).hold("book", 1500);
    for how in ["sleep", "cpu"] {
        let block = held.begin("block", json!({"ms": 2500, "how": how}));
        let block = block.answer();
        assert!(block.remaining() > Duration::ZERO, "{block:?}");
        assert!(block.0["lost"].is_null(), "{block:?}");
    }
    assert_eq!(held.release(), "yes");
    assert_eq!(held.times_lost(), 0);
}

pub fn a_forked_child_holds_nothing_and_leaves_its_parent_alone(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let held = agent.open(&server).hold("book", 1500);
    assert_eq!(held.ask("fork"), "yes");
    let child = agent.line("of its child", |line| line["event"] == "child");
    assert_eq!(child["remaining_us"], 0);
    assert!(child["lost"].is_string(), "{child}");
    assert_eq!(child["renew"], "forked");
    eventually_renewed(&server, 4);
    assert_eq!(calls(&server, "lock.release"), 0);
    assert_eq!(held.release(), "yes");
}

pub fn a_process_that_was_stopped_past_its_ttl_knows_at_once(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let mut redis = server.connect();
    let held = agent.open(&server).hold("book", 1000);
    agent.signal(Signal::STOP);
    let mut next = NULL;
    eventually("another takes over", || {
        next = ask!(redis, "LOCK.ACQUIRE", "book", "next", 60_000);
        next != NULL
    });
    let value = testkit::lock_value(fence(next), "next");
    // It finds the question when it wakes up, before its watchdog has asked anybody.
    let question = held.begin("remaining", json!({}));
    let renewals = renewals(&server);
    agent.signal(Signal::CONT);
    let answer = question.answer();
    let believed = answer.remaining();
    assert_eq!(believed, Duration::ZERO, "believed after its end");
    assert_eq!(answer.text("lost"), "expired");
    sleep(800);
    assert_eq!(
        super::renewals(&server),
        renewals,
        "a lost lock is not asked for"
    );
    assert_eq!(held.lost_now().as_deref(), Some("expired"));
    assert_eq!(held.remaining(), Duration::ZERO);
    assert_eq!(ask!(redis, "GET", "book"), text(value));
}

pub fn a_program_that_ends_releases_what_it_holds(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let client = agent.open(&server);
    let _one = client.hold("one", 600_000);
    let _other = client.hold("other", 600_000);
    agent.end();
    assert!(!exists(&server, "one") && !exists(&server, "other"));
}

pub fn a_killed_holder_blocks_others_for_one_ttl_and_no_longer(kind: &Kind) {
    let (server, killed, agent) = (Server::start(), kind.start(), kind.start());
    let _held = killed.open(&server).hold("book", 2000);
    let waiting = agent.open(&server).wait_for("book", 30_000, 25_000);
    super::eventually_waiting(&server, "book", 1);
    killed.kill9();
    let start = Instant::now();
    assert_eq!(waiting.held().release(), "yes");
    assert!(start.elapsed() < ms(4000), "{:?}", start.elapsed());
    eventually_free(&server, "book");
}
