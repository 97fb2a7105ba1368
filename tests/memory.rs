//! Nothing is left behind: not by commands of any outcome, and not by a module that was unloaded.
//! What waiting leaves behind is in tests/limits.rs.

use std::fs;

use redis::{Connection, pipe};
use testkit::waiting::*;
use testkit::*;

/// Resident memory of the server, in bytes.
fn resident(server: &Server) -> i64 {
    let status = fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib: i64 = line
        .unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap();
    kib * 1024
}

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
            after_warm_up = resident(&server);
        }
        every_outcome(&mut redis);
    }
    let grown = resident(&server) - after_warm_up;

    println!("resident memory grew by {grown} bytes in 100,000 commands");
    // 4 bytes for every command would be more.
    assert!(grown < 400_000, "{grown} bytes");
}

#[test]
fn loading_anew_leaves_nothing_behind() {
    let server = Server::start();
    let mut redis = server.connect();
    let mut line: Vec<Waiter> = (0..200).map(|_| Waiter::of(&server)).collect();
    let mut after_warm_up = 0;
    for round in 0..120 {
        if round == 20 {
            after_warm_up = resident(&server);
        }
        hold(&mut redis, "k");
        for (n, waiter) in line.iter_mut().enumerate() {
            waiter.ask("k", &n.to_string(), LONG, LONG);
        }
        eventually_wait(&mut redis, line.len() as i64);
        assert_eq!(
            ask!(redis, "CONFIG", "SET", "lockkeeper.max-waiters", 0),
            OK
        );
        for waiter in &mut line {
            assert_eq!(waiter.reply(), NULL);
        }
        assert_eq!(ask!(redis, "MODULE", "UNLOAD", "lockkeeper"), OK);
        assert_eq!(
            ask!(redis, "MODULE", "LOAD", module().to_str().unwrap()),
            OK
        );
        assert_eq!(ask!(redis, "DEL", "k"), YES);
    }
    let grown = resident(&server) - after_warm_up;

    println!("resident memory grew by {grown} bytes in 100 loadings");
    // 4 kB for every loading would be more; the queue's tables are 8.
    assert!(grown < 400_000, "{grown} bytes");
}
