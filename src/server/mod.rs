//! The shell inside the server: it looks at keys, asks the core what to do, and does it.
//!
//! - [`load`]: what happens at MODULE LOAD and UNLOAD
//! - [`commands`]: one table of the commands, and how each is carried out
//! - [`events`]: what the server tells us without being asked
//! - [`api`]: the module API made safe; the only `unsafe` of the module

mod api;
mod commands;
mod events;
mod load;

use crate::lock::{Fences, UnixMs};
use api::{Ctx, MainThread};
use std::cell::RefMut;

/// What the module remembers between two callbacks.
struct State {
    fences: Fences,
}

impl State {
    fn starting(now: UnixMs) -> State {
        State {
            fences: Fences::starting(now),
        }
    }
}

static STATE: MainThread<Option<State>> = MainThread::new(None);

impl State {
    /// Made anew by loading: after an unload the library, and with it this memory, may still be there.
    fn reset(ctx: &Ctx) {
        *STATE.get(ctx) = Some(State::starting(ctx.now()));
    }

    fn get(ctx: &Ctx) -> RefMut<'_, State> {
        RefMut::map(STATE.get(ctx), |state| {
            state.get_or_insert_with(|| State::starting(ctx.now()))
        })
    }
}
