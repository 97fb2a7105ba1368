//! A lock with several holders: how soon is a place filled again, does everybody get a turn, what does a dead
//! holder leave behind, and what do many holders cost the server?

use std::time::Duration;

use redis::{Connection, ConnectionLike};

use crate::contention::Plan;
use crate::language::{self, CALLS, HANDOVER, JAIN, LONGEST, TURNS};
use crate::measure::{Contender, Figures, Meter, Rounds, Series};
use crate::peers::Program;
use crate::report::{Cell, Report, Target};
use crate::sequence::{COMMANDS, CPU, KEYS, OWNER, Sequence, TTL, WALL, key, words};
use crate::{pin, rounds};
use testkit::connection::{RawConnection, pack};
use testkit::{Server, eventually};

/// How many each semaphore of the peers lets in.
const PLACES: usize = 4;
const CLIENTS: usize = 32;

const RAW: &str = "LOCK.ACQUIRE … WAIT … LIMIT 4";
const HELPER: &str = "lockkeeper helper, Python";
const TOKENS: &str = "list of tokens, BLPOP";

/// Name, program and variant.
type Entry = (&'static str, Program, &'static str);

fn entries(report: &mut Report) -> Vec<Entry> {
    let mut entries = vec![];
    let mut add = |program: Program, variants: &[(&'static str, &'static str)]| {
        if program.is_here() {
            let of = |(name, variant): &(_, _)| (*name, program.clone(), *variant);
            entries.extend(variants.iter().map(of));
        }
    };
    let in_python = [
        (RAW, "place-by-commands"),
        (HELPER, "place-of-helper"),
        ("sorted set in Lua, every 100 ms", "place-in-sorted-set"),
        ("sorted set in Lua, every 10 ms", "place-in-sorted-set-10ms"),
        (TOKENS, "place-by-token"),
    ];
    add(Program::python(), &in_python);
    let Some(node) = Program::redis_semaphore() else {
        report.note("Without redis-semaphore for Node: `make bench PEERS=redis-semaphore`.");
        return entries;
    };
    add(node, &[("redis-semaphore, every 10 ms", "default")]);
    entries
}

pub fn ask(report: &mut Report) {
    let entries = entries(report);
    if entries.is_empty() {
        report.note("Without the Python libraries: `make bench` installs them.");
    } else {
        turns(report, &entries);
        killed(report, &entries);
    }
    ten_holders(report);
    thousand_holders(report);
}

fn turns(report: &mut Report, entries: &[Entry]) {
    report.note(
        "32 clients, threads or tasks of one process with a connection each, and a semaphore of 4; each holds its place for \
         5 ms and asks again at once. *hand-over*: from a release to the grant that fills the place. *longest wait* is \
         divided by what it is where all are served in turn. Not here: portalocker, whose bounded semaphores \
         are files of one machine, and whose lock on Redis is for one writer or any readers.",
    );
    let plan = Plan {
        clients: CLIENTS,
        hold: Duration::from_millis(5),
        pause: Duration::ZERO,
        length: Duration::from_secs(rounds(4, 1) as u64),
    };
    let contender = |(name, program, variant): &Entry| {
        let (program, variant) = (program.clone(), *variant);
        Contender::new(*name, move || -> Figures {
            let server = pin::started_on(pin::SERVER, Server::start);
            let mut meter = Meter::of(&server);
            let logs = program.logs(&server, variant, plan);
            language::judge(plan, PLACES, &logs, meter.calls() as f64)
        })
    };
    let contenders = entries.iter().map(contender).collect();
    let all = Rounds::interleave(rounds(5, 1), contenders);
    let figures = [TURNS, HANDOVER, LONGEST, JAIN, CALLS];
    report.rounds("A semaphore of 4, 32 clients", &all, &figures, &[]);
    for ours in [RAW, HELPER] {
        // The server's own queue: what it takes longer than in turn is the machine's.
        report.target(
            format!("{ours} ÷ {TOKENS}, {LONGEST}"),
            all.ratio(LONGEST, ours, TOKENS),
            Target::AtMost(1.3),
        );
        for (figure, target) in [
            (JAIN, Target::AtLeast(0.99)),
            // Those of a new connection, for each client, are in it.
            (CALLS, Target::AtMost(3.1)),
        ] {
            let value = all.of(ours, figure).clone();
            report.target(format!("{ours}, {figure}"), value, target);
        }
    }
}

