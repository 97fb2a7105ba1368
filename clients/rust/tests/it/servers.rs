//! The helper reaches servers of every kind: with passwords, over TLS, behind Sentinel, in a
//! cluster, and counts on replicas when it is asked to.

use std::process::Command;
use std::time::Instant;

use lockkeeper::{Error, Held, Lockkeeper, Lost, Released, Renewed};
use tempfile::TempDir;
use testkit::client::{calls, hold, is_held, ms, open, soon};
use testkit::cluster::{Cluster, slot_of};
use testkit::sentinels::{MASTER, Sentinels};
use testkit::{OK, Server, ask, eventually, number};

use crate::{connections, signal};

fn refused<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    match result {
        Err(Error::Refused(text)) => text,
        other => panic!("{other:?}"),
    }
}

async fn acquire(lockkeeper: &Lockkeeper, key: &str) -> Result<bool, Error> {
    lockkeeper.acquire(key).await.map(is_held)
}

/// Held, renewed and released: the whole way works.
async fn works(server: &Server, lockkeeper: &Lockkeeper) {
    let held = hold(lockkeeper, "book", ms(3000)).await;
    let renewals = calls(server, "lock.renew");
    eventually("it is renewed", || calls(server, "lock.renew") > renewals);
    assert_eq!(held.release().await, Ok(Released::Yes));
}

#[tokio::test]
async fn a_user_and_a_password_give_the_rights_of_that_user_and_no_more() {
    let server = Server::start();
    let mut redis = server.connect();
    let user = ["ACL", "SETUSER", "clerk", "on", ">secret", "~book*"];
    let rules = ["+lock.acquire", "+lock.renew", "+lock.release"];
    let mut setup = redis::Cmd::new();
    for word in user.into_iter().chain(rules) {
        setup.arg(word);
    }
    setup.query::<()>(&mut redis).unwrap();

    let url = format!("redis://clerk:secret@127.0.0.1:{}/", server.port());
    let clerk = Lockkeeper::open(url).unwrap();
    works(&server, &clerk).await;
    assert!(refused(acquire(&clerk, "cash").await).starts_with("NOPERM "));
    assert!(refused(clerk.info("book").await).starts_with("NOPERM "));

    let url = format!("redis://clerk@127.0.0.1:{}/", server.port());
    let builder = || Lockkeeper::builder(&url);
    works(&server, &builder().password("secret").open().unwrap()).await;
    let wrong = builder().password("guess").open().unwrap();
    assert_eq!(
        refused(acquire(&wrong, "book").await),
        "WRONGPASS invalid username-password pair or user is disabled."
    );

    assert_eq!(
        ask!(redis, "CONFIG", "SET", "requirepass", "open sesame"),
        OK
    );
    assert!(refused(acquire(&open(&server), "book").await).starts_with("NOAUTH "));
    let url = format!("redis://:open%20sesame@127.0.0.1:{}/", server.port());
    let _held = hold(&Lockkeeper::open(url).unwrap(), "book", ms(3000)).await;
}

#[tokio::test]
async fn tls_with_an_authority_of_our_own() {
    let dir = TempDir::new().unwrap();
    testkit::tls::certificates(dir.path());
    let file = |name: &str| dir.path().join(name).display().to_string();
    // Not every server is built with it.
    let Some((server, port)) = testkit::tls::server(dir.path()) else {
        return;
    };
    let authority = std::fs::read(file("ca.crt")).unwrap();
    for host in ["localhost", "127.0.0.1"] {
        let url = format!("rediss://{host}:{port}/");
        let trusting = Lockkeeper::builder(&url)
            .root_ca(authority.clone())
            .open()
            .unwrap();
        works(&server, &trusting).await;
        let stranger = Lockkeeper::open(&url).unwrap();
        let error = acquire(&stranger, "book").await.unwrap_err();
        assert!(
            matches!(error, Error::Unreachable(_)),
            "not signed by anyone known: {error:?}"
        );
    }

    let trusting = Lockkeeper::builder(format!("rediss://127.0.0.1:{port}/")).insecure();
    works(&server, &trusting.open().unwrap()).await;

    let (certificate, key) = (
        std::fs::read(file("server.crt")),
        std::fs::read(file("server.key")),
    );
    ask!(server.connect(), "CONFIG", "SET", "tls-auth-clients", "yes").unwrap();
    let url = format!("rediss://localhost:{port}/");
    let builder = || Lockkeeper::builder(&url).root_ca(authority.clone());
    assert!(acquire(&builder().open().unwrap(), "book").await.is_err());
    let known = builder().client_certificate(certificate.unwrap(), key.unwrap());
    works(&server, &known.open().unwrap()).await;
}

