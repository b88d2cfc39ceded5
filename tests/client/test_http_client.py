"""Transports that obey, over real sockets: what is sent, when, and what comes back to the caller."""

import asyncio
import importlib
import random
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from headgate import HeadgateError, InvalidInput, ManualClock, parse
from headgate.client import http
from headgate.client.http import AsyncObeyingTransport, ObeyingTransport, TooLong, WaitNotice
from tests.support.asgi_server import app_server
from tests.support.event_loop import holds_for_turns, run, wait_until
from tests.support.obeying_transports import (
    AsyncCountingTransport,
    Receive,
    RecordingServer,
    ScriptedApp,
    Send,
    SimulatedClock,
    fixed_window_app,
    headgate_app,
    hello_app,
    obeying_client,
    patient_async_client,
    patient_client,
    recording_server,
    retry_after,
    send_answer,
)
from tests.support.valkey import wait_for

pytestmark = pytest.mark.once

# 500 requests --------------------------------------------------------------------------------------------------------


def check_within_five_percent(server: RecordingServer, requests: int, ideal: float) -> None:
    assert server.answered == [200] * requests, "and nothing was sent that was denied"
    assert ideal <= server.moments[-1] <= ideal * 1.05


def test_500_requests_all_succeed_none_is_denied_and_no_time_is_lost() -> None:
    clock = SimulatedClock()
    with recording_server(headgate_app("60/minute", clock), clock) as server, obeying_client(clock) as client:
        for _ in range(500):
            assert client.get(str(server)).status_code == 200
    check_within_five_percent(server, 500, 440)


@pytest.mark.long
@pytest.mark.parametrize(
    ("app_on", "each", "ideal"),
    [
        (lambda clock: headgate_app("60/minute", clock), 10, 440),
        (lambda clock: headgate_app("60/minute burst 10", clock), 4, 190),
        (lambda clock: fixed_window_app(60, 60, clock), 4, 180),
    ],
    ids=["60/minute", "60/minute burst 10", "a window of 60"],
)
def test_requests_of_50_tasks_at_once(
    app_on: Callable[[ManualClock], Callable[..., Awaitable[None]]], each: int, ideal: float
) -> None:
    clock = SimulatedClock()

    async def some(client: httpx.AsyncClient) -> None:
        for _ in range(each):
            assert (await client.get(str(server))).status_code == 200

    async def main() -> None:
        transport = AsyncObeyingTransport(AsyncCountingTransport(clock), clock=clock, random=random.Random(7).random)
        async with patient_async_client(transport) as client:
            await asyncio.gather(*(some(client) for _ in range(50)))

    with recording_server(app_on(clock), clock) as server:
        run(main())
    check_within_five_percent(server, 50 * each, ideal)


def test_requests_of_20_threads_at_once() -> None:
    clock = SimulatedClock()
    with recording_server(headgate_app("60/minute burst 10", clock), clock) as server, obeying_client(clock) as client:
        with ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(lambda _: client.get(str(server)).status_code, range(200)))
        assert answers == [200] * 200
    check_within_five_percent(server, 200, 190)


def test_a_hundred_clients_that_are_denied_at_the_same_moment_come_back_at_different_ones() -> None:
    script = ScriptedApp(*[(429, retry_after(60)), (200, {})] * 100)
    waits: list[float] = []
    with recording_server(script, ManualClock()) as server:
        for _ in range(100):
            clock = SimulatedClock()  # each stands at 0 when its client is denied
            with obeying_client(clock, random=None, on_wait=lambda notice: waits.append(notice.seconds)) as client:
                assert client.get(str(server)).status_code == 200
    assert len(waits) == 100
    assert min(waits) >= 60
    assert max(waits) <= 60 * 1.03
    in_each_tenth = [int(wait * 10) for wait in waits]
    assert max(map(in_each_tenth.count, in_each_tenth)) < 25


# Who waits for whom --------------------------------------------------------------------------------------------------


def test_requests_wait_first_come_first_served_and_notices_are_sent() -> None:
    clock = ManualClock()
    notices: list[WaitNotice] = []

    async def main() -> None:
        transport = AsyncObeyingTransport(clock=clock, jitter=0, on_wait=notices.append)
        async with patient_async_client(transport) as client:
            await client.get(f"{server}/first")
            tasks = []
            for number in range(5):
                tasks.append(asyncio.create_task(client.get(f"{server}/{number}")))
                await asyncio.sleep(0)
            for number in range(5):
                await wait_until(lambda number=number: len(notices) == number + 1, "a wait")  # type: ignore[misc]
                if number == 2:
                    tasks[3].cancel()
                clock.advance(1.999999)
                assert await holds_for_turns(lambda number=number: len(server.paths) == number + 1)  # type: ignore[misc]
                clock.advance(0.000001)
                await asyncio.wait(tasks[number:], return_when=asyncio.FIRST_COMPLETED)
                await tasks[number]
                if number == 2:
                    del tasks[3]
                if number == 3:
                    break
            await asyncio.gather(*tasks)

    with recording_server(headgate_app("30/minute burst 1", clock), clock) as server:
        run(main())
    assert server.paths == ["/first", "/0", "/1", "/2", "/4"]
    assert server.moments == [0, 2, 4, 6, 8]
    assert notices == [WaitNotice(2.0, f"{server}", "nothing is left under 'default'")] * 4


