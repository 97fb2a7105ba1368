//! `lockkeeper run` and its sisters, with real processes.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Output, Stdio};
use std::time::Instant;

use testkit::client::{calls, ms};
use testkit::{
    OK, PATIENCE, Server, ask, command_line, eventually, fence, lock_value, number, text,
};

use crate::support::{held, is_alive};

/// The command, set up to talk to this server.
fn lockkeeper(server: &Server) -> Command {
    let mut command = bare();
    command.env("REDIS_URL", server.url());
    command
}

fn bare() -> Command {
    let mut command = Command::new(command_line());
    command.env_remove("REDIS_URL").env_remove("REDISCLI_AUTH");
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// `lockkeeper run` with these options after it, split at blanks; then a script for sh.
fn run(server: &Server, options: &str, script: &str) -> Command {
    let mut command = lockkeeper(server);
    command.arg("run").args(options.split_whitespace());
    command.args(["--", "sh", "-c", script]);
    command
}

#[derive(Debug, PartialEq)]
struct Ended {
    code: i32,
    stdout: String,
    stderr: String,
}

fn ended(output: Output) -> Ended {
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    // A death by a signal is shown as its number, negative.
    let code = output
        .status
        .code()
        .unwrap_or_else(|| -output.status.signal().unwrap());
    Ended {
        code,
        stdout: text(output.stdout),
        stderr: text(output.stderr),
    }
}

fn end_of(mut command: Command) -> Ended {
    ended(command.output().unwrap())
}

/// A process of a test, ended with it.
struct Process(Option<Child>);

impl Process {
    fn start(mut command: Command) -> Process {
        Process(Some(command.spawn().unwrap()))
    }

    fn pid(&self) -> i32 {
        self.0.as_ref().unwrap().id() as i32
    }

    fn signal(&self, signal: i32) {
        // SAFETY: a child of this test that nobody has waited for yet.
        assert_eq!(unsafe { libc::kill(self.pid(), signal) }, 0);
    }

    /// The two process ids that its command prints, a line each.
    fn pids(&mut self) -> [i32; 2] {
        let stdout = self.0.as_mut().unwrap().stdout.as_mut().unwrap();
        let mut lines = BufReader::new(stdout).lines();
        std::array::from_fn(|_| lines.next().unwrap().unwrap().trim().parse().unwrap())
    }

    fn end(mut self) -> Ended {
        let mut child = self.0.take().unwrap();
        let start = Instant::now();
        while child.try_wait().unwrap().is_none() {
            if start.elapsed() > PATIENCE {
                child.kill().unwrap();
            }
            std::thread::sleep(ms(2));
        }
        ended(child.wait_with_output().unwrap())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Takes the lock by force, as an administrator in a hurry would.
fn take(server: &Server, key: &str) {
    assert_eq!(ask!(server.connect(), "SET", key, "somebody"), OK);
}

#[test]
fn the_code_of_the_command_is_the_code_of_run() {
    let server = Server::start();
    for code in [0, 1, 42, 255] {
        let done = end_of(run(&server, "job", &format!("exit {code}")));
        assert_eq!((done.code, done.stderr.as_str()), (code, ""));
        assert!(!held(&server, "job"), "released");
    }
    assert_eq!(end_of(run(&server, "job", "kill -TERM $$")).code, 128 + 15);
    assert_eq!(end_of(run(&server, "job", "kill -KILL $$")).code, 128 + 9);
    assert_eq!(calls(&server, "lock.release"), 6);
}

#[test]
fn input_and_output_are_not_touched() {
    let server = Server::start();
    let mut command = run(&server, "job", "cat; echo complaint >&2");
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(b"in\nand out")
        .unwrap();
    let done = ended(child.wait_with_output().unwrap());
    assert_eq!(
        (done.stdout.as_str(), done.stderr.as_str()),
        ("in\nand out", "complaint\n")
    );
}

#[test]
fn the_command_finds_key_owner_and_fence_in_its_environment() {
    let server = Server::start();
    let script = "echo $LOCKKEEPER_FENCE; echo $LOCKKEEPER_OWNER; echo $LOCKKEEPER_KEY; \
                  redis-cli -u $REDIS_URL GET job";
    let done = end_of(run(&server, "--label nightly job", script));
    let lines: Vec<_> = done.stdout.lines().collect();
    assert!(lines[1].starts_with("nightly:"), "{done:?}");
    assert_eq!(lines[2], "job");
    assert_eq!(lines[3], format!("{:0>16}:{}", lines[0], lines[1]));
}

#[test]
fn a_busy_lock_is_waited_for_as_long_as_the_options_say() {
    let server = Server::start();
    let mut redis = server.connect();
    fence(ask!(redis, "LOCK.ACQUIRE", "job", "host:7:abc", 60_000));
    for (options, code) in [
        ("-n job", 75),
        ("--no-wait job", 75),
        ("-w 200ms job", 75),
        ("-n -E 9 job", 9),
    ] {
        let done = end_of(run(&server, options, "echo ran"));
        assert_eq!((done.code, done.stdout.as_str()), (code, ""), "{options}");
        assert!(
            done.stderr
                .starts_with("lockkeeper: job is held by host:7:abc for "),
            "{done:?}"
        );
    }
    let done = end_of(run(&server, "-q -n job", "echo ran"));
    assert_eq!(
        done,
        Ended {
            code: 75,
            stdout: String::new(),
            stderr: String::new()
        }
    );

    let waiting = Process::start(run(&server, "job", "echo ran"));
    eventually("it waits", || {
        testkit::info::<u64>(&mut redis, "lockkeeper", "lockkeeper_waiters") == 1
    });
    assert_eq!(
        ask!(redis, "LOCK.RELEASE", "job", "host:7:abc"),
        testkit::YES
    );
    assert_eq!(
        waiting.end(),
        Ended {
            code: 0,
            stdout: "ran\n".into(),
            stderr: String::new()
        }
    );
}

#[test]
fn a_server_that_is_not_there_or_refuses_is_an_error_at_once() {
    let mut server = Server::start();
    ask!(server.connect(), "LPUSH", "list", "x").unwrap();
    let done = end_of(run(&server, "list", "echo ran"));
    let says = format!("lockkeeper: the server refuses: {}\n", testkit::WRONGTYPE);
    assert_eq!(
        done,
        Ended {
            code: 69,
            stdout: String::new(),
            stderr: says
        }
    );
    server.kill9();
    // Though it would wait without bound for a busy lock.
    let done = end_of(run(&server, "job", "echo ran"));
    assert_eq!(done.code, 69);
    assert!(
        done.stderr.contains("cannot be reached") && done.stdout.is_empty(),
        "{done:?}"
    );
}

#[test]
fn what_cannot_be_executed_has_the_exit_codes_of_shells() {
    let server = Server::start();
    for (program, code) in [("/no/such/program", 127), ("/etc/passwd", 126)] {
        let mut command = lockkeeper(&server);
        let done = end_of({
            command.args(["run", "job", "--", program]);
            command
        });
        assert_eq!(done.code, code, "{done:?}");
        assert!(done.stderr.contains(program), "{done:?}");
        assert!(!held(&server, "job"), "released");
    }
}

#[test]
fn wrong_usage_is_64_and_says_what_is_right() {
    let server = Server::start();
    let wrong = |args: &str| {
        let mut command = lockkeeper(&server);
        command.args(args.split_whitespace());
        let done = end_of(command);
        assert_eq!(done.code, 64, "{args}: {done:?}");
        done.stderr
    };
    wrong("");
    wrong("run job");
    wrong("run -- true");
    wrong("run -n -w 5s job -- true");
    wrong("release job");
    assert!(wrong("run --ttl 5x job -- true").contains("write it like 500ms or 30s"));
    assert!(wrong("run --ttl 5ms job -- true").contains("at least 100ms, got 5ms"));
    assert!(wrong("info --url localhost job").contains("must look like redis://"));
    let says = wrong("info --url redis://me:secret@localhost/ job");
    assert!(
        says.contains("REDIS_URL, REDISCLI_AUTH or a file") && !says.contains("secret"),
        "{says}"
    );
    assert_eq!(calls(&server, "lock.acquire"), 0);
}

#[test]
fn a_password_comes_from_the_environment_or_a_file_and_is_never_shown() {
    let server = Server::start();
    assert_eq!(
        ask!(
            server.connect(),
            "CONFIG",
            "SET",
            "requirepass",
            "open-sesame"
        ),
        OK
    );
    let info = |prepare: &dyn Fn(&mut Command)| {
        let mut command = lockkeeper(&server);
        prepare(command.args(["info", "job"]));
        let done = end_of(command);
        assert!(!format!("{done:?}").contains("sesame"), "{done:?}");
        done.code
    };
    assert_eq!(info(&|_| {}), 69);
    assert_eq!(
        info(&|command| {
            command.env("REDISCLI_AUTH", "open-sesame");
        }),
        1
    );
    assert_eq!(
        info(&|command| {
            command.env("REDISCLI_AUTH", "wrong-sesame");
        }),
        69
    );
    let url = format!("redis://:open-sesame@127.0.0.1:{}/", server.port());
    assert_eq!(
        info(&|command| {
            command.env("REDIS_URL", &url);
        }),
        1
    );
    let wrong = format!("redis://:wrong-sesame@127.0.0.1:{}/", server.port());
    assert_eq!(
        info(&|command| {
            command.env("REDIS_URL", &wrong);
        }),
        69
    );
    let file = server.dir().join("password");
    std::fs::write(&file, "open-sesame\n").unwrap();
    assert_eq!(
        info(&|command| {
            command.arg("--password-file").arg(&file);
        }),
        1
    );
}

#[test]
fn when_the_lock_is_taken_the_whole_pipeline_is_ended() {
    let server = Server::start();
    let script = "sleep 600 & echo $!; sleep 600 & echo $!; wait";
    let mut process = Process::start(run(&server, "--ttl 2s job", script));
    let pids = process.pids();
    assert!(pids.iter().all(|pid| is_alive(*pid)));
    take(&server, "job");
    let done = process.end();
    assert_eq!(done.code, 76);
    assert_eq!(
        done.stderr,
        "lockkeeper: job is lost: another owner holds it\n"
    );
    eventually("all are ended", || !pids.iter().any(|pid| is_alive(*pid)));
    assert_eq!(ask!(server.connect(), "GET", "job"), text("somebody"));
}

#[test]
fn a_loss_wins_over_the_code_of_the_command() {
    let server = Server::start();
    let script = "trap 'exit 0' TERM; while :; do sleep 0.05; done";
    let process = Process::start(run(&server, "--ttl 2s job", script));
    eventually("it runs", || calls(&server, "lock.renew") > 0);
    assert_eq!(ask!(server.connect(), "DEL", "job"), testkit::YES);
    let done = process.end();
    assert_eq!(done.code, 76);
    // The shell of the command may have said something of its own.
    assert!(
        done.stderr
            .ends_with("lockkeeper: job is lost: it is gone from the server\n"),
        "{done:?}"
    );

    let script = format!("redis-cli -p {} DEL job >/dev/null; exit 3", server.port());
    let done = end_of(run(&server, "job", &script));
    assert_eq!(done.code, 76, "also when only the release finds out");
}

#[test]
fn who_does_not_listen_to_sigterm_is_killed_after_the_grace() {
    let server = Server::start();
    let script = "trap '' TERM; while :; do sleep 0.05; done";
    let process = Process::start(run(&server, "--ttl 2s --grace 400ms job", script));
    eventually("it runs", || calls(&server, "lock.renew") > 0);
    take(&server, "job");
    let start = Instant::now();
    assert_eq!(process.end().code, 76);
    assert!(start.elapsed() > ms(350), "{:?}", start.elapsed());
}

#[test]
fn when_the_server_falls_silent_the_command_is_ended_before_the_lease() {
    let server = Server::start();
    let script = "trap 'date +%s%3N; exit 0' TERM; while :; do sleep 0.01; done";
    let process = Process::start(run(&server, "--ttl 1500ms --grace 300ms job", script));
    eventually("it runs", || calls(&server, "lock.renew") > 0);
    let free_at = number(ask!(server.connect(), "PEXPIRETIME", "job"));
    // SAFETY: the server of this test, which runs until the test drops it.
    unsafe { libc::kill(server.pid() as i32, libc::SIGSTOP) };
    let done = process.end();
    // SAFETY: as above.
    unsafe { libc::kill(server.pid() as i32, libc::SIGCONT) };
    assert_eq!(done.code, 76, "{done:?}");
    assert!(
        done.stderr.contains("job is lost: it could not be renewed"),
        "{done:?}"
    );
    let ended_at: i64 = done.stdout.trim().parse().unwrap();
    assert!(ended_at < free_at, "{} ms too late", ended_at - free_at);
}

#[test]
fn a_server_that_dies_ends_the_command_in_time_too() {
    let mut server = Server::start();
    let process = Process::start(run(&server, "--ttl 2s job", "sleep 600"));
    eventually("it runs", || calls(&server, "lock.renew") > 0);
    server.kill9();
    assert_eq!(process.end().code, 76);
}

#[test]
fn signals_are_passed_on() {
    let server = Server::start();
    let process = Process::start(run(&server, "job", "sleep 600"));
    eventually("it runs", || held(&server, "job"));
    process.signal(libc::SIGTERM);
    assert_eq!(process.end().code, -libc::SIGTERM, "as the command does");
    assert!(!held(&server, "job"), "released");

    let script = "trap 'exit 42' USR1; echo ready; while :; do sleep 0.01; done";
    let mut process = Process::start(run(&server, "job", script));
    let mut ready = [0; 6];
    process
        .0
        .as_mut()
        .unwrap()
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut ready)
        .unwrap();
    process.signal(libc::SIGUSR1);
    assert_eq!(process.end().code, 42);
}

#[test]
fn who_is_signalled_while_waiting_leaves_the_queue() {
    let server = Server::start();
    let mut redis = server.connect();
    fence(ask!(redis, "LOCK.ACQUIRE", "job", "holder", 60_000));
    let process = Process::start(run(&server, "job", "echo ran"));
    let mut waiters = || testkit::info::<u64>(&mut redis, "lockkeeper", "lockkeeper_waiters");
    eventually("it waits", || waiters() == 1);
    process.signal(libc::SIGINT);
    let done = process.end();
    assert_eq!((done.code, done.stdout.as_str()), (-libc::SIGINT, ""));
    assert_eq!(waiters(), 0);
}

#[test]
fn when_run_is_killed_the_command_dies_with_it_and_the_lock_ends_by_its_ttl() {
    let server = Server::start();
    let mut command = lockkeeper(&server);
    command.args(["run", "--ttl", "1s", "job", "--", "sleep", "600"]);
    let process = Process::start(command);
    let children = format!("/proc/{0}/task/{0}/children", process.pid());
    let mut child = 0;
    eventually("it runs", || {
        let text = std::fs::read_to_string(&children).unwrap_or_default();
        child = text.trim().parse().unwrap_or(0);
        child != 0
    });
    process.signal(libc::SIGKILL);
    assert_eq!(process.end().code, -9);
    eventually("the command is dead", || !is_alive(child));
    eventually("the lock ends", || !held(&server, "job"));
}

#[test]
fn two_machines_with_skewed_clocks_run_a_short_job_once() {
    let server = Server::start();
    let cron = "-n --at-least 50s minutely";
    let first = end_of(run(&server, cron, "echo ran"));
    assert_eq!((first.code, first.stdout.as_str()), (0, "ran\n"));
    let second = end_of(run(&server, cron, "echo ran"));
    assert_eq!((second.code, second.stdout.as_str()), (75, ""));
    let left = number(ask!(server.connect(), "PTTL", "minutely"));
    assert!((30_000..50_000).contains(&left), "{left}");

    let failed = end_of(run(&server, "-n --at-least 50s other", "exit 1"));
    assert_eq!(failed.code, 1);
    assert!(!held(&server, "other"), "what failed may be tried again");
}

#[test]
fn as_the_first_process_of_a_container_it_reaps_and_forwards() {
    let server = Server::start();
    let script = "for i in 1 2 3; do (sh -c 'exit 0' &); done; trap 'exit 7' TERM; sleep 0.3; \
                  cat /proc/[0-9]*/stat | grep -c ') Z'; echo $PPID; while :; do sleep 0.05; done";
    let program = command_line();
    let mut command = Command::new("unshare");
    command
        .args(["--pid", "--fork", "--kill-child", "--mount-proc"])
        .arg(program);
    command
        .args(["run", "job", "--", "sh", "-c", script])
        .env("REDIS_URL", server.url());
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut process = Process::start(command);
    let stdout = process.0.as_mut().unwrap().stdout.take().unwrap();
    let mut lines = BufReader::new(stdout).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "0", "zombies");
    assert_eq!(
        lines.next().unwrap().unwrap(),
        "1",
        "the parent of the command"
    );
    let children = format!("/proc/{0}/task/{0}/children", process.pid());
    let first: i32 = std::fs::read_to_string(children)
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    // SAFETY: the only child of the process that this test started and still owns.
    assert_eq!(unsafe { libc::kill(first, libc::SIGTERM) }, 0);
    assert_eq!(process.end().code, 7);
    assert!(!held(&server, "job"), "released");
}

/// `lockkeeper run` with these options, at a terminal of its own.
fn at_terminal(server: &Server, options: &str, script: &str) -> Process {
    // Without exec, a shell that forks (Debian's sh does, bash does not) would stand in the
    // foreground as well, and die of the Ctrl-C that is meant for the command.
    let quoted = format!(
        "exec {} run {options} -- sh -c \"{script}\"",
        command_line().display()
    );
    let mut command = Command::new("script");
    command.args(["--quiet", "--return", "--command", &quoted, "/dev/null"]);
    command
        .env("REDIS_URL", server.url())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    Process::start(command)
}

#[test]
fn at_a_terminal_ctrl_c_reaches_the_command_once() {
    let server = Server::start();
    let script = "trap 'echo caught' INT; echo ready; sleep 1; sleep 0.2; exit 5";
    let mut process = at_terminal(&server, "job", script);
    let child = process.0.as_mut().unwrap();
    let mut ready = [0; 7];
    child
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut ready)
        .unwrap();
    assert_eq!(&ready, b"ready\r\n");
    child.stdin.as_mut().unwrap().write_all(b"\x03").unwrap();
    let done = process.end();
    assert_eq!(
        (done.code, done.stdout.matches("caught").count()),
        (5, 1),
        "{done:?}"
    );
    assert!(!held(&server, "job"), "released");
}

