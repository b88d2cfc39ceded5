"""Bounds on the depth of JSON, and on the numbers in it.

The hub stores and forwards bodies unread. Many parsers stop at a thousand levels, or fail at a number that no double
can hold; Python's at an integer of 4,300 digits. One such body would be lost on every reader in turn, or would make a
whole page of a mailbox or of a chat channel unreadable.
"""

import re
from typing import Final

from headgate.hub.errors import RequestError

MAX_DEPTH: Final = 64
"""Arrays and objects inside each other, in one frame or body."""
TOO_DEEP: Final = f"expected JSON nested at most {MAX_DEPTH} deep"
MAX_DIGITS: Final = 100
"""Digits in a row."""
TOO_LARGE: Final = f"expected numbers of at most {MAX_DIGITS} digits, with an exponent below 200"

_STRING: Final = r'"[^"\\]*(?:\\.[^"\\]*)*"'

_STRINGS: Final = re.compile(_STRING, re.DOTALL)
_NO_BRACKETS: Final = re.compile(r"[^\[\]{}]+")
_RUNS: Final = re.compile(r"(\[*)(\]*)")
_REMOVED: Final = 8  # innermost levels that are removed at once: otherwise many shallow arrays would be many runs

_SMALL: Final = re.compile(r"[eE]-0*[1-9]\d\d", re.ASCII)
_MANY_ZEROS: Final = "0" * 200
_STRING_OR_NUMBER: Final = re.compile(rf"{_STRING}|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?", re.DOTALL | re.ASCII)
_BEYOND_DOUBLES: Final = "1e999"

_STRINGS_IN_BYTES: Final = re.compile(_STRING.encode(), re.DOTALL)
_EXPONENT: Final = re.compile(rb"\d[eE]\+?0*(?:[2-9]\d\d|[1-9]\d{3})")
_SHAPES: Final = bytes.maketrans(b"123456789E", b"000000000e")
"""Makes all digits equal, since plain searches are far faster than a regular expression."""
_MANY_DIGITS: Final = b"0" * (MAX_DIGITS + 1)


def check_depth(text: str) -> None:
    """Refuse valid JSON that is nested too deeply.

    It is called for frames of agents that are over their limit, too: what counts is the worst case.
    """
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    brackets = _NO_BRACKETS.sub("", _STRINGS.sub("", text)).replace("{", "[").replace("}", "]")
    for _ in range(_REMOVED):
        brackets = brackets.replace("[]", "")
    depth = _REMOVED
    for opened, closed in _RUNS.findall(brackets):
        depth += len(opened)
        if depth > MAX_DEPTH:
            raise RequestError(400, "invalid", TOO_DEEP)
        depth -= len(closed)


def check_numbers(body: bytes) -> None:
    """Refuse valid JSON with a number that readers may not be able to parse."""
    shape = body.translate(_SHAPES)
    if b"0e000" in shape or b"0e+000" in shape or _MANY_DIGITS in shape:  # perhaps within a string
        numbers = _STRINGS_IN_BYTES.sub(b'""', body)
        if _MANY_DIGITS in numbers.translate(_SHAPES) or _EXPONENT.search(numbers):
            raise RequestError(400, "invalid", TOO_LARGE)


def expose_underflow(text: str) -> str:
    """Valid JSON in which every number that a double would round to 0 is one that no double can hold.

    A reader of doubles refuses that, with the place where it is, but would have read the other as 0. Other JSON is
    returned as it is.
    """
    if _SMALL.search(text) or _MANY_ZEROS in text:  # no other number is so small
        return _STRING_OR_NUMBER.sub(_expose, text)
    return text


def _expose(found: re.Match[str]) -> str:
    token = found[0]
    if token[0] == '"' or float(token) or not re.split("[eE]", token)[0].strip("-0."):
        return token
    return _BEYOND_DOUBLES
