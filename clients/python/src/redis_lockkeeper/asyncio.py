"""A lock for asyncio: a drop-in for the asyncio Lock of redis-py and valkey-py.

It asks and waits in the event loop, on connections of that loop. Renewals and clean-up are done by the
same watchdog thread as for threads, so a blocked loop loses no lock, nor does one that has ended leave
one behind.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any, Callable, Optional, TypeVar, Union

from . import acquisition, lock, replies, watchdog
from .acquisition import Ask, Request, Step, Tenure, Wait
from .clock import now
from .connections import KEEP, ClusterPlace, Node, Place
from .errors import BROKEN, REPLIED, BusyError, InvalidError, RefusedError, UnreachableError, is_elsewhere
from .lease import LONGEST_ATTEMPT, SECOND, Answer, Lost
from .lock import NOBODY, Base, OutOfTime, commands_of, failed, is_lock_error, judged, out_of_time
from .replies import Command, Info, Key
from .watchdog import watchdog_of

__all__ = ["Lock", "close", "settled"]

logger = logging.getLogger("redis_lockkeeper")
_T = TypeVar("_T")


class Lock(Base):
    """A lock on a server with the Lockkeeper module: a drop-in for the asyncio Lock of redis-py and valkey-py, to be
    had by `client.lock("name", lock_class=Lock)` or `Lock(client, "name", …)`, and used by `async with`.

    It is renewed until it is released, so `timeout` is not how long it may be held (`max_hold` is), but how long
    it outlives a holder that is gone. See `redis_lockkeeper.Lock` for what it is made of; besides there is

    cancel_on_lost: cancels the body of an `async with` when the lock is lost, which then raises `LockLostError`,
        as `asyncio.timeout` does. From Python 3.11 on.
    """

    _asynchronous = True

    def _configure(self, *, cancel_on_lost: bool = False, **more: Any) -> None:
        if cancel_on_lost and sys.version_info < (3, 11):
            raise InvalidError("cancel_on_lost needs Python 3.11, whose tasks can tell who cancelled them")
        self.cancel_on_lost = cancel_on_lost
        super()._configure(**more)

    async def __aenter__(self) -> Lock:
        """Acquires it.

        Raises:
            BusyError: a LockError, if it was not to be had in time. The body does not run.
        """
        if not await self.acquire():
            raise BusyError("Unable to acquire lock within the time specified", self.name)
        task = asyncio.current_task()
        self._enter(task)
        tenure = self._entered[task][-1]
        if self.cancel_on_lost and task is not None:
            tenure.event = _CancellingEvent(tenure.event, task)
            if tenure.lost() is not None:
                tenure.event.set()
        return self

    async def __aexit__(
        self,
        exc_type: Optional[type[BaseException]],
        exc_value: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        """Releases it. The body's exception wins over the release's.

        Raises:
            LockLostError: if it was lost, unless `raise_on_release_error` is False.
            UnreachableError, RefusedError: if nobody answered within 5 s, or with an error.
        """
        tenure = self._leave(asyncio.current_task())
        ours = isinstance(tenure.event, _CancellingEvent) and tenure.event.uncancel()
        if ours and exc_type is asyncio.CancelledError:
            exc_type = None
        if tenure.concluded:
            return
        try:
            await self._release(tenure)
        except Exception as error:
            if exc_type is None and (ours or self.raise_on_release_error or not is_lock_error(error)):
                raise
            logger.warning("the lock %r was not released at the end of its block: %s", self.name, error)

    async def acquire(
        self,
        blocking: Optional[bool] = None,
        blocking_timeout: Optional[float] = None,
        token: Union[str, bytes, None] = None,
    ) -> bool:
        """True when the lock is held, False if it is busy: at once with `blocking=False`, else when it was not to
        be had within `blocking_timeout` seconds, 0.1 s later at most whatever the server does.

        Cancelled at any moment, it leaves neither a lock nor a place in the queue behind, or, while the server
        cannot be reached, none that outlives one timeout. For arguments and errors see `redis_lockkeeper.Lock`.
        """
        await self._learn()
        request = self._request(blocking, blocking_timeout, token)
        tenure = await _carry_out(request)
        if tenure is None:
            return False
        loop = asyncio.get_running_loop()
        # The watchdog must not keep the tenure alive.
        held, on_lost = weakref.ref(tenure), self.on_lost

        def tell(why: Lost) -> None:
            tenure = held()
            if tenure is not None:
                tenure.event.set()
            if on_lost is not None:
                on_lost(why)

        def lost(why: Lost) -> None:
            # A loop that has ended has nobody to be told.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(tell, why)

        self._hold(tenure, asyncio.Event(), lost)
        return True

    async def _learn(self) -> None:
        """The map of a cluster, if it is one."""
        if isinstance(self._place, ClusterPlace):
            self._place.loop = asyncio.get_running_loop()
            await self.redis.initialize()

    @property
    def lost(self) -> asyncio.Event:
        """Set when the lock that is held is lost. A loss by silence is told before the server can give the lock to
        another, or when the loop turns; a deletion or a takeover by force is learnt at the next renewal, a third of
        the timeout later at most.
        """
        tenure = self.local.tenure
        if tenure is None:
            return asyncio.Event()
        event: asyncio.Event = tenure.event
        if tenure.lost() is not None:
            event.set()
        return event

    async def release(self) -> None:
        """Releases the lock. Renewal stops first; cancelled at any moment, it is released in the background.

        Raises:
            LockLostError: a LockNotOwnedError, if it was lost before.
            NotHeldError: a LockError, if none is held.
            UnreachableError, RefusedError: if nobody answered within 5 s, or with an error; it is tried on in the
                background until the lock has ended by itself.
        """
        token = self.local.token
        if token is not None and self.local.tenure is None:
            self.local.token = None
            await self._as_another(replies.release(self.name, token))
        else:
            await self._release(self._held("release"))

    async def release_after(self, seconds: float) -> None:
        """As `release`, but the lock stays taken until so long after it was granted. It does not wait."""
        tenure = self._held("release")
        tenure.concluded = True
        await self._release(tenure, seconds)

    async def _release(self, tenure: Tenure, keep_for: float = 0) -> None:
        attempt = self._give_up(tenure, keep_for)
        answer, again = Answer.GONE, False
        if attempt is not None:
            (sent_at, command), until = attempt, now() + LONGEST_ATTEMPT
            answer = Answer.FAILED
            try:
                reply, again = await _ask(self._place, tenure.entry.key, Ask(command, until))
                answer = replies.read_answer(reply)
            except (RefusedError, UnreachableError):
                # The watchdog may have more luck, in what is left of the time.
                ended = asyncio.wrap_future(tenure.entry.answered(sent_at, answer))
                done, _ = await asyncio.wait({ended}, timeout=max(0, until - now()) / SECOND)
                if not done or tenure.entry.answer is answer:
                    raise
                answer = tenure.entry.answer
            except BaseException:
                tenure.entry.answered(sent_at, answer)
                raise
            else:
                tenure.entry.answered(sent_at, answer)
        self._given_up(tenure, answer, again)

    async def extend(self, additional_time: float, replace_ttl: bool = False) -> bool:
        """Adds seconds to what remains of the lock, or with `replace_ttl` makes it last for so long from now; this
        once: it is not renewed before its timeout is what remains.

        Raises: as `release`; and NotHeldError if the lock was made without a timeout, which is renewed anyway.
        """
        self._extendable("extend")
        tenure = self.local.tenure
        if tenure is None:
            left = 0 if replace_ttl else round(((await self.info() or NOBODY).ttl or 0) * SECOND)
            ttl = self._extension(additional_time, replace_ttl, left)
            return await self._as_another(replies.renew(self.name, self.local.token or b"", ttl))
        return await self._renew(tenure, self._extension(additional_time, replace_ttl, tenure.left()))

    async def reacquire(self) -> bool:
        """Makes the lock last for its timeout from now.

        Raises: as `extend`.
        """
        self._extendable("reacquire")
        tenure, ttl = self.local.tenure, self._terms().ttl
        if tenure is None:
            return await self._as_another(replies.renew(self.name, self.local.token or b"", ttl))
        return await self._renew(tenure, ttl)

    async def _renew(self, tenure: Tenure, ttl: int) -> bool:
        await asyncio.wrap_future(self._renewal(tenure, ttl))
        return True

    async def _as_another(self, command: Command) -> bool:
        return self._judge_another(await self._ask_server(command))

    async def _ask_server(self, command: Command) -> Any:
        await self._learn()
        return (await _ask(self._place, self.name, Ask(command, now() + LONGEST_ATTEMPT)))[0]

    async def info(self) -> Optional[Info]:
        """Who holds the lock and who waits for it, whoever that is; None if nobody does either."""
        return replies.read_info(await self._ask_server(replies.info(self.name)))

    async def locked(self) -> bool:
        """Whether anybody holds it."""
        return (await self.info() or NOBODY).owner is not None

    async def owned(self) -> bool:
        """Whether the server says that this lock object holds it. See `check` for what asks nobody."""
        return self._is_owner(await self.info())


class _CancellingEvent(asyncio.Event):
    """Cancels a task when it is set, and can tell afterwards that it was this one."""

    def __init__(self, told: asyncio.Event, task: asyncio.Task[Any]) -> None:
        super().__init__()
        self._told, self._task = told, task
        self._cancelling: int = task.cancelling()  # type: ignore[attr-defined,unused-ignore]
        self._left = False

    def set(self) -> None:
        self._told.set()
        if not self.is_set() and not self._left:
            self._task.cancel()
        super().set()

    def uncancel(self) -> bool:
        """The body has ended. Whether nobody else has cancelled it."""
        self._left = True
        if not self.is_set():
            return False
        return self._task.uncancel() <= self._cancelling  # type: ignore[attr-defined,no-any-return,unused-ignore]


class _Kept:
    """The connections of one node that are kept in one event loop."""

    def __init__(self) -> None:
        self._idle: deque[tuple[Any, int]] = deque()
        self._sweeping = False
        self._closer: Optional[AsyncGenerator[None, None]] = None

    @staticmethod
    async def of(node: Node) -> _Kept:
        loop = asyncio.get_running_loop()
        kept = _kept.setdefault(loop, {}).get(node)
        if kept is None:
            kept = _kept[loop][node] = _Kept()
            # An event loop that ends, ends its asynchronous generators, before it cannot close anything any more.
            kept._closer = kept._close_at_end()
            await kept._closer.__anext__()
        return kept

    async def _close_at_end(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self.close(now())
            self._closer = None
            _kept.pop(asyncio.get_running_loop(), None)

    def take(self) -> Any:
        while self._idle:
            connection, _ = self._idle.pop()
            if connection.is_connected and not connection._reader.at_eof():
                return connection
            drop(connection)
        return None

    def give(self, connection: Any) -> None:
        self._idle.append((connection, now()))
        if not self._sweeping:
            self._sweeping = True
            asyncio.get_running_loop().call_later(KEEP / SECOND, self._sweep)

    def _sweep(self) -> None:
        self.close(now() - KEEP)
        self._sweeping = bool(self._idle)
        if self._idle:
            asyncio.get_running_loop().call_later(KEEP / SECOND, self._sweep)

    def close(self, since: int) -> None:
        while self._idle and self._idle[0][1] <= since:
            drop(self._idle.popleft()[0])


#: By event loop.
_kept: weakref.WeakKeyDictionary[Any, dict[Node, _Kept]] = weakref.WeakKeyDictionary()


def drop(connection: Any) -> None:
    """Closes a connection without waiting for it."""
    writer = connection._writer
    connection._writer = connection._reader = None
    if writer is not None:
        with suppress(RuntimeError):
            writer.close()


def end(connection: Any, command: Command) -> Optional[socket.socket]:
    """Sends `command` behind what was sent and closes our half, without an await, which might be cancelled again.
    Returns the socket for the watchdog, which reads it to its end whatever becomes of the loop.
    """
    writer = connection._writer
    if writer is None:
        return None
    sock: Optional[socket.socket] = None
    try:
        writer.write(b"".join(connection.pack_command(*command)))
        sock = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))
        sock.shutdown(socket.SHUT_WR)
    except (OSError, RuntimeError):
        if sock is not None:
            sock.close()
            sock = None
    drop(connection)
    return sock


async def _within(until: int, work: Coroutine[Any, Any, _T]) -> _T:
    """Not `wait_for`, which loses cancellations before Python 3.12."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=max(0, until - now()) / SECOND)
    except BaseException:
        _forget(task)
        raise
    if task.done():
        return task.result()
    _forget(task)
    raise OutOfTime


