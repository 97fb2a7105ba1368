//! How late does a wait end, and how late is the next granted when others change the key?

use std::time::{Duration, Instant};

use crate::crowd::occupy;
use crate::measure::{Contender, Figures, Rounds};
use crate::report::{Report, Target};
use crate::{pin, rounds};
use testkit::Server;
use testkit::connection::{RawConnection, pack};

const LATE: &str = "ms late";

/// So long waits take that end by their timeout.
const WAIT: Duration = Duration::from_millis(20);

/// Until a server polls its contended keys seldom, and a little more.
const QUIET_AFTER: Duration = Duration::from_millis(1_300);

const LONG: &str = "3600000";

pub fn ask(report: &mut Report) {
    report.note(
        "A wait of 20 ms for a held lock, or for an empty list, ends by its timeout. A lock that one client \
         waits for is deleted, among 1 or 200 contended keys; or its lease is cut to 1 ms by its holder after \
         more than a second in which nothing happened. The time to the client's reply counts.",
    );
    let many = 200;
    let all = Rounds::interleave(
        rounds(15, 2),
        vec![
            Contender::new("BLPOP times out", time_out("BLPOP empty 0.02")),
            Contender::new(
                "LOCK times out",
                time_out("LOCK.ACQUIRE crowded:0 waiter 1000 WAIT 20"),
            ),
            Contender::new("DEL, 1 key", delete(1)),
            Contender::new("DEL, 200 keys", delete(many)),
            Contender::new("RENEW after a quiet second", shorten_when_quiet()),
        ],
    );
    report.rounds("How late", &all, &[LATE], &[]);
    report.target(
        "LOCK ÷ BLPOP, ms late, a wait times out",
        all.ratio(LATE, "LOCK times out", "BLPOP times out"),
        Target::AtMost(2.0),
    );
    report.target(
        "200 keys ÷ 1 key, ms late, DEL",
        all.ratio(LATE, "DEL, 200 keys", "DEL, 1 key"),
        Target::AtMost(2.0),
    );
    report.target(
        "ms late, DEL among 200 contended keys, p50",
        all.of("DEL, 200 keys", LATE).clone(),
        Target::AtMost(15.0),
    );
    report.target(
        "ms late, RENEW after a quiet second, p50",
        all.of("RENEW after a quiet second", LATE).clone(),
        Target::AtMost(5.0),
    );
}

fn late(since: Instant) -> Figures {
    vec![(LATE, 1e3 * since.elapsed().as_secs_f64())]
}

/// A command that waits for [`WAIT`].
fn time_out(command: &str) -> impl FnMut() -> Figures {
    let server = pin::started_on(pin::SERVER, Server::start);
    occupy(&server, 1);
    let mut waiter = RawConnection::to(&server);
    let command = pack(&command.split(' ').collect::<Vec<_>>());
    move || {
        let _alive = &server;
        let due = Instant::now() + WAIT;
        waiter.ask(&command);
        late(due)
    }
}

/// A server on which "holder" has so many locks, and one client waits for each.
struct Contended {
    _server: Server,
    holder: RawConnection,
    waiters: Vec<RawConnection>,
}

impl Contended {
    fn new(keys: usize) -> Contended {
        let server = pin::started_on(pin::SERVER, Server::start);
        occupy(&server, keys);
        let holder = RawConnection::to(&server);
        let waiters = (0..keys).map(|_| RawConnection::to(&server)).collect();
        let mut contended = Contended {
            _server: server,
            holder,
            waiters,
        };
        for key in 0..keys {
            contended.wait(key);
        }
        contended
    }

    fn wait(&mut self, key: usize) {
        let name = format!("crowded:{key}");
        let wait = ["LOCK.ACQUIRE", &name, "waiter", LONG, "WAIT", LONG];
        self.waiters[key].send(&pack(&wait));
    }

    /// How late the waiter is granted when this is done to the key.
    fn granted_after(&mut self, key: usize, command: &[&str]) -> Figures {
        let name = format!("crowded:{key}");
        let start = Instant::now();
        self.holder.ask(&pack(command));
        assert!(self.waiters[key].number().is_some(), "it was granted");
        let late = late(start);
        self.holder.ask(&pack(&["LOCK.RELEASE", &name, "waiter"]));
        self.holder
            .ask(&pack(&["LOCK.ACQUIRE", &name, "holder", LONG]));
        self.wait(key);
        late
    }
}

fn delete(keys: usize) -> impl FnMut() -> Figures {
    let mut contended = Contended::new(keys);
    let mut next = (0..keys).cycle();
    move || {
        let key = next.next().expect("there are some");
        contended.granted_after(key, &["DEL", &format!("crowded:{key}")])
    }
}

fn shorten_when_quiet() -> impl FnMut() -> Figures {
    let mut contended = Contended::new(1);
    move || {
        std::thread::sleep(QUIET_AFTER);
        contended.granted_after(0, &["LOCK.RENEW", "crowded:0", "holder", "1"])
    }
}
