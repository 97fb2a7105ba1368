//! All that stands in the server's URL counts or is refused, and what is wrong with a server is told
//! in its own words, with its address, and never with a password.

use std::net::UdpSocket;
use std::process::{Child, Command, Stdio};

use lockkeeper::{Error, Lockkeeper};
use tempfile::TempDir;
use testkit::client::{hold, ms};
use testkit::{NO, OK, Server, Setup, YES, ask, eventually, free_port};

async fn asked(lockkeeper: &Lockkeeper) -> Error {
    match lockkeeper.info("book").await {
        Err(error) => error,
        Ok(info) => panic!("it answers: {info:?}"),
    }
}

async fn asked_at(url: &str) -> Error {
    asked(&Lockkeeper::open(url).unwrap()).await
}

fn refused(error: Error) -> String {
    match error {
        Error::Refused(line) => line,
        other => panic!("{other:?}"),
    }
}

fn unreachable(error: Error) -> String {
    match error {
        Error::Unreachable(why) => why,
        other => panic!("{other:?}"),
    }
}

/// Why such a URL is not opened at all.
fn invalid(url: &str) -> String {
    match Lockkeeper::open(url) {
        Err(Error::Invalid(why)) => {
            assert!(!why.contains("secr"), "it shows the password: {why}");
            why
        }
        Err(other) => panic!("{url}: {other:?}"),
        Ok(_) => panic!("{url} is opened"),
    }
}

#[tokio::test]
async fn the_database_counts_wherever_it_stands() {
    let server = Server::start();
    let (port, socket) = (server.port(), server.socket());
    let socket = socket.display();
    for url in [
        format!("redis://127.0.0.1:{port}/3"),
        format!("redis://127.0.0.1:{port}/3/"),
        format!("redis://127.0.0.1:{port}?db=3"),
        format!("redis://127.0.0.1:{port}/?db=3&protocol=resp3"),
        format!("valkey://127.0.0.1:{port}/3?db=3&protocol=2"),
        format!("unix://{socket}?db=3"),
        format!("redis+unix://{socket}?db=3&protocol=resp3"),
    ] {
        let mut redis = server.connect();
        let _held = hold(&Lockkeeper::open(&url).unwrap(), "book", ms(60_000)).await;
        assert_eq!(ask!(redis, "EXISTS", "book"), NO, "{url}");
        assert_eq!(ask!(redis, "SELECT", 3), OK);
        assert_eq!(ask!(redis, "DEL", "book"), YES, "{url}");
    }
    let url = format!("redis://127.0.0.1:{port}/99");
    assert_eq!(
        refused(asked_at(&url).await),
        "ERR DB index is out of range"
    );
}

#[test]
fn what_is_not_heeded_is_refused_by_name() {
    for (url, what) in [
        ("redis://host/?timeout=5", "'timeout'"),
        ("redis://host/?db=3&max_connections=7", "'max_connections'"),
        ("redis://host/?pass=secret", "'pass'"),
        (
            "redis://host/?sentinel_password=secret",
            "'sentinel_password'",
        ),
        (
            "redis+cluster://host/?read_from_replicas=1",
            "'read_from_replicas'",
        ),
        ("redis+sentinel://host/library?user=me", "'user'"),
        ("unix:///path?mode=7", "'mode'"),
        ("redis://host/?db=3&db=4", "'db' twice"),
        ("redis://host/2?db=3", "database 2 and for database 3"),
        ("redis://host/?db=three", "'three'"),
        ("redis://host/?db=", "got ''"),
        ("redis://host/-1", "'-1'"),
        ("redis://host/0/more", "'0/more'"),
        ("redis://host/99999999999999999999", "number of a database"),
        ("unix:///path?pass=a&secr", "as %26"),
        ("unix:///path?db=3&pass=a&db=b&secret", "as %26"),
        ("unix:///path?pass=a&secr=1&secr=2", "as %26"),
        ("redis://host/?password=a&mysecret", "as %26"),
        (
            "redis+sentinel://host/library?sentinel_password=a&secr",
            "as %26",
        ),
        ("redis+cluster://host/3", "only database 0"),
        ("redis+cluster://host?db=3", "only database 0"),
        ("redis://host/?protocol=4", "resp2 or resp3"),
        ("redis://host/#insecure", "#insecure"),
        ("rediss://host/#secure", "#insecure"),
        ("redis://", "no host"),
        ("redis://:6379/", "no host"),
        ("redis+sentinel://one,,two/library", "no host"),
        ("redis://one,two/", "more than one host"),
        ("redis://host:0/", "port from 1 to 65535"),
        ("redis://host:65536/", "port from 1 to 65535"),
        ("redis://host:+6379/", "port from 1 to 65535"),
        ("redis://host:/", "port from 1 to 65535"),
        ("redis://::1/", "in brackets"),
        ("redis://[::g]/", "in brackets"),
        ("redis://[::1]6379/", "in brackets"),
        ("redis://ho st/", "no name and no address"),
        ("redis://0.0.0.0/", "nobody can connect"),
        ("unix://path/to/socket", "absolute path"),
        ("redis+sentinel://host", "must name the master"),
        ("redis+other://host", "+sentinel or +cluster"),
        ("host:6379", "must look like redis://"),
        ("http://host/", "must look like redis://"),
        ("", "is empty"),
        (" ", "is empty"),
        ("redis://me:secret#1@host/", "'#' as %23"),
        ("redis://me:secret/1@host/", "'/' as %2F"),
        ("redis://me:secret?1@host/", "'?' as %3F"),
        ("redis://:secret/@host/", "'/' as %2F"),
        ("redis://me:secret:host/", "in brackets"),
        ("redis://me:%ff@host/", "password that is not UTF-8"),
    ] {
        let why = invalid(url);
        assert!(why.contains(what), "{url}: {why}");
    }
}

