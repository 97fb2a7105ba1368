//! From the command line's options to a plan that makes sense.

use std::env::VarError;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use lockkeeper::{Builder, Lockkeeper};

use crate::exit::{CONFLICT, Exit, OUTPUT, USAGE};

#[derive(Parser)]
#[command(
    name = "lockkeeper",
    version,
    about = "Runs a command while holding a lock on a Redis or Valkey server with the module lockkeeper.",
    max_term_width = 100,
    after_help = EXIT_CODES,
    disable_help_subcommand = true
)]
struct Opts {
    #[command(subcommand)]
    command: Subcommands,
    #[command(flatten)]
    server: ServerOpts,
}

const EXIT_CODES: &str = "\
Exit codes of run:
  the command's   it ended; 128 + n, as shells show it, if signal n ended it
  64              wrong usage, or a command under the lock asks for the same lock
  69              the server cannot be reached or refuses
  75              not acquired in time (or the code given with -E)
  76              the lock was lost, and the command was ended
  77              something that the command started could not be ended
  126, 127        the command cannot be executed, is not found

Durations are written like 500ms, 30s, 5m or '1h 30m'; a number alone means seconds.
Put passwords into REDIS_URL, REDISCLI_AUTH or a file, never on the command line.";

const INFO_EXIT_CODES: &str = "\
Exit codes of info:
  0               somebody holds the lock, nobody waits
  1               the lock is free
  2               somebody waits for the lock
  64              wrong usage
  69              the server cannot be reached or refuses
  74              the output cannot be written";

const DEFAULT_URL: &str = "redis://127.0.0.1:6379/";

#[derive(Args)]
struct ServerOpts {
    /// The server: redis://[user@]host[:port][/db], rediss://… for TLS, unix:///path,
    /// redis+sentinel://host,host/master or redis+cluster://host,host [env: REDIS_URL] [default:
    /// redis://127.0.0.1:6379/]
    // Not read from the environment by clap, which would show it as required in usage errors.
    #[arg(long, global = true, value_name = "URL")]
    url: Option<String>,
    /// Read the server's password from the first line of a file
    #[arg(long, global = true, value_name = "FILE")]
    password_file: Option<PathBuf>,
    /// Read the sentinels' password, if they have one, from the first line of a file
    #[arg(long, global = true, value_name = "FILE")]
    sentinel_password_file: Option<PathBuf>,
    /// For rediss://, trust only certificates signed by the authority in this file (PEM)
    #[arg(long, global = true, value_name = "FILE")]
    cacert: Option<PathBuf>,
    /// For rediss://, the certificate that shows the server who we are (PEM)
    #[arg(long, global = true, value_name = "FILE", requires = "key_file")]
    cert: Option<PathBuf>,
    /// The private key of that certificate (PEM)
    // Not called `key`, as the lock's is.
    #[arg(
        id = "key_file",
        long = "key",
        global = true,
        value_name = "FILE",
        requires = "cert"
    )]
    key_file: Option<PathBuf>,
    /// For rediss://, take any certificate of the server: who stands in between can read and change
    /// everything
    #[arg(long, global = true, conflicts_with = "cacert")]
    insecure: bool,
    /// Say nothing; the exit code tells
    #[arg(short, long, global = true)]
    quiet: bool,
}

#[derive(Subcommand)]
enum Subcommands {
    /// Acquire a lock, run a command, release the lock
    ///
    /// Waits without bound unless told otherwise. The command is run without a shell; its input
    /// and output are not touched. When the lock is lost, the command and all that it started are
    /// ended; when the server falls silent, before anybody else can have the lock. Its environment
    /// tells LOCKKEEPER_KEY, LOCKKEEPER_OWNER and LOCKKEEPER_FENCE, and in LOCKKEEPER_OWNERS, a line
    /// each, the owners of the runs around it: who asks for a lock that one of them holds is refused.
    /// At a terminal a run that waits says so, once.
    ///
    /// With --limit or --shared several runs hold the lock at a time; one without is alone.
    #[command(after_help = EXIT_CODES)]
    Run(RunOpts),
    /// Tell who holds a lock and who waits for it
    #[command(after_help = INFO_EXIT_CODES)]
    Info {
        /// As JSON, times in milliseconds
        #[arg(long)]
        json: bool,
        /// The key of the lock
        #[arg(value_parser = key_parser())]
        key: OsString,
    },
    /// Release a lock that somebody else holds
    ///
    /// For a holder that is known to be dead. It releases in the name of whoever holds the lock
    /// now, and so cannot hit the next holder. Of several holders it wants to be told which.
    Release {
        /// Say that you know that the holder is dead
        #[arg(long, required = true)]
        force: bool,
        /// The owner in whose name it is released; by default whoever holds the lock alone
        #[arg(long, value_name = "OWNER", value_parser = owner_parser())]
        owner: Option<OsString>,
        /// The key of the lock
        #[arg(value_parser = key_parser())]
        key: OsString,
    },
    /// Write the manual pages, one for each command, into a directory
    #[command(hide = true)]
    Man { directory: PathBuf },
    /// Write completions for bash, zsh and fish below a directory, where each looks for them
    #[command(hide = true)]
    Completions { directory: PathBuf },
}

