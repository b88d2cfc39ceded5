"""Whatever is sent to a hub, it answers as its documents say, or closes the connection; it makes no mistake itself."""

import asyncio
import json
import logging
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
from fuzzer import ALMOST, FRAMES, GOOD, NOISE, OPENAPI, Fuzzer, Request, websocket_frame
from google.protobuf.message import DecodeError
from hubs import VIEWER, running
from programs import ADMIN, Program
from servers import PATIENCE, wait_for
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from headgate.hub.hub import ROUTES
from headgate.hub.proto import envelope_pb2 as wire
from headgate.hub.reading import ImpatientHttp

AGENTS = [f"agent-{number}" for number in range(8)]
RAISED = """
[limits]
light = "1000000/second"
normal = "1000000/second"
heavy = "1000000/second"
[addresses]
limit = "1000000/second"
registration = "1000000/second"
[hub]
max_connections_per_address = 2000
relay_rate_limit = "off"
"""
HUGE = ["1000000/second", "60000000/minute burst 1000000", ["1000000/second", "unlimited"]]
ORDINARY = """
[addresses]
limit = "1000000/second"
registration = "1000000/second"
[hub]
registration = "invitation"
"""
HANDSHAKE = (
    "HTTP/1.1\r\nHost: hub\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
AT_ONCE = 24
PAGES = {route.media for route in ROUTES} - {"application/json"}
MOST_MEMORY = 100e6
PUSHED = {"message", "channel_message", "lagged", "task_assigned", "going_away"}
BY_THE_HUB = {1002, 1007, 1008, 1009}
"""The codes with which a hub closes connections that sent something unusable."""
LEAKS = (b"Traceback (most recent", b"site-packages", b'File \\"', b"/headgate/hub/", b"sqlite3.", b"msgspec.")


def read(text: bytes) -> Any:
    """JSON that has to be valid; of numbers that are passed on from agents, only those that Python reads."""

    def refuse(text: str) -> None:
        raise ValueError(f"{text} isn't JSON")

    return json.loads(text, parse_constant=refuse, parse_int=lambda digits: int(digits) if len(digits) < 4000 else 0)


class Judge:
    """Looks at every answer. Keeps what is wrong, and counts what was sent and what came back."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        self.sent: Counter[tuple[str, str]] = Counter()
        """Inputs by entrance and how good they were: those that were answered, or ended the connection."""
        self.seen: Counter[str] = Counter()
        self._answers: dict[tuple[str, str, int], jsonschema_rs.Draft202012Validator] = {}
        self._frames = {
            kind: jsonschema_rs.Draft202012Validator({**schema, "$defs": FRAMES["$defs"]})
            for kind, schema in FRAMES["from_the_hub"].items()
        }

    @property
    def total(self) -> int:
        return sum(self.sent.values())

    def blame(self, what: str, sent: object, answer: object) -> None:
        self.problems.append(f"{what}\n  sent: {str(sent)[:700]}\n  answer: {str(answer)[:700]}")

    def frame(self, payload: bytes, sent: object) -> dict[str, Any]:
        """What a text frame of the hub says."""
        self._leak(payload, sent)
        heard: dict[str, Any] = read(payload)
        kind = heard.get("type", "")
        self.seen[f"ws {kind}"] += 1
        try:
            self._frames[kind].validate(heard)
        except (KeyError, jsonschema_rs.ValidationError) as error:
            self.blame(f"a frame that isn't in the schemas: {error}", sent, payload)
        if kind == "error":
            self.seen[f"ws error {heard['error']}"] += 1
            if heard["error"] in ("internal", "unavailable"):
                self.blame("the hub made a mistake", sent, payload)
        return heard

    def envelope(self, payload: bytes, sent: object) -> wire.Envelope:
        self._leak(payload, sent)
        try:
            heard = wire.Envelope.FromString(payload)
        except DecodeError:
            self.blame("not an envelope", sent, payload)
            return wire.Envelope()
        self.seen[f"relay {wire.MessageType.Name(heard.type)} {heard.error.code}".strip()] += 1
        return heard

    def response(self, status: int, headers: dict[str, str], body: bytes, request: Request) -> None:
        self._leak(body, request)
        route = request.route
        self.seen[f"http {status}"] += 1
        if status >= 500 and b'"queue_full"' not in body:
            self.blame(f"status {status}", request, body)
        media = headers.get("content-type")
        if status in (200, 307) and media in PAGES:
            return
        if media != "application/json":
            if (status, body) != (400, b"Invalid HTTP request received."):
                self.blame("not JSON", request, (status, headers, body))
            return
        if request.method == "HEAD":
            return
        told = read(body)
        if status >= 400:
            self.seen[f"http error {told['error']}"] += 1
        if request.quality == GOOD and route is not None:
            if status == route.status:
                self.seen[f"{route.method} {route.path}"] += 1
            self._as_documented(route.method, route.path, status, told, request)

    def _as_documented(self, method: str, path: str, status: int, told: object, request: Request) -> None:
        which = (method, path, status)
        if which not in self._answers:
            found = OPENAPI["paths"][path][method.lower()]["responses"].get(str(status))
            if found is None:
                self.blame(f"{method} {path}: status {status} isn't documented", request, told)
                return
            schema = found["content"]["application/json"]["schema"]
            self._answers[which] = jsonschema_rs.Draft202012Validator({**schema, "components": OPENAPI["components"]})
        try:
            self._answers[which].validate(told)
        except jsonschema_rs.ValidationError as error:
            self.blame(f"{method} {path}: not as documented: {error}", request, told)

    def closed(self, code: int, sent: object, *, otherwise: tuple[int, ...] = ()) -> None:
        self.seen[f"closed {code}"] += 1
        if code not in BY_THE_HUB and code not in otherwise:
            self.blame(f"closed with {code}", sent, "")

    def _leak(self, answer: bytes, sent: object) -> None:
        for leak in LEAKS:
            if leak in answer:
                self.blame(f"{leak!r} in an answer", sent, answer)


# WebSockets -----------------------------------------------------------------------------------------------------------


class Wire:
    """One WebSocket, as its bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, port: int, path: str) -> "Wire | None":
        """A WebSocket, or None if the hub takes no more of them now."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**21)
        writer.write(f"GET {path} {HANDSHAKE}\r\n".encode())
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
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
                return first & 0x0F, await self.reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return 8, b""

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


class Hunt:
    """Sends everything to one hub, over many connections at once, until it was enough."""

    def __init__(self, port: int, fuzzer: Fuzzer, judge: Judge, enough: int) -> None:
        self._port, self._fuzzer, self._judge, self._enough = port, fuzzer, judge, enough
        self._random = fuzzer.random
        self._tasks: dict[str, list[str]] = {agent: [] for agent in AGENTS}
        self._numbers = count(1)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._worker())

    async def _worker(self) -> None:
        kinds = (self._agent, self._relay, self._requests, self._handshake)
        while self._judge.total < self._enough and len(self._judge.problems) < 20:
            await self._random.choices(kinds, (8, 3, 8, 1))[0]()

    async def _open(self, path: str) -> Wire | None:
        opened = await Wire.open(self._port, path)
        if opened is None:
            self._judge.sent["handshake", GOOD] += 1
            self._judge.seen["handshake 429"] += 1
        return opened

    # /ws

    async def _agent(self) -> None:
        """A conversation at /ws: batches of frames, each with a ping after it, and perhaps a bad end."""
        fuzzer, judge, agent = self._fuzzer, self._judge, self._random.choice(AGENTS)
        wire_ = await self._open("/ws")
        if wire_ is None:
            return
        try:
            greeted = self._random.random() < 0.95
            if greeted:
                identify = {"type": "identify", "agent_id": agent, "token": fuzzer.tokens[agent]}
                wire_.writer.write(websocket_frame(1, json.dumps(identify).encode()))
            for _ in range(3):
                batch = [fuzzer.frame(self._tasks[agent]) for _ in range(7)]
                if not await self._batch(wire_, agent, batch, first=greeted):
                    return
                greeted = False
            if self._random.random() < 0.4:
                ill = fuzzer.ill_message()
                wire_.writer.write(ill)
                _end(wire_.writer)
                judge.sent["ws", NOISE] += 1
                judge.closed(await wire_.rest(), ill[:100], otherwise=(0, 1000, 1005))
        finally:
            wire_.close()

    async def _batch(self, wire_: Wire, agent: str, batch: list[tuple[str, bytes, str]], *, first: bool) -> bool:
        """Send frames and hear an answer to each; whether the connection is still open."""
        judge, marker = self._judge, f"last-{next(self._numbers)}"
        for _, text, _ in batch:
            wire_.writer.write(self._fuzzer.message(text))
        wire_.writer.write(websocket_frame(1, json.dumps({"type": "ping", "id": marker}).encode()))
        answers = -1 if first else 0
        sent = (agent, [text[:300] for _, text, _ in batch])
        while True:
            opcode, payload = await wire_.hear()
            if opcode == 8:
                judge.closed(int.from_bytes(payload[:2], "big"), sent, otherwise=(0,) * _drowned(batch))
                self._count("ws", batch, answers)
                return False
            if opcode in (9, 10):
                continue
            heard = judge.frame(payload, sent)
            if heard["type"] == "task_assigned":
                self._tasks[agent].append(heard["task_id"])
                del self._tasks[agent][:-3]
                self._fuzzer.known["task_id"].append(heard["task_id"])
            if heard["type"] in PUSHED or heard["type"] == "rate_limit_warning":
                continue
            if heard.get("id") == marker:
                break
            answers += 1
        self._count("ws", batch, answers)
        if answers != len(batch):
            judge.blame(f"{len(batch)} frames, {answers} answers", sent, "")
        return True

    def _count(self, entrance: str, batch: list[tuple[str, bytes, str]], answers: int) -> None:
        for quality, *_ in batch[: max(answers, 0)]:
            self._judge.sent[entrance, quality] += 1

    # /relay

    async def _relay(self) -> None:
        """A conversation at /relay."""
        fuzzer, judge, agent = self._fuzzer, self._judge, self._random.choice(AGENTS)
        wire_ = await self._open("/relay")
        if wire_ is None:
            return
        try:
            hello = wire.Hello(address=agent, token=fuzzer.tokens[agent])
            greeting = wire.Envelope(id="hello", type=wire.MESSAGE_TYPE_HELLO, hello=hello)
            inputs = [fuzzer.greeting(agent) for _ in range(self._random.choice((0, 0, 2)))]
            before = len(inputs)
            inputs += [(GOOD, greeting.SerializeToString()), *(fuzzer.envelope() for _ in range(20))]
            for number, (_, envelope) in enumerate(inputs):
                text = number > before and self._random.random() < 0.01
                wire_.writer.write(websocket_frame(1 if text else 2, b"text" if text else envelope))
            last = wire.Envelope(id="last", type=wire.MESSAGE_TYPE_DATA, to="nobody", data=wire.Data())
            wire_.writer.write(websocket_frame(2, last.SerializeToString()))
            answers = 0
            while True:
                opcode, payload = await wire_.hear()
                if opcode == 8:
                    judge.closed(int.from_bytes(payload[:2], "big"), inputs)
                    break
                if opcode in (9, 10):
                    continue
                heard = judge.envelope(payload, inputs)
                if heard.in_reply_to == "last" and heard.type != wire.MESSAGE_TYPE_DATA:
                    if answers != len(inputs):
                        judge.blame(f"{len(inputs)} envelopes, {answers} answers", inputs, "")
                    break
                answers += heard.type != wire.MESSAGE_TYPE_DATA
            for quality, _ in inputs[:answers]:
                judge.sent["relay", quality] += 1
        finally:
            wire_.close()

    async def _handshake(self) -> None:
        """Almost the beginning of a WebSocket, which is answered like any request."""
        raw = self._fuzzer.handshake()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(raw)
            head = await asyncio.wait_for(reader.readline(), PATIENCE)
            self._judge.sent["handshake", ALMOST] += 1
            self._judge.seen[f"handshake {head[9:12].decode()}"] += 1
            if not re.match(rb"HTTP/1.1 (101|200|4\d\d) ", head):
                self._judge.blame("a handshake", raw, head)
        except TimeoutError:
            self._judge.blame("no answer to a handshake", raw, "")
        finally:
            writer.transport.abort()

    # HTTP

    async def _requests(self) -> None:
        """Requests one after the other without waiting for answers, over one connection."""
        requests: list[Request] = []
        while len(requests) < 12 and not (requests and requests[-1].last):
            requests.append(self._fuzzer.request())
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**22)
        try:
            writing = asyncio.create_task(self._write(writer, requests))
            for request in requests:
                if request.last:
                    await writing
                    writer.write(request.raw)
                    _end(writer)
                self._judge.sent["http", request.quality] += 1
                if not await self._answered(reader, request):
                    break
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
        except ConnectionError:
            if not requests[-1].last:
                self._judge.blame("the connection was lost", requests[-1], "")
        finally:
            writer.transport.abort()

    async def _write(self, writer: asyncio.StreamWriter, requests: list[Request]) -> None:
        for request in requests:
            if not request.last:
                writer.write(request.raw)
                await writer.drain()

    async def _answered(self, reader: asyncio.StreamReader, request: Request) -> bool:
        """Read the answer to a request; whether another can follow."""
        judge = self._judge
        try:
            async with asyncio.timeout(PATIENCE):
                status, headers, body = await _response(reader, head_only=request.method == "HEAD")
        except asyncio.IncompleteReadError as ended:
            if not request.last or ended.partial:
                judge.blame("no answer", request, ended.partial)
            return False
        except TimeoutError:
            judge.blame("no answer in time", request, "")
            return False
        judge.response(status, headers, body, request)
        if request.quality == GOOD and status < 300 and body and headers["content-type"] == "application/json":
            self._learn(request, read(body))
        return headers.get("connection") != "close" and not request.last

    def _learn(self, request: Request, told: Any) -> None:
        """Take what the hub has made into what is known."""
        known = self._fuzzer.known
        if not isinstance(told, dict):
            return
        if "token" in told:
            self._fuzzer.spare.append(told["token"])
            known["agent"].append(told["agent_id"])
        if "task_id" in told:
            known["task_id"].append(told["task_id"])
        if "invitation" in told:
            known.setdefault("invitation", []).append(told["invitation"])


def _end(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):  # the hub may have closed already
        writer.write_eof()


def _drowned(batch: list[tuple[str, bytes, str]]) -> bool:
    """Whether the word with which the hub closes can be lost, since it doesn't read all that was sent after it."""
    size = sum(len(text) for _, text, _ in batch)
    return size > 60_000 or any(text.decode(errors="ignore").encode() != text for _, text, _ in batch)


