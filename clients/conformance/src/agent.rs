//! An agent: a process that holds locks through the helper of its language, and does what it is told.
//!
//! It is told by JSON lines on its standard input, and answers on its standard output. What the lines
//! say is in AGENTS.md.

use std::collections::HashMap;
use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Map, Value, json};
use testkit::proxy::Proxy;
use testkit::{PATIENCE, Server};

use crate::message::Message;

/// The clock that agents tell the time by: microseconds since boot, suspend included.
pub fn now_us() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1000
}

/// How an agent is started.
pub struct Kind {
    pub name: &'static str,
    program: PathBuf,
    args: Vec<String>,
    env: Vec<(&'static str, PathBuf)>,
}

impl Kind {
    pub fn new(name: &'static str, program: impl Into<PathBuf>) -> Kind {
        Kind {
            name,
            program: program.into(),
            args: Vec::new(),
            env: Vec::new(),
        }
    }

    pub fn arg(mut self, arg: impl Into<String>) -> Kind {
        self.args.push(arg.into());
        self
    }

    pub fn env(mut self, name: &'static str, value: PathBuf) -> Kind {
        self.env.push((name, value));
        self
    }

    /// Whether there is what runs it.
    pub fn is_here(&self) -> bool {
        self.program.exists()
    }

    pub fn program(&self) -> &PathBuf {
        &self.program
    }

    /// A process that has said hello.
    #[track_caller]
    pub fn start(&self) -> Agent {
        let mut process = Command::new(&self.program)
            .args(&self.args)
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{}: {error}", self.program.display()));
        let said = Arc::new(Said::default());
        let (stdout, stderr) = (process.stdout.take(), process.stderr.take());
        let (listener, reader) = (said.clone(), said.clone());
        std::thread::spawn(move || listener.listen(BufReader::new(stdout.unwrap())));
        std::thread::spawn(move || reader.read_log(BufReader::new(stderr.unwrap())));
        let stdin = Mutex::new(process.stdin.take());
        let mut agent = Agent {
            process: Mutex::new(process),
            stdin,
            said,
            sent: AtomicU64::new(0),
            clients: Mutex::default(),
            hello: Value::Null,
        };
        agent.hello = agent.line("hello", |line| line["event"] == "hello");
        agent
    }
}

/// All that an agent has said.
#[derive(Default)]
struct Said {
    lines: Mutex<Lines>,
    changed: Condvar,
}

#[derive(Default)]
struct Lines {
    all: Vec<Value>,
    /// The number of the line that answers a message.
    answers: HashMap<u64, usize>,
    ended: bool,
}

impl Said {
    fn listen(&self, stdout: impl BufRead) {
        for line in stdout.lines() {
            let Ok(line) = line else { break };
            let line = serde_json::from_str(&line)
                .unwrap_or_else(|error| json!({"garbage": line, "error": error.to_string()}));
            self.lines.lock().unwrap().push(line);
            self.changed.notify_all();
        }
        self.lines.lock().unwrap().ended = true;
        self.changed.notify_all();
    }

    /// What is logged is an event too.
    fn read_log(&self, stderr: impl BufRead) {
        for line in stderr.lines().map_while(Result::ok) {
            let line = json!({"event": "log", "text": line});
            self.lines.lock().unwrap().push(line);
            self.changed.notify_all();
        }
    }
}

impl Lines {
    fn push(&mut self, line: Value) {
        if let Some(id) = line["re"].as_u64() {
            self.answers.insert(id, self.all.len());
        }
        self.all.push(line);
    }

    fn answer(&self, id: u64) -> Option<&Value> {
        self.answers.get(&id).map(|number| &self.all[*number])
    }
}

/// A running agent. Dropping it kills it: what it holds then ends by its ttl.
pub struct Agent {
    process: Mutex<Child>,
    stdin: Mutex<Option<ChildStdin>>,
    said: Arc<Said>,
    sent: AtomicU64,
    /// The names of those it has opened.
    clients: Mutex<Vec<String>>,
    hello: Value,
}

impl Agent {
    /// What the helper, or its language, can do.
    pub fn can(&self) -> Vec<String> {
        let can = self.hello["can"].as_array().into_iter().flatten();
        can.map(|word| word.as_str().unwrap().to_owned()).collect()
    }

