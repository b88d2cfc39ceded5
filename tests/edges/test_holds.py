"""Requests in flight: a slot is taken exactly as long as a request lives, and costs are settled through its hold."""

import asyncio
import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from io import BytesIO
from typing import Any
from uuid import uuid4
from wsgiref.util import FileWrapper, setup_testing_defaults

import httpx
import pytest

from headgate import Gate, InvalidInput, Limiter, ManualClock, MemoryStore, Policy, RateLimited, RedisStore
from headgate.client import ObeyingTransport, WaitNotice
from headgate.edges import settlement
from headgate.edges.asgi import Message, RateLimitMiddleware, Receive, Scope, Send
from headgate.edges.decorator import rate_limited
from headgate.edges.websocket import WebSocketLimits
from headgate.edges.wsgi import RateLimitMiddleware as WsgiMiddleware
from headgate.lease_renewer import RENEWERS
from tests.support.event_loop import wait_until
from tests.support.http_edges import HandlerError
from tests.support.obeying_transports import SimulatedClock
from tests.support.valkey import PATIENCE, wait_for
from tests.support.wrapped_store import WrappedHoldStore, WrappedStore

pytestmark = pytest.mark.once

SLOTS = 2
START: Message = {"type": "http.response.start", "status": 200, "headers": []}
PART: Message = {"type": "http.response.body", "body": b"part", "more_body": True}
LAST: Message = {"type": "http.response.body", "body": b"last"}
ADDRESS = "10.0.0.1"


@pytest.fixture(params=[MemoryStore, WrappedHoldStore, pytest.param(RedisStore, marks=pytest.mark.long)])
def store(request: pytest.FixtureRequest, clock: ManualClock) -> Iterator[Any]:
    """In memory, behind a store that is awaited, and on a server."""
    if request.param is RedisStore:
        url = request.getfixturevalue("redis_server").url
        with RedisStore(url, prefix=f"{uuid4().hex}:", clock=clock, timeout=PATIENCE) as store:
            yield store
    else:
        yield request.param(clock=clock)


@pytest.fixture
def slots(store: Any) -> Limiter:
    return Limiter(f"{SLOTS} in flight", store=store, name="default")


def used(limiter: Limiter, key: str = ADDRESS) -> int:
    """The slots in use."""
    return SLOTS - limiter.peek(key).remaining


