//! The agent of the Rust helper for the conformance suite: does what the lines on its standard input say. The
//! messages are in clients/conformance/AGENTS.md, and that package builds it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use lockkeeper::{Acquire, Acquired, Builder, Error, Held, Lockkeeper, Lost, Ran, Reply, Upgraded};
use lockkeeper_conformance::agent::now_us;
use lockkeeper_conformance::message::{Message, say};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::task::{AbortHandle, JoinHandle, LocalSet, spawn_local};

fn is(answer: &str) -> Value {
    json!({"answer": answer})
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

fn replied(reply: Reply, yes: Value) -> Result<Value, Error> {
    Ok(match reply {
        Reply::Yes => yes,
        Reply::Lost(lost) => json!({"answer": "lost", "why": why(lost)}),
    })
}

/// In this order: whoever is stopped in between must not seem to hold it for longer.
fn state(held: &Held) -> Value {
    json!({
        "answer": "yes", "at": now_us(), "remaining_us": held.remaining().as_micros() as u64,
        "lost": held.loss().map(why), "fence": held.fence(), "owner": held.owner(),
    })
}

/// Sets what was told.
fn with<B, T>(builder: B, told: Option<T>, set: impl FnOnce(B, T) -> B) -> B {
    match told {
        Some(told) => set(builder, told),
        None => builder,
    }
}

#[derive(Default)]
struct Agent {
    clients: RefCell<HashMap<String, Lockkeeper>>,
    locks: RefCell<HashMap<u64, Rc<Held>>>,
    tasks: RefCell<HashMap<u64, AbortHandle>>,
}

impl Agent {
    async fn carry_out(&self, m: &Message) -> Result<Value, Error> {
        let span = m.span();
        match m.r#do.as_str() {
            "open" => self.open(m)?,
            "acquire" => return self.acquire(m).await,
            "run" => return self.run(m).await,
            "info" => return self.info(m).await,
            "cancel" => self.tasks.borrow()[&m.of].abort(),
            "settled" if !self.client(m).settled(span).await => return Ok(is("no")),
            "settled" => {}
            "release" => return replied(self.take(m).release().await?, is("yes")),
            "release_after" => return replied(self.take(m).release_after(span).await?, is("yes")),
            "leave" => self.take(m).leave(),
            "drop" => drop(self.take(m)),
            _ => return self.keep(m).await,
        }
        Ok(is("yes"))
    }

    fn client(&self, m: &Message) -> Lockkeeper {
        self.clients.borrow()[&m.client].clone()
    }

    fn take(&self, m: &Message) -> Held {
        let held = self.locks.borrow_mut().remove(&m.lock);
        Rc::into_inner(held.expect("it is held")).expect("nobody else uses it")
    }

    fn open(&self, m: &Message) -> Result<(), Error> {
        let authority = m.tls.as_ref().map(std::fs::read).transpose();
        let mut builder = Lockkeeper::builder(&m.url);
        builder = with(builder, m.label.as_ref(), Builder::label);
        builder = with(builder, authority.expect("it is there"), Builder::root_ca);
        let client = builder.open()?;
        self.clients.borrow_mut().insert(m.name.clone(), client);
        Ok(())
    }

    fn asked(&self, m: &Message) -> Acquire {
        let ms = |ms: Option<u64>| ms.map(Duration::from_millis);
        let mut asked = self.client(m).acquire(m.key()).min_replicas(m.min_replicas);
        asked = with(asked, ms(m.ttl_ms), Acquire::ttl);
        asked = with(asked, ms(m.wait_ms), Acquire::wait);
        asked = with(asked, ms(m.max_hold_ms), Acquire::max_hold);
        asked = with(asked, m.label.as_ref(), Acquire::label);
        asked = with(asked, m.limit, Acquire::limit);
        asked = with(asked, m.shared.then_some(()), |a, ()| a.shared());
        with(asked, m.forever.then_some(()), |a, ()| a.wait_forever())
    }

    async fn acquire(&self, m: &Message) -> Result<Value, Error> {
        let Acquired::Yes(held) = self.asked(m).await? else {
            return Ok(is("busy"));
        };
        let (id, lost, answer) = (m.id, held.lost(), state(&held));
        let tell = async move { say(json!({"event": "lost", "lock": id, "why": why(lost.await)})) };
        spawn_local(tell);
        self.locks.borrow_mut().insert(id, Rc::new(held));
        Ok(answer)
    }

    async fn run(&self, m: &Message) -> Result<Value, Error> {
        let ran = self.asked(m).run(async |_| {
            let nested = self.client(m).acquire(m.key()).await;
            assert!(matches!(nested, Ok(Acquired::Busy)));
            say(json!({"event": "began", "of": m.id}));
            let _body = Body(m.id);
            tokio::time::sleep(m.span()).await;
            match m.body.as_str() {
                // Without the noise of a panic that nobody expects.
                "panic" => std::panic::resume_unwind(Box::new("as asked")),
                "fail" => Err("as asked"),
                _ => Ok(()),
            }
        });
        Ok(match ran.await? {
            Ran::Done(Ok(())) => is("yes"),
            Ran::Done(Err(_)) => is("failed"),
            Ran::Busy => is("busy"),
            Ran::Lost { why, .. } => return replied(Reply::Lost(why), is("yes")),
        })
    }

    async fn info(&self, m: &Message) -> Result<Value, Error> {
        let text = |owner: Vec<u8>| String::from_utf8_lossy(&owner).into_owned();
        let info = self.client(m).info(m.key()).await?.map(|info| {
            let holders = info.holders.into_iter().map(|holder| json!({"owner": text(holder.owner)}));
            json!({
                "owner": info.owner.map(text), "fence": info.fence, "waiters": info.waiters,
                "limit": info.limit, "holding": info.holding, "holders": holders.collect::<Vec<_>>(),
            })
        });
        Ok(json!({"answer": "yes", "info": info}))
    }

    /// What is asked of a lock that is held on.
    async fn keep(&self, m: &Message) -> Result<Value, Error> {
        let held = self.locks.borrow()[&m.lock].clone();
        let reply = match m.r#do.as_str() {
            "remaining" => Reply::Yes,
            "renew" => held.renew().await?,
            "extend" => held.extend(m.span()).await?,
            "downgrade" => held.downgrade().await?,
            "upgrade" => match held.upgrade().await? {
                Upgraded::Yes => Reply::Yes,
                Upgraded::Busy => return Ok(is("busy")),
                Upgraded::Lost(lost) => Reply::Lost(lost),
            },
            "block" => {
                // Nothing else of this program runs meanwhile: it has one thread.
                let start = Instant::now();
                while m.how == "cpu" && start.elapsed() < m.span() {}
                std::thread::sleep(m.span().saturating_sub(start.elapsed()));
                Reply::Yes
            }
            "fork" => {
                // SAFETY: the child uses what it was given, allocates a little, and ends without unwinding.
                if unsafe { libc::fork() } == 0 {
                    let mut child = state(&held);
                    child["event"] = "child".into();
                    child["renew"] = held.renew().await.err().as_ref().map(kind).into();
                    say(child);
                    // SAFETY: ends this process, and only it.
                    unsafe { libc::_exit(0) }
                }
                Reply::Yes
            }
            other => return Err(Error::Invalid(format!("no such message: {other}"))),
        };
        replied(reply, state(&held))
    }
}