def test_a_full_queue_is_not_joined() -> None:
    clock = ManualClock()
    notices: list[WaitNotice] = []

    async def main() -> None:
        transport = AsyncObeyingTransport(clock=clock, jitter=0, most_waiting=2, on_wait=notices.append)
        async with patient_async_client(transport) as client:
            await client.get(str(server))
            waiting = [asyncio.create_task(client.get(str(server))) for _ in range(2)]
            await wait_until(lambda: bool(notices), "a wait")
            with pytest.raises(TooLong, match=f"not sent: 2 requests wait for {server} already; send fewer at once"):
                await client.get(str(server))
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            clock.advance(60)
            assert (await client.get(str(server))).status_code == 200, "they have left the line"

    with recording_server(headgate_app("1/minute", clock), clock) as server:
        run(main())


def test_a_request_cancelled_between_two_tries_leaves_the_queue() -> None:
    clock = ManualClock()
    notices: list[WaitNotice] = []

    async def main() -> None:
        async with patient_async_client(AsyncObeyingTransport(clock=clock, on_wait=notices.append)) as client:
            task = asyncio.create_task(client.get(str(server)))
            await wait_until(lambda: bool(notices), "a wait")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            clock.advance(100)
            assert (await client.get(str(server))).text == "answer 2"

    with recording_server(ScriptedApp((429, retry_after(60))), clock) as server:
        run(main())


def test_limits_of_one_server_do_not_affect_another() -> None:
    clock = SimulatedClock()
    with (
        recording_server(headgate_app("1/minute", clock), clock) as one,
        recording_server(headgate_app("1/minute", clock), clock) as other,
        obeying_client(clock) as client,
    ):
        for server in (one, other):
            client.get(str(server))
        assert clock.now() == 0
        client.get(str(one))
        assert 60 <= clock.now() / 1_000_000 <= 60 * 1.03


def test_idle_servers_are_forgotten_above_the_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_MOST_ORIGINS", 2)
    clock = ManualClock()
    with ExitStack() as stack:
        apps = [hello_app, headgate_app("1/minute", clock), hello_app, hello_app]
        servers = [stack.enter_context(recording_server(app, clock)) for app in apps]
        transport = ObeyingTransport(clock=clock, most_wait=1)
        client = stack.enter_context(patient_client(transport))
        for server in servers:
            assert client.get(str(server)).status_code == 200
            assert len(transport._paces) <= 2
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
        await send_answer(send, 200, {"ratelimit-policy": '"a";q=10;w=864', "ratelimit": told})

    async def main() -> None:
        waits: list[float] = []
        transport = AsyncObeyingTransport(clock=clock, jitter=0, on_wait=lambda notice: waits.append(notice.seconds))
        async with patient_async_client(transport) as client:
            await client.get(f"http://{server}")
            slow = asyncio.create_task(client.get(f"http://{server}/slow"))
            await wait_until(lambda: arrived.acquire(blocking=False), "a request")
            other = asyncio.create_task(client.get(f"http://{server}"))
            await wait_until(lambda: bool(waits), "a wait")
            assert waits[0] > 300
            server.call(go_on.set)
            await slow
            await asyncio.sleep(0)
            clock.advance(86)
            assert (await other).status_code == 200

    with app_server(app) as server:
        run(main())


def test_several_policies_are_all_obeyed() -> None:
    clock = SimulatedClock()
    limit = "5/second; 20/minute"
    assert len(parse(limit).parts) == 2
    with recording_server(headgate_app(limit, clock), clock) as server, obeying_client(clock) as client:
        for _ in range(60):
            client.get(str(server))
    assert server.answered == [200] * 60
    assert 120 <= server.moments[-1] <= 120 * 1.05


def test_the_first_answer_of_a_new_server_is_awaited_before_more_is_sent() -> None:
    arrived, answered = threading.Semaphore(0), asyncio.Event()

    async def app(_scope: dict[str, Any], _receive: Receive, send: Send) -> None:
        arrived.release()
        await answered.wait()
        await send_answer(send, 200)

    async def main() -> None:
        async with patient_async_client(AsyncObeyingTransport(clock=ManualClock())) as client:
            tasks = [asyncio.create_task(client.get(f"http://{server}")) for _ in range(20)]
            await wait_until(lambda: arrived.acquire(blocking=False), "a request")
            assert not arrived.acquire(blocking=False)
            server.call(answered.set)
            assert [response.status_code for response in await asyncio.gather(*tasks)] == [200] * 20

    with app_server(app) as server:
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
        app_server(app) as server,
        patient_client(ObeyingTransport()) as client,
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


def test_without_httpx_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.delitem(sys.modules, "headgate.client.http")
    with pytest.raises(HeadgateError, match=r"expected httpx .* in a checkout: pip install '\.\[client\]'"):
        importlib.import_module("headgate.client.http")
