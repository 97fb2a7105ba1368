//! What all tests and benchmarks share: a real redis-server with the module that was just built.
//!
//! A test starts its own server, talks to it with `ask!`, and drops it. Nothing here sleeps for
//! a guessed time: whatever takes time is awaited with [`eventually`], which is bounded.

pub mod client;
pub mod cluster;
pub mod connection;
pub mod proxy;
pub mod sentinels;
pub mod stream;
pub mod tls;
pub mod waiting;

use std::collections::BTreeSet;
use std::fmt::Display;
use std::fs::{self, File};
use std::io::Write;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

pub use redis::Value;
use redis::{Connection, RedisError};
use tempfile::TempDir;

/// Far above anything a healthy server needs, so that a slow machine fails no test.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A reply, or the error line as it came over the wire.
pub type Reply = Result<Value, String>;

pub const YES: Reply = Ok(Value::Int(1));
pub const NO: Reply = Ok(Value::Int(0));
pub const NULL: Reply = Ok(Value::Nil);
pub const OK: Reply = Ok(Value::Okay);
pub const WRONGTYPE: &str = "WRONGTYPE Operation against a key holding the wrong kind of value";

/// `ask!(redis, "LOCK.RENEW", key, owner, 1000)`: sends one command and gives its [`Reply`].
#[macro_export]
macro_rules! ask {
    ($redis:expr $(, $arg:expr)+) => {{
        use redis::ConnectionLike as _;
        let mut command = redis::Cmd::new();
        $(command.arg($arg);)+
        $crate::reply($redis.req_command(&command))
    }};
}

pub fn reply(answer: Result<Value, RedisError>) -> Reply {
    let answer = answer.and_then(Value::extract_error);
    answer.map_err(|error| match (error.code(), error.detail()) {
        (Some(code), Some(detail)) => format!("{code} {detail}"),
        _ => error.to_string(),
    })
}

/// The error line of a reply that must be one.
pub fn error(reply: Reply) -> String {
    reply.expect_err("the server should have refused this")
}

/// The number in a reply that must be one.
pub fn number(reply: Reply) -> i64 {
    match reply {
        Ok(Value::Int(number)) => number,
        other => panic!("expected a number, got {other:?}"),
    }
}

/// The fence in the reply to an ACQUIRE that must have been granted.
pub fn fence(reply: Reply) -> i64 {
    let fence = number(reply);
    assert!((1..1 << 53).contains(&fence), "not a fence: {fence}");
    fence
}

pub fn text(bytes: impl AsRef<[u8]>) -> Reply {
    Ok(Value::BulkString(bytes.as_ref().to_vec()))
}

/// What the key of a lock holds.
pub fn lock_value(fence: i64, owner: impl AsRef<[u8]>) -> Vec<u8> {
    [format!("{fence:016}:").as_bytes(), owner.as_ref()].concat()
}

/// The server's clock, in microseconds since 1970.
pub fn clock_us(redis: &mut Connection) -> i64 {
    let (seconds, micros): (i64, i64) = redis::cmd("TIME").query(redis).unwrap();
    seconds * 1_000_000 + micros
}

/// The names of all fields in `INFO lockkeeper`.
pub fn info_fields(redis: &mut Connection) -> BTreeSet<String> {
    let info: String = redis::cmd("INFO").arg("lockkeeper").query(redis).unwrap();
    info.lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(field, _)| field.to_owned())
        .collect()
}

/// One field of `INFO section`, parsed.
pub fn info<T: std::str::FromStr>(redis: &mut Connection, section: &str, field: &str) -> T {
    let info: String = redis::cmd("INFO").arg(section).query(redis).unwrap();
    info.lines()
        .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))
        .and_then(|value| value.parse().ok())
        .unwrap_or_else(|| panic!("no {field} in INFO {section}:\n{info}"))
}

/// Whether the server is at least this version of Redis, or that one of Valkey.
pub fn is_at_least(redis: &mut Connection, of_redis: (u32, u32), of_valkey: (u32, u32)) -> bool {
    let server: String = redis::cmd("INFO").arg("server").query(redis).unwrap();
    let is_valkey = server.contains("valkey_version:");
    let field = if is_valkey {
        "valkey_version"
    } else {
        "redis_version"
    };
    let version: String = info(redis, "server", field);
    let mut numbers = version.split('.').map(|number| number.parse().unwrap());
    let version = (numbers.next().unwrap(), numbers.next().unwrap());
    version >= if is_valkey { of_valkey } else { of_redis }
}

