//! What is printed, and kept for machines: tables, targets with met or missed, plots.

use std::fs;
use std::path::PathBuf;

use comfy_table::{Table, presets::ASCII_MARKDOWN};
use serde_json::{Map, Value, json};

use crate::measure::{Rounds, Series};
use crate::plot::Plot;
use crate::{pin, quick};
use testkit::Server;

/// One cell of a table.
pub enum Cell {
    Text(String),
    Number(f64),
    Spread(Series),
}

impl From<&str> for Cell {
    fn from(text: &str) -> Cell {
        Cell::Text(text.to_owned())
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Cell {
        Cell::Text(text)
    }
}

impl From<f64> for Cell {
    fn from(number: f64) -> Cell {
        Cell::Number(number)
    }
}

impl From<Series> for Cell {
    fn from(series: Series) -> Cell {
        Cell::Spread(series)
    }
}

impl Cell {
    fn show(&self) -> String {
        match self {
            Cell::Text(text) => text.clone(),
            Cell::Number(number) => figure(*number),
            Cell::Spread(series) => format!(
                "{} ({}–{})",
                figure(series.median()),
                figure(series.quantile(0.25)),
                figure(series.quantile(0.75))
            ),
        }
    }

    fn json(&self) -> Value {
        match self {
            Cell::Text(text) => json!(text),
            Cell::Number(number) => json!(number),
            Cell::Spread(series) => json!({
                "median": series.median(),
                "p25": series.quantile(0.25),
                "p75": series.quantile(0.75),
                "rounds": series.0,
            }),
        }
    }
}

/// With as many digits as mean something.
fn figure(number: f64) -> String {
    match number.abs() {
        n if n.is_nan() => "–".to_owned(),
        n if n >= 100.0 => format!("{number:.0}"),
        n if n >= 10.0 => format!("{number:.1}"),
        n if n >= 0.005 => format!("{number:.2}"),
        _ => format!("{number:.4}"),
    }
}

/// What a figure must be.
#[derive(Clone, Copy)]
pub enum Target {
    AtMost(f64),
    AtLeast(f64),
    Within(f64, f64),
}

impl Target {
    fn is_met(self, value: f64) -> bool {
        // To the digits that the target has.
        let value = (value * 1000.0).round() / 1000.0;
        match self {
            Target::AtMost(most) => value <= most,
            Target::AtLeast(least) => value >= least,
            Target::Within(least, most) => (least..=most).contains(&value),
        }
    }

    fn show(self) -> String {
        match self {
            Target::AtMost(most) => format!("≤ {most}"),
            Target::AtLeast(least) => format!("≥ {least}"),
            Target::Within(least, most) => format!("{least}–{most}"),
        }
    }
}

pub struct Report {
    server: String,
    folder: PathBuf,
    question: String,
    /// Of the question that is being answered.
    tables: Vec<Value>,
    targets: Vec<Value>,
    /// By question.
    answers: Map<String, Value>,
    /// All targets, as lines.
    verdicts: Vec<[String; 4]>,
}

impl Report {
    pub fn open() -> Report {
        let folder = testkit::target().join("bench");
        fs::create_dir_all(&folder).unwrap();
        let server = server_name();
        println!("# {server}, {}", machine());
        println!(
            "\nClients on core {}, servers on core {}; on *one core* means on {0}.",
            pin::CLIENT.core(),
            pin::SERVER.core()
        );
        println!("A cell is a median (and the middle half of all rounds).");
        if quick() {
            println!("QUICK=1: few and short rounds. No figure here is worth quoting.");
        }
        Report {
            server,
            folder,
            question: String::new(),
            tables: vec![],
            targets: vec![],
            answers: Map::new(),
            verdicts: vec![],
        }
    }

    pub fn question(&mut self, name: &str) {
        self.keep();
        name.clone_into(&mut self.question);
        println!("\n## {name}");
    }

    pub fn note(&mut self, text: &str) {
        println!("\n{text}");
    }

    pub fn table(&mut self, title: &str, header: &[&str], rows: Vec<Vec<Cell>>) {
        let mut lines = vec![
            header
                .iter()
                .map(|word| word.to_string())
                .collect::<Vec<_>>(),
        ];
        lines.extend(
            rows.iter()
                .map(|row| row.iter().map(Cell::show).collect::<Vec<_>>()),
        );
        println!("\n### {title}\n\n{}", markdown(&lines));
        let rows: Vec<Value> = rows
            .iter()
            .map(|row| row.iter().map(Cell::json).collect())
            .collect();
        self.tables
            .push(json!({ "title": title, "header": header, "rows": rows }));
    }

