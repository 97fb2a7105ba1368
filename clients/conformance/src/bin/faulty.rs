//! A small agent that speaks to the server itself and can be given one fault, so that the suite can be seen to find
//! it. It knows the messages of the scenarios that find one, and no others.

use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lockkeeper_conformance::agent::now_us;
use lockkeeper_conformance::message::{Message, say};
use redis::{Parser, Value as Reply, cmd};
use serde_json::{Value, json};

/// How often it looks whether something is due, in microseconds.
const TICK: u64 = 10_000;

/// The longest that a try may take, in microseconds.
const TRY: u64 = 5_000_000;

/// What a wait may take longer than it was to, in microseconds.
const OVERTIME: u64 = 60_000;

fn has_fault(fault: &str) -> bool {
    std::env::args().nth(1).as_deref() == Some(fault)
}

fn sleep(us: u64) {
    std::thread::sleep(Duration::from_micros(us));
}

/// Why there is no reply.
enum Silence {
    Cancelled,
    Broken,
    OutOfTime,
}

/// A server, and the connection that is kept for the next question.
struct Client {
    address: String,
    kept: Mutex<Option<TcpStream>>,
}

impl Client {
    fn dial(&self) -> Option<TcpStream> {
        let stream = TcpStream::connect(&self.address).ok()?;
        stream.set_nodelay(true).ok()?;
        stream
            .set_read_timeout(Some(Duration::from_micros(TICK)))
            .ok()?;
        Some(stream)
    }

    /// Sends one command and waits for its reply. What is not answered is followed by `undo`.
    fn ask(
        &self,
        words: &[&str],
        until: u64,
        cancelled: &AtomicBool,
        undo: &[&str],
    ) -> Result<Reply, Silence> {
        let kept = self.kept.lock().unwrap().take();
        let mut stream = kept.or_else(|| self.dial()).ok_or(Silence::Broken)?;
        send(&mut stream, words)?;
        let silence = loop {
            match stream.peek(&mut [0]) {
                Ok(1..) => {
                    let reply = Parser::new().parse_value(&mut stream);
                    *self.kept.lock().unwrap() = Some(stream);
                    return reply.map_err(|_| Silence::Broken);
                }
                Ok(_) => return Err(Silence::Broken),
                Err(_) if cancelled.load(SeqCst) => break Silence::Cancelled,
                Err(_) if now_us() >= until => break Silence::OutOfTime,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => return Err(Silence::Broken),
            }
        };
        let skips = has_fault("skips-the-clean-up") && matches!(silence, Silence::Cancelled);
        if !undo.is_empty() && !skips {
            let _ = send(&mut stream, undo);
            let _ = stream.shutdown(Shutdown::Write);
            // Read to its end, so that what was sent arrives.
            std::thread::spawn(move || {
                let end = now_us() + TRY;
                while now_us() < end && !matches!(stream.peek(&mut [0]), Ok(0)) {
                    let _ = std::io::Read::read(&mut stream, &mut [0; 512]);
                }
            });
        }
        Err(silence)
    }
}

fn send(stream: &mut TcpStream, words: &[&str]) -> Result<(), Silence> {
    let packed = cmd(words[0]).arg(&words[1..]).get_packed_command();
    stream.write_all(&packed).map_err(|_| Silence::Broken)
}

/// A lock that was granted, as its watchdog and its holder see it.
struct Lock {
    client: Arc<Client>,
    key: String,
    owner: String,
    ttl: u64,
    ends_at: AtomicU64,
    /// For how long the watchdog has seen it held since it was renewed last.
    age: AtomicU64,
    released: AtomicBool,
    /// The message that it was asked for with.
    id: u64,
    lost: Mutex<Option<&'static str>>,
}

impl Lock {
    fn granted_from(&self, sent_at: u64) {
        let from = if has_fault("counts-from-the-reply") {
            now_us()
        } else {
            sent_at
        };
        self.age.store(0, SeqCst);
        self.ends_at
            .store(from + self.ttl - self.ttl / 100 - 2000, SeqCst);
    }