/// The ttl of who is killed, and how long is waited for its places, in seconds.
const SHORT: [&str; 2] = ["1", "3"];

fn killed(report: &mut Report, entries: &[Entry]) {
    report.note(
        "One process holds all 4 places with a ttl of 1 s and is killed by SIGKILL; four clients ask for \
         them. How many have one 3 s later, and when had the last of them?",
    );
    let mut rows: Vec<Vec<Cell>> = vec![];
    for (name, program, variant) in entries {
        let server = pin::started_on(pin::SERVER, Server::start);
        let left = program.run(&server, variant, &["killed", SHORT[0], SHORT[1]]);
        let free = left["free"].as_f64().expect("a number of places");
        let last = left["last"].as_f64();
        let last = last.map_or(Cell::from("never"), Cell::from);
        rows.push(vec![(*name).into(), free.into(), last]);
        if [RAW, HELPER].contains(name) {
            let what = format!("places free after a kill -9 of all 4 holders, {name}");
            report.target(what, free, Target::AtLeast(PLACES as f64));
        }
    }
    let header = ["", "places free of 4", "s until the last"];
    report.table("Holders killed by SIGKILL", &header, rows);
}

const COUNTED: &[&str] = &["lock.acquire", "lock.renew", "lock.release"];
const ALONE: &str = "exclusive";
const TENTH: &str = "the tenth of LIMIT 10";

fn ten_holders(report: &mut Report) {
    report.note("Acquire, renew and release, alone and as the tenth holder; server and client on *one core*.");
    let section = |name, limit: &'static [&'static str]| {
        Sequence::new(name, COUNTED, move |key| {
            let mut acquire = words!["LOCK.ACQUIRE", key, OWNER, TTL];
            acquire.extend(limit.iter().copied().map(String::from));
            let renew = words!["LOCK.RENEW", key, OWNER, TTL];
            vec![acquire, renew, words!["LOCK.RELEASE", key, OWNER]]
        })
    };
    let server = || pin::started_on(pin::CLIENT, Server::start);
    let (alone, shared) = (server(), server());
    let mut connection = RawConnection::to(&shared);
    for number in 0..KEYS {
        for holder in 0..9 {
            let owner = format!("{OWNER}:{holder}");
            let words = ["LOCK.ACQUIRE", &key(number), &owner, LONG, "LIMIT", "10"];
            connection.ask(&pack(&words));
        }
    }
    let operations = rounds(2_000, 300);
    let all = Rounds::interleave(
        rounds(11, 3),
        vec![
            section(ALONE, &[]).contender(&alone, 1, operations),
            section(TENTH, &["LIMIT", "10"]).contender(&shared, 1, operations),
        ],
    );
    let figures = [COMMANDS, CPU, WALL];
    report.rounds("One section among ten holders", &all, &figures, &[ALONE]);
    report.target(
        format!("{TENTH} ÷ {ALONE}, {COMMANDS}"),
        all.ratio(COMMANDS, TENTH, ALONE),
        Target::AtMost(1.5),
    );
}

/// An hour, in ms.
const LONG: &str = "3600000";
const MANY: usize = 1_000;

