//! A cluster of three masters, enough to elect another, the first of which has a replica.

use redis::Connection;

use testkit::cluster::{self, epoch_of, node_id, slot_of};
use testkit::{OK, Server, Setup, ask, eventually, free_port};

const TIMEOUT_MS: &str = "1000";

const REPLICA: usize = 3;

pub struct Nodes {
    /// The first is the master with a replica, the last is the replica.
    nodes: [Server; 4],
}

impl Nodes {
    pub fn start() -> Nodes {
        let started = [0, 1, 2, 3].map(|number: u16| {
            let bus_port = free_port().to_string();
            let node = Setup::new()
                .args(&["--cluster-enabled", "yes", "--cluster-port", &bus_port])
                .args(&["--cluster-announce-ip", "127.0.0.1"])
                .args(&["--cluster-node-timeout", TIMEOUT_MS])
                .start();
            let mut redis = node.connect();
            let add = ["CLUSTER", "ADDSLOTSRANGE"];
            let added = match number {
                0 => ask!(redis, &add, 0, 5460),
                1 => ask!(redis, &add, 5461, 10_922),
                2 => ask!(redis, &add, 10_923, 16_383),
                _ => OK,
            };
            assert_eq!(added, OK);
            let epoch = ["CLUSTER", "SET-CONFIG-EPOCH"];
            assert_eq!(ask!(redis, &epoch, number + 1), OK);
            (node, bus_port)
        });
        let mut first = started[0].0.connect();
        let meet = ["CLUSTER", "MEET", "127.0.0.1"];
        for (node, bus_port) in &started[1..] {
            assert_eq!(ask!(first, &meet, node.port(), bus_port), OK);
        }
        let nodes = Nodes {
            nodes: started.map(|(node, _)| node),
        };
        let master = node_id(&mut first);
        eventually("the replica follows", || {
            let mut replica = nodes.nodes[REPLICA].connect();
            ask!(replica, "CLUSTER", "REPLICATE", &master) == OK
        });
        nodes.eventually_ready();
        nodes
    }

    pub fn urls(&self) -> Vec<String> {
        self.nodes.iter().map(Server::url).collect()
    }

    /// Whether a slot can move in one step.
    pub fn moves_in_one_step(&self) -> bool {
        cluster::moves_in_one_step(&self.nodes[0])
    }

    /// To the next master, wherever it is, with its keys: one by one as redis-cli does, or in one step.
    pub fn move_slot_of(&self, key: &str, in_one_step: bool) {
        let mut redis = self.nodes[0].connect();
        let slot = slot_of(&mut redis, key);
        let has_it = |node: &Server| {
            let mut redis = node.connect();
            let id = node_id(&mut redis);
            has(&mut redis, &id, slot)
        };
        let from = self.nodes.iter().position(has_it).unwrap();
        let [source, target] = [from, (from + 1) % REPLICA].map(|node| &self.nodes[node]);
        match in_one_step {
            true => assert_eq!(cluster::move_slot_in_one_step(slot, source, target), OK),
            false => cluster::move_slot(slot, source, target),
        }
        let target_id = node_id(&mut target.connect());
        // Before the next move, or an older claim of one may count more than a newer of the other.
        eventually("all know where the slot is", || {
            let has_it = |node: &Server| has(&mut node.connect(), &target_id, slot);
            self.nodes.iter().all(has_it)
        });
        eventually("all know of the epoch", || {
            let epoch = |node: &Server| epoch_of(&mut node.connect(), &target_id);
            self.nodes.iter().all(|node| epoch(node) == epoch(target))
        });
    }

    pub fn kill_and_fail_over(&mut self) {
        self.nodes[0].kill9();
        self.nodes.swap(0, REPLICA);
        for node in &self.nodes[..REPLICA] {
            let mut redis = node.connect();
            let replaced = &self.nodes[0];
            let id = node_id(&mut replaced.connect());
            eventually("the replica has taken over", || {
                let nodes = known(&mut redis);
                let master = nodes.lines().find(|line| line.starts_with(&id));
                master.is_some_and(|line| line.contains("master") && !line.contains("slave"))
                    && is_well(&mut redis)
            });
        }
    }

    pub fn start_killed_again(&mut self) {
        self.nodes[REPLICA].start_again();
        self.eventually_ready();
    }

    fn eventually_ready(&self) {
        for node in &self.nodes {
            let mut redis = node.connect();
            eventually("all nodes are well", || {
                let nodes = known(&mut redis);
                is_well(&mut redis)
                    && nodes.lines().count() == self.nodes.len()
                    && nodes.matches("slave").count() == 1
                    && !nodes.contains("fail")
            });
        }
        let mut replica = self.nodes[REPLICA].connect();
        eventually("the replica is in sync", || {
            let info: String = redis::cmd("INFO")
                .arg("replication")
                .query(&mut replica)
                .unwrap();
            info.contains("master_link_status:up")
        });
    }
}

fn known(redis: &mut Connection) -> String {
    redis::cmd("CLUSTER").arg("NODES").query(redis).unwrap()
}

fn is_well(redis: &mut Connection) -> bool {
    let info: String = redis::cmd("CLUSTER").arg("INFO").query(redis).unwrap();
    info.contains("cluster_state:ok") && info.contains("cluster_slots_ok:16384")
}

/// Whether a node serves the slot, as far as the one that is asked knows.
fn has(redis: &mut Connection, id: &str, slot: i64) -> bool {
    let nodes = known(redis);
    let node = nodes.lines().find(|line| line.starts_with(id)).unwrap();
    node.split(' ').skip(8).any(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        match (first.parse::<i64>(), last.parse::<i64>()) {
            (Ok(first), Ok(last)) => (first..=last).contains(&slot),
            _ => false,
        }
    })
}
