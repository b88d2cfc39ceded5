"""`limits` on headgate's stores: its strategies, and with them slowapi and flask-limiter, as they are.

    import headgate.edges.limits_storage                                            # which registers the schemes
    storage = limits.storage.storage_from_string("headgate+redis://localhost")
    limiter = limits.strategies.FixedWindowRateLimiter(storage)

`headgate+` goes before the URL of any store that headgate knows, and `async+headgate+` makes the storage for
`limits.aio`. `limits` passes a storage only part of a limit, but writes all of it at the end of each key
("LIMITER/agent-7/10/1/minute"), so it is read from there.

A fixed window is counted with sliding ones. Its first hit, in one step, sets a marker, which leaves exactly one window
later and ends the fixed window, and counts in an empty counter. There are three counters, which take turns; the
marker's cost says whose turn it is. A counter keeps its hits for two windows: a caller that has read the marker, and
counts a moment after the window's end, still finds the hits of that window. By its next turn the counter is empty.
"""

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import lru_cache, wraps
from typing import Any, ClassVar, Final, NamedTuple, ParamSpec, TypeAlias, TypeVar

from headgate.errors import HeadgateError, StoreError, refuse
from headgate.flow import Flow, TwinCall, adrive, call_method, call_twin, drive
from headgate.limits.clock import Clock
from headgate.limits.decision import Decision
from headgate.limits.numbers import Number
from headgate.limits.sliding_window import SlidingWindow
from headgate.stores.base import Ask, ResettableStore, Store, Verb
from headgate.stores.schemes import SCHEMES
from headgate.stores.urls import (
    aclose_store,
    averify_store,
    close_store,
    is_memory,
    open_store,
    verify_store,
)

try:
    import limits.aio.storage.base
    import limits.limits
    import limits.storage.base
except ImportError as error:
    raise HeadgateError(f"headgate.edges.limits_storage: expected limits, got: {error}; pip install limits") from error

_KEY: Final = re.compile(r".*/([0-9]+)/([0-9]+)/([^/]+)", re.DOTALL)  # as RateLimitItem.key_for ends it

_TURNS: Final = (1, 2, 3)
_MARKED: Final = 6  # the capacity of a marker's window: a turn costs 3 + its number, so that two don't fit
_TRIES: Final = 10  # where others may come between two steps
_FIXED, _MOVING, _SLIDING = "fixed", "moving", "sliding"

P = ParamSpec("P")
Result = TypeVar("Result")


class _Rules(NamedTuple):
    """One limit of `limits`, as headgate counts it."""

    log: SlidingWindow
    """Every hit on its own: the moving window, and the sliding one."""
    marker: SlidingWindow
    """Whether a fixed window is open, and whose turn it is."""
    counter: SlidingWindow
    """The hits of one turn."""


@lru_cache(maxsize=1000)
def _rules(amount: int, expiry: Number) -> _Rules:
    most = max(amount, 1)  # with an amount of 0 nothing passes: `_take` and `incr` see to it
    return _Rules(SlidingWindow(most, expiry), SlidingWindow(_MARKED, expiry), SlidingWindow(most, 2 * expiry))


_Flow: TypeAlias = Flow[TwinCall, Result]
"""Yields calls of the store, and is sent their results."""


def _carried_out(flow: Callable[P, _Flow[object]]) -> Callable[P, Any]:
    """A method of `limits` that is written as a flow. Its result is that of the flow; an awaitable in an event loop."""

    @wraps(flow)
    def method(*args: P.args, **kwargs: P.kwargs) -> object:
        storage: Any = args[0]
        return storage._run(flow(*args, **kwargs))

    return method


