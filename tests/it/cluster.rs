//! Locks in a cluster: a slot that moves while clients wait for a key of it never has two owners for it,
//! and those who wait find their way to the new node.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::thread;

use redis::cluster::ClusterClient;
use testkit::cluster::{Cluster, move_slot_in_one_step, moves_in_one_step, node_id, slot_of};
use testkit::waiting::*;
use testkit::*;

const TRY_AGAIN: &str =
    "TRYAGAIN the slot of this key is served elsewhere or not at all, ask the cluster again";

/// In the first half of the slots: on the first of two nodes.
const KEY: &str = "b";

#[test]
fn those_who_wait_for_a_key_that_moves_get_tryagain_and_wait_on_the_new_node() {
    let cluster = Cluster::start();
    let [source, target] = &cluster.nodes;
    let (mut at_source, mut at_target) = (source.connect(), target.connect());
    let slot = slot_of(&mut at_source, KEY);
    hold(&mut at_source, KEY);
    let mut waiters = ["first", "second"].map(|owner| join(source, KEY, owner));
    let value = ask!(at_source, "GET", KEY);

    cluster.move_slot(slot, 0, 1);

    for waiter in &mut waiters {
        assert_eq!(error(waiter.reply()), TRY_AGAIN);
    }
    assert_eq!(gauge(&mut at_source, "waiters"), 0);
    assert_eq!(ask!(at_source, "DBSIZE"), NO, "nothing was granted there");
    assert_eq!(ask!(at_target, "GET", KEY), value);
    let moved = error(ask!(at_source, "LOCK.ACQUIRE", KEY, "first", LONG));
    assert!(moved.starts_with("MOVED "), "{moved}");
    let mut first = join(target, KEY, "first");
    assert_eq!(ask!(at_target, "LOCK.RELEASE", KEY, "holder"), YES);
    fence(first.reply());
}

#[test]
fn those_who_wait_for_a_key_whose_slot_is_taken_by_force_get_tryagain() {
    let cluster = Cluster::start();
    let [source, target] = &cluster.nodes;
    let (mut at_source, mut at_target) = (source.connect(), target.connect());
    let slot = slot_of(&mut at_source, KEY);
    hold(&mut at_source, KEY);
    let mut waiter = join(source, KEY, "waiter");

    // With a greater epoch its word counts for all; the old owner drops the keys it has.
    let id = node_id(&mut at_target);
    assert_eq!(ask!(at_target, "CLUSTER", "SETSLOT", slot, "NODE", id), OK);
    ask!(at_target, "CLUSTER", "BUMPEPOCH").unwrap();

    assert_eq!(error(waiter.reply()), TRY_AGAIN);
    assert_eq!(ask!(at_source, "DBSIZE"), NO);
    let mut waiter = Waiter::of(target);
    waiter.ask(KEY, "waiter", LONG, LONG);
    fence(waiter.reply());
}

#[test]
fn those_who_wait_for_a_key_whose_slot_moves_in_one_step_get_tryagain() {
    let cluster = Cluster::start();
    let [source, target] = &cluster.nodes;
    let (mut at_source, mut at_target) = (source.connect(), target.connect());
    let slot = slot_of(&mut at_source, KEY);
    hold(&mut at_source, KEY);
    let mut waiters = ["first", "second"].map(|owner| join(source, KEY, owner));
    let value = ask!(at_source, "GET", KEY);

    let moved = move_slot_in_one_step(slot, source, target);

    if !moves_in_one_step(source) {
        let refused = error(moved);
        assert!(refused.starts_with("ERR unknown subcommand"), "{refused}");
        return skip("no CLUSTER MIGRATESLOTS before Valkey 9");
    }
    assert_eq!(moved, OK);
    for waiter in &mut waiters {
        assert_eq!(error(waiter.reply()), TRY_AGAIN);
    }
    assert_eq!(ask!(at_source, "DBSIZE"), NO, "nothing was granted there");
    assert_eq!(ask!(at_target, "GET", KEY), value);
    let mut first = join(target, KEY, "first");
    assert_eq!(ask!(at_target, "LOCK.RELEASE", KEY, "holder"), YES);
    fence(first.reply());
}

