//! Where the server is: one address, a master that Sentinel names, or the nodes of a cluster.

use std::sync::Arc;
use std::time::Duration;

use redis::io::tcp::TcpSettings;
use redis::io::tcp::socket2::TcpKeepalive;
use redis::{Client, ConnectionInfo, IntoConnectionInfo, RedisError};

use crate::error::Error;

#[cfg(feature = "cluster")]
mod cluster;

/// What a place is reached with besides its address.
#[derive(Clone, Default)]
pub(crate) struct Credentials {
    /// Wins over the one in the URL, so that the URL can be shown.
    pub(crate) password: Option<String>,
    #[cfg(feature = "tls")]
    pub(crate) tls: Option<redis::TlsCertificates>,
}

/// One server of the place. A standalone server and the master of the moment have no name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Node(Option<Arc<str>>);

/// Sent again to another node: the key has moved there.
pub(crate) struct Redirect {
    pub(crate) node: Node,
    /// For this once, preceded by ASKING.
    pub(crate) asking: bool,
}

pub(crate) enum Place {
    One(Client),
    #[cfg(feature = "sentinel")]
    Sentinel(tokio::sync::Mutex<redis::sentinel::SentinelClient>),
    #[cfg(feature = "cluster")]
    Cluster(cluster::Cluster),
}

// Only a cluster has more than one node to tell apart.
#[cfg_attr(not(feature = "cluster"), allow(unused_variables))]
impl Place {
    pub(crate) fn parse(url: &str, credentials: &Credentials) -> Result<Place, Error> {
        match Url::split(url)? {
            Url {
                kind: Kind::One,
                nodes,
            } => {
                let info = info(&nodes.concat(), credentials)?;
                Ok(Place::One(client(info, credentials)?))
            }
            #[cfg(feature = "sentinel")]
            Url {
                kind: Kind::Sentinel { master },
                nodes,
            } => sentinel(&nodes, &master, credentials),
            #[cfg(feature = "cluster")]
            Url {
                kind: Kind::Cluster,
                nodes,
            } => {
                let nodes = nodes.iter().map(|url| info(url.as_str(), credentials));
                let nodes = nodes.collect::<Result<Vec<_>, _>>()?;
                Ok(Place::Cluster(cluster::Cluster::new(
                    nodes,
                    credentials.clone(),
                )))
            }
            #[allow(unreachable_patterns)]
            Url { kind, .. } => {
                let feature = if kind == Kind::Cluster {
                    "cluster"
                } else {
                    "sentinel"
                };
                Err(Error::Invalid(format!(
                    "this program was built without the feature '{feature}' of lockkeeper"
                )))
            }
        }
    }

    /// The node that serves the key, as far as is known.
    pub(crate) fn node_of(&self, key: &[u8]) -> Node {
        #[cfg(feature = "cluster")]
        if let Place::Cluster(cluster) = self {
            return cluster.node_of(key);
        }
        Node(None)
    }

    /// How to connect to the node now.
    pub(crate) async fn client(&self, node: &Node) -> Result<Client, RedisError> {
        match self {
            Place::One(client) => Ok(client.clone()),
            #[cfg(feature = "sentinel")]
            Place::Sentinel(sentinel) => sentinel.lock().await.async_get_client().await,
            #[cfg(feature = "cluster")]
            Place::Cluster(cluster) => cluster.client(node),
        }
    }

    /// Whether a server that takes no writes is the wrong one, and the right one can be found.
    pub(crate) fn fails_over(&self) -> bool {
        !matches!(self, Place::One(_))
    }

    /// The node does not answer: its keys may have moved to another.
    pub(crate) fn failed(&self, node: &Node) {
        #[cfg(feature = "cluster")]
        if let Place::Cluster(cluster) = self {
            cluster.failed(node);
        }
    }

    /// Where the error that `node` answered sends us, if it does. Remembers it for the slot.
    pub(crate) fn redirect(&self, node: &Node, error: &redis::ServerError) -> Option<Redirect> {
        #[cfg(feature = "cluster")]
        if let Place::Cluster(cluster) = self {
            return cluster.redirect(node, error);
        }
        None
    }

