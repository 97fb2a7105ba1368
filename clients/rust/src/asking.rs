//! How a lock is asked for: one try on the shared connection, then a wait in the server's queue on
//! a connection of its own, and again from the start after whatever went wrong, always with the
//! same owner, so that a reply that was lost is simply asked for again.

use std::sync::Arc;
use std::time::Duration;

use redis::Value;
use tokio::time::{Instant, sleep_until, timeout_at};
use tracing::{debug, warn};

use crate::clock;
use crate::error::Error;
use crate::lease::{Moment, Terms};
use crate::network::Network;
use crate::wire;

/// How long the server may take, after a wait is over, to say so before we say it ourselves. The
/// rest of the 100 ms in which `wait` returns is for a busy machine.
const OVERTIME: Duration = Duration::from_millis(60);

/// The least time for one try: a new connection over TLS to another continent takes most of it. A
/// ttl may be shorter, since what was granted long ago is renewed before it is handed out.
const LEAST_TRY: Duration = Duration::from_secs(1);

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
    pub(crate) owner: String,
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
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grant {
    pub(crate) fence: u64,
    /// When the request left that the lease counts from.
    pub(crate) sent_at: Moment,
}

/// One request on its way.
pub(crate) struct Asking<'a> {
    network: &'a Arc<Network>,
    request: &'a Request,
    started: Instant,
    /// What went wrong since the server last answered.
    trouble: Option<Error>,
    /// When the log last said so.
    warned_at: Option<Instant>,
    /// Whether the server may have granted something or queued us without our knowing.
    in_doubt: bool,
}

