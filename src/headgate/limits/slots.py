"""Slots: so many holds at once, each until it is settled or its lease ends."""

from heapq import heappop, heappush
from typing import Final, SupportsIndex

from headgate._native import i64, mypyc_attr
from headgate.limits.decision import Decision, Limit, State, decide_one
from headgate.limits.numbers import whole

MAX_SLOTS: Final = 100_000
"""The largest `Slots`: each that is taken is kept with the end of its lease."""


@mypyc_attr(acyclic=True)
class Leases:
    """The ends of the leases that are under way, in microseconds."""

    __slots__ = ("_counts", "_heap", "_late", "used")

    def __init__(self) -> None:
        self.used: i64 = 0  # leases under way
        self._counts: Final[dict[int, int]] = {}  # leases by their end
        self._heap: list[int] = []  # all these ends, and some of leases that are over
        self._late: list[int] = []  # the same, negated, so that the last end comes first

    # Between a change of `_counts` and that of `used` nothing is called, so that no signal's handler interrupts them.
    # An end is in the heaps before it is counted, and as long as it is.

    def drop_ended(self, now: i64) -> None:
        """Drop the leases that have ended by now."""
        while self._heap and self._heap[0] <= now:
            end = self._heap[0]
            ended = self._counts.get(end, 0)
            if ended > 0:
                del self._counts[end]
                self.used -= ended
            heappop(self._heap)

    def take(self, end: i64) -> None:
        if end not in self._counts:
            if max(len(self._heap), len(self._late)) > 2 * len(self._counts) + 64:
                ends = sorted(self._counts)  # a heap, and so are they negated and reversed
                self._heap = ends
                self._late = [-one for one in reversed(ends)]
            heappush(self._heap, end)
            heappush(self._late, -end)
        before = self._counts.get(end, 0)
        self._counts[end] = before + 1
        self.used += 1

    def free(self, end: i64) -> None:
        """End a lease before its time. One that has ended is gone already."""
        before = self._counts.get(end, 0)
        if before > 1:
            self._counts[end] = before - 1
            self.used -= 1
        elif before == 1:
            del self._counts[end]
            self.used -= 1

    def first(self) -> i64:
        """The first end of a lease that is under way; 0 if there is none."""
        while self._heap and self._heap[0] not in self._counts:
            heappop(self._heap)
        return self._heap[0] if self._heap else 0

    def last(self) -> i64:
        """The last one; 0 if there is none."""
        while self._late and -self._late[0] not in self._counts:
            heappop(self._late)
        return -self._late[0] if self._late else 0

    def after(self, ended: i64) -> i64:
        """The end with which more than so many leases have ended, of those that are under way."""
        if ended == 0:
            return self.first()
        for end in sorted(self._counts):
            ended -= self._counts[end]
            if ended < 0:
                return end
        return 0


class Slots(Limit):
    """At most `count` at once. Only a hold takes a slot: until it is settled, or its lease ends.

    >>> print(Slots(5))
    5 in flight
    """

    __slots__ = ("_count",)

    def __init__(self, count: SupportsIndex) -> None:
        self._count: Final[i64] = whole("Slots count", count, MAX_SLOTS)

    @property
    def capacity(self) -> int:
        return self._count

    @property
    def identity(self) -> object:
        return "slots"

    @property
    def counts_costs(self) -> bool:
        return False

    @property
    def counts_slots(self) -> bool:
        return True

    @property
    def shares_counts(self) -> bool:
        return True

    @property
    def uninterrupted(self) -> bool:
        return False

    def fresh(self, now: i64) -> State:
        return Leases()

    def wait(self, state: State, now: i64, cost: i64) -> i64:
        """The wait is an upper bound: a slot may be free earlier."""
        assert isinstance(state, Leases)
        state.drop_ended(now)
        return 0 if state.used < self._count else state.after(state.used - self._count) - now

    def spend(self, state: State, now: i64, cost: i64) -> None:
        return

    def refund(self, state: State, cost: i64) -> None:
        return

    def take_slot(self, state: State, end: i64) -> None:
        assert isinstance(state, Leases)
        state.take(end)

    def free_slot(self, state: State, end: i64) -> None:
        assert isinstance(state, Leases)
        state.free(end)

    def idle(self, state: State, now: i64) -> bool:
        assert isinstance(state, Leases)
        return state.used == 0 or state.last() <= now

    def decide(self, state: State, now: i64, cost: i64, wait: i64, low: i64) -> Decision:
        assert isinstance(state, Leases)
        return self.decide_counts(state.used, state.last(), wait, now, low)

    def decide_counts(self, used: i64, last: i64, wait: i64, now: i64, low: i64) -> Decision:
        """The decision from the counts of other leases: how many there are, and the last end."""
        left = self._count - used
        reset = last - now if used else i64(0)
        return decide_one(self, wait, left, left * 1000 < self._count * low, reset)

    def _fields(self) -> tuple[int]:
        return (self._count,)

    def __repr__(self) -> str:
        return f"Slots(count={self._count})"

    def __str__(self) -> str:
        return f"{self._count} in flight"
