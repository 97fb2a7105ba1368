//! The helper in the server's queue: every wait ends in time, and nothing is left of one.

use std::time::{Duration, Instant};

use lockkeeper::{Acquired, Error, Held, Lockkeeper, Lost, Released};
use testkit::client::{calls, hold, is_held, ms, open, soon};
use testkit::proxy::Proxy;
use testkit::waiting::may_be_unblocked;
use testkit::{NO, OK, Server, YES, ask, eventually, fence, info};
use tokio::task::JoinHandle;

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
        let asked = Instant::now();
        let answer = lockkeeper.acquire("book").wait(ms(300)).await;
        assert!(asked.elapsed() < ms(2_000));
        match silent {
            false => assert!(!is_held(answer.unwrap()), "it is busy"),
            true => assert!(matches!(answer, Err(Error::Unreachable(_))), "{answer:?}"),
        }
        assert_eq!(held.release().await, Ok(Released::Yes));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_in_line_for_longer_than_the_ttl_all_get_their_turn() {
    let server = Server::start();
    let ttl = ms(300);
    let mut line = tokio::task::JoinSet::new();
    for _ in 0..10 {
        let lockkeeper = open(&server);
        line.spawn(async move {
            let held = lockkeeper.acquire("book").ttl(ttl).wait(ms(10_000)).await;
            let held = held.unwrap().expect("a turn for everybody");
            assert!(
                held.remaining() >= ttl / 2,
                "{:?} left when handed out",
                held.remaining()
            );
            tokio::time::sleep(ms(200)).await;
            let fence = held.fence();
            assert_eq!(held.release().await, Ok(Released::Yes));
            fence
        });
    }
    let mut fences = soon(line.join_all()).await;
    fences.sort_unstable();
    fences.dedup();
    assert_eq!(fences.len(), 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grant_after_a_wait_is_renewed_before_it_is_handed_out() {
    let server = Server::start();
    let held = hold(&open(&server), "book", ms(600)).await;
    let waiting = wait_for(&open(&server), "book", ms(600), ms(20_000));
    eventually_waiting(&server, "book", 1);
    tokio::time::sleep(ms(600)).await;
    let renewals = calls(&server, "lock.renew");
    assert_eq!(held.release().await, Ok(Released::Yes));
    let next = granted(waiting).await;
    assert!(calls(&server, "lock.renew") > renewals);
    assert!(next.remaining() > ms(400) - ms(50), "{next:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grant_that_lapsed_unheard_is_not_handed_out() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let mut redis = server.connect();
    fence(ask!(redis, "LOCK.ACQUIRE", "book", "first", 60_000));
    let lockkeeper = Lockkeeper::open(proxy.url()).unwrap();
    let waiting = wait_for(&lockkeeper, "book", ms(300), ms(20_000));
    eventually_waiting(&server, "book", 1);
    proxy.stop();
    assert_eq!(ask!(redis, "LOCK.RELEASE", "book", "first"), YES);
    let unheard = fence(ask!(
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
        held.fence() > unheard as u64,
        "the wait went on behind the second"
    );
    assert!(held.remaining() > ms(150), "{held:?}");
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
    let names: String = redis::cmd("CLIENT")
        .arg("LIST")
        .query(&mut server.connect())
        .unwrap();
    assert_eq!(
        names.matches(" name=lockkeeper:").count(),
        1,
        "connections are closed: {names}"
    );
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
    for moment in 0..30 {
        fence(ask!(holder, "LOCK.ACQUIRE", "book", "holder", 60_000));
        let waiting = wait_for(&lockkeeper, "book", ms(60_000), ms(20_000));
        tokio::time::sleep(ms(5 * moment)).await;
        waiting.abort();
        assert_eq!(ask!(holder, "LOCK.RELEASE", "book", "holder"), YES);
        // Only now is it dropped, with what it may have been granted meanwhile.
        let _ = waiting.await;
        assert!(lockkeeper.settled(testkit::PATIENCE).await);
        eventually("all that was sent has arrived", || {
            connected() == before + 1
        });
        assert_eq!(ask!(holder, "EXISTS", "book"), NO, "after {moment} × 5 ms");
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

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_returns_in_time_whatever_the_server_does() {
    let server = Server::start();
    let _held = hold(&open(&server), "book", ms(60_000)).await;
    for trouble in [
        None,
        Some(Proxy::stop as fn(&Proxy)),
        Some(Proxy::cut),
        Some(Proxy::swallow_replies),
    ] {
        let proxy = Proxy::to(&server);
        let lockkeeper = Lockkeeper::open(proxy.url()).unwrap();
        let start = Instant::now();
        let waiting = wait_for(&lockkeeper, "book", ms(30_000), ms(1500));
        eventually_waiting(&server, "book", 1);
        if let Some(trouble) = trouble {
            trouble(&proxy);
        }
        let held = soon(waiting).await.unwrap().map(is_held);
        let took = start.elapsed();
        assert!(took >= ms(1499) && took < ms(1600), "{took:?}");
        assert!(
            matches!(held, Ok(false) | Err(Error::Unreachable(_))),
            "{held:?}"
        );
        eventually_waiting(&server, "book", 0);
    }
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
    let held = hold(&lockkeeper, "book", ms(600)).await;
    let start = Instant::now();
    while start.elapsed() < ms(1500) {
        assert!(held.remaining() > ms(200), "{held:?}");
        tokio::time::sleep(ms(10)).await;
    }
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

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_is_refused_at_once() {
    let server = Server::start();
    let lockkeeper = open(&server);
    assert_eq!(
        ask!(
            server.connect(),
            "CONFIG",
            "SET",
            "lockkeeper.max-waiters",
            1
        ),
        OK
    );
    let _held = hold(&lockkeeper, "book", ms(30_000)).await;
    let waiting = wait_for(&lockkeeper, "book", ms(30_000), ms(20_000));
    eventually_waiting(&server, "book", 1);
    match lockkeeper
        .acquire("book")
        .wait(ms(20_000))
        .await
        .map(is_held)
    {
        Err(Error::Refused(text)) => assert!(text.starts_with("QUEUEFULL "), "{text}"),
        other => panic!("{other:?}"),
    }
    waiting.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_outlives_the_death_of_the_holder() {
    let server = Server::start();
    let mut redis = server.connect();
    fence(ask!(redis, "LOCK.ACQUIRE", "book", "dead", 700));
    let start = Instant::now();
    let held = open(&server)
        .acquire("book")
        .wait_forever()
        .await
        .unwrap()
        .unwrap();
    assert!(start.elapsed() < ms(5000));
    assert_eq!(held.loss(), None::<Lost>);
    assert_eq!(
        info::<u64>(&mut redis, "lockkeeper", "lockkeeper_waiters"),
        0
    );
}
