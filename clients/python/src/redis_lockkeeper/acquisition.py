"""How a lock is asked for: one try, then a wait in the server's queue, and again from the start after
whatever went wrong.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Hashable
from typing import Any, Optional, TypeVar

from . import replies
from .clock import now
from .connections import Place
from .errors import InvalidError, RefusedError, UnreachableError
from .exchange import BackOff, Learn, Steps, ask, wait
from .lease import LONGEST_ATTEMPT, MAX_TTL, MILLISECOND, MIN_TTL, SECOND, Answer, Lease, Lost, Terms
from .replies import EXCLUSIVE, Key
from .watchdog import Entry, give_up_in_doubt, watchdog_of

#: How long the server may take, after a wait is over, to say so before we say it ourselves. The rest of the
#: 100 ms in which a wait returns is for a busy machine.
OVERTIME = 60 * MILLISECOND

#: The back-off after an error, doubled every time: a server that restarts needs seconds, a proxy that cut a
#: connection needs none.
FIRST_BACK_OFF = 20 * MILLISECOND
LAST_BACK_OFF = 500 * MILLISECOND

#: The longest label, so that the whole value, `<fence>:<label>:<uuid>`, fits the 512 bytes of an argument.
MAX_LABEL = 495 - 37

_T = TypeVar("_T")


class Tenure:
    """One lock held once, from the grant to its end. A dropped one is released."""

    #: Set when it is lost; of the kind that the face has. None until somebody asks for it, as most never do: making one
    #: takes as long as sending a command.
    event: Any = None

    #: Which thread or task has acquired it, by a weak reference.
    who: Hashable = None

    def __init__(self, entry: Entry) -> None:
        self.owner = entry.owner
        #: Whether `leave` or `release_after` has been called: then a `with` has nothing to release.
        self.concluded = False
        entry.holder = weakref.ref(self)
        self.entry = entry

    def __del__(self) -> None:
        # In a forked child nobody hears of it.
        if not hasattr(self, "entry"):
            return
        held = not self.entry.lease.given_up and not self.concluded
        if held or self.entry.attempted is not None:
            self.entry.abandon()

    @property
    def fence(self) -> int:
        return self.entry.fence

    @property
    def token(self) -> bytes:
        """As RENEW and RELEASE take it; of a lock that only one may hold, the whole value of the key."""
        alone = self.entry.limit == EXCLUSIVE
        return b"%016d:%b" % (self.fence, self.owner) if alone else self.owner

    def remaining(self) -> float:
        lease = self.entry.lease
        if lease.lost not in (None, Lost.MAX_HOLD) or self.entry.pid != os.getpid():
            return 0.0
        return max(0, lease.ends_at - now()) / SECOND

    def lost(self) -> Optional[Lost]:
        """The clock is believed before the watchdog, which may not have run for a while."""
        return self.entry.lease.lost or (None if self.remaining() else Lost.EXPIRED)

    def is_nobodys(self) -> bool:
        """Whether the thread or task that has acquired it is gone."""
        return isinstance(self.who, weakref.ref) and self.who() is None

    def lost_event(self, kind: type[_T]) -> _T:
        if self.event is None:
            # In one step: of two threads that ask at once, each would have its own.
            self.__dict__.setdefault("event", kind())
        # A loss before that was told to nobody.
        if self.lost() is not None:
            self.event.set()
        event: _T = self.event
        return event

    def tell_lost(self) -> None:
        if self.event is not None:
            self.event.set()

    def left(self) -> int:
        """What remains by the server's clock at least, in microseconds."""
        lease = self.entry.lease
        return lease.ends_at + lease.terms.margin - now()

    def outcome(self, answer: Answer, again: bool) -> Optional[Lost]:
        """How a release ended that was answered so; `again` if it may have been carried out before."""
        lease = self.entry.lease
        if lease.lost is not None or answer is Answer.YES or again or lease.release_in_doubt:
            return lease.lost
        return Lost.TAKEN if answer is Answer.TAKEN else Lost.GONE


def micros(seconds: Any, name: str) -> int:
    """Rounded: 1.001 * 1000 is less than 1001."""
    try:
        return int(seconds * 1000 + 0.5) * MILLISECOND
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidError(f"{name} must be a number of seconds, got {seconds!r}") from error


def terms_of(timeout: Any, max_hold: Any, renew: bool) -> Terms:
    """The terms for times in seconds.

    Raises:
        InvalidError: if they make no sense.
    """
    ttl = micros(timeout, "timeout")
    if not MIN_TTL <= ttl <= MAX_TTL:
        bounds = f"{MIN_TTL / SECOND} to {MAX_TTL // SECOND} s"
        raise InvalidError(f"timeout must be {bounds}, got {timeout!r}")
    hold = None if max_hold is None else micros(max_hold, "max_hold")
    if hold is not None and hold <= 0:
        raise InvalidError(f"max_hold must be more than 0, got {max_hold!r}")
    return Terms(ttl, hold, renew)


