"""A real hub for tests: served by uvicorn in a thread of its own, on a clock that stands still."""

import json
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from http.client import HTTPResponse
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

from headgate import Gate, ManualClock, MemoryStore, Policy, RedisStore
from headgate.hub.app import Hub
from headgate.hub.config_file import ConfigFile
from headgate.hub.server import Server, server_config, tls_context
from headgate.hub.settings import HubSettings
from tests.support.asgi_server import ServerWithoutSignals, ThreadedServer
from tests.support.valkey import PATIENCE

ADMIN = "the-admin-token-of-the-tests"
VIEWER = "the-viewer-token-of-the-tests"


class _Server(ServerWithoutSignals, Server):  # type: ignore[misc]
    """The hub's own."""


class AgentConnection:
    """An agent's WebSocket: frames as dicts."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    def say(self, kind: str, **fields: Any) -> None:
        self.socket.send(json.dumps({"type": kind, **fields}))

    def hear(self) -> dict[str, Any]:
        """The next frame."""
        found: dict[str, Any] = json.loads(self.socket.recv(PATIENCE))
        return found

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Say something and hear the next frame."""
        self.say(kind, **fields)
        return self.hear()


@contextmanager
def agent_connection(where: object, name: str, token: str) -> Iterator[AgentConnection]:
    """A WebSocket of an agent, identified, at a host and port."""
    with connect(f"ws://{where}/ws", compression=None, proxy=None, open_timeout=PATIENCE) as socket:
        wire = AgentConnection(socket)
        assert wire.ask("identify", agent_id=name, token=token)["type"] == "identified"
        yield wire


class UnfinishedRequest:
    """A POST whose headers have passed, and whose body is awaited."""

    def __init__(self, raw: socket.socket, body: bytes) -> None:
        self._raw, self._body = raw, body

    def finish(self) -> int:
        """Send the body; the status of the response."""
        self._raw.sendall(self._body)
        response = HTTPResponse(self._raw)
        response.begin()
        return response.status


class HubServer(ThreadedServer):
    """A hub that runs."""

    def __init__(
        self,
        settings: HubSettings,
        policy: Policy | None = None,
        store: MemoryStore | RedisStore | None = None,
        gate: type[Gate] = Gate,
        config: ConfigFile | None = None,
    ) -> None:
        self.clock = ManualClock(start=1000)
        self.store = MemoryStore(clock=self.clock) if store is None else store
        self._settings, self._policy, self._gate, self._config = settings, policy, gate, config
        super().__init__()

    async def serve(self) -> None:
        async with Hub(self._settings, self._policy, store=self.store, gate=self._gate, config=self._config) as hub:
            self.hub = hub
            guard, config = server_config(self.mount(hub), self._settings, tls_context(self._settings))
            config.host, config.port, config.timeout_keep_alive = "127.0.0.1", 0, round(PATIENCE)
            self.server = _Server(hub, guard, config)
            await self.server.serve()

    def mount(self, hub: Hub) -> Any:
        """The application that is served: the hub."""
        return hub

    def http(self, token: str = "") -> httpx.Client:
        """An HTTP client with a token, to be closed."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # To load certificates takes longer than most tests do.
        return httpx.Client(base_url=f"http://{self}", headers=headers, timeout=PATIENCE, trust_env=False, verify=False)

    @contextmanager
    def unfinished_post(self, token: str, path: str, body: Any) -> Iterator[UnfinishedRequest]:
        """A request that the hub has authenticated: it asks for the body only then."""
        content = json.dumps(body).encode()
        head = f"Host: {self}\r\nAuthorization: Bearer {token}\r\nContent-Length: {len(content)}\r\n"
        with self.connect() as raw:
            raw.sendall(f"POST {path} HTTP/1.1\r\n{head}Expect: 100-continue\r\n\r\n".encode())
            assert raw.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
            yield UnfinishedRequest(raw, content)

    def register(self, agent: str) -> str:
        """An agent's token; without the registration's limit by address."""
        return self.run(self.hub.registry.register(agent, by_admin=True))

    @contextmanager
    def socket(self, path: str = "/ws") -> Iterator[AgentConnection]:
        """A WebSocket that nobody has identified on yet."""
        with connect(f"ws://{self}{path}", compression=None, proxy=None, open_timeout=PATIENCE) as socket:
            yield AgentConnection(socket)

    def agent(self, name: str, token: str | None = None) -> AbstractContextManager[AgentConnection]:
        """A WebSocket of an agent, registered if it has no token, and identified."""
        return agent_connection(self, name, self.register(name) if token is None else token)

    @contextmanager
    def agent_and_http(self, name: str) -> Iterator[tuple[AgentConnection, httpx.Client]]:
        """The WebSocket of a new agent, and an HTTP client with its token."""
        token = self.register(name)
        with self.agent(name, token) as wire, self.http(token) as http:
            yield wire, http


def hub_settings(**changes: Any) -> HubSettings:
    """Settings for tests: everything in memory, with known tokens."""
    return HubSettings(**{"data": None, "admin_token": ADMIN, "viewer_token": VIEWER, **changes})


@contextmanager
def hub_server(
    policy: Policy | None = None,
    *,
    store: MemoryStore | RedisStore | None = None,
    gate: type[Gate] = Gate,
    config: ConfigFile | None = None,
    **changes: Any,
) -> Iterator[HubServer]:
    """A hub with these changes to its settings, until the block ends."""
    hub = HubServer(hub_settings(**changes), policy, store, gate, config)
    try:
        yield hub
    finally:
        hub.stop()
