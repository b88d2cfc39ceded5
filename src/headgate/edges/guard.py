"""What all edges do: find out who asks, check, and settle when the response is known.

The flow is written once, as generators. They yield what may have to be awaited, a decision or what a caller's function
returned, and are sent what came of it; a server with an event loop and one with threads differ only in who does that.
"""

from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypedDict, TypeVar

from headgate.edges.counters import AddressCounter, AgentCounter, Counter, LimiterCounter, bounded, by_address
from headgate.edges.paths import Paths
from headgate.edges.requests import Proxies, Request, Response
from headgate.errors import HeadgateError, InvalidInput, refuse
from headgate.gate import Gate
from headgate.gate.policy import TIERS, check_agent
from headgate.http import Dialect, HeaderWriter, ProblemDetails, describe_denial
from headgate.limiter import Limiter
from headgate.limits.decision import Decision, Outcome
from headgate.limits.fixed import UNLIMITED
from headgate.limits.notation import LimitLike, limit_of
from headgate.stores.memory import MemoryStore

T = TypeVar("T")
Flow: TypeAlias = Generator[object, Any, T]
Asked: TypeAlias = Callable[[Request], T | Awaitable[T]]
"""A function that is asked about a request, plain or async."""
Counts: TypeAlias = Literal["all", "failures", "successes"] | Callable[[int], bool]


class Options(TypedDict, total=False):
    """What can be said to an edge besides its limiter or gate."""

    key: Asked[str | None]
    """Who asks: the key or agent that is counted. None or "" for somebody who isn't known, whose address counts."""
    cost: int | Asked[int]
    """What a request costs, 1 unless told. What costs 0 isn't counted."""
    tier: str | Asked[str]
    """The tier of a gate that a request belongs to, "normal" unless told."""
    exempt: Asked[bool]
    """Who isn't counted at all."""
    routes: Mapping[str, LimitLike | Limiter | str]
    """Limits of their own for some requests, by patterns such as "POST /login"; with a gate, tiers."""
    skip: Iterable[str]
    """Patterns of requests that aren't counted."""
    counts: Counts
    """Which responses count: "all", "failures" (400 and above), "successes", or a function of the status. A request is
    counted when it comes, so that no more can be under way than would pass, and given back if it turns out not to."""
    settle: Callable[[Request, Response], int | Awaitable[int]]
    """What a request has cost, once its response is sent; `cost` was held until then."""
    headers: Dialect
    """How responses tell where the caller stands: "ratelimit" (the default), "x-ratelimit", "both" or "none"."""
    proxies: Iterable[str]
    """The proxies whose X-Forwarded-For is believed: addresses, networks, or "unix". None, unless told."""
    body: Callable[[Request, ProblemDetails], tuple[str, str]]
    """Another body for denials, and its content type."""


class Passage(NamedTuple):
    """One request at the guard: who, for how much, and what was decided."""

    request: Request
    counter: Counter
    key: str
    tier: str
    cost: int
    decision: Decision
    known: bool
    """Whether `key` has named who it is; else the address was counted."""


class Quick(NamedTuple):
    """All that is needed where nothing is asked about a request but its address, and nothing is waited for."""

    check: Callable[[str, int], Decision]
    refund: Callable[[str, int], Decision]
    cost: int
    headers: Callable[[Decision], list[tuple[bytes, bytes]]]


