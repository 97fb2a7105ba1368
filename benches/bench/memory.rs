//! How much memory does a lock take, and a client that waits?

use std::thread;
use std::time::Duration;

use crate::dying::{Waiting, occupy};
use crate::line::{Line, pack};
use crate::measure::{Contender, Figures, Meter, Rounds};
use crate::report::{Report, Target};
use crate::sequence::OWNER;
use crate::support::{Server, eventually};
use crate::{pin, rounds};

const COUNTED: &str = "counted bytes";
const RESIDENT: &str = "resident bytes";
const COUNTED_LATER: &str = "counted after 3 s";
const RESIDENT_LATER: &str = "resident after 3 s";

const WAITERS: usize = 1_000;

pub fn ask(report: &mut Report) {
    report.note(
        "*counted* is used_memory, which maxmemory looks at; *resident* is used_memory_rss. Both are \
         growth divided by number, on a new server each.",
    );
    locks(report);
    waiters(report);
}

fn locks(report: &mut Report) {
    let value = format!("1795986866264000:{OWNER}");
    let count = rounds(100_000, 20_000);
    let plain = |value: String| move |key: &str| pack(&["SET", key, &value, "NX", "PX", "3600000"]);
    let lock = |key: &str| pack(&["LOCK.ACQUIRE", key, OWNER, "3600000"]);
    let all = Rounds::interleave(
        rounds(3, 1),
        vec![
            Contender::new("SET key owner NX PX", {
                let command = plain(OWNER.to_owned());
                move || held(count, &command)
            }),
            Contender::new("SET key fence:owner NX PX", {
                let command = plain(value);
                move || held(count, &command)
            }),
            Contender::new("LOCK.ACQUIRE", move || held(count, lock)),
        ],
    );
    let (same, owner_only) = ("SET key fence:owner NX PX", "SET key owner NX PX");
    report.rounds(
        &format!("One of {count} locks, held"),
        &all,
        &[COUNTED, RESIDENT],
        &[owner_only, same],
    );
    for figure in [COUNTED, RESIDENT] {
        report.target(
            format!("lock ÷ {owner_only}, {figure}"),
            all.ratio(figure, "LOCK.ACQUIRE", owner_only),
            Target::AtMost(1.25),
        );
    }
}

fn held(count: usize, command: impl Fn(&str) -> Vec<u8>) -> Figures {
    let server = pin::started_on(pin::SERVER, Server::start);
    let (mut meter, mut line) = (Meter::of(&server), Line::to(&server));
    // The buffers of this connection are there before and after.
    let send = |line: &mut Line, numbers: std::ops::Range<usize>| {
        let lines = numbers.len();
        let commands: Vec<u8> = numbers
            .flat_map(|n| command(&format!("lock:{n:08}")))
            .collect();
        line.send(&commands);
        line.receive(lines);
    };
    send(&mut line, 0..100);
    let before = memory(&mut meter);
    for start in (100..count + 100).step_by(100) {
        send(&mut line, start..start + 100);
    }
    let after = memory(&mut meter);
    vec![
        (COUNTED, (after.0 - before.0) / count as f64),
        (RESIDENT, (after.1 - before.1) / count as f64),
    ]
}

fn memory(meter: &mut Meter) -> (f64, f64) {
    // The server looks at its resident size ten times a second.
    thread::sleep(Duration::from_millis(250));
    let mut number = |field| meter.number("memory", field);
    (number("used_memory"), number("used_memory_rss"))
}

fn waiters(report: &mut Report) {
    let contender = |name: &str, waiting, keys| Contender::new(name, move || waits(waiting, keys));
    let all = Rounds::interleave(
        rounds(2, 1),
        vec![
            contender("BLPOP, 1 key", Waiting::InBlpop, 1),
            contender("LOCK, 1 key", Waiting::InLine, 1),
            contender("BLPOP, 1,000 keys", Waiting::InBlpop, WAITERS),
            contender("LOCK, 1,000 keys", Waiting::InLine, WAITERS),
        ],
    );
    let figures = [COUNTED, RESIDENT, COUNTED_LATER, RESIDENT_LATER];
    report.rounds(
        "One of 1,000 clients that wait, its connection included",
        &all,
        &figures,
        &["BLPOP, 1 key"],
    );
}

fn waits(waiting: Waiting, keys: usize) -> Figures {
    let server = pin::started_on(pin::SERVER, Server::start);
    if waiting == Waiting::InLine {
        occupy(&server, keys);
    }
    let mut meter = Meter::of(&server);
    let before = memory(&mut meter);
    let _crowd: Vec<Line> = (0..WAITERS)
        .map(|number| {
            let mut line = Line::to(&server);
            line.send(&waiting.command(number, keys));
            line
        })
        .collect();
    eventually("all wait", || {
        meter.number("clients", "blocked_clients") == WAITERS as f64
    });
    let at_once = memory(&mut meter);
    thread::sleep(Duration::from_secs(3));
    let later = memory(&mut meter);
    let each = |number: f64| number / WAITERS as f64;
    vec![
        (COUNTED, each(at_once.0 - before.0)),
        (RESIDENT, each(at_once.1 - before.1)),
        (COUNTED_LATER, each(later.0 - before.0)),
        (RESIDENT_LATER, each(later.1 - before.1)),
    ]
}
