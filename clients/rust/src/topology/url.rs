//! What the server's URL says: read strictly, so that nothing in it is silently left aside. No error
//! shows the URL itself, since it may hold a password.

use std::collections::{HashMap, HashSet};
use std::net::Ipv6Addr;
use std::path::PathBuf;

use percent_encoding::percent_decode_str;
use redis::{ConnectionAddr, IntoConnectionInfo, ProtocolVersion, RedisConnectionInfo};

use crate::error::Error;
use crate::printable::printable;

const FORMS: &str = "redis://host:port, rediss://…, unix:///path, redis+sentinel://host,host/master \
                     or redis+cluster://host,host";
const PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    One,
    Sentinel { master: String },
    Cluster,
}

#[derive(Clone, Default)]
pub(super) struct Login {
    pub(super) user: Option<String>,
    pub(super) password: Option<String>,
}

impl Login {
    /// Somebody without a password sends an empty one: without any, the server would take them for
    /// the user `default`.
    pub(super) fn settings(&self) -> RedisConnectionInfo {
        let mut settings = RedisConnectionInfo::default();
        if let Some(user) = &self.user {
            settings = settings.set_username(user);
        }
        match (&self.password, &self.user) {
            (Some(password), _) => settings.set_password(password),
            (None, Some(_)) => settings.set_password(""),
            (None, None) => settings,
        }
    }
}

pub(super) struct Url {
    pub(super) kind: Kind,
    /// At least one; more than one only for Sentinel and a cluster.
    pub(super) addresses: Vec<ConnectionAddr>,
    pub(super) login: Login,
    #[cfg_attr(not(feature = "sentinel"), allow(dead_code))]
    pub(super) sentinel_login: Login,
    pub(super) db: i64,
    pub(super) protocol: ProtocolVersion,
}

fn wrong(what: impl std::fmt::Display) -> Error {
    Error::Invalid(format!("the server's URL {what}"))
}

impl Url {
    pub(super) fn parse(url: &str) -> Result<Url, Error> {
        if url.trim().is_empty() {
            return Err(wrong(format_args!("is empty, it must look like {FORMS}")));
        }
        let form = || wrong(format_args!("must look like {FORMS}"));
        let (scheme, rest) = url.split_once("://").ok_or_else(form)?;
        match scheme {
            "unix" | "redis+unix" | "valkey+unix" => return Url::socket(rest),
            _ => {}
        }
        let (scheme, many) = scheme.split_once('+').unwrap_or((scheme, ""));
        let tls = match scheme {
            "redis" | "valkey" => false,
            "rediss" | "valkeys" => true,
            _ => return Err(form()),
        };
        let authority_end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        let (authority, rest) = rest.split_at(authority_end);
        // What looked like the end was within the password, unless what follows is badly written too.
        if let Some(delimiter) = rest.chars().next().filter(|_| rest.contains('@')) {
            return Err(wrong(format_args!(
                "has a '{delimiter}' before an '@': in a user, a password or a parameter write \
                 '/' as %2F, '?' as %3F, '#' as %23 and '@' as %40"
            )));
        }
        let (rest, fragment) = rest.split_once('#').unwrap_or((rest, ""));
        let insecure = match fragment {
            "" => false,
            "insecure" if tls => true,
            _ => {
                return Err(wrong(
                    "can only have #insecure at its end, for rediss://; in a password write '#' \
                     as %23",
                ));
            }
        };
        let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
        let path = path.strip_prefix('/').unwrap_or(path);
        let mut parameters = Parameters::read(query)?;
        let (login, hosts) = match authority.rsplit_once('@') {
            Some((login, hosts)) => (self::login(login)?, hosts),
            None => (Login::default(), authority),
        };

        let mut sentinel_login = Login::default();
        let (kind, port, db) = match many {
            "" => (Kind::One, PORT, path),
            "sentinel" => {
                let (master, db) = path.split_once('/').unwrap_or((path, ""));
                if master.is_empty() {
                    return Err(wrong(
                        "must name the master: redis+sentinel://host,host/master",
                    ));
                }
                let master = decode(master, "master")?;
                sentinel_login.user = parameters.take("sentinel_user");
                sentinel_login.password = parameters.take("sentinel_password");
                (Kind::Sentinel { master }, SENTINEL_PORT, db)
            }
            "cluster" => (Kind::Cluster, PORT, path),
            _ => return Err(wrong("can only have +sentinel or +cluster in its scheme")),
        };
        let db = database(db.strip_suffix('/').unwrap_or(db), parameters.take("db"))?;
        if kind == Kind::Cluster && db != 0 {
            return Err(wrong(format_args!(
                "asks for database {db}, a cluster has only database 0"
            )));
        }
        let protocol = parameters.protocol()?;
        parameters.all_are_taken(match kind {
            Kind::Sentinel { .. } => "db, protocol, sentinel_user and sentinel_password",
            Kind::One | Kind::Cluster => "db and protocol",
        })?;

        let hosts: Vec<&str> = hosts.split(',').collect();
        if kind == Kind::One && hosts.len() > 1 {
            return Err(wrong(
                "names more than one host: that takes redis+sentinel:// or redis+cluster://",
            ));
        }
        let address = |text: &&str| {
            let (host, port) = host_and_port(text, port)?;
            Ok(if tls {
                ConnectionAddr::TcpTls {
                    host,
                    port,
                    insecure,
                    tls_params: None,
                }
            } else {
                ConnectionAddr::Tcp(host, port)
            })
        };
        Ok(Url {
            kind,
            addresses: hosts.iter().map(address).collect::<Result<_, Error>>()?,
            login,
            sentinel_login,
            db,
            protocol,
        })
    }

