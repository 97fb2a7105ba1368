//! The server's module API, made safe. The only file with `unsafe` in it.
//!
//! Everything here leans on three promises of the server. (a) It calls a module on its main thread
//! only, one callback at a time. (b) What it hands to a callback (the context, the arguments) stays
//! valid until that callback returns. (c) A pointer to an API function is filled in before our load
//! function goes on, or stays null where the server is too old to have it. The wrappers keep their
//! pointers private and borrow from the [`Ctx`] of the running callback, so nothing can outlive it.

use std::cell::{Cell, RefCell, RefMut};
use std::cmp::Ordering;
use std::ffi::{CStr, CString, c_char, c_int, c_long, c_longlong, c_void};
use std::marker::PhantomData;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{self, AtomicPtr};
use std::time::SystemTime;
use std::{io, ptr, slice};

use redis_module::raw;

use crate::lock::{Lease, LockId};
use crate::queue::GrantId;
use crate::reply::{self, Reply};
use crate::request::BadRequest;
use crate::time::{MonoUs, Now, UnixMs, UnixUs};

/// Calls a function of the module API. Panics, into the guard of the running callback, where the
/// server has no such function; the functions used here are all in Redis 7.0.5 unless said.
macro_rules! api {
    ($function:ident($($arg:expr),* $(,)?)) => {
        // SAFETY: promise (c) for the function; the pointers among the arguments come from wrappers
        // of this file, which promise (b) keeps valid, or point into live Rust values.
        unsafe { raw::$function.expect(stringify!($function))($($arg),*) }
    };
}

const OK: c_int = raw::REDISMODULE_OK as c_int;
const ERR: c_int = raw::REDISMODULE_ERR as c_int;

/// The error number of something that is there already, on Linux and the BSDs.
const EBUSY: i32 = 16;

/// The context of the running callback: the way to everything else.
pub struct Ctx {
    raw: *mut raw::RedisModuleCtx,
    /// Who answers the client of this command.
    answers: Cell<Answers>,
}

/// Who answers the client of a command.
#[derive(Clone, Copy)]
enum Answers {
    /// The command, by returning.
    Command,
    /// Nobody yet: the client is blocked, and must be unblocked to hear of anything.
    Nobody(Blocked),
    /// The queue, in which it is or was: whoever takes it out unblocks it.
    Queue,
}

impl Ctx {
    fn new(raw: *mut raw::RedisModuleCtx) -> Ctx {
        Ctx {
            raw,
            answers: Cell::new(Answers::Command),
        }
    }

    /// The server's wall clock, by which keys expire.
    pub fn now(&self) -> UnixUs {
        // SAFETY: reading a function pointer that only loading writes.
        match unsafe { raw::RedisModule_Microseconds } {
            // SAFETY: promise (c).
            Some(microseconds) => UnixUs(unsafe { microseconds() }.cast_unsigned()),
            // Redis 7.0 tells modules milliseconds only; it reads the same clock.
            None => UnixUs(
                SystemTime::now()
                    .duration_since(SystemTime::UNIX_EPOCH)
                    .map_or(0, |since| since.as_micros() as u64),
            ),
        }
    }

    /// Both clocks.
    pub fn clocks(&self) -> Now {
        Now {
            wall: self.now(),
            mono: MonoUs(api!(RedisModule_MonotonicMicroseconds())),
        }
    }

    /// Writes a warning into the server's log.
    pub fn warn(&self, line: &str) {
        let level = raw::REDISMODULE_LOGLEVEL_WARNING.as_ptr().cast();
        // The line is an argument of "%s": in the format's place a percent sign in it would be read
        // as a directive.
        let line = CString::new(line.replace('\0', "\\0")).unwrap_or_default();
        api!(RedisModule_Log(
            self.raw,
            level,
            c"%s".as_ptr(),
            line.as_ptr()
        ));
    }

    /// The number of the server's version, 0x00MMmmpp; 0 for one too old to tell (before 6.2).
    pub fn server_version(&self) -> i32 {
        // SAFETY: reading a function pointer that only loading writes.
        match unsafe { raw::RedisModule_GetServerVersion } {
            // SAFETY: promise (c).
            Some(version) => unsafe { version() },
            None => 0,
        }
    }

    /// Whether the server has a memory limit and a policy that takes keys away when it is reached.
    pub fn may_evict(&self) -> bool {
        self.flags() & raw::REDISMODULE_CTX_FLAGS_EVICT != 0
    }

    /// What the server and the client are doing. Not for the uncontended path: the server computes
    /// its whole memory state for it.
    fn flags(&self) -> u32 {
        api!(RedisModule_GetContextFlags(self.raw)).cast_unsigned()
    }

    /// Whether the server decides for itself. Not for the uncontended path either.
    pub fn is_master(&self) -> bool {
        self.flags() & raw::REDISMODULE_CTX_FLAGS_MASTER != 0
    }

    /// Whether the server must not write of its own accord: it crashes or breaks its replicas if a
    /// timer writes during CLIENT PAUSE or FAILOVER.
    pub fn must_not_write(&self) -> bool {
        api!(RedisModule_AvoidReplicaTraffic()) != 0
    }

    /// The database that this callback works on.
    pub fn db(&self) -> i32 {
        api!(RedisModule_GetSelectedDb(self.raw))
    }

    pub fn select(&self, db: i32) {
        api!(RedisModule_SelectDb(self.raw, db));
    }

