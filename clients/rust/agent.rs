//! The agent of the Rust helper for the conformance suite: does what the lines on its standard input say. The
//! messages are in clients/conformance/AGENTS.md, and that package builds it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io::Write;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lockkeeper::{
    Acquire, Acquired, Downgraded, Error, Held, Lockkeeper, Lost, Ran, Released, Renewed, Upgraded,
};
use lockkeeper_conformance::agent::now_us;
use serde_json::{Value, json};
use tokio::task::{AbortHandle, JoinSet, LocalSet, spawn_blocking, spawn_local};

/// One write for each line, so that those of several threads do not mix.
fn say(mut line: Value) {
    if line["at"].is_null() {
        line["at"] = now_us().into();
    }
    let _ = std::io::stdout().write_all(format!("{line}\n").as_bytes());
}

fn text<'a>(message: &'a Value, field: &str) -> &'a str {
    message[field].as_str().unwrap_or_default()
}

fn number(message: &Value, field: &str, default: u64) -> u64 {
    message[field].as_u64().unwrap_or(default)
}

fn ms(message: &Value, field: &str) -> Option<Duration> {
    message[field].as_u64().map(Duration::from_millis)
}

fn us(duration: Duration) -> u64 {
    duration.as_micros() as u64
}

fn why(lost: Lost) -> &'static str {
    match lost {
        Lost::Taken => "taken",
        Lost::Gone => "gone",
        Lost::Expired => "expired",
        Lost::MaxHold => "max_hold",
    }
}

fn kind(error: &Error) -> &'static str {
    match error {
        Error::Invalid(_) => "invalid",
        Error::Refused(_) => "refused",
        Error::Forked => "forked",
        _ => "unreachable",
    }
}

fn is(answer: &str) -> Value {
    json!({"answer": answer})
}

fn lost(lost: Lost) -> Value {
    json!({"answer": "lost", "why": why(lost)})
}

fn renewed(renewed: Renewed) -> Value {
    match renewed {
        Renewed::Yes => is("yes"),
        Renewed::Lost(why) => lost(why),
    }
}

fn granted_anew(held: &Held) -> Value {
    json!({"answer": "yes", "fence": held.fence(), "remaining_us": us(held.remaining())})
}

fn released(released: Released) -> Value {
    match released {
        Released::Yes => is("yes"),
        Released::Lost(why) => lost(why),
    }
}

fn state(held: &Held) -> Value {
    json!({"answer": "value", "remaining_us": us(held.remaining()), "lost": held.loss().map(why)})
}

fn url(place: &Value) -> String {
    let addresses = place["addresses"].as_array().into_iter().flatten();
    let addresses: Vec<_> = addresses.filter_map(Value::as_str).collect();
    let at = match text(place, "user") {
        "" => addresses.join(","),
        user => format!("{user}:{}@{}", text(place, "password"), addresses.join(",")),
    };
    let redis = ["redis", "rediss"][usize::from(!place["tls"].is_null())];
    let (db, resp) = (number(place, "db", 0), number(place, "resp", 2));
    match text(place, "kind") {
        "unix" => format!("unix://{}?db={db}&protocol=resp{resp}", text(place, "unix")),
        "sentinel" => format!(
            "{redis}+sentinel://{at}/{}/{db}?protocol=resp{resp}",
            text(place, "master")
        ),
        "cluster" => format!("{redis}+cluster://{at}?protocol=resp{resp}"),
        _ => format!("{redis}://{at}/{db}?protocol=resp{resp}"),
    }
}

#[derive(Default)]
struct Agent {
    clients: RefCell<HashMap<String, Lockkeeper>>,
    locks: RefCell<HashMap<u64, Arc<Held>>>,
    crowd: RefCell<Vec<Held>>,
    tasks: RefCell<HashMap<u64, AbortHandle>>,
}

