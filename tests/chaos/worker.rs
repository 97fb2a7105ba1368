//! Owners at work: each asks for locks, guards a storage with them, and records what it observed.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;
use lockkeeper::{Acquired, Lockkeeper, Released};

use super::client::{Client, Outcome, Request, SILENCE};
use super::history::{Answer, Did, Event, Fault, History, Us};
use super::storage::Storage;

/// What all owners of a run share.
pub struct Run {
    start: Instant,
    pub seed: u64,
    pub keys: usize,
    pub ttl: Duration,
    stop: AtomicBool,
    tenures: AtomicU64,
    sections: AtomicUsize,
    storage: Storage,
    events: Mutex<Vec<Event>>,
    faults: Mutex<Vec<Fault>>,
}

impl Run {
    pub fn new(seed: u64, keys: usize, ttl: Duration) -> Run {
        Run {
            start: Instant::now(),
            seed,
            keys,
            ttl,
            stop: AtomicBool::new(false),
            tenures: AtomicU64::new(0),
            sections: AtomicUsize::new(0),
            storage: Storage::default(),
            events: Mutex::default(),
            faults: Mutex::default(),
        }
    }

    fn now(&self) -> Us {
        us(self.start.elapsed())
    }

    /// Numbers that look random, and are the same in every run of this seed.
    pub fn random(&self, owner: u64) -> Rng {
        Rng::with_seed(self.seed.rotate_left(32) ^ owner)
    }

    /// No new question from now on.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    pub fn has_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    pub fn sections(&self) -> usize {
        self.sections.load(Ordering::Relaxed)
    }

    /// Writes down what `inject` does to the servers; it returns when all is well again.
    pub fn fault<T>(
        &self,
        what: &'static str,
        loses: bool,
        skew: Duration,
        inject: impl FnOnce() -> T,
    ) -> T {
        let from = self.now();
        let done = inject();
        self.faults.lock().unwrap().push(Fault {
            what,
            from,
            to: self.now(),
            loses,
            skew: us(skew),
        });
        done
    }

    pub fn history(self) -> History {
        History {
            events: self.events.into_inner().unwrap(),
            faults: self.faults.into_inner().unwrap(),
            ttl: us(self.ttl),
        }
    }
}

fn us(duration: Duration) -> Us {
    duration.as_micros().try_into().unwrap()
}

/// One acquire and what follows it.
struct Tenure<'r> {
    run: &'r Run,
    number: u64,
    key: usize,
}

impl<'r> Tenure<'r> {
    fn begin(run: &'r Run, random: &mut Rng) -> Tenure<'r> {
        Tenure {
            run,
            number: run.tenures.fetch_add(1, Ordering::Relaxed),
            key: random.usize(..run.keys),
        }
    }

    fn key(&self) -> String {
        format!("lock:{}", self.key)
    }

    /// Writes down a question before it is asked; returns its index and when that was.
    fn asks(&self, did: Did) -> (usize, Us) {
        let mut events = self.run.events.lock().unwrap();
        let asked = self.run.now();
        events.push(Event {
            tenure: self.number,
            key: self.key,
            did,
            asked,
            answer: None,
        });
        (events.len() - 1, asked)
    }

    fn answered(&self, question: usize, answer: Answer) {
        let now = self.run.now();
        self.run.events.lock().unwrap()[question].answer = Some((now, answer));
    }

    fn writes(&self, fence: u64) {
        // As one step, so that the order of the events is that of the storage.
        let mut events = self.run.events.lock().unwrap();
        let (order, accepted) = self.run.storage.write(self.key, fence);
        let now = self.run.now();
        let answer = match accepted {
            true => Answer::Accepted,
            false => Answer::Refused,
        };
        events.push(Event {
            tenure: self.number,
            key: self.key,
            did: Did::Write { order, fence },
            asked: now,
            answer: Some((now, answer)),
        });
    }
}

/// Works through `client` until the run stops.
pub fn raw(run: &Run, number: u64, mut client: impl Client) {
    let mut random = run.random(number);
    while !run.has_stopped() {
        let tenure = Tenure::begin(run, &mut random);
        let request = Request {
            key: tenure.key(),
            owner: format!("raw:{}", tenure.number),
            ttl: run.ttl,
            wait: match random.u8(..100) < 85 {
                true => Duration::from_secs(3),
                false => Duration::ZERO,
            },
        };
        Raw {
            tenure,
            request,
            client: &mut client,
            random: &mut random,
        }
        .live();
    }
}

struct Raw<'w, 'r, C> {
    tenure: Tenure<'r>,
    request: Request,
    client: &'w mut C,
    random: &'w mut Rng,
}

impl<C: Client> Raw<'_, '_, C> {
    fn live(mut self) {
        let Some((fence, until)) = self.acquires() else {
            return;
        };
        let run = self.tenure.run;
        // Who waited does not know when its lease began.
        let waited = until < run.now() + us(run.ttl) * 2 / 3;
        if waited && self.renews(fence).is_none() {
            return self.releases();
        }
        run.sections.fetch_add(1, Ordering::Relaxed);
        self.tenure.writes(fence);
        match self.random.u64(0..100) {
            // Dies.
            0..2 => return,
            // Is paused past the end of its lease.
            2..5 => {
                thread::sleep(run.ttl + run.ttl / 4);
                self.tenure.writes(fence);
            }
            5..20 => {
                thread::sleep(run.ttl / 3);
                if self.renews(fence).is_some() {
                    self.tenure.writes(fence);
                }
            }
            _ => thread::sleep(Duration::from_millis(self.random.u64(0..5))),
        }
        self.releases();
    }

