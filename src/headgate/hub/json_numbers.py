"""A bound on the numbers in JSON.

The hub stores and forwards bodies unread. Many parsers fail at a number that no double can hold, and Python's at an
integer of 4,300 digits: one such body would make a whole page of a mailbox or of a chat channel unreadable.
"""

import re
from typing import Final

from headgate.hub.errors import RequestError

MAX_DIGITS: Final = 100
"""Digits in a row."""
TOO_LARGE: Final = f"expected numbers of at most {MAX_DIGITS} digits, with an exponent below 200"

_STRINGS: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_EXPONENT: Final = re.compile(rb"\d[eE]\+?0*(?:[2-9]\d\d|[1-9]\d{3})")
_SHAPES: Final = bytes.maketrans(b"123456789E", b"000000000e")
"""Makes all digits equal, since plain searches are far faster than a regular expression."""
_MANY_DIGITS: Final = b"0" * (MAX_DIGITS + 1)


def check_numbers(body: bytes) -> None:
    """Refuse valid JSON with a number that readers may not be able to parse."""
    if _is_suspect(body.translate(_SHAPES)):  # perhaps within a string
        numbers = _STRINGS.sub(b'""', body)
        if _MANY_DIGITS in numbers.translate(_SHAPES) or _EXPONENT.search(numbers):
            raise RequestError(400, "invalid", TOO_LARGE)


def _is_suspect(shape: bytes) -> bool:
    return b"0e000" in shape or b"0e+000" in shape or _MANY_DIGITS in shape
