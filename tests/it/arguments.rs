//! Every argument rule and every byte of its error.

use testkit::*;

const MAX: i64 = 9_007_199_254_740_991;

#[test]
fn an_owner_is_1_to_512_bytes() {
    let server = Server::start();
    let mut redis = server.connect();
    let empty = "BADOWNER owner is empty, give 1 to 512 bytes, got ''";
    let too_long = "BADOWNER owner is longer than 512 bytes, give 1 to 512 bytes, \
                    got 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...'";

    for (owner, refusal) in [
        ("", empty),
        (&"a".repeat(513), too_long),
        (&"a".repeat(70_000), too_long),
    ] {
        for reply in [
            ask!(redis, "LOCK.ACQUIRE", "k", owner, 1000),
            ask!(redis, "LOCK.RENEW", "k", owner, 1000),
            ask!(redis, "LOCK.RELEASE", "k", owner),
        ] {
            assert_eq!(error(reply), refusal);
        }
    }
    assert_eq!(ask!(redis, "EXISTS", "k"), NO);

    for length in [1, 511, 512] {
        let owner = "a".repeat(length);
        fence(ask!(redis, "LOCK.ACQUIRE", "k", &owner, 100_000));
        assert_eq!(ask!(redis, "LOCK.RENEW", "k", &owner, 100_000), YES);
        assert_eq!(ask!(redis, "LOCK.RELEASE", "k", &owner), YES);
    }
}

#[test]
fn owners_and_keys_are_any_bytes() {
    let server = Server::start();
    let mut redis = server.connect();
    let every_byte: Vec<u8> = (0..=255).collect();
    let longest = [b'\0', 0xff].repeat(256);
    let names: [&[u8]; 14] = [
        b"\0",
        b"\0\0\0",
        b"before\0after",
        b"\xff",
        b"\xc3\x28 is no utf-8",
        b"\n",
        b"two\r\nlines",
        b" ",
        b" spaces around ",
        b":",
        b"0000000000000001:nested",
        b"12345",
        &every_byte,
        &longest,
    ];
    for name in names {
        // The same bytes as key and as owner, beside a neighbour that differs in the last byte.
        let mut neighbour = name.to_vec();
        *neighbour.last_mut().unwrap() ^= 1;

        let fence = fence(ask!(redis, "LOCK.ACQUIRE", name, name, 100_000));
        assert_eq!(ask!(redis, "GET", name), text(lock_value(fence, name)));
        assert_eq!(ask!(redis, "LOCK.ACQUIRE", name, &neighbour, 100_000), NULL);
        assert_eq!(ask!(redis, "LOCK.RENEW", name, &neighbour, 100_000), NO);
        assert_eq!(ask!(redis, "LOCK.RELEASE", name, &neighbour), NO);
        assert_eq!(ask!(redis, "LOCK.RELEASE", &neighbour, name), NULL);
        assert_eq!(ask!(redis, "LOCK.RENEW", name, name, 100_000), YES);
        assert_eq!(ask!(redis, "LOCK.RELEASE", name, name), YES);
    }
}

#[test]
fn a_key_may_be_empty() {
    let server = Server::start();
    let mut redis = server.connect();
    fence(ask!(redis, "LOCK.ACQUIRE", "", "alice", 100_000));
    assert_eq!(ask!(redis, "LOCK.RELEASE", "", "alice"), YES);
}

