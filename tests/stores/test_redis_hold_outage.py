"""Holds, budgets and slots while the server is away: what passes, and what is booked when it is back."""

import asyncio
import logging
import signal
from functools import partial
from struct import pack
from typing import Any

import pytest
import redis

from headgate import Limiter, ManualClock, per_day
from headgate.errors import HoldError, InvalidInput, StoreAway
from headgate.limits.all_of import AllOf
from headgate.limits.budget import Budget
from headgate.limits.decision import Limit
from headgate.limits.slots import Slots
from headgate.stores.base import Ask, Verb
from headgate.stores.holds import HoldTerms
from headgate.stores.redis import RedisStore, bookings
from headgate.stores.redis.hold_requests import HoldRequest, find_request
from tests.support.event_loop import take_turns
from tests.support.valkey import DURABLE, ValkeyServer, wait_for

pytestmark = pytest.mark.once

LIMIT = AllOf([per_day(100), Budget(50), Slots(2)])


def terms(hold_id: str) -> HoldTerms:
    return HoldTerms(hold_id, 60_000_000, False, 600_000_000)


def asks(cost: int, limit: Limit = LIMIT) -> list[Ask]:
    return [Ask("name", "key", limit, cost)]


def left(store: RedisStore, limit: Limit) -> int:
    decision = store.apply(Verb.PEEK, asks(1, limit), 0)
    assert not decision.degraded
    return decision.remaining


def come_back(server: ValkeyServer, store: RedisStore, breaker_clock: ManualClock) -> None:
    """Start a server again, which has forgotten everything, and wait until the store has booked all."""
    server.start()

    def booked() -> bool:
        breaker_clock.advance(1)
        store.apply(Verb.PEEK, asks(0, per_day(1)), 0)
        return not store.degraded and len(store._bookings) == 0

    wait_for(booked, "the bookings")


def test_nothing_passes_unless_told_to(own_server: ValkeyServer, breaker_clock: ManualClock) -> None:
    with RedisStore(own_server.url) as store:
        own_server.kill()
        held = store.hold(asks(5), 0, terms("a"))
        assert (held.state, held.decision.degraded, bool(held.decision)) == ("denied", True, False)
        for limit in (LIMIT, Budget(5), Slots(1)):
            assert not store.apply(Verb.CHECK, asks(1, limit), 0)
        assert store.apply(Verb.CHECK, asks(1, per_day(5)), 0)  # by on_failure
        with pytest.raises(StoreAway):
            store.find_hold(asks(5), 0, "a")
        with pytest.raises(StoreAway):
            store.list_holds("name", "key", 10)


def test_a_settle_is_booked_once_the_server_is_back(breaker_clock: ManualClock) -> None:
    with ValkeyServer(*DURABLE) as server, RedisStore(server.url) as store:
        for hold_id in ("a", "b", "c"):
            assert store.hold(asks(10, Budget(50)), 0, terms(hold_id)).state == "open"
        server.kill()
        settled = store.settle(asks(10, Budget(50)), 0, "a", [4])
        again = store.settle(asks(10, Budget(50)), 0, "a", [4])
        assert settled == again
        assert (settled.state, settled.costs, settled.decision.degraded) == ("settled", (4,), True)
        assert store.settle(asks(10, Budget(50)), 0, "b", None, cancel=True).state == "cancelled"
        assert not store.extend(asks(10, Budget(50)), 0, "c", [20], None).decision
        assert store.extend(asks(10, Budget(50)), 0, "c", None, 90_000_000).summary == ("open", (10,), 0)
        come_back(server, store, breaker_clock)
        assert left(store, Budget(50)) == 50 - 4 - 0 - 10
        assert store.find_hold(asks(10, Budget(50)), 0, "a").summary == ("settled", (4,), 0)
        assert store.find_hold(asks(10, Budget(50)), 0, "c").left > 60_000_000


