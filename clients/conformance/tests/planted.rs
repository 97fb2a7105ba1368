//! The suite itself is tested: an agent with a planted fault does not pass, and the same one without it does.

use std::panic::{AssertUnwindSafe, catch_unwind};

use lockkeeper_conformance::agent::Kind;
use lockkeeper_conformance::scenarios::{self, Scenario};

fn scenario(name: &str) -> &'static Scenario {
    let found = scenarios::ALL.iter().find(|scenario| scenario.name == name);
    found.unwrap_or_else(|| panic!("no scenario {name}"))
}

fn agent() -> Kind {
    Kind::new("faulty", env!("CARGO_BIN_EXE_agent-faulty"))
}

/// The scenario fails because of that fault, and says so.
#[track_caller]
fn is_found_by(fault: &str, name: &str, says: &str) {
    let run = scenario(name).run;
    run(&agent()).expect("it passes without the fault");
    let found = catch_unwind(AssertUnwindSafe(|| run(&agent().arg(fault))));
    let failure = found.expect_err("it passes with the fault");
    let said = failure.downcast_ref::<&str>().map(ToString::to_string);
    let said = said.or_else(|| failure.downcast_ref::<String>().cloned());
    let said = said.expect("a sentence");
    assert!(said.contains(says), "{said}");
}

#[test]
fn that_it_renews_after_the_release_is_found() {
    is_found_by(
        "renews-after-release",
        "releasing::nothing_is_renewed_after_the_release",
        "renewed after its release",
    );
}

#[test]
fn that_it_counts_from_the_reply_is_found() {
    is_found_by(
        "counts-from-the-reply",
        "acquiring::a_slow_reply_is_counted_from_the_send",
        "believed for longer than it lasts",
    );
}

#[test]
fn that_it_retries_a_wait_blindly_is_found() {
    is_found_by(
        "retries-a-wait-blindly",
        "waiting::a_wait_returns_in_time_whatever_the_server_does",
        "returned after",
    );
}

#[test]
fn that_it_skips_the_clean_up_after_a_cancellation_is_found() {
    is_found_by(
        "skips-the-clean-up",
        "cancelling::a_cancelled_request_that_arrives_late_leaves_no_lock",
        "never came true: book is free",
    );
}

#[test]
fn that_it_believes_its_watchdog_before_its_clock_is_found() {
    is_found_by(
        "believes-its-watchdog",
        "processes::a_process_that_was_stopped_past_its_ttl_knows_at_once",
        "believed after its end",
    );
}

#[test]
fn that_it_upgrades_without_renewing_is_found() {
    is_found_by(
        "upgrades-without-renewing",
        "several::an_upgrade_of_a_lost_lock_takes_nothing",
        "it was granted anew",
    );
}
