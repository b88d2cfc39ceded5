"""The sliding window: an exact log of costs and their times."""

from array import array
from bisect import bisect_left, bisect_right
from fractions import Fraction
from typing import Final, SupportsIndex

from headgate._native import i64, mypyc_attr
from headgate.errors import refuse
from headgate.limits.decision import NEVER, Decision, Limit, State, decide_one
from headgate.limits.numbers import LARGEST, Number, decimal_text, positive, rate_text, whole

MAX_WINDOW_LIMIT: Final = 1_000_000
"""The largest `SlidingWindow`: it keeps 16 bytes for each request in the window."""


@mypyc_attr(acyclic=True)
class WindowLog:
    """Requests in the order of their times: the time of each, and the sum of all costs up to it.

    Entries before `first` have been dropped, though their place may still be there; `gone` is the sum up to them.

    Whatever the garbage collector tracks is made before the log is changed: making it may run a finalizer that checks
    the same key. A signal's handler may interrupt it after any call: then the last sums may belong to no time, and
    count nothing. What must not be torn apart is written without a call in between.
    """

    __slots__ = ("first", "gone", "sums", "times")

    def __init__(self) -> None:
        self.times: array[int] = array("q")
        self.sums: array[int] = array("q")
        self.first: i64 = 0
        self.gone: i64 = 0

    def used(self) -> i64:
        """The costs of all entries."""
        count: i64 = len(self.times)
        return i64(self.sums[count - 1]) - self.gone if count else 0

    def used_after(self, moment: i64) -> i64:
        """The costs of the entries after a moment."""
        first = self.first_after(moment)
        used = self.used()
        return used if first == self.first else used + self.gone - i64(self.sums[first - 1])

    def first_after(self, moment: i64) -> i64:
        """The index of the first entry after a moment."""
        return bisect_right(self.times, moment, self.first)

    def drop_until(self, moment: i64) -> None:
        """Drop the entries up to a moment."""
        first = self.first_after(moment)
        if first == self.first:
            return
        self.gone = self.sums[first - 1]
        self.first = first
        if first * 2 >= len(self.times):  # so each entry is moved once at most on average
            dropped = slice(first)
            if self.first == first:  # unless a finalizer has done it
                del self.times[dropped]
                del self.sums[dropped]
                self.first = 0
                if not self.times:
                    self.gone = 0

    def add(self, now: i64, cost: i64) -> None:
        """Add a request. One at the time of the newest, or before it by a clock that stepped back, joins that entry."""
        count: i64 = len(self.times)
        total = i64(self.sums[count - 1]) + cost if count else cost
        if count and self.times[-1] >= now:
            self.sums[count - 1] = total
            return
        if len(self.sums) > count:
            self.sums[count] = total
        else:
            self.sums.append(total)
        self.times.append(now)

    def give_back(self, moment: i64, cost: i64) -> None:
        """Take a cost out of the entry of a moment, if that is still there. All sums from there on shrink by it."""
        place: i64 = bisect_left(self.times, moment, self.first)
        if place == len(self.times) or self.times[place] != moment:
            return
        before = i64(self.sums[place - 1]) if place > self.first else self.gone
        given = min(cost, i64(self.sums[place]) - before)
        for i in range(place, len(self.sums)):
            self.sums[i] -= given
        if self.sums[place] == before:
            del self.times[place]
            del self.sums[place]
        if len(self.times) == self.first:  # nothing is left: begin anew, without the places of those that were dropped
            self.first = 0
            self.gone = 0
            while self.times:
                self.times.pop()
                self.sums.pop()


