"""Decisions while the server is away: a circuit breaker, and a fallback that decides instead."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from fractions import Fraction
from math import ceil
from typing import Final

import redis

from headgate.errors import HoldError, InvalidInput, StoreAway, refuse
from headgate.lifecycle import new_lock
from headgate.limits.budget import Budget
from headgate.limits.decision import ALLOW, DENY, Decision, Details, Limit, Rule
from headgate.limits.fixed import BLOCKED
from headgate.limits.numbers import LARGEST, whole
from headgate.limits.sliding_window import SlidingWindow
from headgate.limits.slots import Slots
from headgate.limits.token_bucket import TokenBucket
from headgate.stores.asks import pieces_of
from headgate.stores.base import ON_FAILURE, Ask, Offence, Verb, WindowCount
from headgate.stores.holds import DENIED, OPEN, HoldAnswer, HoldTerms
from headgate.stores.memory import MemoryStore
from headgate.stores.redis.server_errors import describe_error
from headgate.stores.windows import MemoryWindows

_PAUSE: Final = 0.4  # seconds from a failure until one request tries again
_CLOSED: Final = 1_000_000  # microseconds: the wait of a denial while nothing passes
_MAX_SHARES: Final = 1000  # limits whose shares are kept, so that nobody fills this process with them


class CircuitBreaker:
    """Keeps requests from waiting for a server that is away: one at a time tries, the others fail at once.

    After a lost connection the next request may try right away, once: perhaps only that connection was lost.
    """

    def __init__(self, on_change: Callable[[bool, str], None]) -> None:
        self._on_change: Final = on_change
        self._lock: Final = new_lock()
        self._notify_lock: Final = new_lock()
        self._notified = False
        self._failures = 0
        self._next_try = 0.0
        self.reason = ""

    @property
    def down(self) -> bool:
        return self._failures > 0

    def allow(self) -> None:
        """Let a request be sent, or raise `StoreAway`."""
        if self._failures == 0:
            return
        with self._lock:
            now = time.monotonic()
            if now < self._next_try:
                raise StoreAway(self.reason)
            self._next_try = now + _PAUSE

    def record_failure(self, error: BaseException) -> str:
        """Take note of an error of the server, or on the way to it; what it says."""
        reason = describe_error(error)
        with self._lock:
            self._failures += 1
            at_once = self._failures == 1 and isinstance(error, redis.ConnectionError)
            self._next_try = time.monotonic() + (0.0 if at_once else _PAUSE)
            self.reason = reason
        self._notify()
        return reason

    def record_success(self) -> None:
        if self._failures:
            with self._lock:
                self._failures = 0
            self._notify()

    def _notify(self) -> None:
        """Report whether the server is away, if that has changed since the last report."""
        with self._notify_lock:
            if self._notified != self.down:
                self._notified = self.down
                self._on_change(self._notified, self.reason if self._notified else "the store is back")


class Fallback:
    """Decides while the server is away: everything passes, nothing does, or this process's memory decides.

    What is blocked never passes.

    In memory each node enforces its share of every limit: a limit divided by the number of nodes, but at least 1.
    """

    def __init__(self, on_failure: object, nodes: object, memory: MemoryStore, option: str = "on_failure") -> None:
        if on_failure not in ON_FAILURE:
            refuse(f"RedisStore {option}", f"one of {', '.join(ON_FAILURE)}", on_failure)
        self._on_failure: Final = on_failure
        self._nodes: Final = whole("RedisStore nodes", nodes)
        self._shares_of: Final[dict[tuple[str, Limit], list[tuple[str, Limit]]]] = {}
        self.memory: Final = memory

    @property
    def closed(self) -> bool:
        """Whether nothing passes."""
        return self._on_failure == "closed"

    def windows(self) -> "FallbackWindows":
        """Sliding windows whose limit comes with each call. Each object that is made here counts for itself."""
        return FallbackWindows(self._on_failure, self._nodes, self.memory.windows())

    def apply(self, verb: Verb, asks: Sequence[Ask], low: int, offence: Offence | None, request_id: str) -> Decision:
        if self._on_failure == "open" and BLOCKED not in [part for ask in asks for part in ask.limit.parts]:
            return degraded_allow(asks)
        if self._on_failure == "closed":
            return degraded_deny(asks)
        if self._nodes == 1:
            decision = self.memory.apply(verb, asks, low, offence, request_id)
            return decision.as_degraded(decision.limit)
        return _on_asks(self.memory.apply(verb, self._of_parts(asks), low, offence, request_id), asks)

    def _of_parts(self, asks: Sequence[Ask]) -> list[Ask]:
        """The share of this node in each part of some asks."""
        return [
            Ask(name, ask.key, share, ask.cost, ask.root)
            for ask in asks
            for name, share in self._shares(ask.name, ask.limit)
        ]

    def hold(self, asks: Sequence[Ask], low: int, terms: HoldTerms) -> HoldAnswer:
        """The answer to a hold. Memory remembers what it has granted, so that slots are taken here."""
        costs = tuple([ask.cost for ask in asks])
        if self._on_failure != "local":
            decision = self.apply(Verb.PEEK, asks, low, None, "")
            return (
                HoldAnswer(decision, OPEN, costs, terms.lease) if decision else HoldAnswer(decision, DENIED, costs, 0)
            )
        if self._nodes == 1:
            answer = self.memory.hold(asks, low, terms)
            return answer.with_decision(answer.decision.as_degraded(answer.decision.limit), ())
        answer = self.memory.hold(self._of_parts(asks), low, terms)
        return HoldAnswer(_on_asks(answer.decision, asks), answer.state, costs, answer.left)

    def settle(self, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, *, cancel: bool) -> None:
        """Settle a hold in memory, too, if it was granted there."""
        if self._on_failure == "local":
            with suppress(HoldError):
                self.memory.settle(*self._in_memory(asks, costs, low, hold_id), cancel=cancel)

    def extend(
        self, asks: Sequence[Ask], low: int, hold_id: str, costs: Sequence[int] | None, lease: int | None
    ) -> Decision:
        """The decision on more costs for a hold, in all, or on a longer lease, which always passes."""
        if self._on_failure == "closed" and costs is not None:
            return degraded_deny(asks)
        if self._on_failure != "local":
            return degraded_allow(asks)
        try:
            decision = self.memory.extend(*self._in_memory(asks, costs, low, hold_id), lease).decision
        except HoldError:  # the server alone knows that it is open
            more = [max(cost - ask.cost, 0) for ask, cost in zip(asks, costs or (), strict=False)]
            return self._check_more(asks, low, more)
        return decision.as_degraded(decision.limit) if self._nodes == 1 else _on_asks(decision, asks)

    def _check_more(self, asks: Sequence[Ask], low: int, more: Sequence[int]) -> Decision:
        """The decision on more costs for a hold that isn't counted here. It has its slot."""
        asked = [ask.with_cost(cost) for ask, cost in zip(asks, more, strict=False)]
        counted = pieces_of(asked) if self._nodes == 1 else self._of_parts(asked)
        counted = [ask for ask in counted if not ask.limit.counts_slots]
        passed = not any(more) or not counted or self.memory.apply(Verb.CHECK, counted, low)
        return degraded_allow(asks) if passed else degraded_deny(asks)

    def _in_memory(
        self, asks: Sequence[Ask], costs: Sequence[int] | None, low: int, hold_id: str
    ) -> tuple[Sequence[Ask], int, str, Sequence[int] | None]:
        """The arguments of a verb on a hold as it is counted here."""
        if self._nodes == 1:
            return asks, low, hold_id, costs
        spread = (
            None if costs is None else [cost for ask, cost in zip(asks, costs, strict=True) for _ in ask.limit.parts]
        )
        return self._of_parts(asks), low, hold_id, spread

    def forget(self, name: str, key: str, rule: Rule) -> None:
        """Drop the counts of a key here."""
        for local_name, local_rule in self._local_rules(name, rule):
            self.memory.forget(local_name, key, local_rule)

    def clear(self, name: str, rule: Rule) -> None:
        """Drop the counts of every key under a name and a rule here."""
        for local_name, local_rule in self._local_rules(name, rule):
            self.memory.clear(local_name, local_rule)

    def _local_rules(self, name: str, rule: Rule) -> Sequence[tuple[str, Rule]]:
        """The rules, each under its name, by which a rule is counted here."""
        if self._nodes == 1 or not isinstance(rule, Limit):
            return [(name, rule)]
        return self._shares(name, rule)

    def _shares(self, name: str, limit: Limit) -> list[tuple[str, Limit]]:
        """The share of each part of a limit, under a name that keeps equal shares of different limits apart."""
        found = self._shares_of.get((name, limit))
        if found is None:
            if len(self._shares_of) > _MAX_SHARES:
                self._shares_of.clear()
            parts = enumerate(limit.parts, 1)
            found = [(f"{limit}#{number}:{name}", _share(part, self._nodes)) for number, part in parts]
            self._shares_of[name, limit] = found
        return found


