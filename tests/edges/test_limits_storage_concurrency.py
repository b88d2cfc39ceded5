"""`limits`' fixed windows on headgate's stores, when somebody comes between two steps of a hit."""

from collections.abc import Callable
from typing import Any

import pytest
from limits import RateLimitItemPerSecond

from headgate import ManualClock, MemoryStore
from headgate.edges.limits_storage import HeadgateStorage
from headgate.stores.base import Ask, Verb

pytestmark = pytest.mark.once

TEN = RateLimitItemPerSecond(10, 2)


class InterposedStore:
    """A store where something happens between what is read of a fixed window and what is counted in it."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.meanwhile: Callable[[], object] | None = None
        self._store = MemoryStore(clock=clock)

    def apply(self, verb: Verb, asks: list[Ask], low: int) -> Any:
        decision = self._store.apply(verb, asks, low)
        meanwhile = self.meanwhile
        if verb is Verb.PEEK and asks[0].name == "fixed" and meanwhile is not None:
            self.meanwhile = None
            meanwhile()
        return decision

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def storage_on_interposed_store(clock: ManualClock) -> tuple[HeadgateStorage, InterposedStore]:
    storage, store = HeadgateStorage("headgate+memory://", clock=clock), InterposedStore(clock)
    storage._store = store  # type: ignore[assignment]
    return storage, store


def test_a_hit_delayed_past_its_full_window_is_still_denied(clock: ManualClock) -> None:
    storage, store = storage_on_interposed_store(clock)
    key = TEN.key_for()
    assert storage.incr(key, 2, 10) == 10
    clock.advance(1.9)
    store.meanwhile = lambda: clock.advance(1.9)
    assert storage.incr(key, 2) == 11  # it came while the window was full
    assert [storage.incr(key, 2) for _ in range(11)] == list(range(1, 12))


def test_a_hit_delayed_past_its_window_takes_nothing_from_the_next(clock: ManualClock) -> None:
    storage, store = storage_on_interposed_store(clock)
    key = TEN.key_for()
    assert storage.incr(key, 2, 4) == 4
    clock.advance(1.9)
    store.meanwhile = lambda: clock.advance(0.2)
    assert storage.incr(key, 2) == 5
    for _ in range(9):  # each counter is used again and again: nothing is left in it
        assert [storage.incr(key, 2, 5) for _ in range(3)] == [5, 10, 15]
        clock.advance(2)


def test_a_hit_delayed_by_a_whole_window_counts_in_the_open_one(clock: ManualClock) -> None:
    storage, store = storage_on_interposed_store(clock)
    key = TEN.key_for()
    assert storage.incr(key, 2, 10) == 10
    store.meanwhile = lambda: clock.advance(4)
    assert storage.incr(key, 2, 9) == 9
    assert (storage.get(key), storage.incr(key, 2)) == (9, 10)
    assert storage.incr(key, 2) == 11


def test_a_hit_delayed_until_its_counter_is_reused_counts_once(clock: ManualClock) -> None:
    storage, store = storage_on_interposed_store(clock)
    key = TEN.key_for()
    assert storage.incr(key, 2, 7) == 7

    def two_windows() -> None:
        for _ in range(2):
            clock.advance(2)
            assert storage.incr(key, 2) == 1

    store.meanwhile = two_windows
    assert storage.incr(key, 2, 5) == 6
    assert storage.get(key) == 6
