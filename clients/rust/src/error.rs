//! Why a question got no answer. That a lock is busy or lost is an answer, not an error.

use crate::printable::without_controls;

/// What kept a question from being answered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The caller asked for something that makes no sense; nothing was sent.
    #[error("{0}")]
    Invalid(String),
    /// Nobody answered in time. Whether the server carried it out is not known; what may have
    /// been granted is released in the background and ends by itself after one ttl.
    #[error("the server cannot be reached: {0}")]
    Unreachable(String),
    /// The server answered with an error, kept here as it came: `CODE what was wrong`.
    #[error("the server refuses: {0}")]
    Refused(String),
    /// This process was forked after the [`Lockkeeper`](crate::Lockkeeper) was opened, so the lock
    /// is its parent's. Open one of its own.
    #[error("this process is a fork of the one that opened the lockkeeper")]
    Forked,
    /// The system has no thread, memory or descriptor left for the watchdog; nothing was sent.
    #[error("the watchdog cannot be started: {0}")]
    NoWatchdog(String),
}

impl Error {
    pub(crate) fn closed() -> Error {
        Error::Invalid("the lockkeeper was closed".to_owned())
    }

    pub(crate) fn no_answer() -> Error {
        Error::Unreachable("no answer in time".to_owned())
    }

    pub(crate) fn may_be_shared() -> Error {
        Error::Unreachable(
            "a downgrade that was not answered may still arrive: release the lock, and acquire it anew"
                .to_owned(),
        )
    }

    pub(crate) fn moving() -> Error {
        Error::Unreachable("the key moves from node to node".to_owned())
    }

    /// Whether the server may reply otherwise in a moment: it is starting, changing its role,
    /// moving the key, or about to be upgraded, for which nobody may wait.
    pub(crate) fn is_passing(&self) -> bool {
        const PASSING: [&str; 9] = [
            "BUSY ",
            "CLUSTERDOWN ",
            "LOADING ",
            "MASTERDOWN ",
            "NOREPLICAS ",
            "QUEUEFULL ",
            "READONLY ",
            "TRYAGAIN ",
            "UNBLOCKED ",
        ];
        match self {
            Error::Unreachable(_) => true,
            Error::Refused(line) => PASSING.iter().any(|code| line.starts_with(code)),
            Error::Invalid(_) | Error::Forked | Error::NoWatchdog(_) => false,
        }
    }
}

impl From<&redis::ServerError> for Error {
    fn from(error: &redis::ServerError) -> Error {
        let line = match error.details() {
            Some(details) => format!("{} {details}", error.code()),
            None => error.code().to_owned(),
        };
        Error::Refused(without_controls(&line))
    }
}

impl From<redis::RedisError> for Error {
    fn from(error: redis::RedisError) -> Error {
        use redis::ErrorKind::{AuthenticationFailed, Extension, InvalidClientConfig, Server};
        match error.kind() {
            InvalidClientConfig => Error::Invalid(error.to_string()),
            AuthenticationFailed => Error::Refused("authentication failed".to_owned()),
            Server(_) | Extension => match redis::ServerError::try_from(error) {
                Ok(error) => Error::from(&error),
                Err(error) => Error::Refused(without_controls(&error.to_string())),
            },
            _ => Error::Unreachable(without_controls(&error.to_string())),
        }
    }
}
