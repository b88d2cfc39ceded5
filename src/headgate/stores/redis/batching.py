"""Requests that come at the same time are sent together.

In an event loop, whatever is asked within one turn goes out in one call. Among threads, whoever finds a connection
free sends its own request at once; the others wait, and the first of them to get the connection sends for all. So one
that is alone never waits for others, and two thousand at once need a handful of connections.

A conversation with the server is written once, as a generator that says what to send; a thread and a task differ only
in how they send it.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeAlias, cast

import redis
from redis.crc import key_slot
from redis.exceptions import NoScriptError, ReadOnlyError, RedisClusterException

from headgate.errors import HeadgateError, StoreAway
from headgate.flow import Flow, adrive, drive
from headgate.stores.redis.clients import ERRORS, AsyncClient, Clients, explained
from headgate.stores.redis.fallback import Breaker
from headgate.stores.redis.protocol import Answer, Request, command, read_all
from headgate.stores.redis.script import DIGEST, SOURCE
from headgate.stores.traffic import Traffic

MOST: Final = 256
"""Requests in one call: the server does nothing else meanwhile, so it must not take long."""

_SENDERS: Final = 8  # threads that send at the same time
_FLYING: Final = 4  # calls that one event loop has under way at the same time
_SPLIT: Final = 24  # more than twice as many requests go out in two calls, so that client and server both have work

_EVALSHA: Final = ("EVALSHA", DIGEST)
_EVAL: Final = ("EVAL", SOURCE)
_STALE: Final = (ReadOnlyError, RedisClusterException)  # the client knows no master, or one that no longer is one

_log = logging.getLogger("headgate")

Command: TypeAlias = list[Any]
Reply: TypeAlias = Any


class Wire:
    """How requests are put to the server, and who is told what was seen."""

    def __init__(
        self,
        clients: Clients,
        breaker: Breaker,
        header: Callable[[], list[bytes]],
        on_step_back: Callable[[], None],
    ) -> None:
        self.clients: Final = clients
        self.breaker: Final = breaker
        self._header: Final = header
        self._on_step_back: Final = on_step_back
        self.traffic: Final = Traffic()

    def talk(self, requests: list[Request[Any]]) -> Flow[list[Command], None]:
        """Have requests carried out: each gets its answer, or the error as its answer."""
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
                self.breaker.worked()
                if reply[1]:
                    self._on_step_back()
                read_all(group, reply)

    def fail(self, requests: list[Request[Any]], error: BaseException) -> None:
        away = self.broken(error)
        for request in requests:  # each has an error of its own, since each may be raised in another thread
            request.answer = StoreAway(str(away))
            request.answer.__cause__ = error

    def broken(self, error: BaseException) -> StoreAway:
        """Tell the breaker of an error of the server or on the way to it."""
        reason = explained(error)
        self.traffic.failed()
        self.breaker.failed(reason, again_at_once=isinstance(error, redis.ConnectionError))
        away = StoreAway(reason)
        away.__cause__ = error
        return away

    def puzzled(self, requests: list[Request[Any]], error: Exception) -> None:
        """What nobody expects: it is logged, and whoever checks is answered all the same."""
        _log.error("the store can't be asked", exc_info=error)
        self.fail(requests, error)


def _by_slot(requests: list[Request[Any]]) -> list[list[Request[Any]]]:
    found: dict[int, list[Request[Any]]] = {}
    for request in requests:
        found.setdefault(key_slot(request.keys[0]), []).append(request)
    return list(found.values())


class Job:
    """A thread's request that waits to be sent."""

    def __init__(self, request: Request[Any]) -> None:
        self.request = request
        self.done = False
        self.batch: list[Job] | None = None  # set when it is this thread's turn to send them
        self._bell = threading.Lock()
        self._bell.acquire()

    def wait(self, seconds: float) -> None:
        self._bell.acquire(timeout=seconds)

    def ring(self) -> None:
        self._bell.release()