/// Tells that a body has ended, however it did.
struct Body(u64);

impl Drop for Body {
    fn drop(&mut self) {
        say(json!({"event": "ended", "of": self.0}));
    }
}

async fn answer(id: u64, work: JoinHandle<Result<Value, Error>>) {
    let mut answer = match work.await {
        Ok(Ok(answer)) => answer,
        Ok(Err(e)) => json!({"answer": kind(&e), "text": e.to_string()}),
        Err(end) if end.is_cancelled() => is("cancelled"),
        Err(_) => is("failed"),
    };
    answer["re"] = id.into();
    say(answer);
}

async fn obey(agent: &'static Agent) {
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let message: Message = serde_json::from_str(&line).expect("a message");
        let id = message.id;
        let work = spawn_local(async move { agent.carry_out(&message).await });
        agent.tasks.borrow_mut().insert(id, work.abort_handle());
        spawn_local(answer(id, work));
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(std::io::stderr)
        .with_max_level(tracing_subscriber::filter::LevelFilter::DEBUG)
        .init();
    say(json!({"event": "hello", "can": [
        "block", "cancel", "cancel_at_any_moment", "cancel_body", "drop", "fork", "hang_up", "panic",
    ]}));
    let agent: &Agent = Box::leak(Box::default());
    LocalSet::new().run_until(obey(agent)).await;
    // As a program ends that has a guard in `main`.
    for client in agent.clients.take().into_values() {
        drop(client.close_on_drop(Duration::from_secs(5)));
    }
}
