//! The commands: how each is made known, and how it is carried out.
//!
//! A handler keeps one order: parse everything, look, decide, make everything that can fail, change,
//! tell (watchers, listeners, replicas, AOF), reply.

use std::ffi::CStr;

use super::api::{Access, Arg, ArgKind, Args, Command, Ctx, Key, Kind, Refused, Spec, Text};
use super::info::Cause;
use super::{State, waiting};
use crate::lock::{self, Effect, Found, Outcome, Owner};
use crate::reply::{Info, Reply};
use crate::request::{self, Acquire, BadRequest};

/// ACL category of all our commands, on servers that have categories for modules.
const CATEGORY: &CStr = c"lock";

/// Makes the commands known; LOCK.DEBUG, which breaks things on purpose, only where it was asked for.
pub fn register(ctx: &Ctx, debug: bool) -> Result<(), Refused> {
    let category = ctx.register_category(CATEGORY)?.then_some(CATEGORY);
    ctx.register::<AcquireCommand>(category)?;
    ctx.register::<RenewCommand>(category)?;
    ctx.register::<ReleaseCommand>(category)?;
    ctx.register::<InfoCommand>(category)?;
    if debug {
        ctx.register::<DebugCommand>(category)?;
    }
    Ok(())
}

const KEY: Arg = Arg::new(c"key", ArgKind::Key);
const OWNER: Arg = Arg::new(c"owner", ArgKind::Bytes);
const TTL: Arg = Arg::new(c"ttl-ms", ArgKind::Integer);
const WAIT: Arg = Arg::new(c"timeout-ms", ArgKind::Integer).after(c"WAIT");

struct AcquireCommand;

impl Command for AcquireCommand {
    const SPEC: Spec = Spec {
        name: c"lock.acquire",
        flags: c"write deny-oom blocking fast",
        categories: "write fast blocking",
        arity: -4,
        access: Access::Update,
        since: c"0.1.0",
        summary: c"Acquires a lock for an owner and answers its fence, or null if another holds \
                   it. Waits in line if asked to.",
        complexity: c"O(1), or O(log(N)) with N clients waiting.",
        args: &[KEY, OWNER, TTL, WAIT],
    };

    fn run<'c>(ctx: &'c Ctx, args: &Args<'c>) -> Result<Reply, BadRequest<'c>> {
        let name = args.key()?;
        let request = request::acquire(args.from(2))?;
        let key = serve_if_free(ctx, name, ctx.open(name));
        let decision = {
            let found = find(&key, request.owner);
            let before = match found {
                Found::Value(_) => key.ends_at(),
                _ => None,
            };
            let Acquire { owner, ttl, .. } = request;
            let State {
                fences,
                waiting,
                stats,
                ..
            } = &mut *State::get(ctx);
            let decision = lock::acquire(found, before, owner, ttl, ctx.now(), fences);
            match decision.outcome {
                Outcome::Acquired(_) => {
                    waiting.spoke(ctx, name, request.owner);
                    stats.grants_direct += u64::from(matches!(decision.effect, Effect::Set(_)));
                }
                Outcome::Busy if request.wait.is_none() => stats.refusals += 1,
                _ => {}
            }
            decision
        };
        if decision.outcome == Outcome::Busy
            && let Some(wait) = request.wait
        {
            let ends_at = key.ends_at();
            drop(key);
            return Ok(waiting::wait(ctx, name, &request, wait, ends_at));
        }
        if matches!(decision.outcome, Outcome::Acquired(_))
            && !matches!(decision.effect, Effect::Set(_))
        {
            key.touch(name);
        }
        apply(ctx, name, key, decision.effect);
        Ok(decision.outcome.into())
    }
}

/// A free key with clients in line is the first one's, not the newcomer's.
fn serve_if_free<'c>(ctx: &'c Ctx, name: Text<'c>, key: Key<'c>) -> Key<'c> {
    if key.kind() != Kind::Empty {
        return key;
    }
    waiting::serve_next(ctx, name, key, None, None).unwrap_or_else(|| ctx.open(name))
}

struct RenewCommand;

impl Command for RenewCommand {
    const SPEC: Spec = Spec {
        name: c"lock.renew",
        flags: c"write fast",
        categories: "write fast",
        arity: 4,
        access: Access::Update,
        since: c"0.1.0",
        summary: c"Lets the lease of a lock end ttl-ms from now, if the owner holds it.",
        complexity: c"O(1)",
        args: &[KEY, OWNER, TTL],
    };

    fn run<'c>(ctx: &'c Ctx, args: &Args<'c>) -> Result<Reply, BadRequest<'c>> {
        let name = args.key()?;
        let request = request::renew(args.from(2))?;
        let key = ctx.open(name);
        let decision = lock::renew(
            find(&key, request.owner),
            request.owner,
            request.ttl,
            ctx.now(),
        );
        if decision.outcome == Outcome::Renewed {
            key.touch(name);
        }
        {
            let State { waiting, stats, .. } = &mut *State::get(ctx);
            if decision.outcome == Outcome::Renewed {
                waiting.spoke(ctx, name, request.owner);
                stats.renewals += 1;
            } else {
                stats.renewals_refused += 1;
            }
        }
        apply(ctx, name, key, decision.effect);
        if let Effect::Expire { ends_at } = decision.effect {
            waiting::renewed(ctx, name, ends_at);
        }
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
        since: c"0.1.0",
        summary:
            c"Releases a lock, if the owner holds it, to the next in line. Gives up the owner's \
                   place in line.",
        complexity: c"O(1), or O(log(N)) with N clients waiting.",
        args: &[KEY, OWNER],
    };

