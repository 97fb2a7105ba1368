//! Who is next where several may hold: first come, first served, whatever each allows; and what wakes them.

use std::time::{Duration, Instant};

use redis::from_redis_value;
use testkit::stream::Stream;
use testkit::waiting::*;
use testkit::*;

/// The LOCK.ACQUIRE of a reader that waits.
fn reader(n: i64) -> String {
    format!("LOCK.ACQUIRE k {n} {LONG} WAIT {LONG} SHARED")
}

fn wait_for(server: &Server, owner: &str, options: &str) -> Waiter {
    let acquire = format!("LOCK.ACQUIRE k {owner} {LONG} WAIT {LONG} {options}");
    join_by(server, acquire.trim_end())
}

#[test]
fn a_release_lets_in_all_at_the_head_that_are_admitted_with_one_write() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut readers = ["a", "b"].map(|owner| wait_for(&server, owner, "SHARED"));
    let mut writer = wait_for(&server, "writer", "");
    let mut late = wait_for(&server, "late", "SHARED");
    let mut stream = Stream::of(&server);

    assert_eq!(run(&mut redis, "LOCK.RELEASE k holder"), YES);
    assert_eq!(holders(&mut redis, "k"), ["a", "b"]);
    let fences = readers.each_mut().map(|reader| fence(reader.reply()));
    assert!(fences[0] < fences[1]);
    assert_eq!(stream.take().len(), 1);
    // Nobody passes the writer, not even beside other readers.
    assert_eq!(queue(&mut redis, "k"), ["writer", "late"]);
    let newcomer = format!("LOCK.ACQUIRE k new {LONG} SHARED");
    assert_eq!(run(&mut redis, &newcomer), NULL);

    assert_eq!(run(&mut redis, "LOCK.RELEASE k a"), YES);
    assert_eq!(holders(&mut redis, "k"), ["b"]);
    assert_eq!(run(&mut redis, "LOCK.RELEASE k b"), YES);
    let fence_of_writer = fence(writer.reply());
    assert_eq!(owner(&mut redis, "k").as_deref(), Some("writer"));
    assert_eq!(run(&mut redis, "LOCK.RELEASE k writer"), YES);
    assert!(fence(late.reply()) > fence_of_writer);
}

#[test]
fn places_of_a_limit_are_given_in_the_order_of_arrival() {
    let server = Server::start();
    let mut redis = server.connect();
    hold_by_two(&mut redis, "k", ["a", "b"]);
    let mut waiters = ["c", "d", "e"].map(|owner| wait_for(&server, owner, "LIMIT 2"));
    for (n, leaves) in ["b", "a", "d"].into_iter().enumerate() {
        assert_eq!(run(&mut redis, &format!("LOCK.RELEASE k {leaves}")), YES);
        fence(waiters[n].reply());
    }
    assert_eq!(holders(&mut redis, "k"), ["c", "e"]);
    assert_eq!(gauge(&mut redis, "grants_by_release_total"), 3);
}

#[test]
fn the_first_of_several_leases_that_ends_wakes_the_next_on_time() {
    let server = with_a_slow_cron().start();
    let mut redis = server.connect();
    let mut waiter = Waiter::of(&server);
    granted(&mut redis, &format!("LOCK.ACQUIRE k long {LONG} LIMIT 2"));
    assert_woken("the end of one of several leases", || {
        // So that the sweeps are slow.
        std::thread::sleep(Duration::from_millis(1));
        granted(&mut redis, "LOCK.ACQUIRE k short 1300 LIMIT 2");
        let ends = Instant::now() + Duration::from_millis(1300);
        waiter.send(&words(&format!(
            "LOCK.ACQUIRE k next {LONG} WAIT {LONG} LIMIT 2"
        )));
        fence(waiter.reply());
        let late = Instant::now().saturating_duration_since(ends);
        assert_eq!(run(&mut redis, "LOCK.RELEASE k next"), YES);
        late
    });
    assert!(gauge(&mut redis, "grants_by_expiry_total") >= 2);
    assert_eq!(gauge(&mut redis, "grants_by_deletion_total"), 0);
}

#[test]
fn a_renewal_that_brings_the_next_end_nearer_wakes_on_time() {
    let server = with_a_slow_cron().start();
    let mut redis = server.connect();
    let mut waiter = Waiter::of(&server);
    granted(&mut redis, &format!("LOCK.ACQUIRE k long {LONG} LIMIT 2"));
    assert_woken("a lease that a renewal cut short", || {
        granted(&mut redis, &format!("LOCK.ACQUIRE k short {LONG} LIMIT 2"));
        waiter.send(&words(&format!(
            "LOCK.ACQUIRE k next {LONG} WAIT {LONG} LIMIT 2"
        )));
        eventually_wait(&mut redis, 1);
        assert_eq!(run(&mut redis, "LOCK.RENEW k short 20"), YES);
        let ends = Instant::now() + Duration::from_millis(20);
        fence(waiter.reply());
        let late = Instant::now().saturating_duration_since(ends);
        assert_eq!(run(&mut redis, "LOCK.RELEASE k next"), YES);
        late
    });
}

