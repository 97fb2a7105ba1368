//! The commands: how each is made known, and how it is carried out.
//!
//! A handler keeps one order: parse everything, look, decide, make everything that can fail, change,
//! tell (watchers, listeners, replicas, AOF), reply.

use std::ffi::CStr;

use super::State;
use super::api::{Access, Arg, ArgKind, Args, Command, Ctx, Key, Kind, Refused, Spec, Text};
use crate::lock::{self, Effect, Held, Owner};
use crate::reply::{Info, Reply};
use crate::request::{self, BadRequest};

/// ACL category of all our commands, on servers that have categories for modules.
const CATEGORY: &CStr = c"lock";

/// Makes the commands known; LOCK.DEBUG, which breaks things on purpose, only where it was asked for.
pub fn register(ctx: &Ctx, debug: bool) -> Result<(), Refused> {
    let category = ctx.register_category(CATEGORY)?.then_some("lock");
    ctx.register::<AcquireCommand>(category)?;
    ctx.register::<RenewCommand>(category)?;
    ctx.register::<ReleaseCommand>(category)?;
    ctx.register::<InfoCommand>(category)?;
    if debug {
        ctx.register::<DebugCommand>(category)?;
    }
    Ok(())
}

const KEY: Arg = Arg {
    name: c"key",
    kind: ArgKind::Key,
};
const OWNER: Arg = Arg {
    name: c"owner",
    kind: ArgKind::Bytes,
};
const TTL: Arg = Arg {
    name: c"ttl-ms",
    kind: ArgKind::Integer,
};

struct AcquireCommand;

impl Command for AcquireCommand {
    const SPEC: Spec = Spec {
        name: c"lock.acquire",
        flags: c"write deny-oom fast",
        categories: "write fast",
        arity: -4,
        access: Access::Update,
        summary:
            c"Acquires a lock for an owner and answers its fence, or null if another holds it.",
        complexity: c"O(1)",
        args: &[KEY, OWNER, TTL],
    };

    fn run<'c>(ctx: &'c Ctx, args: &Args<'c>) -> Result<Reply, BadRequest<'c>> {
        let name = args.key()?;
        let request = request::acquire(args.from(2))?;
        let key = ctx.open(name);
        let held = held(&key, request.owner);
        let fences = &mut State::get(ctx).fences;
        let decision = lock::acquire(held, request.owner, request.ttl, ctx.now(), fences);
        apply(ctx, name, key, request.owner, decision.effect);
        Ok(decision.outcome.into())
    }
}

struct RenewCommand;

impl Command for RenewCommand {
    const SPEC: Spec = Spec {
        name: c"lock.renew",
        flags: c"write fast",
        categories: "write fast",
        arity: 4,
        access: Access::Update,
        summary: c"Lets the lease of a lock end ttl-ms from now, if the owner holds it.",
        complexity: c"O(1)",
        args: &[KEY, OWNER, TTL],
    };

    fn run<'c>(ctx: &'c Ctx, args: &Args<'c>) -> Result<Reply, BadRequest<'c>> {
        let name = args.key()?;
        let request = request::renew(args.from(2))?;
        let key = ctx.open(name);
        let decision = lock::renew(
            held(&key, request.owner),
            request.owner,
            request.ttl,
            ctx.now(),
        );
        apply(ctx, name, key, request.owner, decision.effect);
        Ok(decision.outcome.into())
    }
}

struct ReleaseCommand;

impl Command for ReleaseCommand {
    const SPEC: Spec = Spec {
        name: c"lock.release",
        flags: c"write fast",
        categories: "write fast",
        arity: 3,
        access: Access::Update,
        summary: c"Releases a lock, if the owner holds it.",
        complexity: c"O(1)",
        args: &[KEY, OWNER],
    };

    fn run<'c>(ctx: &'c Ctx, args: &Args<'c>) -> Result<Reply, BadRequest<'c>> {
        let name = args.key()?;
        let owner = request::release(args.from(2))?;
        let key = ctx.open(name);
        let decision = lock::release(held(&key, owner), owner);
        apply(ctx, name, key, owner, decision.effect);
        Ok(decision.outcome.into())
    }
}

struct InfoCommand;

impl Command for InfoCommand {
    const SPEC: Spec = Spec {
        name: c"lock.info",
        flags: c"readonly fast",
        categories: "read fast",
        arity: 2,
        access: Access::Read,
        summary: c"Tells who holds a lock, since when and for how long.",
        complexity: c"O(1)",
        args: &[KEY],
    };

    fn run<'c>(ctx: &'c Ctx, args: &Args<'c>) -> Result<Reply, BadRequest<'c>> {
        let name = args.key()?;
        request::nothing_more(args.from(2))?;
        let key = ctx.open_to_read(name);
        let now = ctx.now();
        Ok(match (key.kind(), key.value()) {
            (Kind::Empty, _) => Reply::Null,
            (_, None) => lock::Outcome::WrongType.into(),
            (_, Some(value)) => {
                let reading = lock::read(value);
                Reply::Info(Info {
                    owner: Some(reading.owner.to_vec()),
                    fence: reading.fence.map(|fence| fence.number().cast_signed()),
                    held_ms: reading.fence.map(|fence| fence.held_ms(now).cast_signed()),
                    ttl_ms: key.ends_at().map_or(-1, |end| (end.0 - now.0).max(0)),
                })
            }
        })
    }
}

struct DebugCommand;

impl Command for DebugCommand {
    const SPEC: Spec = Spec {
        name: c"lock.debug",
        flags: c"admin",
        categories: "admin dangerous",
        arity: 2,
        access: Access::None,
        summary: c"Breaks something on purpose, for tests: PANIC panics inside the handler.",
        complexity: c"O(1)",
        args: &[Arg {
            name: c"fault",
            kind: ArgKind::Bytes,
        }],
    };

    fn run<'c>(_: &'c Ctx, args: &Args<'c>) -> Result<Reply, BadRequest<'c>> {
        match args.from(1).next() {
            Some(fault) if fault.eq_ignore_ascii_case(b"panic") => panic!("LOCK.DEBUG PANIC"),
            Some(fault) => Err(BadRequest::OptionUnknown(fault)),
            None => Err(BadRequest::WrongCount),
        }
    }
}

/// The key as the owner finds it.
fn held<'k>(key: &'k Key, owner: Owner) -> Held<'k> {
    match key.kind() {
        Kind::Empty => Held::Nobody,
        Kind::Other => Held::WrongType,
        Kind::String if !owner.may_hold(key.len()) => Held::Another,
        Kind::String => match key.value() {
            Some(bytes) => Held::Value {
                bytes,
                ends_at: key.ends_at(),
            },
            None => Held::Another,
        },
    }
}

/// Carries out what was decided. From here on nothing can fail.
fn apply(ctx: &Ctx, name: Text, mut key: Key, owner: Owner, effect: Effect) {
    match effect {
        Effect::Nothing => {}
        Effect::Set { fence, ends_at } => {
            let value = lock::write(fence, owner);
            key.set(&value, ends_at);
            drop(key);
            ctx.after_set(name, &value, ends_at);
        }
        Effect::Expire { ends_at } => {
            key.set_end(ends_at);
            drop(key);
            ctx.after_expire(name, ends_at);
        }
        Effect::Delete => {
            key.delete();
            drop(key);
            ctx.after_delete(name);
        }
    }
}
