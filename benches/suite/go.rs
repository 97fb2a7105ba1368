//! What do locks cost from Go? See language.rs.

use crate::language::{self, CLIENT_CPU, HANDOVER, SERVER_CPU, Variant, WALL};
use crate::peers::Program;
use crate::report::{Report, Target};

const HELPER: &str = "helper";
const COMMANDS: &str = "our commands by go-redis";
const REDISLOCK: &str = "bsm/redislock, 100 ms apart";
const REDSYNC: &str = "redsync, defaults";

const PAIRS: &[Variant] = &[
    (COMMANDS, "commands"),
    (HELPER, "helper"),
    (REDISLOCK, "redislock"),
    (REDSYNC, "redsync"),
];

const TURNS: &[Variant] = &[
    (COMMANDS, "commands"),
    (HELPER, "helper"),
    (REDISLOCK, "redislock"),
    ("bsm/redislock, 10 ms apart", "redislock-10ms"),
    (REDSYNC, "redsync"),
    ("redsync, 10 ms apart", "redsync-10ms"),
];

pub fn ask(report: &mut Report) {
    let Some(program) = Program::go() else {
        return report.note("Without the Go libraries: `make bench PEERS='redislock redsync'`.");
    };
    report.note(
        "All of one program on one go-redis client, so on one pool. Acquire and release one free lock, over and over; \
         all on *one core*. What the two commands cost through go-redis alone is neither a Lock's nor ours.",
    );
    let figures = [
        (WALL, "wall"),
        (CLIENT_CPU, "client_cpu"),
        (SERVER_CPU, "server_cpu"),
    ];
    let all = language::pairs(&program, PAIRS, &figures);
    report.rounds(
        "Acquire and release in Go",
        &all,
        &[WALL, CLIENT_CPU, SERVER_CPU],
        &[COMMANDS, REDISLOCK, REDSYNC],
    );
    for rival in [REDISLOCK, REDSYNC] {
        report.target(
            format!("{HELPER} ÷ {rival}, {WALL}"),
            all.ratio(WALL, HELPER, rival),
            Target::AtMost(1.0),
        );
    }
    for clients in [2, 32] {
        let title = format!("{clients} goroutines, each holds for 5 ms and asks again");
        let all = language::turns(&program, TURNS, clients, report, &title);
        if clients == 32 {
            language::fairness(report, &all, HELPER);
        }
        report.target(
            format!("{HELPER} ÷ {COMMANDS}, {HANDOVER}, {clients} goroutines"),
            all.ratio(HANDOVER, HELPER, COMMANDS),
            Target::AtMost(1.5),
        );
    }
    language::kept(report, "Go", &program, 5.0);
}
