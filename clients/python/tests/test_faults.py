"""What becomes of locks when servers, networks and clients are not well. Each scenario is run for threads and for
asyncio where they differ.
"""

import asyncio
import threading
import time
from contextlib import suppress

import pytest

import redis_lockkeeper
from conftest import AsyncClient, Client, Proxy, Server, eventually, exceptions, library, renewed
from redis_lockkeeper import Lock, LockLostError, Lost, UnreachableError
from redis_lockkeeper.asyncio import Lock as AsyncLock
from redis_lockkeeper.asyncio import settled


class Threads:
    """The lock for threads, asked the same way as that for asyncio."""

    def __init__(self, port, **settings):
        self.client = Client(port=port, **settings)

    def lock(self, name, **settings):
        return Lock(self.client, name, thread_local=False, **settings)

    def run(self, call, *args, **more):
        return call(*args, **more)

    def end(self):
        redis_lockkeeper.settled(5)


class Tasks:
    """In a loop that turns in a thread of its own."""

    def __init__(self, port, **settings):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.client = self.run(self._client, port, settings)

    async def _client(self, port, settings):
        return AsyncClient(port=port, **settings)

    def lock(self, name, **settings):
        return AsyncLock(self.client, name, thread_local=False, **settings)

    def run(self, call, *args, **more):
        async def work():
            return await call(*args, **more)

        return asyncio.run_coroutine_threadsafe(work(), self.loop).result(60)

    def end(self):
        self.run(settled, 5)
        self.run(self.loop.shutdown_asyncgens)
        self.run(self.client.aclose)
        self.loop.call_soon_threadsafe(self.loop.stop)


@pytest.fixture(params=[Threads, Tasks], ids=["threads", "asyncio"])
def face(request):
    faces = []

    def make(port, **settings):
        faces.append(request.param(port, **settings))
        return faces[-1]

    yield make
    for each in faces:
        each.end()


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """What one test leaves to be given up, the next must not wait for."""
    yield
    assert redis_lockkeeper.settled(40)


def in_background(call, *args, **more):
    """Calls it in a thread; returns the thread and where the result will be."""
    result = []

    def work():
        try:
            result.append(call(*args, **more))
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, result


@pytest.mark.parametrize(
    "settings",
    [{"socket_timeout": 0.3}, {"socket_timeout": 0.3, "retry_on_timeout": True}, {"max_connections": 1}, {}],
    ids=["timeout", "timeout and retry", "small pool", "default"],
)
def test_a_request_is_sent_once_whatever_the_client_is_told(server, proxy, face, settings):
    face = face(proxy.port, **settings)
    warm = face.lock("warm up")
    face.run(warm.acquire)
    proxy.requested.clear()
    proxy.replies.clear()
    with pytest.raises(UnreachableError):
        face.run(face.lock("book").acquire, blocking_timeout=1)
    proxy.heal()
    face.run(warm.release)
    assert sum(sent.count(b"LOCK.ACQUIRE") for sent in proxy.requested) == 1


def test_a_wait_is_longer_than_the_clients_timeout(server, face):
    face = face(server.port, socket_timeout=0.2)
    held, lock = Lock(server.client(), "book"), face.lock("book")
    held.acquire()
    thread, result = in_background(face.run, lock.acquire, blocking_timeout=20)
    eventually(lambda: held.info().waiters == 1)
    time.sleep(0.6)
    held.release()
    thread.join(10)
    assert result == [True]
    calls = server.calls()
    assert calls["lock.acquire"] == 3, "one of the holder, a try and a wait"
    face.run(lock.release)


def test_a_used_up_pool_stops_no_renewal(server):
    client = server.client(max_connections=1)
    lock = Lock(client, "book", timeout=3)
    lock.acquire()
    thread, _ = in_background(client.blpop, "nothing", 20)
    renewed(lock)
    assert lock.owned()
    server.client().rpush("nothing", "something")
    thread.join(10)
    lock.release()


def test_a_request_that_arrives_after_we_hung_up_leaves_no_lock(server, proxy, face):
    face = face(proxy.port)
    warm = face.lock("warm up")
    face.run(warm.acquire)
    face.run(warm.release)
    proxy.hold()
    with pytest.raises(UnreachableError):
        face.run(face.lock("book").acquire, blocking_timeout=0.2)
    assert redis_lockkeeper.settled(10), "a release over another connection has overtaken it"
    assert server.calls()["lock.acquire"] == 1
    proxy.heal()
    eventually(lambda: server.calls()["lock.acquire"] == 2)
    eventually(lambda: server.calls()["lock.release"] >= 3, "a release behind it")
    assert server.client().get("book") is None