/// Notes that the calling test leaves something out here, and why: what this machine or server lacks.
/// `make test` counts and prints these notes, which are in `target/left-out.txt`.
pub fn skip(why: &str) {
    let thread = std::thread::current();
    let note = format!("{}: {why}\n", thread.name().unwrap_or("a thread"));
    let mut notes = File::options();
    // In one write: other tests append at the same time.
    notes
        .create(true)
        .append(true)
        .open(target().join("left-out.txt"))
        .and_then(|mut notes| notes.write_all(note.as_bytes()))
        .unwrap();
}

/// Settings of a server: every use counts one in an LFU counter, and none is forgotten.
pub const COUNT_EVERY_USE: [&str; 6] = [
    "--maxmemory-policy",
    "allkeys-lfu",
    "--lfu-log-factor",
    "0",
    "--lfu-decay-time",
    "0",
];

/// Waits until `condition` holds; fails the test when it does not within [`PATIENCE`].
#[track_caller]
pub fn eventually(what: impl Display, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "never came true: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The module as released, or the one in LOCKKEEPER_TEST_MODULE: that of another release.
pub fn module() -> &'static Path {
    static MODULE: OnceLock<PathBuf> = OnceLock::new();
    MODULE.get_or_init(|| match std::env::var_os("LOCKKEEPER_TEST_MODULE") {
        Some(module) => module.into(),
        None => release().join("liblockkeeper.so"),
    })
}

/// The module that takes over in an upgrade: the one in LOCKKEEPER_TEST_NEXT_MODULE, or the same once more.
pub fn next_module() -> PathBuf {
    setting("LOCKKEEPER_TEST_NEXT_MODULE", module().to_owned())
}

/// The command `lockkeeper` as released.
pub fn command_line() -> &'static Path {
    static COMMAND: OnceLock<PathBuf> = OnceLock::new();
    COMMAND.get_or_init(|| release().join("lockkeeper"))
}

/// Where `make build` puts things. Builds anew what changed, so that nobody tests a stale module.
fn release() -> PathBuf {
    let target = target();
    // All packages as `make build` does: one alone would be built with other features, and again.
    let mut build = Command::new(env!("CARGO"));
    build
        .args(["build", "--quiet", "--release", "--target-dir"])
        .arg(target)
        .current_dir(root());
    // What cargo passes to a test about its package would make ring's build script run again.
    for (name, _) in std::env::vars() {
        if name.starts_with("CARGO_MANIFEST_") || name.starts_with("CARGO_PKG_") {
            build.env_remove(name);
        }
    }
    assert!(
        build.status().unwrap().success(),
        "the release does not build"
    );
    target.join("release")
}

/// What the environment sets for a run: a seed that repeats it, or how long it is to be.
#[track_caller]
pub fn setting<T: std::str::FromStr>(name: &str, default: T) -> T {
    match std::env::var(name) {
        Ok(value) => match value.parse() {
            Ok(value) => value,
            Err(_) => panic!("{name} cannot be '{value}'"),
        },
        Err(_) => default,
    }
}

/// The folder of the workspace.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// Where cargo builds: this very test is in target/PROFILE/deps, however cargo came to know.
pub fn target() -> &'static Path {
    static TARGET: OnceLock<PathBuf> = OnceLock::new();
    TARGET.get_or_init(|| {
        let test = std::env::current_exe().unwrap();
        test.ancestors().nth(3).unwrap().to_owned()
    })
}

/// The library that lets a test move a server's clock.
fn movable_clock() -> &'static Path {
    static CLOCK: OnceLock<PathBuf> = OnceLock::new();
    CLOCK.get_or_init(|| library("clock"))
}

/// A module for `--loadmodule PATH EVENT USER`: it kills the clients of a user on each keyspace event of a name.
pub fn killer() -> &'static Path {
    static KILLER: OnceLock<PathBuf> = OnceLock::new();
    KILLER.get_or_init(|| library("killer"))
}

/// Builds a library of this folder's C.
fn library(name: &str) -> PathBuf {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let source = sources.join(name).with_extension("c");
    let library = target().join(name).with_extension("so");
    // Under another name first: a server of another test may be loading it.
    let new = library.with_extension(std::process::id().to_string());
    let build = Command::new("cc")
        .args(["-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o"])
        .args([&new, &source])
        .status();
    assert!(
        build.unwrap().success(),
        "{} does not build",
        source.display()
    );
    fs::rename(new, &library).unwrap();
    library
}

