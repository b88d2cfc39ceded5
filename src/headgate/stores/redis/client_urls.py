"""URLs of servers, and the clients of redis-py that are made from them.

| URL                                            | the store is                                              |
|------------------------------------------------|-----------------------------------------------------------|
| redis://[[user]:password@]host[:port][/db]     | one server; rediss:// with TLS; valkey:// means the same  |
| unix:///path/to/socket                         | one server, through a socket here; redis+unix:// as well   |
| redis+sentinel://host:port,host:port/name[/db] | the master of that name, found by these Sentinels         |
| redis+cluster://host:port,host:port            | a cluster, found by these nodes of it                     |

The query goes to redis-py: `?ssl_ca_certs=ca.pem`. A prefix `async+` changes nothing.
"""

import re
from collections.abc import Callable
from inspect import signature
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.asyncio.retry
import redis.asyncio.sentinel
import redis.backoff
import redis.cluster
import redis.retry
import redis.sentinel

from headgate.errors import InvalidInput
from headgate.stores.redis.resp import pack_in_c
from headgate.stores.schemes import scheme_of, wrong_url

Client: TypeAlias = redis.Redis | redis.RedisCluster
AsyncClient: TypeAlias = redis.asyncio.Redis | redis.asyncio.RedisCluster

_PORTS: Final = {"+sentinel": 26379, "+cluster": 6379}  # where none is named


class ClientFactories(NamedTuple):
    """How to make the clients of one server or cluster."""

    make: Callable[[], Client]
    make_async: Callable[[], AsyncClient]
    cluster: bool


def client_factories(url: str, timeout: float) -> ClientFactories:
    """Read a URL; `InvalidInput` if it isn't one of a server. Nothing is connected."""
    scheme, kind, options, nodes, name = _parse(url)
    options = {"socket_timeout": timeout, "socket_connect_timeout": timeout, "protocol": 2} | options
    ours = {key: options[key] for key in ("socket_timeout", "socket_connect_timeout", "protocol")}
    options |= {"ssl": True} if scheme in ("rediss", "valkeys") else {}
    if kind == "+cluster":
        return _of_cluster(url, nodes, options)
    if kind == "+sentinel":
        return _of_sentinels(url, nodes, name, options, ours)
    return _of_server(url, f"{scheme.replace('valkey', 'redis')}://{url.partition('://')[2]}", ours)


def _no_retry() -> redis.retry.Retry:
    """A request whose answer was lost may have been counted: it is never sent twice."""
    return redis.retry.Retry(redis.backoff.NoBackoff(), 0)


def _no_async_retry() -> redis.asyncio.retry.Retry:
    return redis.asyncio.retry.Retry(redis.backoff.NoBackoff(), 0)


def _of_server(url: str, plain: str, options: dict[str, Any]) -> ClientFactories:
    try:
        redis.connection.parse_url(plain)  # type: ignore[no-untyped-call]
    except ValueError as error:
        wrong = wrong_url(url)
        raise wrong if "@" in url else InvalidInput(f"{wrong}: {error}") from None  # no part of a password
    retry, aretry = _no_retry(), _no_async_retry()

    def make() -> redis.Redis:
        return redis.Redis.from_url(plain, retry=retry, **options)

    def make_async() -> redis.asyncio.Redis:
        return pack_in_c(redis.asyncio.Redis.from_url(plain, retry=aretry, **options))

    _check_options(url, make().connection_pool)
    return ClientFactories(make, make_async, cluster=False)


def _of_sentinels(
    url: str, nodes: list[tuple[str, int]], name: str, options: dict[str, Any], to_sentinels: dict[str, Any]
) -> ClientFactories:
    retry, aretry = _no_retry(), _no_async_retry()
    sentinel = redis.sentinel.Sentinel(nodes, sentinel_kwargs={**to_sentinels, "retry": retry})  # type: ignore[no-untyped-call]

    def make() -> redis.Redis:
        made: redis.Redis = sentinel.master_for(name, retry=retry, **options)  # type: ignore[no-untyped-call]
        return made

    def make_async() -> redis.asyncio.Redis:
        asentinel = redis.asyncio.sentinel.Sentinel(nodes, sentinel_kwargs={**to_sentinels, "retry": aretry})  # type: ignore[no-untyped-call]
        made: redis.asyncio.Redis = asentinel.master_for(name, retry=aretry, **options)
        return made

    _check_options(url, make().connection_pool)
    return ClientFactories(make, make_async, cluster=False)


def _of_cluster(url: str, nodes: list[tuple[str, int]], options: dict[str, Any]) -> ClientFactories:
    own = {"ssl", *signature(redis.RedisCluster).parameters}
    others = {key: value for key, value in options.items() if key not in own}
    connection = redis.SSLConnection if options.get("ssl") else redis.Connection
    _check_options(url, redis.ConnectionPool(connection, **others))
    starts = [redis.cluster.ClusterNode(*node) for node in nodes]  # type: ignore[no-untyped-call]
    astarts = [redis.asyncio.cluster.ClusterNode(*node) for node in nodes]
    retry, aretry = _no_retry(), _no_async_retry()
    return ClientFactories(
        lambda: redis.RedisCluster(startup_nodes=starts, retry=retry, **options),
        lambda: redis.asyncio.RedisCluster(startup_nodes=astarts, retry=aretry, **options),
        cluster=True,
    )


def _parse(url: str) -> tuple[str, str, dict[str, Any], list[tuple[str, int]], str]:
    """The parts of a URL: scheme, "+sentinel", "+cluster" or "", options, nodes, and the name that Sentinels know."""
    name, plus, kind = scheme_of(url).partition("+")
    rest = url.partition("://")[2]
    if name == "memory" or not rest:
        raise wrong_url(url)
    if kind in ("", "unix"):
        return kind or name, "", {}, [], ""
    kind = plus + kind
    parts = urlsplit(f"any://{rest}")
    options: dict[str, Any] = {key: _value(value) for key, value in parse_qsl(parts.query)}
    where = parts.netloc
    if "@" in where:
        user, _, where = where.rpartition("@")
        username, _, password = user.partition(":")
        options |= {"username": unquote(username)} if username else {}
        options |= {"password": unquote(password)} if password else {}
    nodes = []
    for node in where.split(","):
        at = re.fullmatch(r"\s*(\[[^\[\]]+\]|[^\[\]:]+)(?::([0-9]{1,5}))?\s*", node)
        if at is None:
            raise wrong_url(url, "host:port,host:port in the URL")
        nodes.append((at[1].strip("[]"), int(at[2] or _PORTS[kind])))
    master, _, db = parts.path.strip("/").partition("/")
    if kind == "+sentinel":
        if not master:
            raise wrong_url(url, "the master's name, as in redis+sentinel://host:26379/name")
        options |= {"db": int(db)} if db.isdigit() else {}
    return name, kind, options, nodes, master


def _check_options(url: str, pool: Any) -> None:
    """Refuse an option in a URL that connections don't have, before one is opened."""
    try:
        pool.make_connection()  # which connects nothing
    except TypeError as error:
        query = url.partition("?")[2]
        named = re.search(r"'(\w+)'", str(error))
        shown = repr(named[1]) if named and "@" not in query else "another one"  # perhaps a part of a password
        raise InvalidInput(
            f"store: expected options of a connection of redis-py in the URL, such as socket_keepalive, got {shown}; "
            "options of the store are arguments of RedisStore: RedisStore(url, timeout=0.5)"
        ) from None


def _value(text: str) -> object:
    return int(text) if text.isdigit() else {"true": True, "false": False}.get(text.lower(), text)
