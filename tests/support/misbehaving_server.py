"""A server that misbehaves at random, by a seed, and then behaves; for the clients in Python and in TypeScript.

Each seed is a server of its own: `/17/relay` and `/17/ws` are the sockets of seed 17, and `GET /17/relay/log` says what
has happened at the first of them:

    {"connections": [{"at": 12.5, "answered": true}],   when each came, in milliseconds of the server's clock, and
                                                        whether anything was sent that makes it a success
     "accepted": [[0, "id", "body"]],                   what was taken, in order, with the number of the connection
     "messages": ["m-0-1"],                             what was sent to the client, in order
     "behaves": true}                                   whether it has stopped to misbehave

What is acknowledged was accepted before. It never refuses the client: all that it does is a lost connection, a denial,
or a refused message. It misbehaves on the first connections only, so that a run comes to an end.

`python -m tests.support.misbehaving_server` prints its port, and ends when its input does.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from random import Random
from typing import Any, Final

from websockets.frames import Opcode
from websockets.http11 import Request

from tests.support.websocket_peer import KINDS, Frames, Peer, serve_until_stdin_ends, websocket_server

_CLOSE_CODES: Final = (999, 1000, 1001, 1002, 1004, 1006, 1007, 1008, 1011, 1012, 1013, 3000, 4000, 4999, 5000)
_REASONS: Final = (
    "",
    "goodbye",
    "restarting; retry in 0 ms",
    "restarting; retry in 40 ms",
    "retry in -1 ms",
    "\u2603" * 40,
)
_STATUSES: Final = (408, 425, 429, 500, 502, 503, 504)
_RETRY_AFTER: Final = ("", "0", "-1", "soon", "0.5", "1", "Thu, 01 Jan 1970 00:00:00 GMT", "9" * 400)
_LONGEST_DELAY: Final = 0.004  # seconds

Step = Callable[[], Coroutine[Any, Any, object]]


class _Over(Exception):
    """This connection is not used any more."""


class MisbehavingServer:
    """The server of one seed and kind."""

    def __init__(self, seed: str, frames: type[Frames]) -> None:
        self.seed, self.frames = seed, frames
        random = Random(seed)
        self.bad_connections: Final = random.randint(5, 9)
        self.stubborn_connections: Final = random.choice((0, 0, 5))
        """The first ones, which it sends away in the same way each time."""
        self.connections: list[dict[str, Any]] = []
        self.accepted: list[tuple[int, str, str]] = []
        self.messages: list[str] = []

    def log(self) -> dict[str, Any]:
        return {
            "connections": self.connections,
            "accepted": self.accepted,
            "messages": self.messages,
            "behaves": len(self.connections) > self.bad_connections,
        }

    async def serve(self, peer: Peer, request: Request) -> None:
        number = len(self.connections)
        self.connections.append({"at": time.monotonic() * 1000, "answered": False})
        try:
            if number < self.bad_connections:
                await _BadConnection(self, number, peer, request).run()
            else:
                await _GoodConnection(self, number, peer, request).run()
        except _Over:
            peer.cut()


class _GoodConnection:
    """One that behaves: it welcomes, and accepts and acknowledges everything."""

    def __init__(self, server: MisbehavingServer, number: int, peer: Peer, request: Request) -> None:
        self._server, self._number, self._peer, self._request = server, number, peer, request
        self._frames = server.frames

    async def run(self) -> None:
        if not await self._peer.accept(self._request):
            return
        await self._receive()
        await self._peer.send(self._frames.welcome())
        while True:
            await self._acknowledge(self._accept(*await self._receive()))

    async def _receive(self) -> tuple[str, str]:
        frame = await self._peer.receive()
        if frame is None:
            raise _Over
        return self._frames.read(frame)

    def _accept(self, frame_id: str, body: str) -> str:
        self._server.accepted.append((self._number, frame_id, body))
        return frame_id

    async def _acknowledge(self, frame_id: str, share: float = 1.0) -> None:
        self._server.connections[self._number]["answered"] = True
        await self._peer.send(self._frames.acknowledgement(frame_id), share)


class _BadConnection(_GoodConnection):
    """One that does something else at every step, by the seed and its number."""

    def __init__(self, server: MisbehavingServer, number: int, peer: Peer, request: Request) -> None:
        super().__init__(server, number, peer, request)
        self._random = Random(f"{server.seed}/{max(number, server.stubborn_connections)}")
        self._late: list[str] = []  # to be acknowledged after a later one

    async def run(self) -> None:
        await self._pause()
        if self._number < self._server.stubborn_connections:
            await self._choose((2, self._refuse), (4, self._deny_at_once), (2, self._close_at_once), (1, self._hang_up))
        await self._choose((6, self._open), (1, self._cut), (1, self._hang_up), (2, self._refuse), (1, self._silence))
        await self._receive()
        await self._pause()
        unwelcome: list[tuple[int, Step]] = [
            (1, self._cut), (1, self._silence), (1, self._deny_connection), (1, self._unavailable), (1, self._close),
            (1, self._garbage), (1, self._half_close),
        ]  # fmt: skip
        await self._choose((14, self._welcome), (2, self._welcome_late), *unwelcome)
        while True:
            frame_id, body = await self._receive()
            await self._pause()
            await self._answer(frame_id, body)

    async def _answer(self, frame_id: str, body: str) -> None:
        async def acknowledge() -> None:
            await self._acknowledge(self._accept(frame_id, body))
            for late in self._late:
                await self._acknowledge(late)
            self._late.clear()

        async def acknowledge_twice() -> None:
            for _ in range(2):
                await self._acknowledge(frame_id if _ else self._accept(frame_id, body))

        async def acknowledge_late() -> None:
            self._late.append(self._accept(frame_id, body))

        async def acknowledge_another() -> None:
            await self._peer.send(self._frames.acknowledgement("nobody"))
            await acknowledge()

        async def accept_and_cut() -> None:
            self._accept(frame_id, body)
            await self._cut()

        async def acknowledge_and_cut() -> None:
            await self._acknowledge(self._accept(frame_id, body))
            await self._cut()

        async def acknowledge_in_part() -> None:
            await self._acknowledge(self._accept(frame_id, body), self._random.random())
            await self._cut()

        async def accept_and_close() -> None:
            await self._acknowledge(self._accept(frame_id, body))
            await self._close()

        async def garbage_and_acknowledge() -> None:
            await self._garbage()
            await acknowledge()

        async def message_and_acknowledge() -> None:
            await self._message()
            await acknowledge()

        async def garbage_instead() -> None:
            self._accept(frame_id, body)
            await self._garbage()

        async def deny() -> None:
            await self._peer.send(self._frames.denial(frame_id, self._random.choice((-5, 0, 1, 5, 20, 200))))

        async def refuse() -> None:
            self._server.connections[self._number]["answered"] = True
            await self._peer.send(self._frames.error(frame_id, "busy"))

        await self._choose(
            (20, acknowledge), (3, acknowledge_twice), (1, acknowledge_late), (2, acknowledge_another),
            (2, accept_and_cut), (2, acknowledge_and_cut), (2, acknowledge_in_part), (2, accept_and_close),
            (2, garbage_and_acknowledge), (1, garbage_instead), (6, message_and_acknowledge), (6, deny), (2, refuse),
            (1, self._silence), (1, self._cut), (1, self._close), (1, self._half_close), (1, self._ping),
            (1, self._nonsense),
        )  # fmt: skip

    async def _choose(self, *steps: tuple[int, Step]) -> None:
        (step,) = self._random.choices([step for _, step in steps], [weight for weight, _ in steps])
        await step()

    async def _pause(self) -> None:
        if self._random.random() < 0.3:
            await asyncio.sleep(self._random.random() * _LONGEST_DELAY)

    # Before the welcome ----------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        if not await self._peer.accept(self._request):
            raise _Over

    async def _refuse(self) -> None:
        headers = [("Retry-After", self._random.choice(_RETRY_AFTER)) for _ in range(self._random.randint(0, 2))]
        await self._peer.refuse(self._random.choice(_STATUSES), headers, b"{" * self._random.randint(0, 40))
        raise _Over

    async def _welcome(self) -> None:
        await self._peer.send(self._frames.welcome())

    async def _welcome_late(self) -> None:
        await self._message()
        await self._welcome()

    async def _deny_connection(self) -> None:
        await self._peer.send(self._frames.denial("", self._random.choice((None, -1, 0, 1, 30, 500))))
        await self._silence()

    async def _deny_at_once(self) -> None:
        await self._open()
        await self._receive()
        await self._deny_connection()

    async def _close_at_once(self) -> None:
        await self._open()
        await self._receive()
        await self._welcome()
        await self._close()

    async def _unavailable(self) -> None:
        code = self._random.choice(("unavailable", "internal", "too_many_connections", "something_new"))
        await self._peer.send(self._frames.error("", code))
        await self._silence()

    # At any time -----------------------------------------------------------------------------------------------------

    async def _message(self) -> None:
        body = f"m-{self._number}-{len(self._server.messages)}"
        self._server.messages.append(body)
        self._server.connections[self._number]["answered"] = True
        await self._peer.send(self._frames.message(body))

    async def _garbage(self) -> None:
        await self._peer.send(self._random.choice(self._frames.unreadable))

    async def _nonsense(self) -> None:
        """Bytes that are no WebSocket frame."""
        await self._peer.write(self._random.choice(list(Opcode)), self._random.randbytes(200), self._random.random())
        await self._peer.write(self._random.choice(list(Opcode)), self._random.randbytes(200))
        await self._silence()

    async def _ping(self) -> None:
        for _ in range(20):
            await self._peer.write(Opcode.PING, b"?")

    async def _close(self) -> None:
        code, reason = self._random.choice(_CLOSE_CODES), self._random.choice(_REASONS)
        if self._random.random() < 0.1:
            await self._peer.send_close(code, reason)
            await self._silence()
        await self._peer.close(code, reason)
        raise _Over

    async def _half_close(self) -> None:
        await self._peer.half_close()
        await self._silence()

    async def _hang_up(self) -> None:
        await self._peer.hang_up()
        raise _Over

    async def _cut(self) -> None:
        raise _Over

    async def _silence(self) -> None:
        await self._peer.wait_closed()
        raise _Over


@asynccontextmanager
async def misbehaving_server() -> AsyncIterator[int]:
    """The port of such a server in this event loop, until the block ends."""
    servers: dict[str, MisbehavingServer] = {}

    async def serve(peer: Peer, request: Request) -> None:
        path = request.path.removesuffix("/log")
        _, seed, kind = path.split("/")
        server = servers.setdefault(path, MisbehavingServer(seed, KINDS[f"/{kind}"]))
        if path != request.path:
            await peer.answer(server.log())
        else:
            await server.serve(peer, request)

    async with websocket_server(serve) as port:
        yield port


if __name__ == "__main__":
    asyncio.run(serve_until_stdin_ends(misbehaving_server()))