#[tokio::test]
async fn an_ipv6_address_stands_in_brackets() {
    let bound = Setup::new()
        .args(&["--bind", "127.0.0.1", "::1"])
        .try_start();
    // Not every machine has IPv6.
    let Ok(server) = bound else { return };
    let url = format!("redis://[::1]:{}/", server.port());
    let _held = hold(&Lockkeeper::open(url).unwrap(), "book", ms(60_000)).await;
}

#[tokio::test]
async fn a_user_without_a_password_is_not_taken_for_the_default_one() {
    let server = Server::start();
    let mut redis = server.connect();
    assert_eq!(
        ask!(
            redis, "ACL", "SETUSER", "locker", "on", "nopass", "~shelf*", "+@all"
        ),
        OK
    );
    let (port, socket) = (server.port(), server.socket());
    for url in [
        format!("redis://locker@127.0.0.1:{port}/"),
        format!("redis://locker:@127.0.0.1:{port}/?protocol=resp3"),
        format!("unix://{}?user=locker", socket.display()),
        format!("unix://locker@{}", socket.display()),
    ] {
        let lockkeeper = Lockkeeper::open(&url).unwrap();
        assert!(
            refused(asked(&lockkeeper).await).starts_with("NOPERM "),
            "{url}"
        );
        assert_eq!(lockkeeper.info("shelf").await, Ok(None), "{url}");
    }
    assert_eq!(
        ask!(redis, "ACL", "SETUSER", "locker", "resetpass", ">secret"),
        OK
    );
    let url = format!("redis://locker@127.0.0.1:{port}/");
    assert!(refused(asked_at(&url).await).starts_with("WRONGPASS "));
    assert_eq!(
        ask!(
            redis,
            "ACL",
            "SETUSER",
            "locker",
            "resetpass",
            ">a/b?c#d@e:f%g h"
        ),
        OK
    );
    for url in [
        format!("redis://locker:a%2Fb%3Fc%23d%40e:f%25g%20h@127.0.0.1:{port}/"),
        format!(
            "unix://{}?user=locker&pass=a/b?c%23d@e:f%25g+h",
            socket.display()
        ),
    ] {
        let lockkeeper = Lockkeeper::open(&url).unwrap();
        assert_eq!(lockkeeper.info("shelf").await, Ok(None), "{url}");
    }
}

#[tokio::test]
async fn a_refused_login_is_told_in_the_words_of_the_server() {
    let server = Server::start();
    assert_eq!(
        ask!(server.connect(), "CONFIG", "SET", "requirepass", "right"),
        OK
    );
    let port = server.port();
    for (url, words) in [
        (format!("redis://:secret@127.0.0.1:{port}/"), "WRONGPASS "),
        (format!("redis://:secret@127.0.0.1:{port}/3"), "WRONGPASS "),
        (
            format!("redis://me:secret@127.0.0.1:{port}/?protocol=3"),
            "WRONGPASS ",
        ),
        (
            format!("redis+cluster://:secret@127.0.0.1:{port}"),
            "WRONGPASS ",
        ),
        (format!("redis://127.0.0.1:{port}/"), "NOAUTH "),
        (format!("redis://127.0.0.1:{port}/3"), "NOAUTH "),
    ] {
        let line = refused(asked_at(&url).await);
        assert!(
            line.starts_with(words) && !line.contains("secret"),
            "{line}"
        );
    }
    let open = Server::start();
    let url = format!("redis://:secret@127.0.0.1:{}/", open.port());
    let line = refused(asked_at(&url).await);
    assert!(line.contains("without any password configured"), "{line}");
}