    /// Asks for the map of a cluster over a fresh connection to one of its nodes.
    pub(crate) async fn learn(&self, node: &Node, line: &mut redis::aio::MultiplexedConnection) {
        #[cfg(feature = "cluster")]
        if let Place::Cluster(cluster) = self {
            cluster.learn(node, line).await;
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    One,
    Sentinel { master: String },
    Cluster,
}

/// A URL taken apart into what kind of place it names and one plain URL per node.
struct Url {
    kind: Kind,
    nodes: Vec<String>,
}

impl Url {
    fn split(url: &str) -> Result<Url, Error> {
        let wrong = |what: &str| Error::Invalid(format!("the server's URL {what}"));
        let (scheme, rest) = url.split_once("://").ok_or_else(|| {
            wrong(
                "must look like redis://host:port, rediss://…, unix:///path, \
                   redis+sentinel://host,host/master or redis+cluster://host,host",
            )
        })?;
        let Some((scheme, many)) = scheme.split_once('+').filter(|(_, many)| *many != "unix")
        else {
            return Ok(Url {
                kind: Kind::One,
                nodes: vec![url.to_owned()],
            });
        };
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (user, hosts) = match authority.rsplit_once('@') {
            Some((user, hosts)) => (format!("{user}@"), hosts),
            None => (String::new(), authority),
        };
        let (kind, port, db) = match many {
            "sentinel" => {
                let (master, db) = path.split_once('/').unwrap_or((path, ""));
                if master.is_empty() {
                    return Err(wrong(
                        "must name the master: redis+sentinel://host,host/master",
                    ));
                }
                (
                    Kind::Sentinel {
                        master: master.to_owned(),
                    },
                    ":26379",
                    db,
                )
            }
            "cluster" => (Kind::Cluster, "", path),
            _ => return Err(wrong("can only have +sentinel or +cluster in its scheme")),
        };
        let node = |host: &str| {
            let named = host
                .rsplit_once(':')
                .is_some_and(|(_, port)| !port.ends_with(']'));
            let port = if named { "" } else { port };
            format!("{scheme}://{user}{host}{port}/{db}")
        };
        Ok(Url {
            kind,
            nodes: hosts.split(',').map(node).collect(),
        })
    }
}

fn info(url: &str, credentials: &Credentials) -> Result<ConnectionInfo, Error> {
    let info = url.into_connection_info()?;
    let mut redis = info.redis_settings().clone();
    if let Some(password) = &credentials.password {
        redis = redis.set_password(password);
    }
    Ok(info.set_redis_settings(redis).set_tcp_settings(tcp()))
}

/// A machine that vanished says nothing: without keep-alive a wait on it would never end. After
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

fn client(info: ConnectionInfo, credentials: &Credentials) -> Result<Client, RedisError> {
    #[cfg(feature = "tls")]
    if let redis::ConnectionAddr::TcpTls { .. } = info.addr() {
        // Where an application chose one already, its choice stands.
        let _ = rustls::crypto::ring::default_provider().install_default();
        if let Some(tls) = &credentials.tls {
            return Client::build_with_tls(info, tls.clone());
        }
    }
    let _ = credentials;
    Client::open(info)
}

#[cfg(feature = "sentinel")]
fn sentinel(nodes: &[String], master: &str, credentials: &Credentials) -> Result<Place, Error> {
    use redis::sentinel::{SentinelClientBuilder, SentinelServerType};
    let nodes = nodes.iter().map(|url| info(url, credentials));
    let nodes = nodes.collect::<Result<Vec<_>, _>>()?;
    let addresses = nodes.iter().map(|info| info.addr().clone());
    let mut builder = SentinelClientBuilder::new(addresses, master, SentinelServerType::Master)?
        .set_client_to_redis_tcp_settings(tcp())
        .set_client_to_sentinel_tcp_settings(tcp());
    if let Some(info) = nodes.first() {
        let redis = info.redis_settings();
        builder = builder.set_client_to_redis_db(redis.db());
        if let Some(user) = redis.username() {
            builder = builder.set_client_to_redis_username(user);
        }
        if let Some(password) = redis.password() {
            builder = builder.set_client_to_redis_password(password);
        }
        #[cfg(feature = "tls")]
        if let redis::ConnectionAddr::TcpTls { insecure, .. } = info.addr() {
            let _ = rustls::crypto::ring::default_provider().install_default();
            let mode = if *insecure {
                redis::TlsMode::Insecure
            } else {
                redis::TlsMode::Secure
            };
            builder = builder.set_client_to_redis_tls_mode(mode);
            if let Some(tls) = &credentials.tls {
                builder = builder
                    .set_client_to_redis_certificates(tls.clone())
                    .set_client_to_sentinel_certificates(tls.clone());
            }
        }
    }
    Ok(Place::Sentinel(tokio::sync::Mutex::new(builder.build()?)))
}
