//! Each situation in the table of docs/commands/lock.acquire.md, and what RENEW, RELEASE and INFO do where
//! several hold a key.

use redis::{Connection, from_redis_value};
use testkit::waiting::*;
use testkit::*;

/// When the lease of one of several holders ends.
fn ends_at(redis: &mut Connection, key: &str, owner: &str) -> i64 {
    let value: String = from_redis_value(ask!(redis, "GET", key).unwrap()).unwrap();
    let name = format!(":{:03}:{owner}", owner.len());
    let at = value.find(&name).expect("a record of this owner");
    // Before it: end, limit, weight.
    value[at - 26..at - 10].parse().unwrap()
}

#[test]
fn a_free_lock_is_granted_whatever_the_limit() {
    let server = Server::start();
    let mut redis = server.connect();
    for options in ["", " LIMIT 1", " LIMIT 2", " LIMIT 1000", " SHARED"] {
        let fence = granted(&mut redis, &format!("LOCK.ACQUIRE k ann {LONG}{options}"));
        assert!(fence > 0);
        assert_eq!(run(&mut redis, "LOCK.RELEASE k ann"), YES);
        assert_eq!(run(&mut redis, "EXISTS k"), NO);
    }
}

#[test]
fn limit_1_is_the_same_as_no_limit() {
    let server = Server::start();
    let mut redis = server.connect();
    let fence = granted(&mut redis, &format!("LOCK.ACQUIRE k ann {LONG} LIMIT 1"));
    assert_eq!(run(&mut redis, "GET k"), text(lock_value(fence, "ann")));
    let again = granted(&mut redis, &format!("LOCK.ACQUIRE k ann {LONG}"));
    assert_eq!(again, fence);
}

#[test]
fn who_is_admitted_joins_with_a_fence_above_all_before() {
    let server = Server::start();
    let mut redis = server.connect();
    let fences = ["ann", "bea", "cyd"].map(|owner| {
        granted(
            &mut redis,
            &format!("LOCK.ACQUIRE k {owner} {LONG} LIMIT 3"),
        )
    });
    assert!(fences.is_sorted_by(|one, next| one < next), "{fences:?}");
    assert_eq!(holders(&mut redis, "k"), ["ann", "bea", "cyd"]);
    // Full, whatever the fourth would allow.
    for options in ["", " LIMIT 2", " LIMIT 3", " LIMIT 4", " SHARED"] {
        let fourth = format!("LOCK.ACQUIRE k dan {LONG}{options}");
        assert_eq!(run(&mut redis, &fourth), NULL);
    }
    assert_eq!(holders(&mut redis, "k"), ["ann", "bea", "cyd"]);
}

#[test]
fn the_strictest_holder_counts() {
    let server = Server::start();
    let mut redis = server.connect();
    granted(&mut redis, &format!("LOCK.ACQUIRE k strict {LONG} LIMIT 2"));
    granted(&mut redis, &format!("LOCK.ACQUIRE k reader {LONG} SHARED"));
    let third = format!("LOCK.ACQUIRE k third {LONG} SHARED");
    assert_eq!(run(&mut redis, &third), NULL);
    assert_eq!(run(&mut redis, "LOCK.RELEASE k strict"), YES);
    granted(&mut redis, &third);
    // And whoever comes must bear those who are there.
    let strict = format!("LOCK.ACQUIRE k strict {LONG} LIMIT 2");
    assert_eq!(run(&mut redis, &strict), NULL);
    granted(&mut redis, &format!("LOCK.ACQUIRE k strict {LONG} LIMIT 3"));
}