async def _response(reader: asyncio.StreamReader, *, head_only: bool) -> tuple[int, dict[str, str], bytes]:
    status = 100
    headers: dict[str, str] = {}
    while status < 200:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(lines[0].split()[1])
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
    return status, headers, b"" if head_only else await reader.readexactly(int(headers["content-length"]))


# The hub afterwards ---------------------------------------------------------------------------------------------------


@contextmanager
def fuzzed(folder: Path, config: str) -> Iterator[tuple[Program, dict[str, str], list[str]]]:
    """A hub, its agents, and a list for what is wrong.

    In the end nothing is, the hub still works, has grown little, has logged no mistake and no token, and stops.
    """
    file = folder / "headgate.toml"
    file.write_text(config)
    environment = {"HEADGATE_VIEWER_TOKEN": VIEWER}
    problems: list[str] = []
    hub = Program(folder / "data", "--config", str(file), "--log-format", "json", environment=environment)
    try:
        with hub.http() as client:
            tokens = {name: registered(client, name) for name in (*AGENTS, "victim-1")}
        with hub.http(tokens[AGENTS[0]]) as client:
            assert client.post("/api/channels", json={"name": "plans"}).status_code == 201
        before = hub.memory()
        yield hub, {name: tokens[name] for name in AGENTS}, problems
        grown = hub.memory() - before
        if not problems:
            works(hub)
    finally:
        code = hub.stop()
    secret = (ADMIN, VIEWER, *tokens.values())
    for line in hub.err:
        logged = json.loads(line)
        wrong = logged["level"] not in ("info", "warning") or "exception" in logged or "Traceback" in line
        if wrong or any(token in line for token in secret):
            problems.append(f"logged: {line[:3000]}")
    print(f"memory +{grown / 1e6:.1f} MB; {len(hub.err):,} lines of log")
    assert not problems, "\n".join(problems[:20])
    assert code == 0
    assert grown < MOST_MEMORY, f"{grown:,} bytes more"


