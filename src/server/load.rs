//! MODULE LOAD and UNLOAD: what must be right before the first command is served, and after the last.

use std::ffi::CStr;

use super::api::{Ctx, Refused};
use super::waiting::{MaxWaiters, MaxWaitersPerKey};
use super::{State, commands, events};

/// Name of the module: in MODULE LIST, of its section in INFO, and before the dot of its settings.
pub const NAME: &CStr = c"lockkeeper";

/// Version of the module as the server wants it, one number: 1.2.3 is 10203.
pub const VERSION: i32 = digits(env!("CARGO_PKG_VERSION_MAJOR")) * 10_000
    + digits(env!("CARGO_PKG_VERSION_MINOR")) * 100
    + digits(env!("CARGO_PKG_VERSION_PATCH"));

/// Oldest server that has all we need, 7.0.5, as it tells its version.
const OLDEST_SERVER: i32 = 0x07_00_05;

/// Argument of MODULE LOAD that adds LOCK.DEBUG, for tests.
const DEBUG_ARGUMENT: &[u8] = b"enable-debug-command";

const fn digits(text: &str) -> i32 {
    let (mut number, mut place) = (0, 0);
    while place < text.len() {
        number = number * 10 + (text.as_bytes()[place] - b'0') as i32;
        place += 1;
    }
    number
}

/// Registers all that we are, or says in one sentence why not.
pub fn load<'c>(ctx: &Ctx, args: impl Iterator<Item = &'c [u8]>) -> Result<(), Refused> {
    refuse_old_server(ctx.server_version())?;
    refuse_renamed_commands(ctx)?;
    let mut debug = false;
    for arg in args {
        match arg {
            DEBUG_ARGUMENT => debug = true,
            _ => {
                return Err(Refused(format!(
                    "not loaded: the argument '{}' is unknown, load lockkeeper without arguments",
                    arg.escape_ascii()
                )));
            }
        }
    }
    State::reset(ctx);
    ctx.declare_options();
    commands::register(ctx, debug)?;
    ctx.register_info()?;
    ctx.register_setting::<MaxWaiters>()?;
    ctx.register_setting::<MaxWaitersPerKey>()?;
    ctx.read_settings()?;
    // Last of what can be refused: Redis 7.0 goes on telling a module that was not loaded.
    ctx.subscribe()?;
    events::warn_of_eviction(ctx);
    Ok(())
}

fn refuse_old_server(version: i32) -> Result<(), Refused> {
    if version >= OLDEST_SERVER {
        return Ok(());
    }
    let [_, major, minor, patch] = version.to_be_bytes();
    let found = match version {
        0 => "is older than 6.2".to_owned(),
        _ => format!("is {major}.{minor}.{patch}"),
    };
    Err(Refused(format!(
        "not loaded: this server {found}, lockkeeper needs Redis 7.0.5 or Valkey 7.2 or later: \
         upgrade the server"
    )))
}

/// Replicas and AOF hear of locks by these commands: under other names they would not, silently.
fn refuse_renamed_commands(ctx: &Ctx) -> Result<(), Refused> {
    match [c"SET", c"PEXPIREAT", c"DEL"]
        .into_iter()
        .find(|command| !ctx.knows(command))
    {
        None => Ok(()),
        Some(command) => Err(Refused(format!(
            "not loaded: {} is renamed or switched off, and replicas hear of locks by it: remove the \
             rename-command for SET, PEXPIREAT and DEL",
            command.to_string_lossy()
        ))),
    }
}

/// What CLIENT UNBLOCK does on this server to a client that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientUnblock {
    Works,
    /// Redis 7.0: a client that is granted its lock in the same turn of the loop is let go without any
    /// answer, and would take the next reply for it.
    MayLeaveUnanswered,
    /// 7.2: the server crashes when it meets a grant. It is not offered there.
    Crashes,
}

