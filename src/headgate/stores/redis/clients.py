"""Clients of redis-py: made from a URL, or the application's own."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import redis
import redis.asyncio
from redis.exceptions import MaxConnectionsError

from headgate.errors import HeadgateError, InvalidInput, StoreAway
from headgate.flow import no_event_loop
from headgate.lifecycle import new_lock
from headgate.stores.redis.bounded_calls import BoundedCalls
from headgate.stores.redis.client_urls import AsyncClient, Client, client_factories
from headgate.stores.redis.connection_cache import ConnectionCache
from headgate.stores.redis.server_errors import ERRORS, STALE_CLIENT, lost_connection

Command: TypeAlias = list[Any]
Reply: TypeAlias = Any
T = TypeVar("T")

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
            self._make, self._make_async, self.cluster = client_factories(where, timeout)
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
        try:
            return await self.acall(lambda client: self._asend(client, commands), timeouts=1)
        except TimeoutError:  # not a reply: the requests that wait behind these would wait in vain, too
            raise
        except ERRORS as error:
            return [error] * len(commands)

    async def _asend(self, client: AsyncClient, commands: list[Command]) -> list[Reply]:
        if len(commands) == 1:
            return [await client.execute_command(*commands[0])]
        async with client.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            replies: list[Reply] = await pipe.execute(raise_on_error=False)
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
        """`call` for a task, with the client of the running loop."""
        client = await self.aclient()
        deadline = time.monotonic() + self._timeout
        pool = getattr(self._given_async, "connection_pool", None)
        while True:
            while pool is not None and not pool.can_get_connection():
                await _pause(deadline)
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
                raise lost_connection(error) from error
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
