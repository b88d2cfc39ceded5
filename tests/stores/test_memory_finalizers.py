"""Finalizers that use a limit in the middle of a check, as the garbage collector may run them at any allocation."""

import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from headgate import AllOf, Decision, Limit, Limiter, ManualClock, MemoryStore, SlidingWindow, per_day
from headgate.limits.violations import Backoff
from headgate.stores.base import Ask, Offence, Verb
from headgate.wait_queue import _ThreadWaiter
from tests.support.finalizers import ALLOCATIONS, collect_during
from tests.support.valkey import PATIENCE

LIMITS: list[list[Limit]] = [
    [per_day(1)],
    [SlidingWindow(1, 86_400)],
    [AllOf([per_day(1), per_day(2)])],
    [per_day(1), per_day(2)],
]
"""Each lets one pass; the last are two asks."""


def apply(store: MemoryStore, verb: Verb, limits: list[Limit]) -> Decision:
    return store.apply(verb, [Ask("", "key", limit, 1) for limit in limits], 0)


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_a7_a_denied_check_stays_denied(limits: list[Limit]) -> None:
    """A check that says it has passed was counted, and a denial says when to come back."""
    for allocation in ALLOCATIONS:
        store = MemoryStore(clock=ManualClock())
        apply(store, Verb.CHECK, limits)

        def check(store: MemoryStore = store) -> Decision:
            return apply(store, Verb.CHECK, limits)

        decision = collect_during(check, lambda: apply(store, Verb.REFUND, limits), allocation)  # noqa: B023
        if decision:
            assert decision.retry_after == 0, allocation
            assert not apply(store, Verb.PEEK, limits), allocation
        else:
            assert decision.retry_after == 86_400, allocation
            assert decision.remaining in (0, 1), "it may know of the refund"


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_a7_a_check_within_a_check_is_counted_exactly(limits: list[Limit]) -> None:
    for allocation in ALLOCATIONS:
        store, inner = MemoryStore(clock=ManualClock()), []

        def check(store: MemoryStore = store) -> Decision:
            return apply(store, Verb.CHECK, limits)

        outer = collect_during(check, lambda: inner.append(check()), allocation)  # noqa: B023
        assert [bool(decision) for decision in (outer, *inner)].count(True) == 1, allocation
        assert not apply(store, Verb.PEEK, limits), allocation


def test_a7_a_limiter_of_several_limits_says_what_it_has_decided() -> None:
    for allocation in ALLOCATIONS:
        limiter = Limiter([per_day(1), per_day(2)], store=MemoryStore(clock=ManualClock()))
        limiter.check("key")
        decision = collect_during(lambda: limiter.check("key"), lambda: limiter.refund("key"), allocation)  # noqa: B023
        assert decision.retry_after == (0 if decision else 86_400), allocation
        assert not (decision and limiter.peek("key")), allocation


def test_a_window_that_a_finalizer_adds_to_while_it_is_cut_stays_whole() -> None:
    for allocation in ALLOCATIONS:
        clock = ManualClock()
        limiter = Limiter(SlidingWindow(10, 10), store=MemoryStore(clock=clock))

        def check(limiter: Limiter = limiter) -> Decision:
            return limiter.check("key")

        for _ in range(6):
            check()
            clock.advance(1)
        clock.advance(6)  # three are left
        assert collect_during(check, check, allocation)
        used = 10 - limiter.peek("key").remaining
        assert used in (4, 5), allocation
        collect_during(lambda: limiter.refund("key", 3), check, allocation)  # noqa: B023
        assert 10 - limiter.peek("key").remaining in (used - 3, used - 2), allocation
        clock.advance(10)
        assert limiter.peek("key").remaining == 10, allocation


def run(coroutine: Coroutine[Any, Any, object]) -> None:
    """Run a coroutine that waits for nothing, without a loop."""
    with pytest.raises(StopIteration):
        coroutine.send(None)


def use_within(verb: int, allocation: int) -> None:
    """Let a finalizer use a store, its windows and its limiter in the middle of one of their verbs."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    limiter, windows, offence = Limiter(per_day(100), store=store), store.windows(), Offence("agents", "a", Backoff())

    def use(name: str) -> list[Callable[[], object]]:
        return [
            lambda: limiter.check("a", request_id=name),
            lambda: limiter.refund("a", request_id=name),
            lambda: limiter.acquire("a", timeout=0),
            lambda: limiter.waiting("a"),
            lambda: limiter.reset("a"),
            lambda: Limiter(per_day(1), store=store, name=name),
            lambda: store.apply(Verb.CHECK, [Ask(name, "a", per_day(2), 1)], 0, offence),
            lambda: store.record_violation(offence),
            lambda: store.standing(offence),
            lambda: run(windows.hit(name, 1, 1000)),
            lambda: clock.advance(1),
            store.reset,
        ]

    collect_during(use("outer")[verb], lambda: [then() for then in use("inner")], allocation)


def does_finish(work: Callable[[], object]) -> bool:
    """Whether some work ends, in a thread of its own: it may wait for itself."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return not thread.is_alive()


@pytest.mark.parametrize("verb", range(12))
def test_a_finalizer_never_waits_for_its_own_thread(verb: int) -> None:
    def work() -> None:
        for allocation in ALLOCATIONS:
            use_within(verb, allocation)

    assert does_finish(work)


def test_a_finalizer_may_wake_the_thread_that_falls_asleep() -> None:
    waiter = _ThreadWaiter()
    assert does_finish(lambda: [collect_during(lambda: waiter.sleep(0.001), waiter.wake, at) for at in ALLOCATIONS])


def test_a_thread_that_falls_asleep_may_be_woken_at_every_call_that_it_makes() -> None:
    """As by a finalizer: since Python 3.12 the garbage collector runs between any two steps."""
    waiter = _ThreadWaiter()

    def sleep() -> None:
        sys.setprofile(lambda *_: waiter.wake())
        try:
            waiter.sleep(0.001)
        finally:
            sys.setprofile(None)

    assert does_finish(sleep)
