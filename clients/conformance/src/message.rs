//! The messages of AGENTS.md, as the agents in Rust read them. The suite sends no others.

use std::io::Write;
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use crate::agent::now_us;

/// All fields that messages have; each message has some.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Message {
    pub id: u64,
    pub r#do: String,
    /// Of the client that is opened.
    pub name: String,
    pub url: String,
    pub tls: Option<String>,
    pub client: String,
    pub key: String,
    pub ttl_ms: Option<u64>,
    pub wait_ms: Option<u64>,
    pub forever: bool,
    pub label: Option<String>,
    pub max_hold_ms: Option<u64>,
    pub min_replicas: u32,
    pub limit: Option<u32>,
    pub shared: bool,
    /// The message that it was asked for with.
    pub lock: u64,
    /// The message that is cancelled.
    pub of: u64,
    pub body: String,
    pub how: String,
    pub ms: u64,
}

impl Message {
    /// A character stands for each byte.
    pub fn key(&self) -> Vec<u8> {
        self.key.chars().map(|byte| byte as u8).collect()
    }

    pub fn span(&self) -> Duration {
        Duration::from_millis(self.ms)
    }
}

/// Writes a line that says when it was written, unless it says when it was known. One write for each, so that
/// those of several threads do not mix.
pub fn say(mut line: Value) {
    if line["at"].is_null() {
        line["at"] = now_us().into();
    }
    let _ = std::io::stdout().write_all(format!("{line}\n").as_bytes());
}
