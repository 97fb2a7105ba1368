//! The watchdog: one thread that does all talking to the server and keeps every lock.
//!
//! It is a thread of its own, so that nothing the caller does with its threads can stop a renewal.
//! Inside runs one loop, which owns all leases; whatever takes time is a task that reports back to
//! the loop. Leases stand in the order in which they want attention, and renewals that are due
//! together travel in one pipeline, so a hundred thousand locks need no more than a timer and a
//! connection.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Weak};
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tracing::{debug, error, warn};

use crate::asking::{Asking, Grant, Request, show};
use crate::clock;
use crate::error::Error;
use crate::held::{self, Grip, Held, Released, Renewed};
use crate::lease::{Action, Answer, LONGEST_ATTEMPT, Lease, Lost, Moment};
use crate::network::Network;
use crate::place::Node;
use crate::wire;

/// The timers of the runtime stand still while the machine is suspended. So that a loss is told
/// within a second after it wakes up, no sleep is longer.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// One pipeline must not keep the server from others: a thousand renewals take it a millisecond or
/// two.
const BATCH: usize = 1000;

pub(crate) type LeaseId = u64;
type Reply<T> = oneshot::Sender<Result<T, Error>>;

/// What a handle or a builder wants.
pub(crate) enum Message {
    /// With the way to the watchdog that the handle will use: it keeps the thread alive until then.
    Acquire(
        Box<Request>,
        mpsc::UnboundedSender<Message>,
        Caller,
        Reply<Option<Held>>,
    ),
    /// For another ttl than agreed, if there is one.
    Renew(LeaseId, Option<Duration>, Reply<Renewed>),
    /// Give it up, but keep it until so long after the grant.
    Release(LeaseId, Duration, Reply<Released>),
    /// Give it up; nobody wants to hear how it went.
    Drop(LeaseId),
    /// Forget it; it lapses by itself.
    Leave(LeaseId),
    /// Any other command about a key.
    Ask(Vec<u8>, Cmd, Caller, Reply<Value>),
    /// Tell when all that was given up before this message has ended: true, or false at that time.
    Settled(Moment, Reply<bool>),
    /// Give up everything, and end. True when nothing is left, or false at that time.
    Close(Moment, Reply<bool>),
}

/// Gone when nobody waits for the answer any more.
type Caller = Weak<()>;

/// How long an answer to any other command may take.
const ASK_TIMEOUT: Duration = Duration::from_secs(5);

/// After so many failures the caller of `release` hears that nobody answers; it goes on being
/// tried. Two, since the first may be a connection that broke long ago.
const RELEASE_FAILURES_TOLD: u32 = 2;

/// Starts the thread. It ends when nobody can send to it any more and nothing is left to do.
pub(crate) fn start(network: Network) -> Result<mpsc::UnboundedSender<Message>, Error> {
    let (sender, inbox) = mpsc::unbounded_channel();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(no_watchdog)?;
    let watchdog = Watchdog {
        network: Arc::new(network),
        inbox,
        leases: HashMap::new(),
        order: BTreeSet::new(),
        tasks: JoinSet::new(),
        next_id: 0,
        asking: HashMap::new(),
        settling: Vec::new(),
        closing: Vec::new(),
        closed: watch::Sender::new(false),
    };
    let (hand_over, handed_over) = std::sync::mpsc::channel();
    let thread = std::thread::Builder::new()
        .name("lockkeeper".to_owned())
        .spawn(move || {
            let Ok((runtime, watchdog)): Result<(Runtime, Watchdog), _> = handed_over.recv() else {
                return;
            };
            let closing = runtime.block_on(watchdog.run());
            // Takes the connections along.
            drop(runtime);
            for (_, reply) in closing {
                let _ = reply.send(Ok(true));
            }
        });
    if let Err(error) = thread {
        // Dropped where the caller runs, within another runtime, it would panic.
        runtime.shutdown_background();
        return Err(no_watchdog(error));
    }
    // It cannot have ended: it has nothing yet.
    let _ = hand_over.send((runtime, watchdog));
    Ok(sender)
}

