"""Core: the holder's view of its lease. No clock, no I/O: `Lease.next` is told what time it is and
says what to do; whoever carries that out reports back with `Lease.answered`.

What always holds, whatever is answered and however late:

1. `ends_at` is never later than the end the server keeps for this owner.
2. A lease that was lost or given up is never renewed again.
3. A loss is said exactly once, and by silence no later than the first look after `ends_at`.

All times are whole microseconds since boot, and every quotient of a ttl is rounded down to one
before it is used, so that helpers in all languages count the same to the microsecond.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Optional, Union

MILLISECOND = 1_000
SECOND = 1_000_000

#: The shortest ttl that is taken: below it a sixth of it for an attempt is less than what one exchange over
#: a network with a busy machine at either end may need.
MIN_TTL = 100 * MILLISECOND

#: The longest that the module takes.
MAX_TTL = (2**53 - 1) * MILLISECOND

#: Nothing is counted further ahead, 35 years: a sum with the time since boot then stays below 2^53, up to
#: which the numbers of JavaScript are exact.
FURTHEST = 2**50

#: The longest that one attempt, one try or a release that a caller waits for may take. Whatever the ttl: a
#: server that has not answered by then will not.
LONGEST_ATTEMPT = 5 * SECOND

#: The first back-off after a release that failed: its caller is waiting, and the likely reason is a
#: connection that broke long ago.
RELEASE_BACK_OFF = 500 * MILLISECOND


class Lost(str, Enum):
    """Why a lock is not held any longer."""

    #: The server says that another owner holds it.
    TAKEN = "taken"
    #: The server says that nobody holds it: it was deleted, evicted, or had run out.
    GONE = "gone"
    #: No renewal was acknowledged in time: the lease has ended by our own clock.
    EXPIRED = "expired"
    #: It was held for `max_hold`, and is not renewed any more.
    MAX_HOLD = "max_hold"

    def __str__(self) -> str:
        return _REASONS[self]


_REASONS = {
    Lost.TAKEN: "another owner holds it",
    Lost.GONE: "it is gone from the server",
    Lost.EXPIRED: "it could not be renewed before it ended",
    Lost.MAX_HOLD: "it was held as long as it may be",
}


class Terms:
    """What the holder agreed to when it acquired, in microseconds."""

    __slots__ = ("_believed", "_counted", "attempt", "margin", "max_hold", "renew", "ttl")

    def __init__(self, ttl: int, max_hold: Optional[int] = None, renew: bool = True) -> None:
        #: Without `renew` the lease just ends.
        self.ttl, self.max_hold, self.renew = ttl, max_hold, renew
        self._counted = counted = _counted(ttl)
        #: How much earlier than the server we let the lease end: one per cent for two clocks that run at
        #: different speeds, and 2 ms because the server counts in whole milliseconds.
        self.margin = counted // 100 + 2 * MILLISECOND
        self._believed = max(0, counted - self.margin)
        #: The longest that one attempt may take: four of them fit between the first, at a third of the ttl,
        #: and the end.
        self.attempt = min(counted // 6, LONGEST_ATTEMPT)

    def of(self, ttl: int) -> Terms:
        """The same for another ttl."""
        return self if ttl == self.ttl else Terms(ttl, self.max_hold, self.renew)

    def ends_at(self, sent_at: int) -> int:
        """Until when a lease may be believed that was asked for at `sent_at`. Counted from before the request
        left, so that a slow reply can only make us stop too early, never too late.
        """
        return sent_at + self._believed

    def is_stale(self, sent_at: int, now: int) -> bool:
        """Whether so much of the lease is gone that a holder should renew before it begins to work."""
        return self.ends_at(sent_at) - now < self._counted * 2 // 3

    def renew_at(self, sent_at: int) -> int:
        """When to renew what was asked for at `sent_at`: at a third of the ttl, or up to a 1200th of it sooner,
        so that the renewals of many locks fall on the same moments and travel together.
        """
        due_at = sent_at + self._counted // 3
        return due_at - due_at % max(1, self._counted // 1200)

    def renew_extended_at(self, ends_at: int) -> int:
        """When to renew a lease that was extended until `ends_at`: when the ttl is what remains. Sooner, a
        renewal would cut the lease to the ttl again.
        """
        return max(0, ends_at - self._believed)

    def back_off(self, failures: int, first: int = FURTHEST) -> int:
        """How long to wait after the `failures`-th failure in a row, so that a server that is down is asked
        some ten times before the lease ends and not thousands of times.
        """
        first = min(first, self._counted // 60)
        return min(first << min(max(0, failures - 1), 20), self._counted // 12)


def _counted(duration: int) -> int:
    return min(duration, FURTHEST)


class Sleep(NamedTuple):
    """Nothing before then."""

    until: int


class Idle(NamedTuple):
    """Nothing until the holder speaks."""


class Renew(NamedTuple):
    """Send RENEW with this ttl and report the answer, by `give_up_at` at the latest."""

    ttl: int
    give_up_at: int


class Release(NamedTuple):
    """Send RELEASE and report the answer, by `give_up_at` at the latest."""

    give_up_at: int


class Lose(NamedTuple):
    """Tell the holder, once."""

    lost: Lost


class End(NamedTuple):
    """Forget this lease."""


Action = Union[Sleep, Idle, Renew, Release, Lose, End]


class _State(Enum):
    HELD = 1
    #: The server refused it, and the holder has not been told yet.
    REFUSED = 2
    #: The holder was told that it is lost, and has not let go yet.
    LOST = 3
    GIVING_UP = 4
    #: As before, but it may be another's by now: one attempt.
    GIVING_UP_ONCE = 5
    ENDED = 6


class Answer(Enum):
    """How an attempt ended."""

    YES = "yes"
    #: The server said no, which is final.
    TAKEN = "taken"
    GONE = "gone"
    #: Nobody answered, or with an error: whether it was carried out is not known.
    FAILED = "failed"


_REFUSED = {Answer.TAKEN: Lost.TAKEN, Answer.GONE: Lost.GONE}


class Lease:
    """One lease, from the grant to its end."""

    __slots__ = (
        "_due_at",
        "_extension",
        "_hold_until",
        "_in_flight",
        "_not_before",
        "_refusal",
        "_state",
        "ends_at",
        "failures",
        "lost",
        "release_in_doubt",
        "terms",
    )

    def __init__(self, terms: Terms, sent_at: int, now: int) -> None:
        """A lease that was granted: asked for at `sent_at`, known at `now`."""
        self.terms = terms
        #: Until when the holder may believe that the lock is its own.
        self.ends_at = terms.ends_at(sent_at)
        #: Failures in a row since the server last answered.
        self.failures = 0
        #: The loss that the holder was told, or will be when it lets go.
        self.lost: Optional[Lost] = None
        #: A release was sent and nobody answered: it may have been carried out.
        self.release_in_doubt = False
        self._state = _State.HELD
        self._hold_until = None if terms.max_hold is None else now + _counted(terms.max_hold)
        #: When the next attempt is due: never, in 35 years, for one that is not renewed.
        self._due_at = terms.renew_at(sent_at) if terms.renew else sent_at + FURTHEST
        #: When the attempt in flight was sent, which names it, and its ttl, none of a release.
        self._in_flight: Optional[tuple[int, Optional[int]]] = None
        #: The ttl of the next renewal, if it is to be another than agreed.
        self._extension: Optional[int] = None
        self._not_before = 0
        self._refusal = Lost.GONE

    @classmethod
    def in_doubt(cls, terms: Terms, now: int) -> Lease:
        """A lease of which nobody knows whether it was granted: only good for giving it up. Whatever the server
        granted ends by itself one ttl from now.
        """
        lease = cls(terms, now, now)
        lease.give_up(now, now)
        return lease

    @property
    def due_at(self) -> int:
        """Before then there is nothing to do."""
        until = min(self._due_at, self.ends_at)
        return until if self._hold_until is None else min(until, self._hold_until)

    @property
    def given_up(self) -> bool:
        """Whether the holder has let go."""
        return self._state in (_State.GIVING_UP, _State.GIVING_UP_ONCE, _State.ENDED)

    @property
    def unanswered(self) -> bool:
        """Whether an attempt is in flight."""
        return self._in_flight is not None

    def renew_now(self, now: int) -> None:
        """The holder wants to hear from the server now."""
        self._due_at = min(self._due_at, now)

    def extend(self, ttl: int, now: int) -> None:
        """The holder wants the lease to last for `ttl` from now, this once: what is renewed after that is
        renewed for the ttl that was agreed, and not before that is what remains.
        """
        self._extension = _counted(ttl)
        self.renew_now(now)

    def give_up(self, not_before: int, now: int) -> None:
        """The holder lets go, but wants the lock kept until `not_before`. An attempt in flight is forgotten."""
        if self.given_up:
            return
        if self._state is _State.REFUSED:
            self.lost = self._refusal
        elif self._state is _State.HELD and now >= self.ends_at:
            self.lost = Lost.EXPIRED
        # Never at the moment of the attempt that is forgotten, whose answer has this name.
        self._due_at = now
        if self._in_flight is not None and self._in_flight[0] >= now:
            self._due_at = self._in_flight[0] + 1
        self._in_flight = None
        self.failures = 0
        if self.lost in (Lost.TAKEN, Lost.GONE):
            # The server would say no: there is nothing of ours to release.
            self._state = _State.ENDED
        elif self.lost is None or (self.lost is Lost.MAX_HOLD and now < self.ends_at):
            self._state, self._not_before = _State.GIVING_UP, not_before
        else:
            # Should the server still keep it for us, it is freed.
            self.ends_at = now + self.terms.attempt
            self._state, self._not_before = _State.GIVING_UP_ONCE, now

    def next(self, now: int) -> Action:
        """What to do at `now`. An action is given once; asking again gives what comes after it."""
        if self._state is _State.HELD:
            return self._keep(now)
        if self._state is _State.REFUSED:
            return self._lose(self._refusal)
        if self._state is _State.LOST:
            return Idle()
        if self._state is _State.ENDED:
            return End()
        return self._let_go(now)

    def _keep(self, now: int) -> Action:
        if now >= self.ends_at:
            return self._lose(Lost.EXPIRED)
        if self._hold_until is not None and now >= self._hold_until:
            return self._lose(Lost.MAX_HOLD)
        until = self.ends_at if self._hold_until is None else min(self.ends_at, self._hold_until)
        if self._in_flight is not None:
            return Sleep(until)
        if now < self._due_at:
            return Sleep(min(until, self._due_at))
        ttl = _counted(self.terms.ttl) if self._extension is None else self._extension
        # A shorter one than what remains counts at once: it may be carried out unheard.
        self.ends_at = min(self.ends_at, self.terms.of(ttl).ends_at(now))
        return Renew(ttl, self._attempt(now, ttl))

    def _let_go(self, now: int) -> Action:
        # From here on the server has let it go by itself.
        if now >= self.ends_at:
            self._state = _State.ENDED
            return End()
        if self._in_flight is not None:
            return Sleep(self.ends_at)
        if now < self._due_at:
            return Sleep(min(self._due_at, self.ends_at))
        ttl = self._not_before - now
        if ttl <= 0:
            return Release(self._attempt(now, None))
        return Renew(ttl, self._attempt(now, ttl))

    def _attempt(self, now: int, ttl: Optional[int]) -> int:
        self._in_flight = (now, ttl)
        return min(now + self.terms.attempt, self.ends_at)

    def _lose(self, lost: Lost) -> Lose:
        self._state, self.lost = _State.LOST, lost
        return Lose(lost)

    def answered(self, sent_at: int, answer: Answer, now: int) -> bool:
        """The attempt that was begun at `sent_at` has ended. False if nobody waits for it any more."""
        if self._in_flight is None or self._in_flight[0] != sent_at:
            return False
        ttl = self._in_flight[1]
        self._in_flight = None
        if self._state is _State.GIVING_UP_ONCE:
            self._state = _State.ENDED
        elif self._state is _State.GIVING_UP:
            if answer is not Answer.FAILED:
                self._state = _State.ENDED
            else:
                self.release_in_doubt = self.release_in_doubt or ttl is None
                self.failures += 1
                self._due_at = now + self.terms.back_off(self.failures, RELEASE_BACK_OFF)
        elif answer is Answer.FAILED:
            self.failures += 1
            self._due_at = now + self.terms.back_off(self.failures)
        elif self._state is _State.HELD and answer is not Answer.YES:
            # Said by `next`, so that there is one place where a loss is told.
            self._state, self._refusal = _State.REFUSED, _REFUSED[answer]
        elif self._state is _State.HELD and now < self.ends_at:
            # A yes that is read after the end comes too late: the end may have been acted upon.
            self._renewed(sent_at, self.terms.ttl if ttl is None else ttl, now)
        return True

    def _renewed(self, sent_at: int, ttl: int, now: int) -> None:
        self.failures = 0
        carried = self.terms.of(ttl)
        self.ends_at = carried.ends_at(sent_at)
        if self.terms.renew:
            self._due_at = max(carried.renew_at(sent_at), self.terms.renew_extended_at(self.ends_at))
        else:
            self._due_at = sent_at + FURTHEST
        if self._extension is not None and self._extension != ttl:
            # It was asked for while a renewal was in flight.
            self._due_at = now
        else:
            self._extension = None
