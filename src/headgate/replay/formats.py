"""What stands in a line of a log: access logs, JSON lines, CSV. Whatever a line holds, it does no harm."""

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple, TypeAlias

from headgate.errors import InvalidInput
from headgate.gate.policy import MAX_AGENT
from headgate.replay.engine import Judges, Kinds
from headgate.replay.logfile import ReplayError
from headgate.replay.options import FIELDS, FORMATS, Reading
from headgate.replay.timestamps import moment, moment_of

Event: TypeAlias = tuple[int, str, Judges, int]
"""One request: when, whose, the lanes that judge it, and its cost."""

_LOOKED_AT: Final = 50  # lines that tell the format
_SHOWN: Final = 10  # lines that can't be used and are shown
_SHOWN_TEXT: Final = 200  # characters of each
_MOST_ROUTED: Final = 10_000  # paths whose route is remembered, unless they are long
_LONG_PATH: Final = 500
_DELIMITERS: Final = (",", ";", "\t")

# Host, user, time, request, status; whatever follows the size isn't needed. A name can't hold a space: if it could,
# somebody could write a time of their own into it.
_ACCESS: Final = re.compile(
    r'([^ ]{1,128}) [^ ]+ ([^ ]{1,128}) \[([^\]]{1,64})\] "([^"\\]*(?:\\.[^"\\]*)*)" (\d\d\d) (?:\d+|-)(?: .*)?\r?',
    re.ASCII,
)


class Unusable(NamedTuple):
    """A line that can't be used."""

    log: str
    line: int
    reason: str
    text: str


class Unused:
    """The lines that come to nothing: how many, why, and the first few of them."""

    def __init__(self) -> None:
        self.blank = 0
        self.skipped = 0
        """Lines without a user, where only those with one are asked for."""
        self.reasons: Final[Counter[str]] = Counter()
        self.first: Final[list[Unusable]] = []

    @property
    def malformed(self) -> int:
        return self.reasons.total()

    def note(self, log: str, number: int, line: str, reason: str) -> None:
        line = line.rstrip("\r")
        if not line.strip():
            self.blank += 1
            return
        self.reasons[reason] += 1
        if len(self.first) < _SHOWN:
            self.first.append(Unusable(log, number, reason, _harmless(line)))


class _Bad(Exception):
    """A line can't be used, for this reason."""


class Parser:
    """Turns the lines of one log into events; what can't be used is noted."""

    format = ""

    def __init__(self, name: str, reading: Reading, kinds: Kinds, unused: Unused) -> None:
        self.name, self.reading, self.kinds, self.unused = name, reading, kinds, unused
        self.count = 0
        """Lines so far."""
        self._routes: Final = [(route.matcher(), (route.tier, route.action)) for route in reading.routes]
        self._routed: Final[dict[str, tuple[str | None, str | None]]] = {}

    def events(self, lines: Sequence[str]) -> Iterator[Event]:
        """The requests that some more lines tell of."""
        for number, line in enumerate(lines, self.count + 1):
            try:
                event = self._event(line)
            except _Bad as bad:
                self.unused.note(self.name, number, line, str(bad))
            else:
                yield event
        self.count += len(lines)

    def _event(self, line: str) -> Event:
        raise NotImplementedError

    def _route(self, request: str) -> tuple[str | None, str | None]:
        """The tier or action of a request line such as "GET /path?query HTTP/1.1"."""
        method, _, rest = request.partition(" ")
        key = f"{method} {rest.partition(' ')[0].partition('?')[0]}"
        found = self._routed.get(key)
        if found is None:
            found = next((kind for fits, kind in self._routes if fits(key)), (self.reading.tier, None))
            if len(self._routed) >= _MOST_ROUTED:
                self._routed.clear()
            if len(key) <= _LONG_PATH:
                self._routed[key] = found
        return found


class AccessParser(Parser):
    """The common and the combined log format."""

    format = "access"

    def events(self, lines: Sequence[str]) -> Iterator[Event]:
        match, key, channel = _ACCESS.fullmatch, self.reading.key, self.reading.channel
        find, route = self.kinds.find, self._route if self._routes else None
        judges = find(channel, self.reading.tier, None)
        note = partial(self.unused.note, self.name)
        stamp, at = "", 0
        for number, line in enumerate(lines, self.count + 1):
            found = match(line)
            if found is None:
                note(number, line, "not a line of an access log")
                continue
            agent, user, time, request, status = found.groups()
            if time != stamp:
                now = moment(time)
                if now is None:
                    note(number, line, "a time that can't be read")
                    continue
                stamp, at = time, now
            if user != "-" and key != "address" and status != "401":  # who fails to sign in may claim to be anybody
                agent = user
            elif key == "user":
                self.unused.skipped += 1
                continue
            if not agent.isprintable():
                note(number, line, _NAME)
                continue
            yield at, agent, judges if route is None else find(channel, *route(request)), 1
        self.count += len(lines)


_NAME: Final = f"an agent's name that isn't 1 to {MAX_AGENT} printable characters"


