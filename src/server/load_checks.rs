//! What must be right before the first command is served, and after the last.

use super::api::{Ctx, Refused, client_field};
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

/// Ends the connections that would lead the server to a command of ours after it is gone. All servers keep the
/// last command of each client, for CLIENT LIST; Redis from 8.0 on compares it with the next; and the commands
/// that are queued in a MULTI are kept as well. None of them looks whether it is still there.
pub fn close_clients_that_used_us(ctx: &Ctx) -> Result<(), Refused> {
    let Some(clients) = ctx.clients() else {
        return Err(Refused(
            "not unloaded: the server does not answer CLIENT LIST, and it may crash when a client goes on \
             that used lockkeeper: remove the rename-command for CLIENT, or restart the server without \
             the module"
                .to_owned(),
        ));
    };
    let clients: Vec<Client> = clients
        .iter()
        .filter_map(|line| Client::read(line))
        .collect();
    // This client itself, which cannot be closed here.
    if clients.iter().any(|client| client.is_in_exec) {
        return Err(Refused(
            "not unloaded: MODULE UNLOAD is in a transaction, and commands of lockkeeper may follow in it: \
             give it alone"
                .to_owned(),
        ));
    }
    for client in clients.iter().filter(|client| client.leads_to_us) {
        ctx.kill(client.id);
    }
    Ok(())
}

/// A client, as far as unloading is concerned.
#[derive(Debug, PartialEq, Eq)]
struct Client {
    id: u64,
    /// Its last command was ours, or it has queued some in a MULTI, which may be ours.
    leads_to_us: bool,
    is_in_exec: bool,
}

impl Client {
    /// Reads a line of CLIENT LIST.
    fn read(line: &str) -> Option<Client> {
        let id = line.split(' ').next()?.strip_prefix("id=")?.parse().ok()?;
        let last = client_field(line, "cmd")?;
        let queued = client_field(line, "multi")?.parse().unwrap_or(0) > 0;
        Some(Client {
            id,
            leads_to_us: queued || last.starts_with("lock."),
            is_in_exec: queued && last == "exec",
        })
    }
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
    fn a_client_leads_to_us_if_its_last_command_was_ours_or_it_has_some_queued() {
        let read = |cmd: &str, multi: &str| {
            let line = format!(
                "id=7 addr=/tmp/cmd=lock.info multi=9:0 laddr= name= multi={multi} cmd={cmd} user=default"
            );
            Client::read(&line).map(|client| (client.id, client.leads_to_us, client.is_in_exec))
        };
        assert_eq!(read("lock.renew", "-1"), Some((7, true, false)));
        assert_eq!(read("get", "2"), Some((7, true, false)));
        assert_eq!(read("exec", "2"), Some((7, true, true)));
        for last in ["get", "NULL", "client|list", "exec", "module|unload"] {
            assert_eq!(read(last, "-1"), Some((7, false, false)), "{last}");
        }
        assert_eq!(read("multi", "0"), Some((7, false, false)));
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
