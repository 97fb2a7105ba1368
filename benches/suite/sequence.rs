//! A fixed sequence of commands, sent over and over by one connection.

use std::time::Instant;

use crate::measure::{Contender, Meter};
use testkit::Server;
use testkit::connection::{RawConnection, pack};

/// The operations go over so many keys in turn.
pub const KEYS: usize = 64;

/// As long as an owner with a UUID.
pub const OWNER: &str = "5f0c9c5e-6f0e-4a57-9d0c-2f1f4a3f9b11";

/// Longer than any run.
pub const TTL: &str = "30000";

// The figures of a sequence, each for one operation.
pub const CPU: &str = "server CPU µs";
pub const COMMANDS: &str = "commandstats µs";
pub const WALL: &str = "wall µs";

type Commands = Vec<Vec<String>>;

pub struct Sequence {
    pub name: &'static str,
    /// The commands of one operation on a key.
    commands: Box<dyn Fn(&str) -> Commands>,
    /// What INFO calls those commands.
    counted: &'static [&'static str],
    /// How many lines the reply to each of them has.
    replies: usize,
}

impl Sequence {
    pub fn new(
        name: &'static str,
        counted: &'static [&'static str],
        commands: impl Fn(&str) -> Commands + 'static,
    ) -> Sequence {
        Sequence {
            name,
            commands: Box::new(commands),
            counted,
            replies: 1,
        }
    }

    pub fn answered_with_strings(mut self) -> Sequence {
        self.replies = 2;
        self
    }

    pub fn commands(&self, key: &str) -> Commands {
        (self.commands)(key)
    }

    /// Sends `depth` commands at a time (1: each waits for the reply to the one before), about
    /// `operations` in one round.
    pub fn contender(
        &self,
        server: &Server,
        depth: usize,
        operations: usize,
    ) -> Contender<'static> {
        let one_pass: Vec<Vec<u8>> = (0..KEYS)
            .flat_map(|number| self.commands(&key(number)))
            .map(|words| pack(&words.iter().map(String::as_str).collect::<Vec<_>>()))
            .collect();
        let writes: Vec<(Vec<u8>, usize)> = one_pass
            .chunks(depth)
            .map(|commands| (commands.concat(), commands.len() * self.replies))
            .collect();
        let passes = operations.div_ceil(KEYS);
        let operations = (passes * KEYS) as f64;
        let (mut connection, mut meter) = (RawConnection::to(server), Meter::of(server));
        let counted = self.counted;
        Contender::new(self.name, move || {
            meter.reset_commands();
            let cpu = meter.cpu_us();
            let start = Instant::now();
            for _ in 0..passes {
                for (packed, replies) in &writes {
                    connection.send(packed);
                    connection.receive(*replies);
                }
            }
            let wall = start.elapsed();
            let cpu = meter.cpu_us() - cpu;
            vec![
                (WALL, 1e6 * wall.as_secs_f64() / operations),
                (CPU, cpu / operations),
                (COMMANDS, meter.command_us(counted) / operations),
            ]
        })
    }
}

pub fn key(number: usize) -> String {
    format!("lock:{number:03}")
}

/// The words of a command.
macro_rules! words {
    ($($word:expr),+) => { vec![$(String::from($word)),+] };
}
pub(crate) use words;

/// The name by which EVALSHA runs this script.
pub fn load_script(server: &Server, script: &str) -> String {
    let load = redis::cmd("SCRIPT")
        .arg("LOAD")
        .arg(script)
        .query(&mut server.connect());
    load.unwrap()
}

/// Whether the server has a command, or an option of one: whether this is answered without an error.
pub fn is_understood(server: &Server, words: &[&str]) -> bool {
    let mut command = redis::Cmd::new();
    command.arg(words);
    command.query::<redis::Value>(&mut server.connect()).is_ok()
}

/// The settings under which an operation is measured: a name, and the server with its replica.
pub fn in_all_settings(mut measure: impl FnMut(&str, &Server)) {
    let aof = &["--appendonly", "yes", "--appendfsync", "everysec"];
    for (name, args, with_replica) in [
        ("no AOF, no replica", &[][..], false),
        ("AOF everysec", aof, false),
        ("one replica", &[], true),
        ("AOF everysec, one replica", aof, true),
    ] {
        use crate::pin;
        let server = pin::started_on(pin::CLIENT, || Server::with(args));
        let replica =
            with_replica.then(|| pin::started_on(pin::SERVER, || Server::replica_of(&server)));
        measure(name, &server);
        drop(replica);
    }
}
