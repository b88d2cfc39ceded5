"""What became of calls whose caller never knew, where a find was made after them. For tools/check_history.py."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tools.history_accounts import Limit
from tools.history_calls import UNKNOWN, Call, spread

Wrong = tuple[str, str, list[str]]  # the kind of a crime, its text, the lines that prove it
ENDS = ("settle", "cancel")


def resolve(group: Sequence[Call], limits: Mapping[str, Limit]) -> tuple[list[Call], list[Wrong]]:
    """The calls on one hold without finds, and what the last find can't have seen.

    If it was made after all others, those calls are left out that haven't taken effect, and those that have, have
    passed.
    """
    calls = [call for call in group if call.verb != "find"]
    finds = [call for call in group if call.verb == "find" and call.said in ("passed", "refused")]
    found = max(finds, key=lambda call: call.first, default=None)
    if found is None or any([call.last >= found.first for call in calls]):
        return calls, []
    known = [call for call in calls if call.said not in UNKNOWN]
    passed = [call for call in known if call.said == "passed"]
    taken = [call for call in calls if call.verb == "hold" and (call.said == "passed" or call.said in UNKNOWN)]
    if found.said == "refused":
        text = f"nothing is known of {found.hold}, which was granted"
        return known, [("lost", text, [found.line, passed[0].line])] if passed else []
    if not taken:
        return known, [("ended", f"{found.hold} was found, and never granted", [found.line])]
    hold = taken[0]
    if not any([call.verb == "hold" for call in passed]):
        known.append(replace(hold, said="passed"))
    places = [place for place, account in enumerate(hold.accounts) if limits[account[0]].kind != "slots"]

    def costs_of(call: Call) -> list[int]:
        spent = spread(call.costs, len(hold.accounts))
        return [0 if call.verb == "cancel" else spent[place] for place in places]

    unknown = [call for call in calls if call.said in UNKNOWN and call.verb != "hold"]
    explain = _settled if found.state in ("settled", "cancelled") else _unsettled
    effective, expected = explain(hold, passed, unknown, costs_of(found), costs_of)
    known += effective
    wrong: list[Wrong] = []
    settled = [call for call in passed if call.verb in ENDS]
    if settled and explain is _unsettled:
        wrong.append(("lost", f"{found.hold} is {found.state}, and was settled", [found.line, settled[0].line]))
    elif expected != (shown := costs_of(found)):
        kind = "booked twice" if expected is None or sum(shown) > sum(expected) else "lost"
        text = f"{found.hold} is {found.state} with {shown}, expected {expected}"
        wrong.append((kind, text, [found.line, hold.line]))
    return known, wrong


Costs = Callable[[Call], list[int]]


def _settled(
    hold: Call, passed: Sequence[Call], unknown: Sequence[Call], shown: list[int], costs_of: Costs
) -> tuple[list[Call], list[int] | None]:
    """Which of the unknown calls have settled it so, and the costs by all that is known; None if nobody has."""
    extends = [call for call in unknown if call.verb == "extend"]
    for call in passed:
        if call.verb in ENDS:
            return extends, costs_of(call)
    for call in unknown:
        if call.verb in ENDS and costs_of(call) == shown:
            return [*extends, replace(call, said="passed")], shown
    return extends, None


def _unsettled(
    hold: Call, passed: Sequence[Call], unknown: Sequence[Call], shown: list[int], costs_of: Costs
) -> tuple[list[Call], list[int] | None]:
    """Which of the unknown calls have extended it so, and the costs by all that is known."""
    effective = []
    expected = costs_of(hold)
    for call in passed:
        if call.verb == "extend":
            expected = _sums(expected, costs_of(call))
    for call in unknown:
        more = costs_of(call)
        if call.verb == "extend" and not any(more):
            effective.append(call)  # of the lease nothing is known
        elif call.verb == "extend" and all([a <= b for a, b in zip(_sums(expected, more), shown, strict=True)]):
            expected = _sums(expected, more)
            effective.append(replace(call, said="passed"))
    return effective, expected


def _sums(some: Sequence[int], others: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(some, others, strict=True)]
