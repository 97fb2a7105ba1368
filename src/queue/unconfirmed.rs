//! Grants that are not confirmed yet: neither is their reply known to be out, nor has their owner used the
//! lock. Once the reply is known to be lost, they are to be taken back.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use crate::lock::{self, Fence, Holders, LockId, OwnedOwner, Owner};
use crate::time::{MonoUs, UnixUs};

/// Which grant: what the value of a key says after it, and no other ever does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrantId {
    pub lock: Rc<LockId>,
    pub owner: OwnedOwner,
    pub fence: Fence,
}

/// Who still holds a key with this value once these grants are taken back, and how many of them it carried; none
/// if it carried none.
pub fn take_back(grants: &[GrantId], value: &[u8], now: UnixUs) -> Option<(Holders, usize)> {
    let grants = grants
        .iter()
        .map(|grant| (grant.owner.borrowed(), grant.fence));
    lock::take_back(value, grants, now)
}

/// An unconfirmed grant of one key.
#[derive(Clone, Debug)]
pub struct Unconfirmed {
    pub owner: OwnedOwner,
    pub fence: Fence,
    /// Set once the reply is known to be lost.
    pub take_back_at: Option<MonoUs>,
}

impl Unconfirmed {
    fn is(&self, grant: &GrantId) -> bool {
        self.fence == grant.fence && self.owner == grant.owner
    }
}

/// All of them; at most one of each owner of a key.
#[derive(Clone, Debug, Default)]
pub struct UnconfirmedGrants {
    pub grants: BTreeMap<Rc<LockId>, Vec<Unconfirmed>>,
    /// Those whose reply is lost, by when they are to be taken back.
    take_backs: BTreeSet<(MonoUs, Rc<LockId>, OwnedOwner)>,
}

impl UnconfirmedGrants {
    pub fn is_empty(&self) -> bool {
        self.grants.is_empty()
    }

    /// The grant is about to be written. An earlier one to the same owner is confirmed by that.
    pub fn add(&mut self, grant: &GrantId) {
        self.confirm(&grant.lock, grant.owner.borrowed());
        let of_key = self.grants.entry(Rc::clone(&grant.lock)).or_default();
        of_key.push(Unconfirmed {
            owner: grant.owner.clone(),
            fence: grant.fence,
            take_back_at: None,
        });
    }

    /// The reply of this grant is lost, or the server refused to take it back: it is taken back then, unless
    /// its owner has confirmed it or does so before.
    pub fn take_back_at(&mut self, grant: &GrantId, at: MonoUs) {
        let mut of_key = self.grants.get_mut(&grant.lock).into_iter().flatten();
        if let Some(unconfirmed) = of_key.find(|of| of.is(grant)) {
            let entry = |at| (at, Rc::clone(&grant.lock), grant.owner.clone());
            if let Some(before) = unconfirmed.take_back_at.replace(at) {
                self.take_backs.remove(&entry(before));
            }
            self.take_backs.insert(entry(at));
        }
    }

    /// The owner has shown that it knows of its lock: no grant to it will be taken back.
    pub fn confirm(&mut self, lock: &LockId, owner: Owner) {
        self.remove(lock, |of| of.owner.borrowed() == owner);
    }

    /// This grant needs no confirmation any more: its reply is out, or it was taken back, or the key does not
    /// carry it.
    pub fn forget(&mut self, grant: &GrantId) {
        self.remove(&grant.lock, |of| of.is(grant));
    }

    fn remove(&mut self, lock: &LockId, matches: impl FnMut(&Unconfirmed) -> bool) {
        let Some(of_key) = self.grants.get_mut(lock) else {
            return;
        };
        let Some(index) = of_key.iter().position(matches) else {
            return;
        };
        let removed = of_key.swap_remove(index);
        let none_left = of_key.is_empty();
        if let Some(at) = removed.take_back_at {
            let take_back = (at, Rc::new(lock.clone()), removed.owner);
            self.take_backs.remove(&take_back);
        }
        if none_left {
            self.grants.remove(lock);
        }
    }

    /// Nothing will be taken back: another server is master, or the module is about to go.
    pub fn forget_all(&mut self) {
        self.grants.clear();
        self.take_backs.clear();
    }

    /// The grants to take back now, at most so many.
    pub fn due(&mut self, now: MonoUs, at_most: usize) -> Vec<GrantId> {
        let mut due = vec![];
        while due.len() < at_most
            && self.take_backs.first().is_some_and(|(at, ..)| *at <= now)
            && let Some((_, lock, owner)) = self.take_backs.pop_first()
        {
            let mut of_key = self.grants.get_mut(&lock).into_iter().flatten();
            if let Some(unconfirmed) = of_key.find(|of| of.owner == owner) {
                unconfirmed.take_back_at = None;
                let fence = unconfirmed.fence;
                due.push(GrantId { lock, owner, fence });
            }
        }
        due
    }

    /// When [`UnconfirmedGrants::due`] has something next, which may be past.
    pub fn next_due(&self) -> Option<MonoUs> {
        self.take_backs.first().map(|(at, ..)| *at)
    }
}
