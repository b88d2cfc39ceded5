"""Holds in memory under threads, and with little room."""

import threading

import pytest

from headgate import (
    AllOf,
    Budget,
    Hold,
    Limit,
    Limiter,
    ManualClock,
    MemoryStore,
    SlidingWindow,
    Slots,
    per_day,
    per_second,
)
from headgate.errors import UnknownHold
from headgate.limits.slots import Leases
from headgate.stores.base import Ask, Verb
from headgate.stores.holds import HoldAnswer, HoldTerms
from tests.support.finalizers import ALLOCATIONS, collect_during
from tests.support.threads import run_together

THREADS = 8
ROUNDS = 60


def hold(
    store: MemoryStore, limit: Limit, hold_id: str, cost: int = 1, key: str = "key", lease: int = 60
) -> HoldAnswer:
    return store.hold([Ask("", key, limit, cost)], 0, HoldTerms(hold_id, lease * 10**6, False, 10**6))


def settle(store: MemoryStore, limit: Limit, hold_id: str, cost: int | None, key: str = "key") -> HoldAnswer:
    return store.settle([Ask("", key, limit, 1)], 0, hold_id, None if cost is None else [cost])


def check(store: MemoryStore, limit: Limit, cost: int = 1, key: str = "key") -> bool:
    return bool(store.apply(Verb.CHECK, [Ask("", key, limit, cost)], 0))


@pytest.mark.usefixtures("_frequent_switches")
@pytest.mark.parametrize(
    "limit",
    [
        per_day(500),
        SlidingWindow(500, 86_400),
        Budget(500, "month"),
        AllOf([per_day(500), SlidingWindow(600, 86_400)]),
        AllOf([per_day(500), Slots(THREADS)]),
    ],
    ids=str,
)
def test_a7_threads_that_hold_and_settle_are_counted_exactly(limit: Limit) -> None:
    store = MemoryStore(clock=ManualClock())

    def work(number: int) -> int:
        counted = 0
        for i in range(ROUNDS):
            hold_id = f"{number}-{i}"
            if hold(store, limit, hold_id, 3).state == "open":
                actual = (number + i) % 5
                settle(store, limit, hold_id, actual)
                settle(store, limit, hold_id, actual)
                counted += actual
            counted += check(store, limit)
        return counted

    counted = sum(run_together(THREADS, work))
    left = 0
    while check(store, limit):
        left += 1
    assert counted + left == max(500, counted)
    assert counted < 500 + 2 * THREADS, "what is settled in excess may pass the limit, each time once"


@pytest.mark.usefixtures("_frequent_switches")
@pytest.mark.parametrize("limit", [per_day(500), Budget(500, "month"), AllOf([per_day(500), per_day(600)])], ids=str)
def test_a7_threads_that_settle_holds_without_an_id_are_counted_exactly(limit: Limit) -> None:
    """While others list them, and let some be forgotten."""
    store = MemoryStore(clock=ManualClock())
    limiter = Limiter(limit, store=store)

    def work(number: int) -> int:
        counted = 0
        for i in range(ROUNDS):
            if number == 0 and i % 5 == 0:
                limiter.list_holds("key")
                limiter.reset("other")
            limiter.hold("other", 1)
            hold = limiter.hold("key", 3)
            if hold:
                actual = (number + i) % 5
                hold.settle(actual)
                counted += actual
            counted += bool(limiter.check("key"))
        return counted

    counted = sum(run_together(THREADS, work))
    left = 0
    while limiter.check("key"):
        left += 1
    assert counted + left == max(500, counted)
    assert counted < 500 + 2 * THREADS
    assert all(one.state == "settled" for one in limiter.list_holds("key"))


def test_a7_a_hold_within_a_hold_is_counted_exactly() -> None:
    for allocation in ALLOCATIONS:
        limiter, inner = Limiter(per_day(5), store=MemoryStore(clock=ManualClock())), []
        held = limiter.hold("key", 1)

        def hold(limiter: Limiter = limiter) -> Hold:
            return limiter.hold("key", 3)

        outer = collect_during(hold, lambda: inner.append(hold()), allocation)  # noqa: B023
        assert [bool(one) for one in (outer, *inner)].count(True) == 1, allocation
        collect_during(lambda: held.settle(0), lambda: [one.settle(1) for one in inner if one], allocation)  # noqa: B023
        outer = outer or inner[0]
        if outer.state == "open":
            outer.settle(1)
        assert limiter.peek("key").remaining == 4, allocation


