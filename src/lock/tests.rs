use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

const NOW: UnixUs = UnixUs(1_800_000_000_000_000);

/// The end of a lease so many milliseconds from now.
fn end(ms: i64) -> UnixMs {
    UnixMs(NOW.ms().0 + ms)
}

fn owner(name: &str) -> Owner<'_> {
    Owner::new(name.as_bytes()).unwrap()
}

fn ttl(ms: u64) -> Ttl {
    Ttl::from_ms(ms).unwrap()
}

fn fences() -> Fences {
    Fences::starting(NOW)
}

/// What a plain ACQUIRE asks for.
fn exclusive(owner: Owner, ms: u64) -> LeaseRequest {
    LeaseRequest {
        owner,
        ttl: ttl(ms),
        limit: Limit::EXCLUSIVE,
    }
}

/// The effect of a grant to an exclusive holder.
fn set(fence: Fence, owner: Owner, ends_at: UnixMs) -> Effect {
    let bytes = write(fence, owner);
    Effect::Set(Value { bytes, ends_at })
}

#[test]
fn a_value_of_ours_is_sixteen_digits_a_colon_and_an_owner() {
    let read = |value: &'static [u8]| {
        let Reading { fence, owner } = super::read(value);
        (fence.map(Fence::number), owner)
    };
    assert_eq!(read(b"0000000000000001:x"), (Some(1), &b"x"[..]));
    assert_eq!(
        read(b"9007199254740991:a:b"),
        (Some(MAX_INTEGER), &b"a:b"[..])
    );
    for by_hand in [
        &b"0000000000000000:x"[..], // no fence is 0
        b"9007199254740992:x",      // nor above 2^53 - 1
        b"0000000000000001:",       // nor is an owner empty
        b"000000000000001:x",
        b"00000000000000001:x",
        b"+000000000000001:x",
        b"0000000000000001;x",
        b"0000000000000001",
        b"token",
        b"",
    ] {
        assert_eq!(
            super::read(by_hand),
            Reading {
                fence: None,
                owner: by_hand
            }
        );
    }
    let mut longest = b"0000000000000001:".to_vec();
    longest.resize(17 + MAX_OWNER, b'o');
    assert_eq!(super::read(&longest).owner, &longest[17..]);
    longest.push(b'o');
    assert_eq!(super::read(&longest).fence, None);
}

proptest! {
    #[test]
    fn what_is_written_is_read_back(
        number in 1..=MAX_INTEGER,
        bytes in prop::collection::vec(any::<u8>(), 1..=MAX_OWNER),
    ) {
        let owner = Owner::new(&bytes).unwrap();
        let value = write(Fence(number), owner);
        prop_assert_eq!(read(&value), Reading { fence: Some(Fence(number)), owner: &bytes });
        prop_assert!(owner.may_hold(value.len()) && owner.may_hold(bytes.len()));
    }

    #[test]
    fn any_value_can_be_read(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        let reading = read(&bytes);
        prop_assert!(bytes.ends_with(reading.owner));
    }

    #[test]
    fn a_length_that_rules_an_owner_out_never_hides_a_match(
        value in "([0-9]{16}:)?[ab]{1,3}",
        name in "([0-9]{16}:)?[ab]{1,3}",
    ) {
        let owner = owner(&name);
        let claims = !matches!(claim(value.as_bytes(), owner), Claim::Other);
        prop_assert!(!claims || owner.may_hold(value.len()));
    }
}

#[test]
fn a_free_lock_is_granted_until_ttl_from_now() {
    let decision = acquire(
        Found::Nobody,
        None,
        exclusive(owner("me"), 500),
        false,
        NOW,
        &mut fences(),
    );
    let Outcome::Acquired(fence) = decision.outcome else {
        panic!("{decision:?}")
    };
    assert_eq!(decision.effect, set(fence, owner("me"), end(500)));
}

#[test]
fn acquiring_again_keeps_the_fence_and_never_shortens_the_lease() {
    let value = b"0000000000000007:me";
    for (before, effect) in [
        (Some(end(499)), Effect::Expire { ends_at: end(500) }),
        (Some(end(500)), Effect::Nothing),
        (Some(end(501)), Effect::Nothing),
        (None, Effect::Expire { ends_at: end(500) }),
    ] {
        let decision = acquire(
            Found::Value(value),
            before,
            exclusive(owner("me"), 500),
            true,
            NOW,
            &mut fences(),
        );
        assert_eq!(
            decision,
            Decision {
                outcome: Outcome::Confirmed(Fence(7)),
                effect
            }
        );
    }
}

