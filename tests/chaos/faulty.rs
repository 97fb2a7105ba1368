//! Clients with a planted fault, which the checker must find.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::Value;

use super::client::{Client, Endpoint, Outcome, Raw, Request, SILENCE};
use super::run::SHARED;

/// Releases whatever is there, whoever holds it.
pub struct ReleasesWhatItFinds(pub Raw);

impl Client for ReleasesWhatItFinds {
    fn acquire(&mut self, request: &Request, patience: Duration) -> Outcome {
        self.0.acquire(request, patience)
    }

    fn renew(&mut self, request: &Request) -> Outcome {
        self.0.renew(request)
    }

    fn release(&mut self, request: &Request) -> Outcome {
        match self.0.ask(redis::cmd("DEL").arg(&request.key), SILENCE) {
            Ok(Value::Int(1)) => Outcome::Yes,
            Ok(_) => Outcome::No,
            Err(error) => Outcome::Failed(error.to_string()),
        }
    }
}

/// Lets one more hold the lock than it is to.
pub struct AllowsOneTooMany(pub Raw);

impl Client for AllowsOneTooMany {
    fn acquire(&mut self, request: &Request, patience: Duration) -> Outcome {
        let limit = SHARED.min(request.limit + 1);
        let request = &Request {
            limit,
            ..request.clone()
        };
        self.0.acquire(request, patience)
    }

    fn renew(&mut self, request: &Request) -> Outcome {
        self.0.renew(request)
    }

    fn release(&mut self, request: &Request) -> Outcome {
        self.0.release(request)
    }
}

/// Takes its fence from a counter in Redis, which a failover turns back.
pub struct CountsInRedis(pub Raw);

impl Client for CountsInRedis {
    fn acquire(&mut self, request: &Request, patience: Duration) -> Outcome {
        let outcome = self.0.acquire(request, patience);
        let Outcome::Fence(_) = outcome else {
            return outcome;
        };
        let counter = format!("{}:counter", request.key);
        match self.0.ask(redis::cmd("INCR").arg(counter), SILENCE) {
            Ok(Value::Int(fence)) => Outcome::Fence(fence.try_into().unwrap()),
            other => Outcome::Failed(format!("no fence: {other:?}")),
        }
    }

    fn renew(&mut self, request: &Request) -> Outcome {
        self.0.renew(request)
    }

    fn release(&mut self, request: &Request) -> Outcome {
        self.0.release(request)
    }
}

/// The grants that somebody asked for once more, by key.
#[derive(Clone, Default)]
pub struct Unconfirmed(Arc<Mutex<HashMap<String, u64>>>);

/// Gives an unconfirmed grant to the next who asks, though its owner has asked again and was granted it.
pub struct GivesTwice {
    raw: Raw,
    unconfirmed: Unconfirmed,
    asked: u64,
}

impl GivesTwice {
    pub fn at(endpoint: Endpoint, unconfirmed: Unconfirmed) -> GivesTwice {
        let raw = Raw::at(endpoint);
        GivesTwice {
            raw,
            unconfirmed,
            asked: 0,
        }
    }
}

impl Client for GivesTwice {
    fn acquire(&mut self, request: &Request, patience: Duration) -> Outcome {
        if let Some(fence) = self.unconfirmed.0.lock().unwrap().remove(&request.key) {
            return Outcome::Fence(fence);
        }
        let outcome = self.raw.acquire(request, patience);
        self.asked += 1;
        if let Outcome::Fence(fence) = outcome
            && self.asked.is_multiple_of(10)
        {
            let mut unconfirmed = self.unconfirmed.0.lock().unwrap();
            unconfirmed.insert(request.key.clone(), fence);
        }
        outcome
    }

    fn renew(&mut self, request: &Request) -> Outcome {
        self.raw.renew(request)
    }

    fn release(&mut self, request: &Request) -> Outcome {
        self.raw.release(request)
    }
}
