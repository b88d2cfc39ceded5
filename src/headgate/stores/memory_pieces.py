"""The work of the verbs of holds in memory on the pieces of one hold: take of all of them or of none, and give back.

The garbage collector may run a finalizer at any allocation of an object that it tracks, and that may use the same
limits. So whatever a step needs is made first. From the look at the waits until all costs are taken, or corrected,
nothing is allocated that it tracks.
"""

from collections.abc import Sequence
from typing import Final, NoReturn

from headgate._native import i64
from headgate.errors import refuse
from headgate.limits.decision import Decision, Limit, binding_of
from headgate.limits.meter import Meter
from headgate.stores.asks import Ask, pieces_of, place_in
from headgate.stores.held import Charge, HeldPiece, MemoryHold
from headgate.stores.holds import refuse_uncountable
from headgate.stores.memory_tables import Tables

_FEW: Final = 16  # pieces that are compared one by one


class Demand:
    """The demand of a new hold, or of an extension, on each piece."""

    def __init__(
        self,
        tables: Tables,
        pieces: list[HeldPiece],
        limits: list[Limit],
        asked: list[int],
        charges: list[Charge] | None,
        now: i64,
        end: i64,
    ) -> None:
        """`asked` is what has to be left of each. `charges` are those of an extension; None: the pieces themselves.

        Slots are taken until `end`, or not at all if it is 0.
        """
        self._tables: Final = tables
        self._pieces: Final = pieces
        self._limits: Final = limits
        self._asked: Final = asked
        self._charges: Final = charges
        self._now: Final = now
        self._end: Final = end

    def take(self) -> bool:
        """Take all costs and slots, or nothing: True if it is denied."""
        tables, pieces, charges = self._tables, self._pieces, self._charges
        if tables.size + len(pieces) > tables.max_keys:
            tables.make_room(self._now)
            find_tables(tables, pieces)
        ahead = _ahead(tables, pieces, self._now)
        changes = tables.changes
        self._must_wait(ahead, find=True)
        for i in range(len(pieces)):
            (pieces[i] if charges is None else charges[i]).prepare(pieces[i].state)
        if self._lacks_room():
            return True
        # From here on nothing is allocated that the garbage collector tracks.
        if self._must_wait(ahead, find=changes != tables.changes):
            return True
        for i in range(len(pieces)):
            if isinstance(self._limits[i], Meter) and not self._limits[i].countable(pieces[i].state, self._asked[i]):
                self._refuse_uncountable()
        self._spend()
        return False

    def force(self) -> None:
        """Take all costs and slots, whatever is left."""
        pieces, charges = self._pieces, self._charges
        self._must_wait(_ahead(self._tables, pieces, self._now), find=True)  # again: a finalizer may have spent
        for i in range(len(pieces)):
            cost = (pieces[i] if charges is None else charges[i]).cost
            if not self._limits[i].countable(pieces[i].state, cost):
                self._refuse_uncountable()
        self._spend()

    def decide(self, denied: bool, low: i64) -> tuple[Decision, ...]:
        """The decision on each piece that was taken, or denied."""
        pieces, limits = self._pieces, self._limits
        if denied and self._lacks_room():
            return tuple([self._tables.deny_for_room(limit) for limit in limits])
        parts: list[Decision] = []
        for i in range(len(pieces)):
            cost: i64 = self._asked[i] if denied else 0
            parts.append(limits[i].decide(pieces[i].state, self._now, cost, pieces[i].wait if denied else 0, low))
        return tuple(parts)

    def _must_wait(self, ahead: i64, find: bool) -> bool:
        """Say whether any piece has to wait, after finding the states if they aren't known."""
        pieces, limits, asked, now = self._pieces, self._limits, self._asked, self._now
        waits = False
        for i in range(len(pieces)):
            piece = pieces[i]
            if find:
                piece.find(limits[i], asked[i], now, ahead)
            else:
                piece.wait = limits[i].wait(piece.state, now, asked[i])
            if self._end == 0 and piece.table.slots:
                piece.wait = 0  # the hold has its slot
            waits = waits or piece.wait != 0
        return waits

    def _lacks_room(self) -> bool:
        new: i64 = 0
        for piece in self._pieces:
            if piece.wait != 0:
                return False
            if not piece.known:
                new += 1
        return new > 0 and self._tables.size + new > self._tables.max_keys

    def _spend(self) -> None:
        pieces, charges = self._pieces, self._charges
        for i in range(len(pieces)):
            piece = pieces[i]
            if charges is None:
                piece.take(piece.state, self._now)
            else:
                charges[i].take(piece.state, self._now)
            if self._end != 0 and piece.table.slots:
                piece.limit.take_slot(piece.state, self._end)
            piece.keep(self._now)

    def _refuse_uncountable(self) -> NoReturn:
        for piece in self._pieces:
            piece.leave()
        refuse_uncountable()