#[test]
fn at_a_terminal_a_loss_ends_everything_that_the_command_started() {
    let server = Server::start();
    let script = "sleep 600 & echo \\$!; sleep 600 & echo \\$!; wait";
    let mut process = at_terminal(&server, "--ttl 2s job", script);
    let pids = process.pids();
    take(&server, "job");
    assert_eq!(process.end().code, 76);
    eventually("all are ended", || !pids.iter().any(|pid| is_alive(*pid)));
}

#[test]
fn info_shows_who_holds_it_and_who_waits() {
    let server = Server::start();
    let mut redis = server.connect();
    let info = |code: i32, args: &str| {
        let mut command = lockkeeper(&server);
        let done = end_of({
            command.arg("info").args(args.split_whitespace());
            command
        });
        assert_eq!((done.code, done.stderr.as_str()), (code, ""));
        done.stdout
    };
    assert_eq!(info(1, "job"), "free\n");
    assert_eq!(info(1, "--json job"), "null\n");
    let fence = fence(ask!(redis, "LOCK.ACQUIRE", "job", "host:7:abc", 60_000));
    let waiting = Process::start(run(&server, "--label next job", "true"));
    eventually("it waits", || {
        testkit::info::<u64>(&mut redis, "lockkeeper", "lockkeeper_waiters") == 1
    });
    let shown = info(2, "job");
    for line in [
        "owner   host:7:abc\n".to_owned(),
        format!("fence   {fence}\n"),
        "waiters 1\n     1  next:".to_owned(),
    ] {
        assert!(shown.contains(&line), "{shown}");
    }
    let shown = info(2, "--json job");
    let fields = [
        "\"owner\":\"host:7:abc\"",
        &format!("\"fence\":{fence}"),
        "\"held-ms\":",
        "\"ttl-ms\":",
        "\"waiters\":1",
        "\"waited-ms\":",
    ];
    assert!(fields.iter().all(|field| shown.contains(field)), "{shown}");
    drop(waiting);
    assert_eq!(ask!(redis, "SET", "job", "by-hand"), OK);
    assert_eq!(
        info(0, "job"),
        "owner   by-hand\nttl     none, it never ends by itself\nwaiters 0\n"
    );
}

