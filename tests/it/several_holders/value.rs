//! The list of those who hold a key together: how it is written, and what becomes of one that others have
//! made, damaged or kept alive.

use redis::{Connection, from_redis_value};
use testkit::stream::{Stream, command};
use testkit::waiting::*;
use testkit::*;

fn value(redis: &mut Connection) -> String {
    from_redis_value(ask!(redis, "GET", "k").unwrap()).unwrap()
}

fn key_ends_at(redis: &mut Connection) -> i64 {
    number(ask!(redis, "PEXPIRETIME", "k"))
}

fn record(fence: i64, end: i64, limit: i64, owner: &str) -> String {
    format!(
        "{fence:016}:{end:016}:{limit:04}:0001:{:03}:{owner}",
        owner.len()
    )
}

#[test]
fn every_effect_on_a_list_is_one_set_until_the_last_lease_ends_and_the_last_release_a_del() {
    let server = Server::start();
    let mut redis = server.connect();
    let mut stream = Stream::of(&server);
    let taken = |redis: &mut Connection, stream: &mut Stream, list: &[(i64, i64, i64, &str)]| {
        let records = list
            .iter()
            .map(|(fence, end, limit, owner)| record(*fence, *end, *limit, owner));
        let expected = format!("+{}", records.collect::<String>());
        let latest = list.iter().map(|(_, end, ..)| *end).max();
        assert_eq!(
            stream.take(),
            [command!("SET", "k", &expected, "PXAT", latest)]
        );
        assert_eq!(value(redis), expected);
        assert_eq!(Some(key_ends_at(redis)), latest);
    };
    let ann = granted(&mut redis, "LOCK.ACQUIRE k ann 200000 LIMIT 5");
    let ann_ends = key_ends_at(&mut redis);
    taken(&mut redis, &mut stream, &[(ann, ann_ends, 5, "ann")]);

    let bea = granted(&mut redis, "LOCK.ACQUIRE k bea 500000 SHARED");
    let bea_ends = key_ends_at(&mut redis);
    taken(
        &mut redis,
        &mut stream,
        &[(ann, ann_ends, 5, "ann"), (bea, bea_ends, 1_000, "bea")],
    );

    assert_eq!(run(&mut redis, "LOCK.RENEW k ann 900000"), YES);
    let ann_ends = key_ends_at(&mut redis);
    assert!(ann_ends > bea_ends);
    taken(
        &mut redis,
        &mut stream,
        &[(ann, ann_ends, 5, "ann"), (bea, bea_ends, 1_000, "bea")],
    );

    assert_eq!(run(&mut redis, "LOCK.RELEASE k ann"), YES);
    taken(&mut redis, &mut stream, &[(bea, bea_ends, 1_000, "bea")]);

    // Alone, and with no company any more.
    let alone = granted(&mut redis, "LOCK.ACQUIRE k bea 1000");
    let set = command!("SET", "k", lock_value(alone, "bea"), "PXAT", bea_ends);
    assert_eq!(stream.take(), [set]);
    // And back.
    let shared = granted(&mut redis, "LOCK.ACQUIRE k bea 1000 SHARED");
    taken(&mut redis, &mut stream, &[(shared, bea_ends, 1_000, "bea")]);
    assert_eq!(run(&mut redis, "LOCK.RELEASE k bea"), YES);
    assert_eq!(stream.take(), [command!("DEL", "k")]);
}

/// Neither is what is replicated of the first changed by the second, which writes to the same key.
#[test]
fn in_a_transaction_each_renewal_replicates_its_own_list() {
    let server = Server::start();
    let mut redis = server.connect();
    let ann = granted(&mut redis, "LOCK.ACQUIRE k ann 200000 LIMIT 5");
    let mut stream = Stream::of(&server);
    let renew = |ttl: i64| format!("LOCK.RENEW k ann {ttl}");

    for command in ["MULTI", &renew(500_000), &renew(900_000), "EXEC"] {
        run(&mut redis, command).unwrap();
    }

    let propagated = stream.take();
    let ends = propagated[1..3].iter().map(|set| {
        let end = String::from_utf8_lossy(&set.0[4]).parse().unwrap();
        let list = format!("+{}", record(ann, end, 5, "ann"));
        assert_eq!(*set, command!("SET", "k", list, "PXAT", end));
        end
    });
    assert!(ends.is_sorted_by(|first, second| first + 300_000 < *second));
}