#[test]
fn readers_and_a_writer_keep_each_other_out() {
    let server = Server::start();
    let mut redis = server.connect();
    let (read, write) = (
        format!("LOCK.ACQUIRE k reader {LONG} SHARED"),
        format!("LOCK.ACQUIRE k writer {LONG}"),
    );
    granted(&mut redis, &read);
    assert_eq!(run(&mut redis, &write), NULL);
    assert_eq!(run(&mut redis, "LOCK.RELEASE k reader"), YES);
    granted(&mut redis, &write);
    assert_eq!(run(&mut redis, &read), NULL);
    assert_eq!(run(&mut redis, "LOCK.RELEASE k writer"), YES);
    // As a lock that is taken by hand does with both.
    assert_eq!(run(&mut redis, "SET k token NX PX 60000"), OK);
    assert_eq!(run(&mut redis, &read), NULL);
    assert_eq!(run(&mut redis, "DEL k"), YES);
    granted(&mut redis, &read);
    assert_eq!(run(&mut redis, "SET k token NX PX 60000"), NULL);
}

#[test]
fn asked_again_with_the_same_limit_the_fence_stays_and_the_lease_is_no_shorter() {
    let server = Server::start();
    let mut redis = server.connect();
    let fence = granted(&mut redis, "LOCK.ACQUIRE k ann 100000 LIMIT 2");
    granted(&mut redis, "LOCK.ACQUIRE k bea 500000 LIMIT 2");
    let before = ["ann", "bea"].map(|owner| ends_at(&mut redis, "k", owner));

    let shorter = granted(&mut redis, "LOCK.ACQUIRE k ann 50000 LIMIT 2");
    assert_eq!(shorter, fence);
    assert_eq!(ends_at(&mut redis, "k", "ann"), before[0]);

    // Also when the list is full, and others wait.
    let _waiter = join_by(&server, &format!("LOCK.ACQUIRE k cyd {LONG} WAIT {LONG}"));
    let longer = granted(&mut redis, "LOCK.ACQUIRE k ann 900000 LIMIT 2 WAIT 1000");
    assert_eq!(longer, fence);
    assert!(ends_at(&mut redis, "k", "ann") >= before[0] + 800_000);
    assert_eq!(ends_at(&mut redis, "k", "bea"), before[1]);
    let key_ends_at = number(run(&mut redis, "PEXPIRETIME k"));
    assert_eq!(key_ends_at, ends_at(&mut redis, "k", "ann"));
}

#[test]
fn asked_again_the_lease_lasts_even_if_somebody_has_cut_the_key_short() {
    let server = Server::start();
    let mut redis = server.connect();
    let fence = granted(&mut redis, "LOCK.ACQUIRE k ann 500000 LIMIT 2");
    assert_eq!(run(&mut redis, "PEXPIRE k 10000"), YES);
    let again = granted(&mut redis, "LOCK.ACQUIRE k ann 100000 LIMIT 2");
    assert_eq!(again, fence);
    assert!(number(run(&mut redis, "PTTL k")) > 90_000);
}

#[test]
fn asked_again_the_key_ends_with_its_leases_even_if_somebody_has_persisted_it() {
    let server = Server::start();
    let mut redis = server.connect();
    let fence = granted(&mut redis, "LOCK.ACQUIRE k ann 500000 LIMIT 2");
    let end = ends_at(&mut redis, "k", "ann");
    assert_eq!(run(&mut redis, "PERSIST k"), YES);
    let again = granted(&mut redis, "LOCK.ACQUIRE k ann 1 LIMIT 2");
    assert_eq!(again, fence);
    assert_eq!(number(run(&mut redis, "PEXPIRETIME k")), end);
}

