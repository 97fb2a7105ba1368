//! How a lock is asked for: one try on the shared connection, then a wait in the server's queue on
//! a connection of its own, and again from the start after whatever went wrong.
//!
//! As long as no request can arrive that is not expected any more, it is asked in the same name, so
//! that a reply that was lost is given again and a place in the queue is kept. A request that may
//! still be on its way when its connection is given up is followed by a RELEASE, so whoever asks
//! again needs another name: in the same one, the late pair would give the lock away.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, warn};
use uuid::Uuid;

use crate::clock;
use crate::error::Error;
use crate::lease::{Moment, Terms};
use crate::network::{Failure, Health, Network};
use crate::place::Node;
use crate::wire::{self, Info};

/// How long the server may take, after a wait is over, to say so before we say it ourselves. The
/// rest of the 100 ms in which `wait` returns is for a busy machine.
const OVERTIME: Duration = Duration::from_millis(60);

/// The least time for one try: a new connection over TLS to another continent takes most of it. A
/// ttl may be shorter, since what was granted long ago is renewed before it is handed out.
const LEAST_TRY: Duration = Duration::from_secs(1);

/// The most, whatever the ttl: twice, since a try that got no answer is made once more, it is the
/// 5 s after which a caller who does not wait hears that nobody answers.
const LONGEST_TRY: Duration = Duration::from_millis(2500);

/// Who waits looks every third of the ttl whether the server is still there, but no more and no
/// less often than this.
const LEAST_LOOK: Duration = Duration::from_secs(1);
const LONGEST_LOOK: Duration = Duration::from_secs(5);

/// The pause before a server that gave an error is asked again, doubled every time: a server that restarts needs seconds, a proxy that cut a connection needs none.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LAST_PAUSE: Duration = Duration::from_millis(500);

/// How often whoever runs the program is reminded that a wait goes on although nobody answers it:
/// the wait itself may tell nothing for hours.
const WARN_EVERY: Duration = Duration::from_secs(30);

/// What somebody asks for.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) key: Vec<u8>,
    pub(crate) label: String,
    pub(crate) terms: Terms,
    pub(crate) wait: Wait,
    pub(crate) min_replicas: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// One try.
    No,
    For(Duration),
    ForEver,
}

/// A lock that was granted.
#[derive(Clone, Debug)]
pub(crate) struct Grant {
    pub(crate) owner: String,
    pub(crate) fence: u64,
    /// When the request left that the lease counts from.
    pub(crate) sent_at: Moment,
}

/// One request on its way.
pub(crate) struct Asking<'a> {
    network: &'a Arc<Network>,
    request: &'a Request,
    /// In whose name it is asked.
    owner: String,
    started: Moment,
    /// What went wrong since the server last answered.
    trouble: Option<Error>,
    /// When the log last said so.
    warned_at: Option<Instant>,
    /// Whether the server may have granted something or queued us without our knowing.
    in_doubt: bool,
    /// Those in whose names was asked before, until they are known to have nothing.
    former: Vec<String>,
}

/// What became of a place in the queue.
enum Found {
    /// It was granted, and nobody heard of it.
    Granted,
    /// It is there.
    Queued,
    /// It is not: the server is another, or has lost it.
    Absent,
    /// The server answers, but not this question.
    Unknown,
}

/// In whose name a wait that led nowhere is begun again.
enum Again {
    /// In the same: what was asked has arrived.
    Same,
    Another,
}

