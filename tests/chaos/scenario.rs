//! The scenarios: real servers, owners at work, and the faults injected meanwhile.
//!
//! Some owners send the commands as they are, others work in crews, through the helpers of all languages.

use std::thread;
use std::time::{Duration, Instant};

use lockkeeper_conformance::agent::Kind;
use lockkeeper_conformance::agents;

use super::client::{Client, Endpoint, Raw};
use super::crew::Crew;
use super::history::History;
use super::nodes::Nodes;
use super::run::{ALONE, Limits, Run};
use super::worker;
use testkit::sentinels::{MASTER, Sentinels};
use testkit::{OK, Server, Setup, ask, eventually, info};

const NOTHING: Duration = Duration::ZERO;

/// The fences of a new master begin a second ahead, and promise more once it has been one for that
/// long.
const SETTLED: Duration = Duration::from_millis(1200);

/// Runs `raw` clients, and for each of `safe` an owner in every crew, while `disturb` injects faults.
pub fn run<C: Client>(
    run: Run,
    raw: Vec<C>,
    crews: &[Crew],
    safe: &[bool],
    disturb: impl FnOnce(&Run),
) -> History {
    thread::scope(|threads| {
        let run = &run;
        // However the disturbance ends, or a failed test would never.
        let _stop = StopAtEnd(run);
        for (number, client) in raw.into_iter().enumerate() {
            threads.spawn(move || worker::raw(run, number as u64, client));
        }
        let owners = crews
            .iter()
            .flat_map(|crew| safe.iter().map(move |safe| (crew, *safe)));
        for (number, (crew, safe)) in owners.enumerate() {
            let number = 1000 + number as u64;
            threads.spawn(move || crew.work(run, number, safe));
        }
        disturb(run);
    });
    run.history()
}

struct StopAtEnd<'r>(&'r Run);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// A crew for each language that is here.
fn crews(url: &str) -> Vec<Crew> {
    let here = kinds().into_iter().filter(|kind| {
        let is_here = kind.is_here();
        if !is_here {
            testkit::skip(&format!(
                "no crew of {}: run `make conformance-needs`",
                kind.name
            ));
        }
        is_here
    });
    here.map(|kind| Crew::new(kind, url.to_owned())).collect()
}

pub fn kinds() -> Vec<Kind> {
    agents::all(env!("CARGO_BIN_EXE_agent-rust"))
}

pub fn raws(number: usize, endpoint: &Endpoint) -> Vec<Raw> {
    (0..number).map(|_| Raw::at(endpoint.clone())).collect()
}

/// Until so many critical sections more are through, and a server that has just begun is settled.
pub fn load(run: &Run, sections: usize) {
    let (before, start) = (run.sections(), Instant::now());
    eventually("owners go on by themselves", || {
        run.sections() >= before + sections && start.elapsed() >= SETTLED
    });
}

#[derive(Clone, Copy, PartialEq)]
pub enum Durability {
    Always,
    EverySecond,
    Snapshots,
}

/// One server, killed and started again.
pub fn restarts(seed: u64, rounds: usize, durability: Durability, limits: Limits) -> History {
    let mut server = Server::with(match durability {
        Durability::Always => &["--appendonly", "yes", "--appendfsync", "always"][..],
        Durability::EverySecond => &["--appendonly", "yes", "--appendfsync", "everysec"],
        Durability::Snapshots => &["--save", "1 1"],
    });
    let loses = durability != Durability::Always;
    let crews = crews(&server.url());
    let endpoint = Endpoint::at(server.url());
    let shared = Run::new(seed, 3, Duration::from_millis(500), limits);
    run(shared, raws(5, &endpoint), &crews, &[false], |run| {
        for _ in 0..rounds {
            load(run, 30);
            run.fault("kill -9 and restart", loses, NOTHING, || {
                server.kill9();
                server.start_again();
            });
        }
        load(run, 30);
    })
}

