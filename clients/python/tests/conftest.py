"""A real server with the module for every test, and a proxy that does what networks do."""

import gc
import importlib
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from redis_lockkeeper import close
from redis_lockkeeper.errors import LIBRARIES

ROOT = Path(__file__).resolve().parents[3]
MODULE = os.environ.get("LOCKKEEPER_MODULE", str(ROOT / "target/release/liblockkeeper.so"))
SERVER = os.environ.get("LOCKKEEPER_TEST_SERVER", "redis-server")

#: The client library of this environment: one at a time, as people have it.
LIBRARY = LIBRARIES[0]
library = importlib.import_module(LIBRARY)
Client = library.Redis if LIBRARY == "redis" else library.Valkey
exceptions = importlib.import_module(f"{LIBRARY}.exceptions")
asynchronous = importlib.import_module(f"{LIBRARY}.asyncio")
AsyncClient = asynchronous.Redis if LIBRARY == "redis" else asynchronous.Valkey


def pytest_collection_modifyitems(items):
    """Those that take long begin first, so that at the end there is nobody to be waited for."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def free_port():
    """None that a client is given for its end of a connection: the system takes those from 32,768 on."""
    while True:
        port = random.randrange(10_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Server:
    """A server of its own, in a folder of its own, which it can be started from again."""

    def __init__(self, *options, module=True, port=None):
        self.dir = tempfile.mkdtemp(prefix="lockkeeper-")
        self.port = port or free_port()
        self.socket = f"{self.dir}/socket"
        self.options = ["--loadmodule", MODULE] * module + list(options)
        self.start()

    def start(self):
        base = ["--port", str(self.port), "--dir", self.dir, "--save", "", "--unixsocket", self.socket]
        self.process = subprocess.Popen(
            [SERVER, *base, *self.options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        eventually(lambda: Client(port=self.port).ping())

    def kill(self):
        self.process.kill()
        self.process.wait()

    def end(self):
        self.kill()
        shutil.rmtree(self.dir, ignore_errors=True)

    def client(self, **settings):
        return Client(port=self.port, **settings)

    def calls(self):
        """How often each command was called since `config resetstat`, ours only and those of a connection."""
        stats = self.client().info("commandstats")
        return {name[8:].lower(): each["calls"] for name, each in stats.items()}


def eventually(truth, what="it becomes true", timeout=20):
    """Polls until it is true; an error is not yet true."""
    until = time.monotonic() + timeout
    while True:
        with suppress(OSError, exceptions.RedisError if LIBRARY == "redis" else exceptions.ValkeyError):
            if truth():
                return
        assert time.monotonic() < until, f"never seen: {what}"
        time.sleep(0.01)


def renewed(lock):
    """Waits until it has been renewed: nothing else makes what remains more. In the thread that holds it."""
    looks = [lock.remaining()]

    def more():
        looks.append(lock.remaining())
        return looks[-1] > looks[-2]

    eventually(more, "it is renewed")


class Proxy:
    """Between a client and its server: holds requests or replies back, cuts connections, hangs dials."""

    def __init__(self, port):
        self.to = port
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.requests, self.replies, self.accepting = threading.Event(), threading.Event(), threading.Event()
        self.stuck = set()
        #: Whether the first byte of what is held back goes through.
        self.pieces = False
        self.heal()
        #: How many connections there were, what was requested on them, and how many bytes are held back.
        self.dialled, self.requested, self.held = 0, [], 0
        self.pairs = []
        threading.Thread(target=self._accept, daemon=True).start()

    def heal(self):
        #: What is done when something with this in it is requested, before it is passed on.
        self.when = b"", lambda: None
        for gate in (self.requests, self.replies, self.accepting):
            gate.set()
        self.stuck.clear()

    def hold(self):
        """Holds back what is requested on the connections that there are now."""
        self.requests.clear()
        self.stuck.update(inward for inward, _ in self.pairs)

    def cut(self):
        for pair in self.pairs:
            for sock in pair:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        self.pairs.clear()

    def end(self):
        self.heal()
        self.listener.close()
        self.cut()

    def _accept(self):
        with suppress(OSError):
            while True:
                inward, _ = self.listener.accept()
                self.dialled += 1
                threading.Thread(target=self._serve, args=(inward,), daemon=True).start()

    def _serve(self, inward):
        self.accepting.wait()
        with suppress(OSError):
            outward = socket.create_connection(("127.0.0.1", self.to))
            self.pairs.append((inward, outward))
            threading.Thread(target=self._copy, args=(inward, outward, self.requests), daemon=True).start()
            self._copy(outward, inward, self.replies)

    def _copy(self, source, target, gate):
        with suppress(OSError):
            while data := source.recv(65536):
                if gate is self.requests:
                    self.requested.append(data)
                    if self.when[0] in data:
                        self.when[1]()
                if not gate.is_set() and (not self.stuck or source in self.stuck):
                    if self.pieces:
                        target.sendall(data[:1])
                        data = data[1:]
                    self.held += 1
                    gate.wait()
                    self.held -= 1
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)


@pytest.fixture(scope="session")
def shared_server():
    server = Server()
    yield server
    server.end()


@pytest.fixture
def server(shared_server):
    shared_server.client().flushall()
    shared_server.client().config_resetstat()
    yield shared_server
    close(5)


@pytest.fixture
def own_server():
    server = Server()
    yield server
    # A lock that a test has left in a cycle would keep its thread for others to see.
    gc.collect()
    close(5)
    server.end()


@pytest.fixture
def client(server):
    return server.client()


@pytest.fixture
def proxy(server):
    proxy = Proxy(server.port)
    yield proxy
    proxy.end()


def run(source, *args, timeout=60, **more):
    """Runs a program in an interpreter of its own; returns what it printed."""
    command = [sys.executable, "-c", source, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, **more)
    assert done.returncode == 0, done.stderr
    return done.stdout


PRELUDE = f"""
import asyncio, os, sys, time, threading
from {LIBRARY} import {Client.__name__} as Client
from {LIBRARY}.asyncio import {AsyncClient.__name__} as AsyncClient
import redis_lockkeeper
from redis_lockkeeper import Lock
from redis_lockkeeper.asyncio import Lock as AsyncLock
client = Client(port=int(sys.argv[1]))

def renewed(lock):
    before = now = lock.remaining()
    while now <= before and lock.check():
        time.sleep(0.01)
        before, now = now, lock.remaining()
"""


def begin(source, *args):
    """Starts such a program, to be read from and killed."""
    command = [sys.executable, "-u", "-c", PRELUDE + source, *map(str, args)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
