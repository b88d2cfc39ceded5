"""The gate: requirements A1 to A13."""

import functools
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from headgate import (
    UNLIMITED,
    Gate,
    InvalidInput,
    ManualClock,
    MemoryStore,
    Outcome,
    Policy,
    SlidingWindow,
    per_minute,
)
from headgate.events import AddressChecked, Alerted, Checked, Event, PolicyChanged, Violated, ViolationsReset
from headgate.stores.base import Store
from tests.support.agents import check_until_denied
from tests.support.refusals import refusal
from tests.support.threads import run_together
from tests.support.verbs import Verbs


def test_a1_allow_warn_deny_exempt(gate: Gate, verb: Verbs) -> None:
    check = verb(gate, "check")
    outcomes = [check("a", "ws", "heavy").outcome.value for _ in range(11)]
    assert outcomes == ["allow"] * 8 + ["warn"] * 2 + ["deny"]
    gate.add_exemption("vip")
    decisions = [check("vip", "ws", "heavy") for _ in range(500)]
    assert {(decision.outcome, decision.limit) for decision in decisions} == {(Outcome.EXEMPT, UNLIMITED)}
    gate.remove_exemption("vip")
    assert check("vip", "ws", "heavy").remaining == 9, "nothing was counted"


def test_a1_a_denial_spends_nothing(gate: Gate, verb: Verbs) -> None:
    check = verb(gate, "check")
    check("a", "ws", "heavy", cost=7)
    assert not check("a", "ws", "heavy", cost=4)
    assert check("a", "ws", "heavy", cost=3)
    assert check("a", "ws", "heavy", cost=11).retry_after is None


def test_a1_an_exempt_agent_does_not_use_the_store() -> None:
    def asked(*_args: Any) -> None:
        raise AssertionError("the store was asked")

    untouchable: Any = type("Untouchable", (), {name: asked for name in dir(Store) if not name.startswith("_")})()
    gate = Gate(Policy(exempt=["vip"]), store=untouchable)
    assert gate.check("vip", "ws", "heavy").outcome is Outcome.EXEMPT
    assert gate.record_violation("vip") == 0.0
    assert not gate.is_rate_limited("vip")


def test_a3_an_unknown_channel_or_tier_is_an_error(gate: Gate) -> None:
    for bad in ("smtp", "", None, 5):
        with pytest.raises(InvalidInput) as caught:
            gate.check("a", bad, "heavy")  # type: ignore[arg-type]
        assert str(caught.value) == f"channel: expected one of ws, http, got {bad!r}"
    for bad in ("huge", "", 5):
        with pytest.raises(InvalidInput) as caught:
            gate.check("a", "ws", bad)  # type: ignore[arg-type]
        assert str(caught.value) == f"tier: expected one of light, normal, heavy, got {bad!r}"
    more = Gate(Policy(channels=["ws", "http", "smtp"]))
    assert more.check("a", "smtp", "heavy").remaining == 9


@pytest.mark.parametrize(("tier", "capacity"), [("light", 120), ("normal", 60), ("heavy", 10)])
def test_a4_default_limits(gate: Gate, clock: ManualClock, tier: str, capacity: int) -> None:
    for channel in ("ws", "http"):
        assert gate.capacity("a", channel, tier) == capacity
        assert sum(bool(gate.check("a", channel, tier)) for _ in range(capacity + 5)) == capacity
    clock.advance(59.999999)
    assert gate.peek("a", "ws", tier).remaining == capacity - 1
    clock.advance(0.000001)
    assert gate.peek("a", "ws", tier).remaining == capacity


def test_a7_concurrent_requests_and_their_violations_are_counted_exactly() -> None:
    gate = Gate(Policy(limits={"heavy": "100/day"}, alerts={"violations": 100}))
    alerts: list[Event] = []
    gate.subscribe(lambda event: alerts.append(event) if isinstance(event, Alerted) else None)
    passed = run_together(8, lambda _: sum(bool(gate.check("a", "ws", "heavy")) for _ in range(100)))
    assert sum(passed) == 100
    assert gate.standing("a").violations == 700
    assert len(alerts) == 1


def test_a8_the_policy_classifies_an_action(gate: Gate, verb: Verbs, caplog: pytest.LogCaptureFixture) -> None:
    check = verb(gate, "check")
    assert check("a", "ws", action="ping").limit.capacity == 120
    assert check("a", "ws", action="message").limit.capacity == 60
    assert check("a", "http", action="post_task").limit.capacity == 10
    assert (gate.tier_of("ws", "session_open"), gate.tier_of("http", "get_health")) == ("heavy", "light")
    assert not caplog.records