#[test]
fn what_changes_nothing_replicates_nothing_and_leaves_the_key_alone() {
    let server = Server::start();
    let mut redis = server.connect();
    hold_by_two(&mut redis, "k", ["ann", "bea"]);
    let before = (value(&mut redis), key_ends_at(&mut redis));
    let mut watcher = server.connect();
    assert_eq!(ask!(watcher, "WATCH", "k"), OK);
    let mut stream = Stream::of(&server);
    for (command, expected) in [
        ("LOCK.ACQUIRE k cyd 1000 SHARED", NULL),
        ("LOCK.ACQUIRE k cyd 1000", NULL),
        ("LOCK.ACQUIRE k cyd 1000 LIMIT 2 WAIT 1", NULL),
        ("LOCK.ACQUIRE k ann 1000", NULL),
        ("LOCK.ACQUIRE k ann 1000 WAIT 1000 LIMIT 1", NULL),
        ("LOCK.RENEW k cyd 1000", NO),
        ("LOCK.RELEASE k cyd", NO),
    ] {
        assert_eq!(run(&mut redis, command), expected, "{command}");
    }
    granted(&mut redis, "LOCK.ACQUIRE k ann 1000 LIMIT 2");
    assert_eq!(stream.take(), []);
    assert_eq!((value(&mut redis), key_ends_at(&mut redis)), before);
    let transaction = redis::pipe().atomic().cmd("PING").clone();
    let kept: Option<(String,)> = transaction.query(&mut watcher).unwrap();
    assert!(kept.is_some(), "a refusal touched the key");
}

#[test]
fn whose_lease_has_ended_is_gone_with_the_next_write() {
    let server = Server::start();
    let mut redis = server.connect();
    granted(&mut redis, "LOCK.ACQUIRE k short 20 LIMIT 3");
    let stays = granted(&mut redis, "LOCK.ACQUIRE k stays 500000 LIMIT 3");
    eventually("one lease has ended", || {
        holders(&mut redis, "k") == ["stays"]
    });
    assert!(value(&mut redis).contains("short"));
    let stays_ends = key_ends_at(&mut redis);
    let new = granted(&mut redis, "LOCK.ACQUIRE k new 1000 LIMIT 3");
    let list = value(&mut redis);
    assert!(list.starts_with(&format!("+{}", record(stays, stays_ends, 3, "stays"))));
    assert!(!list.contains("short") && list.contains(&format!("{new:016}")));
}

#[test]
fn a_list_whose_leases_have_all_ended_is_nobodys_and_keeps_set_nx_out_until_the_next_grant() {
    let server = Server::start();
    let mut redis = server.connect();
    for kept in ["PERSIST k", "PEXPIRE k 100000"] {
        let before = granted(&mut redis, "LOCK.ACQUIRE k ann 300 LIMIT 2");
        assert_eq!(run(&mut redis, kept), YES);
        eventually("the lease has ended", || {
            ask!(redis, "LOCK.INFO", "k") == NULL
        });
        let mut stream = Stream::of(&server);
        assert_eq!(run(&mut redis, "LOCK.RENEW k ann 1000"), NULL);
        assert_eq!(run(&mut redis, "LOCK.RELEASE k ann"), NULL);
        assert_eq!(run(&mut redis, "SET k token NX"), NULL);
        assert_eq!(stream.take(), [], "{kept}");
        // Whoever comes, alone or not, replaces it.
        let after = granted(&mut redis, "LOCK.ACQUIRE k bea 100000");
        assert!(after > before);
        assert_eq!(run(&mut redis, "GET k"), text(lock_value(after, "bea")));
        assert!(number(run(&mut redis, "PTTL k")) > 0);
        assert_eq!(run(&mut redis, "LOCK.RELEASE k bea"), YES);
    }
}

