"""A server of language models on a simulated clock, with the paths, bodies and headers of OpenAI and of Anthropic."""

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from fractions import Fraction
from typing import Any, Literal

from headgate import ManualClock
from tests.support.obeying_transports import Headers, Receive, Send

Dialect = Literal["openai", "anthropic"]
Cost = Callable[[dict[str, Any]], int]
START = datetime(2026, 1, 1, tzinfo=UTC)
MINUTE = 60_000_000
WORDS = ("once", " upon", " a", " time")


class Quota:
    """So much a minute: a bucket that fills steadily, or a window that starts over at each minute."""

    def __init__(self, clock: ManualClock, most: int, kind: Literal["bucket", "window"]) -> None:
        self._clock, self.most, self._kind = clock, most, kind
        self._left, self._at = Fraction(most), 0

    @property
    def left(self) -> Fraction:
        now = self._clock.now()
        if self._kind == "bucket":
            self._left = min(Fraction(self.most), self._left + Fraction((now - self._at) * self.most, MINUTE))
        elif now // MINUTE > self._at // MINUTE:
            self._left = Fraction(self.most)
        self._at = now
        return self._left

    def spend(self, cost: int) -> None:
        self._left = self.left - cost

    @property
    def reset(self) -> Fraction:
        """Microseconds until all is back."""
        if self._kind == "bucket":
            return (self.most - self.left) * MINUTE / self.most
        return Fraction(MINUTE - self._clock.now() % MINUTE)

    def wait(self, cost: int) -> Fraction:
        """Microseconds until so much is back."""
        return (cost - self.left) * MINUTE / self.most if self._kind == "bucket" else self.reset


class LlmServer:
    """An ASGI application. `cost` tells the tokens of a request by its body; `requests` has their headers.

    With `stream_costs`, the tokens of a stream are charged when it ends. A stream waits for `go_on` after its first
    word, if that is set to an event.
    """

    def __init__(
        self,
        clock: ManualClock,
        dialect: Dialect,
        *,
        requests: int = 10,
        tokens: int = 1_000_000,
        kind: Literal["bucket", "window"] = "window",
        cost: Cost = lambda _: 100,
        stream_costs: bool = False,
        date: bool = True,
    ) -> None:
        self._clock, self._dialect, self._cost, self._date = clock, dialect, cost, date
        self._requests, self._tokens = Quota(clock, requests, kind), Quota(clock, tokens, kind)
        self._stream_costs = stream_costs
        self.go_on: asyncio.Event | None = None
        self.requests: list[Headers] = []

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        body = json.loads(await _read(receive))
        self.requests.append({name.decode(): value.decode() for name, value in scope["headers"]})
        cost = self._cost(body)
        stream = bool(body.get("stream"))
        if self._requests.left < 1 or self._tokens.left < cost:
            wait = max(self._requests.wait(1), self._tokens.wait(cost))
            headers = self._headers() | {"retry-after": str(-(-wait // 1_000_000))}
            error = {"type": "error", "error": {"type": "rate_limit_error", "message": "too many", "code": "429"}}
            await _answer(send, 429, headers, json.dumps(error).encode())
            return
        self._requests.spend(1)
        if stream and self._stream_costs:
            await self._send_stream(send)
            self._tokens.spend(cost)
            return
        self._tokens.spend(cost)
        if stream:
            await self._send_stream(send)
        else:
            await _answer(send, 200, self._headers(), json.dumps(_MESSAGES[self._dialect]).encode())

    async def _send_stream(self, send: Send) -> None:
        await _start(send, 200, self._headers() | {"content-type": "text/event-stream"})
        for event in _EVENTS[self._dialect]():
            await send({"type": "http.response.body", "body": event, "more_body": True})
            if self.go_on is not None and WORDS[0].encode() in event:
                await self.go_on.wait()
        await send({"type": "http.response.body"})

    def _headers(self) -> Headers:
        headers = state_quotas(self._dialect, self._requests, self._tokens, self._clock.now())
        return headers if self._date else {name: value for name, value in headers.items() if name != "date"}


def state_quotas(dialect: Dialect, requests: Quota, tokens: Quota, microseconds: int) -> Headers:
    """The headers of a response at a time."""
    now = START + timedelta(microseconds=microseconds)
    found = {"date": format_datetime(now, usegmt=True)}
    for name, quota in {"requests": requests, "tokens": tokens}.items():
        left, moment = str(int(quota.left)), now + timedelta(microseconds=int(quota.reset))
        if dialect == "openai":
            found[f"x-ratelimit-limit-{name}"] = str(quota.most)
            found[f"x-ratelimit-remaining-{name}"] = left
            found[f"x-ratelimit-reset-{name}"] = format_duration(quota.reset)
        else:
            found[f"anthropic-ratelimit-{name}-limit"] = str(quota.most)
            found[f"anthropic-ratelimit-{name}-remaining"] = left
            found[f"anthropic-ratelimit-{name}-reset"] = moment.strftime("%Y-%m-%dT%H:%M:%SZ")  # rounded down
    return found


def format_duration(microseconds: Fraction) -> str:
    """A duration as Go writes it, in milliseconds, rounded up: "17ms", "6m0s", "1h2m3.5s"."""
    milliseconds = -(-microseconds // 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{rest / 1000:g}s"
    return f"{hours}h{minutes}m{text}" if hours else f"{minutes}m{text}" if minutes else text


async def _read(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


async def _start(send: Send, status: int, headers: Headers) -> None:
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})


async def _answer(send: Send, status: int, headers: Headers, body: bytes) -> None:
    await _start(send, status, headers | {"content-type": "application/json", "content-length": str(len(body))})
    await send({"type": "http.response.body", "body": body})


_MESSAGES: dict[Dialect, dict[str, Any]] = {
    "openai": {
        "id": "1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "".join(WORDS)}, "finish_reason": "stop"}],
    },
    "anthropic": {
        "id": "1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "".join(WORDS)}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 4},
    },
}


def _openai_events() -> list[bytes]:
    found = []
    for word in WORDS:
        choice = {"index": 0, "delta": {"content": word}, "finish_reason": None}
        chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
        found.append(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    return [*found, b"data: [DONE]\n\n"]


def _anthropic_events() -> list[bytes]:
    message = {**_MESSAGES["anthropic"], "content": [], "stop_reason": None}
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    ]
    events += [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}} for word in WORDS
    ]
    events += [
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 4}},
        {"type": "message_stop"},
    ]
    return [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events]


_EVENTS: dict[Dialect, Callable[[], list[bytes]]] = {"openai": _openai_events, "anthropic": _anthropic_events}
