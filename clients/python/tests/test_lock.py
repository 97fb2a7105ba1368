"""What the lock for threads promises on a server that is well."""

import gc
import itertools
import linecache
import logging
import math
import pickle
import signal
import sys
import threading
import time

import pytest

import redis_lockkeeper
from conftest import Client, eventually, exceptions, library, renewed
from redis_lockkeeper import (
    BusyError,
    InvalidError,
    Lock,
    LockLostError,
    Lost,
    ModuleMissingError,
    NotHeldError,
    RefusedError,
    UnreachableError,
)
from redis_lockkeeper.acquisition import Tenure
from redis_lockkeeper.replies import read_answer, read_fence


def test_a_lock_is_held_renewed_and_released(client):
    with client.lock("book", timeout=3, lock_class=Lock) as lock:
        assert lock.fence == lock.check()
        assert 0 < lock.remaining() < 3
        renewed(lock)
        assert lock.owned()
        assert not lock.lost.is_set()
        assert not Lock(client, "book").acquire(blocking=False)
    assert client.get("book") is None
    assert lock.fence is lock.owner is None
    assert lock.remaining() == 0


def test_the_body_never_runs_without_the_lock(client):
    held = Lock(client, "book")
    held.acquire()
    with pytest.raises(BusyError) as raised, Lock(client, "book", blocking_timeout=0.1):
        pytest.fail("it ran")
    assert isinstance(raised.value, exceptions.LockError)
    assert raised.value.lock_name == "book"
    assert str(raised.value) == "Unable to acquire lock within the time specified"


def test_the_bodys_exception_is_not_hidden(client):
    with pytest.raises(ZeroDivisionError), Lock(client, "book", timeout=0.3) as lock:
        client.delete("book")
        assert lock.lost.wait(5)
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), Lock(client, "book") as lock:
        lock.release()
        raise ZeroDivisionError


@pytest.mark.parametrize("how", [Lost.TAKEN, Lost.GONE])
def test_a_loss_is_an_event_a_callback_and_an_exception(client, how):
    told = []
    with pytest.raises(LockLostError) as raised, Lock(client, "book", timeout=3, on_lost=told.append) as lock:
        if how is Lost.TAKEN:
            client.set("book", "mine")
        else:
            client.delete("book")
        assert lock.lost.wait(20)
        with pytest.raises(LockLostError):
            lock.check()
        assert lock.remaining() == 0
    assert raised.value.lost is how
    assert str(raised.value) == f"the lock 'book' is lost: {how}"
    assert isinstance(raised.value, exceptions.LockNotOwnedError)
    eventually(lambda: told == [how])
    assert client.get("book") == (b"mine" if how is Lost.TAKEN else None), "a lost lock harms nobody"


def test_a_loss_is_only_logged_if_so_asked(client, caplog):
    with Lock(client, "book", timeout=0.3, raise_on_release_error=False):
        client.delete("book")
    assert any(record.levelno == logging.WARNING for record in caplog.records)


def test_max_hold_ends_renewal_and_leaves_time_to_stop_in(client):
    with pytest.raises(LockLostError) as raised, Lock(client, "book", timeout=3, max_hold=1.5) as lock:
        renewed(lock)
        assert lock.lost.wait(20)
        assert lock.remaining() > 0.1
        assert lock.owned()
    assert raised.value.lost is Lost.MAX_HOLD
    assert client.get("book") is None, "it is released all the same"


def test_one_that_is_not_renewed_ends_by_itself_and_tells_so_before_another_can_have_it(client):
    lock = client.lock("book", timeout=2, lock_class=Lock.having(renew=False))
    assert lock.acquire()
    eventually(lambda: lock.remaining() < client.pttl("book") / 1000, "what is asked later is less")
    assert lock.lost.wait(20)
    assert lock.remaining() == 0
    with pytest.raises(LockLostError) as raised:
        lock.release()
    assert raised.value.lost is Lost.EXPIRED


def test_an_owner_is_of_one_tenure_even_if_the_token_is_not(client):
    first, second = Lock(client, "book"), Lock(client, "book")
    assert first.acquire(token="job-7")
    assert not second.acquire(blocking=False, token="job-7")
    owner = first.owner
    assert owner.startswith("job-7:")
    first.release()
    assert first.acquire(token="job-7")
    assert first.owner != owner


def test_the_default_label_says_host_and_process(client):
    with Lock(client, "book") as lock:
        assert lock.info().owner.decode() == lock.owner
        assert lock.owner.split(":")[1].isdigit()


