"""The flow that all edges share: find out who asks, check, and settle when the response has ended.

It is written once, as generators. They yield what may have to be awaited: decisions, and results of user functions.
`headgate.flow` carries them out, in an event loop or in a thread.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias, TypedDict, TypeVar

from headgate.callables import is_async, is_generator
from headgate.edges.application import ApplicationSettings, Counted, HeaderList
from headgate.edges.costs import CostGiven, ExactCost, most_decimals, read_cost
from headgate.edges.counters import (
    Counters,
    CountersFunction,
    FastPath,
    FastPathFunction,
    LimitCounters,
    RequestCounter,
    address_counter,
    address_key,
    agent_counter,
    bounded_key,
    limiter_counter,
)
from headgate.edges.limit_function import LimitFunction, in_time
from headgate.edges.paths import RoutePatterns, SkipPatterns
from headgate.edges.requests import HttpRequest, HttpResponse, Proxies
from headgate.edges.reservation import CheckedRequest, reserve, reserve_all
from headgate.edges.settlement import Counts, Settlement
from headgate.errors import InvalidInput, RateLimited, StoreAway, refuse, refuse_option
from headgate.flow import Flow
from headgate.gate import Gate
from headgate.gate.policy import check_agent
from headgate.http import Dialect, HeaderWriter, ProblemDetails, describe_denial, describe_error
from headgate.http.headers import DIALECTS
from headgate.limiter import Limiter, UnpinnedLimiter
from headgate.limits.decision import Limit, Outcome
from headgate.limits.fixed import UNLIMITED
from headgate.limits.notation import LimitLike, limit_of
from headgate.stores.base import Store
from headgate.stores.memory import in_process
from headgate.workers import warn_of_workers

T = TypeVar("T")
RequestFunction: TypeAlias = Callable[[HttpRequest], T | Awaitable[T]]
"""A user's function of a request, plain or async."""
LimitGiven: TypeAlias = Limiter | LimitLike | RequestFunction[LimitLike]
"""A limit as an option: a limiter, a limit or its text, or a function of the request that returns one of the latter."""
_Route: TypeAlias = tuple[RequestCounter, RequestCounter, str]
"""How requests count: by key, by address, and under which tier."""
_Found: TypeAlias = tuple[list[_Route], ExactCost]
"""Where a request counts, and its cost."""


class Options(TypedDict, total=False):
    """The options of an edge, besides its limiter or gate."""

    key: RequestFunction[str | None]
    """The key or agent that a request counts for. None or "" for an anonymous caller, who is counted by address."""
    cost: CostGiven | RequestFunction[CostGiven]
    """The cost of a request, 1 by default: a whole number, or "0.05" under a budget that counts decimals, where 1 is
    one whole unit, such as a dollar. A request that costs 0 isn't counted."""
    tier: str | RequestFunction[str]
    """The gate's tier for a request, "normal" by default."""
    exempt: RequestFunction[bool]
    """Whether a request isn't counted at all."""
    routes: Mapping[str, LimitGiven]
    """Separate limits for some requests, by patterns such as "POST /login"; with a gate, tiers."""
    skip: Iterable[str]
    """Patterns of requests that aren't counted."""
    counts: Counts
    """Which responses count: "all", "failures" (400 and above), "successes", or a function of the status. A request is
    counted when it arrives, so that no more are in progress than may pass; it is refunded if its response is not to
    count. A handler that raises before its response has begun counts as a 500."""
    settle: Callable[[HttpRequest, HttpResponse], CostGiven | Awaitable[CostGiven]]
    """The actual cost of a request, once its response has ended: sent, or cut off by either side. Until then, and if
    the function raises, `cost` is taken. Under a budget, a cost with more decimals than that counts is rounded up."""
    refund_crashes: bool
    """Whether a request is refunded if its handler raises before its response has begun. False by default: otherwise
    an input that makes the handler raise could be sent without limit."""
    headers: Dialect
    """The rate limit headers of responses: "ratelimit" (the default), "x-ratelimit", "both" or "none"."""
    proxies: Iterable[str]
    """The proxies whose X-Forwarded-For is trusted: addresses, networks, or "unix". None by default."""
    body: Callable[[HttpRequest, ProblemDetails], tuple[str, str] | Awaitable[tuple[str, str]]]
    """Another body for denials, and its content type."""


