"""The flow that all edges share: find out who asks, check, and settle when the response has ended.

It is written once, as generators. They yield what may have to be awaited: decisions, and results of user functions.
`headgate.flow` carries them out, in an event loop or in a thread.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypedDict, TypeVar

from headgate.edges.counters import (
    RequestCounter,
    address_counter,
    address_key,
    agent_counter,
    bounded_key,
    check_all,
    limiter_counter,
    was_counted,
)
from headgate.edges.paths import RoutePatterns, SkipPatterns
from headgate.edges.requests import HttpRequest, HttpResponse, Proxies
from headgate.errors import HeadgateError, InvalidInput, refuse, refuse_option
from headgate.flow import Flow, adrive, drive
from headgate.gate import Gate
from headgate.gate.policy import check_agent
from headgate.http import Dialect, HeaderWriter, ProblemDetails, describe_denial
from headgate.limiter import Limiter
from headgate.limits.decision import Decision, Outcome
from headgate.limits.fixed import UNLIMITED
from headgate.limits.notation import LimitLike, limit_of
from headgate.stores.memory import in_process

_log = logging.getLogger("headgate")

_SETTLE_SECONDS: Final = 10.0
"""For a settlement that has to be awaited, so that none outlives its request for long."""

T = TypeVar("T")
RequestFunction: TypeAlias = Callable[[HttpRequest], T | Awaitable[T]]
"""A user's function of a request, plain or async."""
Counts: TypeAlias = Literal["all", "failures", "successes"] | Callable[[int], bool | Awaitable[bool]]
_Route: TypeAlias = tuple[RequestCounter, RequestCounter, str]
"""How requests count: by key, by address, and under which tier."""


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
    count. A handler that raises before its response has begun counts as a 500."""
    settle: Callable[[HttpRequest, HttpResponse], int | Awaitable[int]]
    """The actual cost of a request, once its response has ended: sent, or cut off by either side. Until then, and if
    the function raises, `cost` is taken."""
    refund_crashes: bool
    """Whether a request is refunded if its handler raises before its response has begun. False by default: otherwise
    an input that makes the handler raise could be sent without limit."""
    headers: Dialect
    """The rate limit headers of responses: "ratelimit" (the default), "x-ratelimit", "both" or "none"."""
    proxies: Iterable[str]
    """The proxies whose X-Forwarded-For is trusted: addresses, networks, or "unix". None by default."""
    body: Callable[[HttpRequest, ProblemDetails], tuple[str, str] | Awaitable[tuple[str, str]]]
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
    """All that is needed where a request counts for its address, in memory, and nothing is left to do after it."""

    check: Callable[[str, int], Decision]
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
        self.refund_crashes: Final = options.get("refund_crashes", False)
        if not isinstance(self.refund_crashes, bool):
            refuse(f"{where} refund_crashes", "True or False", self.refund_crashes)
        self._body: Final = options.get("body")
        skip = options.get("skip") or ()
        if not isinstance(skip, Iterable):
            refuse(f"{where} skip", "patterns such as ['/health', '/static/*']", skip)
        skip = [skip] if isinstance(skip, str) else skip
        self._skip: Final = SkipPatterns(f"{where} skip", skip) if skip else None
        routes = options.get("routes") or {}
        if not isinstance(routes, Mapping):
            refuse(
                f"{where} routes", "limits by pattern such as {'POST /login': '5/minute'}; with a gate, tiers", routes
            )
        self.proxies: Final = Proxies(options.get("proxies", ()))
        self._writer: Final = HeaderWriter(dialect)
        self._silent: Final = dialect == "none"
        self.settles: Final = self._settle is not None or self._counts is not None or self.refund_crashes
        """Whether anything can be left to do once a request has passed."""
        self.fast_path: FastPath | None = None
        self._awaits: Final = awaits
        self._gate: Final = gate
        self._limiter: Limiter
        self._by_key: RequestCounter
        self._by_address: RequestCounter
        self._routes: RoutePatterns[_Route] | None = None
        self._first_tiers: tuple[str, ...] = ()  # of the gate's policy when the guard was made
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
        self._first_tiers = gate.policy.tiers
        for tier in (self._tier, *routes.values()):
            if tier not in self._first_tiers:
                refuse(f"{self._where} tier", f"one of {', '.join(self._first_tiers)}", tier)
        if routes:
            own = self._by_key, self._by_address
            tiers: dict[str, _Route] = {pattern: (*own, str(tier)) for pattern, tier in routes.items()}
            self._routes = RoutePatterns(f"{self._where} routes", tiers, (*own, self._tier))

    def _use_limiter(self, given: Limiter | LimitLike | None, routes: Mapping[str, Any]) -> None:
        if given is None:
            refuse(self._where, "a limiter or a gate", None)
        limiter = given if isinstance(given, Limiter) else Limiter(limit_of(f"{self._where} limiter", given))
        if self._tier_function is not None or self._tier != "normal":
            refuse(f"{self._where} tier", "a gate, which knows tiers (a limiter has none)", limiter)
        self._limiter = limiter
        self._by_key, self._by_address = self._limiter_counters(limiter, limiter.name or "default")
        more = (self._key, self._exempt, self._cost_function, self.settles, self._skip, self.proxies)
        if self._cost and in_process(limiter.store) is not None and not any(more) and not routes:
            headers = self._writer.for_limit(limiter.limit, limiter.name or "default")
            self.fast_path = FastPath(limiter.check, self._cost, headers.write)
        if routes:
            self._routes = RoutePatterns(
                f"{self._where} routes",
                {pattern: (*self._limit_counters(pattern, limit), "normal") for pattern, limit in routes.items()},
                (self._by_key, self._by_address, "normal"),
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
        if self._skip is not None and self._skip.match(request.method, request.route_path()):
            return None
        if self._exempt is not None and (yield self._exempt(request)):
            return None
        routes = [(self._by_key, self._by_address, self._tier)]
        if self._routes is not None:
            routes = self._routes.find(request.method, request.route_path())
        if self._tier_function is not None:
            tier = yield self._tier_function(request)
            self._check_tier(tier)
            routes = [(by_key, by_address, tier) for by_key, by_address, _ in routes]
        cost = self._cost
        if self._cost_function is not None:
            cost = self._whole("cost", (yield self._cost_function(request)))
        if cost == 0:
            return None
        name = None if self._key is None else self._valid_key((yield self._key(request)))
        # a gate itself knows the key of an address, and the exempt ones
        key = name or (address_key(request.address) if self._gate is None else request.address)
        counters = [(by_key if name else by_address, tier) for by_key, by_address, tier in routes]
        if len(counters) == 1:
            [(counter, tier)] = counters
            decision = yield counter.check(key, tier, cost)
        else:
            counter, tier, decision = yield from check_all(counters, key, cost)
        return CheckedRequest(request, counter, key, tier, cost, decision, bool(name))

    def _check_tier(self, tier: object) -> None:
        """Refuse what isn't a tier. One that a reload has removed is: the counter knows what to do."""
        if tier not in self._first_tiers and self._gate is not None and tier not in self._gate.policy.tiers:
            known = ", ".join(self._gate.policy.tiers)
            refuse(f"{self._where} tier", f"a function that returns one of {known}", tier)

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

    def denial(self, checked: CheckedRequest) -> Flow[object, tuple[int, list[tuple[bytes, bytes]], bytes]]:
        """The response to a denied request: status, headers, body."""
        problem = describe_denial(checked.decision, checked.counter.label(checked.tier))
        headers = [(name.encode(), value.encode()) for name, value in problem.headers]
        body = problem.encode()
        if self._body is not None:
            text, media = yield self._body(checked.request, problem)
            body = text.encode()
            headers = [(b"content-type", media.encode()), *headers[1:]]
        headers += [(b"content-length", str(len(body)).encode()), *self.headers(checked)]
        return problem.status, headers, body

    # The settlement --------------------------------------------------------------------------------------------------

    def settle(
        self, checked: CheckedRequest, response: HttpResponse | None, *, disconnected: bool
    ) -> Flow[object, None]:
        """Count the actual cost of a request, now that its response has ended. None: the handler has raised before.

        If the client was seen to have disconnected before the response, whatever that is, nothing is refunded.
        """
        if checked.decision.outcome is Outcome.EXEMPT:
            return
        actual = cost = checked.cost
        status = 500 if response is None else response.status
        if self._counts is not None and not (yield self._counts(status)):
            actual = 0
        elif response is None:
            actual = 0 if self.refund_crashes else cost
        elif self._settle is not None:
            actual = self._whole("settle", (yield self._settle(checked.request, response)))
        if actual > cost:
            yield checked.counter.charge(checked.key, checked.tier, actual - cost)
        elif actual < cost and not disconnected:
            yield from self.refund(checked, cost - actual)

    def refund(self, checked: CheckedRequest, cost: int | None = None) -> Flow[object, None]:
        """Refund the cost of a request, or a part of it, if it was counted."""
        if was_counted(checked.decision):
            yield checked.counter.refund(checked.key, checked.tier, checked.cost if cost is None else cost)


