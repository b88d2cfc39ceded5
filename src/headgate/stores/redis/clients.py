"""Clients of redis-py: made from a URL, or the application's own.

| URL                                            | the store is                                              |
|------------------------------------------------|-----------------------------------------------------------|
| redis://[[user]:password@]host[:port][/db]     | one server; rediss:// with TLS; valkey:// means the same  |
| unix:///path/to/socket                         | one server, through a socket here; redis+unix:// as well   |
| redis+sentinel://host:port,host:port/name[/db] | the master of that name, found by these Sentinels         |
| redis+cluster://host:port,host:port            | a cluster, found by these nodes of it                     |

The query goes to redis-py: `?ssl_ca_certs=ca.pem`. A prefix `async+` changes nothing.
"""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from inspect import signature
from typing import Any, Final, TypeAlias, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit
from weakref import WeakKeyDictionary

import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.asyncio.retry
import redis.asyncio.sentinel
import redis.backoff
import redis.cluster
import redis.retry
import redis.sentinel
from redis.exceptions import (
    ChildDeadlockedError,
    MaxConnectionsError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
)

from headgate.errors import HeadgateError, InvalidInput, StoreAway
from headgate.flow import no_event_loop
from headgate.lifecycle import new_lock
from headgate.stores.redis.bounded_calls import BoundedCalls
from headgate.stores.redis.connection_cache import ConnectionCache
from headgate.stores.redis.resp import pack_in_c
from headgate.stores.schemes import scheme_of, wrong_url

Client: TypeAlias = redis.Redis | redis.RedisCluster
AsyncClient: TypeAlias = redis.asyncio.Redis | redis.asyncio.RedisCluster
Command: TypeAlias = list[Any]
Reply: TypeAlias = Any
T = TypeVar("T")

ERRORS: Final = (RedisError, RedisClusterException, ChildDeadlockedError, OSError)
"""Errors of a server, or on the way to it."""

FAULTS: Final = (
    *ERRORS,
    HeadgateError,
    *(ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, RuntimeError, TypeError, ValueError),
)
"""All that a call to a server may raise, one that answers nonsense included.

Any other exception is somebody else's: that of a signal handler, or of gevent. It ends the call and is passed on.
"""

STALE_CLIENT: Final = (ReadOnlyError, RedisClusterException)
"""The client knows no master, or one that no longer is one."""

_CLOSED_BY_UVLOOP: Final = "the handler is closed"  # the end of its RuntimeError for a connection closed meanwhile
_PORTS: Final = {"+sentinel": 26379, "+cluster": 6379}  # where none is named
_CALL_TIMEOUTS: Final = 4  # that a call other than a check may take
_MIN_POOL_SIZE: Final = 16  # connections: a pool that has fewer can't spare those of a `ConnectionCache`
_POOL_POLL: Final = 0.002  # seconds until a pool that has no free connection is asked again
_POOL_TEXTS: Final = ("Too many connections", "No connection available.")  # with which it says so


