//! A cluster of real masters on this machine, two where nobody says otherwise, and a replica where one is wanted.

use std::time::{Duration, Instant};

use redis::Connection;

use super::{OK, Reply, Server, Setup, ask, eventually, free_port, info, is_at_least, number};

const SLOTS: usize = 16_384;

/// Longer than a failover that an operator asked for may take before the server itself gives it up, 5 s.
const ELECTION: Duration = Duration::from_secs(6);

pub struct Cluster<const N: usize = 2> {
    pub nodes: [Server; N],
}

impl Cluster {
    /// Two masters: the first half of the slots is on the first.
    #[track_caller]
    pub fn start() -> Cluster {
        Cluster::of_masters()
    }
}

impl<const N: usize> Cluster<N> {
    /// Each has an equal share of the slots, in their order.
    #[track_caller]
    pub fn of_masters() -> Cluster<N> {
        let nodes = std::array::from_fn(|n| {
            let (node, bus_port) = start_node();
            let mut redis = node.connect();
            let (first, end) = (n * SLOTS / N, (n + 1) * SLOTS / N);
            let added = ask!(redis, "CLUSTER", "ADDSLOTSRANGE", first, end - 1);
            assert_eq!(added, OK);
            assert_eq!(ask!(redis, "CLUSTER", "SET-CONFIG-EPOCH", n + 1), OK);
            (node, bus_port)
        });
        let nodes: [(Server, String); N] = nodes;
        let meet = ["CLUSTER", "MEET", "127.0.0.1"];
        for (other, bus_port) in &nodes[1..] {
            let met = ask!(nodes[0].0.connect(), &meet, other.port(), bus_port);
            assert_eq!(met, OK);
        }
        let nodes = nodes.map(|(node, _)| node);
        for node in &nodes {
            let mut redis = node.connect();
            eventually("the cluster is complete", || {
                let about: String = redis::cmd("CLUSTER").arg("INFO").query(&mut redis).unwrap();
                about.contains("cluster_state:ok")
                    && about.contains(&format!("cluster_known_nodes:{N}\r"))
                    && about.contains(&format!("cluster_slots_ok:{SLOTS}\r"))
            });
        }
        Cluster { nodes }
    }

    pub fn urls(&self) -> Vec<String> {
        self.nodes.iter().map(Server::url).collect()
    }

    /// One more node: a replica of this one, in sync when this returns.
    #[track_caller]
    pub fn replica_of(&self, node: usize) -> Server {
        let (replica, bus_port) = start_node();
        let mut redis = replica.connect();
        let master = node_id(&mut self.nodes[node].connect());
        let meet = ["CLUSTER", "MEET", "127.0.0.1"];
        let met = ask!(self.nodes[node].connect(), &meet, replica.port(), bus_port);
        assert_eq!(met, OK);
        eventually("the replica knows its master", || {
            ask!(redis, "CLUSTER", "REPLICATE", &master) == OK
        });
        let own = node_id(&mut redis);
        eventually("the replica is in sync, and all know that", || {
            let about: String = redis::cmd("CLUSTER").arg("INFO").query(&mut redis).unwrap();
            // It asks only those for a vote to whom it is connected, and counts it if it knows their slots.
            about.contains(&format!("cluster_slots_ok:{SLOTS}\r"))
                && about_nodes(&mut redis)
                    .lines()
                    .all(|line| line.contains(" connected"))
                && info::<String>(&mut redis, "replication", "master_link_status") == "up"
                && self.nodes.iter().all(|node| {
                    let nodes = about_nodes(&mut node.connect());
                    nodes.lines().any(|line| {
                        line.starts_with(&own)
                            && line.contains("slave")
                            && line.contains(&master)
                            && line.contains(" connected")
                    })
                })
        });
        replica
    }

