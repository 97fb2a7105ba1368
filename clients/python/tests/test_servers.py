"""TLS, Sentinel and Cluster: whatever the user's client is configured for."""

import asyncio
import importlib
import socket
import subprocess
import time

import pytest

import redis_lockkeeper
from conftest import LIBRARY, SERVER, AsyncClient, Client, Server, eventually, free_port, renewed
from redis_lockkeeper import Lock
from redis_lockkeeper.asyncio import Lock as AsyncLock

Sentinel = importlib.import_module(f"{LIBRARY}.sentinel").Sentinel
AsyncSentinel = importlib.import_module(f"{LIBRARY}.asyncio.sentinel").Sentinel
cluster = importlib.import_module(f"{LIBRARY}.cluster")
Cluster = cluster.RedisCluster if LIBRARY == "redis" else cluster.ValkeyCluster
async_cluster = importlib.import_module(f"{LIBRARY}.asyncio.cluster")
AsyncCluster = async_cluster.RedisCluster if LIBRARY == "redis" else async_cluster.ValkeyCluster


@pytest.mark.long
def test_tls(tmp_path):
    key, certificate, port = tmp_path / "key.pem", tmp_path / "certificate.pem", free_port()
    openssl = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    openssl += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(openssl, check=True, capture_output=True)
    options = ["--tls-port", str(port), "--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    options += ["--tls-ca-cert-file", str(certificate), "--tls-auth-clients", "no"]
    server = Server(*options)
    try:
        settings = {"host": "localhost", "port": port, "ssl": True, "ssl_ca_certs": str(certificate)}
        held = Lock(Client(**settings), "book", timeout=6)
        held.acquire()
        eventually(lambda: server.calls().get("lock.renew", 0) >= 1)
        assert held.owned()
        # A wait that is given up, over TLS.
        assert not Lock(Client(**settings), "book").acquire(blocking_timeout=3)
        eventually(lambda: held.info().waiters == 0)
        held.release()

        async def main():
            client = AsyncClient(**settings)
            renewed = server.calls()["lock.renew"]
            async with AsyncLock(client, "book", timeout=6) as lock:
                eventually(lambda: server.calls()["lock.renew"] > renewed)
                assert await lock.owned()
                task = asyncio.ensure_future(AsyncLock(client, "book").acquire())
                while not (await lock.info()).waiters:
                    await asyncio.sleep(0.01)
                task.cancel()
                await asyncio.wait({task})
                for _ in range(500):
                    if not (await lock.info()).waiters:
                        break
                    await asyncio.sleep(0.01)
                assert not (await lock.info()).waiters
            for moment in range(60):
                task = asyncio.ensure_future(AsyncLock(client, f"free{moment}").acquire())
                await asyncio.sleep(moment * 0.00003)
                task.cancel()
                await asyncio.wait({task})
            del task
            await client.aclose()

        asyncio.run(main())
        eventually(lambda: not server.client().keys())
        redis_lockkeeper.settled(5)
    finally:
        server.end()


@pytest.fixture
def sentinel(tmp_path):
    master = Server()
    replica = Server("--replicaof", "127.0.0.1", str(master.port))
    eventually(lambda: replica.client().info("replication")["master_link_status"] == "up")
    port, configuration = free_port(), tmp_path / "sentinel.conf"
    lines = [f"port {port}", f"dir {tmp_path}", f"sentinel monitor library 127.0.0.1 {master.port} 1"]
    lines += ["sentinel down-after-milliseconds library 500", "sentinel failover-timeout library 4000"]
    configuration.write_text("\n".join(lines))
    process = subprocess.Popen([SERVER, str(configuration), "--sentinel"], stdout=subprocess.DEVNULL)
    eventually(lambda: Client(port=port).execute_command("SENTINEL", "MASTER", "library"))
    eventually(lambda: len(Client(port=port).execute_command("SENTINEL", "REPLICAS", "library")) == 1, timeout=30)
    yield port, master, replica
    redis_lockkeeper.close(10)
    process.kill()
    process.wait()
    master.end()
    replica.end()


@pytest.mark.long
@pytest.mark.parametrize("face", ["threads", "asyncio"])
def test_a_lock_goes_along_with_a_failover(sentinel, face):
    port, master, replica = sentinel

    async def main():
        if face == "asyncio":
            client = AsyncSentinel([("127.0.0.1", port)], socket_timeout=1).master_for("library")
            lock = AsyncLock(client, "book", timeout=15)
            assert await lock.acquire()
        else:
            client = Sentinel([("127.0.0.1", port)], socket_timeout=1).master_for("library")
            lock = Lock(client, "book", timeout=15)
            assert lock.acquire()
        eventually(lambda: replica.client().exists("book"))
        master.kill()
        eventually(lambda: replica.client().info("replication")["role"] == "master", timeout=30)
        # The loop may be blocked meanwhile: the watchdog finds the master by itself.
        eventually(lambda: replica.client().pttl("book") > 14_000, "it is renewed there", 30)
        lock.check()
        if face == "asyncio":
            await lock.release()
            await client.aclose()
        else:
            lock.release()

    asyncio.run(main())
    assert not replica.client().exists("book")


@pytest.fixture(scope="module")
def nodes():
    buses = [free_port() for _ in range(3)]
    servers = [Server("--cluster-enabled", "yes", "--cluster-port", str(bus)) for bus in buses]
    bounds = [0, 5461, 10923, 16384]
    for number, each in enumerate(servers):
        slots = f"{bounds[number]} {bounds[number + 1] - 1}".split()
        each.client().execute_command("CLUSTER ADDSLOTSRANGE", *slots)
        each.client().execute_command("CLUSTER MEET", "127.0.0.1", str(servers[0].port), str(buses[0]))
    for each in servers:
        eventually(lambda: b"cluster_state:ok" in raw(each, "CLUSTER INFO"), timeout=60)  # noqa: B023
    yield servers
    redis_lockkeeper.close(10)
    for each in servers:
        each.end()


def raw(server, *command):
    connection = server.client().connection_pool.make_connection()
    try:
        connection.send_command(*command[0].split(), *command[1:])
        return connection.read_response()
    finally:
        connection.disconnect()


def move(nodes, key, *, halfway):
    """Moves the slot of a key to the next node, as `redis-cli --cluster reshard` does."""
    slot = raw(nodes[0], "CLUSTER KEYSLOT", key)
    ids = [raw(each, "CLUSTER MYID").decode() for each in nodes]
    source = next(n for n, each in enumerate(nodes) if raw_owns(each, key))
    target = (source + 1) % 3
    raw(nodes[target], "CLUSTER SETSLOT", slot, "IMPORTING", ids[source])
    raw(nodes[source], "CLUSTER SETSLOT", slot, "MIGRATING", ids[target])
    raw(nodes[source], "MIGRATE", "127.0.0.1", nodes[target].port, key, 0, 5000)
    halfway(nodes[target])
    for each in (target, source):
        raw(nodes[each], "CLUSTER SETSLOT", slot, "NODE", ids[target])


def renewed_at(server, key):
    """Waits for a renewal of the key there, while its slot is on its way."""
    connection = server.client().connection_pool.make_connection()

    def left():
        replies = []
        for command in (["ASKING"], ["PTTL", key]):
            connection.send_command(*command)
            replies.append(connection.read_response())
        return replies[1]

    before = left()
    eventually(lambda: left() > before, "a renewal there")
    connection.disconnect()


def raw_owns(server, key):
    try:
        return bool(raw(server, "EXISTS", key))
    except Exception:
        return False


@pytest.mark.parametrize("silent", [True, False])
def test_a_cluster_that_is_not_there_is_unreachable_in_time(silent):
    """A client for asyncio learns the map when it is first used."""

    async def main(port):
        lock = AsyncLock(AsyncCluster(host="127.0.0.1", port=port), "book", blocking_timeout=0.5)
        start = time.monotonic()
        with pytest.raises(redis_lockkeeper.UnreachableError, match="the map of the cluster"):
            await lock.acquire()
        assert 0.45 < time.monotonic() - start < 2
        # Nor does a wait that is cancelled say anything else.
        waiting = asyncio.ensure_future(lock.acquire(blocking_timeout=20))
        await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    with socket.create_server(("127.0.0.1", 0)) as nobody_accepts:
        asyncio.run(main(nobody_accepts.getsockname()[1] if silent else free_port()))


@pytest.mark.long
def test_a_client_that_knows_no_slot_of_its_cluster_says_so_at_once(nodes):
    client = Cluster(host="127.0.0.1", port=nodes[0].port)
    client.nodes_manager.slots_cache.clear()
    start = time.monotonic()
    with pytest.raises(redis_lockkeeper.UnreachableError, match="no node is known"):
        Lock(client, "book").acquire(blocking=False)
    assert time.monotonic() - start < 3


@pytest.mark.long
@pytest.mark.parametrize("face", ["threads", "asyncio"])
def test_locks_of_a_cluster_are_kept_where_they_are_and_where_they_go(nodes, face):
    key = f"book-{face}"

    async def main():
        if face == "asyncio":
            client = AsyncCluster(host="127.0.0.1", port=nodes[0].port)
        else:
            client = Cluster(host="127.0.0.1", port=nodes[0].port)
        kind = AsyncLock if face == "asyncio" else Lock

        async def done(call, *args, **more):
            result = call(*args, **more)
            return await result if face == "asyncio" else result

        locks = [kind(client, f"{key}{number}", timeout=6) for number in range(20)]
        for lock in locks:
            assert await done(lock.acquire)
        moving = kind(client, key, timeout=6)
        assert await done(moving.acquire)
        renewed(moving)
        for lock in locks:
            lock.check()

        def halfway(target):
            renewed_at(target, key)
            if face == "threads":
                eventually(moving.upgrade, "it goes where the renewal before it went")

        # The source says ASK as long as the slot is on its way, then MOVED.
        move(nodes, key, halfway=halfway)
        renewed(moving)
        assert await done(moving.owned)
        await done(moving.release)
        assert not await done(moving.locked)
        assert await done(moving.acquire)
        other = kind(client, key)
        assert not await done(other.acquire, blocking_timeout=1)
        await done(moving.release)
        for lock in locks:
            await done(lock.release)
        await done(client.aclose if face == "asyncio" else client.close)

    asyncio.run(main())
