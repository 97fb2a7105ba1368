//! How a key is written: in a command by [`write`], outside of one by [`call_write`].

use super::api::{Ctx, Key, Refusal, Text};
use crate::lock::Value;

/// Gives the key this value, or deletes it, in the step of a command, which the server has checked: nothing
/// can fail.
pub fn write(name: Text, key: Key, value: Option<&Value>) {
    match value {
        Some(value) => key.set(name, &value.bytes, value.ends_at),
        None => key.delete(name),
    }
}

/// The same outside of a command, if the server lets us.
pub fn call_write(ctx: &Ctx, name: Text, value: Option<&Value>) -> Result<(), Refusal> {
    match value {
        Some(value) => ctx.call_set(name, &value.bytes, value.ends_at),
        None => ctx.call_del(name),
    }
}
