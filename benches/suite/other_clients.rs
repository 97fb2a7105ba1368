//! What does Lockkeeper cost the clients that want no lock?

use crate::crowd::{Waiting, occupy};
use crate::measure::{Meter, Rounds};
use crate::report::{Cell, Report, Target};
use crate::sequence::{CPU, KEYS, OWNER, Sequence, WALL, key, words};
use crate::{pin, rounds};
use testkit::connection::{RawConnection, pack};
use testkit::{Server, Setup, eventually};

/// How many wait. Below the default of `lockkeeper.max-waiters`.
const WAITERS: usize = 900;

/// What is in the server besides the one client that is measured.
#[derive(Clone, Copy)]
enum Scene {
    NoModule,
    Idle,
    /// So many locks are held, taken by hand on a server without the module, or by ours.
    ByHand(usize),
    Held(usize),
    Crowd(Waiting, usize),
}

pub fn ask(report: &mut Report) {
    report.note(
        "One client sends ordinary commands; server and client on *one core*. All rounds begin with \
         new servers, since the same program twice in memory may differ by a per cent or two: the \
         second line shows how much. SET + DEL is for both.",
    );
    let idle = [
        ("no module", Scene::NoModule),
        ("no module, again", Scene::NoModule),
        ("module, idle", Scene::Idle),
    ];
    for group in [
        &idle[..],
        &[
            ("no module, 1,000 SET NX PX", Scene::ByHand(1_000)),
            ("module, 1,000 locks held", Scene::Held(1_000)),
        ],
        &[
            ("900 in BLPOP, 1 key", Scene::Crowd(Waiting::InBlpop, 1)),
            ("900 wait, 1 key", Scene::Crowd(Waiting::InQueue, 1)),
        ],
        &[
            (
                "900 in BLPOP, 900 keys",
                Scene::Crowd(Waiting::InBlpop, WAITERS),
            ),
            (
                "900 wait, 900 keys",
                Scene::Crowd(Waiting::InQueue, WAITERS),
            ),
        ],
    ] {
        for depth in [1, 16] {
            compare(report, group, depth);
        }
    }
}

fn compare(report: &mut Report, scenes: &[(&'static str, Scene)], depth: usize) {
    let operations = rounds(1_000, 300) * if depth == 1 { 1 } else { 4 };
    let mut by_command: Vec<(&str, Option<Rounds>)> = commands()
        .iter()
        .map(|command| (command.name, None))
        .collect();
    for round in 0..rounds(11, 2) {
        // Each takes its turn in being first, in memory as in time.
        let mut scenes = scenes.to_vec();
        let places = scenes.len();
        scenes.rotate_left(round % places);
        let stages: Vec<_> = scenes
            .iter()
            .map(|(name, scene)| (*name, set(*scene)))
            .collect();
        for ((_, all), command) in by_command.iter_mut().zip(commands()) {
            let contenders = stages
                .iter()
                .map(|(name, stage)| {
                    let contender = command.contender(&stage.server, depth, operations);
                    contender.named(name)
                })
                .collect();
            let rounds = Rounds::interleave(3, contenders);
            match all {
                Some(all) => all.append(rounds),
                None => *all = Some(rounds),
            }
        }
    }
    let base = scenes[0].0;
    let mut rows: Vec<Vec<Cell>> = vec![];
    for (command, all) in &by_command {
        let all = all.as_ref().expect("there was a round");
        for (name, _) in scenes {
            rows.push(vec![
                (*command).into(),
                (*name).into(),
                all.of(name, CPU).clone().into(),
                all.ratio(CPU, name, base).into(),
                all.of(name, WALL).clone().into(),
            ]);
        }
    }
    let ratio = format!("÷ {base}");
    report.table(
        &format!("Others, {depth} commands at a time: {base} against the rest"),
        &["", "", CPU, &ratio, WALL],
        rows,
    );
    for (command, all) in &by_command {
        let all = all.as_ref().expect("there was a round");
        for (name, scene) in &scenes[1..] {
            let target = match scene {
                Scene::NoModule | Scene::ByHand(_) => continue,
                Scene::Idle | Scene::Held(_) => Target::Within(0.98, 1.02),
                Scene::Crowd(_, 1) => Target::AtMost(1.05),
                Scene::Crowd(..) => Target::AtMost(1.08),
            };
            report.target(
                format!("{command} ÷ {base}, server CPU, {name}, {depth} at a time"),
                all.ratio(CPU, name, base),
                target,
            );
        }
    }
}

/// A server, and who is there.
struct Stage {
    server: Server,
    _crowd: Vec<RawConnection>,
}

fn set(scene: Scene) -> Stage {
    let setup = match scene {
        Scene::NoModule | Scene::ByHand(_) => Setup::new().without_module(),
        _ => Setup::new(),
    };
    let server = pin::started_on(pin::CLIENT, || setup.start());
    let mut connection = RawConnection::to(&server);
    for number in 0..KEYS {
        connection.ask(&pack(&["SET", &key(number), OWNER]));
    }
    let mut crowd = vec![];
    match scene {
        Scene::NoModule | Scene::Idle => {}
        Scene::ByHand(locks) => {
            for number in 0..locks {
                let key = format!("crowded:{number}");
                connection.ask(&pack(&["SET", &key, "holder", "NX", "PX", "3600000"]));
            }
        }
        Scene::Held(locks) => occupy(&server, locks),
        Scene::Crowd(waiting, keys) => {
            if waiting == Waiting::InQueue {
                occupy(&server, keys);
            }
            crowd.extend((0..WAITERS).map(|number| {
                let mut connection = RawConnection::to(&server);
                connection.send(&waiting.command(number, keys));
                connection
            }));
            let mut meter = Meter::of(&server);
            eventually("all wait", || {
                meter.number("clients", "blocked_clients") == WAITERS as f64
            });
        }
    }
    Stage {
        server,
        _crowd: crowd,
    }
}

fn commands() -> [Sequence; 4] {
    [
        Sequence::new("SET", &["set"], |key| vec![words!["SET", key, OWNER]]),
        Sequence::new("GET", &["get"], |key| vec![words!["GET", key]]).answered_with_strings(),
        Sequence::new("SET + DEL", &["set", "del"], |key| {
            let key = format!("gone:{key}");
            vec![words!["SET", key.clone(), OWNER], words!["DEL", key]]
        }),
        Sequence::new("EXPIRE", &["expire"], |key| {
            vec![words!["EXPIRE", key, "3600"]]
        }),
    ]
}
