//! Three sentinels that watch a master with one replica, ended by pid when dropped.

use std::fs::{self, File};
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use super::{Server, eventually, free_port};

pub const MASTER: &str = "library";

pub struct Sentinels {
    _dir: TempDir,
    processes: Vec<Child>,
    pub hosts: Vec<String>,
}

impl Sentinels {
    pub fn watching(master: &Server) -> Sentinels {
        let dir = TempDir::new().unwrap();
        let ports: Vec<u16> = (0..3).map(|_| free_port()).collect();
        let hosts: Vec<String> = ports
            .iter()
            .map(|port| format!("127.0.0.1:{port}"))
            .collect();
        let start = |port: &u16| {
            let config = dir.path().join(port.to_string());
            let text = format!(
                "port {port}\nbind 127.0.0.1\ndir {}\n\
                 sentinel monitor {MASTER} 127.0.0.1 {} 2\n\
                 sentinel down-after-milliseconds {MASTER} 1500\n\
                 sentinel failover-timeout {MASTER} 3000\n",
                dir.path().display(),
                master.port(),
            );
            fs::write(&config, text).unwrap();
            let binary = std::env::var_os("LOCKKEEPER_TEST_SERVER");
            Command::new(binary.unwrap_or("redis-server".into()))
                .arg(&config)
                .arg("--sentinel")
                .stdout(File::create(config.with_extension("log")).unwrap())
                .stdin(Stdio::null())
                .spawn()
                .unwrap()
        };
        let sentinels = Sentinels {
            processes: ports.iter().map(start).collect(),
            _dir: dir,
            hosts,
        };
        sentinels.eventually_ready();
        sentinels
    }

    /// Until a failover could succeed: all know each other, the master and its replica, and are well.
    pub fn eventually_ready(&self) {
        for host in &self.hosts {
            eventually(format!("sentinel {host} is ready for a failover"), || {
                let about = |what: &str| sentinel(host, what).unwrap_or_default();
                let (master, replicas) = (about("MASTERS"), about("REPLICAS"));
                let has = |name: &str, value: &str| {
                    master
                        .iter()
                        .any(|of| of.contains(&(name.into(), value.into())))
                };
                let well = |replica: &Vec<(String, String)>| {
                    replica.contains(&("flags".into(), "slave".into()))
                        && replica.contains(&("master-link-status".into(), "ok".into()))
                };
                has("num-other-sentinels", "2")
                    && has("flags", "master")
                    && replicas.len() == 1
                    && replicas.iter().all(well)
            });
        }
    }

    /// Until each names this server as the master, and points nobody to another.
    pub fn eventually_name(&self, master: &Server) {
        for host in &self.hosts {
            eventually(format!("sentinel {host} names the new master"), || {
                let port = ("port".to_owned(), master.port().to_string());
                let about = sentinel(host, "MASTERS").unwrap_or_default();
                about.iter().any(|of| of.contains(&port))
            });
        }
    }
}

type About = Vec<Vec<(String, String)>>;

fn sentinel(host: &str, what: &str) -> Option<About> {
    let client = redis::Client::open(format!("redis://{host}/")).ok()?;
    let mut redis = client.get_connection().ok()?;
    let mut ask = redis::cmd("SENTINEL");
    ask.arg(what);
    if what != "MASTERS" {
        ask.arg(MASTER);
    }
    ask.query(&mut redis).ok()
}

impl Drop for Sentinels {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}
