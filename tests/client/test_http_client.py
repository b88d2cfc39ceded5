"""Transports that obey, over real sockets: what is sent, when, and what comes back to the caller."""

import asyncio
import importlib
import random
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from fractions import Fraction
from typing import Any, TypeVar

import httpx
import pytest
from asgi import serving
from servers import PATIENCE, free_port, wait_for

from headgate import HeadgateError, InvalidInput, Limiter, ManualClock, MemoryStore, parse
from headgate.client import http
from headgate.client.http import AsyncObeyingTransport, ObeyingTransport, TooLong, WaitNotice
from headgate.edges.asgi import RateLimitMiddleware

pytestmark = pytest.mark.once

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Headers = dict[str, str]
T = TypeVar("T")


class Simulated(ManualClock):
    """Where somebody waits for a moment and nothing is under way, it is that moment at once."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way = 0
        self.lock = threading.Lock()

    def alarm(self, when: int, ring: Callable[[], None]) -> float | None:
        with self.lock:
            if self.under_way:
                return 0.001
            self.advance(Fraction(max(when - self.now(), 0), 1_000_000))
        return 0.0

    def sends(self, change: int) -> None:
        with self.lock:
            self.under_way += change


class Sending(httpx.HTTPTransport):
    """Tells the clock what is under way."""

    def __init__(self, clock: Simulated) -> None:
        super().__init__(verify=False)  # certificates take a while to load, and none is looked at here
        self._clock = clock

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self._clock.sends(1)
        try:
            return super().handle_request(request)
        finally:
            self._clock.sends(-1)


class AsyncSending(httpx.AsyncHTTPTransport):
    def __init__(self, clock: Simulated) -> None:
        super().__init__(verify=False)  # certificates take a while to load, and none is looked at here
        self._clock = clock

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._clock.sends(1)
        try:
            return await super().handle_async_request(request)
        finally:
            self._clock.sends(-1)


class Server:
    """What an application has answered, and when. As text it is its URL."""

    def __init__(self, app: Callable[..., Awaitable[None]], clock: ManualClock) -> None:
        self._app, self._clock = app, clock
        self.answered: list[int] = []
        self.moments: list[float] = []
        self.paths: list[str] = []
        self.peers: set[int] = set()
        self.url = ""

    def __str__(self) -> str:
        return self.url

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        async def sending(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self.answered.append(message["status"])
            await send(message)

        self.moments.append(self._clock.now() / 1_000_000)
        self.paths.append(scope["path"])
        self.peers.add(scope["client"][1])
        await self._app(scope, receive, sending)


async def hello(_scope: dict[str, Any], _receive: Receive, send: Send) -> None:
    await answer(send, 200)


async def answer(send: Send, status: int, headers: Headers | None = None, body: bytes = b"hello") -> None:
    told = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    told.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": told})
    await send({"type": "http.response.body", "body": body})


def ours(limit: str, clock: ManualClock) -> Callable[..., Awaitable[None]]:
    limiter = Limiter(limit, store=MemoryStore(clock=clock))
    return RateLimitMiddleware(hello, limiter=limiter)


def windowed(quota: int, seconds: int, clock: ManualClock) -> Callable[..., Awaitable[None]]:
    """A server that isn't ours, in the older headers: so many in each window, all of which come back at once."""
    counted: dict[int, int] = {}

    async def app(_scope: dict[str, Any], _receive: Receive, send: Send) -> None:
        window, into = divmod(clock.now(), seconds * 1_000_000)
        reset = str(-(-(seconds * 1_000_000 - into) // 1_000_000))
        counted[window] = used = counted.get(window, 0) + 1
        told = {"x-ratelimit-limit": str(quota), "x-ratelimit-remaining": str(max(quota - used, 0))}
        told["x-ratelimit-reset"] = reset
        await (answer(send, 429, {**told, "retry-after": reset}) if used > quota else answer(send, 200, told))

    return app


class Script:
    """Answers what it is told to, one after the other, and with 200 from then on; keeps what it was sent."""

    def __init__(self, *answers: tuple[int, Headers]) -> None:
        self._answers = iter(answers)
        self.bodies: list[bytes] = []

    async def __call__(self, _scope: dict[str, Any], receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(body)
        status, headers = next(self._answers, (200, {}))
        await answer(send, status, headers, body=f"answer {len(self.bodies)}".encode())


@contextmanager
def served(app: Callable[..., Awaitable[None]], clock: ManualClock) -> Iterator[Server]:
    server = Server(app, clock)
    with serving(server) as address:
        server.url = f"http://{address}"
        yield server


@contextmanager
def obeying(clock: Simulated, **options: Any) -> Iterator[httpx.Client]:
    chosen = {"random": random.Random(7).random, **options}
    with httpx.Client(transport=ObeyingTransport(Sending(clock), clock=clock, **chosen)) as client:
        yield client


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run it in a loop, and fail rather than wait for ever."""

    async def bounded() -> T:
        async with asyncio.timeout(PATIENCE):
            return await work

    return asyncio.run(bounded())


def later(seconds: int) -> Headers:
    return {"retry-after": str(seconds)}


# 500 requests --------------------------------------------------------------------------------------------------------


def within_five_percent(server: Server, requests: int, ideal: float) -> None:
    assert server.answered == [200] * requests, "and nothing was sent that was denied"
    assert ideal <= server.moments[-1] <= ideal * 1.05


def test_500_requests_all_succeed_none_is_denied_and_no_time_is_lost() -> None:
    clock = Simulated()
    with served(ours("60/minute", clock), clock) as server, obeying(clock) as client:
        for _ in range(500):
            assert client.get(str(server)).status_code == 200
    within_five_percent(server, 500, 440)


@pytest.mark.parametrize(
    ("app_on", "each", "ideal"),
    [
        (lambda clock: ours("60/minute", clock), 10, 440),
        (lambda clock: ours("60/minute burst 10", clock), 4, 190),
        (lambda clock: windowed(60, 60, clock), 4, 180),
    ],
    ids=["60/minute", "60/minute burst 10", "a window of 60"],
)
def test_requests_of_50_tasks_at_once(
    app_on: Callable[[ManualClock], Callable[..., Awaitable[None]]], each: int, ideal: float
) -> None:
    clock = Simulated()

    async def some(client: httpx.AsyncClient) -> None:
        for _ in range(each):
            assert (await client.get(str(server))).status_code == 200

    async def main() -> None:
        transport = AsyncObeyingTransport(AsyncSending(clock), clock=clock, random=random.Random(7).random)
        async with httpx.AsyncClient(transport=transport) as client:
            await asyncio.gather(*(some(client) for _ in range(50)))

    with served(app_on(clock), clock) as server:
        run(main())
    within_five_percent(server, 50 * each, ideal)


def test_requests_of_20_threads_at_once() -> None:
    clock = Simulated()
    with served(ours("60/minute burst 10", clock), clock) as server, obeying(clock) as client:
        with ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(lambda _: client.get(str(server)).status_code, range(200)))
        assert answers == [200] * 200
    within_five_percent(server, 200, 190)


def test_a_hundred_clients_that_are_denied_at_the_same_moment_come_back_at_different_ones() -> None:
    script = Script(*[(429, later(60)), (200, {})] * 100)
    waits: list[float] = []
    with served(script, ManualClock()) as server:
        for _ in range(100):
            clock = Simulated()  # each stands at 0 when its client is denied
            with obeying(clock, random=None, on_wait=lambda notice: waits.append(notice.seconds)) as client:
                assert client.get(str(server)).status_code == 200
    assert len(waits) == 100
    assert min(waits) >= 60
    assert max(waits) <= 60 * 1.03
    in_each_tenth = [int(wait * 10) for wait in waits]
    assert max(map(in_each_tenth.count, in_each_tenth)) < 25


# What is sent again --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_of", "first", "tries"),
    [
        ({"method": "GET"}, (429, later(3)), 2),
        ({"method": "POST", "json": {"a": 1}}, (429, later(3)), 2),
        ({"method": "POST", "content": b"text"}, (429, {}), 2),
        ({"method": "POST", "content": iter([b"te", b"xt"])}, (429, later(3)), 1),
        ({"method": "GET"}, (503, later(3)), 2),
        ({"method": "PUT", "content": b"text"}, (503, later(3)), 2),
        ({"method": "POST", "content": b"text"}, (503, later(3)), 1),
        ({"method": "POST", "content": b"text", "headers": {"Idempotency-Key": "7"}}, (503, later(3)), 2),
        ({"method": "GET"}, (503, {}), 1),
        ({"method": "GET"}, (500, later(3)), 1),
    ],
)
def test_what_does_nothing_twice_is_sent_again(request_of: Any, first: tuple[int, Headers], tries: int) -> None:
    clock, script = Simulated(), Script(first)
    with served(script, clock) as server, obeying(clock) as client:
        response = client.request(url=str(server), **request_of)
        assert server.answered == [first[0], 200][:tries]
        assert response.status_code == server.answered[-1]
        assert response.text == f"answer {tries}"
        assert set(script.bodies) == {response.request.read() if tries == 2 else script.bodies[0]}
        if tries == 2 and first[1]:
            assert 3 <= server.moments[1] <= 3 * 1.03


def test_after_a_connection_error_nothing_is_sent_again() -> None:
    clock = Simulated()
    with obeying(clock) as client, pytest.raises(httpx.ConnectError):
        client.post(f"http://127.0.0.1:{free_port()}", json={})
    assert clock.now() == 0


def test_after_a_broken_connection_nothing_is_sent_again_and_the_next_in_line_goes_on() -> None:
    notices: list[WaitNotice] = []
    lines: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines.append(await reader.readline())
        await reader.readuntil(b"\r\n\r\n")
        if len(lines) == 1:
            await auntil(lambda: bool(notices))  # somebody waits for the first answer
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async def main() -> None:
        transport = AsyncObeyingTransport(clock=ManualClock(), on_wait=notices.append)
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, httpx.AsyncClient(transport=transport) as client:
            both = client.post(url, json={}), client.get(url)
            broken, answered = await asyncio.gather(*both, return_exceptions=True)
            assert isinstance(broken, httpx.RemoteProtocolError)
            assert isinstance(answered, httpx.Response)
            assert answered.status_code == 200
        assert [line.split()[0] for line in lines] == [b"POST", b"GET"]

    run(main())


def test_after_so_many_tries_the_denial_is_returned_as_it_is() -> None:
    clock = Simulated()
    with served(Script(*[(429, later(1))] * 9), clock) as server, obeying(clock, retries=2) as client:
        response = client.get(str(server))
        assert (response.status_code, response.text) == (429, "answer 3")
        assert len(server.peers) == 1, "one connection served all tries"
    with served(Script(*[(429, later(1))] * 9), clock) as server, obeying(clock, retries=0) as client:
        assert client.get(str(server)).text == "answer 1"


def test_a_wait_that_is_too_long_is_not_waited_for() -> None:
    clock = Simulated()
    with served(Script((429, later(3600))), clock) as server, obeying(clock) as client:
        assert client.get(str(server)).status_code == 429
        text = r"has to be left alone for 36\d\d\.\d s, and a request waits at most 300 s; try again then, or give"
        with pytest.raises(TooLong, match=text) as no:
            client.get(str(server))
        assert no.value.retry_after is not None
        assert no.value.retry_after >= 3600
        assert isinstance(no.value, HeadgateError)
        assert (clock.now(), server.answered) == (0, [429])
        clock.advance(3600 * 1.03)
        assert client.get(str(server)).status_code == 200


def test_all_waits_of_a_request_together_are_at_most_so_long() -> None:
    clock = Simulated()
    with served(Script(*[(429, later(40))] * 9), clock) as server, obeying(clock, most_wait=100) as client:
        assert client.get(str(server)).text == "answer 3"
    assert 80 <= server.moments[-1] <= 100


def test_who_may_wait_no_longer_doesnt_join_the_line_again() -> None:
    clock = ManualClock()
    notices: list[WaitNotice] = []

    async def main() -> None:
        transport = AsyncObeyingTransport(clock=clock, jitter=0, most_wait=100, on_wait=notices.append)
        async with httpx.AsyncClient(transport=transport) as client:
            first = asyncio.create_task(client.get(str(server)))
            await auntil(lambda: len(notices) == 1)
            second = asyncio.create_task(client.get(str(server)))
            await asyncio.sleep(0)
            clock.advance(60)
            assert (await first).text == "answer 2"
            await auntil(lambda: len(notices) > 1 and notices[-1].seconds == 60)
            clock.advance(60)
            assert (await second).text == "answer 3"

    with served(Script((429, later(60)), (429, later(60))), clock) as server:
        run(main())


def test_a_denial_that_is_given_back_after_all_still_has_its_body() -> None:
    heard = asyncio.Event()

    async def app(scope: dict[str, Any], _receive: Receive, send: Send) -> None:
        if scope["path"] == "/long":
            await heard.wait()
            await answer(send, 429, later(1000), b"long")
        elif scope["path"] == "/short":
            await answer(send, 429, later(10), b"short")
        else:
            await answer(send, 200)

    async def main() -> list[str]:
        transport = AsyncObeyingTransport(clock=ManualClock(), on_wait=lambda _: server.call(heard.set))
        async with httpx.AsyncClient(transport=transport) as client:
            await client.get(f"http://{server}")
            both = (client.get(f"http://{server}/{path}") for path in ("short", "long"))
            return [response.text for response in await asyncio.gather(*both)]

    with serving(app) as server:
        assert run(main()) == ["short", "long"]


BAD = ["-5", "nan", "inf", "1e999", "soon", "9" * 14, "9" * 40, "", "Wed, 99 Foo 2020", "Sun, 06 Nov 9994 08:49:37 GMT"]


def test_bad_headers_hold_nobody_up_for_long() -> None:
    async def app(scope: dict[str, Any], _receive: Receive, send: Send) -> None:
        value = dict(scope["headers"])[b"value"].decode()
        told = {
            "retry-after": value,
            "ratelimit-policy": f'"a";q={value};w={value}',
            "ratelimit": f'"a";r=0;t={value}',
            "x-ratelimit-remaining": "0",
            "x-ratelimit-reset": value,
        }
        await answer(send, 200 if scope["path"] == "/pass" else 429, told)

    with serving(app) as server:
        for value in BAD:
            clock = Simulated()
            with obeying(clock, retries=1) as client:
                for path in ("pass", "deny", "pass"):
                    with suppress(TooLong):  # at once, where the wait would be longer
                        client.get(f"http://{server}/{path}", headers={"value": value})
            assert clock.now() <= 300 * 1_000_000, value


# Who waits for whom --------------------------------------------------------------------------------------------------


def test_first_come_first_served_never_early_and_told_of_it() -> None:
    clock = ManualClock()
    notices: list[WaitNotice] = []

    async def main() -> None:
        transport = AsyncObeyingTransport(clock=clock, jitter=0, on_wait=notices.append)
        async with httpx.AsyncClient(transport=transport) as client:
            await client.get(f"{server}/first")
            tasks = []
            for number in range(5):
                tasks.append(asyncio.create_task(client.get(f"{server}/{number}")))
                await asyncio.sleep(0)
            for number in range(5):
                await auntil(lambda number=number: len(notices) == number + 1)  # type: ignore[misc]
                if number == 2:
                    tasks[3].cancel()
                clock.advance(1.999999)
                await asyncio.sleep(0.01)  # time enough to be early
                assert len(server.paths) == number + 1
                clock.advance(0.000001)
                await asyncio.wait(tasks[number:], return_when=asyncio.FIRST_COMPLETED)
                await tasks[number]
                if number == 2:
                    del tasks[3]
                if number == 3:
                    break
            await asyncio.gather(*tasks)

    with served(ours("30/minute burst 1", clock), clock) as server:
        run(main())
    assert server.paths == ["/first", "/0", "/1", "/2", "/4"]
    assert server.moments == [0, 2, 4, 6, 8]
    assert notices == [WaitNotice(2.0, f"{server}", "nothing is left under 'default'")] * 4


async def auntil(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


def test_a_full_line_is_not_joined() -> None:
    clock = ManualClock()
    notices: list[WaitNotice] = []

    async def main() -> None:
        transport = AsyncObeyingTransport(clock=clock, jitter=0, most_waiting=2, on_wait=notices.append)
        async with httpx.AsyncClient(transport=transport) as client:
            await client.get(str(server))
            waiting = [asyncio.create_task(client.get(str(server))) for _ in range(2)]
            await auntil(lambda: bool(notices))
            with pytest.raises(TooLong, match=f"not sent: 2 requests wait for {server} already; send fewer at once"):
                await client.get(str(server))
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            clock.advance(60)
            assert (await client.get(str(server))).status_code == 200, "they have left the line"

    with served(ours("1/minute", clock), clock) as server:
        run(main())


def test_who_is_cancelled_between_two_tries_is_gone() -> None:
    clock = ManualClock()
    notices: list[WaitNotice] = []

    async def main() -> None:
        async with httpx.AsyncClient(transport=AsyncObeyingTransport(clock=clock, on_wait=notices.append)) as client:
            task = asyncio.create_task(client.get(str(server)))
            await auntil(lambda: bool(notices))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            clock.advance(100)
            assert (await client.get(str(server))).text == "answer 2"

    with served(Script((429, later(60))), clock) as server:
        run(main())


def test_what_one_server_says_holds_for_no_other() -> None:
    clock = Simulated()
    with (
        served(ours("1/minute", clock), clock) as one,
        served(ours("1/minute", clock), clock) as other,
        obeying(clock) as client,
    ):
        for server in (one, other):
            client.get(str(server))
        assert clock.now() == 0
        client.get(str(one))
        assert 60 <= clock.now() / 1_000_000 <= 60 * 1.03


def test_of_many_servers_those_are_forgotten_that_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_MOST_ORIGINS", 2)
    clock = ManualClock()
    with ExitStack() as stack:
        apps = [hello, ours("1/minute", clock), hello, hello]
        servers = [stack.enter_context(served(app, clock)) for app in apps]
        transport = ObeyingTransport(clock=clock, most_wait=1)
        client = stack.enter_context(httpx.Client(transport=transport))
        for server in servers:
            assert client.get(str(server)).status_code == 200
            assert len(transport._course._paces) <= 2
        with pytest.raises(TooLong):
            client.get(str(servers[1]))


def test_while_an_answer_may_change_it_a_long_wait_is_not_given_up() -> None:
    """Of an unknown kind of limit little comes back soon; that it is a bucket is told by the answer."""
    clock, arrived, go_on = ManualClock(), threading.Semaphore(0), asyncio.Event()

    async def app(scope: dict[str, Any], _receive: Receive, send: Send) -> None:
        if scope["path"] == "/slow":
            arrived.release()
            await go_on.wait()
            told = '"a";r=0;t=86'
        else:
            told = '"a";r=1;t=778'
        await answer(send, 200, {"ratelimit-policy": '"a";q=10;w=864', "ratelimit": told})

    async def main() -> None:
        waits: list[float] = []
        transport = AsyncObeyingTransport(clock=clock, jitter=0, on_wait=lambda notice: waits.append(notice.seconds))
        async with httpx.AsyncClient(transport=transport) as client:
            await client.get(f"http://{server}")
            slow = asyncio.create_task(client.get(f"http://{server}/slow"))
            await auntil(lambda: arrived.acquire(blocking=False))
            other = asyncio.create_task(client.get(f"http://{server}"))
            await auntil(lambda: bool(waits))
            assert waits[0] > 300
            server.call(go_on.set)
            await slow
            await asyncio.sleep(0)
            clock.advance(86)
            assert (await other).status_code == 200

    with serving(app) as server:
        run(main())


def test_several_policies_are_all_obeyed() -> None:
    clock = Simulated()
    limit = "5/second; 20/minute"
    assert len(parse(limit).parts) == 2
    with served(ours(limit, clock), clock) as server, obeying(clock) as client:
        for _ in range(60):
            client.get(str(server))
    assert server.answered == [200] * 60
    assert 120 <= server.moments[-1] <= 120 * 1.05


def test_of_a_new_server_one_answer_is_awaited_before_more_is_sent() -> None:
    arrived, answered = threading.Semaphore(0), asyncio.Event()

    async def app(_scope: dict[str, Any], _receive: Receive, send: Send) -> None:
        arrived.release()
        await answered.wait()
        await answer(send, 200)

    async def main() -> None:
        async with httpx.AsyncClient(transport=AsyncObeyingTransport(clock=ManualClock())) as client:
            tasks = [asyncio.create_task(client.get(f"http://{server}")) for _ in range(20)]
            await auntil(lambda: arrived.acquire(blocking=False))
            assert not arrived.acquire(blocking=False)
            server.call(answered.set)
            assert [response.status_code for response in await asyncio.gather(*tasks)] == [200] * 20

    with serving(app) as server:
        run(main())


# What is passed through ----------------------------------------------------------------------------------------------


def test_a_body_is_streamed_as_it_comes() -> None:
    sent = asyncio.Event()

    async def app(_scope: dict[str, Any], _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await sent.wait()
        await send({"type": "http.response.body", "body": b"two"})

    with (
        serving(app) as server,
        httpx.Client(transport=ObeyingTransport()) as client,
        client.stream("GET", f"http://{server}") as response,
    ):
        parts = response.iter_raw()
        assert next(parts) == b"one"
        server.call(sent.set)
        assert b"".join(parts) == b"two"


def test_a_transport_is_entered_and_closed_with_the_one_that_obeys() -> None:
    inner = httpx.HTTPTransport()
    with ObeyingTransport(inner) as transport, httpx.Client(transport=transport):
        pass
    wait_for(lambda: not inner._pool.connections, "the connections")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"most_wait": -1}, "most_wait: expected a number of seconds, 0 or more, got -1"),
        ({"retries": -1}, "retries: expected a whole number, 0 or more, got -1"),
        ({"most_waiting": 0}, "most_waiting: expected a whole number from 1 to"),
        ({"jitter": 2}, "jitter: expected a number from 0 to 1"),
        ({"on_wait": 5}, "on_wait: expected a function that takes a WaitNotice, got 5"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], text: str) -> None:
    for kind in (ObeyingTransport, AsyncObeyingTransport):
        with pytest.raises(InvalidInput, match=text):
            kind(**options)


def test_without_httpx_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.delitem(sys.modules, "headgate.client.http")
    with pytest.raises(HeadgateError, match=r"expected httpx .* pip install 'headgate\[client\]'"):
        importlib.import_module("headgate.client.http")
