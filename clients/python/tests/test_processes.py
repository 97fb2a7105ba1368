"""Locks and the ways of processes: fork, spawn, exit, kill."""

import gc
import os
import signal
import subprocess
import sys
import time

import pytest

import redis_lockkeeper
from conftest import LIBRARY, PRELUDE, Client, begin, eventually, run
from redis_lockkeeper import Lock


def test_a_forked_child_neither_renews_nor_releases(server, client):
    said = run(
        PRELUDE
        + """
lock = Lock(client, "book", timeout=3)
lock.acquire()
pid = os.fork()
if pid == 0:
    print("child", lock.remaining(), lock.lost.is_set(), flush=True)
    for call in (lock.release, lambda: lock.extend(5)):
        try:
            call()
        except redis_lockkeeper.ForkedError as error:
            print("forked", flush=True)
    print(lock.acquire(blocking=False), flush=True)
    with Lock(client, "own", timeout=3) as own:
        renewed(own)
        print("own", lock.owned(), own.check() > 0, flush=True)
    sys.exit()
os.waitpid(pid, 0)
print("parent", lock.check() > 0, lock.owned(), flush=True)
os.kill(os.getpid(), 9) if len(sys.argv) > 2 else lock.release()
""",
        server.port,
    )
    wanted = ["child 0.0 True", "forked", "forked", "False", "own False True", "parent True True"]
    assert said.split("\n")[:-1] == wanted
    assert client.get("book") is None


def test_a_child_does_not_keep_the_lock_of_a_dead_parent(server, client):
    program = begin(
        """
lock = Lock(client, "book", timeout=0.5)
lock.acquire()
if os.fork() == 0:
    with Lock(client, "own", timeout=6):
        print("held", flush=True)
        time.sleep(30)
time.sleep(30)
""",
        server.port,
    )
    assert program.stdout.readline() == "held\n"
    os.kill(program.pid, signal.SIGKILL)
    eventually(lambda: client.get("book") is None, "it ends with its ttl")
    assert client.get("own") is not None, "the child keeps its own"
    program.wait()


@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver"])
def test_multiprocessing(server, client, tmp_path, how):
    script = tmp_path / "adding.py"
    script.write_text(
        PRELUDE
        + """
import multiprocessing

def add(port):
    client = Client(port=port)
    for _ in range(20):
        with Lock(client, "lock", timeout=5):
            client.set("number", int(client.get("number") or 0) + 1)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[2])
    with Lock(client, "parent's", timeout=5):
        children = [context.Process(target=add, args=(int(sys.argv[1]),)) for _ in range(4)]
        for child in children:
            child.start()
        for child in children:
            child.join()
            assert child.exitcode == 0
"""
    )
    subprocess.run([sys.executable, str(script), str(server.port), how], check=True, timeout=60)
    assert int(client.get("number")) == 80
    assert not client.keys("lock*")
    assert client.get("parent's") is None


def test_a_killed_holder_blocks_others_for_one_timeout(server, client):
    program = begin(
        """
Lock(client, "free").acquire()
lock = Lock(client, "book", timeout=3)
lock.acquire()
renewed(lock)
print("held", flush=True)
time.sleep(30)
""",
        server.port,
    )
    assert program.stdout.readline() == "held\n"
    program.kill()
    program.wait()
    started = time.monotonic()
    lock = Lock(client, "book")
    assert lock.acquire(blocking_timeout=20)
    assert time.monotonic() - started < 8
    lock.release()


def test_a_stopped_holder_knows_that_its_lock_is_lost_before_its_watchdog_does(server, client):
    program = begin(
        """
lock = Lock(client, "book", timeout=0.5)
lock.acquire()
print("held", flush=True)
sys.stdin.readline()
print(lock.remaining(), lock.lost.is_set(), flush=True)
""",
        server.port,
    )
    assert program.stdout.readline() == "held\n"
    os.kill(program.pid, signal.SIGSTOP)
    eventually(lambda: client.get("book") is None)
    program.stdin.write("\n")
    program.stdin.flush()
    os.kill(program.pid, signal.SIGCONT)
    assert program.stdout.readline() == "0.0 True\n"
    program.communicate()


def test_a_program_that_ends_releases_what_it_holds(server, client):
    run(PRELUDE + "kept = [Lock(client, str(n)) for n in range(20)]\nfor lock in kept: lock.acquire()", server.port)
    assert client.keys() == []


def test_a_program_that_ends_by_an_exception_releases_what_it_holds(server, client):
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run(PRELUDE + "with Lock(client, 'book'): 1 / 0", server.port)
    assert client.keys() == []


def test_at_exit_a_lock_is_kept_or_refused_but_not_left_behind(server, client):
    """Python 3.12 starts no threads any more at that time."""
    said = run(
        PRELUDE
        + """
import atexit
def last():
    lock = Lock(client, "book")
    try:
        print(lock.acquire())
        lock.release()
    except redis_lockkeeper.UnreachableError as error:
        print(error)
atexit.register(last)
""",
        server.port,
    )
    assert said in ("True\n",) or "no watchdog" in said
    assert client.get("book") is None