@pytest.mark.parametrize("policy", ["open", "local"])
def test_what_passes_is_booked(own_server: ValkeyServer, breaker_clock: ManualClock, policy: str) -> None:
    with RedisStore(own_server.url, on_failure_holds=policy) as store:
        assert left(store, Budget(50)) == 50
        own_server.kill()
        for hold_id in ("a", "b", "b"):
            held = store.hold(asks(5), 0, terms(hold_id))
            assert (held.state, held.costs, held.decision.degraded) == ("open", (5,), True)
        third = store.hold(asks(5), 0, terms("c"))
        assert third.state == ("open" if policy == "open" else "denied")  # there are two slots
        assert store.extend(asks(5), 0, "b", [7], None).decision
        assert store.settle(asks(5), 0, "a", [2]).state == "settled"
        assert store.apply(Verb.CHECK, asks(3, Budget(50)), 0)
        store.apply(Verb.CHARGE, asks(4, Budget(50)), 0)
        come_back(own_server, store, breaker_clock)
        assert left(store, Budget(50)) == 50 - 2 - 7 - 3 - 4 - (5 if policy == "open" else 0)
        assert store.find_hold(asks(5), 0, "b").summary[:2] == ("open", (7,))


def test_a_share_of_each_budget_and_of_the_slots_passes(own_server: ValkeyServer, breaker_clock: ManualClock) -> None:
    with RedisStore(own_server.url, on_failure_holds="local", nodes=4) as store:
        own_server.kill()
        passed = [bool(store.apply(Verb.CHECK, asks(1, Budget("1.20", unit="credits:2")), 0)) for _ in range(40)]
        assert sum(passed) == 30
        states = [store.hold(asks(1, Slots(8)), 0, terms(f"{number}")).state for number in range(4)]
        assert states == ["open", "open", "denied", "denied"]
        store.settle(asks(1, Slots(8)), 0, "0", None)
        assert store.hold(asks(1, Slots(8)), 0, terms("4")).state == "open"


def test_there_are_not_too_many_bookings(
    own_server: ValkeyServer,
    breaker_clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(bookings, "MAX_BOOKINGS", 3)
    with RedisStore(own_server.url, on_failure_holds="open") as store:
        own_server.kill()
        held = [store.hold(asks(1), 0, terms(f"{number}")).state for number in range(5)]
        assert held == ["open"] * 3 + ["denied"] * 2
        assert not store.apply(Verb.CHECK, asks(1, Budget(5)), 0)
        with pytest.raises(StoreAway):
            store.settle(asks(1), 0, "0", [1])
        caplog.set_level(logging.ERROR)
    assert "3 holds" in caplog.text


def test_tasks_are_answered_like_threads(own_server: ValkeyServer, breaker_clock: ManualClock) -> None:
    async def go(store: RedisStore) -> None:
        assert (await store.ahold(asks(5), 0, terms("a"))).state == "open"
        assert (await store.aextend(asks(5), 0, "a", [6], None)).costs == (6,)
        assert (await store.asettle(asks(5), 0, "a", [1])).state == "settled"
        with pytest.raises(StoreAway):
            await store.afind_hold(asks(5), 0, "a")

    with RedisStore(own_server.url, on_failure_holds="open") as store:
        own_server.kill()
        asyncio.run(go(store))
        come_back(own_server, store, breaker_clock)
        assert left(store, Budget(50)) == 49


def test_a_task_that_is_cancelled_while_the_server_hangs_leaves_no_hold(
    own_server: ValkeyServer, breaker_clock: ManualClock
) -> None:
    async def hold_and_be_cancelled(limiter: Limiter) -> None:
        await limiter.apeek("key")
        own_server.signal(signal.SIGSTOP)
        task = asyncio.ensure_future(limiter.ahold("key", 7, lease=3600))
        await take_turns(20)  # so that it is sent
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with RedisStore(own_server.url) as store:
        limiter = Limiter("1 in flight; 100 tokens in all", store=store)
        try:
            asyncio.run(hold_and_be_cancelled(limiter))
        finally:
            own_server.signal(signal.SIGCONT)

        def given_back() -> bool:
            breaker_clock.advance(1)
            return not limiter.peek("key").degraded and len(store._bookings) == 0

        wait_for(given_back, "the booking of its end")
        assert limiter.list_holds("key") == []
        assert limiter.hold("key", 100), "all of it is free"


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"^RedisStore on_failure_holds: expected one of open, closed, local, got"):
        RedisStore("redis://localhost", on_failure_holds="never")


