//! The helper and faults: connections that break, replies that get lost, servers that hang.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use lockkeeper::{Error, Lockkeeper, Lost, Released, Renewed};
use testkit::client::{calls, hold, is_held, ms, open, soon};
use testkit::proxy::Proxy;
use testkit::{OK, PATIENCE, Server, Setup, ask, eventually, number};

use crate::{connections, log, signal};

fn through(proxy: &Proxy) -> Lockkeeper {
    Lockkeeper::open(proxy.url()).unwrap()
}

fn unreachable<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    match result {
        Err(Error::Unreachable(why)) => why,
        other => panic!("{other:?}"),
    }
}

/// The wall clock in milliseconds, as PEXPIRETIME tells it: the server has the same clock.
fn wall_ms() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_millis() as i64
}

#[tokio::test]
async fn a_killed_connection_loses_nothing() {
    let server = Server::start();
    let held = hold(&open(&server), "book", ms(600)).await;
    for _ in 0..5 {
        ask!(server.connect(), "CLIENT", "KILL", "TYPE", "normal").unwrap();
        let renewals = calls(&server, "lock.renew");
        eventually("it is renewed again", || {
            calls(&server, "lock.renew") > renewals
        });
    }
    assert_eq!(held.loss(), None);
    assert_eq!(held.release().await, Ok(Released::Yes));
}

#[tokio::test]
async fn a_paused_server_loses_nothing() {
    let server = Server::start();
    let held = hold(&open(&server), "book", ms(1500)).await;
    assert_eq!(ask!(server.connect(), "CLIENT", "PAUSE", 900, "ALL"), OK);
    let paused = Instant::now();
    let renewals = calls(&server, "lock.renew");
    assert!(paused.elapsed() > ms(800), "the pause is over now");
    eventually("it is renewed", || calls(&server, "lock.renew") > renewals);
    assert_eq!(held.renew().await, Ok(Renewed::Yes));
    assert_eq!(held.release().await, Ok(Released::Yes));
}

#[tokio::test]
async fn a_cut_shorter_than_the_lease_loses_nothing() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let held = hold(&through(&proxy), "book", ms(2000)).await;
    for _ in 0..2 {
        proxy.cut();
        eventually("a renewal is missing", || held.remaining() < ms(1000));
        proxy.mend();
        eventually("it is renewed", || held.remaining() > ms(1400));
    }
    assert_eq!(held.release().await, Ok(Released::Yes));
}

#[tokio::test]
async fn a_cut_longer_than_the_lease_is_a_loss_before_the_lease_ends_on_the_server() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let lockkeeper = through(&proxy);
    let held = hold(&lockkeeper, "book", ms(1000)).await;
    proxy.cut();
    // What was under way when it was cut has arrived by then.
    let mut redis = server.connect();
    eventually("no connection is left", || connections(&server) == 0);
    // How late this thread runs between the two changes nothing: the sum can only be too small.
    let lost_at = wall_ms() + held.remaining().as_millis() as i64;
    let free_at = number(ask!(redis, "PEXPIRETIME", "book"));
    assert!(lost_at < free_at, "{} ms too late", lost_at - free_at);
    assert_eq!(soon(held.lost()).await, Lost::Expired);
    assert_eq!(held.remaining(), Duration::ZERO);

    // The watchdog itself has survived.
    eventually("it is free", || {
        ask!(redis, "EXISTS", "book") == testkit::NO
    });
    proxy.mend();
    let renewals = calls(&server, "lock.renew");
    let next = hold(&lockkeeper, "book", ms(300)).await;
    eventually("the next is renewed", || {
        calls(&server, "lock.renew") >= renewals + 4
    });
    assert_eq!(next.loss(), None);

    // The old handle does not harm the new one.
    assert_eq!(held.renew().await, Ok(Renewed::Lost(Lost::Expired)));
    assert_eq!(held.release().await, Ok(Released::Lost(Lost::Expired)));
    assert!(calls(&server, "lock.release") <= 1);
    assert_eq!(next.release().await, Ok(Released::Yes));
}

