"""Holds: reserved now, settled later, on a limiter in memory."""

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
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
from headgate.lease_renewer import RENEWERS
from headgate.limits.notation import parse
from headgate.stores.base import Ask
from headgate.stores.hold_ids import HOLD_IDS
from headgate.stores.hold_terms import HoldTerms
from headgate.stores.holds import MAX_OPEN_HOLDS
from headgate.wait_queue import WaitQueues
from tests.support.event_loop import wait_until
from tests.support.limiters import left, make_limiter
from tests.support.threads import Waiter, run_together
from tests.support.valkey import wait_for


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


def test_a_block_settles_what_was_used(clock: ManualClock) -> None:
    limiter = make_limiter("100/minute", clock)
    with limiter.hold("a", 60) as hold:
        hold.use(10)
        hold.use(15)
    assert (hold.state, left(limiter)) == ("settled", 75)
    with limiter.hold("b", 60):
        pass
    assert left(limiter, "b") == 40


@pytest.mark.usefixtures("_switching")
def test_threads_that_use_a_hold_at_the_same_time_add_up(clock: ManualClock) -> None:
    def use_often(hold: Hold) -> None:
        for _ in range(20_000):
            hold.use(1)

    limiter = make_limiter("1000000 tokens in all", clock)
    with limiter.hold("a", 10) as hold:
        run_together(4, lambda _: use_often(hold))
    assert left(limiter) == 1_000_000 - 4 * 20_000


def test_a_block_that_raises_ends_like_a_lease(clock: ManualClock) -> None:
    limiter = make_limiter("100/minute; 1 in flight", clock)
    hold = limiter.hold("a", 60)
    hold.use(1)
    with pytest.raises(ZeroDivisionError), hold:
        _ = 1 / 0
    assert hold.state == "expired"
    assert limiter.peek("a", 40)
    assert not limiter.peek("a", 41)
    assert hold.settle(10)
    with pytest.raises(ZeroDivisionError), limiter.hold("b", 60, on_expiry="release"):
        _ = 1 / 0
    assert limiter.peek("b", 100)


