"""Errors that are answered to callers."""

import time
from collections.abc import Callable
from typing import Final

import structlog

from headgate.errors import HeadgateError, HoldError, InvalidInput, StoreError, StoreLost, UnknownHold
from headgate.gate.policy import PolicyError
from headgate.hub.storage.database import DatabaseError
from headgate.stores.sqlite import ChangeLogError

BLOCKED_BY_OPERATOR: Final = "blocked by an operator"
"""Why a blocked agent is denied. The operator's reason is for operators."""

MAX_LINES: Final = 10
"""Failures that are logged in one interval. Agents can ask thousands of times a second while a store is away."""
INTERVAL: Final = 10.0
"""Seconds."""

_log = structlog.get_logger("headgate.hub")


class RequestError(HeadgateError):
    """A request that the hub refuses or can't carry out.

    `error` is one word for programs, `detail` a sentence for people. Over HTTP it is a response with `status`, over a
    WebSocket an error frame.
    """

    def __init__(self, status: int, error: str, detail: str) -> None:
        self.status: Final = status
        self.error: Final = error
        self.detail: Final = detail
        super().__init__(detail)


def stopping_error() -> RequestError:
    return RequestError(503, "stopping", "the hub is stopping")


class FailureLog:
    """Logs the hub's own failures to answer requests: a bounded number, and how many there were beyond it."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now: Final = now
        self._began = now()
        self._failures = 0

    def write(self, event: str, **fields: object) -> None:
        if self._now() - self._began >= INTERVAL:
            if self._failures > MAX_LINES:
                _log.error("more requests failed", failures=self._failures - MAX_LINES)
            self._began = self._now()
            self._failures = 0
        self._failures += 1
        if self._failures <= MAX_LINES:
            _log.error(event, **fields)
        elif self._failures == MAX_LINES + 1:
            _log.error("further failures of requests are counted, not logged", seconds=INTERVAL)


_failures: Final = FailureLog()


def as_request_error(error: Exception) -> RequestError:
    """The error to answer for any exception. The details of the hub's own failures go to the log only."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, (InvalidInput, PolicyError)):
        return RequestError(400, "invalid", str(error))
    if isinstance(error, UnknownHold):
        return RequestError(404, "unknown_hold", str(error))
    if isinstance(error, HoldError):
        return RequestError(409, "hold_error", str(error))
    if isinstance(error, StoreLost):
        return RequestError(503, "store_lost", f"{error}; an admin has to restore or accept it")
    if isinstance(error, (StoreError, DatabaseError, ChangeLogError)):
        _failures.write("request failed", reason=str(error))
        return RequestError(503, "unavailable", "the hub can't do this at the moment; try again")
    _failures.write("request failed unexpectedly", exc_info=error)
    return RequestError(500, "internal", "internal error of the hub; see its log")