#[test]
fn release_force_releases_in_the_name_of_the_holder() {
    let server = Server::start();
    let mut redis = server.connect();
    let release = || {
        let mut command = lockkeeper(&server);
        let done = end_of({
            command.args(["release", "--force", "job"]);
            command
        });
        (done.code, done.stderr)
    };
    assert_eq!(release(), (0, "lockkeeper: nobody holds job\n".to_owned()));
    let fence = fence(ask!(redis, "LOCK.ACQUIRE", "job", "host:7:abc", 60_000));
    assert_eq!(
        ask!(redis, "GET", "job"),
        text(lock_value(fence, "host:7:abc"))
    );
    assert_eq!(
        release(),
        (
            0,
            "lockkeeper: released job, which host:7:abc held\n".to_owned()
        )
    );
    assert!(!held(&server, "job"));
    assert_eq!(calls(&server, "lock.release"), 1);
    assert_eq!(calls(&server, "del"), 0);
}

#[test]
fn help_and_the_manual_pages_are_built_in() {
    let help = end_of({
        let mut command = bare();
        command.arg("--help");
        command
    });
    assert_eq!((help.code, help.stderr.as_str()), (0, ""));
    assert!(help.stdout.contains("Usage: lockkeeper") && help.stdout.contains("69 "));
    let pages = tempfile::tempdir().unwrap();
    let man = end_of({
        let mut command = bare();
        command.arg("man").arg(pages.path());
        command
    });
    assert_eq!(man.code, 0, "{}", man.stderr);
    let page = |name: &str| std::fs::read_to_string(pages.path().join(name)).unwrap();
    assert!(page("lockkeeper.1").contains("lockkeeper\\-run(1)"));
    assert!(page("lockkeeper-run.1").contains("at\\-least"));
    let version = end_of({
        let mut command = bare();
        command.arg("--version");
        command
    });
    assert_eq!(
        version.stdout,
        format!("lockkeeper {}\n", env!("CARGO_PKG_VERSION"))
    );
}
