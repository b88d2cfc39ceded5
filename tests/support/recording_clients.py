"""Clients of a hub that record what it has acknowledged, and what was only requested."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Self, TypeAlias

import httpx
from websockets.asyncio.client import ClientConnection, connect

from tests.support.hub_process import ADMIN, HubProcess
from tests.support.valkey import PATIENCE

Key: TypeAlias = tuple[str, ...]
Values: TypeAlias = dict[Key, Any]
ABSENT = None


class ExpectedState:
    """The state that answers guarantee, and the states that unanswered requests allow."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._settled: dict[Key, tuple[int, Any]] = {}
        self._pending: dict[Key, dict[int, Any]] = {}
        self.answers = 0
        self.details: dict[Key, Any] = {}
        """What an answer said beyond that: a number, an attempt."""

    def asked(self, values: Values) -> int:
        """Note what is about to be asked for."""
        number = next(self._numbers)
        for key, value in values.items():
            self._pending.setdefault(key, {})[number] = value
        return number

    def answered(self, values: Values, number: int) -> None:
        """It was done; so was all that somebody had asked of the same things before, or it never will be."""
        self.answers += 1
        for key, value in values.items():
            if number > self._settled.get(key, (0, ABSENT))[0]:
                self._settled[key] = (number, value)
            last = self._settled[key][0]
            self._pending[key] = {at: may for at, may in self._pending[key].items() if at > last}

    def may(self, key: Key) -> list[Any]:
        """The values that something may have."""
        return [self._settled.get(key, (0, ABSENT))[1], *self._pending.get(key, {}).values()]

    @property
    def things(self) -> set[Key]:
        """All that was ever asked for."""
        return self._settled.keys() | self._pending.keys()

    def compare(self, found: Values) -> None:
        """Everything that was found may be so; everything that must be so was found."""
        wrong = [
            f"{key}: expected {' or '.join(map(str, self.may(key)))}, got {found.get(key)}"
            for key in sorted(self.things | found.keys())
            if found.get(key) not in self.may(key)
        ]
        assert not wrong, f"{len(wrong)} of {len(found)} things:\n" + "\n".join(wrong[:20])

    def settle(self, found: Values) -> None:
        """What was found is so from now on."""
        for key in self.things | found.keys():
            self._settled[key] = (next(self._numbers), found.get(key))
        self._pending.clear()


class RecordingClient:
    """Sends requests to a hub, and records them."""

    def __init__(self, hub: HubProcess, book: ExpectedState) -> None:
        self._where, self._book = hub.where, book
        once = httpx.Limits(max_keepalive_connections=0)  # an idle one may be closed just when it is to be used again
        self._http = httpx.AsyncClient(base_url=f"http://{hub}", limits=once, timeout=PATIENCE, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def request(self, method: str, path: str, token: str = ADMIN, body: Any = None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return await self._http.request(method, path, json=body, headers=headers)

    async def read(self, path: str, token: str = ADMIN) -> Any:
        return (await self.request("GET", path, token)).raise_for_status().json()

    async def change(self, values: Values, method: str, path: str, token: str = ADMIN, body: Any = None) -> Any:
        """Ask for something that, once it is answered, makes these values so."""
        number = self._book.asked(values)
        answer = (await self.request(method, path, token, body)).raise_for_status()
        self._book.answered(values, number)
        return answer.json()

    @asynccontextmanager
    async def agent(self, name: str, token: str) -> AsyncIterator["RecordingConnection"]:
        async with connect(
            f"ws://{self._where}/ws", compression=None, proxy=None, open_timeout=PATIENCE, ping_interval=None
        ) as socket:
            line = RecordingConnection(socket, self._book)
            assert (await line.ask("identify", agent_id=name, token=token))["type"] == "identified"
            yield line


class RecordingConnection:
    """An agent's WebSocket."""

    def __init__(self, socket: ClientConnection, book: ExpectedState) -> None:
        self._socket, self._book = socket, book
        self._ids = count(1)
        self._assigned: list[dict[str, Any]] = []

    async def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Send a frame and hear its answer."""
        number = next(self._ids)
        await self._socket.send(json.dumps({"type": kind, "id": number, **fields}))
        while True:
            heard = await self._hear()
            if heard.get("id") == number:
                return heard
            self._assigned.append(heard)

    async def change(self, values: Values, expected: str, kind: str, **fields: Any) -> dict[str, Any]:
        number = self._book.asked(values)
        answer = await self.ask(kind, **fields)
        assert answer["type"] == expected, answer
        self._book.answered(values, number)
        return answer

    async def assigned(self) -> dict[str, Any]:
        """The next task."""
        return self._assigned.pop(0) if self._assigned else await self._hear()

    async def _hear(self) -> dict[str, Any]:
        heard: dict[str, Any] = json.loads(await self._socket.recv())
        assert "id" in heard or heard["type"] == "task_assigned", heard
        return heard
