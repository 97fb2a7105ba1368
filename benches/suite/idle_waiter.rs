//! A standby waits for days: what does it cost the server that one client waits and nothing happens?

use std::time::Duration;

use crate::crowd::{Waiting, occupy};
use crate::measure::{Contender, Figures, Meter, Rounds, Series};
use crate::report::{Report, Target};
use crate::{pin, rounds};
use testkit::connection::RawConnection;
use testkit::{Server, eventually};

const CPU: &str = "% of a core";

/// Until a server looks at its contended keys seldom, and a little more.
const QUIET_AFTER: Duration = Duration::from_millis(1_500);

/// The CPU time of so long counts.
const ROUND: Duration = Duration::from_secs(2);

pub fn ask(report: &mut Report) {
    report.note(
        "One client has waited for more than a second, in LOCK.ACQUIRE … WAIT or in BLPOP, and nothing else \
         happens on the server. CPU time of the server's main thread in two seconds.",
    );
    let names = ["nobody waits", "one waits in BLPOP", "one waits in LOCK"];
    let ways = [None, Some(Waiting::InBlpop), Some(Waiting::InQueue)];
    let contenders = names
        .iter()
        .zip(ways)
        .map(|(name, waiting)| Contender::new(*name, measure(waiting)));
    let all = Rounds::interleave(rounds(7, 2), contenders.collect());
    report.rounds("One client waits and nothing happens", &all, &[CPU], &[]);
    let [nobody, _, lock] = names.map(|name| all.of(name, CPU));
    let more = lock.0.iter().zip(&nobody.0).map(|(lock, none)| lock - none);
    report.target(
        "one quiet waiter, % of a core more than none".to_owned(),
        Series(more.collect()),
        Target::AtMost(0.2),
    );
}

fn measure(waiting: Option<Waiting>) -> impl FnMut() -> Figures {
    let server = pin::started_on(pin::SERVER, Server::start);
    if waiting == Some(Waiting::InQueue) {
        occupy(&server, 1);
    }
    let mut meter = Meter::of(&server);
    let _waiter = waiting.map(|waiting| {
        let mut connection = RawConnection::to(&server);
        connection.send(&waiting.command(0, 1));
        eventually("it waits", || {
            meter.number("clients", "blocked_clients") == 1.0
        });
        connection
    });
    std::thread::sleep(QUIET_AFTER);
    move || {
        let _alive = (&server, &_waiter);
        let cpu = meter.cpu_us();
        std::thread::sleep(ROUND);
        let spent = meter.cpu_us() - cpu;
        vec![(CPU, 1e2 * spent / (1e6 * ROUND.as_secs_f64()))]
    }
}
