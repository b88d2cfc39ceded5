"""A decorator for any function, and the response to the error that it raises."""

import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import aclosing, nullcontext, suppress
from functools import partial
from typing import (
    Any,
    Concatenate,
    Final,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    cast,
    overload,
)

from headgate.callables import is_async, is_generator
from headgate.edges.costs import decimals_of, read_cost
from headgate.edges.counters import bounded_key
from headgate.edges.limit_function import LimitFunction, in_time
from headgate.edges.request_hold import hold_options, refuse_slots
from headgate.errors import RateLimited, refuse, refuse_option
from headgate.holds import Hold
from headgate.http.problem import Headers, describe_error
from headgate.limiter import Limiter, UnpinnedLimiter
from headgate.limits.decision import Decision, Limit
from headgate.limits.fixed import UNLIMITED
from headgate.limits.notation import LimitLike, denial_error, limit_of
from headgate.limits.numbers import Cost, Number, cost_in, microseconds, smallest_units
from headgate.stores.base import Store

P = ParamSpec("P")
Q = ParamSpec("Q")
R_co = TypeVar("R_co", covariant=True)
S = TypeVar("S")
Arguments: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]

_WHERE: Final = "rate_limited"


class Limited(Protocol[P, R_co]):
    """A rate-limited function or method."""

    limiter: Limiter

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __get__(self, instance: None, owner: type) -> "Limited[P, R_co]": ...
    @overload
    def __get__(self: "Limited[Concatenate[S, Q], R_co]", instance: S, owner: type) -> "Limited[Q, R_co]": ...


@overload
def rate_limited(
    limit: Limiter | LimitLike,
    *,
    key: Callable[..., str] | str | None = None,
    cost: Cost | Callable[..., Cost] = 1,
    wait: Number | None = None,
    store: Store | str | None = None,
    name: str = "",
) -> Callable[[Callable[P, R_co]], Limited[P, R_co]]: ...
@overload
def rate_limited(
    *,
    limit: Callable[..., LimitLike | Awaitable[LimitLike]],
    key: Callable[..., str] | str | None = None,
    cost: Cost | Callable[..., Cost] = 1,
    wait: Number | None = None,
    store: Store | str | None = None,
    name: str = "",
) -> Callable[[Callable[P, R_co]], Callable[P, R_co]]: ...
def rate_limited(
    *given: Any,
    limit: Any = None,
    key: Any = None,
    cost: Any = 1,
    wait: Any = None,
    store: Any = None,
    name: str = "",
    **unknown: Any,
) -> Any:
    """Limit the calls of a function or method; a call above the limit raises `RateLimited`.

    The limit is a limit, counted for this function alone in `store`, under `name` or the function's own, or a limiter.
    Without a store it is counted in memory. `limit=`, by name, is a function of the same arguments that returns a limit
    or its text; for an async function, it may be async. `key` is what a call counts for: the name of one of the
    function's parameters, or a function of the same arguments. By default all calls share one key, the function's
    module and name. What has no name of its own (a lambda, a partial) needs a key under a limiter, and a `name` in a
    store. `cost` is a number (under a limit in dollars, "0.05" is one), or a function of the arguments. With `wait`, a
    call first waits up to so many seconds, first come, first served.

    >>> @rate_limited("5/minute", key="agent")
    ... def ask(agent: str, question: str) -> str:
    ...     return f"{agent} asks {question}"
    >>> ask("bob", question="why?")
    'bob asks why?'
    >>> ask.limiter.peek("bob").remaining
    4
    >>> @rate_limited(limit=lambda agent, pages: "9/minute" if agent == "ann" else "2/minute", key="agent")
    ... def print_pages(agent: str, pages: int) -> None: ...

    A call that passes and then raises stays counted. With "5 in flight" in the limit, a call has a slot as long as it
    runs. A generator function is limited when its iteration begins, and runs until that ends.
    """
    for option in unknown:
        refuse_option(_WHERE, ("limit", "key", "cost", "wait", "store", "name"), option, see="help(rate_limited)")
    if len(given) != (limit is None):
        refuse(_WHERE, "one limit", (*given, limit) if given else None)
    if given and callable(given[0]):
        refuse(_WHERE, "a limit in parentheses, such as @rate_limited('5/minute'), or a function as limit=", given[0])
    return partial(_limited, given[0] if given else limit, key=key, cost=cost, wait=wait, store=store, name=name)


