"""Sessions: requirements E1 to E7."""

from typing import Any

import pytest

from headgate import (
    BLOCKED,
    UNLIMITED,
    Gate,
    HeadgateError,
    InvalidInput,
    RateLimited,
    SessionClosed,
    SlidingWindow,
    limited,
)


def test_e1_each_session_has_a_budget_of_its_own(gate: Gate, verb: Any) -> None:
    for number in range(10):
        session = gate.session("planner", number, limited(rate=1, burst=3))
        assert [bool(verb(session, "check")()) for _ in range(4)] == [True, True, True, False]
    assert gate.active_buckets == 10


def test_e1_the_bucket_is_removed_when_the_session_closes(gate: Gate, verb: Any) -> None:
    session = gate.session("planner", "s", limited(1, 2))
    assert verb(session, "check")(2)
    verb(session, "close")()
    assert gate.active_buckets == 0
    assert gate.session("planner", "s", limited(1, 2)).check().remaining == 1


def test_e1_agents_and_sessions_never_share_a_bucket(gate: Gate) -> None:
    pairs = [("a", "b:c"), ("a:b", "c"), ("1:a", "b"), ("1", ":ab"), ("a", "1"), ("a1", ""), ("a", "")]
    for agent, session in pairs:
        assert gate.session(agent, session, limited(1, 1)).check()
    assert gate.active_buckets == len(pairs)


def test_e1_the_same_session_again_is_the_same_budget(gate: Gate) -> None:
    one = gate.session("planner", 42, limited(1, 2))
    assert gate.session("planner", "42", limited(1, 2)) is one
    with pytest.raises(InvalidInput) as caught:
        gate.session("planner", 42, limited(1, 3))
    assert str(caught.value) == (
        "session 42: expected the limit that it was opened with, 1/second burst 2, "
        "got TokenBucket(capacity=3, refill=1, per=1)"
    )


def test_e2_unlimited_unless_a_rate_and_a_burst_are_given(gate: Gate, verb: Any) -> None:
    session = gate.session("planner", 1)
    assert all(verb(session, "check")(1000) for _ in range(100))
    assert session.limit is UNLIMITED


def test_e3_a_denied_signal_raises_an_error_with_all_details(gate: Gate, verb: Any) -> None:
    session = gate.session("planner", 1, limited(100, 5))
    for _ in range(5):
        assert verb(session, "require")()
    with pytest.raises(RateLimited) as caught:
        verb(session, "require")(5)
    assert str(caught.value) == "rate limited: agent 'planner' at 100 signals/sec, retry after 50ms"
    assert (caught.value.agent_id, caught.value.limit, caught.value.retry_after_ms) == ("planner", 100, 50)
    assert isinstance(caught.value, HeadgateError)


@pytest.mark.parametrize(
    ("limit", "cost", "text"),
    [
        (limited(3000, 1), 1, "at 3000 signals/sec, retry after 1ms"),
        (limited(0.3, 1), 1, "at 0.3 signals/sec, retry after 3334ms"),
        (limited(5, 1), 2, "at 5 signals/sec, no wait would help"),
        (SlidingWindow(1, 60), 1, "at 1/minute sliding, retry after 60000ms"),
        (BLOCKED, 1, "at blocked, no wait would help"),
    ],
    ids=str,
)
def test_e3_the_wait_is_rounded_up_and_never_zero(gate: Gate, limit: Any, cost: int, text: str) -> None:
    session = gate.session("planner", 1, limit)
    session.check()
    with pytest.raises(RateLimited) as caught:
        session.require(cost)
    assert str(caught.value) == f"rate limited: agent 'planner' {text}"


def test_e4_a_closed_session_refuses_before_anything_else(gate: Gate, verb: Any) -> None:
    with gate.session("planner", 42, limited(1, 1)) as session:
        session.check()
    for name in ("check", "require"):
        with pytest.raises(SessionClosed) as caught:
            verb(session, name)(0)
        assert str(caught.value) == "session 42 is closed"
    session.close()
    assert gate.active_buckets == 0


def test_e5_a_session_does_not_limit_its_agent_elsewhere(gate: Gate) -> None:
    """The application's own signals ask no session; and a session's denials take nothing from its agent's tiers."""
    session = gate.session("planner", 1, limited(1, 1))
    session.check()
    assert not session.check()
    assert gate.check("planner", "ws", "normal").remaining == 59


def test_e6_active_buckets_counts_used_sessions_that_are_not_closed(gate: Gate) -> None:
    unused, used, unlimited = (
        gate.session("a", 1, limited(1, 1)),
        gate.session("a", 2, limited(1, 1)),
        gate.session("b", 1),
    )
    assert gate.active_buckets == 0
    used.check()
    used.check()
    unlimited.check()
    assert gate.active_buckets == 2
    for session in (unused, used, unlimited):
        session.close()
    assert gate.active_buckets == 0


@pytest.mark.parametrize("burst", [1, 2, 7, 1000])
def test_e7_a_burst_up_to_the_capacity_never_fails(gate: Gate, burst: int) -> None:
    assert all(gate.session("a", 1, limited(0.001, burst)).check() for _ in range(burst))
    assert gate.session("a", 2, limited(0.001, burst)).check(burst)


async def test_sessions_end_with_their_block(gate: Gate) -> None:
    async with gate.session("a", 1, limited(1, 1)) as session:
        assert await session.acheck()
        assert gate.active_buckets == 1
    assert session.closed
    assert gate.active_buckets == 0


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("", 1), "agent: expected 1 to 128 printable characters, got ''"),
        (("a", None), "session: expected a string or an int, got None"),
        (("a", True), "session: expected a string or an int, got True"),
        (("a", 1, 5), "session limit: expected a limit such as '5/minute', or several, got 5"),
    ],
)
def test_bad_arguments_of_a_session_are_refused(gate: Gate, args: Any, text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        gate.session(*args)
    assert str(caught.value) == text
    assert gate.active_buckets == 0


def test_a_bad_cost_uses_nothing(gate: Gate) -> None:
    session = gate.session("a", 1, limited(1, 1))
    with pytest.raises(InvalidInput):
        session.check(0)
    assert gate.active_buckets == 0
