"""Requests that come at the same time are sent together.

In an event loop, all requests of one turn go out in one call. A thread that finds a connection free sends its own
request at once; the others wait, and the first of them to get a connection sends for all. So a lone request never waits
for others, and two thousand at once need a handful of connections.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol, cast

from redis.crc import key_slot
from redis.exceptions import InvalidResponse, NoScriptError

from headgate.errors import HeadgateError, StoreAway
from headgate.lifecycle import new_lock
from headgate.limits.clock import ManualClock
from headgate.stores.redis.clients import Clients, Reply
from headgate.stores.redis.fallback import CircuitBreaker
from headgate.stores.redis.protocol import Answer, ForeignData, Request, command, read_all
from headgate.stores.redis.script import DIGEST, SOURCE
from headgate.stores.redis.server_errors import ERRORS, FAULTS, describe_error
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

_STEPPED_BACK: Final = "the server's clock has stepped back by a second or more: counts start again from the new time"
_log = logging.getLogger("headgate")


class Log(Protocol):
    """Logs a text, perhaps with the traceback of an error."""

    def __call__(self, level: int, text: str, error: BaseException | None = None) -> None: ...


class ScriptRunner:
    """The shared parts of all calls of the script, to which their outcome is reported: the breaker and the statistics.

    `clock` is one for tests; without it the server's clock counts.
    """

    def __init__(self, clients: Clients, breaker: CircuitBreaker, clock: ManualClock | None, log: Log) -> None:
        self.clients: Final = clients
        self.breaker: Final = breaker
        self.clock: Final = clock
        self.log: Final = log
        self.traffic: Final = Traffic()

    def fail(self, requests: list[Request[Any]], error: BaseException) -> None:
        """Give requests that have no answer yet an error as theirs.

        Each gets an error of its own, since each may be raised in another thread. One that is neither the server's nor
        on the way to it is a mistake in a program: it is logged, and says nothing about the server.
        """
        unanswered = [request for request in requests if request.answer is None]
        if isinstance(error, HeadgateError):
            if isinstance(error, StoreAway):
                self.log(logging.WARNING, f"decisions are degraded: {error}")
            for request in unanswered:
                request.answer = copy(error)
            return
        for request in unanswered:
            request.answer = StoreAway(describe_error(error))
            request.answer.__cause__ = error
        if isinstance(error, ERRORS):
            self.record_failure(error)
        else:
            self.traffic.mistaken(error)
            self.log(logging.ERROR, f"decisions are degraded by a mistake: {describe_error(error)}", error)

    def record_failure(self, error: BaseException) -> StoreAway:
        """Report an error of the server, or on the way to it, to the breaker."""
        self.traffic.failed()
        away = StoreAway(self.breaker.record_failure(error))
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
            elif type(reply) is not list:
                self._runner.fail(group, InvalidResponse(f"expected an answer of the script, got {reply!r:.100}"))
            else:
                read_all(group, reply)
                self._runner.breaker.record_success()
                if reply[1]:
                    self._runner.log(logging.WARNING, _STEPPED_BACK)
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
    """A thread's request, until the thread has its answer."""

    __slots__ = ("_woken", "batch", "request")

    def __init__(self, request: Request[Any]) -> None:
        self.request: Final = request
        self.batch: Sequence[PendingRequest] = ()  # all that this thread sends together, if others wait
        self._woken: SimpleQueue[None] | None = None

    def prepare(self) -> None:
        """Make ready to wait."""
        self._woken = SimpleQueue()

    def wait(self, seconds: float) -> None:
        """Wait for `wake`."""
        assert self._woken is not None
        with suppress(Empty):
            self._woken.get(timeout=seconds)

    def wake(self) -> None:
        """End a wait. Once too often does no harm."""
        assert self._woken is not None
        self._woken.put(None)


class ThreadBatcher:
    """Batches the requests of threads.

    A thread can be interrupted between any two steps: by the exception of a signal handler, or by gevent. So whatever a
    thread has taken is given back by steps that may be made twice, and are made again if they were interrupted.
    """

    def __init__(self, runner: ScriptRunner, timeout: float) -> None:
        self._runner: Final = runner
        self._timeout: Final = timeout
        self._lock: Final = new_lock()
        self._senders: Final[set[PendingRequest]] = set()
        self._waiting: Final[deque[PendingRequest]] = deque()

    def after_fork(self) -> None:
        """In a forked process: the parent's threads are not here."""
        self._senders.clear()
        self._waiting.clear()

    def execute(self, request: Request[Answer]) -> Answer:
        """The answer to a request; raises `StoreAway` if there is none."""
        self._runner.breaker.allow()
        mine = PendingRequest(request)
        try:
            with self._lock:
                sends = len(self._senders) < _MAX_SENDERS
                if sends:
                    self._senders.add(mine)
                else:
                    mine.prepare()
                    self._waiting.append(mine)
            if sends:
                self._perform([request])
            else:
                self._wait(mine)
        finally:
            try:
                self._leave(mine)
            except BaseException:
                self._leave(mine)
                raise
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
                for request in some:
                    request.answer = away
            else:
                self._perform(some)

    def _wait(self, mine: PendingRequest) -> None:
        """Wait until another thread has sent the request, or it is this thread's turn to send for all that wait."""
        mine.wait(self._timeout)
        if mine.request.answer is not None:
            return
        with self._lock:
            if mine in self._senders:
                mine.batch = [mine, *islice(self._waiting, MAX_BATCH - 1)]
                for _ in range(len(mine.batch) - 1):
                    self._waiting.popleft()
            elif mine in self._waiting:
                self._waiting.remove(mine)
                mine.request.answer = StoreAway("no connection was free in time")
                return
        if mine.batch:
            self._perform([one.request for one in mine.batch])
            return
        mine.wait(self._timeout)  # another thread is sending it
        if mine.request.answer is None:
            mine.request.answer = StoreAway("no answer in time")

    def _leave(self, mine: PendingRequest) -> None:
        """Wake up those that this thread has sent for, and let the first ones that wait send next."""
        for other in mine.batch:
            if other.request.answer is None:  # only this thread is interrupted, not those that it sends for
                other.request.answer = StoreAway("the thread that sent the request was interrupted")
            other.wake()
        with self._lock:
            self._senders.discard(mine)
            if mine.request.answer is None and mine in self._waiting:
                self._waiting.remove(mine)
            while self._waiting:
                first = self._waiting[0]
                if first not in self._senders and len(self._senders) >= _MAX_SENDERS:
                    break
                self._senders.add(first)
                first.wake()
                self._waiting.popleft()

    def _perform(self, requests: list[Request[Any]]) -> None:
        try:
            call = ScriptCall(self._runner, requests)
            while call.commands:
                call.take(self._runner.clients.exchange(call.commands))
        except FAULTS as error:
            self._runner.fail(requests, error)