    /// The fence, and until when the lease lasts at least.
    fn acquires(&mut self) -> Option<(u64, Us)> {
        // Some hang up in the middle of their wait, and ask once more.
        let mut patience = match self.random.u8(..100) < 10 {
            true => Duration::from_millis(self.random.u64(1..30)),
            false => self.request.wait + SILENCE,
        };
        for _ in 0..2 {
            let (question, asked) = self.tenure.asks(Did::Acquire {
                wait: us(self.request.wait),
                safe: false,
            });
            let until = asked + us(self.request.ttl);
            match self.client.acquire(&self.request, patience) {
                Outcome::Fence(fence) => {
                    self.tenure
                        .answered(question, Answer::Held { fence, until });
                    return Some((fence, until));
                }
                Outcome::No => {
                    self.tenure.answered(question, Answer::Not);
                    return None;
                }
                Outcome::Failed(error) => self.tenure.answered(question, Answer::Failed(error)),
                Outcome::Yes | Outcome::Silence => return None,
            }
            patience = self.request.wait + SILENCE;
        }
        self.releases();
        None
    }

    fn renews(&mut self, fence: u64) -> Option<Us> {
        let (question, asked) = self.tenure.asks(Did::Renew);
        let until = asked + us(self.request.ttl);
        let answer = match self.client.renew(&self.request) {
            Outcome::Yes => Answer::Held { fence, until },
            Outcome::Failed(error) => Answer::Failed(error),
            Outcome::No => Answer::Not,
            Outcome::Fence(_) | Outcome::Silence => return None,
        };
        let held = matches!(answer, Answer::Held { .. });
        self.tenure.answered(question, answer);
        held.then_some(until)
    }

    /// Until somebody answers, but not for longer than the lease lasts.
    fn releases(&mut self) {
        let end = Instant::now() + self.request.ttl;
        loop {
            let (question, _) = self.tenure.asks(Did::Release);
            match self.client.release(&self.request) {
                Outcome::Yes => return self.tenure.answered(question, Answer::Released),
                Outcome::No => return self.tenure.answered(question, Answer::Not),
                Outcome::Failed(error) => self.tenure.answered(question, Answer::Failed(error)),
                Outcome::Fence(_) | Outcome::Silence => return,
            }
            if Instant::now() > end {
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Works through the helper until the run stops.
pub fn helper(run: &Run, number: u64, lockkeeper: &Lockkeeper, safe: bool) {
    let mut random = run.random(number);
    while !run.has_stopped() {
        helped(
            Tenure::begin(run, &mut random),
            lockkeeper,
            &mut random,
            safe,
        );
    }
}

fn helped(tenure: Tenure, lockkeeper: &Lockkeeper, random: &mut Rng, safe: bool) {
    let wait = Duration::from_secs(3);
    let run = tenure.run;
    let (question, _) = tenure.asks(Did::Acquire {
        wait: us(wait),
        safe,
    });
    let acquire = lockkeeper.acquire(tenure.key()).ttl(run.ttl).wait(wait);
    let held = match acquire.min_replicas(safe.into()).blocking() {
        Ok(Acquired::Yes(held)) => held,
        Ok(Acquired::Busy) => return tenure.answered(question, Answer::Not),
        Err(error) => {
            tenure.answered(question, Answer::Failed(error.to_string()));
            return thread::sleep(Duration::from_millis(50));
        }
    };
    let fence = held.fence();
    let checks = || {
        let now = run.now();
        let remaining = us(held.remaining());
        let until = now + remaining;
        match remaining {
            0 => Answer::Not,
            _ => Answer::Held { fence, until },
        }
    };
    tenure.answered(question, checks());
    run.sections.fetch_add(1, Ordering::Relaxed);
    let looks_again = match random.u8(..100) < 10 {
        true => random.u64(5..15),
        false => 1,
    };
    for _ in 0..looks_again {
        let (question, _) = tenure.asks(Did::Check);
        let answer = checks();
        let valid = answer != Answer::Not;
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
    tenure.answered(
        question,
        match held.blocking_release() {
            Ok(Released::Yes) => Answer::Released,
            Ok(Released::Lost(_)) => Answer::Not,
            Err(error) => Answer::Failed(error.to_string()),
        },
    );
}
