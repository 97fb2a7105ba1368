//! When the lock is lost or the command is asked to end, all that it has started ends with it.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use testkit::client::ms;
use testkit::{Server, YES, ask, command_line, eventually, number};

use crate::support::{
    Ended, Running, assert_nothing_left, at_terminal, held, is_alive, key, kill_all, processes_of,
    run, state, without_terminal,
};

/// A command that runs under a lock with all that it started, and has printed "ready".
struct Tree {
    server: Server,
    key: String,
    running: Running,
}

impl Tree {
    /// `run` with these options, and a script for bash. No other test has a key that begins so.
    fn start(name: &str, options: &str, script: &str) -> Tree {
        let (server, key) = (Server::start(), key(name));
        let command = run(
            &server,
            &format!("{options} {key}"),
            &["bash", "-c", script],
        );
        Tree::ready(server, key, Running::start(command))
    }

    fn at_terminal(name: &str, options: &str, script: &str) -> Tree {
        let (server, key) = (Server::start(), key(name));
        let script = script.replace('$', "\\$");
        let command = format!("$RUN {options} {key} -- bash -c \"{script}\"; exit $?");
        let running = at_terminal(&server, &command);
        Tree::ready(server, key, running)
    }

    fn ready(server: Server, key: String, mut running: Running) -> Tree {
        assert_eq!(running.line(), "ready", "{key}");
        Tree {
            server,
            key,
            running,
        }
    }

    /// The lock is lost, so that all of it is ended.
    fn end_by_loss(self) -> Ended {
        assert_eq!(ask!(self.server.connect(), "DEL", &self.key), YES);
        let ended = self.running.end();
        assert_nothing_left(&self.key);
        assert_eq!(ended.code(), 76, "{}: {ended:?}", self.key);
        ended
    }

    /// `run` is asked to end, so that all of it is ended, and the lock released after that.
    fn end_by_signal(self) {
        self.running.signal(libc::SIGTERM);
        self.ended_by_signal();
    }

    fn ended_by_signal(self) {
        let ended = self.running.end();
        assert_nothing_left(&self.key);
        assert_eq!(ended.code(), -libc::SIGTERM, "{}: {ended:?}", self.key);
        assert!(!held(&self.server, &self.key), "released");
    }
}

/// What a command can do that takes a process out of its group, its session or its family. Each
/// starts two and prints a line when both run.
const WAYS_OUT: [(&str, &str); 6] = [
    ("plain", "sleep 600 & echo ready; sleep 600"),
    ("session", "setsid -w sleep 600 & echo ready; sleep 600"),
    ("group", "set -m; sleep 600 & echo ready; wait"),
    (
        "daemon",
        "(setsid sh -c 'sleep 600 & exit' &); echo ready; sleep 600",
    ),
    (
        "orphans",
        "(sh -c '(sleep 600 & sleep 600 & exit) & exit' &); echo ready; sleep 600",
    ),
    (
        "stopped",
        "sh -c 'kill -STOP $$; sleep 600' & echo ready; sleep 600",
    ),
];

/// All at once: each waits most of its time.
fn for_all_ways_out(test: impl Fn(&str, &str) + Sync) {
    std::thread::scope(|scope| {
        for (name, script) in WAYS_OUT {
            let test = &test;
            scope.spawn(move || test(name, script));
        }
    });
}

#[test]
fn when_the_lock_is_lost_all_that_the_command_started_ends() {
    for_all_ways_out(|name, script| {
        Tree::start(name, "--ttl 2s", script).end_by_loss();
    });
}

#[test]
fn at_a_terminal_too() {
    for_all_ways_out(|name, script| {
        Tree::at_terminal(&format!("terminal-{name}"), "--ttl 2s", script).end_by_loss();
    });
}

#[test]
fn when_run_is_asked_to_end_all_that_the_command_started_ends() {
    for_all_ways_out(|name, script| {
        Tree::start(&format!("asked-{name}"), "", script).end_by_signal();
    });
}

