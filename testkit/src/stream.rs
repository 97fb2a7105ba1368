//! What leaves the master: the replication stream and the append-only file, as commands.

use std::fmt;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;

use super::{PATIENCE, Server, ask};
pub use crate::command;

/// One command as it was propagated: its name and arguments.
#[derive(Clone, PartialEq)]
pub struct Propagated(pub Vec<Vec<u8>>);

impl fmt::Debug for Propagated {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        let words = self.0.iter().map(|word| word.escape_ascii());
        out.debug_list()
            .entries(words.map(|word| word.to_string()))
            .finish()
    }
}

/// `command!("DEL", key)`, to compare with what was propagated.
#[macro_export]
macro_rules! command {
    ($($word:expr),+) => {
        $crate::stream::Propagated(redis::Cmd::new()$(.arg($word))+.args_iter()
            .map(|arg| match arg {
                redis::Arg::Simple(bytes) => bytes.to_vec(),
                _ => unreachable!("only bytes are propagated"),
            })
            .collect())
    };
}

/// A connection that is a replica as far as the master can tell.
pub struct Stream {
    master: BufReader<UnixStream>,
    control: redis::Connection,
    marks: u32,
}

impl Stream {
    /// Everything the master propagates from now on.
    pub fn of(master: &Server) -> Stream {
        let mut socket = UnixStream::connect(master.socket()).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket.write_all(b"PSYNC ? -1\r\n").unwrap();
        let mut master_side = BufReader::new(socket);
        skip_snapshot(&mut master_side);
        Stream {
            master: master_side,
            control: master.connect(),
            marks: 0,
        }
    }

    /// The commands propagated since the last call, without the SELECT and PING of the core.
    pub fn take(&mut self) -> Vec<Propagated> {
        self.marks += 1;
        let mark = command!("PUBLISH", "mark", self.marks);
        ask!(self.control, "PUBLISH", "mark", self.marks).unwrap();
        let mut commands = Vec::new();
        loop {
            let next = read_command(&mut self.master).expect("the master closed the stream");
            if next == mark {
                return commands;
            }
            if !is_of_the_core(&next) {
                commands.push(next);
            }
        }
    }
}

/// The commands in the append-only file since it was last rewritten.
pub fn append_only_file(server: &Server) -> Vec<Propagated> {
    let folder = fs::read_dir(server.dir().join("appendonlydir")).unwrap();
    let mut files: Vec<_> = folder.map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.to_string_lossy().ends_with(".incr.aof"));
    files.sort();
    let text: Vec<u8> = files
        .iter()
        .flat_map(|path| fs::read(path).unwrap())
        .collect();
    std::iter::from_fn({
        let mut text = &text[..];
        move || read_command(&mut text)
    })
    .filter(|command| !is_of_the_core(command))
    .collect()
}

fn is_of_the_core(command: &Propagated) -> bool {
    ["SELECT", "PING", "REPLCONF"]
        .iter()
        .any(|name| command.0[0].eq_ignore_ascii_case(name.as_bytes()))
}

fn skip_snapshot(master: &mut impl BufRead) {
    let answer = read_line(master).unwrap();
    assert!(answer.starts_with("+FULLRESYNC"), "{answer}");
    let length = read_line(master).unwrap();
    let length = length
        .strip_prefix('$')
        .and_then(|length| length.parse().ok());
    std::io::copy(&mut master.take(length.unwrap()), &mut std::io::sink()).unwrap();
}

fn read_command(from: &mut impl BufRead) -> Option<Propagated> {
    let count = read_length(from, '*')?;
    Some(Propagated(
        (0..count).map(|_| read_argument(from)).collect(),
    ))
}

fn read_argument(from: &mut impl BufRead) -> Vec<u8> {
    let length = read_length(from, '$').expect("an argument");
    let mut bytes = vec![0; length + 2];
    from.read_exact(&mut bytes).unwrap();
    assert_eq!(bytes.split_off(length), b"\r\n");
    bytes
}

fn read_length(from: &mut impl BufRead, kind: char) -> Option<usize> {
    let line = read_line(from)?;
    let length = line
        .strip_prefix(kind)
        .and_then(|length| length.parse().ok());
    Some(length.unwrap_or_else(|| panic!("expected {kind} and a length, got {line:?}")))
}

/// The next line that is not empty: the master sends empty ones to keep the connection alive.
fn read_line(from: &mut impl BufRead) -> Option<String> {
    loop {
        let mut line = String::new();
        if from.read_line(&mut line).unwrap() == 0 {
            return None;
        }
        if line != "\n" {
            return Some(line.trim_end().to_owned());
        }
    }
}
