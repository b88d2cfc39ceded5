"""What a memory store remembers in a file: budgets, holds and meters survive a restart."""

import json
from contextlib import closing
from decimal import Decimal
from pathlib import Path

import pytest

from headgate import Hold, HoldError, Limiter, MemoryStore, StoreError, UnknownHold
from headgate.limits.budget import Budget
from headgate.limits.fixed import UNLIMITED
from headgate.limits.meter import Meter
from headgate.limits.notation import parse
from headgate.stores.base import Ask, Verb
from headgate.stores.holds import HoldTerms
from tests.support.limiters import left
from tests.support.restarts import DAY, Restarts, table_rows

pytestmark = pytest.mark.once


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
    assert len(table_rows(restarts.path, "budgets")) == 3  # what counts nothing isn't stored
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
    assert len(table_rows(restarts.path, "budgets")) == 2  # for a day, should the clock step back
    restarts.restart(DAY)
    assert left(restarts.limiter("100/calendar hour")) == 100
    restarts.close()
    assert len(table_rows(restarts.path, "budgets")) == 1


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
    assert len(table_rows(restarts.path, "budgets")) == 101
    limiter = restarts.limiter("100/calendar hour")
    restarts.clock.advance(DAY)
    for _ in range(25):
        limiter.check("a")
    restarts.close()
    assert len(table_rows(restarts.path, "budgets")) == 1


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
    return table_rows(restarts.path, "budgets"), table_rows(restarts.path, "holds")


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
    assert {key for _, key, *_ in table_rows(restarts.path, "holds")} == {b"b"}
    restarts.restart(10 * DAY)
    restarts.limiter("1000 in flight")
    restarts.close()
    assert table_rows(restarts.path, "holds") == []


def test_more_settled_holds_than_are_kept_are_deleted(tmp_path: Path) -> None:
    path = tmp_path / "limits.db"
    with closing(MemoryStore(remember=path, max_request_ids=3)) as store:
        limiter = Limiter("1 in flight", store=store)
        for number in range(6):
            limiter.hold("a", hold_id=f"{number}").settle()
    assert len(table_rows(path, "holds")) == 4  # the last one is deleted with the next verb
    with closing(MemoryStore(remember=path, max_request_ids=2)) as store:
        limiter = Limiter("1 in flight", store=store)
        assert limiter.find_hold("a", "5").state == "settled"
        with pytest.raises(UnknownHold):
            limiter.find_hold("a", "3")


def test_a_hold_of_an_earlier_process_is_a_plain_one(restarts: Restarts) -> None:
    restarts.limiter("100 in all").hold("a", 60, hold_id="h", lease=60)
    restarts.restart()
    hold = restarts.limiter("100 in all").find_hold("a", "h")
    assert isinstance(hold, Hold)
    with hold:
        hold.use(3)
    assert left(restarts.limiter("100 in all")) == 97
    restarts.close()
    assert [json.loads(str(row[7])) for row in table_rows(restarts.path, "holds")] == [[3]]


# Meters ---------------------------------------------------------------------------------------------------------------

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
    assert table_rows(restarts.path, "meters") == []


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
