"""Holds: reserved now, settled later, on a limiter in memory."""

import asyncio
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from headgate import (
    Decision,
    Hold,
    HoldError,
    InvalidInput,
    Limiter,
    ManualClock,
    MemoryStore,
    RateLimited,
    UnknownHold,
)
from headgate.hold_attempt import LimiterAttempt
from headgate.holds import HoldSummary
from headgate.limits.notation import parse
from headgate.stores.base import Ask
from headgate.stores.hold_ids import HOLD_IDS
from headgate.stores.hold_terms import HoldTerms
from headgate.stores.holds import MAX_OPEN_HOLDS
from headgate.wait_queue import WaitQueues
from tests.support.event_loop import wait_until
from tests.support.limiters import left, make_limiter


@pytest.mark.parametrize("limit", ["100/minute", "100/minute; 200/hour", "100 in all", "100/minute sliding"])
def test_f1_what_is_held_counts_and_the_settled_cost_replaces_it(clock: ManualClock, limit: str) -> None:
    limiter = make_limiter(limit, clock)
    hold = limiter.hold("a", 60)
    assert hold
    assert (hold.state, hold.decision.remaining, left(limiter)) == ("open", 40, 40)
    assert not limiter.hold("a", 41)
    assert hold.settle(10).remaining == 90
    assert hold.state == "settled"
    assert left(limiter) == 90


def test_a_settle_may_charge_more_than_was_held_even_into_debt(clock: ManualClock) -> None:
    limiter = make_limiter("100/minute", clock)
    hold = limiter.hold("a", 60)
    decision = hold.settle(160)
    assert not decision
    assert decision.retry_after == pytest.approx(36.6)
    assert limiter.peek("a", 1).remaining == 0


def test_cancelling_gives_back_everything(clock: ManualClock) -> None:
    limiter = make_limiter("100/minute", clock)
    hold = limiter.hold("a", 60)
    assert hold.cancel().remaining == 100
    assert hold.state == "cancelled"


@pytest.mark.parametrize("wait", [0.0, 20.0, 30.0, 600.0])
def test_what_is_given_back_late_lets_no_more_through_than_the_limit(clock: ManualClock, wait: float) -> None:
    limiter = make_limiter("60/minute burst 10", clock)
    hold = limiter.hold("a", 5)
    clock.advance(wait)
    spent = 0
    while spent < 3 and limiter.check("a"):
        spent += 1
    hold.cancel()
    while limiter.check("a"):
        spent += 1
    assert spent == 10


def test_a_bucket_gives_back_what_would_be_left_without_the_hold(clock: ManualClock) -> None:
    limiter, other = make_limiter("60/minute burst 10", clock), make_limiter("60/minute burst 10", clock)
    first, second = limiter.hold("a", 2), limiter.hold("a", 3)
    clock.advance(1)
    limiter.check("a", 4)
    other.check("a", 4)
    second.cancel()
    first.cancel()
    # Without the holds the bucket would have been full before 4 were spent.
    assert left(limiter) == left(other) == 6


def test_holds_that_share_a_headroom_share_what_comes_back(clock: ManualClock) -> None:
    limiter = make_limiter("60/minute burst 10", clock)
    one, other = limiter.hold("a", 3), limiter.hold("a", 3)
    clock.advance(4)
    assert limiter.check("a").remaining == 7  # 2 were missing just before, which is the least for both holds
    assert one.settle(2).remaining == 8
    assert other.cancel().remaining == 9


def test_slots_are_free_at_the_end_of_the_lease_exactly(clock: ManualClock) -> None:
    limiter = make_limiter("2 in flight", clock)
    holds = [limiter.hold("a", lease=30) for _ in range(3)]
    assert [bool(hold) for hold in holds] == [True, True, False]
    assert holds[2].decision.retry_after == 30.0
    clock.advance(29.999999)
    assert not limiter.hold("a")
    clock.advance(0.000001)
    assert limiter.hold("a")
    assert holds[0].state == "expired"
    assert holds[0].lost