/// What is no whole number, and how an error shows it.
const NOT_DIGITS: [(&[u8], &str); 18] = [
    (b"", ""),
    (b"abc", "abc"),
    (b"-1", "-1"),
    (b"+5", "+5"),
    (b" 5", " 5"),
    (b"5 ", "5 "),
    (b"5.0", "5.0"),
    (b"1e3", "1e3"),
    (b"0x10", "0x10"),
    (b"1_000", "1_000"),
    (b"10ms", "10ms"),
    (b"5\0", r"5\x00"),
    (b"5\r\n", r"5\r\n"),
    (b"'\"\\", r#"\'\"\\"#),
    (b"\xff", r"\xff"),
    // Five in Arabic, and in full width: digits in Unicode, but not in a protocol.
    ("\u{665}".as_bytes(), r"\xd9\xa5"),
    ("\u{ff15}".as_bytes(), r"\xef\xbc\x95"),
    (b"9223372036854775808x", "9223372036854775808x"),
];

/// Whole numbers above 2^53 − 1, with those around 2^63, 2^64 and 2^128, and how an error shows them.
const TOO_LARGE: [(&str, &str); 8] = [
    ("9007199254740992", "9007199254740992"),
    ("9223372036854775807", "9223372036854775807"),
    ("9223372036854775808", "9223372036854775808"),
    ("18446744073709551615", "18446744073709551615"),
    ("18446744073709551616", "18446744073709551616"),
    ("18446744073709551617", "18446744073709551617"),
    (
        "340282366920938463463374607431768211457",
        "34028236692093846346337460743176...",
    ),
    (
        "00000000000000000000000000000000009007199254740992",
        "00000000000000000000000000000000...",
    ),
];

#[test]
fn a_ttl_is_digits_and_nothing_else() {
    let server = Server::start();
    let mut redis = server.connect();
    for (ttl, shown) in NOT_DIGITS {
        let refusal = format!(
            "BADTTL ttl is not a whole number of milliseconds, \
             give 1 to 9007199254740991 in digits, got '{shown}'"
        );
        assert_eq!(
            error(ask!(redis, "LOCK.ACQUIRE", "k", "alice", ttl)),
            refusal
        );
        assert_eq!(error(ask!(redis, "LOCK.RENEW", "k", "alice", ttl)), refusal);
    }
    assert_eq!(ask!(redis, "EXISTS", "k"), NO);
}

#[test]
fn a_ttl_is_1_to_9007199254740991() {
    let server = Server::start();
    let mut redis = server.connect();
    for (ttl, shown) in [("0", "0"), ("000", "000")].into_iter().chain(TOO_LARGE) {
        let refusal = format!(
            "BADTTL ttl is out of range, give 1 to 9007199254740991 milliseconds, got '{shown}'"
        );
        assert_eq!(
            error(ask!(redis, "LOCK.ACQUIRE", "k", "alice", ttl)),
            refusal
        );
        assert_eq!(error(ask!(redis, "LOCK.RENEW", "k", "alice", ttl)), refusal);
    }
    assert_eq!(ask!(redis, "EXISTS", "k"), NO);

    let a_hundred_zeros = "0".repeat(100);
    let granted = [
        ("1000000", 1_000_000),
        ("0001000000", 1_000_000),
        (&format!("{a_hundred_zeros}1000000"), 1_000_000),
        ("9007199254740990", MAX - 1),
        ("9007199254740991", MAX),
    ];
    for (ttl, ms) in granted {
        let lease = ms - 100_000..=ms;
        fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", ttl));
        assert!(lease.contains(&number(ask!(redis, "PTTL", "k"))), "{ttl}");
        assert_eq!(ask!(redis, "LOCK.RENEW", "k", "alice", 1_000_000), YES);
        assert_eq!(ask!(redis, "LOCK.RENEW", "k", "alice", ttl), YES);
        assert!(lease.contains(&number(ask!(redis, "PTTL", "k"))), "{ttl}");
        assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "alice"), YES);
    }

    // The smallest is over in a moment, so only the answer can be looked at.
    fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", 1));
    eventually("a ttl of 1 ms ends", || ask!(redis, "EXISTS", "k") == NO);
    fence(ask!(
        redis,
        "LOCK.ACQUIRE",
        "k",
        "alice",
        "0000000000000000000000000000000001"
    ));
}

#[test]
fn an_argument_in_an_error_is_cut_after_32_bytes_and_escaped() {
    let server = Server::start();
    let mut redis = server.connect();
    let shown = |error: String| error.rsplit_once(", got ").unwrap().1.to_owned();

    let ttl = "x".repeat(32);
    assert_eq!(
        shown(error(ask!(redis, "LOCK.RENEW", "k", "alice", &ttl))),
        format!("'{ttl}'")
    );
    assert_eq!(
        shown(error(ask!(
            redis,
            "LOCK.RENEW",
            "k",
            "alice",
            format!("{ttl}x")
        ))),
        format!("'{ttl}...'")
    );
    assert_eq!(
        shown(error(ask!(redis, "LOCK.RELEASE", "k", b"\xff".repeat(513)))),
        format!("'{}...'", r"\xff".repeat(32))
    );
}

#[test]
fn an_option_that_is_not_known_is_refused() {
    let server = Server::start();
    let mut redis = server.connect();
    let refused: [(&[u8], &str); 6] = [
        (b"foo", "foo"),
        (b"", ""),
        (b"NX", "NX"),
        (b"wait\0", r"wait\x00"),
        (b"WAI", "WAI"),
        (
            b"a very long option, longer than 32 bytes",
            "a very long option, longer than ...",
        ),
    ];
    for (option, shown) in refused {
        let refusal = format!(
            "BADOPTION option is unknown, give WAIT timeout-ms, LIMIT n, SHARED or nothing, \
             got '{shown}'"
        );
        assert_eq!(
            error(ask!(redis, "LOCK.ACQUIRE", "k", "alice", 1000, option)),
            refusal
        );
        assert_eq!(
            error(ask!(
                redis,
                "LOCK.ACQUIRE",
                "k",
                "alice",
                1000,
                option,
                "10"
            )),
            refusal
        );
    }
    assert_eq!(ask!(redis, "EXISTS", "k"), NO);
}

