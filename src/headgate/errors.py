"""The errors of headgate. A denial is not one of them: it is a `Decision`."""

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any, Final, NamedTuple, NoReturn


class HeadgateError(Exception):
    """The base of every error that headgate raises on purpose. Each can be pickled, with its fields."""

    def __reduce__(self) -> tuple[Any, ...]:
        return reduce_error(self)


class InvalidInput(HeadgateError, ValueError):
    """An argument can't be used. The text says where, what was expected, and what was given.

    A call that raised it has counted nothing.
    """


class Bound(NamedTuple):
    """The limit that decided on a hold of accounts."""

    account: str
    """The path of the account."""
    resource: str
    tool: str
    """"" unless it is a limit of one tool."""

    def __str__(self) -> str:
        return f"{self.resource} of {self.account}" + (f" by {self.tool}" if self.tool else "")


class RateLimited(HeadgateError):
    """A request was denied. Only verbs that say so raise it; everywhere else a denial is a `Decision`."""

    def __init__(
        self,
        agent_id: str,
        limit: float,
        pace: str,
        retry_ms: int | None,
        *,
        degraded: bool = False,
        bound: Bound | None = None,
    ) -> None:
        self.agent_id = agent_id
        """The agent, or another key, that was denied."""
        self.limit = limit
        """The limit, as so many per second on average."""
        self.pace = pace
        """The limit, in words."""
        self.retry_after_ms = retry_ms
        """Milliseconds until a retry can pass, rounded up, never 0; None if no wait would help."""
        self.degraded = degraded
        """Whether something other than the limit denied it: the store was away, or had no room for a new key."""
        self.bound = bound
        """The account, resource and tool that decided; None unless a hold of accounts was denied."""
        why = ", the store is away" if degraded else ""
        wait = "no wait would help" if self.retry_after_ms is None else f"retry after {self.retry_after_ms}ms"
        super().__init__(f"rate limited: agent {agent_id!r} at {pace}{why}, {wait}")


class StoreError(HeadgateError):
    """The server or the file behind a store can't be used. The text says why, and what to do."""


class StoreAway(StoreError):
    """The server behind a store couldn't be reached, or didn't answer in time.

    A check never raises it: it is then decided without the server.
    """


class StoreLost(StoreAway):
    """The server behind a store answers, but has lost the agents and changes of its hubs, or has those of others.

    Nothing is read from it or written to it until it has its data again, or an admin accepts it as it is.
    """


class HoldError(HeadgateError):
    """A hold can't do what was asked: it has ended, was settled with another cost, or there are too many of them.

    A call that raised it has changed nothing.
    """

    def __init__(self, text: str, state: str = "") -> None:
        super().__init__(text)
        self.state = state
        """The state of the hold instead, such as "settled"; "" if it isn't known, or isn't the reason."""


class UnknownHold(HoldError):
    """There is no such hold: it was never made for this key, or has been forgotten since it ended."""

    def __init__(self, key: str, hold_id: str) -> None:
        self.key = key
        self.hold_id = hold_id
        super().__init__(f"unknown hold {hold_id!r:.210} of {key!r:.210}: it was never made, or it ended too long ago")


class SessionClosed(HeadgateError):
    """A session was used after it had been closed."""

    def __init__(self, session: str) -> None:
        self.session = session
        super().__init__(f"session {session} is closed")


def reduce_error(error: BaseException) -> tuple[Any, ...]:
    """For `__reduce__` of an error whose text is made from its arguments: by default it couldn't be unpickled."""
    reduced: Any = BaseException.__reduce__(error)
    _, args, *fields = reduced
    return _restore_error, (type(error), args, *fields)


def _restore_error(
    kind: type[BaseException], args: tuple[Any, ...], fields: dict[str, Any] | None = None
) -> BaseException:
    error = kind.__new__(kind, *args)
    error.__setstate__(fields)
    return error


def refuse(where: str, expected: str, got: object) -> NoReturn:
    """Raise `InvalidInput` with the text that all refusals share."""
    try:
        shown = str(got) if isinstance(got, Fraction) else repr(got)
    except ValueError:  # more digits than Python converts
        shown = "an int of thousands of digits"
    if len(shown) > 100:
        shown = f"{shown[:97]}..."
    raise InvalidInput(f"{where}: expected {expected}, got {shown}")