@pytest.mark.parametrize("policy", ["closed", "open"])
def test_a_hold_that_is_extended_meanwhile_stays_open_and_knows_its_costs(
    own_server: ValkeyServer, breaker_clock: ManualClock, policy: str
) -> None:
    with RedisStore(own_server.url, on_failure_holds=policy) as store:
        limiter = Limiter(Budget(50), store=store)
        hold = limiter.hold("a", 10)
        assert hold.extend(5)
        own_server.kill()
        assert bool(hold.extend(3)) == (policy == "open")
        assert (hold.state, hold.lost) == ("open", False)
        assert hold.extend(lease=90)
        assert hold.state == "open"
        assert hold._costs == (15 + 3 * (policy == "open"),)


def test_bookings_whose_answer_was_lost_are_sent_again_and_are_no_errors(
    own_server: ValkeyServer,
    breaker_clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with RedisStore(own_server.url, on_failure_holds="open") as store:
        limiter = Limiter(Budget(50), store=store)
        limiter.peek("a")
        own_server.kill()
        extended, settled, renewed = limiter.hold("a", 10), limiter.hold("a", 1), limiter.hold("a", 7)
        assert extended.extend(5)
        assert settled.extend(3)
        settled.settle(2)
        assert renewed.renew()
        renewed.settle(6)  # in the call whose answer is lost, in which the others ask again
        exchange = store._clients.exchange
        lost: list[Any] = []

        def lossy(commands: list[Any]) -> list[Any]:
            replies = exchange(commands)
            if not lost and len(commands[0]) > 20 and isinstance(replies[0], list):
                lost.append(replies)
                return [redis.ConnectionError("lost")] * len(commands)
            return replies

        monkeypatch.setattr(store._clients, "exchange", lossy)
        come_back(own_server, store, breaker_clock)
        assert lost
        assert "can't be booked" not in caplog.text
        assert limiter.peek("a").remaining == 50 - 15 - 2 - 6


@pytest.mark.parametrize("nodes", [1, 2])
def test_memory_judges_what_a_hold_is_extended_by(
    own_server: ValkeyServer, breaker_clock: ManualClock, nodes: int
) -> None:
    limit = AllOf([Budget(10 * nodes), Slots(nodes)])
    with RedisStore(own_server.url, on_failure_holds="local", nodes=nodes) as store:
        assert store.hold(asks(1, limit), 0, terms("of the server")).state == "open"
        own_server.kill()
        assert store.hold(asks(5, limit), 0, terms("a")).state == "open"
        denied = store.extend(asks(5, limit), 0, "a", [1000], None)
        assert (bool(denied.decision), denied.decision.degraded, denied.costs) == (False, True, (5,))
        assert not store.extend(asks(1, limit), 0, "of the server", [1 + 6], None).decision
        assert store.extend(asks(1, limit), 0, "of the server", [1 + 4], None).decision  # it has its slot
        assert not store.extend(asks(5, limit), 0, "a", [7], None).decision
        assert store.extend(asks(5, limit), 0, "a", [6], None).costs == (6,)
        assert store.extend(asks(5, limit), 0, "of the server", None, 90_000_000).decision


@pytest.mark.parametrize("renewals", [1, 3])
def test_a_hold_whose_renewals_only_wait_is_lost_when_its_lease_ends(
    own_server: ValkeyServer, breaker_clock: ManualClock, renewals: int
) -> None:
    clock = ManualClock()
    with RedisStore(own_server.url, clock=clock) as store:
        hold = Limiter(Slots(1), store=store).hold("a", lease=60)
        own_server.kill()
        clock.advance(30)
        assert [hold.renew() for _ in range(renewals)] == [True] * renewals
        clock.advance(29)
        assert (hold.state, hold.lost) == ("open", False)
        clock.advance(1)
        assert (hold.state, hold.lost) == ("expired", True)
        assert not hold.renew()


def test_a_renewal_that_comes_too_late_is_no_error(
    breaker_clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    with (
        ValkeyServer(*DURABLE) as server,
        RedisStore(server.url, clock=clock) as store,
        caplog.at_level(logging.WARNING),
    ):
        hold = Limiter(Slots(1), store=store).hold("a", lease=60)
        server.kill()
        clock.advance(30)
        assert hold.renew()
        clock.advance(31)
        come_back(server, store, breaker_clock)
        found = [record.levelname for record in caplog.records if "before it could be renewed" in record.getMessage()]
        assert found == ["WARNING"]
        assert "can't be booked" not in caplog.text


def test_a_hold_that_was_granted_meanwhile_can_be_renewed(own_server: ValkeyServer, breaker_clock: ManualClock) -> None:
    clock = ManualClock()
    with RedisStore(own_server.url, clock=clock, on_failure_holds="open") as store:
        own_server.kill()
        limiter = Limiter(Slots(1), store=store)
        hold = limiter.hold("a", lease=60, hold_id="h")
        for _ in range(3):
            clock.advance(40)
            assert hold.renew()
        assert hold.state == "open"
        assert limiter.hold("a", lease=90, hold_id="h")._ends == hold._ends
        come_back(own_server, store, breaker_clock)
        assert limiter.find_hold("a", "h").state == "open"
        assert limiter.peek("a").remaining == 0


def test_of_many_renewals_one_waits(
    own_server: ValkeyServer, breaker_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bookings, "MAX_BOOKINGS", 2)
    with RedisStore(own_server.url, clock=ManualClock(0)) as store:
        own_server.kill()
        for lease in (70, 95, 80):
            store.extend(asks(1), 0, "a", None, lease * 1_000_000)
        store.settle(asks(1), 0, "b", None)
        store.extend(asks(1), 0, "a", None, 75_000_000)
        assert len(store._bookings) == 2
        (renewal,) = store._bookings.about(("name", "key", "a"))
        assert renewal.until == 95_000_000
        with pytest.raises(StoreAway):
            store.extend(asks(1), 0, "c", None, 70_000_000)


def test_a_renewal_while_the_one_before_is_sent_is_sent_too(breaker_clock: ManualClock) -> None:
    with ValkeyServer(*DURABLE) as server, RedisStore(server.url) as store:
        store.hold(asks(1), 0, terms("a"))
        server.kill()
        store.extend(asks(1), 0, "a", None, 70_000_000)

        leases = [70_000_000]

        def renew() -> HoldRequest:
            leases.append(leases[-1] + 100_000_000)
            store.extend(asks(1), 0, "a", None, leases[-1])
            return find_request(store.keys, asks(1), 0, "a")

        store._bookings.add(bookings.Booking(None, renew))
        come_back(server, store, breaker_clock)
        assert store.find_hold(asks(1), 0, "a").left > leases[-1] - 50_000_000


def test_a_booking_that_fails_by_a_mistake_of_ours_is_tried_again(
    server: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisStore(server.url) as store:
        store.hold(asks(1), 0, terms("a"))
        calls: list[int] = []

        def find() -> HoldRequest:
            calls.append(1)
            if len(calls) <= 2:
                raise ZeroDivisionError("a mistake")
            return find_request(store.keys, asks(1), 0, "a")

        def add() -> None:
            store._bookings.add(bookings.Booking(None, find))

        def went_on(before: int) -> bool:
            return len(calls) > before or not store._bookings

        add()
        wait_for(lambda: calls, "the first attempt")
        while store._bookings:
            add()  # it wakes the thread
            wait_for(partial(went_on, len(calls)), "the next attempt")
        assert caplog.text.count("holds of an outage could not be sent to the store, and are tried again") == 1
        assert "ZeroDivisionError: a mistake" in caplog.text


def test_a_hold_whose_settlement_waits_is_known_as_settled(
    own_server: ValkeyServer, breaker_clock: ManualClock
) -> None:
    with RedisStore(own_server.url, on_failure_holds="open") as store:
        own_server.kill()
        assert store.hold(asks(5), 0, terms("a")).state == "open"
        with pytest.raises(HoldError, match="expected cost 5, with which it is open, got cost 6"):
            store.hold(asks(6), 0, terms("a"))
        store.settle(asks(5), 0, "a", [2])
        assert store.hold(asks(5), 0, terms("a")).summary == ("settled", (2,), 0)
        assert store.settle(asks(5), 0, "a", None).costs == (2,)
        with pytest.raises(HoldError, match="expected cost 2, with which it is settled, got cost 3"):
            store.settle(asks(5), 0, "a", [3])
        with pytest.raises(HoldError, match="expected an open hold to extend, got one that is settled with cost 2"):
            store.extend(asks(5), 0, "a", None, 90_000_000)
        assert store.extend(asks(5), 0, "b", None, 0).state == "expired"
        assert store.hold(asks(5), 0, terms("b")).state == "expired"


@pytest.mark.parametrize(
    "foreign",
    [
        b"\x01\x00\x09" + b"x" * 40,
        pack("<BBBddIBHI", 1, 0, 1, 2e15, 6e8, 10, 0, 0, 0) + b"\x05",
        pack("<BBBddIBHI", 1, 0, 1, float("nan"), 6e8, 10, 0, 0, 0),
        pack("<BBBdddBHI", 1, 2, 1, 2e15, 6e8, float("inf"), 0, 0, 0),
        pack("<BBBddIBHI", 1, 0, 1, 2e15, 6e8, 10, 0, 9, 0),
        pack("<BBBddIBHI", 1, 0, 1, 2e15, 6e8, 10, 9, 0, 0),
        pack("<BBBddIBHI", 9, 0, 1, 2e15, 6e8, 10, 0, 0, 0),
        pack("<BBBddBHI", 1, 0, 0, 2e15, 6e8, 0, 0, 0),
        pack("<BBBddIB", 2, 0, 1, 2e15, 6e8, 10, 0),
        pack("<BBBddIBHI", 2, 0, 1, 2e15, 6e8, 10, 0, 0, 0),
        None,
    ],
)
def test_what_is_not_ours_fails_alone(
    server: ValkeyServer, store: RedisStore, caplog: pytest.LogCaptureFixture, foreign: bytes | None
) -> None:
    limiter = Limiter(Budget(100), store=store)
    strange, fine = [limiter.hold(key, 10, hold_id="h") for key in ("a", "b")]
    assert [one.id for one in limiter.list_holds("a")] == ["h"]
    with server.client() as client:
        (key,) = [one for one in client.keys("*{a}*") if one.endswith(b"h")]
        client.delete(key)
        if foreign is None:
            client.hset(key, "a", "b")
        else:
            client.set(key, foreign)
        assert limiter.list_holds("a") == []
        assert strange.settle(5).degraded
        assert not fine.settle(5).degraded
        wait_for(lambda: len(store._bookings) == 0, "the bookings")
        assert "can't be booked" in caplog.text
        assert not store.degraded
        with pytest.raises(StoreAway, match="that this headgate didn't write"):
            limiter.find_hold("a", "h")
        assert client.exists(key)


@pytest.mark.parametrize("cost", [10, 101, 0])
def test_a_hold_writes_nothing_beside_what_is_not_ours(store: RedisStore, raw: Any, cost: int) -> None:
    limit = per_day(100)
    store.hold(asks(1, limit), 0, terms("h"))
    bucket, record, index = [b"headgate:{key}" + rest for rest in (b"b1:100/day:name", b"h1:4:name:h", b"o1:name")]
    for key in [bucket, *([record, index] if cost <= 100 else [])]:  # a denial needs no others
        raw.delete(bucket, record, index)
        raw.hset(key, "a", "b")
        decision = store.hold(asks(cost, limit), 0, terms("h")).decision
        assert (bool(decision), decision.degraded) == (False, True)
        assert [one for one in (bucket, record, index) if raw.exists(one)] == [key]


def test_a_list_of_holds_that_is_not_ours_fails_alone(server: ValkeyServer, store: RedisStore) -> None:
    limiter = Limiter(Budget(100), store=store)
    hold = limiter.hold("a", 10)
    with server.client() as client:
        (index,) = [one for one in client.keys("*{a}*") if client.type(one) == b"zset"]
        client.set(index, "strange")
    assert not limiter.hold("a", 10)
    assert hold.settle(5).degraded
    assert not limiter.hold("b", 10).decision.degraded
    assert not store.degraded