@pytest.mark.usefixtures("_frequent_switches")
def test_a7_threads_never_have_more_slots_than_there_are_and_lose_none() -> None:
    store, limit = MemoryStore(clock=ManualClock()), AllOf([Slots(3), per_day(10**6)])
    guard, most, under_way = threading.Lock(), 0, 0

    def work(number: int) -> int:
        nonlocal most, under_way
        granted = 0
        for i in range(ROUNDS):
            hold_id = f"{number}-{i}"
            if hold(store, limit, hold_id).state != "open":
                continue
            granted += 1
            with guard:
                under_way += 1
                most = max(most, under_way)
            store.extend([Ask("", "key", limit, 1)], 0, hold_id, [2], 70 * 10**6)
            with guard:
                under_way -= 1
            settle(store, limit, hold_id, None)
        return granted

    granted = sum(run_together(THREADS, work))
    assert most <= 3
    assert store.apply(Verb.PEEK, [Ask("", "key", Slots(3), 1)], 0).remaining == 3
    assert store.apply(Verb.PEEK, [Ask("", "key", per_day(10**6), 1)], 0).remaining == 10**6 - 2 * granted


@pytest.mark.usefixtures("_frequent_switches")
def test_a7_one_of_many_threads_that_repeat_a_hold_makes_it() -> None:
    store, limit = MemoryStore(clock=ManualClock()), AllOf([per_day(100), Slots(50)])

    def work(_: int) -> list[str]:
        return [hold(store, limit, str(i)).state for i in range(30)]

    assert run_together(THREADS, work) == [["open"] * 30] * THREADS
    assert store.apply(Verb.PEEK, [Ask("", "key", Slots(50), 1)], 0).remaining == 20
    assert len(store.list_holds("", "key", 100)) == 30


# Room -----------------------------------------------------------------------------------------------------------------


def test_a_hold_is_never_counted_in_a_table_that_was_dropped_to_make_room() -> None:
    """Making room may drop a table without entries, as that of a new limit is."""
    for others in range(1, 8):
        clock = ManualClock()
        store = MemoryStore(clock=clock, max_keys=others)
        for number in range(others):
            check(store, per_second(1), key=str(number))
        clock.advance(10)
        limit = per_day(1)
        if hold(store, limit, "id").state == "open":
            assert not check(store, limit), others
            assert hold(store, limit, "other").state == "denied", others


def test_a_lone_hold_is_settled_where_its_key_is_counted_now() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    limiter = Limiter(per_second(10), store=store)
    limiter.hold("a").settle()  # the first one of a key is made in another way
    hold = limiter.hold("a", 5, lease=600)
    clock.advance(2)  # it is full again, and dropped
    for number in range(200):
        limiter.check(f"other-{number % 3}", 10)
        clock.advance(1)
    assert len(store) < 4
    assert limiter.check("a", 3).remaining == 7
    assert hold.settle(8).remaining == 4


def test_a_lone_hold_gives_nothing_back_to_a_bucket_that_was_begun_anew() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    limiter = Limiter(per_second(10), store=store)
    limiter.hold("a").settle()  # the first one of a key is made in another way
    before = limiter.hold("a", 9, lease=600)
    clock.advance(2)  # it is full again, and dropped
    for number in range(200):
        limiter.check(f"other-{number % 3}", 10)
        clock.advance(1)
    assert len(store) < 4
    assert limiter.check("a").remaining == 9
    hold = limiter.hold("a", 5, lease=600)
    assert before.settle(0).remaining == 4
    assert hold.cancel().remaining == 9


