"""The load on a hub: connections that ask it the same again and again.

They are raw protocols with frames that are encoded beforehand: a client that did more would be slower than the hub, and
hide what the gate takes. Whatever is answered otherwise than expected, such as a denial, ends the run.
"""

import asyncio
import gc
import json
import os
import resource
import time
from array import array
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from math import ceil
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import uvloop
from websockets.asyncio.client import connect

from benchmarks.hub_report import CHANNEL, MAILBOX, MESSAGE, PING, RELAY, Pair, Round
from benchmarks.measure import freeze
from headgate.proto import envelope_pb2 as wire

CONNECTIONS: Final = 20
WINDOW: Final = 4
"""Frames that each WebSocket has under way; over HTTP it is one request."""

_WARM_UP: Final = 0.1  # seconds
_AT_ONCE: Final = 100  # connections that are opened together
_PATIENCE: Final = 60.0  # seconds
_TEXT, _BINARY, _PING, _PONG = 0x81, 0x82, 0x89, 0x8A
_MASKED: Final = 0x80
_MASK: Final = b"\0\0\0\0"  # which leaves the payload as it is

T = TypeVar("T")


class Agent(NamedTuple):
    name: str
    token: str


class Served(NamedTuple):
    """A hub that runs."""

    process: int
    port: int
    agents: list[Agent]


class Talk(NamedTuple):
    """What is said over a WebSocket."""

    path: str
    hello: bytes
    welcome: bytes
    """What the answer to the hello begins with."""
    question: bytes
    answer: bytes
    delivered: bytes = b""
    """What messages of other connections begin with, if any come."""


# What a round is made of ---------------------------------------------------------------------------------------------


def load(what: str, gated: Served, ungated: Served, rounds: int, seconds: float) -> Pair:
    """Ask two hubs in turns, for so long in each round."""
    return _run(_load(what, gated, ungated, rounds, seconds))


async def _load(what: str, gated: Served, ungated: Served, rounds: int, seconds: float) -> Pair:
    pair = Pair()
    turns = []
    for hub, done in ((gated, pair.gated), (ungated, pair.ungated)):
        links = await _open(hub, [ASKS[what](hub.agents, number) for number in range(CONNECTIONS)])
        await _ask(links, _WARM_UP)
        turns.append((hub, links, done))
    freeze()
    for _ in range(rounds):
        for hub, links, done in turns:
            done.append(await _round(hub, links, seconds))
        turns.reverse()  # so that neither always comes after the other
    gc.unfreeze()
    for _, links, _ in turns:
        _close(links)
    return pair


