//! Locks with several holders: places, readers and writers, and who changes from one to the other.

use std::time::{Duration, Instant};

use redis::Value as Reply;
use serde_json::json;
use testkit::proxy::Proxy;
use testkit::waiting::{lock_info, queue};
use testkit::{NO, OK, Server, YES, ask, eventually};

use super::{
    calls, connections, eventually_free, eventually_renewed, eventually_waiting, exists, lock_of,
    ms, renewals,
};
use crate::agent::{Client, Held, Kind, Pending};

/// Owner and fence of each holder, in order, of a lock that may have several.
#[track_caller]
fn holders(server: &Server, key: &str) -> Vec<(String, u64)> {
    let Reply::Array(holders) = lock_info(&mut server.connect(), key, "holders") else {
        panic!("{key} has no list of holders");
    };
    holders
        .into_iter()
        .map(|holder| {
            let (_, owner, _, fence): (String, String, String, u64) = told(holder);
            (owner, fence)
        })
        .collect()
}

/// The first four of a map's names and values.
fn told<T: redis::FromRedisValue>(map: Reply) -> T {
    let Reply::Array(fields) = map else {
        panic!("{map:?} is no map");
    };
    let first = fields.into_iter().take(4).collect();
    redis::from_redis_value(Reply::Array(first)).unwrap()
}

fn of<'a>(held: impl IntoIterator<Item = &'a Held<'a>>) -> Vec<(String, u64)> {
    let held = held.into_iter();
    held.map(|held| (held.owner.clone(), held.fence)).collect()
}

#[track_caller]
fn read<'a>(client: &Client<'a>, key: &str) -> Held<'a> {
    client.acquire(key).shared().held()
}

fn wait_to_read<'a>(client: &Client<'a>, key: &str) -> Pending<'a> {
    client.acquire(key).shared().wait(25_000).begin()
}

pub fn as_many_hold_a_lock_as_its_limit_says(kind: &Kind) {
    let (server, agent, other) = (Server::start(), kind.start(), kind.start());
    let (client, elsewhere) = (agent.open(&server), other.open(&server));
    let place = || client.acquire("pool").limit(3).ttl(1500);
    let mut held: Vec<_> = (0..3).map(|_| place().held()).collect();
    assert!(held.is_sorted_by_key(|held| held.fence));
    assert_eq!(holders(&server, "pool"), of(&held));
    assert_eq!(place().answer(), "busy");
    assert_eq!(elsewhere.acquire("pool").limit(3).answer(), "busy");
    // It would have more company than it allows.
    assert_eq!(client.acquire("pool").limit(2).answer(), "busy");
    // And here the others would.
    assert_eq!(client.acquire("pool").limit(4).answer(), "busy");
    // Each three times, and past the ttl.
    eventually_renewed(&server, 10);

    let waiting = elsewhere.acquire("pool").limit(3).wait(25_000).begin();
    eventually_waiting(&server, "pool", 1);
    assert_eq!(held.remove(1).release(), "yes");
    held.push(waiting.held());
    assert_eq!(holders(&server, "pool"), of(&held));
    for held in held {
        assert_eq!(held.renew(), "yes");
        assert_eq!(held.times_lost(), 0);
        assert_eq!(held.release(), "yes");
    }
    assert!(!exists(&server, "pool"));
}

pub fn a_limit_that_makes_no_sense_is_refused_before_anything_is_sent(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let client = agent.open(&server);
    let invalid = "invalid";
    assert_eq!(client.acquire("pool").limit(0).answer(), invalid);
    assert_eq!(client.acquire("pool").limit(1001).answer(), invalid);
    assert_eq!(client.acquire("pool").limit(3).shared().answer(), invalid);
    assert_eq!(calls(&server, "lock.acquire"), 0);

    // For one alone nothing is said that an older module would not understand.
    let mut redis = server.connect();
    let slower_than = ["CONFIG", "SET", "slowlog-log-slower-than"];
    assert_eq!(ask!(redis, &slower_than, 0), OK);
    assert_eq!(client.acquire("pool").limit(1).held().release(), "yes");
    assert_eq!(ask!(redis, &slower_than, -1), OK);
    let slow = ask!(redis, "SLOWLOG", "GET", -1).unwrap();
    let slow: Vec<Vec<Reply>> = redis::from_redis_value(slow).unwrap();
    let commands = slow.into_iter().map(|mut entry| entry.swap_remove(3));
    let mut commands = commands.map(|words| redis::from_redis_value::<Vec<String>>(words).unwrap());
    let acquire = commands.find(|words| words[0].eq_ignore_ascii_case("LOCK.ACQUIRE"));
    assert_eq!(acquire.unwrap().len(), 4, "key, owner and ttl");

    let held = client.acquire("pool").limit(1000).held();
    assert_eq!(holders(&server, "pool"), of([&held]));
}

