//! What the lease does at which moment; and every sequence of events, to a depth, explored.

use super::*;
use crate::wire::MAX_TTL;

const TTL: Duration = Duration::from_millis(6000);
pub(super) const START: Moment = Moment::after_boot(Duration::from_secs(1000));

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
    lease.attempt_ended(sent_at, Some(Reply::Yes), sent_at + ms(900));
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
fn a_loss_is_final_and_reported_once() {
    let mut lease = Lease::granted(terms(), START, START);
    let sent_at = START + ms(2000);
    lease.next(sent_at);
    lease.attempt_ended(sent_at, Some(Reply::Lost(Lost::Taken)), sent_at + ms(1));
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
                lease.attempt_ended(now, None, now);
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
                lease.attempt_ended(now, None, give_up_at);
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
fn max_hold_ends_renewal_with_a_loss_of_its_own() {
    let max_hold = Some(ms(7000));
    let mut lease = Lease::granted(Terms { ttl: TTL, max_hold }, START, START);
    let mut now = START;
    let lost = loop {
        match lease.next(now) {
            Action::Sleep(until) => now = until,
            Action::Renew { .. } => {
                lease.attempt_ended(now, Some(Reply::Yes), now);
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
    lease.attempt_ended(START + ms(100), Some(Reply::Yes), START + ms(101));
    assert_eq!(lease.next(START + ms(101)), Action::End);
}

/// The ttls that people use, and some of which no quotient is whole.
pub(super) const TTLS: [Duration; 8] = [
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
    lease.attempt_ended(Moment(due), None, Moment(due));
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
    lease.attempt_ended(later, None, later);
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
    lease.attempt_ended(asked, Some(Reply::Yes), asked + ms(1));
    let extended = asked + ms(60_000 - 602);
    assert_eq!(lease.ends_at(), extended);
    let due = extended.before(TTL - ms(62));
    assert_eq!(lease.next(asked + ms(1)), Action::Sleep(due));
    assert_eq!(lease.next(due), renew(TTL, due));
    lease.attempt_ended(due, Some(Reply::Yes), due);
    assert_eq!(lease.ends_at(), extended, "as long as before");
    let next = (due + ms(2000)).rounded_down(ms(5));
    assert_eq!(lease.next(due), Action::Sleep(next));

    // A renewal that was in flight when it was asked for does not count as the extension.
    assert_eq!(lease.next(next), renew(TTL, next));
    lease.extend(ms(9000), next + ms(1));
    lease.attempt_ended(next, Some(Reply::Yes), next + ms(2));
    assert_eq!(lease.next(next + ms(2)), renew(ms(9000), next + ms(2)));
}

#[test]
fn a_refusal_of_a_repeated_release_is_a_yes() {
    let mut lease = Lease::granted(terms(), START, START);
    lease.give_up(START, START);
    lease.next(START);
    lease.attempt_ended(START, None, START);
    assert!(lease.may_be_released());

    // Not so that of a first release, or after the lock was only to be kept.
    let mut lease = Lease::granted(terms(), START, START);
    lease.give_up(START + ms(1), START);
    lease.next(START);
    lease.attempt_ended(START, None, START);
    assert!(!lease.may_be_released());
}

/// A lease that is to change at `START + 500 ms`, just before the renewal that comes first.
fn changing() -> (Lease, Moment) {
    let mut lease = Lease::granted(terms(), START, START);
    let asked = START + ms(500);
    lease.change(asked);
    (lease, asked)
}

fn renew(now: Moment) -> Action {
    Action::Renew {
        ttl: TTL,
        give_up_at: now + ms(1000),
    }
}

fn change(now: Moment) -> Action {
    Action::Change {
        ttl: TTL,
        give_up_at: now + ms(1000),
    }
}

#[test]
fn a_change_is_asked_for_after_the_yes_to_a_renewal() {
    let (mut lease, asked) = changing();
    assert_eq!(lease.next(asked), renew(asked));
    assert_eq!(lease.next(asked), Action::Sleep(lease.ends_at()));
    let renewed = asked + ms(100);
    lease.attempt_ended(asked, Some(Reply::Yes), renewed);
    assert_eq!(lease.next(renewed), change(renewed));
    assert!(lease.change_ended(renewed, Some(true), renewed + ms(100)));
    assert_eq!(lease.ends_at(), renewed + (TTL - ms(62)));
    let due = (renewed + ms(2000)).rounded_down(ms(5));
    assert_eq!(lease.next(renewed + ms(100)), Action::Sleep(due));
    assert!(!lease.is_changing(renewed + ms(100)));
}

#[test]
fn a_renewal_that_left_before_a_change_was_wanted_does_not_count() {
    let mut lease = Lease::granted(terms(), START, START);
    let due = START + ms(2000);
    assert_eq!(lease.next(due), renew(due));
    lease.change(due + ms(1));
    lease.attempt_ended(due, Some(Reply::Yes), due + ms(2));
    assert_eq!(lease.next(due + ms(2)), renew(due + ms(2)));
}

#[test]
fn what_is_lost_is_not_changed() {
    let (mut lease, asked) = changing();
    lease.next(asked);
    lease.attempt_ended(asked, Some(Reply::Lost(Lost::Gone)), asked);
    assert_eq!(lease.next(asked), Action::Lose(Lost::Gone));
    assert_eq!(lease.next(asked), Action::Idle);
}

#[test]
fn a_change_that_is_granted_after_the_end_of_the_lease_is_a_loss() {
    let (mut lease, asked) = changing();
    lease.next(asked);
    lease.attempt_ended(asked, Some(Reply::Yes), asked);
    assert_eq!(lease.next(asked), change(asked));
    let late = lease.ends_at();
    assert!(!lease.change_ended(asked, Some(true), late));
    assert_eq!(lease.next(late), Action::Lose(Lost::Expired));
}

#[test]
fn a_change_that_is_not_answered_is_begun_again_for_as_long_as_two_attempts() {
    let (mut lease, asked) = changing();
    let (mut now, mut attempts) = (asked, Vec::new());
    while lease.is_changing(now) {
        let action = lease.next(now);
        let at = now.since(asked).as_millis();
        match action {
            Action::Sleep(until) => now = until,
            Action::Renew { .. } => {
                attempts.push((at, "renew"));
                lease.attempt_ended(now, Some(Reply::Yes), now + ms(1));
                now = now + ms(1);
            }
            Action::Change { give_up_at, .. } => {
                attempts.push((at, "change"));
                let silent = give_up_at.min(now + ms(500));
                lease.change_ended(now, None, silent);
                now = silent;
            }
            action => panic!("{action:?}"),
        }
    }
    let expected = [
        (0, "renew"),
        (1, "change"),
        (601, "renew"),
        (602, "change"),
        (1202, "renew"),
        (1203, "change"),
        (1803, "renew"),
        (1804, "change"),
    ];
    assert_eq!(attempts, expected);
    // What is left is a lease as any other.
    assert_eq!(lease.next(now), Action::Sleep(now + ms(100)));
    assert_eq!(lease.next(now + ms(100)), renew(now + ms(100)));
}

#[test]
fn a_change_takes_no_longer_than_two_attempts() {
    let (mut lease, asked) = changing();
    lease.next(asked);
    let give_up_at = asked + ms(2000);
    lease.attempt_ended(asked, Some(Reply::Yes), asked + ms(1500));
    let action = lease.next(asked + ms(1500));
    assert_eq!(
        action,
        Action::Change {
            ttl: TTL,
            give_up_at
        }
    );
    // Nor is it begun after that, however long the process was stopped.
    let (mut lease, asked) = changing();
    lease.next(asked);
    let late = asked + ms(2000);
    lease.attempt_ended(asked, Some(Reply::Yes), late);
    assert!(!lease.is_changing(late));
    assert_eq!(lease.next(late), renew(late));
}

#[test]
fn a_change_makes_no_lease_shorter() {
    let (mut lease, asked) = changing();
    lease.extend(ms(60_000), asked);
    lease.next(asked);
    lease.attempt_ended(asked, Some(Reply::Yes), asked);
    let extended = lease.ends_at();
    assert_eq!(lease.next(asked), change(asked));
    assert!(lease.change_ended(asked, Some(true), asked));
    assert_eq!(lease.ends_at(), extended);
    let due = extended.before(TTL - ms(62));
    assert_eq!(lease.next(asked), Action::Sleep(due));
}

#[test]
fn who_is_not_alone_is_told_and_renewed_as_before() {
    let (mut lease, asked) = changing();
    lease.next(asked);
    lease.attempt_ended(asked, Some(Reply::Yes), asked);
    let (ends_at, due) = (lease.ends_at(), START + ms(2500));
    lease.next(asked);
    assert!(lease.change_ended(asked, Some(false), asked + ms(1)));
    assert_eq!(lease.ends_at(), ends_at);
    assert_eq!(lease.next(asked + ms(1)), Action::Sleep(due));
}

/// What happened so far on one path through everything that can happen.
#[derive(Clone)]
struct World {
    now: Moment,
    lease: Lease,
    ttl: Duration,
    /// When the server's key of this owner ends; none if it never had one or lost it.
    server_ends_at: Option<Moment>,
    /// Somebody took or deleted the lock by force, which no clock of ours can show.
    taken: bool,
    /// The server granted it anew after it was lost, for a change that came too late.
    granted_anew: bool,
    notified: Option<Lost>,
    given_up: bool,
    releases_after_loss: u32,
    /// What was sent and not replied to yet, and what the reply will be.
    in_flight: Vec<(Moment, Option<Reply>)>,
    /// Which of them asks for another limit.
    change_sent_at: Option<Moment>,
    /// Whether replies may come late, and the holder asks for more than to give up.
    eventful: bool,
    renewed_now: bool,
    extended: bool,
    changed: bool,
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
    replied_late: bool,
    extended: bool,
    changed: bool,
    changed_after_failure: bool,
}

/// How an attempt ends: after so many 6000ths of the ttl, or later, when other
/// things have happened.
const ENDS: [(Carried, Option<Reply>, Option<u32>); 10] = [
    (Carried::Out, Some(Reply::Yes), Some(0)),
    (Carried::Out, Some(Reply::Yes), Some(900)),
    (Carried::Out, Some(Reply::Yes), Some(7000)), // read after a stop of the process
    (Carried::Out, Some(Reply::Yes), None),
    (Carried::Out, None, Some(1000)), // the reply was lost
    (Carried::Nowhere, None, Some(0)),
    (Carried::Nowhere, None, Some(1000)),
    (Carried::Nowhere, None, None),
    (Carried::TooLate, Some(Reply::Lost(Lost::Taken)), Some(1)),
    (Carried::TooLate, Some(Reply::Lost(Lost::Gone)), Some(900)),
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
            taken: false,
            granted_anew: false,
            notified: None,
            given_up: false,
            releases_after_loss: 0,
            in_flight: Vec::new(),
            change_sent_at: None,
            eventful: true,
            renewed_now: false,
            extended: false,
            changed: false,
            renewals: 0,
            failed: false,
        }
    }

    fn check(&self) {
        let believed = !self.given_up && self.notified.is_none() && self.now < self.lease.ends_at();
        assert!(!believed || !self.granted_anew, "somebody was in between");
        if believed && !self.taken {
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
        self.holder_events(depth, seen);
        for index in 0..self.in_flight.len() {
            let mut after = self.clone();
            let (sent_at, reply) = after.in_flight.remove(index);
            let awaited = after.ended(sent_at, reply, seen);
            seen.replied_late |= !awaited;
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
                        .notified
                        .is_none_or(|lost| lost == Lost::MaxHold && world.given_up)
                );
                world.check_attempt(give_up_at);
                seen.kept |= world.given_up;
                seen.extended |= ttl > self.ttl && !world.given_up;
                // What the wire carries: whole milliseconds, one at least.
                let ttl = ms((ttl.as_millis() as u64).max(1));
                world.attempt(depth, seen, |_, now| Some(now + ttl));
            }
            Action::Change { ttl, give_up_at } => {
                assert!(world.notified.is_none() && !world.given_up);
                world.check_attempt(give_up_at);
                let ttl = ms((ttl.as_millis() as u64).max(1));
                world.change_sent_at = Some(self.now);
                world.attempt(depth, seen, |end, now| Some(end.max(now + ttl)));
            }
            Action::Release { give_up_at } => {
                assert!(world.given_up, "released under the holder");
                world.check_attempt(give_up_at);
                world.releases_after_loss += u32::from(world.lease.lost() == Some(Lost::Expired));
                assert!(world.releases_after_loss <= 1);
                seen.released = true;
                world.attempt(depth, seen, |_, _| None);
            }
            Action::Lose(lost) => {
                assert!(
                    !world.given_up && world.notified.is_none(),
                    "notified twice"
                );
                if lost == Lost::Expired {
                    assert!(self.now >= self.lease.ends_at());
                }
                seen.lost.insert(lost);
                world.notified = Some(lost);
                world.step(depth - 1, seen);
            }
            Action::Idle => assert!(world.notified.is_some()),
            Action::End => assert!(world.given_up),
        }
    }

    fn holder_events(&self, depth: u32, seen: &mut Seen) {
        if self.given_up {
            return;
        }
        for keep_for in [ms(0), self.ttl * 2] {
            if self.eventful || keep_for.is_zero() {
                let mut after = self.clone();
                after.given_up = true;
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
        if !self.changed {
            let mut after = self.clone();
            after.changed = true;
            after.lease.change(self.now);
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
        let named = |(sent_at, _): &(Moment, Option<Reply>)| *sent_at == self.now;
        assert!(
            !self.in_flight.iter().any(named),
            "two attempts of one name"
        );
    }

    /// Tells the lease how an attempt has ended.
    fn ended(&mut self, sent_at: Moment, reply: Option<Reply>, seen: &mut Seen) -> bool {
        if self.change_sent_at != Some(sent_at) {
            return self.lease.attempt_ended(sent_at, reply, self.now);
        }
        self.change_sent_at = None;
        let granted = reply.map(|reply| reply == Reply::Yes);
        let has_ended = self.lease.change_ended(sent_at, granted, self.now);
        seen.changed |= has_ended && granted == Some(true);
        seen.changed_after_failure |= has_ended && granted == Some(true) && self.failed;
        has_ended
    }

    /// `end` tells the new end on the server from that before and the time.
    fn attempt(&self, depth: u32, seen: &mut Seen, end: impl Fn(Moment, Moment) -> Option<Moment>) {
        for (carried, reply, delay) in ENDS {
            if delay.is_none() && (!self.eventful || !self.in_flight.is_empty()) {
                continue;
            }
            let mut after = self.clone();
            let sent_at = self.now;
            let reply = after.meet(carried, reply, &end);
            match delay {
                None => after.in_flight.push((sent_at, reply)),
                Some(delay) => {
                    after.now = sent_at + self.ttl * delay / 6000;
                    after.ended(sent_at, reply, seen);
                }
            }
            after.renewals += u32::from(reply == Some(Reply::Yes) && !self.given_up);
            seen.renewed_twice |= after.renewals == 2;
            seen.recovered_after_failure |= after.failed && reply == Some(Reply::Yes);
            after.failed |= reply.is_none();
            after.step(depth - 1, seen);
        }
    }

    /// What the server does with what is sent now, and replies.
    fn meet(
        &mut self,
        carried: Carried,
        reply: Option<Reply>,
        end: impl Fn(Moment, Moment) -> Option<Moment>,
    ) -> Option<Reply> {
        let alive = self.server_ends_at.filter(|end| *end > self.now);
        match (carried, alive) {
            (Carried::Out, Some(before)) => {
                self.server_ends_at = end(before, self.now);
                reply
            }
            (Carried::Out, None) if self.change_sent_at == Some(self.now) => {
                self.granted_anew = true;
                reply
            }
            (Carried::Out, None) if reply == Some(Reply::Yes) => Some(Reply::Lost(Lost::Gone)),
            (Carried::TooLate, _) => {
                self.server_ends_at = None;
                self.taken = true;
                reply
            }
            _ => reply,
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
fn nor_does_one_with_late_replies_extensions_and_locks_that_are_kept() {
    for ttl in TTLS {
        // The others differ in how they are rounded, which shows sooner.
        let depth = if ttl == TTL { 7 } else { 6 };
        let seen = explore(ttl, depth, true);
        assert!(seen.kept && seen.replied_late && seen.changed);
        assert!(seen.changed_after_failure || ttl != TTL, "which is deep");
        assert!(seen.extended || ttl == MAX_TTL, "which cannot be longer");
    }
}
