"""The store in Redis or Valkey, for many machines."""

import asyncio
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, SupportsIndex
from uuid import uuid4
from weakref import WeakKeyDictionary

from redis.crc import key_slot

from headgate.errors import StoreAway, StoreError, refuse
from headgate.events import Degraded, emit
from headgate.flow import Flow, adrive, drive
from headgate.lifecycle import Closable, after_fork
from headgate.limits.clock import Clock, ManualClock, MonotonicClock
from headgate.limits.decision import Decision, Limit, Rule, Violation
from headgate.limits.numbers import Number, microseconds, permille
from headgate.limits.token_bucket import per_second
from headgate.limits.violations import Backoff, Standing
from headgate.stores.base import Ask, LocalCache, Offence, RecordedViolation, Verb
from headgate.stores.memory import MemoryStore
from headgate.stores.redis.agents import RedisAgents
from headgate.stores.redis.alerts import RedisAlerts
from headgate.stores.redis.batching import Tasks, Threads, Wire
from headgate.stores.redis.changelog import RedisChangeLog
from headgate.stores.redis.clients import ERRORS, AsyncClient, Client, Clients, check_server, explained, trouble
from headgate.stores.redis.fallback import Breaker, Fallback
from headgate.stores.redis.local_cache import Sparing
from headgate.stores.redis.protocol import Answer, Apply, Draw, ForeignData, Forget, Keys, Offend, Request, Stand
from headgate.stores.redis.windows import RedisWindows

_SCANNED: Final = 1000  # keys that one SCAN looks at
_RESET_TIMEOUT: Final = 10.0  # seconds after which a server that is reset is away
_PUT_OFF: Final = b"600000"  # on a clock for tests keys live longer: the server's own clock must not interfere
_SEND_EVERY: Final = 0.5  # seconds between two times that owed violations are sent
_SAY_EVERY: Final = 60.0  # seconds between two lines in the log that say the same

_log = logging.getLogger("headgate")


