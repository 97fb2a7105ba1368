//! Commands: how they are made known to the server, and how it calls them.

use std::ffi::{CStr, CString, c_int};
use std::{io, mem, ptr, slice};

use redis_module::raw;

use super::{Ctx, ERR, OK, Refused, Text, accepted, guarded};

/// A command: what the server must know of it, and the function that carries it out.
pub trait Command {
    const SPEC: Spec;

    /// Carries the command out, and replies or blocks the client.
    fn run<'c>(ctx: &'c Ctx, args: &Args<'c>);

    /// [`Command::run`] panicked: replies instead of it.
    fn panicked(ctx: &Ctx);
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
    /// The word before it, or, of [`ArgKind::Word`], itself.
    token: Option<&'static CStr>,
    optional: bool,
}

impl Arg {
    pub const fn new(name: &'static CStr, kind: ArgKind) -> Arg {
        Arg {
            name,
            kind,
            token: None,
            optional: false,
        }
    }

    /// Follows this word, or is it.
    pub const fn after(self, token: &'static CStr) -> Arg {
        Arg {
            token: Some(token),
            ..self
        }
    }

    /// May be left out.
    pub const fn optional(self) -> Arg {
        Arg {
            optional: true,
            ..self
        }
    }
}

#[derive(Clone, Copy)]
pub enum ArgKind {
    Key,
    Bytes,
    Integer,
    /// Nothing but its word.
    Word,
    /// One of these.
    OneOf(&'static [Arg]),
}

/// The arguments of a command, its name first; or those of MODULE LOAD.
pub struct Args<'c>(&'c [*mut raw::RedisModuleString]);

impl<'c> Args<'c> {
    /// # Safety
    ///
    /// `argv` and `argc` are those that the server gave to the callback of `ctx`.
    pub(super) unsafe fn new(
        _: &'c Ctx,
        argv: *mut *mut raw::RedisModuleString,
        argc: c_int,
    ) -> Args<'c> {
        match usize::try_from(argc) {
            // SAFETY: the server passes argc pointers at argv, which stay until the callback returns.
            Ok(count @ 1..) => Args(unsafe { slice::from_raw_parts(argv, count) }),
            // argv may be null where there are none.
            _ => Args(&[]),
        }
    }

    /// The key of a command: the first argument.
    pub fn key(&self) -> Option<Text<'c>> {
        // SAFETY: an argument lives as long as the context, which `'c` stands for.
        self.0.get(1).map(|raw| unsafe { Text::new(*raw) })
    }

    /// The arguments from this index on; the command's name is at 0.
    pub fn from(&self, index: usize) -> impl Iterator<Item = &'c [u8]> + use<'c> {
        let args = self.0.iter().skip(index);
        // SAFETY: an argument lives as long as the context, which `'c` stands for.
        args.map(|raw| unsafe { Text::new(*raw) }.bytes())
    }
}

extern "C" fn enter<C: Command>(
    ctx: *mut raw::RedisModuleCtx,
    argv: *mut *mut raw::RedisModuleString,
    argc: c_int,
) -> c_int {
    // SAFETY: the context of this callback.
    let ctx = unsafe { Ctx::new(ctx) };
    // SAFETY: the arguments of this callback.
    let args = unsafe { Args::new(&ctx, argv, argc) };
    // A client that is blocked has its reply from who unblocks it: a second one would be taken for that of
    // its next command.
    if guarded(|| C::run(&ctx, &args)).is_none() && !ctx.client_blocked.get() {
        guarded(|| C::panicked(&ctx));
    }
    OK
}

/// The error number of something that is there already, on Linux and the BSDs.
const EBUSY: i32 = 16;

impl Ctx {
    /// Makes an ACL category known, on servers where a module can (7.4 and later). Only while loading,
    /// before the commands. Returns whether commands can be put into it.
    pub fn register_category(&self, name: &CStr) -> Result<bool, Refused> {
        // SAFETY: reading the pointer is sound, see the front page of this folder.
        let Some(add) = (unsafe { raw::RedisModule_AddACLCategory }) else {
            return Ok(false);
        };
        // SAFETY: the context is live and that of loading, and the name is a live C string.
        let status = unsafe { add(self.raw, name.as_ptr()) };
        // Unloading leaves the category behind, so loading again finds it there.
        if status == ERR && io::Error::last_os_error().raw_os_error() == Some(EBUSY) {
            return Ok(true);
        }
        accepted(status, "our ACL category").map(|()| true)
    }

