"""Holds in this process's memory. See `headgate.stores.holds` for what they are."""

import heapq
import logging
from collections import deque
from collections.abc import Sequence
from typing import Final

from headgate._native import i64, mypyc_attr
from headgate.errors import UnknownHold, refuse
from headgate.limits.all_of import AllOfState
from headgate.limits.decision import Decision, Limit, State, binding_of
from headgate.stores.asks import pieces_of, place_in
from headgate.stores.base import Ask, Verb
from headgate.stores.holds import (
    CANCELLED,
    DENIED,
    EXPIRED,
    MAX_CHARGES,
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
)
from headgate.stores.memory_tables import CHARGE, CHECK, LATER, Entry, Tables, decide_each

_SWEPT_AT_ONCE: Final = 2  # holds that a new one looks at, whether they can be forgotten

_log = logging.getLogger("headgate")


@mypyc_attr(acyclic=True)
class Charge:
    """A cost that was taken under one limit, at one time: where each part of the limit has counted it."""

    def __init__(self, limit: Limit, cost: i64) -> None:
        self.cost: i64 = cost
        self.limits: Final = limit.parts
        self.marks: Final[list[int]] = [0] * len(limit.parts)
        self.serials: Final[list[int]] = [0] * len(limit.parts)

    def take(self, limit: Limit, state: State, now: i64) -> None:
        """Spend the cost."""
        limit.spend(state, now, self.cost)
        for i in range(len(self.limits)):
            self.marks[i], self.serials[i] = self.limits[i].mark(_state_of(state, i))

    def correct(self, state: State, now: i64, held: i64, actual: i64) -> None:
        """Count another cost instead."""
        for i in range(len(self.limits)):
            self.limits[i].correct(_state_of(state, i), now, held, actual, self.marks[i], self.serials[i])


def _state_of(state: State, part: i64) -> State:
    return state.states[part] if isinstance(state, AllOfState) else state


@mypyc_attr(acyclic=True)
class HeldPiece:
    """What a hold has taken under one piece of a limit: at first, and whenever it was extended."""

    def __init__(self, ask: Ask, charge: Charge) -> None:
        self.name: Final = ask.name
        self.key: Final = ask.key
        self.root: Final = ask.root
        self.limit: Final = ask.limit
        self.charges: Final[list[Charge]] = [charge]

    def correct(self, state: State, now: i64, held: i64, actual: i64) -> None:
        """Count `actual` instead of `held`. The newest charges are given back first."""
        excess = actual - held
        if excess > 0:
            self.charges[0].correct(state, now, 0, excess)
            return
        for i in range(len(self.charges) - 1, -1, -1):
            charge = self.charges[i]
            given = min(charge.cost, -excess)
            charge.correct(state, now, charge.cost, charge.cost - given)
            excess += given


@mypyc_attr(acyclic=True)
class MemoryHold:
    """One hold. There may be many that are only remembered: the garbage collector has nothing to look at in those."""

    def __init__(self, asks: Sequence[Ask], terms: HoldTerms, pieces: list[HeldPiece], costs: tuple[int, ...]) -> None:
        self.name: Final = asks[0].name
        self.key: Final = asks[0].key
        self.asks = tuple(asks)
        self.spans: Final = tuple([len(ask.limit.pieces) for ask in asks])
        """How many of the pieces belong to each ask."""
        self.hold_id: Final = terms.hold_id
        self.release: Final = terms.release
        self.keep: Final[i64] = terms.keep
        self.note: Final = terms.note
        self.shape: Final = terms.shape
        self.forced: Final = terms.forced
        self.pieces = pieces
        self.costs = costs
        """Of each ask: the reserved ones, in the end the settled ones."""
        self.released = False
        self.forgotten = False
        self.state: HoldState = OPEN
        self.end: i64 = 0  # of its lease, or when it was settled

    def asks_for(self, asks: Sequence[Ask], more: list[int]) -> Sequence[Ask]:
        """The asks, for more: if their limits are others meanwhile, under those with which the hold was made."""
        asked = [asks[i]._replace(cost=more[i]) for i in range(len(asks))]
        identities = [(one.name, one.key, one.limit.identity) for one in pieces_of(asked)]
        if identities == [(one.name, one.key, one.limit.identity) for one in self.pieces]:
            return asked
        return [self.asks[i]._replace(cost=more[i]) for i in range(len(more))]

    def let_go(self) -> None:
        """Drop what only an unsettled hold needs."""
        self.asks, self.pieces = (), _NO_PIECES

    def state_at(self, now: i64) -> HoldState:
        return EXPIRED if self.state == OPEN and self.end <= now else self.state

    def left(self, now: i64) -> i64:
        return max(self.end - now, 0) if self.state == OPEN else 0

    def listed(self, now: i64) -> ListedHold:
        return ListedHold(self.hold_id, self.state_at(now), self.costs, self.left(now), self.note, self.shape)


