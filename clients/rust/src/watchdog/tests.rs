//! The loop against servers that follow a script, on a clock that moves when all is idle: seconds
//! pass in no time.

use std::sync::{Mutex, MutexGuard, PoisonError};

use redis::{Value, cmd};
use tokio::task::JoinHandle;
use tokio::time::{Instant, advance, sleep, timeout};

use super::*;
use crate::acquisition::Wait;
use crate::lease::{Lost, Renewed, Reply, Terms, Upgraded};
use crate::message::Change;
use crate::pending::Pending;
use crate::status::Notice;
use crate::wire::Limit;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn started_at() -> Instant {
    thread_local!(static STARTED_AT: Instant = Instant::now());
    STARTED_AT.with(|at| *at)
}

/// Tokio's, which stands still but when all is idle.
fn clock() -> Moment {
    Moment::after_boot(ms(1_000_000) + started_at().elapsed())
}

/// One pipeline as the servers got it.
#[derive(Clone, Debug, PartialEq)]
struct Sent {
    /// Milliseconds after the start of the test.
    at_ms: u128,
    node: Node,
    min_replicas: u32,
    commands: Vec<String>,
}

/// How the servers reply to every command of a pipeline, and after how long.
type Script = dyn Fn(&Sent) -> (Duration, Result<Value, Error>) + Send + Sync;

struct Scripted {
    sent: Arc<Mutex<Vec<Sent>>>,
    /// When the connections were closed, in milliseconds after the start of the test.
    disconnected_at: Arc<Mutex<Vec<u128>>>,
    script: Box<Script>,
}