def find_tables(tables: Tables, pieces: list[HeldPiece]) -> None:
    """Find the tables of a hold again: those without entries may have been dropped."""
    for piece in pieces:
        if piece.table.dropped:
            piece.table = tables.table_of(piece.table.name, piece.limit)


def charge_more(
    tables: Tables,
    held: MemoryHold,
    pieces: list[HeldPiece],
    before: tuple[int, ...],
    actual: tuple[int, ...],
    now: i64,
) -> None:
    """Count `actual` for each ask of a hold that costs more than `before`, which is counted now."""
    more = False
    for i in range(len(before)):
        more = more or actual[i] > before[i]
    if not more:  # as most
        return
    places = held.places()
    ahead = _ahead(tables, pieces, now)
    for i in range(len(pieces)):
        piece = pieces[i]
        place = i if places is None else places[i]
        if actual[place] > before[place]:
            piece.find(piece.limit, 0, now, ahead)
            piece.count(piece.state, now, before[place], actual[place])
            piece.keep(now)
            piece.leave()


def give_back(
    tables: Tables,
    held: MemoryHold,
    pieces: list[HeldPiece],
    before: tuple[int, ...],
    actual: tuple[int, ...],
    now: i64,
) -> None:
    """Count `actual` for each ask of a hold that costs less than `before`. The states stay with the pieces."""
    places = held.places()
    ahead = _ahead(tables, pieces, now)
    for i in range(len(pieces)):
        piece = pieces[i]
        piece.find(piece.limit, 0, now, ahead)
        place = i if places is None else places[i]
        if actual[place] < before[place]:
            piece.count(piece.state, now, before[place], actual[place])
        piece.keep(now)


def free_slots(pieces: list[HeldPiece], end: i64, now: i64) -> None:
    """Free the slots of a hold whose lease, until `end`, has not ended; those of others are free already."""
    if end > now:
        for piece in pieces:
            if piece.table.slots:
                piece.find(piece.limit, 0, now, 0)
                piece.limit.free_slot(piece.state, end)
                piece.leave()


def take_slots(pieces: list[HeldPiece], end: i64, now: i64) -> None:
    """Take the slots of a hold until `end`."""
    for piece in pieces:
        if piece.table.slots:
            piece.find(piece.limit, 0, now, 0)
            piece.limit.take_slot(piece.state, end)
            piece.keep(now)  # its key may have been forgotten, but not the hold, which belongs to another
            piece.leave()


def peek(tables: Tables, asks: Sequence[Ask], cost: i64, low: i64, now: i64) -> tuple[Decision, ...]:
    """The decision on each piece right now."""
    parts: list[Decision] = []
    for ask in pieces_of(asks):
        limit = ask.limit
        piece = HeldPiece(tables.table_at_hand(ask.name, limit), ask.key, limit, 0, ask.root)
        piece.find(limit, cost, now, tables.wall_ahead(now) if piece.table.calendar else 0)
        parts.append(limit.decide(piece.state, now, cost, 0 if cost == 0 else piece.wait, low))
    return tuple(parts)


def binding(parts: tuple[Decision, ...], asks: Sequence[Ask]) -> Decision:
    """Of the decisions on some pieces the one that bound, as one on the asks."""
    if len(parts) == 1 or parts[0].degraded:  # without room for one of them, none is asked
        return parts[0]
    bound = binding_of(parts)
    return bound if len(parts) == len(asks) else place_in(bound, asks, pieces_of(asks))


def same_limits(pieces: list[HeldPiece], asks: Sequence[Ask]) -> list[Limit] | None:
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


def refuse_twice(tables: Tables, pieces: list[HeldPiece]) -> None:
    """Refuse a key that is asked for twice."""
    if len(pieces) > _FEW:
        if len({(id(piece.table), piece.key) for piece in pieces}) < len(pieces):
            refuse("asks", "each key once", [piece.key for piece in pieces])
        return
    tables.verbs += 1
    verb = tables.verbs
    for i in range(len(pieces)):
        table = pieces[i].table
        if table.asked_by >= verb:  # perhaps for the same key
            for j in range(i):
                if pieces[j].table is table and pieces[j].key == pieces[i].key:
                    refuse("asks", "each key once", [piece.key for piece in pieces])
        table.asked_by = verb


def _ahead(tables: Tables, pieces: list[HeldPiece], now: i64) -> i64:
    """The time to add to the store's to get that of day, if any of them needs it."""
    for piece in pieces:
        if piece.table.calendar:
            return tables.wall_ahead(now)
    return 0
