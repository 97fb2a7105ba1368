//! Timers.

use std::ffi::c_void;
use std::ptr;

use redis_module::raw;

use super::{Ctx, guarded};

/// What happens when a timer fires.
pub trait TimerCallback {
    fn fired(ctx: &Ctx);
}

/// A timer that has not fired.
#[derive(Clone, Copy)]
pub struct Timer(raw::RedisModuleTimerID);

/// Longest period of a timer: the server multiplies it by 1000, and keeps it by the wall clock, which
/// may be stepped before it fires.
const LONGEST_MS: u64 = 60_000;

impl Ctx {
    /// Calls [`TimerCallback::fired`] once, not before so many milliseconds, or after a minute.
    pub fn start_timer<T: TimerCallback>(&self, ms: u64) -> Timer {
        let ms = ms.min(LONGEST_MS).cast_signed();
        // SAFETY: the context is live, and the callback ignores the data, which is null.
        Timer(unsafe {
            api!(RedisModule_CreateTimer)(self.raw, ms, Some(fired::<T>), ptr::null_mut())
        })
    }

    /// Stops a timer, but never the one that is firing: that is a double free.
    pub fn stop_timer(&self, timer: Timer) {
        // SAFETY: the context is live; the timer is not the one that is firing, which is forgotten as soon
        // as it fires. The API takes null where nobody wants the timer's data.
        unsafe { api!(RedisModule_StopTimer)(self.raw, timer.0, ptr::null_mut()) };
    }
}

extern "C" fn fired<T: TimerCallback>(ctx: *mut raw::RedisModuleCtx, _: *mut c_void) {
    // SAFETY: the context of this callback.
    let ctx = unsafe { Ctx::new(ctx) };
    guarded(|| T::fired(&ctx));
}
