//! Hold a Lockkeeper lock on Redis or Valkey.
#![deny(missing_docs, unsafe_code)]

mod acquire;
mod asking;
pub mod blocking;
mod clock;
mod error;
mod held;
mod lease;
mod network;
mod place;
mod watchdog;
mod wire;

pub use acquire::{Acquire, Builder, Lockkeeper, Ran};
pub use error::Error;
pub use held::{Held, Released, Renewed};
pub use lease::Lost;
pub use wire::{Info, Waiter};
