"""Connections of a store: URLs, the application's own clients, and servers that can't be used."""

import asyncio
import http.server
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
import trustme

from headgate import (
    Decision,
    Gate,
    HeadgateError,
    InvalidInput,
    Limiter,
    Policy,
    RedisStore,
    StoreAway,
    StoreError,
    per_day,
)
from headgate.stores.base import Ask, Verb
from headgate.stores.redis.clients import Clients
from headgate.stores.redis.startup import PERMISSIONS, check_server
from tests.support.redis_store import ask_until_answered
from tests.support.valkey import PATIENCE, ValkeyServer, cluster, replicated_server, wait_for

pytestmark = pytest.mark.once

UNHURRIED = Policy(store={"timeout": PATIENCE})


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no store here time out on a slow machine, not even one that is made from a URL alone."""
    make: Any = RedisStore.__init__
    monkeypatch.setitem(make.__kwdefaults__, "timeout", PATIENCE)


def check_sync_and_async(store: RedisStore, key: str = "a") -> list[bool]:
    """Make four checks at a limit of three, the last two through asyncio."""
    limiter = Limiter(per_day(3), store=store)

    async def rest() -> list[Decision]:
        return [await limiter.acheck(key) for _ in range(2)]

    decisions = [limiter.check(key) for _ in range(2)] + asyncio.run(rest())
    assert not any(decision.degraded for decision in decisions)
    return [bool(decision) for decision in decisions]


# Servers that can be used ---------------------------------------------------------------------------------------------


async def test_a_limiter_and_a_gate_take_a_url(server: ValkeyServer) -> None:
    one = Limiter("3/day", store=server.url, name="url")
    other = Limiter("3/day", store=server.url.replace("redis:", "valkey:"), name="url")
    assert [bool(limiter.check("a")) for limiter in (one, other, one, other)] == [True, True, True, False]
    one.close()
    other.close()
    with Gate(UNHURRIED, store=server.url) as gate:
        assert gate.check("a", "ws", "heavy").remaining == 9
    async with Limiter("3/day", store=server.url, name="url") as limiter:
        assert not await limiter.acheck("a")
    async with Gate(UNHURRIED, store=server.url) as gate:
        assert (await gate.acheck("a", "ws", "heavy")).remaining == 8
    with server.client() as client:
        wait_for(lambda: client.info()["connected_clients"] == 1, "the connections to close")


@pytest.mark.long
def test_password_user_and_database() -> None:
    with ValkeyServer("--requirepass", "sesame") as server:
        where = f"127.0.0.1:{server.port}"
        with RedisStore(f"redis://:sesame@{where}/3") as store:
            store.verify()
            assert check_sync_and_async(store) == [True, True, True, False]
        with server.client(password="sesame", db=3) as client:
            assert client.dbsize() == 1
            client.acl_setuser("agent", enabled=True, passwords=["+open"], keys=["headgate*"], categories=["+@all"])
        with RedisStore(f"redis://agent:open@{where}") as store:
            store.verify()
            assert check_sync_and_async(store) == [True, True, True, False]
        for url in (f"redis://:wrong@{where}", f"redis://{where}"):
            with RedisStore(url) as store, pytest.raises(StoreError) as caught:
                store.verify()
            assert str(caught.value).startswith("store: expected a user and a password that the server accepts, got")
            assert "wrong" not in str(caught.value).replace("WRONGPASS", "")


def test_keys_begin_with_the_prefix(server: ValkeyServer) -> None:
    with RedisStore(server.url, prefix="mine:") as store:
        assert check_sync_and_async(store) == [True, True, True, False]
    with server.client() as client:
        assert client.keys("mine:*") == [b"mine:{a}b1:3/day:"]


def tls(server: ValkeyServer, certificate: trustme.LeafCert) -> AbstractContextManager[int]:
    """A port that speaks TLS and forwards everything to a server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)
    return proxy([server], lambda connection: context.wrap_socket(connection, server_side=True))