def _forget(task: asyncio.Future[Any]) -> None:
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    task.cancel()


async def _dial(node: Node, until: int) -> Any:
    assert node.asynchronous is not None
    connection = node.asynchronous.connection(await _in_a_thread(node.address) if node.is_found else {})
    try:
        await _within(until, connection.connect())
    except OutOfTime:
        drop(connection)
        raise UnreachableError(f"{node} cannot be reached: no connection in time") from None
    except BaseException:
        drop(connection)
        raise
    node.reached = True
    return connection


def _send(connection: Any, commands: list[Command]) -> None:
    connection._writer.write(b"".join(connection.pack_commands(commands)))


async def _read(connection: Any) -> Any:
    """The next reply, errors included."""
    try:
        return await connection.read_response(disconnect_on_error=False)
    except REPLIED as error:
        return error


async def _ask(place: Place, key: Key, step: Ask) -> tuple[Any, bool]:
    """As `lock.ask`."""
    node, asking = place.route(key)
    kept, again = await _Kept.of(node), False
    connection = kept.take()
    used = sent = connection is not None
    try:
        while True:
            if connection is None:
                used, connection = False, await _dial(node, step.until)
            try:
                commands = commands_of(step, asking)
                sent = True
                _send(connection, commands)
                answers = [await _within(step.until, _read(connection)) for _ in commands]
                if not used or not any(is_elsewhere(answer) for answer in answers):
                    break
                drop(connection)
                connection = None
            except BROKEN:
                drop(connection)
                if not used:
                    raise
                connection, again = None, True
    except BROKEN as error:
        raise failed(place, key, node, error, sent=sent) from error
    except BaseException as error:
        if connection is not None:
            _give_up(node, connection, step.undo)
        if isinstance(error, OutOfTime):
            raise failed(place, key, node, out_of_time(node, released=step.undo is not None)) from None
        raise
    kept.give(connection)
    return judged(place, key, node, step, answers), again


