//! The helper without faults: acquire, renew, release, and the notice of a loss.

use std::time::Duration;

use lockkeeper::{Error, Lockkeeper, Lost, Ran, Released, Renewed};
use testkit::client::{calls, hold, is_held, ms, open, soon};
use testkit::waiting::waiters;
use testkit::{Server, ask, eventually, number, text};

#[tokio::test]
async fn a_lock_is_acquired_and_released() {
    let server = Server::start();
    let mut redis = server.connect();
    let held = open(&server)
        .acquire("book")
        .label("me")
        .await
        .unwrap()
        .unwrap();

    assert_eq!(held.key(), b"book");
    assert!(held.owner().starts_with("me:") && held.owner().len() == 3 + 36);
    assert_eq!(
        ask!(redis, "GET", "book"),
        text(testkit::lock_value(held.fence() as i64, held.owner()))
    );
    let ttl = number(ask!(redis, "PTTL", "book"));
    assert!(
        (25_000..=30_000).contains(&ttl),
        "30 s by default, got {ttl}"
    );
    assert!(held.remaining() > ms(25_000) && held.remaining() < ms(29_700));
    assert_eq!(held.loss(), None);

    assert_eq!(held.release().await, Ok(Released::Yes));
    assert_eq!(ask!(redis, "EXISTS", "book"), testkit::NO);
}

#[tokio::test]
async fn what_is_released_is_not_lost() {
    let server = Server::start();
    let lockkeeper = open(&server);
    let released = hold(&lockkeeper, "released", ms(1500)).await;
    let left = hold(&lockkeeper, "left", ms(1500)).await;
    let (lost, also) = (released.lost(), left.lost());
    assert_eq!(released.release().await, Ok(Released::Yes));
    left.leave();
    // The end of both ttls passes.
    let lost = async { tokio::select!(lost = lost => lost, lost = also => lost) };
    let lost = tokio::time::timeout(ms(1600), lost).await;
    assert!(lost.is_err(), "{lost:?}");
}

#[tokio::test]
async fn a_task_that_panics_releases() {
    let server = Server::start();
    let lockkeeper = open(&server);
    let task = tokio::spawn(async move {
        let _held = lockkeeper.acquire("book").await.unwrap().unwrap();
        panic!("as this test wants it");
    });
    assert!(task.await.unwrap_err().is_panic());
    eventually("it is free", || {
        ask!(server.connect(), "EXISTS", "book") == testkit::NO
    });
}

#[test]
fn blocking_code_locks_without_a_runtime() {
    let server = Server::start();
    let lockkeeper = open(&server);
    let held = lockkeeper
        .acquire("book")
        .ttl(ms(1500))
        .blocking()
        .unwrap()
        .unwrap();
    assert!(!is_held(lockkeeper.acquire("book").blocking().unwrap()));
    eventually("the watchdog renews while this thread blocks", || {
        calls(&server, "lock.renew") >= 4
    });
    assert_eq!(held.loss(), None);
    assert_eq!(held.blocking_renew(), Ok(Renewed::Yes));
    let info = lockkeeper.blocking_info("book").unwrap().unwrap();
    assert_eq!(info.fence, Some(held.fence()));
    assert_eq!(held.blocking_release(), Ok(Released::Yes));

    let held = lockkeeper.acquire("book").blocking().unwrap().unwrap();
    let owner = held.owner().to_owned();
    let hold = ms(20_000);
    assert_eq!(held.blocking_release_after(hold), Ok(Released::Yes));
    assert!(!is_held(lockkeeper.acquire("book").blocking().unwrap()));
    let released = lockkeeper.blocking_release_for("book", owner);
    assert_eq!(released, Ok(Released::Yes));
}

#[test]
fn blocking_code_runs_a_body_under_a_lock() {
    let server = Server::start();
    let lockkeeper = open(&server);
    let ran = lockkeeper.acquire("book").blocking_run(|held| {
        let busy = lockkeeper.acquire("book").blocking_run(|_| ());
        assert_eq!(busy, Ok(Ran::Busy));
        held.fence()
    });
    assert!(matches!(ran, Ok(Ran::Done(1..))), "{ran:?}");
    assert_eq!(ask!(server.connect(), "EXISTS", "book"), testkit::NO);

    let ran = lockkeeper.acquire("book").ttl(ms(3000)).blocking_run(|_| {
        assert_eq!(ask!(server.connect(), "DEL", "book"), testkit::YES);
        "done"
    });
    let lost = Ran::Lost {
        why: Lost::Gone,
        done: Some("done"),
    };
    assert_eq!(ran, Ok(lost), "what it returned is not thrown away");
}

/// An error that knows nothing of locks.
#[derive(Debug, PartialEq)]
struct Failure;

