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
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
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
    AuthenticationError,
    BusyLoadingError,
    ClusterError,
    InvalidResponse,
    NoPermissionError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
)

from headgate.errors import HeadgateError, InvalidInput, StoreAway, StoreError
from headgate.stores.schemes import scheme_of, wrong_url

Client: TypeAlias = redis.Redis | redis.RedisCluster
AsyncClient: TypeAlias = redis.asyncio.Redis | redis.asyncio.RedisCluster
Command: TypeAlias = list[Any]
Reply: TypeAlias = Any
T = TypeVar("T")

ERRORS: Final = (RedisError, RedisClusterException, OSError)
"""Errors of a server, or on the way to it."""

STALE_CLIENT: Final = (ReadOnlyError, RedisClusterException)
"""The client knows no master, or one that no longer is one."""

PERMISSIONS: Final = "+@scripting +@read +@write +@keyspace +@pubsub +@connection +info +time ~headgate* &headgate*"
"""The permissions that a user needs, in the notation of ACL SETUSER."""

OLDEST: Final = (6, 2)
"""The oldest version of Redis that is supported. (Valkey's versions go on from 7.2.)"""

_TRUSTED_FOR: Final = 0.02  # seconds for which a connection that has just worked isn't looked at
_CLOSED_BY_UVLOOP: Final = "the handler is closed"  # the end of its RuntimeError for a connection closed meanwhile
_PORTS: Final = {"+sentinel": 26379, "+cluster": 6379}  # where none is named


