"""Settlement behind the ASGI middleware, in process: responses that end in every way, at any moment."""

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from headgate import Gate, Limiter, ManualClock, MemoryStore, Policy
from headgate.edges import settlement
from headgate.edges.asgi import Message, RateLimitMiddleware, Receive, Scope, Send
from headgate.limits.decision import Outcome
from tests.support.event_loop import run, take_turns, wait_until
from tests.support.greeting_app import maybe_async, remaining
from tests.support.http_edges import HandlerError
from tests.support.wrapped_store import WrappedStore

pytestmark = pytest.mark.once

RESERVED, LIMIT = 100, 100_000
START: Message = {"type": "http.response.start", "status": 200, "headers": [(b"x-cost", b"7")]}
PART: Message = {"type": "http.response.body", "body": b"part", "more_body": True}


class CallingServer:
    """Calls an application as a server does. `sent` is what it was given to send."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        return {"type": "http.disconnect"} if self.sent else {"type": "http.request", "body": b""}

    async def send(self, message: Message) -> None:
        await asyncio.sleep(0)
        self.sent.append(message)

    async def call(self, app: Any) -> None:
        scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "client": ("10.0.0.1", 1234)}
        await app(scope, self.receive, self.send)


@pytest.fixture(params=[MemoryStore, WrappedStore])
def limiter(request: pytest.FixtureRequest) -> Limiter:
    """In memory, and behind a store that is awaited."""
    return Limiter(f"{LIMIT}/hour", store=request.param(clock=ManualClock()))


def charged(limiter: Limiter) -> int:
    return LIMIT - remaining(limiter, "10.0.0.1")


def tokens(request: Any, response: Any) -> int:
    """The cost that the application has noted, as far as it came."""
    assert response.status == 200
    spent: int = request.raw["tokens"]
    return spent


class StreamingApp:
    """An application whose answer costs 1,000 for each part. `ending` is what it does after two of them."""

    def __init__(self, ending: str) -> None:
        self.ending = ending
        self.streaming = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["tokens"] = 0
        await send(START)
        for _ in range(2):
            scope["tokens"] += 1000
            await send(PART)
        self.streaming.set()
        if self.ending == "raises":
            raise HandlerError
        if self.ending == "leaves":  # as frameworks do when the client has disconnected
            assert (await receive())["type"] == "http.disconnect"
            return
        if self.ending == "waits":
            await asyncio.Event().wait()
        await send({"type": "http.response.body", "body": b""})
        if self.ending == "raises late":
            raise HandlerError


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("ending", ["ends", "leaves", "raises", "raises late"])
async def test_a_response_is_settled_however_it_ends(limiter: Limiter, ending: str, asynchronous: bool) -> None:
    settled = []

    def settle(request: Any, response: Any) -> int:
        settled.append(response.headers["X-Cost"])
        return tokens(request, response)

    app = RateLimitMiddleware(StreamingApp(ending), limiter, cost=RESERVED, settle=maybe_async(asynchronous, settle))
    if "raises" in ending:
        with pytest.raises(HandlerError):
            await CallingServer().call(app)
    else:
        await CallingServer().call(app)
    assert (charged(limiter), settled) == (2000, ["7"])


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_response_is_settled_when_the_server_cancels_its_application(
    limiter: Limiter, asynchronous: bool
) -> None:
    model = StreamingApp("waits")
    app = RateLimitMiddleware(model, limiter, cost=RESERVED, settle=maybe_async(asynchronous, tokens))
    task = asyncio.ensure_future(CallingServer().call(app))
    await model.streaming.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert charged(limiter) == 2000


@pytest.mark.parametrize("count", range(8))
async def test_a_settlement_is_carried_out_whenever_it_is_cancelled(limiter: Limiter, count: int) -> None:
    """At whichever turn of the loop: while the last part is sent, while the cost is asked for, while it is charged."""
    model = StreamingApp("ends")
    app = RateLimitMiddleware(model, limiter, cost=RESERVED, settle=maybe_async(True, tokens))
    task = asyncio.ensure_future(CallingServer().call(app))
    await model.streaming.wait()
    await take_turns(count)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert charged(limiter) == 2000


@pytest.mark.parametrize("insist", [False, True])
async def test_a_cancelled_request_waits_for_its_settlement_unless_it_is_cancelled_again(
    limiter: Limiter, insist: bool
) -> None:
    """So a server that cancels its requests before it stops doesn't stop before they are settled."""
    asked, answer = asyncio.Event(), asyncio.Event()

    async def settle(request: Any, response: Any) -> int:
        asked.set()
        await answer.wait()
        return tokens(request, response)

    task = asyncio.ensure_future(
        CallingServer().call(RateLimitMiddleware(StreamingApp("ends"), limiter, settle=settle))
    )
    await asked.wait()
    for _ in range(2 if insist else 1):
        task.cancel()
        await asyncio.wait([task], timeout=0.01)
    assert task.done() == insist
    answer.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    if insist:
        await wait_until(lambda: charged(limiter) == 2000, "the settlement")
    assert charged(limiter) == 2000


