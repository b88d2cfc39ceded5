"""The holds of a store in this process's memory. See `headgate.stores.holds` for what they are.

The garbage collector may run a finalizer at any allocation of an object that it tracks, and that may use the same
limits. So whatever a step needs is made first. From the look at the waits until all costs are taken, or corrected,
nothing is allocated that it tracks.
"""

import heapq
import logging
from collections import deque
from collections.abc import Sequence
from typing import Final, NoReturn

from headgate._native import i64
from headgate.errors import UnknownHold, refuse
from headgate.limits.decision import Decision, Limit, binding_of
from headgate.limits.meter import Meter
from headgate.stores.asks import Ask, pieces_of, place_in
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
    refuse_uncountable,
)
from headgate.stores.memory_tables import LATER, Tables

_BETWEEN_SWEEPS: Final[i64] = 64  # new holds from one sweep to the next
_SWEPT: Final[i64] = 4  # holds that are looked at for each new one, whether they can be forgotten
_FEW: Final = 16  # pieces that are compared one by one

_log = logging.getLogger("headgate")


class KeyHolds:
    """The holds of one key."""

    def __init__(self) -> None:
        self.by_id: Final[dict[str, MemoryHold]] = {}
        self.unsettled: Final[dict[str, MemoryHold]] = {}
        """Those of them that are open, or have expired. There may be many others."""
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
            pieces: list[HeldPiece] = [held]
            self._make_room(pieces, now)
            denied = self._take(pieces, [held.limit], [held.cost], None, now, held.end)
            (decision,) = self._decide(pieces, [held.limit], [held.cost], denied, low, now)
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
        held.correct(state, now, held.cost, actual)
        held.close(state)
        if table.slots:
            limit.free_slot(state, held.end)
        held.cost = actual
        held.status = status
        held.end = now
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
        _refuse_twice(pieces)
        limits = [piece.limit for piece in pieces]
        asked = [max(piece.cost, 1) for piece in pieces]
        size = self._tables.size
        denied = self._take(pieces, limits, asked, None, now, held.end)
        parts = self._decide(pieces, limits, asked, denied, low, now)
        decision = _binding(parts, asks)
        if denied and not terms.forced:
            return HoldAnswer(decision, DENIED, costs, 0, parts)
        if denied:
            self._force(pieces, limits, None, now, held.end)
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
        self._find_tables(pieces)
        self._record_settlement(held, pieces, status, actual, now)
        parts = self._end(held, pieces, asks, actual, low, now)
        holds = self._by_key[held.table.name, held.key]
        if held.end > now:
            holds.open -= 1
        held.costs = actual
        held.status = status
        held.end = now
        self._remember(held, holds)
        if parts is None:
            return self._answer(held, asks, 1, low, now)
        return HoldAnswer(_binding(parts, asks), status, actual, 0, parts)

    def _end(
        self,
        held: MemoryHold,
        pieces: list[HeldPiece],
        asks: Sequence[Ask],
        actual: tuple[int, ...],
        low: i64,
        now: i64,
    ) -> tuple[Decision, ...] | None:
        """Count what a hold has cost, and say what a peek says then; None if the asks are others than the hold's."""
        self._free_slots(held, pieces, now)
        self._count(held, pieces, actual, now)
        limits = [piece.limit for piece in pieces] if asks is held.asks else _same_limits(pieces, asks)
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
        self._find_tables(pieces)
        charges: list[Charge] = []
        if any(more):
            asked = held.asks_for(asks, more)
            charges = [Charge(ask.limit, ask.cost) for ask in pieces_of(asked)]
            limits = [charge.limit for charge in charges]
            wanted = [charge.cost for charge in charges]
            self._make_room(pieces, now)
            denied = self._take(pieces, limits, wanted, charges, now, 0)
            parts = self._decide(pieces, limits, wanted, denied, low, now)
            decision = _binding(parts, asked)
            if denied and not held.forced:
                for piece in pieces:
                    piece.leave()
                return HoldAnswer(decision, OPEN, before, held.left(now), parts)
            if denied:
                self._force(pieces, limits, charges, now, 0)
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
        return self._peek(asks, 1, low, self._begin())

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

    def _make_room(self, pieces: list[HeldPiece], now: i64) -> None:
        if self._tables.size + len(pieces) > self._tables.max_keys:
            self._tables.make_room(now)
            self._find_tables(pieces)

    def _find_tables(self, pieces: list[HeldPiece]) -> None:
        """Find the tables of a hold again: those without entries may have been dropped."""
        for i in range(len(pieces)):
            if pieces[i].table.dropped:
                pieces[i].table = self._tables.table_of(pieces[i].table.name, pieces[i].limit)

    def _ahead(self, pieces: list[HeldPiece], now: i64) -> i64:
        """What is added to the store's time to get the time of day, if any of them needs it."""
        for i in range(len(pieces)):
            if pieces[i].table.calendar:
                return self._tables.wall_ahead(now)
        return 0

    def _lacks_room(self, pieces: list[HeldPiece]) -> bool:
        new: i64 = 0
        for i in range(len(pieces)):
            if pieces[i].wait != 0:
                return False
            if not pieces[i].known:
                new += 1
        return new > 0 and self._tables.size + new > self._tables.max_keys

    def _take(
        self,
        pieces: list[HeldPiece],
        limits: list[Limit],
        asked: list[int],
        charges: list[Charge] | None,
        now: i64,
        end: i64,
    ) -> bool:
        """Take all costs, and slots until `end` (0: none), or nothing: True if it is denied.

        The charges are those of an extension; those of a new hold are the pieces themselves.
        """
        ahead = self._ahead(pieces, now)
        changes = self._tables.changes
        self._waits(pieces, limits, asked, now, ahead, end, True)
        for i in range(len(pieces)):
            (pieces[i] if charges is None else charges[i]).prepare(pieces[i].state)
        if self._lacks_room(pieces):
            return True
        # From here on nothing is allocated that the garbage collector tracks.
        if self._waits(pieces, limits, asked, now, ahead, end, changes != self._tables.changes):
            return True
        for i in range(len(pieces)):
            if isinstance(limits[i], Meter) and not limits[i].countable(pieces[i].state, asked[i]):
                self._refuse_uncountable(pieces)
        self._spend(pieces, charges, now, end)
        return False

    def _waits(
        self, pieces: list[HeldPiece], limits: list[Limit], asked: list[int], now: i64, ahead: i64, end: i64, find: bool
    ) -> bool:
        """Say whether any piece has to wait, after finding the states if they aren't known."""
        waits = False
        for i in range(len(pieces)):
            piece = pieces[i]
            limit = limits[i]
            if find:
                piece.find(limit, asked[i], now, ahead)
            else:
                piece.wait = limit.wait(piece.state, now, asked[i])
            if end == 0 and piece.table.slots:
                piece.wait = 0  # the hold has its slot
            waits = waits or piece.wait != 0
        return waits

    def _spend(self, pieces: list[HeldPiece], charges: list[Charge] | None, now: i64, end: i64) -> None:
        for i in range(len(pieces)):
            piece = pieces[i]
            if charges is None:
                piece.take(piece.state, now)
            else:
                charges[i].take(piece.state, now)
            if end != 0 and piece.table.slots:
                piece.limit.take_slot(piece.state, end)
            piece.keep(now)

    def _force(
        self, pieces: list[HeldPiece], limits: list[Limit], charges: list[Charge] | None, now: i64, end: i64
    ) -> None:
        """Take all costs, and slots until `end` (0: none), whatever is left."""
        ones = [1] * len(pieces)
        self._waits(pieces, limits, ones, now, self._ahead(pieces, now), end, True)  # again: a finalizer may have spent
        for i in range(len(pieces)):
            cost = (pieces[i] if charges is None else charges[i]).cost
            if not limits[i].countable(pieces[i].state, cost):
                self._refuse_uncountable(pieces)
        self._spend(pieces, charges, now, end)

    def _refuse_uncountable(self, pieces: list[HeldPiece]) -> NoReturn:
        for piece in pieces:
            piece.leave()
        refuse_uncountable()

    def _decide(
        self, pieces: list[HeldPiece], limits: list[Limit], asked: list[int], denied: bool, low: i64, now: i64
    ) -> tuple[Decision, ...]:
        """The decision on each piece that was taken, or denied."""
        if denied and self._lacks_room(pieces):
            return tuple([self._tables.deny_for_room(limit) for limit in limits])
        parts: list[Decision] = []
        for i in range(len(pieces)):
            cost: i64 = asked[i] if denied else 0
            parts.append(limits[i].decide(pieces[i].state, now, cost, pieces[i].wait if denied else 0, low))
        return tuple(parts)

    def _count(self, held: MemoryHold, pieces: list[HeldPiece], actual: tuple[int, ...], now: i64) -> None:
        """Count `actual` for each ask of a hold instead of what is counted now. The states stay with the pieces."""
        before, places = held.all_costs(), held.places()
        ahead = self._ahead(pieces, now)
        for i in range(len(pieces)):
            piece = pieces[i]
            piece.find(piece.limit, 0, now, ahead)
            place = i if places is None else places[i]
            piece.count(piece.state, now, 0 if held.released else before[place], actual[place])
            piece.keep(now)

    def _free_slots(self, held: MemoryHold, pieces: list[HeldPiece], now: i64) -> None:
        """Free the slots of a hold whose lease has not ended; those of others are free already."""
        if held.end > now:
            self._move_slots(held, pieces, now, 0)

    def _move(self, held: MemoryHold, pieces: list[HeldPiece], now: i64, end: i64) -> None:
        """Let the lease of an open hold end at another time."""
        if end != held.end:
            self._move_slots(held, pieces, now, 0 if end <= now else end)
            if end <= now:
                self._by_key[held.table.name, held.key].open -= 1
            held.end = end
            self._expect_release(held)
            if end <= now:
                self.release_due(now)

    def _move_slots(self, held: MemoryHold, pieces: list[HeldPiece], now: i64, end: i64) -> None:
        for i in range(len(pieces)):
            piece = pieces[i]
            if piece.table.slots:
                piece.find(piece.limit, 0, now, 0)
                piece.limit.free_slot(piece.state, held.end)
                if end != 0:
                    piece.limit.take_slot(piece.state, end)
                    piece.keep(now)  # its key may have been forgotten, but not the hold, which belongs to another
                piece.leave()

    def _answer(self, held: MemoryHold, asks: Sequence[Ask], cost: i64, low: i64, now: i64) -> HoldAnswer:
        """What has become of a hold, with a decision as a peek for cost 1 says, or for 0 on what has been taken."""
        parts = self._peek(asks, cost, low, now)
        return HoldAnswer(_binding(parts, asks), held.status_at(now), held.all_costs(), held.left(now), parts)

    def _peek(self, asks: Sequence[Ask], cost: i64, low: i64, now: i64) -> tuple[Decision, ...]:
        """The decision on each piece right now."""
        parts: list[Decision] = []
        for ask in pieces_of(asks):
            limit = ask.limit
            piece = HeldPiece(self._tables.table_at_hand(ask.name, limit), ask.key, limit, 0, ask.root)
            piece.find(limit, cost, now, self._tables.wall_ahead(now) if piece.table.calendar else 0)
            parts.append(limit.decide(piece.state, now, cost, 0 if cost == 0 else piece.wait, low))
        return tuple(parts)

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
                pieces = held.pieces()
                self._find_tables(pieces)
                self._count(held, pieces, (0,) * len(held.all_costs()), now)
                for piece in pieces:
                    piece.close_all(piece.state)
                    piece.leave()
                held.released = True
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


