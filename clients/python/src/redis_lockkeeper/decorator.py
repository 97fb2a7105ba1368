"""A decorator for functions, methods and coroutines that run under a lock."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable, Optional, TypeVar, cast

from . import lock
from .errors import InvalidError

_Function = TypeVar("_Function", bound=Callable[..., Any])


def locked(
    client: Any, name: str, timeout: Optional[float] = None, wait: Optional[float] = None, **settings: Any
) -> Callable[[_Function], _Function]:
    """Runs the function under the lock `name`, in which `{argument}` stands for what it is called with, also by
    default, as in `str.format`: `@locked(client, "report:{customer.id}")`.

    Args:
        client: of redis-py or valkey-py, an asyncio one for a coroutine function; or a function that returns one,
            which is called each time.
        name: of the lock.
        timeout: as of a lock.
        wait: for how many seconds, without bound by default; 0 is one try.
        **settings: whatever else a lock takes.

    The call raises:
        BusyError: a LockError, if the lock was not to be had in time. The function did not run.
        LockLostError: if it was lost meanwhile.
    """

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)

        def options(args: Any, kwargs: Any) -> dict[str, Any]:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            found = client() if inspect.isroutine(client) else client
            return {
                "redis": found,
                "name": name.format(**bound.arguments),
                "timeout": timeout,
                "blocking_timeout": wait,
                **settings,
            }

        if inspect.iscoroutinefunction(function):
            from .asyncio import Lock

            @functools.wraps(function)
            async def run_task(*args: Any, **kwargs: Any) -> Any:
                async with Lock(**options(args, kwargs)):
                    return await function(*args, **kwargs)

            return cast(_Function, run_task)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise InvalidError("a generator runs after its call has returned: use `with` inside it")

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with lock.Lock(**options(args, kwargs)):
                return function(*args, **kwargs)

        return cast(_Function, run)

    return decorate