fn no_watchdog(error: std::io::Error) -> Error {
    Error::NoWatchdog(error.to_string())
}

struct Watchdog {
    network: Arc<Network>,
    inbox: mpsc::UnboundedReceiver<Message>,
    leases: HashMap<LeaseId, Entry>,
    /// Every lease that wants attention, by when.
    order: BTreeSet<(Moment, LeaseId)>,
    tasks: JoinSet<Report>,
    next_id: LeaseId,
    /// What is being asked for, and by whom. A lock that is granted has the same id.
    asking: HashMap<LeaseId, Caller>,
    settling: Vec<Settling>,
    /// Who wants to hear when nothing is left, and when at the latest.
    closing: Vec<(Moment, Reply<bool>)>,
    /// Whether somebody has closed us; told to all that is being asked for.
    closed: watch::Sender<bool>,
}

/// Somebody who wants to hear when these have ended.
struct Settling {
    given_up: Vec<LeaseId>,
    until: Moment,
    reply: Reply<bool>,
}

struct Entry {
    lease: Lease,
    key: Arc<[u8]>,
    owner: Arc<str>,
    min_replicas: u32,
    granted_at: Moment,
    /// Its place in the order, if it has one.
    attention_at: Option<Moment>,
    /// The other end of the handle; none if nobody holds one.
    grip: Option<Grip>,
    /// Who wants to hear of a renewal, and since when: one that left before tells nothing new.
    renewing: Vec<(Moment, Reply<Renewed>)>,
    /// Who wants to hear how the release ends, and until when.
    releasing: Option<(Moment, Reply<Released>)>,
    /// How the release ended, as far as is known.
    released: Result<Released, Error>,
}

/// What a task brings back to the loop.
enum Report {
    Acquired {
        id: LeaseId,
        request: Box<Request>,
        result: Result<Option<Grant>, Error>,
        /// The owners that may have been granted it, or wait, without our knowing.
        in_doubt: Vec<String>,
        sender: mpsc::UnboundedSender<Message>,
        reply: Reply<Option<Held>>,
    },
    Answered {
        sent_at: Moment,
        answers: Vec<(LeaseId, Result<Option<Lost>, Error>)>,
    },
    Asked(LeaseId),
}

/// What commands must have in common to travel together: the node, the replicas that must
/// acknowledge them, and the time by which they are given up.
type Route = (Node, u32, Moment);

impl Watchdog {
    /// Gives back who wants to hear that it has ended.
    async fn run(mut self) -> Vec<(Moment, Reply<bool>)> {
        let mut open = true;
        let mut messages = Vec::new();
        loop {
            let sleep = self
                .attend(clock::now())
                .min(self.tell_settled(clock::now()));
            let closed = !open || *self.closed.borrow();
            if closed && self.leases.is_empty() && self.tasks.is_empty() {
                return self.closing;
            }
            tokio::select! {
                count = self.inbox.recv_many(&mut messages, BATCH), if open => open = count > 0,
                Some(report) = self.tasks.join_next() => self.settle(report),
                () = tokio::time::sleep(sleep), if self.has_dates() => {}
            }
            while let Some(report) = self.tasks.try_join_next() {
                self.settle(report);
            }
            for message in messages.drain(..) {
                self.hear(message);
            }
        }
    }

    /// Does what is due and tells for how long nothing more will be.
    fn attend(&mut self, now: Moment) -> Duration {
        let mut batches = HashMap::new();
        while let Some(&(at, id)) = self.order.first().filter(|(at, _)| *at <= now) {
            self.order.remove(&(at, id));
            self.attend_to(id, now, &mut batches);
        }
        for (route, commands) in batches {
            self.send(route, commands, now);
        }
        let next = self.order.first().map(|(at, _)| at.since(clock::now()));
        next.unwrap_or(LONGEST_SLEEP).min(LONGEST_SLEEP)
    }

