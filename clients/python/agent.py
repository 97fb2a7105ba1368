"""The agent of the conformance suite: JSON lines in on stdin, out on stdout. `--asyncio` asks through the lock for
asyncio, else each message is carried out in a thread of its own. Whatever is measured is the helper's, not ours.
"""

import asyncio
import inspect
import json
import logging
import os
import random
import sys
import threading
import time

import redis_lockkeeper
import redis_lockkeeper.asyncio
from redis_lockkeeper import clock, errors

ASYNC = "--asyncio" in sys.argv
LIBRARY = errors.LIBRARIES[0]
LOCK = redis_lockkeeper.asyncio.Lock if ASYNC else redis_lockkeeper.Lock
NAMES = {"redis": ("Redis", "RedisCluster"), "valkey": ("Valkey", "ValkeyCluster")}[LIBRARY]
KINDS = [("invalid", errors.InvalidError), ("forked", errors.ForkedError), ("refused", errors.RefusedError)]
KINDS += [("unreachable", errors.UnreachableError), ("lost", errors.LockLostError)]


def say(message, **more):
    """One write for each line, so that lines of several threads do not mix."""
    os.write(1, (json.dumps({**message, **more}) + "\n").encode())


def module(name):
    return __import__(f"{LIBRARY}.{'asyncio.' if ASYNC else ''}{name}", fromlist=["x"])


async def call(function, *args, **more):
    """Asks through the helper: awaited, or in a thread of its own. Returns the result and when it was known."""
    if ASYNC and inspect.iscoroutinefunction(function):
        return await function(*args, **more), clock.now()
    loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def work():
        try:
            result, error = function(*args, **more), None
        except Exception as failed:
            result, error = None, failed
        at = clock.now()
        loop.call_soon_threadsafe(settle, result, error, at)

    def settle(result, error, at):
        if not future.done():
            future.set_exception(error) if error else future.set_result((result, at))

    threading.Thread(target=work, daemon=True).start()
    return await future


