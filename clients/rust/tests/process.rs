//! The helper and the process it lives in: threads that block, runtimes that end, and forks.

use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use lockkeeper::{Error, Lost, Released};
use testkit::client::{calls, hold, ms, open};
use testkit::{Server, ask, eventually};

#[tokio::test]
async fn code_that_blocks_every_thread_of_its_runtime_loses_nothing() {
    let server = Server::start();
    let held = hold(&open(&server), "book", ms(1000)).await;
    // Without any await.
    eventually("it is renewed for longer than its ttl", || {
        calls(&server, "lock.renew") >= 4
    });
    assert_eq!(held.loss(), None);
    assert!(held.remaining() > Duration::ZERO);
    assert_eq!(held.release().await, Ok(Released::Yes));
}

#[test]
fn a_runtime_that_ends_releases_what_its_tasks_held_and_nothing_else() {
    let server = Server::start();
    let lockkeeper = open(&server);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .build()
        .unwrap();
    let kept = runtime.block_on(hold(&lockkeeper, "kept", ms(1000)));
    let in_task = runtime.block_on(hold(&lockkeeper, "in task", ms(60_000)));
    runtime.spawn(async move {
        let _in_task = in_task;
        std::future::pending::<()>().await;
    });
    drop(runtime);
    let mut redis = server.connect();
    eventually("what the task held is free", || {
        ask!(redis, "EXISTS", "in task") == testkit::NO
    });
    let renewals = calls(&server, "lock.renew");
    eventually("the other is renewed", || {
        calls(&server, "lock.renew") > renewals + 3
    });
    assert_eq!(kept.loss(), None);
}

#[test]
fn a_forked_child_neither_renews_nor_releases() {
    let server = Server::start();
    let lockkeeper = open(&server);
    let held = lockkeeper
        .acquire("book")
        .ttl(ms(1000))
        .blocking()
        .unwrap()
        .unwrap();
    let (mut lost, mut asked) = (
        pin!(held.lost()),
        pin!(lockkeeper.acquire("book").wait_forever()),
    );
    assert_eq!(now(lost.as_mut()), None);
    assert!(now(asked.as_mut()).is_none());
    // SAFETY: the child touches what it was given, allocates a little, and ends without unwinding
    // or running the destructors of its parent.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let claims_nothing = held.remaining() == Duration::ZERO
            && held.loss() == Some(Lost::Expired)
            && held.blocking_renew() == Err(Error::Forked)
            && lockkeeper.acquire("book").blocking().err() == Some(Error::Forked)
            && lockkeeper.blocking_info("book") == Err(Error::Forked)
            // What was begun by the parent: nobody here would ever answer it.
            && now(lost.as_mut()) == Some(Lost::Expired)
            && now(asked.as_mut()).and_then(Result::err) == Some(Error::Forked)
            // There is nothing of ours to settle or to close, and the parent's is left alone.
            && lockkeeper.blocking_settled(ms(5000))
            && lockkeeper.blocking_close(ms(5000));
        drop(lockkeeper.close_on_drop(ms(5000)));
        drop(held);
        // SAFETY: ends this process, and only it.
        unsafe { libc::_exit(if claims_nothing { 0 } else { 1 }) }
    }
    let mut status = -1;
    // SAFETY: waits for the child made above, which nobody else waits for.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child was told that it holds nothing");

    let renewals = calls(&server, "lock.renew");
    eventually("the parent renews on", || {
        calls(&server, "lock.renew") > renewals + 3
    });
    assert_eq!(calls(&server, "lock.release"), 0);
    assert_eq!(held.loss(), None);
    assert_eq!(held.blocking_release(), Ok(Released::Yes));
    assert_eq!(now(lost), None, "it was released, not lost");
    eventually("the parent's wait is granted", || {
        now(asked.as_mut()).is_some_and(|acquired| acquired.is_ok())
    });
}

/// The value of a future that is ready.
fn now<T>(future: Pin<&mut impl Future<Output = T>>) -> Option<T> {
    match future.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_thousand_locks_are_all_renewed_in_time_over_one_connection() {
    let server = Server::start();
    let lockkeeper = open(&server);
    let mut holding = tokio::task::JoinSet::new();
    for task in 0..100 {
        let lockkeeper = lockkeeper.clone();
        holding.spawn(async move {
            let mut held = Vec::new();
            for number in 0..10 {
                held.push(hold(&lockkeeper, &format!("book:{task}:{number}"), ms(3000)).await);
            }
            held
        });
    }
    let held: Vec<_> = holding.join_all().await.into_iter().flatten().collect();
    let renewals = calls(&server, "lock.renew");
    eventually("each is renewed twice", || {
        assert!(held.iter().all(|held| held.loss().is_none()));
        calls(&server, "lock.renew") > renewals + 2 * 1000
    });
    let list: String = redis::cmd("CLIENT")
        .arg("LIST")
        .query(&mut server.connect())
        .unwrap();
    assert_eq!(list.matches(" name=lockkeeper:").count(), 1, "{list}");

    drop(held);
    let mut redis = server.connect();
    eventually("all are released", || ask!(redis, "DBSIZE") == testkit::NO);
}
