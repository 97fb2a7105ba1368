"""Six threads take turns at one lock of a cluster through redis-py, until a file appears.

    cluster_turns.py PORT KEY STOP

Prints one line: turns=… overlaps=… errors=…
"""

import os
import sys
import threading
import uuid

from redis.cluster import RedisCluster

port, key, stop = int(sys.argv[1]), sys.argv[2], sys.argv[3]
WAIT_MS = 30_000
# Longer than the wait, or the library gives up before the server does.
server = RedisCluster(host="127.0.0.1", port=port, socket_timeout=2 * WAIT_MS / 1000)

taken, counting = threading.Lock(), threading.Lock()
turns = overlaps = 0
errors = []


def take_turns():
    global turns, overlaps
    while not os.path.exists(stop):
        owner = str(uuid.uuid4())
        if not server.execute_command("LOCK.ACQUIRE", key, owner, 600_000, "WAIT", WAIT_MS):
            raise TimeoutError("never granted")
        free = taken.acquire(blocking=False)
        with counting:
            turns += 1
            overlaps += not free
        renewed = server.execute_command("LOCK.RENEW", key, owner, 600_000)
        if free:
            taken.release()
        if renewed != 1 or server.execute_command("LOCK.RELEASE", key, owner) != 1:
            raise RuntimeError("the lock was lost")


def run():
    try:
        take_turns()
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")


threads = [threading.Thread(target=run) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(f"turns={turns} overlaps={overlaps} errors={errors}")
sys.exit(bool(errors))