class RedisStore(Closable):
    """Keeps what is counted in a Redis or Valkey server, so that many machines decide as one, on its clock.

    `where` is a URL (see `headgate.stores.redis.clients`), or a client of redis-py, or two of them, one for threads
    and one for asyncio. Every key that is stored begins with `prefix`.

    A server that doesn't answer within `timeout` seconds, or can't be reached, is away, and decisions are `degraded`
    until it is back: with `on_failure` "open" everything passes, with "closed" nothing does, and with "local" this
    process's memory judges, by its share of each limit where there are several `nodes`.

    Two options ask the server less. With `remember_denials`, a key that was denied is denied here until its wait is
    over, for a second at the most. With a `lease`, say 0.05, this process draws up to that share of a busy bucket's
    capacity ahead; all processes together never let more pass than the limit, but those that are not busy may find up
    to that share for each of the others gone for a second.
    """

    def __init__(
        self,
        where: str | Client | AsyncClient | tuple[Client, AsyncClient],
        *,
        prefix: str = "headgate:",
        timeout: Number = 0.25,
        on_failure: str = "local",
        nodes: SupportsIndex = 1,
        remember_denials: bool = False,
        lease: Number = 0,
        clock: ManualClock | None = None,
    ) -> None:
        given: object = prefix
        if not isinstance(given, str) or not re.fullmatch(r"[^{}]+", given):
            refuse("RedisStore prefix", "some text without braces", prefix)
        seconds = microseconds("RedisStore timeout", timeout) / 1_000_000
        if not seconds:
            refuse("RedisStore timeout", "a number of seconds above 0", timeout)
        self._timeout: Final = seconds
        self._where: Final = where
        self._prefix: Final = prefix
        self._manual: Final = clock
        self._clock: Final[Clock] = MonotonicClock() if clock is None else clock
        self._fallback: Final = Fallback(on_failure, nodes, MemoryStore(clock=clock))
        self.keys: Final = Keys(prefix)
        self._clients: Final = Clients(where, seconds)
        self._breaker: Final = Breaker(self._tell)
        self._wire: Final = Wire(self._clients, self._breaker, self._header, self._stepped_back)
        self.traffic: Final = self._wire.traffic
        self._threads: Final = Threads(self._wire, seconds)
        self._tasks: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, Tasks]] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._listeners: tuple[Callable[[Any], object], ...] = ()
        self._said: Final[dict[str, float]] = {}
        self._looked_at = False
        share = permille("RedisStore lease", lease)
        self._sparing: Final = Sparing(self._clock, remember_denials, share) if remember_denials or share else None
        if self._sparing is not None and not self._clients.for_threads:
            refuse(
                "RedisStore", "a client for threads with remember_denials or lease: a thread sends what is owed", where
            )
        self._sender: threading.Thread | None = None
        self._closing: Final = threading.Event()
        after_fork(self)

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
        request = Apply(self.keys, verb, asks, low, offence, request_id)
        if not request.keys:  # there is nothing to count
            return self._fallback.memory.apply(verb, asks, low)
        try:
            if self._is_cached(request, asks):
                return drive(self._decide_cached(request, verb, asks[0], low, offence, request_id), self.ask)
            return self.ask(request)
        except (StoreAway, ForeignData) as error:
            return self.decide_without(error, verb, asks, low, offence, request_id)

    async def aapply(
        self, verb: Verb, asks: Sequence[Ask], low: int, offence: Offence | None = None, request_id: str = ""
    ) -> Decision:
        request = Apply(self.keys, verb, asks, low, offence, request_id)
        if not request.keys:
            return self._fallback.memory.apply(verb, asks, low)
        try:
            if self._is_cached(request, asks):
                return await adrive(self._decide_cached(request, verb, asks[0], low, offence, request_id), self.aask)
            return await self.aask(request)
        except (StoreAway, ForeignData) as error:
            return self.decide_without(error, verb, asks, low, offence, request_id)

    def _is_cached(self, request: Request[Decision], asks: Sequence[Ask]) -> bool:
        """Whether the local cache has a part in a request. Of several asks, it has none; they have to fit together."""
        if len(asks) == 1:
            return self._sparing is not None
        if len(set(request.keys)) < len(request.keys):
            refuse("asks", "each key once", [ask.key for ask in asks])
        if self._clients.cluster and len({key_slot(key) for key in request.keys}) > 1:
            refuse("asks", "keys in one slot of the cluster: the same key in each", [ask.key for ask in asks])
        return False

    def decide_without(
        self,
        error: StoreAway | ForeignData,
        verb: Verb,
        asks: Sequence[Ask],
        low: int = 0,
        offence: Offence | None = None,
        request_id: str = "",
    ) -> Decision:
        """What is decided when the server can't be asked, or not about this."""
        return self._note(error).apply(verb, asks, low, offence, request_id)

    def _note(self, error: StoreAway | ForeignData) -> Fallback:
        """Who decides instead. That the server is away is said when it goes; what isn't ours is said here."""
        if isinstance(error, ForeignData):
            self._say(logging.ERROR, str(error))
        return self._fallback

    def _decide_cached(
        self, request: Apply, verb: Verb, ask: Ask, low: int, offence: Offence | None, request_id: str
    ) -> Flow[Request[Any], Decision]:
        """Decide on a request with the help of the local cache: yields what to ask the server."""
        sparing = self._sparing
        assert sparing is not None
        table = sparing.table(ask.name, ask.limit)
        decision: Decision
        if verb is not Verb.CHECK:
            if verb is not Verb.PEEK:
                yield from table.forget(ask.key, self.keys)
            decision = yield request
            return decision
        served = None if request_id else table.serve(ask.key, ask.cost, low, offence)
        if served is not None:
            return served
        if offence is not None:
            yield from self._pay(sparing, offence)
        asked_at = self._clock.now()
        draw = None if request_id else table.draws(ask, low, offence, self.keys)
        got = None
        try:
            decision = yield request if draw is None else draw
            got = draw
        finally:
            if draw is not None:
                table.drawn(ask.key, got, asked_at)
        if sparing.remembers and not decision:
            table.denied(ask.key, ask.cost, decision, asked_at)
        self._send_soon(sparing)
        return decision

    def _pay(self, sparing: Sparing, offence: Offence) -> Flow[Request[Any], None]:
        """Tell the server first what it isn't told yet of somebody."""
        for owed in sparing.take_owed(self.keys, offence):
            try:
                violation = yield owed
            except (StoreAway, ForeignData):
                sparing.owe_again(offence, owed.times)
                raise
            self._late(offence, violation)

    def local_cache(self, name: str, limit: Limit) -> LocalCache | None:
        """What may answer some checks under a name and limit without asking the server."""
        return None if self._sparing is None else self._sparing.table(name, limit)

    def _late(self, offence: Offence, violation: Violation) -> None:
        for listener in self._listeners:
            listener(RecordedViolation(offence, violation))

    def _send_soon(self, sparing: Sparing) -> None:
        """See to it that what is owed is sent, and what isn't used is given back."""
        if sparing.busy():
            with self._lock:
                if self._sender is None and not self._closing.is_set():
                    self._sender = threading.Thread(
                        target=self._send_now_and_then, name="headgate-sparing", daemon=True
                    )
                    self._sender.start()

    def _send_now_and_then(self) -> None:
        while not self._closing.wait(_SEND_EVERY):
            self.flush()
            with self._lock:
                if self._sparing is None or not self._sparing.busy():
                    self._sender = None
                    return

    def flush(self, *, everything: bool = False) -> None:
        """Send what is owed to the server, and give back leases that are idle, or all of them."""
        sparing = self._sparing
        if sparing is None:
            return
        owed, backs = sparing.take_owed(self.keys), sparing.idle(self.keys, everything)
        self._threads.ask_all([*owed, *backs])
        for offend in owed:
            if isinstance(offend.answer, Violation):
                self._late(offend.offence, offend.answer)
            else:
                sparing.owe_again(offend.offence, offend.times)

    def record_violation(self, offence: Offence) -> Violation:
        """See `Store.record_violation`."""
        try:
            return self.ask(Offend(self.keys, offence))
        except (StoreAway, ForeignData) as error:
            return self._note(error).memory.record_violation(offence)

    async def arecord_violation(self, offence: Offence) -> Violation:
        try:
            return await self.aask(Offend(self.keys, offence))
        except (StoreAway, ForeignData) as error:
            return self._note(error).memory.record_violation(offence)

    def standing(self, offence: Offence) -> Standing:
        """See `Store.standing`."""
        try:
            return self.ask(Stand(self.keys, offence))
        except (StoreAway, ForeignData) as error:
            return self._note(error).memory.standing(offence)

    async def astanding(self, offence: Offence) -> Standing:
        try:
            return await self.aask(Stand(self.keys, offence))
        except (StoreAway, ForeignData) as error:
            return self._note(error).memory.standing(offence)

    def forget(self, name: str, key: str, rule: Rule) -> bool:
        """See `Store.forget`. Raises `StoreAway` while the server is: what it has counted can't be dropped then."""
        self._fallback.forget(name, key, rule)
        for back in self._backs(name, key, rule):
            self.ask(back)
        request = Forget(self.keys, name, key, rule)
        return bool(request.keys) and self.ask(request)

    async def aforget(self, name: str, key: str, rule: Rule) -> bool:
        self._fallback.forget(name, key, rule)
        for back in self._backs(name, key, rule):
            await self.aask(back)
        request = Forget(self.keys, name, key, rule)
        return bool(request.keys) and await self.aask(request)

    def _backs(self, name: str, key: str, rule: Rule) -> list[Draw]:
        """Forget what is kept here of a key; what to give back."""
        if self._sparing is None:
            return []
        if isinstance(rule, Limit):
            return self._sparing.table(name, rule).forget(key, self.keys)
        assert isinstance(rule, Backoff)
        self._sparing.take_owed(self.keys, Offence(name, key, rule))
        return []

    def clear(self, name: str, rule: Rule) -> None:
        """See `Store.clear`. It looks at every key in the server, and raises `StoreAway` like `forget`."""
        self._fallback.clear(name, rule)
        try:
            client = self._clients.client()
            for pattern in self.keys.patterns(name, rule):
                for key in client.scan_iter(match=pattern, count=_SCANNED):
                    client.unlink(key)
        except ERRORS as error:
            raise StoreAway(explained(error)) from error

    async def aclear(self, name: str, rule: Rule) -> None:
        self._fallback.clear(name, rule)
        try:
            client = await self._clients.aclient()
            for pattern in self.keys.patterns(name, rule):
                async for key in client.scan_iter(match=pattern, count=_SCANNED):
                    await client.unlink(key)
        except ERRORS as error:
            raise StoreAway(explained(error)) from error

    def reset(self) -> Counter[str]:
        """See `ResettableStore.reset`. It looks at every key in the server, and raises `StoreAway` like `forget`."""
        self._fallback.memory.reset()
        dropped, clients = Counter[str](), Clients(self._where, _RESET_TIMEOUT)
        try:
            client = clients.client()
            for key in client.scan_iter(match=self.keys.every(), count=_SCANNED):
                if client.unlink(key):
                    dropped.update(self.keys.limiter_of(key))
        except ERRORS as error:
            raise StoreAway(explained(error)) from error
        finally:
            clients.close()
        return dropped

    async def areset(self) -> Counter[str]:
        self._fallback.memory.reset()
        dropped, clients = Counter[str](), Clients(self._where, _RESET_TIMEOUT)
        try:
            client = await clients.aclient()
            async for key in client.scan_iter(match=self.keys.every(), count=_SCANNED):
                if await client.unlink(key):
                    dropped.update(self.keys.limiter_of(key))
        except ERRORS as error:
            raise StoreAway(explained(error)) from error
        finally:
            await clients.aclose()
        return dropped

    def ask(self, request: Request[Answer]) -> Answer:
        """Have a request carried out; raises `StoreAway` or `ForeignData`."""
        if not self._looked_at and not self._breaker.down and self._is_first():
            self._look_at_server()
        return self._threads.ask(request)

    async def aask(self, request: Request[Answer]) -> Answer:
        if not self._looked_at and not self._breaker.down and self._is_first():
            await self._alook_at_server()
        loop = asyncio.get_running_loop()
        tasks = self._tasks.get(loop)
        if tasks is None:
            tasks = self._tasks[loop] = Tasks(self._wire, self._timeout)
        return await tasks.ask(request)

    def _header(self) -> list[bytes]:
        """The time, or nothing for the server's; and by how many milliseconds expiries are put off."""
        return [b"", b"0"] if self._manual is None else [b"%d" % self._manual.now(), _PUT_OFF]

    def change_log(self) -> RedisChangeLog:
        """The log of changes that all nodes share."""
        return RedisChangeLog(self._clients, self._prefix)

    def agents(self) -> RedisAgents:
        """The agents and their tokens, which several hubs share."""
        return RedisAgents(self._clients, self._prefix)

    def alerts(self) -> RedisAlerts:
        """The open alerts, which several hubs share."""
        return RedisAlerts(self._clients, self._prefix)

    def windows(self) -> RedisWindows:
        """Sliding windows whose limit comes with each call. All that are made here count together."""
        return RedisWindows(self)

    # The server ------------------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """See that the server is there and can be used; a `StoreError` says what is wrong, if not."""
        try:
            self._take_note(self._clients.client().info())
            self._looked_at = True
            for request in self._rehearsal():
                self._threads.ask(request)
        except (*ERRORS, StoreAway) as error:
            raise trouble(error) from error

    async def averify(self) -> None:
        try:
            self._take_note(await (await self._clients.aclient()).info())
            self._looked_at = True
            for request in self._rehearsal():
                await self.aask(request)
        except (*ERRORS, StoreAway) as error:
            raise trouble(error) from error

    def _rehearsal(self) -> list[Request[Any]]:
        """Requests that show whether our keys can be read and written, and leave nothing behind."""
        key, limit = f"verify-{uuid4().hex}", per_second(1)
        check = Apply(self.keys, Verb.CHECK, [Ask("", key, limit, 1)], 0, None, "")
        return [check, Forget(self.keys, "", key, limit)]

    def _is_first(self) -> bool:
        """Whether nobody looks at the server yet: one does, and the others don't wait for it."""
        with self._lock:
            first, self._looked_at = not self._looked_at, True
            return first

    def _look_at_server(self) -> None:
        """Once, on the first call: say in the log what is wrong with the server."""
        try:
            self._take_note(self._clients.client().info())
        except StoreError as error:
            self._say(logging.ERROR, str(error))
        except ERRORS as error:
            self._looked_at = False
            raise self._wire.broken(error) from error

    async def _alook_at_server(self) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                self._take_note(await (await self._clients.aclient()).info())
        except StoreError as error:
            self._say(logging.ERROR, str(error))
        except ERRORS as error:
            self._looked_at = False
            raise self._wire.broken(error) from error

    def _take_note(self, info: dict[str, Any]) -> None:
        for of_node in [info] if "redis_version" in info else info.values():
            for note in check_server(of_node):
                self._say(logging.WARNING, note)

    # What is told ----------------------------------------------------------------------------------------------------

    def subscribe(self, listener: Callable[[Degraded | RecordedViolation], object]) -> Callable[[], None]:
        """Call `listener` when the server goes away or comes back, and with violations that were recorded late.

        The function returned ends that.
        """
        with self._lock:
            self._listeners = (*self._listeners, listener)
        return lambda: self._unsubscribe(listener)

    def _unsubscribe(self, listener: Callable[[Any], object]) -> None:
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

    def _after_fork(self) -> None:
        """In a process that was forked: begin anew with what can't be shared with the parent."""
        self._lock = threading.Lock()
        for part in (self._clients, self._breaker, self._threads, self.traffic):
            part.forked()
        if self._sparing is not None:
            self._sparing.forked()
        self._sender = None

    # The end ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the connections of threads. Those of an event loop are closed with it, or by `aclose`."""
        self._closing.set()
        sender = self._sender
        if sender is not None:
            sender.join()
        self.flush(everything=True)
        self._clients.close()

    async def aclose(self) -> None:
        """Close the connections of this event loop, and those of threads."""
        await self._clients.aclose()
        await asyncio.to_thread(self.close)
