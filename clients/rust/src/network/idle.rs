//! Connections on which a WAIT for replicas may block, kept for the next such pipeline.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::lock;
use crate::connection::Connection;
use crate::topology::Node;

/// They are kept for so long, so that the renewals of a lock with the usual ttl of 30 s, one every
/// 10 s, find one, and so many of them per node.
const KEPT_FOR: Duration = Duration::from_secs(15);
const MOST: usize = 4;

#[derive(Clone, Default)]
pub(super) struct IdleConnections {
    /// With the time since which each is idle.
    idle: Arc<Mutex<Vec<(Node, Connection, Instant)>>>,
}

impl IdleConnections {
    pub(super) fn take(&self, node: &Node) -> Option<Connection> {
        let mut idle = lock(&self.idle);
        idle.retain(|(_, connection, since)| !connection.has_ended() && since.elapsed() < KEPT_FOR);
        let index = idle.iter().rposition(|(of, ..)| of == node)?;
        Some(idle.remove(index).1)
    }

    pub(super) fn keep(&self, node: &Node, connection: Connection) {
        let mut idle = lock(&self.idle);
        let was_empty = idle.is_empty();
        idle.push((node.clone(), connection, Instant::now()));
        if idle.iter().filter(|(of, ..)| of == node).count() > MOST
            && let Some(oldest) = idle.iter().position(|(of, ..)| of == node)
        {
            idle.remove(oldest);
        }
        if was_empty {
            let idle = self.clone();
            tokio::spawn(async move {
                while !lock(&idle.idle).is_empty() {
                    sleep(KEPT_FOR).await;
                    lock(&idle.idle).retain(|(.., since)| since.elapsed() < KEPT_FOR);
                }
            });
        }
    }

    pub(super) fn discard(&self, node: &Node) {
        lock(&self.idle).retain(|(of, ..)| of != node);
    }
}
