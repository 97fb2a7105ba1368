//! Owners at work: each asks for locks, guards a storage with them, and writes down what it saw.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;
use lockkeeper::{Acquired, Lockkeeper, Released};

use super::client::{Client, SILENCE, Said, Wish};
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

    /// Writes down a question before it is asked; answers its place and when that was.
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

    fn hears(&self, question: usize, answer: Answer) {
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
        let wish = Wish {
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
            wish,
            client: &mut client,
            random: &mut random,
        }
        .live();
    }
}

struct Raw<'w, 'r, C> {
    tenure: Tenure<'r>,
    wish: Wish,
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
            false => self.wish.wait + SILENCE,
        };
        for _ in 0..2 {
            let (question, asked) = self.tenure.asks(Did::Acquire {
                wait: us(self.wish.wait),
                safe: false,
            });
            let until = asked + us(self.wish.ttl);
            match self.client.acquire(&self.wish, patience) {
                Said::Fence(fence) => {
                    self.tenure.hears(question, Answer::Held { fence, until });
                    return Some((fence, until));
                }
                Said::No => {
                    self.tenure.hears(question, Answer::Not);
                    return None;
                }
                Said::Failed(error) => self.tenure.hears(question, Answer::Failed(error)),
                Said::Yes | Said::Silence => return None,
            }
            patience = self.wish.wait + SILENCE;
        }
        self.releases();
        None
    }

    fn renews(&mut self, fence: u64) -> Option<Us> {
        let (question, asked) = self.tenure.asks(Did::Renew);
        let until = asked + us(self.wish.ttl);
        let answer = match self.client.renew(&self.wish) {
            Said::Yes => Answer::Held { fence, until },
            Said::Failed(error) => Answer::Failed(error),
            Said::No => Answer::Not,
            Said::Fence(_) | Said::Silence => return None,
        };
        let held = matches!(answer, Answer::Held { .. });
        self.tenure.hears(question, answer);
        held.then_some(until)
    }

    /// Until somebody answers, but not for longer than the lease lasts.
    fn releases(&mut self) {
        let end = Instant::now() + self.wish.ttl;
        loop {
            let (question, _) = self.tenure.asks(Did::Release);
            match self.client.release(&self.wish) {
                Said::Yes => return self.tenure.hears(question, Answer::Released),
                Said::No => return self.tenure.hears(question, Answer::Not),
                Said::Failed(error) => self.tenure.hears(question, Answer::Failed(error)),
                Said::Fence(_) | Said::Silence => return,
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
        Ok(Acquired::Busy) => return tenure.hears(question, Answer::Not),
        Err(error) => {
            tenure.hears(question, Answer::Failed(error.to_string()));
            return thread::sleep(Duration::from_millis(50));
        }
    };
    let fence = held.fence();
    let looks = || {
        let now = run.now();
        let remaining = us(held.remaining());
        let until = now + remaining;
        match remaining {
            0 => Answer::Not,
            _ => Answer::Held { fence, until },
        }
    };
    tenure.hears(question, looks());
    run.sections.fetch_add(1, Ordering::Relaxed);
    let looks_again = match random.u8(..100) < 10 {
        true => random.u64(5..15),
        false => 1,
    };
    for _ in 0..looks_again {
        let (question, _) = tenure.asks(Did::Look);
        let answer = looks();
        let valid = answer != Answer::Not;
        tenure.hears(question, answer);
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
    tenure.hears(
        question,
        match held.blocking_release() {
            Ok(Released::Yes) => Answer::Released,
            Ok(Released::Lost(_)) => Answer::Not,
            Err(error) => Answer::Failed(error.to_string()),
        },
    );
}
