//! Core: the holder's view of its lease. No clock, no I/O: [`Lease::next`] is told what time it is
//! and says what to do; whoever carries that out reports back with [`Lease::answered`].
//!
//! What always holds, whatever is answered and however late:
//! 1. `ends_at` is never later than the end the server keeps for this owner.
//! 2. A lease that was lost or given up is never renewed again.
//! 3. A loss is said exactly once, and by silence no later than the first look after `ends_at`.

use std::ops::Add;
use std::time::Duration;

/// The shortest ttl the helper takes: below it `ttl / 6` for an attempt is less than what one
/// exchange over a network with a busy machine at either end may need.
pub(crate) const MIN_TTL: Duration = Duration::from_millis(100);

/// The longest that the module takes: 2^53 - 1 ms.
pub(crate) const MAX_TTL: Duration = Duration::from_millis((1 << 53) - 1);

/// A point in time on a clock that never steps and runs through suspend, counted from boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Moment(Duration);

impl Moment {
    pub(crate) const fn after_boot(elapsed: Duration) -> Moment {
        Moment(elapsed)
    }

    pub(crate) fn since_boot(self) -> Duration {
        self.0
    }

    /// The time from `earlier` until this moment, zero if it is not earlier.
    pub(crate) fn since(self, earlier: Moment) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// The last moment until this one that is so many steps from boot.
    fn rounded_down(self, step: Duration) -> Moment {
        // It fits: no step is longer than MAX_TTL / 1200, 238 years, and 2^64 ns are 584.
        let over = self.0.as_nanos() % step.as_nanos().max(1);
        Moment(self.0.saturating_sub(Duration::from_nanos(over as u64)))
    }
}

impl Add<Duration> for Moment {
    type Output = Moment;

    fn add(self, duration: Duration) -> Moment {
        Moment(self.0.saturating_add(duration))
    }
}

/// Why a lock is not held any longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lost {
    /// The server says that another owner holds it.
    Taken,
    /// Nobody holds it: the server says that it was deleted, evicted, or had run out; or
    /// [`close`](crate::Lockkeeper::close) gives it back.
    Gone,
    /// No renewal was acknowledged in time: the lease has ended by our own clock. Said before the
    /// server can give the lock to another.
    Expired,
    /// It was held for `max_hold`: it is not renewed any more, and
    /// [`remaining`](crate::Held::remaining) tells how much time is left to stop in.
    MaxHold,
}

impl std::fmt::Display for Lost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Lost::Taken => "another owner holds it",
            Lost::Gone => "it is gone from the server",
            Lost::Expired => "it could not be renewed before it ended",
            Lost::MaxHold => "it was held as long as it may be",
        })
    }
}

/// What the holder agreed to when it acquired.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) ttl: Duration,
    pub(crate) max_hold: Option<Duration>,
}

impl Terms {
    /// How much earlier than the server we let the lease end: one per cent for two clocks that run
    /// at different speeds, and 2 ms because the server counts in whole milliseconds.
    fn margin(&self) -> Duration {
        self.ttl / 100 + Duration::from_millis(2)
    }

    /// Until when a lease may be believed that was asked for at `sent_at`. Counted from before the
    /// request left, so that a slow reply can only make us stop too early, never too late.
    pub(crate) fn ends_at(&self, sent_at: Moment) -> Moment {
        sent_at + self.ttl.saturating_sub(self.margin())
    }

    /// When a lease is to be renewed that was asked for at `sent_at`: at a third of the ttl, or up to a
    /// 1200th of it sooner, so that the renewals of many locks fall on the same moments and travel
    /// together. Of 100,000 locks with a ttl of 30 s, which all come within 10 s, 250 do.
    fn renew_at(&self, sent_at: Moment) -> Moment {
        (sent_at + self.ttl / 3).rounded_down(self.ttl / 1200)
    }

    /// The longest that one attempt may take: four of them fit between the first, at a third of
    /// the ttl, and the end.
    pub(crate) fn attempt(&self) -> Duration {
        self.ttl / 6
    }

    /// Whether so much of the lease is gone that a holder should renew before it begins to work.
    pub(crate) fn is_stale(&self, sent_at: Moment, now: Moment) -> bool {
        self.ends_at(sent_at).since(now) < self.ttl * 2 / 3
    }

    /// How long to wait after the `failures`-th failure in a row, so that a server that is down is
    /// asked some ten times before the lease ends and not thousands of times.
    fn back_off(&self, failures: u32) -> Duration {
        let doubled = 1 << failures.saturating_sub(1).min(3);
        (self.ttl / 60 * doubled).min(self.ttl / 12)
    }
}

