//! What the module promises, on real servers: `cargo test --test it`, or a part of it by its name,
//! `cargo test --test it waiting::`.
//!
//! One program, so that it is linked once and its tests run side by side. A program of its own is what runs
//! for long or by a seed (`chaos`, `model`), what also meets other releases (`compatibility`), and what starts
//! one short process after the other (`docs`): a SIGCHLD that comes while its thread starts the next goes to
//! another thread of the program, whose read with a time-out then fails with EINTR.

mod acl;
mod arguments;
mod cluster;
mod command_table;
mod commands;
mod durability;
mod errors;
mod fence;
mod hostile;
mod info;
mod key_metadata;
mod limits;
mod loading;
mod memory;
mod redis_py;
mod slow_commands;

mod replication {
    mod effects;
    mod waiters;
}

mod several_holders {
    mod commands;
    mod durability;
    mod turns;
    mod value;
}

mod waiting {
    mod clock_steps;
    mod leaving;
    mod order;
    mod wakeups;
}
