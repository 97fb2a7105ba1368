//! Lockkeeper: distributed locks as native Redis commands.
//!
//! A lock is an ordinary Redis string with a native expiry; the server decides everything in one step.
//!
//! # Where things are
//!
//! The core knows nothing of Redis: bytes and times come in, decisions go out.
//! - [`request`]: the parser, argument bytes → request
//! - [`lock`]: what a value says, and what each command does to it
//! - [`queue`]: who waits for what, in which order, and which grants are not confirmed yet
//! - [`reply`]: what goes out, every error sentence once
//! - [`time`]: points in time and lengths of time, each with its clock and its unit
//!
//! - [`server`]: the shell inside redis-server, which reads keys, asks the core and acts; `unsafe` is in
//!   `server/api` and nowhere else
//!
//! # What always holds
//!
//! 1. **The core never reads a clock.** Time comes in as an argument.
//! 2. **A write changes the key, replicates an absolute deadline and replies, or does none of the
//!    three.**
//! 3. **No path lets a caller without the owner's name lengthen or end a lease.**
//! 4. **A client that has left is never granted; an unconfirmed grant is never given twice.**

#![deny(unsafe_code, clippy::undocumented_unsafe_blocks)]

mod lock;
mod queue;
mod reply;
mod request;
mod server;
mod time;
