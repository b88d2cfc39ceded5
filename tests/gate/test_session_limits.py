"""The operator's limit of sessions: it holds for every session, and is changed while they are open."""

from pathlib import Path
from typing import Any

import pytest

from headgate import (
    BLOCKED,
    UNLIMITED,
    AllOf,
    Gate,
    InvalidInput,
    Limit,
    ManualClock,
    MemoryStore,
    Policy,
    PolicyError,
    RateLimited,
    SlidingWindow,
    limited,
    parse,
)
from headgate.events import PolicyChanged, Violated
from headgate.gate.change_log import condense
from headgate.gate.changes import session_limit
from headgate.gate.effective import effective
from headgate.stores.base import Edit


def gate_with(policy: Policy, **options: Any) -> Gate:
    return Gate(policy, store=MemoryStore(clock=ManualClock(start=1000)), **options)


def passed(gate: Gate, agent: str, session: str, times: int) -> int:
    opened = gate.session(agent, session)
    return sum(bool(opened.check()) for _ in range(times))


def test_e2_the_policy_limits_sessions_and_those_of_single_agents() -> None:
    gate = gate_with(Policy(sessions={"limit": "1/second burst 3"}, agents={"a": {"session": "1/second burst 5"}}))
    assert [passed(gate, agent, "s", 10) for agent in ("a", "b")] == [5, 3]
    assert passed(gate, "b", "t", 10) == 3, "each session has a budget of its own"


@pytest.mark.parametrize(
    ("asked", "allowed", "result"),
    [
        (UNLIMITED, UNLIMITED, UNLIMITED),
        (UNLIMITED, limited(5, 10), limited(5, 10)),
        (limited(5, 10), UNLIMITED, limited(5, 10)),
        (limited(5, 10), limited(5, 10), limited(5, 10)),
        (limited(1, 2), limited(5, 10), limited(1, 2)),
        (limited(50, 100), limited(5, 10), limited(5, 10)),
        (limited(1, 100), limited(5, 10), limited(1, 10)),
        (limited(50, 2), limited(5, 10), limited(5, 2)),
        (limited(1, 2), BLOCKED, BLOCKED),
        (BLOCKED, limited(1, 2), BLOCKED),
        (limited(1, 2), SlidingWindow(5, 60), AllOf([limited(1, 2), SlidingWindow(5, 60)])),
        (limited(1 / 3, 2), parse("60/minute burst 5"), limited(1 / 3, 2)),
    ],
    ids=str,
)
def test_e2_one_may_ask_for_less_and_never_gets_more(asked: Limit, allowed: Limit, result: Limit) -> None:
    gate = gate_with(Policy(sessions={"limit": allowed}))
    session = gate.session("a", 1, asked)
    assert session.limit == result
    assert session.asked == asked


def test_e2_a_change_takes_effect_in_open_sessions_at_once() -> None:
    gate = gate_with(Policy())
    heard: list[Any] = []
    gate.subscribe(heard.append, PolicyChanged)
    session, other = gate.session("a", 1), gate.session("b", 1, limited(1, 2))
    assert all(session.check() for _ in range(100))
    gate.change([session_limit("1/second burst 4"), session_limit("1/second burst 1", "b")], by="me")
    assert sum(bool(session.check()) for _ in range(10)) == 4
    assert sum(bool(other.check()) for _ in range(10)) == 1
    gate.change([session_limit(None), session_limit(None, "b")])
    assert all(session.check() for _ in range(100))
    assert other.limit == limited(1, 2)
    assert [(event.what, event.by) for event in heard] == [
        ("session set to 1/second burst 4, session of 'b' set to 1/second", "me"),
        ("session removed, session of 'b' removed", ""),
    ]


def test_e2_changes_are_remembered_and_compacted(tmp_path: Path) -> None:
    with gate_with(Policy(), remember=tmp_path / "changes.db") as gate:
        gate.change([session_limit("1/second burst 4"), session_limit("blocked", "b")])
    with gate_with(Policy(), remember=tmp_path / "changes.db") as gate:
        assert str(gate.effective.session_limit) == "1/second burst 4"
        assert gate.effective.session_overrides == {"b": BLOCKED}
        assert [str(change) for change in gate.history()] == [
            "session set to 1/second burst 4, session of 'b' set to blocked"
        ]
    edits = [session_limit(f"{number}/second", agent) for number in (1, 2) for agent in (None, "a")]
    assert condense(Policy(), edits) == edits[2:]
    assert effective(Policy(), condense(Policy(), edits)) == effective(Policy(), edits)


def test_e2_back_to_the_defaults_is_for_sessions_too() -> None:
    gate = gate_with(Policy(sessions={"limit": "9/second"}))
    gate.change([session_limit("1/second", "a")])
    gate.set_override("a", "heavy", "1/minute")
    gate.remove_override("a", "heavy")
    assert str(gate.session("a", 1).limit) == "1/second", "only that tier"
    gate.remove_override("a")
    assert str(gate.session("a", 1).limit) == "9/second"


def test_e2_a_session_limit_leaves_the_tiers_of_the_agent_alone() -> None:
    gate = gate_with(Policy())
    gate.check("a", "ws", "heavy")
    gate.change([session_limit("1/second", "a")])
    assert gate.peek("a", "ws", "heavy").remaining == 9


