//! The command that runs under the lock, and all that it starts.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::libc;
use nix::sys::prctl;
use nix::sys::signal::Signal as Named;
use nix::unistd::{getpid, getppid, getsid};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitOptions, kill_process, kill_process_group,
    pidfd_open, pidfd_send_signal, wait, waitid,
};

use crate::process_tree::{Id, Process, State, descendants};
use crate::signals::{Inherited, asks_to_end, is_job_control, is_stop};

/// How often one scans for processes that were started since the last scan, before what was found
/// is killed. Two find all of a usual tree; a chain of processes, each of which starts the next and
/// ends, has new ones every time.
const MOST_SCANS_TO_STOP: u32 = 20;

/// How often one scans for children that were left to us, one scan being some ten microseconds.
const MOST_SCANS_OF_CHILDREN: u32 = 500;

/// With a terminal the command must stay in our process group, or it could not read from it and
/// Ctrl-C would not reach it. Without one it gets a group of its own, so that a signal meant for
/// our group reaches it once, through us.
///
/// Whatever the command starts stays below us, in whatever session or group: an orphan becomes our
/// child, since we are a child subreaper. So all has ended when we have no child left.
///
/// Where /proc cannot be read, or is that of other processes, only the command and its group can be
/// reached; at a terminal, where it has none, the command alone.
pub struct Child {
    pid: Pid,
    has_terminal: bool,
    is_session_leader: bool,
    /// Our children before the command was started: a shell may have started them and then become
    /// us, as in `exec lockkeeper run … > >(logger)`. They are none of the command's.
    excluded: Vec<Id>,
    /// Whether there were any, also such that /proc does not show.
    had_children: bool,
    status: Option<Status>,
    /// The command was stopped by a signal of job control, and nobody has asked yet.
    stopped: bool,
    /// The signals that came to us.
    received: HashSet<i32>,
    /// Whoever got a SIGTERM from us: it is sent once.
    terminated: HashSet<Id>,
    /// A signal that asked for the end was not ours to send to the command.
    out_of_reach: bool,
}

/// How the command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    Exited(u8),
    Killed(i32),
}

/// A process that has got a signal, or was not ours to send one to.
pub struct Sent {
    pub process: Process,
    pub refused: bool,
}

impl Child {
    /// To be called from the main thread: the kernel ends the command with the thread that
    /// started it, not with the process.
    #[allow(unsafe_code)]
    pub fn spawn(mut command: Command, inherited: Inherited) -> io::Result<Child> {
        let has_terminal = File::open("/dev/tty").is_ok();
        if !has_terminal {
            command.process_group(0);
        }
        let had_children = has_children();
        let excluded = if had_children {
            // All are taken, also those whose parent is one of them.
            let found = descendants(processes().unwrap_or_default(), getpid().as_raw(), &[]);
            found.into_iter().map(|process| process.id).collect()
        } else {
            Vec::new()
        };
        prctl::set_child_subreaper(true).map_err(|error| {
            let why = "what it leaves behind could not be ended: no PR_SET_CHILD_SUBREAPER here, as under qemu-user";
            io::Error::other(format!("{why} ({})", error.desc()))
        })?;
        let parent = getpid();
        let before_exec = move || {
            prctl::set_pdeathsig(Named::SIGKILL)?;
            if getppid() != parent {
                return Err(io::Error::from(Errno::SRCH));
            }
            inherited.restore()
        };
        // SAFETY: between fork and exec it only makes system calls, and allocates nothing.
        unsafe { command.pre_exec(before_exec) };
        let child = command.spawn()?;
        Ok(Child {
            pid: Pid::from_child(&child),
            has_terminal,
            is_session_leader: getsid(None) == Ok(parent),
            excluded,
            had_children,
            status: None,
            stopped: false,
            received: HashSet::new(),
            terminated: HashSet::new(),
            out_of_reach: false,
        })
    }

    pub fn status(&self) -> Option<Status> {
        self.status
    }

    /// Whether the command ended because it was done, so that what it left was left on purpose.
    pub fn chose_to_end(&self) -> bool {
        matches!(self.status, Some(Status::Exited(_))) && !self.was_asked_to_end()
    }

    /// Whether a signal that came to us asked for the end.
    pub fn was_asked_to_end(&self) -> bool {
        self.received.iter().any(|signal| asks_to_end(*signal))
    }

