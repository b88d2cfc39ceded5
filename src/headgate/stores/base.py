"""Stores: where the state of limits lives, and whose clock counts.

Every store is a `Store`. Features that only some stores have are protocols of their own, to be asked for by
`isinstance(store, CachedStore)`.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from headgate.events import Degraded
from headgate.limits.clock import Clock
from headgate.limits.decision import Decision, Limit, Rule, Violation
from headgate.limits.violations import Backoff, Standing
from headgate.stores.asks import Ask as Ask
from headgate.stores.traffic import Traffic

REMEMBERED: Final = 60_000_000
"""Microseconds for which a request's id is remembered."""


ON_FAILURE: Final = ("open", "closed", "local")
"""How to decide while a store is away: all requests pass, none does, or this process counts by itself."""


MAX_TIMEOUT: Final = 3600
"""Seconds that a check may wait for a store at the most."""


class Verb(Enum):
    """An operation of a store on a cost."""

    CHECK = "check"
    """Take it, if every limit has it."""
    PEEK = "peek"
    """Decide as a check would, and take nothing."""
    CHARGE = "charge"
    """Take it, even if that leaves a debt."""
    REFUND = "refund"
    """Give it back, up to the capacity."""


class Offence(NamedTuple):
    """The agent that a denial is recorded against, and the backoff that applies."""

    name: str
    key: str
    backoff: Backoff


class RecordedViolation(NamedTuple):
    """Violations that a store has recorded some time after the denials."""

    offence: Offence
    violation: Violation


@runtime_checkable
class Store(Protocol):
    """Keeps the counts of keys. `headgate.stores.conformance` tests this contract.

    Each verb has an async twin for event loops.
    """

    @property
    def clock(self) -> Clock:
        """The clock on which callers wait."""

    def apply(
        self, verb: Verb, asks: Sequence[Ask], low: int, offence: Offence | None = None, request_id: str = ""
    ) -> Decision:
        """Carry out one verb on all of the asks in one atomic step, and return the decision.

        CHECK takes every cost if all of them pass, and otherwise none. CHARGE and REFUND answer as a PEEK for cost 1
        would right after them. `low` is the share of the capacity, in thousandths, below which a decision warns. Where
        there are several asks, the decision is that of the one that bound. Each key may be asked once.

        With an `offence`, a CHECK that is denied is recorded as a violation in the same step; and if the backoff is
        enforced, a CHECK before the end of the advised wait is denied.

        With a `request_id`, a cost is counted once: the same verb on the same first key with the same id gets the same
        decision again, for `REMEMBERED` microseconds. A denial counts nothing, and is decided anew.
        """

    async def aapply(
        self, verb: Verb, asks: Sequence[Ask], low: int, offence: Offence | None = None, request_id: str = ""
    ) -> Decision: ...

    def record_violation(self, offence: Offence) -> Violation:
        """Record a violation."""

    async def arecord_violation(self, offence: Offence) -> Violation: ...

    def standing(self, offence: Offence) -> Standing:
        """The standing of an agent."""

    async def astanding(self, offence: Offence) -> Standing: ...

    def forget(self, name: str, key: str, rule: Rule, root: str = "") -> bool:
        """Drop the count of a key under a limit or a backoff, and return whether there was any. See `Ask.root`."""

    async def aforget(self, name: str, key: str, rule: Rule, root: str = "") -> bool: ...

    def clear(self, name: str, rule: Rule) -> None:
        """Drop the counts of all keys under a name and a limit or backoff."""

    async def aclear(self, name: str, rule: Rule) -> None: ...


# Features that only some stores have ----------------------------------------------------------------------------------


@runtime_checkable
class ClosableStore(Store, Protocol):
    """A store with connections or files to close."""

    def close(self) -> None: ...

    async def aclose(self) -> None: ...


@runtime_checkable
class ServerStore(ClosableStore, Protocol):
    """A store in a server, which can be away."""

    @property
    def degraded(self) -> bool:
        """Whether the server is away, so that something else decides."""

    @property
    def traffic(self) -> Traffic:
        """Statistics of the requests to the server."""

    def verify(self) -> None:
        """Connect and verify that the server can be used; a `StoreError` says why not."""

    async def averify(self) -> None: ...


StoreEvent: TypeAlias = Degraded | RecordedViolation


@runtime_checkable
class ObservableStore(Store, Protocol):
    """A store that reports when its server goes away or comes back, and violations that were recorded late."""

    def subscribe(self, listener: Callable[[StoreEvent], object]) -> Callable[[], None]:
        """Call `listener` with every event, until the function that is returned is called."""


class LocalCache(Protocol):
    """Answers some checks of one name and limit without asking a server."""

    def serve(self, key: str, cost: int, low: int, offence: Offence | None) -> Decision | None: ...


@runtime_checkable
class CachedStore(Store, Protocol):
    """A store that may answer checks from a cache in this process."""

    def local_cache(self, name: str, limit: Limit) -> LocalCache | None:
        """The cache of a limiter's name and limit; None where caching is off."""


