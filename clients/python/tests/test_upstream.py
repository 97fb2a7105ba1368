"""The lock tests of redis-py and valkey-py themselves, of the very release that is installed, unmodified but for
the `Lock` in their modules. `run-tests` takes them from the release's source archive.
"""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from conftest import LIBRARY, ROOT, Server, library

VERSION = library.__version__
MAJOR = int(VERSION.partition(".")[0])
UPSTREAM = Path(os.environ.get("LOCKKEEPER_UPSTREAM", str(ROOT / f"target/python/upstream/{LIBRARY}-{VERSION}")))
FAKED_CLOCK = LIBRARY == "redis" and MAJOR >= 8

NO_EXPIRY = "wants a lock without expiry: there is none without a ttl"
BARE_TOKEN = "wants the bare token as the value: ours is <fence>:<owner>"
FAKED = "counts the sleeps of a faked clock: nothing polls"
SLEEP = "wants no wait when sleep > blocking_timeout: sleep means nothing"
EARLY = "wants a wait that ends before its time, by up to one sleep: it ends in time, on a quick machine just before"
RENEWED = "wants a lock of 0.1 s lost after 0.15 s: ours is renewed, on a machine that is not too busy"

#: What cannot pass, and why.
EXCLUDED = {"test_lock": NO_EXPIRY, "test_lock_token": BARE_TOKEN, "test_lock_token_thread_local_false": BARE_TOKEN}
ONLY_SYNC = {}
#: What may pass or not, on asyncio, and of a lock that is renewed.
UNSURE_ASYNC, UNSURE_RENEWED = {}, {}
if FAKED_CLOCK:
    EXCLUDED["test_blocking_timeout"] = FAKED
    ONLY_SYNC["test_context_manager_blocking_timeout"] = FAKED
else:
    EXCLUDED["test_high_sleep_small_blocking_timeout"] = SLEEP
    if LIBRARY == "redis":
        UNSURE_ASYNC["test_blocking_timeout"] = EARLY
if LIBRARY == "redis" and MAJOR >= 6:
    UNSURE_RENEWED["test_context_manager_not_raise_on_release_lock_not_owned_error"] = RENEWED

PLUGIN = """
from redis_lockkeeper import Lock
from redis_lockkeeper.asyncio import Lock as AsyncLock

def pytest_collection_modifyitems(items):
    for module in {item.module for item in items}:
        lock = AsyncLock if "asyncio" in module.__name__ else Lock
        module.Lock = lock.having(renew=%r)
"""


def outcomes(folder, which, renew, port, *options):
    """How each test ended, one that ran in several flavours by the worst."""
    (folder / "lockkeeper_plugin.py").write_text(PLUGIN % renew)
    report = folder / "report.xml"
    url = f"redis://localhost:{port}/0"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "lockkeeper_plugin", "-o", "asyncio_mode=auto"]
    command += ["-o", "addopts=", f"--{LIBRARY}-url", url, f"--junit-xml={report}", f"tests/{which}", *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    ran = subprocess.run(command, cwd=UPSTREAM, env=environment, capture_output=True, text=True, check=False)
    assert report.exists(), ran.stdout + ran.stderr
    ended = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name").partition("[")[0]
        failed = case.find("failure") is not None or case.find("error") is not None
        skipped = case.find("skipped") is not None
        ended[name] = "failed" if failed else "skipped" if skipped else ended.get(name, "passed")
    return ended, ran.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    "renew", [True, pytest.param(False, marks=pytest.mark.repeated)], ids=["renewed", "not renewed"]
)
@pytest.mark.parametrize("which", ["test_lock.py", "test_asyncio/test_lock.py"])
def test_their_lock_tests_pass(tmp_path, which, renew):
    excluded = {**EXCLUDED, **({} if "asyncio" in which else ONLY_SYNC)}
    unsure = {*(UNSURE_ASYNC if "asyncio" in which else ()), *(UNSURE_RENEWED if renew else ())}
    server = Server()
    try:
        if LIBRARY == "valkey" and "valkey_version" not in server.client().info("server"):
            pytest.skip("valkey-py's tests want a Valkey server")
        ended, said = outcomes(tmp_path, which, renew, server.port)
        unexpected = [name for name, how in ended.items() if how != "passed" and name not in {*excluded, *unsure}]
        if unexpected:
            # They bound waits by 0.1 s and less, which a busy machine may miss.
            again, said = outcomes(tmp_path, which, renew, server.port, "-k", " or ".join(unexpected))
            ended.update({name: again[name] for name in unexpected})
    finally:
        server.end()
    print(f"{LIBRARY} {VERSION} {which} renew={renew}: {dict(Counter(ended.values()))}")
    assert {name for name, how in ended.items() if how != "passed"} - unsure == set(excluded), said
    assert len(ended) >= 25, "these are not the tests that we know"
