//! Signals as a queue to read from, with who sent them.

use std::io;

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use tokio::io::unix::AsyncFd;

/// What is passed on to the command.
const FORWARDED: [Signal; 7] = [
    Signal::SIGHUP,
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGTERM,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGALRM,
];

/// How the kernel marks a signal that a terminal caused.
const SI_KERNEL: i32 = 0x80;

pub struct Signals {
    file: AsyncFd<SignalFd>,
    /// What was blocked before, which the command is to have.
    before: SigSet,
}

pub enum Event {
    /// A child has changed its state.
    Child,
    Signal {
        signal: Signal,
        /// The terminal has sent it to everybody in the foreground, the command included.
        from_terminal: bool,
    },
}

impl Signals {
    /// From here on they do not end this process. To be called before any thread is started, since
    /// a thread without the block would be ended by them.
    #[allow(unsafe_code)]
    pub fn take() -> io::Result<Signals> {
        let mut taken: SigSet = FORWARDED.into_iter().collect();
        taken.add(Signal::SIGCHLD);
        let before = taken.thread_swap_mask(nix::sys::signal::SigmaskHow::SIG_BLOCK)?;
        let file = SignalFd::with_flags(&taken, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
        // SAFETY: the file is open, and nobody closes or replaces it while it is registered.
        let file = unsafe { AsyncFd::register(file)? };
        Ok(Signals { file, before })
    }

    pub fn before(&self) -> SigSet {
        self.before
    }

    pub async fn next(&mut self) -> io::Result<Event> {
        loop {
            let mut ready = self.file.readable_mut().await?;
            match ready.get_inner_mut().read_signal()? {
                Some(info) => match Signal::try_from(info.ssi_signo as i32) {
                    Ok(Signal::SIGCHLD) => return Ok(Event::Child),
                    Ok(signal) => {
                        let from_terminal = info.ssi_code == SI_KERNEL;
                        return Ok(Event::Signal {
                            signal,
                            from_terminal,
                        });
                    }
                    Err(_) => {}
                },
                None => ready.clear_ready(),
            }
        }
    }
}
