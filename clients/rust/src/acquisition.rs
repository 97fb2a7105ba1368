//! How a lock is asked for: one try on the shared connection, then a wait in the server's queue on
//! a connection of its own, and again from the start after whatever went wrong.
//!
//! As long as no request can arrive that is not expected any more, it is asked in the same name, so
//! that a reply that was lost is given again and the place in the queue is kept. A request that may
//! still be on its way when its connection is given up is followed by a RELEASE, so whoever asks
//! again needs another name: in the same one, the late pair would release the lock.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, warn};
use uuid::Uuid;

use crate::clock;
use crate::error::Error;
use crate::lease::{Moment, Reply, Terms};
use crate::network::{Failure, Health, Network};
use crate::printable::printable;
use crate::topology::Node;
use crate::wire::{self, Info, Limit};

/// How long the server may take, after a wait is over, to reply so before we return without it. The
/// rest of the 100 ms in which `wait` returns is for a busy machine.
const OVERTIME: Duration = Duration::from_millis(60);

/// The least time for one try: a new connection over TLS to another continent takes most of it. A
/// ttl may be shorter, since what was granted long ago is renewed before it is handed out.
const LEAST_TRY: Duration = Duration::from_secs(1);

/// The most, whatever the ttl: twice, since a try without a reply is made once more, it is the 5 s
/// after which a caller who does not wait learns that nobody answers.
const LONGEST_TRY: Duration = Duration::from_millis(2500);

/// Whoever waits polls every third of the ttl whether the server still has it in the queue, but no
/// more and no less often than this.
const SHORTEST_POLL: Duration = Duration::from_secs(1);
const LONGEST_POLL: Duration = Duration::from_secs(5);

/// The back-off before a server that replied with an error is asked again, doubled every time: a
/// server that restarts needs seconds, a proxy that cut a connection needs none.
const FIRST_BACK_OFF: Duration = Duration::from_millis(20);
const LONGEST_BACK_OFF: Duration = Duration::from_millis(500);

/// How often the log says that a wait goes on although nobody answers: the wait itself may last for
/// hours.
const WARN_EVERY: Duration = Duration::from_secs(30);

/// What somebody asks for.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) key: Vec<u8>,
    pub(crate) label: String,
    pub(crate) terms: Terms,
    pub(crate) wait: Wait,
    pub(crate) min_replicas: u32,
    pub(crate) limit: Limit,
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

/// How an acquire ended.
pub(crate) struct Acquisition {
    /// None if the lock was busy for as long as the caller wanted to wait.
    pub(crate) result: Result<Option<Grant>, Error>,
    /// The owners that may hold something, or wait, without our knowing.
    pub(crate) in_doubt: Vec<String>,
}

/// Asks until there is a result, or `cancelled` is ready, whose value is the result then.
pub(crate) async fn acquire(
    network: &Arc<Network>,
    request: &Request,
    cancelled: impl Future<Output = Result<Option<Grant>, Error>>,
) -> Acquisition {
    let mut acquiring = Acquiring::new(network, request);
    let result = tokio::select! {
        result = acquiring.until_limit() => result,
        result = cancelled => result,
    };
    let in_doubt = match &result {
        Ok(Some(_)) => acquiring.former,
        _ => acquiring.in_doubt(),
    };
    Acquisition { result, in_doubt }
}

struct Acquiring<'a> {
    network: &'a Arc<Network>,
    request: &'a Request,
    /// In whose name it is asked.
    owner: String,
    started: Moment,
    /// What went wrong since the server last replied.
    trouble: Option<Error>,
    /// When the log last said so.
    warned_at: Option<Instant>,
    /// Whether the server may have granted something or queued us without our knowing.
    in_doubt: bool,
    /// Those in whose names was asked before, until they are known to have nothing.
    former: Vec<String>,
}

/// What a poll says of our waiter in the server's queue.
enum Polled {
    /// The lock was granted, and the reply is missing.
    Granted,
    /// It is there.
    Queued,
    /// It is not: the server is another, or has lost it.
    Absent,
    /// The server replies, but not to this question.
    Unknown,
}

/// In whose name a wait that leads nowhere is begun again.
enum Retry {
    /// In the same: what was asked has arrived.
    SameOwner,
    NewOwner,
}

