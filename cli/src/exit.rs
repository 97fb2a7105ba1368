//! How the command ends.

use std::io::{ErrorKind, Write};
use std::process::ExitCode;

use lockkeeper::Error;

use crate::signals::die_of;

/// Wrong usage, as in sysexits.h.
pub const USAGE: u8 = 64;
/// The server is unreachable or refuses: EX_UNAVAILABLE.
pub const UNAVAILABLE: u8 = 69;
/// The output cannot be written: EX_IOERR.
pub const OUTPUT: u8 = 74;
/// Not acquired in time, unless `-E` says otherwise: EX_TEMPFAIL.
pub const CONFLICT: u8 = 75;
/// The lock was lost while the command ran.
pub const LOST: u8 = 76;
/// Something that the command started could not be ended: EX_NOPERM.
pub const STILL_RUNNING: u8 = 77;
/// The command cannot be executed: the code of shells.
pub const CANNOT_EXECUTE: u8 = 126;
/// There is no such command: the code of shells.
pub const NOT_FOUND: u8 = 127;
/// Added to the number of the signal that ended the command.
pub const SIGNALLED: u8 = 128;

/// A code, and the message to the user before it.
#[derive(Debug)]
pub struct Exit {
    code: u8,
    message: Option<String>,
    /// The signal to end by, rather than with the code.
    signal: Option<i32>,
}

impl Exit {
    pub fn with(code: u8) -> Exit {
        Exit {
            code,
            message: None,
            signal: None,
        }
    }

    pub fn with_message(code: u8, message: impl Into<String>) -> Exit {
        Exit::with(code).and_message(message)
    }

    /// By a signal, as if nobody had handled it.
    pub fn killed_by(signal: i32) -> Exit {
        Exit {
            signal: Some(signal),
            ..Exit::with(SIGNALLED + signal as u8)
        }
    }

    pub fn and_message(self, message: impl Into<String>) -> Exit {
        Exit {
            message: Some(message.into()),
            ..self
        }
    }

    /// Something that cannot be, on this system.
    pub fn cannot(message: impl Into<String>) -> Exit {
        Exit::with_message(CANNOT_EXECUTE, message)
    }

    /// For what goes to standard output. That nobody reads on (`| head -1`) is no error.
    pub fn after_printing(code: u8, text: &[u8]) -> Result<Exit, Exit> {
        let mut stdout = std::io::stdout();
        let written = stdout.write_all(text).and_then(|()| stdout.flush());
        match written {
            Err(error) if error.kind() != ErrorKind::BrokenPipe => {
                Err(Exit::with_message(OUTPUT, format!("cannot write: {error}")))
            }
            _ => Ok(Exit::with(code)),
        }
    }

    /// The code alone, if the user wants it so.
    pub fn quietly(self, quiet: bool) -> Exit {
        Exit {
            message: self.message.filter(|_| !quiet),
            ..self
        }
    }
}

impl From<Error> for Exit {
    fn from(error: Error) -> Exit {
        match error {
            Error::Invalid(message) => Exit::with_message(USAGE, message),
            error @ Error::NoWatchdog(_) => Exit::cannot(error.to_string()),
            error => Exit::with_message(UNAVAILABLE, error.to_string()),
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> ExitCode {
        if let Some(message) = exit.message {
            // Nobody may be there to read it; the code tells all the same.
            let _ = writeln!(std::io::stderr(), "lockkeeper: {message}");
        }
        if let Some(signal) = exit.signal {
            die_of(signal);
        }
        ExitCode::from(exit.code)
    }
}
