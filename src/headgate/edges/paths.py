"""Patterns of requests: "/login", "POST /login", "/files/*", "/items/{id}"."""

import re
from collections.abc import Mapping
from typing import Final, Generic, TypeVar

from headgate.errors import refuse

T = TypeVar("T")

_PATTERN: Final = re.compile(r"(?:(?P<method>[A-Z]+) )?(?P<path>/(?:[^*{}]|\{[^*{}/]+\})*\*?|\*)")


class PathPatterns(Generic[T]):
    """Values by pattern. Of the patterns that match a request, the first counts.

    A pattern is a path, optionally after a method. `{name}` matches one segment, a final `*` matches anything.
    """

    def __init__(self, where: str, given: Mapping[str, T]) -> None:
        self._exact: Final[dict[tuple[str, str], tuple[int, T]]] = {}
        self._patterns: Final[list[tuple[int, str, re.Pattern[str], T]]] = []
        for order, (pattern, value) in enumerate(given.items()):
            match = _PATTERN.fullmatch(str(pattern))
            if match is None:
                refuse(where, "a path such as '/login', 'POST /login', '/files/*' or '/items/{id}'", pattern)
            method, path = match["method"] or "", match["path"]
            if "{" in path or path.endswith("*"):
                self._patterns.append((order, method, _compile(path), value))
            else:
                self._exact.setdefault((method, path), (order, value))

    def find(self, method: str, path: str) -> T | None:
        """The value of the first pattern that matches; None if none does."""
        found = [one for one in (self._exact.get((method, path)), self._exact.get(("", path))) if one is not None]
        for order, of, pattern, value in self._patterns:
            if of in ("", method) and pattern.fullmatch(path):
                found.append((order, value))
                break
        return min(found, key=lambda one: one[0])[1] if found else None


def _compile(path: str) -> re.Pattern[str]:
    rest = path.removesuffix("*")
    parts = ["[^/]+" if part.startswith("{") else re.escape(part) for part in re.split(r"(\{[^{}/]*\})", rest)]
    return re.compile("".join(parts) + (".*" if rest != path else ""), re.DOTALL)
