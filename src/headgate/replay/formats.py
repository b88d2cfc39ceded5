"""Log formats: access logs, JSON lines and CSV. The lines are untrusted input: none of them stops a replay."""

import csv
import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from itertools import islice
from typing import Any, Final, TypeAlias

from headgate.errors import InvalidInput, printable
from headgate.gate.accounts import MAX_ACCOUNT
from headgate.gate.policy import MAX_AGENT
from headgate.replay.accounts import LoggedHold
from headgate.replay.engine import Classifier, TierReplays
from headgate.replay.logfile import ReplayError
from headgate.replay.options import FIELDS, FORMATS, LogOptions
from headgate.replay.timestamps import parse_number, parse_timestamp

LoggedRequest: TypeAlias = tuple[int, str, TierReplays, int, LoggedHold | None]
"""Time, agent, tier under each policy, cost, and what it costs accounts."""

_SAMPLE: Final = 50  # lines that determine the format
_MAX_SHOWN: Final = 10  # malformed lines in the report
_MAX_TEXT: Final = 200  # characters of each
_MAX_ROUTED: Final = 10_000  # paths in the cache of routes
_MAX_PATH: Final = 500  # characters of a path in that cache
_DELIMITERS: Final = (",", ";", "\t")
_TIME: Final = "time: expected an access log's, ISO 8601, or seconds since 1970"
_COSTS: Final = 'costs: expected amounts by resource, such as {"tokens": 830, "usd": "0.0123"}'
_MAX_RESOURCES: Final = 64  # in the costs of a line
_AMOUNT: Final = re.compile(r"[0-9]{1,30}(\.[0-9]{1,30})?(e-[0-9]{1,2})?", re.ASCII)
_NAME: Final = f"agent: expected 1 to {MAX_AGENT} printable characters"

# Host, user, time, request, status; the rest after the size is ignored. A name can't contain a space, or a client
# could forge a time within it.
_ACCESS: Final = re.compile(
    r'([^ ]{1,128}) [^ ]+ ([^ ]{1,128}) \[([^\]]{1,64})\] "([^"\\]*(?:\\.[^"\\]*)*)" (\d\d\d) (?:\d+|-)(?: .*)?\r?',
    re.ASCII,
)


@dataclass(frozen=True)
class MalformedLine:
    """A line that can't be parsed."""

    log: str
    line: int
    reason: str
    text: str


class UnusedLines:
    """The lines without a request: their number, the reasons, and the first few malformed ones."""

    def __init__(self) -> None:
        self.blank = 0
        self.skipped = 0
        """Lines without a user, where requests count by user only."""
        self.reasons: Final[Counter[str]] = Counter()
        self.first: Final[list[MalformedLine]] = []

    @property
    def malformed(self) -> int:
        return self.reasons.total()

    def add(self, log: str, number: int, line: str, reason: str) -> None:
        line = line.rstrip("\r")
        if not line.strip():
            self.blank += 1
            return
        self.reasons[reason] += 1
        if len(self.first) < _MAX_SHOWN:
            self.first.append(MalformedLine(log, number, reason, _excerpt(line)))


class _Malformed(Exception):
    """The reason why a line can't be parsed."""


class LogParser(ABC):
    """Parses the lines of one log into requests, and records the lines without one."""

    format = ""

    def __init__(self, name: str, options: LogOptions, classifier: Classifier, unused: UnusedLines) -> None:
        self.name, self.options, self.classifier, self.unused = name, options, classifier, unused
        self.count = 0
        """Lines so far."""
        self._names: Final = {what: options.fields.get(what, what) for what in FIELDS}
        self._routes: Final = [(route.matcher(), classifier.tier_or_action(route.kind)) for route in options.routes]
        self._routed: Final[dict[str, tuple[str | None, str | None]]] = {}

    @abstractmethod
    def requests(self, lines: Sequence[str]) -> Iterator[LoggedRequest]:
        """Parse the next lines."""

    def _route(self, request: str) -> tuple[str | None, str | None]:
        """The tier or action of a request line such as "GET /path?query HTTP/1.1"."""
        method, _, rest = request.partition(" ")
        key = f"{method} {rest.partition(' ')[0].partition('?')[0]}"
        found = self._routed.get(key)
        if found is None:
            found = next((kind for matches, kind in self._routes if matches(key)), (self.options.tier, None))
            if len(self._routed) >= _MAX_ROUTED:
                self._routed.clear()
            if len(key) <= _MAX_PATH:
                self._routed[key] = found
        return found


