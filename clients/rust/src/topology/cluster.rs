//! Which node of a cluster serves which slot. The map is read when a connection is made, and
//! corrected by every MOVED; a node that fails is asked last from then on.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use redis::cluster_routing::Slot;
use redis::{Client, ConnectionInfo, RedisError, ServerErrorKind, Value};

use super::{Credentials, Node, Redirect};

pub(crate) struct Cluster {
    /// What every node is reached with; only the address differs.
    pattern: ConnectionInfo,
    credentials: Credentials,
    map: Mutex<Map>,
}

#[derive(Default)]
struct Map {
    /// Those that failed are at the end, so that not the same dead node is asked again.
    nodes: Vec<Arc<str>>,
    slots: HashMap<Slot, Arc<str>>,
}

impl Map {
    fn add(&mut self, node: &Arc<str>) {
        if !self.nodes.contains(node) {
            self.nodes.push(Arc::clone(node));
        }
    }
}

impl Cluster {
    /// `nodes` is not empty: splitting a URL gives at least one.
    pub(super) fn new(nodes: Vec<ConnectionInfo>, credentials: Credentials) -> Cluster {
        let mut map = Map::default();
        for info in &nodes {
            map.add(&Arc::from(info.addr().to_string()));
        }
        let pattern = nodes.into_iter().next().expect("at least one node");
        Cluster {
            pattern,
            credentials,
            map: Mutex::new(map),
        }
    }

    fn map(&self) -> MutexGuard<'_, Map> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn node_of(&self, key: &[u8]) -> Node {
        let map = self.map();
        let known = map.slots.get(&Slot::for_key(key));
        Node(Some(Arc::clone(known.unwrap_or(&map.nodes[0]))))
    }

    pub(super) fn client(&self, node: &Node) -> Result<Client, RedisError> {
        let address = node.0.as_deref().unwrap_or_default();
        let (name, number) = address.rsplit_once(':').unwrap_or((address, ""));
        let name = name
            .trim_start_matches('[')
            .trim_end_matches(']')
            .to_owned();
        let number = number.parse().unwrap_or(6379);
        let address = super::with_host(self.pattern.addr(), name, number);
        super::client(self.pattern.clone().set_addr(address), &self.credentials)
    }

    pub(super) fn failed(&self, node: &Node) {
        let mut map = self.map();
        let is_it = |other: &Arc<str>| node.0.as_ref() == Some(other);
        map.slots.retain(|_, serving| !is_it(serving));
        map.nodes.sort_by_key(is_it);
    }

    pub(super) fn redirect(&self, node: &Node, error: &redis::ServerError) -> Option<Redirect> {
        let asking = match error.kind()? {
            ServerErrorKind::Moved => false,
            ServerErrorKind::Ask => true,
            _ => return None,
        };
        let (slot, address) = error.details()?.split_once(' ')?;
        let slot = Slot::new(slot.parse().ok()?)?;
        let target = address_of(node, address);
        let mut map = self.map();
        map.add(&target);
        if !asking {
            map.slots.insert(slot, Arc::clone(&target));
        }
        Some(Redirect {
            node: Node(Some(target)),
            asking,
        })
    }

    pub(super) async fn learn(
        &self,
        node: &Node,
        connection: &mut redis::aio::MultiplexedConnection,
    ) {
        let mut ask = redis::cmd("CLUSTER");
        ask.arg("SLOTS");
        // A node that refuses is no obstacle: MOVED corrects the map slot by slot.
        if let Ok(Value::Array(ranges)) = connection.send_packed_command(&ask).await {
            let mut map = self.map();
            for range in &ranges {
                let _ = map.learn(node, range);
            }
        }
    }
}

impl Map {
    /// `[first slot, last slot, [host, port, …] of the master, …]`.
    fn learn(&mut self, source: &Node, range: &Value) -> Option<()> {
        let range = range.as_sequence()?;
        let number = |value: &Value| match value {
            Value::Int(number) => u16::try_from(*number).ok(),
            _ => None,
        };
        let (first, last) = (number(range.first()?)?, number(range.get(1)?)?);
        let master = range.get(2)?.as_sequence()?;
        let host = match master.first()? {
            Value::BulkString(host) => String::from_utf8_lossy(host).into_owned(),
            Value::SimpleString(host) => host.clone(),
            _ => String::new(),
        };
        let node = address_of(source, &format!("{host}:{}", number(master.get(1)?)?));
        self.add(&node);
        for slot in (first..=last).filter_map(Slot::new) {
            self.slots.insert(slot, Arc::clone(&node));
        }
        Some(())
    }
}

/// A node that does not know its own name leaves it out: it is the one we asked.
fn address_of(source: &Node, address: &str) -> Arc<str> {
    match (address.strip_prefix(':'), source.0.as_deref()) {
        (Some(port), Some(source)) => {
            let host = source.rsplit_once(':').map_or(source, |(host, _)| host);
            Arc::from(format!("{host}:{port}"))
        }
        _ => Arc::from(address),
    }
}