    /// Opens a key to read and write it. Not a hit or miss, no new idle time: a command that is
    /// refused leaves no trace. An expired key is removed on the way.
    pub fn open(&self, name: Text) -> Key<'_> {
        self.open_with(name, TO_WRITE | raw::REDISMODULE_OPEN_KEY_NOTOUCH)
    }

    fn open_with(&self, name: Text, mode: u32) -> Key<'_> {
        let raw = api!(RedisModule_OpenKey(self.raw, name.raw, mode.cast_signed()));
        let kind = match api!(RedisModule_KeyType(raw)) as isize {
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

    /// Reads a string as GET does: a hit or a miss in the statistics, and a use of the key. None if there
    /// is none, or the server gives no reply because GET has another name.
    fn call_get(&self, name: Text) -> Option<Vec<u8>> {
        let reply = api!(RedisModule_Call(
            self.raw,
            c"GET".as_ptr(),
            c"s".as_ptr(),
            name.raw
        ));
        if reply.is_null() {
            return None;
        }
        let is_string =
            api!(RedisModule_CallReplyType(reply)) as isize == raw::REDISMODULE_REPLY_STRING;
        let value = is_string.then(|| self.reply_text(reply)).flatten();
        api!(RedisModule_FreeCallReply(reply));
        value
    }

    /// Tells all who watch, cache or listen to the key that it was given a value and an end, and
    /// replicas and AOF what to do to be equal: what SET … PXAT does besides setting.
    fn after_set(&self, name: Text, value: Text, ends_at: UnixMs) {
        self.signal(name);
        self.notify(name, raw::REDISMODULE_NOTIFY_STRING, c"set");
        self.notify(name, raw::REDISMODULE_NOTIFY_GENERIC, c"expire");
        api!(RedisModule_Replicate(
            self.raw,
            c"SET".as_ptr(),
            c"sssl".as_ptr(),
            name.raw,
            value.raw,
            pxat().raw,
            ends_at.0 as c_longlong,
        ));
    }

    /// The same for a key that was given a new end, as PEXPIREAT does.
    pub fn after_expire(&self, name: Text, ends_at: UnixMs) {
        self.signal(name);
        self.notify(name, raw::REDISMODULE_NOTIFY_GENERIC, c"expire");
        api!(RedisModule_Replicate(
            self.raw,
            c"PEXPIREAT".as_ptr(),
            c"sl".as_ptr(),
            name.raw,
            ends_at.0 as c_longlong,
        ));
    }

    /// The same for a key that was deleted, as DEL does.
    pub fn after_delete(&self, name: Text) {
        self.signal(name);
        self.notify(name, raw::REDISMODULE_NOTIFY_GENERIC, c"del");
        api!(RedisModule_Replicate(
            self.raw,
            c"DEL".as_ptr(),
            c"s".as_ptr(),
            name.raw
        ));
    }

    fn signal(&self, name: Text) {
        api!(RedisModule_SignalModifiedKey(self.raw, name.raw));
    }

    fn notify(&self, name: Text, class: c_int, event: &CStr) {
        api!(RedisModule_NotifyKeyspaceEvent(
            self.raw,
            class,
            event.as_ptr(),
            name.raw
        ));
    }

    fn reply(&self, reply: &Reply) -> c_int {
        match reply {
            Reply::Integer(number) => api!(RedisModule_ReplyWithLongLong(self.raw, *number)),
            Reply::Null => api!(RedisModule_ReplyWithNull(self.raw)),
            Reply::Error(line) => {
                let line = CString::new(line.as_str()).unwrap_or_default();
                api!(RedisModule_ReplyWithError(self.raw, line.as_ptr()))
            }
            Reply::WrongCount => api!(RedisModule_WrongArity(self.raw)),
            Reply::Info(info) => {
                api!(RedisModule_ReplyWithMap(self.raw, 6));
                self.field("owner");
                self.reply_or_null(info.owner.as_deref(), Self::reply_bytes);
                self.field("fence");
                self.reply_or_null(info.fence, Self::reply_integer);
                self.field("held-ms");
                self.reply_or_null(info.held_ms, Self::reply_integer);
                self.field("ttl-ms");
                self.reply_integer(info.ttl_ms);
                self.field("waiters");
                self.reply_integer(info.waiters);
                self.field("queue");
                api!(RedisModule_ReplyWithArray(
                    self.raw,
                    info.queue.len() as c_long
                ));
                for (owner, waited_ms) in &info.queue {
                    api!(RedisModule_ReplyWithMap(self.raw, 2));
                    self.field("owner");
                    self.reply_bytes(owner);
                    self.field("waited-ms");
                    self.reply_integer(*waited_ms);
                }
                OK
            }
            Reply::Later => OK,
        }
    }

    fn field(&self, name: &str) {
        self.reply_bytes(name.as_bytes());
    }

    fn reply_bytes(&self, bytes: &[u8]) -> c_int {
        api!(RedisModule_ReplyWithStringBuffer(
            self.raw,
            bytes.as_ptr().cast(),
            bytes.len()
        ))
    }

    fn reply_integer(&self, number: i64) -> c_int {
        api!(RedisModule_ReplyWithLongLong(self.raw, number))
    }

    fn reply_or_null<T>(&self, value: Option<T>, reply: impl FnOnce(&Self, T) -> c_int) -> c_int {
        match value {
            Some(value) => reply(self, value),
            None => api!(RedisModule_ReplyWithNull(self.raw)),
        }
    }
}

/// A string of the server: an argument, or one that [`OwnedText`] made.
#[derive(Clone, Copy)]
pub struct Text<'c> {
    raw: *mut raw::RedisModuleString,
    lives: PhantomData<&'c Ctx>,
}

impl<'c> Text<'c> {
    fn new(raw: *mut raw::RedisModuleString) -> Text<'c> {
        Text {
            raw,
            lives: PhantomData,
        }
    }

    /// The key of this name in a database.
    pub fn in_db(self, db: i32) -> LockId {
        LockId {
            db,
            name: self.bytes().into(),
        }
    }

    pub fn bytes(self) -> &'c [u8] {
        let mut len = 0;
        let start = api!(RedisModule_StringPtrLen(self.raw, &raw mut len));
        // SAFETY: the API gave start and length of the string's bytes; they do not change or move
        // while the string lives, which 'c does not outlast.
        unsafe { slice::from_raw_parts(start.cast(), len) }
    }
}

/// The arguments of a command, its name first.
pub struct Args<'c>(&'c [*mut raw::RedisModuleString]);

impl<'c> Args<'c> {
    /// The key: the first argument.
    pub fn key(&self) -> Result<Text<'c>, BadRequest<'c>> {
        let raw = self.0.get(1).ok_or(BadRequest::WrongCount)?;
        Ok(Text::new(*raw))
    }

    /// The arguments from this place on; the command's name is at 0.
    pub fn from(&self, place: usize) -> impl Iterator<Item = &'c [u8]> + use<'c> {
        self.0.iter().skip(place).map(|raw| Text::new(*raw).bytes())
    }
}

/// Mode of a key that is opened to read and write it. Not a hit or miss in the statistics, unlike reading.
const TO_WRITE: u32 = raw::REDISMODULE_READ | raw::REDISMODULE_WRITE;

/// Longest string that Redis 7.0 packs into one piece with its header (`embstr`), in bytes.
const PACKED_BEFORE_7_2: usize = 44;

/// What is at a key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Empty,
    String,
    Other,
}

/// An open key. Close it (drop it) before notifying: a listener may replace its value.
pub struct Key<'c> {
    raw: *mut raw::RedisModuleKey,
    kind: Kind,
    ctx: &'c Ctx,
}

