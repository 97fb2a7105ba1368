"""A lock for threads, a drop-in for the Lock of redis-py and valkey-py, and what it shares with the one for asyncio."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Hashable
from types import TracebackType
from typing import Any, Callable, ClassVar, Optional, TypeVar, Union

from . import replies
from .acquisition import FIRST_BACK_OFF, MAX_LABEL, Tenure, acquisition, micros, terms_of
from .clock import now
from .connections import Place, place_of
from .errors import (
    BusyError,
    ForkedError,
    InvalidError,
    LockLostError,
    NotHeldError,
    RefusedError,
    UnreachableError,
)
from .exchange import BackOff, Dial, Outcome, Reply, Steps, ask
from .lease import FURTHEST, LONGEST_ATTEMPT, SECOND, Answer, Lost, Terms
from .promise import Promise
from .replies import EXCLUSIVE, SHARED, Command, Holder, Info, Key

logger = logging.getLogger("redis_lockkeeper")

#: Without a timeout: long enough to ride out a failover or a restart, short enough to wait for after a crash.
DEFAULT_TIMEOUT = 30

#: In seconds. An exception that is thrown into a thread arrives only between two reads.
TICK = 0.2

_T = TypeVar("_T")
_Self = TypeVar("_Self", bound="Base")


class _Local:
    """What a lock object holds now; of each thread its own, if `thread_local`. Where it may be held by several, that
    is as often as it was acquired: of the threads or tasks that share it, each has what it acquired itself.
    """

    _token: Optional[bytes] = None

    def __init__(self, who: Callable[[], Hashable]) -> None:
        self._who = who
        #: In the order of their grants. A dict, in which other threads may put and take meanwhile: `list` copies it in
        #: one step, while `tuple` may let the collector of garbage, and so other threads, in between.
        self.tenures: dict[Tenure, None] = {}

    @property
    def tenure(self) -> Optional[Tenure]:
        """The latest of this thread or task, else of any: what one has acquired, another may release."""
        tenures = list(self.tenures)
        if len(tenures) > 1:
            who = self._who()
            tenures.sort(key=lambda each: (not each.entry.lease.given_up, each.who == who))
        # What was left by another, as a generator is that is closed elsewhere, is here still.
        return tenures[-1] if tenures and not tenures[-1].entry.lease.given_up else None

    def make_room(self, tenure: Tenure) -> None:
        """For one more of this thread or task. Who is granted it alone has nothing left of before, even if nobody has
        told yet. What others have lost is kept until they release it, or they would release another's then.
        """
        if not self.tenures:
            return
        alone = tenure.entry.limit == EXCLUSIVE
        for each in list(self.tenures):
            over = alone or each.entry.lease.given_up or each.lost() is not None
            if over and (each.who == tenure.who or each.is_nobodys()):
                self.tenures.pop(each, None)

    @property
    def token(self) -> Optional[bytes]:
        """The value of the key while it is ours, the owner if others may hold it, too. May be set, to release or extend
        what another process holds.
        """
        tenure = self.tenure
        return tenure.token if tenure is not None else self._token

    @token.setter
    def token(self, token: Union[bytes, str, None]) -> None:
        self.tenures.clear()
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
            on_lost: called with a `Lost` when the lock is lost, in a thread of its own, for which the end of the
                program does not wait; with asyncio in the event loop.
            label: the first part of every owner, by default `host:pid`.
            min_replicas: counts only what so many replicas have acknowledged.
            limit: how many may hold it, this one included, by default one. Where holders differ, the strictest counts.
            shared: instead of a limit, as many as the server takes, 1000, as long as none of them wants to be alone.

        Raises:
            InvalidError: if the client is of a kind that we do not know, or a time or the limit makes no sense.
        """
        self._found = place_of(redis, asynchronous=self._asynchronous), os.getpid()
        self.redis = self.valkey = redis
        self.name, self.timeout, self.sleep = name, timeout, sleep
        self.blocking, self.blocking_timeout = blocking, blocking_timeout
        self.thread_local = bool(thread_local)
        self.raise_on_release_error = raise_on_release_error
        self._configure(**{**self._having, **more})
        self._terms()
        self.local: _Local = (_ThreadLocal if self.thread_local else _Local)(self._who)
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
        limit: Optional[int] = None,
        shared: bool = False,
    ) -> None:
        if shared and limit is not None:
            raise InvalidError("limit and shared are both given, give one")
        self.limit = SHARED if shared else EXCLUSIVE if limit is None else limit
        if type(self.limit) is not int or not EXCLUSIVE <= self.limit <= SHARED:
            raise InvalidError(f"limit must be a whole number from {EXCLUSIVE} to {SHARED}, got {limit!r}")
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

    @staticmethod
    def _who() -> Hashable:
        """This thread or task, without keeping it alive."""
        raise NotImplementedError

    def _terms(self) -> Terms:
        return terms_of(self.timeout or DEFAULT_TIMEOUT, self.max_hold, self.renew)

    def _listener(self, tenure: Tenure) -> Callable[[Lost], None]:
        """What the watchdog is to call at a loss. It must not keep the tenure alive."""
        raise NotImplementedError

    def _acquiring(
        self, blocking: Optional[bool], blocking_timeout: Optional[float], token: Union[str, bytes, None]
    ) -> Steps[Optional[Tenure]]:
        label = token if token is not None else self.label
        if label is None:
            label = f"{socket.gethostname()}:{os.getpid()}"
        label = label.encode() if isinstance(label, str) else bytes(label)
        if len(label) > MAX_LABEL:
            raise InvalidError(f"the label must not be longer than {MAX_LABEL} bytes, got {len(label)}")
        patience: Optional[int] = 0
        if self.blocking if blocking is None else blocking:
            limit = self.blocking_timeout if blocking_timeout is None else blocking_timeout
            patience = None if limit in (None, math.inf) else max(0, micros(limit, "blocking_timeout"))
        name = bytes(self.name) if isinstance(self.name, memoryview) else self.name
        tenure = yield from acquisition(
            self._place, name, label, self._terms(), patience, self.min_replicas, self.limit
        )
        if tenure is not None:
            tenure.entry.on_lost = self._listener(tenure)
            tenure.entry.keep()
            tenure.who = self._who()
            self.local.make_room(tenure)
            logger.debug("acquired %r as %r, fence %d", name, tenure.owner, tenure.fence)
        return tenure

    def _acquired(self, tenure: Optional[Tenure]) -> bool:
        """The last step of `acquire`: who is interrupted before it drops the tenure, which releases it."""
        if tenure is None:
            return False
        self.local.tenures[tenure] = None
        return True

    def _held(self, what: str) -> Tenure:
        tenure = self.local.tenure
        if tenure is None:
            raise NotHeldError(f"Cannot {what} a lock that's not owned or is already unlocked.", self.name)
        return tenure

    def _entering(self, tenure: Optional[Tenure]) -> None:
        """The last step of `with`, as `_acquired`."""
        if tenure is None:
            raise BusyError("Unable to acquire lock within the time specified", self.name)
        entered, tenures = [*self._entered.get(tenure.who, ()), tenure], self.local.tenures
        self._entered[tenure.who], tenures[tenure] = entered, None

    def _leaving(self, *, failed: bool, always: bool = False) -> Steps[None]:
        """Releases what this thread or task has entered last, whatever the lock holds now. The body's exception wins
        over the release's. A loss is raised if the lock was told so, or `always`.
        """
        who = self._who()
        # It may be left by another than has entered it, as a generator is that is closed elsewhere.
        who = who if who in self._entered else next(iter(self._entered))
        # An exception may be thrown anywhere: what is kept by neither is released when this frame drops it. Not by
        # `pop`, since a call is where one is thrown.
        last, tenures = self._entered[who][-1], self.local.tenures
        try:
            del tenures[last]
        except KeyError:
            # Another has entered or released it.
            pass
        tenure = self._entered[who].pop()
        if not self._entered[who]:
            del self._entered[who]
        if tenure.concluded:
            return
        try:
            yield from self._releasing(tenure)
        except Exception as error:
            lost = isinstance(error, (LockLostError, NotHeldError, ForkedError))
            if not failed and (always or self.raise_on_release_error or not lost):
                raise
            logger.warning("the lock %r was not released at the end of its block: %s", self.name, error)

    def _ours(self, tenure: Tenure) -> None:
        if tenure.entry.pid != os.getpid():
            raise ForkedError("the lock is that of the process from which this one was forked", self.name)

    def _releasing(self, tenure: Optional[Tenure] = None, keep_for: float = 0) -> Steps[None]:
        if tenure is None:
            tenure = self.local.tenure
        if tenure is None:
            token = self.local.token
            if token is not None:
                self.local.token = None
                yield from self._as_another(replies.release(self.name, token))
                return
            tenure = self._held("release")
        self._ours(tenure)
        self.local.tenures.pop(tenure, None)
        entry, until = tenure.entry, now() + LONGEST_ATTEMPT
        for wish in entry.asked_for():
            # Overtaken by the release, it would be granted the lock anew.
            yield Outcome(wish.promise, until)
        if entry.lease.given_up:
            raise NotHeldError("Cannot release a lock that's not owned or is already unlocked.", self.name)
        keep = min(micros(keep_for, "the time to keep it"), FURTHEST)
        attempt = entry.give_up(entry.granted_at + keep)
        answer, again = Answer.GONE, False
        if attempt is not None:
            sent_at, command = attempt
            answer, failure = Answer.FAILED, None
            try:
                reply, again = yield from ask(self._place, entry.key, command, until)
                answer = replies.read_answer(reply)
            except (RefusedError, UnreachableError) as error:
                failure = error
            finally:
                ended = entry.answered(sent_at, answer)
            if failure is not None and ended is not None:
                # The watchdog may have more luck, in what is left of the time.
                if not (yield Outcome(ended, until)) or entry.answer is Answer.FAILED:
                    raise failure
                answer = entry.answer
        lost = tenure.outcome(answer, again)
        logger.debug("released %r of %r: %s", self.name, tenure.owner, lost or "yes")
        if lost is not None:
            raise LockLostError(lost, self.name)

    def _keeping(self, seconds: float) -> Steps[None]:
        tenure = self._held("release")
        tenure.concluded = True
        yield from self._releasing(tenure, seconds)

    def _extending(self, what: str, additional_time: Optional[float], replace_ttl: bool) -> Steps[bool]:
        token, tenure = self.local.token, self.local.tenure
        if token is None:
            raise NotHeldError(f"Cannot {what} an unlocked lock", self.name)
        if self.timeout is None:
            raise NotHeldError(f"Cannot {what} a lock with no timeout", self.name)
        ttl = micros(additional_time, "additional_time")
        if tenure is not None:
            ttl = ttl if replace_ttl else ttl + max(0, tenure.left())
            terms_of(ttl / SECOND, None, True)
            yield from _result(self._renewal(tenure, ttl))
            return True
        if not replace_ttl:
            info = yield from self._asking_for_info()
            held = self._holder(info) or info
            ttl += round((held.ttl if held and held.ttl else 0) * SECOND)
        yield from self._as_another(replies.renew(self.name, token, ttl))
        return True

    def _regranting(self, what: str, limit: int) -> Steps[bool]:
        tenure = self._held(what)
        entry, terms, tries = tenure.entry, tenure.entry.lease.terms, 0
        until = now() + 2 * terms.attempt
        while True:
            tries += 1
            try:
                # Else what is gone would be granted anew, as if nobody had been in between.
                yield from _result(self._renewal(tenure, max(terms.ttl, tenure.left())), until)
                granted = yield from _result(entry.regrant(limit), until)
                lost = tenure.lost()
                if lost is not None:
                    raise LockLostError(lost, self.name)
                # Nobody can forbid to share what is held: it is lost, as the next renewal tells.
                if granted or limit == EXCLUSIVE:
                    return granted
            except (RefusedError, UnreachableError) as error:
                if not error.passing or now() >= until:
                    raise
            yield BackOff(now() + terms.back_off(tries, FIRST_BACK_OFF))

    def _renewal(self, tenure: Tenure, ttl: int) -> Promise[None]:
        self._ours(tenure)
        return tenure.entry.renew(ttl)

    def _as_another(self, command: Command) -> Steps[None]:
        """For a token that was acquired elsewhere."""
        reply, _ = yield from ask(self._place, self.name, command, now() + LONGEST_ATTEMPT)
        answer = replies.read_answer(reply)
        if answer is not Answer.YES:
            raise LockLostError(Lost.TAKEN if answer is Answer.TAKEN else Lost.GONE, self.name)

    def _asking_for_info(self) -> Steps[Optional[Info]]:
        reply, _ = yield from ask(self._place, self.name, replies.info(self.name), now() + LONGEST_ATTEMPT)
        return replies.read_info(reply)

    def _holder(self, info: Optional[Info]) -> Optional[Holder]:
        """What the server says of this lock object."""
        token, tenure = self.local.token, self.local.tenure
        if token is None or info is None or (tenure and tenure.entry.pid != os.getpid()):
            return None
        owners = (token, token.partition(b":")[2])
        return next((each for each in info.holders if each.owner in owners), None)

    def _is_owner(self, info: Optional[Info]) -> bool:
        # Of more than it lists, what was heard last is all there is.
        cut, tenure = info is not None and info.holding > len(info.holders), self.local.tenure
        return self._holder(info) is not None or (cut and tenure is not None and tenure.lost() is None)

    def _lost_event(self, kind: type[_T]) -> _T:
        tenure = self.local.tenure
        return kind() if tenure is None else tenure.lost_event(kind)

    @property
    def fence(self) -> Optional[int]:
        """A number that grows with every grant of this key, None while nothing is held. A storage that refuses a
        smaller one than it has seen is safe even from a holder that was paused past its timeout. Of several holders
        all fences are good: it remembers the highest of those who were alone, and refuses what is below that.
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
        self.local.tenures.pop(tenure, None)
        tenure.concluded = True
        if tenure.entry.pid == os.getpid():
            tenure.entry.leave()


class Lock(Base):
    """A lock on a server with the Lockkeeper module: a drop-in for the Lock of redis-py and valkey-py, to be had by
    `client.lock("name", lock_class=Lock)` or `Lock(client, "name", …)`, and used by `with`.

    It is renewed until it is released, so `timeout` is not how long it may be held (`max_hold` is), but how long
    it outlives a holder that is gone. One object may be shared by threads, each of which holds its own, and with a
    `limit` or `shared` be acquired again, for one more place: what was acquired last is released first.
    """

    _asynchronous = False

    @staticmethod
    def _who() -> Hashable:
        return weakref.ref(threading.current_thread())

    def __enter__(self) -> Lock:
        """Acquires it.

        Raises:
            BusyError: a LockError, if it was not to be had in time. The body does not run.
        """
        self._entering(_run(self._acquiring(None, None, None)))
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
        _run(self._leaving(failed=exc_type is not None))

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
        return self._acquired(_run(self._acquiring(blocking, blocking_timeout, token)))

    def _listener(self, tenure: Tenure) -> Callable[[Lost], None]:
        held, on_lost = weakref.ref(tenure), self.on_lost

        def lost(why: Lost) -> None:
            tenure = held()
            if on_lost is None and (tenure is None or tenure.event is None):
                return
            # The watchdog has other locks to keep, and whoever waited for the event and was interrupted may have kept
            # the event's own.
            try:
                threading.Thread(target=_tell, args=(held, on_lost, why), name="lockkeeper-lost", daemon=True).start()
            except RuntimeError as error:
                logger.warning("on_lost is not called, no thread can be started: %s", error)
                if tenure is not None:
                    tenure.tell_lost()

        return lost

    @property
    def lost(self) -> threading.Event:
        """Set when the lock that is held is lost. A loss by silence is told before the server can give the lock to
        another; a deletion or a takeover by force is learnt at the next renewal, a third of the timeout later at
        most.
        """
        return self._lost_event(threading.Event)

    def release(self) -> None:
        """Releases the lock. Renewal stops first.

        Raises:
            LockLostError: a LockNotOwnedError, if it was lost before.
            NotHeldError: a LockError, if none is held.
            UnreachableError, RefusedError: if nobody answered within 5 s, or with an error; it is tried on in the
                background until the lock has ended by itself.
        """
        _run(self._releasing())

    def release_after(self, seconds: float) -> None:
        """As `release`, but the lock stays taken until so long after it was granted. It does not wait. For a job
        that runs at the same minute on several machines and is done sooner than their clocks differ.
        """
        _run(self._keeping(seconds))

    def extend(self, additional_time: float, replace_ttl: bool = False) -> bool:
        """Adds seconds to what remains of the lock, or with `replace_ttl` makes it last for so long from now; this
        once: it is not renewed before its timeout is what remains.

        Raises: as `release`; and NotHeldError if the lock was made without a timeout, which is renewed anyway.
        """
        return _run(self._extending("extend", additional_time, replace_ttl))

    def reacquire(self) -> bool:
        """Makes the lock last for its timeout from now.

        Raises: as `extend`.
        """
        return _run(self._extending("reacquire", self.timeout, True))

    def upgrade(self) -> bool:
        """Makes this the only holder, until it is released. False if others hold it, too: it is held on as it was.
        It waits for nobody, since two who share it and both want to be alone would wait for each other.

        Raises:
            LockLostError: if it was lost; then nothing is taken.
            NotHeldError: if none is held.
            UnreachableError, RefusedError: if nobody answered within a third of the timeout, 10 s at most, or with an
                error. It is held on, alone or as it was.
        """
        return _run(self._regranting("upgrade", EXCLUSIVE))

    def downgrade(self) -> bool:
        """Shares the lock from now on, until it is released. The fence is a new one.

        Raises: as `upgrade`.
        """
        return _run(self._regranting("downgrade", SHARED))

    def info(self) -> Optional[Info]:
        """Who holds the lock and who waits for it, whoever that is; None if nobody does either."""
        return _run(self._asking_for_info())

    def locked(self) -> bool:
        """Whether anybody holds it."""
        info = self.info()
        return info is not None and info.holding > 0

    def owned(self) -> bool:
        """Whether the server says that this lock object holds it. See `check` for what asks nobody."""
        return self._is_owner(self.info())


def _tell(held: weakref.ref[Tenure], on_lost: Optional[Callable[[Lost], Any]], why: Lost) -> None:
    tenure = held()
    if tenure is not None:
        tenure.tell_lost()
    if on_lost is not None:
        on_lost(why)


def _result(promise: Promise[_T], until: Optional[int] = None) -> Steps[_T]:
    if not (yield Outcome(promise, until)):
        raise UnreachableError("nobody answered in time")
    return promise.result()


def _run(steps: Steps[_T]) -> _T:
    """Waits for what the steps want to wait for, in this thread."""
    try:
        step = next(steps)
        while True:
            try:
                result: Any = None
                if isinstance(step, Reply):
                    result = _replied(step)
                elif isinstance(step, Dial):
                    result = step.node.dial((step.until - now()) / SECOND)
                elif isinstance(step, Outcome):
                    limit = None if step.until is None else max(0, step.until - now()) / SECOND
                    result = step.promise.wait(limit)
                else:
                    time.sleep(max(0, step.until - now()) / SECOND)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as stop:
        value: _T = stop.value
        return value
    finally:
        steps.close()


def _replied(step: Reply) -> bool:
    while not step.connection.can_read(min(TICK, max(0, step.until - now()) / SECOND)):
        if now() >= step.until:
            return False
    return True
