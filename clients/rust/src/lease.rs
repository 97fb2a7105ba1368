//! Core: the holder's view of its lease. No clock, no I/O: [`Lease::next`] is told what time it is
//! and returns what to do; whoever carries that out reports back with [`Lease::attempt_ended`].
//!
//! What always holds, whatever the replies and however late:
//! 1. `ends_at` is never later than the end the server keeps for this owner.
//! 2. A lease that was lost or given up is never renewed again.
//! 3. A loss is reported exactly once, and one by silence no later than the first call of `next` after
//!    `ends_at`.
//!
//! All times are whole microseconds since boot, and every quotient of a ttl is rounded down to one
//! before it is used: so a helper in another language, whose numbers may be doubles, can count the
//! same to the microsecond.

use std::ops::Add;
use std::time::Duration;

#[cfg(test)]
mod tests;
#[cfg(test)]
mod vectors;

/// The shortest ttl the helper takes: below it `ttl / 6` for an attempt is less than what one
/// exchange over a network with a busy machine at either end may need.
pub(crate) const MIN_TTL: Duration = Duration::from_millis(100);

/// Nothing is counted further ahead, 35 years: a sum with the time since boot then stays below
/// 2^53, up to which the numbers of JavaScript are exact.
const FURTHEST: Duration = Duration::from_micros(1 << 50);

/// The longest that one attempt, one try or the release that a caller waits for may take. Whatever
/// the ttl: a server that has not replied by then will not.
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
    /// No renewal was acknowledged in time: the lease has ended by our own clock. Reported before
    /// the server can give the lock to another.
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

/// What the server replied to a renewal or a release of a lock that we hold.
///
/// [`Renewed`] and [`Released`] are this type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the lock may be lost, and what was done under it may have been done without it"]
pub enum Reply {
    /// We held it: the renewal or the release was carried out.
    Yes,
    /// It was lost before, which is final.
    Lost(Lost),
}

/// How a renewal ended. With [`Reply::Yes`] the lease counts from this request.
pub type Renewed = Reply;

/// How a release ended. With [`Reply::Yes`] we held the lock to the end.
pub type Released = Reply;

/// How a downgrade ended. With [`Reply::Yes`] others may share the lock from now on.
pub type Downgraded = Reply;

/// How an upgrade ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "only after a yes the holder is alone"]
pub enum Upgraded {
    /// We are the only holder.
    Yes,
    /// Others hold it too: we hold it on as before.
    Busy,
    /// It was lost before, which is final.
    Lost(Lost),
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
    /// Nothing until the holder asks for something.
    Idle,
    /// Send RENEW with this ttl and report the reply, by `give_up_at` at the latest.
    Renew { ttl: Duration, give_up_at: Moment },
    /// Send ACQUIRE with this ttl and another limit, and report the reply to
    /// [`Lease::change_ended`], by `give_up_at` at the latest.
    Change { ttl: Duration, give_up_at: Moment },
    /// Send RELEASE and report the reply, by `give_up_at` at the latest.
    Release { give_up_at: Moment },
    /// Notify the holder, once.
    Lose(Lost),
    /// Forget this lease.
    End,
}

/// What the holder wants of its lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// To keep it.
    Held,
    /// The server replied that it is lost, and the holder has not been notified yet.
    Refused(Lost),
    /// Nothing: the holder was notified that it is lost, and has not given it up yet.
    Lost,
    /// To give it up, but not before this moment; `once` if it may be another's by now.
    GivingUp { not_before: Moment, once: bool },
    /// It is over.
    Ended,
}

/// A grant with another limit that the holder wants in place of the one it has. It is asked for only
/// when a renewal has shown that it still has one: else the server might grant anew what was lost.
#[derive(Clone, Copy, Debug)]
struct Change {
    /// A renewal that left before shows nothing.
    asked_at: Moment,
    /// When it is given up.
    until: Moment,
    renewed: bool,
}

/// What is in flight.
#[derive(Clone, Copy, Debug)]
struct Attempt {
    /// When it was sent: its name, so that a late reply to an earlier one can be told apart.
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
    change: Option<Change>,
    /// A release was sent and not replied to: it may have been carried out.
    release_in_doubt: bool,
    failures: u32,
    /// The loss that the holder was notified of, or will be when it gives up.
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
            change: None,
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

