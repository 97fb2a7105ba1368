//! How a key is read. A command that is refused leaves no trace in it.

use super::api::{Ctx, Key, Kind, Text};
use super::quirks::Quirk;
use super::state::State;
use crate::lock::{Found, LockId, Owner};

/// The lock of this name, in the database of the running callback.
pub fn lock_id(ctx: &Ctx, name: Text) -> LockId {
    LockId {
        db: ctx.db(),
        name: name.bytes().into(),
    }
}

/// The key as the owner finds it.
pub fn find<'k>(ctx: &Ctx, key: &'k Key, owner: Owner) -> Found<'k> {
    match key.kind() {
        Kind::Empty => Found::Nobody,
        Kind::Other => Found::WrongType,
        Kind::String if !owner.may_hold(key.len()) => Found::Another,
        Kind::String => value(ctx, key).map_or(Found::Another, Found::Value),
    }
}

/// The value of a string; none for anything else. Changes its encoding, but not how long it has been idle.
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
