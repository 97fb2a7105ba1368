//! Core: the holder's view of its lease. No clock, no I/O: [`Lease::next`] is told what time it is
//! and says what to do; whoever carries that out reports back with [`Lease::answered`].
//!
//! What always holds, whatever is answered and however late:
//! 1. `ends_at` is never later than the end the server keeps for this owner.
//! 2. A lease that was lost or given up is never renewed again.
//! 3. A loss is said exactly once, and by silence no later than the first look after `ends_at`.
//!
//! All times are whole microseconds since boot, and every quotient of a ttl is rounded down to one
//! before it is used: so a helper in another language, whose numbers may be doubles, can count the
//! same to the microsecond.

use std::ops::Add;
use std::time::Duration;

use crate::error::Error;

/// The shortest ttl the helper takes: below it `ttl / 6` for an attempt is less than what one
/// exchange over a network with a busy machine at either end may need.
pub(crate) const MIN_TTL: Duration = Duration::from_millis(100);

/// The longest that the module takes: 2^53 - 1 ms.
pub(crate) const MAX_TTL: Duration = Duration::from_millis((1 << 53) - 1);

/// Nothing is counted further ahead, 35 years: a sum with the time since boot then stays below
/// 2^53, up to which the numbers of JavaScript are exact.
const FURTHEST: Duration = Duration::from_micros(1 << 50);

/// The longest that one attempt, one try or the release that a caller waits for may take. Whatever
/// the ttl: a server that has not answered by then will not.
pub(crate) const LONGEST_ATTEMPT: Duration = Duration::from_secs(5);

/// The first pause after a release that failed: its caller is waiting, and the likely reason is a
/// connection that broke long ago.
const RELEASE_BACK_OFF: Duration = Duration::from_millis(500);

/// In whole microseconds, and no further ahead than anything is counted.
fn counted(duration: Duration) -> Duration {
    let micros = duration.min(FURTHEST).as_micros();
    Duration::from_micros(micros as u64)
}

/// Rounded down to a whole microsecond.
fn part(duration: Duration, of: u64) -> Duration {
    Duration::from_micros(counted(duration).as_micros() as u64 / of)
}

/// A ttl as the server counts it, in whole milliseconds, if it can be used.
pub(crate) fn checked_ttl(ttl: Duration) -> Result<Duration, Error> {
    if ttl < MIN_TTL {
        return Err(Error::Invalid(format!(
            "the ttl must be at least {MIN_TTL:?}, got {ttl:?}"
        )));
    }
    if ttl > MAX_TTL {
        let most = MAX_TTL.as_millis();
        return Err(Error::Invalid(format!(
            "the ttl must be at most {most} ms, got {ttl:?}"
        )));
    }
    Ok(Duration::from_millis(ttl.as_millis() as u64))
}

/// A point in time on a clock that never steps and runs through suspend: whole microseconds since
/// boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Moment(u64);

impl Moment {
    /// Rounded down: what is counted from a send may begin too early, never too late.
    pub(crate) const fn after_boot(elapsed: Duration) -> Moment {
        Moment(elapsed.as_micros() as u64)
    }

    pub(crate) fn since_boot(self) -> Duration {
        Duration::from_micros(self.0)
    }

    /// The time from `earlier` until this moment, zero if it is not earlier.
    pub(crate) fn since(self, earlier: Moment) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }

    /// The last moment until this one that is so many steps from boot.
    fn rounded_down(self, step: Duration) -> Moment {
        let step = (step.as_micros() as u64).max(1);
        Moment(self.0 - self.0 % step)
    }

    /// The moment so long before this one, or boot.
    fn before(self, duration: Duration) -> Moment {
        Moment(self.0.saturating_sub(counted(duration).as_micros() as u64))
    }
}

impl Add<Duration> for Moment {
    type Output = Moment;

    fn add(self, duration: Duration) -> Moment {
        Moment(self.0.saturating_add(counted(duration).as_micros() as u64))
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
        part(self.ttl, 100) + Duration::from_millis(2)
    }

    /// Until when a lease may be believed that was asked for at `sent_at`. Counted from before the
    /// request left, so that a slow reply can only make us stop too early, never too late.
    pub(crate) fn ends_at(&self, sent_at: Moment) -> Moment {
        sent_at + counted(self.ttl).saturating_sub(self.margin())
    }

