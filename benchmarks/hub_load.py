"""The load on a hub: connections that repeat one request.

They are raw protocols with frames encoded beforehand: a client that did more would be slower than the hub, and hide the
cost of the gate. An unexpected answer, such as a denial, ends the run.
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
"""Frames in flight per WebSocket; over HTTP, one request."""

_WARM_UP: Final = 0.1  # seconds
_AT_ONCE: Final = 100  # connections opened together
_PATIENCE: Final = 60.0  # seconds
_TEXT, _BINARY, _PING, _PONG = 0x81, 0x82, 0x89, 0x8A
_MASKED: Final = 0x80
_MASK: Final = b"\0\0\0\0"  # leaves the payload unchanged

T = TypeVar("T")


class Agent(NamedTuple):
    name: str
    token: str


class HubProcess(NamedTuple):
    """A running hub."""

    process: int
    port: int
    agents: list[Agent]


class Exchange(NamedTuple):
    """The frames of a WebSocket connection."""

    path: str
    hello: bytes
    welcome: bytes
    """The beginning of the answer to the hello."""
    question: bytes
    answer: bytes
    delivered: bytes = b""
    """The beginning of messages from other connections, if there are any."""


# Rounds --------------------------------------------------------------------------------------------------------------


def load(what: str, gated: HubProcess, ungated: HubProcess, rounds: int, seconds: float) -> Pair:
    """Load two hubs in turns, for some seconds in each round."""
    return _run(_load(what, gated, ungated, rounds, seconds))


async def _load(what: str, gated: HubProcess, ungated: HubProcess, rounds: int, seconds: float) -> Pair:
    pair = Pair()
    turns = []
    for hub, done in ((gated, pair.gated), (ungated, pair.ungated)):
        connections = await _open(hub, [WORKLOADS[what](hub.agents, number) for number in range(CONNECTIONS)])
        await _run_for(connections, _WARM_UP)
        turns.append((hub, connections, done))
    freeze()
    for _ in range(rounds):
        for hub, connections, done in turns:
            done.append(await _round(hub, connections, seconds))
        turns.reverse()  # so that neither always comes second
    gc.unfreeze()
    for _, connections, _ in turns:
        _close(connections)
    return pair


async def _round(hub: HubProcess, connections: Sequence["LoadConnection"], seconds: float) -> Round:
    processor, start = _processor_time(hub.process), time.perf_counter_ns()
    times = sorted([one for some in await _run_for(connections, seconds) for one in some])
    end, after = time.perf_counter_ns(), _processor_time(hub.process)
    async with asyncio.timeout(_PATIENCE):
        while sum([connection.due for connection in connections]):  # noqa: ASYNC110 - until all messages are delivered
            await asyncio.sleep(0.001)
    return Round(
        messages=len(times),
        seconds=(end - start) / 1e9,
        processor=(after - processor) / 1e9,
        p50=times[len(times) // 2] / 1e9,
        p99=times[ceil(len(times) * 0.99) - 1] / 1e9,
    )


def idle(hub: HubProcess, before: int) -> float:
    """Growth of a hub's resident memory per idle connection.

    Some connections are open before, so that one-time allocations are not counted.
    """
    return _run(_idle(hub, before))


async def _idle(hub: HubProcess, before: int) -> float:
    connections = [WORKLOADS[PING](hub.agents, number) for number in range(len(hub.agents))]
    await _open(hub, connections[:before])
    at_first = _resident(hub.process)
    await _open(hub, connections[before:])
    growth = _resident(hub.process) - at_first
    _close(connections)
    return growth / (len(connections) - before)


def watch(hub: HubProcess, token: str, dashboards: int, pipe: "Connection[Any, Any]") -> None:
    """Keep dashboards open until the process ends. Sends "open" once all are, and "closed" if they close."""
    _run(_watch(hub, token, dashboards, pipe))


async def _watch(hub: HubProcess, token: str, dashboards: int, pipe: "Connection[Any, Any]") -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(dashboards):  # one after the other: a hub bounds how many an address is opening
            opened = asyncio.Event()
            group.create_task(_dashboard(hub, token, opened))
            await opened.wait()
        pipe.send("open")
    pipe.send("closed")


async def _dashboard(hub: HubProcess, token: str, opened: asyncio.Event) -> None:
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


async def _open(hub: HubProcess, connections: Sequence["LoadConnection"]) -> Sequence["LoadConnection"]:
    loop = asyncio.get_running_loop()
    for first in range(0, len(connections), _AT_ONCE):
        some = connections[first : first + _AT_ONCE]
        async with asyncio.timeout(_PATIENCE):
            for connection in some:
                await loop.create_connection(lambda connection=connection: connection, "127.0.0.1", hub.port)  # type: ignore[misc]
            await asyncio.gather(*[connection.done for connection in some])
    return connections


async def _run_for(connections: Sequence["LoadConnection"], seconds: float) -> Sequence["array[int]"]:
    """Run all connections for some seconds; return the nanoseconds until each answer."""
    until = time.perf_counter_ns() + round(seconds * 1e9)
    for connection in connections:
        connection.start(until)
    async with asyncio.timeout(seconds + _PATIENCE):
        await asyncio.gather(*[connection.done for connection in connections])
    return [connection.times for connection in connections]


def _close(connections: Sequence["LoadConnection"]) -> None:
    for connection in connections:
        connection.close()


def _processor_time(process: int) -> int:
    """Processor time of a process with all its threads, in nanoseconds."""
    return time.clock_gettime_ns((~process << 3) | 2)  # clock_getcpuclockid, which Python lacks


def _resident(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# Connections ---------------------------------------------------------------------------------------------------------


class LoadConnection(asyncio.Protocol):
    """A connection that sends the next request when it gets an answer."""

    def __init__(self, question: bytes, window: int) -> None:
        self._question, self._window = question, window
        self._sent: Final[deque[int]] = deque()  # times of the requests without an answer
        self._until = 0
        self._rest = b""
        self._closed = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set once it is open; then, set at the end of each run."""
        self.times: array[int] = array("q")
        self.due = 0
        """Messages sent to others, less messages from others: 0 in the end, summed over all connections."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closed:
            self._fail(f"the hub closed a connection: {exc}")

    def start(self, until: int) -> None:
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
        """Record a number of answers that came together."""
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


class WebSocketConnection(LoadConnection):
    """An agent on a WebSocket."""

    def __init__(self, exchange: Exchange) -> None:
        self._opcode = _TEXT if exchange.path == "/ws" else _BINARY
        super().__init__(_frame(self._opcode, exchange.question), WINDOW)
        self._exchange = exchange
        self._upgraded = self._welcome = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._transport.write(
            f"GET {self._exchange.path} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
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
            answers += self._handle(data[at], data[start : start + length])
            at = start + length
        self._rest = data[at:]
        if answers and not self._closed:
            self.due += answers if self._exchange.delivered else 0
            self._answered(answers)

    def _upgrade(self, data: bytes) -> bytes:
        head, found, rest = data.partition(b"\r\n\r\n")
        if not found:
            return data
        if not head.startswith(b"HTTP/1.1 101 "):
            self._fail(f"expected a WebSocket, got {head + rest!r}")
        self._upgraded = True
        self._transport.write(_frame(self._opcode, self._exchange.hello))
        return rest

    def _handle(self, opcode: int, payload: bytes) -> bool:
        """Handle a frame, and return whether it is an answer."""
        exchange = self._exchange
        if payload == exchange.answer:
            return True
        if opcode == _PING:
            self._transport.write(_frame(_PONG, payload))
        elif exchange.delivered and payload.startswith(exchange.delivered):
            self.due -= 1
        elif not self._welcome and payload.startswith(exchange.welcome):
            self._welcome = True
            self.done.set_result(None)
        else:
            self._fail(f"expected {exchange.answer!r}, got {payload!r}")
        return False


class HttpConnection(LoadConnection):
    """An agent that repeats one HTTP request on one connection."""

    def __init__(self, agent: Agent, path: str) -> None:
        request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {agent.token}\r\n\r\n"
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
    """Encode a client's frame."""
    size = len(payload)
    length = bytes([_MASKED | size]) if size < 126 else bytes([_MASKED | 126]) + size.to_bytes(2, "big")
    return bytes([opcode]) + length + _MASK + payload