_MOST_PINNED: Final = 100  # limits of a function for which the store keeps a table
_ARGUMENTS: Final = ("limiter", "gate", "store", "name")  # of an edge, beside its options


class DenialResponse(NamedTuple):
    """The response to a denied request."""

    status: int
    headers: HeaderList
    body: bytes


class Guard:
    """Decides for an edge. With `awaits`, its flows may yield awaitables. `unsupported` says why, by option.

    A limit is counted in `store`, under `name`; without a store, in a memory of its own. `private` says that this is
    the process's memory, and that no store object was given. `label` is the name of the limit in headers and bodies, if
    that isn't the limiter's. `tiers` are those that the gate's policy had when the edge was made: a reload may have
    removed some. `arguments` are those that the edge takes itself.
    """

    def __init__(
        self,
        where: str,
        options: Options,
        *,
        limiter: LimitGiven | None = None,
        gate: Gate | None = None,
        store: Store | None = None,
        name: str = "",
        label: str = "",
        private: bool = False,
        tiers: tuple[str, ...] = (),
        awaits: bool,
        arguments: tuple[str, ...] = _ARGUMENTS,
        unsupported: Mapping[str, str] = {},
    ) -> None:
        self._where: Final = where
        self._awaits: Final = awaits
        known = [option for option in (*arguments, *Options.__annotations__) if option not in unsupported]
        for option, given in options.items():
            if option in unsupported:
                refuse(where, unsupported[option], option)  # not the value: a URL may have a password
            if option not in known:
                refuse_option(where, known, option, see="docs/middleware.md")
            if option in ("key", "exempt", "settle", "body") and not (given is None or callable(given)):
                refuse(f"{where} {option}", "a function", given)
            if callable(given):
                self._check_function(f"{where} {option}", given)
        cost, tier = options.get("cost", 1), options.get("tier", "normal")
        dialect = options.get("headers", "ratelimit")
        self._key: Final = options.get("key")
        self._exempt: Final = options.get("exempt")
        self._cost_function: Final = cost if callable(cost) else None
        self._cost: Final = 1 if callable(cost) else cost  # as it was given: limits read it
        self._tier_function: Final = tier if callable(tier) else None
        self._tier: Final = "normal" if callable(tier) else tier
        self.settlement: Final = Settlement(where, options)
        self._body: Final = options.get("body")
        skip = options.get("skip") or ()
        if not isinstance(skip, Iterable):
            refuse(f"{where} skip", "patterns such as ['/health', '/static/*']", skip)
        skip = [skip] if isinstance(skip, str) else skip
        self._skip: Final = SkipPatterns(f"{where} skip", skip) if skip else None
        routes: object = options.get("routes") or {}
        if not isinstance(routes, Mapping) or not all(isinstance(pattern, str) for pattern in routes):
            refuse(
                f"{where} routes", "limits by pattern such as {'POST /login': '5/minute'}; with a gate, tiers", routes
            )
        self.proxies: Final = Proxies(options.get("proxies", ()))
        if dialect not in DIALECTS:  # before the writer, which is compiled and would raise TypeError for no text
            refuse("headers", f"one of {', '.join(DIALECTS)}", dialect)
        self._writer: Final = HeaderWriter(dialect)
        self._silent: Final = dialect == "none"
        if store is not None and not isinstance(store, Store):
            refuse(f"{where} store", "a store such as MemoryStore(), or a URL such as redis://localhost", store)
        if not isinstance(name, str):
            refuse(f"{where} name", "a string", name)
        self.settings: Final = ApplicationSettings(store, name, options, private=private or store is None)
        """The state that this edge shares with dependencies inside of it."""
        self.fast_path: FastPath | FastPathFunction | None = None
        """That of all requests but the first and preflights, or a function that finds it; None if some have none."""
        self._always: _Found | None = None  # where these requests count, if that is the same for all
        self._new = True
        own = limiter if gate is None else gate
        self._private: Final = private or (own.private if isinstance(own, Limiter | Gate) else store is None)
        self._gate: Final = gate
        self._counts = False  # whether anything is limited at all
        self.counts_slots = False
        """Whether the limit of the edge itself has slots, as far as that is known before any request."""
        self._limiter: Limiter
        self._own: LimitCounters | CountersFunction | None = None  # a gate has none
        self._default: _Route | CountersFunction
        self._routes: RoutePatterns[_Route | CountersFunction] | None = None
        self._first_tiers: Final = tiers or (gate.policy.tiers if isinstance(gate, Gate) else ())
        if gate is not None:
            if store is not None or name:
                refuse(where, "a gate, which has a store, or store and name, not both", gate)
            self._use_gate(gate, routes, limiter)
        else:
            self._use_limiter(limiter, label, routes)

    def _use_gate(self, gate: Gate, routes: Mapping[str, object], limiter: object) -> None:
        if not isinstance(gate, Gate):
            refuse(f"{self._where} gate", "a Gate", gate)
        if limiter is not None:
            refuse(self._where, "a limiter or a gate, not both", limiter)
        if "http" not in gate.policy.channels:
            refuse(f"{self._where} gate", "a policy with the channel 'http'", gate.policy.channels)
        self._limiter, self._counts = Limiter(UNLIMITED, store=gate.store), True
        self._read_cost(self._cost, 0)
        own = agent_counter(gate, "http", awaits=self._awaits), address_counter(gate, awaits=self._awaits)
        self._default = (*own, self._tier)
        for tier in (self._tier, *routes.values()):
            if tier not in self._first_tiers:
                refuse(f"{self._where} tier", f"one of {', '.join(self._first_tiers)}", tier)
        if routes:
            tiers: dict[str, _Route | CountersFunction] = {
                pattern: (*own, str(tier)) for pattern, tier in routes.items()
            }
            self._routes = RoutePatterns(f"{self._where} routes", tiers, self._default)

    def _use_limiter(self, given: LimitGiven | None, label: str, routes: Mapping[str, LimitGiven]) -> None:
        store, name = self.settings.store, self.settings.name
        if given is None and store is None:
            refuse(self._where, "a limiter or a gate (or 'unlimited', where only routes and holds have limits)", None)
        if isinstance(given, Limiter) and (store is not None or name):
            refuse(
                f"{self._where} limiter", "a limit, to be counted in store (a limiter has a store and a name)", given
            )
        if self._tier_function is not None or self._tier != "normal":
            refuse(f"{self._where} tier", "a gate, which knows tiers (a limiter has none)", given)
        where = f"{self._where} limiter"
        if isinstance(given, Limiter):
            limiter = given
        else:
            limit = UNLIMITED if given is None or callable(given) else limit_of(where, given)
            limiter = Limiter(limit, store=store, name=name)
        self._limiter = limiter
        label = label or limiter.name or "default"
        if callable(given):
            self._own = self._default = self._limit_function(where, given, name, label)
        else:
            self._own = self._counters_of(limiter, label)
            self.counts_slots = limiter.limit.counts_slots
            self._default = (*self._own.counters, "normal")
        if routes:
            where = f"{self._where} routes"
            values = {pattern: self._route(where, pattern, limit) for pattern, limit in routes.items()}
            self._routes = RoutePatterns(where, values, self._default)

    def _route(self, where: str, name: str, given: LimitGiven) -> _Route | CountersFunction:
        found = self.counters(f"{where} {name!r}", name, given)
        return found if isinstance(found, LimitFunction) else (*found, "normal")

    def counters(self, where: str, name: str, given: LimitGiven) -> Counters | CountersFunction:
        """Counters by key and by address, for something else that the same callers do, or on some routes.

        A limit, or a function's limits, are counted where the guard's own limiter or gate counts. "gate" stands for the
        gate's channel "ws".
        """
        if isinstance(given, Limiter):
            return self._counters_of(given, given.name or name).counters
        if given == "gate":
            if self._gate is None:
                refuse(where, "a limit or a limiter, since there is no gate", given)
            return agent_counter(self._gate, "ws", awaits=self._awaits), address_counter(
                self._gate, awaits=self._awaits
            )
        full_name = f"{self._limiter.name} {name}"
        if callable(given):
            return self._limit_function(where, given, full_name, name)
        limiter = Limiter(limit_of(where, given), store=self._limiter.store, name=full_name)
        return self._counters_of(limiter, name).counters

    def _limit_function(self, where: str, function: Callable[..., object], name: str, label: str) -> CountersFunction:
        self._counts = True
        self._check_function(where, function)
        self._read_cost(self._cost, None)
        pinned: set[Limit] = set()

        def make(limit: Limit) -> LimitCounters:
            # The store keeps something for each pinned limit, and a function may return any number of limits.
            if len(pinned) < _MOST_PINNED:
                pinned.add(limit)
            kind = Limiter if limit in pinned else UnpinnedLimiter
            limiter = kind(limit, store=self._limiter.store, name=name)
            return self._counters_of(limiter, label)

        return LimitFunction(where, function, make)

    def _counters_of(self, limiter: Limiter, label: str) -> LimitCounters:
        """Counters by key and by address. Their key spaces are separate."""
        self._counts = self._counts or limiter.limit is not UNLIMITED
        by_key = self._fast_path_of(limiter, label)
        if self._key is None:
            return LimitCounters(by_key, by_key)
        name = f"{limiter.name} by address"
        kind = UnpinnedLimiter if isinstance(limiter, UnpinnedLimiter) else Limiter
        addresses = kind(limiter.limit, store=limiter.store, name=name, warn_at=limiter.warn_at)
        return LimitCounters(by_key, self._fast_path_of(addresses, label))

    def _fast_path_of(self, limiter: Limiter, label: str) -> FastPath:
        settles = self.settlement.changes_costs
        counter = limiter_counter(self._where, limiter, label, awaits=self._awaits, settles=settles)
        cost = 1 if self._cost_function is not None else self._read_cost(self._cost, counter.decimals)
        return FastPath(counter, limiter.check, cost, self._writer.for_limit(limiter.limit, label).write)

    def _read_cost(self, given: object, decimals: int | None) -> ExactCost:
        return read_cost(f"{self._where} cost", given, decimals)

    def _check_function(self, where: str, function: object) -> None:
        """Refuse a function of the user that couldn't be called here."""
        if is_generator(function):
            refuse(where, "a function that returns: calling a generator function does nothing yet", function)
        if not self._awaits and is_async(function):
            refuse(where, "a plain function, since WSGI has no event loop", function)

    # The request -----------------------------------------------------------------------------------------------------

    def check(self, request: HttpRequest, counted: Counted | None = None) -> Flow[object, CheckedRequest | None]:
        """Check a request; None if it isn't counted.

        `counted` is where guards without routes note how they have counted the request: of several that count in the
        same bucket for the same key, the highest cost is taken.
        """
        if self._new:
            self._begin()
        found = self._always
        if found is None or request.is_preflight:
            found = yield from self._find(request)
            if found is None:
                return None
        routes, cost = found
        name = None if self._key is None else self._valid_key((yield self._ask("key", self._key, request)))
        # a gate itself knows the key of an address, and the exempt ones
        key = name or (address_key(request.address) if self._gate is None else request.address)
        identified = name is not None
        if len(routes) > 1:
            counters = [(by_key if identified else by_address, tier) for by_key, by_address, tier in routes]
            one, reserved = yield from reserve_all(counters, key, cost)
            return CheckedRequest(
                request, one.counter, key, one.tier, cost, one.decision, identified, reserved=reserved
            )
        [(by_key, by_address, tier)] = routes
        counter = by_key if identified else by_address
        if counted is not None:
            return (yield from self._check_once(request, counter, key, tier, cost, identified, counted))
        if counter.hold is not None:
            return (yield from self.check_held(request, counter, key, cost, identified))
        return CheckedRequest(request, counter, key, tier, cost, (yield counter.check(key, tier, cost)), identified)

    def check_held(
        self, request: HttpRequest, counter: RequestCounter, key: str, cost: ExactCost, identified: bool
    ) -> Flow[object, CheckedRequest]:
        """Check a request by a hold, which takes a slot if slots are limited."""
        one = yield from reserve(counter, key, "normal", cost)
        return CheckedRequest(request, counter, key, "normal", cost, one.decision, identified, one.hold)

    def _check_once(
        self,
        request: HttpRequest,
        counter: RequestCounter,
        key: str,
        tier: str,
        cost: ExactCost,
        identified: bool,
        counted: Counted,
    ) -> Flow[object, CheckedRequest]:
        """Check a request for what it costs more here than where it was counted in the same bucket before."""
        bucket = counter.bucket(tier), key
        before, decision, hold = counted.get(bucket, (0, None, None))
        if decision is not None and cost <= before:
            return CheckedRequest(request, counter, key, tier, cost, decision, identified, reserved=())
        more = cost - before
        if hold is not None:  # it has the slot already, and is settled where it was made
            decision = yield from hold.extend(more)
            counted[bucket] = cost, decision, hold
            return CheckedRequest(request, counter, key, tier, more, decision, identified, reserved=())
        one = yield from reserve(counter, key, tier, more)
        counted[bucket] = cost, one.decision, one.hold
        return CheckedRequest(request, counter, key, tier, more, one.decision, identified, one.hold)

    def _find(self, request: HttpRequest) -> Flow[object, _Found | None]:
        """Find out where a request counts, and its cost; None if it isn't counted."""
        if self._skip is not None and self._skip.match(request.method, request.route_path()):
            return None
        if self._exempt is not None and (yield self._ask("exempt", self._exempt, request)):
            return None
        given: object = self._cost
        if self._cost_function is not None:
            given = yield self._ask("cost", self._cost_function, request)
        if type(given) is int and given == 0:  # no limit has to be found
            return None
        found = [self._default]
        if self._routes is not None:
            found = self._routes.find(request.method, request.route_path())
        if request.is_preflight:  # counted where a pattern matches, but not by default
            found = [route for route in found if route is not self._default]
            if not found:
                return None
        routes: list[_Route] = []
        for route in found:
            if isinstance(route, LimitFunction):
                routes.append((*(yield from self.counters_for(route, request)), "normal"))
            else:
                routes.append(route)
        if self._tier_function is not None:
            tier = yield self._ask("tier", self._tier_function, request)
            self._check_tier(tier)
            routes = [(by_key, by_address, tier) for by_key, by_address, _ in routes]
        cost = self._read_cost(given, most_decimals(by_key.decimals for by_key, _, _ in routes))
        return (routes, cost) if cost else None

    def _begin(self) -> None:
        """Before the first request. By now the server has started its workers."""
        self._new, own = False, self._own
        if not any((self._exempt, self._cost_function, self._tier_function, self._skip, self._routes)):
            self._shorten(own)
        if self._private and self._counts:
            warn_of_workers()

    def _shorten(self, own: LimitCounters | CountersFunction | None) -> None:
        """Find out once what is the same for all requests."""
        default = self._default
        cost = self._read_cost(self._cost, None if isinstance(default, LimitFunction) else default[0].decimals)
        if cost == 0:
            return
        if not isinstance(default, LimitFunction):
            self._always = [default], cost
        if own is not None and not self.settlement.changes_costs and in_process(self._limiter.store) is not None:
            self.fast_path = self._find_fast_path
            if isinstance(own, LimitCounters) and own.by_key.counter.hold is not None:
                self.fast_path = None
            elif isinstance(own, LimitCounters) and self._key is None and not self.proxies:
                self.fast_path = own.by_address

    def _check_tier(self, tier: object) -> None:
        """Refuse what isn't a tier. One that a reload has removed is: the counter knows what to do."""
        if tier not in self._first_tiers and self._gate is not None and tier not in self._gate.policy.tiers:
            known = ", ".join(self._gate.policy.tiers)
            refuse(f"{self._where} tier", f"a function that returns one of {known}", tier)

    def counters_for(self, limit: CountersFunction, request: HttpRequest) -> Flow[object, Counters]:
        """The counters of the limit that a function returns for a request."""
        return limit.find((yield self._call(limit.where, limit.function, request))).counters

    async def _find_fast_path(self, request: HttpRequest) -> tuple[FastPath, str, bool]:
        """Ask the functions of the user for limit and key, in the order of `check`."""
        own, name = self._own, None
        if isinstance(own, LimitFunction):
            limit: Any = own.function(request)
            own = own.find(await in_time(own.where, limit) if hasattr(limit, "__await__") else limit)
        assert own is not None  # a gate has no fast path
        if self._key is not None:
            key: Any = self._key(request)
            name = self._valid_key(await in_time(f"{self._where} key", key) if hasattr(key, "__await__") else key)
        return (own.by_address, address_key(request.address), False) if name is None else (own.by_key, name, True)

    def _ask(self, option: str, function: Callable[[HttpRequest], object], request: HttpRequest) -> object:
        return self._call(f"{self._where} {option}", function, request)

    def _call(self, where: str, function: Callable[..., object], *arguments: object) -> object:
        """Call a user's function. An async one has a bounded time."""
        found: Any = function(*arguments)
        return in_time(where, found) if self._awaits and hasattr(found, "__await__") else found

    def _valid_key(self, key: object) -> str | None:
        """The key that the user's function has returned. A name that can't be an agent's is anonymous."""
        if not key:
            return None
        if not isinstance(key, str):
            refuse(f"{self._where} key", "a function that returns a string, such as str(user.id), or None", key)
        if self._gate is None:
            return bounded_key(key)
        try:
            return check_agent(key)
        except InvalidInput:
            return None

    # The response ----------------------------------------------------------------------------------------------------

    def headers(self, checked: CheckedRequest) -> HeaderList:
        """The rate limit headers of a response."""
        decision = checked.decision
        if self._silent or decision.outcome is Outcome.EXEMPT:
            return []
        counter, tier = checked.counter, checked.tier
        return self._writer.for_limit(counter.limit(checked.key, tier), counter.label(tier)).write(decision)

    def denial(self, checked: CheckedRequest) -> Flow[object, "DenialResponse"]:
        """The response to a denied request, without the headers of its limit."""
        return self._deny(checked.request, describe_denial(checked.decision, checked.counter.label(checked.tier)))

    def denial_of(self, request: HttpRequest, error: RateLimited | StoreAway) -> Flow[object, "DenialResponse"]:
        """The response to a request in which `RateLimited` or `StoreAway` was raised."""
        return self._deny(request, describe_error(error))

    def _deny(self, request: HttpRequest, problem: ProblemDetails) -> Flow[object, "DenialResponse"]:
        headers = [(name.encode(), value.encode()) for name, value in problem.headers]
        body = problem.encode()
        if self._body is not None:
            where = f"{self._where} body"
            found = yield self._call(where, self._body, request, problem)
            if not isinstance(found, tuple) or len(found) != 2 or not all(isinstance(one, str) for one in found):
                refuse(where, "a function that returns two strings, a body and its content type", found)
            text, media = found
            body = text.encode()
            headers = [(b"content-type", media.encode()), *headers[1:]]
        return DenialResponse(problem.status, [*headers, (b"content-length", str(len(body)).encode())], body)
