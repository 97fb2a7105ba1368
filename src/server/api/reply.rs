//! Replies to the client of a command, piece by piece.

use std::ffi::{CString, c_long};

use redis_module::raw;

use super::Ctx;

impl Ctx {
    pub fn reply_integer(&self, number: i64) {
        // SAFETY: the context is live.
        unsafe { api!(RedisModule_ReplyWithLongLong)(self.raw, number) };
    }

    pub fn reply_null(&self) {
        // SAFETY: the context is live.
        unsafe { api!(RedisModule_ReplyWithNull)(self.raw) };
    }

    pub fn reply_bytes(&self, bytes: &[u8]) {
        // SAFETY: the context is live, and the server copies `len` bytes of a live slice.
        unsafe {
            api!(RedisModule_ReplyWithStringBuffer)(self.raw, bytes.as_ptr().cast(), bytes.len());
        }
    }

    /// An error: code word first, one line.
    pub fn reply_error(&self, message: &str) {
        let message = CString::new(message).unwrap_or_default();
        // SAFETY: the context is live, and the server copies a live C string.
        unsafe { api!(RedisModule_ReplyWithError)(self.raw, message.as_ptr()) };
    }

    /// The server's own words for a wrong number of arguments.
    pub fn reply_wrong_arity(&self) {
        // SAFETY: the context is live, and that of a command, whose name the server puts in.
        unsafe { api!(RedisModule_WrongArity)(self.raw) };
    }

    /// So many pairs of a name and a value follow.
    pub fn reply_map(&self, pairs: usize) {
        // SAFETY: the context is live.
        unsafe { api!(RedisModule_ReplyWithMap)(self.raw, pairs as c_long) };
    }

    /// So many replies follow.
    pub fn reply_array(&self, elements: usize) {
        // SAFETY: the context is live.
        unsafe { api!(RedisModule_ReplyWithArray)(self.raw, elements as c_long) };
    }
}
