"""Decisions as values."""

import pickle

import pytest

from headgate import BLOCKED, Decision, Limiter, ManualClock, MemoryStore, Outcome, per_minute, per_second
from headgate.limits.decision import Violation
from headgate.limits.violations import Standing


def limiter() -> Limiter:
    return Limiter([per_second(5), per_minute(20)], store=MemoryStore(clock=ManualClock()))


def test_the_fields_of_a_decision() -> None:
    decision = limiter().check("a")
    assert decision
    assert decision.outcome is Outcome.ALLOW
    assert decision.limit == per_second(5)
    assert decision.bound == 0
    assert decision.remaining == 4
    assert decision.retry_after == 0.0
    assert decision.reset_after == 0.2
    assert repr(decision) == (
        "Decision(ALLOW, limit='5/second', remaining=4, retry_after=0.0, reset_after=0.2, bound=0)"
    )


def test_a_denial_is_false_and_knows_its_wait() -> None:
    limited = limiter()
    for _ in range(5):
        assert limited.check("a")
    decision = limited.check("a")
    assert not decision
    assert decision.outcome is Outcome.DENY
    assert (decision.remaining, decision.retry_after, decision.bound) == (0, 0.2, 0)
    assert Limiter(BLOCKED).check("a").retry_after is None


def test_bound_names_the_limit_that_decided() -> None:
    """It denies with the longest wait; or warns; or has the least left."""
    clock = ManualClock()
    limited = Limiter([per_second(5), per_minute(20)], store=MemoryStore(clock=clock))
    bounds = []
    for _ in range(5):
        bounds.append([limited.check("a").bound for _ in range(5)])
        clock.advance(1)
    # In the fourth second 20/minute warns first; at the fifth check both do, and 5/second has less left.
    assert bounds == [[0] * 5, [0] * 5, [0] * 5, [0, 0, 1, 1, 0], [1] * 5]


def test_equal_decisions_are_equal_and_pickle() -> None:
    one, two = limiter().check("a"), limiter().check("b")
    assert one == two
    assert hash(one) == hash(two)
    assert pickle.loads(pickle.dumps(one)) == one
    assert one != limiter().check("a", 2)
    assert one != "allow"


def test_values_of_two_classes_are_never_equal() -> None:
    violation, standing = Violation(1, 0, False), Standing(1, 0, 0)
    assert violation._fields() == standing._fields()
    assert violation != standing
    assert violation == Violation(1, 0, False)


@pytest.mark.parametrize("name", ["outcome", "limit", "remaining", "retry_after", "reset_after", "bound", "anything"])
def test_a_decision_is_frozen(name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(limiter().check("a"), name, 1)


def test_outcomes() -> None:
    assert [outcome.value for outcome in Outcome] == ["allow", "warn", "deny", "exempt"]
    assert Decision.__name__ == "Decision"
