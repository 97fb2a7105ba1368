//! The shell inside the server: it reads keys, asks the core what to do, and does it.
//!
//! From the top down; each imports only what stands below it:
//! - [`entry`]: MODULE LOAD and UNLOAD, where all that follows is registered
//! - [`load_checks`]: what must be right before the first command is served, and after the last
//! - [`commands`]: one table of the commands, and how each is carried out
//! - [`events`]: what we do at events of the server
//! - [`info`]: what INFO shows of us
//! - [`waiting`]: clients that wait for a lock: blocked, woken, served, unblocked
//! - [`effects`]: how a decision changes a key
//! - [`keys`]: how a key is read
//! - [`replies`]: how a reply is sent
//! - [`settings`]: what CONFIG SET can change
//! - [`state`]: what the module remembers between two callbacks
//! - [`stats`]: what has happened since the module was loaded
//! - [`faults`]: what LOCK.DEBUG breaks
//! - [`quirks`]: where servers differ, and what we do about it
//! - [`api`]: the module API made safe, the only `unsafe`; knows nothing of locks

#[expect(unsafe_code, reason = "all of it is here")]
mod api;
mod commands;
mod effects;
mod entry;
mod events;
mod faults;
mod info;
mod keys;
mod load_checks;
mod quirks;
mod replies;
mod settings;
mod state;
mod stats;
mod waiting;
