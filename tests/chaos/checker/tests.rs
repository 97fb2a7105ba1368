//! Hand-made histories. Times in milliseconds, every lease of a second.

use super::*;

const MS: Us = 1000;
const TTL: Us = 1000;

/// What one owner does, in the order it does it: its number, who it works through, and its limit.
struct Owner(u64, &'static str, u16);

impl Owner {
    fn event(&self, did: Did, asked: Us, answered: Us, answer: Answer) -> Event {
        Event {
            tenure: self.0,
            by: self.1,
            key: 0,
            limit: self.2,
            did,
            asked: asked * MS,
            answer: Some((answered * MS, answer)),
        }
    }

    fn asks(&self, asked: Us, answered: Us, answer: Answer) -> Event {
        let wait = 10_000 * MS;
        self.event(Did::Acquire { wait, safe: false }, asked, answered, answer)
    }

    fn acquires(&self, asked: Us, answered: Us, fence: u64) -> Event {
        self.asks(asked, answered, held(asked, fence))
    }

    fn renews(&self, asked: Us, answered: Us, fence: u64) -> Event {
        self.event(Did::Renew, asked, answered, held(asked, fence))
    }

    fn releases(&self, asked: Us, answered: Us) -> Event {
        self.event(Did::Release, asked, answered, Answer::Released)
    }

    fn writes(&self, at: Us, fence: u64, answer: Answer) -> Event {
        self.event(Did::Write { order: at, fence }, at, at, answer)
    }
}

fn held(asked: Us, fence: u64) -> Answer {
    let until = (asked + TTL) * MS;
    Answer::Held { fence, until }
}

const ALICE: Owner = Owner(1, RAW, 1);
const BOB: Owner = Owner(2, RAW, 1);

fn history<const N: usize>(events: [Event; N]) -> History {
    History {
        events: events.to_vec(),
        faults: vec![],
        ttl: TTL * MS,
    }
}

fn kinds(findings: &[Finding]) -> Vec<Kind> {
    findings.iter().map(|finding| finding.kind).collect()
}

fn found<const N: usize>(events: [Event; N]) -> Vec<Kind> {
    kinds(&check(&history(events)).violations)
}

fn fault(from: Us, to: Us, loses: bool, skew: Us) -> Fault {
    Fault {
        what: "test",
        from: from * MS,
        to: to * MS,
        loses,
        skew: skew * MS,
    }
}

#[test]
fn one_after_another_is_as_it_should_be() {
    let events = [
        ALICE.acquires(0, 1, 10),
        ALICE.writes(2, 10, Answer::Accepted),
        ALICE.renews(500, 501, 10),
        ALICE.releases(900, 901),
        BOB.acquires(100, 901, 11),
        BOB.writes(902, 11, Answer::Accepted),
        BOB.releases(903, 904),
    ];
    let verdict = check(&history(events));
    assert_eq!(kinds(&verdict.violations), []);
    assert_eq!((verdict.sections, verdict.lost.len()), (2, 0));
}

#[test]
fn the_next_owner_after_the_end_of_a_lease_is_as_it_should_be() {
    assert_eq!(
        found([ALICE.acquires(0, 1, 10), BOB.acquires(1001, 1002, 11)]),
        []
    );
}

#[test]
fn two_owners_at_one_instant_are_found() {
    let events = [ALICE.acquires(0, 1, 10), BOB.acquires(900, 998, 11)];
    assert_eq!(found(events), [Kind::TooMany]);
}

#[test]
fn a_renewed_lease_counts_from_the_renewal() {
    let events = [
        ALICE.acquires(0, 1, 10),
        ALICE.renews(800, 801, 10),
        BOB.acquires(900, 1700, 11),
    ];
    assert_eq!(found(events), [Kind::TooMany]);
}

#[test]
fn a_release_that_was_asked_for_is_not_certain_to_hold() {
    let events = [
        ALICE.acquires(0, 1, 10),
        ALICE.releases(100, 200),
        BOB.acquires(50, 101, 11),
        BOB.releases(300, 301),
    ];
    assert_eq!(found(events), []);
}

#[test]
fn a_lock_lost_by_a_failover_is_counted_apart() {
    let events = [ALICE.acquires(0, 1, 10), BOB.acquires(900, 990, 11)];
    let mut history = history(events);
    history.faults = vec![fault(500, 800, true, 0)];
    let verdict = check(&history);
    assert_eq!(kinds(&verdict.violations), []);
    assert_eq!(kinds(&verdict.lost), [Kind::TooMany]);

    history.faults = vec![fault(500, 800, false, 0)];
    assert!(check(&history).found(Kind::TooMany), "it must lose nothing");

    history.faults = vec![fault(500, 800, false, 10)];
    let verdict = check(&history);
    assert_eq!(kinds(&verdict.violations), [], "the clocks differ");
    assert_eq!(kinds(&verdict.shortened), [Kind::TooMany]);
}

#[test]
fn what_a_replica_acknowledged_is_never_excused_as_lost() {
    let mut alice = ALICE.acquires(0, 1, 10);
    alice.did = Did::Acquire {
        wait: 0,
        safe: true,
    };
    let mut history = history([alice, BOB.acquires(900, 990, 11)]);
    history.faults = vec![fault(500, 800, true, 0)];
    assert!(check(&history).found(Kind::TooMany));
}

#[test]
fn a_failover_before_the_last_renewal_excuses_nothing() {
    let events = [
        ALICE.acquires(0, 1, 10),
        ALICE.renews(850, 851, 10),
        BOB.acquires(900, 1500, 11),
    ];
    let mut history = history(events);
    history.faults = vec![fault(500, 800, true, 0)];
    assert!(check(&history).found(Kind::TooMany));
}

#[test]
fn a_lease_that_ends_before_its_time_is_found() {
    let denied = ALICE.event(Did::Renew, 500, 501, Answer::Not);
    assert_eq!(
        found([ALICE.acquires(0, 1, 10), denied]),
        [Kind::EndedEarly]
    );
    let denied = ALICE.event(Did::Release, 500, 501, Answer::Not);
    assert_eq!(
        found([ALICE.acquires(0, 1, 10), denied]),
        [Kind::EndedEarly]
    );
    let denied = ALICE.event(Did::Renew, 1000, 1001, Answer::Not);
    assert_eq!(found([ALICE.acquires(0, 1, 10), denied]), [], "it was over");
}

#[test]
fn a_release_that_is_asked_for_again_after_a_fault_may_have_been_heard_before() {
    let failed = Answer::Failed("reset".into());
    let events = [
        ALICE.acquires(0, 1, 10),
        ALICE.event(Did::Release, 100, 101, failed),
        ALICE.event(Did::Release, 120, 121, Answer::Not),
    ];
    let mut history = history(events);
    assert!(check(&history).found(Kind::EndedEarly));
    history.faults = vec![fault(100, 110, false, 0)];
    assert_eq!(kinds(&check(&history).violations), []);
}

#[test]
fn a_fence_given_twice_is_found() {
    let events = [
        ALICE.acquires(0, 1, 10),
        ALICE.releases(2, 3),
        BOB.acquires(4, 5, 10),
    ];
    assert_eq!(found(events), [Kind::SameFence]);
}

#[test]
fn an_older_fence_after_a_newer_is_found_even_over_a_failover() {
    let events = [
        ALICE.acquires(0, 1, 10),
        ALICE.releases(2, 3),
        BOB.acquires(4, 5, 9),
    ];
    let mut history = history(events);
    history.faults = vec![fault(2, 4, true, 0)];
    assert_eq!(kinds(&check(&history).violations), [Kind::OlderFence]);
}

#[test]
fn a_slow_reply_is_no_older_fence() {
    let events = [
        ALICE.acquires(0, 50, 10),
        ALICE.releases(51, 52),
        BOB.acquires(1, 40, 11),
        BOB.releases(45, 46),
    ];
    assert_eq!(found(events), []);
}

#[test]
fn an_owner_that_does_not_know_yet_of_its_loss_has_no_older_fence() {
    let events = [
        ALICE.acquires(0, 1, 10),
        BOB.acquires(500, 501, 11),
        ALICE.event(Did::Check, 600, 600, held(0, 10)),
    ];
    let mut history = history(events);
    history.faults = vec![fault(400, 450, true, 0)];
    assert_eq!(kinds(&check(&history).violations), []);
}

#[test]
fn a_storage_that_is_fooled_is_found() {
    let writes = |first, second, answer: Answer| {
        found([
            ALICE.writes(1, first, Answer::Accepted),
            BOB.writes(2, second, answer),
        ])
    };
    assert_eq!(writes(10, 9, Answer::Accepted), [Kind::StorageFooled]);
    assert_eq!(writes(10, 10, Answer::Accepted), [Kind::StorageFooled]);
    assert_eq!(writes(10, 11, Answer::Accepted), []);
    assert_eq!(writes(10, 9, Answer::Refused), []);
}

#[test]
fn a_storage_that_refuses_an_owner_with_a_valid_lease_is_found() {
    let refused = ALICE.writes(500, 10, Answer::Refused);
    assert_eq!(
        found([ALICE.acquires(0, 1, 10), refused]),
        [Kind::OwnerRefused]
    );
    let refused = ALICE.writes(1001, 10, Answer::Refused);
    assert_eq!(found([ALICE.acquires(0, 1, 10), refused]), []);
}

#[test]
fn a_free_lock_that_nobody_is_given_is_found() {
    let events = |notified| {
        [
            ALICE.acquires(0, 1, 10),
            ALICE.releases(100, 101),
            BOB.acquires(50, notified, 11),
            BOB.renews(notified, notified + 1, 11),
        ]
    };
    assert_eq!(found(events(102)), []);
    assert_eq!(found(events(101 + MAX_IDLE / MS)), []);
    assert_eq!(found(events(102 + MAX_IDLE / MS)), [Kind::NobodyWoken]);
    let mut history = history(events(1010));
    history.faults = vec![fault(90, 95, false, 0)];
    assert!(
        !check(&history).found(Kind::NobodyWoken),
        "there was a fault"
    );
}

#[test]
fn a_lock_that_nobody_waits_for_may_be_free() {
    let events = [
        ALICE.acquires(0, 1, 10),
        ALICE.releases(100, 101),
        BOB.acquires(5000, 5001, 11),
    ];
    assert_eq!(found(events), []);
}

#[test]
fn who_may_hold_the_lock_unknowingly_keeps_it_busy() {
    let failed = ALICE.asks(90, 100, Answer::Failed("reset".into()));
    let events = [
        failed,
        BOB.acquires(50, 1000, 11),
        BOB.renews(1000, 1001, 11),
    ];
    assert_eq!(found(events), []);
}

#[test]
fn a_question_that_nobody_answers_is_found() {
    let mut asked = ALICE.acquires(0, 1, 10);
    asked.answer = None;
    assert_eq!(found([asked]), [Kind::Unanswered]);
}

#[test]
fn an_answer_that_comes_late_is_found_unless_there_was_a_fault() {
    let late = ALICE.asks(0, 12_001, Answer::Not);
    assert_eq!(found([late.clone()]), [Kind::AnsweredLate]);
    assert_eq!(found([ALICE.asks(0, 11_999, Answer::Not)]), []);
    let mut history = history([late]);
    history.faults = vec![fault(500, 11_000, false, 0)];
    assert_eq!(kinds(&check(&history).violations), []);
}

#[test]
fn a_newcomer_who_passes_one_in_the_queue_is_found() {
    const CAROL: Owner = Owner(3, RAW, 1);
    let events_of = |bob: Owner, carol_asks| {
        [
            ALICE.acquires(0, 1, 10),
            bob.acquires(2, 1900, 12),
            ALICE.releases(950, 951),
            CAROL.acquires(carol_asks, 952, 11),
            CAROL.releases(1899, 1900),
        ]
    };
    let events = |carol_asks| events_of(BOB, carol_asks);
    assert_eq!(found(events(940)), [Kind::PassedOver]);
    // Through a helper he may not be in the queue yet.
    let helped = Owner(2, "rust", 1);
    assert_eq!(found(events_of(helped, 940)), []);
    assert_eq!(found(events(900)), [], "they came at about the same time");
    let mut history = history(events(940));
    history.faults = vec![fault(90, 95, false, 0)];
    assert_eq!(kinds(&check(&history).violations), []);
}

/// Owners of which each lets two or three hold the lock.
const ANN: Owner = Owner(11, RAW, 2);
const BEA: Owner = Owner(12, RAW, 2);
const CYD: Owner = Owner(13, RAW, 3);

#[test]
fn as_many_as_each_of_them_allows_are_as_it_should_be() {
    let events = [
        ANN.acquires(0, 1, 10),
        BEA.acquires(2, 3, 11),
        BEA.renews(500, 501, 11),
        // The lease of the first has ended.
        CYD.acquires(600, 1001, 12),
        BOB.acquires(700, 1700, 13),
    ];
    let verdict = check(&history(events));
    assert_eq!(kinds(&verdict.violations), []);
    assert_eq!((verdict.sections, verdict.beside), (4, 2));
}

#[test]
fn one_more_than_a_holder_allows_is_found() {
    let after = |third: Event| found([ANN.acquires(0, 1, 10), CYD.acquires(2, 3, 11), third]);
    let cyd = Owner(14, RAW, 3);
    assert_eq!(after(cyd.acquires(4, 5, 12)), [Kind::TooMany], "ann's two");
    assert_eq!(after(ALICE.acquires(4, 5, 12)), [Kind::TooMany], "its one");
    assert_eq!(after(cyd.acquires(4, 1001, 12)), []);
}

#[test]
fn a_crowd_is_excused_only_by_faults_that_explain_enough_of_it() {
    let events = |renewed| {
        [
            ANN.acquires(0, 1, 10),
            ANN.renews(renewed, renewed + 1, 10),
            BEA.acquires(2, 3, 11),
            BEA.renews(renewed, renewed + 1, 11),
            CYD.acquires(700, 800, 12),
        ]
    };
    let check_with = |renewed, fault| {
        let mut history = history(events(renewed));
        history.faults = vec![fault];
        check(&history)
    };
    let lossy = || fault(500, 550, true, 0);
    assert_eq!(kinds(&check_with(100, lossy()).lost), [Kind::TooMany]);
    assert!(
        check_with(600, lossy()).found(Kind::TooMany),
        "confirmed since"
    );
    let clock = |skew| check_with(100, fault(500, 550, false, skew));
    assert_eq!(kinds(&clock(300).shortened), [Kind::TooMany]);
    assert!(clock(299).found(Kind::TooMany));
}

#[test]
fn one_who_was_lost_does_not_excuse_another() {
    let mut bea = BEA.acquires(2, 3, 11);
    bea.did = Did::Acquire {
        wait: 0,
        safe: true,
    };
    let with = |cyd: Owner| {
        let mut history = history([
            ANN.acquires(0, 1, 10),
            bea.clone(),
            cyd.acquires(700, 800, 12),
        ]);
        history.faults = vec![fault(500, 550, true, 0)];
        check(&history)
    };
    // Beside bea, whom a replica has, there was a place; but not for one who is to be alone.
    assert_eq!(kinds(&with(CYD).lost), [Kind::TooMany]);
    assert!(with(BOB).found(Kind::TooMany));
}

#[test]
fn a_companion_with_an_older_fence_may_go_on_but_none_from_before_a_writer() {
    let events = |second: &Owner| {
        [
            ANN.acquires(0, 1, 10),
            second.acquires(2, 3, 11),
            ANN.renews(4, 5, 10),
        ]
    };
    assert_eq!(found(events(&BEA)), []);
    assert!(found(events(&BOB)).contains(&Kind::OlderFence));
    let events = [ANN.acquires(0, 1, 10), BEA.acquires(2, 3, 9)];
    assert_eq!(
        found(events),
        [Kind::OlderFence],
        "each grant is above all before"
    );
}

#[test]
fn a_storage_refuses_only_fences_from_before_a_writer() {
    let writes = |first: &Owner, answer| {
        found([
            first.writes(1, 11, Answer::Accepted),
            ANN.writes(2, 10, answer),
        ])
    };
    assert_eq!(writes(&BEA, Answer::Accepted), []);
    assert_eq!(writes(&BOB, Answer::Accepted), [Kind::StorageFooled]);
}

#[test]
fn a_free_place_that_nobody_is_given_is_found() {
    let late = 5 + MAX_IDLE / MS;
    let events = |waiter: &Owner| {
        [
            ANN.acquires(0, 1, 10),
            ANN.renews(500, 501, 10),
            BEA.acquires(0, 2, 11),
            BEA.releases(3, 4),
            waiter.acquires(2, late, 12),
            waiter.renews(late, late + 1, 12),
        ]
    };
    assert_eq!(found(events(&CYD)), [Kind::NobodyWoken]);
    assert_eq!(
        kinds(&check(&history(events(&BOB))).violations),
        [Kind::TooMany],
        "no place for him"
    );
}

#[test]
fn who_is_let_in_together_may_hear_of_it_in_any_order() {
    let events = |second_fence| {
        [
            ALICE.acquires(0, 1, 10),
            BEA.acquires(2, 1902, 11),
            CYD.acquires(1000, 1901, second_fence),
            ALICE.renews(999, 1000, 10),
            ALICE.releases(1899, 1900),
        ]
    };
    assert_eq!(found(events(12)), []);
    let mut swapped = events(12);
    swapped[1] = BEA.acquires(2, 1902, 13);
    assert_eq!(found(swapped), [Kind::PassedOver]);
}

#[test]
fn who_leaves_the_head_of_the_queue_lets_others_in_before_it_hears_of_it() {
    let events = |notified| {
        [
            ANN.acquires(0, 1, 10),
            ANN.renews(9500, 9501, 10),
            BOB.asks(2, 10_003, Answer::Not),
            CYD.acquires(9000, notified, 11),
            CYD.renews(notified, notified + 1, 11),
        ]
    };
    assert_eq!(found(events(10_002)), []);
    assert_eq!(found(events(10_001)), [Kind::PassedOver]);
}
