"""One command and its reply, or a wait in the server's queue, over connections of our own.

Written once, as generators that yield what they wait for: the lock for threads waits for it in its thread, that for
asyncio in its loop. Whatever ends them, an exception thrown in from anywhere too, leaves no request in doubt behind.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple, Optional, TypeVar, Union

from . import replies
from .clock import now
from .connections import Node, Place, end, read, send
from .errors import BROKEN, REPLIED, RefusedError, UnreachableError, is_elsewhere
from .lease import LONGEST_ATTEMPT, SECOND, Answer
from .promise import Promise
from .replies import Command, Key
from .watchdog import watchdog_of


class Learn(NamedTuple):
    """Wait until the client knows the map of its cluster."""

    until: int


class Dial(NamedTuple):
    """Wait for a fresh connection to the node, and get it."""

    node: Node
    until: int


class Reply(NamedTuple):
    """Wait for a reply, and get whether one came in time."""

    connection: Any
    until: int


class Outcome(NamedTuple):
    """Wait for what the watchdog is at, without bound by default, and get whether it was done in time."""

    promise: Promise[Any]
    until: Optional[int] = None


class BackOff(NamedTuple):
    """Do nothing until then."""

    until: int


_T = TypeVar("_T")
Steps = Generator[Union[Learn, Dial, Reply, Outcome, BackOff], Any, _T]


class OutOfTime(Exception):
    """Nobody answered: what was asked is under way."""


def ask(
    place: Place, key: Key, command: Command, until: int, undo: Optional[Command] = None, min_replicas: int = 0
) -> Steps[tuple[Any, bool]]:
    """Returns the reply to `command`, and whether it may have been carried out before, too: it was sent again after a
    kept connection turned out to be dead. Should the outcome be unknown, `undo` is sent behind it.

    Raises:
        UnreachableError, RefusedError
    """
    if not place.is_known():
        yield Learn(until)
    node, asking = place.route(key)
    commands: list[Command] = [("ASKING",)] * asking + [command]
    if min_replicas:
        commands.append(replies.replicas(min_replicas, until - now()))
    connection, sent, again = node.take_idle(), False, False
    kept = connection is not None
    try:
        while True:
            if connection is None:
                kept, connection = False, (yield Dial(node, until))
            try:
                sent = True
                send(connection, *commands)
                answers = []
                for _ in commands:
                    if not (yield Reply(connection, until)):
                        raise OutOfTime
                    answers.append(_read(connection))
                if not (kept and any(map(is_elsewhere, answers))):
                    break
                # Behind the same address there may be another server by now.
            except BROKEN:
                if not kept:
                    raise
                again = True
            connection.disconnect()
            connection = None
    except BaseException as error:
        raise _failed(place, key, node, error, connection, undo, sent=sent)
    node.give(connection)
    reply = _judged(place, key, node, answers[-2 if min_replicas else -1])
    if min_replicas and reply is not None and not (isinstance(answers[-1], int) and answers[-1] >= min_replicas):
        raise RefusedError(f"NOREPLICAS {answers[-1]} acknowledged, {min_replicas} are needed")
    return reply, again


def wait(
    place: Place, key: Key, command: Command, until: Optional[int], undo: Command, renew: Command, interval: int
) -> Steps[Any]:
    """Returns the reply to `command`, which waits in the server's queue. Asks every `interval` over another connection
    whether the server is still there and still the master, and knows of the wait; its errors are the wait's.
    """
    node, asking = place.route(key)
    connection = node.take_idle()
    try:
        if connection is None:
            connection = yield Dial(node, now() + LONGEST_ATTEMPT)
        send(connection, *[("ASKING",)] * asking, command)
        if asking:
            read(connection)
        probe_at = now() + interval
        while not (yield Reply(connection, probe_at if until is None else min(probe_at, until))):
            at = now()
            if until is not None and at >= until:
                raise OutOfTime
            if at >= probe_at:
                # A busy machine is no reason to lose the place in the queue.
                limit = at + max(interval, SECOND)
                try:
                    yield from _probe(place, key, renew, limit if until is None else min(limit, until))
                    if place.route(key)[0] is not node:
                        raise UnreachableError(f"{node} does not answer for the key any more")
                except (RefusedError, UnreachableError):
                    # Unless it has answered meanwhile. The same owner, asking again, keeps its place.
                    if not connection.can_read(0):
                        raise
                probe_at = now() + interval
        answer = _read(connection)
    except BaseException as error:
        raise _failed(place, key, node, error, connection, undo)
    node.give(connection)
    return _judged(place, key, node, answer)


def _probe(place: Place, key: Key, renew: Command, until: int) -> Steps[None]:
    """Behind the same address there may be another server by now, which knows nothing of a wait."""
    granted = UnreachableError("its grant went unheard: the same owner is to ask again")
    if place.info_refused:
        # A renewal of what is not held yet changes nothing, and is what a user may do who may not look.
        reply, _ = yield from ask(place, key, renew, until)
        if replies.read_answer(reply) is Answer.YES:
            raise granted
        return
    try:
        reply, _ = yield from ask(place, key, replies.info(key), until)
    except RefusedError as error:
        if error.passing:
            raise
        place.info_refused = True
        return
    info = replies.read_info(reply)
    if info is not None and renew[2] in [each.owner for each in info.holders]:
        raise granted
    if info is None or not info.may_queue(renew[2]):
        raise UnreachableError(f"who answers for {place.route(key)[0]} knows nothing of the wait")


def _read(connection: Any) -> Any:
    """The next reply, errors included."""
    try:
        return read(connection)
    except REPLIED as error:
        return error


def _judged(place: Place, key: Key, node: Node, reply: Any) -> Any:
    if isinstance(reply, Exception):
        raise _refused(place, key, node, reply)
    return reply


def _failed(
    place: Place,
    key: Key,
    node: Node,
    error: BaseException,
    connection: Any,
    undo: Optional[Command],
    *,
    sent: bool = True,
) -> BaseException:
    """What is to be raised. A connection that still works carries `undo` behind the request, and is read to its end."""
    known = isinstance(error, (*BROKEN, *REPLIED))
    if connection is not None:
        if undo is None or known:
            connection.disconnect()
        else:
            watchdog_of(node).drain(end(connection, undo))
    if isinstance(error, OutOfTime):
        late = UnreachableError(f"{node} did not answer in time")
        late.released, error, known = undo is not None, late, True
    if not known:
        return error
    ours = _refused(place, key, node, error)
    if isinstance(ours, UnreachableError):
        ours.passing, ours.sent = node.reached, sent
    ours.__cause__ = None if ours is error else error
    return ours


def _refused(place: Place, key: Key, node: Node, error: BaseException) -> Union[RefusedError, UnreachableError]:
    """The error as one of ours, after the place has heard of it."""
    ours = replies.translated(error, str(node))
    place.failed(key, node, ours)
    return ours
