//! What is a contract stays: what clients of earlier versions send and expect is recorded, and so is what
//! modules of earlier versions understand. `make test-compatibility` builds the release before this one
//! and lets the two meet.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::time::Duration;

use lockkeeper::Acquired;
use testkit::client::{hold, open};
use testkit::{PATIENCE, Server, info_fields};

const SESSION_0_1: &str = include_str!("compatibility/0.1.txt");
const SEVERAL_0_1: &str = include_str!("compatibility/0.1-several.txt");
const INFO_0_1: &str = include_str!("compatibility/0.1-info.txt");
const REQUESTS_0_1: &str = include_str!("compatibility/0.1-requests.txt");

/// One connection that shows every byte.
struct Raw {
    write: TcpStream,
    read: BufReader<TcpStream>,
}

impl Raw {
    fn connect(server: &Server) -> Raw {
        let write = TcpStream::connect(("127.0.0.1", server.port())).unwrap();
        write.set_read_timeout(Some(PATIENCE)).unwrap();
        let read = BufReader::new(write.try_clone().unwrap());
        Raw { write, read }
    }

    fn send(&mut self, command: &str) {
        let args: Vec<&str> = command.split(' ').collect();
        let mut bytes = format!("*{}\r\n", args.len());
        for arg in args {
            bytes += &format!("${}\r\n{arg}\r\n", arg.len());
        }
        self.write.write_all(bytes.as_bytes()).unwrap();
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.read.read_line(&mut line).unwrap();
        line.strip_suffix("\r\n").expect("a whole line").to_owned()
    }
}

/// Whether a line of a reply is the one that was recorded.
fn agrees(recorded: &str, line: &str, fence: &mut String) -> bool {
    if let Some((code, "")) = recorded.split_once(" <text>") {
        return line.starts_with(&format!("{code} "));
    }
    if recorded == ":<ms>" {
        let number = line.strip_prefix(':').and_then(|ms| ms.parse().ok());
        return number.is_some_and(|ms: i64| (0..=60_000).contains(&ms));
    }
    if recorded == ":<fence>" {
        // A new one is a new fence.
        line[1..].clone_into(fence);
        return line.starts_with(':') && line.len() == 17 && line[1..].parse::<u64>().is_ok();
    }
    line == recorded.replace("<fence>", fence)
}

#[test]
fn a_client_of_0_1_gets_what_it_expects() {
    assert!(replay(SESSION_0_1) > 50);
}

#[test]
fn holders_of_0_1_that_share_a_lock_get_what_they_expect() {
    assert!(replay(SEVERAL_0_1) > 50);
}

/// How many lines of replies there were.
#[track_caller]
fn replay(session: &str) -> usize {
    let server = Server::start();
    let mut raw = Raw::connect(&server);
    let mut fence = String::new();
    let mut command = "";
    let mut replies = 0;
    let recorded = session
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'));
    for recorded in recorded {
        if let Some(next) = recorded.strip_prefix("> ") {
            command = next;
            raw.send(command);
        } else if recorded == "<skip>" {
            // To the next reply: what HELLO tells is the server's business.
            raw.send("ECHO skipped");
            while raw.line() != "skipped" {}
        } else {
            let line = raw.line();
            let agreed = agrees(recorded, &line, &mut fence);
            assert!(agreed, "{command}: recorded {recorded}, got {line}");
            replies += 1;
        }
    }
    replies
}

#[test]
fn no_number_of_info_is_gone() {
    let server = Server::start();
    let shown = info_fields(&mut server.connect());
    for field in INFO_0_1.lines() {
        assert!(shown.contains(field), "{field} is gone");
    }
}

/// Whatever a helper of today does, a module of 0.1 understands.
#[test]
fn the_helper_sends_nothing_that_a_module_of_0_1_does_not_know() {
    let server = Server::start();
    let mut monitor = Raw::connect(&server);
    monitor.send("MONITOR");
    assert_eq!(monitor.line(), "+OK");

    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let ttl = Duration::from_millis(300);
        let lockkeeper = open(&server);
        let held = hold(&lockkeeper, "k", ttl).await;
        for acquire in [lockkeeper.acquire("k"), lockkeeper.acquire("k").wait(ttl)] {
            let busy = acquire.ttl(ttl).await.unwrap();
            assert!(matches!(busy, Acquired::Busy));
        }
        lockkeeper.info("k").await.unwrap();
        let _ = held.renew().await.unwrap();
        let _ = held.release().await.unwrap();
    });
    let _: () = redis::cmd("ECHO")
        .arg("the end")
        .query(&mut server.connect())
        .unwrap();

    let mut sent = BTreeSet::new();
    loop {
        let line = monitor.line();
        // 1795986866.264000 [0 127.0.0.1:4242] "LOCK.INFO" "k"
        let words: Vec<&str> = line.split('"').skip(1).step_by(2).collect();
        match words.as_slice() {
            ["ECHO", ..] => break,
            [name, ..] if name.starts_with("LOCK.") => sent.insert(form(&words)),
            _ => false,
        };
    }
    let known: BTreeSet<String> = REQUESTS_0_1
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(str::to_owned)
        .collect();
    assert_eq!(sent, known);
}

fn form(words: &[&str]) -> String {
    let shapes = ["", "<key>", "<owner>", "<ms>", "", "<ms>"];
    let word = |(word, shape): (&&str, &&str)| match *shape {
        "" => (*word).to_owned(),
        "<ms>" if word.parse::<u64>().is_err() => format!("{word}?"),
        shape => shape.to_owned(),
    };
    let forms: Vec<String> = words.iter().zip(&shapes).map(word).collect();
    let more = words.get(shapes.len()..).unwrap_or_default();
    [forms.join(" "), more.join(" ")]
        .join(" ")
        .trim_end()
        .to_owned()
}
