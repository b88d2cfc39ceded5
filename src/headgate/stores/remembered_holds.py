"""Holds, budgets and meters in memory that a file remembers.

A verb is written before it is answered, and isn't done if it can't be written. Buckets and windows aren't remembered:
a hold of an earlier process gives nothing back to them.
"""

import gc
from collections.abc import Sequence
from typing import Final

from headgate._native import i64
from headgate.errors import StoreError
from headgate.limits.budget import Budget, BudgetState
from headgate.limits.decision import Limit, State
from headgate.limits.meter import Meter, MeterState
from headgate.stores.base import Ask
from headgate.stores.held import Charge, HeldPiece, MemoryHold
from headgate.stores.hold_terms import LONGEST_LEASE
from headgate.stores.holds import OPEN, HoldState, HoldTerms
from headgate.stores.memory_file import BudgetRow, CountRow, HoldKey, HoldRow, MemoryFile, MeterRow
from headgate.stores.memory_holds import MemoryHolds
from headgate.stores.memory_pieces import free_slots, give_back
from headgate.stores.memory_tables import Entry, Tables

_LONGEST: Final[i64] = LONGEST_LEASE
_NOWHERE: Final = -1  # the mark of a charge in a bucket or window that is gone


class RememberedHolds(MemoryHolds):
    """The holds of one store, its budgets and its meters, beginning with those in a file."""

    def __init__(self, tables: Tables, max_ended: int, file: MemoryFile) -> None:
        super().__init__(tables, max_ended)
        self.file: Final = file
        collects = gc.isenabled()
        gc.disable()  # it would look at all that has been read again and again: with many holds, for half of the time
        try:
            self._restore_all()
        finally:
            if collects:
                gc.enable()

    @property
    def remembers(self) -> bool:
        return True

    def _restore_all(self) -> None:
        now = self._tables.now()
        ahead = self._tables.wall_ahead(now)
        for row in self.file.take_budgets():
            table = self._tables.table_of(row.name, row.limit)
            table.add(row.key, BudgetState(row.start, row.used, ahead))
            table.split()
        for day in self.file.take_meters():
            self._restore_day(day, ahead)
        for hold in self.file.take_holds():
            self._restore(hold, now, ahead)

    def _restore_day(self, row: MeterRow, ahead: i64) -> None:
        table = self._tables.table_of(row.name, row.limit)
        state = table.find(row.key)
        if state is None:
            state = MeterState()
            state.ahead = ahead
            state.root = row.root
            table.add(row.key, state)
            table.split()
        assert isinstance(state, MeterState)
        state.count(row.start, row.amount)

    def _restore(self, row: HoldRow, now: i64, ahead: i64) -> None:
        held = self._made(row.asks, tuple([ask.cost for ask in row.asks]), row.terms, now)
        held.status = row.state
        held.released = row.released
        held.end = min(row.end - ahead, now + _LONGEST)  # the time of day may have been set back
        held.set_costs(tuple([ask.cost for ask in row.asks]))
        self._add(held)
        if held.status != OPEN:
            return
        for piece, charges in zip(held.pieces(), row.charges, strict=True):
            piece.cost = charges[0][0]
            _set_marks(piece, charges[0][1])
            for cost, mark in charges[1:]:
                charge = Charge(piece.limit, cost)
                _set_marks(charge, mark)
                piece.add(charge)
            if piece.table.slots and held.end > now:
                piece.find(piece.limit, 0, now, 0)
                piece.limit.take_slot(piece.state, held.end)
                piece.keep(now)
                piece.leave()
        self._expect_release(held)

    def wall(self) -> int:
        """The time of day, in microseconds since 1970."""
        now = self._tables.now()
        return now + self._tables.wall_ahead(now)

    # Verbs on budgets and meters --------------------------------------------------------------------------------------

    def record_spent(self, entries: list[Entry], now: i64) -> None:
        """Write what has been spent; if that isn't possible, it is given back."""
        rows = [_entry_row(one, one.state) for one in entries if _is_remembered(one.limit)]
        if rows:
            try:
                self.file.count(now + self._tables.wall_ahead(now), rows)
            except BaseException:
                for entry in entries:
                    entry.limit.refund(entry.state, entry.cost)
                raise

    def record_refund(self, entries: list[Entry], now: i64) -> None:
        """Write what is about to be given back."""
        rows: list[CountRow] = []
        for entry in entries:
            if _is_remembered(entry.limit):
                state = _copied(entry.state)
                entry.limit.refund(state, entry.cost)
                rows.append(_entry_row(entry, state))
        if rows:
            self.file.count(now + self._tables.wall_ahead(now), rows)

    # Verbs on holds ---------------------------------------------------------------------------------------------------

    def _record_hold(self, held: MemoryHold, asks: Sequence[Ask], terms: HoldTerms, now: i64) -> None:
        ahead = self._tables.wall_ahead(now)
        pieces = held.pieces()
        row = HoldRow(tuple(asks), terms, OPEN, held.end + ahead, False, _charges(pieces))
        try:
            self.file.add_hold(now + ahead, row, _count_rows(pieces, now, ahead))
        except BaseException as error:
            if not isinstance(error, StoreError):  # an interruption: it may have been written
                self.file.forget_later(_key(held))
            costs = held.all_costs()
            free_slots(pieces, held.end, now)
            give_back(self._tables, held, pieces, costs, (0,) * len(costs), now)
            for piece in pieces:
                piece.close_all(piece.state)
            raise

    def _record_settlement(
        self, held: MemoryHold, pieces: list[HeldPiece], status: HoldState, actual: tuple[int, ...], now: i64
    ) -> None:
        ahead = self._tables.wall_ahead(now)
        before, places = held.all_costs(), held.places()
        rows: list[CountRow] = []
        for piece, place in zip(pieces, places or range(len(pieces)), strict=True):
            if _is_remembered(piece.limit):
                piece.find(piece.limit, 0, now, ahead)
                planned = _copied(piece.state)
                piece.count(planned, now, 0 if held.released else before[place], actual[place])
                rows.extend(_piece_rows(piece, planned))
        self.file.change_hold(now + ahead, _key(held), status, now + ahead, actual, None, rows)

    def _record_extension(
        self,
        held: MemoryHold,
        pieces: list[HeldPiece],
        charges: list[Charge],
        before: tuple[int, ...],
        end: i64,
        now: i64,
    ) -> None:
        ahead = self._tables.wall_ahead(now)
        taken = _charges(pieces) if charges else None
        rows = _count_rows(pieces, now, ahead) if charges else []
        try:
            self.file.change_hold(now + ahead, _key(held), OPEN, end + ahead, held.all_costs(), taken, rows)
        except BaseException:
            for piece, charge in zip(pieces, charges, strict=False):
                piece.find(piece.limit, 0, now, ahead)
                charge.correct(piece.state, now, charge.cost, 0)
                charge.close(piece.state)
                piece.remove(charge)
                piece.leave()
            held.set_costs(before)
            raise

    def _record_release(self, held: MemoryHold, pieces: list[HeldPiece], now: i64) -> None:
        self.file.release_later(_key(held), _count_rows(pieces, now, self._tables.wall_ahead(now)))

    def _record_forgotten(self, held: MemoryHold) -> None:
        self.file.forget_later(_key(held))