    pub fn pid(&self) -> u32 {
        self.process.lock().unwrap().id()
    }

    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.pid() as i32).unwrap();
        kill_process(pid, signal).unwrap();
    }

    pub fn kill9(&self) {
        let mut process = self.process.lock().unwrap();
        process.kill().unwrap();
        process.wait().unwrap();
    }

    /// The first line for which this is true, now or soon.
    #[track_caller]
    pub fn line(&self, what: &str, is_it: impl Fn(&Value) -> bool) -> Value {
        let mut seen = 0;
        let line = self.find_unless_it_ends(what, |lines| {
            let new = &lines.all[seen..];
            seen = lines.all.len();
            new.iter().find(|line| is_it(line))
        });
        line.unwrap_or_else(|| panic!("the agent ended without saying {what}"))
    }

    #[track_caller]
    fn find_unless_it_ends(
        &self,
        what: &str,
        mut find: impl FnMut(&Lines) -> Option<&Value>,
    ) -> Option<Value> {
        let mut lines = self.said.lines.lock().unwrap();
        let deadline = Instant::now() + PATIENCE * 2;
        loop {
            if let Some(line) = find(&lines) {
                return Some(line.clone());
            }
            if lines.ended {
                return None;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(lines);
                panic!("the agent goes on without saying {what}");
            }
            lines = self.said.changed.wait_timeout(lines, left).unwrap().0;
        }
    }

    /// What it has said so far that this is true of.
    pub fn lines(&self, is_it: impl Fn(&Value) -> bool) -> Vec<Value> {
        let lines = self.said.lines.lock().unwrap();
        lines
            .all
            .iter()
            .filter(|line| is_it(line))
            .cloned()
            .collect()
    }

    fn send(&self, what: &str, mut fields: Map<String, Value>) -> Pending<'_> {
        let id = self.sent.fetch_add(1, Ordering::Relaxed) + 1;
        fields.insert("id".into(), id.into());
        fields.insert("do".into(), what.into());
        let fields = Value::Object(fields);
        let line = format!("{fields}\n");
        let is_known = serde_json::from_value::<Message>(fields);
        is_known.unwrap_or_else(|error| panic!("{error}: {line}"));
        let mut stdin = self.stdin.lock().unwrap();
        // One that has ended is told of when its answer is awaited.
        let _ = stdin.as_mut().unwrap().write_all(line.as_bytes());
        Pending { agent: self, id }
    }

    /// Sends a message; `fields` is an object.
    pub fn begin(&self, what: &str, fields: Value) -> Pending<'_> {
        let Value::Object(fields) = fields else {
            panic!("{fields} is no object")
        };
        self.send(what, fields)
    }

    #[track_caller]
    pub fn ask(&self, what: &str, fields: Value) -> Answer {
        self.begin(what, fields).answer()
    }

    /// A client of the server, or proxy, or place.
    #[track_caller]
    pub fn open(&self, place: &impl Place) -> Client<'_> {
        self.open_with(place, json!({}))
    }

    /// The same with more fields in the message.
    #[track_caller]
    pub fn open_with(&self, place: &impl Place, more: Value) -> Client<'_> {
        let name = format!("client {}", self.sent.load(Ordering::Relaxed));
        let mut fields = json!({"name": name, "url": place.url()});
        let more = more.as_object().unwrap().clone();
        fields.as_object_mut().unwrap().extend(more);
        assert_eq!(self.ask("open", fields), "yes");
        self.clients.lock().unwrap().push(name.clone());
        Client { agent: self, name }
    }

    /// Waits until all that was given up has been released.
    #[track_caller]
    pub fn settled(&self) {
        for client in self.clients.lock().unwrap().iter() {
            let settled = json!({"client": client, "ms": 30_000});
            assert_eq!(self.ask("settled", settled), "yes");
        }
    }

    /// Lets it end as a program ends that has nothing more to do, and waits for that.
    #[track_caller]
    pub fn end(&self) {
        drop(self.stdin.lock().unwrap().take());
        let mut process = self.process.lock().unwrap();
        testkit::eventually("the agent has ended", || {
            process.try_wait().unwrap().is_some()
        });
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let process = self.process.get_mut().unwrap();
        let _ = (process.kill(), process.wait());
        if std::thread::panicking() {
            let said = self.said.lines.lock();
            let said = said.unwrap_or_else(std::sync::PoisonError::into_inner);
            let last = said.all.len().saturating_sub(30);
            for line in &said.all[last..] {
                eprintln!("the agent said: {line}");
            }
        }
    }
}

/// Where a client is to find its server.
pub trait Place {
    /// The `url` of the message `open`.
    fn url(&self) -> String;
}

impl Place for Server {
    fn url(&self) -> String {
        Server::url(self)
    }
}

impl Place for Proxy {
    fn url(&self) -> String {
        Proxy::url(self)
    }
}

impl Place for String {
    fn url(&self) -> String {
        self.clone()
    }
}

/// A message that may not have been answered yet.
#[derive(Clone, Copy)]
pub struct Pending<'a> {
    agent: &'a Agent,
    id: u64,
}

impl<'a> Pending<'a> {
    #[track_caller]
    pub fn answer(self) -> Answer {
        let answer = self.answer_unless_it_ends();
        answer.unwrap_or_else(|| panic!("the agent ended without an answer to {}", self.id))
    }

