//! What the tests of the helper share.

use std::time::Duration;

use lockkeeper::{Acquired, Held, Lockkeeper};

use super::{PATIENCE, Server};

pub fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

pub fn open(server: &Server) -> Lockkeeper {
    Lockkeeper::open(server.url()).unwrap()
}

/// A lock that must be free.
pub async fn hold(lockkeeper: &Lockkeeper, key: &str, ttl: Duration) -> Held {
    let held = lockkeeper.acquire(key).ttl(ttl).await.unwrap();
    held.expect("it is free")
}

/// Whether the lock was granted. It is released at once.
pub fn is_held(acquired: Acquired) -> bool {
    matches!(acquired, Acquired::Yes(_))
}

/// How often the server was asked to do `command`, which is lower-case.
pub fn calls(server: &Server, command: &str) -> u64 {
    let stats: String = redis::cmd("INFO")
        .arg("commandstats")
        .query(&mut server.connect())
        .unwrap();
    let field = format!("cmdstat_{command}:calls=");
    let calls = stats
        .lines()
        .find_map(|line| line.strip_prefix(&field)?.split(',').next());
    calls.map_or(0, |calls| calls.parse().unwrap())
}

/// Fails the test instead of hanging it.
pub async fn soon<T>(future: impl Future<Output = T>) -> T {
    let limited = tokio::time::timeout(PATIENCE, future).await;
    limited.expect("it takes far too long")
}
