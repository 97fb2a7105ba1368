//! Commands of the server that we call, and their replies.

use std::ffi::{CStr, c_char, c_longlong};
use std::slice;

use redis_module::raw;

use super::{ClientId, Ctx, Text};
use crate::time::UnixMs;

/// Why the server refuses a write that no client asked for.
pub enum Refusal {
    /// This node of the cluster does not serve the key, or nothing at present. There is no code word
    /// for it, but of all refusals only these speak of a cluster.
    NotHere,
    /// READONLY, NOREPLICAS, MISCONF … may pass.
    NotNow,
}

/// The reply of a command that we called, freed when dropped.
struct CallReply<'c> {
    raw: *mut raw::RedisModuleCallReply,
    _ctx: &'c Ctx,
}

impl CallReply<'_> {
    fn kind(&self) -> isize {
        // SAFETY: the reply lives until it is dropped.
        unsafe { api!(RedisModule_CallReplyType)(self.raw) as isize }
    }

    /// The bytes of a string or an error; none in any other reply.
    fn bytes(&self) -> Option<&[u8]> {
        // SAFETY: the reply lives until it is dropped, which the slice does not outlast.
        unsafe { bytes_of(self.raw) }
    }

    fn is_string(&self) -> bool {
        self.kind() == raw::REDISMODULE_REPLY_STRING
    }

    /// The elements of an array, as text; none if this is no array, or an element of it is no text.
    fn texts(&self) -> Option<Vec<String>> {
        if self.kind() != raw::REDISMODULE_REPLY_ARRAY {
            return None;
        }
        // SAFETY: the reply lives until it is dropped.
        let len = unsafe { api!(RedisModule_CallReplyLength)(self.raw) };
        (0..len)
            .map(|index| {
                // SAFETY: the reply lives and has this element, which lives as long as the reply.
                let text =
                    unsafe { bytes_of(api!(RedisModule_CallReplyArrayElement)(self.raw, index)) };
                text.map(|text| String::from_utf8_lossy(text).into_owned())
            })
            .collect()
    }

    /// Whether these lower-case words occur in the text.
    fn contains(&self, words: &str) -> bool {
        let text = String::from_utf8_lossy(self.bytes().unwrap_or_default());
        text.to_ascii_lowercase().contains(words)
    }
}

/// # Safety
///
/// `reply` lives, and goes on living as long as the slice.
unsafe fn bytes_of<'r>(reply: *mut raw::RedisModuleCallReply) -> Option<&'r [u8]> {
    let mut len = 0;
    // SAFETY: the caller's promise, and `len` is a live number.
    let start = unsafe { api!(RedisModule_CallReplyStringPtr)(reply, &raw mut len) };
    if start.is_null() {
        return None;
    }
    // SAFETY: the API gave start and length of the text, valid until the reply is freed.
    Some(unsafe { slice::from_raw_parts(start.cast::<u8>(), len) })
}

impl Drop for CallReply<'_> {
    fn drop(&mut self) {
        // SAFETY: made by `Ctx::replied`, and freed nowhere else.
        unsafe { api!(RedisModule_FreeCallReply)(self.raw) };
    }
}

