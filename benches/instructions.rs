//! Has a command become dearer? `make bench-check` counts instructions, which no load changes.
//!
//! redis-server with the module runs under valgrind's callgrind and carries out a fixed sequence of
//! commands, twice: once a few times and once many times. The difference, divided by the number of
//! operations, is what one operation costs the whole server, its reading and replying included. What
//! it is compared with is in `benches/instructions.json`, by server version: another build of the
//! server, or another compiler, counts a little differently. `make bench-check UPDATE=1` writes what
//! was counted there; commit it with the change that explains it.
//!
//! PING and SET + DEL are counted as well. They do not run our code: if they differ, the server is
//! another one, and nothing can be said about ours.

use std::fs;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;

use serde_json::{Map, Value, json};
use testkit::connection::{RawConnection, pack};

/// Counts differ by less from run to run: the server's own clockwork is in them.
const TOLERANCE: f64 = 0.03;

/// Nor is a difference of so many instructions one: the clockwork weighs more in short commands.
const NOTHING: f64 = 250.0;

/// The hand-overs also look at their contended key every 10 ms of a time that valgrind stretches.
const TOLERANCE_OF_TIMERS: f64 = 0.06;

const FEW: usize = 200;
const MANY: usize = 3_200;

/// How many operations go out in one write.
const AT_A_TIME: usize = 16;

const OWNER: &str = "5f0c9c5e-6f0e-4a57-9d0c-2f1f4a3f9b11";
const TTL: &str = "3600000";

/// What is counted: a name, and what is sent.
struct Sequence {
    name: &'static str,
    tolerance: f64,
    /// Sent once before.
    prepare: &'static [&'static [&'static str]],
    operation: Operation,
}

enum Operation {
    /// Commands with a reply of one line each.
    Commands(&'static [&'static [&'static str]]),
    /// The holder releases, the next of so many is granted, the holder queues again.
    Handover(usize),
}

const ACQUIRE: &[&str] = &["LOCK.ACQUIRE", "lock", OWNER, TTL];
const RELEASE: &[&str] = &["LOCK.RELEASE", "lock", OWNER];
const RENEW: &[&str] = &["LOCK.RENEW", "lock", OWNER, TTL];
const PEXPIRE: &[&str] = &["PEXPIRE", "plain", TTL];
const SET: &[&str] = &["SET", "plain", OWNER, "NX", "PX", TTL];
const DEL: &[&str] = &["DEL", "plain"];

/// One of ten places.
const fn a_place(owner: &str) -> [&str; 6] {
    ["LOCK.ACQUIRE", "lock", owner, TTL, "LIMIT", "10"]
}

const BY_NINE: &[&[&str]] = &[
    &a_place("1"),
    &a_place("2"),
    &a_place("3"),
    &a_place("4"),
    &a_place("5"),
    &a_place("6"),
    &a_place("7"),
    &a_place("8"),
    &a_place("9"),
];

const TENTH: &[&[&str]] = &[&a_place(OWNER), RENEW, RELEASE];

const FLOORS: [&str; 2] = ["PING", "SET NX + DEL"];

fn sequences() -> Vec<Sequence> {
    let commands = |name, prepare, commands| Sequence {
        name,
        tolerance: TOLERANCE,
        prepare,
        operation: Operation::Commands(commands),
    };
    let handover = |name, waiting| Sequence {
        name,
        tolerance: TOLERANCE_OF_TIMERS,
        prepare: &[],
        operation: Operation::Handover(waiting),
    };
    let another = &["LOCK.ACQUIRE", "lock", "another-one-of-another-length", TTL][..];
    let by_another: &[&[&str]] = Box::leak(Box::new([another]));
    vec![
        commands(FLOORS[0], &[], &[&["PING"]]),
        commands(FLOORS[1], &[], &[SET, DEL]),
        commands("PEXPIRE", &[SET], &[PEXPIRE]),
        commands("ACQUIRE + RELEASE", &[], &[ACQUIRE, RELEASE]),
        commands("RENEW", &[ACQUIRE], &[RENEW]),
        commands("ACQUIRE, held already", &[ACQUIRE], &[ACQUIRE]),
        commands("ACQUIRE, refused", by_another, &[ACQUIRE]),
        commands("RELEASE, nobody holds it", &[], &[RELEASE]),
        commands("ACQUIRE + RENEW + RELEASE, tenth of ten", BY_NINE, TENTH),
        handover("hand-over, 1 waiting", 1),
        handover("hand-over, 900 waiting", 900),
    ]
}

fn main() -> ExitCode {
    let update = std::env::var_os("UPDATE").is_some_and(|update| !update.is_empty());
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("instructions.json");
    let mut known: Map<String, Value> = fs::read(&file)
        .map(|bytes| serde_json::from_slice(&bytes).expect("benches/instructions.json is JSON"))
        .unwrap_or_default();
    let server = server_version();
    let mut counted = Map::new();
    let mut verdict = Verdict::Same;
    println!("{server}: instructions for one operation\n");
    for sequence in sequences() {
        let few = count(&sequence, FEW);
        let many = count(&sequence, MANY);
        let each = (many - few) / (MANY - FEW) as f64;
        let before = known
            .get(&server)
            .and_then(|known| known[sequence.name].as_f64());
        let change = before.map_or(0.0, |before| each / before - 1.0);
        let said = match before {
            None => "not known yet".to_owned(),
            Some(before) => format!("{before:8.0} before, {:+.1} %", 100.0 * change),
        };
        println!("{:<40} {each:8.0}   {said}", sequence.name);
        verdict = verdict.and(match before {
            None => Verdict::Unknown,
            Some(before) if is_same(each, before, sequence.tolerance) => Verdict::Same,
            Some(_) if FLOORS.contains(&sequence.name) => Verdict::OtherServer,
            Some(_) if change < 0.0 => Verdict::Better,
            Some(_) => Verdict::Worse,
        });
        counted.insert(sequence.name.to_owned(), json!(each.round()));
    }
    if update {
        known.insert(server, Value::Object(counted));
        fs::write(&file, serde_json::to_string_pretty(&known).unwrap() + "\n").unwrap();
        println!("\nWritten to benches/instructions.json.");
        return ExitCode::SUCCESS;
    }
    println!("\n{}", verdict.says());
    ExitCode::from(u8::from(verdict > Verdict::Better))
}

fn is_same(each: f64, before: f64, tolerance: f64) -> bool {
    (each - before).abs() <= f64::max(NOTHING, tolerance * before)
}

/// From good to bad: the worst counts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Verdict {
    Same,
    Better,
    Worse,
    Unknown,
    OtherServer,
}

impl Verdict {
    fn and(self, other: Verdict) -> Verdict {
        self.max(other)
    }

