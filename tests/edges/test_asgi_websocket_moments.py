"""WebSockets behind the ASGI middleware, in process: moments that can't be met over a network."""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headgate import Gate, Limiter, ManualClock, MemoryStore, Policy
from headgate.edges.asgi import App, Message, RateLimitMiddleware, Receive, Scope, Send
from headgate.edges.websocket import WebSocketLimits
from tests.support.event_loop import take_turns, wait_until
from tests.support.valkey import PATIENCE
from tests.support.websocket_apps import Echo, ScriptedSender, denial_frame
from tests.support.wrapped_store import WrappedStore

pytestmark = pytest.mark.once


class Wire:
    """The server's side of one connection: what an application receives, and what it has sent."""

    def __init__(self, *messages: str) -> None:
        self.incoming: asyncio.Queue[Message] = asyncio.Queue()
        self.outgoing: list[Message] = []
        self.say({"type": "websocket.connect"}, *({"type": "websocket.receive", "text": text} for text in messages))

    def say(self, *messages: Message) -> None:
        for message in messages:
            self.incoming.put_nowait(message)

    async def send(self, message: Message) -> None:
        await asyncio.sleep(0)
        self.outgoing.append(message)

    async def run(self, app: App, client: str = "10.0.0.1") -> None:
        scope = {"type": "websocket", "path": "/", "headers": [], "client": (client, 1234)}
        await app(scope, self.incoming.get, self.send)

    @property
    def frames(self) -> list[Any]:
        return [json.loads(message["text"]) for message in self.outgoing if message["type"] == "websocket.send"]


@asynccontextmanager
async def running_task(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def receive_interrupted(receive: Receive, patience: int) -> Any:
    """The next text, though a first `receive` is cancelled after some turns of the loop."""
    receiving = asyncio.ensure_future(receive())
    await take_turns(patience)
    receiving.cancel()
    try:
        return (await receiving)["text"]
    except asyncio.CancelledError:
        return (await receive())["text"]


@pytest.mark.parametrize("store", [MemoryStore, WrappedStore])
@pytest.mark.parametrize("patience", range(7))
async def test_a_cancelled_receive_leaves_its_message_to_the_next(store: Any, patience: int) -> None:
    """At whichever turn of the loop that is: nothing is lost, and nothing is counted twice."""
    limiter = Limiter("unlimited", store=store(clock=ManualClock()))
    received = Limiter("10/minute burst 6", store=limiter.store)
    got: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        while len(got) < 6:
            got.append(await receive_interrupted(receive, patience))

    wired = Wire(*"abcdef")
    await wired.run(RateLimitMiddleware(app, limiter, websocket=WebSocketLimits(received=received)))
    assert [frame["remaining"] for frame in wired.frames] == [1]
    assert got == list("abcdef")
    assert received.peek("10.0.0.1").remaining == 0


@pytest.mark.parametrize("patience", range(5))
async def test_an_application_that_is_cancelled_leaves_nothing_behind(patience: int) -> None:
    limiter = Limiter("unlimited", store=WrappedStore(clock=ManualClock()))
    limits = WebSocketLimits(received="1/minute", received_bytes="1/minute")
    wired = Wire("a", "b", "c")
    async with running_task(wired.run(RateLimitMiddleware(Echo(), limiter, websocket=limits))) as task:
        while wired.incoming.qsize() > 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await take_turns(patience)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("patience", range(5))
async def test_an_application_that_leaves_while_a_message_is_judged_leaves_nothing_behind(patience: int) -> None:
    limiter = Limiter("unlimited", store=WrappedStore(clock=ManualClock()))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        receiving.append(asyncio.ensure_future(receive()))
        await take_turns(patience)

    receiving: list[asyncio.Future[Message]] = []
    await Wire("a").run(RateLimitMiddleware(app, limiter, websocket=WebSocketLimits(received="1/minute")))
    (task,) = receiving
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_senders_of_one_key_take_turns_and_a_cancelled_one_spends_nothing(
    clock: ManualClock, free: Limiter
) -> None:
    sent = Limiter("1/minute", store=free.store)
    order: list[str] = []

    def make_sender(name: str) -> App:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "websocket.accept"})
            await send({"type": "websocket.send", "text": name})
            order.append(name)

        return app

    def run(name: str) -> Any:
        app = RateLimitMiddleware(make_sender(name), free, websocket=WebSocketLimits(sent=sent))
        return running_task(Wire().run(app))

    async with run("a") as first:
        await first
        async with run("b") as second:
            await wait_until(lambda: sent.waiting("10.0.0.1") == 1, "those who wait to send")
            async with run("c") as third, run("d") as fourth:
                await wait_until(lambda: sent.waiting("10.0.0.1") == 3, "those who wait to send")
                third.cancel()
                await wait_until(third.done, "the end of the third")
                clock.advance(60)
                await second
                await wait_until(lambda: sent.waiting("10.0.0.1") == 1, "those who wait to send")
                clock.advance(60)
                await fourth
    assert order == ["a", "b", "d"]