impl Key<'_> {
    /// What was there when the key was opened.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Length of the value in bytes, without touching its encoding.
    pub fn len(&self) -> usize {
        api!(RedisModule_ValueLength(self.raw))
    }

    /// The value of a string; none for anything else. Changes its encoding to `raw`: the API hands out
    /// the bytes of a number or of a short string only after it has unpacked them. See [`Key::peek`].
    pub fn value(&self) -> Option<&[u8]> {
        if self.kind != Kind::String {
            return None;
        }
        // To Redis 7.0 an unpacked value is a new one, used just now. Longer ones are never packed there.
        let idle_ms =
            match self.len() <= PACKED_BEFORE_7_2 && self.ctx.server_version() < 0x07_02_00 {
                true => self.idle_ms(),
                false => None,
            };
        let mut len = 0;
        let mode = raw::REDISMODULE_READ.cast_signed();
        let start = api!(RedisModule_StringDMA(self.raw, &raw mut len, mode));
        if let Some(idle_ms) = idle_ms {
            self.set_idle_ms(idle_ms);
        }
        // SAFETY: for a string the API gives start and length of its bytes, valid until the key is
        // written or closed; both need the key exclusively, the slice borrows it.
        Some(unsafe { slice::from_raw_parts(start.cast(), len) })
    }

    /// The value of a string, leaving encoding, idle time and LFU counter as they are; none for anything
    /// else. Closes the key.
    ///
    /// Costs a GET, too much for the commands that many send: its reply is the only copy of a value that
    /// the API makes without unpacking it. That GET counts as a use, which is taken back.
    ///
    /// `can_set_idle_time`: see [`can_set_idle_time`](super::load::can_set_idle_time). Without that the idle
    /// time is kept, and the encoding is not.
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
            api!(RedisModule_SetLFU(key.raw, uses));
        }
        value.or_else(|| key.value().map(<[u8]>::to_vec))
    }

    /// How long the key has been idle, in milliseconds; none where the server counts uses instead.
    fn idle_ms(&self) -> Option<raw::mstime_t> {
        let mut idle_ms = -1;
        api!(RedisModule_GetLRU(self.raw, &raw mut idle_ms));
        (idle_ms >= 0).then_some(idle_ms)
    }

    /// Returns whether the server keeps idle times.
    fn set_idle_ms(&self, idle_ms: raw::mstime_t) -> bool {
        api!(RedisModule_SetLRU(self.raw, idle_ms)) == OK
    }

    /// The LFU counter; none where the server keeps idle times instead.
    fn uses(&self) -> Option<c_longlong> {
        let mut uses = -1;
        api!(RedisModule_GetLFU(self.raw, &raw mut uses));
        (uses >= 0).then_some(uses)
    }

    /// Counts as a use, as a native command does that changes the key: else eviction takes those locks
    /// first that are renewed for longest. Unlike the server, also while it saves a snapshot, when a write
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
        let at = api!(RedisModule_GetAbsExpire(self.raw));
        (at != c_longlong::from(raw::REDISMODULE_NO_EXPIRE)).then_some(UnixMs(at))
    }

    /// Gives the key to an owner and closes it, and tells all who watch, cache or listen to it, replicas
    /// and AOF. In the step of a command, which the server has checked.
    pub fn give(mut self, name: Text, lease: Lease) {
        let ctx = self.ctx;
        let value = ctx.text(&lease.value());
        api!(RedisModule_StringSet(self.raw, value.raw));
        self.set_end(lease.ends_at);
        drop(self);
        ctx.after_set(name, value.text(), lease.ends_at);
    }

    pub fn set_end(&mut self, ends_at: UnixMs) {
        api!(RedisModule_SetAbsExpire(self.raw, ends_at.0));
    }

    pub fn delete(&mut self) {
        api!(RedisModule_DeleteKey(self.raw));
    }
}

impl Drop for Key<'_> {
    fn drop(&mut self) {
        // A key that was opened to read and is missing has no handle; the API takes null.
        api!(RedisModule_CloseKey(self.raw));
    }
}

/// A string that we made, freed when dropped.
pub struct OwnedText<'c> {
    raw: *mut raw::RedisModuleString,
    ctx: &'c Ctx,
}

impl OwnedText<'_> {
    pub fn text(&self) -> Text<'_> {
        Text::new(self.raw)
    }
}

impl Ctx {
    pub fn text(&self, bytes: &[u8]) -> OwnedText<'_> {
        let raw = api!(RedisModule_CreateString(
            self.raw,
            bytes.as_ptr().cast(),
            bytes.len()
        ));
        OwnedText { raw, ctx: self }
    }
}

impl Drop for OwnedText<'_> {
    fn drop(&mut self) {
        api!(RedisModule_FreeString(self.ctx.raw, self.raw));
    }
}

/// State that only the server's main thread touches.
pub struct MainThread<T>(RefCell<T>);

// SAFETY: promise (a). `get` asks for a `Ctx`, which exists only inside a callback and cannot be sent
// to another thread (it holds a raw pointer).
unsafe impl<T> Sync for MainThread<T> {}

impl<T> MainThread<T> {
    pub const fn new(value: T) -> MainThread<T> {
        MainThread(RefCell::new(value))
    }

    /// Borrows the state. Hold no borrow across a call of the API that can call us back.
    pub fn get(&self, _: &Ctx) -> RefMut<'_, T> {
        self.0.borrow_mut()
    }

    /// The same for a crash report, which may come while the state is borrowed.
    pub fn try_get(&self, _: &InfoCtx) -> Option<RefMut<'_, T>> {
        self.0.try_borrow_mut().ok()
    }
}

/// Runs the body of a callback. A panic must not reach the server, which it would end.
fn guarded<R>(body: impl FnOnce() -> R) -> Option<R> {
    panic::catch_unwind(AssertUnwindSafe(body)).ok()
}

/// Lets a panic write one line into the server's log. The standard hook may print a backtrace, which
/// frees what another allocator gave where the server loads modules with their own (Valkey 8.1).
fn log_panics() {
    panic::set_hook(Box::new(|panic| {
        let line = panic.to_string().replace('\n', " ");
        Ctx::new(ptr::null_mut()).warn(&format!("please report this: {line}"));
    }));
}

/// A command: what the server must know of it, and the function that carries it out.
pub trait Command {
    const SPEC: Spec;
    fn run<'c>(ctx: &'c Ctx, args: &Args<'c>) -> Result<Reply, BadRequest<'c>>;
}

/// What the server tells others of a command (COMMAND INFO, DOCS and GETKEYS, ACL).
pub struct Spec {
    pub name: &'static CStr,
    pub flags: &'static CStr,
    /// ACL categories of the server, where commands of modules have any (7.2 and later).
    pub categories: &'static str,
    /// Number of arguments with the name; negative: at least as many.
    pub arity: c_int,
    pub access: Access,
    /// The first version that had it: stays as it is when the version goes on.
    pub since: &'static CStr,
    pub summary: &'static CStr,
    pub complexity: &'static CStr,
    pub args: &'static [Arg],
}

