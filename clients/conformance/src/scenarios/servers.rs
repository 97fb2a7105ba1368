//! Where the server is: whatever the client of the language is configured for is used.

use serde_json::{Value, json};
use testkit::cluster::{Cluster, slot_of};
use testkit::sentinels::{MASTER, Sentinels};
use testkit::{OK, Server, ask, eventually, tls};

use super::{Outcome, calls, eventually_renewed, eventually_waiting, exists, renewals};
use crate::agent::Kind;

/// A lock is taken there, renewed, waited for and released.
#[track_caller]
fn a_lock_is_held_at(kind: &Kind, server: &Server, url: String, more: Value) {
    let agent = kind.start();
    let client = agent.open_with(&url, more);
    // A busy machine may take a second for a handshake.
    let held = client.acquire("book").ttl(3000).wait(20_000).held();
    let waiting = client.wait_for("book", 3000, 20_000);
    eventually_renewed(server, 2);
    assert_eq!(held.release(), "yes");
    assert_eq!(waiting.held().release(), "yes");
}

pub fn a_unix_socket_is_reached(kind: &Kind) {
    let server = Server::start();
    let url = format!("unix://{}", server.socket().display());
    a_lock_is_held_at(kind, &server, url, json!({}));
}

pub fn a_user_a_database_and_either_protocol_are_used(kind: &Kind) {
    let server = Server::start();
    let user = ["ACL", "SETUSER", "clerk", "on", ">secret", "~book", "+@all"];
    assert_eq!(ask!(server.connect(), &user), OK);
    assert_eq!(
        ask!(server.connect(), "ACL", "SETUSER", "default", "off"),
        OK
    );
    for resp in [2, 3] {
        let port = server.port();
        let url = format!("redis://clerk:secret@127.0.0.1:{port}/3?protocol={resp}");
        let agent = kind.start();
        let client = agent.open(&url);
        let held = client.hold("book", 30_000);
        let other = client.acquire("other").answer();
        assert_eq!(other, "refused");
        assert!(other.text("text").contains("NOPERM "), "{other:?}");
        assert_eq!(held.renew(), "yes");
        assert_eq!(held.release(), "yes");
    }
}

pub fn tls_with_an_authority_of_our_own(kind: &Kind) -> Outcome {
    let dir = tempfile::tempdir().unwrap();
    tls::certificates(dir.path());
    let Some((server, port)) = tls::server(dir.path()) else {
        return Err("the server was built without TLS");
    };
    let url = format!("rediss://localhost:{port}");
    let authority = json!({"tls": dir.path().join("ca.crt")});
    a_lock_is_held_at(kind, &server, url, authority);
    Ok(())
}

pub fn a_lock_of_a_cluster_moves_with_its_slot(kind: &Kind) {
    let (cluster, agent) = (Cluster::start(), kind.start());
    let client = agent.open(&super::url_of(&cluster));
    // One on each node.
    let mut redis = cluster.nodes[0].connect();
    let (mut first, mut second) = (None, None);
    for number in 0.. {
        let key = format!("book:{number}");
        match slot_of(&mut redis, &key) {
            0..8192 => first = first.or(Some(key)),
            _ => second = second.or(Some(key)),
        }
        if first.is_some() && second.is_some() {
            break;
        }
    }
    let (first, second) = (first.unwrap(), second.unwrap());
    let (moving, staying) = (client.hold(&first, 5000), client.hold(&second, 5000));
    let waiting = client.wait_for(&first, 5000, 25_000);
    eventually_waiting(&cluster.nodes[0], &first, 1);
    cluster.move_slot(slot_of(&mut redis, &first), 0, 1);
    let renewed = calls(&cluster.nodes[1], "lock.renew");
    eventually("both are renewed on the second node", || {
        assert_eq!(moving.times_lost() + staying.times_lost(), 0);
        calls(&cluster.nodes[1], "lock.renew") >= renewed + 3
    });
    assert_eq!(moving.release(), "yes");
    assert_eq!(staying.release(), "yes");
    assert_eq!(waiting.held().release(), "yes");
}

pub fn a_lock_outlives_a_failover_by_sentinels(kind: &Kind) {
    let (mut master, agent) = (Server::start(), kind.start());
    let replica = Server::replica_of(&master);
    let sentinels = Sentinels::watching(&master);
    let hosts = sentinels.hosts.join(",");
    let client = agent.open(&format!("redis+sentinel://{hosts}/{MASTER}"));
    // Longer than the sentinels take.
    let held = client.hold("book", 12_000);
    let waiting = client.wait_for("book", 12_000, 29_000);
    eventually_waiting(&master, "book", 1);
    eventually("the replica has the lock", || exists(&replica, "book"));
    master.kill9();
    // Sentinels end the connections of the one they promote, ours too.
    sentinels.eventually_name(&replica);
    eventually("it is renewed at the new master", || {
        assert_eq!(held.times_lost(), 0);
        renewals(&replica) > 0
    });
    eventually_waiting(&replica, "book", 1);
    assert_eq!(held.release(), "yes");
    assert_eq!(waiting.held().release(), "yes");
}

pub fn only_what_enough_replicas_acknowledged_counts(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let mut replica = Server::replica_of(&server);
    let client = agent.open(&server);
    let held = client
        .acquire("book")
        .ttl(3000)
        .with("min_replicas", 1)
        .held();
    assert!(exists(&replica, "book"));
    let before = renewals(&server);
    eventually("it is renewed", || renewals(&server) > before);
    assert_eq!(held.times_lost(), 0);
    replica.kill9();
    // The master goes on renewing it, which alone does not count.
    assert_eq!(held.lost().0, "expired");
    let few = client.acquire("other").with("min_replicas", 1).answer();
    assert_eq!(few, "refused");
    assert!(few.text("text").contains("NOREPLICAS"), "{few:?}");
    agent.settled();
    assert_eq!(ask!(server.connect(), "EXISTS", "other"), testkit::NO);
}
