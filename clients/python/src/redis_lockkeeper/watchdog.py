"""The watchdog: one thread for each node, which keeps every lock and gives up what was left behind.

It is a thread of its own, for asyncio too, so that little of what the application does with its
threads can stop a renewal. It never waits for one thing alone: dialling is done by short-lived
helpers, and everything else is one `select`. Renewals that are due together travel in one pipeline.
"""

from __future__ import annotations

import atexit
import heapq
import logging
import os
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from concurrent.futures import Future, wait
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, Callable, Optional, Union

from . import replies
from .clock import now
from .connections import KEEP, Node, Place, read, send
from .errors import BROKEN, REPLIED, LockLostError, RefusedError, UnreachableError, is_elsewhere
from .lease import LONGEST_ATTEMPT, SECOND, Answer, End, Idle, Lease, Lose, Lost, Release, Renew, Sleep, Terms
from .replies import Command, Key

logger = logging.getLogger("redis_lockkeeper")

#: Timers stand still while the machine is suspended. So that a loss is told within a second after it wakes
#: up, no sleep is longer.
LONGEST_SLEEP = SECOND

#: One pipeline must not keep the server from others: a thousand renewals take it a millisecond or two.
BATCH = 1000

#: How many dials may be under way: a handshake that takes longer than one attempt must come to its end, and
#: one that hangs must not be the only one.
DIALS = 3

#: How long the end of the program waits for its locks to be released.
FAREWELL = 2.0

# Made for one look: `epoll` would be a descriptor more.
_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)

_Error = Union[RefusedError, UnreachableError]

# One for all leases: they change hands between watchdogs when slots move. Finalisers, which may run at
# any moment in any thread, never take it.
_mutex = threading.Lock()
_order = count()
_watchdogs: weakref.WeakSet[Watchdog] = weakref.WeakSet()


def _forget() -> None:
    """A forked child has none of its parent's threads, and maybe its mutex in another's hand."""
    global _mutex, _watchdogs
    _mutex, _watchdogs = threading.Lock(), weakref.WeakSet()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


class Entry:
    """A lease as the watchdog knows it. It does not keep the holder's handle alive."""

    def __init__(self, place: Place, key: Key, owner: bytes, lease: Lease, min_replicas: int = 0) -> None:
        self.place, self.key, self.owner = place, key, owner
        self.lease, self.min_replicas = lease, min_replicas
        self.granted_at = now()
        self.pid = os.getpid()
        #: Told of a loss, once, outside of any mutex.
        self.on_lost: Callable[[Lost], None] = lambda lost: None
        self.watchdog: Watchdog = watchdog_of(place.route(key)[0])
        #: When it wants attention; the heap may hold older dates.
        self.at: Optional[int] = None
        #: Whether the next command is to follow an ASKING.
        self.asking = False
        #: Who waits for a renewal, and since when: what was sent before tells nothing new.
        self.renewing: list[tuple[int, Future[None]]] = []
        #: What the last attempt to give it up came to.
        self.answer = Answer.FAILED
        #: Who waits for the end.
        self.ending: list[Future[None]] = []

    def __lt__(self, other: Entry) -> bool:
        return id(self) < id(other)

    def keep(self) -> None:
        """Has it looked after from now on."""
        with _mutex:
            self.watchdog._start()
            self.watchdog._entries.add(self)
            self.watchdog._schedule(self, self.lease.due_at)

    def renew(self, ttl: Optional[int] = None) -> Future[None]:
        """Renews now, for another ttl if one is given."""
        future: Future[None] = Future()
        # From now on nobody can cancel it.
        future.set_running_or_notify_cancel()
        at = now()
        with _mutex:
            if self.lease.lost is not None or self.lease.given_up:
                future.set_exception(LockLostError(self.lease.lost or Lost.GONE, self.key))
                return future
            self.renewing.append((at, future))
            if ttl is None:
                self.lease.renew_now(at)
            else:
                self.lease.extend(ttl, at)
            self.watchdog._schedule(self, at)
        return future

    def give_up(self, not_before: int = 0) -> Optional[tuple[int, Command]]:
        """Stops renewal. Returns when it did, and the command that the caller is to send and report with
        `answered`; None if there is nothing to be sent.
        """
        with _mutex:
            at = now()
            self.lease.give_up(not_before, at)
            self.at = None
            for _, future in self.renewing:
                future.set_exception(LockLostError(Lost.GONE, self.key))
            self.renewing.clear()
            action = self.lease.next(at)
            if isinstance(action, Sleep) and action.until == at + 1:
                at += 1
                action = self.lease.next(at)
            if isinstance(action, Release):
                return at, replies.release(self.key, self.owner)
            if isinstance(action, Renew):
                return at, replies.renew(self.key, self.owner, action.ttl)
            self._end()
            return None

    def leave(self) -> None:
        """Forgets it; it lapses by itself."""
        with _mutex:
            self.at = None
            self._end()

    def _end(self) -> None:
        self.watchdog._entries.discard(self)
        for future in self.ending:
            future.set_result(None)
        self.ending.clear()

    def answered(self, sent_at: int, answer: Answer) -> Future[None]:
        """What the caller's attempt to give it up came to; the watchdog tries on if it failed. Returns what tells of
        the end.
        """
        ended: Future[None] = Future()
        ended.set_running_or_notify_cancel()
        with _mutex:
            self.ending.append(ended)
            self.lease.answered(sent_at, answer, now())
            self.answer = answer
            if answer is Answer.FAILED:
                self.watchdog._start()
                self.watchdog._entries.add(self)
                self.watchdog._schedule(self, now())
            else:
                self._end()
        return ended

    def abandon(self) -> None:
        """For finalisers: gives it up some time soon."""
        self.watchdog._abandoned.put(self)
        self.watchdog.wake()