impl<'a> Asking<'a> {
    pub(crate) fn new(network: &'a Arc<Network>, request: &'a Request) -> Asking<'a> {
        Asking {
            network,
            request,
            owner: fresh_owner(request),
            started: clock::now(),
            trouble: None,
            warned_at: None,
            in_doubt: false,
            former: Vec::new(),
        }
    }

    /// The owners who may hold something, or wait, after the request failed or was cancelled.
    pub(crate) fn in_doubt(mut self) -> Vec<String> {
        if self.in_doubt {
            self.former.push(self.owner);
        }
        self.former
    }

    /// The same after it was granted.
    pub(crate) fn former(self) -> Vec<String> {
        self.former
    }

    /// None if the lock is busy for as long as the caller wants to wait.
    pub(crate) async fn answer(&mut self) -> Result<Option<Grant>, Error> {
        let limit = match self.request.wait {
            // Twice: one whose reply got lost is asked again.
            Wait::No => self.try_limit() * 2,
            Wait::For(wait) => wait.saturating_add(OVERTIME),
            Wait::ForEver => Duration::MAX,
        };
        let answered = timeout(limit, self.ask()).await;
        // Of a server that has not said by then that the wait is over nothing is known.
        answered.unwrap_or_else(|_| Err(self.trouble.take().unwrap_or_else(no_answer)))
    }

    async fn ask(&mut self) -> Result<Option<Grant>, Error> {
        let (mut pause, mut tries) = (FIRST_PAUSE, 0);
        loop {
            tries += 1;
            let begun = clock::now();
            let answer = match self.try_once().await {
                Ok(None) if self.time_left().is_some() => self.wait_in_queue().await,
                answer => answer,
            };
            match answer {
                Ok(Some(grant)) => return Ok(Some(grant)),
                // The place was given up before its time: by CLIENT UNBLOCK, or by somebody who
                // released in our name. Or the grant had lapsed.
                Ok(None) if self.time_left().is_some() => self.trouble = None,
                Ok(None) => return Ok(None),
                Err(error) => {
                    // One who does not wait asks twice, and as one who waits without bound only a
                    // server that was there before.
                    let ends = match self.request.wait {
                        Wait::No => tries == 2 || !self.network.was_reached(),
                        Wait::For(_) => self.time_left().is_none(),
                        Wait::ForEver => !self.network.was_reached(),
                    };
                    if ends || !error.is_passing() {
                        return Err(error);
                    }
                    self.log_trouble(&error);
                    self.trouble = Some(error);
                }
            }
            if clock::now().since(begun) > LAST_PAUSE {
                pause = FIRST_PAUSE;
            }
            sleep(pause).await;
            pause = (pause * 2).min(LAST_PAUSE);
        }
    }

    /// That it is asked again after an error: a warning the first time in a wait, and then now and
    /// then.
    fn log_trouble(&mut self, error: &Error) {
        let (key, owner) = (show(&self.request.key), &self.owner);
        let quiet = self.warned_at.is_some_and(|at| at.elapsed() < WARN_EVERY);
        if quiet || self.request.wait == Wait::No {
            debug!(%key, %owner, %error, "asking again");
        } else {
            warn!(%key, %owner, %error, "waiting on, although the server cannot be asked");
            self.warned_at = Some(Instant::now());
        }
    }

    /// What is left of the wait; none when it is over.
    fn time_left(&self) -> Option<Duration> {
        match self.request.wait {
            Wait::No => None,
            Wait::For(wait) => wait
                .checked_sub(clock::now().since(self.started))
                .filter(|left| *left >= Duration::from_millis(1)),
            Wait::ForEver => Some(Duration::MAX),
        }
    }

    fn try_limit(&self) -> Duration {
        let attempt = self.request.terms.attempt();
        attempt.clamp(LEAST_TRY, LONGEST_TRY)
    }

    fn release(&self) -> Cmd {
        wire::release(&self.request.key, self.owner.as_bytes())
    }

    async fn try_once(&mut self) -> Result<Option<Grant>, Error> {
        // Should the time run out during this, that is what was wrong.
        self.trouble.get_or_insert_with(no_answer);
        self.release_former().await;
        let request = self.request;
        let command = wire::acquire(&request.key, &self.owner, request.terms.ttl, None);
        let sent_at = clock::now();
        let (network, limit) = (self.network, self.try_limit());
        let behind = Some(self.release());
        let ask = network.ask(&request.key, command, behind, request.min_replicas, limit);
        let fence = self.settle(ask, wire::fence).await?;
        self.trouble = None;
        match fence {
            Some(fence) => self.fresh(fence, sent_at).await,
            None => Ok(None),
        }
    }

    /// What was granted in a former name would keep us out.
    async fn release_former(&mut self) {
        for owner in std::mem::take(&mut self.former) {
            let release = wire::release(&self.request.key, owner.as_bytes());
            // Should this be cancelled, it is not known to have nothing.
            self.former.push(owner);
            let ask = self
                .network
                .ask(&self.request.key, release, None, 0, self.try_limit());
            match ask.await {
                Ok(_) => drop(self.former.pop()),
                Err(_) => return,
            }
        }
    }

    async fn wait_in_queue(&mut self) -> Result<Option<Grant>, Error> {
        let request = self.request;
        let Some(left) = self.time_left() else {
            return Ok(None);
        };
        let command = wire::acquire(&request.key, &self.owner, request.terms.ttl, Some(left));
        // A release on the shared connection may overtake the request, which then finds the lock free
        // and takes it for nobody. Behind the request, on its own connection, it cannot.
        let release = self.release();
        let (owner, in_doubt) = (self.owner.clone(), self.in_doubt);
        let behind = Mutex::new(None);
        let sent_at = clock::now();
        let network = self.network;
        let wait = network.wait(&request.key, &request.label, &command, &release, &behind);
        let watch = watch(network, request, &owner, in_doubt, &behind);
        let wait = async {
            tokio::select! {
                biased;
                answer = wait => answer.map(Ok),
                again = watch => Ok(Err(again)),
            }
        };
        self.in_doubt = true;
        match wait.await {
            Ok(Err(Again::Same)) => Err(no_answer()),
            Ok(Err(Again::Another)) => {
                self.ask_as_another();
                Err(no_answer())
            }
            Ok(Ok(value)) => {
                self.in_doubt = in_doubt;
                match wire::fence(value)? {
                    None => Ok(None),
                    // It was written by whoever handed it over, so what our connection could ask the
                    // replicas about would not tell of it.
                    Some(fence) if request.min_replicas > 0 => self.renewed(fence).await,
                    Some(fence) => self.fresh(fence, sent_at).await,
                }
            }
            Err(failure) => Err(self.doubt(in_doubt, failure)),
        }
    }

    /// The lease of a grant began at some moment after it was asked for, that nobody here saw. If
    /// that is long ago, what can be counted on starts with a renewal.
    async fn fresh(&mut self, fence: u64, sent_at: Moment) -> Result<Option<Grant>, Error> {
        if self.request.terms.is_stale(sent_at, clock::now()) {
            return self.renewed(fence).await;
        }
        let owner = self.owner.clone();
        Ok(Some(Grant {
            owner,
            fence,
            sent_at,
        }))
    }

    /// None if the grant has lapsed meanwhile.
    async fn renewed(&mut self, fence: u64) -> Result<Option<Grant>, Error> {
        let request = self.request;
        let command = wire::renew(&request.key, &self.owner, request.terms.ttl);
        self.in_doubt = true;
        let sent_at = clock::now();
        let limit = request.terms.attempt();
        let ask = self
            .network
            .ask(&request.key, command, None, request.min_replicas, limit);
        // A renewal that arrives late lengthens nothing that was released.
        let refused = match ask.await {
            Ok(value) => wire::refused(value)?,
            Err(failure) => return Err(failure.error),
        };
        let owner = self.owner.clone();
        Ok(refused.is_none().then_some(Grant {
            owner,
            fence,
            sent_at,
        }))
    }

    /// Awaits a reply, during which, and for good after it failed, it is in doubt whether the server
    /// granted something or queued us.
    async fn settle<T>(
        &mut self,
        ask: impl Future<Output = Result<Value, Failure>>,
        read: impl FnOnce(Value) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let before = std::mem::replace(&mut self.in_doubt, true);
        match ask.await {
            Ok(value) => {
                self.in_doubt = before;
                read(value)
            }
            Err(failure) => Err(self.doubt(before, failure)),
        }
    }

    /// What a failure leaves in doubt, and in whose name it is asked next.
    fn doubt(&mut self, before: bool, failure: Failure) -> Error {
        // A refused command changed nothing; but one that too few replicas acknowledged was not
        // refused, it was carried out.
        self.in_doubt = match &failure.error {
            Error::Refused(line) => before || line.starts_with("NOREPLICAS "),
            _ => true,
        };
        if failure.is_silent {
            self.ask_as_another();
        }
        failure.error
    }

    fn ask_as_another(&mut self) {
        let owner = fresh_owner(self.request);
        self.former.push(std::mem::replace(&mut self.owner, owner));
        self.in_doubt = false;
    }
}

