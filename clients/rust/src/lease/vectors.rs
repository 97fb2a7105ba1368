//! Recordings of what the lease does, for the helpers of other languages, which replay them to the microsecond:
//! clients/conformance/vectors/lease.jsonl.
//!
//! `LOCKKEEPER_UPDATE=1 cargo test -p lockkeeper vectors` writes the file anew.

use std::collections::HashSet;
use std::path::Path;

use super::tests::{START, TTLS};
use super::*;

/// The lease of one recording, what was sent for it, and what has been written down.
struct Recording {
    lease: Lease,
    now: Moment,
    /// Attempts that may still be replied to, late ones too.
    sent: Vec<Moment>,
    /// What the last action said about time.
    until: Moment,
    steps: Vec<String>,
}

fn us(duration: Duration) -> u64 {
    duration.as_micros() as u64
}

fn word(lost: Lost) -> &'static str {
    match lost {
        Lost::Taken => "taken",
        Lost::Gone => "gone",
        Lost::Expired => "expired",
        Lost::MaxHold => "max_hold",
    }
}

fn action(action: Action) -> (&'static str, String) {
    match action {
        Action::Sleep(until) => ("sleep", format!("[\"sleep\",{}]", until.0)),
        Action::Idle => ("idle", "[\"idle\"]".to_owned()),
        Action::Renew { ttl, give_up_at } => {
            let line = format!("[\"renew\",{},{}]", us(ttl), give_up_at.0);
            ("renew", line)
        }
        Action::Change { .. } => unreachable!("nobody wants it"),
        Action::Release { give_up_at } => ("release", format!("[\"release\",{}]", give_up_at.0)),
        Action::Lose(lost) => (word(lost), format!("[\"lose\",\"{}\"]", word(lost))),
        Action::End => ("end", "[\"end\"]".to_owned()),
    }
}

fn state(lease: &Lease) -> (&'static str, bool, bool) {
    let state = match lease.state {
        State::Held => "held",
        State::Refused(_) => "refused",
        State::Lost => "lost",
        State::GivingUp { once: false, .. } => "giving up",
        State::GivingUp { once: true, .. } => "giving up once",
        State::Ended => "ended",
    };
    (state, lease.in_flight.is_some(), lease.extension.is_some())
}