class WindowCount(NamedTuple):
    """The result of a request in a window."""

    allowed: bool
    used: int
    """Requests in the window, with this one if it was allowed; while nothing is known and nothing passes, the limit."""
    remaining: int
    """How many more would be allowed now; 0 if the request was denied."""
    wait: int
    """0 if the request was allowed; else microseconds, as a rule until the oldest request leaves the window."""
    degraded: bool = False
    """Whether the server was away, so that it was decided without it."""


class WindowCounters(Protocol):
    """Counts requests by key alone. Each call brings its own limit, and the length of its window in microseconds."""

    async def hit(self, key: str, most: int, span: int) -> WindowCount:
        """Count a request if fewer than `most` are in the window.

        A denial in an empty window, which a limit of 0 makes, waits for the whole window.
        """

    async def count(self, key: str, most: int, span: int) -> int:
        """How many requests are in the window; while nothing is known and nothing passes, `most`."""

    async def forget(self, key: str) -> bool:
        """Drop a key, and say whether anything was counted for it."""


@runtime_checkable
class WindowStore(Store, Protocol):
    """A store that counts sliding windows whose limit comes with each call."""

    def windows(self, prefix: str | None = None) -> WindowCounters:
        """Counters whose keys in a server begin with `prefix`, by default with the store's own and `windows:`."""


@runtime_checkable
class ResettableStore(Store, Protocol):
    """A store that can drop everything at once."""

    def reset(self) -> Mapping[str, int]:
        """Drop everything, and return the number of keys that were counted under each limiter's name."""

    async def areset(self) -> Mapping[str, int]: ...


# What nodes share besides counts -------------------------------------------------------------------------------------


UNREADABLE: Final = "unreadable"
"""The kind of an edit whose row can't be read. It has no effect."""
LAST_MOMENT: Final = 253_402_300_799.0
"""The end of the year 9999, in seconds since 1970: a later one is most likely meant in milliseconds."""
MAX_REASON: Final = 200


@dataclass(frozen=True, slots=True)
class Block:
    """Nothing of an agent passes: until a moment, in seconds since 1970, or until it is unblocked (None)."""

    until: float | None = None
    reason: str = ""

    @classmethod
    def read(cls, text: str) -> "Block":
        """The block that an edit sets; a `ValueError` if there is none in the text. An odd reason is left out."""
        try:
            found = json.loads(text)
        except RecursionError as error:
            raise ValueError(text) from error
        until = found.get("until") if isinstance(found, dict) else False
        if until is not None and (type(until) not in (int, float) or not 0 <= until <= LAST_MOMENT):
            raise ValueError(text)
        reason = found.get("reason")
        printable = isinstance(reason, str) and len(reason) <= MAX_REASON and reason.isprintable()
        return cls(None if until is None else float(until), reason if printable else "")

    def text(self) -> str:
        """The value of an edit that sets it."""
        return json.dumps({"until": self.until, "reason": self.reason}, ensure_ascii=False)

    def __str__(self) -> str:
        end = "" if self.until is None else f" until {datetime.fromtimestamp(self.until, UTC):%Y-%m-%d %H:%M:%S} UTC"
        return f"set{end}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True, slots=True)
class Edit:
    """A part of a change: something of the policy, of an agent or of all of them, is set or (with no value) removed.

    `agent`, `channel` and `tier` are empty where all of them are meant. `headgate.stores.change_rows` lists the kinds,
    and what the `value` of each is.
    """

    kind: str
    agent: str = ""
    channel: str = ""
    tier: str = ""
    value: str | None = None
    generation: int = 0
    """In the snapshot of a compacted log: how often a default had been changed."""

    def __str__(self) -> str:
        words = [self.kind.replace("_", " ")]
        if self.agent:
            words.append(f"of {self.agent!r}")
        if self.channel or self.tier:
            words.append("for " + " ".join(filter(None, (self.channel, self.tier))))
        return " ".join([*words, self._outcome()])

    def _outcome(self) -> str:
        if self.value is None:
            return "removed"
        if self.kind == "block":
            with suppress(ValueError):
                return str(Block.read(self.value))
        return f"set to {self.value or 'none'}"  # an agent without an account


@dataclass(frozen=True, slots=True)
class Change:
    """Edits that were made together, with their author and time. They take effect together, or not at all."""

    edits: tuple[Edit, ...]
    by: str = ""
    at: float = field(default_factory=time.time)

    def __str__(self) -> str:
        return ", ".join(map(str, self.edits))