#[tokio::test]
async fn silence_is_as_good_as_a_cut() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let held = hold(&through(&proxy), "book", ms(600)).await;
    proxy.stop();
    assert_eq!(soon(held.lost()).await, Lost::Expired);
    assert!(ask!(server.connect(), "PTTL", "book").is_ok());
    let why = unreachable(
        through(&proxy)
            .acquire("book")
            .ttl(ms(600))
            .await
            .map(is_held),
    );
    assert_eq!(why, "no answer in time");
}

#[tokio::test]
async fn a_server_clock_that_steps_an_hour_does_not_fool_the_lease() {
    let server = Setup::new().clock_ms(0).start();
    let (lockkeeper, ttl) = (open(&server), ms(900));
    let held = hold(&lockkeeper, "book", ttl).await;
    let hour = 3_600_000;

    // Back: for the server the lease lasts an hour longer. Ours does not.
    server.set_clock_ms(-hour);
    let renewals = calls(&server, "lock.renew");
    eventually("it is renewed", || {
        assert!(held.remaining() <= ttl);
        calls(&server, "lock.renew") >= renewals + 2
    });
    assert_eq!(held.loss(), None);
    assert_eq!(held.release().await, Ok(Released::Yes));

    // Ahead: for the server the lease has ended. The next renewal is refused, and brings nothing back.
    let held = hold(&lockkeeper, "book", ttl).await;
    server.set_clock_ms(hour);
    assert_eq!(soon(held.lost()).await, Lost::Gone);
    assert_eq!(ask!(server.connect(), "EXISTS", "book"), testkit::NO);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_reply_is_asked_for_again_in_another_name() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let lockkeeper = through(&proxy);
    assert_eq!(lockkeeper.info("book").await, Ok(None), "connected");
    proxy.swallow_replies();
    let acquire = tokio::spawn(lockkeeper.acquire("book").ttl(ms(3000)));
    eventually("it is granted, and the reply is lost", || {
        ask!(server.connect(), "EXISTS", "book") == testkit::YES
    });
    let (owner, fence) = lock_of(&server, "book");
    proxy.mend();
    let held = soon(acquire).await.unwrap().unwrap().unwrap();
    assert!(held.owner() != owner && held.fence() > fence, "{held:?}");
    assert_eq!(lock_of(&server, "book").0, held.owner());
    assert_eq!(calls(&server, "lock.acquire"), 2);
    assert_eq!(held.release().await, Ok(Released::Yes));
}

/// Owner and fence, as the value of the key tells them.
fn lock_of(server: &Server, key: &str) -> (String, u64) {
    let value: String = redis::cmd("GET")
        .arg(key)
        .query(&mut server.connect())
        .unwrap();
    let (fence, owner) = value.split_once(':').unwrap();
    (owner.to_owned(), fence.parse().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_breaks_before_the_reply_is_replaced() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let lockkeeper = through(&proxy);
    assert_eq!(lockkeeper.info("book").await, Ok(None), "connected");
    proxy.cut_at_next_reply();
    let acquire = tokio::spawn(lockkeeper.acquire("book"));
    eventually("it is granted, and the reply is lost", || {
        ask!(server.connect(), "EXISTS", "book") == testkit::YES
    });
    let granted = lock_of(&server, "book");
    proxy.mend();
    let held = soon(acquire).await.unwrap().unwrap().unwrap();
    assert_eq!((held.owner().to_owned(), held.fence()), granted);
}

#[tokio::test]
async fn what_was_granted_to_nobody_is_released() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let lockkeeper = through(&proxy);
    assert_eq!(lockkeeper.info("book").await, Ok(None), "connected");
    proxy.swallow_replies();
    let asked = lockkeeper.acquire("book").ttl(ms(600_000));
    let given_up = tokio::time::timeout(ms(100), asked).await;
    assert!(given_up.is_err(), "the caller has lost patience");
    eventually("the release arrives", || calls(&server, "lock.release") > 0);
    assert_eq!(ask!(server.connect(), "EXISTS", "book"), testkit::NO);
}

