//! What does the helper add to the bare commands?

use std::time::{Duration, Instant};

use lockkeeper::{Lockkeeper, Released};
use rslock::LockManager;
use rustix::time::{ClockId, clock_gettime};
use tokio::runtime::Runtime;

use crate::measure::{Contender, Figures, Meter, Rounds};
use crate::report::Report;
use crate::sequence::{OWNER, TTL};
use crate::{pin, rounds};
use testkit::Server;

const WALL: &str = "wall µs";
const CLIENT_CPU: &str = "client CPU µs";
const SERVER_CPU: &str = "server CPU µs";

const BARE: &str = "redis-rs, bare";
const BARE_ASYNC: &str = "redis-rs, bare, async";

pub fn ask(report: &mut Report) {
    report.note(
        "Acquire and release one free lock, over and over; all on *one core*. *bare* sends the same two \
         commands through redis-rs. The helper makes a fresh owner each time, keeps a lease and talks \
         through its watchdog thread.",
    );
    let server = pin::started_on(pin::CLIENT, Server::start);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let all = Rounds::interleave(
        rounds(9, 2),
        vec![
            pings(&server),
            bare(&server),
            bare_async(&server, &runtime),
            blocking(&server),
            awaited(&server, &runtime),
            rslock(&server, &runtime),
        ],
    );
    report.rounds(
        "Acquire and release in Rust",
        &all,
        &[WALL, CLIENT_CPU, SERVER_CPU],
        &[BARE, BARE_ASYNC],
    );
}

/// Measures a round of `pair`.
fn contender<'a>(name: &str, server: &Server, mut pair: impl FnMut() + 'a) -> Contender<'a> {
    let mut meter = Meter::of(server);
    let pairs = rounds(1_500, 300);
    Contender::new(name, move || -> Figures {
        let cpu = (meter.cpu_us(), own_cpu_us());
        let start = Instant::now();
        for _ in 0..pairs {
            pair();
        }
        let each = |us: f64| us / pairs as f64;
        vec![
            (WALL, each(1e6 * start.elapsed().as_secs_f64())),
            (CLIENT_CPU, each(own_cpu_us() - cpu.1)),
            (SERVER_CPU, each(meter.cpu_us() - cpu.0)),
        ]
    })
}

/// Of all threads of this process.
pub fn own_cpu_us() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    1e6 * time.tv_sec as f64 + time.tv_nsec as f64 / 1e3
}

fn pings(server: &Server) -> Contender<'static> {
    let mut redis = redis::Client::open(server.url())
        .unwrap()
        .get_connection()
        .unwrap();
    contender("redis-rs, 2 PINGs", server, move || {
        for _ in 0..2 {
            redis::cmd("PING").exec(&mut redis).unwrap();
        }
    })
}

fn commands() -> (redis::Cmd, redis::Cmd) {
    let (mut acquire, mut release) = (redis::cmd("LOCK.ACQUIRE"), redis::cmd("LOCK.RELEASE"));
    acquire.arg("bare").arg(OWNER).arg(TTL);
    release.arg("bare").arg(OWNER);
    (acquire, release)
}

fn bare(server: &Server) -> Contender<'static> {
    let mut redis = redis::Client::open(server.url())
        .unwrap()
        .get_connection()
        .unwrap();
    contender(BARE, server, move || {
        let (acquire, release) = commands();
        let _fence: u64 = acquire.query(&mut redis).unwrap();
        assert_eq!(release.query(&mut redis), Ok(1));
    })
}

fn bare_async<'a>(server: &Server, runtime: &'a Runtime) -> Contender<'a> {
    let client = redis::Client::open(server.url()).unwrap();
    let redis = runtime
        .block_on(client.get_multiplexed_async_connection())
        .unwrap();
    contender(BARE_ASYNC, server, move || {
        let mut redis = redis.clone();
        runtime.block_on(async {
            let (acquire, release) = commands();
            let _fence: u64 = acquire.query_async(&mut redis).await.unwrap();
            assert_eq!(release.query_async(&mut redis).await, Ok(1));
        });
    })
}

fn blocking(server: &Server) -> Contender<'static> {
    let lockkeeper = Lockkeeper::open(server.url()).unwrap();
    contender("helper, blocking", server, move || {
        let held = lockkeeper.acquire("blocking").blocking().unwrap();
        let released = held.expect("it is free").blocking_release().unwrap();
        assert_eq!(released, Released::Yes);
    })
}

fn awaited<'a>(server: &Server, runtime: &'a Runtime) -> Contender<'a> {
    let lockkeeper = Lockkeeper::open(server.url()).unwrap();
    contender("helper, async", server, move || {
        runtime.block_on(async {
            let held = lockkeeper.acquire("async").await.unwrap();
            let released = held.expect("it is free").release().await.unwrap();
            assert_eq!(released, Released::Yes);
        });
    })
}

fn rslock<'a>(server: &Server, runtime: &'a Runtime) -> Contender<'a> {
    let manager = LockManager::new(vec![server.url()]);
    contender("rslock", server, move || {
        runtime.block_on(async {
            let lock = manager
                .lock("rslock", Duration::from_secs(30))
                .await
                .unwrap();
            manager.unlock(&lock).await;
        });
    })
}
