//! One lease of the watchdog, with its holder and its callers.

use std::sync::Arc;
use std::time::Duration;

use tracing::{debug, error, warn};

use crate::acquisition::Request;
use crate::error::Error;
use crate::lease::{Lease, Lost, Moment, Released, Renewed, Reply};
use crate::message::Responder;
use crate::printable::printable;
use crate::status::StatusSender;

/// After so many failures the caller of `release` learns that nobody answers; it goes on being
/// tried. Two, since the first may be a connection that broke long ago.
const RELEASE_FAILURES_REPORTED: u32 = 2;

pub(super) struct Entry {
    pub(super) lease: Lease,
    pub(super) key: Arc<[u8]>,
    pub(super) owner: Arc<str>,
    pub(super) min_replicas: u32,
    pub(super) granted_at: Moment,
    /// When it is in the schedule, if it is.
    pub(super) scheduled_at: Option<Moment>,
    /// What its handle reads; none if there is no handle.
    pub(super) status: Option<StatusSender>,
    /// Who waits for a renewal, and since when: one that left before is not theirs.
    renewing: Vec<(Moment, Responder<Renewed>)>,
    /// Who waits for the end of the release, and until when.
    pub(super) releasing: Option<(Moment, Responder<Released>)>,
    /// How the release ended, as far as is known.
    released: Result<Released, Error>,
}

impl Entry {
    pub(super) fn new(lease: Lease, request: &Request, owner: &str, granted_at: Moment) -> Entry {
        Entry {
            lease,
            key: Arc::from(request.key.as_slice()),
            owner: Arc::from(owner),
            min_replicas: request.min_replicas,
            granted_at,
            scheduled_at: None,
            status: None,
            renewing: Vec::new(),
            releasing: None,
            released: Err(Error::Unreachable(
                "no answer before the lock ended".to_owned(),
            )),
        }
    }

    /// The holder wants a renewal now, for another ttl than agreed if there is one.
    pub(super) fn renew(
        &mut self,
        ttl: Option<Duration>,
        now: Moment,
        responder: Responder<Renewed>,
    ) {
        self.renewing.push((now, responder));
        match ttl {
            Some(ttl) => self.lease.extend(ttl, now),
            None => self.lease.renew_now(now),
        }
        self.respond_if_lost();
    }

    /// What was sent at `sent_at` was replied to, or not.
    pub(super) fn attempt_ended(
        &mut self,
        sent_at: Moment,
        reply: Result<Reply, Error>,
        now: Moment,
    ) {
        let known = reply.as_ref().ok().copied();
        if !self.lease.attempt_ended(sent_at, known, now) {
            return;
        }
        if self.lease.is_given_up() {
            self.release_ended(reply);
        } else {
            self.renewal_ended(sent_at, reply, now);
        }
    }

    fn release_ended(&mut self, reply: Result<Reply, Error>) {
        self.released = match reply {
            Ok(Reply::Lost(_)) if self.lease.may_be_released() => Ok(Reply::Yes),
            reply => reply,
        };
        let failures = self.lease.failures();
        if let Err(error) = &self.released
            && failures >= RELEASE_FAILURES_REPORTED
        {
            if failures == RELEASE_FAILURES_REPORTED {
                let key = printable(&self.key);
                warn!(%key, owner = %self.owner, %error, "not released yet");
            }
            self.respond_released();
        }
    }

    fn renewal_ended(&mut self, sent_at: Moment, reply: Result<Reply, Error>, now: Moment) {
        match &reply {
            // Reported by `lose`, together with the loss.
            Ok(Reply::Lost(_)) => return,
            Ok(Reply::Yes) => {
                if let Some(status) = &self.status {
                    status.extend(self.lease.ends_at());
                }
            }
            Err(error) => {
                let (key, left) = (printable(&self.key), self.lease.ends_at().since(now));
                warn!(%key, owner = %self.owner, ?left, %error, "a renewal has failed");
            }
        }
        let asked_before = |(asked_at, _): &mut (Moment, _)| *asked_at <= sent_at;
        for (_, responder) in self.renewing.extract_if(.., asked_before) {
            let _ = responder.send(reply.clone());
        }
        if !self.renewing.is_empty() {
            self.lease.renew_now(now);
        }
    }

    pub(super) fn lose(&mut self, lost: Lost) {
        error!(key = %printable(&self.key), owner = %self.owner, %lost, "the lock is lost");
        if let Some(status) = &self.status {
            status.lose(lost);
        }
        self.respond_if_lost();
    }

    /// The holder is notified that it holds nothing any more, if it did until now.
    pub(super) fn revoke(&mut self) {
        if let Some(status) = self.status.take()
            && self.lease.lost().is_none()
        {
            status.lose(Lost::Gone);
            self.respond_to_renewals(Lost::Gone);
        }
    }

    /// The holder has given it up: whoever still waits for a loss is notified of none.
    pub(super) fn notify_given_up(&mut self) {
        if let Some(status) = self.status.take() {
            status.give_up();
        }
    }

    /// Responds to those who wait for a renewal that will not come any more.
    fn respond_if_lost(&mut self) {
        if let Some(lost) = self.lease.lost() {
            self.respond_to_renewals(lost);
        }
    }

    fn respond_to_renewals(&mut self, lost: Lost) {
        for (_, responder) in self.renewing.drain(..) {
            let _ = responder.send(Ok(Reply::Lost(lost)));
        }
    }

    /// Responds to the caller of a release that takes longer than it may.
    pub(super) fn respond_if_late(&mut self, now: Moment) {
        if self
            .releasing
            .as_ref()
            .is_some_and(|(until, _)| *until <= now)
        {
            self.respond_released();
        }
    }

    fn respond_released(&mut self) {
        if let Some((_, responder)) = self.releasing.take() {
            let _ = responder.send(match self.lease.lost() {
                Some(lost) if lost != Lost::MaxHold => Ok(Reply::Lost(lost)),
                _ => self.released.clone(),
            });
        }
    }

    pub(super) fn end(&mut self) {
        debug!(key = %printable(&self.key), owner = %self.owner, released = ?self.released, "given up");
        self.respond_released();
    }
}
