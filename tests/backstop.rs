//! One lost wake-up does not lock a key for ever: whatever was missed is mended within a second.

use std::time::{Duration, Instant};

use redis::Connection;
use testkit::waiting::*;
use testkit::*;

const A_SECOND: Duration = Duration::from_secs(1);

/// How late the end of a wait may be, at the median, when nothing is amiss.
const ON_TIME: Duration = Duration::from_millis(5);

const HOUR_MS: i64 = 3_600_000;

#[test]
fn a_waiter_whom_no_wake_up_reaches_is_served_within_a_second() {
    let server = Setup::new().module_arg("enable-debug-command").start();
    let mut redis = server.connect();
    let mut waiter = Waiter::of(&server);
    let mut served_after = |what: &str, ttl: i64, deed: &[&str]| {
        assert_median(&format!("deaf, after {what}"), A_SECOND, || {
            fence(ask!(redis, "LOCK.ACQUIRE", "k", "holder", ttl));
            assert_eq!(ask!(redis, "LOCK.DEBUG", "DEAF"), YES);
            waiter.ask("k", "waiter", LONG, LONG);
            if !deed.is_empty() {
                eventually_wait(&mut redis, 1);
                ask!(redis, deed).unwrap();
            }
            let start = Instant::now();
            fence(waiter.reply());
            let lateness = start.elapsed();
            // Until now the cron has not served anybody by chance, and now nobody waits.
            assert_eq!(ask!(redis, "LOCK.DEBUG", "HEAR"), YES);
            assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "waiter"), YES);
            lateness
        });
    };
    served_after("the end of a lease", 1, &[]);
    served_after("a release", LONG, &["LOCK.RELEASE", "k", "holder"]);
    served_after("a deletion", LONG, &["DEL", "k"]);
}

#[test]
fn a_wait_ends_within_a_second_of_its_end_though_no_timer_fires() {
    let server = Setup::new().module_arg("enable-debug-command").start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    assert_eq!(ask!(redis, "LOCK.DEBUG", "DEAF"), YES);
    let mut waiter = Waiter::of(&server);

    assert_median("deaf, after WAIT 20", A_SECOND, || {
        let start = Instant::now();
        waiter.ask("k", "waiter", LONG, 20);
        assert_eq!(waiter.reply(), NULL);
        start.elapsed()
    });
}

/// Steps the server's clock and waits until the server goes by it: some look at the clock, while commands
/// keep them busy, only now and then.
fn step_clock(server: &Server, redis: &mut Connection, from_ms: i64, to_ms: i64) {
    let ttl = 10 * HOUR_MS;
    assert_eq!(ask!(redis, "SET", "witness", "", "PX", ttl), OK);
    server.set_clock_ms(to_ms);
    eventually("the server goes by its new clock", || {
        let stepped = ttl - number(ask!(redis, "PTTL", "witness"));
        (stepped - (to_ms - from_ms)).abs() < HOUR_MS / 2
    });
}

#[test]
fn a_clock_that_steps_an_hour_back_strands_nobody() {
    let server = Setup::new().clock_ms(0).start();
    let mut redis = server.connect();
    for key in ["released", "deleted", "shortened"] {
        hold(&mut redis, key);
    }
    let mut line = ["released", "deleted", "shortened"].map(|key| join(&server, key, "waiter"));
    hold(&mut redis, "held");
    let _throughout = join(&server, "held", "waiter");
    let mut hasty = Waiter::of(&server);
    hasty.ask("held", "hasty", LONG, 1_000);
    eventually_wait(&mut redis, 5);
    let asked = Instant::now();

    step_clock(&server, &mut redis, 0, -HOUR_MS);

    let start = Instant::now();
    assert_eq!(ask!(redis, "LOCK.RELEASE", "released", "holder"), YES);
    assert_eq!(ask!(redis, "DEL", "deleted"), YES);
    assert_eq!(ask!(redis, "PEXPIRE", "shortened", 50), YES);
    for waiter in &mut line {
        fence(waiter.reply());
    }
    assert!(
        start.elapsed() < A_SECOND + A_SECOND,
        "{:?}",
        start.elapsed()
    );
    assert_eq!(hasty.reply(), NULL);
    let waited = asked.elapsed();
    assert!((A_SECOND / 2..3 * A_SECOND).contains(&waited), "{waited:?}");

    // And waits end as sharply as before: the timer that was running is not lost for an hour.
    assert_median("after a step back, after WAIT 20", ON_TIME, || {
        let start = Instant::now();
        hasty.ask("held", "hasty", LONG, 20);
        assert_eq!(hasty.reply(), NULL);
        start.elapsed() - Duration::from_millis(20)
    });
}

#[test]
fn a_lease_that_ends_after_the_clock_stepped_back_goes_to_the_next_by_the_new_clock() {
    let server = Setup::new().clock_ms(HOUR_MS).start();
    let mut redis = server.connect();
    fence(ask!(redis, "LOCK.ACQUIRE", "k", "holder", 2_000));
    let mut waiter = join(&server, "k", "waiter");

    // Back, and forth again: the lease ends when the server says that it has ended.
    step_clock(&server, &mut redis, HOUR_MS, 0);
    let mut hourglass = Waiter::of(&server);
    hourglass.ask("k", "hourglass", LONG, 300);
    assert_eq!(hourglass.reply(), NULL);
    assert_eq!(queue(&mut redis, "k"), ["waiter"]);
    step_clock(&server, &mut redis, 0, HOUR_MS);

    let start = Instant::now();
    fence(waiter.reply());
    assert!(start.elapsed() < 4 * A_SECOND, "{:?}", start.elapsed());
}

#[test]
fn a_clock_that_steps_an_hour_ahead_ends_the_leases_and_strands_nobody() {
    let server = Setup::new().clock_ms(0).start();
    let mut redis = server.connect();
    fence(ask!(redis, "LOCK.ACQUIRE", "ends", "holder", HOUR_MS / 2));
    fence(ask!(redis, "LOCK.ACQUIRE", "lasts", "holder", 2 * HOUR_MS));
    let mut first = join(&server, "ends", "waiter");
    let mut second = join(&server, "lasts", "waiter");
    let mut hasty = Waiter::of(&server);
    hasty.ask("lasts", "hasty", LONG, 1_000);
    eventually_wait(&mut redis, 3);
    let asked = Instant::now();

    step_clock(&server, &mut redis, 0, HOUR_MS);

    let start = Instant::now();
    fence(first.reply());
    assert!(
        start.elapsed() < A_SECOND + A_SECOND,
        "{:?}",
        start.elapsed()
    );
    // A wait is counted by a clock that nobody can step.
    assert_eq!(hasty.reply(), NULL);
    let waited = asked.elapsed();
    assert!((A_SECOND / 2..3 * A_SECOND).contains(&waited), "{waited:?}");
    assert_eq!(queue(&mut redis, "lasts"), ["waiter"]);
    assert_eq!(ask!(redis, "LOCK.RELEASE", "lasts", "holder"), YES);
    fence(second.reply());
}
