"""Eight processes read a number, add one in memory and write it back, 200 times each.

    lost_updates.py PORT [lock] [fence] [kill] [stop]

    lock    each change is made under the lock
    fence   the storage refuses whoever comes with an older fence than it has seen
    kill    three holders are killed (-9) with the lock in their hands
    stop    three holders are stopped after their last look at the lock, and go on to write only
            when the lock has gone to another who has written

Prints one line: updates=… lost=… killed=… stopped=… refused=…
"""

import os
import signal
import sys
import time
import uuid

import redis

PROCESSES, CHANGES, VICTIMS = 8, 200, 3
# Long for what a holder does, short for those who wait for a killed or stopped one.
TTL_MS = 1000

port, options = int(sys.argv[1]), set(sys.argv[2:])
server = redis.Redis(port=port)  # The pool notices a fork: each process has its own connection.

# The storage. A read is guarded as well: a stopped holder must not write after its successor has
# read. A write is counted in the same step, so that a killed writer leaves no doubt.
GUARD = """
    if ARGV[1] ~= '' then
        if tonumber(ARGV[1]) < tonumber(redis.call('GET', 'newest fence') or 0) then
            redis.call('INCR', 'refused')
            return false
        end
        redis.call('SET', 'newest fence', ARGV[1])
    end
"""
read = server.register_script(GUARD + "return redis.call('GET', 'number')")
write = server.register_script(GUARD + """
    redis.call('SET', 'number', ARGV[2])
    return redis.call('HINCRBY', 'writes', ARGV[3], 1)
""")


def lock(command, *args):
    return server.execute_command(f"LOCK.{command}", "lock", *args)


def change(worker, done):
    """Changes the number once; True if the storage took it."""
    owner = f"{worker}:{uuid.uuid4()}"
    granted = lock("ACQUIRE", owner, TTL_MS, "WAIT", 60_000) if "lock" in options else None
    fence = granted if "fence" in options else ""
    number = read(args=[fence])
    if number is None:
        return False
    accident("kill", worker, done, signal.SIGKILL)
    # Slow is no excuse: who is late starts over.
    if "lock" in options and lock("RENEW", owner, TTL_MS) != 1:
        return False
    accident("stop", worker, done, signal.SIGSTOP)
    written = write(args=[fence, int(number) + 1, worker])
    if "lock" in options:
        lock("RELEASE", owner)
    return written is not None


def accident(kind, worker, done, sent):
    if kind in options and worker < VICTIMS and done == 20:
        if server.set(f"{kind}:{worker}", 1, nx=True):
            os.kill(os.getpid(), sent)


def writes():
    return {int(worker): int(count) for worker, count in server.hgetall("writes").items()}


def start(worker):
    if pid := os.fork():
        return pid
    try:
        done = writes().get(worker, 0)
        while done < CHANGES:
            done += change(worker, done)
        os._exit(0)
    finally:
        os._exit(1)


def run():
    killed = stopped = 0
    children = {start(worker): worker for worker in range(PROCESSES)}
    try:
        while children:
            pid, status = os.waitpid(-1, os.WUNTRACED)
            if os.WIFSTOPPED(status):
                stopped += 1
                before = sum(writes().values())
                while sum(writes().values()) == before:
                    time.sleep(0.01)
                os.kill(pid, signal.SIGCONT)
                continue
            worker = children.pop(pid)
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                killed += 1
                children[start(worker)] = worker
            elif status != 0:
                sys.exit(f"worker {worker} ended with status {status}")
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
    return killed, stopped


server.set("number", 0)
killed, stopped = run()
updates = sum(writes().values())
lost = updates - int(server.get("number"))
refused = int(server.get("refused") or 0)
print(f"updates={updates} lost={lost} killed={killed} stopped={stopped} refused={refused}")
