//! Bytes that no client library sends, with LOCK names in them: the server and everybody else's locks
//! survive. `LOCKKEEPER_HOSTILE_SEED` repeats the random ones, `LOCKKEEPER_HOSTILE_ROUNDS` lengthens them.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use fastrand::Rng;
use redis::Connection;
use testkit::waiting::*;
use testkit::*;

/// A connection that sends and reads bytes, not commands.
struct Raw(UnixStream);

impl Raw {
    fn to(server: &Server) -> Raw {
        let stream = UnixStream::connect(server.socket()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Raw(stream)
    }

    /// The server may have hung up on what it was sent before.
    fn send(&mut self, bytes: &[u8]) {
        let _ = self.0.write_all(bytes);
    }

    /// Ends the sending side, and reads all that the server sends until it closes the connection, too.
    fn finish(mut self) -> Vec<u8> {
        let _ = self.0.shutdown(Shutdown::Write);
        let mut received = vec![];
        // A server that hangs up on unread bytes resets the connection.
        let _ = self.0.read_to_end(&mut received);
        received
    }

    #[track_caller]
    fn expect(&mut self, reply: &[u8]) {
        let mut received = vec![0; reply.len()];
        self.0.read_exact(&mut received).unwrap();
        assert_eq!(
            received.escape_ascii().to_string(),
            reply.escape_ascii().to_string()
        );
    }
}

/// A command as client libraries send it.
fn encoded(args: &[&[u8]]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", args.len()).into_bytes();
    for arg in args {
        bytes.extend(format!("${}\r\n", arg.len()).bytes());
        bytes.extend([arg, &b"\r\n"[..]].concat());
    }
    bytes
}

/// What all of this must leave alone: a lock that somebody holds and another waits for.
struct Bystanders {
    server: Server,
    redis: Connection,
    waiter: Waiter,
    held: (Reply, Reply),
}

impl Bystanders {
    fn new() -> Bystanders {
        let server = Server::start();
        let mut redis = server.connect();
        hold(&mut redis, "bystander");
        let waiter = join(&server, "bystander", "waiter");
        let held = lease(&mut redis);
        Bystanders {
            server,
            redis,
            waiter,
            held,
        }
    }