def test_a_grant_that_nobody_heard_of_is_given_back(server, proxy, face):
    face = face(proxy.port)
    warm = face.lock("warm up")
    face.run(warm.acquire)
    face.run(warm.release)
    proxy.replies.clear()
    thread, result = in_background(face.run, face.lock("book").acquire, blocking_timeout=1)
    eventually(lambda: server.client().get("book") is not None)
    # The connection is gone, and no other is to be had before the wait is over.
    proxy.accepting.clear()
    proxy.cut()
    thread.join(10)
    assert isinstance(result[0], UnreachableError)
    proxy.heal()
    eventually(lambda: server.client().get("book") is None, "a release over another connection")


def test_a_request_that_arrives_late_does_not_give_the_next_grant_away(server, proxy, face):
    face = face(proxy.port)
    warm = face.lock("warm up")
    face.run(warm.acquire)
    face.run(warm.release)
    proxy.hold()
    lock = face.lock("book")
    assert face.run(lock.acquire, blocking_timeout=20), "the second try, after 5 s, on another connection"
    before = server.calls()
    proxy.heal()
    eventually(lambda: server.calls()["lock.release"] > before["lock.release"])
    assert server.client().get("book") == lock.local.token
    face.run(lock.release)


def test_kept_connections_that_died_are_noticed(server, proxy, face):
    face = face(proxy.port)
    lock = face.lock("book")
    for _ in range(3):
        assert face.run(lock.acquire)
        proxy.cut()
        face.run(lock.release)
        proxy.cut()
    assert server.client().get("book") is None


def test_a_release_whose_reply_is_lost_is_a_release(server, proxy, face):
    face = face(proxy.port)
    lock = face.lock("book")
    face.run(lock.acquire)
    proxy.replies.clear()
    thread, result = in_background(face.run, lock.release)
    eventually(lambda: server.client().get("book") is None)
    proxy.cut()
    proxy.heal()
    thread.join(10)
    assert result == [None], "not lost: it was ours to the end"


def test_a_renewal_that_nobody_answers_is_tried_again_on_a_fresh_connection(server, proxy, face):
    face = face(proxy.port)
    lock = face.lock("book", timeout=4)
    face.run(lock.acquire)
    renewed(lock)
    proxy.replies.clear()
    eventually(lambda: proxy.dialled >= 2, "a second connection")
    proxy.heal()
    renewed(lock)
    face.run(lock.release)


def test_one_hanging_dial_is_not_waited_for(server, proxy):
    lock = Lock(Client(port=proxy.port), "book", timeout=6)
    lock.acquire()
    proxy.accepting.clear()
    proxy.cut()
    eventually(lambda: proxy.dialled >= 3, "a second dial beside the first")
    proxy.heal()
    renewed(lock)
    lock.release()


def test_a_loss_by_silence_is_told_before_the_server_can_give_the_lock_away(server, proxy, face):
    face, told = face(proxy.port), []
    lock = face.lock("book", timeout=2, on_lost=told.append)
    face.run(lock.acquire)
    proxy.requests.clear()
    eventually(lambda: lock.remaining() < server.client().pttl("book") / 1000, "what is asked later is less")
    eventually(lambda: told)
    assert lock.lost.is_set()
    assert lock.remaining() == 0
    proxy.cut()
    proxy.heal()
    with pytest.raises(LockLostError) as raised:
        face.run(lock.release)
    assert raised.value.lost is Lost.EXPIRED


def test_a_reply_that_took_long_shortens_what_we_believe(server, proxy, face):
    face = face(proxy.port)
    warm = face.lock("warm up")
    face.run(warm.acquire)
    proxy.requested.clear()
    proxy.replies.clear()
    lock = face.lock("book", timeout=6, renew=False)
    thread, _ = in_background(face.run, lock.acquire)
    eventually(lambda: server.client().get("book") is not None)
    time.sleep(0.5)
    proxy.heal()
    thread.join(10)
    left = server.client().pttl("book") / 1000
    entry = redis_lockkeeper.watchdog._watchdogs
    ends = [each.lease.ends_at for dog in entry for each in dog._entries if each.key == "book"]
    assert ends
    assert (ends[0] - redis_lockkeeper.clock.now()) / 1e6 < left, "counted from the reply"
    face.run(warm.release)