/// What a command does to its key, the first argument.
#[derive(Clone, Copy)]
pub enum Access {
    Read,
    Update,
    /// No key at all.
    None,
}

/// An argument in COMMAND DOCS.
pub struct Arg {
    name: &'static CStr,
    kind: ArgKind,
    /// The word before it, of an argument that may be left out.
    token: Option<&'static CStr>,
}

impl Arg {
    pub const fn new(name: &'static CStr, kind: ArgKind) -> Arg {
        Arg {
            name,
            kind,
            token: None,
        }
    }

    /// May be left out, and follows this word.
    pub const fn after(self, token: &'static CStr) -> Arg {
        Arg {
            token: Some(token),
            ..self
        }
    }
}

#[derive(Clone, Copy)]
pub enum ArgKind {
    Key,
    Bytes,
    Integer,
}

extern "C" fn enter<C: Command>(
    ctx: *mut raw::RedisModuleCtx,
    argv: *mut *mut raw::RedisModuleString,
    argc: c_int,
) -> c_int {
    let ctx = Ctx::new(ctx);
    // SAFETY: promise (b): the server passes argc pointers at argv.
    let args = Args(unsafe { slice::from_raw_parts(argv, usize::try_from(argc).unwrap_or(0)) });
    let done = guarded(|| ctx.reply(&C::run(&ctx, &args).unwrap_or_else(Reply::from)));
    let panicked = || {
        let reply = Reply::Error(reply::PANIC.to_owned());
        match ctx.answers.get() {
            // A client that is blocked must be unblocked to hear of it, or it hangs for ever.
            Answers::Nobody(client) => super::waiting::send_away(&ctx, client, reply),
            // It waits, or was unblocked: a second time would be a double free.
            Answers::Queue => {}
            Answers::Command => {
                ctx.reply(&reply);
            }
        }
    };
    if done.is_none() {
        guarded(panicked);
    }
    OK
}

/// The server refused what we asked for; the text says what.
pub struct Refused(pub String);

/// Turns the API's OK or ERR into a result.
fn accepted(answer: c_int, what: &str) -> Result<(), Refused> {
    (answer == OK)
        .then_some(())
        .ok_or_else(|| Refused(format!("the server refused {what}")))
}

impl Ctx {
    /// Makes a command known to the server, in this ACL category besides its own. Only while loading.
    pub fn register<C: Command>(&self, category: Option<&CStr>) -> Result<(), Refused> {
        let spec = C::SPEC;
        let what = spec.name.to_string_lossy();
        let (first, last, step) = match spec.access {
            Access::None => (0, 0, 0),
            Access::Read | Access::Update => (1, 1, 1),
        };
        accepted(
            api!(RedisModule_CreateCommand(
                self.raw,
                spec.name.as_ptr(),
                Some(enter::<C>),
                spec.flags.as_ptr(),
                first,
                last,
                step,
            )),
            &what,
        )?;
        let command = api!(RedisModule_GetCommand(self.raw, spec.name.as_ptr()));
        // SAFETY: reading a function pointer that only loading writes.
        if let Some(set_categories) = unsafe { raw::RedisModule_SetCommandACLCategories } {
            let own = category.map(CStr::to_string_lossy);
            let all: Vec<_> = own
                .as_deref()
                .into_iter()
                .chain([spec.categories])
                .collect();
            let all = CString::new(all.join(" ")).unwrap_or_default();
            // SAFETY: promise (c), the command was just created, and the list is a live C string.
            let answer = unsafe { set_categories(command, all.as_ptr()) };
            accepted(answer, &format!("the ACL categories of {what}"))?;
        }
        self.describe(command, &spec)
    }

    /// Makes an ACL category known, on servers where a module can (7.4 and later). Only while loading,
    /// before the commands. Answers whether commands can be put into it.
    pub fn register_category(&self, name: &CStr) -> Result<bool, Refused> {
        // SAFETY: reading a function pointer that only loading writes.
        let Some(add) = (unsafe { raw::RedisModule_AddACLCategory }) else {
            return Ok(false);
        };
        // SAFETY: promise (c); the name is a live C string.
        let answer = unsafe { add(self.raw, name.as_ptr()) };
        // Unloading leaves the category behind, so loading again finds it there.
        if answer == ERR && io::Error::last_os_error().raw_os_error() == Some(EBUSY) {
            return Ok(true);
        }
        accepted(answer, "our ACL category").map(|()| true)
    }

    fn describe(&self, command: *mut raw::RedisModuleCommand, spec: &Spec) -> Result<(), Refused> {
        // The server walks the arrays by these sizes, so an older one skips fields it doesn't know.
        let version = raw::RedisModuleCommandInfoVersion {
            version: 1,
            sizeof_historyentry: size_of::<raw::RedisModuleCommandHistoryEntry>(),
            sizeof_keyspec: size_of::<raw::RedisModuleCommandKeySpec>(),
            sizeof_arg: size_of::<raw::RedisModuleCommandArg>(),
        };
        // SAFETY: these C structs are numbers, pointers and unions of such: all zero is a valid value,
        // and is what ends the arrays.
        let (no_key, no_arg, mut info) = unsafe {
            (
                std::mem::zeroed::<raw::RedisModuleCommandKeySpec>(),
                std::mem::zeroed::<raw::RedisModuleCommandArg>(),
                std::mem::zeroed::<raw::RedisModuleCommandInfo>(),
            )
        };
        let mut keys = vec![];
        if let Some(flags) = match spec.access {
            Access::Read => Some(raw::REDISMODULE_CMD_KEY_RO | raw::REDISMODULE_CMD_KEY_ACCESS),
            Access::Update => Some(
                raw::REDISMODULE_CMD_KEY_RW
                    | raw::REDISMODULE_CMD_KEY_ACCESS
                    | raw::REDISMODULE_CMD_KEY_UPDATE,
            ),
            Access::None => None,
        } {
            let mut key = no_key;
            key.flags = u64::from(flags);
            key.begin_search_type =
                raw::RedisModuleKeySpecBeginSearchType_REDISMODULE_KSPEC_BS_INDEX;
            key.bs.index.pos = 1;
            keys.push(key);
        }
        keys.push(no_key);
        let mut args: Vec<_> = spec
            .args
            .iter()
            .map(|arg| raw::RedisModuleCommandArg {
                name: arg.name.as_ptr(),
                type_: match arg.kind {
                    ArgKind::Key => raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_KEY,
                    ArgKind::Bytes => raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_STRING,
                    ArgKind::Integer => raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_INTEGER,
                },
                token: arg.token.map_or(ptr::null(), CStr::as_ptr),
                flags: match arg.token {
                    Some(_) => raw::REDISMODULE_CMD_ARG_OPTIONAL.cast_signed(),
                    None => 0,
                },
                ..no_arg
            })
            .collect();
        args.push(no_arg);
        info.version = &raw const version;
        info.summary = spec.summary.as_ptr();
        info.complexity = spec.complexity.as_ptr();
        info.since = spec.since.as_ptr();
        info.arity = spec.arity;
        info.key_specs = keys.as_mut_ptr();
        info.args = args.as_mut_ptr();
        // The server copies all of it before it returns.
        accepted(
            api!(RedisModule_SetCommandInfo(command, &raw const info)),
            &format!("the description of {}", spec.name.to_string_lossy()),
        )
    }

