//! The fence: a number that grows with every grant of a key, whatever happens in between.

use redis::Connection;
use testkit::*;

const TTL: i64 = 1_000_000;
const MILLISECOND_US: i64 = 1000;
const SECOND_US: i64 = 1000 * MILLISECOND_US;
const HOUR_US: i64 = 3600 * SECOND_US;

fn acquire(redis: &mut Connection, key: &str) -> i64 {
    fence(ask!(redis, "LOCK.ACQUIRE", key, "alice", TTL))
}

/// One tenure from grant to release.
fn tenure(redis: &mut Connection, key: &str) -> i64 {
    let fence = acquire(redis, key);
    assert_eq!(ask!(redis, "LOCK.RELEASE", key, "alice"), YES);
    fence
}

/// Waits until fences come from the clock and no more from the second that loading adds.
fn wait_for_the_clock_to_lead(redis: &mut Connection) {
    eventually("the clock leads the fences", || {
        tenure(redis, "other") <= clock_us(redis)
    });
}

#[test]
fn the_fence_grows_over_release_expiry_and_deletion() {
    let server = Server::start();
    let mut redis = server.connect();
    let mut fences = vec![acquire(&mut redis, "k")];

    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "alice"), YES);
    fences.push(acquire(&mut redis, "k"));

    assert_eq!(ask!(redis, "DEL", "k"), YES);
    fences.push(acquire(&mut redis, "k"));

    assert_eq!(ask!(redis, "FLUSHALL"), OK);
    fences.push(acquire(&mut redis, "k"));

    assert_eq!(ask!(redis, "LOCK.RENEW", "k", "alice", 1), YES);
    eventually("the lease ends", || ask!(redis, "EXISTS", "k") == NO);
    fences.push(acquire(&mut redis, "k"));

    assert!(
        fences.is_sorted_by(|before, after| before < after),
        "{fences:?}"
    );
}

#[test]
fn the_fence_grows_faster_than_the_clock_if_it_must() {
    let server = Server::start();
    let mut redis = server.connect();
    let mut pipe = redis::pipe();
    for _ in 0..10_000 {
        pipe.cmd("LOCK.ACQUIRE").arg("k").arg("alice").arg(TTL);
        pipe.cmd("DEL").arg("k").ignore();
    }

    let fences: Vec<i64> = pipe.query(&mut redis).unwrap();

    assert!(fences.is_sorted_by(|before, after| before < after));
}

#[test]
fn the_fence_is_the_clock_and_at_most_a_second_ahead() {
    let server = Server::start();
    let mut redis = server.connect();

    // In microseconds, of a clock that is read in milliseconds.
    let mut between_two_looks = |ahead| {
        let before = clock_us(&mut redis);
        let fence = tenure(&mut redis, "k");
        let after = clock_us(&mut redis);
        assert!((before - MILLISECOND_US..=after + ahead).contains(&fence));
    };

    between_two_looks(SECOND_US);
    wait_for_the_clock_to_lead(&mut server.connect());
    between_two_looks(0);
}

#[test]
fn the_fence_is_kept_as_long_as_its_owner_holds_the_lock() {
    let server = Server::start();
    let mut redis = server.connect();
    let first = acquire(&mut redis, "k");
    tenure(&mut redis, "other");

    assert_eq!(ask!(redis, "LOCK.RENEW", "k", "alice", TTL), YES);

    assert_eq!(acquire(&mut redis, "k"), first);
}

#[test]
fn the_fence_grows_over_a_restart() {
    let mut server = Server::start();
    let mut last = 0;
    for crash in [false, true, false, true] {
        let fence = acquire(&mut server.connect(), "k");
        assert!(fence > last, "{fence} after {last}");
        last = fence;
        if crash {
            server.kill9();
            server.start_again();
        } else {
            server.restart();
        }
    }
}

#[test]
fn the_fence_grows_though_the_clock_steps_back() {
    let server = Setup::new().clock_ms(0).start();
    let mut redis = server.connect();
    let before = tenure(&mut redis, "k");

    server.set_clock_ms(-3_600_000);
    eventually("the clock steps back", || {
        clock_us(&mut redis) < before - HOUR_US / 2
    });

    let first = tenure(&mut redis, "k");
    let second = tenure(&mut redis, "k");
    assert!(
        before < first && first < second,
        "{before}, {first}, {second}"
    );
}

#[test]
fn the_time_held_is_never_negative_though_the_clock_steps_back() {
    let server = Setup::new().clock_ms(0).start();
    let mut redis = server.connect();
    acquire(&mut redis, "k");

    server.set_clock_ms(-60_000);

    let Ok(Value::Array(info)) = ask!(redis, "LOCK.INFO", "k") else {
        panic!("LOCK.INFO of a lock is an array");
    };
    assert_eq!(info[4..6], [text("held-ms").unwrap(), Value::Int(0)]);
}

#[test]
fn a_forged_fence_lifts_only_its_own_key_and_only_while_it_is_there() {
    let server = Server::start();
    let mut redis = server.connect();
    let forged = clock_us(&mut redis) + HOUR_US;
    assert_eq!(
        ask!(redis, "SET", "k", lock_value(forged, "mallory"), "PX", TTL),
        OK
    );

    assert_eq!(
        ask!(redis, "LOCK.ACQUIRE", "k", "mallory", TTL),
        Ok(Value::Int(forged))
    );
    assert!(tenure(&mut redis, "other") < forged);

    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "mallory"), YES);
    assert!(tenure(&mut redis, "other") < forged);
    assert!(tenure(&mut redis, "k") < forged);
}

