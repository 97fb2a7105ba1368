//! Owners that send the commands as they are: each asks for locks, guards a storage with them, and records what it
//! observed.

use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;

use super::client::{Client, Outcome, Request, SILENCE};
use super::history::{Answer, Did, RAW, Us};
use super::run::{Run, Tenure, us};

/// Works through `client` until the run stops.
pub fn raw(run: &Run, number: u64, mut client: impl Client) {
    let mut random = run.random(number);
    while !run.has_stopped() {
        let tenure = Tenure::begin(run, RAW, &mut random);
        let request = Request {
            key: tenure.key(),
            owner: format!("raw:{}", tenure.number),
            ttl: run.ttl,
            limit: tenure.limit,
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
        run.another_section();
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
