//! Faults between a client and its server: a TCP proxy that delays, swallows, cuts, stops and leads
//! elsewhere.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::watch;

use super::Server;

#[derive(Clone)]
struct Faults {
    /// Where new connections lead.
    server: SocketAddr,
    /// Every reply travels that long.
    delay: Duration,
    /// Every request travels that long on connections that are made from now on.
    delay_of_new: Duration,
    /// Requests arrive, replies vanish.
    swallow: bool,
    /// The next reply vanishes, and with it the connection.
    cut_at_reply: bool,
    /// On connections with a smaller number nothing travels, and nothing breaks: what is sent is
    /// held back, and delivered when the fault ends.
    stopped_before: u64,
    /// All connections break, and new ones are refused as long as it lasts.
    cut: bool,
    /// So many of the next connections are taken, and lead nowhere.
    hang: u64,
    /// How many connections were made so far.
    connections: u64,
    travelled: Arc<Travelled>,
}

/// What has come to the proxy so far, delivered or not. A request or a reply that comes in parts is counted more than once.
#[derive(Default)]
struct Travelled {
    requests: AtomicU64,
    replies: AtomicU64,
}

/// Ends with all its connections when it is dropped.
pub struct Proxy {
    port: u16,
    faults: watch::Sender<Faults>,
    runtime: Option<Runtime>,
}

impl Proxy {
    pub fn to(server: &Server) -> Proxy {
        // Threads of its own: the test may block all of its.
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let faults = watch::Sender::new(Faults::none(address(server), 0, Arc::default()));
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        listener.set_nonblocking(true).unwrap();
        runtime.spawn(listen(listener, faults.clone()));
        Proxy {
            port,
            faults,
            runtime: Some(runtime),
        }
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    /// How many connections were made so far.
    pub fn connections(&self) -> u64 {
        self.faults.borrow().connections
    }

    /// How many replies have come from the server so far. A later fault does not change their way.
    pub fn replies(&self) -> u64 {
        self.faults
            .borrow()
            .travelled
            .replies
            .load(Ordering::Relaxed)
    }

    /// How many requests have come from the clients so far, delivered or not.
    pub fn requests(&self) -> u64 {
        self.faults
            .borrow()
            .travelled
            .requests
            .load(Ordering::Relaxed)
    }

    pub fn delay_replies(&self, delay: Duration) {
        self.faults.send_modify(|faults| faults.delay = delay);
    }

    pub fn delay_requests_of_new_connections(&self, delay: Duration) {
        self.faults
            .send_modify(|faults| faults.delay_of_new = delay);
    }

    pub fn swallow_replies(&self) {
        self.faults.send_modify(|faults| faults.swallow = true);
    }

    pub fn cut_at_next_reply(&self) {
        self.faults.send_modify(|faults| faults.cut_at_reply = true);
    }

    pub fn stop(&self) {
        self.faults
            .send_modify(|faults| faults.stopped_before = u64::MAX);
    }

    /// Stops the connections that there are; new ones work.
    pub fn stop_old_connections(&self) {
        self.faults
            .send_modify(|faults| faults.stopped_before = faults.connections);
    }

    /// New connections lead to another server, as behind an address that is moved at a failover;
    /// those that there are stay as they are.
    pub fn lead_to(&self, server: &Server) {
        let address = address(server);
        self.faults.send_modify(|faults| faults.server = address);
    }

    pub fn hang_next_connections(&self, count: u64) {
        self.faults.send_modify(|faults| faults.hang = count);
    }

    pub fn cut(&self) {
        self.faults.send_modify(|faults| faults.cut = true);
    }

    /// Ends all faults: connections that were not cut go on where they stopped.
    pub fn mend(&self) {
        self.faults.send_modify(|faults| {
            let travelled = Arc::clone(&faults.travelled);
            *faults = Faults::none(faults.server, faults.connections, travelled);
        });
    }
}

impl Faults {
    fn none(server: SocketAddr, connections: u64, travelled: Arc<Travelled>) -> Faults {
        Faults {
            server,
            delay: Duration::ZERO,
            delay_of_new: Duration::ZERO,
            swallow: false,
            cut_at_reply: false,
            stopped_before: 0,
            cut: false,
            hang: 0,
            connections,
            travelled,
        }
    }
}

fn address(server: &Server) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], server.port()))
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // In the background, since a test may do this inside a runtime.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

async fn listen(listener: std::net::TcpListener, faults: watch::Sender<Faults>) {
    let listener = TcpListener::from_std(listener).unwrap();
    let mut hanging = Vec::new();
    while let Ok((client, _)) = listener.accept().await {
        let number = faults.borrow().connections;
        let hangs = faults.borrow().hang > 0;
        faults.send_modify(|faults| {
            faults.connections += 1;
            faults.hang = faults.hang.saturating_sub(1);
        });
        if hangs {
            hanging.push(client);
        } else if !faults.borrow().cut {
            tokio::spawn(connect(client, number, faults.subscribe()));
        }
    }
}

async fn connect(client: TcpStream, number: u64, mut faults: watch::Receiver<Faults>) {
    let server = faults.borrow().server;
    let Ok(server) = TcpStream::connect(server).await else {
        return;
    };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let (mut requests, mut to_client) = client.into_split();
    let (mut replies, mut to_server) = server.into_split();
    let (up, down) = (faults.clone(), faults.clone());
    let delay = faults.borrow().delay_of_new;
    let travelled = Arc::clone(&faults.borrow().travelled);
    let up = async {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(length @ 1..) = requests.read(&mut buffer).await {
            travelled.requests.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(delay).await;
            if travelling(number, up.clone()).await.is_none()
                || to_server.write_all(&buffer[..length]).await.is_err()
            {
                return;
            }
        }
        // The client has closed its half, which the server learns when what came before has arrived.
        let _ = travelling(number, up.clone()).await;
        let _ = to_server.shutdown().await;
        std::future::pending().await
    };
    let down = async {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(length @ 1..) = replies.read(&mut buffer).await {
            let Some(faults) = travelling(number, down.clone()).await else {
                break;
            };
            faults.travelled.replies.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(faults.delay).await;
            if faults.cut_at_reply {
                break;
            }
            if !faults.swallow && to_client.write_all(&buffer[..length]).await.is_err() {
                break;
            }
        }
    };
    tokio::select! {
        () = up => {}
        () = down => {}
        _ = faults.wait_for(|faults| faults.cut) => {}
    }
}

/// Waits while nothing travels on this connection, and returns what the faults are then.
async fn travelling(number: u64, mut faults: watch::Receiver<Faults>) -> Option<Faults> {
    Some(
        faults
            .wait_for(|faults| number >= faults.stopped_before)
            .await
            .ok()?
            .clone(),
    )
}
