"""A flood: hundreds of connections that send as fast as they can, while others work."""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from programs import RAISED_ADDRESSES, Program, program
from websockets.asyncio.client import ClientConnection, connect

pytestmark = pytest.mark.long

FLOODERS, GOOD, SECONDS = 500, 50, 20.0
CAPACITY, PER_SECOND = 120, 2  # of pings, which are light
POLICY = f"""{RAISED_ADDRESSES}
[hub]
max_connections_per_address = 2000
"""


def registered(hub: Program, names: list[str]) -> list[tuple[str, str]]:
    with hub.http() as client:
        return [(name, client.post("/api/admin/agents", json={"agent_id": name}).json()["token"]) for name in names]


class Good:
    """A well-behaved agent: it sends another one a message about every second, and waits for the answer."""

    def __init__(self, name: str, token: str, to: str) -> None:
        self._name, self._token, self._to = name, token, to
        self.sent = self.received = 0
        self.slowest = 0.0

    async def work(self, port: int, until: float, together: asyncio.Barrier) -> None:
        async with connect(f"ws://127.0.0.1:{port}/ws", compression=None, proxy=None) as socket:
            assert await self._ask(socket, "identify", agent_id=self._name, token=self._token) == "identified"
            await together.wait()  # so that everybody is there to be sent to
            while time.monotonic() < until:
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
            heard = json.loads(await asyncio.wait_for(socket.recv(), 30))
            if "id" in heard:
                return str(heard["type"])
            assert heard["type"] == "message"
            self.received += 1


async def health(port: int, until: float, hub: Program) -> tuple[list[float], int]:
    times, most = [], 0
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as client:
        while time.monotonic() < until:
            begin = time.monotonic()
            assert (await client.get("/api/health")).status_code == 200
            times.append(time.monotonic() - begin)
            most = max(most, hub.memory())
            await asyncio.sleep(0.05)
    return times, most


def test_b11_a_flood_costs_the_flooder_and_nobody_else(tmp_path: Path) -> None:
    config = tmp_path / "headgate.toml"
    config.write_text(POLICY)
    with program(tmp_path / "data", "--config", str(config)) as hub:
        bad = registered(hub, [f"flooder-{i}" for i in range(FLOODERS)])
        good = registered(hub, [f"good-{i}" for i in range(GOOD)])
        agents = [Good(name, token, good[(i + 1) % GOOD][0]) for i, (name, token) in enumerate(good)]
        before = hub.memory()
        flood = subprocess.Popen(
            [sys.executable, Path(__file__).parents[1] / "flooders.py", str(hub.port), str(SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert flood.stdin is not None
        flood.stdin.write(json.dumps(bad))
        flood.stdin.close()

        async def work() -> tuple[list[float], int]:
            until, together = time.monotonic() + SECONDS + 2, asyncio.Barrier(GOOD)
            async with asyncio.TaskGroup() as group:
                for agent in agents:
                    group.create_task(agent.work(hub.port, until, together))
                watched = group.create_task(health(hub.port, until, hub))
            return watched.result()

        times, most = asyncio.run(work())
        assert flood.stdout is not None
        told = json.loads(flood.stdout.read())
        flood.stdout.close()
        assert flood.wait() == 0
        with hub.http() as client:
            metrics = client.get("/api/metrics").json()
    # Its span begins between the first ping that it sent and the first pong that it got.
    most_excess = max(one["passed"] - (CAPACITY + PER_SECOND * one["longest"]) for one in told)
    least_excess = min(one["passed"] - (CAPACITY + PER_SECOND * one["shortest"]) for one in told)
    p99 = statistics.quantiles(times, n=100)[98]
    print(
        f"\ndenied {sum(one['denied'] for one in told):,}; passed {sum(one['passed'] for one in told):,}; "
        f"excess {least_excess:.2f} to {most_excess:.2f}; health p99 {p99 * 1000:.0f} ms of {len(times)}; "
        f"memory +{(most - before) / 1e6:.1f} MB; slowest good answer {max(a.slowest for a in agents) * 1000:.0f} ms"
    )
    assert metrics["violations"] > FLOODERS
    assert sum(agent.received for agent in agents) == sum(agent.sent for agent in agents) > GOOD * SECONDS / 2
    assert not any(one["lost"] for one in told)
    assert most_excess <= 1
    assert least_excess >= -1
    assert p99 < 0.5
    assert most - before < 100e6