def test_a8_an_unknown_action_is_normal_and_logged_once(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        assert gate.check("a", "ws", action="dance").limit.capacity == 60
    assert gate.tier_of("ws", "dance") == "normal"
    assert [record.getMessage() for record in caplog.records] == [
        "unknown action 'dance' on channel ws: taken as normal"
    ]
    for i in range(3000):
        gate.tier_of("ws", f"dance-{i}")
    assert len(caplog.records) == 1000, "the number of logged names is bounded"


def test_a8_a_policy_can_reclassify_actions() -> None:
    gate = Gate(Policy(actions={"ws": {"ping": "heavy", "dance": "light"}}))
    assert (gate.tier_of("ws", "ping"), gate.tier_of("ws", "dance")) == ("heavy", "light")


def test_a8_a_check_takes_either_a_tier_or_an_action(gate: Gate) -> None:
    with pytest.raises(InvalidInput, match=r"^check: expected a tier or an action, got None$"):
        gate.check("a", "ws")
    with pytest.raises(InvalidInput, match=r"^check: expected a tier or an action, not both, got \('light', 'ping'\)$"):
        gate.check("a", "ws", "light", action="ping")


def test_a9_denials_escalate_the_advised_wait(gate: Gate, verb: Verbs) -> None:
    check = verb(gate, "check")
    first = check_until_denied(gate, "a")
    waits = [(d.retry_after, d.bucket_retry_after) for d in [first] + [check("a", "ws", "heavy") for _ in range(6)]]
    assert waits == [(6.0, 6.0)] * 3 + [(10.0, 6.0)] + [(30.0, 6.0)] * 3
    assert [check("a", "ws", "heavy").violation.count for _ in range(2)] == [8, 9]


def test_a9_by_default_the_advice_is_not_enforced(gate: Gate, clock: ManualClock) -> None:
    for _ in range(16):
        gate.check("a", "ws", "heavy")
    clock.advance(6)
    assert gate.check("a", "ws", "heavy"), "the bucket alone decides"


def test_a9_a_policy_can_enforce_the_advice(store: Any, clock: ManualClock, verb: Verbs) -> None:
    gate = Gate(Policy(backoff={"enforce": True}), store=store)
    check = verb(gate, "check")
    for _ in range(15):
        gate.check("a", "ws", "heavy")
    clock.advance(29.999999)
    early = check("a", "ws", "light")
    assert (early.outcome, early.retry_after, early.bucket_retry_after) == (Outcome.DENY, 30.0, 0.0)
    assert early.violation.count == 6
    clock.advance(30)
    assert check("a", "ws", "light").remaining == 119, "it had spent nothing"


def test_a9_record_violation_counts_denials_made_elsewhere(gate: Gate, verb: Verbs) -> None:
    record = verb(gate, "record_violation")
    assert [record("a") for _ in range(7)] == [1.0, 2.0, 5.0, 10.0, 30.0, 30.0, 30.0]
    assert gate.standing("a").violations == 7
    assert gate.standing("b").violations == 0


def test_a10_is_rate_limited_until_the_quiet_period_has_passed(gate: Gate, clock: ManualClock, verb: Verbs) -> None:
    limited, reset = verb(gate, "is_rate_limited"), verb(gate, "reset_violations")
    assert not limited("a")
    check_until_denied(gate, "a")
    assert limited("a")
    assert not limited("b")
    clock.advance(59.999999)
    assert limited("a")
    clock.advance(0.000001)
    assert not limited("a")
    gate.record_violation("a")
    assert reset("a") is True
    assert not limited("a")
    assert reset("a") is False


def test_a10_standing_reports_the_waits(gate: Gate, clock: ManualClock, verb: Verbs) -> None:
    for _ in range(3):
        gate.record_violation("a")
    clock.advance(2)
    standing = verb(gate, "standing")("a")
    assert (standing.violations, standing.wait_left, standing.quiet_left) == (3, 3.0, 58.0)
    assert repr(standing) == "Standing(violations=3, wait_left=3.0, quiet_left=58.0)"


def test_a11_setting_a_default_to_its_value_drops_no_bucket(gate: Gate) -> None:
    gate.check("a", "ws", "heavy")
    gate.set_default("heavy", "10/minute")
    assert gate.check("a", "ws", "heavy").remaining == 8


def test_a11_an_override_applies_at_once_to_one_agent(gate: Gate) -> None:
    check_until_denied(gate, "a")
    gate.set_override("a", "heavy", "20/minute")
    assert gate.check("a", "ws", "heavy").remaining == 19
    assert gate.capacity("a", "http", "heavy") == 20
    assert gate.limits_for("a", "ws", "heavy") == per_minute(20)
    assert gate.capacity("b", "ws", "heavy") == 10
    gate.set_override("a", "heavy", [per_minute(3), SlidingWindow(2, 60)], "ws")
    assert [gate.capacity("a", channel, "heavy") for channel in ("ws", "http")] == [2, 20]
    assert [bool(gate.check("a", "ws", "heavy")) for _ in range(3)] == [True, True, False]
    gate.remove_override("a", "light")
    assert gate.capacity("a", "ws", "heavy") == 2
    gate.remove_override("a")
    assert [gate.capacity("a", channel, "heavy") for channel in ("ws", "http")] == [10, 10]
    assert gate.check("a", "ws", "heavy").remaining == 9, "back to a full bucket"


async def test_a11_every_change_has_an_async_twin(gate: Gate) -> None:
    await gate.aset_override("a", "heavy", "20/minute", "ws", by="ada")
    await gate.aset_default("light", "240/minute", by="ada")
    await gate.aadd_exemption("vip", by="ada")
    assert [gate.capacity("a", channel, "heavy") for channel in ("ws", "http")] == [20, 10]
    assert gate.capacity("b", "ws", "light") == 240
    assert gate.is_exempt("vip")
    await gate.aremove_override("a")
    await gate.aremove_exemption("vip")
    gate.check("a", "ws", "heavy", cost=10)
    await gate.adrop_agent("a")
    assert gate.peek("a", "ws", "heavy").remaining == 10
    await gate.areload(Policy(limits={"heavy": "7/minute"}))
    assert gate.capacity("a", "ws", "heavy") == 7
    assert [change.by for change in gate.history()] == ["ada", "ada", "ada", "", ""]


def test_a11_each_switch_of_limits_starts_with_a_full_bucket(gate: Gate) -> None:
    for _ in range(3):
        check_until_denied(gate, "a")
        gate.set_override("a", "heavy", "5/minute")
        assert gate.check("a", "ws", "heavy").remaining == 4
        check_until_denied(gate, "a")
        gate.remove_override("a")
        assert gate.check("a", "ws", "heavy").remaining == 9


def test_a11_a_changed_default_drops_the_buckets_of_agents_without_an_override(gate: Gate) -> None:
    gate.set_override("special", "heavy", "10/minute")
    for agent in ("a", "special"):
        gate.check(agent, "ws", "heavy", cost=4)
        gate.check(agent, "ws", "light", cost=4)
    gate.set_default("heavy", "30/minute")
    assert gate.peek("a", "ws", "heavy").remaining == 30
    assert gate.peek("a", "ws", "light").remaining == 116, "another tier is not affected"
    assert gate.peek("special", "ws", "heavy").remaining == 6, "nor is an override"
    gate.check("a", "ws", "heavy", cost=4)
    gate.set_default("heavy", "10/minute")
    assert gate.peek("a", "ws", "heavy").remaining == 10
    gate.set_default("heavy", "7/minute", "http")
    assert [gate.capacity("a", channel, "heavy") for channel in ("ws", "http")] == [10, 7]


def test_a11_exemptions(gate: Gate) -> None:
    check_until_denied(gate, "a")
    assert not gate.is_exempt("a")
    gate.add_exemption("a")
    assert gate.is_exempt("a")
    assert gate.check("a", "ws", "heavy").outcome is Outcome.EXEMPT
    assert gate.limits_for("a", "ws", "heavy") == UNLIMITED
    gate.remove_exemption("a")
    assert gate.check("a", "ws", "heavy").remaining == 9


def test_a11_changes_while_eight_threads_check() -> None:
    """Each change applies to the next check of its agent, and no other check fails."""
    gate = Gate(Policy(limits={"heavy": "1000000/minute"}))
    done = threading.Event()

    def work(number: int) -> None:
        while number and not done.is_set():
            for agent in ("a", f"other-{number}"):
                gate.check(agent, "ws", "heavy")
        if not number:
            try:
                change_and_check()
            finally:
                done.set()

    def change_and_check() -> None:
        for i in range(50):
            gate.set_override("mine", "heavy", f"{i + 2}/day")
            assert gate.check("mine", "ws", "heavy").remaining == i + 1
            gate.add_exemption("mine")
            assert gate.check("mine", "ws", "heavy").outcome is Outcome.EXEMPT
            gate.remove_exemption("mine")
            gate.remove_override("mine")
            gate.set_default("heavy", f"{1000 + i}/day")
            assert gate.check("mine", "ws", "heavy").remaining == 999 + i
            gate.set_override("a", "heavy", f"{i + 1}/day")

    run_together(9, work)


def test_a11_addresses_and_networks_have_an_exempt_list_of_their_own() -> None:
    gate = Gate(Policy(addresses={"exempt": ["10.0.0.0/8", "::1"]}))
    for address in ("10.1.2.3", "::ffff:10.1.2.3", "::1"):
        assert gate.check_address(address).outcome is Outcome.EXEMPT
    assert gate.check_address("11.1.2.3").remaining == 59


def test_a12_events_for_checks_and_violations(gate: Gate, verb: Verbs) -> None:
    events: list[Event] = []
    unsubscribe = gate.subscribe(events.append)
    check = verb(gate, "check")
    for _ in range(11):
        check("a", "ws", action="session_open")
    verb(gate, "record_violation")("a")
    checked = [event for event in events if isinstance(event, Checked)]
    assert [event.remaining for event in checked] == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0]
    assert {(event.agent, event.channel, event.tier) for event in checked} == {("a", "ws", "heavy")}
    assert [event.outcome.value for event in checked][-3:] == ["warn", "warn", "deny"]
    violated = [event for event in events if isinstance(event, Violated)]
    assert violated == [Violated("a", "ws", "heavy", 1, 1.0), Violated("a", "", "", 2, 2.0)]
    unsubscribe()
    check("a", "ws", "light")
    assert len(events) == 13