def test_e2_a_denied_signal_is_a_violation_and_takes_nothing_from_the_tiers() -> None:
    gate = gate_with(Policy(sessions={"limit": "1/second burst 1"}))
    heard: list[Violated] = []
    gate.subscribe(heard.append, Violated)  # type: ignore[arg-type]
    session = gate.session("a", 1)
    assert session.check()
    assert [session.check().violation.count for _ in range(3)] == [1, 2, 3]  # type: ignore[union-attr]
    assert gate.is_rate_limited("a")
    assert gate.standing("a").violations == 3
    assert [(event.agent, event.channel, event.tier, event.count) for event in heard] == [
        ("a", "session", "", number) for number in (1, 2, 3)
    ]
    assert all(gate.peek("a", "ws", tier).remaining == capacity for tier, capacity in (("light", 120), ("heavy", 10)))


def test_e3_the_error_says_the_wait_of_the_session_and_not_the_advice() -> None:
    gate = gate_with(Policy(sessions={"limit": "20/second burst 1"}))
    session = gate.session("planner", 1)
    session.require()
    for _ in range(2):
        session.check()
    with pytest.raises(RateLimited) as caught:
        session.require()
    error = caught.value
    assert (error.agent_id, error.limit, error.retry_after_ms) == ("planner", 20.0, 50)
    assert str(error) == "rate limited: agent 'planner' at 20 signals/sec, retry after 50ms"
    assert session.check().retry_after == 10, "a decision has the advice as well"


def test_e3_an_enforced_advice_is_the_wait() -> None:
    gate = gate_with(Policy(sessions={"limit": "20/second burst 1"}, backoff={"enforce": True}))
    session = gate.session("planner", 1)
    session.require()
    with pytest.raises(RateLimited, match="retry after 1000ms"):
        session.require()


def test_e2_an_exempt_agent_has_only_the_limit_that_it_asks_for() -> None:
    gate = gate_with(Policy(sessions={"limit": "1/second burst 1"}, exempt=["a"]))
    assert passed(gate, "a", "s", 50) == 50
    asked = gate.session("a", "t", limited(1, 2))
    assert sum(bool(asked.check()) for _ in range(5)) == 2
    assert not gate.standing("a")


@pytest.mark.parametrize("shadow", [{"shadow": True}, {"agents": {"a": {"shadow": True}}}], ids=str)
def test_e2_in_shadow_mode_nothing_is_denied_or_recorded(shadow: dict[str, Any]) -> None:
    gate = gate_with(Policy(sessions={"limit": "1/second burst 1"}, **shadow))
    assert passed(gate, "a", "s", 5) == 5
    decision = gate.session("a", "s").check()
    assert decision.would_be is not None
    assert decision.would_be.value == "deny"
    assert not gate.standing("a")


def test_the_policy_of_sessions_reads_back() -> None:
    policy = Policy(sessions={"limit": ["5/second", "100/minute"]}, agents={"a": {"session": "1 per 3 seconds"}})
    assert Policy(**policy.settings()) == policy
    assert 'session = "1 per 3 seconds"' in policy.toml()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"sessions": {"limit": "x"}}, "sessions.limit: expected"),
        ({"sessions": {"rate": 5}}, "sessions.rate: expected one of limit"),
        ({"agents": {"a": {"session": 5}}}, "agents.a.session: expected"),
        ({"channels": ["session"]}, "channels[0]: expected"),
    ],
)
def test_mistakes_in_the_policy_of_sessions(given: Any, text: str) -> None:
    with pytest.raises(PolicyError) as caught:
        Policy(**given)
    assert caught.value.mistakes[0].startswith(text)


def test_an_edit_of_sessions_is_validated() -> None:
    gate = gate_with(Policy())
    for bad in (Edit("session", "a", "ws", "", "5/second"), Edit("session", "a", "", "heavy", "5/second")):
        with pytest.raises(InvalidInput, match=r"^edit: expected one such as"):
            gate.change([bad])
    with pytest.raises(InvalidInput):
        gate.change([Edit("session", value="5/fortnight")])


def test_limits_of_closed_sessions_do_not_stay_in_memory() -> None:
    clock = ManualClock(start=1000)
    store = MemoryStore(clock=clock)
    gate = Gate(Policy(), store=store)
    before = len(store._tables)
    for number in range(1, 2000):
        with gate.session("a", "s", limited(number, 1)) as session:
            session.check()
        clock.advance(0.01)
    clock.advance(10)
    for _ in range(100):
        gate.session("a", "s").check()
        clock.advance(1)
    assert len(store._tables) <= before + 2
    assert len(store._order) == len(store._tables)


def test_a_table_that_was_dropped_is_made_again() -> None:
    """The counts of a key are never lost: a table goes only when it has no entry."""
    clock = ManualClock(start=1000)
    gate = Gate(Policy(), store=MemoryStore(clock=clock))
    session, other = gate.session("a", "s", limited(1, 3)), gate.session("a", "t", limited(7, 7))
    for _ in range(50):
        assert [bool(session.check()) for _ in range(4)] == [True, True, True, False]
        clock.advance(100)
        assert all(other.check() for _ in range(5))
        clock.advance(100)
