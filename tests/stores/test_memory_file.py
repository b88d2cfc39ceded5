"""What a memory store remembers in a file: budgets and holds survive a restart, whatever ends the process."""

import gc
import json
import logging
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from decimal import Decimal
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

from headgate import Hold, HoldError, InvalidInput, Limiter, ManualClock, MemoryStore, StoreError, UnknownHold
from headgate.gate.changes import exemption
from headgate.limits.budget import Budget
from headgate.limits.fixed import UNLIMITED
from headgate.limits.meter import Meter
from headgate.limits.notation import parse
from headgate.stores import conformance
from headgate.stores.account_walks import ACCOUNT_WALKS
from headgate.stores.base import Ask, Change, Store, Verb
from headgate.stores.hold_walks import WALKS, compare_holds, random_hold_steps
from headgate.stores.holds import HoldTerms
from headgate.stores.reference import BudgetModel, Model, SlotsModel
from headgate.stores.sqlite import ChangeLogError, SqliteChangeLog
from tests.support.valkey import PATIENCE

pytestmark = pytest.mark.once

DAY = 86_400
START = 1_800_000  # seconds on the clock, so that a wrong conversion of moments shows


class Restarts:
    """One file, used by one store after another. Each begins with a clock that shows another time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self.clock = ManualClock(START)
        self._store: MemoryStore | None = None

    @property
    def store(self) -> MemoryStore:
        """The store of the process that has the file."""
        if self._store is None:
            self._store = MemoryStore(clock=self.clock, remember=self.path)
        return self._store

    def limiter(self, limit: str, name: str = "llm") -> Limiter:
        return Limiter(limit, store=self.store, name=name)

    def restart(self, down: float = 0) -> None:
        """End the process that has the file, and begin another one after so many seconds."""
        self.close()
        self.clock.advance(down)
        self.clock = RebootedClock(self.clock)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
        self._store = None


class RebootedClock(ManualClock):
    """A clock that begins anew, at the same time of day."""

    def __init__(self, before: ManualClock) -> None:
        super().__init__(17)
        self._ahead = before.wall() - super().wall()

    def wall(self) -> float:
        return super().wall() + self._ahead


@pytest.fixture
def restarts(tmp_path: Path) -> Iterator[Restarts]:
    made = Restarts(tmp_path / "limits.db")
    yield made
    made.close()


def rows(path: Path, table: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as file:
        return file.execute(f"SELECT * FROM {table}").fetchall()


def left(limiter: Limiter, key: str = "a") -> int:
    return limiter.peek(key).remaining


# Budgets --------------------------------------------------------------------------------------------------------------


async def test_the_end_of_a_block_closes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "limits.db"
    with MemoryStore(remember=path) as store:
        Limiter("10 usd in all", store=store).check("a", 4)
    async with MemoryStore(remember=path) as store:
        limiter = Limiter("10 usd in all", store=store)
        assert left(limiter) == 6
    with pytest.raises(StoreError, match="closed"):
        limiter.check("a")


def test_what_is_used_of_a_budget_survives_a_restart(restarts: Restarts) -> None:
    limiter = restarts.limiter("100 tokens/calendar day")
    limiter.check("a", 30)
    limiter.charge("b", 130)
    limiter.charge("c", 50)
    limiter.refund("c", 20)
    limiter.check("d", 5)
    limiter.refund("d", 5)
    restarts.restart()
    assert len(rows(restarts.path, "budgets")) == 3  # what counts nothing isn't stored
    limiter = restarts.limiter("100 tokens/calendar day")
    assert [left(limiter, key) for key in "abcd"] == [70, 0, 70, 100]
    assert not limiter.check("a", 71)
    assert limiter.check("a", 70)


def test_a_budget_in_all_and_a_fraction_survive_and_names_are_apart(restarts: Restarts) -> None:
    restarts.limiter("5 usd in all", "x").charge("a", "1.25")
    restarts.limiter("5 usd in all", "y").charge("a", "4")
    restarts.limiter("5 credits:2/calendar month in Europe/Berlin", "x").charge("a", "0.05")
    restarts.restart(800 * DAY)
    assert not restarts.limiter("5 usd in all", "x").check("a", "3.750001")
    assert restarts.limiter("5 usd in all", "x").check("a", "3.75")
    assert restarts.limiter("6 usd in all", "y").check("a", 2)  # what is used belongs to no amount
    assert left(restarts.limiter("5 credits:2/calendar month in Europe/Berlin", "x")) == 5


def test_a_period_that_is_over_is_not_remembered(restarts: Restarts) -> None:
    restarts.limiter("100/calendar hour").charge("a", 60)
    restarts.limiter("100/calendar month").charge("a", 60)
    restarts.restart(3 * 3600)
    assert left(restarts.limiter("100/calendar hour")) == 100
    assert left(restarts.limiter("100/calendar month")) == 40
    restarts.restart()
    assert len(rows(restarts.path, "budgets")) == 2  # for a day, should the clock step back
    restarts.restart(DAY)
    assert left(restarts.limiter("100/calendar hour")) == 100
    restarts.close()
    assert len(rows(restarts.path, "budgets")) == 1


def test_a_period_that_is_over_is_not_reopened_by_a_restart(restarts: Restarts) -> None:
    restarts.limiter("7/calendar hour").charge("a", 7)
    restarts.clock.advance(3600)
    restarts.limiter("7/calendar hour").check("b")
    restarts.close()
    restarts.clock.step_back(90)
    restarts.restart()
    assert left(restarts.limiter("7/calendar hour")) == 0


def test_budgets_of_past_periods_are_deleted_a_few_with_each_verb(restarts: Restarts) -> None:
    limiter = restarts.limiter("100/calendar hour")
    for number in range(100):
        limiter.check(f"{number}")
    restarts.clock.advance(3600)
    for _ in range(25):
        limiter.check("a")
    restarts.close()
    assert len(rows(restarts.path, "budgets")) == 101
    limiter = restarts.limiter("100/calendar hour")
    restarts.clock.advance(DAY)
    for _ in range(25):
        limiter.check("a")
    restarts.close()
    assert len(rows(restarts.path, "budgets")) == 1


def test_any_string_is_a_key(restarts: Restarts) -> None:
    names = ["", "\0", "\ud800", "ä'\"", "x" * 1000]
    for name in names:
        restarts.limiter("9 in all", name).charge(name, 4)
        assert restarts.limiter("9 in flight", name).hold(name, hold_id=name[:200] or "-")
    restarts.restart()
    assert [left(restarts.limiter("9 in all", name), name) for name in names] == [5] * 5
    assert [left(restarts.limiter("9 in flight", name), name) for name in names] == [8] * 5


def test_a_reset_is_remembered(restarts: Restarts) -> None:
    limiter = restarts.limiter("100 in all; 5 in flight")
    for key in "ab":
        limiter.charge(key, 10)
        limiter.hold(key, 20, hold_id="h")
    assert limiter.reset("a")
    restarts.restart()
    limiter = restarts.limiter("100 in all; 5 in flight")
    assert limiter.list_holds("a") == []
    assert left(limiter, "a") == 5
    assert [hold.id for hold in limiter.list_holds("b")] == ["h"]
    restarts.store.clear("llm", limiter.limit)
    restarts.limiter("9 in all", "other").check("c")
    restarts.restart()
    assert left(restarts.limiter("100 in all; 5 in flight"), "b") == 5
    assert left(restarts.limiter("9 in all", "other"), "c") == 8
    restarts.store.reset()
    restarts.restart()
    assert left(restarts.limiter("9 in all", "other"), "c") == 9
    assert rows_after(restarts) == ([], [])


def rows_after(restarts: Restarts) -> tuple[object, object]:
    restarts.close()
    return rows(restarts.path, "budgets"), rows(restarts.path, "holds")


def test_buckets_and_windows_are_not_remembered_and_not_written(restarts: Restarts) -> None:
    limiter = restarts.limiter("10/minute; 10/hour sliding")
    limiter.check("a", 10)
    restarts.restart()
    assert left(restarts.limiter("10/minute; 10/hour sliding")) == 10
    assert rows_after(restarts) == ([], [])


# Holds ----------------------------------------------------------------------------------------------------------------


def test_an_open_hold_is_settled_after_a_restart(restarts: Restarts) -> None:
    limit = "100 usd/calendar month; 2 in flight"
    hold = restarts.limiter(limit).hold("a", 60, lease=3600, hold_id="h")
    hold.extend("1.5")
    restarts.restart(60)
    limiter = restarts.limiter(limit)
    found = limiter.find_hold("a", "h")
    assert found.state == "open"
    (listed,) = limiter.list_holds("a")
    assert (listed.cost, listed.lease_left) == (Decimal("61.5"), 3540.0)
    assert left(restarts.limiter("100 usd/calendar month")) == 38
    assert left(restarts.limiter("2 in flight")) == 1
    found.settle("0.25")
    assert left(restarts.limiter("100 usd/calendar month")) == 99
    assert left(restarts.limiter("2 in flight")) == 2
    restarts.restart()
    limiter = restarts.limiter(limit)
    assert limiter.find_hold("a", "h").state == "settled"
    assert limiter.find_hold("a", "h").settle("0.25")  # the same again
    with pytest.raises(HoldError, match=r"expected cost 0\.25, with which it is settled"):
        limiter.find_hold("a", "h").settle("0.5")
    assert left(restarts.limiter("100 usd/calendar month")) == 99


def test_a_cancelled_hold_stays_cancelled(restarts: Restarts) -> None:
    restarts.limiter("100 in all").hold("a", 60, hold_id="h").cancel()
    restarts.restart()
    limiter = restarts.limiter("100 in all")
    assert (left(limiter), limiter.find_hold("a", "h").state) == (100, "cancelled")


def test_slots_count_until_the_lease_ends_and_the_time_in_between_counts(restarts: Restarts) -> None:
    limiter = restarts.limiter("2 in flight")
    limiter.hold("a", lease=100)
    limiter.hold("a", lease=200)
    restarts.restart(50)
    limiter = restarts.limiter("2 in flight")
    assert limiter.hold("a").decision.retry_after == 50
    restarts.clock.advance(50)
    assert left(limiter) == 1
    restarts.restart(100)
    limiter = restarts.limiter("2 in flight")
    assert left(limiter) == 2
    assert [hold.state for hold in limiter.list_holds("a")] == ["expired", "expired"]


def test_no_lease_is_longer_than_a_week_after_a_restart_with_a_clock_that_is_behind(restarts: Restarts) -> None:
    assert restarts.limiter("1 in flight").hold("a", lease=60)
    restarts.close()
    restarts.clock.step_back(20 * DAY)
    restarts.restart()
    limiter = restarts.limiter("1 in flight")
    assert [hold.lease_left for hold in limiter.list_holds("a")] == [7 * DAY]
    restarts.clock.advance(7 * DAY)
    assert limiter.hold("a")


def test_an_extended_lease_is_remembered(restarts: Restarts) -> None:
    hold = restarts.limiter("1 in flight").hold("a", lease=60, hold_id="h")
    hold.extend(lease=600)
    restarts.restart(599)
    limiter = restarts.limiter("1 in flight")
    assert limiter.hold("a").decision.retry_after == 1
    with pytest.raises(ZeroDivisionError), limiter.find_hold("a", "h"):
        raise ZeroDivisionError  # ends its lease
    restarts.restart()
    assert left(restarts.limiter("1 in flight")) == 1


@pytest.mark.parametrize("down", [0, 30, 120, 40 * DAY])
def test_costs_come_back_when_a_lease_has_ended_while_no_process_ran(restarts: Restarts, down: int) -> None:
    limiter = restarts.limiter("100 in all")
    limiter.hold("a", 60, lease=60, on_expiry="release", keep=0)
    limiter.hold("a", 5, lease=60)
    restarts.restart(down)
    limiter = restarts.limiter("100 in all")
    assert left(limiter) == (35 if down < 60 else 95)
    restarts.clock.advance(60)
    assert left(limiter) == 95
    restarts.restart(60)
    assert left(restarts.limiter("100 in all")) == 95


def test_costs_that_came_back_come_back_once(restarts: Restarts) -> None:
    limiter = restarts.limiter("100 in all")
    limiter.charge("a", 30)
    limiter.hold("a", 60, lease=60, on_expiry="release", hold_id="h")
    restarts.clock.advance(60)
    assert left(limiter) == 70  # in memory; it is written with the next verb
    restarts.restart()
    limiter = restarts.limiter("100 in all")
    assert left(limiter) == 70
    limiter.charge("a", 1)
    limiter.charge("b", 1)  # what was written with the verb before isn't written again
    restarts.restart()
    limiter = restarts.limiter("100 in all")
    assert left(limiter) == 69
    limiter.find_hold("a", "h").settle(10)
    restarts.restart()
    assert left(restarts.limiter("100 in all")) == 59


def test_a_hold_of_an_earlier_process_gives_nothing_back_to_buckets(restarts: Restarts) -> None:
    limit = "100/hour; 100/hour sliding; 1 in flight"
    restarts.limiter(limit).hold("a", 60, hold_id="h", lease=3600)
    restarts.restart()
    limiter = restarts.limiter(limit)
    for one in ("100/hour", "100/hour sliding"):
        assert left(restarts.limiter(one)) == 100
        restarts.limiter(one).charge("a", 50)
    limiter.find_hold("a", "h").cancel()
    assert [left(restarts.limiter(one)) for one in ("100/hour", "100/hour sliding", "1 in flight")] == [50, 50, 1]


def test_what_was_held_in_another_period_is_not_given_back_to_this_one(restarts: Restarts) -> None:
    restarts.limiter("100/calendar hour").hold("a", 60, hold_id="h", lease=2 * DAY)
    restarts.restart(DAY)
    limiter = restarts.limiter("100/calendar hour")
    limiter.charge("a", 70)
    limiter.find_hold("a", "h").extend(10)
    restarts.restart()
    limiter = restarts.limiter("100/calendar hour")
    assert left(limiter) == 20
    limiter.find_hold("a", "h").cancel()
    assert left(limiter) == 30


def test_a_hold_on_several_asks_is_remembered(restarts: Restarts) -> None:
    asks = [Ask("x", "a", parse("9 in all; 1 in flight"), 3), Ask("y", "b", parse("8 in all"), 4)]
    restarts.store.hold(asks, 200, HoldTerms("h", 60_000_000, False, 60_000_000))
    restarts.restart()
    assert restarts.store.find_hold(asks, 200, "h").costs == (3, 4)
    restarts.store.settle(asks, 200, "h", [2, 6])
    restarts.restart()
    assert left(restarts.limiter("9 in all", "x")) == 7
    assert left(restarts.limiter("8 in all", "y"), "b") == 2


def test_forgotten_holds_are_deleted(restarts: Restarts) -> None:
    limiter = restarts.limiter("1000 in flight")
    for number in range(20):
        limiter.hold("a", lease=60, keep=60, hold_id=f"{number}")
    restarts.clock.advance(120)
    for _ in range(12):
        limiter.hold("b", lease=60).settle()
    restarts.close()
    assert {key for _, key, *_ in rows(restarts.path, "holds")} == {b"b"}
    restarts.restart(10 * DAY)
    restarts.limiter("1000 in flight")
    restarts.close()
    assert rows(restarts.path, "holds") == []


def test_more_settled_holds_than_are_kept_are_deleted(tmp_path: Path) -> None:
    path = tmp_path / "limits.db"
    with closing(MemoryStore(remember=path, max_request_ids=3)) as store:
        limiter = Limiter("1 in flight", store=store)
        for number in range(6):
            limiter.hold("a", hold_id=f"{number}").settle()
    assert len(rows(path, "holds")) == 4  # the last one is deleted with the next verb
    with closing(MemoryStore(remember=path, max_request_ids=2)) as store:
        limiter = Limiter("1 in flight", store=store)
        assert limiter.find_hold("a", "5").state == "settled"
        with pytest.raises(UnknownHold):
            limiter.find_hold("a", "3")


# The model ------------------------------------------------------------------------------------------------------------


CASES = [
    pytest.param(case, id=case.__name__, marks=[pytest.mark.long] if case in (*WALKS, *ACCOUNT_WALKS) else [])
    for case in (*conformance.HOLD_CASES, *conformance.ACCOUNT_CASES)
]
"""The walks take seconds each; in memory they are walked with every change."""


@pytest.mark.parametrize("case", CASES)
def test_conformance(tmp_path: Path, case: conformance.Case) -> None:
    with ExitStack() as stack:
        numbers = count()

        def make(clock: ManualClock) -> MemoryStore:
            path = tmp_path / f"{next(numbers)}.db"
            return stack.enter_context(closing(MemoryStore(clock=clock, remember=path)))

        case(make)


class LaterClock(ManualClock):
    """A clock that began later than another one, and shows the same time of day."""

    def __init__(self, other: ManualClock, began: int) -> None:
        super().__init__()
        self._other, self._began = other, began

    def now(self) -> int:
        return self._other.now() - self._began

    def wall(self) -> float:
        return self._other.wall()


def restarting_store(clock: ManualClock, path: Path, chance: random.Random, stores: list[MemoryStore]) -> Store:
    """A store that begins anew with its file at some of its calls."""

    def call(name: str) -> Callable[..., Any]:
        def forward(_self: object, *arguments: Any, **options: Any) -> Any:
            if not stores or chance.random() < 0.3:
                for store in stores[-1:]:
                    store.close()
                stores.append(MemoryStore(clock=LaterClock(clock, chance.randint(0, clock.now())), remember=path))
            return getattr(stores[-1], name)(*arguments, **options)

        return forward

    methods = [name for name in dir(MemoryStore) if callable(getattr(MemoryStore, name)) and not name.startswith("_")]
    made: Store = type("RestartedStore", (), {"clock": clock} | {name: call(name) for name in methods})()
    return made


@pytest.mark.parametrize("seed", range(2))
def test_restarts_change_nothing(tmp_path: Path, seed: int) -> None:
    """A store of budgets and slots equals the reference, which never restarts."""
    chance = random.Random(seed)
    stores: list[MemoryStore] = []
    for number in range(8):
        budget = BudgetModel(chance.choice((5, 20, 100)), chance.choice((None, "hour", "day")))
        asked: list[list[Model]] = [[budget, SlotsModel(chance.choice((1, 2, 3)))], [BudgetModel(30, None)]]
        asked = asked[: chance.randint(1, 2)]
        steps = random_hold_steps(chance, asked, 40)
        try:
            compare_holds(
                partial(restarting_store, path=tmp_path / f"{number}", chance=chance, stores=stores), asked, steps
            )
        finally:
            stores.pop().close()
            stores.clear()


# A disk that can't be written -----------------------------------------------------------------------------------------


@contextmanager
def full_disk(store: MemoryStore) -> Iterator[None]:
    """Let every write fail."""
    file = store._remembered.file._file  # type: ignore[union-attr]
    file.execute("PRAGMA query_only=1")
    try:
        yield
    finally:
        file.execute("PRAGMA query_only=0")


def test_what_cannot_be_written_is_not_counted(restarts: Restarts) -> None:
    limit = "100 in all; 3 in flight; 50/hour; 60/hour sliding"
    limiter = restarts.limiter(limit)
    parts = [restarts.limiter(part) for part in limit.split("; ")]
    first = limiter.hold("a", 10, hold_id="first")
    extended = limiter.hold("a", 10, hold_id="extended")
    extended.extend(5)
    before = [left(part) for part in parts], limiter.list_holds("a")
    assert before[0] == [75, 1, 25, 35]

    def attempts() -> Iterator[Callable[[], object]]:
        yield lambda: limiter.check("a", 5)
        yield lambda: limiter.charge("a", 50)
        yield lambda: limiter.refund("a", 50)
        yield lambda: limiter.hold("a", 5)
        yield lambda: limiter.hold("new", 5)
        yield lambda: first.settle(3)
        yield lambda: first.settle(30)
        yield first.cancel
        yield lambda: extended.extend(5, lease=600)
        yield lambda: extended.extend(lease=600)
        yield lambda: limiter.reset("a")
        yield restarts.store.reset

    with full_disk(restarts.store):
        for attempt in attempts():
            with pytest.raises(
                StoreError, match=r"limits\.db: nothing was counted, since it can't be written: attempt"
            ):
                attempt()
            assert ([left(part) for part in parts], limiter.list_holds("a")) == before
            assert [left(part, "new") for part in parts] == [100, 3, 50, 60]
        assert not limiter.check("a", 51)  # a denial writes nothing
    first.settle(5)
    assert [left(part) for part in parts] == [80, 2, 30, 40]
    extended.extend(5)
    extended.settle(1)
    assert [left(part) for part in parts] == [94, 3, 44, 54]


def test_charges_beyond_the_bound_are_undone(restarts: Restarts) -> None:
    limiter = restarts.limiter("100 in all")
    hold = limiter.hold("a", 10)
    for _ in range(9):
        hold.extend(1)
    with full_disk(restarts.store), pytest.raises(StoreError):
        hold.extend(1)
    assert left(limiter) == 81
    restarts.restart()
    limiter = restarts.limiter("100 in all")
    assert limiter.find_hold("a", hold.id).settle(2).remaining == 98


def test_a_charge_that_was_undone_gives_nothing_back(restarts: Restarts) -> None:
    limiter = restarts.limiter("100/calendar hour")
    hold = limiter.hold("a", 10, lease=2 * DAY)
    restarts.clock.advance(3600)
    limiter.charge("a", 50)
    with full_disk(restarts.store), pytest.raises(StoreError):
        hold.extend(5)
    hold.settle(4)
    assert left(limiter) == 50


def test_what_came_back_meanwhile_is_written_when_the_disk_can_be(restarts: Restarts) -> None:
    limiter = restarts.limiter("100 in all")
    limiter.hold("a", 60, lease=60, on_expiry="release")
    restarts.clock.advance(60)
    with full_disk(restarts.store), pytest.raises(StoreError):
        limiter.check("a")
    assert left(limiter) == 100
    limiter.check("a")
    restarts.restart()
    assert left(restarts.limiter("100 in all")) == 99


# The file -------------------------------------------------------------------------------------------------------------


def test_a_limiter_opens_and_closes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "limits.db"
    with Limiter("5 in all", remember=path) as limiter:
        assert limiter.private
        limiter.check("a")
    with pytest.raises(StoreError, match=r"nothing was counted.*: Cannot operate on a closed database"):
        limiter.check("a")
    with Limiter("5 in all", store="memory://", remember=str(path)) as limiter:
        assert limiter.check("a").remaining == 3


@pytest.mark.parametrize("store", ["redis://127.0.0.1:1", MemoryStore()])
def test_remember_is_refused_beside_a_store(store: object) -> None:
    with pytest.raises(InvalidInput, match=r"^Limiter remember: expected no store beside it \(.*\), got "):
        Limiter("5 in all", store=store, remember="limits.db")  # type: ignore[arg-type]


@pytest.mark.parametrize("remember", [3, "", "redis://localhost", b"limits.db"])
def test_remember_is_a_path(remember: object) -> None:
    with pytest.raises(InvalidInput, match=r"^MemoryStore remember: expected the path of a file, got "):
        MemoryStore(remember=remember)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"^Limiter remember: expected the path of a file, got "):
        Limiter("5 in all", remember=remember)  # type: ignore[arg-type]


def test_one_store_has_the_file_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.stores.sqlite_file._EXCLUSIVE_TIMEOUT", 0.01)
    path = tmp_path / "limits.db"
    refused = "import sys, headgate; headgate.MemoryStore(remember=sys.argv[1])"
    with closing(MemoryStore(remember=path)):
        with pytest.raises(StoreError, match="expected a file that nobody else uses, got one that is in use"):
            MemoryStore(remember=path)
        done = subprocess.run([sys.executable, "-c", refused, path], capture_output=True, text=True, check=False)
        assert "StoreError" in done.stderr
        assert "in use" in done.stderr
    subprocess.run([sys.executable, "-c", refused, path], check=True)


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    foreign, log, ours = tmp_path / "foreign.db", tmp_path / "changes.db", tmp_path / "limits.db"
    with closing(sqlite3.connect(foreign)) as file:
        file.execute("CREATE TABLE budgets (number INTEGER)")
        file.execute("INSERT INTO budgets VALUES (1)")
        file.commit()
    with closing(SqliteChangeLog(log)) as changes:
        changes.write(Change((exemption("a"),)))
    text = tmp_path / "text.db"
    text.write_text("no database\n" * 100)
    for path, problem in ((foreign, "another program"), (log, "another program"), (text, "file is not a database")):
        before = path.read_bytes()
        with pytest.raises(StoreError, match=f"{path.name}: expected a.* file .*, got.* {problem}$"):
            MemoryStore(remember=path)
        assert path.read_bytes() == before
    MemoryStore(remember=ours).close()
    with pytest.raises(ChangeLogError, match="expected a change log, got a file of another program"):
        SqliteChangeLog(ours)
    with closing(sqlite3.connect(ours)) as file:
        file.execute("PRAGMA user_version=3")
    with pytest.raises(StoreError, match="expected a file of budgets and holds of format 2, got format 3; use a newer"):
        MemoryStore(remember=ours)


def test_a_file_of_format_1_is_upgraded(restarts: Restarts) -> None:
    """It has neither notes nor meters, and its asks have no roots."""
    limiter = restarts.limiter("100 in all; 3 in flight")
    limiter.hold("a", 30, hold_id="open")
    limiter.hold("a", 20, hold_id="done").settle(10)
    restarts.restart()
    with closing(sqlite3.connect(restarts.path)) as file:
        for column in ("note", "shape", "forced"):
            file.execute(f"ALTER TABLE holds DROP COLUMN {column}")
        (found,) = {asks for (asks,) in file.execute("SELECT asks FROM holds")}
        file.execute("UPDATE holds SET asks = ?", (json.dumps([ask[:3] for ask in json.loads(found)]),))
        file.execute("DROP TABLE meters")
        file.execute("PRAGMA user_version=1")
        file.commit()
    for _ in range(2):
        limiter = restarts.limiter("100 in all; 3 in flight")
        assert limiter.find_hold("a", "open").state == "open"
        assert limiter.peek("a", 60)
        assert not limiter.peek("a", 61)
        restarts.restart()
    limiter = restarts.limiter("100 in all; 3 in flight")
    limiter.find_hold("a", "open").settle(5)
    assert limiter.peek("a", 85)
    assert not limiter.peek("a", 86)


METERED = (
    Ask("accounts", "acme", UNLIMITED, 1),
    Ask("usage", "acme/x\t\tusd", Meter("Europe/Berlin"), 7, "acme"),
    Ask("usd", "acme", Budget(10, unit="credits:0"), 7, "acme"),
)


def test_what_meters_have_counted_survives_a_restart(restarts: Restarts) -> None:
    """On each day, with its root; settled afterwards, a hold still counts on its own day."""
    restarts.store.hold(METERED, 0, HoldTerms("early", 60 * 10**6, False, 7 * DAY * 10**6, "note \udcff", "shape"))
    restarts.restart(DAY)
    store = restarts.store
    (first,) = store.read_usage("usage", 0, 2**62)
    assert (first.root, first.key, first.amount) == ("acme", "acme/x\t\tusd", 7)
    store.hold([METERED[0], METERED[1]], 0, HoldTerms("late", 60 * 10**6, True, 10**6, forced=True))
    assert [row.amount for row in store.read_usage("usage", 0, 2**62)] == [7, 7]
    restarts.restart()
    store = restarts.store
    assert store.settle(METERED, 0, "early", [1, 3, 9]).state == "settled"
    restarts.restart()
    store = restarts.store
    assert [row.amount for row in store.read_usage("usage", 0, 2**62)] == [3, 7]
    assert store.read_usage("usage", first.start, first.start + 1, "acme") == [first._replace(amount=3)]
    assert store.read_hold("accounts", "acme", "early") == ("early", "settled", (1, 3, 9), 0, "note \udcff", "shape")
    restarts.restart(60)
    store = restarts.store
    assert [row.amount for row in store.read_usage("usage", 0, 2**62)] == [3]  # the late one was released
    restarts.restart(400 * DAY)
    assert restarts.store.read_usage("usage", 0, 2**62) == []
    restarts.close()
    assert rows(restarts.path, "meters") == []


def test_meters_are_forgotten_and_cleared_in_the_file_too(restarts: Restarts) -> None:
    store = restarts.store
    for key in ("a", "b", "c"):
        store.apply(Verb.CHARGE, [Ask("usage", key, Meter(), 5, "acme")], 0)
    store.apply(Verb.REFUND, [Ask("usage", "b", Meter(), 2, "acme")], 0)
    store.forget("usage", "a", Meter())
    restarts.restart()
    store = restarts.store
    assert [(row.key, row.amount) for row in store.read_usage("usage", 0, 2**62)] == [("b", 3), ("c", 5)]
    store.clear("usage", Meter())
    restarts.restart()
    assert restarts.store.read_usage("usage", 0, 2**62) == []


def test_a_damaged_file_is_left_alone(restarts: Restarts) -> None:
    limiter = restarts.limiter("100 in all")
    for number in range(2000):
        limiter.check(f"{number}")
    restarts.close()
    damaged = bytearray(restarts.path.read_bytes())
    damaged[-40_000:] = bytes(40_000)
    restarts.path.write_bytes(damaged)
    with pytest.raises(StoreError, match=r"limits\.db: expected an SQLite file that can be written, got: .*malformed"):
        MemoryStore(remember=restarts.path)
    assert restarts.path.read_bytes() == damaged


def test_a_file_whose_damage_no_message_can_quote_is_left_alone(restarts: Restarts) -> None:
    restarts.limiter("100 in all").check("a")
    restarts.close()
    damaged = bytearray(restarts.path.read_bytes())
    damaged[damaged.rfind(b"CREATE TABLE holds") + 3] = 0xCB  # no UTF-8 any more
    restarts.path.write_bytes(damaged)
    with pytest.raises(StoreError, match=r"limits\.db: expected an SQLite file that can be written, got: "):
        MemoryStore(remember=restarts.path)


DAMAGED_BUDGETS = [
    "name = 1",
    "budget = '5/minute'",
    "budget = 'x'",
    "key = 'text'",
    "key = x'ff'",
    "start = -1",
    "used = 'x'",
    "used = 0.5",
    "used = 0",
    f"used = {2**53}",
]
DAMAGED_HOLDS = [
    "id = 'text'",
    "asks = 'x'",
    "asks = x'ff'",
    "asks = '[]'",
    """asks = '[["llm", "a", 5]]'""",
    """asks = '[["llm", "b", "9 in all; 5 in flight"]]'""",
    """asks = '[["llm", "a", "9 in all"]]'""",
    "release = 2",
    "keep = -1",
    "keep = 'x'",
    "state = 'denied'",
    "costs = '[]'",
    "costs = '[1, 2]'",
    "costs = '[1.5]'",
    "costs = '5'",
    f"costs = '[{'9' * 5000}]'",
    "charges = '[]'",
    "charges = '[[], []]'",
    "charges = '[[[1]], [[1]]]'",
    f"charges = '{'[' * 100_000}'",
    "ends = 'x'",
    f"ends = {2**62}",
    "released = 7",
]


@pytest.mark.parametrize(
    "damage",
    [f"UPDATE budgets SET {change} WHERE key = x'61'" for change in DAMAGED_BUDGETS]
    + [f"UPDATE holds SET {change} WHERE id = x'61'" for change in DAMAGED_HOLDS],
    ids=lambda damage: damage[:50],
)
def test_unreadable_rows_are_skipped(restarts: Restarts, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    limit = "9 in all; 5 in flight"
    for key in "ab":
        restarts.limiter(limit).hold(key, 3, hold_id=key)
    restarts.close()
    with closing(sqlite3.connect(restarts.path)) as file:
        assert file.execute(damage).rowcount == 1
        file.commit()
    with caplog.at_level(logging.WARNING, "headgate"):
        limiter = restarts.limiter(limit)
    (record,) = caplog.records
    assert "limits.db: 1 unreadable rows are skipped; the last one: " in record.getMessage()
    assert limiter.find_hold("b", "b").settle(1).remaining == 5
    assert left(restarts.limiter("9 in all"), "b") == 8


def test_many_rows_are_read_at_once(restarts: Restarts) -> None:
    restarts.limiter("100 in all; 100000 in flight").hold("a", 2, hold_id="h", lease=6 * DAY)
    restarts.close()
    with closing(sqlite3.connect(restarts.path)) as file:
        numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 20000) "
        file.execute(
            numbers + "INSERT INTO holds SELECT name, key, CAST('h' || i AS BLOB), asks, release, keep, state, costs, "
            "charges, ends + i, released, note, shape, forced FROM holds, n"
        )
        file.execute(
            numbers
            + "INSERT INTO budgets SELECT name, budget, CAST('k' || i AS BLOB), start, ends, used FROM budgets, n"
        )
        file.commit()
    began = perf_counter()
    limiter = restarts.limiter("100 in all; 100000 in flight")
    assert perf_counter() - began < PATIENCE
    assert gc.isenabled()
    assert restarts.limiter("100000 in flight").peek("a").remaining == 79_999
    assert left(restarts.limiter("100 in all"), "k20000") == 98
    assert limiter.find_hold("a", "h20000").settle(1)


def test_a_verb_of_a_finalizer_in_the_middle_of_another_is_refused(restarts: Restarts) -> None:
    """It could not be undone without the other one."""
    limiter = restarts.limiter("100 in all")
    limiter.check("a")
    outcomes: list[object] = []

    def check() -> None:
        try:
            outcomes.append(limiter.check("a"))
        except StoreError as error:
            outcomes.append(str(error))

    file = restarts.store._remembered.file  # type: ignore[union-attr]
    with file._transaction("x"):
        check()
    assert str(outcomes[0]).endswith("it came from a finalizer, in the middle of another transaction")
    assert left(limiter) == 99


# Processes ------------------------------------------------------------------------------------------------------------

FORK = """
import os, sys
from headgate import Limiter, StoreError