def registered(client: httpx.Client, name: str) -> str:
    answer = client.post("/api/admin/agents", json={"agent_id": name})
    return str(answer.raise_for_status().json()["token"])


def connected(hub: Program) -> ClientConnection:
    """A WebSocket, as soon as the limit of the address lets one more in: within seconds."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return connect(f"ws://{hub}/ws", compression=None, proxy=None)
        except InvalidStatus as refused:
            if refused.response.status_code != 429 or time.monotonic() > deadline:
                raise


def works(hub: Program) -> None:
    """A new agent can do what agents do."""
    with hub.http() as client:
        assert client.get("/api/health").json()["status"] == "ok"
        name = "fresh"
        token = registered(client, name)
        for _ in range(len(AGENTS) + 1):  # some may go to agents whose end the hub hasn't noticed yet
            assert client.post("/api/admin/tasks", json={"payload": None}).status_code == 201
    with hub.http(token) as client, connected(hub) as socket:

        def ask(kind: str, expected: str, **fields: object) -> dict[str, Any]:
            socket.send(json.dumps({"type": kind, **fields}))
            return hear(expected)

        def hear(expected: str) -> dict[str, Any]:
            while True:
                heard: dict[str, Any] = json.loads(socket.recv(PATIENCE))
                if heard["type"] == expected:
                    return heard
                assert heard["type"] == "task_assigned", heard

        assert client.post("/api/messages", json={"to": name, "body": 1}).json()["delivered"] is False
        assert ask("identify", "identified", agent_id=name, token=token)["mail"] == 1
        task = hear("task_assigned")["task_id"]
        assert ask("task_complete", "task_updated", task_id=task)["state"] == "completed"
        ask("channel_subscribe", "subscribed", channel="plans")
        number = client.post("/api/channels/plans/publish", json={"body": "news"}).json()["number"]
        assert hear("channel_message")["number"] == number


def hunt(folder: Path, config: str, seed: int, enough: int, limits: list[Any] = HUGE) -> Judge:
    with fuzzed(folder, config) as (hub, tokens, problems):
        judge, begin = Judge(problems), time.monotonic()
        asyncio.run(Hunt(hub.port, Fuzzer(seed, tokens, ADMIN, VIEWER, limits), judge, enough).run())
        took = time.monotonic() - begin
        print(f"\n{judge.total:,} inputs in {took:.0f} s: {judge.total / took:,.0f}/s")
        print(", ".join(f"{entrance} {quality} {times:,}" for (entrance, quality), times in sorted(judge.sent.items())))
        print(", ".join(f"{what} {times:,}" for what, times in sorted(judge.seen.items())))
    return judge


def test_b11_a_few_thousand_inputs_of_any_kind(tmp_path: Path) -> None:
    judge = hunt(tmp_path, RAISED, 1, 2000)
    assert {entrance for entrance, _ in judge.sent} == {"ws", "relay", "http", "handshake"}


@pytest.mark.long
def test_b11_a_hundred_thousand_inputs_of_any_kind(tmp_path: Path) -> None:
    judge = hunt(tmp_path, RAISED, 4, 100_000)
    routes = {f"{route.method} {route.path}" for route in ROUTES}
    limited = {"rate_limited", "rate_limit_warning"}
    frames = {f"ws {kind}" for kind in FRAMES["from_the_hub"] if kind not in {"lagged", "going_away"} | limited}
    assert not (routes | frames) - set(judge.seen)  # it came through to all of them


@pytest.mark.long
def test_b11_inputs_of_any_kind_while_limits_hold(tmp_path: Path) -> None:
    """Those of agents; and registration is by invitation."""
    judge = hunt(tmp_path, ORDINARY, 5, 20_000, ["120/minute", "60/minute burst 10", ["1/second", "20/minute"]])
    limited = {"http 429", "ws rate_limited", "ws rate_limit_warning", "relay MESSAGE_TYPE_RATE_LIMITED"}
    assert limited | {"http error invitation_required", "http error invitation_unknown"} <= set(judge.seen)


@pytest.mark.long
def test_b11_inputs_of_any_kind_from_an_address_with_its_limit(tmp_path: Path) -> None:
    judge = hunt(tmp_path, "", 6, 10_000)
    assert judge.seen["handshake 429"]


# The OpenAPI document -------------------------------------------------------------------------------------------------

CHECKS = """
[headers]
Authorization = "Bearer {agent}"
[[operations]]
include-path-regex = "^/api/(admin|dashboard)/"
headers = {{ Authorization = "Bearer {admin}" }}
[[operations]]
include-path = "/api/onboard/rotate"
headers = {{ Authorization = "Bearer {second}" }}
[[operations]]
include-path = "/api/onboard/revoke"
headers = {{ Authorization = "Bearer {third}" }}
"""
UNSAID = "positive_data_acceptance"
"""What a JSON Schema can't say: which characters are printable, what the text of a limit is, that 1.0 is no integer."""