impl ClientUnblock {
    pub fn on(ctx: &Ctx) -> ClientUnblock {
        let is_7_2 = match ctx.valkey_version() {
            Some(version) => version.starts_with("7.2."),
            None => ctx.server_version() >> 8 == 0x07_02,
        };
        if is_7_2 {
            ClientUnblock::Crashes
        } else if ctx.server_version() < 0x07_02_00 {
            ClientUnblock::MayLeaveUnanswered
        } else {
            ClientUnblock::Works
        }
    }
}

/// Whether the API sets the idle time of a key to what it says it is. Valkey 9 makes a thousand seconds of
/// each millisecond.
pub fn can_set_idle_time(ctx: &Ctx) -> bool {
    let major = ctx
        .valkey_version()
        .and_then(|version| version.split('.').next()?.parse::<u32>().ok());
    major.is_none_or(|major| major < 9)
}

/// Refuses while an ACL rule names our commands: with the commands gone, Redis and Valkey from 7.2 on
/// end with a failed assertion when they go through such a rule. Refuses as well where it cannot be known.
pub fn unload(ctx: &Ctx) -> Result<(), Refused> {
    let Some(rules) = ctx.acl_rules() else {
        return Err(Refused(
            "not unloaded: the server does not answer ACL LIST, and it may crash if an ACL rule names \
             commands of lockkeeper: remove the rename-command for ACL, or restart the server without \
             the module"
                .to_owned(),
        ));
    };
    match rules.iter().find(|rule| names_our_commands(rule)) {
        None => {
            State::drop(ctx);
            Ok(())
        }
        Some(rule) => {
            let user = rule.split(' ').nth(1).unwrap_or_default().escape_debug();
            Err(Refused(format!(
                "not unloaded: the ACL rules of user '{user}' name commands of lockkeeper, remove those \
                 rules, unload, load, and set them again"
            )))
        }
    }
}

/// Whether a line of ACL LIST allows or forbids a command or the category of ours. A key pattern
/// (`~lock.*`) does not.
fn names_our_commands(rule: &str) -> bool {
    rule.split([' ', '(', ')']).any(|word| {
        let what = word
            .strip_prefix(['+', '-'])
            .unwrap_or_default()
            .to_ascii_lowercase();
        what.starts_with("lock.") || what == "@lock"
    })
}

/// The server knows a module of our name already.
pub fn refuse_second_loading() -> Refused {
    Refused(
        "not loaded: lockkeeper is loaded already, MODULE UNLOAD lockkeeper before you load another \
         version"
            .to_owned(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_older_than_7_0_5_is_refused_with_a_sentence_that_says_what_to_do() {
        for old in [0x06_02_0e, 0x07_00_00, 0x07_00_04] {
            assert!(refuse_old_server(old).is_err_and(|Refused(why)| why.contains("upgrade")));
        }
        for new in [0x07_00_05, 0x07_02_00, 0x08_02_01, 0x7f_ff_ff] {
            assert!(refuse_old_server(new).is_ok());
        }
    }

    #[test]
    fn only_a_rule_that_names_our_commands_or_category_keeps_us_from_unloading() {
        for rule in [
            "user a on +lock.acquire",
            "user a on -@lock",
            "user a on (~k +LOCK.info)",
        ] {
            assert!(names_our_commands(rule), "{rule}");
        }
        for rule in [
            "user a on ~lock.* +@all",
            "user lock.x on -@all +locker",
            "user a +get",
        ] {
            assert!(!names_our_commands(rule), "{rule}");
        }
    }

    #[test]
    fn the_version_is_one_number_that_grows_with_each_part() {
        assert_eq!(digits("0"), 0);
        assert_eq!(digits("12"), 12);
        let parts: Vec<i32> = env!("CARGO_PKG_VERSION")
            .split('.')
            .map(|part| part.parse().unwrap())
            .collect();
        assert_eq!(VERSION, parts[0] * 10_000 + parts[1] * 100 + parts[2]);
    }
}
