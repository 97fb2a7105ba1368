//! What this program logs, as whoever runs it sees it.

use std::io;
use std::sync::{Mutex, Once};

use tracing_subscriber::filter::LevelFilter;

static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());

struct Log;

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        LOG.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// To be called before what is to be in the log.
pub fn start() {
    static START: Once = Once::new();
    START.call_once(|| {
        tracing_subscriber::fmt()
            .with_ansi(false)
            .with_writer(|| Log)
            .with_max_level(LevelFilter::DEBUG)
            .init();
    });
}

/// The lines about a key, which no other test has, with this level and this text.
pub fn lines(key: &str, level: &str, text: &str) -> Vec<String> {
    let log = String::from_utf8(LOG.lock().unwrap().clone()).unwrap();
    let about = format!("key={key} ");
    let is_it = |line: &&str| line.contains(&about) && line.contains(level) && line.contains(text);
    log.lines().filter(is_it).map(str::to_owned).collect()
}