def test_the_local_token_is_the_value_of_the_key(client):
    lock = Lock(client, "book")
    assert lock.local.token is None
    lock.acquire()
    assert client.get("book") == lock.local.token


def test_a_token_acquired_elsewhere_can_be_extended_and_released(client):
    lock, elsewhere = Lock(client, "book", timeout=10), Lock(client, "book", timeout=10)
    lock.acquire()
    elsewhere.local.token = lock.local.token
    assert elsewhere.owned()
    assert elsewhere.extend(20)
    assert client.pttl("book") > 25_000
    assert elsewhere.reacquire()
    assert client.pttl("book") <= 10_000
    elsewhere.release()
    assert client.get("book") is None
    elsewhere.local.token = b"forged"
    with pytest.raises(LockLostError):
        elsewhere.release()


def test_what_was_extended_is_not_cut_by_the_next_renewal(client):
    with Lock(client, "book", timeout=3) as lock:
        assert lock.extend(10)
        # Longer than a third of the timeout.
        time.sleep(1.2)
        assert client.pttl("book") > 9_000
        assert lock.remaining() > 8
        assert lock.extend(3.2, replace_ttl=True)
        assert client.pttl("book") <= 3_200
        renewed(lock)


def test_a_lock_without_timeout_has_30_s_and_is_renewed(client):
    with Lock(client, "book") as lock:
        assert 29_000 < client.pttl("book") <= 30_000
        with pytest.raises(exceptions.LockError):
            lock.extend(1)


def test_release_after_keeps_it_until_so_long_after_the_grant(client):
    with Lock(client, "book") as lock:
        lock.release_after(2)
    assert 0 < client.pttl("book") <= 2_000
    with pytest.raises(NotHeldError):
        lock.release()
    eventually(lambda: client.get("book") is None)


def test_leave_lets_it_lapse(client):
    with Lock(client, "book", timeout=2) as lock:
        lock.leave()
    assert client.get("book") is not None
    eventually(lambda: client.get("book") is None)


def test_a_dropped_lock_is_released(client):
    lock = Lock(client, "book")
    lock.acquire()
    del lock
    assert redis_lockkeeper.settled(5)
    assert client.get("book") is None


def test_who_waits_is_woken_up_in_order(client):
    first, order = Lock(client, "book"), []
    first.acquire()

    def wait(number):
        with Lock(client, "book"):
            order.append(number)

    threads = []
    for number in range(3):
        threads.append(threading.Thread(target=wait, args=(number,)))
        threads[-1].start()
        eventually(lambda: len(first.info().queue) == number + 1)  # noqa: B023
    first.release()
    for thread in threads:
        thread.join(10)
    assert order == [0, 1, 2]


def test_a_wait_ends_in_time_and_leaves_no_place(client):
    first = Lock(client, "book")
    first.acquire()
    started = time.monotonic()
    assert not Lock(client, "book").acquire(blocking_timeout=0.3)
    assert 0.3 <= time.monotonic() - started < 3
    assert first.info().waiters == 0


def test_a_wait_may_be_infinite(client):
    assert Lock(client, "book", blocking_timeout=math.inf).acquire()


def test_one_object_is_shared_by_threads_each_with_its_own_tenure(client):
    lock, inside, fences = Lock(client, "book"), [], []

    def work():
        assert lock.local.token is None
        with lock:
            inside.append(1)
            assert len(inside) == 1
            fences.append(lock.fence)
            time.sleep(0.01)
            inside.clear()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(set(fences)) == 8
    assert fences == sorted(fences)


def test_a_thread_sees_only_what_it_acquired_itself(client):
    lock, seen = Lock(client, "book"), []
    lock.acquire()
    thread = threading.Thread(target=lambda: seen.append((lock.local.token, lock.fence, lock.remaining())))
    thread.start()
    thread.join(10)
    assert seen == [(None, None, 0)]


def test_without_thread_local_another_thread_may_release(client):
    lock = Lock(client, "book", thread_local=False)
    lock.acquire()
    thread = threading.Thread(target=lock.release)
    thread.start()
    thread.join(10)
    assert client.get("book") is None


def test_with_releases_its_own_tenure(client):
    lock = Lock(client, "book", thread_local=False, timeout=3)
    with pytest.raises(LockLostError), lock:
        client.delete("book")
        assert lock.lost.wait(20)
        assert lock.acquire(), "the same object holds it anew"
        second = lock.owner
    assert lock.owner == second
    assert lock.owned(), "the end of the block took what was not its own"


