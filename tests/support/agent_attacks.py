"""Hostile agents and strangers: each function attacks a hub for some seconds, and counts the answers.

    python -m tests.support.agent_attacks NAME PORT SECONDS < tokens.json

runs one as a program of its own, so that it has a processor to itself. It prints `begins`, and at the end the answers
as JSON: statuses of HTTP, types of frames, codes of errors, and `closed`. The tokens are those of the agents by name.
The attacks on the connections themselves are in attacks.py.
"""

import asyncio
import json
import sys
from base64 import b64encode
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from headgate.proto import envelope_pb2 as wire
from tests.support.attacks import HANDSHAKE, repeat
from tests.support.fuzzer import websocket_frame

CONNECTIONS: Final = 10
"""Connections of most attacks."""
BATCH: Final = 20
"""Frames that are written at once."""
NESTED: Final = "[" * 980 + "]" * 980
"""JSON nested as deep as a task's payload could be before it was bounded: most readers can't decode it."""
LARGE: Final = "x" * 4000
FOREIGN: Final = "Origin: https://evil.example\r\nSec-Fetch-Site: cross-site\r\n"


@dataclass
class Target:
    """The hub that is attacked."""

    port: int
    seconds: float
    tokens: dict[str, str]
    """Of the attackers, whose names begin so, and of others."""
    answers: Counter[str]

    @property
    def attackers(self) -> list[str]:
        return [name for name in self.tokens if name.startswith("attacker")]


Attack = Callable[[Target], Awaitable[None]]


# How --------------------------------------------------------------------------------------------------------------


async def _repeat(target: Target, attacks: list[Callable[[], Awaitable[None]]]) -> None:
    await repeat(attacks, target.seconds, lambda: target.answers.update(["closed"]))


def request(method: str, path: str, token: str = "", body: str = "", more: str = "") -> bytes:
    """An HTTP request; `more` has header lines."""
    host = "" if "Host:" in more else "Host: localhost\r\n"
    authorization = f"Authorization: Bearer {token}\r\n" if token else ""
    head = f"{method} {path} HTTP/1.1\r\n{host}{authorization}{more}"
    return f"{head}Content-Length: {len(body.encode())}\r\n\r\n{body}".encode()


async def _requests(target: Target, make: Callable[[int, int], bytes], connections: int = CONNECTIONS) -> None:
    """Send requests without a pause; `make` is given the number of the connection and of the request."""
    numbers = [0] * connections

    async def attack(connection: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port, limit=2**20)
        try:
            while True:
                numbers[connection] += 1
                writer.write(make(connection, numbers[connection]))
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                target.answers[head[9:12].decode()] += 1
                _, found, length = head.partition(b"content-length: ")
                await reader.readexactly(int(length.split(b"\r\n")[0]) if found else 0)
                if b"\r\nconnection: close" in head:
                    return
        finally:
            writer.transport.abort()

    await _repeat(target, [lambda one=one: attack(one) for one in range(connections)])  # type: ignore[misc]


