"""What the lock for asyncio promises besides."""

import asyncio
import sys
import threading
import time

import pytest

import redis_lockkeeper
from conftest import AsyncClient, asynchronous, eventually, exceptions, renewed
from redis_lockkeeper import BusyError, InvalidError, LockLostError, Lost, NotHeldError, UnreachableError, watchdog
from redis_lockkeeper.asyncio import Lock, close, settled

needs_uncancel = pytest.mark.skipif(sys.version_info < (3, 11), reason="tasks cannot tell who cancelled them")


@pytest.fixture
def in_loop(server):
    """Runs `body(client)` in a loop of its own."""

    def run(body, **settings):
        async def main():
            client = AsyncClient(**{"port": server.port, **settings})
            try:
                return await asyncio.wait_for(body(client), 60)
            finally:
                await client.aclose()

        return asyncio.run(main())

    return run


def test_a_lock_is_held_renewed_and_released(in_loop, client):
    async def body(redis):
        async with redis.lock("book", timeout=3, lock_class=Lock) as lock:
            assert lock.fence == lock.check()
            renewed(lock)
            assert await lock.owned()
            assert not lock.lost.is_set()
            assert not await Lock(redis, "book").acquire(blocking=False)
        assert not await lock.locked()

    in_loop(body)
    assert client.get("book") is None


def test_the_event_of_a_loss_may_be_asked_for_in_another_thread(in_loop):
    """Before Python 3.10 an event is made in the thread of its loop only."""

    async def body(redis):
        lock = Lock(redis, "book", thread_local=False)
        await lock.acquire()
        event = lock.lost
        assert await asyncio.get_running_loop().run_in_executor(None, lambda: lock.lost) is event
        await lock.release()

    in_loop(body)


def test_a_blocked_loop_loses_no_lock(in_loop, client):
    async def body(redis):
        async with Lock(redis, "book", timeout=3) as lock:
            # It gives the loop no turn.
            renewed(lock)
            assert client.get("book") == lock.local.token

    in_loop(body)


def test_half_a_reply_does_not_block_the_loop(server, proxy, in_loop):
    async def body(redis):
        lock, longest = Lock(redis, "book"), 0
        await lock.acquire()
        await lock.release()
        proxy.pieces = True
        proxy.replies.clear()
        task = asyncio.ensure_future(lock.acquire())
        while longest < 2 and proxy.held < 2:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - before)
        proxy.heal()
        assert longest < 2
        assert await task
        await lock.release()

    in_loop(body, port=proxy.port)


def test_the_clock_is_believed_before_the_watchdog(in_loop, client):
    async def body(redis):
        lock = Lock(redis, "book", timeout=0.3)
        await lock.acquire()
        # As when the GIL is held, or the process stopped: the watchdog had no turn.
        with watchdog._mutex:
            time.sleep(0.4)  # noqa: ASYNC251
            assert lock.remaining() == 0
            with pytest.raises(LockLostError):
                lock.check()
            assert lock.lost.is_set()

    in_loop(body)


@pytest.mark.parametrize("how", [Lost.TAKEN, Lost.GONE])
def test_a_loss_is_an_event_a_callback_and_an_exception(in_loop, client, how):
    told = []

    async def body(redis):
        loop = asyncio.get_running_loop()
        lock = Lock(redis, "book", timeout=3, on_lost=lambda lost: told.append((lost, asyncio.get_running_loop())))
        with pytest.raises(LockLostError) as raised:
            async with lock:
                client.set("book", "mine") if how is Lost.TAKEN else client.delete("book")
                await asyncio.wait_for(lock.lost.wait(), 20)
        assert raised.value.lost is how
        assert told == [(how, loop)]

    in_loop(body)
    assert client.get("book") == (b"mine" if how is Lost.TAKEN else None)


@needs_uncancel
def test_a_lost_lock_cancels_its_body_if_asked_for(in_loop, client):
    async def body(redis):
        with pytest.raises(LockLostError):
            async with Lock(redis, "book", timeout=0.3, cancel_on_lost=True, raise_on_release_error=False):
                client.delete("book")
                await asyncio.sleep(30)
                pytest.fail("it went on")
        # Nobody else is cancelled.
        await asyncio.sleep(0)
        assert asyncio.current_task().cancelling() == 0

    in_loop(body)


@needs_uncancel
def test_who_is_cancelled_by_somebody_else_is_cancelled(in_loop):
    async def body(redis):
        async def work():
            async with Lock(redis, "book", cancel_on_lost=True):
                await asyncio.sleep(30)

        task = asyncio.ensure_future(work())
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await settled(5)
        assert not await Lock(redis, "book").locked()

    in_loop(body)


@pytest.mark.skipif(sys.version_info >= (3, 11), reason="it is to be had")
def test_cancelling_is_refused_where_it_is_not_to_be_had(in_loop):
    async def body(redis):
        with pytest.raises(InvalidError):
            Lock(redis, "book", cancel_on_lost=True)

    in_loop(body)


def test_the_bodys_exception_is_not_hidden(in_loop, client):
    async def body(redis):
        with pytest.raises(ZeroDivisionError):
            async with Lock(redis, "book", timeout=0.3) as lock:
                client.delete("book")
                await lock.lost.wait()
                raise ZeroDivisionError

    in_loop(body)


def test_the_body_never_runs_without_the_lock(in_loop):
    async def body(redis):
        async with Lock(redis, "book"):
            with pytest.raises(BusyError):
                async with Lock(redis, "book", blocking_timeout=0.1):
                    pytest.fail("it ran")

    in_loop(body)


