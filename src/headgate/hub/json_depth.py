"""A bound on the depth of JSON.

The hub stores and forwards bodies unread. A reader may be unable to parse what is nested too deeply: many parsers stop
at a thousand levels, so that one such body would be lost on every reader in turn.
"""

import re
from typing import Final

from headgate.hub.errors import RequestError

MAX_DEPTH: Final = 64
"""Arrays and objects inside each other, in one frame or body."""
TOO_DEEP: Final = f"expected JSON nested at most {MAX_DEPTH} deep"

_STRINGS: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NO_BRACKETS: Final = re.compile(r"[^\[\]{}]+")
_RUNS: Final = re.compile(r"(\[*)(\]*)")
_REMOVED: Final = 8  # innermost levels that are removed at once: otherwise many shallow arrays would be many runs


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
