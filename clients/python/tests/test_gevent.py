"""Under gevent, whose patched threads are greenlets, and under uvicorn: in the nightly run, which has them."""

import os
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from conftest import PRELUDE, eventually, free_port, run

pytestmark = pytest.mark.nightly

PATCHED = "from gevent import monkey; monkey.patch_all()\nimport gevent\n" + PRELUDE


def test_a_lock_is_renewed_by_a_greenlet(server, client):
    pytest.importorskip("gevent")
    said = run(
        PATCHED
        + """
with Lock(client, "book", timeout=3) as lock:
    renewed(lock)
    print(lock.owned(), lock.check() > 0)
    waiting = gevent.spawn(Lock(client, "book").acquire)
    while not lock.info().waiters:
        gevent.sleep(0.01)
    waiting.kill()
    while lock.info().waiters:
        gevent.sleep(0.01)
print("left", lock.info())
""",
        server.port,
    )
    assert said == "True True\nleft None\n"


def test_a_blocked_hub_renews_nothing_and_check_says_so(server, client):
    pytest.importorskip("gevent")
    said = run(
        PATCHED
        + """
from gevent.monkey import get_original
lock = Lock(client, "book", timeout=0.5)
lock.acquire()
get_original("time", "sleep")(1)
try:
    lock.check()
except redis_lockkeeper.LockLostError as error:
    print(error.lost.value)
""",
        server.port,
    )
    assert said == "expired\n"


SITE = """
import os
import redis.asyncio
from redis_lockkeeper.asyncio import Lock

client = redis.asyncio.Redis(port=int(os.environ["PORT"]))

async def site(scope, receive, send):
    if scope["type"] != "http":
        return
    lock = Lock(client, "book", timeout=5)
    async with lock:
        number = int(await client.get("number") or 0)
        await client.set("number", number + 1)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"done"})
"""


def test_uvicorn_workers_take_turns(server, client, tmp_path):
    pytest.importorskip("uvicorn")
    (tmp_path / "site_.py").write_text(SITE)
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "site_:site", "--port", str(port), "--workers", "2"]
    environment = {**os.environ, "PORT": str(server.port), "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    web = subprocess.Popen(command, cwd=tmp_path, env=environment)
    try:

        def ask(_=None):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as answer:
                return answer.read() == b"done"

        eventually(ask, "the workers are up", 60)
        before = int(client.get("number"))
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(ask, range(100)))
        assert int(client.get("number")) == before + 100, "no update is lost"
    finally:
        web.terminate()
        web.wait(20)
    eventually(lambda: client.get("book") is None)
