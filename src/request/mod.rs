//! The parser: the arguments of a command become a request that cannot be wrong.
//!
//! Pure: bytes in, no Redis. Behind this parser no function checks an argument again.

use crate::lock::{LeaseRequest, Limit, Owner};
use crate::time::{MAX_INTEGER, Ttl, Wait};

/// `LOCK.ACQUIRE key owner ttl-ms [WAIT timeout-ms] [LIMIT n | SHARED]`
#[derive(Debug, PartialEq, Eq)]
pub struct Acquire<'a> {
    pub lease: LeaseRequest<'a>,
    /// How long to wait for a lock that another holds; none is one try.
    pub wait: Option<Wait>,
}

/// `LOCK.RENEW key owner ttl-ms`
#[derive(Debug, PartialEq, Eq)]
pub struct Renew<'a> {
    pub owner: Owner<'a>,
    pub ttl: Ttl,
}

/// Why the arguments are no request. [`crate::reply`] has the sentences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadRequest<'a> {
    WrongCount,
    OwnerEmpty,
    OwnerTooLong(&'a [u8]),
    TtlNotANumber(&'a [u8]),
    TtlOutOfRange(&'a [u8]),
    OptionUnknown(&'a [u8]),
    /// Which one, in capitals, and as it was given.
    OptionTwice(&'static str, &'a [u8]),
    WaitWithoutTimeout(&'a [u8]),
    LimitWithoutNumber(&'a [u8]),
    LimitAndShared(&'a [u8]),
    TimeoutNotANumber(&'a [u8]),
    TimeoutOutOfRange(&'a [u8]),
    LimitNotANumber(&'a [u8]),
    LimitOutOfRange(&'a [u8]),
}

/// Reads what follows `LOCK.ACQUIRE key`.
pub fn acquire<'a>(
    mut args: impl Iterator<Item = &'a [u8]>,
) -> Result<Acquire<'a>, BadRequest<'a>> {
    let (owner, ttl) = (owner(args.next())?, ttl(args.next())?);
    let (mut wait, mut number, mut shared) = (None, None, false);
    while let Some(option) = args.next() {
        let is = |name: &str| option.eq_ignore_ascii_case(name.as_bytes());
        if is("WAIT") {
            once("WAIT", option, wait.is_some())?;
            let timeout = args.next().ok_or(BadRequest::WaitWithoutTimeout(option))?;
            wait = Some(self::timeout(timeout)?);
        } else if is("LIMIT") {
            once("LIMIT", option, number.is_some())?;
            let given = args.next().ok_or(BadRequest::LimitWithoutNumber(option))?;
            number = Some(limit(given)?);
        } else if is("SHARED") {
            once("SHARED", option, shared)?;
            shared = true;
        } else {
            return Err(BadRequest::OptionUnknown(option));
        }
        if number.is_some() && shared {
            return Err(BadRequest::LimitAndShared(option));
        }
    }
    let limit = match shared {
        true => Limit::SHARED,
        false => number.unwrap_or(Limit::EXCLUSIVE),
    };
    Ok(Acquire {
        lease: LeaseRequest { owner, ttl, limit },
        wait: wait.flatten(),
    })
}

fn once<'a>(name: &'static str, option: &'a [u8], before: bool) -> Result<(), BadRequest<'a>> {
    match before {
        true => Err(BadRequest::OptionTwice(name, option)),
        false => Ok(()),
    }
}

/// Reads what follows `LOCK.RENEW key`.
pub fn renew<'a>(mut args: impl Iterator<Item = &'a [u8]>) -> Result<Renew<'a>, BadRequest<'a>> {
    let request = Renew {
        owner: owner(args.next())?,
        ttl: ttl(args.next())?,
    };
    nothing_more(args).map(|()| request)
}

/// Reads what follows `LOCK.RELEASE key`.
pub fn release<'a>(mut args: impl Iterator<Item = &'a [u8]>) -> Result<Owner<'a>, BadRequest<'a>> {
    let owner = owner(args.next())?;
    nothing_more(args).map(|()| owner)
}

/// Reads what follows a command that takes nothing (more).
pub fn nothing_more<'a>(mut args: impl Iterator<Item = &'a [u8]>) -> Result<(), BadRequest<'a>> {
    args.next().map_or(Ok(()), |_| Err(BadRequest::WrongCount))
}

fn owner(arg: Option<&[u8]>) -> Result<Owner<'_>, BadRequest<'_>> {
    let bytes = arg.ok_or(BadRequest::WrongCount)?;
    Owner::new(bytes).ok_or(if bytes.is_empty() {
        BadRequest::OwnerEmpty
    } else {
        BadRequest::OwnerTooLong(bytes)
    })
}

fn ttl(arg: Option<&[u8]>) -> Result<Ttl, BadRequest<'_>> {
    let bytes = arg.ok_or(BadRequest::WrongCount)?;
    match number(bytes) {
        Ok(ms) => Ttl::from_ms(ms).ok_or(BadRequest::TtlOutOfRange(bytes)),
        Err(BadNumber::NotANumber) => Err(BadRequest::TtlNotANumber(bytes)),
        Err(BadNumber::OutOfRange) => Err(BadRequest::TtlOutOfRange(bytes)),
    }
}

/// None for 0, which is one try.
fn timeout(bytes: &[u8]) -> Result<Option<Wait>, BadRequest<'_>> {
    match number(bytes) {
        Ok(ms) => Ok(Wait::from_ms(ms)),
        Err(BadNumber::NotANumber) => Err(BadRequest::TimeoutNotANumber(bytes)),
        Err(BadNumber::OutOfRange) => Err(BadRequest::TimeoutOutOfRange(bytes)),
    }
}

fn limit(bytes: &[u8]) -> Result<Limit, BadRequest<'_>> {
    match number(bytes) {
        Ok(number) => Limit::new(number).ok_or(BadRequest::LimitOutOfRange(bytes)),
        Err(BadNumber::NotANumber) => Err(BadRequest::LimitNotANumber(bytes)),
        Err(BadNumber::OutOfRange) => Err(BadRequest::LimitOutOfRange(bytes)),
    }
}

enum BadNumber {
    NotANumber,
    OutOfRange,
}

/// ASCII digits and nothing else, up to 2^53 − 1. Not `str::parse`, which takes a plus sign.
fn number(bytes: &[u8]) -> Result<u64, BadNumber> {
    if bytes.is_empty() || !bytes.iter().all(u8::is_ascii_digit) {
        return Err(BadNumber::NotANumber);
    }
    bytes
        .iter()
        .try_fold(0u64, |sum, byte| {
            sum.checked_mul(10)?
                .checked_add(u64::from(byte - b'0'))
                .filter(|sum| *sum <= MAX_INTEGER)
        })
        .ok_or(BadNumber::OutOfRange)
}

#[cfg(test)]
mod tests;