def _limited(
    given: Any,
    function: Callable[P, R_co],
    *,
    key: Any,
    cost: Any,
    wait: Number | None,
    store: Store | str | None,
    name: str,
) -> Callable[P, R_co]:
    if wait is not None:
        microseconds(f"{_WHERE} wait", wait)
    _check_function(function)
    if not isinstance(name, str):
        refuse(f"{_WHERE} name", "a string", name)
    if isinstance(given, Limiter) and (store is not None or name):
        refuse(f"{_WHERE} {'store' if name == '' else 'name'}", "none: a limiter has its own", name or store)
    if store is not None and not name:
        _require_name(function, "name", "a name in a store that others may use, such as name='mail'")
    elif isinstance(given, Limiter) and key is None:
        _require_name(function, "key", "one under a shared limiter, such as key=lambda *_: 'mail'")
    limiter, limits = _limiters(given, function, store, name or _name_of(function))
    key_by = _key_function(function, key)
    cost_by = _cost_function(cost, None if limits is not None else limiter.limit)
    limited: Callable[..., Any]

    if limits is not None or limiter.limit.counts_slots or is_generator(function):
        limited = _with_slot(function, _CallLimit(limiter, limits, key_by, cost_by, wait))
    elif is_async(function):

        async def limited(*args: P.args, **kwargs: P.kwargs) -> object:
            name, number = key_by((args, kwargs)), cost_by((args, kwargs))
            taken = limiter.acheck(name, number) if wait is None else limiter.aacquire(name, number, timeout=wait)
            _require(name, await taken)
            return await cast(Awaitable[object], function(*args, **kwargs))
    else:

        def limited(*args: P.args, **kwargs: P.kwargs) -> object:
            name, number = key_by((args, kwargs)), cost_by((args, kwargs))
            _require(name, limiter.check(name, number) if wait is None else limiter.acquire(name, number, timeout=wait))
            return function(*args, **kwargs)

    decorated = cast(Limited[P, R_co], functools.wraps(function)(limited))
    if limits is None:
        decorated.limiter = limiter
    return decorated


class _CallLimit:
    """Takes what calls cost, and a slot if slots are limited."""

    def __init__(
        self,
        limiter: Limiter,
        limits: LimitFunction[Limiter] | None,
        key_by: Callable[[Arguments], str],
        cost_by: Callable[[Arguments], Cost],
        wait: Number | None,
    ) -> None:
        refuse_slots(f"{_WHERE} limit", limiter)
        self._limiter: Final = limiter
        self._limits: Final = limits
        self._key_by: Final = key_by
        self._cost_by: Final = cost_by
        self._wait: Final = wait

    def take(self, call: Arguments) -> Hold | nullcontext[None]:
        """Take it by a check; or by a hold. The call is to run in the block: entering a denied hold raises."""
        key, cost, limiter, wait = self._key_by(call), self._cost_by(call), self._limiter, self._wait
        if self._limits is not None:
            limiter = self._limits.find(self._limits.function(*call[0], **call[1]))
            cost = _cost_under(limiter.limit, cost)
        if limiter.limit.counts_slots:
            return limiter.hold(key, cost, timeout=wait or 0, **hold_options(limiter))
        _require(key, limiter.check(key, cost) if wait is None else limiter.acquire(key, cost, timeout=wait))
        return nullcontext()

    async def atake(self, call: Arguments) -> Hold | nullcontext[None]:
        key, cost, limiter, wait = self._key_by(call), self._cost_by(call), self._limiter, self._wait
        if self._limits is not None:
            given: Any = self._limits.function(*call[0], **call[1])
            given = await in_time(self._limits.where, given) if hasattr(given, "__await__") else given
            limiter = self._limits.find(given)
            cost = _cost_under(limiter.limit, cost)
        if limiter.limit.counts_slots:
            return await limiter.ahold(key, cost, timeout=wait or 0, **hold_options(limiter))
        taken = limiter.acheck(key, cost) if wait is None else limiter.aacquire(key, cost, timeout=wait)
        _require(key, await taken)
        return nullcontext()


