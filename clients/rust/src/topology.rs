//! Where the server is: one address, a master that Sentinel names, or the nodes of a cluster.

use std::sync::Arc;
use std::time::Duration;

use redis::io::tcp::TcpSettings;
use redis::io::tcp::socket2::TcpKeepalive;
use redis::{Client, ConnectionAddr, ConnectionInfo, RedisError};

use crate::connection::Connection;
use crate::error::Error;
#[cfg(feature = "cluster")]
use crate::printable::printable;
use url::{Kind, Url};

#[cfg(feature = "cluster")]
mod cluster;
mod diagnosis;
#[cfg(feature = "sentinel")]
mod sentinel;
mod url;

/// What a server is reached with besides its address.
#[derive(Clone, Default)]
pub(crate) struct Credentials {
    /// Wins over the one in the URL, so that the URL can be shown.
    pub(crate) password: Option<String>,
    /// The same for the sentinels, which may have one of their own.
    #[cfg(feature = "sentinel")]
    pub(crate) sentinel_password: Option<String>,
    #[cfg(feature = "tls")]
    pub(crate) tls: Option<redis::TlsCertificates>,
    /// Take any certificate of the server.
    #[cfg(feature = "tls")]
    pub(crate) insecure: bool,
}

/// One server. A standalone server and the master of the moment have no name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Node(Option<Arc<str>>);

#[cfg(test)]
impl Node {
    pub(crate) fn named(name: &str) -> Node {
        Node(Some(Arc::from(name)))
    }
}

/// Sent again to another node: the key has moved there.
pub(crate) struct Redirect {
    pub(crate) node: Node,
    /// For this once, preceded by ASKING.
    pub(crate) asking: bool,
}

pub(crate) enum Topology {
    One(Client),
    #[cfg(feature = "sentinel")]
    Sentinel(sentinel::Sentinel),
    #[cfg(feature = "cluster")]
    Cluster(cluster::Cluster),
}

// Only a cluster has more than one node to tell apart.
#[cfg_attr(not(feature = "cluster"), allow(unused_variables))]
impl Topology {
    pub(crate) fn parse(url: &str, credentials: &Credentials) -> Result<Topology, Error> {
        let mut url = Url::parse(url)?;
        if let Some(password) = &credentials.password {
            url.login.password = Some(password.clone());
        }
        check_tls(&mut url, credentials)?;
        match url.kind.clone() {
            Kind::One => {
                let info = url.info(&url.addresses[0])?;
                Ok(Topology::One(client(info, credentials)?))
            }
            #[cfg(feature = "sentinel")]
            Kind::Sentinel { master } => {
                if let Some(password) = &credentials.sentinel_password {
                    url.sentinel_login.password = Some(password.clone());
                }
                let sentinel = sentinel::Sentinel::new(url, master, credentials.clone())?;
                Ok(Topology::Sentinel(sentinel))
            }
            #[cfg(feature = "cluster")]
            Kind::Cluster => {
                let nodes = url.addresses.iter().map(|address| url.info(address));
                let nodes = nodes.collect::<Result<Vec<_>, _>>()?;
                Ok(Topology::Cluster(cluster::Cluster::new(
                    nodes,
                    credentials.clone(),
                )))
            }
            #[allow(unreachable_patterns)]
            Kind::Sentinel { .. } => Err(not_built_with("sentinel")),
            #[allow(unreachable_patterns)]
            Kind::Cluster => Err(not_built_with("cluster")),
        }
    }

    /// The node that serves the key, as far as is known.
    pub(crate) fn node_of(&self, key: &[u8]) -> Node {
        #[cfg(feature = "cluster")]
        if let Topology::Cluster(cluster) = self {
            return cluster.node_of(key);
        }
        Node(None)
    }

    /// How to connect to the node now.
    pub(crate) async fn client(&self, node: &Node) -> Result<Client, Error> {
        match self {
            Topology::One(client) => Ok(client.clone()),
            #[cfg(feature = "sentinel")]
            Topology::Sentinel(sentinel) => sentinel.client().await,
            #[cfg(feature = "cluster")]
            Topology::Cluster(cluster) => Ok(cluster.client(node)?),
        }
    }

    /// The error for people that the error reply of `node` means.
    pub(crate) fn refusal(&self, node: &Node, error: &redis::ServerError) -> Error {
        let unknown = error.code() == "ERR"
            && error.details().is_some_and(|it| {
                it.starts_with("unknown command 'LOCK.") || it.starts_with("unknown command `LOCK.")
            });
        if !unknown {
            return Error::from(error);
        }
        let command = error.details().unwrap_or_default();
        // What follows are the arguments, the key and the owner among them.
        let command = command.split(',').next().unwrap_or_default();
        Error::Refused(format!(
            "ERR {command}: the module lockkeeper is not loaded at {}; load it there with \
             'loadmodule /path/to/liblockkeeper.so' in redis.conf, or with MODULE LOAD",
            self.address(node)
        ))
    }

    fn address(&self, node: &Node) -> String {
        match self {
            Topology::One(client) => diagnosis::shown(client.get_connection_info().addr()),
            #[cfg(feature = "sentinel")]
            Topology::Sentinel(sentinel) => sentinel.last_known(),
            #[cfg(feature = "cluster")]
            Topology::Cluster(_) => printable(node.0.as_deref().unwrap_or_default().as_bytes()),
        }
    }