class Batch:
    """Commands that are given up together, and the replies that came so far."""

    def __init__(self, min_replicas: int, give_up_at: int) -> None:
        self.min_replicas, self.give_up_at = min_replicas, give_up_at
        self.items: list[tuple[Entry, int]] = []
        self.commands: list[Command] = []
        #: Which entry a reply is for; None for the reply to ASKING.
        self.expected: deque[Optional[int]] = deque()
        self.replies: list[Any] = []

    def add(self, entry: Entry, sent_at: int, command: Command) -> None:
        if entry.asking:
            self.commands.append(("ASKING",))
            self.expected.append(None)
        entry.asking = False
        self.expected.append(len(self.items))
        self.items.append((entry, sent_at))
        self.commands.append(command)

    def seal(self) -> None:
        if self.min_replicas:
            self.commands.append(replies.replicas(self.min_replicas, self.give_up_at - now()))
            self.expected.append(len(self.items))


class Watchdog:
    """Keeps the leases of one node. Its thread runs while there is something to do, and 10 s longer."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._thread: Optional[threading.Thread] = None
        self._entries: set[Entry] = set()
        self._heap: list[tuple[int, int, Entry]] = []
        self._abandoned: SimpleQueue[Entry] = SimpleQueue()
        #: When it looks next, and when somebody needed it last.
        self._looks_at, self._used_at = 0, 0
        self._bell: Optional[tuple[socket.socket, socket.socket]] = None
        self._connection: Any = None
        self._in_flight: deque[Batch] = deque()
        self._unsent: list[Batch] = []
        self._dials: list[int] = []
        self._dialled: SimpleQueue[Any] = SimpleQueue()
        self._draining: list[tuple[socket.socket, int]] = []
        self.closing = False

    def start(self) -> None:
        """Before anything is asked: where it cannot start, nothing is taken."""
        with _mutex:
            self._start()

    def _start(self) -> None:
        self._used_at = now()
        if self._thread is not None:
            return
        self.closing = False
        bell = socket.socketpair()
        for each in bell:
            each.setblocking(False)
        self._bell, self._looks_at = bell, 0
        self._thread = threading.Thread(target=self._run, args=(bell,), name="lockkeeper", daemon=True)
        _watchdogs.add(self)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._thread = None
            for each in bell:
                each.close()
            raise UnreachableError(f"no watchdog can be started: {error}") from error

    def wake(self) -> None:
        """From any thread at any moment: it takes no lock."""
        bell = self._bell
        if bell is not None:
            # Full is loud enough.
            with suppress(OSError):
                bell[1].send(b"!")

    def drain(self, sock: Optional[socket.socket]) -> None:
        """Reads a connection to its end, and then closes it."""
        if sock is not None:
            with _mutex:
                self._start()
                self._draining.append((sock, now() + LONGEST_ATTEMPT))
            self.wake()

    def _schedule(self, entry: Entry, at: int) -> None:
        entry.at = at
        heapq.heappush(self._heap, (at, next(_order), entry))
        if len(self._heap) > 2 * len(self._entries) + BATCH:
            self._heap = [item for item in self._heap if item[2].at == item[0]]
            heapq.heapify(self._heap)
        if at < self._looks_at:
            self._looks_at = at
            self.wake()

    def _run(self, bell: tuple[socket.socket, socket.socket]) -> None:
        try:
            while True:
                try:
                    if not self._turn(bell[0]):
                        return
                except Exception as error:
                    # Never seen, but all locks depend on it.
                    logger.exception("the watchdog of %s has failed", self._node)
                    self._hang_up(error)
                    time.sleep(LONGEST_SLEEP / SECOND)
        finally:
            for each in bell:
                each.close()

    def _turn(self, bell: socket.socket) -> bool:
        """Does what is due, and waits for what is next. False when there is nothing left to do."""
        at = now()
        batches: dict[tuple[int, int], Batch] = {}
        lost: list[tuple[Entry, Lost]] = []
        with _mutex:
            self._looks_at = 0
            self._hear_abandoned(at)
            while self._heap and self._heap[0][0] <= at:
                due_at, _, entry = heapq.heappop(self._heap)
                if entry.at == due_at:
                    self._attend(entry, at, batches, lost)
        for entry, why in lost:
            self._tell(entry, why)
        for batch in batches.values():
            batch.seal()
            self._send(batch)
        self._give_up(now())
        with _mutex:
            if self._is_idle():
                self._thread = self._bell = None
                return False
            until = [now() + LONGEST_SLEEP]
            until += [item[0] for item in self._heap[:1]]
            until += [batch.give_up_at for batch in (*self._unsent, *self._in_flight)]
            until += [until for _, until in self._draining]
            self._looks_at = min(until)
        self._listen(bell, max(0, self._looks_at - now()) / SECOND)
        return True

    def _hear_abandoned(self, at: int) -> None:
        with suppress(Empty):
            while True:
                entry = self._abandoned.get_nowait()
                entry.lease.give_up(0, at)
                with suppress(UnreachableError):
                    # One that was lost long ago has outlived the thread.
                    entry.watchdog._start()
                    entry.watchdog._entries.add(entry)
                    entry.watchdog._schedule(entry, at)

    def _attend(
        self, entry: Entry, at: int, batches: dict[tuple[int, int], Batch], lost: list[tuple[Entry, Lost]]
    ) -> None:
        entry.at = None
        node = self._node
        # Who was sent here by ASK is asked here.
        if not entry.asking:
            with suppress(UnreachableError):
                node, entry.asking = entry.place.route(entry.key)
        if node is not self._node:
            self._entries.discard(entry)
            entry.watchdog = watchdog_of(node)
            entry.watchdog._start()
            entry.watchdog._entries.add(entry)
            entry.watchdog._schedule(entry, at)
            return
        while True:
            action = entry.lease.next(at)
            if isinstance(action, Sleep):
                self._schedule(entry, action.until)
                return
            if isinstance(action, Lose):
                lost.append((entry, action.lost))
                continue
            if isinstance(action, Idle):
                self._entries.discard(entry)
                return
            if isinstance(action, End):
                entry._end()
                return
            if isinstance(action, Renew):
                command = replies.renew(entry.key, entry.owner, action.ttl)
            else:
                command = replies.release(entry.key, entry.owner)
            # A release that no replica knows of ends by the ttl, which is harmless.
            replicas = entry.min_replicas if isinstance(action, Renew) else 0
            batch = batches.get((replicas, action.give_up_at))
            if batch is None or len(batch.items) >= BATCH:
                if batch is not None:
                    batches[(replicas, -next(_order))] = batch
                batch = batches[(replicas, action.give_up_at)] = Batch(replicas, action.give_up_at)
            batch.add(entry, at, command)

    def _tell(self, entry: Entry, lost: Lost) -> None:
        logger.error("the lock %r of %s is lost: %s", entry.key, entry.owner.decode(errors="replace"), lost)
        for _, future in entry.renewing:
            future.set_exception(LockLostError(lost, entry.key))
        entry.renewing.clear()
        entry.on_lost(lost)

    def _send(self, batch: Batch) -> None:
        if self._connection is None:
            self._connection = self._node.take_idle()
        if self._connection is None:
            self._unsent.append(batch)
            if not self._dials:
                self._dial()
            return
        self._in_flight.append(batch)
        try:
            # A hung server with its buffers full must not keep us for longer than the attempt.
            self._connection._sock.settimeout(max(0.001, (batch.give_up_at - now()) / SECOND))
            send(self._connection, *batch.commands)
        except BROKEN as error:
            self._hang_up(error)

    def _dial(self) -> None:
        def dial() -> None:
            try:
                self._dialled.put(self._node.dial())
            except Exception as error:
                self._dialled.put(error)
            self.wake()

        self._dials.append(now())
        try:
            threading.Thread(target=dial, name="lockkeeper-dial", daemon=True).start()
        except RuntimeError:
            # The interpreter is shutting down.
            dial()

    def _hear_dials(self) -> None:
        with suppress(Empty):
            while True:
                dialled = self._dialled.get_nowait()
                self._dials.pop(0)
                if isinstance(dialled, Exception):
                    if not self._dials:
                        unsent, self._unsent = self._unsent, []
                        self._fail(unsent, replies.translated(dialled, str(self._node)))
                elif self._connection is not None:
                    self._node.give(dialled)
                else:
                    self._connection = dialled
                    unsent, self._unsent = self._unsent, []
                    for batch in unsent:
                        self._send(batch)

    def _give_up(self, at: int) -> None:
        """What has run out of time has failed."""
        no_answer = UnreachableError(f"{self._node} did not answer in time")
        if any(batch.give_up_at <= at for batch in self._in_flight):
            self._hang_up(no_answer)
        late = [batch for batch in self._unsent if batch.give_up_at <= at]
        if late:
            self._unsent = [batch for batch in self._unsent if batch.give_up_at > at]
            self._fail(late, no_answer)
            if len(self._dials) < DIALS:
                self._dial()

    def _hang_up(self, error: BaseException) -> None:
        failed, self._in_flight = list(self._in_flight), deque()
        if self._connection is not None:
            self._connection.disconnect()
            self._connection = None
        self._fail(failed, replies.translated(error, str(self._node)))

    def _fail(self, batches: list[Batch], error: _Error) -> None:
        for batch in batches:
            if batch.min_replicas:
                # What the server alone has carried out does not count.
                batch.replies.clear()
            batch.replies += [error] * (len(batch.items) - len(batch.replies))
            self._settle(batch)

    def _listen(self, bell: socket.socket, timeout: float) -> None:
        with _Selector() as selector:
            selector.register(bell, selectors.EVENT_READ)
            connection = self._connection
            if connection is not None:
                selector.register(connection._sock, selectors.EVENT_READ)
            for sock, _ in self._draining:
                selector.register(sock, selectors.EVENT_READ)
            ready = {key.fileobj for key, _ in selector.select(timeout)}
        if bell in ready:
            with suppress(OSError):
                bell.recv(4096)
        self._hear_dials()
        if connection is not None and connection is self._connection and connection._sock in ready:
            self._read()
        at = now()
        for sock, until in list(self._draining):
            done = until <= at
            if sock in ready:
                sock.setblocking(False)
                try:
                    done = not sock.recv(65536) or done
                except BlockingIOError:
                    pass
                except OSError:
                    done = True
            if done:
                sock.close()
                self._draining.remove((sock, until))

    def _read(self) -> None:
        """All replies that are there."""
        try:
            while self._connection is not None and self._connection.can_read(0):
                if not self._in_flight:
                    raise UnreachableError(f"{self._node} said something unasked")
                batch = self._in_flight[0]
                reply: Any
                try:
                    reply = read(self._connection)
                except REPLIED as error:
                    reply = replies.translated(error, str(self._node))
                if batch.expected.popleft() is not None:
                    batch.replies.append(reply)
                if not batch.expected:
                    self._in_flight.popleft()
                    self._settle(batch)
        except BROKEN as error:
            self._hang_up(error)

    def _settle(self, batch: Batch) -> None:
        """Reports what was answered."""
        results: list[Union[Answer, _Error]] = []
        for reply in batch.replies[: len(batch.items)]:
            if not isinstance(reply, (RefusedError, UnreachableError)):
                try:
                    reply = replies.read_answer(reply)
                except UnreachableError as error:
                    reply = error
            results.append(reply)
        if batch.min_replicas and len(batch.replies) > len(batch.items):
            acknowledged = batch.replies[-1]
            if not isinstance(acknowledged, int) or acknowledged < batch.min_replicas:
                few = RefusedError(f"NOREPLICAS {acknowledged} acknowledged, {batch.min_replicas} are needed")
                results = [few if result is Answer.YES else result for result in results]
        at = now()
        told: list[tuple[Future[None], Union[Answer, _Error]]] = []
        failures: list[tuple[Entry, _Error]] = []
        with _mutex:
            for (entry, sent_at), result in zip(batch.items, results):
                answer = result if isinstance(result, Answer) else Answer.FAILED
                if not entry.lease.answered(sent_at, answer, at):
                    continue
                entry.answer = answer
                if not isinstance(result, Answer):
                    entry.place.failed(entry.key, self._node, result)
                    failures.append((entry, result))
                if answer in (Answer.YES, Answer.FAILED):
                    told += [(future, result) for since, future in entry.renewing if since <= sent_at]
                    entry.renewing = [(since, future) for since, future in entry.renewing if since > sent_at]
                    if entry.renewing:
                        entry.lease.renew_now(at)
                self._schedule(entry, at)
        for future, result in told:
            if isinstance(result, Answer):
                future.set_result(None)
            else:
                future.set_exception(result)
        for entry, failure in failures:
            left = (entry.lease.ends_at - at) / SECOND
            message = "renewing or releasing %r of %s failed, %.1f s are left: %s"
            logger.warning(message, entry.key, entry.owner.decode(errors="replace"), left, failure)
        if self._connection is not None and any(is_elsewhere(failure) for _, failure in failures):
            # Behind the same address there may be another server by now.
            self._hang_up(UnreachableError(f"{self._node} is not the master"))

    def _is_idle(self) -> bool:
        """Whether there is nothing to do, and was not for 10 s. Connections without work wait for it there."""
        if self._entries or self._in_flight or self._unsent or self._draining or self._dials:
            return False
        if self._connection is not None:
            self._node.give(self._connection)
            self._connection = None
        at = now()
        return not self._node.close_idle(at if self.closing else at - KEEP) and (
            self.closing or self._used_at < at - KEEP
        )


def watchdog_of(node: Node) -> Watchdog:
    """The watchdog of a node, which need not run."""
    watchdog: Watchdog = node.__dict__.get("watchdog") or node.__dict__.setdefault("watchdog", Watchdog(node))
    return watchdog


def give_up_in_doubt(place: Place, key: Key, owner: bytes, terms: Terms) -> None:
    """Releases what may have been granted without our knowing."""
    Entry(place, key, owner, Lease.in_doubt(terms, now())).keep()


def settled(timeout: Optional[float] = None) -> bool:
    """Waits until all that was given up so far has been released, or has ended by itself. For a program that is
    about to end, which would take the watchdog with it. False if `timeout` seconds were not enough.
    """
    futures: list[Future[None]] = []
    with _mutex:
        for watchdog in _watchdogs:
            watchdog._hear_abandoned(now())
            for entry in watchdog._entries:
                if entry.lease.given_up:
                    future: Future[None] = Future()
                    entry.ending.append(future)
                    futures.append(future)
    return not wait(futures, timeout).not_done


def close(timeout: Optional[float] = None) -> bool:
    """As `settled`, and ends the threads and connections that nobody needs any more, which would otherwise stay
    for 10 s. A lock that is still held keeps its watchdog.
    """
    done = settled(timeout)
    with _mutex:
        threads = []
        for watchdog in list(_watchdogs):
            if not watchdog._entries and watchdog._thread is not None:
                watchdog.closing = True
                threads.append(watchdog._thread)
                watchdog.wake()
    for thread in threads:
        thread.join(timeout)
        done = done and not thread.is_alive()
    return done


def _at_exit() -> None:
    """Releases what the program still holds at its end."""
    with _mutex:
        for watchdog in _watchdogs:
            for entry in list(watchdog._entries):
                if entry.pid == os.getpid() and not entry.lease.given_up:
                    watchdog._abandoned.put(entry)
            watchdog.wake()
    settled(FAREWELL)


atexit.register(_at_exit)
