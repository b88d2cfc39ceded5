"""Hostile clients: each function attacks a hub on the loopback address for some seconds, and returns what it sent.

    attacks.py NAME PORT SECONDS [CONNECTIONS]

runs one as a program of its own, so that it has a processor to itself; it prints what it sent, and how many connections
it opened. An attacker whose connection is closed opens another, at most `RECONNECTS` times a second.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

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


async def _repeat(attack: Callable[[], Awaitable[None]], harm: Harm, connections: int, seconds: float) -> Harm:
    """Run an attack on many connections, again and again, until the time is over."""

    async def attacker() -> None:
        while True:
            begin = time.monotonic()
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                await attack()
            harm.closed += 1
            await asyncio.sleep(max(begin + 1 / RECONNECTS - time.monotonic(), 0))

    with suppress(TimeoutError):
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            for _ in range(connections):
                group.create_task(attacker())
    return harm


async def _flood(
    port: int, path: str, first: bytes, frame: bytes, connections: int, seconds: float, *, read: bool
) -> Harm:
    harm, frames = Harm(), max(_WRITE // len(frame), 1)

    async def attack() -> None:
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

    return await _repeat(attack, harm, connections, seconds)


async def ping_flood(port: int, *, connections: int = 30, seconds: float = 30.0, path: str = "/ws") -> Harm:
    """Send pings of the WebSocket protocol without a pause, and read the pongs. Counts pings."""
    return await _flood(port, path, b"", PING, connections, seconds, read=True)


async def unread_pongs(port: int, *, connections: int = 1, seconds: float = 30.0, path: str = "/ws") -> Harm:
    """Send the largest pings without a pause, and read no pong. Counts pings."""
    return await _flood(port, path, b"", LARGE_PING, connections, seconds, read=False)


async def empty_continuations(port: int, *, connections: int = 30, seconds: float = 30.0, path: str = "/ws") -> Harm:
    """Begin a message, and continue it by empty fragments without an end. Counts fragments."""
    return await _flood(port, path, FIRST_FRAGMENT, EMPTY_CONTINUATION, connections, seconds, read=True)


async def dashboard_ping_flood(port: int, *, connections: int = 100, seconds: float = 30.0) -> Harm:
    """Open dashboards without a token, and send pings without a pause. Counts pings."""
    return await ping_flood(port, connections=connections, seconds=seconds, path="/ws/dashboard")


async def dashboard_strangers(port: int, *, connections: int = 100, seconds: float = 30.0) -> Harm:
    """Open dashboards and ask to watch with a wrong token, again and again. Counts attempts."""
    harm = Harm()
    text = b'{"type":"watch","token":"a-token-that-is-nobodys"}'
    watch = b"\x81" + bytes([0x80 | len(text)]) + MASK + text

    async def attack() -> None:
        async with _connected(port, harm) as (reader, writer):
            await _upgrade(reader, writer, "/ws/dashboard")
            writer.write(watch)
            harm.sent += 1
            await _discard(reader)

    return await _repeat(attack, harm, connections, seconds)


async def pipelined_requests(
    port: int, *, connections: int = 20, seconds: float = 30.0, requests: int = 11_900, path: str = "/live"
) -> Harm:
    """Send many requests in one write, read the responses, and do it again. Counts requests."""
    harm = Harm()
    batch = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() * requests

    async def attack() -> None:
        async with _connected(port, harm) as (reader, writer):
            reading = asyncio.ensure_future(_discard(reader))
            try:
                while not reading.done():
                    writer.write(batch)
                    harm.sent += requests
                    await writer.drain()
            finally:
                reading.cancel()

    return await _repeat(attack, harm, connections, seconds)


async def idle_connections(port: int, *, connections: int = 1015, seconds: float = 30.0, head: bytes = b"") -> Harm:
    """Hold connections open that send no request, or only the beginning of one. Counts bytes."""
    harm = Harm()

    async def attack() -> None:
        async with _connected(port, harm) as (reader, writer):
            writer.write(head)
            harm.sent += len(head)
            await _discard(reader)

    return await _repeat(attack, harm, connections, seconds)


async def unread_responses(
    port: int, *, connections: int = 986, seconds: float = 30.0, requests: int = 200, path: str = "/openapi.json"
) -> Harm:
    """Send requests, and read no response. Counts requests."""
    harm = Harm()
    batch = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() * requests

    async def attack() -> None:
        reader = asyncio.StreamReader(limit=1)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: protocol, "127.0.0.1", port)
        harm.opened += 1
        try:
            transport.pause_reading()
            transport.write(batch)
            harm.sent += requests
            while not transport.is_closing():
                await asyncio.sleep(0.5)
                transport.write(b"\r\n")  # which fails once the hub has given up
        finally:
            transport.abort()

    return await _repeat(attack, harm, connections, seconds)


ATTACKS: Final[dict[str, Callable[..., Awaitable[Harm]]]] = {
    one.__name__: one
    for one in (
        ping_flood,
        unread_pongs,
        empty_continuations,
        dashboard_ping_flood,
        dashboard_strangers,
        pipelined_requests,
        idle_connections,
        unread_responses,
    )
}


def main(name: str, port: str, seconds: str, connections: str = "") -> None:
    many = {"connections": int(connections)} if connections else {}

    async def attack() -> Harm:
        return await ATTACKS[name](int(port), seconds=float(seconds), **many)

    print(asyncio.run(attack()))


if __name__ == "__main__":
    main(*sys.argv[1:])
