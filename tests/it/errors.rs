//! Every error that the commands can answer occurs as docs/commands/errors.md lists it: each is provoked
//! here on a real server, and what was seen is compared with the table, both ways.

use std::collections::BTreeSet;

use redis::Connection;
use testkit::cluster::{Cluster, node_id, slot_of};
use testkit::waiting::{LONG, Waiter, hold, join, pipeline};
use testkit::*;

const PAGE: &str = include_str!("../../docs/commands/errors.md");

const COMMANDS: [&str; 4] = ["ACQUIRE", "RENEW", "RELEASE", "INFO"];

/// In the first half of the slots: on the first of two nodes.
const KEY: &str = "b";

/// The code word of an error and the command that was answered so.
type Seen = BTreeSet<(String, &'static str)>;

fn code(reply: Reply) -> Option<String> {
    let line = reply.err()?;
    Some(line.split(' ').next().unwrap_or_default().to_owned())
}

/// The replies to one call of each command.
fn all_four(redis: &mut Connection) -> [Reply; 4] {
    [
        ask!(redis, "LOCK.ACQUIRE", KEY, "alice", LONG),
        ask!(redis, "LOCK.RENEW", KEY, "alice", LONG),
        ask!(redis, "LOCK.RELEASE", KEY, "alice"),
        ask!(redis, "LOCK.INFO", KEY),
    ]
}

fn errors_of_all_four(redis: &mut Connection) -> Seen {
    let replies = COMMANDS.into_iter().zip(all_four(redis));
    replies
        .filter_map(|(command, reply)| Some((code(reply)?, command)))
        .collect()
}

fn seen(code: &str, commands: &[&'static str]) -> Seen {
    commands
        .iter()
        .map(|command| (code.to_owned(), *command))
        .collect()
}

fn config(redis: &mut Connection, name: &str, value: &str) {
    assert_eq!(ask!(redis, "CONFIG", "SET", name, value), OK);
}

/// What the arguments, the key and the number of waiters can be wrong in.
fn by_the_module() -> Seen {
    let server = Server::start();
    let mut redis = server.connect();
    let mut all = Seen::new();
    let mut errors = |command: &'static str, requests: &[&[&str]]| {
        for request in requests {
            let name = format!("LOCK.{command}");
            let code = code(ask!(redis, name, *request));
            all.insert((code.expect("an error"), command));
        }
    };
    errors(
        "ACQUIRE",
        &[
            &["k"],
            &["k", "", "1"],
            &["k", "alice", "0"],
            &["k", "alice", "1", "WAIT", "x"],
            &["k", "alice", "1", "LIMIT", "0"],
            &["k", "alice", "1", "foo"],
        ],
    );
    errors("RENEW", &[&["k"], &["k", "", "1"], &["k", "alice", "0"]]);
    errors("RELEASE", &[&["k"], &["k", ""]]);
    errors("INFO", &[&[]]);

    ask!(redis, "RPUSH", KEY, "x").unwrap();
    all.extend(errors_of_all_four(&mut redis));

    hold(&mut redis, "held");
    config(&mut redis, "lockkeeper.max-waiters", "0");
    let full = ask!(redis, "LOCK.ACQUIRE", "held", "x", LONG, "WAIT", LONG);
    all.insert((code(full).expect("an error"), "ACQUIRE"));
    all
}

/// Who asks: nobody yet, somebody who may not, a RESP2 connection that listens to channels.
fn by_who_asks() -> Seen {
    let server = Server::start();
    let mut redis = server.connect();
    let mut all = Seen::new();

    let mut listener = Waiter::of(&server);
    listener.send_all(&pipeline("SUBSCRIBE channel; LOCK.INFO k"));
    listener.reply().unwrap();
    assert_eq!(code(listener.reply()).as_deref(), Some("ERR"));

    let mut limited = server.connect();
    let rules = ["reset", "on", ">secret", "~*", "+ping"];
    assert_eq!(ask!(redis, "ACL", "SETUSER", "limited", &rules), OK);
    assert_eq!(ask!(limited, "AUTH", "limited", "secret"), OK);
    all.extend(errors_of_all_four(&mut limited));

    config(&mut redis, "requirepass", "secret");
    all.extend(errors_of_all_four(&mut server.connect()));
    all
}

/// Memory, disk, replicas.
fn by_what_the_server_lacks() -> Seen {
    let server = Server::start();
    let mut redis = server.connect();
    let mut all = Seen::new();

    config(&mut redis, "maxmemory", "1");
    all.extend(errors_of_all_four(&mut redis));
    config(&mut redis, "maxmemory", "0");

    config(&mut redis, "min-replicas-to-write", "1");
    all.extend(errors_of_all_four(&mut redis));
    config(&mut redis, "min-replicas-to-write", "0");

    after_a_failed_snapshot(&server, &mut redis);
    all.extend(errors_of_all_four(&mut redis));
    all
}

/// The snapshot cannot replace a folder of its name.
fn after_a_failed_snapshot(server: &Server, redis: &mut Connection) {
    config(redis, "save", "3600 1");
    std::fs::create_dir_all(server.dir().join("dump.rdb/in the way")).unwrap();
    ask!(redis, "BGSAVE").unwrap();
    eventually("the snapshot fails", || {
        info::<String>(redis, "persistence", "rdb_last_bgsave_status") == "err"
    });
}

/// The server is no master, and its own is not there.
fn by_the_role() -> Seen {
    let server = Server::start();
    let mut redis = server.connect();
    let mut all = Seen::new();
    hold(&mut redis, KEY);
    let mut waiter = join(&server, KEY, "waiter");

    assert_eq!(ask!(redis, "REPLICAOF", "127.0.0.1", "1"), OK);

    all.insert((code(waiter.reply()).expect("an error"), "ACQUIRE"));
    all.extend(errors_of_all_four(&mut redis));
    config(&mut redis, "replica-serve-stale-data", "no");
    all.extend(errors_of_all_four(&mut redis));
    config(&mut redis, "replica-read-only", "no");
    all.extend(errors_of_all_four(&mut redis));
    config(&mut redis, "replica-serve-stale-data", "yes");
    if redirects(&mut redis) {
        let mut capable = server.connect();
        assert_eq!(ask!(capable, "CLIENT", "CAPA", "redirect"), OK);
        config(&mut redis, "replica-read-only", "yes");
        all.extend(errors_of_all_four(&mut capable));
    }
    all
}

/// Whether a replica of this server sends clients that can follow to its master: Valkey since 8.
fn redirects(redis: &mut Connection) -> bool {
    is_at_least(redis, (99, 0), (8, 0))
}

/// A script that does not end, and a snapshot that takes its time.
fn by_what_the_server_is_busy_with() -> Seen {
    let server = Server::with(&["--loading-process-events-interval-bytes", "1024"]);
    let mut redis = server.connect();
    let mut all = Seen::new();
    config(&mut redis, "busy-reply-threshold", "1");
    let mut other = Waiter::of(&server);

    let mut script = redis::cmd("EVAL");
    other.send(script.arg("while true do end").arg(0));
    eventually("the server is busy", || ask!(redis, "PING").is_err());
    all.extend(errors_of_all_four(&mut redis));
    assert_eq!(ask!(redis, "SCRIPT", "KILL"), OK);
    error(other.reply());

    config(&mut redis, "rdbcompression", "no");
    for key in 0..50 {
        let value = "x".repeat(2_000);
        assert_eq!(ask!(redis, "SET", format!("big{key}"), value), OK);
    }
    // In microseconds, for each key.
    config(&mut redis, "key-load-delay", "100000");
    let mut reload = redis::cmd("DEBUG");
    other.send(reload.arg("RELOAD"));
    eventually("the server loads", || {
        code(ask!(redis, "LOCK.INFO", KEY)).is_some()
    });
    all.extend(errors_of_all_four(&mut redis));
    config(&mut redis, "key-load-delay", "0");
    assert_eq!(other.reply(), OK);
    all
}

/// The slot is elsewhere, on its way, or served by nobody.
fn by_the_cluster() -> Seen {
    let cluster = Cluster::start();
    let [source, target] = &cluster.nodes;
    let (mut at_source, mut at_target) = (source.connect(), target.connect());
    let slot = slot_of(&mut at_source, KEY);
    let (source_id, target_id) = (node_id(&mut at_source), node_id(&mut at_target));
    let mut all = errors_of_all_four(&mut at_target);

    hold(&mut at_source, KEY);
    let mut waiter = join(source, KEY, "waiter");
    let set_slot = ["CLUSTER", "SETSLOT"];
    assert_eq!(ask!(at_target, &set_slot, slot, "IMPORTING", source_id), OK);
    assert_eq!(ask!(at_source, &set_slot, slot, "MIGRATING", target_id), OK);
    assert_eq!(ask!(at_source, "DEL", KEY), YES);
    all.insert((code(waiter.reply()).expect("an error"), "ACQUIRE"));
    all.extend(errors_of_all_four(&mut at_source));

    assert_eq!(ask!(at_source, &set_slot, slot, "STABLE"), OK);
    hold(&mut at_source, KEY);
    let mut waiter = join(source, KEY, "waiter");
    // Valkey lets those wait on who are in the queue, until it is their turn.
    assert_eq!(ask!(at_source, "LOCK.RENEW", KEY, "holder", 1_000), YES);
    assert_eq!(ask!(at_source, "CLUSTER", "DELSLOTS", 1), OK);
    let code_word = code(waiter.reply()).expect("an error");
    println!("a waiter in a cluster that is down: {code_word}");
    assert!(
        ["CLUSTERDOWN", "TRYAGAIN"].contains(&code_word.as_str()),
        "{code_word}"
    );
    all.extend(errors_of_all_four(&mut at_source));
    all
}

/// The rows of the table on that page: `| `CODE` | commands | …`.
fn listed() -> Seen {
    let rows = PAGE.lines().skip_while(|line| !line.starts_with("| `"));
    rows.take_while(|line| line.starts_with("| `"))
        .flat_map(|row| {
            let mut cells = row.trim_matches('|').split('|').map(str::trim);
            let codes = cells.next().expect("codes").split(", ");
            let commands = cells.next().expect("commands");
            let commands: Vec<&str> = match commands {
                "all" => COMMANDS.to_vec(),
                "all but INFO" => COMMANDS[..3].to_vec(),
                names => COMMANDS
                    .into_iter()
                    .filter(|command| names.split(", ").any(|name| name == *command))
                    .collect(),
            };
            assert!(!commands.is_empty(), "no command in {row}");
            codes
                .flat_map(|code| seen(code.trim_matches('`'), &commands))
                .collect::<Vec<_>>()
        })
        .collect()
}

#[test]
fn the_page_on_errors_lists_those_that_occur_and_no_others() {
    let mut all = by_the_module();
    all.extend(by_who_asks());
    all.extend(by_what_the_server_lacks());
    all.extend(by_the_role());
    all.extend(by_what_the_server_is_busy_with());
    all.extend(by_the_cluster());

    let mut listed = listed();
    // Only a bug makes a command panic: loading.rs.
    listed.retain(|(code, _)| code != "PANIC");
    if !redirects(&mut Server::start().connect()) {
        listed.retain(|(code, _)| code != "REDIRECT");
    }
    let missing: Vec<_> = all.difference(&listed).collect();
    assert!(missing.is_empty(), "the page does not list {missing:?}");
    let too_many: Vec<_> = listed.difference(&all).collect();
    assert!(too_many.is_empty(), "these did not occur: {too_many:?}");
}

#[test]
fn in_a_transaction_a_full_server_renews_but_refuses_to_queue_it_before_redis_7_4() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, KEY);
    assert_eq!(ask!(redis, "MULTI"), OK);
    config(&mut server.connect(), "maxmemory", "1");

    let queued = ask!(redis, "LOCK.RENEW", KEY, "holder", LONG);

    let done = ask!(redis, "EXEC");
    if !is_at_least(&mut redis, (7, 4), (8, 0)) {
        assert_eq!(code(queued).as_deref(), Some("OOM"));
        assert_eq!(code(done).as_deref(), Some("EXECABORT"));
    } else {
        assert_eq!(done, Ok(Value::Array(vec![Value::Int(1)])));
    }
    assert_eq!(ask!(redis, "LOCK.RENEW", KEY, "holder", LONG), YES);
}

