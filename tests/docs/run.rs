//! Runs what a page shows, as a reader would: one server and one folder for each page.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;
use testkit::{Server, Setup};

use super::page::{Block, Page};
use super::storages;

/// How often a block of each language was run, and what could not be run here.
#[derive(Default)]
pub struct Tally {
    pub run: BTreeMap<String, usize>,
    pub skipped: Vec<String>,
    pub failed: Vec<String>,
}

/// Languages that are read, not run. What is in them is checked elsewhere or nowhere: `rust` and
/// `help` by tests of their own.
const NOT_RUN: [&str; 3] = ["text", "rust", "help"];

/// Runs all blocks of a page in their order.
pub fn run(page: &Page, tally: &mut Tally) {
    let blocks = page.blocks();
    if blocks
        .iter()
        .all(|block| NOT_RUN.contains(&block.language.as_str()))
    {
        return;
    }
    let desk = Desk::new();
    for (nth, block) in blocks.iter().enumerate() {
        if NOT_RUN.contains(&block.language.as_str()) {
            continue;
        }
        let outcome = match block.file_name() {
            Some(name) => {
                let later = &blocks[nth + 1..];
                desk.save(name, block, later)
            }
            None => desk.run(block),
        };
        match outcome {
            Outcome::Ran => *tally.run.entry(block.language.clone()).or_default() += 1,
            Outcome::Skipped(why) => tally.skipped.push(format!("{}: {why}", block.place)),
            Outcome::Failed(why) => tally.failed.push(format!("{}: {why}", block.place)),
        }
    }
}

pub enum Outcome {
    Ran,
    Skipped(String),
    Failed(String),
}

/// Where the blocks of a page are run.
struct Desk {
    server: Server,
    dir: TempDir,
}

impl Desk {
    fn new() -> Desk {
        let desk = Desk {
            server: Server::start(),
            dir: tempfile::tempdir().unwrap(),
        };
        let bin = desk.bin();
        fs::create_dir_all(&bin).unwrap();
        fs::create_dir_all(desk.work()).unwrap();
        // What a reader types reaches this page's server, and looks as at a terminal.
        let port = desk.server.port();
        tool(
            &bin,
            "redis-cli",
            &format!("exec {} --no-raw -p {port} \"$@\"", which("redis-cli")),
        );
        let python = testkit::root().join(".venv/bin/python");
        tool(
            &bin,
            "python3",
            &format!("exec '{}' \"$@\"", python.display()),
        );
        // From the root of the repository, and into this page's own folder.
        let root = testkit::root().display();
        tool(
            &bin,
            "make",
            &format!("exec {} --silent -C '{root}' \"$@\"", which("make")),
        );
        tool(&bin, "sudo", "exec \"$@\"");
        symlink(testkit::command_line(), bin.join("lockkeeper")).unwrap();
        desk
    }

    fn bin(&self) -> PathBuf {
        self.dir.path().join("bin")
    }

    fn work(&self) -> PathBuf {
        self.dir.path().join("work")
    }

    fn run(&self, block: &Block) -> Outcome {
        if !block.words.iter().any(|word| word == "continued") {
            let _: () = redis::cmd("FLUSHALL")
                .query(&mut self.server.connect())
                .unwrap();
        }
        match block.language.as_str() {
            "redis" => self.redis(block),
            "console" => self.console(block),
            "sh" => self.succeeds("bash", "-euo pipefail", block),
            "python" => self.succeeds("python3", "", block),
            "sql" => storages::run(block),
            "conf" => conf(block),
            other => Outcome::Failed(format!("nobody runs a block of '{other}'")),
        }
    }

    /// A file that a reader saves, and that a later block uses.
    fn save(&self, name: &str, block: &Block, later: &[Block]) -> Outcome {
        fs::write(self.work().join(name), self.here(&block.text)).unwrap();
        let (stem, _) = name.split_once('.').expect("it has an extension");
        if later
            .iter()
            .any(|block| block.text.contains(stem) || block.before.contains(stem))
        {
            Outcome::Ran
        } else {
            Outcome::Failed(format!("no later block uses {name}"))
        }
    }

    /// `> command` and its reply below it. Read by redis-cli itself, as at its prompt.
    fn redis(&self, block: &Block) -> Outcome {
        self.session(block, "> ", |command| {
            format!("redis-cli <<'COMMAND'\n{command}\nCOMMAND")
        })
    }

    /// `$ command` and what it prints below it.
    fn console(&self, block: &Block) -> Outcome {
        self.session(block, "$ ", str::to_owned)
    }

    fn session(&self, block: &Block, prompt: &str, typed: fn(&str) -> String) -> Outcome {
        const MARK: &str = "-- the next command --";
        let mut script = format!("{}\n", block.before);
        let mut expected: Vec<Vec<&str>> = Vec::new();
        for line in block.text.lines() {
            match (line.strip_prefix(prompt), expected.last_mut()) {
                (Some(command), _) => {
                    // So that an exit code shown next is that of the command before.
                    let mark = format!("(code=$?; echo '{MARK}'; exit $code)");
                    script += &format!("{mark}\n{}\n", typed(command));
                    expected.push(Vec::new());
                }
                (None, Some(lines)) => lines.push(line),
                (None, None) => return Outcome::Failed("a reply before any command".to_owned()),
            }
        }
        script += &format!("echo '{MARK}'\n{}", block.after);
        let output = self.start("bash", "", &script);
        let shown = String::from_utf8_lossy(&output.stdout);
        let mut replies: Vec<&str> = shown.split(&format!("{MARK}\n")).skip(1).collect();
        let after = replies.pop().unwrap_or_default();
        if replies.len() != expected.len() || !after.is_empty() {
            return Outcome::Failed(format!("it went otherwise:\n{shown}"));
        }
        for (nth, (reply, expected)) in replies.iter().zip(&expected).enumerate() {
            let reply: Vec<&str> = reply.lines().filter(|line| !line.is_empty()).collect();
            let expected: Vec<&str> = expected
                .iter()
                .copied()
                .filter(|line| !line.is_empty())
                .collect();
            if !agree(&expected, &reply) {
                return Outcome::Failed(format!(
                    "command {}: shown\n{}\nbut it is\n{}",
                    nth + 1,
                    expected.join("\n"),
                    reply.join("\n")
                ));
            }
        }
        Outcome::Ran
    }