class Guard:
    """Decides for an edge. With `wait` what it yields may have to be awaited."""

    def __init__(
        self,
        where: str,
        *,
        limiter: Limiter | LimitLike | None = None,
        gate: Gate | None = None,
        channel: str = "http",
        wait: bool,
        key: Asked[str | None] | None = None,
        cost: int | Asked[int] = 1,
        tier: str | Asked[str] = "normal",
        exempt: Asked[bool] | None = None,
        routes: Mapping[str, LimitLike | Limiter | str] | None = None,
        skip: Iterable[str] = (),
        counts: Counts = "all",
        settle: Callable[[Request, Response], int | Awaitable[int]] | None = None,
        headers: Dialect = "ratelimit",
        proxies: Iterable[str] = (),
        body: Callable[[Request, ProblemDetails], tuple[str, str]] | None = None,
    ) -> None:
        self._where: Final = where
        for name, given in (("key", key), ("exempt", exempt), ("settle", settle), ("body", body)):
            if given is not None and not callable(given):
                refuse(f"{where} {name}", "a function", given)
        self._key: Final = key
        self._exempt: Final = exempt
        self._ask_cost: Final = cost if callable(cost) else None
        self._cost: Final = 1 if callable(cost) else self._whole("cost", cost)
        self._ask_tier: Final = tier if callable(tier) else None
        self._tier: Final = "normal" if callable(tier) else tier
        self._settle: Final = settle
        self._counts: Final = _counting(where, counts)
        self._body: Final = body
        self._skip: Final = Paths(f"{where} skip", dict.fromkeys([skip] if isinstance(skip, str) else skip, True))
        self._skips: Final = bool(skip)
        self.proxies: Final = Proxies(proxies)
        self._writer: Final = HeaderWriter(headers)
        self._silent: Final = headers == "none"
        self.settles: Final = settle is not None or self._counts is not None
        """Whether anything can be left to do once a response is known, save for a crash."""
        self.quick: Quick | None = None
        self._wait: Final = wait
        self._gate: Final = gate
        self._limiter: Limiter
        self._known: Counter
        self._unknown: Counter
        self._routes: Paths[tuple[Counter, Counter, str]] | None = None
        if gate is not None:
            self._by_gate(gate, channel, routes or {}, limiter, wait)
        else:
            self._by_limiter(limiter, routes or {}, wait)

    def _by_gate(self, gate: Gate, channel: str, routes: Mapping[str, object], limiter: object, wait: bool) -> None:
        if not isinstance(gate, Gate):
            refuse(f"{self._where} gate", "a Gate", gate)
        if limiter is not None:
            refuse(self._where, "a limiter or a gate, not both", limiter)
        if channel not in gate.policy.channels:
            refuse(f"{self._where} channel", f"one of {', '.join(gate.policy.channels)}", channel)
        self._limiter = Limiter(UNLIMITED, store=gate.store)
        self._known = AgentCounter(gate, channel, wait=wait)
        self._unknown = AddressCounter(gate, wait=wait)
        self._tiered: bool = True
        for tier in (self._tier, *routes.values()):
            if tier not in TIERS:
                refuse(f"{self._where} tier", f"one of {', '.join(TIERS)}", tier)
        if routes:
            of = {pattern: (self._known, self._unknown, str(tier)) for pattern, tier in routes.items()}
            self._routes = Paths(f"{self._where} routes", of)

    def _by_limiter(self, given: Limiter | LimitLike | None, routes: Mapping[str, Any], wait: bool) -> None:
        if given is None:
            refuse(self._where, "a limiter or a gate", None)
        limiter = given if isinstance(given, Limiter) else Limiter(limit_of(f"{self._where} limiter", given))
        if self._ask_tier is not None or self._tier != "normal":
            refuse(f"{self._where} tier", "a gate, which knows tiers (a limiter has none)", limiter)
        self._tiered = False
        self._limiter = limiter
        self._known, self._unknown = self._pair(limiter, limiter.name or "default", wait)
        more = (self._key, self._exempt, self._ask_cost, self._counts, self._settle, routes, self._skips, self.proxies)
        if self._cost and isinstance(limiter.store, MemoryStore) and not any(more):
            headers = self._writer.for_limit(limiter.limit, limiter.name or "default")
            self.quick = Quick(limiter.check, limiter.refund, self._cost, headers.write)
        if routes:
            self._routes = Paths(
                f"{self._where} routes",
                {pattern: (*self._route(limiter, pattern, of, wait), "normal") for pattern, of in routes.items()},
            )

    def _route(self, limiter: Limiter, pattern: str, given: Any, wait: bool) -> tuple[Counter, Counter]:
        if isinstance(given, Limiter):
            return self._pair(given, given.name or pattern, wait)
        own = limit_of(f"{self._where} routes {pattern!r}", given)
        return self._pair(Limiter(own, store=limiter.store, name=f"{limiter.name} {pattern}"), pattern, wait)

    def _pair(self, limiter: Limiter, label: str, wait: bool) -> tuple[Counter, Counter]:
        """Counters for those who are known and those who aren't, whose keys can't meet."""
        known = LimiterCounter(limiter, label, wait=wait)
        if self._key is None:
            return known, known
        name = f"{limiter.name} by address"
        addresses = Limiter(limiter.limit, store=limiter.store, name=name, warn_at=limiter.warn_at)
        return known, LimiterCounter(addresses, label, wait=wait)

    def counters(self, what: str, given: Limiter | LimitLike) -> tuple[Counter, Counter]:
        """Counters of something else that the same callers do: for those who are known, and for those who aren't.

        A limit is counted where the guard's own limiter or gate counts. "gate" is what the gate allows on "ws".
        """
        if given != "gate":
            return self._route(self._limiter, what, given, self._wait)
        if self._gate is None:
            refuse(f"{self._where} {what}", "a limit or a limiter, since there is no gate", given)
        return AgentCounter(self._gate, "ws", wait=self._wait), AddressCounter(self._gate, wait=self._wait)

    # A request comes -------------------------------------------------------------------------------------------------

    def admit(self, request: Request) -> Flow[Passage | None]:
        """Check a request; None if it isn't counted."""
        if self._skips and self._skip.find(request.method, request.path):
            return None
        if self._exempt is not None and (yield self._exempt(request)):
            return None
        known, unknown, tier = self._known, self._unknown, self._tier
        if self._routes is not None:
            known, unknown, tier = self._routes.find(request.method, request.path) or (known, unknown, tier)
        if self._ask_tier is not None:
            tier = yield self._ask_tier(request)
            if tier not in TIERS:
                refuse(f"{self._where} tier", f"a function that returns one of {', '.join(TIERS)}", tier)
        cost = self._cost
        if self._ask_cost is not None:
            cost = self._whole("cost", (yield self._ask_cost(request)))
        if cost == 0:
            return None
        name = None if self._key is None else self._name((yield self._key(request)))
        if name:
            counter, key = known, name
        else:  # a gate knows by itself what an address counts as, and which are exempt
            counter, key = unknown, request.address if self._tiered else by_address(request.address)
        decision = yield counter.check(key, tier, cost)
        return Passage(request, counter, key, tier, cost, decision, bool(name))

    def _name(self, key: object) -> str | None:
        """The key or agent that a function has named. Who has a name that can't be an agent's isn't known."""
        if not key:
            return None
        if not isinstance(key, str):
            refuse(f"{self._where} key", "a function that returns a string or None", key)
        if not self._tiered:
            return bounded(key)
        try:
            return check_agent(key)
        except InvalidInput:
            return None

    def _whole(self, name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            refuse(f"{self._where} {name}", "a whole number, 0 or more, or a function that returns one", value)
        return value

    # What is answered ------------------------------------------------------------------------------------------------

    def headers(self, passage: Passage) -> list[tuple[bytes, bytes]]:
        """Where the caller stands now."""
        decision = passage.decision
        if self._silent or decision.outcome is Outcome.EXEMPT:
            return []
        counter, tier = passage.counter, passage.tier
        return self._writer.for_limit(counter.limit(passage.key, tier), counter.label(tier)).write(decision)

    def refusal(self, passage: Passage) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """The response to a request that was denied: status, headers, body."""
        problem = describe_denial(passage.decision, passage.counter.label(passage.tier))
        headers = [(name.encode(), value.encode()) for name, value in problem.headers]
        body = problem.encode()
        if self._body is not None:
            text, media = self._body(passage.request, problem)
            body = text.encode()
            headers = [(b"content-type", media.encode()), *headers[1:]]
        headers += [(b"content-length", str(len(body)).encode()), *self.headers(passage)]
        return problem.status, headers, body

    # A response is known ---------------------------------------------------------------------------------------------

    def settle(self, passage: Passage, response: Response) -> Flow[None]:
        """Count what a request has cost, now that its response was sent."""
        if passage.decision.outcome is Outcome.EXEMPT:
            return
        if self._counts is not None and not self._counts(response.status):
            yield from self._adjust(passage, 0)
        elif self._settle is not None:
            actual = self._whole("settle", (yield self._settle(passage.request, response)))
            yield from self._adjust(passage, actual)

    def crashed(self, passage: Passage) -> Flow[None]:
        """Give back what was counted for a request whose handler has failed."""
        if passage.decision.outcome is not Outcome.EXEMPT:
            yield from self._adjust(passage, 0)

    def _adjust(self, passage: Passage, actual: int) -> Flow[None]:
        _, counter, key, tier, cost, *_ = passage
        if actual > cost:
            yield counter.charge(key, tier, actual - cost)
        elif actual < cost:
            yield counter.refund(key, tier, cost - actual)


def _counting(where: str, counts: Counts) -> Callable[[int], bool] | None:
    if counts == "all":
        return None
    if counts == "failures":
        return lambda status: status >= 400
    if counts == "successes":
        return lambda status: status < 400
    if not callable(counts):
        refuse(f"{where} counts", "'all', 'failures', 'successes' or a function of the status", counts)
    return counts


def run(flow: Flow[T]) -> T:
    """Carry out a flow where nothing has to be awaited."""
    try:
        asked = next(flow)
        while True:
            if hasattr(asked, "__await__"):
                close = getattr(asked, "close", None)
                if close is not None:
                    close()
                raise HeadgateError("expected a plain function, got an async one: there is no event loop here")
            asked = flow.send(asked)
    except StopIteration as done:
        result: T = done.value
        return result


async def arun(flow: Flow[T]) -> T:
    """Carry out a flow in an event loop."""
    try:
        asked = next(flow)
        while True:
            asked = flow.send(await asked if hasattr(asked, "__await__") else asked)
    except StopIteration as done:
        result: T = done.value
        return result
