//! Signals reach the command as they would without `run`, and none ends `run` with its lock held.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::Command;
use std::time::Instant;

use testkit::client::{calls, ms};
use testkit::{Server, YES, ask, command_line, eventually, fence};

use crate::support::{
    self, Running, assert_nothing_left, at_terminal, held, is_alive, key, processes_of, run, state,
    without_terminal,
};

/// With these signals ignored and those blocked when it starts.
fn with(mut command: Command, ignored: &'static [i32], blocked: &'static [i32]) -> Command {
    // SAFETY: between fork and exec it makes system calls only, and the set is its own.
    unsafe {
        command.pre_exec(move || {
            for signal in ignored {
                libc::signal(*signal, libc::SIG_IGN);
            }
            let mut set = std::mem::zeroed();
            for signal in blocked {
                libc::sigaddset(&mut set, *signal);
            }
            libc::sigprocmask(libc::SIG_SETMASK, &set, std::ptr::null_mut());
            Ok(())
        })
    };
    command
}

/// A command that says "got n" for each signal n that reaches it, and ends when it reads a line.
const HEARS_ALL: &str = "for n in {1..31} {34..64}; do trap \"echo got $n\" $n; done; echo ready; \
     while :; do read -r -t 0.02 x && exit 5; done";

#[test]
fn the_command_inherits_what_the_caller_ignores_and_blocks() {
    let server = Server::start();
    let signals = |command: Command| {
        let ignored = &[
            libc::SIGHUP,
            libc::SIGPIPE,
            libc::SIGCHLD,
            libc::SIGUSR2,
            40,
        ];
        let command = with(command, ignored, &[libc::SIGTERM, libc::SIGWINCH, 50]);
        let ended = Running::start(command).end();
        assert_eq!((ended.code(), ended.stderr.as_str()), (0, ""));
        let lines = ended.stdout.lines();
        let lines = lines.filter(|line| line.starts_with("Sig") && !line.starts_with("SigQ"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let mut alone = Command::new("cat");
    alone.arg("/proc/self/status");
    let alone = signals(without_terminal(&server, alone));
    assert_eq!(alone.len(), 4, "{alone:?}");
    assert_eq!(
        signals(run(&server, "job", &["cat", "/proc/self/status"])),
        alone
    );
}

#[test]
fn started_with_sigchld_ignored_it_ends_with_the_command() {
    let server = Server::start();
    let start = |command| Running::start(with(command, &[libc::SIGCHLD], &[]));
    let ended = start(run(&server, "job", &["sh", "-c", "exit 3"])).end();
    assert_eq!(ended.code(), 3, "{ended:?}");
    let mut running = start(run(
        &server,
        "job",
        &["sh", "-c", "echo ready; exec sleep 600"],
    ));
    assert_eq!(running.line(), "ready");
    running.signal(libc::SIGTERM);
    assert_eq!(running.end().code(), -libc::SIGTERM);
    assert!(!held(&server, "job"), "released");
}

/// As nohup does, and as a shell does for what it starts with `&`.
#[test]
fn what_the_caller_ignores_ends_neither_run_nor_the_command() {
    let server = Server::start();
    let ignored = &[libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, 40];
    let command = run(&server, "job", &["sh", "-c", "echo ready; read x; exit 3"]);
    let mut running = Running::start(with(command, ignored, &[]));
    assert_eq!(running.line(), "ready");
    for signal in ignored {
        running.signal(*signal);
    }
    // Whatever they would do is done when a signal that comes later has done something.
    running.write(b"go\n");
    assert_eq!(running.end().code(), 3);

    let mut redis = server.connect();
    fence(ask!(redis, "LOCK.ACQUIRE", "job", "holder", 60_000));
    let waiting = Running::start(with(run(&server, "job", &["true"]), ignored, &[]));
    let mut waiters = || testkit::info::<u64>(&mut redis, "lockkeeper", "lockkeeper_waiters");
    eventually("it waits", || waiters() == 1);
    for signal in ignored {
        waiting.signal(*signal);
    }
    assert_eq!(ask!(server.connect(), "LOCK.RELEASE", "job", "holder"), YES);
    assert_eq!(waiting.end().code(), 0);
}

#[test]
fn every_signal_is_passed_on() {
    let server = Server::start();
    let command = run(&server, "job", &["bash", "-c", HEARS_ALL]);
    let mut running = Running::start(command);
    assert_eq!(running.line(), "ready");
    for signal in (1..=31).chain(34..=64) {
        // Two that nobody can handle, and one that is about our own children.
        if ![libc::SIGKILL, libc::SIGSTOP, libc::SIGCHLD].contains(&signal) {
            running.signal(signal);
            let got = format!("got {signal}");
            // Bash hears of its own children, too.
            while running.line() != got {}
        }
    }
    running.write(b"end\n");
    let ended = running.end();
    assert_eq!(ended.code(), 5, "{ended:?}");
    assert!(!held(&server, "job"), "released");
}

#[test]
fn who_is_ended_while_waiting_leaves_the_queue_and_dies_of_the_signal() {
    let server = Server::start();
    let mut redis = server.connect();
    fence(ask!(redis, "LOCK.ACQUIRE", "job", "holder", 600_000));
    let mut waiters = || testkit::info::<u64>(&mut redis, "lockkeeper", "lockkeeper_waiters");
    let named = [
        libc::SIGHUP,
        libc::SIGINT,
        libc::SIGQUIT,
        libc::SIGTERM,
        libc::SIGABRT,
        libc::SIGUSR1,
        libc::SIGALRM,
        libc::SIGPWR,
        libc::SIGVTALRM,
        libc::SIGXCPU,
    ];
    for signal in named.into_iter().chain([34, 50, 64]) {
        let waiting = Running::start(run(&server, "job", &["echo", "ran"]));
        eventually("it waits", || waiters() == 1);
        waiting.signal(signal);
        let ended = waiting.end();
        assert_eq!((ended.code(), ended.stdout.as_str()), (-signal, ""));
        assert!(!ended.status.core_dumped(), "{signal}");
        assert_eq!(waiters(), 0, "{signal}");
    }
}

#[test]
fn who_is_ended_with_the_command_dies_of_the_signal_and_dumps_no_core() {
    let server = Server::start();
    let signals = [
        libc::SIGHUP,
        libc::SIGINT,
        libc::SIGQUIT,
        libc::SIGTERM,
        libc::SIGUSR1,
        libc::SIGABRT,
        40,
    ];
    for signal in signals {
        let mut command = Command::new("bash");
        let script = "ulimit -Sc unlimited; \
                      exec \"$0\" run job -- sh -c 'ulimit -c 0; echo ready; exec sleep 600'";
        command.args(["-c", script]).arg(command_line());
        command.current_dir(server.dir());
        let mut running = Running::start(without_terminal(&server, command));
        assert_eq!(running.line(), "ready");
        running.signal(signal);
        let ended = running.end();
        assert_eq!(ended.code(), -signal, "{ended:?}");
        assert!(!ended.status.core_dumped(), "{signal}");
        assert!(!held(&server, "job"), "released");
    }
}

#[test]
fn ctrl_c_ends_the_loop_of_a_shell() {
    let server = Server::start();
    let script = "for i in 1 2 3; do $RUN job -- sh -c 'echo ready; exec sleep 600'; \
                  echo \"again $?\"; done";
    let mut running = at_terminal(&server, &format!("exec bash -c \"{}\"", quoted(script)));
    assert_eq!(running.line(), "ready");
    running.write(b"\x03");
    let ended = running.end();
    assert!(!ended.stdout.contains("again"), "{ended:?}");
    assert!(!held(&server, "job"), "released");
}

/// For what stands between double quotes.
fn quoted(script: &str) -> String {
    script
        .replace('"', "\\\"")
        .replace("$i", "\\$i")
        .replace("$?", "\\$?")
}

#[test]
fn a_signal_cuts_the_release_short_and_a_second_one_ends_it() {
    let server = Server::start();
    let pause = |signal| {
        // SAFETY: the server of this test, which runs until the test drops it.
        assert_eq!(unsafe { libc::kill(server.pid() as i32, signal) }, 0);
    };
    for signals in [1, 2] {
        // A third of the ttl is how long a release may take otherwise.
        let options = "--ttl 300s job";
        let mut running = Running::start(run(&server, options, &["sh", "-c", "echo $$; read x"]));
        let command = running.read_pid();
        pause(libc::SIGSTOP);
        running.write(b"go\n");
        eventually("the command has ended", || state(command).is_none());
        let start = Instant::now();
        running.signal(libc::SIGTERM);
        if signals == 2 {
            let waiting = format!("/proc/{}/status", running.pid());
            eventually("the first is taken", || {
                let status = std::fs::read_to_string(&waiting).unwrap();
                status.contains("SigPnd:\t0000000000000000")
                    && status.contains("ShdPnd:\t0000000000000000")
            });
            running.signal(libc::SIGINT);
        }
        let ended = running.end();
        let took = start.elapsed();
        pause(libc::SIGCONT);
        let last = if signals == 2 {
            libc::SIGINT
        } else {
            libc::SIGTERM
        };
        assert_eq!(ended.code(), -last, "{ended:?}");
        let says = "lockkeeper: job is not released and ends within 5m: ";
        assert!(ended.stderr.starts_with(says), "{ended:?}");
        assert!(took < ms(10_000), "{took:?}");
        eventually("the server is back", || {
            ask!(server.connect(), "DEL", "job").is_ok()
        });
    }
}

#[test]
fn a_job_that_is_stopped_keeps_its_lock() {
    let server = Server::start();
    let options = "--ttl 2s job";
    let mut running = Running::start(run(
        &server,
        options,
        &["sh", "-c", "echo $$; read x; exit 3"],
    ));
    let command = running.read_pid();
    running.signal(libc::SIGTSTP);
    eventually("the command stops", || state(command) == Some('T'));
    let renewed = calls(&server, "lock.renew");
    eventually("the lock is renewed", || {
        calls(&server, "lock.renew") > renewed + 1
    });
    running.signal(libc::SIGCONT);
    eventually("it goes on", || state(command) != Some('T'));
    running.write(b"go\n");
    assert_eq!(running.end().code(), 3);
}

#[test]
fn at_a_terminal_ctrl_z_stops_run_with_the_command() {
    let server = Server::start();
    let key = key("ctrl-z");
    let script = format!(
        "set -m; $RUN {key} -- sh -c 'sleep 600 & echo $PPID; read x; exit 3'; \
         echo \"stopped $?\"; read x; fg >/dev/null; echo \"ended $?\""
    );
    let quoted = script
        .replace('"', "\\\"")
        .replace("$P", "\\$P")
        .replace("$?", "\\$?");
    let mut running = at_terminal(&server, &format!("exec bash -c \"{quoted}\""));
    let pid = running.read_pid();
    eventually("all run", || processes_of(&key).len() == 2);
    running.write(b"\x1a");
    while !running.line().starts_with("stopped 14") {}
    assert_eq!(state(pid), Some('T'));
    for process in processes_of(&key) {
        assert_eq!(state(process), Some('T'));
    }
    running.write(b"go\n");
    eventually("all go on", || {
        processes_of(&key)
            .into_iter()
            .all(|pid| state(pid) != Some('T'))
    });
    running.write(b"go\n");
    let ended = running.end();
    assert!(ended.stdout.contains("ended 3"), "{ended:?}");
    support::kill_all(&key);
    assert!(!held(&server, &key), "released");
}

/// The kernel sends it, but not for the terminal, and to `run` alone.
#[test]
fn at_a_terminal_an_alarm_of_the_caller_reaches_the_command() {
    let server = Server::start();
    let script = "perl -e 'alarm 1; exec @ARGV' $RUN job -- sleep 10; exit $?";
    let ended = at_terminal(&server, script).end();
    assert_eq!(ended.code(), 128 + libc::SIGALRM, "{ended:?}");
    assert!(!held(&server, "job"), "released");
}

/// Somebody else may have the lock by then.
#[test]
fn what_ctrl_z_has_stopped_does_not_go_on_when_the_lease_is_over() {
    let server = Server::start();
    let key = key("over");
    let command = server.dir().join("command");
    let perl = "$| = 1; $SIG{TERM} = $SIG{CONT} = sub { print \"late\\n\" }; \
                print getppid, \"\\n\"; sleep 1 while 1;";
    std::fs::write(&command, perl).unwrap();
    let script = server.dir().join("script");
    let job = format!(
        "set -m; $RUN --ttl 2s {key} -- perl {}; echo \"stopped $?\"; read x; exit 0",
        command.display()
    );
    std::fs::write(&script, job).unwrap();
    let mut running = at_terminal(&server, &format!("exec bash {}", script.display()));
    let pid = running.read_pid();
    running.write(b"\x1a");
    while !running.line().contains("stopped 14") {}
    eventually("the lock has ended", || !held(&server, &key));
    // `fg` would let the command go on by itself.
    // SAFETY: a process of this test that its shell has not waited for yet.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGCONT) }, 0);
    eventually("run has ended", || !is_alive(pid));
    assert_nothing_left(&key);
    running.write(b"go\n");
    let ended = running.end();
    assert!(!ended.stdout.contains("late"), "{ended:?}");
    assert!(ended.stdout.contains("is lost"), "{ended:?}");
}

/// It asks the server whether it would wait for itself.
#[test]
fn a_nested_run_ends_in_time_whatever_the_server_does() {
    let server = Server::start();
    let pause = |signal| {
        // SAFETY: the server of this test, which runs until the test drops it.
        assert_eq!(unsafe { libc::kill(server.pid() as i32, signal) }, 0);
    };
    pause(libc::SIGSTOP);
    let nested = |options: &str| {
        let mut command = run(&server, options, &["true"]);
        command.env("LOCKKEEPER_OWNER", "somebody");
        (Instant::now(), Running::start(command))
    };
    let (start, waiting) = nested("-w 200ms job");
    let ended = waiting.end();
    let waited = start.elapsed();
    let (start, signalled) = nested("-w 600s job");
    let status = format!("/proc/{}/status", signalled.pid());
    eventually("it takes signals", || {
        std::fs::read_to_string(&status).is_ok_and(|it| it.contains("SigBlk:\tfffffff"))
    });
    signalled.signal(libc::SIGTERM);
    let killed = signalled.end();
    let took = start.elapsed();
    pause(libc::SIGCONT);
    assert!([69, 75].contains(&ended.code()), "{ended:?}");
    assert_eq!(killed.code(), -libc::SIGTERM, "{killed:?}");
    // Without a bound both take two seconds more.
    assert!(waited < ms(2000), "{waited:?}");
    assert!(took < ms(2000), "{took:?}");
}

#[test]
fn when_the_terminal_goes_away_the_job_ends() {
    let server = Server::start();
    for (name, before, after) in [("leader", "exec ", ""), ("shell", "", "; exit $?")] {
        let key = key(name);
        let command = "sh -c 'echo $PPID; sleep 600; echo x'";
        let script = format!("{before}$RUN {key} -- {command}{after}");
        let mut terminal = at_terminal(&server, &script);
        let pid = terminal.read_pid();
        eventually("both run", || processes_of(&key).len() == 2);
        // It holds the other end.
        drop(terminal);
        eventually(format!("run ends, {name}"), || !is_alive(pid));
        assert_nothing_left(&key);
        assert!(!held(&server, &key), "released");
    }
}
