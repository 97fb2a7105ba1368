//! Networks that break and servers that hang: what costs no lock, and what is told in time.

use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use testkit::proxy::Proxy;
use testkit::{OK, Server, Setup, YES, ask, eventually};

use super::{calls, ends_at, eventually_free, eventually_renewed, exists, ms, renewals, sleep};
use crate::agent::Kind;

pub fn a_killed_connection_loses_nothing(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let held = agent.open(&server).hold("book", 1500);
    for _ in 0..4 {
        ask!(server.connect(), "CLIENT", "KILL", "TYPE", "normal").unwrap();
        eventually_renewed(&server, 1);
    }
    assert_eq!(held.release(), "yes");
    assert_eq!(held.times_lost(), 0);
}

pub fn a_paused_server_loses_nothing(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let held = agent.open(&server).hold("book", 3000);
    assert_eq!(ask!(server.connect(), "CLIENT", "PAUSE", 1500, "ALL"), OK);
    let paused = Instant::now();
    // Not answered before the pause is over.
    renewals(&server);
    assert!(paused.elapsed() > ms(1300));
    eventually_renewed(&server, 1);
    assert_eq!(held.renew(), "yes");
    assert_eq!(held.release(), "yes");
}

pub fn a_cut_shorter_than_the_lease_loses_nothing(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let proxy = Proxy::to(&server);
    let held = agent.open(&proxy).hold("book", 3000);
    for _ in 0..2 {
        proxy.cut();
        sleep(1300);
        proxy.mend();
        eventually("it is renewed", || held.remaining() > ms(2300));
    }
    assert_eq!(held.release(), "yes");
}

pub fn a_cut_longer_than_the_lease_is_told_before_the_server_lets_go(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let proxy = Proxy::to(&server);
    let client = agent.open(&proxy);
    let held = client.hold("book", 6000);
    proxy.cut();
    // A renewal that was under way when it was cut may still arrive.
    sleep(100);
    let free_at = ends_at(&server, "book");
    let (why, told_at) = held.lost();
    assert_eq!(why, "expired");
    assert!(told_at < free_at, "told {} us too late", told_at - free_at);
    assert_eq!(held.remaining(), Duration::ZERO);
    eventually_free(&server, "book");

    // The next one is renewed, and the old handle does not harm it.
    proxy.mend();
    let next = client.hold("book", 3000);
    eventually_renewed(&server, 2);
    assert_eq!(held.renew(), "lost: expired");
    assert_eq!(held.release(), "lost: expired");
    agent.settled();
    assert!(calls(&server, "lock.release") <= 1, "once is enough");
    assert_eq!(next.times_lost(), 0);
    assert_eq!(next.release(), "yes");
}

pub fn silence_is_as_good_as_a_cut(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let proxy = Proxy::to(&server);
    let held = agent.open(&proxy).hold("book", 2000);
    proxy.stop();
    assert_eq!(held.lost().0, "expired");
}

pub fn a_dial_that_hangs_costs_no_lock(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let proxy = Proxy::to(&server);
    let held = agent.open(&proxy).hold("book", 6000);
    for hanging in [1, 2] {
        proxy.hang_next_connections(hanging);
        let connections = proxy.connections();
        ask!(server.connect(), "CLIENT", "KILL", "TYPE", "normal").unwrap();
        eventually("it is renewed over another connection", || {
            assert_eq!(held.times_lost(), 0);
            proxy.connections() > connections + hanging && held.remaining() > ms(5000)
        });
    }
    assert_eq!(held.release(), "yes");
}

pub fn a_server_clock_that_steps_an_hour_does_not_fool_the_lease(kind: &Kind) {
    let (server, agent) = (Setup::new().clock_ms(0).start(), kind.start());
    let client = agent.open(&server);
    let (held, hour) = (client.hold("book", 1500), 3_600_000);
    // Back: for the server the lease lasts an hour longer. Ours does not.
    server.set_clock_ms(-hour);
    eventually_renewed(&server, 2);
    assert!(held.remaining() <= ms(1500));
    assert_eq!(held.release(), "yes");
    // Ahead: for the server the lease has ended. The next renewal tells, and brings nothing back.
    let held = client.hold("book", 1500);
    server.set_clock_ms(hour);
    assert_eq!(held.lost().0, "gone");
    assert!(!exists(&server, "book"));
}

pub fn a_module_that_is_replaced_costs_no_lock(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let mut redis = server.connect();
    let held = agent.open(&server).hold("book", 3000);
    assert_eq!(ask!(redis, "MODULE", "UNLOAD", "lockkeeper"), OK);
    // The first question may meet the connection that unloading has closed.
    eventually("the commands are unknown", || {
        let renewed = held.renew();
        renewed == "refused" && renewed.text("text").contains("unknown command")
    });
    assert_eq!(held.lost_now(), None);
    let module = testkit::module().display().to_string();
    assert_eq!(ask!(redis, "MODULE", "LOAD", module), OK);
    eventually_renewed(&server, 1);
    assert_eq!(held.release(), "yes");
}

pub fn behind_one_address_a_new_master_is_found_after_readonly(kind: &Kind) {
    a_new_master_is_found(kind, false);
}

pub fn behind_one_address_a_new_master_is_found_after_the_old_one_froze(kind: &Kind) {
    a_new_master_is_found(kind, true);
}

fn a_new_master_is_found(kind: &Kind, froze: bool) {
    let (old, agent) = (Server::start(), kind.start());
    let new = Server::replica_of(&old);
    let proxy = Proxy::to(&old);
    let client = agent.open(&proxy);
    let held = client.hold("book", 6000);
    eventually("the replica has the lock", || exists(&new, "book"));
    if froze {
        let pid = Pid::from_raw(old.pid() as i32).unwrap();
        kill_process(pid, Signal::STOP).unwrap();
    }
    assert_eq!(ask!(new.connect(), "REPLICAOF", "NO", "ONE"), OK);
    // Connections that there are stay open, and lead to the old one.
    proxy.lead_to(&new);
    if !froze {
        let mut on_old = old.connect();
        assert_eq!(ask!(on_old, "REPLICAOF", "127.0.0.1", new.port()), OK);
    }
    eventually("it is renewed at the new master", || {
        assert_eq!(held.times_lost(), 0);
        calls(&new, "lock.renew") > 0
    });
    assert_eq!(held.renew(), "yes");
    let other = client.acquire("other").wait(20_000).held();
    assert_eq!(ask!(new.connect(), "EXISTS", "other"), YES);
    assert_eq!(other.release(), "yes");
    assert_eq!(held.release(), "yes");
    agent.settled();
}
