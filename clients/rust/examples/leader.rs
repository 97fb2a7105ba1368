//! One leader among many: start it on several machines, and one of them leads. When that one is
//! ended with Ctrl-C, the next leads at once; when it dies, after the ttl.
//!
//! ```sh
//! cargo run --example leader
//! ```

use std::env;
use std::time::Duration;

use lockkeeper::{Acquired, Error, Held, Lockkeeper};
use tokio::signal;
use tokio::time::{interval, sleep};

/// What a leader does, until it is not one any more.
async fn lead(leadership: &Held) {
    let mut ticks = interval(Duration::from_secs(1));
    for round in 1.. {
        ticks.tick().await;
        // Whoever gets orders from a smaller fence than before knows that they are of yesterday.
        println!("fence {}, round {round}", leadership.fence());
    }
}

async fn take_part(lockkeeper: &Lockkeeper) -> Result<(), Error> {
    loop {
        let candidacy = lockkeeper.acquire("leader").ttl(Duration::from_secs(10));
        match candidacy.wait_forever().await {
            Ok(Acquired::Yes(leadership)) => tokio::select! {
                () = lead(&leadership) => {}
                why = leadership.lost() => eprintln!("no longer the leader: {why}"),
            },
            // Somebody unblocked us.
            Ok(Acquired::Busy) => {}
            Err(Error::Unreachable(why)) => {
                eprintln!("{why}");
                sleep(Duration::from_secs(1)).await;
            }
            Err(error) => return Err(error),
        }
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1/".to_owned());
    let lockkeeper = Lockkeeper::open(url)?;
    let _guard = lockkeeper.close_on_drop(Duration::from_secs(5));
    tokio::select! {
        ended = take_part(&lockkeeper) => ended?,
        pressed = signal::ctrl_c() => pressed?,
    }
    Ok(())
}
