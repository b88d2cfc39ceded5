"""What is printed: text that can do no harm, tables that fit the terminal, colours and progress where they belong."""

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, Self, TextIO
from unicodedata import category, east_asian_width

GREEN: Final = "32"
YELLOW: Final = "33"
RED: Final = "31"
BOLD: Final = "1"
FAINT: Final = "2"

_NARROWEST: Final = 12  # columns that the text which gives way keeps
_SOON: Final = 1.0  # seconds after which somebody who waits is told what for
_REDRAW: Final = 0.1


class Cell(NamedTuple):
    """A text in a table, and its colour."""

    text: str
    colour: str = ""


class Column(NamedTuple):
    """How one column of a table looks. The first one that is `elastic` gives way where the terminal is too narrow."""

    title: str
    right: bool = False
    elastic: bool = False


def harmless(text: str) -> str:
    """Somebody else's text: whatever would move the cursor, end the line or not be seen is escaped."""
    if text.isprintable():
        return text
    return "".join([one if one.isprintable() else one.encode("unicode_escape").decode() for one in text])


def width(text: str) -> int:
    """The columns that a text takes: Chinese, Japanese and Korean characters take two, accents none."""
    if text.isascii():
        return len(text)
    return sum([_columns(one) for one in text])


def _columns(one: str) -> int:
    if category(one) in ("Mn", "Me"):
        return 0
    return 2 if east_asian_width(one) in "WF" else 1


def cut(text: str, columns: int) -> str:
    """A text that takes no more columns; where something is missing, an ellipsis says so."""
    if width(text) <= columns:
        return text
    taken, end = 0, 0
    while taken + _columns(text[end]) < columns:
        taken += _columns(text[end])
        end += 1
    return text[:end] + "…"


def heat(used: float) -> str:
    """The colour of a bucket of which this share is used: green below a half, yellow up to 80 %, then red."""
    return GREEN if used < 0.5 else YELLOW if used <= 0.8 else RED


def is_live(out: TextIO) -> bool:
    """Whether a person looks at it, on a terminal that can do more than print."""
    return out.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def painted(text: str, colour: str, out: TextIO) -> str:
    """A text in a colour, where `out` shows colours and NO_COLOR doesn't forbid them."""
    if not colour or os.environ.get("NO_COLOR") or not is_live(out):
        return text
    return f"\x1b[{colour}m{text}\x1b[0m"


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str | Cell]]) -> None:
    """Print rows below their titles, everything made harmless. In a file or a pipe nothing is cut."""
    out = sys.stdout
    cells = [[Cell(column.title, BOLD) for column in columns]]
    cells += [[Cell(harmless(one), "") if isinstance(one, str) else Cell(harmless(one.text), one.colour) for one in row]
              for row in rows]  # fmt: skip
    widths = [max([width(row[place].text) for row in cells]) for place in range(len(columns))]
    if out.isatty():
        over = sum(widths) + 2 * (len(columns) - 1) - shutil.get_terminal_size().columns
        elastic = next((place for place, column in enumerate(columns) if column.elastic), None)
        if over > 0 and elastic is not None:
            widths[elastic] = max(widths[elastic] - over, min(_NARROWEST, widths[elastic]))
    for row in cells:
        line = []
        for column, cell, wide in zip(columns, row, widths, strict=True):
            text = cut(cell.text, wide)
            gap, shown = " " * (wide - width(text)), painted(text, cell.colour, out)
            line.append(gap + shown if column.right else shown + gap)
        print("  ".join(line).rstrip())


def print_json(found: object) -> None:
    """Print one object in one line. What isn't ASCII is escaped: no name in it can do harm."""
    print(json.dumps(found))


class Progress:
    """A line that says how far something is, on a terminal: shown once it has taken a second, gone when it is done."""

    def __init__(self, out: TextIO | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._out, self._now = sys.stderr if out is None else out, now
        self._live, self._drawn = is_live(self._out), False
        self._next = now() + _SOON

    def show(self, text: Callable[[], str]) -> None:
        """Draw the line anew, if it is time to."""
        if self._live and (now := self._now()) >= self._next:
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
def patience(what: str) -> Iterator[None]:
    """Tell somebody at a terminal what is being waited for, if it takes longer than a second."""
    if not is_live(sys.stderr):
        yield
        return
    told = threading.Event()

    def tell() -> None:
        told.set()
        sys.stderr.write(f"{what} …")
        sys.stderr.flush()

    timer = threading.Timer(_SOON, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if told.is_set():
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
