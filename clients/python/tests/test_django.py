"""Django, with django-redis or django-valkey, whichever is installed: the book loan is an example of its use."""

import asyncio
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest

from conftest import LIBRARY, AsyncClient, eventually
from redis_lockkeeper import BusyError, InvalidError, LockLostError, locked

PROJECT = """
import os, sys, threading
import django
from django.conf import settings
from django.core.cache import cache
from django.http import HttpResponse
from django.urls import path

settings.configure(
    SECRET_KEY="x", ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], DEBUG=True, INSTALLED_APPS=["library"],
    CACHES={{"default": {{
        "BACKEND": "{backend}", "LOCATION": f"{scheme}://127.0.0.1:{{os.environ['PORT']}}/0", "KEY_PREFIX": "shop",
        "OPTIONS": {{"CLIENT_CLASS": "redis_lockkeeper.django.Client"}}}}}},
)
django.setup()

def borrow(request, book):
    lock = cache.lock(f"loan:{{book}}", timeout=5, blocking=False)
    if not lock.acquire():
        return HttpResponse("borrowing in progress", status=409)
    with_lock = cache.get(f"copies:{{book}}")
    if not with_lock:
        lock.release()
        return HttpResponse("no copy left", status=410)
    while cache.get("pause"):
        pass
    cache.set(f"copies:{{book}}", with_lock - 1)
    lock.release()
    return HttpResponse(f"enjoy the book, loan {{os.getpid()}}")

urlpatterns = [path("borrow/<book>", borrow)]

if __name__ == "__main__":
    from django.core.management import execute_from_command_line
    execute_from_command_line(sys.argv)
"""

COMMAND = """
import time
from django.core.cache import cache
from django.core.management.base import BaseCommand
from redis_lockkeeper.django import LockedCommand

class Command(LockedCommand, BaseCommand):
    def handle(self, *args, **options):
        cache.incr("runs")
        while cache.get("pause"):
            time.sleep(0.01)
"""


@pytest.fixture
def project(tmp_path, server):
    pytest.importorskip("django")
    backend = f"django_{LIBRARY}"
    pytest.importorskip(backend)
    name = f"{backend}.cache.{'RedisCache' if LIBRARY == 'redis' else 'ValkeyCache'}"
    (tmp_path / "shop.py").write_text(PROJECT.format(backend=name, scheme=LIBRARY))
    commands = tmp_path / "library/management/commands"
    commands.mkdir(parents=True)
    for folder in (tmp_path / "library", tmp_path / "library/management", commands):
        (folder / "__init__.py").touch()
    (commands / "lend.py").write_text(COMMAND)
    environment = {**os.environ, "PORT": str(server.port), "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}

    def start(*args, **more):
        return subprocess.Popen([sys.executable, "shop.py", *args], cwd=tmp_path, env=environment, **more)

    return start


def in_cache(project, code):
    process = project("shell", "-c", code, stdout=subprocess.PIPE, text=True)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return said.strip().split("\n")[-1]


@pytest.mark.long
def test_the_last_copy_of_a_book_is_lent_once(project, server, client):
    from conftest import free_port

    port = free_port()
    in_cache(project, "from django.core.cache import cache; cache.set('copies:dune', 1); cache.set('pause', 1)")
    web = project("runserver", "--noreload", str(port), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    answers = []

    def ask():
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/borrow/dune", timeout=30) as answer:
                answers.append(answer.read().decode())
        except urllib.error.HTTPError as error:
            answers.append(error.read().decode()[:40])

    try:

        def is_up():
            try:
                return urllib.request.urlopen(f"http://127.0.0.1:{port}/borrow/other", timeout=5)
            except urllib.error.HTTPError as error:
                return error.code == 410
            except OSError:
                return False

        eventually(is_up, "the server is up", 60)
        first = threading.Thread(target=ask)
        first.start()
        eventually(lambda: client.keys("*loan:dune*"))
        others = [threading.Thread(target=ask) for _ in range(10)]
        for each in others:
            each.start()
        for each in others:
            each.join()
        assert answers == ["borrowing in progress"] * 10
        client.delete(*client.keys("*pause*"))
        first.join()
        assert answers[-1].startswith("enjoy the book")
        ask()
        assert answers[-1] == "no copy left"
        assert not client.keys("*loan:*")
    finally:
        web.kill()
        web.wait()


@pytest.mark.long
def test_one_management_command_at_a_time(project, client):
    in_cache(project, "from django.core.cache import cache; cache.set('runs', 0); cache.set('pause', 1)")
    first = project("lend")
    eventually(lambda: client.keys("*command:lend*"), timeout=40)
    second = project("lend", stderr=subprocess.PIPE, text=True)
    _, said = second.communicate(timeout=60)
    assert second.returncode == 75
    assert "command:lend is running already" in said
    client.delete(*client.keys("*pause*"))
    assert first.wait(60) == 0
    assert in_cache(project, "from django.core.cache import cache; print(cache.get('runs'))") == "1"


def test_cache_lock_takes_our_settings(project, client):
    code = (
        "from django.core.cache import cache\n"
        "with cache.lock('x', timeout=5, renew=False, limit=4) as lock:\n"
        "    print(type(lock).__module__, lock.name, lock.check() > 0, lock.info().limit)"
    )
    assert in_cache(project, code) == "redis_lockkeeper.lock shop:1:x True 4"


class Customer:
    def __init__(self, number):
        self.id = number


def test_a_function_runs_under_the_lock_of_its_arguments(client):
    @locked(client, "report:{customer.id}:{kind}", timeout=5, wait=0)
    def report(customer, kind="short"):
        """Reports."""
        assert client.exists(f"report:{customer.id}:{kind}")
        with pytest.raises(BusyError):
            report(customer, kind)
        return kind

    assert report(Customer(7)) == "short"
    assert report(Customer(7), kind="long") == "long"
    assert (report.__name__, report.__doc__) == ("report", "Reports.")
    assert not client.keys("report:*")


def test_a_method_and_a_client_that_is_made_later(server):
    class Account(Customer):
        @locked(lambda: server.client(), "account:{self.id}", timeout=5)
        def pay(self):
            server.client().delete(f"account:{self.id}")

    with pytest.raises(LockLostError):
        Account(3).pay()


def test_a_coroutine_runs_under_a_lock_for_asyncio(server):
    async def main():
        redis = AsyncClient(port=server.port)

        @locked(redis, "report:{number}", wait=0)
        async def report(number):
            with pytest.raises(BusyError):
                await report(number)
            return number

        assert await report(7) == 7
        await redis.aclose()

    asyncio.run(main())


def test_a_generator_is_refused(client):
    with pytest.raises(InvalidError):

        @locked(client, "x")
        def numbers():
            yield 1
