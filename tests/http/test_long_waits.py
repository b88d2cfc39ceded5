"""Limits whose full quota takes longer to come back than a clock can count, or a header can say."""

import asyncio
import re

import httpx
import pytest

from headgate import Decision, Limiter, ManualClock, MemoryStore
from headgate.edges.asgi import RateLimitMiddleware
from headgate.http import HeaderWriter, describe_denial, read_headers
from headgate.limits.numbers import LARGEST
from headgate.limits.token_bucket import TokenBucket

YEAR = 31_536_000
LONG = ["1/year burst 1000000", "1/year burst 100000000", "1 per 1000000 years burst 5", "1 per 250 years burst 3"]


def written_headers(limiter: Limiter, decision: Decision, dialect: str) -> dict[str, str]:
    writer = HeaderWriter(dialect).for_limit(limiter.limit)  # type: ignore[arg-type]
    return {name.decode(): value.decode() for name, value in writer.write(decision)}


@pytest.mark.parametrize("dialect", ["ratelimit", "x-ratelimit", "both"])
@pytest.mark.parametrize("text", LONG)
def test_headers_of_a_limit_that_takes_ages(text: str, dialect: str) -> None:
    """Whoever waits as long as they say is never early, as far as a clock goes."""
    clock = ManualClock()
    limiter = Limiter(text, store=MemoryStore(clock=clock))
    assert isinstance(limiter.limit, TokenBucket)
    _, refill, per = limiter.limit.fields()
    longest = min(int(per / refill), LARGEST // 1_000_000) + 1
    capacity = limiter.limit.capacity
    decisions = [
        limiter.check("a"),
        limiter.check("a", capacity - 1),
        limiter.check("a"),
        limiter.check("a", capacity + 1),
    ]
    assert [bool(decision) for decision in decisions] == [True, True, False, False]
    clock.advance(1)
    decisions.append(limiter.peek("a"))
    for decision in decisions:
        headers = written_headers(limiter, decision, dialect)
        read = read_headers(headers, now=1.8e9)
        (limit,) = read.limits
        assert limit.remaining == decision.remaining
        if decision.retry_after is None:
            assert limit.reset is None
        elif decision.remaining == 0 and dialect != "x-ratelimit":
            assert limit.reset is not None
            assert longest - 2 <= limit.reset <= longest
        for number in re.findall(r"\d+", " ".join(headers.values())):
            assert len(number) <= 15, "no structured field holds more digits"
    problem = describe_denial(decisions[2], "default")
    assert 0 < problem.retry_after_ms <= 1000 * longest


@pytest.mark.parametrize("text", LONG)
def test_a_limit_that_takes_ages_behind_the_middleware(text: str) -> None:
    async def app(_scope: object, _receive: object, send: object) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": b"ok"})  # type: ignore[operator]

    async def statuses() -> list[int]:
        limiter = Limiter(text)
        guarded = RateLimitMiddleware(app, limiter=limiter, headers="both")
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guarded), base_url="http://test") as client:
            first = await client.get("/")
            limiter.charge("127.0.0.1", limiter.limit.capacity - 2)
            return [response.status_code for response in (first, await client.get("/"), await client.get("/"))]

    assert asyncio.run(statuses()) == [200, 200, 429]