@contextmanager
def proxy(
    targets: list[ValkeyServer], wrap: Callable[[socket.socket], socket.socket] = lambda connection: connection
) -> Iterator[int]:
    """A port that forwards every new connection to the first of some servers, which may change."""
    listening = socket.create_server(("127.0.0.1", 0))
    pairs: list[socket.socket] = []

    def pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                outer = wrap(listening.accept()[0])
                inner = socket.create_connection(("127.0.0.1", targets[0].port))
                pairs.extend((outer, inner))
                for source, target in ((outer, inner), (inner, outer)):
                    threading.Thread(target=pump, args=(source, target), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listening.getsockname()[1]
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        for one in (listening, *pairs):
            one.close()


def test_tls(server: ValkeyServer, tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    with (
        tls(server, authority.issue_cert("127.0.0.1")) as port,
        RedisStore(f"rediss://127.0.0.1:{port}?ssl_ca_certs={tmp_path}/ca.pem", prefix="tls:") as store,
    ):
        assert check_sync_and_async(store) == [True, True, True, False]
    with tls(server, trustme.CA().issue_cert("127.0.0.1")) as port:
        url = f"rediss://127.0.0.1:{port}?ssl_ca_certs={tmp_path}/ca.pem"
        with RedisStore(url) as store, pytest.raises(StoreAway, match="certificate"):
            store.verify()


async def test_an_address_that_moves_to_another_master_is_followed(kind: str) -> None:
    """As in a failover: the old master still answers, but refuses writes."""
    with ValkeyServer() as old, ValkeyServer() as new:
        targets = [old]
        with proxy(targets) as port, RedisStore(f"redis://127.0.0.1:{port}") as store, old.client() as client:
            limiter = Limiter(per_day(3), store=store)

            async def check(key: str) -> Decision:
                return await limiter.acheck(key) if kind == "tasks" else limiter.check(key)

            assert not (await check("a")).degraded
            client.replicaof("127.0.0.1", new.port)
            targets[0] = new
            assert (await check("a")).degraded
            await ask_until_answered(partial(check, "b"))
            await store.aclose()
        with new.client() as client:
            assert client.keys("*") == [b"headgate:{b}b1:3/day:"]


@pytest.mark.parametrize("call", [lambda store: store.change_log().read(), lambda store: store.clear("a", per_day(1))])
def test_a_thread_that_meets_a_read_only_server_renews_the_client(
    call: Callable[[RedisStore], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a task does: the server was a master when the client was made."""

    def refuse(*_: object, **__: object) -> None:
        raise redis.ReadOnlyError("You can't write against a read only replica.")

    for name in ("eval", "scan_iter"):
        monkeypatch.setattr(redis.Redis, name, refuse)
    with RedisStore("redis://127.0.0.1:1") as store:
        before = store._clients.client()
        with pytest.raises(StoreAway, match="ReadOnlyError"):
            call(store)
        assert store._clients.client() is not before


async def test_a_pipeline_that_meets_a_read_only_server_renews_the_client(kind: str) -> None:
    """Calls of a cluster are pipelines: their errors are among the replies."""
    commands: list[list[Any]] = [["SET", key, "1"] for key in ("a", "b")]
    with ValkeyServer() as server, RedisStore(server.url) as store, server.client() as client:
        client.replicaof("127.0.0.1", server.port)
        clients = store._clients

        async def current() -> object:
            return await clients.aclient() if kind == "tasks" else clients.client()

        before = await current()
        replies = await clients.aexchange(commands) if kind == "tasks" else clients.exchange(commands)
        assert [type(reply) for reply in replies] == [redis.ReadOnlyError] * 2
        assert await current() is not before
        await store.aclose()


def test_a_unix_socket(tmp_path: Path) -> None:
    with ValkeyServer("--unixsocket", str(tmp_path / "s")):
        with RedisStore(f"unix://{tmp_path}/s") as store:
            assert check_sync_and_async(store) == [True, True, True, False]
        for url in (f"redis+unix://{tmp_path}/s", f"async+valkey+unix://{tmp_path}/s"):
            with RedisStore(url) as store:
                assert check_sync_and_async(store)[0] is False  # it is the same server


def test_sentinel() -> None:
    with (
        replicated_server() as (_master, _replica, sentinel),
        RedisStore(f"redis+sentinel://127.0.0.1:{sentinel.port}/main") as store,
    ):
        store.verify()
        assert check_sync_and_async(store) == [True, True, True, False]


@pytest.mark.long
def test_cluster() -> None:
    with cluster() as nodes, RedisStore(f"redis+cluster://127.0.0.1:{nodes[0].port}") as store:
        store.verify()
        for key in "abcdef":  # in slots of every node
            assert check_sync_and_async(store, key) == [True, True, True, False]
        assert all(node.client().dbsize() for node in nodes)
        asks = [Ask("team", "t", per_day(3), 1), Ask("agent", "a", per_day(3), 1)]
        with pytest.raises(InvalidInput, match="asks: expected keys in one slot of the cluster"):
            store.apply(Verb.CHECK, asks, 0)
        assert store.apply(Verb.CHECK, [Ask(ask.name, "t", ask.limit, ask.cost) for ask in asks], 0)
        own = redis.RedisCluster(host="127.0.0.1", port=nodes[0].port)
        aown = redis.asyncio.RedisCluster(host="127.0.0.1", port=nodes[0].port)
        assert [Limiter(per_day(3), store=RedisStore((own, aown))).check("g").remaining for _ in range(2)] == [2, 1]
        own.close()


async def test_clients_of_the_application(server: ValkeyServer) -> None:
    client = server.client()
    store = RedisStore(client, prefix="own:")
    limiter = Limiter(per_day(2), store=store)
    assert [bool(limiter.check("a")) for _ in range(3)] == [True, True, False]
    with pytest.raises(HeadgateError, match="got only one for threads; pass both"):
        await limiter.acheck("a")
    async with redis.asyncio.Redis(port=server.port) as aclient:
        only = Limiter(per_day(2), store=RedisStore(aclient, prefix="own:"))
        assert not await only.acheck("a")
        with pytest.raises(HeadgateError, match="got only one for asyncio; pass both"):
            only.check("a")
        with pytest.raises(InvalidInput, match="expected a client for threads with remember_denials or draw_ahead"):
            RedisStore(aclient, draw_ahead=0.1)
        two = Limiter(per_day(2), store=RedisStore((client, aclient), prefix="own:"))
        assert not await two.acheck("a")
        assert not two.check("a")
        await two.store.averify()  # type: ignore[attr-defined]
    store.close()
    assert client.ping()  # it is the application's to close
    client.close()


# Bad URLs, options and servers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://localhost", "store: expected a URL such as redis://host:6379/0, "),
        ("redis://", "store: expected a URL such as "),
        ("redis://localhost:port", "store: expected a URL such as "),
        ("redis+sentinel://localhost:26379", "store: expected the master's name, as in redis+sentinel://"),
        (
            "redis+cluster://localhost:port",
            "store: expected host:port,host:port in the URL, got 'redis+cluster://local",
        ),
        (
            "redis+cluster://localhost:7000,",
            "store: expected host:port,host:port in the URL, got 'redis+cluster://local",
        ),
        ("unix+cluster:///path", "store: expected a URL such as "),
        ("redis+http://localhost", "store: expected a URL such as "),
        *[
            (
                f"{scheme}?socket_keepalive=true&on_failure=open",
                "store: expected options of a connection of redis-py in the URL, such as socket_keepalive, got",
            )
            for scheme in (
                "redis://localhost",
                "redis+sentinel://localhost/main",
                "redis+cluster://localhost",
                "unix:///a",
            )
        ],
        ("redis://localhost?ssl=true", "store: expected options of a connection of redis-py in the URL, such as "),
    ],
)
def test_a_bad_url_is_refused(url: str, text: str) -> None:
    for make in (RedisStore, lambda url: Limiter("1/day", store=url), lambda url: Gate(store=url)):
        with pytest.raises(InvalidInput) as caught:
            make(url)
        assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost?max_connections=5&socket_keepalive=true&db=3",
        "rediss://localhost?ssl_ca_certs=ca.pem",
        "redis+sentinel://localhost/main?check_connection=true",
        "rediss+cluster://localhost?ssl_ca_certs=ca.pem&require_full_coverage=false",
        "unix:///path?db=2",
    ],
)
def test_options_of_connections_are_part_of_a_url(url: str) -> None:
    RedisStore(url).close()


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:s3cret@localhost:port",
        "redis://s3cret@localhost:port",
        "redis://user:p@s3cret@localhost:port",
        "redis://user:s3cret/@localhost",
        "redis://user:p/s3cret@localhost:port",
        "redis://localhost:port?password=s3cret",
        "redis://user:a?s3cret@localhost",
        "redis+cluster://user:s3cret/@localhost:7000",
        "redis+cluster://user:s3cret@localhost:port",
        "redis+sentinel://user:s3cret@localhost:26379",
        "async+memcached://user:s3cret@localhost",
        "mongodb+srv://user:s3cret@localhost",
        "etcd://user:s3cret@localhost",
        "memory://user:s3cret@localhost",
        "http://user:s3cret@localhost",
    ],
)
def test_the_error_about_a_bad_url_shows_no_secret(url: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Limiter("1/day", store=url)
    assert "s3cret" not in str(caught.value)


def test_the_error_about_a_server_that_is_away_shows_no_password() -> None:
    with RedisStore("redis://user:s3cret@127.0.0.1:1") as store, pytest.raises(StoreAway) as away:
        store.verify()
    assert "s3cret" not in str(away.value)


def test_bad_options_are_refused() -> None:
    attempts: list[tuple[Any, str]] = [
        ({"prefix": ""}, "RedisStore prefix: expected some text without braces, got ''"),
        ({"prefix": 5}, "RedisStore prefix: expected some text without braces, got 5"),
        ({"prefix": "a{b"}, "RedisStore prefix: expected some text without braces, got 'a{b'"),
        ({"timeout": 1e300}, "RedisStore timeout: expected a number of seconds from 0.000001 to 3600, got 1e+300"),
        ({"timeout": 0}, "RedisStore timeout: expected a number of seconds from 0.000001 to 3600, got 0"),
        ({"timeout": "1"}, "RedisStore timeout: expected a number of seconds from 0.000001 to 3600, got '1'"),
        ({"on_failure": "hope"}, "RedisStore on_failure: expected one of open, closed, local, got 'hope'"),
        ({"nodes": 0}, "RedisStore nodes: expected a whole number from 1 to 9007199254740991, got 0"),
        ({"draw_ahead": 2}, "RedisStore draw_ahead: expected a number from 0 to 1 with at most three decimals, got 2"),
        ({"where": 5}, "RedisStore: expected a URL or clients of redis-py, got 5"),
    ]
    for options, text in attempts:
        with pytest.raises(InvalidInput) as caught:
            RedisStore(**{"where": "redis://localhost", **options})
        assert str(caught.value) == text


def test_a_limiter_and_a_gate_start_without_their_server(caplog: pytest.LogCaptureFixture) -> None:
    limiter = Limiter("2/day", store="redis://127.0.0.1:1")
    assert "starting without the server: store: expected a Redis or Valkey server that answers, got" in caplog.text
    assert [(bool(d), d.degraded) for d in [limiter.check("a") for _ in range(3)]] == [
        (True, True),
        (True, True),
        (False, True),
    ]
    with Gate(store="redis://127.0.0.1:1") as gate:
        assert gate.check("a", "ws", "heavy").degraded
        with pytest.raises(StoreAway, match="the change was not made, since it can't be recorded"):
            gate.set_default("heavy", "1/day")
        assert gate.capacity("a", "ws", "heavy") == 10


def test_a_server_that_is_not_redis_is_refused() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), QuietHandler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        try:
            with pytest.raises(StoreError, match="expected a Redis or Valkey server"):
                Limiter("1/day", store=f"redis://127.0.0.1:{web.server_port}")
            with RedisStore(f"redis://127.0.0.1:{web.server_port}", on_failure="closed") as store:
                decision = Limiter("1/day", store=store).check("a")
                assert (bool(decision), decision.degraded, decision.retry_after) == (False, True, 1.0)
        finally:
            web.shutdown()


class QuietHandler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_a_version_that_is_too_old_is_refused() -> None:
    assert check_server({"redis_version": "6.2.0"}) == []
    for version in ("6.0.16", "5.0.7", ""):
        with pytest.raises(StoreError, match=r"^store: expected Redis 6\.2 or later, or Valkey, got version"):
            check_server({"redis_version": version})


def test_a_user_without_the_permissions_is_refused(server: ValkeyServer) -> None:
    with server.client() as client:
        client.acl_setuser("poor", enabled=True, nopass=True, keys=["headgate*"], categories=["+@all", "-@scripting"])
        client.acl_setuser("other", enabled=True, nopass=True, keys=["theirs*"], categories=["+@all"])
    for user in ("poor", "other"):
        url = f"redis://{user}:any@127.0.0.1:{server.port}"
        with pytest.raises(StoreError, match="expected a user that may run scripts and read and write our keys"):
            Limiter("1/day", store=url)
        with RedisStore(url, on_failure="open") as store:
            decision = Limiter("1/day", store=store).check("a")
            assert (bool(decision), decision.degraded) == (True, True)


def test_the_documented_permissions_suffice(server: ValkeyServer) -> None:
    docs = Path(__file__).parents[2] / "docs" / "redis.md"
    assert f"`{PERMISSIONS}`" in docs.read_text(encoding="utf-8")
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "enough", "on", "nopass", *PERMISSIONS.split())
    url = f"redis://enough:any@127.0.0.1:{server.port}"
    with Gate(UNHURRIED, store=url) as gate, Gate(UNHURRIED, store=url) as other:
        assert not gate.check("a", "ws", "heavy", request_id="1").degraded
        while gate.check("a", "ws", "heavy"):
            pass
        gate.set_override("a", "heavy", "5/minute sliding")
        wait_for(lambda: other.capacity("a", "ws", "heavy") == 5, "the override")
        decisions = [other.check("a", "ws", "heavy") for _ in range(6)]
        assert [(bool(decision), decision.degraded) for decision in decisions] == [(True, False)] * 5 + [(False, False)]
        gate.drop_agent("a")


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random", "volatile-ttl", "noeviction"])
def test_a_server_that_may_evict_keys_is_reported(
    server: ValkeyServer, caplog: pytest.LogCaptureFixture, policy: str
) -> None:
    with server.client() as client:
        client.config_set("maxmemory-policy", policy)
        try:
            with RedisStore(server.url, prefix="evict:") as store, caplog.at_level(logging.WARNING):
                Limiter("1/day", store=store).check("a")
                Limiter("1/day", store=store).check("a")
        finally:
            client.config_set("maxmemory-policy", "noeviction")
    assert caplog.text.count(f"the server's maxmemory-policy is {policy}") == (policy != "noeviction")
    assert caplog.text.count("budgets, slots and holds") == (policy != "noeviction")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("unable to perform operation on <TCPTransport closed=True>; the handler is closed", redis.ConnectionError),
        ("a mistake", RuntimeError),
    ],
)
async def test_uvloops_error_for_a_closed_connection_is_one_of_the_server(text: str, error: type[Exception]) -> None:
    async def work(_: object) -> None:
        raise RuntimeError(text)

    clients = Clients("redis://127.0.0.1:1", PATIENCE)
    with pytest.raises(error, match=f"{text.rpartition(' ')[2]}$") as caught:
        await clients.acall(work)
    assert type(caught.value) is error
    await clients.aclose()
