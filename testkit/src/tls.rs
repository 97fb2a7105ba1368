//! A server that speaks TLS, with an authority of the test's own.

use std::path::Path;
use std::process::Command;

use crate::{Server, Setup, free_port, skip};

/// An authority, and a server's certificate that it signed: `ca.crt`, `server.crt`, `server.key`.
pub fn certificates(dir: &Path) {
    let openssl = |args: &str| {
        let done = Command::new("openssl")
            .args(args.split(' '))
            .current_dir(dir)
            .output()
            .unwrap();
        assert!(
            done.status.success(),
            "{}",
            String::from_utf8_lossy(&done.stderr)
        );
    };
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
    openssl(&format!(
        "req -x509 {key} -days 2 -subj /CN=authority -keyout ca.key -out ca.crt"
    ));
    openssl(&format!(
        "req {key} -subj /CN=server -keyout server.key -out server.csr"
    ));
    std::fs::write(
        dir.join("names"),
        "subjectAltName=DNS:localhost,IP:127.0.0.1",
    )
    .unwrap();
    openssl(
        "x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -extfile names -out server.crt",
    );
}

/// A server with the certificates in `dir`, and its port for TLS; none, which is noted, if it was built
/// without.
#[track_caller]
pub fn server(dir: &Path) -> Option<(Server, u16)> {
    let file = |name: &str| dir.join(name).display().to_string();
    let port = free_port();
    let started = Setup::new()
        .args(&["--tls-port", &port.to_string()])
        .args(&["--tls-auth-clients", "optional"])
        .args(&["--tls-cert-file", &file("server.crt")])
        .args(&["--tls-key-file", &file("server.key")])
        .args(&["--tls-ca-cert-file", &file("ca.crt")])
        .try_start();
    match started {
        Ok(server) => Some((server, port)),
        Err(log) if log.contains("Failed finding TLS support") => {
            skip("the server was built without TLS");
            None
        }
        Err(log) => panic!("{log}"),
    }
}
