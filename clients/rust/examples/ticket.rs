//! Draws the next ticket number from a file, of which any number of machines may draw at once:
//!
//! ```sh
//! cargo run --example ticket -- tickets.txt
//! ```
//!
//! Without the lock two that read the same number would both write the same next one.

use std::path::Path;
use std::time::Duration;
use std::{env, io};

use lockkeeper::{Lockkeeper, Ran};
use tokio::fs;

async fn draw(file: &Path) -> io::Result<u64> {
    let last = match fs::read_to_string(file).await {
        Ok(number) => number.trim().parse().map_err(io::Error::other)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
        Err(error) => return Err(error),
    };
    let next: u64 = last + 1;
    fs::write(file, next.to_string()).await?;
    Ok(next)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1/".to_owned());
    let file = env::args_os().nth(1).ok_or("usage: ticket FILE")?;
    let file = Path::new(&file);

    let lockkeeper = Lockkeeper::open(url)?;
    let drawing = lockkeeper.acquire("tickets").wait(Duration::from_secs(60));
    match drawing.run(async |_| draw(file).await).await? {
        Ran::Done(number) => println!("{}", number?),
        Ran::Busy => return Err("too many want a ticket".into()),
        Ran::Lost { why, .. } => return Err(format!("perhaps another has the same: {why}").into()),
    }
    Ok(())
}
