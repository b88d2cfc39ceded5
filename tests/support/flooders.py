"""Connections that send as fast as they can: a program of its own, so that it has a processor to itself.

    flooders.py PORT SECONDS < names-and-tokens.json > what-passed.json

Each sends pings, and says how many pongs came back, over which span. Most never wait for an answer. Some do, and send
the next ping then: they know when, at the earliest, each was decided on. They go on for so many seconds, and until
each of the others was denied.
"""

import asyncio
import json
import os
import sys
import time
from typing import Final

MASK: Final = b"\0\0\0\0"  # which leaves the payload as it is
ASKERS: Final = 10  # one of so many waits for its answers
LONGEST: Final = 600.0  # seconds


def frame(text: str) -> bytes:
    """A text frame of a client."""
    data = text.encode()
    length = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + len(data).to_bytes(2, "big")
    return b"\x81" + length + MASK + data


PING: Final = frame('{"type":"ping"}')
PINGS: Final = PING * 200


class Flooder(asyncio.Protocol):
    """One connection: identifies, then sends and counts."""

    def __init__(self, agent: str, token: str, asks: bool) -> None:
        self._agent, self._token, self._asks = agent, token, asks
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._open = False
        self._may_write = asyncio.Event()
        self._sent = 0.0
        self.ready = asyncio.Event()
        self.passed = self.denied = 0
        self.begin = self.end = 0.0
        self.denials: list[tuple[int, float, float]] = []
        """How many had passed at a denial, when its ping was sent, and when it was heard of: all, of one that asks."""
        self.lost = False
        """Whether the hub has closed it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=16_384)
        key = "dGhlIHNhbXBsZSBub25jZQ=="
        transport.write(
            b"GET /ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + key.encode() + b"\r\n\r\n"
        )
        self._may_write.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._may_write.set()
        self.ready.set()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        if not self._open:
            head, found, data = data.partition(b"\r\n\r\n")
            if not found:
                self._rest = head
                return
            assert head.startswith(b"HTTP/1.1 101"), head
            self._open = True
            assert self._transport is not None
            self._transport.write(
                frame(json.dumps({"type": "identify", "agent_id": self._agent, "token": self._token}))
            )
        at = 0
        while len(data) - at >= 2:
            length, start = data[at + 1], at + 2
            if length == 126:
                length, start = int.from_bytes(data[start : start + 2], "big"), start + 2
            if len(data) < start + length:
                break
            self._heard(data[at], data[start : start + length])
            at = start + length
        self._rest = data[at:]

    def _heard(self, opcode: int, payload: bytes) -> None:
        if opcode & 0x0F == 9:  # a ping of the protocol's own
            assert self._transport is not None
            self._transport.write(bytes([0x8A, 0x80 | len(payload)]) + MASK + payload)
        elif payload.startswith(b'{"type":"pong"'):
            self.passed += 1
            self.end = time.monotonic()
            self._ask_again()
        elif payload.startswith(b'{"type":"rate_limited"'):
            self.denied += 1
            if self._asks or not self.denials:
                self.denials.append((self.passed, self._sent, time.monotonic()))
            self._ask_again()
        elif payload.startswith(b'{"type":"identified"'):
            self.ready.set()

    def _ask_again(self) -> None:
        if self._asks:
            assert self._transport is not None
            self._sent = time.monotonic()
            self._transport.write(PING)

    @property
    def enough(self) -> bool:
        """Whether it was denied; one that asks is too slow for that on some machines."""
        return self._asks or self.lost or bool(self.denials)

    async def flood(self) -> None:
        """Send until there is an end."""
        assert self._transport is not None
        self.begin = time.monotonic()
        self._ask_again()
        while not (self._asks or self.lost):
            self._transport.write(PINGS)
            await asyncio.sleep(0)
            await self._may_write.wait()

    def stop(self) -> None:
        assert self._transport is not None
        self._transport.abort()


async def main(port: int, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    agents: list[tuple[str, str]] = json.load(sys.stdin)
    flooders = []
    for number, (agent, token) in enumerate(agents):
        made = Flooder(agent, token, asks=number % ASKERS == 0)
        await loop.create_connection(lambda made=made: made, "127.0.0.1", port)  # type: ignore[misc]
        flooders.append(made)
    await asyncio.gather(*[flooder.ready.wait() for flooder in flooders])
    begin = time.monotonic()
    async with asyncio.TaskGroup() as group:
        floods = [group.create_task(flooder.flood()) for flooder in flooders]
        while time.monotonic() < begin + seconds or not all(flooder.enough for flooder in flooders):
            assert time.monotonic() < begin + LONGEST, "not everybody was denied"
            await asyncio.sleep(0.05)
        lost = [flooder.lost for flooder in flooders]
        for flood in floods:
            flood.cancel()
    for flooder in flooders:
        flooder.stop()
    told = [
        {
            "passed": one.passed,
            "denied": one.denied,
            "denials": one.denials,
            "longest": one.end - one.begin,
            "lost": closed,
        }
        for one, closed in zip(flooders, lost, strict=True)
    ]
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
    sys.stdout.flush()
    os._exit(0)  # without a word about what the hub still sends
