"""Terminal output: tables that fit the terminal, colours and progress where a person looks at it, JSON elsewhere."""

import errno
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOBase, TextIOWrapper, UnsupportedOperation
from typing import Final, NamedTuple, Self, TextIO, cast
from unicodedata import category, east_asian_width

from headgate._version import VERSION
from headgate.errors import printable
from headgate.stores.memory_tables import compiled

GREEN: Final = "32"
YELLOW: Final = "33"
RED: Final = "31"
BOLD: Final = "1"

_NARROWEST: Final = 12  # columns that an elastic column keeps
_SOON: Final = 1.0  # seconds before progress is shown
_REDRAW: Final = 0.1


class Cell(NamedTuple):
    """A text in a table, with its colour."""

    text: str
    colour: str = ""


class Column(NamedTuple):
    """A column of a table. The first `elastic` one shrinks if the terminal is too narrow."""

    title: str
    right: bool = False
    elastic: bool = False


def version_text() -> str:
    """The version, such as "headgate 0.1.0 (compiled)"."""
    return f"headgate {VERSION} ({'compiled' if compiled() else 'plain Python: not compiled'})"


def display_width(text: str) -> int:
    """The columns of a text: two for Chinese, Japanese and Korean characters, none for combining accents."""
    if text.isascii():
        return len(text)
    return sum([_columns(one) for one in text])


def _columns(one: str) -> int:
    if category(one) in ("Mn", "Me"):
        return 0
    return 2 if east_asian_width(one) in "WF" else 1


def truncate(text: str, columns: int) -> str:
    """Cut a text to a number of columns, with an ellipsis at the end."""
    if display_width(text) <= columns:
        return text
    taken, end = 0, 0
    while taken + _columns(text[end]) < columns:
        taken += _columns(text[end])
        end += 1
    return text[:end] + "…"


def usage_colour(used: float) -> str:
    """The colour of a bucket by the share used: green below 50 %, yellow up to 80 %, then red."""
    return GREEN if used < 0.5 else YELLOW if used <= 0.8 else RED


def usage_cell(used: float) -> Cell:
    """The share used of a bucket or a limit, in its colour."""
    return Cell(f"{used:.0%}", usage_colour(used))


class ClosedOutput(TextIOBase):
    """A standard output that is closed: what is written can't be flushed."""

    _written = False

    def write(self, text: str) -> int:
        self._written = True
        return len(text)

    def flush(self) -> None:
        if self._written:
            self._written = False
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def prepare_output() -> None:
    """Make the standard streams usable: their encoding may lack characters of a name, and they may be closed."""
    if sys.stdout is None:
        sys.stdout = cast(TextIO, ClosedOutput())
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def discard(stream: TextIO) -> None:
    """Drop what a stream couldn't write: otherwise Python would try again at exit, and fail."""
    with suppress(UnsupportedOperation):  # it is no file
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, stream.fileno())
        finally:
            os.close(null)


def print_error(text: object) -> None:
    """Print a text on standard error, if that takes it. Unprintable characters, as of a file's name, are escaped."""
    if sys.stderr is not None:
        try:
            print("\n".join(map(printable, str(text).split("\n"))), file=sys.stderr, flush=True)
        except OSError:
            discard(sys.stderr)


def is_interactive(out: TextIO | None) -> bool:
    """Whether `out` is a terminal that can move the cursor."""
    return out is not None and out.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def coloured(text: str, colour: str, out: TextIO) -> str:
    """A text in a colour, if `out` is interactive and NO_COLOR isn't set."""
    if not colour or os.environ.get("NO_COLOR") or not is_interactive(out):
        return text
    return f"\x1b[{colour}m{text}\x1b[0m"


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str | Cell]]) -> None:
    print(table_text(columns, rows))


def table_text(columns: Sequence[Column], rows: Sequence[Sequence[str | Cell]]) -> str:
    """Rows below their titles, with unprintable characters escaped. In a file or a pipe nothing is cut."""
    out = sys.stdout
    cells = [[Cell(column.title, BOLD) for column in columns]]
    for row in rows:
        given = [Cell(one) if isinstance(one, str) else one for one in row]
        cells.append([Cell(printable(one.text), one.colour) for one in given])
    widths = [max([display_width(row[place].text) for row in cells]) for place in range(len(columns))]
    if out.isatty():
        over = sum(widths) + 2 * (len(columns) - 1) - shutil.get_terminal_size().columns
        elastic = next((place for place, column in enumerate(columns) if column.elastic), None)
        if over > 0 and elastic is not None:
            widths[elastic] = max(widths[elastic] - over, min(_NARROWEST, widths[elastic]))
    lines = []
    for row in cells:
        line = []
        for column, cell, wide in zip(columns, row, widths, strict=True):
            text = truncate(cell.text, wide)
            gap, shown = " " * (wide - display_width(text)), coloured(text, cell.colour, out)
            line.append(gap + shown if column.right else shown + gap)
        lines.append("  ".join(line).rstrip())
    return "\n".join(lines)


def print_json(value: object) -> None:
    """Print an object as one line of JSON, in ASCII."""
    print(json.dumps(value))


class ProgressLine:
    """A line of progress on an interactive terminal: appears after a second, and vanishes at the end."""

    def __init__(self, out: TextIO | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._out, self._now = sys.stderr if out is None else out, now
        self._interactive, self._drawn = is_interactive(self._out), False
        self._next = now() + _SOON

    def show(self, text: Callable[[], str]) -> None:
        """Redraw the line, if it is time."""
        if self._interactive and (now := self._now()) >= self._next:
            self._next, self._drawn = now + _REDRAW, True
            self._out.write(f"\r{text()}\x1b[K")
            self._out.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn:
            self._out.write("\r\x1b[K")
            self._out.flush()


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Show a notice on an interactive terminal if the block takes longer than a second."""
    if not is_interactive(sys.stderr):
        yield
        return
    shown = threading.Event()

    def show() -> None:
        shown.set()
        sys.stderr.write(f"waiting for {what} …")
        sys.stderr.flush()

    timer = threading.Timer(_SOON, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if shown.is_set():
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