def test_a_lone_hold_leaves_no_larger_debt_than_one_with_an_id() -> None:
    limiter = Limiter(per_second(10), store=MemoryStore(clock=ManualClock()))
    limiter.hold("plain", 1).settle(2**53 - 1)
    limiter.hold("named", 1, hold_id="one").settle(2**53 - 1)
    debt = (2**53 - 1) // 100_000  # tokens
    for key in ("plain", "named"):
        limiter.refund(key, debt)
        assert limiter.refund(key, 6).remaining == 5


def test_a_hold_without_room_is_denied_and_an_extension_too() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock, max_keys=1)
    limit = per_second(10)
    assert hold(store, limit, "id").state == "open"
    denied = hold(store, limit, "id", key="other")
    assert (denied.state, denied.decision.degraded, bool(denied.decision)) == ("denied", True, False)
    clock.advance(1)
    assert check(store, per_day(1), key="takes the room of the full bucket")
    extended = store.extend([Ask("", "key", limit, 1)], 0, "id", [5], None)
    assert (extended.state, extended.costs, bool(extended.decision)) == ("open", (1,), False)
    assert len(store) == 1


def test_a_cancel_needs_no_costs() -> None:
    store = MemoryStore(clock=ManualClock())
    hold(store, per_day(10), "id", 4)
    answer = store.settle([Ask("", "key", per_day(10), 1)], 0, "id", None, cancel=True)
    assert (answer.state, answer.costs, answer.decision.remaining) == ("cancelled", (0,), 10)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (per_day(10), SlidingWindow(10, 60)),
        (per_day(10), per_day(20)),
        (per_day(10), AllOf([per_day(10), Budget(5, "day")])),
        (AllOf([per_day(10), Slots(1)]), Slots(1)),
        (AllOf([SlidingWindow(10, 60), per_day(10)]), AllOf([per_day(10), SlidingWindow(10, 60)])),
    ],
    ids=str,
)
def test_a_hold_is_extended_under_the_limits_with_which_it_was_made(before: Limit, after: Limit) -> None:
    store = MemoryStore(clock=ManualClock())
    hold(store, before, "id", 4)
    extended = store.extend([Ask("", "key", after, 1)], 0, "id", [7], None)
    assert (bool(extended.decision), extended.state, extended.costs) == (True, "open", (7,))
    assert not store.extend([Ask("", "key", after, 1)], 0, "id", [11], None).decision
    assert settle(store, after, "id", 2).state == "settled"
    assert [check(store, before) for _ in range(10)].count(True) == 8


def test_a_budget_is_extended_under_the_amount_that_holds_now() -> None:
    store = MemoryStore(clock=ManualClock())
    hold(store, Budget(10), "id", 8)
    assert store.extend([Ask("", "key", Budget(20), 1)], 0, "id", [15], None).costs == (15,)
    assert not store.extend([Ask("", "key", Budget(10), 1)], 0, "id", [16], None).decision
    assert settle(store, Budget(20), "id", 3).decision.remaining == 17


def test_settled_holds_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    store, limit = MemoryStore(clock=ManualClock(), max_request_ids=3), per_day(100)
    for number in range(5):
        hold(store, limit, str(number))
        settle(store, limit, str(number), 1)
    assert [settle(store, limit, number, 1).state for number in "432"] == ["settled"] * 3
    with pytest.raises(UnknownHold):
        settle(store, limit, "1", 1)
    (record,) = caplog.records
    text = "MemoryStore: more than 3 settled holds; the oldest are forgotten, "
    assert record.getMessage() == text + "so that settling one of them again is an error"


def test_ended_holds_are_forgotten_while_new_ones_come() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    limit = AllOf([per_second(10), Slots(1000)])
    for number in range(2000):
        hold(store, limit, str(number), lease=1)
        if number % 2:
            settle(store, limit, str(number), 1)
        clock.advance(0.1)
    assert len(store.holds) < 100


def test_leases_that_come_and_go_take_little_memory() -> None:
    leases = Leases()
    leases.take(10**9)
    for end in range(1, 5000):
        leases.take(end)
        leases.free(end)
    assert (leases.used, leases.first(), leases.last()) == (1, 10**9, 10**9)
    assert len(leases._heap) + len(leases._late) < 300