def test_a_grant_of_which_too_much_has_passed_is_renewed_before_it_is_handed_out(server, face):
    face = face(server.port)
    held, lock = Lock(server.client(), "book"), face.lock("book", timeout=3)
    held.acquire()
    thread, result = in_background(face.run, lock.acquire, blocking_timeout=20)
    eventually(lambda: held.info().waiters == 1)
    time.sleep(1.2)
    server.client().config_resetstat()
    held.release()
    thread.join(10)
    assert result == [True]
    assert server.calls()["lock.renew"] >= 1
    face.run(lock.release)


@pytest.mark.parametrize("answered", [True, False])
def test_a_server_that_restarts_is_waited_out(own_server, face, answered):
    face = face(own_server.port)
    held, lock = Lock(own_server.client(), "book"), face.lock("book", timeout=3)
    held.acquire()
    if answered:
        face.run(lock.info)
    thread, result = in_background(face.run, lock.acquire, blocking_timeout=30)
    eventually(lambda: held.info().waiters == 1)
    own_server.kill()
    time.sleep(0.3)
    own_server.start()
    thread.join(30)
    assert result == [True], "the restarted server knows of no holder"
    with pytest.raises(LockLostError):
        held.release()
    face.run(lock.release)


def test_who_waits_on_a_server_that_hangs_looks_for_it(server, proxy, face):
    """The wait's connection is silent anyway: only a question tells that nobody is there any more."""
    face = face(proxy.port)
    held, lock = Lock(server.client(), "book"), face.lock("book", timeout=3)
    held.acquire()
    thread, result = in_background(face.run, lock.acquire, blocking_timeout=30)
    eventually(lambda: held.info().waiters == 1)
    before = proxy.dialled
    proxy.replies.clear()
    eventually(lambda: proxy.dialled > before + 1, "it asks again")
    proxy.cut()
    proxy.heal()
    held.release()
    thread.join(30)
    assert result == [True]
    face.run(lock.release)


def test_a_server_that_hangs_does_not_prolong_a_wait(server, proxy, face):
    face = face(proxy.port)
    held = Lock(server.client(), "book")
    held.acquire()
    thread, result = in_background(face.run, face.lock("book").acquire, blocking_timeout=1)
    eventually(lambda: held.info().waiters == 1)
    proxy.replies.clear()
    started = time.monotonic()
    thread.join(30)
    assert time.monotonic() - started < 5
    # Nobody has said that it is busy.
    assert [type(error) for error in result] == [UnreachableError]
    proxy.heal()
    eventually(lambda: held.info().waiters == 0)


def test_readonly_finds_the_master_behind_the_same_address(own_server, face):
    old, new = own_server, Server()
    proxy = Proxy(old.port)
    try:
        face = face(proxy.port)
        lock = face.lock("book", timeout=6)
        face.run(lock.acquire)
        new.client().restore("book", 5000, old.client().dump("book"))
        proxy.to = new.port
        old.client().replicaof("127.0.0.1", "1")
        eventually(lambda: new.client().pttl("book") > 5000, "it is renewed there")
        lock.check()
        face.run(lock.release)
        assert new.client().get("book") is None
    finally:
        redis_lockkeeper.settled(5)
        proxy.end()
        new.end()


def test_a_full_queue_is_waited_out(own_server, face):
    own_server.client().config_set("lockkeeper.max-waiters", 1)
    held, face = Lock(own_server.client(), "book"), face(own_server.port)
    held.acquire()
    first, second = Lock(own_server.client(), "book", thread_local=False), face.lock("book")
    waiting, _ = in_background(first.acquire)
    eventually(lambda: held.info().waiters == 1)
    thread, result = in_background(face.run, second.acquire, blocking_timeout=20)
    time.sleep(0.3)
    assert not result
    held.release()
    waiting.join(10)
    first.release()
    thread.join(20)
    assert result == [True]
    face.run(second.release)


def test_client_unblock_does_not_end_a_wait(server, face):
    held, face = Lock(server.client(), "book"), face(server.port)
    held.acquire()
    lock = face.lock("book")
    thread, result = in_background(face.run, lock.acquire, blocking_timeout=20)
    eventually(lambda: held.info().waiters == 1)
    for each in server.client().client_list():
        if each["cmd"] == "lock.acquire" and "b" in each["flags"]:
            server.client().client_unblock(int(each["id"]), error=True)
    time.sleep(0.1)
    eventually(lambda: held.info().waiters == 1)
    held.release()
    thread.join(10)
    assert result == [True]
    face.run(lock.release)


