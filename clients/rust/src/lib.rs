//! Hold a lock on a Redis or Valkey server with the module Lockkeeper, and **know when you no
//! longer hold it**.
//!
//! The server decides who holds a lock and who is next; this crate asks it, renews what is held
//! from a watchdog thread of its own, and reports a loss before anybody else can hold the lock.
//!
//! # A job that must not run twice
//!
//! ```no_run
//! use std::time::Duration;
//! use lockkeeper::{Lockkeeper, Ran};
//!
//! # async fn send_invoices() -> std::io::Result<u32> { Ok(0) }
//! #[tokio::main]
//! async fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let lockkeeper = Lockkeeper::open("redis://127.0.0.1/")?;
//!     let job = lockkeeper.acquire("job:invoices").wait(Duration::from_secs(60));
//!     match job.run(async |_| send_invoices().await).await? {
//!         Ran::Done(sent) => println!("{} invoices sent", sent?),
//!         Ran::Busy => println!("another machine is at it"),
//!         Ran::Lost { why, .. } => println!("stopped half-way: {why}"),
//!     }
//!     Ok(())
//! }
//! ```
//!
//! # One leader among many
//!
//! ```no_run
//! use std::time::Duration;
//! use lockkeeper::{Acquired, Error, Lockkeeper, Released};
//!
//! # async fn lead() {}
//! #[tokio::main]
//! async fn main() -> Result<(), Error> {
//!     let lockkeeper = Lockkeeper::open("redis://127.0.0.1/")?;
//!     // Whatever ends `main`: the next leader need not wait for the ttl.
//!     let _guard = lockkeeper.close_on_drop(Duration::from_secs(5));
//!     loop {
//!         let Acquired::Yes(leadership) = lockkeeper.acquire("leader").wait_forever().await? else {
//!             continue;
//!         };
//!         tokio::select! {
//!             () = lead() => {
//!                 if let Released::Lost(why) = leadership.release().await? {
//!                     eprintln!("the last of it was done without being the leader: {why}");
//!                 }
//!                 return Ok(());
//!             }
//!             why = leadership.lost() => eprintln!("no longer the leader: {why}"),
//!         }
//!     }
//! }
//! ```
//!
//! # A web handler that lends a book
//!
//! ```no_run
//! use lockkeeper::{Acquired, Error, Lockkeeper, Released};
//!
//! # struct Database;
//! # impl Database { async fn lend(&self, _: u32, _: &str, _: u64) -> Result<(), Error> { Ok(()) } }
//! /// The status and the text of the response.
//! async fn lend(
//!     lockkeeper: &Lockkeeper,
//!     database: &Database,
//!     book: u32,
//!     reader: &str,
//! ) -> Result<(u16, &'static str), Error> {
//!     let Acquired::Yes(held) = lockkeeper.acquire(format!("book:{book}")).await? else {
//!         return Ok((409, "borrowing in progress"));
//!     };
//!     // A storage that refuses a smaller fence than it has seen is safe even from a holder that
//!     // was paused for longer than its ttl.
//!     database.lend(book, reader, held.fence()).await?;
//!     match held.release().await? {
//!         Released::Yes => Ok((200, "lent")),
//!         Released::Lost(_) => Ok((503, "perhaps lent: look again")),
//!     }
//! }
//! ```
//!
//! # So many at a time, readers and a writer
//!
//! A lock may have several holders, each with a lease and a fence of its own: [`Acquire::limit`] takes
//! one of so many places, [`Acquire::shared`] shares the lock with all who do so too, and who says
//! neither is alone. All wait in one queue, and are served first come, first served.
//!
//! ```no_run
//! use lockkeeper::{Acquired, Error, Lockkeeper, Upgraded};
//!
//! # fn is_stale() -> bool { true }
//! # async fn rebuild(_: u64) {}
//! async fn refresh(lockkeeper: &Lockkeeper) -> Result<(), Error> {
//!     let Acquired::Yes(index) = lockkeeper.acquire("index").shared().await? else {
//!         return Ok(()); // somebody rebuilds it
//!     };
//!     // One try: two readers who waited to write would wait for each other.
//!     if is_stale() && index.upgrade().await? == Upgraded::Yes {
//!         rebuild(index.fence()).await;
//!         let _ = index.downgrade().await?;
//!     }
//!     Ok(())
//! }
//! ```
//!
//! # Code that blocks
//!
//! The watchdog is a thread of its own, so a thread that blocks loses nothing. Whatever waits for
//! a reply has a twin for threads that may block: [`Acquire::blocking`],
//! [`blocking_run`](Acquire::blocking_run), [`Held::blocking_release`],
//! [`Lockkeeper::blocking_info`] and so on. They panic inside an asynchronous task, which they
//! would block.
//!
//! ```no_run
//! use std::time::Duration;
//! use lockkeeper::{Lockkeeper, Ran};
//!
//! # fn copy_table() {}
//! let lockkeeper = Lockkeeper::open("redis://127.0.0.1/")?;
//! let job = lockkeeper.acquire("job:export").wait(Duration::from_secs(10));
//! match job.blocking_run(|_| copy_table())? {
//!     Ran::Done(()) => println!("copied"),
//!     Ran::Busy => println!("somebody else is at it"),
//!     Ran::Lost { why, .. } => println!("perhaps copied twice: {why}"),
//! }
//! # Ok::<(), lockkeeper::Error>(())
//! ```
//!
//! # The end of a program
//!
//! It takes the watchdog with it. What was released with [`Held::release`] or [`Acquire::run`] is
//! free by then; a handle that is dropped in the last moment may not be, and its lock lasts until
//! the end of its ttl. [`Lockkeeper::close`] gives all back and waits for it, and
//! [`close_on_drop`](Lockkeeper::close_on_drop) does so however `main` ends.
//!
//! # What it promises
//!
//! - **You know when you no longer hold it.** [`Held::remaining`] is computed from a clock that
//!   runs through suspend, counted from before the last acknowledged request was sent;
//!   [`Held::lost`] resolves before the server can give the lock to another, unless the machine is
//!   so busy that it wakes threads late, when `remaining` is still right. A holder that is deleted or
//!   taken over by force learns it at its next renewal.
//! - **Nothing of yours stops a renewal.** The watchdog is a thread of its own: user code that
//!   blocks its runtime, waits for another lock, or ends its runtime does not matter to it.
//! - **Nothing is left behind.** A handle that is dropped, a task that panics, an acquire that is
//!   cancelled or whose reply got lost: what may have been granted is released.
//! - **Refusal is an answer.** Busy is [`Acquired::Busy`], a loss is a value; [`Error`] is for a question
//!   that got no answer.
//!
//! # What it does not promise
//!
//! One primary is asked, and replication is asynchronous: after a failover a lock can be held
//! twice, unless [`Acquire::min_replicas`] is used and the replica that takes over is one of those
//! that acknowledged. A virtual machine that is frozen and continued does not know that it was:
//! use the [fence](Held::fence).
//!
//! Among the holders of a [limit](Acquire::limit) no fence protects: one whose place has run out looks
//! as its living companions do.
//!
//! A request that may still be on its way when its connection is given up is followed by a
//! `LOCK.RELEASE` on that connection, so that it leaves no lock. A proxy that delivers the one and
//! not the other, or the two in another order, breaks that: then the lock ends by its ttl.
//!
//! # Features
//!
//! `tls` for `rediss://`, `sentinel` and `cluster`; none by default. What happens is reported to
//! [`tracing`](https://docs.rs/tracing): grants and releases as debug, failed renewals as
//! warnings, losses as errors.
//!
//! # Systems
//!
//! Tested on Linux. Nothing else in it is Linux only: on Linux, Android and macOS the system has a
//! clock that runs through suspend, elsewhere the larger of what the monotonic and the wall clock
//! say has passed counts.
//!
//! # The modules
//!
//! Each knows only those below it.
//!
//! | module | knows |
//! |---|---|
//! | `lockkeeper`, `builder`, `acquire`, `held` | what an application sees |
//! | `watchdog` | the one loop that owns all leases |
//! | `message`, `pending`, `status` | what handles ask of it, the result to come, what it reports |
//! | `acquisition` | how a lock is asked for, and asked for again |
//! | `network` | which connections there are, and which is used |
//! | `topology` | where the server is: one address, Sentinel, Cluster |
//! | `connection` | one connection, and how it is given up |
//! | `wire` | the four commands, their replies and their limits |
//! | `lease` | until when a lock may be believed and what to do when: no clock, no I/O |
//! | `limits`, `bytes`, `printable`, `clock`, `error` | what may be asked for, how keys are given and shown, the time, what can fail |
#![deny(missing_docs, unsafe_code)]

mod acquire;
mod acquisition;
mod builder;
mod bytes;
mod clock;
mod connection;
mod error;
mod held;
mod lease;
mod limits;
mod lockkeeper;
mod message;
mod network;
mod pending;
mod printable;
mod status;
mod topology;
mod watchdog;
mod wire;

pub use acquire::{Acquire, Acquired, Ran};
pub use builder::Builder;
pub use bytes::ToBytes;
pub use error::Error;
pub use held::Held;
pub use lease::{Downgraded, Lost, Released, Renewed, Reply, Upgraded};
pub use lockkeeper::{CloseOnDrop, Lockkeeper};
pub use printable::printable;
pub use wire::{Holder, Info, MAX_OWNER, Waiter};