impl Agent {
    async fn carry_out(&self, message: &Value) -> Result<Value, Error> {
        let span = ms(message, "ms").unwrap_or_default();
        Ok(match text(message, "do") {
            "open" => {
                let mut builder = Lockkeeper::builder(url(&message["place"]));
                if let Some(label) = message["label"].as_str() {
                    builder = builder.label(label);
                }
                if let Some(authority) = message["place"]["tls"].as_str() {
                    builder = builder.root_ca(std::fs::read(authority).expect("the authority"));
                }
                let (name, client) = (text(message, "name").to_owned(), builder.open()?);
                self.clients.borrow_mut().insert(name, client);
                is("ok")
            }
            "acquire" => self.acquire(message).await?,
            "run" => self.run(message, span).await?,
            "cancel" => {
                self.tasks.borrow()[&number(message, "of", 0)].abort();
                is("ok")
            }
            "renew" => renewed(self.lock(message).renew().await?),
            "extend" => renewed(self.lock(message).extend(span).await?),
            "upgrade" => {
                let held = self.lock(message);
                match held.upgrade().await? {
                    Upgraded::Yes => granted_anew(&held),
                    Upgraded::Busy => is("busy"),
                    Upgraded::Lost(why) => lost(why),
                }
            }
            "downgrade" => {
                let held = self.lock(message);
                match held.downgrade().await? {
                    Downgraded::Yes => granted_anew(&held),
                    Downgraded::Lost(why) => lost(why),
                }
            }
            "release" => released(self.take(message).release().await?),
            "release_after" => released(self.take(message).release_after(span).await?),
            "leave" => {
                self.take(message).leave();
                is("ok")
            }
            "drop" => {
                drop(self.take(message));
                is("ok")
            }
            "remaining" => state(&self.lock(message)),
            "info" => {
                let info = self.client(message).info(text(message, "key")).await?;
                let value = info.map(|info| {
                    let text = |owner: Vec<u8>| String::from_utf8_lossy(&owner).into_owned();
                    let holders = info.holders.into_iter().map(|holder| text(holder.owner));
                    json!({
                        "owner": info.owner.map(text), "fence": info.fence, "waiters": info.waiters,
                        "limit": info.limit, "holding": info.holding,
                        "holders": holders.collect::<Vec<_>>(),
                    })
                });
                json!({"answer": "value", "value": value})
            }
            "many" => self.many(message).await?,
            "least" => {
                let crowd = self.crowd.borrow();
                let least = crowd.iter().map(Held::remaining).min().unwrap_or_default();
                let lost = crowd.iter().filter(|held| held.loss().is_some()).count();
                json!({"answer": "value", "remaining_us": us(least), "lost": lost})
            }
            "drop_many" => {
                self.crowd.borrow_mut().clear();
                is("ok")
            }
            "block" => {
                // Nothing else of this program runs meanwhile: it has one thread.
                let start = Instant::now();
                while text(message, "how") == "cpu" && start.elapsed() < span {}
                std::thread::sleep(span.saturating_sub(start.elapsed()));
                let locks = self.locks.borrow();
                let states = locks.iter().map(|(id, held)| (id.to_string(), state(held)));
                json!({"answer": "value", "locks": states.collect::<serde_json::Map<_, _>>()})
            }
            "fork" => fork(message, &self.lock(message), &self.client(message)),
            what @ ("settled" | "close") => {
                let limit = Duration::from_millis(number(message, "limit_ms", 60_000));
                let mut done = true;
                let clients: Vec<_> = self.clients.borrow().values().cloned().collect();
                for client in clients {
                    done &= match what {
                        "close" => client.close(limit).await,
                        _ => client.settled(limit).await,
                    };
                }
                is(if done { "yes" } else { "no" })
            }
            other => return Err(Error::Invalid(format!("no such message: {other}"))),
        })
    }

    fn client(&self, message: &Value) -> Lockkeeper {
        self.clients.borrow()[text(message, "client")].clone()
    }

    fn lock(&self, message: &Value) -> Arc<Held> {
        self.locks.borrow()[&number(message, "lock", 0)].clone()
    }

