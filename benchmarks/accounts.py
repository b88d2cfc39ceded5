"""What a hold on five levels of accounts costs, beside a check and beside LiteLLM, all in one run.

The contenders take turns within each of many short rounds, and the best round counts. In memory the time is the
processor's; on a server it is wall time, since the server works too. Holds are settled between the rounds, unless their
settling is timed, too.
"""

import asyncio
import json
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple, TypeAlias

import redis

from benchmarks import litellm_contest, report
from benchmarks.account_tree import (
    AGENTS,
    BOTH,
    BOTH_USED,
    BUCKETS,
    DOLLARS,
    LEVELS,
    MIXED,
    SESSION_OF,
    TOKENS,
    TOKENS_USED,
    agent_name,
    expect_server,
    session_name,
    tree_gate,
)
from benchmarks.contenders import Contender, contender
from benchmarks.holds import AT_ONCE, MEMORY, ON_SERVER, PACKAGES, TASKS, hold_many
from benchmarks.litellm_contest import DENIED, HEADGATE, NEIGHBOURS, Contest, Crowd
from benchmarks.measure import AsyncTurn, Timing, best_of, in_tasks, shuffled, verified_turns
from benchmarks.redis_suite import empty, meet_at, meetings, on_each_core, server, used_memory
from benchmarks.report import NONE, Bar, at_least, at_most, bar_list, machine_line, number, table, time_of
from benchmarks.suite import say
from headgate import Gate, Limiter, RedisStore
from headgate.gate.account_holds import AccountHold
from headgate.stores.base import Store

CHECK: Final = "a check"
FIVE: Final = "a check of the same limits"
HOLD: Final = "hold"
PAIR: Final = "hold + settle"

MOST_ALONE: Final = 2
"""Times a check that a hold on five levels may take on a server."""
MOST_IN_TASKS: Final = 3.5
MOST_IN_MEMORY: Final = 2
"""Times a check of as many limits."""
MOST_BYTES: Final = 400
"""That an open hold may need on a server."""
LEAST_BESIDE_LITELLM: Final = 8
"""Times as many requests."""

AT_A_TIME: Final = 100
"""Requests of one hold, where it stands for many."""

_COUNT: Final = 50  # tasks
_LIMIT: Final = "1000000000/day"  # nothing is denied
_LEASE: Final = 3600  # seconds: the longest by default
_PATIENCE: Final = 120  # seconds until all processes have started
_ALL: Final = {"requests": AT_A_TIME, "tokens": AT_A_TIME * TOKENS["tokens"]}
_ALL_USED: Final = {"requests": AT_A_TIME, "tokens": AT_A_TIME * TOKENS_USED["tokens"]}

Costs: TypeAlias = dict[str, Any]


class Kind(NamedTuple):
    """Limits of the five levels, and the costs of a hold."""

    tokens: tuple[str, ...]
    usd: tuple[str, ...]
    costs: Costs
    used: Costs


KINDS: Final = {
    "buckets": Kind(BUCKETS, (), TOKENS, TOKENS_USED),
    "budgets and buckets": Kind(MIXED, (), TOKENS, TOKENS_USED),
    "tokens and dollars, ten limits": Kind(MIXED, DOLLARS, BOTH, BOTH_USED),
}
JUDGED: Final = ("buckets", "budgets and buckets")
"""The kinds with one limit on each level."""

Which: TypeAlias = tuple[str, str]
"""A kind, and what is timed."""


class Scale(NamedTuple):
    """The extent of a run."""

    rounds: int
    memory_calls: int
    """Per round."""
    calls: int
    """Per round, on a server."""
    task_calls: int
    """Per task and round."""
    open: int
    """Open holds, for the measurement of memory."""
    processes: tuple[int, ...]
    seconds: float
    """That several processes hold and settle for."""
    litellm: litellm_contest.Scale


FULL: Final = Scale(
    rounds=15,
    memory_calls=2_000,
    calls=200,
    task_calls=30,
    open=100_000,
    processes=(1, 2, 4),
    seconds=4,
    litellm=litellm_contest.Scale(rounds=12, requests=20, repetitions=10),
)
QUICK: Final = Scale(
    rounds=8,
    memory_calls=200,
    calls=50,
    task_calls=5,
    open=5_000,
    processes=(1, 2, 4),
    seconds=0.5,
    litellm=litellm_contest.Scale(rounds=5, requests=4, repetitions=3),
)


