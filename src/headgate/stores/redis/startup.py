"""Before the first calls of a store: a look at its server, and threads that could not be started yet."""

import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterError,
    InvalidResponse,
    NoPermissionError,
    ResponseError,
)

from headgate.errors import StoreAway, StoreError
from headgate.flow import Flow
from headgate.lifecycle import new_lock
from headgate.stores.redis.batching import ScriptRunner
from headgate.stores.redis.server_errors import ERRORS, describe_error

PERMISSIONS: Final = "+@scripting +@read +@write +@keyspace +@pubsub +@connection +info +time ~headgate* &headgate*"
"""The permissions that a user needs, in the notation of ACL SETUSER."""

OLDEST: Final = (6, 2)
"""The oldest version of Redis that is supported. (Valkey's versions go on from 7.2.)"""

_START_AFTER: Final = 1.0  # seconds until a thread that could not be started is tried again


class Startup:
    """The steps that are left before a call."""

    def __init__(self, runner: ScriptRunner) -> None:
        self._runner: Final = runner
        self._lock: Final = new_lock()
        self._unstarted: list[Callable[[], None]] = []
        self._start_at = 0.0
        self._server_seen = False
        self.done = False
        """Whether nothing is left to do."""

    def start_later(self, start: Callable[[], None]) -> None:
        """Call this before a call of the store, but not at once."""
        with self._lock:
            self._unstarted.append(start)
            self._start_at = time.monotonic() + _START_AFTER
            self.done = False

    def after_fork(self) -> None:
        """In a forked process: what has threads starts its own, and what the parent has left to start is not here."""
        self._unstarted.clear()

    def run(self) -> Flow[None, None]:
        """Do what is left. One caller does, and the others don't wait. Its one step has the result of INFO."""
        with self._lock:
            unstarted: list[Callable[[], None]] = []
            if time.monotonic() >= self._start_at:
                unstarted, self._unstarted = self._unstarted, []
            looks = not self._server_seen and not self._runner.breaker.down
            self._server_seen = self._server_seen or looks
            self.done = self._server_seen and not self._unstarted
        for start in unstarted:
            start()
        if looks:
            try:
                yield from self.look_at_server()
            except StoreAway:  # no connection was free to ask by: another call will
                self._server_seen = self.done = False
            except StoreError as error:
                self._runner.log(logging.ERROR, str(error))
            except BaseException as error:
                self._server_seen = self.done = False
                if isinstance(error, ERRORS):
                    raise self._runner.record_failure(error) from error
                raise

    def look_at_server(self) -> Flow[None, None]:
        """Log problems of the server, or that it keeps them to itself. Its one step has the result of INFO."""
        try:
            info: dict[str, Any] = yield None
        except ResponseError as error:
            said = describe_error(error)
            self._runner.log(logging.WARNING, f"the server's version and settings are unknown, INFO is refused: {said}")
        else:
            by_node = [one for one in info.values() if isinstance(one, Mapping) and "redis_version" in one]
            for of_node in by_node or [info]:
                for note in check_server(of_node):
                    self._runner.log(logging.WARNING, note)
        self._server_seen = True


def check_server(info: Mapping[str, Any]) -> list[str]:
    """Warnings for the operator about a server, from its INFO; raises `StoreError` if it can't be used."""
    version = str(info.get("redis_version", ""))
    numbers = [int(number) for number in re.findall(r"\d+", version)[:2]]
    if tuple(numbers) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise StoreError(f"store: expected Redis {oldest} or later, or Valkey, got version {version or 'unknown'}")
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy.partition("-")[0] not in ("allkeys", "volatile"):
        return []
    forgotten = "who is blocked, and what is taken of budgets, slots and holds"
    advice = "use noeviction, or a server of its own"
    return [f"the server's maxmemory-policy is {policy}: short of memory it may forget {forgotten}; {advice}"]


def startup_error(error: BaseException) -> StoreError:
    """The error for an operator when the first contact with a server fails."""
    cause = error.__cause__ or error
    said = describe_error(cause)
    if isinstance(cause, AuthenticationError):
        return StoreError(f"store: expected a user and a password that the server accepts, got {said}")
    if isinstance(cause, NoPermissionError):
        return StoreError(
            f"store: expected a user that may run scripts and read and write our keys ({PERMISSIONS}), got {said}"
        )
    if isinstance(cause, (InvalidResponse, ResponseError)) and not isinstance(cause, BusyLoadingError | ClusterError):
        return StoreError(f"store: expected a Redis or Valkey server that takes writes, got {said}")
    return StoreAway(f"store: expected a Redis or Valkey server that answers, got {said}")
