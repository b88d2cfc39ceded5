"""Holds as the store in memory keeps them: what each has taken, and where that was counted."""

from collections.abc import Sequence
from typing import Final

from headgate._native import i64, mypyc_attr
from headgate.limits.all_of import AllOf, AllOfState
from headgate.limits.decision import Limit, State
from headgate.stores.asks import Ask, pieces_of
from headgate.stores.holds import EXPIRED, MAX_CHARGES, OPEN, HoldState, ListedHold
from headgate.stores.memory_tables import LimitTable


@mypyc_attr(acyclic=True)
class Charge:
    """A cost that was taken under one limit, at one time, and where the limit has counted it."""

    def __init__(self, limit: Limit, cost: i64) -> None:
        self.limit: Final = limit
        self.cost: i64 = cost
        self.mark: i64 = 0
        self.serial: i64 = 0
        # The same of each part, if there are several: first all marks, then all serial numbers.
        self.marks: list[int] | None = [0] * (2 * len(limit.parts)) if isinstance(limit, AllOf) else None

    def prepare(self, state: State) -> bool:
        """Make the state ready for it, and say whether something had to be made."""
        if self.marks is None:
            return self.limit.prepare(state)
        assert isinstance(state, AllOfState)
        made = False
        for i in range(len(state.states)):
            made = self.limit.parts[i].prepare(state.states[i]) or made
        return made

    # Nothing that the garbage collector tracks is made from here on: a finalizer could spend in the middle of a step.

    def take(self, state: State, now: i64) -> None:
        """Spend the cost."""
        self.limit.spend(state, now, self.cost)
        marks = self.marks
        if marks is None:
            self.mark, self.serial = self.limit.mark(state)
            return
        assert isinstance(state, AllOfState)
        count = len(state.states)
        for i in range(count):
            marks[i], marks[count + i] = self.limit.parts[i].mark(state.states[i])

    def correct(self, state: State, now: i64, held: i64, actual: i64) -> None:
        """Count another cost instead."""
        marks = self.marks
        if marks is None:
            self.limit.correct(state, now, held, actual, self.mark, self.serial)
            return
        assert isinstance(state, AllOfState)
        count = len(state.states)
        for i in range(count):
            self.limit.parts[i].correct(state.states[i], now, held, actual, marks[i], marks[count + i])

    def close(self, state: State) -> None:
        """Nothing will be given back to it any more."""
        marks = self.marks
        if marks is None:
            self.limit.close(state, self.mark, self.serial)
            return
        assert isinstance(state, AllOfState)
        count = len(state.states)
        for i in range(count):
            self.limit.parts[i].close(state.states[i], marks[i], marks[count + i])

    def settle(self, state: State, now: i64, held: i64, actual: i64) -> None:
        """Count another cost instead, and give nothing back to it any more."""
        if self.marks is None:
            self.limit.settle(state, now, held, actual, self.mark, self.serial)
            return
        self.correct(state, now, held, actual)
        self.close(state)


@mypyc_attr(acyclic=True)
class HeldPiece(Charge):
    """The cost that a hold has taken under one piece of a limit: at first, and whenever it was extended."""

    def __init__(self, table: LimitTable, key: str, limit: Limit, cost: i64, root: str) -> None:
        super().__init__(limit, cost)
        self.table = table
        self.key: Final = key
        self.root: Final = root
        self.more: list[Charge] | None = None  # the charges of extensions
        # For the verb that is carried out: the state, whether it is in the table, and the wait until a cost passes.
        self.state: State = None
        self.known = False
        self.wait: i64 = 0

    def find(self, limit: Limit, cost: i64, now: i64, ahead: i64) -> None:
        """Find the state of the key, or make one, bring it up to now, and find the wait until a cost passes."""
        self.find_state(limit, now)
        if self.table.calendar:
            limit.align(self.state, ahead)
        self.wait = limit.wait(self.state, now, cost)

    def find_state(self, limit: Limit, now: i64) -> None:
        found = self.table.find(self.key)
        if found is not None:
            self.state = found
            self.known = True
        elif self.known or self.state is None:
            self.state = limit.fresh(now)
            self.known = False

    def keep(self, now: i64) -> None:
        if not self.known:
            self.known = self.table.keep(self.key, self.limit, self.state, now, self.root)

    def leave(self) -> None:
        """Let go of the state, at the end of a verb."""
        self.state = None
        self.known = False

    def add(self, charge: Charge) -> None:
        """Add a charge. Beyond the bound its cost joins the last one, which is older: less may be given back then."""
        more = self.more
        if more is None:
            self.more = [charge]
        elif len(more) < MAX_CHARGES - 1:
            more.append(charge)
        else:
            more[-1].cost += charge.cost

    def remove(self, charge: Charge) -> None:
        """Take back the charge that was added last."""
        more = self.more
        assert more is not None
        if more[-1] is charge:
            more.pop()
        else:
            more[-1].cost -= charge.cost

    def charges(self) -> list[Charge]:
        """All charges, from the first on."""
        return [self, *(self.more or ())]

    def count(self, state: State, now: i64, held: i64, actual: i64) -> None:
        """Count `actual` instead of `held`. The newest charges are given back first."""
        excess = actual - held
        more = self.more
        if more is None or excess > 0:
            self.correct(state, now, 0 if excess > 0 else held, excess if excess > 0 else actual)
            return
        for i in range(len(more), -1, -1):
            charge = self if i == 0 else more[i - 1]
            given = min(charge.cost, -excess)
            charge.correct(state, now, charge.cost, charge.cost - given)
            excess += given

    def close_all(self, state: State) -> None:
        self.close(state)
        if self.more is not None:
            for i in range(len(self.more)):
                self.more[i].close(state)


