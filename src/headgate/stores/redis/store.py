"""The store in Redis or Valkey, for many machines."""

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self, SupportsIndex
from uuid import uuid4
from weakref import WeakKeyDictionary

from redis.crc import key_slot
from redis.exceptions import RedisError

from headgate.clock import Clock, ManualClock, MonotonicClock
from headgate.core import Decision, Rule, Violation
from headgate.errors import HeadgateError, StoreAway, StoreError
from headgate.events import Degraded, Listener, emit
from headgate.inputs import Number, microseconds, refuse
from headgate.limits import per_second
from headgate.stores import Ask, Offence, Verb
from headgate.stores.memory import MemoryStore
from headgate.stores.redis.book import RedisBook
from headgate.stores.redis.connecting import AsyncClient, Client, Clients, check_server, explained, trouble
from headgate.stores.redis.failing import Breaker, Fallback
from headgate.stores.redis.gathering import Tasks, Threads, Wire
from headgate.stores.redis.requests import Answer, Apply, ForeignData, Forget, Keys, Offend, Request, Stand
from headgate.violations import Standing

_SCANNED: Final = 1000  # keys that one SCAN looks at
_PUT_OFF: Final = b"600000"  # on a clock for tests keys live longer: the server's own clock must not interfere
_SAY_EVERY: Final = 60.0  # seconds between two lines in the log that say the same

_log = logging.getLogger("headgate")