class _StorageFlows(ABC):
    """Both storages: the flows, and the methods of `limits` that are made of them."""

    def __init__(
        self, uri: str, wrap_exceptions: bool = False, *, key_prefix: str = "headgate-limits", **options: Any
    ) -> None:
        super().__init__(uri, wrap_exceptions=wrap_exceptions)  # type: ignore[call-arg]  # of the storage of `limits`
        url = re.sub(r"^(async\+)?headgate\+", "", uri, flags=re.IGNORECASE)
        known = ("clock", "max_keys") if is_memory(url) else ("clock", "on_failure", "timeout")
        for option in options:
            if option not in known:
                refuse(
                    f"{type(self).__name__} options",
                    f"some of key_prefix, wrap_exceptions, {', '.join(known)} (options of redis-py go into "
                    "the URL, after a question mark)",
                    option,
                )
        self._store = open_store(type(self).__name__, url, prefix=f"{key_prefix}:", **options)

    @property
    def base_exceptions(self) -> type[Exception]:
        return StoreError

    @property
    def store(self) -> Store:
        """The store that counts."""
        return self._store

    @property
    def clock(self) -> Clock:
        return self._store.clock

    def _limit(self, key: str, expiry: Number | None = None) -> tuple[int, Number]:
        """The amount and the seconds of a limit, from the end of its key."""
        found = _KEY.fullmatch(key)
        unit = None if found is None else limits.limits.GRANULARITIES.get(found[3])
        if found is None or unit is None:
            refuse(
                "storage key",
                "one that RateLimitItem.key_for has made, which ends in amount, multiples and unit (/10/1/minute)",
                key,
            )
        seconds = unit.GRANULARITY.seconds * int(found[2])
        if expiry is not None and expiry != seconds:
            refuse("storage expiry", f"the {seconds} seconds that its key says", expiry)
        return int(found[1]), seconds

    @abstractmethod
    def _run(self, flow: _Flow[object]) -> Any:
        """Carry out a flow: for threads, or for event loops."""

    def _apply(self, verb: Verb, *asks: Ask) -> TwinCall:
        return TwinCall(self._store.apply, self._store.aapply, (verb, asks, 0))

    def _forget(self, name: str, key: str, rule: SlidingWindow) -> TwinCall:
        return TwinCall(self._store.forget, self._store.aforget, (name, key, rule))

    # Windows that move ------------------------------------------------------------------------------------------------

    def _take(self, name: str, key: str, amount: int, expiry: Number, cost: int) -> _Flow[bool]:
        """Count a hit in a log, if it passes."""
        if _cost(cost) > amount:
            return False
        log = _rules(amount, expiry).log
        return bool((yield self._apply(Verb.CHECK, Ask(name, key, log, cost))))

    def _look(self, name: str, key: str, amount: int, expiry: Number) -> _Flow[tuple[int, float]]:
        """How much a log holds, and in how many seconds the oldest of it leaves."""
        log, cost = _rules(amount, expiry).log, 1
        decision: Decision = yield self._apply(Verb.PEEK, Ask(name, key, log, cost))
        for _ in range(_TRIES):
            if decision.remaining == log.capacity:
                return 0, 0.0
            if cost == decision.remaining + 1:  # then it waits for the oldest
                break
            cost = decision.remaining + 1
            decision = yield self._apply(Verb.PEEK, Ask(name, key, log, cost))
        return log.capacity - decision.remaining, decision.retry_after or 0.0

    def acquire_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> Any:
        return self._run(self._take(_MOVING, key, limit, expiry, amount))

    @_carried_out
    def get_moving_window(self, key: str, limit: int, expiry: int) -> _Flow[tuple[float, int]]:
        used, leaves = yield from self._look(_MOVING, key, limit, expiry)
        return (time.time() + leaves - float(expiry), used) if used else (time.time(), 0)

    def acquire_sliding_window_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> Any:
        return self._run(self._take(_SLIDING, key, limit, expiry, amount))

    @_carried_out
    def get_sliding_window(self, key: str, expiry: int) -> _Flow[tuple[int, float, int, float]]:
        """Nothing in the window before, and all that counts in this one: then the weighted count is the exact one."""
        used, leaves = yield from self._look(_SLIDING, key, *self._limit(key, expiry))
        return 0, 0.0, used, min(leaves, float(expiry) - 1e-6)  # the strategy takes it modulo the window

    # Fixed windows ----------------------------------------------------------------------------------------------------

    def _marked(self, key: str, rules: _Rules) -> _Flow[tuple[int, float]]:
        """Whose turn it is, or 0 if no window is open; and the seconds until it ends."""
        decision: Decision = yield self._apply(Verb.PEEK, Ask(_FIXED, key, rules.marker, 1))
        used = rules.marker.capacity - decision.remaining
        return (used - 3, decision.reset_after) if used else (0, 0.0)

    def _counted(self, key: str, rules: _Rules, turn: int) -> _Flow[int]:
        decision: Decision = yield self._apply(Verb.PEEK, Ask(f"{_FIXED}-{turn}", key, rules.counter, 1))
        return rules.counter.capacity - decision.remaining

    @_carried_out
    def incr(self, key: str, expiry: Number, amount: int = 1) -> _Flow[int]:
        """Count hits in the fixed window, and return how many it holds.

        Hits above the limit aren't counted, but returned as if they were: so a strategy knows that they are denied.
        """
        most, seconds = self._limit(key, expiry)
        cost, rules, before = _cost(amount), _rules(most, seconds), 0
        for _ in range(_TRIES):
            began = self.clock.now()
            turn, _ = yield from self._marked(key, rules)
            if cost > most:
                return cost + ((yield from self._counted(key, rules, turn)) if turn else 0)
            if turn:
                ask = Ask(f"{_FIXED}-{turn}", key, rules.counter, cost)
                decision: Decision = yield self._apply(Verb.CHECK, ask)
                used = rules.counter.capacity - decision.remaining
                if not decision:
                    return used + cost
                if self.clock.now() - began < seconds * 1_000_000:
                    return used
                yield self._apply(Verb.REFUND, ask)  # delayed by a whole window: it may be the wrong one
            else:
                turn, before = yield from self._free(key, rules)
                ask = Ask(f"{_FIXED}-{turn}", key, rules.counter, cost)
                if (yield self._apply(Verb.CHECK, Ask(_FIXED, key, rules.marker, 3 + turn), ask)):
                    return before + cost
        return max(before + cost, most + 1)

    def _free(self, key: str, rules: _Rules) -> _Flow[tuple[int, int]]:
        """A turn whose counter is empty; or the emptiest, if late callers have counted in each."""
        counts = []
        for turn in _TURNS:
            counts.append(((yield from self._counted(key, rules, turn)), turn))
            if counts[-1][0] == 0:
                break
        used, turn = min(counts)
        return turn, used

    @_carried_out
    def get(self, key: str) -> _Flow[int]:
        rules = _rules(*self._limit(key))
        turn, _ = yield from self._marked(key, rules)
        return (yield from self._counted(key, rules, turn)) if turn else 0

    @_carried_out
    def get_expiry(self, key: str) -> _Flow[float]:
        """When the fixed window ends, as seconds since the epoch; now, if there is none."""
        _, left = yield from self._marked(key, _rules(*self._limit(key)))
        return time.time() + left

    # Resets -----------------------------------------------------------------------------------------------------------

    @_carried_out
    def clear(self, key: str) -> _Flow[None]:
        """The marker last: a caller that counts meanwhile counts in the window that ends with it."""
        rules = _rules(*self._limit(key))
        yield self._forget(_MOVING, key, rules.log)
        for turn in _TURNS:
            yield self._forget(f"{_FIXED}-{turn}", key, rules.counter)
        yield self._forget(_FIXED, key, rules.marker)

    @_carried_out
    def clear_sliding_window(self, key: str, expiry: int) -> _Flow[None]:
        yield self._forget(_SLIDING, key, _rules(*self._limit(key, expiry)).log)

    def _keys_of(self, dropped: Mapping[str, int]) -> int:
        """How many keys of `limits` were dropped: a marker is one, the counters beside it are not."""
        return sum([dropped.get(name, 0) for name in (_FIXED, _MOVING, _SLIDING)])