def test_a12_a_listener_may_choose_its_events(gate: Gate) -> None:
    violations: list[Event] = []
    everything: list[Event] = []
    forget = gate.subscribe(violations.append, Violated, PolicyChanged)
    check_until_denied(gate, "agent")
    gate.add_exemption("other")
    assert [type(event) for event in violations] == [Violated, PolicyChanged]
    gate.subscribe(everything.append)
    check_until_denied(gate, "agent")
    assert [type(event) for event in everything] == [Checked, Violated]
    forget()
    check_until_denied(gate, "agent")
    assert len(violations) == 3
    assert len(everything) == 4
    with pytest.raises(InvalidInput, match="subscribe: expected one of Checked, Violated"):
        gate.subscribe(everything.append, str)  # type: ignore[arg-type]


def test_a12_a_listener_that_would_never_run_is_refused(gate: Gate) -> None:
    class AsyncListener:
        async def __call__(self, event: Event) -> None: ...

    async def page(event: Event) -> None: ...

    def pages(event: Event) -> Iterator[Event]:
        yield event

    expected = (
        r"^subscribe: expected a plain function; for a coroutine, let it call asyncio\.create_task, or asyncio\.run"
    )
    listeners: list[Any] = [page, functools.partial(page), AsyncListener(), pages, None]
    for listener in listeners:
        with pytest.raises(InvalidInput, match=expected):
            gate.subscribe(listener, Checked)
    assert gate.check("a", "ws", "light")