#[test]
fn a_release_while_the_slot_moves_hands_over_where_the_key_is() {
    let cluster = Cluster::start();
    let [source, target] = &cluster.nodes;
    let (mut at_source, mut at_target) = (source.connect(), target.connect());
    let slot = slot_of(&mut at_source, KEY);
    let (source_id, target_id) = (node_id(&mut at_source), node_id(&mut at_target));
    hold(&mut at_source, KEY);
    let mut first = join(source, KEY, "first");
    let mut second = join(source, KEY, "second");
    let set_slot = ["CLUSTER", "SETSLOT"];
    assert_eq!(ask!(at_target, &set_slot, slot, "IMPORTING", source_id), OK);
    assert_eq!(ask!(at_source, &set_slot, slot, "MIGRATING", target_id), OK);

    // The key has not left yet.
    assert_eq!(ask!(at_source, "LOCK.RELEASE", KEY, "holder"), YES);
    fence(first.reply());
    // Nobody may take it here once it is gone: the new node may have given it to another.
    assert_eq!(ask!(at_source, "LOCK.RELEASE", KEY, "second"), NO);
    assert_eq!(second.reply(), NULL);
    let mut third = join(source, KEY, "third");
    assert_eq!(ask!(at_source, "DEL", KEY), YES);

    assert_eq!(error(third.reply()), TRY_AGAIN);
    let asks = error(ask!(at_source, "LOCK.ACQUIRE", KEY, "fourth", LONG));
    assert!(asks.starts_with("ASK "), "{asks}");
    assert_eq!(ask!(at_target, "ASKING"), OK);
    fence(ask!(at_target, "LOCK.ACQUIRE", KEY, "fourth", LONG));
}

#[test]
fn the_fence_grows_from_one_node_to_the_next() {
    let cluster = Cluster::start();
    let [source, target] = &cluster.nodes;
    let (mut at_source, mut at_target) = (source.connect(), target.connect());
    let slot = slot_of(&mut at_source, KEY);
    let (source_id, target_id) = (node_id(&mut at_source), node_id(&mut at_target));
    let set_slot = ["CLUSTER", "SETSLOT"];
    assert_eq!(ask!(at_target, &set_slot, slot, "IMPORTING", source_id), OK);

    for _ in 0..200 {
        // Released while the slot moves, so that the next is sent to the other node, as fast as can be.
        let (_, before, _, _): (Value, i64, Value, i64) = redis::pipe()
            .cmd("CLUSTER")
            .arg("SETSLOT")
            .arg(slot)
            .arg("STABLE")
            .cmd("LOCK.ACQUIRE")
            .arg(&[KEY, "alice", "100000"])
            .cmd("CLUSTER")
            .arg("SETSLOT")
            .arg(slot)
            .arg(&["MIGRATING", &target_id])
            .cmd("LOCK.RELEASE")
            .arg(&[KEY, "alice"])
            .query(&mut at_source)
            .unwrap();
        let (_, after, _, _): (Value, i64, Value, i64) = redis::pipe()
            .cmd("ASKING")
            .cmd("LOCK.ACQUIRE")
            .arg(&[KEY, "bob", "100000"])
            .cmd("ASKING")
            .cmd("LOCK.RELEASE")
            .arg(&[KEY, "bob"])
            .query(&mut at_target)
            .unwrap();
        assert!(after > before, "{after} after {before}");
    }
}

/// How often the slot moves while clients take turns at the lock.
const MOVES: usize = 10;

/// Moves the slot to and fro while `turns` runs.
fn while_the_slot_moves<T: Send>(turns: impl FnOnce(&Cluster, &AtomicBool) -> T + Send) -> T {
    let cluster = Cluster::start();
    let slot = slot_of(&mut cluster.nodes[0].connect(), KEY);
    let enough = AtomicBool::new(false);
    thread::scope(|threads| {
        let turns = threads.spawn(|| turns(&cluster, &enough));
        let mut at = 0;
        for _ in 0..MOVES {
            let mut redis = cluster.nodes[at].connect();
            // Somebody holds the lock and others wait for it, here.
            eventually("there is a queue where the slot is", || {
                turns.is_finished() || waiters(&mut redis, KEY) > 0
            });
            cluster.move_slot(slot, at, 1 - at);
            at = 1 - at;
        }
        enough.store(true, SeqCst);
        let turns = turns.join().unwrap();
        let tried_again = cluster.nodes.iter().any(|node| {
            let errors: String = redis::cmd("INFO")
                .arg("errorstats")
                .query(&mut node.connect())
                .unwrap();
            errors.contains("errorstat_TRYAGAIN:")
        });
        assert!(tried_again, "nobody waited where the slot had been");
        turns
    })
}