/// What is to be done now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Nothing before then.
    Sleep(Moment),
    /// Nothing until the holder speaks.
    Idle,
    /// Send RENEW with this ttl and report the answer, by `give_up_at` at the latest.
    Renew { ttl: Duration, give_up_at: Moment },
    /// Send RELEASE and report the answer, by `give_up_at` at the latest.
    Release { give_up_at: Moment },
    /// Tell the holder, once.
    Lose(Lost),
    /// Forget this lease.
    End,
}

/// How an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The server said yes.
    Yes,
    /// The server said no, which is final: the lock is `Taken` or `Gone`.
    No(Lost),
    /// Nobody answered, or with an error: whether it was carried out is not known.
    Failed,
}

/// What the holder wants of its lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// To keep it.
    Held,
    /// The server refused it, and the holder has not been told yet.
    Refused(Lost),
    /// Nothing: the holder was told that it is lost, and has not let go yet.
    Lost,
    /// To give it up, but not before this moment; `once` if it may be another's by now.
    GivingUp { not_before: Moment, once: bool },
    /// It is over.
    Ended,
}

#[derive(Clone, Debug)]
pub(crate) struct Lease {
    terms: Terms,
    state: State,
    ends_at: Moment,
    /// When renewal ends because of `max_hold`.
    hold_until: Option<Moment>,
    /// When the next attempt is due.
    due_at: Moment,
    /// When the attempt in flight was sent: its name, so that a late answer to an earlier one can
    /// be told apart.
    in_flight: Option<Moment>,
    failures: u32,
    /// The loss that the holder was told, or will be when it lets go.
    lost: Option<Lost>,
}

impl Lease {
    /// A lease that was granted: asked for at `sent_at`, known at `now`.
    pub(crate) fn granted(terms: Terms, sent_at: Moment, now: Moment) -> Lease {
        Lease {
            terms,
            state: State::Held,
            ends_at: terms.ends_at(sent_at),
            hold_until: terms.max_hold.map(|max| now + max),
            due_at: terms.renew_at(sent_at),
            in_flight: None,
            failures: 0,
            lost: None,
        }
    }

    /// A lease of which nobody knows whether it was granted: only good for giving it up. Whatever
    /// the server granted ends by itself one ttl from now.
    pub(crate) fn in_doubt(terms: Terms, now: Moment) -> Lease {
        let mut lease = Lease::granted(terms, now, now);
        lease.give_up(now, now);
        lease
    }

    /// Until when the holder may believe that the lock is its own.
    pub(crate) fn ends_at(&self) -> Moment {
        self.ends_at
    }

    /// Failures in a row since the server last answered.
    pub(crate) fn failures(&self) -> u32 {
        self.failures
    }

    /// The loss that the holder was told, if it was.
    pub(crate) fn lost(&self) -> Option<Lost> {
        self.lost
    }

    /// Whether the holder has let go.
    pub(crate) fn is_given_up(&self) -> bool {
        matches!(self.state, State::GivingUp { .. } | State::Ended)
    }

    /// The holder wants to hear from the server now.
    pub(crate) fn renew_now(&mut self, now: Moment) {
        self.due_at = self.due_at.min(now);
    }

    /// The holder lets go, but wants the lock kept until `not_before`. An attempt in flight is
    /// forgotten: what it answers is of no interest any more.
    pub(crate) fn give_up(&mut self, not_before: Moment, now: Moment) {
        match self.state {
            State::GivingUp { .. } | State::Ended => return,
            State::Refused(lost) => self.lost = Some(lost),
            State::Held if now >= self.ends_at => self.lost = Some(Lost::Expired),
            State::Held | State::Lost => {}
        }
        self.in_flight = None;
        self.failures = 0;
        self.due_at = now;
        self.state = match self.lost {
            None => State::GivingUp {
                not_before,
                once: false,
            },
            // The server would say no: there is nothing of ours to release.
            Some(Lost::Taken | Lost::Gone) => State::Ended,
            // Should the server still keep it for us, it is freed.
            Some(Lost::Expired | Lost::MaxHold) => {
                self.ends_at = now + self.terms.attempt();
                State::GivingUp {
                    not_before: now,
                    once: true,
                }
            }
        };
    }

    /// What to do at `now`. An action is given once; asking again gives what comes after it.
    pub(crate) fn next(&mut self, now: Moment) -> Action {
        match self.state {
            State::Held => self.keep(now),
            State::Refused(lost) => self.lose(lost),
            State::Lost => Action::Idle,
            State::GivingUp { not_before, .. } => self.let_go(now, not_before),
            State::Ended => Action::End,
        }
    }

