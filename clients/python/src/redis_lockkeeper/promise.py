"""What one thread waits for and another tells."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Callable, Generic, Optional, TypeVar

_T = TypeVar("_T")


class Promise(Generic[_T]):
    """It takes no lock. A future's stays taken if an exception is thrown into who waits for it; the watchdog would
    hang when it tells, and all locks of the process with it.
    """

    def __init__(self) -> None:
        self._told: Optional[tuple[Any, Optional[BaseException]]] = None
        self._callbacks: deque[Callable[[], object]] = deque()

    def set_result(self, result: _T) -> None:
        self._tell(result, None)

    def set_exception(self, error: BaseException) -> None:
        self._tell(None, error)

    def _tell(self, result: Any, error: Optional[BaseException]) -> None:
        self._told = result, error
        self._call()

    def _call(self) -> None:
        # Each is taken out in one step, and so called once, whoever comes first.
        with suppress(IndexError):
            while True:
                self._callbacks.popleft()()

    def done(self) -> bool:
        return self._told is not None

    def result(self) -> _T:
        """What was told; it must be done."""
        assert self._told is not None
        result, error = self._told
        if error is not None:
            raise error
        value: _T = result
        return value

    def when_done(self, callback: Callable[[], object]) -> None:
        """Has it called once, in the thread that tells, or in this one if it is done. It must not block."""
        self._callbacks.append(callback)
        if self.done():
            self._call()

    def wait(self, timeout: Optional[float] = None) -> bool:
        """Until it is done, for so many seconds at most. Whether it is."""
        bell: SimpleQueue[None] = SimpleQueue()
        self.when_done(lambda: bell.put(None))
        with suppress(Empty):
            bell.get(timeout=timeout)
        return self.done()
