"""Distributed locks on a server with the Lockkeeper module, for redis-py and valkey-py.

The lock for threads is here, the one for asyncio in `redis_lockkeeper.asyncio`.
"""

from .decorator import locked
from .errors import (
    BusyError,
    ForkedError,
    InvalidError,
    LockLostError,
    ModuleMissingError,
    NotHeldError,
    RefusedError,
    UnreachableError,
)
from .lease import Lost
from .lock import Lock
from .replies import Holder, Info, Waiter
from .watchdog import close, settled

__all__ = [
    "BusyError",
    "ForkedError",
    "Holder",
    "Info",
    "InvalidError",
    "Lock",
    "LockLostError",
    "Lost",
    "ModuleMissingError",
    "NotHeldError",
    "RefusedError",
    "UnreachableError",
    "Waiter",
    "close",
    "locked",
    "settled",
]