def _uuid() -> bytes:
    """As by `uuid.uuid4`, which takes longer than the rest of an owner, its lease and its terms together."""
    digits = os.urandom(16).hex()
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-a{digits[17:20]}-{digits[20:]}".encode()


def acquisition(
    place: Place, key: Key, label: bytes, terms: Terms, patience: Optional[int], min_replicas: int, limit: int
) -> Steps[Optional[Tenure]]:
    """Returns the tenure, or None if the lock is busy. Whatever happens, what may have been granted unheard is released
    in the background. A `patience` of None waits without bound, one of 0 is one try; in microseconds.
    """
    ttl, one_try, started_at = terms.ttl, patience == 0, now()
    deadline = None if patience is None else started_at + patience
    back_off, tries, in_doubt = FIRST_BACK_OFF, 0, False

    def new_owner() -> bytes:
        return b"%b:%b" % (label, _uuid())

    def time_left() -> bool:
        return deadline is None or deadline - now() >= MILLISECOND

    def until(at: int) -> int:
        """One try may take its time; a wait that is over is over."""
        if one_try:
            return min(at, started_at + LONGEST_ATTEMPT)
        return at if deadline is None else min(at, deadline + OVERTIME)

    owner = new_owner()
    try:
        while True:
            tries += 1
            undo = replies.release(key, owner)
            # A refused command changed nothing: what is in doubt then is what was before.
            doubted, trouble, waiting = in_doubt, None, False
            try:
                if not place.is_known():
                    yield Learn(until(now() + LONGEST_ATTEMPT))
                watchdog_of(place.route(key)[0]).start()
                in_doubt, sent_at = True, now()
                command = replies.acquire(key, owner, ttl, limit)
                reply, _ = yield from ask(place, key, command, until(sent_at + LONGEST_ATTEMPT), undo, min_replicas)
                fence = replies.read_fence(reply)
                if fence is None and time_left():
                    waiting, sent_at = True, now()
                    left = MAX_TTL if deadline is None else deadline - sent_at
                    reply = yield from wait(
                        place,
                        key,
                        replies.acquire(key, owner, ttl, limit, left),
                        None if deadline is None else deadline + OVERTIME,
                        undo,
                        replies.renew(key, owner, ttl),
                        interval=min(ttl // 3, LONGEST_ATTEMPT),
                    )
                    fence = replies.read_fence(reply)
                # Whoever handed it over wrote it, which our connection could not ask the replicas about.
                must_renew = waiting and min_replicas > 0
                if fence is not None and (must_renew or terms.is_stale(sent_at, now())):
                    # Some of the lease is gone already: what can be counted on starts with a renewal.
                    waiting, sent_at = False, now()
                    command, span = replies.renew(key, owner, ttl), max(terms.attempt, SECOND)
                    reply, _ = yield from ask(place, key, command, until(sent_at + span), undo, min_replicas)
                    if replies.read_answer(reply) is not Answer.YES:
                        fence = None
                if fence is not None:
                    lease = Lease(terms, sent_at, now())
                    entry = Entry(place, key, owner, lease, min_replicas, fence, limit)
                    entry.sharing_in_doubt = doubted and limit != EXCLUSIVE
                    tenure = Tenure(entry)
                    # Not before somebody else answers for it: an exception may be thrown anywhere.
                    in_doubt = False
                    return tenure
                in_doubt = doubted
                # Else the place was given up before its time, by CLIENT UNBLOCK or somebody who released in
                # our name; or the grant had lapsed.
                if not time_left():
                    return None
            except (RefusedError, UnreachableError) as error:
                trouble = error
                few = isinstance(error, RefusedError) and error.line.startswith("NOREPLICAS")
                if isinstance(error, UnreachableError) and error.released:
                    # The release that is under way behind the request would give the next grant away.
                    give_up_in_doubt(place, key, owner, terms)
                    owner, in_doubt = new_owner(), False
                elif not few and (isinstance(error, RefusedError) or not error.sent):
                    in_doubt = doubted
                # One that was never there is most likely a wrong address: worth a wait that ends, no more.
                may_come = isinstance(error, UnreachableError) and error.may_come
                bounded = may_come and deadline is not None and not one_try
                if not (error.passing or bounded) or (one_try and (few or tries == 2)):
                    raise
            at = now() + back_off
            yield BackOff(at if one_try or deadline is None else min(at, deadline))
            back_off = min(back_off * 2, LAST_BACK_OFF)
            if not one_try and not time_left():
                # A server that was silent until the end of the wait has told nothing but that.
                if trouble is not None:
                    raise trouble
                return None
    finally:
        if in_doubt:
            give_up_in_doubt(place, key, owner, terms)