    /// Says how we behave as a module.
    ///
    /// We signal real writes ourselves: the server would signal every key that was opened to be
    /// written. While a replica loads a snapshot beside the old data, nothing of ours is in either.
    pub fn declare_options(&self) {
        let mut options = raw::REDISMODULE_OPTION_NO_IMPLICIT_SIGNAL_MODIFIED
            | raw::REDISMODULE_OPTIONS_HANDLE_REPL_ASYNC_LOAD;
        if self.valkey_version().is_some() {
            options |= VALKEY_HANDLE_ATOMIC_SLOT_MIGRATION;
        }
        api!(RedisModule_SetModuleOptions(
            self.raw,
            options.cast_signed()
        ));
    }

    /// Valkey's own version; none on Redis. Valkey tells modules that it is Redis 7.2.4.
    pub fn valkey_version(&self) -> Option<String> {
        let info = api!(RedisModule_GetServerInfo(self.raw, c"server".as_ptr()));
        let field = api!(RedisModule_ServerInfoGetFieldC(
            info,
            c"valkey_version".as_ptr()
        ));
        let version = (!field.is_null()).then(|| {
            // SAFETY: not null, so a C string, valid until the info is freed.
            unsafe { CStr::from_ptr(field) }
                .to_string_lossy()
                .into_owned()
        });
        api!(RedisModule_FreeServerInfo(self.raw, info));
        version
    }

    /// Lets the server tell us when it becomes master or replica, when its settings change, and that it is
    /// alive.
    pub fn subscribe(&self) -> Result<(), Refused> {
        for (id, callback) in [
            (
                raw::REDISMODULE_EVENT_REPLICATION_ROLE_CHANGED,
                role_changed as EventCallback,
            ),
            (raw::REDISMODULE_EVENT_CRON_LOOP, cron),
            (raw::REDISMODULE_EVENT_CONFIG, configured),
        ] {
            let event = raw::RedisModuleEvent { id, dataver: 1 };
            let answer = api!(RedisModule_SubscribeToServerEvent(
                self.raw,
                event,
                Some(callback)
            ));
            accepted(answer, "to tell us of events")?;
        }
        Ok(())
    }
}

/// Valkey 9: with the keys move no data of ours. Without this bit a loaded module switches CLUSTER
/// MIGRATESLOTS off. Versions before 9 keep a bit that they do not know without a look at it.
const VALKEY_HANDLE_ATOMIC_SLOT_MIGRATION: u32 = 1 << 5;

type EventCallback =
    unsafe extern "C" fn(*mut raw::RedisModuleCtx, raw::RedisModuleEvent, u64, *mut c_void);

extern "C" fn role_changed(
    ctx: *mut raw::RedisModuleCtx,
    _: raw::RedisModuleEvent,
    role: u64,
    _: *mut c_void,
) {
    let ctx = Ctx::new(ctx);
    guarded(|| match role {
        raw::REDISMODULE_EVENT_REPLROLECHANGED_NOW_MASTER => super::events::promoted(&ctx),
        _ => super::events::demoted(&ctx),
    });
}

extern "C" fn cron(
    ctx: *mut raw::RedisModuleCtx,
    _: raw::RedisModuleEvent,
    _: u64,
    _: *mut c_void,
) {
    let ctx = Ctx::new(ctx);
    guarded(|| super::waiting::cron(&ctx));
}

extern "C" fn configured(
    ctx: *mut raw::RedisModuleCtx,
    _: raw::RedisModuleEvent,
    _: u64,
    _: *mut c_void,
) {
    let ctx = Ctx::new(ctx);
    guarded(|| super::events::configured(&ctx));
}

/// A client that waits. Unblock it exactly once: twice is a double free, never and the module cannot
/// be unloaded.
#[derive(Clone, Copy, Debug)]
pub struct Blocked {
    raw: *mut raw::RedisModuleBlockedClient,
    /// Known only where it was blocked: the server's callbacks name a client by its pointer alone.
    connected: Connected,
}

/// What a client was when it began to wait, as far as it tells later whether the server is about to close
/// its connection.
#[derive(Clone, Copy, Debug, Default)]
struct Connected {
    /// As another user than the default one.
    as_named_user: bool,
    /// By RESP3, over which more may be sent than replies.
    by_resp3: bool,
}

impl PartialEq for Blocked {
    fn eq(&self, other: &Blocked) -> bool {
        self.raw == other.raw
    }
}

impl Eq for Blocked {}

impl PartialOrd for Blocked {
    fn partial_cmp(&self, other: &Blocked) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Blocked {
    fn cmp(&self, other: &Blocked) -> Ordering {
        self.raw.cmp(&other.raw)
    }
}

/// What a client that waited is told, and the grant that it learns of by it.
pub struct Parting {
    pub reply: Reply,
    pub grant: Option<GrantId>,
    connected: Connected,
    /// Whether the server will send the reply. Told by the reply callback, which is not called for a client
    /// that has gone.
    told: Cell<bool>,
}

impl Parting {
    fn new(reply: Reply, grant: Option<GrantId>, connected: Connected) -> Parting {
        Parting {
            reply,
            grant,
            connected,
            told: Cell::new(false),
        }
    }
}

impl Ctx {
    /// Whether the client of this command can wait: not in a transaction, a script or a function, and
    /// not on a server that does not decide. Blocking there is answered with an error by the API
    /// itself while our handler runs on.
    pub fn can_block(&self) -> bool {
        let flags = self.flags();
        let one_step = raw::REDISMODULE_CTX_FLAGS_MULTI
            | raw::REDISMODULE_CTX_FLAGS_LUA
            | raw::REDISMODULE_CTX_FLAGS_DENY_BLOCKING;
        flags & one_step == 0 && flags & raw::REDISMODULE_CTX_FLAGS_MASTER != 0
    }

    /// The client of this command was blocked, and is in the queue now.
    pub fn queued(&self) {
        self.answers.set(Answers::Queue);
    }

