//! `lockkeeper release`: in the name of a holder that is known to be dead.

use lockkeeper::{Lockkeeper, MAX_OWNER, Released, printable};

use crate::exit::{CONFLICT, Exit, UNAVAILABLE};
use crate::info;

pub async fn run(lockkeeper: Lockkeeper, key: &[u8]) -> Result<Exit, Exit> {
    let name = printable(key);
    let info = info::ask(&lockkeeper, key).await?;
    let Some(owner) = info.and_then(|info| info.owner) else {
        return Ok(Exit::with_message(0, format!("nobody holds {name}")));
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
    let released = lockkeeper.release_for(key, &owner).await?;
    let owner = printable(&owner);
    Ok(match released {
        Released::Yes => Exit::with_message(0, format!("released {name}, which {owner} held")),
        Released::Lost(why) => Exit::with_message(
            CONFLICT,
            format!("{owner} has lost {name} meanwhile: {why}"),
        ),
    })
}