    fn keep(&mut self, now: Moment) -> Action {
        if now >= self.ends_at {
            return self.lose(Lost::Expired);
        }
        if self.hold_until.is_some_and(|until| now >= until) {
            return self.lose(Lost::MaxHold);
        }
        if self.in_flight.is_none() && now >= self.due_at {
            return Action::Renew {
                ttl: self.terms.ttl,
                give_up_at: self.attempt(now),
            };
        }
        let mut until = self.ends_at;
        if let Some(hold_until) = self.hold_until {
            until = until.min(hold_until);
        }
        if self.in_flight.is_none() {
            until = until.min(self.due_at);
        }
        Action::Sleep(until)
    }

    fn let_go(&mut self, now: Moment, not_before: Moment) -> Action {
        // From here on the server has let it go by itself.
        if now >= self.ends_at {
            self.state = State::Ended;
            return Action::End;
        }
        if self.in_flight.is_some() {
            return Action::Sleep(self.ends_at);
        }
        if now < self.due_at {
            return Action::Sleep(self.due_at.min(self.ends_at));
        }
        let give_up_at = self.attempt(now);
        match not_before.since(now) {
            Duration::ZERO => Action::Release { give_up_at },
            ttl => Action::Renew { ttl, give_up_at },
        }
    }

    fn attempt(&mut self, now: Moment) -> Moment {
        self.in_flight = Some(now);
        (now + self.terms.attempt()).min(self.ends_at)
    }

    fn lose(&mut self, lost: Lost) -> Action {
        self.state = State::Lost;
        self.lost = Some(lost);
        Action::Lose(lost)
    }

