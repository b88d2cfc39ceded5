"""One flow for sync and async callers.

A flow is a generator: it yields steps, is sent the result of each, and returns the result of all. What the steps are is
the flow's business; how they are carried out is the driver's. So a flow is written once, and only its drivers differ:

    def fetch(url):                                    # the flow
        for attempt in range(3):
            response = yield url
            if response:
                return response

    drive(fetch("/a"), client.get)                     # in a thread
    await adrive(fetch("/a"), async_client.get)        # in an event loop
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar

from headgate.errors import HeadgateError

Step = TypeVar("Step")
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")

Flow: TypeAlias = Generator[Step, Any, Result]


def drive(flow: Flow[Step, Result], perform: Callable[[Step], object] | None = None) -> Result:
    """Carry out a flow. `perform` carries out a step; without it, each step is its own result already.

    An error in a step is raised in the flow, at that step: so the flow is always run to its end.
    """
    try:
        step = next(flow)
        while True:
            try:
                done = step if perform is None else perform(step)
            except BaseException as error:  # noqa: BLE001 - the flow decides what to do about it
                step = flow.throw(error)
            else:
                step = flow.send(done)
    except StopIteration as end:
        result: Result = end.value
        return result


def begin(flow: Flow[Step, object]) -> Step | None:
    """Carry out a flow up to its first awaitable step, each step before that being its own result already.

    Returns that step, with which `adrive` goes on, or None if the flow has ended.
    """
    try:
        step = next(flow)
        while not hasattr(step, "__await__"):
            step = flow.send(step)
    except StopIteration:
        return None
    return step


async def adrive(
    flow: Flow[Step, Result], perform: Callable[[Step], Any] | None = None, *, step: Step | None = None
) -> Result:
    """`drive` in an event loop: the result of a step may be an awaitable.

    `step` is the one that the flow has arrived at, if `begin` has begun it.
    """
    try:
        if step is None:
            step = next(flow)
        while True:
            try:
                done = step if perform is None else perform(step)
                if hasattr(done, "__await__"):
                    done = await done
            except BaseException as error:  # noqa: BLE001 - the flow decides what to do about it
                step = flow.throw(error)
            else:
                step = flow.send(done)
    except StopIteration as end:
        result: Result = end.value
        return result


class TwinCall(NamedTuple):
    """A step of a flow: call a method, as `call_method` does for threads, or its async twin, as `call_twin` does."""

    method: Callable[..., Any]
    twin: Callable[..., Awaitable[Any]]
    arguments: tuple[Any, ...]


def call_method(step: TwinCall) -> Any:
    return step.method(*step.arguments)


def call_twin(step: TwinCall) -> Awaitable[Any]:
    return step.twin(*step.arguments)


def no_event_loop(what: str, method: str) -> HeadgateError:
    """The error for a caller without an event loop of asyncio, as under trio; `method` is the one to call instead."""
    name = method.rpartition(".")[2]
    return HeadgateError(
        f"{what}: expected a running event loop of asyncio, got none; under trio, call the synchronous methods "
        f"(`{name}`, not `a{name}`) in a thread: await trio.to_thread.run_sync({method}, ...)"
    )


def in_thread(verb: Callable[Arguments, Result]) -> Callable[Arguments, Coroutine[Any, Any, Result]]:
    """The async twin of a method that waits for a disk or a server: it does so in a thread."""

    @wraps(verb)
    async def twin(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        owner, name = type(args[0]).__name__, verb.__name__
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise no_event_loop(f"{owner}.a{name}", f"{owner.lower()}.{name}") from None
        own: Callable[..., Result] = getattr(args[0], name)  # a subclass may have overridden the verb
        return await asyncio.to_thread(own, *args[1:], **kwargs)

    twin.__name__ = f"a{verb.__name__}"
    return twin
