//! Nothing is left behind in memory: not by commands of any outcome, not by those who waited, and not by
//! a module that was unloaded.

use redis::{Connection, pipe};
use testkit::waiting::*;
use testkit::*;

/// A thousand commands: every outcome of every command, and refusals of each kind.
fn every_outcome(redis: &mut Connection) {
    let long = "o".repeat(600);
    let round: [&[&str]; 20] = [
        &["LOCK.ACQUIRE", "k", "alice", "60000"],
        &["LOCK.ACQUIRE", "k", "alice", "90000"],
        &["LOCK.ACQUIRE", "k", "bob", "60000"],
        &["LOCK.INFO", "k"],
        &["LOCK.RENEW", "k", "bob", "60000"],
        &["LOCK.RENEW", "k", "alice", "60000"],
        &["LOCK.RELEASE", "k", "bob"],
        &["LOCK.RELEASE", "k", "alice"],
        &["LOCK.RELEASE", "k", "alice"],
        &["LOCK.RENEW", "k", "alice", "60000"],
        &["LOCK.INFO", "k"],
        &["SET", "k", "alice"],
        &["LOCK.ACQUIRE", "k", "alice", "60000", "WAIT", "60000"],
        &["LOCK.RELEASE", "k", "alice"],
        &["LPUSH", "k", "alice"],
        &["LOCK.ACQUIRE", "k", "alice", "60000"],
        &["DEL", "k"],
        &["LOCK.ACQUIRE", "k", &long, "60000"],
        &["LOCK.ACQUIRE", "k", "alice", &long],
        &["LOCK.ACQUIRE", "k", "alice", "1", "NX"],
    ];
    let mut commands = pipe();
    commands.ignore_errors();
    for _ in 0..50 {
        for args in round {
            commands.cmd(args[0]).arg(&args[1..]);
        }
    }
    let replies: Vec<Value> = commands.query(redis).unwrap();
    assert_eq!(replies.len(), 1_000);
}

#[test]
fn a_hundred_thousand_commands_leave_nothing_behind() {
    let server = Server::start();
    let mut redis = server.connect();
    let mut after_warm_up = 0;
    for round in 0..130 {
        if round == 30 {
            after_warm_up = server.resident_bytes();
        }
        every_outcome(&mut redis);
    }
    let grown = server.resident_bytes() - after_warm_up;

    println!("resident memory grew by {grown} bytes in 100,000 commands");
    // 4 bytes for every command would be more.
    assert!(grown < 400_000, "{grown} bytes");
}

#[test]
fn loading_anew_leaves_nothing_behind() {
    let server = Server::start();
    let mut redis = server.connect();
    let mut waiters: Vec<Waiter> = (0..200).map(|_| Waiter::of(&server)).collect();
    let mut resident = vec![];
    for round in 0..=300 {
        if round % 100 == 0 {
            resident.push(server.resident_bytes());
        }
        hold(&mut redis, "k");
        for (n, waiter) in waiters.iter_mut().enumerate() {
            waiter.ask("k", &n.to_string(), LONG, LONG);
        }
        eventually_wait(&mut redis, waiters.len() as i64);
        set_max_waiters(&mut redis, 0);
        for waiter in &mut waiters {
            assert_eq!(waiter.reply(), NULL);
            // Unloading closes those who used us last.
            waiter.assert_no_more_replies();
        }
        assert_eq!(ask!(redis, "MODULE", "UNLOAD", "lockkeeper"), OK);
        assert_eq!(
            ask!(redis, "MODULE", "LOAD", module().to_str().unwrap()),
            OK
        );
        assert_eq!(ask!(redis, "DEL", "k"), YES);
    }
    // What leaks grows in each stretch; the server's own buffers for so many clients do so in some.
    let grown = resident.windows(2).map(|pair| pair[1] - pair[0]);
    let grown = grown.min().unwrap();

    println!("resident memory grew by {grown} bytes in 100 loadings");
    // 6 kB for every loading would be more; the queue's tables are 8.
    assert!(grown < 600_000, "{grown} bytes");
}

/// Clients of a round of [`come_and_go`].
const CLIENTS: usize = 100;

/// A hundred wait for one lock, and each leaves in one of five ways, one of them with the lock.
fn come_and_go(server: &Server, redis: &mut Connection, waiters: &mut [Waiter]) {
    let unblock = may_be_unblocked(redis);
    hold(redis, "k");
    for (n, waiter) in waiters.iter_mut().enumerate() {
        let wait = if n % 5 == 0 { 1 } else { LONG };
        waiter.ask("k", &format!("{n}"), LONG, wait);
    }
    eventually_wait(redis, CLIENTS as i64 / 5 * 4);
    let mut leave = pipe();
    for (n, waiter) in waiters.iter().enumerate() {
        match n % 5 {
            1 if unblock => leave.cmd("CLIENT").arg("UNBLOCK").arg(waiter.id),
            1 | 2 => leave.cmd("LOCK.RELEASE").arg("k").arg(n),
            // The connection of every 50th is lost as well: connecting is slow.
            3 if n % 50 == 3 => leave.cmd("CLIENT").arg("KILL").arg("ID").arg(waiter.id),
            _ => continue,
        };
    }
    leave.cmd("LOCK.RELEASE").arg("k").arg("holder");
    for n in 0..CLIENTS {
        if n % 5 >= 3 && n % 50 != 3 {
            leave.cmd("LOCK.RELEASE").arg("k").arg(n);
        }
    }
    leave.query::<()>(redis).unwrap();
    for (n, waiter) in waiters.iter_mut().enumerate() {
        match n % 5 {
            3 if n % 50 == 3 => *waiter = Waiter::of(server),
            3 | 4 => drop(fence(waiter.reply())),
            _ => assert_eq!(waiter.reply(), NULL),
        }
    }
    assert_eq!(ask!(redis, "LOCK.INFO", "k"), NULL);
}

#[test]
fn a_hundred_thousand_who_came_and_went_leave_nothing_behind() {
    let server = Server::start();
    let mut redis = server.connect();
    let mut waiters: Vec<Waiter> = (0..CLIENTS).map(|_| Waiter::of(&server)).collect();
    let rounds = 100_000 / CLIENTS;
    let mut after_warm_up = 0;
    for round in 0..rounds {
        if round == rounds / 5 {
            after_warm_up = server.resident_bytes();
        }
        come_and_go(&server, &mut redis, &mut waiters);
    }
    let grown = server.resident_bytes() - after_warm_up;

    println!("resident memory grew by {grown} bytes in 80,000 waits");
    // The least that malloc gives takes 32 bytes; half of that, as it may settle in late.
    assert!(grown < 80_000 * 16, "{grown} bytes");
    assert_eq!(gauge(&mut redis, "waiters"), 0);
    assert_eq!(ask!(redis, "MODULE", "UNLOAD", "lockkeeper"), OK);
}
