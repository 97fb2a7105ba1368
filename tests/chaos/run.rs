//! A run: what its owners share, and what is written down of it.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use fastrand::Rng;
use lockkeeper_conformance::agent::now_us;

use super::history::{Answer, Did, Event, Fault, History, Us};
use super::storage::Storage;

/// What owners allow: each of these as often as the others.
pub type Limits = &'static [u16];

pub const ALONE: Limits = &[1];

/// Writers, holders of a limit, and readers.
pub const MIXED: Limits = &[1, 2, 3, SHARED];

pub const SHARED: u16 = 1000;

/// What all owners of a run share.
pub struct Run {
    /// By the clock that agents tell the time by.
    start: Us,
    pub seed: u64,
    pub keys: usize,
    pub ttl: Duration,
    limits: Limits,
    stop: AtomicBool,
    tenures: AtomicU64,
    sections: AtomicUsize,
    storage: Storage,
    events: Mutex<Vec<Event>>,
    faults: Mutex<Vec<Fault>>,
}

impl Run {
    pub fn new(seed: u64, keys: usize, ttl: Duration, limits: Limits) -> Run {
        Run {
            start: now_us(),
            seed,
            keys,
            ttl,
            limits,
            stop: AtomicBool::new(false),
            tenures: AtomicU64::new(0),
            sections: AtomicUsize::new(0),
            storage: Storage::default(),
            events: Mutex::default(),
            faults: Mutex::default(),
        }
    }

    pub fn now(&self) -> Us {
        self.at(now_us())
    }

    /// When it was by the clock of agents.
    pub fn at(&self, us: u64) -> Us {
        us - self.start
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

    /// An owner has been told of its grant.
    pub fn another_section(&self) {
        self.sections.fetch_add(1, Ordering::Relaxed);
    }

    /// Writes down what `inject` does to servers or agents; it returns when all is well again.
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

pub fn us(duration: Duration) -> Us {
    duration.as_micros().try_into().unwrap()
}

/// One acquire and what follows it.
pub struct Tenure<'r> {
    pub run: &'r Run,
    pub number: u64,
    by: &'static str,
    key: usize,
    pub limit: u16,
}

impl<'r> Tenure<'r> {
    pub fn begin(run: &'r Run, by: &'static str, random: &mut Rng) -> Tenure<'r> {
        Tenure {
            run,
            number: run.tenures.fetch_add(1, Ordering::Relaxed),
            by,
            key: random.usize(..run.keys),
            limit: *random.choice(run.limits).unwrap(),
        }
    }

    pub fn key(&self) -> String {
        format!("lock:{}", self.key)
    }

    /// Writes down a question before it is asked; returns its index and when that was.
    pub fn asks(&self, did: Did) -> (usize, Us) {
        let mut events = self.run.events.lock().unwrap();
        let asked = self.run.now();
        events.push(Event {
            tenure: self.number,
            by: self.by,
            key: self.key,
            limit: self.limit,
            did,
            asked,
            answer: None,
        });
        (events.len() - 1, asked)
    }

    pub fn answered(&self, question: usize, answer: Answer) {
        let now = self.run.now();
        self.run.events.lock().unwrap()[question].answer = Some((now, answer));
    }

    pub fn writes(&self, fence: u64) {
        // As one step, so that the order of the events is that of the storage.
        let mut events = self.run.events.lock().unwrap();
        let (order, accepted) = self.run.storage.write(self.key, fence, self.limit);
        let now = self.run.now();
        let answer = match accepted {
            true => Answer::Accepted,
            false => Answer::Refused,
        };
        events.push(Event {
            tenure: self.number,
            by: self.by,
            key: self.key,
            limit: self.limit,
            did: Did::Write { order, fence },
            asked: now,
            answer: Some((now, answer)),
        });
    }
}