class Clients:
    """The clients of a store: one for threads, and one for each event loop."""

    def __init__(self, where: object, timeout: float) -> None:
        self.cluster = False
        self._lock: Final = new_lock()
        self._make: Callable[[], Client] | None = None
        self._make_async: Callable[[], AsyncClient] | None = None
        self._client: Client | None = None
        self._connections: ConnectionCache | None = None
        self._owned: Final = isinstance(where, str)
        self._given_async: AsyncClient | None = None
        self._timeout: Final = timeout
        self._bounded: Final = BoundedCalls()
        self._parents: Final[list[object]] = []
        self._by_loop: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncClient]] = WeakKeyDictionary()
        self._retired: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, dict[AsyncClient, asyncio.Task[None]]]] = (
            WeakKeyDictionary()
        )
        self._closers: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncGenerator[None]]] = WeakKeyDictionary()
        if isinstance(where, str):
            self._from_url(where, timeout)
        else:
            for client in where if isinstance(where, tuple) else (where,):
                self._take(client)

    def _take(self, client: object) -> None:
        if isinstance(client, (redis.Redis, redis.RedisCluster)):
            self._client = client
        elif isinstance(client, (redis.asyncio.Redis, redis.asyncio.RedisCluster)):
            self._given_async = client
        else:
            raise InvalidInput(f"RedisStore: expected a URL or clients of redis-py, got {client!r:.100}")
        self.cluster = isinstance(client, (redis.RedisCluster, redis.asyncio.RedisCluster))

    def _from_url(self, url: str, timeout: float) -> None:
        scheme, kind, options, nodes, name = _parse(url)
        options = {"socket_timeout": timeout, "socket_connect_timeout": timeout, "protocol": 2} | options
        retry = redis.retry.Retry(redis.backoff.NoBackoff(), 0)  # a request may have been counted: never sent twice
        aretry = redis.asyncio.retry.Retry(redis.backoff.NoBackoff(), 0)
        ours = {key: options[key] for key in ("socket_timeout", "socket_connect_timeout", "protocol")}
        options |= {"ssl": True} if scheme in ("rediss", "valkeys") else {}
        if kind == "+cluster":
            self.cluster = True
            own = {"ssl", *signature(redis.RedisCluster).parameters}
            others = {key: value for key, value in options.items() if key not in own}
            connection = redis.SSLConnection if options.get("ssl") else redis.Connection
            _check_options(url, redis.ConnectionPool(connection, **others))
            starts = [redis.cluster.ClusterNode(*node) for node in nodes]  # type: ignore[no-untyped-call]
            astarts = [redis.asyncio.cluster.ClusterNode(*node) for node in nodes]
            self._make = lambda: redis.RedisCluster(startup_nodes=starts, retry=retry, **options)
            self._make_async = lambda: redis.asyncio.RedisCluster(startup_nodes=astarts, retry=aretry, **options)
        elif kind == "+sentinel":
            to_sentinels, ato_sentinels = {**ours, "retry": retry}, {**ours, "retry": aretry}
            sentinel = redis.sentinel.Sentinel(nodes, sentinel_kwargs=to_sentinels)  # type: ignore[no-untyped-call]
            self._make = lambda: sentinel.master_for(name, retry=retry, **options)  # type: ignore[no-untyped-call]
            _check_options(url, self._make().connection_pool)
            self._make_async = lambda: _asentinel(nodes, ato_sentinels).master_for(name, retry=aretry, **options)
        else:
            plain = f"{scheme.replace('valkey', 'redis')}://{url.partition('://')[2]}"
            try:
                redis.connection.parse_url(plain)  # type: ignore[no-untyped-call]
            except ValueError as error:
                wrong = wrong_url(url)
                raise wrong if "@" in url else InvalidInput(f"{wrong}: {error}") from None  # no part of a password
            self._make = lambda: redis.Redis.from_url(plain, retry=retry, **ours)
            _check_options(url, self._make().connection_pool)
            self._make_async = lambda: pack_in_c(redis.asyncio.Redis.from_url(plain, retry=aretry, **ours))

    def exchange(self, commands: list[Command]) -> list[Reply]:
        """Have commands carried out for a thread: one reply to each, which may be an error."""
        connections = self._connections
        try:
            if connections is None or len(commands) > 1:
                return self.call(lambda client: self._send(client, commands), timeouts=1)
            try:
                return [connections.call(commands[0])]
            except STALE_CLIENT:
                self.renew(connections.client)
                raise
        except ERRORS as error:
            return [error] * len(commands)

    def _send(self, client: Client, commands: list[Command]) -> list[Reply]:
        replies = _send(client, commands)
        if any([isinstance(reply, STALE_CLIENT) for reply in replies]):
            self.renew(client)
        return replies

    async def aexchange(self, commands: list[Command]) -> list[Reply]:
        """`exchange` for a task; raises `TimeoutError` if it takes too long."""
        client = await self.aclient()
        deadline = time.monotonic() + self._timeout
        while True:
            await self._wait_for_room(deadline)
            async with asyncio.timeout(self._timeout):
                replies = await _asend(client, commands)
            if not _is_pool_exhausted(replies[0]):
                break
            await _pause(deadline)
        if any([isinstance(reply, STALE_CLIENT) for reply in replies]):
            self._arenew(client)
        return replies

    def call(self, work: Callable[[Client], T], timeouts: int | None = _CALL_TIMEOUTS) -> T:
        """Have something done with the client for threads, within so many timeouts if the client was made here.

        None is no bound. An application's pool that has no free connection is waited for; `StoreAway`, if that takes
        too long.
        """

        def attempt() -> T:
            client = self.client()  # it may connect
            try:
                return work(client)
            except STALE_CLIENT:
                self.renew(client)
                raise

        deadline = time.monotonic() + self._timeout
        while True:
            try:
                if timeouts is None or not self._owned:
                    return attempt()
                return self._bounded.call(attempt, timeouts * self._timeout)
            except redis.ConnectionError as error:
                if not _is_pool_exhausted(error):
                    raise
                if time.monotonic() > deadline:
                    raise _pool_exhausted() from error
            time.sleep(_POOL_POLL)

    async def acall(self, work: Callable[[AsyncClient], Awaitable[T]], timeouts: int | None = _CALL_TIMEOUTS) -> T:
        """Have something done with the client of the running loop, within so many timeouts; None for no bound."""
        client = await self.aclient()
        deadline = time.monotonic() + self._timeout
        while True:
            await self._wait_for_room(deadline)
            try:
                async with asyncio.timeout(None if timeouts is None else timeouts * self._timeout):
                    return await work(client)
            except STALE_CLIENT:
                self._arenew(client)
                raise
            except redis.ConnectionError as error:
                if not _is_pool_exhausted(error):
                    raise
            except RuntimeError as error:
                raise _lost_connection(error) from error
            await _pause(deadline)

    async def _wait_for_room(self, deadline: float) -> None:
        """Wait until an application's pool has a free connection; `StoreAway`, if that takes too long."""
        pool = getattr(self._given_async, "connection_pool", None)
        while pool is not None and not pool.can_get_connection():
            await _pause(deadline)

    @property
    def for_threads(self) -> bool:
        """Whether there is a client for threads."""
        return self._client is not None or self._make is not None

    def client(self) -> Client:
        """The client for threads. It may connect, which may fail."""
        client = self._client  # read once: another thread may renew it meanwhile
        if client is None:
            with self._lock:
                client = self._client
                if client is None:
                    if self._make is None:
                        raise HeadgateError(
                            "RedisStore: expected a client for threads, got only one for asyncio; "
                            "pass both, as RedisStore((client, asyncio_client)), or call the async verbs"
                        )
                    client = self._make()
                    if isinstance(client, redis.Redis) and client.connection_pool.max_connections > _MIN_POOL_SIZE:
                        self._connections = ConnectionCache(client, self._timeout, self._bounded)
                    self._client = client
        return client

    async def aclient(self) -> AsyncClient:
        """The client of the running loop."""
        if self._given_async is not None:
            return self._given_async
        loop = running_loop()
        found = self._by_loop.get(loop)
        if found is None:
            self._drop_closed_loops()
            if self._make_async is None:
                raise HeadgateError(
                    "RedisStore: expected a client for asyncio, got only one for threads; "
                    "pass both, as RedisStore((client, asyncio_client)), or call the synchronous methods "
                    "(`check`, not `acheck`)"
                )
            found = self._by_loop[loop] = self._make_async()
            if loop not in self._closers:
                self._closers[loop] = self._close_with_loop(loop)
                await anext(self._closers[loop])
        return found

    def _drop_closed_loops(self) -> None:
        """Close the connections of event loops that were closed without shutting down their generators."""
        for loop in [loop for loop in list(self._closers) if loop.is_closed()]:
            del self._closers[loop]
            for one in self._take_clients(loop):
                for part in _all_of(one):
                    _cut_connections(part)

    async def _close_with_loop(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[None]:
        """Close a loop's client when the loop shuts down its generators, which is the last thing that it runs."""
        try:
            yield
        finally:
            for task in self._retired.get(loop, {}).values():
                task.cancel()
            for one in self._take_clients(loop):
                await _aclose(one)

    def _take_clients(self, loop: asyncio.AbstractEventLoop) -> list[AsyncClient]:
        """The clients of a loop, which has none afterwards: the retired ones, and the present one."""
        retired, client = self._retired.pop(loop, {}), self._by_loop.pop(loop, None)
        return [*retired, *([] if client is None else [client])]

    def renew(self, client: Client) -> None:
        """Make another client than this one for the next call: it knows a master that no longer is one.

        Calls that are under way on it finish.
        """
        with self._lock:
            if self._owned and self._client is client:
                self._connections = self._client = None

    def _arenew(self, client: AsyncClient) -> None:
        """`renew` for the running loop. The old client is closed once the calls on it have had their time."""
        loop = asyncio.get_running_loop()
        if self._by_loop.get(loop) is client:
            del self._by_loop[loop]
            retired = self._retired.setdefault(loop, {})
            retired[client] = loop.create_task(self._close_later(client, retired))

    async def _close_later(self, client: AsyncClient, retired: dict[AsyncClient, asyncio.Task[None]]) -> None:
        await asyncio.sleep(2 * self._timeout)
        del retired[client]
        await _aclose(client)

    def after_fork(self) -> None:
        """In a forked process: share no connection with the parent, and none with its event loops.

        The parent's clients are kept alive: their deallocation takes locks that one of its threads may have held, and
        their event loop shares its selector with the parent's.
        """
        self._bounded.after_fork()
        by_loop = (self._by_loop, self._retired, self._closers)
        self._parents.append((self._client, self._connections, *[dict(one) for one in by_loop]))
        for one in by_loop:
            one.clear()
        self._connections = None
        if self._owned:
            self._client = None

    def close(self) -> None:
        if self._owned:
            connections, self._connections = self._connections, None
            if connections is not None:
                connections.close()
            client, self._client = self._client, None
            if client is not None:
                for one in _all_of(client):
                    one.close()
        self._bounded.close()
        self._drop_closed_loops()

    async def aclose(self) -> None:
        """Close the client of the running loop."""
        closer = self._closers.pop(running_loop(), None)
        if closer is not None:
            await closer.aclose()


def running_loop() -> asyncio.AbstractEventLoop:
    """The running event loop of asyncio. There is none under trio, or without any."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise no_event_loop("RedisStore", "limiter.check") from None


def _send(client: Client, commands: list[Command]) -> list[Reply]:
    if len(commands) == 1:
        return [client.execute_command(*commands[0])]  # type: ignore[no-untyped-call]
    with client.pipeline(transaction=False) as pipe:
        for command in commands:
            pipe.execute_command(*command)
        replies: list[Reply] = pipe.execute(raise_on_error=False)
        return replies


async def _asend(client: AsyncClient, commands: list[Command]) -> list[Reply]:
    try:
        if len(commands) == 1:
            return [await client.execute_command(*commands[0])]
        async with client.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            replies: list[Reply] = await pipe.execute(raise_on_error=False)
            return replies
    except ERRORS as error:
        return [error] * len(commands)
    except RuntimeError as error:
        return [_lost_connection(error)] * len(commands)


def _is_pool_exhausted(error: object) -> bool:
    """Whether an error says that a client's pool has no free connection."""
    return isinstance(error, MaxConnectionsError) or (
        isinstance(error, redis.ConnectionError) and str(error) in _POOL_TEXTS
    )


async def _pause(deadline: float) -> None:
    """Wait a moment before a pool without a free connection is asked again."""
    if time.monotonic() > deadline:
        raise _pool_exhausted()
    await asyncio.sleep(_POOL_POLL)


def _pool_exhausted() -> StoreAway:
    return StoreAway("the pool of the store's client had no free connection in time")


def _cut_connections(client: Any) -> None:
    """Close the sockets of a client whose event loop is closed and can't do it any more."""
    pool, nodes = getattr(client, "connection_pool", None), getattr(client, "nodes_manager", None)
    connections = [] if pool is None else [*pool._available_connections, *pool._in_use_connections]
    for node in () if nodes is None else nodes.nodes_cache.values():
        connections.extend(node._connections)
    for connection in connections:
        writer = getattr(connection, "_writer", None)
        if writer is not None:
            connection._writer = connection._reader = None
            finish = getattr(writer.transport, "_call_connection_lost", None)  # what asyncio's loop would call
            if finish is not None:  # uvloop has closed them with itself
                for step in (writer.transport.abort, lambda finish=finish: finish(None)):
                    with suppress(RuntimeError):  # the event loop is closed
                        step()


def _all_of(client: Any) -> list[Any]:
    """A client, and those to the Sentinels that it asks for its master."""
    manager = getattr(getattr(client, "connection_pool", None), "sentinel_manager", None)
    return [client, *(manager.sentinels if manager is not None else ())]


async def _aclose(client: AsyncClient) -> None:
    for one in _all_of(client):
        await one.aclose()


def _lost_connection(error: RuntimeError) -> redis.ConnectionError:
    """uvloop's error for a connection that was closed meanwhile, as one of redis-py's; any other is raised again."""
    if not str(error).endswith(_CLOSED_BY_UVLOOP):
        raise error
    return redis.ConnectionError(str(error))


def _asentinel(nodes: list[tuple[str, int]], options: dict[str, Any]) -> redis.asyncio.sentinel.Sentinel:
    return redis.asyncio.sentinel.Sentinel(nodes, sentinel_kwargs=options)  # type: ignore[no-untyped-call]


def describe_error(error: BaseException) -> str:
    """An error of redis-py in a few words, without secrets."""
    return f"{type(error).__name__}: {str(error) or 'no answer in time'}"[:300]


@contextmanager
def server_errors() -> Iterator[None]:
    """Raise `StoreAway` for an error of redis-py."""
    try:
        yield
    except ERRORS as error:
        raise StoreAway(describe_error(error)) from error


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


def text_of(found: bytes | str) -> str:
    """An answer of a server as text, whether or not its client has decoded it."""
    return found if isinstance(found, str) else found.decode(errors="surrogateescape")
