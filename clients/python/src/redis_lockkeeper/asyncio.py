"""A lock for asyncio: a drop-in for the asyncio Lock of redis-py and valkey-py.

It asks and waits in the event loop, over the same connections of our own as the lock for threads, which are the loop's
to watch, not to read. Renewals and clean-up are done by the same watchdog thread, so a blocked loop loses no lock, nor
does one that has ended leave one behind.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import weakref
from collections.abc import Hashable
from contextlib import suppress
from types import TracebackType
from typing import Any, Callable, Optional, TypeVar, Union

from . import watchdog
from .acquisition import Tenure
from .clock import now
from .connections import ClusterPlace, Node
from .errors import InvalidError, UnreachableError
from .exchange import Dial, Learn, Outcome, Reply, Steps
from .lease import SECOND, Lost
from .lock import Base
from .promise import Promise
from .replies import EXCLUSIVE, SHARED, Info

__all__ = ["Lock", "close", "settled"]

#: How long the loop waits for the rest of a reply that has come in part, in seconds: then the connection is given up.
PIECES = 0.1

_T = TypeVar("_T")


class Lock(Base):
    """A lock on a server with the Lockkeeper module: a drop-in for the asyncio Lock of redis-py and valkey-py, to be
    had by `client.lock("name", lock_class=Lock)` or `Lock(client, "name", …)`, and used by `async with`.

    It is renewed until it is released, so `timeout` is not how long it may be held (`max_hold` is), but how long
    it outlives a holder that is gone. One object may be shared by tasks, each of which holds its own. Settings, methods
    and errors are those of `redis_lockkeeper.Lock`; besides there is

    cancel_on_lost: cancels the body of an `async with` when the lock is lost, which then raises `LockLostError`,
        as `asyncio.timeout` does. From Python 3.11 on.
    """

    _asynchronous = True

    def _configure(self, *, cancel_on_lost: bool = False, **more: Any) -> None:
        if cancel_on_lost and sys.version_info < (3, 11):
            raise InvalidError("cancel_on_lost needs Python 3.11, whose tasks can tell who cancelled them")
        self.cancel_on_lost = cancel_on_lost
        super()._configure(**more)

    @staticmethod
    def _who() -> Hashable:
        try:
            task = asyncio.current_task()
        except RuntimeError:
            return None
        return None if task is None else weakref.ref(task)

    async def __aenter__(self) -> Lock:
        """As `__enter__` of the lock for threads."""
        task = asyncio.current_task()
        tenure = await self._run(self._acquiring(None, None, None))
        self._entering(tenure)
        if self.cancel_on_lost and task is not None and tenure is not None:
            tenure.event = _CancellingEvent(task)
            if tenure.lost() is not None:
                tenure.event.set()
        return self

    async def __aexit__(
        self,
        exc_type: Optional[type[BaseException]],
        exc_value: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        """As `__exit__` of the lock for threads."""
        who = self._who()
        event = self._entered[who][-1].event if who in self._entered else None
        ours = isinstance(event, _CancellingEvent) and event.uncancel()
        failed = exc_type is not None and not (ours and exc_type is asyncio.CancelledError)
        await self._run(self._leaving(failed=failed, always=ours))

    async def acquire(
        self,
        blocking: Optional[bool] = None,
        blocking_timeout: Optional[float] = None,
        token: Union[str, bytes, None] = None,
    ) -> bool:
        """True when the lock is held, False if it is busy: at once with `blocking=False`, else when it was not to
        be had within `blocking_timeout` seconds, 0.1 s later at most whatever the server does.

        Cancelled at any moment, it leaves neither a lock nor a place in the queue behind, or, while the server
        cannot be reached, none that outlives one timeout.
        """
        return self._acquired(await self._run(self._acquiring(blocking, blocking_timeout, token)))

    def _listener(self, tenure: Tenure) -> Callable[[Lost], None]:
        loop, held, on_lost = asyncio.get_running_loop(), weakref.ref(tenure), self.on_lost
        # Before Python 3.10 it is made in its loop only.
        tenure.event = asyncio.Event()

        def tell(why: Lost) -> None:
            tenure = held()
            if tenure is not None:
                tenure.tell_lost()
            if on_lost is not None:
                on_lost(why)

        return lambda why: _call_in(loop, tell, why)

    @property
    def lost(self) -> asyncio.Event:
        """As with threads, but set when the loop turns. `remaining` and `check` are right even before it does."""
        return self._lost_event(asyncio.Event)

    async def release(self) -> None:
        """Releases the lock. Renewal stops first; cancelled at any moment, it is released in the background."""
        await self._run(self._releasing())

    async def release_after(self, seconds: float) -> None:
        """As `release`, but the lock stays taken until so long after it was granted. It does not wait."""
        await self._run(self._keeping(seconds))

    async def extend(self, additional_time: float, replace_ttl: bool = False) -> bool:
        """Adds seconds to what remains of the lock, or with `replace_ttl` makes it last for so long from now; once."""
        return await self._run(self._extending("extend", additional_time, replace_ttl))

    async def reacquire(self) -> bool:
        """Makes the lock last for its timeout from now."""
        return await self._run(self._extending("reacquire", self.timeout, True))

    async def upgrade(self) -> bool:
        """Makes this the only holder. False if others hold it, too: it is held on as it was. It waits for nobody."""
        return await self._run(self._regranting("upgrade", EXCLUSIVE))

    async def downgrade(self) -> bool:
        """Shares the lock from now on, until it is released. The fence is a new one."""
        return await self._run(self._regranting("downgrade", SHARED))

    async def info(self) -> Optional[Info]:
        """Who holds the lock and who waits for it, whoever that is; None if nobody does either."""
        return await self._run(self._asking_for_info())

    async def locked(self) -> bool:
        """Whether anybody holds it."""
        info = await self.info()
        return info is not None and info.holding > 0

    async def owned(self) -> bool:
        """Whether the server says that this lock object holds it. See `check` for what asks nobody."""
        return self._is_owner(await self.info())

    async def _run(self, steps: Steps[_T]) -> _T:
        """Waits for what the steps want to wait for, in the loop."""
        if isinstance(self._place, ClusterPlace):
            self._place.loop = asyncio.get_running_loop()
        try:
            step = next(steps)
            while True:
                try:
                    result: Any = None
                    if isinstance(step, Reply):
                        result = await _replied(step)
                    elif isinstance(step, Dial):
                        result = await _dialled(step)
                    elif isinstance(step, Learn):
                        await self._learn(step.until)
                    elif isinstance(step, Outcome):
                        limit = None if step.until is None else max(0, step.until - now()) / SECOND
                        result = await _done(step.promise, limit)
                    else:
                        await asyncio.sleep(max(0, step.until - now()) / SECOND)
                except BaseException as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(result)
        except StopIteration as stop:
            value: _T = stop.value
            return value
        finally:
            steps.close()

    async def _learn(self, until: int) -> None:
        """The map of a cluster is its client's."""
        try:
            await asyncio.wait_for(self.redis.initialize(), max(0, until - now()) / SECOND)
        except Exception as error:
            unknown = UnreachableError(
                f"the map of the cluster cannot be had: {str(error) or 'nobody answered in time'}"
            )
            unknown.passing = unknown.sent = False
            raise unknown from error


