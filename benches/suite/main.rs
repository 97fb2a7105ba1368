//! How fast Lockkeeper is, against what people use today: `make bench`.
//!
//! One file per question, named for it. Every figure is measured next to its rivals and to bare PING
//! and SET in the same run, in short rounds that take turns, and given as a ratio: the machine, its
//! load and its clock are then in both halves. A cell shows the median of all rounds and, in
//! brackets, the middle half of them.
//!
//! `make bench ONLY='uncontended renew'` asks only some questions, `QUICK=1` with a few short rounds: good
//! for seeing that all works, not for claims. The tables go to the terminal, and with all rounds to
//! `target/bench/bench.json`; plots are beside it.
//!
//! # Cores
//! The clients run on the first core that this process may use, and servers on the last, unless a
//! table says *one core*: then both are on the first, and no sleeping core has to be woken for a
//! round trip. Peers and helpers are pinned as the clients are.

mod contention;
mod crowd;
mod expiry;
mod go;
mod handover;
mod helper;
mod idle_waiter;
mod language;
mod lateness;
mod measure;
mod memory;
mod other_clients;
mod peers;
mod pin;
mod plot;
mod python;
mod renew;
mod report;
mod semaphore;
mod sequence;
mod uncontended;
mod watchdog;

use report::Report;

type Question = (&'static str, fn(&mut Report));

const QUESTIONS: &[Question] = &[
    ("uncontended", uncontended::ask),
    ("renew", renew::ask),
    ("handover", handover::ask),
    ("contention", contention::ask),
    ("semaphore", semaphore::ask),
    ("expiry", expiry::ask),
    ("lateness", lateness::ask),
    ("crowd", crowd::ask),
    ("idle_waiter", idle_waiter::ask),
    ("other_clients", other_clients::ask),
    ("memory", memory::ask),
    ("helper", helper::ask),
    ("python", python::ask),
    ("go", go::ask),
    ("watchdog", watchdog::ask),
];

/// Few and short rounds: to see that everything works.
fn quick() -> bool {
    std::env::var_os("QUICK").is_some_and(|quick| !quick.is_empty() && quick != "0")
}

/// How many rounds, or how much of anything, is enough.
fn rounds(full: usize, quick_ones: usize) -> usize {
    if quick() { quick_ones } else { full }
}

/// A thousand clients that wait are a thousand open files.
fn raise_file_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).expect("up to the hard limit");
}

fn main() {
    // Cargo adds `--bench`.
    let args: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| arg != "--bench")
        .collect();
    if let Some((crowd::ROLE, args)) = args.split_first().map(|(role, args)| (&**role, args)) {
        return crowd::crowd(args);
    }
    let asked = |name: &str| args.is_empty() || args.iter().any(|arg| arg == name);
    if let Some(unknown) = args
        .iter()
        .find(|arg| QUESTIONS.iter().all(|(name, _)| name != arg))
    {
        let names: Vec<_> = QUESTIONS.iter().map(|(name, _)| *name).collect();
        eprintln!("no question {unknown:?}; there are: {}", names.join(" "));
        std::process::exit(2);
    }
    raise_file_limit();
    // Before pinning, so that it builds on all cores.
    testkit::module();
    pin::to(pin::CLIENT);
    let mut report = Report::open();
    for (name, ask) in QUESTIONS {
        if asked(name) {
            report.question(name);
            ask(&mut report);
        }
    }
    report.close();
}