#[tokio::test]
async fn what_the_body_returns_wins_over_the_error_of_the_release() {
    let mut server = Server::start();
    let lockkeeper = open(&server);
    let asked = lockkeeper.acquire("book").ttl(ms(1500));
    let ran = asked.run(async |_| -> Result<(), Failure> {
        server.kill9();
        Err(Failure)
    });
    assert_eq!(soon(ran).await, Ok(Ran::Done(Err(Failure))));

    // It did not run, so that nobody answers is all there is to tell.
    let ran = lockkeeper.acquire("book").ttl(ms(300)).run(async |_| 7);
    assert!(matches!(soon(ran).await, Err(Error::Unreachable(_))));

    server.start_again();
    let ran = lockkeeper.acquire("book").ttl(ms(1500)).run(async |_| {
        server.kill9();
        7
    });
    assert_eq!(soon(ran).await, Ok(Ran::Done(7)));
}

#[tokio::test]
async fn a_body_that_never_awaits_does_not_hide_that_its_lease_has_ended() {
    let mut server = Server::start();
    let ran = open(&server).acquire("book").ttl(ms(300)).run(async |_| {
        server.kill9();
        std::thread::sleep(ms(600));
        7
    });
    let lost = Ran::Lost {
        why: Lost::Expired,
        done: Some(7),
    };
    assert_eq!(soon(ran).await, Ok(lost));
}

#[tokio::test(flavor = "multi_thread")]
async fn info_shows_who_holds_it_and_who_waits() {
    let server = Server::start();
    let lockkeeper = open(&server);
    assert_eq!(lockkeeper.info("book").await, Ok(None));
    let held = lockkeeper.acquire("book").await.unwrap().unwrap();
    let info = lockkeeper.info("book").await.unwrap().unwrap();
    assert_eq!(info.owner.as_deref(), Some(held.owner().as_bytes()));
    assert_eq!(info.fence, Some(held.fence()));
    assert!(
        info.held.unwrap() < ms(5000) && info.ttl.unwrap() > ms(25_000),
        "{info:?}"
    );
    assert_eq!((info.waiters, info.queue.len()), (0, 0));

    let _waiting = tokio::spawn(lockkeeper.acquire("book").wait_forever());
    let mut redis = server.connect();
    eventually("one waits", || waiters(&mut redis, "book") == 1);
    let info = lockkeeper.info("book").await.unwrap().unwrap();
    let first = &info.queue[0];
    assert!(!first.owner.is_empty() && info.owner.as_deref() != Some(&*first.owner));
    assert!(first.waited < ms(20_000));
}

#[tokio::test]
async fn a_lock_can_be_released_in_the_name_of_its_owner() {
    let server = Server::start();
    let lockkeeper = open(&server);
    let held = lockkeeper.acquire("book").await.unwrap().unwrap();
    let released = lockkeeper.release_for("book", "nobody").await;
    assert_eq!(released, Ok(Released::Lost(Lost::Taken)));
    assert_eq!(
        lockkeeper.release_for("book", held.owner()).await,
        Ok(Released::Yes)
    );
    let released = lockkeeper.release_for("book", held.owner()).await;
    assert_eq!(released, Ok(Released::Lost(Lost::Gone)));
}

#[tokio::test]
async fn connections_are_named_after_the_label() {
    let server = Server::start();
    let lockkeeper = Lockkeeper::builder(server.url())
        .label("nightly job")
        .open()
        .unwrap();
    let _held = lockkeeper.acquire("book").await.unwrap().unwrap();
    let list: String = redis::cmd("CLIENT")
        .arg("LIST")
        .query(&mut server.connect())
        .unwrap();
    assert!(list.contains(" name=lockkeeper:nightly_job "), "{list}");
}

#[tokio::test]
async fn what_makes_no_sense_is_refused_before_anything_is_sent() {
    let wrong = |error: Error| match error {
        Error::Invalid(text) => text,
        other => panic!("{other:?}"),
    };
    let server = Server::start();
    let lockkeeper = open(&server);
    let error = lockkeeper.acquire("book").ttl(ms(99)).await.unwrap_err();
    assert_eq!(wrong(error), "the ttl must be at least 100ms, got 99ms");
    let (longest, longer) = (ms((1 << 53) - 1), Duration::MAX);
    let error = lockkeeper.acquire("book").ttl(longer).await.unwrap_err();
    assert!(wrong(error).starts_with("the ttl must be at most 9007199254740991 ms, got "));
    let error = lockkeeper
        .acquire("book")
        .label("x".repeat(459))
        .await
        .unwrap_err();
    assert_eq!(
        wrong(error),
        "the label must not be longer than 458 bytes, got 459"
    );
    for url in [
        "localhost",
        "http://localhost",
        "redis+sentinel://localhost",
        "redis+x://localhost",
    ] {
        assert!(
            wrong(Lockkeeper::open(url).unwrap_err()).contains("URL"),
            "{url}"
        );
    }
    assert_eq!(calls(&server, "lock.acquire"), 0);
    let held = hold(&lockkeeper, "for ever", longest).await;
    assert_eq!(held.release().await, Ok(Released::Yes));
    let longest = lockkeeper
        .acquire("book")
        .label("x".repeat(458))
        .await
        .unwrap();
    assert_eq!(longest.unwrap().owner().len(), 495);
}