    /// Failures in a row since the server last replied.
    pub(crate) fn failures(&self) -> u32 {
        self.failures
    }

    /// The loss that the holder was notified of, if it was.
    pub(crate) fn lost(&self) -> Option<Lost> {
        self.lost
    }

    /// Whether the holder has given it up.
    pub(crate) fn is_given_up(&self) -> bool {
        matches!(self.state, State::GivingUp { .. } | State::Ended)
    }

    /// The holder wants a reply from the server now.
    pub(crate) fn renew_now(&mut self, now: Moment) {
        self.due_at = self.due_at.min(now);
    }

    /// The holder wants the lease to last for `ttl` from now, this once: what is renewed after that
    /// is renewed for the ttl that was agreed, and not before that is what remains.
    pub(crate) fn extend(&mut self, ttl: Duration, now: Moment) {
        self.extension = Some(counted(ttl));
        self.renew_now(now);
    }

    /// The holder wants a grant with another limit in place of the one it has. No second one before
    /// the first [has ended](Lease::is_changing).
    pub(crate) fn change(&mut self, now: Moment) {
        if self.state == State::Held {
            self.change = Some(Change {
                asked_at: now,
                until: now + self.terms.attempt() * 2,
                renewed: false,
            });
            self.renew_now(now);
        }
    }

    /// Whether it still wants that, and there is time for it.
    pub(crate) fn is_changing(&mut self, now: Moment) -> bool {
        if self.in_flight.is_none() {
            self.change = self.change.filter(|change| now < change.until);
        }
        self.change.is_some()
    }

    /// It does not want it any more. What is in flight goes on.
    pub(crate) fn end_change(&mut self) {
        self.change = None;
    }

    /// The holder gives it up, but wants the lock kept until `not_before`. An attempt in flight is
    /// forgotten: the reply to it is of no interest any more.
    pub(crate) fn give_up(&mut self, not_before: Moment, now: Moment) {
        match self.state {
            State::GivingUp { .. } | State::Ended => return,
            State::Refused(lost) => self.lost = Some(lost),
            State::Held if now >= self.ends_at => self.lost = Some(Lost::Expired),
            State::Held | State::Lost => {}
        }
        // Never at the moment of the attempt that is forgotten, whose reply has this name.
        self.due_at = match self.in_flight.take() {
            Some(attempt) if attempt.sent_at >= now => attempt.sent_at + Duration::from_micros(1),
            _ => now,
        };
        self.failures = 0;
        self.change = None;
        self.state = match self.lost {
            None => State::GivingUp {
                not_before,
                once: false,
            },
            Some(Lost::MaxHold) if now < self.ends_at => State::GivingUp {
                not_before,
                once: false,
            },
            // The server would refuse: there is nothing of ours to release.
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
            State::Held => self.next_while_held(now),
            State::Refused(lost) => self.lose(lost),
            State::Lost => Action::Idle,
            State::GivingUp { not_before, .. } => self.next_while_giving_up(now, not_before),
            State::Ended => Action::End,
        }
    }