#[test]
fn with_another_limit_that_the_others_admit_it_is_a_new_grant_in_place_of_the_old() {
    let server = Server::start();
    let mut redis = server.connect();
    let first = granted(&mut redis, "LOCK.ACQUIRE k ann 500000");
    // Downgrade: no shorter lease.
    let shared = granted(&mut redis, "LOCK.ACQUIRE k ann 1000 SHARED");
    assert!(shared > first);
    assert!(number(run(&mut redis, "PTTL k")) > 400_000);
    assert_eq!(holders(&mut redis, "k"), ["ann"]);
    let other = granted(&mut redis, "LOCK.ACQUIRE k bea 1000 SHARED");
    assert!(other > shared);
    // Another limit beside another holder.
    let limited = granted(&mut redis, "LOCK.ACQUIRE k ann 1000 LIMIT 2");
    assert!(limited > other);
    assert_eq!(holders(&mut redis, "k"), ["bea", "ann"]);
    assert!(number(run(&mut redis, "PTTL k")) > 400_000);
    // Upgrade.
    assert_eq!(run(&mut redis, "LOCK.RELEASE k bea"), YES);
    let alone = granted(&mut redis, "LOCK.ACQUIRE k ann 1000");
    assert!(alone > limited);
    assert_eq!(run(&mut redis, "GET k"), text(lock_value(alone, "ann")));
    assert!(number(run(&mut redis, "PTTL k")) > 400_000);
    // What was taken by hand becomes ours with whatever limit.
    assert_eq!(run(&mut redis, "SET k token PX 500000"), OK);
    granted(&mut redis, "LOCK.ACQUIRE k token 1000 LIMIT 7");
    assert_eq!(holders(&mut redis, "k"), ["token"]);
    assert!(number(run(&mut redis, "PTTL k")) > 400_000);
}

#[test]
fn another_limit_is_granted_also_when_others_wait_and_serves_them() {
    let server = Server::start();
    let mut redis = server.connect();
    granted(&mut redis, &format!("LOCK.ACQUIRE k writer {LONG}"));
    let mut readers = ["a", "b"].map(|owner| {
        join_by(
            &server,
            &format!("LOCK.ACQUIRE k {owner} {LONG} WAIT {LONG} SHARED"),
        )
    });
    let downgraded = granted(&mut redis, &format!("LOCK.ACQUIRE k writer {LONG} SHARED"));
    // In the same step.
    assert_eq!(holders(&mut redis, "k"), ["writer", "a", "b"]);
    for reader in &mut readers {
        assert!(fence(reader.reply()) > downgraded);
    }
}

#[test]
fn another_limit_that_the_others_do_not_admit_is_refused_at_once_also_with_wait() {
    let server = Server::start();
    let mut redis = server.connect();
    for owner in ["ann", "bea"] {
        granted(&mut redis, &format!("LOCK.ACQUIRE k {owner} {LONG} SHARED"));
    }
    let value = run(&mut redis, "GET k");
    for command in [
        format!("LOCK.ACQUIRE k ann {LONG}"),
        format!("LOCK.ACQUIRE k ann {LONG} LIMIT 1 WAIT {LONG}"),
        format!("LOCK.ACQUIRE k bea {LONG} WAIT {LONG}"),
    ] {
        assert_eq!(run(&mut redis, &command), NULL);
    }
    assert_eq!(run(&mut redis, "GET k"), value);
    assert_eq!(gauge(&mut redis, "waiters"), 0);
    assert_eq!(gauge(&mut redis, "refusals_total"), 3);
}

#[test]
fn an_owner_that_waits_keeps_its_turn_and_takes_over_everything_else() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut earlier = join_by(&server, &format!("LOCK.ACQUIRE k ann {LONG} WAIT {LONG}"));
    let mut behind = join_by(
        &server,
        &format!("LOCK.ACQUIRE k bea {LONG} WAIT {LONG} LIMIT 2"),
    );
    // Without WAIT nothing changes, whatever the limit.
    let one_try = format!("LOCK.ACQUIRE k ann {LONG} LIMIT 2");
    assert_eq!(run(&mut redis, &one_try), NULL);
    assert_eq!(queue(&mut redis, "k"), ["ann", "bea"]);

    let mut again = Waiter::of(&server);
    again.send(&words(&format!(
        "LOCK.ACQUIRE k ann {LONG} WAIT {LONG} LIMIT 2"
    )));
    assert_eq!(earlier.reply(), NULL);
    assert_eq!(queue(&mut redis, "k"), ["ann", "bea"]);

    assert_eq!(run(&mut redis, "LOCK.RELEASE k holder"), YES);
    assert!(fence(again.reply()) < fence(behind.reply()));
    assert_eq!(holders(&mut redis, "k"), ["ann", "bea"]);
}

