//! `lockkeeper run`: acquire, run the command, release; and when the lock is lost, end the command
//! before anybody else can have the lock.

use std::ffi::OsStr;
use std::io::{self, IsTerminal};
use std::os::unix::ffi::OsStrExt;
use std::pin::pin;
use std::process::Command;
use std::time::Duration;

use lockkeeper::{Acquired, Held, Lockkeeper, Lost, Released, printable};
use rustix::process::Signal;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::args::{Company, Run, Wait};
use crate::child::{Child, Sent, Status, user_of};
use crate::exit::{CANNOT_EXECUTE, Exit, LOST, NOT_FOUND, SIGNALLED, STILL_RUNNING};
use crate::format::rounded;
use crate::process_tree::Process;
use crate::signals::{Event, Signals, stop_here};
use crate::waiting;

/// How long a SIGKILL may take before who is left gets another: new processes may have been started
/// by those that had not got theirs yet.
const KILL_INTERVAL: Duration = Duration::from_millis(20);

/// How long what was killed may take to end, since the kernel frees its memory first and waits for
/// its disks, before it counts as still running.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// How much before the end of the lease SIGKILL is sent at the latest, if the ttl allows for it;
/// more where there are so many processes that scanning them takes its time.
const KILL_RESERVE: Duration = Duration::from_millis(100);

/// How long a process that is asked to end may take to release what it holds.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// The timers stand still while the machine is suspended: the lease is checked at least that often.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// Of what still runs, so many are named.
const NAMED: usize = 10;

/// One that cannot be named.
const UNSEEN: &str = "a process that /proc does not show";

/// A failure to read the signals, which would leave the command without us.
fn broken(error: io::Error) -> Exit {
    Exit::cannot(format!("cannot read signals: {error}"))
}

pub async fn run(
    lockkeeper: Lockkeeper,
    plan: Run,
    mut signals: Signals,
    quiet: bool,
) -> Result<Exit, Exit> {
    let asked = async {
        let start = Instant::now();
        waiting::refuse_to_wait_for_itself(&lockkeeper, &plan).await?;
        let asked = lockkeeper.acquire(plan.key.as_slice()).ttl(plan.ttl);
        let asked = match plan.company {
            Company::Nobody => asked,
            Company::Limit(limit) => asked.limit(limit),
            Company::Shared => asked.shared(),
        };
        let asked = match plan.wait {
            Wait::No => asked,
            Wait::For(wait) => asked.wait(wait.saturating_sub(start.elapsed())),
            Wait::ForEver => asked.wait_forever(),
        };
        Ok::<Acquired, Exit>(asked.await?)
    };
    let may_report = !quiet && !matches!(plan.wait, Wait::No) && io::stderr().is_terminal();
    let asked = tokio::select! {
        acquired = asked => Ok(acquired?),
        signal = signals.fatal() => Err(signal.map_err(broken)?),
        never = waiting::report(&lockkeeper, &plan), if may_report => match never {},
    };
    let held = match asked {
        Ok(Acquired::Yes(held)) => held,
        Ok(Acquired::Busy) => {
            let message = timeout(CLOSE_TIMEOUT, who_holds(&lockkeeper, &plan.key)).await;
            let message = message.unwrap_or_else(|_| format!("{} is busy", printable(&plan.key)));
            take_back(&lockkeeper, &mut signals).await;
            return Err(Exit::with_message(plan.conflict, message));
        }
        Err(signal) => {
            take_back(&lockkeeper, &mut signals).await;
            return Ok(Exit::killed_by(signal));
        }
    };
    let mut child = match Child::spawn(command(&plan, &held), signals.inherited()) {
        Ok(child) => child,
        Err(error) => {
            let missing = error.kind() == io::ErrorKind::NotFound;
            let code = if missing { NOT_FOUND } else { CANNOT_EXECUTE };
            let exit = Exit::with_message(code, format!("{}: {error}", plan.command[0].display()));
            let _ = until_asked_to_end(&mut signals, false, held.release()).await;
            return Err(exit);
        }
    };
    let ended = work(&held, &mut child, &mut signals, &plan).await;
    match ended {
        Ok(Ended::Itself(status)) => {
            let asked = child.was_asked_to_end();
            let exit = exit_of(status, &child);
            Ok(release(held, &mut signals, asked, exit, status, &plan).await)
        }
        Ok(Ended::Lost(lost)) => Ok(lost_exit(&plan.key, lost)),
        Ok(Ended::Not(left, lost)) => {
            let remaining = held.remaining();
            held.leave();
            Ok(still_running(&plan.key, &left, lost, remaining))
        }
        Err(exit) => {
            // Never let go of the lock while the command still runs.
            child.kill();
            Err(exit)
        }
    }
}