/// The terminal does not send this signal, and the command has no group of its own there.
#[test]
fn at_a_terminal_what_a_shell_started_ends_with_it() {
    let server = Server::start();
    let key = key("terminal");
    let script = format!(
        "$RUN {key} -- sh -c 'echo $PPID; sleep 600; echo x'; echo \"ended $?\"; read x; exit 0"
    );
    let mut running = at_terminal(&server, &script);
    let pid = running.read_pid();
    eventually("both run", || processes_of(&key).len() == 2);
    // SAFETY: a process of this test that its shell has not waited for yet.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGTERM) }, 0);
    while running.line() != "ended 143" {}
    // While the terminal is there, so that its end is not what ended them.
    assert_nothing_left(&key);
    assert!(!held(&server, &key), "released");
    running.write(b"go\n");
    assert_eq!(running.end().code(), 0);
}

#[test]
fn the_lock_is_released_after_the_last_of_it_has_ended() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    let script = format!(
        "mkfifo {0}; (trap '' TERM; exec 3<>{0}; echo ready; echo $$; read x <&3) & wait",
        fifo.display()
    );
    let mut tree = Tree::start("last", "--grace 600s", &script);
    let shell = tree.running.read_pid();
    tree.running.signal(libc::SIGTERM);
    eventually("the shell has ended", || !is_alive(shell));
    // Every reply after this came later than the end of the shell.
    let mut redis = tree.server.connect();
    let until = Instant::now() + ms(300);
    while Instant::now() < until {
        let is_held = ask!(redis, "EXISTS", &tree.key);
        assert_eq!(is_held, YES, "released too early");
    }
    std::fs::write(&fifo, "go\n").unwrap();
    tree.ended_by_signal();
}

#[test]
fn what_the_command_left_and_ignores_sigterm_is_killed_after_the_grace() {
    let script = "(trap '' TERM; echo ready; while :; do sleep 0.05; done) & wait";
    Tree::start("ignores", "--grace 300ms", script).end_by_signal();
}

#[test]
fn a_command_that_is_asked_to_end_may_take_longer_than_the_grace() {
    let script =
        "trap 'sleep 0.5; echo tidy; exit 3' TERM; echo ready; while :; do sleep 0.05; done";
    let tree = Tree::start("slow", "--grace 100ms", script);
    tree.running.signal(libc::SIGTERM);
    let ended = tree.running.end();
    assert_eq!((ended.code(), ended.stdout.as_str()), (3, "tidy\n"));
}

#[test]
fn a_command_that_ends_by_itself_may_leave_a_daemon() {
    let server = Server::start();
    let key = key("left");
    let script = "setsid sleep 600 >/dev/null 2>&1 & echo $!; exit 4";
    let mut running = Running::start(run(&server, &key, &["sh", "-c", script]));
    let daemon = running.read_pid();
    let ended = running.end();
    let is_left = is_alive(daemon);
    kill_all(&key);
    assert_eq!((ended.code(), ended.stderr.as_str()), (4, ""));
    assert!(is_left);
    assert!(!held(&server, &key), "released");
}

#[test]
fn a_command_that_is_killed_leaves_nothing() {
    let server = Server::start();
    let key = key("killed");
    let script = "setsid sleep 600 >/dev/null 2>&1 & kill -KILL $$";
    let ended = Running::start(run(&server, &key, &["sh", "-c", script])).end();
    assert_nothing_left(&key);
    assert_eq!(ended.code(), 128 + 9, "{ended:?}");
    assert!(!held(&server, &key), "released");
}

#[test]
fn a_process_that_is_stopped_can_tidy_up() {
    let server = Server::start();
    let key = key("stop");
    let script = "trap 'echo tidy; exit 0' TERM; echo $$; kill -STOP $$; sleep 600";
    let options = format!("--ttl 2s --grace 10s {key}");
    let mut running = Running::start(run(&server, &options, &["sh", "-c", script]));
    let command = running.read_pid();
    eventually("it is stopped", || state(command) == Some('T'));
    assert_eq!(ask!(server.connect(), "DEL", &key), YES);
    let ended = running.end();
    assert_eq!((ended.code(), ended.stdout.as_str()), (76, "tidy\n"));
}