def _give_up(node: Node, connection: Any, undo: Optional[Command]) -> None:
    if undo is None:
        drop(connection)
    else:
        watchdog_of(node).drain(end(connection, undo))


async def _wait(place: Place, key: Key, step: Wait) -> Any:
    """As `lock._wait`."""
    node, asking = place.route(key)
    kept = await _Kept.of(node)
    connection, reading = kept.take(), None
    try:
        connection = connection or await _dial(node, now() + LONGEST_ATTEMPT)
        _send(connection, commands_of(step, asking))
        if asking:
            await _read(connection)
        reading = asyncio.ensure_future(_read(connection))
        probe_at = now() + step.interval
        while not reading.done():
            until = probe_at if step.until is None else min(probe_at, step.until)
            await asyncio.wait({reading}, timeout=max(0, until - now()) / SECOND)
            at = now()
            if not reading.done() and step.until is not None and at >= step.until:
                raise OutOfTime
            if not reading.done() and at >= probe_at:
                try:
                    await _ask(place, key, lock.probe_of(step, at))
                    lock.check_route(place, key, node)
                except (RefusedError, UnreachableError):
                    # Unless it has answered meanwhile. The same owner, asking again, keeps its place.
                    if not reading.done():
                        drop(connection)
                        raise
                probe_at = now() + step.interval
        answer = reading.result()
    except BROKEN as error:
        if connection is not None:
            drop(connection)
        raise failed(place, key, node, error) from error
    except BaseException as error:
        if connection is not None:
            _give_up(node, connection, step.undo)
        if isinstance(error, OutOfTime):
            raise failed(place, key, node, out_of_time(node, released=True)) from None
        raise
    finally:
        if reading is not None and not reading.done():
            _forget(reading)
    kept.give(connection)
    return judged(place, key, node, step, [answer])


