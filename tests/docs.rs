//! What README and docs/ show is what happens: every session, program and statement in them is run,
//! every name in them exists, every link leads somewhere.

mod docs {
    pub mod page;
    pub mod run;
    pub mod storages;
}

use std::collections::BTreeSet;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use docs::page::Page;
use docs::run::{self, Tally};
use testkit::{Server, Setup, ask, error, info_fields, module, skip};

#[test]
fn every_block_of_every_page_runs_as_shown() {
    let mut tally = Tally::default();
    for page in Page::all() {
        run::run(&page, &mut tally);
    }
    let total: usize = tally.run.values().sum();
    let languages: Vec<String> = tally
        .run
        .iter()
        .map(|(language, times)| format!("{times} {language}"))
        .collect();
    println!("{total} blocks were run: {}", languages.join(", "));
    for skipped in &tally.skipped {
        skip(skipped);
    }
    assert!(tally.failed.is_empty(), "{}", tally.failed.join("\n\n"));
    assert!(total > 20, "the documentation has lost its blocks");
}

#[test]
fn every_link_leads_to_a_page_and_a_heading_that_exist() {
    let mut broken = Vec::new();
    for page in Page::all() {
        for target in links(&page.prose()) {
            if target.contains("://") {
                continue;
            }
            let (path, anchor) = target.split_once('#').unwrap_or((&target, ""));
            let file = match path {
                "" => testkit::root().join(&page.path),
                path => page.folder().join(path),
            };
            let leads = file.exists()
                && (anchor.is_empty()
                    || std::fs::read_to_string(&file)
                        .is_ok_and(|text| anchors(&text).contains(anchor)));
            if !leads {
                broken.push(format!("{}: {target}", page.path));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

/// The targets in `[text](target)`.
fn links(text: &str) -> Vec<String> {
    text.split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next())
        .map(str::to_owned)
        .collect()
}

/// The headings of a page, as they stand in a link.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = text
        .lines()
        .filter(|line| line.starts_with('#'))
        .map(|line| line.trim_start_matches('#').trim());
    let as_link = |heading: &str| {
        heading
            .to_lowercase()
            .chars()
            .filter(|char| char.is_alphanumeric() || matches!(char, ' ' | '-' | '_'))
            .map(|char| if char == ' ' { '-' } else { char })
            .collect()
    };
    headings.map(as_link).collect()
}

#[test]
fn the_help_that_is_shown_is_the_help_of_the_command() {
    let help = Command::new(testkit::command_line())
        .args(["run", "-h"])
        .env_clear()
        .output()
        .unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    assert_eq!(
        Page::read("docs/command-line.md").blocks_of("help"),
        [help.trim_end()]
    );
}

/// There it is compiled.
#[test]
fn every_piece_of_rust_that_is_shown_is_in_an_example_or_on_the_front_page_of_the_crate() {
    let rust = testkit::root().join("clients/rust");
    let front_page = std::fs::read_to_string(rust.join("src/lib.rs")).unwrap();
    let front_page = front_page
        .lines()
        .filter_map(|line| line.strip_prefix("//!"))
        .map(|line| line.strip_prefix(' ').unwrap_or(line))
        // Lines that begin with a hash are hidden in the documentation.
        .filter(|line| !line.starts_with("# "));
    let mut compiled = vec![without_layout(&front_page.collect::<Vec<_>>().join("\n"))];
    if let Ok(examples) = std::fs::read_dir(rust.join("examples")) {
        for example in examples {
            let text = std::fs::read_to_string(example.unwrap().path()).unwrap();
            compiled.push(without_layout(&text));
        }
    }
    let mut shown = 0;
    for page in Page::all() {
        for example in page.blocks_of("rust") {
            shown += 1;
            let known = compiled
                .iter()
                .any(|text| text.contains(&without_layout(&example)));
            assert!(known, "{}: nobody compiles\n{example}", page.path);
        }
    }
    assert!(shown > 0);
}

fn without_layout(code: &str) -> String {
    let lines = code.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn the_page_on_operations_names_exactly_the_fields_of_info() {
    let shown = info_fields(&mut Server::start().connect());
    assert!(shown.len() > 15, "{shown:?}");
    let operations = Page::read("docs/operations.md");
    let named: BTreeSet<String> = operations
        .text
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split('`').next())
        .filter(|name| name.starts_with("lockkeeper_"))
        .map(str::to_owned)
        .collect();
    assert_eq!(named, shown);
}

/// What people search for when the module does not load.
#[test]
fn the_log_lines_on_the_page_on_installing_are_what_the_server_and_the_module_say() {
    const INSTALLED: &str = "/usr/lib/redis/modules/liblockkeeper.so";
    let page = Page::read("docs/install.md").text;
    let dir = tempfile::tempdir().unwrap();
    let here = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let not_executable = here("not_executable.so");
    std::fs::copy(module(), &not_executable).unwrap();
    std::fs::set_permissions(&not_executable, Permissions::from_mode(0o644)).unwrap();
    let again = module().to_str().unwrap();
    let load = |path: &str| Setup::new().without_module().args(&["--loadmodule", path]);
    for (setup, word) in [
        (load(&not_executable), "execute permissions"),
        (load(&here("missing.so")), "No such file"),
        (
            Setup::new().args(&["--loadmodule", again]),
            "loaded already",
        ),
        (
            Setup::new().args(&["--rename-command", "SET", "PUT"]),
            "renamed",
        ),
        (Setup::new().module_arg("max-waiters=5"), "argument"),
        (
            Setup::new().args(&["--lockkeeper.max-waiters", "many"]),
            "Issue during loading",
        ),
    ] {
        let log = setup.try_start().err().expect("it cannot start");
        let line = log
            .lines()
            .find(|line| line.contains(word))
            .unwrap_or_else(|| panic!("nothing about {word}:\n{log}"));
        let (_, line) = line.split_once("# ").expect("a warning");
        let line = line
            .trim_start_matches("<lockkeeper> ")
            .trim_start_matches("<module> ");
        let line = line
            .replace(&not_executable, INSTALLED)
            .replace(&here("missing.so"), INSTALLED);
        assert!(
            page.contains(&format!("```text\n{line}\n```")),
            "not on the page: {line}"
        );
    }
    let server = Setup::new()
        .without_module()
        .args(&["--enable-module-command", "no"])
        .start();
    let mut redis = server.connect();
    for refusal in [
        error(ask!(redis, "MODULE", "LOAD", again)),
        error(ask!(redis, "LOCK.ACQUIRE", "order:42", "alice", 30_000)),
    ] {
        assert!(
            page.contains(refusal.trim_end()),
            "not on the page: {refusal}"
        );
    }
}

#[test]
fn for_every_guarantee_there_is_a_test_of_the_name_it_gives() {
    let page = Page::read("docs/guarantees.md");
    let questions: Vec<&str> = page.text.split("\n## ").skip(1).collect();
    let questions = questions.iter().filter(|text| {
        let heading = text.lines().next().unwrap_or_default();
        heading.ends_with('?')
    });
    let mut promises = 0;
    for text in questions {
        promises += 1;
        let (question, rest) = text.split_once('\n').expect("an answer");
        let (_, tests) = rest
            .split_once("\nTests: ")
            .unwrap_or_else(|| panic!("no tests for: {question}"));
        let named: Vec<(&str, &str)> = tests
            .split('`')
            .skip(1)
            .step_by(2)
            .filter_map(|name| name.rsplit_once("::"))
            .collect();
        assert!(!named.is_empty(), "no test for: {question}");
        for (module, test) in named {
            let file = format!("{}.rs", module.replace("::", "/"));
            let defined = [
                "tests",
                "tests/chaos",
                "tests/it",
                "clients/rust/tests",
                "clients/rust/tests/it",
                "cli/tests/it",
                "clients/conformance/src/scenarios",
            ]
            .iter()
            .any(|folder| {
                let path = testkit::root().join(folder).join(&file);
                let source = std::fs::read_to_string(path).unwrap_or_default();
                source.contains(&format!("fn {test}("))
            });
            assert!(defined, "there is no test {module}::{test}");
        }
    }
    assert!(promises > 10);
}
