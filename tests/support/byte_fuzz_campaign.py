"""Sends streams of bytes to a hub, over many connections at once.

    python -m tests.support.byte_fuzz_campaign PORT RECORD SEED COUNT [FILE] < tokens.json

is a program of its own, so that it has a processor to itself. It sends so many streams of a seed, or as often the one
in a file, and writes to the file RECORD which it has sent, when, and how each ended.
"""

import asyncio
import json
import math
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from tests.support.byte_fuzzer import ByteFuzzer, Stream
from tests.support.event_loop import wait_until

AT_ONCE = 32
MOMENT = 0.02
"""Seconds that the hub has to answer a stream which waits for it."""
LONGEST = 60.0
"""Seconds within which the hub must have closed a connection that was closed by the other side."""
HUNG, REFUSED, UNFINISHED = "hung", "refused", "unfinished"
"""Endings other than statuses: the hub didn't close, took no connection, or the campaign was ended before."""


class ByteFuzzCampaign:
    """Sends streams to one hub, and records each as a line of JSON at its beginning, and another at its end.

    A line has the name and kind of the stream, when it began and ended, and how it ended: the status, or a word.
    """

    def __init__(self, port: int, streams: Iterator[Stream], tokens: dict[str, str], record: TextIO) -> None:
        self._port, self._streams, self._tokens, self._record = port, streams, tokens, record
        self._sent = 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._worker())

    async def _worker(self) -> None:
        for stream in self._streams:
            begin = time.monotonic()
            self._write_line(stream, begin, math.inf, UNFINISHED)
            ended = await self._send(stream)
            self._write_line(stream, begin, time.monotonic(), ended)
            if ended == REFUSED:
                return

    def _write_line(self, stream: Stream, begin: float, end: float, ended: str) -> None:
        self._record.write(json.dumps([stream.name, stream.kind, begin, end, ended]) + "\n")

    async def _send(self, stream: Stream) -> str:
        self._sent += 1
        # Many addresses, so that the hub's bounds on connections from one don't keep the rest out.
        address = f"127.1.{self._sent // 200 % 200}.{self._sent % 200 + 1}"
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port, local_addr=(address, 0))
        except OSError:
            return REFUSED
        head = bytearray()
        reading = asyncio.ensure_future(_discard(reader, head))
        try:
            with suppress(ConnectionError):
                await self._write(stream, writer, reading, head)
            if stream.ending == "half-close":
                with suppress(OSError):  # the hub may have closed already
                    writer.write_eof()
                done, _ = await asyncio.wait([reading], timeout=LONGEST)
                if not done:
                    return HUNG
            elif stream.ending == "wait":
                await asyncio.wait([reading], timeout=MOMENT)
        finally:
            reading.cancel()
            if stream.ending == "close":
                writer.close()
            else:
                _reset(writer)
        return bytes(head[9:12]).decode("latin-1") or "silence"

    async def _write(
        self, stream: Stream, writer: asyncio.StreamWriter, reading: "asyncio.Future[None]", head: bytearray
    ) -> None:
        for number, part in enumerate(stream.for_hub(self._tokens)):
            writer.write(part)
            await asyncio.sleep(0)
            async with asyncio.timeout(LONGEST):
                await writer.drain()
            if number == 0 and stream.upgrades:
                await wait_until(lambda: head or reading.done(), "the answer to a handshake")


async def _discard(reader: asyncio.StreamReader, head: bytearray) -> None:
    """Read until the end; keep the first line."""
    with suppress(OSError):
        while data := await reader.read(65_536):
            head += data[: 12 - len(head)]


def _reset(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        opened = writer.get_extra_info("socket")
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def main(port: str, record: str, seed: str, count: str, file: str = "") -> None:
    fuzzer = ByteFuzzer(int(seed))
    one = Stream.read(Path(file)) if file else None
    streams = (one or fuzzer.stream(number) for number in range(int(count)))
    with Path(record).open("w", buffering=1) as lines:
        asyncio.run(ByteFuzzCampaign(int(port), streams, json.load(sys.stdin), lines).run())


if __name__ == "__main__":
    main(*sys.argv[1:])