def test_a_settled_hold_frees_its_slot_once(clock: ManualClock) -> None:
    limiter = make_limiter("2 in flight", clock)
    first, _ = limiter.hold("a"), limiter.hold("a")
    assert not limiter.hold("a")
    first.settle()
    first.settle()
    assert limiter.hold("a")
    assert not limiter.hold("a")


def test_costs_stay_when_the_lease_ends_or_come_back(clock: ManualClock) -> None:
    limiter = make_limiter("100 usd/calendar day", clock)
    limiter.hold("keep", "2.50", lease=10)
    released = limiter.hold("release", "2.50", lease=10, on_expiry="release")
    assert left(limiter, "release") == 97
    clock.advance(10)
    assert (left(limiter, "keep"), left(limiter, "release")) == (97, 100)
    assert released.state == "expired"
    assert released.settle("1").remaining == 99


def test_a_late_settle_corrects(clock: ManualClock) -> None:
    limiter = make_limiter("100 usd in all", clock)
    hold = limiter.hold("a", 10, lease=1)
    clock.advance(3600)
    assert hold.state == "expired"
    assert hold.settle("0.0312").left == Decimal("99.9688")
    assert limiter.peek("a", Decimal("99.9688"))
    assert not limiter.peek("a", Decimal("99.968801"))


def test_an_expired_hold_that_was_found_is_settled_with_what_was_used(clock: ManualClock) -> None:
    limiter = make_limiter("100/day", clock)
    hold = limiter.hold("a", 60, lease=5)
    clock.advance(5)
    found = limiter.find_hold("a", hold.id)
    assert found.state == "expired"
    with (
        pytest.raises(HoldError, match="expected an open hold to run a block, got one that is expired with cost 60"),
        found,
    ):
        pytest.fail("it ran without its reservation")
    found.use(7)
    found.settle()
    assert (found.state, left(limiter)) == ("settled", 93)


def test_a_hold_is_forgotten_a_day_after_its_end(clock: ManualClock) -> None:
    limiter = make_limiter("100 usd in all", clock)
    hold = limiter.hold("a", 10, lease=1)
    clock.advance(86_400.999999)
    assert limiter.find_hold("a", hold.id).state == "expired"
    clock.advance(0.000001)
    with pytest.raises(UnknownHold, match=f"unknown hold '{hold.id}' of 'a': it was never made, or it ended too long"):
        hold.settle(1)
    assert left(limiter) == 90


def test_every_verb_may_be_repeated(clock: ManualClock) -> None:
    limiter = make_limiter("100/minute; 3 in flight", clock)
    first = limiter.hold("a", 10, hold_id="one")
    again = limiter.hold("a", 10, hold_id="one")
    assert (bool(again), again.id) == (True, "one")
    assert limiter.peek("a", 90)
    assert not limiter.peek("a", 91)
    for _ in range(2):
        again.extend(5)
        assert not limiter.peek("a", 86)
        again = limiter.find_hold("a", "one")
        again._costs = (10,)  # as a caller who didn't get the answer
    for hold in (first, again):
        hold.settle(12)
    assert limiter.peek("a", 88)
    assert not limiter.peek("a", 89)
    with pytest.raises(HoldError, match="hold 'one': expected cost 12, with which it is settled, got cost 13") as other:
        again.settle(13)
    with pytest.raises(HoldError, match="expected cost 12"):
        again.cancel()
    with pytest.raises(HoldError, match="an open hold to extend, got one that is settled with cost 12") as ended:
        again.extend(1)
    assert (other.value.state, ended.value.state) == ("settled", "settled")
    assert limiter.hold("a", 10, hold_id="one").state == "settled"
    assert limiter.peek("a", 88)


def test_an_id_belongs_to_its_key_and_its_cost(clock: ManualClock) -> None:
    limiter = make_limiter("100/minute", clock)
    limiter.hold("a", 10, hold_id="one")
    assert limiter.hold("b", 20, hold_id="one")
    with pytest.raises(HoldError, match="hold 'one': expected cost 10, with which it is open, got cost 11"):
        limiter.hold("a", 11, hold_id="one")
    with pytest.raises(UnknownHold):
        limiter.find_hold("c", "one")
    assert (left(limiter, "a"), left(limiter, "b")) == (90, 80)


