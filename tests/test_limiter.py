"""Limiter: the verbs, sync and async, and bad input. The stores' part is the conformance suite's."""

import inspect
import math
from decimal import Decimal
from enum import StrEnum
from typing import Any

import pytest

from headgate import (
    UNLIMITED,
    InvalidInput,
    Limiter,
    ManualClock,
    MemoryStore,
    Outcome,
    SlidingWindow,
    parse,
    per_day,
    per_hour,
    per_minute,
    per_second,
)
from tests.support.refusals import refusal
from tests.support.verbs import Verbs


@pytest.mark.parametrize("cost", [2**60, Decimal(2**60), Decimal("1e400")])
def test_a_cost_above_every_capacity_is_denied_however_it_is_written(cost: Any) -> None:
    limiter = Limiter("5/minute")
    assert (limiter.check("a", cost).retry_after, limiter.peek("a").remaining) == (None, 5)


def test_check_spends_and_peek_spends_nothing(store: Any, verb: Verbs) -> None:
    limiter = Limiter(per_minute(10), store=store)
    check, peek = verb(limiter, "check"), verb(limiter, "peek")
    assert check("a").remaining == 9
    assert check("a", cost=4).remaining == 5
    assert [peek("a").remaining, peek("a", 5).outcome, peek("a", 6).outcome] == [5, Outcome.WARN, Outcome.DENY]
    assert peek("a").remaining == 5


def test_charge_leaves_a_debt_that_refill_pays_off(store: Any, verb: Verbs) -> None:
    limiter = Limiter(per_minute(60), store=store)
    decision = verb(limiter, "charge")("a", 100)
    assert (bool(decision), decision.remaining, decision.retry_after, decision.reset_after) == (False, 0, 41.0, 100.0)
    store.clock.advance(41)
    assert verb(limiter, "check")("a").remaining == 0


def test_refund_stops_at_the_capacity(store: Any, verb: Verbs) -> None:
    limiter = Limiter(per_minute(10), store=store)
    verb(limiter, "check")("a", 6)
    assert verb(limiter, "refund")("a").remaining == 5
    assert verb(limiter, "refund")("a", 3).remaining == 8
    assert verb(limiter, "refund")("a", 300).remaining == 10


def test_reset_forgets_a_count_and_reports_whether_there_was_one(store: Any, verb: Verbs) -> None:
    limiter = Limiter(per_minute(10), store=store)
    reset = verb(limiter, "reset")
    assert reset("a") is False
    limiter.check("a", 10)
    assert reset("a") is True
    assert limiter.check("a").remaining == 9
    store.clock.advance(60)
    assert reset("a") is False, "a full bucket is the same as none"


def test_every_verb_has_an_async_twin() -> None:
    for name in ("check", "peek", "charge", "refund", "reset", "acquire"):
        assert inspect.iscoroutinefunction(getattr(Limiter, f"a{name}"))


@pytest.mark.parametrize(("warn_at", "outcomes"), [(0.5, "aaaaawwwww"), (1, "aaaaaaaaaa"), (0, "wwwwwwwwww")])
def test_a1_the_share_at_which_warnings_begin_can_be_set(warn_at: float, outcomes: str) -> None:
    limiter = Limiter(per_day(10), warn_at=warn_at)
    assert "".join(limiter.check("a").outcome.value[0] for _ in range(10)) == outcomes


def test_a3_keys_are_independent() -> None:
    limiter = Limiter(per_day(1))
    assert all(limiter.check(key) for key in ("a", "b", "a:b", "", "A", "a "))
    assert not any(limiter.check(key) for key in ("a", "b", "a:b", "", "A", "a "))


def test_a5_setting_the_wall_clock_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    limiter = Limiter(per_second(1000, burst=1))
    assert limiter.check("a")
    monkeypatch.setattr("time.time", lambda: 0.0)
    decision = limiter.check("a")
    assert decision or (decision.retry_after or 0) <= 0.001
    assert limiter.acquire("a", timeout=5)


# Arguments ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        (per_minute(60), "60/minute"),
        ("60/minute burst 10", "60/minute burst 10"),
        ([per_second(5), per_minute(100)], "5/second; 100/minute"),
        (("5/second", per_minute(100)), "5/second; 100/minute"),
        ([per_second(5)], "5/second"),
        (UNLIMITED, "unlimited"),
    ],
)
def test_a_limiter_takes_a_limit_its_text_or_several(given: Any, limit: str) -> None:
    assert Limiter(given).limit == parse(limit)


def test_limiters_on_one_store_share_counts_by_name_and_limit() -> None:
    store = MemoryStore()
    Limiter(per_hour(5), store=store, name="api").check("a", 5)
    assert not Limiter(per_hour(5), store=store, name="api").check("a")
    assert Limiter(per_hour(5), store=store, name="web").check("a")
    assert Limiter(per_hour(6), store=store, name="api").check("a")
    assert Limiter(per_hour(5), name="api").check("a"), "a store of its own, where none is given"


def test_repr_and_store_of_a_limiter() -> None:
    store = MemoryStore()
    limiter = Limiter("60/minute", store=store, name="api")
    assert repr(limiter) == "Limiter('60/minute', name='api')"
    assert repr(Limiter("60/minute")) == "Limiter('60/minute')"
    assert limiter.store is store


