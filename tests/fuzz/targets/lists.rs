//! Lists of several holders: whatever bytes, they are no list or one that is written as it was; and whatever
//! holders a list has, a grant gives none of them more company than it allows.

#![no_main]

use std::io::Write;

use libfuzzer_sys::fuzz_target;
use lockkeeper_fuzz::lock::{
    self, Decision, Effect, Fences, Found, Holders, LeaseRequest, Limit, Outcome, Owner,
};
use lockkeeper_fuzz::time::{MAX_INTEGER, Ttl, UnixMs, UnixUs};
use lockkeeper_fuzz::{assert_well_formed, cut};

/// A day and an hour of some year, in milliseconds since 1970: records end around it.
const NOON_MS: i64 = 1_800_000_000_000;

/// As a list of ours, but with any numbers: eight bytes for each record.
fn list(bytes: &[u8]) -> Vec<u8> {
    let mut value = b"+".to_vec();
    for record in bytes.chunks_exact(8) {
        let [fence, end, limit, more, weight, name @ ..] = record else {
            continue;
        };
        let name = &name[..usize::from(name[0] % 4).min(name.len())];
        let end = NOON_MS + i64::from(*end) - 128;
        let limit = u16::from(*limit) * u16::from(more % 8);
        write!(
            value,
            "{fence:016}:{end:016}:{limit:04}:{:04}:{:03}:",
            u16::from(weight % 3),
            name.len()
        )
        .expect("into memory");
        value.extend_from_slice(name);
    }
    value
}

fuzz_target!(|input: &[u8]| {
    let Some((&[limit, ttl, damage, at], rest)) = input.split_first_chunk() else {
        return;
    };
    let (name, records) = cut(rest);
    let mut value = list(records);
    if damage != 0 {
        let index = usize::from(at) * value.len() / 256;
        value[index] = damage;
    }
    for value in [&value, records] {
        match Holders::read(value, UnixUs(0)) {
            Some(holders) => assert_eq!(holders.value().expect("nobody has ended").bytes, value),
            None => assert!(lock::read(value).owner.len() <= value.len()),
        }
    }

    let now = UnixUs(NOON_MS.cast_unsigned() * 1_000);
    let (Some(holders), Some(owner)) = (Holders::read(&value, now), Owner::new(name)) else {
        return;
    };
    let limit = Limit::new(u64::from(limit) * 4).unwrap_or(Limit::EXCLUSIVE);
    let ttl = Ttl::from_ms(1 + u64::from(ttl)).expect("a ttl");
    let request = LeaseRequest { owner, ttl, limit };
    let own = holders.find(owner);
    let key_ends_at = holders.last_end();
    let found = Found::Value(&value);

    for queued in [false, true] {
        let mut fences = Fences::starting(now);
        let acquired = lock::acquire(found, key_ends_at, request, queued, now, &mut fences);
        assert_well_formed(&acquired.outcome.into());
        match acquired {
            Decision {
                outcome: Outcome::Acquired(fence),
                effect: Effect::Hold(after),
            } => {
                assert!(own.is_some() || !queued, "a newcomer passed the queue");
                assert!(Some(fence) > holders.highest() || fence.number() == MAX_INTEGER);
                let number = after.iter().count();
                assert!(
                    after
                        .iter()
                        .all(|holder| usize::from(holder.limit.number()) >= number)
                );
                let of_owner = after.iter().filter(|holder| holder.owner == owner);
                assert_eq!(of_owner.count(), 1);
                let granted = after.find(owner).expect("the owner");
                assert_eq!((granted.fence, granted.limit), (fence, limit));
                assert!(own.is_none_or(|own| own.ends_at <= granted.ends_at));
            }
            Decision {
                outcome: Outcome::Confirmed(fence),
                effect,
            } => {
                let own = own.expect("confirmed to a holder");
                assert_eq!((own.fence, own.limit), (fence, limit));
                if let Effect::Hold(after) = effect {
                    let after = after.find(owner).expect("the owner");
                    assert!(after.ends_at >= own.ends_at && after.ends_at >= now.plus(ttl));
                }
            }
            Decision {
                outcome: Outcome::Busy,
                effect,
            } => assert_eq!((own, effect), (None, Effect::Nothing)),
            Decision {
                outcome: Outcome::NotAdmitted,
                effect,
            } => assert!(own.is_some_and(|own| own.limit != limit) && effect == Effect::Nothing),
            other => panic!("{other:?}"),
        }
    }

    let others = |after: &Holders| {
        let mut before = holders.iter().filter(|holder| holder.owner != owner);
        let after = after.iter().filter(|holder| holder.owner != owner);
        assert!(after.eq(before.by_ref()), "another holder was touched");
    };
    let refused = match holders.is_empty() {
        true => Outcome::NotHeld,
        false => Outcome::NotOwner,
    };
    let renewed = lock::renew(found, owner, ttl, now);
    let released = lock::release(found, owner, || now);
    match (own, renewed.effect, released.effect) {
        (Some(_), Effect::Hold(renewed), Effect::Hold(released)) => {
            others(&renewed);
            others(&released);
            let ends: Vec<UnixMs> = renewed
                .iter()
                .filter(|holder| holder.owner == owner)
                .map(|holder| holder.ends_at)
                .collect();
            assert!(!ends.is_empty() && ends.iter().all(|end| *end == now.plus(ttl)));
            assert!(released.find(owner).is_none());
        }
        (None, Effect::Nothing, Effect::Nothing) => {
            assert_eq!((renewed.outcome, released.outcome), (refused, refused));
        }
        other => panic!("{other:?}"),
    }
});