class LoopBatcher:
    """Batches the requests of one event loop's tasks."""

    def __init__(self, runner: ScriptRunner) -> None:
        self._runner: Final = runner
        self._waiting: Final[deque[tuple[Request[Any], asyncio.Future[None]]]] = deque()
        self._calls: Final[dict[asyncio.Task[None], list[tuple[Request[Any], asyncio.Future[None]]]]] = {}
        self._refunds: Final[set[asyncio.Task[None]]] = set()
        self._scheduled = False

    async def execute(self, request: Request[Answer]) -> Answer:
        """The answer to a request; raises `StoreAway` if there is none.

        A cancelled task ends when what its request has spent is given back.
        """
        self._runner.breaker.allow()
        loop = asyncio.get_running_loop()  # not kept: a closed loop should not be kept alive by its batcher
        done: asyncio.Future[None] = loop.create_future()
        self._waiting.append((request, done))
        if not self._scheduled:
            loop.call_soon(self._send_waiting)
            self._scheduled = True
        try:
            await done
        except asyncio.CancelledError:
            call = next((call for call, batch in self._calls.items() if any(one is request for one, _ in batch)), None)
            if call is not None or request.answer is not None:
                refund = loop.create_task(self._refund(request, call))
                self._refunds.add(refund)
                refund.add_done_callback(self._refunds.discard)
                await asyncio.shield(refund)  # cancelled once more, the task ends at once
            raise
        answer = request.answer
        if isinstance(answer, BaseException):
            raise answer
        return cast("Answer", answer)

    async def _refund(self, request: Request[Any], call: asyncio.Task[None] | None) -> None:
        """Give back what a cancelled request has spent, when its call is over."""
        if call is not None:
            await asyncio.wait([call])
        for refund in request.refunds():
            try:
                await self.execute(refund)
            except (StoreAway, ForeignData) as error:
                _log.debug("what a cancelled request has spent can't be given back: %s", error)

    def _send_waiting(self) -> None:
        self._scheduled = False
        while self._waiting and len(self._calls) < _MAX_IN_FLIGHT:
            count = len(self._waiting)
            count = min(count if count <= 2 * _SPLIT else max(count // 2, _SPLIT), MAX_BATCH)
            batch = [self._waiting.popleft() for _ in range(count)]
            batch = [one for one in batch if not one[1].done()]  # of a cancelled task nothing is sent
            if batch:
                call = asyncio.get_running_loop().create_task(self._send(batch))
                self._calls[call] = batch
                call.add_done_callback(self._call_done)

    def _call_done(self, call: asyncio.Task[None]) -> None:
        self._calls.pop(call, None)
        if self._waiting and not self._scheduled:
            self._send_waiting()

    async def _send(self, batch: list[tuple[Request[Any], asyncio.Future[None]]]) -> None:
        try:
            call = ScriptCall(self._runner, [request for request, _ in batch])
            while call.commands:
                call.take(await self._runner.clients.aexchange(call.commands))
        except FAULTS as error:
            if batch[0][1].get_loop().is_closed():  # this is only being cleaned up: nobody waits, and nothing is wrong
                return
            if isinstance(error, ERRORS):
                batch += self._waiting  # they would fail the same way
                self._waiting.clear()
            self._runner.fail([request for request, _ in batch], error)
        except Exception as error:  # noqa: BLE001 - a signal handler's: one caller raises it, the others get an answer
            self._runner.fail([request for request, _ in batch], StoreAway("the call was interrupted"))
            for request in [request for request, done in batch if not done.done()][:1]:
                request.answer = error
        except GeneratorExit:  # the event loop is closed
            raise
        except BaseException:
            for request, done in batch:
                if request.answer is None:
                    done.cancel()
                elif not done.done():
                    done.set_result(None)
            raise
        for _, done in batch:
            if not done.done():
                done.set_result(None)
