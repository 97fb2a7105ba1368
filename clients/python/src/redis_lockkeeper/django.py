"""Locks in Django: `cache.lock()` is ours by one line of settings, for django-redis and django-valkey.

CACHES = {"default": {…, "OPTIONS": {"CLIENT_CLASS": "redis_lockkeeper.django.Client"}}}
"""

from __future__ import annotations

from typing import Any, Optional

from django.core.cache import caches
from django.core.management.base import CommandError

from .errors import BusyError
from .lock import Lock

try:
    from django_redis.client import DefaultClient
except ImportError:
    from django_valkey.client import DefaultClient  # type: ignore[no-redef,unused-ignore]

#: What a program ends with that may be tried again later: EX_TEMPFAIL, as the command `lockkeeper run`.
TRY_LATER = 75


class LockMixin:
    """Gives a client class of django-redis or django-valkey our locks."""

    def lock(
        self,
        key: str,
        version: Optional[int] = None,
        timeout: Optional[float] = None,
        sleep: float = 0.1,
        blocking: bool = True,
        blocking_timeout: Optional[float] = None,
        client: Any = None,
        thread_local: bool = True,
        **settings: Any,
    ) -> Lock:
        """The lock of this key, under the cache's prefix and version. Takes whatever `redis_lockkeeper.Lock` does."""
        client = client or self.get_client(write=True)  # type: ignore[attr-defined]
        name = str(self.make_key(key, version=version))  # type: ignore[attr-defined]
        settings.pop("lock_class", None)
        return Lock(client, name, timeout, sleep, blocking, blocking_timeout, thread_local, **settings)

    get_lock = lock


class Client(LockMixin, DefaultClient):  # type: ignore[misc]
    """For CLIENT_CLASS."""


class LockedCommand:
    """A mixin, named before BaseCommand, for a management command of which one at a time may run on all machines.
    While it runs elsewhere it ends with the exit code 75; when its lock is lost, with an error after `handle`.
    """

    #: By default the name of the command.
    lock_name: Optional[str] = None
    lock_timeout: Optional[float] = None
    #: How many seconds to wait for the one that runs; None waits without bound.
    lock_wait: Optional[float] = 0
    lock_cache = "default"

    def execute(self, *args: Any, **options: Any) -> Any:
        """Runs the command under its lock."""
        name = self.lock_name or f"command:{type(self).__module__.rpartition('.')[2]}"
        cache: Any = caches[self.lock_cache]
        try:
            with cache.lock(name, timeout=self.lock_timeout, blocking_timeout=self.lock_wait):
                return super().execute(*args, **options)  # type: ignore[misc]
        except BusyError as error:
            raise CommandError(f"{name} is running already", returncode=TRY_LATER) from error