def _status_filter(where: str, counts: Counts) -> Callable[[int], bool | Awaitable[bool]] | None:
    if counts == "all":
        return None
    if counts == "failures":
        return lambda status: status >= 400
    if counts == "successes":
        return lambda status: status < 400
    if not callable(counts):
        refuse(f"{where} counts", "'all', 'failures', 'successes' or a function of the status", counts)
    return counts


def complete(settlement: Flow[object, None]) -> None:
    """Carry out a settlement in a thread. An error is logged: then what was taken when the request arrived stands."""
    try:
        drive(settlement, reject_awaitable)
    except _FAILURES:
        _log.exception(_UNSETTLED)


async def acomplete(settlement: Flow[object, None]) -> None:
    """`complete` in an event loop: to its end, even if the request is cancelled meanwhile.

    From the first step that has to be awaited, a task of its own carries it out, within a bounded time.
    """
    try:
        step = next(settlement)
        while not hasattr(step, "__await__"):
            step = settlement.send(step)
    except StopIteration:
        return
    except _FAILURES:
        _log.exception(_UNSETTLED)
        return
    task = asyncio.create_task(_go_on(settlement, step))
    _settlements.add(task)
    task.add_done_callback(_settlements.discard)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:  # of the request
        await asyncio.wait([task])  # if that is cancelled too, the task goes on without the request
        raise


async def _go_on(settlement: Flow[object, None], step: object) -> None:
    try:
        async with asyncio.timeout(_SETTLE_SECONDS):
            await adrive(settlement, step=step)
    except _FAILURES:
        _log.exception(_UNSETTLED)


_settlements: Final[set[asyncio.Task[None]]] = set()  # an event loop itself keeps only weak references
_FAILURES: Final = (Exception, asyncio.CancelledError)
"""Of the user's function, or of the store. Something that either has awaited may have been cancelled."""
_UNSETTLED: Final = "a response could not be settled: its request stays counted with the cost that it was checked with"


def reject_awaitable(step: object) -> object:
    """The performer of a flow where there is no event loop: each step is a result already."""
    if hasattr(step, "__await__"):
        close = getattr(step, "close", None)
        if close is not None:
            close()
        raise HeadgateError("expected a plain function, got an async one: there is no event loop here")
    return step