/// Runs the tests' own Python, which has redis-py; its standard output.
#[track_caller]
pub fn python(args: &[&str]) -> String {
    let python = root().join(".venv/bin/python");
    assert!(
        python.exists(),
        "no {}: run `make .venv/ready`",
        python.display()
    );
    let run = Command::new(python)
        .args(args)
        .current_dir(root().join("tests/python"))
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    let stdout = String::from_utf8(run.stdout).unwrap();
    assert!(run.status.success(), "{args:?} failed:\n{stdout}");
    stdout
}

/// How a server is to be started.
pub struct Setup {
    /// What follows `--loadmodule`; empty for a server without the module.
    module: Vec<String>,
    args: Vec<String>,
    /// How far the server's clock is ahead of the true one, if it is to be moved.
    clock_ms: Option<i64>,
}

impl Default for Setup {
    /// A server with the module, and otherwise as it comes.
    fn default() -> Setup {
        Setup {
            module: vec![module().display().to_string()],
            args: Vec::new(),
            clock_ms: None,
        }
    }
}

impl Setup {
    pub fn new() -> Setup {
        Setup::default()
    }

    pub fn without_module(mut self) -> Setup {
        self.module.clear();
        self
    }

    /// With this one instead of [`module`].
    pub fn module(mut self, module: &Path) -> Setup {
        self.module = vec![module.display().to_string()];
        self
    }

    pub fn module_arg(mut self, arg: &str) -> Setup {
        self.module.push(arg.to_owned());
        self
    }

    pub fn args(mut self, args: &[&str]) -> Setup {
        self.args.extend(args.iter().map(|arg| arg.to_string()));
        self
    }

    /// Gives the server a wall clock of its own, this far ahead of the true one: see
    /// [`Server::set_clock_ms`].
    pub fn clock_ms(mut self, ahead: i64) -> Setup {
        self.clock_ms = Some(ahead);
        self
    }

    #[track_caller]
    pub fn start(self) -> Server {
        self.try_start()
            .unwrap_or_else(|log| panic!("the server did not start:\n{log}"))
    }

    /// A replica that is in sync when this returns.
    #[track_caller]
    pub fn start_replica_of(self, master: &Server) -> Server {
        let port = master.port.to_string();
        let replica = self.args(&["--replicaof", "127.0.0.1", &port]).start();
        let mut redis = replica.connect();
        eventually("the replica is in sync", || {
            info::<String>(&mut redis, "replication", "master_link_status") == "up"
        });
        replica
    }

    /// The log instead of a server if it ended before it was ready.
    pub fn try_start(self) -> Result<Server, String> {
        let mut server = Server {
            setup: self,
            dir: tempfile::Builder::new()
                .prefix("lockkeeper-")
                .tempdir()
                .unwrap(),
            port: 0,
            child: None,
        };
        let start = Instant::now();
        loop {
            // Free now is not free when the server binds it, hence the next round.
            server.port = free_port();
            match server.launch() {
                Err(log) if port_was_taken(&log) && start.elapsed() < PATIENCE => continue,
                Err(log) => return Err(log),
                Ok(()) => return Ok(server),
            }
        }
    }
}

