use super::*;
use proptest::prelude::*;

fn message(bad: BadRequest) -> String {
    match bad.into() {
        Reply::Error(message) => message,
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_error_says_what_was_wrong_what_would_be_right_and_what_was_given() {
    assert_eq!(
        message(BadRequest::TtlOutOfRange(b"0")),
        "BADTTL ttl is out of range, give 1 to 9007199254740991 milliseconds, got '0'"
    );
    assert_eq!(
        message(BadRequest::OwnerTooLong(&[b'a'; 513])),
        format!(
            "BADOWNER owner is longer than 512 bytes, give 1 to 512 bytes, got '{}...'",
            "a".repeat(32)
        )
    );
}

proptest! {
    #[test]
    fn an_error_is_one_printable_line_whatever_was_given(
        got in prop::collection::vec(any::<u8>(), 0..600),
    ) {
        for bad in [
            BadRequest::OwnerTooLong(&got),
            BadRequest::TtlNotANumber(&got),
            BadRequest::TtlOutOfRange(&got),
            BadRequest::OptionUnknown(&got),
            BadRequest::LimitNotANumber(&got),
            BadRequest::LimitOutOfRange(&got),
        ] {
            let message = message(bad);
            prop_assert!(message.bytes().all(|byte| (b' '..=b'~').contains(&byte)));
            prop_assert!(message.len() < 300);
        }
    }
}
