"""Checks that are interrupted: by the exception of a signal handler, by gevent, or by a cancellation."""

import asyncio
import gc
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from itertools import count
from typing import Any

import pytest

from headgate import Decision, Limiter, RedisStore, SlidingWindow, per_day
from headgate.stores.redis import batching
from tests.support.event_loop import take_turns
from tests.support.interruptions import Interrupted, interrupt
from tests.support.threads import run_together
from tests.support.valkey import PATIENCE, ValkeyServer, wait_for

pytestmark = [pytest.mark.long, pytest.mark.once]

LIMIT = per_day(10**6)  # no refill while a test runs
SOON = 5.0
"""A timeout: a thread that is left alone shows after so many seconds."""


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    """Finalizers of other tests' objects don't run in the middle of a check that is interrupted."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class SoftTimeLimitExceeded(Exception):
    """As Celery's is."""


def serves_all_threads(store: RedisStore) -> bool:
    """Whether as many threads as ever are served at the same time."""
    limiter = Limiter(LIMIT, store=store)
    return not any(decision.degraded for decision in run_together(16, lambda _: limiter.check("works")))


def interrupt_at_every_step(
    store: RedisStore, error: type[BaseException], prepare: Callable[[], None] = lambda: None
) -> None:
    """Interrupt a check anywhere: the exception passes, and the next check is answered by the server."""
    limiter = Limiter(LIMIT, store=store)
    for step in count(1):
        prepare()
        if not interrupt(step, lambda: limiter.check("a"), error):
            break
        assert not limiter.check("b").degraded, f"after an interruption at step {step}"
    assert step > 50
    assert serves_all_threads(store)


@pytest.mark.parametrize("error", [Interrupted, SoftTimeLimitExceeded])
@pytest.mark.parametrize("draw_ahead", [0, 0.01])
def test_a_check_may_be_interrupted_anywhere(
    server: ValkeyServer, error: type[BaseException], draw_ahead: float
) -> None:
    with RedisStore(server.url, timeout=SOON, draw_ahead=draw_ahead) as store:
        assert serves_all_threads(store)
        interrupt_at_every_step(store, error)