    /// Blocks the client of this command. The server's own timeout is not used: it comes up to 100 ms
    /// late, and crashes Redis 7.2 when it meets a grant.
    ///
    /// `may_be_unblocked`: whether CLIENT UNBLOCK is to work. None if the server refuses: Valkey does so
    /// for a client that is subscribed to a channel.
    pub fn block(&self, may_be_unblocked: bool) -> Option<Blocked> {
        let unblock = may_be_unblocked.then_some(unblocked_by_command as CommandCallback);
        let client = api!(RedisModule_BlockClient(
            self.raw,
            Some(part),
            unblock,
            Some(parted),
            0,
        ));
        if client.is_null() {
            return None;
        }
        api!(RedisModule_SetDisconnectCallback(
            client,
            Some(disconnected)
        ));
        let client = Blocked {
            raw: client,
            connected: self.connected(),
        };
        self.answers.set(Answers::Nobody(client));
        Some(client)
    }
}

impl Blocked {
    /// Tells the client, which is granted nothing, before the server sleeps again.
    pub fn answer(self, reply: Reply) {
        self.unblock(Parting::new(reply, None, self.connected));
    }

    /// Tells the client of its grant, before the server sleeps again.
    pub fn grant(self, reply: Reply, grant: GrantId) {
        self.unblock(Parting::new(reply, Some(grant), self.connected));
    }

    fn at(raw: *mut raw::RedisModuleBlockedClient) -> Blocked {
        Blocked {
            raw,
            connected: Connected::default(),
        }
    }

    fn unblock(self, parting: Parting) {
        self.end(Box::into_raw(Box::new(parting)));
    }

    fn end(self, parting: *mut Parting) {
        api!(RedisModule_UnblockClient(self.raw, parting.cast()));
    }
}

type CommandCallback = unsafe extern "C" fn(
    *mut raw::RedisModuleCtx,
    *mut *mut raw::RedisModuleString,
    c_int,
) -> c_int;

/// The client is being unblocked and is still there.
extern "C" fn part(
    ctx: *mut raw::RedisModuleCtx,
    _: *mut *mut raw::RedisModuleString,
    _: c_int,
) -> c_int {
    let ctx = Ctx::new(ctx);
    let parting: *const Parting = api!(RedisModule_GetBlockedClientPrivateData(ctx.raw)).cast();
    // SAFETY: the pointer is null, or that of `Blocked::unblock`, which `parted` frees after this.
    if let Some(parting) = unsafe { parting.as_ref() } {
        guarded(|| {
            ctx.reply(&parting.reply);
            // Asked for grants only, and after the reply, which may itself exceed the buffer's limit.
            parting
                .told
                .set(parting.grant.is_none() || !ctx.is_closing(parting.connected));
        });
    }
    OK
}

/// The client was unblocked, and told if it was still there.
extern "C" fn parted(ctx: *mut raw::RedisModuleCtx, parting: *mut c_void) {
    let ctx = Ctx::new(ctx);
    // SAFETY: the pointer is that of `Blocked::unblock`; the server calls this once, at the end.
    let parting = unsafe { Box::from_raw(parting.cast::<Parting>()) };
    let told = api!(RedisModule_BlockedClientDisconnected(ctx.raw)) == 0 && parting.told.get();
    guarded(|| super::waiting::parted(&ctx, *parting, told));
}

/// The client is gone, or is about to be told by the server itself (CLIENT UNBLOCK … ERROR, a server
/// that becomes a replica). Also called for one that was unblocked by us in this turn of the loop.
extern "C" fn disconnected(
    ctx: *mut raw::RedisModuleCtx,
    client: *mut raw::RedisModuleBlockedClient,
) {
    let (ctx, client) = (Ctx::new(ctx), Blocked::at(client));
    match guarded(|| super::waiting::gone(&ctx, client)) {
        Some(true) => client.end(ptr::null_mut()),
        Some(false) => {
            let id = ClientId(api!(RedisModule_GetClientId(ctx.raw)));
            guarded(|| super::waiting::gone_twice(&ctx, id));
        }
        None => {}
    }
}

/// A client's connection: may be gone by the time it is used.
#[derive(Clone, Copy)]
pub struct ClientId(u64);

impl Ctx {
    /// Closes a connection, if it is still there. Not from a disconnect callback: the client may be
    /// half freed.
    pub fn close(&self, client: ClientId) {
        api!(RedisModule_DeauthenticateAndCloseClient(self.raw, client.0));
    }
}

impl Ctx {
    /// What there is to know of the client of this command for [`Ctx::is_closing`].
    fn connected(&self) -> Connected {
        Connected {
            as_named_user: self.user_is_named(api!(RedisModule_GetClientId(self.raw))),
            by_resp3: self.flags() & raw::REDISMODULE_CTX_FLAGS_RESP3 != 0,
        }
    }

    fn user_is_named(&self, client: u64) -> bool {
        let name = api!(RedisModule_GetClientUserNameById(self.raw, client));
        if name.is_null() {
            return false;
        }
        let name = OwnedText {
            raw: name,
            ctx: self,
        };
        name.text().bytes() != b"default"
    }

    /// Whether the connection of this client is marked to be closed: the server sends it nothing more. No
    /// function of the API tells, but there are two reasons to mark a client that is blocked. Its user was
    /// taken away (ACL DELUSER, ACL LOAD): then it has become the default user, which it cannot by itself
    /// while it waits. Or its output buffer is full, which it can be by what is pushed to it: only then
    /// CLIENT LIST is asked, which on Valkey since 8.1 goes through all clients.
    fn is_closing(&self, connected: Connected) -> bool {
        let id = api!(RedisModule_GetClientId(self.raw));
        connected.as_named_user && !self.user_is_named(id)
            || connected.by_resp3 && self.is_pushed_to(id) && self.is_listed_as_closing(id)
    }

    /// Whether the client gets messages of channels, or what it is to forget of its cache.
    fn is_pushed_to(&self, client: u64) -> bool {
        // SAFETY: a C struct of numbers and bytes: all zero is a valid value.
        let mut info = unsafe { std::mem::zeroed::<raw::RedisModuleClientInfo>() };
        info.version = u64::from(raw::REDISMODULE_CLIENTINFO_VERSION);
        let pushed =
            raw::REDISMODULE_CLIENTINFO_FLAG_PUBSUB | raw::REDISMODULE_CLIENTINFO_FLAG_TRACKING;
        api!(RedisModule_GetClientInfoById(
            (&raw mut info).cast(),
            client
        )) == OK
            && info.flags & u64::from(pushed) != 0
    }

