//! Checks a history. Pure: neither clock nor I/O.
//!
//! It trusts only what is certain. A lease is valid from when its owner was notified of the grant until
//! a ttl after the last question that was answered yes, or until the release was asked for. What
//! contradicts that is a violation, or a lock lost if a fault that may lose something lies between.

use std::collections::BTreeMap;

use super::history::{Answer, Did, Event, Fault, History, RAW, Us};

#[cfg(test)]
mod tests;

/// A free lock goes to the next in the queue at once; this is for a machine that is busy.
pub const MAX_IDLE: Us = 900_000;

/// A wait may end this much later than requested.
pub const MAX_LATE: Us = 2_000_000;

/// How long it may take until whoever asks is in the queue, and until it is told of its grant. A helper tries first, then
/// dials, and waits; and its process is one of many.
fn on_its_way(event: &Event) -> Us {
    match event.by {
        RAW => MAX_IDLE,
        _ => MAX_LATE,
    }
}

/// After a fault clients need so long to find the server again.
const RECOVERY: Us = 2_500_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Two owners held valid leases at one instant.
    TwoOwners,
    /// A lease ended before its time.
    EndedEarly,
    /// Two owners were given the same fence.
    SameFence,
    /// An owner holds after one with a newer fence was notified.
    OlderFence,
    /// The storage accepted an older fence, or one of two owners.
    StorageFooled,
    /// The storage refused an owner with a valid lease.
    OwnerRefused,
    /// Nobody held the lock, somebody waited, and nothing happened.
    NobodyWoken,
    /// Somebody waited, and one who came much later was given the lock.
    PassedOver,
    Unanswered,
    AnsweredLate,
}

#[derive(Clone, Debug)]
pub struct Finding {
    pub kind: Kind,
    pub key: usize,
    pub at: Us,
    pub tenures: Vec<u64>,
}

#[derive(Clone, Debug, Default)]
pub struct Verdict {
    /// Grants that somebody was notified of.
    pub sections: usize,
    /// Those of them that a replica had acknowledged.
    pub safe: usize,
    pub violations: Vec<Finding>,
    /// What a fault that may lose something explains.
    pub lost: Vec<Finding>,
    /// What a failover to a server whose clock is ahead explains.
    pub shortened: Vec<Finding>,
}

impl Verdict {
    pub fn found(&self, kind: Kind) -> bool {
        self.violations.iter().any(|finding| finding.kind == kind)
    }
}

pub fn check(history: &History) -> Verdict {
    let mut checker = Checker {
        history,
        verdict: Verdict::default(),
    };
    let mut keys: BTreeMap<usize, Vec<&Event>> = BTreeMap::new();
    for event in &history.events {
        keys.entry(event.key).or_default().push(event);
    }
    for events in keys.values_mut() {
        events.sort_by_key(|event| event.asked);
        let tenures = tenures(events);
        let mut holds: Vec<Hold> = tenures
            .values()
            .filter_map(|tenure| Hold::of(tenure))
            .collect();
        checker.verdict.sections += holds.len();
        checker.verdict.safe += holds.iter().filter(|hold| hold.safe).count();
        checker.answers(events);
        checker.losses(&holds);
        checker.storage(events, &holds);
        checker.idleness(events, &tenures, &holds);
        checker.order(events);
        checker.fences(&mut holds);
        checker.owners(&mut holds);
    }
    checker.verdict
}

fn tenures<'e>(events: &[&'e Event]) -> BTreeMap<u64, Vec<&'e Event>> {
    let mut tenures: BTreeMap<u64, Vec<&Event>> = BTreeMap::new();
    for event in events {
        tenures.entry(event.tenure).or_default().push(event);
    }
    tenures
}