# Workloads -----------------------------------------------------------------------------------------------------------


def _ping(agents: Sequence[Agent], number: int) -> LoadConnection:
    return WebSocketConnection(Exchange("/ws", *_identify(agents[number]), _json(type="ping"), _json(type="pong")))


def _message(agents: Sequence[Agent], number: int) -> LoadConnection:
    to, sender = agents[(number + 1) % CONNECTIONS].name, agents[(number - 1) % CONNECTIONS].name
    question = _json(type="message", to=to, body={"text": "is it done?", "task": 7})
    answer = _json(type="message_sent", to=to, delivered=True)
    delivered = _json(type="message", **{"from": sender})[:-1]
    return WebSocketConnection(Exchange("/ws", *_identify(agents[number]), question, answer, delivered))


def _relay(agents: Sequence[Agent], number: int) -> LoadConnection:
    agent, to = agents[number], agents[(number + 1) % CONNECTIONS].name
    hello = wire.Envelope(id="0", type=wire.MESSAGE_TYPE_HELLO, hello=wire.Hello(address=agent.name, token=agent.token))
    welcome = wire.Envelope(type=wire.MESSAGE_TYPE_WELCOME, in_reply_to="0", welcome=wire.Welcome(address=agent.name))
    data = wire.Data(body=b"is it done?", content_type="text/plain")
    question = wire.Envelope(id="1", type=wire.MESSAGE_TYPE_DATA, to=to, data=data)
    answer = wire.Envelope(type=wire.MESSAGE_TYPE_ACK, in_reply_to="1", ack=wire.Ack())
    delivered = wire.Envelope(id="1", type=wire.MESSAGE_TYPE_DATA, to=agent.name, data=data)
    setattr(delivered, "from", agents[(number - 1) % CONNECTIONS].name)
    envelopes = (hello, welcome, question, answer, delivered)
    return WebSocketConnection(Exchange("/relay", *[envelope.SerializeToString() for envelope in envelopes]))


def _identify(agent: Agent) -> tuple[bytes, bytes]:
    return _json(type="identify", agent_id=agent.name, token=agent.token), _json(type="identified")[:-1]


def _json(**fields: object) -> bytes:
    """A frame in the hub's encoding."""
    return json.dumps(fields, separators=(",", ":")).encode()


WORKLOADS: Final[dict[str, Callable[[Sequence[Agent], int], LoadConnection]]] = {
    PING: _ping,
    MESSAGE: _message,
    CHANNEL: lambda agents, number: HttpConnection(agents[number], "/api/channels/general"),
    MAILBOX: lambda agents, number: HttpConnection(agents[number], "/api/mailbox"),
    RELAY: _relay,
}
"""The connections of each workload, by number."""
