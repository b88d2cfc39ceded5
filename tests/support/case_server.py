"""A server that does what `tests/client/client_cases.json` says, for the clients in Python and in TypeScript.

Each case is a server of its own: `/3/relay` and `/3/ws` are the sockets of the fourth case. A run of a case adds a name
of its own, as in `/3/a/relay`. `GET /3/a/log` says what has happened there:

    {"connections": 2,             attempts, whatever became of them
     "frames": ["0", "0"],         the bodies that came in
     "silent": 1,                  connections that the server has left without an answer
     "done": 1}                    connections whose steps are over

`python -m tests.support.case_server` prints its port, and ends when its input does.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.utils import formatdate
from pathlib import Path
from time import time
from typing import Any

from websockets.http11 import Request

from tests.support.websocket_peer import KINDS, Frames, Peer, serve_until_stdin_ends, websocket_server

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "client" / "client_cases.json").read_text())[
    "cases"
]


class ScriptedCase:
    """One run of a case: each connection follows its list of steps, and the last list holds for all later ones."""

    def __init__(self, number: int) -> None:
        self._script: list[list[Any]] = CASES[number]["server"]
        self.log: dict[str, Any] = {"connections": 0, "frames": [], "silent": 0, "done": 0}

    async def serve(self, peer: Peer, request: Request, frames: type[Frames]) -> None:
        number = min(self.log["connections"], len(self._script) - 1)
        self.log["connections"] += 1
        connection = _ScriptedConnection(peer, request, frames, self.log)
        for step in self._script[number]:
            name, value = (step, None) if isinstance(step, str) else next(iter(step.items()))
            await getattr(connection, name)(**({} if value is None else {"value": value}), **_rest(step))
        self.log["done"] += 1
        await peer.wait_closed()


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _header(value: Any) -> str:
    return value if isinstance(value, str) else formatdate(time() + value["in_seconds"], usegmt=True)


def _rest(step: Any) -> dict[str, Any]:
    return {} if isinstance(step, str) else dict(list(step.items())[1:])


class _ScriptedConnection:
    """The steps, each a method. What answers goes to the frame that came last."""

    def __init__(self, peer: Peer, request: Request, frames: type[Frames], log: dict[str, Any]) -> None:
        self._peer, self._request, self._frames, self._log = peer, request, frames, log
        self._ids: list[str] = []

    async def drop(self) -> None:
        """Hang up."""
        await self._peer.hang_up()

    async def cut(self) -> None:
        """Reset the connection."""
        self._peer.cut()

    async def refuse(
        self, value: int, headers: dict[str, Any] | None = None, body: Any = None, text: tuple[str, int] = ("", 0)
    ) -> None:
        """Answer the handshake with a status, and with a body in JSON or with a text that is repeated so many times.

        The value {"in_seconds": n} of a header becomes a date, and a list becomes several headers.
        """
        lines = [(name, _header(one)) for name, given in (headers or {}).items() for one in _listed(given)]
        content = text[0] * text[1] if body is None else json.dumps(body)
        await self._peer.refuse(value, lines, content.encode())

    async def accept(self) -> None:
        """Complete the WebSocket's handshake, and read HELLO or `identify`."""
        await self._peer.accept(self._request)
        await self._receive()

    async def welcome(self) -> None:
        await self._peer.send(self._frames.welcome())

    async def silence(self) -> None:
        """Answer nothing, until the client hangs up."""
        self._log["silent"] += 1
        await self._peer.wait_closed()

    async def receive(self, value: int = 1) -> None:
        """Read frames of the client."""
        for _ in range(value):
            frame_id, body = await self._receive()
            self._ids.append(frame_id)
            self._log["frames"].append(body.strip())

    async def acknowledge(self, value: int = -1) -> None:
        """Answer the last frame, or the one with this number on the connection."""
        await self._peer.send(self._frames.acknowledgement(self._ids[value]))

    async def acknowledge_unknown(self, value: int) -> None:
        """Answer so many frames that the client never sent."""
        for number in range(value):
            await self._peer.send(self._frames.acknowledgement(f"nobody-{number}"))

    async def acknowledge_nothing(self) -> None:
        """Answer without the id of any frame."""
        await self._peer.send(self._frames.acknowledgement(""))

    async def error(self, value: str) -> None:
        await self._peer.send(self._frames.error(self._ids[-1] if self._ids else "", value))

    async def deny(self, value: int | None = None) -> None:
        """Deny the last frame, or the connection, with a wait in milliseconds; none if it has no value."""
        await self._peer.send(self._frames.denial(self._ids[-1] if self._ids else "", value))

    async def unreadable(self, value: int) -> None:
        """Send so many frames that nobody can read."""
        for number in range(value):
            await self._peer.send(self._frames.unreadable[number % len(self._frames.unreadable)])

    async def message(self, value: str) -> None:
        """Send a message of another agent."""
        await self._peer.send(self._frames.message(value))

    async def going_away(self, value: int) -> None:
        """Announce a restart; of the hub's `/ws` only."""
        await self._peer.send(json.dumps({"type": "going_away", "retry_after_ms": value}))

    async def part(self) -> None:
        """Send half of an answer to the last frame, and reset the connection."""
        await self._peer.send(self._frames.acknowledgement(self._ids[-1]), 0.5)
        self._peer.cut()

    async def half_close(self) -> None:
        """Send nothing more, and go on reading."""
        await self._peer.half_close()

    async def close(self, value: int, reason: str = "") -> None:
        """Close the WebSocket as a good server does."""
        await self._peer.close(value, reason)

    async def close_only(self, value: int) -> None:
        """Send a close frame, and neither hang up nor wait for the answer."""
        await self._peer.send_close(value, "")

    async def serve(self) -> None:
        """Acknowledge everything from now on."""
        while True:
            await self.receive()
            await self.acknowledge()

    async def _receive(self) -> tuple[str, str]:
        frame = await self._peer.receive()
        if frame is None:
            raise EOFError
        return self._frames.read(frame)


@asynccontextmanager
async def case_server(runs: dict[str, ScriptedCase]) -> AsyncIterator[int]:
    """The port of such a server in this event loop, until the block ends. `runs` gets the runs by their paths."""

    async def serve(peer: Peer, request: Request) -> None:
        name, _, kind = request.path.rpartition("/")
        run = runs.setdefault(name, ScriptedCase(int(name.split("/")[1])))
        if kind == "log":
            await peer.answer(run.log)
        else:
            await run.serve(peer, request, KINDS[f"/{kind}"])

    async with websocket_server(serve) as port:
        yield port


if __name__ == "__main__":
    asyncio.run(serve_until_stdin_ends(case_server({})))
