//! How soon after a release is the next one granted, and what does that cost the server?

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::{Duration, Instant};

use fastrand::Rng;
use redis::Connection;

use crate::measure::{Contender, Figures, Meter, Rounds, Series};
use crate::plot::Plot;
use crate::report::{Cell, Report, Target};
use crate::sequence::{OWNER, in_all_settings, load_script};
use crate::uncontended::RELEASE_SCRIPT;
use crate::{pin, rounds};
use testkit::Server;
use testkit::connection::{RawConnection, pack};

const PING_P50: &str = "PING µs p50";
const PING_P99: &str = "PING p99";
const COLD_PING: &str = "cold PING p50";
const P50: &str = "hand-over µs p50";
const P99: &str = "p99";
const MAX: &str = "max";
const P50_IN_PINGS: &str = "p50 in PINGs";
const P99_IN_PINGS: &str = "p99 in PINGs";
const P50_IN_COLD_PINGS: &str = "p50 in cold PINGs";
/// What the machine does to every hundredth round trip, it does to a PING as well.
const P99_BY_P99: &str = "p99 ÷ PING p99";
const RELEASE: &str = "RELEASE commandstats µs";
const CPU: &str = "server CPU µs";
const COMMANDS: &str = "commands";

const WAITERS: [usize; 4] = [1, 100, 900, 1000];

pub fn ask(report: &mut Report) {
    report.note(
        "So many clients wait for one lock. The holder sends RELEASE, and the time until the next \
         in the queue has its grant counts; then the old holder queues again. A PING goes out after \
         every hand-over: *in PINGs* is the ratio to the median of those. A *cold PING* goes over \
         another connection each time, out of as many as wait: so does a hand-over, and no cache holds \
         them all. *server CPU* and *commands* are for one hand-over with its return to the line; the \
         PINGs are in the former.",
    );
    let mut lines = vec![];
    for (setting, side) in [("one core", pin::CLIENT), ("two cores", pin::SERVER)] {
        let all = waiting(side, &WAITERS);
        let figures = [
            PING_P50,
            PING_P99,
            P50,
            P99,
            MAX,
            P50_IN_PINGS,
            P99_IN_PINGS,
            P99_BY_P99,
            COLD_PING,
            P50_IN_COLD_PINGS,
            RELEASE,
            CPU,
            COMMANDS,
        ];
        report.rounds(&format!("Hand-over, {setting}"), &all, &figures, &[]);
        targets(report, setting, &all);
        if side == pin::SERVER {
            for (name, figure) in [("PING p50", PING_P50), ("LOCK p50", P50), ("LOCK p99", P99)] {
                let points = WAITERS.iter().zip(&all.names);
                let points = points.map(|(n, row)| (*n as f64, all.of(row, figure).median()));
                lines.push((name.to_owned(), points.collect()));
            }
        }
    }
    durable(report);
    lines.extend(polling(report));
    report.plot(
        "handover.svg",
        &Plot {
            title: "From release to the next grant".to_owned(),
            x: "clients that wait",
            y: "µs",
            lines,
        },
    );
}

fn targets(report: &mut Report, setting: &str, all: &Rounds) {
    for name in &all.names[..3] {
        for (what, figure, most) in [("p50", P50_IN_PINGS, 1.5), ("p99", P99_IN_PINGS, 4.0)] {
            let value = all.of(name, figure).clone();
            let what = format!("hand-over {what} in PINGs, {name}, {setting}");
            report.target(what, value, Target::AtMost(most));
        }
    }
    report.target(
        format!("RELEASE with 1,000 waiting ÷ with 1, commandstats, {setting}"),
        all.ratio(RELEASE, &all.names[3], &all.names[0]),
        Target::AtMost(1.5),
    );
}

fn waiting(side: pin::Side, waiters: &[usize]) -> Rounds {
    let servers: Vec<Server> = waiters
        .iter()
        .map(|_| pin::started_on(side, Server::start))
        .collect();
    let contenders = waiters.iter().zip(&servers).map(|(waiters, server)| {
        Contender::new(format!("{waiters} waiting"), measure(server, *waiters))
    });
    Rounds::interleave(rounds(9, 3), contenders.collect())
}