/// What came of what in which state: every one that can be reached is to be in some recording.
type Covered = HashSet<((&'static str, bool, bool), &'static str, &'static str)>;

/// Whether the state is looked at closely: of the other ttls only the numbers are different.
fn closely(ttl: Duration) -> bool {
    ttl == TTLS[0]
}

impl Recording {
    /// Carries out one event at `now`, and what follows. True if it showed something new.
    fn step(&mut self, event: usize, random: &mut fastrand::Rng, covered: &mut Covered) -> bool {
        let (ttl, now) = (counted(self.lease.terms.ttl), self.now);
        let before = match state(&self.lease) {
            state if closely(ttl) => state,
            (state, ..) => (state, false, false),
        };
        let (name, line, result) = match event {
            0 => ("next", "[\"next\"]".to_owned(), None),
            1..=5 if !self.sent.is_empty() => {
                let sent_at = self.sent[random.usize(..self.sent.len())];
                let (name, reply) = match event {
                    1 | 2 => ("yes", Some(Reply::Yes)),
                    3 => ("taken", Some(Reply::Lost(Lost::Taken))),
                    4 => ("gone", Some(Reply::Lost(Lost::Gone))),
                    _ => ("failed", None),
                };
                let awaited = self.lease.attempt_ended(sent_at, reply, now);
                if awaited {
                    self.sent.retain(|sent| *sent != sent_at);
                }
                let line = format!("[\"answered\",{},\"{name}\"]", sent_at.0);
                (name, line, Some(awaited))
            }
            6 | 7 => {
                let keep = if event == 6 { Duration::ZERO } else { ttl * 2 };
                let not_before = now + keep;
                self.lease.give_up(not_before, now);
                let name = if event == 6 {
                    "give up"
                } else {
                    "give up later"
                };
                (name, format!("[\"give_up\",{}]", not_before.0), None)
            }
            8 => {
                self.lease.renew_now(now);
                ("renew now", "[\"renew_now\"]".to_owned(), None)
            }
            9 => {
                let ttl = if random.bool() { ttl / 2 } else { ttl * 3 };
                // As the shell gives it: whole milliseconds.
                let ttl = Duration::from_millis(ttl.as_millis() as u64);
                self.lease.extend(ttl, now);
                ("extend", format!("[\"extend\",{}]", us(ttl)), None)
            }
            _ => return false,
        };
        let next = self.lease.next(now);
        let (after, action_line) = action(next);
        match next {
            Action::Sleep(until) => self.until = until,
            Action::Renew { give_up_at, .. } | Action::Release { give_up_at } => {
                self.sent.push(now);
                self.until = give_up_at;
            }
            Action::Idle | Action::Change { .. } | Action::Lose(_) | Action::End => {}
        }
        let lost = match self.lease.lost() {
            Some(lost) => format!("\"{}\"", word(lost)),
            None => "null".to_owned(),
        };
        let awaited = result.map_or(String::new(), |awaited| format!(",\"awaited\":{awaited}"));
        self.steps.push(format!(
            "{{\"at\":{},\"event\":{line}{awaited},\"action\":{action_line},\"ends_at\":{},\
             \"lost\":{lost},\"failures\":{},\"given_up\":{}}}",
            now.0,
            self.lease.ends_at().0,
            self.lease.failures(),
            self.lease.is_given_up(),
        ));
        covered.insert((before, name, after))
    }

    /// Time goes on: not at all, a little, until something is due, or for longer than anything lasts.
    fn wait(&mut self, random: &mut fastrand::Rng) {
        let ttl = counted(self.lease.terms.ttl);
        self.now = match random.u32(..10) {
            0 | 1 => self.now,
            2 => self.now + Duration::from_micros(random.u64(1..1000)),
            3 => self.now + part(ttl, random.u64(2..100)),
            4 => self.now + counted(ttl * 2),
            _ => self.until.max(self.now),
        };
    }
}

/// Walks at random, always the same, until nothing new has been seen for long. Only what shows something new
/// is kept, and only as far as it does.
fn record() -> String {
    let mut lines = String::new();
    for (number, ttl) in TTLS.into_iter().enumerate() {
        let mut random = fastrand::Rng::with_seed(number as u64);
        let mut covered = Covered::new();
        let mut in_vain = 0;
        while in_vain < 500 {
            let max_hold = random.bool().then(|| part(ttl, random.u64(1..4)));
            let terms = Terms { ttl, max_hold };
            let start = START + Duration::from_micros(random.u64(..1_000_000));
            let slow = part(ttl, random.u64(1..100)) * u32::from(random.bool());
            let in_doubt = random.u32(..10) == 0;
            let (begins, now) = if in_doubt {
                ("in_doubt", start)
            } else {
                ("granted", start + slow)
            };
            let lease = match in_doubt {
                true => Lease::in_doubt(terms, now),
                false => Lease::granted(terms, start, now),
            };
            let header = format!(
                "{{\"begins\":\"{begins}\",\"ttl_us\":{},\"max_hold_us\":{},\"sent_at\":{},\"now\":{}",
                us(ttl),
                max_hold.map_or("null".to_owned(), |max| us(max).to_string()),
                start.0,
                now.0,
            );
            let (sent, steps) = (Vec::new(), Vec::new());
            let mut walk = Recording {
                lease,
                now,
                sent,
                until: now,
                steps,
            };
            let mut worth = 0;
            for _ in 0..12 {
                // Half of the time only what a lease does by itself.
                let event = if random.bool() {
                    0
                } else {
                    random.usize(1..10)
                };
                if walk.step(event, &mut random, &mut covered) {
                    worth = walk.steps.len();
                }
                walk.wait(&mut random);
            }
            in_vain = if worth > 0 { 0 } else { in_vain + 1 };
            if worth > 0 {
                let steps = walk.steps[..worth].join(",");
                lines += &format!("{header},\"steps\":[{steps}]}}\n");
            }
        }
    }
    lines
}

#[test]
fn the_recordings_are_what_the_lease_does_today() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../conformance/vectors");
    let (file, today) = (folder.join("lease.jsonl"), record());
    if std::env::var_os("LOCKKEEPER_UPDATE").is_some() {
        std::fs::write(&file, &today).expect("the folder is there");
    }
    let recorded = std::fs::read_to_string(&file).unwrap_or_default();
    for (number, (recorded, today)) in recorded.lines().zip(today.lines()).enumerate() {
        assert_eq!(
            recorded,
            today,
            "line {}: see the head of this file",
            number + 1
        );
    }
    assert_eq!(recorded.lines().count(), today.lines().count());
    assert!(recorded.lines().count() > 100);
}