#[test]
fn acquiring_a_lock_taken_by_hand_makes_it_ours_and_never_shortens_the_lease() {
    for (before, after) in [(Some(end(900)), 900), (Some(end(100)), 500), (None, 500)] {
        let decision = acquire(
            Found::Value(b"token"),
            before,
            exclusive(owner("token"), 500),
            true,
            NOW,
            &mut fences(),
        );
        let Outcome::Acquired(fence) = decision.outcome else {
            panic!("{decision:?}")
        };
        assert_eq!(decision.effect, set(fence, owner("token"), end(after)));
    }
}

#[test]
fn renewing_ends_the_lease_ttl_from_now_whatever_its_end_was() {
    for value in [&b"0000000000000007:me"[..], b"me"] {
        let decision = renew(Found::Value(value), owner("me"), ttl(500), NOW);
        let effect = Effect::Expire { ends_at: end(500) };
        assert_eq!(
            decision,
            Decision {
                outcome: Outcome::Renewed,
                effect
            }
        );
    }
}

#[test]
fn what_is_released_tells_which_fence_the_next_one_must_be_above() {
    for (value, name, fence) in [
        ("0000000000000007:me", "me", Some(7)),
        ("me", "me", None),
        // Taken by hand under a name that reads as a value of ours.
        ("0000000000000007:me", "0000000000000007:me", Some(7)),
    ] {
        let decision = release(Found::Value(value.as_bytes()), owner(name), || NOW);
        assert_eq!(decision.outcome, Outcome::Released);
        let nobody = Holders::none_after(fence.and_then(Fence::new));
        assert_eq!(decision.effect, Effect::Hold(nobody));
    }
}

#[test]
fn another_owner_changes_nothing_and_learns_why() {
    let other = owner("you");
    let by_me = Found::Value(b"0000000000000007:me");
    for (found, busy, refused) in [
        (by_me, Outcome::Busy, Outcome::NotOwner),
        (Found::Value(b"me"), Outcome::Busy, Outcome::NotOwner),
        (Found::Another, Outcome::Busy, Outcome::NotOwner),
        (Found::WrongType, Outcome::WrongType, Outcome::WrongType),
    ] {
        let decisions = [
            (
                acquire(found, None, exclusive(other, 1), false, NOW, &mut fences()),
                busy,
            ),
            (renew(found, other, ttl(1), NOW), refused),
            (release(found, other, || NOW), refused),
        ];
        for (decision, outcome) in decisions {
            assert_eq!(
                decision,
                Decision {
                    outcome,
                    effect: Effect::Nothing
                }
            );
        }
    }
    assert_eq!(
        renew(Found::Nobody, other, ttl(1), NOW).outcome,
        Outcome::NotHeld
    );
    assert_eq!(
        release(Found::Nobody, other, || NOW).outcome,
        Outcome::NotHeld
    );
}

#[test]
fn the_whole_value_is_a_name_too_even_when_it_reads_as_ours() {
    let value = "0000000000000007:me";
    let found = Found::Value(value.as_bytes());
    assert_eq!(
        release(found, owner(value), || NOW).outcome,
        Outcome::Released
    );
    let Outcome::Acquired(fence) = acquire(
        found,
        None,
        exclusive(owner(value), 1),
        false,
        NOW,
        &mut fences(),
    )
    .outcome
    else {
        panic!("not acquired")
    };
    assert!(fence > Fence(7));
}

/// A key with these holders: name, fence, limit, and in how many ms the lease ends.
fn list(all: &[(&str, u64, u64, i64)]) -> Vec<u8> {
    let mut holders = Holders::default();
    for (name, fence, limit, ms) in all {
        holders.join(Holder {
            owner: owner(name),
            fence: Fence(*fence),
            limit: Limit::new(*limit).unwrap(),
            ends_at: end(*ms),
        });
    }
    holders.value().unwrap().bytes
}

fn sharing(owner: Owner, ms: u64, limit: u64) -> LeaseRequest {
    LeaseRequest {
        limit: Limit::new(limit).unwrap(),
        ..exclusive(owner, ms)
    }
}

#[test]
fn who_comes_beside_others_is_granted_above_them_if_they_admit_it_and_nobody_waits() {
    let ahead = NOW.0 + DAY_US;
    let list = list(&[("ann", ahead, 3, 500), ("bea", 8, 3, 900)]);
    for (limit, queued, granted) in [
        (3, false, true),
        (1_000, false, true),
        (2, false, false),
        (3, true, false),
    ] {
        let request = sharing(owner("me"), 100, limit);
        let found = Found::Value(&list);
        let decision = acquire(found, Some(end(900)), request, queued, NOW, &mut fences());
        if granted {
            assert_eq!(decision.outcome, Outcome::Acquired(Fence(ahead + 1)));
        } else {
            assert_eq!(decision, Decision::refuse(Outcome::Busy), "{limit}");
        }
    }
}

