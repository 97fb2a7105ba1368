//! The helper in the server's queue, where the scenarios of all helpers do not look: over which
//! connections it asks, and how often.

use std::time::Duration;

use lockkeeper::{Acquired, Error, Held, Lockkeeper, Released};
use testkit::client::{calls, hold, ms, open, soon};
use testkit::proxy::Proxy;
use testkit::waiting::waiters;
use testkit::{OK, Server, ask, eventually};
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

fn eventually_waiting(server: &Server, key: &str, count: i64) {
    let mut redis = server.connect();
    eventually(format!("{count} wait"), || {
        waiters(&mut redis, key) == count
    });
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
async fn who_may_not_use_info_waits_all_the_same_and_tries_it_once() {
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
