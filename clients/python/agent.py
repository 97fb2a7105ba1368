"""The agent of the Python helper for the conformance suite: does what the lines on its standard input say. The messages
are in clients/conformance/AGENTS.md. With `--asyncio` it asks through the lock for asyncio, else each question is asked
in a thread of its own.
"""

import asyncio
import ctypes
import functools
import gc
import inspect
import json
import logging
import os
import sys
import threading
import time

import redis_lockkeeper.asyncio
from redis_lockkeeper import clock, errors

ASYNC = "--asyncio" in sys.argv
LIBRARY = errors.LIBRARIES[0]
LOCK = redis_lockkeeper.asyncio.Lock if ASYNC else redis_lockkeeper.Lock
CLIENT = {"redis": "Redis", "valkey": "Valkey"}[LIBRARY]
KINDS = {"invalid": errors.InvalidError, "forked": errors.ForkedError, "refused": errors.RefusedError}
KINDS["unreachable"] = errors.UnreachableError


class Interrupted(BaseException):
    """What a signal handler, a soft time limit or a task queue throws into a thread."""


def say(message, **more):
    """One write for each line, so that those of several threads do not mix."""
    line = {"at": clock.now(), **message, **more}
    os.write(1, (json.dumps(line) + "\n").encode())


def module(name):
    return __import__(f"{LIBRARY}.{'asyncio.' if ASYNC else ''}{name}", fromlist=["x"])


# Before Python 3.12, what is thrown into a thread that starts another can hit that one, before it runs; the first then
# waits for it for ever. So nothing is thrown meanwhile.
starting = threading.Lock()


def _start(thread, start=threading.Thread.start):
    with starting:
        start(thread)


threading.Thread.start = _start


async def _ended(thread):
    while thread.is_alive():
        await asyncio.sleep(0.001)


async def call(function, *args, **more):
    """Asks through the helper, awaited or in a thread. Returns the result and when it was known."""
    if ASYNC and inspect.iscoroutinefunction(function):
        return await function(*args, **more), clock.now()
    loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
    # Python's own code for the begin and the end of a thread bears no exception.
    begun, ended, guard = threading.Event(), threading.Event(), threading.Lock()

    def work():
        try:
            begun.set()
            try:
                outcome = function(*args, **more), clock.now()
            except BaseException as error:
                loop.call_soon_threadsafe(future.set_exception, error)
            else:
                loop.call_soon_threadsafe(future.set_result, outcome)
            with guard:
                ended.set()
            time.sleep(0)
        except Interrupted:
            pass

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        outcome = await asyncio.shield(future)
        # Until its thread has ended, a handle that is dropped next is still in use there.
        await _ended(thread)
        return outcome
    except asyncio.CancelledError:
        while not begun.is_set():
            await asyncio.sleep(0)
        while thread.is_alive():
            with starting, guard:
                if not ended.is_set():
                    interrupted = ctypes.c_ulong(thread.ident), ctypes.py_object(Interrupted)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(*interrupted)
            # Again, since Python drops one that arrives in a finaliser.
            await asyncio.wait({asyncio.ensure_future(_ended(thread))}, timeout=1)
        if future.done() and not future.exception():
            return future.result()
        # What was interrupted is in the traceback, and that in a cycle with the future.
        gc.collect()
        raise


