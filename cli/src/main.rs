//! The command `lockkeeper`: parse, do, and end with a code that a script can tell apart.
#![deny(unsafe_code)]

mod args;
mod child;
mod exit;
mod format;
mod info;
mod process_tree;
mod release;
mod run;
mod signals;
mod waiting;

use args::{Command, Plan};
use exit::Exit;
use signals::Signals;

fn main() -> std::process::ExitCode {
    let done = args::parse().and_then(|plan| {
        // One thread, the main one: the command that it starts is to die with it.
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let runtime = runtime.map_err(|error| Exit::cannot(format!("cannot start: {error}")))?;
        let quiet = plan.quiet;
        let done = runtime.block_on(carry_out(plan));
        done.map(|exit| exit.quietly(quiet))
            .map_err(|exit| exit.quietly(quiet))
    });
    done.unwrap_or_else(|exit| exit).into()
}

async fn carry_out(plan: Plan) -> Result<Exit, Exit> {
    let open = || plan.server.open().map_err(Exit::from);
    match plan.command {
        Command::Run(run) => {
            let signals = Signals::take();
            let signals =
                signals.map_err(|error| Exit::cannot(format!("cannot start: {error}")))?;
            run::run(open()?, run, signals, plan.quiet).await
        }
        Command::Info { key, json } => info::run(open()?, &key, json, plan.quiet).await,
        Command::Release { key, owner } => release::run(open()?, &key, owner).await,
        Command::Man { directory } => args::man(&directory),
        Command::Completions { directory } => args::completions(&directory),
    }
}
