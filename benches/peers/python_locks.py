"""Runs locks from Python, and prints as JSON what each client did, or what it cost.

    python_locks.py VARIANT URL CLIENTS HOLD PAUSE LENGTH              clients are threads
    python_locks.py VARIANT URL CLIENTS HOLD PAUSE LENGTH processes    or processes
    python_locks.py VARIANT URL pairs PAIRS                            acquire and release of a free lock
    python_locks.py VARIANT URL handovers COUNT                        one holds, one waits: how long until it has it
    python_locks.py VARIANT URL kept LOCKS SECONDS                     so many locks are held for so long
    python_locks.py VARIANT URL killed TTL SECONDS                     all places are held by who is killed: how many
                                                                       are free so long after, and the last when

Each client has a connection of its own; times are in seconds.
"""

import asyncio
import gc
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import threading
import time
import uuid

import redis
import redis.asyncio
import redis_lock

import redis_lockkeeper
import redis_lockkeeper.asyncio

TTL = 30

# How many a semaphore lets in at once.
PLACES = 4


class RedisPy:
    def __init__(self, url, sleep=0.1):
        # No socket timeout: the lock is what is measured, not the patience of the client.
        self.lock = redis.Redis.from_url(url, socket_timeout=None).lock("lock", timeout=TTL, sleep=sleep)

    def acquire(self):
        self.lock.acquire()

    def release(self):
        self.lock.release()


class Helper(RedisPy):
    def __init__(self, url):
        self.lock = redis_lockkeeper.Lock(redis.Redis.from_url(url), "lock", timeout=TTL)


class Commands:
    """The two commands of the helper through redis-py: what is left of its cost is redis-py's own."""

    def __init__(self, url):
        self.client = redis.Redis.from_url(url, socket_timeout=None)
        self.owner = str(uuid.uuid4())

    def acquire(self):
        self.client.execute_command("LOCK.ACQUIRE", "lock", self.owner, TTL * 1000)

    def release(self):
        self.client.execute_command("LOCK.RELEASE", "lock", self.owner)


class WaitByCommands(Commands):
    def acquire(self):
        while not self.client.execute_command("LOCK.ACQUIRE", "lock", self.owner, TTL * 1000, "WAIT", 3600000):
            pass


class PythonRedisLock:
    def __init__(self, url):
        self.client = redis.Redis.from_url(url, socket_timeout=None)
        redis_lock.Lock.register_scripts(self.client)

    def acquire(self):
        self.lock = redis_lock.Lock(self.client, "lock", expire=TTL)
        self.lock.acquire()

    def release(self):
        self.lock.release()


def redis_py_asyncio(url):
    return redis.asyncio.Redis.from_url(url, socket_timeout=None).lock("lock", timeout=TTL)


def helper_asyncio(url):
    return redis_lockkeeper.asyncio.Lock(redis.asyncio.Redis.from_url(url), "lock", timeout=TTL)


class PlaceOfHelper(RedisPy):
    def __init__(self, url, ttl=TTL):
        self.lock = redis_lockkeeper.Lock(redis.Redis.from_url(url), "lock", timeout=ttl, limit=PLACES)


class PlaceByCommands:
    def __init__(self, url, ttl=TTL):
        self.client, self.owner, self.ttl = redis.Redis.from_url(url, socket_timeout=None), str(uuid.uuid4()), ttl

    def acquire(self):
        words = "LOCK.ACQUIRE", "lock", self.owner, int(self.ttl * 1000), "WAIT", 3600000, "LIMIT", PLACES
        while not self.client.execute_command(*words):
            pass

    def release(self):
        self.client.execute_command("LOCK.RELEASE", "lock", self.owner)