    fn attend_to(
        &mut self,
        id: LeaseId,
        now: Moment,
        batches: &mut HashMap<Route, Vec<(LeaseId, Cmd)>>,
    ) {
        let Some(entry) = self.leases.get_mut(&id) else {
            return;
        };
        entry.attention_at = None;
        if entry
            .releasing
            .as_ref()
            .is_some_and(|(until, _)| *until <= now)
        {
            entry.tell_released();
        }
        loop {
            let (command, min_replicas, give_up_at) = match entry.lease.next(now) {
                Action::Sleep(until) => {
                    let told = entry.releasing.as_ref().map(|(until, _)| *until);
                    let until = told.map_or(until, |told| told.min(until));
                    entry.attention_at = Some(until);
                    self.order.insert((until, id));
                    return;
                }
                Action::Idle => return,
                Action::Lose(lost) => {
                    entry.lose(lost);
                    continue;
                }
                Action::End => {
                    entry.end();
                    self.leases.remove(&id);
                    return;
                }
                Action::Renew { ttl, give_up_at } => {
                    // A shorter ttl than what remains counts from now.
                    if let Some(grip) = &entry.grip {
                        grip.extend(entry.lease.ends_at());
                    }
                    let command = wire::renew(&entry.key, &entry.owner, ttl);
                    (command, entry.min_replicas, give_up_at)
                }
                // A release that no replica knows of ends by the ttl, which is harmless.
                Action::Release { give_up_at } => (
                    wire::release(&entry.key, entry.owner.as_bytes()),
                    0,
                    give_up_at,
                ),
            };
            let route = (self.network.node_of(&entry.key), min_replicas, give_up_at);
            batches.entry(route).or_default().push((id, command));
        }
    }

    fn send(&mut self, route: Route, mut commands: Vec<(LeaseId, Cmd)>, sent_at: Moment) {
        let (node, min_replicas, give_up_at) = route;
        while !commands.is_empty() {
            let rest = commands.split_off(commands.len().min(BATCH));
            let (ids, batch): (Vec<_>, Vec<_>) =
                std::mem::replace(&mut commands, rest).into_iter().unzip();
            let (network, node) = (Arc::clone(&self.network), node.clone());
            self.tasks.spawn(async move {
                let within = give_up_at.since(clock::now());
                let replies = network
                    .exchange(node, batch, None, min_replicas, within)
                    .await;
                let answers = replies
                    .into_iter()
                    .map(|reply| reply.map_err(|failure| failure.error))
                    .map(|reply| reply.and_then(wire::refused));
                Report::Answered {
                    sent_at,
                    answers: ids.into_iter().zip(answers).collect(),
                }
            });
        }
    }

    fn hear(&mut self, message: Message) {
        match message {
            Message::Acquire(_, _, _, reply) if *self.closed.borrow() => {
                let _ = reply.send(Err(Error::closed()));
            }
            Message::Ask(_, _, _, reply) if *self.closed.borrow() => {
                let _ = reply.send(Err(Error::closed()));
            }
            Message::Acquire(request, sender, caller, reply) => {
                self.acquire(request, sender, caller, reply);
            }
            Message::Renew(id, ttl, reply) => {
                if let Some(entry) = self.leases.get_mut(&id) {
                    let now = clock::now();
                    entry.renewing.push((now, reply));
                    match ttl {
                        Some(ttl) => entry.lease.extend(ttl, now),
                        None => entry.lease.renew_now(now),
                    }
                    entry.tell_if_lost();
                    self.want_attention(id);
                }
            }
            Message::Release(id, keep_for, reply) => self.give_up(id, keep_for, Some(reply)),
            Message::Drop(id) => self.give_up(id, Duration::ZERO, None),
            Message::Leave(id) => {
                if let Some(mut entry) = self.leases.remove(&id) {
                    entry.let_go();
                    if let Some(at) = entry.attention_at {
                        self.order.remove(&(at, id));
                    }
                }
            }
            Message::Settled(until, reply) => self.settling.push(Settling {
                given_up: self.given_up(),
                until,
                reply,
            }),
            Message::Close(until, reply) => {
                self.closing.push((until, reply));
                self.close();
            }
            Message::Ask(key, command, caller, reply) => {
                let id = self.new_id();
                self.asking.insert(id, caller);
                let network = Arc::clone(&self.network);
                self.tasks.spawn(async move {
                    let answer = network.ask(&key, command, None, 0, ASK_TIMEOUT).await;
                    let _ = reply.send(answer.map_err(|failure| failure.error));
                    Report::Asked(id)
                });
            }
        }
    }

