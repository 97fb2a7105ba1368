"""The agent of the Python helper for the conformance suite: does what the lines on its standard input say. The messages
are in clients/conformance/AGENTS.md. With `--asyncio` it asks through the lock for asyncio, each time in a task; else
through the one for threads, each time in a thread.
"""

import asyncio
import contextlib
import functools
import inspect
import json
import logging
import os
import sys
import threading
import time
from ctypes import c_ulong, py_object, pythonapi
from importlib import import_module

import redis_lockkeeper.asyncio
from redis_lockkeeper import BusyError, ForkedError, InvalidError, LockLostError, RefusedError, UnreachableError
from redis_lockkeeper.clock import now
from redis_lockkeeper.errors import LIBRARIES

ASYNC = "--asyncio" in sys.argv
HELPER = redis_lockkeeper.asyncio if ASYNC else redis_lockkeeper
LIBRARY = import_module(LIBRARIES[0] + (".asyncio" if ASYNC else ""))
CLIENT = LIBRARIES[0].capitalize()
CAN = ["drop", "fork", "hang_up"] + ([] if "gevent" in sys.modules else ["block", "cancel"])
# An exception that is thrown into a thread while it takes a lock of Python's leaves that lock taken for ever.
CAN += ["cancel_at_any_moment"] if ASYNC else []
CAN += ["cancel_body"] if ASYNC and sys.version_info >= (3, 11) else []
WORDS = {"invalid": InvalidError, "refused": RefusedError, "forked": ForkedError, "unreachable": UnreachableError}
WORDS |= {"busy": BusyError, "failed": ArithmeticError}
# What a lock is made with: by the name that messages have for it too, or another if it is a time.
SETTINGS = ["label", "limit", "shared", "min_replicas"]
TIMES = {"timeout": "ttl_ms", "blocking_timeout": "wait_ms", "max_hold": "max_hold_ms"}
# What is asked of a lock: False if it is busy.
KEEP = {
    "remaining": lambda lock, ms: True,
    "renew": lambda lock, ms: lock.reacquire(),
    "extend": lambda lock, ms: lock.extend(ms / 1000, replace_ttl=True),
    "upgrade": lambda lock, ms: lock.upgrade(),
    "downgrade": lambda lock, ms: lock.downgrade(),
}
GIVE_UP = {
    "release": lambda lock, ms: lock.release(),
    "release_after": lambda lock, ms: lock.release_after(ms / 1000),
    "leave": lambda lock, ms: lock.leave(),
    "drop": lambda lock, ms: None,
}


def say(**line):
    """One write for each line, so that those of several threads do not mix."""
    line = {"at": now(), **line}
    os.write(1, (json.dumps(line, default=bytes.decode) + "\n").encode())


def word(error):
    return next((word for word, kind in WORDS.items() if isinstance(error, kind)), type(error).__name__)


async def done(result):
    """What the lock for threads has returned, and the one for asyncio will."""
    return await result if inspect.isawaitable(result) else result


def state(lock):
    # In this order: whoever is stopped in between must not seem to hold it for longer.
    at, lost = now(), None
    try:
        lock.check()
    except LockLostError as error:
        lost = error.lost.value
    remaining = round(lock.remaining() * 1e6)
    return {"at": at, "remaining_us": remaining, "lost": lost, "fence": lock.fence, "owner": lock.owner}


