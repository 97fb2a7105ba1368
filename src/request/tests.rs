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
        renew(args(&[b"o", b"1", b"y"])),
        Err(BadRequest::WrongCount)
    );
    assert_eq!(release(args(&[b"o", b"y"])), Err(BadRequest::WrongCount));
}

proptest! {
    #[test]
    fn no_arguments_can_break_the_parser(
        given in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..520), 0..6),
    ) {
        let given: Vec<&[u8]> = given.iter().map(Vec::as_slice).collect();
        if let Ok(request) = acquire(args(&given)) {
            prop_assert_eq!(request.owner.bytes(), given[0]);
            prop_assert!((1..=MAX_INTEGER).contains(&request.ttl.ms()));
        }
        let _ = renew(args(&given));
        let _ = release(args(&given));
    }
}
