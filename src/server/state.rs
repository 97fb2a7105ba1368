//! What the module remembers between two callbacks.

use std::panic::UnwindSafe;

use super::api::{Blocked, ClientId, Ctx, MainThread, OnMainThread, Timer, unix_time};
use super::quirks::Quirks;
use super::stats::Stats;
use crate::lock::{Fences, Holders, LockId};
use crate::queue::{self, Queue, Seen};
use crate::time::{MonoUs, Now};

/// Default of `lockkeeper.max-waiters`, over all keys. One waiter and its connection cost the server
/// 40 to 75 kB that count for maxmemory.
pub const DEFAULT_MAX_WAITERS: u64 = 1_000;

/// Default of `lockkeeper.max-waiters-per-key`: half of all, so that one key leaves as much of the queue to
/// the others as it can take.
pub const DEFAULT_MAX_WAITERS_PER_KEY: u64 = 500;

/// Clients that wait for a lock, among all that modules block. Its callbacks are in `waiting`.
#[derive(Clone, Copy, Debug)]
pub struct Waiter;

pub type Turn = queue::Turn<Blocked<Waiter>>;

pub struct State {
    pub quirks: Quirks,
    pub fences: Fences,
    pub queue: Queue<Blocked<Waiter>>,
    pub max_waiters: u64,
    pub max_waiters_per_key: u64,
    /// The timer that is running, and when it is to fire.
    pub timer: Option<(Timer, MonoUs)>,
    /// The server became a replica, and its loop has not turned since.
    pub demoted: bool,
    /// Clients that CLIENT UNBLOCK may have unblocked without a reply: their connections are closed, so
    /// that they ask again.
    pub without_reply: Vec<ClientId>,
    pub stats: Stats,
    /// Whether the server could evict locks when it was last asked.
    pub may_evict: bool,
}

static STATE: MainThread<Option<State>> = MainThread::new(None);

impl State {
    /// Made anew by loading: after an unload the library, and with it this memory, may still be there.
    pub fn reset(ctx: &Ctx, quirks: Quirks) {
        *STATE.borrow_mut(ctx) = Some(State {
            quirks,
            fences: Fences::starting(unix_time()),
            queue: Queue::default(),
            max_waiters: DEFAULT_MAX_WAITERS,
            max_waiters_per_key: DEFAULT_MAX_WAITERS_PER_KEY,
            timer: None,
            demoted: false,
            without_reply: vec![],
            stats: Stats::default(),
            may_evict: false,
        });
    }

    /// After this nobody calls us any more. A static is never dropped by itself.
    pub fn drop(ctx: &Ctx) {
        *STATE.borrow_mut(ctx) = None;
    }

    /// Lends the state to a closure, which only decides. What calls the server comes after: the server may call
    /// us back, and would find the state lent out. The compiler sees to that: a closure that takes along a
    /// [`Ctx`], or a key opened by one, is not `UnwindSafe` (a [`Ctx`] has a `Cell`).
    pub fn with<R>(
        proof: &impl OnMainThread,
        decide: impl FnOnce(&mut State) -> R + UnwindSafe,
    ) -> R {
        let mut state = STATE.borrow_mut(proof);
        decide(state.as_mut().expect("loading made the state"))
    }

    /// The same for a crash report, which may come while the state is lent out.
    pub fn try_with<R>(
        proof: &impl OnMainThread,
        read: impl FnOnce(&State) -> R + UnwindSafe,
    ) -> Option<R> {
        STATE.try_borrow_mut(proof)?.as_ref().map(read)
    }

    /// Those who wait for this key join these holders: what is to be written.
    pub fn serve(&mut self, lock: &LockId, holders: Holders, now: Now) -> Turn {
        let State { queue, fences, .. } = self;
        queue.serve(lock, holders, now, fences)
    }

    /// The same for a key that was found with these holders and shows this; none if they admit nobody who waits.
    pub fn look(
        &mut self,
        lock: &LockId,
        holders: Holders,
        seen: Option<Seen>,
        now: Now,
    ) -> Option<Turn> {
        let State { queue, fences, .. } = self;
        queue.look(lock, holders, seen, now, fences)
    }
}
