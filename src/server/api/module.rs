//! The module as a whole: how it is loaded and unloaded, and which server it is in.

use std::ffi::{CStr, c_int};
use std::panic;

use redis_module::raw;

use super::string::free_statics;
use super::{Args, Ctx, ERR, OK, Refused, guarded, warn};

/// A module, and what it does when it is loaded and unloaded. [`module!`] makes the library one.
pub trait Module {
    /// In MODULE LIST, of its section in INFO, and before the dot of its settings.
    const NAME: &CStr;
    /// As the server wants it, one number.
    const VERSION: i32;

    /// Registers all that the module is, or says why not. `args`: those of MODULE LOAD.
    fn load<'c>(ctx: &'c Ctx, args: &Args<'c>) -> Result<(), Refused>;

    /// The reason given to who loads the module twice.
    fn loaded_twice() -> Refused;

    /// Called if nobody waits and no timer runs: that the server looks at itself.
    fn unload(ctx: &Ctx) -> Result<(), Refused>;
}

/// Gives the library the two functions by which the server loads and unloads a [`Module`].
macro_rules! module {
    ($module:ty) => {
        // SAFETY: no other function of the library has this name, and the server calls it as declared.
        #[allow(unsafe_code)]
        #[unsafe(no_mangle)]
        extern "C" fn RedisModule_OnLoad(
            ctx: *mut redis_module::raw::RedisModuleCtx,
            argv: *mut *mut redis_module::raw::RedisModuleString,
            argc: std::ffi::c_int,
        ) -> std::ffi::c_int {
            $crate::server::api::on_load::<$module>(ctx, argv, argc)
        }

        // SAFETY: no other function of the library has this name, and the server calls it as declared.
        #[allow(unsafe_code)]
        #[unsafe(no_mangle)]
        extern "C" fn RedisModule_OnUnload(
            ctx: *mut redis_module::raw::RedisModuleCtx,
        ) -> std::ffi::c_int {
            $crate::server::api::on_unload::<$module>(ctx)
        }
    };
}
pub(crate) use module;

pub fn on_load<M: Module>(
    ctx: *mut raw::RedisModuleCtx,
    argv: *mut *mut raw::RedisModuleString,
    argc: c_int,
) -> c_int {
    // SAFETY: the context of this callback and a live C string. This fills in the pointers to all other
    // functions, and so comes first.
    let initialised = unsafe {
        raw::Export_RedisModule_Init(
            ctx,
            M::NAME.as_ptr(),
            M::VERSION,
            raw::REDISMODULE_APIVER_1.cast_signed(),
        )
    };
    // SAFETY: the context of this callback.
    let ctx = unsafe { Ctx::new(ctx) };
    log_panics();
    let loaded = guarded(|| {
        if initialised != OK {
            return Err(M::loaded_twice());
        }
        // SAFETY: the arguments of this callback.
        let args = unsafe { Args::new(&ctx, argv, argc) };
        M::load(&ctx, &args).inspect_err(|_| free_statics())
    });
    status(&ctx, loaded)
}

pub fn on_unload<M: Module>(ctx: *mut raw::RedisModuleCtx) -> c_int {
    // SAFETY: the context of this callback.
    let ctx = unsafe { Ctx::new(ctx) };
    let unloaded = guarded(|| M::unload(&ctx).inspect(|()| free_statics()));
    status(&ctx, unloaded)
}

/// What the server wants to know; the reason goes into its log.
fn status(ctx: &Ctx, result: Option<Result<(), Refused>>) -> c_int {
    match result {
        Some(Ok(())) => OK,
        Some(Err(Refused(why))) => {
            ctx.warn(&why);
            ERR
        }
        None => ERR,
    }
}

/// Makes a panic one message in the server's log. The standard hook may print a backtrace, which
/// frees what another allocator gave where the server loads modules with their own (Valkey 8.1).
fn log_panics() {
    panic::set_hook(Box::new(|panic| {
        let message = panic.to_string().replace('\n', " ");
        warn(None, &format!("please report this: {message}"));
    }));
}

/// Valkey 9: with the keys move no data of ours. Without this bit a loaded module switches CLUSTER
/// MIGRATESLOTS off.
const VALKEY_HANDLE_ATOMIC_SLOT_MIGRATION: u32 = 1 << 5;

impl Ctx {
    /// Declares how we behave as a module.
    ///
    /// We signal real writes ourselves: the server would signal every key that was opened to be
    /// written. While a replica loads a snapshot beside the old data, nothing of ours is in either.
    /// `atomic_slot_migration`: nor do we have data that moves with a slot; not every server knows that bit.
    pub fn declare_options(&self, atomic_slot_migration: bool) {
        let mut options = raw::REDISMODULE_OPTION_NO_IMPLICIT_SIGNAL_MODIFIED
            | raw::REDISMODULE_OPTIONS_HANDLE_REPL_ASYNC_LOAD;
        if atomic_slot_migration {
            options |= VALKEY_HANDLE_ATOMIC_SLOT_MIGRATION;
        }
        // SAFETY: the context is live and that of loading.
        unsafe { api!(RedisModule_SetModuleOptions)(self.raw, options.cast_signed()) };
    }

    /// The number of the server's version, 0x00MMmmpp; 0 for one too old to tell (before 6.2). Valkey says
    /// that it is Redis 7.2.4.
    pub fn redis_version(&self) -> i32 {
        // SAFETY: reading the pointer is sound, see the front page of this folder.
        match unsafe { raw::RedisModule_GetServerVersion } {
            // SAFETY: takes no argument.
            Some(version) => unsafe { version() },
            None => 0,
        }
    }

    /// Valkey's own version; none on Redis. Not on a server before 6.0.
    pub fn valkey_version(&self) -> Option<String> {
        // SAFETY: the context is live, and the section is a live C string.
        let info = unsafe { api!(RedisModule_GetServerInfo)(self.raw, c"server".as_ptr()) };
        // SAFETY: the info was just made, and the field is a live C string.
        let field =
            unsafe { api!(RedisModule_ServerInfoGetFieldC)(info, c"valkey_version".as_ptr()) };
        let version = (!field.is_null()).then(|| {
            // SAFETY: not null, so a C string, valid until the info is freed.
            let version = unsafe { CStr::from_ptr(field) };
            version.to_string_lossy().into_owned()
        });
        // SAFETY: made above, and freed here only; nothing borrows from it any more.
        unsafe { api!(RedisModule_FreeServerInfo)(self.raw, info) };
        version
    }
}
