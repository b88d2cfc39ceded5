"""headgate beside LiteLLM on one server: what denied requests do to their neighbours, and the time of a request.

This runs in an environment of its own, which has LiteLLM and headgate; it prints what it has measured as JSON. LiteLLM
runs in process: `parallel_request_limiter_v3`, the hook of its proxy that reserves tokens on a key, a user, a team and
an organisation. It is measured twice: with all scripts of a request in one pipeline, as the middleware of its proxy has
it, and without. Each request has a task of its own, as in a proxy.
"""

import argparse
import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import redis

if __name__ == "__main__":  # Python puts this folder on the path; the modules are named from the folder above it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.account_tree import (
    AGENTS,
    LEVELS,
    MIXED,
    ORG,
    SESSION_OF,
    TOKENS,
    TOKENS_USED,
    account_of,
    agent_name,
    expect_server,
    tree_gate,
)
from headgate import Gate, Policy, RedisStore
from headgate.gate.account_holds import AccountHold

HEADGATE: Final = "headgate, 5 levels"
LITELLM: Final = "LiteLLM, 4 levels"
LITELLM_PIPELINE: Final = "LiteLLM, 4 levels, in one pipeline"

TASKS: Final = 50
DENIED: Final = 50
NEIGHBOURS: Final = 10

_COST: Final = 10  # tokens of a request, where a team is full
_FULL: Final = 10  # tokens of the full team
_ROOM: Final = 100  # of its neighbour
_SHARED: Final = 200  # of what both belong to
_AMPLE: Final = 1_000_000_000

Ask = Callable[[], Awaitable[bool]]
"""Make one request, and return whether it passes."""


class Scale(NamedTuple):
    """The extent of a run."""

    rounds: int
    requests: int
    """Per task and round."""
    repetitions: int
    """Of the full team."""


@dataclass
class Crowd:
    """What passed of the neighbours' requests, in each repetition."""

    alone: list[int] = field(default_factory=list)
    beside: list[int] = field(default_factory=list)
    """While the requests of a full team were denied."""
    full: int = 0
    """Requests of the full team that passed. There should be none."""


@dataclass
class Contest:
    """Everything that a run measures."""

    version: str
    crowds: dict[str, Crowd] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)
    """Nanoseconds per request, of each round."""


class Teams(NamedTuple):
    """A full team, its neighbour, and a neighbour that nobody disturbs. They share what is above them."""

    full: Ask
    near: Ask
    alone: Ask


class Contender(NamedTuple):
    """A way to limit requests."""

    teams: Callable[[int], Teams]
    """New ones for each repetition."""
    ask: Callable[[int], Ask]
    """Where nothing is denied: a request by the agent with this number."""
    finish: Callable[[], Awaitable[object]]
    """End the requests that were made; this isn't timed."""
    scripts: tuple[int, int]
    """The least number of script calls by a request that passes, and by a denied one: the server must decide."""


# Contenders ----------------------------------------------------------------------------------------------------------


def headgate_contender(store: RedisStore, gates: ExitStack) -> Contender:
    """The gates are closed by the stack."""
    gate = gates.enter_context(tree_gate(store, MIXED))
    made: list[AccountHold] = []

    def ask(number: int) -> Ask:
        agent = agent_name(number)
        session = SESSION_OF[agent]

        async def request() -> bool:
            hold = await gate.ahold(agent, TOKENS, session=session)
            made.append(hold)
            return bool(hold)

        return request

    async def finish() -> None:
        await asyncio.gather(*[hold.asettle(TOKENS_USED) for hold in made])
        made.clear()

    def teams(repetition: int) -> Teams:
        return _headgate_teams(store, gates, repetition)

    return Contender(teams, ask, finish, scripts=(0, 0))  # one call has many requests; `expect_server` verifies it


