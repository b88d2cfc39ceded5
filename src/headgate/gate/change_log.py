"""The log of changes: its short form, once it has become long, and one in memory."""

from collections.abc import Callable, Sequence
from typing import Final

from headgate.gate.effective import MAX_FORMER, effective, places_of
from headgate.gate.policy import Policy
from headgate.stores.base import UNREADABLE, Block, Change, Edit, LogPage

KEPT: Final = 10_000
"""The newest changes, which stay readable when a log is compacted."""
_CLOCKS_APART: Final = 86_400.0  # seconds by which the clocks of two nodes may differ


def condense(policy: Policy, edits: Sequence[Edit], now: float = 0.0) -> list[Edit]:
    """The edits that still have an effect at a time of day, for the snapshot of a compacted log.

    An edit has none once a later one covers it. A removal may have none under this policy and some under another: the
    newest `KEPT` of those stay. Defaults carry their generation, which can't be counted any more. That of a tier that
    this policy lacks isn't known here, so the newest `KEPT` of each stay: another node may have the tier.
    """
    edits = [edit for edit in edits if edit.kind != UNREADABLE]
    defaults = [edit for edit in edits if edit.kind == "default"]
    generations = effective(policy, defaults).generations
    numbered = [
        Edit(
            "default",
            "",
            *where,
            next(edit.value for edit in reversed(defaults) if where in places_of(policy, edit)),
            number,
        )
        for where, number in generations.items()
    ]
    ordered = [*edits, *numbered]
    kept: dict[tuple[str, str, str], list[int]] = {}  # places in that list
    for place, edit in enumerate(ordered):
        unknown = edit.tier if edit.kind == "default" and edit.tier not in policy.tiers else ""
        earlier = kept.pop((edit.kind, edit.agent, unknown), [])  # the newest goes last
        if edit.kind == "account":  # the accounts that an agent has left are looked for its holds
            earlier = [other for other in earlier if ordered[other].value != edit.value][-MAX_FORMER:]
        elif not unknown:
            earlier = [other for other in earlier if not _covers(edit, ordered[other])]
        earlier.append(place)
        kept[edit.kind, edit.agent, unknown] = earlier
    in_policy = {
        "override": policy.overrides,
        "exemption": policy.exempt,
        "default": {""},
        "session": {"", *policy.session_overrides},
    }
    removals = [
        (kind, agent, unknown)
        for (kind, agent, unknown), of_agent in kept.items()
        if agent not in in_policy.get(kind, ()) and all([ordered[place].value is None for place in of_agent])
    ]
    ended = [key for key, of_agent in kept.items() if key[0] == "block" and _has_ended(ordered[of_agent[-1]], now)]
    for key in [*removals[:-KEPT], *ended]:
        del kept[key]
    # In their order: what takes back all defaults must not take back later ones.
    return [ordered[place] for place in sorted([place for of_agent in kept.values() for place in of_agent[-KEPT:]])]


def _has_ended(edit: Edit, now: float) -> bool:
    """Whether a block has ended for every node."""
    until = None if edit.value is None else Block.read(edit.value).until
    return until is not None and until < now - _CLOCKS_APART


def _covers(later: Edit, earlier: Edit) -> bool:
    return later.channel in ("", earlier.channel) and later.tier in ("", earlier.tier)


class MemoryChangeLog:
    """A change log in memory, gone with the process."""

    def __init__(self) -> None:
        self._snapshot: tuple[Edit, ...] = ()
        self._changes: list[Change] = []
        self._position = 0

    def read(self, after: int = 0) -> LogPage:
        return LogPage(self._snapshot, list(self._changes), self._position)

    def write(self, change: Change) -> int:
        self._changes.append(change)
        self._position += len(change.edits)
        return self._position

    def compact(self, keep: int, condense: Callable[[Sequence[Edit]], Sequence[Edit]]) -> int:
        dropped, kept = self._changes[:-keep], self._changes[-keep:]
        self._snapshot = tuple(condense([*self._snapshot, *(edit for change in dropped for edit in change.edits)]))
        self._changes = kept
        return len(kept)

    def close(self) -> None:
        """Nothing to close."""
