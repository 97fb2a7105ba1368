"""Examples of what locks are for, each with what happens without."""

import os
import signal
import subprocess
import sys

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
    with Lock(client, "lock", timeout=1) if locked else nullcontext():
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


GUARD = """
if tonumber(ARGV[1]) < tonumber(redis.call('GET', 'newest') or 0) then
    return 0
end
redis.call('SET', 'newest', string.format('%.0f', ARGV[1]))
redis.call('SET', 'report', ARGV[2])
return 1
"""

PAUSED = f"""
write = client.register_script({GUARD!r})
with Lock(client, "lock", timeout=0.5, raise_on_release_error=False) as lock:
    fence = lock.check()
    print("checked", flush=True)
    sys.stdin.readline()
    print(write(args=[fence, "old"]), flush=True)
"""


def test_the_storage_refuses_a_holder_that_slept_after_its_last_look(server, client):
    paused = begin(PAUSED, server.port)
    assert paused.stdout.readline() == "checked\n"
    os.kill(paused.pid, signal.SIGSTOP)
    with Lock(client, "lock", timeout=5) as lock:
        assert client.register_script(GUARD)(args=[lock.fence, "new"]) == 1
    os.kill(paused.pid, signal.SIGCONT)
    assert paused.communicate("\n", timeout=20)[0] == "0\n"
    assert client.get("report") == b"new"


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
