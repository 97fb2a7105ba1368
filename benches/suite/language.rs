//! What do locks cost from another language, and how long does one wait: our helper there beside the locks that people
//! use. Python and Go ask this alike.

use std::time::Duration;

use crate::contention::{Log, Plan};
use crate::measure::{Contender, Figures, Meter, Rounds, Series};
use crate::peers::Program;
use crate::report::{Report, Target};
use crate::{pin, rounds};
use testkit::Server;

pub const WALL: &str = "wall µs";
pub const CLIENT_CPU: &str = "client CPU µs";
pub const SERVER_CPU: &str = "server CPU µs";

pub const TURNS: &str = "turns/s";
pub const HANDOVER: &str = "hand-over ms p50";
pub const LONGEST: &str = "longest wait ÷ (clients × hold)";
pub const JAIN: &str = "Jain's index";
pub const CALLS: &str = "commands a turn";

/// A way to lock, by its name in the table and in the program that runs it.
pub type Variant = (&'static str, &'static str);

/// Acquires and releases one free lock, over and over; all on one core. `figures` are read from what the program prints.
pub fn pairs(
    program: &Program,
    variants: &[Variant],
    figures: &[(&'static str, &'static str)],
) -> Rounds {
    let server = pin::started_on(pin::CLIENT, Server::start);
    let server = &server;
    let count = rounds(1_500, 300).to_string();
    let contender = |(name, variant): &Variant| {
        let (count, variant) = (count.clone(), *variant);
        Contender::new(*name, move || -> Figures {
            let cost = program.run(server, variant, &["pairs", &count]);
            let figure = |printed: &str| cost[printed].as_f64().expect("a number of µs");
            figures
                .iter()
                .map(|(name, printed)| (*name, figure(printed)))
                .collect()
        })
    };
    Rounds::interleave(rounds(9, 2), variants.iter().map(contender).collect())
}

/// So many clients hold one lock for 5 ms in turn, and ask again at once.
pub fn turns(
    program: &Program,
    variants: &[Variant],
    clients: usize,
    report: &mut Report,
    title: &str,
) -> Rounds {
    let plan = Plan {
        clients,
        hold: Duration::from_millis(5),
        pause: Duration::ZERO,
        length: Duration::from_secs(rounds(4, 1) as u64),
    };
    let contender = |(name, variant): &Variant| {
        let variant = *variant;
        Contender::new(*name, move || -> Figures {
            let server = pin::started_on(pin::SERVER, Server::start);
            let mut meter = Meter::of(&server);
            let logs = program.logs(&server, variant, plan);
            judge(plan, 1, &logs, meter.calls() as f64)
        })
    };
    let all = Rounds::interleave(rounds(5, 1), variants.iter().map(contender).collect());
    report.rounds(title, &all, &[TURNS, HANDOVER, LONGEST, JAIN, CALLS], &[]);
    all
}

/// Everybody's turn comes, soon, and costs little.
pub fn fairness(report: &mut Report, all: &Rounds, helper: &str) {
    for (figure, target) in [
        (LONGEST, Target::AtMost(1.3)),
        (JAIN, Target::AtLeast(0.99)),
        (CALLS, Target::AtMost(3.0)),
    ] {
        report.target(
            format!("{helper}, {figure}"),
            all.of(helper, figure).clone(),
            target,
        );
    }
}

/// So many may hold it at once.
pub fn judge(plan: Plan, places: usize, logs: &[Log], calls: f64) -> Figures {
    let mut turns: Vec<_> = logs
        .iter()
        .flat_map(|log| log.turns.iter().copied())
        .collect();
    turns.sort_by(|a, b| a.granted.total_cmp(&b.granted));
    let mut handovers = Series::default();
    let mut releases: Vec<f64> = turns.iter().map(|turn| turn.releasing).collect();
    releases.sort_by(f64::total_cmp);
    // Whose place was the first to become free is not known, but when is.
    for (releasing, next) in releases.iter().zip(turns.iter().skip(places)) {
        let gap = next.granted - releasing;
        assert!(gap > 0.0, "more than {places} held the lock at once");
        if next.asked < *releasing {
            handovers.0.push(1e3 * gap);
        }
    }
    let length = plan.length.as_secs_f64();
    let longest = logs
        .iter()
        .flat_map(|log| {
            let served = log.turns.iter().map(|turn| turn.granted - turn.asked);
            served.chain(log.waiting_since.map(|since| length - since))
        })
        .fold(0.0, f64::max);
    let counts = logs.iter().map(|log| log.turns.len() as f64);
    let (count, squares) = counts.fold((0.0, 0.0), |(sum, squares), one| {
        (sum + one, squares + one * one)
    });
    let held: f64 = turns.iter().map(|turn| turn.releasing - turn.granted).sum();
    let clients = plan.clients as f64;
    // Those who wait at the end have sent most of what their turn costs: two commands of three, through our helpers.
    let waiting = logs.iter().filter(|log| log.waiting_since.is_some());
    let begun = count + waiting.count() as f64;
    vec![
        (TURNS, count / length),
        (HANDOVER, handovers.median()),
        (LONGEST, longest / (clients * held / count / places as f64)),
        (JAIN, count * count / (clients * squares)),
        (CALLS, calls / begun),
    ]
}

/// What many locks cost that one program holds.
pub fn kept(report: &mut Report, language: &str, program: &Program, most: f64) {
    let locks = rounds(10_000, 1_000).to_string();
    let seconds = rounds(10, 2).to_string();
    let server = pin::started_on(pin::SERVER, Server::start);
    let cost = program.run(&server, "helper", &["kept", &locks, &seconds]);
    let figure = |name: &str| cost[name].as_f64().expect("a number");
    report.table(
        &format!("{locks} locks held by one program in {language}, ttl 30 s"),
        &["", "client CPU %", "server CPU %", "s to acquire them"],
        vec![vec![
            "helper".into(),
            figure("client").into(),
            figure("server").into(),
            figure("acquired").into(),
        ]],
    );
    report.target(
        format!("% of a core for all those locks, {language}"),
        figure("client"),
        Target::AtMost(most),
    );
}
