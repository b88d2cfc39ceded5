"""tools/check_history.py: forged histories are convicted, honest ones acquitted."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.hold_model import SECOND, random_history
from tools.check_history import Crime, check_history
from tools.history_accounts import Curve
from tools.history_calls import NoHistory

pytestmark = pytest.mark.once

ROOT = Path(__file__).parent.parent
Line = dict[str, Any]
BUCKET: Line = {"limit": "B", "kind": "bucket", "capacity": 10, "refill": 1, "per": 1}
WINDOW: Line = {"limit": "W", "kind": "window", "most": 10, "seconds": 10}
SLOTS: Line = {"limit": "S", "kind": "slots", "most": 1}
BUDGET: Line = {"limit": "M", "kind": "budget", "amount": 10, "periods": [0, 100 * SECOND]}
LIMITS = [BUCKET, WINDOW, SLOTS, BUDGET]  # lines 1 to 4


def call(
    verb: str, limits: str, at: float, said: str | None = "passed", until: float | None = None, **more: Any
) -> Line:
    """A call of key `a` on the limits with these letters, exact or with an end; times in seconds."""
    times = {"called": round(at * SECOND), "returned": round((at if until is None else until) * SECOND)}
    return {"verb": verb, "key": "a", "limits": list(limits), "said": said, **times, **more}


def check(limits: str, at: float, cost: int = 1, said: str = "passed", **more: Any) -> Line:
    return call("check", limits, at, said, cost=cost, **more)


def hold(name: str, limits: str, at: float, cost: int = 1, said: str | None = "passed", **more: Any) -> Line:
    return call("hold", limits, at, said, **{"cost": cost, "hold": name, "lease": 10 * SECOND, **more})


def settle(name: str, at: float, cost: int, **more: Any) -> Line:
    return call("settle", "", at, **{"hold": name, "cost": cost, **more})


def cancel(name: str, at: float, **more: Any) -> Line:
    return call("cancel", "", at, hold=name, **more)


def extend(name: str, at: float, said: str = "passed", **more: Any) -> Line:
    return call("extend", "", at, said, hold=name, **more)


def peek(limits: str, at: float, remaining: int, **more: Any) -> Line:
    return call("peek", limits, at, remaining=remaining, **more)


def kill(line: Line) -> Line:
    return {**line, "said": None, "returned": None}


def found_crimes(*lines: Line, lenient: bool = False) -> list[Crime]:
    return check_history([*LIMITS, *lines], lenient_denials=lenient)


FORGED = {
    "a bucket lets more pass than it had": ("exceeded", [check("B", 0, 10), check("B", 0.999999)]),
    "a bucket forgets a debt": ("exceeded", [call("charge", "B", 0, cost=20), check("B", 10)]),
    "a bucket gives back what had refilled": (
        "exceeded", [hold("h", "B", 0, 10), check("B", 9, 9), settle("h", 9, 1), check("B", 9, 10)],
    ),
    "a window lets more pass than it had": ("exceeded", [check("W", 0, 4), check("W", 9, 6), check("W", 9.999999)]),
    "a slot is taken twice": ("exceeded", [hold("h1", "S", 0), hold("h2", "S", 9.999999)]),
    "a slot is doubled by an expiry": (
        "exceeded", [hold("h1", "S", 0), hold("h2", "S", 10), settle("h1", 11, 1), hold("h3", "S", 12)],
    ),
    "a check passes without a free slot": ("exceeded", [hold("h1", "S", 0), check("S", 1)]),
    "a budget is overspent by a check": ("exceeded", [hold("h1", "M", 0, 8), check("M", 50, 3)]),
    "a budget is overspent by an extend": ("exceeded", [hold("h", "M", 0, 8), extend("h", 1, cost=3)]),
    "an extend lengthens a lease only on paper": (
        "exceeded", [hold("h1", "S", 0), extend("h1", 9, lease=10 * SECOND), hold("h2", "S", 18)],
    ),
    "an ended hold is extended": ("ended", [hold("h", "S", 0), extend("h", 10, lease=10 * SECOND)]),
    "a settled hold is extended": ("ended", [hold("h", "M", 0), settle("h", 1, 1), extend("h", 2, cost=1)]),
    "what was never held is settled": ("ended", [hold("h1", "B", 0, 11, "denied"), settle("h1", 1, 5)]),
    "a slot is lost after the end of the lease": (
        "wrongly denied", [hold("h1", "S", 0), hold("h2", "S", 10, said="denied")],
    ),
    "a slot is lost after a cancel": (
        "wrongly denied", [hold("h1", "S", 0), cancel("h1", 1), check("S", 1, said="denied")],
    ),
    "a denial spends": (
        "wrongly denied", [check("B", 0, 6), check("B", 0, 5, "denied"), check("B", 0, 4, "denied")],
    ),
    "all or nothing is broken: the first of two limits was charged": (
        "booked twice", [hold("h1", "S", 0), hold("h2", "BS", 0, 4, "denied"), peek("B", 0, 6)],
    ),
    "all or nothing is broken: the second of two limits was not charged": (
        "lost", [check("BW", 0, 4), peek("W", 0, 10)],
    ),
    "a settle is booked twice": (
        "booked twice", [hold("h", "M", 0, 2), settle("h", 1, 4), settle("h", 2, 4), peek("M", 3, 2)],
    ),
    "a hold is booked twice": ("booked twice", [kill(hold("h", "W", 0, 2)), hold("h", "W", 1, 2), peek("W", 2, 6)]),
    "a settle is booked beside the reservation": (
        "booked twice", [hold("h", "M", 0, 5), settle("h", 1, 3), peek("M", 2, 2)],
    ),
    "a settle is booked into the wrong period": (
        "booked twice", [hold("h", "M", 99, 2), settle("h", 101, 8), peek("M", 102, 2)],
    ),
    "a give-back is booked into the wrong period": (
        "lost", [hold("h", "M", 99, 8), check("M", 100, 5), cancel("h", 101), peek("M", 102, 10)],
    ),
    "a released cost is not given back": (
        "wrongly denied", [hold("h", "M", 0, 8, release=True), check("M", 10, 8, "denied")],
    ),
    "a cost that stays is given back": ("exceeded", [hold("h", "M", 0, 8), check("M", 10, 8)]),
    "a cost is charged after a cancel": ("booked twice", [hold("h", "W", 0, 3), cancel("h", 1), peek("W", 2, 7)]),
    "a charge is lost": ("lost", [call("charge", "M", 0, cost=7), peek("M", 1, 10)]),
    "a hold proven by a settle is lost": ("lost", [kill(hold("h", "M", 0, 4)), settle("h", 1, 4), peek("M", 1, 10)]),
    "a refund is lost": ("booked twice", [check("B", 0, 7), call("refund", "B", 0, cost=3), peek("B", 0, 3)]),
    "a window counts for too long": ("wrongly denied", [check("W", 0, 10), check("W", 10, said="denied")]),
    "a wait is too long": ("retry too late", [check("B", 0, 10), check("B", 0, 2, "denied", retry=2 * SECOND + 1)]),
    "a wait is too short": ("retry too early", [check("W", 0, 10), check("W", 3, 2, "denied", retry=7 * SECOND - 1)]),
    "a wait for a slot outlasts the lease": (
        "retry too late", [hold("h1", "S", 0), hold("h2", "S", 4, said="denied", retry=7 * SECOND)],
    ),
    "holds that overlap pass together": (
        "exceeded", [hold("h1", "S", 0, until=2), hold("h2", "S", 1, until=3)],
    ),
    "checks that overlap pass together": ("exceeded", [check("B", 0, 6, until=0.5), check("B", 0.2, 6, until=0.9)]),
    "a budget is overspent by holds that overlap": ("exceeded", [hold(name, "M", 0, 4, until=5) for name in "xyz"]),
    "a denial has room throughout": (
        "wrongly denied", [check("W", 0, 5, until=1), check("W", 0, 5, "denied", until=1)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_history_is_convicted(name: str) -> None:
    kind, lines = FORGED[name]
    found = found_crimes(*lines)
    assert [crime.kind for crime in found] == [kind], found
    assert str(len(LIMITS) + len(lines)) in found[0].lines, "it was committed in the last line"


# Holds over several levels --------------------------------------------------------------------------------------------

METER: Line = {"limit": "U", "kind": "meter"}  # line 5
LEVELS = [["M", "acme"], ["M", "acme/a"], ["B", "acme/a"], ["S", "acme/a"], ["U", "acme/a"]]
"""A budget on two levels, and on the lower one a bucket, a slot and a meter."""


def levels(name: str, at: float, cost: int | list[int], said: str | None = "passed", **more: Any) -> Line:
    return {**hold(name, "", at, said=said, **more), "limits": LEVELS, "cost": cost}


def usage(at: float, counted: int, **more: Any) -> Line:
    return {**call("usage", "", at, **more), "limits": [["U", "acme/a"]], "counted": counted}


def look(limit: str, key: str, at: float, remaining: int) -> Line:
    return {**peek("", at, remaining), "limits": [[limit, key]]}


def find(name: str, at: float, state: str, cost: int | list[int], **more: Any) -> Line:
    return call("find", "", at, **{"hold": name, "state": state, "cost": cost, **more})


NEIGHBOUR = {**hold("n", "", 0, 7), "limits": [["M", "acme"], ["M", "acme/b"]]}

FORGED_LEVELS = {
    "only the upper level is exceeded": ("exceeded", [NEIGHBOUR, levels("h", 1, 4)]),
    "only the lower level is exceeded": (
        "exceeded", [{**call("charge", "", 0, cost=7), "limits": [["M", "acme/a"]]}, levels("h", 1, 4)],
    ),
    "an extend exceeds the upper level": ("exceeded", [NEIGHBOUR, levels("h", 1, 3), extend("h", 2, cost=1)]),
    "a slot on one level is taken twice": ("exceeded", [levels("g", 0, 1), levels("h", 1, 1)]),
    "a denial charges the upper level": (
        "booked twice", [levels("g", 0, 1), levels("h", 1, 5, "denied"), look("M", "acme", 2, 4)],
    ),
    "a denial charges the lower level": (
        "booked twice", [NEIGHBOUR, levels("h", 1, 5, "denied"), look("M", "acme/a", 2, 5)],
    ),
    "a denied extend charges another level": (
        "booked twice",
        [NEIGHBOUR, levels("h", 1, 3), extend("h", 2, "denied", cost=2), look("B", "acme/a", 2, 6)],
    ),
    "a denial is counted by a meter": ("booked twice", [NEIGHBOUR, levels("h", 1, 5, "denied"), usage(2, 5)]),
    "one level isn't charged": ("lost", [levels("h", 0, 5), look("M", "acme", 1, 10)]),
    "nothing is short on any level": ("wrongly denied", [levels("h", 0, 10, "denied")]),
    "a cost of 0 passes where nothing is left": (
        "exceeded", [levels("g", 0, [10, 1, 1, 1, 1], lease=SECOND), levels("h", 1, 0)],
    ),
    "a cost of 0 is denied where something is left": (
        "wrongly denied", [levels("g", 0, [9, 9, 1, 1, 1], lease=SECOND), levels("h", 1, 0, "denied")],
    ),
    "a hold is settled twice": ("settled twice", [levels("h", 0, 5), settle("h", 1, 3), settle("h", 2, 4)]),
    "a cancelled hold is settled": ("settled twice", [levels("h", 0, 5), cancel("h", 1), settle("h", 2, 4)]),
    "a settle is counted beside the reservation": (
        "booked twice", [levels("h", 0, 5), settle("h", 1, 3), usage(2, 8)],
    ),
    "a settle isn't counted": ("booked twice", [levels("h", 0, 5), settle("h", 1, 3), usage(2, 5)]),
    "what was settled in excess isn't counted": ("lost", [levels("h", 0, 5), settle("h", 1, 7), usage(2, 5)]),
    "a unit of usage is lost": (
        "lost", [levels("g", 0, 5, lease=SECOND), levels("h", 2, [1, 1, 1, 1, 4]), settle("h", 3, 3), usage(4, 7)],
    ),
    "a killed holder's cost is counted twice": (
        "booked twice", [kill(levels("h", 0, 5)), find("h", 1, "open", 5), usage(2, 10)],
    ),
    "a killed holder's cost isn't counted": (
        "lost", [{**kill(levels("h", 0, 5)), "returned": SECOND // 2}, find("h", 1, "open", 5), usage(2, 0)],
    ),
    "a granted hold is unknown": ("lost", [levels("h", 0, 5), find("h", 1, "", 0, said="refused")]),
    "a denied hold is known": ("ended", [levels("h", 0, 20, "denied"), find("h", 1, "open", 20)]),
    "a hold is known with another cost": ("booked twice", [levels("h", 0, 5), find("h", 1, "open", 6)]),
    "a settled hold is known with less": ("lost", [levels("h", 0, 5), settle("h", 1, 4), find("h", 2, "settled", 3)]),
    "a settled hold is open": ("lost", [levels("h", 0, 5), settle("h", 1, 5), find("h", 2, "open", 5)]),
    "a hold is settled by nobody": ("booked twice", [levels("h", 0, 5), find("h", 2, "settled", 3)]),
    "a forced hold isn't counted": ("exceeded", [levels("g", 0, 12, lease=SECOND, forced=True), levels("h", 1, 1)]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED_LEVELS)
def test_a_forged_history_over_several_levels_is_convicted(name: str) -> None:
    kind, lines = FORGED_LEVELS[name]
    found = check_history([*LIMITS, METER, *lines])
    assert {crime.kind for crime in found} == {kind}, found
    assert str(len(LIMITS) + 1 + len(lines)) in found[-1].lines, "it was committed in the last line"


ENDED_IN_TIME = {"returned": SECOND // 2}
HONEST_LEVELS = {
    "a denial on one level changes nothing on another": [
        NEIGHBOUR, levels("h", 1, 4, "denied"), look("M", "acme/a", 2, 10), look("B", "acme/a", 2, 10), usage(2, 0),
        levels("h2", 3, 3), look("M", "acme", 4, 0), usage(4, 3),
    ],
    "what is settled is used": [
        levels("h", 0, 5), usage(0, 5), settle("h", 1, 7), usage(2, 7), levels("g", 3, [1, 1, 0, 1, 1], release=True),
        usage(4, 8), usage(13, 7), cancel("h2", 13, said="refused"),
    ],
    "a cost of 0": [
        levels("g", 0, [9, 9, 1, 1, 1], lease=SECOND), levels("h", 1, 0, lease=SECOND), levels("i", 2, [1, 1, 1, 1, 1]),
        levels("j", 3, 0, "denied"), usage(4, 2),
    ],
    "a forced hold": [
        levels("g", 0, 12, forced=True), levels("h", 1, 0, "denied"), extend("g", 2, cost=3), usage(3, 15),
        settle("g", 4, 2), levels("h2", 5, 8), usage(6, 10),
    ],
    "a killed hold that took effect": [
        {**kill(levels("h", 0, 5)), **ENDED_IN_TIME}, find("h", 1, "expired", 5), usage(2, 5),
    ],
    "a killed hold that did not": [
        {**kill(levels("h", 0, 5)), **ENDED_IN_TIME}, find("h", 1, "", 0, said="refused"), usage(2, 0),
    ],
    "a killed settle that took effect": [
        levels("h", 0, 5), {**kill(settle("h", 0.1, 2)), **ENDED_IN_TIME}, find("h", 1, "settled", 2), usage(2, 2),
    ],
    "a killed settle that did not": [
        levels("h", 0, 5), {**kill(settle("h", 0.1, 2)), **ENDED_IN_TIME}, find("h", 1, "open", 5), usage(2, 5),
    ],
    "a killed extend that took effect": [
        levels("h", 0, 5), {**kill(extend("h", 0.1, cost=2)), **ENDED_IN_TIME}, find("h", 1, "open", 7), usage(2, 7),
    ],
    "a killed extend that did not": [
        levels("h", 0, 5), {**kill(extend("h", 0.1, cost=2)), **ENDED_IN_TIME}, find("h", 1, "open", 5), usage(2, 5),
    ],
    "an extend while another limit is in debt": [
        levels("h", 0, 1), {**call("charge", "", 0, cost=12), "limits": [["B", "acme/a"]]},
        extend("h", 1, "denied", cost=[1, 1, 0, 0, 1]), usage(2, 1),
    ],
    "a find while a call is under way": [
        levels("h", 0, 5), settle("h", 1, 3, until=3), find("h", 2, "open", 5), usage(4, 3),
    ],
    "a cancel and a settle with nothing": [levels("h", 0, 5), cancel("h", 1), settle("h", 2, 0), usage(2, 0)],
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST_LEVELS)
def test_an_honest_history_over_several_levels_is_acquitted(name: str) -> None:
    assert check_history([*LIMITS, METER, *HONEST_LEVELS[name]]) == []


HONEST = {
    "a bucket refills": [
        check("B", 0, 10), check("B", 1), check("B", 1.5, said="denied", retry=SECOND // 2), check("B", 2),
    ],
    "a bucket takes as if the settled cost had been taken at once": [
        hold("h", "B", 0, 10), check("B", 9, 9), settle("h", 9, 1), peek("B", 9, 1), check("B", 9, 2, "denied"),
    ],
    "a settle leaves a debt": [
        hold("h", "BM", 0, 5), settle("h", 0, 15), peek("B", 0, 0), peek("M", 0, -5), check("B", 6),
    ],
    "a wait of a microsecond": [check("B", 0, 9), check("B", 0.999999), check("B", 0.999999, said="denied", retry=1)],
    "a lease that an extend may have shortened": [
        hold("h1", "S", 0), extend("h1", 1, lease=2 * SECOND), hold("h2", "S", 5, said="denied"), hold("h3", "S", 6),
    ],
    "a settle between the hold's cost and the extended one, in both readings": [
        hold("h", "B", 0, 2), extend("h", 5, cost=4), settle("h", 5, 4), peek("B", 5, 10), peek("B", 5, 8),
    ],
    "a window": [check("W", 0, 10), check("W", 9.999999, said="denied", retry=1), check("W", 10, 10)],
    "a slot is free when the lease ends, and after a cancel": [
        hold("h1", "S", 0), check("S", 5, said="denied"), hold("h2", "S", 10), cancel("h2", 11), hold("h3", "S", 11),
    ],
    "an extend counts from its instant": [
        hold("h1", "S", 0), extend("h1", 9, lease=2 * SECOND), hold("h2", "S", 10, said="denied"), hold("h3", "S", 11),
    ],
    "a denied extend changes nothing": [hold("h", "M", 0, 8), extend("h", 1, "denied", cost=3), peek("M", 2, 2)],
    "a settle belongs to the period of its hold": [hold("h", "M", 99, 8), settle("h", 100, 9), check("M", 100, 10)],
    "repeated verbs are the same": [
        kill(hold("h", "MS", 0, 4)), hold("h", "MS", 1, 4), settle("h", 2, 3), settle("h", 3, 3), peek("M", 4, 7),
    ],
    "a killed holder's slot heals": [
        kill(hold("h1", "S", 0)), hold("h2", "S", 1, said="denied"), hold("h3", "S", 20),
    ],
    "a killed check may count or not": [kill(check("M", 0, 6)), check("M", 1, 5, "denied"), peek("M", 2, 10)],
    "a killed settle may count or not": [
        hold("h", "M", 0, 6), kill(settle("h", 1, 0)), peek("M", 2, 10), peek("M", 3, 4),
    ],
    "released costs come back": [hold("h", "MW", 0, 8, release=True), check("MW", 10, 8)],
    "a settle in a period of which nobody is sure": [
        hold("h", "M", 99, 8, until=101), check("M", 100, 8, until=101), check("M", 99, 8, "denied", until=101),
    ],
    "calls that overlap": [hold("h1", "S", 0, until=3), cancel("h1", 3, until=5), hold("h2", "S", 4, until=6)],
    "an account of another key": [
        check("M", 0, 10), {**check("M", 1, 10), "limits": [["M", "b"]]},
        {**check("MB", 2), "cost": [0, 5]}, peek("B", 2, 5),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_history_is_acquitted(name: str) -> None:
    assert found_crimes(*HONEST[name]) == []


def test_the_extremes_of_a_long_span_are_those_of_its_values() -> None:
    dice = random.Random(1)
    values = [dice.randint(0, 10**9) for _ in range(20_000)]
    curve = Curve(list(range(len(values))), values, [], 0, 1)
    for _ in range(50):
        first, last = sorted(dice.sample(range(1, len(values)), 2))
        assert curve.least(first, last) == min(values[first - 1 : last])
        assert curve.most(first, last) == max(values[first - 1 : last])


def test_a_verdict_names_the_lines_that_prove_it() -> None:
    found = found_crimes(check("B", 0, 10), check("B", 60, 7), check("B", 61, 2), check("S", 61), check("B", 61, 3))
    assert str(found[0]) == "exceeded: check of 3 passed, B of a: at least 8 of 10 taken (lines 9, 7, 6)"


def test_lenient_denials_forgive_where_a_rate_was_given_back() -> None:
    given_back = [hold("h", "B", 0, 10), settle("h", 0, 1), check("B", 0, 2, "denied"), peek("B", 0, 0)]
    assert [crime.kind for crime in found_crimes(*given_back)] == ["wrongly denied", "booked twice"]
    assert found_crimes(*given_back, lenient=True) == []
    assert found_crimes(*given_back, check("W", 0, 2, "denied"), lenient=True), "another account"
    assert found_crimes(*given_back, check("B", 0, 10), lenient=True), "no limit is exceeded"


@pytest.mark.parametrize("jitter", [0, 2, SECOND // 3, 3 * SECOND])
@pytest.mark.parametrize("killed", [0.0, 0.1])
def test_random_honest_histories_are_acquitted(jitter: int, killed: float) -> None:
    for seed in range(3):
        history = random_history(seed, 120, jitter=jitter, killed=killed)
        assert check_history(history) == [], seed


def mutate(history: list[Line], dice: random.Random, kind: str) -> bool:
    """Forge one line; whether there was one to forge."""
    wanted = {
        "pass": "denied",
        "deny": "passed",
        "more": "passed",
        "less": "passed",
        "late": "denied",
        "early": "denied",
    }
    verbs = {"more": ("peek",), "less": ("peek",)}.get(kind, ("check",))
    lines = [line for line in history if line.get("verb") in verbs and line["said"] == wanted[kind]]
    lines = [line for line in lines if kind not in ("late", "early") or line.get("retry")]
    if not lines:
        return False
    line = dice.choice(lines)
    if kind in ("pass", "deny"):
        line.update(said="passed" if kind == "pass" else "denied", retry=None)
    elif kind in ("more", "less"):
        line["remaining"] += 1 if kind == "more" else -1
    else:
        line["retry"] += 1 if kind == "late" else -1
        del history[history.index(line) + 1 :]
    return True


@pytest.mark.parametrize("kind", ["pass", "deny", "more", "less", "late", "early"])
def test_a_forged_line_of_an_exact_history_is_convicted(kind: str) -> None:
    tried = convicted = 0
    for seed in range(20):
        history = [dict(line) for line in random_history(seed, 120)]
        if mutate(history, random.Random(seed), kind):
            tried += 1
            convicted += bool(check_history(history))
    assert tried >= 10
    assert convicted >= tried * 0.9  # a debt hides that a bit more is left, and a refund how much


@pytest.mark.long
@pytest.mark.parametrize("kind", ["pass", "deny", "more", "less"])
def test_forged_lines_of_a_history_with_calls_that_last_are_often_convicted(kind: str) -> None:
    convicted = 0
    for seed in range(20):
        history = [dict(line) for line in random_history(seed, 120, jitter=SECOND // 10)]
        dice = random.Random(seed)
        for _ in range(5):
            mutate(history, dice, kind)
        convicted += bool(check_history(history))
    assert convicted >= 15


@pytest.mark.parametrize(
    ("line", "mistake"),
    [
        (check("X", 0), "expected limits declared before"),
        (check("B", 1, until=0), "expected `returned` from `called` on"),
        ({**check("B", 1), "returned": None}, "expected `returned`, as it is known what was said"),
        ({**check("B", 1), "cost": 1.5}, "expected whole numbers"),
        ({**check("B", 1), "verb": "ask"}, "expected a verb of check, hold"),
        ({**call("usage", "B", 1), "counted": 1}, "expected a meter"),
        (find("h", 1, "away", 1), "expected a state of open, expired"),
        ({"limit": "B", "kind": "slots", "most": 3}, "expected B as declared before"),
        ({"limit": "Z", "kind": "zone"}, "expected a limit or a call"),
        ({}, "expected a limit or a call"),
    ],
)
def test_what_is_no_history_is_refused(line: Line, mistake: str) -> None:
    with pytest.raises(NoHistory, match=rf"line 5: {mistake}"):
        found_crimes(line)


def test_no_calls_are_no_history() -> None:
    with pytest.raises(NoHistory, match="expected calls, got none"):
        found_crimes()


def test_one_id_for_two_holds_is_refused() -> None:
    with pytest.raises(NoHistory, match="line 6: expected the arguments of h in line 5"):
        found_crimes(hold("h", "M", 0, 1), hold("h", "M", 1, 2))


def test_the_program_says_what_it_found(tmp_path: Path) -> None:
    parts = [[*LIMITS, hold("h1", "S", 0)], [BUCKET, hold("h2", "S", 1)], [{"verb": "guess"}]]
    files = [tmp_path / f"{number}.jsonl" for number in range(3)]
    for file, lines in zip(files, parts, strict=True):
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")

    def run(*names: Path) -> tuple[int, str]:
        program = [sys.executable, "tools/check_history.py", *map(str, names)]
        done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout + done.stderr

    assert run(files[0]) == (0, "no crime\n")
    proof = "exceeded: hold of 1 passed, S of a: at least 1 of 1 taken (lines 1.jsonl:2, 0.jsonl:5)\n1 crimes\n"
    assert run(*files[:2]) == (1, proof)
    code, output = run(*files)
    assert code == 2
    assert "line 2.jsonl:1: expected a limit or a call" in output


@pytest.mark.parametrize("limit", ["W", "M"])
@pytest.mark.parametrize("cost", [4, 5, 6])
def test_what_is_settled_after_it_came_back_need_not_fit(limit: str, cost: int) -> None:
    """Whether it is less than what was held, the same or more."""
    late = [
        hold("h1", limit, 0, 5, until=0.1, release=True, lease=SECOND),
        hold("h2", limit, 2, 10, until=2.1),
        settle("h1", 3, cost, until=3.1),
    ]
    assert check_history([*LIMITS, *late]) == []
    too_much = hold("h3", limit, 4, 1, until=4.1)
    assert [crime.kind for crime in check_history([*LIMITS, *late, too_much])] == ["exceeded"]


@pytest.mark.parametrize(("shown", "kind"), [(5, "lost"), (4, None), (3, "booked twice")])
def test_what_is_settled_after_it_came_back_counts_once(shown: int, kind: str | None) -> None:
    late = [
        hold("h", "M", 0, 5, until=0.1, release=True, lease=SECOND),
        settle("h", 3, 6, until=3.1),
        peek("M", 4, shown, until=4.1),
    ]
    assert [crime.kind for crime in check_history([*LIMITS, *late])] == ([kind] if kind else [])