def test_a12_exempt_checks_changes_and_addresses_are_events_too(gate: Gate) -> None:
    events: list[Event] = []
    gate.subscribe(events.append)
    gate.add_exemption("vip", by="ada")
    gate.check("vip", "http", "light")
    gate.check_address("2001:db8::1", "registration")
    changed, checked, address = events
    assert changed == PolicyChanged("exemption of 'vip' set to exempt", "ada")
    assert isinstance(checked, Checked)
    assert checked.outcome is Outcome.EXEMPT
    assert isinstance(address, AddressChecked)
    assert (address.address, address.purpose, address.decision.remaining) == ("2001:db8::/64", "registration", 4)


def test_a12_a_failing_listener_is_logged_and_affects_no_other(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Event] = []

    def broken(_event: Event) -> None:
        raise RuntimeError("deaf")

    gate.subscribe(broken)
    gate.subscribe(heard.append)
    assert gate.check("a", "ws", "light")
    assert len(heard) == 1
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "a listener failed on Checked(agent='a'" in caplog.text


def test_a13_buckets_and_violations_of_idle_agents_are_dropped() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    gate = Gate(Policy(), store=store)
    for i in range(2000):
        check_until_denied(gate, f"agent-{i}")
    assert len(store) == 4000
    clock.advance(400)
    for _ in range(2000):
        gate.check("here", "ws", "light", cost=1)
    assert len(store) == 2, "one bucket, and its violations"