def test_extending_is_all_or_nothing(clock: ManualClock) -> None:
    limiter = make_limiter("20/minute; 100 tokens/calendar day", clock)
    hold = limiter.hold("a", 5, lease=10)
    assert not hold.extend(16, lease=60)
    assert hold.state == "open"
    clock.advance(9)
    assert hold.extend(10, lease=60)
    clock.advance(59)
    assert hold.state == "open"
    assert hold.settle(7)
    assert limiter.peek("a", 93).bound is not None


def test_after_the_end_nothing_can_be_extended(clock: ManualClock) -> None:
    limiter = make_limiter("20/minute", clock)
    hold = limiter.hold("a", 5, lease=10)
    clock.advance(10)
    with pytest.raises(HoldError, match="expected an open hold to extend, got one that is expired with cost 5"):
        hold.extend(1)


def test_a_budget_keeps_what_is_spent_when_its_amount_changes(clock: ManualClock) -> None:
    store = MemoryStore(clock=clock)
    small, large = (Limiter(f"{n} usd/calendar month", store=store, name="llm") for n in (10, 20))
    hold = small.hold("a", 8)
    assert large.peek("a").remaining == 12
    hold.settle(9)
    assert (small.peek("a").remaining, large.peek("a").remaining) == (1, 11)


def test_a_settle_books_to_the_period_of_its_hold(clock: ManualClock) -> None:
    limiter = make_limiter("10 usd/calendar hour", clock)
    before = limiter.hold("a", 8, lease=60)
    wait = limiter.check("a", 3).retry_after
    assert wait is not None
    clock.advance(wait)
    limiter.hold("a", 4)
    before.settle(1)
    assert left(limiter) == 6
    limiter.hold("a", 2).settle(3)
    assert left(limiter) == 3


def test_check_on_slots_alone_says_hold(clock: ManualClock) -> None:
    limiter = make_limiter("2 in flight", clock)
    for verb in (limiter.check, limiter.charge, limiter.refund):
        with pytest.raises(InvalidInput, match=r"expected a limit that counts requests \(a slot is taken by `hold`\)"):
            verb("a", 1)
    assert limiter.peek("a").remaining == 2


def test_a_check_is_denied_while_no_slot_is_free_and_takes_none(clock: ManualClock) -> None:
    limiter = make_limiter("100/minute; 1 in flight", clock)
    assert limiter.check("a")
    assert limiter.check("a")
    hold = limiter.hold("a", 10)
    denied = limiter.check("a")
    assert (bool(denied), denied.bound, str(denied.limit)) == (False, 1, "1 in flight")
    hold.settle()
    assert limiter.check("a")


def test_what_can_not_be_counted_is_refused_and_changes_nothing(clock: ManualClock) -> None:
    limiter = make_limiter("3 in flight", clock)
    hold = limiter.hold("a")
    hold.use(2**53 - 1)
    for verb in (hold.use, hold.extend):
        with pytest.raises(InvalidInput, match=f"cost: expected at most {2**53 - 1} in all, got {2**53 - 1}"):
            verb(2**53 - 1)
    hold.settle()
    assert limiter.peek("a").remaining == 3


@pytest.mark.parametrize("hold_id", [None, "id"])
def test_a_settlement_that_can_not_be_counted_is_refused(clock: ManualClock, hold_id: str | None) -> None:
    limiter = make_limiter("10/day", clock)
    hold = limiter.hold("a", hold_id=hold_id)
    with pytest.raises(InvalidInput, match=f"cost: expected at most {2**53 - 1} in all, got {2**53}"):
        hold.settle(2**53)
    assert (hold.state, limiter.peek("a").remaining) == ("open", 9)
    assert hold.settle(2**53 - 1).remaining == 0


