"""Connections that send as fast as they can: a program of its own, so that it has a processor to itself.

    flooders.py PORT SECONDS < names-and-tokens.json > what-passed.json

Each sends pings, and says how many pongs came back, over which span.
"""

import asyncio
import json
import os
import sys
import time
from typing import Final

MASK: Final = b"\0\0\0\0"  # which leaves the payload as it is


def frame(text: str) -> bytes:
    """A text frame of a client."""
    data = text.encode()
    length = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + len(data).to_bytes(2, "big")
    return b"\x81" + length + MASK + data


PINGS: Final = frame('{"type":"ping"}') * 200


class Flooder(asyncio.Protocol):
    """One connection: identifies, then sends and counts."""

    def __init__(self, agent: str, token: str) -> None:
        self._agent, self._token = agent, token
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._open = False
        self._may_write = asyncio.Event()
        self.ready = asyncio.Event()
        self.passed = self.denied = 0
        self.begin = self.first = self.end = 0.0
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=16_384)
        key = "dGhlIHNhbXBsZSBub25jZQ=="
        transport.write(
            b"GET /ws HTTP/1.1\r\nHost: hub\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
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
            self.first = self.first or self.end
        elif payload.startswith(b'{"type":"rate_limited"'):
            self.denied += 1
        elif payload.startswith(b'{"type":"identified"'):
            self.ready.set()

    async def flood(self, until: float) -> None:
        assert self._transport is not None
        self.begin = time.monotonic()
        while time.monotonic() < until and not self.lost:
            self._transport.write(PINGS)
            await asyncio.sleep(0)
            await self._may_write.wait()
        self._transport.abort()


async def main(port: int, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    agents: list[tuple[str, str]] = json.load(sys.stdin)
    flooders = []
    for agent, token in agents:
        _, flooder = await loop.create_connection(lambda a=agent, t=token: Flooder(a, t), "127.0.0.1", port)  # type: ignore[misc]
        flooders.append(flooder)
    await asyncio.gather(*[flooder.ready.wait() for flooder in flooders])
    until = time.monotonic() + seconds
    await asyncio.gather(
        *[asyncio.wait_for(flooder.flood(until), seconds + 5) for flooder in flooders], return_exceptions=True
    )
    told = [
        {
            "passed": one.passed,
            "denied": one.denied,
            "longest": one.end - one.begin,
            "shortest": one.end - one.first,
            "lost": one.end < until - 2,
        }
        for one in flooders
    ]
    os.write(1, json.dumps(told).encode())


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
