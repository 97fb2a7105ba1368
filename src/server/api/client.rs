//! Connections of clients.

use redis_module::raw;

use super::{Ctx, OK};

/// A client's connection: may be gone by the time it is used.
#[derive(Clone, Copy)]
pub struct ClientId(pub(super) u64);

/// What a connection was when its client was blocked, as far as it shows later whether the server is about
/// to close it.
#[derive(Clone, Copy, Debug, Default)]
pub struct ConnectionKind {
    /// As another user than the default one.
    as_named_user: bool,
    /// By RESP3, over which more may be sent than replies.
    by_resp3: bool,
}

impl Ctx {
    /// The connection of the client of this callback.
    pub fn client(&self) -> ClientId {
        // SAFETY: the context is live.
        ClientId(unsafe { api!(RedisModule_GetClientId)(self.raw) })
    }

    /// Closes a connection, if it is still there. Not from a disconnect callback: the client may be
    /// half freed.
    pub fn close(&self, client: ClientId) {
        // SAFETY: the context is live; the server looks for a client of this number.
        unsafe { api!(RedisModule_DeauthenticateAndCloseClient)(self.raw, client.0) };
    }

    /// What there is to know of the client of this command for [`Ctx::is_closing`].
    pub(super) fn connection_kind(&self) -> ConnectionKind {
        ConnectionKind {
            as_named_user: self.user_is_named(self.client()),
            by_resp3: super::flags(Some(self)) & raw::REDISMODULE_CTX_FLAGS_RESP3 != 0,
        }
    }

    fn user_is_named(&self, client: ClientId) -> bool {
        // SAFETY: the context is live; the server looks for a client of this number, and gives a string that
        // is ours to free, or null.
        let name = unsafe { self.own(api!(RedisModule_GetClientUserNameById)(self.raw, client.0)) };
        name.is_some_and(|name| name.text().bytes() != b"default")
    }

    /// Whether the connection of this client is marked to be closed: the server sends it nothing more. No
    /// function of the API shows it, but there are two reasons to mark a client that is blocked. Its user was
    /// taken away (ACL DELUSER, ACL LOAD): then it has become the default user, which it cannot by itself
    /// while it waits. Or its output buffer is full, which it can be by what is pushed to it: only then
    /// CLIENT LIST is asked, which on Valkey since 8.1 goes through all clients.
    pub fn is_closing(&self, before: ConnectionKind) -> bool {
        let client = self.client();
        before.as_named_user && !self.user_is_named(client)
            || before.by_resp3
                && is_pushed_to(client)
                // Where CLIENT is renamed nobody is.
                && self.client_list(client, has_closing_flag) == Some(true)
    }
}

/// Whether the client gets messages of channels, or what it is to forget of its cache.
fn is_pushed_to(client: ClientId) -> bool {
    // SAFETY: a C struct of numbers and bytes: all zero is a valid value.
    let mut info = unsafe { std::mem::zeroed::<raw::RedisModuleClientInfo>() };
    info.version = u64::from(raw::REDISMODULE_CLIENTINFO_VERSION);
    let pushed =
        raw::REDISMODULE_CLIENTINFO_FLAG_PUBSUB | raw::REDISMODULE_CLIENTINFO_FLAG_TRACKING;
    // SAFETY: the server writes a struct of the version that is named in it; this one lives and has it.
    let status = unsafe { api!(RedisModule_GetClientInfoById)((&raw mut info).cast(), client.0) };
    status == OK && info.flags & u64::from(pushed) != 0
}

/// A field of a line of CLIENT LIST.
pub fn client_field<'l>(line: &'l str, name: &str) -> Option<&'l str> {
    // The last one: the path of a unix socket, which may say anything, stands before it.
    let mut fields = line.rsplit(' ');
    fields.find_map(|field| field.strip_prefix(name)?.strip_prefix('='))
}

/// Whether a line of CLIENT LIST has one of the flags A (closed as soon as possible) and c (closed after
/// its replies).
fn has_closing_flag(line: &[u8]) -> bool {
    let line = String::from_utf8_lossy(line);
    client_field(&line, "flags").is_some_and(|flags| flags.contains(['A', 'c']))
}