_NO_PIECES: Final[list[HeldPiece]] = []


class KeyHolds:
    """The holds of one key."""

    def __init__(self) -> None:
        self.by_id: Final[dict[str, MemoryHold]] = {}
        self.open: i64 = 0
        """How many are open, or more: leases may have ended since they were counted."""

    def open_at(self, now: i64) -> i64:
        """How many are open, exactly."""
        self.open = len([None for held in self.by_id.values() if held.state == OPEN and held.end > now])
        return self.open


class MemoryHolds:
    """The holds of one store. Every method is called with the store's lock."""

    def __init__(self, tables: Tables, max_ended: int) -> None:
        self._tables: Final = tables
        self._max_ended: Final = max_ended
        self._by_key: Final[dict[tuple[str, str], KeyHolds]] = {}
        self._all: Final[deque[MemoryHold]] = deque()  # in the order in which they are looked at
        self._ended: Final[deque[MemoryHold]] = deque()  # those that were settled, in this order
        self._forgotten: i64 = 0  # how many of these are still in the queue of all
        self._due: Final[list[tuple[int, int, MemoryHold]]] = []  # when their costs may come back
        self._made = 0
        self._warned = False

    def __len__(self) -> int:
        """How many holds are open or remembered."""
        return len(self._all) - self._forgotten

    # The verbs -------------------------------------------------------------------------------------------------------

    def hold(self, asks: Sequence[Ask], low: i64, terms: HoldTerms) -> HoldAnswer:
        now = self._begin()
        name, key = asks[0].name, asks[0].key
        known = self._find(name, key, terms.hold_id, now)
        costs = tuple([ask.cost for ask in asks])
        if known is not None:
            if known.state == OPEN and known.costs != costs:
                refuse_other_costs(asks, terms.hold_id, known.state_at(now), known.costs, costs)
            return self._answer(known, asks, low, now, CHECK)
        pieces = pieces_of(asks)
        self._refuse_more(name, key, now, terms.most)
        entries = self._entries(pieces, now, 1)
        charges = [Charge(ask.limit, ask.cost) for ask in pieces]
        held = MemoryHold(asks, terms, [HeldPiece(pieces[i], charges[i]) for i in range(len(pieces))], costs)
        held.end = now + terms.lease
        denied = self._take(entries, charges, now, held.end)
        parts = self._decide(entries, denied, low, now)
        decision = _binding(parts, asks, pieces)
        if denied and not terms.forced:
            return HoldAnswer(decision, DENIED, costs, 0, parts)
        if denied:
            self._force(entries, charges, now, held.end)
        self._record_hold(held, asks, terms, now)
        self._add(held)
        self._expect_release(held)
        self._sweep(now)
        self._tables.sweep(now)
        return HoldAnswer(decision, OPEN, costs, terms.lease, parts)

    def settle(
        self, asks: Sequence[Ask], low: i64, hold_id: str, costs: Sequence[int] | None, cancel: bool
    ) -> HoldAnswer:
        now = self._begin()
        held = self._known(asks, hold_id, now)
        actual = (0,) * len(held.costs) if cancel else held.costs if costs is None else tuple(costs)
        if held.state in (SETTLED, CANCELLED):
            if actual != held.costs:
                refuse_other_costs(asks, hold_id, held.state, held.costs, actual)
            return self._answer(held, asks, low, now)
        state: HoldState = CANCELLED if cancel else SETTLED
        self._record_settlement(held, state, actual, now)
        self._free_slots(held, now)
        self._count(held, actual, now)
        if held.end > now:
            self._by_key[held.name, held.key].open -= 1
        held.costs = actual
        held.state = state
        held.end = now
        self._remember(held)
        return self._answer(held, asks, low, now)

    def extend(
        self, asks: Sequence[Ask], low: i64, hold_id: str, costs: Sequence[int] | None, lease: int | None
    ) -> HoldAnswer:
        now = self._begin()
        held = self._known(asks, hold_id, now)
        if held.state_at(now) != OPEN:
            refuse_ended(asks, hold_id, held.state_at(now), held.costs, "extend")
        more = [max(costs[i] - held.costs[i], 0) for i in range(len(costs))] if costs is not None else []
        parts: tuple[Decision, ...] = ()
        decision: Decision | None = None
        charges: list[Charge] = []
        if any(more):
            asked = held.asks_for(asks, more)
            pieces = pieces_of(asked)
            entries = self._entries(pieces, now, 0)
            charges = [Charge(ask.limit, ask.cost) for ask in pieces]
            denied = self._take(entries, charges, now, 0)
            parts = self._decide(entries, denied, low, now)
            decision = _binding(parts, asked, pieces)
            if denied and not held.forced:
                return HoldAnswer(decision, OPEN, held.costs, held.left(now), parts)
            if denied:
                self._force(entries, charges, now, 0)
            for i in range(len(pieces)):
                _add_charge(held.pieces[i].charges, charges[i])
            held.costs = tuple([held.costs[i] + more[i] for i in range(len(asks))])
        end = held.end if lease is None else now if lease == 0 else max(held.end, now + lease)
        if charges or end != held.end:
            self._record_extension(held, charges, more, end, now)
        self._move(held, now, end)
        answer = self._answer(held, asks, low, now, CHECK)
        return answer if decision is None else answer._replace(decision=decision, parts=parts)

    def find_hold(self, asks: Sequence[Ask], low: i64, hold_id: str) -> HoldAnswer:
        now = self._begin()
        return self._answer(self._known(asks, hold_id, now), asks, low, now)

    def list_holds(self, name: str, key: str, count: int) -> list[ListedHold]:
        now = self._begin()
        found = [held for held in self._of_key(name, key) if held.end + held.keep > now]
        first = heapq.nsmallest(count, [(held.end, i, held) for i, held in enumerate(found)])
        return [held.listed(now) for _, _, held in first]

    def read_hold(self, name: str, key: str, hold_id: str) -> ListedHold | None:
        now = self._begin()
        held = self._find(name, key, hold_id, now)
        return None if held is None else held.listed(now)

    def read_usage(self, name: str, first: int, last: int, root: str | None) -> list[UsageRow]:
        self._begin()
        return self._tables.usage(name, first, last, root)

    def peek_each(self, asks: Sequence[Ask], low: i64) -> tuple[Decision, ...]:
        now = self._begin()
        return self._peek(pieces_of(asks), CHARGE, low, now)

    # What a verb takes and gives back --------------------------------------------------------------------------------

    def _begin(self) -> i64:
        now = self._tables.now()
        if now >= self._tables.due:
            self.release_due(now)
        return now

    def _entry(self, ask: Ask, cost: i64, now: i64) -> Entry:
        return Entry(self._tables.table_of(ask.name, ask.limit), ask.key, ask.limit, cost, now, ask.root)

    def _entries(self, pieces: Sequence[Ask], now: i64, least: i64) -> list[Entry]:
        """The entries of asks that are about to be taken. What is asked of each is its cost, or at least so much."""
        if self._tables.size + len(pieces) > self._tables.max_keys:
            self._tables.make_room(now)  # before tables are looked up: it may drop empty ones
        entries = [self._entry(ask, max(ask.cost, least), now) for ask in pieces]
        if len(entries) > 1 and len({(id(entry.table), entry.key) for entry in entries}) < len(entries):
            refuse("asks", "each key once", [ask.key for ask in pieces])
        return entries

    def _found(self, piece: HeldPiece, now: i64) -> Entry:
        """The entry of a piece of a hold, up to now."""
        table = self._tables.table_of(piece.name, piece.limit)
        entry = Entry(table, piece.key, piece.limit, 0, now, piece.root)
        entry.find(now)
        return entry

    def _lacks_room(self, entries: list[Entry]) -> bool:
        new = len([None for entry in entries if not entry.known])
        return new > 0 and self._tables.size + new > self._tables.max_keys and all([not one.wait for one in entries])

    def _take(self, entries: list[Entry], charges: list[Charge], now: i64, end: i64) -> bool:
        """Take all costs, and slots until `end` (0: none), or nothing: True if it is denied."""
        self._waits(entries, now, end)
        for i in range(len(entries)):
            for j in range(len(charges[i].limits)):
                charges[i].limits[j].prepare(_state_of(entries[i].state, j))
        if self._lacks_room(entries):
            return True
        # From here on nothing is allocated that the garbage collector tracks: a finalizer could spend in between.
        if self._waits(entries, now, end):
            return True
        self._spend(entries, charges, now, end)
        return False

    def _spend(self, entries: list[Entry], charges: list[Charge], now: i64, end: i64) -> None:
        for i in range(len(entries)):
            charges[i].take(entries[i].limit, entries[i].state, now)
            if end != 0:
                entries[i].limit.take_slot(entries[i].state, end)
            entries[i].keep(now)

    def _force(self, entries: list[Entry], charges: list[Charge], now: i64, end: i64) -> None:
        """Take all costs, and slots until `end` (0: none), whatever is left."""
        for i in range(len(entries)):
            entries[i].find(now)  # again: a finalizer may have been quicker
        self._spend(entries, charges, now, end)

    def _waits(self, entries: list[Entry], now: i64, end: i64) -> bool:
        """Find the states of entries, and say whether any of them has to wait."""
        waits = False
        for i in range(len(entries)):
            entries[i].find(now)
            if end == 0 and entries[i].limit.counts_slots:
                entries[i].wait = 0  # the hold has its slot
            waits = waits or entries[i].wait != 0
        return waits

    def _decide(self, entries: list[Entry], denied: bool, low: i64, now: i64) -> tuple[Decision, ...]:
        """The decision on each entry that was taken, or denied."""
        if denied and self._lacks_room(entries):
            return tuple([self._tables.deny_for_room(entry.limit) for entry in entries])
        return tuple(decide_each(entries, CHECK, not denied, now, low))

    def _count(self, held: MemoryHold, actual: tuple[int, ...], now: i64) -> None:
        """Count `actual` for each ask of a hold instead of what is counted now."""
        for piece, counted, cost in self._corrections(held, actual):
            entry = self._found(piece, now)
            piece.correct(entry.state, now, counted, cost)
            entry.keep(now)

    def _corrections(self, held: MemoryHold, actual: tuple[int, ...]) -> list[tuple[HeldPiece, int, int]]:
        """The pieces of a hold, each with what is counted now and what is to be counted."""
        found: list[tuple[HeldPiece, int, int]] = []
        for place in range(len(held.costs)):
            counted = 0 if held.released else held.costs[place]
            for _ in range(held.spans[place]):
                found.append((held.pieces[len(found)], counted, actual[place]))
        return found

    def _free_slots(self, held: MemoryHold, now: i64) -> None:
        """Free the slots of a hold whose lease has not ended; those of others are free already."""
        if held.end > now:
            self._move_slots(held, now, 0)

    def _move(self, held: MemoryHold, now: i64, end: i64) -> None:
        """Let the lease of an open hold end at another time."""
        if end != held.end:
            self._move_slots(held, now, 0 if end <= now else end)
            held.end = end
            self._expect_release(held)
            if end <= now:
                self.release_due(now)

    def _move_slots(self, held: MemoryHold, now: i64, end: i64) -> None:
        for piece in held.pieces:
            if piece.limit.counts_slots:
                entry = self._found(piece, now)
                piece.limit.free_slot(entry.state, held.end)
                if end != 0:
                    piece.limit.take_slot(entry.state, end)
                    entry.keep(now)  # its key may have been forgotten, but not the hold, which belongs to another

    def _answer(self, held: MemoryHold, asks: Sequence[Ask], low: i64, now: i64, verb: Verb = CHARGE) -> HoldAnswer:
        """What has become of a hold: for CHECK with a decision that passed, otherwise as a peek would say."""
        pieces = pieces_of(asks)
        parts = self._peek(pieces, verb, low, now)
        return HoldAnswer(_binding(parts, asks, pieces), held.state_at(now), held.costs, held.left(now), parts)

    def _peek(self, pieces: Sequence[Ask], verb: Verb, low: i64, now: i64) -> tuple[Decision, ...]:
        """The decision on each piece right now."""
        entries = [self._entry(ask, 1, now) for ask in pieces]
        for entry in entries:
            entry.find(now)
        return tuple(decide_each(entries, verb, True, now, low))

    # Leases that end, and holds that are forgotten -------------------------------------------------------------------

    def _expect_release(self, held: MemoryHold) -> None:
        if held.release:
            self._made += 1
            heapq.heappush(self._due, (held.end, self._made, held))
            self._tables.due = self._due[0][0]

    def release_due(self, now: i64) -> None:
        """Give back the costs of holds that have expired by now, if their terms say so."""
        while self._due and self._due[0][0] <= now:
            end, _, held = heapq.heappop(self._due)
            if held.state == OPEN and held.end == end and not held.released:
                self._count(held, (0,) * len(held.costs), now)
                held.released = True
                self._record_release(held, now)
        self._tables.due = self._due[0][0] if self._due else LATER

    def _find(self, name: str, key: str, hold_id: str, now: i64) -> MemoryHold | None:
        holds = self._by_key.get((name, key))
        held = None if holds is None else holds.by_id.get(hold_id)
        if held is not None and held.end + held.keep <= now:
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
        holds = self._by_key.get((name, key))
        most = min(most, MAX_OPEN_HOLDS)
        if holds is not None and holds.open >= most and holds.open_at(now) >= most:
            refuse_more_holds(key, most)

    def _of_key(self, name: str, key: str) -> list[MemoryHold]:
        holds = self._by_key.get((name, key))
        return [] if holds is None else list(holds.by_id.values())

    def _add(self, held: MemoryHold) -> None:
        holds = self._by_key.get((held.name, held.key))
        if holds is None:
            holds = self._by_key[held.name, held.key] = KeyHolds()
        holds.by_id[held.hold_id] = held
        if held.state == OPEN:
            holds.open += 1
        self._all.append(held)

    def _remember(self, held: MemoryHold) -> None:
        """Remember a hold that was settled, and forget the oldest ones if there are too many."""
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

    def _sweep(self, now: i64) -> None:
        """Forget a few holds that ended long ago."""
        for _ in range(_SWEPT_AT_ONCE):
            if not self._all:
                break
            held = self._all.popleft()
            if held.forgotten:
                self._forgotten -= 1
            elif held.end + held.keep <= now:
                self._forget(held)
                self._forgotten -= 1
            else:
                self._all.append(held)
        while self._ended and self._ended[0].forgotten:
            self._ended.popleft()

    def _forget(self, held: MemoryHold) -> None:
        if not held.forgotten:
            self._record_forgotten(held)
            self._drop(held)

    def _drop(self, held: MemoryHold) -> None:
        held.forgotten = True
        self._forgotten += 1
        holds = self._by_key[held.name, held.key]
        del holds.by_id[held.hold_id]
        if not holds.by_id:
            del self._by_key[held.name, held.key]

    def under(self, name: str, limit: Limit, key: str | None = None) -> list["MemoryHold"]:
        """The holds under a name that have taken something of a limit, of all keys or of one."""
        counted = {piece.identity for piece in limit.pieces}
        keys = [key] if key is not None else [one[1] for one in self._by_key if one[0] == name]
        found = [held for one in keys for held in self._of_key(name, one)]
        return [held for held in found if not counted.isdisjoint([piece.limit.identity for piece in held.pieces])]

    def forget(self, holds: list["MemoryHold"]) -> None:
        """Forget some holds: nothing that they have taken comes back."""
        for held in holds:
            held.state = CANCELLED
            self._drop(held)

    def forget_all(self) -> None:
        self.forget([held for holds in self._by_key.values() for held in holds.by_id.values()])

    # For a file that remembers them: called within each verb, before it is answered ----------------------------------

    def _record_hold(self, held: MemoryHold, asks: Sequence[Ask], terms: HoldTerms, now: i64) -> None:
        """Called when a hold has taken its costs. What it raises gives them back first."""

    def _record_settlement(self, held: MemoryHold, state: HoldState, actual: tuple[int, ...], now: i64) -> None:
        """Called before a hold is settled."""

    def _record_extension(self, held: MemoryHold, charges: list[Charge], more: list[int], end: i64, now: i64) -> None:
        """Called when a hold has taken more costs, if any, before its lease is moved. What it raises undoes that."""

    def _record_release(self, held: MemoryHold, now: i64) -> None:
        """Called when an expired hold has given back its costs."""

    def _record_forgotten(self, held: MemoryHold) -> None:
        """Called when a hold is forgotten because it ended long ago."""


def _binding(parts: tuple[Decision, ...], asks: Sequence[Ask], pieces: Sequence[Ask]) -> Decision:
    """Of the decisions on some pieces the one that bound, as one on the asks."""
    if len(parts) == 1 or parts[0].degraded:  # without room for one of them, none is asked
        return parts[0]
    return place_in(binding_of(list(parts)), asks, pieces)


def _add_charge(charges: list[Charge], charge: Charge) -> None:
    """Add a charge; beyond the bound its cost joins the last one, which is older, so that less may be given back."""
    if len(charges) < MAX_CHARGES:
        charges.append(charge)
    else:
        charges[-1].cost += charge.cost


def remove_charge(charges: list[Charge], charge: Charge) -> None:
    """Take back the charge that was added last."""
    if charges[-1] is charge:
        charges.pop()
    else:
        charges[-1].cost -= charge.cost
