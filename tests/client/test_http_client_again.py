"""Transports that obey, over real sockets: what is sent again, and what is not."""

import asyncio
from contextlib import suppress
from typing import Any

import httpx
import pytest

from headgate import HeadgateError, ManualClock
from headgate.client.http import AsyncObeyingTransport, TooLong, WaitNotice
from tests.support.asgi_server import app_server
from tests.support.event_loop import run, wait_until
from tests.support.obeying_transports import (
    Headers,
    Receive,
    ScriptedApp,
    Send,
    SimulatedClock,
    obeying_client,
    patient_async_client,
    recording_server,
    retry_after,
    send_answer,
)
from tests.support.ports import unused_port

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("request_of", "first", "tries"),
    [
        ({"method": "GET"}, (429, retry_after(3)), 2),
        ({"method": "POST", "json": {"a": 1}}, (429, retry_after(3)), 2),
        ({"method": "POST", "content": b"text"}, (429, {}), 2),
        ({"method": "POST", "content": iter([b"te", b"xt"])}, (429, retry_after(3)), 1),
        ({"method": "GET"}, (503, retry_after(3)), 2),
        ({"method": "PUT", "content": b"text"}, (503, retry_after(3)), 2),
        ({"method": "POST", "content": b"text"}, (503, retry_after(3)), 1),
        ({"method": "POST", "content": b"text", "headers": {"Idempotency-Key": "7"}}, (503, retry_after(3)), 2),
        ({"method": "GET"}, (503, {}), 1),
        ({"method": "GET"}, (500, retry_after(3)), 1),
    ],
)
def test_requests_that_are_safe_to_repeat_are_sent_again(
    request_of: Any, first: tuple[int, Headers], tries: int
) -> None:
    clock, script = SimulatedClock(), ScriptedApp(first)
    with recording_server(script, clock) as server, obeying_client(clock) as client:
        response = client.request(url=str(server), **request_of)
        assert server.answered == [first[0], 200][:tries]
        assert response.status_code == server.answered[-1]
        assert response.text == f"answer {tries}"
        assert set(script.bodies) == {response.request.read() if tries == 2 else script.bodies[0]}
        if tries == 2 and first[1]:
            assert 3 <= server.moments[1] <= 3 * 1.03


def test_after_a_connection_error_nothing_is_sent_again() -> None:
    clock = SimulatedClock()
    with unused_port() as port, obeying_client(clock) as client, pytest.raises(httpx.ConnectError):
        client.post(f"http://127.0.0.1:{port}", json={})
    assert clock.now() == 0


def test_after_a_broken_connection_nothing_is_sent_again_and_the_next_in_line_goes_on() -> None:
    notices: list[WaitNotice] = []
    lines: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines.append(await reader.readline())
        await reader.readuntil(b"\r\n\r\n")
        if len(lines) == 1:
            await wait_until(lambda: bool(notices), "a wait")  # somebody waits for the first answer
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async def main() -> None:
        transport = AsyncObeyingTransport(clock=ManualClock(), on_wait=notices.append)
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, patient_async_client(transport) as client:
            both = client.post(url, json={}), client.get(url)
            broken, answered = await asyncio.gather(*both, return_exceptions=True)
            assert isinstance(broken, httpx.RemoteProtocolError)
            assert isinstance(answered, httpx.Response)
            assert answered.status_code == 200
        assert [line.split()[0] for line in lines] == [b"POST", b"GET"]

    run(main())


def test_after_the_last_retry_the_denial_is_returned_unchanged() -> None:
    clock = SimulatedClock()
    with (
        recording_server(ScriptedApp(*[(429, retry_after(1))] * 9), clock) as server,
        obeying_client(clock, retries=2) as client,
    ):
        response = client.get(str(server))
        assert (response.status_code, response.text) == (429, "answer 3")
        assert len(server.peers) == 1, "one connection served all tries"
    with (
        recording_server(ScriptedApp(*[(429, retry_after(1))] * 9), clock) as server,
        obeying_client(clock, retries=0) as client,
    ):
        assert client.get(str(server)).text == "answer 1"


