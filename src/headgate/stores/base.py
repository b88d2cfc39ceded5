"""Stores: where the state of limits lives, and whose clock counts."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple, Protocol, runtime_checkable

from headgate.limits.clock import Clock
from headgate.limits.decision import Decision, Limit, Rule, Violation
from headgate.limits.violations import Backoff, Standing

REMEMBERED: Final = 60_000_000
"""Microseconds for which a request's id is remembered."""


ON_FAILURE: Final = ("open", "closed", "local")
"""How requests are judged while a store is away: all pass, none does, or this process counts by itself."""


class Verb(Enum):
    """What a store is asked to do with a cost."""

    CHECK = "check"
    """Take it, if every limit has it."""
    PEEK = "peek"
    """Say what a check would say, and take nothing."""
    CHARGE = "charge"
    """Take it, even if that leaves a debt."""
    REFUND = "refund"
    """Give it back, up to the capacity."""


class Ask(NamedTuple):
    """One key, under one limit, and what it costs."""

    name: str
    """The limiter's. Equal keys of limiters with different names, or with different limits, don't meet."""
    key: str
    limit: Limit
    cost: int


class Offence(NamedTuple):
    """Against whom a denial is recorded, and what it adds up to."""

    name: str
    key: str
    backoff: Backoff


class RecordedViolation(NamedTuple):
    """Violations that a store has recorded on its own, some time after the denials."""

    offence: Offence
    violation: Violation


class LocalCache(Protocol):
    """Answers some checks of one name and limit without asking a server."""

    def serve(self, key: str, cost: int, low: int, offence: Offence | None) -> Decision | None: ...


class Store(Protocol):
    """Keeps what is counted. `headgate.stores.conformance` holds every store to what is said here.

    Each verb has an async twin for event loops.
    """

    @property
    def clock(self) -> Clock:
        """The clock on which callers wait."""

    def apply(
        self, verb: Verb, asks: Sequence[Ask], low: int, offence: Offence | None = None, request_id: str = ""
    ) -> Decision:
        """Carry out one verb on all of the asks in one atomic step, and describe what came of it.

        CHECK takes every cost if all of them pass, and otherwise none. CHARGE and REFUND answer as a PEEK for cost 1
        would right after them. `low` is the share of the capacity, in thousandths, below which a decision warns. Where
        there are several asks, the decision is that of the one that bound. Each key may be asked once.

        With an `offence`, a CHECK that is denied is recorded as a violation in the same step; and where the backoff is
        enforced, one whose advised wait isn't over is denied.

        With a `request_id`, what was counted is counted once: the same verb on the same first key with the same id
        gets the same answer again, for `REMEMBERED` microseconds. A denial counts nothing, and is judged anew.
        """

    async def aapply(
        self, verb: Verb, asks: Sequence[Ask], low: int, offence: Offence | None = None, request_id: str = ""
    ) -> Decision: ...

    def offend(self, offence: Offence) -> Violation:
        """Record a violation."""

    async def aoffend(self, offence: Offence) -> Violation: ...

    def standing(self, offence: Offence) -> Standing:
        """Say how somebody stands."""

    async def astanding(self, offence: Offence) -> Standing: ...

    def forget(self, name: str, key: str, rule: Rule) -> bool:
        """Drop what is counted for a key under a limit or a backoff, and say whether there was anything."""

    async def aforget(self, name: str, key: str, rule: Rule) -> bool: ...

    def clear(self, name: str, rule: Rule) -> None:
        """Drop what is counted for every key under a name and a limit or backoff."""

    async def aclear(self, name: str, rule: Rule) -> None: ...


@dataclass(frozen=True, slots=True)
class Edit:
    """A part of a change: an override, an exemption or a default is set, or (with no value) removed.

    `channel` and `tier` are empty where all of them are meant. `value` is a limit's text, or "exempt".
    """

    kind: str
    agent: str = ""
    channel: str = ""
    tier: str = ""
    value: str | None = None
    generation: int = 0
    """In the snapshot of a compacted log: how often a default had been changed."""

    def __str__(self) -> str:
        words = [self.kind]
        if self.agent:
            words.append(f"of {self.agent!r}")
        if self.channel or self.tier:
            words.append("for " + " ".join(filter(None, (self.channel, self.tier))))
        words.append("removed" if self.value is None else f"set to {self.value}")
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Change:
    """Edits that were made together, with who made them and when. They take effect together, or not at all."""

    edits: tuple[Edit, ...]
    by: str = ""
    at: float = field(default_factory=time.time)

    def __str__(self) -> str:
        return ", ".join(map(str, self.edits))


class LogPage(NamedTuple):
    """A part of a change log, up to its end."""

    snapshot: tuple[Edit, ...] | None
    """Edits that stand for all changes before these; None where the reader knows the changes before these."""
    changes: list[Change]
    position: int
    """Where the next page begins: the number of edits that were ever recorded."""

    def edits(self) -> list[Edit]:
        """All edits, in the order in which they have to be applied."""
        return [*(self.snapshot or ()), *(edit for change in self.changes for edit in change.edits)]


@runtime_checkable
class ChangeLog(Protocol):
    """Where changes are recorded."""

    def read(self, after: int = 0) -> LogPage:
        """The changes after a position, oldest first. Everything, with a snapshot, if some of them are compacted."""

    def write(self, change: Change) -> int:
        """Record a change, and return the position after it. From then on it survives a crash."""

    def compact(self, keep: int, condense: Callable[[Sequence[Edit]], Sequence[Edit]]) -> int:
        """Replace all but the newest `keep` changes by a snapshot, in one step, and return how many changes are left.

        `condense` makes the snapshot of the edits that it stands for.
        """

    def close(self) -> None: ...


@runtime_checkable
class SharedChangeLog(ChangeLog, Protocol):
    """A change log that several nodes write to."""

    def follow(self, on_change: Callable[[], None]) -> None:
        """Call `on_change`, from another thread, whenever the log may have changed, until it is closed."""
