//! Settings that CONFIG SET and the configuration file can change.

use std::ffi::{CStr, c_char, c_int, c_longlong, c_void};
use std::marker::PhantomData;
use std::ptr;

use redis_module::raw;

use super::{Ctx, ERR, OK, OnMainThread, Refused, accepted, guarded};

/// A setting that is a number.
pub trait Setting {
    /// What follows the name of the module and a dot.
    const NAME: &CStr;
    const DEFAULT: u64;
    const LEAST: u64;
    const MOST: u64;
    fn get(ctx: &ConfigCtx) -> u64;
    /// Keeps the number and does nothing else: CONFIG SET takes it back if another setting that was given
    /// with it is refused, on Redis 8 even after a module was asked to apply its own. What follows from the
    /// number is done when the server reports that its settings have changed.
    fn set(ctx: &ConfigCtx, number: u64);
}

/// A setting is being read or written. The server gives no context for that.
pub struct ConfigCtx(PhantomData<*mut ()>);

// SAFETY: made at the beginning of a callback, only lent, and not `Send` (it stands for a raw pointer).
unsafe impl OnMainThread for ConfigCtx {}

impl Ctx {
    /// Makes a setting of this module known. Only while loading.
    pub fn register_setting<S: Setting>(&self, module: &CStr) -> Result<(), Refused> {
        // SAFETY: the context is live and that of loading, the name is a live C string, and the callbacks
        // ignore the data, which is null.
        let status = unsafe {
            api!(RedisModule_RegisterNumericConfig)(
                self.raw,
                S::NAME.as_ptr(),
                S::DEFAULT.cast_signed(),
                raw::REDISMODULE_CONFIG_DEFAULT,
                S::LEAST.cast_signed(),
                S::MOST.cast_signed(),
                Some(get::<S>),
                Some(set::<S>),
                None,
                ptr::null_mut(),
            )
        };
        let (module, name) = (module.to_string_lossy(), S::NAME.to_string_lossy());
        accepted(status, &format!("the setting {module}.{name}"))
    }

    /// Reads all settings from the configuration. Only while loading, after they were made known.
    pub fn read_settings(&self) -> Result<(), Refused> {
        // SAFETY: the context is live and that of loading.
        let status = unsafe { api!(RedisModule_LoadConfigs)(self.raw) };
        accepted(status, "to read the configuration")
    }
}

extern "C" fn get<S: Setting>(_: *const c_char, _: *mut c_void) -> c_longlong {
    guarded(|| S::get(&ConfigCtx(PhantomData))).map_or(0, u64::cast_signed)
}

extern "C" fn set<S: Setting>(
    _: *const c_char,
    number: c_longlong,
    _: *mut c_void,
    _: *mut *mut raw::RedisModuleString,
) -> c_int {
    let number = u64::try_from(number).unwrap_or(S::LEAST);
    guarded(|| S::set(&ConfigCtx(PhantomData), number)).map_or(ERR, |()| OK)
}
