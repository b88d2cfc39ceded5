"""Patterns of requests: "/login", "POST /login", "/files/*", "/items/{id}".

Frameworks don't agree on which paths are the same: some accept "/login/" or "//login" for "/login", ignore case, or cut
off the prefix that the application is mounted at. What they will serve isn't known yet, so a path is read in every way
in which one of them might, and the limits of all readings apply. A request is skipped only if it is literally what the
pattern says. docs/decisions/0016-routes.md has the reasons.
"""

import re
from collections.abc import Iterable, Mapping
from posixpath import normpath
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

from headgate.errors import refuse

T = TypeVar("T")
Methods: TypeAlias = tuple[str, ...]

_PATTERN: Final = re.compile(r"(?:(?P<method>[A-Z]+) )?(?P<path>/(?:[^*{}]|\{[^*{}/]+\})*\*?|\*)")
_AMBIGUOUS: Final = re.compile(r"//|/\.\.?(?:/|\Z)|[\\;%\x00-\x1f\x7f]")
"""What some servers, proxies or file systems read in another way: empty and dot segments, and special characters."""


class RequestPath(NamedTuple):
    """What is known of a request's path before a framework has found its handler."""

    path: str
    prefix: str = ""
    """What the path begins with, or did, if the application is mounted somewhere."""
    sent: str = ""
    """The path that the client has sent, if that is known: a framework may have changed it since."""
    chosen: bool = False
    """Whether the caller may have chosen the prefix, as in `Mount("/{tenant}")`."""

    def names(self) -> list[str]:
        """The path within the application, and with the prefix, unless that isn't known or is chosen by the caller."""
        prefix, rest = self.prefix.rstrip("/"), self.path
        if prefix and (rest == prefix or rest.startswith(f"{prefix}/")):
            rest = rest[len(prefix) :]
        whole = prefix + rest
        return [rest, whole] if prefix and whole in (self.path, self.sent) and not self.chosen else [rest]

    def changed(self) -> bool:
        """Whether the client has sent another path than this."""
        rest = self.names()[0]
        return self.sent not in ("", self.path, rest, self.prefix.rstrip("/") + rest)


class RoutePatterns(Generic[T]):
    """Values by pattern, and one for requests that match none. Of the patterns that match a reading, the first counts.

    A pattern is a path, optionally after a method. `{name}` matches one segment, a final `*` matches anything, and
    "GET" includes HEAD.

    >>> routes = RoutePatterns("routes", {"POST /login": "5/minute", "/files/*": "60/minute"}, "9/second")
    >>> routes.find("POST", RequestPath("/login")), routes.find("GET", RequestPath("/login"))
    (['5/minute'], ['9/second'])
    >>> routes.find("GET", RequestPath("/api/files/a", prefix="/api"))
    ['60/minute']

    What the path is literally comes first. A framework may ignore case, repeated slashes and slashes at the end:

    >>> routes.find("POST", RequestPath("//Login/"))
    ['9/second', '5/minute']
    """

    def __init__(self, where: str, given: Mapping[str, T], default: T) -> None:
        parsed = [_parse(where, pattern) for pattern in given]
        patterns = [(("GET", "HEAD") if method == ("GET",) else method, path) for method, path in parsed]
        self._values: Final[dict[int | None, T]] = {None: default}
        self._values.update(enumerate(given.values()))
        self._literal: Final = _Patterns([(methods, _compile(path)) for methods, path in patterns])
        # Starlette's routes end in "$", which a final newline may follow.
        loose = [(methods, rf"(?i:{_compile(_normal(path), bare=True)})\n?") for methods, path in patterns]
        self._loose: Final = _Patterns(loose)

    def find(self, method: str, request: RequestPath) -> list[T]:
        """The values of all readings of a request; what it is literally comes first."""
        path, prefix, sent, _ = request
        names = request.names()
        readings = [names]
        if request.changed():
            readings.append(request._replace(path=sent).names())
        if prefix:  # wherever it is: Litestar cuts at its first occurrence
            cut = [way.partition(prefix)[2] for way in dict.fromkeys([path, sent]) if prefix in way]
            readings += [[way] for way in cut if _normal(way) != _normal(names[0])]
        odd = _AMBIGUOUS.search(path) is not None
        if odd:  # handlers of static files resolve dot segments
            readings.append([normpath(way.replace("\\", "/")) for way in names])
        found = dict.fromkeys(self._literal.find(method, [] if odd else names))
        for reading in readings:
            found.update(dict.fromkeys(self._loose.find(method, [_normal(way) for way in reading])))
        if len(names) == 1 and path != names[0]:
            spelled = self._loose.find(method, [_normal(path)])  # no application is found by it, but a pattern may be
            found.update(dict.fromkeys(index for index in spelled if index is not None))
        return [self._values[index] for index in found]


