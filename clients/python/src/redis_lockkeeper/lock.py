"""A lock for threads: a drop-in for the Lock of redis-py and valkey-py."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Hashable
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any, Callable, ClassVar, Optional, TypeVar, Union

from . import acquisition, replies
from .acquisition import Ask, Request, Step, Tenure, Wait
from .clock import now
from .connections import Place, end, place_of, read, send
from .errors import (
    BROKEN,
    REPLIED,
    BusyError,
    ForkedError,
    LockLostError,
    NotHeldError,
    RefusedError,
    UnreachableError,
    is_elsewhere,
)
from .lease import FURTHEST, LONGEST_ATTEMPT, SECOND, Answer, Lost, Terms
from .replies import Command, Info, Key
from .watchdog import watchdog_of

logger = logging.getLogger("redis_lockkeeper")

#: Without a timeout: long enough to ride out a failover or a restart, short enough to wait for after a crash.
DEFAULT_TIMEOUT = 30

#: In seconds. An exception that is thrown into a thread arrives only between two reads.
TICK = 0.2

_Self = TypeVar("_Self", bound="Base")


class _Local:
    """What a lock object holds now; of each thread its own, if `thread_local`."""

    tenure: Optional[Tenure] = None
    _token: Optional[bytes] = None

    @property
    def token(self) -> Optional[bytes]:
        """The value of the key while it is ours. May be set, to release or extend what another process holds."""
        return self.tenure.token if self.tenure is not None else self._token

    @token.setter
    def token(self, token: Union[bytes, str, None]) -> None:
        self.tenure = None
        self._token = token.encode() if isinstance(token, str) else token


class _ThreadLocal(_Local, threading.local):
    pass


class Base:
    """What the locks for threads and for asyncio have in common: everything that asks nobody."""

    _asynchronous: ClassVar[bool]
    _having: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        redis: Any,
        name: Key,
        timeout: Optional[float] = None,
        sleep: float = 0.1,
        blocking: bool = True,
        blocking_timeout: Optional[float] = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,
        **more: Any,
    ) -> None:
        """A lock `name` on the server of the client `redis`, of redis-py or valkey-py. Nothing is asked yet.

        Args:
            redis: the client. Its settings are used, not its connections.
            name: the key.
            timeout: for how many seconds the lock outlives a holder that is gone, by default 30. A living
                holder renews it every third of that, for as long as it wants.
            sleep: ignored. The server wakes up who waits.
            blocking: whether `acquire` waits, in the server's queue, first come, first served.
            blocking_timeout: for how many seconds; None waits without bound.
            thread_local: whether a thread sees only what it acquired itself.
            raise_on_release_error: whether the end of a `with` raises `LockLostError` if the lock was lost.
            renew: False ends the lock after `timeout`, whatever became of its holder.
            max_hold: ends renewal so many seconds after the grant; then the lock counts as lost.
            on_lost: called with a `Lost` when the lock is lost, in a thread of its own (in the event loop, with
                asyncio).
            label: the first part of every owner, by default `host:pid`.
            min_replicas: counts only what so many replicas have acknowledged.

        Raises:
            InvalidError: if the client is of a kind that we do not know, or a time makes no sense.
        """
        self._found = place_of(redis, asynchronous=self._asynchronous), os.getpid()
        self.redis = self.valkey = redis
        self.name, self.timeout, self.sleep = name, timeout, sleep
        self.blocking, self.blocking_timeout = blocking, blocking_timeout
        self.thread_local = bool(thread_local)
        self.raise_on_release_error = raise_on_release_error
        self._configure(**{**self._having, **more})
        self._terms()
        self.local: _Local = _ThreadLocal() if self.thread_local else _Local()
        #: What each thread or task has entered by `with`, and not left yet.
        self._entered: dict[Hashable, list[Tenure]] = {}

    def _configure(
        self,
        *,
        renew: bool = True,
        max_hold: Optional[float] = None,
        on_lost: Optional[Callable[[Lost], Any]] = None,
        label: Union[str, bytes, None] = None,
        min_replicas: int = 0,
    ) -> None:
        self.renew, self.max_hold, self.on_lost = renew, max_hold, on_lost
        self.label, self.min_replicas = label, min_replicas

    @classmethod
    def having(cls: type[_Self], **settings: Any) -> type[_Self]:
        """The same kind of lock with other defaults, for `client.lock(…, lock_class=Lock.having(renew=False))`,
        which takes no settings of ours.
        """
        return type(cls.__name__, (cls,), {"_having": {**cls._having, **settings}, "__doc__": cls.__doc__})

    def __reduce__(self) -> Any:
        raise TypeError(f"a lock cannot be pickled: pass its name, {self.name!r}, and make one where it is used")

    @property
    def _place(self) -> Place:
        """A forked child makes its own connections."""
        if self._found[1] != os.getpid():
            self._found = place_of(self.redis, asynchronous=self._asynchronous), os.getpid()
        return self._found[0]

    def _terms(self) -> Terms:
        return acquisition.terms(self.timeout or DEFAULT_TIMEOUT, self.max_hold, self.renew)

    def _request(
        self, blocking: Optional[bool], blocking_timeout: Optional[float], token: Union[str, bytes, None]
    ) -> Request:
        label = token if token is not None else self.label
        if label is None:
            label = f"{socket.gethostname()}:{os.getpid()}"
        label = label.encode() if isinstance(label, str) else bytes(label)
        acquisition.check_label(label)
        wait: Optional[int] = 0
        if self.blocking if blocking is None else blocking:
            limit = self.blocking_timeout if blocking_timeout is None else blocking_timeout
            wait = None if limit is None else max(0, acquisition.micros(limit, "blocking_timeout"))
        name = bytes(self.name) if isinstance(self.name, memoryview) else self.name
        watchdog_of(self._place.route(name)[0]).start()
        return Request(self._place, name, label, self._terms(), wait, self.min_replicas)

    def _hold(self, tenure: Tenure, event: Any, on_lost: Callable[[Lost], None]) -> None:
        """Whose exception is thrown meanwhile drops the tenure, which releases it."""
        tenure.event, tenure.entry.on_lost = event, on_lost
        tenure.entry.keep()
        logger.debug("acquired %r as %r, fence %d", tenure.entry.key, tenure.owner, tenure.fence)
        self.local.tenure = tenure

    def _held(self, what: str) -> Tenure:
        tenure = self.local.tenure
        if tenure is None:
            raise NotHeldError(f"Cannot {what} a lock that's not owned or is already unlocked.", self.name)
        return tenure

    def _enter(self, who: Hashable) -> None:
        self._entered.setdefault(who, []).append(self._held("enter"))

    def _leave(self, who: Hashable) -> Tenure:
        """What this thread or task has entered last: a `with` releases its own, whatever the lock holds now."""
        tenures = self._entered.get(who) or next(iter(self._entered.values()))
        tenure = tenures.pop()
        for each in [each for each, left in self._entered.items() if not left]:
            del self._entered[each]
        return tenure

    def _give_up(self, tenure: Tenure, keep_for: float = 0) -> Optional[tuple[int, Command]]:
        entry = tenure.entry
        if entry.pid != os.getpid():
            raise ForkedError("the lock is that of the process from which this one was forked", self.name)
        if self.local.tenure is tenure:
            self.local.tenure = None
        if entry.lease.given_up:
            raise NotHeldError("Cannot release a lock that's not owned or is already unlocked.", self.name)
        keep = min(acquisition.micros(keep_for, "the time to keep it"), FURTHEST)
        return entry.give_up(entry.granted_at + keep)

    def _given_up(self, tenure: Tenure, answer: Answer, again: bool = False) -> None:
        lost = tenure.outcome(answer, again)
        logger.debug("released %r of %r: %s", self.name, tenure.owner, lost or "yes")
        if lost is not None:
            raise LockLostError(lost, self.name)

    def _extension(self, additional_time: float, replace_ttl: bool, left: int) -> int:
        extension = acquisition.micros(additional_time, "additional_time")
        return extension if replace_ttl else extension + max(0, left)

    def _extendable(self, what: str) -> None:
        if self.local.token is None:
            raise NotHeldError(f"Cannot {what} an unlocked lock", self.name)
        if self.timeout is None:
            raise NotHeldError(f"Cannot {what} a lock with no timeout", self.name)

    def _renewal(self, tenure: Tenure, ttl: int) -> Future[None]:
        if tenure.entry.pid != os.getpid():
            raise ForkedError("the lock is that of the process from which this one was forked", self.name)
        return tenure.entry.renew(ttl)

    def _judge_another(self, reply: Any) -> bool:
        """What was answered for a token that was acquired elsewhere."""
        answer = replies.read_answer(reply)
        if answer is not Answer.YES:
            raise LockLostError(Lost.TAKEN if answer is Answer.TAKEN else Lost.GONE, self.name)
        return True

    def _is_owner(self, info: Optional[Info]) -> bool:
        token, tenure = self.local.token, self.local.tenure
        if token is None or info is None or info.owner is None or (tenure and tenure.entry.pid != os.getpid()):
            return False
        return info.owner in (token, token.partition(b":")[2])

    @property
    def fence(self) -> Optional[int]:
        """A number that grows with every grant of this key, None while nothing is held. A storage that refuses a
        smaller one than it has seen is safe even from a holder that was paused past its timeout.
        """
        tenure = self.local.tenure
        return None if tenure is None else tenure.fence

    @property
    def owner(self) -> Optional[str]:
        """The name under which the lock is held, `<label>:<uuid>`, no other ever has it; None while nothing is."""
        tenure = self.local.tenure
        return None if tenure is None else tenure.owner.decode(errors="surrogateescape")

    def remaining(self) -> float:
        """For how many seconds from now nobody else can hold the lock; 0 if it is lost or not held. Computed from
        a clock that runs through suspend, without asking anybody, and on the safe side: counted from before the
        last acknowledged request was sent, less 1 % and 2 ms.
        """
        tenure = self.local.tenure
        return 0.0 if tenure is None else tenure.remaining()

    def check(self) -> int:
        """The fence of the lock that is held. Asks nobody.

        Raises:
            LockLostError: if it was lost.
            NotHeldError: if none is held.
        """
        tenure = self._held("check")
        lost = tenure.lost()
        if lost is not None:
            raise LockLostError(lost, self.name)
        return tenure.fence

    def leave(self) -> None:
        """Stops renewing, and lets the lock lapse by itself."""
        tenure = self._held("leave")
        self.local.tenure = None
        tenure.concluded = True
        if tenure.entry.pid == os.getpid():
            tenure.entry.leave()


class Lock(Base):
    """A lock on a server with the Lockkeeper module: a drop-in for the Lock of redis-py and valkey-py, to be had by
    `client.lock("name", lock_class=Lock)` or `Lock(client, "name", …)`, and used by `with`.

    It is renewed until it is released, so `timeout` is not how long it may be held (`max_hold` is), but how long
    it outlives a holder that is gone. One object may be shared by threads, each of which holds its own.
    """

    _asynchronous = False

    def __enter__(self) -> Lock:
        """Acquires it.

        Raises:
            BusyError: a LockError, if it was not to be had in time. The body does not run.
        """
        if not self.acquire():
            raise BusyError("Unable to acquire lock within the time specified", self.name)
        self._enter(threading.get_ident())
        return self

    def __exit__(
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
        tenure = self._leave(threading.get_ident())
        if tenure.concluded:
            return
        try:
            self._release(tenure)
        except Exception as error:
            if exc_type is None and (self.raise_on_release_error or not is_lock_error(error)):
                raise
            logger.warning("the lock %r was not released at the end of its block: %s", self.name, error)

    def acquire(
        self,
        sleep: Optional[float] = None,
        blocking: Optional[bool] = None,
        blocking_timeout: Optional[float] = None,
        token: Union[str, bytes, None] = None,
    ) -> bool:
        """True when the lock is held, False if it is busy: at once with `blocking=False`, else when it was not to
        be had within `blocking_timeout` seconds, 0.1 s later at most whatever the server does.

        Interrupted by an exception at any moment (KeyboardInterrupt, a soft time limit), it leaves neither a lock
        nor a place in the queue behind, or, while the server cannot be reached, none that outlives one timeout.

        Args:
            sleep: ignored.
            blocking: instead of the lock's own.
            blocking_timeout: instead of the lock's own.
            token: a label for this owner. It need not be unique.

        Raises:
            UnreachableError: a ConnectionError, if nobody answered.
            RefusedError: a ResponseError, if the server does not want to; `ModuleMissingError` if it has no Lockkeeper.
            InvalidError: if a time or the token cannot be used; nothing was sent.
        """
        request = self._request(blocking, blocking_timeout, token)
        tenure = _carry_out(request)
        if tenure is None:
            return False
        event, on_lost = threading.Event(), self.on_lost

        def lost(why: Lost) -> None:
            event.set()
            if on_lost is not None:
                _in_a_thread(on_lost, why)

        self._hold(tenure, event, lost)
        return True

    @property
    def lost(self) -> threading.Event:
        """Set when the lock that is held is lost. A loss by silence is told before the server can give the lock to
        another; a deletion or a takeover by force is learnt at the next renewal, a third of the timeout later at
        most.
        """
        tenure = self.local.tenure
        if tenure is None:
            return threading.Event()
        event: threading.Event = tenure.event
        if tenure.lost() is not None:
            event.set()
        return event

    def release(self) -> None:
        """Releases the lock. Renewal stops first.

        Raises:
            LockLostError: a LockNotOwnedError, if it was lost before.
            NotHeldError: a LockError, if none is held.
            UnreachableError, RefusedError: if nobody answered within 5 s, or with an error; it is tried on in the
                background until the lock has ended by itself.
        """
        token = self.local.token
        if token is not None and self.local.tenure is None:
            self.local.token = None
            self._as_another(replies.release(self.name, token))
        else:
            self._release(self._held("release"))

    def release_after(self, seconds: float) -> None:
        """As `release`, but the lock stays taken until so long after it was granted. It does not wait. For a job
        that runs at the same minute on several machines and is done sooner than their clocks differ.
        """
        tenure = self._held("release")
        tenure.concluded = True
        self._release(tenure, seconds)

    def _release(self, tenure: Tenure, keep_for: float = 0) -> None:
        attempt = self._give_up(tenure, keep_for)
        answer, again = Answer.GONE, False
        if attempt is not None:
            (sent_at, command), until = attempt, now() + LONGEST_ATTEMPT
            answer = Answer.FAILED
            try:
                reply, again = ask(self._place, tenure.entry.key, Ask(command, until))
                answer = replies.read_answer(reply)
            except (RefusedError, UnreachableError):
                # The watchdog may have more luck, in what is left of the time.
                ended = tenure.entry.answered(sent_at, answer)
                if not wait({ended}, max(0, until - now()) / SECOND).done or tenure.entry.answer is answer:
                    raise
                answer = tenure.entry.answer
            except BaseException:
                tenure.entry.answered(sent_at, answer)
                raise
            else:
                tenure.entry.answered(sent_at, answer)
        self._given_up(tenure, answer, again)

    def extend(self, additional_time: float, replace_ttl: bool = False) -> bool:
        """Adds seconds to what remains of the lock, or with `replace_ttl` makes it last for so long from now; this
        once: it is not renewed before its timeout is what remains.

        Raises: as `release`; and NotHeldError if the lock was made without a timeout, which is renewed anyway.
        """
        self._extendable("extend")
        tenure = self.local.tenure
        if tenure is None:
            left = 0 if replace_ttl else round(((self.info() or NOBODY).ttl or 0) * SECOND)
            ttl = self._extension(additional_time, replace_ttl, left)
            return self._as_another(replies.renew(self.name, self.local.token or b"", ttl))
        return self._renew(tenure, self._extension(additional_time, replace_ttl, tenure.left()))

    def reacquire(self) -> bool:
        """Makes the lock last for its timeout from now.

        Raises: as `extend`.
        """
        self._extendable("reacquire")
        tenure = self.local.tenure
        if tenure is None:
            return self._as_another(replies.renew(self.name, self.local.token or b"", self._terms().ttl))
        return self._renew(tenure, self._terms().ttl)

    def _renew(self, tenure: Tenure, ttl: int) -> bool:
        self._renewal(tenure, ttl).result()
        return True

    def _as_another(self, command: Command) -> bool:
        """For a token that was acquired elsewhere."""
        return self._judge_another(self._ask_server(command))

    def _ask_server(self, command: Command) -> Any:
        return ask(self._place, self.name, Ask(command, now() + LONGEST_ATTEMPT))[0]

    def info(self) -> Optional[Info]:
        """Who holds the lock and who waits for it, whoever that is; None if nobody does either."""
        return replies.read_info(self._ask_server(replies.info(self.name)))

    def locked(self) -> bool:
        """Whether anybody holds it."""
        return (self.info() or NOBODY).owner is not None

    def owned(self) -> bool:
        """Whether the server says that this lock object holds it. See `check` for what asks nobody."""
        return self._is_owner(self.info())


NOBODY = Info(None, None, None, None, 0, [])


def is_lock_error(error: Exception) -> bool:
    return isinstance(error, (LockLostError, NotHeldError, ForkedError))


def _in_a_thread(call: Callable[[Lost], Any], lost: Lost) -> None:
    """The watchdog has other locks to keep."""
    try:
        threading.Thread(target=call, args=(lost,), name="lockkeeper-lost", daemon=True).start()
    except RuntimeError:
        logger.warning("the interpreter is shutting down: nobody is told that the lock is lost")


def _carry_out(request: Request) -> Optional[Tenure]:
    steps = acquisition.acquisition(request)
    try:
        step: Step = next(steps)
        while True:
            try:
                result = _perform(request, step)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as stop:
        tenure: Optional[Tenure] = stop.value
        return tenure


def _perform(request: Request, step: Step) -> Any:
    if isinstance(step, Ask):
        return ask(request.place, request.key, step)[0]
    if isinstance(step, Wait):
        return _wait(request.place, request.key, step)
    time.sleep(max(0, step.until - now()) / SECOND)
    return None


class OutOfTime(Exception):
    """Nobody answered: what was asked is under way."""


def _receive(connection: Any, until: int) -> Any:
    """The next reply, errors included."""
    while not connection.can_read(min(TICK, max(0, until - now()) / SECOND)):
        if now() >= until:
            raise OutOfTime
    try:
        return read(connection)
    except REPLIED as error:
        return error


def ask(place: Place, key: Key, step: Ask) -> tuple[Any, bool]:
    """Sends a command and reads its reply. Returns whether it may have been carried out before, too: it was sent again
    after a kept connection turned out to be dead.

    Raises:
        UnreachableError, RefusedError
    """
    node, asking = place.route(key)
    connection, again = node.take_idle(), False
    used = sent = connection is not None
    try:
        while True:
            if connection is None:
                used, connection = False, node.dial((step.until - now()) / SECOND)
            try:
                sent = True
                send(connection, *commands_of(step, asking))
                answers = [_receive(connection, step.until) for _ in commands_of(step, asking)]
                if not used or not any(is_elsewhere(answer) for answer in answers):
                    break
                connection.disconnect()
                connection = None
            except BROKEN:
                connection.disconnect()
                if not used:
                    raise
                connection, again = None, True
    except BROKEN as error:
        raise failed(place, key, node, error, sent=sent) from error
    except BaseException as error:
        if connection is not None:
            if step.undo is None:
                connection.disconnect()
            else:
                watchdog_of(node).drain(end(connection, step.undo))
        if isinstance(error, OutOfTime):
            raise failed(place, key, node, out_of_time(node, released=step.undo is not None)) from None
        raise
    node.give(connection)
    return judged(place, key, node, step, answers), again


def commands_of(step: Union[Ask, Wait], asking: bool) -> list[Command]:
    commands: list[Command] = [("ASKING",)] if asking else []
    commands.append(step.command)
    if isinstance(step, Ask) and step.min_replicas:
        commands.append(replies.replicas(step.min_replicas, step.until - now()))
    return commands


def judged(place: Place, key: Key, node: Any, step: Union[Ask, Wait], answers: list[Any]) -> Any:
    """The reply that counts, or the error."""
    replicas = isinstance(step, Ask) and step.min_replicas
    reply = answers[-2] if replicas else answers[-1]
    if isinstance(reply, Exception):
        raise failed(place, key, node, reply)
    if replicas and reply is not None and not (isinstance(answers[-1], int) and answers[-1] >= replicas):
        raise RefusedError(f"NOREPLICAS {answers[-1]} acknowledged, {replicas} are needed")
    return reply


def probe_of(step: Wait, at: int) -> Ask:
    """The question whether who is to wake us up is still there."""
    limit = at + min(step.interval, LONGEST_ATTEMPT)
    return Ask(step.probe, limit if step.until is None else min(limit, step.until))


def check_route(place: Place, key: Key, node: Any) -> None:
    if place.route(key)[0] is not node:
        raise UnreachableError(f"{node} does not answer for the key any more")


def out_of_time(node: Any, *, released: bool) -> UnreachableError:
    error = UnreachableError(f"{node} did not answer in time")
    error.released = released
    return error


def failed(
    place: Place, key: Key, node: Any, error: BaseException, *, sent: bool = True
) -> Union[RefusedError, UnreachableError]:
    """The error to be raised, after the place has heard of it."""
    ours = replies.translated(error, str(node))
    if isinstance(ours, UnreachableError):
        ours.passing, ours.sent = node.reached, sent
    place.failed(key, node, ours)
    return ours


def _wait(place: Place, key: Key, step: Wait) -> Any:
    node, asking = place.route(key)
    connection: Any = None
    try:
        connection = node.take_idle() or node.dial()
        send(connection, *commands_of(step, asking))
        if asking:
            read(connection)
        probe_at = now() + step.interval
        while True:
            at = now()
            until = min(at + round(TICK * SECOND), probe_at)
            if step.until is not None:
                until = min(until, step.until)
            if connection.can_read(max(0, until - at) / SECOND):
                break
            at = now()
            if step.until is not None and at >= step.until:
                raise OutOfTime
            if at >= probe_at:
                try:
                    ask(place, key, probe_of(step, at))
                    check_route(place, key, node)
                except (RefusedError, UnreachableError):
                    # Unless it has answered meanwhile. The same owner, asking again, keeps its place.
                    if not connection.can_read(0):
                        connection.disconnect()
                        raise
                probe_at = now() + step.interval
        answer = _receive(connection, now() + LONGEST_ATTEMPT)
    except BROKEN as error:
        if connection is not None:
            connection.disconnect()
        raise failed(place, key, node, error) from error
    except BaseException as error:
        if connection is not None:
            watchdog_of(node).drain(end(connection, step.undo))
        if isinstance(error, OutOfTime):
            raise failed(place, key, node, out_of_time(node, released=True)) from None
        raise
    node.give(connection)
    return judged(place, key, node, step, [answer])
