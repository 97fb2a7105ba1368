//! The commands: how each is made known, and how it is carried out.
//!
//! A handler keeps one order: parse everything, read the key, decide, make everything that can fail, change,
//! notify (watchers, listeners, replicas, AOF), reply.

use std::ffi::CStr;

use super::api::{
    Access, Arg, ArgKind, Args, Command, Ctx, Kind, Refused, Spec, Text, clocks, unix_time,
};
use super::state::State;
use super::{faults, keys, replies, waiting};
use crate::lock::{self, Found, Holder, Holders, Outcome};
use crate::reply::{self, HolderInfo, Info, ListInfo, Reply};
use crate::request::{self, Acquire, BadRequest};
use crate::time::{UnixMs, UnixUs};

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
const WAIT: Arg = Arg::new(c"timeout-ms", ArgKind::Integer)
    .after(c"WAIT")
    .optional();
const LIMIT: Arg = Arg::new(
    c"limit",
    ArgKind::OneOf(&[
        Arg::new(c"n", ArgKind::Integer).after(c"LIMIT"),
        Arg::new(c"shared", ArgKind::Word).after(c"SHARED"),
    ]),
)
.optional();

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
        summary: c"Acquires a lock for an owner and returns its fence, or null if others hold it \
                   and admit nobody else. Waits in the queue if asked to.",
        complexity: c"O(H) with H holders, and O(log(N)) with N clients waiting.",
        args: &[KEY, OWNER, TTL, WAIT, LIMIT],
    };

    fn handle<'c>(ctx: &'c Ctx, args: &Args<'c>) -> Result<Option<Reply>, BadRequest<'c>> {
        let name = key(args)?;
        let Acquire { lease, wait } = request::acquire(args.from(2))?;
        let (key, queued) = waiting::serve_before(ctx, name, ctx.open(name));
        let found = keys::find(ctx, &key, lease.owner);
        let key_ends_at = match found {
            Found::Value(_) => key.ends_at(),
            _ => None,
        };
        let now = unix_time();
        let decision = State::with(ctx, |state| {
            let State { fences, stats, .. } = state;
            let decision = lock::acquire(found, key_ends_at, lease, queued, now, fences);
            match decision.outcome {
                Outcome::Acquired(_) => stats.grants_direct += 1,
                Outcome::Busy if wait.is_none() => stats.refusals += 1,
                Outcome::NotAdmitted => stats.refusals += 1,
                _ => {}
            }
            decision
        });
        if let (Outcome::Busy, Some(wait)) = (decision.outcome, wait) {
            let seen = keys::seen(&key);
            let ends_at = keys::next_end(ctx, &key, seen, now);
            drop(key);
            return Ok(waiting::wait(ctx, name, lease, wait, seen, ends_at));
        }
        if let Outcome::Acquired(_) | Outcome::Confirmed(_) = decision.outcome {
            waiting::confirm(ctx, name, lease.owner);
        }
        if let Outcome::Confirmed(_) = decision.outcome {
            // A value that stays is used all the same.
            key.touch(name);
        }
        waiting::carry_out(ctx, name, key, decision.effect);
        Ok(Some(decision.outcome.into()))
    }
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
        complexity: c"O(H) with H holders.",
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
        waiting::carry_out(ctx, name, key, decision.effect);
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
        complexity: c"O(H) with H holders, and O(log(N)) with N clients waiting.",
        args: &[KEY, OWNER],
    };

    fn handle<'c>(ctx: &'c Ctx, args: &Args<'c>) -> Result<Option<Reply>, BadRequest<'c>> {
        let name = key(args)?;
        let owner = request::release(args.from(2))?;
        let key = ctx.open(name);
        let decision = lock::release(keys::find(ctx, &key, owner), owner, unix_time);
        if decision.outcome == Outcome::Released {
            State::with(ctx, |state| state.stats.releases += 1);
        }
        // Before anybody is served: whoever listens to that may end this client's connection.
        if let Some(client) = waiting::leave(ctx, name, owner) {
            waiting::refuse(client, Reply::Null);
        }
        waiting::carry_out(ctx, name, key, decision.effect);
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
        complexity:
            c"O(H) with H holders, and O(N) with N clients waiting for the key, at most 100.",
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
        let (waiters, queue) = waiting::list(ctx, name, LISTED, now.mono);
        let ends_at = key.ends_at();
        // Also if there is none: a miss counts as that of a GET.
        let value = keys::peek(ctx, key, name);
        let info = Info {
            waiters,
            queue,
            ..holding(value.as_deref(), ends_at, now.wall)
        };
        if info.ttl_ms == NOBODY && info.waiters == 0 {
            return Ok(Some(Reply::Null));
        }
        Ok(Some(Reply::Info(Box::new(info))))
    }
}

/// How many of those who hold and of those who wait LOCK.INFO lists, so that no reply holds up the server.
const LISTED: usize = 100;

/// In place of a ttl, as PTTL says it of a missing key.
const NOBODY: i64 = -2;

/// What LOCK.INFO says of those who hold a key.
fn holding(value: Option<&[u8]>, ends_at: Option<UnixMs>, now: UnixUs) -> Info {
    let nobody = Info {
        ttl_ms: NOBODY,
        ..Info::default()
    };
    let Some(value) = value else { return nobody };
    let ms_to = |end: UnixMs| (end.0 - now.ms().0).max(0);
    let ttl_ms = ends_at.map_or(-1, ms_to);
    let Some(holders) = Holders::read(value, now) else {
        let reading = lock::read(value);
        return Info {
            owner: Some(reading.owner.to_vec()),
            fence: reading.fence.map(|fence| fence.number().cast_signed()),
            held_ms: reading.fence.map(|fence| fence.held_ms(now).cast_signed()),
            ttl_ms,
            ..nobody
        };
    };
    let Some(limit) = holders.limit() else {
        return nobody;
    };
    let info = |holder: Holder| HolderInfo {
        owner: holder.owner.bytes().to_vec(),
        fence: holder.fence.number().cast_signed(),
        held_ms: holder.fence.held_ms(now).cast_signed(),
        ttl_ms: ms_to(holder.ends_at),
        limit: holder.limit.number().into(),
    };
    Info {
        ttl_ms,
        list: Some(ListInfo {
            limit: limit.number().into(),
            holding: holders.iter().count() as i64,
            holders: holders.iter().take(LISTED).map(info).collect(),
        }),
        ..nobody
    }
}

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