    /// Whether this signal came to us, so that the command may have got it from us.
    pub fn received(&self, signal: i32) -> bool {
        self.received.contains(&signal)
    }

    /// Whether the command was to get a signal to end and could not be sent one.
    pub fn is_out_of_reach(&self) -> bool {
        self.out_of_reach
    }

    /// Whether the command was stopped since the last question, by job control at our terminal.
    pub fn was_stopped(&mut self) -> bool {
        std::mem::take(&mut self.stopped) && self.has_terminal && self.status.is_none()
    }

    /// Reaps all that have ended: several may have, though one SIGCHLD came.
    pub fn reap(&mut self) {
        loop {
            match wait(WaitOptions::NOHANG | WaitOptions::UNTRACED) {
                Ok(Some((pid, status))) if pid == self.pid => {
                    if let Some(signal) = status.stopping_signal() {
                        self.stopped = is_stop(signal);
                    } else if let Some(signal) = status.terminating_signal() {
                        self.status = Some(Status::Killed(signal));
                    } else if let Some(code) = status.exit_status() {
                        // exit(2) keeps eight bits.
                        self.status = Some(Status::Exited(code as u8));
                    }
                }
                Ok(Some(_)) | Err(Errno::INTR) => {}
                Ok(None) | Err(_) => return,
            }
        }
    }

    /// Whether something of it has not ended. To be asked after `reap`.
    pub fn is_alive(&self) -> bool {
        // The kernel knows, also of what /proc does not show.
        has_children() && (!self.had_children || !self.all().is_empty())
    }

    /// A signal that came to us.
    pub fn pass_on(&mut self, signal: i32, from_terminal: bool) {
        self.received.insert(signal);
        // When a terminal goes away only the leader of its session gets a SIGHUP.
        let only_ours = signal == libc::SIGHUP && self.is_session_leader;
        if from_terminal && self.has_terminal && !only_ours {
            return;
        }
        let named = Signal::from_named_raw(signal);
        match named.filter(|_| asks_to_end(signal) || is_job_control(signal)) {
            Some(signal) => self.signal_all(signal),
            None => self.signal_command(signal),
        }
    }

    /// The others may not know the signal, and would die of it.
    #[allow(unsafe_code)]
    fn signal_command(&self, signal: i32) {
        if self.status.is_none() {
            // SAFETY: of memory it touches none. The process is our child, which is not reaped yet,
            // so that its id is not another's.
            unsafe { libc::kill(self.pid.as_raw_pid(), signal) };
        }
    }

    /// To the command and all that it has started.
    pub fn signal_all(&mut self, signal: Signal) {
        let sent = self.send_all(signal, &HashSet::new());
        let ends = asks_to_end(signal.as_raw());
        for Sent { process, refused } in sent {
            if ends && refused && process.id.pid == self.pid.as_raw_pid() {
                self.out_of_reach = true;
            }
            if signal == Signal::TERM {
                self.terminated.insert(process.id);
            }
        }
    }

    /// SIGTERM to whatever has not got one from us yet.
    pub fn terminate(&mut self) {
        let terminated = std::mem::take(&mut self.terminated);
        let sent = self.send_all(Signal::TERM, &terminated);
        self.terminated = terminated;
        self.terminated
            .extend(sent.iter().map(|sent| sent.process.id));
    }

    /// SIGKILL to all there is. They are stopped before: who runs on while others are killed could
    /// start new processes in their places, faster than they are found.
    pub fn kill(&mut self) -> Vec<Sent> {
        let mut stopped = HashSet::new();
        for _ in 0..MOST_SCANS_TO_STOP {
            let sent = self.send_all(Signal::STOP, &stopped);
            if sent.is_empty() {
                break;
            }
            stopped.extend(sent.iter().map(|sent| sent.process.id));
        }
        let sent = self.send_all(Signal::KILL, &HashSet::new());
        self.kill_children();
        sent
    }