async def test_a_large_message_is_not_overtaken_by_small_ones(clock: ManualClock, free: Limiter) -> None:
    sent = Limiter("10/minute", store=free.store)
    order: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def say(size: int) -> None:
            await send({"type": "websocket.send", "bytes": bytes(size)})
            order.append(size)

        await send({"type": "websocket.accept"})
        await say(8)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(say(10))
            await wait_until(lambda: sent.waiting("10.0.0.1"), "those who wait to send")
            tasks.create_task(say(1))
            await wait_until(lambda: sent.waiting("10.0.0.1") == 2, "those who wait to send")
            clock.advance(48)
            await wait_until(lambda: len(order) == 2, "two messages")
            clock.advance(6)

    await Wire().run(RateLimitMiddleware(app, free, websocket=WebSocketLimits(sent_bytes=sent)))
    assert order == [8, 10, 1]


@pytest.mark.parametrize("patience", range(8))
async def test_a_large_message_whose_send_is_cancelled_is_sent_and_counted_or_neither(patience: int) -> None:
    limiter = Limiter("unlimited", store=WrappedStore(clock=ManualClock()))
    sent_bytes = Limiter("10/minute", store=limiter.store)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        sending = asyncio.ensure_future(send({"type": "websocket.send", "text": "x" * 15}))
        await take_turns(patience)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)

    wired = Wire()

    async def send(message: Message) -> None:
        wired.outgoing.append(message)

    wired.send = send  # type: ignore[method-assign]
    await wired.run(RateLimitMiddleware(app, limiter, websocket=WebSocketLimits(sent_bytes=sent_bytes)))
    delivered = wired.outgoing[1:]
    assert (len(delivered), sent_bytes.peek("10.0.0.1").reset_after) in [(0, 0), (1, 90)]


async def test_messages_waiting_when_the_client_leaves_are_passed_to_the_server(free: Limiter) -> None:
    sent = Limiter("1/minute", store=free.store)
    sender, wired = ScriptedSender("a", "b", "c"), Wire()
    async with running_task(wired.run(RateLimitMiddleware(sender, free, websocket=WebSocketLimits(sent=sent)))) as task:
        await wait_until(lambda: sent.waiting("10.0.0.1"), "those who wait to send")
        wired.say({"type": "websocket.disconnect", "code": 1001})
        await task
    assert [message.get("text") for message in wired.outgoing[1:]] == ["a", "b", "c", None]


async def only_send(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "websocket.accept"})
    while True:
        await send({"type": "websocket.send", "text": "tick"})


@pytest.mark.parametrize("before", [0, 1, 5])
async def test_a_client_that_is_gone_leaves_the_line_though_its_application_only_sends(
    before: int, clock: ManualClock, free: Limiter
) -> None:
    """Its application never receives, be it a disconnect or what the client has said before."""
    sent = Limiter("1/minute", store=free.store)
    app = RateLimitMiddleware(only_send, free, websocket=WebSocketLimits(sent=sent))
    gone, other = Wire(*["hello"] * before), Wire()
    async with running_task(gone.run(app)) as first:
        await wait_until(lambda: sent.waiting("10.0.0.1") == 1, "the first to wait")
        async with running_task(other.run(app)):
            await wait_until(lambda: sent.waiting("10.0.0.1") == 2, "the second to wait")
            gone.say({"type": "websocket.disconnect", "code": 1006})
            with pytest.raises(ConnectionError, match="the client has disconnected"):
                await asyncio.wait_for(first, PATIENCE)
            assert sent.waiting("10.0.0.1") == 1
            assert len(other.outgoing) == 1
            clock.advance(60)
            await wait_until(lambda: len(other.outgoing) == 2, "the message of the second")
    await wait_until(lambda: sent.waiting("10.0.0.1") == 0, "the end of both")
    assert asyncio.all_tasks() == {asyncio.current_task()}
    clock.advance(60)
    assert sent.peek("10.0.0.1").remaining == 1, "a wait that ended spent something"