impl Ctx {
    /// What a call gave us; none if it gave nothing, because the command is unknown or was refused silently.
    ///
    /// # Safety
    ///
    /// `raw` is what `RedisModule_Call` returned, and nothing else frees it.
    unsafe fn replied(&self, raw: *mut raw::RedisModuleCallReply) -> Option<CallReply<'_>> {
        // Not `then_some`: that would make, and free, a reply of null.
        (!raw.is_null()).then(|| CallReply { raw, _ctx: self })
    }

    /// Reads a string as GET does: a hit or a miss in the statistics, and a use of the key. None if there
    /// is none, or the server gives no reply because GET has another name.
    pub(super) fn call_get(&self, name: Text) -> Option<Vec<u8>> {
        // SAFETY: the context and the strings are live; the format has one string of the server.
        let reply = unsafe {
            let get = api!(RedisModule_Call);
            self.replied(get(self.raw, c"GET".as_ptr(), c"s".as_ptr(), name.raw))
        }?;
        if !reply.is_string() {
            return None;
        }
        reply.bytes().map(<[u8]>::to_vec)
    }

    /// Sets the key as a script would: the server checks slot, role, disk and replicas, and replicates.
    /// For writes outside of a command, which nobody has checked.
    pub fn call_set(&self, name: Text, value: &[u8], ends_at: UnixMs) -> Result<(), Refusal> {
        // SAFETY: the context and the strings are live; the format has a string of the server, a buffer with
        // its length, a C string and a long long.
        accepted(unsafe {
            self.replied(api!(RedisModule_Call)(
                self.raw,
                c"SET".as_ptr(),
                c"!ESsbcl".as_ptr(),
                name.raw,
                value.as_ptr().cast::<c_char>(),
                value.len(),
                c"PXAT".as_ptr(),
                ends_at.0 as c_longlong,
            ))
        })
    }

    /// The same for DEL.
    pub fn call_del(&self, name: Text) -> Result<(), Refusal> {
        // SAFETY: the context and the strings are live; the format has one string of the server.
        accepted(unsafe {
            let del = api!(RedisModule_Call);
            self.replied(del(self.raw, c"DEL".as_ptr(), c"!ESs".as_ptr(), name.raw))
        })
    }

    /// Whether the server knows a command by this name. It is asked without arguments, which no command
    /// takes that has a key. No reply is a no.
    pub fn knows(&self, command: &CStr) -> bool {
        // SAFETY: the context is live, the strings are live C strings; the format has no argument.
        let reply = unsafe {
            let call = api!(RedisModule_Call);
            self.replied(call(self.raw, command.as_ptr(), c"E".as_ptr()))
        };
        reply.is_some_and(|reply| reply.bytes().is_some() && !reply.contains("unknown command"))
    }

    /// The rules of all users, as ACL LIST gives them; none if the server does not give them.
    pub fn acl_rules(&self) -> Option<Vec<String>> {
        // SAFETY: the context is live, the strings are live C strings; the format has one of them.
        let reply = unsafe {
            let acl = api!(RedisModule_Call);
            self.replied(acl(
                self.raw,
                c"ACL".as_ptr(),
                c"c".as_ptr(),
                c"LIST".as_ptr(),
            ))
        };
        reply?.texts()
    }

    /// The line of CLIENT LIST for one client; none where CLIENT is renamed.
    pub(super) fn client_list<R>(
        &self,
        client: ClientId,
        read: impl FnOnce(&[u8]) -> R,
    ) -> Option<R> {
        // SAFETY: the context is live, the strings are live C strings; the format has two of them and a long
        // long.
        let reply = unsafe {
            self.replied(api!(RedisModule_Call)(
                self.raw,
                c"CLIENT".as_ptr(),
                c"ccl".as_ptr(),
                c"LIST".as_ptr(),
                c"ID".as_ptr(),
                client.0.cast_signed(),
            ))
        }?;
        reply.bytes().map(read)
    }

    /// The lines of CLIENT LIST for all clients; none where CLIENT is renamed.
    pub fn clients(&self) -> Option<Vec<String>> {
        // SAFETY: the context is live, the strings are live C strings; the format has one of them.
        let reply = unsafe {
            let client = api!(RedisModule_Call);
            self.replied(client(
                self.raw,
                c"CLIENT".as_ptr(),
                c"c".as_ptr(),
                c"LIST".as_ptr(),
            ))
        }?;
        let lines = String::from_utf8_lossy(reply.bytes()?).into_owned();
        Some(lines.lines().map(str::to_owned).collect())
    }

    /// Ends the connection of the client of this number now, and not at the end of this turn of the loop.
    pub fn kill(&self, id: u64) {
        // SAFETY: the context is live, the strings are live C strings; the format has two of them and a long
        // long.
        let reply = unsafe {
            self.replied(api!(RedisModule_Call)(
                self.raw,
                c"CLIENT".as_ptr(),
                c"ccl".as_ptr(),
                c"KILL".as_ptr(),
                c"ID".as_ptr(),
                id.cast_signed(),
            ))
        };
        // None is gone already.
        drop(reply);
    }
}

fn accepted(reply: Option<CallReply>) -> Result<(), Refusal> {
    let reply = reply.ok_or(Refusal::NotNow)?;
    match reply.kind() {
        raw::REDISMODULE_REPLY_ERROR if reply.contains("cluster") => Err(Refusal::NotHere),
        raw::REDISMODULE_REPLY_ERROR => Err(Refusal::NotNow),
        _ => Ok(()),
    }
}