class Agent:
    """What is open and held, by the names that the messages use."""

    def __init__(self):
        self.clients, self.locks, self.tasks, self.crowd = {}, {}, {}, []

    async def main(self):
        can = ["block", "fork", "drop", "run", "many", "turns", "valkey" if LIBRARY == "valkey" else "redis"]
        # A thread cannot be cancelled from outside.
        can += ["cancel"] if ASYNC else []
        version = __import__(LIBRARY).__version__
        name = f"python-{'asyncio' if ASYNC else 'threads'}"
        say(
            {
                "hello": name,
                "library": f"{LIBRARY} {version}",
                "version": sys.version.split()[0],
                "pid": os.getpid(),
                "clock": clock.now(),
                "can": can,
            }
        )
        logging.getLogger("redis_lockkeeper").addHandler(Log())
        loop = asyncio.get_running_loop()
        lines = asyncio.Queue()

        def read():
            for line in sys.stdin:
                loop.call_soon_threadsafe(lines.put_nowait, json.loads(line))
            loop.call_soon_threadsafe(lines.put_nowait, None)

        threading.Thread(target=read, daemon=True).start()
        while (message := await lines.get()) is not None:
            if message["do"] == "end":
                if message.get("how") == "exit":
                    sys.exit(0)
                if message.get("how") == "panic":
                    raise RuntimeError("as asked")
                return
            self.tasks[message["id"]] = asyncio.ensure_future(self.answer(message))

    async def answer(self, message):
        try:
            result = await getattr(self, message["do"])(message) or ("ok", {}, clock.now())
        except asyncio.CancelledError:
            result = "cancelled", {}, clock.now()
        except Exception as error:
            kind = next((kind for kind, each in KINDS if isinstance(error, each)), "other")
            lost = {"why": error.lost.value} if kind == "lost" else {"kind": kind, "text": str(error)}
            result = "lost" if kind == "lost" else "error", lost, clock.now()
        what, more, at = result
        say({"re": message["id"], "answer": what, "at": at}, **more)

    def lock_of(self, message):
        return self.locks[message["lock"]]

    async def open(self, message):
        place, options = message["place"], dict(message.get("options", {}))
        for name, option in [("user", "username"), ("password", "password"), ("db", "db"), ("resp", "protocol")]:
            if place.get(name) is not None:
                options[option] = place[name]
        if "tls" in place:
            options.update(ssl=True, ssl_ca_certs=place["tls"])
        addresses = [
            (host, int(port)) for host, _, port in (each.rpartition(":") for each in place.get("addresses", []))
        ]
        if place["kind"] == "unix":
            client = getattr(module("client"), NAMES[0])(unix_socket_path=place["unix"], **options)
        elif place["kind"] == "sentinel":
            client = module("sentinel").Sentinel(addresses, **options).master_for(place["master"])
        else:
            kind = (
                getattr(module("cluster"), NAMES[1])
                if place["kind"] == "cluster"
                else getattr(module("client"), NAMES[0])
            )
            client = kind(host=addresses[0][0], port=addresses[0][1], **options)
        self.clients[message["name"]] = client, message.get("label")

    def make(self, message):
        client, label = self.clients[message["client"]]
        key = bytes.fromhex(message["key_hex"]) if "key_hex" in message else message["key"]
        wait = message.get("wait_ms")
        seconds = {name: message[f"{name}_ms"] / 1000 for name in ("max_hold",) if message.get(f"{name}_ms")}
        identity = message["id"]
        return LOCK(
            client,
            key,
            timeout=message.get("ttl_ms", 30_000) / 1000,
            blocking=wait is not None,
            blocking_timeout=None if wait in (None, "forever") else wait / 1000,
            thread_local=False,
            label=message.get("label", label),
            min_replicas=message.get("min_replicas", 0),
            renew=message.get("renew", True),
            on_lost=lambda lost: say({"event": "lost", "lock": identity, "why": lost.value, "at": clock.now()}),
            **seconds,
        )

    async def acquire(self, message):
        lock = self.make(message)
        work = asyncio.ensure_future(call(lock.acquire))
        if "cancel_after_us" in message:
            await asyncio.wait({work}, timeout=message["cancel_after_us"] / 1e6)
            work.cancel()
        granted, at = await work
        if not granted:
            return "busy", {}, at
        self.locks[message["id"]] = lock
        held = {"lock": message["id"], "fence": lock.fence, "owner": lock.owner}
        return "held", {**held, "remaining_us": round(lock.remaining() * 1e6)}, at

    async def cancel(self, message):
        self.tasks[message["of"]].cancel()

    async def on_lock(self, message):
        """extend, renew, release, release_after."""
        lock, seconds = self.lock_of(message), [message["ms"] / 1000] if "ms" in message else []
        more = {"replace_ttl": True} if message["do"] == "extend" else {}
        name = {"renew": "reacquire"}.get(message["do"], message["do"])
        return "yes", {}, (await call(getattr(lock, name), *seconds, **more))[1]

    extend = renew = release = release_after = on_lock

    async def leave(self, message):
        self.lock_of(message).leave()

    async def drop(self, message):
        self.tasks.pop(message["lock"], None)
        del self.locks[message["lock"]]

    async def remaining(self, message):
        return "value", {"remaining_us": round(self.lock_of(message).remaining() * 1e6)}, clock.now()

    async def info(self, message):
        info, at = await call(self.make({"ttl_ms": 1000, **message}).info)
        value = info and {"owner": info.owner and info.owner.decode(), "fence": info.fence, "waiters": info.waiters}
        return "value", {"value": value}, at

    async def release_for(self, message):
        lock = self.make(message)
        lock.local.token = message["owner"]
        return "yes", {}, (await call(lock.release))[1]

    async def run(self, message):
        lock = self.make(message)

        def tell(how):
            say({"event": "body", "of": message["id"], "how": how, "at": clock.now()})

        async def body_task():
            async with lock:
                tell("began")
                try:
                    if message["body"] == "wait":
                        await asyncio.sleep(message.get("ms", 1000) / 1000)
                    elif message["body"] in ("fail", "panic"):
                        raise ArithmeticError("the body's")
                    tell("ended")
                except asyncio.CancelledError:
                    tell("cancelled")
                    raise

        def body_thread():
            with lock:
                tell("began")
                if message["body"] == "wait":
                    lock.lost.wait(message.get("ms", 1000) / 1000)
                elif message["body"] in ("fail", "panic"):
                    raise ArithmeticError("the body's")
                tell("ended")

        try:
            return "done", {}, (await call(body_task if ASYNC else body_thread))[1]
        except errors.BusyError:
            return "busy", {}, clock.now()
        except ArithmeticError:
            return "failed", {"whose": "body"}, clock.now()

    async def many(self, message):
        for number in range(message["count"]):
            lock = self.make({**message, "key": f"{message['prefix']}{number}"})
            if (await call(lock.acquire))[0]:
                self.crowd.append(lock)
        return "held", {"count": len(self.crowd)}, clock.now()

    async def least(self, message):
        lost = sum(lock.lost.is_set() for lock in self.crowd)
        least = min(lock.remaining() for lock in self.crowd)
        return "value", {"remaining_us": round(least * 1e6), "lost": lost}, clock.now()

    async def drop_many(self, message):
        self.crowd.clear()

    async def turns(self, message):
        dice, end = random.Random(message.get("seed", 0)), clock.now() + message.get("for_ms", 10**9) * 1000
        turns = 0
        while turns < message.get("count", 10**9) and clock.now() < end:
            asked, lock = clock.now(), self.make({**message, "key": dice.choice(message["keys"])})
            granted, at = await call(lock.acquire)
            turn = {"of": message["id"], "key": lock.name, "asked": asked}
            if granted:
                turn.update(granted=at, fence=lock.fence)
                await asyncio.sleep(message.get("hold_us", 0) / 1e6)
                turn["released"] = clock.now()
                try:
                    await call(lock.release)
                    turn["outcome"] = "yes"
                except errors.LockLostError as error:
                    turn["outcome"] = error.lost.value
            else:
                turn["outcome"] = "busy"
            say({"event": "turn"}, **turn)
            turns += 1
        return "done", {"turns": turns}, clock.now()

    async def block(self, message):
        until = time.monotonic() + message["ms"] / 1000
        if message.get("how", "sleep") == "sleep":
            time.sleep(message["ms"] / 1000)  # noqa: ASYNC251
        while time.monotonic() < until:
            sum(range(1000))
        locks = {str(name): [round(lock.remaining() * 1e6), lock.lost.is_set()] for name, lock in self.locks.items()}
        return "value", {"locks": locks}, clock.now()

    async def fork(self, message):
        lock = self.lock_of(message)
        child = os.fork()
        if child == 0:
            said = {"of": message["id"], "remaining_us": round(lock.remaining() * 1e6), "lost": lock.lost.is_set()}
            try:
                lock._renewal(lock.local.tenure, 1_000_000)
            except errors.ForkedError:
                said["renew"] = "forked"
            say({"event": "child"}, **said)
            os._exit(0)
        _, status = await asyncio.get_running_loop().run_in_executor(None, os.waitpid, child, 0)
        return "value", {"exit": status}, clock.now()

    async def settled(self, message):
        done = await redis_lockkeeper.asyncio.settled(message.get("limit_ms", 5000) / 1000)
        return "yes" if done else "no", {}, clock.now()

    async def close(self, message):
        done = await redis_lockkeeper.asyncio.close(message.get("limit_ms", 5000) / 1000)
        threads = [each.name for each in threading.enumerate() if each.name in ("lockkeeper", "lockkeeper-dial")]
        return "yes" if done else "no", {"threads": threads}, clock.now()


class Log(logging.Handler):
    """What the helper logs, as events."""

    def emit(self, record):
        say({"event": "log", "level": record.levelname.lower(), "text": record.getMessage()})


asyncio.run(Agent().main())
