"""Two people ask for the one copy of a book at the same moment.

    book_loan.py PORT by-hand|lock

The first request is in the middle of the loan when the second comes, which is told to try later.
Then it cleans up after itself; whether the third still finds the lock depends on how.
Prints what each was told.
"""

import sys
import threading
import uuid

import redis

port, kind = int(sys.argv[1]), sys.argv[2]
server = redis.Redis(port=port)


def acquire(key, owner):
    if kind == "by-hand":
        return server.set(key, owner, nx=True, px=60_000)
    return server.execute_command("LOCK.ACQUIRE", key, owner, 60_000)


def release(key, owner):
    if kind == "by-hand":
        server.delete(key)  # Whoever holds it.
    else:
        server.execute_command("LOCK.RELEASE", key, owner)


def borrow(book, person, middle=lambda: None):
    key, owner = f"loan:{book}", f"{person}:{uuid.uuid4()}"
    try:
        if not acquire(key, owner):
            return "borrowing in progress"
        copies = int(server.get(f"copies:{book}"))
        if copies == 0:
            return "no copy left"
        middle()
        server.set(f"copies:{book}", copies - 1)
        server.rpush(f"borrowers:{book}", person)
        return "enjoy the book"
    finally:
        release(key, owner)


def tell(person, answer):
    print(f"{person}: {answer}", flush=True)


server.set("copies:dune", 1)
in_the_middle, go_on = threading.Event(), threading.Event()


def pause():
    in_the_middle.set()
    go_on.wait()


first = threading.Thread(target=lambda: tell("ada", borrow("dune", "ada", pause)))
first.start()
in_the_middle.wait()
tell("bob", borrow("dune", "bob"))
tell("cyd", borrow("dune", "cyd"))
go_on.set()
first.join()
tell("dan", borrow("dune", "dan"))
print("borrowers:", b" ".join(server.lrange("borrowers:dune", 0, -1)).decode())
