//! A run in a few lines.

use std::collections::BTreeMap;
use std::fmt;

use super::checker::{Finding, Verdict, check};
use super::history::{Answer, Did, Event, History};

pub struct Report {
    name: String,
    seed: u64,
    questions: usize,
    failed: usize,
    faults: BTreeMap<&'static str, usize>,
    pub verdict: Verdict,
    /// All that happened around the first violation.
    around: Vec<Event>,
}

impl Report {
    pub fn of(name: &str, seed: u64, history: &History) -> Report {
        let verdict = check(history);
        let mut faults = BTreeMap::new();
        for fault in &history.faults {
            *faults.entry(fault.what).or_default() += 1;
        }
        let around = verdict
            .violations
            .first()
            .map(|first| around(first, history));
        let failed = |event: &&Event| matches!(event.answer, Some((_, Answer::Failed(_))));
        Report {
            name: name.to_owned(),
            seed,
            questions: history
                .events
                .iter()
                .filter(|event| event.did != Did::Look)
                .count(),
            failed: history.events.iter().filter(failed).count(),
            faults,
            verdict,
            around: around.unwrap_or_default(),
        }
    }
}

fn around(finding: &Finding, history: &History) -> Vec<Event> {
    let events = history.events.iter();
    let of_it = events.filter(|event| finding.tenures.contains(&event.tenure));
    of_it.cloned().collect()
}

fn count(findings: &[Finding]) -> String {
    let mut kinds = BTreeMap::new();
    for finding in findings {
        *kinds.entry(finding.kind).or_insert(0) += 1;
    }
    match kinds.is_empty() {
        true => "none".to_owned(),
        false => format!("{kinds:?}"),
    }
}

impl fmt::Display for Report {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        writeln!(out, "{}, seed {}", self.name, self.seed)?;
        writeln!(
            out,
            "  {} critical sections, {} questions, {} of them failed; faults: {:?}",
            self.verdict.sections, self.questions, self.failed, self.faults
        )?;
        write!(
            out,
            "  violations: {}; lost by a fault that may lose: {}",
            count(&self.verdict.violations),
            count(&self.verdict.lost)
        )?;
        if let Some(first) = self.verdict.violations.first() {
            let Finding { kind, key, at, .. } = first;
            write!(
                out,
                "\n  the first: {kind:?}, lock {key}, at {at} µs; its owners:"
            )?;
            for event in &self.around {
                write!(out, "\n    {event:?}")?;
            }
        }
        Ok(())
    }
}
