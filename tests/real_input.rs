//! The problem this project comes from, through a client library that is not ours: redis-py.

use testkit::*;

/// Runs a script of tests/python against a server of its own.
#[track_caller]
fn run(script: &str, options: &[&str]) -> String {
    let server = Server::start();
    let port = server.port().to_string();
    python(&[&[script, &port], options].concat())
}

/// What `lost_updates.py` reports: 8 processes × 500 changes of one number.
struct Report {
    lost: u32,
    killed: u32,
    stopped: u32,
    refused: u32,
}

#[track_caller]
fn lost_updates(options: &[&str]) -> Report {
    let report = run("lost_updates.py", options);
    let number = |name: &str| {
        let word = report
            .split_whitespace()
            .find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        word.unwrap_or_else(|| panic!("no {name} in {report}"))
            .parse()
            .unwrap()
    };
    assert_eq!(number("updates"), 8 * 500);
    Report {
        lost: number("lost"),
        killed: number("killed"),
        stopped: number("stopped"),
        refused: number("refused"),
    }
}

#[test]
fn without_a_lock_updates_are_lost() {
    assert!(lost_updates(&[]).lost > 0);
}

#[test]
fn with_the_lock_no_update_is_lost_though_holders_are_killed() {
    let report = lost_updates(&["lock", "kill"]);
    assert_eq!((report.lost, report.killed), (0, 3));
}

#[test]
fn a_holder_stopped_past_its_ttl_destroys_updates_if_the_storage_ignores_the_fence() {
    let report = lost_updates(&["lock", "stop"]);
    assert_eq!(report.stopped, 3);
    assert!(report.lost > 0);
}

#[test]
fn a_holder_stopped_past_its_ttl_harms_nothing_if_the_storage_checks_the_fence() {
    let report = lost_updates(&["lock", "fence", "stop", "kill"]);
    assert_eq!((report.lost, report.killed, report.stopped), (0, 3, 3));
    assert!(report.refused >= 3);
}

#[test]
fn of_two_requests_for_one_copy_one_is_told_to_wait_and_nobody_frees_the_lock_of_another() {
    assert_eq!(
        run("book_loan.py", &["lock"]).lines().collect::<Vec<_>>(),
        [
            "bob: borrowing in progress",
            "cyd: borrowing in progress",
            "ada: enjoy the book",
            "dan: no copy left",
            "borrowers: ada",
        ]
    );
}

#[test]
fn with_a_lock_by_set_and_del_the_second_frees_the_lock_of_the_first_and_one_copy_goes_twice() {
    assert_eq!(
        run("book_loan.py", &["by-hand"])
            .lines()
            .collect::<Vec<_>>(),
        [
            "bob: borrowing in progress",
            "cyd: enjoy the book",
            "ada: enjoy the book",
            "dan: no copy left",
            "borrowers: cyd ada",
        ]
    );
}
