//! `lockkeeper run`: acquire, run the command, release; and when the lock is lost, end the command
//! before anybody else can have the lock.

use std::ffi::OsStr;
use std::io::{self, IsTerminal};
use std::os::unix::ffi::OsStrExt;
use std::pin::pin;
use std::process::Command;
use std::time::Duration;

use lockkeeper::{Acquired, Held, Lockkeeper, Lost, Released, printable};
use nix::sys::signal::Signal;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::args::{Run, Wait};
use crate::child::Child;
use crate::exit::{CANNOT_EXECUTE, Exit, LOST, NOT_FOUND, SIGNALLED};
use crate::show::rounded;
use crate::signals::{Event, Signals};
use crate::waiting;

/// How often a look tells whether the last of a group has gone: nobody tells us of grandchildren.
const LOOK: Duration = Duration::from_millis(20);

/// How long a process that got nothing stays to tidy up.
const FAREWELL: Duration = Duration::from_secs(1);

/// The timers stand still while the machine is suspended: look at the lease at least that often.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// What is to be known of the signals: a failure to read them would leave the command alone.
fn broken(error: io::Error) -> Exit {
    Exit::cannot(format!("cannot read signals: {error}"))
}

pub async fn run(
    lockkeeper: Lockkeeper,
    plan: Run,
    mut signals: Signals,
    quiet: bool,
) -> Result<Exit, Exit> {
    waiting::refuse_to_wait_for_itself(&lockkeeper, &plan.key).await?;
    let asked = lockkeeper.acquire(plan.key.as_slice()).ttl(plan.ttl);
    let asked = match plan.wait {
        Wait::No => asked,
        Wait::For(wait) => asked.wait(wait),
        Wait::ForEver => asked.wait_forever(),
    };
    let may_say = !quiet && !matches!(plan.wait, Wait::No) && io::stderr().is_terminal();
    let asked = tokio::select! {
        acquired = asked => Ok(acquired?),
        signal = first_signal(&mut signals) => Err(signal?),
        never = waiting::say(&lockkeeper, &plan), if may_say => match never {},
    };
    let held = match asked {
        Ok(Acquired::Yes(held)) => held,
        Ok(Acquired::Busy) => {
            let says = timeout(FAREWELL, who_holds(&lockkeeper, &plan.key)).await;
            let says = says.unwrap_or_else(|_| format!("{} is busy", printable(&plan.key)));
            take_back(&lockkeeper).await;
            return Err(Exit::saying(plan.conflict, says));
        }
        Err(signal) => {
            take_back(&lockkeeper).await;
            return Ok(Exit::with(SIGNALLED + signal as u8));
        }
    };
    let mut child = match Child::spawn(command(&plan, &held), signals.before()) {
        Ok(child) => child,
        Err(error) => {
            let _ = held.release().await;
            let missing = error.kind() == io::ErrorKind::NotFound;
            let code = if missing { NOT_FOUND } else { CANNOT_EXECUTE };
            return Err(Exit::saying(
                code,
                format!("{}: {error}", plan.command[0].display()),
            ));
        }
    };
    match watch(&held, &mut child, &mut signals, &plan).await {
        Ok(Ended::Itself(code)) => Ok(release(held, code, &plan).await),
        Ok(Ended::ByUs(lost)) => Ok(lost_exit(&plan.key, lost)),
        Err(exit) => {
            // Never let go of the lock while the command still runs.
            child.end_all(Signal::SIGKILL);
            Err(exit)
        }
    }
}

/// What was asked for and is not wanted any more, granted unheard or queued.
async fn take_back(lockkeeper: &Lockkeeper) {
    lockkeeper.close(FAREWELL).await;
}

async fn first_signal(signals: &mut Signals) -> Result<Signal, Exit> {
    loop {
        if let Event::Signal { signal, .. } = signals.next().await.map_err(broken)? {
            return Ok(signal);
        }
    }
}

async fn who_holds(lockkeeper: &Lockkeeper, key: &[u8]) -> String {
    let info = lockkeeper.info(key).await.ok().flatten();
    let holder = info.as_ref().and_then(waiting::holder);
    let name = printable(key);
    holder.map_or_else(
        || format!("{name} is busy"),
        |holder| format!("{name} is held by {holder}"),
    )
}

fn command(plan: &Run, held: &Held) -> Command {
    let mut command = Command::new(&plan.command[0]);
    command
        .args(&plan.command[1..])
        .env("LOCKKEEPER_KEY", OsStr::from_bytes(held.key()))
        .env(waiting::OWNER, held.owner())
        .env("LOCKKEEPER_FENCE", held.fence().to_string())
        .env(waiting::OWNERS, waiting::owners(held.owner()));
    command
}

enum Ended {
    Itself(u8),
    ByUs(Lost),
}

/// Until the command ends, or has to be ended.
async fn watch(
    held: &Held,
    child: &mut Child,
    signals: &mut Signals,
    plan: &Run,
) -> Result<Ended, Exit> {
    // Renewals come while two thirds of the ttl are left, so one third is never reached in peace.
    let warning = plan.grace.min(plan.ttl / 3);
    let mut lost = pin!(held.lost());
    loop {
        let quiet = held.remaining().saturating_sub(warning).min(LONGEST_SLEEP);
        tokio::select! {
            event = signals.next() => {
                if let Some(code) = heed(event.map_err(broken)?, child) {
                    return Ok(Ended::Itself(code));
                }
            }
            lost = &mut lost => {
                end(child, signals, plan.grace).await?;
                return Ok(Ended::ByUs(lost));
            }
            () = sleep(quiet) => {
                let left = held.remaining();
                if left <= warning {
                    end(child, signals, left).await?;
                    return Ok(Ended::ByUs(Lost::Expired));
                }
            }
        }
    }
}

/// Passes a signal on; tells the code of the command if that was its end.
fn heed(event: Event, child: &mut Child) -> Option<u8> {
    match event {
        Event::Child => child.reap(),
        Event::Signal {
            from_terminal: true,
            ..
        } if child.has_terminal() => None,
        Event::Signal { signal, .. } => {
            child.forward(signal);
            None
        }
    }
}

/// SIGTERM for all of it, and SIGKILL for what is left when the time is up.
async fn end(child: &mut Child, signals: &mut Signals, within: Duration) -> Result<(), Exit> {
    child.end_all(Signal::SIGTERM);
    let kill_at = Instant::now() + within;
    while child.is_alive() && Instant::now() < kill_at {
        tokio::select! {
            event = signals.next() => {
                heed(event.map_err(broken)?, child);
            }
            () = sleep_until(kill_at.min(Instant::now() + LOOK)) => {}
        }
    }
    if child.is_alive() {
        child.end_all(Signal::SIGKILL);
    }
    Ok(())
}

async fn release(held: Held, code: u8, plan: &Run) -> Exit {
    // A job that failed may be tried again at once.
    let hold = if code == 0 {
        plan.at_least
    } else {
        Duration::ZERO
    };
    match held.release_after(hold).await {
        Ok(Released::Yes) => Exit::with(code),
        Ok(Released::Lost(lost)) => lost_exit(&plan.key, lost),
        Err(error) => {
            let (name, ttl) = (printable(&plan.key), rounded(plan.ttl));
            Exit::saying(
                code,
                format!("{name} is not released and ends within {ttl}: {error}"),
            )
        }
    }
}

fn lost_exit(key: &[u8], lost: Lost) -> Exit {
    Exit::saying(LOST, format!("{} is lost: {lost}", printable(key)))
}
