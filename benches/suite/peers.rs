//! Libraries in other languages, each run by a small program in `benches/peers`.
//!
//! Such a program gets the server's URL and the plan, and prints what its clients did as JSON:
//! `[{"turns": [[asked, granted, releasing], …], "waiting_since": null}, …]` in seconds since the
//! start. `make bench` installs what those in Python need; `PEERS='redlock redis-semaphore redislock redsync'` adds
//! node-redlock and redis-semaphore, which need node and npm, and bsm/redislock and redsync, which need Go. Not here: Redisson, since Maven Central
//! could not be reached from where this was written; a program like the others and a line in `peers` is all it needs.

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

/// A program that runs libraries of one language: its words before the variant, and after the plan.
#[derive(Clone)]
pub struct Program {
    words: Vec<PathBuf>,
    after: Option<&'static str>,
    /// Where Node finds its libraries; else it looks beside the program.
    modules: &'static str,
}

impl Program {
    fn of(words: impl Into<Vec<PathBuf>>) -> Program {
        Program {
            words: words.into(),
            after: None,
            modules: "redlock",
        }
    }

    pub fn python() -> Program {
        Program::of([installed("python/bin/python"), program("python_locks.py")])
    }

    pub fn python_processes() -> Program {
        Program {
            after: Some("processes"),
            ..Program::python()
        }
    }

    /// If it is among the peers.
    pub fn redis_semaphore() -> Option<Program> {
        let program = || Program {
            modules: "redis-semaphore",
            ..Program::of(["node".into(), program("semaphore.cjs")])
        };
        wanted("redis-semaphore").then(program)
    }

    /// If one of its libraries is among the peers.
    pub fn go() -> Option<Program> {
        let wanted = wanted("redislock") || wanted("redsync");
        wanted.then(|| Program::of([installed("go_locks")]))
    }

    /// Whether it was installed; Node, by the user.
    pub fn is_here(&self) -> bool {
        self.words[0].is_relative() || self.words[0].exists()
    }

    /// What it prints for this variant and these words.
    pub fn run(&self, server: &Server, variant: &str, words: &[&str]) -> Value {
        let output = Command::new(&self.words[0])
            .args(&self.words[1..])
            .args([variant, &server.url()])
            .args(words)
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .env("NODE_PATH", installed(self.modules).join("node_modules"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{variant} failed");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// What its clients did.
    pub fn logs(&self, server: &Server, variant: &str, plan: Plan) -> Vec<Log> {
        let seconds = |time: Duration| time.as_secs_f64().to_string();
        let plan = [
            plan.clients.to_string(),
            seconds(plan.hold),
            seconds(plan.pause),
            seconds(plan.length),
        ];
        let words: Vec<&str> = plan.iter().map(String::as_str).chain(self.after).collect();
        let logs = self.run(server, variant, &words);
        let logs = logs.as_array().expect("one for each client");
        logs.iter().map(log).collect()
    }
}

/// A library that takes part among the others, and its variant in its program.
type Peer = (&'static str, Program, &'static str);

fn peers(report: &mut Report) -> Vec<Peer> {
    let mut peers: Vec<Peer> = vec![];
    let mut add = |program: Program, variants: &[(&'static str, &'static str)]| {
        for (name, variant) in variants {
            peers.push((name, program.clone(), variant));
        }
    };
    if Program::python().is_here() {
        add(
            Program::python(),
            &[
                ("redis-py Lock, defaults (100 ms)", "redis-py"),
                ("redis-py Lock, sleep=0.005", "redis-py-5ms"),
                ("python-redis-lock, expire=30", "python-redis-lock"),
            ],
        );
    } else {
        report.note("Without the Python libraries: `make bench` installs them.");
    }
    if wanted("redlock") {
        add(
            Program::of(["node".into(), program("redlock.cjs")]),
            &[
                ("node-redlock, defaults (10 × 200 ms)", "default"),
                ("node-redlock, retries of 10 ms", "10ms"),
            ],
        );
    }
    if let Some(go) = Program::go() {
        if wanted("redislock") {
            add(
                go.clone(),
                &[
                    ("bsm/redislock, every 100 ms", "redislock"),
                    ("bsm/redislock, every 10 ms", "redislock-10ms"),
                ],
            );
        }
        if wanted("redsync") {
            add(
                go,
                &[
                    ("redsync, defaults (32 × 50–250 ms)", "redsync"),
                    ("redsync, retries of 10 ms", "redsync-10ms"),
                ],
            );
        }
    }
    peers
}

fn wanted(peer: &str) -> bool {
    let peers = std::env::var("PEERS").unwrap_or_default();
    peers.split_whitespace().any(|wanted| wanted == peer)
}

pub fn entries(report: &mut Report) -> Vec<Entry> {
    let entry = |(name, program, variant): Peer| {
        Entry::new(name, move |server, plan| {
            program.logs(server, variant, plan)
        })
    };
    peers(report).into_iter().map(entry).collect()
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