class Carried(NamedTuple):
    """What one top account has carried."""

    per_second: float
    """Holds that were made and settled."""
    busy: float
    """The share of the time for which the server had a processor."""


@dataclass
class Results:
    """Everything that a run measures."""

    machine: dict[str, str]
    checks: dict[str, Timing] = field(default_factory=dict)
    """For each place, a check of one limit."""
    times: dict[str, dict[str, dict[str, Timing]]] = field(default_factory=dict)
    """For each place and kind, by what is timed."""
    open: int = 0
    bytes_per_hold: float = 0
    bytes_with_session: float = 0
    """Per hold, if each is the only one of its session."""
    carried: dict[int, Carried] = field(default_factory=dict)
    """By number of processes."""
    carried_ahead: dict[int, Carried] = field(default_factory=dict)
    """The same, if each hold stands for many requests."""
    contest: Contest | None = None

    def to_check(self, place: str, kind: str, label: str = HOLD) -> float:
        return self.times[place][kind][label].best / self.checks[place].best

    def to_five(self, place: str, kind: str) -> float | None:
        times = self.times[place][kind]
        return times[HOLD].best / times[FIVE].best if FIVE in times else None


def measure(scale: Scale, litellm: Path | None) -> Results:
    """`litellm` is the Python of an environment with LiteLLM."""
    with server() as url, redis.Redis.from_url(url, protocol=2) as client:
        info = client.info()
        results = Results(report.machine(PACKAGES) | {"Valkey": info["valkey_version"]}, open=scale.open)
        with RedisStore(url, timeout=10) as store:
            _memory(results, scale, store, client)  # first, before connections come and go
            _in_memory(results, scale)
            _on_server(results, scale, store, int(info["process_id"]))
        asyncio.run(_tasks(results, scale, url))
        for count in scale.processes:
            results.carried[count] = _carried(count, url, client, scale.seconds, TOKENS, TOKENS_USED)
            results.carried_ahead[count] = _carried(count, url, client, scale.seconds, _ALL, _ALL_USED)
        if litellm is not None:
            empty(client)
            results.contest = _contest(litellm, url, scale.litellm)
            results.machine["LiteLLM"] = results.contest.version
        return results


# One thread ----------------------------------------------------------------------------------------------------------


def _contenders(store: Store | None, gates: ExitStack) -> dict[Which, Contender]:
    """The contenders; the gates are closed by the stack."""
    options: dict[str, Any] = {} if store is None else {"store": store}
    found = {("", CHECK): _checks(Limiter(_LIMIT, **options))}
    for kind, (tokens, usd, costs, used) in KINDS.items():
        gate = gates.enter_context(tree_gate(store, tokens, usd))
        if not usd:
            found[kind, FIVE] = _checks(Limiter("; ".join(tokens), name=f"five {kind}", **options))
        found[kind, HOLD] = _holds(gate, costs, used)
        found[kind, PAIR] = _pairs(gate, costs, used)
    return found


def _checks(limiter: Limiter) -> Contender:
    check = limiter.check
    return contender(check, lambda key: bool(check(key)))


def _holds(gate: Gate, costs: Costs, used: Costs) -> Contender:
    """Holds, which are settled between the rounds."""
    hold = gate.hold
    made: list[AccountHold] = []
    append = made.append

    def run(agents: Iterable[str]) -> None:
        for agent in agents:
            append(hold(agent, costs, session=SESSION_OF[agent]))

    def settle() -> None:
        if not all(made):
            raise RuntimeError("expected that all timed holds are granted")
        for one in made:
            one.settle(used)
        made.clear()

    return Contender(run, _passes(gate, costs), settle)


def _pairs(gate: Gate, costs: Costs, used: Costs) -> Contender:
    hold = gate.hold

    def run(agents: Iterable[str]) -> None:
        for agent in agents:
            hold(agent, costs, session=SESSION_OF[agent]).settle(used)

    return Contender(run, _passes(gate, costs))


def _passes(gate: Gate, costs: Costs) -> Callable[[str], bool]:
    """Whether a hold is granted, on all limits that it should have."""

    def passes(agent: str) -> bool:
        session = SESSION_OF[agent]
        hold = gate.hold(agent, costs, session=session)
        hold.cancel()
        return bool(hold) and len(gate.explain(agent, session=session)) == len(LEVELS) * len(costs)

    return passes


