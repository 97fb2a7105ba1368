//! How a lockkeeper is opened: the server, and what the URL alone does not say.

use crate::clock;
use crate::error::Error;
use crate::limits::check_label;
use crate::lockkeeper::Lockkeeper;
use crate::network::Network;
use crate::topology::{Credentials, Topology};
use crate::watchdog;

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
    /// The last two also begin with `rediss+` for TLS. A user without a password sends an empty one.
    /// In a user and a password `/`, `?`, `#`, `@` and `%` are written as `%2F`, `%3F`, `%23`, `%40`
    /// and `%25`.
    ///
    /// | behind a `?` | says |
    /// |---|---|
    /// | `db=3` | the database, as `/3` does |
    /// | `protocol=resp3` | which protocol to speak: `resp2` (the default) or `resp3` |
    /// | `user=…`, `pass=…` | who we are, for `unix://` only |
    /// | `sentinel_user=…`, `sentinel_password=…` | who we are to the sentinels |
    ///
    /// Any other is refused. `#insecure` at the end of `rediss://…` takes any certificate.
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

    /// For `rediss://`: take whatever certificate the server shows, as `#insecure` at the end of the
    /// URL does. Whoever stands in between can then read and change everything.
    #[cfg(feature = "tls")]
    pub fn insecure(mut self) -> Builder {
        self.credentials.insecure = true;
        self
    }

    /// For `redis+sentinel://`: the password of the sentinels, if they have one and the URL is to go
    /// without it. That of the servers is not sent to them.
    #[cfg(feature = "sentinel")]
    pub fn sentinel_password(mut self, password: impl Into<String>) -> Builder {
        self.credentials.sentinel_password = Some(password.into());
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

    /// Starts the watchdog. Connects to nothing: the first request does.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the URL, a certificate or the label cannot be used,
    /// [`Error::NoWatchdog`] if the system has no thread left.
    pub fn open(self) -> Result<Lockkeeper, Error> {
        let label = self.label.unwrap_or_else(default_label);
        check_label(&label)?;
        let topology = Topology::parse(&self.url, &self.credentials)?;
        let network = Network::new(topology, label.clone());
        let watchdog = watchdog::start(network, clock::now)?;
        Ok(Lockkeeper::new(watchdog, &label))
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