    /// Makes a replica the master of its master's slots, in one of the ways of CLUSTER FAILOVER: "", FORCE or
    /// TAKEOVER. An election that a busy machine gives up is held again, as an operator would.
    #[track_caller]
    pub fn fail_over(&self, replica: &Server, how: &str) {
        let mut redis = replica.connect();
        let mut asked: Option<Instant> = None;
        eventually("the replica is a master", || {
            if asked.is_none_or(|asked| asked.elapsed() > ELECTION) {
                let how = Some(how).filter(|how| !how.is_empty());
                assert_eq!(ask!(redis, "CLUSTER", "FAILOVER", how), OK);
                asked = Some(Instant::now());
            }
            info::<String>(&mut redis, "replication", "role") == "master"
        });
    }

    /// Moves a slot with its keys from one node to another, as redis-cli does.
    #[track_caller]
    pub fn move_slot(&self, slot: i64, from: usize, to: usize) {
        move_slot(slot, &self.nodes[from], &self.nodes[to]);
    }
}

/// A node that knows of no other, and the port of its bus.
fn start_node() -> (Server, String) {
    // Free now; the default, 10,000 above the port, may be no port at all.
    let bus_port = free_port().to_string();
    let node = Setup::new()
        .args(&["--cluster-enabled", "yes", "--cluster-port", &bus_port])
        .args(&["--cluster-announce-ip", "127.0.0.1"])
        .start();
    (node, bus_port)
}

fn about_nodes(redis: &mut Connection) -> String {
    redis::cmd("CLUSTER").arg("NODES").query(redis).unwrap()
}

/// Moves a slot with its keys from one node to another, as redis-cli does.
#[track_caller]
pub fn move_slot(slot: i64, from: &Server, to: &Server) {
    let [mut source, mut target] = [from, to].map(Server::connect);
    let (source_id, target_id) = (node_id(&mut source), node_id(&mut target));
    let set_slot = ["CLUSTER", "SETSLOT"];
    assert_eq!(ask!(target, &set_slot, slot, "IMPORTING", source_id), OK);
    assert_eq!(ask!(source, &set_slot, slot, "MIGRATING", &target_id), OK);
    loop {
        let keys: Vec<Vec<u8>> = redis::cmd("CLUSTER")
            .arg("GETKEYSINSLOT")
            .arg(slot)
            .arg(100)
            .query(&mut source)
            .unwrap();
        if keys.is_empty() {
            break;
        }
        let mut migrate = redis::cmd("MIGRATE");
        migrate.arg("127.0.0.1").arg(to.port());
        migrate.arg("").arg(0).arg(10_000).arg("KEYS").arg(keys);
        migrate.query::<()>(&mut source).unwrap();
    }
    for redis in [&mut target, &mut source] {
        assert_eq!(ask!(redis, &set_slot, slot, "NODE", &target_id), OK);
    }
    // Before the next move, or an older word of the source may count more than that of the target.
    eventually("the source knows of the target's epoch", || {
        epoch_of(&mut source, &target_id) == epoch_of(&mut target, &target_id)
    });
}

/// The same in one step, as only some servers can ([`moves_in_one_step`]).
pub fn move_slot_in_one_step(slot: i64, from: &Server, to: &Server) -> Reply {
    let range = ["CLUSTER", "MIGRATESLOTS", "SLOTSRANGE"];
    let id = node_id(&mut to.connect());
    ask!(from.connect(), &range, slot, slot, "NODE", id)
}

/// Whether the server has CLUSTER MIGRATESLOTS: Valkey since 9.
pub fn moves_in_one_step(server: &Server) -> bool {
    is_at_least(&mut server.connect(), (99, 0), (9, 0))
}

/// The configuration epoch of a node as another knows it.
pub fn epoch_of(redis: &mut Connection, id: &str) -> u64 {
    let nodes = about_nodes(redis);
    let node = nodes.lines().find(|line| line.starts_with(id)).unwrap();
    node.split(' ').nth(6).unwrap().parse().unwrap()
}

pub fn node_id(redis: &mut Connection) -> String {
    redis::cmd("CLUSTER").arg("MYID").query(redis).unwrap()
}

pub fn slot_of(redis: &mut Connection, key: &str) -> i64 {
    number(ask!(redis, "CLUSTER", "KEYSLOT", key))
}
