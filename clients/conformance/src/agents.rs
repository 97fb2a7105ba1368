//! The agents there are: the suite runs all scenarios for each, and in chaos all work side by side.

use crate::agent::Kind;

/// `rust` is the agent of this package, whose place only its tests know.
pub fn all(rust: &str) -> Vec<Kind> {
    vec![
        Kind::new("rust", rust),
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
