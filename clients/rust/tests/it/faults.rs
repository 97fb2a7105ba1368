//! The helper in bad weather: connections that break, replies that get lost, servers that hang.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use lockkeeper::{Error, Lockkeeper, Lost, Released, Renewed};
use testkit::client::{calls, hold, is_held, ms, open, soon};
use testkit::proxy::Proxy;
use testkit::{OK, Server, Setup, ask, eventually, number};

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
    let held = hold(&through(&proxy), "book", ms(3000)).await;
    for _ in 0..2 {
        proxy.cut();
        tokio::time::sleep(ms(1500)).await;
        proxy.mend();
        eventually("it is renewed", || held.remaining() > ms(2500));
    }
    assert_eq!(held.release().await, Ok(Released::Yes));
}

#[tokio::test]
async fn a_cut_longer_than_the_lease_is_told_before_the_server_lets_go() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let lockkeeper = through(&proxy);
    let held = hold(&lockkeeper, "book", ms(3000)).await;
    proxy.cut();
    // A renewal that was under way when it was cut may still have arrived.
    let mut redis = server.connect();
    tokio::time::sleep(ms(100)).await;
    let free_at = number(ask!(redis, "PEXPIRETIME", "book"));
    assert_eq!(soon(held.lost()).await, Lost::Expired);
    let told_at = wall_ms();
    assert!(told_at < free_at, "told {} ms too late", told_at - free_at);
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

    // The old handle neither harms the new one nor speaks up again.
    assert_eq!(held.renew().await, Ok(Renewed::Lost(Lost::Expired)));
    assert_eq!(held.release().await, Ok(Released::Lost(Lost::Expired)));
    assert!(calls(&server, "lock.release") <= 1);
    assert_eq!(next.release().await, Ok(Released::Yes));
}

#[tokio::test]
async fn silence_is_as_good_as_a_cut() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let held = hold(&through(&proxy), "book", ms(1500)).await;
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
    let (lockkeeper, ttl) = (open(&server), ms(1500));
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

    // Ahead: for the server the lease has ended. The next renewal tells, and brings nothing back.
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
    eventually("it is granted unheard", || {
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
    eventually("it is granted unheard", || {
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
async fn a_release_is_tried_until_it_arrives_and_the_caller_hears_of_trouble_first() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let held = hold(&through(&proxy), "book", ms(6000)).await;
    proxy.cut();
    let start = Instant::now();
    unreachable(held.release().await);
    assert!(
        start.elapsed() < ms(2000) + ms(500),
        "within a third of the ttl"
    );
    proxy.mend();
    let mut redis = server.connect();
    eventually("it arrives", || calls(&server, "lock.release") > 0);
    assert_eq!(ask!(redis, "EXISTS", "book"), testkit::NO);
    assert!(start.elapsed() < ms(5000), "not just lapsed");
}

#[tokio::test]
async fn a_slow_reply_is_counted_from_the_send() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let lockkeeper = through(&proxy);
    assert_eq!(lockkeeper.info("book").await, Ok(None), "connected");
    proxy.delay_replies(ms(900));
    let held = hold(&lockkeeper, "book", ms(6000)).await;
    let remaining = held.remaining();
    assert!(remaining < ms(6000 - 900 - 60), "{remaining:?}");
    let on_server = number(ask!(server.connect(), "PTTL", "book")) as u64;
    assert!(remaining < ms(on_server));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grant_whose_reply_took_nine_tenths_of_the_ttl_is_renewed_first() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let lockkeeper = through(&proxy);
    assert_eq!(lockkeeper.info("book").await, Ok(None), "connected");
    proxy.delay_replies(ms(900));
    let acquire = tokio::spawn(lockkeeper.acquire("book").ttl(ms(1000)).wait(ms(20_000)));
    eventually("it is granted unheard", || {
        calls(&server, "lock.acquire") > 0
    });
    // Its reply is on its way now, and slow; what comes after it is not.
    tokio::time::sleep(ms(200)).await;
    proxy.delay_replies(Duration::ZERO);
    let held = soon(acquire).await.unwrap().unwrap().unwrap();
    assert!(held.remaining() > ms(600), "{held:?}");
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
            for round in 0..500 {
                let held = hold(&lockkeeper, &format!("book:{task}:{round}"), ms(6000)).await;
                sender.send(held).await.unwrap();
            }
        });
    }
    drop(sender);
    acquirers.join_all().await;
    releaser.await.unwrap();

    assert_eq!(ask!(server.connect(), "DBSIZE"), testkit::NO);
    let renewals = calls(&server, "lock.renew");
    tokio::time::sleep(ms(2200)).await;
    assert_eq!(
        calls(&server, "lock.renew"),
        renewals,
        "a third of the ttl later"
    );
    assert_eq!(calls(&server, "lock.acquire"), 10_000);
    assert_eq!(calls(&server, "lock.release"), 10_000);
}

#[tokio::test]
async fn a_server_that_was_never_there_is_told_at_once_to_who_does_not_wait() {
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
    assert!(took > ms(4900) && took < ms(6500), "{took:?}");
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
async fn a_release_that_nobody_answers_is_told_within_5_s() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let held = hold(&through(&proxy), "book", ms(600_000)).await;
    proxy.stop();
    let start = Instant::now();
    unreachable(held.release().await);
    let took = start.elapsed();
    assert!(took > ms(4900) && took < ms(6500), "{took:?}");
}

