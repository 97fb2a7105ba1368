//! The commands: how each is made known, and how it is carried out.
//!
//! A handler keeps one order: parse everything, read the key, decide, make everything that can fail, change,
//! notify (watchers, listeners, replicas, AOF), reply.

use std::ffi::CStr;

use super::api::{
    Access, Arg, ArgKind, Args, Command, Ctx, Key, Kind, Refused, Spec, Text, clocks, unix_time,
};
use super::state::State;
use super::stats::Cause;
use super::{effects, faults, keys, replies, waiting};
use crate::lock::{self, Effect, Found, Outcome};
use crate::reply::{self, Info, Reply};
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

/// A command of ours.
trait Handler {
    const SPEC: Spec;

    /// Carries the command out. Returns the reply; none for a client that waits and has it later.
    fn handle<'c>(ctx: &'c Ctx, args: &Args<'c>) -> Result<Option<Reply>, BadRequest<'c>>;
}

impl<H: Handler> Command for H {
    const SPEC: Spec = <H as Handler>::SPEC;

    fn run<'c>(ctx: &'c Ctx, args: &Args<'c>) {
        let reply = H::handle(ctx, args).unwrap_or_else(|bad| Some(bad.into()));
        if let Some(reply) = reply {
            replies::send(ctx, &reply);
        }
    }

    fn panicked(ctx: &Ctx) {
        replies::send(ctx, &Reply::Error(reply::PANIC.to_owned()));
    }
}

const KEY: Arg = Arg::new(c"key", ArgKind::Key);
const OWNER: Arg = Arg::new(c"owner", ArgKind::Bytes);
const TTL: Arg = Arg::new(c"ttl-ms", ArgKind::Integer);
const WAIT: Arg = Arg::new(c"timeout-ms", ArgKind::Integer).after(c"WAIT");

fn key<'c>(args: &Args<'c>) -> Result<Text<'c>, BadRequest<'c>> {
    args.key().ok_or(BadRequest::WrongCount)
}

struct AcquireCommand;

impl Handler for AcquireCommand {
    const SPEC: Spec = Spec {
        name: c"lock.acquire",
        flags: c"write deny-oom blocking fast",
        categories: "write fast blocking",
        arity: -4,
        access: Access::Update,
        since: c"0.1.0",
        summary: c"Acquires a lock for an owner and returns its fence, or null if another holds \
                   it. Waits in the queue if asked to.",
        complexity: c"O(1), or O(log(N)) with N clients waiting.",
        args: &[KEY, OWNER, TTL, WAIT],
    };

    fn handle<'c>(ctx: &'c Ctx, args: &Args<'c>) -> Result<Option<Reply>, BadRequest<'c>> {
        let name = key(args)?;
        let request = request::acquire(args.from(2))?;
        let Acquire { owner, ttl, wait } = request;
        let key = serve_if_free(ctx, name, ctx.open(name));
        let found = keys::find(ctx, &key, owner);
        let before = match found {
            Found::Value(_) => key.ends_at(),
            _ => None,
        };
        let now = unix_time();
        let decision = State::with(ctx, |state| {
            let State { fences, stats, .. } = state;
            let decision = lock::acquire(found, before, owner, ttl, now, fences);
            match (decision.outcome, decision.effect) {
                (Outcome::Acquired(_), Effect::Set(_)) => stats.grants_direct += 1,
                (Outcome::Busy, _) if wait.is_none() => stats.refusals += 1,
                _ => {}
            }
            decision
        });
        if let (Outcome::Busy, Some(wait)) = (decision.outcome, wait) {
            let ends_at = key.ends_at();
            drop(key);
            return Ok(waiting::wait(ctx, name, &request, wait, ends_at));
        }
        if let Outcome::Acquired(_) = decision.outcome {
            waiting::confirm(ctx, name, owner);
            // A value that stays is used all the same.
            if !matches!(decision.effect, Effect::Set(_)) {
                key.touch(name);
            }
        }
        effects::apply(name, key, decision.effect);
        Ok(Some(decision.outcome.into()))
    }
}

/// A free key for which clients wait is the first one's, not the newcomer's.
fn serve_if_free<'c>(ctx: &'c Ctx, name: Text<'c>, key: Key<'c>) -> Key<'c> {
    if key.kind() != Kind::Empty {
        return key;
    }
    waiting::serve_next(ctx, name, key, None, None).unwrap_or_else(|| ctx.open(name))
}

struct RenewCommand;

impl Handler for RenewCommand {
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

