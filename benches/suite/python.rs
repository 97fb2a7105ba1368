//! What do locks cost from Python? See language.rs.

use crate::language::{self, CLIENT_CPU, HANDOVER, SERVER_CPU, Variant, WALL};
use crate::measure::{Contender, Figures, Rounds};
use crate::peers::Program;
use crate::report::{Report, Target};
use crate::{pin, rounds};
use testkit::Server;

const HELPER: &str = "helper";
const HELPER_ASYNCIO: &str = "helper, asyncio";
const REDIS_PY: &str = "redis-py Lock";
const REDIS_PY_ASYNCIO: &str = "redis-py Lock, asyncio";
const PYTHON_REDIS_LOCK: &str = "python-redis-lock";
const COMMANDS: &str = "our commands by redis-py's execute_command";
const WAIT_BY_COMMANDS: &str = "LOCK.ACQUIRE … WAIT by redis-py's execute_command";
const IN_COMMANDS: &str = "µs in the commands";

const PAIRS: &[Variant] = &[
    (REDIS_PY, "redis-py"),
    (COMMANDS, "commands"),
    (HELPER, "helper"),
    (PYTHON_REDIS_LOCK, "python-redis-lock"),
    (REDIS_PY_ASYNCIO, "redis-py-asyncio"),
    (HELPER_ASYNCIO, "helper-asyncio"),
];

const HANDOVERS: &[Variant] = &[
    (HELPER, "helper"),
    (WAIT_BY_COMMANDS, "wait-by-commands"),
    (REDIS_PY, "redis-py"),
    (PYTHON_REDIS_LOCK, "python-redis-lock"),
];

const TURNS: &[Variant] = &[
    (HELPER, "helper"),
    (REDIS_PY, "redis-py"),
    ("redis-py Lock, sleep=0.005", "redis-py-5ms"),
    (PYTHON_REDIS_LOCK, "python-redis-lock"),
];

pub fn ask(report: &mut Report) {
    let program = Program::python_processes();
    if !program.is_here() {
        return report.note("Without the Python libraries: `make bench` installs them.");
    }
    pairs(report, &program);
    handovers(report, &program);
    for clients in [2, 32] {
        let title = format!("{clients} processes of Python, each holds for 5 ms and asks again");
        let all = language::turns(&program, TURNS, clients, report, &title);
        if clients == 32 {
            language::fairness(report, &all, HELPER);
        }
    }
    language::kept(report, "Python", &program, 10.0);
}

fn handovers(report: &mut Report, program: &Program) {
    report.note("One holds a lock, another of the same process waits for it: from the release to the grant.");
    let contender = |(name, variant): &Variant| {
        let (program, variant) = (program.clone(), *variant);
        let count = rounds(40, 5).to_string();
        Contender::new(*name, move || -> Figures {
            let server = pin::started_on(pin::SERVER, Server::start);
            let took = program.run(&server, variant, &["handovers", &count]);
            vec![(HANDOVER, took["p50"].as_f64().expect("a number of ms"))]
        })
    };
    let contenders = HANDOVERS.iter().map(contender).collect();
    let all = Rounds::interleave(rounds(5, 1), contenders);
    report.rounds(
        "A lock is handed over in Python",
        &all,
        &[HANDOVER],
        &[REDIS_PY],
    );
    for (rival, most) in [(REDIS_PY, 0.02), (WAIT_BY_COMMANDS, 1.5)] {
        report.target(
            format!("{HELPER} ÷ {rival}, {HANDOVER}"),
            all.ratio(HANDOVER, HELPER, rival),
            Target::AtMost(most),
        );
    }
}

fn pairs(report: &mut Report, program: &Program) {
    report.note(
        "Acquire and release one free lock, over and over; all on *one core*. What the two commands cost through \
         redis-py's execute_command alone is redis-py's own, not its Lock's nor ours.",
    );
    let figures = [
        (WALL, "wall"),
        (CLIENT_CPU, "client_cpu"),
        (SERVER_CPU, "server_cpu"),
        (IN_COMMANDS, "commands"),
    ];
    let all = language::pairs(program, PAIRS, &figures);
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