#[derive(Args)]
struct RunOpts {
    /// How long the lock outlives this process if it dies
    #[arg(long, default_value = "30s", value_parser = duration)]
    ttl: Duration,
    /// Wait for the lock that long, then give up
    #[arg(short, long, value_name = "TIME", value_parser = duration, conflicts_with = "no_wait")]
    wait: Option<Duration>,
    /// Give up at once if the lock is busy
    #[arg(short, long)]
    no_wait: bool,
    /// The exit code for giving up
    #[arg(short = 'E', long, value_name = "CODE", default_value_t = CONFLICT)]
    conflict_exit_code: u8,
    /// Keep the lock that long after the grant when the command succeeds sooner, so that a job of
    /// one second does not run again on a machine whose clock is slow
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = duration)]
    at_least: Duration,
    /// Take one of so many places, 1 to 1000, instead of the only one
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=1000))]
    limit: Option<u32>,
    /// Share the lock with all who do so too, as readers; who does not is alone, as a writer
    #[arg(short, long, conflicts_with = "limit")]
    shared: bool,
    /// How long the command may take to end after SIGTERM, before SIGKILL
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = duration)]
    grace: Duration,
    /// The first part of the owner's name; by default host:pid
    #[arg(long)]
    label: Option<String>,
    /// The key of the lock
    #[arg(value_parser = key_parser())]
    key: OsString,
    /// The command, and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// A number alone means seconds, as for flock, sleep and timeout.
fn duration(text: &str) -> Result<Duration, String> {
    let is_number = text
        .bytes()
        .all(|byte| byte.is_ascii_digit() || byte == b'.');
    if let (true, Ok(seconds)) = (is_number, text.parse()) {
        return Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string());
    }
    humantime::parse_duration(text).map_err(|error| format!("{error}, write it like 500ms or 30s"))
}

/// An empty key is a variable that was not set, and the lock of all who made that mistake.
fn key_parser() -> impl clap::builder::TypedValueParser<Value = OsString> {
    use clap::builder::TypedValueParser;
    clap::builder::OsStringValueParser::new().try_map(|key| match key.is_empty() {
        true => Err("the key is empty: is a variable not set?"),
        false => Ok(key),
    })
}

/// As an empty key.
fn owner_parser() -> impl clap::builder::TypedValueParser<Value = OsString> {
    use clap::builder::TypedValueParser;
    clap::builder::OsStringValueParser::new().try_map(|owner| match owner.is_empty() {
        true => Err("the owner is empty: is a variable not set?"),
        false => Ok(owner),
    })
}

/// What was asked for.
pub struct Plan {
    /// Not opened yet: that starts a thread, and signals have to be taken before.
    pub server: Builder,
    pub command: Command,
    pub quiet: bool,
}

pub enum Command {
    Run(Run),
    Info {
        key: Vec<u8>,
        json: bool,
    },
    Release {
        key: Vec<u8>,
        owner: Option<Vec<u8>>,
    },
    Man {
        directory: PathBuf,
    },
    Completions {
        directory: PathBuf,
    },
}

pub struct Run {
    pub key: Vec<u8>,
    pub command: Vec<OsString>,
    pub ttl: Duration,
    pub wait: Wait,
    pub company: Company,
    pub conflict: u8,
    pub at_least: Duration,
    pub grace: Duration,
}

pub enum Wait {
    No,
    For(Duration),
    ForEver,
}

/// Who else may hold the lock.
#[derive(Clone, Copy)]
pub enum Company {
    Nobody,
    /// So many in all.
    Limit(u32),
    Shared,
}

pub fn parse() -> Result<Plan, Exit> {
    let mut matches = Opts::command().try_get_matches().map_err(refuse)?;
    let opts = Opts::from_arg_matches_mut(&mut matches).map_err(refuse)?;
    let (label, command) = match opts.command {
        Subcommands::Run(run) => (run.label.clone(), Command::Run(run.plan())),
        Subcommands::Info { json, key } => (
            None,
            Command::Info {
                key: bytes(key),
                json,
            },
        ),
        Subcommands::Release { key, owner, .. } => (
            None,
            Command::Release {
                key: bytes(key),
                owner: owner.map(bytes),
            },
        ),
        Subcommands::Man { directory } => (None, Command::Man { directory }),
        Subcommands::Completions { directory } => (None, Command::Completions { directory }),
    };
    let quiet = opts.server.quiet;
    let server = opts
        .server
        .plan(label)
        .map_err(|exit| exit.quietly(quiet))?;
    Ok(Plan {
        server,
        command,
        quiet,
    })
}

impl RunOpts {
    fn plan(self) -> Run {
        Run {
            key: bytes(self.key),
            command: self.command,
            ttl: self.ttl,
            wait: match (self.wait, self.no_wait) {
                (_, true) => Wait::No,
                (Some(Duration::ZERO), false) => Wait::No,
                (Some(wait), false) => Wait::For(wait),
                (None, false) => Wait::ForEver,
            },
            company: match (self.limit, self.shared) {
                (_, true) => Company::Shared,
                (Some(limit), false) => Company::Limit(limit),
                (None, false) => Company::Nobody,
            },
            conflict: self.conflict_exit_code,
            at_least: self.at_least,
            grace: self.grace,
        }
    }
}