    /// `[user:password@]/path[?db=…]`; what stands before the path may also be a parameter.
    fn socket(rest: &str) -> Result<Url, Error> {
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let absolute = || wrong("must have an absolute path: unix:///path/to/socket");
        let (before, path) = rest.split_at(rest.find('/').ok_or_else(absolute)?);
        let mut login = match before.strip_suffix('@') {
            Some(login) => self::login(login)?,
            None if before.is_empty() => Login::default(),
            None => return Err(absolute()),
        };
        if path.contains('#') || query.contains('#') {
            return Err(wrong("has a '#': write it as %23"));
        }
        let mut parameters = Parameters::read(query)?;
        login.user = parameters.take("user").or(login.user);
        login.password = parameters.take("pass").or(login.password);
        let db = database("", parameters.take("db"))?;
        let protocol = parameters.protocol()?;
        parameters.all_are_taken("db, user, pass and protocol")?;
        let path: PathBuf = {
            use std::os::unix::ffi::OsStringExt;
            let bytes = percent_decode_str(path).collect();
            std::ffi::OsString::from_vec(bytes).into()
        };
        Ok(Url {
            kind: Kind::One,
            addresses: vec![ConnectionAddr::Unix(path)],
            login,
            sentinel_login: Login::default(),
            db,
            protocol,
        })
    }

    /// How a server at this address is reached.
    pub(super) fn info(
        &self,
        address: &ConnectionAddr,
    ) -> Result<redis::ConnectionInfo, redis::RedisError> {
        let settings = self
            .login
            .settings()
            .set_db(self.db)
            .set_protocol(self.protocol);
        let info = address.clone().into_connection_info()?;
        Ok(info
            .set_redis_settings(settings)
            .set_tcp_settings(super::tcp()))
    }
}

fn login(text: &str) -> Result<Login, Error> {
    let (user, password) = match text.split_once(':') {
        Some((user, password)) => (user, Some(password)),
        None => (text, None),
    };
    let user = Some(decode(user, "user")?).filter(|user| !user.is_empty());
    let password = password.map(|it| decode(it, "password")).transpose()?;
    Ok(Login {
        // `:@` is nobody.
        password: password.filter(|it| !it.is_empty() || user.is_some()),
        user,
    })
}

fn decode(text: &str, what: &str) -> Result<String, Error> {
    let decoded = percent_decode_str(text).decode_utf8();
    let text = decoded.map_err(|_| wrong(format_args!("has a {what} that is not UTF-8")))?;
    Ok(text.into_owned())
}

