//! Which core a thread, and every thread and process that it starts, runs on.

use std::sync::OnceLock;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The first core that we may use.
pub const CLIENT: Side = Side::First;

/// The last one.
pub const SERVER: Side = Side::Last;

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Side {
    First,
    Last,
}

impl Side {
    /// The number of the core.
    pub fn core(self) -> usize {
        // As it was before anything was pinned: the first call comes first of all.
        static ALLOWED: OnceLock<(usize, usize)> = OnceLock::new();
        let (first, last) = ALLOWED.get_or_init(|| {
            let allowed = sched_getaffinity(None).expect("we may ask for our own cores");
            let mut cores = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core));
            let first = cores.next().expect("we run on some core");
            (first, cores.next_back().unwrap_or(first))
        });
        match self {
            Side::First => *first,
            Side::Last => *last,
        }
    }
}

/// Pins this thread, and all that it starts from now on.
pub fn to(side: Side) {
    let mut only = CpuSet::new();
    only.set(side.core());
    sched_setaffinity(None, &only).expect("a core that we were given");
}

/// What `start` starts is pinned there; this thread stays on the clients' core.
pub fn started_on<T>(side: Side, start: impl FnOnce() -> T) -> T {
    CLIENT.core();
    to(side);
    let started = start();
    to(CLIENT);
    started
}
