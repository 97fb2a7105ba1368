//! A connection that costs as little as can be, so that what is measured is the server.
//!
//! Commands are packed beforehand, and of replies only the lines are counted.

use std::io::{Read, Write};
use std::net::TcpStream;

use crate::{PATIENCE, Server};

/// A command as it goes over the wire.
pub fn pack(words: &[&str]) -> Vec<u8> {
    let mut command = redis::Cmd::new();
    command.arg(words);
    command.get_packed_command()
}

pub struct RawConnection {
    stream: TcpStream,
    received: Vec<u8>,
}

impl RawConnection {
    pub fn to(server: &Server) -> RawConnection {
        RawConnection::to_port(server.port())
    }

    pub fn to_port(port: u16) -> RawConnection {
        let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let received = Vec::with_capacity(1 << 16);
        RawConnection { stream, received }
    }

    /// Lets more clients wait than a server allows by default, also for one key.
    pub fn let_many_wait(&mut self) {
        for setting in ["lockkeeper.max-waiters", "lockkeeper.max-waiters-per-key"] {
            self.ask(&pack(&["CONFIG", "SET", setting, "10000"]));
        }
    }

    pub fn send(&mut self, packed: &[u8]) {
        self.stream.write_all(packed).unwrap();
    }

    /// Reads so many lines: one for each number, status or null, two for each string.
    #[track_caller]
    pub fn receive(&mut self, lines: usize) -> &[u8] {
        self.received.clear();
        let mut seen = 0;
        let mut chunk = [0; 1 << 14];
        while seen < lines {
            let read = self.stream.read(&mut chunk).expect("the server answers");
            assert!(read > 0, "the server closed the connection");
            seen += chunk[..read].iter().filter(|byte| **byte == b'\n').count();
            self.received.extend_from_slice(&chunk[..read]);
        }
        let received = &self.received[..];
        let text = || String::from_utf8_lossy(received);
        assert!(seen == lines, "more than {lines} lines: {}", text());
        // An error line may only be the first: checked once, not for each line, while time is running.
        assert!(received[0] != b'-', "the server refused: {}", text());
        received
    }

    /// One command with a reply of one line.
    #[track_caller]
    pub fn ask(&mut self, packed: &[u8]) -> &[u8] {
        self.send(packed);
        self.receive(1)
    }

    /// The number in a reply of one line; none if it is null.
    #[track_caller]
    pub fn number(&mut self) -> Option<i64> {
        let line = self.receive(1);
        let text = std::str::from_utf8(line).unwrap().trim_end();
        text.strip_prefix(':').map(|number| number.parse().unwrap())
    }
}