#[tokio::test]
async fn an_acquire_that_is_dropped_at_any_moment_leaves_nothing() {
    let server = Server::start();
    let lockkeeper = open(&server);
    assert_eq!(lockkeeper.info("book").await, Ok(None), "connected");
    for micros in (0..1000).step_by(5) {
        let asked = lockkeeper.acquire(format!("book:{micros}"));
        let _ = tokio::time::timeout(Duration::from_micros(micros), asked).await;
    }
    eventually("no key is left", || {
        ask!(server.connect(), "DBSIZE") == testkit::NO
    });
    assert!(
        calls(&server, "lock.acquire") > 0,
        "some were dropped after they were sent"
    );
}

#[tokio::test]
async fn a_release_that_is_dropped_at_any_moment_is_carried_out() {
    let server = Server::start();
    let lockkeeper = open(&server);
    for micros in (0..500).step_by(10) {
        let held = hold(&lockkeeper, "book", ms(60_000)).await;
        let _ = tokio::time::timeout(Duration::from_micros(micros), held.release()).await;
        eventually("it is free", || {
            ask!(server.connect(), "EXISTS", "book") == testkit::NO
        });
    }
}

#[tokio::test]
async fn a_release_is_tried_until_it_arrives_and_the_caller_gets_the_error_first() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let held = hold(&through(&proxy), "book", ms(60_000)).await;
    proxy.cut();
    unreachable(held.release().await);
    proxy.mend();
    let mut redis = server.connect();
    eventually("it arrives", || calls(&server, "lock.release") > 0);
    assert_eq!(ask!(redis, "EXISTS", "book"), testkit::NO);
}