def _headgate_teams(store: RedisStore, gates: ExitStack, repetition: int) -> Teams:
    orgs = {org: f"{org}-{repetition:06d}" for org in ("crowd", "quiet")}
    crowd, quiet = [f"{org}/division-001" for org in orgs.values()]
    shared, room = f"{_SHARED}/calendar day", f"{_ROOM}/calendar day"
    accounts = {
        "levels": LEVELS,
        "default": {level: {"tokens": shared} for level in LEVELS},
        "at": {
            f"{crowd}/team-full-001": {"tokens": f"{_FULL}/calendar day"},
            f"{crowd}/team-near-001": {"tokens": room},
            f"{quiet}/team-near-001": {"tokens": room},
        },
    }
    agents = {
        f"full-{repetition:06d}": {"account": f"{crowd}/team-full-001"},
        f"near-{repetition:06d}": {"account": f"{crowd}/team-near-001"},
        f"alone-{repetition:06d}": {"account": f"{quiet}/team-near-001"},
    }
    gate = gates.enter_context(Gate(Policy(accounts=accounts, agents=agents), store=store))

    def of(agent: str) -> Ask:
        async def request() -> bool:
            return bool(await gate.ahold(agent, {"tokens": _COST}, session="run-00000001"))

        return request

    return Teams(*map(of, agents))


def litellm_contenders(host: str, port: int) -> dict[str, Contender]:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for a list of models
    os.environ.setdefault("REDIS_SOCKET_TIMEOUT", "10")  # after its 0.1 seconds it would decide in memory
    from litellm.caching.redis_batch import request_redis_batch_scope

    return {
        LITELLM: _litellm(host, port, nullcontext),
        LITELLM_PIPELINE: _litellm(host, port, request_redis_batch_scope),
    }


def _litellm(host: str, port: int, scope: Callable[[], AbstractContextManager[object]]) -> Contender:
    from fastapi import HTTPException
    from litellm.caching.caching import DualCache, RedisCache
    from litellm.proxy._types import UserAPIKeyAuth
    from litellm.proxy.hooks.parallel_request_limiter_v3 import _PROXY_MaxParallelRequestsHandler_v3
    from litellm.proxy.utils import InternalUsageCache

    cache = DualCache(redis_cache=RedisCache(host=host, port=port))
    hook = _PROXY_MaxParallelRequestsHandler_v3(InternalUsageCache(dual_cache=cache)).async_pre_call_hook
    ids, mark = count(), f"{scope.__name__[:4]}-{id(cache):x}"

    def by(who: Any, tokens: int) -> Ask:
        async def request() -> bool:
            data = {
                "model": "a-model",
                "messages": [{"role": "user", "content": "hi"}],  # one token, by its estimate
                "max_tokens": tokens - 1,
                "litellm_call_id": f"{mark}-{next(ids)}",
                "metadata": {},
            }
            with scope():
                try:
                    await hook(user_api_key_dict=who, cache=cache, data=data, call_type="completion")
                except HTTPException as error:
                    if error.status_code != 429:
                        raise
                    return False
            return True

        return request

    def identity(key: str, user: str, team: str, org: str, of_team: int, others: int) -> Any:
        return UserAPIKeyAuth(
            api_key=f"{key}-{mark}", tpm_limit=others,
            user_id=f"{user}-{mark}", user_tpm_limit=others,
            team_id=f"{team}-{mark}", team_tpm_limit=of_team,
            org_id=f"{org}-{mark}", organization_tpm_limit=others,
        )  # fmt: skip

    def ask(number: int) -> Ask:
        _, division, team = account_of(number).split("/")
        return by(identity(agent_name(number), division, team, ORG, _AMPLE, _AMPLE), TOKENS["tokens"])

    def teams(repetition: int) -> Teams:
        """Two teams of one organisation, in which one user has two keys; and the same without the full one."""
        crowd, quiet = f"crowd-{repetition}", f"quiet-{repetition}"
        return Teams(
            by(identity(f"full-{repetition}", crowd, f"full-{repetition}", crowd, _FULL, _SHARED), _COST),
            by(identity(f"near-{repetition}", crowd, f"near-{repetition}", crowd, _ROOM, _SHARED), _COST),
            by(identity(f"alone-{repetition}", quiet, f"alone-{repetition}", quiet, _ROOM, _SHARED), _COST),
        )

    async def finish() -> None:
        """Its counters keep nothing of a request."""

    return Contender(teams, ask, finish, scripts=(4, 1))  # one for each level; a denial may be the first


# Measurements --------------------------------------------------------------------------------------------------------