def conforms(folder: Path, *options: str) -> str:
    """Run schemathesis, which knows only the document; what it prints."""
    with fuzzed(folder, RAISED) as (hub, tokens, _problems):
        config = folder / "schemathesis.toml"
        agent, second, third, *_ = tokens.values()
        config.write_text(CHECKS.format(agent=agent, second=second, third=third, admin=ADMIN))
        command = [str(Path(sys.executable).with_name("st")), "--config-file", str(config), "run"]
        always = ["--seed", "1", "--exclude-checks", UNSAID, "--no-color", f"http://{hub}/openapi.json"]
        done = subprocess.run([*command, *always, *options], check=False, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+) generated, \1 passed", done.stdout)
    assert found, done.stdout
    print(f"\nschemathesis: {found[0]}")
    return done.stdout


@pytest.mark.long
def test_b11_the_hub_answers_as_its_document_says(tmp_path: Path) -> None:
    told = conforms(tmp_path, "--max-examples", "40", "--phases", "examples,coverage,fuzzing,stateful")
    assert re.search(rf"Tested: {len(ROUTES) - 1}\n", told), told  # all but the document itself


# What was found -------------------------------------------------------------------------------------------------------


def quiet(caplog: pytest.LogCaptureFixture) -> bool:
    """Whether nothing was logged that is a mistake of the hub."""
    return not [record for record in caplog.records if record.levelno >= logging.ERROR]


