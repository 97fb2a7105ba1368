//! Our section of INFO.

use std::ffi::{CStr, c_int};

use redis_module::raw;

use super::{Ctx, OK, OnMainThread, Refused, accepted, flags, guarded};

/// What is written into the section.
pub trait InfoSection {
    fn write(info: &InfoCtx);
}

/// Where INFO is written.
pub struct InfoCtx {
    raw: *mut raw::RedisModuleInfoCtx,
    /// The server is crashing: allocate nothing, touch little.
    pub for_crash_report: bool,
}

// SAFETY: made at the beginning of a callback, only lent, and not `Send` (it holds a raw pointer).
unsafe impl OnMainThread for InfoCtx {}

impl InfoCtx {
    /// Writes one number into our section. Its name gets that of the module before it.
    pub fn field(&self, name: &CStr, number: u64) {
        // SAFETY: the context is live until this callback ends, and the name is a live C string.
        unsafe { api!(RedisModule_InfoAddFieldULongLong)(self.raw, name.as_ptr(), number) };
    }

    /// As [`Ctx::may_evict`]: the server gives INFO no context for it, and needs none.
    pub fn may_evict(&self) -> bool {
        flags(None) & raw::REDISMODULE_CTX_FLAGS_EVICT != 0
    }
}

impl Ctx {
    /// Makes our section of INFO known. Only while loading.
    pub fn register_info<S: InfoSection>(&self) -> Result<(), Refused> {
        // SAFETY: the context is live and that of loading.
        let status = unsafe { api!(RedisModule_RegisterInfoFunc)(self.raw, Some(info::<S>)) };
        accepted(status, "our section of INFO")
    }
}

extern "C" fn info<S: InfoSection>(raw: *mut raw::RedisModuleInfoCtx, for_crash_report: c_int) {
    let info = InfoCtx {
        raw,
        for_crash_report: for_crash_report != 0,
    };
    // SAFETY: the context of this callback, and a live C string.
    if unsafe { api!(RedisModule_InfoAddSection)(raw, c"".as_ptr()) } == OK {
        guarded(|| S::write(&info));
    }
}