class LogPage(NamedTuple):
    """A part of a change log, up to its end."""

    snapshot: tuple[Edit, ...] | None
    """Edits that replace all changes before these; None where the reader knows the changes before these."""
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

        `condense` makes the snapshot from the edits that it replaces.
        """

    def close(self) -> None: ...


@runtime_checkable
class SharedChangeLog(ChangeLog, Protocol):
    """A change log that several nodes write to."""

    def follow(self, on_change: Callable[[bool], None]) -> None:
        """Call `on_change`, from another thread, whenever the log may have changed, until it is closed.

        Its argument is true if the log may also have lost changes since the last call: all of it has to be read then.
        """


@runtime_checkable
class SharedStore(Store, Protocol):
    """A store that also keeps the changes to limits that its nodes share."""

    def change_log(self) -> SharedChangeLog: ...


AddOutcome: TypeAlias = Literal["done", "exists", "uninvited", "full"]
ReplaceOutcome: TypeAlias = Literal["done", "unknown", "revoked", "other"]


class AgentDirectory(Protocol):
    """Agents, each with the digest of its token. Every step is done as a whole or not at all."""

    async def start(self, on_change: Callable[[str], None]) -> None:
        """Begin. From now on `on_change` is called in the loop with each agent whose token was rotated or revoked."""

    async def close(self) -> None: ...

    async def add(
        self, agent: str, digest: bytes, at: float, invitation: bytes | None, most: int | None = None
    ) -> AddOutcome:
        """Add an agent, if there are fewer than `most`.

        With an `invitation`, only if there is one of that digest, which is used up by it.
        """

    async def replace(self, agent: str, digest: bytes | None, known: bytes | None = None) -> ReplaceOutcome:
        """Give an agent another digest, or none: that revokes its token. An agent that isn't registered is "unknown".

            known   the agent's digest   outcome
            given   equal                "done"
            given   another              "other"
            given   none                 "revoked"
            None    any                  "done"
            None    none                 "done"; "revoked" if `digest` is None too

        Only "done" changes anything.
        """

    async def verify(self, agent: str, digest: bytes) -> bool: ...

    async def owner(self, digest: bytes) -> str | None: ...

    async def knows(self, agent: str) -> bool: ...

    async def find(self, agent: str) -> tuple[str, float, bool] | None:
        """One agent, as in `page`."""

    def forget_verified(self) -> None:
        """Forget the agents that were verified before, which are known even while the server is away."""

    async def page(self, after: str, limit: int) -> list[tuple[str, float, bool]]:
        """Agents in the order of their names, as (agent, when it was registered, whether its token is revoked)."""

    async def invite(self, digest: bytes, at: float, note: str = "") -> None:
        """Add an invitation, with a note about what it grants."""

    async def invitation(self, digest: bytes) -> str | None:
        """The note of an invitation; None if there is no such invitation."""


AlertOutcome: TypeAlias = Literal["done", "other", "ended", "full"]

MAX_ALERTS: Final = 1000
"""Alerts that are open at the same time."""


class SharedAlerts(Protocol):
    """The texts of open alerts, by agent. Each change names the text that it replaces.

    While the server is away every call raises `StoreAway`; the change may have been made all the same.
    """

    async def read(self) -> dict[str, str]:
        """All that are open."""

    async def put(self, agent: str, alert_id: str, known: str, text: str) -> tuple[AlertOutcome, str]:
        """Replace the `known` text ("" for none) by another.

        "done"; or nothing was changed: there is an "other" text, or the alert has "ended" before (both with the text
        that is there), or `MAX_ALERTS` are open ("full").
        """

    async def end(self, agent: str, alert_id: str, known: str, text: str) -> tuple[AlertOutcome, str]:
        """End an alert, and keep its last text for later callers: "done", or "other" as with `put`."""


class DataVersion(NamedTuple):
    """Numbers that only grow while agents and changes are added, by which older data is told from newer."""

    agents: int = 0
    """How many there are, including those with a revoked token."""
    change: int = 0
    """When a token was changed last."""
    position: int = 0
    """In the change log."""


class StoreGeneration(Protocol):
    """A random id of the data in a store, by which a hub sees that the data is lost or another's.

    Once an id is `expected`, agents and changes are read and written only while the store has that id: otherwise
    `StoreLost` is raised, and nothing was changed.
    """

    @property
    def expected(self) -> str:
        """The id that the store should have; "" where any will do."""

    @expected.setter
    def expected(self, generation: str) -> None:
        """Expect an id; nothing of its data was seen yet."""

    @property
    def seen(self) -> DataVersion:
        """How much of the data was seen. The store is lost while it has less: it is older, or a part is missing."""

    @seen.setter
    def seen(self, age: DataVersion) -> None: ...

    @property
    def reason(self) -> str:
        """Why the data counts as lost, in words; "" while it does not."""

    async def check(self) -> None:
        """Compare the ids now; `StoreLost` if they differ."""

    async def claim(self) -> str:
        """Expect the id that the store has; one without an id is given a new one first."""

    async def accept(self) -> str:
        """Accept lost data as it is: the id to expect from now on, or "" if the store has the expected data.

        The id is the store's, if it has another than was expected: another hub has accepted the data before. Otherwise
        it is a new one, which the store has from now on.
        """


@runtime_checkable
class HubStore(SharedStore, Protocol):
    """A store that also keeps what several hubs share."""

    @property
    def generation(self) -> StoreGeneration: ...

    def agents(self) -> AgentDirectory: ...

    def alerts(self) -> SharedAlerts: ...