#[test]
fn where_nobody_can_wait_it_is_one_try() {
    let server = Server::start();
    let mut redis = server.connect();
    granted(&mut redis, &format!("LOCK.ACQUIRE k ann {LONG} SHARED"));
    let script = format!(
        "return redis.call('LOCK.ACQUIRE', 'k', ARGV[1], {LONG}, 'WAIT', {LONG}, unpack(ARGV, 2))"
    );
    assert_eq!(ask!(redis, "EVAL", &script, 0, "writer"), NULL);
    fence(ask!(redis, "EVAL", &script, 0, "bea", "SHARED"));
    assert_eq!(holders(&mut redis, "k"), ["ann", "bea"]);
}

#[test]
fn a_renewal_is_for_one_holder_and_tells_the_others_from_nobody() {
    let server = Server::start();
    let mut redis = server.connect();
    granted(&mut redis, "LOCK.ACQUIRE k ann 100000 LIMIT 2");
    granted(&mut redis, "LOCK.ACQUIRE k bea 200000 LIMIT 2");
    let bea = ends_at(&mut redis, "k", "bea");

    assert_eq!(run(&mut redis, "LOCK.RENEW k ann 500000"), YES);
    let ann = ends_at(&mut redis, "k", "ann");
    assert!(ann > bea + 200_000);
    assert_eq!(ends_at(&mut redis, "k", "bea"), bea);
    assert_eq!(number(run(&mut redis, "PEXPIRETIME k")), ann);
    // It may shorten.
    assert_eq!(run(&mut redis, "LOCK.RENEW k ann 50000"), YES);
    assert!(ends_at(&mut redis, "k", "ann") < bea);
    assert_eq!(number(run(&mut redis, "PEXPIRETIME k")), bea);

    let value = run(&mut redis, "GET k");
    assert_eq!(run(&mut redis, "LOCK.RENEW k cyd 500000"), NO);
    let Ok(Value::BulkString(whole)) = &value else {
        panic!("{value:?}");
    };
    // The whole value is nobody's name.
    assert_eq!(ask!(redis, "LOCK.RENEW", "k", whole, 500_000), NO);
    assert_eq!(run(&mut redis, "GET k"), value);
    assert_eq!(run(&mut redis, "LOCK.RENEW missing ann 500000"), NULL);
    // A key that lost its end gets one again.
    assert_eq!(run(&mut redis, "PERSIST k"), YES);
    assert_eq!(run(&mut redis, "LOCK.RENEW k ann 50000"), YES);
    assert_eq!(number(run(&mut redis, "PEXPIRETIME k")), bea);
}

#[test]
fn a_release_is_for_one_holder_and_the_last_one_deletes_the_key() {
    let server = Server::start();
    let mut redis = server.connect();
    hold_by_two(&mut redis, "k", ["ann", "bea"]);
    let value = run(&mut redis, "GET k");
    assert_eq!(run(&mut redis, "LOCK.RELEASE k cyd"), NO);
    let Ok(Value::BulkString(whole)) = &value else {
        panic!("{value:?}");
    };
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", whole), NO);
    assert_eq!(run(&mut redis, "GET k"), value);
    assert_eq!(run(&mut redis, "LOCK.RELEASE k ann"), YES);
    assert_eq!(holders(&mut redis, "k"), ["bea"]);
    assert_eq!(run(&mut redis, "LOCK.RELEASE k ann"), NO);
    assert_eq!(run(&mut redis, "LOCK.RELEASE k bea"), YES);
    assert_eq!(run(&mut redis, "EXISTS k"), NO);
    assert_eq!(run(&mut redis, "LOCK.RELEASE k bea"), NULL);
}

#[test]
fn whose_lease_has_ended_holds_nothing_while_the_others_go_on() {
    let server = Server::start();
    let mut redis = server.connect();
    let ended = granted(&mut redis, "LOCK.ACQUIRE k short 30 LIMIT 2");
    granted(&mut redis, &format!("LOCK.ACQUIRE k long {LONG} LIMIT 2"));
    eventually("one lease has ended", || {
        holders(&mut redis, "k") == ["long"]
    });
    assert_eq!(run(&mut redis, "LOCK.RENEW k short 1000"), NO);
    assert_eq!(run(&mut redis, "LOCK.RELEASE k short"), NO);
    assert_eq!(run(&mut redis, "LOCK.RENEW k long 500000"), YES);
    // Its place is free, and it is a newcomer.
    let again = granted(&mut redis, "LOCK.ACQUIRE k short 500000 LIMIT 2");
    assert!(again > ended);
}

