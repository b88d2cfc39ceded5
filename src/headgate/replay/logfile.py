"""Logs as lines: files or streams, gzip or not, a block at a time, however long a line is."""

import os
import sys
import tempfile
import zlib
from collections.abc import Iterator
from typing import IO, Final

from headgate.errors import HeadgateError

STDIN: Final = "-"

_BLOCK: Final = 262_144  # bytes that are in memory at a time, whatever the size of the log
_GZIP: Final = b"\x1f\x8b"
_GZIP_BITS: Final = 31  # zlib's word for data with gzip's header and checksum around it
_BOM: Final = b"\xef\xbb\xbf"


class ReplayError(HeadgateError):
    """A log can't be replayed. The text says why, and what to do."""


class Log:
    """One log: `name` is a path, or "-" for standard input. What isn't a file can be read twice only with `again`."""

    def __init__(self, name: str, *, again: bool = False) -> None:
        self.name: Final = name
        self.size: int | None = None
        """Bytes of the file; None where nobody knows."""
        self.done = 0
        """How many of them have been read."""
        self.damage = ""
        """What is wrong with its end, if something is."""
        self._stream = _opened(name)
        self._copy: IO[bytes] | None = None
        self._start = 0
        if self._stream.seekable():
            self._start = self._stream.tell()
            self.size = max(os.fstat(self._stream.fileno()).st_size - self._start, 0)
        elif again:
            self._copy = tempfile.TemporaryFile(prefix="headgate-")  # noqa: SIM115 - closed by `close`

    def close(self) -> None:
        for stream in (self._stream, self._copy):
            if stream is not None and stream is not sys.stdin.buffer:
                stream.close()

    def rewind(self) -> None:
        """Begin again with the first line."""
        if self._copy is not None:
            copy, self._copy = self._copy, None
            self.close()
            self._stream = copy
        self._stream.seek(self._start)
        self.done, self.damage = 0, ""

    def lines(self) -> Iterator[list[str]]:
        r"""The lines, a block at a time, without their ends. Bytes that are no UTF-8 are shown as \x..

        Of a line that is longer than a block only the beginning is there.
        """
        rest, cut = b"", False
        for number, data in enumerate(self._plain()):
            whole, end, begun = (data if number else data.removeprefix(_BOM)).rpartition(b"\n")
            if cut and end:
                _, gap, more = whole.partition(b"\n")
                whole, cut = gap + more, False
            if end:
                yield _decoded(rest + whole)
                rest = begun
            else:
                rest += begun
            if len(rest) > _BLOCK:
                rest, cut = rest[:_BLOCK], True
        if rest:
            yield _decoded(rest)

    def _plain(self) -> Iterator[bytes]:
        """The bytes of the log, unpacked if they are packed."""
        packed, part = False, None
        for number, raw in enumerate(self._raw()):
            if number == 0:
                packed = raw.startswith(_GZIP)
            if not packed:
                yield raw
                continue
            data = raw
            while data:
                if part is None:
                    data = data.lstrip(b"\0")  # what fills up the last block of a tape
                    if not data:
                        break
                    part = zlib.decompressobj(_GZIP_BITS)
                spare = part.copy()
                try:
                    plain = part.decompress(data, _BLOCK)
                except zlib.error:
                    self.damage = "its gzip data is damaged, and was read up to there"
                    yield _salvaged(spare, data)
                    return
                yield plain
                data = part.unconsumed_tail
                if part.eof:  # another part may follow, as `cat a.gz b.gz` writes them
                    data, part = part.unused_data, None
        if part is not None:
            self.damage = "its gzip data ends in the middle, and was read up to there"

    def _raw(self) -> Iterator[bytes]:
        try:
            while data := self._stream.read(_BLOCK):
                self.done += len(data)
                if self._copy is not None:
                    self._copy.write(data)
                yield data
        except OSError as error:
            raise ReplayError(f"{self.name}: can't be read to its end: {error.strerror}") from error


def _salvaged(part: "zlib._Decompress", data: bytes) -> bytes:
    """What can be unpacked of data that is damaged somewhere."""
    plain = b""
    for place in range(len(data)):
        try:
            plain += part.decompress(data[place : place + 1])
        except zlib.error:
            break
    return plain


def _decoded(data: bytes) -> list[str]:
    return data.decode("utf-8", "backslashreplace").split("\n")


def _opened(name: str) -> IO[bytes]:
    if name == STDIN:
        return sys.stdin.buffer
    try:
        return open(name, "rb")
    except OSError as error:
        hint = "; '-' reads standard input" if isinstance(error, FileNotFoundError) else ""
        raise ReplayError(f"{name}: can't be read: {error.strerror}{hint}") from error
