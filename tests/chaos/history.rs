//! What happened in a run, as those who asked saw it: the input of the checker.

/// Microseconds since the run began, by a clock that nobody can step and that all processes share.
pub type Us = u64;

/// An owner that sends the commands as they are.
pub const RAW: &str = "raw";

/// One question, and what became of it.
#[derive(Clone, Debug)]
pub struct Event {
    /// One acquire and its retries, what follows it, and the release: one owner.
    pub tenure: u64,
    /// Who it works through: [`RAW`], or the name of an agent.
    pub by: &'static str,
    pub key: usize,
    /// How many it lets hold the lock at once, itself among them: 1 is a lock for one alone.
    pub limit: u16,
    pub did: Did,
    pub asked: Us,
    /// None as long as nobody has answered.
    pub answer: Option<(Us, Answer)>,
}

impl Event {
    /// Whether it asks for the lock, and waits.
    pub fn waits(&self) -> bool {
        matches!(self.did, Did::Acquire { wait: 1.., .. })
    }

    /// When it was answered: never, if nobody has.
    pub fn answered(&self) -> Us {
        self.answer.as_ref().map_or(Us::MAX, |(at, _)| *at)
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Did {
    Acquire {
        wait: Us,
        /// The grant counts only once a replica has it.
        safe: bool,
    },
    Renew,
    /// Asked the helper's handle, not the server, whether the lock is held.
    Check,
    Release,
    /// A write to the storage that the lock guards: the storage's own order, and the fence shown.
    Write {
        order: u64,
        fence: u64,
    },
}

#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// Held, until then at least.
    Held {
        fence: u64,
        until: Us,
    },
    Released,
    /// Busy, lost or gone.
    Not,
    /// What the storage says.
    Accepted,
    Refused,
    /// The question may have been carried out or not.
    Failed(String),
}

/// Something done to servers or agents, from its beginning until all is well again.
#[derive(Clone, Debug)]
pub struct Fault {
    pub what: &'static str,
    pub from: Us,
    pub to: Us,
    /// What was answered just before may be forgotten: asynchronous replication, a late fsync.
    pub loses: bool,
    /// How far the clocks of the two servers differ: leases may end so much earlier or later.
    pub skew: Us,
}

#[derive(Clone, Debug, Default)]
pub struct History {
    pub events: Vec<Event>,
    pub faults: Vec<Fault>,
    /// Of every lease.
    pub ttl: Us,
}