@pytest.mark.parametrize(
    "settings",
    [{"timeout": 0.05}, {"timeout": 2**60}, {"timeout": "soon"}, {"max_hold": 0}, {"timeout": float("nan")}],
)
def test_times_that_make_no_sense_are_refused(client, settings):
    with pytest.raises(InvalidError):
        Lock(client, "book", **settings)


def test_a_label_must_leave_room_for_the_rest(client):
    assert Lock(client, "book", label="x" * 458).acquire()
    with pytest.raises(InvalidError):
        Lock(client, "pen", label="x" * 459).acquire()
    assert client.get("pen") is None


def test_a_client_of_a_kind_that_we_do_not_know_is_refused(server):
    class Wrapper:
        def __init__(self, client):
            self.client = client

    for client in (Wrapper(server.client()), server.client().pipeline(), None):
        with pytest.raises(InvalidError):
            Lock(client, "book")


def test_a_lock_cannot_be_pickled_and_says_what_to_do(client):
    with pytest.raises(TypeError, match="pass its name, 'book'"):
        pickle.dumps(Lock(client, "book"))


@pytest.mark.parametrize(
    "error",
    [
        LockLostError(Lost.GONE, "book"),
        BusyError("busy", "book"),
        RefusedError("NOPERM no"),
        UnreachableError("not there"),
    ],
)
def test_an_error_comes_from_another_process_as_it_was(error):
    """A pool of processes pickles it; what cannot be made again breaks the pool."""
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_seconds_are_rounded_to_milliseconds(client, proxy):
    lock = Lock(Client(port=proxy.port), "book", timeout=1.001)
    lock.acquire()
    assert any(b"\r\n1001\r\n" in sent for sent in proxy.requested)


@pytest.mark.parametrize("settings", [{"protocol": 2}, {"protocol": 3}, {"decode_responses": True}])
def test_info_tells_who_holds_and_who_waits_whatever_the_replies_are(server, settings):
    lock = Lock(server.client(**settings), "book")
    assert lock.info() is None
    lock.acquire(token=b"\xff\x00")
    info = lock.info()
    assert info.owner.startswith(b"\xff\x00:")
    assert (info.fence, info.waiters, info.queue) == (lock.fence, 0, [])
    assert 29 < info.ttl <= 30
    assert info.held >= 0


def test_a_lock_taken_by_hand_counts_too(client):
    client.set("book", "by hand")
    lock = Lock(client, "book")
    assert lock.locked()
    assert not lock.acquire(blocking=False)
    assert lock.info().fence is lock.info().ttl is None


def test_a_server_without_the_module_says_how_to_load_it(tmp_path):
    from conftest import Server

    server = Server(module=False)
    try:
        with pytest.raises(ModuleMissingError, match="loadmodule") as raised:
            Lock(server.client(), "book").acquire()
        assert isinstance(raised.value, exceptions.ResponseError)
        assert server.client().get("book") is None
    finally:
        server.end()


def test_nobody_there_is_an_error_that_names_the_address():
    with pytest.raises(UnreachableError, match=r"localhost:1 ") as raised:
        Lock(Client(port=1), "book").acquire()
    assert isinstance(raised.value, exceptions.ConnectionError)
    # A pool may leave it to the library.
    with pytest.raises(UnreachableError, match=r"localhost:1 "):
        Lock(Client(connection_pool=library.ConnectionPool(port=1)), "book").acquire()


def test_a_refusal_keeps_the_servers_words(server):
    client = server.client()
    client.acl_setuser("reader", enabled=True, passwords=["+secret"], keys=["*"], commands=["+lock.info"])
    with pytest.raises(RefusedError, match="NOPERM"):
        Lock(server.client(username="reader", password="secret"), "book").acquire()
    with pytest.raises(RefusedError, match="NOAUTH|WRONGPASS"):
        Lock(server.client(username="reader", password="wrong"), "book").acquire()


def test_an_uncontended_section_is_two_commands(server):
    with Lock(server.client(), "warm up"):
        pass
    server.client().config_resetstat()
    lock = Lock(server.client(), "book")
    for _ in range(10):
        with lock:
            pass
    calls = server.calls()
    assert (calls.pop("lock.acquire"), calls.pop("lock.release")) == (10, 10)
    assert not set(calls) - {"info", "config|resetstat", "client|setinfo", "hello", "ping"}, calls


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_connection_is_kept_and_says_nothing_about_its_library(server, proxy, protocol):
    client = Client(port=proxy.port, protocol=protocol)
    for _ in range(20):
        with Lock(client, "book"):
            pass
    assert proxy.dialled == 1
    # Its name, its version, whether it wants to hear of maintenance: a command each.
    assert not any(b"CLIENT" in sent for sent in proxy.requested)