async def test_what_is_read_while_a_message_waits_is_received_in_order_and_counted_then(free: Limiter) -> None:
    sent = Limiter("1/minute", store=free.store)
    received = Limiter("10/minute", store=free.store)
    left: list[int] = []
    got: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": "first"})
        with pytest.raises(ConnectionError, match="the client has disconnected"):
            await send({"type": "websocket.send", "text": "second"})
        left.append(received.peek("10.0.0.1").remaining)
        while (message := await receive())["type"] != "websocket.disconnect":
            got.append(message.get("text"))
        got.append(message["code"])
        left.append(received.peek("10.0.0.1").remaining)

    wired = Wire("a", "b", "c")
    wired.say({"type": "websocket.disconnect", "code": 1001})
    limits = WebSocketLimits(sent=sent, received=received, warn=False)
    await asyncio.wait_for(wired.run(RateLimitMiddleware(app, free, websocket=limits)), PATIENCE)
    assert got == [None, "a", "b", "c", 1001]
    assert left == [10, 7]


async def test_a_client_that_sends_on_is_not_read_without_end_while_a_message_waits(free: Limiter) -> None:
    sent = Limiter("1/minute", store=free.store)
    app = RateLimitMiddleware(only_send, free, websocket=WebSocketLimits(sent=sent))
    many, large = Wire(*["x"] * 100), Wire(*["x" * 50_000] * 100)
    async with running_task(many.run(app)), running_task(large.run(app)):
        await wait_until(lambda: many.incoming.qsize() <= 101 - 16, "what is read ahead")
        await wait_until(lambda: large.incoming.qsize() <= 101 - 3, "what is read ahead")
        await take_turns(100)
        assert (many.incoming.qsize(), large.incoming.qsize()) == (101 - 16, 101 - 3)


@pytest.mark.parametrize("patience", range(6))
async def test_a_receive_that_meets_the_reading_ahead_loses_nothing(
    patience: int, clock: ManualClock, free: Limiter
) -> None:
    """Whenever it is called, and cancelled."""
    sent = Limiter("1/minute", store=free.store)
    got: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def say(text: str) -> None:
            await send({"type": "websocket.send", "text": text})

        await receive()
        await send({"type": "websocket.accept"})
        await say("first")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(say("second"))
            await wait_until(lambda: sent.waiting("10.0.0.1"), "a message that waits")
            while len(got) < 6:
                got.append(await receive_interrupted(receive, patience))
            clock.advance(60)

    await Wire(*"abcdef").run(RateLimitMiddleware(app, free, websocket=WebSocketLimits(sent=sent)))
    assert got == list("abcdef")


async def test_b3_limits_beside_a_gate_count_ipv6_addresses_by_their_64() -> None:
    gate = Gate(Policy(), store=MemoryStore(clock=ManualClock()))
    app = RateLimitMiddleware(Echo(), gate=gate, websocket=WebSocketLimits(received="1/minute", warn=False))

    async def frame(client: str) -> object:
        wired = Wire("7")
        wired.say({"type": "websocket.disconnect", "code": 1000})
        await wired.run(app, client)
        (answer,) = wired.frames
        return answer

    assert await frame("2001:db8::1") == 7
    assert await frame("2001:db8::2") == denial_frame("received", 60_000)
    assert await frame("2001:db8:0:1::2") == 7


async def test_after_a_close_by_the_middleware_the_application_sees_a_disconnect() -> None:
    seen: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        seen.extend([await receive(), await receive()])
        try:
            await send({"type": "websocket.send", "text": "too late"})
        except OSError as error:
            seen.append(str(error))
        await send({"type": "websocket.close"})

    limits = WebSocketLimits(received="blocked", on_denied="close")
    wired = Wire("a")
    await wired.run(RateLimitMiddleware(app, "unlimited", websocket=limits))
    close = {"code": 1013, "reason": "rate limited; retry in 60000 ms"}
    assert wired.outgoing == [{"type": "websocket.accept", "headers": []}, {"type": "websocket.close", **close}]
    assert seen == [{"type": "websocket.disconnect", **close}] * 2 + ["the connection was closed by the rate limit"]