#[test]
fn who_leaves_the_head_of_the_queue_lets_in_those_behind_it() {
    let server = with_a_slow_cron().start();
    let mut redis = server.connect();
    granted(&mut redis, &format!("LOCK.ACQUIRE k reader {LONG} SHARED"));
    for leave in ["timeout", "release", "connection"] {
        assert_woken(leave, || {
            let wait = if leave == "timeout" { 50 } else { LONG };
            let mut writer = Waiter::of(&server);
            let start = Instant::now();
            writer.send(&words(&format!("LOCK.ACQUIRE k writer {LONG} WAIT {wait}")));
            let mut behind = Waiter::of(&server);
            eventually_wait(&mut redis, 1);
            behind.send(&words(&format!(
                "LOCK.ACQUIRE k behind {LONG} WAIT {LONG} SHARED"
            )));
            if leave != "timeout" {
                eventually_wait(&mut redis, 2);
            }
            let left = match leave {
                "timeout" => start + Duration::from_millis(50),
                "release" => {
                    assert_eq!(run(&mut redis, "LOCK.RELEASE k writer"), NO);
                    Instant::now()
                }
                _ => {
                    drop(writer);
                    Instant::now()
                }
            };
            fence(behind.reply());
            let late = Instant::now().saturating_duration_since(left);
            assert_eq!(run(&mut redis, "LOCK.RELEASE k behind"), YES);
            late
        });
    }
    assert_eq!(gauge(&mut redis, "grants_by_deletion_total"), 0);
    assert_eq!(gauge(&mut redis, "grants_by_expiry_total"), 0);
}

#[test]
fn a_place_at_the_head_that_is_taken_over_with_another_limit_is_looked_at_at_once() {
    let server = with_a_slow_cron().start();
    let mut redis = server.connect();
    granted(&mut redis, &format!("LOCK.ACQUIRE k reader {LONG} SHARED"));
    assert_woken("a take-over with another limit", || {
        let mut writer = wait_for(&server, "w", "");
        let mut behind = wait_for(&server, "behind", "SHARED");
        let mut again = Waiter::of(&server);
        let start = Instant::now();
        again.send(&words(&format!(
            "LOCK.ACQUIRE k w {LONG} WAIT {LONG} SHARED"
        )));
        fence(again.reply());
        let took = start.elapsed();
        assert_eq!(writer.reply(), NULL);
        fence(behind.reply());
        for owner in ["w", "behind"] {
            assert_eq!(run(&mut redis, &format!("LOCK.RELEASE k {owner}")), YES);
        }
        took
    });
}

#[test]
fn more_than_a_hundred_are_let_in_in_steps_that_follow_at_once() {
    let server = with_a_slow_cron().start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut waiters = join_many_by(&server, 250, reader);
    let mut stream = Stream::of(&server);
    assert_eq!(run(&mut redis, "LOCK.RELEASE k holder"), YES);
    let mut fences: Vec<i64> = waiters
        .iter_mut()
        .map(|waiter| fence(waiter.reply()))
        .collect();
    assert_eq!(lock_info(&mut redis, "k", "holding"), Value::Int(250));
    assert_eq!(stream.take().len(), 3, "a write for each hundred");
    assert!(fences.is_sorted());
    fences.dedup();
    assert_eq!(fences.len(), 250);
    assert_eq!(gauge(&mut redis, "grants_by_release_total"), 250);
}

#[test]
fn a_key_that_others_delete_is_given_to_all_who_may_share_it() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut readers = ["a", "b", "c"].map(|owner| wait_for(&server, owner, "SHARED"));
    assert_eq!(run(&mut redis, "DEL k"), YES);
    for reader in &mut readers {
        fence(reader.reply());
    }
    assert_eq!(holders(&mut redis, "k"), ["a", "b", "c"]);
    assert_eq!(gauge(&mut redis, "grants_by_deletion_total"), 3);
}