    /// Where CLIENT is renamed nobody is.
    fn is_listed_as_closing(&self, client: u64) -> bool {
        let reply = api!(RedisModule_Call(
            self.raw,
            c"CLIENT".as_ptr(),
            c"ccl".as_ptr(),
            c"LIST".as_ptr(),
            c"ID".as_ptr(),
            client.cast_signed(),
        ));
        if reply.is_null() {
            return false;
        }
        let closing = self.reply_bytes_of(reply).is_some_and(lists_as_closing);
        api!(RedisModule_FreeCallReply(reply));
        closing
    }
}

/// Whether a line of CLIENT LIST has one of the flags A (closed as soon as possible) and c (closed after
/// its replies).
fn lists_as_closing(line: &[u8]) -> bool {
    const FIELD: &[u8] = b" flags=";
    // The last one: the path of a unix socket, which may say anything, stands before it.
    let Some(at) = line.windows(FIELD.len()).rposition(|found| found == FIELD) else {
        return false;
    };
    let flags = &line[at + FIELD.len()..];
    flags
        .iter()
        .take_while(|flag| **flag != b' ')
        .any(|flag| matches!(flag, b'A' | b'c'))
}

/// CLIENT UNBLOCK … TIMEOUT.
extern "C" fn unblocked_by_command(
    ctx: *mut raw::RedisModuleCtx,
    _: *mut *mut raw::RedisModuleString,
    _: c_int,
) -> c_int {
    let ctx = Ctx::new(ctx);
    let client = Blocked::at(api!(RedisModule_GetBlockedClientHandle(ctx.raw)));
    guarded(|| {
        if super::waiting::gone(&ctx, client) {
            client.end(ptr::null_mut());
        }
        ctx.reply(&Reply::Null)
    });
    OK
}

/// A timer that has not fired.
#[derive(Clone, Copy)]
pub struct Timer(raw::RedisModuleTimerID);

/// Longest period of a timer: the server multiplies it by 1000, and keeps it by the wall clock, which
/// may be stepped before it fires.
const LONGEST_TIMER_MS: u64 = 60_000;

impl Ctx {
    /// Calls [`super::waiting::timer_fired`] once, not before so many milliseconds, or after a minute.
    pub fn start_timer(&self, ms: u64) -> Timer {
        let ms = ms.min(LONGEST_TIMER_MS).cast_signed();
        Timer(api!(RedisModule_CreateTimer(
            self.raw,
            ms,
            Some(fired),
            ptr::null_mut()
        )))
    }

    /// Stops a timer, but never the one that is firing: that is a double free.
    pub fn stop_timer(&self, timer: Timer) {
        api!(RedisModule_StopTimer(self.raw, timer.0, ptr::null_mut()));
    }
}

extern "C" fn fired(ctx: *mut raw::RedisModuleCtx, _: *mut c_void) {
    let ctx = Ctx::new(ctx);
    guarded(|| super::waiting::timer_fired(&ctx));
}

/// Why the server refuses a write that no client asked for.
pub enum Refusal {
    /// This node of the cluster does not serve the key, or nothing at present. There is no code word
    /// for it, but of all refusals only these speak of a cluster.
    NotHere,
    /// READONLY, NOREPLICAS, MISCONF … may pass.
    NotNow,
}

impl Ctx {
    /// Sets the key as a script would: the server checks slot, role, disk and replicas, and replicates.
    /// For writes outside of a command, which nobody has checked.
    pub fn call_set(&self, name: Text, value: &[u8], ends_at: UnixMs) -> Result<(), Refusal> {
        self.called(api!(RedisModule_Call(
            self.raw,
            c"SET".as_ptr(),
            c"!ESsbcl".as_ptr(),
            name.raw,
            value.as_ptr().cast::<c_char>(),
            value.len(),
            c"PXAT".as_ptr(),
            ends_at.0 as c_longlong,
        )))
    }

    /// The same for DEL.
    pub fn call_del(&self, name: Text) -> Result<(), Refusal> {
        self.called(api!(RedisModule_Call(
            self.raw,
            c"DEL".as_ptr(),
            c"!ESs".as_ptr(),
            name.raw,
        )))
    }

    fn called(&self, reply: *mut raw::RedisModuleCallReply) -> Result<(), Refusal> {
        if reply.is_null() {
            return Err(Refusal::NotNow);
        }
        let kind = api!(RedisModule_CallReplyType(reply)) as isize;
        let text = self.reply_text(reply).unwrap_or_default();
        api!(RedisModule_FreeCallReply(reply));
        match kind {
            raw::REDISMODULE_REPLY_ERROR if contains(&text, "cluster") => Err(Refusal::NotHere),
            raw::REDISMODULE_REPLY_ERROR => Err(Refusal::NotNow),
            _ => Ok(()),
        }
    }

    /// The bytes of a string or an error; none in any other reply. Of a reply that is not freed while they
    /// are looked at.
    fn reply_bytes_of(&self, reply: *mut raw::RedisModuleCallReply) -> Option<&[u8]> {
        let mut len = 0;
        let start = api!(RedisModule_CallReplyStringPtr(reply, &raw mut len));
        if start.is_null() {
            return None;
        }
        // SAFETY: the API gave start and length of the text, valid until the reply is freed.
        Some(unsafe { slice::from_raw_parts(start.cast::<u8>(), len) })
    }

    /// The same, to keep.
    fn reply_text(&self, reply: *mut raw::RedisModuleCallReply) -> Option<Vec<u8>> {
        self.reply_bytes_of(reply).map(<[u8]>::to_vec)
    }

    /// Whether the server knows a command by this name. It is asked without arguments, which no command
    /// takes that has a key. No answer is a no.
    pub fn knows(&self, command: &CStr) -> bool {
        let reply = api!(RedisModule_Call(self.raw, command.as_ptr(), c"E".as_ptr()));
        if reply.is_null() {
            return false;
        }
        let text = self.reply_text(reply);
        api!(RedisModule_FreeCallReply(reply));
        text.is_some_and(|text| !contains(&text, "unknown command"))
    }