class AccessLogParser(LogParser):
    """The common and the combined log format."""

    format = "access"

    def requests(self, lines: Sequence[str]) -> Iterator[LoggedRequest]:
        match, key, channel = _ACCESS.fullmatch, self.options.key, self.options.channel
        classify, route = self.classifier.classify, self._route if self._routes else None
        tiers = classify(channel, self.options.tier, None)
        reject = partial(self.unused.add, self.name)
        stamp, at = "", 0
        for number, line in enumerate(lines, self.count + 1):
            found = match(line)
            if found is None:
                reject(number, line, "not an access log line")
                continue
            agent, user, time, request, status = found.groups()
            if time != stamp:
                now = parse_timestamp(time)
                if now is None:
                    reject(number, line, _TIME)
                    continue
                stamp, at = time, now
            if user != "-" and key != "address" and status != "401":  # an unauthenticated client can claim any name
                agent = user
            elif key == "user":
                self.unused.skipped += 1
                continue
            if not agent.isprintable():
                reject(number, line, _NAME)
                continue
            yield at, agent, tiers if route is None else classify(channel, *route(request)), 1, None
        self.count += len(lines)


class _RecordParser(LogParser):
    """Lines with named fields."""

    def requests(self, lines: Sequence[str]) -> Iterator[LoggedRequest]:
        for number, line in enumerate(lines, self.count + 1):
            try:
                request = self._parse(line)
            except _Malformed as error:
                self.unused.add(self.name, number, line, str(error))
            else:
                yield request
        self.count += len(lines)

    @abstractmethod
    def _parse(self, line: str) -> LoggedRequest:
        """Parse one line; raises `_Malformed`."""

    def _request(self, get: Callable[[str], Any]) -> LoggedRequest:
        """Build the request of a line, from a function that returns its fields."""
        request = self._time(get("time")), self._agent(get), self._tiers(get), self._cost(get("cost"))
        costs = self._costs(get("costs"))
        if costs is None:
            return (*request, None)
        return (*request, LoggedHold(costs, self._name("tool", get), self._name("session", get)))

    def _missing(self, what: str) -> _Malformed:
        return _Malformed(f"no field {self._names[what]!r} for the {what}")

    def _time(self, value: Any) -> int:
        if value is None or value == "":
            raise self._missing("time")
        at = None
        if isinstance(value, str):
            at = parse_timestamp(value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            at = parse_number(value)
        if at is None:
            raise _Malformed(_TIME)
        return at

    def _agent(self, get: Callable[[str], Any]) -> str:
        name = self._name("agent", get, MAX_AGENT)
        if name is None:
            raise self._missing("agent")
        return name

    def _tiers(self, get: Callable[[str], Any]) -> TierReplays:
        channel, tier, action = get("channel") or self.options.channel, get("tier") or None, get("action") or None
        if tier:
            action = None  # a log may have both
        elif not action:
            method, path = get("method"), get("path")
            routed = self._routes and isinstance(method, str) and isinstance(path, str)
            tier, action = self._route(f"{method} {path}") if routed else (self.options.tier, None)
        if not all([isinstance(one, str) for one in (channel, tier or "", action or "")]):
            raise _Malformed("channel, tier, action: expected text")
        try:
            return self.classifier.classify(channel, tier, action)
        except InvalidInput as error:
            raise _Malformed(str(error).partition(", got")[0]) from None

    def _cost(self, value: Any) -> int:
        if value is None or value == "":
            return 1
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 18:
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise _Malformed("cost: expected a whole number of at least 1")
        return value

    def _costs(self, value: Any) -> dict[str, int | Decimal] | None:
        """Costs by resource: an object, or a text such as "tokens=830 usd=0.0123"."""
        if value is None or value == "":
            return None
        if isinstance(value, str):
            pairs = [pair.partition("=") for pair in value.split()]
            value = {name: amount for name, _, amount in pairs}
        if not isinstance(value, dict) or len(value) > _MAX_RESOURCES:
            raise _Malformed(_COSTS)
        return {str(name): _amount(amount) for name, amount in value.items()}

    def _name(self, what: str, get: Callable[[str], Any], most: int = MAX_ACCOUNT) -> str | None:
        value = get(what)
        if value is None or value == "":
            return None
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str) or len(value) > most or not value.isprintable():
            raise _Malformed(f"{what}: expected 1 to {most} printable characters")
        return value