@pytest.mark.long
def test_a_lock_counts_only_what_enough_replicas_have(own_server, face):
    face = face(own_server.port)
    with pytest.raises(exceptions.ResponseError, match="NOREPLICAS"):
        face.run(face.lock("book", min_replicas=1).acquire, blocking=False)
    redis_lockkeeper.settled(5)
    assert own_server.client().get("book") is None
    replica = Server("--replicaof", "127.0.0.1", str(own_server.port))
    try:
        eventually(lambda: own_server.client().wait(1, 100) == 1 or own_server.client().incr("x") < 0)
        lock = face.lock("book", timeout=3, min_replicas=1)
        assert face.run(lock.acquire, blocking_timeout=20)
        renewed(lock)
        other = face.lock("pen", min_replicas=1)
        assert face.run(other.acquire)
        assert face.run(other.downgrade)
        assert face.run(other.upgrade)
        replica.kill()
        eventually(lock.lost.is_set, "a lock that no replica has is lost")
        assert own_server.client().get("book") is not None
        changed = other.local.tenure.entry.regrant(1000)
        assert changed.wait(20)
        with pytest.raises(exceptions.ResponseError, match="NOREPLICAS"):
            changed.result()
        face.run(other.release)
    finally:
        replica.end()


def test_a_lock_that_is_given_up_while_the_server_is_away_is_released_later(server, proxy, face):
    face = face(proxy.port)
    lock = face.lock("book", timeout=20)
    face.run(lock.acquire)
    proxy.requests.clear()
    with pytest.raises(UnreachableError):
        face.run(lock.release)
    proxy.cut()
    proxy.heal()
    assert redis_lockkeeper.settled(15)
    assert server.client().get("book") is None


def test_a_lock_that_a_waiting_thread_left_to_the_grant_is_no_orphan(server):
    """The grant and the end of the wait meet."""
    held = Lock(server.client(), "book")
    for moment in range(40):
        held.acquire()
        lock = Lock(server.client(), "book")
        thread, result = in_background(lock.acquire, blocking_timeout=0.05)
        time.sleep(0.045 + moment * 0.0005)
        held.release()
        thread.join(10)
        # Who hears nothing in time, on a busy machine, knows neither.
        assert result in ([True], [False]) or isinstance(result[0], UnreachableError)
        del lock
    assert redis_lockkeeper.settled(10)
    eventually(lambda: server.client().get("book") is None)


def test_an_upgrade_whose_reply_is_lost_is_an_upgrade(server, proxy, face):
    face = face(proxy.port)
    lock = face.lock("book", shared=True)
    face.run(lock.acquire)
    proxy.when = b"LOCK.ACQUIRE", proxy.replies.clear
    thread, result = in_background(face.run, lock.upgrade)
    eventually(lambda: server.calls()["lock.acquire"] == 2)
    proxy.cut()
    proxy.heal()
    thread.join(20)
    assert result == [True]
    assert server.client().get("book") == lock.local.token
    face.run(lock.release)


def test_an_upgrade_that_nobody_answers_costs_no_lock(server, proxy, face):
    face = face(proxy.port)
    lock = face.lock("book", shared=True, timeout=12)
    face.run(lock.acquire)
    fence, started = lock.fence, time.monotonic()
    proxy.when = b"LOCK.ACQUIRE", proxy.replies.clear
    with pytest.raises(UnreachableError):
        face.run(lock.upgrade)
    assert time.monotonic() - started < 8
    assert lock.fence == fence
    proxy.heal()
    assert face.run(lock.upgrade)
    assert lock.fence > fence
    face.run(lock.release)
    assert server.client().get("book") is None


def test_a_downgrade_that_arrives_late_makes_no_writer_share(server, proxy, face):
    face = face(proxy.port)
    lock = face.lock("book", timeout=6)
    face.run(lock.acquire)
    # On this connection and the kept one, and on no other.
    proxy.when = b"SHARED", lambda: proxy.stuck or proxy.hold()
    with suppress(UnreachableError):
        face.run(lock.downgrade)
    with pytest.raises(UnreachableError, match="acquire it anew"):
        face.run(lock.upgrade)
    before = server.calls()["lock.acquire"]
    proxy.heal()
    eventually(lambda: server.calls()["lock.acquire"] > before, "it arrives")
    lock.check()
    face.run(lock.release)
    assert face.run(lock.acquire, blocking=False)
    assert face.run(lock.downgrade)
    assert face.run(lock.upgrade), "that was another owner"
    face.run(lock.release)


