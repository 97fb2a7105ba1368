//! Where servers differ: which ones, what differs, what we do. Every check of a version is in this file.
//!
//! Some differences need no check, because one way is right on all servers. The code says them where it goes
//! that way:
//!
//! | server | what differs | where |
//! |---|---|---|
//! | Redis 7.0 | no `RedisModule_Microseconds` | `api/clocks` |
//! | Redis 7.0 | goes on telling a module of events that was not loaded | `entry` |
//! | before 7.2 | no ACL categories of a module's commands | `api/commands` |
//! | before 7.4, Valkey before 8.0 | no ACL categories of a module | `api/commands` |
//! | Redis 7.2 | the timeout of a blocked client crashes when it meets a grant | `api/blocked` |
//! | all | goes on using the last command of a client after it is unloaded | `load_checks` |
//! | from 7.2 | an ACL rule that names a command of an unloaded module ends the server | `load_checks` |
//! | Redis 8.0 | CONFIG SET takes back a number after the module was asked to apply it | `api/configuration` |
//! | Redis 8.2 | asking a missing key for its end crashes | `api/key` |
//! | Valkey | blocks no client that is subscribed to a channel | `api/blocked` |
//! | Valkey | GET gives a key with a shared number another value | `api/key` |
//! | Valkey 8.1 | loads modules with an allocator of their own | `api/module` |
//! | Valkey 8.1 | CLIENT LIST ID goes through all clients | `api/client` |
//! | Valkey 9.0 | leaves some blocked clients to us when it becomes a replica | `waiting` |

use super::api::Ctx;

/// What differs on some servers, and what we do about it. Which servers: [`QUIRKS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quirk {
    /// Lacks functions that we need. We refuse to be loaded.
    TooOld,
    /// A client that CLIENT UNBLOCK meets in the turn of the loop in which it is granted its lock gets no
    /// reply at all, and would take that of its next command for it. We close its connection.
    ClientUnblockMayLeaveNoReply,
    /// The server crashes when CLIENT UNBLOCK meets a grant. We do not offer it.
    ClientUnblockCrashes,
    /// To the server an unpacked value is a new one, used just now. We set the idle time back.
    UnpackingIsAUse,
    /// The API makes a thousand seconds of each millisecond of the idle time that it is given. We leave the
    /// idle time alone.
    CannotSetIdleTime,
    /// Without an option of its own, a loaded module switches CLUSTER MIGRATESLOTS off (from 9.0; versions
    /// before keep a bit that they do not know without a look at it). We set that option.
    AsksForAtomicSlotMigration,
}

/// Major, minor, patch.
type Version = (u32, u32, u32);

const FIRST: Version = (0, 0, 0);
const LAST: Version = (u32::MAX, 0, 0);

/// The oldest server that has all we need.
const OLDEST_REDIS: Version = (7, 0, 5);

/// Which server this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Server {
    Redis(Version),
    Valkey(Version),
}

/// The servers that have a quirk: from the first version to, and without, the second.
enum Servers {
    Redis(Version, Version),
    Valkey(Version, Version),
}

use Servers::{Redis, Valkey};

/// The table.
const QUIRKS: [(Quirk, &[Servers]); 6] = [
    (Quirk::TooOld, &[Redis(FIRST, OLDEST_REDIS)]),
    (
        Quirk::ClientUnblockMayLeaveNoReply,
        &[Redis(FIRST, (7, 2, 0))],
    ),
    (
        Quirk::ClientUnblockCrashes,
        &[Redis((7, 2, 0), (7, 3, 0)), Valkey((7, 2, 0), (7, 3, 0))],
    ),
    (Quirk::UnpackingIsAUse, &[Redis(FIRST, (7, 2, 0))]),
    (Quirk::CannotSetIdleTime, &[Valkey((9, 0, 0), LAST)]),
    (Quirk::AsksForAtomicSlotMigration, &[Valkey(FIRST, LAST)]),
];

impl Server {
    pub fn of(ctx: &Ctx) -> Server {
        let redis = Server::redis(ctx.redis_version());
        // Too old a server cannot be asked whether it is Valkey.
        if redis.quirks().has(Quirk::TooOld) {
            return redis;
        }
        match ctx.valkey_version() {
            Some(version) => Server::valkey(&version),
            None => redis,
        }
    }

    /// From 0x00MMmmpp.
    pub fn redis(version: i32) -> Server {
        let [_, major, minor, patch] = version.to_be_bytes().map(u32::from);
        Server::Redis((major, minor, patch))
    }

    /// From `9.0.0` or `9.0.0-rc1`.
    fn valkey(version: &str) -> Server {
        let mut parts = version
            .split(['.', '-'])
            .map_while(|part| part.parse().ok());
        let mut next = || parts.next().unwrap_or(0);
        Server::Valkey((next(), next(), next()))
    }

    pub fn quirks(self) -> Quirks {
        let has = |servers: &Servers| match (self, servers) {
            (Server::Redis(version), Redis(from, before))
            | (Server::Valkey(version), Valkey(from, before)) => {
                (*from..*before).contains(&version)
            }
            _ => false,
        };
        let present = QUIRKS.iter().filter(|(_, servers)| servers.iter().any(has));
        Quirks(present.fold(0, |bits, (quirk, _)| bits | bit(*quirk)))
    }
}

/// The quirks of one server, quick to look up.
#[derive(Clone, Copy, Debug)]
pub struct Quirks(u32);

impl Quirks {
    pub fn has(self, quirk: Quirk) -> bool {
        self.0 & bit(quirk) != 0
    }
}

fn bit(quirk: Quirk) -> u32 {
    1 << quirk as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_read_as_servers_write_it() {
        assert_eq!(Server::redis(0x07_02_04), Server::Redis((7, 2, 4)));
        assert_eq!(Server::valkey("9.1.0"), Server::Valkey((9, 1, 0)));
        assert_eq!(Server::valkey("9.0.0-rc1"), Server::Valkey((9, 0, 0)));
        assert_eq!(
            Server::valkey("255.255.255"),
            Server::Valkey((255, 255, 255))
        );
    }

    #[test]
    fn each_server_has_its_own_quirks() {
        let quirks = |server: Server| {
            let all = QUIRKS.iter().map(|(quirk, _)| *quirk);
            all.filter(|quirk| server.quirks().has(*quirk))
                .collect::<Vec<_>>()
        };
        use Quirk::*;
        for (server, expected) in [
            (
                Server::Redis((7, 0, 15)),
                &[ClientUnblockMayLeaveNoReply, UnpackingIsAUse][..],
            ),
            (Server::Redis((7, 2, 4)), &[ClientUnblockCrashes]),
            (Server::Redis((7, 4, 0)), &[]),
            (Server::Redis((8, 2, 1)), &[]),
            (
                Server::Valkey((7, 2, 11)),
                &[ClientUnblockCrashes, AsksForAtomicSlotMigration],
            ),
            (Server::Valkey((8, 1, 0)), &[AsksForAtomicSlotMigration]),
            (
                Server::Valkey((9, 1, 0)),
                &[CannotSetIdleTime, AsksForAtomicSlotMigration],
            ),
        ] {
            assert_eq!(quirks(server), expected, "{server:?}");
        }
    }
}
