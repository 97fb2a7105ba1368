"""Why a question got no answer, and what a lost lock is called. That a lock is busy is an answer.

All of these are also errors of the client library, or of both if both are installed, so that code
that catches `LockError`, `LockNotOwnedError`, `ConnectionError` or `ResponseError` goes on working.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .lease import Lost

#: The client libraries that are installed.
LIBRARIES = [name for name in ("redis", "valkey") if find_spec(name)]
_EXCEPTIONS = [import_module(f"{name}.exceptions") for name in LIBRARIES]
if not LIBRARIES:
    raise ImportError("redis_lockkeeper needs redis or valkey: pip install 'redis-lockkeeper[redis]'")

if TYPE_CHECKING:
    from redis.exceptions import ConnectionError as _ConnectionError
    from redis.exceptions import LockError as _LockError
    from redis.exceptions import LockNotOwnedError as _LockNotOwnedError
    from redis.exceptions import ResponseError as _ResponseError
else:

    def _of_all_libraries(name: str) -> type:
        return type(name, tuple(getattr(module, name) for module in _EXCEPTIONS), {})

    _ConnectionError = _of_all_libraries("ConnectionError")
    _LockError = _of_all_libraries("LockError")
    _LockNotOwnedError = _of_all_libraries("LockNotOwnedError")
    _ResponseError = _of_all_libraries("ResponseError")

#: What a library's connection raises when the connection has broken.
BROKEN = (OSError, *(error for each in _EXCEPTIONS for error in (each.ConnectionError, each.TimeoutError)))

#: What it raises for an error reply.
REPLIED = tuple(module.ResponseError for module in _EXCEPTIONS)


class _NamedError(_LockError):
    def __init__(self, message: str, name: Any = None) -> None:
        super().__init__(message, name)

    def __str__(self) -> str:
        # Some releases of the libraries print what it was made of.
        return str(self.args[0])


class InvalidError(_NamedError):
    """The caller asked for something that makes no sense; nothing was sent."""


class NotHeldError(_NamedError):
    """There is no lock to be released, extended or asked about."""


class BusyError(_NamedError):
    """Another holds the lock, and it was not to be had in the time given."""


class ForkedError(_NamedError):
    """The lock is that of the process from which this one was forked."""


class LockLostError(_LockNotOwnedError):
    """The lock is not held any longer; `lost` says why."""

    def __init__(self, lost: Lost, name: Any) -> None:
        super().__init__(f"the lock {name!r} is lost: {lost}", name)
        self.lost, self.name = lost, name

    def __str__(self) -> str:
        return f"the lock {self.name!r} is lost: {self.lost}"

    def __reduce__(self) -> Any:
        # By default a copy is made of what the library's error was made of.
        return type(self), (self.lost, self.name)


class UnreachableError(_ConnectionError):
    """Nobody answered in time. Whether the server carried it out is not known; what may have been granted is
    released in the background, and ends by itself after one timeout.
    """

    #: Whether RELEASE was sent behind the request, so that its owner is of no use any more.
    released = False

    #: Whether anything was sent at all.
    sent = True

    #: Whether it may be reached in a moment: a server that never was is most likely a wrong address.
    passing = True

    #: Whether it is worth a wait that ends.
    may_come = True


class RefusedError(_ResponseError):
    """The server answered with an error, kept here as it came: `CODE what was wrong`."""

    def __init__(self, line: str) -> None:
        super().__init__(line)
        self.line = line

    @property
    def passing(self) -> bool:
        """Whether the server may answer otherwise in a moment: it is starting, changing its role, moving the key."""
        return self.line.partition(" ")[0] in _PASSING


_PASSING = frozenset(
    "ASK BUSY CLUSTERDOWN LOADING MASTERDOWN MOVED NOREPLICAS QUEUEFULL READONLY TRYAGAIN UNBLOCKED".split()  # noqa: SIM905
)


def is_elsewhere(reply: Any) -> bool:
    """Whether a server said that it is not the master: behind its address there may be another by now."""
    if isinstance(reply, RefusedError):
        return reply.line.startswith(("READONLY", "MASTERDOWN"))
    return type(reply).__name__ in ("ReadOnlyError", "MasterDownError")


class ModuleMissingError(RefusedError):
    """The server has no Lockkeeper. There is no weaker lock instead."""
