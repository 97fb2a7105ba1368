"""Locks that several may hold: places, readers and writers, and who changes from one to the other."""

import asyncio
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager

import pytest

import redis_lockkeeper
from conftest import AsyncClient, Client, eventually
from redis_lockkeeper import BusyError, Holder, InvalidError, Lock, LockLostError, Lost, NotHeldError, locked
from redis_lockkeeper.asyncio import Lock as AsyncLock
from redis_lockkeeper.replies import read_info
from redis_lockkeeper.watchdog import Wish


def reader(client, **settings):
    return Lock(client, "book", shared=True, thread_local=False, **settings)


def held(*locks):
    for lock in locks:
        assert lock.acquire(blocking=False)
    return locks


def waiting(lock):
    """Has it waited for in a thread, from now on. Returns the thread."""
    waiters = lock.info().waiters
    thread = threading.Thread(target=lock.acquire, daemon=True)
    thread.start()
    eventually(lambda: lock.info().waiters == waiters + 1, "it waits")
    return thread


def test_as_many_hold_it_as_the_strictest_of_them_allows(client):
    places = [Lock(client, "pool", limit=3) for _ in range(3)]
    held(*places)
    assert places[0].fence < places[1].fence < places[2].fence
    for other in (Lock(client, "pool", limit=3), Lock(client, "pool"), Lock(client, "pool", shared=True)):
        assert not other.acquire(blocking=False)
    fourth = Lock(client, "pool", limit=3, thread_local=False)
    thread = waiting(fourth)
    places[1].release()
    thread.join(10)
    assert fourth.owned()
    assert fourth.info().holding == 3
    assert [lock.owned() for lock in places] == [True, False, True]


def test_readers_share_a_writer_is_alone_and_nobody_passes(client):
    first, second, writer, late = (
        reader(client),
        reader(client),
        Lock(client, "book", thread_local=False),
        reader(client),
    )
    held(first, second)
    threads = [waiting(writer), waiting(late)]
    assert not reader(client).acquire(blocking=False), "it would pass the writer"
    first.release()
    second.release()
    threads[0].join(10)
    assert writer.owned()
    assert not late.owned()
    fence = writer.fence
    writer.release()
    threads[1].join(10)
    assert late.fence > fence
    held(reader(client))


@pytest.mark.parametrize(
    "settings",
    [*({"limit": limit} for limit in (0, -1, 1001, 2.0, "2", True)), {"limit": 2, "shared": True}],
)
def test_a_limit_that_makes_no_sense_is_refused(server, settings):
    with pytest.raises(InvalidError, match="limit"):
        Lock(server.client(), "pool", **settings)
    assert "lock.acquire" not in server.calls()


def test_a_lock_for_one_asks_as_an_older_module_understands(server, proxy):
    client = Client(port=proxy.port)
    for settings in ({}, {"limit": 1}, {"shared": False}):
        with Lock(client, "pool", **settings):
            pass
    assert not any(b"LIMIT" in sent or b"SHARED" in sent for sent in proxy.requested)
    with Lock(client, "pool", limit=2), Lock(client, "pool", limit=2):
        pass
    assert any(b"LIMIT\r\n$1\r\n2\r\n" in sent for sent in proxy.requested)


def test_each_holder_is_renewed_by_itself(server, client):
    first, second = held(reader(client, timeout=3), reader(client, timeout=3))
    eventually(lambda: server.calls().get("lock.renew", 0) >= 8, "both, past the timeout")
    first.release()
    second.check()
    assert second.owned()


@pytest.mark.parametrize("settings", [{"protocol": 2}, {"protocol": 3}, {"decode_responses": True}])
def test_info_tells_every_holder(server, settings):
    client = server.client(**settings)
    alone = Lock(client, "book")
    with alone:
        info = alone.info()
        assert info.holders == [Holder(alone.owner.encode(), alone.fence, info.held, info.ttl, 1)]
        assert (info.limit, info.holding) == (1, 1)
    first, second = held(reader(client), Lock(client, "book", limit=3))
    thread = waiting(last := Lock(client, "book", limit=2, thread_local=False))
    info = first.info()
    assert (info.owner, info.fence, info.held, info.limit, info.holding) == (None, None, None, 3, 2)
    told = [(each.owner.decode(), each.fence, each.limit) for each in info.holders]
    assert told == [(first.owner, first.fence, 1000), (second.owner, second.fence, 3)]
    assert all(29 < each.ttl <= 30 and 0 <= each.held < 20 for each in (*info.holders, info._replace(held=0)))
    assert [each.limit for each in info.queue] == [2]
    assert first.locked()
    client.set("book", "by hand")
    assert first.info().holders == [Holder(b"by hand", None, None, None, 1)]
    client.delete("book")
    thread.join(10)
    assert last.owned()
    assert not first.owned()


