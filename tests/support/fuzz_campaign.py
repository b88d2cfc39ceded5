"""Sends what a fuzzer makes to every entrance of a hub, over many connections at once."""

import asyncio
import json
import re
from contextlib import suppress
from itertools import count
from typing import Any

from headgate.hub.connections.connection import GuardedConnection
from headgate.proto import envelope_pb2 as wire
from tests.support.fuzzer import ALMOST, GOOD, NOISE, FuzzedRequest, Fuzzer, websocket_frame
from tests.support.response_checker import ResponseChecker, read
from tests.support.valkey import PATIENCE

AGENTS = [f"agent-{number}" for number in range(8)]
HANDSHAKE = (
    "HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
AT_ONCE = 24
PUSHED = {"message", "channel_message", "lagged", "task_assigned", "going_away"}
KEPT = 5.0
"""Seconds for which the hub keeps a connection over which nothing comes, which a busy machine may need."""

MOST_CLOSED = 3
"""Connections that may be closed before all requests are answered that were sent over them at once."""


class RawConnection:
    """One WebSocket, as its bytes.

    What belongs together is written at once: a hub that closes while somebody writes cuts him off from its last word.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._ended = False

    @classmethod
    async def open(cls, port: int, path: str) -> "RawConnection | None":
        """A WebSocket, or None if the hub takes no more of them now."""
        begin = asyncio.get_running_loop().time()
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**21)
        writer.write(f"GET {path} {HANDSHAKE}\r\n".encode())
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
        except (asyncio.IncompleteReadError, ConnectionError):
            if asyncio.get_running_loop().time() - begin < GuardedConnection.head_within:
                raise
            return await cls.open(port, path)  # it came too late
        if head.startswith(b"HTTP/1.1 429"):
            writer.transport.abort()
            return None
        assert head.startswith(b"HTTP/1.1 101"), head
        return cls(reader, writer)

    async def hear(self) -> tuple[int, bytes]:
        """The opcode and payload of the next frame; (8, b"") when the connection is gone without a word."""
        try:
            async with asyncio.timeout(PATIENCE):
                first, length = await self.reader.readexactly(2)
                if length >= 126:
                    length = int.from_bytes(await self.reader.readexactly(2 if length == 126 else 8), "big")
                opcode, payload = first & 0x0F, await self.reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return 8, b""
        if opcode == 9 and not self._ended:
            self.writer.write(websocket_frame(10, payload))
        return opcode, payload

    def end(self, last: bytes) -> None:
        """Write something, and nothing more."""
        self._ended = True
        self.writer.write(last)
        _end(self.writer)

    async def rest(self) -> int:
        """Read until the end; the code of the close, 0 if there was none."""
        code = 0
        while True:
            opcode, payload = await self.hear()
            if opcode == 8 and payload:
                code = int.from_bytes(payload[:2], "big")
            elif opcode == 8:
                return code

    def close(self) -> None:
        self.writer.transport.abort()


class FuzzCampaign:
    """Sends everything to one hub, over many connections at once, until it was enough."""

    def __init__(self, port: int, fuzzer: Fuzzer, checker: ResponseChecker, enough: int) -> None:
        self._port, self._fuzzer, self._checker, self._enough = port, fuzzer, checker, enough
        self._random = fuzzer.random
        self._tasks: dict[str, list[str]] = {agent: [] for agent in AGENTS}
        self._numbers = count(1)
        self._closed = 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._worker())

    async def _worker(self) -> None:
        kinds = (self._agent, self._relay, self._requests, self._handshake)
        while self._checker.total < self._enough and len(self._checker.problems) < 20:
            await self._random.choices(kinds, (8, 3, 8, 1))[0]()

    async def _open(self, path: str) -> RawConnection | None:
        opened = await RawConnection.open(self._port, path)
        if opened is None:
            self._checker.sent["handshake", GOOD] += 1
            self._checker.seen["handshake 429"] += 1
        return opened

    # /ws

    async def _agent(self) -> None:
        """A conversation at /ws: batches of frames, each with a ping after it, and perhaps a bad end."""
        fuzzer, checker, agent = self._fuzzer, self._checker, self._random.choice(AGENTS)
        connection = await self._open("/ws")
        if connection is None:
            return
        try:
            greeting = b""
            if self._random.random() < 0.95:
                identify = {"type": "identify", "agent_id": agent, "token": fuzzer.tokens[agent]}
                greeting = websocket_frame(1, json.dumps(identify).encode())
            for _ in range(3):
                batch = [fuzzer.frame(self._tasks[agent]) for _ in range(7)]
                if not await self._batch(connection, agent, batch, greeting):
                    return
                greeting = b""
            if self._random.random() < 0.4:
                ill = fuzzer.ill_message()
                connection.end(ill)
                checker.sent["ws", NOISE] += 1
                checker.closed(await connection.rest(), ill[:100], otherwise=(0, 1000, 1005))
        finally:
            connection.close()

    async def _batch(
        self, connection: RawConnection, agent: str, batch: list[tuple[str, bytes, str]], greeting: bytes
    ) -> bool:
        """Send frames and hear an answer to each; whether the connection is still open."""
        checker, marker = self._checker, f"last-{next(self._numbers)}"
        last = websocket_frame(1, json.dumps({"type": "ping", "id": marker}).encode())
        connection.writer.write(b"".join([greeting, *(self._fuzzer.message(text) for _, text, _ in batch), last]))
        answers, deleted = -1 if greeting else 0, 0
        sent = (agent, [text[:300] for _, text, _ in batch])
        while True:
            opcode, payload = await connection.hear()
            if opcode == 8:
                drowned = _drowned([text for _, text, _ in batch]) or not all(_is_text(text) for _, text, _ in batch)
                checker.closed(int.from_bytes(payload[:2], "big"), sent, otherwise=(0,) * drowned)
                self._count("ws", batch, answers)
                return False
            if opcode in (9, 10):
                continue
            heard = checker.frame(payload, sent)
            if heard["type"] == "task_assigned":
                self._tasks[agent].append(heard["task_id"])
                del self._tasks[agent][:-3]
                self._fuzzer.known["task_id"].append(heard["task_id"])
            if heard["type"] in PUSHED or heard["type"] == "rate_limit_warning":
                continue
            if heard.get("id") == marker:
                break
            answers += 1
            deleted += heard["type"] == "unsubscribed"  # perhaps no answer, but the end of a chat channel
        self._count("ws", batch, answers)
        if not answers - deleted <= len(batch) <= answers:
            checker.blame(f"{len(batch)} frames, {answers} answers", sent, "")
        return True

    def _count(self, entrance: str, batch: list[tuple[str, bytes, str]], answers: int) -> None:
        for quality, *_ in batch[: max(answers, 0)]:
            self._checker.sent[entrance, quality] += 1

    # /relay

    async def _relay(self) -> None:
        """A conversation at /relay."""
        fuzzer, checker, agent = self._fuzzer, self._checker, self._random.choice(AGENTS)
        connection = await self._open("/relay")
        if connection is None:
            return
        try:
            hello = wire.Hello(address=agent, token=fuzzer.tokens[agent])
            greeting = wire.Envelope(id="hello", type=wire.MESSAGE_TYPE_HELLO, hello=hello)
            inputs = [fuzzer.greeting(agent) for _ in range(self._random.choice((0, 0, 2)))]
            before = len(inputs)
            inputs += [(GOOD, greeting.SerializeToString()), *(fuzzer.envelope() for _ in range(20))]
            frames = [websocket_frame(2, envelope) for _, envelope in inputs]
            for number in range(before + 1, len(frames)):
                if self._random.random() < 0.01:
                    frames[number] = websocket_frame(1, b"text")
            last = wire.Envelope(id="last", type=wire.MESSAGE_TYPE_DATA, to="nobody", data=wire.Data())
            connection.writer.write(b"".join([*frames, websocket_frame(2, last.SerializeToString())]))
            answers = 0
            while True:
                opcode, payload = await connection.hear()
                if opcode == 8:
                    checker.closed(int.from_bytes(payload[:2], "big"), inputs, otherwise=(0,) * _drowned(frames))
                    break
                if opcode in (9, 10):
                    continue
                heard = checker.envelope(payload, inputs)
                if heard.in_reply_to == "last" and heard.type != wire.MESSAGE_TYPE_DATA:
                    if answers != len(inputs):
                        checker.blame(f"{len(inputs)} envelopes, {answers} answers", inputs, "")
                    break
                answers += heard.type != wire.MESSAGE_TYPE_DATA
            for quality, _ in inputs[:answers]:
                checker.sent["relay", quality] += 1
        finally:
            connection.close()

    async def _handshake(self) -> None:
        """Almost the beginning of a WebSocket, which is answered like any request."""
        raw, begin = self._fuzzer.handshake(), self._now()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(raw)
            head = b""
            with suppress(ConnectionError):
                head = await asyncio.wait_for(reader.readline(), PATIENCE)
            if not head and self._now() - begin >= GuardedConnection.head_within:
                return  # it came too late
            self._checker.sent["handshake", ALMOST] += 1
            self._checker.seen[f"handshake {head[9:12].decode()}"] += 1
            if not re.match(rb"HTTP/1.1 (101|200|307|4\d\d) ", head):
                self._checker.blame("a handshake", raw, head)
        except TimeoutError:
            self._checker.blame("no answer to a handshake", raw, "")
        finally:
            writer.transport.abort()

    # HTTP

    async def _requests(self) -> None:
        """Requests one after the other without waiting for answers, over one connection."""
        requests: list[FuzzedRequest] = []
        while len(requests) < 12 and not (requests and requests[-1].last):
            requests.append(self._fuzzer.request())
        since = self._now()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**22)
        try:
            writer.write(b"".join(request.raw for request in requests if not request.last))
            for request in requests:
                if request.last:
                    writer.write(request.raw)
                    _end(writer)
                self._checker.sent["http", request.quality] += 1
                if not await self._answered(reader, request, since):
                    break
                since = self._now()
        except ConnectionError:
            if not requests[-1].last and self._now() - since < KEPT:
                self._checker.blame("the connection was lost", requests[-1], "")
        finally:
            writer.transport.abort()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _answered(self, reader: asyncio.StreamReader, request: FuzzedRequest, since: float) -> bool:
        """Read the answer to a request; whether another can follow."""
        checker = self._checker
        try:
            async with asyncio.timeout(PATIENCE):
                status, headers, body = await _response(reader, head_only=request.method == "HEAD")
        except asyncio.IncompleteReadError as ended:
            if ended.partial or not (request.last or self._now() - since >= KEPT):
                await self._send_again(request, ended.partial)
            return False
        except TimeoutError:
            checker.blame("no answer in time", request, "")
            return False
        checker.response(status, headers, body, request)
        if request.quality == GOOD and status < 300 and body and headers["content-type"] == "application/json":
            self._learn(request, read(body))
        return headers.get("connection") != "close" and not request.last

    async def _send_again(self, request: FuzzedRequest, partial: bytes) -> None:
        """Send a request alone. A server may close a connection between two answers, which must be rare."""
        self._closed += 1
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**22)
        answered = False
        try:
            writer.write(request.raw)
            with suppress(asyncio.IncompleteReadError, ConnectionError, TimeoutError):
                async with asyncio.timeout(PATIENCE):
                    await _response(reader, head_only=request.method == "HEAD")
                answered = True
        finally:
            writer.transport.abort()
        if partial or not answered or self._closed > MOST_CLOSED:
            self._checker.blame("no answer", request, partial)

    def _learn(self, request: FuzzedRequest, told: Any) -> None:
        """Take what the hub has made into what is known."""
        known = self._fuzzer.known
        if not isinstance(told, dict):
            return
        if "token" in told:
            self._fuzzer.spare.append(told["token"])
            known["agent"].append(told.get("agent_id") or told["name"])
        if "task_id" in told:
            known["task_id"].append(told["task_id"])
        if "lease_left" in told:
            known["hold_id"].append(told["id"])
        if "invitation" in told:
            known.setdefault("invitation", []).append(told["invitation"])


def _end(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):  # the hub may have closed already
        writer.write_eof()


def _drowned(sent: list[bytes]) -> bool:
    """Whether the word with which the hub closes can be lost, since it doesn't read all that was sent after it."""
    return sum(map(len, sent)) > 60_000


def _is_text(sent: bytes) -> bool:
    return sent.decode(errors="ignore").encode() == sent


async def _response(reader: asyncio.StreamReader, *, head_only: bool) -> tuple[int, dict[str, str], bytes]:
    status = 100
    headers: dict[str, str] = {}
    while status < 200:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(lines[0].split()[1])
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
    return status, headers, b"" if head_only else await reader.readexactly(int(headers["content-length"]))