class Agent:
    """What is open and held, by the names that the messages use. Each message is a method, and what that returns is in
    the answer beside `yes`, or in its place.
    """

    def __init__(self):
        self.clients, self.locks, self.work = {}, {}, {}

    def begin(self, line):
        message = json.loads(line)
        answer = functools.partial(self.answer, message)
        self.work[message["id"]] = asyncio.ensure_future(answer(contextlib.nullcontext())) if ASYNC else Thread(answer)

    async def answer(self, message, may_be_interrupted):
        try:
            with may_be_interrupted:
                answer = await getattr(self, message["do"])(message)
        except (asyncio.CancelledError, Interrupted):
            self.locks.pop(message["id"], None)
            answer = {"answer": "cancelled"}
        except LockLostError as error:
            answer = {"answer": "lost", "why": error.lost.value}
        except Exception as error:
            answer = {"answer": word(error), "text": str(error)}
        say(**{"re": message["id"], "answer": "yes", **(answer or {})})

    async def open(self, message):
        scheme, _, place = message["url"].partition("://")
        hosts, _, master = place.partition("/")
        if scheme == "redis+sentinel":
            client = LIBRARY.Sentinel([host.split(":") for host in hosts.split(",")]).master_for(master)
        elif scheme == "redis+cluster":
            client = getattr(LIBRARY, f"{CLIENT}Cluster").from_url(f"redis://{hosts.split(',')[0]}")
        else:
            tls = {"ssl_ca_certs": message["tls"]} if "tls" in message else {}
            client = getattr(LIBRARY, CLIENT).from_url(message["url"], **tls)
        self.clients[message["name"]] = client, {name: message[name] for name in SETTINGS if name in message}

    def lock(self, message, **more):
        # Without a timeout of its own it could not be renewed by hand.
        client, settings = self.clients[message["client"]]
        settings = {"timeout": 30, **settings, **{name: message[name] for name in SETTINGS if name in message}, **more}
        settings.update({name: message[ms] / 1000 for name, ms in TIMES.items() if ms in message})
        waits, key = "wait_ms" in message or "forever" in message, message["key"].encode("latin-1")
        return HELPER.Lock(client, key, blocking=waits, thread_local=False, **settings)

    async def acquire(self, message):
        number = message["id"]
        lock = self.lock(message, on_lost=lambda why: say(event="lost", lock=number, why=why.value))
        if not await done(lock.acquire()):
            return {"answer": "busy"}
        self.locks[number] = lock
        return state(lock)

    async def run(self, message):
        lock = self.lock(message, **({"cancel_on_lost": True} if "cancel_body" in CAN else {}))
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(lock) if ASYNC else stack.enter_context(lock)
            assert not await done(self.lock(message).acquire(blocking=False))
            say(event="began", of=message["id"])
            try:
                await done((asyncio if ASYNC else time).sleep(message["ms"] / 1000))
            finally:
                say(event="ended", of=message["id"])
            if message["body"] == "fail":
                raise ArithmeticError("as asked")

    async def cancel(self, message):
        self.work[message["of"]].cancel()

    async def info(self, message):
        info = await done(self.lock(message).info())
        return {"info": info and {**info._asdict(), "holders": [each._asdict() for each in info.holders]}}

    async def keep(self, message):
        lock = self.locks[message["lock"]]
        return state(lock) if await done(KEEP[message["do"]](lock, message.get("ms"))) else {"answer": "busy"}

    remaining = renew = extend = upgrade = downgrade = keep

    async def give_up(self, message):
        await done(GIVE_UP[message["do"]](self.locks.pop(message["lock"]), message.get("ms")))

    release = release_after = leave = drop = give_up

    async def block(self, message):
        until = time.monotonic() + message["ms"] / 1000
        while message["how"] == "cpu" and time.monotonic() < until:
            sum(range(1000))
        time.sleep(max(0, until - time.monotonic()))  # noqa: ASYNC251
        return state(self.locks[message["lock"]])

    async def fork(self, message):
        lock, renew = self.locks[message["lock"]], None
        if os.fork() == 0:
            try:
                await done(lock.reacquire())
            except Exception as error:
                renew = word(error)
            say(event="child", renew=renew, **state(lock))
            os._exit(0)

    async def settled(self, message):
        return None if await done(HELPER.settled(message["ms"] / 1000)) else {"answer": "no"}


class Interrupted(BaseException):
    """What a soft time limit or a task queue throws into a thread."""


# Before Python 3.12, what is thrown into a thread that starts another can hit that one, before it runs; the first then
# waits for it for ever. So nothing is thrown meanwhile.
starting = threading.Lock()


def _start(thread, start=threading.Thread.start):
    with starting:
        start(thread)


threading.Thread.start = _start


class Thread(threading.Thread):
    """Carries out a message, and may be interrupted meanwhile: but neither Python's own code for the begin and the end
    of a thread nor what writes the answer bears an exception.
    """

    def __init__(self, answer):
        super().__init__(daemon=True)
        self.answer, self.guard, self.may_be_interrupted = answer(self), threading.Lock(), False
        self.start()

    def run(self):
        # It never pauses, since all that it awaits is done.
        with contextlib.suppress(StopIteration):
            self.answer.send(None)

    def __enter__(self):
        self.may_be_interrupted = True

    def __exit__(self, *_):
        with self.guard:
            self.may_be_interrupted = False
        # What was thrown just before comes here.
        time.sleep(0)

    def cancel(self):
        while self.is_alive():
            with starting, self.guard:
                if self.may_be_interrupted:
                    pythonapi.PyThreadState_SetAsyncExc(c_ulong(self.ident), py_object(Interrupted))
            # Again, since Python drops one that arrives in a finaliser.
            self.join(1)


async def obey_in_tasks(agent):
    lines = asyncio.StreamReader(limit=2**20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async for line in lines:
        agent.begin(line)


logging.basicConfig(level=logging.DEBUG)
say(event="hello", can=CAN)
if ASYNC:
    asyncio.run(obey_in_tasks(Agent()))
else:
    agent = Agent()
    for line in sys.stdin:
        agent.begin(line)