def _agents(calls: int) -> list[str]:
    return shuffled([agent_name(number) for number in range(AGENTS)], calls)


def _note(results: Results, place: str, timings: dict[Which, Timing]) -> None:
    for (kind, label), timing in timings.items():
        if label == CHECK:
            results.checks[place] = timing
        else:
            results.times.setdefault(place, {}).setdefault(kind, {})[label] = timing


def _in_memory(results: Results, scale: Scale) -> None:
    say(MEMORY)
    with ExitStack() as gates:
        turns = verified_turns(_contenders(None, gates), _agents(scale.memory_calls))
        _note(results, MEMORY, best_of(scale.rounds, turns))


def _on_server(results: Results, scale: Scale, store: RedisStore, process: int) -> None:
    with ExitStack() as gates:
        turns = verified_turns(_contenders(store, gates), _agents(scale.calls))

        def measure_at(place: str) -> None:
            _note(results, ON_SERVER + place, best_of(scale.rounds, turns, time.perf_counter_ns))

        on_each_core(process, measure_at)
    expect_server(store)


# Tasks ---------------------------------------------------------------------------------------------------------------


def _async_turns(store: RedisStore, gates: ExitStack) -> dict[Which, AsyncTurn]:
    found = {("", CHECK): AsyncTurn(Limiter(_LIMIT, store=store).acheck)}
    for kind, (tokens, usd, costs, used) in KINDS.items():
        gate = gates.enter_context(tree_gate(store, tokens, usd))
        if not usd:
            found[kind, FIVE] = AsyncTurn(Limiter("; ".join(tokens), store=store, name=f"five {kind}").acheck)
        made: list[AccountHold] = []
        found[kind, HOLD] = AsyncTurn(partial(_hold, gate, costs, made), partial(_settle_all, made, used))
        found[kind, PAIR] = AsyncTurn(partial(_pair, gate, costs, used))
    return found


async def _hold(gate: Gate, costs: Costs, made: list[AccountHold], agent: str) -> None:
    made.append(await gate.ahold(agent, costs, session=SESSION_OF[agent]))


async def _settle_all(made: list[AccountHold], used: Costs) -> None:
    if not all(made):
        raise RuntimeError("expected that all timed holds are granted")
    await asyncio.gather(*[hold.asettle(used) for hold in made])
    made.clear()


async def _pair(gate: Gate, costs: Costs, used: Costs, agent: str) -> None:
    hold = await gate.ahold(agent, costs, session=SESSION_OF[agent])
    await hold.asettle(used)


async def _tasks(results: Results, scale: Scale, url: str) -> None:
    say(TASKS)
    order = _agents(_COUNT * scale.task_calls)
    shares = [order[first::_COUNT] for first in range(_COUNT)]
    async with RedisStore(url, timeout=10) as store:
        with ExitStack() as gates:
            _note(results, TASKS, await in_tasks(scale.rounds, _async_turns(store, gates), shares))
        expect_server(store)


# Memory of the server ------------------------------------------------------------------------------------------------


def _memory(results: Results, scale: Scale, store: RedisStore, client: redis.Redis) -> None:
    say(f"memory of {scale.open:,} open holds")
    with tree_gate(store, MIXED) as gate:
        results.bytes_per_hold = _bytes_each(gate, client, scale.open, own_session=False)
        results.bytes_with_session = _bytes_each(gate, client, scale.open, own_session=True)
    empty(client)
    expect_server(store)


def _bytes_each(gate: Gate, client: redis.Redis, count: int, *, own_session: bool) -> float:
    empty(client)
    hold_many(partial(_open_hold, gate, own_session=False), AT_ONCE)  # scripts, connections, accounts are not counted
    before = used_memory(client)
    hold_many(partial(_open_hold, gate, own_session=own_session), count)
    return (used_memory(client) - before) / count


async def _open_hold(gate: Gate, place: int, *, own_session: bool) -> AccountHold:
    agent = agent_name(place % AGENTS)
    session = session_name(AGENTS + place) if own_session else SESSION_OF[agent]
    return await gate.ahold(agent, TOKENS, session=session, lease=_LEASE)


# One top account, several processes ----------------------------------------------------------------------------------