impl<'a> Asking<'a> {
    pub(crate) fn new(network: &'a Arc<Network>, request: &'a Request) -> Asking<'a> {
        Asking {
            network,
            request,
            started: Instant::now(),
            trouble: None,
            warned_at: None,
            in_doubt: false,
        }
    }

    /// Whether, after the request failed or was cancelled, something has to be cleaned up.
    pub(crate) fn is_in_doubt(&self) -> bool {
        self.in_doubt
    }

    /// None if the lock is busy for as long as the caller wants to wait.
    pub(crate) async fn answer(&mut self) -> Result<Option<Grant>, Error> {
        let limit = match self.request.wait {
            // Twice: one whose reply got lost is asked again.
            Wait::No => self.try_limit() * 2,
            Wait::For(wait) => wait.saturating_add(OVERTIME),
            Wait::ForEver => Duration::MAX,
        };
        let answered = match self.started.checked_add(limit) {
            Some(until) => timeout_at(until, self.ask()).await,
            None => Ok(self.ask().await),
        };
        answered.unwrap_or_else(|_| match self.trouble.take() {
            Some(error) => Err(error),
            None => Ok(None),
        })
    }

    async fn ask(&mut self) -> Result<Option<Grant>, Error> {
        let (mut pause, mut tries) = (FIRST_PAUSE, 0);
        loop {
            tries += 1;
            let answer = match self.try_once().await {
                Ok(None) if self.time_left().is_some() => self.wait_in_line().await,
                answer => answer,
            };
            match answer {
                Ok(Some(grant)) => return Ok(Some(grant)),
                // The place was given up before its time: by CLIENT UNBLOCK, or by somebody who
                // released in our name. Or the grant had lapsed.
                Ok(None) if self.time_left().is_some() => self.trouble = None,
                Ok(None) => return Ok(None),
                Err(error) => {
                    let last = self.request.wait == Wait::No && tries == 2;
                    if last || !error.is_passing() || !self.network.was_reached() {
                        return Err(error);
                    }
                    self.log_trouble(&error);
                    self.trouble = Some(error);
                }
            }
            sleep_until(Instant::now() + pause).await;
            pause = (pause * 2).min(LAST_PAUSE);
        }
    }

    /// That it is asked again after an error: a warning the first time in a wait, and then now and
    /// then.
    fn log_trouble(&mut self, error: &Error) {
        let (key, owner) = (show(&self.request.key), &self.request.owner);
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
                .checked_sub(self.started.elapsed())
                .filter(|left| *left >= Duration::from_millis(1)),
            Wait::ForEver => Some(Duration::MAX),
        }
    }

    fn try_limit(&self) -> Duration {
        self.request.terms.attempt().max(LEAST_TRY)
    }

    async fn try_once(&mut self) -> Result<Option<Grant>, Error> {
        let request = self.request;
        let command = wire::acquire(&request.key, &request.owner, request.terms.ttl, None);
        // Should the time run out during this, that is what was wrong.
        self.trouble
            .get_or_insert_with(|| Error::Unreachable("no answer in time".to_owned()));
        let sent_at = clock::now();
        let limit = self.try_limit();
        let ask = self
            .network
            .ask(&request.key, command, request.min_replicas, limit);
        let fence = settle(&mut self.in_doubt, ask, wire::fence).await?;
        self.trouble = None;
        match fence {
            Some(fence) => self.fresh(Grant { fence, sent_at }).await,
            None => Ok(None),
        }
    }

    async fn wait_in_line(&mut self) -> Result<Option<Grant>, Error> {
        let request = self.request;
        let Some(left) = self.time_left() else {
            return Ok(None);
        };
        let command = wire::acquire(&request.key, &request.owner, request.terms.ttl, Some(left));
        // A release on the shared connection may overtake the request, which then finds the lock free
        // and takes it for nobody. Behind the request, on its own connection, it cannot.
        let release = wire::release(&request.key, request.owner.as_bytes());
        let sent_at = clock::now();
        let wait = self
            .network
            .wait(&request.key, &request.label, &command, &release);
        let Some(fence) = settle(&mut self.in_doubt, wait, wire::fence).await? else {
            return Ok(None);
        };
        let grant = Grant { fence, sent_at };
        match request.min_replicas {
            0 => self.fresh(grant).await,
            // It was written by whoever handed it over, so what our connection could ask the
            // replicas about would not tell of it.
            _ => self.renewed(grant).await,
        }
    }

    /// The lease of a grant began at some moment after it was asked for, that nobody here saw. If
    /// that is long ago, what can be counted on starts with a renewal.
    async fn fresh(&mut self, grant: Grant) -> Result<Option<Grant>, Error> {
        if self.request.terms.is_stale(grant.sent_at, clock::now()) {
            return self.renewed(grant).await;
        }
        Ok(Some(grant))
    }

    /// None if the grant has lapsed meanwhile.
    async fn renewed(&mut self, grant: Grant) -> Result<Option<Grant>, Error> {
        let request = self.request;
        let command = wire::renew(&request.key, &request.owner, request.terms.ttl);
        self.in_doubt = true;
        let sent_at = clock::now();
        let limit = request.terms.attempt();
        let ask = self
            .network
            .ask(&request.key, command, request.min_replicas, limit);
        let refused = settle(&mut self.in_doubt, ask, wire::refused).await?;
        Ok(refused.is_none().then_some(Grant { sent_at, ..grant }))
    }
}

/// Awaits a reply, during which, and for good after it failed, it is in doubt whether the server
/// granted something or queued us.
async fn settle<T>(
    in_doubt: &mut bool,
    ask: impl Future<Output = Result<Value, Error>>,
    read: impl FnOnce(Value) -> Result<T, Error>,
) -> Result<T, Error> {
    let before = std::mem::replace(in_doubt, true);
    let reply = ask.await;
    // A refused command changed nothing; but one that too few replicas acknowledged was not
    // refused, it was carried out.
    *in_doubt = match &reply {
        Ok(_) => before,
        Err(Error::Refused(line)) => before || line.starts_with("NOREPLICAS "),
        Err(_) => true,
    };
    reply.and_then(read)
}

pub(crate) use crate::printable::printable as show;