class Clients:
    """The clients of a store: one for threads, and one for each event loop."""

    def __init__(self, where: object, timeout: float) -> None:
        self.cluster = False
        self._lock = threading.Lock()
        self._make: Callable[[], Client] | None = None
        self._make_async: Callable[[], AsyncClient] | None = None
        self._client: Client | None = None
        self._connections: ConnectionCache | None = None
        self._owned: Final = isinstance(where, str)
        self._given_async: AsyncClient | None = None
        self._timeout: Final = timeout
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
        options |= {"socket_timeout": timeout, "socket_connect_timeout": timeout} | options
        options.setdefault("protocol", 2)
        retry = redis.retry.Retry(redis.backoff.NoBackoff(), 0)  # a request may have been counted: never sent twice
        aretry = redis.asyncio.retry.Retry(redis.backoff.NoBackoff(), 0)
        ours = {key: options[key] for key in ("socket_timeout", "socket_connect_timeout", "protocol")}
        options |= {"ssl": True} if scheme in ("rediss", "valkeys") else {}
        if kind == "+cluster":
            self.cluster = True
            starts = [redis.cluster.ClusterNode(*node) for node in nodes]  # type: ignore[no-untyped-call]
            astarts = [redis.asyncio.cluster.ClusterNode(*node) for node in nodes]
            self._make = lambda: redis.RedisCluster(startup_nodes=starts, retry=retry, **options)
            self._make_async = lambda: redis.asyncio.RedisCluster(startup_nodes=astarts, retry=aretry, **options)
        elif kind == "+sentinel":
            to_sentinels, ato_sentinels = {**ours, "retry": retry}, {**ours, "retry": aretry}
            sentinel = redis.sentinel.Sentinel(nodes, sentinel_kwargs=to_sentinels)  # type: ignore[no-untyped-call]
            self._make = lambda: sentinel.master_for(name, retry=retry, **options)  # type: ignore[no-untyped-call]
            self._make_async = lambda: _asentinel(nodes, ato_sentinels).master_for(name, retry=aretry, **options)
        else:
            plain = f"{scheme.replace('valkey', 'redis')}://{url.partition('://')[2]}"
            try:
                redis.connection.parse_url(plain)  # type: ignore[no-untyped-call]
            except ValueError as error:
                wrong = wrong_url(url)
                raise wrong if "@" in url else InvalidInput(f"{wrong}: {error}") from None  # no part of a password
            self._make = lambda: redis.Redis.from_url(plain, retry=retry, **ours)
            self._make_async = lambda: redis.asyncio.Redis.from_url(plain, retry=aretry, **ours)

    def exchange(self, commands: list[Command]) -> list[Reply]:
        """Have commands carried out for a thread: one reply to each, which may be an error."""
        client = None
        try:
            client, connections = self.client(), self._connections
            if len(commands) == 1 and connections is not None:
                return [connections.call(commands[0])]
            if len(commands) == 1:
                return [client.execute_command(*commands[0])]  # type: ignore[no-untyped-call]
            with client.pipeline(transaction=False) as pipe:
                for command in commands:
                    pipe.execute_command(*command)
                replies = pipe.execute(raise_on_error=False)
        except ERRORS as error:
            replies = [error] * len(commands)
        if any([isinstance(reply, STALE_CLIENT) for reply in replies]):
            self.renew(client)
        return replies

    async def aexchange(self, commands: list[Command]) -> list[Reply]:
        client = await self.aclient()
        try:
            if len(commands) == 1:
                return [await client.execute_command(*commands[0])]
            async with client.pipeline(transaction=False) as pipe:
                for command in commands:
                    pipe.execute_command(*command)
                replies = await pipe.execute(raise_on_error=False)
        except ERRORS as error:
            replies = [error] * len(commands)
        except RuntimeError as error:
            replies = [_lost_connection(error)] * len(commands)
        if any([isinstance(reply, STALE_CLIENT) for reply in replies]):
            self._arenew(client)
        return replies

    async def acall(self, work: Callable[[AsyncClient], Awaitable[T]]) -> T:
        """Have something done with the client of the running loop."""
        client = await self.aclient()
        try:
            return await work(client)
        except STALE_CLIENT:
            self._arenew(client)
            raise
        except RuntimeError as error:
            raise _lost_connection(error) from error

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
                    self._connections = ConnectionCache(client) if isinstance(client, redis.Redis) else None
                    self._client = client
        return client

    async def aclient(self) -> AsyncClient:
        """The client of the running loop."""
        if self._given_async is not None:
            return self._given_async
        loop = asyncio.get_running_loop()
        found = self._by_loop.get(loop)
        if found is None:
            if self._make_async is None:
                raise HeadgateError(
                    "RedisStore: expected a client for asyncio, got only one for threads; "
                    "pass both, as RedisStore((client, asyncio_client)), or call the verbs without an a"
                )
            found = self._by_loop[loop] = self._make_async()
            if loop not in self._closers:
                self._closers[loop] = self._close_with_loop(loop)
                await anext(self._closers[loop])
        return found

    async def _close_with_loop(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[None]:
        """Close a loop's client when the loop shuts down its generators, which is the last thing that it runs."""
        try:
            yield
        finally:
            retired, client = self._retired.pop(loop, {}), self._by_loop.pop(loop, None)
            for task in retired.values():
                task.cancel()
            for one in [*retired, *([] if client is None else [client])]:
                await _aclose(one)

    def renew(self, client: Client | None) -> None:
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
        """In a forked process: share no connection with the parent.

        The parent's client is kept alive: its deallocation takes a lock that one of the parent's threads may have held.
        """
        self._lock = threading.Lock()
        self._parents = (self._client, self._connections)
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

    async def aclose(self) -> None:
        """Close the client of the running loop."""
        closer = self._closers.pop(asyncio.get_running_loop(), None)
        if closer is not None:
            await closer.aclose()


class ConnectionCache:
    """Connections of one client that threads use one after the other, without the way through its pool each time.

    One that was idle is looked at first: if the server has closed it, it is opened again before anything is sent.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client: Final = client  # which closes its connections when it is gone
        self._pool: Final = client.connection_pool
        self._idle: Final[list[tuple[Any, float]]] = []

    def call(self, command: list[Any]) -> Any:
        try:
            connection, used = self._idle.pop()
        except IndexError:
            connection, used = self._pool.get_connection(), 0.0
        try:
            if used and time.monotonic() - used > _TRUSTED_FOR and _is_closed(connection):
                connection.disconnect()
                connection.connect()  # which asks the Sentinels anew, where there are some
            connection.send_command(*command)
            reply = connection.read_response()
        except ResponseError:  # the server has answered
            self._idle.append((connection, time.monotonic()))
            raise
        except BaseException:
            connection.disconnect()
            self._pool.release(connection)
            raise
        self._idle.append((connection, time.monotonic()))
        return reply

    def close(self) -> None:
        while self._idle:
            connection, _ = self._idle.pop()
            connection.disconnect()
            self._pool.release(connection)


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


def _is_closed(connection: Any) -> bool:
    try:
        return bool(connection.can_read(timeout=0))
    except ERRORS:
        return True


def _asentinel(nodes: list[tuple[str, int]], options: dict[str, Any]) -> redis.asyncio.sentinel.Sentinel:
    return redis.asyncio.sentinel.Sentinel(nodes, sentinel_kwargs=options)  # type: ignore[no-untyped-call]


def check_server(info: Mapping[str, Any]) -> list[str]:
    """Warnings for the operator about a server, from its INFO; raises `StoreError` if it can't be used."""
    version = str(info.get("redis_version", ""))
    numbers = [int(number) for number in re.findall(r"\d+", version)[:2]]
    if tuple(numbers) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise StoreError(f"store: expected Redis {oldest} or later, or Valkey, got version {version or 'unknown'}")
    notes = []
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy.startswith("allkeys-"):
        notes.append(
            f"the server's maxmemory-policy is {policy}: short of memory it may forget a key that is blocked, and so "
            "unblock it; use noeviction, or a server of its own"
        )
    elif policy.startswith("volatile-"):
        notes.append(
            f"the server's maxmemory-policy is {policy}: short of memory it may forget keys before they expire, and so "
            "unblock somebody; use noeviction, or a server of its own"
        )
    return notes


def startup_error(error: BaseException) -> StoreError:
    """The error for an operator when the first contact with a server fails."""
    cause = error.__cause__ or error
    said = describe_error(cause)
    if isinstance(cause, AuthenticationError):
        return StoreError(f"store: expected a user and a password that the server accepts, got {said}")
    if isinstance(cause, NoPermissionError):
        return StoreError(
            f"store: expected a user that may run scripts and read and write our keys ({PERMISSIONS}), got {said}"
        )
    if isinstance(cause, (InvalidResponse, ResponseError)) and not isinstance(cause, BusyLoadingError | ClusterError):
        return StoreError(f"store: expected a Redis or Valkey server that takes writes, got {said}")
    return StoreAway(f"store: expected a Redis or Valkey server that answers, got {said}")


def describe_error(error: BaseException) -> str:
    """An error of redis-py in a few words, without secrets."""
    return f"{type(error).__name__}: {str(error) or 'no answer in time'}"[:300]


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


def _value(text: str) -> object:
    return int(text) if text.isdigit() else {"true": True, "false": False}.get(text.lower(), text)


def text_of(found: bytes | str) -> str:
    """An answer of a server as text, whether or not its client has decoded it."""
    return found if isinstance(found, str) else found.decode(errors="surrogateescape")
