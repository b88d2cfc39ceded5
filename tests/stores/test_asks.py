"""What stores are asked, and answer: values."""

import pickle
from typing import Any

import pytest

from headgate import Limiter, per_day, per_minute
from headgate.stores.asks import Ask
from headgate.stores.hold_terms import HoldAnswer, HoldTerms

DECISION = Limiter(per_minute(60)).check("a")

VALUES: list[tuple[Any, Any, Any, str]] = [
    (
        Ask("name", "key", per_minute(60), 1, "root"),
        Ask("name", "key", per_minute(60), 1, "root"),
        Ask("name", "key", per_minute(60), 2, "root"),
        "Ask('name', 'key', TokenBucket(capacity=60, refill=60, per=60), 1, root='root')",
    ),
    (
        HoldTerms("id", 60, False, 90, "note", "shape", 7, True),
        HoldTerms("id", 60, False, 90, "note", "shape", 7, forced=True),
        HoldTerms("id", 60, False, 90, "note", "shape", 7),
        "HoldTerms('id', 60, False, 90, 'note', 'shape', 7, True)",
    ),
    (
        HoldAnswer(DECISION, "open", (1, 2), 60, (DECISION,)),
        HoldAnswer(DECISION, "open", (1, 2), 60, (DECISION,)),
        HoldAnswer(DECISION, "open", (1, 2), 60),
        f"HoldAnswer({DECISION!r}, 'open', (1, 2), 60, ({DECISION!r},))",
    ),
]


@pytest.mark.parametrize(("one", "same", "other", "shown"), VALUES)
def test_they_are_values(one: Any, same: Any, other: Any, shown: str) -> None:
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one != shown
    assert repr(one) == shown
    assert pickle.loads(pickle.dumps(one)) == one


def test_they_are_changed_by_making_others() -> None:
    ask = Ask("name", "key", per_minute(60), 1, "root")
    assert ask.with_cost(5) == Ask("name", "key", per_minute(60), 5, "root")
    assert ask.with_limit(per_day(1)) == Ask("name", "key", per_day(1), 1, "root")
    terms = HoldTerms("id", 60, True, 90, "note", "shape", 7, True)
    assert terms.with_lease(5) == HoldTerms("id", 5, True, 90, "note", "shape", 7, True)
    answer = HoldAnswer(DECISION, "denied", (1,), 0, (DECISION,))
    assert answer.summary == ("denied", (1,), 0)
    assert answer.as_open(9) == HoldAnswer(DECISION, "open", (1,), 9, (DECISION,))
    assert answer.without_parts() == HoldAnswer(DECISION, "denied", (1,), 0)
    assert answer.without_parts().with_decision(DECISION, (DECISION,)) == answer