    /// A program that must end well.
    fn succeeds(&self, program: &str, options: &str, block: &Block) -> Outcome {
        let script = [&block.before, &block.text, &block.after].map(String::as_str);
        let output = self.start(program, options, &script.join("\n"));
        if output.status.success() {
            return Outcome::Ran;
        }
        let shown = String::from_utf8_lossy(&output.stdout);
        Outcome::Failed(format!("{}\n{shown}", output.status))
    }

    fn start(&self, program: &str, options: &str, script: &str) -> Output {
        let file = self.work().join("block");
        fs::write(&file, self.here(script)).unwrap();
        let path = format!(
            "{}:{}",
            self.bin().display(),
            std::env::var("PATH").unwrap()
        );
        // Errors are shown where they happen, as at a terminal.
        let all = format!("exec {program} {options} '{}' 2>&1", file.display());
        let mut command = Command::new("bash");
        command
            .args(["-c", &all])
            .current_dir(self.work())
            .env("PATH", path)
            .env("REDIS_URL", self.server.url())
            .env("DESTDIR", self.dir.path().join("root"))
            .env("CARGO_TARGET_DIR", testkit::target())
            .stdin(Stdio::null());
        // What cargo tells a test about its package would make a block that builds build anew.
        for (name, _) in std::env::vars() {
            if name.starts_with("CARGO_") && name != "CARGO_HOME" && name != "CARGO_TARGET_DIR" {
                command.env_remove(name);
            }
        }
        command.output().unwrap()
    }

    fn here(&self, text: &str) -> String {
        let port = self.server.port();
        ["localhost", "127.0.0.1"]
            .iter()
            .fold(text.to_owned(), |text, host| {
                text.replace(&format!("{host}:6379"), &format!("127.0.0.1:{port}"))
            })
    }
}

/// Lines of redis.conf: a server starts with them.
fn conf(block: &Block) -> Outcome {
    let file = tempfile::NamedTempFile::new().unwrap();
    let text = block.text.replace(
        "/usr/lib/redis/modules/liblockkeeper.so",
        testkit::module().to_str().unwrap(),
    );
    fs::write(file.path(), text).unwrap();
    let setup = Setup::new().args(&["--include", file.path().to_str().unwrap()]);
    let loads = block
        .text
        .lines()
        .any(|line| line.starts_with("loadmodule "));
    let setup = if loads { setup.without_module() } else { setup };
    match setup.try_start() {
        Ok(_) => Outcome::Ran,
        Err(log) => Outcome::Failed(log),
    }
}

fn tool(folder: &Path, name: &str, script: &str) {
    let path = folder.join(name);
    fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// The full path of a program, so that ours of the same name can call it.
fn which(program: &str) -> String {
    let found = Command::new("sh")
        .args(["-c", &format!("command -v {program}")])
        .output()
        .unwrap();
    String::from_utf8(found.stdout).unwrap().trim().to_owned()
}

/// Whether the lines are those that were shown. A line of three dots stands for any number of them.
fn agree(expected: &[&str], lines: &[&str]) -> bool {
    match expected.split_first() {
        None => lines.is_empty(),
        Some((&("…" | "..."), rest)) => {
            (0..=lines.len()).any(|skipped| agree(rest, &lines[skipped..]))
        }
        Some((first, rest)) => lines.split_first().is_some_and(|(line, lines)| {
            alike(&without_comment(first)) == alike(line) && agree(rest, lines)
        }),
    }
}

/// `(integer) 1   # explained`: the explanation is for readers.
fn without_comment(line: &str) -> String {
    match line.split_once("  # ") {
        Some((reply, _)) => reply.trim_end().to_owned(),
        None => line.to_owned(),
    }
}

/// A line of which only what may differ from one run to the next is left out: numbers of 16 digits
/// (fences, clocks), process numbers in a default label, and milliseconds that have just passed.
fn alike(line: &str) -> String {
    let line = without_long_numbers(line.trim_end());
    match line.rsplit_once("(integer) ") {
        // What is left of a ttl of 30 s, and how long it has been held, within the time a test takes.
        Some((place, number)) if (20_000..=30_000).contains(&number.parse().unwrap_or(0)) => {
            format!("{place}(integer) 30000")
        }
        Some((place @ " 6) ", number)) if number.parse().is_ok_and(|held: u64| held < 10_000) => {
            format!("{place}(integer) 0")
        }
        _ => line,
    }
}

fn without_long_numbers(text: &str) -> String {
    let mut kept = String::new();
    let mut digits = String::new();
    for char in text.chars().chain([' ']) {
        if char.is_ascii_digit() {
            digits.push(char);
        } else {
            kept.push_str(if digits.len() == 16 && !digits.starts_with('9') {
                "N"
            } else {
                &digits
            });
            digits.clear();
            kept.push(char);
        }
    }
    kept.trim_end().to_owned()
}
