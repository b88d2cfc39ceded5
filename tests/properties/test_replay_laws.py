"""A replay decides as the gate does, and a suggested limit is the lowest that suffices."""

from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate import Gate, ManualClock, MemoryStore, Outcome, Policy
from headgate.limits.decision import Decision
from headgate.replay.engine import ALLOWED, DENIED, EXEMPT, SHADOWED, WARNED, PolicyReplay
from headgate.replay.options import LogOptions
from headgate.replay.player import LogSet
from headgate.replay.suggest import Suggestion, suggest

pytestmark = pytest.mark.once

LIMITS = [
    "1/minute", "3/minute", "7/minute", "7/minute burst 2", "2/second burst 5", "5 per 7 seconds", "60/minute burst 3",
    "0.3/second burst 2", "1000000/second burst 7", "3/minute sliding", "unlimited", "blocked", "2/second; 5/minute",
    "7/year burst 300",  # so slow that its tick is coarse
]  # fmt: skip
limits = st.sampled_from(LIMITS)
tiers = st.sampled_from(["light", "normal", "heavy", "bulk"])
channels = st.sampled_from(["ws", "http"])
agents = st.sampled_from(["a", "b", "exempt", "own", "watched", "a:ws"])
policies = st.fixed_dictionaries(
    {
        "tiers": st.just(["bulk"]),
        "limits": st.fixed_dictionaries({"light": limits, "normal": limits, "heavy": limits, "bulk": limits}),
        "warn_at": st.sampled_from([0, 0.333, 0.8, 1]),
        "shadow": st.one_of(st.booleans(), st.just(["heavy"])),
        "exempt": st.just(["exempt"]),
        "agents": st.fixed_dictionaries(
            {"own": st.fixed_dictionaries({"normal": limits}), "watched": st.just({"shadow": True})}
        ),
        "backoff": st.fixed_dictionaries({"enforce": st.booleans(), "steps": st.just([1, 3]), "quiet": st.just(20)}),
        "alerts": st.fixed_dictionaries({"violations": st.integers(1, 3), "window": st.sampled_from([5, 60])}),
    }
)
requests = st.tuples(
    agents,
    channels,
    st.one_of(tiers, st.sampled_from(["action ping", "action post_task", "action nobody knows"])),
    st.sampled_from([1, 1, 1, 1, 2, 5, 150, 10**17, 10**400]),
    st.sampled_from([0, 0, 0, 1, 333_333, 1_000_000, 5_999_999, 30_000_000, 90_000_000, 10**12]),
)


def expected(decision: Decision) -> int:
    """The replay's code for a decision."""
    if decision.would_be is Outcome.DENY:
        return SHADOWED
    by = {Outcome.ALLOW: ALLOWED, Outcome.WARN: WARNED, Outcome.DENY: DENIED, Outcome.EXEMPT: EXEMPT}
    return by[decision.outcome]


@given(policies, st.lists(requests, min_size=1, max_size=80))
def test_every_decision_equals_the_gates(given: dict[str, Any], course: list[tuple[str, str, str, int, int]]) -> None:
    policy = Policy(**given)
    clock = ManualClock(start=1_700_000_000)
    gate = Gate(policy, store=MemoryStore(clock=clock))
    replay = PolicyReplay("", policy)
    for number, (agent, channel, kind, cost, span) in enumerate(course):
        clock.advance(Fraction(span, 1_000_000))
        action = kind.removeprefix("action ") if kind.startswith("action ") else None
        tier = kind if action is None else None
        decision = gate.check(agent, channel, tier, action=action, cost=cost)
        found = replay.tier(channel, tier, action)
        assert found.decide(agent, clock.now(), cost) == expected(decision)
        if decision.violation is not None:
            assert found.alert == decision.violation.alert
        if number % 7 == 0:
            replay.drop_full(clock.now())
            found._max_buckets = 0  # so that it drops them each time


def count_denials(policy: Policy, course: list[tuple[str, str, int, int]]) -> int:
    """The number of requests that a gate denies."""
    clock = ManualClock(start=1000)
    gate = Gate(policy, store=MemoryStore(clock=clock))
    denied = 0
    for agent, channel, cost, span in course:
        clock.advance(span)
        denied += gate.check(agent, channel, "normal", cost=cost).outcome is Outcome.DENY
    return denied


def suggested(course: list[tuple[str, str, int, int]], share: Fraction) -> Suggestion:
    at = 1000
    with TemporaryDirectory() as folder:
        path = Path(folder, "log.csv")
        with path.open("w") as log:
            log.write("time,agent,channel,cost\n")
            for agent, channel, cost, span in course:
                at += span
                log.write(f"{at},{agent},{channel},{cost}\n")
        with LogSet([str(path)], LogOptions()) as logs:
            (found,) = suggest(logs, Policy(exempt=["nobody"]), share)
    return found


shares = st.sampled_from([Fraction(0), Fraction(1, 1000), Fraction(1, 20), Fraction(1, 3), Fraction(99, 100)])
spans = st.sampled_from([0, 0, 1, 2, 5, 19, 61])
who = st.sampled_from(["a", "b", "c"])


@settings(max_examples=25)
@given(st.lists(st.tuples(who, channels, st.just(1), spans), min_size=1, max_size=60), shares, st.sampled_from([1, 3]))
def test_with_equal_costs_a_suggested_limit_is_the_lowest_that_suffices(
    course: list[tuple[str, str, int, int]], share: Fraction, cost: int
) -> None:
    course = [(agent, channel, cost, span) for agent, channel, _, span in course]
    most = len(course) * cost + 1
    denied = [count_denials(Policy(limits={"normal": f"{n}/minute"}), course) for n in range(1, most + 1)]
    assert all(more >= less for more, less in pairwise(denied))  # a higher limit never denies more
    lowest = next(n for n, count in enumerate(denied, 1) if count <= share * len(course))
    found = suggested(course, share)
    less = denied[lowest - 2] if lowest > 1 else None
    assert found == Suggestion("normal", lowest, len(course), denied[lowest - 1], less, True)


@settings(max_examples=25)
@given(st.lists(st.tuples(who, channels, st.sampled_from([1, 1, 2, 7, 30]), spans), min_size=1, max_size=40), shares)
def test_with_any_costs_a_suggested_limit_suffices_and_one_less_does_not(
    course: list[tuple[str, str, int, int]], share: Fraction
) -> None:
    found = suggested(course, share)
    assert found.limit is not None
    assert found.lowest == (len({cost for _, _, cost, _ in course}) == 1)
    assert (
        found.denied == count_denials(Policy(limits={"normal": f"{found.limit}/minute"}), course) <= share * len(course)
    )
    if found.limit > 1:
        less = count_denials(Policy(limits={"normal": f"{found.limit - 1}/minute"}), course)
        assert found.denied_one_less == less > share * len(course)
