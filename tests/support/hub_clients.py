"""Clients for tests, on the clock of the hub that they talk to."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager
from random import Random
from typing import Any, TypeVar

import pytest

from headgate import ManualClock, Policy
from headgate.client import Denial, HubClient, RelayClient
from tests.support.hub import Running, running
from tests.support.valkey import PATIENCE

T = TypeVar("T")


class Denials(list[tuple[int, Denial]]):
    """What a client was denied, and when."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock

    def __call__(self, denial: Denial) -> None:
        self.append((self._clock.now(), denial))


def relay_client(hub: Running, name: str, token: str | None = None, **options: Any) -> RelayClient:
    """An agent on the relay, registered if it has no token."""
    token = hub.register(name) if token is None else token
    return RelayClient(f"http://{hub}", name, token, **{"clock": hub.clock, "random": Random(name), **options})


def hub_client(hub: Running, name: str, token: str | None = None, **options: Any) -> HubClient:
    """An agent at `/ws`, registered if it has no token."""
    token = hub.register(name) if token is None else token
    return HubClient(f"http://{hub}", name, token, **{"clock": hub.clock, "random": Random(name), **options})


class RelayKind:
    """The relay's client, as tests use it that are the same for both."""

    client = RelayClient
    connect = staticmethod(relay_client)
    path = "/relay"
    interval = 1.0
    """Seconds between two messages at `limited` hubs."""
    wrong_token = "the token doesn't belong"
    undeliverable = "unreachable"
    """The code that answers a message to nobody."""

    @staticmethod
    def limited() -> AbstractContextManager[Running]:
        """A hub that lets one message pass at a time."""
        return running(relay_rate_burst="1")

    @staticmethod
    async def send(client: Any, to: str, body: str, *, wait: bool = True) -> None:
        await client.send(to, body.encode(), wait=wait)

    @staticmethod
    async def take(client: Any, number: int) -> list[str]:
        return [(await anext(client)).body.decode() for _ in range(number)]


class HubKind:
    """The client of `/ws`, as tests use it that are the same for both."""

    client = HubClient
    connect = staticmethod(hub_client)
    path = "/ws"
    interval = 60.0
    wrong_token = "there is no such agent"
    undeliverable = "unknown_agent"

    @staticmethod
    def limited() -> AbstractContextManager[Running]:
        return running(Policy(limits={"normal": "1/minute"}))

    @staticmethod
    async def send(client: Any, to: str, body: str, *, wait: bool = True) -> None:
        await client.ask("message", to=to, body=body, wait=wait)

    @staticmethod
    async def take(client: Any, number: int) -> list[str]:
        found: list[str] = []
        while len(found) < number:
            frame = await anext(client)
            found += [frame["body"]] if frame["type"] == "message" else []
        return found


Kind = type[RelayKind] | type[HubKind]
both_clients = pytest.mark.parametrize("kind", [RelayKind, HubKind], ids=["relay", "hub"])


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a test to its end, or to the end of its patience."""

    async def main() -> T:
        async with asyncio.timeout(2 * PATIENCE):
            return await work

    return asyncio.run(main())


async def until(condition: Callable[[], object], what: str) -> None:
    """Look again and again until something holds, while the loop goes on."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {PATIENCE} s")
        await asyncio.sleep(0.0005)


async def in_time(clock: ManualClock, client: RelayClient | HubClient, work: Awaitable[T]) -> T:
    """Do something with a client; whenever it holds all back, the clock goes on to the moment when it doesn't."""
    task = asyncio.ensure_future(work)

    def moved() -> bool:
        if delay := client.delay:
            clock.advance(delay)
        return task.done()

    await until(moved, "the work")
    return await task


async def stays(condition: Callable[[], object], turns: int = 60) -> bool:
    """Whether something holds, also after everybody had the time to change it."""
    for _ in range(turns):
        if not condition():
            return False
        await asyncio.sleep(0.0005)
    return True


async def comes_back_when_it_is_told(
    hub: Running, client: RelayClient | HubClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Stop a hub, and see when a client knocks again at where it was."""
    await asyncio.to_thread(hub.stop)
    await until(lambda: not client.connected, "the end")
    await until(lambda: "no connection" in caplog.text, "that it says so")
    found = re.search(r"closed with 1012 'restarting; retry in (\d+) ms'\"; trying again in", caplog.text)
    assert found is not None
    told = int(found[1]) / 1000
    assert 1 <= told <= 5
    knocks = []

    async def knocked(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        knocks.append(hub.clock.now())
        writer.close()

    async with await asyncio.start_server(knocked, "127.0.0.1", hub.port):
        hub.clock.advance(told - 0.000001)
        assert await stays(lambda: not knocks)
        hub.clock.advance(told * 0.1 + 0.000001)
        await until(lambda: knocks, "that it comes back")
        await client.close(0)