def _call_in(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: Any) -> None:
    # A loop that has ended has nobody to be told.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *args)


async def _replied(step: Reply) -> bool:
    loop, connection = asyncio.get_running_loop(), step.connection
    # What came may be a part of something: over TLS, of nothing at all.
    while not connection.can_read(0):
        if now() >= step.until:
            return False
        readable, sock = loop.create_future(), connection._sock
        timer = loop.call_later((step.until - now()) / SECOND, _wake, readable)
        loop.add_reader(sock, _wake, readable)
        try:
            await readable
        finally:
            timer.cancel()
            loop.remove_reader(sock)
    connection._sock.settimeout(PIECES)
    return True


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _dialled(step: Dial) -> Any:
    dial = _in_a_thread(lambda: step.node.dial((step.until - now()) / SECOND))
    try:
        await _done(dial)
    except asyncio.CancelledError:
        dial.when_done(lambda: _give(step.node, dial))
        raise
    return dial.result()


def _give(node: Node, dial: Promise[Any]) -> None:
    try:
        connection = dial.result()
    except Exception:
        return
    node.give(connection)


async def _done(promise: Promise[Any], timeout: Optional[float] = None) -> bool:
    """Until it is done, for so many seconds at most. Whether it is."""
    loop = asyncio.get_running_loop()
    told = loop.create_future()
    promise.when_done(lambda: _call_in(loop, _wake, told))
    await asyncio.wait({told}, timeout=timeout)
    return promise.done()


class _CancellingEvent(asyncio.Event):
    """Cancels a task when it is set, and can tell afterwards that it was this one."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        super().__init__()
        self._task = task
        self._cancelling: int = task.cancelling()  # type: ignore[attr-defined,unused-ignore]
        self._left = False

    def set(self) -> None:
        if not self.is_set() and not self._left:
            self._task.cancel()
        super().set()

    def uncancel(self) -> bool:
        """The body has ended. Whether nobody else has cancelled it."""
        self._left = True
        if not self.is_set():
            return False
        return self._task.uncancel() <= self._cancelling  # type: ignore[attr-defined,no-any-return,unused-ignore]


async def settled(timeout: Optional[float] = None) -> bool:
    """As `redis_lockkeeper.settled`, without blocking the loop."""
    return await _from_a_thread(lambda: watchdog.settled(timeout))


async def close(timeout: Optional[float] = None) -> bool:
    """As `redis_lockkeeper.close`, without blocking the loop."""
    return await _from_a_thread(lambda: watchdog.close(timeout))


async def _from_a_thread(work: Callable[[], _T]) -> _T:
    promise = _in_a_thread(work)
    await _done(promise)
    return promise.result()


def _in_a_thread(work: Callable[[], _T]) -> Promise[_T]:
    """Not in an executor, whose threads stay."""
    promise: Promise[_T] = Promise()

    def run() -> None:
        try:
            promise.set_result(work())
        except Exception as error:
            promise.set_exception(error)

    try:
        threading.Thread(target=run, name="lockkeeper-ask", daemon=True).start()
    except RuntimeError as error:
        raise UnreachableError(f"no thread can be started: {error}") from error
    return promise