class Interrupted(BaseException):
    pass


def test_interrupted_at_any_moment_it_leaves_neither_lock_nor_place(client, monkeypatch):
    def interrupt(number, frame):
        raise Interrupted

    # Pytest keeps what Python swallowed, with all frames that led there, and so the lock that was acquired in one.
    monkeypatch.setattr(sys, "unraisablehook", lambda swallowed: None)
    before = signal.signal(signal.SIGALRM, interrupt)
    held = Lock(client, "held")
    held.acquire()
    interrupted = 0
    try:
        for moment in range(120):
            # Bounded, since Python swallows an exception that comes in the middle of a finaliser.
            lock = Lock(client, "held" if moment % 2 else f"free{moment}", blocking_timeout=5)
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0001 + moment * 0.00002)
                lock.acquire()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupted:
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            del lock
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted >= 60
    eventually(lambda: not client.keys("free*"), "no lock is left")
    eventually(lambda: held.info().waiters == 0, "no place is left")


def interrupted_at(lines, modules, bearing_none, work):
    """Whether an exception ended the work before so many lines of these modules had run."""

    def trace(frame, event, argument):
        nonlocal lines
        code = frame.f_code
        if not code.co_filename.endswith(modules) or code.co_name in bearing_none:
            return None
        # Where a mutex is left there is a line once more, but no moment.
        if event == "line" and not linecache.getline(code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            lines -= 1
            if lines == 0:
                raise Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except Interrupted:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.skipif(sys.version_info < (3, 11), reason="an exception may come between storing it and returning, too")
def test_interrupted_at_any_line_the_lock_object_holds_nothing(client):
    lock, modules = Lock(client, "book"), ("lock.py", "acquisition.py", "exchange.py")
    for count in itertools.count(1):
        # But for the last step, when the caller has it.
        if not interrupted_at(count, modules, ["_acquired"], lambda: lock.acquire(blocking=False)):
            break
        assert lock.local.token is None
        assert redis_lockkeeper.settled(20)
        assert client.get("book") is None
    assert count > 100


def test_a_release_that_is_interrupted_at_any_line_is_carried_out(client):
    modules = ("lock.py", "acquisition.py", "exchange.py", "watchdog.py")
    for count in itertools.count(1):
        lock = Lock(client, "book", timeout=300)
        lock.acquire()
        more = interrupted_at(count, modules, [], lock.release)
        # The lock object, if it was interrupted before anything was done.
        del lock
        assert redis_lockkeeper.settled(20), count
        assert client.get("book") is None
        if not more:
            break
    assert count > 100


def test_an_upgrade_that_is_interrupted_at_any_line_holds_nobody_up(client):
    # Where it waits for the watchdog, too.
    modules = ("lock.py", "exchange.py", "watchdog.py", "promise.py", "futures/_base.py", "threading.py")
    for count in itertools.count(1):
        lock = Lock(client, "book", shared=True, timeout=300)
        lock.acquire()
        more = interrupted_at(count, modules, [], lock.upgrade)
        del lock
        # Python 3.9 keeps an exception in the very last line, and with it the lock, in a cycle.
        gc.collect()
        assert redis_lockkeeper.settled(20), count
        assert not client.exists("book")
        if not more:
            break
    assert count > 100


def test_who_was_interrupted_while_it_waited_for_a_loss_holds_nobody_up(client):
    lost, kept = Lock(client, "book", timeout=0.6), Lock(client, "pen", timeout=0.6)
    assert lost.acquire()
    assert kept.acquire()
    # As an exception leaves it that is thrown into the midst of a wait.
    event = lost.lost
    event._cond.acquire()
    client.delete("book")
    eventually(lambda: lost.remaining() == 0)
    fence, until = kept.fence, time.monotonic() + 1.5
    while time.monotonic() < until:
        assert kept.check() == fence
        time.sleep(0.01)
    kept.release()
    event._cond.release()
    assert event.wait(20)


def test_a_loss_is_told_even_if_no_thread_can_be_started(client, monkeypatch):
    lock = Lock(client, "book", timeout=0.6)
    lock.acquire()
    event, start = lock.lost, threading.Thread.start

    def refused(thread):
        if thread.name == "lockkeeper-lost":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    client.delete("book")
    assert event.wait(5)


def test_the_end_of_a_block_that_is_interrupted_at_any_line_leaves_the_object_free(client):
    lock = Lock(client, "book", timeout=300)

    def end():
        lock.__exit__(None, None, None)

    for count in itertools.count(1):
        lock.__enter__()
        # But for the first steps, when nothing is done yet.
        more = interrupted_at(count, ("lock.py", "watchdog.py"), ["end", "__exit__", "_run", "_who", "_leaving"], end)
        assert lock.local.token is None
        assert redis_lockkeeper.settled(20), count
        assert client.get("book") is None
        if not more:
            break
    assert count > 50


def test_a_block_may_end_at_the_moment_when_another_thread_releases(client):
    lock = Lock(client, "book", thread_local=False)

    def trace(frame, event, argument):
        code = frame.f_code
        if code.co_name != "_leaving":
            return None
        if event == "line" and linecache.getline(code.co_filename, frame.f_lineno).strip() == "del tenures[last]":
            sys.settrace(None)
            thread = threading.Thread(target=lock.release)
            thread.start()
            thread.join()
        return trace

    def end():
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            lock.__exit__(None, None, None)
        finally:
            sys.settrace(before)

    lock.__enter__()
    with pytest.raises(NotHeldError):
        end()
    assert not lock._entered
    with lock:
        assert lock.owned()


def test_a_dropped_lock_is_released_even_if_its_finaliser_was_interrupted(client, monkeypatch):
    """Python swallows what a signal's handler raises in a finaliser, at its first step already."""

    def interrupted(tenure):
        raise Interrupted

    monkeypatch.setattr(sys, "unraisablehook", lambda swallowed: None)
    with monkeypatch.context() as patched:
        patched.setattr(Tenure, "__del__", interrupted)
        lock = Lock(client, "book", timeout=3)
        lock.acquire()
        del lock
    eventually(lambda: client.get("book") is None, "it is renewed for ever")


def test_a_watchdog_whose_start_was_interrupted_is_started_anew(client, monkeypatch):
    def interrupted(thread):
        raise Interrupted

    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(threading.Thread, "start", interrupted)
        Lock(client, "book").acquire()
    assert not client.exists("book")
    lock = Lock(client, "book", timeout=3)
    lock.acquire()
    renewed(lock)
    lock.release()


def test_an_exception_thrown_into_a_waiting_thread_ends_the_wait(client):
    import ctypes

    held, ended = Lock(client, "held"), threading.Event()
    held.acquire()

    def wait():
        try:
            Lock(client, "held").acquire()
        except Interrupted:
            ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: held.info().waiters == 1)
    # So that it is in the read.
    time.sleep(0.5)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Interrupted))
    assert ended.wait(20)
    eventually(lambda: held.info().waiters == 0)