class Plan(StrEnum):
    FREE = "free"


def test_a_key_may_be_a_subclass_of_str() -> None:
    limiter = Limiter(per_day(1))
    assert limiter.check(Plan.FREE)
    assert not limiter.check("free")


class Odd(str):
    """A string that equals nothing, not even itself."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        raise AssertionError("this hash doesn't count")


def test_a_key_counts_by_its_text_alone() -> None:
    limiter = Limiter(per_day(1))
    assert limiter.check(Odd("a"))
    assert not limiter.check(Odd("a"))
    assert not limiter.check("a")


@pytest.mark.parametrize("bad", [42, None, b"a", ("a", "b"), 1.5])
def test_a_key_that_is_not_a_string_is_refused(bad: Any, verb: Verbs) -> None:
    store = MemoryStore()
    limiter = Limiter(per_minute(10), store=store)
    for name, args in (("check", ()), ("peek", ()), ("charge", (1,)), ("refund", ()), ("reset", ()), ("acquire", ())):
        assert refusal(verb(limiter, name), bad, *args) == f"key: expected a string, got {bad!r}"
    with pytest.raises(InvalidInput):
        limiter.waiting(bad)
    assert len(store) == 0


@pytest.mark.parametrize("bad", [0, -5, math.nan, math.inf, 1.5, True, "1", None])
def test_a_bad_cost_is_refused(bad: Any, verb: Verbs) -> None:
    store = MemoryStore()
    limiter = Limiter(per_minute(10), store=store)
    for name in ("check", "peek", "charge", "refund", "acquire"):
        assert refusal(verb(limiter, name), "a", bad) == f"cost: expected a whole number of at least 1, got {bad!r}"
    assert len(store) == 0


@pytest.mark.parametrize("cost", [11, 2**53, 2**63, 10**30])
def test_a_cost_above_the_capacity_never_passes(cost: int, store: Any, verb: Verbs) -> None:
    limiter = Limiter(per_minute(10), store=store)
    for name in ("check", "peek", "acquire"):
        decision = verb(limiter, name)("a", cost)
        assert (decision.outcome, decision.retry_after) == (Outcome.DENY, None)
    assert limiter.peek("a").remaining == 10


@pytest.mark.parametrize("cost", [2**53, 2**63, 10**30])
def test_a_debt_has_a_bottom(cost: int) -> None:
    limiter = Limiter([per_minute(10), SlidingWindow(10, 60)], store=MemoryStore(clock=ManualClock()))
    for _ in range(3):
        decision = limiter.charge("a", cost)
        assert not decision
        assert decision.retry_after is not None
    assert limiter.refund("a", 10**30).remaining == 10


def test_bad_arguments_are_refused() -> None:
    for bad, text in (
        (5, "Limiter limit: expected a limit such as '5/minute', or several, got 5"),
        ([], "AllOf: expected at least two different limits (a single one needs no AllOf), got []"),
        ([5], "Limiter limit: expected a limit such as '5/minute', or several, got 5"),
    ):
        assert refusal(Limiter, bad) == text
    for bad_name in (5, None, b"api"):
        assert refusal(Limiter, "1/day", name=bad_name) == f"Limiter name: expected a string, got {bad_name!r}"
    for share in (-0.1, 1.1, 0.8005, math.nan, True, "0.8", None):
        expected = "a number from 0 to 1 with at most three decimals"
        assert refusal(Limiter, "1/day", warn_at=share) == f"Limiter warn_at: expected {expected}, got {share!r}"
    for bad_store in ("localhost", 5):
        expected = "a store such as MemoryStore(), or a URL such as redis://localhost or memory://"
        assert refusal(Limiter, "1/day", store=bad_store) == f"Limiter store: expected {expected}, got {bad_store!r}"


@pytest.mark.parametrize("share", [0, 0.125, 0.8, 1])
def test_warn_at_is_readable(share: float) -> None:
    assert Limiter("5/minute", warn_at=share).warn_at == share


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"key_func": len},
            "got 'key_func'; the key is an argument of check, and the key= of RateLimitMiddleware (docs",
        ),
        (
            {"limit": "5/minute", "storage_uri": "x"},
            "got 'storage_uri'; did you mean store=? (docs/coming-from.md lists",
        ),
        ({"default_limits": ["5/minute"]}, "got 'default_limits'; put Depends(RateLimit(...)) on the routes"),
        ({"limit_value": "5/minute"}, "got 'limit_value'; did you mean limit=? (docs"),
        ({"limit": "5/minute", "strategy": "x"}, "got 'strategy'; say it in the limit: '5/minute' is a token bucket"),
        ({"limit": "5/minute", "nmae": "x"}, "got 'nmae'; did you mean name=?"),
        ({"limit": "5/minute", "colour": "x"}, "got 'colour'; see help(headgate.Limiter)"),
    ],
)
def test_options_of_other_libraries_get_a_hint(options: Any, text: str) -> None:
    refused = refusal(Limiter, **options)
    assert refused.startswith("Limiter: expected options among limit, store, name, warn_at, remember, got")
    assert text in refused


def test_a_limiter_needs_a_limit() -> None:
    with pytest.raises(InvalidInput, match="Limiter limit: expected a limit, its text, or several of either, got None"):
        Limiter()