#[test]
fn all_who_are_let_in_for_one_reason_count_under_it() {
    let server = Server::start();
    let mut redis = server.connect();
    for (end, cause) in [("DEL k", "deletion"), ("LOCK.RENEW k holder 1", "expiry")] {
        hold(&mut redis, "k");
        let mut waiters = join_many_by(&server, 130, reader);
        assert_eq!(run(&mut redis, end), YES);
        for waiter in &mut waiters {
            fence(waiter.reply());
        }
        let counted = gauge(&mut redis, &format!("grants_by_{cause}_total"));
        assert_eq!(counted, 130, "{cause}");
        assert_eq!(run(&mut redis, "DEL k"), YES);
    }
}

/// Others can change a value and leave its length and its end as they are.
#[test]
fn room_that_shows_in_the_value_only_is_found_all_the_same() {
    let server = with_a_slow_cron().start();
    let mut redis = server.connect();
    hold_by_two(&mut redis, "k", ["a", "b"]);
    let mut waiter = wait_for(&server, "c", "LIMIT 9");
    let list: String = from_redis_value(ask!(redis, "GET", "k").unwrap()).unwrap();
    let roomier = list.replace(":0002:0001:", ":0009:0001:");
    assert_eq!(ask!(redis, "SET", "k", roomier, "KEEPTTL"), OK);

    eventually("the room is found", || {
        holders(&mut redis, "k") == ["a", "b", "c"]
    });
    fence(waiter.reply());
}

#[test]
fn an_acquire_that_finds_room_serves_those_who_wait_before_it() {
    let server = Server::start();
    let mut redis = server.connect();
    hold(&mut redis, "k");
    let mut readers = ["a", "b"].map(|owner| wait_for(&server, owner, "SHARED"));
    // In one turn of the loop, so that no timer comes between.
    let both = format!("DEL k; LOCK.ACQUIRE k new {LONG} SHARED; LOCK.ACQUIRE k writer {LONG}");
    let mut pipeline = redis::pipe();
    for command in both.split("; ") {
        pipeline.add_command(words(command));
    }
    let (_, new, writer): (i64, i64, Option<i64>) = pipeline.query(&mut redis).unwrap();
    let fences = readers.each_mut().map(|reader| fence(reader.reply()));
    assert!(fences[0] < fences[1] && fences[1] < new, "{fences:?} {new}");
    assert_eq!(writer, None);
    assert_eq!(holders(&mut redis, "k"), ["a", "b", "new"]);
}

#[test]
fn a_grant_whose_client_was_gone_is_taken_back_from_this_holder_only() {
    let server = Server::start();
    let mut redis = server.connect();
    granted(&mut redis, &format!("LOCK.ACQUIRE k stays {LONG} LIMIT 2"));
    granted(&mut redis, &format!("LOCK.ACQUIRE k leaves {LONG} LIMIT 2"));
    let gone = wait_for(&server, "gone", "LIMIT 2");
    let mut next = wait_for(&server, "next", "LIMIT 2");
    pipeline(&format!(
        "LOCK.RELEASE k leaves; CLIENT KILL ID {}",
        gone.id
    ))
    .exec(&mut redis)
    .unwrap();
    fence(next.reply());
    assert_eq!(holders(&mut redis, "k"), ["stays", "next"]);
    assert_eq!(gauge(&mut redis, "grants_taken_back_total"), 1);
    assert_eq!(gauge(&mut redis, "grants_by_release_total"), 2);

    // And with nobody behind it, the others stay.
    let gone = wait_for(&server, "gone", "LIMIT 2");
    pipeline(&format!("LOCK.RELEASE k next; CLIENT KILL ID {}", gone.id))
        .exec(&mut redis)
        .unwrap();
    eventually("it is taken back", || {
        gauge(&mut redis, "grants_taken_back_total") == 2
    });
    assert_eq!(holders(&mut redis, "k"), ["stays"]);
    assert_eq!(run(&mut redis, "LOCK.RENEW k stays 1000"), YES);
}

#[test]
fn all_whose_clients_were_gone_are_taken_back_with_one_write() {
    let server = Server::start();
    let mut redis = server.connect();
    granted(&mut redis, &format!("LOCK.ACQUIRE k stays {LONG} SHARED"));
    granted(&mut redis, &format!("LOCK.ACQUIRE k ends {LONG} LIMIT 2"));
    let gone = ["a", "b", "c"].map(|owner| wait_for(&server, owner, "SHARED"));
    let mut stream = Stream::of(&server);
    let kills = gone
        .each_ref()
        .map(|gone| format!("; CLIENT KILL ID {}", gone.id));
    pipeline(&format!("LOCK.RELEASE k ends{}", kills.concat()))
        .exec(&mut redis)
        .unwrap();
    eventually("they are taken back", || {
        gauge(&mut redis, "grants_taken_back_total") == 3
    });
    assert_eq!(holders(&mut redis, "k"), ["stays"]);
    assert_eq!(stream.take().len(), 2, "one to grant, one to take back");
}
