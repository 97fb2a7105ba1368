"""Connections of our own to the servers that the user's client is configured for.

The user's client has a will of its own: it sends again, gives up or queues as it was told. So what
we ask travels on connections that are made from its settings, but with our limits and no retries.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
import threading
import weakref
from collections import deque
from contextlib import suppress
from importlib import import_module
from inspect import signature
from itertools import chain
from typing import Any, Callable, Optional, Union

from .clock import now
from .errors import LIBRARIES, InvalidError, RefusedError, UnreachableError, is_elsewhere
from .lease import LONGEST_ATTEMPT, SECOND
from .replies import Command, Key

logger = logging.getLogger("redis_lockkeeper")

#: The longest that dialling, or one read or write, may take, in seconds.
LIMIT = LONGEST_ATTEMPT / SECOND

#: How long a connection is kept that nobody needs: a fresh one costs a handshake, HELLO, AUTH, SELECT.
KEEP = 10 * SECOND

_CLIENTS = {"Redis", "Valkey", "RedisCluster", "ValkeyCluster"}
_KINDS = {"Connection", "SSLConnection", "UnixDomainSocketConnection"}


def _settings(library: str, kind: type, kwargs: dict[str, Any]) -> tuple[type, dict[str, Any]]:
    """The class of our connections, and what they are made of. A client for asyncio has classes of its own, in whose
    place come those for threads.
    """
    name = kind.__name__.replace("SentinelManaged", "")
    crossing = any(".asyncio." in each.__module__ for each in kind.__mro__)
    if crossing or name != kind.__name__:
        module = import_module(f"{library}.connection")
        name = name if hasattr(module, name) else "Connection"
        unknown = name not in _KINDS or kind.__module__.partition(".")[0] != library
        if unknown or (crossing and kwargs.get("redis_connect_func")):
            raise InvalidError(f"connections of the class {kind.__name__} cannot be made in a thread, as renewals are")
        kind = getattr(module, name)
    taken = {name for each in kind.__mro__ for name in signature(each.__init__).parameters}  # type: ignore[misc]
    own: dict[str, Any] = {
        "retry": import_module(f"{library}.retry").Retry(import_module(f"{library}.backoff").NoBackoff(), 0),
        "retry_on_timeout": False,
        "retry_on_error": [],
        "health_check_interval": 0,
        "socket_timeout": LIMIT,
        "socket_connect_timeout": LIMIT,
        "decode_responses": False,
    }
    # CLIENT SETINFO would cost two commands a connection.
    if "driver_info" in taken:
        own["driver_info"] = None
    elif "lib_name" in taken:
        own.update(lib_name=None, lib_version=None)
    if crossing:
        # The parser of the other face reads nothing here.
        taken.discard("parser_class")
    ignored = ("maint_", "orig_", "oss_", "lib_", "connection_pool")
    kept = {name: value for name, value in kwargs.items() if name in taken and not name.startswith(ignored)}
    return kind, {**kept, **own}


class Node:
    """One server, or whichever is the master now: where our connections to it come from."""

    def __init__(
        self,
        library: str,
        kind: type,
        kwargs: dict[str, Any],
        find: Optional[Callable[[], dict[str, Any]]] = None,
    ) -> None:
        self.kind, self.kwargs = _settings(library, kind, kwargs)
        self._find = find
        self._idle: deque[tuple[Any, int]] = deque()
        #: Whether it ever answered: one that never did is most likely a wrong address.
        self.reached = False

    def __str__(self) -> str:
        kwargs = self.kwargs
        if self._find is not None:
            return "the master"
        host, port = kwargs.get("host", "localhost"), kwargs.get("port", 6379)
        return str(kwargs["path"]) if "path" in kwargs else f"{host}:{port}"

    def dial(self, limit: float = LIMIT) -> Any:
        """A fresh connection, after `limit` seconds at the latest."""
        connection: Any = self.kind(**{**self.kwargs, **(self._find() if self._find else {})})
        connection.socket_timeout = connection.socket_connect_timeout = max(limit, 0.001)
        connection.connect()
        connection.socket_timeout = LIMIT
        connection._sock.settimeout(LIMIT)
        self.reached = True
        return connection

    def take_idle(self) -> Any:
        """A connection that was used before, or None. It may have died without our knowing."""
        while True:
            try:
                connection, _ = self._idle.pop()
            except IndexError:
                return None
            # Readable is one that the server ended.
            if not _readable(connection._sock):
                return connection
            connection.disconnect()

    def give(self, connection: Any) -> None:
        """Back, after its reply was read."""
        self._idle.append((connection, now()))

    def close_idle(self, since: int) -> int:
        """Closes what has not been used since then; returns how many are left."""
        with suppress(IndexError):
            while self._idle[0][1] <= since:
                self._idle.popleft()[0].disconnect()
        return len(self._idle)


def send(connection: Any, *commands: Command) -> None:
    """Not by `send_command`, which throws the connection away when a signal's exception comes in between: then
    nothing could be sent behind the request any more.
    """
    connection._sock.sendall(b"".join(chain.from_iterable(connection.pack_command(*command) for command in commands)))


def read(connection: Any) -> Any:
    """The next reply. Error replies are raised, and leave the connection usable."""
    return connection.read_response(disconnect_on_error=False)


def end(connection: Any, command: Command) -> Optional[socket.socket]:
    """Sends `command` behind what was sent and closes our half, so that the server reads all of it and a wait
    ends. The socket is to be read to its end and then closed: closed now, it might be reset, and what was
    sent be lost.
    """
    sock: Optional[socket.socket] = connection._sock
    connection._sock = None
    connection.disconnect()
    if sock is None:
        return None
    try:
        # Should its buffer be full, the server reads nothing: what is in it is not worth a wait.
        sock.settimeout(0.1)
        sock.sendall(b"".join(connection.pack_command(*command)))
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        sock.close()
        return None
    return sock


def _readable(sock: socket.socket) -> bool:
    if not hasattr(select, "poll"):
        return bool(select.select([sock], [], [], 0)[0])
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


class Place:
    """Where the keys of one client live."""

    def __init__(self, node: Optional[Node] = None) -> None:
        self._node = node
        #: Whether LOCK.INFO was refused, so that nobody asks it again and again.
        self.info_refused = False

    def is_known(self) -> bool:
        """Whether the client knows where they live."""
        return True

    def route(self, key: Key) -> tuple[Node, bool]:
        """The node that answers for this key now, and whether it wants to hear ASKING first."""
        assert self._node is not None
        return self._node, False

    def failed(self, key: Key, node: Node, error: Union[RefusedError, UnreachableError]) -> None:
        """A node failed to answer for this key: next time it may be another."""
        if is_elsewhere(error):
            node.close_idle(now())


class ClusterPlace(Place):
    """The nodes of a cluster: by the client's map, unless a node said MOVED."""

    def __init__(self, client: Any, library: str, *, asynchronous: bool) -> None:
        super().__init__()
        self._client = weakref.ref(client)
        self._library, self._asynchronous = library, asynchronous
        self._key_slot = import_module(f"{library}.crc").key_slot
        self._nodes: dict[tuple[Any, Any], Node] = {}
        self._moved: dict[int, Node] = {}
        self._asked: dict[Key, Node] = {}
        self._refreshing = threading.Lock()
        #: The event loop that the client lives in.
        self.loop: Any = None

    def is_known(self) -> bool:
        # One for asyncio asks when it is first used, one for threads when it is made.
        client = self._client()
        return not self._asynchronous or client is None or bool(client.nodes_manager.slots_cache)

    def _slot(self, key: Key) -> int:
        slot: int = self._key_slot(key.encode() if isinstance(key, str) else bytes(key))
        return slot

    def route(self, key: Key) -> tuple[Node, bool]:
        # Once: other keys of a slot on its way, and this one tomorrow, may be with the old node.
        asked = self._asked.pop(key, None)
        if asked is not None:
            return asked, True
        slot, client = self._slot(key), self._client()
        if slot in self._moved or client is None:
            return self._moved.get(slot) or next(iter(self._nodes.values())), False
        try:
            found = client.nodes_manager.get_node_from_slot(slot)
        except Exception as error:
            raise UnreachableError(f"no node is known for the slot {slot}: {error}") from error
        if self._asynchronous:
            return self._node_at(found.connection_class, found.connection_kwargs), False
        pool = getattr(client, f"get_{self._library}_connection")(found).connection_pool
        return self._node_at(pool.connection_class, pool.connection_kwargs), False

    def _node_at(self, kind: type, kwargs: dict[str, Any]) -> Node:
        address = (kwargs.get("host"), kwargs.get("port"))
        if address not in self._nodes:
            # The client's own callback would keep the client alive, for the sake of replicas.
            kwargs = {name: value for name, value in kwargs.items() if name != "redis_connect_func"}
            self._nodes[address] = Node(self._library, kind, kwargs)
        return self._nodes[address]

    def failed(self, key: Key, node: Node, error: Union[RefusedError, UnreachableError]) -> None:
        code, *words = error.line.split() if isinstance(error, RefusedError) else [""]
        if code in ("MOVED", "ASK"):
            host, _, port = words[1].rpartition(":")
            to = self._node_at(node.kind, {**node.kwargs, "host": host or node.kwargs["host"], "port": int(port)})
            if code == "ASK":
                self._asked[key] = to
            else:
                self._moved[int(words[0])] = to
        else:
            super().failed(key, node, error)
            self._moved.pop(self._slot(key), None)
            self.refresh()

    def refresh(self) -> None:
        """Learns the map anew, in a thread of its own, or in the client's loop: the client takes its time."""
        client = self._client()
        if client is None or not self._refreshing.acquire(blocking=False):
            return

        def learn() -> None:
            try:
                learnt = client.nodes_manager.initialize()
                if self._asynchronous:
                    asyncio.run_coroutine_threadsafe(learnt, self.loop).result(LIMIT)
            except Exception as error:
                logger.debug("the map of the cluster cannot be had: %s", error)
            finally:
                self._refreshing.release()

        threading.Thread(target=learn, name="lockkeeper-map", daemon=True).start()