/// What each command takes where a thousand hold a lock and a thousand wait for it.
fn thousand_holders(report: &mut Report) {
    report.note(
        "1,000 hold one lock, SHARED, and 1,000 wait for it. *µs* is what commandstats says of each call.",
    );
    let server = pin::started_on(pin::SERVER, Server::start);
    let mut meter = Meter::of(&server);
    let mut connection = RawConnection::to(&server);
    connection.let_many_wait();
    let mut asker = server.connect();
    let holder = |number: usize| format!("{OWNER}:{number}");
    let read = |owner: &str| pack(&["LOCK.ACQUIRE", "lock", owner, LONG, "SHARED"]);
    let mut rows: Vec<Vec<Cell>> = vec![];
    let mut slowest = 0.0;
    let mut add = |name: &str, taken: Series| {
        let (p50, p99) = (taken.median(), taken.quantile(0.99));
        slowest = f64::max(slowest, p50);
        rows.push(vec![
            name.into(),
            p50.into(),
            p99.into(),
            taken.max().into(),
        ]);
    };
    // The last hundred, beside all others.
    for number in 0..MANY - 100 {
        connection.ask(&read(&holder(number)));
    }
    let grants = (MANY - 100..MANY).map(|number| read(&holder(number)));
    add(
        "ACQUIRE, granted beside 900 to 999",
        each(&mut meter, &mut asker, "lock.acquire", grants),
    );
    let mut waiting = wait(&server, &mut meter, &[]);
    let times = rounds(300, 50);
    let renew = |number: usize| pack(&["LOCK.RENEW", "lock", &holder(number), LONG]);
    add(
        "RENEW",
        each(&mut meter, &mut asker, "lock.renew", (0..times).map(renew)),
    );
    let refused = (0..times).map(|_| read("late"));
    add(
        "ACQUIRE, refused",
        each(&mut meter, &mut asker, "lock.acquire", refused),
    );
    let info = (0..times).map(|_| pack(&["LOCK.INFO", "lock"]));
    add("INFO", each(&mut meter, &mut asker, "lock.info", info));
    let release = |number: usize| pack(&["LOCK.RELEASE", "lock", &holder(number)]);
    let releases = (0..times).map(release);
    add(
        "RELEASE, of one of many",
        each(&mut meter, &mut asker, "lock.release", releases),
    );
    waiting.clear();

    let mut taken = Series::default();
    for _ in 0..rounds(7, 2) {
        connection.ask(&pack(&["DEL", "lock"]));
        connection.ask(&pack(&["LOCK.ACQUIRE", "lock", "writer", LONG]));
        let mut readers = wait(&server, &mut meter, &["SHARED"]);
        let release = pack(&["LOCK.RELEASE", "lock", "writer"]);
        taken
            .0
            .append(&mut each(&mut meter, &mut asker, "lock.release", [release]).0);
        for reader in &mut readers {
            assert!(reader.number().is_some(), "all readers are let in");
        }
    }
    add("RELEASE of a writer, 1,000 readers wait", taken);
    let header = ["", "µs p50", "p99", "max"];
    report.table("1,000 holders and 1,000 who wait", &header, rows);
    // The longest of all is as long as the machine lets the server wait for a core.
    report.target(
        "median of the slowest command at 1,000 holders and 1,000 who wait, ms",
        slowest / 1e3,
        Target::AtMost(1.0),
    );
}

/// A thousand who wait for the lock.
fn wait(server: &Server, meter: &mut Meter, limit: &[&str]) -> Vec<RawConnection> {
    eventually("nobody waits", || {
        meter.number("clients", "blocked_clients") == 0.0
    });
    let client = |number: usize| {
        let owner = format!("waiter:{number}");
        let words = ["LOCK.ACQUIRE", "lock", &owner, LONG, "WAIT", LONG];
        let mut connection = RawConnection::to(server);
        connection.send(&pack(&[&words, limit].concat()));
        connection
    };
    let waiting = (0..MANY).map(client).collect();
    eventually("all wait", || {
        meter.number("clients", "blocked_clients") == MANY as f64
    });
    waiting
}

/// What the server takes for each of these, in µs.
fn each(
    meter: &mut Meter,
    asker: &mut Connection,
    command: &'static str,
    requests: impl IntoIterator<Item = Vec<u8>>,
) -> Series {
    let mut taken = Series::default();
    for request in requests {
        meter.reset_commands();
        asker.req_packed_command(&request).unwrap();
        taken.0.push(meter.command_us(&[command]));
    }
    taken
}