#[tokio::test]
async fn a_slow_reply_is_counted_from_the_send() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let lockkeeper = through(&proxy);
    assert_eq!(lockkeeper.info("book").await, Ok(None), "connected");
    proxy.delay_replies(ms(300));
    let held = hold(&lockkeeper, "book", ms(6000)).await;
    let remaining = held.remaining();
    assert!(remaining < ms(6000 - 300 - 60), "{remaining:?}");
    let lost_at = wall_ms() + held.remaining().as_millis() as i64;
    assert!(lost_at < number(ask!(server.connect(), "PEXPIRETIME", "book")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grant_whose_reply_took_nine_tenths_of_the_ttl_is_renewed_first() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let lockkeeper = through(&proxy);
    assert_eq!(lockkeeper.info("book").await, Ok(None), "connected");
    proxy.delay_replies(ms(900));
    let replies = proxy.replies();
    let acquire = tokio::spawn(lockkeeper.acquire("book").ttl(ms(1000)).wait(ms(20_000)));
    // It is slow; what comes after it is not.
    eventually("its reply is on its way", || proxy.replies() > replies);
    proxy.delay_replies(Duration::ZERO);
    let held = soon(acquire).await.unwrap().unwrap().unwrap();
    assert!(held.remaining() > ms(300), "{held:?}");
    assert!(calls(&server, "lock.renew") > 0);
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

#[tokio::test]
async fn a_server_that_was_never_there_is_an_error_at_once_for_who_does_not_wait() {
    let mut server = Server::start();
    let url = server.url();
    server.kill9();
    let lockkeeper = Lockkeeper::open(&url).unwrap();
    let start = Instant::now();
    let why = unreachable(lockkeeper.acquire("book").await.map(is_held));
    assert!(
        why.contains("127.0.0.1") && why.contains("refused"),
        "{why}"
    );
    assert!(start.elapsed() < ms(3000), "{:?}", start.elapsed());

    let waiting = lockkeeper.acquire("book").wait(ms(1000));
    let why = unreachable(waiting.await.map(is_held));
    assert!(why.contains("refused"), "{why}");
    assert!(start.elapsed() >= ms(1000), "it has waited");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_was_not_there_yet_is_waited_for() {
    let mut server = Server::start();
    let lockkeeper = open(&server);
    server.kill9();
    let waiting = tokio::spawn(lockkeeper.acquire("book").wait(ms(20_000)).into_future());
    tokio::time::sleep(ms(300)).await;
    assert!(!waiting.is_finished());
    server.start_again();
    assert!(is_held(soon(waiting).await.unwrap().unwrap()));
}

#[tokio::test]
async fn a_try_against_a_silent_server_takes_5_s_whatever_the_ttl() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let lockkeeper = through(&proxy);
    assert_eq!(lockkeeper.info("book").await, Ok(None), "connected");
    proxy.stop();
    let start = Instant::now();
    let asked = lockkeeper.acquire("book").ttl(ms(3_600_000));
    unreachable(asked.await.map(is_held));
    let took = start.elapsed();
    assert!(took > ms(4900) && took < PATIENCE, "{took:?}");
}

#[tokio::test]
async fn a_release_whose_reply_is_lost_was_a_release() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let lockkeeper = through(&proxy);
    for _ in 0..3 {
        let held = hold(&lockkeeper, "book", ms(6000)).await;
        let releases = calls(&server, "lock.release");
        proxy.cut_at_next_reply();
        let releasing = tokio::spawn(held.release());
        while calls(&server, "lock.release") == releases {
            tokio::time::sleep(ms(1)).await;
        }
        proxy.mend();
        assert_eq!(soon(releasing).await.unwrap(), Ok(Released::Yes));
        assert!(calls(&server, "lock.release") > releases);
    }
}

#[tokio::test]
async fn a_release_that_nobody_answers_is_an_error_after_5_s() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let held = hold(&through(&proxy), "book", ms(600_000)).await;
    proxy.stop();
    let start = Instant::now();
    unreachable(held.release().await);
    let took = start.elapsed();
    assert!(took > ms(4900) && took < PATIENCE, "{took:?}");
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
async fn a_cancelled_request_that_arrives_late_leaves_no_lock() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let lockkeeper = through(&proxy);
    assert_eq!(lockkeeper.info("book").await, Ok(None), "connected");
    proxy.stop_old_connections();
    let asked = lockkeeper.acquire("book").ttl(ms(600_000)).into_future();
    let given_up = tokio::time::timeout(ms(100), asked).await;
    assert!(given_up.is_err(), "the caller has lost patience");
    // What is released over a new connection comes before it.
    proxy.mend();
    eventually("it arrives", || calls(&server, "lock.acquire") > 0);
    eventually("and is released", || {
        ask!(server.connect(), "EXISTS", "book") == testkit::NO
    });
}

#[tokio::test]
async fn a_connection_attempt_that_hangs_costs_no_lock() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let held = hold(&through(&proxy), "book", ms(3000)).await;
    for hanging in [1, 2] {
        proxy.hang_next_connections(hanging);
        let connections = proxy.connections();
        ask!(server.connect(), "CLIENT", "KILL", "TYPE", "normal").unwrap();
        eventually("it is renewed over another connection", || {
            assert_eq!(held.loss(), None);
            proxy.connections() > connections + hanging && held.remaining() > ms(2500)
        });
    }
    assert_eq!(held.release().await, Ok(Released::Yes));
}

