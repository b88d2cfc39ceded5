"""Holds as blocks: what was used is settled at the end, and the lease is renewed until then."""

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from headgate import (
    Hold,
    HoldError,
    Limiter,
    ManualClock,
    MemoryStore,
    RateLimited,
)
from headgate.lease_renewer import RENEWERS
from tests.support.event_loop import wait_until
from tests.support.limiters import left, make_limiter
from tests.support.threads import run_together
from tests.support.valkey import wait_for


def test_a_block_settles_what_was_used(clock: ManualClock) -> None:
    limiter = make_limiter("100/minute", clock)
    with limiter.hold("a", 60) as hold:
        hold.use(10)
        hold.use(15)
    assert (hold.state, left(limiter)) == ("settled", 75)
    with limiter.hold("b", 60):
        pass
    assert left(limiter, "b") == 40


@pytest.mark.usefixtures("_frequent_switches")
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


async def test_a_hold_that_was_found_is_ended_by_the_terms_that_it_was_made_with(clock: ManualClock) -> None:
    limiter = make_limiter("10 usd in all", clock)
    limiter.hold("a", 5, hold_id="one", on_expiry="release")
    limiter.hold("a", 4, hold_id="two", on_expiry="release")
    found, again = limiter.find_hold("a", "one"), limiter.hold("a", 4, hold_id="two")
    for hold in (found, again):
        hold.use(2)
        with pytest.raises(ZeroDivisionError), hold:
            _ = 1 / 0
    assert left(limiter) == 6
    limiter.hold("a", 5, hold_id="three", on_expiry="release")
    with pytest.raises(ZeroDivisionError):
        async with await limiter.afind_hold("a", "three"):
            _ = 1 / 0
    assert left(limiter) == 6


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


async def test_a_hold_that_nobody_has_awaited_says_so(clock: ManualClock) -> None:
    limiter = make_limiter("10/day", clock)
    with pytest.raises(HoldError, match="expected `await` before it, or `async with`, got neither"):
        bool(limiter.ahold("a"))
    with pytest.raises(HoldError, match="expected `async with`, got `with`"), limiter.ahold("a"):
        pytest.fail("the block runs without a hold")
    assert limiter.peek("a").remaining == 10


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


async def test_a_pending_hold_has_one_block(clock: ManualClock) -> None:
    limiter = make_limiter("5 in flight", clock)
    pending = limiter.ahold("a")
    async with pending:
        with pytest.raises(HoldError, match="expected one block for each call, got a second one"):
            async with pending:
                pytest.fail("it ran")
    assert left(limiter) == 5
