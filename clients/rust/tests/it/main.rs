//! The helper with real servers, a module for each of its subjects.

mod api;
mod closing;
mod examples;
mod faults;
mod holding;
mod log;
mod servers;
mod several;
mod urls;
mod waiting;

use testkit::Server;

/// Stops the server as a machine that hangs, or lets it go on.
fn signal(server: &Server, signal: i32) {
    // SAFETY: signals the server of this test, which runs until the test drops it.
    assert_eq!(unsafe { libc::kill(server.pid() as i32, signal) }, 0);
}

/// How many connections of helpers the server has.
fn connections(server: &Server) -> usize {
    let list: String = redis::cmd("CLIENT")
        .arg("LIST")
        .query(&mut server.connect())
        .unwrap();
    list.matches(" name=lockkeeper:").count()
}
