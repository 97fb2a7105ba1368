//! The door: a lockkeeper is opened once, and asked for locks.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::sync::{mpsc, oneshot};
use uuid::Uuid;

use crate::asking::{Request, Wait};
use crate::blocking;
use crate::error::Error;
use crate::held::{Held, Released, received};
use crate::lease::{Lost, MAX_TTL, MIN_TTL, Terms};
use crate::network::Network;
use crate::place::{Credentials, Place};
use crate::watchdog::{self, Message};
use crate::wire::{self, Info};

/// The longest owner that the module takes, in bytes.
const MAX_OWNER: usize = 512;

/// A colon and a UUID as text.
const OWNER_SUFFIX: usize = 37;

/// Where locks are asked for: one server, and the watchdog thread that does all talking to it.
/// Cloning gives another way to the same watchdog, whose thread ends with the last clone and handle.
#[derive(Clone)]
pub struct Lockkeeper {
    watchdog: mpsc::UnboundedSender<Message>,
    label: Arc<str>,
    pid: u32,
}

/// How a [`Lockkeeper`] is opened when a URL alone does not say it.
#[must_use = "nothing happens before `open`"]
pub struct Builder {
    url: String,
    label: Option<String>,
    credentials: Credentials,
}

impl Builder {
    /// The first part of every owner, and the name of our connections in CLIENT LIST after
    /// `lockkeeper:`. By default `host:pid`.
    pub fn label(mut self, label: impl Into<String>) -> Builder {
        self.label = Some(label.into());
        self
    }

    /// The password, if the URL is to go without it.
    pub fn password(mut self, password: impl Into<String>) -> Builder {
        self.credentials.password = Some(password.into());
        self
    }

    /// For `rediss://`: trust only servers with a certificate of this authority (PEM), instead of
    /// those that the system trusts.
    #[cfg(feature = "tls")]
    pub fn root_ca(mut self, pem: impl Into<Vec<u8>>) -> Builder {
        self.tls().root_cert = Some(pem.into());
        self
    }

    /// For `rediss://`: the certificate and key (PEM) that prove to the server who we are.
    #[cfg(feature = "tls")]
    pub fn client_certificate(
        mut self,
        certificate: impl Into<Vec<u8>>,
        key: impl Into<Vec<u8>>,
    ) -> Builder {
        let (client_cert, client_key) = (certificate.into(), key.into());
        self.tls().client_tls = Some(redis::ClientTlsConfig {
            client_cert,
            client_key,
        });
        self
    }

    #[cfg(feature = "tls")]
    fn tls(&mut self) -> &mut redis::TlsCertificates {
        let nothing = || redis::TlsCertificates {
            client_tls: None,
            root_cert: None,
        };
        self.credentials.tls.get_or_insert_with(nothing)
    }

    /// Starts the watchdog. Connects to nothing: the first question does.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the URL, a certificate or the label cannot be used.
    pub fn open(self) -> Result<Lockkeeper, Error> {
        let label = self.label.unwrap_or_else(default_label);
        check_label(&label)?;
        let place = Place::parse(&self.url, &self.credentials)?;
        Ok(Lockkeeper {
            watchdog: watchdog::start(Network::new(place, label.clone()))?,
            label: Arc::from(label),
            pid: std::process::id(),
        })
    }
}

fn default_label() -> String {
    #[cfg(unix)]
    let uname = rustix::system::uname();
    #[cfg(unix)]
    let host = uname.nodename().to_string_lossy();
    #[cfg(not(unix))]
    let host = std::env::var("COMPUTERNAME").unwrap_or_else(|_| "localhost".to_owned());
    format!("{host}:{}", std::process::id())
}

fn check_label(label: &str) -> Result<(), Error> {
    let longest = MAX_OWNER - OWNER_SUFFIX;
    if label.len() > longest {
        let length = label.len();
        return Err(Error::Invalid(format!(
            "the label must not be longer than {longest} bytes, got {length}"
        )));
    }
    Ok(())
}

