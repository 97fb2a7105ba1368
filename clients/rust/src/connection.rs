//! One connection to a server, and how it is given up: what was sent is followed to its end, so
//! that no request of ours can arrive when nobody expects it any more.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::io::tcp::socket2::SockRef;
use redis::{AsyncConnectionConfig, Client, Cmd, ConnectionAddr, RedisError, Value};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, lookup_host};
use tokio::sync::oneshot;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};

/// How long a connection that was given up is followed to its end. What has not arrived by then
/// is left to the system, which goes on sending it, in order, for as long as it sends anything.
const LINGER: Duration = Duration::from_secs(5);

/// A connection that many share. When the last clone is dropped, it is closed for sending, and read
/// until the server has closed it too, for [`LINGER`] at most. One over TLS is the library's,
/// which just closes it.
#[derive(Clone)]
pub(crate) struct Connection {
    redis: MultiplexedConnection,
    open: Option<Arc<Open>>,
}

/// Dropped with the last clone.
struct Open {
    driver: AbortHandle,
    _closed: oneshot::Sender<()>,
}

impl Connection {
    /// Connects and logs in. Takes as long as it takes.
    pub(crate) async fn to(client: &Client) -> Result<Connection, RedisError> {
        let info = client.get_connection_info();
        // All our waiting is bounded by who waits, so the library need not bound it again.
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(None);
        let stream: Box<dyn Stream> = match info.addr() {
            ConnectionAddr::Tcp(host, port) => {
                Box::new(connect(host, *port, info.tcp_settings()).await?)
            }
            #[cfg(unix)]
            ConnectionAddr::Unix(path) => Box::new(tokio::net::UnixStream::connect(path).await?),
            _ => {
                let connected = client.get_multiplexed_async_connection_with_config(&config);
                return Ok(Connection {
                    redis: connected.await?,
                    open: None,
                });
            }
        };
        let stream = ReadToTheEnd {
            stream,
            is_closing: false,
        };
        let settings = info.redis_settings();
        let connected = MultiplexedConnection::new_with_config(settings, stream, config);
        let (redis, driver) = connected.await?;
        let (closed, close) = oneshot::channel();
        let too_long = async {
            let _ = close.await;
            sleep(LINGER).await;
        };
        let driver = tokio::spawn(async move {
            tokio::select! {
                () = driver => {}
                () = too_long => {}
            }
        });
        let open = Arc::new(Open {
            driver: driver.abort_handle(),
            _closed: closed,
        });
        Ok(Connection {
            redis,
            open: Some(open),
        })
    }

    /// Whether the server has closed it, as far as is known.
    pub(crate) fn has_ended(&self) -> bool {
        let open = self.open.as_ref();
        open.is_some_and(|open| open.driver.is_finished())
    }

    pub(crate) async fn send(&mut self, command: &Cmd) -> Result<Value, RedisError> {
        self.redis.send_packed_command(command).await
    }

    pub(crate) async fn send_all(
        &mut self,
        commands: &redis::Pipeline,
    ) -> Result<Vec<Value>, RedisError> {
        self.redis
            .send_packed_commands(commands, 0, commands.len())
            .await
    }

    pub(crate) fn redis(&mut self) -> &mut MultiplexedConnection {
        &mut self.redis
    }

    /// Sends a command after all that was sent, and drops this clone.
    fn send_last(mut self, mut last: Cmd) {
        // Without a runtime there is no connection any more either.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        runtime.spawn(async move {
            // One of the library is closed with the last clone, so that is kept until the reply.
            last.set_no_response(self.open.is_some());
            let _ = timeout(LINGER, self.send(&last)).await;
        });
    }
}

/// A connection on which a request is under way. If it is dropped before the reply, `cleanup` is sent
/// after the request: there it cannot overtake it, as it could on another connection.
pub(crate) struct Unanswered {
    pub(crate) connection: Connection,
    pub(crate) cleanup: Option<Cmd>,
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        if let Some(cleanup) = self.cleanup.take() {
            self.connection.clone().send_last(cleanup);
        }
    }
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// All addresses of a host are tried at once: one of them may lead nowhere.
async fn connect(host: &str, port: u16, settings: &TcpSettings) -> io::Result<TcpStream> {
    let mut tries: JoinSet<_> = lookup_host((host, port))
        .await?
        .map(|address: SocketAddr| TcpStream::connect(address))
        .collect();
    let mut connected = Err(io::Error::from(io::ErrorKind::AddrNotAvailable));
    while let Some(Ok(tried)) = tries.join_next().await {
        connected = tried;
        if connected.is_ok() {
            break;
        }
    }
    let stream = connected?;
    stream.set_nodelay(settings.nodelay())?;
    let socket = SockRef::from(&stream);
    if let Some(keepalive) = settings.keepalive() {
        socket.set_tcp_keepalive(keepalive)?;
    }
    #[cfg(any(target_os = "android", target_os = "linux"))]
    socket.set_tcp_user_timeout(settings.user_timeout())?;
    Ok(stream)
}

/// A stream whose shutdown is complete when the other side has closed it too. Closed at once, it
/// would reset the connection when more comes, and the reset overtakes what we have sent.
struct ReadToTheEnd {
    stream: Box<dyn Stream>,
    is_closing: bool,
}

impl AsyncRead for ReadToTheEnd {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for ReadToTheEnd {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.is_closing {
            ready!(Pin::new(&mut self.stream).poll_shutdown(context))?;
            self.is_closing = true;
        }
        let mut bytes = [0; 512];
        loop {
            let mut unread = ReadBuf::new(&mut bytes);
            ready!(Pin::new(&mut self.stream).poll_read(context, &mut unread))?;
            if unread.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
        }
    }
}
