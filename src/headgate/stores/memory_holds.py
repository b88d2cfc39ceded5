"""The holds of a store in this process's memory. See `headgate.stores.holds` for what they are.

`headgate.stores.memory_pieces` takes and gives back what they cost.
"""

import heapq
import logging
from collections import deque
from collections.abc import Sequence
from typing import Final

from headgate._native import i64
from headgate.errors import UnknownHold
from headgate.limits.decision import Decision, Limit
from headgate.stores.asks import Ask, pieces_of
from headgate.stores.held import Charge, HeldPiece, HoldList, MemoryHold
from headgate.stores.hold_ids import HOLD_IDS
from headgate.stores.holds import (
    CANCELLED,
    DENIED,
    MAX_OPEN_HOLDS,
    OPEN,
    SETTLED,
    HoldAnswer,
    HoldState,
    HoldTerms,
    ListedHold,
    UsageRow,
    refuse_ended,
    refuse_more_holds,
    refuse_other_costs,
    refuse_other_limits,
)
from headgate.stores.memory_pieces import (
    Demand,
    binding,
    charge_more,
    find_tables,
    free_slots,
    give_back,
    peek,
    refuse_twice,
    same_limits,
    take_slots,
)
from headgate.stores.memory_tables import LATER, Tables

_BETWEEN_SWEEPS: Final[i64] = 64  # new holds from one sweep to the next
_SWEPT: Final[i64] = 4  # holds that are looked at for each new one, whether they can be forgotten

_log = logging.getLogger("headgate")


class KeyHolds:
    """The holds of one key."""

    def __init__(self) -> None:
        self.by_id: Final[dict[str, MemoryHold]] = {}
        self.unsettled: Final[dict[str, MemoryHold]] = {}
        """The holds that are open, or have expired. There may be many others."""
        self.open: i64 = 0
        """How many are open, or more: leases may have ended since they were counted."""

    def open_at(self, now: i64) -> i64:
        """How many are open, exactly."""
        self.open = len([None for held in self.unsettled.values() if held.end > now])
        return self.open


