"""The four commands as they are sent, and their replies as they are read: the one place that knows
the protocol. Our connections never decode, so that names are bytes whatever they are made of.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Union

from .errors import ModuleMissingError, RefusedError, UnreachableError
from .lease import MAX_TTL, MILLISECOND, Answer

Command = tuple[Any, ...]
Key = Union[str, bytes, memoryview]

#: How many may hold a key, its holder included: one, or, shared, as many as the module takes.
EXCLUSIVE, SHARED = 1, 1000


def _ms(micros: int) -> int:
    """Rounded down, so that we never count on more than the server was asked for; it takes no 0."""
    return max(1, min(micros, MAX_TTL) // MILLISECOND)


def acquire(key: Key, owner: bytes, ttl: int, limit: int, wait: Optional[int] = None) -> Command:
    """`ttl` and `wait` in microseconds; without `wait` it is one try. A wait is rounded up: nobody waits too short."""
    command: Command = ("LOCK.ACQUIRE", key, owner, _ms(ttl))
    if wait is not None:
        command += ("WAIT", _ms(wait + MILLISECOND - 1))
    if limit == EXCLUSIVE:
        # A module without limits understands that.
        return command
    return (*command, "SHARED") if limit == SHARED else (*command, "LIMIT", limit)


def renew(key: Key, owner: bytes, ttl: int) -> Command:
    return ("LOCK.RENEW", key, owner, _ms(ttl))


def release(key: Key, owner: bytes) -> Command:
    return ("LOCK.RELEASE", key, owner)


def info(key: Key) -> Command:
    return ("LOCK.INFO", key)


def replicas(count: int, within: int) -> Command:
    """Asks how many replicas have acknowledged what this connection wrote, in time for the answer to arrive."""
    return ("WAIT", count, _ms(within * 4 // 5))


def _unexpected(reply: Any) -> UnreachableError:
    return UnreachableError(f"what answers is not Lockkeeper, it said {reply!r}")


def read_fence(reply: Any) -> Optional[int]:
    """What ACQUIRE answered: the fence, or None when the lock is busy."""
    if reply is None or (type(reply) is int and reply > 0):
        return reply
    raise _unexpected(reply)


def read_answer(reply: Any) -> Answer:
    """What RENEW or RELEASE answered: only exactly 1 is a yes."""
    if reply is None:
        return Answer.GONE
    if type(reply) is int and reply in (0, 1):
        return Answer.YES if reply else Answer.TAKEN
    raise _unexpected(reply)


class Waiter(NamedTuple):
    """Somebody who waits for a lock."""

    owner: bytes
    #: For how long, in seconds.
    waited: float
    #: How many may hold the lock for this one to be among them.
    limit: int


class Holder(NamedTuple):
    """Somebody who holds a lock. Times are in seconds, by the server's clock."""

    owner: bytes
    #: The fence of the grant; None for a lock that was taken by hand.
    fence: Optional[int]
    #: For how long it has been held; None for a lock that was taken by hand.
    held: Optional[float]
    #: When it ends unless it is renewed; None if it never does.
    ttl: Optional[float]
    #: How many may hold the lock, as this one says.
    limit: int


class Info(NamedTuple):
    """Who holds a lock and who waits for it. Times are in seconds, by the server's clock."""

    #: Who holds it alone; None if nobody does, or others may beside it: see `holders`.
    owner: Optional[bytes]
    #: The fence of that grant; None for a lock that was taken by hand.
    fence: Optional[int]
    #: For how long it has been held alone; None for a lock that was taken by hand.
    held: Optional[float]
    #: When it ends, with several holders the last of them, unless it is renewed; None if it never does, or nobody
    #: holds it.
    ttl: Optional[float]
    #: How many wait.
    waiters: int
    #: The first 100 of those who wait, in order.
    queue: list[Waiter]
    #: How many may hold it, as the strictest of its holders says; None if nobody holds it.
    limit: Optional[int]
    #: How many hold it.
    holding: int
    #: The first 100 of those who hold it, in order of their grants.
    holders: list[Holder]

    def may_queue(self, owner: bytes) -> bool:
        """Whether the owner waits, or may be among those who wait or hold it and are not listed."""
        cut = self.holding > len(self.holders) or self.waiters > len(self.queue)
        return cut or owner in [each.owner for each in self.queue]


def read_info(reply: Any) -> Optional[Info]:
    """None if nobody holds the lock and nobody waits."""
    if reply is None:
        return None
    try:
        fields = _fields(reply)
        queue = [_fields(waiter) for waiter in fields["queue"]]
        several = [_fields(each) for each in fields.get("holders", ())]
        # An exclusive lock has one holder, of whom the same fields tell.
        holders = [_holder(each) for each in several or [fields] * (fields["owner"] is not None)]
        return Info(
            owner=fields["owner"],
            fence=fields["fence"],
            held=_seconds(fields["held-ms"]),
            ttl=_seconds(fields["ttl-ms"]),
            waiters=fields["waiters"],
            queue=[Waiter(each["owner"], each["waited-ms"] / 1000, each.get("limit", EXCLUSIVE)) for each in queue],
            limit=fields.get("limit", EXCLUSIVE if holders else None),
            holding=fields.get("holding", len(holders)),
            holders=holders,
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise _unexpected(reply) from error


def _holder(fields: dict[str, Any]) -> Holder:
    times = _seconds(fields["held-ms"]), _seconds(fields["ttl-ms"])
    return Holder(fields["owner"], fields["fence"], *times, fields.get("limit", EXCLUSIVE))


def _fields(reply: Any) -> dict[str, Any]:
    """A map in RESP3, a flat list in RESP2."""
    pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2])
    return {name.decode(): value for name, value in pairs}


def _seconds(ms: Optional[int]) -> Optional[float]:
    return None if ms is None or ms < 0 else ms / 1000


#: The libraries cut the code word off the errors for which they have a class.
_CODES = {
    "AskError": "ASK",
    "AuthenticationError": "NOAUTH",
    "BusyLoadingError": "LOADING",
    "ClusterCrossSlotError": "CROSSSLOT",
    "ClusterDownError": "CLUSTERDOWN",
    "MasterDownError": "MASTERDOWN",
    "MovedError": "MOVED",
    "NoPermissionError": "NOPERM",
    "OutOfMemoryError": "OOM",
    "ReadOnlyError": "READONLY",
    "TryAgainError": "TRYAGAIN",
}


def translated(error: BaseException, server: str) -> Union[RefusedError, UnreachableError]:
    """What a library's connection to `server` raised, as one of our kinds."""
    if isinstance(error, (RefusedError, UnreachableError)):
        return error
    text, name = str(error), type(error).__name__
    code = _CODES.get(name)
    if code is None and not name.endswith("ResponseError"):
        return UnreachableError(f"{server} cannot be reached: {text or name}")
    if text.startswith("unknown command"):
        return ModuleMissingError(
            f"{server} has no Lockkeeper ({text}): start it with --loadmodule .../liblockkeeper.so, or MODULE LOAD it"
        )
    return RefusedError(f"{code} {text}" if code and not text.startswith(code) else text)