pub fn readers_share_and_a_writer_is_alone(kind: &Kind) {
    let (server, agent, other) = (Server::start(), kind.start(), kind.start());
    let (client, elsewhere) = (agent.open(&server), other.open(&server));
    let readers = [read(&client, "book"), read(&elsewhere, "book")];
    assert_eq!(elsewhere.acquire("book").answer(), "busy");
    let [first, second] = readers;
    assert_eq!(first.release(), "yes");
    assert_eq!(elsewhere.acquire("book").answer(), "busy");
    assert_eq!(second.release(), "yes");
    let writer = elsewhere.acquire("book").held();
    assert!(writer.fence > second.fence);
    assert_eq!(client.acquire("book").shared().answer(), "busy");
    assert_eq!(writer.release(), "yes");
    assert_eq!(read(&client, "book").release(), "yes");
}

pub fn a_reader_does_not_pass_a_waiting_writer(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let client = agent.open(&server);
    let reader = read(&client, "book");
    let writer = client.wait_for("book", 30_000, 25_000);
    eventually_waiting(&server, "book", 1);
    assert_eq!(client.acquire("book").shared().answer(), "busy");
    let later = [wait_to_read(&client, "book"), wait_to_read(&client, "book")];
    eventually_waiting(&server, "book", 3);
    assert_eq!(reader.release(), "yes");
    let writer = writer.held();
    assert_eq!(
        lock_of(&server, "book"),
        (writer.owner.clone(), writer.fence)
    );
    assert!(!later.iter().any(|reader| reader.is_answered()));
    assert_eq!(writer.release(), "yes");
    // Together, in the order in which they came.
    let later = later.map(Pending::held);
    assert!(writer.fence < later[0].fence && writer.fence < later[1].fence);
    assert_eq!(holders(&server, "book").len(), 2);
    for reader in later {
        assert_eq!(reader.release(), "yes");
    }
}

pub fn a_killed_holder_frees_its_place_and_no_other(kind: &Kind) {
    let (server, killed, agent) = (Server::start(), kind.start(), kind.start());
    let client = agent.open(&server);
    let place = || client.acquire("pool").limit(2);
    let there = place().ttl(1500).held();
    let _killed = killed
        .open(&server)
        .acquire("pool")
        .limit(2)
        .ttl(2000)
        .held();
    let waiting = place().wait(25_000).begin();
    eventually_waiting(&server, "pool", 1);
    killed.kill9();
    let start = Instant::now();
    let next = waiting.held();
    assert!(start.elapsed() < ms(4000), "{:?}", start.elapsed());
    assert_eq!(holders(&server, "pool"), of([&there, &next]));
    assert_eq!(place().answer(), "busy");
    assert_eq!(there.times_lost(), 0);
    assert_eq!(there.release(), "yes");
    assert_eq!(next.release(), "yes");
}

pub fn a_grant_of_a_place_that_was_not_heard_is_found_among_the_holders(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let proxy = Proxy::to(&server);
    let full = [0, 1].map(|_| agent.open(&server).acquire("pool").limit(2).held());
    // It asks every second.
    let waiting = agent.open(&proxy).acquire("pool").limit(2).ttl(3000);
    let waiting = waiting.wait(25_000).begin();
    eventually_waiting(&server, "pool", 1);
    let owner = queue(&mut server.connect(), "pool").remove(0);
    let [first, _second] = full;
    let replies = proxy.replies();
    proxy.swallow_replies();
    assert_eq!(first.release(), "yes");
    eventually("its grant is on the way to nobody", || {
        proxy.replies() > replies
    });
    let (_, fence) = holders(&server, "pool").remove(1);
    proxy.mend();
    let held = waiting.held();
    assert_eq!((&held.owner, held.fence), (&owner, fence));
    assert_eq!(held.release(), "yes");
}

