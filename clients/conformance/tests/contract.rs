//! The contract and the scenarios belong together.

use std::collections::BTreeSet;

use lockkeeper_conformance::scenarios;

/// The promises of CONTRACT.md, each with all its lines.
fn promises() -> Vec<String> {
    let page = testkit::root().join("clients/CONTRACT.md");
    let page = std::fs::read_to_string(page).unwrap();
    let mut promises = Vec::new();
    for line in page.lines() {
        if let Some(promise) = line.strip_prefix("- ") {
            promises.push(promise.to_owned());
        } else if let Some(more) = line.strip_prefix("  ") {
            promises.last_mut().unwrap().push_str(more);
        }
    }
    promises
}

/// What stands between backticks and looks as the name of a scenario does.
fn named(promise: &str) -> Vec<&str> {
    let between = promise.split('`').skip(1).step_by(2);
    between.filter(|name| name.contains("::")).collect()
}

#[test]
fn every_promise_names_a_scenario_and_every_scenario_is_named() {
    let promises = promises();
    assert!(promises.len() > 30, "{promises:?}");
    for promise in &promises {
        assert!(!named(promise).is_empty(), "no scenario shows: {promise}");
    }
    let named: BTreeSet<_> = promises.iter().flat_map(|promise| named(promise)).collect();
    let there: BTreeSet<_> = scenarios::ALL
        .iter()
        .map(|scenario| scenario.name)
        .collect();
    assert_eq!(named, there);
}