@pytest.mark.skipif(sys.version_info < (3, 13), reason="no isolated interpreters by this name before")
def test_an_isolated_interpreter_is_refused_since_it_can_start_no_daemon_thread(server, client):
    inside = """
try:
    Lock(client, "book").acquire()
except redis_lockkeeper.UnreachableError as error:
    assert "no watchdog can be started" in str(error), error
else:
    raise AssertionError("it was granted")
"""
    said = run(
        f"""
import _interpreters, sys
other = _interpreters.create("isolated")
same = f"import sys; sys.path[:], sys.argv = {{sys.path}}, {{sys.argv}}"
print(_interpreters.exec(other, same + {PRELUDE + inside!r}))
""",
        server.port,
    )
    assert said == "None\n"
    assert client.get("book") is None


def test_a_busy_interpreter_still_renews(server, client):
    """The GIL is let go every 5 ms."""
    said = run(
        PRELUDE
        + """
def burn():
    until = time.monotonic() + 3.5
    while time.monotonic() < until:
        sum(range(1000))

with Lock(client, "book", timeout=6) as lock:
    threads = [threading.Thread(target=burn) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # After 3.5 s without a renewal 2.5 would be left.
    print(lock.remaining() > 3)
""",
        server.port,
    )
    assert said == "True\n"


def test_while_the_gil_is_held_nothing_is_renewed_and_check_says_so(server, client):
    said = run(
        PRELUDE
        + """
import ctypes
lock = Lock(client, "book", timeout=0.5)
lock.acquire()
ctypes.PyDLL(None).usleep(800_000)
try:
    lock.check()
except redis_lockkeeper.LockLostError as error:
    print(error.lost.value, lock.remaining(), lock.lost.is_set())
""",
        server.port,
    )
    assert said == "expired 0.0 True\n"


def test_a_lock_in_a_cycle_is_released_when_it_is_collected(server, client):
    gc.collect()
    gc.disable()
    try:
        lock = Lock(client, "book", timeout=3)
        lock.acquire()
        lock.itself = lock
        del lock
        eventually(lambda: server.calls().get("lock.renew"), "it is renewed")
        assert client.get("book") is not None
    finally:
        gc.enable()
    gc.collect()
    eventually(lambda: client.get("book") is None)


@pytest.mark.long
def test_a_thousand_locks_are_renewed_over_one_connection(server, client):
    locks = [Lock(client, f"book{n}", timeout=20) for n in range(1000)]
    for lock in locks:
        assert lock.acquire(blocking=False)
    eventually(lambda: server.calls().get("lock.renew", 0) >= 1000, "all are renewed", 60)
    assert len(client.keys("book*")) == 1000
    for lock in locks:
        lock.check()
    ours = [each for each in client.client_list() if each["cmd"].startswith("lock.")]
    assert len(ours) <= 2, "one for requests, one for renewals"
    del lock, locks
    assert redis_lockkeeper.settled(60)
    assert client.keys("book*") == []


@pytest.mark.long
def test_threads_and_connections_end_10_s_after_the_last_lock(server):
    said = run(
        PRELUDE
        + """
with Lock(client, "book"):
    pass
client.close()
before = len([t for t in threading.enumerate() if t.name.startswith("lockkeeper")])
time.sleep(13)
print(before, [t.name for t in threading.enumerate()], len(os.listdir("/proc/self/fd")))
""",
        server.port,
    )
    assert said.startswith("1 ['MainThread'] ")
    assert int(said.split()[-1]) <= 4


CELERY = """
import os, sys, time
from celery import Celery
import {library}
from redis_lockkeeper import Lock

port = os.environ["PORT"]
app = Celery(broker=f"redis://localhost:{{port}}/1", backend=f"redis://localhost:{{port}}/2")
app.conf.update(task_acks_late=True, worker_prefetch_multiplier=1, broker_connection_retry_on_startup=True)
client = {library}.Redis(port=int(port))

@app.task
def once(name):
    try:
        with Lock(client, "job", timeout=6, blocking_timeout=0):
            client.rpush("began", f"{{name}}:{{os.getpid()}}")
            if name == "long":
                time.sleep(60)
            return "done"
    except {library}.exceptions.LockError:
        return "busy"
"""


@pytest.mark.long
@pytest.mark.skipif(LIBRARY != "redis", reason="Celery speaks through redis-py")
def test_a_celery_worker_killed_in_the_middle_of_a_task(server, client, tmp_path):
    pytest.importorskip("celery")
    (tmp_path / "jobs.py").write_text(CELERY.format(library=LIBRARY))
    environment = {**os.environ, "PORT": str(server.port), "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [
        sys.executable,
        "-m",
        "celery",
        "-A",
        "jobs",
        "worker",
        "--pool=prefork",
        "--concurrency=2",
        "-l",
        "WARNING",
    ]
    worker = subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True)
    call = "import sys, jobs; task = jobs.once.delay(sys.argv[1]); sys.argv[1] == 'long' or print(task.get(timeout=40))"

    def ask(name):
        return subprocess.run(
            [sys.executable, "-c", call, name],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout.strip()

    try:
        ask("long")
        eventually(lambda: client.llen("began") == 1, "the worker runs", 40)
        assert ask("second") == "busy"
        eventually(lambda: server.calls().get("lock.renew"), "it is renewed in the prefork child")
        assert ask("third") == "busy"
        os.kill(int(client.lindex("began", 0).decode().split(":")[1]), signal.SIGKILL)
        eventually(lambda: client.get("job") is None, "it ends with its ttl")
        assert ask("fourth") == "done"
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
    assert Client(port=server.port).get("job") is None