_OTHER_NAMES: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "key_func": (("key",), "the key is an argument of check, and the key= of RateLimitMiddleware"),
    "key_function": (("key",), "the key is an argument of check, and the key= of RateLimitMiddleware"),
    "identifier": (("key",), "the key is an argument of check, and the key= of RateLimitMiddleware"),
    "using": (("key",), "the key is an argument of check"),
    "default_limits": (
        (),
        "put Depends(RateLimit(...)) on the routes; limiter= of RateLimitMiddleware counts all together",
    ),
    "application_limits": (
        ("limiter", "limit"),
        "a limit for all callers is one with a single key",
    ),
    "limit_value": (("limiter", "limit"), "the limit is the first argument"),
    "limits": (("limiter", "limit"), "the limit is the first argument"),
    "quota": (("limiter", "limit"), "the limit is the first argument"),
    "rate": (("limiter", "limit"), "the limit is the first argument"),
    "times": ((), "the limit is one text: '2 per 5 seconds'"),
    "seconds": ((), "the limit is one text: '2 per 5 seconds'"),
    "minutes": ((), "the limit is one text: '2 per 5 minutes'"),
    "hours": ((), "the limit is one text: '2 per 5 hours'"),
    "storage_uri": (("store",), "pass store= to RateLimitMiddleware, or a Limiter that has one"),
    "storage_url": (("store",), "pass store= to RateLimitMiddleware, or a Limiter that has one"),
    "storage": (("store",), "pass store= to RateLimitMiddleware, or a Limiter that has one"),
    "storage_options": (("store",), "pass a RedisStore with these options as store"),
    "backend": (("store",), "pass store= to RateLimitMiddleware, or a Limiter that has one"),
    "scope": (("name",), "give the limits that count together the same name"),
    "key_prefix": (("name",), "name the limiter"),
    "strategy": ((), "say it in the limit: '5/minute' is a token bucket, '5/minute sliding' an exact window"),
    "headers_enabled": (
        ("headers",),
        "headers= of RateLimitMiddleware: 'ratelimit', 'x-ratelimit', 'both' or 'none'",
    ),
    "enabled": (("exempt",), "exempt= is an option of RateLimitMiddleware"),
    "override_defaults": ((), "a pattern in routes= replaces limiter=, and a RateLimit counts in addition to it"),
    "key_style": ((), "RateLimit counts each endpoint, routes= each pattern"),
    "exempt_when": (("exempt",), "exempt= is an option of RateLimitMiddleware"),
    "request_filter": (("exempt",), "exempt= is an option of RateLimitMiddleware"),
    "deduct_when": (("counts",), "counts= is an option of RateLimitMiddleware"),
    "error_message": (("body",), "body= is an option of RateLimitMiddleware"),
    "on_breach": (("body",), "body= is an option of RateLimitMiddleware"),
    "methods": ((), "put the method into the pattern of a route: routes={'POST /login': '5/minute'}"),
    "per_method": ((), "put the method into the pattern of a route: routes={'POST /login': '5/minute'}"),
    "retry_after": ((), "a denial always has Retry-After, in seconds"),
    "in_memory_fallback": ((), "a store counts in memory while its server is away: RedisStore(on_failure='local')"),
    "in_memory_fallback_enabled": (
        (),
        "a store counts in memory while its server is away: RedisStore(on_failure='local')",
    ),
    "swallow_errors": ((), "no error of a store reaches the application: RedisStore(on_failure=...)"),
    "timeout": (("wait",), "acquire(key, timeout=...) waits"),
    "max_delay": (("wait",), "acquire(key, timeout=...) waits"),
}
"""Options of slowapi, flask-limiter, limits, throttled-py, pyrate-limiter and fastapi-limiter: their names here."""


def refuse_option(where: str, known: Iterable[str], got: str, *, see: str) -> NoReturn:
    """Raise `InvalidInput` for an unknown option, with a hint, the nearest known one, or a place to read about them."""
    from difflib import get_close_matches  # only now: it is rarely needed, and slow to import

    names = list(known)
    other = _OTHER_NAMES.get(got)
    found = get_close_matches(got, names, 1) if other is None else [name for name in other[0] if name in names]
    hint = f"did you mean {found[0]}=?" if found else f"see {see}" if other is None else other[1]
    if other is not None:
        hint += " (docs/coming-from.md lists the names of other libraries)"
    raise InvalidInput(f"{where}: expected options among {', '.join(names)}, got {got!r}; {hint}")


def printable(text: str) -> str:
    """Text from outside, safe to print: unprintable characters are escaped."""
    if text.isprintable():
        return text
    return "".join([one if one.isprintable() else one.encode("unicode_escape").decode() for one in text])
