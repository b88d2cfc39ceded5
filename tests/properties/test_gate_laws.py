"""The gate equals a reference under any interleaving of agents, channels, tiers and time."""

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from headgate import Gate, ManualClock, MemoryStore, Outcome, Policy
from headgate.stores.base import Verb
from headgate.stores.reference import BucketModel, ReferenceKey

LIMITS = {"light": 12, "normal": 6, "heavy": 2}
STEPS = (1, 2, 5, 10, 30)
POLICY = Policy(limits={tier: f"{count}/minute" for tier, count in LIMITS.items()})
names = st.one_of(
    st.sampled_from(
        ["a", "b", "a:ws", "ip", "ws", "http", "whitelist", "defaults", "agents", "1.2.3.4", "ws:heavy:own"]
    ),
    st.text(min_size=1, max_size=128).filter(str.isprintable),
)
requests = st.tuples(
    names,
    st.sampled_from(["ws", "http"]),
    st.sampled_from(list(LIMITS)),
    st.sampled_from([0, 0, 1, 500_000, 1_000_000, 10_000_000, 59_999_999, 60_000_000]),
)


class ReferenceAgent:
    """Violations as A9 and A10 define them."""

    def __init__(self) -> None:
        self.times: list[int] = []

    def consecutive(self, now: int) -> int:
        count, later = 0, now
        for at in reversed(self.times):
            if later - at >= 60_000_000:
                break
            count, later = count + 1, at
        return count


@settings(max_examples=200)
@given(st.lists(requests, max_size=60))
def test_a1_to_a10_any_interleaving_equals_the_reference(course: list[tuple[str, str, str, int]]) -> None:
    clock = ManualClock(start=1000)
    gate = Gate(POLICY, store=MemoryStore(clock=clock))
    buckets: dict[tuple[str, str, str], ReferenceKey] = {}
    agents: dict[str, ReferenceAgent] = {}
    for agent, channel, tier, span in course:
        clock.advance(Fraction(span, 1_000_000))
        now = clock.now()
        bucket = buckets.setdefault(
            (agent, channel, tier),
            ReferenceKey([BucketModel(LIMITS[tier], Fraction(LIMITS[tier]), Fraction(60))]),
        )
        expected = bucket.apply(Verb.CHECK, now, 1)
        violations = agents.setdefault(agent, ReferenceAgent())
        decision = gate.check(agent, channel, tier)
        assert (decision.outcome, decision.remaining) == (expected.outcome, expected.remaining)
        assert decision.reset_after == expected.reset_after
        assert decision.bucket_retry_after == expected.retry_after
        if expected.outcome is Outcome.DENY:
            violations.times.append(now)
            count = violations.consecutive(now)
            assert decision.violation is not None
            assert decision.violation.count == count
            assert decision.retry_after == max(expected.retry_after or 0, STEPS[min(count, 5) - 1])
        assert gate.standing(agent).violations == violations.consecutive(now)
        assert gate.is_rate_limited(agent) == (violations.consecutive(now) > 0)


@given(st.lists(st.tuples(names, st.sampled_from(["ws", "http"]), st.sampled_from(list(LIMITS))), unique=True))
def test_a3_keys_never_collide(lanes: list[tuple[str, str, str]]) -> None:
    """Each lane has a bucket of its own, whatever the names; so has each address and session."""
    gate = Gate(POLICY)
    for agent, channel, tier in lanes:
        assert gate.check(agent, channel, tier, cost=LIMITS[tier])
    for agent, channel, tier in lanes:
        assert not gate.check(agent, channel, tier)
    assert gate.check_address("1.2.3.4", cost=60)
    for agent, _, _ in lanes:
        for session in ("", agent, "ws"):
            assert gate.session(agent, session).check()
    assert gate.active_buckets == len({(agent, session) for agent, _, _ in lanes for session in ("", agent, "ws")})
