//! Owners that hold locks through the helpers. A crew works through one agent, a process that may be stopped and
//! killed.

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use fastrand::Rng;
use lockkeeper_conformance::agent::{self, Agent, Kind};
use rustix::process::Signal;
use serde_json::json;

use super::history::{Answer, Did};
use super::run::{Run, SHARED, Tenure, us};

/// Of each wait.
const WAIT: Duration = Duration::from_secs(3);

pub struct Crew {
    kind: Kind,
    /// Where its server is, as agents are told.
    url: String,
    agent: Mutex<Arc<Agent>>,
}

/// The client that each agent has.
const CLIENT: &str = "crew";

impl Crew {
    pub fn new(kind: Kind, url: String) -> Crew {
        Crew {
            agent: Mutex::new(start(&kind, &url)),
            kind,
            url,
        }
    }

    fn agent(&self) -> Arc<Agent> {
        self.agent.lock().unwrap().clone()
    }

    /// Stops the agent in the middle of whatever it does, for so long.
    pub fn pause(&self, span: Duration) {
        let agent = self.agent();
        agent.signal(Signal::STOP);
        thread::sleep(span);
        agent.signal(Signal::CONT);
    }

    /// Kills the agent, and starts another in its place.
    pub fn replace(&self) {
        let mut agent = self.agent.lock().unwrap();
        agent.kill9();
        *agent = start(&self.kind, &self.url);
    }

    /// Works until the run stops. If `safe`, grants count only once a replica has them.
    pub fn work(&self, run: &Run, number: u64, safe: bool) {
        let mut random = run.random(number);
        while !run.has_stopped() {
            let tenure = Tenure::begin(run, self.kind.name, &mut random);
            live(&tenure, &self.agent(), &mut random, safe);
        }
    }
}

fn start(kind: &Kind, url: &str) -> Arc<Agent> {
    let agent = kind.start();
    assert_eq!(
        agent.ask("open", json!({"name": CLIENT, "url": url})),
        "yes"
    );
    Arc::new(agent)
}

fn live(tenure: &Tenure, agent: &Agent, random: &mut Rng, safe: bool) {
    let run = tenure.run;
    let (question, asked) = tenure.asks(Did::Acquire {
        wait: us(WAIT),
        safe,
    });
    let mut acquire = json!({
        "client": CLIENT, "key": tenure.key(), "ttl_ms": run.ttl.as_millis() as u64,
        "wait_ms": WAIT.as_millis() as u64, "min_replicas": u8::from(safe),
    });
    match tenure.limit {
        1 => {}
        SHARED => acquire["shared"] = true.into(),
        limit => acquire["limit"] = limit.into(),
    }
    let answer = agent.begin("acquire", acquire).answer_unless_it_ends();
    let held = match answer {
        Some(held) if held == "yes" => held,
        other => {
            tenure.answered(question, not_held(other));
            return thread::sleep(Duration::from_millis(50));
        }
    };
    let (lock, fence) = (held.number("re"), held.number("fence"));
    let until = match us(held.remaining()) {
        // It had ended by then, and nobody knows when: so it is certain for no time.
        0 => asked,
        left => run.at(held.at()) + left,
    };
    tenure.answered(question, Answer::Held { fence, until });
    run.another_section();
    let asks = |what: &str| {
        let asked = agent.begin(what, json!({"lock": lock}));
        asked.answer_unless_it_ends()
    };
    let looks_again = match random.u8(..100) < 10 {
        true => random.u64(5..15),
        false => 1,
    };
    for _ in 0..looks_again {
        let (question, asked) = tenure.asks(Did::Check);
        let answer = match asks("remaining") {
            Some(held) if held.number("remaining_us") > 0 => {
                let until = asked + us(held.remaining());
                Answer::Held { fence, until }
            }
            Some(_) => Answer::Not,
            None => not_held(None),
        };
        let valid = matches!(answer, Answer::Held { .. });
        tenure.answered(question, answer);
        if !valid {
            break;
        }
        tenure.writes(fence);
        thread::sleep(match looks_again {
            1 => Duration::from_millis(random.u64(0..5)),
            _ => run.ttl / 10,
        });
    }
    let (question, _) = tenure.asks(Did::Release);
    let answer = match asks("release") {
        Some(answer) if answer == "yes" => Answer::Released,
        other => not_held(other),
    };
    tenure.answered(question, answer);
}

/// Of an agent that has ended nobody knows what it did last.
fn not_held(answer: Option<agent::Answer>) -> Answer {
    match answer {
        Some(answer) if answer.0["answer"] == "busy" || answer.0["answer"] == "lost" => Answer::Not,
        Some(answer) => Answer::Failed(format!("{answer:?}")),
        None => Answer::Failed("the agent was killed".into()),
    }
}