class ScriptCounter:
    """Verifies that the server has decided: LiteLLM decides in memory when it is slow."""

    def __init__(self, client: redis.Redis) -> None:
        self._client: Final = client
        self._before = self._calls()

    def _calls(self) -> int:
        stats = self._client.info("commandstats")
        return sum([stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha")])

    def start(self) -> None:
        self._before = self._calls()

    def expect(self, least: int) -> None:
        made = self._calls() - self._before
        if made < least:
            raise RuntimeError(f"expected at least {least} calls of scripts, got {made}: the server was left out")


async def crowd(contender: Contender, repetitions: int, counter: ScriptCounter) -> Crowd:
    """Ask for a full team and its neighbour at once. The neighbour would have room for all its requests."""
    found = Crowd()
    counter.start()
    for repetition in range(repetitions):
        teams = contender.teams(repetition)
        if not await asyncio.create_task(_result(teams.full)):
            raise RuntimeError("expected that the first request of the team passes, and fills it")
        found.alone.append(sum(await _at_once([teams.alone] * NEIGHBOURS)))
        asks = [teams.full] * (DENIED // NEIGHBOURS) + [teams.near]  # one of the neighbour after some of the full team
        passed = await _at_once(asks * NEIGHBOURS)
        beside = passed[len(asks) - 1 :: len(asks)]
        found.beside.append(sum(beside))
        found.full += sum(passed) - sum(beside)
    by_passed, by_denied = contender.scripts
    passed_in_all = repetitions + sum(found.alone) + sum(found.beside)
    asked = repetitions * (1 + NEIGHBOURS + DENIED + NEIGHBOURS)
    counter.expect(by_passed * passed_in_all + by_denied * (asked - passed_in_all))
    return found


async def _at_once(asks: Sequence[Ask]) -> list[bool]:
    return await asyncio.gather(*[asyncio.create_task(_result(ask)) for ask in asks])


async def _result(ask: Ask) -> bool:
    return await ask()


async def race(contenders: Mapping[str, Contender], scale: Scale, counter: ScriptCounter) -> dict[str, list[float]]:
    """The time per request with many tasks. Contenders take turns within a round."""
    asks = {label: [contender.ask(number) for number in range(AGENTS)] for label, contender in contenders.items()}
    times: dict[str, list[float]] = {label: [] for label in contenders}
    for number in range(scale.rounds + 1):
        for label, by_agent in asks.items():
            counter.start()
            gc.collect()
            gc.freeze()
            start = time.perf_counter_ns()
            passed = await asyncio.gather(
                *[_one_by_one([by_agent[(task + turn * 7) % AGENTS] for turn in range(scale.requests)])
                  for task in range(TASKS)]
            )  # fmt: skip
            taken = time.perf_counter_ns() - start
            if not all(passed):
                raise RuntimeError(f"{label}: expected that all timed requests pass")
            counter.expect(contenders[label].scripts[0] * TASKS * scale.requests)
            await contenders[label].finish()
            if number > 0:  # the first round opens the connections
                times[label].append(taken / TASKS / scale.requests)
    gc.unfreeze()
    return times


async def _one_by_one(asks: Sequence[Ask]) -> bool:
    """Make requests one after the other, each in a task of its own."""
    return all([await asyncio.create_task(_result(ask)) for ask in asks])


async def measure(url: str, scale: Scale) -> Contest:
    from importlib.metadata import version

    address = urlsplit(url)
    async with RedisStore(url, timeout=10) as store:
        counter = ScriptCounter(redis.Redis.from_url(url))
        contenders = litellm_contenders(str(address.hostname), int(address.port or 6379))
        contest = Contest(version("litellm"))
        with ExitStack() as gates:
            for label, contender in {HEADGATE: headgate_contender(store, gates), **contenders}.items():
                contest.crowds[label] = await crowd(contender, scale.repetitions, counter)
        with ExitStack() as gates:  # without those of the teams
            both = {HEADGATE: headgate_contender(store, gates), **contenders}
            contest.times = await race(both, scale, counter)
        expect_server(store)
        return contest


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure headgate beside LiteLLM.")
    parser.add_argument("url", help="of the server")
    parser.add_argument("scale", type=json.loads, help="the extent, as JSON")
    options = parser.parse_args()
    print(json.dumps(asdict(asyncio.run(measure(options.url, Scale(*options.scale))))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