#[test]
fn a_wait_is_written_in_any_case_and_once_and_has_a_timeout() {
    let server = Server::start();
    let mut redis = server.connect();
    let twice = |shown| format!("BADOPTION WAIT is given twice, give it once, got '{shown}'");
    let alone =
        |shown| format!("BADOPTION WAIT has no timeout, give WAIT timeout-ms, got '{shown}'");
    for wait in ["WAIT", "wait", "Wait", "wAIT"] {
        for (refusal, options) in [
            (twice(wait), &["WAIT", "10", wait, "10"][..]),
            (twice(wait), &["WAIT", "10", wait]),
            (alone(wait), &[wait]),
        ] {
            let reply = ask!(redis, "LOCK.ACQUIRE", "k", "alice", 100_000, options);
            assert_eq!(error(reply), refusal);
        }
        assert_eq!(ask!(redis, "EXISTS", "k"), NO);

        fence(ask!(redis, "LOCK.ACQUIRE", "k", "alice", 100_000, wait, 10));
        assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "alice"), YES);
    }
}

#[test]
fn a_timeout_is_0_to_9007199254740991_in_digits() {
    let server = Server::start();
    let mut redis = server.connect();
    let not_digits = NOT_DIGITS.map(|(timeout, shown)| {
        let refusal = format!(
            "BADTIMEOUT timeout is not a whole number of milliseconds, \
             give 0 to 9007199254740991 in digits, got '{shown}'"
        );
        (timeout, refusal)
    });
    let too_large = TOO_LARGE.map(|(timeout, shown)| {
        let refusal = format!(
            "BADTIMEOUT timeout is out of range, give 0 to 9007199254740991 milliseconds, got '{shown}'"
        );
        (timeout.as_bytes(), refusal)
    });
    for (timeout, refusal) in not_digits.into_iter().chain(too_large) {
        let reply = ask!(redis, "LOCK.ACQUIRE", "k", "alice", 1000, "WAIT", timeout);
        assert_eq!(error(reply), refusal);
    }
    assert_eq!(ask!(redis, "EXISTS", "k"), NO);

    for timeout in [
        "0",
        "000",
        "1",
        "0001",
        "9007199254740990",
        "9007199254740991",
    ] {
        fence(ask!(
            redis,
            "LOCK.ACQUIRE",
            "k",
            "alice",
            100_000,
            "WAIT",
            timeout
        ));
        assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "alice"), YES);
    }
}

#[test]
fn the_first_wrong_argument_from_the_left_is_named() {
    let server = Server::start();
    let mut redis = server.connect();
    let code = |reply| error(reply).split(' ').next().unwrap().to_owned();

    assert_eq!(
        code(ask!(redis, "LOCK.ACQUIRE", "k", "", "x", "foo")),
        "BADOWNER"
    );
    assert_eq!(
        code(ask!(redis, "LOCK.ACQUIRE", "k", "alice", "x", "foo")),
        "BADTTL"
    );
    assert_eq!(
        code(ask!(redis, "LOCK.ACQUIRE", "k", "alice", "1", "foo")),
        "BADOPTION"
    );
    let reply = ask!(redis, "LOCK.ACQUIRE", "k", "alice", "1", "WAIT", "x", "foo");
    assert_eq!(code(reply), "BADTIMEOUT");
    assert_eq!(code(ask!(redis, "LOCK.RENEW", "k", "", "x")), "BADOWNER");

    // And a wrong argument before what the key holds.
    ask!(redis, "RPUSH", "list", "x").unwrap();
    assert_eq!(
        code(ask!(redis, "LOCK.ACQUIRE", "list", "alice", "x")),
        "BADTTL"
    );
    assert_eq!(code(ask!(redis, "LOCK.RELEASE", "list", "")), "BADOWNER");
}

#[test]
fn a_wrong_number_of_arguments_is_the_error_of_redis() {
    let server = Server::start();
    let mut redis = server.connect();
    let refusal = |name: &str| format!("ERR wrong number of arguments for '{name}' command");

    for (name, counts) in [
        ("lock.acquire", &[0, 1, 2][..]),
        ("lock.renew", &[0, 1, 2, 4]),
        ("lock.release", &[0, 1, 3]),
        ("lock.info", &[0, 2]),
    ] {
        for &count in counts {
            let args = vec!["1"; count];
            assert_eq!(
                error(ask!(redis, name, args)),
                refusal(name),
                "{count} arguments"
            );
        }
    }
    assert_eq!(ask!(redis, "DBSIZE"), NO);
}

#[test]
fn each_kind_of_mistake_is_counted_under_its_own_code_word() {
    let server = Server::start();
    let mut redis = server.connect();
    error(ask!(redis, "LOCK.ACQUIRE", "k", "", 1));
    error(ask!(redis, "LOCK.ACQUIRE", "k", "alice", 0));
    error(ask!(redis, "LOCK.ACQUIRE", "k", "alice", "x"));
    error(ask!(redis, "LOCK.ACQUIRE", "k", "alice", 1, "foo"));

    let count = |redis: &mut _, code| info::<String>(redis, "errorstats", code);
    assert_eq!(count(&mut redis, "errorstat_BADOWNER"), "count=1");
    assert_eq!(count(&mut redis, "errorstat_BADTTL"), "count=2");
    assert_eq!(count(&mut redis, "errorstat_BADOPTION"), "count=1");
}
