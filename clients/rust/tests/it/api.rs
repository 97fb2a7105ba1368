//! The crate in a newcomer's hands: what names a lock, and what can be done with an acquire.

use std::borrow::Cow;
use std::rc::Rc;
use std::sync::Arc;

use lockkeeper::{Lockkeeper, Ran, Released, ToBytes};
use testkit::client::{hold, is_held, ms, open};
use testkit::{Server, ask, eventually};

use crate::log;

#[tokio::test]
async fn whatever_is_text_or_bytes_names_a_lock() {
    async fn is_busy(lockkeeper: &Lockkeeper, key: impl ToBytes) -> bool {
        !is_held(lockkeeper.acquire(key).await.unwrap())
    }
    let server = Server::start();
    let lockkeeper = open(&server);
    let _held = hold(&lockkeeper, "book", ms(30_000)).await;
    let text = String::from("book");
    assert!(is_busy(&lockkeeper, "book").await);
    assert!(is_busy(&lockkeeper, &"book").await);
    assert!(is_busy(&lockkeeper, &text).await);
    assert!(is_busy(&lockkeeper, text.clone()).await);
    assert!(is_busy(&lockkeeper, Arc::<str>::from("book")).await);
    assert!(is_busy(&lockkeeper, &Arc::<str>::from("book")).await);
    assert!(is_busy(&lockkeeper, Rc::<str>::from("book")).await);
    assert!(is_busy(&lockkeeper, Box::<str>::from("book")).await);
    assert!(is_busy(&lockkeeper, Arc::new(text.clone())).await);
    assert!(is_busy(&lockkeeper, Cow::Borrowed("book")).await);
    assert!(is_busy(&lockkeeper, Cow::<str>::Owned(text)).await);
    let bytes = b"book".to_vec();
    assert!(is_busy(&lockkeeper, b"book").await);
    assert!(is_busy(&lockkeeper, *b"book").await);
    assert!(is_busy(&lockkeeper, &b"book"[..]).await);
    assert!(is_busy(&lockkeeper, &bytes).await);
    assert!(is_busy(&lockkeeper, Arc::<[u8]>::from(&*bytes)).await);
    assert!(is_busy(&lockkeeper, Cow::Borrowed(&*bytes)).await);
    assert!(is_busy(&lockkeeper, bytes).await);

    let owner: Arc<str> = Arc::from("nobody");
    assert!(lockkeeper.info(&Cow::Borrowed("book")).await.is_ok());
    assert!(
        lockkeeper
            .release_for(Rc::<str>::from("book"), owner)
            .await
            .is_ok()
    );
}

#[tokio::test]
async fn a_type_of_ones_own_names_a_lock() {
    struct BookId(u32);
    impl ToBytes for BookId {
        fn to_bytes(&self) -> Vec<u8> {
            format!("book:{}", self.0).into_bytes()
        }
    }
    let server = Server::start();
    let held = open(&server).acquire(BookId(7)).await.unwrap().unwrap();
    assert_eq!(held.key(), b"book:7");
}

#[tokio::test]
async fn an_acquire_is_a_future_as_any_other() {
    let server = Server::start();
    let lockkeeper = open(&server);
    let spawned = tokio::spawn(lockkeeper.acquire("spawned"));
    let (joined, also) = tokio::join!(lockkeeper.acquire("joined"), lockkeeper.acquire("also"));
    let selected = tokio::select! {
        acquired = lockkeeper.acquire("selected") => acquired,
        () = std::future::pending() => unreachable!(),
    };
    let in_time = tokio::time::timeout(ms(20_000), lockkeeper.acquire("in time")).await;
    let acquired = [
        spawned.await.unwrap(),
        joined,
        also,
        selected,
        in_time.unwrap(),
    ];
    for acquired in acquired {
        let held = acquired.unwrap().expect("every key is free");
        assert_eq!(held.release().await, Ok(Released::Yes));
    }
}

#[tokio::test]
async fn a_run_can_be_spawned() {
    let server = Server::start();
    let lockkeeper = open(&server);
    let key = String::from("book");
    let task = tokio::spawn(async move {
        let body = async |held: &lockkeeper::Held| {
            tokio::task::yield_now().await;
            held.key().to_vec()
        };
        lockkeeper.acquire(&key).run(body).await
    });
    assert_eq!(task.await.unwrap(), Ok(Ran::Done(b"book".to_vec())));
    assert_eq!(ask!(server.connect(), "EXISTS", "book"), testkit::NO);
}

#[tokio::test]
async fn busy_can_be_made_an_error_of_ones_own() {
    #[derive(Debug, PartialEq)]
    struct Busy;
    let server = Server::start();
    let lockkeeper = open(&server);
    let _held = hold(&lockkeeper, "book", ms(30_000)).await;
    let busy = lockkeeper.acquire("book").await.unwrap().ok_or(Busy);
    assert_eq!(busy.err(), Some(Busy));
    let held = lockkeeper
        .acquire("free")
        .await
        .unwrap()
        .ok_or(Busy)
        .unwrap();
    assert_eq!(held.key(), b"free");
}

#[test]
fn an_acquire_needs_no_particular_runtime() {
    let server = Server::start();
    let mut asked = std::pin::pin!(open(&server).acquire("book"));
    let mut acquired = None;
    testkit::eventually("it is granted", || {
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        if let std::task::Poll::Ready(answer) = asked.as_mut().poll(&mut cx) {
            acquired = Some(answer.unwrap());
        }
        acquired.is_some()
    });
    assert_eq!(acquired.unwrap().unwrap().key(), b"book");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_that_nobody_answers_and_a_release_in_vain_are_logged() {
    log::start();
    let mut server = Server::start();
    let lockkeeper = open(&server);
    let ran = lockkeeper.acquire("vain").ttl(ms(1000)).run(async |_| {
        server.kill9();
    });
    assert_eq!(ran.await, Ok(Ran::Done(())));
    let released = || log::lines("vain", "WARN", "not released yet").len();
    assert_eq!(released(), 1);

    let warned = || log::lines("awaited", "WARN", "waiting on").len();
    let asked_again = || log::lines("awaited", "DEBUG", "asking again").len();
    let waiting = tokio::spawn(lockkeeper.acquire("awaited").wait_forever());
    eventually("it is asked again and again", || asked_again() >= 3);
    assert_eq!(warned(), 1, "and not with every attempt");
    server.start_again();
    assert!(is_held(waiting.await.unwrap().unwrap()));
}