impl Lockkeeper {
    /// Opens the server at `url`, without connecting to it yet. See [`Builder::open`] for errors.
    ///
    /// | URL | reaches |
    /// |---|---|
    /// | `redis://[user:password@]host[:port][/db]` | one server |
    /// | `rediss://…` | the same over TLS, with the feature `tls` |
    /// | `unix:///path/to/socket` | the same over a unix socket |
    /// | `redis+sentinel://[user:password@]host[:26379],host…/master[/db]` | the master of that name, found again after a failover; with the feature `sentinel` |
    /// | `redis+cluster://[user:password@]host[:port],host…` | a cluster, with the feature `cluster` |
    ///
    /// The last two also begin with `rediss+` for TLS.
    pub fn open(url: impl Into<String>) -> Result<Lockkeeper, Error> {
        Lockkeeper::builder(url).open()
    }

    /// Opens a server that needs more than a URL.
    pub fn builder(url: impl Into<String>) -> Builder {
        Builder {
            url: url.into(),
            label: None,
            credentials: Credentials::default(),
        }
    }

    /// Begins to ask for the lock `key`; await the [`Acquire`].
    pub fn acquire(&self, key: impl Into<Vec<u8>>) -> Acquire {
        Acquire {
            lockkeeper: self.clone(),
            key: key.into(),
            label: self.label.to_string(),
            terms: Terms {
                ttl: Acquire::DEFAULT_TTL,
                max_hold: None,
            },
            wait: Wait::No,
            min_replicas: 0,
        }
    }

    /// Who holds the lock and who waits for it; none if nobody does either.
    pub async fn info(&self, key: impl Into<Vec<u8>>) -> Result<Option<Info>, Error> {
        let key = key.into();
        let command = wire::info(&key);
        Info::read(self.ask(key, command).await?)
    }

    /// Releases the lock in the name of `owner`, whoever that is, and gives up that owner's place
    /// in the queue. Harms nobody else: if another holds the lock by now, the answer is
    /// [`Lost::Taken`].
    pub async fn release_for(
        &self,
        key: impl Into<Vec<u8>>,
        owner: impl AsRef<[u8]>,
    ) -> Result<Released, Error> {
        let key = key.into();
        let command = wire::release(&key, owner.as_ref());
        let refused = wire::refused(self.ask(key, command).await?)?;
        Ok(refused.map_or(Released::Yes, Released::Lost))
    }

    /// Resolves when all that was dropped or given up so far has been released, or has ended by
    /// itself. For a program that is about to end, which would take the watchdog with it.
    pub async fn settled(&self) {
        // A watchdog that is gone, or belongs to our parent, has nothing left to do for us.
        let _ = self.send(Message::Settled).await;
    }

    async fn ask(&self, key: Vec<u8>, command: Cmd) -> Result<Value, Error> {
        received(self.send(|reply| Message::Ask(key, command, reply)).await)
    }

    fn send<T>(
        &self,
        message: impl FnOnce(oneshot::Sender<Result<T, Error>>) -> Message,
    ) -> oneshot::Receiver<Result<T, Error>> {
        let (reply, answer) = oneshot::channel();
        if self.pid == std::process::id() {
            let _ = self.watchdog.send(message(reply));
        } else {
            let _ = reply.send(Err(Error::Forked));
        }
        answer
    }
}

impl std::fmt::Debug for Lockkeeper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lockkeeper")
            .field("label", &self.label)
            .finish_non_exhaustive()
    }
}

/// A lock that is being asked for: set what is to be different, then await it, or call
/// [`blocking`](Acquire::blocking).
///
/// `Ok(None)` says that the lock is busy. Dropping the future at any point leaves neither a lock
/// nor a place in the queue behind, or, while the server cannot be reached, none that outlives
/// one ttl.
///
/// # Errors
/// - [`Error::Invalid`] if the ttl or the label cannot be used.
/// - [`Error::Unreachable`] if nobody answered in time; at once if the server was never reached.
/// - [`Error::Refused`] if the server does not want to: no permission, out of memory, too many
///   waiters, a module that is not loaded.
/// - [`Error::Forked`] in a fork of the process that opened the lockkeeper.
#[must_use = "nothing is asked before it is awaited"]
#[derive(Clone, Debug)]
pub struct Acquire {
    lockkeeper: Lockkeeper,
    key: Vec<u8>,
    label: String,
    terms: Terms,
    wait: Wait,
    min_replicas: u32,
}