pub fn a_cancelled_wait_for_a_place_leaves_nothing(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let client = agent.open(&server);
    let there = client.acquire("pool").limit(2).ttl(600_000).held();
    let place = || client.acquire("pool").limit(2).ttl(600_000).wait(60_000);
    let mut granted = Vec::new();
    for micros in (0..3000).step_by(60) {
        // Of a place that is free, and of one that is not or becomes free meanwhile.
        let [one, other] = [0, 1].map(|_| place().begin());
        for asked in [
            one.cancel_after(Duration::from_micros(micros)),
            other.cancel_after(Duration::ZERO),
        ] {
            if asked.answer() == "yes" {
                granted.push(asked.held());
            }
        }
        for held in granted.drain(..) {
            assert_eq!(held.release(), "yes");
        }
    }
    agent.settled();
    eventually_waiting(&server, "pool", 0);
    eventually("only one holds a place", || {
        holders(&server, "pool") == of([&there])
    });
    assert_eq!(there.release(), "yes");
    let mut redis = server.connect();
    eventually("no key is left", || ask!(redis, "DBSIZE") == NO);
}

pub fn info_tells_every_holder(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let client = agent.open(&server);
    let one = read(&client, "book");
    let told = json!({
        "owner": null, "fence": null, "waiters": 0,
        "limit": 1000, "holding": 1, "holders": [one.owner],
    });
    assert_eq!(client.info("book"), told);
    let other = client.acquire("book").limit(3).held();
    client.wait_for("book", 30_000, 20_000);
    eventually_waiting(&server, "book", 1);
    let told = json!({
        "owner": null, "fence": null, "waiters": 1,
        "limit": 3, "holding": 2, "holders": [one.owner, other.owner],
    });
    assert_eq!(client.info("book"), told);
}

pub fn an_upgrade_is_one_try(kind: &Kind) {
    let (server, agent, other) = (Server::start(), kind.start(), kind.start());
    let (client, elsewhere) = (agent.open(&server), other.open(&server));
    let (one, two) = (read(&client, "book"), read(&elsewhere, "book"));
    let before = of([&one, &two]);
    let start = Instant::now();
    assert_eq!(one.upgrade(), "busy");
    assert_eq!(two.upgrade(), "busy");
    assert!(start.elapsed() < ms(5000), "it waits for nobody");
    assert_eq!(holders(&server, "book"), before, "held on as it was");
    assert_eq!(two.renew(), "yes");

    assert_eq!(two.release(), "yes");
    // It is no newcomer, and passes who waits.
    let writer = elsewhere.wait_for("book", 30_000, 25_000);
    eventually_waiting(&server, "book", 1);
    let upgraded = one.upgrade();
    assert_eq!(upgraded, "yes");
    let fence = upgraded.number("fence");
    assert!(fence > two.fence, "{upgraded:?}");
    assert!(upgraded.remaining() > ms(25_000), "{upgraded:?}");
    assert_eq!(lock_of(&server, "book"), (one.owner.clone(), fence));
    assert_eq!(client.acquire("book").shared().answer(), "busy");
    // Once more changes nothing.
    assert_eq!(one.upgrade().number("fence"), fence);
    assert_eq!(one.renew(), "yes");
    assert!(!writer.is_answered());
    assert_eq!(one.release(), "yes");
    assert!(writer.held().fence > fence);
}

pub fn a_downgrade_lets_readers_in(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let client = agent.open(&server);
    let held = client.hold("book", 1500);
    let mut waiting = Vec::new();
    for _ in 0..2 {
        waiting.push(wait_to_read(&client, "book"));
        eventually_waiting(&server, "book", waiting.len() as i64);
    }
    let writer = client.wait_for("book", 30_000, 25_000);
    eventually_waiting(&server, "book", 3);
    let downgraded = held.downgrade();
    assert_eq!(downgraded, "yes");
    let fence = downgraded.number("fence");
    assert!(fence > held.fence, "{downgraded:?}");
    let readers: Vec<_> = waiting.into_iter().map(Pending::held).collect();
    let mut all = vec![(held.owner.clone(), fence)];
    all.extend(of(&readers));
    assert_eq!(holders(&server, "book"), all);
    // Each at its own time, and past the ttl of the first.
    eventually_renewed(&server, 5);
    assert_eq!(held.times_lost(), 0);
    assert_eq!(held.upgrade(), "busy");
    assert_eq!(held.release(), "yes");
    assert!(!writer.is_answered());
    for reader in readers {
        assert_eq!(reader.release(), "yes");
    }
    assert_eq!(writer.held().release(), "yes");
}

