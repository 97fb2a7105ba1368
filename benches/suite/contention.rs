//! Many clients want one lock: how much of the time is somebody at work, how soon is the next one, and
//! does everybody get a turn?

use std::sync::Barrier;
use std::time::{Duration, Instant};

use fastrand::Rng;
use lockkeeper::{Acquired, Lockkeeper};
use rslock::LockManager;

use crate::measure::{Meter, Series};
use crate::peers;
use crate::plot::Plot;
use crate::report::{Cell, Report, Target};
use crate::sequence::{TTL, load_script};
use crate::uncontended::RELEASE_SCRIPT;
use crate::{pin, quick, rounds};
use testkit::Server;
use testkit::connection::{RawConnection, pack};

/// How long a client holds the lock: as long as a small transaction.
const HOLD: Duration = Duration::from_millis(5);

/// With pauses, a client stays away this long at most after each turn.
const PAUSE: Duration = Duration::from_millis(40);

/// One turn of one client, in seconds since the start.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    pub asked: f64,
    pub granted: f64,
    pub releasing: f64,
}

/// One client's turns, and since when it waited at the end in vain.
#[derive(Debug, Default)]
pub struct Log {
    pub turns: Vec<Turn>,
    pub waiting_since: Option<f64>,
}

/// How clients go about it.
#[derive(Clone, Copy)]
pub struct Plan {
    pub clients: usize,
    pub hold: Duration,
    pub pause: Duration,
    pub length: Duration,
}

/// A way to lock. `acquire` gives up at `until` and answers whether it holds the lock.
trait Lock {
    fn acquire(&mut self, until: Instant) -> bool;
    fn release(&mut self);
}

type Run = Box<dyn Fn(&Server, Plan) -> Vec<Log>>;

/// What takes part: a name, and how it is run.
pub struct Entry {
    name: String,
    run: Run,
    /// In every table, or only in those that are not too long for it.
    everywhere: bool,
}

impl Entry {
    pub fn new(
        name: impl Into<String>,
        run: impl Fn(&Server, Plan) -> Vec<Log> + 'static,
    ) -> Entry {
        Entry {
            name: name.into(),
            run: Box::new(run),
            everywhere: false,
        }
    }

    fn everywhere(self) -> Entry {
        Entry {
            everywhere: true,
            ..self
        }
    }
}

const RAW: &str = "LOCK.ACQUIRE … WAIT";
const HELPER: &str = "lockkeeper helper";

fn entries(report: &mut Report) -> Vec<Entry> {
    let mut entries = vec![
        Entry::new(RAW, |server, plan| run(plan, |_| Raw::of(server))).everywhere(),
        Entry::new(HELPER, |server, plan| run(plan, |_| Helper::of(server))).everywhere(),
        Entry::new("SET NX every 1 ms", polling(1)).everywhere(),
        Entry::new("SET NX every 100 ms", polling(100)).everywhere(),
        Entry::new("rslock, defaults (3 × 200 ms)", rslock(3, 200)),
        Entry::new("rslock, retries of 10 ms", rslock(1_000, 10)),
    ];
    entries.extend(peers::entries(report));
    entries
}

pub fn ask(report: &mut Report) {
    report.note(&format!(
        "So many clients, each a thread with a connection of its own, all on one core, the server on \
         the other. Each acquires, holds for {HOLD:?}, releases, and begins anew: at once, or after a \
         pause of up to {PAUSE:?}. *busy* is the share of time in which somebody holds the lock and is \
         not releasing it: the ideal is 1. *hand-over*: from sending the release to the next grant, if \
         the next one waited before. *to itself*: share of grants that went to the one that had just \
         released. *share*: turns of the luckiest over turns of the unluckiest. *unserved*: clients \
         without a turn. *commands* for one turn: those inside of scripts count too, and of those who \
         wait at the end the last does not.",
    ));
    let entries = entries(report);
    let (mut handovers, mut waits) = (Lines::default(), Lines::default());
    for (clients, pause) in [
        (2, Duration::ZERO),
        (8, Duration::ZERO),
        (32, Duration::ZERO),
        (128, Duration::ZERO),
        (8, PAUSE),
        (32, PAUSE),
    ] {
        let plan = Plan {
            clients,
            hold: HOLD,
            pause,
            length: if quick() {
                Duration::from_millis(700)
            } else {
                Duration::from_millis(1500)
            },
        };
        let peers_too = clients == 8 || clients == 32;
        let invited = |entry: &&Entry| entry.everywhere || peers_too;
        let rows = interleaved(entries.iter().filter(invited), plan, pin::SERVER);
        let with_pauses = !pause.is_zero();
        let how = if with_pauses {
            "with pauses"
        } else {
            "without pauses"
        };
        let title = format!("{clients} clients, {how}");
        table(report, &title, &rows);
        for (name, result) in &rows {
            if !with_pauses {
                // Of fewer a median says nothing.
                if result.handovers.0.len() >= 10 {
                    handovers.add(name, clients, result.handovers.median());
                }
                waits.add(name, clients, result.longest_wait.max());
            }
            if is_ours(name) && !with_pauses && peers_too {
                targets(report, name, clients, "two cores", result);
            }
        }
        if !with_pauses && peers_too {
            // Without a sleeping core to be woken for each reply, what is left is ours.
            let ours = entries.iter().filter(|entry| is_ours(&entry.name));
            let rows = interleaved(ours, plan, pin::CLIENT);
            table(report, &format!("{title}, all on one core"), &rows);
            for (name, result) in &rows {
                targets(report, name, clients, "one core", result);
            }
        }
    }
    handovers.plot(report, "contention.svg", "Hand-over under contention, p50");
    waits.plot(
        report,
        "waits.svg",
        "Longest wait under contention (5 ms each)",
    );
}