#[test]
fn who_waits_is_served_when_the_leases_have_ended_though_the_key_lives_on() {
    let server = Server::start();
    let mut redis = server.connect();
    granted(&mut redis, "LOCK.ACQUIRE k ann 300 LIMIT 2");
    assert_eq!(run(&mut redis, "PERSIST k"), YES);
    let mut waiter = join(&server, "k", "writer");
    fence(waiter.reply());
    assert_eq!(owner(&mut redis, "k").as_deref(), Some("writer"));
    assert_eq!(gauge(&mut redis, "grants_by_expiry_total"), 1);
}

#[test]
fn a_damaged_list_is_a_lock_by_hand_that_keeps_everybody_out_until_it_ends() {
    let server = Server::start();
    let mut redis = server.connect();
    let damages: [&[&str]; 4] = [
        &["APPEND", "k", "x"],
        &["SETRANGE", "k", "1", "x"],
        &["SETRANGE", "k", "34", "0001"],
        &["SETRANGE", "k", "44", "9"],
    ];
    for damage in damages {
        granted(&mut redis, "LOCK.ACQUIRE k ann 100000 SHARED");
        ask!(redis, damage).unwrap();
        for refused in [
            "LOCK.ACQUIRE k ann 1000 SHARED",
            "LOCK.ACQUIRE k bea 1000 SHARED",
            "LOCK.ACQUIRE k bea 1000",
        ] {
            assert_eq!(run(&mut redis, refused), NULL, "{damage:?}");
        }
        assert_eq!(run(&mut redis, "LOCK.RENEW k ann 1000"), NO);
        assert_eq!(run(&mut redis, "LOCK.RELEASE k ann"), NO);
        let whole = value(&mut redis);
        assert_eq!(owner(&mut redis, "k"), Some(whole));
        // Its ttl ends it, and who waits is served.
        let mut waiter = join(&server, "k", "next");
        assert_eq!(run(&mut redis, "PEXPIRE k 20"), YES);
        fence(waiter.reply());
        assert_eq!(run(&mut redis, "LOCK.RELEASE k next"), YES);
    }
}

#[test]
fn a_forged_list_gives_nobody_more_company_than_its_holders_allow() {
    let server = Server::start();
    let mut redis = server.connect();
    // More hold than the first allows: so nobody is admitted.
    let end = clock_us(&mut redis) / 1000 + LONG;
    let crowd = format!(
        "+{}{}{}",
        record(1, end, 2, "a"),
        record(2, end, 9, "b"),
        record(3, end, 9, "c")
    );
    assert_eq!(ask!(redis, "SET", "k", &crowd, "PX", 100_000), OK);
    assert_eq!(run(&mut redis, "LOCK.ACQUIRE k d 1000 SHARED"), NULL);
    assert_eq!(run(&mut redis, "LOCK.RELEASE k a"), YES);
    granted(&mut redis, "LOCK.ACQUIRE k d 1000 LIMIT 9");
    // An owner that is named twice leaves at once with all it held.
    let twice = format!("+{}{}", record(1, end, 9, "a"), record(2, end, 9, "a"));
    assert_eq!(ask!(redis, "SET", "k", &twice, "PX", 100_000), OK);
    assert_eq!(run(&mut redis, "LOCK.RELEASE k a"), YES);
    assert_eq!(run(&mut redis, "EXISTS k"), NO);
    // A lease in the far future ends with the key.
    let far = format!("+{}", record(1, 9_999_999_999_999_999, 2, "a"));
    assert_eq!(ask!(redis, "SET", "k", &far, "PX", 20), OK);
    eventually("the key has ended", || {
        ask!(redis, "LOCK.INFO", "k") == NULL
    });
}

