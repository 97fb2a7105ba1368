//! A history as a file of JSON lines, for other judges.
//!
//! The first line is the run, then there is one for each event in the order in which they were asked for, then one for
//! each fault. The fields are those of history.rs; a null stands for what nobody has answered. The last line is what the
//! checker found, with which others compare their verdict.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use serde_json::{Value, json};

use super::checker::Verdict;
use super::history::{Answer, Did, Event, Fault, History};

/// Writes it to `folder/NAME-SEED.jsonl`.
pub fn write(folder: &Path, name: &str, seed: u64, history: &History, verdict: &Verdict) {
    std::fs::create_dir_all(folder).unwrap();
    let words = name.split(|letter: char| !letter.is_alphanumeric());
    let words: Vec<_> = words.filter(|word| !word.is_empty()).collect();
    let path = folder.join(format!("{}-{seed}.jsonl", words.join("-")));
    let mut file = BufWriter::new(File::create(path).unwrap());
    let run = json!({"run": name, "seed": seed, "ttl": history.ttl});
    let events = history.events.iter().map(event);
    let faults = history.faults.iter().map(fault);
    let kinds = verdict
        .violations
        .iter()
        .map(|found| format!("{:?}", found.kind));
    let kinds: BTreeSet<_> = kinds.collect();
    let verdict = json!({"violations": kinds});
    for line in [run]
        .into_iter()
        .chain(events)
        .chain(faults)
        .chain([verdict])
    {
        writeln!(file, "{line}").unwrap();
    }
    file.flush().unwrap();
}

fn event(event: &Event) -> Value {
    let mut line = match event.did {
        Did::Acquire { wait, safe } => json!({"did": "acquire", "wait": wait, "safe": safe}),
        Did::Renew => json!({"did": "renew"}),
        Did::Check => json!({"did": "check"}),
        Did::Release => json!({"did": "release"}),
        Did::Write { order, fence } => json!({"did": "write", "order": order, "shown": fence}),
    };
    line["tenure"] = event.tenure.into();
    line["by"] = event.by.into();
    line["key"] = event.key.into();
    line["limit"] = event.limit.into();
    line["asked"] = event.asked.into();
    line["answered"] = event.answer.as_ref().map(|(at, _)| *at).into();
    let answer = event.answer.as_ref().map(|(_, answer)| match answer {
        Answer::Held { fence, until } => {
            line["fence"] = (*fence).into();
            line["until"] = (*until).into();
            "held"
        }
        Answer::Released => "released",
        Answer::Not => "not",
        Answer::Accepted => "accepted",
        Answer::Refused => "refused",
        Answer::Failed(error) => {
            line["error"] = error.as_str().into();
            "failed"
        }
    });
    line["answer"] = answer.into();
    line
}

fn fault(fault: &Fault) -> Value {
    let Fault {
        what,
        from,
        to,
        loses,
        skew,
    } = fault;
    json!({"fault": what, "from": from, "to": to, "loses": loses, "skew": skew})
}
