"""Limiter: limits without a policy, for any application."""

from typing import Any, ClassVar, Final, Never, SupportsIndex

from headgate._limiter_hot import LimiterChecks, id_of, key_of
from headgate.errors import refuse, refuse_option
from headgate.lifecycle import Closable
from headgate.limits.decision import Decision, Limit
from headgate.limits.notation import LimitLike, limit_of
from headgate.limits.numbers import Number, cost_of, permille
from headgate.stores.base import Store, Verb
from headgate.stores.urls import aclose_store, close_store, open_store
from headgate.wait_queue import WaitQueues, aacquire, acquire

_MISSING: Final[Any] = (
    None  # so that unknown options are told first: those of slowapi's Limiter have no limit beside them
)


class Limiter(LimiterChecks, Closable):
    """Says how much each key may do, and counts it.

    `limit` is a limit, its text, or several of either, which then hold all at once. `store` is a store, the URL of a
    Redis or Valkey server, or None for this process's memory. Limiters on one store with the same name and the same
    limit share their counts. With less than 1 - `warn_at` of the capacity left, a check that passes is a warning; 1 for
    never.

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
        **unknown: Never,
    ) -> None:
        for option in unknown:
            refuse_option("Limiter", ("limit", "store", "name", "warn_at"), option, see="help(headgate.Limiter)")
        if not isinstance(name, str):
            refuse("Limiter name", "a string", name)
        rules, low = limit_of("Limiter limit", limit), 1000 - permille("Limiter warn_at", warn_at)
        super().__init__(rules, open_store("Limiter store", store), name, low, self._pin)
        self._owns_store = isinstance(store, str)
        self.private: Final = store is None
        """Whether it counts in a memory of its own, because no store was given."""
        self._queues = WaitQueues()

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

    async def acheck(self, key: str, cost: SupportsIndex = 1, *, request_id: str | None = None) -> Decision:
        if self._table is not None:
            return self.check(key, cost, request_id=request_id)
        if self._cache is not None and request_id is None:
            served = self._cache.serve(key_of(key), cost_of(cost), self._low, None)
            if served is not None:
                return served
        return await self._aapply(Verb.CHECK, key, cost, request_id)

    def peek(self, key: str, cost: SupportsIndex = 1) -> Decision:
        """Decide as a check of this cost would, and count nothing. `remaining` is the quota left now."""
        return self._apply(Verb.PEEK, key, cost)

    async def apeek(self, key: str, cost: SupportsIndex = 1) -> Decision:
        return await self._aapply(Verb.PEEK, key, cost)

    def charge(self, key: str, cost: SupportsIndex, *, request_id: str | None = None) -> Decision:
        """Count a cost that has been spent already, even if that leaves a debt, which later refill pays off.

        Like `refund`, it answers as `peek` would right after it.
        """
        return self._apply(Verb.CHARGE, key, cost, request_id)

    async def acharge(self, key: str, cost: SupportsIndex, *, request_id: str | None = None) -> Decision:
        return await self._aapply(Verb.CHARGE, key, cost, request_id)

    def refund(self, key: str, cost: SupportsIndex = 1, *, request_id: str | None = None) -> Decision:
        """Give back a counted cost that was not used, up to the capacity (in a window, the newest first)."""
        decision = self._apply(Verb.REFUND, key, cost, request_id)
        self._queues.wake(key_of(key))
        return decision

    async def arefund(self, key: str, cost: SupportsIndex = 1, *, request_id: str | None = None) -> Decision:
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

    def acquire(self, key: str, cost: SupportsIndex = 1, *, timeout: Number | None = None) -> Decision:
        """Wait until a request of this cost passes: first come, first served among the waiters for the key here.

        Returns the decision that passed, or the denial when `timeout` seconds are over, or at once if no wait would
        help. A denied request has spent nothing.
        """
        name, number = key_of(key), cost_of(cost)
        return acquire(self._queues, name, self._store.clock, timeout, lambda verb: self._apply(verb, name, number))

    async def aacquire(self, key: str, cost: SupportsIndex = 1, *, timeout: Number | None = None) -> Decision:
        name, number = key_of(key), cost_of(cost)
        return await aacquire(
            self._queues, name, self._store.clock, timeout, lambda verb: self._aapply(verb, name, number)
        )

    def waiting(self, key: str) -> int:
        """How many callers wait in `acquire` for a key here."""
        return self._queues.length(key_of(key))

    async def _aapply(self, verb: Verb, key: object, cost: object, request_id: object = None) -> Decision:
        return await self._store.aapply(verb, [self._ask(key, cost)], self._low, None, id_of(request_id))

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


class UnpinnedLimiter(Limiter):
    """A limiter for one of any number of limits: nothing stays in the store once its keys are full again."""

    _pin = False