/// Server and agents are paused, some of them past the end of every lease, and killed.
pub fn mixed_crews(seed: u64, rounds: usize, limits: Limits) -> History {
    let always = ["--appendonly", "yes", "--appendfsync", "always"];
    let mut server = Server::with(&always);
    let crews = crews(&server.url());
    let endpoint = Endpoint::at(server.url());
    let shared = Run::new(seed, 3, Duration::from_millis(1500), limits);
    let mut random = shared.random(500);
    run(shared, raws(2, &endpoint), &crews, &[false; 2], |run| {
        let longest = run.ttl.as_millis() as u64 * 5 / 4;
        for round in 0..rounds {
            load(run, 20);
            let span = Duration::from_millis(random.u64(1..longest));
            let crew = &crews[random.usize(..crews.len())];
            match round % 4 {
                0 => run.fault("server killed and restarted", false, NOTHING, || {
                    server.kill9();
                    server.start_again();
                }),
                1 => run.fault("server paused", false, NOTHING, || pause(&server, span)),
                2 => run.fault("agent paused", false, NOTHING, || crew.pause(span)),
                _ => run.fault("agent killed and replaced", false, NOTHING, || {
                    crew.replace()
                }),
            }
        }
        load(run, 30);
    })
}

fn pause(server: &Server, span: Duration) {
    server.signal("STOP");
    thread::sleep(span);
    server.signal("CONT");
}

/// A crew of one kind, which is paused past the end of its leases.
pub fn stopped(seed: u64, rounds: usize, kind: Kind) -> History {
    let server = Server::start();
    let crew = [Crew::new(kind, server.url())];
    let endpoint = Endpoint::at(server.url());
    let shared = Run::new(seed, 1, Duration::from_millis(500), ALONE);
    run(shared, raws(2, &endpoint), &crew, &[false; 2], |run| {
        for _ in 0..rounds {
            load(run, 5);
            run.fault("agent paused", false, NOTHING, || {
                crew[0].pause(run.ttl * 5 / 4)
            });
        }
        load(run, 30);
    })
}

/// Master and replica under three sentinels. The master is killed; the replica's clock is 500 ms
/// behind.
pub fn failovers(seed: u64, rounds: usize, limits: Limits) -> History {
    let skew = Duration::from_millis(500);
    let (mut master, mut replica) = pair(-500);
    let sentinels = Sentinels::watching(&master);
    let hosts = sentinels.hosts.join(",");
    let crews = crews(&format!("redis+sentinel://{hosts}/{MASTER}"));
    let endpoint = Endpoint::Sentinels(sentinels.hosts.clone());
    // A lease outlasts the failover.
    let shared = Run::new(seed, 8, Duration::from_millis(4000), limits);
    run(shared, raws(4, &endpoint), &crews, &[false, true], |run| {
        for _ in 0..rounds {
            load(run, 40);
            // On a machine so busy that a living one seemed dead, this run tells nothing.
            assert!(!is_master(&replica), "a failover that nobody asked for");
            run.fault("master killed", true, skew, || {
                master.kill9();
                eventually("a sentinel promotes the replica", || is_master(&replica));
                // Only then may the old one come back, which is an empty master at first.
                sentinels.eventually_name(&replica);
            });
            std::mem::swap(&mut master, &mut replica);
            replica.start_again();
            follow(&replica, &master);
            sentinels.eventually_ready();
        }
        load(run, 40);
    })
}

/// Master and replica change their roles by FAILOVER.
pub fn planned(seed: u64, rounds: usize, limits: Limits) -> History {
    let skew = Duration::from_millis(500);
    let (mut master, mut replica) = pair(-500);
    let endpoint = Endpoint::Either(vec![master.url(), replica.url()]);
    let shared = Run::new(seed, 4, Duration::from_millis(1000), limits);
    run(shared, raws(8, &endpoint), &[], &[], |run| {
        for _ in 0..rounds {
            load(run, 40);
            run.fault("FAILOVER", false, skew, || {
                assert_eq!(ask!(master.connect(), "FAILOVER"), OK);
                eventually("the replica is master", || {
                    is_master(&replica) && !is_master(&master)
                });
            });
            std::mem::swap(&mut master, &mut replica);
            eventually_in_sync(&replica);
        }
        load(run, 40);
    })
}