    /// The attempt that was begun at `sent_at` has ended. False if nobody waits for it any more.
    pub(crate) fn answered(&mut self, sent_at: Moment, answer: Answer, now: Moment) -> bool {
        if self.in_flight != Some(sent_at) {
            return false;
        }
        self.in_flight = None;
        match (self.state, answer) {
            (State::GivingUp { once: true, .. }, _)
            | (State::GivingUp { .. }, Answer::Yes | Answer::No(_)) => self.state = State::Ended,
            (_, Answer::Failed) => {
                self.failures += 1;
                self.due_at = now + self.terms.back_off(self.failures);
            }
            // Said by `next`, so that there is one place where a loss is told.
            (State::Held, Answer::No(lost)) => self.state = State::Refused(lost),
            // A yes that is read after the end comes too late: the end may have been acted upon.
            (State::Held, Answer::Yes) if now < self.ends_at => {
                self.failures = 0;
                self.ends_at = self.terms.ends_at(sent_at);
                self.due_at = self.terms.renew_at(sent_at);
            }
            (State::Held | State::Refused(_) | State::Lost | State::Ended, _) => {}
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_millis(6000);
    const START: Moment = Moment::after_boot(Duration::from_secs(1000));

    fn terms() -> Terms {
        Terms {
            ttl: TTL,
            max_hold: None,
        }
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn it_is_renewed_at_a_third_of_the_ttl_counted_from_the_send() {
        let mut lease = Lease::granted(terms(), START, START + ms(1500));
        assert_eq!(
            lease.next(START + ms(1999)),
            Action::Sleep(START + ms(2000))
        );
        let sent_at = START + ms(2000);
        let renew = Action::Renew {
            ttl: TTL,
            give_up_at: sent_at + ms(1000),
        };
        assert_eq!(lease.next(sent_at), renew);
        lease.answered(sent_at, Answer::Yes, sent_at + ms(900));
        assert_eq!(lease.ends_at(), sent_at + (TTL - ms(62)));
        assert_eq!(
            lease.next(sent_at + ms(900)),
            Action::Sleep(sent_at + ms(2000))
        );
    }

    #[test]
    fn renewals_of_many_locks_fall_on_the_same_moment() {
        let due = |sent_at| match Lease::granted(terms(), sent_at, sent_at).next(sent_at) {
            Action::Sleep(until) => until,
            action => panic!("{action:?}"),
        };
        for later in 0..5 {
            assert_eq!(due(START + ms(later)), START + ms(2000));
        }
        assert_eq!(due(START + ms(5)), START + ms(2005));
        // Of a lease for ever too, which is not renewed at once.
        let ttl = MAX_TTL;
        let for_ever = Terms { ttl, ..terms() };
        assert!(for_ever.renew_at(START) > START + ttl / 4);
    }

    #[test]
    fn a_no_is_final_and_said_once() {
        let mut lease = Lease::granted(terms(), START, START);
        let sent_at = START + ms(2000);
        lease.next(sent_at);
        lease.answered(sent_at, Answer::No(Lost::Taken), sent_at + ms(1));
        assert_eq!(lease.next(sent_at + ms(1)), Action::Lose(Lost::Taken));
        assert_eq!(lease.next(sent_at + ms(1)), Action::Idle);
        lease.give_up(sent_at, sent_at + ms(2));
        assert_eq!(
            lease.next(sent_at + ms(2)),
            Action::End,
            "nothing of ours to release"
        );
    }

    #[test]
    fn failures_are_retried_with_back_off_some_ten_times_before_the_end() {
        let mut lease = Lease::granted(terms(), START, START);
        let (mut now, mut attempts) = (START, Vec::new());
        loop {
            match lease.next(now) {
                Action::Sleep(until) => now = until,
                Action::Renew { .. } => {
                    attempts.push(now.since(START).as_millis());
                    lease.answered(now, Answer::Failed, now);
                }
                action => {
                    assert_eq!(action, Action::Lose(Lost::Expired));
                    break;
                }
            }
        }
        assert_eq!(
            attempts,
            [2000, 2100, 2300, 2700, 3200, 3700, 4200, 4700, 5200, 5700]
        );
        assert_eq!(now, START + ms(5938));
    }

    #[test]
    fn a_hung_server_leaves_room_for_four_attempts() {
        let mut lease = Lease::granted(terms(), START, START);
        let (mut now, mut attempts) = (START, 0);
        loop {
            match lease.next(now) {
                Action::Sleep(until) => now = until,
                Action::Renew { give_up_at, .. } => {
                    attempts += 1;
                    lease.answered(now, Answer::Failed, give_up_at);
                    now = give_up_at;
                }
                action => {
                    assert_eq!(action, Action::Lose(Lost::Expired));
                    break;
                }
            }
        }
        assert_eq!(attempts, 4);
    }

    #[test]
    fn max_hold_ends_renewal_and_says_so() {
        let max_hold = Some(ms(7000));
        let mut lease = Lease::granted(Terms { ttl: TTL, max_hold }, START, START);
        let mut now = START;
        let lost = loop {
            match lease.next(now) {
                Action::Sleep(until) => now = until,
                Action::Renew { .. } => {
                    lease.answered(now, Answer::Yes, now);
                }
                Action::Lose(lost) => break lost,
                action => panic!("{action:?}"),
            }
        };
        assert_eq!((lost, now), (Lost::MaxHold, START + ms(7000)));
        assert!(
            lease.ends_at().since(now) > ms(4000),
            "there is time to stop"
        );
    }

    #[test]
    fn kept_until_a_moment_it_is_given_the_rest_as_its_ttl() {
        let mut lease = Lease::granted(terms(), START, START);
        lease.give_up(START + ms(50_000), START + ms(100));
        let give_up_at = START + ms(1100);
        assert_eq!(
            lease.next(START + ms(100)),
            Action::Renew {
                ttl: ms(49_900),
                give_up_at
            }
        );
        lease.answered(START + ms(100), Answer::Yes, START + ms(101));
        assert_eq!(lease.next(START + ms(101)), Action::End);
    }

    /// What happened so far on one path through everything that can happen.
    #[derive(Clone)]
    struct World {
        now: Moment,
        lease: Lease,
        /// When the server's key of this owner ends; none if it never had one or was robbed.
        server_ends_at: Option<Moment>,
        /// Somebody took or deleted the lock by force, which no clock of ours can show.
        robbed: bool,
        told: Option<Lost>,
        let_go: bool,
        releases_after_loss: u32,
    }

    /// The good things that must happen on some path, or a lease that does nothing would pass.
    #[derive(Default)]
    struct Seen {
        paths: u64,
        renewed_twice: bool,
        recovered_after_failure: bool,
        lost: std::collections::HashSet<Lost>,
        released: bool,
    }

    /// How the world answers an attempt.
    const FATES: [(Carried, Answer, u64); 8] = [
        (Carried::Out, Answer::Yes, 0),
        (Carried::Out, Answer::Yes, 900),
        (Carried::Out, Answer::Yes, 7000), // read after a stop of the process
        (Carried::Out, Answer::Failed, 1000), // the reply was lost
        (Carried::Nowhere, Answer::Failed, 0),
        (Carried::Nowhere, Answer::Failed, 1000),
        (Carried::TooLate, Answer::No(Lost::Taken), 1),
        (Carried::TooLate, Answer::No(Lost::Gone), 900),
    ];

    #[derive(Clone, Copy, PartialEq)]
    enum Carried {
        Out,
        Nowhere,
        /// Somebody took the lock by force before.
        TooLate,
    }

    impl World {
        fn check(&self) {
            let believed = !self.let_go && self.told.is_none() && self.now < self.lease.ends_at();
            if believed && !self.robbed {
                let end = self
                    .server_ends_at
                    .expect("believed, but the server never granted");
                assert!(
                    end > self.now,
                    "believed {:?} after the server's end",
                    self.now.since(end)
                );
            }
        }

        fn step(&self, depth: u32, renewals: u32, failed: bool, seen: &mut Seen) {
            self.check();
            if depth == 0 {
                seen.paths += 1;
                return;
            }
            if !self.let_go {
                let mut holder = self.clone();
                holder.let_go = true;
                holder.lease.give_up(self.now, self.now);
                holder.step(depth - 1, renewals, failed, seen);
            }
            let mut world = self.clone();
            match world.lease.next(self.now) {
                Action::Sleep(until) => {
                    assert!(until > self.now, "would spin");
                    for stopped in [ms(0), TTL * 2] {
                        let mut later = world.clone();
                        later.now = until + stopped;
                        later.step(depth - 1, renewals, failed, seen);
                    }
                }
                Action::Renew { give_up_at, .. } => {
                    assert!(
                        !world.let_go && world.told.is_none(),
                        "renewed what is given up"
                    );
                    assert!(give_up_at > self.now && give_up_at.since(self.now) <= TTL / 6);
                    for fate in FATES {
                        let mut after = world.clone();
                        after.meet(fate, |now| Some(now + TTL));
                        let renewals = renewals + u32::from(fate.1 == Answer::Yes);
                        seen.renewed_twice |= renewals == 2;
                        seen.recovered_after_failure |= failed && fate.1 == Answer::Yes;
                        let failed = failed || fate.1 == Answer::Failed;
                        after.step(depth - 1, renewals, failed, seen);
                    }
                }
                Action::Release { .. } => {
                    assert!(world.let_go, "released under the holder");
                    world.releases_after_loss += u32::from(world.told.is_some());
                    assert!(world.releases_after_loss <= 1);
                    seen.released = true;
                    for fate in FATES {
                        let mut after = world.clone();
                        after.meet(fate, |_| None);
                        after.step(depth - 1, renewals, failed, seen);
                    }
                }
                Action::Lose(lost) => {
                    assert!(!world.let_go && world.told.is_none(), "told twice");
                    if lost == Lost::Expired {
                        assert!(self.now >= self.lease.ends_at());
                    }
                    seen.lost.insert(lost);
                    world.told = Some(lost);
                    world.step(depth - 1, renewals, failed, seen);
                }
                Action::Idle => assert!(world.told.is_some()),
                Action::End => assert!(world.let_go),
            }
        }

        fn meet(&mut self, fate: (Carried, Answer, u64), end: impl Fn(Moment) -> Option<Moment>) {
            let (carried, answer, delay) = fate;
            let sent_at = self.now;
            let alive = self.server_ends_at.is_some_and(|end| end > sent_at);
            let answer = match carried {
                Carried::Out if alive => {
                    self.server_ends_at = end(sent_at);
                    answer
                }
                Carried::Out if answer == Answer::Yes => Answer::No(Lost::Gone),
                Carried::TooLate => {
                    self.server_ends_at = None;
                    self.robbed = true;
                    answer
                }
                _ => answer,
            };
            self.now = sent_at + ms(delay);
            self.lease.answered(sent_at, answer, self.now);
        }
    }

    #[test]
    fn no_sequence_of_events_makes_the_holder_believe_too_long() {
        let mut seen = Seen::default();
        for (max_hold, reply_after) in [(None, 0), (None, 5400), (Some(ms(3000)), 0)] {
            let now = START + ms(reply_after);
            let world = World {
                now,
                lease: Lease::granted(Terms { ttl: TTL, max_hold }, START, now),
                server_ends_at: Some(START + TTL),
                robbed: false,
                told: None,
                let_go: false,
                releases_after_loss: 0,
            };
            world.step(11, 0, false, &mut seen);
        }
        assert!(seen.paths > 10_000, "only {} paths", seen.paths);
        assert!(seen.renewed_twice && seen.recovered_after_failure && seen.released);
        for lost in [Lost::Taken, Lost::Gone, Lost::Expired, Lost::MaxHold] {
            assert!(seen.lost.contains(&lost), "{lost:?} never happened");
        }
    }
}
