//! Servers that are there and refuse for a while: it is waited out, and costs no lock.

use std::net::TcpListener;

use testkit::cluster::{Cluster, slot_of};
use testkit::{OK, Server, ask, eventually};

use super::{exists, rejected};
use crate::agent::{Agent, Kind};

/// Who holds `held` keeps it, and who asks for `wanted` meanwhile is granted it, although the server answers with
/// `word` from when `begins` has returned until `ends` has.
fn refusing_is_waited_out(
    agent: &Agent,
    (server, place): (&Server, &String),
    [held, wanted]: [&str; 2],
    word: &str,
    begins: impl FnOnce(),
    ends: impl FnOnce(),
) {
    let client = agent.open(place);
    let held = client.hold(held, 9000);
    begins();
    let waiting = client.wait_for(wanted, 9000, 25_000);
    agent.line(&format!("that it is refused with {word}"), |line| {
        let text = line["text"].as_str().unwrap_or_default();
        line["event"] == "log" && text.contains("WARN") && text.contains(word)
    });
    assert!(!waiting.is_answered());
    ends();
    assert_eq!(waiting.held().release(), "yes");
    assert!(rejected(server, "lock.acquire") > 0);
    eventually_renewed_in_full(&held);
    assert_eq!(held.release(), "yes");
    assert_eq!(held.times_lost(), 0);
}

#[track_caller]
fn eventually_renewed_in_full(held: &crate::agent::Held) {
    eventually("it is renewed", || held.remaining() > super::ms(8000));
}

pub fn a_server_that_loads_its_data_is_waited_for(kind: &Kind) {
    // 400 keys of 5 ms each, between which it answers.
    let slow = [
        "--key-load-delay",
        "5000",
        "--loading-process-events-interval-bytes",
        "1024",
    ];
    let (mut server, agent) = (Server::with(&slow), kind.start());
    let mut redis = server.connect();
    ask!(redis, "DEBUG", "POPULATE", 400, "key", 1000).unwrap();
    let client = agent.open(&server);
    let held = client.hold("book", 15_000);
    assert_eq!(ask!(redis, "SAVE"), OK);
    server.kill9();
    let waiting = client.wait_for("other", 15_000, 25_000);
    // Returns when all is loaded.
    server.start_again();
    assert_eq!(waiting.held().release(), "yes");
    assert!(
        rejected(&server, "lock.acquire") > 0,
        "nobody asked it while it loaded"
    );
    assert_eq!(held.renew(), "yes");
    assert_eq!(held.release(), "yes");
    assert_eq!(held.times_lost(), 0);
}

pub fn a_server_busy_with_a_script_is_waited_for(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let mut redis = server.connect();
    assert_eq!(ask!(redis, "CONFIG", "SET", "lua-time-limit", 1), OK);
    std::thread::scope(|threads| {
        let mut scripted = server.connect();
        let begins = || {
            threads.spawn(move || ask!(scripted, "EVAL", "while true do end", 0));
            eventually("it is busy", || ask!(server.connect(), "PING").is_err());
        };
        let ends = || assert_eq!(ask!(redis, "SCRIPT", "KILL"), OK);
        let at = (&server, &server.url());
        refusing_is_waited_out(&agent, at, ["book", "other"], "BUSY ", begins, ends);
    });
}

pub fn a_master_that_lacks_replicas_is_waited_for(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let wants = |replicas: u32| {
        let set = ["CONFIG", "SET", "min-replicas-to-write"];
        assert_eq!(ask!(server.connect(), &set, replicas), OK);
    };
    let at = (&server, &server.url());
    refusing_is_waited_out(
        &agent,
        at,
        ["book", "other"],
        "NOREPLICAS ",
        || wants(1),
        || wants(0),
    );
}

pub fn a_replica_that_has_lost_its_master_is_waited_for(kind: &Kind) {
    // One that may be written to, or it would say that it may not.
    let stale = [
        "--replica-serve-stale-data",
        "no",
        "--replica-read-only",
        "no",
    ];
    let (server, agent) = (Server::with(&stale), kind.start());
    let mut redis = server.connect();
    // Nobody answers here.
    let nobody = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = nobody.local_addr().unwrap().port();
    let begins = || assert_eq!(ask!(server.connect(), "REPLICAOF", "127.0.0.1", port), OK);
    let ends = || assert_eq!(ask!(redis, "REPLICAOF", "NO", "ONE"), OK);
    let at = (&server, &server.url());
    refusing_is_waited_out(&agent, at, ["book", "other"], "MASTERDOWN ", begins, ends);
}

pub fn a_cluster_that_is_down_is_waited_for(kind: &Kind) {
    let (cluster, agent) = (Cluster::start(), kind.start());
    let node = &cluster.nodes[1];
    let place = super::url_of(&cluster);
    // Two keys of one node, and a slot of its that nobody needs.
    let mut redis = node.connect();
    let keys = (0..).map(|number| format!("book:{number}"));
    let mut its: Vec<_> = keys
        .filter(|key| (8192..16_383).contains(&slot_of(&mut redis, key)))
        .take(2)
        .collect();
    let (wanted, held) = (its.pop().unwrap(), its.pop().unwrap());
    let change = |what: &str| assert_eq!(ask!(node.connect(), "CLUSTER", what, 16_383), OK);
    let at = (node, &place);
    refusing_is_waited_out(
        &agent,
        at,
        [&held, &wanted],
        "CLUSTERDOWN ",
        || {
            change("DELSLOTS");
            eventually("it is down", || {
                ask!(node.connect(), "EXISTS", &held).is_err()
            });
        },
        || {
            change("ADDSLOTS");
            eventually("it is up", || exists(node, &held));
        },
    );
}