#[test]
fn a_fence_that_is_replaced_is_exceeded_unless_it_is_more_than_a_day_ahead() {
    let server = Server::start();
    let mut redis = server.connect();
    for (ahead, exceeded) in [(23 * HOUR_US, true), (25 * HOUR_US, false)] {
        let forged = clock_us(&mut redis) + ahead;
        let value = lock_value(forged, "mallory");
        assert_eq!(ask!(redis, "SET", "k", value, "PX", TTL), OK);
        let mut bob = server.connect();
        let bob = std::thread::spawn(move || {
            fence(ask!(bob, "LOCK.ACQUIRE", "k", "bob", TTL, "WAIT", TTL))
        });
        eventually("bob waits", || {
            info::<u32>(&mut redis, "lockkeeper", "lockkeeper_waiters") == 1
        });

        assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "mallory"), YES);

        let next = bob.join().unwrap();
        assert_eq!(next > forged, exceeded, "{next} after {forged}");
        assert!(tenure(&mut redis, "other") < forged);
    }
}

#[test]
fn the_fence_grows_over_a_failover_while_clocks_differ_by_less_than_a_second() {
    let master = Setup::new().clock_ms(800).start();
    let mut redis = master.connect();
    wait_for_the_clock_to_lead(&mut redis);
    let replica = Server::replica_of(&master);
    let mut promoted = replica.connect();
    let last = acquire(&mut redis, "k");

    assert_eq!(ask!(promoted, "REPLICAOF", "NO", "ONE"), OK);

    ask!(promoted, "DEL", "k").unwrap();
    let next = acquire(&mut promoted, "k");
    assert!(next > last, "{next} after {last}");
}

/// What MIGRATE does to a key of a slot that moves.
fn migrate(redis: &mut Connection, to: &Server, key: &str) {
    let moved = ask!(redis, "MIGRATE", "127.0.0.1", to.port(), key, 0, 10_000);
    assert_eq!(moved, OK);
}

/// Two servers, of which the clock of the second is an hour behind: a key moves from the first.
fn moved_to_a_clock_an_hour_behind() -> ([Server; 2], i64) {
    let servers = [0, -3_600_000].map(|ahead| Setup::new().clock_ms(ahead).start());
    let mut source = servers[0].connect();
    wait_for_the_clock_to_lead(&mut source);
    let before = acquire(&mut source, "k");
    migrate(&mut source, &servers[1], "k");
    (servers, before)
}

#[test]
fn the_fence_grows_from_the_holder_to_a_waiter_though_the_key_came_from_a_clock_an_hour_ahead() {
    let ([_source, target], before) = moved_to_a_clock_an_hour_behind();
    let mut waiter = waiting::join(&target, "k", "bob");

    assert_eq!(ask!(target.connect(), "LOCK.RELEASE", "k", "alice"), YES);

    assert_eq!(fence(waiter.reply()), before + 1);
}

/// The limit of the promise: the fence that was released is in no value, and the clock is an hour behind.
#[test]
fn the_fence_goes_back_after_a_move_to_a_clock_that_is_further_behind_than_the_time_between_the_grants()
 {
    let ([_source, target], before) = moved_to_a_clock_an_hour_behind();
    let mut redis = target.connect();
    assert_eq!(ask!(redis, "LOCK.RELEASE", "k", "alice"), YES);

    let after = acquire(&mut redis, "k");

    assert!(after < before, "{after} after {before}: promise more");
}

#[test]
fn the_fence_grows_after_a_move_to_a_clock_that_is_behind_by_less_than_the_time_between_the_grants()
{
    let servers = [0, -200].map(|ahead| Setup::new().clock_ms(ahead).start());
    let [mut source, mut target] = [0, 1].map(|n| servers[n].connect());
    for redis in [&mut source, &mut target] {
        wait_for_the_clock_to_lead(redis);
    }
    let before = acquire(&mut source, "k");
    migrate(&mut source, &servers[1], "k");
    assert_eq!(ask!(target, "LOCK.RELEASE", "k", "alice"), YES);
    eventually("more than the difference has passed", || {
        clock_us(&mut source) > before + 250 * MILLISECOND_US
    });

    let after = acquire(&mut target, "k");

    assert!(after > before, "{after} after {before}");
}

/// The fences of a key before and after a restart during which the clock is stepped.
fn over_a_restart_with_a_step_of(step_ms: i64) -> [i64; 2] {
    let mut server = Setup::new().clock_ms(0).start();
    wait_for_the_clock_to_lead(&mut server.connect());
    let before = acquire(&mut server.connect(), "k");
    server.kill9();
    server.set_clock_ms(step_ms);
    server.start_again();
    [before, acquire(&mut server.connect(), "k")]
}

#[test]
fn the_fence_grows_over_a_restart_though_the_clock_is_stepped_back_by_less_than_a_second() {
    let [before, after] = over_a_restart_with_a_step_of(-900);
    assert!(after > before, "{after} after {before}");
}

/// The limit of the promise: a server that starts knows nothing but its clock.
#[test]
fn the_fence_goes_back_over_a_restart_during_which_the_clock_is_stepped_back_by_an_hour() {
    let [before, after] = over_a_restart_with_a_step_of(-3_600_000);
    assert!(after < before, "{after} after {before}: promise more");
}
