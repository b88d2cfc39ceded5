"""A relay for tests, over real WebSockets, on a clock that stands still."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any, Self, TypeAlias
from weakref import WeakSet

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from headgate import Gate, ManualClock, MemoryStore
from headgate.hub.agents.authentication import Authentication
from headgate.hub.monitoring.denials import DenialLog
from headgate.hub.sockets.flood import FloodCounter
from headgate.hub.sockets.relay import Relay, relay_limiter
from headgate.hub.sockets.socket import Socket
from headgate.proto import envelope_pb2 as wire
from tests.support.asgi_server import app_server
from tests.support.valkey import PATIENCE

ACK, ERROR, LIMITED = wire.MESSAGE_TYPE_ACK, wire.MESSAGE_TYPE_ERROR, wire.MESSAGE_TYPE_RATE_LIMITED
TOO_LARGE = b"x" * 65_537
GARBAGE = b"\xff\xff\xff"
Frame: TypeAlias = wire.Envelope | bytes | str


class RelayHub:
    """As much of a hub as a relay needs. An agent's token is its name, backwards."""

    def __init__(self, rate: str = "1.0", burst: str = "10", room: int = 256, **options: Any) -> None:
        self.clock = ManualClock(start=1000)
        self.store = MemoryStore(clock=self.clock)
        self.gate = Gate(store=self.store)
        self.tokens = {agent: agent[::-1] for agent in ("alice", "bob", "carol")}
        self.denials = DenialLog(self.clock)
        self.revocations = 0
        options = {"gate": self.gate, "authentication": Authentication(self.gate), **options}
        options |= {"registry": self, "denials": self.denials}
        self.limiter = relay_limiter(rate, burst, self.store)
        self.flood_counter = FloodCounter()
        self.relay = Relay(
            **{"limiter": self.limiter, "clock": self.clock, "flood_counter": self.flood_counter, **options}
        )
        self.sockets: WeakSet[Socket] = WeakSet()
        self._room = room
        self._ids = count(1)
        self._stack = ExitStack()

    async def verify(self, address: str, token: str) -> bool:
        return self.tokens.get(address) == token

    def revoke(self, agent: str) -> None:
        """Let an agent's token be invalid from now on, for the relay too."""
        self.tokens.pop(agent, None)
        self.revocations += 1
        self.relay.drop(agent)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        socket = Socket(receive, send, scope["client"][0], self._room)
        self.sockets.add(socket)
        if await socket.accept():
            await self.relay.serve(socket)

    def __enter__(self) -> Self:
        self._stack.enter_context(self.gate)
        self.server = self._stack.enter_context(app_server(self.app))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def stranger(self, **options: Any) -> Iterator["RelayAgent"]:
        """A connection that hasn't said yet whose it is."""
        with connect(
            f"ws://{self.server}", proxy=None, max_size=None, compression=None, open_timeout=PATIENCE, **options
        ) as socket:
            yield RelayAgent(self, socket)

    @contextmanager
    def agent(self, name: str, **options: Any) -> Iterator["RelayAgent"]:
        with self.stranger(**options) as agent:
            assert agent.hello(name).type == wire.MESSAGE_TYPE_WELCOME
            yield agent

    def data(self, to: str, body: bytes = b"hi", **fields: Any) -> wire.Envelope:
        payload = wire.Data(body=body, content_type="text/plain")
        return wire.Envelope(id=self.new_id(), type=wire.MESSAGE_TYPE_DATA, to=to, data=payload, **fields)

    def new_id(self) -> str:
        return f"id-{next(self._ids)}"


class RelayAgent:
    """A client that sends one envelope and waits for its answer."""

    def __init__(self, hub: RelayHub, socket: ClientConnection) -> None:
        self.hub, self.socket = hub, socket

    def ask(self, envelope: Frame) -> wire.Envelope:
        self.socket.send(envelope.SerializeToString() if isinstance(envelope, wire.Envelope) else envelope)
        answer = self.read()
        if isinstance(envelope, wire.Envelope):
            assert answer.in_reply_to == envelope.id
        return answer

    def read(self) -> wire.Envelope:
        frame = self.socket.recv(timeout=PATIENCE)
        assert isinstance(frame, bytes)
        return wire.Envelope.FromString(frame)

    def hello(self, name: str, token: str | None = None) -> wire.Envelope:
        proof = wire.Hello(address=name, token=name[::-1] if token is None else token)
        return self.ask(wire.Envelope(id=self.hub.new_id(), type=wire.MESSAGE_TYPE_HELLO, hello=proof))

    def say(self, to: str, body: bytes = b"hi") -> wire.Envelope:
        return self.ask(self.hub.data(to, body))

    def spend(self, messages: int = 10) -> None:
        """Send as much as passes at once."""
        for _ in range(messages):
            assert self.say("nobody").error.code == "unreachable"

    def read_close(self) -> tuple[int, str]:
        """How the hub closed the connection. Nothing was said before."""
        with pytest.raises(ConnectionClosed) as info:
            self.read()
        assert info.value.rcvd is not None
        return info.value.rcvd.code, info.value.rcvd.reason


def sender(envelope: wire.Envelope) -> str:
    return str(getattr(envelope, "from"))
