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
    /// More owners held valid leases at one instant than one of them allows.
    TooMany,
    /// A lease ended before its time.
    EndedEarly,
    /// Two owners were given the same fence.
    SameFence,
    /// An owner asked after one with a newer fence was notified, or holds after one who is to be alone was.
    OlderFence,
    /// The storage accepted a fence older than that of an owner who was to be alone, or one of two owners.
    StorageFooled,
    /// The storage refused an owner with a valid lease.
    OwnerRefused,
    /// Somebody waited, whoever waited would have been let in, and nobody was.
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
    /// Those of them that began while another owner held the lock.
    pub beside: usize,
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
        checker.company(&mut holds);
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
    limit: u16,
    fence: u64,
    safe: bool,
    /// When it was first asked for.
    came: Us,
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
                        limit: event.limit,
                        fence: *fence,
                        safe: matches!(event.did, Did::Acquire { safe: true, .. }),
                        came: events[0].asked,
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

/// Whether nobody who holds with these limits has more company than it allows.
fn is_allowed<'l>(limits: impl Iterator<Item = &'l u16> + Clone) -> bool {
    let holding = limits.clone().count();
    limits
        .min()
        .is_none_or(|limit| usize::from(*limit) >= holding)
}

/// Why a lease may have ended before its time.
#[derive(PartialEq)]
enum Excuse {
    Shortened,
    Lost,
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
    fn excuse(&self, hold: &Hold, at: Us, short: Us) -> Option<Excuse> {
        // A yes counts from when the server was asked, which only its end tells.
        let confirmed = hold.confirmed_before(at).1.saturating_sub(self.history.ttl);
        let faults = || self.fault_between(confirmed, at);
        if faults().any(|fault| short <= fault.skew) {
            return Some(Excuse::Shortened);
        }
        let lost = !hold.safe && faults().any(|fault| fault.loses);
        lost.then_some(Excuse::Lost)
    }

    fn broken(&mut self, kind: Kind, hold: &Hold, at: Us, short: Us) {
        let excuse = self.excuse(hold, at, short);
        self.found(kind, hold.key, at, vec![hold.tenure], excuse);
    }

    fn violation(&mut self, kind: Kind, key: usize, at: Us, tenures: Vec<u64>) {
        self.found(kind, key, at, tenures, None);
    }