/// Each starts the next and ends: there is never one that lives for long.
#[test]
fn who_starts_new_processes_all_the_time_is_ended() {
    let script = "trap '' TERM; next() { next & exit; }; next & echo ready; \
                  exec >/dev/null 2>&1; sleep 600";
    Tree::start("chain", "--ttl 2s --grace 100ms", script).end_by_loss();
}

#[test]
fn orphans_are_reaped_while_the_command_runs() {
    let server = Server::start();
    let key = key("zombies");
    let script = "for i in $(seq 100); do (true & exit); done; echo $PPID; read x";
    let mut running = Running::start(run(&server, &key, &["sh", "-c", script]));
    let pid = running.read_pid();
    assert_eq!(pid, running.pid());
    let children = format!("/proc/{pid}/task/{pid}/children");
    eventually("only the command is left", || {
        let children = std::fs::read_to_string(&children).unwrap();
        children.split_whitespace().count() == 1
    });
    running.write(b"go\n");
    assert_eq!(running.end().code(), 0);
}

/// Bash starts the logger and then becomes `lockkeeper`.
#[test]
fn who_was_there_before_the_command_is_spared() {
    let server = Server::start();
    let key = key("logger");
    let log = server.dir().join("output");
    let script = format!(
        "exec \"$0\" run --ttl 2s {key} -- sh -c 'echo ready; sleep 600' \
         > >(trap '' PIPE; while read -r line; do echo \"$line\" >> {0}; done; echo end >> {0})",
        log.display()
    );
    let mut command = Command::new("bash");
    command.args(["-c", &script]).arg(command_line());
    let running = Running::start(without_terminal(&server, command));
    let logged = || std::fs::read_to_string(&log).unwrap_or_default();
    eventually("it runs", || logged() == "ready\n");
    assert_eq!(ask!(server.connect(), "DEL", &key), YES);
    assert_eq!(running.end().code(), 76);
    assert_nothing_left(&key);
    eventually("all of it is logged", || logged() == "ready\nend\n");
}

#[test]
fn whom_we_may_not_signal_is_named_and_the_lock_is_not_released() {
    // SAFETY: it touches no memory.
    if unsafe { libc::geteuid() } != 0 {
        testkit::skip("needs root, to make a program that becomes another user");
        return;
    }
    let server = Server::start();
    // As sudo does: a program that becomes another user, for good.
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    let becomes_root = dir.path().join("setpriv");
    let command = dir.path().join("lockkeeper");
    std::fs::copy("/usr/bin/setpriv", &becomes_root).unwrap();
    std::fs::copy(command_line(), &command).unwrap();
    for (path, mode) in [
        (dir.path(), "755"),
        (&becomes_root, "4755"),
        (&command, "755"),
    ] {
        let done = Command::new("chmod").arg(mode).arg(path).status().unwrap();
        assert!(done.success());
    }
    let script = format!(
        "{} --reuid=0 --regid=0 --clear-groups sleep 600 >/dev/null 2>&1 & echo ready; wait",
        becomes_root.display()
    );
    for lost in [true, false] {
        let key = key(if lost { "theirs" } else { "theirs-asked" });
        let mut unprivileged = Command::new("setpriv");
        unprivileged.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
        unprivileged.arg(&command).arg("run");
        unprivileged.args([
            "--ttl",
            if lost { "2s" } else { "60s" },
            "--grace",
            "300ms",
            &key,
            "--",
        ]);
        unprivileged.args(["sh", "-c", &script]);
        let mut running = Running::start(without_terminal(&server, unprivileged));
        assert_eq!(running.line(), "ready");
        let of_root = || {
            let mut pids = processes_of(&key);
            pids.retain(|pid| {
                let status = std::fs::read_to_string(format!("/proc/{pid}/status"));
                status.is_ok_and(|status| {
                    status.contains("Name:\tsleep\n") && status.contains("Uid:\t0\t0\t")
                })
            });
            pids.first().copied()
        };
        eventually("it is another user's", || of_root().is_some());
        let theirs = of_root().unwrap();
        if lost {
            // At the next renewal, or else the lease ends.
            assert_eq!(ask!(server.connect(), "SET", &key, "somebody"), testkit::OK);
        } else {
            running.signal(libc::SIGTERM);
        }
        let ended = running.end();
        let ran_on = is_alive(theirs);
        let ttl = number(ask!(server.connect(), "PTTL", &key));
        kill_all(&key);
        assert!(ran_on, "else this test sees nothing");
        assert_eq!(ended.code(), 77, "{ended:?}");
        let named = format!("still running: process {theirs} (sleep) of user 0\n");
        assert!(ended.stderr.ends_with(&named), "{ended:?}");
        if lost {
            assert_eq!(
                ask!(server.connect(), "GET", &key),
                testkit::text("somebody")
            );
        } else {
            let says = format!("lockkeeper: {key} is not released and ends within ");
            assert!(ended.stderr.starts_with(&says), "{ended:?}");
            assert!((1..60_000).contains(&ttl), "{ttl}");
        }
    }
}