/// A server that sends its data to a replica as soon as it is asked.
fn master() -> Server {
    Server::with(&["--repl-diskless-sync-delay", "0"])
}

/// Where a helper finds the master that these watch.
fn url_of(sentinels: &Sentinels) -> String {
    format!("redis+sentinel://{}/{MASTER}", sentinels.hosts.join(","))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_survives_a_failover_by_sentinel() {
    let mut master = master();
    let replica = Server::replica_of(&master);
    let sentinels = Sentinels::watching(&master);
    let lockkeeper = Lockkeeper::open(url_of(&sentinels)).unwrap();
    let held = hold(&lockkeeper, "book", ms(20_000)).await;
    let waiting = tokio::spawn(lockkeeper.acquire("book").wait(ms(60_000)));
    eventually("one waits", || waiters(&master) == Some(1));
    let mut on_replica = replica.connect();
    eventually("the replica has the lock", || {
        ask!(on_replica, "EXISTS", "book") == testkit::YES
    });

    master.kill9();
    eventually("the waiter waits at the replica, now the master", || {
        waiters(&replica) == Some(1)
    });
    assert_eq!(held.renew().await, Ok(Renewed::Yes), "{held:?}");
    assert_eq!(held.release().await, Ok(Released::Yes));
    assert!(is_held(soon(waiting).await.unwrap().unwrap()));
    assert!(calls(&replica, "lock.renew") > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_master_that_hangs_is_replaced_by_sentinel_for_holders_and_waiters() {
    let master = master();
    let replica = Server::replica_of(&master);
    let sentinels = Sentinels::watching(&master);
    let lockkeeper = Lockkeeper::open(url_of(&sentinels)).unwrap();
    let held = hold(&lockkeeper, "book", ms(20_000)).await;
    let waiting = tokio::spawn(lockkeeper.acquire("book").wait(ms(60_000)).into_future());
    eventually("one waits", || waiters(&master) == Some(1));
    let mut on_replica = replica.connect();
    eventually("the replica has the lock", || {
        ask!(on_replica, "EXISTS", "book") == testkit::YES
    });

    signal(&master, libc::SIGSTOP);
    eventually("the waiter waits at the replica, now the master", || {
        waiters(&replica) == Some(1)
    });
    assert_eq!(held.loss(), None, "{held:?}");
    assert_eq!(held.renew().await, Ok(Renewed::Yes), "{held:?}");
    assert_eq!(held.release().await, Ok(Released::Yes));
    assert!(is_held(soon(waiting).await.unwrap().unwrap()));
}

/// How many wait at this server; none while it changes its role, when it closes connections.
fn waiters(server: &Server) -> Option<u64> {
    let url = format!("unix://{}", server.socket().display());
    let mut redis = redis::Client::open(url).unwrap().get_connection().ok()?;
    let info: String = redis::cmd("INFO")
        .arg("lockkeeper")
        .query(&mut redis)
        .ok()?;
    let waiters = info
        .lines()
        .find_map(|line| line.strip_prefix("lockkeeper_waiters:"))?;
    waiters.parse().ok()
}

/// Three masters that fail over sooner than usual.
fn start_cluster() -> Cluster<3> {
    let cluster = Cluster::of_masters();
    cluster.nodes.iter().for_each(fail_over_soon);
    cluster
}

fn fail_over_soon(node: &Server) {
    let setting = "cluster-node-timeout";
    let set = ask!(node.connect(), "CONFIG", "SET", setting, 1200);
    assert_eq!(set, OK);
}

/// One node is enough to find the others.
fn open_cluster(cluster: &Cluster<3>) -> Lockkeeper {
    let port = cluster.nodes[0].port();
    Lockkeeper::open(format!("redis+cluster://127.0.0.1:{port}")).unwrap()
}

fn node_id(cluster: &Cluster<3>, node: usize) -> String {
    testkit::cluster::node_id(&mut cluster.nodes[node].connect())
}

/// The node that had the slot of the key at the start, and that slot.
fn node_and_slot_of(cluster: &Cluster<3>, key: &str) -> (usize, i64) {
    let slot = slot_of(&mut cluster.nodes[0].connect(), key);
    // Each has an equal share, in their order.
    let node = (0..3).find(|node| slot < (node + 1) * 16_384 / 3);
    (node.unwrap() as usize, slot)
}

#[tokio::test(flavor = "multi_thread")]
async fn locks_of_a_cluster_live_on_all_its_nodes_and_move_with_their_slots() {
    let cluster = start_cluster();
    let lockkeeper = open_cluster(&cluster);
    let mut held: Vec<Held> = Vec::new();
    for number in 0..30 {
        held.push(hold(&lockkeeper, &format!("book:{number}"), ms(1500)).await);
    }
    for node in &cluster.nodes {
        assert!(
            number(ask!(node.connect(), "DBSIZE")) > 0,
            "every node holds some"
        );
        eventually("it is renewed", || calls(node, "lock.renew") > 10);
        assert_eq!(connections(node), 1);
    }

    // One lock is moved, with its slot and while somebody waits for it.
    let (key, moved) = ("book:7", &held[7]);
    let (from, slot) = node_and_slot_of(&cluster, key);
    let to = (from + 1) % 3;
    let (mut source, mut target) = (cluster.nodes[from].connect(), cluster.nodes[to].connect());
    let waiting = tokio::spawn(lockkeeper.acquire(key).wait(ms(60_000)));
    eventually("one waits", || waiters(&cluster.nodes[from]) == Some(1));

    assert_eq!(
        ask!(
            target,
            "CLUSTER",
            "SETSLOT",
            slot,
            "IMPORTING",
            node_id(&cluster, from)
        ),
        OK
    );
    assert_eq!(
        ask!(
            source,
            "CLUSTER",
            "SETSLOT",
            slot,
            "MIGRATING",
            node_id(&cluster, to)
        ),
        OK
    );
    let port = cluster.nodes[to].port();
    assert_eq!(ask!(source, "MIGRATE", "127.0.0.1", port, key, 0, 5000), OK);
    assert_eq!(moved.renew().await, Ok(Renewed::Yes), "the source says ASK");
    for node in 0..3 {
        let mut redis = cluster.nodes[node].connect();
        assert_eq!(
            ask!(
                redis,
                "CLUSTER",
                "SETSLOT",
                slot,
                "NODE",
                node_id(&cluster, to)
            ),
            OK
        );
    }
    assert_eq!(
        moved.renew().await,
        Ok(Renewed::Yes),
        "the source says MOVED"
    );
    eventually("the waiter moves too", || {
        waiters(&cluster.nodes[to]) == Some(1)
    });

    for node in &cluster.nodes {
        let renewals = calls(node, "lock.renew");
        eventually("all are renewed", || {
            calls(node, "lock.renew") > renewals + 20
        });
    }
    for held in &held {
        assert_eq!(held.loss(), None, "{held:?}");
    }
    assert_eq!(held.swap_remove(7).release().await, Ok(Released::Yes));
    assert!(is_held(soon(waiting).await.unwrap().unwrap()));
}

/// How often the node said that another serves the key.
fn redirects(node: &Server) -> u64 {
    let stats: String = redis::cmd("INFO")
        .arg("errorstats")
        .query(&mut node.connect())
        .unwrap();
    let count = stats
        .lines()
        .find_map(|line| line.strip_prefix("errorstat_MOVED:count="));
    count.map_or(0, |count| count.trim().parse().unwrap())
}

/// So it is for a moment in every move: the first to be told is not always the new one.
#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_each_node_says_the_other_has_is_waited_for() {
    let cluster = start_cluster();
    let lockkeeper = open_cluster(&cluster);
    let key = key_on(&cluster, 0);
    let (from, slot) = node_and_slot_of(&cluster, &key);
    let (mut source, mut target) = (cluster.nodes[from].connect(), cluster.nodes[1].connect());
    let (source_id, target_id) = (node_id(&cluster, from), node_id(&cluster, 1));
    let set_slot = ["CLUSTER", "SETSLOT"];
    assert_eq!(ask!(target, &set_slot, slot, "IMPORTING", source_id), OK);
    assert_eq!(ask!(source, &set_slot, slot, "NODE", &target_id), OK);

    let before = redirects(&cluster.nodes[from]);
    let waiting = tokio::spawn(lockkeeper.acquire(&*key).wait(ms(60_000)).into_future());
    // Some servers agree by themselves after a while.
    eventually("it asks again and again", || {
        waiting.is_finished() || redirects(&cluster.nodes[from]) > before + 10
    });
    assert_eq!(ask!(target, &set_slot, slot, "NODE", &target_id), OK);
    assert!(is_held(soon(waiting).await.unwrap().unwrap()));
}

/// A key whose slot is on this node.
fn key_on(cluster: &Cluster<3>, node: usize) -> String {
    let mut keys = (0..).map(|n| format!("book:{n}"));
    keys.find(|key| node_and_slot_of(cluster, key).0 == node)
        .unwrap()
}

/// Its master is killed, or hangs.
async fn a_failover_costs_no_lock_of_5_s(hangs: bool) {
    let mut cluster = start_cluster();
    let replica = cluster.replica_of(1);
    fail_over_soon(&replica);
    let lockkeeper = open_cluster(&cluster);
    let key = key_on(&cluster, 1);
    let held = hold(&lockkeeper, &key, ms(5000)).await;
    let elsewhere = hold(&lockkeeper, &key_on(&cluster, 2), ms(5000)).await;
    let waiting = tokio::spawn(lockkeeper.acquire(&*key).wait(ms(60_000)).into_future());
    eventually("one waits", || waiters(&cluster.nodes[1]) == Some(1));
    let mut on_replica = replica.connect();
    let mut on_master = cluster.nodes[1].connect();
    // From here on there are five seconds, less a little, and the replica knows of them. WAIT counts
    // from what its own connection has written.
    let mark = format!("{{{key}}}:mark");
    for replicated in 0.. {
        assert!(replicated < 20, "the replica does not keep up");
        assert_eq!(held.renew().await, Ok(Renewed::Yes));
        assert_eq!(ask!(on_master, "SET", &mark, "x"), OK);
        if ask!(on_master, "WAIT", 1, 500) == testkit::YES {
            break;
        }
    }
    let start = Instant::now();
    if hangs {
        signal(&cluster.nodes[1], libc::SIGSTOP);
    } else {
        cluster.nodes[1].kill9();
    }
    let mut failover = None;
    eventually("it is renewed at the replica, now a master", || {
        let role: String = testkit::info(&mut on_replica, "replication", "role");
        if role == "master" {
            failover.get_or_insert_with(|| start.elapsed());
        }
        assert_eq!(held.loss(), None, "failed over after {failover:?}");
        calls(&replica, "lock.renew") > 0
    });
    println!(
        "hangs {hangs}: over after {failover:?}, renewed after {:?}",
        start.elapsed()
    );
    eventually("the waiter waits there", || waiters(&replica) == Some(1));
    assert_eq!(held.loss(), None);
    assert_eq!(elsewhere.loss(), None);
    assert_eq!(held.release().await, Ok(Released::Yes));
    assert!(is_held(soon(waiting).await.unwrap().unwrap()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failover_in_a_cluster_costs_no_lock_of_5_s() {
    a_failover_costs_no_lock_of_5_s(false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_master_that_hangs_in_a_cluster_costs_no_lock_of_5_s() {
    a_failover_costs_no_lock_of_5_s(true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_counts_from_what_enough_replicas_acknowledged() {
    let master = master();
    let replica = Server::replica_of(&master);
    let lockkeeper = open(&master);
    let safe = |key: &str| lockkeeper.acquire(key).ttl(ms(1500)).min_replicas(1);
    let held = safe("book").await.unwrap().unwrap();
    let alone = hold(&lockkeeper, "alone", ms(1500)).await;
    let renewals = calls(&replica, "pexpireat");
    eventually("it is renewed there", || {
        calls(&replica, "pexpireat") > renewals + 2
    });
    assert_eq!(held.loss(), None);
    assert_eq!(held.renew().await, Ok(Renewed::Yes));

    signal(&replica, libc::SIGSTOP);
    let lost = soon(held.lost()).await;
    let text = refused(safe("other").ttl(ms(12_000)).await);
    signal(&replica, libc::SIGCONT);
    assert_eq!(
        lost,
        Lost::Expired,
        "although the master has renewed it all the time"
    );
    assert_eq!(text, "NOREPLICAS 0 of 1 replicas acknowledged");
    assert_eq!(alone.loss(), None, "nobody asked for replicas here");
    drop(held);
    eventually("what nobody got is released", || {
        ask!(master.connect(), "EXISTS", "other") == testkit::NO
    });
    let two = safe("book").ttl(ms(12_000)).min_replicas(2).await;
    assert_eq!(refused(two), "NOREPLICAS 1 of 2 replicas acknowledged");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grant_after_a_wait_is_acknowledged_too() {
    let master = master();
    let replica = Server::replica_of(&master);
    let lockkeeper = open(&master);
    let held = hold(&lockkeeper, "book", ms(30_000)).await;
    let waiting = lockkeeper.acquire("book").wait(ms(20_000)).min_replicas(1);
    let waiting = tokio::spawn(waiting);
    eventually("one waits", || waiters(&master) == Some(1));
    assert_eq!(held.release().await, Ok(Released::Yes));
    let held = soon(waiting).await.unwrap().unwrap().unwrap();
    let value: String = redis::cmd("GET")
        .arg("book")
        .query(&mut replica.connect())
        .unwrap();
    assert!(value.ends_with(held.owner()), "{value}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_alone_refuses() {
    let master = master();
    let replica = Server::replica_of(&master);
    let lockkeeper = open(&replica);
    assert!(refused(acquire(&lockkeeper, "book").await).starts_with("READONLY "));
    // It may become the master.
    let asked = lockkeeper.acquire("book").wait(ms(20_000)).into_future();
    let asked = tokio::spawn(asked);
    eventually("it was asked again", || {
        let errors: String = redis::cmd("INFO")
            .arg("errorstats")
            .query(&mut replica.connect())
            .unwrap();
        let count = errors.split("errorstat_READONLY:count=").nth(1).unwrap();
        count.trim().parse::<u64>().unwrap() > 4
    });
    assert_eq!(ask!(replica.connect(), "REPLICAOF", "NO", "ONE"), OK);
    assert!(is_held(soon(asked).await.unwrap().unwrap()));
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_for_replicas_are_few_and_replaced_when_they_ended() {
    let master = master();
    let _replica = Server::replica_of(&master);
    let lockkeeper = open(&master);
    let safe = |key: String| {
        let acquire = lockkeeper.acquire(key).ttl(ms(60_000)).min_replicas(1);
        tokio::spawn(acquire.into_future())
    };
    for time in 0..2 {
        let all: Vec<_> = (0..8).map(|n| safe(format!("book:{time}:{n}"))).collect();
        for acquiring in all {
            let held = soon(acquiring).await.unwrap();
            held.unwrap().expect("it is free").leave();
        }
        eventually("few are kept", || connections(&master) <= 5);
        ask!(master.connect(), "CLIENT", "KILL", "TYPE", "normal").unwrap();
    }
    let _held = soon(safe("other".to_owned())).await.unwrap().unwrap();
    assert!(connections(&master) > 0);
}

#[test]
fn an_application_needs_neither_libclang_nor_the_command_line() {
    let tree = |features: &[&str]| {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args([
            "tree",
            "--package",
            "lockkeeper",
            "--edges",
            "normal,build",
            "--prefix",
            "none",
        ]);
        let output = cargo
            .args(features)
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).unwrap()
    };
    let everything = tree(&["--all-features"]);
    assert!(everything.contains("rustls v"));
    for unwanted in [
        "bindgen ",
        "clap ",
        "clang-sys ",
        "redis-module ",
        "lockkeeper-module ",
    ] {
        assert!(!everything.contains(unwanted), "{everything}");
    }
    let bare = tree(&[]);
    for unwanted in ["clap ", "rustls ", "ring "] {
        assert!(!bare.contains(unwanted), "{bare}");
    }
}