def _master(library: str, pool: Any) -> Callable[[], dict[str, Any]]:
    """Asks the sentinels of a pool, over connections of our own."""
    manager, service = pool.sentinel_manager, pool.service_name
    addresses = [sentinel.connection_pool.connection_kwargs for sentinel in manager.sentinels]
    retry = import_module(f"{library}.retry").Retry(import_module(f"{library}.backoff").NoBackoff(), 0)
    own = import_module(f"{library}.sentinel").Sentinel(
        [(each["host"], each["port"]) for each in addresses],
        min_other_sentinels=manager.min_other_sentinels,
        sentinel_kwargs={
            **manager.sentinel_kwargs,
            "socket_timeout": 1,
            "socket_connect_timeout": 1,
            "retry": retry,
        },
    )

    def find() -> dict[str, Any]:
        try:
            host, port = own.discover_master(service)
            return {"host": host, "port": port}
        finally:
            for sentinel in own.sentinels:
                sentinel.connection_pool.disconnect()

    return find


_places: weakref.WeakKeyDictionary[Any, Place] = weakref.WeakKeyDictionary()
_mutex = threading.Lock()


def _forget() -> None:
    """A forked child shares no connection with its parent."""
    global _places, _mutex
    _places, _mutex = weakref.WeakKeyDictionary(), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def place_of(client: Any, *, asynchronous: bool) -> Place:
    """Where the keys of this client live: one for all clients of a pool.

    Raises:
        InvalidError: if it is no client of redis-py or valkey-py, or one for the other kind of Lock.
    """
    own = next((each for each in type(client).__mro__ if each.__module__.partition(".")[0] in LIBRARIES), object)
    library, _, module = own.__module__.partition(".")
    if own.__name__ not in _CLIENTS or module.startswith("asyncio") is not asynchronous:
        kind = "an asyncio client" if asynchronous else "a client"
        raise InvalidError(f"the lock needs {kind} of redis-py or valkey-py, got {type(client).__qualname__}")
    cluster = own.__name__.endswith("Cluster")
    # The map of a cluster is its client's.
    pool = client if cluster else client.connection_pool
    with _mutex:
        place = _places.get(pool)
        if place is None:
            if cluster:
                place = ClusterPlace(client, library, asynchronous=asynchronous)
            else:
                find = _master(library, pool) if hasattr(pool, "sentinel_manager") else None
                place = Place(Node(library, pool.connection_class, pool.connection_kwargs, find))
            _places[pool] = place
        return place
