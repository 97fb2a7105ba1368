//! `lockkeeper release`: in the name of a holder that is known to be dead.

use lockkeeper::{Lockkeeper, MAX_OWNER, Released, printable};

use crate::exit::{CONFLICT, Exit, UNAVAILABLE, USAGE};
use crate::info;

/// Of several holders, so many are named.
const NAMED: usize = 10;

pub async fn run(lockkeeper: Lockkeeper, key: &[u8], owner: Option<Vec<u8>>) -> Result<Exit, Exit> {
    let name = printable(key);
    let info = info::ask(&lockkeeper, key).await?;
    let Some(info) = info.filter(|info| info.holding > 0) else {
        return Ok(Exit::with_message(0, format!("nobody holds {name}")));
    };
    let Some(owner) = owner.or(info.owner) else {
        let holders = info.holders.iter().take(NAMED);
        let mut named: Vec<String> = holders.map(|it| printable(&it.owner)).collect();
        let more = info.holding.saturating_sub(named.len() as u64);
        if more > 0 {
            named.push(format!("{more} more"));
        }
        let named = named.join(", ");
        return Err(Exit::with_message(
            USAGE,
            format!("several may hold {name}, say with --owner which: {named}"),
        ));
    };
    // Only a lock taken by hand can have such a token.
    if owner.is_empty() || owner.len() > MAX_OWNER {
        return Err(Exit::with_message(
            UNAVAILABLE,
            format!(
                "{name} is held by a token of {} bytes, and only one of 1 to {MAX_OWNER} can be \
                 named in a release; if its holder is dead, redis-cli DEL removes it",
                owner.len()
            ),
        ));
    }
    let who = printable(&owner);
    let does_not_hold = || Exit::with_message(CONFLICT, format!("{who} does not hold {name}"));
    let listed = info.holders.iter().any(|holder| holder.owner == owner);
    let all_listed = info.holding <= info.holders.len() as u64;
    // Who only waits is not to lose its place.
    let waits = || info.queue.iter().any(|waiter| waiter.owner == owner);
    if !listed && (all_listed || waits()) {
        return Err(does_not_hold());
    }
    let released = lockkeeper.release_for(key, &owner).await?;
    Ok(match released {
        Released::Yes => Exit::with_message(0, format!("released {name}, which {who} held")),
        Released::Lost(_) if !listed => does_not_hold(),
        Released::Lost(why) => {
            Exit::with_message(CONFLICT, format!("{who} has lost {name} meanwhile: {why}"))
        }
    })
}
