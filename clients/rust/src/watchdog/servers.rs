//! What the watchdog needs of whoever talks to the servers: the network, or the script of a test.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Value};

use crate::acquisition::{self, Acquisition, Grant, Request};
use crate::error::Error;
use crate::network::{Failure, Network};
use crate::topology::Node;

pub(crate) trait Servers: Send + Sync + 'static {
    /// The node that serves the key, as far as is known.
    fn node_of(&self, key: &[u8]) -> Node;

    /// Sends the commands in one pipeline, and returns the replies, in order, of which a yes counts
    /// only if so many replicas acknowledged it.
    fn exchange(
        self: &Arc<Self>,
        node: Node,
        commands: Vec<Cmd>,
        min_replicas: u32,
        within: Duration,
    ) -> impl Future<Output = Vec<Result<Value, Failure>>> + Send;

    /// Sends one command about the key.
    fn ask(
        self: &Arc<Self>,
        key: &[u8],
        command: Cmd,
        within: Duration,
    ) -> impl Future<Output = Result<Value, Error>> + Send;

    /// Asks for a lock until there is a result, or `cancelled` is ready, whose value is the result
    /// then.
    fn acquire(
        self: &Arc<Self>,
        request: &Request,
        cancelled: impl Future<Output = Result<Option<Grant>, Error>> + Send,
    ) -> impl Future<Output = Acquisition> + Send;

    /// Closes the connections on which nothing is under way. The next request makes new ones.
    fn disconnect(&self);
}

impl Servers for Network {
    fn node_of(&self, key: &[u8]) -> Node {
        Network::node_of(self, key)
    }

    async fn exchange(
        self: &Arc<Self>,
        node: Node,
        commands: Vec<Cmd>,
        min_replicas: u32,
        within: Duration,
    ) -> Vec<Result<Value, Failure>> {
        Network::exchange(self, node, commands, None, min_replicas, within).await
    }

    async fn ask(
        self: &Arc<Self>,
        key: &[u8],
        command: Cmd,
        within: Duration,
    ) -> Result<Value, Error> {
        let reply = Network::ask(self, key, command, None, 0, within).await;
        reply.map_err(|failure| failure.error)
    }

    async fn acquire(
        self: &Arc<Self>,
        request: &Request,
        cancelled: impl Future<Output = Result<Option<Grant>, Error>> + Send,
    ) -> Acquisition {
        acquisition::acquire(self, request, cancelled).await
    }

    fn disconnect(&self) {
        Network::disconnect(self);
    }
}