limiter = Limiter("100 in all", remember=sys.argv[1])
limiter.charge("a", 10)

def child(work):
    sys.stdout.flush()
    number = os.fork()
    if number == 0:
        try:
            work()
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.waitpid(number, 0)

def charge():
    try:
        print(limiter.charge("a", 20).remaining)
    except StoreError as error:
        print(str(error).partition(": ")[2])

child(lambda: print(limiter.peek("a").remaining))
charge()
child(charge)
child(lambda: (charge(), charge()))
charge()
"""


def test_after_a_fork_the_first_process_to_use_the_file_has_it(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK, str(tmp_path / "limits.db")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * PATIENCE, check=True)
    refused = "expected a file that no other process has used since a fork, got one that was used; restart this process"
    assert done.stdout.splitlines() == ["90", "70", "50", refused, refused, refused]


VICTIM = """
import random, sys
from headgate import Limiter

limiter = Limiter("1000000000 in all; 100000 in flight", remember=sys.argv[1])
say = sys.stdout.write
draw = random.Random(int(sys.argv[2]))
open_holds = []
for number in range(10**9):
    name = f"{sys.argv[2]}-{number}"
    kind = draw.randrange(4)
    if kind == 0:
        limiter.charge("a", 3)
        say("charge 3\\n")
    elif kind == 1 or not open_holds:
        hold = limiter.hold("a", 10, hold_id=name, lease=3600)
        open_holds.append(hold)
        say(f"hold {name}\\n")
    elif kind == 2:
        hold = open_holds[draw.randrange(len(open_holds))]
        hold.extend(1)
        say(f"extend {hold.id}\\n")
    else:
        hold = open_holds.pop(draw.randrange(len(open_holds)))
        hold.settle(7)
        say(f"settle {hold.id}\\n")
    sys.stdout.flush()
