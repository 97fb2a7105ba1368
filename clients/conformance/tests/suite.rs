//! Every scenario, for every helper. `cargo test -p lockkeeper-conformance --test suite -- python::waiting`
//! runs some.

use std::sync::Arc;

use libtest_mimic::{Arguments, Completion, Trial};
use lockkeeper_conformance::agent::Kind;
use lockkeeper_conformance::scenarios;

/// How many scenarios run at a time: most of the time they wait.
const AT_A_TIME: usize = 6;

fn agents() -> Vec<Kind> {
    vec![
        Kind::new("rust", env!("CARGO_BIN_EXE_agent-rust")),
        python("python", "redis"),
        python("python-asyncio", "redis").arg("--asyncio"),
        python("python-valkey", "valkey"),
        Kind::new("go", testkit::target().join("conformance/go/agent")),
    ]
}

/// In the environment that the Makefile makes, with the helper as it is in this folder.
fn python(name: &'static str, library: &str) -> Kind {
    let environment = testkit::target().join("conformance").join(library);
    let helper = testkit::root().join("clients/python");
    Kind::new(name, environment.join("bin/python"))
        .arg(helper.join("agent.py").display().to_string())
        .env("PYTHONPATH", helper.join("src"))
}

fn main() {
    let mut args = Arguments::from_args();
    args.test_threads = args.test_threads.or(Some(AT_A_TIME));
    let mut trials = Vec::new();
    for kind in agents().into_iter().map(Arc::new) {
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
