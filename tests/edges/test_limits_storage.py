"""`limits`' strategies on headgate's stores."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any
from uuid import uuid4

import httpx
import limits.aio.strategies
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from hypothesis import given
from hypothesis import strategies as st
from limits import RateLimitItem, RateLimitItemPerHour, RateLimitItemPerMinute, RateLimitItemPerSecond, parse
from limits.errors import ConfigurationError, StorageError
from limits.storage import storage_from_string
from limits.strategies import STRATEGIES
from redis.crc import key_slot
from slowapi import Limiter, _rate_limit_exceeded_handler
from slowapi.errors import RateLimitExceeded
from slowapi.util import get_remote_address

from headgate import HeadgateError, InvalidInput, ManualClock, MemoryStore, StoreAway
from headgate.edges.limits_storage import AsyncHeadgateStorage, HeadgateStorage
from tests.support.valkey import PATIENCE, ValkeyServer

pytestmark = pytest.mark.once

TEN = RateLimitItemPerSecond(10, 2)
TINY = 0.00001
"""Seconds: what is told is rounded, and a sliding window's end is a microsecond early."""
FIXED, MOVING, SLIDING = "fixed-window", "moving-window", "sliding-window-counter"


class SyncOrAsyncStrategy:
    """A strategy on a storage: of `limits`, or of `limits.aio` in a loop of its own."""

    def __init__(self, runner: asyncio.Runner | None, strategy: Any) -> None:
        self._runner = runner
        self._strategy = strategy
        self.storage = strategy.storage

    def _run(self, result: Any) -> Any:
        return result if self._runner is None else self._runner.run(_awaited(result))

    def hit(self, item: RateLimitItem, *key: str, cost: int = 1) -> bool:
        return bool(self._run(self._strategy.hit(item, *key, cost=cost)))

    def test(self, item: RateLimitItem, *key: str, cost: int = 1) -> bool:
        return bool(self._run(self._strategy.test(item, *key, cost=cost)))

    def left(self, item: RateLimitItem, *key: str) -> int:
        return int(self._run(self._strategy.get_window_stats(item, *key)).remaining)

    def resets_in(self, seconds: float, item: RateLimitItem, *key: str) -> None:
        """It says that it resets so long after the moment at which it was asked."""
        with within_of(seconds) as told:
            told.append(self._run(self._strategy.get_window_stats(item, *key)).reset_time)

    def clear(self, item: RateLimitItem, *key: str) -> None:
        self._run(self._strategy.clear(item, *key))

    def ask(self, name: str, *arguments: Any) -> Any:
        return self._run(getattr(self.storage, name)(*arguments))


async def _awaited(result: Any) -> Any:
    return await result


@contextmanager
def within_of(seconds: float) -> Iterator[list[float]]:
    """What is told in the block is so long after a moment of it, however long that takes."""
    told: list[float] = []
    begin = time.time()
    yield told
    assert begin + seconds - TINY <= told[0] <= time.time() + seconds + TINY


Make = Callable[[str], SyncOrAsyncStrategy]