    /// Makes a command known to the server, in this ACL category besides its own. Only while loading.
    pub fn register<C: Command>(&self, category: Option<&CStr>) -> Result<(), Refused> {
        let spec = C::SPEC;
        let what = spec.name.to_string_lossy();
        let (first, last, step) = match spec.access {
            Access::None => (0, 0, 0),
            Access::Read | Access::Update => (1, 1, 1),
        };
        // SAFETY: the context is live and that of loading, and the strings are live C strings.
        let status = unsafe {
            api!(RedisModule_CreateCommand)(
                self.raw,
                spec.name.as_ptr(),
                Some(enter::<C>),
                spec.flags.as_ptr(),
                first,
                last,
                step,
            )
        };
        accepted(status, &what)?;
        // SAFETY: the context is live, and the name is a live C string.
        let command = unsafe { api!(RedisModule_GetCommand)(self.raw, spec.name.as_ptr()) };
        // SAFETY: reading the pointer is sound, see the front page of this folder.
        if let Some(set_categories) = unsafe { raw::RedisModule_SetCommandACLCategories } {
            let own = category.map(CStr::to_string_lossy);
            let all: Vec<_> = own
                .as_deref()
                .into_iter()
                .chain([spec.categories])
                .collect();
            let all = CString::new(all.join(" ")).unwrap_or_default();
            // SAFETY: the command was just created, and the list is a live C string.
            let status = unsafe { set_categories(command, all.as_ptr()) };
            accepted(status, &format!("the ACL categories of {what}"))?;
        }
        describe(command, &spec)
    }
}

/// For COMMAND INFO, DOCS and GETKEYS.
fn describe(command: *mut raw::RedisModuleCommand, spec: &Spec) -> Result<(), Refused> {
    // The server walks the arrays by these sizes, so an older one skips fields it doesn't know.
    let version = raw::RedisModuleCommandInfoVersion {
        version: 1,
        sizeof_historyentry: size_of::<raw::RedisModuleCommandHistoryEntry>(),
        sizeof_keyspec: size_of::<raw::RedisModuleCommandKeySpec>(),
        sizeof_arg: size_of::<raw::RedisModuleCommandArg>(),
    };
    // SAFETY: these C structs are numbers, pointers and unions of such: all zero is a valid value,
    // and is what ends the arrays.
    let (no_key, mut info) = unsafe {
        (
            mem::zeroed::<raw::RedisModuleCommandKeySpec>(),
            mem::zeroed::<raw::RedisModuleCommandInfo>(),
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
        key.begin_search_type = raw::RedisModuleKeySpecBeginSearchType_REDISMODULE_KSPEC_BS_INDEX;
        key.bs.index.pos = 1;
        keys.push(key);
    }
    keys.push(no_key);
    let mut kept = vec![];
    let args = describe_args(spec.args, &mut kept);
    info.version = &raw const version;
    info.summary = spec.summary.as_ptr();
    info.complexity = spec.complexity.as_ptr();
    info.since = spec.since.as_ptr();
    info.arity = spec.arity;
    info.key_specs = keys.as_mut_ptr();
    info.args = args;
    // SAFETY: the command was just created; all pointers of the info lead to live values, the arrays end
    // with a zeroed element, and the server copies all of it before it returns.
    let status = unsafe { api!(RedisModule_SetCommandInfo)(command, &raw const info) };
    accepted(
        status,
        &format!("the description of {}", spec.name.to_string_lossy()),
    )
}

/// The arguments as an array of the server's, which lives as long as what is kept.
fn describe_args(
    args: &[Arg],
    kept: &mut Vec<Vec<raw::RedisModuleCommandArg>>,
) -> *mut raw::RedisModuleCommandArg {
    // SAFETY: this C struct is numbers and pointers: all zero is a valid value, and is what ends the array.
    let no_arg = unsafe { mem::zeroed::<raw::RedisModuleCommandArg>() };
    let mut described = vec![];
    for arg in args {
        let subargs = match arg.kind {
            ArgKind::OneOf(args) => describe_args(args, kept),
            _ => ptr::null_mut(),
        };
        described.push(raw::RedisModuleCommandArg {
            name: arg.name.as_ptr(),
            type_: match arg.kind {
                ArgKind::Key => raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_KEY,
                ArgKind::Bytes => raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_STRING,
                ArgKind::Integer => raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_INTEGER,
                ArgKind::Word => raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_PURE_TOKEN,
                ArgKind::OneOf(_) => raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_ONEOF,
            },
            token: arg.token.map_or(ptr::null(), CStr::as_ptr),
            flags: match arg.optional {
                true => raw::REDISMODULE_CMD_ARG_OPTIONAL.cast_signed(),
                false => 0,
            },
            subargs,
            ..no_arg
        });
    }
    described.push(no_arg);
    let start = described.as_mut_ptr();
    kept.push(described);
    start
}