def _cost(cost: object) -> int:
    if not isinstance(cost, int) or cost < 0:
        refuse("cost", "a whole number, 0 or more", cost)
    return cost


class HeadgateStorage(
    _StorageFlows,
    limits.storage.base.Storage,
    limits.storage.base.MovingWindowSupport,
    limits.storage.base.SlidingWindowCounterSupport,
):
    """A storage of `limits` that counts in a store of headgate, for threads; `AsyncHeadgateStorage` is for event loops.

    What the strategies mean on it:

    - Fixed window: it begins with the first hit that passes and ends its length later, for all hits at once. From any
      number of threads and machines exactly the limit passes. A hit that is denied counts nothing.
    - Moving window: headgate's `SlidingWindow`, exact to the microsecond.
    - Sliding window counter: the same. It is exact: nothing is estimated from the window before.
    - Several limits are hit one after the other, as always with `limits`: those that passed stay counted when a later
      one denies. `headgate.Limiter("5/second; 100/hour")` checks all at once.

    The clock is the store's, so with Redis the server's. Every key expires with its counts; a limit is at most
    1,000,000. While the server is away this process counts in memory, or does as `on_failure` says; nothing is raised.

    Options: `key_prefix` of the keys in a server, `wrap_exceptions`, and those of the store: `timeout` and
    `on_failure`, or in memory `max_keys`; `clock` for tests.

    >>> from limits import parse
    >>> from limits.storage import storage_from_string
    >>> from limits.strategies import FixedWindowRateLimiter
    >>> limiter = FixedWindowRateLimiter(storage_from_string("headgate+memory://"))
    >>> [limiter.hit(parse("2/minute"), "agent-7") for _ in range(3)]
    [True, True, False]
    """

    STORAGE_SCHEME: ClassVar[list[str]] = [f"headgate+{store}" for store in SCHEMES]  # type: ignore[misc]

    def _run(self, flow: _Flow[object]) -> Any:
        return drive(flow, call_method)

    def check(self) -> bool:
        """Whether the store can be used."""
        try:
            verify_store(self._store)
        except StoreError:
            return False
        return True

    def reset(self) -> int:
        """Drop everything, and say how many keys that were. In a server this looks at every key that it has."""
        return self._keys_of(self._store.reset()) if isinstance(self._store, ResettableStore) else 0

    def close(self) -> None:
        """Close the connections."""
        close_store(self._store)


class AsyncHeadgateStorage(
    _StorageFlows,
    limits.aio.storage.base.Storage,
    limits.aio.storage.base.MovingWindowSupport,
    limits.aio.storage.base.SlidingWindowCounterSupport,
):
    """`HeadgateStorage` for the strategies of `limits.aio`, which mean the same on it."""

    STORAGE_SCHEME: ClassVar[list[str]] = [f"async+headgate+{store}" for store in SCHEMES]  # type: ignore[misc]

    def _run(self, flow: _Flow[object]) -> Any:
        return adrive(flow, call_twin)

    async def check(self) -> bool:
        try:
            await averify_store(self._store)
        except StoreError:
            return False
        return True

    async def reset(self) -> int:
        return self._keys_of(await self._store.areset()) if isinstance(self._store, ResettableStore) else 0

    async def aclose(self) -> None:
        """Close the connections."""
        await aclose_store(self._store)