def _with_slot(function: Callable[..., Any], limit: _CallLimit) -> Callable[..., Any]:
    """A function whose calls have their slots as long as they run; those of generators, from the first step on."""
    limited: Callable[..., Any]
    if inspect.isasyncgenfunction(function):

        async def limited(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            async with await limit.atake((args, kwargs)), aclosing(function(*args, **kwargs)) as parts:
                step = parts.asend(None)
                with suppress(StopAsyncIteration):
                    while True:
                        part = await step
                        try:
                            step = parts.asend((yield part))
                        except GeneratorExit:
                            raise
                        except BaseException as error:  # noqa: BLE001 - it was thrown in, for the generator
                            step = parts.athrow(error)
    elif inspect.isgeneratorfunction(function):

        def limited(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            with limit.take((args, kwargs)):
                return (yield from function(*args, **kwargs))
    elif is_async(function):

        async def limited(*args: Any, **kwargs: Any) -> Any:
            async with await limit.atake((args, kwargs)):
                return await function(*args, **kwargs)
    else:

        def limited(*args: Any, **kwargs: Any) -> Any:
            with limit.take((args, kwargs)):
                return function(*args, **kwargs)

    return limited


def _limiters(
    given: Any, function: Callable[..., object], store: Store | str | None, name: str
) -> tuple[Limiter, LimitFunction[Limiter] | None]:
    """The limiter of a function; if its limit depends on the arguments, the limiters of each limit, too."""
    if isinstance(given, Limiter):
        return given, None
    if not callable(given):
        return Limiter(limit_of(f"{_WHERE} limit", given), store=store, name=name), None
    if is_async(given) and not (is_async(function) or inspect.isasyncgenfunction(function)):
        refuse(f"{_WHERE} limit", "a plain function, since the limited function is not async", given)
    base = Limiter(UNLIMITED, store=store, name=name)
    return base, LimitFunction(
        f"{_WHERE} limit", given, lambda limit: UnpinnedLimiter(limit, store=base.store, name=name)
    )


def too_many_requests(error: RateLimited) -> tuple[bytes, int, Headers]:
    """The response to a request in which `RateLimited` was raised: body, status and headers.

    An error handler of Flask returns these: `app.register_error_handler(RateLimited, too_many_requests)`.
    """
    problem = describe_error(error)
    return problem.encode(), problem.status, problem.headers


def _require(key: str, decision: Decision) -> None:
    if not decision:
        raise denial_error(key, decision)


def _check_function(function: object) -> None:
    """Refuse what can't be limited: classes, wrapped methods, and generators that are made elsewhere."""
    if isinstance(function, (staticmethod, classmethod)):
        refuse(_WHERE, f"a function: put it below @{type(function).__name__}", function)
    if not callable(function) or inspect.isclass(function):
        refuse(_WHERE, "a function or method", function)
    if is_generator(function) and not (inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)):
        refuse(_WHERE, "a function, or a generator function itself (not in a cache or an object)", function)


def _require_name(function: Callable[..., object], option: str, expected: str) -> None:
    """Refuse what shares its name with others: it would count together with them."""
    owner = getattr(function, "__self__", None)
    for shares, what in (
        (isinstance(function, functools.partial), "a partial has no name"),
        (getattr(function, "__name__", "") == "<lambda>", "a lambda has no name"),
        (owner is not None and not inspect.ismodule(owner), "the bound methods of all objects have one name"),
        (not hasattr(function, "__qualname__"), "the objects of a class have no names"),
    ):
        if shares:
            refuse(f"{_WHERE} {option}", f"{expected}, as {what}", function)


def _name_of(function: Callable[..., object]) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _key_function(function: Callable[..., object], key: object) -> Callable[[Arguments], str]:
    """The key of a call, by its arguments."""
    if key is None:
        name = _name_of(function)
        return lambda call: name
    find: Callable[[Arguments], object]
    if isinstance(key, str):
        find = _parameter(function, key)
    elif callable(key) and not (is_async(key) or is_generator(key)):
        find = _apply(key)
    else:
        refuse(f"{_WHERE} key", "a plain function, or the name of a parameter", key)

    def found(call: Arguments) -> str:
        value = find(call)
        if not isinstance(value, str):
            refuse(f"{_WHERE} key", "a string for each call, such as key=lambda user: str(user.id) makes", value)
        return bounded_key(value)

    return found


def _parameter(function: Callable[..., object], name: str) -> Callable[[Arguments], object]:
    """The argument of a call for one of its parameters."""
    signature = inspect.signature(function)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [one.name for one in signature.parameters.values() if one.kind not in variable]
    if name not in names:
        refuse(f"{_WHERE} key", f"a parameter of the function ({', '.join(names) or 'it has none'})", name)
    parameter = signature.parameters[name]
    if parameter.annotation in (int, float, bool, bytes, None):
        refuse(f"{_WHERE} key", f"a parameter that is a string, or key=lambda ...: str({name})", parameter.annotation)
    position = names.index(name)
    by_place = parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    by_name = parameter.kind is not inspect.Parameter.POSITIONAL_ONLY

    def find(call: Arguments) -> object:
        args, kwargs = call
        if by_place and position < len(args):
            return args[position]
        if by_name and name in kwargs:
            return kwargs[name]
        if parameter.default is not inspect.Parameter.empty:
            return parameter.default
        return signature.bind(*args, **kwargs).arguments[name]  # raises what the call would, before it is counted

    return find


def _cost_function(cost: Any, limit: Limit | None) -> Callable[[Arguments], Cost]:
    """The cost of a call, by its arguments, for its limit to read. None: that depends on the arguments, too."""
    if callable(cost) and not (is_async(cost) or is_generator(cost)):
        find = _apply(cost)
    else:
        if isinstance(cost, int) or (limit is not None and decimals_of(limit) is not None):
            cost_in(0 if limit is None else limit.decimals, cost)
        else:
            smallest_units("cost", cost, 0, round_up=True)
        find = lambda call: cost  # noqa: E731
    return find if limit is None or decimals_of(limit) is not None else lambda call: _cost_under(limit, find(call))


def _cost_under(limit: Limit, cost: Cost) -> Cost:
    """The cost of a call, as its limit can read it: any, where nothing is counted."""
    return cost if decimals_of(limit) is not None else read_cost("cost", cost, None)


def _apply(function: Callable[..., Any]) -> Callable[[Arguments], Any]:
    return lambda call: function(*call[0], **call[1])
