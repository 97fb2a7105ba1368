//! The helper without faults: acquire, renew, release, and the notice of a loss.

use std::time::Duration;

use lockkeeper::{Error, Lockkeeper, Lost, Ran, Released, Renewed};
use testkit::client::{calls, hold, is_held, ms, open, soon};
use testkit::{OK, Server, ask, eventually, number, text};

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
async fn busy_is_an_answer_not_an_error() {
    let server = Server::start();
    let (one, other) = (open(&server), open(&server));
    let held = one.acquire("book").await.unwrap().unwrap();
    assert!(!is_held(other.acquire("book").await.unwrap()));
    assert!(
        !is_held(one.acquire("book").await.unwrap()),
        "every acquire is a tenure of its own"
    );
    assert_eq!(held.release().await, Ok(Released::Yes));
    let next = other.acquire("book").await.unwrap();
    assert!(is_held(next), "released, so it is free");
}

#[tokio::test]
async fn the_watchdog_keeps_a_lock_ten_times_its_ttl() {
    let server = Server::start();
    let held = hold(&open(&server), "book", ms(500)).await;
    let mut redis = server.connect();
    // Every third of the ttl there is one.
    eventually("it is renewed thirty times", || {
        assert_eq!(ask!(redis, "EXISTS", "book"), testkit::YES);
        assert_eq!(held.loss(), None);
        calls(&server, "lock.renew") >= 30
    });
    assert_eq!(held.release().await, Ok(Released::Yes));
}

#[tokio::test]
async fn a_deleted_lock_is_lost_at_the_next_renewal() {
    let server = Server::start();
    let held = hold(&open(&server), "book", ms(600)).await;
    assert_eq!(ask!(server.connect(), "DEL", "book"), testkit::YES);
    // Not `Expired`, as it would be if only the clock had shown it.
    assert_eq!(soon(held.lost()).await, Lost::Gone);
    assert_eq!(held.loss(), Some(Lost::Gone));
    assert_eq!(held.remaining(), Duration::ZERO);
    assert_eq!(held.renew().await, Ok(Renewed::Lost(Lost::Gone)));
    assert_eq!(held.release().await, Ok(Released::Lost(Lost::Gone)));
    assert_eq!(
        ask!(server.connect(), "EXISTS", "book"),
        testkit::NO,
        "a loss is final"
    );
}

#[tokio::test]
async fn a_lock_that_was_taken_over_is_lost_and_the_new_holder_is_safe() {
    let server = Server::start();
    let mut redis = server.connect();
    let held = hold(&open(&server), "book", ms(600)).await;
    assert_eq!(ask!(redis, "SET", "book", "somebody", "PX", 60_000), OK);
    assert_eq!(soon(held.lost()).await, Lost::Taken);

    let renewals = calls(&server, "lock.renew");
    assert_eq!(held.renew().await, Ok(Renewed::Lost(Lost::Taken)));
    assert_eq!(
        soon(held.lost()).await,
        Lost::Taken,
        "it may be asked again"
    );
    assert_eq!(held.release().await, Ok(Released::Lost(Lost::Taken)));
    assert_eq!(calls(&server, "lock.renew"), renewals, "a no is final");
    assert_eq!(
        calls(&server, "lock.release"),
        0,
        "there was nothing of ours to release"
    );
    assert_eq!(ask!(redis, "GET", "book"), text("somebody"));
}

#[tokio::test]
async fn renew_asks_the_server_now() {
    let server = Server::start();
    let held = open(&server).acquire("book").await.unwrap().unwrap();
    assert_eq!(held.renew().await, Ok(Renewed::Yes));
    assert_eq!(calls(&server, "lock.renew"), 1);
    assert!(held.remaining() > ms(29_000));
    assert_eq!(ask!(server.connect(), "DEL", "book"), testkit::YES);
    assert_eq!(held.renew().await, Ok(Renewed::Lost(Lost::Gone)));
    assert_eq!(held.loss(), Some(Lost::Gone));
}

#[tokio::test]
async fn nothing_is_renewed_after_the_release() {
    let server = Server::start();
    let lockkeeper = open(&server);
    let held = hold(&lockkeeper, "book", ms(300)).await;
    eventually("it is renewed", || calls(&server, "lock.renew") > 0);
    assert_eq!(held.release().await, Ok(Released::Yes));
    let renewals = calls(&server, "lock.renew");
    tokio::time::sleep(ms(600)).await;
    assert_eq!(calls(&server, "lock.renew"), renewals);
    assert_eq!(calls(&server, "lock.release"), 1);
}

#[tokio::test]
async fn what_is_released_is_not_lost() {
    let server = Server::start();
    let lockkeeper = open(&server);
    let released = hold(&lockkeeper, "released", ms(600)).await;
    let left = hold(&lockkeeper, "left", ms(600)).await;
    let (lost, also) = (released.lost(), left.lost());
    assert_eq!(released.release().await, Ok(Released::Yes));
    left.leave();
    // The end of both ttls passes.
    let lost = async { tokio::select!(lost = lost => lost, lost = also => lost) };
    let lost = tokio::time::timeout(ms(700), lost).await;
    assert!(lost.is_err(), "{lost:?}");
}

