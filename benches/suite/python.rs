//! What do locks cost from Python, and how long does one wait: our helper beside the locks that people use there.

use std::time::Duration;

use crate::contention::{Log, Plan};
use crate::measure::{Contender, Figures, Meter, Rounds};
use crate::report::{Report, Target};
use crate::{peers, pin, rounds};
use testkit::Server;

const HELPER: &str = "helper";
const HELPER_ASYNCIO: &str = "helper, asyncio";
const REDIS_PY: &str = "redis-py Lock";
const REDIS_PY_ASYNCIO: &str = "redis-py Lock, asyncio";
const COMMANDS: &str = "our commands by redis-py's execute_command";

const WALL: &str = "wall µs";
const CLIENT_CPU: &str = "client CPU µs";
const SERVER_CPU: &str = "server CPU µs";
const IN_COMMANDS: &str = "µs in the commands";

const TURNS: &str = "turns/s";
const HANDOVER: &str = "hand-over ms p50";
const LONGEST: &str = "longest wait ÷ (processes × hold)";
const JAIN: &str = "Jain's index";
const CALLS: &str = "commands a turn";

pub fn ask(report: &mut Report) {
    if !peers::has_python() {
        return report.note("Without the Python libraries: `make bench` installs them.");
    }
    pairs(report);
    turns(report, 2);
    turns(report, 32);
    kept(report);
}

fn pairs(report: &mut Report) {
    report.note(
        "Acquire and release one free lock, over and over; all on *one core*. What the two commands cost through \
         redis-py's execute_command alone is redis-py's own, not its Lock's nor ours.",
    );
    let server = pin::started_on(pin::CLIENT, Server::start);
    let server = &server;
    let count = rounds(1_500, 300).to_string();
    let contenders = [
        (REDIS_PY, "redis-py"),
        (COMMANDS, "commands"),
        (HELPER, "helper"),
        ("python-redis-lock", "python-redis-lock"),
        (REDIS_PY_ASYNCIO, "redis-py-asyncio"),
        (HELPER_ASYNCIO, "helper-asyncio"),
    ]
    .map(|(name, variant)| {
        let count = count.clone();
        Contender::new(name, move || -> Figures {
            let cost = peers::python(server, variant, &["pairs", &count]);
            let figure = |name: &str| cost[name].as_f64().expect("a number of µs");
            vec![
                (WALL, figure("wall")),
                (CLIENT_CPU, figure("client_cpu")),
                (SERVER_CPU, figure("server_cpu")),
                (IN_COMMANDS, figure("commands")),
            ]
        })
    });
    let all = Rounds::interleave(rounds(9, 2), contenders.into());
    report.rounds(
        "Acquire and release in Python",
        &all,
        &[WALL, CLIENT_CPU, SERVER_CPU, IN_COMMANDS],
        &[REDIS_PY],
    );
    for (ours, theirs) in [(HELPER, REDIS_PY), (HELPER_ASYNCIO, REDIS_PY_ASYNCIO)] {
        for (figure, most) in [(WALL, 0.9), (IN_COMMANDS, 0.7), (SERVER_CPU, 1.05)] {
            report.target(
                format!("{ours} ÷ {theirs}, {figure}"),
                all.ratio(figure, ours, theirs),
                Target::AtMost(most),
            );
        }
    }
}

fn turns(report: &mut Report, clients: usize) {
    let plan = Plan {
        clients,
        hold: Duration::from_millis(5),
        pause: Duration::ZERO,
        length: Duration::from_secs(rounds(4, 1) as u64),
    };
    let contender = |name: &str, variant: &'static str| {
        Contender::new(name, move || -> Figures {
            let server = pin::started_on(pin::SERVER, Server::start);
            let mut meter = Meter::of(&server);
            let logs = peers::python_processes(&server, variant, plan);
            judge(plan, &logs, meter.calls() as f64)
        })
    };
    let all = Rounds::interleave(
        rounds(5, 1),
        vec![
            contender(HELPER, "helper"),
            contender(REDIS_PY, "redis-py"),
            contender("redis-py Lock, sleep=0.005", "redis-py-5ms"),
            contender("python-redis-lock", "python-redis-lock"),
        ],
    );
    let title = format!("{clients} processes of Python, each holds for 5 ms and asks again");
    let figures = [TURNS, HANDOVER, LONGEST, JAIN, CALLS];
    report.rounds(&title, &all, &figures, &[]);
    if clients == 2 {
        report.target(
            format!("{HELPER} ÷ {REDIS_PY}, {HANDOVER}"),
            all.ratio(HANDOVER, HELPER, REDIS_PY),
            Target::AtMost(0.02),
        );
    } else {
        for (figure, target) in [
            (LONGEST, Target::AtMost(1.3)),
            (JAIN, Target::AtLeast(0.99)),
            (CALLS, Target::AtMost(3.0)),
        ] {
            report.target(
                format!("{HELPER}, {figure}"),
                all.of(HELPER, figure).clone(),
                target,
            );
        }
    }
}

fn judge(plan: Plan, logs: &[Log], calls: f64) -> Figures {
    let mut turns: Vec<_> = logs
        .iter()
        .flat_map(|log| log.turns.iter().copied())
        .collect();
    turns.sort_by(|a, b| a.granted.total_cmp(&b.granted));
    let mut handovers = crate::measure::Series::default();
    for pair in turns.windows(2) {
        let gap = pair[1].granted - pair[0].releasing;
        assert!(gap > 0.0, "two held the lock at once");
        if pair[1].asked < pair[0].releasing {
            handovers.0.push(1e3 * gap);
        }
    }
    let length = plan.length.as_secs_f64();
    let longest = logs
        .iter()
        .flat_map(|log| {
            let served = log.turns.iter().map(|turn| turn.granted - turn.asked);
            served.chain(log.waiting_since.map(|since| length - since))
        })
        .fold(0.0, f64::max);
    let counts = logs.iter().map(|log| log.turns.len() as f64);
    let (count, squares) = counts.fold((0.0, 0.0), |(sum, squares), one| {
        (sum + one, squares + one * one)
    });
    let held: f64 = turns.iter().map(|turn| turn.releasing - turn.granted).sum();
    let clients = plan.clients as f64;
    vec![
        (TURNS, count / length),
        (HANDOVER, handovers.median()),
        (LONGEST, longest / (clients * held / count)),
        (JAIN, count * count / (clients * squares)),
        (CALLS, calls / count),
    ]
}

fn kept(report: &mut Report) {
    let locks = rounds(10_000, 1_000).to_string();
    let seconds = rounds(10, 2).to_string();
    let server = pin::started_on(pin::SERVER, Server::start);
    let cost = peers::python(&server, "helper", &["kept", &locks, &seconds]);
    let figure = |name: &str| cost[name].as_f64().expect("a number");
    report.table(
        &format!("{locks} locks held by one program in Python, ttl 30 s"),
        &["", "client CPU %", "server CPU %", "s to acquire them"],
        vec![vec![
            HELPER.into(),
            figure("client").into(),
            figure("server").into(),
            figure("acquired").into(),
        ]],
    );
    report.target(
        "% of a core for all those locks, client",
        figure("client"),
        Target::AtMost(10.0),
    );
}