/// One owner's time with a lock, as far as it is certain.
#[derive(Debug)]
struct Hold {
    tenure: u64,
    key: usize,
    fence: u64,
    safe: bool,
    notified: Us,
    /// When it was asked for and until when it was then certain, for every confirmation.
    confirmations: Vec<(Us, Us)>,
    /// When the reply was that it is no more, if there was one.
    denied: Option<Us>,
    /// When its release was first asked for.
    released: Option<Us>,
    /// Valid until then, if nothing goes wrong.
    until: Us,
}

impl Hold {
    fn of(events: &[&Event]) -> Option<Hold> {
        let mut hold: Option<Hold> = None;
        for event in events {
            let answer = event.answer.as_ref();
            match (&event.did, answer) {
                (
                    Did::Acquire { .. } | Did::Renew | Did::Check,
                    Some((at, Answer::Held { fence, until })),
                ) => {
                    let hold = hold.get_or_insert_with(|| Hold {
                        tenure: event.tenure,
                        key: event.key,
                        fence: *fence,
                        safe: matches!(event.did, Did::Acquire { safe: true, .. }),
                        notified: *at,
                        confirmations: vec![],
                        denied: None,
                        released: None,
                        until: 0,
                    });
                    hold.confirmations.push((event.asked, *until));
                    hold.until = hold.until.max(*until);
                }
                (Did::Renew | Did::Check | Did::Release, answer) => {
                    let Some(hold) = &mut hold else { continue };
                    if let Some((at, Answer::Not)) = answer {
                        hold.denied.get_or_insert(*at);
                    }
                    if event.did == Did::Release {
                        hold.until = hold.until.min(event.asked);
                        hold.released.get_or_insert(event.asked);
                    }
                }
                _ => {}
            }
        }
        hold
    }

    /// Until when its owner believes in it.
    fn believed_until(&self) -> Us {
        self.denied.map_or(self.until, |at| at.min(self.until))
    }

    /// The last yes that was asked for before, and when that was.
    fn confirmed_before(&self, at: Us) -> (Us, Us) {
        let before = self
            .confirmations
            .iter()
            .rev()
            .find(|(asked, _)| *asked <= at);
        *before.unwrap_or(&self.confirmations[0])
    }
}

struct Checker<'h> {
    history: &'h History,
    verdict: Verdict,
}

