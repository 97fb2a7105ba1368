//! A thousand clients that wait die at once: how long does that stall the others?

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::handover::us;
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
    InLine,
    InBlpop,
}

impl Waiting {
    pub fn command(self, number: usize, keys: usize) -> Vec<u8> {
        let key = format!("crowded:{}", number % keys);
        match self {
            Waiting::InLine => {
                let (owner, long) = (format!("waiter:{number}"), "3600000");
                pack(&["LOCK.ACQUIRE", &key, &owner, long, "WAIT", long])
            }
            Waiting::InBlpop => pack(&["BLPOP", &key, "3600"]),
        }
    }
}

/// Takes all keys, so that a crowd has something to wait for.
pub fn occupy(server: &Server, keys: usize) {
    let mut line = RawConnection::to(server);
    for number in 0..keys {
        let key = format!("crowded:{number}");
        line.ask(&pack(&["LOCK.ACQUIRE", &key, "holder", "3600000"]));
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
            contender("LOCK, 1 key", Waiting::InLine, 1),
            contender("BLPOP, 1,000 keys", Waiting::InBlpop, CROWD),
            contender("LOCK, 1,000 keys", Waiting::InLine, CROWD),
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
}

fn die(waiting: Waiting, keys: usize) -> Figures {
    let server = pin::started_on(pin::SERVER, Server::start);
    if waiting == Waiting::InLine {
        occupy(&server, keys);
    }
    let mut meter = Meter::of(&server);
    let mut crowd = gather(&server, waiting, keys);
    eventually("all wait", || {
        meter.number("clients", "blocked_clients") == CROWD as f64
    });
    let (mut line, ping) = (RawConnection::to(&server), pack(&["PING"]));
    line.ask(&ping);
    let cpu = meter.cpu_us();
    crowd.kill().unwrap();
    let start = Instant::now();
    let (mut longest, mut pings) = (0.0, 0.0);
    while start.elapsed() < LOOK {
        let sent = Instant::now();
        line.ask(&ping);
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
        Waiting::InLine => "line",
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
        "line" => Waiting::InLine,
        _ => Waiting::InBlpop,
    };
    let (port, keys) = (port.parse().unwrap(), keys.parse().unwrap());
    let lines: Vec<RawConnection> = (0..CROWD)
        .map(|number| {
            let mut line = RawConnection::to_port(port);
            line.send(&waiting.command(number, keys));
            line
        })
        .collect();
    println!("ready");
    std::thread::sleep(Duration::from_secs(60));
    drop(lines);
}