pub fn a_change_leaves_an_extended_lease_as_long_as_it_is(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let client = agent.open(&server);
    let held = client.acquire("book").ttl(1500).shared().held();
    assert_eq!(held.extend(9000), "yes");
    let ttl = || testkit::number(ask!(server.connect(), "PTTL", "book"));
    for change in ["upgrade", "downgrade"] {
        let answer = held.ask(change);
        assert_eq!(answer, "yes");
        assert!(answer.remaining() > ms(6000), "{change}: {answer:?}");
        assert!(held.remaining() > ms(6000), "{change}");
        assert!(ttl() > 6000, "{change}: {}", ttl());
    }
}

pub fn an_upgrade_of_a_lost_lock_takes_nothing(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let client = agent.open(&server);
    let mut redis = server.connect();
    for change in ["upgrade", "downgrade"] {
        let held = read(&client, "book");
        let acquired = calls(&server, "lock.acquire");
        assert_eq!(ask!(redis, "DEL", "book"), YES);
        let changed = held.ask(change);
        assert!(changed == "lost: gone", "it was granted anew: {changed:?}");
        assert_eq!(held.lost().0, "gone");
        assert_eq!(held.ask(change), "lost: gone", "a loss is final");

        let held = read(&client, "taken");
        assert_eq!(ask!(redis, "SET", "taken", "somebody", "PX", 60_000), OK);
        assert_eq!(held.ask(change), "lost: taken");
        assert_eq!(calls(&server, "lock.acquire"), acquired + 1, "it asked");
        assert!(!exists(&server, "book"));
        assert_eq!(ask!(redis, "DEL", "taken"), YES);
    }
}

pub fn an_upgrade_whose_reply_is_lost_is_an_upgrade(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let proxy = Proxy::to(&server);
    let client = agent.open(&proxy);
    let held = client.acquire("book").shared().ttl(12_000).held();
    proxy.delay_replies(ms(800));
    let upgrading = held.begin("upgrade", json!({}));
    eventually("it is granted unheard", || {
        calls(&server, "lock.acquire") == 2
    });
    proxy.cut();
    eventually("the reply is lost", || connections(&server) == 0);
    proxy.mend();
    let upgraded = upgrading.answer();
    assert_eq!(upgraded, "yes");
    let granted = (held.owner.clone(), upgraded.number("fence"));
    assert_eq!(lock_of(&server, "book"), granted);
    assert_eq!(calls(&server, "lock.acquire"), 3);
    assert_eq!(held.times_lost(), 0);
    assert_eq!(held.release(), "yes");
    assert!(!exists(&server, "book"));
}

pub fn an_upgrade_that_nobody_answers_costs_no_lock(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let proxy = Proxy::to(&server);
    let client = agent.open(&proxy);
    let held = client.acquire("book").shared().ttl(12_000).held();
    proxy.stop();
    let start = Instant::now();
    assert_eq!(held.upgrade(), "unreachable");
    assert!(start.elapsed() < ms(6000), "{:?}", start.elapsed());
    proxy.mend();
    eventually("it is renewed", || held.remaining() > ms(10_000));
    assert_eq!(held.times_lost(), 0);
    assert_eq!(held.upgrade(), "yes");
    assert_eq!(held.release(), "yes");
    eventually_free(&server, "book");
}

pub fn a_downgrade_that_arrives_late_makes_no_writer_share(kind: &Kind) {
    let (server, agent) = (Server::start(), kind.start());
    let proxy = Proxy::to(&server);
    let held = agent.open(&proxy).hold("book", 12_000);
    proxy.delay_replies(ms(800));
    let (renewed, replies) = (renewals(&server), proxy.replies());
    let downgrading = held.begin("downgrade", json!({}));
    eventually("it is renewed first, and the reply is on its way", || {
        renewals(&server) > renewed && proxy.replies() > replies
    });
    // What is asked after it stays on the way for long.
    proxy.stop_old_connections();
    proxy.delay_replies(Duration::ZERO);
    let downgraded = downgrading.answer();
    let upgraded = held.upgrade();
    let acquired = calls(&server, "lock.acquire");
    proxy.mend();
    eventually("it arrives", || calls(&server, "lock.acquire") > acquired);
    let reader = agent.open(&server).acquire("book").shared().answer();
    assert!(
        upgraded != "yes" || reader == "busy",
        "a reader beside a writer: {downgraded:?}, {upgraded:?}, {reader:?}"
    );
    assert_eq!(held.times_lost(), 0);
    assert_eq!(held.release(), "yes");
}