    /// Whether a server that takes no writes is the wrong one, and the right one can be found.
    pub(crate) fn fails_over(&self) -> bool {
        !matches!(self, Topology::One(_))
    }

    /// The node does not reply: its keys may have moved to another.
    pub(crate) fn failed(&self, node: &Node) {
        #[cfg(feature = "cluster")]
        if let Topology::Cluster(cluster) = self {
            cluster.failed(node);
        }
    }

    /// Where the error reply of `node` sends us, if it does. Remembers it for the slot.
    pub(crate) fn redirect(&self, node: &Node, error: &redis::ServerError) -> Option<Redirect> {
        #[cfg(feature = "cluster")]
        if let Topology::Cluster(cluster) = self {
            return cluster.redirect(node, error);
        }
        None
    }

    /// Asks for the map of a cluster over a fresh connection to one of its nodes.
    pub(crate) async fn learn(
        &self,
        node: &Node,
        connection: &mut redis::aio::MultiplexedConnection,
    ) {
        #[cfg(feature = "cluster")]
        if let Topology::Cluster(cluster) = self {
            cluster.learn(node, connection).await;
        }
    }
}

/// A machine that vanished sends nothing: without keep-alive a wait on it would never end. After
/// 10 s of silence and three unanswered probes the connection counts as broken; so it does, on Linux,
/// when a request was not received for that long, during which nothing is probed.
fn tcp() -> TcpSettings {
    let keep_alive = TcpKeepalive::new()
        .with_time(Duration::from_secs(10))
        .with_interval(Duration::from_secs(5))
        .with_retries(3);
    let settings = TcpSettings::default()
        .set_nodelay(true)
        .set_keepalive(keep_alive);
    #[cfg(target_os = "linux")]
    let settings = settings.set_user_timeout(Duration::from_secs(25));
    settings
}

/// Connects. The error has the address and the reason.
pub(crate) async fn connect(client: &Client) -> Result<Connection, Error> {
    let connected = tokio::select! {
        connected = Connection::to(client) => connected,
        // Plain Redis takes the first bytes of TLS for half a line, and waits for the other half.
        error = diagnosis::speaks_no_tls(client) => return Err(error),
    };
    match connected {
        Ok(connection) => Ok(connection),
        Err(error) => Err(diagnosis::explain(client, error).await),
    }
}

fn client(info: ConnectionInfo, credentials: &Credentials) -> Result<Client, RedisError> {
    #[cfg(feature = "tls")]
    if let ConnectionAddr::TcpTls { .. } = info.addr() {
        // Where an application chose one already, its choice stands.
        let _ = rustls::crypto::ring::default_provider().install_default();
        if let Some(tls) = &credentials.tls {
            return Client::build_with_tls(info, tls.clone());
        }
    }
    let _ = credentials;
    Client::open(info)
}

fn not_built_with(feature: &str) -> Error {
    Error::Invalid(format!(
        "this program was built without the feature '{feature}' of lockkeeper"
    ))
}

/// The address of another server that is reached in the same way.
#[cfg(any(feature = "sentinel", feature = "cluster"))]
fn with_host(pattern: &ConnectionAddr, name: String, number: u16) -> ConnectionAddr {
    let mut address = pattern.clone();
    match &mut address {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
            (*host, *port) = (name, number);
        }
        _ => {}
    }
    address
}

/// What is given for TLS is used, or refused: not silently left aside. A file that is no PEM would
/// be an authority that signed nothing, and the error would only be an unknown certificate.
#[cfg(feature = "tls")]
fn check_tls(url: &mut Url, credentials: &Credentials) -> Result<(), Error> {
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
    let invalid = |what: &str| Err(Error::Invalid(what.to_owned()));
    let is_given = credentials.tls.is_some() || credentials.insecure;
    for address in &mut url.addresses {
        match address {
            ConnectionAddr::TcpTls { insecure, .. } => *insecure |= credentials.insecure,
            _ if is_given => {
                return invalid("certificates are for TLS, the server's URL must be rediss://…");
            }
            _ => {}
        }
    }
    let Some(tls) = &credentials.tls else {
        return Ok(());
    };
    let certificates = |pem: &[u8]| {
        let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
        read.is_ok_and(|read| !read.is_empty())
    };
    if tls.root_cert.as_ref().is_some_and(|pem| !certificates(pem)) {
        return invalid(
            "the CA certificate is not PEM, it must have '-----BEGIN CERTIFICATE-----' in it",
        );
    }
    if let Some(client) = &tls.client_tls {
        if !certificates(&client.client_cert) {
            return invalid(
                "the client's certificate is not PEM, it must have '-----BEGIN CERTIFICATE-----' \
                 in it",
            );
        }
        if PrivateKeyDer::from_pem_slice(&client.client_key).is_err() {
            return invalid(
                "the client's key is not PEM, it must have '-----BEGIN PRIVATE KEY-----' in it, \
                 and no password",
            );
        }
    }
    Ok(())
}

#[cfg(not(feature = "tls"))]
fn check_tls(url: &mut Url, _: &Credentials) -> Result<(), Error> {
    let tls = |address: &ConnectionAddr| matches!(address, ConnectionAddr::TcpTls { .. });
    match url.addresses.iter().any(tls) {
        true => Err(not_built_with("tls")),
        false => Ok(()),
    }
}
