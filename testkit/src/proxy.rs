//! Bad weather between a client and its server: a TCP proxy that delays, swallows, cuts and stops.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::watch;

use super::Server;

#[derive(Clone, Default)]
struct Weather {
    /// Every reply travels that long.
    delay: Duration,
    /// Every request travels that long on connections that are made from now on.
    delay_of_new: Duration,
    /// Requests arrive, replies vanish.
    swallow: bool,
    /// The next reply vanishes, and with it the connection.
    cut_at_reply: bool,
    /// Nothing travels, nothing breaks.
    stopped: bool,
    /// All connections break, and new ones are refused as long as it lasts.
    cut: bool,
}

/// Ends with all its connections when it is dropped.
pub struct Proxy {
    port: u16,
    weather: watch::Sender<Weather>,
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
        let (weather, forecast) = watch::channel(Weather::default());
        let server = SocketAddr::from(([127, 0, 0, 1], server.port()));
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        listener.set_nonblocking(true).unwrap();
        runtime.spawn(listen(listener, server, forecast));
        Proxy {
            port,
            weather,
            runtime: Some(runtime),
        }
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    pub fn delay_replies(&self, delay: Duration) {
        self.weather.send_modify(|weather| weather.delay = delay);
    }

    pub fn delay_requests_of_new_connections(&self, delay: Duration) {
        self.weather
            .send_modify(|weather| weather.delay_of_new = delay);
    }

    pub fn swallow_replies(&self) {
        self.weather.send_modify(|weather| weather.swallow = true);
    }

    pub fn cut_at_next_reply(&self) {
        self.weather
            .send_modify(|weather| weather.cut_at_reply = true);
    }

    pub fn stop(&self) {
        self.weather.send_modify(|weather| weather.stopped = true);
    }

    pub fn cut(&self) {
        self.weather.send_modify(|weather| weather.cut = true);
    }

    /// The sun comes out: connections that were not cut go on where they stopped.
    pub fn mend(&self) {
        self.weather.send_replace(Weather::default());
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // In the background, since a test may do this inside a runtime.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

async fn listen(
    listener: std::net::TcpListener,
    server: SocketAddr,
    weather: watch::Receiver<Weather>,
) {
    let listener = TcpListener::from_std(listener).unwrap();
    while let Ok((client, _)) = listener.accept().await {
        if !weather.borrow().cut {
            tokio::spawn(connect(client, server, weather.clone()));
        }
    }
}

async fn connect(client: TcpStream, server: SocketAddr, mut weather: watch::Receiver<Weather>) {
    let Ok(server) = TcpStream::connect(server).await else {
        return;
    };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let (mut requests, mut to_client) = client.into_split();
    let (mut replies, mut to_server) = server.into_split();
    let (up, down) = (weather.clone(), weather.clone());
    let delay = weather.borrow().delay_of_new;
    let up = async {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(length @ 1..) = requests.read(&mut buffer).await {
            tokio::time::sleep(delay).await;
            if travelling(up.clone()).await.is_none()
                || to_server.write_all(&buffer[..length]).await.is_err()
            {
                break;
            }
        }
    };
    let down = async {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(length @ 1..) = replies.read(&mut buffer).await {
            let Some(weather) = travelling(down.clone()).await else {
                break;
            };
            tokio::time::sleep(weather.delay).await;
            if weather.cut_at_reply {
                break;
            }
            if !weather.swallow && to_client.write_all(&buffer[..length]).await.is_err() {
                break;
            }
        }
    };
    tokio::select! {
        () = up => {}
        () = down => {}
        _ = weather.wait_for(|weather| weather.cut) => {}
    }
}

/// Waits while nothing travels, and tells what the weather is then.
async fn travelling(mut weather: watch::Receiver<Weather>) -> Option<Weather> {
    Some(
        weather
            .wait_for(|weather| !weather.stopped)
            .await
            .ok()?
            .clone(),
    )
}