    /// Of an agent that may be killed meanwhile.
    #[track_caller]
    pub fn answer_unless_it_ends(self) -> Option<Answer> {
        let what = format!("what became of message {}", self.id);
        let answer = self
            .agent
            .find_unless_it_ends(&what, |lines| lines.answer(self.id));
        answer.map(Answer)
    }

    pub fn is_answered(self) -> bool {
        let lines = self.agent.said.lines.lock().unwrap();
        lines.answer(self.id).is_some()
    }

    /// The lock that it must have been granted.
    #[track_caller]
    pub fn held(self) -> Held<'a> {
        let answer = self.answer();
        assert_eq!(answer, "yes");
        Held {
            agent: self.agent,
            id: self.id,
            fence: answer.number("fence"),
            owner: answer.text("owner"),
            remaining: answer.remaining(),
            at: answer.at(),
        }
    }

    /// Cancels it when so much time has passed.
    #[track_caller]
    pub fn cancel_after(self, span: Duration) -> Pending<'a> {
        // Finer than it could sleep.
        let start = Instant::now();
        while start.elapsed() < span {
            std::thread::yield_now();
        }
        self.cancel();
        self
    }

    #[track_caller]
    pub fn cancel(self) {
        assert_eq!(self.agent.ask("cancel", json!({"of": self.id})), "yes");
    }

    /// When its body `began`, or `ended`.
    #[track_caller]
    pub fn body(self, event: &str) -> u64 {
        let line = self.agent.line(&format!("body {event}"), |line| {
            line["event"] == event && line["of"] == self.id
        });
        line["at"].as_u64().unwrap()
    }
}

/// What a message was answered. Compares as its word, with the reason of a loss: `yes`, `busy`, `lost: gone`,
/// `unreachable`.
#[derive(Clone)]
pub struct Answer(pub Value);

impl Answer {
    fn summary(&self) -> String {
        let field = |name: &str| self.0[name].as_str().unwrap_or("?").to_owned();
        match field("answer").as_str() {
            "lost" => format!("lost: {}", field("why")),
            word => word.to_owned(),
        }
    }

    /// When it was known, by [`now_us`].
    #[track_caller]
    pub fn at(&self) -> u64 {
        self.number("at")
    }

    #[track_caller]
    pub fn number(&self, field: &str) -> u64 {
        let number = self.0[field].as_u64();
        number.unwrap_or_else(|| panic!("no number {field} in {self:?}"))
    }

    #[track_caller]
    pub fn text(&self, field: &str) -> String {
        let text = self.0[field].as_str();
        text.unwrap_or_else(|| panic!("no {field} in {self:?}"))
            .to_owned()
    }

    #[track_caller]
    pub fn remaining(&self) -> Duration {
        Duration::from_micros(self.number("remaining_us"))
    }
}

impl PartialEq<&str> for Answer {
    fn eq(&self, other: &&str) -> bool {
        self.summary() == *other
    }
}

impl fmt::Debug for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.summary(), self.0)
    }
}

/// A client that an agent has opened.
pub struct Client<'a> {
    pub agent: &'a Agent,
    pub name: String,
}

impl<'a> Client<'a> {
    /// One try; see the setters for more.
    pub fn acquire(&self, key: &str) -> Acquire<'a> {
        self.message("acquire", json!({"key": key}))
    }

    /// A body that runs under the lock for so many ms, and then ends by `return`, `fail` or `panic`.
    pub fn run(&self, key: &str, body: &str, ms: u64) -> Acquire<'a> {
        self.message("run", json!({"key": key, "body": body, "ms": ms}))
    }

    /// A message about this client.
    pub fn message(&self, what: &'static str, fields: Value) -> Acquire<'a> {
        let mut fields = fields.as_object().unwrap().clone();
        fields.insert("client".into(), self.name.as_str().into());
        Acquire {
            agent: self.agent,
            what,
            fields,
        }
    }

    /// A lock that must be free, with a ttl in ms.
    #[track_caller]
    pub fn hold(&self, key: &str, ttl_ms: u64) -> Held<'a> {
        self.acquire(key).ttl(ttl_ms).held()
    }

    /// A wait of so many ms that has begun.
    pub fn wait_for(&self, key: &str, ttl_ms: u64, wait_ms: u64) -> Pending<'a> {
        self.acquire(key).ttl(ttl_ms).wait(wait_ms).begin()
    }

    /// Makes the connection that later questions use.
    #[track_caller]
    pub fn connect(&self) {
        self.info("nobody's");
    }

    /// Who holds and who waits, in the agent's opinion.
    #[track_caller]
    pub fn info(&self, key: &str) -> Value {
        let answer = self.message("info", json!({"key": key})).answer();
        assert_eq!(answer, "yes");
        let info = answer.0["info"].as_object();
        info.map_or(Value::Null, told)
    }

    /// Waits for as long until all that was given up has been released.
    #[track_caller]
    pub fn settled(&self, ms: u64) -> Answer {
        self.message("settled", json!({"ms": ms})).answer()
    }
}

