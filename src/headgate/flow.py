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

from collections.abc import Callable, Generator
from typing import Any, TypeAlias, TypeVar

Step = TypeVar("Step")
Result = TypeVar("Result")

Flow: TypeAlias = Generator[Step, Any, Result]


def _is_result(step: Any) -> Any:
    """The performer of flows whose steps are results already, or awaitables of them."""
    return step


def drive(flow: Flow[Step, Result], perform: Callable[[Step], object] = _is_result) -> Result:
    """Carry out a flow. `perform` carries out a step, by default a result already; its error is raised in the flow."""
    try:
        step = next(flow)
        while True:
            try:
                done = perform(step)
            except BaseException as error:  # noqa: BLE001 - the flow decides what to do about it
                step = flow.throw(error)
            else:
                step = flow.send(done)
    except StopIteration as end:
        result: Result = end.value
        return result
    finally:
        flow.close()


async def adrive(flow: Flow[Step, Result], perform: Callable[[Step], Any] = _is_result) -> Result:
    """`drive` in an event loop: `perform` returns the result of a step, or an awaitable of it."""
    try:
        step = next(flow)
        while True:
            try:
                done = perform(step)
                if hasattr(done, "__await__"):
                    done = await done
            except BaseException as error:  # noqa: BLE001 - the flow decides what to do about it
                step = flow.throw(error)
            else:
                step = flow.send(done)
    except StopIteration as end:
        result: Result = end.value
        return result
    finally:
        flow.close()
