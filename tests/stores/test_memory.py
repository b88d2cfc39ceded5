"""The in-memory store conforms, and stays small at no cost to single checks."""

import sys
import time
import tracemalloc
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headgate import (
    UNLIMITED,
    Budget,
    Gate,
    InvalidInput,
    Limit,
    Limiter,
    ManualClock,
    MemoryStore,
    SlidingWindow,
    per_day,
    per_minute,
    per_second,
)
from headgate.limits.clock import Clock
from headgate.stores import conformance
from headgate.stores.base import Ask, Verb
from headgate.stores.harness import cases_of
from tests.support.refusals import refusal

CASES = [*conformance.CASES, *conformance.HOLD_CASES, *conformance.ACCOUNT_CASES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_conformance(case: conformance.Case) -> None:
    case(lambda clock: MemoryStore(clock=clock))


def test_run_calls_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(clock: ManualClock) -> MemoryStore:
        return MemoryStore(clock=clock)

    called: list[object] = []
    monkeypatch.setattr(conformance, "CASES", (called.append, called.append))
    monkeypatch.setattr(conformance, "HOLD_CASES", (called.append,))
    monkeypatch.setattr(conformance, "ACCOUNT_CASES", (called.append,))
    conformance.run(make)
    assert called == [make] * 4


def test_conformance_can_fail() -> None:
    """A store whose clock runs at half speed fails."""

    class SlowClock(ManualClock):
        def __init__(self, clock: ManualClock) -> None:
            super().__init__()
            self.clock = clock

        def now(self) -> int:
            return self.clock.now() // 2

    with pytest.raises(conformance.NotConforming, match=r"^when the wait on 7/minute burst 3 is over: expected True"):
        conformance.a_denial_holds_until_its_wait_is_over(lambda clock: MemoryStore(clock=SlowClock(clock)))


def check_one_shot_keys(limiter: Limiter, clock: ManualClock, count: int) -> None:
    """Use keys once, let them fill up, and check others until the store has dropped them."""
    store = limiter.store
    assert isinstance(store, MemoryStore)
    most = 0
    for i in range(count):
        before = store.swept
        limiter.check(f"agent-{i}")
        most = max(most, store.swept - before)
    assert len(store) == count
    clock.advance(61)
    checks = 0
    while len(store) > 10:
        before = store.swept
        limiter.check(f"other-{checks % 10}")
        most = max(most, store.swept - before)
        checks += 1
        assert checks < count
    assert most <= 3, "no check looks at more than a few entries"


@pytest.mark.long
def test_a13_a_million_one_shot_keys_are_dropped() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    limiter = Limiter(per_minute(60), store=store)
    check_one_shot_keys(limiter, clock, 1_000_000)
    for _ in range(100):
        limiter.check("other-0")  # so that the sweep ends
    table = store.limit_table("", limiter.limit)
    dicts = [*table.dicts, *([] if table.old is None else [table.old])]
    assert sum(map(sys.getsizeof, dicts)) < 50_000, "the dicts shrink with their entries"


@pytest.mark.long
@pytest.mark.parametrize("limit", [per_minute(60), SlidingWindow(60, 60)], ids=str)
def test_a13_the_memory_of_dropped_keys_is_freed(limit: Limit) -> None:
    clock = ManualClock()
    tracemalloc.start()
    try:
        limiter = Limiter(limit, store=MemoryStore(clock=clock))
        empty, _ = tracemalloc.get_traced_memory()
        check_one_shot_keys(limiter, clock, 50_000)
        used, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - empty > 5_000_000
    assert used - empty < 100_000


def test_a13_keys_of_idle_limiters_on_the_store_are_dropped_too() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    idle = Limiter(per_second(10), store=store, name="idle")
    for i in range(1000):
        idle.check(f"agent-{i}")
    clock.advance(2)
    busy = Limiter(per_day(10**6), store=store, name="busy")
    for _ in range(1000):
        busy.check("agent")
    assert len(store) == 1


def test_a13_only_full_keys_are_dropped() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    limiter = Limiter(per_minute(60), store=store)
    limiter.check("half", 30)
    limiter.check("debtor")
    limiter.charge("debtor", 100)
    clock.advance(29.999)
    for i in range(10_000):
        limiter.check(f"passer-by-{i}")
    assert limiter.peek("half").remaining == 59
    assert limiter.peek("debtor").remaining == 0
    clock.advance(10)
    for i in range(10_000):
        limiter.check(f"passer-by-{i}")
    assert limiter.peek("half").remaining == 60
    assert not limiter.peek("debtor")


def test_a13_memory_follows_the_live_keys_while_new_ones_keep_coming() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    limiter = Limiter(per_minute(60), store=store)  # each of these keys is full again after one second
    sizes = []
    for i in range(50_000):
        clock.advance(0.001)
        limiter.check(f"agent-{i}")
        sizes.append(len(store))
    assert max(sizes) < 4000  # 1,000 are live; the rest came between two sweeps and during one


def test_denied_and_unlimited_keys_are_not_stored() -> None:
    store = MemoryStore()
    Limiter(per_minute(5), store=store).check("too much", 6)
    Limiter("unlimited", store=store).check("free")
    store.apply(Verb.CHECK, [Ask("", "free", UNLIMITED, 1), Ask("more", "free", UNLIMITED, 1)], 200)
    Limiter("blocked", store=store).check("never")
    Limiter(per_minute(5), store=store).peek("seen")
    Limiter(per_minute(5), store=store).refund("given", 3)
    assert len(store) == 0


def test_max_keys_denies_new_keys_and_keeps_blocked_ones_blocked(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock, max_keys=100)
    limiter = Limiter(per_minute(1), store=store)
    assert all(limiter.check(f"agent-{i}") for i in range(100))
    denied = [limiter.check(f"new-{i}") for i in range(1000)]
    assert not any(denied)
    assert {(decision.retry_after, decision.degraded) for decision in denied} == {(1.0, True)}
    assert [record.message for record in caplog.records] == [
        "MemoryStore: all 100 keys are in use; new ones are denied until some are full"
    ]
    assert not any(limiter.check(f"agent-{i}") for i in range(100)), "a blocked key stays blocked"
    assert len(store) == 100
    clock.advance(61)
    assert all(limiter.check(f"new-{i}") for i in range(100)), "full keys make room for new ones"
    assert len(store) == 100


def test_max_keys_does_not_stop_a_charge() -> None:
    store = MemoryStore(clock=ManualClock(), max_keys=1)
    limiter = Limiter(per_minute(10), store=store)
    limiter.check("known")
    assert not limiter.check("new")
    assert not limiter.charge("new", 20)
    assert len(store) == 2


def test_max_keys_applies_to_several_keys_at_once() -> None:
    store = MemoryStore(max_keys=1)
    asks = [Ask("", key, per_minute(1), 1) for key in "ab"]
    assert not store.apply(Verb.CHECK, asks, 200)
    assert len(store) == 0


def test_max_keys_bounds_a_flood_of_invented_agents() -> None:
    store = MemoryStore(clock=ManualClock(), max_keys=100)
    gate = Gate(store=store)
    for i in range(60):
        while gate.check(f"agent-{i}", "ws", "heavy"):
            pass
    for i in range(2000):
        decision = gate.check(f"flood-{i}", "ws", "heavy")
        assert decision or (decision.degraded and decision.violation is None)
        assert gate.record_violation(f"other-{i}") == 1.0
    assert len(store) == 100
    assert not any(gate.check(f"agent-{i}", "ws", "heavy") for i in range(50))


def test_a13_violations_are_dropped_too() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    gate = Gate(store=store)
    for i in range(20_000):
        gate.record_violation(f"agent-{i}")
        clock.advance(0.1)
    assert len(store) < 6000, "3,000 are within the alert window of five minutes"


def test_max_keys_bad_input() -> None:
    for bad in (0, -1, True, 1.5, "many"):
        with pytest.raises(ValueError, match=r"^MemoryStore max_keys: expected a whole number from 1 to 9007"):
            MemoryStore(max_keys=bad)  # type: ignore[arg-type]


def test_a_module_without_cases_is_a_mistake() -> None:
    """As one whose functions can't be told, such as a compiled one: then every store would conform."""
    with pytest.raises(AssertionError, match=r"test_memory has no cases: "):
        cases_of({"__name__": __name__, "make": max})


class ProxyClock:
    """A clock that passes all on to another."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._clock, name)


def test_a_clock_may_be_a_proxy() -> None:
    clock = ManualClock()
    limiter = Limiter(Budget(1, "day"), store=MemoryStore(clock=cast(Clock, ProxyClock(clock))))
    assert [bool(limiter.check("a")) for _ in range(2)] == [True, False]
    clock.advance(86_400)
    assert limiter.check("a")


@pytest.mark.parametrize("clock", [time.time, ManualClock, 5, SimpleNamespace(now=time.time, alarm=print),
                                   SimpleNamespace(now=1, alarm=2, wall=3)])  # fmt: skip
def test_a_clock_that_is_none_is_refused_at_once(clock: object) -> None:
    text = r"^MemoryStore clock: expected a clock, such as ManualClock\(\), with now, alarm and wall, got "
    with pytest.raises(InvalidInput, match=text):
        MemoryStore(clock=clock)  # type: ignore[arg-type]


def test_a_request_id_belongs_to_the_limit() -> None:
    """Another limiter of the same name gets a decision of its own, and not the one of the first."""
    store = MemoryStore()
    decisions = [Limiter(limit, store=store).check("a", request_id="1") for limit in (per_day(60), per_day(5))]
    assert [(str(decision.limit), decision.remaining) for decision in decisions] == [("60/day", 59), ("5/day", 4)]
    asks = [Ask("", "a", per_day(60), 1), Ask("", "a", per_day(7), 1)]
    assert store.apply(Verb.CHECK, asks, 0, None, "1").remaining == 6


def test_a13_request_ids_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """Of more than so many within a minute the oldest are forgotten."""
    store = MemoryStore(max_request_ids=3)
    limiter = Limiter(per_day(100), store=store)
    for number in range(10):
        limiter.check("a", request_id=str(number))
    assert [limiter.check("a", request_id=number).remaining for number in "987"] == [90, 91, 92]
    assert limiter.check("a", request_id="6").remaining == 89, "counted again"
    (record,) = caplog.records
    text = "MemoryStore: more than 3 request ids within a minute; the oldest are forgotten, "
    assert record.getMessage() == text + "so that a retry may be counted twice"


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "many", None])
def test_a_bad_bound_of_request_ids_is_refused(bad: Any) -> None:
    expected = "a whole number from 1 to 9007199254740991"
    assert refusal(MemoryStore, max_request_ids=bad) == f"MemoryStore max_request_ids: expected {expected}, got {bad!r}"