/// What was asked for and is not wanted any more, granted without our knowing, or queued.
async fn take_back(lockkeeper: &Lockkeeper, signals: &mut Signals) {
    tokio::select! {
        _ = lockkeeper.close(CLOSE_TIMEOUT) => {}
        _ = signals.fatal() => {}
    }
}

/// The last of all, until a signal says that it takes too long: after the first, which may have come
/// before (`asked`), it has a moment left, and none after the second.
async fn until_asked_to_end<T>(
    signals: &mut Signals,
    mut asked: bool,
    last: impl Future<Output = T>,
) -> Result<T, Option<i32>> {
    let mut last = pin!(last);
    let mut cut = None;
    let mut until = Instant::now() + CLOSE_TIMEOUT;
    loop {
        tokio::select! {
            done = &mut last => return Ok(done),
            signal = signals.fatal() => match signal {
                Ok(signal) if !asked => {
                    asked = true;
                    cut = Some(signal);
                    until = Instant::now() + CLOSE_TIMEOUT;
                }
                Ok(signal) => return Err(Some(signal)),
                Err(_) => return Err(cut),
            },
            () = sleep_until(until), if asked => return Err(cut),
        }
    }
}

async fn who_holds(lockkeeper: &Lockkeeper, key: &[u8]) -> String {
    let info = lockkeeper.info(key).await.ok().flatten();
    let name = printable(key);
    let Some(info) = info else {
        return format!("{name} is busy");
    };
    match (waiting::holder(&info), waiting::places(&info)) {
        (Some(holder), _) => format!("{name} is held by {holder}"),
        (None, Some(places)) => format!("{name} is busy: {places}"),
        (None, None) => format!("{name} is busy"),
    }
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
    /// The command, because it was done or asked to, and then what it had left.
    Itself(Status),
    /// All of it, since the lock is lost.
    Lost(Lost),
    /// These could not be ended.
    Not(Vec<Process>, Option<Lost>),
}

/// Until the command has ended, and, unless it chose to, all that it started.
async fn work(
    held: &Held,
    child: &mut Child,
    signals: &mut Signals,
    plan: &Run,
) -> Result<Ended, Exit> {
    // Renewals come while two thirds of the ttl are left, so one third is never reached in peace.
    let warning = plan.grace.min(plan.ttl / 3);
    let lost = watch(held, child, signals, warning).await?;
    if let (None, Some(status), true) = (lost, child.status(), child.chose_to_end()) {
        return Ok(Ended::Itself(status));
    }
    let left = end(held, child, signals, plan.grace, warning / 2).await?;
    // It can be lost at the very last, too.
    let lost = lost.or_else(|| held.loss());
    Ok(match (left, lost, child.status()) {
        (None, Some(lost), _) => Ended::Lost(lost),
        (None, None, Some(status)) => Ended::Itself(status),
        (left, lost, _) => Ended::Not(left.unwrap_or_default(), lost),
    })
}

/// Until the command has ended, or cannot be sent a signal, or the lock is lost.
async fn watch(
    held: &Held,
    child: &mut Child,
    signals: &mut Signals,
    warning: Duration,
) -> Result<Option<Lost>, Exit> {
    let mut lost = pin!(held.lost());
    while child.status().is_none() && !child.is_out_of_reach() {
        let quiet = held.remaining().saturating_sub(warning).min(LONGEST_SLEEP);
        if quiet.is_zero() {
            // Before any signal is passed on: a SIGCONT would let go on what stands still.
            return Ok(Some(held.loss().unwrap_or(Lost::Expired)));
        }
        tokio::select! {
            event = signals.next() => on_event(event.map_err(broken)?, held, child)?,
            lost = &mut lost => return Ok(Some(lost)),
            () = sleep(quiet) => {}
        }
    }
    Ok(None)
}

/// Passes signals on, reaps, and stops with the command.
fn on_event(event: Event, held: &Held, child: &mut Child) -> Result<(), Exit> {
    match event {
        Event::Signal {
            signal,
            from_terminal,
        } => child.pass_on(signal, from_terminal),
        Event::Child => {
            child.reap();
            if child.was_stopped() {
                // While we are stopped nobody renews: so nothing of it may go on meanwhile.
                child.signal_all(Signal::STOP);
                stop_here().map_err(broken)?;
                if !held.remaining().is_zero() {
                    child.signal_all(Signal::CONT);
                }
            }
        }
    }
    Ok(())
}