class RequestInProgress:
    """A request in progress. Its application does one step at a time: what `steps` says next."""

    def __init__(self, path: str = "/", kind: str = "http", **scope: Any) -> None:
        self.scope: Scope = {
            "type": kind,
            "method": "GET",
            "path": path,
            "headers": [],
            "client": (ADDRESS, 1),
            **scope,
        }
        self.sent: list[Message] = []
        self.incoming: asyncio.Queue[Message] = asyncio.Queue()
        self.begun = asyncio.Event()
        self._steps: asyncio.Queue[Callable[[Scope, Receive, Send], Any]] = asyncio.Queue()
        self._stepped: asyncio.Queue[None] = asyncio.Queue()

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun.set()
        while True:
            step = await self._steps.get()
            if step is leave:
                return
            await step(scope, receive, send)
            self._stepped.put_nowait(None)

    async def _send(self, message: Message) -> None:
        await asyncio.sleep(0)
        self.sent.append(message)

    async def begin(self, make: Callable[[Any], Any]) -> "RequestInProgress":
        """Let it come as far as the application, or to its denial."""
        self.task = asyncio.ensure_future(make(self.app)(self.scope, self.incoming.get, self._send))
        waiting = asyncio.ensure_future(self.begun.wait())
        await asyncio.wait([self.task, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        return self

    async def step(self, *messages: Message) -> None:
        """Let the application send these."""
        for message in messages:
            self._steps.put_nowait(partial(_send_one, message))
            await self._stepped.get()

    async def receive(self, message: Message) -> None:
        """Let the application receive this."""
        self.incoming.put_nowait(message)
        self._steps.put_nowait(lambda scope, receive, send: receive())
        await self._stepped.get()

    async def end(self, how: str = "returns") -> None:
        """Let the application end: it returns, or raises, or is cancelled."""
        if how == "cancelled":
            self.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await self.task
        elif how == "raises":
            self._steps.put_nowait(crash)
            with pytest.raises(HandlerError):
                await self.task
        else:
            self._steps.put_nowait(leave)
            await self.task

    @property
    def status(self) -> int:
        status: int = self.sent[0]["status"]
        return status

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}


async def _send_one(message: Message, scope: Scope, receive: Receive, send: Send) -> None:
    await send(message)


async def leave(scope: Scope, receive: Receive, send: Send) -> None: ...


async def crash(scope: Scope, receive: Receive, send: Send) -> None:
    raise HandlerError


def before(limiter: Any, **options: Any) -> Callable[[Any], Any]:
    """The middleware with these options before an application."""
    return lambda app: RateLimitMiddleware(app, limiter, **options)


# HTTP ----------------------------------------------------------------------------------------------------------------


async def test_a_request_has_its_slot_until_its_last_byte(slots: Limiter) -> None:
    request = await RequestInProgress().begin(before(slots))
    assert used(slots) == 1
    await request.receive({"type": "http.request", "body": b""})
    assert used(slots) == 1
    await request.step(START, PART, PART)
    assert used(slots) == 1
    await request.step(LAST)
    assert used(slots) == 0
    await request.end()  # after its background tasks
    assert used(slots) == 0
    assert request.headers == {
        "ratelimit-policy": '"default";q=2;qu="concurrent-requests"',
        "ratelimit": '"default";r=1',
    }


@pytest.mark.parametrize("how", ["returns", "raises", "cancelled"])
@pytest.mark.parametrize("sent", [[], [START], [START, PART]], ids=["nothing", "start", "part"])
async def test_a_slot_is_free_however_a_request_ends(slots: Limiter, sent: list[Message], how: str) -> None:
    request = await RequestInProgress().begin(before(slots))
    await request.step(*sent)
    assert used(slots) == 1
    await request.end(how)
    assert used(slots) == 0


async def test_a_client_that_leaves_frees_its_slot_when_the_application_ends(slots: Limiter) -> None:
    request = await RequestInProgress().begin(before(slots))
    await request.step(START, PART)
    await request.receive({"type": "http.disconnect"})
    assert used(slots) == 1  # the application may still be at work
    await request.end()
    assert used(slots) == 0


async def test_a_request_without_a_free_slot_is_denied_and_takes_nothing(slots: Limiter, clock: ManualClock) -> None:
    make = before(slots)
    first, second = await RequestInProgress().begin(make), await RequestInProgress().begin(make)
    clock.advance(20.5)
    denied = await RequestInProgress().begin(make)
    assert (denied.status, denied.headers["retry-after"], used(slots)) == (429, "1", 2)
    assert denied.headers["ratelimit"] == '"default";r=0;t=1'
    await first.end()
    third = await RequestInProgress().begin(make)
    assert used(slots) == 2
    await second.end()
    await third.end()
    assert used(slots) == 0


async def test_keys_and_anonymous_callers_have_their_own_slots(slots: Limiter) -> None:
    make = before(slots, key=lambda request: request.headers.get("x-key"))
    named = [await RequestInProgress(headers=[(b"x-key", b"ann")]).begin(make) for _ in range(3)]
    anonymous = await RequestInProgress().begin(make)
    assert [one.begun.is_set() for one in (*named, anonymous)] == [True, True, False, True]
    assert (used(slots, "ann"), used(slots)) == (2, 0)  # addresses have a key space of their own
    for one in (*named[:2], anonymous):
        await one.end()
    assert used(slots, "ann") == 0


async def test_a_rate_and_slots_hold_together(store: Any, clock: ManualClock) -> None:
    limiter = Limiter("3/minute; 2 in flight", store=store)
    make = before(limiter)
    requests = [await RequestInProgress().begin(make) for _ in range(3)]
    assert [one.begun.is_set() for one in requests] == [True, True, False]
    assert "violated-policies" in requests[2].sent[1]["body"].decode()
    assert '"2 in flight"' in requests[2].sent[1]["body"].decode()
    for one in requests[:2]:
        await one.end()
    last = await RequestInProgress().begin(make)  # a denial has counted nothing
    await last.end()
    denied = await RequestInProgress().begin(make)
    assert (denied.status, denied.headers["retry-after"]) == (429, "20")


async def test_a_limit_function_may_return_slots(store: Any) -> None:
    calls: list[str] = []

    def limit(request: Any) -> str:
        calls.append(request.path)
        return f"{SLOTS} in flight" if request.path == "/slow" else "100/minute"

    middleware: Any = None

    def make(app: Any) -> Any:
        nonlocal middleware
        middleware = middleware or RateLimitMiddleware(lambda *call: call[0]["app"](*call), limit, store=store)
        return lambda scope, receive, send: middleware({**scope, "app": app}, receive, send)

    limiter = Limiter(f"{SLOTS} in flight", store=store)
    for _ in range(2):  # the second time by the fast path, if there is one
        first, second, third = [await RequestInProgress("/slow").begin(make) for _ in range(3)]
        assert [one.begun.is_set() for one in (first, second, third)] == [True, True, False]
        assert (third.status, used(limiter)) == (429, SLOTS)
        other = await RequestInProgress("/").begin(make)
        assert "ratelimit" not in other.headers if other.sent else other.begun.is_set()
        await first.step(START, LAST)
        assert used(limiter) == SLOTS - 1
        for one in (first, second, other):
            await one.end()
        assert used(limiter) == 0
    assert len(calls) == 8  # once for each request


# Leases --------------------------------------------------------------------------------------------------------------


async def test_the_lease_is_renewed_as_long_as_the_request_lives(slots: Limiter, clock: ManualClock) -> None:
    request = await RequestInProgress().begin(before(slots))
    for _ in range(6):
        clock.advance(25)
        await wait_until(lambda: slots.list_holds(ADDRESS)[0].lease_left > 55, "the renewal")
        assert used(slots) == 1
    renewer = RENEWERS._running[id(slots.store)]
    assert renewer.renews()
    await request.end()
    assert used(slots) == 0
    assert not renewer.renews()


def test_a_request_that_is_lost_without_an_end_keeps_its_slot_for_one_lease(
    memory_slots: Limiter, clock: ManualClock
) -> None:
    def iterate(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [])
        yield b"part"
        yield b"part"

    app, other = WsgiMiddleware(iterate, memory_slots), "10.0.0.2"
    lost, alive = call(app), call(app, REMOTE_ADDR=other)
    assert [next(lost), next(alive)] == [b"part", b"part"]
    del lost  # by a server that doesn't close it
    gc.collect()
    for seconds, taken in ((25, 1), (25, 1), (25, 0)):
        clock.advance(seconds)
        wait_for(lambda: memory_slots.list_holds(other)[0].lease_left > 55, "the renewal")
        assert (used(memory_slots), used(memory_slots, other)) == (taken, 1)
    alive.close()
    assert used(memory_slots, other) == 0


async def test_a_hold_that_was_forgotten_is_charged_what_it_has_cost_more(
    store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    limiter = Limiter("100/hour", store=store)
    request = await RequestInProgress().begin(before(limiter, cost=10, settle=lambda request, response: 30))
    limiter.reset(ADDRESS)
    await request.step(START, LAST)
    assert limiter.peek(ADDRESS).remaining == 80
    await request.end()
    assert not caplog.records


# Costs ---------------------------------------------------------------------------------------------------------------


def passes(limiter: Limiter) -> int:
    """How many requests pass at once."""
    count = 0
    while limiter.check(ADDRESS):
        count += 1
    return count


@pytest.mark.parametrize(
    "options",
    [{"settle": lambda request, response: 0}, {"counts": "failures"}],
    ids=["settle", "counts"],
)
async def test_what_is_given_back_late_lets_no_more_through_than_the_limit(
    store: Any, clock: ManualClock, options: dict[str, Any]
) -> None:
    limiter = Limiter("60/minute burst 10", store=store)
    request = await RequestInProgress().begin(before(limiter, cost=5, **options))
    clock.advance(30)  # it is full again
    assert limiter.check(ADDRESS, 3)
    await request.step(START, LAST)
    assert passes(limiter) == 7
    await request.end()


async def test_what_is_given_back_at_once_is_given_back_in_full(store: Any) -> None:
    limiter = Limiter("60/minute burst 10", store=store)
    request = await RequestInProgress().begin(before(limiter, cost=5, settle=lambda request, response: 2))
    assert limiter.peek(ADDRESS).remaining == 5
    await request.step(START, LAST)
    assert limiter.peek(ADDRESS).remaining == 8
    await request.end()


async def test_a_higher_cost_is_charged_even_into_debt(store: Any) -> None:
    limiter = Limiter("60/minute; 2 in flight", store=store)
    request = await RequestInProgress().begin(before(limiter, cost=5, settle=lambda request, response: 65))
    await request.step(START, LAST)
    assert limiter.peek(ADDRESS).retry_after == 6.0
    await request.end()


@pytest.mark.parametrize("refund", [False, True])
async def test_a_crash_frees_the_slot_and_keeps_the_cost_unless_that_is_to_be_refunded(
    store: Any, refund: bool
) -> None:
    limiter = Limiter("60/minute; 100 in flight", store=store)
    request = await RequestInProgress().begin(before(limiter, cost=5, refund_crashes=refund))
    await request.end("raises")
    assert limiter.peek(ADDRESS).remaining == (60 if refund else 55)


@pytest.mark.parametrize("failure", ["raises", "returns no number", "takes too long"])
async def test_a_settlement_that_fails_frees_the_slot_and_keeps_the_cost(
    slots: Limiter, failure: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(settlement, "_SETTLE_SECONDS", 0.01)

    async def settle(request: Any, response: Any) -> Any:
        if failure == "raises":
            raise HandlerError
        if failure == "takes too long":
            assert used(slots) == 1
            await asyncio.Event().wait()
        return "5"

    costs = Limiter("60/minute; 100 in flight", store=slots.store)
    make = before(slots, settle=settle)
    request = await RequestInProgress().begin(lambda app: make(RateLimitMiddleware(app, costs, cost=5, settle=settle)))
    with caplog.at_level(logging.CRITICAL, "headgate"):
        await request.step(START, LAST)
    assert (used(slots), costs.peek(ADDRESS).remaining) == (0, 55)
    await request.end()


async def test_a_client_that_leaves_before_the_response_gets_nothing_back(store: Any) -> None:
    limiter = Limiter("60/minute; 100 in flight", store=store)
    request = await RequestInProgress().begin(before(limiter, cost=5, counts="failures"))
    await request.receive({"type": "http.disconnect"})
    await request.step(START, LAST)
    assert limiter.peek(ADDRESS).remaining == 55
    await request.end()


# Several limits ------------------------------------------------------------------------------------------------------


async def test_of_several_limits_all_have_a_slot_or_none(store: Any) -> None:
    default = Limiter(f"{SLOTS} in flight", store=store, name="default")
    login = Limiter("1 in flight", store=store, name="login")
    rate = Limiter("3/minute", store=WrappedStore(clock=ManualClock()), name="rate")
    make = before(default, routes={"/login": login, "/poll": rate})
    odd = await RequestInProgress("/login/").begin(make)  # it counts for the pattern and the default limit
    assert (used(default), login.peek(ADDRESS).remaining) == (1, 0)
    denied = await RequestInProgress("/LOGIN").begin(make)
    assert (denied.status, used(default)) == (429, 1)
    mixed = await RequestInProgress("/poll/").begin(make)
    assert (used(default), rate.peek(ADDRESS).remaining) == (2, 2)
    denied = await RequestInProgress("/POLL").begin(make)
    assert (denied.status, rate.peek(ADDRESS).remaining) == (429, 2)
    for one in (odd, mixed):
        await one.end()
    assert (used(default), login.peek(ADDRESS).remaining, rate.peek(ADDRESS).remaining) == (0, 1, 2)


@pytest.mark.parametrize("route_fails", [False, True])
async def test_a_store_that_fails_frees_the_slots_in_the_others(
    store: Any, route_fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = WrappedHoldStore(clock=ManualClock())

    async def fail(*arguments: object, **options: object) -> Any:
        raise HandlerError

    good, bad = Limiter(f"{SLOTS} in flight", store=store), Limiter("5 in flight", store=broken)
    default, route = (good, bad) if route_fails else (bad, good)
    make = before(default, routes={"/login": route})
    request = await RequestInProgress("/login/").begin(make)
    assert used(good) == 1
    monkeypatch.setattr(broken, "asettle", fail)
    await request.end()
    assert used(good) == 0
    monkeypatch.setattr(broken, "ahold", fail)
    refused = await RequestInProgress("/login/").begin(make)
    with pytest.raises(HandlerError):
        await refused.task
    assert used(good) == 0


async def test_the_headers_tell_of_the_limit_that_lets_the_fewest_more_pass(slots: Limiter) -> None:
    rate = Limiter("30/minute", store=slots.store, name="rate")
    for told in ('"default";r=1', '"default";r=1', '"rate";r=0;t=2'):  # a slot is one request, whatever that costs
        request = await RequestInProgress().begin(
            lambda app: RateLimitMiddleware(RateLimitMiddleware(app, rate, cost=10), slots, cost=10)
        )
        await request.step(START, LAST)
        await request.end()
        assert request.headers["ratelimit"] == told


# WebSockets ----------------------------------------------------------------------------------------------------------

ACCEPT: Message = {"type": "websocket.accept"}


@pytest.mark.parametrize("how", ["returns", "raises", "cancelled"])
@pytest.mark.parametrize("answers", [[], [ACCEPT], [ACCEPT, {"type": "websocket.close"}]], ids=["none", "one", "both"])
@pytest.mark.parametrize("options", [{}, {"settle": lambda request, response: 1}], ids=["", "settle"])
async def test_a_websocket_has_its_slot_until_its_end(
    slots: Limiter, answers: list[Message], how: str, options: dict[str, Any]
) -> None:
    connection = await RequestInProgress("/", "websocket").begin(before(slots, **options))
    await connection.receive({"type": "websocket.connect"})
    assert used(slots) == 1
    await connection.step(*answers)
    assert used(slots) == 1
    await connection.receive({"type": "websocket.disconnect", "code": 1005})
    assert used(slots) == 1
    await connection.end(how)
    assert used(slots) == 0


async def test_a_connect_without_a_free_slot_is_denied(slots: Limiter) -> None:
    make = before(slots)
    connections = [await RequestInProgress("/", "websocket").begin(make) for _ in range(SLOTS)]
    denied = RequestInProgress("/", "websocket")
    denied.incoming.put_nowait({"type": "websocket.connect"})
    await denied.begin(make)
    assert denied.sent == [{"type": "websocket.close", "code": 1013, "reason": "rate limited; retry in 1000 ms"}]
    assert used(slots) == SLOTS
    for one in connections:
        await one.end()
    assert used(slots) == 0


async def test_a_connection_with_a_slot_is_settled_at_its_end(store: Any) -> None:
    limiter = Limiter("60/minute; 100 in flight", store=store)
    make = before(limiter, cost=10, counts="failures")
    connection = await RequestInProgress("/", "websocket").begin(make)
    await connection.step(ACCEPT)
    assert limiter.peek(ADDRESS).remaining == 50
    await connection.end()
    assert limiter.peek(ADDRESS).remaining == 60
    for refund, left in ((False, 50), (True, 50)):
        crashed = await RequestInProgress("/", "websocket").begin(before(limiter, cost=10, refund_crashes=refund))
        await crashed.end("raises")
        assert limiter.peek(ADDRESS).remaining == left


async def test_a_connection_whose_limits_cant_be_found_out_has_no_slot(slots: Limiter) -> None:
    def fail(request: Any) -> str:
        raise HandlerError

    connection = await RequestInProgress("/", "websocket").begin(
        before(slots, websocket=WebSocketLimits(received=fail))
    )
    with pytest.raises(HandlerError):
        await connection.task
    assert used(slots) == 0


# WSGI ----------------------------------------------------------------------------------------------------------------


def call(app: Any, **environ: Any) -> Any:
    """The body of a response."""
    full: dict[str, Any] = {"REMOTE_ADDR": ADDRESS, **environ}
    setup_testing_defaults(full)
    return app(full, lambda status, headers, exc_info=None: call.status.append(status))  # type: ignore[attr-defined]


call.status = []  # type: ignore[attr-defined]


@pytest.fixture
def memory_slots(clock: ManualClock) -> Limiter:
    return Limiter(f"{SLOTS} in flight", store=MemoryStore(clock=clock), name="default")


@pytest.mark.parametrize("raised", [False, True])
def test_an_obeying_client_looks_every_second_whether_a_slot_is_free(raised: bool) -> None:
    """However long the lease of the slot is. A denial of the application's own hold is no different."""
    clock, waits = SimulatedClock(), []
    slots = Limiter("1 in flight", store=MemoryStore(clock=clock))
    held = slots.hold(ADDRESS)

    def app(environ: Any, start_response: Any) -> list[bytes]:
        with slots.hold(ADDRESS) if raised else nullcontext():
            start_response("200 OK", [])
            return [b"answer"]

    def waited(notice: WaitNotice) -> None:
        waits.append(notice.seconds)
        if len(waits) == 3:
            held.settle()

    limited = WsgiMiddleware(app, "unlimited" if raised else slots)
    sender = httpx.WSGITransport(limited, remote_addr=ADDRESS)
    transport = ObeyingTransport(sender, clock=clock, jitter=0, on_wait=waited)
    with httpx.Client(transport=transport) as client:
        assert client.get("http://example.org").text == "answer"
    assert waits == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("ending", ["is read", "is closed early", "raises"])
def test_a_wsgi_response_has_its_slot_until_it_ends(memory_slots: Limiter, ending: str) -> None:
    seen: list[int] = []

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        seen.append(used(memory_slots))
        start_response("200 OK", [])
        yield b"part"
        if ending == "raises":
            raise HandlerError
        yield b"part"
        seen.append(used(memory_slots))

    parts = call(WsgiMiddleware(app, memory_slots))
    assert used(memory_slots) == 1
    assert (next(parts), seen, used(memory_slots)) == (b"part", [1], 1)
    if ending == "raises":
        with pytest.raises(HandlerError):
            next(parts)
    elif ending == "is read":
        assert [*parts] == [b"part"]
        assert (seen, used(memory_slots)) == ([1, 1], 0)
    parts.close()
    assert used(memory_slots) == 0


def test_a_complete_wsgi_body_keeps_its_slot_and_its_length_until_it_is_closed(memory_slots: Limiter) -> None:
    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [])
        return [b"hello"]

    limited = WsgiMiddleware(app, memory_slots)
    bodies = [call(limited), call(limited)]
    assert (len(bodies[0]), bodies[0], used(memory_slots)) == (1, [b"hello"], 2)
    denied = call(limited)
    assert (call.status[-1], used(memory_slots)) == ("429 Too Many Requests", 2)  # type: ignore[attr-defined]
    assert b"quota-exceeded" in denied[0]
    for body in bodies:
        body.close()
    assert used(memory_slots) == 0


@pytest.mark.parametrize("patched", [True, False])
def test_a_file_that_the_wsgi_server_sends_has_its_slot_until_it_is_closed(
    memory_slots: Limiter, patched: bool
) -> None:
    class SlottedWrapper(FileWrapper):
        """One that takes no other `close`."""

        def __setattr__(self, name: str, value: object) -> None:
            if name == "close" and "close" in self.__dict__:
                raise AttributeError(name)
            super().__setattr__(name, value)

    wrapper, file = FileWrapper if patched else SlottedWrapper, BytesIO(b"hello")

    def app(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [])
        return environ["wsgi.file_wrapper"](file)

    body = call(WsgiMiddleware(app, memory_slots), **{"wsgi.file_wrapper": wrapper})
    assert isinstance(body, FileWrapper) is patched
    assert b"".join(body) == b"hello"
    assert used(memory_slots) == (1 if patched else 0)
    body.close()
    assert (used(memory_slots), file.closed) == (0, True)


@pytest.mark.parametrize("error", [HandlerError, SystemExit])
@pytest.mark.parametrize("started", [False, True])
def test_a_wsgi_application_that_raises_frees_its_slot(
    memory_slots: Limiter, error: type[BaseException], started: bool
) -> None:
    def app(environ: Any, start_response: Any) -> Any:
        assert used(memory_slots) == 1
        if started:
            start_response("200 OK", [])
        raise error

    with pytest.raises(error):
        call(WsgiMiddleware(app, memory_slots))
    assert used(memory_slots) == 0


# The decorator -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_has_its_slot_as_long_as_it_runs(memory_slots: Limiter, fails: bool) -> None:
    @rate_limited(memory_slots, key="who")
    def work(who: str) -> int:
        if fails and used(memory_slots, who) == SLOTS:
            raise HandlerError
        try:
            return work(who)
        except RateLimited as denied:
            return used(memory_slots, who) if denied.pace == f"{SLOTS} in flight" else -1

    if fails:
        with pytest.raises(HandlerError):
            work("ann")
    else:
        assert work("ann") == SLOTS
    assert used(memory_slots, "ann") == 0


@pytest.mark.parametrize("how", ["returns", "raises", "is cancelled"])
async def test_a_coroutine_has_its_slot_as_long_as_it_runs(slots: Limiter, how: str) -> None:
    go = asyncio.Event()

    @rate_limited(slots, key="who")
    async def work(who: str) -> int:
        await go.wait()
        if how == "raises":
            raise HandlerError
        return 5

    tasks = [asyncio.ensure_future(work("ann")) for _ in range(SLOTS)]
    await wait_until(lambda: used(slots, "ann") == SLOTS, "the calls")
    with pytest.raises(RateLimited):
        await work("ann")
    if how == "is cancelled":
        for task in tasks:
            task.cancel()
    go.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [
        {"returns": int, "raises": HandlerError, "is cancelled": asyncio.CancelledError}[how]
    ] * SLOTS
    assert used(slots, "ann") == 0


@pytest.mark.parametrize("how", ["is read", "is closed early", "raises"])
def test_a_generator_has_its_slot_from_its_first_step_to_its_end(memory_slots: Limiter, how: str) -> None:
    @rate_limited(memory_slots, key="who")
    def parts(who: str) -> Any:
        received = yield 1
        if how == "raises":
            raise HandlerError
        yield received

    stream: Any = parts("ann")
    assert used(memory_slots, "ann") == 0
    assert (next(stream), used(memory_slots, "ann")) == (1, 1)
    others = [parts("ann"), parts("ann")]
    assert next(others[0]) == 1
    with pytest.raises(RateLimited):
        next(others[1])
    others[0].close()
    assert used(memory_slots, "ann") == 1
    if how == "raises":
        with pytest.raises(HandlerError):
            next(stream)
    elif how == "is read":
        assert stream.send(7) == 7
        assert [*stream] == []
    else:
        stream.close()
    assert used(memory_slots, "ann") == 0


@pytest.mark.parametrize("how", ["is read", "is closed early", "raises", "is thrown into"])
async def test_an_async_generator_has_its_slot_from_its_first_step_to_its_end(slots: Limiter, how: str) -> None:
    ended: list[str] = []

    @rate_limited(slots, key="who")
    async def parts(who: str) -> Any:
        try:
            received = yield 1
        except HandlerError:
            received = 9
        finally:
            ended.append(who)
        if how == "raises":
            raise HandlerError
        yield received

    stream: Any = parts("ann")
    assert used(slots, "ann") == 0
    assert (await anext(stream), used(slots, "ann")) == (1, 1)
    if how == "raises":
        with pytest.raises(HandlerError):
            await anext(stream)
    elif how == "is read":
        assert await stream.asend(7) == 7
        assert [one async for one in stream] == []
    elif how == "is thrown into":
        assert await stream.athrow(HandlerError()) == 9
        assert used(slots, "ann") == 1
        await stream.aclose()
    else:
        await stream.aclose()
    assert (used(slots, "ann"), ended) == (0, ["ann"])


def test_a_generator_under_a_rate_is_counted_when_its_iteration_begins() -> None:
    @rate_limited("1/minute", key="who")
    def parts(who: str) -> Iterator[int]:
        yield 1

    first, second = parts("ann"), parts("ann")
    assert [*first] == [1]
    with pytest.raises(RateLimited):
        next(second)


async def test_a_call_can_wait_for_a_slot(slots: Limiter) -> None:
    go, order = asyncio.Event(), []

    @rate_limited(slots, key="who", wait=60)
    async def work(who: str, number: int) -> None:
        order.append(number)
        await go.wait()

    tasks = [asyncio.ensure_future(work("ann", number)) for number in range(4)]
    await wait_until(lambda: slots.waiting("ann") == 2, "those that wait")
    assert order == [0, 1]
    go.set()
    await asyncio.gather(*tasks)
    assert sorted(order) == [0, 1, 2, 3]
    assert used(slots, "ann") == 0


def test_a_limit_of_the_arguments_may_have_slots(clock: ManualClock) -> None:
    store = MemoryStore(clock=clock)

    @rate_limited(limit=lambda who: "1 in flight" if who == "ann" else "2/minute", key="who", store=store, name="work")
    def work(who: str) -> None:
        if who == "ann":
            with pytest.raises(RateLimited):
                work(who)

    for _ in range(3):
        work("ann")
    work("bob")
    work("bob")
    with pytest.raises(RateLimited):
        work("bob")


# Mistakes ------------------------------------------------------------------------------------------------------------


async def hello(scope: Scope, receive: Receive, send: Send) -> None: ...


def test_slots_need_a_store_that_can_hold(clock: ManualClock) -> None:
    store, text = (
        WrappedStore(clock=clock),
        "expected a store that can hold slots, such as MemoryStore() or RedisStore(...), got",
    )
    made: list[Callable[[], object]] = [
        lambda: RateLimitMiddleware(hello, "5 in flight", store=store),
        lambda: RateLimitMiddleware(hello, "5/minute", store=store, routes={"/a": "5 in flight; 5/minute"}),
        lambda: WsgiMiddleware(hello, Limiter("5 in flight", store=store)),  # type: ignore[arg-type]
        lambda: rate_limited("5 in flight", store=store, name="work")(passes),
    ]
    for make in made:
        with pytest.raises(InvalidInput) as refused:
            make()
        assert text in str(refused.value)


def test_a_gate_has_no_slots() -> None:
    gate = Gate(Policy())
    for options in ({"tier": "5 in flight"}, {"routes": {"/a": "5 in flight"}}):
        with pytest.raises(
            InvalidInput, match="RateLimitMiddleware tier: expected one of light, normal, heavy, got '5 in"
        ):
            RateLimitMiddleware(hello, gate=gate, **options)


@pytest.mark.parametrize("name", ["received", "received_bytes", "sent", "sent_bytes"])
def test_messages_have_no_slots(name: str, free: Limiter) -> None:
    limits: Any = {name: "5 in flight"}
    with pytest.raises(InvalidInput, match=f"WebSocketLimits {name}: expected a limit of messages or bytes"):
        RateLimitMiddleware(hello, free, websocket=WebSocketLimits(**limits))


async def test_no_hold_is_made_where_nothing_is_settled(clock: ManualClock) -> None:
    limiter = Limiter("60/minute", store=MemoryStore(clock=clock))
    request = await RequestInProgress().begin(before(limiter))
    assert limiter.list_holds(ADDRESS) == []
    await request.end()


def test_memory_of_settled_requests_stays_small(memory_slots: Limiter) -> None:
    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [])
        return [b"hello"]

    limited = WsgiMiddleware(app, memory_slots)
    for _ in range(50):
        call(limited).close()
    wait_for(lambda: len(memory_slots.list_holds(ADDRESS)) == 0, "nothing to be remembered")
    assert len(memory_slots.store.holds) <= 3  # type: ignore[attr-defined]
