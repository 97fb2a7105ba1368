//! What does an uncontended lock cost: taken and given back, by one client and by many?

use std::time::Instant;

use crate::measure::{Contender, Rounds, Series};
use crate::plot::Plot;
use crate::report::{Report, Target};
use crate::sequence::{
    COMMANDS, CPU, OWNER, Sequence, TTL, WALL, in_all_settings, is_understood, key, load_script,
    words,
};
use crate::{pin, rounds};
use testkit::Server;
use testkit::connection::{RawConnection, pack};

const OURS: &str = "ACQUIRE + RELEASE";
const LUA: &str = "SET NX + Lua";
const DEL: &str = "SET NX + DEL (unsafe)";

/// What everybody uses: delete the key if the value is still mine.
pub const RELEASE_SCRIPT: &str = "if redis.call('get', KEYS[1]) == ARGV[1] then \
     return redis.call('del', KEYS[1]) else return 0 end";

pub fn ask(report: &mut Report) {
    report.note(
        "One client takes and gives back 64 locks in turn; server and client on *one core*, any \
         replica on the other. Figures are for one pair. *commandstats* is the time inside the two \
         commands, *server CPU* that of the whole main thread: reading, parsing and replying too.",
    );
    in_all_settings(|setting, server| {
        for (depth, operations) in [(1, 2_000), (32, 6_000)] {
            let pairs = pairs(server);
            let contenders = pairs
                .iter()
                .map(|pair| pair.contender(server, depth, rounds(operations, operations / 4)))
                .collect();
            let all = Rounds::interleave(rounds(9, 3), contenders);
            let title = format!("Pair, {setting}, {depth} commands at a time");
            report.rounds(&title, &all, &[COMMANDS, CPU, WALL], &[LUA, DEL]);
            targets(report, &format!("{setting}, {depth} at a time"), &all);
        }
    });
    throughput(report);
}

fn targets(report: &mut Report, setting: &str, all: &Rounds) {
    for (figure, rival, most) in [(COMMANDS, LUA, 0.60), (CPU, LUA, 0.72), (CPU, DEL, 1.30)] {
        report.target(
            format!("pair ÷ {rival}, {figure}, {setting}"),
            all.ratio(figure, OURS, rival),
            Target::AtMost(most),
        );
    }
}

/// Ours and what people do today, and the floors.
fn pairs(server: &Server) -> Vec<Sequence> {
    let script = load_script(server, RELEASE_SCRIPT);
    let take = |key: &str| words!["SET", key, OWNER, "NX", "PX", TTL];
    let mut pairs = vec![
        Sequence::new(OURS, &["lock.acquire", "lock.release"], |key| {
            vec![
                words!["LOCK.ACQUIRE", key, OWNER, TTL],
                words!["LOCK.RELEASE", key, OWNER],
            ]
        }),
        Sequence::new(LUA, &["set", "evalsha"], move |key| {
            vec![take(key), words!["EVALSHA", &*script, "1", key, OWNER]]
        }),
        Sequence::new(DEL, &["set", "del"], move |key| {
            vec![take(key), words!["DEL", key]]
        }),
        Sequence::new("PING + PING", &["ping"], |_| {
            vec![words!["PING"], words!["PING"]]
        }),
        Sequence::new("SET + SET", &["set"], |key| {
            let set = words!["SET", format!("plain:{key}"), OWNER];
            vec![set.clone(), set]
        }),
    ];
    if is_understood(server, &["DELEX", "missing", "IFEQ", "x"]) {
        pairs.push(Sequence::new(
            "SET NX + DELEX",
            &["set", "delex"],
            move |key| vec![take(key), words!["DELEX", key, "IFEQ", OWNER]],
        ));
    }
    if is_understood(server, &["DELIFEQ", "missing", "x"]) {
        pairs.push(Sequence::new(
            "SET NX + DELIFEQ",
            &["set", "delifeq"],
            move |key| vec![take(key), words!["DELIFEQ", key, OWNER]],
        ));
    }
    pairs
}

const PER_SECOND: &str = "pairs/s";

/// Pairs a second with more and more clients, the server alone on its core.
fn throughput(report: &mut Report) {
    let server = pin::started_on(pin::SERVER, Server::start);
    let numbers = [1, 4, 16, 64, 256];
    let mut lines: Vec<(String, Vec<(f64, f64)>)> = vec![];
    let mut table = vec![];
    for clients in numbers {
        let pairs = pairs(&server);
        let contenders = pairs
            .iter()
            .map(|pair| at_once(&server, pair, clients))
            .collect();
        let all = Rounds::interleave(rounds(5, 2), contenders);
        let ratio: Series = all.ratio(PER_SECOND, OURS, LUA);
        let mut row = vec![format!("{clients}").into()];
        for (place, name) in all.names.iter().enumerate() {
            let series = all.of(name, PER_SECOND).clone();
            if lines.len() <= place {
                lines.push((name.clone(), vec![]));
            }
            lines[place].1.push((clients as f64, series.median()));
            row.push(series.into());
        }
        row.push(ratio.into());
        table.push(row);
    }
    let mut header = vec!["clients".to_owned()];
    header.extend(lines.iter().map(|(name, _)| name.clone()));
    header.push(format!("{OURS} ÷ {LUA}"));
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    report.table(
        "Pairs a second, two cores: each client waits for its reply, all in one thread",
        &header,
        table,
    );
    report.plot(
        "throughput.svg",
        &Plot {
            title: "Uncontended locks taken and given back".to_owned(),
            x: "clients",
            y: "pairs a second",
            lines,
        },
    );
}

/// All clients send, then all read: each has one command under way.
fn at_once(server: &Server, pair: &Sequence, clients: usize) -> Contender<'static> {
    let mut connections: Vec<_> = (0..clients)
        .map(|number| {
            let commands = pair.commands(&key(number));
            let packed = commands.iter().map(|words| {
                let words: Vec<&str> = words.iter().map(String::as_str).collect();
                pack(&words)
            });
            (RawConnection::to(server), packed.collect::<Vec<_>>())
        })
        .collect();
    let passes = rounds(4_000, 1_000).div_ceil(clients);
    Contender::new(pair.name, move || {
        let start = Instant::now();
        for _ in 0..passes {
            for step in 0..2 {
                for (connection, packed) in &mut connections {
                    connection.send(&packed[step]);
                }
                for (connection, _) in &mut connections {
                    connection.receive(1);
                }
            }
        }
        let pairs = (passes * connections.len()) as f64;
        vec![(PER_SECOND, pairs / start.elapsed().as_secs_f64())]
    })
}
