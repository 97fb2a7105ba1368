//! The same for code without async: the watchdog is a thread of its own, so a thread that blocks
//! loses nothing.
//!
//! ```no_run
//! use std::time::Duration;
//! use lockkeeper::{Lockkeeper, blocking::Held};
//!
//! # fn copy_table() {}
//! let lockkeeper = Lockkeeper::open("redis://127.0.0.1/")?;
//! let Some(held) = lockkeeper.acquire("job:export").wait(Duration::from_secs(10)).blocking()? else {
//!     return Ok(()); // somebody else is at it
//! };
//! copy_table();
//! println!("{:?}", held.release()?);
//! # Ok::<(), lockkeeper::Error>(())
//! ```

use std::time::Duration;

use crate::error::Error;
use crate::held::{self, Released, Renewed, received};
use crate::lease::checked_ttl;

/// [`lockkeeper::Held`](crate::Held) for a thread that may block. What needs no answer from the
/// server is called on it directly: `key`, `owner`, `fence`, `remaining`, `loss`, `lost`.
///
/// # Panics
/// What waits for an answer panics inside an asynchronous task, which it would block.
#[must_use = "a lock is released when its handle is dropped"]
#[derive(Debug)]
pub struct Held(held::Held);

impl Held {
    /// See [`Held::renew`](crate::Held::renew).
    pub fn renew(&self) -> Result<Renewed, Error> {
        received(self.0.send_renew(None).blocking_recv())
    }

    /// See [`Held::extend`](crate::Held::extend).
    pub fn extend(&self, ttl: Duration) -> Result<Renewed, Error> {
        received(self.0.send_renew(Some(checked_ttl(ttl)?)).blocking_recv())
    }

    /// See [`Held::release`](crate::Held::release).
    pub fn release(self) -> Result<Released, Error> {
        self.release_after(Duration::ZERO)
    }

    /// See [`Held::release_after`](crate::Held::release_after).
    pub fn release_after(self, hold: Duration) -> Result<Released, Error> {
        received(self.0.send_release(hold).blocking_recv())
    }

    /// See [`Held::leave`](crate::Held::leave).
    pub fn leave(self) {
        self.0.leave();
    }
}

impl std::ops::Deref for Held {
    type Target = held::Held;

    fn deref(&self) -> &held::Held {
        &self.0
    }
}

impl From<held::Held> for Held {
    fn from(held: held::Held) -> Held {
        Held(held)
    }
}