    fn next_while_held(&mut self, now: Moment) -> Action {
        if now >= self.ends_at {
            return self.lose(Lost::Expired);
        }
        if self.hold_until.is_some_and(|until| now >= until) {
            return self.lose(Lost::MaxHold);
        }
        let is_renewed = |change: Change| change.renewed;
        if self.in_flight.is_none() && self.is_changing(now) && self.change.is_some_and(is_renewed)
        {
            let ttl = counted(self.terms.ttl);
            let give_up_at = self.attempt(now, Some(ttl));
            return Action::Change { ttl, give_up_at };
        }
        if self.in_flight.is_none() && now >= self.due_at {
            let ttl = self.next_ttl(now);
            // A shorter one than what remains counts at once: it may be carried out without our knowing.
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

    /// The ttl of a renewal now. Before a change it leaves an extended lease as long as it is.
    fn next_ttl(&self, now: Moment) -> Duration {
        let agreed = counted(self.terms.ttl);
        let left = || self.ends_at.since(now) + self.terms.margin();
        let before_change = self.change.map_or(agreed, |_| agreed.max(left()));
        self.extension.unwrap_or(before_change)
    }

    fn next_while_giving_up(&mut self, now: Moment, not_before: Moment) -> Action {
        // From here on it has ended on the server by itself.
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
        let end = (now + self.terms.attempt()).min(self.ends_at);
        self.change.map_or(end, |change| end.min(change.until))
    }

    fn lose(&mut self, lost: Lost) -> Action {
        self.state = State::Lost;
        self.lost = Some(lost);
        Action::Lose(lost)
    }

    /// The attempt that was begun at `sent_at` has ended; with no reply, or an error, it is not known
    /// whether it was carried out. False if nobody waits for it any more.
    pub(crate) fn attempt_ended(
        &mut self,
        sent_at: Moment,
        reply: Option<Reply>,
        now: Moment,
    ) -> bool {
        let Some(attempt) = self.in_flight.filter(|attempt| attempt.sent_at == sent_at) else {
            return false;
        };
        self.in_flight = None;
        match (self.state, reply) {
            (State::GivingUp { once: true, .. }, _) | (State::GivingUp { .. }, Some(_)) => {
                self.state = State::Ended
            }
            (State::GivingUp { .. }, None) => {
                self.release_in_doubt |= attempt.ttl.is_none();
                self.failures += 1;
                self.due_at = now + self.terms.release_back_off(self.failures);
            }
            (_, None) => self.failed(now),
            // Reported by `next`, so that every loss comes from one place.
            (State::Held, Some(Reply::Lost(lost))) => self.state = State::Refused(lost),
            // A yes that is read after the end comes too late: the end may have been acted upon.
            (State::Held, Some(Reply::Yes)) if now < self.ends_at => self.renewed(attempt, now),
            (State::Held | State::Refused(_) | State::Lost | State::Ended, _) => {}
        }
        true
    }

    /// The ACQUIRE that was begun at `sent_at` has ended: granted, or not as others hold it too; with no
    /// reply it is not known whether it was carried out, and is begun again with the renewal. True if
    /// that ends the change; a reply that comes too late does not.
    pub(crate) fn change_ended(
        &mut self,
        sent_at: Moment,
        granted: Option<bool>,
        now: Moment,
    ) -> bool {
        let is_named = |attempt: &mut Attempt| attempt.sent_at == sent_at;
        if self.in_flight.take_if(is_named).is_none()
            || self.state != State::Held
            || now >= self.ends_at
        {
            return false;
        }
        let Some(granted) = granted else {
            self.failed(now);
            return false;
        };
        self.failures = 0;
        self.change = None;
        if granted {
            // The server makes no lease of its own holder shorter.
            self.ends_at = self.ends_at.max(self.terms.ends_at(sent_at));
            self.due_at = self.next_renewal(self.terms, sent_at);
        }
        if self.extension.is_some() {
            self.due_at = now;
        }
        true
    }

    /// The attempt that has ended is made again a little later; a change as a whole, if there is time
    /// for it.
    fn failed(&mut self, now: Moment) {
        self.failures += 1;
        self.due_at = now + self.terms.back_off(self.failures);
        self.change = self.change.filter(|change| self.due_at < change.until);
        if let Some(change) = &mut self.change {
            change.renewed = false;
        }
    }

    /// When a lease is to be renewed that was asked for at `sent_at` on these terms.
    fn next_renewal(&self, terms: Terms, sent_at: Moment) -> Moment {
        let extended = self.terms.renew_extended_at(self.ends_at);
        terms.renew_at(sent_at).max(extended)
    }

    fn renewed(&mut self, attempt: Attempt, now: Moment) {
        self.failures = 0;
        let ttl = attempt.ttl.unwrap_or(self.terms.ttl);
        let carried = Terms { ttl, ..self.terms };
        self.ends_at = carried.ends_at(attempt.sent_at);
        self.due_at = self.next_renewal(carried, attempt.sent_at);
        match self.extension {
            // It was asked for while a renewal was in flight.
            Some(extension) if extension != ttl => self.due_at = now,
            _ => self.extension = None,
        }
        if let Some(change) = &mut self.change {
            change.renewed = attempt.sent_at >= change.asked_at;
            if !change.renewed {
                self.due_at = now;
            }
        }
    }

    /// Whether a release that the server refuses had been carried out before: it was sent while the
    /// lease was alive, and the reply was lost.
    pub(crate) fn may_be_released(&self) -> bool {
        self.release_in_doubt
    }
}
