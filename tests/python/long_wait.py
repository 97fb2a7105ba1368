"""Waits for the lock "k" as the owner "waiter" for a minute.

    long_wait.py PORT default|SECONDS

The second argument is the socket timeout. Prints the fence, or the name of the exception.
"""

import sys

import redis

port, timeout = int(sys.argv[1]), sys.argv[2]
settings = {} if timeout == "default" else {"socket_timeout": float(timeout)}
server = redis.Redis(port=port, **settings)
try:
    print(server.execute_command("LOCK.ACQUIRE", "k", "waiter", 60_000, "WAIT", 60_000))
except redis.exceptions.TimeoutError as error:
    print(type(error).__name__)
