//! What becomes of several holders when a server is restarted, replaced, or gives the key to another.

use redis::Connection;
use testkit::cluster::{Cluster, slot_of};
use testkit::waiting::*;
use testkit::*;

/// Two who hold `key` of which one ends in ten minutes, and the other later.
fn two_hold(redis: &mut Connection, key: &str) -> (Reply, i64) {
    for (owner, ttl) in [("ann", 600_000), ("bea", 900_000)] {
        let acquire = format!("LOCK.ACQUIRE {key} {owner} {ttl} LIMIT 2");
        fence(run(redis, &acquire));
    }
    state(redis, key)
}

fn state(redis: &mut Connection, key: &str) -> (Reply, i64) {
    let value = ask!(redis, "GET", key);
    (value, number(ask!(redis, "PEXPIRETIME", key)))
}

/// Both hold still, nobody else comes in, and who waits is served.
fn assert_goes_on(server: &Server, key: &str) {
    let mut redis = server.connect();
    assert_eq!(holders(&mut redis, key), ["ann", "bea"]);
    let third = format!("LOCK.ACQUIRE {key} cyd {LONG} LIMIT 2");
    assert_eq!(run(&mut redis, &third), NULL);
    let mut waiter = join_by(server, &format!("{third} WAIT {LONG}"));
    assert_eq!(
        run(&mut redis, &format!("LOCK.RENEW {key} bea 900000")),
        YES
    );
    assert_eq!(run(&mut redis, &format!("LOCK.RELEASE {key} ann")), YES);
    fence(waiter.reply());
    assert_eq!(holders(&mut redis, key), ["bea", "cyd"]);
}

#[test]
fn the_append_only_file_brings_every_lease_back() {
    let mut server = Server::with(&["--appendonly", "yes", "--appendfsync", "always"]);
    let before = two_hold(&mut server.connect(), "k");
    server.kill9();
    server.start_again();
    assert_eq!(state(&mut server.connect(), "k"), before);
    assert_goes_on(&server, "k");
}

#[test]
fn a_snapshot_brings_every_lease_back() {
    let mut server = Server::start();
    let mut redis = server.connect();
    let before = two_hold(&mut redis, "k");
    assert_eq!(ask!(redis, "SAVE"), OK);
    server.kill9();
    server.start_again();
    assert_eq!(state(&mut server.connect(), "k"), before);
    assert_goes_on(&server, "k");
}

/// From this version to the next, and back.
#[test]
fn an_upgrade_in_place_keeps_every_lease() {
    let server = Server::start();
    let mut redis = server.connect();
    for next in [next_module(), module().to_owned()] {
        let before = two_hold(&mut redis, "k");
        assert_eq!(ask!(redis, "MODULE", "UNLOAD", "lockkeeper"), OK);
        assert_eq!(run(&mut redis, "SET k token NX PX 1000"), NULL);
        assert_eq!(
            ask!(redis, "MODULE", "LOAD", next.display().to_string()),
            OK
        );
        assert_eq!(state(&mut redis, "k"), before);
        assert_goes_on(&server, "k");
        assert_eq!(run(&mut redis, "DEL k"), YES);
    }
}

#[test]
fn a_replica_that_becomes_master_has_every_lease() {
    let master = Server::start();
    let replica = Setup::new()
        .module(&next_module())
        .start_replica_of(&master);
    let mut redis = master.connect();
    let before = two_hold(&mut redis, "k");
    assert_eq!(ask!(redis, "WAIT", 1, PATIENCE.as_millis() as u64), YES);
    let mut at_replica = replica.connect();
    assert_eq!(state(&mut at_replica, "k"), before);
    assert_eq!(holders(&mut at_replica, "k"), ["ann", "bea"]);
    assert_eq!(ask!(at_replica, "REPLICAOF", "NO", "ONE"), OK);
    assert_goes_on(&replica, "k");
}

#[test]
fn a_server_without_the_module_keeps_the_list_and_everybody_out() {
    let master = Server::start();
    let replica = Setup::new().without_module().start_replica_of(&master);
    let mut redis = master.connect();
    let before = two_hold(&mut redis, "k");
    let mut at_replica = replica.connect();
    eventually("the replica follows", || {
        ask!(at_replica, "EXISTS", "k") == YES && state(&mut at_replica, "k") == before
    });
    assert_eq!(ask!(at_replica, "REPLICAOF", "NO", "ONE"), OK);
    assert_eq!(run(&mut at_replica, "SET k token NX PX 1000"), NULL);
    assert_eq!(state(&mut at_replica, "k"), before);
}

#[test]
fn a_slot_that_moves_takes_every_lease_along() {
    const KEY: &str = "b";
    let cluster = Cluster::start();
    let [source, target] = &cluster.nodes;
    let mut redis = source.connect();
    let slot = slot_of(&mut redis, KEY);
    let (value, _) = two_hold(&mut redis, KEY);
    let waits = format!("LOCK.ACQUIRE {KEY} writer {LONG} WAIT {LONG}");
    let mut waiter = join_by(source, &waits);

    cluster.move_slot(slot, 0, 1);

    assert!(error(waiter.reply()).starts_with("TRYAGAIN "));
    assert_eq!(ask!(target.connect(), "GET", KEY), value);
    assert_goes_on(target, KEY);
}

#[test]
fn leases_end_in_the_same_millisecond_on_master_and_replica() {
    let master = Server::start();
    let replica = Server::replica_of(&master);
    let mut redis = master.connect();
    fence(run(&mut redis, "LOCK.ACQUIRE k short 60 LIMIT 2"));
    fence(run(
        &mut redis,
        &format!("LOCK.ACQUIRE k long {LONG} LIMIT 2"),
    ));
    let mut waiter = join_by(
        &master,
        &format!("LOCK.ACQUIRE k next {LONG} WAIT {LONG} LIMIT 2"),
    );
    fence(waiter.reply());
    assert_eq!(ask!(redis, "WAIT", 1, PATIENCE.as_millis() as u64), YES);
    let mut at_replica = replica.connect();
    assert_eq!(state(&mut at_replica, "k"), state(&mut redis, "k"));
    assert_eq!(holders(&mut at_replica, "k"), ["long", "next"]);
}