    /// When a lease is to be renewed that was asked for at `sent_at`: at a third of the ttl, or up to a
    /// 1200th of it sooner, so that the renewals of many locks fall on the same moments and travel
    /// together. Of 100,000 locks with a ttl of 30 s, which all come within 10 s, 250 do.
    fn renew_at(&self, sent_at: Moment) -> Moment {
        (sent_at + part(self.ttl, 3)).rounded_down(part(self.ttl, 1200))
    }

    /// When a lease that was extended until `ends_at` is to be renewed: when the ttl is what
    /// remains. Sooner, a renewal would cut the lease to the ttl again.
    fn renew_extended_at(&self, ends_at: Moment) -> Moment {
        ends_at.before(counted(self.ttl).saturating_sub(self.margin()))
    }

    /// The longest that one attempt may take: four of them fit between the first, at a third of
    /// the ttl, and the end.
    pub(crate) fn attempt(&self) -> Duration {
        part(self.ttl, 6).min(LONGEST_ATTEMPT)
    }

    /// Whether so much of the lease is gone that a holder should renew before it begins to work.
    pub(crate) fn is_stale(&self, sent_at: Moment, now: Moment) -> bool {
        self.ends_at(sent_at).since(now) < counted(counted(self.ttl) * 2 / 3)
    }

    /// How long to wait after the `failures`-th failure in a row, so that a server that is down is
    /// asked some ten times before the lease ends and not thousands of times.
    fn back_off(&self, failures: u32) -> Duration {
        self.doubled(part(self.ttl, 60), failures)
    }

    /// The same after a release.
    fn release_back_off(&self, failures: u32) -> Duration {
        self.doubled(part(self.ttl, 60).min(RELEASE_BACK_OFF), failures)
    }

