"""Runs the locks of redis-py and python-redis-lock, and prints what each client did.

    python_locks.py VARIANT URL CLIENTS HOLD PAUSE LENGTH
    python_locks.py VARIANT URL uncontended PAIRS

Clients are threads, each with a connection of its own; times are in seconds.
"""

import json
import os
import random
import sys
import threading
import time

import redis
import redis_lock

TTL = 30


class RedisPy:
    def __init__(self, url, sleep):
        # No socket timeout: the lock is what is measured, not the patience of the client.
        self.lock = redis.Redis.from_url(url, socket_timeout=None).lock("lock", timeout=TTL, sleep=sleep)

    def acquire(self):
        self.lock.acquire()

    def release(self):
        self.lock.release()


class PythonRedisLock:
    def __init__(self, url):
        self.client = redis.Redis.from_url(url, socket_timeout=None)
        redis_lock.Lock.register_scripts(self.client)

    def acquire(self):
        self.lock = redis_lock.Lock(self.client, "lock", expire=TTL)
        self.lock.acquire()

    def release(self):
        self.lock.release()


VARIANTS = {
    "redis-py": lambda url: RedisPy(url, 0.1),
    "redis-py-5ms": lambda url: RedisPy(url, 0.005),
    "python-redis-lock": PythonRedisLock,
}


class Client(threading.Thread):
    def __init__(self, lock, hold, pause):
        super().__init__(daemon=True)
        self.lock, self.hold, self.pause = lock, hold, pause
        self.turns, self.waiting_since = [], None

    def run(self):
        ready.wait()
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


variant, url, clients = sys.argv[1:4]
if clients == "uncontended":
    lock, pairs = VARIANTS[variant](url), int(sys.argv[4])
    for warm_up in (True, False):
        start = time.perf_counter()
        for _ in range(pairs):
            lock.acquire()
            lock.release()
    print(1e6 * (time.perf_counter() - start) / pairs)
    sys.exit()

hold, pause, length = map(float, sys.argv[4:7])
ready = threading.Barrier(int(clients) + 1)
threads = [Client(VARIANTS[variant](url), hold, pause) for _ in range(int(clients))]
for thread in threads:
    thread.start()
ready.wait()
start = time.monotonic()
time.sleep(length)
# The threads run on: what they do from here on is not counted.
logs = [(list(thread.turns), thread.waiting_since) for thread in threads]
end = start + length
print(
    json.dumps(
        [
            {
                "turns": [[t - start for t in turn] for turn in turns if turn[2] < end],
                "waiting_since": waiting and waiting - start,
            }
            for turns, waiting in logs
        ]
    )
)
sys.stdout.flush()
os._exit(0)
