"""Hostile clients: each attack on a hub on the loopback address goes on for some seconds, and counts what it sends.

    attacks.py NAME PORT SECONDS [CONNECTIONS]

runs one as a program of its own, so that it has a processor to itself; it prints what it sent, and how many connections
it opened. An attacker whose connection is closed opens another, at most `RECONNECTS` times a second.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final, TypeAlias

HANDSHAKE: Final = (
    "HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
MASK: Final = b"\0\0\0\0"  # which leaves the payload as it is
PING: Final = b"\x89\x84" + MASK + b"ping"
LARGE_PING: Final = b"\x89\xfd" + MASK + b"x" * 125
FIRST_FRAGMENT: Final = b"\x01\x80" + MASK
EMPTY_CONTINUATION: Final = b"\x00\x80" + MASK
RECONNECTS: Final = 20.0
"""Times a second that one attacker opens a connection, at most."""
_WRITE: Final = 16_384  # bytes that are written at once


@dataclass
class Harm:
    """What an attack sent."""

    sent: int = 0
    """Frames, requests or bytes, as the attack says."""
    opened: int = 0
    """Connections that were opened."""
    closed: int = 0
    """Connections that the hub closed."""


Attack: TypeAlias = Callable[[int, Harm], Awaitable[None]]
"""What one connection to a port does, until the hub closes it."""
ATTACKS: Final[dict[str, tuple[Attack, int]]] = {}
"""By name, with the number of connections."""


def attack(*, connections: int) -> Callable[[Attack], Attack]:
    """Add an attack under its name."""

    def add(one: Attack) -> Attack:
        ATTACKS[one.__name__] = one, connections
        return one

    return add


@asynccontextmanager
async def _connected(port: int, harm: Harm) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.transport.set_write_buffer_limits(high=_WRITE)
    harm.opened += 1
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def _upgrade(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str) -> None:
    writer.write(f"GET {path} {HANDSHAKE}".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 101"):
        raise ConnectionError(head.decode("latin-1"))


async def _discard(reader: asyncio.StreamReader) -> None:
    while await reader.read(65_536):
        pass


async def repeat(attacks: Iterable[Callable[[], Awaitable[None]]], seconds: float, closed: Callable[[], None]) -> None:
    """Run attacks at once, each again and again, until the time is over; `closed` is called at the end of each."""

    async def attacker(attack: Callable[[], Awaitable[None]]) -> None:
        while True:
            begin = time.monotonic()
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                await attack()
            closed()
            await asyncio.sleep(max(begin + 1 / RECONNECTS - time.monotonic(), 0))

    with suppress(TimeoutError):
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            for attack in attacks:
                group.create_task(attacker(attack))


async def _flood(
    port: int, harm: Harm, frame: bytes, *, first: bytes = b"", path: str = "/ws", read: bool = True
) -> None:
    frames = max(_WRITE // len(frame), 1)
    async with _connected(port, harm) as (reader, writer):
        await _upgrade(reader, writer, path)
        reading = asyncio.ensure_future(_discard(reader)) if read else None
        try:
            writer.write(first)
            while reading is None or not reading.done():
                writer.write(frame * frames)
                harm.sent += frames
                await asyncio.sleep(0)
                await writer.drain()
        finally:
            if reading is not None:
                reading.cancel()


@attack(connections=30)
async def ping_flood(port: int, harm: Harm) -> None:
    """Send pings of the WebSocket protocol without a pause, and read the pongs. Counts pings."""
    await _flood(port, harm, PING)


@attack(connections=1)
async def unread_pongs(port: int, harm: Harm) -> None:
    """Send the largest pings without a pause, and read no pong. Counts pings."""
    await _flood(port, harm, LARGE_PING, read=False)


@attack(connections=30)
async def empty_continuations(port: int, harm: Harm) -> None:
    """Begin a message, and continue it by empty fragments without an end. Counts fragments."""
    await _flood(port, harm, EMPTY_CONTINUATION, first=FIRST_FRAGMENT)


@attack(connections=100)
async def dashboard_ping_flood(port: int, harm: Harm) -> None:
    """Open dashboards without a token, and send pings without a pause. Counts pings."""
    await _flood(port, harm, PING, path="/ws/dashboard")


@attack(connections=100)
async def dashboard_strangers(port: int, harm: Harm) -> None:
    """Open dashboards and ask to watch with a wrong token, again and again. Counts attempts."""
    text = b'{"type":"watch","token":"a-token-that-is-nobodys"}'
    async with _connected(port, harm) as (reader, writer):
        await _upgrade(reader, writer, "/ws/dashboard")
        writer.write(b"\x81" + bytes([0x80 | len(text)]) + MASK + text)
        harm.sent += 1
        await _discard(reader)


@attack(connections=20)
async def pipelined_requests(port: int, harm: Harm) -> None:
    """Send many requests in one write, read the responses, and do it again. Counts requests."""
    requests = 11_900
    async with _connected(port, harm) as (reader, writer):
        reading = asyncio.ensure_future(_discard(reader))
        try:
            while not reading.done():
                writer.write(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n" * requests)
                harm.sent += requests
                await writer.drain()
        finally:
            reading.cancel()


@attack(connections=1015)
async def idle_connections(port: int, harm: Harm) -> None:
    """Hold connections open that send no request."""
    async with _connected(port, harm) as (reader, _):
        await _discard(reader)


@attack(connections=986)
async def unread_responses(port: int, harm: Harm) -> None:
    """Send requests, and read no response. Counts requests."""
    requests = 200
    protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader(limit=1))
    transport, _ = await asyncio.get_running_loop().create_connection(lambda: protocol, "127.0.0.1", port)
    harm.opened += 1
    try:
        transport.pause_reading()
        transport.write(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * requests)
        harm.sent += requests
        while not transport.is_closing():
            await asyncio.sleep(0.5)
            transport.write(b"\r\n")  # which fails once the hub has given up
    finally:
        transport.abort()


async def main(name: str, port: str, seconds: str, connections: str = "") -> None:
    (one, usual), harm = ATTACKS[name], Harm()

    def closed() -> None:
        harm.closed += 1

    await repeat([lambda: one(int(port), harm)] * int(connections or usual), float(seconds), closed)
    print(harm)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
