"""What the watchdog tells those who wait for it."""

import threading

from redis_lockkeeper.promise import Promise


def test_all_who_wait_are_woken_and_called_once_whoever_comes_first():
    for _ in range(200):
        promise, called, woken = Promise(), [], []

        def wait(promise=promise, called=called, woken=woken):
            promise.when_done(lambda: called.append(promise.result()))
            woken.append(promise.wait(20))

        threads = [threading.Thread(target=wait) for _ in range(3)]
        threads.insert(1, threading.Thread(target=promise.set_result, args=(7,)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert woken == [True] * 3
        assert called == [7] * 3


def test_who_gives_up_waiting_holds_nobody_up():
    promise = Promise()
    assert not promise.wait(0.01)
    promise.set_exception(ValueError("told"))
    assert promise.wait(0)