    /// Nothing happened to them, nobody else is left in a queue, and the server shuts down in order.
    #[track_caller]
    fn assert_unharmed(mut self) {
        assert!(self.server.is_running(), "{}", self.server.log());
        assert_eq!(lease(&mut self.redis), self.held);
        eventually_wait(&mut self.redis, 1);
        let log = self.server.log();
        assert!(!log.to_lowercase().contains("panic"), "{log}");
        assert_eq!(ask!(self.redis, "LOCK.RELEASE", "bystander", "holder"), YES);
        fence(self.waiter.reply());
        self.server.stop();
    }
}

fn lease(redis: &mut Connection) -> (Reply, Reply) {
    (
        ask!(redis, "GET", "bystander"),
        ask!(redis, "PEXPIRETIME", "bystander"),
    )
}

/// One of each command, as bytes.
fn commands(key: &[u8]) -> [Vec<u8>; 5] {
    [
        encoded(&[b"LOCK.ACQUIRE", key, b"alice", b"60000"]),
        encoded(&[b"LOCK.ACQUIRE", key, b"bob", b"60000", b"WAIT", b"60000"]),
        encoded(&[b"LOCK.RENEW", key, b"alice", b"60000"]),
        encoded(&[b"LOCK.RELEASE", key, b"alice"]),
        encoded(&[b"LOCK.INFO", key]),
    ]
}

#[test]
fn half_a_command_does_nothing() {
    let mut bystanders = Bystanders::new();
    for command in commands(b"k") {
        for length in 0..command.len() {
            let mut raw = Raw::to(&bystanders.server);
            raw.send(&command[..length]);
            assert_eq!(raw.finish(), b"");
        }
    }
    assert_eq!(ask!(bystanders.redis, "EXISTS", "k"), NO);
    bystanders.assert_unharmed();
}

#[test]
fn a_command_that_comes_byte_by_byte_is_one_command() {
    let bystanders = Bystanders::new();
    let mut raw = Raw::to(&bystanders.server);
    for (command, reply) in [
        (
            encoded(&[b"LOCK.RENEW", b"k", b"alice", b"60000"]),
            &b"$-1\r\n"[..],
        ),
        (encoded(&[b"SET", b"k", b"alice"]), b"+OK\r\n"),
        (
            encoded(&[b"LOCK.RENEW", b"k", b"alice", b"60000"]),
            b":1\r\n",
        ),
        (
            encoded(&[b"LOCK.ACQUIRE", b"k", b"bob", b"60000", b"WAIT", b"1"]),
            b"$-1\r\n",
        ),
        (encoded(&[b"LOCK.RELEASE", b"k", b"alice"]), b":1\r\n"),
    ] {
        for byte in command {
            raw.send(&[byte]);
        }
        raw.expect(reply);
    }
    bystanders.assert_unharmed();
}

#[test]
fn lines_typed_by_hand_are_commands_and_their_bad_quotes_are_not() {
    let bystanders = Bystanders::new();
    let mut raw = Raw::to(&bystanders.server);
    for (line, reply) in [
        (&b"lock.info k\r\n"[..], &b"$-1\r\n"[..]),
        (b"LOCK.RELEASE k \"al\\x00ice\"\r\n", b"$-1\r\n"),
        (b"  LOCK.RENEW\tk   alice 5 \n", b"$-1\r\n"),
        (b"SET k alice\r\n", b"+OK\r\n"),
        (b"LOCK.RELEASE k 'alice'\r\n", b":1\r\n"),
        (
            b"LOCK.RELEASE k \"alice\r\n",
            b"-ERR Protocol error: unbalanced quotes in request\r\n",
        ),
    ] {
        raw.send(line);
        raw.expect(reply);
    }
    assert_eq!(raw.finish(), b"", "the server hangs up");
    bystanders.assert_unharmed();
}

#[test]
fn counts_and_lengths_that_lie_end_the_connection_and_nothing_else() {
    let mut bystanders = Bystanders::new();
    for lie in [
        &b"*4\r\n$12\r\nLOCK.ACQUIRE\r\n$1\r\nk\r\n$-1\r\n$5\r\n60000\r\n"[..],
        b"*4\r\n$12\r\nLOCK.ACQUIRE\r\n$1\r\nk\r\n$99999999999999999999\r\nalice\r\n",
        b"*4\r\n$12\r\nLOCK.ACQUIRE\r\n$1\r\nk\r\n$x\r\nalice\r\n",
        b"*4\r\n$12\r\nLOCK.ACQUIRE\r\n:1\r\n+alice\r\n:60000\r\n",
        b"*99999999999\r\n$12\r\nLOCK.ACQUIRE\r\n",
        b"*2147483648\r\n$12\r\nLOCK.ACQUIRE\r\n",
        b"*4.0\r\n$12\r\nLOCK.ACQUIRE\r\n$1\r\nk\r\n$5\r\nalice\r\n$5\r\n60000\r\n",
    ] {
        let mut raw = Raw::to(&bystanders.server);
        raw.send(lie);
        let received = raw.finish();
        assert!(
            received.starts_with(b"-ERR Protocol error"),
            "{}",
            received.escape_ascii()
        );
    }
    // Lengths that swallow what follows: other names of commands, other arguments.
    for lie in [
        &b"*4\r\n$11\r\nLOCK.ACQUIRE\r\n$1\r\nk\r\n$5\r\nalice\r\n$5\r\n60000\r\n"[..],
        b"*3\r\n$12\r\nLOCK.RELEASE\r\n$9\r\nbystander\r\n$60\r\nholder\r\n",
        b"*-1\r\n*0\r\n\r\n\r\n*1\r\n$0\r\n\r\n",
    ] {
        let mut raw = Raw::to(&bystanders.server);
        raw.send(lie);
        raw.finish();
    }
    assert_eq!(ask!(bystanders.redis, "EXISTS", "k"), NO);
    bystanders.assert_unharmed();
}

#[test]
fn a_client_that_waits_and_then_sends_garbage_leaves_the_queue() {
    let mut bystanders = Bystanders::new();
    let wait = encoded(&[
        b"LOCK.ACQUIRE",
        b"bystander",
        b"x",
        b"60000",
        b"WAIT",
        b"3600000",
    ]);
    let mut raws = vec![];
    for garbage in [
        &b"*1\r\n$-7\r\n"[..],
        b"\xff\0\r\n\"",
        b"*99999999999\r\n",
        &wait[..20],
    ] {
        let mut raw = Raw::to(&bystanders.server);
        let owner = format!("garbage {}", raws.len());
        let owned = [
            b"LOCK.ACQUIRE",
            &b"bystander"[..],
            owner.as_bytes(),
            b"1",
            b"WAIT",
            b"3600000",
        ];
        raw.send(&[&encoded(&owned), garbage].concat());
        raws.push(raw);
        eventually_wait(&mut bystanders.redis, 1 + raws.len() as i64);
    }
    // The garbage is read when the wait is over, or never.
    drop(raws);
    bystanders.assert_unharmed();
}

#[test]
fn whatever_is_pipelined_behind_a_wait_comes_after_it() {
    let mut bystanders = Bystanders::new();
    hold(&mut bystanders.redis, "k");
    let mut raw = Raw::to(&bystanders.server);
    let mut pipeline = encoded(&[
        b"LOCK.ACQUIRE",
        b"k",
        b"alice",
        b"60000",
        b"WAIT",
        b"3600000",
    ]);
    pipeline.extend(encoded(&[
        b"LOCK.ACQUIRE",
        b"k",
        b"bob",
        b"60000",
        b"WAIT",
        b"1",
    ]));
    pipeline.extend(encoded(&[b"LOCK.RELEASE", b"k", b"alice"]));
    pipeline.extend(encoded(&[b"QUIT"]));
    raw.send(&pipeline);
    eventually_wait(&mut bystanders.redis, 2);

    assert_eq!(ask!(bystanders.redis, "LOCK.RELEASE", "k", "holder"), YES);

    // A connection that is half closed is closed for Redis: read first.
    let mut received = String::new();
    raw.0.read_to_string(&mut received).unwrap();
    let replies: Vec<&str> = received.split("\r\n").collect();
    assert!(
        replies[0].starts_with(':') && replies[0].len() == 17,
        "{received}"
    );
    assert_eq!(replies[1..], ["$-1", ":1", "+OK", ""], "{received}");
    bystanders.assert_unharmed();
}

#[test]
fn arguments_by_the_thousand_and_by_the_megabyte_are_refused_in_one_short_line() {
    let bystanders = Bystanders::new();
    let megabytes = vec![b'\n'; 5_000_000];
    let mut raw = Raw::to(&bystanders.server);
    let mut many = vec![&b"LOCK.ACQUIRE"[..], b"k", b"alice", b"1"];
    many.extend([&b"WAIT"[..], b"1"].iter().cycle().take(100_000));
    raw.send(&encoded(&many));
    raw.expect(b"-BADOPTION WAIT is given twice, give it once, got 'WAIT'\r\n");

    let shown = "\\n".repeat(32);
    let command = [b"LOCK.ACQUIRE", &b"k"[..], &megabytes, b"1"];
    raw.send(&encoded(&command));
    raw.expect(
        format!(
            "-BADOWNER owner is longer than 512 bytes, give 1 to 512 bytes, got '{shown}...'\r\n"
        )
        .as_bytes(),
    );
    raw.send(&encoded(&[b"LOCK.RENEW", b"k", b"alice", &megabytes]));
    raw.expect(
        format!(
            "-BADTTL ttl is not a whole number of milliseconds, give 1 to 9007199254740991 in digits, \
             got '{shown}...'\r\n"
        )
        .as_bytes(),
    );
    raw.send(&encoded(&[b"LOCK.RELEASE", &megabytes, b"alice"]));
    raw.expect(b"$-1\r\n");
    bystanders.assert_unharmed();
}

#[test]
fn a_client_that_never_reads_its_replies_holds_up_nobody() {
    let mut bystanders = Bystanders::new();
    let setting = [
        "CONFIG",
        "SET",
        "client-output-buffer-limit",
        "normal 1mb 0 0",
    ];
    assert_eq!(ask!(bystanders.redis, &setting), OK);
    let mut deaf = Raw::to(&bystanders.server);
    let questions = encoded(&[b"LOCK.INFO", b"bystander"]).repeat(1_000);
    // Until the server has had enough of it.
    eventually("the server hangs up", || {
        deaf.0.write_all(&questions).is_err()
    });
    bystanders.assert_unharmed();
}

/// A few commands with a few bytes changed, lost, doubled or made up.
fn mutilated(random: &mut Rng) -> Vec<u8> {
    let mut bytes = vec![];
    for _ in 0..1 + random.usize(..4) {
        bytes.extend(&commands(b"k")[random.usize(..5)]);
    }
    for _ in 0..random.usize(..4) {
        let at = random.usize(..bytes.len().max(1));
        if bytes.is_empty() {
            break;
        }
        match random.usize(..6) {
            0 => bytes[at] = random.u8(..),
            1 => bytes[at] = b"0123456789$*:\r\n-"[random.usize(..16)],
            2 => drop(bytes.remove(at)),
            3 => bytes.insert(at, random.u8(..)),
            4 => bytes.truncate(at + 1),
            _ => {
                let end = (at + random.usize(..20)).min(bytes.len());
                let again = bytes[at..end].to_vec();
                bytes.splice(at..at, again);
            }
        }
    }
    bytes
}

#[test]
fn mutilated_commands_harm_nobody() {
    let seed = setting("LOCKKEEPER_HOSTILE_SEED", 1);
    let rounds: u64 = setting("LOCKKEEPER_HOSTILE_ROUNDS", 3_000);
    println!("LOCKKEEPER_HOSTILE_SEED={seed} LOCKKEEPER_HOSTILE_ROUNDS={rounds}");
    let mut random = Rng::with_seed(seed);
    let mut bystanders = Bystanders::new();
    for _ in 0..rounds {
        let bytes = mutilated(&mut random);
        let mut raw = Raw::to(&bystanders.server);
        raw.send(&bytes);
        if random.usize(..8) == 0 {
            // Gone without a word, half of its commands unread.
            continue;
        }
        raw.send(b"\r\nQUIT\r\n");
        // Whoever waits is gone when the server sees the end.
        let received = raw.finish();
        let is_clean = |line: &[u8]| line.iter().all(|byte| (b' '..=b'~').contains(byte));
        for line in received
            .split(|byte| *byte == b'\n')
            .filter(|line| line.starts_with(b"-BAD"))
        {
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            assert!(is_clean(line), "{}", line.escape_ascii());
        }
    }
    eventually_wait(&mut bystanders.redis, 1);
    bystanders.assert_unharmed();
}