#[tokio::test]
async fn a_dropped_handle_releases_in_the_background() {
    let server = Server::start();
    let lockkeeper = open(&server);
    drop(lockkeeper.acquire("book").await.unwrap());
    drop(lockkeeper);
    eventually("it is free", || {
        ask!(server.connect(), "EXISTS", "book") == testkit::NO
    });
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

#[tokio::test]
async fn a_lock_that_is_left_lapses_by_itself() {
    let server = Server::start();
    let held = hold(&open(&server), "book", ms(400)).await;
    held.leave();
    let mut redis = server.connect();
    assert_eq!(ask!(redis, "EXISTS", "book"), testkit::YES);
    eventually("it lapses", || ask!(redis, "EXISTS", "book") == testkit::NO);
    assert_eq!(calls(&server, "lock.release"), 0);
}

#[tokio::test]
async fn release_after_keeps_the_lock_so_long_after_the_grant() {
    let server = Server::start();
    let mut redis = server.connect();
    let lockkeeper = open(&server);
    let held = hold(&lockkeeper, "minutely", ms(3000)).await;
    assert_eq!(
        held.release_after(ms(50_000)).await,
        Ok(Released::Yes),
        "it does not wait"
    );
    let ttl = number(ask!(redis, "PTTL", "minutely"));
    assert!((40_000..=50_000).contains(&ttl), "{ttl}");

    let held = lockkeeper.acquire("quick").await.unwrap().unwrap();
    assert_eq!(held.release_after(Duration::ZERO).await, Ok(Released::Yes));
    assert_eq!(ask!(redis, "EXISTS", "quick"), testkit::NO);
}

#[tokio::test]
async fn max_hold_ends_a_leaked_handle() {
    let server = Server::start();
    let asked = open(&server)
        .acquire("book")
        .ttl(ms(900))
        .max_hold(ms(1000));
    let held = asked.await.unwrap().unwrap();
    assert_eq!(soon(held.lost()).await, Lost::MaxHold);
    assert!(
        held.remaining() > ms(200),
        "time to stop in: {:?}",
        held.remaining()
    );
    std::mem::forget(held);
    eventually("it lapses", || {
        ask!(server.connect(), "EXISTS", "book") == testkit::NO
    });
}

#[test]
fn blocking_code_locks_without_a_runtime() {
    let server = Server::start();
    let lockkeeper = open(&server);
    let held = lockkeeper
        .acquire("book")
        .ttl(ms(600))
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

    let ran = lockkeeper.acquire("book").ttl(ms(900)).blocking_run(|_| {
        assert_eq!(ask!(server.connect(), "DEL", "book"), testkit::YES);
        "done"
    });
    let lost = Ran::Lost {
        why: Lost::Gone,
        done: Some("done"),
    };
    assert_eq!(ran, Ok(lost), "what it returned is not thrown away");
}

#[tokio::test]
async fn run_holds_the_lock_while_the_body_runs() {
    let server = Server::start();
    let lockkeeper = open(&server);
    let ran = lockkeeper.acquire("book").run(async |held| {
        let busy = lockkeeper.acquire("book").run(async |_| ());
        assert_eq!(busy.await, Ok(Ran::Busy));
        held.fence()
    });
    let ran = ran.await;
    assert!(matches!(ran, Ok(Ran::Done(1..))), "{ran:?}");
    assert_eq!(ask!(server.connect(), "EXISTS", "book"), testkit::NO);
}

#[tokio::test]
async fn run_ends_the_body_when_the_lock_is_lost() {
    let server = Server::start();
    let mut redis = server.connect();
    let asked = open(&server).acquire("book").ttl(ms(900));
    let ran = soon(asked.run(async |_| {
        ask!(redis, "DEL", "book").unwrap();
        std::future::pending::<()>().await
    }));
    let lost = Ran::Lost {
        why: Lost::Gone,
        done: None,
    };
    assert_eq!(ran.await, Ok(lost));
}

/// An error that knows nothing of locks.
#[derive(Debug, PartialEq)]
struct Failure;

#[tokio::test]
async fn what_the_body_returns_wins_over_the_error_of_the_release() {
    let mut server = Server::start();
    let lockkeeper = open(&server);
    let asked = lockkeeper.acquire("book").ttl(ms(600));
    let ran = asked.run(async |_| -> Result<(), Failure> {
        server.kill9();
        Err(Failure)
    });
    assert_eq!(soon(ran).await, Ok(Ran::Done(Err(Failure))));

    // It did not run, so that nobody answers is all there is to tell.
    let ran = lockkeeper.acquire("book").ttl(ms(300)).run(async |_| 7);
    assert!(matches!(soon(ran).await, Err(Error::Unreachable(_))));

    server.start_again();
    let ran = lockkeeper.acquire("book").ttl(ms(600)).run(async |_| {
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

#[tokio::test]
async fn info_shows_who_holds_it() {
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
