"""What an operator has apply_change on top of the policy, and a book that remembers it.

Changes are kept as they were made, one after the other, with who made them and when. What holds is what comes of
applying them in order, by the one function that also applies them while running. So what runs and what is remembered
can't differ.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from headgate.gate.policy import Lane, Policy
from headgate.limits.decision import Limit
from headgate.limits.notation import parse
from headgate.stores.base import Change


class MemoryChangeLog:
    """A book in memory, gone with the process."""

    def __init__(self) -> None:
        self._changes: list[Change] = []

    def read(self) -> list[Change]:
        return list(self._changes)

    def write(self, change: Change) -> None:
        self._changes.append(change)

    def close(self) -> None:
        """Nothing to let go of."""


@dataclass(frozen=True)
class Effective:
    """What holds: the policy with all changes applied."""

    limits: Mapping[Lane, Limit]
    overrides: Mapping[str, Mapping[Lane, Limit]]
    exempt: frozenset[str]
    turns: Mapping[Lane, int] = field(default_factory=dict)
    """How often a default was apply_change. Each time counts in buckets of its own, so that everybody begins full."""


def effective(policy: Policy, changes: Iterable[Change] = ()) -> Effective:
    """What holds after these changes to a policy."""
    result = Effective(policy.limits, policy.overrides, policy.exempt)
    for change in changes:
        result = apply_change(result, policy, change)
    return result


def apply_change(before: Effective, policy: Policy, change: Change) -> Effective:
    """What holds after one more change."""
    if change.kind == "exemption":
        one = {change.agent}
        return replace(before, exempt=before.exempt - one if change.value is None else before.exempt | one)
    lanes = [
        lane for lane in policy.limits if change.channel in ("", lane[0]) and change.tier in ("", lane[1])
    ]  # a lane that the policy no longer has is left out
    if change.kind == "default":
        values = _values(lanes, change, policy)
        turns = {lane: before.turns.get(lane, 0) + 1 for lane in lanes if values[lane] != before.limits[lane]}
        return replace(before, limits={**before.limits, **values}, turns={**before.turns, **turns})
    own = {lane: limit for lane, limit in before.overrides.get(change.agent, {}).items() if lane not in lanes}
    if change.value is not None:
        own |= dict.fromkeys(lanes, parse(change.value))
    overrides = {agent: of_agent for agent, of_agent in before.overrides.items() if agent != change.agent}
    return replace(before, overrides={**overrides, change.agent: own} if own else overrides)


def _values(lanes: Iterable[Lane], change: Change, policy: Policy) -> dict[Lane, Limit]:
    """The limit set, or the policy's own where it was taken back."""
    return {lane: policy.limits[lane] if change.value is None else parse(change.value) for lane in lanes}
