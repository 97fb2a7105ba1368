//! Settings of the module: `CONFIG SET lockkeeper.…`.

use std::ffi::CStr;

use super::api::{ConfigCtx, Setting};
use super::state::{DEFAULT_MAX_WAITERS, DEFAULT_MAX_WAITERS_PER_KEY, State};

/// Upper bound of both: more connections than any server has.
const MOST_MAX_WAITERS: u64 = 1_000_000;

/// `lockkeeper.max-waiters`: how many clients may wait, over all keys. At 0 all who wait get null
/// and no timer runs any more, so that the module can be unloaded; an unconfirmed grant that the server does
/// not let us take back is left to its ttl.
pub struct MaxWaiters;

impl Setting for MaxWaiters {
    const NAME: &CStr = c"max-waiters";
    const DEFAULT: u64 = DEFAULT_MAX_WAITERS;
    const LEAST: u64 = 0;
    const MOST: u64 = MOST_MAX_WAITERS;

    fn get(ctx: &ConfigCtx) -> u64 {
        State::with(ctx, |state| state.max_waiters)
    }

    fn set(ctx: &ConfigCtx, number: u64) {
        State::with(ctx, |state| state.max_waiters = number);
    }
}

/// `lockkeeper.max-waiters-per-key`: how many of them may wait for one key.
pub struct MaxWaitersPerKey;

impl Setting for MaxWaitersPerKey {
    const NAME: &CStr = c"max-waiters-per-key";
    const DEFAULT: u64 = DEFAULT_MAX_WAITERS_PER_KEY;
    const LEAST: u64 = 1;
    const MOST: u64 = MOST_MAX_WAITERS;

    fn get(ctx: &ConfigCtx) -> u64 {
        State::with(ctx, |state| state.max_waiters_per_key)
    }

    fn set(ctx: &ConfigCtx, number: u64) {
        State::with(ctx, |state| state.max_waiters_per_key = number);
    }
}