#[tokio::test]
async fn a_request_that_arrives_late_brings_no_lock_back() {
    let server = Server::start();
    // As long as we follow the connection to its end, and longer.
    for down_for in [3000, 9000] {
        let proxy = Proxy::to(&server);
        let lockkeeper = through(&proxy);
        assert_eq!(lockkeeper.info("book").await, Ok(None), "connected");
        let (acquires, releases) = (
            calls(&server, "lock.acquire"),
            calls(&server, "lock.release"),
        );
        let start = Instant::now();
        proxy.stop_old_connections();
        let held = hold(&lockkeeper, "book", ms(30_000)).await;
        assert_eq!(held.release().await, Ok(Released::Yes));
        tokio::time::sleep(ms(down_for).saturating_sub(start.elapsed())).await;
        assert_eq!(calls(&server, "lock.acquire"), acquires + 1);
        let before = calls(&server, "lock.release");
        assert!(before > releases);
        proxy.mend();
        eventually("the first request arrives", || {
            calls(&server, "lock.acquire") == acquires + 2
        });
        eventually("and what was sent behind it", || {
            calls(&server, "lock.release") > before
        });
        assert_eq!(ask!(server.connect(), "EXISTS", "book"), testkit::NO);
    }
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
async fn a_dial_that_hangs_costs_no_lock() {
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

fn stop_process(server: &Server, signal: i32) {
    // SAFETY: signals the server of this test, which runs until the test drops it.
    assert_eq!(unsafe { libc::kill(server.pid() as i32, signal) }, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_one_address_the_new_master_is_found_though_old_connections_stay_open() {
    for frozen in [false, true] {
        let old = Server::start();
        let new = Server::replica_of(&old);
        let proxy = Proxy::to(&old);
        let lockkeeper = through(&proxy);
        let held = hold(&lockkeeper, "book", ms(6000)).await;
        let mut on_new = new.connect();
        eventually("the replica has the lock", || {
            ask!(on_new, "EXISTS", "book") == testkit::YES
        });
        if frozen {
            stop_process(&old, libc::SIGSTOP);
        }
        assert_eq!(ask!(on_new, "REPLICAOF", "NO", "ONE"), OK);
        proxy.lead_to(&new);
        if !frozen {
            let follow = ask!(old.connect(), "REPLICAOF", "127.0.0.1", new.port());
            assert_eq!(follow, OK);
        }
        eventually("it is renewed at the new master", || {
            assert_eq!(held.loss(), None, "frozen: {frozen}");
            calls(&new, "lock.renew") > 0
        });
        assert_eq!(held.renew().await, Ok(Renewed::Yes));
        let other = hold(&lockkeeper, "other", ms(3000)).await;
        assert_eq!(ask!(on_new, "EXISTS", "other"), testkit::YES);
        assert_eq!(other.release().await, Ok(Released::Yes));
        assert_eq!(held.release().await, Ok(Released::Yes));
    }
}

#[tokio::test]
async fn an_extended_lease_lasts_longer_and_is_renewed_before_it_ends() {
    let server = Server::start();
    let held = hold(&open(&server), "book", ms(1000)).await;
    assert_eq!(held.extend(ms(3000)).await, Ok(Renewed::Yes));
    assert!(held.remaining() > ms(2500), "{held:?}");
    let renewals = calls(&server, "lock.renew");
    let start = Instant::now();
    while start.elapsed() < ms(1500) {
        assert_eq!(calls(&server, "lock.renew"), renewals, "or it would be cut");
        tokio::time::sleep(ms(50)).await;
    }
    tokio::time::sleep(ms(2500)).await;
    assert_eq!(held.loss(), None);
    assert!(calls(&server, "lock.renew") > renewals);
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

/// Everything that this program traced so far.
fn traced() -> String {
    static TRACED: std::sync::Mutex<Vec<u8>> = std::sync::Mutex::new(Vec::new());
    static START: std::sync::Once = std::sync::Once::new();
    struct Tape;
    impl std::io::Write for Tape {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            TRACED.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    START.call_once(|| {
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_writer(|| Tape);
        subscriber
            .with_max_level(tracing_subscriber::filter::LevelFilter::DEBUG)
            .init();
    });
    String::from_utf8(TRACED.lock().unwrap().clone()).unwrap()
}

#[tokio::test]
async fn what_happens_to_a_lock_is_traced() {
    traced();
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let held = hold(&through(&proxy), "traced", ms(600)).await;
    proxy.cut();
    assert_eq!(soon(held.lost()).await, Lost::Expired);
    let traced = traced();
    let line = |level: &str, says: &str| {
        let about = |line: &&str| line.contains(level) && line.contains(says);
        let found = traced
            .lines()
            .filter(|line| line.contains("key=traced"))
            .find(about);
        found.unwrap_or_else(|| panic!("no {says} in\n{traced}"))
    };
    let acquired = line("DEBUG", "acquired");
    assert!(acquired.contains(&format!("owner={} fence={}", held.owner(), held.fence())));
    assert!(line("WARN", "a renewal has failed").contains("error=the server cannot be reached"));
    assert!(
        line("ERROR", "the lock is lost").contains("lost=it could not be renewed before it ended")
    );
}
