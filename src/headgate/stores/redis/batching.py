"""Requests that come at the same time are sent together.

In an event loop, all requests of one turn go out in one call. A thread that finds a connection free sends its own
request at once; the others wait, and the first of them to get a connection sends for all. So a lone request never waits
for others, and two thousand at once need a handful of connections.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, cast

import redis
from redis.crc import key_slot
from redis.exceptions import NoScriptError

from headgate.errors import HeadgateError, StoreAway
from headgate.limits.clock import ManualClock
from headgate.stores.redis.clients import ERRORS, Clients, Reply, describe_error
from headgate.stores.redis.fallback import CircuitBreaker
from headgate.stores.redis.protocol import Answer, Request, command, read_all
from headgate.stores.redis.script import DIGEST, SOURCE
from headgate.stores.traffic import Traffic

MAX_BATCH: Final = 256
"""Requests in one call: the server does nothing else meanwhile, so it must not take long."""

_MAX_SENDERS: Final = 8  # threads that send at the same time
_MAX_IN_FLIGHT: Final = 4  # calls that one event loop has under way at the same time
_SPLIT: Final = 24  # more than twice as many requests go out in two calls, so that client and server both have work

_EVALSHA: Final = ("EVALSHA", DIGEST)
_EVAL: Final = ("EVAL", SOURCE)

# What every call begins with: the time, and the milliseconds that are added to every expiry.
_SERVER_TIME: Final = [b"", b"0"]
_EXPIRY_MARGIN: Final = b"600000"  # with a clock for tests: the server's own must not drop keys

_STEPPED_BACK: Final = (
    "the server's clock has stepped back by a second or more: what was counted starts again from the new time"
)
_log = logging.getLogger("headgate")


class ScriptRunner:
    """What all calls of the script share, and where their outcome is reported: the breaker and the statistics.

    `clock` is one for tests; without it the server's clock counts.
    """

    def __init__(
        self, clients: Clients, breaker: CircuitBreaker, clock: ManualClock | None, log: Callable[[int, str], None]
    ) -> None:
        self.clients: Final = clients
        self.breaker: Final = breaker
        self.clock: Final = clock
        self.log: Final = log
        self.traffic: Final = Traffic()

    def fail(self, requests: list[Request[Any]], error: BaseException) -> None:
        """Give requests an error as their answer. One that nobody expects is logged, too."""
        if isinstance(error, HeadgateError):
            for request in requests:
                request.answer = error
            return
        if not isinstance(error, ERRORS):
            _log.error("the store can't be asked", exc_info=error)
        away = self.record_failure(error)
        for request in requests:  # each has an error of its own, since each may be raised in another thread
            request.answer = StoreAway(str(away))
            request.answer.__cause__ = error

    def record_failure(self, error: BaseException) -> StoreAway:
        """Report an error of the server, or on the way to it, to the breaker."""
        reason = describe_error(error)
        self.traffic.failed()
        self.breaker.record_failure(reason, retry_at_once=isinstance(error, redis.ConnectionError))
        away = StoreAway(reason)
        away.__cause__ = error
        return away


class ScriptCall:
    """One call of the script for some requests.

    While it has commands, send them and take their replies. In the end every request has its answer, or an error as its
    answer.
    """

    def __init__(self, runner: ScriptRunner, requests: list[Request[Any]]) -> None:
        self._runner: Final = runner
        clock = runner.clock
        self._header: Final = _SERVER_TIME if clock is None else [b"%d" % clock.now(), _EXPIRY_MARGIN]
        self._groups = _by_slot(requests) if runner.clients.cluster else [requests]
        self.commands = [command(_EVALSHA, group, self._header) for group in self._groups]
        runner.traffic.sent(len(requests))

    def take(self, replies: list[Reply]) -> None:
        """Read the replies to the commands. A server that doesn't know the script gets its text next."""
        unknown = []
        for group, reply in zip(self._groups, replies, strict=True):
            if isinstance(reply, NoScriptError):
                unknown.append(group)
            elif isinstance(reply, BaseException):
                self._runner.fail(group, reply)
            else:
                self._runner.breaker.record_success()
                if reply[1]:
                    self._runner.log(logging.WARNING, _STEPPED_BACK)
                read_all(group, reply)
        self._groups, self.commands = unknown, []
        if unknown:
            self._runner.traffic.sent_again()
            self.commands = [command(_EVAL, group, self._header) for group in unknown]


def _by_slot(requests: list[Request[Any]]) -> list[list[Request[Any]]]:
    found: dict[int, list[Request[Any]]] = {}
    for request in requests:
        found.setdefault(key_slot(request.keys[0]), []).append(request)
    return list(found.values())


class PendingRequest:
    """A thread's request that waits to be sent."""

    def __init__(self, request: Request[Any]) -> None:
        self.request = request
        self.done = False
        self.batch: list[PendingRequest] | None = None  # set when it is this thread's turn to send them
        self._done_lock = threading.Lock()
        self._done_lock.acquire()

    def wait(self, seconds: float) -> None:
        self._done_lock.acquire(timeout=seconds)

    def wake(self) -> None:
        self._done_lock.release()


