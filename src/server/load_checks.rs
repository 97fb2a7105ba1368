//! What must be right before the first command is served, and after the last.

use super::api::{Ctx, Refused};
use super::quirks::{Quirk, Server};

/// Version of the module as the server wants it, one number: 1.2.3 is 10203.
pub const VERSION: i32 = digits(env!("CARGO_PKG_VERSION_MAJOR")) * 10_000
    + digits(env!("CARGO_PKG_VERSION_MINOR")) * 100
    + digits(env!("CARGO_PKG_VERSION_PATCH"));

/// Argument of MODULE LOAD that adds LOCK.DEBUG, for tests.
const DEBUG_ARGUMENT: &[u8] = b"enable-debug-command";

const fn digits(text: &str) -> i32 {
    let (mut number, mut index) = (0, 0);
    while index < text.len() {
        number = number * 10 + (text.as_bytes()[index] - b'0') as i32;
        index += 1;
    }
    number
}

/// Whether the arguments of MODULE LOAD ask for LOCK.DEBUG. Any other argument is refused.
pub fn asks_for_debug_command<'c>(args: impl Iterator<Item = &'c [u8]>) -> Result<bool, Refused> {
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
    Ok(debug)
}

pub fn refuse_old_server(server: Server) -> Result<(), Refused> {
    if !server.quirks().has(Quirk::TooOld) {
        return Ok(());
    }
    let found = match server {
        Server::Redis((0, 0, 0)) => "is older than 6.2".to_owned(),
        Server::Redis((major, minor, patch)) | Server::Valkey((major, minor, patch)) => {
            format!("is {major}.{minor}.{patch}")
        }
    };
    Err(Refused(format!(
        "not loaded: this server {found}, lockkeeper needs Redis 7.0.5 or Valkey 7.2 or later: \
         upgrade the server"
    )))
}

/// Replicas and AOF learn of locks by these commands: under other names they would not, silently.
pub fn refuse_renamed_commands(ctx: &Ctx) -> Result<(), Refused> {
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

/// Refuses while an ACL rule names our commands: with the commands gone, Redis and Valkey from 7.2 on
/// end with a failed assertion when they go through such a rule. Refuses as well where it cannot be known.
pub fn refuse_while_acl_rules_name_us(ctx: &Ctx) -> Result<(), Refused> {
    let Some(rules) = ctx.acl_rules() else {
        return Err(Refused(
            "not unloaded: the server does not answer ACL LIST, and it may crash if an ACL rule names \
             commands of lockkeeper: remove the rename-command for ACL, or restart the server without \
             the module"
                .to_owned(),
        ));
    };
    match rules.iter().find(|rule| names_our_commands(rule)) {
        None => Ok(()),
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
            assert!(
                refuse_old_server(Server::redis(old))
                    .is_err_and(|Refused(why)| why.contains("upgrade"))
            );
        }
        for new in [0x07_00_05, 0x07_02_00, 0x08_02_01, 0x7f_ff_ff] {
            assert!(refuse_old_server(Server::redis(new)).is_ok());
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