    /// What nobody wants any more, and has not ended yet.
    fn given_up(&self) -> Vec<LeaseId> {
        let leases = self.leases.iter();
        let leases = leases.filter_map(|(id, entry)| entry.lease.is_given_up().then_some(*id));
        let asking = self.asking.iter();
        let asking = asking.filter_map(|(id, caller)| (caller.strong_count() == 0).then_some(*id));
        leases.chain(asking).collect()
    }

    /// Gives up everything; the loop ends when that is done.
    fn close(&mut self) {
        self.closed.send_replace(true);
        let ids: Vec<_> = self.leases.keys().copied().collect();
        for id in ids {
            if let Some(entry) = self.leases.get_mut(&id) {
                // Before it is released, and not taken back by `let_go`.
                entry.take_away();
                self.give_up(id, Duration::ZERO, None);
            }
        }
    }

    /// Tells who wants to hear that something has ended, and for how long nobody more will.
    fn tell_settled(&mut self, now: Moment) -> Duration {
        for mut settling in std::mem::take(&mut self.settling) {
            let has_ended =
                |id: &LeaseId| !self.leases.contains_key(id) && !self.asking.contains_key(id);
            // What has ended stays so, so that each is looked at until then and not again.
            while settling.given_up.pop_if(|id| has_ended(id)).is_some() {}
            if settling.given_up.is_empty() {
                let _ = settling.reply.send(Ok(true));
            } else if settling.until <= now {
                let _ = settling.reply.send(Ok(false));
            } else {
                self.settling.push(settling);
            }
        }
        let late = self.closing.extract_if(.., |(until, _)| *until <= now);
        for (_, reply) in late {
            let left = self.leases.len();
            warn!(
                left,
                "closed, but not all is released: what is left ends by its ttl"
            );
            let _ = reply.send(Ok(false));
        }
        let settling = self.settling.iter().map(|settling| settling.until);
        let closing = self.closing.iter().map(|(until, _)| *until);
        let next = settling.chain(closing).min();
        next.map_or(LONGEST_SLEEP, |until| until.since(now).min(LONGEST_SLEEP))
    }

    /// Whether anything is to be done at some time.
    fn has_dates(&self) -> bool {
        !(self.order.is_empty() && self.settling.is_empty() && self.closing.is_empty())
    }

    fn acquire(
        &mut self,
        request: Box<Request>,
        sender: mpsc::UnboundedSender<Message>,
        caller: Caller,
        mut reply: Reply<Option<Held>>,
    ) {
        let id = self.new_id();
        self.asking.insert(id, caller);
        let (network, mut closed) = (Arc::clone(&self.network), self.closed.subscribe());
        self.tasks.spawn(async move {
            let mut asking = Asking::new(&network, &request);
            let result = tokio::select! {
                result = asking.answer() => result,
                () = reply.closed() => Ok(None),
                _ = closed.wait_for(|closed| *closed) => Err(Error::closed()),
            };
            let in_doubt = match &result {
                Ok(Some(_)) => asking.former(),
                _ => asking.in_doubt(),
            };
            Report::Acquired {
                id,
                request,
                result,
                in_doubt,
                sender,
                reply,
            }
        });
    }

