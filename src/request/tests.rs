use super::*;
use proptest::prelude::*;

fn args<'a>(args: &'a [&'a [u8]]) -> impl Iterator<Item = &'a [u8]> {
    args.iter().copied()
}

#[test]
fn a_ttl_is_ascii_digits_from_1_to_2_to_the_53rd_minus_1() {
    for (text, ms) in [("1", 1), ("007", 7), ("9007199254740991", MAX_INTEGER)] {
        assert_eq!(ttl(Some(text.as_bytes())).map(Ttl::ms), Ok(ms));
    }
    for text in [
        "", "abc", "+5", "-1", " 5", "5 ", "5.0", "1e3", "0x1", "٣", "5\0",
    ] {
        let bytes = text.as_bytes();
        assert_eq!(
            ttl(Some(bytes)),
            Err(BadRequest::TtlNotANumber(bytes)),
            "{text:?}"
        );
    }
    for text in [
        "0",
        "00",
        "9007199254740992",
        "9223372036854775807",
        "9223372036854775808",
        &"9".repeat(99),
    ] {
        let bytes = text.as_bytes();
        assert_eq!(
            ttl(Some(bytes)),
            Err(BadRequest::TtlOutOfRange(bytes)),
            "{text:?}"
        );
    }
}

#[test]
fn arguments_are_checked_from_left_to_right() {
    let none: [&[u8]; 0] = [];
    assert_eq!(acquire(args(&none)), Err(BadRequest::WrongCount));
    assert_eq!(
        acquire(args(&[b"", b"x", b"y"])),
        Err(BadRequest::OwnerEmpty)
    );
    assert_eq!(
        acquire(args(&[b"o", b"x", b"y"])),
        Err(BadRequest::TtlNotANumber(b"x"))
    );
    assert_eq!(
        acquire(args(&[b"o", b"1", b"y"])),
        Err(BadRequest::OptionUnknown(b"y"))
    );
    assert_eq!(
        acquire(args(&[b"o", b"1", b"WAIT", b"x", b"LIMIT", b"y"])),
        Err(BadRequest::TimeoutNotANumber(b"x"))
    );
    assert_eq!(
        renew(args(&[b"o", b"1", b"y"])),
        Err(BadRequest::WrongCount)
    );
    assert_eq!(release(args(&[b"o", b"y"])), Err(BadRequest::WrongCount));
}

#[test]
fn options_come_in_any_order_and_any_case() {
    let limit_and_wait = |options: &[&[u8]]| {
        let given = [&[&b"o"[..], b"1"], options].concat();
        let request = acquire(args(&given)).unwrap();
        let wait_ms = request.wait.map_or(0, Wait::ms);
        (request.lease.limit.number(), wait_ms)
    };
    assert_eq!(limit_and_wait(&[]), (1, 0));
    assert_eq!(limit_and_wait(&[b"limit", b"01"]), (1, 0));
    assert_eq!(limit_and_wait(&[b"SHARED"]), (1_000, 0));
    assert_eq!(limit_and_wait(&[b"LIMIT", b"1000"]), (1_000, 0));
    assert_eq!(limit_and_wait(&[b"wait", b"5", b"Limit", b"2"]), (2, 5));
    assert_eq!(limit_and_wait(&[b"Shared", b"WAIT", b"5"]), (1_000, 5));
}

#[test]
fn each_option_is_given_once_and_a_limit_is_1_to_1000_in_digits() {
    use BadRequest::*;
    for (options, bad) in [
        (&[&b"limit"[..]][..], LimitWithoutNumber(b"limit")),
        (&[b"LIMIT", b"x"], LimitNotANumber(b"x")),
        (&[b"LIMIT", b""], LimitNotANumber(b"")),
        (&[b"LIMIT", b"+1"], LimitNotANumber(b"+1")),
        (&[b"LIMIT", b"WAIT"], LimitNotANumber(b"WAIT")),
        (&[b"LIMIT", b"0"], LimitOutOfRange(b"0")),
        (&[b"LIMIT", b"1001"], LimitOutOfRange(b"1001")),
        (&[b"LIMIT", b"65537"], LimitOutOfRange(b"65537")),
        (
            &[b"LIMIT", b"99999999999999999999"],
            LimitOutOfRange(b"99999999999999999999"),
        ),
        (
            &[b"LIMIT", b"2", b"limit", b"x"],
            OptionTwice("LIMIT", b"limit"),
        ),
        (&[b"SHARED", b"Shared"], OptionTwice("SHARED", b"Shared")),
        (&[b"WAIT", b"1", b"wait"], OptionTwice("WAIT", b"wait")),
        (&[b"LIMIT", b"2", b"shared"], LimitAndShared(b"shared")),
        (&[b"shared", b"LIMIT", b"2"], LimitAndShared(b"LIMIT")),
        (&[b"SHARED", b"NX"], OptionUnknown(b"NX")),
    ] {
        let given = [&[&b"o"[..], b"1"], options].concat();
        assert_eq!(acquire(args(&given)), Err(bad), "{bad:?}");
    }
}

proptest! {
    #[test]
    fn no_arguments_can_break_the_parser(
        given in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..520), 0..6),
    ) {
        let given: Vec<&[u8]> = given.iter().map(Vec::as_slice).collect();
        if let Ok(request) = acquire(args(&given)) {
            prop_assert_eq!(request.lease.owner.bytes(), given[0]);
            prop_assert!((1..=MAX_INTEGER).contains(&request.lease.ttl.ms()));
        }
        let _ = renew(args(&given));
        let _ = release(args(&given));
    }
}