@mypyc_attr(acyclic=True, free_list_len=1)
class MemoryHold(HeldPiece):
    """One hold, which is also the first of its pieces.

    There may be many that are only remembered: the garbage collector has nothing to look at in those.
    """

    def __init__(self, table: LimitTable, key: str, limit: Limit, cost: i64, root: str, end: i64, keep: i64) -> None:
        super().__init__(table, key, limit, cost, root)
        self.hold_id = ""  # until somebody asks for it
        # The state in which a lone limit has counted it, and `Tables.changes` then.
        self.counted: State = None
        self.changes_then: i64 = -1
        self.end = end  # of its lease, or when it was settled
        self.kept = keep  # microseconds for which it is remembered after its end
        self.status: HoldState = OPEN
        self.release = False
        self.forced = False
        self.released = False
        self.forgotten = False
        self.indexed = False  # found by its key and its id
        self.place: i64 = 0  # in the list of those that are open or have expired
        self.note = ""
        self.shape = ""
        self.rest: list[HeldPiece] | None = None  # the other pieces
        self.costs: tuple[int, ...] | None = None  # of each ask, if they are several: the reserved or settled ones
        self.asks: tuple[Ask, ...] | None = None  # with several asks, or an ask of several pieces

    def all_costs(self) -> tuple[int, ...]:
        """The counted cost of each ask: the reserved or the settled one."""
        return (self.cost,) if self.costs is None else self.costs

    def set_costs(self, costs: tuple[int, ...]) -> None:
        self.costs = costs

    def pieces(self) -> list[HeldPiece]:
        return [self] if self.rest is None else [self, *self.rest]

    def places(self) -> list[int] | None:
        """For each piece the place of its ask; None if each ask is one piece."""
        if self.asks is None:
            return None if self.rest is None else [0] * (1 + len(self.rest))
        if self.rest is not None and len(self.asks) == 1 + len(self.rest):
            return None
        return [place for place, ask in enumerate(self.asks) for _ in range(len(ask.limit.pieces))]

    def is_of(self, asks: Sequence[Ask]) -> bool:
        """Whether the costs of an open hold are those of these asks: another may have had the same id before."""
        if asks is self.asks:
            return True
        if self.asks is None:
            return len(asks) == 1 and asks[0].name == self.table.name and asks[0].key == self.key
        if len(asks) != len(self.asks):
            return False
        return all([one.name == own.name and one.key == own.key for one, own in zip(asks, self.asks, strict=True)])

    def asks_for(self, asks: Sequence[Ask], more: list[int]) -> Sequence[Ask]:
        """The asks, for more: if their limits are others meanwhile, under those with which the hold was made."""
        asked = [asks[i].with_cost(more[i]) for i in range(len(asks))]
        identities = [(one.name, one.key, one.limit.identity) for one in pieces_of(asked)]
        if identities == [(one.table.name, one.key, one.limit.identity) for one in self.pieces()]:
            return asked
        if self.asks is None:
            return [Ask(self.table.name, self.key, self.limit, more[0], self.root)]
        return [self.asks[i].with_cost(more[i]) for i in range(len(more))]

    def let_go(self) -> None:
        """Drop what only an unsettled hold needs."""
        self.costs = self.all_costs()
        self.counted = None
        self.asks = None
        self.rest = None
        self.more = None

    def status_at(self, now: i64) -> HoldState:
        return EXPIRED if self.status == OPEN and self.end <= now else self.status

    def left(self, now: i64) -> i64:
        return max(self.end - now, 0) if self.status == OPEN else 0

    def listed(self, now: i64) -> ListedHold:
        return ListedHold(self.hold_id, self.status_at(now), self.all_costs(), self.left(now), self.note, self.shape)


class HoldList:
    """Holds in any order. Each knows its place."""

    def __init__(self) -> None:
        self._slots: list[MemoryHold | None] = []  # those behind the last hold are free: shrinking costs more
        self._count: i64 = 0

    def __len__(self) -> int:
        return self._count

    def at(self, place: i64) -> MemoryHold | None:
        return self._slots[place] if place < self._count else None

    def add(self, held: MemoryHold) -> None:
        held.place = self._count
        if self._count < len(self._slots):
            self._slots[self._count] = held
        else:
            self._slots.append(held)
        self._count += 1

    def remove(self, held: MemoryHold) -> None:
        """Remove a hold, if it is here: the last one takes its place."""
        if held.place < self._count and self._slots[held.place] is held:
            self._count -= 1
            last = self._slots[self._count]
            self._slots[held.place] = last
            self._slots[self._count] = None
            if last is not None:
                last.place = held.place

    def shrink(self) -> None:
        """Give back the memory of many free places."""
        if len(self._slots) > 2 * self._count + 64:
            del self._slots[self._count + 32 :]

    def all(self) -> list[MemoryHold]:
        return [held for held in self._slots if held is not None]