#[test]
fn at_maxmemory_a_holder_renews_and_releases_and_who_waits_is_served() {
    let server = Server::start();
    let mut redis = server.connect();
    hold_by_two(&mut redis, "k", ["ann", "bea"]);
    let mut waiter = join_by(
        &server,
        &format!("LOCK.ACQUIRE k cyd {LONG} WAIT {LONG} LIMIT 2"),
    );
    assert_eq!(run(&mut redis, "CONFIG SET maxmemory 1"), OK);
    let refused = run(&mut redis, &format!("LOCK.ACQUIRE k dan {LONG} LIMIT 2"));
    assert!(error(refused).starts_with("OOM "));
    assert_eq!(run(&mut redis, "LOCK.RENEW k ann 500000"), YES);
    assert_eq!(run(&mut redis, "LOCK.RELEASE k bea"), YES);
    fence(waiter.reply());
}

#[test]
fn a_key_of_another_type_is_refused() {
    let server = Server::start();
    let mut redis = server.connect();
    assert_eq!(run(&mut redis, "LPUSH k x"), YES);
    let shared = run(&mut redis, &format!("LOCK.ACQUIRE k ann {LONG} SHARED"));
    assert_eq!(error(shared), WRONGTYPE);
}

#[test]
fn lock_info_shows_each_of_several_holders() {
    let server = Server::start();
    let mut redis = server.connect();
    let fences = [
        granted(&mut redis, "LOCK.ACQUIRE k ann 100000 SHARED"),
        granted(&mut redis, "LOCK.ACQUIRE k bea 200000 LIMIT 2"),
    ];
    let _writer = join_by(
        &server,
        &format!("LOCK.ACQUIRE k writer {LONG} WAIT {LONG}"),
    );
    let _reader = join_by(
        &server,
        &format!("LOCK.ACQUIRE k reader {LONG} WAIT {LONG} SHARED"),
    );
    for (field, value) in [
        ("owner", Value::Nil),
        ("fence", Value::Nil),
        ("held-ms", Value::Nil),
        ("waiters", Value::Int(2)),
        ("limit", Value::Int(2)),
        ("holding", Value::Int(2)),
    ] {
        assert_eq!(lock_info(&mut redis, "k", field), value, "{field}");
    }
    let ttl_ms: i64 = from_redis_value(lock_info(&mut redis, "k", "ttl-ms")).unwrap();
    assert!((150_000..=200_000).contains(&ttl_ms), "{ttl_ms}");

    type HolderInfo = (
        String,
        String,
        String,
        i64,
        String,
        i64,
        String,
        i64,
        String,
        i64,
    );
    let listed: Vec<HolderInfo> = from_redis_value(lock_info(&mut redis, "k", "holders")).unwrap();
    for (n, (name, ttl, limit)) in [("ann", 100_000, 1_000), ("bea", 200_000, 2)]
        .into_iter()
        .enumerate()
    {
        let listed = &listed[n];
        let fields = [&*listed.0, &*listed.2, &*listed.4, &*listed.6, &*listed.8];
        assert_eq!(fields, ["owner", "fence", "held-ms", "ttl-ms", "limit"]);
        assert_eq!((&*listed.1, listed.3), (name, fences[n]));
        assert!((0..50_000).contains(&listed.5), "{listed:?}");
        assert!((ttl - 50_000..=ttl).contains(&listed.7), "{listed:?}");
        assert_eq!(listed.9, limit);
    }
    assert_eq!(listed.len(), 2);

    // Who waits shows its limit, if it has one.
    let queued: Vec<Vec<Value>> = from_redis_value(lock_info(&mut redis, "k", "queue")).unwrap();
    assert_eq!(queued[0].len(), 4);
    assert_eq!(queued[1].len(), 6);
    assert_eq!(Ok(queued[1][4].clone()), text("limit"));
    assert_eq!(queued[1][5], Value::Int(1_000));

    // In RESP3 each holder is a map.
    let Ok(Value::Map(fields)) = ask!(server.connect_resp3(), "LOCK.INFO", "k") else {
        panic!("LOCK.INFO is a map in RESP3");
    };
    assert_eq!(fields.len(), 9);
    let Value::Array(holders) = &fields[8].1 else {
        panic!("the holders are an array");
    };
    assert!(matches!(&holders[..], [Value::Map(first), Value::Map(_)] if first.len() == 5));
}

