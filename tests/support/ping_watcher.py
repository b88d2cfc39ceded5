"""An agent that pings a hub while others attack it, and measures how long its pings take."""

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from tests.support.event_loop import wait_until
from tests.support.hub_process import ELSEWHERE, HubProcess

NAME = "watcher"
INTERVAL = 0.02
"""Seconds between two pings."""
PROBES = ("/live", "/ready", "/health")
PROBED_WITHIN = 10.0
"""Seconds after which an orchestrator takes the hub for dead."""


def quantiles(times: list[float]) -> tuple[float, float]:
    """The median and the 99th percentile."""
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    return cuts[49], cuts[98]


@dataclass
class Pings:
    """How long each ping of a span took, in seconds."""

    times: list[float] = field(default_factory=list)
    """From the ping to its pong."""
    delays: list[float] = field(default_factory=list)
    """The same without the time for which the hub was ready to run and other programs had the processors.

    It is what the ping would have taken on a machine that does nothing else. An agent feels the whole time, but a bound
    on that would fail whenever the machine is busy.
    """
    memory: int = 0
    """Bytes that the hub had at the most."""
    slow: list[tuple[float, float]] = field(default_factory=list)
    """When the pings were sent and answered whose delay was above a second."""

    def __str__(self) -> str:
        (median, p99), (_, felt) = quantiles(self.delays), quantiles(self.times)
        return f"p50 {median * 1000:.1f}, p99 {p99 * 1000:.1f} ms ({felt * 1000:.0f} on this machine)"


async def _first(work: "asyncio.Future[Any]", tasks: list[asyncio.Task[None]]) -> None:
    """Wait for the end of some work. The tasks have none, unless they fail."""
    either: list[asyncio.Future[Any]] = [work, *tasks]
    done, _ = await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    for one in done:
        one.result()


class PingWatcher:
    """Sends pings at a steady rate, whether or not the ones before are answered, so that a stall delays many."""

    def __init__(self, hub: HubProcess) -> None:
        self._hub = hub
        self._token = hub.register(NAME)
        self._pending: dict[int, tuple[float, float]] = {}
        self._pings = Pings()
        self.probes: list[str] = []
        """The first lines of answers to probes other than 200."""
        with hub.http() as http:
            http.post("/api/admin/rate-limits/whitelist", json={"agent_id": NAME}).raise_for_status()

    async def watch(self, during: Callable[[], Awaitable[object]], first: float = 1.0) -> tuple[Pings, Pings]:
        """The pings of some seconds without an attack, and those during it."""
        where = f"ws://{self._hub}/ws"
        async with connect(where, compression=None, proxy=None, ping_interval=None, local_addr=(ELSEWHERE, 0)) as wire:
            identify = {"type": "identify", "agent_id": NAME, "token": self._token}
            await wire.send(json.dumps(identify))
            assert json.loads(await wire.recv())["type"] == "identified"
            tasks = [asyncio.create_task(work) for work in (self._send(wire), self._receive(wire), self._probe())]
            try:
                quiet = await self._span(lambda: asyncio.sleep(first), tasks)
                return quiet, await self._span(during, tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _span(self, during: Callable[[], Awaitable[object]], tasks: list[asyncio.Task[None]]) -> Pings:
        """The pings that are answered while something goes on, and those that were sent until then."""
        self._pings = found = Pings()
        work = asyncio.ensure_future(during())
        try:
            await _first(work, tasks)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        last = max(self._pending, default=-1)
        answered = wait_until(lambda: not any(number <= last for number in self._pending), "the last pongs")
        await _first(asyncio.ensure_future(answered), tasks)
        return found

    async def _send(self, wire: ClientConnection) -> None:
        number = 0
        while True:
            self._pending[number] = time.monotonic(), self._waited()
            await wire.send(json.dumps({"type": "ping", "id": number}))
            number += 1
            self._pings.memory = max(self._pings.memory, self._hub.memory())
            await asyncio.sleep(INTERVAL)

    async def _receive(self, wire: ClientConnection) -> None:
        async for frame in wire:
            if not frame.startswith('{"type":"pong"'):  # type: ignore[arg-type] # a string
                continue  # such as a task, which goes to whoever is idle
            now, waited = time.monotonic(), self._waited()
            sent, before = self._pending.pop(json.loads(frame)["id"])
            self._pings.times.append(now - sent)
            self._pings.delays.append(max(now - sent - (waited - before), 0.0))
            if self._pings.delays[-1] > 1:
                self._pings.slow.append((sent, now))
        raise ConnectionError(f"the hub closed the watcher's connection: {wire.close_code} {wire.close_reason}")

    async def _probe(self) -> None:
        """Ask how the hub is, over new connections, as an orchestrator does."""
        while True:
            for path in PROBES:
                line = b"no answer"
                with suppress(TimeoutError, ConnectionError):
                    async with asyncio.timeout(PROBED_WITHIN):
                        line = await self._ask(path)
                if not line.startswith(b"HTTP/1.1 200 "):
                    self.probes.append(f"{path}: {line!r}")
            await asyncio.sleep(0.2)

    async def _ask(self, path: str) -> bytes:
        """The first line of the answer to a request."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._hub.port, local_addr=(ELSEWHERE, 0))
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            return await reader.readline()
        finally:
            writer.transport.abort()
            with suppress(ConnectionError):
                await writer.wait_closed()

    def _waited(self) -> float:
        """For how many seconds the hub's event loop was ready to run and had no processor."""
        pid = self._hub.pid
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9