#[test]
fn a_forged_fence_in_a_list_does_not_hide_a_real_one() {
    let server = Server::start();
    let mut redis = server.connect();
    let now = clock_us(&mut redis);
    let (ahead, end) = (now + 3_600_000_000, now / 1000 + LONG);
    let list = format!(
        "+{}{}",
        record((1 << 53) - 1, end, 9, "forged"),
        record(ahead, end, 9, "ahead")
    );
    assert_eq!(ask!(redis, "SET", "k", &list, "PX", LONG), OK);
    let next = granted(&mut redis, "LOCK.ACQUIRE k next 1000 LIMIT 9");
    assert!(ahead < next && next < ahead + 1_000_000, "{next}");
}

#[test]
fn a_fence_is_above_all_in_the_list_also_of_those_who_have_ended() {
    let server = Server::start();
    let mut redis = server.connect();
    let ahead = clock_us(&mut redis) + 3_600_000_000;
    let end = clock_us(&mut redis) / 1000 + LONG;
    let list = format!(
        "+{}{}{}",
        record(ahead, 1, 9, "ended"),
        record(1, end, 9, "living"),
        record(2, end, 3, "strict"),
    );
    assert_eq!(ask!(redis, "SET", "k", &list, "PX", LONG), OK);
    let next = granted(&mut redis, "LOCK.ACQUIRE k next 1000 LIMIT 9");
    assert_eq!(next, ahead + 1);
    // And so are those of several who are let in at once.
    let mut waiters = ["a", "b"].map(|owner| {
        join_by(
            &server,
            &format!("LOCK.ACQUIRE k {owner} {LONG} WAIT {LONG} SHARED"),
        )
    });
    let with_ended = format!("{list}{}", record(3, end, 9, "next"));
    assert_eq!(ask!(redis, "SET", "k", &with_ended, "PX", LONG), OK);
    assert_eq!(run(&mut redis, "LOCK.RELEASE k strict"), YES);
    let fences = waiters.each_mut().map(|waiter| fence(waiter.reply()));
    assert_eq!(fences, [ahead + 1, ahead + 2]);
}

#[test]
fn a_key_that_others_cut_short_ends_for_all_and_a_renewal_lengthens_it_again() {
    let server = Server::start();
    let mut redis = server.connect();
    for owner in ["ann", "bea"] {
        granted(
            &mut redis,
            &format!("LOCK.ACQUIRE k {owner} 500000 LIMIT 2"),
        );
    }
    assert_eq!(run(&mut redis, "PEXPIRE k 10000"), YES);
    assert_eq!(run(&mut redis, "LOCK.RENEW k ann 1000"), YES);
    assert!(number(run(&mut redis, "PTTL k")) > 400_000);
    let mut waiter = join_by(
        &server,
        &format!("LOCK.ACQUIRE k next {LONG} WAIT {LONG} LIMIT 2"),
    );
    assert_eq!(run(&mut redis, "PEXPIRE k 20"), YES);
    fence(waiter.reply());
}

#[test]
fn a_refusal_does_not_read_a_value_that_is_too_short_for_a_list() {
    let server = Server::start();
    let mut redis = server.connect();
    for length in [10, 44, 49] {
        let by_hand = "+".repeat(length);
        assert_eq!(ask!(redis, "SET", "k", &by_hand), OK);
        let before = ask!(redis, "OBJECT", "ENCODING", "k");
        assert_eq!(run(&mut redis, "LOCK.ACQUIRE k somebody 1000 SHARED"), NULL);
        assert_eq!(run(&mut redis, "LOCK.RENEW k somebody 1000"), NO);
        assert_eq!(run(&mut redis, "LOCK.RELEASE k somebody"), NO);
        assert_eq!(ask!(redis, "OBJECT", "ENCODING", "k"), before, "{length}");
    }
}