/// Watches over a wait, and ends when it leads nowhere: the server has been replaced, or
/// the connection to it leads to nobody any more. Asks on the shared connection, once for all who
/// wait there, and each for itself only after something has happened to that.
async fn watch(
    network: &Arc<Network>,
    request: &Request,
    owner: &str,
    was_in_doubt: bool,
    sent: &Mutex<Option<Cmd>>,
) -> Again {
    let every = (request.terms.ttl / 3).clamp(LEAST_LOOK, LONGEST_LOOK);
    let is_sent = || {
        sent.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_some()
    };
    let (node, mut healthy) = (network.node_of(&request.key), None::<Health>);
    let mut pause = every;
    loop {
        let was_sent = is_sent();
        let before = *healthy.get_or_insert_with(|| network.health(&node));
        sleep(pause).await;
        pause = every;
        let looked = look(network, request, owner, Some(every)).await;
        let Ok(mut found) = looked else {
            // Nobody is there yet who would know better.
            pause = LEAST_LOOK;
            continue;
        };
        let health = network.health(&node);
        let is_same = is_same_node(network, request, &node) && health == before;
        if found.is_none() && !is_same {
            let Ok(own) = look(network, request, owner, None).await else {
                continue;
            };
            found = own;
        }
        match found {
            None => {}
            Some(Found::Granted) => return keep_name(sent),
            Some(Found::Unknown) if is_same => {}
            Some(Found::Queued) if health.silent == before.silent => healthy = Some(health),
            // Others of our connections kept silent, so this one may. That it has arrived is known
            // of the first request in this name only.
            Some(Found::Queued) if !was_in_doubt => return keep_name(sent),
            Some(Found::Absent) if !was_sent => {}
            Some(Found::Queued | Found::Absent | Found::Unknown) => {
                network.suspect(&node);
                return Again::Another;
            }
        }
    }
}

