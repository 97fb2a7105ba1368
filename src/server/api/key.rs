//! Keys: what is there, and how it changes.

use std::ffi::{CStr, c_int, c_longlong};
use std::slice;

use redis_module::raw;

use super::string::pxat;
use super::{Ctx, OK, Text};
use crate::time::UnixMs;

/// Mode of a key that is opened to read and write it. Not a hit or miss in the statistics, unlike reading.
const TO_WRITE: u32 = raw::REDISMODULE_READ | raw::REDISMODULE_WRITE;

/// Longest string that Redis packs into one piece with its header (`embstr`), in bytes. Valkey packs longer
/// ones, but only Redis 7.0 asks ([`Key::may_be_packed`]).
const LONGEST_PACKED: usize = 44;

/// What is at a key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Empty,
    String,
    Other,
}

/// An open key. Changing it closes it before anybody is notified: a listener may replace its value.
pub struct Key<'c> {
    raw: *mut raw::RedisModuleKey,
    kind: Kind,
    ctx: &'c Ctx,
}

impl Ctx {
    /// Opens a key to read and write it. Not a hit or miss, no new idle time: a command that is
    /// refused leaves no trace. An expired key is removed on the way.
    pub fn open(&self, name: Text) -> Key<'_> {
        self.open_with(name, TO_WRITE | raw::REDISMODULE_OPEN_KEY_NOTOUCH)
    }

    fn open_with(&self, name: Text, mode: u32) -> Key<'_> {
        // SAFETY: the context and the string are live.
        let raw = unsafe { api!(RedisModule_OpenKey)(self.raw, name.raw, mode.cast_signed()) };
        // SAFETY: the key was just opened.
        let kind = match unsafe { api!(RedisModule_KeyType)(raw) } as isize {
            raw::REDISMODULE_KEYTYPE_EMPTY => Kind::Empty,
            raw::REDISMODULE_KEYTYPE_STRING => Kind::String,
            _ => Kind::Other,
        };
        Key {
            raw,
            kind,
            ctx: self,
        }
    }
}

impl<'c> Key<'c> {
    /// What was there when the key was opened.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Length of the value in bytes, without touching its encoding.
    pub fn len(&self) -> usize {
        // SAFETY: the key is open until it is dropped.
        unsafe { api!(RedisModule_ValueLength)(self.raw) }
    }

    /// Whether reading the value may unpack it ([`Key::value`]), on Redis 7.0: longer ones are never packed.
    pub fn may_be_packed(&self) -> bool {
        self.len() <= LONGEST_PACKED
    }

    /// The value of a string; none for anything else. Changes its encoding to `raw`: the API hands out
    /// the bytes of a number or of a short string only after it has unpacked them. See [`Key::peek`].
    pub fn value(&self) -> Option<&[u8]> {
        if self.kind != Kind::String {
            return None;
        }
        let mut len = 0;
        let mode = raw::REDISMODULE_READ.cast_signed();
        // SAFETY: the key is open and holds a string, and `len` is a live number.
        let start = unsafe { api!(RedisModule_StringDMA)(self.raw, &raw mut len, mode) };
        // SAFETY: for a string the API gives start and length of its bytes, valid until the key is
        // written or closed; both consume the key, which the slice borrows.
        Some(unsafe { slice::from_raw_parts(start.cast(), len) })
    }

    /// The same, where unpacking counts as a use: the idle time stays as it is.
    pub fn value_keeping_idle_time(&self) -> Option<&[u8]> {
        let idle_ms = self.idle_ms();
        let value = self.value();
        if let Some(idle_ms) = idle_ms {
            self.set_idle_ms(idle_ms);
        }
        value
    }

