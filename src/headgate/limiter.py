"""Limiter: limits without a policy, for any application."""

import logging
from functools import cached_property
from os import PathLike
from typing import Any, ClassVar, Final, Never

from headgate._hold_hot import local_holds
from headgate._limiter_hot import KEEP, LimiterChecks, OnExpiry, id_of, key_of
from headgate.errors import RateLimited, refuse, refuse_option
from headgate.holds import (
    Hold,
    HoldSummary,
    PendingHold,
    check_id,
    found_hold,
    summarize,
)
from headgate.lifecycle import Closable
from headgate.limits.decision import Decision, Limit
from headgate.limits.notation import LimitLike, denial_error, limit_of
from headgate.limits.numbers import Cost, Number, cost_in, permille, spent_in, whole
from headgate.stores.base import Store, Verb
from headgate.stores.holds import HoldStore
from headgate.stores.memory import MemoryStore
from headgate.stores.memory_file import check_path
from headgate.stores.urls import aclose_store, close_store, is_memory, open_store
from headgate.wait_queue import WaitQueues, aacquire, acquire, is_zero

_log = logging.getLogger("headgate")
_MISSING: Final[Any] = (
    None  # so that unknown options are told first: those of slowapi's Limiter have no limit beside them
)


class Limiter(LimiterChecks, Closable):
    """Says how much each key may do, and counts it.

    `limit` is a limit, its text, or several of either, which then hold all at once. `store` is a store, the URL of a
    Redis or Valkey server, or None for this process's memory. Limiters on one store with the same name and the same
    limit share their counts. With less than 1 - `warn_at` of the capacity left, a check that passes is a warning; 1 for
    never. Without a store, `remember` may be the path of a file: budgets and holds survive a restart then.

    >>> from headgate import Limiter, per_minute
    >>> limiter = Limiter(per_minute(60, burst=10))
    >>> decision = limiter.check("agent-7")
    >>> bool(decision), decision.remaining
    (True, 9)

    Every verb has an async twin that begins with an "a" and does the same. Bad input raises `InvalidInput` and counts
    nothing.
    """

    _pin: ClassVar[bool] = True

    def __init__(
        self,
        limit: LimitLike = _MISSING,
        *,
        store: Store | str | None = None,
        name: str = "",
        warn_at: Number = 0.8,
        remember: str | PathLike[str] | None = None,
        **unknown: Never,
    ) -> None:
        for option in unknown:
            names = "limit", "store", "name", "warn_at", "remember"
            refuse_option("Limiter", names, option, see="help(headgate.Limiter)")
        if not isinstance(name, str):
            refuse("Limiter name", "a string", name)
        rules, low = limit_of("Limiter limit", limit), 1000 - permille("Limiter warn_at", warn_at)
        opened = open_store("Limiter store", store) if remember is None else _remembering_store(store, remember)
        if remember is not None and not rules.shares_counts:
            _log.warning(
                "Limiter remember: %s starts full after a restart: only budgets and holds are remembered", rules
            )
        super().__init__(rules, opened, name, low, self._pin)
        self._owns_store = isinstance(store, str) or remember is not None
        self.private: Final = store is None or is_memory(store)
        """Whether it counts in a memory of its own, because no store was given, or memory://."""
        self._holds = LimiterHolds(self._store, self._low, self._decimals, self._queues)
        if self._pin:
            self._local = local_holds(self._holds, self._store, name, rules, low, self._queues.queues)

    @property
    def limit(self) -> Limit:
        """The limit of each key."""
        return self._limit

    @property
    def store(self) -> Store:
        """The store that counts."""
        return self._store

    @property
    def warn_at(self) -> float:
        """The used share of the capacity above which a check that passes is a warning."""
        return (1000 - self._low) / 1000

    @property
    def name(self) -> str:
        """Keeps its keys apart from those of other limiters on the store."""
        return self._name

    async def acheck(self, key: str, cost: Cost = 1, *, request_id: str | None = None) -> Decision:
        if self._table is not None:
            return self.check(key, cost, request_id=request_id)
        if self._cache is not None and request_id is None:
            served = self._cache.serve(key_of(key), cost_in(self._decimals, cost), self._low, None)
            if served is not None:
                return served
        return await self._aapply(Verb.CHECK, key, cost, request_id)

    def peek(self, key: str, cost: Cost = 1) -> Decision:
        """Decide as a check of this cost would, and count nothing. `remaining` is the quota left now."""
        return self._apply(Verb.PEEK, key, cost)

    async def apeek(self, key: str, cost: Cost = 1) -> Decision:
        return await self._aapply(Verb.PEEK, key, cost)

    def charge(self, key: str, cost: Cost, *, request_id: str | None = None) -> Decision:
        """Count a cost that has been spent already, even if that leaves a debt, which later refill pays off.

        Like `refund`, it answers as `peek` would right after it.
        """
        return self._apply(Verb.CHARGE, key, cost, request_id)

    async def acharge(self, key: str, cost: Cost, *, request_id: str | None = None) -> Decision:
        return await self._aapply(Verb.CHARGE, key, cost, request_id)

    def refund(self, key: str, cost: Cost = 1, *, request_id: str | None = None) -> Decision:
        """Give back a counted cost that was not used, up to the capacity (in a window, the newest first)."""
        decision = self._apply(Verb.REFUND, key, cost, request_id)
        self._queues.wake(key_of(key))
        return decision

    async def arefund(self, key: str, cost: Cost = 1, *, request_id: str | None = None) -> Decision:
        decision = await self._aapply(Verb.REFUND, key, cost, request_id)
        self._queues.wake(key_of(key))
        return decision

    def reset(self, key: str) -> bool:
        """Forget the count of a key, and say whether there was any."""
        name = key_of(key)
        known = self._store.forget(self._name, name, self._limit)
        self._queues.wake(name)
        return known

    async def areset(self, key: str) -> bool:
        name = key_of(key)
        known = await self._store.aforget(self._name, name, self._limit)
        self._queues.wake(name)
        return known

    def acquire(self, key: str, cost: Cost = 1, *, timeout: Number | None = None) -> Decision:
        """Wait until a request of this cost passes: first come, first served among the waiters for the key here.

        Returns the decision that passed, or the denial when `timeout` seconds are over, or at once if no wait would
        help. A denied request has spent nothing.
        """
        name = key_of(key)
        return acquire(self._queues, name, self._store.clock, timeout, lambda verb: self._apply(verb, name, cost))

    async def aacquire(self, key: str, cost: Cost = 1, *, timeout: Number | None = None) -> Decision:
        name = key_of(key)
        return await aacquire(
            self._queues, name, self._store.clock, timeout, lambda verb: self._aapply(verb, name, cost)
        )

    def ahold(
        self,
        key: str,
        cost: Cost = 1,
        *,
        lease: Number = 60,
        timeout: Number | None = 0,
        hold_id: str | None = None,
        on_expiry: OnExpiry = "keep",
        keep: Number = KEEP,
        max_age: Number | None = 3600,
    ) -> PendingHold[Hold]:
        """`hold`, to be awaited, or used in `async with`."""

        async def hold() -> Hold:
            if self._local is not None and is_zero(timeout):
                return self.hold(
                    key, cost, lease=lease, hold_id=hold_id, on_expiry=on_expiry, keep=keep, max_age=max_age
                )
            attempt = self._attempt(key, cost, lease, hold_id, on_expiry, keep, max_age)
            return await attempt.arun(self._queues, key_of(key), timeout)

        return PendingHold(hold)

    def find_hold(self, key: str, hold_id: str) -> Hold:
        """A hold that was made before, perhaps by another process; raises `UnknownHold`."""
        called, asks, name = self._store.clock.now(), self._hold_asks(key), check_id(hold_id)
        return found_hold(
            self._holds, asks, name, self._holds.hold_store.find_hold(asks, self._low, name), called, Hold
        )

    async def afind_hold(self, key: str, hold_id: str) -> Hold:
        called, asks, name = self._store.clock.now(), self._hold_asks(key), check_id(hold_id)
        answer = await self._holds.hold_store.afind_hold(asks, self._low, name)
        return found_hold(self._holds, asks, name, answer, called, Hold)

    def list_holds(self, key: str, count: int = 100) -> list[HoldSummary]:
        """Holds of a key that are open, then those that have expired, each by their ends.

        In memory there are settled ones at the end, if somebody gave or asked for their id.
        """
        found = self._holds.hold_store.list_holds(self._name, key_of(key), whole("count", count))
        return [summarize(one, self._decimals) for one in found]

    async def alist_holds(self, key: str, count: int = 100) -> list[HoldSummary]:
        found = await self._holds.hold_store.alist_holds(self._name, key_of(key), whole("count", count))
        return [summarize(one, self._decimals) for one in found]

    def waiting(self, key: str) -> int:
        """How many callers wait in `acquire` or `hold` for a key here."""
        return self._queues.length(key_of(key))

    async def _aapply(self, verb: Verb, key: object, cost: object, request_id: object = None) -> Decision:
        return await self._store.aapply(verb, [self._ask(verb, key, cost)], self._low, None, id_of(request_id))

    def close(self) -> None:
        """Close the store, if this limiter has opened it. A `with` block does so at its end."""
        if self._owns_store:
            close_store(self._store)

    async def aclose(self) -> None:
        if self._owns_store:
            await aclose_store(self._store)

    def __repr__(self) -> str:
        name = f", name={self._name!r}" if self._name else ""
        return f"Limiter({str(self._limit)!r}{name})"


