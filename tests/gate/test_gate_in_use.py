"""The gate in use: by address (B3), across channels (B4), alerts (B8), shadow, reload, and bad input."""

from collections.abc import Callable
from typing import Any

import pytest

from headgate import (
    Gate,
    InvalidInput,
    ManualClock,
    MemoryStore,
    Outcome,
    Policy,
    parse,
)
from headgate.events import Alerted, Checked, Event, Violated
from tests.support.agents import check_until_denied
from tests.support.verbs import Verbs


def test_b3_addresses_have_limits_of_their_own(gate: Gate, verb: Verbs) -> None:
    check = verb(gate, "check_address")
    assert check("1.2.3.4").remaining == 59
    assert check("1.2.3.4", "registration").remaining == 4
    assert gate.check("1.2.3.4", "http", "normal").remaining == 59, "an agent may be named like an address"
    assert check("1.2.3.4").remaining == 58


def test_b3_ipv6_addresses_are_counted_by_64_and_mapped_ones_as_ipv4(gate: Gate) -> None:
    assert gate.check_address("2001:db8:0:1::1").remaining == 59
    assert gate.check_address("2001:db8:0:1:ffff::2").remaining == 58
    assert gate.check_address("2001:db8:0:2::1").remaining == 59
    assert gate.check_address("1.2.3.4").remaining == 59
    assert gate.check_address("::ffff:1.2.3.4").remaining == 58


def test_b3_denials_by_address_escalate_but_are_not_violations_of_an_agent(gate: Gate) -> None:
    events: list[Event] = []
    gate.subscribe(events.append)
    denials = [gate.check_address("1.2.3.4", "registration") for _ in range(16)][5:]
    assert [d.violation.count for d in denials if d.violation] == list(range(1, 12))
    assert denials[-1].retry_after == 30.0
    assert not any(isinstance(event, (Violated, Alerted)) for event in events)
    assert not gate.is_rate_limited("1.2.3.4")


@pytest.mark.parametrize("bad", ["", "localhost", "1.2.3", None, 5])
def test_b3_a_bad_address_or_purpose_is_refused(gate: Gate, bad: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        gate.check_address(bad)
    assert str(caught.value) == f"address: expected an IP address, got {bad!r}"
    with pytest.raises(InvalidInput, match=r"^purpose: expected one of request, registration, .*, got 'fun'$"):
        gate.check_address("1.2.3.4", "fun")


def test_b4_an_agent_denied_on_one_channel_can_use_the_other(gate: Gate) -> None:
    check_until_denied(gate, "a", "ws")
    assert gate.check("a", "http", "heavy")
    check_until_denied(gate, "b", "http")
    assert gate.check("b", "ws", "heavy")


def test_b8_ten_violations_within_five_minutes_are_one_alert(gate: Gate, clock: ManualClock) -> None:
    alerts: list[Event] = []
    gate.subscribe(lambda event: alerts.append(event) if isinstance(event, Alerted) else None)
    check_until_denied(gate, "a")
    for _ in range(30):
        gate.check("a", "ws", "heavy")
    assert alerts == [Alerted("a", 10, 300.0)]
    clock.advance(300)
    for _ in range(10):
        gate.record_violation("a")
    assert len(alerts) == 2, "armed again"


# Shadow --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{"shadow": True}, {"shadow": ["heavy"]}, {"agents": {"a": {"shadow": True}}}], ids=str
)
def test_shadow_mode_passes_and_reports_the_real_outcome(store: Any, settings: Any, verb: Verbs) -> None:
    gate = Gate(Policy(**settings), store=store)
    events: list[Event] = []
    gate.subscribe(events.append)
    decisions = [verb(gate, "check")("a", "ws", "heavy") for _ in range(12)]
    assert all(decisions)
    assert [d.would_be.value for d in decisions if d.would_be] == ["allow"] * 8 + ["warn"] * 2 + ["deny"] * 2
    assert (decisions[-1].retry_after, decisions[-1].bucket_retry_after) == (0.0, 6.0)
    assert not gate.is_rate_limited("a")
    assert {type(event) for event in events} == {Checked}


