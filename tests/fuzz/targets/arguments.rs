//! The argument door: whatever bytes come, each argument is accepted or refused as the manual says.

#![no_main]

use libfuzzer_sys::fuzz_target;
use lockkeeper_fuzz::request::{self, BadRequest};
use lockkeeper_fuzz::{assert_well_formed, cut};

const MAX: u64 = (1 << 53) - 1;

/// The manual's "integer in ASCII digits", by other means than the door's.
fn milliseconds(arg: &[u8]) -> Option<u64> {
    let digits = std::str::from_utf8(arg).ok()?;
    if digits.is_empty() || !digits.chars().all(|char| char.is_ascii_digit()) {
        return None;
    }
    let significant = digits.trim_start_matches('0');
    match significant.len() {
        0 => Some(0),
        1..=16 => significant.parse().ok().filter(|number| *number <= MAX),
        _ => None,
    }
}

fn is_owner(arg: &[u8]) -> bool {
    !arg.is_empty() && arg.len() <= 512
}

/// What LOCK.ACQUIRE says to these options: timeout and limit, or that they are wrong.
fn options(args: &[&[u8]]) -> Option<(u64, u64)> {
    let (mut timeout, mut limit) = (None, None);
    let mut args = args.iter();
    while let Some(option) = args.next() {
        let (slot, value) = match option.to_ascii_lowercase().as_slice() {
            b"wait" => (&mut timeout, milliseconds(args.next()?)?),
            b"limit" => (&mut limit, milliseconds(args.next()?)?),
            b"shared" => (&mut limit, 1_000),
            _ => return None,
        };
        if slot.replace(value).is_some() {
            return None;
        }
    }
    let limit = limit.unwrap_or(1);
    (1..=1_000)
        .contains(&limit)
        .then_some((timeout.unwrap_or(0), limit))
}

/// A refusal is a sentence, and a count is refused only when it is wrong.
fn assert_refusal(refusal: BadRequest, count_is_wrong: bool) {
    if refusal == BadRequest::WrongCount {
        assert!(count_is_wrong);
    }
    assert_well_formed(&refusal.into());
}

fuzz_target!(|input: &[u8]| {
    let mut args = vec![];
    let mut rest = input;
    while !rest.is_empty() && args.len() < 8 {
        let (arg, after) = cut(rest);
        (rest, _) = (after, args.push(arg));
    }
    let each = || args.iter().copied();
    let owner = args.first().copied().filter(|arg| is_owner(arg));
    let ttl = args
        .get(1)
        .and_then(|arg| milliseconds(arg))
        .filter(|ms| *ms > 0);

    let options = options(args.get(2..).unwrap_or(&[]));
    match (request::acquire(each()), owner.zip(ttl).zip(options)) {
        (Ok(request), Some(((owner, ttl), (wait_ms, limit)))) => {
            let lease = request.lease;
            assert_eq!((lease.owner.bytes(), lease.ttl.ms()), (owner, ttl));
            assert_eq!(u64::from(lease.limit.number()), limit);
            assert_eq!(request.wait.map_or(0, |wait| wait.ms()), wait_ms);
        }
        (Err(refusal), None) => assert_refusal(refusal, args.len() < 2),
        (answer, expected) => panic!("{answer:?}, not {expected:?}"),
    }
    match (
        request::renew(each()),
        owner.zip(ttl).filter(|_| args.len() == 2),
    ) {
        (Ok(request), Some((owner, ttl))) => {
            assert_eq!((request.owner.bytes(), request.ttl.ms()), (owner, ttl));
        }
        (Err(refusal), None) => assert_refusal(refusal, args.len() != 2),
        (answer, expected) => panic!("{answer:?}, not {expected:?}"),
    }
    match (request::release(each()), owner.filter(|_| args.len() == 1)) {
        (Ok(owner), Some(expected)) => assert_eq!(owner.bytes(), expected),
        (Err(refusal), None) => assert_refusal(refusal, args.len() != 1),
        (answer, expected) => panic!("{answer:?}, not {expected:?}"),
    }
    assert_eq!(request::nothing_more(each()).is_ok(), args.is_empty());
});
