"""A flood: hundreds of connections that send as fast as they can, while others work."""

import asyncio
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect

from tests.support.hub_process import RAISED_ADDRESSES, HubProcess, hub_process
from tests.support.valkey import PATIENCE

pytestmark = pytest.mark.long

FLOODERS, GOOD, SECONDS = 500, 50, 20.0
CAPACITY, PER_SECOND = 10, 0.2  # of pings, which are light: little, so that everybody floods on a slow machine too
POLICY = f"""{RAISED_ADDRESSES}
[limits]
light = "{60 * PER_SECOND:g}/minute burst {CAPACITY}"
[hub]
max_connections_per_address = 2000
"""


def registered(hub: HubProcess, names: list[str]) -> list[tuple[str, str]]:
    with hub.http() as client:
        return [(name, client.post("/api/admin/agents", json={"agent_id": name}).json()["token"]) for name in names]


class GoodAgent:
    """A well-behaved agent: it sends another one a message about every second, and waits for the answer."""

    def __init__(self, name: str, token: str, to: str) -> None:
        self._name, self._token, self._to = name, token, to
        self.sent = self.received = 0
        self.slowest = 0.0

    async def work(self, port: int, over: asyncio.Event, together: asyncio.Barrier) -> None:
        async with connect(
            f"ws://127.0.0.1:{port}/ws", compression=None, proxy=None, open_timeout=PATIENCE, ping_interval=None
        ) as socket:
            assert await self._ask(socket, "identify", agent_id=self._name, token=self._token) == "identified"
            await together.wait()  # so that everybody is there to be sent to
            while not over.is_set():
                begin, self.sent = time.monotonic(), self.sent + 1
                assert await self._ask(socket, "message", to=self._to, body=self.sent) == "message_sent"
                self.slowest = max(self.slowest, time.monotonic() - begin)
                await asyncio.sleep(max(1.1 - (time.monotonic() - begin), 0))
            await together.wait()
            assert await self._ask(socket, "ping") == "pong"  # with everything before it received

    async def _ask(self, socket: ClientConnection, kind: str, **fields: object) -> str:
        """Send a frame; the type of the frame that answers it."""
        await socket.send(json.dumps({"type": kind, "id": 1, **fields}))
        while True:
            heard = json.loads(await asyncio.wait_for(socket.recv(), PATIENCE))
            if "id" in heard:
                return str(heard["type"])
            assert heard["type"] == "message"
            self.received += 1


def processor_seconds(hub: HubProcess) -> float:
    """The seconds for which a hub has had a processor."""
    fields = Path(f"/proc/{hub.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class HealthWatcher:
    """Somebody who asks again and again how the hub is, without a connection of his own."""

    def __init__(self, hub: HubProcess) -> None:
        self._hub = hub
        self.times: list[float] = []
        """How long each answer took."""
        self.work: list[float] = []
        """For how much of that the hub worked, on this answer or on what it did before: the rest is the machine's."""
        self.most = 0
        """Bytes that the hub had at the most."""

    async def watch(self, over: asyncio.Event) -> None:
        async with httpx.AsyncClient(base_url=f"http://{self._hub}", timeout=PATIENCE, trust_env=False) as client:
            while not over.is_set():
                begin, before = time.monotonic(), processor_seconds(self._hub)
                assert (await client.get("/api/health", headers={"Connection": "close"})).status_code == 200
                self.times.append(time.monotonic() - begin)
                self.work.append(processor_seconds(self._hub) - before)
                self.most = max(self.most, self._hub.memory())
                await asyncio.sleep(0.05)


def missing_passes(flooder: dict[str, Any]) -> float:
    """How many messages too few had passed when one was denied: never one, however slow the machine is.

    Before the first denial the whole capacity passes. From then on the bucket fills, at least from the moment at which
    that denial was heard of to the one at which the ping of another was sent, and what it gains passes before that.
    """
    if not flooder["denials"]:  # it asked too slowly
        return 0.0
    (passed, _, heard), *later = flooder["denials"]
    too_few = [PER_SECOND * (sent - heard) - (count - passed) for count, sent, _ in later]
    return float(max(CAPACITY - passed, 0.0, *too_few))


def test_b11_a_flood_costs_the_flooder_and_nobody_else(tmp_path: Path) -> None:
    config = tmp_path / "headgate.toml"
    config.write_text(POLICY)
    with hub_process(tmp_path / "data", "--config", str(config)) as hub:
        bad = registered(hub, [f"flooder-{i}" for i in range(FLOODERS)])
        good = registered(hub, [f"good-{i}" for i in range(GOOD)])
        agents = [GoodAgent(name, token, good[(i + 1) % GOOD][0]) for i, (name, token) in enumerate(good)]
        before, health = hub.memory(), HealthWatcher(hub)

        async def work() -> list[dict[str, Any]]:
            over, together = asyncio.Event(), asyncio.Barrier(GOOD)
            command = [
                sys.executable,
                str(Path(__file__).parents[1] / "support" / "flooders.py"),
                str(hub.port),
                str(SECONDS),
            ]
            pipe = asyncio.subprocess.PIPE
            async with asyncio.TaskGroup() as group:
                for agent in agents:
                    group.create_task(agent.work(hub.port, over, together))
                group.create_task(health.watch(over))
                flood = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
                try:
                    out, _ = await flood.communicate(json.dumps(bad).encode())
                finally:
                    over.set()
                    if flood.returncode is None:
                        flood.kill()
                        await flood.wait()
            assert flood.returncode == 0
            told: list[dict[str, Any]] = json.loads(out)
            return told

        told = asyncio.run(work())
        with hub.http() as client:
            metrics = client.get("/api/metrics").json()
    # Its span begins when it sends the first ping.
    most_excess = max(one["passed"] - (CAPACITY + PER_SECOND * one["longest"]) for one in told)
    most_held_back = max(missing_passes(one) for one in told)
    times, work_on_it = (statistics.quantiles(of, n=100, method="inclusive") for of in (health.times, health.work))
    print(
        f"\ndenied {sum(one['denied'] for one in told):,}; passed {sum(one['passed'] for one in told):,}; "
        f"excess {most_excess:.2f} at the most; held back {most_held_back:.2f}; "
        f"health median {times[49] * 1000:.0f} ms, p99 {times[98] * 1000:.0f} ms of {len(health.times)}, "
        f"of which the hub worked {work_on_it[49] * 1000:.0f} and {work_on_it[98] * 1000:.0f} ms; "
        f"memory +{(health.most - before) / 1e6:.1f} MB; "
        f"slowest good answer {max(a.slowest for a in agents) * 1000:.0f} ms"
    )
    assert metrics["violations"] >= sum(one["denied"] for one in told) > FLOODERS / 2
    assert sum(agent.received for agent in agents) == sum(agent.sent for agent in agents)
    assert min(agent.sent for agent in agents) >= 3
    assert not any(one["lost"] for one in told)
    assert most_excess <= 1
    assert most_held_back < 1
    assert work_on_it[98] < 0.5
    assert health.most - before < 100e6