#[tokio::test]
async fn a_server_without_the_module_is_named_with_what_to_do() {
    let server = Setup::new().without_module().start();
    let port = server.port();
    for url in [
        format!("redis://127.0.0.1:{port}/"),
        format!("redis+cluster://127.0.0.1:{port}"),
    ] {
        let line = refused(asked_at(&url).await);
        assert!(
            line.starts_with("ERR unknown command 'LOCK.INFO'"),
            "{line}"
        );
        let address = format!("not loaded at 127.0.0.1:{port};");
        assert!(
            line.contains(&address) && line.contains("loadmodule"),
            "{line}"
        );
        assert!(!line.contains("book"), "{line}");
    }
}

#[tokio::test]
async fn a_server_that_closes_at_once_is_heard_first() {
    let server = Server::with(&["--maxclients", "1"]);
    let _only = server.connect();
    let says = unreachable(asked_at(&server.url()).await);
    let address = format!("127.0.0.1:{}: ", server.port());
    assert_eq!(says, address + "ERR max number of clients reached");
}

/// The address that this machine is known by to others.
fn address_in_the_network() -> Option<String> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    // Sends nothing: the kernel only looks up which way it would go.
    socket.connect("192.0.2.1:9").ok()?;
    let address = socket.local_addr().ok()?.ip();
    (!address.is_loopback()).then(|| address.to_string())
}

#[tokio::test]
async fn protected_mode_is_told_as_the_server_tells_it() {
    let Some(address) = address_in_the_network() else {
        eprintln!("not tried: this machine has no address but loopback");
        return;
    };
    let server = Server::with(&["--bind", "0.0.0.0"]);
    let url = format!("redis://{address}:{}/", server.port());
    let line = refused(asked_at(&url).await);
    assert!(
        line.starts_with("DENIED ") && line.contains("protected mode"),
        "{line}"
    );
}

#[tokio::test]
async fn who_cannot_be_reached_is_named() {
    let mut server = Server::start();
    let port = server.port();
    let socket = server.socket().display().to_string();
    server.kill9();
    for (url, named) in [
        (
            format!("redis://127.0.0.1:{port}/"),
            format!("127.0.0.1:{port}: "),
        ),
        (format!("redis://[::1]:{port}/"), format!("::1:{port}: ")),
        (format!("unix://{socket}.no"), format!("{socket}.no: ")),
        (
            format!("redis+sentinel://127.0.0.1:{port}/library"),
            format!("the sentinel 127.0.0.1:{port}: "),
        ),
    ] {
        let why = unreachable(asked_at(&url).await);
        assert!(why.starts_with(&named), "{why}");
    }
}

#[tokio::test]
async fn a_port_that_speaks_tls_or_does_not_is_told() {
    let dir = TempDir::new().unwrap();
    testkit::tls::certificates(dir.path());
    // Not every server is built with it.
    let Some((server, port)) = testkit::tls::server(dir.path()) else {
        return;
    };
    let why = unreachable(asked_at(&format!("redis://127.0.0.1:{port}/")).await);
    assert_eq!(
        why,
        format!("127.0.0.1:{port}: this port speaks TLS: write rediss:// instead of redis://")
    );
    let port = server.port();
    for url in [
        format!("rediss://127.0.0.1:{port}/"),
        format!("rediss+cluster://127.0.0.1:{port}"),
        format!("rediss+sentinel://127.0.0.1:{port}/library"),
    ] {
        let why = unreachable(asked_at(&url).await);
        let says = format!("127.0.0.1:{port}: this port speaks no TLS: write redis://");
        assert!(why.contains(&says), "{why}");
    }
}

