//! `lockkeeper run` as a process that a test starts, reads from, signals and awaits.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::time::Instant;

use testkit::client::ms;
use testkit::{PATIENCE, Server, ask, command_line, eventually};

/// A key that no other test has, so that its processes can be found.
pub fn key(of: &str) -> String {
    format!("{of}-{}", std::process::id())
}

/// `lockkeeper run` with these options after it, split at blanks; then the command.
pub fn run(server: &Server, options: &str, command: &[&str]) -> Command {
    let mut run = Command::new(command_line());
    run.arg("run").args(options.split_whitespace()).arg("--");
    run.args(command);
    without_terminal(server, run)
}

/// With the server in its environment, and a session of its own, which has no terminal. Whoever runs the tests
/// may ignore signals, as a shell does in the background, Python and nohup: the command does not.
pub fn without_terminal(server: &Server, mut command: Command) -> Command {
    command.env_remove("REDISCLI_AUTH");
    command.env("REDIS_URL", server.url());
    // SAFETY: both are system calls that touch no memory.
    unsafe {
        command.pre_exec(|| {
            libc::setsid();
            for signal in 1..=64 {
                libc::signal(signal, libc::SIG_DFL);
            }
            Ok(())
        })
    };
    command
}

/// A script at a terminal of its own. The shell leads the session, unless the script begins with
/// exec. The script finds how to start `run` in `$RUN`.
pub fn at_terminal(server: &Server, script: &str) -> Running {
    let mut command = Command::new("script");
    command.args(["--quiet", "--return", "--command", script, "/dev/null"]);
    command.env("RUN", format!("{} run", command_line().display()));
    command.env("SHELL", "/bin/bash");
    Running::start(without_terminal(server, command))
}

/// A process of a test, killed with it.
pub struct Running {
    child: Child,
    stdin: ChildStdin,
    stdout: ChildStdout,
    /// Read, and not looked at yet.
    unread: Vec<u8>,
}

#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    /// What had not been read before.
    pub stdout: String,
    pub stderr: String,
}

impl Running {
    pub fn start(mut command: Command) -> Running {
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let stdout = child.stdout.take().unwrap();
        for pipe in [
            stdout.as_raw_fd(),
            child.stderr.as_ref().unwrap().as_raw_fd(),
        ] {
            // Whoever is left behind may hold the other end: no test is to wait for that.
            // SAFETY: it touches no memory; the pipe is this test's.
            assert_eq!(
                unsafe { libc::fcntl(pipe, libc::F_SETFL, libc::O_NONBLOCK) },
                0
            );
        }
        Running {
            stdin: child.stdin.take().unwrap(),
            stdout,
            unread: Vec::new(),
            child,
        }
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: a child of this test that nobody has waited for yet.
        assert_eq!(unsafe { libc::kill(self.pid(), signal) }, 0);
    }

    pub fn line(&mut self) -> String {
        let line = self.try_line();
        line.unwrap_or_else(|| panic!("it ended after {:?}", self.unread))
    }

    /// None if there is no more.
    pub fn try_line(&mut self) -> Option<String> {
        let start = Instant::now();
        loop {
            if let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=end).collect();
                return Some(String::from_utf8_lossy(&line).trim_end().to_owned());
            }
            available(&mut self.stdout, &mut self.unread).ok()?;
            assert!(start.elapsed() < PATIENCE, "no line: {:?}", self.unread);
        }
    }

    /// A line that is a process id.
    pub fn read_pid(&mut self) -> i32 {
        let line = self.line();
        line.parse().unwrap_or_else(|_| panic!("no pid: {line:?}"))
    }

    pub fn write(&mut self, bytes: &[u8]) {
        self.stdin.write_all(bytes).unwrap();
        self.stdin.flush().unwrap();
    }

    pub fn end(mut self) -> Ended {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            if start.elapsed() > PATIENCE {
                self.child.kill().unwrap();
            }
            std::thread::sleep(ms(2));
        };
        let (mut stdout, mut stderr) = (std::mem::take(&mut self.unread), Vec::new());
        let _ = available(&mut self.stdout, &mut stdout);
        let _ = available(self.child.stderr.as_mut().unwrap(), &mut stderr);
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Ended {
            status,
            stdout: text(stdout),
            stderr: text(stderr),
        }
    }
}

/// What can be read now, after a moment if that is nothing. An error once there is no more to come.
fn available(pipe: &mut impl Read, to: &mut Vec<u8>) -> std::io::Result<()> {
    match pipe.read_to_end(to) {
        Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::WouldBlock => {
            std::thread::sleep(ms(2));
            Ok(())
        }
        // What a terminal says when the other end is closed.
        Err(error) => Err(error),
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Ended {
    /// The exit code, or the signal as a negative number.
    pub fn code(&self) -> i32 {
        self.status
            .code()
            .unwrap_or_else(|| -self.status.signal().unwrap())
    }
}

/// The letter of its state in /proc, where Z is one that has ended; None if there is none.
pub fn state(pid: i32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

pub fn is_alive(pid: i32) -> bool {
    state(pid).is_some_and(|state| state != 'Z')
}

pub fn held(server: &Server, key: &str) -> bool {
    ask!(server.connect(), "EXISTS", key) == testkit::YES
}

/// All processes that a command under this lock started, by what they have inherited from it.
pub fn processes_of(key: &str) -> Vec<i32> {
    let wanted = format!("LOCKKEEPER_KEY={key}");
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let mut variables = environment.split(|byte| *byte == 0);
        variables.any(|variable| variable == wanted.as_bytes())
    })
    .collect()
}

/// Fails if anything of it is left, and ends it.
#[track_caller]
pub fn assert_nothing_left(key: &str) {
    let left = processes_of(key);
    kill_all(key);
    assert!(left.is_empty(), "still running: {left:?}");
}

pub fn kill_all(key: &str) {
    eventually("all are killed", || {
        let left = processes_of(key);
        for pid in &left {
            // SAFETY: a process of this test; at worst it has ended.
            unsafe { libc::kill(*pid, libc::SIGKILL) };
        }
        left.is_empty()
    });
}
