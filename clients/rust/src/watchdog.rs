//! The watchdog: one thread that does all talking to the server and keeps every lock.
//!
//! It is a thread of its own, so that nothing the caller does with its threads can stop a renewal.
//! Inside runs one loop, which owns all leases; whatever takes time is a task that reports back to
//! the loop. Leases are scheduled by when something is due, and renewals that are due together
//! travel in one pipeline, so a hundred thousand locks need no more than a timer and a connection.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tracing::{debug, error, warn};

use crate::acquisition::{Acquisition, Grant, Request};
use crate::error::Error;
use crate::lease::{Action, LONGEST_ATTEMPT, Lease, Moment, Released};
use crate::message::{Caller, Granted, LeaseId, Message, MessageSender, Responder};
use crate::network::Failure;
use crate::printable::printable;
use crate::status;
use crate::topology::Node;
use crate::wire;
use entry::Entry;
pub(crate) use servers::Servers;

mod entry;
mod servers;
#[cfg(test)]
mod tests;

/// The timers of the runtime stand still while the machine is suspended. So that a loss is reported
/// within a second after it wakes up, no sleep is longer.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// One pipeline must not keep the server from others: a thousand renewals take it a millisecond or
/// two.
const BATCH: usize = 1000;

/// How long the reply to any other command may take.
const ASK_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the connections are kept after the last lock and the last request, for the next: clients/CONTRACT.md
/// promises so much.
const KEEP_CONNECTIONS: Duration = Duration::from_secs(10);

/// What the time is on the clock that leases are counted by.
pub(crate) type Clock = fn() -> Moment;