def _carried(count: int, url: str, client: redis.Redis, seconds: float, costs: Costs, used: Costs) -> Carried:
    what = f"{AT_A_TIME} requests" if "requests" in costs else "one request"
    say(f"one top account: processes: {count}, {what} a hold")
    empty(client)
    context = get_context("spawn")
    meeting = context.Barrier(count + 1)
    with ProcessPoolExecutor(count, context, meet_at, (meeting,)) as pool:
        work = [pool.submit(_spend, url, seconds, costs, used) for _ in range(count)]
        meeting.wait(_PATIENCE)
        before, start = _processor(client), time.perf_counter()
        shares = [one.result() for one in work]
        busy = (_processor(client) - before) / (time.perf_counter() - start)
    taken = max([share.end for share in shares]) - min([share.start for share in shares])
    return Carried(sum([share.holds for share in shares]) / taken, busy)


def _processor(client: redis.Redis) -> float:
    """Seconds of processor time that the server has used."""
    info = client.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


class Share(NamedTuple):
    """The work of one process."""

    start: float
    end: float
    holds: int


def _spend(url: str, seconds: float, costs: Costs, used: Costs) -> Share:
    """Hold and settle for some seconds, in many tasks."""
    return asyncio.run(_spend_in_tasks(url, seconds, costs, used))


async def _spend_in_tasks(url: str, seconds: float, costs: Costs, used: Costs) -> Share:
    async with RedisStore(url, timeout=10) as store, tree_gate(store, MIXED) as gate:
        await _pair(gate, costs, used, agent_name(0))
        await asyncio.to_thread(meetings[0].wait, _PATIENCE)
        start = time.perf_counter()
        deadline = start + seconds

        async def work(task: int) -> int:
            made = 0
            while time.perf_counter() < deadline:
                agent = agent_name((task + made) % AGENTS)
                hold = await gate.ahold(agent, costs, session=SESSION_OF[agent])
                if not hold:
                    raise RuntimeError(f"expected that all are granted, got {hold.bound}")
                await hold.asettle(used)
                made += 1
            return made

        holds = sum(await asyncio.gather(*[work(task) for task in range(_COUNT)]))
        end = time.perf_counter()
        expect_server(store)
        return Share(start, end, holds)


# LiteLLM -------------------------------------------------------------------------------------------------------------