/// A replica is cut off, what the master confirms meanwhile is lost, and the replica takes over.
pub fn lossy_promotion<C: Client>(seed: u64, client: impl Fn(Endpoint) -> C) -> History {
    let (mut master, replica) = pair(0);
    let address = std::sync::Arc::new(std::sync::Mutex::new(master.url()));
    let clients = (0..6)
        .map(|_| client(Endpoint::At(address.clone())))
        .collect();
    let shared = Run::new(seed, 2, Duration::from_millis(500), ALONE);
    run(shared, clients, &[], &[], |run| {
        load(run, 30);
        run.fault("promotion of a replica that lagged", true, NOTHING, || {
            assert_eq!(ask!(replica.connect(), "REPLICAOF", "NO", "ONE"), OK);
            let before = run.sections();
            eventually("the master goes on", || run.sections() > before + 10);
            *address.lock().unwrap() = replica.url();
            master.kill9();
        });
        load(run, 30);
    })
}

/// Nothing is done to the server.
pub fn quiet<C: Client>(
    seed: u64,
    sections: usize,
    limits: Limits,
    server: &Server,
    client: impl Fn(Endpoint) -> C,
) -> History {
    let endpoint = Endpoint::at(server.url());
    let clients = (0..8).map(|_| client(endpoint.clone())).collect();
    let shared = Run::new(seed, 2, Duration::from_millis(200), limits);
    run(shared, clients, &[], &[], |run| load(run, sections))
}

/// A cluster: a slot moves back and forth, and a master is killed and replaced by its replica.
pub fn cluster(seed: u64, rounds: usize, limits: Limits) -> History {
    let mut nodes = Nodes::start();
    let can_in_one_step = nodes.moves_in_one_step();
    let urls = nodes.urls();
    let hosts: Vec<_> = urls
        .iter()
        .map(|url| url["redis://".len()..].trim_end_matches('/'))
        .collect();
    let crews = crews(&format!("redis+cluster://{}", hosts.join(",")));
    let endpoint = Endpoint::Cluster(urls.clone());
    let shared = Run::new(seed, 5, Duration::from_millis(1500), limits);
    let mut random = shared.random(500);
    run(shared, raws(4, &endpoint), &crews, &[false], |run| {
        for _ in 0..rounds {
            for _ in 0..2 {
                load(run, 30);
                let key = format!("lock:{}", random.usize(..run.keys));
                let in_one_step = random.bool() && can_in_one_step;
                let fault = match in_one_step {
                    true => "slot moved in one step",
                    false => "slot moved",
                };
                run.fault(fault, false, NOTHING, || {
                    nodes.move_slot_of(&key, in_one_step)
                });
            }
            load(run, 30);
            run.fault("master of the cluster killed", true, NOTHING, || {
                nodes.kill_and_fail_over()
            });
            nodes.start_killed_again();
        }
        load(run, 30);
    })
}

/// A master and its replica, whose clock is so far ahead.
fn pair(ahead_ms: i64) -> (Server, Server) {
    let master = Server::start();
    let replica = Setup::new().clock_ms(ahead_ms).start();
    follow(&replica, &master);
    (master, replica)
}

fn follow(replica: &Server, master: &Server) {
    let done = ask!(replica.connect(), "REPLICAOF", "127.0.0.1", master.port());
    assert!(done.is_ok(), "{done:?}");
    eventually_in_sync(replica);
}

fn eventually_in_sync(replica: &Server) {
    eventually("the replica is in sync", || {
        about(replica, "master_link_status").as_deref() == Some("up")
    });
}

fn is_master(server: &Server) -> bool {
    about(server, "role").as_deref() == Some("master")
}

/// Of a server that closes connections while it changes its role.
fn about(server: &Server, field: &str) -> Option<String> {
    let url = format!("unix://{}", server.socket().display());
    let mut redis = redis::Client::open(url).ok()?.get_connection().ok()?;
    let info: String = redis::cmd("INFO")
        .arg("replication")
        .query(&mut redis)
        .ok()?;
    let value = info
        .lines()
        .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    value.map(str::to_owned)
}

pub fn version(server: &Server) -> String {
    info(&mut server.connect(), "server", "redis_version")
}
