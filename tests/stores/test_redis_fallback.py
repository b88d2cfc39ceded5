"""The store while its server is away, one caller at a time: who waits, and what decides instead."""

import asyncio
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from fractions import Fraction
from typing import Any

import pytest
import redis
import uvloop

from headgate import AllOf, Decision, Limit, Limiter, ManualClock, SlidingWindow, StoreAway, TokenBucket, per_day
from headgate.stores.base import Ask, Verb
from headgate.stores.redis import RedisStore, batching
from headgate.stores.redis.fallback import CircuitBreaker
from tests.support.ports import unused_port
from tests.support.redis_store import POLICIES, SLACK, TIMEOUT, ProcessTime, ask_until_answered
from tests.support.valkey import PATIENCE, ValkeyServer, wait_for

LIMIT = per_day(200)  # a token every seven minutes: none while a test runs

pytestmark = [pytest.mark.long, pytest.mark.once, pytest.mark.usefixtures("_leave_nothing_open")]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("url", ["redis://{}", "redis+cluster://{}", "redis+sentinel://{}/main"])
async def test_the_failure_policy_decides_if_the_server_was_never_there(url: str, policy: str, kind: str) -> None:
    with (
        unused_port() as port,
        RedisStore(url.format(f"127.0.0.1:{port}"), on_failure=policy, timeout=PATIENCE) as store,
    ):
        limiter = Limiter(per_day(2), store=store)
        with ProcessTime() as took:
            decisions = [await limiter.acheck("a") if kind == "tasks" else limiter.check("a") for _ in range(3)]
        assert took.seconds < SLACK
        assert all(decision.degraded for decision in decisions)
        assert sum(map(bool, decisions)) == {"open": 3, "closed": 0, "local": 2}[policy]
        assert store.degraded


@pytest.fixture
def resetting_server_port() -> Iterator[int]:
    """The port of a server that accepts connections and resets them at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reset() -> None:
            with suppress(OSError):  # the end
                while True:
                    connection, _ = server.accept()
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    connection.close()

        thread = threading.Thread(target=reset)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_server_that_resets_connections_is_away(resetting_server_port: int, loop: Callable[[], Any]) -> None:
    """At any moment: uvloop has an error of its own for a connection that was closed in between."""

    async def ask() -> list[bool]:
        found = []
        for _ in range(100):
            async with RedisStore(f"redis://127.0.0.1:{resetting_server_port}", timeout=PATIENCE) as store:
                found.append((await Limiter(LIMIT, store=store).acheck("a")).degraded)
                found.append((await store.aapply(Verb.CHECK, [Ask("", "a", LIMIT, 1)], 0)).degraded)
        return found

    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(ask()) == [True] * 200


async def test_few_wait_for_a_server_that_hangs(kind: str, breaker_clock: ManualClock) -> None:
    """The first waits for the whole timeout, then one every 0.4 s. The others are decided at once; nothing is sent."""
    with ValkeyServer() as server, ProcessTime() as took:
        async with RedisStore(server.url, on_failure="closed", timeout=TIMEOUT) as store:
            limiter = Limiter(LIMIT, store=store)

            async def check() -> Decision:
                return limiter.check("a") if kind == "threads" else await limiter.acheck("a")

            async def calls_for(checks: int) -> int:
                before = store.traffic.round_trips
                decisions = [await check() for _ in range(checks)]
                assert all(decision.degraded and not decision for decision in decisions)
                return store.traffic.round_trips - before

            await ask_until_answered(check, breaker_clock)
            server.signal(signal.SIGSTOP)
            began = time.monotonic()
            assert await calls_for(1) == 1
            assert time.monotonic() - began >= TIMEOUT * 0.9
            assert await calls_for(100) == 0
            for _ in range(2):
                breaker_clock.advance(0.399)
                assert await calls_for(20) == 0
                breaker_clock.advance(0.001)
                assert await calls_for(20) == 1
    assert took.seconds < 3 * TIMEOUT + SLACK


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_request_whose_answer_was_lost_is_charged_once(kind: str, policy: str) -> None:
    """Executed or not, it is charged once if it is repeated under its id."""
    with ValkeyServer() as server, RedisStore(server.url, on_failure=policy, timeout=TIMEOUT) as store:
        limiter = Limiter(LIMIT, store=store)

        async def ask(request_id: str) -> Decision:
            if kind == "threads":
                return limiter.check("a", request_id=request_id)
            return await limiter.acheck("a", request_id=request_id)

        async def peek() -> Decision:
            return limiter.peek("a") if kind == "threads" else await limiter.apeek("a")

        assert (await ask_until_answered(peek)).remaining == 200  # it is connected
        server.signal(signal.SIGSTOP)
        began = time.monotonic()
        assert (await ask("r1")).degraded
        assert time.monotonic() - began > TIMEOUT * 0.9
        server.signal(signal.SIGCONT)
        decision = await ask_until_answered(lambda: ask("r1"))
        assert decision
        assert decision.remaining == 199
        assert (await ask_until_answered(lambda: ask("r1"))).remaining == 199
        assert (await ask_until_answered(peek)).remaining == 199
        assert (await ask_until_answered(lambda: ask("r2"))).remaining == 198
        await store.aclose()


@pytest.mark.usefixtures("breaker_clock")
def test_after_a_lost_connection_only_the_next_request_tries_at_once() -> None:
    """The fault may have been that connection's alone. After a timeout, no request tries for a while."""
    breaker = CircuitBreaker(lambda _degraded, _reason: None)
    breaker.record_failure(redis.ConnectionError("closed"))
    breaker.allow()
    with pytest.raises(StoreAway):
        breaker.allow()
    breaker.record_failure(redis.ConnectionError("closed"))
    with pytest.raises(StoreAway):
        breaker.allow()
    breaker.record_success()
    breaker.allow()
    breaker.record_failure(redis.TimeoutError("no answer"))
    with pytest.raises(StoreAway):
        breaker.allow()


