//! The holder has died: how long after the end of its lease is the next one granted?

use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::measure::Series;
use crate::report::{Report, Target};
use crate::sequence::OWNER;
use crate::{pin, rounds};
use testkit::Server;
use testkit::connection::{RawConnection, pack};

/// So many locks end in each round, a few milliseconds apart.
const LOCKS: u64 = 16;

/// Returns when the lock of this name is granted.
type Way = fn(RawConnection, &str);

pub fn ask(report: &mut Report) {
    report.note(
        "A lock of 100 to 205 ms is left alone, and one client waits for it, on two cores. The time from \
         the end that the server tells (PEXPIRETIME) to the client's grant counts.",
    );
    let server = pin::started_on(pin::SERVER, Server::start);
    let ways: [(&str, Way); 3] = [
        ("LOCK.ACQUIRE … WAIT", wait),
        ("SET NX every 1 ms", |connection, key| {
            poll(connection, key, 1)
        }),
        ("SET NX every 100 ms", |connection, key| {
            poll(connection, key, 100)
        }),
    ];
    let mut late: Vec<Series> = vec![Series::default(); ways.len()];
    for _ in 0..rounds(14, 3) {
        for ((_, way), late) in ways.iter().zip(&mut late) {
            let threads: Vec<_> = (0..LOCKS)
                .map(|number| {
                    let (connection, way, url) = (RawConnection::to(&server), *way, server.port());
                    thread::spawn(move || one(RawConnection::to_port(url), connection, number, way))
                })
                .collect();
            late.0
                .extend(threads.into_iter().map(|thread| thread.join().unwrap()));
        }
    }
    let row = |((name, _), late): (&(&str, _), &Series)| {
        vec![
            (*name).into(),
            late.median().into(),
            late.quantile(0.99).into(),
            late.max().into(),
        ]
    };
    let rows = ways.iter().zip(&late).map(row).collect();
    report.table(
        "From the end of a dead holder's lease to the next grant",
        &["", "ms p50", "p99", "max"],
        rows,
    );
    let ours = &late[0];
    report.target(
        "expiry hand-over ms, p50",
        ours.median(),
        Target::AtMost(2.0),
    );
    report.target(
        "expiry hand-over ms, p99",
        ours.quantile(0.99),
        Target::AtMost(8.0),
    );
}

/// How late one grant is, in ms.
fn one(mut holder: RawConnection, waiter: RawConnection, number: u64, way: Way) -> f64 {
    let key = format!("ends:{number}");
    let ttl = (100 + 7 * number).to_string();
    let end = loop {
        holder.send(&pack(&["LOCK.ACQUIRE", &key, "dead", &ttl]));
        assert!(holder.number().is_some(), "{key} is free");
        holder.send(&pack(&["PEXPIRETIME", &key]));
        // Negative if it has ended already, on a machine that is too busy.
        match holder.number().expect("a number in any case") {
            end @ 1.. => break end,
            _ => continue,
        }
    };
    way(waiter, &key);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    holder.ask(&pack(&["DEL", &key]));
    1e3 * now.as_secs_f64() - end as f64
}

fn wait(mut connection: RawConnection, key: &str) {
    connection.send(&pack(&[
        "LOCK.ACQUIRE",
        key,
        OWNER,
        "30000",
        "WAIT",
        "30000",
    ]));
    assert!(connection.number().is_some(), "it was granted");
}

fn poll(mut connection: RawConnection, key: &str, every_ms: u64) {
    let take = pack(&["SET", key, OWNER, "NX", "PX", "30000"]);
    while connection.ask(&take) != b"+OK\r\n" {
        thread::sleep(Duration::from_millis(every_ms));
    }
}