/// Starts `run` by these arguments, which hide /proc from it. They find the rest in `$0` and `$@`.
fn without_proc(name: &str, hide: &[&str], options: &str, script: &str) -> Tree {
    let (server, key) = (Server::start(), key(name));
    let mut command = Command::new(hide[0]);
    command.args(&hide[1..]).arg(command_line()).arg("run");
    command.args(options.split_whitespace()).arg(&key);
    command.args(["--", "sh", "-c", script]);
    let running = Running::start(without_terminal(&server, command));
    Tree::ready(server, key, running)
}

const NO_PROC: [&str; 5] = [
    "unshare",
    "--mount",
    "sh",
    "-c",
    "umount -l /proc; exec \"$0\" \"$@\"",
];

/// That of the namespace outside, where our numbers are other processes'.
const PROC_OF_OTHERS: [&str; 4] = ["unshare", "--pid", "--fork", "--kill-child"];

#[test]
fn without_proc_the_command_and_its_group_end() {
    // SAFETY: it touches no memory.
    if unsafe { libc::geteuid() } != 0 {
        testkit::skip("needs root, to take /proc away");
        return;
    }
    let script = "sleep 600 & echo ready; sleep 600";
    for (name, hide) in [("none", &NO_PROC[..]), ("others", &PROC_OF_OTHERS)] {
        let name = format!("{name}-lost");
        without_proc(&name, hide, "--ttl 2s", script).end_by_loss();
    }
    without_proc("none-asked", &NO_PROC, "--grace 300ms", script).end_by_signal();
}

#[test]
fn without_proc_what_cannot_be_seen_is_reported() {
    // SAFETY: it touches no memory.
    if unsafe { libc::geteuid() } != 0 {
        testkit::skip("needs root, to take /proc away");
        return;
    }
    let script = "setsid sh -c 'echo ready; exec sleep 600' & wait";
    let tree = without_proc("unseen", &NO_PROC, "--ttl 2s --grace 100ms", script);
    assert_eq!(ask!(tree.server.connect(), "DEL", &tree.key), YES);
    let ended = tree.running.end();
    let left = processes_of(&tree.key).len();
    kill_all(&tree.key);
    assert_eq!((ended.code(), left), (77, 1), "{ended:?}");
    let says = "still running: a process that /proc does not show\n";
    assert!(ended.stderr.ends_with(says), "{ended:?}");
}

/// To read /proc takes some.
#[test]
fn without_descriptors_the_command_and_its_group_end() {
    let script = "sleep 600 & echo ready; sleep 600";
    let tree = Tree::start("descriptors", "", script);
    let pid = tree.running.pid().to_string();
    let mut limit = Command::new("prlimit");
    limit.args(["--pid", &pid, "--nofile=4:4"]);
    assert!(limit.status().unwrap().success());
    tree.end_by_signal();
}

#[test]
fn a_command_that_ends_by_a_real_time_signal_has_ended() {
    let server = Server::start();
    let ended = Running::start(run(&server, "job", &["bash", "-c", "kill -40 $$"])).end();
    assert_eq!(ended.code(), 128 + 40, "{ended:?}");
    assert!(!held(&server, "job"), "released");
}

