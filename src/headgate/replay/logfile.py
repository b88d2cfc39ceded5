"""Log files: read as lines from a file or a stream, plain or gzip, one block at a time."""

import os
import sys
import tempfile
import zlib
from collections.abc import Iterator
from typing import IO, Final

from headgate.errors import HeadgateError

STDIN: Final = "-"

_BLOCK: Final = 262_144  # bytes in memory at a time
_GZIP: Final = b"\x1f\x8b"
_GZIP_BITS: Final = 31  # tells zlib to expect gzip's header and checksum
_BOM: Final = b"\xef\xbb\xbf"


class ReplayError(HeadgateError):
    """A log can't be replayed."""


class LogFile:
    """A log: `name` is a path, or "-" for standard input. A stream can be read twice only with `again`."""

    def __init__(self, name: str, *, again: bool = False) -> None:
        self.name: Final = name
        self.size: int | None = None
        """Size of the file in bytes; None for a stream."""
        self.done = 0
        """Bytes read so far."""
        self.damage = ""
        """Why the end of the log couldn't be read; empty if it could."""
        self._stream = _open(name)
        self._copy: IO[bytes] | None = None
        self._start = 0
        if self._stream.seekable():
            self._start = self._stream.tell()
            self.size = max(os.fstat(self._stream.fileno()).st_size - self._start, 0)
        elif again:
            self._copy = tempfile.TemporaryFile(prefix="headgate-")  # noqa: SIM115 - closed by `close`

    def close(self) -> None:
        for stream in (self._stream, self._copy):
            if stream is not None and stream is not _stdin():
                stream.close()

    def rewind(self) -> None:
        """Go back to the first line."""
        if self._copy is not None:
            copy, self._copy = self._copy, None
            self.close()
            self._stream = copy
        self._stream.seek(self._start)
        self.done, self.damage = 0, ""

    def lines(self) -> Iterator[list[str]]:
        r"""The lines, a block at a time, without line ends. Bytes that aren't UTF-8 are escaped as \x..

        A line longer than a block is cut.
        """
        rest, cut = b"", False
        for number, data in enumerate(self._decompressed()):
            whole, end, begun = (data if number else data.removeprefix(_BOM)).rpartition(b"\n")
            if cut and end:
                _, gap, more = whole.partition(b"\n")
                whole, cut = gap + more, False
            if end:
                yield _decode(rest + whole)
                rest = begun
            else:
                rest += begun
            if len(rest) > _BLOCK:
                rest, cut = rest[:_BLOCK], True
        if rest:
            yield _decode(rest)

    def _decompressed(self) -> Iterator[bytes]:
        """The bytes of the log, decompressed."""
        compressed, part = False, None
        for number, raw in enumerate(self._raw()):
            if number == 0:
                compressed = raw.startswith(_GZIP)
            if not compressed:
                yield raw
                continue
            data = raw
            while data:
                if part is None:
                    data = data.lstrip(b"\0")  # padding
                    if not data:
                        break
                    part = zlib.decompressobj(_GZIP_BITS)
                spare = part.copy()
                try:
                    plain = part.decompress(data, _BLOCK)
                except zlib.error:
                    self.damage = "damaged gzip data; read up to the damage"
                    yield _salvage(spare, data)
                    return
                yield plain
                data = part.unconsumed_tail
                if part.eof:  # another member may follow, as after `cat a.gz b.gz`
                    data, part = part.unused_data, None
        if part is not None:
            self.damage = "truncated gzip data; read up to its end"

    def _raw(self) -> Iterator[bytes]:
        try:
            while data := self._stream.read(_BLOCK):
                self.done += len(data)
                if self._copy is not None:
                    self._copy.write(data)
                yield data
        except OSError as error:
            raise ReplayError(f"{self.name}: can't read to the end: {error.strerror}") from error


def _salvage(part: "zlib._Decompress", data: bytes) -> bytes:
    """The part before the damage, decompressed."""
    plain = b""
    for place in range(len(data)):
        try:
            plain += part.decompress(data[place : place + 1])
        except zlib.error:
            break
    return plain


def _decode(data: bytes) -> list[str]:
    return data.decode("utf-8", "backslashreplace").split("\n")


def _open(name: str) -> IO[bytes]:
    if name == STDIN:
        if (stream := _stdin()) is None:
            raise ReplayError(f"{name}: can't read the log: standard input is closed")
        return stream
    try:
        return open(name, "rb")
    except OSError as error:
        hint = "; '-' reads standard input" if isinstance(error, FileNotFoundError) else ""
        raise ReplayError(f"{name}: can't read the log: {error.strerror}{hint}") from error


def _stdin() -> IO[bytes] | None:
    return None if sys.stdin is None else sys.stdin.buffer
