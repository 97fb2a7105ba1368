//! A thousand clients that wait die at once, or thousands of waits end at once: how long does that stall the
//! others?

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::handover::{sleep_until, us};
use crate::measure::{Contender, Figures, Meter, Rounds};
use crate::report::{Report, Target};
use crate::{pin, rounds};
use testkit::connection::{RawConnection, pack};
use testkit::{Server, eventually};

/// First argument of this program when it is to be the crowd.
pub const ROLE: &str = "crowd";

const CROWD: usize = 1_000;

/// Far longer than any stall that was ever seen here.
const LOOK: Duration = Duration::from_millis(150);

const STALL: &str = "longest PING ms";
const CPU: &str = "server CPU ms";

/// What the clients of a crowd wait in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Waiting {
    InQueue,
    InBlpop,
}

impl Waiting {
    pub fn command(self, number: usize, keys: usize) -> Vec<u8> {
        let key = format!("crowded:{}", number % keys);
        match self {
            Waiting::InQueue => {
                let (owner, long) = (format!("waiter:{number}"), "3600000");
                pack(&["LOCK.ACQUIRE", &key, &owner, long, "WAIT", long])
            }
            Waiting::InBlpop => pack(&["BLPOP", &key, "3600"]),
        }
    }
}

/// Takes all keys, so that a crowd has something to wait for.
pub fn occupy(server: &Server, keys: usize) {
    let mut connection = RawConnection::to(server);
    connection.let_many_wait();
    for number in 0..keys {
        let key = format!("crowded:{number}");
        connection.ask(&pack(&["LOCK.ACQUIRE", &key, "holder", "3600000"]));
    }
}

pub fn ask(report: &mut Report) {
    report.note(
        "1,000 clients of one process wait, in LOCK.ACQUIRE … WAIT or in BLPOP, for one key or for one \
         each; the process is killed. Another client sends one PING after the other; the longest of \
         the next 150 ms counts, and what the server's main thread had to do in that time. Two cores.",
    );
    let contender = |name: &str, waiting, keys| Contender::new(name, move || die(waiting, keys));
    let all = Rounds::interleave(
        rounds(9, 2),
        vec![
            contender("BLPOP, 1 key", Waiting::InBlpop, 1),
            contender("LOCK, 1 key", Waiting::InQueue, 1),
            contender("BLPOP, 1,000 keys", Waiting::InBlpop, CROWD),
            contender("LOCK, 1,000 keys", Waiting::InQueue, CROWD),
        ],
    );
    report.rounds(
        "1,000 waiting clients die at once",
        &all,
        &[STALL, CPU],
        &["BLPOP, 1 key"],
    );
    for keys in ["1 key", "1,000 keys"] {
        for figure in [STALL, CPU] {
            report.target(
                format!("LOCK ÷ BLPOP, {figure} when 1,000 die, {keys}"),
                all.ratio(figure, &format!("LOCK, {keys}"), &format!("BLPOP, {keys}")),
                Target::AtMost(1.5),
            );
        }
    }
    endings(report);
}

/// How many waits end at once.
const ENDING: usize = 4_000;

/// So long before that the first begins.
const GATHERING: Duration = Duration::from_secs(3);

/// How a wait ends that is not granted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    BlpopTimesOut,
    TimesOut,
    /// `lockkeeper.max-waiters 0`
    Drained,
}

fn endings(report: &mut Report) {
    report.note(
        "4,000 clients wait for one key, and all waits end in the same moment: by their timeout, or by \
         CONFIG SET lockkeeper.max-waiters 0. Another client sends one PING after the other; the longest \
         counts.",
    );
    let contender = |name: &str, ending| Contender::new(name, move || end_at_once(ending));
    let all = Rounds::interleave(
        rounds(7, 2),
        vec![
            contender("BLPOP times out", Ending::BlpopTimesOut),
            contender("LOCK times out", Ending::TimesOut),
            contender("LOCK is drained", Ending::Drained),
        ],
    );
    let blpop = &all.names[0];
    report.rounds("4,000 waits end at once", &all, &[STALL], &[blpop]);
    for name in &all.names[1..] {
        report.target(
            format!("{name} ÷ {blpop}, {STALL} when 4,000 waits end"),
            all.ratio(STALL, name, blpop),
            Target::AtMost(1.5),
        );
    }
}

