"""The settlement of a request once its response has ended: carried out to its end, whatever becomes of the request."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Literal, TypeAlias

from headgate.edges.costs import ExactCost, read_cost
from headgate.edges.requests import HttpResponse
from headgate.edges.reservation import CheckedRequest
from headgate.errors import HeadgateError, refuse
from headgate.flow import Flow, adrive, begin, drive
from headgate.limits.decision import Outcome

_log = logging.getLogger("headgate")

Counts: TypeAlias = Literal["all", "failures", "successes"] | Callable[[int], bool | Awaitable[bool]]
"""Which responses count, by their status."""

_SETTLE_SECONDS: Final = 10.0
"""For a settlement that has to be awaited, so that none outlives its request for long."""
_settlements: Final[set[asyncio.Task[None]]] = set()  # an event loop itself keeps only weak references
_FAILURES: Final = (Exception, asyncio.CancelledError)
"""Of the user's function, or of the store. Something that either has awaited may have been cancelled."""
_UNSETTLED: Final = "a response could not be settled: its request stays counted with the cost that it was checked with"


class Settlement:
    """The real cost of requests, once their responses have ended, by the options of an edge."""

    def __init__(self, where: str, options: Mapping[str, Any]) -> None:
        self._where: Final = where
        self._settle: Final = options.get("settle")
        self._counts: Final = _status_filter(where, options.get("counts", "all"))
        self.refund_crashes: Final = options.get("refund_crashes", False)
        if not isinstance(self.refund_crashes, bool):
            refuse(f"{where} refund_crashes", "True or False", self.refund_crashes)
        self.changes_costs: Final = self._settle is not None or self._counts is not None or self.refund_crashes
        """Whether a request can cost anything else than it was checked with."""

    def settle(
        self, checked: CheckedRequest, response: HttpResponse | None, *, disconnected: bool
    ) -> Flow[object, None]:
        """Count the actual cost of a request, now that its response has ended. None: the handler has raised before.

        If the client was seen to have disconnected before the response, whatever that is, nothing is refunded.
        """
        actual = cost = checked.cost
        try:
            if checked.decision.outcome is not Outcome.EXEMPT:
                actual = yield from self._actual_cost(checked, response)
        finally:  # a slot is free whatever the user's functions do
            yield from checked.settle(max(actual, cost) if disconnected else actual)

    def end(
        self, checked: CheckedRequest, response: HttpResponse | None, *, crashed: bool, disconnected: bool
    ) -> Flow[object, None]:
        """Settle with what is known: the response was sent, or cut off, or the handler has crashed.

        Without a response the request stays counted, unless the handler has crashed.
        """
        if crashed or response is not None:
            return self.settle(checked, response, disconnected=disconnected)
        return checked.release()

    def _actual_cost(self, checked: CheckedRequest, response: HttpResponse | None) -> Flow[object, ExactCost]:
        if self._counts is not None and not (yield self._counts(500 if response is None else response.status)):
            return 0
        if response is None:
            return 0 if self.refund_crashes else checked.cost
        if self._settle is None:
            return checked.cost
        given = yield self._settle(checked.request, response)
        return read_cost(f"{self._where} settle", given, checked.decimals, round_up=True)


def _status_filter(where: str, counts: Counts) -> Callable[[int], bool | Awaitable[bool]] | None:
    """A function that says by the status whether a response counts; None if all do."""
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
        step = begin(settlement)
    except _FAILURES:
        _log.exception(_UNSETTLED)
        return
    if step is None:
        return
    task = asyncio.create_task(_finish(settlement, step))
    _settlements.add(task)
    task.add_done_callback(_settlements.discard)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:  # of the request
        await asyncio.wait([task])  # if that is cancelled too, the task goes on without the request
        raise


async def _finish(settlement: Flow[object, None], step: object) -> None:
    try:
        async with asyncio.timeout(_SETTLE_SECONDS):
            await adrive(settlement, step=step)
    except _FAILURES:
        _log.exception(_UNSETTLED)


def reject_awaitable(step: object) -> object:
    """The performer of a flow where there is no event loop: each step is a result already."""
    if hasattr(step, "__await__"):
        close = getattr(step, "close", None)
        if close is not None:
            close()
        raise HeadgateError("expected a plain function, got an async one: there is no event loop here")
    return step
