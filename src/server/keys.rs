//! How a key is read. A command that is refused leaves no trace in it.

use super::api::{Ctx, Key, Kind, Text};
use super::quirks::Quirk;
use super::state::State;
use crate::lock::{Found, Holders, LockId, Owner, may_be_list};
use crate::queue::Seen;
use crate::time::{UnixMs, UnixUs};

/// The lock of this name, in the database of the running callback.
pub fn lock_id(ctx: &Ctx, name: Text) -> LockId {
    LockId {
        db: ctx.db(),
        name: name.bytes().into(),
    }
}

/// The key as the owner finds it.
#[inline]
pub fn find<'k>(ctx: &Ctx, key: &'k Key, owner: Owner) -> Found<'k> {
    match key.kind() {
        Kind::Empty => Found::Nobody,
        Kind::Other => Found::WrongType,
        Kind::String if !may_concern(owner, key.len()) => Found::Another,
        Kind::String => value(ctx, key).map_or(Found::Another, Found::Value),
    }
}

fn may_concern(owner: Owner, len: usize) -> bool {
    owner.may_hold(len) || may_be_list(len)
}

/// Those who hold the key, if others may come beside them: nobody at a free key, those of a list. None for a
/// key with one holder that allows no company, and for no lock at all.
pub fn holders(ctx: &Ctx, key: &Key, now: UnixUs) -> Option<Holders> {
    match key.kind() {
        Kind::Empty => Some(Holders::default()),
        Kind::String if may_be_list(key.len()) => Holders::read(value(ctx, key)?, now),
        Kind::String | Kind::Other => None,
    }
}

/// When a key that shows this ends, or the first lease of its holders, whichever is sooner.
pub fn next_end(ctx: &Ctx, key: &Key, seen: Option<Seen>, now: UnixUs) -> Option<UnixMs> {
    let first = holders(ctx, key, now).and_then(|holders| holders.next_end());
    let key_end = seen.and_then(|seen| seen.ends_at);
    first.into_iter().chain(key_end).min()
}

/// What shows of a key without reading its value; none if it is missing.
pub fn seen(key: &Key) -> Option<Seen> {
    (key.kind() != Kind::Empty).then(|| Seen {
        len: key.len(),
        ends_at: key.ends_at(),
    })
}

/// The value of a string; none for anything else. Changes its encoding, but not how long it has been idle.
#[inline]
pub fn value<'k>(ctx: &Ctx, key: &'k Key) -> Option<&'k [u8]> {
    if key.may_be_packed() && has(ctx, Quirk::UnpackingIsAUse) {
        key.value_keeping_idle_time()
    } else {
        key.value()
    }
}

/// The value of a string, and nothing of the key is changed but what the server cannot help. Costs a GET.
pub fn peek(ctx: &Ctx, key: Key, name: Text) -> Option<Vec<u8>> {
    key.peek(name, !has(ctx, Quirk::CannotSetIdleTime))
}

fn has(ctx: &Ctx, quirk: Quirk) -> bool {
    State::with(ctx, |state| state.quirks.has(quirk))
}
