//! How a decision changes a key. The only place where a lock is written: in a command by [`grant`], outside of
//! one by [`call_grant`].

use super::api::{Ctx, Key, Refusal, Text};
use crate::lock::{Effect, Lease};

/// Carries out what a command decided, which the server has checked: nothing can fail.
pub fn apply(name: Text, key: Key, effect: Effect) {
    match effect {
        Effect::Nothing => {}
        Effect::Set(lease) => grant(name, key, lease),
        Effect::Expire { ends_at } => key.expire(name, ends_at),
        Effect::Delete { .. } => key.delete(name),
    }
}

/// Gives the key to an owner, in the step of a command, which the server has checked.
pub fn grant(name: Text, key: Key, lease: Lease) {
    key.set(name, &lease.value(), lease.ends_at);
}

/// The same outside of a command, if the server lets us.
pub fn call_grant(ctx: &Ctx, name: Text, lease: Lease) -> Result<(), Refusal> {
    ctx.call_set(name, &lease.value(), lease.ends_at)
}