"""


@pytest.mark.parametrize(
    ("limit", "warns"), [("5/minute", True), ("5/minute sliding", True), ("5 in all", False), ("2 in flight", False)]
)
def test_a_limiter_that_has_nothing_to_remember_says_so(
    tmp_path: Path, limit: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with Limiter(limit, remember=tmp_path / "limits.db"):
        pass
    text = f"Limiter remember: {parse(limit)} starts full after a restart: only budgets and holds are remembered"
    assert [record.message for record in caplog.records] == [text] * warns


@pytest.mark.long
def test_what_was_answered_survives_a_kill_exactly_once(tmp_path: Path) -> None:
    path, draw = tmp_path / "limits.db", random.Random(7)
    costs: dict[str, int] = {}
    used, settled = 0, set[str]()
    for trial in range(15):
        command = [sys.executable, "-c", VICTIM, str(path), str(trial)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as victim:
            assert victim.stdout is not None
            lines = [victim.stdout.readline() for _ in range(draw.randrange(1, 400))]
            victim.send_signal(signal.SIGKILL)
            lines += victim.stdout.readlines()
        for line in [line for line in lines if line.endswith("\n")]:
            verb, what = line.split()
            if verb == "charge":
                used += int(what)
            elif verb == "settle":
                costs[what] = 7
                settled.add(what)
            else:
                costs[what] = costs.get(what, 9) + 1
        with Limiter("1000000000 in all; 100000 in flight", remember=path) as limiter:
            listed = {hold.id: hold for hold in limiter.list_holds("a", 10**6)}
            found = 10**9 - Limiter("1000000000 in all", store=limiter.store).peek("a").remaining
            slots = 100_000 - Limiter("100000 in flight", store=limiter.store).peek("a").remaining
        assert slots == len([hold for hold in listed.values() if hold.state == "open"])
        # The verb that was under way may have been written, and not answered.
        changed = [
            name
            for name, hold in listed.items()
            if (int(hold.cost), hold.state != "open") != (costs.get(name), name in settled)
        ]
        missing = set(costs) - set(listed)
        assert not missing
        assert len(changed) <= 1
        before = used + sum(costs.values())
        for name in changed:
            costs[name] = int(listed[name].cost)
            settled |= {name} if listed[name].state == "settled" else set()
        after = used + sum(costs.values())
        assert found in ((after,) if changed else (before, before + 3))
        used += found - after


def test_a_hold_of_an_earlier_process_is_a_plain_one(restarts: Restarts) -> None:
    restarts.limiter("100 in all").hold("a", 60, hold_id="h", lease=60)
    restarts.restart()
    hold = restarts.limiter("100 in all").find_hold("a", "h")
    assert isinstance(hold, Hold)
    with hold:
        hold.use(3)
    assert left(restarts.limiter("100 in all")) == 97
    restarts.close()
    assert [json.loads(str(row[7])) for row in rows(restarts.path, "holds")] == [[3]]
