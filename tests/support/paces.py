"""A client's pace, asked and told in seconds."""

from typing import Any

from headgate.client.pacing import SECOND, Pace, SentRequest
from headgate.http import RateLimitHeaders


def wait(pace: Pace, now: float = 0, tokens: Any = None) -> float:
    """Seconds from a moment until the next request may be sent."""
    return max(pace.earliest(round(now * SECOND), tokens)[0] / SECOND - now, 0)


def send(pace: Pace, now: float = 0, tokens: Any = None) -> SentRequest:
    assert wait(pace, now, tokens) == 0
    return pace.send(round(now * SECOND), tokens)


def answer(
    pace: Pace, sent: SentRequest, headers: RateLimitHeaders, now: float = 0, status: int = 200, jitter: float = 0.0
) -> bool:
    return pace.answer(sent, round(now * SECOND), status, headers, jitter)


def pace_after(*answers: RateLimitHeaders) -> Pace:
    """A pace after some requests, one after the other."""
    pace = Pace()
    for headers in answers:
        answer(pace, send(pace), headers)
    return pace
