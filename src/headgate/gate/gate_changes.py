"""The changes that operators make to a gate while it runs: made, recorded, and followed from other nodes."""

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from os import PathLike
from typing import Final

from headgate.errors import HeadgateError, StoreAway, refuse
from headgate.events import PolicyChanged
from headgate.flow import in_thread
from headgate.gate import changes
from headgate.gate._hot import GateChecks
from headgate.gate.change_log import KEPT, MemoryChangeLog, condense
from headgate.gate.effective import effective
from headgate.gate.lookup import ADDRESSES, AGENTS, Lookup
from headgate.gate.policy import Policy
from headgate.gate.sources import PolicyValue, describe_overruled, overruled_limits, policy_values
from headgate.lifecycle import new_lock
from headgate.limits.notation import LimitLike
from headgate.stores.base import (
    UNREADABLE,
    Change,
    ChangeLog,
    Edit,
    LogPage,
    SharedChangeLog,
    SharedStore,
    Store,
)
from headgate.stores.sqlite import SqliteChangeLog

_COMPACT_EVERY = 1000  # changes from one compaction of the log to the next

_log = logging.getLogger("headgate")


class GateChanges(GateChecks):
    """A policy with the changes in a log on top of it."""

    def __init__(self, policy: Policy, store: Store, remember: object) -> None:
        self._log: Final[ChangeLog] = _change_log(remember, store)
        self._counts_shared: Final = isinstance(store, SharedStore)
        self._position = 0  # in the log: the changes up to there are in effect
        self._changes_read = False
        self._logged = 0  # changes in the log
        self._reported_unreadable = False
        self._overruled: tuple[Lookup | None, tuple[str, ...]] = (None, ())  # as of a lookup
        self._change_lock: Final = new_lock()
        super().__init__(store, Lookup(policy, effective(policy, self._first_edits()), store))
        if isinstance(self._log, SharedChangeLog):
            self._log.follow(self._sync)

    def _first_edits(self) -> list[Edit]:
        """The edits in the log; none yet, if the server that has it is away."""
        try:
            page = self._log.read()
        except StoreAway as away:
            _log.error("starting without the changes made while running, until they can be read: %s", away)
            return []
        self._position, self._logged, self._changes_read = page.position, len(page.changes), True
        self._report_unreadable(page)
        return page.edits()

    def _report_unreadable(self, page: LogPage) -> None:
        """Log, once, that there are changes without effect: an operator may believe that they hold."""
        lost = [edit for edit in page.edits() if edit.kind == UNREADABLE]
        if lost and not self._reported_unreadable:
            self._reported_unreadable = True
            _log.error(
                "%d changes to the limits can't be read and have no effect (the last: %s); without them the limits of "
                "the policy apply, so make these changes again",
                len(lost),
                lost[-1],
            )

    def change(self, edits: Iterable[Edit], *, by: str = "") -> None:
        """Make several edits as one change: all of them take effect at the same moment, or none does.

        `headgate.gate.changes` makes edits: `override`, `no_override`, `exemption`, `default`, `no_default`,
        `session_limit`, `block`, `no_block`, `role`, and those of accounts: `agent_account`, `agent_plan`,
        `account_plan`, `account_limit`, `level_limit`, `plan_limit`. They apply from the next check on, in open
        sessions too, and are one record in the history.
        """
        if not isinstance(edits, Iterable):
            refuse("change", "edits, such as [override('planner', 'heavy', '20/minute')]", edits)
        lookup, now = self._lookup, self._store.clock.wall()
        made = [changes.validated(edit, lookup.policy, lookup.effective, now) for edit in edits]
        change = Change(tuple(made), _author(by))
        if not change.edits:
            return
        try:
            events = self._make(change)
        except HeadgateError:
            raise
        except BaseException:  # a signal handler's: the change may have been recorded all the same
            with suppress(HeadgateError):
                self._sync(everything=False)
            raise
        for event in events:
            self._emit(event)

    def _make(self, change: Change) -> list[PolicyChanged]:
        """Record a change and apply it; the events that tell of it."""
        with self._change_lock:
            before = self._lookup
            after = Lookup(before.policy, before.effective, self._store, before, change.edits)
            self._drop_edited(after, change.edits)
            position = self._log.write(change)
            if position - len(change.edits) != self._position:
                events = self._catch_up(self._position)
            else:
                self._lookup, self._position, events = after, position, [PolicyChanged(str(change), change.by)]
                self._logged += 1
            if self._logged >= KEPT + _COMPACT_EVERY:
                self._compact()
        return events

    def set_override(
        self, agent: str, tier: str, limit: LimitLike, channel: str | None = None, *, by: str = ""
    ) -> None:
        """Give an agent a limit of its own for a tier, on one channel or on all."""
        self.change([changes.override(agent, tier, limit, channel)], by=by)

    def remove_override(self, agent: str, tier: str | None = None, *, by: str = "") -> None:
        """Put an agent back to the defaults, for a tier or for all and for its sessions."""
        edits = [changes.no_override(agent, tier)]
        if tier is None and self._lookup.effective.rules_of(agent).session is not None:
            edits.append(changes.session_limit(None, agent))
        self.change(edits, by=by)

    def add_exemption(self, agent: str, *, by: str = "") -> None:
        """Let an agent always pass."""
        self.change([changes.exemption(agent)], by=by)

    def remove_exemption(self, agent: str, *, by: str = "") -> None:
        """Hold an agent to its limits again."""
        self.change([changes.exemption(agent, exempt=False)], by=by)

    def set_default(self, tier: str, limit: LimitLike, channel: str | None = None, *, by: str = "") -> None:
        """Change the limit of a tier for every agent without an override."""
        self.change([changes.default(tier, limit, channel)], by=by)

    def remove_default(self, tier: str | None = None, channel: str | None = None, *, by: str = "") -> None:
        """Put a tier back to the policy's limit, on one channel or on all. "session": the limit of sessions.

        Without a tier, all tiers and (unless a channel is given) sessions go back. Buckets begin full where the limit
        changes.

        >>> from headgate import Gate
        >>> gate = Gate()
        >>> gate.set_default("heavy", "100/minute")
        >>> gate.remove_default("heavy", by="ada")
        >>> gate.capacity("agent-7", "ws", "heavy")
        10
        """
        edits = [changes.no_default(tier, channel)]
        if tier is None and channel is None:
            edits.append(changes.no_default("session"))
        self.change(edits, by=by)

    def block(self, agent: str, *, until: float | None = None, reason: str = "", by: str = "") -> None:
        """Let nothing of an agent pass, on every channel and tier and in its sessions, exempt and shadowed or not.

        The block ends by itself at `until`, in seconds since 1970, or when the agent is unblocked. Each denial is a
        violation. Buckets stay as they are.

        >>> from headgate import Gate
        >>> gate = Gate()
        >>> gate.block("runaway", reason="it loops", by="ada")
        >>> gate.check("runaway", "ws", "light").outcome.value, gate.block_of("runaway").reason
        ('deny', 'it loops')
        >>> gate.unblock("runaway", by="ada")
        >>> bool(gate.check("runaway", "ws", "light"))
        True
        """
        self.change([changes.block(agent, until, reason)], by=by)

    def unblock(self, agent: str, *, by: str = "") -> None:
        """Let an agent pass again, within its limits."""
        self.change([changes.no_block(agent)], by=by)

    def set_role(self, agent: str, role: str | None, *, by: str = "") -> None:
        """Give an agent a role, or none. Roles are the application's: the gate keeps them, and `role_of` tells them."""
        self.change([changes.role(agent, role)], by=by)

    @property
    def changes_read(self) -> bool:
        """Whether the changes made earlier were read: not if their server was away at the start, and still is.

        Until then checks go by the policy alone, and nobody is blocked or has a role.
        """
        return self._changes_read

    def read_changes(self) -> None:
        """Apply the changes that other nodes have made, now. A gate that shares a server does so by itself, soon."""
        self._sync(everything=not self._changes_read)

    def history(self) -> list[Change]:
        """The changes that were made, with their authors and times, oldest first: at least the newest 10,000."""
        return self._log.read().changes

    def values(self) -> list[PolicyValue]:
        """Every value of the policy in effect, by its path in TOML, and where it comes from. It reads the history.

        Blocks and roles aren't in a policy: `effective` has them.

        >>> from headgate import Gate, Policy
        >>> gate = Gate(Policy(limits={"heavy": "5/minute"}))
        >>> gate.set_default("heavy", "20/minute", "ws", by="ada")
        >>> [(one.value, one.source, one.file_value, one.by) for one in gate.values() if one.path == "limits.ws.heavy"]
        [('"20/minute"', 'change', '"5/minute"', 'ada')]
        """
        return policy_values(self._lookup.policy, self._log.read())

    @property
    def overruled(self) -> list[str]:
        """The paths of the limits in the policy file that have no effect, since a change overrules them.

        >>> from headgate import Gate, Policy
        >>> gate = Gate(Policy(limits={"heavy": "5/minute"}))
        >>> gate.set_default("heavy", "20/minute", "ws")
        >>> gate.overruled
        ['limits.ws.heavy']
        """
        lookup, (known, paths) = self._lookup, self._overruled
        if lookup is not known:
            paths = tuple(overruled_limits(lookup.policy, lookup.effective))
            self._overruled = (lookup, paths)
        return list(paths)

    def reload(self, policy: Policy, *, by: str = "") -> None:
        """Replace the policy; changes made while running stay on top of it.

        If they overrule what the new policy changes, that is logged.

        Buckets whose limit stays the same keep their counts; others begin full. Gates that share a server are reloaded
        one after the other, and the second must not reset the counts of the first: there, a limit that was in effect
        before keeps its counts.
        """
        if not isinstance(policy, Policy):
            refuse("reload", "a Policy", policy)
        author = _author(by)
        with self._change_lock:
            before, page, position = self._lookup, self._log.read(), self._position
            after = Lookup(policy, effective(policy, page.edits()).with_former(before.effective), self._store, before)
            if not self._counts_shared:
                self._drop_changed(before, after)
            self._lookup, self._position, self._logged = after, page.position, len(page.changes)
            self._changes_read = True
        if without_effect := describe_overruled(before.policy, policy, after.effective):
            _log.warning(
                "changes made while running overrule the reloaded policy: %s; take changed defaults back by `headgate "
                "defaults reset` or Gate.remove_default, and override agents with the limits of the policy",
                without_effect,
            )
        for event in _events_since(position, page):
            self._emit(event)
        self._emit(PolicyChanged("policy reloaded", author))

    # A change waits for the disk and perhaps for a store: the async twins do so in a thread, and leave the loop free.

    achange = in_thread(change)
    aset_override = in_thread(set_override)
    aremove_override = in_thread(remove_override)
    aadd_exemption = in_thread(add_exemption)
    aremove_exemption = in_thread(remove_exemption)
    aset_default = in_thread(set_default)
    aremove_default = in_thread(remove_default)
    ablock = in_thread(block)
    aunblock = in_thread(unblock)
    aset_role = in_thread(set_role)
    areload = in_thread(reload)
    aread_changes = in_thread(read_changes)
    avalues = in_thread(values)

    # Effects on the lookup, and on buckets ---------------------------------------------------------------------------

    def _sync(self, everything: bool) -> None:
        """Apply the changes of other nodes. `everything`: the log may have lost some that this gate has applied."""
        with self._change_lock:
            events = self._catch_up(0 if everything else self._position)
            self._changes_read = True
        for event in events:
            self._emit(event)

    def _catch_up(self, after: int) -> list[PolicyChanged]:
        """Apply the changes after a position in the log, and return the events that tell of them."""
        page, before = self._log.read(after), self._lookup
        self._report_unreadable(page)
        events = _events_since(self._position, page)
        if page.snapshot is None:
            if not page.changes:
                return []
            edits = page.edits()
            lookup = Lookup(before.policy, before.effective, self._store, before, edits)
            if not self._counts_shared:
                self._drop_edited(lookup, edits)
            self._lookup = lookup
            self._logged += len(page.changes)
        else:
            current = effective(before.policy, page.edits()).with_former(before.effective)
            if current != before.effective:
                lookup = Lookup(before.policy, current, self._store, before)
                if not self._counts_shared:
                    self._drop_changed(before, lookup)
                self._lookup = lookup
                events = events or [PolicyChanged("changes read again", "")]
            self._logged = len(page.changes)
        self._position = page.position
        return events

    def _compact(self) -> None:
        policy, now = self._lookup.policy, self._store.clock.wall()
        try:
            self._logged = self._log.compact(KEPT, lambda edits: condense(policy, edits, now))
        except HeadgateError as error:  # it will be tried again; the change itself was made
            _log.warning("%s", error)

    def _drop_edited(self, after: Lookup, edits: Sequence[Edit]) -> None:
        """Drop the buckets of edited limits, so that agents begin with full ones.

        Some may be left from an earlier time when the limit was in effect. They are dropped before the switch, so that
        listeners don't find them. No check uses them until then, except where a limit stays the same.
        """
        for agent in after.changed & {edit.agent for edit in edits if edit.kind in ("override", "exemption")}:
            self._drop_buckets(after, agent)

    def _drop_changed(self, before: Lookup, after: Lookup) -> None:
        """Let a new policy begin with full buckets wherever a limit has changed."""
        if after.backoff != before.backoff:
            self._store.clear(AGENTS, after.backoff)
            self._store.clear(ADDRESSES, after.backoff)
        for agent in {agent for lookup in (before, after) for agent, _ in lookup.own.items()}:
            exempted = before.effective.is_exempt(agent) != after.effective.is_exempt(agent)
            self._drop_buckets(after, agent, None if exempted else before)
        for channel, of_channel in after.defaults.items():
            for tier, active in of_channel.items():
                earlier = before.defaults.get(channel, {}).get(tier)
                if earlier is None or earlier.limit != active.limit:
                    self._store.clear(active.name, active.limit)

    def _drop_buckets(self, lookup: Lookup, agent: str, before: Lookup | None = None) -> None:
        """Drop an agent's buckets under its limits, except those that it had under the same limits before."""
        kept = set() if before is None else {(active.name, active.limit) for active in before.limits_of(agent)}
        for active in lookup.limits_of(agent):
            if (active.name, active.limit) not in kept:
                self._store.forget(active.name, agent, active.limit)


def _author(by: object) -> str:
    if not isinstance(by, str):
        refuse("by", "a string", by)
    if not by.isprintable():  # a lone surrogate can't even be written down
        refuse("by", "printable text", by)
    return by


def _events_since(position: int, page: LogPage) -> list[PolicyChanged]:
    """The events of the changes after a position, oldest first."""
    new = page.position - position
    events: list[PolicyChanged] = []
    for change in reversed(page.changes):
        if new <= 0:
            break
        new -= len(change.edits)
        events.append(PolicyChanged(str(change), change.by))
    return events[::-1]


def _change_log(remember: object, store: Store) -> ChangeLog:
    if remember is None:
        return store.change_log() if isinstance(store, SharedStore) else MemoryChangeLog()
    if isinstance(remember, (str, PathLike)):
        return SqliteChangeLog(remember)
    if isinstance(remember, ChangeLog):
        return remember
    return refuse("Gate remember", "a path, a change log, or None", remember)