    fn take(&self, message: &Value) -> Held {
        let held = self.locks.borrow_mut().remove(&number(message, "lock", 0));
        Arc::into_inner(held.expect("it is held")).expect("nobody else uses it")
    }

    fn asked(&self, message: &Value, key: &str) -> Acquire {
        // A character for each byte.
        let key: Vec<u8> = key.chars().map(|byte| byte as u8).collect();
        let mut asked = self.client(message).acquire(key);
        if let Some(ttl) = ms(message, "ttl_ms") {
            asked = asked.ttl(ttl);
        }
        if let Some(max_hold) = ms(message, "max_hold_ms") {
            asked = asked.max_hold(max_hold);
        }
        if let Some(label) = message["label"].as_str() {
            asked = asked.label(label);
        }
        asked = asked.min_replicas(number(message, "min_replicas", 0) as u32);
        if let Some(limit) = message["limit"].as_u64() {
            asked = asked.limit(limit as u32);
        }
        if message["shared"] == true {
            asked = asked.shared();
        }
        match ms(message, "wait_ms") {
            Some(wait) => asked.wait(wait),
            None if text(message, "wait_ms") == "forever" => asked.wait_forever(),
            None => asked,
        }
    }

    async fn acquire(&self, message: &Value) -> Result<Value, Error> {
        let Acquired::Yes(held) = self.asked(message, text(message, "key")).await? else {
            return Ok(is("busy"));
        };
        let (id, loss) = (number(message, "id", 0), held.lost());
        // In this order: whoever is stopped in between must not seem to hold it for longer.
        let (at, remaining) = (now_us(), us(held.remaining()));
        let answer = json!({
            "answer": "held", "lock": id, "fence": held.fence(), "owner": held.owner(),
            "remaining_us": remaining, "at": at,
        });
        spawn_local(
            async move { say(json!({"event": "lost", "why": why(loss.await), "lock": id})) },
        );
        self.locks.borrow_mut().insert(id, Arc::new(held));
        Ok(answer)
    }

    async fn run(&self, message: &Value, span: Duration) -> Result<Value, Error> {
        let (what, asked) = (text(message, "body"), || {
            self.asked(message, text(message, "key"))
        });
        let ran = asked().run(async |_| {
            let mut body = Body::begin(&message["id"]);
            if what == "nest" {
                assert_eq!(asked().run(async |_| ()).await, Ok(Ran::Busy));
            }
            tokio::time::sleep(span).await;
            body.how = "ended";
            match what {
                // Without the noise of a panic that nobody expects.
                "panic" => std::panic::resume_unwind(Box::new("as asked")),
                "fail" => Err("as asked"),
                _ => Ok(()),
            }
        });
        Ok(match ran.await? {
            Ran::Done(Ok(())) => is("done"),
            Ran::Done(Err(_)) => json!({"answer": "failed", "whose": "body"}),
            Ran::Busy => is("busy"),
            Ran::Lost { why, .. } => lost(why),
        })
    }

    async fn many(&self, message: &Value) -> Result<Value, Error> {
        let numbers: Vec<_> = (0..number(message, "count", 0)).collect();
        let asked = |n| self.asked(message, &format!("{}{n}", text(message, "prefix")));
        // So few at a time that none waits for the others for long.
        for numbers in numbers.chunks(100) {
            let mut asked: JoinSet<_> = numbers.iter().map(|n| asked(n).into_future()).collect();
            while let Some(acquired) = asked.join_next().await {
                if let Acquired::Yes(held) = acquired.expect("it does not panic")? {
                    self.crowd.borrow_mut().push(held);
                }
            }
        }
        Ok(json!({"answer": "held", "count": self.crowd.borrow().len()}))
    }
}

/// Tells when a body begins, and how it ends.
struct Body<'a> {
    of: &'a Value,
    how: &'static str,
}

impl Body<'_> {
    fn begin(of: &Value) -> Body<'_> {
        say(json!({"event": "body", "of": of, "how": "began"}));
        Body {
            of,
            how: "cancelled",
        }
    }
}