    /// The rules of all users, as ACL LIST tells them; none if the server does not tell.
    pub fn acl_rules(&self) -> Option<Vec<String>> {
        let reply = api!(RedisModule_Call(
            self.raw,
            c"ACL".as_ptr(),
            c"c".as_ptr(),
            c"LIST".as_ptr(),
        ));
        if reply.is_null() {
            return None;
        }
        let is_list =
            api!(RedisModule_CallReplyType(reply)) as isize == raw::REDISMODULE_REPLY_ARRAY;
        let rule = |index| {
            let rule = self.reply_text(api!(RedisModule_CallReplyArrayElement(reply, index)))?;
            Some(String::from_utf8_lossy(&rule).into_owned())
        };
        let rules = match is_list {
            true => (0..api!(RedisModule_CallReplyLength(reply)))
                .map(rule)
                .collect(),
            false => None,
        };
        api!(RedisModule_FreeCallReply(reply));
        rules
    }
}

/// Whether these lower-case words occur in what the server said.
fn contains(text: &[u8], words: &str) -> bool {
    let text = String::from_utf8_lossy(text);
    text.to_ascii_lowercase().contains(words)
}

/// Where INFO is written.
pub struct InfoCtx {
    raw: *mut raw::RedisModuleInfoCtx,
    /// The server is crashing: allocate nothing, touch little.
    pub for_crash_report: bool,
}

impl InfoCtx {
    /// Writes one number into our section. Its name gets that of the module before it.
    pub fn field(&self, name: &CStr, number: u64) {
        api!(RedisModule_InfoAddFieldULongLong(
            self.raw,
            name.as_ptr(),
            number
        ));
    }

    /// Clock and flags of the server: the API takes a null context for both.
    pub fn ctx(&self) -> Ctx {
        Ctx::new(ptr::null_mut())
    }
}

extern "C" fn info(raw: *mut raw::RedisModuleInfoCtx, for_crash_report: c_int) {
    let info = InfoCtx {
        raw,
        for_crash_report: for_crash_report != 0,
    };
    if api!(RedisModule_InfoAddSection(raw, c"".as_ptr())) == OK {
        guarded(|| super::info::write(&info));
    }
}

/// A word that every grant hands to the server, which otherwise makes and frees a string of it each time.
static PXAT: AtomicPtr<raw::RedisModuleString> = AtomicPtr::new(ptr::null_mut());

fn pxat() -> Text<'static> {
    let mut raw = PXAT.load(atomic::Ordering::Relaxed);
    if raw.is_null() {
        let word = c"PXAT";
        raw = api!(RedisModule_CreateString(
            ptr::null_mut(),
            word.as_ptr(),
            word.count_bytes()
        ));
        PXAT.store(raw, atomic::Ordering::Relaxed);
    }
    Text::new(raw)
}

impl Ctx {
    pub fn register_info(&self) -> Result<(), Refused> {
        accepted(
            api!(RedisModule_RegisterInfoFunc(self.raw, Some(info))),
            "our section of INFO",
        )
    }

    /// Makes a setting known. Only while loading.
    pub fn register_setting<S: Setting>(&self) -> Result<(), Refused> {
        accepted(
            api!(RedisModule_RegisterNumericConfig(
                self.raw,
                S::NAME.as_ptr(),
                S::DEFAULT.cast_signed(),
                raw::REDISMODULE_CONFIG_DEFAULT,
                S::LEAST.cast_signed(),
                S::MOST.cast_signed(),
                Some(get_setting::<S>),
                Some(set_setting::<S>),
                None,
                ptr::null_mut(),
            )),
            &format!("the setting lockkeeper.{}", S::NAME.to_string_lossy()),
        )
    }

    /// Reads all settings from the configuration. Only while loading, after they were made known.
    pub fn read_settings(&self) -> Result<(), Refused> {
        accepted(
            api!(RedisModule_LoadConfigs(self.raw)),
            "to read the configuration",
        )
    }
}

/// A number that CONFIG SET and the configuration file can change.
pub trait Setting {
    /// What follows the name of the module and a dot.
    const NAME: &CStr;
    const DEFAULT: u64;
    const LEAST: u64;
    const MOST: u64;
    fn get(ctx: &Ctx) -> u64;
    /// Keeps the number and does nothing else: CONFIG SET takes it back if another setting that was given
    /// with it is refused, on Redis 8 even after a module was told to apply its own. What follows from the
    /// number is done when the server says that its settings have changed.
    fn set(ctx: &Ctx, number: u64);
}

extern "C" fn get_setting<S: Setting>(_: *const c_char, _: *mut c_void) -> c_longlong {
    // The server gives no context here; our state needs none.
    let ctx = Ctx::new(ptr::null_mut());
    guarded(|| S::get(&ctx)).map_or(0, u64::cast_signed)
}

extern "C" fn set_setting<S: Setting>(
    _: *const c_char,
    number: c_longlong,
    _: *mut c_void,
    _: *mut *mut raw::RedisModuleString,
) -> c_int {
    let ctx = Ctx::new(ptr::null_mut());
    let number = u64::try_from(number).unwrap_or(S::LEAST);
    guarded(|| S::set(&ctx, number)).map_or(ERR, |()| OK)
}

/// Frees what outlives the callbacks. After this none may come.
fn free_statics() {
    let pxat = PXAT.swap(ptr::null_mut(), atomic::Ordering::Relaxed);
    if !pxat.is_null() {
        api!(RedisModule_FreeString(ptr::null_mut(), pxat));
    }
}

/// The server unloads the module, if nobody waits and no timer runs: that it looks at itself.
#[unsafe(no_mangle)]
extern "C" fn RedisModule_OnUnload(ctx: *mut raw::RedisModuleCtx) -> c_int {
    let ctx = Ctx::new(ctx);
    match guarded(|| super::load::unload(&ctx)) {
        Some(Ok(())) => {
            free_statics();
            OK
        }
        Some(Err(Refused(why))) => {
            ctx.warn(&why);
            ERR
        }
        None => ERR,
    }
}

/// The server loads the module.
#[unsafe(no_mangle)]
extern "C" fn RedisModule_OnLoad(
    ctx: *mut raw::RedisModuleCtx,
    argv: *mut *mut raw::RedisModuleString,
    argc: c_int,
) -> c_int {
    let initialised =
        // SAFETY: promise (b); this fills in the pointers of promise (c) and so comes first.
        unsafe {
            raw::Export_RedisModule_Init(
                ctx,
                super::load::NAME.as_ptr(),
                super::load::VERSION,
                raw::REDISMODULE_APIVER_1.cast_signed(),
            )
        };
    let ctx = Ctx::new(ctx);
    log_panics();
    let loaded = guarded(|| {
        if initialised != OK {
            return Err(super::load::refuse_second_loading());
        }
        let args = match usize::try_from(argc) {
            // SAFETY: promise (b): the server passes argc pointers at argv; null if there are none.
            Ok(count @ 1..) => unsafe { slice::from_raw_parts(argv, count) },
            _ => &[],
        };
        let args = args.iter().map(|raw| Text::new(*raw).bytes());
        super::load::load(&ctx, args).inspect_err(|_| free_statics())
    });
    match loaded {
        Some(Ok(())) => OK,
        Some(Err(Refused(why))) => {
            ctx.warn(&why);
            ERR
        }
        None => ERR,
    }
}
