//! Clients that do on purpose what a lock manager must not do: the checker has to find them out.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::Value;

use super::client::{Client, Place, Raw, SILENCE, Said, Wish};

/// Releases whatever is there, whoever holds it.
pub struct ReleasesWhatItFinds(pub Raw);

impl Client for ReleasesWhatItFinds {
    fn acquire(&mut self, wish: &Wish, patience: Duration) -> Said {
        self.0.acquire(wish, patience)
    }

    fn renew(&mut self, wish: &Wish) -> Said {
        self.0.renew(wish)
    }

    fn release(&mut self, wish: &Wish) -> Said {
        match self.0.ask(redis::cmd("DEL").arg(&wish.key), SILENCE) {
            Ok(Value::Int(1)) => Said::Yes,
            Ok(_) => Said::No,
            Err(error) => Said::Failed(error.to_string()),
        }
    }
}

/// Takes its fence from a counter in Redis, which a failover turns back.
pub struct CountsInRedis(pub Raw);

impl Client for CountsInRedis {
    fn acquire(&mut self, wish: &Wish, patience: Duration) -> Said {
        let said = self.0.acquire(wish, patience);
        let Said::Fence(_) = said else { return said };
        let counter = format!("{}:counter", wish.key);
        match self.0.ask(redis::cmd("INCR").arg(counter), SILENCE) {
            Ok(Value::Int(fence)) => Said::Fence(fence.try_into().unwrap()),
            other => Said::Failed(format!("no fence: {other:?}")),
        }
    }

    fn renew(&mut self, wish: &Wish) -> Said {
        self.0.renew(wish)
    }

    fn release(&mut self, wish: &Wish) -> Said {
        self.0.release(wish)
    }
}

/// The grants that somebody asked for once more, by key.
#[derive(Clone, Default)]
pub struct InDoubt(Arc<Mutex<HashMap<String, u64>>>);

/// Gives a grant in doubt to the next who asks, though its owner has asked again and was told yes.
pub struct GivesTwice {
    raw: Raw,
    in_doubt: InDoubt,
    asked: u64,
}

impl GivesTwice {
    pub fn at(place: Place, in_doubt: InDoubt) -> GivesTwice {
        let raw = Raw::at(place);
        GivesTwice {
            raw,
            in_doubt,
            asked: 0,
        }
    }
}

impl Client for GivesTwice {
    fn acquire(&mut self, wish: &Wish, patience: Duration) -> Said {
        if let Some(fence) = self.in_doubt.0.lock().unwrap().remove(&wish.key) {
            return Said::Fence(fence);
        }
        let said = self.raw.acquire(wish, patience);
        self.asked += 1;
        if let Said::Fence(fence) = said
            && self.asked.is_multiple_of(10)
        {
            let mut in_doubt = self.in_doubt.0.lock().unwrap();
            in_doubt.insert(wish.key.clone(), fence);
        }
        said
    }

    fn renew(&mut self, wish: &Wish) -> Said {
        self.raw.renew(wish)
    }

    fn release(&mut self, wish: &Wish) -> Said {
        self.raw.release(wish)
    }
}