    /// Whoever ends before it is found leaves its children to us, and those are found at once.
    fn kill_children(&mut self) {
        if ourselves().is_none() {
            return;
        }
        for _ in 0..MOST_SCANS_OF_CHILDREN {
            self.reap();
            // Not in every kernel; it is the main thread that orphans are given to.
            let children = std::fs::read_to_string("/proc/thread-self/children");
            let children = children.unwrap_or_default();
            let pids = children.split_ascii_whitespace().flat_map(str::parse);
            let pids =
                pids.filter(|pid| !self.excluded.iter().any(|excluded| excluded.pid == *pid));
            let mut found = false;
            for pid in pids.filter_map(Pid::from_raw) {
                found = true;
                // Only we can reap it, so its id is not another's.
                let _ = kill_process(pid, Signal::KILL);
            }
            if !found {
                return;
            }
        }
    }

    fn send_all(&self, signal: Signal, but: &HashSet<Id>) -> Vec<Sent> {
        let mut all = self.all();
        all.retain(|process| !but.contains(&process.id));
        let sent = all.into_iter().map(|process| {
            let refused = self.send(&process, signal) == Err(Errno::PERM);
            // A process that is stopped cannot end; SIGKILL needs no help.
            if asks_to_end(signal.as_raw()) && process.state == State::Stopped {
                let _ = self.send(&process, Signal::CONT);
            }
            Sent { process, refused }
        });
        sent.collect()
    }

    fn send(&self, process: &Process, signal: Signal) -> Result<(), Errno> {
        if !process.is_seen() && self.has_group() {
            return kill_process_group(self.pid, signal);
        }
        if process.id.pid == self.pid.as_raw_pid() && self.status.is_none() {
            // Our child, which is not reaped yet: its id is not another's, whatever /proc shows.
            return kill_process(self.pid, signal);
        }
        send(&process.id, signal)
    }

    /// The command and all that it has started, as /proc shows it; without it, the command alone,
    /// which stands for its group too.
    fn all(&self) -> Vec<Process> {
        match processes() {
            Some(all) => descendants(all, getpid().as_raw(), &self.excluded),
            None if self.status.is_none() || self.has_group() => {
                vec![Process::unseen(self.pid.as_raw_pid())]
            }
            None => Vec::new(),
        }
    }

    /// Whether the command has a group of its own, in which a child of ours is left. While there is
    /// one, the number of the group is not another's.
    fn has_group(&self) -> bool {
        !self.has_terminal && has_children_in(WaitId::Pgid(Some(self.pid)))
    }
}

fn has_children() -> bool {
    has_children_in(WaitId::All)
}

fn has_children_in(these: WaitId<'_>) -> bool {
    let without_reaping = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    !matches!(waitid(these, without_reaping), Err(Errno::CHILD))
}

/// None if /proc is not there, cannot be read, or is that of another pid namespace: there we have
/// another number, and ours are other processes'.
fn ourselves() -> Option<Id> {
    let shown = Process::parse(&std::fs::read("/proc/self/stat").ok()?)?.id;
    (shown.pid == getpid().as_raw()).then_some(shown)
}

/// All processes that can be seen. None if one cannot see.
fn processes() -> Option<Vec<Process>> {
    let ours = ourselves()?;
    let entries = std::fs::read_dir("/proc").ok()?.flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let all: Vec<Process> = pids.filter_map(process).collect();
    // With one descriptor too few, the listing can be read but none of its files.
    all.iter().any(|it| it.id == ours).then_some(all)
}

fn process(pid: i32) -> Option<Process> {
    Process::parse(&std::fs::read(format!("/proc/{pid}/stat")).ok()?)
}

/// The user that a process works for.
pub fn user_of(process: &Process) -> Option<u32> {
    let folder = std::fs::metadata(format!("/proc/{}", process.id.pid));
    folder.ok().map(|folder| folder.uid())
}

/// A signal to this very process; that it has ended is no error.
fn send(id: &Id, signal: Signal) -> Result<(), Errno> {
    let Some(pid) = Pid::from_raw(id.pid) else {
        return Ok(());
    };
    // What is open cannot become another process; that it is the right one is checked after.
    let open = pidfd_open(pid, PidfdFlags::empty());
    if process(id.pid).is_none_or(|now| now.id != *id) {
        return Ok(());
    }
    let sent = match open {
        Ok(open) => pidfd_send_signal(open, signal),
        Err(Errno::SRCH) => Ok(()),
        // Before Linux 5.3, and where a filter forbids it.
        Err(_) => kill_process(pid, signal),
    };
    match sent {
        Err(Errno::SRCH) => Ok(()),
        sent => sent,
    }
}
