"""Patterns of requests: "/login", "POST /login", "/files/*", "/items/{id}".

Frameworks don't agree on which paths are the same: some accept "/login/" or "//login" for "/login", ignore case, or cut
off the prefix that the application is mounted at. What they will serve isn't known yet, so a path is read in every way
in which one of them might, and the limits of all readings apply. A request is skipped only if it is literally what the
pattern says. docs/decisions/0016-routes.md has the reasons.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from posixpath import normpath
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

from headgate.errors import refuse

T = TypeVar("T")
Methods: TypeAlias = tuple[str, ...]

_PATTERN: Final = re.compile(r"(?:(?P<method>[A-Z]+) )?(?P<path>/(?:[^*{}]|\{[^*{}/]+\})*\*?|\*)")
_AMBIGUOUS: Final = re.compile(r"//|/\.\.?(?:/|\Z)|[\\;%\x00-\x1f\x7f]")
"""Parts of paths that servers or file systems may read otherwise: empty and dot segments, special characters."""


class RequestPath(NamedTuple):
    """The path of a request, as it is known before a framework has found its handler."""

    path: str
    prefix: str = ""
    """The prefix of the path, present or removed, if the application is mounted somewhere."""
    sent: str = ""
    """The path that the client has sent, if that is known: a framework may have rewritten it since."""
    variable_prefix: bool = False
    """Whether the caller may have chosen the prefix, as in `Mount("/{tenant}")`."""

    def candidates(self) -> list[str]:
        """The path within the application, and with the prefix, unless that isn't known or is chosen by the caller."""
        prefix, rest = self.prefix.rstrip("/"), self.path
        if prefix and (rest == prefix or rest.startswith(f"{prefix}/")):
            rest = rest[len(prefix) :]
        whole = prefix + rest
        known = prefix and whole in (self.path, self.sent) and not self.variable_prefix
        return [rest, whole] if known else [rest]

    def was_rewritten(self) -> bool:
        """Whether the client has sent another path than this."""
        rest = self.candidates()[0]
        return self.sent not in ("", self.path, rest, self.prefix.rstrip("/") + rest)

    def is_ambiguous(self) -> bool:
        """Whether servers, proxies or file systems read it in different ways."""
        return _AMBIGUOUS.search(self.path) is not None

    def readings(self) -> Iterator[list[str]]:
        """The readings of the path by frameworks: for each, the path, and perhaps another with the prefix."""
        candidates = self.candidates()
        yield candidates
        if self.was_rewritten():  # before the framework, or by it
            yield self._replace(path=self.sent).candidates()
        if self.prefix:  # Litestar cuts after its first occurrence, wherever that is
            for path in dict.fromkeys([self.path, self.sent]):
                _, cut, rest = path.partition(self.prefix)
                if cut and _normal(rest) != _normal(candidates[0]):
                    yield [rest]
        if self.is_ambiguous():  # handlers of static files resolve dot segments
            yield [normpath(path.replace("\\", "/")) for path in candidates]


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
        candidates = request.candidates()
        found = dict.fromkeys(self._literal.find(method, [] if request.is_ambiguous() else candidates))
        for reading in request.readings():
            found.update(dict.fromkeys(self._loose.find(method, map(_normal, reading))))
        if candidates == [request.path] or len(candidates) > 1:
            return [self._values[index] for index in found]
        # The path with its prefix is no candidate, but a pattern may be written like that.
        found.update(dict.fromkeys(self._loose.find(method, [_normal(request.path)], default=False)))
        return [self._values[index] for index in found]


class SkipPatterns:
    """Patterns as those of `RoutePatterns`, taken literally."""

    def __init__(self, where: str, given: Iterable[str]) -> None:
        parsed = [_parse(where, one) for one in given]
        self._patterns: Final = _Patterns([(methods, _compile(path)) for methods, path in parsed])

    def match(self, method: str, request: RequestPath) -> bool:
        """Whether a request is certainly for one of the patterns; with or without the prefix, if there is one."""
        path, prefix, _, _ = request
        candidates = request.candidates()
        if request.is_ambiguous() or request.was_rewritten():
            return False
        if candidates[0] == path and prefix.strip("/") and prefix.rstrip("/") in path:
            return False  # Litestar would cut there
        return self._patterns.find(method, candidates) != [None]


class _Patterns:
    """Regular expressions in order, each for some methods, or for all."""

    def __init__(self, given: list[tuple[Methods, str]]) -> None:
        self._each: Final = [re.compile(pattern, re.DOTALL) for _, pattern in given]
        self._by_method: Final[dict[str, tuple[re.Pattern[str], list[int]]]] = {}
        for method in {"", *(method for methods, _ in given for method in methods)}:
            which = [index for index, (methods, _) in enumerate(given) if not methods or method in methods]
            any_of = "|".join(f"({given[index][1]})" for index in which)  # one group each: the last one tells which
            self._by_method[method] = re.compile(any_of, re.DOTALL), which

    def find(self, method: str, paths: Iterable[str], *, default: bool = True) -> list[int | None]:
        """The first pattern that matches, for each of one or two paths; None by default, if none does.

        A pattern that matches both paths is not found by the one if an earlier pattern matches the other.
        """
        any_of, which = self._by_method.get(method) or self._by_method[""]
        found: dict[int | None, str] = {}
        for path in paths:
            match = any_of.fullmatch(path)
            if match is not None and match.lastindex:
                found[which[match.lastindex - 1]] = path
        if len(found) < 2:
            return list(found) or ([None] if default else [])
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