#[test]
fn a_slot_that_moves_never_has_two_owners_and_loses_nobody_who_asks_through_redis_rs() {
    let taken = AtomicBool::new(false);
    let turns = AtomicUsize::new(0);

    while_the_slot_moves(|cluster, enough| {
        thread::scope(|threads| {
            for client in 0..6 {
                let (taken, turns) = (&taken, &turns);
                threads.spawn(move || {
                    let client_library = ClusterClient::new(cluster.urls()).unwrap();
                    let mut redis = client_library.get_connection().unwrap();
                    // Longer than the wait, or the library gives up before the server does.
                    redis.set_read_timeout(Some(2 * PATIENCE)).unwrap();
                    let wait = PATIENCE.as_millis() as u64;
                    let mut turn = 0;
                    while !enough.load(SeqCst) {
                        turn += 1;
                        let owner = format!("{client}:{turn}");
                        let granted = ask!(redis, "LOCK.ACQUIRE", KEY, &owner, LONG, "WAIT", wait);
                        fence(granted);
                        assert!(!taken.swap(true, SeqCst), "two owners");
                        turns.fetch_add(1, SeqCst);
                        assert_eq!(ask!(redis, "LOCK.RENEW", KEY, &owner, LONG), YES);
                        assert!(taken.swap(false, SeqCst));
                        assert_eq!(ask!(redis, "LOCK.RELEASE", KEY, &owner), YES);
                    }
                });
            }
        });
    });

    println!("{turns:?} turns while the slot moved {MOVES} times");
    assert!(turns.into_inner() >= MOVES);
}

#[test]
fn a_slot_that_moves_never_has_two_owners_and_loses_nobody_who_asks_through_redis_py() {
    let report = while_the_slot_moves(|cluster, enough| {
        let port = cluster.nodes[0].port().to_string();
        let stop = cluster.nodes[0].dir().join("stop");
        thread::scope(|threads| {
            threads.spawn(|| {
                eventually("the slot has moved often enough", || enough.load(SeqCst));
                std::fs::write(&stop, "").unwrap();
            });
            python(&["cluster_turns.py", &port, KEY, stop.to_str().unwrap()])
        })
    });

    println!("{report}");
    assert!(report.contains("overlaps=0 "), "{report}");
}

#[test]
fn those_who_wait_on_a_master_that_is_replaced_are_sent_away_and_wait_on_the_new_one() {
    those_who_wait_are_sent_away("");
}

#[test]
fn those_who_wait_on_a_master_that_is_replaced_without_asking_it_are_sent_away() {
    those_who_wait_are_sent_away("FORCE");
}

#[test]
fn those_who_wait_on_a_master_that_is_replaced_without_a_vote_are_sent_away() {
    those_who_wait_are_sent_away("TAKEOVER");
}

/// `how`: as CLUSTER FAILOVER has it.
#[track_caller]
fn those_who_wait_are_sent_away(how: &str) {
    // Of three masters two are enough for an election, so one link of them may be late.
    let cluster = Cluster::<3>::of_masters();
    let master = &cluster.nodes[0];
    let replica = cluster.replica_of(0);
    let (mut at_master, mut at_replica) = (master.connect(), replica.connect());
    let old = hold(&mut at_master, KEY);
    let mut waiters = ["first", "second"].map(|owner| join(master, KEY, owner));
    eventually("the replica has the lock", || {
        ask!(at_replica, "READONLY") == OK && ask!(at_replica, "EXISTS", KEY) == YES
    });

    cluster.fail_over(&replica, how);

    for waiter in &mut waiters {
        let reply = error(waiter.reply());
        // Redis that notices first that its slots are another's says CLUSTERDOWN.
        let code = reply.split(' ').next();
        let sent_away = matches!(code, Some("UNBLOCKED" | "CLUSTERDOWN"));
        assert!(sent_away, "{how:?}: {reply}");
    }
    assert_eq!(gauge(&mut at_master, "waiters"), 0);
    for cause in ["by_release", "by_expiry", "by_deletion", "taken_back"] {
        let grants = gauge(&mut at_master, &format!("grants_{cause}_total"));
        assert_eq!(grants, 0, "{how:?}: {cause}");
    }
    eventually("the new master serves the key", || {
        ask!(at_replica, "LOCK.ACQUIRE", KEY, "nobody", LONG) == NULL
    });
    let mut first = join(&replica, KEY, "first");
    assert_eq!(ask!(at_replica, "LOCK.RELEASE", KEY, "holder"), YES);
    assert!(fence(first.reply()) > old, "{how:?}");
}