async def _round(hub: Served, links: Sequence["Link"], seconds: float) -> Round:
    processor, start = _processor_time(hub.process), time.perf_counter_ns()
    times = sorted([one for some in await _ask(links, seconds) for one in some])
    end, after = time.perf_counter_ns(), _processor_time(hub.process)
    async with asyncio.timeout(_PATIENCE):
        while sum([link.due for link in links]):  # noqa: ASYNC110 - what one has sent, others get
            await asyncio.sleep(0.001)
    return Round(
        messages=len(times),
        seconds=(end - start) / 1e9,
        processor=(after - processor) / 1e9,
        p50=times[len(times) // 2] / 1e9,
        p99=times[ceil(len(times) * 0.99) - 1] / 1e9,
    )


def idle(hub: Served, before: int) -> float:
    """How much a hub's resident memory grows with each of its agents that connects and is silent.

    So many are connected before, so that what is made once is not counted.
    """
    return _run(_idle(hub, before))


async def _idle(hub: Served, before: int) -> float:
    links = [ASKS[PING](hub.agents, number) for number in range(len(hub.agents))]
    await _open(hub, links[:before])
    at_first = _resident(hub.process)
    await _open(hub, links[before:])
    growth = _resident(hub.process) - at_first
    _close(links)
    return growth / (len(links) - before)


def watch(hub: Served, token: str, dashboards: int, pipe: "Connection[Any, Any]") -> None:
    """Keep dashboards open until the process ends: say when all are, and if one is closed."""
    _run(_watch(hub, token, dashboards, pipe))


async def _watch(hub: Served, token: str, dashboards: int, pipe: "Connection[Any, Any]") -> None:
    async with asyncio.TaskGroup() as group:
        opened = [asyncio.Event() for _ in range(dashboards)]
        for event in opened:
            group.create_task(_dashboard(hub, token, event))
        for event in opened:
            await event.wait()
        pipe.send("open")
    pipe.send("closed")


async def _dashboard(hub: Served, token: str, opened: asyncio.Event) -> None:
    where = f"ws://127.0.0.1:{hub.port}/ws/dashboard"
    async with connect(where, compression=None, proxy=None, max_size=None) as socket:
        await socket.send(_json(type="watch", token=token).decode())
        async for _ in socket:
            opened.set()


def _run(work: Coroutine[Any, Any, T]) -> T:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def _open(hub: Served, links: Sequence["Link"]) -> Sequence["Link"]:
    loop = asyncio.get_running_loop()
    for first in range(0, len(links), _AT_ONCE):
        some = links[first : first + _AT_ONCE]
        async with asyncio.timeout(_PATIENCE):
            for link in some:
                await loop.create_connection(lambda link=link: link, "127.0.0.1", hub.port)  # type: ignore[misc]
            await asyncio.gather(*[link.done for link in some])
    return links


async def _ask(links: Sequence["Link"], seconds: float) -> Sequence["array[int]"]:
    """Let all ask for so long; the nanoseconds until each answer."""
    until = time.perf_counter_ns() + round(seconds * 1e9)
    for link in links:
        link.ask(until)
    async with asyncio.timeout(seconds + _PATIENCE):
        await asyncio.gather(*[link.done for link in links])
    return [link.times for link in links]


def _close(links: Sequence["Link"]) -> None:
    for link in links:
        link.close()


def _processor_time(process: int) -> int:
    """Nanoseconds that a process, with all its threads, has had of the processor."""
    return time.clock_gettime_ns((~process << 3) | 2)  # what clock_getcpuclockid returns; Python doesn't offer it


def _resident(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# Connections ---------------------------------------------------------------------------------------------------------


class Link(asyncio.Protocol):
    """One connection, which asks again whenever it is answered."""

    def __init__(self, question: bytes, window: int) -> None:
        self._question, self._window = question, window
        self._sent: Final[deque[int]] = deque()  # when the questions were sent that are not answered yet
        self._until = 0
        self._rest = b""
        self._closed = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Whether it is open; then, whether it has asked all that it should."""
        self.times: array[int] = array("q")
        self.due = 0
        """What it has sent to others, less what it got from others: over all connections, 0 in the end."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closed:
            self._fail(f"the hub has closed a connection: {exc}")

    def ask(self, until: int) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self._until = until
        self.times = array("q")
        self._send(self._window, time.perf_counter_ns())

    def close(self) -> None:
        self._closed = True
        self._transport.abort()

    def _send(self, count: int, now: int) -> None:
        self._sent.extend([now] * count)
        self._transport.write(self._question * count)

    def _answered(self, count: int) -> None:
        """So many answers have come together."""
        now = time.perf_counter_ns()
        for _ in range(count):
            self.times.append(now - self._sent.popleft())
        if now < self._until:
            self._send(count, now)
        elif not self._sent:
            self.done.set_result(None)

    def _fail(self, why: str) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(why))
        self.close()


class WebSocket(Link):
    """One agent that talks over a WebSocket."""

    def __init__(self, talk: Talk) -> None:
        self._opcode = _TEXT if talk.path == "/ws" else _BINARY
        super().__init__(_frame(self._opcode, talk.question), WINDOW)
        self._talk = talk
        self._upgraded = self._welcome = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._transport.write(
            f"GET {self._talk.path} HTTP/1.1\r\nHost: hub\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
        )

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        if not self._upgraded:
            data = self._upgrade(data)
        at, answers = 0, 0
        while len(data) - at >= 2:
            length, start = data[at + 1], at + 2
            if length == 126:
                length, start = int.from_bytes(data[start : start + 2], "big"), start + 2
            if len(data) < start + length:
                break
            answers += self._heard(data[at], data[start : start + length])
            at = start + length
        self._rest = data[at:]
        if answers and not self._closed:
            self.due += answers if self._talk.delivered else 0
            self._answered(answers)

    def _upgrade(self, data: bytes) -> bytes:
        head, found, rest = data.partition(b"\r\n\r\n")
        if not found:
            return data
        if not head.startswith(b"HTTP/1.1 101 "):
            self._fail(f"expected a WebSocket, got {head + rest!r}")
        self._upgraded = True
        self._transport.write(_frame(self._opcode, self._talk.hello))
        return rest

    def _heard(self, opcode: int, payload: bytes) -> bool:
        """Take a frame, and say whether it is an answer."""
        talk = self._talk
        if payload == talk.answer:
            return True
        if opcode == _PING:
            self._transport.write(_frame(_PONG, payload))
        elif talk.delivered and payload.startswith(talk.delivered):
            self.due -= 1
        elif not self._welcome and payload.startswith(talk.welcome):
            self._welcome = True
            self.done.set_result(None)
        else:
            self._fail(f"expected {talk.answer!r}, got {payload!r}")
        return False


class Requests(Link):
    """One agent that sends the same request again and again over one connection."""

    def __init__(self, agent: Agent, path: str) -> None:
        request = f"GET {path} HTTP/1.1\r\nHost: hub\r\nAuthorization: Bearer {agent.token}\r\n\r\n"
        super().__init__(request.encode(), 1)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.done.set_result(None)

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        head, found, body = data.partition(b"\r\n\r\n")
        if not found or len(body) < int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]):
            self._rest = data
        elif head.startswith(b"HTTP/1.1 200 "):
            self._rest = b""
            self._answered(1)
        else:
            self._fail(f"expected 200, got {data!r}")