/// Starts the thread. It ends when nobody can send to it any more and nothing is left to do.
pub(crate) fn start(servers: impl Servers, clock: Clock) -> Result<MessageSender, Error> {
    let (sender, inbox) = mpsc::unbounded_channel();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(no_watchdog)?;
    let watchdog = Watchdog::new(servers, clock, inbox);
    let (hand_over, handed_over) = std::sync::mpsc::channel();
    let thread = std::thread::Builder::new()
        .name("lockkeeper".to_owned())
        .spawn(move || {
            let Ok((runtime, watchdog)): Result<(Runtime, Watchdog<_>), _> = handed_over.recv()
            else {
                return;
            };
            let closing = runtime.block_on(watchdog.run());
            // Takes the connections along.
            drop(runtime);
            for responder in closing {
                let _ = responder.send(Ok(true));
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

struct Watchdog<S> {
    servers: Arc<S>,
    clock: Clock,
    inbox: mpsc::UnboundedReceiver<Message>,
    leases: HashMap<LeaseId, Entry>,
    /// Every lease for which something is to be done, by when.
    schedule: BTreeSet<(Moment, LeaseId)>,
    tasks: JoinSet<Report>,
    next_id: LeaseId,
    /// The requests under way, and their callers. A lock that is granted has the id of its request.
    requests: HashMap<LeaseId, Caller>,
    settling: Vec<Settling>,
    /// Who is notified when nothing is left, and when at the latest.
    closing: Vec<(Moment, Responder<bool>)>,
    /// Whether somebody has closed us; ends all acquires under way.
    closed: watch::Sender<bool>,
}

/// Somebody who is notified when these have ended.
struct Settling {
    given_up: Vec<LeaseId>,
    until: Moment,
    responder: Responder<bool>,
}

/// What a task brings back to the loop.
enum Report {
    Acquired {
        id: LeaseId,
        request: Box<Request>,
        acquisition: Acquisition,
        sender: MessageSender,
        responder: Responder<Option<Granted>>,
    },
    Exchanged {
        sent_at: Moment,
        replies: Vec<(LeaseId, Result<Value, Failure>)>,
    },
    Asked(LeaseId),
}

/// What commands must have in common to travel together: the node, the replicas that must
/// acknowledge them, and the time by which they are given up.
type Route = (Node, u32, Moment);

impl<S: Servers> Watchdog<S> {
    fn new(servers: S, clock: Clock, inbox: mpsc::UnboundedReceiver<Message>) -> Watchdog<S> {
        Watchdog {
            servers: Arc::new(servers),
            clock,
            inbox,
            leases: HashMap::new(),
            schedule: BTreeSet::new(),
            tasks: JoinSet::new(),
            next_id: 0,
            requests: HashMap::new(),
            settling: Vec::new(),
            closing: Vec::new(),
            closed: watch::Sender::new(false),
        }
    }

    fn now(&self) -> Moment {
        (self.clock)()
    }

    /// Returns who is to be notified when the connections have ended too.
    async fn run(mut self) -> Vec<Responder<bool>> {
        let mut open = true;
        let mut may_be_connected = false;
        let mut messages = Vec::new();
        loop {
            let sleep = self.run_due().min(self.notify_settled());
            let closed = !open || *self.closed.borrow();
            let is_idle = self.leases.is_empty() && self.tasks.is_empty();
            may_be_connected |= !is_idle;
            if closed && is_idle {
                let closing = self.closing.into_iter();
                return closing.map(|(_, responder)| responder).collect();
            }
            tokio::select! {
                count = self.inbox.recv_many(&mut messages, BATCH), if open => open = count > 0,
                Some(report) = self.tasks.join_next() => self.on_report(report),
                () = tokio::time::sleep(sleep), if self.has_timer() => {}
                () = tokio::time::sleep(KEEP_CONNECTIONS), if is_idle && may_be_connected => {
                    self.servers.disconnect();
                    may_be_connected = false;
                }
            }
            while let Some(report) = self.tasks.try_join_next() {
                self.on_report(report);
            }
            for message in messages.drain(..) {
                self.on_message(message);
            }
        }
    }

    /// Does what is due, and returns for how long nothing more will be. Whoever lost a lock is
    /// notified before any request is sent.
    fn run_due(&mut self) -> Duration {
        let now = self.now();
        let mut batches = HashMap::new();
        while let Some(&(at, id)) = self.schedule.first().filter(|(at, _)| *at <= now) {
            self.schedule.remove(&(at, id));
            self.run_lease(id, now, &mut batches);
        }
        for (route, commands) in batches {
            self.send(route, commands, now);
        }
        let now = self.now();
        let next = self.schedule.first().map(|(at, _)| at.since(now));
        next.unwrap_or(LONGEST_SLEEP).min(LONGEST_SLEEP)
    }

    fn run_lease(
        &mut self,
        id: LeaseId,
        now: Moment,
        batches: &mut HashMap<Route, Vec<(LeaseId, Cmd)>>,
    ) {
        let Some(entry) = self.leases.get_mut(&id) else {
            return;
        };
        entry.scheduled_at = None;
        entry.respond_if_late(now);
        loop {
            let (command, min_replicas, give_up_at) = match entry.next(now) {
                Action::Sleep(until) => {
                    let responds_at = entry.releasing.as_ref().map(|(until, _)| *until);
                    let until = responds_at.map_or(until, |at| at.min(until));
                    entry.scheduled_at = Some(until);
                    self.schedule.insert((until, id));
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
                    if let Some(status) = &entry.status {
                        status.extend(entry.lease.ends_at());
                    }
                    let command = wire::renew(&entry.key, &entry.owner, ttl);
                    (command, entry.min_replicas, give_up_at)
                }
                Action::Change { ttl, give_up_at } => {
                    let (key, limit) = (&entry.key, entry.limit());
                    let command = wire::acquire(key, &entry.owner, ttl, None, limit);
                    (command, entry.min_replicas, give_up_at)
                }
                // A release that no replica knows of ends by the ttl, which is harmless.
                Action::Release { give_up_at } => {
                    let command = wire::release(&entry.key, entry.owner.as_bytes());
                    (command, 0, give_up_at)
                }
            };
            let route = (self.servers.node_of(&entry.key), min_replicas, give_up_at);
            batches.entry(route).or_default().push((id, command));
        }
    }

    fn send(&mut self, route: Route, mut commands: Vec<(LeaseId, Cmd)>, sent_at: Moment) {
        let (node, min_replicas, give_up_at) = route;
        while !commands.is_empty() {
            let rest = commands.split_off(commands.len().min(BATCH));
            let (ids, batch): (Vec<_>, Vec<_>) =
                std::mem::replace(&mut commands, rest).into_iter().unzip();
            let (servers, node, clock) = (Arc::clone(&self.servers), node.clone(), self.clock);
            self.tasks.spawn(async move {
                let within = give_up_at.since(clock());
                let replies = servers.exchange(node, batch, min_replicas, within).await;
                Report::Exchanged {
                    sent_at,
                    replies: ids.into_iter().zip(replies).collect(),
                }
            });
        }
    }

    fn on_message(&mut self, message: Message) {
        match message {
            Message::Acquire(_, _, _, responder) if *self.closed.borrow() => {
                let _ = responder.send(Err(Error::closed()));
            }
            Message::Ask(_, _, _, responder) if *self.closed.borrow() => {
                let _ = responder.send(Err(Error::closed()));
            }
            Message::Acquire(request, sender, caller, responder) => {
                self.acquire(request, sender, caller, responder);
            }
            Message::Renew(id, ttl, responder) => {
                let now = self.now();
                if let Some(entry) = self.leases.get_mut(&id) {
                    entry.renew(ttl, now, responder);
                    self.schedule_now(id);
                }
            }
            Message::Change(id, change) => {
                if let Some(entry) = self.leases.get_mut(&id) {
                    entry.change(change);
                    self.schedule_now(id);
                }
            }
            Message::Release(id, keep_for, responder) => {
                self.give_up(id, keep_for, Some(responder));
            }
            Message::Drop(id) => self.give_up(id, Duration::ZERO, None),
            Message::Leave(id) => {
                if let Some(mut entry) = self.leases.remove(&id) {
                    entry.notify_given_up();
                    if let Some(at) = entry.scheduled_at {
                        self.schedule.remove(&(at, id));
                    }
                }
            }
            Message::Settled(limit, responder) => self.settling.push(Settling {
                given_up: self.given_up(),
                until: self.now() + limit,
                responder,
            }),
            Message::Close(limit, responder) => {
                self.closing.push((self.now() + limit, responder));
                self.close();
            }
            Message::Ask(key, command, caller, responder) => {
                let id = self.new_id();
                self.requests.insert(id, caller);
                let servers = Arc::clone(&self.servers);
                self.tasks.spawn(async move {
                    let reply = servers.ask(&key, command, ASK_TIMEOUT).await;
                    let _ = responder.send(reply);
                    Report::Asked(id)
                });
            }
        }
    }

    /// What nobody wants any more, and has not ended yet.
    fn given_up(&self) -> Vec<LeaseId> {
        let leases = self.leases.iter();
        let leases = leases.filter_map(|(id, entry)| entry.lease.is_given_up().then_some(*id));
        let requests = self.requests.iter();
        let requests =
            requests.filter_map(|(id, caller)| (caller.strong_count() == 0).then_some(*id));
        leases.chain(requests).collect()
    }

    /// Gives up everything; the loop ends when that is done.
    fn close(&mut self) {
        self.closed.send_replace(true);
        let ids: Vec<_> = self.leases.keys().copied().collect();
        for id in ids {
            if let Some(entry) = self.leases.get_mut(&id) {
                // Before it is released.
                entry.revoke();
                self.give_up(id, Duration::ZERO, None);
            }
        }
    }

    /// Notifies whoever waits for an end that has come, and returns for how long nobody more will be.
    fn notify_settled(&mut self) -> Duration {
        let now = self.now();
        for mut settling in std::mem::take(&mut self.settling) {
            let has_ended =
                |id: &LeaseId| !self.leases.contains_key(id) && !self.requests.contains_key(id);
            // What has ended stays so, so that each is checked until then and not again.
            while settling.given_up.pop_if(|id| has_ended(id)).is_some() {}
            if settling.given_up.is_empty() {
                let _ = settling.responder.send(Ok(true));
            } else if settling.until <= now {
                let _ = settling.responder.send(Ok(false));
            } else {
                self.settling.push(settling);
            }
        }
        let late = self.closing.extract_if(.., |(until, _)| *until <= now);
        for (_, responder) in late {
            let left = self.leases.len();
            warn!(
                left,
                "closed, but not all is released: what is left ends by its ttl"
            );
            let _ = responder.send(Ok(false));
        }
        let settling = self.settling.iter().map(|settling| settling.until);
        let closing = self.closing.iter().map(|(until, _)| *until);
        let next = settling.chain(closing).min();
        next.map_or(LONGEST_SLEEP, |until| until.since(now).min(LONGEST_SLEEP))
    }

    /// Whether anything is to be done at some time.
    fn has_timer(&self) -> bool {
        !(self.schedule.is_empty() && self.settling.is_empty() && self.closing.is_empty())
    }

    fn acquire(
        &mut self,
        request: Box<Request>,
        sender: MessageSender,
        caller: Caller,
        mut responder: Responder<Option<Granted>>,
    ) {
        let id = self.new_id();
        self.requests.insert(id, caller);
        let (servers, mut closed) = (Arc::clone(&self.servers), self.closed.subscribe());
        self.tasks.spawn(async move {
            let cancelled = async {
                tokio::select! {
                    () = responder.closed() => Ok(None),
                    _ = closed.wait_for(|closed| *closed) => Err(Error::closed()),
                }
            };
            let acquisition = servers.acquire(&request, cancelled).await;
            Report::Acquired {
                id,
                request,
                acquisition,
                sender,
                responder,
            }
        });
    }

    fn give_up(&mut self, id: LeaseId, keep_for: Duration, responder: Option<Responder<Released>>) {
        let now = self.now();
        // A handle that was released is dropped after that: the first message counts.
        if let Some(entry) = self.leases.get_mut(&id)
            && !entry.lease.is_given_up()
        {
            entry.lease.give_up(entry.granted_at + keep_for, now);
            entry.releasing = responder.map(|responder| (now + LONGEST_ATTEMPT, responder));
            entry.notify_given_up();
            self.schedule_now(id);
        }
    }

    fn on_report(&mut self, report: Result<Report, tokio::task::JoinError>) {
        // A task that panicked reports nothing: its leases end by their clock, and its caller gets
        // the error that nobody answered.
        match report {
            Ok(Report::Acquired {
                id,
                request,
                acquisition,
                sender,
                responder,
            }) => {
                self.requests.remove(&id);
                for owner in acquisition.in_doubt {
                    self.clean_up(id, &request, owner);
                }
                match acquisition.result {
                    // It was on its way when we were closed.
                    Ok(Some(grant)) if *self.closed.borrow() => {
                        self.clean_up(id, &request, grant.owner);
                        let _ = responder.send(Err(Error::closed()));
                    }
                    Ok(Some(grant)) => self.grant(id, &request, grant, sender, responder),
                    result => {
                        let _ = responder.send(result.map(|_| None));
                    }
                }
            }
            Ok(Report::Exchanged { sent_at, replies }) => {
                let now = self.now();
                for (id, reply) in replies {
                    if let Some(entry) = self.leases.get_mut(&id) {
                        entry.attempt_ended(sent_at, reply, now);
                        self.schedule_now(id);
                    }
                }
            }
            Ok(Report::Asked(id)) => {
                self.requests.remove(&id);
            }
            Err(panic) => error!(%panic, "a task of the watchdog has panicked"),
        }
    }

    fn grant(
        &mut self,
        id: LeaseId,
        request: &Request,
        grant: Grant,
        watchdog: MessageSender,
        responder: Responder<Option<Granted>>,
    ) {
        let now = self.now();
        let lease = Lease::granted(request.terms, grant.sent_at, now);
        let (sender, status) = status::channel(lease.ends_at(), grant.fence);
        let mut entry = Entry::new(lease, request, &grant.owner, now);
        entry.status = Some(sender);
        let granted = Granted {
            id,
            key: Arc::clone(&entry.key),
            owner: Arc::clone(&entry.owner),
            status,
            watchdog,
            pid: std::process::id(),
        };
        let (key, owner) = (printable(&granted.key), &granted.owner);
        debug!(%key, %owner, fence = grant.fence, "acquired");
        self.insert(id, entry);
        if responder.send(Ok(Some(granted))).is_err() {
            // Nobody is there to take it. At once, so that it does not count as settled meanwhile.
            self.give_up(id, Duration::ZERO, None);
        }
    }

    /// Releases what the request `asked` may have been granted without our knowing. Who waits for
    /// the end of that request waits for this as well.
    fn clean_up(&mut self, asked: LeaseId, request: &Request, owner: String) {
        let now = self.now();
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
        self.schedule_now(id);
    }

    fn schedule_now(&mut self, id: LeaseId) {
        let now = self.now();
        if let Some(entry) = self.leases.get_mut(&id) {
            if let Some(at) = entry.scheduled_at.replace(now) {
                self.schedule.remove(&(at, id));
            }
            self.schedule.insert((now, id));
        }
    }
}