class PlaceInSortedSet:
    """As textbooks have it: whose lease has ended is dropped, and who finds room goes in; else asks again later."""

    ACQUIRE = """
        local time = redis.call('TIME')
        local now = time[1] * 1000 + math.floor(time[2] / 1000)
        redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
        if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[3]) then return 0 end
        redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
        redis.call('PEXPIRE', KEYS[1], ARGV[2])
        return 1"""

    def __init__(self, url, ttl=TTL, sleep=0.1):
        self.client, self.ttl, self.sleep = redis.Redis.from_url(url, socket_timeout=None), ttl, sleep
        self.script, self.owner = self.client.register_script(self.ACQUIRE), str(uuid.uuid4())

    def acquire(self):
        while not self.script(keys=["lock"], args=[self.owner, int(self.ttl * 1000), PLACES]):
            time.sleep(self.sleep)

    def release(self):
        self.client.zrem("lock", self.owner)


class PlaceByToken:
    """A list of tokens: whoever comes first fills it; BLPOP waits in line, and nothing ends with its holder."""

    FILL = "if redis.call('SET', KEYS[1], 1, 'NX') then redis.call('RPUSH', KEYS[2], unpack(ARGV)) end"

    def __init__(self, url, ttl=TTL):
        self.client = redis.Redis.from_url(url, socket_timeout=None)
        self.client.eval(self.FILL, 2, "filled", "tokens", *range(PLACES))

    def acquire(self):
        _, self.token = self.client.blpop("tokens")

    def release(self):
        self.client.rpush("tokens", self.token)


VARIANTS = {
    "redis-py": RedisPy,
    "redis-py-5ms": lambda url: RedisPy(url, 0.005),
    "redis-py-asyncio": redis_py_asyncio,
    "python-redis-lock": PythonRedisLock,
    "commands": Commands,
    "wait-by-commands": WaitByCommands,
    "helper": Helper,
    "helper-asyncio": helper_asyncio,
    "place-of-helper": PlaceOfHelper,
    "place-by-commands": PlaceByCommands,
    "place-in-sorted-set": PlaceInSortedSet,
    "place-in-sorted-set-10ms": lambda url, ttl=TTL: PlaceInSortedSet(url, ttl, 0.01),
    "place-by-token": PlaceByToken,
}


class Client(threading.Thread):
    def __init__(self, lock, hold, pause, ready):
        super().__init__(daemon=True)
        self.lock, self.hold, self.pause, self.ready = lock, hold, pause, ready
        self.turns, self.waiting_since = [], None

    def run(self):
        # Connecting, and starting a thread, is not what is measured.
        self.lock.acquire()
        self.lock.release()
        self.ready.wait()
        while True:
            asked = self.waiting_since = time.monotonic()
            self.lock.acquire()
            granted, self.waiting_since = time.monotonic(), None
            time.sleep(self.hold)
            releasing = time.monotonic()
            self.lock.release()
            self.turns.append((asked, granted, releasing))
            if self.pause:
                time.sleep(random.uniform(0, self.pause))


def turns(make, url, clients, hold, pause, length, how="threads"):
    clients, hold, pause, length = int(clients), float(hold), float(pause), float(length)
    context = multiprocessing.get_context("fork")
    counted_anew = redis.Redis.from_url(url).config_resetstat
    ready = (context if how == "processes" else threading).Barrier(clients + 1, counted_anew)

    def process(pipe):
        client = Client(make(url), hold, pause, ready)
        client.start()
        # What is done from the end on is not counted.
        pipe.recv()
        pipe.send((list(client.turns), client.waiting_since))
        os._exit(0)

    if how == "processes":
        pipes = [context.Pipe() for _ in range(clients)]
        for _, theirs in pipes:
            context.Process(target=process, args=(theirs,), daemon=True).start()
    else:
        threads = [Client(make(url), hold, pause, ready) for _ in range(clients)]
        for thread in threads:
            thread.start()
    ready.wait()
    start = time.monotonic()
    time.sleep(length)
    if how == "processes":
        for ours, _ in pipes:
            ours.send("end")
        logs = [ours.recv() for ours, _ in pipes]
    else:
        logs = [(list(thread.turns), thread.waiting_since) for thread in threads]
    end = start + length
    return [
        {
            "turns": [[t - start for t in turn] for turn in turns if turn[2] < end],
            "waiting_since": waiting and waiting - start,
        }
        for turns, waiting in logs
    ]


