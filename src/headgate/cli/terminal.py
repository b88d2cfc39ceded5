"""Terminal output: tables that fit the terminal, colours and progress where a person looks at it, JSON elsewhere."""

import errno
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOBase, TextIOWrapper, UnsupportedOperation
from itertools import zip_longest
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
_LONGEST_PIECE: Final = 24  # characters of what isn't broken when a text wraps
_SOON: Final = 1.0  # seconds before progress is shown
_REDRAW: Final = 0.1
_PIECE: Final = re.compile(r"\s*(?:\d{4}-\d\d-\d\dT(?=\d)|[^\s/]*/+|[^\s/]+)\s*")


class Cell(NamedTuple):
    """A text in a table, with its colour."""

    text: str
    colour: str = ""


class Column(NamedTuple):
    """A column of a table. If the terminal is too narrow, an `elastic` one is cut, and any other wraps.

    The values on the `right`, which are numbers, stay whole.
    """

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


def terminal_width() -> int | None:
    """The columns of the terminal on standard output; None for a file or a pipe, where nothing is cut or wrapped."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def print_text(text: str, colour: str = "", *, indent: str = "") -> None:
    """Print a text with unprintable characters escaped. On a terminal it wraps, its further lines indented by two."""
    text, room = printable(text), terminal_width()
    lines = [text]
    if room is not None and display_width(indent + text) > room:
        lines = wrap(text, max(room - len(indent) - 2, _NARROWEST))
    print(indent + coloured(lines[0], colour, sys.stdout))
    for line in lines[1:]:
        print(f"{indent}  {coloured(line, colour, sys.stdout)}")


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str | Cell]]) -> None:
    print(table_text(columns, rows))


def table_text(columns: Sequence[Column], rows: Sequence[Sequence[str | Cell]]) -> str:
    """Rows below their titles, with unprintable characters escaped. In a file or a pipe nothing is cut or wrapped.

    On a terminal that is too narrow even for wrapped rows, each row is a block of lines: a title and its value.
    """
    out = sys.stdout
    cells = [[Cell(column.title, BOLD) for column in columns]]
    for row in rows:
        given = [Cell(one) if isinstance(one, str) else one for one in row]
        cells.append([Cell(printable(one.text), one.colour) for one in given])
    widths = [max([display_width(row[place].text) for row in cells]) for place in range(len(columns))]
    between = "  "
    room = terminal_width()
    if room is not None:
        gaps = len(columns) - 1
        natural = widths
        widths = _shrink(columns, cells, natural, room - 2 * gaps)
        if sum(widths) + 2 * gaps > room:
            widths, between = _shrink(columns, cells, natural, room - gaps), " "
        if rows and sum(widths) + len(between) * gaps > room:
            return _blocks(cells, room, out)
    lines = []
    for row in cells:
        wrapped = [
            [truncate(cell.text, wide)] if column.elastic else wrap(cell.text, wide)
            for column, cell, wide in zip(columns, row, widths, strict=True)
        ]
        for texts in zip_longest(*wrapped, fillvalue=""):
            line = []
            for column, cell, wide, text in zip(columns, row, widths, texts, strict=True):
                gap, shown = " " * (wide - display_width(text)), coloured(text, cell.colour if text else "", out)
                line.append(gap + shown if column.right else shown + gap)
            lines.append(between.join(line).rstrip())
    return "\n".join(lines)


def _shrink(columns: Sequence[Column], cells: Sequence[Sequence[Cell]], widths: list[int], room: int) -> list[int]:
    """Widths that fit into `room`, or the least ones: first the elastic columns shrink, then always the widest."""
    if sum(widths) <= room:
        return widths
    widths, least = list(widths), []
    for place, column in enumerate(columns):
        if column.elastic:
            least.append(min(_NARROWEST, widths[place]))
        else:
            texts = [row[place].text for row in cells]
            whole = texts[1:] if column.right else []
            pieces = [piece.strip() for text in texts[: 1 if column.right else None] for piece in _pieces(text)]
            least.append(max(map(display_width, [*whole, *pieces]), default=0))
    for place, column in enumerate(columns):
        if column.elastic:
            widths[place] = max(widths[place] - max(sum(widths) - room, 0), least[place])
    while sum(widths) > room and (shrinkable := [place for place, wide in enumerate(widths) if wide > least[place]]):
        widths[max(shrinkable, key=lambda place: widths[place])] -= 1
    return widths


def _blocks(cells: Sequence[Sequence[Cell]], room: int, out: TextIO) -> str:
    """A block of lines for each row, without the cells that are empty."""
    titles = [cell.text for cell in cells[0]]
    indent = max(map(display_width, titles)) + 2
    blocks = []
    for row in cells[1:]:
        lines = []
        for title, cell in zip(titles, row, strict=True):
            for number, text in enumerate(wrap(cell.text, max(room - indent, _NARROWEST)) if cell.text else ()):
                label = "" if number else title
                gap = " " * (indent - display_width(label))
                lines.append(f"{coloured(label, BOLD if label else '', out)}{gap}{coloured(text, cell.colour, out)}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def wrap(text: str, columns: int) -> list[str]:
    """Wrap a text at its spaces, behind its slashes and before the time of a date.

    Only what is too long for a line is broken elsewhere.
    """
    if display_width(text) <= columns:
        return [text]
    lines, line = [], ""
    for piece in _pieces(text):
        if line and display_width(line + piece.rstrip()) > columns:
            lines.append(line.rstrip())
            line = ""
        line += piece
        while display_width(line.rstrip()) > columns:
            end = len(line)
            while end > 1 and display_width(line[:end]) > columns:
                end -= 1
            lines.append(line[:end])
            line = line[end:]
    return [*lines, line.rstrip()] if line.strip() or not lines else lines


def _pieces(text: str) -> list[str]:
    """The pieces of a text that stay whole, with the spaces behind them."""
    pieces = _PIECE.findall(text)
    return [piece[at : at + _LONGEST_PIECE] for piece in pieces for at in range(0, len(piece), _LONGEST_PIECE)]


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