    fn remaining(&self) -> u64 {
        let believed = match has_fault("believes-its-watchdog") {
            true => self.ttl.saturating_sub(self.age.load(SeqCst)),
            false => self.ends_at.load(SeqCst).saturating_sub(now_us()),
        };
        if self.lost().is_some() { 0 } else { believed }
    }

    fn lost(&self) -> Option<&'static str> {
        *self.lost.lock().unwrap()
    }

    fn lose(&self, why: &'static str) {
        let mut lost = self.lost.lock().unwrap();
        if lost.is_none() {
            *lost = Some(why);
            say(json!({"event": "lost", "lock": self.id, "why": why}));
        }
    }

    /// Asks whether it is held, and renews it. None if there is no reply.
    fn renew(&self) -> Option<bool> {
        let (sent_at, ttl) = (now_us(), (self.ttl / 1000).to_string());
        let reply = self.ask(&["LOCK.RENEW", &self.key, &self.owner, &ttl]);
        match reply.ok()? {
            Reply::Int(1) => self.granted_from(sent_at),
            _ if has_fault("renews-after-release") => {}
            reply => {
                self.lose(if reply == Reply::Nil { "gone" } else { "taken" });
                return Some(false);
            }
        }
        Some(true)
    }

    /// Asks for a grant with another limit in place of the one that is held.
    fn change(&self, is_upgrade: bool) -> Value {
        let lost = || json!({"answer": "lost", "why": self.lost()});
        let unreachable = || json!({"answer": "unreachable"});
        if self.lost().is_some() {
            return lost();
        }
        if !has_fault("upgrades-without-renewing") {
            match self.renew() {
                Some(true) => {}
                Some(false) => return lost(),
                None => return unreachable(),
            }
        }
        let (sent_at, ttl) = (now_us(), (self.ttl / 1000).to_string());
        let mut words = vec!["LOCK.ACQUIRE", &self.key, &self.owner, &ttl];
        words.extend((!is_upgrade).then_some("SHARED"));
        match self.ask(&words) {
            Ok(Reply::Int(fence)) => {
                self.granted_from(sent_at);
                json!({"answer": "yes", "fence": fence, "remaining_us": self.remaining()})
            }
            Ok(_) => json!({"answer": "busy"}),
            Err(_) => unreachable(),
        }
    }

    fn ask(&self, words: &[&str]) -> Result<Reply, Silence> {
        let until = now_us() + TRY.min(self.ttl / 6);
        self.client.ask(words, until, &AtomicBool::new(false), &[])
    }

    fn watch(&self) {
        while !self.released.load(SeqCst) || has_fault("renews-after-release") {
            sleep(TICK);
            self.age.fetch_add(TICK, SeqCst);
            if self.remaining() == 0 {
                return self.lose("expired");
            }
            if self.age.load(SeqCst) >= self.ttl / 3 && self.renew() == Some(false) {
                return;
            }
        }
    }
}

#[derive(Default)]
struct Agent {
    clients: Mutex<HashMap<String, Arc<Client>>>,
    locks: Mutex<HashMap<u64, Arc<Lock>>>,
    cancelled: Mutex<HashMap<u64, Arc<AtomicBool>>>,
}