def _count_rows(pieces: list[HeldPiece], now: i64, ahead: i64) -> list[CountRow]:
    rows: list[CountRow] = []
    for piece in pieces:
        if _is_remembered(piece.limit):
            piece.find(piece.limit, 0, now, ahead)
            rows.extend(_piece_rows(piece, piece.state))
            piece.leave()
    return rows


def _is_remembered(limit: Limit) -> bool:
    return isinstance(limit, (Budget, Meter))


def _entry_row(entry: Entry, state: State) -> CountRow:
    """The present count of an entry."""
    day = state.newest if isinstance(state, MeterState) else 0
    return _row(entry.table.name, entry.key, entry.root, entry.limit, state, day)


def _piece_rows(piece: HeldPiece, state: State) -> list[CountRow]:
    """The counts of a piece of a hold: of a meter, on each day on which the hold was charged."""
    days = {charge.mark for charge in piece.charges()} if isinstance(piece.limit, Meter) else {0}
    return [_row(piece.table.name, piece.key, piece.root, piece.limit, state, day) for day in days]


def _row(name: str, key: str, root: str, limit: object, state: object, day: int) -> CountRow:
    if isinstance(state, MeterState):
        assert isinstance(limit, Meter)
        return MeterRow(name, limit, key, state.root or root, day, state.used_on(day))
    assert isinstance(limit, Budget)
    assert isinstance(state, BudgetState)
    return BudgetRow(name, limit, key, state.start, state.used)


def _copied(state: State) -> State:
    if isinstance(state, MeterState):
        return state.copy()
    assert isinstance(state, BudgetState)
    return BudgetState(state.start, state.used, state.ahead)


def _key(held: MemoryHold) -> HoldKey:
    return HoldKey(held.table.name, held.key, held.hold_id)


def _charges(pieces: list[HeldPiece]) -> list[list[tuple[int, int]]]:
    return [
        [(one.cost, one.mark if _is_remembered(piece.limit) else _NOWHERE) for one in piece.charges()]
        for piece in pieces
    ]


def _set_marks(charge: Charge, mark: i64) -> None:
    charge.mark = mark
    if charge.marks is not None:
        for i in range(len(charge.marks)):
            charge.marks[i] = mark
