"""Several limits that hold together: all of them pass and are charged, or none is."""

from collections.abc import Iterable
from typing import Final

from headgate._native import i64, mypyc_attr
from headgate.errors import InvalidInput, refuse
from headgate.limits.decision import NEVER, Decision, Limit, State, more_binding


@mypyc_attr(acyclic=True)
class AllOfState:
    """One state for each limit of an `AllOf`."""

    __slots__ = ("states",)

    def __init__(self, states: list[State]) -> None:
        self.states: Final = states


class AllOf(Limit):
    """Several limits at once: all pass and all are charged, or none is.

    >>> from headgate import per_minute, per_second
    >>> print(AllOf([per_second(5), per_minute(100)]))
    5/second; 100/minute
    """

    __slots__ = ("_parts", "_pieces")

    def __init__(self, limits: Iterable[Limit]) -> None:
        parts: list[Limit] = []
        given: Iterable[object] = limits  # unchecked
        for limit in given:
            if not isinstance(limit, Limit):
                refuse("AllOf", "limits", limit)
            for part in limit.parts:
                if part not in parts:
                    parts.append(part)
        if len(parts) < 2:
            refuse("AllOf", "at least two different limits (a single one needs no AllOf)", parts)
        self._parts: Final = tuple(parts)
        shared = [part for part in parts if part.shares_counts]
        if len({part.identity for part in shared}) < len(shared):
            refuse("AllOf", "each budget once, and slots once: usage counts against all their amounts", self)
        self._pieces: Final[tuple[Limit, ...]] = self._parts if shared else (self,)
        costly = [part for part in parts if part.counts_costs]
        for part in costly:
            if part.decimals != costly[0].decimals:
                one, other = [f"'{limit}' with {limit.decimals}" for limit in (costly[0], part)]
                raise InvalidInput(
                    f"AllOf: expected limits whose costs have equally many decimals, got {one} and {other}"
                )

    @property
    def capacity(self) -> int:
        return min([part.capacity for part in self._parts])

    @property
    def parts(self) -> tuple[Limit, ...]:
        return self._parts

    @property
    def pieces(self) -> tuple[Limit, ...]:
        return self._pieces

    @property
    def shares_counts(self) -> bool:
        return any([part.shares_counts for part in self._parts])

    @property
    def decimals(self) -> int:
        return max([part.decimals for part in self._parts if part.counts_costs], default=0)

    @property
    def counts_costs(self) -> bool:
        return any([part.counts_costs for part in self._parts])

    @property
    def counts_slots(self) -> bool:
        return any([part.counts_slots for part in self._parts])

    @property
    def uninterrupted(self) -> bool:
        return all([part.uninterrupted for part in self._parts])

    def fresh(self, now: i64) -> State:
        return AllOfState([part.fresh(now) for part in self._parts])

    # Plain loops: a list, a generator or a zip would be an object that the garbage collector tracks. Making one may let
    # a finalizer or another thread change the states between two parts, or between a wait and its decision.

    def wait(self, state: State, now: i64, cost: i64) -> i64:
        assert isinstance(state, AllOfState)
        longest: i64 = 0
        for i in range(len(self._parts)):
            wait = self._parts[i].wait(state.states[i], now, cost)
            if longest != NEVER and (wait == NEVER or wait > longest):
                longest = wait
        return longest

    def spend(self, state: State, now: i64, cost: i64) -> None:
        assert isinstance(state, AllOfState)
        for i in range(len(self._parts)):
            self._parts[i].spend(state.states[i], now, cost)

    def countable(self, state: State, cost: i64) -> bool:
        assert isinstance(state, AllOfState)
        for i in range(len(self._parts)):  # noqa: SIM110
            if not self._parts[i].countable(state.states[i], cost):
                return False
        return True

    def refund(self, state: State, cost: i64) -> None:
        assert isinstance(state, AllOfState)
        for i in range(len(self._parts)):
            self._parts[i].refund(state.states[i], cost)

    def idle(self, state: State, now: i64) -> bool:
        assert isinstance(state, AllOfState)
        for i in range(len(self._parts)):  # noqa: SIM110
            if not self._parts[i].idle(state.states[i], now):
                return False
        return True

    def decide(self, state: State, now: i64, cost: i64, wait: i64, low: i64) -> Decision:
        assert isinstance(state, AllOfState)
        if wait != 0:
            slowest: i64 = 0  # unless, in plain Python, a finalizer has changed the states meanwhile
            for i in range(len(self._parts)):
                if self._parts[i].wait(state.states[i], now, cost) == wait:
                    slowest = i
                    break
            return self._parts[slowest].decide(state.states[slowest], now, cost, wait, low).at(slowest)
        bound = self._parts[0].decide(state.states[0], now, cost, 0, low).at(0)
        for i in range(1, len(self._parts)):
            bound = more_binding(bound, self._parts[i].decide(state.states[i], now, cost, 0, low), i)
        return bound

    def _fields(self) -> tuple[tuple[Limit, ...]]:
        return (self._parts,)

    def __repr__(self) -> str:
        return f"AllOf({list(self._parts)!r})"

    def __str__(self) -> str:
        return "; ".join([str(part) for part in self._parts])
