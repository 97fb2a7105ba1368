//! Several holders of one lock: places, readers and writers, and who changes from one to the other.

use std::time::Duration;

use lockkeeper::{Downgraded, Error, Held, Lockkeeper, Lost, Released, Renewed, Upgraded};
use testkit::client::{calls, is_held, ms, open, soon};
use testkit::proxy::Proxy;
use testkit::{NO, Server, YES, ask, eventually};

async fn read(lockkeeper: &Lockkeeper, ttl: Duration) -> Held {
    let asked = lockkeeper.acquire("book").shared().ttl(ttl);
    asked.await.unwrap().unwrap()
}

#[tokio::test]
async fn a_limit_that_makes_no_sense_is_invalid() {
    let server = Server::start();
    let lockkeeper = open(&server);
    for asked in [
        lockkeeper.acquire("pool").limit(0),
        lockkeeper.acquire("pool").limit(1001),
        lockkeeper.acquire("pool").limit(2).shared(),
    ] {
        assert!(matches!(asked.await, Err(Error::Invalid(_))));
    }
    assert_eq!(calls(&server, "lock.acquire"), 0);
}

#[tokio::test]
async fn info_tells_all_there_is_to_tell() {
    let server = Server::start();
    let lockkeeper = open(&server);
    let reader = read(&lockkeeper, ms(30_000)).await;
    let place = lockkeeper.acquire("book").limit(3).ttl(ms(60_000));
    let place = place.await.unwrap().unwrap();
    let waiting = lockkeeper.acquire("book").limit(2).wait(ms(20_000));
    let waiting = tokio::spawn(waiting.into_future());
    let info = || async { lockkeeper.info("book").await.unwrap().unwrap() };
    while info().await.waiters == 0 {
        tokio::time::sleep(ms(2)).await;
    }
    let told = info().await;
    assert_eq!((told.limit, told.holding, told.owner), (Some(3), 2, None));
    assert_eq!(told.queue[0].limit, 2);
    for (holder, (held, limit, ttl)) in told
        .holders
        .iter()
        .zip([(&reader, 1000, ms(30_000)), (&place, 3, ms(60_000))])
    {
        assert_eq!(holder.owner, held.owner().as_bytes());
        assert_eq!((holder.fence, holder.limit), (Some(held.fence()), limit));
        let left = holder.ttl.unwrap();
        assert!(left <= ttl && left > ttl - ms(20_000), "{left:?}");
    }
    assert!(told.ttl.unwrap() > ms(40_000), "the last of them");
    drop((reader, place));
    let alone = soon(waiting).await.unwrap().unwrap().unwrap();
    assert_eq!(info().await.holders.len(), 1);
    assert_eq!(alone.release().await, Ok(Released::Yes));

    let held = lockkeeper.acquire("book").await.unwrap().unwrap();
    let told = info().await;
    assert_eq!((told.limit, told.holding), (Some(1), 1));
    assert_eq!(told.holders[0].owner, held.owner().as_bytes());
    assert_eq!(told.holders[0].fence, told.fence);
}

#[test]
fn blocking_code_upgrades_and_downgrades_too() {
    let server = Server::start();
    let lockkeeper = open(&server);
    let reader = || lockkeeper.acquire("book").shared().blocking();
    let one = reader().unwrap().unwrap();
    let other = reader().unwrap().unwrap();
    let fence = one.fence();
    assert_eq!(one.blocking_upgrade(), Ok(Upgraded::Busy));
    assert_eq!(one.fence(), fence);
    assert_eq!(other.blocking_release(), Ok(Released::Yes));
    assert_eq!(one.blocking_upgrade(), Ok(Upgraded::Yes));
    assert!(one.fence() > fence);
    assert!(!is_held(reader().unwrap()));
    assert_eq!(one.blocking_downgrade(), Ok(Downgraded::Yes));
    assert!(is_held(reader().unwrap()));
}

