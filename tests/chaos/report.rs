//! A run in a few lines.

use std::collections::BTreeMap;
use std::fmt;

use super::checker::{Finding, Verdict, check};
use super::history::{Answer, Did, Event, Fault, History, Us};

const NEAR: Us = 5_000_000;

pub struct Report {
    name: String,
    seed: u64,
    questions: usize,
    failed: usize,
    /// How many grants there were, by who worked for them.
    grants: BTreeMap<&'static str, usize>,
    faults: BTreeMap<&'static str, usize>,
    pub verdict: Verdict,
    /// All that its owners did, and the faults, around the first violation.
    around: Vec<Event>,
    faults_around: Vec<Fault>,
}

impl Report {
    pub fn of(name: &str, seed: u64, history: &History) -> Report {
        let verdict = check(history);
        let mut faults = BTreeMap::new();
        for fault in &history.faults {
            *faults.entry(fault.what).or_default() += 1;
        }
        let mut grants = BTreeMap::new();
        for event in &history.events {
            if matches!(event.did, Did::Acquire { .. })
                && matches!(event.answer, Some((_, Answer::Held { .. })))
            {
                *grants.entry(event.by).or_default() += 1;
            }
        }
        let first = verdict.violations.first();
        let around = first.map(|first| around(first, history));
        let faults_around = first.map(|first| faults_around(first, history));
        let failed = |event: &&Event| matches!(event.answer, Some((_, Answer::Failed(_))));
        Report {
            name: name.to_owned(),
            seed,
            questions: history
                .events
                .iter()
                .filter(|event| event.did != Did::Check)
                .count(),
            failed: history.events.iter().filter(failed).count(),
            grants,
            faults,
            verdict,
            around: around.unwrap_or_default(),
            faults_around: faults_around.unwrap_or_default(),
        }
    }
}

fn around(finding: &Finding, history: &History) -> Vec<Event> {
    let events = history.events.iter();
    let of_it = events.filter(|event| finding.tenures.contains(&event.tenure));
    of_it.cloned().collect()
}

fn faults_around(finding: &Finding, history: &History) -> Vec<Fault> {
    let near = |fault: &&Fault| fault.from < finding.at + NEAR && fault.to + NEAR > finding.at;
    history.faults.iter().filter(near).cloned().collect()
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
        let Verdict {
            sections,
            safe,
            beside,
            ..
        } = self.verdict;
        writeln!(
            out,
            "  {sections} critical sections, {safe} of them acknowledged by a replica, {beside} beside others; {} questions, {} failed",
            self.questions, self.failed
        )?;
        writeln!(
            out,
            "  grants: {:?}; faults: {:?}",
            self.grants, self.faults
        )?;
        write!(
            out,
            "  violations: {}; lost by a fault: {}; shortened by a clock: {}",
            count(&self.verdict.violations),
            count(&self.verdict.lost),
            count(&self.verdict.shortened)
        )?;
        if let Some(first) = self.verdict.violations.first() {
            let Finding { kind, key, at, .. } = first;
            write!(
                out,
                "\n  the first: {kind:?}, lock {key}, at {at} µs; its owners:"
            )?;
            for fault in &self.faults_around {
                write!(out, "\n    {fault:?}")?;
            }
            for event in &self.around {
                write!(out, "\n    {event:?}")?;
            }
        }
        Ok(())
    }
}