impl ServerOpts {
    fn plan(self, label: Option<String>) -> Result<Builder, Exit> {
        if self.url.as_deref().is_some_and(names_password) {
            return Err(Exit::with_message(
                USAGE,
                "a password on the command line can be read by everybody on this machine, \
                 put it into REDIS_URL, REDISCLI_AUTH or a file",
            ));
        }
        let url = match (self.url, std::env::var("REDIS_URL")) {
            (Some(url), _) | (None, Ok(url)) => url,
            (None, Err(VarError::NotPresent)) => DEFAULT_URL.to_owned(),
            (None, Err(VarError::NotUnicode(_))) => {
                return Err(Exit::with_message(USAGE, "REDIS_URL is not UTF-8"));
            }
        };
        let mut builder = Lockkeeper::builder(url);
        if let Some(label) = label {
            builder = builder.label(label);
        }
        if let Some(path) = &self.password_file {
            builder = builder.password(first_line(path)?);
        } else {
            match std::env::var("REDISCLI_AUTH") {
                Ok(password) => builder = builder.password(password),
                Err(VarError::NotPresent) => {}
                Err(VarError::NotUnicode(_)) => {
                    return Err(Exit::with_message(USAGE, "REDISCLI_AUTH is not UTF-8"));
                }
            }
        }
        if let Some(path) = &self.sentinel_password_file {
            builder = builder.sentinel_password(first_line(path)?);
        }
        if let Some(path) = &self.cacert {
            builder = builder.root_ca(read(path)?);
        }
        if let (Some(cert), Some(key)) = (&self.cert, &self.key_file) {
            builder = builder.client_certificate(read(cert)?, read(key)?);
        }
        if self.insecure {
            builder = builder.insecure();
        }
        Ok(builder)
    }
}

/// Whether there may be a password in the URL, however badly it is written.
fn names_password(url: &str) -> bool {
    let (_, rest) = url.split_once("://").unwrap_or(("", url));
    let in_front = rest
        .rsplit_once('@')
        .is_some_and(|(it, _)| it.contains(':'));
    let query = rest.split_once('?').map_or("", |(_, query)| query);
    in_front || query.split('&').any(|it| it.contains("pass"))
}

fn read(path: &Path) -> Result<Vec<u8>, Exit> {
    std::fs::read(path)
        .map_err(|error| Exit::with_message(USAGE, format!("{}: {error}", path.display())))
}

fn first_line(path: &Path) -> Result<String, Exit> {
    let bytes = read(path)?;
    let line = bytes
        .split(|byte| *byte == b'\n')
        .next()
        .unwrap_or_default();
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    String::from_utf8(line.to_vec()).map_err(|_| {
        let path = path.display();
        Exit::with_message(USAGE, format!("{path}: the first line is not UTF-8"))
    })
}

/// Help is no error; anything else is wrong usage.
fn refuse(error: clap::Error) -> Exit {
    let _ = error.print();
    Exit::with(if error.use_stderr() { USAGE } else { 0 })
}

pub fn man(directory: &Path) -> Result<Exit, Exit> {
    let write = || {
        clap_mangen::generate_to(Opts::command(), directory)?;
        // The synopsis leaves out what must stand before the command.
        let page = directory.join("lockkeeper-run.1");
        let text = std::fs::read_to_string(&page)?;
        std::fs::write(
            page,
            text.replacen("<\\fICOMMAND\\fR>", "\\-\\- <\\fICOMMAND\\fR>", 1),
        )
    };
    write().map_err(|error| cannot_write(directory, &error))?;
    Ok(Exit::with(0))
}

pub fn completions(directory: &Path) -> Result<Exit, Exit> {
    use clap_complete::{Shell, generate_to};
    let write = || -> std::io::Result<()> {
        for (shell, folder) in [
            (Shell::Bash, "bash-completion/completions"),
            (Shell::Zsh, "zsh/vendor-completions"),
            (Shell::Fish, "fish/vendor_completions.d"),
        ] {
            let folder = directory.join(folder);
            std::fs::create_dir_all(&folder)?;
            let file = generate_to(shell, &mut Opts::command(), "lockkeeper", &folder)?;
            // bash-completion looks for the name of the command, without an extension.
            if shell == Shell::Bash {
                std::fs::rename(file, folder.join("lockkeeper"))?;
            }
        }
        Ok(())
    };
    write().map_err(|error| cannot_write(directory, &error))?;
    Ok(Exit::with(0))
}

fn cannot_write(directory: &Path, error: &std::io::Error) -> Exit {
    let directory = directory.display();
    Exit::with_message(OUTPUT, format!("cannot write to {directory}: {error}"))
}

fn bytes(text: OsString) -> Vec<u8> {
    std::os::unix::ffi::OsStringExt::into_vec(text)
}