async def test_a_settlement_outlives_a_scope_that_cancels_again_and_again(limiter: Limiter) -> None:
    """As the task groups of anyio do, in which Starlette runs applications."""
    model = StreamingApp("waits")
    app = RateLimitMiddleware(model, limiter, cost=RESERVED, settle=maybe_async(True, tokens))
    async with anyio.create_task_group() as group:
        group.start_soon(CallingServer().call, app)
        await model.streaming.wait()
        group.cancel_scope.cancel()
    await wait_until(lambda: charged(limiter) == 2000, "the settlement")


@pytest.mark.parametrize(
    "last",
    [
        [{"type": "http.response.body", "body": b"all"}],
        [{"type": "http.response.body"}],
        [{"type": "http.response.pathsend", "path": "/dev/null"}],
        [{"type": "http.response.zerocopysend", "file": 0, "more_body": True}, {"type": "http.response.zerocopysend"}],
        [PART, {"type": "http.response.trailers", "headers": []}],
        [{"type": "http.response.something.new"}],
    ],
    ids=lambda last: last[-1]["type"],
)
async def test_a_response_is_settled_whichever_extension_has_sent_its_body(limiter: Limiter, last: list[Any]) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in (START, *last):
            await send(message)

    server = CallingServer()
    await server.call(RateLimitMiddleware(app, limiter, settle=lambda request, response: 7))
    assert [message["type"] for message in server.sent] == [START["type"], *(message["type"] for message in last)]
    assert charged(limiter) == 7


async def test_what_follows_the_last_part_is_not_waited_for(limiter: Limiter) -> None:
    during = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send({"type": "http.response.pathsend", "path": "/dev/null"})
        during.append(charged(limiter))

    await CallingServer().call(RateLimitMiddleware(app, limiter, settle=lambda request, response: 7))
    assert during == [7]


async def test_headers_that_can_be_read_once_reach_the_client_and_the_settlement(limiter: Limiter) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        def headers() -> Iterator[tuple[bytes, bytes]]:
            yield b"x-cost", b"7"

        await send({**START, "headers": headers()})
        await send({"type": "http.response.body"})

    server = CallingServer()
    await server.call(
        RateLimitMiddleware(app, limiter, settle=lambda request, response: int(response.headers["x-cost"]))
    )
    assert (b"x-cost", b"7") in server.sent[0]["headers"]
    assert charged(limiter) == 7


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_which_responses_count_may_be_awaited(limiter: Limiter, asynchronous: bool) -> None:
    for status in (True, False):
        counts = maybe_async(asynchronous, lambda _, status=status: status)
        await CallingServer().call(RateLimitMiddleware(StreamingApp("ends"), limiter, cost=RESERVED, counts=counts))
        assert charged(limiter) == RESERVED


# Settlements that fail -----------------------------------------------------------------------------------------------


def fail_settlement(request: Any, response: Any) -> int:
    raise ZeroDivisionError("who can say?")


@pytest.mark.parametrize("settle", [fail_settlement, lambda request, response: -1, lambda request, response: None])
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_if_the_cost_cannot_be_told_the_reserved_one_stands(
    limiter: Limiter, settle: Any, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    server = CallingServer()
    app = RateLimitMiddleware(StreamingApp("ends"), limiter, cost=RESERVED, settle=maybe_async(asynchronous, settle))
    await server.call(app)
    assert server.sent[-1] == {"type": "http.response.body", "body": b""}
    assert charged(limiter) == RESERVED
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("headgate", logging.ERROR)
    assert "could not be settled" in record.getMessage()
    assert record.exc_info


def raise_cancelled(request: Any, response: Any) -> int:
    raise asyncio.CancelledError


async def await_cancelled(request: Any, response: Any) -> int:
    awaited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    awaited.cancel()
    return await awaited


async def cancel_own_task(request: Any, response: Any) -> int:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)
    raise AssertionError


