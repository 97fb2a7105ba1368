//! The shell inside the server: it looks at keys, asks the core what to do, and does it.
//!
//! - [`load`]: what happens at MODULE LOAD and UNLOAD
//! - [`commands`]: one table of the commands, and how each is carried out
//! - [`waiting`]: clients that wait for a lock: blocked, woken, served, let go
//! - [`events`]: what the server tells us without being asked
//! - [`info`]: what INFO shows of us
//! - [`api`]: the module API made safe; the only `unsafe` of the module

mod api;
mod commands;
mod events;
mod info;
mod load;
mod waiting;

use std::cell::RefMut;

use crate::lock::Fences;
use api::{Ctx, InfoCtx, MainThread};
use info::Stats;
use load::ClientUnblock;
use waiting::Waiting;

/// What the module remembers between two callbacks.
struct State {
    fences: Fences,
    waiting: Waiting,
    stats: Stats,
    /// Whether the server could evict locks when it was last asked.
    may_evict: bool,
    can_set_idle_time: bool,
}

static STATE: MainThread<Option<State>> = MainThread::new(None);

impl State {
    fn new(ctx: &Ctx) -> State {
        State {
            fences: Fences::starting(ctx.now()),
            waiting: Waiting::new(ClientUnblock::on(ctx)),
            stats: Stats::default(),
            may_evict: false,
            can_set_idle_time: load::can_set_idle_time(ctx),
        }
    }

    /// Made anew by loading: after an unload the library, and with it this memory, may still be there.
    fn reset(ctx: &Ctx) {
        let state = State::new(ctx);
        *STATE.get(ctx) = Some(state);
    }

    /// After this nobody calls us any more. A static is never dropped by itself.
    fn drop(ctx: &Ctx) {
        *STATE.get(ctx) = None;
    }

    fn get(ctx: &Ctx) -> RefMut<'_, State> {
        RefMut::map(STATE.get(ctx), |state| {
            state.get_or_insert_with(|| State::new(ctx))
        })
    }

    fn try_get(info: &InfoCtx) -> Option<RefMut<'_, State>> {
        RefMut::filter_map(STATE.try_get(info)?, Option::as_mut).ok()
    }
}
