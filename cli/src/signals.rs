//! Signals as a queue to read from, with who sent them; and what the caller had set.

use std::io;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::libc;
use nix::sys::prctl;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, raise};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use tokio::io::unix::AsyncFd;

/// How the kernel marks a signal that it sent by itself, for a terminal among others.
const SI_KERNEL: i32 = 0x80;

/// A bit for each signal, 1 to 64, that was ignored when this process was started.
static IGNORED: AtomicU64 = AtomicU64::new(0);

/// Before main, because Rust's own start ignores SIGPIPE and so forgets what it was.
#[used]
#[allow(unsafe_code)]
// SAFETY: the C library calls what stands in this section once, before main, as a C function.
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = remember_ignored;

#[allow(unsafe_code)]
extern "C" fn remember_ignored() {
    for signal in 1..=64 {
        let mut action = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: without a new action it only writes the present one, for which there is room.
        let known = unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) } == 0;
        // SAFETY: all zeroes is an action too, and the call wrote over it if it succeeded.
        if known && unsafe { action.assume_init() }.sa_sigaction == libc::SIG_IGN {
            IGNORED.fetch_or(1 << (signal - 1), Ordering::Relaxed);
        }
    }
}

fn was_ignored(signal: i32) -> bool {
    IGNORED.load(Ordering::Relaxed) & 1 << (signal - 1) != 0
}

/// Whether a signal asks a program to end. Passed on to all that the command started.
pub fn asks_to_end(signal: i32) -> bool {
    matches!(
        signal,
        libc::SIGHUP | libc::SIGINT | libc::SIGQUIT | libc::SIGTERM
    )
}

/// Whether a signal stops a process or lets it go on, which is for all or for none.
pub fn is_job_control(signal: i32) -> bool {
    is_stop(signal) || signal == libc::SIGCONT
}

/// Whether a signal of job control stops who does not handle it.
pub fn is_stop(signal: i32) -> bool {
    matches!(signal, libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU)
}

/// Whether a terminal sends this signal. The kernel sends others too, as when a timer ends.
fn is_of_terminals(signal: i32) -> bool {
    is_job_control(signal)
        || matches!(
            signal,
            libc::SIGHUP | libc::SIGINT | libc::SIGQUIT | libc::SIGWINCH
        )
}

/// Whether a signal ends who does not handle it.
fn ends(signal: i32) -> bool {
    !is_job_control(signal) && !matches!(signal, libc::SIGURG | libc::SIGWINCH)
}

pub struct Signals {
    file: AsyncFd<SignalFd>,
    inherited: Inherited,
}

/// What the caller had set, which the command is to have.
#[derive(Clone, Copy)]
pub struct Inherited {
    mask: SigSet,
}

pub enum Event {
    /// A child has changed its state.
    Child,
    Signal {
        /// As the system counts them, real-time signals included.
        signal: i32,
        /// The kernel sent it to everybody in the foreground of a terminal.
        from_terminal: bool,
    },
}

impl Signals {
    /// From here on no signal ends or stops this process, but for SIGKILL and SIGSTOP, which
    /// nobody can handle, faults of its own, and the two that the C library keeps for itself (32
    /// and 33). Those that the caller ignored stay ignored. To be called before any thread is
    /// started, since a thread without the block would be ended by them.
    #[allow(unsafe_code)]
    pub fn take() -> io::Result<Signals> {
        // Ignored, it would make the kernel reap the command, and its end would never be known.
        // SAFETY: it installs no handler.
        if unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) } == libc::SIG_ERR {
            return Err(io::Error::last_os_error());
        }
        let all = SigSet::all();
        let mask = all.thread_swap_mask(SigmaskHow::SIG_SETMASK)?;
        let file = SignalFd::with_flags(&all, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
        // SAFETY: the file is open, and nobody closes or replaces it while it is registered.
        let file = unsafe { AsyncFd::register(file)? };
        let inherited = Inherited { mask };
        Ok(Signals { file, inherited })
    }

    pub fn inherited(&self) -> Inherited {
        self.inherited
    }

    pub async fn next(&mut self) -> io::Result<Event> {
        loop {
            let mut ready = self.file.readable_mut().await?;
            let Some(info) = ready.get_inner_mut().read_signal()? else {
                ready.clear_ready();
                continue;
            };
            let signal = info.ssi_signo as i32;
            if signal == libc::SIGCHLD {
                return Ok(Event::Child);
            }
            // What is ignored and blocked is delivered here all the same.
            if !was_ignored(signal) {
                let from_terminal = info.ssi_code == SI_KERNEL && is_of_terminals(signal);
                return Ok(Event::Signal {
                    signal,
                    from_terminal,
                });
            }
        }
    }

    /// The next one that would end a program which handles none; those that stop it do stop it.
    pub async fn fatal(&mut self) -> io::Result<i32> {
        loop {
            match self.next().await? {
                Event::Signal { signal, .. } if ends(signal) => return Ok(signal),
                Event::Signal { signal, .. } if is_stop(signal) => stop_here()?,
                Event::Signal { .. } | Event::Child => {}
            }
        }
    }
}

/// Stops this process as Ctrl-Z does, and returns when somebody lets it go on. Does nothing where
/// no shell could do that, or if the caller ignores it.
pub fn stop_here() -> io::Result<()> {
    let stop: SigSet = [Signal::SIGTSTP].into_iter().collect();
    raise(Signal::SIGTSTP)?;
    stop.thread_unblock()?;
    stop.thread_block()?;
    Ok(())
}

/// Ends this process by a signal, so that its parent sees it. Returns where that cannot be: the
/// first process of a container does not die of its own signals.
#[allow(unsafe_code)]
pub fn die_of(signal: i32) {
    // Who asked for the end did not ask for a core file.
    let _ = prctl::set_dumpable(false);
    let mut only = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: a signal set has room for itself, and the default action is no handler.
    unsafe {
        libc::sigemptyset(only.as_mut_ptr());
        libc::sigaddset(only.as_mut_ptr(), signal);
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, only.as_ptr(), std::ptr::null_mut());
    }
}

impl Inherited {
    /// For the process that becomes the command: between fork and exec, where only system calls
    /// are allowed.
    #[allow(unsafe_code)]
    pub fn restore(&self) -> io::Result<()> {
        // The two that are not as they were: Rust has changed one, `take` the other.
        for signal in [libc::SIGPIPE, libc::SIGCHLD] {
            let action = if was_ignored(signal) {
                libc::SIG_IGN
            } else {
                libc::SIG_DFL
            };
            // SAFETY: neither action is a handler.
            if unsafe { libc::signal(signal, action) } == libc::SIG_ERR {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(self.mask.thread_set_mask()?)
    }
}
