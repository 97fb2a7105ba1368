//! MODULE LOAD and UNLOAD: where all that we are is registered with the server.

use std::ffi::CStr;

use super::api::{self, Args, Ctx, Module, Refused};
use super::events::{self, Events};
use super::info::LockkeeperSection;
use super::quirks::{Quirk, Server};
use super::settings::{MaxWaiters, MaxWaitersPerKey};
use super::state::State;
use super::{commands, faults, load_checks};

api::module!(Lockkeeper);

pub struct Lockkeeper;

impl Module for Lockkeeper {
    const NAME: &CStr = c"lockkeeper";
    const VERSION: i32 = load_checks::VERSION;

    fn load<'c>(ctx: &'c Ctx, args: &Args<'c>) -> Result<(), Refused> {
        let server = Server::of(ctx);
        load_checks::refuse_old_server(server)?;
        load_checks::refuse_renamed_commands(ctx)?;
        let debug = load_checks::asks_for_debug_command(args.from(0))?;
        faults::let_only_the_cron_wake(false);
        let quirks = server.quirks();
        State::reset(ctx, quirks);
        ctx.declare_options(quirks.has(Quirk::AsksForAtomicSlotMigration));
        commands::register(ctx, debug)?;
        ctx.register_info::<LockkeeperSection>()?;
        ctx.register_setting::<MaxWaiters>(Self::NAME)?;
        ctx.register_setting::<MaxWaitersPerKey>(Self::NAME)?;
        ctx.read_settings()?;
        // Last of what can be refused: Redis 7.0 goes on telling a module that was not loaded.
        ctx.subscribe::<Events>()?;
        events::warn_of_eviction(ctx);
        Ok(())
    }

    fn loaded_twice() -> Refused {
        load_checks::refuse_second_loading()
    }

    fn unload(ctx: &Ctx) -> Result<(), Refused> {
        load_checks::refuse_while_acl_rules_name_us(ctx)?;
        load_checks::close_clients_that_used_us(ctx)?;
        State::drop(ctx);
        Ok(())
    }
}