    /// The value of a string, leaving encoding, idle time and LFU counter as they are; none for anything
    /// else. Closes the key.
    ///
    /// Costs a GET, too much for the commands that many send: its reply is the only copy of a value that
    /// the API makes without unpacking it. That GET counts as a use, which is taken back.
    ///
    /// `can_set_idle_time`: whether the API sets it to what it is given. Where it does not, the idle time is
    /// kept, and the encoding is not.
    pub fn peek(self, name: Text, can_set_idle_time: bool) -> Option<Vec<u8>> {
        let ctx = self.ctx;
        let (idle_ms, uses) = (self.idle_ms(), self.uses());
        if idle_ms.is_some() && !can_set_idle_time {
            return self.value().map(<[u8]>::to_vec);
        }
        // The server may give the key another value by a GET: Valkey does with a shared number.
        drop(self);
        let value = ctx.call_get(name);
        let key = ctx.open(name);
        if let Some(idle_ms) = idle_ms {
            key.set_idle_ms(idle_ms);
        }
        if let Some(uses) = uses {
            key.set_uses(uses);
        }
        value.or_else(|| key.value().map(<[u8]>::to_vec))
    }

    /// How long the key has been idle, in milliseconds; none where the server counts uses instead.
    fn idle_ms(&self) -> Option<raw::mstime_t> {
        let mut idle_ms = -1;
        // SAFETY: the key is open, and the number is live.
        unsafe { api!(RedisModule_GetLRU)(self.raw, &raw mut idle_ms) };
        (idle_ms >= 0).then_some(idle_ms)
    }

    /// Returns whether the server keeps idle times.
    fn set_idle_ms(&self, idle_ms: raw::mstime_t) -> bool {
        // SAFETY: the key is open.
        unsafe { api!(RedisModule_SetLRU)(self.raw, idle_ms) == OK }
    }

    /// The LFU counter; none where the server keeps idle times instead.
    fn uses(&self) -> Option<c_longlong> {
        let mut uses = -1;
        // SAFETY: the key is open, and the number is live.
        unsafe { api!(RedisModule_GetLFU)(self.raw, &raw mut uses) };
        (uses >= 0).then_some(uses)
    }

    fn set_uses(&self, uses: c_longlong) {
        // SAFETY: the key is open.
        unsafe { api!(RedisModule_SetLFU)(self.raw, uses) };
    }

    /// Counts as a use, as a native command does that changes the key: else eviction takes those keys
    /// first that have been kept alive for longest. Unlike the server, also while it saves a snapshot, when a write
    /// to the value's header copies a page of memory: a new end of the key does that as well.
    pub fn touch(&self, name: Text) {
        // Cheaper than opening the key once more, which only counted uses need.
        if !self.set_idle_ms(0) {
            drop(self.ctx.open_with(name, TO_WRITE));
        }
    }

    /// When the key ends, if it does. Only for a key that exists: on a missing one Redis 8.2 crashes.
    pub fn ends_at(&self) -> Option<UnixMs> {
        if self.kind == Kind::Empty {
            return None;
        }
        // SAFETY: the key is open and not missing.
        let at = unsafe { api!(RedisModule_GetAbsExpire)(self.raw) };
        (at != c_longlong::from(raw::REDISMODULE_NO_EXPIRE)).then_some(UnixMs(at))
    }

    /// Gives the key a value and an end, and notifies all who watch, cache or listen to it, replicas and AOF:
    /// what SET … PXAT does. Keeps the LFU counter, as that does. In the step of a command, which the server has
    /// checked.
    pub fn set(mut self, name: Text, value: &[u8], ends_at: UnixMs) {
        let ctx = self.ctx;
        let text = ctx.text(value);
        if self.kind == Kind::String && self.len() == value.len() && !self.may_be_packed() {
            self.overwrite(value);
        } else {
            self.replace(text.text());
        }
        self.set_end(ends_at);
        drop(self);
        ctx.signal(name);
        ctx.notify(name, raw::REDISMODULE_NOTIFY_STRING, c"set");
        ctx.notify(name, raw::REDISMODULE_NOTIFY_GENERIC, c"expire");
        // SAFETY: the context and the strings are live; the format has three strings and one long long.
        unsafe {
            api!(RedisModule_Replicate)(
                ctx.raw,
                c"SET".as_ptr(),
                c"sssl".as_ptr(),
                name.raw,
                text.text().raw,
                pxat(ctx).raw,
                ends_at.0 as c_longlong,
            );
        }
    }

