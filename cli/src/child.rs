//! The command that runs under the lock, and all that it starts.

use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::errno::Errno;
use nix::sys::prctl;
use nix::sys::signal::{SigSet, Signal, kill, killpg};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, getpid, getppid};

use crate::exit::SIGNALLED;

/// With a terminal the command must stay in our process group, or it could not read from it and
/// Ctrl-C would not reach it. Without one it gets a group of its own, so that a signal reaches a
/// whole pipeline and nothing else.
pub struct Child {
    pid: Pid,
    has_terminal: bool,
    ended: Option<u8>,
}

impl Child {
    /// To be called from the main thread: the kernel ends the command with the thread that
    /// started it, not with the process.
    #[allow(unsafe_code)]
    pub fn spawn(mut command: Command, mask: SigSet) -> io::Result<Child> {
        let has_terminal = File::open("/dev/tty").is_ok();
        if !has_terminal {
            command.process_group(0);
        }
        // Whatever the command leaves behind becomes our child, so that it can be found and ended,
        // and so that nothing is left unreaped where we are the first process of a container.
        let _ = prctl::set_child_subreaper(true);
        let parent = getpid();
        let before_exec = move || {
            prctl::set_pdeathsig(Signal::SIGKILL)?;
            if getppid() != parent {
                return Err(io::Error::from(Errno::ESRCH));
            }
            mask.thread_set_mask()?;
            Ok(())
        };
        // SAFETY: between fork and exec it only makes system calls, and allocates nothing.
        unsafe { command.pre_exec(before_exec) };
        let child = command.spawn()?;
        // A process id fits: the kernel counts them in an i32.
        let pid = Pid::from_raw(child.id() as i32);
        Ok(Child {
            pid,
            has_terminal,
            ended: None,
        })
    }

    /// Whether a signal that the terminal sent has reached the command already.
    pub fn has_terminal(&self) -> bool {
        self.has_terminal
    }

    /// Buries all who have died; tells the code of the command once it is among them.
    pub fn reap(&mut self) -> Option<u8> {
        loop {
            match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::Exited(pid, code)) if pid == self.pid => {
                    // exit(2) keeps eight bits.
                    self.ended = Some(code as u8);
                }
                Ok(WaitStatus::Signaled(pid, signal, _)) if pid == self.pid => {
                    self.ended = Some(SIGNALLED + signal as u8);
                }
                Ok(WaitStatus::StillAlive) | Err(Errno::ECHILD) => return self.ended,
                Ok(_) | Err(Errno::EINTR) => {}
                Err(_) => return self.ended,
            }
        }
    }

    /// To the command and, without a terminal, to its whole group.
    pub fn forward(&self, signal: Signal) {
        // That it is gone meanwhile is what the signal was for.
        let _ = match (self.has_terminal, self.ended) {
            (true, None) => kill(self.pid, signal),
            (true, Some(_)) => Ok(()),
            (false, _) => killpg(self.pid, signal),
        };
    }

    /// To the command and everything that it has started.
    pub fn end_all(&self, signal: Signal) {
        self.forward(signal);
        if self.has_terminal {
            for pid in descendants(getpid()) {
                let _ = kill(pid, signal);
            }
        }
    }

    /// Whether something of it is still running.
    pub fn is_alive(&self) -> bool {
        match self.has_terminal {
            true => !descendants(getpid()).is_empty(),
            false => self.ended.is_none() || killpg(self.pid, None).is_ok(),
        }
    }
}

/// All that descend from a process, as /proc tells at this moment.
fn descendants(ancestor: Pid) -> Vec<Pid> {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let parents: Vec<(Pid, Pid)> = processes
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
            // The name, in brackets, may contain anything; after it come state and parent.
            let (_, fields) = stat.rsplit_once(") ")?;
            let mut fields = fields.split(' ');
            if fields.next()? == "Z" {
                return None;
            }
            Some((
                Pid::from_raw(pid),
                Pid::from_raw(fields.next()?.parse().ok()?),
            ))
        })
        .collect();
    let mut found = vec![ancestor];
    let mut next = 0;
    while let Some(&of) = found.get(next) {
        found.extend(
            parents
                .iter()
                .filter(|(_, parent)| *parent == of)
                .map(|(pid, _)| *pid),
        );
        next += 1;
    }
    found.split_off(1)
}
