//! How much memory does a lock take, and a client that waits?

use std::thread;
use std::time::{Duration, Instant};

use crate::crowd::{Waiting, occupy};
use crate::handover::sleep_until;
use crate::measure::{Contender, Figures, Meter, Rounds};
use crate::report::{Cell, Report, Target};
use crate::sequence::OWNER;
use crate::{pin, rounds};
use testkit::connection::{RawConnection, pack};
use testkit::{Server, eventually};

const COUNTED: &str = "counted bytes";
const RESIDENT: &str = "resident bytes";

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
    let (mut meter, mut connection) = (Meter::of(&server), RawConnection::to(&server));
    // The buffers of this connection are there before and after.
    let send = |connection: &mut RawConnection, numbers: std::ops::Range<usize>| {
        let replies = numbers.len();
        let commands: Vec<u8> = numbers
            .flat_map(|n| command(&format!("lock:{n:08}")))
            .collect();
        connection.send(&commands);
        connection.receive(replies);
    };
    send(&mut connection, 0..100);
    let before = memory(&mut meter);
    for start in (100..count + 100).step_by(100) {
        send(&mut connection, start..start + 100);
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

/// All at the same time, as most of it is waiting.
fn waiters(report: &mut Report) {
    let crowds = [
        ("BLPOP, 1 key", Waiting::InBlpop, 1),
        ("LOCK, 1 key", Waiting::InQueue, 1),
        ("BLPOP, 1,000 keys", Waiting::InBlpop, WAITERS),
        ("LOCK, 1,000 keys", Waiting::InQueue, WAITERS),
    ];
    let mut crowds: Vec<Crowd> = crowds
        .iter()
        .map(|(name, waiting, keys)| Crowd::gather(name, *waiting, *keys))
        .collect();
    let start = Instant::now();
    for after in [0, 3, rounds(15, 3)] {
        sleep_until(start + Duration::from_secs(after as u64));
        crowds.iter_mut().for_each(Crowd::weigh);
    }
    report.table(
        "Bytes for one of 1,000 clients that wait, its connection included",
        &[
            "",
            "counted at once",
            "after 3 s",
            "after 15 s",
            "resident at once",
            "after 3 s",
            "after 15 s",
        ],
        crowds.iter().map(Crowd::row).collect(),
    );
}

/// Clients that wait on a server of their own.
struct Crowd {
    name: &'static str,
    before: (f64, f64),
    /// Counted and resident bytes for each, every time that was looked.
    weights: Vec<(f64, f64)>,
    meter: Meter,
    _connections: Vec<RawConnection>,
    _server: Server,
}

impl Crowd {
    fn gather(name: &'static str, waiting: Waiting, keys: usize) -> Crowd {
        let server = pin::started_on(pin::SERVER, Server::start);
        if waiting == Waiting::InQueue {
            occupy(&server, keys);
        }
        let mut meter = Meter::of(&server);
        let before = memory(&mut meter);
        let connections = (0..WAITERS)
            .map(|number| {
                let mut connection = RawConnection::to(&server);
                connection.send(&waiting.command(number, keys));
                connection
            })
            .collect();
        eventually("all wait", || {
            meter.number("clients", "blocked_clients") == WAITERS as f64
        });
        Crowd {
            name,
            before,
            weights: vec![],
            meter,
            _connections: connections,
            _server: server,
        }
    }

    fn weigh(&mut self) {
        let (counted, resident) = memory(&mut self.meter);
        let each = |now: f64, before: f64| (now - before) / WAITERS as f64;
        self.weights
            .push((each(counted, self.before.0), each(resident, self.before.1)));
    }

    fn row(&self) -> Vec<Cell> {
        let counted = self.weights.iter().map(|(counted, _)| (*counted).into());
        let resident = self.weights.iter().map(|(_, resident)| (*resident).into());
        let name = Cell::from(self.name);
        std::iter::once(name)
            .chain(counted)
            .chain(resident)
            .collect()
    }
}