async def _frames(
    target: Target,
    path: str,
    greet: Callable[[int], bytes],
    make: Callable[[int, int], bytes],
    *,
    connections: int = CONNECTIONS,
    headers: str = "",
) -> None:
    """Greet and send frames without a pause; `make` is given the number of the connection and of the frame.

    One that sends b"" has nothing more to say, and waits for the end.
    """
    numbers = [0] * connections

    async def attack(connection: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
        try:
            upgrade = HANDSHAKE.replace("\r\n\r\n", f"\r\n{headers}\r\n")
            writer.write(f"GET {path} {upgrade}".encode())
            status = (await reader.readuntil(b"\r\n\r\n"))[9:12].decode()
            target.answers[status] += 1
            if status != "101":
                return
            writer.write(greet(connection))
            reading = asyncio.ensure_future(_count(reader, target.answers))
            try:
                while not reading.done():
                    batch = b""
                    for _ in range(BATCH):
                        numbers[connection] += 1
                        batch += make(connection, numbers[connection])
                    if not batch:
                        await reading
                    writer.write(batch)
                    await asyncio.sleep(0)
                    await writer.drain()
            finally:
                reading.cancel()
        finally:
            writer.transport.abort()

    await _repeat(target, [lambda one=one: attack(one) for one in range(connections)])  # type: ignore[misc]


async def _count(reader: asyncio.StreamReader, answers: Counter[str]) -> None:
    """Count the frames of the hub by type until it closes."""
    with suppress(OSError, asyncio.IncompleteReadError):
        while True:
            first, length = await reader.readexactly(2)
            if length >= 126:
                length = int.from_bytes(await reader.readexactly(2 if length == 126 else 8), "big")
            payload = await reader.readexactly(length)
            if first & 0x0F == 1:
                heard = json.loads(payload)
                answers[heard["error"] if heard["type"] == "error" else heard["type"]] += 1
            elif first & 0x0F == 2:
                envelope = wire.Envelope.FromString(payload)
                kind = wire.MessageType.Name(envelope.type).removeprefix("MESSAGE_TYPE_").lower()
                answers[envelope.error.code or kind] += 1
            elif first & 0x0F == 8:
                return


def text(kind: str, **fields: Any) -> bytes:
    """A frame of /ws."""
    return websocket_frame(1, json.dumps({"type": kind, **fields}).encode())


def _identify(target: Target) -> Callable[[int], bytes]:
    """The greeting of each connection: attackers take turns."""

    def greet(connection: int) -> bytes:
        name = target.attackers[connection % len(target.attackers)]
        return text("identify", agent_id=name, token=target.tokens[name])

    return greet


# Limits and payloads that are hard to read ------------------------------------------------------------------------


async def odd_session_rates(target: Target) -> None:
    """Open sessions with rates whose text is long, such as 2^-20."""

    def make(connection: int, number: int) -> bytes:
        rate = 2.0 ** -(number % 40)
        return text("session_open", session=f"{connection}-{number % 90}", rate=rate, burst=1 + number % 1000)

    await _frames(target, "/ws", _identify(target), make)


async def nested_tasks(target: Target) -> None:
    """Create tasks whose payload is nested too deeply for those who get them."""
    token = target.tokens[target.attackers[0]]
    await _requests(target, lambda *_: request("POST", "/api/tasks", token, f'{{"payload":{NESTED}}}'))


async def nested_messages(target: Target) -> None:
    """Send messages that are nested too deeply for their reader; one attacker sends good ones among them."""

    nested = websocket_frame(1, f'{{"type":"message","to":"victim","body":{NESTED}}}'.encode())

    def make(connection: int, number: int) -> bytes:
        return nested if number % 2 or connection else text("message", to="victim", body=number)

    await _frames(target, "/ws", _identify(target), make)


# More than one's share --------------------------------------------------------------------------------------------


async def create_channels(target: Target) -> None:
    """Create chat channels with long descriptions, and list them all."""

    def make(connection: int, number: int) -> bytes:
        token = target.tokens[target.attackers[0]]
        if number % 2:
            return request("GET", "/api/channels", token)
        body = {"name": f"c-{connection}-{number}", "about": "x" * 1000}
        return request("POST", "/api/channels", token, json.dumps(body))

    await _requests(target, make)


async def fill_mailbox(target: Target) -> None:
    """Send messages to somebody who is away, all from one sender."""
    token = target.tokens[target.attackers[0]]
    body = json.dumps({"to": "victim", "body": LARGE})
    await _requests(target, lambda *_: request("POST", "/api/messages", token, body))


async def fill_counters(target: Target) -> None:
    """Count new keys by the decision service, each as long and for as long as it can be."""
    token = target.tokens[target.attackers[0]]

    def make(connection: int, number: int) -> bytes:
        key = f"{connection}-{number}-".ljust(512, "k")
        body = json.dumps({"key": key, "limit": 1_000_000, "window_ms": 31_536_000_000})
        return request("POST", "/v1/check", token, body)

    await _requests(target, make)


async def fill_signals(target: Target) -> None:
    """Write large signals to sessions without a limit."""
    signal = {"type": "t", "entity": "e", "weight": 1.0, "timestamp": 1.0, "annotation": LARGE}

    def greet(connection: int) -> bytes:
        return _identify(target)(connection) + text("session_open", session=str(connection))

    def make(connection: int, _: int) -> bytes:
        return text("session_signal", session=str(connection), signal=signal)

    await _frames(target, "/ws", greet, make)


async def take_name(target: Target) -> None:
    """Register under the name of somebody else, again and again."""
    body = json.dumps({"agent_id": "victim"})
    await _requests(target, lambda *_: request("POST", "/api/onboard/register", body=body))


async def register_agents(target: Target) -> None:
    """Register agents with the token of a viewer."""
    token = target.tokens["viewer"]

    def make(connection: int, number: int) -> bytes:
        return request("POST", "/api/onboard/register", token, json.dumps({"agent_id": f"new-{connection}-{number}"}))

    await _requests(target, make)


# Other sites ------------------------------------------------------------------------------------------------------


async def foreign_origins(target: Target) -> None:
    """Open sockets as a page of another site does."""

    async def at(path: str) -> None:
        await _frames(target, path, _identify(target), lambda *_: text("ping"), headers=FOREIGN)

    await asyncio.gather(at("/ws"), at("/relay"), at("/ws/dashboard"))


async def foreign_writes(target: Target) -> None:
    """Register agents and count keys as a page of another site does, by requests that need no preflight."""
    more = f"{FOREIGN}Content-Type: text/plain\r\n"

    def make(connection: int, number: int) -> bytes:
        body = json.dumps({"agent_id": f"evil-{connection}-{number}"})
        return request("POST", "/api/onboard/register", body=body, more=more)

    await _requests(target, make)


async def unknown_hosts(target: Target) -> None:
    """Read what is public as a page whose name was pointed at the hub."""
    paths = ("/api/dashboard/state", "/api/agents", "/api/channels", "/openapi.json", "/metrics")

    def make(_: int, number: int) -> bytes:
        return request("GET", paths[number % len(paths)], more="Host: evil.example\r\n")

    await _requests(target, make)


# Guesses and denials ----------------------------------------------------------------------------------------------


def _guess(connection: int, number: int) -> str:
    return b64encode(f"guess {connection} {number}".encode()).decode().ljust(43, "A")


async def guess_over_http(target: Target) -> None:
    """Ask for a mailbox with tokens that are guessed."""
    await _requests(target, lambda *which: request("GET", "/api/mailbox", _guess(*which)))


async def guess_over_ws(target: Target) -> None:
    """Identify with tokens that are guessed, over and over."""
    await _frames(
        target, "/ws", lambda _: b"", lambda *which: text("identify", agent_id="victim", token=_guess(*which))
    )


async def guess_over_relay(target: Target) -> None:
    """Say HELLO with tokens that are guessed, over and over."""

    def make(connection: int, number: int) -> bytes:
        hello = wire.Hello(address="victim", token=_guess(connection, number))
        envelope = wire.Envelope(id=str(number), type=wire.MESSAGE_TYPE_HELLO, hello=hello)
        return websocket_frame(2, envelope.SerializeToString())

    await _frames(target, "/relay", lambda _: b"", make)


async def guess_at_dashboard(target: Target) -> None:
    """Ask to watch with tokens that are guessed; each connection has one guess."""
    tried = [0] * CONNECTIONS

    def greet(connection: int) -> bytes:
        tried[connection] += 1
        return text("watch", token=_guess(connection, tried[connection]))

    await _frames(target, "/ws/dashboard", greet, lambda *_: b"")


async def denied_signals(target: Target) -> None:
    """Send signals to a session whose limit is used up."""
    signal = {"type": "t", "entity": "e", "weight": 1.0, "timestamp": 1.0}

    def greet(connection: int) -> bytes:
        opened = text("session_open", session=str(connection), rate=0.01, burst=1)
        return _identify(target)(connection) + opened

    def make(connection: int, _: int) -> bytes:
        return text("session_signal", session=str(connection), signal=signal)

    await _frames(target, "/ws", greet, make)


async def signals_to_nowhere(target: Target) -> None:
    """Send signals to sessions that don't exist."""
    await _frames(
        target, "/ws", _identify(target), lambda _, number: text("session_signal", session=f"no-{number}", signal={})
    )


ATTACKS: Final[dict[str, Attack]] = {
    one.__name__: one
    for one in (
        odd_session_rates,
        nested_tasks,
        nested_messages,
        create_channels,
        fill_mailbox,
        fill_counters,
        fill_signals,
        take_name,
        register_agents,
        foreign_origins,
        foreign_writes,
        unknown_hosts,
        guess_over_http,
        guess_over_ws,
        guess_over_relay,
        guess_at_dashboard,
        denied_signals,
        signals_to_nowhere,
    )
}


def main(name: str, port: str, seconds: str) -> None:
    target = Target(int(port), float(seconds), json.loads(sys.stdin.readline()), Counter())
    print("begins", flush=True)
    asyncio.run(ATTACKS[name](target))  # type: ignore[arg-type]
    print(json.dumps(target.answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
