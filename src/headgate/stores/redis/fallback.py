"""When the server is away: who waits for it, and who decides instead."""

import threading
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from math import ceil
from typing import Final

from headgate.errors import InvalidInput, StoreAway, refuse
from headgate.limits.decision import ALLOW, DENY, Decision, Details, Limit, Rule
from headgate.limits.numbers import LARGEST, whole
from headgate.limits.sliding_window import SlidingWindow
from headgate.limits.token_bucket import TokenBucket
from headgate.stores.base import ON_FAILURE, Ask, Offence, Verb
from headgate.stores.memory import MemoryStore

_PAUSE: Final = 0.4  # seconds from a failure until one request tries again
_CLOSED: Final = 1_000_000  # microseconds: the wait that is told while nothing passes
_MOST_KNOWN: Final = 1000  # limits whose shares are kept, so that nobody fills this process with them


class Breaker:
    """Keeps requests from waiting for a server that is away: one at a time tries, the others are told at once.

    After a connection was lost the next request may try right away, once: it may have been that connection alone.
    """

    def __init__(self, tell: Callable[[bool, str], None]) -> None:
        self._tell: Final = tell
        self._lock = threading.Lock()
        self._telling = threading.RLock()
        self._told = False
        self._failures = 0
        self._next_try = 0.0
        self.reason = ""

    @property
    def down(self) -> bool:
        return self._failures > 0

    def enter(self) -> None:
        """Ask whether a request may be sent; raises `StoreAway` if not."""
        if self._failures == 0:
            return
        with self._lock:
            now = time.monotonic()
            if now < self._next_try:
                raise StoreAway(self.reason)
            self._next_try = now + _PAUSE

    def forked(self) -> None:
        """In a process that was forked: nobody holds the locks."""
        self._lock, self._telling = threading.Lock(), threading.RLock()

    def failed(self, reason: str, *, again_at_once: bool) -> None:
        with self._lock:
            self._failures += 1
            first = self._failures == 1
            self._next_try = time.monotonic() + (0.0 if again_at_once and first else _PAUSE)
            self.reason = reason
        self._announce()

    def worked(self) -> None:
        if self._failures:
            with self._lock:
                self._failures = 0
            self._announce()

    def _announce(self) -> None:
        """Tell how it is now, if that isn't what was told last."""
        with self._telling:
            if self._told != self.down:
                self._told = self.down
                self._tell(self._told, self.reason if self._told else "the store is back")


class Fallback:
    """Decides while the server is away: everything passes, nothing does, or this process's memory judges.

    In memory each node judges by its share of every limit: a limit divided by the number of nodes, but at least 1.
    """

    def __init__(self, on_failure: object, nodes: object, memory: MemoryStore) -> None:
        if on_failure not in ON_FAILURE:
            refuse("RedisStore on_failure", f"one of {', '.join(ON_FAILURE)}", on_failure)
        self._choice: Final = on_failure
        self._nodes: Final = whole("RedisStore nodes", nodes)
        self._known: Final[dict[tuple[str, Limit], list[tuple[str, Limit]]]] = {}
        self.memory: Final = memory

    def apply(self, verb: Verb, asks: Sequence[Ask], low: int, offence: Offence | None, request_id: str) -> Decision:
        limit = asks[0].limit.parts[0]
        if self._choice == "open":
            return Decision(ALLOW, limit, limit.capacity, 0, 0, -1, Details(0, None, None, True))
        if self._choice == "closed":
            return Decision(DENY, limit, 0, _CLOSED, 0, -1, Details(_CLOSED, None, None, True))
        if self._nodes == 1:
            decision = self.memory.apply(verb, asks, low, offence, request_id)
            return decision.as_degraded(decision.limit)
        of_parts = [
            Ask(name, ask.key, share, ask.cost) for ask in asks for name, share in self._shares(ask.name, ask.limit)
        ]
        return _of_asks(self.memory.apply(verb, of_parts, low, offence, request_id), asks)

    def forget(self, name: str, key: str, rule: Rule) -> None:
        """Drop what is counted here for a key."""
        for known_as, counted in self._counted(name, rule):
            self.memory.forget(known_as, key, counted)

    def clear(self, name: str, rule: Rule) -> None:
        """Drop what is counted here for every key under a name and a rule."""
        for known_as, counted in self._counted(name, rule):
            self.memory.clear(known_as, counted)

    def _counted(self, name: str, rule: Rule) -> Sequence[tuple[str, Rule]]:
        """What is counted here of a rule, and under which names."""
        if self._nodes == 1 or not isinstance(rule, Limit):
            return [(name, rule)]
        return self._shares(name, rule)

    def _shares(self, name: str, limit: Limit) -> list[tuple[str, Limit]]:
        """The share of each part of a limit, under a name that tells equal shares of different limits apart."""
        found = self._known.get((name, limit))
        if found is None:
            if len(self._known) > _MOST_KNOWN:
                self._known.clear()
            parts = enumerate(limit.parts, 1)
            found = [(f"{limit}#{number}:{name}", _share(part, self._nodes)) for number, part in parts]
            self._known[name, limit] = found
        return found


def _of_asks(decision: Decision, asks: Sequence[Ask]) -> Decision:
    """The decision on the shares of all parts of some asks, as one on the asks themselves."""
    parts = [(place, part) for place, ask in enumerate(asks) for part in ask.limit.parts]
    place, part = parts[decision.bound or 0]
    bound = decision._bound if len(asks) == 1 else place
    details = Details(decision.own_wait(), decision.violation, decision.would_be, True)
    return Decision(decision.outcome, part, decision.remaining, decision._retry, decision._reset, bound, details)


def _share(limit: Limit, nodes: int) -> Limit:
    """What one of so many nodes may let pass of a limit without parts."""
    if isinstance(limit, TokenBucket):
        capacity, refill, per = limit.fields()
        try:
            return TokenBucket(max(capacity // nodes, 1), refill, per * nodes)
        except InvalidInput:  # below one token some can't be counted; one in whole microseconds, rounded up, always can
            span = min(ceil(per * nodes / refill * 1_000_000), LARGEST)
            return TokenBucket(1, 1, Fraction(span, 1_000_000))
    if isinstance(limit, SlidingWindow):
        most, span = limit.counted()
        return SlidingWindow(max(most // nodes, 1), Fraction(span, 1_000_000))
    return limit
