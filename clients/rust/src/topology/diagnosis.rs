//! Why there is no connection, in the words of whoever is there. The redis client loses them: it
//! keeps "authentication failed" of the answer to AUTH, and "broken pipe" of a server that says
//! why and closes. So a failed connection is followed by a second one that only listens. What it
//! costs is spent where nothing works yet.

use std::future::pending;
use std::time::Duration;

use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ErrorKind, RedisConnectionInfo, RedisError,
    Value,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::{sleep, timeout};

use crate::error::Error;
use crate::printable::{printable, without_controls};

/// How long a reply may take for which the server has nothing to do.
const REPLY_WITHIN: Duration = Duration::from_millis(300);

/// A TLS handshake that takes longer may be none at all, which is asked on a second connection.
const HANDSHAKE_WITHIN: Duration = Duration::from_millis(500);

/// A ClientHello with nothing in it: whoever speaks TLS answers with an alert.
const HELLO: [u8; 10] = [22, 3, 1, 0, 5, 1, 0, 0, 1, 3];
const ALERT: u8 = 21;

/// An address as it may be printed.
pub(super) fn shown(address: &ConnectionAddr) -> String {
    printable(address.to_string().as_bytes())
}

/// Comes back only if the client waits for a TLS handshake that never ends.
pub(super) async fn speaks_no_tls(client: &Client) -> Error {
    let address = client.get_connection_info().addr();
    if let ConnectionAddr::TcpTls { .. } = address {
        sleep(HANDSHAKE_WITHIN).await;
        if let Some(error) = listen(address).await {
            return at(address, error);
        }
    }
    pending().await
}

/// What `error`, with which a connection could not be made, means.
pub(super) async fn explain(client: &Client, error: RedisError) -> Error {
    let address = client.get_connection_info().addr();
    let explained = match error.kind() {
        ErrorKind::AuthenticationFailed | ErrorKind::Server(_) | ErrorKind::Extension => {
            match log_in_again(client).await {
                None => listen(address).await,
                explained => explained,
            }
        }
        ErrorKind::Io if !error.is_connection_refusal() && !error.is_timeout() => {
            listen(address).await
        }
        _ => None,
    };
    at(address, explained.unwrap_or_else(|| Error::from(error)))
}

fn at(address: &ConnectionAddr, error: Error) -> Error {
    match error {
        Error::Unreachable(why) => Error::Unreachable(format!("{}: {why}", shown(address))),
        error => error,
    }
}

/// The server's own words to AUTH and SELECT.
async fn log_in_again(client: &Client) -> Option<Error> {
    let info = client.get_connection_info();
    let settings = info.redis_settings();
    let nobody = info
        .clone()
        .set_redis_settings(RedisConnectionInfo::default());
    let log_in = async {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(None);
        let client = Client::open(nobody).ok()?;
        let connected = client.get_multiplexed_async_connection_with_config(&config);
        let mut connection = connected.await.ok()?;
        let mut commands = Vec::new();
        if let Some(password) = settings.password() {
            let mut auth = redis::cmd("AUTH");
            auth.arg(settings.username()).arg(password);
            commands.push(auth);
        }
        if settings.db() != 0 {
            let mut select = redis::cmd("SELECT");
            select.arg(settings.db());
            commands.push(select);
        }
        for command in commands {
            if let Value::ServerError(error) =
                connection.send_packed_command(&command).await.ok()?
            {
                return Some(Error::from(&error));
            }
        }
        None
    };
    timeout(2 * REPLY_WITHIN, Box::pin(log_in)).await.ok()?
}

/// What whoever is at the address says by themselves, or to a few bytes of the other kind than
/// those that failed.
async fn listen(address: &ConnectionAddr) -> Option<Error> {
    match address {
        ConnectionAddr::Tcp(host, port) => {
            let stream = tokio::net::TcpStream::connect((host.as_str(), *port));
            let mut stream = timeout(REPLY_WITHIN, stream).await.ok()?.ok()?;
            if let Some(error) = refusal(&read_line(&mut stream).await) {
                return Some(error);
            }
            stream.write_all(&HELLO).await.ok()?;
            let answer = read_line(&mut stream).await;
            (answer.first() == Some(&ALERT)).then(|| {
                Error::Unreachable(
                    "this port speaks TLS: write rediss:// instead of redis://".to_owned(),
                )
            })
        }
        ConnectionAddr::TcpTls { host, port, .. } => {
            let stream = tokio::net::TcpStream::connect((host.as_str(), *port));
            let mut stream = timeout(REPLY_WITHIN, stream).await.ok()?.ok()?;
            let mut answer = read_line(&mut stream).await;
            if let Some(error) = refusal(&answer) {
                return Some(error);
            }
            if answer.is_empty() {
                stream.write_all(b"PING\r\n").await.ok()?;
                answer = read_line(&mut stream).await;
            }
            matches!(answer.first(), Some(b'+' | b'-')).then(|| {
                Error::Unreachable(
                    "this port speaks no TLS: write redis:// instead of rediss://, or the port \
                     that does"
                        .to_owned(),
                )
            })
        }
        #[cfg(unix)]
        ConnectionAddr::Unix(path) => {
            let stream = tokio::net::UnixStream::connect(path);
            let mut stream = timeout(REPLY_WITHIN, stream).await.ok()?.ok()?;
            refusal(&read_line(&mut stream).await)
        }
        _ => None,
    }
}

async fn read_line(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> Vec<u8> {
    let mut line = Vec::new();
    // The longest known, of protected mode, has 1,000 bytes. What is longer is cut.
    let mut stream = stream.take(4096);
    let read = async {
        while !line.ends_with(b"\n") && stream.read_buf(&mut line).await.is_ok_and(|n| n > 0) {}
    };
    let _ = timeout(REPLY_WITHIN, read).await;
    line
}

/// An error line that a server sends unasked, before it closes.
fn refusal(line: &[u8]) -> Option<Error> {
    let line = String::from_utf8_lossy(line.strip_prefix(b"-")?);
    let line = without_controls(line.lines().next()?);
    // Too many connections: there will be fewer.
    if line.starts_with("ERR max number of clients") {
        return Some(Error::Unreachable(line));
    }
    Some(Error::Refused(line))
}