def test_shadow_mode_of_one_tier_or_agent_leaves_the_others_enforced() -> None:
    gate = Gate(Policy(shadow=["light"], agents={"watched": {"shadow": True, "heavy": "1/minute"}}))
    check_until_denied(gate, "a")
    assert gate.is_rate_limited("a")
    assert all(gate.check("watched", "ws", "heavy") for _ in range(5))
    assert gate.check("a", "ws", "light").would_be is Outcome.ALLOW
    assert gate.check("b", "ws", "heavy").would_be is None


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["", "x" * 129, "a\n", 5, None, b"a"])
def test_a_bad_agent_is_refused_and_nothing_is_counted(gate: Gate, store: Any, verb: Verbs, bad: Any) -> None:
    shown = repr(bad) if len(repr(bad)) <= 100 else repr(bad)[:97] + "..."
    for name, args in (
        ("check", ("ws", "heavy")), ("peek", ("ws", "heavy")), ("record_violation", ()), ("is_rate_limited", ()),
        ("reset_violations", ()), ("standing", ()),
    ):  # fmt: skip
        with pytest.raises(InvalidInput) as caught:
            verb(gate, name)(bad, *args)
        assert str(caught.value) == f"agent: expected 1 to 128 printable characters, got {shown}"
    for call in (gate.drop_agent, gate.is_exempt, gate.add_exemption, gate.remove_exemption, gate.remove_override):
        with pytest.raises(InvalidInput):
            call(bad)
    assert gate.history() == []
    assert not isinstance(store, MemoryStore) or len(store) == 0


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "1", None, float("nan")])
def test_a_bad_cost_is_refused_and_nothing_is_counted(gate: Gate, verb: Verbs, bad: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        verb(gate, "check")("a", "ws", "heavy", cost=bad)
    assert str(caught.value) == f"cost: expected a whole number of at least 1, got {bad!r}"
    assert gate.peek("a", "ws", "heavy").remaining == 10


def test_bad_changes_change_nothing(gate: Gate) -> None:
    anything: Any = 5
    attempts: list[tuple[Callable[[], None], str]] = [
        (lambda: gate.set_override("a", "huge", "1/s"), "tier: expected one of light, normal, heavy, got 'huge'"),
        (lambda: gate.set_override("a", "heavy", "1/s", "smtp"), "channel: expected one of ws, http, got 'smtp'"),
        (lambda: gate.set_override("a", "heavy", anything),
         "override: expected a limit such as '5/minute', or several, got 5"),
        (lambda: gate.set_default("huge", "1/s"), "tier: expected one of light, normal, heavy, got 'huge'"), (lambda:
        gate.set_default("heavy", anything), "default: expected a limit such as '5/minute', or several, got 5"),
        (lambda: gate.add_exemption("a", by=anything), "by: expected a string, got 5"),
    ]  # fmt: skip
    for call, text in attempts:
        with pytest.raises(InvalidInput) as caught:
            call()
        assert str(caught.value) == text
    assert gate.history() == []
    assert gate.effective.overrides == {}


A_STORE = "a store such as MemoryStore(), or a URL such as redis://localhost or memory://"


def test_bad_arguments_of_a_gate_are_refused() -> None:
    attempts: list[tuple[Any, str]] = [
        ({"policy": "headgate.toml"}, "Gate policy: expected a Policy (Policy.load reads a file), got 'headgate.toml'"),
        ({"store": 5}, f"Gate store: expected {A_STORE}, got 5"),
        ({"remember": 5}, "Gate remember: expected a path, a change log, or None, got 5"),
    ]
    for options, text in attempts:
        with pytest.raises(InvalidInput) as caught:
            Gate(**options)
        assert str(caught.value) == text


def test_every_argument_of_a_gate_has_a_default() -> None:
    assert Gate().check("agent-7", "ws", "heavy").remaining == 9
    assert Gate().policy == Policy()


# Reload --------------------------------------------------------------------------------------------------------------


def test_reload_keeps_the_buckets_whose_limit_did_not_change(gate: Gate) -> None:
    gate.set_override("special", "light", "500/minute")
    for agent in ("a", "special", "vip"):
        gate.check(agent, "ws", "heavy", cost=4)
        gate.check(agent, "ws", "light", cost=4)
    gate.record_violation("a")
    gate.reload(Policy(limits={"heavy": "20/minute"}, exempt=["vip"], agents={"a": {"http": {"light": "1/minute"}}}))
    assert gate.peek("a", "ws", "heavy").remaining == 20
    assert gate.peek("special", "ws", "light").remaining == 496, (
        "a change made while running stays, and so does its bucket"
    )
    assert gate.is_exempt("vip")
    assert gate.is_rate_limited("a")
    gate.reload(Policy(limits={"heavy": "20/minute"}))
    assert gate.check("vip", "ws", "heavy").remaining == 19
    assert gate.peek("vip", "ws", "light").remaining == 120, "after an exemption an agent starts with full buckets"


def test_reload_of_an_override_and_back_starts_with_full_buckets(gate: Gate) -> None:
    gate.check("a", "ws", "heavy", cost=4)
    gate.check("a", "ws", "light", cost=4)
    gate.reload(Policy(agents={"a": {"heavy": "5/minute"}}))
    assert gate.check("a", "ws", "heavy").remaining == 4
    gate.reload(Policy())
    assert gate.peek("a", "ws", "heavy").remaining == 10
    assert gate.peek("a", "ws", "light").remaining == 116


def test_reload_of_the_same_policy_changes_nothing(gate: Gate) -> None:
    gate.check("a", "ws", "heavy", cost=4)
    gate.reload(Policy())
    assert gate.peek("a", "ws", "heavy").remaining == 6
    with pytest.raises(InvalidInput, match=r"^reload: expected a Policy, got None$"):
        gate.reload(None)  # type: ignore[arg-type]


def test_gates_on_one_store_share_their_counts(store: Any) -> None:
    one, two = Gate(Policy(), store=store), Gate(Policy(), store=store)
    check_until_denied(one, "a")
    assert not two.check("a", "ws", "heavy")
    assert two.standing("a").violations == 2


def test_what_holds_is_told(gate: Gate) -> None:
    gate.set_override("a", "heavy", "20/minute", "ws")
    gate.set_default("light", "240/minute")
    gate.add_exemption("vip")
    assert gate.effective.overrides == {"a": {("ws", "heavy"): parse("20/minute")}}
    assert gate.effective.limits["http", "light"] == parse("240/minute")
    assert gate.effective.exempt == {"vip"}
    assert gate.policy == Policy()
