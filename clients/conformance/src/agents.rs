//! The agents there are: the suite runs all scenarios for each, and in chaos all work side by side.

use crate::agent::Kind;

/// `rust` is the agent of this package, whose place only its tests know.
pub fn all(rust: &str) -> Vec<Kind> {
    let mut all = vec![
        Kind::new("rust", rust),
        python("python", "redis", "agent.py"),
        python("python-asyncio", "redis", "agent.py").arg("--asyncio"),
        python("python-valkey", "valkey", "agent.py"),
        Kind::new("go", testkit::target().join("conformance/go/agent")),
    ];
    // Only the nightly run makes its environment.
    all.extend(Some(python("python-gevent", "gevent", "agent_gevent.py")).filter(Kind::is_here));
    all
}

/// In the environment that the Makefile makes, with the helper as it is in this folder.
fn python(name: &'static str, environment: &str, agent: &str) -> Kind {
    let environment = testkit::target().join("conformance").join(environment);
    let helper = testkit::root().join("clients/python");
    Kind::new(name, environment.join("bin/python"))
        .arg(helper.join(agent).display().to_string())
        .env("PYTHONPATH", helper.join("src"))
}
