//! The storages whose statements the documentation shows, started for its test where they are
//! installed: PostgreSQL and MariaDB (which answers as MySQL does).

use std::fs;
use std::os::unix::fs::{MetadataExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;
use testkit::eventually;

use super::page::Block;
use super::run::Outcome;

/// Runs the statements, and looks for what their comments promise: `…; -- UPDATE 1`.
pub fn run(block: &Block) -> Outcome {
    let storage = match block.words.first().map(String::as_str) {
        Some("postgres") => Storage::postgres(),
        Some("mysql") => Storage::mariadb(),
        other => return Outcome::Failed(format!("sql for which storage? {other:?}")),
    };
    let Some(storage) = storage else {
        return Outcome::Skipped(format!("{} is not installed", block.words[0]));
    };
    let shown = storage.ask(&block.text);
    let mut lines = shown.lines();
    for statement in block.text.lines() {
        let Some((_, promise)) = statement.split_once("; -- ") else {
            continue;
        };
        let promise = promise.split(':').next().unwrap_or_default();
        if !lines.any(|line| line.starts_with(promise)) {
            return Outcome::Failed(format!("no '{promise}' in\n{shown}"));
        }
    }
    Outcome::Ran
}

struct Storage {
    server: Child,
    dir: TempDir,
    client: Vec<String>,
}

impl Storage {
    fn postgres() -> Option<Storage> {
        let bin = newest("/usr/lib/postgresql", "bin/initdb")?;
        let bin = bin.parent()?;
        let dir = tempdir();
        let data = dir.path().join("data");
        let path = |name: &str| bin.join(name).display().to_string();
        let data = data.to_str()?;
        let here = dir.path().to_str()?;
        let made = unprivileged(&path("initdb"))
            .args(["-A", "trust", "-U", "docs", "--no-sync", "-D", data])
            .stdout(Stdio::null())
            .status();
        assert!(made.unwrap().success(), "initdb failed");
        let server = unprivileged(&path("postgres"))
            .args(["-D", data, "-k", here, "-h", "", "-F"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let client = [
            "psql",
            "-h",
            here,
            "-U",
            "docs",
            "-v",
            "ON_ERROR_STOP=1",
            "postgres",
        ];
        Some(Storage::ready(
            server,
            client.map(str::to_owned).to_vec(),
            dir,
        ))
    }

    fn mariadb() -> Option<Storage> {
        let server = ["/usr/sbin/mariadbd", "/usr/libexec/mariadbd"]
            .into_iter()
            .find(|path| Path::new(path).exists())?;
        let dir = tempdir();
        let here = dir.path().to_str()?;
        let (data, socket) = (format!("{here}/data"), format!("{here}/socket"));
        let made = unprivileged("mariadb-install-db")
            .arg("--no-defaults")
            .args([format!("--datadir={data}"), "--skip-test-db".to_owned()])
            .arg("--auth-root-authentication-method=normal")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        assert!(made.unwrap().success(), "mariadb-install-db failed");
        let server = unprivileged(server)
            .args(["--no-defaults", "--skip-networking"])
            .args([format!("--datadir={data}"), format!("--socket={socket}")])
            .arg(format!("--pid-file={here}/pid"))
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let socket = format!("--socket={socket}");
        let client = [
            "mariadb",
            "--no-defaults",
            &socket,
            "-uroot",
            "-vvv",
            "mysql",
        ];
        Some(Storage::ready(
            server,
            client.map(str::to_owned).to_vec(),
            dir,
        ))
    }

    fn ready(server: Child, client: Vec<String>, dir: TempDir) -> Storage {
        let storage = Storage {
            server,
            dir,
            client,
        };
        eventually("the storage answers", || {
            storage.client("SELECT 1;").is_some()
        });
        storage
    }

    fn ask(&self, statements: &str) -> String {
        self.client(statements)
            .unwrap_or_else(|| panic!("the storage refuses:\n{statements}"))
    }

    fn client(&self, statements: &str) -> Option<String> {
        let file = self.dir.path().join("statements.sql");
        fs::write(&file, statements).unwrap();
        let output = Command::new(&self.client[0])
            .args(&self.client[1..])
            .stdin(fs::File::open(file).unwrap())
            .output()
            .unwrap();
        let shown = String::from_utf8_lossy(&output.stdout).into_owned();
        output.status.success().then_some(shown)
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        // SIGQUIT: it ends at once, and takes its children and shared memory with it.
        let pid = self.server.id().to_string();
        let _ = Command::new("kill").args(["-QUIT", &pid]).status();
        let _ = self.server.wait();
    }
}

/// PostgreSQL refuses to be started by root, so neither is.
const NOBODY: u32 = 65_534;

fn is_root() -> bool {
    fs::metadata("/proc/self").unwrap().uid() == 0
}

fn unprivileged(program: &str) -> Command {
    if !is_root() {
        return Command::new(program);
    }
    let nobody = NOBODY.to_string();
    let mut command = Command::new("setpriv");
    command
        .args(["--reuid", &nobody, "--regid", &nobody, "--clear-groups"])
        .args(["--pdeathsig", "KILL", program])
        .current_dir("/");
    command
}

fn tempdir() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    if is_root() {
        chown(dir.path(), Some(NOBODY), Some(NOBODY)).unwrap();
    }
    dir
}

/// The newest version below a folder that has this file.
fn newest(folder: &str, file: &str) -> Option<PathBuf> {
    let versions = fs::read_dir(folder).ok()?;
    let files = versions.map(|version| version.unwrap().path().join(file));
    files.filter(|file| file.exists()).max()
}
