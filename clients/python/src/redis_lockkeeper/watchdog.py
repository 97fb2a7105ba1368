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
from contextlib import suppress
from itertools import count, groupby
from queue import Empty, SimpleQueue
from typing import Any, Callable, Optional, Union

from . import replies
from .clock import now
from .connections import KEEP, Node, Place, read, send
from .errors import BROKEN, REPLIED, LockLostError, RefusedError, UnreachableError, is_elsewhere
from .lease import LONGEST_ATTEMPT, SECOND, Action, Answer, Idle, Lease, Lose, Lost, Release, Renew, Sleep, Terms
from .promise import Promise
from .replies import EXCLUSIVE, Command, Key

logger = logging.getLogger("redis_lockkeeper")

#: Timers stand still while the machine is suspended. So that a loss is told within a second after it wakes
#: up, no sleep is longer.
LONGEST_SLEEP = SECOND

#: How many dials may be under way: a handshake that takes longer than one attempt must come to its end, and
#: one that hangs must not be the only one.
DIALS = 3

#: How long the end of the program waits for its locks to be released.
FAREWELL = 2.0

# Made for one look: `epoll` would be a descriptor more.
_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)

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


class Wish:
    """Somebody wants a grant with another limit, and waits for whether the other holders allow it."""

    def __init__(self, limit: int) -> None:
        self.limit, self.sent = limit, False
        self.promise: Promise[bool] = Promise()


