//! What does a renewal cost?

use crate::measure::Rounds;
use crate::report::{Report, Target};
use crate::rounds;
use crate::sequence::{
    COMMANDS, CPU, KEYS, OWNER, Sequence, TTL, WALL, in_all_settings, is_understood, key,
    load_script, words,
};
use testkit::{Server, ask};

const OURS: &str = "RENEW";
const LUA: &str = "Lua";
const PEXPIRE: &str = "PEXPIRE (unsafe)";

/// What everybody uses: a new end if the value is still mine.
pub const RENEW_SCRIPT: &str = "if redis.call('get', KEYS[1]) == ARGV[1] then \
     return redis.call('pexpire', KEYS[1], ARGV[2]) else return 0 end";

pub fn ask(report: &mut Report) {
    report.note(
        "One client renews 64 locks in turn; server and client on *one core*, any replica on the \
         other. Figures are for one renewal.",
    );
    in_all_settings(|setting, server| {
        for (depth, operations) in [(1, 4_000), (32, 12_000)] {
            let contenders = renewals(server)
                .iter()
                .map(|renewal| renewal.contender(server, depth, rounds(operations, operations / 4)))
                .collect();
            let all = Rounds::interleave(rounds(11, 3), contenders);
            let title = format!("Renewal, {setting}, {depth} commands at a time");
            report.rounds(&title, &all, &[COMMANDS, CPU, WALL], &[LUA, PEXPIRE]);
            targets(report, &format!("{setting}, {depth} at a time"), &all);
        }
    });
}

fn targets(report: &mut Report, setting: &str, all: &Rounds) {
    for (figure, rival, most) in [
        (COMMANDS, LUA, 0.28),
        (CPU, LUA, 0.53),
        (CPU, PEXPIRE, 1.15),
    ] {
        report.target(
            format!("renewal ÷ {rival}, {figure}, {setting}"),
            all.ratio(figure, OURS, rival),
            Target::AtMost(most),
        );
    }
}

/// Each on keys of its own, which are held.
fn renewals(server: &Server) -> Vec<Sequence> {
    let mut redis = server.connect();
    for number in 0..KEYS {
        let (ours, plain) = (key(number), plain(&key(number)));
        // Longer than the run, whatever the renewals do.
        ask!(redis, "LOCK.ACQUIRE", ours, OWNER, 3_600_000).unwrap();
        ask!(redis, "SET", plain, OWNER, "PX", 3_600_000).unwrap();
    }
    let script = load_script(server, RENEW_SCRIPT);
    let mut renewals = vec![
        Sequence::new(OURS, &["lock.renew"], |key| {
            vec![words!["LOCK.RENEW", key, OWNER, TTL]]
        }),
        Sequence::new(LUA, &["evalsha"], move |key| {
            vec![words!["EVALSHA", &*script, "1", plain(key), OWNER, TTL]]
        }),
        Sequence::new(PEXPIRE, &["pexpire"], |key| {
            vec![words!["PEXPIRE", plain(key), TTL]]
        }),
        Sequence::new("PING", &["ping"], |_| vec![words!["PING"]]),
        Sequence::new("SET", &["set"], |key| {
            vec![words!["SET", format!("floor:{key}"), OWNER]]
        }),
    ];
    let set_ifeq = ["SET", &plain(&key(0)), OWNER, "IFEQ", OWNER, "PX", TTL];
    if is_understood(server, &set_ifeq) {
        renewals.push(Sequence::new("SET IFEQ", &["set"], |key| {
            vec![words!["SET", plain(key), OWNER, "IFEQ", OWNER, "PX", TTL]]
        }));
    }
    renewals
}

fn plain(key: &str) -> String {
    format!("plain:{key}")
}