    fn give_up(&mut self, id: LeaseId, keep_for: Duration, reply: Option<Reply<Released>>) {
        // A handle that was released is then dropped: its first word counts.
        if let Some(entry) = self.leases.get_mut(&id)
            && !entry.lease.is_given_up()
        {
            entry
                .lease
                .give_up(entry.granted_at + keep_for, clock::now());
            entry.releasing = reply.map(|reply| (clock::now() + LONGEST_ATTEMPT, reply));
            entry.let_go();
            self.want_attention(id);
        }
    }

    fn settle(&mut self, report: Result<Report, tokio::task::JoinError>) {
        // A task that panicked said nothing: its leases end by their clock, its caller hears that
        // nobody answered.
        match report {
            Ok(Report::Acquired {
                id,
                request,
                result,
                in_doubt,
                sender,
                reply,
            }) => {
                self.asking.remove(&id);
                for owner in in_doubt {
                    self.clean_up(id, &request, owner);
                }
                match result {
                    // It was on its way when we were closed.
                    Ok(Some(grant)) if *self.closed.borrow() => {
                        self.clean_up(id, &request, grant.owner);
                        let _ = reply.send(Err(Error::closed()));
                    }
                    Ok(Some(grant)) => self.grant(id, &request, grant, sender, reply),
                    result => {
                        let _ = reply.send(result.map(|_| None));
                    }
                }
            }
            Ok(Report::Answered { sent_at, answers }) => {
                let now = clock::now();
                for (id, answer) in answers {
                    if let Some(entry) = self.leases.get_mut(&id) {
                        entry.answered(sent_at, answer, now);
                        self.want_attention(id);
                    }
                }
            }
            Ok(Report::Asked(id)) => {
                self.asking.remove(&id);
            }
            Err(panic) => error!(%panic, "a task of the watchdog has panicked"),
        }
    }

    fn grant(
        &mut self,
        id: LeaseId,
        request: &Request,
        grant: Grant,
        sender: mpsc::UnboundedSender<Message>,
        reply: Reply<Option<Held>>,
    ) {
        let now = clock::now();
        let lease = Lease::granted(request.terms, grant.sent_at, now);
        let (grip, handle) = held::join(lease.ends_at());
        let mut entry = Entry::new(lease, request, &grant.owner, now);
        entry.grip = Some(grip);
        let (key, owner) = (Arc::clone(&entry.key), Arc::clone(&entry.owner));
        debug!(key = %show(&key), %owner, fence = grant.fence, "acquired");
        self.insert(id, entry);
        let held = Held::new(id, key, owner, grant.fence, handle, sender);
        if reply.send(Ok(Some(held))).is_err() {
            // Nobody is there to take it. At once, so that it does not count as settled meanwhile.
            self.give_up(id, Duration::ZERO, None);
        }
    }

    /// Releases what the acquire `asked` may have been granted without our knowing. Who waits for
    /// that acquire waits for this as well.
    fn clean_up(&mut self, asked: LeaseId, request: &Request, owner: String) {
        let now = clock::now();
        let entry = Entry::new(Lease::in_doubt(request.terms, now), request, &owner, now);
        let id = self.new_id();
        for settling in &mut self.settling {
            if settling.given_up.contains(&asked) {
                settling.given_up.push(id);
            }
        }
        self.insert(id, entry);
    }

    fn new_id(&mut self) -> LeaseId {
        self.next_id += 1;
        self.next_id
    }

    fn insert(&mut self, id: LeaseId, entry: Entry) {
        self.leases.insert(id, entry);
        self.want_attention(id);
    }

    fn want_attention(&mut self, id: LeaseId) {
        if let Some(entry) = self.leases.get_mut(&id) {
            if let Some(at) = entry.attention_at.take() {
                self.order.remove(&(at, id));
            }
            let now = clock::now();
            entry.attention_at = Some(now);
            self.order.insert((now, id));
        }
    }
}