def test_one_object_is_shared_by_tasks_each_with_its_own_tenure(in_loop):
    async def body(redis):
        lock, inside, fences = Lock(redis, "book"), [], []

        async def work():
            async with lock:
                inside.append(1)
                assert len(inside) == 1
                fences.append(lock.fence)
                await asyncio.sleep(0.01)
                inside.clear()

        await asyncio.gather(*(work() for _ in range(8)))
        assert len(set(fences)) == 8
        assert not await lock.locked()

    in_loop(body)


def test_cancelled_at_any_moment_it_leaves_neither_lock_nor_place(in_loop, client):
    async def body(redis):
        held = Lock(redis, "held")
        await held.acquire()
        cancelled = 0
        for moment in range(200):
            lock = Lock(redis, "held" if moment % 2 else f"free{moment}")
            task = asyncio.ensure_future(lock.acquire())
            await asyncio.sleep(moment * 0.00002)
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                cancelled += 1
        assert cancelled >= 100
        del lock, task
        for _ in range(500):
            if not await redis.keys("free*") and (await held.info()).waiters == 0:
                break
            await asyncio.sleep(0.01)
        assert await redis.keys("free*") == []
        assert (await held.info()).waiters == 0

    in_loop(body)


def test_cancelled_while_releasing_it_is_released(in_loop):
    async def body(redis):
        for moment in range(30):
            lock = Lock(redis, f"book{moment}")
            await lock.acquire()
            task = asyncio.ensure_future(lock.release())
            await asyncio.sleep(moment * 0.00002)
            task.cancel()
            await asyncio.wait({task})
            if lock.local.token is not None:
                await lock.release()
        assert await settled(5)
        assert await redis.keys("book*") == []

    in_loop(body)


def test_a_try_that_nobody_answers_is_not_busy(server, proxy, in_loop):
    async def body(redis):
        warm = Lock(redis, "warm up")
        await warm.acquire()
        proxy.replies.clear()
        started = time.monotonic()
        with pytest.raises(UnreachableError):
            await Lock(redis, "book").acquire(blocking_timeout=0.3)
        assert time.monotonic() - started < 3
        proxy.heal()
        await warm.release()
        assert await settled(5)

    in_loop(body, port=proxy.port)
    eventually(lambda: server.client().get("book") is None)


def test_the_end_of_the_loop_releases_what_its_tasks_hold(server, client):
    async def main():
        async def work():
            async with Lock(AsyncClient(port=server.port), "book"):
                await asyncio.sleep(30)

        task = asyncio.ensure_future(work())
        while not client.get("book"):
            await asyncio.sleep(0.01)
        return task

    asyncio.run(main())
    assert redis_lockkeeper.settled(5)
    assert client.get("book") is None


def test_a_second_loop_locks_with_the_same_lock_object(server, client):
    async def main():
        redis = AsyncClient(port=server.port)
        async with Lock(redis, "book"):
            pass
        await redis.aclose()

    for _ in range(3):
        asyncio.run(main())
    assert client.get("book") is None


def test_a_waiting_task_is_woken_up_and_blocks_nobody(in_loop):
    async def body(redis):
        first, order = Lock(redis, "book"), []
        await first.acquire()

        async def wait(number):
            async with Lock(redis, "book"):
                order.append(number)

        tasks = []
        for number in range(3):
            tasks.append(asyncio.ensure_future(wait(number)))
            while (await first.info()).waiters < number + 1:
                await asyncio.sleep(0.01)
        await first.release()
        await asyncio.gather(*tasks)
        assert order == [0, 1, 2]

    in_loop(body)


def test_close_leaves_no_thread_and_no_connection(in_loop, client):
    async def body(redis):
        async with Lock(redis, "book"):
            pass
        assert await close(5)
        names = [thread.name for thread in threading.enumerate()]
        assert not [name for name in names if name in ("lockkeeper", "lockkeeper-dial")]

    in_loop(body)


def test_extend_reacquire_leave_and_release_after(in_loop, client):
    async def body(redis):
        async with Lock(redis, "book", timeout=3) as lock:
            assert await lock.extend(10)
            # Longer than a third of the timeout.
            await asyncio.sleep(1.2)
            assert client.pttl("book") > 9_000
            assert await lock.reacquire()
            assert client.pttl("book") <= 3_000
            await lock.release_after(30)
        assert client.pttl("book") > 20_000
        client.delete("book")
        async with Lock(redis, "book", timeout=10) as lock:
            elsewhere = Lock(redis, "book", timeout=10)
            elsewhere.local.token = lock.local.token
            assert await elsewhere.extend(10)
            lock.leave()
        assert client.pttl("book") > 15_000
        await elsewhere.release()
        assert client.get("book") is None
        with pytest.raises(NotHeldError):
            await elsewhere.release()

    in_loop(body)


def test_the_other_kind_of_client_is_refused(server, in_loop):
    async def body(redis):
        with pytest.raises(InvalidError):
            redis_lockkeeper.Lock(redis, "book")
        with pytest.raises(InvalidError):
            Lock(server.client(), "book")

    in_loop(body)
    assert issubclass(InvalidError, exceptions.LockError)


class OwnConnection(asynchronous.Connection):
    pass


async def sign_in(connection):
    await connection.on_connect()


@pytest.mark.parametrize("own", [{"connection_class": OwnConnection}, {"redis_connect_func": sign_in}])
def test_a_connection_that_only_the_loop_could_make_is_refused(in_loop, client, own):
    """Renewals and clean-up go on when the loop does not: what they need must be to be had in a thread."""

    async def body(redis):
        settings = {"port": redis.connection_pool.connection_kwargs["port"], **own}
        pool = asynchronous.ConnectionPool(**settings)
        with pytest.raises(InvalidError, match="cannot be made in a thread"):
            Lock(AsyncClient(connection_pool=pool), "book")

    in_loop(body)
    assert client.keys() == []