/// SIGTERM for all of it, and SIGKILL for what is left after the grace, or before the lease ends, by
/// `reserve` at most. None if all of it has ended, or else what is left as far as it can be seen.
async fn end(
    held: &Held,
    child: &mut Child,
    signals: &mut Signals,
    grace: Duration,
    reserve: Duration,
) -> Result<Option<Vec<Process>>, Exit> {
    let start = Instant::now();
    // SIGTERM lets go on what is stopped, for which there is no time left.
    if held.loss() == Some(Lost::Expired) {
        return kill(held, child, signals).await;
    }
    child.terminate();
    // To find all and stop all before they are killed takes some such scans.
    let reserve = reserve.min(KILL_RESERVE.max(4 * start.elapsed()));
    while child.is_alive() {
        let lease = match held.loss() {
            None | Some(Lost::Expired) => held.remaining().saturating_sub(reserve),
            // It is another's already, or may be at any moment.
            Some(_) => grace,
        };
        let left = grace.saturating_sub(start.elapsed()).min(lease);
        if left.is_zero() {
            return kill(held, child, signals).await;
        }
        let command_ran = child.status().is_none();
        tokio::select! {
            event = signals.next() => on_event(event.map_err(broken)?, held, child)?,
            () = sleep(left.min(LONGEST_SLEEP)) => {}
        }
        if command_ran && child.status().is_some() {
            // What was started while we scanned.
            child.terminate();
        }
    }
    Ok(None)
}

/// SIGKILL, until nothing is left or it is no use.
async fn kill(
    held: &Held,
    child: &mut Child,
    signals: &mut Signals,
) -> Result<Option<Vec<Process>>, Exit> {
    let give_up_at = Instant::now() + EXIT_TIMEOUT;
    let mut last = Vec::new();
    loop {
        let sent = child.kill();
        child.reap();
        if !child.is_alive() {
            return Ok(None);
        }
        let all_refused = !sent.is_empty() && sent.iter().all(|sent| sent.refused);
        let processes: Vec<Process> = sent
            .into_iter()
            .map(|Sent { process, .. }| process)
            .collect();
        if all_refused || Instant::now() >= give_up_at {
            return Ok(Some(processes));
        }
        // While new ones turn up somebody starts them faster than we scan.
        if processes.iter().all(|process| last.contains(&process.id)) {
            tokio::select! {
                event = signals.next() => on_event(event.map_err(broken)?, held, child)?,
                () = sleep(KILL_INTERVAL) => {}
            }
        }
        last = processes.iter().map(|process| process.id).collect();
    }
}

/// As the command ended; if by a signal that came to us too, then so do we, and the caller sees
/// what it sees without us.
fn exit_of(status: Status, child: &Child) -> Exit {
    match status {
        Status::Exited(code) => Exit::with(code),
        Status::Killed(signal) if child.received(signal) => Exit::killed_by(signal),
        Status::Killed(signal) => Exit::with(SIGNALLED + signal as u8),
    }
}

async fn release(
    held: Held,
    signals: &mut Signals,
    asked: bool,
    exit: Exit,
    status: Status,
    plan: &Run,
) -> Exit {
    // A job that failed may be tried again at once.
    let hold = if status == Status::Exited(0) {
        plan.at_least
    } else {
        Duration::ZERO
    };
    let (name, ttl) = (printable(&plan.key), rounded(plan.ttl));
    match until_asked_to_end(signals, asked, held.release_after(hold)).await {
        Ok(Ok(Released::Yes)) => exit,
        Ok(Ok(Released::Lost(lost))) => lost_exit(&plan.key, lost),
        Ok(Err(error)) => exit.and_message(format!(
            "{name} is not released and ends within {ttl}: {error}"
        )),
        Err(signal) => signal.map_or(exit, Exit::killed_by).and_message(format!(
            "{name} is not released and ends within {ttl}: the server did not answer in time"
        )),
    }
}

fn lost_exit(key: &[u8], lost: Lost) -> Exit {
    Exit::with_message(LOST, format!("{} is lost: {lost}", printable(key)))
}

fn still_running(key: &[u8], left: &[Process], lost: Option<Lost>, remaining: Duration) -> Exit {
    let name = printable(key);
    let lock = match lost {
        Some(lost) => format!("{name} is lost: {lost}"),
        None => format!(
            "{name} is not released and ends within {}",
            rounded(remaining)
        ),
    };
    let mut named: Vec<String> = left.iter().take(NAMED).map(named).collect();
    if left.is_empty() {
        named.push(UNSEEN.to_owned());
    }
    if left.len() > NAMED {
        named.push(format!("{} more", left.len() - NAMED));
    }
    let named = named.join(", ");
    Exit::with_message(STILL_RUNNING, format!("{lock}; still running: {named}"))
}

fn named(process: &Process) -> String {
    if !process.is_seen() {
        return UNSEEN.to_owned();
    }
    let user = user_of(process).map_or(String::new(), |user| format!(" of user {user}"));
    let Process { id, name, .. } = process;
    format!("process {} ({}){user}", id.pid, name.escape_debug())
}
