"""Exactness under threads: requirement A7, and the protection that gives it."""

import gc
import sys
import threading
import time

import pytest

from headgate import AllOf, Limit, Limiter, MemoryStore, SlidingWindow, per_day
from headgate.stores.base import Ask, Verb
from headgate.stores.memory import compiled

THREADS = 16
TRIALS = 20


pytestmark = pytest.mark.usefixtures("_switching")


def passed_of_a_burst(limiter: Limiter, key: str, checks: int) -> int:
    """How many pass when 16 threads, started together, make so many checks each."""
    start = threading.Barrier(THREADS)
    counts: list[int] = []

    def hammer() -> None:
        start.wait()
        counts.append(sum(bool(limiter.check(key)) for _ in range(checks)))

    threads = [threading.Thread(target=hammer) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts)


@pytest.mark.parametrize("limit", [per_day(5), SlidingWindow(5, 86_400)], ids=str)
def test_a7_exact_from_the_first_check_of_a_store_on(limit: Limit) -> None:
    """Whoever comes while a limit is new to the store finds it ready, or waits."""
    stores = [MemoryStore() for _ in range(3000)]
    start = threading.Barrier(8)
    found: list[list[object]] = [[] for _ in stores]

    def hammer() -> None:
        for store, results in zip(stores, found, strict=True):
            start.wait()
            try:
                results.append(bool(store.apply(Verb.CHECK, [Ask("", "key", limit, 1)], 0)))
            except Exception as error:  # noqa: BLE001 - that there are none is what is tested
                results.append(error)

    threads = [threading.Thread(target=hammer) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results.count(True) for results in found] == [5] * len(stores)
    assert [results.count(False) for results in found] == [3] * len(stores)


@pytest.mark.parametrize(
    "limit",
    [per_day(150), SlidingWindow(150, 86_400), AllOf([per_day(150), per_day(10_000)]), per_day(1), per_day(2)],
    ids=str,
)
def test_a7_exactly_capacity_passes_from_many_threads(limit: Limit) -> None:
    limiter = Limiter(limit)
    passed = [passed_of_a_burst(limiter, f"key-{trial}", checks=25) for trial in range(TRIALS)]
    assert passed == [limit.capacity] * TRIALS


def test_a7_exact_while_keys_come_and_go_and_the_table_is_split() -> None:
    """Housekeeping moves entries while others count on them."""
    limiter = Limiter(per_day(100))
    counts: list[int] = []
    start = threading.Barrier(8)

    def hammer(number: int) -> None:
        start.wait()
        passed = 0
        for i in range(2000):
            limiter.check(f"passer-by-{number}-{i}")
            passed += bool(limiter.check("the one"))
        counts.append(passed)

    threads = [threading.Thread(target=hammer, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(counts) == 100
    assert limiter.reset("the one")


class Interrupter:
    """Garbage that lets other threads run when it is collected."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        time.sleep(0)


@pytest.mark.parametrize("limit", [per_day(1), AllOf([per_day(1), per_day(2)])], ids=str)
def test_a7_exact_when_the_garbage_collector_lets_other_threads_run(limit: Limit) -> None:
    """Before Python 3.12 any allocation may set it off, in the middle of a check."""
    limiter = Limiter(limit)
    counts: list[int] = []
    keys = [f"key-{i}" for i in range(300)]
    start = threading.Barrier(8)

    def hammer() -> None:
        passed = 0
        for key in keys:
            start.wait()
            hoard: list[list[int]] = [[] for _ in range(200)]  # Python keeps freed lists in stock, and hands them out
            Interrupter()
            passed += bool(limiter.check(key))
            assert hoard
        counts.append(passed)

    before = gc.get_threshold()
    gc.set_threshold(1, 1000, 1000)
    try:
        threads = [threading.Thread(target=hammer) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*before)
    assert sum(counts) == len(keys)


def test_a7_the_lock_is_there_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (MemoryStore().lock is None) == compiled()
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert MemoryStore().lock is not None, "without a GIL nothing is uninterrupted"


def test_a7_a_sliding_window_always_has_the_lock() -> None:
    store = MemoryStore()
    Limiter(SlidingWindow(1, 1), store=store)
    assert store.lock is not None


@pytest.mark.skipif(compiled(), reason="compiled code is not interrupted, with a lock or without")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # one may even trip over another
def test_a7_without_the_lock_the_race_is_seen() -> None:
    """The tests above can fail: with the protection taken out, they do."""
    store = MemoryStore()
    store.lock = None
    limiter = Limiter(per_day(150), store=store)
    assert any(passed_of_a_burst(limiter, f"key-{trial}", checks=25) > 150 for trial in range(10_000))