@pytest.mark.parametrize("error", [Interrupted, SoftTimeLimitExceeded])
def test_a_hold_that_is_interrupted_after_the_server_made_it_is_given_back(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    with RedisStore(server.url, timeout=SOON) as store:
        limiter = Limiter("5 in flight", store=store, name=error.__name__)
        exchange = store._clients.exchange

        def interrupted(commands: list[Any]) -> list[Any]:
            monkeypatch.setattr(store._clients, "exchange", exchange)
            exchange(commands)
            assert len(limiter.list_holds("a")) == 1
            raise error

        limiter.hold("a").settle()
        monkeypatch.setattr(store._clients, "exchange", interrupted)
        with pytest.raises(error):
            limiter.hold("a")
        assert limiter.list_holds("a") == []
        assert limiter.peek("a").remaining == 5


@pytest.mark.parametrize("options", ["", "?max_connections=3"])
def test_a_check_may_be_interrupted_while_it_connects(server: ValkeyServer, options: str) -> None:
    """A thread that was to connect, and never began, doesn't count as one that hangs."""
    with RedisStore(server.url + options, timeout=SOON) as store:
        interrupt_at_every_step(store, Interrupted, store._clients.close)


@pytest.mark.parametrize("error", [Interrupted, SoftTimeLimitExceeded])
def test_a_thread_may_be_interrupted_while_it_waits_for_others(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """One sends, the second is interrupted, and the third waits behind it."""
    monkeypatch.setattr(batching, "_MAX_SENDERS", 1)
    with RedisStore(server.url, timeout=SOON) as store:
        limiter = Limiter(LIMIT, store=store)
        batcher, exchange, gate = store._executor.thread_batcher, store._clients.exchange, threading.Event()
        limiter.check("before")

        def held_up(commands: list[Any]) -> list[Any]:
            if threading.current_thread() is threads[0]:
                held.set()
                gate.wait()
            return exchange(commands)

        monkeypatch.setattr(store._clients, "exchange", held_up)
        for step in count(1):
            decisions: list[Decision] = []
            interruptions: list[bool] = []
            gate.clear()
            held = threading.Event()
            threads = [
                threading.Thread(target=work, daemon=True)
                for work in (
                    lambda decisions=decisions: decisions.append(limiter.check("first")),
                    lambda step=step, interruptions=interruptions: interruptions.append(
                        interrupt(step, lambda: limiter.check("b"), error)
                    ),
                    lambda decisions=decisions: decisions.append(limiter.check("third")),
                )
            ]
            threads[0].start()
            assert held.wait(SOON), f"after an interruption at step {step - 1}"
            for number, thread in enumerate(threads[1:], 1):
                thread.start()
                wait_for(
                    lambda number=number, interruptions=interruptions: (  # type: ignore[misc]
                        len(batcher._waiting) + len(interruptions) == number
                    ),
                    "another in line",
                )
            gate.set()
            for thread in threads:
                thread.join(PATIENCE)
            assert len(decisions) == 2
            assert not decisions[0].degraded
            assert not limiter.check("c").degraded, f"after an interruption at step {step}"
            if not interruptions[0]:
                break
        assert step > 50


def test_the_exception_of_a_signal_handler_is_no_outage(server: ValkeyServer) -> None:
    def handle(*_: object) -> None:
        raise SoftTimeLimitExceeded

    before = signal.signal(signal.SIGALRM, handle)
    try:
        with RedisStore(server.url, timeout=PATIENCE, on_failure="closed") as store:
            limiter = Limiter(LIMIT, store=store)
            for _ in range(10):  # more than there are senders
                limiter.check("a")
                server.signal(signal.SIGSTOP)
                signal.setitimer(signal.ITIMER_REAL, 0.02)
                with pytest.raises(SoftTimeLimitExceeded):
                    limiter.check("a")
                server.signal(signal.SIGCONT)
                assert not store.degraded
            assert serves_all_threads(store)
    finally:
        server.signal(signal.SIGCONT)
        signal.signal(signal.SIGALRM, before)


async def test_an_interrupted_call_of_an_event_loop_is_raised_by_one_caller(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    limiter = Limiter(LIMIT, store=store)
    await limiter.acheck("a")

    async def interrupted(_: object) -> None:
        raise SoftTimeLimitExceeded

    with monkeypatch.context() as patch:
        patch.setattr(store._clients, "aexchange", interrupted)
        found = await asyncio.gather(*[limiter.acheck("a") for _ in range(3)], return_exceptions=True)
    assert isinstance(found[0], SoftTimeLimitExceeded)
    assert [isinstance(one, Decision) and one.degraded for one in found[1:]] == [True, True]
    assert not store.degraded
    assert not (await limiter.acheck("a")).degraded
    await store.aclose()


# Cancellation ---------------------------------------------------------------------------------------------------------


async def start_and_send(store: RedisStore, call: Coroutine[Any, Any, Decision]) -> asyncio.Task[Decision]:
    """A task of a call that has been sent."""
    before = store.traffic.requests
    task = asyncio.create_task(call)
    async with asyncio.timeout(PATIENCE):
        while store.traffic.requests == before:  # noqa: ASYNC110 - there is nothing else to wait for
            await asyncio.sleep(0)
    return task


@pytest.mark.parametrize("name", ["aacquire", "acheck"])
@pytest.mark.parametrize("limit", [per_day(10), SlidingWindow(10, 86_400)], ids=str)
async def test_a_check_that_is_cancelled_after_it_was_sent_has_spent_nothing(
    server: ValkeyServer, name: str, limit: Any
) -> None:
    async with RedisStore(server.url, timeout=PATIENCE) as store:
        limiter = Limiter(limit, store=store)
        await limiter.apeek("a")
        server.signal(signal.SIGSTOP)
        try:
            task = await start_and_send(store, getattr(limiter, name)("a", 3))
            await take_turns(20)
            task.cancel()
        finally:
            server.signal(signal.SIGCONT)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await limiter.apeek("a")).remaining == 10


@pytest.mark.parametrize("draw_ahead", [0, 0.1])
async def test_whatever_the_moment_of_a_cancellation_only_what_passed_is_spent(
    server: ValkeyServer, draw_ahead: float
) -> None:
    async with RedisStore(server.url, timeout=PATIENCE, draw_ahead=draw_ahead) as store:
        limiter = Limiter(per_day(1000), store=store)
        passed = 0
        for turns in range(60):
            task = asyncio.create_task(limiter.aacquire("a"))
            await take_turns(turns)
            task.cancel()
            passed += (
                sum([bool(one) for one in await asyncio.gather(task, return_exceptions=True)][:1]) - task.cancelled()
            )
        assert 0 < passed < 60
        store.flush(everything=True)
        assert (await limiter.apeek("a")).remaining == 1000 - passed


async def test_a_cancelled_check_with_an_id_stays_counted(server: ValkeyServer) -> None:
    """It may be asked again, and gets the same answer then."""
    async with RedisStore(server.url, timeout=PATIENCE) as store:
        limiter = Limiter(per_day(10), store=store)
        await limiter.apeek("a")
        task = await start_and_send(store, limiter.acheck("a", request_id="1"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await limiter.acheck("a", request_id="1")).remaining == 9
        assert (await limiter.apeek("a")).remaining == 9
