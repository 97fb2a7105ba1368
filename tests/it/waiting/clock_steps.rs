//! The server's clock steps back and ahead, and nobody waits for an hour because of it.

use std::time::{Duration, Instant};

use redis::Connection;
use testkit::waiting::*;
use testkit::*;

const A_SECOND: Duration = Duration::from_secs(1);

const HOUR_MS: i64 = 3_600_000;

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
    let server = with_a_slow_cron().clock_ms(0).start();
    let mut redis = server.connect();
    for key in ["released", "deleted", "shortened"] {
        hold(&mut redis, key);
    }
    let mut waiters = ["released", "deleted", "shortened"].map(|key| join(&server, key, "waiter"));
    hold(&mut redis, "held");
    let _throughout = join(&server, "held", "waiter");
    let mut hasty = Waiter::of(&server);
    hasty.ask("held", "hasty", LONG, 1_000);
    eventually_wait(&mut redis, 5);
    let asked = Instant::now();

    step_clock(&server, &mut redis, 0, -HOUR_MS);

    assert_eq!(ask!(redis, "LOCK.RELEASE", "released", "holder"), YES);
    assert_eq!(ask!(redis, "DEL", "deleted"), YES);
    assert_eq!(ask!(redis, "PEXPIRE", "shortened", 50), YES);
    for waiter in &mut waiters {
        fence(waiter.reply());
    }
    assert_eq!(hasty.reply(), NULL);
    let waited = asked.elapsed();
    assert!(waited > A_SECOND / 2, "{waited:?}");

    // And waits end as before: the timer that was running is not lost for an hour.
    assert_woken("after a step back, after WAIT 20", || {
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
    hold(&mut redis, "k");
    let mut waiter = join(&server, "k", "waiter");
    assert_eq!(ask!(redis, "PEXPIRE", "k", 3_000), YES);

    // Back, and forth again: the lease ends when the server says that it has ended.
    step_clock(&server, &mut redis, HOUR_MS, 0);
    let mut delay = Waiter::of(&server);
    delay.ask("k", "delay", LONG, 300);
    assert_eq!(delay.reply(), NULL);
    assert_eq!(queue(&mut redis, "k"), ["waiter"]);
    step_clock(&server, &mut redis, 0, HOUR_MS);

    fence(waiter.reply());
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

    fence(first.reply());
    // A wait is counted by a clock that nobody can step.
    assert_eq!(hasty.reply(), NULL);
    let waited = asked.elapsed();
    assert!(waited > A_SECOND / 2, "{waited:?}");
    assert_eq!(queue(&mut redis, "lasts"), ["waiter"]);
    assert_eq!(ask!(redis, "LOCK.RELEASE", "lasts", "holder"), YES);
    fence(second.reply());
}
