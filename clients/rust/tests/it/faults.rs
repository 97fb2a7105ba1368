//! The helper and faults, where the scenarios of all helpers do not look: what it sends while tasks race
//! and requests are late, and what it says.

use std::time::{Duration, Instant};

use lockkeeper::{Error, Lockkeeper, Lost, Released};
use testkit::client::{calls, hold, is_held, ms, open, soon};
use testkit::proxy::Proxy;
use testkit::{Server, ask, eventually};

use crate::log;

fn through(proxy: &Proxy) -> Lockkeeper {
    Lockkeeper::open(proxy.url()).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_watchdog_never_renews_what_is_being_released() {
    let server = Server::start();
    let lockkeeper = open(&server);
    let (sender, mut handles) = tokio::sync::mpsc::channel::<lockkeeper::Held>(100);
    let releaser = tokio::spawn(async move {
        while let Some(held) = handles.recv().await {
            assert_eq!(held.release().await, Ok(Released::Yes));
        }
    });
    let mut acquirers = tokio::task::JoinSet::new();
    for task in 0..20 {
        let (lockkeeper, sender) = (lockkeeper.clone(), sender.clone());
        acquirers.spawn(async move {
            for number in 0..100 {
                let held = hold(&lockkeeper, &format!("book:{task}:{number}"), ms(2000)).await;
                sender.send(held).await.unwrap();
            }
        });
    }
    drop(sender);
    acquirers.join_all().await;
    releaser.await.unwrap();

    assert_eq!(ask!(server.connect(), "DBSIZE"), testkit::NO);
    let renewals = calls(&server, "lock.renew");
    tokio::time::sleep(ms(700)).await;
    assert_eq!(
        calls(&server, "lock.renew"),
        renewals,
        "a third of the ttl later"
    );
    // More if the machine was so busy that some were asked for again.
    assert!(calls(&server, "lock.acquire") >= 2000);
    assert!(calls(&server, "lock.release") >= 2000);
}

/// The first request is held back, and asked again over another connection. The first arrives so
/// long after it was sent.
async fn a_late_request_brings_no_lock_back(after: Duration) {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let lockkeeper = through(&proxy);
    assert_eq!(lockkeeper.info("book").await, Ok(None), "connected");
    let start = Instant::now();
    proxy.stop_old_connections();
    // With this ttl it is asked again after 1 s.
    let held = hold(&lockkeeper, "book", ms(6000)).await;
    assert_eq!(held.release().await, Ok(Released::Yes));
    tokio::time::sleep(after.saturating_sub(start.elapsed())).await;
    assert_eq!(calls(&server, "lock.acquire"), 1);
    let releases = calls(&server, "lock.release");
    assert!(releases > 0);
    proxy.mend();
    eventually("the first request arrives", || {
        calls(&server, "lock.acquire") == 2
    });
    eventually("and the release after it", || {
        calls(&server, "lock.release") > releases
    });
    assert_eq!(ask!(server.connect(), "EXISTS", "book"), testkit::NO);
}

#[tokio::test]
async fn a_request_that_arrives_late_brings_no_lock_back() {
    a_late_request_brings_no_lock_back(Duration::ZERO).await;
}

/// We read it for 5 s after it was given up, and then leave it to the system.
#[tokio::test]
async fn nor_does_one_on_a_connection_that_we_have_closed_ourselves() {
    a_late_request_brings_no_lock_back(ms(6500)).await;
}

#[tokio::test]
async fn an_error_says_that_nobody_answered_in_time() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    proxy.stop();
    let asked = through(&proxy).acquire("book").ttl(ms(600));
    let silent = Error::Unreachable("no answer in time".to_owned());
    assert_eq!(asked.await.map(is_held), Err(silent));
}

#[tokio::test]
async fn what_happens_to_a_lock_is_traced() {
    log::start();
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let held = hold(&through(&proxy), "traced", ms(600)).await;
    proxy.cut();
    assert_eq!(soon(held.lost()).await, Lost::Expired);
    let line = |level: &str, text: &str| {
        let found = log::lines("traced", level, text).into_iter().next();
        found.unwrap_or_else(|| panic!("no {level} {text}"))
    };
    let acquired = line("DEBUG", "acquired");
    assert!(acquired.contains(&format!("owner={} fence={}", held.owner(), held.fence())));
    assert!(line("WARN", "a renewal has failed").contains("error=the server cannot be reached"));
    assert!(
        line("ERROR", "the lock is lost").contains("lost=it could not be renewed before it ended")
    );
}
