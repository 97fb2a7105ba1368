//! The end: what was given up is settled in time, whatever others do, and a lockkeeper that is
//! closed leaves nothing.

use std::collections::HashSet;
use std::ffi::OsString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lockkeeper::{Error, Lockkeeper, Lost, Released, Renewed};
use testkit::client::{calls, hold, ms, open, soon};
use testkit::proxy::Proxy;
use testkit::{NO, PATIENCE, Server, YES, ask, eventually, info};

use crate::connections;

fn invalid<T: std::fmt::Debug>(result: Result<T, Error>) {
    let closed = Error::Invalid("the lockkeeper was closed".to_owned());
    assert_eq!(result.unwrap_err(), closed);
}

/// The threads of all watchdogs of this program.
fn watchdogs() -> HashSet<OsString> {
    let threads = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let is_watchdog = |path: &Path| {
        let name = std::fs::read_to_string(path.join("comm"));
        name.is_ok_and(|name| name == "lockkeeper\n")
    };
    let watchdogs = threads.filter(|thread| is_watchdog(&thread.path()));
    watchdogs.map(|thread| thread.file_name()).collect()
}

#[test]
fn settled_does_not_wait_for_what_others_acquire_and_release_all_the_time() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let lockkeeper = Lockkeeper::open(proxy.url()).unwrap();
    let (held, stop) = (
        lockkeeper.acquire("book").blocking().unwrap().unwrap(),
        AtomicBool::new(false),
    );
    // So that at any moment somebody is being answered.
    proxy.delay_replies(ms(20));
    std::thread::scope(|scope| {
        for other in 0..8 {
            let (lockkeeper, stop) = (&lockkeeper, &stop);
            scope.spawn(move || {
                for number in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let key = format!("other:{other}:{number}");
                    let acquired = lockkeeper.acquire(key).blocking();
                    let held = acquired.unwrap().unwrap();
                    // Given up all the time, but after we asked.
                    drop(held);
                }
            });
        }
        eventually("all of them are at it", || {
            calls(&server, "lock.release") > 16
        });
        drop(held);
        let settled = lockkeeper.blocking_settled(ms(10_000));
        stop.store(true, Ordering::Relaxed);
        assert!(settled);
    });
    assert_eq!(ask!(server.connect(), "EXISTS", "book"), NO);
}

#[tokio::test]
async fn settled_waits_for_an_acquire_that_was_dropped_on_its_way() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let lockkeeper = Lockkeeper::open(proxy.url()).unwrap();
    assert_eq!(lockkeeper.info("book").await, Ok(None), "connected");
    proxy.delay_replies(ms(100));
    for millis in [0, 5, 50, 99, 100, 101, 150] {
        let asked = lockkeeper.acquire("book");
        let cut = tokio::time::timeout(ms(millis), asked).await;
        drop(cut);
        assert!(lockkeeper.settled(PATIENCE).await);
        assert_eq!(ask!(server.connect(), "EXISTS", "book"), NO, "{millis} ms");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn closing_gives_back_all_and_tells_the_holders_first() {
    let server = Server::start();
    let before = watchdogs();
    let lockkeeper = open(&server);
    // And those that other tests have started at the same moment, which end with them.
    let mut ours = HashSet::new();
    eventually("the watchdog has its name", || {
        ours = watchdogs().difference(&before).cloned().collect();
        !ours.is_empty()
    });
    let held = hold(&lockkeeper, "held", ms(30_000)).await;
    let dropped = hold(&lockkeeper, "dropped", ms(30_000)).await;
    let (lost, waiting) = (
        held.lost(),
        tokio::spawn(lockkeeper.acquire("held").wait_forever()),
    );
    eventually("the other waits", || {
        info::<u64>(&mut server.connect(), "lockkeeper", "lockkeeper_waiters") == 1
    });
    assert_eq!(connections(&server), 2);
    drop(dropped);
    assert!(lockkeeper.close(PATIENCE).await);

    let mut redis = server.connect();
    assert_eq!(ask!(redis, "EXISTS", "held", "dropped"), NO);
    assert_eq!(soon(lost).await, Lost::Gone);
    assert_eq!(soon(held.lost()).await, Lost::Gone, "it may be asked again");
    assert_eq!(
        (held.loss(), held.remaining()),
        (Some(Lost::Gone), Duration::ZERO)
    );
    invalid(soon(waiting).await.unwrap());
    eventually("all is closed", || connections(&server) == 0);

    // Of what is closed nothing more is to be had.
    invalid(lockkeeper.acquire("book").await);
    invalid(lockkeeper.clone().info("book").await);
    invalid(lockkeeper.release_for("book", "owner").await);
    assert_eq!(held.renew().await, Ok(Renewed::Lost(Lost::Gone)));
    assert_eq!(held.release().await, Ok(Released::Lost(Lost::Gone)));
    assert!(lockkeeper.settled(PATIENCE).await && lockkeeper.close(PATIENCE).await);
    eventually("the watchdog has ended", || watchdogs().is_disjoint(&ours));
}

#[tokio::test]
async fn closing_is_bounded_and_goes_on_in_the_background() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let lockkeeper = Lockkeeper::open(proxy.url()).unwrap();
    let held = hold(&lockkeeper, "book", ms(30_000)).await;
    proxy.stop();
    let start = Instant::now();
    assert!(!lockkeeper.close(ms(300)).await);
    let took = start.elapsed();
    assert!(took >= ms(300) && took < PATIENCE, "{took:?}");
    assert_eq!(held.loss(), Some(Lost::Gone));
    assert_eq!(ask!(server.connect(), "EXISTS", "book"), YES);
    proxy.mend();
    eventually("it is released", || {
        ask!(server.connect(), "EXISTS", "book") == NO
    });
}

#[test]
fn a_guard_closes_however_main_ends() {
    async fn main(server: &Server, how: &str) -> Result<(), Error> {
        let lockkeeper = open(server);
        let _guard = lockkeeper.close_on_drop(PATIENCE);
        let _held = hold(&lockkeeper, "book", ms(30_000)).await;
        match how {
            "error" => Err(Error::Forked),
            "panic" => panic!("as this test wants it"),
            _ => Ok(()),
        }
    }
    let server = Server::start();
    for how in ["end", "error", "panic"] {
        // As `#[tokio::main]`: the guard blocks the only thread of the runtime.
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let main = AssertUnwindSafe(|| runtime.block_on(main(&server, how)));
        assert_eq!(catch_unwind(main).is_err(), how == "panic");
        assert_eq!(ask!(server.connect(), "EXISTS", "book"), NO, "{how}");
    }
}
