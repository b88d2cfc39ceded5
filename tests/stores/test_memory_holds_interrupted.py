"""An exception of a signal's handler at every point of a verb on a hold in memory, which is then repeated."""

from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from headgate import Gate, Limiter, ManualClock, MemoryStore, Policy
from headgate.errors import HoldError
from tests.support.interruptions import interrupt

pytestmark = pytest.mark.once

LEASE = 60
LONG = 6 * 86_400
CLAIMED = ["10/minute", "10/minute sliding", "10 in all", "10/minute; 20/hour", "10 in all; 3 in flight"]
OLDER_LEASE = 5


def left(limiter: Limiter) -> int:
    """What is left of the budget, the window or the buckets."""
    limits = [one for one in str(limiter.limit).split("; ") if "flight" not in one]
    return Limiter("; ".join(limits), store=limiter.store).peek("k").remaining


@pytest.mark.parametrize("limit", CLAIMED)
@pytest.mark.parametrize("hold_id", [None, "own"])
@pytest.mark.parametrize("actual", [2, 9, 0])
def test_a_settlement_that_is_interrupted_and_repeated_gives_nothing_back_twice(
    limit: str, hold_id: str | None, actual: int
) -> None:
    for step in range(1, 10_000):
        limiter = Limiter(limit, store=MemoryStore(clock=ManualClock()))
        hold = limiter.hold("k", 6, hold_id=hold_id)
        interrupted = interrupt(step, lambda hold=hold: hold.settle(actual), KeyboardInterrupt)  # type: ignore[misc]
        with suppress(HoldError):  # the handle doesn't know that it has been settled
            hold.settle(actual)
        assert left(limiter) <= 10 - actual, step
        if not interrupted:
            assert left(limiter) == 10 - actual
            break


@pytest.mark.parametrize("limit", CLAIMED)
def test_what_an_interrupted_step_leaves_of_a_released_hold_is_not_given_back_twice(limit: str) -> None:
    for step in range(1, 10_000):
        clock = ManualClock()
        limiter = Limiter(f"{limit}; 50/calendar day", store=MemoryStore(clock=clock))
        hold = limiter.hold("k", 6, on_expiry="release", lease=OLDER_LEASE)
        clock.advance(OLDER_LEASE)
        interrupted = interrupt(step, lambda limiter=limiter: limiter.peek("k"), KeyboardInterrupt)  # type: ignore[misc]
        hold.settle(6)
        assert Limiter("50/calendar day", store=limiter.store).peek("k").remaining <= 44, step
        if not interrupted:
            break


@pytest.mark.parametrize("verb", ["hold", "settle", "cancel", "extend", "expire"])
@pytest.mark.parametrize("limit", ["3 in flight", "1000 in all; 3 in flight"])
def test_an_interrupted_verb_loses_no_slot_beyond_its_lease(verb: str, limit: str) -> None:
    for step in range(1, 10_000):
        clock = ManualClock()
        limiter = Limiter(limit, store=MemoryStore(clock=clock))
        assert limiter.hold("k", lease=LONG, hold_id="other")  # as long as it is open, what is counted isn't forgotten
        hold = limiter.hold("k", lease=LEASE, hold_id="mine")

        def work(limiter: Limiter = limiter, hold: Any = hold) -> None:
            if verb == "hold":
                limiter.hold("k", lease=LEASE)
            elif verb == "extend":
                hold.extend(lease=2 * LEASE)
            else:
                getattr(hold, verb)()

        interrupted = interrupt(step, work, KeyboardInterrupt)
        if verb == "extend":
            assert not (limiter.hold("k") and limiter.hold("k")), step  # two are taken
        clock.advance(3 * LEASE)
        assert [bool(limiter.hold("k")) for _ in range(3)] == [True, True, False], step
        if not interrupted:
            break


@pytest.mark.parametrize("remember", [False, True])
def test_an_interrupted_settlement_of_accounts_leaves_no_level_with_too_little(remember: bool, tmp_path: Path) -> None:
    policy = Policy(
        accounts={
            "default": {"agent": {"tokens": "100/calendar day"}, "session": {"tokens": "100 in all"}},
            "at": {"acme": {"tokens": "100/minute", "usd": "100/calendar month"}},
        },
        agents={"planner": {"account": "acme/search"}},
    )
    actual = {"tokens": 20, "usd": 3}
    for step in range(1, 10_000):
        store = MemoryStore(clock=ManualClock(), remember=tmp_path / f"{step}.db" if remember else None)
        gate = Gate(policy, store=store)
        hold = gate.hold("planner", {"tokens": 60, "usd": 1}, session="run")
        interrupted = interrupt(step, lambda hold=hold: hold.settle(actual), KeyboardInterrupt)  # type: ignore[misc]
        with suppress(HoldError):
            hold.settle(actual)
        for one in gate.explain("planner", session="run"):
            assert one.left <= (80 if one.resource == "tokens" else 97), (step, one)
        first, last = gate.usage_days()
        used = {one.resource: one.amount for one in gate.usage(first, last + timedelta(days=1))}
        assert used["tokens"] >= 20, step
        assert used["usd"] >= 3, step
        store.close()
        if not interrupted:
            break


@pytest.mark.parametrize("verb", ["check", "charge", "refund", "settle", "cancel"])
def test_an_interrupted_verb_leaves_a_window_that_counts_on(verb: str) -> None:
    for step in range(1, 10_000):
        clock = ManualClock()
        limiter = Limiter("10/minute sliding", store=MemoryStore(clock=clock))
        limiter.check("k", 2)
        clock.advance(1)
        hold = limiter.hold("k", 3)
        clock.advance(1)

        def work(limiter: Limiter = limiter, hold: Any = hold) -> None:
            if verb in {"settle", "cancel"}:
                hold.settle(1 if verb == "settle" else 0)
            else:
                getattr(limiter, verb)("k", 2)

        interrupted = interrupt(step, work, KeyboardInterrupt)
        clock.advance(1)
        passed = 0
        while limiter.check("k"):
            passed += 1
        assert 3 <= passed <= (8 if interrupted or verb != "refund" else 7), step
        clock.advance(59)
        assert limiter.peek("k").remaining >= 2, step  # the first has left
        clock.advance(3600)
        assert limiter.peek("k").remaining == 10, step
        if not interrupted:
            break


def test_an_interrupted_sweep_loses_no_key() -> None:
    for step in range(1, 10_000):
        clock = ManualClock()
        limiter = Limiter("10/hour", store=MemoryStore(clock=clock))
        for number in range(5):
            limiter.check(f"k{number}", 10)
        clock.advance(2)
        interrupted = interrupt(step, lambda limiter=limiter: limiter.check("new"), KeyboardInterrupt)  # type: ignore[misc]
        for number in range(10):
            limiter.check(f"other{number}")  # a round through all keys
        assert not any(limiter.check(f"k{number}") for number in range(5)), step
        if not interrupted:
            break
