"""The measurements of a hub: the cost of its gate, of dashboards and of connections.

Two hubs run in separate processes, as under `headgate serve`, and differ only in the gate. They take turns within each
of many short rounds. The load comes from a third process.
"""

import asyncio
import resource
import socket
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from multiprocessing import get_context
from multiprocessing.connection import Connection
from os import getpid
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import uvloop

from benchmarks import hub_load, report
from benchmarks.hub_load import CONNECTIONS, WINDOW, WORKLOADS, Agent, HubProcess
from benchmarks.hub_report import PACKAGES, PING, RELAY, Results
from benchmarks.measure import freeze, names
from benchmarks.suite import say
from headgate import Decision, Gate, Outcome, Policy
from headgate.gate.lookup import ActiveLimit
from headgate.hub import logs
from headgate.hub.app import Hub
from headgate.hub.server import Server, server_config
from headgate.hub.settings import HubSettings
from headgate.limits.fixed import UNLIMITED
from headgate.limits.numbers import LARGEST

_LIMIT: Final = "1000000/second"  # never reached
_LIMITS: Final = {"limits": dict.fromkeys(("light", "normal", "heavy"), _LIMIT), "addresses": {"limit": _LIMIT}}
_BACKLOG: Final = 2048
_DASHBOARDS: Final = 100
_ADMIN: Final = "the-admins-token-of-the-benchmark"
_PATIENCE: Final = 60  # seconds
_ALLOW: Final = Decision(Outcome.ALLOW, UNLIMITED, LARGEST, 0, 0, -1)


class Scale(NamedTuple):
    """The extent of a run."""

    rounds: int
    seconds: float
    """Load on each hub per round."""
    idle: int
    """Connections for the measurement of memory."""
    before: int
    """Connections before it begins."""


FULL: Final = Scale(rounds=50, seconds=0.1, idle=5_000, before=500)
QUICK: Final = Scale(rounds=5, seconds=0.1, idle=500, before=100)


class Ungated(Gate):
    """Allows everything, without a lookup and without counting."""

    def check(self, *_: Any, **__: Any) -> Decision:
        return _ALLOW

    async def acheck(self, *_: Any, **__: Any) -> Decision:
        return _ALLOW

    def find_limit(self, *_: Any, **__: Any) -> ActiveLimit:
        return self._any_limit

    @cached_property
    def _any_limit(self) -> ActiveLimit:
        return super().find_limit("", "ws", "normal")

    async def acheck_limit(self, *_: Any, **__: Any) -> Decision:
        return _ALLOW

    async def acheck_address(self, *_: Any, **__: Any) -> Decision:
        return _ALLOW


def measure(scale: Scale) -> Results:
    results = Results(report.machine(PACKAGES), CONNECTIONS, WINDOW)
    with ProcessPoolExecutor(1, get_context("spawn")) as load:
        _gate(results, scale, load)
        _dashboards(results, scale, load)
        _idle(results, scale, load)
    return results


def _gate(results: Results, scale: Scale, load: Executor) -> None:
    with hub(Gate, CONNECTIONS) as (gated, checks), hub(Ungated, CONNECTIONS) as (ungated, _):
        for what in WORKLOADS:
            say(what)
            loading = load.submit(hub_load.load, what, gated, ungated, scale.rounds, scale.seconds)
            results.pairs[what] = loading.result()
    asked = sum([one.messages for what, pair in results.pairs.items() if what != RELAY for one in pair.gated])
    if checks.get("allow", 0) < asked or sum(checks.values()) != checks["allow"]:
        raise RuntimeError(f"gate: expected at least {asked} allowed checks and no others, got {checks}")


def _dashboards(results: Results, scale: Scale, load: Executor) -> None:
    say(f"{_DASHBOARDS} dashboards")
    context = get_context("spawn")
    with hub(Gate, CONNECTIONS) as (watched, _), hub(Gate, CONNECTIONS) as (other, _):
        here, there = context.Pipe()
        watching = context.Process(target=hub_load.watch, args=(watched, _ADMIN, _DASHBOARDS, there), daemon=True)
        watching.start()
        there.close()
        try:
            _receive(here)
            results.watched = load.submit(hub_load.load, PING, watched, other, scale.rounds, scale.seconds).result()
            if here.poll():
                raise RuntimeError(f"a dashboard was closed: {_receive(here)}")
        finally:
            watching.kill()
            watching.join()
            here.close()
    results.dashboards = _DASHBOARDS


def _idle(results: Results, scale: Scale, load: Executor) -> None:
    say(f"memory of {scale.idle:,} idle connections")
    with hub(Gate, scale.idle) as (idle, _):
        results.bytes_per_connection = load.submit(hub_load.idle, idle, scale.before).result()
    results.idle = scale.idle


# A hub ---------------------------------------------------------------------------------------------------------------


@contextmanager
def hub(gate: type[Gate], agents: int) -> Iterator[tuple[HubProcess, dict[str, int]]]:
    """A hub with some agents, and its checks by outcome, which are known after its end."""
    checks: dict[str, int] = {}
    context = get_context("spawn")
    with TemporaryDirectory() as folder:
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(gate, Path(folder), agents, there), daemon=True)
        process.start()
        there.close()  # or a failure of the hub would go unnoticed
        try:
            yield _receive(here), checks
            process.terminate()
            checks.update(_receive(here))
        finally:
            process.kill()
            process.join()
            here.close()


def _receive(pipe: "Connection[Any, Any]") -> Any:
    if not pipe.poll(_PATIENCE):
        raise RuntimeError(f"no message from the hub for {_PATIENCE} s")
    try:
        return pipe.recv()
    except EOFError:
        raise RuntimeError("the hub failed; its output is above") from None


def _serve(gate: type[Gate], data: Path, agents: int, pipe: "Connection[Any, Any]") -> None:
    """Run a hub until it is stopped. Sends its address, and in the end its checks by outcome."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    freeze()  # hides the benchmark's imports from the hub's garbage collector
    gated = gate is Gate
    settings = HubSettings(
        data=data,
        admin_token=_ADMIN,
        log_level="warning",
        max_connections_per_address=agents + CONNECTIONS,
        relay_rate_limit="1000000" if gated else "off",
        relay_rate_burst="1000000",
    )
    logs.configure(settings)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        pipe.send(runner.run(_until_stopped(settings, gate, agents, pipe)))


async def _until_stopped(
    settings: HubSettings, gate: type[Gate], agents: int, pipe: "Connection[Any, Any]"
) -> dict[str, int]:
    with socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG) as listener:
        async with Hub(settings, Policy(**_LIMITS), gate=gate) as hub:
            known = names(agents)
            tokens = await asyncio.gather(*[hub.registry.register(name, by_admin=True) for name in known])
            here = [Agent(name, token) for name, token in zip(known, tokens, strict=True)]
            pipe.send(HubProcess(getpid(), listener.getsockname()[1], here))
            await Server(hub, *server_config(hub, settings, None)).serve([listener])
            return hub.stats.outcomes()