def test_thousands_of_waiting_tasks_are_decided_together() -> None:
    """They don't wait for one call after another to fail."""

    async def ask(limiter: Limiter) -> list[Decision]:
        return await asyncio.gather(*[limiter.acheck(f"key-{number}") for number in range(12_000)])

    with ValkeyServer() as server, RedisStore(server.url, timeout=TIMEOUT) as store:
        limiter = Limiter(LIMIT, store=store)
        wait_for(lambda: not limiter.check("before").degraded, "the server's answer")
        server.signal(signal.SIGSTOP)
        before = store.traffic.round_trips
        decisions = asyncio.run(ask(limiter))
        sent = store.traffic.round_trips - before
        server.signal(signal.SIGCONT)
    assert all(decision.degraded for decision in decisions)
    assert sent <= batching._MAX_IN_FLIGHT


# Shares of several nodes ----------------------------------------------------------------------------------------------

BURST_40 = TokenBucket(40, 60, 60)
BURST_41 = TokenBucket(41, 60, 60)
"""Rounded down, half of it is half of `BURST_40`."""


@pytest.fixture
def cut_off_node() -> Iterator[RedisStore]:
    """The store of one of two nodes whose server is away for good."""
    with (
        unused_port() as port,
        RedisStore(f"redis://127.0.0.1:{port}", timeout=PATIENCE, nodes=2, clock=ManualClock(start=1000)) as store,
    ):
        yield store


def summary(decision: Decision) -> tuple[bool, bool, Limit, int | None]:
    return bool(decision), decision.degraded, decision.limit, decision.bound


def test_parts_with_equal_shares_keep_their_places(cut_off_node: RedisStore) -> None:
    window = SlidingWindow(4, 60)
    limiter = Limiter(AllOf([BURST_40, BURST_41, window]), store=cut_off_node)
    assert [summary(limiter.check("a")) for _ in range(3)] == [
        (True, True, window, 2),
        (True, True, window, 2),
        (False, True, window, 2),
    ]


def test_a_part_that_equals_the_share_of_another_is_not_mistaken_for_it(cut_off_node: RedisStore) -> None:
    whole, half = TokenBucket(2, 20, 60), TokenBucket(1, 20, 120)
    decision = Limiter(AllOf([whole, half]), store=cut_off_node).check("a")
    assert summary(decision) == (True, True, whole, 0), "neither has any left, so the first is named"


def test_limits_with_equal_shares_can_be_checked_together(cut_off_node: RedisStore) -> None:
    """Each is counted separately, and the one that decides is named, with its part."""
    window = SlidingWindow(4, 60)
    asks = [
        Ask("", "a", BURST_40, 7),
        Ask("", "a", BURST_41, 1),
        Ask("", "a", AllOf([BURST_40, BURST_41, window]), 1),
    ]
    decisions = [cut_off_node.apply(Verb.CHECK, asks, 0) for _ in range(3)]
    assert [summary(decision) for decision in decisions] == [
        (True, True, window, 2),
        (True, True, window, 2),
        (False, True, window, 2),
    ]
    asks = asks[1::-1]
    decisions = [cut_off_node.apply(Verb.PEEK, asks, 0), cut_off_node.apply(Verb.CHECK, asks, 0)]
    assert [summary(decision) for decision in decisions] == [(False, True, BURST_40, 1)] * 2
    assert [decision.retry_us for decision in decisions] == [2_000_000] * 2


