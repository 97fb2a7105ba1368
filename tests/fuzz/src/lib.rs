//! What the fuzzers share: the module's core as it is, and what every reply must be.

#[path = "../../../src/lock/mod.rs"]
pub mod lock;
#[path = "../../../src/queue/mod.rs"]
pub mod queue;
#[path = "../../../src/reply/mod.rs"]
pub mod reply;
#[path = "../../../src/request/mod.rs"]
pub mod request;
#[path = "../../../src/time.rs"]
pub mod time;

use reply::Reply;

/// The first bytes of an input, up to and without the first 0xfe, and the rest. A byte that the fuzzer
/// finds soon, and that no good argument needs.
pub fn cut(input: &[u8]) -> (&[u8], &[u8]) {
    match input.iter().position(|byte| *byte == 0xfe) {
        Some(at) => (&input[..at], &input[at + 1..]),
        None => (input, b""),
    }
}

/// Whatever was asked: an error is one short line of printable ASCII with a code word first.
pub fn assert_well_formed(reply: &Reply) {
    match reply {
        Reply::Integer(number) => assert!((0..1 << 53).contains(number)),
        Reply::Error(line) => {
            assert!(
                line.bytes().all(|byte| (b' '..=b'~').contains(&byte)),
                "{line:?}"
            );
            assert!(line.len() <= 300, "{line}");
            let (code, sentence) = line.split_once(' ').expect("a code word");
            assert!(code.bytes().all(|byte| byte.is_ascii_uppercase()), "{line}");
            assert!(!sentence.is_empty());
        }
        Reply::Null | Reply::WrongCount => {}
        Reply::Info(_) => panic!("not made by the core: {reply:?}"),
    }
}