def test_who_may_be_among_those_not_listed_is_not_said_to_be_unknown():
    def info(holding, waiters):
        holder = [b"owner", b"ada", b"fence", 7, b"held-ms", 1, b"ttl-ms", 5, b"limit", 9]
        fields = [b"owner", None, b"fence", None, b"held-ms", None, b"ttl-ms", 5, b"waiters", waiters]
        fields += [b"queue", [[b"owner", b"bea", b"waited-ms", 3]], b"limit", 9, b"holding", holding]
        return read_info([*fields, b"holders", [holder]])

    assert info(1, 1).may_queue(b"bea")
    assert not info(1, 1).may_queue(b"eve")
    assert info(2, 1).may_queue(b"eve")
    assert info(1, 2).may_queue(b"eve")


def test_an_owner_that_others_may_hold_it_with_can_be_passed_on(client):
    other, lock, elsewhere = reader(client, timeout=300), reader(client, timeout=10), reader(client, timeout=10)
    held(other, lock)
    assert lock.local.token == lock.owner.encode()
    elsewhere.local.token = lock.local.token
    assert elsewhere.owned()
    assert elsewhere.extend(20)
    assert 25 < lock._holder(lock.info()).ttl < 35, "what remained of its own"
    elsewhere.release()
    assert not lock.owned()
    assert other.owned()


def test_an_upgrade_is_one_try(client):
    first, second = held(reader(client), reader(client))
    before = first.info().holders
    assert not first.upgrade()
    assert [each[:2] for each in first.info().holders] == [each[:2] for each in before], "held on as it was"
    second.release()
    fence = first.fence
    thread = waiting(writer := Lock(client, "book", thread_local=False))
    assert first.upgrade(), "it is no newcomer, and passes who waits"
    assert first.fence > fence
    assert client.get("book") == first.local.token
    fence = first.fence
    assert first.upgrade()
    assert first.fence == first.check() == fence, "once more changes nothing"
    assert not reader(client).acquire(blocking=False)
    first.release()
    thread.join(10)
    assert writer.fence > fence


def test_a_downgrade_lets_readers_in_and_lasts_until_the_release(client):
    lock = Lock(client, "book")
    with lock:
        fence, other = lock.fence, reader(client)
        thread = waiting(other)
        assert lock.downgrade()
        thread.join(10)
        assert lock.fence > fence
        assert not lock.upgrade()
        assert lock.owned()
        assert lock.local.token == lock.owner.encode()
    assert lock.limit == 1
    assert not lock.acquire(blocking=False)


@pytest.mark.parametrize("change", ["upgrade", "downgrade"])
@pytest.mark.parametrize("how", [Lost.TAKEN, Lost.GONE])
def test_what_is_lost_is_neither_upgraded_nor_taken(server, client, change, how):
    lock = reader(client)
    with pytest.raises(NotHeldError, match=change):
        getattr(lock, change)()
    held(lock)
    client.set("book", "mine") if how is Lost.TAKEN else client.delete("book")
    with pytest.raises(LockLostError) as raised:
        getattr(lock, change)()
    assert raised.value.lost is how
    assert lock.lost.is_set()
    assert client.get("book") == (b"mine" if how is Lost.TAKEN else None)
    assert server.calls()["lock.acquire"] == 1


def test_an_extended_lock_is_not_cut_by_an_upgrade(client):
    (lock,) = held(reader(client, timeout=10))
    lock.extend(60)
    assert lock.upgrade()
    assert client.pttl("book") > 50_000
    assert lock.remaining() > 50


