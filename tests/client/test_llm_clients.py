"""The SDKs of OpenAI and Anthropic on transports that obey, before a real HTTP server with the limits of theirs.

OpenAI's takes clients of httpx and of httpx2, Anthropic's those of httpx2.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import anthropic
import httpx
import httpx2
import openai
import pytest

from headgate import InvalidInput
from headgate.client.http import AsyncObeyingTransport, ObeyingTransport, TooLong, WaitNotice
from headgate.client.pacing import Tokens
from tests.support.event_loop import run
from tests.support.llm_server import WORDS, Dialect, LlmServer
from tests.support.obeying_transports import (
    OPTIONS,
    AsyncCountingTransport,
    CountingTransport,
    RecordingServer,
    ScriptedApp,
    SimulatedClock,
    obeying_client,
    recording_server,
    retry_after,
)

pytestmark = [pytest.mark.long, pytest.mark.once]

TEXT = "".join(WORDS)
Kind = Literal["bucket", "window"]
Ask = Callable[..., str]
AsyncAsk = Callable[..., Coroutine[Any, Any, str]]


class Sdk(NamedTuple):
    dialect: Dialect
    library: Any

    def client(self, url: RecordingServer, http: Any, **options: Any) -> Ask:
        if self.dialect == "openai":
            return partial(ask_openai, openai.OpenAI(api_key="key", base_url=f"{url}/v1", http_client=http, **options))
        client = anthropic.Anthropic(api_key="key", base_url=str(url), http_client=http, **options)
        return partial(ask_anthropic, client)

    def async_client(self, url: RecordingServer, http: Any, **options: Any) -> AsyncAsk:
        if self.dialect == "openai":
            client = openai.AsyncOpenAI(api_key="key", base_url=f"{url}/v1", http_client=http, **options)
            return partial(async_ask_openai, client)
        other = anthropic.AsyncAnthropic(api_key="key", base_url=str(url), http_client=http, **options)
        return partial(async_ask_anthropic, other)


OPENAI, ANTHROPIC = Sdk("openai", httpx), Sdk("anthropic", httpx2)
every_sdk = pytest.mark.parametrize(
    "sdk", [OPENAI, Sdk("openai", httpx2), ANTHROPIC], ids=["openai", "openai-httpx2", "anthropic"]
)
both_sdks = pytest.mark.parametrize("sdk", [OPENAI, ANTHROPIC], ids=["openai", "anthropic"])
both_kinds = pytest.mark.parametrize("kind", ["bucket", "window"])
streamed_or_not = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def serve(app: Any, clock: SimulatedClock) -> Any:
    return recording_server(app, clock, date_header=False)  # the application has its own, by the simulated clock


def make_random() -> Callable[[], float]:
    return random.Random(7).random


# The SDKs, each with one function that asks for a text ----------------------------------------------------------------


@contextmanager
def sdk_caller(
    sdk: Sdk, url: RecordingServer, clock: SimulatedClock, max_retries: int = 2, **options: Any
) -> Iterator[Ask]:
    """A function that asks through an SDK. The options are those of the transport."""
    counting = CountingTransport(clock, sdk.library.HTTPTransport(**OPTIONS))
    transport = ObeyingTransport(counting, clock=clock, random=make_random(), **options)
    with sdk.library.Client(transport=transport) as http:
        yield sdk.client(url, http, max_retries=max_retries)


@asynccontextmanager
async def async_sdk_caller(
    sdk: Sdk, url: RecordingServer, clock: SimulatedClock, **options: Any
) -> AsyncIterator[AsyncAsk]:
    counting = AsyncCountingTransport(clock, sdk.library.AsyncHTTPTransport(**OPTIONS))
    transport = AsyncObeyingTransport(counting, clock=clock, random=make_random(), **options)
    async with sdk.library.AsyncClient(transport=transport) as http:
        yield sdk.async_client(url, http)


def ask_openai(client: openai.OpenAI, stream: bool = False, most: int = 100) -> str:
    messages: Any = [{"role": "user", "content": "hello"}]
    if stream:
        with client.chat.completions.create(model="m", messages=messages, max_tokens=most, stream=True) as chunks:
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    answer = client.chat.completions.create(model="m", messages=messages, max_tokens=most)
    return answer.choices[0].message.content or ""


def ask_anthropic(client: anthropic.Anthropic, stream: bool = False, most: int = 100) -> str:
    messages: Any = [{"role": "user", "content": "hello"}]
    if stream:
        with client.messages.stream(model="m", messages=messages, max_tokens=most) as chunks:
            return "".join(chunks.text_stream)
    answer = client.messages.create(model="m", messages=messages, max_tokens=most)
    return answer.content[0].text  # type: ignore[union-attr]


async def async_ask_openai(client: openai.AsyncOpenAI, stream: bool = False, most: int = 100) -> str:
    messages: Any = [{"role": "user", "content": "hello"}]
    if stream:
        chunks = await client.chat.completions.create(model="m", messages=messages, max_tokens=most, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
    answer = await client.chat.completions.create(model="m", messages=messages, max_tokens=most)
    return answer.choices[0].message.content or ""


async def async_ask_anthropic(client: anthropic.AsyncAnthropic, stream: bool = False, most: int = 100) -> str:
    messages: Any = [{"role": "user", "content": "hello"}]
    if stream:
        async with client.messages.stream(model="m", messages=messages, max_tokens=most) as chunks:
            return "".join([text async for text in chunks.text_stream])
    answer = await client.messages.create(model="m", messages=messages, max_tokens=most)
    return answer.content[0].text  # type: ignore[union-attr]


# Requests per minute --------------------------------------------------------------------------------------------------


def check_duration(server: RecordingServer, kind: Kind, calls: int, in_time: float) -> None:
    """All were answered, none was denied, and no more time was lost than the headers leave open."""
    assert server.answered == [200] * calls
    assert in_time <= server.moments[-1] <= in_time * 1.03 + 3


@every_sdk
@both_kinds
@streamed_or_not
def test_12_calls_at_10_a_minute_are_not_denied(sdk: Sdk, kind: Kind, stream: bool) -> None:
    clock = SimulatedClock()
    with (
        serve(LlmServer(clock, sdk.dialect, kind=kind), clock) as server,
        sdk_caller(sdk, server, clock) as ask,
    ):
        assert [ask(stream) for _ in range(12)] == [TEXT] * 12
    check_duration(server, kind, 12, 60 if kind == "window" else 12)


@pytest.mark.long
@every_sdk
@both_kinds
@pytest.mark.parametrize(("stream", "at_once"), [(True, 1), (False, 12), (True, 12)])
def test_12_calls_in_a_loop(sdk: Sdk, kind: Kind, stream: bool, at_once: int) -> None:
    clock = SimulatedClock()

    async def main() -> None:
        async with async_sdk_caller(sdk, server, clock) as ask:
            for _ in range(12 // at_once):
                assert await asyncio.gather(*(ask(stream) for _ in range(at_once))) == [TEXT] * at_once

    with serve(LlmServer(clock, sdk.dialect, kind=kind), clock) as server:
        run(main())
    check_duration(server, kind, 12, 60 if kind == "window" else 12)


def test_calls_of_several_threads() -> None:
    clock = SimulatedClock()
    with (
        serve(LlmServer(clock, "openai"), clock) as server,
        sdk_caller(OPENAI, server, clock) as ask,
        ThreadPoolExecutor(12) as pool,
    ):
        assert list(pool.map(lambda _: ask(), range(12))) == [TEXT] * 12
    check_duration(server, "window", 12, 60)


@both_kinds
def test_without_a_date_moments_are_compared_with_the_local_clock(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimulatedClock()
    monkeypatch.setattr("headgate.http.headers.time.time", lambda: 1767225600 + clock.now() / 1_000_000)
    with (
        serve(LlmServer(clock, "anthropic", kind=kind, date=False), clock) as server,
        sdk_caller(ANTHROPIC, server, clock) as ask,
    ):
        assert [ask() for _ in range(12)] == [TEXT] * 12
    check_duration(server, kind, 12, 60 if kind == "window" else 12)


# Tokens per minute ----------------------------------------------------------------------------------------------------


@pytest.mark.long
@both_sdks
@both_kinds
@pytest.mark.parametrize(("stream", "at_once"), [(False, 1), (True, 5), (False, 20)])
def test_tokens_are_paced_by_what_requests_have_cost(sdk: Sdk, kind: Kind, stream: bool, at_once: int) -> None:
    clock = SimulatedClock()
    app = LlmServer(clock, sdk.dialect, requests=1000, tokens=1000, kind=kind, cost=lambda _: 180)

    async def main() -> None:
        async with async_sdk_caller(sdk, server, clock) as ask:
            for _ in range(20 // at_once):
                await asyncio.gather(*(ask(stream) for _ in range(at_once)))

    with serve(app, clock) as server:
        run(main())
    check_duration(server, kind, 20, 180 if kind == "window" else (20 * 180 - 1000) * 60 / 1000)


def stated_tokens(request: httpx.Request) -> Tokens:
    return int(json.loads(request.content)["max_tokens"])


@both_sdks
@both_kinds
def test_tokens_are_paced_by_what_the_caller_expects(sdk: Sdk, kind: Kind) -> None:
    clock = SimulatedClock()
    app = LlmServer(
        clock, sdk.dialect, requests=1000, tokens=1000, kind=kind, cost=lambda body: int(body["max_tokens"])
    )
    costs = [10, 700, 20, 900, 300, 50, 1000, 10] * 2

    async def main() -> None:
        async with async_sdk_caller(sdk, server, clock, tokens=stated_tokens) as ask:
            await asyncio.gather(*(ask(most=most) for most in costs))

    with serve(app, clock) as server:
        run(main())
    assert server.answered == [200] * 16


def test_a_request_that_is_expected_to_cost_more_than_the_limit_is_sent_all_the_same() -> None:
    clock = SimulatedClock()
    app = LlmServer(clock, "openai", tokens=1000)
    with (
        serve(app, clock) as server,
        sdk_caller(OPENAI, server, clock, tokens=lambda _: 5000) as ask,
    ):
        assert [ask(), ask()] == [TEXT, TEXT]
    check_duration(server, "window", 2, 60)


def test_a_denial_after_an_estimate_that_was_too_low_is_retried_when_the_server_says() -> None:
    clock = SimulatedClock()
    app = LlmServer(clock, "openai", tokens=1000, kind="bucket", cost=lambda body: body["max_tokens"])
    with serve(app, clock) as server, sdk_caller(OPENAI, server, clock) as ask:
        assert [ask(most=100), ask(most=100), ask(most=900)] == [TEXT] * 3
    assert server.answered == [200, 200, 429, 200]
    assert 6 <= server.moments[-1] <= 7.5


def test_where_the_tokens_of_a_stream_are_charged_at_its_end_one_call_in_a_window_may_be_denied() -> None:
    clock = SimulatedClock()
    app = LlmServer(clock, "anthropic", requests=1000, tokens=1000, cost=lambda _: 180, stream_costs=True)
    with serve(app, clock) as server, sdk_caller(ANTHROPIC, server, clock) as ask:
        assert [ask(True) for _ in range(20)] == [TEXT] * 20
    assert server.answered.count(429) <= 3, "its own cost is in no header yet"


def test_the_notice_says_what_is_waited_for() -> None:
    clock, notices = SimulatedClock(), list[WaitNotice]()
    app = LlmServer(clock, "openai", requests=1000, tokens=300)
    with serve(app, clock) as server, sdk_caller(OPENAI, server, clock, on_wait=notices.append) as ask:
        for _ in range(4):
            ask()
    assert [notice.why for notice in notices] == ["too little is left under 'tokens'"]


@pytest.mark.parametrize("given", [-1, 1.5, "many", {"tokens": -1}, True])
def test_expected_costs_are_checked(given: Any) -> None:
    text = "tokens: expected a function that returns whole numbers, 0 or more"
    with obeying_client(SimulatedClock(), tokens=lambda _: given) as http, pytest.raises(InvalidInput, match=text):
        http.get("http://127.0.0.1")
    with pytest.raises(InvalidInput, match=r"tokens: expected a function that takes an httpx\.Request, got 5"):
        ObeyingTransport(tokens=5)  # type: ignore[arg-type]


# Retries, streams and errors ------------------------------------------------------------------------------------------

RateLimitError = (openai.RateLimitError, anthropic.RateLimitError)
APIConnectionError = (openai.APIConnectionError, anthropic.APIConnectionError)


@every_sdk
def test_the_retries_of_the_sdk_and_of_the_transport_do_not_multiply(sdk: Sdk) -> None:
    clock, script = SimulatedClock(), ScriptedApp(*[(429, retry_after(1))] * 99)
    with (
        recording_server(script, clock) as server,
        sdk_caller(sdk, server, clock, retries=3) as ask,
        pytest.raises(RateLimitError) as raised,
    ):
        ask()
    assert server.answered == [429] * 4
    assert isinstance(raised.value, RateLimitError)
    assert raised.value.response.headers["retry-after"] == "1"
    clock = SimulatedClock()
    with (
        recording_server(ScriptedApp(*[(429, retry_after(9999))] * 99), clock) as server,
        sdk_caller(sdk, server, clock) as ask,
        pytest.raises(RateLimitError),
    ):
        ask()
    assert server.answered == [429]


@every_sdk
def test_the_retries_of_the_sdk_do_not_multiply_in_a_loop(sdk: Sdk) -> None:
    clock = SimulatedClock()

    async def main() -> None:
        async with async_sdk_caller(sdk, server, clock, retries=3) as ask:
            with pytest.raises(RateLimitError):
                await ask(stream=True)

    with recording_server(ScriptedApp(*[(429, retry_after(1))] * 99), clock) as server:
        run(main())
    assert server.answered == [429] * 4


def test_without_retries_of_the_transport_those_of_the_sdk_remain() -> None:
    clock, script = SimulatedClock(), ScriptedApp((429, {"retry-after-ms": "1"}), (429, {"retry-after-ms": "1"}))
    with recording_server(script, clock) as server, sdk_caller(OPENAI, server, clock, retries=0, max_retries=1) as ask:
        with pytest.raises(openai.RateLimitError):
            ask()
        assert server.answered == [429, 429]


@both_sdks
def test_the_sdk_still_retries_other_failures(sdk: Sdk) -> None:
    clock = SimulatedClock()
    script = ScriptedApp(*[(500, {"retry-after-ms": "1"})] * 99)
    with (
        recording_server(script, clock) as server,
        sdk_caller(sdk, server, clock, max_retries=2) as ask,
        pytest.raises((openai.InternalServerError, anthropic.InternalServerError)),
    ):
        ask()
    assert server.answered == [500] * 3


def test_a_denial_is_returned_unchanged_to_other_clients() -> None:
    clock = SimulatedClock()
    with (
        recording_server(ScriptedApp((429, retry_after(1))), clock) as server,
        obeying_client(clock, retries=0) as http,
    ):
        assert "x-should-retry" not in http.get(str(server)).headers


def test_a_server_that_says_so_gets_no_retry() -> None:
    clock = SimulatedClock()
    script = ScriptedApp((429, {"x-should-retry": "false"}))
    with (
        recording_server(script, clock) as server,
        sdk_caller(OPENAI, server, clock) as ask,
        pytest.raises(openai.RateLimitError),
    ):
        ask()
    assert server.answered == [429]


def test_a_wait_in_milliseconds_is_kept() -> None:
    clock = SimulatedClock()
    script = ScriptedApp((429, {"retry-after-ms": "250", "retry-after": "1"}))
    with recording_server(script, clock) as server, obeying_client(clock, jitter=0) as http:
        assert http.get(str(server)).status_code == 200
    assert server.moments == [0, 0.25]


@both_sdks
def test_a_wait_that_is_too_long_is_a_connection_error_to_the_sdk(sdk: Sdk) -> None:
    clock = SimulatedClock()
    with (
        serve(LlmServer(clock, sdk.dialect, requests=1), clock) as server,
        sdk_caller(sdk, server, clock, most_wait=5, max_retries=0) as ask,
    ):
        ask()
        with pytest.raises(APIConnectionError) as raised:
            ask()
    assert isinstance(raised.value.__cause__, TooLong)
    assert server.answered == [200]


def test_a_stream_is_passed_on_as_it_comes() -> None:
    clock, go_on = SimulatedClock(), asyncio.Event()
    app = LlmServer(clock, "openai")
    app.go_on = go_on
    with serve(app, clock) as server, obeying_client(clock) as http:
        client = openai.OpenAI(api_key="key", base_url=f"{server}/v1", http_client=http)  # type: ignore[arg-type]
        with client.chat.completions.create(model="m", messages=[], stream=True) as chunks:
            words = (chunk.choices[0].delta.content for chunk in chunks)
            assert next(words) == WORDS[0], "the server sends no more before it was heard"
            server.call(go_on.set)
            assert list(words) == [*WORDS[1:]]
    assert "x-stainless-retry-count" in app.requests[0]


def test_calls_go_on_while_streams_are_open() -> None:
    """The headers of a stream are enough to learn from."""
    clock, go_on = SimulatedClock(), asyncio.Event()
    app = LlmServer(clock, "openai")
    app.go_on = go_on

    async def main() -> None:
        async with async_sdk_caller(OPENAI, server, clock) as ask:
            streams = [asyncio.create_task(ask(True)) for _ in range(9)]
            assert await ask() == TEXT
            assert not any(stream.done() for stream in streams)
            server.call(go_on.set)
            assert await asyncio.gather(*streams) == [TEXT] * 9

    with serve(app, clock) as server:
        run(main())
    assert server.answered == [200] * 10


# The default transport ------------------------------------------------------------------------------------------------


@every_sdk
def test_by_default_requests_are_sent_by_the_library_that_they_are_from(sdk: Sdk) -> None:
    clock = SimulatedClock()
    transport, async_transport = ObeyingTransport(clock=clock), AsyncObeyingTransport(clock=clock)

    async def main() -> None:
        async with sdk.library.AsyncClient(transport=async_transport) as http:
            assert await sdk.async_client(server, http)() == TEXT
        assert [type(made).__module__.split(".")[0] for made in async_transport._made.values()] == [
            sdk.library.__name__
        ]
        assert [len(made._pool.connections) for made in async_transport._made.values()] == [0]  # type: ignore[attr-defined]

    with serve(LlmServer(clock, sdk.dialect), clock) as server:
        with sdk.library.Client(transport=transport) as http:
            assert sdk.client(server, http)() == TEXT
            (made,) = transport._made.values()
            assert type(made).__module__.split(".")[0] == sdk.library.__name__
            assert made._pool.connections  # type: ignore[attr-defined]
        assert not made._pool.connections  # type: ignore[attr-defined]
        run(main())


def test_an_upload_that_cannot_be_repeated_here_is_retried_by_the_sdk() -> None:
    clock, script = SimulatedClock(), ScriptedApp((429, {"retry-after-ms": "1"}))
    with recording_server(script, clock) as server, obeying_client(clock) as http:
        client = openai.OpenAI(api_key="key", base_url=f"{server}/v1", http_client=http)  # type: ignore[arg-type]
        text: Any = client.audio.transcriptions.create(file=("a.wav", b"sound"), model="m", response_format="text")
    assert text == "answer 2"
    assert server.answered == [429, 200]