impl Agent {
    fn carry_out(&self, message: &Message, cancelled: &AtomicBool) -> Value {
        let client = || self.clients.lock().unwrap()[&message.client].clone();
        let lock = || self.locks.lock().unwrap()[&message.lock].clone();
        match message.r#do.as_str() {
            "open" => {
                let client = Client {
                    address: message
                        .url
                        .trim_matches(|of| "redis:/".contains(of))
                        .to_owned(),
                    kept: Mutex::default(),
                };
                let name = message.name.clone();
                self.clients.lock().unwrap().insert(name, Arc::new(client));
                json!({"answer": "yes"})
            }
            "info" => {
                let question = ["LOCK.INFO", &message.key];
                let _ = client().ask(&question, now_us() + TRY, cancelled, &[]);
                json!({"answer": "yes"})
            }
            "cancel" => {
                self.cancelled.lock().unwrap()[&message.of].store(true, SeqCst);
                json!({"answer": "yes"})
            }
            "acquire" => self.acquire(client(), message, cancelled),
            "remaining" => {
                let remaining = lock().remaining();
                let lost = (remaining == 0).then_some("expired");
                json!({"answer": "yes", "remaining_us": remaining, "lost": lost})
            }
            "upgrade" => lock().change(true),
            "downgrade" => lock().change(false),
            "release" => {
                let lock = lock();
                lock.released.store(true, SeqCst);
                match lock.ask(&["LOCK.RELEASE", &lock.key, &lock.owner]) {
                    Ok(Reply::Int(1)) => json!({"answer": "yes"}),
                    Ok(_) => json!({"answer": "lost", "why": "gone"}),
                    Err(_) => json!({"answer": "unreachable"}),
                }
            }
            _ => json!({"answer": "invalid"}),
        }
    }

    fn acquire(&self, client: Arc<Client>, message: &Message, cancelled: &AtomicBool) -> Value {
        let (id, key, asked_at) = (message.id, message.key.as_str(), now_us());
        let (owner, ttl) = (format!("faulty:{id}"), message.ttl_ms.unwrap_or(30_000));
        let mut words = vec![
            "LOCK.ACQUIRE".to_owned(),
            key.to_owned(),
            owner.clone(),
            ttl.to_string(),
        ];
        let wait = message.wait_ms;
        words.extend(
            wait.map(|wait| ["WAIT".to_owned(), wait.to_string()])
                .into_iter()
                .flatten(),
        );
        words.extend(message.shared.then(|| "SHARED".to_owned()));
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        let until = asked_at + wait.map_or(TRY, |wait| wait * 1000 + OVERTIME);
        let undo = ["LOCK.RELEASE", key, &owner];
        loop {
            let sent_at = now_us();
            match client.ask(&words, until, cancelled, &undo) {
                Ok(Reply::Int(fence)) => {
                    let lock = Arc::new(Lock {
                        client,
                        key: key.to_owned(),
                        owner: owner.clone(),
                        ttl: ttl * 1000,
                        ends_at: AtomicU64::new(0),
                        age: AtomicU64::new(0),
                        released: AtomicBool::new(false),
                        id,
                        lost: Mutex::default(),
                    });
                    lock.granted_from(sent_at);
                    self.locks.lock().unwrap().insert(id, lock.clone());
                    let remaining = lock.remaining();
                    std::thread::spawn(move || lock.watch());
                    return json!({
                        "answer": "yes", "fence": fence, "owner": owner, "remaining_us": remaining,
                    });
                }
                Ok(_) => return json!({"answer": "busy"}),
                Err(Silence::Cancelled) => return json!({"answer": "cancelled"}),
                // Once more, and for as long as before.
                Err(Silence::OutOfTime) if has_fault("retries-a-wait-blindly") => {
                    let again = until + wait.unwrap_or(0) * 1000;
                    let _ = client.ask(&words, again, cancelled, &undo);
                    return json!({"answer": "busy"});
                }
                Err(Silence::Broken) if now_us() < until => sleep(TICK),
                Err(_) => return json!({"answer": "unreachable"}),
            }
        }
    }
}

fn main() {
    say(json!({"event": "hello", "can": ["cancel"]}));
    let agent = Arc::new(Agent::default());
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let message: Message = serde_json::from_str(&line).expect("a message");
        let (agent, cancelled) = (agent.clone(), Arc::new(AtomicBool::new(false)));
        let all = &agent.cancelled;
        all.lock().unwrap().insert(message.id, cancelled.clone());
        std::thread::spawn(move || {
            let mut answer = agent.carry_out(&message, &cancelled);
            answer["re"] = message.id.into();
            say(answer);
        });
    }
}