@pytest.fixture(params=["memory", "redis"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "memory":
        return "headgate+memory://"
    server: ValkeyServer = request.getfixturevalue("redis_server")
    return f"headgate+{server.url}"


def isolated_options(url: str) -> dict[str, Any]:
    """Options of a storage that shares nothing with those of other tests."""
    return {} if "memory" in url else {"key_prefix": uuid4().hex, "timeout": PATIENCE}


@pytest.fixture(params=["sync", "async"])
def make(request: pytest.FixtureRequest, url: str, clock: ManualClock) -> Iterator[Make]:
    """Makes a strategy on one storage, whose clock stands still."""
    options = {"clock": clock, **isolated_options(url)}
    if request.param == "sync":
        with closing(storage_from_string(url, **options)) as storage:  # type: ignore[type-var]
            yield lambda name: SyncOrAsyncStrategy(None, STRATEGIES[name](storage))
        return
    with asyncio.Runner() as runner:
        storage = storage_from_string(f"async+{url}", **options)
        yield lambda name: SyncOrAsyncStrategy(runner, limits.aio.strategies.STRATEGIES[name](storage))  # type: ignore[abstract]
        assert isinstance(storage, AsyncHeadgateStorage)
        runner.run(storage.aclose())


# What the strategies mean --------------------------------------------------------------------------------------------


def test_a_fixed_window_begins_with_its_first_hit_and_ends_as_a_whole(make: Make, clock: ManualClock) -> None:
    limiter = make(FIXED)
    assert limiter.left(TEN) == 10
    limiter.resets_in(0, TEN)
    assert limiter.hit(TEN, cost=3)
    clock.advance(1.5)
    assert limiter.hit(TEN, cost=7)
    assert not limiter.hit(TEN)
    assert not limiter.test(TEN)
    assert limiter.left(TEN) == 0
    limiter.resets_in(0.5, TEN)
    clock.advance(0.499999)
    assert not limiter.hit(TEN)
    clock.advance(0.000001)
    assert limiter.left(TEN) == 10
    assert limiter.hit(TEN, cost=10)
    assert not limiter.hit(TEN)


def test_a_moving_window_frees_each_hit_a_window_after_it_was_made(make: Make, clock: ManualClock) -> None:
    limiter = make(MOVING)
    limiter.resets_in(2, TEN)
    assert limiter.hit(TEN, cost=3)
    clock.advance(1.5)
    assert limiter.hit(TEN, cost=6)
    assert (limiter.left(TEN), limiter.test(TEN), limiter.test(TEN, cost=2)) == (1, True, False)
    limiter.resets_in(0.5, TEN)
    assert limiter.hit(TEN)
    assert not limiter.hit(TEN)
    clock.advance(0.499999)
    assert not limiter.hit(TEN)
    clock.advance(0.000001)
    assert limiter.left(TEN) == 3
    limiter.resets_in(1.5, TEN)
    assert not limiter.hit(TEN, cost=4)
    assert limiter.hit(TEN, cost=3)


def test_a_sliding_window_counter_is_exact(make: Make, clock: ManualClock) -> None:
    limiter = make(SLIDING)
    assert limiter.left(TEN) == 10
    limiter.resets_in(0, TEN)
    assert limiter.hit(TEN, cost=3)
    limiter.resets_in(2, TEN)
    clock.advance(1.5)
    assert limiter.hit(TEN, cost=7)
    assert (limiter.left(TEN), limiter.test(TEN), limiter.hit(TEN)) == (0, False, False)
    limiter.resets_in(0.5, TEN)
    clock.advance(0.5)
    assert (limiter.left(TEN), limiter.hit(TEN, cost=4), limiter.hit(TEN, cost=3)) == (3, False, True)


def test_strategies_and_keys_do_not_meet(make: Make) -> None:
    for name in STRATEGIES:
        assert make(name).hit(TEN, "a", cost=10)
        assert not make(name).hit(TEN, "a")
        assert make(name).hit(TEN, "b}/{c")
        assert make(name).left(TEN, "b}/{c") == 9


def test_clear_and_reset(make: Make) -> None:
    every = [make(name) for name in STRATEGIES]
    for limiter in every:
        for key in "abc":
            assert limiter.hit(TEN, key, cost=10)
        limiter.clear(TEN, "a")
        assert (limiter.left(TEN, "a"), limiter.left(TEN, "b")) == (10, 0)
    assert every[0].hit(RateLimitItemPerMinute(1), "d")
    assert every[0].ask("reset") == 7
    assert [limiter.left(TEN, "b") for limiter in every] == [10, 10, 10]
    assert every[0].ask("reset") == 0


def test_a_limit_of_zero_denies_everything(make: Make) -> None:
    for name in STRATEGIES:
        limiter = make(name)
        nothing = RateLimitItemPerMinute(0)
        assert (limiter.hit(nothing), limiter.test(nothing), limiter.left(nothing)) == (False, False, 0)


def test_a_cost_above_the_limit_is_denied_and_counted_in_the_answer(make: Make) -> None:
    key, seconds = TEN.key_for("a"), TEN.get_expiry()
    storage = make(FIXED)
    assert storage.ask("incr", key, seconds, 11) == 11
    assert storage.ask("get", key) == 0
    assert storage.ask("incr", key, seconds, 4) == 4
    assert storage.ask("incr", key, seconds, 7) == 11
    assert storage.ask("incr", key, seconds, 10**30) == 10**30 + 4
    assert storage.ask("get", key) == 4
    assert storage.ask("incr", key, seconds, 6) == 10


def test_a_custom_unit_is_accepted() -> None:
    class PerFortnight(RateLimitItem):
        GRANULARITY = limits.limits.Granularity(14 * 86_400, "fortnight")

    try:
        storage = HeadgateStorage("headgate+memory://")
        assert storage.incr(PerFortnight(2, 3).key_for("a"), 3 * 14 * 86_400) == 1
    finally:
        del limits.limits.GRANULARITIES["fortnight"]


PAUSES = st.sampled_from([0, 1, 300_000, 700_000, 999_999, 1_000_000])
STEPS = st.lists(st.tuples(PAUSES, st.integers(1, 4)), max_size=60)


@given(STEPS)
def test_fixed_windows_match_a_plain_count(steps: list[tuple[int, int]]) -> None:
    clock = ManualClock(start=1000)
    storage = HeadgateStorage("headgate+memory://", clock=clock)
    limit = RateLimitItemPerSecond(5)
    ends = used = 0
    for pause, cost in steps:
        clock.advance(pause / 1_000_000)
        if clock.now() >= ends:
            used = 0
        assert storage.get(limit.key_for()) == used
        assert storage.incr(limit.key_for(), 1, cost) == used + cost
        if used + cost <= 5:
            ends = ends if used else clock.now() + 1_000_000
            used += cost


@given(STEPS)
def test_moving_windows_match_a_plain_list(steps: list[tuple[int, int]]) -> None:
    clock = ManualClock(start=1000)
    storage = HeadgateStorage("headgate+memory://", clock=clock)
    hits: list[int] = []
    for pause, cost in steps:
        clock.advance(pause / 1_000_000)
        hits = [hit for hit in hits if hit > clock.now() - 1_000_000]
        with within_of((hits[0] - clock.now()) / 1_000_000 if hits else 0) as told:
            begin, count = storage.get_moving_window("/5/1/second", 5, 1)
            told.append(begin)
        assert count == len(hits)
        assert storage.acquire_entry("/5/1/second", 5, 1, cost) == (len(hits) + cost <= 5)
        if len(hits) + cost <= 5:
            hits += [clock.now()] * cost


def test_a_full_store_denies_new_keys(clock: ManualClock) -> None:
    storage = HeadgateStorage("headgate+memory://", max_keys=2, clock=clock)
    for name in STRATEGIES:
        limiter = STRATEGIES[name](storage)
        limiter.hit(TEN, "first")
        limiter.hit(TEN, "second")
        assert not limiter.hit(TEN, "third")
    assert storage.incr(TEN.key_for("third"), 2, 0) > 10


# What is wrong with limits' own storages -----------------------------------------------------------------------------


def in_threads(count: int, work: Callable[[], None]) -> None:
    workers = [threading.Thread(target=work) for _ in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


@pytest.mark.usefixtures("_frequent_switches")
@pytest.mark.parametrize("name", STRATEGIES)
def test_defect_5_exactly_the_limit_passes_from_many_threads(url: str, name: str, clock: ManualClock) -> None:
    most, threads, hits = (200, 8, 50) if "memory" in url else (30, 8, 8)
    options = {"clock": clock, **isolated_options(url)}
    with closing(HeadgateStorage(url, **options)) as storage:
        limiter, limit = STRATEGIES[name](storage), RateLimitItemPerMinute(most)
        passed: list[bool] = []

        def hit() -> None:
            for _ in range(hits):
                passed.append(limiter.hit(limit))  # noqa: PERF401

        in_threads(threads, hit)
        assert (len(passed), sum(passed)) == (threads * hits, most)


def test_a_window_opened_by_many_threads_is_counted_exactly(url: str, clock: ManualClock) -> None:
    options = {"clock": clock, **isolated_options(url)}
    item, passed = RateLimitItemPerSecond(3), []
    barrier = threading.Barrier(4)
    with closing(HeadgateStorage(url, **options)) as storage:
        limiter = STRATEGIES[FIXED](storage)

        def hit() -> None:
            for number in range(12):
                if barrier.wait(PATIENCE) == 0:
                    clock.advance(1)
                barrier.wait(PATIENCE)
                passed.extend([number] * sum([limiter.hit(item) for _ in range(2)]))

        in_threads(4, hit)
    assert [passed.count(number) for number in range(12)] == [3] * 12


def test_defect_6_a_denied_hit_spends_nothing(make: Make) -> None:
    for name in STRATEGIES:
        limiter = make(name)
        assert not limiter.hit(TEN, cost=11)
        assert limiter.left(TEN) == 10
        assert limiter.hit(TEN, cost=8)
        assert not limiter.hit(TEN, cost=3)
        assert limiter.left(TEN) == 2


def test_defect_7_nothing_is_left_of_keys_that_expired(clock: ManualClock) -> None:
    storage = HeadgateStorage("headgate+memory://", clock=clock)
    store = storage.store
    assert isinstance(store, MemoryStore)
    for strategy in STRATEGIES.values():
        for key in range(100):
            strategy(storage).hit(TEN, str(key))
    assert len(store) == 400
    for _ in range(400):
        clock.advance(1)
        storage.incr(TEN.key_for("other"), 2)
    assert len(store) < 10


def test_defect_7_every_key_in_a_server_expires(redis_server: ValkeyServer) -> None:
    prefix, item = uuid4().hex, RateLimitItemPerHour(10)  # none of which expires before it is looked for
    with closing(HeadgateStorage(f"headgate+{redis_server.url}", key_prefix=prefix, timeout=PATIENCE)) as storage:
        for strategy in STRATEGIES.values():
            for _ in range(11):
                strategy(storage).hit(item, "a")
                strategy(storage).test(item, "unknown")
        with redis_server.client() as client:
            keys = list(client.scan_iter(match=f"{prefix}:*"))
            assert len(keys) == 4
            assert all(0 < client.pttl(key) <= 2 * 3_600_000 for key in keys)
            assert len({key_slot(key) for key in keys}) == 1


# What can't be used --------------------------------------------------------------------------------------------------


def test_invalid_storage_arguments_are_refused() -> None:
    storage = HeadgateStorage("headgate+memory://")
    attempts: list[tuple[Callable[[], object], str]] = [
        (lambda: storage.get("test"), "storage key: expected one that RateLimitItem.key_for has made"),
        (lambda: storage.clear("a/1/1/eon"), "storage key: expected one that RateLimitItem.key_for has made"),
        (lambda: storage.incr("/1/1/minute", 61), "storage expiry: expected the 60 seconds that its key says, got 61"),
        (lambda: storage.incr("/1/1/minute", 60, -1), "cost: expected a whole number, 0 or more, got -1"),
        (lambda: storage.acquire_entry("/2/1/minute", 2, 60, -1), "cost: expected a whole number, 0 or more, got -1"),
        (lambda: storage.incr("/1000001/1/day", 86_400), "SlidingWindow limit: expected a whole number from 1 to 1000"),
        (lambda: HeadgateStorage("headgate+memory://", timeout=1), "HeadgateStorage options: expected some of key"),
        (lambda: AsyncHeadgateStorage("async+headgate+redis://x", max_connections=3),
         ("AsyncHeadgateStorage options: expected some of key_prefix, wrap_exceptions, clock, on_failure, timeout ("
          "options of redis-py go into the URL, after a question mark), got 'max_connections'")),
    ]  # fmt: skip
    for attempt, text in attempts:
        with pytest.raises(InvalidInput) as caught:
            attempt()
        assert str(caught.value).startswith(text)
    with pytest.raises(ConfigurationError, match="unknown storage scheme"):
        storage_from_string("headgate+memcached://localhost")


@pytest.mark.parametrize(
    ("on_failure", "passed"),
    [("local", [True, True, False]), ("open", [True, True, True]), ("closed", [False, False, False])],
)
async def test_a_server_that_is_away(on_failure: str, passed: list[bool]) -> None:
    options: Any = {"on_failure": on_failure, "wrap_exceptions": True}
    with closing(HeadgateStorage("headgate+redis://127.0.0.1:1", **options)) as storage:
        assert not storage.check()
        for strategy in STRATEGIES.values():
            limiter = strategy(storage)
            assert [limiter.hit(parse("2/hour")) for _ in range(3)] == passed
            limiter.get_window_stats(parse("2/hour"))
        for drop in (storage.reset, lambda: storage.clear("/2/1/hour")):
            with pytest.raises(StorageError) as caught:
                drop()
            assert isinstance(caught.value.storage_error, StoreAway)
    astorage = AsyncHeadgateStorage("async+headgate+redis://127.0.0.1:1", **options)
    assert not await astorage.check()
    assert [await astorage.acquire_entry("/2/1/hour", 2, 3600) for _ in range(3)] == passed
    with pytest.raises(StorageError):
        await astorage.reset()
    await astorage.aclose()


def test_without_limits_it_says_what_to_install() -> None:
    program = "import sys; sys.modules['limits'] = None; import headgate.edges.limits_storage"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (
        f"{HeadgateError.__module__}.HeadgateError: headgate.edges.limits_storage: expected limits, got: "
        in result.stderr
    )
    assert result.stderr.strip().endswith("pip install limits")


# In use --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_slowapi(url: str, strategy: str, clock: ManualClock) -> None:
    options: Any = {"clock": clock, **isolated_options(url)}
    limiter = Limiter(
        key_func=get_remote_address,
        storage_uri=url,
        storage_options=options,
        strategy=strategy,
        headers_enabled=True,
    )
    app = FastAPI()
    app.state.limiter = limiter
    app.add_exception_handler(RateLimitExceeded, _rate_limit_exceeded_handler)  # type: ignore[arg-type]

    @app.get("/")
    @limiter.limit("3/minute")
    async def _root(request: Request) -> JSONResponse:
        return JSONResponse({})

    async def ask() -> list[tuple[int, str]]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            answers = [await client.get("/") for _ in range(4)]
            return [(answer.status_code, answer.headers["X-RateLimit-Remaining"]) for answer in answers]

    assert isinstance(limiter._storage, HeadgateStorage)
    with closing(limiter._storage):
        assert asyncio.run(ask()) == [(200, "2"), (200, "1"), (200, "0"), (429, "0")]
