"""The flow that all edges share: find out who asks, check, and settle when the response is known.

It is written once, as generators. They yield what may have to be awaited: decisions, and results of user functions.
`headgate.flow` carries them out, in an event loop or in a thread.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypedDict, TypeVar

from headgate.edges.counters import (
    RequestCounter,
    address_counter,
    address_key,
    agent_counter,
    bounded_key,
    limiter_counter,
)
from headgate.edges.paths import PathPatterns
from headgate.edges.requests import HttpRequest, HttpResponse, Proxies
from headgate.errors import HeadgateError, InvalidInput, refuse, refuse_option
from headgate.flow import Flow
from headgate.gate import Gate
from headgate.gate.policy import TIERS, check_agent
from headgate.http import Dialect, HeaderWriter, ProblemDetails, describe_denial
from headgate.limiter import Limiter
from headgate.limits.decision import Decision, Outcome
from headgate.limits.fixed import UNLIMITED
from headgate.limits.notation import LimitLike, limit_of
from headgate.stores.memory import in_process

T = TypeVar("T")
RequestFunction: TypeAlias = Callable[[HttpRequest], T | Awaitable[T]]
"""A user's function of a request, plain or async."""
Counts: TypeAlias = Literal["all", "failures", "successes"] | Callable[[int], bool]


class Options(TypedDict, total=False):
    """The options of an edge, besides its limiter or gate."""

    key: RequestFunction[str | None]
    """The key or agent that a request counts for. None or "" for an anonymous caller, who is counted by address."""
    cost: int | RequestFunction[int]
    """The cost of a request, 1 by default. A request that costs 0 isn't counted."""
    tier: str | RequestFunction[str]
    """The gate's tier for a request, "normal" by default."""
    exempt: RequestFunction[bool]
    """Whether a request isn't counted at all."""
    routes: Mapping[str, LimitLike | Limiter | str]
    """Separate limits for some requests, by patterns such as "POST /login"; with a gate, tiers."""
    skip: Iterable[str]
    """Patterns of requests that aren't counted."""
    counts: Counts
    """Which responses count: "all", "failures" (400 and above), "successes", or a function of the status. A request is
    counted when it arrives, so that no more are in progress than may pass; it is refunded if its response is not to
    count."""
    settle: Callable[[HttpRequest, HttpResponse], int | Awaitable[int]]
    """The actual cost of a request, once its response is sent; until then `cost` is taken."""
    headers: Dialect
    """The rate limit headers of responses: "ratelimit" (the default), "x-ratelimit", "both" or "none"."""
    proxies: Iterable[str]
    """The proxies whose X-Forwarded-For is trusted: addresses, networks, or "unix". None by default."""
    body: Callable[[HttpRequest, ProblemDetails], tuple[str, str]]
    """Another body for denials, and its content type."""


_HINTS: Final = {
    "key_func": "slowapi's key_func is key here, a function of the request",
    "default_limits": "slowapi's default_limits are limiter here, such as limiter='5/minute'",
    "headers_enabled": "slowapi's headers_enabled is headers here: 'ratelimit', 'x-ratelimit', 'both' or 'none'",
    "exempt_when": "slowapi's exempt_when is exempt here, a function of the request",
    "storage_uri": "a store belongs to the limiter: limiter=Limiter('5/minute', store='redis://...')",
    "store": "a store belongs to the limiter: limiter=Limiter('5/minute', store='redis://...')",
}
"""Hints for options that have other names here."""


class CheckedRequest(NamedTuple):
    """A request and the decision on it."""

    request: HttpRequest
    counter: RequestCounter
    key: str
    tier: str
    cost: int
    decision: Decision
    identified: bool
    """Whether `key` is from the user's function; otherwise it is the address."""


class FastPath(NamedTuple):
    """All that is needed where a request counts for its address, in memory, and no user's function is called."""

    check: Callable[[str, int], Decision]
    refund: Callable[[str, int], Decision]
    cost: int
    write_headers: Callable[[Decision], list[tuple[bytes, bytes]]]