/// In the path or as a parameter, as other clients have it.
fn database(path: &str, parameter: Option<String>) -> Result<i64, Error> {
    let number = |text: &str| {
        let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let number = text.parse::<u32>().ok().filter(|_| plain);
        number.map(i64::from).ok_or_else(|| {
            wrong(format_args!(
                "must have the number of a database, from 0 on, got '{}'",
                printable(text.as_bytes())
            ))
        })
    };
    let in_path = match path {
        "" => None,
        path => Some(number(path)?),
    };
    let in_parameter = parameter.as_deref().map(number).transpose()?;
    match (in_path, in_parameter) {
        (Some(path), Some(parameter)) if path != parameter => Err(wrong(format_args!(
            "asks for database {path} and for database {parameter}"
        ))),
        (in_path, in_parameter) => Ok(in_path.or(in_parameter).unwrap_or(0)),
    }
}

fn host_and_port(text: &str, default: u16) -> Result<(String, u16), Error> {
    let brackets = || wrong("must have an IPv6 address in brackets: [::1]:6379");
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']').ok_or_else(brackets)?;
            // A link-local address may name its interface after a percent sign.
            let (number, _) = host.split_once('%').unwrap_or((host, ""));
            number.parse::<Ipv6Addr>().map_err(|_| brackets())?;
            match port.strip_prefix(':') {
                Some(port) => (host, Some(port)),
                None if port.is_empty() => (host, None),
                None => return Err(brackets()),
            }
        }
        None => match text.split_once(':') {
            Some((_, port)) if port.contains(':') => return Err(brackets()),
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    if host.is_empty() {
        return Err(wrong(
            "has no host where one is expected: redis://host:port",
        ));
    }
    let is_part_of_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:%".contains(&byte);
    if !host.bytes().all(is_part_of_name) {
        return Err(wrong("has a host that is no name and no address"));
    }
    if ["0.0.0.0", "::"].contains(&host) {
        return Err(wrong(format_args!(
            "has {host} for a host: a server listens there, nobody can connect to it"
        )));
    }
    let port = match port {
        None => default,
        Some(port) => {
            let plain = port.bytes().all(|byte| byte.is_ascii_digit());
            let number = port.parse().ok().filter(|port| *port != 0 && plain);
            // Not shown: behind an unescaped ':' or '@' it may be the end of a password.
            number.ok_or_else(|| wrong("must have a port from 1 to 65535"))?
        }
    };
    Ok((host.to_owned(), port))
}

/// What stands behind the `?`, taken out one by one, so that what is left is not known.
struct Parameters {
    values: HashMap<String, String>,
    /// The names after a password, of which they may be a part: they are not shown.
    hidden: HashSet<String>,
}

impl Parameters {
    fn read(query: &str) -> Result<Parameters, Error> {
        let mut read = Parameters {
            values: HashMap::new(),
            hidden: HashSet::new(),
        };
        let mut after_password = false;
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let name = decode(name, "parameter")?;
            // As in a form, where a plus is a blank: so other clients read it.
            let value = decode(&value.replace('+', " "), "parameter")?;
            if after_password {
                read.hidden.insert(name.clone());
            }
            after_password |= name.contains("pass");
            if read.values.insert(name.clone(), value).is_some() {
                let name = read.shown(&name);
                return Err(wrong(format_args!("has {name} twice")));
            }
        }
        Ok(read)
    }

    fn shown(&self, name: &str) -> String {
        match self.hidden.contains(name) {
            true => "a parameter after the password (in which '&' is written as %26)".to_owned(),
            false => format!("the parameter '{}'", printable(name.as_bytes())),
        }
    }

    fn take(&mut self, name: &str) -> Option<String> {
        self.values.remove(name)
    }

    fn protocol(&mut self) -> Result<ProtocolVersion, Error> {
        match self.take("protocol").as_deref() {
            None | Some("2" | "resp2") => Ok(ProtocolVersion::RESP2),
            Some("3" | "resp3") => Ok(ProtocolVersion::RESP3),
            Some(_) => Err(wrong("must have 2, 3, resp2 or resp3 as its protocol")),
        }
    }

    fn all_are_taken(&self, known: &str) -> Result<(), Error> {
        match self.values.keys().min() {
            None => Ok(()),
            Some(name) => Err(wrong(format_args!(
                "has {}, which is not known; known are {known}",
                self.shown(name)
            ))),
        }
    }
}