    fn run<'c>(ctx: &'c Ctx, args: &Args<'c>) -> Result<Reply, BadRequest<'c>> {
        let name = args.key()?;
        let owner = request::release(args.from(2))?;
        let key = ctx.open(name);
        let decision = lock::release(find(&key, owner), owner);
        let left = {
            let State { waiting, stats, .. } = &mut *State::get(ctx);
            stats.releases += u64::from(decision.outcome == Outcome::Released);
            waiting.leave(ctx, name, owner)
        };
        // Before anybody is served: whoever listens to that may end this client's connection.
        if let Some(client) = left {
            client.answer(Reply::Null);
        }
        let key = match decision.effect {
            Effect::Delete { replaced } => {
                waiting::serve_next(ctx, name, key, replaced, Some(Cause::Release))
            }
            _ => Some(key),
        };
        if let Some(key) = key {
            apply(ctx, name, key, decision.effect);
        }
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
        since: c"0.1.0",
        summary: c"Tells who holds a lock, since when and for how long, and who waits for it.",
        complexity: c"O(N) with N clients waiting for the key, at most 100.",
        args: &[KEY],
    };

    fn run<'c>(ctx: &'c Ctx, args: &Args<'c>) -> Result<Reply, BadRequest<'c>> {
        let name = args.key()?;
        request::nothing_more(args.from(2))?;
        let key = ctx.open(name);
        let now = ctx.clocks();
        let mut info = Info {
            ttl_ms: -2,
            ..Info::default()
        };
        if key.kind() == Kind::Other {
            return Ok(Outcome::WrongType.into());
        }
        let ends_at = key.ends_at();
        // Also if there is none: a miss counts as that of a GET.
        let can_set_idle_time = State::get(ctx).can_set_idle_time;
        if let Some(value) = key.peek(name, can_set_idle_time) {
            let reading = lock::read(&value);
            info.owner = Some(reading.owner.to_vec());
            info.fence = reading.fence.map(|fence| fence.number().cast_signed());
            info.held_ms = reading
                .fence
                .map(|fence| fence.held_ms(now.wall).cast_signed());
            info.ttl_ms = ends_at.map_or(-1, |end| (end.0 - now.wall.ms().0).max(0));
        }
        let state = State::get(ctx);
        let queue = state.waiting.queue();
        if queue.waiters() > 0 {
            let id = name.in_db(ctx.db());
            info.waiters = queue.waiters_of(&id) as i64;
            info.queue = queue
                .list(&id, now.mono)
                .take(LISTED)
                .map(|(owner, waited_us)| {
                    (owner.bytes().to_vec(), (waited_us / 1000).cast_signed())
                })
                .collect();
        }
        if info.owner.is_none() && info.waiters == 0 {
            return Ok(Reply::Null);
        }
        Ok(Reply::Info(info))
    }
}

/// How many of those who wait LOCK.INFO lists, so that no reply holds up the server.
const LISTED: usize = 100;

struct DebugCommand;

impl Command for DebugCommand {
    const SPEC: Spec = Spec {
        name: c"lock.debug",
        flags: c"admin",
        categories: "admin dangerous",
        arity: 2,
        access: Access::None,
        since: c"0.1.0",
        summary: c"Breaks something on purpose, for tests. PANIC panics in the handler; DEAF lets \
                   only the cron wake who waits, HEAR ends that.",
        complexity: c"O(1)",
        args: &[Arg::new(c"fault", ArgKind::Bytes)],
    };

    fn run<'c>(ctx: &'c Ctx, args: &Args<'c>) -> Result<Reply, BadRequest<'c>> {
        let fault = args.from(1).next().ok_or(BadRequest::WrongCount)?;
        match fault.to_ascii_uppercase().as_slice() {
            b"PANIC" => panic!("LOCK.DEBUG PANIC"),
            b"DEAF" => State::get(ctx).waiting.deaf = true,
            b"HEAR" => State::get(ctx).waiting.deaf = false,
            _ => return Err(BadRequest::OptionUnknown(fault)),
        }
        Ok(Reply::Integer(1))
    }
}

/// The key as the owner finds it.
fn find<'k>(key: &'k Key, owner: Owner) -> Found<'k> {
    match key.kind() {
        Kind::Empty => Found::Nobody,
        Kind::Other => Found::WrongType,
        Kind::String if !owner.may_hold(key.len()) => Found::Another,
        Kind::String => key.value().map_or(Found::Another, Found::Value),
    }
}

/// Carries out what was decided. From here on nothing can fail.
fn apply(ctx: &Ctx, name: Text, mut key: Key, effect: Effect) {
    match effect {
        Effect::Nothing => {}
        Effect::Set(lease) => key.give(name, lease),
        Effect::Expire { ends_at } => {
            key.set_end(ends_at);
            drop(key);
            ctx.after_expire(name, ends_at);
        }
        Effect::Delete { .. } => {
            key.delete();
            drop(key);
            ctx.after_delete(name);
        }
    }
}