impl<'a> Acquiring<'a> {
    fn new(network: &'a Arc<Network>, request: &'a Request) -> Acquiring<'a> {
        Acquiring {
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
    fn in_doubt(mut self) -> Vec<String> {
        if self.in_doubt {
            self.former.push(self.owner);
        }
        self.former
    }

    /// None if the lock is busy for as long as the caller wants to wait.
    async fn until_limit(&mut self) -> Result<Option<Grant>, Error> {
        let limit = match self.request.wait {
            // Twice: one whose reply got lost is asked again.
            Wait::No => self.try_limit() * 2,
            Wait::For(wait) => wait.saturating_add(OVERTIME),
            Wait::ForEver => Duration::MAX,
        };
        let result = timeout(limit, self.ask()).await;
        // Of a server that has not replied by then that the wait is over nothing is known.
        result.unwrap_or_else(|_| Err(self.trouble.take().unwrap_or_else(Error::no_answer)))
    }

    async fn ask(&mut self) -> Result<Option<Grant>, Error> {
        let (mut back_off, mut tries) = (FIRST_BACK_OFF, 0);
        loop {
            tries += 1;
            let begun = clock::now();
            let result = match self.try_once().await {
                Ok(None) if self.time_left().is_some() => self.wait_in_queue().await,
                result => result,
            };
            match result {
                Ok(Some(grant)) => return Ok(Some(grant)),
                // The wait ended before its time: by CLIENT UNBLOCK, or by somebody who released in
                // our name. Or the grant had expired.
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
            if clock::now().since(begun) > LONGEST_BACK_OFF {
                back_off = FIRST_BACK_OFF;
            }
            sleep(back_off).await;
            back_off = (back_off * 2).min(LONGEST_BACK_OFF);
        }
    }

    /// That it is asked again after an error: a warning the first time in a wait, and then now and
    /// then.
    fn log_trouble(&mut self, error: &Error) {
        let (key, owner) = (printable(&self.request.key), &self.owner);
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

    fn command(&self, wait: Option<Duration>) -> Cmd {
        let request = self.request;
        let (ttl, limit) = (request.terms.ttl, request.limit);
        wire::acquire(&request.key, &self.owner, ttl, wait, limit)
    }

    fn release(&self) -> Cmd {
        wire::release(&self.request.key, self.owner.as_bytes())
    }

    async fn try_once(&mut self) -> Result<Option<Grant>, Error> {
        // If the time runs out during this, that is what was wrong.
        self.trouble.get_or_insert_with(Error::no_answer);
        self.release_former().await;
        let request = self.request;
        let command = self.command(None);
        let sent_at = clock::now();
        let (network, limit) = (self.network, self.try_limit());
        let cleanup = Some(self.release());
        let ask = network.ask(&request.key, command, cleanup, request.min_replicas, limit);
        let fence = self.in_doubt_during(ask, wire::fence).await?;
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
            // If this is cancelled, it is not known to have nothing.
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
        let command = self.command(Some(left));
        // A release on the shared connection may overtake the request, which then finds the lock free
        // and takes it for nobody. After the request, on its own connection, it cannot.
        let release = self.release();
        let (owner, in_doubt) = (self.owner.clone(), self.in_doubt);
        let cleanup = Mutex::new(None);
        let sent_at = clock::now();
        let network = self.network;
        let wait = network.wait(&request.key, &request.label, &command, &release, &cleanup);
        let dead_end = until_dead_end(network, request, &owner, in_doubt, &cleanup);
        let wait = async {
            tokio::select! {
                biased;
                reply = wait => reply.map(Ok),
                retry = dead_end => Ok(Err(retry)),
            }
        };
        self.in_doubt = true;
        match wait.await {
            Ok(Err(Retry::SameOwner)) => Err(Error::no_answer()),
            Ok(Err(Retry::NewOwner)) => {
                self.change_owner();
                Err(Error::no_answer())
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

    /// None if the grant has expired meanwhile.
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
        let value = ask.await.map_err(|failure| failure.error)?;
        match wire::reply(value)? {
            Reply::Lost(_) => Ok(None),
            Reply::Yes => Ok(Some(Grant {
                owner: self.owner.clone(),
                fence,
                sent_at,
            })),
        }
    }

    /// Awaits a reply, during which, and for good after a failure, it is in doubt whether the server
    /// granted something or queued us.
    async fn in_doubt_during<T>(
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
            self.change_owner();
        }
        failure.error
    }

    fn change_owner(&mut self) {
        let owner = fresh_owner(self.request);
        self.former.push(std::mem::replace(&mut self.owner, owner));
        self.in_doubt = false;
    }
}

/// Polls during a wait, and ends when it leads nowhere: the server has been replaced, or the
/// connection to it leads to nobody any more. Polls on the shared connection, once for all who wait
/// there, and each for itself only after something has happened to that.
async fn until_dead_end(
    network: &Arc<Network>,
    request: &Request,
    owner: &str,
    was_in_doubt: bool,
    cleanup: &Mutex<Option<Cmd>>,
) -> Retry {
    let every = (request.terms.ttl / 3).clamp(SHORTEST_POLL, LONGEST_POLL);
    // The clean-up is set when the request is sent.
    let is_sent = || {
        cleanup
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_some()
    };
    let (node, mut healthy) = (network.node_of(&request.key), None::<Health>);
    let mut interval = every;
    loop {
        let was_sent = is_sent();
        let before = *healthy.get_or_insert_with(|| network.health(&node));
        sleep(interval).await;
        interval = every;
        let Ok(mut polled) = poll(network, request, owner, Some(every)).await else {
            // Nobody is there yet who would know better.
            interval = SHORTEST_POLL;
            continue;
        };
        let health = network.health(&node);
        let is_same = is_same_node(network, request, &node) && health == before;
        if polled.is_none() && !is_same {
            let Ok(own) = poll(network, request, owner, None).await else {
                continue;
            };
            polled = own;
        }
        match polled {
            None => {}
            Some(Polled::Granted) => return keep_owner(cleanup),
            Some(Polled::Unknown) if is_same => {}
            Some(Polled::Queued) if health.silent == before.silent => healthy = Some(health),
            // Others of our connections kept silent, so this one may. That it has arrived is known
            // of the first request in this name only.
            Some(Polled::Queued) if !was_in_doubt => return keep_owner(cleanup),
            Some(Polled::Absent) if !was_sent => {}
            Some(Polled::Queued | Polled::Absent | Polled::Unknown) => {
                network.note_replaced(&node);
                return Retry::NewOwner;
            }
        }
    }
}

/// What has arrived needs no RELEASE after it.
fn keep_owner(cleanup: &Mutex<Option<Cmd>>) -> Retry {
    *cleanup.lock().unwrap_or_else(PoisonError::into_inner) = None;
    Retry::SameOwner
}

fn is_same_node(network: &Network, request: &Request, node: &Node) -> bool {
    network.node_of(&request.key) == *node
}

/// Polls for our waiter in the queue; none if somebody else has just polled there. `shared_every` is
/// how often all who wait there together poll; without it, this one polls for itself.
async fn poll(
    network: &Arc<Network>,
    request: &Request,
    owner: &str,
    shared_every: Option<Duration>,
) -> Result<Option<Polled>, Error> {
    // A renewal of what is not held yet changes nothing, and is what a user may do who may not use
    // LOCK.INFO.
    let may_use_info = network.may_use_info();
    let command = match may_use_info {
        true => wire::info(&request.key),
        false => wire::renew(&request.key, owner, request.terms.ttl),
    };
    let reply = match shared_every {
        Some(every) => network.poll(&request.key, command, every).await,
        None => {
            let ask = network.ask(&request.key, command, None, 0, LONGEST_TRY);
            ask.await.map(Some).map_err(|failure| failure.error)
        }
    };
    let info = match reply {
        Ok(None) => return Ok(None),
        Ok(Some(value)) if !may_use_info => {
            return Ok(Some(match wire::reply(value)? {
                Reply::Yes => Polled::Granted,
                Reply::Lost(_) => Polled::Unknown,
            }));
        }
        Ok(Some(value)) => Info::read(value)?,
        Err(error) if !error.is_passing() => {
            network.note_info_refused();
            return Ok(Some(Polled::Unknown));
        }
        Err(error) => return Err(error),
    };
    let Some(info) = info else {
        return Ok(Some(Polled::Absent));
    };
    let is_ours = |name: &[u8]| name == owner.as_bytes();
    Ok(Some(
        if info.holders.iter().any(|holder| is_ours(&holder.owner)) {
            Polled::Granted
        } else if info.queue.iter().any(|waiter| is_ours(&waiter.owner)) {
            Polled::Queued
        } else if info.waiters > info.queue.len() as u64 || info.holding > info.holders.len() as u64
        {
            // The server lists only the first of them.
            Polled::Unknown
        } else {
            Polled::Absent
        },
    ))
}

fn fresh_owner(request: &Request) -> String {
    format!("{}:{}", request.label, Uuid::new_v4())
}