def _frame(opcode: int, payload: bytes) -> bytes:
    """A frame of a client."""
    size = len(payload)
    length = bytes([_MASKED | size]) if size < 126 else bytes([_MASKED | 126]) + size.to_bytes(2, "big")
    return bytes([opcode]) + length + _MASK + payload


# What is asked -------------------------------------------------------------------------------------------------------


def _ping(agents: Sequence[Agent], number: int) -> Link:
    return WebSocket(Talk("/ws", *_identify(agents[number]), _json(type="ping"), _json(type="pong")))


def _message(agents: Sequence[Agent], number: int) -> Link:
    to, sender = agents[(number + 1) % CONNECTIONS].name, agents[(number - 1) % CONNECTIONS].name
    question = _json(type="message", to=to, body={"text": "is it done?", "task": 7})
    answer = _json(type="message_sent", to=to, delivered=True)
    delivered = _json(type="message", **{"from": sender})[:-1]
    return WebSocket(Talk("/ws", *_identify(agents[number]), question, answer, delivered))


def _relay(agents: Sequence[Agent], number: int) -> Link:
    agent, to = agents[number], agents[(number + 1) % CONNECTIONS].name
    hello = wire.Envelope(id="0", type=wire.MESSAGE_TYPE_HELLO, hello=wire.Hello(address=agent.name, token=agent.token))
    welcome = wire.Envelope(type=wire.MESSAGE_TYPE_WELCOME, in_reply_to="0", welcome=wire.Welcome(address=agent.name))
    data = wire.Data(body=b"is it done?", content_type="text/plain")
    question = wire.Envelope(id="1", type=wire.MESSAGE_TYPE_DATA, to=to, data=data)
    answer = wire.Envelope(type=wire.MESSAGE_TYPE_ACK, in_reply_to="1", ack=wire.Ack())
    delivered = wire.Envelope(id="1", type=wire.MESSAGE_TYPE_DATA, to=agent.name, data=data)
    setattr(delivered, "from", agents[(number - 1) % CONNECTIONS].name)
    envelopes = (hello, welcome, question, answer, delivered)
    return WebSocket(Talk("/relay", *[envelope.SerializeToString() for envelope in envelopes]))


def _identify(agent: Agent) -> tuple[bytes, bytes]:
    return _json(type="identify", agent_id=agent.name, token=agent.token), _json(type="identified")[:-1]


def _json(**fields: object) -> bytes:
    """A frame as the hub writes it."""
    return json.dumps(fields, separators=(",", ":")).encode()


ASKS: Final[dict[str, Callable[[Sequence[Agent], int], Link]]] = {
    PING: _ping,
    MESSAGE: _message,
    CHANNEL: lambda agents, number: Requests(agents[number], "/api/channels/general"),
    MAILBOX: lambda agents, number: Requests(agents[number], "/api/mailbox"),
    RELAY: _relay,
}
"""What is measured: the connections of a round, by their numbers."""