class LimiterHolds:
    """The `HoldOwner` of a limiter."""

    def __init__(self, store: Store, low: int, decimals: int, queues: WaitQueues) -> None:
        self._store: Final = store
        self._decimals: Final = decimals
        self._queues: Final = queues
        self.low: Final = low

    @cached_property
    def hold_store(self) -> HoldStore:
        if not isinstance(self._store, HoldStore):
            refuse("Limiter.hold", "a store that can hold (headgate.stores.holds.HoldStore)", self._store)
        return self._store

    def read_costs(self, cost: object, unnamed: tuple[Any, ...], *, spent: bool = False) -> tuple[Any, ...]:
        return (spent_in(self._decimals, cost) if spent else cost_in(self._decimals, cost, zero=True),)

    def denial(self, key: str, decision: Decision) -> RateLimited:
        return denial_error(key, decision)

    def freed(self, key: str) -> None:
        self._queues.wake(key)


def _remembering_store(store: object, remember: object) -> Store:
    if store is not None and not is_memory(store):
        refuse("Limiter remember", "no store beside it (a server remembers, as does MemoryStore(remember=...))", store)
    return MemoryStore(remember=check_path("Limiter remember", remember))


class UnpinnedLimiter(Limiter):
    """A limiter for one of any number of limits: nothing stays in the store once its keys are full again."""

    _pin = False
