"""When the server is away: who waits for it, and who decides instead."""

import threading
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Final

from headgate.core import ALLOW, DENY, Aside, Decision, Limit
from headgate.errors import StoreAway
from headgate.inputs import refuse, whole
from headgate.limits import AllOf, TokenBucket
from headgate.policy import ON_FAILURE
from headgate.stores import Ask, Offence, Verb
from headgate.stores.memory import MemoryStore
from headgate.windows import SlidingWindow

_PAUSE: Final = 0.4  # seconds from a failure until one request tries again
_CLOSED: Final = 1_000_000  # microseconds: the wait that is told while nothing passes


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
        self._shares: Final[dict[Limit, Limit]] = {}
        self.memory: Final = memory

    def apply(self, verb: Verb, asks: Sequence[Ask], low: int, offence: Offence | None, request_id: str) -> Decision:
        limit = asks[0].limit.parts[0]
        if self._choice == "open":
            return Decision(ALLOW, limit, limit.capacity, 0, 0, -1, Aside(0, None, None, True))
        if self._choice == "closed":
            return Decision(DENY, limit, 0, _CLOSED, 0, -1, Aside(_CLOSED, None, None, True))
        shared = [ask._replace(limit=self._share(ask.limit)) for ask in asks]
        decision = self.memory.apply(verb, shared, low, offence, request_id)
        bound = asks[0].limit if len(asks) == 1 else asks[decision.bound or 0].limit
        if decision.limit in bound.parts:
            return decision.adrift(decision.limit)
        parts = self._share(bound).parts
        return decision.adrift(bound.parts[parts.index(decision.limit)])

    def _share(self, limit: Limit) -> Limit:
        if self._nodes == 1:
            return limit
        found = self._shares.get(limit)
        if found is None:
            if len(self._shares) > 1000:
                self._shares.clear()
            found = self._shares[limit] = _share(limit, self._nodes)
        return found


def _share(limit: Limit, nodes: int) -> Limit:
    if isinstance(limit, TokenBucket):
        capacity, refill, per = limit.fields()
        return TokenBucket(max(capacity // nodes, 1), refill, per * nodes)
    if isinstance(limit, SlidingWindow):
        most, span = limit.counted()
        return SlidingWindow(max(most // nodes, 1), Fraction(span, 1_000_000))
    if isinstance(limit, AllOf):
        return AllOf([_share(part, nodes) for part in limit.parts])
    return limit
