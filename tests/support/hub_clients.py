"""The hub's and the relay's clients, on the clock of the hub that they connect to."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, asynccontextmanager
from functools import wraps
from inspect import Signature, signature
from random import Random
from typing import Any, TypeVar

import pytest
from websockets.asyncio.server import ServerConnection, serve

from headgate import ManualClock, Policy
from headgate.client import Denial, HubClient, RelayClient, RelayMessage
from headgate.proto import envelope_pb2 as wire
from tests.support.event_loop import holds_for_turns, run, wait_until
from tests.support.hub import HubServer, hub_server
from tests.support.valkey import PATIENCE

T = TypeVar("T")
WELCOMES: dict[str, str | bytes] = {
    "hub": '{"type": "identified"}',
    "relay": wire.Envelope(type=wire.MESSAGE_TYPE_WELCOME, welcome=wire.Welcome()).SerializeToString(),
}
"""The first frames of a server, by the kind of client."""


class Denials(list[tuple[int, Denial]]):
    """The denials of a client, with their times."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock

    def __call__(self, denial: Denial) -> None:
        self.append((self._clock.now(), denial))


def relay_client(hub: HubServer, name: str, token: str | None = None, **options: Any) -> RelayClient:
    """An agent on the relay, registered if it has no token."""
    token = hub.register(name) if token is None else token
    return RelayClient(f"http://{hub}", name, token, **{"clock": hub.clock, "random": Random(name), **options})


def hub_client(hub: HubServer, name: str, token: str | None = None, **options: Any) -> HubClient:
    """An agent at `/ws`, registered if it has no token."""
    token = hub.register(name) if token is None else token
    return HubClient(f"http://{hub}", name, token, **{"clock": hub.clock, "random": Random(name), **options})


async def take(client: RelayClient, number: int) -> list[RelayMessage]:
    return [await anext(client) for _ in range(number)]


class RelayKind:
    """The relay's client, for tests that both clients share."""

    client = RelayClient
    connect = staticmethod(relay_client)
    path = "/relay"
    interval = 1.0
    """Seconds between two messages at `limited` hubs."""
    wrong_token = "the token doesn't belong"
    undeliverable = "unreachable"
    """The code that answers a message to nobody."""

    @staticmethod
    def limited() -> AbstractContextManager[HubServer]:
        """A hub that lets one message pass at a time."""
        return hub_server(relay_rate_burst="1")

    @staticmethod
    async def send(client: Any, to: str, body: str, *, wait: bool = True) -> None:
        await client.send(to, body.encode(), wait=wait)

    @staticmethod
    async def take(client: Any, number: int) -> list[str]:
        return [message.body.decode() for message in await take(client, number)]


class HubKind:
    """The client of `/ws`, for tests that both clients share."""

    client = HubClient
    connect = staticmethod(hub_client)
    path = "/ws"
    interval = 60.0
    wrong_token = "there is no such agent"
    undeliverable = "unknown_agent"

    @staticmethod
    def limited() -> AbstractContextManager[HubServer]:
        return hub_server(Policy(limits={"normal": "1/minute"}))

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


AsyncTest = Callable[..., Coroutine[Any, Any, None]]


def with_hub(policy: Policy | None = None, **settings: Any) -> Callable[[AsyncTest], Callable[..., None]]:
    """Run an async test in a loop of its own, with a hub of these settings as its argument `hub`."""
    return lambda test: _with_hub_from(test, lambda _: hub_server(policy, **settings))


def with_limited_hub(test: AsyncTest) -> Callable[..., None]:
    """Run an async test of a kind of client, with a hub that lets one message pass at a time."""
    return _with_hub_from(test, lambda kind: kind.limited())


def _with_hub_from(test: AsyncTest, start: Callable[[Any], AbstractContextManager[HubServer]]) -> Callable[..., None]:
    @wraps(test)
    def run_with_hub(**arguments: Any) -> None:
        with start(arguments.get("kind")) as hub:
            run(test(hub=hub, **arguments))

    parameters = [one for name, one in signature(test).parameters.items() if name != "hub"]
    run_with_hub.__signature__ = Signature(parameters)  # type: ignore[attr-defined] # the fixtures that pytest passes
    return run_with_hub


async def advance_until_done(clock: ManualClock, client: RelayClient | HubClient, work: Awaitable[T]) -> T:
    """Await the work of a client; whenever it holds everything back, advance the clock to the end of its wait."""
    task = asyncio.ensure_future(work)

    def moved() -> bool:
        if delay := client.delay:
            clock.advance(delay)
        return task.done()

    await wait_until(moved, "the work")
    return await task


async def check_reconnects_when_told(
    hub: HubServer, client: RelayClient | HubClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Stop a hub, and check that a client reconnects after the wait that it was told, and not before."""
    await asyncio.to_thread(hub.stop)
    await wait_until(lambda: not client.connected, "the end")
    await wait_until(lambda: "no connection" in caplog.text, "that it says so")
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
        assert await holds_for_turns(lambda: not knocks)
        hub.clock.advance(told * 0.1 + 0.000001)
        await wait_until(lambda: knocks, "that it comes back")
        await client.close(0)


@asynccontextmanager
async def websocket_url(handle: Callable[[ServerConnection], Awaitable[None]]) -> AsyncIterator[str]:
    """The URL of a server that handles connections in this way. The block has a deadline."""
    async with asyncio.timeout(5 * PATIENCE), serve(handle, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