#[test]
fn lock_info_lists_the_first_hundred_holders_and_counts_all() {
    let server = Server::start();
    let mut redis = server.connect();
    for n in 0..120 {
        granted(&mut redis, &format!("LOCK.ACQUIRE k {n} {LONG} SHARED"));
    }
    let first_hundred: Vec<String> = (0..100).map(|n| n.to_string()).collect();
    assert_eq!(holders(&mut redis, "k"), first_hundred);
    assert_eq!(lock_info(&mut redis, "k", "holding"), Value::Int(120));
}

#[test]
fn a_thousand_share_and_no_more() {
    let server = Server::start();
    let mut redis = server.connect();
    let mut all = redis::pipe();
    for n in 0..1_000 {
        all.add_command(words(&format!("LOCK.ACQUIRE k {n} {LONG} SHARED")));
    }
    let mut fences: Vec<i64> = all.query(&mut redis).unwrap();
    assert_eq!(fences.len(), 1_000);
    assert!(fences.is_sorted());
    fences.dedup();
    assert_eq!(fences.len(), 1_000);
    let one_more = format!("LOCK.ACQUIRE k 1000 {LONG} SHARED");
    assert_eq!(run(&mut redis, &one_more), NULL);
    assert_eq!(run(&mut redis, "LOCK.RELEASE k 500"), YES);
    granted(&mut redis, &one_more);
    assert_eq!(lock_info(&mut redis, "k", "holding"), Value::Int(1_000));
}

#[test]
fn each_wrong_limit_is_an_error_with_its_own_sentence_and_changes_nothing() {
    let server = Server::start();
    let mut redis = server.connect();
    for (options, sentence) in [
        (
            "LIMIT x",
            "BADLIMIT limit is not a whole number, give 1 to 1000 in digits, got 'x'",
        ),
        (
            "LIMIT +1",
            "BADLIMIT limit is not a whole number, give 1 to 1000 in digits, got '+1'",
        ),
        (
            "LIMIT 0",
            "BADLIMIT limit is out of range, give 1 to 1000, got '0'",
        ),
        (
            "LIMIT 1001",
            "BADLIMIT limit is out of range, give 1 to 1000, got '1001'",
        ),
        (
            "limit",
            "BADOPTION LIMIT has no number, give LIMIT n, got 'limit'",
        ),
        (
            "LIMIT 2 Limit 2",
            "BADOPTION LIMIT is given twice, give it once, got 'Limit'",
        ),
        (
            "SHARED Shared",
            "BADOPTION SHARED is given twice, give it once, got 'Shared'",
        ),
        (
            "WAIT 1 LIMIT 2 wait 1",
            "BADOPTION WAIT is given twice, give it once, got 'wait'",
        ),
        (
            "LIMIT 2 shared",
            "BADOPTION LIMIT and SHARED are both given, give one, got 'shared'",
        ),
        (
            "SHARED limit 2",
            "BADOPTION LIMIT and SHARED are both given, give one, got 'limit'",
        ),
        (
            "WEIGHT 2",
            "BADOPTION option is unknown, give WAIT timeout-ms, LIMIT n, SHARED or nothing, got 'WEIGHT'",
        ),
    ] {
        let refused = run(&mut redis, &format!("LOCK.ACQUIRE k ann 1000 {options}"));
        assert_eq!(error(refused), sentence);
    }
    assert_eq!(run(&mut redis, "EXISTS k"), NO);
}
