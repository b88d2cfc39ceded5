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
from typing import Any, Final, TypeAlias, cast

import redis
from redis.crc import key_slot
from redis.exceptions import NoScriptError

from headgate.errors import HeadgateError, StoreAway
from headgate.flow import Flow, adrive, drive
from headgate.stores.redis.clients import ERRORS, STALE_CLIENT, AsyncClient, Clients, describe_error
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

_log = logging.getLogger("headgate")

Command: TypeAlias = list[Any]
Reply: TypeAlias = Any


class ScriptRunner:
    """Runs the script for requests, and reports the outcome to the breaker and the statistics."""

    def __init__(
        self,
        clients: Clients,
        breaker: CircuitBreaker,
        header: Callable[[], list[bytes]],
        on_step_back: Callable[[], None],
    ) -> None:
        self.clients: Final = clients
        self.breaker: Final = breaker
        self._header: Final = header
        self._on_step_back: Final = on_step_back
        self.traffic: Final = Traffic()

    def run(self, requests: list[Request[Any]]) -> Flow[list[Command], None]:
        """Have requests carried out, as a flow of commands: each gets its answer, or an error as its answer."""
        groups = _by_slot(requests) if self.clients.cluster else [requests]
        header = self._header()
        self.traffic.sent(len(requests))
        replies = yield [command(_EVALSHA, group, header) for group in groups]
        missing = [number for number, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if missing:
            self.traffic.sent_again()
            again = yield [command(_EVAL, groups[number], header) for number in missing]
            for number, reply in zip(missing, again, strict=True):
                replies[number] = reply
        for group, reply in zip(groups, replies, strict=True):
            if isinstance(reply, BaseException):
                self.fail(group, reply)
            else:
                self.breaker.record_success()
                if reply[1]:
                    self._on_step_back()
                read_all(group, reply)

    def fail(self, requests: list[Request[Any]], error: BaseException) -> None:
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

    def fail_unexpectedly(self, requests: list[Request[Any]], error: Exception) -> None:
        """Log an error that nobody expects; the callers get an answer all the same."""
        _log.error("the store can't be asked", exc_info=error)
        self.fail(requests, error)


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
                self._perform(some)
            except StoreAway as away:
                for request in some:
                    request.answer = away
            except ERRORS as error:
                self._runner.fail(some, error)

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
        except ERRORS as error:
            self._runner.fail(requests, error)
        except HeadgateError as error:
            for request in requests:
                request.answer = error
        except Exception as error:  # noqa: BLE001
            self._runner.fail_unexpectedly(requests, error)
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
        drive(self._runner.run(requests), self._exchange)

    def _exchange(self, commands: list[Command]) -> list[Reply]:
        clients = self._runner.clients
        replies = _replies(clients, commands)
        if any([isinstance(reply, STALE_CLIENT) for reply in replies]):
            clients.renew()
        return replies


def _replies(clients: Clients, commands: list[Command]) -> list[Reply]:
    if len(commands) == 1:
        try:
            return [clients.call(commands[0])]
        except ERRORS as error:
            return [error]
    with clients.client().pipeline(transaction=False) as pipe:
        for one in commands:
            pipe.execute_command(*one)
        return pipe.execute(raise_on_error=False)


class LoopBatcher:
    """Batches the requests of one event loop's tasks."""

    def __init__(self, runner: ScriptRunner, timeout: float) -> None:
        self._runner: Final = runner
        self._timeout: Final = timeout
        self._waiting: Final[deque[tuple[Request[Any], asyncio.Future[None]]]] = deque()
        self._renewals: Final[set[asyncio.Task[None]]] = set()
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
        requests = [request for request, _ in batch]
        try:
            async with asyncio.timeout(self._timeout):
                await self._perform(requests)
        except ERRORS as error:
            batch += self._waiting  # they would fail the same way
            self._waiting.clear()
            self._runner.fail([request for request, _ in batch], error)
        except HeadgateError as error:
            for request in requests:
                request.answer = error
        except Exception as error:  # noqa: BLE001
            self._runner.fail_unexpectedly(requests, error)
        except BaseException:
            for _, done in batch:
                done.cancel()
            raise
        for _, done in batch:
            if not done.done():
                done.set_result(None)

    async def _perform(self, requests: list[Request[Any]]) -> None:
        await adrive(self._runner.run(requests), self._exchange)

    async def _exchange(self, commands: list[Command]) -> list[Reply]:
        replies = await _areplies(self._runner.clients, commands)
        if any([isinstance(reply, STALE_CLIENT) for reply in replies]):
            renewal = asyncio.get_running_loop().create_task(self._runner.clients.arenew())
            self._renewals.add(renewal)
            renewal.add_done_callback(self._renewals.discard)
        return replies


async def _areplies(clients: Clients, commands: list[Command]) -> list[Reply]:
    if len(commands) == 1:
        try:
            return [await clients.acall(lambda client: client.execute_command(*commands[0]))]
        except ERRORS as error:
            return [error]
    return await clients.acall(lambda client: _pipelined(client, commands))


async def _pipelined(client: AsyncClient, commands: list[Command]) -> list[Reply]:
    async with client.pipeline(transaction=False) as pipe:
        for one in commands:
            pipe.execute_command(*one)
        return await pipe.execute(raise_on_error=False)
