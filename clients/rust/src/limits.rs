//! What a caller may ask for, checked before anything is sent.

use std::time::Duration;

use crate::error::Error;
use crate::lease::MIN_TTL;
use crate::wire::{Limit, MAX_OWNER, MAX_TTL};

/// What the helper adds to a label to make an owner: a colon and a UUID as text, in bytes.
const OWNER_SUFFIX: usize = 37;

/// What the module adds to an owner to make the value of the key: 16 digits and a colon, in bytes. The value is
/// an argument too, of whoever releases in the name of what the key holds.
const VALUE_PREFIX: usize = 17;

/// A ttl as the server counts it, in whole milliseconds.
///
/// # Errors
/// [`Error::Invalid`] below [`MIN_TTL`] and above [`MAX_TTL`].
pub(crate) fn checked_ttl(ttl: Duration) -> Result<Duration, Error> {
    if ttl < MIN_TTL {
        return Err(Error::Invalid(format!(
            "the ttl must be at least {MIN_TTL:?}, got {ttl:?}"
        )));
    }
    if ttl > MAX_TTL {
        let most = MAX_TTL.as_millis();
        return Err(Error::Invalid(format!(
            "the ttl must be at most {most} ms, got {ttl:?}"
        )));
    }
    Ok(Duration::from_millis(ttl.as_millis() as u64))
}

/// # Errors
/// [`Error::Invalid`] if owners made from the label, or the value of the key, would be longer than the module takes.
pub(crate) fn check_label(label: &str) -> Result<(), Error> {
    let longest = MAX_OWNER - VALUE_PREFIX - OWNER_SUFFIX;
    if label.len() > longest {
        let length = label.len();
        return Err(Error::Invalid(format!(
            "the label must not be longer than {longest} bytes, got {length}"
        )));
    }
    Ok(())
}

/// How many may hold the lock: of those who share it the most that the module takes, else so many as
/// `limit` says, or one.
///
/// # Errors
/// [`Error::Invalid`] if it is not 1 to 1000, or both are asked for.
pub(crate) fn checked_limit(limit: Option<u32>, shared: bool) -> Result<Limit, Error> {
    match (limit, shared) {
        (None, false) => Ok(Limit::EXCLUSIVE),
        (None, true) => Ok(Limit::SHARED),
        (Some(number), false) => Limit::of(number)
            .ok_or_else(|| Error::Invalid(format!("the limit must be 1 to 1000, got {number}"))),
        (Some(number), true) => Err(Error::Invalid(format!(
            "either a limit or shared, got shared and a limit of {number}"
        ))),
    }
}