def test_holds_are_listed(clock: ManualClock) -> None:
    limiter = make_limiter("100/minute", clock)
    limiter.hold("a", 1, hold_id="long", lease=60)
    limiter.hold("a", 2, hold_id="short", lease=10)
    limiter.hold("a", 3, hold_id="done").settle(4)
    limiter.hold("b", 5)
    clock.advance(20)
    found = limiter.list_holds("a")
    assert found == [
        HoldSummary("long", "open", Decimal(1), 40.0),
        HoldSummary("short", "expired", Decimal(2), 0.0),
        HoldSummary("done", "settled", Decimal(4), 0.0),
    ]
    assert len(limiter.list_holds("a", 2)) == 2
    clock.advance(86_400 + 40)
    assert limiter.list_holds("a") == []


def test_holds_are_listed_with_ids_that_nobody_has_asked_for_before(clock: ManualClock) -> None:
    limiter = make_limiter("100/minute", clock)
    holds = [limiter.hold("a", cost) for cost in (1, 2, 3)]
    holds[2].cancel()
    first, second = limiter.list_holds("a")
    assert sorted([int(first.cost), int(second.cost)]) == [1, 2]
    assert first.state == second.state == "open"
    assert {first.id, second.id} == {hold.id for hold in holds[:2]}
    limiter.find_hold("a", holds[0].id).settle(5)
    with pytest.raises(HoldError, match="expected cost 5, with which it is settled, got cost 4"):
        holds[0].settle(4)
    assert holds[0].settle(5).remaining == left(limiter) == 93


def test_an_id_that_is_asked_for_after_the_end_is_found(clock: ManualClock) -> None:
    limiter = make_limiter("100/minute", clock)
    hold = limiter.hold("a", 5)
    hold.settle(3)
    assert hold.settle(3).remaining == 97
    assert limiter.find_hold("a", hold.id).state == "settled"
    with pytest.raises(HoldError, match="expected cost 3, with which it is settled, got cost 4"):
        hold.settle(4)
    clock.advance(86_400)
    with pytest.raises(UnknownHold):
        limiter.find_hold("a", hold.id)


def test_settled_holds_whose_id_nobody_knows_are_not_kept(clock: ManualClock) -> None:
    limiter = make_limiter("100000/minute", clock)
    kept = limiter.hold("b", 1)
    for number in range(1000):
        hold = limiter.hold("a", 5)
        (hold.cancel if number % 2 else hold.settle)()
    assert isinstance(limiter.store, MemoryStore)
    assert len(limiter.store.holds) == 1
    assert kept.settle(2).remaining == 99_998