/// What has arrived needs no RELEASE behind it.
fn keep_name(sent: &Mutex<Option<Cmd>>) -> Again {
    *sent.lock().unwrap_or_else(PoisonError::into_inner) = None;
    Again::Same
}

fn is_same_node(network: &Network, request: &Request, node: &Node) -> bool {
    network.node_of(&request.key) == *node
}

/// Looks for a place in the queue; none if somebody else has just asked there. Then, and when no
/// time is given, it is not for all.
async fn look(
    network: &Arc<Network>,
    request: &Request,
    owner: &str,
    for_all: Option<Duration>,
) -> Result<Option<Found>, Error> {
    // A renewal of what is not held yet changes nothing, and is what a user may do who may not look.
    let looks = network.may_look();
    let question = match looks {
        true => wire::info(&request.key),
        false => wire::renew(&request.key, owner, request.terms.ttl),
    };
    let answer = match for_all {
        Some(every) => network.probe(&request.key, question, every).await,
        None => {
            let ask = network.ask(&request.key, question, None, 0, LONGEST_TRY);
            ask.await.map(Some).map_err(|failure| failure.error)
        }
    };
    let info = match answer {
        Ok(None) => return Ok(None),
        Ok(Some(value)) if !looks => {
            return Ok(Some(match wire::refused(value)? {
                None => Found::Granted,
                Some(_) => Found::Unknown,
            }));
        }
        Ok(Some(value)) => Info::read(value)?,
        Err(error) if !error.is_passing() => {
            network.note_that_looking_is_refused();
            return Ok(Some(Found::Unknown));
        }
        Err(error) => return Err(error),
    };
    let Some(info) = info else {
        return Ok(Some(Found::Absent));
    };
    let is_ours = |name: &[u8]| name == owner.as_bytes();
    Ok(Some(if info.owner.as_deref().is_some_and(is_ours) {
        Found::Granted
    } else if info.queue.iter().any(|waiter| is_ours(&waiter.owner)) {
        Found::Queued
    } else if info.waiters > info.queue.len() as u64 {
        Found::Unknown
    } else {
        Found::Absent
    }))
}

fn fresh_owner(request: &Request) -> String {
    format!("{}:{}", request.label, Uuid::new_v4())
}

fn no_answer() -> Error {
    Error::Unreachable("no answer in time".to_owned())
}

pub(crate) use crate::printable::printable as show;