def test_a_wait_that_is_too_long_is_not_waited_for() -> None:
    clock = SimulatedClock()
    with recording_server(ScriptedApp((429, retry_after(3600))), clock) as server, obeying_client(clock) as client:
        assert client.get(str(server)).status_code == 429
        text = r"allows nothing for 36\d\d\.\d s, and a request waits at most 300 s; try again then, or give"
        with pytest.raises(TooLong, match=text) as no:
            client.get(str(server))
        assert no.value.retry_after is not None
        assert no.value.retry_after >= 3600
        assert isinstance(no.value, HeadgateError)
        assert (clock.now(), server.answered) == (0, [429])
        clock.advance(3600 * 1.03)
        assert client.get(str(server)).status_code == 200


def test_the_total_wait_of_a_request_is_bounded() -> None:
    clock = SimulatedClock()
    with (
        recording_server(ScriptedApp(*[(429, retry_after(40))] * 9), clock) as server,
        obeying_client(clock, most_wait=100) as client,
    ):
        assert client.get(str(server)).text == "answer 3"
    assert 80 <= server.moments[-1] <= 100


def test_a_request_that_may_wait_no_longer_does_not_queue_again() -> None:
    clock = ManualClock()
    notices: list[WaitNotice] = []

    async def main() -> None:
        transport = AsyncObeyingTransport(clock=clock, jitter=0, most_wait=100, on_wait=notices.append)
        async with patient_async_client(transport) as client:
            first = asyncio.create_task(client.get(str(server)))
            await wait_until(lambda: len(notices) == 1, "a wait")
            second = asyncio.create_task(client.get(str(server)))
            await asyncio.sleep(0)
            clock.advance(60)
            assert (await first).text == "answer 2"
            await wait_until(lambda: len(notices) > 1 and notices[-1].seconds == 60, "a wait")
            clock.advance(60)
            assert (await second).text == "answer 3"

    with recording_server(ScriptedApp((429, retry_after(60)), (429, retry_after(60))), clock) as server:
        run(main())


def test_a_denial_that_is_given_back_after_all_still_has_its_body() -> None:
    heard = asyncio.Event()

    async def app(scope: dict[str, Any], _receive: Receive, send: Send) -> None:
        if scope["path"] == "/long":
            await heard.wait()
            await send_answer(send, 429, retry_after(1000), b"long")
        elif scope["path"] == "/short":
            await send_answer(send, 429, retry_after(10), b"short")
        else:
            await send_answer(send, 200)

    async def main() -> list[str]:
        transport = AsyncObeyingTransport(clock=ManualClock(), on_wait=lambda _: server.call(heard.set))
        async with patient_async_client(transport) as client:
            await client.get(f"http://{server}")
            both = (client.get(f"http://{server}/{path}") for path in ("short", "long"))
            return [response.text for response in await asyncio.gather(*both)]

    with app_server(app) as server:
        assert run(main()) == ["short", "long"]


BAD = ["-5", "nan", "inf", "1e999", "soon", "9" * 14, "9" * 40, "", "Wed, 99 Foo 2020", "Sun, 06 Nov 9994 08:49:37 GMT"]


def test_bad_headers_cause_no_long_wait() -> None:
    async def app(scope: dict[str, Any], _receive: Receive, send: Send) -> None:
        value = dict(scope["headers"])[b"value"].decode()
        told = {
            "retry-after": value,
            "ratelimit-policy": f'"a";q={value};w={value}',
            "ratelimit": f'"a";r=0;t={value}',
            "x-ratelimit-remaining": "0",
            "x-ratelimit-reset": value,
        }
        await send_answer(send, 200 if scope["path"] == "/pass" else 429, told)

    with app_server(app) as server:
        for value in BAD:
            clock = SimulatedClock()
            with obeying_client(clock, retries=1) as client:
                for path in ("pass", "deny", "pass"):
                    with suppress(TooLong):  # at once, where the wait would be longer
                        client.get(f"http://{server}/{path}", headers={"value": value})
            assert clock.now() <= 300 * 1_000_000, value