def test_a_reset_forgets_the_holds_of_a_key(clock: ManualClock) -> None:
    limiter = make_limiter("10 usd in all; 1 in flight", clock)
    hold = limiter.hold("a", 8)
    assert limiter.reset("a")
    assert limiter.hold("a", 10)
    with pytest.raises(UnknownHold):
        hold.cancel()
    assert not limiter.hold("a", 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lease": 0}, r"hold lease: expected 0\.001 to 604800 seconds \(a `with` block renews it .*\), got 0"),
        ({"lease": 31_536_000}, "hold lease: expected .*, got 31536000"),
        ({"lease": -1}, "hold lease: expected a number of seconds, 0 or more, got -1"),
        ({"cost": 0}, "cost: expected a number above 0, got 0"),
        ({"cost": -1}, "cost: expected a number above 0, got -1"),
        ({"cost": "0.0000001"}, r"cost: expected a number with at most 6 decimals .*, got '0\.0000001'"),
        ({"hold_id": ""}, "hold_id: expected 1 to 200 characters, got ''"),
        ({"on_expiry": "burn"}, "hold on_expiry: expected 'keep' or 'release', got 'burn'"),
        ({"keep": 31_536_000}, "hold keep: expected at most 604800 seconds"),
        ({"max_age": -1}, "hold max_age: expected a number of seconds"),
        ({"timeout": Decimal("sNaN")}, r"timeout: expected a number of seconds, 0 or more, got Decimal\('sNaN'\)"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_counted(clock: ManualClock, options: dict[str, object], text: str) -> None:
    limiter = make_limiter("10 usd in all", clock)
    with pytest.raises(InvalidInput, match=text):
        limiter.hold("a", **options)  # type: ignore[arg-type]
    assert left(limiter) == 10
    assert limiter.list_holds("a") == []


def test_what_is_spent_is_rounded_up_where_it_has_too_many_decimals(clock: ManualClock) -> None:
    limiter = make_limiter("10 usd in all", clock)
    limiter.hold("a", 1).settle(0.1 + 0.2)
    assert limiter.peek("a").left == Decimal("9.699999")
    with limiter.hold("a", 1) as hold:
        hold.use(Fraction(1, 3))
        hold.use("0.0000001")
        hold.use(Decimal("0.1"))
        with pytest.raises(InvalidInput, match="cost: expected a number with at most 6 decimals"):
            hold.extend(0.1 + 0.2)  # what is reserved is chosen
    assert limiter.peek("a").left == Decimal("9.699999") - Decimal("0.433334"), "the sum is exact, and rounded up once"
    with limiter.hold("a", 1) as stream:
        for _ in range(1000):
            stream.use(1.5e-7)
    assert limiter.peek("a").left == Decimal("9.266665") - Decimal("0.000150")
    other = make_limiter("10 in all", clock).hold("a", 3)
    for wrong in (1.5, "1.5", Decimal("1.5")):
        with pytest.raises(InvalidInput, match="cost: expected a whole number"):
            other.settle(wrong)


@pytest.mark.long
def test_open_holds_of_a_key_are_bounded(clock: ManualClock) -> None:
    limiter = make_limiter("10000000/minute", clock)
    held = [limiter.hold("a", lease=1, keep=1) for _ in range(MAX_OPEN_HOLDS)]
    with pytest.raises(HoldError, match=f"expected at most {MAX_OPEN_HOLDS} open holds of 'a', got one more"):
        limiter.hold("a")
    assert limiter.hold("b")
    for hold in held[:3]:
        hold.settle()
    assert all(limiter.hold("a", lease=1, keep=1) for _ in range(3))  # settled ones are remembered, and not in the way
    with pytest.raises(HoldError):
        limiter.hold("a")
    clock.advance(1)
    assert limiter.hold("a")


async def test_the_async_twins(clock: ManualClock) -> None:
    limiter = make_limiter("100/minute; 1 in flight", clock)

    async def waits() -> Hold:
        return await limiter.ahold("a", 1, timeout=60)

    async with limiter.ahold("a", 10) as hold:
        assert not await limiter.ahold("a", 1)
        hold.use(3)
        assert await hold.aextend(20)
    assert limiter.peek("a", 97)
    assert not limiter.peek("a", 98)
    other = await limiter.ahold("a", 5, hold_id="one")
    waiter = asyncio.create_task(waits())
    await wait_until(lambda: limiter.waiting("a"), "the queue")
    assert (await limiter.afind_hold("a", "one")).state == "open"
    assert len(await limiter.alist_holds("a")) == 2
    await other.acancel()
    assert await waiter
    with pytest.raises(RateLimited):
        async with limiter.ahold("a", 1):
            pytest.fail("it ran")
    with pytest.raises(ZeroDivisionError):
        async with limiter.ahold("b", 60) as failed:
            _ = 1 / 0
    assert failed.state == "expired"
    await failed.asettle(1)


def test_costs_in_errors_are_in_units(clock: ManualClock) -> None:
    limiter = make_limiter("10 usd in all", clock)
    hold = limiter.hold("a", "0.25", hold_id="one")
    with pytest.raises(HoldError, match=r"hold 'one': expected cost 0\.25, with which it is open, got cost 0\.5"):
        limiter.hold("a", "0.5", hold_id="one")
    hold.settle("0.2")
    with pytest.raises(HoldError, match=r"expected cost 0\.2, with which it is settled, got cost 0\.3"):
        hold.settle("0.3")


def test_a_reset_leaves_the_holds_of_other_limiters_alone(clock: ManualClock) -> None:
    store = MemoryStore(clock=clock)
    rate, slots, money = (Limiter(limit, store=store) for limit in ("10/minute", "1 in flight", "100 in all"))
    held, spent = slots.hold("a"), money.hold("a", 10, on_expiry="release", lease=60)
    rate.hold("a", 5)
    assert rate.reset("a")
    assert not slots.hold("a")
    held.settle()
    assert slots.hold("a")
    clock.advance(60)
    assert money.peek("a").remaining == 100
    assert spent.state == "expired"


class Resources:
    """The owner of holds on two resources, as a gate is: a cost is a mapping."""

    low = 200

    def __init__(self, store: MemoryStore) -> None:
        self.hold_store = store

    def asks(self, tokens: int, usd: int) -> tuple[Ask, ...]:
        return Ask("tokens", "a", parse("100 in all"), tokens), Ask("usd", "a", parse("10 in all"), usd)

    def read_costs(self, cost: object, unnamed: tuple[int, ...], *, spent: bool = False) -> tuple[int, ...]:
        assert isinstance(cost, dict)
        return cost.get("tokens", unnamed[0]), cost.get("usd", unnamed[1])

    def denial(self, key: str, decision: Decision) -> RateLimited:
        raise NotImplementedError

    def freed(self, key: str) -> None:
        """Nobody waits."""

    def left(self) -> list[int]:
        return [one.remaining for one in self.hold_store.peek_each(self.asks(1, 1), 0)]


def hold_resources(clock: ManualClock, **options: Any) -> tuple[Resources, Hold]:
    owner = Resources(MemoryStore(clock=clock))
    attempt = attempt_at(owner, owner.asks(50, 8), hold_id="one", **options)
    return owner, attempt.run(WaitQueues(), "a", 0)


def attempt_at(owner: Resources, asks: tuple[Ask, ...], *, hold_id: str = "", **options: Any) -> LimiterAttempt:
    terms = HoldTerms(hold_id or HOLD_IDS.new(), 60_000_000, False, 60_000_000, **options)
    return LimiterAttempt(owner, asks, terms, None, own_id=not hold_id)


@pytest.mark.parametrize(
    ("used", "settled", "left"),
    [
        ([], None, [50, 2]),
        ([{"tokens": 3}, {"tokens": 4}], None, [93, 2]),
        ([{"tokens": 0}], None, [100, 2]),
        ([{"usd": 3}], {"tokens": 1}, [99, 7]),
        ([{"usd": 3}], {"usd": 5}, [50, 5]),
        ([], {}, [50, 2]),
    ],
)
def test_f1_a_resource_that_was_not_used_is_settled_with_what_was_reserved(
    clock: ManualClock, used: list[dict[str, int]], settled: dict[str, int] | None, left: list[int]
) -> None:
    owner, hold = hold_resources(clock)
    for cost in used:
        hold.use(cost)
    hold.settle(settled)
    hold.settle(settled)
    assert owner.left() == left


def test_f1_a_resource_that_is_not_named_is_not_extended(clock: ManualClock) -> None:
    owner, hold = hold_resources(clock)
    assert hold.extend({"tokens": 20})
    assert owner.left() == [30, 2]
    assert not hold.extend({"usd": 3})
    assert [bool(part) for part in hold.parts] == [True, False]
    hold.use({"tokens": 80})
    with pytest.raises(ZeroDivisionError), hold:
        _ = 1 / 0
    assert owner.left() == [20, 2]


def test_f1_an_attempt_passes_on_what_the_hold_is_kept_with(clock: ManualClock) -> None:
    owner, hold = hold_resources(clock, note="who", shape="what")
    assert [part.remaining for part in hold.parts] == [50, 2]
    found = owner.hold_store.read_hold("tokens", "a", "one")
    assert found is not None
    assert (found.note, found.shape) == ("who", "what")
    asks = owner.asks(60, 1)
    other = attempt_at(owner, asks).run(WaitQueues(), "a", 0)
    assert not other
    assert [bool(part) for part in other.parts] == [False, True]
    granted = attempt_at(owner, asks, forced=True).run(WaitQueues(), "a", 0)
    assert (granted.state, bool(granted.decision), owner.left()) == ("open", False, [0, 1])
    assert not granted.extend({"usd": 5})
    assert granted._costs == (60, 6)
    granted.settle({})
    assert owner.left() == [0, 0]
    with pytest.raises(HoldError, match=r"expected at most 2 open holds of 'a', got one more; settle some first$"):
        [attempt_at(owner, asks, forced=True, most=2).ask() for _ in range(2)]
