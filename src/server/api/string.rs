//! Strings of the server.

use std::ffi::CStr;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::{ptr, slice};

use redis_module::raw;

use super::Ctx;

/// A string of the server: an argument, or one that [`OwnedText`] made.
#[derive(Clone, Copy)]
pub struct Text<'c> {
    pub(super) raw: *mut raw::RedisModuleString,
    lives: PhantomData<&'c Ctx>,
}

impl<'c> Text<'c> {
    /// # Safety
    ///
    /// `raw` is a string of the server that lives at least as long as `'c`, and is not changed in that time.
    pub(super) unsafe fn new(raw: *mut raw::RedisModuleString) -> Text<'c> {
        Text {
            raw,
            lives: PhantomData,
        }
    }

    pub fn bytes(self) -> &'c [u8] {
        let mut len = 0;
        // SAFETY: the string lives (`Text::new`), and `len` is a live number.
        let start = unsafe { api!(RedisModule_StringPtrLen)(self.raw, &raw mut len) };
        // SAFETY: the API gave start and length of the string's bytes; they do not change or move
        // while the string lives, which 'c does not outlast.
        unsafe { slice::from_raw_parts(start.cast(), len) }
    }
}

/// A string that we made, freed when dropped.
pub struct OwnedText<'c> {
    raw: *mut raw::RedisModuleString,
    ctx: &'c Ctx,
}

impl OwnedText<'_> {
    pub fn text(&self) -> Text<'_> {
        // SAFETY: freed by our drop, which the borrow does not outlast.
        unsafe { Text::new(self.raw) }
    }
}

impl Ctx {
    pub fn text(&self, bytes: &[u8]) -> OwnedText<'_> {
        // SAFETY: the context is live, and the server copies `len` bytes of a live slice.
        let raw =
            unsafe { api!(RedisModule_CreateString)(self.raw, bytes.as_ptr().cast(), bytes.len()) };
        OwnedText { raw, ctx: self }
    }

    /// A string that the API gave us to free; none for null.
    ///
    /// # Safety
    ///
    /// `raw` is null, or a string of which this is the only owner.
    pub(super) unsafe fn own(&self, raw: *mut raw::RedisModuleString) -> Option<OwnedText<'_>> {
        // Not `then_some`: that would make, and free, a string of null.
        (!raw.is_null()).then(|| OwnedText { raw, ctx: self })
    }
}

impl Drop for OwnedText<'_> {
    fn drop(&mut self) {
        // SAFETY: the string is ours and is freed nowhere else; the context is live.
        unsafe { api!(RedisModule_FreeString)(self.ctx.raw, self.raw) };
    }
}

/// A word of every SET that is replicated. The server would make and free a string of it each time.
static PXAT: AtomicPtr<raw::RedisModuleString> = AtomicPtr::new(ptr::null_mut());

pub(super) fn pxat(_: &Ctx) -> Text<'_> {
    const WORD: &CStr = c"PXAT";
    let mut raw = PXAT.load(Ordering::Relaxed);
    if raw.is_null() {
        // SAFETY: the API takes a null context for a string that outlives the callback; it copies the bytes
        // of a static string.
        raw = unsafe {
            api!(RedisModule_CreateString)(ptr::null_mut(), WORD.as_ptr(), WORD.count_bytes())
        };
        PXAT.store(raw, Ordering::Relaxed);
    }
    // SAFETY: freed by `free_statics` only, which no callback that works with keys outlives.
    unsafe { Text::new(raw) }
}

/// Frees what outlives the callbacks. After this no command and no timer may run.
pub(super) fn free_statics() {
    let pxat = PXAT.swap(ptr::null_mut(), Ordering::Relaxed);
    if !pxat.is_null() {
        // SAFETY: made by `pxat` without a context, and taken out of the static, so freed once.
        unsafe { api!(RedisModule_FreeString)(ptr::null_mut(), pxat) };
    }
}
