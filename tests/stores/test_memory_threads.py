"""Exact counts under threads (A7), and the lock that ensures them."""

import gc
import sys
import threading
import time

import pytest

from headgate import AllOf, Limit, Limiter, MemoryStore, SlidingWindow, per_day
from headgate.stores.base import Ask, Verb
from headgate.stores.memory_tables import compiled
from tests.support.threads import run_together

TRIALS = 20


pytestmark = pytest.mark.usefixtures("_frequent_switches")


def passed_of_a_burst(limiter: Limiter, key: str) -> int:
    """The number that passes when 16 threads make 25 checks each."""
    return sum(run_together(16, lambda _: sum(bool(limiter.check(key)) for _ in range(25))))


@pytest.mark.parametrize("limit", [per_day(5), SlidingWindow(5, 86_400)], ids=str)
def test_a7_exact_from_the_first_check_of_a_new_store(limit: Limit) -> None:
    """A thread that comes while the limit's table is being made finds it ready, or waits."""
    stores = [MemoryStore() for _ in range(3000)]
    start = threading.Barrier(8)

    def check_each(_: int) -> list[bool]:
        passed = []
        for store in stores:
            start.wait()
            passed.append(bool(store.apply(Verb.CHECK, [Ask("", "key", limit, 1)], 0)))
        return passed

    assert [sum(passed) for passed in zip(*run_together(8, check_each), strict=True)] == [5] * len(stores)


@pytest.mark.parametrize(
    "limit",
    [per_day(150), SlidingWindow(150, 86_400), AllOf([per_day(150), per_day(10_000)]), per_day(1), per_day(2)],
    ids=str,
)
def test_a7_exactly_capacity_passes_from_many_threads(limit: Limit) -> None:
    limiter = Limiter(limit)
    passed = [passed_of_a_burst(limiter, f"key-{trial}") for trial in range(TRIALS)]
    assert passed == [limit.capacity] * TRIALS


def test_a7_exact_while_keys_come_and_go_and_the_table_is_split() -> None:
    """Housekeeping moves entries while other threads use them."""
    limiter = Limiter(per_day(100))

    def hammer(number: int) -> int:
        passed = 0
        for i in range(2000):
            limiter.check(f"passer-by-{number}-{i}")
            passed += bool(limiter.check("the one"))
        return passed

    assert sum(run_together(8, hammer)) == 100
    assert limiter.reset("the one")


class Interrupter:
    """Garbage that lets other threads run when it is collected."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        time.sleep(0)


@pytest.mark.parametrize("limit", [per_day(1), AllOf([per_day(1), per_day(2)])], ids=str)
def test_a7_exact_when_the_garbage_collector_lets_other_threads_run(limit: Limit) -> None:
    """Before Python 3.12 any allocation may start it, in the middle of a check."""
    limiter = Limiter(limit)
    keys = [f"key-{i}" for i in range(300)]
    start = threading.Barrier(8)

    def hammer(_: int) -> int:
        passed = 0
        for key in keys:
            start.wait()
            hoard: list[list[int]] = [[] for _ in range(200)]  # so that no freed list is reused
            Interrupter()
            passed += bool(limiter.check(key))
            assert hoard
        return passed

    before = gc.get_threshold()
    gc.set_threshold(1, 1000, 1000)
    try:
        assert sum(run_together(8, hammer)) == len(keys)
    finally:
        gc.set_threshold(*before)


def test_a7_there_is_a_lock_where_one_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (MemoryStore().lock is None) == compiled()
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert MemoryStore().lock is not None, "without a GIL any code can be interrupted"


def test_a7_a_sliding_window_always_has_the_lock() -> None:
    store = MemoryStore()
    Limiter(SlidingWindow(1, 1), store=store)
    assert store.lock is not None


@pytest.mark.skipif(compiled(), reason="compiled code is not interrupted, with a lock or without")
def test_a7_without_the_lock_the_race_is_seen() -> None:
    """The tests above can fail: without the lock, they do."""
    store = MemoryStore()
    store.lock = None
    limiter = Limiter(per_day(150), store=store)

    def exceeds(key: str) -> bool:
        try:
            return passed_of_a_burst(limiter, key) > 150
        except Exception:  # noqa: BLE001 - a thread may even trip over another
            return False

    assert any(exceeds(f"key-{trial}") for trial in range(10_000))