impl Acquire {
    /// Long enough to ride out a failover or a restart, short enough to wait for after a crash.
    const DEFAULT_TTL: Duration = Duration::from_secs(30);

    /// How long the lock outlives a holder that is gone, 100 ms to 2^53 - 1 ms, by default 30 s. A
    /// living holder renews every third of it, and has two thirds of it to get through to a server
    /// that does not answer. A holder that is killed while it is being granted the lock also keeps
    /// it that long.
    pub fn ttl(mut self, ttl: Duration) -> Acquire {
        self.terms.ttl = ttl;
        self
    }

    /// Waits in the server's queue, first come, first served, and returns within `wait` + 100 ms
    /// whatever the server does. By default there is one try, which ends within 2 s or a third of
    /// the ttl, whichever is longer.
    pub fn wait(mut self, wait: Duration) -> Acquire {
        self.wait = Wait::For(wait);
        self
    }

    /// Waits without bound.
    pub fn wait_forever(mut self) -> Acquire {
        self.wait = Wait::ForEver;
        self
    }

    /// The first part of the owner of this lock, instead of the lockkeeper's label.
    pub fn label(mut self, label: impl Into<String>) -> Acquire {
        self.label = label.into();
        self
    }

    /// Ends renewal so long after the grant: then the lock counts as lost, with
    /// [`Lost::MaxHold`], whatever became of the holder. By default it is renewed for ever.
    pub fn max_hold(mut self, max_hold: Duration) -> Acquire {
        self.terms.max_hold = Some(max_hold);
        self
    }

    /// Counts only what so many replicas acknowledged, so that a failover to one of them keeps the
    /// lock. A lock for which the replicas do not answer in time is lost, even if the master has
    /// renewed it; the grant itself is refused with `NOREPLICAS`. Needs
    /// the right to call WAIT.
    pub fn min_replicas(mut self, min_replicas: u32) -> Acquire {
        self.min_replicas = min_replicas;
        self
    }

    /// Asks, and blocks this thread until the answer is there.
    ///
    /// # Panics
    /// Inside an asynchronous task, where it would block all others: await it there.
    pub fn blocking(self) -> Result<Option<blocking::Held>, Error> {
        Ok(received(self.send()?.blocking_recv())?.map(blocking::Held::from))
    }

    /// Runs `body` under the lock, and ends it, at its next await, when the lock is lost.
    ///
    /// # Errors
    /// The body's error wins over that of the release.
    pub async fn run<T, E: From<Error>>(
        self,
        body: impl AsyncFnOnce(&Held) -> Result<T, E>,
    ) -> Result<Ran<T>, E> {
        let Some(held) = self.await? else {
            return Ok(Ran::Busy);
        };
        let lost = held.lost();
        let done = tokio::select! {
            biased;
            lost = lost => return Ok(Ran::Lost(lost)),
            done = body(&held) => done,
        };
        let released = held.release().await;
        let done = done?;
        Ok(match released? {
            Released::Yes => Ran::Done(done),
            Released::Lost(lost) => Ran::Lost(lost),
        })
    }

    fn send(self) -> Result<oneshot::Receiver<Result<Option<Held>, Error>>, Error> {
        check_label(&self.label)?;
        let ttl = self.terms.ttl;
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
        let request = Box::new(Request {
            owner: format!("{}:{}", self.label, Uuid::new_v4()),
            key: self.key,
            label: self.label,
            terms: self.terms,
            wait: self.wait,
            min_replicas: self.min_replicas,
        });
        Ok(self
            .lockkeeper
            .send(|reply| Message::Acquire(request, self.lockkeeper.watchdog.clone(), reply)))
    }
}

impl IntoFuture for Acquire {
    type Output = Result<Option<Held>, Error>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { received(self.send()?.await) })
    }
}

/// What became of a body that was to run under a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the body may not have run, or not under the lock"]
pub enum Ran<T> {
    /// It ran, and the lock was held to the end.
    Done(T),
    /// The lock was busy: it did not run.
    Busy,
    /// The lock was lost while it ran.
    Lost(Lost),
}