class Entry:
    """A lease as the watchdog knows it. It does not keep the holder's handle alive."""

    def __init__(
        self,
        place: Place,
        key: Key,
        owner: bytes,
        lease: Lease,
        min_replicas: int = 0,
        fence: int = 0,
        limit: int = EXCLUSIVE,
    ) -> None:
        self.place, self.key, self.owner = place, key, owner
        self.lease, self.min_replicas = lease, min_replicas
        #: Of the latest grant.
        self.fence, self.limit = fence, limit
        self.granted_at = now()
        self.pid = os.getpid()
        #: The handle, of what was handed out.
        self.holder: Optional[weakref.ref[Any]] = None
        #: Told of a loss, once, outside of any mutex.
        self.on_lost: Callable[[Lost], None] = lambda lost: None
        self.watchdog: Watchdog = watchdog_of(place.route(key)[0])
        #: When it wants attention; the heap may hold older dates.
        self.at: Optional[int] = None
        #: Whether the next command is to follow an ASKING, and whether the latest renewal did.
        self.asking = self.asked = False
        #: Who waits for a renewal, and since when: what was sent before tells nothing new.
        self.renewing: list[tuple[int, Promise[None]]] = []
        #: Until they are answered.
        self.wishes: list[Wish] = []
        #: Whether its holder lets go: nothing is wished for any more.
        self.releasing = False
        #: Whether a request to share it was not answered: should it arrive late, it would undo an upgrade unheard.
        self.sharing_in_doubt = False
        #: What the last attempt to give it up came to.
        self.answer = Answer.FAILED
        #: The attempt to give it up that its holder makes itself, until it is answered.
        self.attempted: Optional[int] = None
        #: Who waits for the end.
        self.ending: list[Promise[None]] = []

    def keep(self) -> None:
        """Has it looked after from now on."""
        with _mutex:
            self.watchdog._take(self, self.lease.due_at)

    def renew(self, ttl: int) -> Promise[None]:
        """Renews now, for this ttl."""
        promise: Promise[None] = Promise()
        at = now()
        with _mutex:
            if self.lease.lost is not None or self.lease.given_up:
                promise.set_exception(LockLostError(self.lease.lost or Lost.GONE, self.key))
                return promise
            self.renewing.append((at, promise))
            self.lease.extend(ttl, at)
            self.watchdog._schedule(self, at)
        return promise

    def regrant(self, limit: int) -> Promise[bool]:
        """Asks once for a grant with this limit in place of the one there is; false if the other holders forbid it."""
        wish, at = Wish(limit), now()
        with _mutex:
            if self.lease.lost is not None or self.releasing or self.lease.given_up:
                wish.promise.set_exception(LockLostError(self.lease.lost or Lost.GONE, self.key))
            elif self.sharing_in_doubt and limit == EXCLUSIVE:
                error = UnreachableError("that it is shared was not answered, and may arrive late: acquire it anew")
                error.passing = False
                wish.promise.set_exception(error)
            else:
                self.wishes.append(wish)
                # Where the renewal before it went.
                self.asking = self.asked
                self.watchdog._schedule(self, at)
        return wish.promise

    def asked_for(self) -> list[Wish]:
        """The wishes that the server has before it, the last ones. The others are dropped: who is interrupted may leave
        one that would be asked for at the next renewal only.
        """
        with _mutex:
            self.releasing = True
            if self.wishes:
                self._drop_wishes(Lost.GONE)
            return list(self.wishes)

    def give_up(self, not_before: int = 0) -> Optional[tuple[int, Command]]:
        """Stops renewal. Returns when it did, and the command that the caller is to send and report with
        `answered`; None if there is nothing to be sent.
        """
        with _mutex:
            # From here on an exception may be thrown anywhere: whoever drops the tenure hands it over.
            self.attempted = at = now()
            self.lease.give_up(not_before, at)
            self._fail_renewals(Lost.GONE)
            action = self.lease.next(at)
            if isinstance(action, Sleep) and action.until == at + 1:
                self.attempted = at = at + 1
                action = self.lease.next(at)
            command = self._command(action)
            if command is None:
                self._end()
                self.attempted = None
                return None
            return at, command

    def answered(self, sent_at: int, answer: Answer) -> Optional[Promise[None]]:
        """What the caller's attempt to give it up came to. If it failed, the watchdog tries on; returns what tells of
        the end.
        """
        with _mutex:
            at = now()
            self.lease.answered(sent_at, answer, at)
            self.answer = answer
            if answer is not Answer.FAILED:
                self._end()
                self.attempted = None
                return None
            ended: Promise[None] = Promise()
            self.ending.append(ended)
            self.watchdog._take(self, at)
            self.attempted = None
        return ended

    def forsake(self, at: int) -> None:
        """Its holder is gone, and with it the attempt to give it up, if it was interrupted in one."""
        self.lease.give_up(0, at)
        if self.attempted is not None:
            self.lease.answered(self.attempted, Answer.FAILED, at)
            # Nothing has gone wrong with the server.
            self.lease.renew_now(at)
            self.attempted = None

    def leave(self) -> None:
        """Forgets it; it lapses by itself."""
        with _mutex:
            self._end()

    def abandon(self) -> None:
        """For finalisers: gives it up some time soon."""
        self.watchdog._abandoned.put(self)
        self.watchdog.wake()

    def _command(self, action: Action) -> Optional[Command]:
        if isinstance(action, Renew):
            return replies.renew(self.key, self.owner, action.ttl)
        return replies.release(self.key, self.owner) if isinstance(action, Release) else None

    def _fail_renewals(self, lost: Lost) -> None:
        for _, promise in self.renewing:
            promise.set_exception(LockLostError(lost, self.key))
        self.renewing.clear()
        self._drop_wishes(lost)

    def _drop_wishes(self, lost: Lost) -> None:
        for wish in [wish for wish in self.wishes if not wish.sent]:
            self.wishes.remove(wish)
            wish.promise.set_exception(LockLostError(lost, self.key))

    def _end(self) -> None:
        self.at = None
        self.watchdog._entries.discard(self)
        for promise in self.ending:
            promise.set_result(None)
        self.ending.clear()

    def __str__(self) -> str:
        return f"{self.key!r} of {self.owner.decode(errors='replace')}"


class _Attempt:
    """One command for one entry, from when it is due until it is answered."""

    def __init__(self, entry: Entry, sent_at: int, action: Union[Renew, Release]) -> None:
        self.entry, self.sent_at, self.give_up_at = entry, sent_at, action.give_up_at
        self.command = entry._command(action) or ()
        # A release that no replica knows of ends by the ttl, which is harmless.
        self.min_replicas = entry.min_replicas if isinstance(action, Renew) else 0
        self.asking, entry.asking = entry.asking, False
        #: What the server said, while it is not known what its replicas have of it.
        self.reply: Any = None