/// Makes room for a manager, beside what this machine is started with, and starts it; then does
/// what it reads. All that it starts ends with it.
const MANAGER: &str = r#"
    umount --recursive --lazy /sys/fs/cgroup
    mount -t cgroup2 none /sys/fs/cgroup && mount -t tmpfs none /run || exit 99
    group=/sys/fs/cgroup/lockkeeper-test-$RANDOM$RANDOM
    mkdir -p "$group" /run/systemd/system && echo $$ > "$group/cgroup.procs" || exit 99
    /lib/systemd/systemd --user --unit=basic.target >&2 &
    until systemctl --user is-system-running --wait >/dev/null 2>&1; do
        kill -0 $! || exit 99
    done
    echo started
    while read -r line && [ "$line" != end ]; do eval "$line"; echo done; done
    echo $$ > /sys/fs/cgroup/cgroup.procs
    kill $! && wait $!
    find "$group" -depth -type d -exec rmdir {} +
"#;

const UNIT: &str = include_str!("../../systemd/nightly-report.service");

struct Manager(Running);

impl Manager {
    /// None where none can be started.
    fn start(server: &Server, unit: &str) -> Option<Manager> {
        let units = server.dir().join("systemd/user");
        std::fs::create_dir_all(&units).unwrap();
        std::fs::write(units.join("job.service"), unit).unwrap();
        let mut command = Command::new("unshare");
        command.args(["--mount", "--cgroup", "--pid", "--fork", "--kill-child"]);
        command.args([
            "--mount-proc",
            "--propagation",
            "private",
            "bash",
            "-c",
            MANAGER,
        ]);
        command.env("XDG_RUNTIME_DIR", server.dir());
        let mut manager = Manager(Running::start(without_terminal(server, command)));
        (manager.0.try_line()? == "started").then_some(manager)
    }

    fn does(&mut self, line: &str) {
        self.0.write(format!("{line}\n").as_bytes());
        assert_eq!(self.0.line(), "done", "{line}");
    }

    fn end(mut self) {
        self.0.write(b"end\n");
        let ended = self.0.end();
        assert_eq!(ended.code(), 0, "{ended:?}");
    }
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

#[test]
fn the_job_gets_one_sigterm_and_does_not_outlive_a_killed_run() {
    let server = Server::start();
    let (key, output) = (key("unit"), server.dir().join("output"));
    let job = server.dir().join("job");
    // It waits for a second SIGTERM, too. A shell interrupts `wait` for a trap, and nothing else.
    let script = format!(
        "trap 'echo term >> {0}' TERM; setsid sleep 600 & echo ready > {0}; \
         until grep -q term {0}; do sleep 0.05 & wait $!; done; \
         sleep 0.5 & wait $!; echo end >> {0}",
        output.display()
    );
    std::fs::write(&job, script).unwrap();
    let unit = UNIT
        .replace(
            "/usr/local/bin/lockkeeper",
            &command_line().display().to_string(),
        )
        .replace(
            "/usr/local/bin/nightly-report",
            &format!("/bin/sh {}", job.display()),
        )
        .replace(
            "run nightly-report",
            &format!("run --ttl 3s --url {} {key}", server.url()),
        );
    let Some(mut manager) = Manager::start(&server, &unit) else {
        testkit::skip("needs systemd, and root to start one for the test");
        return;
    };
    manager.does("systemctl --user start job");
    eventually("it runs", || read(&output) == "ready\n");
    manager.does("systemctl --user stop job");
    assert_eq!(read(&output), "ready\nterm\nend\n");
    assert_nothing_left(&key);
    assert!(!held(&server, &key), "released");

    std::fs::remove_file(&output).unwrap();
    manager.does("systemctl --user start job");
    eventually("it runs", || read(&output) == "ready\n");
    manager.does("kill -KILL $(systemctl --user show --property MainPID --value job)");
    manager.does("while systemctl --user --quiet is-active job; do :; done");
    eventually("nothing is left", || processes_of(&key).is_empty());
    assert_eq!(read(&output), "ready\n");
    eventually("the lock ends", || !held(&server, &key));
    manager.end();
}