class Threads:
    """Gathers the requests of threads."""

    def __init__(self, wire: Wire, timeout: float) -> None:
        self._wire: Final = wire
        self._patience: Final = 2 * timeout  # for the call before one's own, and for that
        self._lock = threading.Lock()
        self._sending = 0
        self._waiting: Final[deque[Job]] = deque()

    def forked(self) -> None:
        """In a process that was forked: the parent's threads are not here."""
        self._lock = threading.Lock()
        self._sending = 0
        self._waiting.clear()

    def ask(self, request: Request[Answer]) -> Answer:
        """The answer to a request; raises `StoreAway` if there is none."""
        self._wire.breaker.enter()
        job = None
        with self._lock:
            if self._sending < _SENDERS:
                self._sending += 1
            else:
                job = Job(request)
                self._waiting.append(job)
        if job is None:
            self._send([request])
        else:
            self._wait(job)
        answer = request.answer
        if isinstance(answer, BaseException):
            raise answer
        return cast("Answer", answer)

    def ask_all(self, requests: list[Request[Any]]) -> None:
        """Have many requests carried out, one call after the other: each gets its answer, or an error as that."""
        for first in range(0, len(requests), MOST):
            some = requests[first : first + MOST]
            try:
                self._wire.breaker.enter()
                self._perform(some)
            except StoreAway as away:
                for request in some:
                    request.answer = away
            except ERRORS as error:
                self._wire.fail(some, error)

    def _wait(self, job: Job) -> None:
        """Wait until another thread has sent a request, or it is one's turn to send for those who wait."""
        job.wait(self._patience)
        with self._lock:
            if job.batch is None and not job.done:
                if job in self._waiting:
                    self._waiting.remove(job)
                job.request.answer = StoreAway("no connection was free in time")
                return
        if job.batch is not None:
            try:
                self._send([other.request for other in job.batch])
            finally:
                for other in job.batch:
                    other.done = True
                    if other is not job:
                        other.ring()

    def _send(self, requests: list[Request[Any]]) -> None:
        try:
            self._perform(requests)
        except ERRORS as error:
            self._wire.fail(requests, error)
        except HeadgateError as error:
            for request in requests:
                request.answer = error
        except Exception as error:  # noqa: BLE001
            self._wire.puzzled(requests, error)
        except BaseException:  # this thread is interrupted, but not those for whom it sends
            for request in requests:
                request.answer = StoreAway("the thread that asked was interrupted")
            raise
        finally:
            self._hand_over()

    def _hand_over(self) -> None:
        """Let the first of those who wait send for all of them."""
        with self._lock:
            if not self._waiting:
                self._sending -= 1
                return
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MOST))]
            batch[0].batch = batch
        batch[0].ring()

    def _perform(self, requests: list[Request[Any]]) -> None:
        drive(self._wire.talk(requests), self._exchange)

    def _exchange(self, commands: list[Command]) -> list[Reply]:
        clients = self._wire.clients
        replies = _replies(clients, commands)
        if any([isinstance(reply, _STALE) for reply in replies]):
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


class Tasks:
    """Gathers the requests of one event loop's tasks."""

    def __init__(self, wire: Wire, timeout: float) -> None:
        self._wire: Final = wire
        self._timeout: Final = timeout
        self._waiting: Final[deque[tuple[Request[Any], asyncio.Future[None]]]] = deque()
        self._renewals: Final[set[asyncio.Task[None]]] = set()
        self._calls: Final[set[asyncio.Task[None]]] = set()
        self._woken = False

    async def ask(self, request: Request[Answer]) -> Answer:
        """The answer to a request; raises `StoreAway` if there is none."""
        self._wire.breaker.enter()
        loop = asyncio.get_running_loop()  # not kept: a loop that is gone should not be held by what it left behind
        done: asyncio.Future[None] = loop.create_future()
        self._waiting.append((request, done))
        if not self._woken:
            self._woken = True
            loop.call_soon(self._send_waiting)
        await done
        answer = request.answer
        if isinstance(answer, BaseException):
            raise answer
        return cast("Answer", answer)

    def _send_waiting(self) -> None:
        self._woken = False
        while self._waiting and len(self._calls) < _FLYING:
            count = len(self._waiting)
            count = min(count if count <= 2 * _SPLIT else max(count // 2, _SPLIT), MOST)
            batch = [self._waiting.popleft() for _ in range(count)]
            batch = [one for one in batch if not one[1].done()]  # whoever was cancelled asks for nothing
            if batch:
                call = asyncio.get_running_loop().create_task(self._send(batch))
                self._calls.add(call)
                call.add_done_callback(self._landed)

    def _landed(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        if self._waiting and not self._woken:
            self._send_waiting()

    async def _send(self, batch: list[tuple[Request[Any], asyncio.Future[None]]]) -> None:
        requests = [request for request, _ in batch]
        try:
            async with asyncio.timeout(self._timeout):
                await self._perform(requests)
        except ERRORS as error:
            batch += self._waiting  # they would fail the same way
            self._waiting.clear()
            self._wire.fail([request for request, _ in batch], error)
        except HeadgateError as error:
            for request in requests:
                request.answer = error
        except Exception as error:  # noqa: BLE001
            self._wire.puzzled(requests, error)
        except BaseException:
            for _, done in batch:
                done.cancel()
            raise
        for _, done in batch:
            if not done.done():
                done.set_result(None)

    async def _perform(self, requests: list[Request[Any]]) -> None:
        client = await self._wire.clients.aclient()
        await adrive(self._wire.talk(requests), lambda commands: self._exchange(client, commands))

    async def _exchange(self, client: AsyncClient, commands: list[Command]) -> list[Reply]:
        replies = await _areplies(client, commands)
        if any([isinstance(reply, _STALE) for reply in replies]):
            renewal = asyncio.get_running_loop().create_task(self._wire.clients.arenew())
            self._renewals.add(renewal)
            renewal.add_done_callback(self._renewals.discard)
        return replies


async def _areplies(client: AsyncClient, commands: list[Command]) -> list[Reply]:
    if len(commands) == 1:
        try:
            return [await client.execute_command(*commands[0])]
        except ERRORS as error:
            return [error]
    async with client.pipeline(transaction=False) as pipe:
        for one in commands:
            pipe.execute_command(*one)
        return await pipe.execute(raise_on_error=False)
