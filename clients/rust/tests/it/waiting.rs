//! The helper in the server's queue: every wait ends in time, and nothing is left of one.

use std::time::{Duration, Instant};

use lockkeeper::{Acquired, Error, Held, Lockkeeper, Lost, Released};
use testkit::client::{calls, hold, is_held, ms, open, soon};
use testkit::proxy::Proxy;
use testkit::waiting::may_be_unblocked;
use testkit::{NO, OK, PATIENCE, Server, YES, ask, eventually, fence, info};
use tokio::task::{JoinHandle, JoinSet};

use crate::{connections, signal};

type Acquiring = JoinHandle<Result<Acquired, Error>>;

/// Waits for `key` in the background.
fn wait_for(lockkeeper: &Lockkeeper, key: &str, ttl: Duration, wait: Duration) -> Acquiring {
    tokio::spawn(lockkeeper.acquire(key).ttl(ttl).wait(wait))
}

async fn granted(acquiring: Acquiring) -> Held {
    soon(acquiring)
        .await
        .unwrap()
        .unwrap()
        .expect("it is granted")
}

/// How many wait for the key.
fn waiters(server: &Server, key: &str) -> i64 {
    let info: redis::Value = redis::cmd("LOCK.INFO")
        .arg(key)
        .query(&mut server.connect())
        .unwrap();
    let mut fields = info.into_map_iter().unwrap();
    let field = fields.find(|(name, _)| *name == redis::Value::BulkString(b"waiters".to_vec()));
    testkit::number(Ok(field.unwrap().1))
}