def _amount(value: Any) -> int | Decimal:
    """An amount, exactly as it is written."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    text = repr(value) if isinstance(value, float) else value
    if not isinstance(text, str) or not _AMOUNT.fullmatch(text):
        raise _Malformed(_COSTS)
    amount = Decimal(text)
    return int(amount) if amount == amount.to_integral_value() else amount


class JsonLinesParser(_RecordParser):
    """A JSON object in each line."""

    format = "json"

    def _parse(self, line: str) -> LoggedRequest:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            raise _Malformed("not JSON") from None
        if not isinstance(found, dict):
            raise _Malformed("not a JSON object")
        names = self._names
        return self._request(lambda what: _within(found, names[what]))


def _within(found: Any, name: str) -> Any:
    """A field by its name, or by its path."""
    if name in found:
        return found[name]
    for part in name.split("."):
        if not isinstance(found, dict):
            return None
        found = found.get(part)
    return found


class CsvParser(_RecordParser):
    """A header with the names of the columns, then one record per line."""

    format = "csv"

    _delimiter = ","
    _width = 0
    _places: Mapping[str, int] = {}

    def requests(self, lines: Sequence[str]) -> Iterator[LoggedRequest]:
        while lines and not self._width:
            self.count += 1
            if lines[0].strip():
                self._read_header(lines[0].rstrip("\r"))
            else:
                self.unused.blank += 1
            lines = lines[1:]
        yield from super().requests(lines)

    def _read_header(self, line: str) -> None:
        self._delimiter = _delimiter(line)
        columns = [cell.strip() for cell in _cells(line, self._delimiter)]
        self._width = len(columns)
        self._places = {what: columns.index(name) for what, name in self._names.items() if name in columns}
        for what in ("time", "agent"):
            if what not in self._places:
                there = ", ".join([_excerpt(column) for column in columns[:20]])
                raise ReplayError(
                    f"{self.name}: expected a column {self._names[what]!r} in the header, got: {there}; "
                    f"--field {what}=NAME names the one for the {what}"
                )

    def _parse(self, line: str) -> LoggedRequest:
        cells = _cells(line.rstrip("\r"), self._delimiter)
        if len(cells) != self._width:
            raise _Malformed(f"expected {self._width} columns, as in the header")
        places = self._places
        return self._request(lambda what: cells[places[what]].strip() if what in places else None)


def _delimiter(line: str) -> str:
    return max(_DELIMITERS, key=line.count)


def _cells(line: str, delimiter: str) -> list[str]:
    """The cells of one line; a record can't span several."""
    if '"' not in line:
        return line.split(delimiter)
    try:
        return next(csv.reader((line,), delimiter=delimiter, strict=True))
    except csv.Error:
        return []


_PARSERS: Final[dict[str, type[LogParser]]] = {one.format: one for one in (AccessLogParser, JsonLinesParser, CsvParser)}


def choose_parser(name: str, lines: Iterable[str], options: LogOptions) -> type[LogParser]:
    """Choose the parser of a log by its first lines."""
    if options.format is not None:
        return _PARSERS[options.format]
    some = list(islice((line.rstrip("\r") for line in lines if line.strip()), _SAMPLE))
    access = sum([_ACCESS.fullmatch(line) is not None for line in some])
    objects = sum([_is_object(line) for line in some])
    if access or objects:
        return AccessLogParser if access >= objects else JsonLinesParser
    wide = [len(_cells(line, _delimiter(some[0]))) for line in some[:2]]
    if len(wide) == 2 and wide[0] == wide[1] > 1:
        return CsvParser
    got = f"got: {_excerpt(some[0])}" if some else "got an empty log"
    raise ReplayError(
        f"{name}: expected an access log, JSON lines, or CSV with a header, {got}\n"
        f"  --format sets the log format: {', '.join(FORMATS)}"
    )


def _is_object(line: str) -> bool:
    if not line.lstrip().startswith("{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _excerpt(line: str) -> str:
    """The beginning of a line, safe to print."""
    return printable(line[:_MAX_TEXT]) + ("…" if len(line) > _MAX_TEXT else "")
