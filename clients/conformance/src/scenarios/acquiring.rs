//! How a lock is asked for, and what the answer means.

use std::time::{Duration, Instant};

use serde_json::json;
use testkit::proxy::Proxy;
use testkit::{NO, Server, Setup, YES, ask, eventually, number};

use super::{
    calls, connections, ends_at, eventually_free, eventually_waiting, exists, lock_of, ms, renewals,
};
use crate::agent::{Kind, now_us};

pub fn a_lock_has_a_fence_that_grows_and_an_owner_of_its_own(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let client = agent.open_with(&server, json!({"label": "clerk"}));
    let mut before = (String::new(), 0);
    for label in ["clerk", "clerk", "judge"] {
        let asked = client.acquire("book");
        let held = match label {
            "clerk" => asked.held(),
            _ => asked.with("label", label).held(),
        };
        let uuid = held.owner.strip_prefix(&format!("{label}:"));
        assert_eq!(uuid.map(str::len), Some(36), "{}", held.owner);
        assert_eq!(lock_of(&server, "book"), (held.owner.clone(), held.fence));
        assert!(held.fence > before.1 && held.owner != before.0);
        before = (held.owner.clone(), held.fence);
        assert_eq!(held.release(), "yes");
        assert!(!exists(&server, "book"));
    }
    // By default it says which process it is.
    let held = agent.open(&server).acquire("book").held();
    let pid = held.owner.split(':').rev().nth(1).map(str::to_owned);
    assert_eq!(pid, Some(agent.pid().to_string()), "{}", held.owner);
}

pub fn the_ttl_is_30_s_unless_said_otherwise(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let client = agent.open(&server);
    let held = client.acquire("book").held();
    let ttl = number(ask!(server.connect(), "PTTL", "book"));
    assert!((25_000..=30_000).contains(&ttl), "{ttl}");
    // One per cent and 2 ms less, counted from before the request left.
    assert!(held.remaining > ms(25_000) && held.remaining <= ms(29_698));
    let longest = (1 << 53) - 1;
    for ttl in [1000, 1001, 86_400_007, longest] {
        let held = client.hold(&format!("book:{ttl}"), ttl);
        assert!(held.remaining <= ms(ttl - ttl / 100 - 2), "{ttl}");
    }
}

pub fn busy_is_an_answer_and_no_error(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let (one, other) = (agent.open(&server), agent.open(&server));
    let held = one.acquire("book").held();
    assert_eq!(other.acquire("book").answer(), "busy");
    assert_eq!(
        one.acquire("book").answer(),
        "busy",
        "no lock is re-entrant"
    );
    // On a busy machine the server's word may come too late.
    let waited = || other.acquire("book").wait(200).answer();
    assert!((0..10).any(|_| waited() == "busy"), "{:?}", waited());
    assert_eq!(held.release(), "yes");
    assert_eq!(other.acquire("book").held().release(), "yes");
}

pub fn what_makes_no_sense_is_refused_before_anything_is_sent(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let client = agent.open(&server);
    let invalid = "invalid";
    assert_eq!(client.acquire("book").ttl(99).answer(), invalid);
    assert_eq!(client.acquire("book").ttl(1 << 53).answer(), invalid);
    let label = "x".repeat(495 - 36);
    let labelled = client.acquire("book").with("label", label.as_str());
    assert_eq!(labelled.answer(), invalid);
    assert_eq!(calls(&server, "lock.acquire"), 0);
    let held = client.acquire("book").with("label", &label[1..]).held();
    assert_eq!(held.owner.len(), 495);
    assert_eq!(held.extend(99), invalid);
}

pub fn a_key_is_any_bytes(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    // A character for each byte, as the agents read it.
    let key = "\0\r\n* {\u{ff}\u{fe}";
    let bytes: Vec<u8> = key.chars().map(|byte| byte as u8).collect();
    let held = agent.open(&server).hold(key, 30_000);
    assert_eq!(ask!(server.connect(), "EXISTS", &bytes), YES);
    assert_eq!(held.renew(), "yes");
    assert_eq!(held.release(), "yes");
    assert_eq!(ask!(server.connect(), "EXISTS", &bytes), NO);
}

pub fn info_tells_who_holds_and_how_many_wait(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let client = agent.open(&server);
    assert!(client.info("book").is_null());
    let held = client.hold("book", 30_000);
    client.wait_for("book", 30_000, 20_000);
    eventually_waiting(&server, "book", 1);
    let told = json!({
        "owner": held.owner, "fence": held.fence, "waiters": 1,
        "limit": 1, "holding": 1, "holders": [held.owner],
    });
    assert_eq!(client.info("book"), told);
}

