"""What a hold and its settling cost beside a check, in memory and on a server, all in one run.

The contenders take turns within each of many short rounds, and the best round counts. In memory the time is the
processor's; on a server it is wall time, since the server works too.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any, Final, NamedTuple

import redis

from benchmarks import report
from benchmarks.account_tree import expect_server
from benchmarks.contenders import Contender, contender
from benchmarks.measure import AsyncTurn, Timing, Turn, best_of, in_tasks, names, shuffled, verified_turns
from benchmarks.redis_suite import empty, on_each_core, server, used_memory
from benchmarks.report import Bar, at_most, bar_list, machine_line, table, time_of
from benchmarks.suite import say
from headgate import Limit, Limiter, RedisStore, per_day
from headgate.limits.budget import Budget
from headgate.limits.fixed import UNLIMITED
from headgate.limits.meter import Meter
from headgate.stores.base import Ask
from headgate.stores.holds import HoldTerms

PACKAGES: Final = ("redis", "hiredis")

MEMORY: Final = "in memory"
ON_SERVER: Final = "one thread, "
TASKS: Final = "50 tasks"

CHECK: Final = "check"
PAIR: Final = "hold + settle"
SLOTS_PAIR: Final = "hold + settle, two limits, one of them slots"
ACCOUNTS: Final = "hold on 5 levels of accounts"
ACCOUNTS_PAIR: Final = "the same + settle"

MOST_ON_SERVER: Final = 2.2
"""Times a check that a hold and its settling may take on a server."""
MOST_IN_MEMORY: Final = 3
MOST_CHANGE: Final = 0.2
"""By which open holds may change the time of another one."""
MOST_BYTES: Final = 250
"""That an open hold may need on a server."""
MOST_ON_LEVELS: Final = 2
"""Times a check that a hold on 5 levels may take on a server."""
MOST_ON_LEVELS_IN_TASKS: Final = 3.5
MOST_BYTES_ON_LEVELS: Final = 400

AT_ONCE: Final = 1000
"""Open holds that are made at once."""

_LIMIT: Final = "1000000000/day"  # nothing is denied
_WITH_SLOTS: Final = f"{_LIMIT}; 100000 in flight"
_KEYS: Final = 100
_FEW: Final = 10
_MANY: Final = 100_000
_LEASE: Final = 86_400  # seconds: longer than any run
_SHAPE: Final = "tokens\torganisation-/team-0000001/agent-000001\t1000000000/day\n" * 5
_SETTLED: Final = [1, 3, 1, 3, 3, 3, 3, 3]


class Scale(NamedTuple):
    """The extent of a run."""

    rounds: int
    memory_checks: int
    """Per round."""
    checks: int
    """Per round, on a server."""
    task_checks: int
    """Per task and round."""
    open: int
    """Holds of one key that are open, where there are many."""


FULL: Final = Scale(rounds=25, memory_checks=5_000, checks=250, task_checks=40, open=_MANY)
QUICK: Final = Scale(rounds=5, memory_checks=2_000, checks=200, task_checks=20, open=10_000)


@dataclass
class Results:
    """Everything that a run measures."""

    machine: dict[str, str]
    times: dict[str, dict[str, Timing]] = field(default_factory=dict)
    """For each place, by contender."""
    crowds: dict[str, dict[int, Timing]] = field(default_factory=dict)
    """For each place, a hold and its settling by how many others of its key are open."""
    open: int = 0
    bytes_per_hold: float = 0
    bytes_on_levels: float = 0

    def ratio(self, place: str, label: str = PAIR) -> float:
        return self.times[place][label].best / self.times[place][CHECK].best

    def growth(self, place: str) -> float:
        """How many times as long it takes with many open holds as with few."""
        return self.crowds[place][self.open].best / self.crowds[place][_FEW].best


def measure(scale: Scale) -> Results:
    with server() as url, redis.Redis.from_url(url, protocol=2) as client:
        info = client.info()
        results = Results(report.machine(PACKAGES) | {"Valkey": info["valkey_version"]}, open=scale.open)
        with RedisStore(url, timeout=10) as store:
            _memory(results, scale, store, client)  # first, before connections come and go
            _in_memory(results, scale)
            _on_server(results, scale, store, int(info["process_id"]))
        asyncio.run(_tasks(results, scale, url))
        return results


class Accounts:
    """Holds on five levels of accounts, each with one limit, in ten trees: as a gate asks a store for them."""

    def __init__(self, store: RedisStore) -> None:
        self.store: Final = store
        self._numbers: Final = itertools.count(1)
        self._start: Final = token_hex(6)
        self._limits: Final[list[Limit]] = [
            Budget(10**12, "month"),
            per_day(10**9),
            per_day(10**9),
            Budget(10**12, "day"),
            Budget(10**12),
        ]
        self._asks: Final[dict[str, list[Ask]]] = {}

    def asks(self, key: str) -> list[Ask]:
        """What a hold of an agent asks for: its home, two meters, and the limits."""
        found = self._asks.get(key)
        if found is None:
            tree = sum(key.encode()) % 10
            path = [f"organisatio{tree}", f"team-{tree:07}", key.rjust(12, "-"), f"session-{tree:04}", "task-0000001"]
            paths = ["/".join(path[: level + 1]) for level in range(5)]
            meters = [
                (f"{paths[2]}\tweb-search-1\t{resource}", cost) for resource, cost in (("tokens", 5), ("calls", 1))
            ]
            found = [Ask("accounts", path[0], UNLIMITED, 1)]
            found += [Ask("usage", meter, Meter(), cost, path[0]) for meter, cost in meters]
            limits = zip(paths, self._limits, strict=True)
            found += [Ask("tokens", where, limit, 5, path[0]) for where, limit in limits]
            self._asks[key] = found
        return found

    def terms(self, key: str) -> HoldTerms:
        hold_id = f"{key.rjust(12, '-')}/{self._start}-{next(self._numbers):x}"
        return HoldTerms(hold_id, _LEASE * 10**6, False, 86_400 * 10**6, "web-search-1\tsession-0001", _SHAPE)

    def hold(self, key: str) -> bool:
        return bool(self.store.hold(self.asks(key), 100, self.terms(key)).decision)

    async def ahold(self, key: str) -> bool:
        return bool((await self.store.ahold(self.asks(key), 100, self.terms(key))).decision)

    def pair(self, key: str) -> None:
        asks, terms = self.asks(key), self.terms(key)
        self.store.hold(asks, 100, terms)
        self.store.settle(asks, 100, terms.hold_id, _SETTLED)

    async def apair(self, key: str) -> None:
        asks, terms = self.asks(key), self.terms(key)
        await self.store.ahold(asks, 100, terms)
        await self.store.asettle(asks, 100, terms.hold_id, _SETTLED)

    def contenders(self) -> dict[str, Contender]:
        return {ACCOUNTS: contender(self.hold, self.hold), ACCOUNTS_PAIR: contender(self.pair, self.hold)}


def _contenders(**options: Any) -> dict[str, Contender]:
    limiter, slots = Limiter(_LIMIT, **options), Limiter(_WITH_SLOTS, name="slots", **options)
    check = limiter.check
    checks = contender(check, lambda key: bool(check(key)))
    return {CHECK: checks, PAIR: _pairs(limiter), SLOTS_PAIR: _pairs(slots)}


def _pairs(limiter: Limiter) -> Contender:
    hold = limiter.hold

    def run(keys: Iterable[str]) -> None:
        for key in keys:
            hold(key, 5).settle(3)

    return Contender(run, lambda key: bool(hold(key)))


def _in_memory(results: Results, scale: Scale) -> None:
    say(MEMORY)
    turns_of_all = verified_turns(_contenders(), shuffled(names(_KEYS), scale.memory_checks))
    results.times[MEMORY] = best_of(scale.rounds, turns_of_all)
    limiter = Limiter(_LIMIT)
    turns = {}
    for count in (_FEW, scale.open):
        key = f"with-{count}"
        for _ in range(count):
            limiter.hold(key, lease=_LEASE)
        turns[count] = Turn(_pairs(limiter), [key] * scale.memory_checks)
    results.crowds[MEMORY] = best_of(scale.rounds, turns)


def _on_server(results: Results, scale: Scale, store: RedisStore, process: int) -> None:
    contenders = _contenders(store=store) | Accounts(store).contenders()
    turns = verified_turns(contenders, shuffled(names(_KEYS), scale.checks))
    limiter = Limiter(_LIMIT, store=store, name="crowd")
    crowds = {}
    for count in (_FEW, scale.open):
        say(f"{count:,} open holds of a key")
        key = f"with-{count}"
        _hold_of_key(limiter, key, count)
        crowds[count] = Turn(_pairs(limiter), [key] * scale.checks)

    def measure_at(place: str) -> None:
        results.times[ON_SERVER + place] = best_of(scale.rounds, turns, time.perf_counter_ns)
        results.crowds[ON_SERVER + place] = best_of(scale.rounds, crowds, time.perf_counter_ns)

    on_each_core(process, measure_at)
    expect_server(store)


def hold_many(hold: Callable[[int], Awaitable[object]], count: int) -> None:
    """Make open holds, with ids as they are made. `hold` makes one, by its number."""

    async def all_of_them() -> None:
        for first in range(0, count, AT_ONCE):
            numbers = range(first, min(first + AT_ONCE, count))
            if not all(await asyncio.gather(*map(hold, numbers))):
                raise RuntimeError("expected that all are granted")

    asyncio.run(all_of_them())


def _hold_of_key(limiter: Limiter, key: str, count: int) -> None:
    hold_many(lambda _: limiter.ahold(key, lease=_LEASE), count)


def _memory(results: Results, scale: Scale, store: RedisStore, client: redis.Redis) -> None:
    say(f"memory of {scale.open:,} open holds")
    limiter = Limiter(_LIMIT, store=store)
    _hold_of_key(limiter, "before", AT_ONCE)  # so that scripts and connections are not counted
    before = used_memory(client)
    _hold_of_key(limiter, "many", scale.open)
    results.bytes_per_hold = (used_memory(client) - before) / scale.open
    empty(client)
    accounts = Accounts(store)
    hold_many(lambda _: accounts.ahold("agent-000001"), AT_ONCE)
    before = used_memory(client)
    hold_many(lambda _: accounts.ahold("agent-000001"), scale.open)
    results.bytes_on_levels = (used_memory(client) - before) / scale.open
    empty(client)


async def _tasks(results: Results, scale: Scale, url: str) -> None:
    say(TASKS)
    count = int(TASKS.split()[0])
    order = shuffled(names(_KEYS), count * scale.task_checks)
    shares = [order[first::count] for first in range(count)]
    async with RedisStore(url, timeout=10) as store:
        limiter = Limiter(_LIMIT, store=store)

        async def pair(key: str) -> None:
            hold = await limiter.ahold(key, 5)
            await hold.asettle(3)

        accounts = Accounts(store)
        turns = {
            CHECK: AsyncTurn(limiter.acheck),
            PAIR: AsyncTurn(pair),
            ACCOUNTS: AsyncTurn(accounts.ahold),
            ACCOUNTS_PAIR: AsyncTurn(accounts.apair),
        }
        results.times[TASKS] = await in_tasks(scale.rounds, turns, shares)
        expect_server(store)


# The report ----------------------------------------------------------------------------------------------------------


def markdown(results: Results) -> str:
    labels = (CHECK, PAIR, SLOTS_PAIR, ACCOUNTS, ACCOUNTS_PAIR)
    rows = [
        [
            place,
            *[time_of(times.get(label)) for label in labels],
            f"{results.ratio(place):.2f} x",
            f"{results.ratio(place, ACCOUNTS):.2f} x" if ACCOUNTS in times else report.NONE,
        ]
        for place, times in results.times.items()
    ]
    head = ["µs", *labels, "hold + settle to a check", "5 levels to a check"]
    crowds = [
        [place, *[time_of(times[count]) for count in (_FEW, results.open)], f"{results.growth(place):.2f} x"]
        for place, times in results.crowds.items()
    ]
    crowd_head = [f"{PAIR}, µs", *[f"{count:,} open holds of the key" for count in (_FEW, results.open)], "ratio"]
    timings = [timing for times in results.times.values() for timing in times.values()]
    noise = max(timing.median / timing.best - 1 for timing in timings)
    note = (
        f"A hold of 5 that is settled with 3, of {_KEYS} keys; nothing is denied. In memory the time is the "
        "processor's; on a server it is wall time. Both in the best round; contenders take turns within a round. An "
        f"open hold needs {results.bytes_per_hold:.0f} bytes in the server, and one on 5 levels "
        f"{results.bytes_on_levels:.0f}: the growth of its memory for each of {results.open:,}. On 5 levels (with "
        "names of 12 characters) there are two meters, three budgets and two buckets, asked of the store itself. "
        f"Noise: the median round was up to {noise:.0%} slower than the best."
    )
    parts = [
        machine_line(results.machine), table(head, rows), table(crowd_head, crowds), note, bar_list(bars(results)),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def bars(results: Results) -> list[Bar]:
    found = []
    for place in results.times:
        if place != TASKS:
            most = MOST_IN_MEMORY if place == MEMORY else MOST_ON_SERVER
            found.append(at_most(f"{place}: {PAIR} at most {most} times a check", results.ratio(place), most))
        if place != MEMORY:
            most = MOST_ON_LEVELS_IN_TASKS if place == TASKS else MOST_ON_LEVELS
            found.append(
                at_most(f"{place}: {ACCOUNTS} at most {most} times a check", results.ratio(place, ACCOUNTS), most)
            )
    for place in results.crowds:
        what = f"{place}: with {_MANY:,} open holds of the key at most {MOST_CHANGE:.0%} more than with {_FEW}"
        found.append(at_most(what, results.growth(place) if results.open == _MANY else None, 1 + MOST_CHANGE))
    found.append(at_most(f"at most {MOST_BYTES} bytes per open hold on a server", results.bytes_per_hold, MOST_BYTES))
    what = f"at most {MOST_BYTES_ON_LEVELS} bytes per open hold on 5 levels on a server"
    found.append(at_most(what, results.bytes_on_levels, MOST_BYTES_ON_LEVELS))
    return found
