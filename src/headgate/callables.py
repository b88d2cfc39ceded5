"""The kinds of a user's functions: plain, async, or generators, also behind partials, caches and objects."""

import functools
import inspect
from collections.abc import Iterator
from types import MethodWrapperType
from typing import Final

_CACHED: Final = type(functools.cache(len))


def is_async(function: object) -> bool:
    """Whether calls of a function are awaited."""
    return any(inspect.iscoroutinefunction(one) for one in _forwards(function))


def is_generator(function: object) -> bool:
    """Whether calling a function does nothing yet, but makes a generator."""
    return any(inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one) for one in _forwards(function))


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