fn eventually_waiting(server: &Server, key: &str, count: i64) {
    eventually(format!("{count} wait"), || waiters(server, key) == count);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_is_granted_when_the_holder_releases() {
    let server = Server::start();
    let lockkeeper = open(&server);
    let held = hold(&lockkeeper, "book", ms(30_000)).await;
    let waiting = wait_for(&lockkeeper, "book", ms(30_000), ms(20_000));
    eventually_waiting(&server, "book", 1);
    let info = lockkeeper.info("book").await.unwrap().unwrap();
    assert!(
        !info.queue[0].owner.is_empty() && info.owner.as_deref() != Some(&*info.queue[0].owner)
    );
    assert!(info.queue[0].waited < ms(20_000));

    let fence = held.fence();
    assert_eq!(held.release().await, Ok(Released::Yes));
    let next = granted(waiting).await;
    assert!(next.fence() > fence);
    assert_eq!(next.release().await, Ok(Released::Yes));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_falls_silent_before_a_wait_is_unreachable_not_busy() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let lockkeeper = Lockkeeper::open(proxy.url()).unwrap();
    for silent in [false, true] {
        let held = hold(&open(&server), "book", ms(30_000)).await;
        if silent {
            proxy.stop();
        }
        let acquired = soon(lockkeeper.acquire("book").wait(ms(300))).await;
        match silent {
            false => assert!(!is_held(acquired.unwrap()), "it is busy"),
            true => assert!(
                matches!(acquired, Err(Error::Unreachable(_))),
                "{acquired:?}"
            ),
        }
        assert_eq!(held.release().await, Ok(Released::Yes));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_who_wait_for_longer_than_the_ttl_all_get_their_turn() {
    let server = Server::start();
    let ttl = ms(600);
    let mut queue = JoinSet::new();
    for _ in 0..10 {
        let lockkeeper = open(&server);
        queue.spawn(async move {
            let held = lockkeeper.acquire("book").ttl(ttl).wait(PATIENCE).await;
            let held = held.unwrap().expect("a turn for everybody");
            assert!(
                held.remaining() >= ttl / 3,
                "{:?} left when handed out",
                held.remaining()
            );
            tokio::time::sleep(ms(100)).await;
            let fence = held.fence();
            assert_eq!(held.release().await, Ok(Released::Yes));
            fence
        });
    }
    let mut fences = soon(queue.join_all()).await;
    fences.sort_unstable();
    fences.dedup();
    assert_eq!(fences.len(), 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grant_after_a_wait_is_renewed_before_it_is_handed_out() {
    let server = Server::start();
    let held = hold(&open(&server), "book", ms(600)).await;
    let waiting = wait_for(&open(&server), "book", ms(600), ms(20_000));
    // For longer than the ttl, which a lease would have to be counted from.
    let mut redis = server.connect();
    eventually("it has waited for long", || {
        info::<u64>(&mut redis, "lockkeeper", "lockkeeper_oldest_waiter_ms") > 600
    });
    let renewals = calls(&server, "lock.renew");
    assert_eq!(held.release().await, Ok(Released::Yes));
    let next = granted(waiting).await;
    assert!(calls(&server, "lock.renew") > renewals);
    assert!(next.remaining() > ms(200), "{next:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grant_that_expired_before_its_reply_came_is_not_handed_out() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let mut redis = server.connect();
    fence(ask!(redis, "LOCK.ACQUIRE", "book", "first", 60_000));
    let lockkeeper = Lockkeeper::open(proxy.url()).unwrap();
    let waiting = wait_for(&lockkeeper, "book", ms(300), ms(20_000));
    eventually_waiting(&server, "book", 1);
    proxy.stop();
    assert_eq!(ask!(redis, "LOCK.RELEASE", "book", "first"), YES);
    let second = fence(ask!(
        redis,
        "LOCK.ACQUIRE",
        "book",
        "second",
        600,
        "WAIT",
        20_000
    ));
    proxy.mend();
    let held = granted(waiting).await;
    assert!(
        held.fence() > second as u64,
        "the wait went on after the second"
    );
    assert!(held.remaining() > Duration::ZERO, "{held:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_that_is_given_up_leaves_no_waiter() {
    let server = Server::start();
    let lockkeeper = open(&server);
    let held = hold(&lockkeeper, "book", ms(30_000)).await;
    for _ in 0..20 {
        let waiting = wait_for(&lockkeeper, "book", ms(30_000), ms(60_000));
        eventually_waiting(&server, "book", 1);
        waiting.abort();
        eventually_waiting(&server, "book", 0);
    }
    assert_eq!(held.release().await, Ok(Released::Yes));
    eventually("nobody was granted", || {
        ask!(server.connect(), "EXISTS", "book") == testkit::NO
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_that_is_dropped_at_any_moment_leaves_nothing() {
    let server = Server::start();
    let lockkeeper = open(&server);
    let held = hold(&lockkeeper, "book", ms(60_000)).await;
    for micros in (0..6000).step_by(60) {
        let asked = lockkeeper.acquire("book").ttl(ms(60_000)).wait(ms(60_000));
        let _ = tokio::time::timeout(Duration::from_micros(micros), asked).await;
    }
    eventually_waiting(&server, "book", 0);
    assert_eq!(held.release().await, Ok(Released::Yes));
    eventually("no key is left", || {
        ask!(server.connect(), "DBSIZE") == testkit::NO
    });
    assert_eq!(connections(&server), 1, "the others are closed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_that_is_dropped_is_released_however_late_its_request_arrives() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let lockkeeper = Lockkeeper::open(proxy.url()).unwrap();
    assert_eq!(lockkeeper.info("book").await, Ok(None));
    let mut redis = server.connect();
    let mut connected = || info::<u64>(&mut redis, "clients", "connected_clients");
    let before = connected();
    // On the way of the waits, not of what goes over the connection that is there.
    proxy.delay_requests_of_new_connections(ms(20));
    let mut holder = server.connect();
    for moment in 0..15 {
        fence(ask!(holder, "LOCK.ACQUIRE", "book", "holder", 60_000));
        let waiting = wait_for(&lockkeeper, "book", ms(60_000), ms(20_000));
        tokio::time::sleep(ms(9 * moment)).await;
        waiting.abort();
        assert_eq!(ask!(holder, "LOCK.RELEASE", "book", "holder"), YES);
        // Only now is it dropped, with what it may have been granted meanwhile.
        let _ = waiting.await;
        assert!(lockkeeper.settled(testkit::PATIENCE).await);
        eventually("all that was sent has arrived", || {
            connected() == before + 1
        });
        assert_eq!(ask!(holder, "EXISTS", "book"), NO, "after {moment} × 9 ms");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_connection_keeps_its_place_in_the_queue() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let direct = open(&server);
    let held = hold(&direct, "book", ms(30_000)).await;
    let first = wait_for(
        &Lockkeeper::open(proxy.url()).unwrap(),
        "book",
        ms(30_000),
        ms(20_000),
    );
    eventually_waiting(&server, "book", 1);
    proxy.cut();
    eventually_waiting(&server, "book", 0);
    proxy.mend();
    eventually_waiting(&server, "book", 1);
    assert_eq!(held.release().await, Ok(Released::Yes));
    let _first = granted(first).await;
}

/// A wait of one second, during which this happens on the way to the server.
async fn a_wait_returns(fault: Option<fn(&Proxy)>) {
    let server = Server::start();
    let _held = hold(&open(&server), "book", ms(60_000)).await;
    let proxy = Proxy::to(&server);
    let lockkeeper = Lockkeeper::open(proxy.url()).unwrap();
    let start = Instant::now();
    let waiting = wait_for(&lockkeeper, "book", ms(30_000), ms(1000));
    eventually_waiting(&server, "book", 1);
    if let Some(fault) = fault {
        fault(&proxy);
    }
    let held = soon(waiting).await.unwrap().map(is_held);
    let took = start.elapsed();
    assert!(took >= ms(999) && took < ms(5000), "{took:?}");
    assert!(
        matches!(held, Ok(false) | Err(Error::Unreachable(_))),
        "{held:?}"
    );
    eventually_waiting(&server, "book", 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_returns_in_time() {
    a_wait_returns(None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_returns_in_time_from_a_server_that_falls_silent() {
    a_wait_returns(Some(Proxy::stop)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_returns_in_time_when_the_connection_is_cut() {
    a_wait_returns(Some(Proxy::cut)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_returns_in_time_when_replies_are_lost() {
    a_wait_returns(Some(Proxy::swallow_replies)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_of_nothing_is_one_try() {
    let server = Server::start();
    let lockkeeper = open(&server);
    let _held = hold(&lockkeeper, "book", ms(30_000)).await;
    let once = lockkeeper.acquire("book").wait(Duration::ZERO);
    assert!(!is_held(once.await.unwrap()));
    assert_eq!(calls(&server, "lock.acquire"), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_for_one_key_never_delays_the_renewal_of_another() {
    let server = Server::start();
    let lockkeeper = open(&server);
    let busy = hold(&open(&server), "busy", ms(30_000)).await;
    let waiting: Vec<_> = (0..50)
        .map(|_| wait_for(&lockkeeper, "busy", ms(30_000), ms(20_000)))
        .collect();
    eventually_waiting(&server, "busy", 50);
    let held = hold(&lockkeeper, "book", ms(1500)).await;
    let renewals = calls(&server, "lock.renew");
    eventually("it is renewed all the time", || {
        assert_eq!(held.loss(), None);
        calls(&server, "lock.renew") > renewals + 3
    });
    drop((busy, waiting));
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_unblocked_by_an_administrator_waits_on() {
    let server = Server::start();
    let mut redis = server.connect();
    let lockkeeper = open(&server);
    let held = hold(&lockkeeper, "book", ms(30_000)).await;
    let waiting = wait_for(&lockkeeper, "book", ms(30_000), ms(20_000));
    for how in ["TIMEOUT", "ERROR"] {
        eventually_waiting(&server, "book", 1);
        let clients: String = redis::cmd("CLIENT").arg("LIST").query(&mut redis).unwrap();
        let blocked = clients
            .lines()
            .find(|line| line.contains(" flags=b "))
            .unwrap();
        let id = blocked.split([' ', '=']).nth(1).unwrap();
        let unblocked = ask!(redis, "CLIENT", "UNBLOCK", id, how);
        let works = may_be_unblocked(&mut redis);
        assert_eq!(unblocked, if works { YES } else { NO });
    }
    eventually_waiting(&server, "book", 1);
    assert_eq!(held.release().await, Ok(Released::Yes));
    let _next = granted(waiting).await;
}

fn set_max_waiters(server: &Server, max: u32) {
    let setting = "lockkeeper.max-waiters";
    let set = ask!(server.connect(), "CONFIG", "SET", setting, max);
    assert_eq!(set, OK);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_is_waited_out() {
    let server = Server::start();
    let lockkeeper = open(&server);
    set_max_waiters(&server, 1);
    let held = hold(&lockkeeper, "book", ms(30_000)).await;
    let waiting = wait_for(&lockkeeper, "book", ms(30_000), ms(20_000));
    eventually_waiting(&server, "book", 1);
    let start = Instant::now();
    let full = lockkeeper.acquire("book").wait(ms(500)).await;
    match full.map(is_held) {
        Err(Error::Refused(text)) => assert!(text.starts_with("QUEUEFULL "), "{text}"),
        other => panic!("{other:?}"),
    }
    assert!(start.elapsed() >= ms(500));

    // Nobody may wait for a while, as before an upgrade of the module.
    set_max_waiters(&server, 0);
    eventually_waiting(&server, "book", 0);
    let refused = calls(&server, "lock.acquire");
    let next = wait_for(&lockkeeper, "book", ms(30_000), ms(20_000));
    eventually("both have been refused", || {
        calls(&server, "lock.acquire") > refused + 6
    });
    set_max_waiters(&server, 1000);
    eventually_waiting(&server, "book", 2);
    assert_eq!(held.release().await, Ok(Released::Yes));
    let turn = async |waiting| granted(waiting).await.release().await;
    let (first, second) = tokio::join!(turn(waiting), turn(next));
    assert_eq!((first, second), (Ok(Released::Yes), Ok(Released::Yes)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_at_a_server_that_hangs_is_not_called_busy() {
    let server = Server::start();
    let _held = hold(&open(&server), "book", ms(60_000)).await;
    let waiting = wait_for(&open(&server), "book", ms(30_000), ms(1000));
    eventually_waiting(&server, "book", 1);
    signal(&server, libc::SIGSTOP);
    let answer = soon(waiting).await.unwrap();
    assert!(matches!(answer, Err(Error::Unreachable(_))), "{answer:?}");
    signal(&server, libc::SIGCONT);
    eventually_waiting(&server, "book", 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_goes_where_the_master_is() {
    let old = Server::start();
    let new = Server::replica_of(&old);
    let proxy = Proxy::to(&old);
    let mut on_new = new.connect();
    fence(ask!(
        old.connect(),
        "LOCK.ACQUIRE",
        "book",
        "holder",
        600_000
    ));
    eventually("the replica has the lock", || {
        ask!(on_new, "EXISTS", "book") == YES
    });
    let lockkeeper = Lockkeeper::open(proxy.url()).unwrap();
    // With this ttl it polls every second whether the server is still there.
    let waiting = wait_for(&lockkeeper, "book", ms(3000), ms(29_000));
    eventually_waiting(&old, "book", 1);
    signal(&old, libc::SIGSTOP);
    proxy.lead_to(&new);
    assert_eq!(ask!(on_new, "REPLICAOF", "NO", "ONE"), OK);
    eventually_waiting(&new, "book", 1);
    assert_eq!(ask!(on_new, "LOCK.RELEASE", "book", "holder"), YES);
    let held = granted(waiting).await;
    assert_eq!(held.release().await, Ok(Released::Yes));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_whose_connection_is_stopped_keeps_its_place() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let held = hold(&open(&server), "book", ms(60_000)).await;
    let lockkeeper = Lockkeeper::open(proxy.url()).unwrap();
    let first = wait_for(&lockkeeper, "book", ms(3000), ms(29_000));
    eventually_waiting(&server, "book", 1);
    let second = wait_for(&open(&server), "book", ms(30_000), ms(29_000));
    eventually_waiting(&server, "book", 2);
    let acquires = calls(&server, "lock.acquire");
    proxy.stop_old_connections();
    eventually("it asks again over another connection", || {
        calls(&server, "lock.acquire") > acquires + 1
    });
    eventually_waiting(&server, "book", 2);
    assert_eq!(held.release().await, Ok(Released::Yes));
    let first = granted(first).await;
    assert!(!second.is_finished());
    assert_eq!(first.release().await, Ok(Released::Yes));
    assert!(granted(second).await.fence() > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_may_not_use_info_waits_all_the_same() {
    let server = Server::start();
    let mut redis = server.connect();
    let user = ["ACL", "SETUSER", "clerk", "on", ">secret", "~*"];
    let rules = ["+lock.acquire", "+lock.renew", "+lock.release"];
    assert_eq!(ask!(redis, &user, &rules), OK);
    let held = hold(&open(&server), "book", ms(60_000)).await;
    let url = format!("redis://clerk:secret@127.0.0.1:{}/", server.port());
    let lockkeeper = Lockkeeper::open(url).unwrap();
    let waiting = wait_for(&lockkeeper, "book", ms(3000), ms(20_000));
    eventually("it has asked in another way", || {
        calls(&server, "lock.renew") > 1
    });
    let stats: String = redis::cmd("INFO")
        .arg("commandstats")
        .query(&mut redis)
        .unwrap();
    let info = stats.lines().find(|line| line.contains("lock.info"));
    assert!(info.unwrap().contains("rejected_calls=1,"), "{info:?}");
    assert_eq!(held.release().await, Ok(Released::Yes));
    assert_eq!(granted(waiting).await.release().await, Ok(Released::Yes));
}

#[tokio::test(flavor = "multi_thread")]
async fn all_who_wait_at_a_server_poll_once_whether_it_is_there() {
    let server = Server::start();
    let lockkeeper = open(&server);
    let _held = hold(&lockkeeper, "book", ms(60_000)).await;
    let waiting: Vec<_> = (0..20)
        .map(|_| wait_for(&lockkeeper, "book", ms(3000), ms(29_000)))
        .collect();
    eventually_waiting(&server, "book", 20);
    let before = calls(&server, "lock.info");
    // Each polls once a second.
    tokio::time::sleep(ms(2000)).await;
    let polls = calls(&server, "lock.info") - before;
    assert!((1..=10).contains(&polls), "{polls} in two seconds");
    waiting.iter().for_each(JoinHandle::abort);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_outlives_the_death_of_the_holder() {
    let server = Server::start();
    let mut redis = server.connect();
    fence(ask!(redis, "LOCK.ACQUIRE", "book", "dead", 700));
    let acquired = soon(open(&server).acquire("book").wait_forever()).await;
    let held = acquired.unwrap().unwrap();
    assert_eq!(held.loss(), None::<Lost>);
    assert_eq!(
        info::<u64>(&mut redis, "lockkeeper", "lockkeeper_waiters"),
        0
    );
}
