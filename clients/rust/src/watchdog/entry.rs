//! One lease of the watchdog, with its holder and its callers.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use redis::Value;
use tracing::{debug, error, warn};

use crate::acquisition::Request;
use crate::error::Error;
use crate::lease::{Action, Lease, Lost, Moment, Released, Renewed, Reply};
use crate::message::{Change, Responder};
use crate::network::Failure;
use crate::printable::printable;
use crate::status::StatusSender;
use crate::wire::{self, Limit};

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
    /// Who waits for a grant with another limit. The first is being asked for, if any is.
    changing: VecDeque<Change>,
    is_changing: bool,
    /// When the request for it left, if it is under way.
    change_sent_at: Option<Moment>,
    /// What was wrong with the last attempt.
    trouble: Error,
    /// A request to share the lock kept silent, so that it may arrive at any time.
    may_be_shared: bool,
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
            changing: VecDeque::new(),
            is_changing: false,
            change_sent_at: None,
            trouble: Error::no_answer(),
            may_be_shared: false,
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

    /// The holder wants a grant with another limit.
    pub(super) fn change(&mut self, change: Change) {
        self.changing.push_back(change);
        self.respond_if_lost();
    }

    /// What to do at `now`, as [`Lease::next`] says.
    pub(super) fn next(&mut self, now: Moment) -> Action {
        self.begin_change(now);
        let action = self.lease.next(now);
        if let Action::Change { .. } = action {
            self.change_sent_at = Some(now);
        }
        action
    }

    /// The limit of the grant that is being asked for.
    pub(super) fn limit(&self) -> Limit {
        self.changing
            .front()
            .map_or(Limit::EXCLUSIVE, Change::limit)
    }

    /// Responds to those whose change has come to nothing, and begins the next.
    fn begin_change(&mut self, now: Moment) {
        // The reply tells which fence is ours, even to who does not wait for it any more.
        if self.change_sent_at.is_some() {
            return;
        }
        while let Some(change) = self.changing.front() {
            let error = if self.is_changing && !self.lease.is_changing(now) || change.is_cancelled()
            {
                self.trouble.clone()
            } else if self.may_be_shared && change.limit() == Limit::EXCLUSIVE {
                Error::may_be_shared()
            } else {
                break;
            };
            self.change_failed(error);
        }
        if !self.is_changing && !self.changing.is_empty() {
            self.is_changing = true;
            self.trouble = Error::no_answer();
            self.lease.change(now);
        }
    }

    fn change_failed(&mut self, error: Error) {
        self.lease.end_change();
        self.is_changing = false;
        if let Some(change) = self.changing.pop_front() {
            change.failed(error);
        }
    }

    /// What was sent at `sent_at` was replied to, or not.
    pub(super) fn attempt_ended(
        &mut self,
        sent_at: Moment,
        reply: Result<Value, Failure>,
        now: Moment,
    ) {
        if self.change_sent_at == Some(sent_at) {
            self.change_sent_at = None;
            return self.change_ended(sent_at, reply, now);
        }
        let reply = reply.map_err(|failure| failure.error);
        let reply = reply.and_then(wire::reply);
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

    fn change_ended(&mut self, sent_at: Moment, reply: Result<Value, Failure>, now: Moment) {
        let limit = self.limit();
        self.may_be_shared |=
            limit == Limit::SHARED && matches!(&reply, Err(failure) if failure.is_silent);
        let reply = reply.map_err(|failure| failure.error);
        let fence = reply.and_then(wire::fence);
        let granted = match &fence {
            Ok(Some(_)) => Some(true),
            // Others are in the way of who wants to be alone.
            Ok(None) if limit == Limit::EXCLUSIVE => Some(false),
            // Nobody is in the way of who shares what it holds: the renewal will tell that it is lost.
            Ok(None) | Err(_) => None,
        };
        let has_ended = self.lease.change_ended(sent_at, granted, now);
        match fence {
            Err(error) => self.attempt_failed(error, now),
            Ok(_) if !has_ended => {}
            Ok(fence) => {
                self.is_changing = false;
                let change = self.changing.pop_front();
                match (change, fence) {
                    (Some(change), Some(fence)) => {
                        if let Some(status) = &self.status {
                            status.grant(fence);
                            status.extend(self.lease.ends_at());
                        }
                        let (key, owner) = (printable(&self.key), &self.owner);
                        debug!(%key, %owner, fence, alone = limit == Limit::EXCLUSIVE, "granted anew");
                        change.granted();
                    }
                    (Some(change), None) => change.busy(),
                    (None, _) => {}
                }
            }
        }
        if !self.renewing.is_empty() {
            self.lease.renew_now(now);
        }
    }

    fn attempt_failed(&mut self, error: Error, now: Moment) {
        let (key, left) = (printable(&self.key), self.lease.ends_at().since(now));
        warn!(%key, owner = %self.owner, ?left, %error, "a renewal has failed");
        // Renewed it is all the same, until the lease ends.
        if !error.is_passing() {
            self.lease.end_change();
        }
        self.trouble = error;
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
            Err(error) => self.attempt_failed(error.clone(), now),
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
            self.respond_lost(Lost::Gone);
        }
    }

    /// The holder has given it up: whoever still waits for a loss is notified of none.
    pub(super) fn notify_given_up(&mut self) {
        if let Some(status) = self.status.take() {
            status.give_up();
        }
    }

    /// Responds to those who wait for a renewal or a change that will not come any more.
    fn respond_if_lost(&mut self) {
        if let Some(lost) = self.lease.lost() {
            self.respond_lost(lost);
        }
    }

    fn respond_lost(&mut self, lost: Lost) {
        self.is_changing = false;
        for change in self.changing.drain(..) {
            change.lost(lost);
        }
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