class FallbackWindows:
    """The sliding windows of a `Fallback`: see `WindowCounters`."""

    def __init__(self, on_failure: object, nodes: int, memory: MemoryWindows) -> None:
        self._on_failure: Final = on_failure
        self._nodes: Final = nodes
        self._memory: Final = memory

    async def hit(self, key: str, most: int, span: int) -> WindowCount:
        if self._on_failure == "open":
            return WindowCount(True, 0, most, 0, True)
        if self._on_failure == "closed":
            return WindowCount(False, most, 0, _CLOSED, True)
        share = min(most, max(most // self._nodes, 1))
        return (await self._memory.hit(key, share, span))._replace(degraded=True)

    async def count(self, key: str, most: int, span: int) -> int:
        if self._on_failure != "local":
            return 0 if self._on_failure == "open" else most
        return await self._memory.count(key, most, span)

    async def forget(self, key: str) -> bool:
        return await self._memory.forget(key)


def degraded_allow(asks: Sequence[Ask]) -> Decision:
    """A decision without a server that lets asks pass."""
    limit = asks[0].limit.parts[0]
    return Decision(ALLOW, limit, limit.capacity, 0, 0, -1, Details(0, None, None, True))


def degraded_deny(asks: Sequence[Ask]) -> Decision:
    """A decision without a server that lets nothing pass."""
    return Decision(DENY, asks[0].limit.parts[0], 0, _CLOSED, 0, -1, Details(_CLOSED, None, None, True))


def _on_asks(decision: Decision, asks: Sequence[Ask]) -> Decision:
    """The decision on the shares of all parts of some asks, as one on the asks themselves."""
    parts = [(place, part) for place, ask in enumerate(asks) for part in ask.limit.parts]
    place, part = parts[decision.bound or 0]
    found = decision.as_degraded(part)
    return found if len(asks) == 1 else found.at(place)


def _share(limit: Limit, nodes: int) -> Limit:
    """The share of one node in a limit without parts."""
    if isinstance(limit, TokenBucket):
        capacity, refill, per = limit.fields()
        try:
            return TokenBucket(max(capacity // nodes, 1), refill, per * nodes)
        except InvalidInput:  # below one token some can't be counted; one in whole microseconds, rounded up, always can
            span = min(ceil(per * nodes / refill * 1_000_000), LARGEST)
            return TokenBucket(1, 1, Fraction(span, 1_000_000))
    if isinstance(limit, SlidingWindow):
        most, span = limit.integers()
        return SlidingWindow(max(most // nodes, 1), Fraction(span, 1_000_000))
    if isinstance(limit, Slots):
        return Slots(max(limit.capacity // nodes, 1))
    if isinstance(limit, Budget):
        share = Fraction(max(limit.integers()[0] // nodes, 1), 10**limit.decimals)
        return Budget(share, limit.period, unit=limit.unit, zone=limit.zone)
    return limit
