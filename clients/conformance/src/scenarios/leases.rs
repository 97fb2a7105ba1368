//! How a lock is kept, and how its holder learns that it is not.

use std::time::{Duration, Instant};

use serde_json::json;
use testkit::proxy::Proxy;
use testkit::{NO, OK, Server, YES, ask, eventually, text};

use super::{calls, client_list, eventually_free, eventually_renewed, exists, ms, renewals, sleep};
use crate::agent::{Kind, Pending};

pub fn a_lock_is_renewed_every_third_of_its_ttl(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let held = agent.open(&server).hold("book", 1500);
    let start = Instant::now();
    while start.elapsed() < ms(4500) {
        assert!(exists(&server, "book"));
        sleep(20);
    }
    assert_eq!(held.release(), "yes");
    assert_eq!(held.times_lost(), 0);
    let renewals = renewals(&server);
    assert!((7..=10).contains(&renewals), "{renewals} in nine thirds");
}

pub fn a_deleted_lock_is_lost_at_the_next_renewal(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let held = agent.open(&server).hold("book", 3000);
    assert_eq!(ask!(server.connect(), "DEL", "book"), YES);
    let (why, at) = held.lost();
    assert_eq!(why, "gone");
    assert!(at < held.at + 2_000_000, "long before the ttl would tell");
    assert_eq!(held.lost_now().as_deref(), Some("gone"));
    assert_eq!(held.remaining(), Duration::ZERO);
    assert_eq!(held.renew(), "lost: gone");
    assert_eq!(held.release(), "lost: gone");
    assert!(!exists(&server, "book"), "a loss is final");
}

pub fn a_lock_that_was_taken_is_lost_and_the_new_holder_is_safe(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let mut redis = server.connect();
    let held = agent.open(&server).hold("book", 1200);
    assert_eq!(ask!(redis, "SET", "book", "somebody", "PX", 60_000), OK);
    assert_eq!(held.lost().0, "taken");
    let renewals = renewals(&server);
    assert_eq!(held.renew(), "lost: taken");
    assert_eq!(held.release(), "lost: taken");
    sleep(800);
    assert_eq!(super::renewals(&server), renewals, "a no is final");
    assert_eq!(
        calls(&server, "lock.release"),
        0,
        "nothing of ours is there"
    );
    assert_eq!(ask!(redis, "GET", "book"), text("somebody"));
}

pub fn a_loss_is_told_once(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let proxy = Proxy::to(&server);
    let held = agent.open(&proxy).hold("book", 900);
    proxy.cut();
    assert_eq!(held.lost().0, "expired");
    proxy.mend();
    sleep(900);
    assert_eq!(held.release(), "lost: expired");
    agent.settled();
    assert_eq!(held.times_lost(), 1);
}

pub fn renew_asks_the_server_now(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let held = agent.open(&server).hold("book", 30_000);
    assert_eq!(held.renew(), "yes");
    assert_eq!(renewals(&server), 1);
    assert!(held.remaining() > ms(28_000));
    assert_eq!(ask!(server.connect(), "DEL", "book"), YES);
    assert_eq!(held.renew(), "lost: gone");
    assert_eq!(held.lost_now().as_deref(), Some("gone"));
}

pub fn an_extended_lease_is_not_cut_to_the_ttl_again(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let held = agent.open(&server).hold("book", 1000);
    assert_eq!(held.extend(4000), "yes");
    assert!(held.remaining() > ms(3000));
    let renewals = renewals(&server);
    sleep(2000);
    assert_eq!(super::renewals(&server), renewals, "or it would be cut");
    assert!(held.remaining() > ms(1000));
}

pub fn an_extension_is_renewed_before_it_ends(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let held = agent.open(&server).hold("book", 1500);
    assert_eq!(held.extend(2500), "yes");
    eventually_renewed(&server, 3);
    assert!(held.remaining() <= ms(1500), "for the ttl that was agreed");
    assert_eq!(held.release(), "yes");
}

pub fn max_hold_ends_renewal_and_is_told(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let asked = agent.open(&server).acquire("book").ttl(1500);
    let held = asked.with("max_hold_ms", 2000).held();
    let (why, at) = held.lost();
    assert_eq!(why, "max_hold");
    let after = at - held.at;
    assert!((1_900_000..2_600_000).contains(&after), "{after} us");
    assert!(held.remaining() > ms(100), "there is time to stop in");
    assert_eq!(calls(&server, "lock.release"), 0);
    eventually_free(&server, "book");
}

pub fn what_is_released_or_left_is_not_lost(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let client = agent.open(&server);
    let (released, left) = (client.hold("released", 500), client.hold("left", 500));
    assert_eq!(released.release(), "yes");
    assert_eq!(left.ask("leave"), "yes");
    eventually_free(&server, "left");
    sleep(300);
    assert_eq!((released.times_lost(), left.times_lost()), (0, 0));
}

pub fn what_happens_is_logged(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let proxy = Proxy::to(&server);
    let client = agent.open(&proxy);
    assert_eq!(client.hold("first", 900).release(), "yes");
    let held = client.hold("second", 900);
    proxy.cut();
    held.lost();
    let logged = |level: &str, about: &str| {
        agent.line(&format!("{level}: … {about} …"), |line| {
            let text = line["text"].as_str().unwrap_or_default();
            line["event"] == "log" && text.contains(level) && text.contains(about)
        });
    };
    for (level, about) in [
        ("DEBUG", "acquired"),
        ("DEBUG", "released"),
        ("WARN", "second"),
        ("ERROR", "lost"),
    ] {
        logged(level, about);
    }
}

/// All in one agent; so many as LOCKKEEPER_SOAK says.
pub fn many_locks_are_renewed_in_time_over_one_connection(kind: &Kind) {
    let count: u64 = testkit::setting("LOCKKEEPER_SOAK", 1000);
    let ttl = 12_000.max(count);
    let (server, agent) = (Server::start(), kind.start());
    let client = agent.open(&server);
    let keys: Vec<_> = (0..count).map(|number| format!("book:{number}")).collect();
    let mut many = Vec::new();
    // So few at a time that none waits for the others for long.
    for keys in keys.chunks(100) {
        let asked = keys.iter().map(|key| client.acquire(key).ttl(ttl).begin());
        let asked: Vec<_> = asked.collect();
        many.extend(asked.into_iter().map(Pending::held));
    }
    let (start, before) = (Instant::now(), renewals(&server));
    for some in many.chunks(100).cycle() {
        for held in some {
            assert!(held.remaining() > ms(ttl / 4));
        }
        if start.elapsed() >= ms(ttl / 2) {
            break;
        }
        sleep(200);
    }
    assert!(agent.lines(|line| line["event"] == "lost").is_empty());
    eventually("all are renewed", || renewals(&server) >= before + count);
    let clients = client_list(&server);
    let renewing = clients.matches("cmd=lock.renew").count();
    assert_eq!(renewing, 1, "{clients}");
    if agent.can().iter().any(|can| can == "drop") {
        for some in many.chunks(100) {
            let dropped: Vec<_> = some
                .iter()
                .map(|held| held.begin("drop", json!({})))
                .collect();
            for drop in dropped {
                assert_eq!(drop.answer(), "yes");
            }
        }
        let mut redis = server.connect();
        eventually("all are released", || ask!(redis, "DBSIZE") == NO);
    }
}