/// What the scenarios look at, in their own words.
fn told(info: &Map<String, Value>) -> Value {
    let field = |of: &Map<String, Value>, name: &str| {
        let found = of
            .iter()
            .find(|(field, _)| field.eq_ignore_ascii_case(name));
        found.map_or(Value::Null, |(_, value)| value.clone())
    };
    let nothing = |value: &Value| value == "" || value == 0;
    let if_any = |name: &str| Some(field(info, name)).filter(|value| !nothing(value));
    let holders = field(info, "holders");
    let holders = holders.as_array().into_iter().flatten();
    let owners = holders.map(|holder| field(holder.as_object().unwrap(), "owner"));
    json!({
        "owner": if_any("owner"), "fence": if_any("fence"), "limit": if_any("limit"),
        "waiters": field(info, "waiters"), "holding": field(info, "holding"),
        "holders": owners.collect::<Vec<_>>(),
    })
}

/// A message that is being put together. Times are in milliseconds.
pub struct Acquire<'a> {
    agent: &'a Agent,
    what: &'static str,
    fields: Map<String, Value>,
}

impl<'a> Acquire<'a> {
    pub fn with(mut self, field: &str, value: impl Into<Value>) -> Self {
        self.fields.insert(field.to_owned(), value.into());
        self
    }

    pub fn ttl(self, ms: u64) -> Self {
        self.with("ttl_ms", ms)
    }

    pub fn wait(self, ms: u64) -> Self {
        self.with("wait_ms", ms)
    }

    pub fn wait_forever(self) -> Self {
        self.with("forever", true)
    }

    /// One of so many places.
    pub fn limit(self, limit: u64) -> Self {
        self.with("limit", limit)
    }

    pub fn shared(self) -> Self {
        self.with("shared", true)
    }

    pub fn begin(self) -> Pending<'a> {
        self.agent.send(self.what, self.fields)
    }

    #[track_caller]
    pub fn answer(self) -> Answer {
        self.begin().answer()
    }

    #[track_caller]
    pub fn held(self) -> Held<'a> {
        self.begin().held()
    }
}

/// A lock that an agent was granted.
pub struct Held<'a> {
    agent: &'a Agent,
    id: u64,
    pub fence: u64,
    pub owner: String,
    /// What remained when it was handed out.
    pub remaining: Duration,
    /// When it was handed out, by [`now_us`].
    pub at: u64,
}

impl Held<'_> {
    pub fn begin(&self, what: &str, more: Value) -> Pending<'_> {
        let mut fields = more.as_object().unwrap().clone();
        fields.insert("lock".into(), self.id.into());
        self.agent.send(what, fields)
    }

    #[track_caller]
    pub fn ask(&self, what: &str) -> Answer {
        self.begin(what, json!({})).answer()
    }

    #[track_caller]
    pub fn renew(&self) -> Answer {
        self.ask("renew")
    }

    #[track_caller]
    pub fn extend(&self, ms: u64) -> Answer {
        self.begin("extend", json!({"ms": ms})).answer()
    }

    /// To be the only holder.
    #[track_caller]
    pub fn upgrade(&self) -> Answer {
        self.ask("upgrade")
    }

    /// To share it.
    #[track_caller]
    pub fn downgrade(&self) -> Answer {
        self.ask("downgrade")
    }

    #[track_caller]
    pub fn release(&self) -> Answer {
        self.ask("release")
    }

    #[track_caller]
    pub fn release_after(&self, ms: u64) -> Answer {
        self.begin("release_after", json!({"ms": ms})).answer()
    }

    /// What remains now, in the agent's opinion.
    #[track_caller]
    pub fn remaining(&self) -> Duration {
        self.ask("remaining").remaining()
    }

    /// Why it is lost, in the agent's opinion, if it is.
    #[track_caller]
    pub fn lost_now(&self) -> Option<String> {
        let answer = self.ask("remaining");
        answer.0["lost"].as_str().map(str::to_owned)
    }

    /// Waits until the agent says that it is lost: why, and when it knew.
    #[track_caller]
    pub fn lost(&self) -> (String, u64) {
        let line = self
            .agent
            .line("that it is lost", |line| self.is_loss(line));
        let why = line["why"].as_str().unwrap().to_owned();
        (why, line["at"].as_u64().unwrap())
    }

    /// How often the agent has said so.
    pub fn times_lost(&self) -> usize {
        self.agent.lines(|line| self.is_loss(line)).len()
    }

    fn is_loss(&self, line: &Value) -> bool {
        line["event"] == "lost" && line["lock"] == self.id
    }
}