impl Checker<'_> {
    fn fault_between(&self, from: Us, to: Us) -> impl Iterator<Item = &Fault> {
        let faults = self.history.faults.iter();
        faults.filter(move |fault| fault.from <= to && fault.to >= from)
    }

    /// `short` is by how much the lease of `hold` fell short at `at`.
    fn broken(&mut self, kind: Kind, hold: &Hold, at: Us, short: Us, other: Option<&Hold>) {
        // A yes counts from when the server was asked, which only its end tells.
        let confirmed = hold.confirmed_before(at).1.saturating_sub(self.history.ttl);
        let faults = || self.fault_between(confirmed, at);
        let shortened = faults().any(|fault| short <= fault.skew);
        let lost = !hold.safe && faults().any(|fault| fault.loses);
        let tenures = [Some(hold), other].into_iter().flatten();
        let finding = Finding {
            kind,
            key: hold.key,
            at,
            tenures: tenures.map(|hold| hold.tenure).collect(),
        };
        let verdict = &mut self.verdict;
        match (shortened, lost) {
            (true, _) => verdict.shortened.push(finding),
            (false, true) => verdict.lost.push(finding),
            (false, false) => verdict.violations.push(finding),
        }
    }

    fn violation(&mut self, kind: Kind, key: usize, at: Us, tenures: Vec<u64>) {
        let finding = Finding {
            kind,
            key,
            at,
            tenures,
        };
        self.verdict.violations.push(finding);
    }

    fn answers(&mut self, events: &[&Event]) {
        for event in events {
            let Some((answered, _)) = event.answer else {
                self.violation(Kind::Unanswered, event.key, event.asked, vec![event.tenure]);
                continue;
            };
            let wait = match event.did {
                Did::Acquire { wait, .. } => wait,
                _ => 0,
            };
            let due = event.asked + wait + MAX_LATE;
            let disturbed = || {
                self.fault_between(event.asked.saturating_sub(RECOVERY), answered)
                    .next()
                    .is_some()
            };
            if answered > due && !disturbed() {
                self.violation(Kind::AnsweredLate, event.key, due, vec![event.tenure]);
            }
        }
    }

    fn losses(&mut self, holds: &[Hold]) {
        for hold in holds {
            let Some(denied) = hold.denied else { continue };
            // A release whose answer a fault swallowed is asked for again, and all is as it should be.
            let swallowed = |asked| self.fault_between(asked, denied).next().is_some();
            if hold.released.is_some_and(swallowed) {
                continue;
            }
            // Of the lease as it was before the release was asked for.
            let end = hold.confirmed_before(denied).1;
            if denied < end {
                self.broken(Kind::EndedEarly, hold, denied, end - denied, None);
            }
        }
    }

    fn owners(&mut self, holds: &mut [Hold]) {
        holds.sort_by_key(|hold| hold.notified);
        let mut longest: Option<&Hold> = None;
        for hold in &*holds {
            if let Some(before) = longest {
                let end = before.believed_until();
                if end > hold.notified && hold.believed_until() > hold.notified {
                    let short = end - hold.notified;
                    self.broken(Kind::TwoOwners, before, hold.notified, short, Some(hold));
                }
                if end >= hold.believed_until() {
                    continue;
                }
            }
            longest = Some(hold);
        }
    }

    /// Fences grow even over what is lost.
    fn fences(&mut self, holds: &mut [Hold]) {
        holds.sort_by_key(|hold| hold.fence);
        let mut latest: Option<(Us, u64)> = None;
        for pair in holds.windows(2) {
            let [older, newer] = pair else { unreachable!() };
            // What the server confirmed, not what its owner believed: a lease counts from the question.
            let ends = older.confirmations.iter().map(|(_, until)| *until);
            let last_yes = ends.max().unwrap_or(0).saturating_sub(self.history.ttl);
            let last_yes = (last_yes, older.tenure);
            latest = latest.max(Some(last_yes));
            if older.fence == newer.fence {
                let both = vec![older.tenure, newer.tenure];
                self.violation(Kind::SameFence, newer.key, newer.notified, both);
            } else if let Some((asked, tenure)) =
                latest.filter(|(asked, _)| *asked > newer.notified)
            {
                let both = vec![tenure, newer.tenure];
                self.violation(Kind::OlderFence, newer.key, asked, both);
            }
        }
    }

    fn storage(&mut self, events: &[&Event], holds: &[Hold]) {
        let mut writes: Vec<(u64, u64, &Event)> = events
            .iter()
            .filter_map(|event| match event.did {
                Did::Write { order, fence } => Some((order, fence, *event)),
                _ => None,
            })
            .collect();
        writes.sort_by_key(|(order, ..)| *order);
        let mut newest: Option<(u64, u64)> = None;
        for (_, fence, event) in writes {
            let tenure = event.tenure;
            match event.answer {
                Some((at, Answer::Accepted)) => {
                    if let Some((before, owner)) = newest
                        && (fence < before || fence == before && tenure != owner)
                    {
                        self.violation(Kind::StorageFooled, event.key, at, vec![owner, tenure]);
                    }
                    newest = newest.max(Some((fence, tenure)));
                }
                Some((at, Answer::Refused)) => {
                    let hold = holds.iter().find(|hold| hold.tenure == tenure);
                    if let Some(hold) = hold.filter(|hold| at < hold.believed_until()) {
                        let short = hold.until - at;
                        self.broken(Kind::OwnerRefused, hold, at, short, None);
                    }
                }
                _ => {}
            }
        }
    }

    /// First come, first served. Who comes shortly after another may be heard before.
    fn order(&mut self, events: &[&Event]) {
        let acquires = || {
            let events = events.iter();
            events.filter(|event| matches!(event.did, Did::Acquire { .. }))
        };
        let mut first_asked: BTreeMap<u64, Us> = BTreeMap::new();
        for event in acquires() {
            first_asked.entry(event.tenure).or_insert(event.asked);
        }
        for granted in acquires() {
            let Some((notified, Answer::Held { .. })) = granted.answer else {
                continue;
            };
            // Who hangs up while it is granted, and asks again, is notified of that grant.
            let came = first_asked[&granted.tenure];
            let mut earlier = acquires().filter(|event| event.asked + on_its_way(event) < came);
            let passed = |event: &&&Event| {
                let waits = matches!(event.did, Did::Acquire { wait: 1.., .. });
                waits && event.answer.as_ref().is_some_and(|(at, _)| *at > notified)
            };
            let Some(waiter) = earlier.find(passed) else {
                continue;
            };
            let since = waiter.asked.saturating_sub(RECOVERY);
            if self.fault_between(since, notified).next().is_none() {
                let both = vec![waiter.tenure, granted.tenure];
                self.violation(Kind::PassedOver, granted.key, notified, both);
            }
        }
    }

    /// Between two times at which somebody may hold the lock, nobody waits for long.
    fn idleness(
        &mut self,
        events: &[&Event],
        tenures: &BTreeMap<u64, Vec<&Event>>,
        holds: &[Hold],
    ) {
        let ttl = self.history.ttl;
        let notified: BTreeMap<u64, Us> = holds
            .iter()
            .map(|hold| (hold.tenure, hold.notified))
            .collect();
        let faults = self.history.faults.iter().map(|fault| {
            let after = if fault.loses { ttl } else { 0 } + fault.skew + RECOVERY;
            (fault.from, fault.to + after)
        });
        let mut busy: Vec<(Us, Us)> = faults.collect();
        for (tenure, events) in tenures {
            busy.extend(maybe_held(events, notified.get(tenure).copied(), ttl));
        }
        busy.sort();
        let Some((first, _)) = busy.first() else {
            return;
        };
        let mut free_since = *first;
        for (from, to) in busy {
            let waits = |event: &&&Event| {
                let woken_at = free_since + on_its_way(event);
                let answered = event.answer.as_ref().map_or(Us::MAX, |(at, _)| *at);
                matches!(event.did, Did::Acquire { wait: 1.., .. })
                    && event.asked <= free_since
                    && from.min(answered) > woken_at
            };
            if from > free_since + MAX_IDLE
                && let Some(waiter) = events.iter().find(waits)
            {
                let (key, tenure) = (waiter.key, waiter.tenure);
                let woken_at = free_since + on_its_way(waiter);
                self.violation(Kind::NobodyWoken, key, woken_at, vec![tenure]);
            }
            free_since = free_since.max(to);
        }
    }
}

/// When the owner of these events may hold the lock at most.
fn maybe_held(events: &[&Event], notified: Option<Us>, ttl: Us) -> Option<(Us, Us)> {
    let unconfirmed = |event: &&&Event| {
        let failed = matches!(event.answer, Some((_, Answer::Failed(_))));
        matches!(event.did, Did::Acquire { .. }) && failed
    };
    let doubted = events.iter().find(unconfirmed).map(|event| event.asked);
    let from = [notified, doubted].into_iter().flatten().min()?;
    let mut to = from;
    for event in events {
        let at = event.answer.as_ref().map_or(event.asked, |(at, _)| *at);
        match (&event.did, &event.answer) {
            (Did::Release, Some((_, Answer::Released | Answer::Not))) => return Some((from, at)),
            (Did::Acquire { .. } | Did::Renew | Did::Check, _) => to = to.max(at + ttl),
            _ => {}
        }
    }
    Some((from, to))
}
