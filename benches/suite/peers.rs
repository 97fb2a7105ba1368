//! Libraries in other languages, each run by a small program in `benches/peers`.
//!
//! Such a program gets the server's URL and the plan, and prints what its clients did as JSON:
//! `[{"turns": [[asked, granted, releasing], …], "waiting_since": null}, …]` in seconds since the
//! start. `make bench` installs what the two in Python need; `PEERS='redlock redsync'` adds node-redlock,
//! which needs node and npm, and redsync, which needs Go. Not here: Redisson, since Maven Central could
//! not be reached from where this was written; a program like the others and a line in `peers` is all it
//! needs.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::contention::{Entry, Log, Plan, Turn};
use crate::report::Report;
use testkit::Server;

/// Where the Makefile installs what peers need.
fn installed(file: &str) -> PathBuf {
    testkit::target().join("bench").join(file)
}

fn program(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("peers")
        .join(file)
}

/// A program that runs one library: its words before the plan.
struct Peer {
    name: &'static str,
    words: Vec<PathBuf>,
    /// The variant of the library.
    variant: &'static str,
}

fn peers(report: &mut Report) -> Vec<Peer> {
    let mut peers = vec![];
    if has_python() {
        let words = vec![installed("python/bin/python"), program("python_locks.py")];
        for (name, variant) in [
            ("redis-py Lock, defaults (100 ms)", "redis-py"),
            ("redis-py Lock, sleep=0.005", "redis-py-5ms"),
            ("python-redis-lock, expire=30", "python-redis-lock"),
        ] {
            let words = words.clone();
            peers.push(Peer {
                name,
                words,
                variant,
            });
        }
    } else {
        report.note("Without the Python libraries: `make bench` installs them.");
    }
    if wanted("redlock") {
        for (name, variant) in [
            ("node-redlock, defaults (10 × 200 ms)", "default"),
            ("node-redlock, retries of 10 ms", "10ms"),
        ] {
            let words = vec!["node".into(), program("redlock.cjs")];
            peers.push(Peer {
                name,
                words,
                variant,
            });
        }
    }
    if wanted("redsync") {
        for (name, variant) in [
            ("redsync, defaults (32 × 50–250 ms)", "default"),
            ("redsync, retries of 10 ms", "10ms"),
        ] {
            let words = vec![installed("redsync")];
            peers.push(Peer {
                name,
                words,
                variant,
            });
        }
    }
    peers
}

fn wanted(peer: &str) -> bool {
    let peers = std::env::var("PEERS").unwrap_or_default();
    peers.split_whitespace().any(|wanted| wanted == peer)
}

pub fn entries(report: &mut Report) -> Vec<Entry> {
    let entry = |peer: Peer| Entry::new(peer.name, move |server, plan| run(&peer, server, plan));
    peers(report).into_iter().map(entry).collect()
}

fn run(peer: &Peer, server: &Server, plan: Plan) -> Vec<Log> {
    let output = start(&peer.words)
        .arg(peer.variant)
        .arg(server.url())
        .arg(plan.clients.to_string())
        .arg(plan.hold.as_secs_f64().to_string())
        .arg(plan.pause.as_secs_f64().to_string())
        .arg(plan.length.as_secs_f64().to_string())
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    assert!(output.status.success(), "{} failed", peer.name);
    let clients: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    clients.iter().map(log).collect()
}

fn start(words: &[impl AsRef<OsStr>]) -> Command {
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).stdin(Stdio::null());
    // For node, which else looks beside the program.
    command.env("NODE_PATH", installed("redlock/node_modules"));
    command
}

fn log(client: &Value) -> Log {
    let turns = client["turns"].as_array().expect("an array of turns");
    let turn = |turn: &Value| {
        let time = |place: usize| turn[place].as_f64().expect("a number of seconds");
        Turn {
            asked: time(0),
            granted: time(1),
            releasing: time(2),
        }
    };
    Log {
        turns: turns.iter().map(turn).collect(),
        waiting_since: client["waiting_since"].as_f64(),
    }
}

pub fn has_python() -> bool {
    installed("python/bin/python").exists()
}

/// What `python_locks.py` prints for this variant and these words.
pub fn python(server: &Server, variant: &str, words: &[&str]) -> Value {
    let output = start(&[installed("python/bin/python"), program("python_locks.py")])
        .args([variant, &server.url()])
        .args(words)
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    assert!(output.status.success(), "{variant} failed");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Python's processes that take turns.
pub fn python_processes(server: &Server, variant: &str, plan: Plan) -> Vec<Log> {
    let seconds = |time: Duration| time.as_secs_f64().to_string();
    let words = [
        &plan.clients.to_string(),
        &seconds(plan.hold),
        &seconds(plan.pause),
        &seconds(plan.length),
        "processes",
    ];
    let logs = python(server, variant, &words);
    let logs = logs.as_array().expect("one for each client");
    logs.iter().map(log).collect()
}