    /// Deletes what is there and adds the key again.
    fn replace(&mut self, value: Text) {
        // The counter goes with the value before.
        let uses = match self.kind {
            Kind::Empty => None,
            _ => self.uses(),
        };
        // SAFETY: the key is open to be written, and the string is live; the server counts its own use of it.
        unsafe { api!(RedisModule_StringSet)(self.raw, value.raw) };
        if let Some(uses) = uses {
            self.set_uses(uses);
        }
    }

    /// Writes over a string of the same length, which spares the server to delete the key and to add it again. Not
    /// over one that is packed, which it would not be any more; nor over one of another length: Redis 8 would go on
    /// counting the key among those of the length before (INFO keysizes).
    fn overwrite(&mut self, value: &[u8]) {
        let mut len = 0;
        let mode = raw::REDISMODULE_WRITE.cast_signed();
        // SAFETY: the key is open to be written and holds a string, and `len` is a live number.
        let start = unsafe { api!(RedisModule_StringDMA)(self.raw, &raw mut len, mode) };
        // SAFETY: for a string that is to be written the API gives start and length of its bytes, unshared; they stay
        // until the key is written or closed, which the slice does not outlast.
        let bytes = unsafe { slice::from_raw_parts_mut(start.cast::<u8>(), len) };
        bytes.copy_from_slice(value);
        // As SET does. Counted uses stay as they are.
        self.set_idle_ms(0);
    }

    /// The same with a new end only, as PEXPIREAT does.
    pub fn expire(mut self, name: Text, ends_at: UnixMs) {
        let ctx = self.ctx;
        self.set_end(ends_at);
        drop(self);
        ctx.signal(name);
        ctx.notify(name, raw::REDISMODULE_NOTIFY_GENERIC, c"expire");
        // SAFETY: the context and the string are live; the format has one string and one long long.
        unsafe {
            api!(RedisModule_Replicate)(
                ctx.raw,
                c"PEXPIREAT".as_ptr(),
                c"sl".as_ptr(),
                name.raw,
                ends_at.0 as c_longlong,
            );
        }
    }

    /// Deletes the key, as DEL does.
    pub fn delete(self, name: Text) {
        let ctx = self.ctx;
        // SAFETY: the key is open to be written.
        unsafe { api!(RedisModule_DeleteKey)(self.raw) };
        drop(self);
        ctx.signal(name);
        ctx.notify(name, raw::REDISMODULE_NOTIFY_GENERIC, c"del");
        // SAFETY: the context and the string are live; the format has one string.
        unsafe {
            api!(RedisModule_Replicate)(ctx.raw, c"DEL".as_ptr(), c"s".as_ptr(), name.raw);
        }
    }

    fn set_end(&mut self, ends_at: UnixMs) {
        // SAFETY: the key is open to be written.
        unsafe { api!(RedisModule_SetAbsExpire)(self.raw, ends_at.0) };
    }
}

impl Drop for Key<'_> {
    fn drop(&mut self) {
        // SAFETY: open until now, and closed nowhere else. A key that was opened to read and is missing has
        // no handle; the API takes null.
        unsafe { api!(RedisModule_CloseKey)(self.raw) };
    }
}

impl Ctx {
    /// The key was changed: for who watches or caches it.
    fn signal(&self, name: Text) {
        // SAFETY: the context and the string are live.
        unsafe { api!(RedisModule_SignalModifiedKey)(self.raw, name.raw) };
    }

    /// For who listens to keyspace events.
    fn notify(&self, name: Text, class: c_int, event: &CStr) {
        // SAFETY: the context and the string are live, the event is a live C string. A listener of another
        // module may run now: no key of ours is open.
        unsafe {
            api!(RedisModule_NotifyKeyspaceEvent)(self.raw, class, event.as_ptr(), name.raw);
        }
    }
}