    fn doubled(&self, first: Duration, failures: u32) -> Duration {
        let doubled = 1 << failures.saturating_sub(1).min(20);
        (first * doubled).min(part(self.ttl, 12))
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

/// What is in flight.
#[derive(Clone, Copy, Debug)]
struct Attempt {
    /// When it was sent: its name, so that a late answer to an earlier one can be told apart.
    sent_at: Moment,
    /// The ttl of a renewal; none of a release.
    ttl: Option<Duration>,
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
    in_flight: Option<Attempt>,
    /// The ttl of the next renewal, if it is to be another than agreed.
    extension: Option<Duration>,
    /// A release was sent and nobody answered: it may have been carried out.
    release_in_doubt: bool,
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
            extension: None,
            release_in_doubt: false,
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

    /// The holder wants the lease to last for `ttl` from now, this once: what is renewed after that
    /// is renewed for the ttl that was agreed, and not before that is what remains.
    pub(crate) fn extend(&mut self, ttl: Duration, now: Moment) {
        self.extension = Some(counted(ttl));
        self.renew_now(now);
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
        // Never at the moment of the attempt that is forgotten, whose answer has this name.
        self.due_at = match self.in_flight.take() {
            Some(attempt) if attempt.sent_at >= now => attempt.sent_at + Duration::from_micros(1),
            _ => now,
        };
        self.failures = 0;
        self.state = match self.lost {
            None => State::GivingUp {
                not_before,
                once: false,
            },
            Some(Lost::MaxHold) if now < self.ends_at => State::GivingUp {
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
            let ttl = self.extension.unwrap_or(counted(self.terms.ttl));
            // A shorter one than what remains counts at once: it may be carried out unheard.
            self.ends_at = self.ends_at.min(Terms { ttl, ..self.terms }.ends_at(now));
            let give_up_at = self.attempt(now, Some(ttl));
            return Action::Renew { ttl, give_up_at };
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
        let ttl = Some(not_before.since(now)).filter(|ttl| !ttl.is_zero());
        let give_up_at = self.attempt(now, ttl);
        match ttl {
            None => Action::Release { give_up_at },
            Some(ttl) => Action::Renew { ttl, give_up_at },
        }
    }

    fn attempt(&mut self, now: Moment, ttl: Option<Duration>) -> Moment {
        self.in_flight = Some(Attempt { sent_at: now, ttl });
        (now + self.terms.attempt()).min(self.ends_at)
    }

    fn lose(&mut self, lost: Lost) -> Action {
        self.state = State::Lost;
        self.lost = Some(lost);
        Action::Lose(lost)
    }

    /// The attempt that was begun at `sent_at` has ended. False if nobody waits for it any more.
    pub(crate) fn answered(&mut self, sent_at: Moment, answer: Answer, now: Moment) -> bool {
        let Some(attempt) = self.in_flight.filter(|attempt| attempt.sent_at == sent_at) else {
            return false;
        };
        self.in_flight = None;
        match (self.state, answer) {
            (State::GivingUp { once: true, .. }, _)
            | (State::GivingUp { .. }, Answer::Yes | Answer::No(_)) => self.state = State::Ended,
            (State::GivingUp { .. }, Answer::Failed) => {
                self.release_in_doubt |= attempt.ttl.is_none();
                self.failures += 1;
                self.due_at = now + self.terms.release_back_off(self.failures);
            }
            (_, Answer::Failed) => {
                self.failures += 1;
                self.due_at = now + self.terms.back_off(self.failures);
            }
            // Said by `next`, so that there is one place where a loss is told.
            (State::Held, Answer::No(lost)) => self.state = State::Refused(lost),
            // A yes that is read after the end comes too late: the end may have been acted upon.
            (State::Held, Answer::Yes) if now < self.ends_at => self.renewed(attempt, now),
            (State::Held | State::Refused(_) | State::Lost | State::Ended, _) => {}
        }
        true
    }

    fn renewed(&mut self, attempt: Attempt, now: Moment) {
        self.failures = 0;
        let ttl = attempt.ttl.unwrap_or(self.terms.ttl);
        let carried = Terms { ttl, ..self.terms };
        self.ends_at = carried.ends_at(attempt.sent_at);
        self.due_at = carried
            .renew_at(attempt.sent_at)
            .max(self.terms.renew_extended_at(self.ends_at));
        match self.extension {
            // It was asked for while a renewal was in flight.
            Some(extension) if extension != ttl => self.due_at = now,
            _ => self.extension = None,
        }
    }

    /// Whether a release that the server refuses had been carried out before: it was sent while the
    /// lease was alive, and its answer was lost.
    pub(crate) fn was_released_unheard(&self) -> bool {
        self.release_in_doubt
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
        assert!(for_ever.renew_at(START) > START + counted(ttl) / 4);
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

    /// The ttls that people use, and some of which no quotient is whole.
    const TTLS: [Duration; 8] = [
        TTL,
        Duration::from_millis(100),
        Duration::from_millis(101),
        Duration::from_millis(999),
        Duration::from_millis(1001),
        Duration::from_millis(30_000),
        Duration::from_millis(86_400_007),
        MAX_TTL,
    ];

    #[test]
    fn every_quotient_is_rounded_down_to_a_microsecond() {
        let us = Duration::from_micros;
        let lease = |ttl| Lease::granted(Terms { ttl, ..terms() }, START, START);
        let ends_after = |ttl| lease(ttl).ends_at().since(START);
        assert_eq!(ends_after(ms(101)), us(101_000 - 1010 - 2000));
        assert_eq!(ends_after(ms(999)), us(999_000 - 9990 - 2000));
        // A third is 333,666.6 us, a 1200th 834.1 us.
        let due = (1_000_000_000 + 333_666) / 834 * 834;
        assert_eq!(lease(ms(1001)).next(START), Action::Sleep(Moment(due)));
        let mut lease = lease(ms(1001));
        let renew = Action::Renew {
            ttl: ms(1001),
            give_up_at: Moment(due + 166_833),
        };
        assert_eq!(lease.next(Moment(due)), renew);
        lease.answered(Moment(due), Answer::Failed, Moment(due));
        let next = Action::Sleep(Moment(due + 16_683));
        assert_eq!(lease.next(Moment(due)), next);
    }

    #[test]
    fn nothing_is_counted_further_ahead_than_35_years() {
        let max_hold = Some(Duration::MAX);
        let terms = Terms {
            ttl: MAX_TTL,
            max_hold,
        };
        let mut lease = Lease::granted(terms, START, START);
        let far = 1 << 50;
        assert_eq!(lease.ends_at(), Moment(START.0 + far - far / 100 - 2000));
        let due = START.0 + far / 3;
        let grid = far / 1200;
        assert_eq!(lease.next(START), Action::Sleep(Moment(due / grid * grid)));
        lease.give_up(START + Duration::MAX, START);
        let Action::Renew { ttl, give_up_at } = lease.next(START) else {
            panic!("it is kept");
        };
        assert_eq!(ttl, Duration::from_micros(far));
        assert_eq!(give_up_at, START + LONGEST_ATTEMPT);
    }

    #[test]
    fn no_attempt_and_no_release_takes_longer_than_5_s() {
        let ttl = ms(86_400_007);
        let mut lease = Lease::granted(Terms { ttl, ..terms() }, START, START);
        let Action::Sleep(due) = lease.next(START) else {
            panic!("nothing is due");
        };
        let Action::Renew { give_up_at, .. } = lease.next(due) else {
            panic!("it is due");
        };
        assert_eq!(give_up_at.since(due), LONGEST_ATTEMPT);
        let later = due + ms(1);
        lease.give_up(later, later);
        let give_up_at = later + LONGEST_ATTEMPT;
        assert_eq!(lease.next(later), Action::Release { give_up_at });
        lease.answered(later, Answer::Failed, later);
        let again = later + ms(500);
        assert_eq!(
            lease.next(later),
            Action::Sleep(again),
            "while its caller waits"
        );
    }

    #[test]
    fn an_extended_lease_is_not_cut_to_the_ttl_again() {
        let mut lease = Lease::granted(terms(), START, START);
        let asked = START + ms(500);
        lease.extend(ms(60_000), asked);
        let renew = |ttl, now| Action::Renew {
            ttl,
            give_up_at: now + ms(1000),
        };
        assert_eq!(lease.next(asked), renew(ms(60_000), asked));
        lease.answered(asked, Answer::Yes, asked + ms(1));
        let extended = asked + ms(60_000 - 602);
        assert_eq!(lease.ends_at(), extended);
        let due = extended.before(TTL - ms(62));
        assert_eq!(lease.next(asked + ms(1)), Action::Sleep(due));
        assert_eq!(lease.next(due), renew(TTL, due));
        lease.answered(due, Answer::Yes, due);
        assert_eq!(lease.ends_at(), extended, "as long as before");
        let next = (due + ms(2000)).rounded_down(ms(5));
        assert_eq!(lease.next(due), Action::Sleep(next));

        // A renewal that was in flight when it was asked for does not count as the extension.
        assert_eq!(lease.next(next), renew(TTL, next));
        lease.extend(ms(9000), next + ms(1));
        lease.answered(next, Answer::Yes, next + ms(2));
        assert_eq!(lease.next(next + ms(2)), renew(ms(9000), next + ms(2)));
    }

    #[test]
    fn a_refusal_of_a_repeated_release_is_a_yes() {
        let mut lease = Lease::granted(terms(), START, START);
        lease.give_up(START, START);
        lease.next(START);
        lease.answered(START, Answer::Failed, START);
        assert!(lease.was_released_unheard());

        // Not so that of a first release, or after the lock was only to be kept.
        let mut lease = Lease::granted(terms(), START, START);
        lease.give_up(START + ms(1), START);
        lease.next(START);
        lease.answered(START, Answer::Failed, START);
        assert!(!lease.was_released_unheard());
    }

    /// What happened so far on one path through everything that can happen.
    #[derive(Clone)]
    struct World {
        now: Moment,
        lease: Lease,
        ttl: Duration,
        /// When the server's key of this owner ends; none if it never had one or was robbed.
        server_ends_at: Option<Moment>,
        /// Somebody took or deleted the lock by force, which no clock of ours can show.
        robbed: bool,
        told: Option<Lost>,
        let_go: bool,
        releases_after_loss: u32,
        /// What was sent and is not answered yet, and how it will be.
        in_flight: Vec<(Moment, Answer)>,
        /// Whether answers may come late, and the holder asks for more than to let go.
        eventful: bool,
        renewed_now: bool,
        extended: bool,
        renewals: u32,
        failed: bool,
    }

    /// The good things that must happen on some path, or a lease that does nothing would pass.
    #[derive(Default)]
    struct Seen {
        paths: u64,
        renewed_twice: bool,
        recovered_after_failure: bool,
        lost: std::collections::HashSet<Lost>,
        released: bool,
        kept: bool,
        answered_late: bool,
        extended: bool,
    }

    /// How the world answers an attempt: after so many 6000ths of the ttl, or later, when other
    /// things have happened.
    const FATES: [(Carried, Answer, Option<u32>); 10] = [
        (Carried::Out, Answer::Yes, Some(0)),
        (Carried::Out, Answer::Yes, Some(900)),
        (Carried::Out, Answer::Yes, Some(7000)), // read after a stop of the process
        (Carried::Out, Answer::Yes, None),
        (Carried::Out, Answer::Failed, Some(1000)), // the reply was lost
        (Carried::Nowhere, Answer::Failed, Some(0)),
        (Carried::Nowhere, Answer::Failed, Some(1000)),
        (Carried::Nowhere, Answer::Failed, None),
        (Carried::TooLate, Answer::No(Lost::Taken), Some(1)),
        (Carried::TooLate, Answer::No(Lost::Gone), Some(900)),
    ];

    #[derive(Clone, Copy, PartialEq)]
    enum Carried {
        Out,
        Nowhere,
        /// Somebody took the lock by force before.
        TooLate,
    }

    impl World {
        fn granted(ttl: Duration, max_hold: Option<Duration>, now: Moment) -> World {
            World {
                now,
                lease: Lease::granted(Terms { ttl, max_hold }, START, now),
                ttl: counted(ttl),
                server_ends_at: Some(START + ttl),
                robbed: false,
                told: None,
                let_go: false,
                releases_after_loss: 0,
                in_flight: Vec::new(),
                eventful: true,
                renewed_now: false,
                extended: false,
                renewals: 0,
                failed: false,
            }
        }

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

        /// Every thing that can happen next, and what follows it.
        fn step(&self, depth: u32, seen: &mut Seen) {
            self.check();
            if depth == 0 {
                seen.paths += 1;
                return;
            }
            self.hear_the_holder(depth, seen);
            for index in 0..self.in_flight.len() {
                let mut after = self.clone();
                let (sent_at, answer) = after.in_flight.remove(index);
                let awaited = after.lease.answered(sent_at, answer, after.now);
                seen.answered_late |= !awaited;
                after.step(depth - 1, seen);
            }
            let mut world = self.clone();
            match world.lease.next(self.now) {
                Action::Sleep(until) => {
                    assert!(until > self.now, "would spin");
                    for stopped in [ms(0), self.ttl * 2] {
                        let mut later = world.clone();
                        later.now = until + stopped;
                        later.step(depth - 1, seen);
                    }
                }
                Action::Renew { ttl, give_up_at } => {
                    assert!(
                        world
                            .told
                            .is_none_or(|lost| lost == Lost::MaxHold && world.let_go)
                    );
                    world.check_attempt(give_up_at);
                    seen.kept |= world.let_go;
                    seen.extended |= ttl > self.ttl && !world.let_go;
                    // What the wire carries: whole milliseconds, one at least.
                    let ttl = ms((ttl.as_millis() as u64).max(1));
                    world.attempt(depth, seen, |now| Some(now + ttl));
                }
                Action::Release { give_up_at } => {
                    assert!(world.let_go, "released under the holder");
                    world.check_attempt(give_up_at);
                    world.releases_after_loss +=
                        u32::from(world.lease.lost() == Some(Lost::Expired));
                    assert!(world.releases_after_loss <= 1);
                    seen.released = true;
                    world.attempt(depth, seen, |_| None);
                }
                Action::Lose(lost) => {
                    assert!(!world.let_go && world.told.is_none(), "told twice");
                    if lost == Lost::Expired {
                        assert!(self.now >= self.lease.ends_at());
                    }
                    seen.lost.insert(lost);
                    world.told = Some(lost);
                    world.step(depth - 1, seen);
                }
                Action::Idle => assert!(world.told.is_some()),
                Action::End => assert!(world.let_go),
            }
        }

        fn hear_the_holder(&self, depth: u32, seen: &mut Seen) {
            if self.let_go {
                return;
            }
            for keep_for in [ms(0), self.ttl * 2] {
                if self.eventful || keep_for.is_zero() {
                    let mut after = self.clone();
                    after.let_go = true;
                    after.lease.give_up(self.now + keep_for, self.now);
                    after.step(depth - 1, seen);
                }
            }
            if !self.eventful {
                return;
            }
            if !self.renewed_now {
                let mut after = self.clone();
                after.renewed_now = true;
                after.lease.renew_now(self.now);
                after.step(depth - 1, seen);
            }
            if !self.extended {
                for ttl in [self.ttl / 2, self.ttl * 3] {
                    let mut after = self.clone();
                    after.extended = true;
                    after.lease.extend(ttl, self.now);
                    after.step(depth - 1, seen);
                }
            }
        }

        fn check_attempt(&self, give_up_at: Moment) {
            let longest = part(self.ttl, 6).min(LONGEST_ATTEMPT);
            assert!(give_up_at > self.now && give_up_at.since(self.now) <= longest);
            let named = |(sent_at, _): &(Moment, Answer)| *sent_at == self.now;
            assert!(
                !self.in_flight.iter().any(named),
                "two attempts of one name"
            );
        }

        fn attempt(&self, depth: u32, seen: &mut Seen, end: impl Fn(Moment) -> Option<Moment>) {
            for (carried, answer, delay) in FATES {
                if delay.is_none() && (!self.eventful || !self.in_flight.is_empty()) {
                    continue;
                }
                let mut after = self.clone();
                let sent_at = self.now;
                let answer = after.meet(carried, answer, &end);
                match delay {
                    None => after.in_flight.push((sent_at, answer)),
                    Some(delay) => {
                        after.now = sent_at + self.ttl * delay / 6000;
                        after.lease.answered(sent_at, answer, after.now);
                    }
                }
                after.renewals += u32::from(answer == Answer::Yes && !self.let_go);
                seen.renewed_twice |= after.renewals == 2;
                seen.recovered_after_failure |= after.failed && answer == Answer::Yes;
                after.failed |= answer == Answer::Failed;
                after.step(depth - 1, seen);
            }
        }

        /// What the server does with what is sent now, and answers.
        fn meet(
            &mut self,
            carried: Carried,
            answer: Answer,
            end: impl Fn(Moment) -> Option<Moment>,
        ) -> Answer {
            let alive = self.server_ends_at.is_some_and(|end| end > self.now);
            match carried {
                Carried::Out if alive => {
                    self.server_ends_at = end(self.now);
                    answer
                }
                Carried::Out if answer == Answer::Yes => Answer::No(Lost::Gone),
                Carried::TooLate => {
                    self.server_ends_at = None;
                    self.robbed = true;
                    answer
                }
                _ => answer,
            }
        }
    }

    /// All that can happen to leases of this ttl, so many steps deep.
    fn explore(ttl: Duration, depth: u32, eventful: bool) -> Seen {
        let mut seen = Seen::default();
        let of_ttl = |part: u32| counted(ttl) * part / 6000;
        for (max_hold, reply_after) in [(None, 0), (None, 5400), (Some(of_ttl(3000)), 0)] {
            let now = START + of_ttl(reply_after);
            let mut world = World::granted(ttl, max_hold, now);
            world.eventful = eventful;
            world.step(depth, &mut seen);
        }
        assert!(seen.paths > 10_000, "only {} paths", seen.paths);
        assert!(seen.renewed_twice && seen.recovered_after_failure && seen.released);
        for lost in [Lost::Taken, Lost::Gone, Lost::Expired, Lost::MaxHold] {
            assert!(seen.lost.contains(&lost), "{lost:?} never happened");
        }
        seen
    }

    #[test]
    fn no_sequence_of_events_makes_the_holder_believe_too_long() {
        explore(TTL, 11, false);
    }

    #[test]
    fn nor_does_one_with_late_answers_extensions_and_locks_that_are_kept() {
        for ttl in TTLS {
            let seen = explore(ttl, 7, true);
            assert!(seen.kept && seen.answered_late);
            assert!(seen.extended || ttl == MAX_TTL, "which cannot be longer");
        }
    }
}
