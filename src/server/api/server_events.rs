//! Events of the server that we subscribe to.

use std::ffi::c_void;

use redis_module::raw;

use super::{Ctx, Refused, accepted, guarded};

/// What happens at each event.
pub trait ServerEvents {
    /// The server became a master.
    fn promoted(ctx: &Ctx);
    /// The server became a replica.
    fn demoted(ctx: &Ctx);
    /// Settings of the server or of ours have changed, all that were given together.
    fn configured(ctx: &Ctx);
    /// The server's cron, ten times a second by default.
    fn cron(ctx: &Ctx);
}

impl Ctx {
    /// Subscribes to all these events.
    pub fn subscribe<E: ServerEvents>(&self) -> Result<(), Refused> {
        for (id, callback) in [
            (
                raw::REDISMODULE_EVENT_REPLICATION_ROLE_CHANGED,
                role_changed::<E> as EventCallback,
            ),
            (raw::REDISMODULE_EVENT_CRON_LOOP, cron::<E>),
            (raw::REDISMODULE_EVENT_CONFIG, configured::<E>),
        ] {
            let event = raw::RedisModuleEvent { id, dataver: 1 };
            // SAFETY: the context is live, and the callback looks at no data of the event.
            let status = unsafe {
                api!(RedisModule_SubscribeToServerEvent)(self.raw, event, Some(callback))
            };
            accepted(status, "to tell us of events")?;
        }
        Ok(())
    }
}

type EventCallback =
    unsafe extern "C" fn(*mut raw::RedisModuleCtx, raw::RedisModuleEvent, u64, *mut c_void);

extern "C" fn role_changed<E: ServerEvents>(
    ctx: *mut raw::RedisModuleCtx,
    _: raw::RedisModuleEvent,
    role: u64,
    _: *mut c_void,
) {
    // SAFETY: the context of this callback.
    let ctx = unsafe { Ctx::new(ctx) };
    guarded(|| match role {
        raw::REDISMODULE_EVENT_REPLROLECHANGED_NOW_MASTER => E::promoted(&ctx),
        _ => E::demoted(&ctx),
    });
}

extern "C" fn cron<E: ServerEvents>(
    ctx: *mut raw::RedisModuleCtx,
    _: raw::RedisModuleEvent,
    _: u64,
    _: *mut c_void,
) {
    // SAFETY: the context of this callback.
    let ctx = unsafe { Ctx::new(ctx) };
    guarded(|| E::cron(&ctx));
}

extern "C" fn configured<E: ServerEvents>(
    ctx: *mut raw::RedisModuleCtx,
    _: raw::RedisModuleEvent,
    _: u64,
    _: *mut c_void,
) {
    // SAFETY: the context of this callback.
    let ctx = unsafe { Ctx::new(ctx) };
    guarded(|| E::configured(&ctx));
}