class SkipPatterns:
    """Patterns as those of `RoutePatterns`, taken literally."""

    def __init__(self, where: str, given: Iterable[str]) -> None:
        parsed = [_parse(where, one) for one in given]
        self._patterns: Final = _Patterns([(methods, _compile(path)) for methods, path in parsed])

    def match(self, method: str, request: RequestPath) -> bool:
        """Whether a request is certainly for one of the patterns; with or without the prefix, if there is one."""
        path, prefix, _, _ = request
        names = request.names()
        if _AMBIGUOUS.search(path) or request.changed():
            return False
        if names[0] == path and prefix.strip("/") and prefix.rstrip("/") in path:
            return False  # Litestar would cut there
        return self._patterns.find(method, names) != [None]


class _Patterns:
    """Regular expressions in order, each for some methods, or for all."""

    def __init__(self, given: list[tuple[Methods, str]]) -> None:
        self._each: Final = [re.compile(pattern, re.DOTALL) for _, pattern in given]
        self._by_method: Final[dict[str, tuple[re.Pattern[str], list[int]]]] = {}
        for method in {"", *(method for methods, _ in given for method in methods)}:
            which = [index for index, (methods, _) in enumerate(given) if not methods or method in methods]
            any_of = "|".join(f"({given[index][1]})" for index in which)
            self._by_method[method] = re.compile(any_of, re.DOTALL), which

    def find(self, method: str, names: Iterable[str]) -> list[int | None]:
        """The first pattern that matches, for each of the one or two names that a path has; None if none does.

        A pattern that matches both names is not found by the one if an earlier pattern matches the other.
        """
        any_of, which = self._by_method.get(method) or self._by_method[""]
        found: dict[int | None, str] = {}
        for name in names:
            match = any_of.fullmatch(name)
            if match is not None and match.lastindex:
                found[which[match.lastindex - 1]] = name
        if len(found) < 2:
            return list(found) or [None]
        earlier, later = sorted(index for index in found if index is not None)
        return [earlier] if self._each[later].fullmatch(found[earlier]) else [earlier, later]


def _parse(where: str, pattern: object) -> tuple[Methods, str]:
    """The method of a pattern, if it has one, and its path."""
    match = _PATTERN.fullmatch(str(pattern))
    if match is None:
        refuse(where, "a path such as '/login', 'POST /login', '/files/*' or '/items/{id}'", pattern)
    return (match["method"],) if match["method"] else (), match["path"]


def _normal(path: str) -> str:
    """A path with one slash between segments, and none at the end."""
    return "/" + "/".join(segment for segment in path.split("/") if segment)


def _compile(path: str, *, bare: bool = False) -> str:
    """The regular expression of a path. With `bare`, "/files/*" also matches "/files"."""
    rest = path.removesuffix("*")
    segments = "/".join(_compile_segment(segment) for segment in rest.split("/"))
    if rest == path:
        return segments
    return f"{segments[:-1]}(?:/.*)?" if bare and rest.endswith("/") else f"{segments}.*"


def _compile_segment(segment: str) -> str:
    """Parameters end at the first place where they can, and the last one at the last: so nothing is tried twice.

    The groups are atomic. Otherwise the time for "{name}.{ext}" would grow with the square of the length.
    """
    first, *others = [re.escape(part) for part in re.split(r"\{[^{}/]*\}", segment)]
    lazy = [f"(?>[^/]+?{part})" for part in others[:-1]]
    return "".join([first, *lazy, *[f"(?>[^/]+{part})" for part in others[-1:]]])