fn is_ours(name: &str) -> bool {
    [RAW, HELPER].contains(&name)
}

/// What each did, with the server on that side.
fn interleaved<'e>(
    entries: impl Iterator<Item = &'e Entry> + Clone,
    plan: Plan,
    side: pin::Side,
) -> Vec<(&'e str, Result)> {
    let mut rows: Vec<(&str, Result)> = vec![];
    for _ in 0..rounds(2, 1) {
        for entry in entries.clone() {
            let result = measure(entry, plan, side);
            match rows.iter_mut().find(|(name, _)| *name == entry.name) {
                Some((_, known)) => known.add(result),
                None => rows.push((&entry.name, result)),
            }
        }
    }
    rows
}

fn table(report: &mut Report, title: &str, rows: &[(&str, Result)]) {
    let rows = rows.iter().map(|(name, result)| result.row(name)).collect();
    report.table(title, &HEADER, rows);
}

/// A line for each entry, against the number of clients.
#[derive(Default)]
struct Lines(Vec<(String, Vec<(f64, f64)>)>);

impl Lines {
    fn add(&mut self, name: &str, clients: usize, ms: f64) {
        let point = (clients as f64, ms);
        match self.0.iter_mut().find(|(known, _)| known == name) {
            Some((_, points)) => points.push(point),
            None => self.0.push((name.to_owned(), vec![point])),
        }
    }

    fn plot(self, report: &mut Report, file: &str, title: &str) {
        let plot = Plot {
            title: title.to_owned(),
            x: "clients",
            y: "ms",
            lines: self.0,
        };
        report.plot(file, &plot);
    }
}

fn targets(report: &mut Report, name: &str, clients: usize, cores: &str, result: &Result) {
    let of = format!("{name}, {clients} clients, {cores}");
    report.target(
        format!("busy, {of}"),
        result.busy.clone(),
        Target::AtLeast(0.97),
    );
    report.target(
        format!("longest wait ÷ (clients × hold), {of}"),
        result.longest_wait.max() / (clients as f64 * result.hold.mean()),
        Target::AtMost(1.1),
    );
    report.target(
        format!("commands in a critical section, {of}"),
        result.commands.clone(),
        Target::AtMost(2.05),
    );
}

const HEADER: [&str; 12] = [
    "",
    "turns/s",
    "busy",
    "hand-over ms p50",
    "p99",
    "max",
    "to itself",
    "commands",
    "server CPU %",
    "share",
    "longest wait ms",
    "unserved",
];

/// Times in ms. One number for each repetition, but for hand-overs: one for each of those.
struct Result {
    per_second: Series,
    busy: Series,
    hold: Series,
    handovers: Series,
    to_itself: Series,
    commands: Series,
    cpu: Series,
    share: Series,
    longest_wait: Series,
    unserved: Series,
}

impl Result {
    fn all(&mut self) -> [&mut Series; 10] {
        [
            &mut self.per_second,
            &mut self.busy,
            &mut self.hold,
            &mut self.handovers,
            &mut self.to_itself,
            &mut self.commands,
            &mut self.cpu,
            &mut self.share,
            &mut self.longest_wait,
            &mut self.unserved,
        ]
    }

    fn add(&mut self, mut other: Result) {
        for (mine, others) in self.all().into_iter().zip(other.all()) {
            mine.0.append(&mut others.0);
        }
    }