class _Regrant(_Attempt):
    """The same for a wish. The lease need not know of it: no grant in place of another ends sooner."""

    def __init__(self, entry: Entry, sent_at: int, wish: Wish) -> None:
        terms = entry.lease.terms
        super().__init__(entry, sent_at, Renew(terms.ttl, sent_at + terms.attempt))
        self.command, self.wish = replies.acquire(entry.key, entry.owner, terms.ttl, wish.limit), wish
        wish.sent = True


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
        #: For whom the next replies are: an attempt, nobody (ASKING), or all whose replicas have been asked about.
        self._expected: deque[Union[_Attempt, list[_Attempt], None]] = deque()
        self._unsent: list[_Attempt] = []
        # Those under way since one succeeded last: which hung before that says nothing any more.
        self._dials, self._round = 0, 0
        self._dialled: SimpleQueue[Any] = SimpleQueue()
        self._draining: dict[socket.socket, int] = {}
        self.closing = False

    def start(self) -> None:
        """Before anything is asked: where it cannot start, nothing is taken."""
        with _mutex:
            self._start()

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
                self._draining[sock] = now() + LONGEST_ATTEMPT
            self.wake()

    def _start(self) -> None:
        self._used_at = now()
        if self._thread is not None:
            return
        self.closing = False
        bell = socket.socketpair()
        for each in bell:
            each.setblocking(False)
        try:
            thread = threading.Thread(target=self._run, args=(bell,), name="lockkeeper", daemon=True)
            self._thread, self._bell, self._looks_at = thread, bell, 0
            _watchdogs.add(self)
            thread.start()
        except BaseException as error:
            # Interrupted, it may run or not, or hang: another will be started.
            self._thread = self._bell = None
            if isinstance(error, RuntimeError):
                nothing = UnreachableError(f"no watchdog can be started: {error}")
                nothing.passing = nothing.sent = nothing.may_come = False
                raise nothing from error
            raise

    def _take(self, entry: Entry, at: int) -> None:
        self._start()
        entry.watchdog = self
        self._entries.add(entry)
        self._schedule(entry, at)

    def _schedule(self, entry: Entry, at: int) -> None:
        entry.at = at
        heapq.heappush(self._heap, (at, next(_order), entry))
        if len(self._heap) > 2 * len(self._entries) + 1000:
            self._heap = [item for item in self._heap if item[2].at == item[0]]
            heapq.heapify(self._heap)
        if at < self._looks_at:
            self._looks_at = at
            self.wake()

    def _run(self, bell: tuple[socket.socket, socket.socket]) -> None:
        try:
            with _mutex:
                # Its start was interrupted, and another has its place.
                if self._bell is not bell:
                    return
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
        attempts: list[_Attempt] = []
        lost: list[tuple[Entry, Lost]] = []
        with _mutex:
            self._looks_at = 0
            self._hear_abandoned(at)
            while self._heap and self._heap[0][0] <= at:
                due_at, _, entry = heapq.heappop(self._heap)
                if entry.at == due_at:
                    self._attend(entry, at, attempts, lost)
        for entry, why in lost:
            logger.error("the lock %s is lost: %s", entry, why)
            with _mutex:
                entry._fail_renewals(why)
            entry.on_lost(why)
        self._send(attempts)
        self._give_up_late(now())
        with _mutex:
            if self._is_idle():
                self._thread = self._bell = None
                return False
            ends = [attempt.give_up_at for attempt in (*self._unsent, *self._sent())]
            ends += [item[0] for item in self._heap[:1]]
            self._looks_at = min([now() + LONGEST_SLEEP, *ends, *self._draining.values()])
        self._listen(bell, max(0, self._looks_at - now()) / SECOND)
        return True

    def _hear_abandoned(self, at: int) -> None:
        with suppress(Empty):
            while True:
                entry = self._abandoned.get_nowait()
                entry.forsake(at)
                with suppress(UnreachableError):
                    # One that was lost long ago has outlived the thread.
                    entry.watchdog._take(entry, at)

    def _attend(self, entry: Entry, at: int, attempts: list[_Attempt], lost: list[tuple[Entry, Lost]]) -> None:
        entry.at = None
        # Who was sent here by ASK is asked here.
        if not entry.asking:
            node = self._node
            with suppress(UnreachableError):
                node, entry.asking = entry.place.route(entry.key)
            if node is not self._node:
                self._entries.discard(entry)
                watchdog_of(node)._take(entry, at)
                return
        if entry.holder is not None and entry.holder() is None:
            # Its finaliser has not said so: Python drops what a signal raises in one, and with it the rest of it.
            entry.forsake(at)
        while True:
            action = entry.lease.next(at)
            if isinstance(action, Lose):
                lost.append((entry, action.lost))
            elif isinstance(action, (Renew, Release)):
                attempts.append(_Attempt(entry, at, action))
            else:
                break
        if isinstance(action, Sleep):
            self._schedule(entry, action.until)
            # Not behind a renewal whose answer may be no: it would be granted what is another's or nobody's by then.
            if not (entry.lease.unanswered or entry.lease.given_up):
                attempts += [_Regrant(entry, at, wish) for wish in entry.wishes if not wish.sent]
        elif isinstance(action, Idle):
            self._entries.discard(entry)
        else:
            entry._end()

    def _send(self, attempts: list[_Attempt]) -> None:
        if not attempts:
            return
        if self._connection is None:
            self._connection = self._node.take_idle()
        if self._connection is None:
            self._unsent += attempts
            if not self._dials:
                self._dial()
            return
        commands: list[Command] = []
        until = min(attempt.give_up_at for attempt in attempts)
        attempts.sort(key=lambda attempt: attempt.min_replicas)
        for min_replicas, group in groupby(attempts, lambda attempt: attempt.min_replicas):
            together = list(group)
            for attempt in together:
                if attempt.asking:
                    commands.append(("ASKING",))
                    self._expected.append(None)
                commands.append(attempt.command)
                self._expected.append(attempt)
            if min_replicas:
                commands.append(replies.replicas(min_replicas, until - now()))
                self._expected.append(together)
        try:
            # A hung server with its buffers full must not keep us for longer than the attempt.
            self._connection._sock.settimeout(max(0.001, (until - now()) / SECOND))
            send(self._connection, *commands)
        except BROKEN as error:
            self._hang_up(error)

    def _sent(self) -> list[_Attempt]:
        """What was sent and is not answered yet."""
        sent: dict[_Attempt, None] = {}
        for each in self._expected:
            sent.update(dict.fromkeys(each if isinstance(each, list) else [each] if each else []))
        return list(sent)

    def _dial(self) -> None:
        of_round = self._round

        def dial() -> None:
            try:
                self._dialled.put((of_round, self._node.dial()))
            except Exception as error:
                self._dialled.put((of_round, error))
            self.wake()

        self._dials += 1
        try:
            threading.Thread(target=dial, name="lockkeeper-dial", daemon=True).start()
        except RuntimeError:
            # The interpreter is shutting down.
            dial()

    def _hear_dials(self) -> None:
        with suppress(Empty):
            while True:
                of_round, dialled = self._dialled.get_nowait()
                if of_round == self._round:
                    self._dials -= 1
                if not isinstance(dialled, Exception):
                    if self._connection is not None:
                        self._node.give(dialled)
                        continue
                    self._connection, self._dials = dialled, 0
                    self._round += 1
                elif self._dials or of_round != self._round:
                    continue
                unsent, self._unsent = self._unsent, []
                if isinstance(dialled, Exception):
                    self._fail(unsent, dialled)
                else:
                    self._send(unsent)

    def _give_up_late(self, at: int) -> None:
        """What has run out of time has failed."""
        no_answer = UnreachableError(f"{self._node} did not answer in time")
        if any(attempt.give_up_at <= at for attempt in self._sent()):
            self._hang_up(no_answer)
        late = [attempt for attempt in self._unsent if attempt.give_up_at <= at]
        if late:
            self._unsent = [attempt for attempt in self._unsent if attempt.give_up_at > at]
            self._fail(late, no_answer)
            if self._dials < DIALS:
                self._dial()

    def _hang_up(self, error: BaseException) -> None:
        sent = self._sent()
        self._expected.clear()
        if self._connection is not None:
            self._connection.disconnect()
            self._connection = None
        self._fail(sent, error)

    def _fail(self, attempts: list[_Attempt], error: BaseException) -> None:
        ours = replies.translated(error, str(self._node))
        for attempt in attempts:
            self._settle(attempt, ours)

    def _listen(self, bell: socket.socket, timeout: float) -> None:
        connection = self._connection
        with _Selector() as selector:
            for each in (bell, *self._draining, *([connection._sock] if connection else [])):
                selector.register(each, selectors.EVENT_READ)
            ready = {key.fileobj for key, _ in selector.select(timeout)}
        if bell in ready:
            with suppress(OSError):
                bell.recv(4096)
        self._hear_dials()
        if connection is not None and connection is self._connection and connection._sock in ready:
            self._read()
        for sock, until in list(self._draining.items()):
            done = until <= now()
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
                del self._draining[sock]

    def _read(self) -> None:
        """All replies that are there."""
        try:
            while self._connection is not None and self._connection.can_read(0):
                if not self._expected:
                    raise UnreachableError(f"{self._node} said something unasked")
                reply: Any
                try:
                    reply = read(self._connection)
                except REPLIED as error:
                    reply = replies.translated(error, str(self._node))
                asked = self._expected.popleft()
                if isinstance(asked, list):
                    self._settle_replicated(asked, reply)
                elif asked is not None and asked.min_replicas:
                    asked.reply = reply
                elif asked is not None:
                    self._settle(asked, reply)
        except BROKEN as error:
            self._hang_up(error)

    def _settle_replicated(self, attempts: list[_Attempt], acknowledged: Any) -> None:
        for attempt in attempts:
            enough = isinstance(acknowledged, int) and acknowledged >= attempt.min_replicas
            if not enough and type(attempt.reply) is int and attempt.reply > 0:
                # What the server alone has carried out does not count.
                words = f"NOREPLICAS {acknowledged} acknowledged, {attempt.min_replicas} are needed"
                attempt.reply = RefusedError(words)
            self._settle(attempt, attempt.reply)

    def _settle(self, attempt: _Attempt, reply: Any) -> None:
        """Reports what was answered, or went wrong."""
        if isinstance(attempt, _Regrant):
            self._settle_regrant(attempt, reply)
            return
        entry, at, answer = attempt.entry, now(), Answer.FAILED
        if not isinstance(reply, (RefusedError, UnreachableError)):
            try:
                answer = replies.read_answer(reply)
            except UnreachableError as error:
                reply = error
        told: list[Promise[None]] = []
        with _mutex:
            if not entry.lease.answered(attempt.sent_at, answer, at):
                return
            entry.answer = answer
            if answer is Answer.FAILED:
                entry.place.failed(entry.key, self._node, reply)
            elif answer is Answer.YES:
                entry.asked = attempt.asking
            if answer in (Answer.YES, Answer.FAILED):
                told = [promise for since, promise in entry.renewing if since <= attempt.sent_at]
                entry.renewing = [(since, promise) for since, promise in entry.renewing if since > attempt.sent_at]
                if entry.renewing:
                    entry.lease.renew_now(at)
            self._schedule(entry, at)
        for promise in told:
            if answer is Answer.YES:
                promise.set_result(None)
            else:
                promise.set_exception(reply)
        if answer is Answer.FAILED:
            left = max(0, entry.lease.ends_at - at) / SECOND
            logger.warning("renewing or releasing %s failed, %.1f s are left: %s", entry, left, reply)
            if self._connection is not None and is_elsewhere(reply):
                # Behind the same address there may be another server by now.
                self._hang_up(UnreachableError(f"{self._node} is not the master"))

    def _settle_regrant(self, regrant: _Regrant, reply: Any) -> None:
        """What went wrong the next renewal finds out, too."""
        entry, wish = regrant.entry, regrant.wish
        try:
            if isinstance(reply, (RefusedError, UnreachableError)):
                raise reply
            fence = replies.read_fence(reply)
            if fence is not None:
                entry.fence, entry.limit = fence, wish.limit
        except (RefusedError, UnreachableError) as error:
            entry.sharing_in_doubt |= isinstance(error, UnreachableError) and wish.limit != EXCLUSIVE
            wish.promise.set_exception(error)
        else:
            wish.promise.set_result(fence is not None)
        with _mutex:
            entry.wishes.remove(wish)

    def _is_idle(self) -> bool:
        """Whether there is nothing to do, and was not for 10 s. Connections without work wait for it there."""
        if self._entries or self._expected or self._unsent or self._draining or self._dials:
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
    until = None if timeout is None else time.monotonic() + timeout
    promises: list[Promise[None]] = []
    with _mutex:
        for watchdog in _watchdogs:
            watchdog._hear_abandoned(now())
            for entry in watchdog._entries:
                if entry.lease.given_up:
                    promises.append(Promise())
                    entry.ending.append(promises[-1])
    return all(promise.wait(until and max(0, until - time.monotonic())) for promise in promises)


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
                if not entry.lease.given_up:
                    watchdog._abandoned.put(entry)
            watchdog.wake()
    settled(FAREWELL)


atexit.register(_at_exit)