    fn handle<'c>(ctx: &'c Ctx, args: &Args<'c>) -> Result<Option<Reply>, BadRequest<'c>> {
        let name = key(args)?;
        let request::Renew { owner, ttl } = request::renew(args.from(2))?;
        let key = ctx.open(name);
        let found = keys::find(ctx, &key, owner);
        let decision = lock::renew(found, owner, ttl, unix_time());
        let renewed = decision.outcome == Outcome::Renewed;
        if renewed {
            key.touch(name);
            waiting::confirm(ctx, name, owner);
        }
        State::with(ctx, |state| match renewed {
            true => state.stats.renewals += 1,
            false => state.stats.renewals_refused += 1,
        });
        effects::apply(name, key, decision.effect);
        if let Effect::Expire { ends_at } = decision.effect {
            waiting::renewed(ctx, name, ends_at);
        }
        Ok(Some(decision.outcome.into()))
    }
}

struct ReleaseCommand;

impl Handler for ReleaseCommand {
    const SPEC: Spec = Spec {
        name: c"lock.release",
        flags: c"write fast",
        categories: "write fast",
        arity: 3,
        access: Access::Update,
        since: c"0.1.0",
        summary: c"Releases a lock, if the owner holds it, to the next in its queue. Takes the \
                   owner out of the queue.",
        complexity: c"O(1), or O(log(N)) with N clients waiting.",
        args: &[KEY, OWNER],
    };

    fn handle<'c>(ctx: &'c Ctx, args: &Args<'c>) -> Result<Option<Reply>, BadRequest<'c>> {
        let name = key(args)?;
        let owner = request::release(args.from(2))?;
        let key = ctx.open(name);
        let decision = lock::release(keys::find(ctx, &key, owner), owner);
        if decision.outcome == Outcome::Released {
            State::with(ctx, |state| state.stats.releases += 1);
        }
        // Before anybody is served: whoever listens to that may end this client's connection.
        if let Some(client) = waiting::leave(ctx, name, owner) {
            waiting::refuse(client, Reply::Null);
        }
        let key = match decision.effect {
            Effect::Delete { replaced } => {
                waiting::serve_next(ctx, name, key, replaced, Some(Cause::Release))
            }
            _ => Some(key),
        };
        if let Some(key) = key {
            effects::apply(name, key, decision.effect);
        }
        Ok(Some(decision.outcome.into()))
    }
}

struct InfoCommand;

impl Handler for InfoCommand {
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

    fn handle<'c>(ctx: &'c Ctx, args: &Args<'c>) -> Result<Option<Reply>, BadRequest<'c>> {
        let name = key(args)?;
        request::nothing_more(args.from(2))?;
        let key = ctx.open(name);
        if key.kind() == Kind::Other {
            return Ok(Some(Outcome::WrongType.into()));
        }
        let now = clocks();
        let mut info = Info {
            ttl_ms: -2,
            ..Info::default()
        };
        let ends_at = key.ends_at();
        // Also if there is none: a miss counts as that of a GET.
        if let Some(value) = keys::peek(ctx, key, name) {
            let reading = lock::read(&value);
            info.owner = Some(reading.owner.to_vec());
            info.fence = reading.fence.map(|fence| fence.number().cast_signed());
            info.held_ms = reading
                .fence
                .map(|fence| fence.held_ms(now.wall).cast_signed());
            info.ttl_ms = ends_at.map_or(-1, |end| (end.0 - now.wall.ms().0).max(0));
        }
        (info.waiters, info.queue) = waiting::list(ctx, name, LISTED, now.mono);
        if info.owner.is_none() && info.waiters == 0 {
            return Ok(Some(Reply::Null));
        }
        Ok(Some(Reply::Info(info)))
    }
}

/// How many of those who wait LOCK.INFO lists, so that no reply holds up the server.
const LISTED: usize = 100;

struct DebugCommand;

impl Handler for DebugCommand {
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

    fn handle<'c>(_: &'c Ctx, args: &Args<'c>) -> Result<Option<Reply>, BadRequest<'c>> {
        let fault = args.from(1).next().ok_or(BadRequest::WrongCount)?;
        match fault.to_ascii_uppercase().as_slice() {
            b"PANIC" => panic!("LOCK.DEBUG PANIC"),
            b"DEAF" => faults::let_only_the_cron_wake(true),
            b"HEAR" => faults::let_only_the_cron_wake(false),
            _ => return Err(BadRequest::OptionUnknown(fault)),
        }
        Ok(Some(Reply::Integer(1)))
    }
}