/// The same where every grant is also written and sent on.
fn durable(report: &mut Report) {
    let mut rows: Vec<Vec<Cell>> = vec![];
    let figures = [PING_P50, P50, P99, P50_IN_PINGS, P99_IN_PINGS, RELEASE];
    in_all_settings(|setting, server| {
        let contender = Contender::new(setting, measure(server, 100));
        let all = Rounds::interleave(rounds(9, 3), vec![contender]);
        let mut row = vec![Cell::from(setting)];
        row.extend(
            figures
                .iter()
                .map(|figure| all.of(setting, figure).clone().into()),
        );
        rows.push(row);
    });
    let header = [&["100 waiting"], &figures[..]].concat();
    report.table("Hand-over with AOF and replica, one core", &header, rows);
}

fn measure(server: &Server, waiters: usize) -> impl FnMut() -> Figures {
    let mut ring = Ring::of(server, waiters);
    let mut meter = Meter::of(server);
    let turns = rounds(600, 150);
    move || {
        meter.reset_commands();
        let cpu = meter.cpu_us();
        let mut pings = Series::default();
        let mut cold_pings = Series::default();
        let mut handovers = Series::default();
        for _ in 0..turns {
            handovers.0.push(us(ring.turn()));
            pings.0.push(us(ring.ping()));
            cold_pings.0.push(us(ring.cold_ping()));
        }
        let turns = turns as f64;
        let ping = pings.median();
        vec![
            (CPU, (meter.cpu_us() - cpu) / turns),
            (COMMANDS, meter.calls() as f64 / turns - 2.0),
            (RELEASE, meter.command_us(&["lock.release"]) / turns),
            (PING_P50, ping),
            (PING_P99, pings.quantile(0.99)),
            (COLD_PING, cold_pings.median()),
            (P50, handovers.median()),
            (P99, handovers.quantile(0.99)),
            (MAX, handovers.max()),
            (P50_IN_PINGS, handovers.median() / ping),
            (P99_IN_PINGS, handovers.quantile(0.99) / ping),
            (P50_IN_COLD_PINGS, handovers.median() / cold_pings.median()),
            (P99_BY_P99, handovers.quantile(0.99) / pings.quantile(0.99)),
        ]
    }
}

pub fn us(time: Duration) -> f64 {
    1e6 * time.as_secs_f64()
}

/// Clients that hold a lock one after the other, and wait for it all the rest of the time.
struct Ring {
    /// Connection, what it sends to queue, what it sends to release.
    clients: Vec<(RawConnection, Vec<u8>, Vec<u8>)>,
    holder: usize,
    bystander: RawConnection,
    idle: VecDeque<RawConnection>,
    ping: Vec<u8>,
}

impl Ring {
    fn of(server: &Server, waiters: usize) -> Ring {
        let client = |number: usize| {
            let owner = format!("{OWNER}:{number}");
            let long = "3600000";
            (
                RawConnection::to(server),
                pack(&["LOCK.ACQUIRE", "lock", &owner, long, "WAIT", long]),
                pack(&["LOCK.RELEASE", "lock", &owner]),
            )
        };
        let mut ring = Ring {
            clients: (0..=waiters).map(client).collect(),
            holder: 0,
            bystander: RawConnection::to(server),
            idle: (0..waiters).map(|_| RawConnection::to(server)).collect(),
            ping: pack(&["PING"]),
        };
        ring.bystander.let_many_wait();
        for number in 0..=waiters {
            let (connection, acquire, _) = &mut ring.clients[number];
            connection.send(acquire);
            ring.ping();
        }
        assert!(ring.clients[0].0.number().is_some(), "it was free");
        ring
    }

    /// The lock goes to the next. Answers how long that took.
    fn turn(&mut self) -> Duration {
        let before = self.holder;
        self.holder = (before + 1) % self.clients.len();
        let start = Instant::now();
        let (connection, _, release) = &mut self.clients[before];
        connection.send(release);
        let granted = self.clients[self.holder].0.number();
        let took = start.elapsed();
        assert!(granted.is_some(), "it is this one's turn");
        let (connection, acquire, _) = &mut self.clients[before];
        assert_eq!(connection.number(), Some(1), "it held the lock");
        connection.send(acquire);
        took
    }

    /// When it is answered, all that was sent before has been carried out: the server writes no
    /// reply before it has read from all connections that had something.
    fn ping(&mut self) -> Duration {
        let start = Instant::now();
        self.bystander.ask(&self.ping);
        start.elapsed()
    }