async def _carry_out(request: Request) -> Optional[Tenure]:
    steps = acquisition.acquisition(request)
    try:
        step: Step = next(steps)
        while True:
            try:
                result = await _perform(request, step)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as stop:
        tenure: Optional[Tenure] = stop.value
        return tenure


async def _perform(request: Request, step: Step) -> Any:
    if isinstance(step, Ask):
        return (await _ask(request.place, request.key, step))[0]
    if isinstance(step, Wait):
        return await _wait(request.place, request.key, step)
    await asyncio.sleep(max(0, step.until - now()) / SECOND)
    return None


async def settled(timeout: Optional[float] = None) -> bool:
    """As `redis_lockkeeper.settled`, without blocking the loop."""
    return await _in_a_thread(lambda: watchdog.settled(timeout))


async def close(timeout: Optional[float] = None) -> bool:
    """As `redis_lockkeeper.close`, for this loop's connections too."""
    for kept in _kept.get(asyncio.get_running_loop(), {}).values():
        kept.close(now())
    return await _in_a_thread(lambda: watchdog.close(timeout))


async def _in_a_thread(work: Callable[[], _T]) -> _T:
    """Not in an executor, whose threads stay."""
    future: Future[_T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="lockkeeper-ask", daemon=True).start()
    return await asyncio.wrap_future(future)