def test_limits_with_equal_shares_never_collide(cut_off_node: RedisStore) -> None:
    decisions = [Limiter(limit, store=cut_off_node).check("a", 5) for limit in (BURST_40, BURST_41)]
    assert [decision.remaining for decision in decisions] == [15, 15]


def test_a_limit_has_one_count_alone_and_among_others(cut_off_node: RedisStore) -> None:
    limit = AllOf([BURST_40, SlidingWindow(100, 60)])
    limiter, ask = Limiter(limit, store=cut_off_node), Ask("", "a", limit, 5)
    assert limiter.check("a", 5).remaining == 15
    assert cut_off_node.apply(Verb.CHECK, [ask, Ask("", "b", limit, 1)], 0).remaining == 10
    assert limiter.peek("a").remaining == 10


@pytest.mark.parametrize(
    ("limit", "nodes", "wait"),
    [
        (TokenBucket(1, 2**52 + 1, Fraction(2**52, 10**6)), 3, 3),
        (TokenBucket(1, 1, 9_000_000_000), 10**9, 2**53 - 1),
        (TokenBucket(5, 3, 9_000_000_000), 2**53 - 1, 2**53 - 1),
    ],
    ids=["fast", "slow", "many nodes"],
)
def test_a_share_that_cant_be_counted_exactly_is_rounded_down(limit: TokenBucket, nodes: int, wait: int) -> None:
    """No `TokenBucket` can hold it: each token takes whole microseconds instead."""
    with (
        unused_port() as port,
        RedisStore(f"redis://127.0.0.1:{port}", timeout=PATIENCE, nodes=nodes, clock=ManualClock(start=1000)) as store,
    ):
        limiter = Limiter(limit, store=store)
        assert summary(limiter.check("a")) == (True, True, limit, None)
        denied = limiter.check("a")
        assert summary(denied) == (False, True, limit, None)
        assert denied.retry_us == wait


@pytest.mark.parametrize("drop", ["forget", "clear"])
def test_dropping_a_key_drops_its_count_in_the_share_too(verb: Callable[[Any, str], Any], drop: str) -> None:
    """The next outage begins with a full share."""
    limit = AllOf([per_day(4), SlidingWindow(6, 86_400)])
    with ValkeyServer() as server, RedisStore(server.url, nodes=2, timeout=PATIENCE) as store:
        limiter = Limiter(limit, store=store)
        server.kill()
        assert [bool(limiter.check("a")) for _ in range(3)] == [True, True, False]
        server.start()
        wait_for(lambda: not limiter.peek("a").degraded, "the server")
        verb(store, drop)(*{"forget": ("", "a", limit), "clear": ("", limit)}[drop])
        server.kill()
        decision = limiter.check("a")
        assert (bool(decision), decision.degraded, decision.remaining) == (True, True, 1)


@pytest.mark.parametrize("drop", ["forget", "clear", "reset"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_reset_that_fails_leaves_the_local_count(verb: Callable[[Any, str], Any], drop: str, nodes: int) -> None:
    """A program that tries again and again must not lift the limit for as long as the server is away."""
    limit = per_day(2)
    arguments = {"forget": ("", "a", limit), "clear": ("", limit), "reset": ()}
    with unused_port() as port, RedisStore(f"redis://127.0.0.1:{port}", nodes=nodes, timeout=PATIENCE) as store:
        limiter = Limiter(limit, store=store)
        while limiter.check("a"):
            pass
        with pytest.raises(StoreAway):
            verb(store, drop)(*arguments[drop])
        assert not limiter.check("a")


async def test_a_window_that_cant_be_reset_keeps_its_local_count() -> None:
    with unused_port() as port:
        async with RedisStore(f"redis://127.0.0.1:{port}", timeout=PATIENCE) as store:
            windows = store.windows()
            await windows.hit("a", 1, 60_000_000)
            with pytest.raises(StoreAway):
                await windows.forget("a")
            assert not (await windows.hit("a", 1, 60_000_000)).allowed