/// How many commands the server was asked for, but for those of connections and ours.
fn commands(server: &Server) -> u64 {
    let mut redis = server.connect();
    let stats: String = redis::cmd("INFO")
        .arg("commandstats")
        .query(&mut redis)
        .unwrap();
    let asked = stats
        .lines()
        .filter_map(|line| line.strip_prefix("cmdstat_"));
    let calls = asked.filter_map(|line| {
        let (name, numbers) = line.split_once(":calls=")?;
        let of_connections = [
            "auth", "client|", "cluster|", "command", "config|", "hello", "info", "select",
        ];
        let counts = !of_connections.iter().any(|other| name.starts_with(other));
        counts.then(|| numbers.split(',').next().unwrap().parse::<u64>().unwrap())
    });
    calls.sum()
}

pub fn a_section_costs_two_commands(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let (client, before) = (agent.open(&server), commands(&server));
    for round in 1..=3 {
        assert_eq!(client.acquire("book").held().release(), "yes");
        assert_eq!(commands(&server) - before, 2 * round);
    }
}

pub fn a_contended_section_costs_three_commands(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let client = agent.open(&server);
    let holder = client.acquire("book").held();
    let before = commands(&server);
    let waiting = client.acquire("book").wait(20_000).begin();
    eventually("it waits", || client_list_has_blocked(&server));
    assert_eq!(holder.release(), "yes");
    assert_eq!(waiting.held().release(), "yes");
    assert_eq!(commands(&server) - before, 1 + 3);
}

fn client_list_has_blocked(server: &Server) -> bool {
    super::client_list(server).contains(" flags=b ")
}

pub fn no_connection_is_open_before_the_first_lock_nor_long_after_the_last(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let client = agent.open(&server);
    assert_eq!(connections(&server), 0);
    let held = client.acquire("book").held();
    let waiting = client.wait_for("book", 30_000, 20_000);
    eventually_waiting(&server, "book", 1);
    assert_eq!(held.release(), "yes");
    assert_eq!(waiting.held().release(), "yes");
    assert!(connections(&server) > 0);
    let last = Instant::now();
    eventually("all are closed", || connections(&server) == 0);
    assert!(last.elapsed() < ms(17_000), "{:?}", last.elapsed());
}

pub fn a_server_without_the_module_refuses_at_once_and_says_so(kind: &Kind) {
    let (server, agent) = (Setup::new().without_module().start(), kind.start());
    let start = Instant::now();
    let answer = agent.open(&server).acquire("book").wait(20_000).answer();
    assert_eq!(answer, "refused");
    assert!(start.elapsed() < ms(10_000));
    assert!(
        answer
            .text("text")
            .contains("unknown command 'LOCK.ACQUIRE'"),
        "{answer:?}"
    );
}

pub fn a_refusal_keeps_the_words_of_the_server(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let mut redis = server.connect();
    let client = agent.open(&server);
    ask!(redis, "LPUSH", "list", "x").unwrap();
    for (memory, key, words) in [(0, "list", testkit::WRONGTYPE), (1, "book", "OOM ")] {
        ask!(redis, "CONFIG", "SET", "maxmemory", memory).unwrap();
        let answer = client.acquire(key).answer();
        assert_eq!(answer, "refused");
        assert!(answer.text("text").contains(words), "{answer:?}");
    }
}

pub fn a_server_that_was_never_there_is_told_at_once_to_who_does_not_wait(kind: &Kind) {
    let (mut server, agent) = (Server::start(), kind.start());
    let client = agent.open(&server);
    server.kill9();
    let start = Instant::now();
    let answer = client.acquire("book").answer();
    assert_eq!(answer, "unreachable");
    for word in ["127.0.0.1", "refused"] {
        assert!(answer.text("text").contains(word), "{answer:?}");
    }
    assert!(start.elapsed() < ms(3000));
    // Who waits, waits for it.
    let start = Instant::now();
    let waited = client.acquire("book").wait(1000).answer();
    assert_eq!(waited, "unreachable");
    assert!(start.elapsed() >= ms(990));
    // One that waits without end would hang for ever on a wrong address.
    let start = Instant::now();
    assert_eq!(
        client.acquire("book").wait_forever().answer(),
        "unreachable"
    );
    assert!(start.elapsed() < ms(3000));
}