async def test_a_client_that_leaves_during_its_denial_is_a_plain_disconnect() -> None:
    echo = Echo()
    wired = Wire("a")
    wired.say({"type": "websocket.disconnect", "code": 1001})
    sending = wired.send

    async def send(message: Message) -> None:
        if message["type"] == "websocket.send":
            raise ConnectionResetError
        await sending(message)

    wired.send = send  # type: ignore[method-assign]
    await wired.run(RateLimitMiddleware(echo, "unlimited", websocket=WebSocketLimits(received="blocked")))
    assert [message["code"] for message in echo.ended] == [1001]


@pytest.mark.parametrize("patience", range(6))
async def test_a_connect_is_settled_whenever_its_application_is_cancelled_after_the_answer(patience: int) -> None:
    limiter = Limiter("30/minute", store=WrappedStore(clock=ManualClock()))
    answering = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        answering.set()
        await send({"type": "websocket.accept"})
        await receive()

    settling = RateLimitMiddleware(app, limiter, settle=lambda request, response: 7)
    async with running_task(Wire().run(settling)) as task:
        await answering.wait()
        await take_turns(patience)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert limiter.peek("10.0.0.1").remaining == 23


@pytest.mark.parametrize("options", [{}, {"refund_crashes": True}, {"counts": "successes"}])
async def test_a_connect_whose_client_disconnects_is_not_refunded(options: Any) -> None:
    limiter = Limiter("3/minute", store=MemoryStore(clock=ManualClock()))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        assert (await receive())["type"] == "websocket.disconnect"
        raise ZeroDivisionError

    wired = Wire()
    wired.say({"type": "websocket.disconnect", "code": 1006})
    with pytest.raises(ZeroDivisionError):
        await wired.run(RateLimitMiddleware(app, limiter, **options))
    assert limiter.peek("10.0.0.1").remaining == 2


async def test_a_connect_that_is_answered_after_its_client_has_disconnected_is_not_refunded() -> None:
    limiter = Limiter("3/minute", store=MemoryStore(clock=ManualClock()))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        assert (await receive())["type"] == "websocket.disconnect"
        await send({"type": "websocket.close"})

    wired = Wire()
    wired.say({"type": "websocket.disconnect", "code": 1006})
    await wired.run(RateLimitMiddleware(app, limiter, counts="successes"))
    assert limiter.peek("10.0.0.1").remaining == 2


@pytest.mark.parametrize(
    ("limits", "seen"),
    [
        ({"received": "2/minute"}, "ab"),
        ({"received": "2/minute", "on_denied": "close"}, "ab"),
        ({"received": "4/minute"}, "abcd"),  # with a warning before the last
        ({"received_bytes": "1/minute burst 2"}, "ab"),  # a message too big to pass is the fifth
    ],
)
async def test_after_its_close_an_application_receives_what_may_pass_and_the_disconnect(limits: Any, seen: str) -> None:
    """The server refuses any message after the close, also the middleware's."""
    got: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.close", "code": 1000})
        while not got or got[-1]["type"] == "websocket.receive":
            got.append(await receive())

    wired = Wire("a", "b", "c", "d", "too big")
    wired.say({"type": "websocket.disconnect", "code": 1000})
    await wired.run(RateLimitMiddleware(app, "unlimited", websocket=WebSocketLimits(**limits)))
    assert [message["type"] for message in wired.outgoing] == ["websocket.accept", "websocket.close"]
    assert "".join(message["text"] for message in got[:-1]) == seen
    assert got[-1] == {"type": "websocket.disconnect", "code": 1000}


@pytest.mark.parametrize("options", [{}, {"counts": "failures"}, {"settle": lambda request, response: 2}])
@pytest.mark.parametrize(
    "early", [{"type": "websocket.send", "text": "early"}, {"type": "websocket.http.response.start"}]
)
async def test_what_an_application_sends_too_early_is_for_the_server_to_explain(options: Any, early: Message) -> None:
    limiter = Limiter("3/minute", store=MemoryStore(clock=ManualClock()))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send(early)

    async def refuse(message: Message) -> None:
        raise RuntimeError("expected 'websocket.accept'")

    wired = Wire()
    wired.send = refuse  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"expected 'websocket\.accept'"):
        await wired.run(RateLimitMiddleware(app, limiter, **options))
    assert limiter.peek("10.0.0.1").remaining <= 2
