"""Pauses of clients that flood."""

import pytest

from headgate import Limiter, ManualClock, MemoryStore
from headgate.edges.flood import DENIALS, LONGEST_PAUSE, pause

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("limit", "connections", "expected"),
    [
        ("1/minute", 1, 1 / DENIALS),
        ("1/minute", 20, 20 / DENIALS),
        ("1/minute", 100 * DENIALS, LONGEST_PAUSE),
        ("100/second burst 1", 100 * DENIALS, 0.01),  # until the next token, and no longer
        ("blocked", 100 * DENIALS, LONGEST_PAUSE),
    ],
)
def test_floods_share_a_budget_and_wait_no_longer_than_their_next_token(
    limit: str, connections: int, expected: float
) -> None:
    limiter = Limiter(limit, store=MemoryStore(clock=ManualClock()))
    limiter.check("a")
    assert pause(connections, limiter.check("a")) == expected