class Meter:
    """What the server, and this process, have spent so far, in microseconds."""

    def __init__(self, url):
        self.client = redis.Redis.from_url(url)

    def read(self):
        cpu, stats = self.client.info("cpu"), self.client.info("commandstats")
        server = cpu["used_cpu_user_main_thread"] + cpu["used_cpu_sys_main_thread"]
        # Commands inside of a script are in the script's time.
        names = ("set", "evalsha", "lock.acquire", "lock.release")
        ours = [each for name, each in stats.items() if name[8:].lower() in names]
        commands = sum(each["usec"] for each in ours)
        return 1e6 * time.perf_counter(), 1e6 * time.process_time(), 1e6 * server, commands


def pairs(make, url, count):
    lock, count, meter = make(url), int(count), Meter(url)

    async def awaited():
        lock = make(url)
        for _ in range(2):
            before = meter.read()
            for _ in range(count):
                await lock.acquire()
                await lock.release()
            after = meter.read()
        return before, after

    if asyncio.iscoroutinefunction(lock.acquire):
        before, after = asyncio.run(awaited())
    else:
        for _ in range(2):
            before = meter.read()
            for _ in range(count):
                lock.acquire()
                lock.release()
            after = meter.read()
    names = ("wall", "client_cpu", "server_cpu", "commands")
    return {name: (b - a) / count for name, a, b in zip(names, before, after)}


def handover(holder, waiter):
    """Milliseconds from the release of one to the grant of the other, who has waited for 10 to 110, so that no poller is
    in step."""
    granted = None

    def wait():
        nonlocal granted
        waiter.acquire()
        granted = time.perf_counter()
        waiter.release()

    holder.acquire()
    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(random.uniform(0.01, 0.11))
    released = time.perf_counter()
    holder.release()
    thread.join()
    return 1e3 * (granted - released)


def handovers(make, url, count):
    one, other = make(url), make(url)
    handover(one, other)
    return {"p50": statistics.median(handover(one, other) for _ in range(int(count)))}


def kept(_, url, count, seconds):
    client = redis.Redis.from_url(url)
    locks = [redis_lockkeeper.Lock(client, f"kept:{number}", timeout=TTL) for number in range(int(count))]
    start = time.perf_counter()
    for lock in locks:
        assert lock.acquire(blocking=False)
    took = time.perf_counter() - start
    before, meter = Meter(url).read(), Meter(url)
    time.sleep(float(seconds))
    spent = [after - before for before, after in zip(before, meter.read())]
    assert not any(lock.lost.is_set() for lock in locks)
    for lock in locks:
        lock.leave()
    return {"client": 100 * spent[1] / spent[0], "server": 100 * spent[2] / spent[0], "acquired": took}


def killed(make, url, ttl, seconds):
    ttl, context = float(ttl), multiprocessing.get_context("fork")
    held = context.Event()

    def hold():
        places = [make(url, ttl) for _ in range(PLACES)]
        for place in places:
            place.acquire()
        held.set()
        signal.pause()

    holder = context.Process(target=hold, daemon=True)
    holder.start()
    held.wait()
    holder.kill()
    holder.join()
    start, took = time.monotonic(), []

    def take():
        make(url, TTL).acquire()
        took.append(time.monotonic() - start)

    for _ in range(PLACES):
        threading.Thread(target=take, daemon=True).start()
    time.sleep(float(seconds))
    return {"free": len(took), "last": max(took, default=None)}


# What is imported lives as long as we do. To look through it for garbage stops all threads for 50 ms, at a time that
# says nothing about a lock; programs that care do the same.
gc.freeze()

variant, url, *words = sys.argv[1:]
modes = {"pairs": pairs, "handovers": handovers, "kept": kept, "killed": killed}
mode = modes[words.pop(0)] if words[0] in modes else turns
print(json.dumps(mode(VARIANTS[variant], url, *words)))
sys.stdout.flush()
os._exit(0)
