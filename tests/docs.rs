//! What the README shows is what happens: every session in it is run, every name in it exists.

use std::process::Command;

use testkit::Server;

const README: &str = include_str!("../README.md");

/// The fenced blocks of one language.
fn blocks(language: &str) -> Vec<&'static str> {
    let fence = format!("```{language}\n");
    README
        .split(&fence)
        .skip(1)
        .filter_map(|rest| rest.split("\n```").next())
        .collect()
}

/// A long number is a fence or a clock's: another one will do.
fn without_long_numbers(text: &str) -> String {
    let mut kept = String::new();
    let mut digits = String::new();
    for char in text.chars().chain([' ']) {
        if char.is_ascii_digit() {
            digits.push(char);
        } else {
            kept.push_str(if digits.len() == 16 && !digits.starts_with('9') {
                "N"
            } else {
                &digits
            });
            digits.clear();
            kept.push(char);
        }
    }
    kept.trim_end().to_owned()
}

#[test]
fn every_session_in_the_readme_happens_as_shown() {
    let sessions = blocks("redis");
    assert!(sessions.len() >= 2, "the README has lost its sessions");
    for session in sessions {
        let server = Server::start();
        let mut commands = 0;
        for exchange in session.trim_start_matches("> ").split("\n> ") {
            let (command, expected) = exchange
                .split_once('\n')
                .expect("a reply below each command");
            let output = Command::new("sh")
                .args([
                    "-c",
                    &format!(
                        "redis-cli --no-raw -s '{}' {command}",
                        server.socket().display()
                    ),
                ])
                .output()
                .expect("redis-cli runs");
            let reply = String::from_utf8(output.stdout).expect("redis-cli prints text");
            let (reply, expected) = (without_long_numbers(&reply), without_long_numbers(expected));
            // Milliseconds have passed between two commands of a person, and of a test.
            let (reply, expected) = (in_time(&reply), in_time(&expected));
            assert_eq!(reply, expected, "{command}");
            commands += 1;
        }
        assert!(commands > 1);
    }
}

/// What is left of a ttl of 30 s, and how long it has been held, within the 10 s that a test may take.
fn in_time(reply: &str) -> String {
    let lines = reply
        .lines()
        .map(|line| match line.rsplit_once("(integer) ") {
            Some((place, number)) if (20_000..=30_000).contains(&number.parse().unwrap_or(0)) => {
                format!("{place}(integer) 30000")
            }
            Some((place @ " 6) ", number))
                if number.parse().is_ok_and(|held: u64| held < 10_000) =>
            {
                format!("{place}(integer) 0")
            }
            _ => line.to_owned(),
        });
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn the_help_in_the_readme_is_the_help_of_the_command() {
    let help = Command::new(testkit::command_line())
        .args(["run", "-h"])
        .env_clear()
        .output()
        .unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    assert_eq!(blocks("help"), [help.trim_end()]);
}

/// There it is compiled.
#[test]
fn the_example_of_the_helper_in_the_readme_is_one_of_its_documentation() {
    let front_page = include_str!("../clients/rust/src/lib.rs");
    let lines = front_page
        .lines()
        .map(|line| line.trim_start_matches("//!").trim_start_matches(' '));
    let unindented = |text: &str| text.lines().map(str::trim).collect::<Vec<_>>().join("\n");
    // Lines that begin with a hash are hidden in the documentation.
    let shown = lines
        .filter(|line| !line.starts_with("# "))
        .collect::<Vec<_>>()
        .join("\n");
    for example in blocks("rust") {
        let example = example.replace("\n\n", "\n");
        let shown = unindented(&shown.replace("\n\n", "\n"));
        assert!(shown.contains(&unindented(&example)), "{example}");
    }
    assert!(!blocks("rust").is_empty());
}

#[test]
fn the_readme_names_exactly_the_fields_of_info() {
    let server = Server::start();
    let info: String = redis::cmd("INFO")
        .arg("lockkeeper")
        .query(&mut server.connect())
        .unwrap();
    let shown: Vec<&str> = info
        .lines()
        .filter_map(|line| line.strip_prefix("lockkeeper_")?.split(':').next())
        .collect();
    assert!(shown.len() > 15, "{info}");
    let operations = README
        .split("## Operations")
        .nth(1)
        .expect("a chapter on operations");
    let paragraph = operations
        .trim_start()
        .split("\n\n")
        .next()
        .expect("a paragraph");
    let named: Vec<&str> = paragraph
        .split('`')
        .skip(1)
        .step_by(2)
        .filter(|name| *name != "INFO lockkeeper" && *name != "lockkeeper_")
        .collect();
    for field in &shown {
        assert!(named.contains(field), "the README does not name {field}");
    }
    for name in &named {
        assert!(shown.contains(name), "INFO does not show {name}");
    }
}

#[test]
fn for_every_promise_of_the_readme_there_is_a_test_of_the_name_it_gives() {
    let (table, rest) = README.split_once("<details>").expect("which test shows it");
    let (tests, _) = rest.split_once("</details>").expect("the end of it");
    let questions: Vec<&str> = table
        .lines()
        .filter_map(|line| line.strip_prefix("| ")?.split(" | ").next())
        .filter(|question| question.ends_with('?'))
        .collect();
    let promises: Vec<&str> = tests.split("- **").skip(1).collect();
    assert!(promises.len() > 10);
    assert_eq!(questions.len(), promises.len(), "a promise without a test");
    for (question, promise) in questions.into_iter().zip(promises) {
        let (short, tests) = promise.split_once("?**").expect("a question");
        assert!(question.starts_with(short), "{short} is not {question}");
        let named = tests.split('`').skip(1).step_by(2);
        let mut tests = named.filter_map(|name| name.split_once("::")).peekable();
        assert!(tests.peek().is_some(), "no test for {question}");
        for (file, test) in tests {
            let defined = ["tests", "clients/rust/tests", "cli/tests"]
                .iter()
                .any(|folder| {
                    let path = testkit::root().join(folder).join(format!("{file}.rs"));
                    let source = std::fs::read_to_string(path).unwrap_or_default();
                    source.contains(&format!("fn {test}()"))
                });
            assert!(defined, "there is no test {file}::{test}");
        }
    }
}