#[test]
fn a_holder_beside_others_that_asks_again_keeps_its_fence_and_its_lease_ends_no_sooner() {
    let list = list(&[("me", 7, 3, 500), ("bea", 8, 3, 900)]);
    for (ms, key_ends_at, after) in [
        (400, Some(end(900)), None),
        (600, Some(end(900)), Some(end(600))),
        // Others have cut the key short, or persisted it.
        (400, Some(end(300)), Some(end(500))),
        (400, None, Some(end(500))),
    ] {
        let request = sharing(owner("me"), ms, 3);
        let found = Found::Value(&list);
        let decision = acquire(found, key_ends_at, request, true, NOW, &mut fences());
        assert_eq!(decision.outcome, Outcome::Confirmed(Fence(7)));
        let lease_end = match decision.effect {
            Effect::Hold(holders) => holders.find(owner("me")).map(|own| own.ends_at),
            _ => None,
        };
        assert_eq!(lease_end, after, "{ms} {key_ends_at:?}");
    }
}

#[test]
fn a_holder_beside_others_changes_its_limit_only_if_they_admit_it() {
    let list = list(&[("me", 7, 3, 500), ("bea", 8, 3, 900)]);
    let ask = |limit| {
        let request = sharing(owner("me"), 100, limit);
        acquire(Found::Value(&list), None, request, true, NOW, &mut fences())
    };
    assert_eq!(ask(1), Decision::refuse(Outcome::NotAdmitted));
    assert!(matches!(ask(2).outcome, Outcome::Acquired(_)));
}

#[test]
fn a_list_whose_leases_have_all_ended_is_nobodys() {
    let list = list(&[("me", 7, 3, -1), ("bea", 8, 3, -1)]);
    let found = Found::Value(&list);
    let nobodys = Decision::refuse(Outcome::NotHeld);
    assert_eq!(renew(found, owner("me"), ttl(1), NOW), nobodys);
    assert_eq!(release(found, owner("me"), || NOW), nobodys);
    let request = exclusive(owner("me"), 100);
    let decision = acquire(found, None, request, false, NOW, &mut fences());
    assert!(matches!(decision.outcome, Outcome::Acquired(_)));
}

#[test]
fn fences_grow_when_the_clock_steps_back() {
    let mut fences = fences();
    let before = fences.next(NOW, None);
    let after = fences.next(UnixUs(NOW.0 - 3_600_000_000), None);
    assert!(after > before);
}

#[test]
fn a_new_server_begins_one_second_ahead_of_the_clock() {
    assert_eq!(fences().next(NOW, None).number(), NOW.0 + HEAD_START_US + 1);
}

#[test]
fn a_replaced_fence_up_to_a_day_ahead_counts_for_its_own_key_only() {
    let mut fences = fences();
    let day_ahead = Fence(NOW.0 + DAY_US);
    assert_eq!(fences.next(NOW, Some(day_ahead)), Fence(day_ahead.0 + 1));
    assert!(fences.next(NOW, None) < day_ahead);
    assert!(fences.next(NOW, Some(Fence(day_ahead.0 + 1))) < day_ahead);
    assert!(fences.next(NOW, Some(Fence(MAX_INTEGER))) < day_ahead);
}

#[test]
fn fences_stay_below_2_to_the_53rd_at_the_end_of_time() {
    let end = UnixUs(u64::MAX);
    let mut fences = Fences::starting(end);
    for _ in 0..3 {
        assert!(fences.next(end, Some(Fence(MAX_INTEGER))).number() <= MAX_INTEGER);
    }
}

#[test]
fn held_since_is_zero_for_a_fence_ahead_of_the_clock() {
    assert_eq!(Fence(NOW.0 - 5_000).held_ms(NOW), 5);
    assert_eq!(Fence(NOW.0 + 5_000).held_ms(NOW), 0);
}

/// A key as Redis keeps it: enough to let a sequence of commands run.
#[derive(Default)]
struct Key(Option<(Vec<u8>, Option<UnixMs>)>);

impl Key {
    fn expire(&mut self, now: UnixUs) {
        self.0
            .take_if(|(_, end)| end.is_some_and(|end| now.ms() > end));
    }