pub fn a_try_at_a_silent_server_takes_5_s_whatever_the_ttl(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let proxy = Proxy::to(&server);
    let client = agent.open(&proxy);
    client.connect();
    proxy.stop();
    let start = Instant::now();
    let answer = client.acquire("book").ttl(3_600_000).answer();
    assert_eq!(answer, "unreachable");
    let took = start.elapsed();
    assert!(took > ms(4900) && took < ms(6500), "{took:?}");
}

pub fn a_slow_reply_is_counted_from_the_send(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let proxy = Proxy::to(&server);
    let client = agent.open(&proxy);
    client.connect();
    proxy.delay_replies(ms(900));
    let asked = now_us();
    let held = client.hold("book", 6000);
    let believed_until = held.at + held.remaining.as_micros() as u64;
    let ends_at = ends_at(&server, "book");
    assert!(
        believed_until < ends_at,
        "believed for longer than it lasts"
    );
    assert!(held.at - asked >= 900_000, "it was slow");
    assert!(held.remaining < ms(6000 - 900 - 60), "{:?}", held.remaining);
}

pub fn a_grant_of_which_a_third_has_passed_is_renewed_first(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let proxy = Proxy::to(&server);
    let client = agent.open(&proxy);
    client.connect();
    proxy.delay_replies(ms(900));
    let replies = proxy.replies();
    let asked = client.acquire("book").ttl(2000).wait(20_000).begin();
    eventually("it is granted, and the reply is on its way", || {
        calls(&server, "lock.acquire") > 0 && proxy.replies() > replies
    });
    // What comes after it is not slow.
    proxy.delay_replies(Duration::ZERO);
    let held = asked.held();
    assert!(held.remaining > ms(1200), "{:?}", held.remaining);
    assert!(renewals(&server) > 0);
}

pub fn a_lost_reply_is_asked_for_again_under_another_owner(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let proxy = Proxy::to(&server);
    let client = agent.open(&proxy);
    client.connect();
    let replies = proxy.replies();
    proxy.swallow_replies();
    let asked = client.acquire("book").ttl(6000).wait(20_000).begin();
    eventually("it is granted unheard", || {
        exists(&server, "book") && proxy.replies() > replies
    });
    let (owner, fence) = lock_of(&server, "book");
    proxy.mend();
    let held = asked.held();
    assert!(held.owner != owner && held.fence > fence);
    assert_eq!(lock_of(&server, "book").0, held.owner);
    assert_eq!(calls(&server, "lock.acquire"), 2);
    assert_eq!(held.release(), "yes");
    agent.settled();
    assert!(!exists(&server, "book"));
}

pub fn a_connection_that_breaks_before_the_reply_is_replaced(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let proxy = Proxy::to(&server);
    let client = agent.open(&proxy);
    client.connect();
    proxy.cut_at_next_reply();
    let asked = client.acquire("book").wait(20_000).begin();
    eventually("it is granted unheard", || exists(&server, "book"));
    let granted = lock_of(&server, "book");
    proxy.mend();
    let held = asked.held();
    assert_eq!(
        (held.owner, held.fence),
        granted,
        "the same owner asks again"
    );
}

pub fn a_request_that_arrives_after_we_hung_up_brings_no_lock(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let proxy = Proxy::to(&server);
    let client = agent.open(&proxy);
    client.connect();
    proxy.stop_old_connections();
    let held = client.acquire("book").wait(20_000).held();
    assert_eq!(held.release(), "yes");
    let (acquires, releases) = (
        calls(&server, "lock.acquire"),
        calls(&server, "lock.release"),
    );
    // The first request, which nobody waits for any more, and what was sent behind it.
    proxy.mend();
    eventually("it arrives", || calls(&server, "lock.acquire") > acquires);
    eventually("and its release", || {
        calls(&server, "lock.release") > releases
    });
    eventually_free(&server, "book");
}

pub fn idle_connections_that_died_cost_nothing(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let client = agent.open(&server);
    for _ in 0..3 {
        let held = client.acquire("book").held();
        ask!(server.connect(), "CLIENT", "KILL", "TYPE", "normal").unwrap();
        assert_eq!(held.release(), "yes");
        ask!(server.connect(), "CLIENT", "KILL", "TYPE", "normal").unwrap();
    }
    assert_eq!(calls(&server, "lock.acquire"), 3);
}
