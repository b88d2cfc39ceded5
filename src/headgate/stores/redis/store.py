"""The store in Redis or Valkey, for many machines."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, SupportsIndex
from uuid import uuid4

from headgate.errors import StoreAway, refuse
from headgate.events import Degraded, emit
from headgate.flow import Flow, adrive, drive
from headgate.lifecycle import Closable, after_fork, new_lock
from headgate.limits.clock import Clock, ManualClock, MonotonicClock
from headgate.limits.decision import Decision, Limit, Rule, Violation
from headgate.limits.numbers import Number, duration, permille
from headgate.limits.token_bucket import per_second
from headgate.limits.violations import Backoff, Standing
from headgate.stores.base import MAX_TIMEOUT, Ask, LocalCache, Offence, RecordedViolation, StoreEvent, Verb
from headgate.stores.memory import MemoryStore
from headgate.stores.redis.agents import RedisAgents
from headgate.stores.redis.alerts import RedisAlerts
from headgate.stores.redis.batching import ScriptRunner
from headgate.stores.redis.bookings import Bookings
from headgate.stores.redis.cache_flusher import CacheFlusher
from headgate.stores.redis.changelog import RedisChangeLog
from headgate.stores.redis.client_urls import AsyncClient, Client
from headgate.stores.redis.clients import Clients
from headgate.stores.redis.dropped_keys import adrop_keys, drop_keys
from headgate.stores.redis.executor import RequestExecutor
from headgate.stores.redis.fallback import CircuitBreaker, Fallback
from headgate.stores.redis.generation import RedisGeneration
from headgate.stores.redis.holds import RedisHolds
from headgate.stores.redis.keys import Keys
from headgate.stores.redis.local_cache import LocalCaches
from headgate.stores.redis.outage import HoldOutage
from headgate.stores.redis.protocol import (
    ApplyRequest,
    DrawRequest,
    ForeignData,
    ForgetRequest,
    Request,
    StandingRequest,
    ViolationRequest,
)
from headgate.stores.redis.server_errors import ERRORS
from headgate.stores.redis.startup import startup_error
from headgate.stores.redis.windows import RedisWindows, check_prefix, checked_prefix

_RESET_TIMEOUT: Final = 10.0  # seconds
_LOG_EVERY: Final = 60.0  # seconds before the same text is logged again

_log = logging.getLogger("headgate")


class RedisStore(RedisHolds, Closable):
    """Counts in a Redis or Valkey server, so that many machines decide as one, on its clock.

    `where` is a URL (see `headgate.stores.redis.client_urls`), or a client of redis-py, or two of them, one for threads
    and one for asyncio. Every key that is stored begins with `prefix`, except those of a `RateLimiter`, which has its
    own.

    A server that doesn't answer within `timeout` seconds, or can't be reached, is away, and decisions are `degraded`
    until it is back: with `on_failure` "open" everything passes, with "closed" nothing does, and with "local" this
    process's memory decides, by its share of each limit where there are several `nodes`. Holds, and checks on budgets
    and slots, follow `on_failure_holds` instead. What passes then, or is settled, is booked when the server is back.

    Two options ask the server less. With `remember_denials`, a key that was denied is denied here until its wait is
    over, for a second at most. With `draw_ahead`, say 0.05, this process draws up to that share of a busy bucket's
    capacity ahead of its checks. All processes together never let more pass than the limit, but one may find up to that
    share held by each of the others, for a second.
    """

    def __init__(
        self,
        where: str | Client | AsyncClient | tuple[Client, AsyncClient],
        *,
        prefix: str = "headgate:",
        timeout: Number = 0.25,
        on_failure: str = "local",
        on_failure_holds: str = "closed",
        nodes: SupportsIndex = 1,
        remember_denials: bool = False,
        draw_ahead: Number = 0,
        clock: ManualClock | None = None,
    ) -> None:
        check_prefix("RedisStore prefix", prefix)
        seconds = duration("RedisStore timeout", timeout, MAX_TIMEOUT)
        self._where: Final = where
        self._prefix: Final = prefix
        self.clock: Final[Clock] = MonotonicClock() if clock is None else clock
        share = permille("RedisStore draw_ahead", draw_ahead)
        caches = LocalCaches(self.clock, remember_denials, share) if remember_denials or share else None
        keys, clients = Keys(prefix, clock), Clients(where, seconds)
        self._fallback: Final = Fallback(on_failure, nodes, MemoryStore(clock=clock))
        self.generation: Final = RedisGeneration(clients, prefix)
        """The id of the agents and changes in the server; see `StoreGeneration`."""
        self._breaker: Final = CircuitBreaker(self._on_breaker)
        runner = ScriptRunner(clients, self._breaker, clock, self._log_rarely)
        self.traffic: Final = runner.traffic
        executor = RequestExecutor(keys, clients, runner, seconds)
        holds_fallback = Fallback(on_failure_holds, nodes, self._fallback.memory, "on_failure_holds")
        if not clients.for_threads and not holds_fallback.closed:
            refuse(
                "RedisStore", "a client for threads with on_failure_holds: a thread books the holds of an outage", where
            )
        self._bookings: Final = Bookings(executor, lambda: self._breaker.down, closed=not clients.for_threads)
        outage = HoldOutage(holds_fallback, keys, self.clock, self._bookings)
        super().__init__(keys, clients, caches, executor, outage, self._log_error)
        self._lock: Final = new_lock()
        self._listeners: tuple[Callable[[Any], object], ...] = ()
        self._logged: Final[dict[str, float]] = {}
        if self._caches is not None and not self._clients.for_threads:
            refuse(
                "RedisStore",
                "a client for threads with remember_denials or draw_ahead: a thread sends owed violations",
                where,
            )
        self._flusher: Final = (
            None
            if self._caches is None
            else CacheFlusher(self._caches, self.keys, executor.thread_batcher, self._emit, self._log_rarely)
        )
        after_fork(self)

    @property
    def degraded(self) -> bool:
        """Whether the server is away."""
        return self._breaker.down

    # Verbs -----------------------------------------------------------------------------------------------------------

    def apply(
        self, verb: Verb, asks: Sequence[Ask], low: int, offence: Offence | None = None, request_id: str = ""
    ) -> Decision:
        """See `Store.apply`."""
        request = ApplyRequest(self.keys, verb, asks, low, offence, request_id)
        if not request.keys:  # there is nothing to count
            return self._fallback.memory.apply(verb, asks, low)
        try:
            if len(asks) > 1:
                self._executor.check_several(asks, request.counted)
            elif self._caches is not None and not asks[0].root:
                flow = self._decide_cached(request, verb, asks[0], low, offence, request_id)
                return drive(flow, self._executor.execute)
            return self._executor.execute(request)
        except (StoreAway, ForeignData) as error:
            return self._decide_without(error, request)

    async def aapply(
        self, verb: Verb, asks: Sequence[Ask], low: int, offence: Offence | None = None, request_id: str = ""
    ) -> Decision:
        request = ApplyRequest(self.keys, verb, asks, low, offence, request_id)
        if not request.keys:
            return self._fallback.memory.apply(verb, asks, low)
        try:
            if len(asks) > 1:
                self._executor.check_several(asks, request.counted)
            elif self._caches is not None and not asks[0].root:
                flow = self._decide_cached(request, verb, asks[0], low, offence, request_id)
                return await adrive(flow, self._executor.aexecute)
            return await self._executor.aexecute(request)
        except (StoreAway, ForeignData) as error:
            return self._decide_without(error, request)

    def _decide_without(self, error: StoreAway | ForeignData, request: ApplyRequest) -> Decision:
        """Decide without the server."""
        fallback = self._fallback_on(error)
        away = self._outage if any([ask.limit.shares_counts for ask in request.asks]) else fallback
        return away.apply(request.verb, request.asks, request.low, request.offence, request.request_id)

    def _fallback_on(self, error: StoreAway | ForeignData) -> Fallback:
        """The fallback for an error, which is logged."""
        self._log_error(error)
        return self._fallback

    def _log_error(self, error: StoreAway | ForeignData) -> None:
        """Log foreign data. That the server is away was logged by the breaker."""
        if isinstance(error, ForeignData):
            self._log_rarely(logging.ERROR, str(error))

    def _decide_cached(
        self, request: ApplyRequest, verb: Verb, ask: Ask, low: int, offence: Offence | None, request_id: str
    ) -> Flow[Request[Any], Decision]:
        """Decide on a request with the help of the local cache: yields what to ask the server."""
        caches = self._caches
        assert caches is not None
        cache = caches.of(ask.name, ask.limit)
        decision: Decision
        if verb is not Verb.CHECK:
            if verb is not Verb.PEEK:
                for unused in cache.forget(ask.key, self.keys):  # noqa: UP028 - a list takes no results
                    yield unused
            decision = yield request
            return decision
        served = None if request_id else cache.serve(ask.key, ask.cost, low, offence)
        if served is not None:
            return served
        if offence is not None:
            yield from self._send_owed(caches, offence)
        asked_at = self.clock.now()
        draw = None if request_id else cache.start_draw(ask, low, offence, self.keys)
        answered = False
        try:
            decision = yield request if draw is None else draw
            answered = True
        finally:
            if draw is not None:
                cache.end_draw(ask.key, draw, answered, asked_at)
        if caches.remember_denials and not decision:
            cache.remember_denial(ask.key, ask.cost, decision, asked_at)
        assert self._flusher is not None
        self._flusher.start()
        return decision

    def _send_owed(self, caches: LocalCaches, offence: Offence) -> Flow[Request[Any], None]:
        """Send the violations of an agent that the server doesn't know of yet."""
        for owed in caches.take_owed(self.keys, offence):
            try:
                violation = yield owed
            except BaseException:
                caches.owe_again(offence, owed.times)
                raise
            self._emit(RecordedViolation(offence, violation))

    def local_cache(self, name: str, limit: Limit) -> LocalCache | None:
        """See `CachedStore.local_cache`."""
        if self._caches is None:
            return None
        cache = self._caches.of(name, limit)
        cache.pinned = True
        return cache

    def flush(self, *, everything: bool = False) -> None:
        """Send owed violations to the server, and give back drawn tokens that are idle, or all of them."""
        if self._flusher is not None:
            self._flusher.flush(everything=everything)

    def record_violation(self, offence: Offence) -> Violation:
        """See `Store.record_violation`."""
        return drive(self._record_violation(offence), self._executor.execute)

    async def arecord_violation(self, offence: Offence) -> Violation:
        return await adrive(self._record_violation(offence), self._executor.aexecute)

    def _record_violation(self, offence: Offence) -> Flow[Request[Any], Violation]:
        try:
            violation: Violation = yield ViolationRequest(self.keys, offence)
        except (StoreAway, ForeignData) as error:
            return self._fallback_on(error).memory.record_violation(offence)
        return violation

    def standing(self, offence: Offence) -> Standing:
        """See `Store.standing`."""
        return drive(self._standing(offence), self._executor.execute)

    async def astanding(self, offence: Offence) -> Standing:
        return await adrive(self._standing(offence), self._executor.aexecute)

    def _standing(self, offence: Offence) -> Flow[Request[Any], Standing]:
        try:
            standing: Standing = yield StandingRequest(self.keys, offence)
        except (StoreAway, ForeignData) as error:
            return self._fallback_on(error).memory.standing(offence)
        return standing

    def forget(self, name: str, key: str, rule: Rule, root: str = "") -> bool:
        """See `Store.forget`. Raises `StoreAway` while the server is away: its counts can't be dropped then."""
        return drive(self._forget(name, key, rule, root), self._executor.execute)

    async def aforget(self, name: str, key: str, rule: Rule, root: str = "") -> bool:
        return await adrive(self._forget(name, key, rule, root), self._executor.aexecute)

    def _forget(self, name: str, key: str, rule: Rule, root: str) -> Flow[Request[Any], bool]:
        for draw in self._forget_cached(name, key, rule):  # noqa: UP028 - a list takes no results
            yield draw
        request = ForgetRequest(self.keys, name, key, rule, root)
        known = bool(request.keys) and (yield request)
        self._fallback.forget(name, key, rule)  # not before: a call that fails must not refill the local share
        return known

    def _forget_cached(self, name: str, key: str, rule: Rule) -> list[DrawRequest]:
        """Drop the cache of a key; the requests that give its tokens back."""
        if self._caches is None:
            return []
        if isinstance(rule, Limit):
            return self._caches.of(name, rule).forget(key, self.keys)
        assert isinstance(rule, Backoff)
        self._caches.take_owed(self.keys, Offence(name, key, rule))
        return []

    def clear(self, name: str, rule: Rule) -> None:
        """See `Store.clear`. It looks at every key in the server, and raises `StoreAway` like `forget`."""
        drive(self._clear(name, rule), partial(drop_keys, self._clients, self.keys))

    async def aclear(self, name: str, rule: Rule) -> None:
        await adrive(self._clear(name, rule), partial(adrop_keys, self._clients, self.keys))

    def _clear(self, name: str, rule: Rule) -> Flow[list[bytes], None]:
        """Yields the patterns of the keys to drop."""
        with self._uncached(lambda caches: caches.clear(name, rule)):
            yield self.keys.patterns(name, rule)
        self._fallback.clear(name, rule)

    def reset(self) -> Counter[str]:
        """See `ResettableStore.reset`. It looks at every key in the server, and raises `StoreAway` like `forget`."""
        clients = Clients(self._where, _RESET_TIMEOUT)
        try:
            return drive(self._reset(), partial(drop_keys, clients, self.keys))
        finally:
            clients.close()

    async def areset(self) -> Counter[str]:
        clients = Clients(self._where, _RESET_TIMEOUT)
        try:
            return await adrive(self._reset(), partial(adrop_keys, clients, self.keys))
        finally:
            await clients.aclose()

    def _reset(self) -> Flow[list[bytes], Counter[str]]:
        with self._uncached(LocalCaches.reset):
            dropped: Counter[str] = yield [self.keys.every()]
        self._fallback.memory.reset()
        return dropped

    @contextmanager
    def _uncached(self, drop: Callable[[LocalCaches], None]) -> Iterator[None]:
        """Drop what is cached here before and after: of tokens that are drawn meanwhile the server knows nothing."""
        if self._caches is None:
            yield
            return
        drop(self._caches)
        try:
            yield
        finally:
            drop(self._caches)

    def change_log(self) -> RedisChangeLog:
        """The log of changes, shared by all nodes."""
        return RedisChangeLog(self._clients, self.generation, self._executor.startup.start_later)

    def agents(self) -> RedisAgents:
        """The agents and their tokens, shared by several hubs."""
        return RedisAgents(self._clients, self.generation)

    def alerts(self) -> RedisAlerts:
        """The open alerts, shared by several hubs."""
        return RedisAlerts(self._clients, self._prefix)

    def windows(self, prefix: str | None = None) -> RedisWindows:
        """See `WindowStore.windows`. Those with the same prefix count together."""
        start = f"{self._prefix}windows:" if prefix is None else checked_prefix(prefix, self._prefix)
        return RedisWindows(start, self._executor.aexecute, self._log_error, self._fallback.windows())

    # The server ------------------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """See `ServerStore.verify`."""
        executor = self._executor
        drive(self._verify(), lambda ask: executor.info() if ask is None else executor.thread_batcher.execute(ask))

    async def averify(self) -> None:
        executor = self._executor
        await adrive(self._verify(), lambda ask: executor.ainfo() if ask is None else executor.aexecute(ask))

    def _verify(self) -> Flow[Request[Any] | None, None]:
        """Yields None for the result of INFO, and requests that read and write one of our keys and leave nothing."""
        key, limit = f"verify-{uuid4().hex}", per_second(1)
        try:
            yield from self._executor.startup.look_at_server()
            yield ApplyRequest(self.keys, Verb.CHECK, [Ask("", key, limit, 1)], 0, None, "")
            yield ForgetRequest(self.keys, "", key, limit)
        except (*ERRORS, StoreAway) as error:
            raise startup_error(error) from error

    # Events and the log ----------------------------------------------------------------------------------------------

    def subscribe(self, listener: Callable[[StoreEvent], object]) -> Callable[[], None]:
        """See `ObservableStore.subscribe`."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

        def unsubscribe() -> None:
            with self._lock:
                self._listeners = tuple([other for other in self._listeners if other is not listener])

        return unsubscribe

    def _on_breaker(self, degraded: bool, reason: str) -> None:
        if degraded:
            _log.error("the store is away, decisions are degraded: %s", reason)
        else:
            _log.warning("the store is back")
            self._bookings.start()
        self._emit(Degraded(degraded, reason))

    def _emit(self, event: StoreEvent) -> None:
        emit(self._listeners, event)

    def _log_rarely(self, level: int, text: str, error: BaseException | None = None) -> None:
        """Log a text, with the traceback of an error if there is one, but not again within a minute."""
        now = time.monotonic()
        with self._lock:
            if self._logged.get(text, 0.0) > now:
                return
            if len(self._logged) > 1000:
                self._logged.clear()
            self._logged[text] = now + _LOG_EVERY
        _log.log(level, text, exc_info=error)

    def _after_fork(self) -> None:
        """In a forked process: replace what can't be shared with the parent."""
        for part in (self._clients, self._executor, self._caches, self._flusher, self._bookings):
            if part is not None:
                part.after_fork()

    def close(self) -> None:
        """Close the connections of threads. Those of an event loop are closed with it, or by `aclose`."""
        if self._flusher is not None:
            self._flusher.close()
        self._bookings.close()
        self._clients.close()

    async def aclose(self) -> None:
        """Close the connections of this event loop, and those of threads."""
        await self._clients.aclose()
        await asyncio.to_thread(self.close)