def test_no_thread_and_no_connection_outlives_the_last_lock(server):
    client = server.client()
    with Lock(client, "book"):
        assert any(thread.name == "lockkeeper" for thread in threading.enumerate())
    assert redis_lockkeeper.close(5)
    assert not any(thread.name.startswith("lockkeeper") for thread in threading.enumerate())
    with Lock(client, "book"):
        pass


def test_a_finaliser_takes_no_lock(client):
    """It may run at any moment, also where the watchdog's own mutex is held."""
    from redis_lockkeeper import watchdog

    lock, done = Lock(client, "book"), threading.Event()
    lock.acquire()

    def collect(lock):
        with watchdog._mutex:
            lock.local.tenures.clear()
        done.set()

    tenure = lock.local.tenure
    thread = threading.Thread(target=lambda: collect(holder.pop()), daemon=True)
    holder = [Lock(client, "book", thread_local=False)]
    holder[0].local.tenures[tenure] = None
    lock.local.tenures.clear()
    tenure = None
    thread.start()
    assert done.wait(20), "a deadlock"
    eventually(lambda: client.get("book") is None)


def test_a_connection_class_of_ones_own_is_used(server):
    made = []

    class OwnConnection(library.Connection):
        def connect(self):
            made.append(self)
            return super().connect()

    pool = library.ConnectionPool(connection_class=OwnConnection, port=server.port)
    with Lock(Client(connection_pool=pool), "book"):
        assert made


@pytest.mark.parametrize("reply", [b"1", "OK", True, 2, []])
def test_only_what_is_exactly_an_answer_of_ours_is_one(reply):
    with pytest.raises(UnreachableError, match="what answers is not Lockkeeper"):
        read_answer(reply)
    if reply != 2:
        with pytest.raises(UnreachableError, match="what answers is not Lockkeeper"):
            read_fence(reply)


def test_errors_and_attributes_are_those_of_the_library(client):
    assert issubclass(LockLostError, exceptions.LockNotOwnedError)
    lock = Lock(client, "book")
    assert lock.redis is lock.valkey is client