    fn says(self) -> &'static str {
        match self {
            Verdict::Same => "As before.",
            Verdict::Better => "Cheaper than before: keep it with `make bench-check UPDATE=1`.",
            Verdict::Worse => {
                "DEARER than before. If that is the price of something, say so and keep it with \
                 `make bench-check UPDATE=1`."
            }
            Verdict::Unknown => {
                "There are no figures to compare all of this with: write them from a good state \
                 with `make bench-check UPDATE=1`."
            }
            Verdict::OtherServer => {
                "Commands that are not ours differ: this is another server. Write figures for it \
                 from a good state with `make bench-check UPDATE=1`."
            }
        }
    }
}

/// The server's binary, as for the tests.
fn binary() -> PathBuf {
    let binary = std::env::var_os("LOCKKEEPER_TEST_SERVER");
    binary.unwrap_or("redis-server".into()).into()
}

fn server_version() -> String {
    let output = Command::new(binary()).arg("--version").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut words = said.split_whitespace();
    let name = words.next().unwrap_or("?").to_lowercase();
    let version = words
        .find_map(|word| word.strip_prefix("v="))
        .unwrap_or("?");
    format!("{name} {version}")
}

/// Instructions of a whole life of a server that does this so many times.
fn count(sequence: &Sequence, times: usize) -> f64 {
    let dir = tempfile::tempdir().unwrap();
    let profile = dir.path().join("profile");
    let (mut server, port) = start(dir.path(), &profile);
    let mut connection = RawConnection::to_port(port);
    for command in sequence.prepare {
        connection.ask(&pack(command));
    }
    match sequence.operation {
        Operation::Commands(commands) => {
            let packed: Vec<u8> = commands.iter().flat_map(|words| pack(words)).collect();
            let packed = packed.repeat(AT_A_TIME);
            for _ in 0..times.div_ceil(AT_A_TIME) {
                connection.send(&packed);
                connection.receive(AT_A_TIME * commands.len());
            }
        }
        Operation::Handover(waiting) => hand_over(port, waiting, times),
    }
    connection.send(&pack(&["SHUTDOWN", "NOSAVE"]));
    assert!(server.wait().unwrap().success(), "the server ended badly");
    let profile = fs::read_to_string(profile).unwrap();
    let total = profile
        .lines()
        .find_map(|line| line.strip_prefix("totals: "));
    total.expect("callgrind tells a total").parse().unwrap()
}

fn hand_over(port: u16, waiting: usize, times: usize) {
    let owner = |client: usize| format!("{OWNER}:{client:04}");
    let mut connections: Vec<RawConnection> = (0..=waiting)
        .map(|_| RawConnection::to_port(port))
        .collect();
    let acquire = |client: usize| pack(&["LOCK.ACQUIRE", "lock", &owner(client), TTL, "WAIT", TTL]);
    let mut bystander = RawConnection::to_port(port);
    bystander.let_many_wait();
    for (client, connection) in connections.iter_mut().enumerate() {
        connection.send(&acquire(client));
        bystander.ask(&pack(&["PING"]));
    }
    assert!(connections[0].number().is_some(), "it was free");
    for turn in 0..times {
        let (holder, next) = (turn % connections.len(), (turn + 1) % connections.len());
        connections[holder].send(&pack(&["LOCK.RELEASE", "lock", &owner(holder)]));
        assert!(
            connections[next].number().is_some(),
            "it is this one's turn"
        );
        assert_eq!(connections[holder].number(), Some(1));
        connections[holder].send(&acquire(holder));
        // So that the old holder is in the queue before the next release.
        bystander.ask(&pack(&["PING"]));
    }
}

fn start(dir: &Path, profile: &Path) -> (Child, u16) {
    let port = testkit::free_port();
    let server = Command::new("valgrind")
        .args(["--quiet", "--tool=callgrind"])
        .arg(format!("--callgrind-out-file={}", profile.display()))
        .arg(binary())
        .args(["--bind", "127.0.0.1", "--port", &port.to_string()])
        .args(["--save", "", "--hz", "1", "--dynamic-hz", "no"])
        .arg("--dir")
        .arg(dir)
        .arg("--loadmodule")
        .arg(testkit::module())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .expect("valgrind is there: `make bench-check` installs it");
    testkit::eventually("the server answers under valgrind", || {
        std::thread::sleep(Duration::from_millis(50));
        TcpStream::connect(("127.0.0.1", port)).is_ok()
    });
    (server, port)
}
