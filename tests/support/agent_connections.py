"""Connections of agents to a hub, and what a hub has counted for them."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from headgate.gate.policy import BUILT_IN_TIERS
from headgate.proto import envelope_pb2 as wire
from tests.support.hub import ADMIN, AgentConnection, HubServer
from tests.support.valkey import PATIENCE, wait_for

BEHIND_A_PROXY: dict[str, Any] = {"trusted_proxies": ("127.0.0.1",)}
"""Settings under which `proxied_connection` comes from anywhere."""

LARGE = "x" * 60_000
"""Fills sockets quickly."""

VALID: dict[str, dict[str, Any]] = {
    "identify": {"agent_id": "planner", "token": "none"},
    "ping": {},
    "status": {},
    "list_agents": {},
    "list_channels": {},
    "channel_history": {"channel": "general"},
    "message": {"to": "nobody", "body": 1},
    "channel_publish": {"channel": "none", "body": 1},
    "channel_subscribe": {"channel": "none"},
    "channel_unsubscribe": {"channel": "none"},
    "task_accepted": {"task_id": "1"},
    "task_progress": {"task_id": "1"},
    "task_complete": {"task_id": "1"},
    "task_failed": {"task_id": "1", "error": "too hard"},
    "task_recovering": {"task_id": "1"},
    "session_open": {"session": "1"},
    "session_signal": {"session": "1", "signal": {}},
    "session_close": {"session": "1"},
}
"""A frame of each type that passes the validation, though the hub may have no such task or agent."""


def read_close(wire: AgentConnection) -> tuple[int, str]:
    """The code and reason of the hub's close, after all frames before it are read."""
    with suppress(ConnectionClosed):
        while True:
            wire.hear()
    assert wire.socket.close_code is not None
    return wire.socket.close_code, wire.socket.close_reason or ""


def ask_relay(connection: AgentConnection, envelope: wire.Envelope) -> wire.Envelope:
    """The relay's answer to an envelope."""
    connection.socket.send(envelope.SerializeToString())
    answer = connection.socket.recv(PATIENCE)
    assert isinstance(answer, bytes)
    return wire.Envelope.FromString(answer)


def send_hello(connection: AgentConnection, address: str, token: str) -> wire.Envelope:
    """The relay's answer to a HELLO."""
    proof = wire.Hello(address=address, token=token)
    return ask_relay(connection, wire.Envelope(id="1", type=wire.MESSAGE_TYPE_HELLO, hello=proof))


@contextmanager
def relay_connection(hub: HubServer, name: str, token: str) -> Iterator[AgentConnection]:
    """A connection to the relay that has proved its address."""
    with hub.socket("/relay") as connection:
        assert send_hello(connection, name, token).type == wire.MESSAGE_TYPE_WELCOME
        yield connection


@contextmanager
def proxied_connection(hub: HubServer, address: str) -> Iterator[AgentConnection]:
    """A connection through a proxy that names the client's address."""
    headers = {"X-Forwarded-For": address}
    with connect(
        f"ws://{hub}/ws", compression=None, proxy=None, open_timeout=PATIENCE, additional_headers=headers
    ) as socket:
        yield AgentConnection(socket)


def rejected_handshake(hub: HubServer, path: str = "/ws", address: str = "") -> httpx.Response:
    """The answer to a handshake that the hub doesn't accept."""
    headers = {"X-Forwarded-For": address} if address else {}
    with (
        pytest.raises(InvalidStatus) as refused,
        connect(f"ws://{hub}{path}", compression=None, proxy=None, open_timeout=PATIENCE, additional_headers=headers),
    ):
        pass
    response = refused.value.response
    return httpx.Response(
        response.status_code, headers=list(response.headers.raw_items()), content=bytes(response.body or b"")
    )


@contextmanager
def slow_reader(hub: HubServer, name: str, token: str) -> Iterator[AgentConnection]:
    """An agent that reads nothing unless the test does, over a socket that holds little."""
    small = socket.socket()
    small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    small.connect(("127.0.0.1", hub.port))
    with connect(
        f"ws://{hub}/ws", sock=small, compression=None, max_queue=1, open_timeout=PATIENCE, close_timeout=0.1
    ) as opened:
        wire = AgentConnection(opened)
        assert wire.ask("identify", agent_id=name, token=token)["type"] == "identified"
        yield wire


def read_ahead(slow: AgentConnection) -> None:
    """With two frames under way, wait until a slow reader has read ahead; from then on its socket takes nothing."""
    wait_for(lambda: slow.socket.recv_messages.paused, "the slow reader to have enough")


def overfill(sender: AgentConnection, slow: AgentConnection) -> int:
    """Send large messages to the agent "slow", a slow reader, until one finds no room; how many were taken."""
    taken = 0
    while sender.ask("message", to="slow", body=[taken, LARGE])["delivered"]:
        taken += 1
        if taken == 2:
            read_ahead(slow)
        assert taken < 1000
    return taken


def ping(wire: AgentConnection, times: int) -> None:
    """Send pings, and wait for the answer to each."""
    for number in range(times):
        wire.say("ping", id=number)
    answered = 0
    while answered < times:
        answered += wire.hear()["type"] in ("pong", "rate_limited")


def ping_until_denied(wire: AgentConnection, denials: int = 1) -> None:
    """Let an agent that has two pings use them, and be denied."""
    for _ in range(2 + denials):
        wire.say("ping")
    while denials:
        denials -= wire.hear()["type"] == "rate_limited"


def count_queued_frames(hub: HubServer, agent: str) -> int:
    """How many frames wait until an agent reads."""
    (found,) = hub.hub.presence.sockets_of(agent)
    return hub.call(lambda: found.queued)


def empty_bucket(hub: HubServer, agent: str, tier: str = "light", channel: str = "ws") -> None:
    """Take all that is left of an agent's bucket, without a violation."""
    while hub.hub.gate.peek(agent, channel, tier):
        hub.hub.gate.check(agent, channel, tier)


def remaining_by_tier(hub: HubServer, agent: str, channel: str = "ws") -> dict[str, int]:
    """How much an agent has left of each tier."""
    return {tier: hub.hub.gate.peek(agent, channel, tier).remaining for tier in BUILT_IN_TIERS}


def read_metrics(hub: HubServer) -> dict[str, Any]:
    """The hub's metrics."""
    with hub.http(ADMIN) as admin:
        found: dict[str, Any] = admin.get("/api/metrics").json()
    return found


def receive_until(connection: socket.socket, word: bytes) -> bytes:
    """The bytes that a raw connection receives until a word has come."""
    found = b""
    while word not in found:
        data = connection.recv(65_536)
        assert data, found
        found += data
    return found
