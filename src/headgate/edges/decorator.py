"""A decorator for any function, and the response to the error that it raises."""

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from types import MethodWrapperType
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeAlias, TypeVar, cast, overload

from headgate.edges.counters import bounded_key
from headgate.errors import RateLimited, refuse
from headgate.http.problem import Headers, quota_exceeded, round_wait
from headgate.limiter import Limiter
from headgate.limits.decision import Decision
from headgate.limits.notation import LimitLike, limit_of, rate_of
from headgate.limits.numbers import Number, cost_of, microseconds

P = ParamSpec("P")
Q = ParamSpec("Q")
R_co = TypeVar("R_co", covariant=True)
S = TypeVar("S")
Arguments: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]

_WHERE: Final = "rate_limited"
_CACHED: Final = type(functools.cache(len))


class Limited(Protocol[P, R_co]):
    """A rate-limited function or method."""

    limiter: Limiter

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __get__(self, instance: None, owner: type) -> "Limited[P, R_co]": ...
    @overload
    def __get__(self: "Limited[Concatenate[S, Q], R_co]", instance: S, owner: type) -> "Limited[Q, R_co]": ...


def rate_limited(
    limit: Limiter | LimitLike,
    *,
    key: Callable[..., str] | str | None = None,
    cost: int | Callable[..., int] = 1,
    wait: Number | None = None,
) -> Callable[[Callable[P, R_co]], Limited[P, R_co]]:
    """Limit the calls of a function or method; a call above the limit raises `RateLimited`.

    `limit` is a limit, counted in memory for this function alone, or a limiter. `key` is what a call counts for: the
    name of one of the function's parameters, or a function of the same arguments. By default all calls share one key,
    the function's module and name; under a limiter, what has no name of its own (a lambda, a partial) needs a key.
    `cost` is a number, or a function of the arguments. With `wait`, a call first waits up to so many seconds, first
    come, first served.

    >>> @rate_limited("5/minute", key="agent")
    ... def ask(agent: str, question: str) -> str:
    ...     return f"{agent} asks {question}"
    >>> ask("bob", question="why?")
    'bob asks why?'
    >>> ask.limiter.peek("bob").remaining
    4

    A call that passes and then raises stays counted. Generator functions are refused: calling one does nothing yet.
    """
    if callable(limit):
        refuse(_WHERE, "a limit in parentheses, such as @rate_limited('5/minute')", limit)
    given = limit if isinstance(limit, Limiter) else limit_of(f"{_WHERE} limit", limit)
    if wait is not None:
        microseconds(f"{_WHERE} wait", wait)

    def decorate(function: Callable[P, R_co]) -> Limited[P, R_co]:
        asynchronous = _is_async(function)
        limiter = given if isinstance(given, Limiter) else Limiter(given)
        if key is None and limiter is given:
            _require_name(function)
        key_by, cost_by = _key_function(function, key), _cost_function(cost)
        limited: Callable[..., Any]

        if asynchronous:
            atake = limiter.acheck if wait is None else functools.partial(limiter.aacquire, timeout=wait)

            async def limited(*args: P.args, **kwargs: P.kwargs) -> object:
                name, number = key_by((args, kwargs)), cost_by((args, kwargs))
                _require(name, await atake(name, number))
                return await cast(Awaitable[object], function(*args, **kwargs))
        else:
            take = limiter.check if wait is None else functools.partial(limiter.acquire, timeout=wait)

            def limited(*args: P.args, **kwargs: P.kwargs) -> object:
                name, number = key_by((args, kwargs)), cost_by((args, kwargs))
                _require(name, take(name, number))
                return function(*args, **kwargs)

        found = cast(Limited[P, R_co], functools.wraps(function)(limited))
        found.limiter = limiter
        return found

    return decorate


def too_many_requests(error: RateLimited) -> tuple[bytes, int, Headers]:
    """The response to a request in which `RateLimited` was raised: body, status and headers.

    An error handler of Flask returns these: `app.register_error_handler(RateLimited, too_many_requests)`.
    """
    name, wait = error.pace, error.retry_after_ms
    problem = quota_exceeded(round_wait(None if wait is None else wait * 1000), name, name)
    return problem.encode(), problem.status, problem.headers


def _require(key: str, decision: Decision) -> None:
    if not decision:
        raise RateLimited(key, rate_of(decision.limit), str(decision.limit), decision.retry_ms)


def _is_async(function: object) -> bool:
    """Whether calls of a function are awaited. Generators, classes and wrapped methods are refused."""
    if isinstance(function, (staticmethod, classmethod)):
        refuse(_WHERE, f"a function: put it below @{type(function).__name__}", function)
    if not callable(function) or inspect.isclass(function):
        refuse(_WHERE, "a function or method", function)
    if _generates(function):
        refuse(_WHERE, "a function that returns: calling a generator function does nothing yet", function)
    return _awaits(function)


def _generates(function: object) -> bool:
    return any(inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one) for one in _forwards(function))


def _awaits(function: object) -> bool:
    return any(inspect.iscoroutinefunction(one) for one in _forwards(function))


def _forwards(function: object) -> Iterator[object]:
    """A callable, and what it hands its calls on to: the function of a partial or a cache, the method of an object."""
    while not isinstance(function, (type, MethodWrapperType)):  # the latter is where Python itself takes over
        yield function
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, _CACHED):
            function = function.__wrapped__
        else:
            function = getattr(function, "__call__")  # noqa: B004, B009 - inspected, not called


def _require_name(function: Callable[..., object]) -> None:
    """Refuse what shares its name with others: under a shared limiter it would share their key."""
    owner = getattr(function, "__self__", None)
    for shares, what in (
        (isinstance(function, functools.partial), "a partial has no name"),
        (getattr(function, "__name__", "") == "<lambda>", "a lambda has no name"),
        (owner is not None and not inspect.ismodule(owner), "the bound methods of all objects have one name"),
        (not hasattr(function, "__qualname__"), "the objects of a class have no names"),
    ):
        if shares:
            refuse(f"{_WHERE} key", f"one under a shared limiter, such as key=lambda *_: 'mail', as {what}", function)


def _key_function(function: Callable[..., object], key: object) -> Callable[[Arguments], str]:
    """The key of a call, by its arguments."""
    if key is None:
        module = getattr(function, "__module__", "")
        name = f"{module}.{getattr(function, '__qualname__', type(function).__qualname__)}"
        return lambda call: name
    find: Callable[[Arguments], object]
    if isinstance(key, str):
        find = _parameter(function, key)
    elif callable(key) and not (_awaits(key) or _generates(key)):
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


def _cost_function(cost: object) -> Callable[[Arguments], int]:
    """The cost of a call, by its arguments."""
    if callable(cost) and not (_awaits(cost) or _generates(cost)):
        find = _apply(cost)
        return lambda call: cost_of(find(call))
    number = cost_of(cost)
    return lambda call: number


def _apply(function: Callable[..., object]) -> Callable[[Arguments], object]:
    return lambda call: function(*call[0], **call[1])