def _refuse_twice(pieces: list[HeldPiece]) -> None:
    """Refuse a key that is asked for twice."""
    if len(pieces) > _FEW:
        twice = len({(id(piece.table), piece.key) for piece in pieces}) < len(pieces)
    else:
        twice = False
        for i in range(1, len(pieces)):
            table = pieces[i].table
            for j in range(i):
                if pieces[j].table is table and pieces[j].key == pieces[i].key:
                    twice = True
    if twice:
        refuse("asks", "each key once", [piece.key for piece in pieces])


def _same_limits(pieces: list[HeldPiece], asks: Sequence[Ask]) -> list[Limit] | None:
    """The limits of asks, if they count in the same places as the pieces of a hold; otherwise None."""
    limits: list[Limit] = []
    for ask in pieces_of(asks):
        if len(limits) == len(pieces):
            return None
        piece, limit = pieces[len(limits)], ask.limit
        if ask.key != piece.key or ask.name != piece.table.name:
            return None
        if limit is not piece.limit and limit.identity != piece.limit.identity:
            return None
        limits.append(limit)
    return limits if len(limits) == len(pieces) else None


def _binding(parts: tuple[Decision, ...], asks: Sequence[Ask]) -> Decision:
    """Of the decisions on some pieces the one that bound, as one on the asks."""
    if len(parts) == 1 or parts[0].degraded:  # without room for one of them, none is asked
        return parts[0]
    bound = binding_of(parts)
    return bound if len(parts) == len(asks) else place_in(bound, asks, pieces_of(asks))