/// A port that nobody listens at, and that no client is given for its end of a connection: the system takes those from
/// 32,768 on, and thousands come and go while tests run.
pub fn free_port() -> u16 {
    loop {
        let port = fastrand::u16(10_000..32_000);
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

fn port_was_taken(log: &str) -> bool {
    log.contains("Address already in use")
}

/// A running redis-server with a folder, a TCP port and a unix socket of its own.
pub struct Server {
    setup: Setup,
    dir: TempDir,
    port: u16,
    child: Option<Child>,
}

impl Server {
    #[track_caller]
    pub fn start() -> Server {
        Setup::new().start()
    }

    #[track_caller]
    pub fn with(args: &[&str]) -> Server {
        Setup::new().args(args).start()
    }

    /// A replica that is in sync when this returns.
    #[track_caller]
    pub fn replica_of(master: &Server) -> Server {
        Setup::new().start_replica_of(master)
    }

    /// Over the unix socket; no reply takes longer than [`PATIENCE`] without failing the test.
    #[track_caller]
    pub fn connect(&self) -> Connection {
        self.connect_with("")
    }

    /// As [`Server::connect`], speaking RESP3.
    #[track_caller]
    pub fn connect_resp3(&self) -> Connection {
        self.connect_with("?protocol=resp3")
    }

    #[track_caller]
    fn connect_with(&self, query: &str) -> Connection {
        let url = format!("redis+unix://{}{query}", self.socket().display());
        let redis = redis::Client::open(url).unwrap().get_connection().unwrap();
        redis.set_read_timeout(Some(PATIENCE)).unwrap();
        redis
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn socket(&self) -> PathBuf {
        self.dir().join("redis.sock")
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("the server is stopped").id()
    }

    /// The memory of the process that is in RAM, in bytes.
    pub fn resident_bytes(&self) -> i64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let field = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = field.and_then(|value| value.trim().strip_suffix(" kB"));
        1024 * kib.expect("Linux shows it").parse::<i64>().unwrap()
    }

    /// Sends the process a signal, as `kill -s` names it.
    #[track_caller]
    pub fn signal(&self, name: &str) {
        let kill = Command::new("kill")
            .args(["-s", name, &self.pid().to_string()])
            .status();
        assert!(kill.unwrap().success());
    }

    /// All that is in the server's log since its first start.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.dir().join("log")).unwrap()).into_owned()
    }

    pub fn is_running(&mut self) -> bool {
        self.child
            .as_mut()
            .is_some_and(|child| child.try_wait().unwrap().is_none())
    }

    /// As an administrator stops it: SHUTDOWN, which saves if the settings want it.
    #[track_caller]
    pub fn stop(&mut self) {
        let _ = redis::cmd("SHUTDOWN").query::<()>(&mut self.connect());
        eventually("the server has ended", || !self.is_running());
        self.child = None;
    }

    pub fn kill9(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// Starts it again after a stop or a kill: same settings, folder and port.
    #[track_caller]
    pub fn start_again(&mut self) {
        let start = Instant::now();
        while let Err(log) = self.launch() {
            let retry = port_was_taken(&log) && start.elapsed() < PATIENCE;
            assert!(retry, "the server did not start again:\n{log}");
        }
    }

    #[track_caller]
    pub fn restart(&mut self) {
        self.stop();
        self.start_again();
    }

    /// Steps the wall clock of a server that was set up with [`Setup::clock_ms`].
    pub fn set_clock_ms(&self, ahead: i64) {
        // In place, as the server has the file mapped.
        let mut options = File::options();
        options.create(true).write(true).truncate(false);
        let mut file = options.open(self.clock_file()).unwrap();
        file.write_all(&ahead.to_ne_bytes()).unwrap();
    }

    fn clock_file(&self) -> PathBuf {
        self.dir().join("clock")
    }

    /// Starts the process and waits until it answers; else the log of this start.
    fn launch(&mut self) -> Result<(), String> {
        let log = self.dir().join("log");
        let length_before = fs::metadata(&log).map_or(0, |log| log.len() as usize);
        let stdout = File::options()
            .create(true)
            .append(true)
            .open(&log)
            .unwrap();
        let binary = std::env::var_os("LOCKKEEPER_TEST_SERVER").unwrap_or("redis-server".into());
        let mut command = Command::new(&binary);
        command
            .args(["--bind", "127.0.0.1", "--port", &self.port.to_string()])
            .arg("--unixsocket")
            .arg(self.socket())
            .arg("--dir")
            .arg(self.dir())
            .args(["--save", ""])
            // Else a replica waits five seconds for others to come.
            .args(["--repl-diskless-sync-delay", "0"])
            .args([
                "--enable-debug-command",
                "yes",
                "--enable-module-command",
                "yes",
            ]);
        if !self.setup.module.is_empty() {
            command.arg("--loadmodule").args(&self.setup.module);
        }
        command
            .args(&self.setup.args)
            // So that a panic in the module does all that it can do.
            .env("RUST_BACKTRACE", "1")
            .stdin(Stdio::null())
            .stderr(stdout.try_clone().unwrap())
            .stdout(stdout);
        if let Some(ahead) = self.setup.clock_ms {
            // A restart does not set the clock.
            if !self.clock_file().exists() {
                self.set_clock_ms(ahead);
            }
            command
                .env("LD_PRELOAD", movable_clock())
                .env("CLOCK_OFFSET_FILE", self.clock_file());
        }
        let child = command
            .spawn()
            .unwrap_or_else(|error| panic!("{}: {error}", Path::new(&binary).display()));
        self.child = Some(child);

        let start = Instant::now();
        while !self.answers() {
            if !self.is_running() || start.elapsed() > PATIENCE {
                self.kill9();
                return Err(self.log().split_off(length_before));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    fn answers(&self) -> bool {
        let url = format!("redis+unix://{}", self.socket().display());
        redis::Client::open(url)
            .and_then(|client| client.get_connection())
            .and_then(|mut redis| redis::cmd("PING").query::<()>(&mut redis))
            .is_ok()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill9();
        if std::thread::panicking() {
            eprintln!("log of the server on port {}:\n{}", self.port, self.log());
        }
    }
}