def _contest(python: Path, url: str, scale: litellm_contest.Scale) -> Contest:
    say("beside LiteLLM")
    command = [str(python), litellm_contest.__file__, url, json.dumps(scale)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    crowds = {label: Crowd(**crowd) for label, crowd in found["crowds"].items()}
    return Contest(found["version"], crowds, found["times"])


# The report ----------------------------------------------------------------------------------------------------------


def markdown(results: Results) -> str:
    parts = [
        machine_line(results.machine),
        _times(results),
        _note_on_times(results),
        _capacity(results),
        *([] if results.contest is None else _beside_litellm(results.contest)),
        bar_list(bars(results)),
    ]
    return "\n\n".join(parts) + "\n"


def _times(results: Results) -> str:
    head = ["µs", CHECK, FIVE, HOLD, PAIR, "hold to a check", "hold to a check of the same limits"]
    rows = []
    for place, kinds in results.times.items():
        for kind, times in kinds.items():
            figures = [time_of(results.checks[place])]
            figures += [time_of(times.get(label)) for label in (FIVE, HOLD, PAIR)]
            figures += [_ratio(results.to_check(place, kind)), _ratio(results.to_five(place, kind))]
            rows.append([f"{place}: {kind}", *figures])
    return table(head, rows)


def _note_on_times(results: Results) -> str:
    timings = [*results.checks.values()]
    timings += [one for kinds in results.times.values() for times in kinds.values() for one in times.values()]
    noise = max([timing.median / timing.best - 1 for timing in timings])
    return (
        f"Five levels ({', '.join(LEVELS)}), {AGENTS} agents of one top account, names of 12 characters; nothing is "
        "denied. Buckets, or budgets and buckets: one limit of tokens on each level. Tokens and dollars: one of each. "
        "A hold also counts what is used, by agent and day. A check is one of a limiter with one limit. In memory the "
        "time is the processor's; on a server it is wall time. Both in the best round; contenders take turns within a "
        f"round. An open hold needs {results.bytes_per_hold:.0f} bytes in the server: the growth of its memory for "
        f"each of {results.open:,}, with budgets and buckets; {results.bytes_with_session:.0f} bytes if each is the "
        f"first one of its session. Noise: the median round was up to {noise:.0%} slower than the best."
    )


def _capacity(results: Results) -> str:
    head = ["one top account", "holds made and settled a second", "the server's processor"]
    head += [f"requests a second, {AT_A_TIME} a hold", "the server's processor"]
    rows = []
    for count, carried in results.carried.items():
        ahead = results.carried_ahead[count]
        figures = [number(carried.per_second), f"{carried.busy:.0%}"]
        figures += [number(ahead.per_second * AT_A_TIME), f"{ahead.busy:.0%}"]
        rows.append([f"{count} {'process' if count == 1 else 'processes'} of {_COUNT} tasks", *figures])
    note = (
        "Budgets and buckets on five levels. The processes and the server share the machine's cores. The server's "
        "processor: the share of the time for which it had one; at 100% it is the bound."
    )
    return f"{table(head, rows)}\n\n{note}"


def _beside_litellm(contest: Contest) -> list[str]:
    own = min(contest.times[HEADGATE])
    head = ["beside LiteLLM", f"of {NEIGHBOURS} requests of a neighbour passed", "alone"]
    head += [f"µs a request, {litellm_contest.TASKS} tasks", "to headgate"]
    rows = []
    for label, crowd in contest.crowds.items():
        best = min(contest.times[label])
        rows.append([label, _listed(crowd.beside), _listed(crowd.alone), f"{best / 1000:.1f}", f"{best / own:.1f} x"])
    noise = max([median(taken) / min(taken) - 1 for taken in contest.times.values()])
    note = (
        f"A neighbour: while {DENIED} requests of a full team are denied, {NEIGHBOURS} of another team are made at the "
        "same time. Both teams belong to one organisation, and to one user (LiteLLM) or division (headgate). There is "
        "room for the neighbour's requests on all levels, as the column alone shows; the least and the most of "
        f"{len(contest.crowds[HEADGATE].beside)} repetitions. LiteLLM runs one script per level, and refunds the "
        "others if one denies. "
        "What each does in the time of a request: headgate reserves tokens on five levels in one step, counts usage, "
        "and keeps a record of the hold, by which it can be settled or expires. LiteLLM, in process and without the "
        "rest of its proxy, validates the request, estimates its tokens, and reserves them on key, user, team and "
        "organisation, in windows of a minute. In one pipeline: as the middleware of its proxy has it. Each request "
        f"has a task of its own. Noise: the median round was up to {noise:.0%} slower than the best."
    )
    return [table(head, rows), note]


def _listed(passed: Sequence[int]) -> str:
    return f"{min(passed)}" if min(passed) == max(passed) else f"{min(passed)} to {max(passed)}"


def _ratio(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f} x"


def bars(results: Results) -> list[Bar]:
    found = []
    for place in results.times:
        for kind in JUDGED:
            if place == MEMORY:
                what = f"{place}, {kind}: a hold at most {MOST_IN_MEMORY} times a check of as many limits"
                found.append(at_most(what, results.to_five(place, kind), MOST_IN_MEMORY))
            else:
                most = MOST_IN_TASKS if place == TASKS else MOST_ALONE
                what = f"{place}, {kind}: a hold on five levels at most {most} times a check"
                found.append(at_most(what, results.to_check(place, kind), most))
    found.append(at_most(f"at most {MOST_BYTES} bytes per open hold on a server", results.bytes_per_hold, MOST_BYTES))
    contest = results.contest
    what = f"while a full team is denied {DENIED} times, all {NEIGHBOURS} requests of its neighbour pass"
    if contest is None:
        found.append(Bar(what, "", None))
    else:
        crowd = contest.crowds[HEADGATE]
        figure = f"{_listed(crowd.beside)}, and {crowd.full} of the full team"
        found.append(Bar(what, figure, min(crowd.beside) == NEIGHBOURS and crowd.full == 0))
    ratio = None
    if contest is not None:
        ratio = min([min(taken) for label, taken in contest.times.items() if label != HEADGATE])
        ratio /= min(contest.times[HEADGATE])
    what = f"{TASKS}: five levels at least {LEAST_BESIDE_LITELLM} times as fast as four of LiteLLM, the faster way"
    found.append(at_least(what, ratio, LEAST_BESIDE_LITELLM))
    return found
