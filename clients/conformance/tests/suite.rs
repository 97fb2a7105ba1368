//! Every scenario, for every helper. `cargo test -p lockkeeper-conformance --test suite -- python::waiting`
//! runs some.

use std::sync::Arc;

use libtest_mimic::{Arguments, Completion, Trial};
use lockkeeper_conformance::{agents, scenarios};

/// How many scenarios run at a time: most of the time they wait.
const AT_A_TIME: usize = 6;

fn main() {
    let mut args = Arguments::from_args();
    args.test_threads = args.test_threads.or(Some(AT_A_TIME));
    let mut trials = Vec::new();
    let kinds = agents::all(env!("CARGO_BIN_EXE_agent-rust"));
    for kind in kinds.into_iter().map(Arc::new) {
        let can = kind.is_here().then(|| kind.start().can());
        for scenario in scenarios::ALL {
            let kind = kind.clone();
            let name = format!("{}::{}", kind.name, scenario.name);
            let mut note = name.clone();
            let left_out = match &can {
                None => {
                    // One note for all of them.
                    kind.name.clone_into(&mut note);
                    Some(format!(
                        "no {}: run `make conformance-needs`",
                        kind.program().display()
                    ))
                }
                Some(can) => {
                    let lacks = |need: &&&str| !can.iter().any(|word| word == **need);
                    let lacks = scenario.needs.iter().find(lacks);
                    lacks.map(|need| format!("the agent cannot {need}"))
                }
            };
            trials.push(Trial::ignorable_test(name, move || {
                let done = match left_out {
                    None => (scenario.run)(&kind).map_err(str::to_owned),
                    Some(why) => Err(why),
                };
                Ok(match done {
                    Ok(()) => Completion::Completed,
                    Err(why) => {
                        testkit::skip(&format!("{note}: {why}"));
                        Completion::ignored_with(why)
                    }
                })
            }));
        }
    }
    libtest_mimic::run(&args, trials).exit();
}