class _Named(Parser):
    """Lines whose values have names."""

    def __init__(self, name: str, reading: Reading, kinds: Kinds, unused: Unused) -> None:
        super().__init__(name, reading, kinds, unused)
        self._names: Final = {what: reading.fields.get(what, what) for what in FIELDS}

    def _made(self, get: Callable[[str], Any]) -> Event:
        """The event of a line whose values can be got by what they are."""
        return self._time(get("time")), self._agent(get("agent")), self._judges(get), self._cost(get("cost"))

    def _missing(self, what: str) -> _Bad:
        return _Bad(f"no field {self._names[what]!r} for the {what}")

    def _time(self, value: Any) -> int:
        if value is None or value == "":
            raise self._missing("time")
        at = None
        if isinstance(value, str):
            at = moment(value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            at = moment_of(value)
        if at is None:
            raise _Bad("a time that can't be read")
        return at

    def _agent(self, value: Any) -> str:
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if value is None or value == "":
            raise self._missing("agent")
        if not isinstance(value, str) or len(value) > MAX_AGENT or not value.isprintable():
            raise _Bad(_NAME)
        return value

    def _judges(self, get: Callable[[str], Any]) -> Judges:
        channel, tier, action = get("channel") or self.reading.channel, get("tier") or None, get("action") or None
        if tier:
            action = None  # a log may tell both
        elif not action:
            method, path = get("method"), get("path")
            routed = self._routes and isinstance(method, str) and isinstance(path, str)
            tier, action = self._route(f"{method} {path}") if routed else (self.reading.tier, None)
        if not all([isinstance(one, str) for one in (channel, tier or "", action or "")]):
            raise _Bad("a channel, tier or action that isn't a text")
        try:
            return self.kinds.find(channel, tier, action)
        except InvalidInput as error:
            raise _Bad(f"a {str(error).partition(', got')[0].replace(': expected', ' other than')}") from None

    def _cost(self, value: Any) -> int:
        if value is None or value == "":
            return 1
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 18:
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise _Bad("a cost that isn't a whole number of at least 1")
        return value


class JsonParser(_Named):
    """A JSON object in each line."""

    format = "json"

    def _event(self, line: str) -> Event:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            raise _Bad("not JSON") from None
        if not isinstance(found, dict):
            raise _Bad("not a JSON object")
        names = self._names
        return self._made(lambda what: _within(found, names[what]))


def _within(found: Any, name: str) -> Any:
    """A field by its name, or by the names that lead to it."""
    if name in found:
        return found[name]
    for part in name.split("."):
        if not isinstance(found, dict):
            return None
        found = found.get(part)
    return found


class CsvParser(_Named):
    """A header that names the columns, and a record in each line after it."""

    format = "csv"

    def __init__(self, name: str, reading: Reading, kinds: Kinds, unused: Unused) -> None:
        super().__init__(name, reading, kinds, unused)
        self._delimiter = ","
        self._width = 0
        self._places: dict[str, int] = {}

    def events(self, lines: Sequence[str]) -> Iterator[Event]:
        while lines and not self._width:
            self.count += 1
            if lines[0].strip():
                self._head(lines[0].rstrip("\r"))
            else:
                self.unused.blank += 1
            lines = lines[1:]
        yield from super().events(lines)

    def _head(self, line: str) -> None:
        self._delimiter = _delimiter(line)
        columns = [cell.strip() for cell in _cells(line, self._delimiter)]
        self._width = len(columns)
        self._places = {what: columns.index(name) for what, name in self._names.items() if name in columns}
        for what in ("time", "agent"):
            if what not in self._places:
                there = ", ".join([_harmless(column) for column in columns[:20]])
                raise ReplayError(
                    f"{self.name}: expected a column {self._names[what]!r} in its first line, got: {there}; "
                    f"--field {what}=NAME says which one is the {what}"
                )

    def _event(self, line: str) -> Event:
        cells = _cells(line.rstrip("\r"), self._delimiter)
        if len(cells) != self._width:
            raise _Bad(f"not the {self._width} columns that its first line names")
        places = self._places
        return self._made(lambda what: cells[places[what]].strip() if what in places else None)


def _delimiter(line: str) -> str:
    return max(_DELIMITERS, key=line.count)


def _cells(line: str, delimiter: str) -> list[str]:
    """The cells of one line: a record doesn't go on in the next."""
    if '"' not in line:
        return line.split(delimiter)
    try:
        return next(csv.reader((line,), delimiter=delimiter, strict=True))
    except csv.Error:
        return []


_PARSERS: Final[dict[str, type[Parser]]] = {one.format: one for one in (AccessParser, JsonParser, CsvParser)}


def parser_of(name: str, lines: Iterable[str], reading: Reading) -> type[Parser]:
    """What reads a log that begins with these lines."""
    if reading.format is not None:
        return _PARSERS[reading.format]
    some = list(islice((line.rstrip("\r") for line in lines if line.strip()), _LOOKED_AT))
    access = sum([_ACCESS.fullmatch(line) is not None for line in some])
    objects = sum([_is_object(line) for line in some])
    if access or objects:
        return AccessParser if access >= objects else JsonParser
    wide = [len(_cells(line, _delimiter(some[0]))) for line in some[:2]]
    if len(wide) == 2 and wide[0] == wide[1] > 1:
        return CsvParser
    shown = f", got: {_harmless(some[0])}" if some else ", got an empty one"
    raise ReplayError(
        f"{name}: expected an access log, JSON lines, or CSV whose first line names the columns{shown}\n"
        f"  --format says which one it is: {', '.join(FORMATS)}"
    )


def _is_object(line: str) -> bool:
    if not line.lstrip().startswith("{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _harmless(line: str) -> str:
    """The beginning of a line, with everything escaped that a terminal might obey."""
    start = line[:_SHOWN_TEXT]
    if not start.isprintable():
        start = "".join([one if one.isprintable() else one.encode("unicode_escape").decode() for one in start])
    return start + ("…" if len(line) > _SHOWN_TEXT else "")
