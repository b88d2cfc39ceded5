"""A bound on the nesting of JSON.

The hub stores and forwards bodies unread. A reader may be unable to parse what is nested too deeply: many parsers stop
at a thousand levels, so that one such body would be lost on every reader in turn.
"""

import re
from typing import Final

from headgate.hub.errors import RequestError

MAX_NESTING: Final = 64
"""Arrays and objects inside each other, in one frame or body."""
TOO_DEEP: Final = f"expected JSON nested at most {MAX_NESTING} deep"

_STRINGS: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NO_BRACKETS: Final = re.compile(r"[^\[\]{}]+")


def check_nesting(text: str) -> None:
    """Refuse valid JSON that is nested too deeply."""
    if text.count("[") + text.count("{") <= MAX_NESTING:
        return
    brackets = _NO_BRACKETS.sub("", _STRINGS.sub("", text)).replace("{", "[").replace("}", "]")
    for _ in range(MAX_NESTING):
        brackets = brackets.replace("[]", "")  # the innermost level, all at once
        if not brackets:
            return
    raise RequestError(400, "invalid", TOO_DEEP)