    fn row(&self, name: &str) -> Vec<Cell> {
        vec![
            name.into(),
            self.per_second.median().into(),
            self.busy.median().into(),
            self.handovers.median().into(),
            self.handovers.quantile(0.99).into(),
            self.handovers.quantile(1.0).into(),
            self.to_itself.median().into(),
            self.commands.median().into(),
            self.cpu.median().into(),
            self.share.median().into(),
            self.longest_wait.max().into(),
            self.unserved.max().into(),
        ]
    }
}

fn measure(entry: &Entry, plan: Plan, side: pin::Side) -> Result {
    let server = pin::started_on(side, Server::start);
    let mut meter = Meter::of(&server);
    let cpu = meter.cpu_us();
    let start = Instant::now();
    let logs = (entry.run)(&server, plan);
    let wall = 1e6 * start.elapsed().as_secs_f64();
    let cpu = meter.cpu_us() - cpu;
    let calls = meter.calls() as f64;
    judge(&entry.name, plan, &logs, calls, 100.0 * cpu / wall)
}

fn judge(name: &str, plan: Plan, logs: &[Log], calls: f64, cpu: f64) -> Result {
    let mut turns: Vec<(usize, Turn)> = vec![];
    for (client, log) in logs.iter().enumerate() {
        turns.extend(log.turns.iter().map(|turn| (client, *turn)));
    }
    turns.sort_by(|(_, a), (_, b)| a.granted.total_cmp(&b.granted));
    let (mut handovers, mut to_itself) = (Series::default(), 0.0);
    for pair in turns.windows(2) {
        let ((before, left), (after, came)) = (pair[0], pair[1]);
        let gap = came.granted - left.releasing;
        assert!(gap > 0.0, "{name}: two held the lock at once");
        to_itself += f64::from(u8::from(before == after));
        if came.asked < left.releasing {
            handovers.0.push(1e3 * gap);
        }
    }
    let length = plan.length.as_secs_f64();
    let hold: f64 = turns
        .iter()
        .map(|(_, turn)| turn.releasing - turn.granted)
        .sum();
    let waits = logs.iter().flat_map(|log| {
        let served = log.turns.iter().map(|turn| turn.granted - turn.asked);
        served.chain(log.waiting_since.map(|since| length - since))
    });
    let counts = logs.iter().map(|log| log.turns.len() as f64);
    let (most, least) = (
        counts.clone().fold(0.0, f64::max),
        counts.fold(f64::MAX, f64::min),
    );
    let count = turns.len() as f64;
    let waiting = logs
        .iter()
        .filter(|log| log.waiting_since.is_some())
        .count();
    let of = |number| Series(vec![number]);
    Result {
        per_second: of(count / length),
        busy: of(hold / length),
        hold: of(1e3 * hold / count),
        handovers,
        to_itself: of(to_itself / count),
        commands: of((calls - waiting as f64) / count),
        cpu: of(cpu),
        share: of(most / least),
        longest_wait: of(1e3 * waits.fold(0.0, f64::max)),
        unserved: of(logs.iter().filter(|log| log.turns.is_empty()).count() as f64),
    }
}

/// Threads of this process, one for each client.
fn run<L: Lock>(plan: Plan, client: impl Fn(usize) -> L + Sync) -> Vec<Log> {
    let ready = Barrier::new(plan.clients + 1);
    let start = std::sync::OnceLock::new();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..plan.clients)
            .map(|number| {
                let (client, ready, start) = (&client, &ready, &start);
                scope.spawn(move || {
                    let lock = client(number);
                    ready.wait();
                    // The second wait: the start is set.
                    ready.wait();
                    take_turns(plan, lock, number, *start.get().expect("it was set"))
                })
            })
            .collect();
        ready.wait();
        start.set(Instant::now()).expect("it is set once");
        ready.wait();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    })
}

fn take_turns(plan: Plan, mut lock: impl Lock, number: usize, start: Instant) -> Log {
    let until = start + plan.length;
    let mut random = Rng::with_seed(number as u64);
    let mut log = Log::default();
    let now = || start.elapsed().as_secs_f64();
    while Instant::now() + plan.hold < until {
        let asked = now();
        if !lock.acquire(until - plan.hold) {
            log.waiting_since = Some(asked);
            break;
        }
        let granted = now();
        std::thread::sleep(plan.hold);
        let releasing = now();
        lock.release();
        log.turns.push(Turn {
            asked,
            granted,
            releasing,
        });
        if !plan.pause.is_zero() {
            std::thread::sleep(plan.pause.mul_f64(random.f64()));
        }
    }
    log
}

/// Whole milliseconds until then, as WAIT takes them.
fn ms_until(until: Instant) -> String {
    let left = until.saturating_duration_since(Instant::now());
    left.as_millis().to_string()
}

