//! Connections on which a WAIT for replicas may block, kept for the next such pipeline.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::lock;
use crate::topology::Node;

/// They are kept for so long, so that the renewals of a lock with the usual ttl of 30 s, one every
/// 10 s, find one, and so many of them per node.
const KEPT_FOR: Duration = Duration::from_secs(15);
const MOST: usize = 4;

/// Of connections, but for tests.
pub(super) struct Idle<C> {
    /// With the time since which each is idle.
    idle: Arc<Mutex<Vec<(Node, C, Instant)>>>,
}

impl<C> Clone for Idle<C> {
    fn clone(&self) -> Idle<C> {
        Idle {
            idle: Arc::clone(&self.idle),
        }
    }
}

impl<C> Default for Idle<C> {
    fn default() -> Idle<C> {
        Idle {
            idle: Arc::default(),
        }
    }
}

impl<C: Send + 'static> Idle<C> {
    pub(super) fn take(&self, node: &Node, has_ended: impl Fn(&C) -> bool) -> Option<C> {
        let mut idle = lock(&self.idle);
        idle.retain(|(_, connection, since)| !has_ended(connection) && since.elapsed() < KEPT_FOR);
        let index = idle.iter().rposition(|(of, ..)| of == node)?;
        Some(idle.remove(index).1)
    }

    pub(super) fn keep(&self, node: &Node, connection: C) {
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

    pub(super) fn clear(&self) {
        lock(&self.idle).clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn never(_: &u32) -> bool {
        false
    }

    #[tokio::test(start_paused = true)]
    async fn few_are_kept_and_the_last_that_was_used_is_taken_first() {
        let (idle, node, other) = (Idle::default(), Node::named("a"), Node::named("b"));
        (0..6).for_each(|connection| idle.keep(&node, connection));
        idle.keep(&other, 7);
        let taken: Vec<_> = std::iter::from_fn(|| idle.take(&node, never)).collect();
        assert_eq!(taken, [5, 4, 3, 2]);
        assert_eq!(idle.take(&other, never), Some(7));
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_has_ended_or_is_discarded_is_not_taken() {
        let (idle, node) = (Idle::default(), Node::named("a"));
        idle.keep(&node, 1);
        idle.keep(&node, 2);
        assert_eq!(idle.take(&node, |connection| *connection == 2), Some(1));
        idle.keep(&node, 3);
        idle.discard(&node);
        assert_eq!(idle.take(&node, never), None);
    }

    #[tokio::test(start_paused = true)]
    async fn none_is_kept_for_long_although_nobody_asks() {
        let (idle, node) = (Idle::default(), Node::named("a"));
        let connection = Arc::new(());
        idle.keep(&node, Arc::clone(&connection));
        sleep(KEPT_FOR / 2).await;
        assert_eq!(Arc::strong_count(&connection), 2);
        sleep(KEPT_FOR).await;
        assert_eq!(Arc::strong_count(&connection), 1, "dropped, so closed");
    }
}
