//! What does it cost to keep locks: one, a thousand, a hundred thousand?

use std::time::{Duration, Instant};

use lockkeeper::{Held, Lockkeeper};

use crate::helper::own_cpu_us;
use crate::measure::Meter;
use crate::report::{Cell, Report, Target};
use crate::{pin, quick, rounds};
use testkit::Server;

/// How many acquires are under way at a time.
const AT_A_TIME: usize = 500;

pub fn ask(report: &mut Report) {
    let ttl = Duration::from_secs(if quick() { 6 } else { 30 });
    // Every lock is renewed once in a third of its ttl.
    let period = ttl / 3;
    report.note(&format!(
        "One helper holds so many locks with a ttl of {ttl:?}, on two cores. Measured for {period:?}, in \
         which each is renewed once; the line of 0 locks is the floor.",
    ));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let mut rows: Vec<Vec<Cell>> = vec![];
    let mut cpu = (0.0, 0.0);
    for locks in [0, 1, 1_000, rounds(100_000, 10_000)] {
        let server = pin::started_on(pin::SERVER, Server::start);
        let lockkeeper = Lockkeeper::open(server.url()).unwrap();
        let start = Instant::now();
        let held = runtime.block_on(hold(&lockkeeper, locks, ttl));
        let took = start.elapsed().as_secs_f64();
        let mut meter = Meter::of(&server);
        meter.reset_commands();
        let (servers, ours, start) = (meter.cpu_us(), own_cpu_us(), Instant::now());
        std::thread::sleep(period);
        let wall = 1e6 * start.elapsed().as_secs_f64();
        cpu = (
            100.0 * (meter.cpu_us() - servers) / wall,
            100.0 * (own_cpu_us() - ours) / wall,
        );
        rows.push(vec![
            format!("{locks} locks").into(),
            cpu.0.into(),
            cpu.1.into(),
            (1e6 * meter.calls() as f64 / wall).into(),
            took.into(),
        ]);
        let lost = held.iter().filter(|held| held.loss().is_some()).count();
        assert_eq!(lost, 0, "of {locks} locks");
        held.into_iter().for_each(Held::leave);
    }
    report.table(
        "The watchdog",
        &[
            "",
            "server CPU %",
            "client CPU %",
            "commands/s",
            "s to acquire them",
        ],
        rows,
    );
    for (side, cpu) in [("server", cpu.0), ("client", cpu.1)] {
        let what = format!("% of a core for all those locks, {side}");
        report.target(what, cpu, Target::AtMost(10.0));
    }
}

async fn hold(lockkeeper: &Lockkeeper, locks: usize, ttl: Duration) -> Vec<Held> {
    let mut held = Vec::with_capacity(locks);
    for first in (0..locks).step_by(AT_A_TIME) {
        let numbers = first..locks.min(first + AT_A_TIME);
        let acquires: Vec<_> = numbers
            .map(|number| {
                let acquire = lockkeeper.acquire(format!("kept:{number}")).ttl(ttl);
                tokio::spawn(acquire)
            })
            .collect();
        for acquire in acquires {
            held.push(acquire.await.unwrap().unwrap().expect("it is free"));
        }
    }
    held
}