async def test_a_failure_to_end_a_hold_does_not_hide_the_error_of_its_block(
    clock: ManualClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore(clock=clock, remember=tmp_path / "limits.db")
    limiter = Limiter("100 in all", store=store)

    def use_more_than_was_settled(hold: Hold) -> None:
        limiter.find_hold("a", hold.id).settle(0)
        hold.use(5)

    def fail(spoil: Callable[[], object]) -> None:
        spoil()
        raise ZeroDivisionError

    async def block(hold_id: str) -> None:
        async with limiter.ahold("a", hold_id=hold_id) as hold:
            use_more_than_was_settled(hold)
            await asyncio.get_running_loop().create_future()

    with pytest.raises(ZeroDivisionError), limiter.hold("a", hold_id="one") as hold:
        fail(lambda: use_more_than_was_settled(hold))
    with pytest.raises(HoldError, match="settled"), limiter.hold("a", hold_id="two") as hold:
        use_more_than_was_settled(hold)
    task = asyncio.create_task(block("three"))
    await wait_until(lambda: [one for one in limiter.list_holds("a") if one.id == "three"], "the block")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(ZeroDivisionError), limiter.hold("a", hold_id="four"):
        fail(store.close)
    warnings = [record.getMessage().partition(" was not ended: ") for record in caplog.records]
    assert [start for start, found, _ in warnings if found] == [
        f"hold {one!r} of 'a'" for one in ("one", "three", "four")
    ]


def test_a_denied_hold_runs_no_block(clock: ManualClock) -> None:
    limiter = make_limiter("1 in flight", clock)
    limiter.hold("a", lease=5)
    with (
        pytest.raises(RateLimited, match="rate limited: agent 'a' at 1 in flight, retry after 5000ms"),
        limiter.hold("a"),
    ):
        pytest.fail("it ran")
    denied = limiter.hold("a")
    assert (denied.state, bool(denied)) == ("denied", False)
    with pytest.raises(HoldError, match="was denied: it has taken nothing"):
        denied.settle()


def test_a_block_that_was_settled_inside_is_left_alone(clock: ManualClock) -> None:
    limiter = make_limiter("100/minute", clock)
    with limiter.hold("a", 60) as hold:
        hold.settle(5)
    assert left(limiter) == 95


def test_a_block_renews_its_lease(clock: ManualClock) -> None:
    limiter = make_limiter("1 in flight", clock)
    with limiter.hold("a", lease=30) as hold:
        for _ in range(10):
            with renewed(hold):
                clock.advance(10)
        assert hold.state == "open"
        assert not limiter.hold("a")
    assert limiter.hold("a")


def test_a_hold_that_nobody_has_any_more_keeps_its_slot_for_one_lease(clock: ManualClock) -> None:
    """An exception of a signal's handler may leave a block before it is left."""
    limiter = make_limiter("1 in flight", clock)
    hold = limiter.hold("a", lease=30)
    hold.__enter__()
    with renewed(hold):
        clock.advance(10)
    del hold
    clock.advance(10)
    wait_for(lambda: not RENEWERS._running[id(limiter.store)].renews(), "the end of the renewals")
    assert not limiter.peek("a")
    clock.advance(20)
    assert limiter.peek("a")


def test_a_block_that_is_interrupted_as_it_begins_is_not_renewed(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    limiter, added = make_limiter("1 in flight", clock), []
    hold, add = limiter.hold("a", lease=30), RENEWERS.add

    def interrupted(store: Any, renewal: Any) -> None:
        add(store, renewal)
        added.append(renewal)
        raise KeyboardInterrupt

    monkeypatch.setattr(RENEWERS, "add", interrupted)
    with pytest.raises(KeyboardInterrupt), hold:
        raise AssertionError("the block must not run")
    renewer = RENEWERS._running.get(id(limiter.store))
    assert renewer is None or not renewer.renews()
    clock.advance(30)
    assert limiter.peek("a")
    assert len(added) == 1


def test_the_handle_that_is_renewed_knows_of_a_longer_lease(clock: ManualClock) -> None:
    limiter = make_limiter("1 in flight", clock)
    with limiter.hold("a", lease=30) as hold:
        hold.extend(lease=3600)
        assert hold._block is not None
        clock.advance(3000)
        assert hold._block.hold.lease_left == 600


def test_a_hold_that_was_made_before_is_ended_by_the_terms_that_it_was_made_with(clock: ManualClock) -> None:
    limiter = make_limiter("10 usd in all", clock)
    limiter.hold("a", 5, hold_id="one")
    again = limiter.hold("a", 5, hold_id="one", on_expiry="release")
    again.use(3)
    with pytest.raises(ZeroDivisionError), again:
        _ = 1 / 0
    assert left(limiter) == 5


def test_a_block_is_renewed_up_to_its_age(clock: ManualClock) -> None:
    limiter = make_limiter("1 in flight", clock)
    with limiter.hold("a", lease=30, max_age=15) as hold:
        with renewed(hold):
            clock.advance(10)
        clock.advance(30)
        assert hold.lost
        other = limiter.hold("a", hold_id="other")
        assert other
    assert hold.state == "settled"
    assert not limiter.hold("a")


def test_leases_are_renewed_once_there_is_a_thread_for_it(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    limiter = make_limiter("10/day", clock)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"), limiter.hold("a", lease=60):
            pytest.fail("the block runs without a renewer")
    with limiter.hold("a", lease=60) as hold, renewed(hold):
        clock.advance(20)


def test_a_store_that_fails_in_a_new_way_ends_no_other_renewal(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        renewal_interval = 1_000_000

        def renew(self) -> bool:
            raise ZeroDivisionError

        def renewal(self, called: int) -> None:
            raise ZeroDivisionError

        def renewed(self, called: int, answer: object) -> bool:
            raise ZeroDivisionError

    limiter = make_limiter("10/day", clock)
    RENEWERS.add(limiter.store, broken := Broken())
    with limiter.hold("a", lease=60) as hold, renewed(hold):
        clock.advance(20)
    RENEWERS.remove(limiter.store, broken)
    assert "the lease of a hold can't be renewed" in caplog.text


def lease_end(hold: Hold) -> int:
    assert not hold.lost  # which looks at the renewals
    return hold._ends


@contextmanager
def renewed(hold: Hold) -> Iterator[None]:
    """Wait until the lease was renewed in the block."""
    before = lease_end(hold)
    yield
    wait_for(lambda: lease_end(hold) > before, "the renewal")


@pytest.mark.parametrize("hold_id", [None, "id"])
def test_a_very_long_max_age_is_as_good_as_none(clock: ManualClock, hold_id: str | None) -> None:
    limiter = make_limiter("2 in flight", clock)
    assert limiter.hold("a", hold_id=hold_id, max_age=sys.maxsize).renew()


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


async def test_a_hold_that_nobody_has_awaited_says_so(clock: ManualClock) -> None:
    limiter = make_limiter("10/day", clock)
    with pytest.raises(HoldError, match="expected `await` before it, or `async with`, got neither"):
        bool(limiter.ahold("a"))
    with pytest.raises(HoldError, match="expected `async with`, got `with`"), limiter.ahold("a"):
        pytest.fail("the block runs without a hold")
    assert limiter.peek("a").remaining == 10


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


def test_a_timeout_waits_in_line(clock: ManualClock) -> None:
    limiter = make_limiter("1 in flight", clock)
    first = limiter.hold("a")
    waiter = Waiter(limiter, verb="hold", timeout=20)
    first.settle()
    assert waiter.result()
    late = Waiter(limiter, verb="hold", timeout=20)
    clock.advance(20)
    assert late.result().state == "denied"


@pytest.mark.parametrize("timeout", [False, True, "soon", -1])
def test_a_timeout_that_is_no_time_is_refused(clock: ManualClock, timeout: Any) -> None:
    limiter = make_limiter("10/day", clock)
    for verb in (limiter.hold, limiter.acquire):
        with pytest.raises(InvalidInput, match="timeout: expected"):
            verb("a", timeout=timeout)
    assert left(limiter) == 10


class Equality:
    """What a comparison of numpy's numbers returns: like a bool, and none."""

    def __init__(self, equal: bool) -> None:
        self.equal = equal

    def __bool__(self) -> bool:
        return self.equal


class OddFloat(float):
    def __eq__(self, other: object) -> Any:
        return Equality(float(self) == other)

    __hash__ = float.__hash__


@pytest.mark.parametrize("seconds", [0, 1.5])
async def test_a_timeout_may_be_a_float_that_compares_in_its_own_way(clock: ManualClock, seconds: float) -> None:
    limiter = make_limiter("10/day", clock)
    assert limiter.hold("a", timeout=OddFloat(seconds))
    assert await limiter.ahold("a", timeout=OddFloat(seconds))


@pytest.mark.parametrize("zero", [0, 0.0, Decimal(0), Fraction(0)])
async def test_a_timeout_of_zero_asks_once_whoever_waits(clock: ManualClock, zero: Any) -> None:
    limiter = make_limiter("10/day; 1 in flight", clock)
    first = limiter.hold("a", hold_id="first")
    waiter = Waiter(limiter, verb="hold", timeout=20)
    assert limiter.hold("a", hold_id="first", timeout=zero).state == "open"
    assert (await limiter.ahold("a", hold_id="first", timeout=zero)).state == "open"
    first.settle()
    assert waiter.result()


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


async def test_a_block_that_raises_counts_what_was_used_beyond_its_reservation(clock: ManualClock) -> None:
    limiter = make_limiter("10 usd in all; 1 in flight", clock)
    for key, used, expected in (("less", "0.20", "9.40"), ("more", "1.50", "8.50")):
        hold = limiter.hold(key, "0.60")
        hold.use(used)
        with pytest.raises(ZeroDivisionError), hold:
            _ = 1 / 0
        assert limiter.peek(key, expected)
        assert not limiter.peek(key, Decimal(expected) + Decimal("0.000001"))
    hold = await limiter.ahold("async", "0.60")
    hold.use("1.50")
    with pytest.raises(ZeroDivisionError):
        async with hold:
            _ = 1 / 0
    assert limiter.hold("async", "8.50")


@pytest.mark.parametrize("limit", ["10 usd in all", "10 usd in all; 1 in flight"])
async def test_a_block_that_raises_counts_what_was_used_of_costs_to_be_released(clock: ManualClock, limit: str) -> None:
    limiter = make_limiter(limit, clock)
    for key, used, expected in (("none", None, "10"), ("less", "0.20", "9.80"), ("more", "1.50", "8.50")):
        hold = limiter.hold(key, "0.60", on_expiry="release")
        twin = await limiter.ahold(f"{key}, async", "0.60", on_expiry="release")
        if used is not None:
            hold.use(used)
            twin.use(used)
        with pytest.raises(ZeroDivisionError), hold:
            _ = 1 / 0
        with pytest.raises(ZeroDivisionError):
            async with twin:
                _ = 1 / 0
        for one in (key, f"{key}, async"):
            assert limiter.peek(one, expected)
            assert not limiter.peek(one, Decimal(expected) + Decimal("0.000001"))


def test_an_ended_hold_runs_no_block_and_uses_nothing(clock: ManualClock) -> None:
    limiter = make_limiter("100/minute", clock)
    limiter.hold("a", 10, hold_id="one").settle()
    again = limiter.hold("a", 10, hold_id="one")
    with pytest.raises(HoldError, match="expected an open hold to run a block, got one that is settled"), again:
        pytest.fail("it ran")
    with pytest.raises(HoldError, match="expected an open hold to use, got one that is settled"):
        again.use(1)
    denied = limiter.hold("a", 1000)
    with pytest.raises(HoldError, match="expected an open hold to use, got one that is denied") as refused:
        denied.use(1)
    assert refused.value.state == "denied"


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


async def test_a_pending_hold_has_one_block(clock: ManualClock) -> None:
    limiter = make_limiter("5 in flight", clock)
    pending = limiter.ahold("a")
    async with pending:
        with pytest.raises(HoldError, match="expected one block for each call, got a second one"):
            async with pending:
                pytest.fail("it ran")
    assert left(limiter) == 5


@pytest.mark.parametrize("limit", ["1 in flight", "10 usd/calendar day", "10/day", "10/day sliding"])
@pytest.mark.parametrize("end", ["cancelled by another limiter", "its lease ends"])
def test_what_comes_back_is_seen_by_a_hold_that_waits(clock: ManualClock, limit: str, end: str) -> None:
    store = MemoryStore(clock=clock)
    one, other = Limiter(limit, store=store), Limiter(limit, store=store)
    cost = 1 if limit == "1 in flight" else 10
    began = clock.now()
    held = one.hold("a", cost, lease=600 if end.startswith("cancelled") else 1, on_expiry="release")
    waiter = Waiter(other, verb="hold", timeout=100)
    if end.startswith("cancelled"):
        held.cancel()
    while waiter.is_alive():
        clock.advance(0.25)
        waiter.join(0.01)
    assert waiter.result()
    assert clock.now() - began < 90 * 1_000_000  # not at the end of its time


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
