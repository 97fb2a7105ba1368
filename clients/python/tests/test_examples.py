"""Examples of what locks are for, each with what happens without."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import nullcontext

import pytest

from conftest import PRELUDE, begin
from redis_lockkeeper import Lock

ADD = """
from contextlib import nullcontext
me, locked, die_at = sys.argv[2], sys.argv[3] == "locked", int(sys.argv[4])
client.incr("ready")
while int(client.get("ready")) < 4:
    pass
for turn in range(60):
    with Lock(client, "lock", timeout=3) if locked else nullcontext():
        number = int(client.get("number") or 0)
        if turn == die_at:
            os.kill(os.getpid(), 9)
        time.sleep(0.0005)
        client.set("number", number + 1)
        client.hincrby("writes", me, 1)
"""


@pytest.mark.parametrize("how", ["locked", "unlocked"])
def test_processes_that_race_on_a_number(server, client, how):
    programs = [begin(ADD, server.port, each, how, 20 if each == 3 else -1) for each in range(4)]
    codes = [program.wait(60) for program in programs]
    assert codes == [0, 0, 0, -signal.SIGKILL], "the last is killed with the lock in its hands"
    writes = sum(int(count) for count in client.hgetall("writes").values())
    lost = writes - int(client.get("number"))
    assert (lost == 0) if how == "locked" else (lost > 0)


@pytest.mark.parametrize("how", ["locked", "unlocked"])
def test_threads_that_race_on_a_number(client, how):
    start = threading.Barrier(4)

    def work():
        start.wait()
        for _ in range(30):
            with Lock(client, "lock") if how == "locked" else nullcontext():
                number = int(client.get("number") or 0)
                time.sleep(0.0005)
                client.set("number", number + 1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (int(client.get("number")) == 120) is (how == "locked")


WRITE = """
def write(file, fence, text):
    \"\"\"Returns whether the database took it: not from a holder older than the last that wrote.\"\"\"
    with sqlite3.connect(file) as database:
        update = "UPDATE reports SET text = ?, fence = ? WHERE name = 'daily' AND fence <= ?"
        return database.execute(update, (text, fence, fence)).rowcount == 1
"""

PAUSED = (
    "import sqlite3\n"
    + WRITE
    + """
with Lock(client, "report", timeout=2, raise_on_release_error=False) as lock:
    fence = lock.check()
    print("checked", flush=True)
    sys.stdin.readline()
    print(write(sys.argv[2], fence, "old"), flush=True)
"""
)


def test_the_database_refuses_a_holder_that_slept_after_its_last_look(server, client, tmp_path):
    file, names = tmp_path / "reports.db", {"sqlite3": sqlite3}
    exec(WRITE, names)
    with sqlite3.connect(file) as database:
        database.execute("CREATE TABLE reports (name TEXT PRIMARY KEY, text TEXT, fence INTEGER NOT NULL)")
        database.execute("INSERT INTO reports VALUES ('daily', '', 0)")
    paused = begin(PAUSED, server.port, file)
    assert paused.stdout.readline() == "checked\n"
    os.kill(paused.pid, signal.SIGSTOP)
    with Lock(client, "report", timeout=5) as lock:
        assert names["write"](file, lock.fence, "new")
    os.kill(paused.pid, signal.SIGCONT)
    assert paused.communicate("\n", timeout=20)[0] == "False\n"
    with sqlite3.connect(file) as database:
        assert database.execute("SELECT text FROM reports").fetchone() == ("new",)


JOB = """
lock = Lock(client, "nightly", timeout=5, blocking=False)
if lock.acquire():
    client.incr("runs")
    lock.release_after(30)      # the other machine's clock may be behind
"""


def test_a_job_that_must_not_run_twice(server, client):
    for _ in range(3):
        subprocess.run([sys.executable, "-c", PRELUDE + JOB, str(server.port)], check=True, timeout=30)
    assert client.get("runs") == b"1"
    assert 0 < client.pttl("nightly") <= 30_000