fn end_at_once(ending: Ending) -> Figures {
    let many = ["--maxclients", "10000"];
    let server = pin::started_on(pin::SERVER, || Server::with(&many));
    occupy(&server, 1);
    let mut meter = Meter::of(&server);
    let mut crowd: Vec<RawConnection> = (0..ENDING).map(|_| RawConnection::to(&server)).collect();
    let end = Instant::now() + GATHERING;
    for (number, connection) in crowd.iter_mut().enumerate() {
        let left = end.saturating_duration_since(Instant::now());
        let key = "crowded:0";
        connection.send(&match ending {
            Ending::BlpopTimesOut => pack(&["BLPOP", "list", &left.as_secs_f64().to_string()]),
            Ending::TimesOut | Ending::Drained => {
                let ms = match ending {
                    Ending::Drained => 3_600_000,
                    _ => left.as_millis(),
                };
                let (owner, long) = (format!("waiter:{number}"), "3600000");
                pack(&["LOCK.ACQUIRE", key, &owner, long, "WAIT", &ms.to_string()])
            }
        });
    }
    eventually("all wait", || {
        meter.number("clients", "blocked_clients") == ENDING as f64
    });
    assert!(Instant::now() < end, "the crowd was too slow");
    let (mut connection, mut drain, ping) = (
        RawConnection::to(&server),
        RawConnection::to(&server),
        pack(&["PING"]),
    );
    sleep_until(end - Duration::from_millis(50));
    if ending == Ending::Drained {
        drain.send(&pack(&["CONFIG", "SET", "lockkeeper.max-waiters", "0"]));
    }
    let (start, mut longest) = (Instant::now(), 0.0);
    while start.elapsed() < 4 * LOOK {
        let sent = Instant::now();
        connection.ask(&ping);
        longest = f64::max(longest, us(sent.elapsed()));
        std::thread::sleep(Duration::from_micros(200));
    }
    assert_eq!(
        meter.number("clients", "blocked_clients"),
        0.0,
        "all waits have ended"
    );
    vec![(STALL, longest / 1e3)]
}

fn die(waiting: Waiting, keys: usize) -> Figures {
    let server = pin::started_on(pin::SERVER, Server::start);
    if waiting == Waiting::InQueue {
        occupy(&server, keys);
    }
    let mut meter = Meter::of(&server);
    let mut crowd = gather(&server, waiting, keys);
    eventually("all wait", || {
        meter.number("clients", "blocked_clients") == CROWD as f64
    });
    let (mut connection, ping) = (RawConnection::to(&server), pack(&["PING"]));
    connection.ask(&ping);
    let cpu = meter.cpu_us();
    crowd.kill().unwrap();
    let start = Instant::now();
    let (mut longest, mut pings) = (0.0, 0.0);
    while start.elapsed() < LOOK {
        let sent = Instant::now();
        connection.ask(&ping);
        longest = f64::max(longest, us(sent.elapsed()));
        pings += 1.0;
        // So that the PINGs do not hide what the dead cost.
        std::thread::sleep(Duration::from_micros(200));
    }
    let cpu = meter.cpu_us() - cpu;
    crowd.wait().unwrap();
    assert_eq!(
        meter.number("clients", "blocked_clients"),
        0.0,
        "all have died"
    );
    assert!(pings > 10.0, "the server has answered");
    vec![(STALL, longest / 1e3), (CPU, cpu / 1e3)]
}

/// Another process, so that the kernel ends all connections in one go.
fn gather(server: &Server, waiting: Waiting, keys: usize) -> Child {
    let what = match waiting {
        Waiting::InQueue => "queue",
        Waiting::InBlpop => "blpop",
    };
    let mut crowd = Command::new(std::env::current_exe().unwrap())
        .args([ROLE, &server.port().to_string(), what, &keys.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let stdout = crowd.stdout.take().expect("it is piped");
    let mut ready = String::new();
    BufReader::new(stdout).read_line(&mut ready).unwrap();
    crowd
}

/// The other process.
pub fn crowd(args: &[String]) {
    let [port, what, keys] = args else {
        panic!("a crowd is told port, what and keys")
    };
    let waiting = match &**what {
        "queue" => Waiting::InQueue,
        _ => Waiting::InBlpop,
    };
    let (port, keys) = (port.parse().unwrap(), keys.parse().unwrap());
    let connections: Vec<RawConnection> = (0..CROWD)
        .map(|number| {
            let mut connection = RawConnection::to_port(port);
            connection.send(&waiting.command(number, keys));
            connection
        })
        .collect();
    println!("ready");
    std::thread::sleep(Duration::from_secs(60));
    drop(connections);
}
