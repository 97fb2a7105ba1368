//! The value parser and what the commands decide on it: whatever a key holds and whoever asks, only
//! who matches gets an effect, and every reply is well formed. Lists of several holders: `lists`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use lockkeeper_fuzz::lock::{
    self, Decision, Effect, Fences, Found, Holders, LeaseRequest, Limit, Outcome, Owner, Value,
};
use lockkeeper_fuzz::time::{MAX_INTEGER, Ttl, UnixMs, UnixUs};
use lockkeeper_fuzz::{assert_well_formed, cut};

/// The manual's form of a value of ours, by other means than the parser's.
fn parse(value: &[u8]) -> Option<(u64, &[u8])> {
    let digits = std::str::from_utf8(value.get(..16)?).ok()?;
    let fence = digits.parse().ok()?;
    let owner = value[16..].strip_prefix(b":")?;
    let is_ours = digits.bytes().all(|byte| byte.is_ascii_digit())
        && (1..1 << 53).contains(&fence)
        && (1..=512).contains(&owner.len());
    is_ours.then_some((fence, owner))
}

/// The first eight bytes as a number, and the rest.
fn number(input: &[u8]) -> (u64, &[u8]) {
    let (bytes, rest) = input.split_at(input.len().min(8));
    let number = bytes
        .iter()
        .fold(0, |sum, byte| sum << 8 | u64::from(*byte));
    (number, rest)
}

fuzz_target!(|input: &[u8]| {
    let (now, rest) = number(input);
    let (before, rest) = number(rest);
    let (ttl, rest) = number(rest);
    let (name, value) = cut(rest);

    let reading = lock::read(value);
    match parse(value) {
        Some((number, owner)) => {
            let fence = reading.fence.expect("a value of ours");
            assert_eq!((fence.number(), reading.owner), (number, owner));
            assert_eq!(lock::write(fence, Owner::new(owner).unwrap()), value);
        }
        None => assert_eq!((reading.fence, reading.owner), (None, value)),
    }

    let now = UnixUs(now);
    let before = (before > 0).then_some(UnixMs(before.cast_signed()));
    let Some((owner, ttl)) = Owner::new(name).zip(Ttl::from_ms(ttl)) else {
        return;
    };
    if Holders::read(value, now).is_some() {
        return;
    }
    let matches = name == reading.owner || name == value;
    assert!(owner.may_hold(value.len()) || !matches);

    let mut fences = Fences::starting(now);
    let highest = fences.next(now, None);
    let found = Found::Value(value);
    let limit = Limit::EXCLUSIVE;
    let request = LeaseRequest { owner, ttl, limit };
    let acquired = lock::acquire(found, before, request, true, now, &mut fences);
    let renewed = lock::renew(found, owner, ttl, now);
    let released = lock::release(found, owner, || now);
    let shared = LeaseRequest {
        limit: Limit::SHARED,
        ..request
    };
    let admitted = lock::acquire(found, before, shared, true, now, &mut fences);
    assert_eq!(matches!(admitted.outcome, Outcome::Acquired(_)), matches);
    if !matches {
        let refusal = |outcome| Decision {
            outcome,
            effect: Effect::Nothing,
        };
        assert_eq!(acquired, refusal(Outcome::Busy));
        assert_eq!(renewed, refusal(Outcome::NotOwner));
        assert_eq!(released, refusal(Outcome::NotOwner));
    } else {
        let ends_at = now.plus(ttl);
        assert_eq!(renewed.effect, Effect::Expire { ends_at });
        let nobody = Holders::none_after(reading.fence);
        assert_eq!(released.effect, Effect::Hold(nobody));
        let longest = before.map_or(ends_at, |before| before.max(ends_at));
        match (acquired.outcome, acquired.effect.clone()) {
            (Outcome::Confirmed(fence), Effect::Nothing) => {
                assert_eq!((Some(fence), before), (reading.fence, Some(longest)));
            }
            (Outcome::Confirmed(fence), Effect::Expire { ends_at }) => {
                assert_eq!((Some(fence), ends_at), (reading.fence, longest));
            }
            (Outcome::Acquired(fence), Effect::Set(Value { bytes, ends_at })) => {
                assert_eq!(bytes, lock::write(fence, owner));
                assert_eq!(ends_at, longest);
                assert!(fence > highest || fence.number() == MAX_INTEGER);
                // What was granted is read back, and asked for again it is the same.
                let found = Found::Value(&bytes);
                let again = lock::acquire(found, None, request, true, now, &mut fences);
                assert_eq!(again.outcome, Outcome::Confirmed(fence));
            }
            other => panic!("{other:?}"),
        }
    }
    for decision in [acquired, renewed, released] {
        assert_well_formed(&decision.outcome.into());
    }
    reading.fence.map(|fence| fence.held_ms(now));
});