    fn cold_ping(&mut self) -> Duration {
        self.idle.rotate_left(1);
        let start = Instant::now();
        self.idle[0].ask(&self.ping);
        start.elapsed()
    }
}

/// The same for clients that ask again and again.
fn polling(report: &mut Report) -> Vec<(String, Vec<(f64, f64)>)> {
    let server = pin::started_on(pin::SERVER, Server::start);
    let (mut rows, mut lines): (Vec<Vec<Cell>>, Vec<_>) = (vec![], vec![]);
    for every_ms in [1, 100] {
        let mut points = vec![];
        for waiters in [1, 100, 900] {
            let sections = if every_ms == 1 {
                rounds(60, 15)
            } else {
                rounds(20, 4)
            };
            let (handovers, commands) = poll(&server, waiters, every_ms, sections);
            points.push((waiters as f64, 1e3 * handovers.median()));
            rows.push(vec![
                format!("SET NX every {every_ms} ms, {waiters} waiting").into(),
                handovers.median().into(),
                handovers.quantile(0.99).into(),
                handovers.max().into(),
                commands.into(),
            ]);
        }
        lines.push((format!("SET NX every {every_ms} ms"), points));
    }
    report.table(
        "Hand-over among clients that poll, two cores (900 polling every 1 ms: as often as one \
         thread can)",
        &[
            "",
            "ms p50",
            "p99",
            "max",
            "commands in one critical section",
        ],
        rows,
    );
    lines
}

/// The pollers take the lock by SET NX and give it back by script. Each holds it for 5 ms and up to one
/// period more, so that no phase is favoured, and polls again only when another has it. Answers the
/// times from a release to the next grant, in ms, and commands per critical section.
fn poll(server: &Server, waiters: usize, every_ms: u64, sections: usize) -> (Series, f64) {
    let mut connections: Vec<Connection> = (0..=waiters).map(|_| server.connect()).collect();
    let script = load_script(server, RELEASE_SCRIPT);
    let every = Duration::from_millis(every_ms);
    let owner = |client: usize| format!("{OWNER}:{client}");
    let mut random = Rng::with_seed(1);
    let mut polls: BinaryHeap<_> = (0..=waiters)
        .map(|client| Reverse((Instant::now() + every.mul_f64(random.f64()), client)))
        .collect();
    let (mut handovers, mut commands) = (Series::default(), 0.0);
    let mut held: Option<(usize, Instant)> = None;
    let mut released: Option<(usize, Instant)> = None;
    while handovers.0.len() < sections {
        let poll = polls.peek().expect("somebody waits").0.0;
        if let Some((holder, until)) = held.filter(|(_, until)| *until <= poll) {
            sleep_until(until);
            released = Some((holder, Instant::now()));
            let mut release = redis::cmd("EVALSHA");
            release.arg(&script).arg(1).arg("polled").arg(owner(holder));
            release.exec(&mut connections[holder]).unwrap();
            (held, commands) = (None, commands + 1.0);
            continue;
        }
        let Reverse((at, client)) = polls.pop().expect("somebody waits");
        sleep_until(at);
        let mut take = redis::cmd("SET");
        take.arg("polled")
            .arg(owner(client))
            .arg("NX")
            .arg("PX")
            .arg(30_000);
        let taken: Option<String> = take.query(&mut connections[client]).unwrap();
        commands += 1.0;
        if taken.is_none() {
            // As sleeping between two questions does: the next one is not sooner for being late.
            polls.push(Reverse((Instant::now() + every, client)));
            continue;
        }
        let now = Instant::now();
        held = Some((
            client,
            now + Duration::from_millis(5) + every.mul_f64(random.f64()),
        ));
        if let Some((before, at)) = released.take() {
            handovers.0.push(1e3 * (now - at).as_secs_f64());
            polls.push(Reverse((now + every.mul_f64(random.f64()), before)));
        } else {
            commands = 0.0;
        }
    }
    redis::cmd("DEL")
        .arg("polled")
        .exec(&mut connections[0])
        .unwrap();
    (handovers, commands / sections as f64)
}

pub fn sleep_until(at: Instant) {
    std::thread::sleep(at.saturating_duration_since(Instant::now()));
}