def test_a12_a_reset_of_violations_is_an_event(gate: Gate, verb: Verbs) -> None:
    events: list[Event] = []
    gate.subscribe(events.append, ViolationsReset)
    gate.record_violation("a")
    assert verb(gate, "reset_violations")("a")
    assert not verb(gate, "reset_violations")("a")
    verb(gate, "drop_agent")("b")
    assert events == [ViolationsReset("a"), ViolationsReset("a"), ViolationsReset("b")]


def test_a13_drop_agent_drops_its_buckets_and_violations(gate: Gate) -> None:
    check_until_denied(gate, "a")
    check_until_denied(gate, "b")
    gate.drop_agent("a")
    assert gate.check("a", "ws", "heavy").remaining == 9
    assert not gate.is_rate_limited("a")
    assert gate.is_rate_limited("b")


# Charges and refunds --------------------------------------------------------------------------------------------------


def test_charge_and_refund_settle_a_cost_without_events_or_violations(verb: Verbs) -> None:
    clock = ManualClock()
    gate = Gate(Policy(limits={"heavy": "60/minute burst 10"}, exempt=["vip"]), store=MemoryStore(clock=clock))
    charge, refund = verb(gate, "charge"), verb(gate, "refund")
    events: list[object] = []
    gate.check("planner", "http", "heavy", cost=8)
    gate.subscribe(events.append)
    assert refund("planner", "http", "heavy", 5).remaining == 7
    assert charge("planner", "http", "heavy", 9).remaining == 0, "and a debt of two"
    clock.advance(2)
    assert gate.peek("planner", "http", "heavy").remaining == 0
    clock.advance(1)
    assert gate.peek("planner", "http", "heavy").remaining == 1
    assert refund("planner", "http", "heavy", 99).remaining == 10
    assert gate.peek("planner", "ws", "heavy").remaining == 10, "each channel has its own"
    assert charge("vip", "http", "heavy", 9).outcome is Outcome.EXEMPT
    assert refund("vip", "http", "heavy").outcome is Outcome.EXEMPT
    assert events == []
    assert not gate.is_rate_limited("planner")


def test_charge_and_refund_by_address(verb: Verbs) -> None:
    addresses = {"limit": "60/minute burst 10", "registration": "5/minute", "exempt": ["10.0.0.0/8"]}
    gate = Gate(Policy(addresses=addresses), store=MemoryStore(clock=ManualClock()))
    charge, refund = verb(gate, "charge_address"), verb(gate, "refund_address")
    gate.check_address("2001:db8::1", cost=4)
    assert refund("2001:db8::2", 3).remaining == 9, "the same /64"
    assert charge("2001:db8::3", 9).remaining == 0
    assert charge("2001:db8::3", 2, "registration").remaining == 3
    assert refund("2001:db8::3", 1, "registration").remaining == 4
    assert charge("10.1.2.3", 9).outcome is Outcome.EXEMPT


def test_a_bad_charge_or_refund_counts_nothing() -> None:
    gate = Gate(Policy(), store=MemoryStore(clock=ManualClock()))
    wrong = (("", "http", "heavy", 1), ("a", "smtp", "heavy", 1), ("a", "http", "x", 1), ("a", "http", "heavy", 0))
    for arguments in wrong:
        with pytest.raises(InvalidInput):
            gate.charge(*arguments)
        with pytest.raises(InvalidInput):
            gate.refund(*arguments)
    with pytest.raises(InvalidInput):
        gate.charge_address("nowhere", 1)
    assert gate.peek("a", "http", "heavy").remaining == gate.capacity("a", "http", "heavy")


def test_an_unknown_option_of_a_gate_leads_to_the_nearest_known_one() -> None:
    expected = "Gate: expected options among policy, store, remember, got 'stroe'; did you mean store=?"
    assert refusal(Gate, stroe="memory://") == expected


@pytest.mark.parametrize("twin", [False, True])
async def test_a_check_can_be_made_in_two_steps(twin: bool) -> None:
    gate = Gate(Policy(), store=MemoryStore(clock=ManualClock()))
    gate.set_override("planner", "heavy", "2/minute")
    active = gate.find_limit("planner", "http", action="post_task")
    assert (active.tier, str(active.limit)) == ("heavy", "2/minute")
    decisions = [await gate.acheck_limit(active, "planner") if twin else gate.check_limit(active, "planner")]
    decisions += [gate.check("planner", "http", "heavy") for _ in range(2)]
    assert [decision.remaining for decision in decisions] == [1, 0, 0]
    assert decisions[2].violation is not None
