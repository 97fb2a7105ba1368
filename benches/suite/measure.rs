//! Measuring side by side: contenders take turns in short rounds, and are compared round by round.

use std::collections::HashMap;

use redis::Connection;

use testkit::Server;

/// One figure in all rounds.
#[derive(Clone, Debug, Default)]
pub struct Series(pub Vec<f64>);

impl Series {
    /// The value below which this share of all lies; between two of them, in proportion.
    pub fn quantile(&self, share: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let Some(last) = sorted.len().checked_sub(1) else {
            return f64::NAN;
        };
        let place = last as f64 * share;
        let (low, high) = (
            sorted[place.floor() as usize],
            sorted[place.ceil() as usize],
        );
        // Not subtracted from one another where they are equal: both may be infinite.
        if low == high {
            low
        } else {
            low + (high - low) * place.fract()
        }
    }

    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    pub fn max(&self) -> f64 {
        self.quantile(1.0)
    }

    pub fn mean(&self) -> f64 {
        self.0.iter().sum::<f64>() / self.0.len() as f64
    }

    /// Round by round.
    pub fn over(&self, other: &Series) -> Series {
        Series(self.0.iter().zip(&other.0).map(|(a, b)| a / b).collect())
    }
}

/// What one round of one contender gave: figures by name.
pub type Figures = Vec<(&'static str, f64)>;

pub struct Contender<'a> {
    pub name: String,
    measure: Box<dyn FnMut() -> Figures + 'a>,
}

impl<'a> Contender<'a> {
    pub fn new(name: impl Into<String>, measure: impl FnMut() -> Figures + 'a) -> Contender<'a> {
        Contender {
            name: name.into(),
            measure: Box::new(measure),
        }
    }

    pub fn named(self, name: &str) -> Contender<'a> {
        Contender {
            name: name.to_owned(),
            ..self
        }
    }
}

/// All figures of all contenders, in the order they were given.
pub struct Rounds {
    pub names: Vec<String>,
    series: HashMap<(String, &'static str), Series>,
}

impl Rounds {
    /// Every contender once in each round, each round beginning with another one. The round before
    /// the first, in which all is cold, does not count.
    pub fn interleave(rounds: usize, mut contenders: Vec<Contender>) -> Rounds {
        for contender in &mut contenders {
            (contender.measure)();
        }
        let mut all = Rounds {
            names: contenders.iter().map(|one| one.name.clone()).collect(),
            series: HashMap::new(),
        };
        for round in 0..rounds {
            for turn in 0..contenders.len() {
                let place = (round + turn) % contenders.len();
                let figures = (contenders[place].measure)();
                all.add(place, figures);
            }
        }
        all
    }

    fn add(&mut self, place: usize, figures: Figures) {
        for (figure, value) in figures {
            let name = self.names[place].clone();
            let series = self.series.entry((name, figure)).or_default();
            series.0.push(value);
        }
    }

    /// More rounds of the same contenders.
    pub fn append(&mut self, more: Rounds) {
        for (name, Series(mut values)) in more.series {
            self.series.entry(name).or_default().0.append(&mut values);
        }
    }

    pub fn of(&self, name: &str, figure: &'static str) -> &Series {
        let series = self.series.get(&(name.to_owned(), figure));
        series.unwrap_or_else(|| panic!("{name} has no {figure}"))
    }

    pub fn has(&self, name: &str) -> bool {
        self.names.iter().any(|known| known == name)
    }

    pub fn ratio(&self, figure: &'static str, of: &str, to: &str) -> Series {
        self.of(of, figure).over(self.of(to, figure))
    }
}

/// What the server says of its own work.
pub struct Meter(Connection);

impl Meter {
    pub fn of(server: &Server) -> Meter {
        Meter(server.connect())
    }

    /// CPU time of the thread that carries out commands, in µs: kept by the kernel, to the µs.
    pub fn cpu_us(&mut self) -> f64 {
        let info = self.info("cpu");
        let seconds = |field| -> f64 {
            let value = field_of(&info, field).expect("servers since 6.2 tell");
            value.parse().unwrap()
        };
        1e6 * (seconds("used_cpu_user_main_thread") + seconds("used_cpu_sys_main_thread"))
    }

    pub fn reset_commands(&mut self) {
        let reset = redis::cmd("CONFIG")
            .arg("RESETSTAT")
            .query::<()>(&mut self.0);
        reset.unwrap();
    }

    /// Time spent in these commands (lower-case) since the reset, in µs.
    pub fn command_us(&mut self, names: &[&str]) -> f64 {
        let commands = self.commands();
        names
            .iter()
            .filter_map(|name| commands.get(*name))
            .map(|(_, us)| us)
            .sum()
    }

    /// How many commands of clients there were since the reset, those inside of scripts included,
    /// ours and those of a connection's first words not.
    pub fn calls(&mut self) -> u64 {
        let commands = self.commands();
        commands
            .iter()
            .filter(|(name, _)| !matches!(name.as_str(), "info" | "config|resetstat"))
            .filter(|(name, _)| {
                !matches!(name.split('|').next(), Some("client" | "hello" | "script"))
            })
            .map(|(_, (calls, _))| calls)
            .sum()
    }

    fn commands(&mut self) -> HashMap<String, (u64, f64)> {
        let info = self.info("commandstats");
        let read = |line: &str| -> Option<(String, (u64, f64))> {
            let (name, fields) = line.strip_prefix("cmdstat_")?.split_once(':')?;
            let mut fields = fields.split(',');
            let calls = fields.next()?.strip_prefix("calls=")?.parse().ok()?;
            let us = fields.next()?.strip_prefix("usec=")?.parse().ok()?;
            Some((name.to_owned(), (calls, us)))
        };
        info.lines().filter_map(read).collect()
    }

    pub fn number(&mut self, section: &str, field: &str) -> f64 {
        let info = self.info(section);
        let value = field_of(&info, field).unwrap_or_else(|| panic!("no {field}"));
        value.parse().unwrap()
    }

    fn info(&mut self, section: &str) -> String {
        let info = redis::cmd("INFO").arg(section).query(&mut self.0);
        info.unwrap()
    }
}

fn field_of<'i>(info: &'i str, field: &str) -> Option<&'i str> {
    info.lines()
        .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))
}