class MemoryHolds:
    """The holds of one store. Every method but those of a lone limit is called with the store's lock.

    A hold is found by its key and its id once somebody knows the id. Until then only its `MemoryHold` is known, and
    when that is settled, nothing has to be remembered.
    """

    def __init__(self, tables: Tables, max_ended: int) -> None:
        self._tables: Final = tables
        self._max_ended: Final = max_ended
        self._by_key: Final[dict[tuple[str, str], KeyHolds]] = {}
        self._unindexed = HoldList()  # open or expired
        self._indexed: Final = HoldList()  # the same, of those that are found by their ids
        self._ended: Final[deque[MemoryHold]] = deque()  # those that were settled and are remembered, in this order
        self._due: Final[list[tuple[int, int, MemoryHold]]] = []  # when their costs may come back
        self._expected = 0  # how many were added to these
        self._until_sweep: i64 = 0
        self._swept: i64 = 0  # the place of the next one that a sweep looks at
        self._warned = False

    @property
    def remembers(self) -> bool:
        """Whether each verb is written to a file."""
        return False

    def __len__(self) -> int:
        """How many holds are open or remembered."""
        return len(self._unindexed) + len(self._indexed) + len(self._ended)

    # A hold of a lone limit, known by its object ----------------------------------------------------------------------

    def hold_one(self, held: MemoryHold, now: i64, low: i64) -> Decision:
        """Take the cost of a new hold, and a slot where these are counted, or deny it. Its table stays."""
        lock = self._tables.lock
        if lock is None:
            return self._hold_one(held, now, low)
        with lock:
            return self._hold_one(held, now, low)

    def _hold_one(self, held: MemoryHold, now: i64, low: i64) -> Decision:
        tables, table, limit = self._tables, held.table, held.limit
        if now >= tables.due:
            tables.release_due(now)
        changes = tables.changes  # before the look: what comes or goes from here on is seen
        state = table.find(held.key)
        if state is None or held.prepare(state) or len(self._unindexed) + len(self._indexed) >= MAX_OPEN_HOLDS:
            return self._hold_new(held, now, low)
        if table.calendar:
            limit.align(state, tables.wall_ahead(now))
        wait = limit.wait(state, now, held.cost)
        if wait != 0:
            held.status = DENIED
            return limit.decide(state, now, held.cost, wait, low)
        held.take(state, now)
        if table.slots:
            limit.take_slot(state, held.end)
        held.counted = state
        held.changes_then = changes
        self._unindexed.add(held)
        decision = limit.decide(state, now, 0, 0, low)
        self._until_sweep -= 1
        if self._until_sweep < 0:
            self._until_sweep = _BETWEEN_SWEEPS
            self._sweep(now, _SWEPT * _BETWEEN_SWEEPS)
            tables.sweep(now)
        return decision

    def _hold_new(self, held: MemoryHold, now: i64, low: i64) -> Decision:
        """The same of a key without a state, or where there are many holds."""
        with self._tables.own_lock:
            if len(self._unindexed) + len(self._indexed) >= MAX_OPEN_HOLDS:
                self._index()
                self._refuse_more(held.table.name, held.key, now, MAX_OPEN_HOLDS)
            demand = Demand(self._tables, [held], [held.limit], [held.cost], None, now, held.end)
            denied = demand.take()
            (decision,) = demand.decide(denied, low)
            if denied:
                held.status = DENIED
            else:
                self._unindexed.add(held)
            held.leave()
            held.table.split()
            self._sweep(now, _SWEPT)
            self._tables.sweep(now)
            return decision

    def settle_one(self, held: MemoryHold, actual: i64, status: HoldState, now: i64, low: i64) -> Decision | None:
        """Settle an open hold whose id nobody knows; None if it isn't, or has been extended: nothing is done then."""
        lock = self._tables.lock
        if lock is None:
            return self._settle_one(held, actual, status, now, low)
        with lock:
            return self._settle_one(held, actual, status, now, low)

    def _settle_one(self, held: MemoryHold, actual: i64, status: HoldState, now: i64, low: i64) -> Decision | None:
        tables, table, limit = self._tables, held.table, held.limit
        if now >= tables.due:
            tables.release_due(now)
        state = held.counted if held.changes_then == tables.changes else table.find(held.key)
        if state is None or held.indexed or held.status != OPEN or held.end <= now or held.forgotten:
            return None
        if table.calendar:
            limit.align(state, tables.wall_ahead(now))
        limit.wait(state, now, 0)
        before, end = held.cost, held.end
        if actual <= before:  # see `settle`
            held.cost = actual
            held.status = status
        held.settle(state, now, before, actual)
        held.cost = actual
        held.status = status
        held.end = now
        if table.slots:
            limit.free_slot(state, end)
        held.counted = None
        self._unindexed.remove(held)
        return limit.decide(state, now, 1, limit.wait(state, now, 1), low)

    def reveal(self, held: MemoryHold) -> str:
        """The id of a hold, by which it can be found from now on."""
        if not held.hold_id:
            hold_id = HOLD_IDS.new()
            if not held.hold_id:  # again: a finalizer may have asked for it
                held.hold_id = hold_id
                if held.status != DENIED and not held.forgotten:
                    self._unindexed.remove(held)
                    self._add(held)
        return held.hold_id

    def _index(self) -> None:
        """Let all holds be found by their keys and ids."""
        unindexed = self._unindexed
        self._unindexed = HoldList()
        for held in unindexed.all():
            hold_id = HOLD_IDS.new()
            if held.status == OPEN and not held.hold_id:  # a finalizer may have settled it, or have asked for its id
                held.hold_id = hold_id
                self._add(held)

    # The verbs -------------------------------------------------------------------------------------------------------

    def hold(self, asks: Sequence[Ask], low: i64, terms: HoldTerms) -> HoldAnswer:
        now = self._begin()
        hold_id = terms.hold_id
        known = self._find(asks[0].name, asks[0].key, hold_id, now)
        costs = tuple([ask.cost for ask in asks])
        if known is not None:
            if known.status == OPEN and known.all_costs() != costs:
                refuse_other_costs(asks, hold_id, known.status_at(now), known.all_costs(), costs)
            return self._answer(known, asks, 0, low, now).as_repeated()
        self._refuse_more(asks[0].name, asks[0].key, now, terms.most)
        held = self._made(asks, costs, terms, now)
        pieces = held.pieces()
        refuse_twice(self._tables, pieces)
        limits = [piece.limit for piece in pieces]
        asked = [max(piece.cost, 1) for piece in pieces]
        size = self._tables.size
        demand = Demand(self._tables, pieces, limits, asked, None, now, held.end)
        denied = demand.take()
        parts = demand.decide(denied, low)
        decision = binding(parts, asks)
        if denied and not terms.forced:
            return HoldAnswer(decision, DENIED, costs, 0, parts)
        if denied:
            demand.force()
        for i in range(len(pieces)):
            pieces[i].leave()
        self._record_hold(held, asks, terms, now)
        self._add(held)
        self._expect_release(held)
        self._sweep(now, _SWEPT)
        self._sweep_tables(pieces, self._tables.size - size, now)
        return HoldAnswer(decision, OPEN, costs, terms.lease, parts)

    def settle(
        self, asks: Sequence[Ask], low: i64, hold_id: str, costs: Sequence[int] | None, cancel: bool
    ) -> HoldAnswer:
        # A signal's handler may interrupt it anywhere, and it may be repeated then. So what costs more is charged
        # before the hold has ended, and what costs less is given back afterwards: too much may stay counted, never too
        # little.
        now = self._begin()
        held = self._known(asks, hold_id, now)
        before = held.all_costs()
        if costs is not None and (len(costs) != len(before) or (held.status == OPEN and not held.is_of(asks))):
            refuse_other_limits(asks, hold_id)
        actual = (0,) * len(before) if cancel else before if costs is None else tuple(costs)
        if held.status != OPEN:
            if actual != before:
                refuse_other_costs(asks, hold_id, held.status, before, actual)
            return self._answer(held, asks, 1, low, now)
        status: HoldState = CANCELLED if cancel else SETTLED
        pieces = held.pieces()
        find_tables(self._tables, pieces)
        self._record_settlement(held, pieces, status, actual, now)
        counted, end = (0,) * len(before) if held.released else before, held.end
        charge_more(self._tables, held, pieces, counted, actual, now)
        holds = self._by_key[held.table.name, held.key]
        if end > now:
            holds.open -= 1
        held.costs = actual
        held.status = status
        held.end = now
        free_slots(pieces, end, now)
        give_back(self._tables, held, pieces, counted, actual, now)
        parts = self._close(held, pieces, asks, low, now)
        self._remember(held, holds)
        if parts is None:
            return self._answer(held, asks, 1, low, now)
        return HoldAnswer(binding(parts, asks), status, actual, 0, parts)

    def _close(
        self, held: MemoryHold, pieces: list[HeldPiece], asks: Sequence[Ask], low: i64, now: i64
    ) -> tuple[Decision, ...] | None:
        """Let nothing come back to a hold any more, and say what a peek says; None if the asks are others than its."""
        limits = [piece.limit for piece in pieces] if asks is held.asks else same_limits(pieces, asks)
        parts: list[Decision] = []
        for i in range(len(pieces)):
            piece = pieces[i]
            if not held.released:
                piece.close_all(piece.state)
            if limits is not None:
                limit = limits[i]
                parts.append(limit.decide(piece.state, now, 1, limit.wait(piece.state, now, 1), low))
            piece.leave()
        return None if limits is None else tuple(parts)

    def extend(
        self, asks: Sequence[Ask], low: i64, hold_id: str, costs: Sequence[int] | None, lease: int | None
    ) -> HoldAnswer:
        now = self._begin()
        held = self._known(asks, hold_id, now)
        before = held.all_costs()
        if held.status_at(now) != OPEN:
            refuse_ended(asks, hold_id, held.status_at(now), before, "extend")
        if costs is not None and not held.is_of(asks):
            refuse_other_limits(asks, hold_id)
        more = [max(costs[i] - before[i], 0) for i in range(len(costs))] if costs is not None else []
        parts: tuple[Decision, ...] = ()
        decision: Decision | None = None
        pieces = held.pieces()
        find_tables(self._tables, pieces)
        charges: list[Charge] = []
        if any(more):
            asked = held.asks_for(asks, more)
            charges = [Charge(ask.limit, ask.cost) for ask in pieces_of(asked)]
            limits = [charge.limit for charge in charges]
            wanted = [charge.cost for charge in charges]
            demand = Demand(self._tables, pieces, limits, wanted, charges, now, 0)
            denied = demand.take()
            parts = demand.decide(denied, low)
            decision = binding(parts, asked)
            if denied and not held.forced:
                for piece in pieces:
                    piece.leave()
                return HoldAnswer(decision, OPEN, before, held.left(now), parts)
            if denied:
                demand.force()
            for i in range(len(pieces)):
                pieces[i].add(charges[i])
                pieces[i].leave()
            held.costs = tuple([before[i] + more[i] for i in range(len(before))])
        end = held.end if lease is None else now if lease == 0 else max(held.end, now + lease)
        if charges or end != held.end:
            self._record_extension(held, pieces, charges, before, end, now)
        self._move(held, pieces, now, end)
        answer = self._answer(held, asks, 0, low, now)
        return answer if decision is None else answer.with_decision(decision, parts)

    def find_hold(self, asks: Sequence[Ask], low: i64, hold_id: str) -> HoldAnswer:
        now = self._begin()
        return self._answer(self._known(asks, hold_id, now), asks, 1, low, now)

    def list_holds(self, name: str, key: str, count: int) -> list[ListedHold]:
        now = self._begin()
        self._index()
        holds = self._by_key.get((name, key))
        if holds is None:
            return []
        known = [held for held in holds.unsettled.values() if held.end + held.kept > now]
        ordered = [(held.end <= now, held.end, i, held) for i, held in enumerate(known)]
        found = [row[-1] for row in heapq.nsmallest(count, ordered)]
        for held in holds.by_id.values():
            if len(found) >= count:
                break
            if held.status != OPEN and held.end + held.kept > now:
                found.append(held)
        return [held.listed(now) for held in found]

    def read_hold(self, name: str, key: str, hold_id: str) -> ListedHold | None:
        now = self._begin()
        held = self._find(name, key, hold_id, now)
        return None if held is None else held.listed(now)

    def peek_each(self, asks: Sequence[Ask], low: i64) -> tuple[Decision, ...]:
        return peek(self._tables, asks, 1, low, self._begin())

    def read_usage(self, name: str, first: int, last: int, root: str | None) -> list[UsageRow]:
        self._begin()
        return self._tables.usage(name, first, last, root)

    # What a verb takes and gives back --------------------------------------------------------------------------------

    def _begin(self) -> i64:
        now = self._tables.now()
        if now >= self._tables.due:
            self.release_due(now)
        return now

    def _made(self, asks: Sequence[Ask], costs: tuple[int, ...], terms: HoldTerms, now: i64) -> MemoryHold:
        """A new hold that has taken nothing yet."""
        if self._tables.size + len(asks) > self._tables.max_keys:
            self._tables.make_room(now)  # before tables are looked up: it may drop empty ones
        held: MemoryHold | None = None
        rest: list[HeldPiece] = []
        for ask in pieces_of(asks):
            table = self._tables.table_at_hand(ask.name, ask.limit)
            if held is None:
                held = MemoryHold(table, ask.key, ask.limit, ask.cost, ask.root, now + terms.lease, terms.keep)
            else:
                rest.append(HeldPiece(table, ask.key, ask.limit, ask.cost, ask.root))
        assert held is not None
        held.hold_id = terms.hold_id
        held.release = terms.release
        held.forced = terms.forced
        held.note = terms.note
        held.shape = terms.shape
        if rest:
            held.costs = costs
            held.asks = tuple(asks)
            held.rest = rest
        return held

    def _move(self, held: MemoryHold, pieces: list[HeldPiece], now: i64, end: i64) -> None:
        """Let the lease of an open hold end at another time."""
        before = held.end
        if end != before:
            if end > now:
                take_slots(pieces, end, now)  # before the others are free: an interruption must not leave it without
            else:
                self._by_key[held.table.name, held.key].open -= 1
            held.end = end
            free_slots(pieces, before, now)
            self._expect_release(held)
            if end <= now:
                self.release_due(now)

    def _answer(self, held: MemoryHold, asks: Sequence[Ask], cost: i64, low: i64, now: i64) -> HoldAnswer:
        """The state of a hold, with a decision as of a peek for cost 1, or for 0 on costs that were taken."""
        parts = peek(self._tables, asks, cost, low, now)
        found = binding(parts, asks), held.status_at(now), held.all_costs(), held.left(now), parts
        return HoldAnswer(*found, release=held.release)

    # Leases that end, and holds that are forgotten -------------------------------------------------------------------

    def _expect_release(self, held: MemoryHold) -> None:
        if held.release:
            self._expected += 1
            heapq.heappush(self._due, (held.end, self._expected, held))
            self._tables.due = self._due[0][0]

    def release_due(self, now: i64) -> None:
        """Give back the costs of holds that have expired by now, if their terms say so."""
        while self._due and self._due[0][0] <= now:
            end, _, held = heapq.heappop(self._due)
            if held.status == OPEN and held.end == end and not held.released and not held.forgotten:
                pieces, before = held.pieces(), held.all_costs()
                find_tables(self._tables, pieces)
                held.released = True  # first: if it is interrupted, it is not given back again by a settlement
                give_back(self._tables, held, pieces, before, (0,) * len(before), now)
                for piece in pieces:
                    piece.close_all(piece.state)
                    piece.leave()
                self._record_release(held, pieces, now)
        self._tables.due = self._due[0][0] if self._due else LATER

    def _find(self, name: str, key: str, hold_id: str, now: i64) -> MemoryHold | None:
        holds = self._by_key.get((name, key))
        held = None if holds is None else holds.by_id.get(hold_id)
        if held is not None and held.end + held.kept <= now:
            self._forget(held)
            return None
        return held

    def _known(self, asks: Sequence[Ask], hold_id: str, now: i64) -> MemoryHold:
        held = self._find(asks[0].name, asks[0].key, hold_id, now)
        if held is None:
            raise UnknownHold(asks[0].key, hold_id)
        return held

    def _refuse_more(self, name: str, key: str, now: i64, most: i64) -> None:
        """Refuse one open hold too many. They are counted only when there may be so many, not for every hold."""
        most = min(most, MAX_OPEN_HOLDS)
        if len(self._unindexed) + len(self._indexed) < most:
            return
        self._index()
        holds = self._by_key.get((name, key))
        if holds is not None and holds.open >= most and holds.open_at(now) >= most:
            refuse_more_holds(key, most)

    def _add(self, held: MemoryHold) -> None:
        """Let a hold be found by its key and its id."""
        holds = self._by_key.get((held.table.name, held.key))
        if holds is None:
            holds = self._by_key[held.table.name, held.key] = KeyHolds()
        held.indexed = True
        holds.by_id[held.hold_id] = held
        if held.status == OPEN:
            holds.open += 1
            holds.unsettled[held.hold_id] = held
            self._indexed.add(held)
        else:
            self._remember(held, holds)

    def _remember(self, held: MemoryHold, holds: KeyHolds) -> None:
        """Remember a hold of a key that was settled, and forget the oldest ones if there are too many."""
        self._indexed.remove(held)
        holds.unsettled.pop(held.hold_id, None)
        held.let_go()
        self._ended.append(held)
        if len(self._ended) > self._max_ended:
            if not self._warned:
                self._warned = True
                _log.warning(
                    "MemoryStore: more than %d settled holds; the oldest are forgotten, so that settling one of them "
                    "again is an error",
                    self._max_ended,
                )
            self._forget(self._ended.popleft())

    def _sweep_tables(self, pieces: list[HeldPiece], new: i64, now: i64) -> None:
        """Sweep more entries than were added."""
        self._until_sweep -= 1
        if new > 0 or self._until_sweep < 0:
            self._until_sweep = _BETWEEN_SWEEPS
            for i in range(len(pieces)):
                pieces[i].table.split()
            for _ in range(max(new, 1)):
                self._tables.sweep(now)

    def _sweep(self, now: i64, most: i64) -> None:
        """Forget holds that ended long ago, of the next few."""
        self._forget_ended(now)
        for _ in range(most):
            count: i64 = len(self._indexed)
            held = self._indexed.at(self._swept)
            if held is None:
                held = self._unindexed.at(self._swept - count)
            if held is None:
                self._swept = 0
                self._indexed.shrink()
                self._unindexed.shrink()
                break
            if held.end + held.kept <= now:
                self._forget(held)
            else:
                self._swept += 1

    def _forget_ended(self, now: i64) -> None:
        """Forget the settled holds that need not be remembered any more, as far as they are the oldest."""
        while self._ended and (self._ended[0].forgotten or self._ended[0].end + self._ended[0].kept <= now):
            self._forget(self._ended.popleft())

    def _forget(self, held: MemoryHold) -> None:
        if not held.forgotten:
            if held.indexed:
                self._record_forgotten(held)
            self._drop(held)

    def _drop(self, held: MemoryHold) -> None:
        held.forgotten = True
        (self._indexed if held.indexed else self._unindexed).remove(held)
        holds = self._by_key.get((held.table.name, held.key))
        if held.indexed and holds is not None:
            holds.by_id.pop(held.hold_id, None)
            holds.unsettled.pop(held.hold_id, None)
            if not holds.by_id:
                self._by_key.pop((held.table.name, held.key), None)

    def under(self, name: str, limit: Limit, key: str | None) -> list[MemoryHold]:
        """The holds under a name that have taken something of a limit, of one key or (None) of all."""
        self._index()
        counted = {piece.identity for piece in limit.pieces}
        if key is None:
            known = [holds for one, holds in self._by_key.items() if one[0] == name]
        else:
            known = [holds for holds in [self._by_key.get((name, key))] if holds is not None]
        found = [held for holds in known for held in holds.unsettled.values()]
        return [held for held in found if not counted.isdisjoint([piece.limit.identity for piece in held.pieces()])]

    def forget(self, holds: list[MemoryHold]) -> None:
        """Forget some holds: nothing that they have taken comes back."""
        for held in holds:
            held.status = CANCELLED
            self._drop(held)

    def forget_all(self) -> None:
        self._index()
        self.forget([held for holds in self._by_key.values() for held in holds.by_id.values()])

    # For a file that remembers them: called within each verb, before it is answered ----------------------------------

    def _record_hold(self, held: MemoryHold, asks: Sequence[Ask], terms: HoldTerms, now: i64) -> None:
        """Called when a hold has taken its costs. What it raises gives them back first."""

    def _record_settlement(
        self, held: MemoryHold, pieces: list[HeldPiece], status: HoldState, actual: tuple[int, ...], now: i64
    ) -> None:
        """Called before a hold is settled."""

    def _record_extension(
        self,
        held: MemoryHold,
        pieces: list[HeldPiece],
        charges: list[Charge],
        before: tuple[int, ...],
        end: i64,
        now: i64,
    ) -> None:
        """Called when a hold has taken more costs, if any, before its lease is moved. What it raises undoes that."""

    def _record_release(self, held: MemoryHold, pieces: list[HeldPiece], now: i64) -> None:
        """Called when an expired hold has given back its costs."""

    def _record_forgotten(self, held: MemoryHold) -> None:
        """Called when a hold is forgotten because it ended long ago."""