/// The commands, without any helper. A fresh owner for every turn.
struct Raw {
    connection: RawConnection,
    turn: u64,
    id: String,
}

impl Raw {
    fn of(server: &Server) -> Raw {
        Raw {
            connection: RawConnection::to(server),
            turn: 0,
            id: uuid(),
        }
    }

    fn owner(&self) -> String {
        format!("{}:{}", self.id, self.turn)
    }
}

impl Lock for Raw {
    fn acquire(&mut self, until: Instant) -> bool {
        self.turn += 1;
        let (owner, wait) = (self.owner(), ms_until(until));
        self.connection
            .send(&pack(&["LOCK.ACQUIRE", "lock", &owner, TTL, "WAIT", &wait]));
        self.connection.number().is_some()
    }

    fn release(&mut self) {
        let owner = self.owner();
        self.connection
            .send(&pack(&["LOCK.RELEASE", "lock", &owner]));
        assert_eq!(self.connection.number(), Some(1));
    }
}

/// Different for every client of this process.
fn uuid() -> String {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!(
        "5f0c9c5e-6f0e-4a57-9d0c-{:012}",
        NEXT.fetch_add(1, Ordering::Relaxed)
    )
}

struct Helper {
    lockkeeper: Lockkeeper,
    held: Option<lockkeeper::Held>,
}

impl Helper {
    fn of(server: &Server) -> Helper {
        let lockkeeper = Lockkeeper::open(server.url()).unwrap();
        Helper {
            lockkeeper,
            held: None,
        }
    }
}

impl Lock for Helper {
    fn acquire(&mut self, until: Instant) -> bool {
        let left = until.saturating_duration_since(Instant::now());
        let acquire = self.lockkeeper.acquire("lock").wait(left);
        // On a machine that is too busy the helper may lose patience: one more that was not served.
        self.held = match acquire.blocking() {
            Ok(Acquired::Yes(held)) => Some(held),
            Ok(Acquired::Busy) => None,
            Err(error) => {
                eprintln!("{HELPER}: {error}");
                None
            }
        };
        self.held.is_some()
    }

    fn release(&mut self) {
        let released = self
            .held
            .take()
            .expect("it is held")
            .blocking_release()
            .unwrap();
        assert_eq!(released, lockkeeper::Released::Yes);
    }
}

/// What a loop around `SET NX` does.
struct Poller {
    connection: RawConnection,
    take: Vec<u8>,
    give: Vec<u8>,
    every: Duration,
}

impl Lock for Poller {
    fn acquire(&mut self, until: Instant) -> bool {
        while Instant::now() < until {
            if self.connection.ask(&self.take) == b"+OK\r\n" {
                return true;
            }
            std::thread::sleep(self.every);
        }
        false
    }

    fn release(&mut self) {
        assert_eq!(self.connection.ask(&self.give), b":1\r\n");
    }
}

fn polling(every_ms: u64) -> impl Fn(&Server, Plan) -> Vec<Log> {
    move |server, plan| {
        let script = load_script(server, RELEASE_SCRIPT);
        run(plan, |_| {
            let owner = uuid();
            Poller {
                connection: RawConnection::to(server),
                take: pack(&["SET", "lock", &owner, "NX", "PX", TTL]),
                give: pack(&["EVALSHA", &script, "1", "lock", &owner]),
                every: Duration::from_millis(every_ms),
            }
        })
    }
}

struct Rslock {
    manager: LockManager,
    runtime: tokio::runtime::Runtime,
    held: Option<rslock::Lock>,
}

impl Lock for Rslock {
    fn acquire(&mut self, until: Instant) -> bool {
        while Instant::now() < until {
            // The crate gives up after its retries, and so asks for the whole to be repeated.
            let lock = self.manager.lock("lock", Duration::from_secs(30));
            let lock = self
                .runtime
                .block_on(async { tokio::time::timeout_at(until.into(), lock).await });
            if let Ok(Ok(lock)) = lock {
                self.held = Some(lock);
                return true;
            }
        }
        false
    }

    fn release(&mut self) {
        let lock = self.held.take().expect("it is held");
        self.runtime.block_on(self.manager.unlock(&lock));
    }
}

fn rslock(retries: u32, delay_ms: u64) -> impl Fn(&Server, Plan) -> Vec<Log> {
    move |server, plan| {
        run(plan, |_| {
            let mut manager = LockManager::new(vec![server.url()]);
            manager.set_retry(retries, Duration::from_millis(delay_ms));
            let mut runtime = tokio::runtime::Builder::new_current_thread();
            Rslock {
                manager,
                runtime: runtime.enable_all().build().unwrap(),
                held: None,
            }
        })
    }
}