class Agent:
    """What is open and held, by the names that the messages use."""

    def __init__(self):
        self.clients, self.locks, self.tasks, self.crowd = {}, {}, {}, []

    async def main(self):
        can = ["cancel", "drop", "fork", "hang_up"]
        # An exception that is thrown into a thread while it takes a lock of Python's leaves that lock taken for ever.
        can += ["cancel_at_any_moment"] if ASYNC else []
        can += ["cancel_body"] if ASYNC and sys.version_info >= (3, 11) else []
        library, version = f"{LIBRARY}-py {__import__(LIBRARY).__version__}", sys.version.split()[0]
        hello = {"hello": "python-asyncio" if ASYNC else "python", "library": library, "version": version}
        say(hello, pid=os.getpid(), clock=clock.now(), can=can)
        logger = logging.getLogger("redis_lockkeeper")
        logger.addHandler(Log())
        logger.setLevel(logging.DEBUG)
        lines = asyncio.StreamReader(limit=2**20)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        async for line in lines:
            message = json.loads(line)
            if message["do"] == "end":
                return sys.exit(0) if message.get("how") == "exit" else None
            work = self.tasks[message["id"]] = asyncio.ensure_future(getattr(self, message["do"])(message))
            if "cancel_after_us" in message:
                asyncio.get_running_loop().call_later(message["cancel_after_us"] / 1e6, work.cancel)
            work.add_done_callback(functools.partial(self.answer, message))

    def answer(self, message, work):
        try:
            what, more, at = work.result() or ("ok", {}, clock.now())
        except (asyncio.CancelledError, Interrupted):
            # Of a release that had not even begun.
            self.locks.pop(message.get("lock"), None)
            what, more, at = "cancelled", {}, clock.now()
        except errors.LockLostError as error:
            what, more, at = "lost", {"why": error.lost.value}, clock.now()
        except Exception as error:
            kind = next((name for name, kind in KINDS.items() if isinstance(error, kind)), type(error).__name__)
            what, more, at = "error", {"kind": kind, "text": str(error)}, clock.now()
        say({"re": message["id"], "answer": what, "at": at}, **more)

    async def open(self, message):
        place, options = message["place"], {}
        for name, option in [("user", "username"), ("password", "password"), ("db", "db"), ("resp", "protocol")]:
            if place.get(name) is not None:
                options[option] = place[name]
        if "tls" in place:
            options.update(ssl=True, ssl_ca_certs=place["tls"])
        addresses = [(each.rpartition(":")[0], int(each.rpartition(":")[2])) for each in place.get("addresses", [])]
        if place["kind"] == "unix":
            client = getattr(module("client"), CLIENT)(unix_socket_path=place["unix"], **options)
        elif place["kind"] == "sentinel":
            client = module("sentinel").Sentinel(addresses, **options).master_for(place["master"])
        else:
            cluster = place["kind"] == "cluster"
            kind = getattr(module("cluster"), f"{CLIENT}Cluster") if cluster else getattr(module("client"), CLIENT)
            client = kind(host=addresses[0][0], port=addresses[0][1], **options)
        self.clients[message["name"]] = client, message.get("label")

    def make(self, message, key=None, **more):
        (client, label), wait = self.clients[message["client"]], message.get("wait_ms")
        return LOCK(
            client,
            # A character for each byte.
            (key or message["key"]).encode("latin-1"),
            timeout=message.get("ttl_ms", 30_000) / 1000,
            blocking=wait is not None,
            blocking_timeout=None if wait in (None, "forever") else wait / 1000,
            thread_local=False,
            label=message.get("label", label),
            max_hold=message["max_hold_ms"] / 1000 if "max_hold_ms" in message else None,
            min_replicas=message.get("min_replicas", 0),
            limit=message.get("limit"),
            shared=message.get("shared", False),
            **more,
        )

    async def acquire(self, message):
        number = message["id"]
        lock = self.make(message, on_lost=lambda why: say({"event": "lost", "lock": number, "why": why.value}))
        granted, at = await call(lock.acquire)
        if not granted:
            return "busy", {}, at
        self.locks[number] = lock
        held = {"lock": number, "fence": lock.fence, "owner": lock.owner}
        return "held", {**held, "remaining_us": round(lock.remaining() * 1e6)}, at

    async def cancel(self, message):
        self.tasks[message["of"]].cancel()

    async def renew(self, message):
        return "yes", {}, (await call(self.locks[message["lock"]].reacquire))[1]

    async def extend(self, message):
        return "yes", {}, (await call(self.locks[message["lock"]].extend, message["ms"] / 1000, replace_ttl=True))[1]

    async def change(self, message, change):
        lock = self.locks[message["lock"]]
        granted, at = await call(getattr(lock, change))
        if not granted:
            return "busy", {}, at
        return "yes", {"fence": lock.fence, "remaining_us": round(lock.remaining() * 1e6)}, at

    async def upgrade(self, message):
        return await self.change(message, "upgrade")

    async def downgrade(self, message):
        return await self.change(message, "downgrade")

    async def release(self, message):
        return "yes", {}, (await call(self.locks.pop(message["lock"]).release))[1]

    async def release_after(self, message):
        return "yes", {}, (await call(self.locks.pop(message["lock"]).release_after, message["ms"] / 1000))[1]

    async def leave(self, message):
        self.locks.pop(message["lock"]).leave()

    async def drop(self, message):
        del self.locks[message["lock"]]

    def state(self, lock):
        try:
            lost = lock.check() and None
        except errors.LockLostError as error:
            lost = error.lost.value
        return {"remaining_us": round(lock.remaining() * 1e6), "lost": lost}

    async def remaining(self, message):
        return "value", self.state(self.locks[message["lock"]]), clock.now()

    async def info(self, message):
        info, at = await call(self.make(message).info)
        value = info and {
            "owner": info.owner and info.owner.decode(),
            "fence": info.fence,
            "waiters": info.waiters,
            "limit": info.limit,
            "holding": info.holding,
            "holders": [each.owner.decode() for each in info.holders],
        }
        return "value", {"value": value}, at

    async def run(self, message):
        more = {"cancel_on_lost": True} if ASYNC and sys.version_info >= (3, 11) else {}
        lock, span, what = self.make(message, **more), message.get("ms", 0) / 1000, message["body"]

        def tell(how):
            say({"event": "body", "of": message["id"], "how": how})

        async def body_task():
            async with lock:
                tell("began")
                try:
                    if what == "nest":
                        assert not await self.make(message).acquire()
                    await asyncio.sleep(span)
                except asyncio.CancelledError:
                    tell("cancelled")
                    raise
                tell("ended")
                if what == "fail":
                    raise ArithmeticError("as asked")

        def body_thread():
            with lock:
                tell("began")
                if what == "nest":
                    assert not self.make(message).acquire()
                time.sleep(span)
                tell("ended")
                if what == "fail":
                    raise ArithmeticError("as asked")

        try:
            return "done", {}, (await call(body_task if ASYNC else body_thread))[1]
        except errors.BusyError:
            return "busy", {}, clock.now()
        except ArithmeticError:
            return "failed", {"whose": "body"}, clock.now()

    async def many(self, message):
        for number in range(message["count"]):
            lock = self.make(message, f"{message['prefix']}{number}")
            if await lock.acquire() if ASYNC else lock.acquire():
                self.crowd.append(lock)
        return "held", {"count": len(self.crowd)}, clock.now()

    async def least(self, message):
        lost, least = sum(lock.lost.is_set() for lock in self.crowd), min(lock.remaining() for lock in self.crowd)
        return "value", {"remaining_us": round(least * 1e6), "lost": lost}, clock.now()

    async def drop_many(self, message):
        self.crowd.clear()

    async def block(self, message):
        until = time.monotonic() + message["ms"] / 1000
        while message.get("how") == "cpu" and time.monotonic() < until:
            sum(range(1000))
        time.sleep(max(0, until - time.monotonic()))  # noqa: ASYNC251
        return "value", {"locks": {str(name): self.state(lock) for name, lock in self.locks.items()}}, clock.now()

    async def fork(self, message):
        lock = self.locks[message["lock"]]
        child = os.fork()
        if child == 0:
            said = {"event": "child", "of": message["id"], "lost": lock.lost.is_set(), "renew": None}
            try:
                # What both faces do before they await.
                lock._renewal(lock.local.tenure, 1_000_000)
            except errors.ForkedError:
                said["renew"] = "forked"
            say(said, remaining_us=round(lock.remaining() * 1e6))
            os._exit(0)
        _, status = await asyncio.get_running_loop().run_in_executor(None, os.waitpid, child, 0)
        return "value", {"exit": status}, clock.now()

    async def settled(self, message, wait=redis_lockkeeper.asyncio.settled):
        done = await wait(message.get("limit_ms", 60_000) / 1000)
        return "yes" if done else "no", {}, clock.now()

    async def close(self, message):
        return await self.settled(message, redis_lockkeeper.asyncio.close)


class Log(logging.Handler):
    """What the helper logs, as events."""

    def emit(self, record):
        level = {"warning": "warn"}.get(record.levelname.lower(), record.levelname.lower())
        say({"event": "log", "level": level, "text": record.getMessage()})


asyncio.run(Agent().main())