def test_changed_again_and_again_it_is_renewed_all_the_while(client):
    (lock,) = held(reader(client, timeout=3))
    changed, ends = [], threading.Event()

    def change():
        while not ends.is_set():
            changed.append(lock.upgrade() and lock.downgrade())

    threads = [threading.Thread(target=change) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert not lock.lost.wait(3.5), "longer than its timeout"
    ends.set()
    for thread in threads:
        thread.join(20)
    assert len(changed) > 10
    assert all(changed)
    lock.release()
    assert client.get("book") is None


def test_a_function_for_at_most_so_many_at_a_time(client):
    @locked(client, "pool", wait=0, limit=2)
    def report(others):
        return others and report(others - 1)

    assert report(1) == 0
    with pytest.raises(BusyError):
        report(2)
    assert not client.exists("pool")


def test_a_release_does_not_wait_for_a_change_that_was_not_asked_for(client):
    (lock,) = held(reader(client))
    # As an exception leaves it that is thrown into an upgrade.
    lock.local.tenure.entry.wishes.append(Wish(1))
    before = time.monotonic()
    lock.release()
    assert time.monotonic() - before < 3
    assert not client.exists("book")


def test_no_change_is_asked_for_behind_the_one_that_a_release_waits_for(client):
    (lock,) = held(reader(client))
    entry, first = lock.local.tenure.entry, Wish(1)
    # As the watchdog has it that waits for the answer.
    entry.wishes.append(first)
    first.sent = True
    releasing = threading.Thread(target=lock.release)
    releasing.start()
    eventually(lambda: lock.local.tenure is None)
    time.sleep(0.05)
    second = entry.regrant(1)
    assert second.done()
    with pytest.raises(LockLostError):
        second.result()
    first.promise.set_result(False)
    releasing.join(10)
    assert not client.exists("book")


def test_with_asyncio_the_same_is_awaited(server, client):
    async def main():
        redis = AsyncClient(port=server.port)
        lock, other = AsyncLock(redis, "book", shared=True), AsyncLock(redis, "book", limit=2)
        assert await lock.acquire()
        assert await other.acquire()
        assert not await lock.upgrade()
        assert (await lock.info()).limit == 2
        await other.release()
        assert await lock.upgrade()
        assert not await other.acquire(blocking=False)
        assert await lock.downgrade()
        assert await other.acquire(blocking=False)
        assert await other.owned()
        client.delete("book")
        with pytest.raises(LockLostError):
            await lock.upgrade()
        with pytest.raises(LockLostError):
            await other.downgrade()
        assert not await lock.locked()
        await redis.aclose()

    asyncio.run(main())
    assert client.get("book") is None


def test_a_block_within_a_block_leaves_the_outer_one_held(client):
    lock = reader(client)
    with lock:
        fence = lock.fence
        with lock:
            assert lock.fence > fence
            assert lock.info().holding == 2
            assert not lock.upgrade()
        assert lock.check() == lock.fence == fence
        assert lock.owned()
        assert lock.upgrade()
        assert lock.fence > fence
    assert lock.fence is None
    assert not client.exists("book")


def most_at_once(times, running):
    """Has `running` called in so many threads, with what counts who is within. Returns how many were at most."""
    within, most, mutex = 0, 0, threading.Lock()

    @contextmanager
    def counted():
        nonlocal within, most
        with mutex:
            within += 1
            most = max(most, within)
        yield
        with mutex:
            within -= 1

    with ThreadPoolExecutor(times) as threads:
        list(threads.map(running, [counted] * times))
    return most


@pytest.mark.parametrize("thread_local", [True, False])
def test_threads_that_share_one_object_are_as_many_as_the_limit_allows(client, thread_local):
    lock = Lock(client, "pool", limit=2, thread_local=thread_local)

    def work(counted):
        lock.acquire()
        with counted():
            assert lock.check() == lock.fence
            time.sleep(0.05)
            assert lock.owned()
        lock.release()

    assert most_at_once(6, work) == 2
    assert not client.exists("pool")


def test_one_object_is_acquired_and_released_as_often_as_there_are_places(client):
    lock = Lock(client, "pool", limit=3, thread_local=False)
    fences = []
    for _ in range(3):
        assert lock.acquire(blocking=False)
        fences.append(lock.fence)
    assert not lock.acquire(blocking=False)
    assert lock.info().holding == 3
    for fence in reversed(fences):
        assert lock.fence == fence
        lock.release()
    with pytest.raises(NotHeldError):
        lock.release()
    assert not client.exists("pool")


def test_who_has_lost_its_place_does_not_release_that_of_another(client):
    lock = Lock(client, "book", thread_local=False, timeout=0.3, renew=False)
    lock.acquire()
    time.sleep(0.4)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(lock.acquire).result()
        with pytest.raises(LockLostError):
            lock.release()
        assert other.submit(lock.owned).result()
        other.submit(lock.release).result()
    assert lock.fence is None


def test_what_a_thread_that_is_gone_has_lost_is_forgotten(client):
    lock = Lock(client, "book", thread_local=False, timeout=0.1, renew=False)
    for _ in range(3):
        thread = threading.Thread(target=lock.acquire)
        thread.start()
        thread.join()
        del thread
        assert lock.fence is not None
        eventually(lambda: lock.remaining() == 0)
    assert lock.acquire()
    assert len(lock.local.tenures) == 1


def test_what_other_threads_hold_may_change_while_it_is_looked_at(client):
    lock, more = Lock(client, "pool", limit=100, thread_local=False), Lock(client, "pool", limit=100)
    for _ in range(30):
        lock.acquire()
    # As another thread that has its turn while garbage is collected.
    granted = []
    for _ in range(50):
        more.acquire()
        granted.append(more.local.tenure)

    def collected(phase, _):
        if granted:
            lock.local.tenures[granted.pop()] = None

    threshold = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(1)
    try:
        while granted:
            assert lock.check()
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(collected)


def test_who_is_alone_again_has_nothing_of_before(client):
    told = []
    lock = Lock(client, "book", timeout=1.5, on_lost=told.append)
    lock.acquire()
    client.delete("book")
    assert lock.acquire(blocking=False), "before anybody knows"
    lock.release()
    assert lock.fence is None
    with pytest.raises(NotHeldError):
        lock.check()
    time.sleep(1)
    assert not told


def test_what_was_left_elsewhere_is_not_held(client):
    lock = Lock(client, "pool", limit=2)

    def block():
        with lock:
            yield

    lock.acquire()
    fence = lock.fence
    for _ in range(3):
        generator = block()
        next(generator)
        thread = threading.Thread(target=generator.close)
        thread.start()
        thread.join()
        assert lock.check() == lock.fence == fence
    lock.acquire()
    assert len(lock.local.tenures) == 2
    lock.release()
    lock.release()
    assert lock.fence is None
    assert not client.exists("pool")


def test_tasks_that_share_one_object_are_as_many_as_the_limit_allows(server, client):
    within, most = 0, 0

    async def work(lock, block):
        nonlocal within, most
        if not block:
            await lock.acquire()
        async with lock if block else AsyncExitStack():
            within += 1
            most = max(most, within)
            fence = lock.check()
            await asyncio.sleep(0.05 + within * 0.02)
            assert await lock.owned()
            assert lock.check() == lock.fence == fence, "its own"
            within -= 1
        if not block:
            await lock.release()

    async def main():
        nonlocal most
        redis = AsyncClient(port=server.port)
        lock = AsyncLock(redis, "pool", limit=2)
        for block in (False, True):
            most = 0
            await asyncio.gather(*(work(lock, block) for _ in range(6)))
            assert most == 2
            assert not client.exists("pool")
        await asyncio.create_task(lock.acquire())
        await lock.release()
        assert not client.exists("pool"), "what one task has acquired another may release"
        await redis.aclose()

    asyncio.run(main())


def test_cancelled_at_any_moment_a_change_leaves_nothing_behind_the_release(server, client):
    async def main():
        redis = AsyncClient(port=server.port)
        cancelled = 0
        for moment in range(100):
            lock = AsyncLock(redis, f"book{moment}")
            await lock.acquire()
            task = asyncio.ensure_future(lock.downgrade())
            await asyncio.sleep(moment * 0.00004)
            task.cancel()
            await asyncio.wait({task})
            cancelled += task.cancelled()
            await lock.release()
        assert cancelled >= 20
        await redis.aclose()

    asyncio.run(main())
    assert redis_lockkeeper.settled(10)
    assert client.keys() == []