def test_a_wait_to_share_that_was_given_up_unanswered_makes_no_writer_share(server, proxy, face):
    face = face(proxy.port)
    held, lock = Lock(server.client(), "book"), face.lock("book", shared=True, timeout=3)
    held.acquire()
    proxy.when = b"WAIT", lambda: proxy.stuck or proxy.hold()
    thread, result = in_background(face.run, lock.acquire)
    eventually(lambda: held.info().waiters == 1, "the same owner, on another connection")
    held.release()
    thread.join(20)
    assert result == [True]
    with pytest.raises(UnreachableError, match="acquire it anew"):
        face.run(lock.upgrade)
    assert not Lock(server.client(), "book").acquire(blocking=False)
    face.run(lock.release)


def test_no_change_is_sent_behind_a_renewal_that_may_be_refused(server, proxy):
    lock = Lock(Client(port=proxy.port), "book", shared=True, thread_local=False)
    lock.acquire()
    server.client().delete("book")
    proxy.when = b"LOCK.RENEW", proxy.replies.clear
    renewing, _ = in_background(lock.reacquire)
    eventually(lambda: server.calls().get("lock.renew") == 1)
    changed = lock.local.tenure.entry.regrant(1)
    renewing.join(0.3)
    proxy.heal()
    assert changed.wait(10)
    with pytest.raises(LockLostError):
        changed.result()
    assert server.calls()["lock.acquire"] == 1, "it was granted anew"


@pytest.mark.parametrize("settings", [{}, {"limit": 2}], ids=["alone", "limit"])
@pytest.mark.parametrize(
    "commands", [["+@all"], ["+lock.acquire", "+lock.renew", "+lock.release"]], ids=["info", "renew"]
)
def test_a_grant_that_went_unheard_is_found_while_it_waits(server, proxy, face, settings, commands):
    server.client().acl_setuser("waiting", reset=True, enabled=True, passwords=["+x"], keys=["*"], commands=commands)
    face = face(proxy.port, username="waiting", password="x")
    held, lock = Lock(server.client(), "book"), face.lock("book", timeout=9, **settings)
    held.acquire()
    # On the connection of the wait nothing is answered.
    proxy.stuck.add(None)
    proxy.replies.clear()
    proxy.when = b"WAIT", lambda: proxy.stuck.add(proxy.pairs[-1][1])
    thread, result = in_background(face.run, lock.acquire)
    eventually(lambda: held.info().waiters == 1)
    held.release()
    (granted,) = held.info().holders
    thread.join(20)
    assert result == [True]
    assert lock.fence == granted.fence
    face.run(lock.release)


def test_a_release_does_not_overtake_a_change(server, proxy, face):
    face = face(proxy.port)
    lock = face.lock("book")
    face.run(lock.acquire)
    proxy.when = b"SHARED", proxy.hold
    changing, changed = in_background(face.run, lock.downgrade)
    eventually(lambda: proxy.held == 1)
    releasing, released = in_background(face.run, lock.release)
    eventually(lambda: lock.local.token is None)
    releasing.join(0.3)
    assert "lock.release" not in server.calls()
    proxy.heal()
    releasing.join(20)
    changing.join(20)
    assert (changed, released) == ([True], [None])
    assert server.client().get("book") is None


@pytest.mark.parametrize("kind", ["plain", "blocking", "single", "unix", "resp2", "resp3", "user", "decoded", "url"])
def test_every_kind_of_client_can_lock(server, kind):
    server.client().acl_setuser(
        "locker",
        enabled=True,
        passwords=["+secret"],
        keys=["book"],
        commands=["+lock.acquire", "+lock.renew", "+lock.release", "+lock.info"],
    )
    pool = library.BlockingConnectionPool(port=server.port, max_connections=1, timeout=1)
    settings = {
        "blocking": {"connection_pool": pool},
        "single": {"port": server.port, "single_connection_client": True},
        "unix": {"unix_socket_path": server.socket},
        "resp2": {"port": server.port, "protocol": 2},
        "resp3": {"port": server.port, "protocol": 3},
        "user": {"port": server.port, "username": "locker", "password": "secret"},
        "decoded": {"port": server.port, "decode_responses": True},
    }
    client = Client(**settings.get(kind, {"port": server.port}))
    if kind == "url":
        client = Client.from_url(f"redis://localhost:{server.port}/0?socket_timeout=1")
    held = Lock(client, "book", timeout=2)
    assert held.acquire()
    renewed(held)
    assert held.owned()
    assert not Lock(client, "book").acquire(blocking=False)
    held.release()

    async def main():
        own = {**settings.get(kind, {"port": server.port})}
        if kind == "blocking":
            own = {"port": server.port}
        redis = AsyncClient(**own)
        async with AsyncLock(redis, "book", timeout=2) as lock:
            renewed(lock)
            assert await lock.owned()
        await redis.aclose()

    asyncio.run(main())
