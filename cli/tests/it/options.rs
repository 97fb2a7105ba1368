//! The command line as people expect it: what they may write, the messages, and the codes.

use std::process::{Command, Stdio};

use testkit::waiting::{join, waiters};
use testkit::{OK, Server, ask, command_line, fence};

#[derive(Debug)]
struct Ended {
    code: i32,
    stdout: String,
    stderr: String,
}

fn end_of(command: &mut Command) -> Ended {
    let output = command.stdin(Stdio::null()).output().unwrap();
    Ended {
        code: output.status.code().unwrap(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

fn at(url: &str) -> Command {
    let mut command = Command::new(command_line());
    command.env_clear().env("REDIS_URL", url);
    command.env("PATH", std::env::var_os("PATH").unwrap());
    command
}

fn lockkeeper(server: &Server, args: &[&str]) -> Ended {
    end_of(at(&server.url()).args(args))
}

#[test]
fn a_number_alone_means_seconds() {
    let server = Server::start();
    let mut redis = server.connect();
    assert_eq!(ask!(redis, "SET", "job", "other"), OK);
    for wait in ["0", "0.1", "1", ".2"] {
        let done = lockkeeper(&server, &["run", "-w", wait, "job", "--", "true"]);
        assert_eq!(done.code, 75, "{wait}: {done:?}");
    }
    assert_eq!(ask!(redis, "DEL", "job"), testkit::YES);
    let args = ["run", "--ttl", "20", "--grace", "1.5", "job", "--"];
    let ask_ttl = format!("redis-cli -u {} PTTL job", server.url());
    let done = lockkeeper(&server, &[&args[..], &["sh", "-c", &ask_ttl]].concat());
    let ttl: u64 = done.stdout.trim().parse().unwrap();
    assert!((10_000..=20_000).contains(&ttl), "{ttl}");
    for wrong in ["", "5 parsecs", "1.2.3", "-1", "."] {
        let wait = format!("--wait={wrong}");
        let done = lockkeeper(&server, &["run", &wait, "job", "--", "true"]);
        assert_eq!(done.code, 64, "{wrong}: {done:?}");
    }
}

#[test]
fn an_empty_key_is_a_variable_that_was_not_set() {
    let server = Server::start();
    for args in [
        &["run", "", "--", "true"][..],
        &["info", ""],
        &["release", "--force", ""],
    ] {
        let done = lockkeeper(&server, args);
        assert_eq!(done.code, 64, "{done:?}");
        assert!(done.stderr.contains("is a variable not set?"), "{done:?}");
    }
}

#[test]
fn a_usage_error_asks_only_for_what_is_missing() {
    let server = Server::start();
    let done = lockkeeper(&server, &["run", "job"]);
    assert_eq!(done.code, 64);
    assert!(!done.stderr.contains("--url"), "{}", done.stderr);
    assert!(done.stderr.contains("-- <COMMAND>"), "{}", done.stderr);
}

#[test]
fn an_empty_url_and_a_password_in_it_are_errors_that_do_not_show_it() {
    for (url, what) in [
        ("", "is empty"),
        ("redis://me:secret#1@host/", "%23"),
        ("redis://me:secret/1@host/", "%2F"),
        ("redis://host/?password=secret", "'password'"),
    ] {
        let done = end_of(at(url).args(["info", "job"]));
        assert_eq!(done.code, 64, "{done:?}");
        assert!(done.stderr.contains(what), "{done:?}");
        assert!(!format!("{done:?}").contains("secret"), "{done:?}");
    }
    for public in [
        "redis://me:secret/1@host/",
        "redis+sentinel://host/library?sentinel_password=secret",
        "unix:///path?pass=secret",
    ] {
        let done = end_of(at("").args(["info", "--url", public, "job"]));
        assert_eq!(done.code, 64, "{done:?}");
        assert!(done.stderr.contains("REDISCLI_AUTH"), "{done:?}");
    }
}

#[test]
fn a_password_that_is_not_utf_8_is_an_error() {
    use std::os::unix::ffi::OsStrExt;
    let password = std::ffi::OsStr::from_bytes(b"caf\xe9");
    let mut info = at("redis://127.0.0.1:1/");
    let done = end_of(info.env("REDISCLI_AUTH", password).args(["info", "job"]));
    assert_eq!(done.code, 64, "{done:?}");
    assert_eq!(done.stderr, "lockkeeper: REDISCLI_AUTH is not UTF-8\n");
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), b"caf\xe9\n").unwrap();
    let mut info = at("redis://127.0.0.1:1/");
    info.args(["info", "--password-file"]);
    let done = end_of(info.arg(file.path()).arg("job"));
    assert_eq!(done.code, 64, "{done:?}");
    let says = "the first line is not UTF-8\n";
    assert!(done.stderr.ends_with(says), "{done:?}");
}

#[test]
fn a_thread_that_cannot_be_started_is_an_error() {
    // SAFETY: it touches no memory.
    if unsafe { libc::geteuid() } != 0 {
        testkit::skip("needs root, whose processes are not counted, to become a user");
        return;
    }
    // Who is not root may not come to where it was built.
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    let copy = dir.path().join("lockkeeper");
    std::fs::copy(command_line(), &copy).unwrap();
    let chmod = Command::new("chmod").arg("755").arg(dir.path()).status();
    assert!(chmod.unwrap().success());
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65533", "--regid=65533", "--clear-groups"]);
    command.args(["bash", "-c", "ulimit -u 1; exec \"$0\" run job -- true"]);
    let done = end_of(command.arg(&copy).env("REDIS_URL", "redis://127.0.0.1:1/"));
    assert_eq!(done.code, 126, "{done:?}");
    let says = "lockkeeper: the watchdog cannot be started: ";
    assert!(done.stderr.starts_with(says), "{done:?}");
}

#[test]
fn the_code_of_info_is_held_free_or_waited_for() {
    let server = Server::start();
    let mut redis = server.connect();
    let code = |args: &[&str]| {
        let done = lockkeeper(&server, &[&["info"], args].concat());
        (done.code, done.stdout + &done.stderr)
    };
    assert_eq!(code(&["job"]), (1, "free\n".to_owned()));
    assert_eq!(code(&["-q", "job"]), (1, String::new()));
    fence(ask!(redis, "LOCK.ACQUIRE", "job", "host:7:abc", 60_000));
    assert_eq!(code(&["-q", "job"]), (0, String::new()));
    assert_eq!(code(&["job"]).0, 0);
    let mut waiting = at(&server.url())
        .args(["run", "job", "--", "true"])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    testkit::eventually("it waits", || {
        testkit::info::<u64>(&mut redis, "lockkeeper", "lockkeeper_waiters") == 1
    });
    assert_eq!(code(&["-q", "job"]), (2, String::new()));
    assert_eq!(code(&["--json", "job"]).0, 2);
    waiting.kill().unwrap();
    waiting.wait().unwrap();
    assert_eq!(
        end_of(at("redis://127.0.0.1:1/").args(["info", "job"])).code,
        69
    );
}

#[test]
fn nobody_who_reads_on_is_no_error_but_a_full_disk_is() {
    let server = Server::start();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut info = at(&server.url());
    let done = end_of_into(info.args(["info", "job"]), writer.into());
    assert_eq!(done, (1, String::new()));
    let full = std::fs::File::create("/dev/full").unwrap();
    let (code, says) = end_of_into(info.arg("--json"), full.into());
    assert_eq!(code, 74);
    assert!(says.contains("cannot write"), "{says}");
}

fn end_of_into(command: &mut Command, stdout: Stdio) -> (i32, String) {
    let child = command.stdout(stdout).stderr(Stdio::piped()).spawn();
    let output = child.unwrap().wait_with_output().unwrap();
    let says = String::from_utf8(output.stderr).unwrap();
    (output.status.code().unwrap(), says)
}

/// Tries it with a bound, since what it must not do is wait.
fn nested(server: &Server, script: &str) -> Ended {
    let keeper = command_line().display();
    let script = script.replace("KEEPER", &format!("timeout 5 {keeper}"));
    lockkeeper(server, &["run", "job", "--", "sh", "-c", &script])
}

#[test]
fn who_would_wait_for_itself_is_refused() {
    let server = Server::start();
    for script in [
        "KEEPER run job -- echo ran",
        "KEEPER run other -- KEEPER run job -- echo ran",
        "KEEPER run -n job -- echo ran",
    ] {
        let done = nested(&server, script);
        assert_eq!((done.code, done.stdout.as_str()), (64, ""), "{done:?}");
        assert_eq!(
            done.stderr,
            "lockkeeper: this command already runs under job, and would wait for itself\n"
        );
    }
    let other = Server::start();
    let elsewhere = format!("KEEPER run --url {} job -- echo ran", other.url());
    let database = format!("KEEPER run --url {}5 job -- echo ran", server.url());
    let lost = format!(
        "redis-cli -u {} DEL job >/dev/null; KEEPER run job -- echo ran",
        server.url()
    );
    for script in ["KEEPER run other -- echo ran", &elsewhere, &database, &lost] {
        let done = nested(&server, script);
        assert_eq!(done.stdout, "ran\n", "{script}: {done:?}");
    }
}

#[test]
fn a_release_that_cannot_be_says_what_can() {
    let server = Server::start();
    let mut redis = server.connect();
    let mut release = |setup: &[&str]| {
        let mut command = redis::Cmd::new();
        for word in setup {
            command.arg(*word);
        }
        assert!(command.query::<redis::Value>(&mut redis).is_ok());
        let done = lockkeeper(&server, &["release", "--force", "job"]);
        assert_eq!(done.code, 69, "{done:?}");
        assert!(done.stderr.contains("DEL"), "{done:?}");
        assert_eq!(
            ask!(redis, "DEL", "job"),
            testkit::YES,
            "nothing is changed"
        );
        done.stderr
    };
    let says = release(&["SET", "job", ""]);
    assert!(says.contains("a token of 0 bytes"), "{says}");
    let says = release(&["SET", "job", &"x".repeat(513)]);
    assert!(says.contains("a token of 513 bytes"), "{says}");
    let says = release(&["HSET", "job", "a", "b"]);
    assert!(says.contains("job is no lock"), "{says}");
    assert_eq!(ask!(redis, "SET", "job", "x".repeat(512)), OK);
    assert_eq!(lockkeeper(&server, &["release", "--force", "job"]).code, 0);
}

#[test]
fn keys_and_owners_are_shown_as_they_print() {
    let server = Server::start();
    let mut redis = server.connect();
    fence(ask!(
        redis,
        "LOCK.ACQUIRE",
        "straße",
        "müller\x1b[2J\n",
        60_000
    ));
    let owner = "müller\\u{1b}[2J\\n";
    let done = lockkeeper(&server, &["run", "-n", "straße", "--", "true"]);
    let says = format!("lockkeeper: straße is held by {owner} for ");
    assert!(done.stderr.starts_with(&says), "{done:?}");
    let done = lockkeeper(&server, &["info", "straße"]);
    assert!(
        done.stdout.contains(&format!("owner   {owner}\n")),
        "{done:?}"
    );
    let done = lockkeeper(&server, &["info", "--json", "straße"]);
    assert!(done.stdout.contains("müller\\u001b[2J\\n"), "{done:?}");
    let done = lockkeeper(&server, &["release", "--force", "straße"]);
    assert_eq!(
        done.stderr,
        format!("lockkeeper: released straße, which {owner} held\n")
    );
}

/// A lock that these hold, with so many words after each ttl.
fn held_by(server: &Server, key: &str, owners: &[&str], company: &[&str]) {
    let mut redis = server.connect();
    for owner in owners {
        fence(ask!(redis, "LOCK.ACQUIRE", key, owner, 60_000, company));
    }
}

#[test]
fn so_many_runs_hold_a_lock_as_its_limit_says() {
    let server = Server::start();
    let run =
        |options: &[&str]| lockkeeper(&server, &[&["run"], options, &["--", "true"]].concat());
    held_by(&server, "pool", &["a"], &["LIMIT", "2"]);
    assert_eq!(run(&["-n", "--limit", "2", "pool"]).code, 0);
    held_by(&server, "pool", &["b"], &["LIMIT", "2"]);
    let done = run(&["-n", "--limit", "2", "pool"]);
    let says = "lockkeeper: pool is busy: 2 of 2 places taken, the first ends in ";
    assert_eq!(done.code, 75);
    assert!(done.stderr.starts_with(says), "{done:?}");
    assert!(done.stderr.ends_with("s at the latest\n"), "{done:?}");

    held_by(&server, "book", &["a", "b"], &["SHARED"]);
    assert_eq!(run(&["-n", "-s", "book"]).code, 0);
    let done = run(&["-n", "book"]);
    let says = "lockkeeper: book is busy: 2 share it, the first ends in ";
    assert_eq!(done.code, 75);
    assert!(done.stderr.starts_with(says), "{done:?}");

    for wrong in [
        &["--limit", "0", "pool"][..],
        &["--limit", "1001", "pool"],
        &["--limit", "2", "--shared", "pool"],
    ] {
        assert_eq!(run(wrong).code, 64, "{wrong:?}");
    }
}

#[test]
fn info_shows_every_holder() {
    let server = Server::start();
    held_by(
        &server,
        "pool",
        &["host:7:abc", "host:8:def"],
        &["LIMIT", "3"],
    );
    let done = lockkeeper(&server, &["info", "pool"]);
    assert_eq!(done.code, 0);
    let lines: Vec<_> = done.stdout.lines().collect();
    assert_eq!(lines[0], "holders 2 of 3");
    for (line, owner) in [(lines[1], "1  host:7:abc"), (lines[2], "2  host:8:def")] {
        let starts = format!("     {owner}, fence 1");
        assert!(
            line.starts_with(&starts) && line.contains(", held "),
            "{line}"
        );
        assert!(line.contains(", ttl "), "{line}");
    }
    assert!(lines[3].starts_with("ttl     5"), "{done:?}");
    assert_eq!(lines[4..], ["waiters 0"]);
    let done = lockkeeper(&server, &["info", "--json", "pool"]);
    for field in [
        "\"owner\":null",
        "\"limit\":3",
        "\"holding\":2",
        "\"owner\":\"host:8:def\"",
    ] {
        assert!(done.stdout.contains(field), "{field}: {done:?}");
    }
}

#[test]
fn a_release_of_one_of_several_says_which() {
    let server = Server::start();
    let release = |more: &[&str]| {
        let done = lockkeeper(&server, &[&["release", "--force", "pool"], more].concat());
        (done.code, done.stderr)
    };
    let says = |code: i32, line: &str| (code, format!("lockkeeper: {line}\n"));
    held_by(&server, "pool", &["a", "b"], &["LIMIT", "3"]);
    let which = "several may hold pool, say with --owner which: a, b";
    assert_eq!(release(&[]), says(64, which));
    assert_eq!(
        release(&["--owner", "a"]),
        says(0, "released pool, which a held")
    );
    assert_eq!(release(&["--owner", "a"]), says(75, "a does not hold pool"));
    // The last of them, too, may have company at any moment.
    let which = "several may hold pool, say with --owner which: b";
    assert_eq!(release(&[]), says(64, which));
    assert_eq!(
        release(&["--owner", "b"]),
        says(0, "released pool, which b held")
    );
    held_by(&server, "pool", &["c"], &[]);
    assert_eq!(release(&["--owner", "b"]), says(75, "b does not hold pool"));
    assert_eq!(
        release(&["--owner", "c"]),
        says(0, "released pool, which c held")
    );
}

#[test]
fn a_run_that_waits_for_a_place_says_how_many_are_taken() {
    let server = Server::start();
    held_by(&server, "pool", &["a", "b"], &["LIMIT", "2"]);
    let shown = at_terminal(&server, "run --limit 2 pool -- true");
    let says = "lockkeeper: waiting for pool, 2 of 2 places taken, the first ends in ";
    assert!(shown.starts_with(says), "{shown}");
    assert!(
        shown.contains(" at the latest, number 1 in the queue\r\n"),
        "{shown}"
    );
}

/// Standard error is a terminal, and what it shows comes back.
fn at_terminal(server: &Server, args: &str) -> String {
    let line = format!("timeout 1 {} {args}", command_line().display());
    let mut command = Command::new("script");
    command.args(["--quiet", "--return", "--command", &line, "/dev/null"]);
    let done = end_of(command.env("REDIS_URL", server.url()));
    done.stdout
}

#[test]
fn at_a_terminal_a_run_that_waits_says_so_once() {
    let server = Server::start();
    let mut redis = server.connect();
    fence(ask!(redis, "LOCK.ACQUIRE", "job", "host:7:abc", 60_000));
    let shown = at_terminal(&server, "run job -- true");
    assert!(
        shown.starts_with("lockkeeper: waiting for job, held by host:7:abc for "),
        "{shown}"
    );
    assert!(shown.contains(", number 1 in the queue\r\n"), "{shown}");
    assert_eq!(shown.matches("waiting for").count(), 1, "{shown}");
    assert_eq!(at_terminal(&server, "run -q job -- true"), "");
    let shown = at_terminal(&server, "run -n job -- true");
    assert!(shown.starts_with("lockkeeper: job is held by"), "{shown}");
    let done = lockkeeper(&server, &["run", "-w", "0.5", "job", "--", "true"]);
    assert!(!done.stderr.contains("waiting"), "no terminal: {done:?}");
    assert_eq!(ask!(redis, "DEL", "job"), testkit::YES);
    assert_eq!(at_terminal(&server, "run job -- true"), "");
}

#[test]
fn certificates_come_from_files_as_for_redis_cli() {
    let dir = tempfile::tempdir().unwrap();
    testkit::tls::certificates(dir.path());
    // Not every server is built with it.
    let Some((server, port)) = testkit::tls::server(dir.path()) else {
        return;
    };
    let info = |args: &str| {
        let mut command = at(&format!("rediss://localhost:{port}/"));
        end_of(
            command
                .current_dir(dir.path())
                .arg("info")
                .args(args.split(' ')),
        )
    };
    assert_eq!(info("job").code, 69, "an authority that nobody knows");
    assert_eq!(info("--cacert ca.crt job").code, 1);
    assert_eq!(info("--insecure job").code, 1);
    assert_eq!(
        ask!(server.connect(), "CONFIG", "SET", "tls-auth-clients", "yes"),
        OK
    );
    assert_eq!(info("--cacert ca.crt job").code, 69);
    let who = "--cert server.crt --key server.key";
    assert_eq!(info(&format!("--cacert ca.crt {who} job")).code, 1);
    assert_eq!(info(&format!("--insecure {who} job")).code, 1);
    for (args, says) in [
        ("--cacert ca.crt --cert server.crt job", "--key <FILE>"),
        ("--cacert ca.crt --key server.key job", "--cert <FILE>"),
        ("--cacert ca.crt --insecure job", "cannot be used with"),
        (
            "--cacert /etc/hostname job",
            "the CA certificate is not PEM",
        ),
        ("--cacert no-such-file job", "no-such-file: "),
    ] {
        let done = info(args);
        assert_eq!(done.code, 64, "{done:?}");
        assert!(done.stderr.contains(says), "{done:?}");
    }
}

#[test]
fn the_manual_page_has_the_dashes_before_the_command() {
    let pages = tempfile::tempdir().unwrap();
    assert_eq!(end_of(at("").arg("man").arg(pages.path())).code, 0);
    let page = std::fs::read_to_string(pages.path().join("lockkeeper-run.1")).unwrap();
    let mut lines = page.lines().skip_while(|line| *line != ".SH SYNOPSIS");
    let synopsis = lines.nth(1).unwrap();
    assert!(synopsis.contains("\\-\\- <\\fICOMMAND\\fR>"), "{synopsis}");
}

#[test]
fn a_release_of_one_of_very_many_leaves_who_waits_in_its_place() {
    let server = Server::start();
    let release = |owner: &str| {
        let done = lockkeeper(&server, &["release", "--force", "--owner", owner, "pool"]);
        (done.code, done.stderr)
    };
    let says = |code: i32, line: &str| (code, format!("lockkeeper: {line}\n"));
    // More than LOCK.INFO lists.
    let owners: Vec<String> = (0..120).map(|number| format!("reader{number}")).collect();
    let owners: Vec<&str> = owners.iter().map(String::as_str).collect();
    held_by(&server, "pool", &owners, &["SHARED"]);
    let writer = join(&server, "pool", "writer");
    assert_eq!(release("writer"), says(75, "writer does not hold pool"));
    assert_eq!(release("nobody"), says(75, "nobody does not hold pool"));
    assert_eq!(waiters(&mut server.connect(), "pool"), 1);
    let released = "released pool, which reader119 held";
    assert_eq!(release("reader119"), says(0, released));
    drop(writer);
}