class Guard:
    """Decides for an edge. With `awaits`, its flows may yield awaitables. `unsupported` says why, by option."""

    def __init__(
        self,
        where: str,
        options: Options,
        *,
        limiter: Limiter | LimitLike | None = None,
        gate: Gate | None = None,
        awaits: bool,
        unsupported: Mapping[str, str] = {},
    ) -> None:
        self._where: Final = where
        known = [name for name in Options.__annotations__ if name not in unsupported]
        for name, given in options.items():
            if name in unsupported:
                refuse(where, unsupported[name], given)
            if name not in known:
                refuse_option(where, known, name, hint=_HINTS.get(name, ""), see="headgate.edges.guard.Options")
            if name in ("key", "exempt", "settle", "body") and not (given is None or callable(given)):
                refuse(f"{where} {name}", "a function", given)
        cost, tier = options.get("cost", 1), options.get("tier", "normal")
        dialect = options.get("headers", "ratelimit")
        self._key: Final = options.get("key")
        self._exempt: Final = options.get("exempt")
        self._cost_function: Final = cost if callable(cost) else None
        self._cost: Final = 1 if callable(cost) else self._whole("cost", cost)
        self._tier_function: Final = tier if callable(tier) else None
        self._tier: Final = "normal" if callable(tier) else tier
        self._settle: Final = options.get("settle")
        self._counts: Final = _status_filter(where, options.get("counts", "all"))
        self._body: Final = options.get("body")
        skip = options.get("skip") or ()
        if not isinstance(skip, Iterable):
            refuse(f"{where} skip", "patterns such as ['/health', '/static/*']", skip)
        skip = [skip] if isinstance(skip, str) else skip
        self._skip: Final = PathPatterns(f"{where} skip", dict.fromkeys(skip, True)) if skip else None
        routes = options.get("routes") or {}
        if not isinstance(routes, Mapping):
            refuse(
                f"{where} routes", "limits by pattern such as {'POST /login': '5/minute'}; with a gate, tiers", routes
            )
        self.proxies: Final = Proxies(options.get("proxies", ()))
        self._writer: Final = HeaderWriter(dialect)
        self._silent: Final = dialect == "none"
        self.settles: Final = self._settle is not None or self._counts is not None
        """Whether anything can be left to do once a response is known, save for a crash."""
        self.fast_path: FastPath | None = None
        self._awaits: Final = awaits
        self._gate: Final = gate
        self._limiter: Limiter
        self._by_key: RequestCounter
        self._by_address: RequestCounter
        self._routes: PathPatterns[tuple[RequestCounter, RequestCounter, str]] | None = None
        if gate is not None:
            self._use_gate(gate, routes, limiter)
        else:
            self._use_limiter(limiter, routes)

    def _use_gate(self, gate: Gate, routes: Mapping[str, object], limiter: object) -> None:
        if not isinstance(gate, Gate):
            refuse(f"{self._where} gate", "a Gate", gate)
        if limiter is not None:
            refuse(self._where, "a limiter or a gate, not both", limiter)
        if "http" not in gate.policy.channels:
            refuse(f"{self._where} gate", "a policy with the channel 'http'", gate.policy.channels)
        self._limiter = Limiter(UNLIMITED, store=gate.store)
        self._by_key = agent_counter(gate, "http", awaits=self._awaits)
        self._by_address = address_counter(gate, awaits=self._awaits)
        for tier in (self._tier, *routes.values()):
            if tier not in TIERS:
                refuse(f"{self._where} tier", f"one of {', '.join(TIERS)}", tier)
        if routes:
            counters = {pattern: (self._by_key, self._by_address, str(tier)) for pattern, tier in routes.items()}
            self._routes = PathPatterns(f"{self._where} routes", counters)

    def _use_limiter(self, given: Limiter | LimitLike | None, routes: Mapping[str, Any]) -> None:
        if given is None:
            refuse(self._where, "a limiter or a gate", None)
        limiter = given if isinstance(given, Limiter) else Limiter(limit_of(f"{self._where} limiter", given))
        if self._tier_function is not None or self._tier != "normal":
            refuse(f"{self._where} tier", "a gate, which knows tiers (a limiter has none)", limiter)
        self._limiter = limiter
        self._by_key, self._by_address = self._limiter_counters(limiter, limiter.name or "default")
        more = (self._key, self._exempt, self._cost_function, self._counts, self._settle, self._skip, self.proxies)
        if self._cost and in_process(limiter.store) is not None and not any(more) and not routes:
            headers = self._writer.for_limit(limiter.limit, limiter.name or "default")
            self.fast_path = FastPath(limiter.check, limiter.refund, self._cost, headers.write)
        if routes:
            self._routes = PathPatterns(
                f"{self._where} routes",
                {pattern: (*self._limit_counters(pattern, limit), "normal") for pattern, limit in routes.items()},
            )

    def _limit_counters(self, name: str, given: Any) -> tuple[RequestCounter, RequestCounter]:
        """Counters of a limit, which counts in the guard's own store, or of a limiter."""
        if isinstance(given, Limiter):
            return self._limiter_counters(given, given.name or name)
        limit = limit_of(f"{self._where} routes {name!r}", given)
        own = self._limiter
        return self._limiter_counters(Limiter(limit, store=own.store, name=f"{own.name} {name}"), name)

    def _limiter_counters(self, limiter: Limiter, label: str) -> tuple[RequestCounter, RequestCounter]:
        """Counters by key and by address. Their key spaces are separate."""
        by_key = limiter_counter(limiter, label, awaits=self._awaits)
        if self._key is None:
            return by_key, by_key
        name = f"{limiter.name} by address"
        addresses = Limiter(limiter.limit, store=limiter.store, name=name, warn_at=limiter.warn_at)
        return by_key, limiter_counter(addresses, label, awaits=self._awaits)

    def counters(self, name: str, given: Limiter | LimitLike) -> tuple[RequestCounter, RequestCounter]:
        """Counters by key and by address, for something else that the same callers do.

        A limit is counted where the guard's own limiter or gate counts. "gate" stands for the gate's channel "ws".
        """
        if given != "gate":
            return self._limit_counters(name, given)
        if self._gate is None:
            refuse(f"{self._where} {name}", "a limit or a limiter, since there is no gate", given)
        return agent_counter(self._gate, "ws", awaits=self._awaits), address_counter(self._gate, awaits=self._awaits)

    # The request -----------------------------------------------------------------------------------------------------

    def check(self, request: HttpRequest) -> Flow[object, CheckedRequest | None]:
        """Check a request; None if it isn't counted."""
        if self._skip is not None and self._skip.find(request.method, request.path):
            return None
        if self._exempt is not None and (yield self._exempt(request)):
            return None
        by_key, by_address, tier = self._by_key, self._by_address, self._tier
        if self._routes is not None:
            found = self._routes.find(request.method, request.path)
            by_key, by_address, tier = found or (by_key, by_address, tier)
        if self._tier_function is not None:
            tier = yield self._tier_function(request)
            if tier not in TIERS:
                refuse(f"{self._where} tier", f"a function that returns one of {', '.join(TIERS)}", tier)
        cost = self._cost
        if self._cost_function is not None:
            cost = self._whole("cost", (yield self._cost_function(request)))
        if cost == 0:
            return None
        name = None if self._key is None else self._valid_key((yield self._key(request)))
        if name:
            counter, key = by_key, name
        else:  # a gate itself knows the key of an address, and the exempt ones
            counter, key = by_address, address_key(request.address) if self._gate is None else request.address
        decision = yield counter.check(key, tier, cost)
        return CheckedRequest(request, counter, key, tier, cost, decision, bool(name))

    def _valid_key(self, key: object) -> str | None:
        """The key that the user's function has returned. A name that can't be an agent's is anonymous."""
        if not key:
            return None
        if not isinstance(key, str):
            refuse(f"{self._where} key", "a function that returns a string or None", key)
        if self._gate is None:
            return bounded_key(key)
        try:
            return check_agent(key)
        except InvalidInput:
            return None

    def _whole(self, name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            refuse(f"{self._where} {name}", "a whole number, 0 or more, or a function that returns one", value)
        return value

    # The response ----------------------------------------------------------------------------------------------------

    def headers(self, checked: CheckedRequest) -> list[tuple[bytes, bytes]]:
        """The rate limit headers of a response."""
        decision = checked.decision
        if self._silent or decision.outcome is Outcome.EXEMPT:
            return []
        counter, tier = checked.counter, checked.tier
        return self._writer.for_limit(counter.limit(checked.key, tier), counter.label(tier)).write(decision)

    def denial(self, checked: CheckedRequest) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """The response to a denied request: status, headers, body."""
        problem = describe_denial(checked.decision, checked.counter.label(checked.tier))
        headers = [(name.encode(), value.encode()) for name, value in problem.headers]
        body = problem.encode()
        if self._body is not None:
            text, media = self._body(checked.request, problem)
            body = text.encode()
            headers = [(b"content-type", media.encode()), *headers[1:]]
        headers += [(b"content-length", str(len(body)).encode()), *self.headers(checked)]
        return problem.status, headers, body

    # The settlement --------------------------------------------------------------------------------------------------

    def settle(self, checked: CheckedRequest, response: HttpResponse) -> Flow[object, None]:
        """Count the actual cost of a request, now that its response was sent."""
        if checked.decision.outcome is Outcome.EXEMPT:
            return
        if self._counts is not None and not self._counts(response.status):
            yield from self._adjust(checked, 0)
        elif self._settle is not None:
            actual = self._whole("settle", (yield self._settle(checked.request, response)))
            yield from self._adjust(checked, actual)

    def refund(self, checked: CheckedRequest) -> Flow[object, None]:
        """Refund a request whose handler has crashed."""
        if checked.decision.outcome is not Outcome.EXEMPT:
            yield from self._adjust(checked, 0)

    def _adjust(self, checked: CheckedRequest, actual: int) -> Flow[object, None]:
        _, counter, key, tier, cost, *_ = checked
        if actual > cost:
            yield counter.charge(key, tier, actual - cost)
        elif actual < cost:
            yield counter.refund(key, tier, cost - actual)


def _status_filter(where: str, counts: Counts) -> Callable[[int], bool] | None:
    if counts == "all":
        return None
    if counts == "failures":
        return lambda status: status >= 400
    if counts == "successes":
        return lambda status: status < 400
    if not callable(counts):
        refuse(f"{where} counts", "'all', 'failures', 'successes' or a function of the status", counts)
    return counts


def reject_awaitable(step: object) -> object:
    """The performer of a flow where there is no event loop: each step is a result already."""
    if hasattr(step, "__await__"):
        close = getattr(step, "close", None)
        if close is not None:
            close()
        raise HeadgateError("expected a plain function, got an async one: there is no event loop here")
    return step
