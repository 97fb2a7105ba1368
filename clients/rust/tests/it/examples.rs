//! The examples do what they say.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Instant;

use testkit::client::ms;
use testkit::{NO, Server, ask, eventually};

/// Builds them anew: a test alone would run those of last time.
fn example(name: &str, server: &Server) -> Command {
    static EXAMPLES: OnceLock<PathBuf> = OnceLock::new();
    let examples = EXAMPLES.get_or_init(|| {
        // This program is target/debug/deps/examples-….
        let program = std::env::current_exe().unwrap();
        let profile = program.parent().unwrap().parent().unwrap();
        // The whole workspace as `make test` does, which has built them so already.
        let mut build = Command::new(env!("CARGO"));
        build
            .args(["build", "--quiet", "--workspace", "--examples"])
            .arg("--target-dir")
            .arg(profile.parent().unwrap())
            .current_dir(env!("CARGO_MANIFEST_DIR"));
        // What cargo tells a test about its package would make build scripts run again.
        for (name, _) in std::env::vars() {
            if name.starts_with("CARGO_MANIFEST_") || name.starts_with("CARGO_PKG_") {
                build.env_remove(name);
            }
        }
        assert!(
            build.status().unwrap().success(),
            "the examples do not build"
        );
        profile.join("examples")
    });
    let mut command = Command::new(examples.join(name));
    command.env("REDIS_URL", server.url());
    command
}

#[test]
fn no_ticket_is_drawn_twice() {
    let server = Server::start();
    let folder = tempfile::tempdir().unwrap();
    let draws: Vec<_> = (0..12)
        .map(|_| {
            let mut draw = example("ticket", &server);
            draw.arg(folder.path().join("tickets"));
            draw.stdout(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    let mut drawn: Vec<u32> = draws
        .into_iter()
        .map(|draw| {
            let output = draw.wait_with_output().unwrap();
            String::from_utf8(output.stdout)
                .unwrap()
                .trim()
                .parse()
                .unwrap()
        })
        .collect();
    drawn.sort();
    assert_eq!(drawn, (1..=12).collect::<Vec<_>>());
}

/// A child that does not outlive its test.
struct Leader(Child);

impl Leader {
    fn start(server: &Server) -> Leader {
        let mut leader = example("leader", server);
        Leader(leader.stdout(Stdio::piped()).spawn().unwrap())
    }

    fn leads(&mut self) -> String {
        let mut line = String::new();
        let output = self.0.stdout.as_mut().unwrap();
        BufReader::new(output).read_line(&mut line).unwrap();
        line
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_next_leads_as_soon_as_the_leader_is_ended() {
    let server = Server::start();
    let mut first = Leader::start(&server);
    assert!(first.leads().starts_with("fence "));
    let mut second = Leader::start(&server);
    eventually("the second waits", || {
        testkit::info::<u64>(&mut server.connect(), "lockkeeper", "lockkeeper_waiters") == 1
    });
    let ended = Instant::now();
    // SAFETY: signals the child of this test, which nobody has waited for yet.
    assert_eq!(unsafe { libc::kill(first.0.id() as i32, libc::SIGINT) }, 0);
    assert!(second.leads().starts_with("fence "));
    assert!(ended.elapsed() < ms(8000), "long before the ttl of 10 s");
    assert!(first.0.wait().unwrap().success());
}

#[test]
fn an_export_that_fails_leaves_no_lock_for_its_ttl() {
    let server = Server::start();
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (folder.path().join("from"), folder.path().join("to"));
    let export = || {
        let output = example("export", &server)
            .args([&from, &to])
            .output()
            .unwrap();
        let dbsize = ask!(server.connect(), "DBSIZE");
        assert_eq!(dbsize, NO, "when it has ended its lock is free");
        (
            output.status.success(),
            String::from_utf8(output.stdout).unwrap(),
        )
    };
    assert_eq!(export(), (false, String::new()), "there is nothing to copy");
    std::fs::write(&from, "books").unwrap();
    assert_eq!(export(), (true, "5 bytes\n".to_owned()));
    assert_eq!(std::fs::read_to_string(&to).unwrap(), "books");
}