    fn found(&mut self, kind: Kind, key: usize, at: Us, tenures: Vec<u64>, excuse: Option<Excuse>) {
        let findings = match excuse {
            Some(Excuse::Shortened) => &mut self.verdict.shortened,
            Some(Excuse::Lost) => &mut self.verdict.lost,
            None => &mut self.verdict.violations,
        };
        findings.push(Finding {
            kind,
            key,
            at,
            tenures,
        });
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
                self.broken(Kind::EndedEarly, hold, denied, end - denied);
            }
        }
    }

    /// At no moment has a holder more company than it allows.
    fn company(&mut self, holds: &mut [Hold]) {
        holds.sort_by_key(|hold| hold.notified);
        let mut together: Vec<&Hold> = vec![];
        for hold in &*holds {
            let at = hold.notified;
            together.retain(|before| before.believed_until() > at);
            if hold.believed_until() <= at {
                continue;
            }
            self.verdict.beside += usize::from(!together.is_empty());
            let excuse = |before: &Hold| self.excuse(before, at, before.believed_until() - at);
            // As if all had gone whose end can be explained so.
            let allowed_without = |is_gone: &dyn Fn(&Hold) -> bool| {
                let others = together.iter().filter(|before| !is_gone(before));
                is_allowed(others.chain([&hold]).map(|hold| &hold.limit))
            };
            if !allowed_without(&|_| false) {
                let is_shortened = |before: &Hold| excuse(before) == Some(Excuse::Shortened);
                let excuse = if allowed_without(&is_shortened) {
                    Some(Excuse::Shortened)
                } else if allowed_without(&|before| excuse(before).is_some()) {
                    Some(Excuse::Lost)
                } else {
                    None
                };
                let all = together.iter().chain([&hold]);
                let tenures = all.map(|hold| hold.tenure).collect();
                self.found(Kind::TooMany, hold.key, at, tenures, excuse);
            }
            together.push(hold);
        }
    }

    /// Fences grow even over what is lost, and that of an owner who is to be alone ends all before.
    fn fences(&mut self, holds: &mut [Hold]) {
        holds.sort_by_key(|hold| hold.fence);
        let (mut last_came, mut last_yes) = (None, None);
        for pair in holds.windows(2) {
            let [older, newer] = pair else { unreachable!() };
            // What the server confirmed, not what its owner believed: a lease counts from the question.
            let ends = older.confirmations.iter().map(|(_, until)| *until);
            let yes = ends.max().unwrap_or(0).saturating_sub(self.history.ttl);
            last_came = last_came.max(Some((older.came, older.tenure)));
            last_yes = last_yes.max(Some((yes, older.tenure)));
            let latest = match newer.limit {
                1 => last_yes,
                _ => last_came,
            };
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
                    if event.limit == 1 {
                        newest = newest.max(Some((fence, tenure)));
                    }
                }
                Some((at, Answer::Refused)) => {
                    let hold = holds.iter().find(|hold| hold.tenure == tenure);
                    if let Some(hold) = hold.filter(|hold| at < hold.believed_until()) {
                        let short = hold.until - at;
                        self.broken(Kind::OwnerRefused, hold, at, short);
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
            let Some((notified, Answer::Held { fence, .. })) = granted.answer else {
                continue;
            };
            // Who hangs up while it is granted, and asks again, is notified of that grant.
            let came = first_asked[&granted.tenure];
            let mut earlier = acquires().filter(|event| event.asked + on_its_way(event) < came);
            let passed = |event: &&&Event| {
                // Several hear in any order of what became of them in one step: of those who are let in together the
                // fences tell who was first, and who leaves the head of the queue lets others in.
                let was_first = match (&event.did, &event.answer) {
                    (_, Some((_, Answer::Held { fence: its, .. }))) => *its < fence,
                    (Did::Acquire { wait, .. }, Some((_, Answer::Not))) => {
                        event.asked + wait <= notified
                    }
                    _ => false,
                };
                let is_later = event.answer.is_some() && event.answered() > notified;
                event.waits() && is_later && !was_first
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

    /// While there is a place for whoever waits, nobody waits for long.
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
        let mut moments = vec![];
        let mut note = |crowd, limit, from, to| {
            if from < to {
                moments.extend([(from, true, crowd, limit), (to, false, crowd, limit)]);
            }
        };
        for fault in &self.history.faults {
            // Then nobody is let in.
            let after = if fault.loses { ttl } else { 0 } + fault.skew + RECOVERY;
            note(Crowd::MayHold, 0, fault.from, fault.to + after);
        }
        for (tenure, events) in tenures {
            if let Some((from, to)) = maybe_held(events, notified.get(tenure).copied(), ttl) {
                note(Crowd::MayHold, events[0].limit, from, to);
            }
        }
        for event in events.iter().filter(|event| event.waits()) {
            note(Crowd::Waits, event.limit, event.asked, event.answered());
        }
        moments.sort();
        let (mut holding, mut waiting) = (vec![], vec![]);
        let mut free_since = None;
        for (at, comes, crowd, limit) in moments {
            if let Some(since) = free_since
                && at > since + MAX_IDLE
                && let Some(waiter) = events.iter().find(|event| {
                    let woken_at = since + on_its_way(event);
                    event.waits() && event.asked <= since && at.min(event.answered()) > woken_at
                })
            {
                let woken_at = since + on_its_way(waiter);
                self.violation(Kind::NobodyWoken, waiter.key, woken_at, vec![waiter.tenure]);
                free_since = Some(at);
            }
            let limits = match crowd {
                Crowd::MayHold => &mut holding,
                Crowd::Waits => &mut waiting,
            };
            if comes {
                limits.push(limit);
            } else {
                let one = limits.iter().position(|of| *of == limit);
                limits.swap_remove(one.unwrap());
            }
            // Whoever of them is the first who waits.
            let strictest = holding.iter().chain(&waiting).min();
            let is_free = strictest.is_none_or(|limit| usize::from(*limit) > holding.len());
            free_since = match is_free {
                false => None,
                true if comes && crowd == Crowd::MayHold => Some(at),
                // Before somebody has held it, owners and servers have only begun.
                true if comes => free_since,
                true => free_since.or(Some(at)),
            };
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Crowd {
    MayHold,
    Waits,
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