/// The old connections stay open, to a master that hangs, or follows the new one.
async fn the_new_master_is_found_behind_one_address(hangs: bool) {
    let old = Server::start();
    let new = Server::replica_of(&old);
    let proxy = Proxy::to(&old);
    let lockkeeper = through(&proxy);
    let held = hold(&lockkeeper, "book", ms(6000)).await;
    let mut on_new = new.connect();
    eventually("the replica has the lock", || {
        ask!(on_new, "EXISTS", "book") == testkit::YES
    });
    if hangs {
        signal(&old, libc::SIGSTOP);
    }
    assert_eq!(ask!(on_new, "REPLICAOF", "NO", "ONE"), OK);
    proxy.lead_to(&new);
    if !hangs {
        let follow = ask!(old.connect(), "REPLICAOF", "127.0.0.1", new.port());
        assert_eq!(follow, OK);
    }
    eventually("it is renewed at the new master", || {
        assert_eq!(held.loss(), None);
        calls(&new, "lock.renew") > 0
    });
    assert_eq!(held.renew().await, Ok(Renewed::Yes));
    let other = hold(&lockkeeper, "other", ms(3000)).await;
    assert_eq!(ask!(on_new, "EXISTS", "other"), testkit::YES);
    assert_eq!(other.release().await, Ok(Released::Yes));
    assert_eq!(held.release().await, Ok(Released::Yes));
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_one_address_the_new_master_is_found_though_old_connections_stay_open() {
    the_new_master_is_found_behind_one_address(false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_one_address_the_new_master_is_found_though_the_old_one_hangs() {
    the_new_master_is_found_behind_one_address(true).await;
}

#[tokio::test]
async fn an_extended_lease_lasts_longer_and_is_renewed_before_it_ends() {
    let server = Server::start();
    let held = hold(&open(&server), "book", ms(1000)).await;
    let start = Instant::now();
    assert_eq!(held.extend(ms(2000)).await, Ok(Renewed::Yes));
    assert!(held.remaining() > ms(1000), "{held:?}");
    let renewals = calls(&server, "lock.renew");
    eventually("the ttl is what remains", || {
        let renewed = calls(&server, "lock.renew") > renewals;
        // Before, a renewal would cut it.
        assert!(!renewed || start.elapsed() > ms(900), "{held:?}");
        renewed
    });
    let renewals = calls(&server, "lock.renew");
    eventually("it is renewed as before", || {
        calls(&server, "lock.renew") > renewals + 1
    });
    assert_eq!(held.loss(), None);
    let invalid = held.extend(ms(99)).await;
    assert!(matches!(invalid, Err(Error::Invalid(_))), "{invalid:?}");
    assert_eq!(held.release().await, Ok(Released::Yes));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_restarts_is_waited_for() {
    let mut server = Server::start();
    let lockkeeper = open(&server);
    assert_eq!(lockkeeper.info("book").await, Ok(None), "connected");
    server.kill9();
    let acquire = tokio::spawn(lockkeeper.acquire("book").wait(ms(20_000)));
    server.start_again();
    assert!(is_held(soon(acquire).await.unwrap().unwrap()));
}

#[tokio::test]
async fn a_server_without_the_module_refuses_at_once() {
    let server = testkit::Setup::new().without_module().start();
    let asked = open(&server).acquire("book").wait(ms(20_000));
    match asked.await.map(is_held) {
        Err(Error::Refused(text)) => assert!(
            text.starts_with("ERR unknown command 'LOCK.ACQUIRE'"),
            "{text}"
        ),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_module_that_is_unloaded_is_retried_until_the_lease_ends() {
    let server = Server::start();
    let held = hold(&open(&server), "book", ms(1500)).await;
    assert_eq!(ask!(server.connect(), "MODULE", "UNLOAD", "lockkeeper"), OK);
    match held.renew().await {
        Err(Error::Refused(text)) => assert!(text.starts_with("ERR unknown command"), "{text}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(held.loss(), None);
    let module = testkit::module().display().to_string();
    assert_eq!(ask!(server.connect(), "MODULE", "LOAD", module), OK);
    eventually("it is renewed", || calls(&server, "lock.renew") > 0);
    assert_eq!(held.release().await, Ok(Released::Yes));
}

#[tokio::test]
async fn a_refusal_keeps_the_words_of_the_server() {
    let server = Server::start();
    let mut redis = server.connect();
    let lockkeeper = open(&server);
    let refused = async |key: &str| match lockkeeper.acquire(key).await.map(is_held) {
        Err(Error::Refused(text)) => text,
        other => panic!("{other:?}"),
    };
    ask!(redis, "LPUSH", "list", "x").unwrap();
    assert_eq!(refused("list").await, testkit::WRONGTYPE);
    ask!(redis, "CONFIG", "SET", "maxmemory", 1).unwrap();
    assert!(refused("book").await.starts_with("OOM "));
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
