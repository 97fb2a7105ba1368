//! What do locks cost from Python? See language.rs.

use crate::language::{self, CLIENT_CPU, HANDOVER, SERVER_CPU, Variant, WALL};
use crate::peers::Program;
use crate::report::{Report, Target};

const HELPER: &str = "helper";
const HELPER_ASYNCIO: &str = "helper, asyncio";
const REDIS_PY: &str = "redis-py Lock";
const REDIS_PY_ASYNCIO: &str = "redis-py Lock, asyncio";
const PYTHON_REDIS_LOCK: &str = "python-redis-lock";
const COMMANDS: &str = "our commands by redis-py's execute_command";
const IN_COMMANDS: &str = "µs in the commands";

const PAIRS: &[Variant] = &[
    (REDIS_PY, "redis-py"),
    (COMMANDS, "commands"),
    (HELPER, "helper"),
    (PYTHON_REDIS_LOCK, "python-redis-lock"),
    (REDIS_PY_ASYNCIO, "redis-py-asyncio"),
    (HELPER_ASYNCIO, "helper-asyncio"),
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
    for clients in [2, 32] {
        let title = format!("{clients} processes of Python, each holds for 5 ms and asks again");
        let all = language::turns(&program, TURNS, clients, report, &title);
        if clients == 32 {
            language::fairness(report, &all, HELPER);
        } else {
            report.target(
                format!("{HELPER} ÷ {REDIS_PY}, {HANDOVER}"),
                all.ratio(HANDOVER, HELPER, REDIS_PY),
                Target::AtMost(0.02),
            );
        }
    }
    language::kept(report, "Python", &program, 10.0);
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