    fn found(&self) -> Found<'_> {
        match &self.0 {
            Some((bytes, _)) => Found::Value(bytes),
            None => Found::Nobody,
        }
    }

    fn ends_at(&self) -> Option<UnixMs> {
        self.0.as_ref().and_then(|(_, end)| *end)
    }

    fn apply(&mut self, effect: Effect) {
        match effect {
            Effect::Nothing => {}
            Effect::Set(value) => self.0 = Some((value.bytes, Some(value.ends_at))),
            Effect::Expire { ends_at } => {
                self.0.as_mut().expect("only what is there gets an end").1 = Some(ends_at);
            }
            Effect::Hold(holders) => {
                let key = |value: Value| (value.bytes, Some(value.ends_at));
                self.0 = holders.value().map(key);
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    /// For how long, and with how many others.
    Acquire(u64, Limit),
    Renew(u64),
    Release,
    TakeByHand(u64),
    Delete,
    /// Of a server that was up for a second: before, its fences are ahead of the clock.
    Restart,
    /// The clock moves, back too.
    Clock(i64),
}

fn steps() -> impl Strategy<Value = Vec<(usize, Step)>> {
    let limit = prop::sample::select(vec![1, 1, 2, 3, 1_000]);
    let acquire =
        (1u64..50, limit).prop_map(|(ms, limit)| Step::Acquire(ms, Limit::new(limit).unwrap()));
    let step = prop_oneof![
        4 => acquire,
        2 => (1u64..50).prop_map(Step::Renew),
        2 => Just(Step::Release),
        1 => (1u64..50).prop_map(Step::TakeByHand),
        1 => Just(Step::Delete),
        1 => Just(Step::Restart),
        3 => (-5i64..40).prop_map(Step::Clock),
    ];
    prop::collection::vec((0usize..4, step), 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// What each owner was told is kept beside the key. As long as a lease runs by the server's clock, nobody
    /// else is granted the key whom its owner does not allow.
    #[test]
    fn no_sequence_gives_a_holder_more_company_than_it_allows(steps in steps()) {
        let names = ["a", "b", "c", "d"].map(owner);
        let (mut key, mut fences, mut now) = (Key::default(), fences(), NOW);
        let mut leases: BTreeMap<usize, UnixMs> = BTreeMap::new();
        let mut told = [(Fence(1), Limit::EXCLUSIVE); 4];
        let mut newest = Fence(1);
        for (who, step) in steps {
            let me = names[who];
            leases.retain(|_, end| *end >= now.ms());
            key.expire(now);
            match step {
                Step::Acquire(ms, limit) => {
                    let request = LeaseRequest { owner: me, ttl: ttl(ms), limit };
                    let decision = acquire(
                        key.found(), key.ends_at(), request, false, now, &mut fences,
                    );
                    if let Outcome::Acquired(fence) | Outcome::Confirmed(fence) = decision.outcome {
                        let again = decision.outcome == Outcome::Confirmed(fence);
                        prop_assert!(again || fence > newest);
                        prop_assert!(!again || told[who] == (fence, limit));
                        told[who] = (fence, limit);
                        newest = newest.max(fence);
                        let end = leases.entry(who).or_insert(now.ms());
                        *end = now.plus(ttl(ms)).max(*end);
                    }
                    key.apply(decision.effect);
                }
                Step::Renew(ms) => {
                    let decision = renew(key.found(), me, ttl(ms), now);
                    if decision.outcome == Outcome::Renewed {
                        leases.insert(who, now.plus(ttl(ms)));
                    }
                    key.apply(decision.effect);
                }
                Step::Release => {
                    let decision = release(key.found(), me, || now);
                    if decision.outcome == Outcome::Released {
                        leases.remove(&who);
                    }
                    key.apply(decision.effect);
                }
                Step::TakeByHand(ms) => {
                    if key.found() == Found::Nobody {
                        let end = now.plus(ttl(ms));
                        key.0 = Some((me.bytes().to_vec(), Some(end)));
                        told[who].1 = Limit::EXCLUSIVE;
                        leases.insert(who, end);
                    }
                }
                Step::Delete => {
                    key.0 = None;
                    leases.clear();
                }
                Step::Restart => {
                    now.0 += 1_000_000;
                    fences = Fences::starting(now);
                }
                Step::Clock(ms) => now.0 = now.0.saturating_add_signed(1000 * ms),
            }
            let living = leases.values().filter(|end| **end >= now.ms()).count();
            prop_assert!(leases.keys().all(|who| usize::from(told[*who].1.number()) >= living));
        }
    }
}

/// An empty model passes every property: the good things must happen too.
#[test]
fn every_owner_gets_its_turn() {
    let (mut key, mut fences, mut now) = (Key::default(), fences(), NOW);
    for name in ["a", "b", "c"] {
        let me = owner(name);
        let request = exclusive(me, 10);
        let decision = acquire(key.found(), key.ends_at(), request, false, now, &mut fences);
        assert!(matches!(decision.outcome, Outcome::Acquired(_)));
        key.apply(decision.effect);
        now.0 += 5_000;
        let decision = renew(key.found(), me, ttl(10), now);
        assert_eq!(decision.outcome, Outcome::Renewed);
        key.apply(decision.effect);
        now.0 += 9_000;
        let decision = release(key.found(), me, || now);
        assert_eq!(decision.outcome, Outcome::Released);
        key.apply(decision.effect);
    }
}