/// A lock must not be lost because a disk is full.
#[test]
fn a_failed_snapshot_refuses_renewals_unless_the_server_was_told_not_to() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, KEY);
    after_a_failed_snapshot(&server, &mut redis);
    let refused = ask!(redis, "LOCK.RENEW", KEY, "holder", LONG);
    assert_eq!(code(refused).as_deref(), Some("MISCONF"));

    config(&mut redis, "stop-writes-on-bgsave-error", "no");

    assert_eq!(ask!(redis, "LOCK.RENEW", KEY, "holder", LONG), YES);
    assert_eq!(ask!(redis, "LOCK.RELEASE", KEY, "holder"), YES);
}

#[test]
fn a_waiter_that_client_unblock_ends_with_an_error_is_answered_unblocked() {
    let server = Server::start();
    let mut redis = server.connect();
    if !waiting::may_be_unblocked(&mut redis) {
        return skip("on Redis 7.2 CLIENT UNBLOCK ends no wait for a lock");
    }
    hold(&mut redis, KEY);
    let mut waiter = join(&server, KEY, "waiter");

    assert_eq!(ask!(redis, "CLIENT", "UNBLOCK", waiter.id, "ERROR"), YES);

    assert_eq!(code(waiter.reply()).as_deref(), Some("UNBLOCKED"));
}

/// Where the server survives that, which Redis up to 8.0 and Valkey up to 8.1 do not, module or not.
#[test]
fn a_client_that_is_paused_looks_like_one_that_waits_but_is_in_no_queue() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, KEY);
    let mut paused = Waiter::of(&server);
    assert_eq!(ask!(redis, "CLIENT", "PAUSE", LONG, "WRITE"), OK);

    paused.ask(KEY, "paused", LONG, LONG);

    eventually("it is held back", || {
        info::<i64>(&mut redis, "clients", "blocked_clients") == 1
    });
    assert_eq!(waiting::gauge(&mut redis, "waiters"), 0);
    assert_eq!(waiting::waiters(&mut redis, KEY), 0);
    let client: String = redis::cmd("CLIENT")
        .arg(&["LIST", "ID"])
        .arg(paused.id)
        .query(&mut redis)
        .unwrap();
    assert!(client.contains("cmd=lock.acquire"), "{client}");
    if is_at_least(&mut redis, (8, 2), (9, 0)) {
        assert_eq!(ask!(redis, "CLIENT", "UNBLOCK", paused.id), NO);
    }
    assert_eq!(ask!(redis, "CLIENT", "UNPAUSE"), OK);
    waiting::eventually_wait(&mut redis, 1);
}