def hang_up(connection: socket.socket) -> None:
    """Close a connection as a crash would."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_b11_what_comes_after_the_hub_has_closed_may_be_anything(caplog: pytest.LogCaptureFixture) -> None:
    with running() as hub, socket.create_connection(("127.0.0.1", hub.port), PATIENCE) as raw:
        raw.sendall(f"GET /ws {HANDSHAKE}\r\n".encode())
        heard = raw.recv(65_536)
        raw.sendall(websocket_frame(1, b"{") * 10)  # as many as close it
        while b"10 invalid frames within a minute" not in heard:
            heard += raw.recv(65_536)
        raw.sendall(websocket_frame(1, b"\xff") + websocket_frame(8, (1008).to_bytes(2, "big")))
        assert raw.recv(65_536) == b""
    assert quiet(caplog)


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [("/ws", "X: y\r\n" * 200, 431), ("/ws", f"X: {'y' * 9000}\r\n", 431), (f"/ws?{'x' * 9000}", "", 414)],
)
def test_b11_a_handshake_with_too_much_is_answered_and_closed(path: str, headers: str, status: int) -> None:
    """uvicorn would leave the connection open, without a word."""
    with running() as hub, socket.create_connection(("127.0.0.1", hub.port), PATIENCE) as raw:
        raw.sendall(f"GET {path} {HANDSHAKE}{headers}\r\n".encode())
        answer = b"".join(iter(lambda: raw.recv(65_536), b""))
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())


def test_b11_a_handshake_does_not_wait_for_a_body_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImpatientHttp, "head_within", 0.2)
    with running() as hub, hub.agent("a") as still_there:
        with socket.create_connection(("127.0.0.1", hub.port), PATIENCE) as raw:
            raw.sendall(f"GET /ws {HANDSHAKE}Content-Length: 5\r\n\r\n".encode())
            assert raw.recv(65_536) == b""
        assert still_there.ask("ping")["type"] == "pong"  # a handshake that was finished has no deadline any more


def test_b11_whoever_hangs_up_on_several_requests_is_no_mistake_of_the_hub(caplog: pytest.LogCaptureFixture) -> None:
    """The first is answered, the second under way, the third waits. uvicorn would tell only the third."""
    with running() as hub:
        begun, go_on = threading.Event(), threading.Event()
        request = f"GET /api/mailbox HTTP/1.1\r\nAuthorization: Bearer {hub.register('a')}\r\n\r\n"

        def hold(_db: object) -> None:
            begun.set()
            go_on.wait(PATIENCE)

        held = asyncio.run_coroutine_threadsafe(hub.hub.ledger.run(hold), hub.loop)
        assert begun.wait(PATIENCE)
        assert hub.server is not None
        connections = hub.server.server_state.connections
        raw = socket.create_connection(("127.0.0.1", hub.port), PATIENCE)
        raw.sendall(f"GET /live HTTP/1.1\r\n\r\n{request * 2}".encode())
        assert raw.recv(12) == b"HTTP/1.1 200"
        hang_up(raw)
        wait_for(lambda: not connections, "the end of the connection")
        go_on.set()
        held.result(PATIENCE)
        hub.call(lambda: None)
    assert quiet(caplog)
