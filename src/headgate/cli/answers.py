"""Answers of a hub, which may be anything: what can't be used is a ValueError, TypeError or LookupError.

`HubApi.parse` turns these into a `HubError`.
"""

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final

from headgate.errors import printable

MAX_ANSWER: Final = 64 * 1024 * 1024  # bytes

_MAX_DEPTH: Final = 32  # of an answer's objects and arrays
_MAX_NUMBER: Final = 10**30  # in an answer


def parse_object(text: bytes, fields: Mapping[str, type]) -> dict[str, Any]:
    """An object with fields of these types, in which nothing is too deep or too large to be printed."""
    if len(text) > MAX_ANSWER:
        raise ValueError
    numbers: Any = {"parse_int": _parse_int, "parse_float": _parse_float, "parse_constant": _parse_float}
    found = json.loads(text, **numbers)
    if not isinstance(found, dict) or not all([isinstance(found[name], kind) for name, kind in fields.items()]):
        raise TypeError
    level = [found]
    for _ in range(_MAX_DEPTH):
        level = [below for one in level for below in _below(one)]
    if level:
        raise ValueError
    return found


def _below(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _parse_int(text: str) -> int:
    return int(_bounded(int(text)))


def _parse_float(text: str) -> float:
    return _bounded(float(text))


def _bounded(number: float) -> float:
    if not -_MAX_NUMBER <= number <= _MAX_NUMBER:  # nor is NaN
        raise ValueError
    return number


def number(value: Any) -> float:
    """A number of an answer."""
    if not isinstance(value, (int, float)):
        raise TypeError
    return value


def whole(value: Any) -> int:
    """A number of an answer, without its fraction."""
    return int(number(value))


def shown(value: Any) -> str:
    """A text of an answer, in which nothing controls the terminal."""
    if not isinstance(value, str):
        raise TypeError
    return printable(value)


_UNITS: Final = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def seconds(milliseconds: int) -> str:
    """A span of time, in seconds with three digits; from 100 seconds on in its two largest units."""
    number = milliseconds / 1000
    return f"{number:.3g} s" if number < 99.95 else duration_text(number)


def duration_text(seconds: Any) -> str:
    """A number of seconds in its two largest units; "never" for null."""
    if seconds is None:
        return "never"
    rest = int(max(number(seconds), 0) + 0.999)
    for place, (size, unit) in enumerate(_UNITS):
        if rest >= size:
            below = (rest % size) // _UNITS[place + 1][0] if place < 3 else 0
            return f"{rest // size} {unit}" + (f" {below} {_UNITS[place + 1][1]}" if below else "")
    return "-"


def local_time(value: Any) -> str:
    """A time in seconds since 1970, as local time."""
    try:
        return datetime.fromtimestamp(number(value)).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError):
        raise ValueError from None