@pytest.mark.parametrize("settle", [raise_cancelled, await_cancelled, cancel_own_task])
async def test_a_settlement_that_is_cancelled_does_not_cancel_its_request(
    limiter: Limiter, settle: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ended = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await StreamingApp("ends")(scope, receive, send)
        ended.append("what follows the response")

    await CallingServer().call(RateLimitMiddleware(app, limiter, cost=RESERVED, settle=settle))
    assert ended
    assert charged(limiter) == RESERVED
    assert "could not be settled" in caplog.text


def test_a_settlement_that_hangs_is_given_up(
    limiter: Limiter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(settlement, "_SETTLE_SECONDS", 0.001)

    async def settle(request: Any, response: Any) -> int:
        await asyncio.Event().wait()
        raise AssertionError

    run(CallingServer().call(RateLimitMiddleware(StreamingApp("ends"), limiter, cost=RESERVED, settle=settle)))
    assert charged(limiter) == RESERVED
    assert "could not be settled" in caplog.text


# Without a response ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, True),
        ({"settle": lambda request, response: 0}, True),
        ({"counts": "failures"}, True),
        ({"counts": "successes"}, False),  # it is a 500
        ({"refund_crashes": True}, False),
        ({"refund_crashes": True, "counts": "failures"}, False),
        ({"refund_crashes": True, "settle": lambda request, response: 50}, False),
    ],
)
async def test_a_crash_before_the_response_stays_counted_unless_crashes_are_refunded(
    limiter: Limiter, options: Any, kept: bool
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise HandlerError

    with pytest.raises(HandlerError):
        await CallingServer().call(RateLimitMiddleware(app, limiter, cost=RESERVED, **options))
    assert charged(limiter) == (RESERVED if kept else 0)


@pytest.mark.parametrize("options", [{"refund_crashes": True}, {"counts": "successes"}, {"settle": tokens}])
@pytest.mark.parametrize("ending", [HandlerError, asyncio.CancelledError, None])
async def test_a_client_that_leaves_before_the_response_gets_nothing_back(
    limiter: Limiter, options: Any, ending: type[BaseException] | None
) -> None:
    """Whether its application raises, is cancelled, or just returns."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "http.disconnect"
        if ending is not None:
            raise ending

    server = CallingServer()
    server.sent.append("what makes `receive` return a disconnect")
    task = asyncio.ensure_future(server.call(RateLimitMiddleware(app, limiter, cost=RESERVED, **options)))
    await asyncio.gather(task, return_exceptions=True)
    assert charged(limiter) == RESERVED


@pytest.mark.parametrize(
    ("options", "cost"),
    [
        ({"counts": "successes"}, RESERVED),
        ({"counts": lambda status: status < 500}, RESERVED),
        ({"settle": lambda request, response: 7}, RESERVED),
        ({"settle": lambda request, response: 700}, 700),  # what was spent all the same is charged
        ({"refund_crashes": True}, RESERVED),
    ],
)
async def test_a_response_that_nobody_waits_for_any_more_refunds_nothing(
    limiter: Limiter, options: Any, cost: int
) -> None:
    """As frameworks send it: a 500, for the error of reading a body that was cut off."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "http.disconnect"
        await send({**START, "status": 500})
        await send({"type": "http.response.body"})
        raise HandlerError

    server = CallingServer()
    server.sent.append("what makes `receive` return a disconnect")
    with pytest.raises(HandlerError):
        await server.call(RateLimitMiddleware(app, limiter, cost=RESERVED, **options))
    assert charged(limiter) == cost


async def test_a_client_that_leaves_during_the_response_changes_nothing(limiter: Limiter) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        assert (await receive())["type"] == "http.disconnect"

    await CallingServer().call(RateLimitMiddleware(app, limiter, counts="failures"))
    assert charged(limiter) == 0


# What was never counted ----------------------------------------------------------------------------------------------


async def test_a_request_that_only_shadow_mode_let_pass_is_not_refunded() -> None:
    policy = Policy(shadow=True, addresses={"limit": "2/day"})
    with Gate(policy, store=MemoryStore(clock=ManualClock())) as gate:
        statuses = iter([401, 401, 200, 200])

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send({**START, "status": next(statuses)})
            await send({"type": "http.response.body"})

        for _ in range(4):
            await CallingServer().call(RateLimitMiddleware(app, gate=gate, counts="failures"))
        assert gate.check_address("10.0.0.1").would_be is Outcome.DENY
