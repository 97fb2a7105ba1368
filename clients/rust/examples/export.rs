//! Copies a file, without async: only one machine at a time writes the same copy.
//!
//! ```sh
//! cargo run --example export -- FROM TO
//! ```

use std::time::Duration;
use std::{env, fs};

use lockkeeper::{Acquired, Lockkeeper, Released};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1/".to_owned());
    let mut files = env::args().skip(1);
    let (Some(from), Some(to)) = (files.next(), files.next()) else {
        return Err("usage: export FROM TO".into());
    };
    let lockkeeper = Lockkeeper::open(url)?;
    // Made first, so dropped last: by then the lock below has been given up, also by a `?`.
    let _guard = lockkeeper.close_on_drop(Duration::from_secs(5));

    let asked = lockkeeper.acquire(format!("export:{to}"));
    let Acquired::Yes(held) = asked.wait(Duration::from_secs(60)).blocking()? else {
        return Err("somebody else writes it".into());
    };
    // What is renamed is whole, whatever stops us meanwhile.
    let draft = format!("{to}.{}", held.fence());
    let bytes = fs::copy(from, &draft)?;
    if let Some(why) = held.loss() {
        fs::remove_file(&draft)?;
        return Err(why.to_string().into());
    }
    fs::rename(draft, to)?;
    match held.blocking_release()? {
        Released::Yes => println!("{bytes} bytes"),
        Released::Lost(why) => println!("{bytes} bytes, perhaps over those of another: {why}"),
    }
    Ok(())
}