class ThreadBatcher:
    """Batches the requests of threads."""

    def __init__(self, runner: ScriptRunner, timeout: float) -> None:
        self._runner: Final = runner
        self._timeout: Final = 2 * timeout  # for the call before one's own, and for that
        self._lock = threading.Lock()
        self._sending = 0
        self._waiting: Final[deque[PendingRequest]] = deque()

    def after_fork(self) -> None:
        """In a forked process: the parent's threads are not here."""
        self._lock = threading.Lock()
        self._sending = 0
        self._waiting.clear()

    def execute(self, request: Request[Answer]) -> Answer:
        """The answer to a request; raises `StoreAway` if there is none."""
        self._runner.breaker.allow()
        pending = None
        with self._lock:
            if self._sending < _MAX_SENDERS:
                self._sending += 1
            else:
                pending = PendingRequest(request)
                self._waiting.append(pending)
        if pending is None:
            self._send([request])
        else:
            self._wait(pending)
        answer = request.answer
        if isinstance(answer, BaseException):
            raise answer
        return cast("Answer", answer)

    def execute_all(self, requests: list[Request[Any]]) -> None:
        """Have many requests carried out, one call after the other: each gets its answer, or an error as its answer."""
        for first in range(0, len(requests), MAX_BATCH):
            some = requests[first : first + MAX_BATCH]
            try:
                self._runner.breaker.allow()
            except StoreAway as away:
                self._runner.fail(some, away)
            else:
                self._perform(some)

    def _wait(self, pending: PendingRequest) -> None:
        """Wait until another thread has sent the request, or it is this thread's turn to send for all that wait."""
        pending.wait(self._timeout)
        with self._lock:
            if pending.batch is None and not pending.done:
                if pending in self._waiting:
                    self._waiting.remove(pending)
                pending.request.answer = StoreAway("no connection was free in time")
                return
        if pending.batch is not None:
            try:
                self._send([other.request for other in pending.batch])
            finally:
                for other in pending.batch:
                    other.done = True
                    if other is not pending:
                        other.wake()

    def _send(self, requests: list[Request[Any]]) -> None:
        try:
            self._perform(requests)
        except BaseException:  # only this thread is interrupted, not those that it sends for
            for request in requests:
                request.answer = StoreAway("the thread that asked was interrupted")
            raise
        finally:
            self._hand_over()

    def _hand_over(self) -> None:
        """Let the first waiting thread send for all of them."""
        with self._lock:
            if not self._waiting:
                self._sending -= 1
                return
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_BATCH))]
            batch[0].batch = batch
        batch[0].wake()

    def _perform(self, requests: list[Request[Any]]) -> None:
        try:
            call = ScriptCall(self._runner, requests)
            while call.commands:
                call.take(self._runner.clients.exchange(call.commands))
        except Exception as error:  # noqa: BLE001 - every caller gets an answer
            self._runner.fail(requests, error)


class LoopBatcher:
    """Batches the requests of one event loop's tasks."""

    def __init__(self, runner: ScriptRunner, timeout: float) -> None:
        self._runner: Final = runner
        self._timeout: Final = timeout
        self._waiting: Final[deque[tuple[Request[Any], asyncio.Future[None]]]] = deque()
        self._calls: Final[set[asyncio.Task[None]]] = set()
        self._scheduled = False

    async def execute(self, request: Request[Answer]) -> Answer:
        """The answer to a request; raises `StoreAway` if there is none."""
        self._runner.breaker.allow()
        loop = asyncio.get_running_loop()  # not kept: a closed loop should not be kept alive by its batcher
        done: asyncio.Future[None] = loop.create_future()
        self._waiting.append((request, done))
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._send_waiting)
        await done
        answer = request.answer
        if isinstance(answer, BaseException):
            raise answer
        return cast("Answer", answer)

    def _send_waiting(self) -> None:
        self._scheduled = False
        while self._waiting and len(self._calls) < _MAX_IN_FLIGHT:
            count = len(self._waiting)
            count = min(count if count <= 2 * _SPLIT else max(count // 2, _SPLIT), MAX_BATCH)
            batch = [self._waiting.popleft() for _ in range(count)]
            batch = [one for one in batch if not one[1].done()]  # of a cancelled task nothing is sent
            if batch:
                call = asyncio.get_running_loop().create_task(self._send(batch))
                self._calls.add(call)
                call.add_done_callback(self._call_done)

    def _call_done(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        if self._waiting and not self._scheduled:
            self._send_waiting()

    async def _send(self, batch: list[tuple[Request[Any], asyncio.Future[None]]]) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                call = ScriptCall(self._runner, [request for request, _ in batch])
                while call.commands:
                    call.take(await self._runner.clients.aexchange(call.commands))
        except Exception as error:  # noqa: BLE001 - every caller gets an answer
            if isinstance(error, ERRORS):
                batch += self._waiting  # they would fail the same way
                self._waiting.clear()
            self._runner.fail([request for request, _ in batch], error)
        except BaseException:
            for _, done in batch:
                done.cancel()
            raise
        for _, done in batch:
            if not done.done():
                done.set_result(None)