class RedisStore:
    """Keeps what is counted in a Redis or Valkey server, so that many machines decide as one, on its clock.

    `where` is a URL (see `headgate.stores.redis.connecting`), or a client of redis-py, or two of them, one for threads
    and one for asyncio. Every key that is stored begins with `prefix`.

    A server that doesn't answer within `timeout` seconds, or can't be reached, is away, and decisions are `degraded`
    until it is back: with `on_failure` "open" everything passes, with "closed" nothing does, and with "local" this
    process's memory judges, by its share of each limit where there are several `nodes`.
    """

    def __init__(
        self,
        where: str | Client | AsyncClient | tuple[Client, AsyncClient],
        *,
        prefix: str = "headgate:",
        timeout: Number = 0.25,
        on_failure: str = "local",
        nodes: SupportsIndex = 1,
        clock: ManualClock | None = None,
    ) -> None:
        if not re.fullmatch(r"[^{}]+", str(prefix)):
            refuse("RedisStore prefix", "some text without braces", prefix)
        seconds = microseconds("RedisStore timeout", timeout) / 1_000_000
        if not seconds:
            refuse("RedisStore timeout", "a number of seconds above 0", timeout)
        self._timeout: Final = seconds
        self._prefix: Final = prefix
        self._manual: Final = clock
        self._clock: Final[Clock] = MonotonicClock() if clock is None else clock
        self._fallback: Final = Fallback(on_failure, nodes, MemoryStore(clock=clock))
        self._keys: Final = Keys(prefix)
        self._clients: Final = Clients(where, seconds)
        self._breaker: Final = Breaker(self._tell)
        self._wire: Final = Wire(self._clients, self._breaker, self._header, self._stepped_back)
        self._threads: Final = Threads(self._wire, seconds)
        self._tasks: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, Tasks]] = WeakKeyDictionary()
        self._lock: Final = threading.Lock()
        self._listeners: tuple[Listener, ...] = ()
        self._said: Final[dict[str, float]] = {}
        self._looked_at = False

    @property
    def clock(self) -> Clock:
        return self._clock

    @property
    def degraded(self) -> bool:
        """Whether the server is away."""
        return self._breaker.down

    # The verbs -------------------------------------------------------------------------------------------------------

    def apply(
        self, verb: Verb, asks: Sequence[Ask], low: int, offence: Offence | None = None, request_id: str = ""
    ) -> Decision:
        """See `Store.apply`."""
        request = self._applying(verb, asks, low, offence, request_id)
        if isinstance(request, Decision):
            return request
        try:
            return self._ask(request)
        except (StoreAway, ForeignData) as error:
            return self._decide_without(error, verb, asks, low, offence, request_id)

    async def aapply(
        self, verb: Verb, asks: Sequence[Ask], low: int, offence: Offence | None = None, request_id: str = ""
    ) -> Decision:
        request = self._applying(verb, asks, low, offence, request_id)
        if isinstance(request, Decision):
            return request
        try:
            return await self._aask(request)
        except (StoreAway, ForeignData) as error:
            return self._decide_without(error, verb, asks, low, offence, request_id)

    def _applying(
        self, verb: Verb, asks: Sequence[Ask], low: int, offence: Offence | None, request_id: str
    ) -> Apply | Decision:
        """What to ask the server; or the decision, where there is nothing to count."""
        request = Apply(self._keys, verb, asks, low, offence, request_id)
        if len(asks) > 1:
            self._check_keys(request, asks)
        if not request.keys:
            return self._fallback.memory.apply(verb, asks, low)
        return request

    def _check_keys(self, request: Request[Decision], asks: Sequence[Ask]) -> None:
        if len(set(request.keys)) < len(request.keys):
            refuse("asks", "each key once", [ask.key for ask in asks])
        if self._clients.cluster and len({key_slot(key) for key in request.keys}) > 1:
            refuse("asks", "keys in one slot of the cluster: the same key in each", [ask.key for ask in asks])

    def _decide_without(
        self,
        error: HeadgateError,
        verb: Verb,
        asks: Sequence[Ask],
        low: int,
        offence: Offence | None,
        request_id: str,
    ) -> Decision:
        if isinstance(error, ForeignData):
            self._say(logging.ERROR, str(error))
        return self._fallback.apply(verb, asks, low, offence, request_id)

    def offend(self, offence: Offence) -> Violation:
        """See `Store.offend`."""
        try:
            return self._ask(Offend(self._keys, offence))
        except (StoreAway, ForeignData):
            return self._fallback.memory.offend(offence)

    async def aoffend(self, offence: Offence) -> Violation:
        try:
            return await self._aask(Offend(self._keys, offence))
        except (StoreAway, ForeignData):
            return self._fallback.memory.offend(offence)

    def standing(self, offence: Offence) -> Standing:
        """See `Store.standing`."""
        try:
            return self._ask(Stand(self._keys, offence))
        except (StoreAway, ForeignData):
            return self._fallback.memory.standing(offence)

    async def astanding(self, offence: Offence) -> Standing:
        try:
            return await self._aask(Stand(self._keys, offence))
        except (StoreAway, ForeignData):
            return self._fallback.memory.standing(offence)

    def forget(self, name: str, key: str, rule: Rule) -> bool:
        """See `Store.forget`. Raises `StoreAway` while the server is: what it has counted can't be dropped then."""
        self._fallback.memory.forget(name, key, rule)
        request = Forget(self._keys, name, key, rule)
        return bool(request.keys) and self._ask(request)

    async def aforget(self, name: str, key: str, rule: Rule) -> bool:
        self._fallback.memory.forget(name, key, rule)
        request = Forget(self._keys, name, key, rule)
        return bool(request.keys) and await self._aask(request)

    def clear(self, name: str, rule: Rule) -> None:
        """See `Store.clear`. It looks at every key in the server, and raises `StoreAway` like `forget`."""
        self._fallback.memory.clear(name, rule)
        try:
            client = self._clients.client()
            for pattern in self._keys.patterns(name, rule):
                for key in client.scan_iter(match=pattern, count=_SCANNED):
                    client.unlink(key)
        except (RedisError, OSError) as error:
            raise StoreAway(explained(error)) from error

    async def aclear(self, name: str, rule: Rule) -> None:
        self._fallback.memory.clear(name, rule)
        try:
            client = await self._clients.aclient()
            for pattern in self._keys.patterns(name, rule):
                async for key in client.scan_iter(match=pattern, count=_SCANNED):
                    await client.unlink(key)
        except (RedisError, OSError) as error:
            raise StoreAway(explained(error)) from error

    def _ask(self, request: Request[Answer]) -> Answer:
        if not self._looked_at and not self._breaker.down:
            self._look_at_server()
        return self._threads.ask(request)

    async def _aask(self, request: Request[Answer]) -> Answer:
        if not self._looked_at and not self._breaker.down:
            await self._alook_at_server()
        loop = asyncio.get_running_loop()
        tasks = self._tasks.get(loop)
        if tasks is None:
            tasks = self._tasks[loop] = Tasks(self._wire, self._timeout)
        return await tasks.ask(request)

    def _header(self) -> list[bytes]:
        """The time, or nothing for the server's; and by how many milliseconds expiries are put off."""
        return [b"", b"0"] if self._manual is None else [b"%d" % self._manual.now(), _PUT_OFF]

    def book(self) -> RedisBook:
        """A book of changes that all nodes share."""
        return RedisBook(self._clients, self._prefix)

    # The server ------------------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """See that the server is there and can be used; a `StoreError` says what is wrong, if not."""
        try:
            self._take_note(self._clients.client().info())
            for request in self._rehearsal():
                self._threads.ask(request)
        except (RedisError, OSError, StoreAway) as error:
            raise trouble(error) from error

    async def averify(self) -> None:
        try:
            self._take_note(await (await self._clients.aclient()).info())
            for request in self._rehearsal():
                await self._aask(request)
        except (RedisError, OSError, StoreAway) as error:
            raise trouble(error) from error

    def _rehearsal(self) -> list[Request[Any]]:
        """Requests that show whether our keys can be read and written, and leave nothing behind."""
        key, limit = f"verify-{uuid4().hex}", per_second(1)
        check = Apply(self._keys, Verb.CHECK, [Ask("", key, limit, 1)], 0, None, "")
        return [check, Forget(self._keys, "", key, limit)]

    def _look_at_server(self) -> None:
        """Once, on the first call: say in the log what is wrong with the server."""
        try:
            self._take_note(self._clients.client().info())
        except StoreError as error:
            self._say(logging.ERROR, str(error))
        except (RedisError, OSError) as error:
            raise self._wire.broken(error) from error

    async def _alook_at_server(self) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                self._take_note(await (await self._clients.aclient()).info())
        except StoreError as error:
            self._say(logging.ERROR, str(error))
        except (RedisError, OSError) as error:
            raise self._wire.broken(error) from error

    def _take_note(self, info: dict[str, Any]) -> None:
        self._looked_at = True
        for of_node in [info] if "redis_version" in info else info.values():
            for note in check_server(of_node):
                self._say(logging.WARNING, note)

    # What is told ----------------------------------------------------------------------------------------------------

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` when the server goes away and when it is back; the function returned ends that."""
        with self._lock:
            self._listeners = (*self._listeners, listener)
        return lambda: self._unsubscribe(listener)

    def _unsubscribe(self, listener: Listener) -> None:
        with self._lock:
            self._listeners = tuple([other for other in self._listeners if other is not listener])

    def _tell(self, degraded: bool, reason: str) -> None:
        if degraded:
            _log.error("the store is away, decisions are degraded: %s", reason)
        else:
            _log.warning("the store is back")
        emit(self._listeners, Degraded(degraded, reason))

    def _stepped_back(self) -> None:
        self._say(
            logging.WARNING,
            "the server's clock has stepped back by a second or more: what was counted starts again from the new time",
        )

    def _say(self, level: int, text: str) -> None:
        """Say something in the log, but not over and over."""
        now = time.monotonic()
        with self._lock:
            if self._said.get(text, 0.0) > now:
                return
            if len(self._said) > 1000:
                self._said.clear()
            self._said[text] = now + _SAY_EVERY
        _log.log(level, text)

    # The end ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the connections of threads. Those of an event loop are closed with it, or by `aclose`."""
        self._clients.close()

    async def aclose(self) -> None:
        """Close the connections of this event loop, and those of threads."""
        await self._clients.aclose()
        self._clients.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.aclose()
