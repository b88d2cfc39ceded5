"""The local cache: remembered denials and tokens drawn ahead save calls of the server."""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from typing import Any, Self

import pytest

from headgate import (
    Gate,
    Limiter,
    ManualClock,
    MemoryStore,
    Outcome,
    Policy,
    RedisStore,
    SlidingWindow,
    StoreAway,
    TokenBucket,
    per_minute,
    per_second,
)
from headgate.events import Alerted, Event, Violated
from headgate.limits.violations import Backoff
from headgate.stores.base import Ask, Offence, Verb
from headgate.stores.redis import store as redis_store
from headgate.stores.redis.clients import Clients
from headgate.stores.redis.dropped_keys import drop_keys
from headgate.stores.redis.keys import Keys
from headgate.stores.redis.local_cache import LimitCache
from tests.support.valkey import PATIENCE, ValkeyServer, wait_for

_numbers = count()


_IDLE = threading.Thread(target=lambda: None)
_IDLE.start()


class StoreFleet:
    """Stores of several nodes that share one server and one clock.

    Unless it `sends`, no store returns tokens or sends violations by itself: that would depend on the machine's speed.
    """

    def __init__(self, server: ValkeyServer, nodes: int, *, sends: bool = False, **options: Any) -> None:
        self.clock = ManualClock(start=1000)
        self._server = server
        prefix = f"cache{next(_numbers)}:"
        patient: dict[str, Any] = {"prefix": prefix, "clock": self.clock, "timeout": PATIENCE}
        self.stores = [RedisStore(server.url, **{**patient, **options}) for _ in range(nodes)]
        self.plain = RedisStore(server.url, **patient)
        if not sends:
            for store in self.stores:
                store._flusher._thread._thread = _IDLE  # type: ignore[union-attr]

    def calls(self) -> int:
        with self._server.client() as client:
            return int(client.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for store in (*self.stores, self.plain):
            store.close()


def test_a_denied_key_is_denied_locally_until_its_wait_is_over(server: ValkeyServer) -> None:
    with StoreFleet(server, 1, remember_denials=True) as fleet:
        for limit in (per_minute(120, burst=2), SlidingWindow(2, 0.5)):
            limiter = Limiter(limit, store=fleet.stores[0])
            assert [bool(limiter.check("a")) for _ in range(3)] == [True, True, False]
            before = fleet.calls()
            fleet.clock.advance(0.2)
            first = limiter.check("a")
            fleet.clock.advance(0.299_999)
            last = limiter.check("a")
            assert (first.retry_after, last.retry_after) == (0.3, 0.000_001)
            assert (first.outcome, first.remaining, first.limit) == (Outcome.DENY, 0, limit)
            assert fleet.calls() == before
            assert limiter.check("b")
            fleet.clock.advance(0.000_001)
            assert limiter.check("a")


def test_a_remembered_denial_applies_only_to_costs_at_least_as_high(server: ValkeyServer) -> None:
    with StoreFleet(server, 1, remember_denials=True) as fleet:
        limiter = Limiter(per_minute(60, burst=10), store=fleet.stores[0])
        assert limiter.check("a", cost=6)
        assert not limiter.check("a", cost=5)
        before = fleet.calls()
        assert not limiter.check("a", cost=7)
        assert not limiter.check("a", cost=11)
        assert fleet.calls() == before
        assert limiter.check("a", cost=4)
        assert fleet.calls() == before + 1
        assert limiter.check("b", cost=11).retry_after is None
        assert limiter.check("b", cost=12).retry_after is None


@pytest.mark.parametrize("verb", ["reset", "refund"])
def test_a_reset_or_refund_ends_a_remembered_denial_at_once_or_within_a_second_if_made_elsewhere(
    server: ValkeyServer, verb: str
) -> None:
    with StoreFleet(server, 1, remember_denials=True) as fleet:
        here, elsewhere = (Limiter(SlidingWindow(3, 60), store=store) for store in (fleet.stores[0], fleet.plain))
        assert [bool(here.check("a")) for _ in range(4)] == [True, True, True, False]
        getattr(elsewhere, verb)("a")
        fleet.clock.advance(0.999)
        assert not here.check("a")
        fleet.clock.advance(0.001)
        assert here.check("a")
        while here.check("a"):
            pass
        getattr(here, verb)("a")
        assert here.check("a")


def test_violations_of_remembered_denials_are_counted_and_sent(server: ValkeyServer) -> None:
    with StoreFleet(server, 1, remember_denials=True) as fleet:
        store = fleet.stores[0]
        offence = Offence("agents", "a", Backoff())
        seen: list[Event] = []
        with Gate(Policy(), store=store) as gate:
            gate.subscribe(seen.append)
            decisions = [gate.check("a", "ws", "heavy") for _ in range(10 + 12)]
            told = [decision.violation.count for decision in decisions if decision.violation is not None]
            assert told == list(range(1, 13))
            assert [decision.retry_after for decision in decisions[10:15]] == [6.0, 6.0, 6.0, 10.0, 30.0]
            assert {decision.bucket_retry_after for decision in decisions[10:]} == {6.0}
            assert fleet.plain.standing(offence).violations == 1  # the others are owed
            store.flush()
            assert fleet.plain.standing(offence).violations == 12
            assert [event.violations for event in seen if isinstance(event, Alerted)] == [10]
            assert len([event for event in seen if isinstance(event, Violated)]) == 12
            assert not gate.check("a", "ws", "heavy", cost=2)
            fleet.clock.advance(1)
            gate.check("a", "ws", "heavy", cost=2)  # asks the server again, and pays what is owed before
            assert fleet.plain.standing(offence).violations == 14
            gate.check("a", "ws", "heavy", cost=2)
            assert gate.reset_violations("a")
            store.flush()
            assert not gate.standing("a")


def test_owed_violations_are_sent_in_the_background(server: ValkeyServer) -> None:
    with StoreFleet(server, 1, sends=True, remember_denials=True) as fleet:
        offence = Offence("agents", "a", Backoff())
        with Gate(Policy(), store=fleet.stores[0]) as gate:
            for _ in range(13):
                gate.check("a", "ws", "heavy")
            wait_for(lambda: fleet.plain.standing(offence).violations == 3, "the violations")


def test_drawn_tokens_save_calls_of_the_server(server: ValkeyServer) -> None:
    with StoreFleet(server, 1, draw_ahead=0.1) as fleet:
        limiter = Limiter(per_minute(600, burst=1000), store=fleet.stores[0])
        before = fleet.calls()
        decisions = [limiter.check("a") for _ in range(500)]
        assert [decision.remaining for decision in decisions] == list(range(999, 499, -1))
        assert decisions[-1].reset_after == 50.0
        assert fleet.calls() - before < 15
        assert limiter.check("a", cost=1001).retry_after is None


def test_drawn_tokens_never_let_more_pass_than_the_limit(server: ValkeyServer) -> None:
    """Whatever passes at any node would also have passed at a single bucket."""
    chance = random.Random(5)
    for _ in range(8):
        limit = chance.choice([TokenBucket(40, 20, 1), TokenBucket(200, 50, 1), TokenBucket(30, 7, 3)])
        with StoreFleet(server, 3, draw_ahead=chance.choice([0.1, 0.3])) as fleet:
            nodes = [Limiter(limit, store=store) for store in (*fleet.stores, fleet.plain)]
            bucket = Limiter(limit, store=MemoryStore(clock=fleet.clock))
            admitted = 0
            for step in range(600):
                node = chance.choice(nodes)
                cost = chance.choice((1, 1, 1, 2, 5))
                if node.check("a", cost=cost):
                    assert bucket.check("a", cost=cost), (limit, step)
                    admitted += cost
                if chance.random() < 0.5:
                    fleet.clock.advance(chance.choice((0.001, 0.01, 0.05, 0.4, 1.1)))
                if chance.random() < 0.02:
                    chance.choice(fleet.stores).flush()
            assert admitted > limit.capacity


def test_drawn_tokens_count_against_the_capacity_until_they_expire_and_return_as_refill(server: ValkeyServer) -> None:
    limit = TokenBucket(100, 1000, 1)
    with StoreFleet(server, 1, draw_ahead=0.2) as fleet:
        drawing, plain = (Limiter(limit, store=store) for store in (fleet.stores[0], fleet.plain))
        assert all(drawing.check("a") for _ in range(3))
        fleet.clock.advance(0.999_999)  # the bucket has been full for long, save what is out
        assert sum(bool(plain.check("a")) for _ in range(200)) == 80
        assert sum(bool(drawing.check("a")) for _ in range(200)) == 19
        fleet.stores[0].flush(everything=True)
        fleet.clock.advance(10)
        assert all(drawing.check("a") for _ in range(3))
        fleet.clock.advance(1)
        assert plain.peek("a").remaining == 80
        fleet.clock.advance(0.005)
        assert plain.peek("a").remaining == 85


async def test_concurrent_tasks_draw_once(server: ValkeyServer) -> None:
    limit = per_minute(60, burst=1000)
    with StoreFleet(server, 1, draw_ahead=0.1) as fleet:
        limiter = Limiter(limit, store=fleet.stores[0])
        await limiter.acheck("a")
        assert all(await asyncio.gather(*[limiter.acheck("a") for _ in range(50)]))
        assert Limiter(limit, store=fleet.plain).peek("a").remaining == 1000 - 51 - 100


def test_unused_tokens_of_a_node_come_back(server: ValkeyServer) -> None:
    limit = per_minute(60, burst=100)
    with StoreFleet(server, 2, draw_ahead=0.2) as fleet:
        one, other = (Limiter(limit, store=store) for store in fleet.stores)
        plain = Limiter(limit, store=fleet.plain)
        assert all(one.check("a") for _ in range(5))
        assert plain.peek("a").remaining < 95 - 10  # some are out
        fleet.stores[0].flush(everything=True)
        assert plain.peek("a").remaining == 95
        assert all(other.check("a") for _ in range(5))
        fleet.stores[1].close()  # a node that ends in order
        assert plain.peek("a").remaining == 90
        assert all(one.check("a") for _ in range(5))
        out = 85 - plain.peek("a").remaining
        assert out > 10
        fleet.clock.advance(1)  # this one is gone: its tokens expire, and come back as refill
        fleet.stores[0]._caches.of("", limit).clear()  # type: ignore[union-attr]
        assert plain.peek("a").remaining == 85 - out + 1
        fleet.clock.advance(out)
        assert plain.peek("a").remaining == 86


def test_a_reset_does_not_return_tokens_that_other_nodes_have_drawn(server: ValkeyServer) -> None:
    limit = per_minute(60, burst=100)
    with StoreFleet(server, 2, draw_ahead=0.2) as fleet:
        one, other = (Limiter(limit, store=store) for store in fleet.stores)
        assert all(one.check("a") for _ in range(30))
        assert other.reset("a")
        assert Limiter(limit, store=fleet.plain).peek("a").remaining == 80  # as far as the server knows, 20 are out
        assert one.reset("a")
        assert Limiter(limit, store=fleet.plain).peek("a").remaining == 100


def test_a_fleet_admits_at_least_the_documented_share(server: ValkeyServer) -> None:
    """The documented bound: for each other node, the share of the capacity that it may have drawn."""
    limit, share, nodes = per_second(1000), 0.05, 4
    with StoreFleet(server, nodes, draw_ahead=share) as fleet:
        limiters = [Limiter(limit, store=store) for store in fleet.stores]
        for limiter in limiters[1:]:
            assert all(limiter.check("a") for _ in range(3))
        fleet.clock.advance(0.000_1)
        passed = 0
        while limiters[0].check("a"):
            passed += 1
        assert 1000 - (nodes - 1) * (1000 * share + 3) <= passed < 1000


def test_slow_keys_small_limits_windows_and_enforced_backoff_draw_nothing(server: ValkeyServer) -> None:
    with StoreFleet(server, 1, draw_ahead=0.1) as fleet:
        plain = fleet.plain
        cases = [(per_minute(60, burst=5), 0.01), (SlidingWindow(100, 60), 0.01), (per_minute(60, burst=100), 0.3)]
        for limit, pause in cases:
            limiter = Limiter(limit, store=fleet.stores[0])
            for number in range(4):
                limiter.check("a")
                fleet.clock.advance(pause)
                assert Limiter(limit, store=plain).peek("a").remaining >= limit.capacity - number - 1
        with Gate(Policy(backoff={"enforce": True}), store=fleet.stores[0]) as gate:
            before = fleet.calls()
            for _ in range(20):
                gate.check("a", "ws", "light")
            assert fleet.calls() - before >= 20


def test_a_draw_that_is_granted_late_returns_no_token_in_use(server: ValkeyServer) -> None:
    """A call that timed out may still be executed, after the one that was made instead."""
    limit = per_minute(60, burst=100)
    with StoreFleet(server, 1, draw_ahead=0.2) as fleet:
        store = fleet.stores[0]
        limiter, plain = Limiter(limit, store=store), Limiter(limit, store=fleet.plain)
        table = store.local_cache("", limit)
        assert isinstance(table, LimitCache)
        assert limiter.check("a")
        late = table.start_draw(Ask("", "a", limit, 1), 0, None, store.keys)
        assert late is not None
        table.end_draw("a", late, False, fleet.clock.now())  # no answer in time
        assert limiter.check("a")  # draws 20
        assert plain.peek("a").remaining == 78
        store._executor.execute(late)
        assert plain.peek("a").remaining == 57  # another 20 are out, and one is spent
        fleet.clock.advance(0.9)
        assert plain.reset("a")
        assert plain.peek("a").remaining == 60  # what is in hand still counts


@pytest.mark.parametrize(("name", "left"), [("charge", 89), ("refund", 91)])
def test_a_charge_or_refund_of_a_key_that_is_drawn_ahead_is_counted(
    server: ValkeyServer, verb: Callable[[Any, str], Any], name: str, left: int
) -> None:
    """The drawn tokens go back first, so that both see the whole bucket."""
    limit = per_minute(60, burst=100)
    with StoreFleet(server, 1, draw_ahead=0.5) as fleet:
        limiter = Limiter(limit, store=fleet.stores[0])
        assert all(limiter.check("a") for _ in range(10))
        assert Limiter(limit, store=fleet.plain).peek("a").remaining < 60
        assert verb(limiter, name)("a", 1).remaining == left
        assert Limiter(limit, store=fleet.plain).peek("a").remaining == left


@pytest.mark.parametrize("name", ["clear", "reset"])
def test_dropped_counts_take_tokens_that_are_drawn_ahead_with_them(
    server: ValkeyServer, verb: Callable[[Any, str], Any], name: str
) -> None:
    limit = per_minute(1, burst=100)
    with StoreFleet(server, 1, draw_ahead=0.5) as fleet:
        store = fleet.stores[0]
        limiter = Limiter(limit, store=store)
        assert all(limiter.check("a") for _ in range(5))
        verb(store, name)(*{"clear": ("", limit), "reset": ()}[name])
        assert sum([bool(limiter.check("a")) for _ in range(200)]) == 100


@pytest.mark.parametrize("name", ["clear", "reset"])
@pytest.mark.parametrize("answered", [True, False])
def test_tokens_that_are_drawn_while_the_counts_are_dropped_are_dropped_too(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch, verb: Callable[[Any, str], Any], name: str, *, answered: bool
) -> None:
    """Also if the answer to the drop is lost: the server may have carried it out."""
    limit = per_minute(1, burst=100)
    with StoreFleet(server, 1, draw_ahead=0.5) as fleet:
        store = fleet.stores[0]
        limiter = Limiter(limit, store=store)

        def drop(clients: Clients, keys: Keys, patterns: list[bytes]) -> Counter[str]:
            assert all(limiter.check("a") for _ in range(5))
            dropped = drop_keys(clients, keys, patterns)
            if not answered:
                raise StoreAway("lost")
            return dropped

        monkeypatch.setattr(redis_store, "drop_keys", drop)
        monkeypatch.setattr(redis_store, "adrop_keys", drop)
        with nullcontext() if answered else pytest.raises(StoreAway):
            verb(store, name)(*{"clear": ("", limit), "reset": ()}[name])
        assert sum([bool(limiter.check("a")) for _ in range(200)]) == 100


def test_a_draw_that_is_under_way_when_the_counts_are_dropped_gives_no_tokens(server: ValkeyServer) -> None:
    limit = per_minute(1, burst=100)
    with StoreFleet(server, 1, draw_ahead=0.5) as fleet:
        store = fleet.stores[0]
        limiter, table = Limiter(limit, store=store), store.local_cache("", limit)
        assert isinstance(table, LimitCache)
        assert limiter.check("a")
        draw = table.start_draw(Ask("", "a", limit, 1), 0, None, store.keys)
        assert draw is not None
        store._executor.execute(draw)
        store.clear("", limit)
        passed = bool(limiter.check("a"))
        table.end_draw("a", draw, True, fleet.clock.now())
        assert passed + sum([bool(limiter.check("a")) for _ in range(200)]) == 100


def test_a_draw_whose_caller_was_interrupted_is_given_up(server: ValkeyServer) -> None:
    limit = per_minute(60, burst=100)
    with StoreFleet(server, 1, draw_ahead=0.1) as fleet:
        store = fleet.stores[0]
        limiter, table = Limiter(limit, store=store), store.local_cache("", limit)
        assert isinstance(table, LimitCache)
        assert limiter.check("a")
        assert table.start_draw(Ask("", "a", limit, 1), 0, None, store.keys) is not None  # and nobody ends it
        fleet.clock.advance(1)
        before = fleet.calls()
        assert all(limiter.check("a") for _ in range(10))
        assert fleet.calls() - before <= 4


@pytest.mark.parametrize("name", ["clear", "reset"])
def test_dropped_violations_are_not_sent_later(
    server: ValkeyServer, verb: Callable[[Any, str], Any], name: str
) -> None:
    backoff = Backoff()
    with StoreFleet(server, 1, remember_denials=True) as fleet:
        store = fleet.stores[0]
        offence = Offence("agents", "a", backoff)
        ask = Ask("", "a", per_minute(1), 1)
        for _ in range(5):
            store.apply(Verb.CHECK, [ask], 0, offence)
        verb(store, name)(*{"clear": ("agents", backoff), "reset": ()}[name])
        store.flush()
        assert fleet.plain.standing(offence).violations == 0