impl Scripted {
    fn log(&self) -> MutexGuard<'_, Vec<Sent>> {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

const YES: (Duration, Result<Value, Error>) = (Duration::ZERO, Ok(Value::Int(1)));

fn no_reply(after: Duration) -> (Duration, Result<Value, Error>) {
    (after, Err(Error::Unreachable("as scripted".to_owned())))
}

/// A key is on the node that stands before its colon.
fn node_of(key: &[u8]) -> Node {
    let key = String::from_utf8_lossy(key);
    Node::named(key.split_once(':').map_or("one", |(node, _)| node))
}

fn text(command: &Cmd) -> String {
    let words = command.args_iter().map(|arg| match arg {
        redis::Arg::Simple(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        _ => "?".to_owned(),
    });
    words.collect::<Vec<_>>().join(" ")
}

impl Servers for Scripted {
    fn node_of(&self, key: &[u8]) -> Node {
        node_of(key)
    }

    async fn exchange(
        self: &Arc<Self>,
        node: Node,
        commands: Vec<Cmd>,
        min_replicas: u32,
        within: Duration,
    ) -> Vec<Result<Value, Failure>> {
        let sent = Sent {
            at_ms: started_at().elapsed().as_millis(),
            node,
            min_replicas,
            commands: commands.iter().map(text).collect(),
        };
        let (after, reply) = (self.script)(&sent);
        self.log().push(sent);
        sleep(after.min(within)).await;
        let reply = match after <= within {
            true => reply.map_err(Failure::from),
            false => Err(Failure {
                error: Error::no_answer(),
                is_silent: true,
            }),
        };
        vec![reply; commands.len()]
    }

    async fn ask(
        self: &Arc<Self>,
        key: &[u8],
        command: Cmd,
        within: Duration,
    ) -> Result<Value, Error> {
        let mut replies = self.exchange(node_of(key), vec![command], 0, within).await;
        replies.remove(0).map_err(|failure| failure.error)
    }

    /// Granted at once, but for the key "busy", for which one waits without end.
    async fn acquire(
        self: &Arc<Self>,
        request: &Request,
        cancelled: impl Future<Output = Result<Option<Grant>, Error>> + Send,
    ) -> Acquisition {
        if request.key == b"busy" {
            return Acquisition {
                result: cancelled.await,
                in_doubt: vec!["waiter".to_owned()],
            };
        }
        let grant = Grant {
            owner: "owner".to_owned(),
            fence: 7,
            sent_at: clock(),
        };
        Acquisition {
            result: Ok(Some(grant)),
            in_doubt: Vec::new(),
        }
    }

    fn disconnect(&self) {
        let at_ms = started_at().elapsed().as_millis();
        self.disconnected_at.lock().unwrap().push(at_ms);
    }
}

/// A watchdog that runs, and what it has sent.
struct Running {
    sender: MessageSender,
    sent: Arc<Mutex<Vec<Sent>>>,
    disconnected_at: Arc<Mutex<Vec<u128>>>,
    watchdog: JoinHandle<Vec<Responder<bool>>>,
}

impl Running {
    fn start(
        script: impl Fn(&Sent) -> (Duration, Result<Value, Error>) + Send + Sync + 'static,
    ) -> Running {
        started_at();
        let (sender, inbox) = mpsc::unbounded_channel();
        let (sent, disconnected_at) = (Arc::default(), Arc::default());
        let servers = Scripted {
            sent: Arc::clone(&sent),
            disconnected_at: Arc::clone(&disconnected_at),
            script: Box::new(script),
        };
        Running {
            sender,
            sent,
            disconnected_at,
            watchdog: tokio::spawn(Watchdog::new(servers, clock, inbox).run()),
        }
    }

    fn send<T>(&self, message: impl FnOnce(Responder<T>, Caller) -> Message) -> Pending<T> {
        let (responder, pending) = Pending::new();
        let message = message(responder, pending.caller());
        assert!(self.sender.send(message).is_ok(), "the watchdog has ended");
        pending
    }

    fn acquire(&self, key: &str, ttl: Duration, min_replicas: u32) -> Pending<Option<Granted>> {
        let request = Box::new(Request {
            key: key.as_bytes().to_vec(),
            label: "label".to_owned(),
            terms: Terms {
                ttl,
                max_hold: None,
            },
            wait: Wait::ForEver,
            min_replicas,
            limit: Limit::EXCLUSIVE,
        });
        let sender = self.sender.clone();
        self.send(|responder, caller| Message::Acquire(request, sender, caller, responder))
    }

    async fn hold(&self, key: &str, ttl: Duration) -> Granted {
        self.acquire(key, ttl, 0).await.unwrap().unwrap()
    }

    fn change<T>(&self, held: &Granted, change: fn(Responder<T>) -> Change) -> Pending<T> {
        let id = held.id;
        self.send(move |responder, _| Message::Change(id, change(responder)))
    }

    /// What was sent since the last call.
    fn sent(&self) -> Vec<Sent> {
        std::mem::take(&mut self.sent.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The same, as when and what.
    fn sent_commands(&self) -> Vec<(u128, String)> {
        let sent = self.sent().into_iter();
        let commands = sent.flat_map(
            |Sent {
                 at_ms, commands, ..
             }| { commands.into_iter().map(move |command| (at_ms, command)) },
        );
        commands.collect()
    }
}

fn lost(granted: &Granted) -> Option<Lost> {
    match granted.status.notice() {
        Notice::Lost(lost) => Some(lost),
        Notice::Nothing | Notice::GivenUp => None,
    }
}

async fn until(at_ms: u64) {
    sleep(ms(at_ms).saturating_sub(started_at().elapsed())).await;
    // So that whatever is due at the same moment has been done.
    sleep(ms(1)).await;
}

#[tokio::test(start_paused = true)]
async fn connections_are_closed_10_s_after_the_last_lock_and_no_sooner() {
    let running = Running::start(|_| YES);
    let granted = running.hold("book", ms(6000)).await;
    until(30_000).await;
    drop(granted);
    until(80_000).await;
    assert_eq!(*running.disconnected_at.lock().unwrap(), [40_001]);
}

#[tokio::test(start_paused = true)]
async fn renewals_that_are_due_together_travel_in_batches() {
    let running = Running::start(|_| YES);
    let mut held = Vec::new();
    for number in 0..2500 {
        held.push(running.hold(&format!("book{number}"), ms(6000)).await);
    }
    until(2000).await;
    let sent = running.sent();
    let sizes: Vec<_> = sent.iter().map(|sent| sent.commands.len()).collect();
    assert_eq!(sizes, [1000, 1000, 500]);
    assert!(sent.iter().all(|sent| sent.at_ms == 2000));
    until(4000).await;
    assert_eq!(running.sent().len(), 3, "and together again");
    assert!(held.iter().all(|held| lost(held).is_none()));
}

#[tokio::test(start_paused = true)]
async fn only_what_goes_the_same_way_shares_a_batch() {
    let running = Running::start(|_| YES);
    let _held = [
        running.hold("a:1", ms(6000)).await,
        running.hold("a:2", ms(6000)).await,
        running.hold("b:1", ms(6000)).await,
        running.acquire("a:3", ms(6000), 2).await.unwrap().unwrap(),
    ];
    until(2000).await;
    let mut batches: Vec<_> = running.sent().into_iter().collect();
    batches.sort_by_key(|sent| (sent.commands[0].clone(), sent.min_replicas));
    let batches: Vec<_> = batches
        .iter()
        .map(|sent| (&sent.node, sent.min_replicas, sent.commands.len()))
        .collect();
    let (a, b) = (Node::named("a"), Node::named("b"));
    assert_eq!(batches, [(&a, 0, 2), (&a, 2, 1), (&b, 0, 1)]);
}

#[tokio::test(start_paused = true)]
async fn every_lease_is_renewed_when_it_is_due() {
    let running = Running::start(|_| YES);
    let _held = [
        running.hold("slow", ms(12_000)).await,
        running.hold("middle", ms(6000)).await,
        running.hold("fast", ms(3000)).await,
    ];
    until(4000).await;
    let renew = |key: &str, ttl| format!("LOCK.RENEW {key} owner {ttl}");
    let mut sent = running.sent_commands();
    sent.sort();
    let expected = [
        (1000, renew("fast", 3000)),
        (2000, renew("fast", 3000)),
        (2000, renew("middle", 6000)),
        (3000, renew("fast", 3000)),
        (4000, renew("fast", 3000)),
        (4000, renew("middle", 6000)),
        (4000, renew("slow", 12_000)),
    ];
    assert_eq!(sent, expected);
}

#[tokio::test(start_paused = true)]
async fn failed_renewals_back_off_until_the_lease_ends_and_it_is_lost_before_the_server_ends_it() {
    let running = Running::start(|_| no_reply(Duration::ZERO));
    let mut held = running.hold("book", ms(6000)).await;
    let notice = held.status.first_notice().await;
    assert!(matches!(notice, Some(Notice::Lost(Lost::Expired))));
    let lost_at = started_at().elapsed();
    assert!(lost_at >= ms(5938) && lost_at < ms(5950), "{lost_at:?}");
    let at: Vec<_> = running.sent().iter().map(|sent| sent.at_ms).collect();
    assert_eq!(
        at,
        [2000, 2100, 2300, 2700, 3200, 3700, 4200, 4700, 5200, 5700]
    );
    until(20_000).await;
    assert_eq!(running.sent(), [], "a lost lock is not renewed");
}

#[tokio::test(start_paused = true)]
async fn a_silent_node_holds_up_no_renewal_of_another() {
    let is_silent = |sent: &Sent| sent.node == Node::named("silent");
    let running = Running::start(move |sent| match is_silent(sent) {
        true => no_reply(Duration::MAX),
        false => YES,
    });
    let silent = running.hold("silent:1", ms(6000)).await;
    let held = running.hold("well:1", ms(6000)).await;
    until(60_000).await;
    assert_eq!(lost(&silent), Some(Lost::Expired));
    assert_eq!(lost(&held), None);
    let (silent, well): (Vec<_>, Vec<_>) = running.sent().into_iter().partition(is_silent);
    assert_eq!(silent.len(), 4, "attempts within one lease");
    assert_eq!(well.len(), 30, "every 2 s");
}

#[tokio::test(start_paused = true)]
async fn after_a_stop_a_loss_is_reported_before_anything_is_sent() {
    let first: Arc<Mutex<Option<Granted>>> = Arc::default();
    let seen = Arc::clone(&first);
    let running = Running::start(move |_| {
        let seen = seen.lock().unwrap();
        assert_eq!(seen.as_ref().and_then(lost), Some(Lost::Expired));
        YES
    });
    let short = running.hold("short", ms(3000)).await;
    *first.lock().unwrap() = Some(short);
    let long = running.hold("long", ms(60_000)).await;
    // As a process that is stopped, or a machine that is suspended.
    advance(ms(30_000)).await;
    until(30_001).await;
    let sent = running.sent_commands();
    assert_eq!(sent.len(), 1, "{sent:?}");
    assert_eq!(sent[0].1, "LOCK.RENEW long owner 60000");
    assert_eq!(lost(&long), None);
}

#[tokio::test(start_paused = true)]
async fn a_refused_renewal_is_a_loss_at_once_and_final() {
    let running = Running::start(|_| (Duration::ZERO, Ok(Value::Int(0))));
    let held = running.hold("book", ms(6000)).await;
    until(2000).await;
    assert_eq!(lost(&held), Some(Lost::Taken));
    assert_eq!(held.status.ends_at(), Moment::after_boot(Duration::ZERO));
    let id = held.id;
    let renewed = running.send(|responder, _| Message::Renew(id, None, responder));
    assert_eq!(renewed.await, Ok(Reply::Lost(Lost::Taken)));
    let released = running.send(|responder, _| Message::Release(id, ms(0), responder));
    assert_eq!(released.await, Ok(Reply::Lost(Lost::Taken)));
    assert_eq!(running.sent().len(), 1, "nothing after the refusal");
}

#[tokio::test(start_paused = true)]
async fn a_renewal_in_flight_is_not_the_one_that_is_asked_for_meanwhile() {
    let running = Running::start(|_| (ms(100), Ok(Value::Int(1))));
    let held = running.hold("book", ms(6000)).await;
    let renew = || running.send(|responder, _| Message::Renew(held.id, None, responder));
    let first = renew();
    sleep(ms(50)).await;
    let second = renew();
    assert_eq!(first.await, Ok(Reply::Yes));
    assert_eq!(started_at().elapsed().as_millis(), 100);
    assert_eq!(second.await, Ok(Reply::Yes));
    assert_eq!(started_at().elapsed().as_millis(), 200);
    assert_eq!(running.sent().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_grant_that_nobody_takes_is_released() {
    let running = Running::start(|_| YES);
    // Its caller leaves before the watchdog has read the message, or before it reads the result.
    drop(running.acquire("early", ms(6000), 0));
    let late = running.acquire("late", ms(6000), 0);
    sleep(ms(1)).await;
    drop(late);
    sleep(ms(1)).await;
    let mut sent = running.sent_commands();
    sent.sort_by(|a, b| a.1.cmp(&b.1));
    let commands: Vec<_> = sent.iter().map(|(_, command)| command.as_str()).collect();
    assert_eq!(
        commands,
        ["LOCK.RELEASE early owner", "LOCK.RELEASE late owner"]
    );
}

#[tokio::test(start_paused = true)]
async fn what_a_cancelled_acquire_left_in_doubt_is_released() {
    let running = Running::start(|_| YES);
    let waiting = running.acquire("busy", ms(6000), 0);
    sleep(ms(1000)).await;
    assert_eq!(running.sent(), []);
    drop(waiting);
    sleep(ms(1)).await;
    let sent = running.sent_commands();
    assert_eq!(sent, [(1000, "LOCK.RELEASE busy waiter".to_owned())]);
}

#[tokio::test(start_paused = true)]
async fn a_release_is_tried_until_the_lease_ends_and_its_caller_waits_5_s_at_most() {
    let running = Running::start(|_| no_reply(Duration::MAX));
    let held = running.hold("book", ms(60_000)).await;
    let id = held.id;
    let released = running.send(|responder, _| Message::Release(id, ms(0), responder));
    let released = released.await;
    assert!(matches!(released, Err(Error::Unreachable(_))));
    assert_eq!(started_at().elapsed().as_secs(), 5);
    until(300_000).await;
    let sent = running.sent();
    assert!(sent.len() > 4 && sent.last().unwrap().at_ms < 60_000);
    let release = ["LOCK.RELEASE book owner"];
    assert!(sent.iter().all(|sent| sent.commands == release));
}

#[tokio::test(start_paused = true)]
async fn settled_waits_for_what_was_given_up_before_and_for_nothing_else() {
    let is_slow = |sent: &Sent| sent.commands[0].starts_with("LOCK.RELEASE slow");
    let running = Running::start(move |sent| match is_slow(sent) {
        true => (ms(700), Ok(Value::Int(1))),
        false => YES,
    });
    let settled = |limit| running.send(move |responder, _| Message::Settled(limit, responder));
    let _waiting = running.acquire("busy", ms(6000), 0);
    let _held = running.hold("held", ms(6000)).await;
    assert_eq!(settled(ms(0)).await, Ok(true), "nothing was given up");
    drop(running.hold("slow", ms(6000)).await);
    sleep(ms(1)).await;
    assert_eq!(settled(ms(300)).await, Ok(false));
    assert_eq!(started_at().elapsed().as_millis(), 301);
    assert_eq!(settled(ms(3000)).await, Ok(true));
    assert_eq!(started_at().elapsed().as_millis(), 700);
}

#[tokio::test(start_paused = true)]
async fn closing_takes_away_before_it_releases_and_cancels_what_is_asked_for() {
    let first: Arc<Mutex<Option<Granted>>> = Arc::default();
    let seen = Arc::clone(&first);
    let running = Running::start(move |_| {
        let seen = seen.lock().unwrap();
        assert_eq!(seen.as_ref().and_then(lost), Some(Lost::Gone));
        YES
    });
    *first.lock().unwrap() = Some(running.hold("book", ms(6000)).await);
    let waiting = running.acquire("busy", ms(6000), 0);
    sleep(ms(1)).await;
    let closing = running.send(|responder, _| Message::Close(ms(1000), responder));
    assert!(matches!(waiting.await, Err(error) if error == Error::closed()));
    let sent = Arc::clone(&running.sent);
    let responders = running.watchdog.await.unwrap();
    assert_eq!(responders.len(), 1, "once the connections have ended too");
    drop((responders, closing));
    let mut commands: Vec<_> = sent.lock().unwrap().drain(..).collect();
    commands.sort_by(|a, b| a.commands.cmp(&b.commands));
    let commands: Vec<_> = commands.iter().flat_map(|sent| &sent.commands).collect();
    assert_eq!(
        commands,
        ["LOCK.RELEASE book owner", "LOCK.RELEASE busy waiter"]
    );
}

#[tokio::test(start_paused = true)]
async fn closing_is_bounded_and_ends_with_the_last_lease() {
    let running = Running::start(|_| no_reply(Duration::MAX));
    let _held = running.hold("book", ms(30_000)).await;
    let closed = running.send(|responder, _| Message::Close(ms(300), responder));
    assert_eq!(closed.await, Ok(false));
    assert_eq!(started_at().elapsed().as_millis(), 300);
    let refused = running.acquire("other", ms(6000), 0).await;
    assert!(matches!(refused, Err(error) if error == Error::closed()));
    let responders = timeout(ms(40_000), running.watchdog).await;
    assert!(responders.unwrap().unwrap().is_empty());
    assert!(started_at().elapsed() >= ms(29_000));
}

#[tokio::test(start_paused = true)]
async fn it_ends_when_nobody_can_send_to_it_and_nothing_is_left() {
    let running = Running::start(|_| YES);
    let held = running.hold("book", ms(6000)).await;
    let (sender, watchdog) = (running.sender, running.watchdog);
    drop(sender);
    sleep(ms(60_000)).await;
    assert!(!watchdog.is_finished(), "a handle is left");
    drop(held);
    let responders = timeout(ms(1000), watchdog).await;
    assert!(responders.is_ok());
}

#[tokio::test(start_paused = true)]
async fn another_command_gets_its_reply_or_an_error_after_5_s() {
    let running = Running::start(|sent| match sent.commands[0].contains("silent") {
        true => no_reply(Duration::MAX),
        false => (Duration::ZERO, Ok(Value::Nil)),
    });
    let ask = |key: &str| {
        let (key, mut command) = (key.as_bytes().to_vec(), cmd("LOCK.INFO"));
        command.arg(&key);
        running.send(|responder, caller| Message::Ask(key, command, caller, responder))
    };
    assert_eq!(ask("book").await, Ok(Value::Nil));
    assert!(matches!(ask("silent").await, Err(Error::Unreachable(_))));
    assert_eq!(started_at().elapsed().as_secs(), 5);
}

/// Granted with this fence whoever asks, each after so long.
fn granting(fence: i64, after: Duration) -> impl Fn(&Sent) -> (Duration, Result<Value, Error>) {
    move |sent| match sent.commands[0].starts_with("LOCK.ACQUIRE") {
        true => (after, Ok(Value::Int(fence))),
        false => (after, Ok(Value::Int(1))),
    }
}

#[tokio::test(start_paused = true)]
async fn a_change_is_a_renewal_and_then_an_acquire_that_no_renewal_overtakes() {
    let running = Running::start(granting(9, ms(100)));
    let held = running.hold("book", ms(6000)).await;
    let downgraded = running.change(&held, Change::Downgrade);
    let upgraded = running.change(&held, Change::Upgrade);
    sleep(ms(150)).await;
    let renewed = running.send(|responder, _| Message::Renew(held.id, None, responder));
    assert_eq!(downgraded.await, Ok(Reply::Yes));
    assert_eq!(held.status.fence(), 9);
    assert_eq!(renewed.await, Ok(Renewed::Yes));
    assert_eq!(upgraded.await, Ok(Upgraded::Yes));
    let sent = running.sent_commands();
    let renew = "LOCK.RENEW book owner 6000".to_owned();
    let acquire = "LOCK.ACQUIRE book owner 6000".to_owned();
    let expected = [
        (0, renew.clone()),
        (100, format!("{acquire} SHARED")),
        (200, renew),
        (300, acquire),
    ];
    assert_eq!(sent, expected);
    assert_eq!(
        held.status.ends_at(),
        Moment::after_boot(ms(1_000_300 + 5938))
    );
}

#[tokio::test(start_paused = true)]
async fn a_change_that_nobody_waits_for_is_not_begun_but_one_under_way_is_ended() {
    let running = Running::start(granting(9, ms(100)));
    let held = running.hold("book", ms(6000)).await;
    drop(running.change(&held, Change::Upgrade));
    sleep(ms(1)).await;
    assert_eq!(running.sent(), []);
    let upgrading = running.change(&held, Change::Upgrade);
    sleep(ms(50)).await;
    drop(upgrading);
    sleep(ms(200)).await;
    assert_eq!(running.sent().len(), 1, "renewed, and no more");
    assert_eq!(held.status.fence(), 7);
    let upgrading = running.change(&held, Change::Upgrade);
    sleep(ms(150)).await;
    drop(upgrading);
    sleep(ms(200)).await;
    assert_eq!(running.sent().len(), 2);
    assert_eq!(held.status.fence(), 9, "it is ours");
    assert_eq!(
        running.change(&held, Change::Downgrade).await,
        Ok(Reply::Yes)
    );
}

#[tokio::test(start_paused = true)]
async fn what_is_lost_during_a_change_is_told_as_lost_and_not_taken_anew() {
    let running = Running::start(|_| (Duration::ZERO, Ok(Value::Nil)));
    let held = running.hold("book", ms(6000)).await;
    let upgraded = running.change(&held, Change::Upgrade);
    let also = running.change(&held, Change::Downgrade);
    let gone = Lost::Gone;
    assert_eq!(upgraded.await, Ok(Upgraded::Lost(gone)));
    assert_eq!(also.await, Ok(Reply::Lost(gone)));
    assert_eq!(lost(&held), Some(gone));
    let later = running.change(&held, Change::Upgrade);
    assert_eq!(later.await, Ok(Upgraded::Lost(gone)));
    assert_eq!(running.sent().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_change_that_is_refused_is_told_at_once_and_renewed_is_on() {
    let refused = Error::Refused("BADOPTION option is unknown".to_owned());
    let refusal = refused.clone();
    let running = Running::start(move |sent| match sent.commands[0].starts_with("LOCK.ACQ") {
        true => (Duration::ZERO, Err(refusal.clone())),
        false => YES,
    });
    let held = running.hold("book", ms(6000)).await;
    assert_eq!(running.change(&held, Change::Downgrade).await, Err(refused));
    assert_eq!(started_at().elapsed().as_millis(), 0);
    until(20_000).await;
    assert_eq!(lost(&held), None);
    assert_eq!(running.sent().len(), 2 + 10);
}

#[tokio::test(start_paused = true)]
async fn who_shares_what_others_hold_begins_again_and_learns_that_it_is_lost() {
    let running = Running::start(|sent| {
        let granted = match sent.commands[0].starts_with("LOCK.RENEW") {
            true if sent.at_ms == 0 => Value::Int(1),
            true => Value::Int(0),
            false => Value::Nil,
        };
        (ms(1), Ok(granted))
    });
    let held = running.hold("book", ms(6000)).await;
    let downgraded = running.change(&held, Change::Downgrade);
    assert_eq!(downgraded.await, Ok(Reply::Lost(Lost::Taken)));
}

#[tokio::test(start_paused = true)]
async fn after_a_downgrade_that_kept_silent_there_is_no_upgrade() {
    let is_slow = |sent: &Sent| sent.at_ms < 1000 && sent.commands[0].ends_with("SHARED");
    let grants = granting(9, Duration::ZERO);
    let running = Running::start(move |sent| match is_slow(sent) {
        true => no_reply(Duration::MAX),
        false => grants(sent),
    });
    let held = running.hold("book", ms(6000)).await;
    assert_eq!(
        running.change(&held, Change::Downgrade).await,
        Ok(Reply::Yes)
    );
    assert_eq!(started_at().elapsed().as_millis(), 1100, "begun again");
    running.sent();
    let upgraded = running.change(&held, Change::Upgrade).await;
    assert_eq!(upgraded, Err(Error::may_be_shared()));
    assert_eq!(running.sent(), []);
    assert_eq!(
        running.change(&held, Change::Downgrade).await,
        Ok(Reply::Yes)
    );

    // One that was refused, or whose connection the server ended, does not arrive any more.
    let running = Running::start(|sent| match sent.commands[0].ends_with("SHARED") {
        true => no_reply(Duration::ZERO),
        false => (Duration::ZERO, Ok(Value::Int(1))),
    });
    let held = running.hold("book", ms(6000)).await;
    let downgraded = running.change(&held, Change::Downgrade).await;
    assert!(matches!(downgraded, Err(Error::Unreachable(_))));
    let upgraded = running.change(&held, Change::Upgrade).await;
    assert_eq!(upgraded, Ok(Upgraded::Yes));
}

#[tokio::test(start_paused = true)]
async fn a_change_of_a_closed_lockkeeper_is_a_loss() {
    let running = Running::start(granting(9, ms(100)));
    let held = running.hold("book", ms(6000)).await;
    let upgraded = running.change(&held, Change::Upgrade);
    sleep(ms(150)).await;
    let closed = running.send(|responder, _| Message::Close(ms(1000), responder));
    assert_eq!(upgraded.await, Ok(Upgraded::Lost(Lost::Gone)));
    drop((closed, held));
    let _ = timeout(ms(5000), running.watchdog).await.unwrap();
}