class SlidingWindow(Limit):
    """At most `limit` in any span of `window` seconds: a request stops counting exactly `window` after it was made.

    >>> print(SlidingWindow(limit=100, window=60))
    100/minute sliding
    """

    __slots__ = ("_hash", "_limit", "_span", "_window")

    def __init__(self, limit: SupportsIndex, window: Number) -> None:
        self._limit: Final[i64] = whole("SlidingWindow limit", limit, MAX_WINDOW_LIMIT)
        self._window: Final = positive("SlidingWindow window", window)
        span = self._window * 1_000_000
        if span.denominator != 1 or span > LARGEST:
            refuse("SlidingWindow window", f"whole microseconds, up to {LARGEST} of them", window)
        self._span: Final[i64] = span.numerator
        self._hash: Final = hash(self._fields())

    @property
    def capacity(self) -> int:
        return self._limit

    @property
    def window(self) -> float:
        """The length of the window in seconds."""
        return float(self._window)

    @property
    def uninterrupted(self) -> bool:
        return False

    def integers(self) -> tuple[int, int]:
        """The limit, and the window in microseconds."""
        return self._limit, self._span

    def decide_counts(self, used: i64, frees: i64, newest: i64, now: i64, cost: i64, low: i64) -> Decision:
        """The decision from the counts of another log: its used cost, the wait until `cost` passes, its newest time."""
        wait: i64 = 0
        if cost > self._limit:
            wait = NEVER
        elif used + cost > self._limit:
            wait = frees
        left = self._limit - used
        reset = max(newest + self._span - now, 0) if used else i64(0)
        return decide_one(self, wait, left, (left - cost) * 1000 < self._limit * low, reset)

    def fresh(self, now: i64) -> State:
        return WindowLog()

    def wait(self, state: State, now: i64, cost: i64) -> i64:
        assert isinstance(state, WindowLog)
        state.drop_until(now - self._span)
        if cost > self._limit:
            return NEVER
        excess = state.used() + cost - self._limit
        if excess <= 0:
            return 0
        last = bisect_left(state.sums, state.gone + excess, state.first)  # the last entry that has to leave
        return i64(state.times[last]) + self._span - now

    def spend(self, state: State, now: i64, cost: i64) -> None:
        assert isinstance(state, WindowLog)
        # Not `min`: in plain Python its call allocates, and a finalizer's check could pass before this one is written.
        room = LARGEST - state.used()
        taken = cost if cost < room else room  # noqa: FURB136
        if taken > 0:
            state.add(now, taken)

    def countable(self, state: State, cost: i64) -> bool:
        assert isinstance(state, WindowLog)
        return cost <= LARGEST - state.used()

    def refund(self, state: State, cost: i64) -> None:
        assert isinstance(state, WindowLog)
        empty = WindowLog()
        used = state.used()
        if cost >= used:
            state.times = empty.times
            state.sums = empty.sums
            state.first = 0
            state.gone = 0
        else:  # the newest are given back first
            total = state.gone + used - cost
            last = bisect_left(state.sums, total, state.first)
            while len(state.times) > last + 1:
                state.times.pop()
                state.sums.pop()
            state.sums[last] = total

    def mark(self, state: State) -> tuple[i64, i64]:
        assert isinstance(state, WindowLog)
        newest: i64 = state.times[-1] if state.times else 0
        return newest, 0

    def correct(self, state: State, now: i64, held: i64, actual: i64, mark: i64, serial: i64) -> None:
        assert isinstance(state, WindowLog)
        if actual > held:
            self.spend(state, now, actual - held)
        elif actual < held:
            state.give_back(mark, held - actual)

    def idle(self, state: State, now: i64) -> bool:
        assert isinstance(state, WindowLog)
        return not state.times or i64(state.times[-1]) + self._span <= now

    def decide(self, state: State, now: i64, cost: i64, wait: i64, low: i64) -> Decision:
        assert isinstance(state, WindowLog)
        left = self._limit - state.used()
        scarce = (left - cost) * 1000 < self._limit * low
        reset = i64(state.times[-1]) + self._span - now if state.times else i64(0)
        return decide_one(self, wait, left, scarce, reset)

    def __hash__(self) -> int:
        return self._hash

    def _fields(self) -> tuple[int, Fraction]:
        return self._limit, self._window

    def __repr__(self) -> str:
        return f"SlidingWindow(limit={self._limit}, window={decimal_text(self._window)})"

    def __str__(self) -> str:
        return f"{rate_text(Fraction(self._limit), self._window)} sliding"