impl Drop for Body<'_> {
    fn drop(&mut self) {
        say(json!({"event": "body", "of": self.of, "how": self.how}));
    }
}

fn fork(message: &Value, held: &Held, client: &Lockkeeper) -> Value {
    let forked = || {
        // SAFETY: the child uses what it was given, allocates a little, and ends without unwinding.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let acquire = client.acquire("book").blocking().err();
            say(json!({
                "event": "child", "of": message["id"], "remaining_us": us(held.remaining()),
                "lost": held.loss().is_some(), "acquire": acquire.as_ref().map(kind),
                "renew": held.blocking_renew().err().as_ref().map(kind),
            }));
            // SAFETY: ends this process, and only it.
            unsafe { libc::_exit(0) }
        }
        let mut status = -1;
        // SAFETY: waits for the child made above, which nobody else waits for.
        unsafe { libc::waitpid(child, &mut status, 0) };
        json!({"answer": "value", "exit": status})
    };
    // In a thread that may block.
    std::thread::scope(|scope| scope.spawn(forked).join().expect("it does not panic"))
}

async fn answer(agent: Rc<Agent>, message: Value) {
    let (id, after) = (message["id"].clone(), message["cancel_after_us"].as_u64());
    let lock = number(&message, "lock", 0);
    let work = spawn_local({
        let agent = agent.clone();
        async move { agent.carry_out(&message).await }
    });
    let abort = work.abort_handle();
    agent
        .tasks
        .borrow_mut()
        .insert(id.as_u64().unwrap_or_default(), abort.clone());
    if let Some(after) = after {
        // Finer than the runtime's timers.
        spawn_blocking(move || {
            std::thread::sleep(Duration::from_micros(after));
            abort.abort();
        });
    }
    let mut line = match work.await {
        Ok(Ok(line)) => line,
        Ok(Err(error)) => {
            json!({"answer": "error", "kind": kind(&error), "text": error.to_string()})
        }
        Err(error) if error.is_cancelled() => {
            // Of a release that had not even begun.
            agent.locks.borrow_mut().remove(&lock);
            is("cancelled")
        }
        Err(_) => json!({"answer": "failed", "whose": "body"}),
    };
    line["re"] = id;
    say(line);
}

/// What the helper logs, `LEVEL what happened …`, as events.
struct Log;

impl Write for Log {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        let line_text = String::from_utf8_lossy(line);
        let (level, text) = line_text.trim().split_once(' ').unwrap_or_default();
        say(json!({"event": "log", "level": level.to_lowercase(), "text": text}));
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

async fn obey(agent: Rc<Agent>) {
    let (lines, mut messages) = tokio::sync::mpsc::unbounded_channel::<Value>();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            let _ = lines.send(serde_json::from_str(&line).expect("a message"));
        }
    });
    while let Some(message) = messages.recv().await {
        match (text(&message, "do"), text(&message, "how")) {
            ("end", "exit") => std::process::exit(0),
            ("end", _) => return,
            _ => drop(spawn_local(answer(agent.clone(), message))),
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let log = tracing_subscriber::fmt()
        .without_time()
        .with_target(false)
        .with_ansi(false);
    log.with_writer(|| Log)
        .with_max_level(tracing_subscriber::filter::LevelFilter::DEBUG)
        .init();
    say(json!({
        "hello": "rust", "library": "redis-rs", "version": env!("CARGO_PKG_VERSION"), "pid": std::process::id(),
        "clock": now_us(), "can": ["cancel", "cancel_at_any_moment", "cancel_body", "drop", "fork", "hang_up", "panic"],
    }));
    let agent = Rc::new(Agent::default());
    LocalSet::new().run_until(obey(agent.clone())).await;
    // As a program ends that has a guard in `main`.
    for client in agent.clients.take().into_values() {
        drop(client.close_on_drop(Duration::from_secs(5)));
    }
}