impl Entry {
    fn new(lease: Lease, request: &Request, owner: &str, granted_at: Moment) -> Entry {
        Entry {
            lease,
            key: Arc::from(request.key.as_slice()),
            owner: Arc::from(owner),
            min_replicas: request.min_replicas,
            granted_at,
            attention_at: None,
            grip: None,
            renewing: Vec::new(),
            releasing: None,
            released: Err(Error::Unreachable(
                "no answer before the lock ended".to_owned(),
            )),
        }
    }

    fn answered(&mut self, sent_at: Moment, reply: Result<Option<Lost>, Error>, now: Moment) {
        let answer = match &reply {
            Ok(None) => Answer::Yes,
            Ok(Some(lost)) => Answer::No(*lost),
            Err(_) => Answer::Failed,
        };
        if !self.lease.answered(sent_at, answer, now) {
            return;
        }
        if self.lease.is_given_up() {
            self.released = reply.map(|refused| match refused {
                Some(lost) if !self.lease.was_released_unheard() => Released::Lost(lost),
                _ => Released::Yes,
            });
            let failures = self.lease.failures();
            if let Err(error) = &self.released
                && failures >= RELEASE_FAILURES_TOLD
            {
                if failures == RELEASE_FAILURES_TOLD {
                    let key = show(&self.key);
                    warn!(%key, owner = %self.owner, %error, "not released yet");
                }
                self.tell_released();
            }
            return;
        }
        if let Err(error) = &reply {
            let (key, left) = (show(&self.key), self.lease.ends_at().since(now));
            warn!(%key, owner = %self.owner, ?left, %error, "a renewal has failed");
        }
        if let (Answer::Yes, Some(grip)) = (answer, &self.grip) {
            grip.extend(self.lease.ends_at());
        }
        // A no is told by `lose`, together with the loss.
        if !matches!(answer, Answer::No(_)) {
            let asked_before = |(asked_at, _): &mut (Moment, _)| *asked_at <= sent_at;
            for (_, renewing) in self.renewing.extract_if(.., asked_before) {
                let _ = renewing.send(reply.clone().map(|_| Renewed::Yes));
            }
            if !self.renewing.is_empty() {
                self.lease.renew_now(now);
            }
        }
    }

    fn lose(&mut self, lost: Lost) {
        error!(key = %show(&self.key), owner = %self.owner, %lost, "the lock is lost");
        if let Some(grip) = &self.grip {
            grip.lose(lost);
        }
        self.tell_if_lost();
    }

    /// The holder hears that it holds nothing any more, if it did until now.
    fn take_away(&mut self) {
        if let Some(grip) = self.grip.take()
            && self.lease.lost().is_none()
        {
            grip.lose(Lost::Gone);
            for (_, renewing) in self.renewing.drain(..) {
                let _ = renewing.send(Ok(Renewed::Lost(Lost::Gone)));
            }
        }
    }

    /// The holder has let go: whoever still listens for a loss will hear of none.
    fn let_go(&mut self) {
        if let Some(grip) = self.grip.take() {
            grip.let_go();
        }
    }

    /// Answers those who want to hear of a renewal that will not come any more.
    fn tell_if_lost(&mut self) {
        if let Some(lost) = self.lease.lost() {
            for (_, renewing) in self.renewing.drain(..) {
                let _ = renewing.send(Ok(Renewed::Lost(lost)));
            }
        }
    }

    fn tell_released(&mut self) {
        if let Some((_, releasing)) = self.releasing.take() {
            let _ = releasing.send(match self.lease.lost() {
                Some(lost) if lost != Lost::MaxHold => Ok(Released::Lost(lost)),
                _ => self.released.clone(),
            });
        }
    }

    fn end(&mut self) {
        debug!(key = %show(&self.key), owner = %self.owner, released = ?self.released, "given up");
        self.tell_released();
    }
}
