//! Who descends from whom, decided from one scan of all processes.

use std::collections::{HashMap, HashSet};

/// One process, as `/proc/PID/stat` shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    pub id: Id,
    pub parent: i32,
    pub state: State,
    /// The kernel's name of it, 15 bytes at most, which the process itself can choose.
    pub name: String,
}

/// A process id alone may be given to another process at any time; with the time of its start it
/// names one process until the machine restarts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Id {
    pub pid: i32,
    /// Clock ticks after boot.
    pub started: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Running,
    Stopped,
    /// It has ended, and waits to be reaped.
    Zombie,
}

impl Process {
    /// One that /proc does not show. Whether it is stopped is not known, so it may be.
    pub fn unseen(pid: i32) -> Process {
        Process {
            id: Id { pid, started: 0 },
            parent: 0,
            state: State::Stopped,
            name: String::new(),
        }
    }

    /// Whatever descends from us and is shown has a parent.
    pub fn is_seen(&self) -> bool {
        self.parent != 0
    }

    /// None if the text is not of the kernel's form.
    pub fn parse(stat: &[u8]) -> Option<Process> {
        // The name, in brackets, may contain brackets, blanks and line ends itself.
        let open = stat.iter().position(|byte| *byte == b'(')?;
        let close = stat.iter().rposition(|byte| *byte == b')')?;
        let pid = std::str::from_utf8(&stat[..open]).ok()?.trim();
        let name = stat.get(open + 1..close)?;
        // From here on proc(5) counts the fields from 3, the state.
        let fields = std::str::from_utf8(&stat[close + 1..]).ok()?;
        let fields: Vec<&str> = fields.split_ascii_whitespace().collect();
        let field = |number: usize| fields.get(number - 3).copied();
        let threads: u32 = field(20)?.parse().ok()?;
        let state = match field(3)? {
            // While other threads run on, a process whose first thread has ended looks like this.
            "Z" | "X" if threads <= 1 => State::Zombie,
            "T" => State::Stopped,
            _ => State::Running,
        };
        Some(Process {
            id: Id {
                pid: pid.parse().ok()?,
                started: field(22)?.parse().ok()?,
            },
            parent: field(4)?.parse().ok()?,
            state,
            name: String::from_utf8_lossy(name).into_owned(),
        })
    }
}

/// All that descend from `root` and have not ended, parents before their children, without those
/// `excluded` and what descends from them.
pub fn descendants(mut all: Vec<Process>, root: i32, excluded: &[Id]) -> Vec<Process> {
    all.retain(|process| process.id.pid != root && !excluded.contains(&process.id));
    let mut children: HashMap<i32, Vec<Process>> = HashMap::new();
    for process in all {
        children.entry(process.parent).or_default().push(process);
    }
    let mut found = Vec::new();
    let mut seen = HashSet::from([root]);
    let mut parents = vec![root];
    // One scan is not one moment, so a pid can appear twice; each is followed once, so this ends.
    while let Some(parent) = parents.pop() {
        for process in children.remove(&parent).unwrap_or_default() {
            if seen.insert(process.id.pid) {
                parents.push(process.id.pid);
                found.push(process);
            }
        }
    }
    found.retain(|process| process.state != State::Zombie);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: i32, parent: i32) -> Process {
        Process {
            id: Id { pid, started: 7 },
            parent,
            state: State::Running,
            name: String::new(),
        }
    }

    fn pids(found: &[Process]) -> Vec<i32> {
        found.iter().map(|process| process.id.pid).collect()
    }

    /// What the kernel writes, with what matters here as given.
    fn stat(pid: &str, name: &str, state: &str, threads: u32) -> Vec<u8> {
        format!(
            "{pid} ({name}) {state} 12 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 {threads} 0 4711 99 1"
        )
        .into_bytes()
    }

    #[test]
    fn a_process_is_read_whatever_its_name() {
        for name in ["sleep", "a) R 1 1", "((", "a\nb c", ") "] {
            let read = Process::parse(&stat("34", name, "S", 1)).unwrap();
            let id = Id {
                pid: 34,
                started: 4711,
            };
            assert_eq!((read.id, read.parent), (id, 12), "{name:?}");
            assert_eq!((read.state, read.name.as_str()), (State::Running, name));
        }
        let mut latin = stat("34", "caf?", "S", 1);
        latin[7] = 0xe9;
        assert_eq!(Process::parse(&latin).unwrap().name, "caf\u{fffd}");
    }

    #[test]
    fn what_the_kernel_does_not_write_is_no_process() {
        let whole = stat("34", "sleep", "S", 1);
        for end in 0..whole.len() - 12 {
            assert_eq!(Process::parse(&whole[..end]), None, "{end}");
        }
        assert_eq!(Process::parse(b")("), None);
        assert_eq!(Process::parse(&stat("x", "sleep", "S", 1)), None);
    }

    #[test]
    fn the_end_of_the_first_thread_is_not_the_end_of_the_process() {
        let state = |state, threads| {
            Process::parse(&stat("34", "x", state, threads))
                .unwrap()
                .state
        };
        assert_eq!(state("Z", 1), State::Zombie);
        assert_eq!(state("Z", 2), State::Running);
        assert_eq!(state("T", 1), State::Stopped);
        assert_eq!(state("D", 1), State::Running);
    }

    #[test]
    fn parents_come_before_their_children_and_strangers_not_at_all() {
        let all = || {
            vec![
                process(9, 3),
                process(2, 1),
                process(3, 2),
                process(4, 1),
                process(8, 4),
            ]
        };
        assert_eq!(pids(&descendants(all(), 2, &[])), [3, 9]);
        assert_eq!(pids(&descendants(all(), 9, &[])), [] as [i32; 0]);
        let excluded = [Id { pid: 3, started: 7 }];
        assert_eq!(pids(&descendants(all(), 2, &excluded)), [] as [i32; 0]);
        let reused = [Id { pid: 3, started: 6 }];
        assert_eq!(pids(&descendants(all(), 2, &reused)), [3, 9]);
    }

    #[test]
    fn who_has_ended_is_left_out_but_not_what_it_started() {
        let mut all = vec![process(3, 2), process(9, 3)];
        all[0].state = State::Zombie;
        assert_eq!(pids(&descendants(all, 2, &[])), [9]);
    }

    /// Process ids that are given anew during a scan can make a ring.
    #[test]
    fn a_ring_ends() {
        let all = vec![process(2, 4), process(3, 2), process(4, 3), process(3, 4)];
        assert_eq!(pids(&descendants(all, 2, &[])), [3, 4]);
    }
}