/// Renewals 10 ms after each other, changes without a pause, and readers who ask in between.
#[tokio::test]
async fn changes_and_renewals_do_not_get_in_each_others_way() {
    let server = Server::start();
    let lockkeeper = open(&server);
    let held = read(&lockkeeper, ms(1500)).await;
    let lost = held.lost();
    let changes = async {
        let (mut upgrades, mut fence) = (0, held.fence());
        while upgrades < 100 {
            if held.upgrade().await.unwrap() == Upgraded::Yes {
                upgrades += 1;
                assert!(held.fence() > fence);
                fence = held.fence();
                assert!(!is_held(lockkeeper.acquire("book").shared().await.unwrap()));
                assert_eq!(held.downgrade().await, Ok(Downgraded::Yes));
                assert!(is_held(lockkeeper.acquire("book").shared().await.unwrap()));
            }
        }
    };
    let renewals = async {
        loop {
            assert_eq!(held.renew().await, Ok(Renewed::Yes));
            assert!(held.remaining() <= ms(1500));
            tokio::time::sleep(ms(10)).await;
        }
    };
    tokio::select! {
        () = changes => {}
        () = renewals => {}
        lost = lost => panic!("{lost:?}"),
    }
    assert_eq!(held.release().await, Ok(Released::Yes));
    assert_eq!(ask!(server.connect(), "EXISTS", "book"), NO);
}

#[tokio::test]
async fn a_change_that_is_cancelled_at_any_moment_leaves_a_lock_that_is_held() {
    let server = Server::start();
    let lockkeeper = open(&server);
    let held = read(&lockkeeper, ms(30_000)).await;
    for micros in (0..2000).step_by(40) {
        let limit = Duration::from_micros(micros);
        let _ = tokio::time::timeout(limit, held.upgrade()).await;
        let _ = tokio::time::timeout(limit, held.downgrade()).await;
    }
    assert_eq!(held.downgrade().await, Ok(Downgraded::Yes));
    let told = lockkeeper.info("book").await.unwrap().unwrap();
    assert_eq!(
        told.holders[0].fence,
        Some(held.fence()),
        "the last grant's"
    );
    assert_eq!(held.upgrade().await, Ok(Upgraded::Yes));
    assert_eq!(held.release().await, Ok(Released::Yes));
    assert!(lockkeeper.settled(ms(10_000)).await);
    assert_eq!(ask!(server.connect(), "EXISTS", "book"), NO);
}

#[tokio::test]
async fn an_upgrade_at_the_end_of_the_lease_is_a_loss() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let lockkeeper = Lockkeeper::open(proxy.url()).unwrap();
    let held = read(&lockkeeper, ms(1500)).await;
    proxy.stop();
    while held.remaining() > ms(200) {
        tokio::time::sleep(ms(5)).await;
    }
    assert_eq!(held.upgrade().await, Ok(Upgraded::Lost(Lost::Expired)));
    proxy.mend();
    assert_eq!(held.release().await, Ok(Released::Lost(Lost::Expired)));
    eventually("it is free", || {
        ask!(server.connect(), "EXISTS", "book") == NO
    });
    assert_eq!(calls(&server, "lock.acquire"), 1);
}

#[tokio::test]
async fn a_change_counts_only_when_enough_replicas_acknowledged_it() {
    let server = Server::start();
    let mut replica = Server::replica_of(&server);
    let lockkeeper = open(&server);
    let asked = lockkeeper.acquire("book").shared().min_replicas(1);
    let held = asked.await.unwrap().unwrap();
    assert_eq!(held.upgrade().await, Ok(Upgraded::Yes));
    let value = ask!(server.connect(), "GET", "book");
    assert_eq!(ask!(replica.connect(), "GET", "book"), value);
    replica.kill9();
    let fence = held.fence();
    let few = held.downgrade().await;
    let says = |line: &str| line.starts_with("NOREPLICAS");
    assert!(
        matches!(&few, Err(Error::Refused(line)) if says(line)),
        "{few:?}"
    );
    assert_eq!((held.fence(), held.loss()), (fence, None));
    assert_eq!(ask!(server.connect(), "EXISTS", "book"), YES);
}
