//! The master that Sentinel names. The sentinels are asked in turn, and what is wrong is reported with
//! the address of the one it is wrong with.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::{Client, Value};
use tokio::time::timeout;

use super::diagnosis::shown;
use super::{Credentials, url::Url};
use crate::error::Error;
use crate::printable::printable;

/// A sentinel, or the master that it names, that has not replied by then is passed over. Four of
/// them fit into the time for one connection.
const REPLY_WITHIN: Duration = Duration::from_millis(1200);

pub(crate) struct Sentinel {
    /// The first is the one that replied last.
    sentinels: Mutex<Vec<Client>>,
    master: String,
    /// Everything about the master but its address.
    url: Url,
    credentials: Credentials,
    /// Where the master was when a sentinel was last asked.
    last_known: Mutex<Option<String>>,
}

impl Sentinel {
    pub(super) fn new(
        url: Url,
        master: String,
        credentials: Credentials,
    ) -> Result<Sentinel, Error> {
        let settings = url.sentinel_login.settings().set_protocol(url.protocol);
        let client = |address| {
            let info = url.info(address)?.set_redis_settings(settings.clone());
            super::client(info, &credentials)
        };
        let sentinels = url.addresses.iter().map(client);
        Ok(Sentinel {
            sentinels: Mutex::new(sentinels.collect::<Result<_, _>>()?),
            master,
            url,
            credentials,
            last_known: Mutex::default(),
        })
    }

    /// Where the master was, for error messages.
    pub(super) fn last_known(&self) -> String {
        let last_known = lock(&self.last_known).clone();
        last_known.unwrap_or_else(|| format!("the master '{}'", printable(self.master.as_bytes())))
    }

    /// The present master, which confirms that it is one. A sentinel may not have noticed a
    /// failover yet: then the next one is asked.
    pub(super) async fn client(&self) -> Result<Client, Error> {
        let sentinels = lock(&self.sentinels).clone();
        let (mut refused, mut unreachable) = (Vec::new(), Vec::new());
        for (index, sentinel) in sentinels.iter().enumerate() {
            match self.ask(sentinel).await {
                Ok(master) => {
                    // Should another have changed the order meanwhile: any order will do.
                    lock(&self.sentinels)[..=index].rotate_right(1);
                    return Ok(master);
                }
                Err(Error::Refused(why)) => refused.push(why),
                Err(Error::Unreachable(why)) => unreachable.push(why),
                Err(error) => return Err(error),
            }
        }
        if unreachable.is_empty() {
            return Err(Error::Refused(refused.join("; ")));
        }
        unreachable.extend(refused);
        Err(Error::Unreachable(unreachable.join("; ")))
    }

    async fn ask(&self, sentinel: &Client) -> Result<Client, Error> {
        let mut ask = redis::cmd("SENTINEL");
        ask.arg("GET-MASTER-ADDR-BY-NAME").arg(&self.master);
        let reply = request("the sentinel", sentinel, &ask).await?;
        let at = shown(sentinel.get_connection_info().addr());
        let Some((host, port)) = address(&reply) else {
            let name = printable(self.master.as_bytes());
            let why = format!("the sentinel {at} knows no master '{name}'");
            return Err(Error::Unreachable(why));
        };
        let master = self.master_at(host, port)?;
        let role = request("the master", &master, &redis::cmd("ROLE")).await?;
        let is_master = matches!(&role, Value::Array(fields)
            if fields.first().and_then(text).as_deref() == Some("master"));
        let master_at = shown(master.get_connection_info().addr());
        if !is_master {
            let why = format!("{master_at}, which the sentinel {at} names, is not the master");
            return Err(Error::Unreachable(why));
        }
        *lock(&self.last_known) = Some(master_at);
        Ok(master)
    }

    fn master_at(&self, host: String, port: u16) -> Result<Client, Error> {
        let address = super::with_host(&self.url.addresses[0], host, port);
        Ok(super::client(self.url.info(&address)?, &self.credentials)?)
    }
}

/// What is wrong is reported with `who`, which is at the client's address, and the code word first.
async fn request(who: &str, client: &Client, command: &redis::Cmd) -> Result<Value, Error> {
    let ask = async {
        let mut connection = super::connect(client).await?;
        match connection.send(command).await? {
            Value::ServerError(error) => Err(Error::from(&error)),
            value => Ok(value),
        }
    };
    let at = shown(client.get_connection_info().addr());
    let reply = timeout(REPLY_WITHIN, Box::pin(ask)).await;
    let reply = reply.unwrap_or_else(|_| Err(Error::no_answer()));
    reply.map_err(|error| match error {
        Error::Refused(why) if why.starts_with("ERR unknown command 'SENTINEL'") => {
            Error::Refused(format!("ERR {at} is no sentinel"))
        }
        Error::Refused(why) => Error::Refused(format!("{why} (says {who} {at})")),
        Error::Unreachable(why) if why.starts_with(&at) => {
            Error::Unreachable(format!("{who} {why}"))
        }
        Error::Unreachable(why) => Error::Unreachable(format!("{who} {at}: {why}")),
        error => error,
    })
}

fn address(reply: &Value) -> Option<(String, u16)> {
    match reply.as_sequence()? {
        [host, port] => Some((text(host)?, text(port)?.parse().ok()?)),
        _ => None,
    }
}

fn text(value: &Value) -> Option<String> {
    match value {
        Value::BulkString(bytes) => String::from_utf8(bytes.clone()).ok(),
        Value::SimpleString(text) => Some(text.clone()),
        _ => None,
    }
}

/// Nothing panics while it holds one of these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