    /// A table of contenders: each figure, and next to it the ratio to each of `bases`.
    pub fn rounds(
        &mut self,
        title: &str,
        rounds: &Rounds,
        figures: &[&'static str],
        bases: &[&str],
    ) {
        let bases: Vec<&str> = bases
            .iter()
            .copied()
            .filter(|base| rounds.has(base))
            .collect();
        let mut header = vec![String::new()];
        for figure in figures {
            header.push((*figure).to_owned());
            header.extend(bases.iter().map(|base| format!("÷ {base}")));
        }
        let row = |name: &String| -> Vec<Cell> {
            let mut row = vec![Cell::from(name.clone())];
            for figure in figures {
                row.push(rounds.of(name, figure).clone().into());
                row.extend(
                    bases
                        .iter()
                        .map(|base| rounds.ratio(figure, name, base).into()),
                );
            }
            row
        };
        let rows = rounds.names.iter().map(row).collect();
        let header: Vec<&str> = header.iter().map(String::as_str).collect();
        self.table(title, &header, rows);
    }

    pub fn target(&mut self, what: impl Into<String>, value: impl Into<Cell>, target: Target) {
        let (what, value) = (what.into(), value.into());
        let number = match &value {
            Cell::Number(number) => *number,
            Cell::Spread(series) => series.median(),
            Cell::Text(_) => f64::NAN,
        };
        let verdict = if target.is_met(number) {
            "met"
        } else {
            "MISSED"
        };
        println!(
            "- {what}: {} · target {} · {verdict}",
            value.show(),
            target.show()
        );
        self.targets.push(json!({
            "what": what, "value": value.json(), "target": target.show(), "met": target.is_met(number),
        }));
        self.verdicts
            .push([what, value.show(), target.show(), verdict.to_owned()]);
    }

    pub fn plot(&mut self, file: &str, plot: &Plot) {
        let path = self.folder.join(file);
        fs::write(&path, plot.svg()).unwrap();
        println!("\nPlot: {}", path.display());
    }

    fn keep(&mut self) {
        let tables = std::mem::take(&mut self.tables);
        let targets = std::mem::take(&mut self.targets);
        if !self.question.is_empty() {
            let answer = json!({ "tables": tables, "targets": targets, "quick": quick() });
            self.answers.insert(self.question.clone(), answer);
        }
    }

    /// Prints all targets once more, and puts the answers in the place of earlier ones to the same
    /// questions about the same server.
    pub fn close(mut self) {
        self.keep();
        let header = ["target of", "measured", "target", ""].map(str::to_owned);
        let lines: Vec<Vec<String>> = std::iter::once(header)
            .chain(self.verdicts)
            .map(Vec::from)
            .collect();
        println!("\n## All targets\n\n{}", markdown(&lines));
        let path = self.folder.join("bench.json");
        let mut all: Map<String, Value> = fs::read(&path)
            .ok()
            .and_then(|old| serde_json::from_slice(&old).ok())
            .unwrap_or_default();
        let here = all.entry(self.server).or_insert_with(|| json!({}));
        here["machine"] = json!(machine());
        for (question, answer) in self.answers {
            here[question] = answer;
        }
        fs::write(&path, serde_json::to_vec_pretty(&all).unwrap()).unwrap();
        println!("All rounds: {}", path.display());
    }
}

fn markdown(lines: &[Vec<String>]) -> Table {
    let (header, rows) = lines.split_first().expect("a table has a header");
    let mut table = Table::new();
    table
        .load_preset(ASCII_MARKDOWN)
        .set_header(header)
        .add_rows(rows);
    table
}

/// Name and version of the server.
fn server_name() -> String {
    let server = Server::start();
    let info: String = redis::cmd("INFO")
        .arg("server")
        .query(&mut server.connect())
        .unwrap();
    let field = |name: &str| {
        let mut lines = info.lines();
        lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
    };
    match (field("valkey_version"), field("redis_version")) {
        (Some(version), _) => format!("valkey {version}"),
        (None, version) => format!("redis {}", version.unwrap_or("?")),
    }
}

fn machine() -> String {
    let cpus = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpus
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map_or("?", |(_, model)| model);
    let cores = std::thread::available_parallelism().map_or(0, |cores| cores.get());
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split(' ').next().unwrap_or("?").to_owned();
    let cores = cpus.matches("processor\t:").count().max(cores);
    format!("{model}, {cores} cores, load {load} at the start")
}
