"""The file in which a `MemoryStore` remembers budgets, meters and holds, in SQLite.

Each verb is one transaction, committed before it is answered, so that a kill loses nothing that was answered. Moments
are those of the time of day, in microseconds since 1970: the store's own clock begins anew with each boot.

What happens by itself, at the end of a lease, would happen again after a restart. It is written with the next verb.
"""

import json
import logging
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from os import PathLike
from secrets import token_hex
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from headgate.errors import InvalidInput, StoreError, refuse
from headgate.limits.budget import KEPT as BUDGET_KEPT
from headgate.limits.budget import Budget
from headgate.limits.decision import Limit
from headgate.limits.meter import KEPT, Meter
from headgate.limits.notation import parse
from headgate.limits.numbers import LARGEST
from headgate.stores.base import Ask
from headgate.stores.holds import CANCELLED, MAX_CHARGES, OPEN, SETTLED, HoldState, HoldTerms
from headgate.stores.sqlite_file import FileKind, SqliteFile

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS owner (number INTEGER PRIMARY KEY, token TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS budgets (
    name BLOB NOT NULL, budget TEXT NOT NULL, key BLOB NOT NULL, start INTEGER NOT NULL, ends INTEGER NOT NULL,
    used INTEGER NOT NULL, UNIQUE (name, budget, key)
);
CREATE INDEX IF NOT EXISTS budgets_by_end ON budgets (ends);
CREATE TABLE IF NOT EXISTS holds (
    name BLOB NOT NULL, key BLOB NOT NULL, id BLOB NOT NULL, asks TEXT NOT NULL, release INTEGER NOT NULL,
    keep INTEGER NOT NULL, state TEXT NOT NULL, costs TEXT NOT NULL, charges TEXT NOT NULL, ends INTEGER NOT NULL,
    released INTEGER NOT NULL, note BLOB NOT NULL DEFAULT x'', shape BLOB NOT NULL DEFAULT x'',
    forced INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (name, key, id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS meters (
    name BLOB NOT NULL, meter TEXT NOT NULL, key BLOB NOT NULL, root BLOB NOT NULL, start INTEGER NOT NULL,
    amount INTEGER NOT NULL, UNIQUE (name, meter, key, start)
);
CREATE INDEX IF NOT EXISTS meters_by_start ON meters (start)
"""
_UPGRADE: Final = """
ALTER TABLE holds ADD COLUMN note BLOB NOT NULL DEFAULT x'';
ALTER TABLE holds ADD COLUMN shape BLOB NOT NULL DEFAULT x'';
ALTER TABLE holds ADD COLUMN forced INTEGER NOT NULL DEFAULT 0
"""
_KIND: Final = FileKind(
    "file of budgets and holds", 2, _SCHEMA, StoreError, application=0x68676D66, exclusive=True, upgrade=_UPGRADE
)

_PUT: Final = (
    "INSERT INTO budgets (name, budget, key, start, ends, used) VALUES (?, ?, ?, ?, ?, ?) "
    "ON CONFLICT DO UPDATE SET start = excluded.start, ends = excluded.ends, used = excluded.used"
)
_DROP_BUDGET: Final = "DELETE FROM budgets WHERE name = ? AND budget = ?"
_DROP: Final = f"{_DROP_BUDGET} AND key = ?"
_DROP_ENDED: Final = (
    "DELETE FROM budgets WHERE rowid IN (SELECT rowid FROM budgets WHERE ends <= ? ORDER BY ends LIMIT ?)"
)
_PUT_DAY: Final = (
    "INSERT INTO meters (name, meter, key, root, start, amount) VALUES (?, ?, ?, ?, ?, ?) "
    "ON CONFLICT DO UPDATE SET amount = excluded.amount"
)
_DROP_METER: Final = "DELETE FROM meters WHERE name = ? AND meter = ?"
_DROP_DAY: Final = f"{_DROP_METER} AND key = ? AND start = ?"
_DROP_OLD_DAYS: Final = (
    "DELETE FROM meters WHERE rowid IN (SELECT rowid FROM meters WHERE start <= ? ORDER BY start LIMIT ?)"
)
_HOLD: Final = "name = ? AND key = ? AND id = ?"
_ADD_HOLD: Final = f"INSERT OR REPLACE INTO holds VALUES ({', '.join('?' * 14)})"  # noqa: S608 - constants
_CHANGE_HOLD: Final = f"UPDATE holds SET state = ?, costs = ?, charges = coalesce(?, charges), ends = ? WHERE {_HOLD}"  # noqa: S608
_RELEASE_HOLD: Final = f"UPDATE holds SET released = 1 WHERE {_HOLD}"  # noqa: S608
_DROP_HOLD: Final = f"DELETE FROM holds WHERE {_HOLD}"  # noqa: S608
_DROP_FORGOTTEN: Final = (
    "DELETE FROM holds WHERE ends <= ? - keep AND NOT (state = 'open' AND release AND NOT released)"
)

_LATER: Final = 2**62
_DROPPED_AT_ONCE: Final = 4  # budgets of periods that have been over for a day, with each verb
_DAYS_AT_ONCE: Final = 100  # of meters, that are too old
_DAYS_EVERY: Final = 3_600_000_000  # microseconds from one look for days that are too old to the next
_FAILURE: Final = "nothing was counted, since it can't be written"
_UNREADABLE: Final = (InvalidInput, LookupError, TypeError, ValueError, ArithmeticError, RecursionError)

T = TypeVar("T")
_Rows: TypeAlias = list[tuple[Any, ...]]
_Statement: TypeAlias = tuple[str, tuple[object, ...]]

_METER: Final = re.compile(r"metered in (\S+)")

_log = logging.getLogger("headgate")


class BudgetRow(NamedTuple):
    """The usage of a budget in the period that began at `start`."""

    name: str
    limit: Budget
    """Any with the same identity: the amount isn't stored."""
    key: str
    start: int
    used: int


class MeterRow(NamedTuple):
    """The count of a meter on the day that began at `start`."""

    name: str
    limit: Meter
    key: str
    root: str
    start: int
    amount: int


CountRow: TypeAlias = BudgetRow | MeterRow


class HoldKey(NamedTuple):
    """The key of a hold: its name, key and id."""

    name: str
    key: str
    hold_id: str


class HoldRow(NamedTuple):
    """A hold."""

    asks: tuple[Ask, ...]
    """With its costs: the reserved ones, in the end the settled ones."""
    terms: HoldTerms
    """All but the lease."""
    state: HoldState
    end: int
    """Of its lease, or when it was settled."""
    released: bool
    charges: list[list[tuple[int, int]]]
    """Of each piece of each ask: the cost and the mark of each charge. Those of budgets and meters are of use later."""


class MemoryFile(SqliteFile):
    """A file that one process has for itself. `now` is the time of day, when it is opened.

    `readable`: others can read it meanwhile, as for a backup. Then nothing but the caller keeps others from opening it.
    """

    def __init__(self, path: str | PathLike[str], now: int, *, readable: bool = False) -> None:
        self._now: Final = now
        self._tokens: Final[list[str]] = []  # that this process has written, each when it opened the file
        self._pending: Final[list[_Statement]] = []  # for the next transaction
        self._periods: Final[dict[object, tuple[str, Budget, int, int]]] = {}  # of each budget, the last that was seen
        self._first_end = 0  # of a budget's period, or earlier
        self._next_days = 0  # when to look for days that are too old
        self._rows: tuple[_Rows, _Rows, _Rows] = ([], [], [])  # of budgets, meters and holds, until they are taken
        super().__init__(path, _KIND._replace(readable=readable))

    def _prepare(self, file: sqlite3.Connection) -> None:
        found = file.execute("SELECT token FROM owner").fetchone()
        if not self._tokens:
            self._rows = self._read(file)
        elif found is None or found[0] not in self._tokens:
            raise StoreError(
                f"{self._path}: expected a file that no other process has used since a fork, got one that was used; "
                "restart this process"
            )
        self._tokens.append(token_hex(8))
        file.execute("INSERT OR REPLACE INTO owner VALUES (1, ?)", self._tokens[-1:])

    # Reading, once ----------------------------------------------------------------------------------------------------

    def _read(self, file: sqlite3.Connection) -> tuple[_Rows, _Rows, _Rows]:
        file.execute("DELETE FROM budgets WHERE ends <= ?", (self._now - BUDGET_KEPT,))
        file.execute("DELETE FROM meters WHERE start <= ?", (self._now - KEPT,))
        file.execute(_DROP_FORGOTTEN, (self._now,))
        budgets = file.execute("SELECT name, budget, key, start, used FROM budgets").fetchall()
        meters = file.execute("SELECT name, meter, key, root, start, amount FROM meters ORDER BY start").fetchall()
        return budgets, meters, file.execute("SELECT * FROM holds ORDER BY ends").fetchall()

    def take_budgets(self) -> Iterator[BudgetRow]:
        """The budgets when the file was opened, once."""
        rows, self._rows = self._rows[0], ([], *self._rows[1:])
        return self._readable(rows, _budget_row)

    def take_meters(self) -> Iterator[MeterRow]:
        """The counts of meters when the file was opened, once: older days come first."""
        rows, self._rows = self._rows[1], (self._rows[0], [], self._rows[2])
        return self._readable(rows, _meter_row)

    def take_holds(self) -> Iterator[HoldRow]:
        """The holds when the file was opened, once: those that end first come first."""
        rows, self._rows = self._rows[2], (*self._rows[:2], [])
        return self._readable(rows, _hold_row)

    def _readable(self, rows: _Rows, read: Callable[..., T]) -> Iterator[T]:
        skipped, reason = 0, ""
        for row in rows:
            try:
                found = read(*row)
            except _UNREADABLE as error:
                skipped, reason = skipped + 1, str(error)
            else:
                yield found
        if skipped:
            _log.warning("%s: %d unreadable rows are skipped; the last one: %.200s", self._path, skipped, reason)

    # Writing ----------------------------------------------------------------------------------------------------------

    def count(self, now: int, counts: Sequence[CountRow]) -> None:
        """Write what is used of some budgets and meters."""
        with self._verb(now, counts):
            return

    def add_hold(self, now: int, hold: HoldRow, counts: Sequence[CountRow]) -> None:
        """Write a new hold."""
        first, terms = hold.asks[0], hold.terms
        asks = json.dumps([(ask.name, ask.key, str(ask.limit), ask.root) for ask in hold.asks])
        fixed = asks, int(terms.release), terms.keep
        costs = json.dumps([ask.cost for ask in hold.asks])
        changing = hold.state, costs, json.dumps(hold.charges), hold.end, int(hold.released)
        kept = _bytes(terms.note), _bytes(terms.shape), int(terms.forced)
        key = _stored(HoldKey(first.name, first.key, terms.hold_id))
        with self._verb(now, counts):
            self._file.execute(_ADD_HOLD, (*key, *fixed, *changing, *kept))

    def change_hold(
        self,
        now: int,
        key: HoldKey,
        state: HoldState,
        end: int,
        costs: Sequence[int],
        charges: list[list[tuple[int, int]]] | None,
        counts: Sequence[CountRow],
    ) -> None:
        """Write what has become of a hold. No charges: those that it has."""
        changed = state, json.dumps(costs), None if charges is None else json.dumps(charges), end
        with self._verb(now, counts):
            self._file.execute(_CHANGE_HOLD, (*changed, *_stored(key)))

    def forget(
        self, now: int, name: str, key: str | None, limits: Iterable[object], holds: Iterable[tuple[str, str, str]]
    ) -> None:
        """Delete some holds, and what a key, or every key, has used of the budgets and meters among some limits."""
        of_key, keys = ("", ()) if key is None else (" AND key = ?", (_bytes(key),))
        with self._verb(now, ()):
            for hold in holds:
                self._file.execute(_DROP_HOLD, _stored(hold))
            for limit in limits:
                if isinstance(limit, Budget):
                    self._file.execute(_DROP_BUDGET + of_key, (_bytes(name), self._text(limit), *keys))
                elif isinstance(limit, Meter):
                    self._file.execute(_DROP_METER + of_key, (_bytes(name), str(limit), *keys))

    def reset(self, now: int) -> None:
        """Delete everything."""
        with self._verb(now, ()):
            self._file.execute("DELETE FROM holds")
            self._file.execute("DELETE FROM budgets")
            self._file.execute("DELETE FROM meters")

    def probe(self) -> None:
        """After a failure: write something, to see whether that is possible again."""
        with suppress(StoreError), self._verb(self._now, ()):
            self._file.execute("UPDATE owner SET token = token")

    def release_later(self, key: HoldKey, counts: Sequence[CountRow]) -> None:
        """Write with the next verb that a hold has given back its costs."""
        self._pending.append((_RELEASE_HOLD, _stored(key)))
        self._pending.extend([self._put(row) for row in counts])

    def forget_later(self, key: HoldKey) -> None:
        """Delete a hold with the next verb."""
        self._pending.append((_DROP_HOLD, _stored(key)))

    @contextmanager
    def _verb(self, now: int, counts: Sequence[CountRow]) -> Iterator[None]:
        """The transaction of a verb."""
        with self._transaction(_FAILURE):
            pending = len(self._pending)
            for statement, values in [*self._pending, *[self._put(row) for row in counts]]:
                self._file.execute(statement, values)
            yield
            if now - BUDGET_KEPT >= self._first_end:
                self._file.execute(_DROP_ENDED, (now - BUDGET_KEPT, _DROPPED_AT_ONCE))
                (first,) = self._file.execute("SELECT MIN(ends) FROM budgets").fetchone()
                self._first_end = _LATER if first is None else first
            if now >= self._next_days:
                dropped = self._file.execute(_DROP_OLD_DAYS, (now - KEPT, _DAYS_AT_ONCE)).rowcount
                self._next_days = now if dropped == _DAYS_AT_ONCE else now + _DAYS_EVERY
        del self._pending[:pending]
        self.failure = ""

    def _put(self, row: CountRow) -> _Statement:
        return self._put_budget(row) if isinstance(row, BudgetRow) else _put_day(row)

    def _put_budget(self, row: BudgetRow) -> _Statement:
        text, budget, start, end = self._period(row.limit)
        if start != row.start:
            end = _LATER if budget.period is None else budget.nearby(row.start)[2]
            self._periods[row.limit.identity] = text, budget, row.start, end
        name, key = _bytes(row.name), _bytes(row.key)
        if row.used == 0:
            return _DROP, (name, text, key)
        self._first_end = min(self._first_end, end)
        return _PUT, (name, text, key, row.start, end, row.used)

    def _text(self, budget: Budget) -> str:
        return self._period(budget)[0]

    def _period(self, budget: Budget) -> tuple[str, Budget, int, int]:
        """How a budget is written, one of its kind, and the start and end of the last period that was seen."""
        found = self._periods.get(budget.identity)
        if found is None:
            one = Budget(1, budget.period, unit=budget.unit, zone=budget.zone)
            found = self._periods[budget.identity] = str(one), one, -1, 0
        return found


def check_path(where: str, remember: object) -> str | PathLike[str]:
    """The path of a file, if it can be one."""
    if not isinstance(remember, (str, PathLike)) or not str(remember) or "://" in str(remember):
        refuse(where, "the path of a file", remember)
    return remember


def _put_day(row: MeterRow) -> _Statement:
    where = _bytes(row.name), str(row.limit), _bytes(row.key)
    if row.amount == 0:
        return _DROP_DAY, (*where, row.start)
    return _PUT_DAY, (*where, _bytes(row.root), row.start, row.amount)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # a key is any string


def _stored(key: tuple[str, ...]) -> tuple[bytes, ...]:
    return tuple([_bytes(text) for text in key])


# Rows, as they are read -----------------------------------------------------------------------------------------------


def _budget_row(name: bytes, text: str, key: bytes, start: object, used: object) -> BudgetRow:
    budget = _limit(text)
    if not isinstance(budget, Budget):
        raise TypeError(f"expected a budget, got {text!r}")
    return BudgetRow(_str(name), budget, _str(key), _whole(start), _whole(used, 1))


def _meter_row(name: bytes, text: str, key: bytes, root: bytes, start: object, amount: object) -> MeterRow:
    meter = _limit(text)
    if not isinstance(meter, Meter):
        raise TypeError(f"expected a meter, got {text!r}")
    return MeterRow(_str(name), meter, _str(key), _str(root), _whole(start), _whole(amount, 1))


def _hold_row(
    name: bytes,
    key: bytes,
    hold_id: bytes,
    asks: str,
    release: object,
    keep: object,
    state: object,
    costs: str,
    charges: str,
    end: object,
    released: object,
    note: bytes,
    shape: bytes,
    forced: object,
) -> HoldRow:
    found = [
        Ask(_text_of(one), _text_of(other), _limit(limit), _whole(cost), _text_of(root[0] if root else ""))
        for (one, other, limit, *root), cost in zip(json.loads(asks), json.loads(costs), strict=True)
    ]
    if (found[0].name, found[0].key) != (_str(name), _str(key)):
        raise ValueError(f"expected a hold of {_str(key)!r}, got one of {found[0].key!r}")
    if state not in (OPEN, SETTLED, CANCELLED):
        raise ValueError(f"expected a state, got {state!r}")
    pieces = sum([len(ask.limit.pieces) for ask in found])
    taken = [[(_whole(cost), _whole(mark, -1)) for cost, mark in piece] for piece in json.loads(charges)]
    if len(taken) != pieces or not all(0 < len(piece) <= MAX_CHARGES for piece in taken):
        raise ValueError(f"expected charges of {pieces} limits, got {charges!r}")
    terms = HoldTerms(
        _str(hold_id),
        0,
        _whole(release, 0, 1) == 1,
        _whole(keep),
        note=_str(note),
        shape=_shape(shape),
        forced=_whole(forced, 0, 1) == 1,
    )
    return HoldRow(tuple(found), terms, state, _whole(end), _whole(released, 0, 1) == 1, taken)


@lru_cache(1024)
def _limit(text: object) -> Limit:
    meter = _METER.fullmatch(_text_of(text))
    return parse(_text_of(text)) if meter is None else Meter(meter[1])


@lru_cache(1024)
def _shape(text: bytes) -> str:
    """The shape of a hold: one object for many."""
    return _str(text)


def _text_of(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, got {value!r}")
    return value


def _str(value: bytes) -> str:
    if not isinstance(value, bytes):
        raise TypeError(f"expected bytes, got {value!r}")
    return value.decode("utf-8", "surrogatepass")


def _whole(value: object, least: int = 0, most: int = LARGEST) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"expected a whole number from {least} to {most}, got {value!r}")
    return value