#[test]
fn files_for_tls_that_are_no_pem_are_refused() {
    let dir = TempDir::new().unwrap();
    testkit::tls::certificates(dir.path());
    let read = |name: &str| std::fs::read(dir.path().join(name)).unwrap();
    let builder = || Lockkeeper::builder("rediss://localhost/");
    let why = |builder: lockkeeper::Builder| match builder.open() {
        Err(Error::Invalid(why)) => why,
        other => panic!("{:?}", other.map(|_| ())),
    };
    let no_pem = b"root:x:0:0:root:/root:/bin/bash\n";
    assert!(why(builder().root_ca(no_pem)).starts_with("the CA certificate is not PEM"));
    assert!(why(builder().root_ca("")).starts_with("the CA certificate is not PEM"));
    let (certificate, key) = (read("server.crt"), read("server.key"));
    let says = why(builder().client_certificate(no_pem, key.clone()));
    assert!(
        says.starts_with("the client's certificate is not PEM"),
        "{says}"
    );
    let says = why(builder().client_certificate(certificate, no_pem));
    assert!(says.starts_with("the client's key is not PEM"), "{says}");
    let plain = Lockkeeper::builder("redis://localhost/").root_ca(read("ca.crt"));
    assert!(
        why(plain).contains("must be rediss://"),
        "it would be of no use"
    );
}

/// One sentinel with a password of its own, ended when dropped.
struct Sentinel {
    _dir: TempDir,
    process: Child,
    port: u16,
}

impl Sentinel {
    fn watching(master: &Server, password: &str) -> Sentinel {
        let dir = TempDir::new().unwrap();
        let port = free_port();
        let text = format!(
            "port {port}\nbind 127.0.0.1\ndir {}\nrequirepass {password}\n\
             sentinel monitor library 127.0.0.1 {} 1\nsentinel auth-pass library master-secret\n",
            dir.path().display(),
            master.port(),
        );
        let config = dir.path().join("sentinel.conf");
        std::fs::write(&config, text).unwrap();
        let process = Command::new("redis-server")
            .arg(config)
            .arg("--sentinel")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        eventually("the sentinel is there", || {
            std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        Sentinel {
            _dir: dir,
            process,
            port,
        }
    }
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[tokio::test]
async fn sentinels_may_have_a_password_of_their_own() {
    let master = Server::start();
    let password = "master-secret";
    assert_eq!(
        ask!(master.connect(), "CONFIG", "SET", "requirepass", password),
        OK
    );
    let sentinel = Sentinel::watching(&master, "sentinel-secret");
    let port = sentinel.port;
    let url =
        |query: &str| format!("redis+sentinel://:master-secret@127.0.0.1:{port}/library{query}");
    let _held = {
        let url = url("?sentinel_password=sentinel-secret");
        hold(&Lockkeeper::open(url).unwrap(), "book", ms(60_000)).await
    };
    let builder = Lockkeeper::builder(url("")).sentinel_password("sentinel-secret");
    assert!(
        builder
            .open()
            .unwrap()
            .info("book")
            .await
            .unwrap()
            .is_some()
    );

    let at = format!("127.0.0.1:{port}");
    let line = refused(asked_at(&url("")).await);
    assert!(line.starts_with("NOAUTH ") && line.contains(&at), "{line}");
    let line = refused(asked_at(&url("?sentinel_password=no-secret")).await);
    assert!(
        line.starts_with("WRONGPASS ") && line.contains(&at),
        "{line}"
    );
    assert!(!line.contains("secret"), "{line}");
    let other = url("?sentinel_password=sentinel-secret").replace("library", "archive");
    assert_eq!(
        unreachable(asked_at(&other).await),
        format!("the sentinel {at} knows no master 'archive'")
    );
    let wrong = url("?sentinel_password=sentinel-secret").replace("master-secret", "no-secret");
    let line = refused(asked_at(&wrong).await);
    let master_at = format!("(says the master 127.0.0.1:{})", master.port());
    assert!(
        line.starts_with("WRONGPASS ") && line.contains(&master_at),
        "{line}"
    );
}

#[tokio::test]
async fn keys_that_print_are_printed_and_others_escaped() {
    let server = Server::start();
    let lockkeeper = Lockkeeper::open(server.url()).unwrap();
    let shown = async |key: &[u8]| {
        let held = lockkeeper.acquire(key).await.unwrap().unwrap();
        format!("{held:?}")
    };
    assert!(
        shown("straße:日本:हिन्दी".as_bytes())
            .await
            .contains("straße:日本:हिन्दी")
    );
    let hostile = shown("a\x1b[2J\n\u{202e}\u{9b}\"".as_bytes()).await;
    assert!(
        hostile.contains("a\\u{1b}[2J\\n\\u{202e}\\u{9b}\""),
        "{hostile}"
    );
    assert!(shown(b"\xff\xfe").await.contains("\\xff\\xfe"));
}
