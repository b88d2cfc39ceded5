"""Gate: the policy, applied. What an agent platform calls."""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from os import PathLike
from typing import Final, SupportsIndex, get_args

from headgate.errors import HeadgateError, StoreAway, refuse
from headgate.events import Alerted, Checked, Degraded, Event, Listener, PolicyChanged, Violated, ViolationsReset
from headgate.flow import in_thread
from headgate.gate import changes
from headgate.gate._hot import CHECK, EXEMPT, GateChecks, store_request
from headgate.gate.changes import KEPT, Effective, MemoryChangeLog, condense, effective
from headgate.gate.lookup import ADDRESSES, AGENTS, ActiveLimit, Lookup
from headgate.gate.policy import Policy, check_agent
from headgate.gate.sessions import Session, Sessions
from headgate.lifecycle import Closable, new_lock
from headgate.limits.decision import Decision, Limit, Violation
from headgate.limits.fixed import UNLIMITED
from headgate.limits.notation import LimitLike, limit_of
from headgate.limits.violations import Standing
from headgate.stores.base import (
    UNREADABLE,
    Change,
    ChangeLog,
    Edit,
    LogPage,
    ObservableStore,
    Offence,
    RecordedViolation,
    SharedChangeLog,
    SharedStore,
    Store,
    Verb,
)
from headgate.stores.sqlite import SqliteChangeLog
from headgate.stores.urls import aclose_store, close_store, open_store

_COMPACT_EVERY = 1000  # changes from one compaction of the log to the next

_log = logging.getLogger("headgate")


class Gate(GateChecks, Closable):
    """Says whether an agent may do something, and counts it.

    `store` counts: a store, the URL of a Redis or Valkey server, or None for this process's memory. `remember` is the
    path of a file for the changes made while running, which several processes of one machine may use. Without it they
    are kept in the server, where all gates share them; in memory they end with the process.

    >>> from headgate import Gate, Policy
    >>> gate = Gate(Policy())
    >>> gate.check("agent-7", "ws", "heavy").remaining
    9
    >>> gate.check("agent-7", "http", action="post_task").remaining
    9

    Every verb that waits for the store or the disk has an async twin that begins with an "a".
    """

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        store: Store | str | None = None,
        remember: str | PathLike[str] | ChangeLog | None = None,
    ) -> None:
        rules = Policy() if policy is None else policy
        if not isinstance(rules, Policy):
            refuse("Gate policy", "a Policy", rules)
        opened = open_store(
            "Gate store", store, on_failure=rules.on_failure, timeout=rules.store_timeout, nodes=rules.nodes
        )
        self._owns_store: Final = isinstance(store, str)
        self._log: Final[ChangeLog] = _change_log(remember, opened)
        self._counts_shared: Final = isinstance(opened, SharedStore)
        self._position = 0  # in the log: the changes up to there are in effect
        self._logged = 0  # changes in the log
        self._reported_unreadable = False
        self._change_lock: Final = new_lock()
        self._sessions: Final = Sessions(opened, lambda: self._lookup, self._session_violated)
        super().__init__(opened, Lookup(rules, effective(rules, self._first_edits()), opened))
        self._unsubscribe_store: Final = (
            opened.subscribe(self._on_store_event) if isinstance(opened, ObservableStore) else None
        )
        if isinstance(self._log, SharedChangeLog):
            self._log.follow(self._sync)

    def _first_edits(self) -> list[Edit]:
        """The edits in the log; none yet, if the server that has it is away."""
        try:
            page = self._log.read()
        except StoreAway as away:
            _log.error("starting without the changes made while running, until they can be read: %s", away)
            return []
        self._position, self._logged = page.position, len(page.changes)
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

    # Checks ----------------------------------------------------------------------------------------------------------

    async def acheck(
        self,
        agent: str,
        channel: str,
        tier: str | None = None,
        *,
        action: str | None = None,
        cost: SupportsIndex = 1,
        request_id: str | None = None,
    ) -> Decision:
        if self._memory:
            return self.check(agent, channel, tier, action=action, cost=cost, request_id=request_id)
        return await self._aapply(CHECK, *self._agent(agent, channel, tier, action), cost, request_id)

    def check_address(self, address: str, purpose: str = "request", *, cost: SupportsIndex = 1) -> Decision:
        """Check an unknown caller by address. `purpose` is one of `headgate.gate.policy.PURPOSES`.

        An IPv6 address counts by its /64. Denials escalate the advised wait, but are no agent's violations.
        """
        return self._apply(CHECK, *self._lookup.find_address(address, purpose), cost)

    async def acheck_address(self, address: str, purpose: str = "request", *, cost: SupportsIndex = 1) -> Decision:
        return await self._aapply(CHECK, *self._lookup.find_address(address, purpose), cost)

    def peek(self, agent: str, channel: str, tier: str) -> Decision:
        """Decide as a check would, and count nothing."""
        return self._apply(Verb.PEEK, *self._agent(agent, channel, tier), 1)

    async def apeek(self, agent: str, channel: str, tier: str) -> Decision:
        return await self._aapply(Verb.PEEK, *self._agent(agent, channel, tier), 1)

    def charge(self, agent: str, channel: str, tier: str, cost: SupportsIndex) -> Decision:
        """Count a cost that an agent has spent already, even if that leaves a debt, which later refill pays off.

        Like `refund`, it answers as `peek` would right after it, and emits no event.
        """
        return self._apply(Verb.CHARGE, *self._agent(agent, channel, tier), cost)

    async def acharge(self, agent: str, channel: str, tier: str, cost: SupportsIndex) -> Decision:
        return await self._aapply(Verb.CHARGE, *self._agent(agent, channel, tier), cost)

    def refund(self, agent: str, channel: str, tier: str, cost: SupportsIndex = 1) -> Decision:
        """Give an agent back a counted cost that it hasn't used, up to the capacity."""
        return self._apply(Verb.REFUND, *self._agent(agent, channel, tier), cost)

    async def arefund(self, agent: str, channel: str, tier: str, cost: SupportsIndex = 1) -> Decision:
        return await self._aapply(Verb.REFUND, *self._agent(agent, channel, tier), cost)

    def charge_address(self, address: str, cost: SupportsIndex, purpose: str = "request") -> Decision:
        """`charge` an unknown caller, by address."""
        return self._apply(Verb.CHARGE, *self._lookup.find_address(address, purpose), cost)

    async def acharge_address(self, address: str, cost: SupportsIndex, purpose: str = "request") -> Decision:
        return await self._aapply(Verb.CHARGE, *self._lookup.find_address(address, purpose), cost)

    def refund_address(self, address: str, cost: SupportsIndex = 1, purpose: str = "request") -> Decision:
        """`refund` an unknown caller, by address."""
        return self._apply(Verb.REFUND, *self._lookup.find_address(address, purpose), cost)

    async def arefund_address(self, address: str, cost: SupportsIndex = 1, purpose: str = "request") -> Decision:
        return await self._aapply(Verb.REFUND, *self._lookup.find_address(address, purpose), cost)

    def _agent(self, agent: object, channel: object, tier: object, action: object = None) -> tuple[ActiveLimit, str]:
        """The limit that an agent is checked against, and the key that it is counted under."""
        name = check_agent(agent)
        return self._lookup.find(name, channel, tier, action), name

    async def _aapply(
        self, verb: Verb, active: ActiveLimit, key: str, cost: object, request_id: object = None
    ) -> Decision:
        request = store_request(verb, active, key, cost, request_id)
        return self._report(verb, active, key, EXEMPT if active.exempt else await self._store.aapply(*request))

    def session(self, agent: str, session_id: str | int, limit: LimitLike = UNLIMITED) -> Session:
        """Open a session with a budget of its own.

        Its limit is that of the policy (unlimited, unless the operator gives one), or one such as `limited(5, 20)`
        where that is stricter.
        """
        return self._sessions.open(agent, session_id, limit_of("session limit", limit))

    def _session_violated(self, agent: str, violation: Violation) -> None:
        self._emit_violation(agent, "session", "", violation)

    @property
    def active_buckets(self) -> int:
        """How many sessions have been used and not yet closed."""
        return self._sessions.active_buckets

    # Violations ------------------------------------------------------------------------------------------------------

    def record_violation(self, agent: str) -> float:
        """Record a denial that was made elsewhere, and return the advised wait in seconds."""
        if self.is_exempt(agent):
            return 0.0
        return self._recorded(agent, self._store.record_violation(self._offence(agent)))

    async def arecord_violation(self, agent: str) -> float:
        if self.is_exempt(agent):
            return 0.0
        return self._recorded(agent, await self._store.arecord_violation(self._offence(agent)))

    def _recorded(self, agent: str, violation: Violation) -> float:
        self._emit_violation(agent, "", "", violation)
        return violation.advised

    def _offence(self, agent: object) -> Offence:
        return Offence(AGENTS, check_agent(agent), self._lookup.backoff)

    def standing(self, agent: str) -> Standing:
        """The standing of an agent: its violations in a row, and how long they still count."""
        return self._store.standing(self._offence(agent))

    async def astanding(self, agent: str) -> Standing:
        return await self._store.astanding(self._offence(agent))

    def is_rate_limited(self, agent: str) -> bool:
        """Whether an agent has violations and the quiet period has not passed. One that is exempt is not."""
        return not self.is_exempt(agent) and bool(self.standing(agent))

    async def ais_rate_limited(self, agent: str) -> bool:
        return not self.is_exempt(agent) and bool(await self.astanding(agent))

    def reset_violations(self, agent: str) -> bool:
        """Forget an agent's violations, and say whether there were any."""
        had_any = self._store.forget(*self._offence(agent))
        self._emit(ViolationsReset(agent))
        return had_any

    async def areset_violations(self, agent: str) -> bool:
        had_any = await self._store.aforget(*self._offence(agent))
        self._emit(ViolationsReset(agent))
        return had_any

    # Limits in effect -----------------------------------------------------------------------------------------------

    @property
    def store(self) -> Store:
        """The store that counts."""
        return self._store

    @property
    def policy(self) -> Policy:
        """The policy, without the changes made while running."""
        return self._lookup.policy

    @property
    def effective(self) -> Effective:
        """The limits, overrides and exemptions in effect now: the policy with the changes."""
        return self._lookup.effective

    def is_exempt(self, agent: str) -> bool:
        """Whether an agent always passes."""
        return self._lookup.effective.is_exempt(check_agent(agent))

    def limits_for(self, agent: str, channel: str, tier: str | None = None, *, action: str | None = None) -> Limit:
        """The limit in effect for an agent now, by tier or by action: `UNLIMITED` if it is exempt."""
        active, _ = self._agent(agent, channel, tier, action)
        return active.limit

    def capacity(self, agent: str, channel: str, tier: str) -> int:
        """How much an agent can do at once."""
        return self.limits_for(agent, channel, tier).capacity

    def drop_agent(self, agent: str) -> None:
        """Forget an agent's counts and its violations."""
        self._drop_buckets(self._lookup, check_agent(agent))
        self.reset_violations(agent)

    # Changes ---------------------------------------------------------------------------------------------------------

    def change(self, edits: Iterable[Edit], *, by: str = "") -> None:
        """Make several edits as one change: all of them take effect at the same moment, or none does.

        `headgate.gate.changes` makes edits: `override`, `no_override`, `exemption`, `default`, `session_limit`. They
        apply from the next check on, in open sessions too, and are one record in the history.
        """
        if not isinstance(edits, Iterable):
            refuse("change", "edits, such as [override('planner', 'heavy', '20/minute')]", edits)
        policy = self._lookup.policy
        change = Change(tuple([changes.validated(edit, policy) for edit in edits]), _author(by))
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
        rules = self.effective.agents.get(agent)
        if tier is None and rules is not None and rules.session is not None:
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

    def history(self) -> list[Change]:
        """The changes that were made, with their authors and times, oldest first: at least the newest 10,000."""
        return self._log.read().changes

    def reload(self, policy: Policy, *, by: str = "") -> None:
        """Replace the policy; changes made while running stay on top of it.

        Buckets whose limit stays the same keep their counts; others begin full. Gates that share a server are reloaded
        one after the other, and the second must not reset the counts of the first: there, a limit that was in effect
        before keeps its counts.
        """
        if not isinstance(policy, Policy):
            refuse("reload", "a Policy", policy)
        author = _author(by)
        with self._change_lock:
            before, page, position = self._lookup, self._log.read(), self._position
            after = Lookup(policy, effective(policy, page.edits()), self._store, before)
            if not self._counts_shared:
                self._drop_changed(before, after)
            self._lookup, self._position, self._logged = after, page.position, len(page.changes)
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
    areload = in_thread(reload)
    adrop_agent = in_thread(drop_agent)

    def _sync(self, everything: bool) -> None:
        """Apply the changes of other nodes. `everything`: the log may have lost some that this gate has applied."""
        with self._change_lock:
            events = self._catch_up(0 if everything else self._position)
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
            current = effective(before.policy, page.edits())
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
        policy = self._lookup.policy
        try:
            self._logged = self._log.compact(KEPT, lambda edits: condense(policy, edits))
        except HeadgateError as error:  # it will be tried again; the change itself was made
            _log.warning("%s", error)

    def _drop_edited(self, after: Lookup, edits: Sequence[Edit]) -> None:
        """Drop the buckets of edited limits, so that agents begin with full ones.

        Some may be left from an earlier time when the limit was in effect. They are dropped before the switch, so that
        listeners don't find them. No check uses them until then, except where a limit stays the same.
        """
        for agent in after.changed & {edit.agent for edit in edits if edit.kind != "session"}:
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

    # Events ----------------------------------------------------------------------------------------------------------

    def subscribe(self, listener: Listener, *kinds: type[Event]) -> Callable[[], None]:
        """Call `listener` with every event, or with those of some kinds, until the returned function is called.

        Listeners that skip `Checked` add no cost per check.
        """
        wanted = kinds or get_args(Event)
        for kind in wanted:
            if kind not in get_args(Event):
                refuse("subscribe", f"one of {', '.join(known.__name__ for known in get_args(Event))}", kind)
        with self._change_lock:
            before = self._listeners
            self._set_listeners(before | {kind: (*before.get(kind, ()), listener) for kind in wanted})
        return lambda: self._unsubscribe(listener)

    def _unsubscribe(self, listener: Listener) -> None:
        with self._change_lock:
            left = {kind: [other for other in of if other is not listener] for kind, of in self._listeners.items()}
            self._set_listeners({kind: tuple(of) for kind, of in left.items()})

    def _set_listeners(self, listeners: dict[type[Event], tuple[Listener, ...]]) -> None:
        self._listeners = listeners
        self._emits_checks = bool(listeners.get(Checked))
        self._emits_violations = bool(listeners.get(Violated) or listeners.get(Alerted))

    def _on_store_event(self, event: Degraded | RecordedViolation) -> None:
        if isinstance(event, Degraded):
            self._emit(event)
        elif event.violation.alert and event.offence.name == AGENTS:
            backoff = event.offence.backoff
            self._emit(Alerted(event.offence.key, backoff.alert_after, backoff.alert_window))

    def close(self) -> None:
        """Close the change log, and the store if the gate has opened it. A `with` block does so at its end."""
        if self._unsubscribe_store is not None:
            self._unsubscribe_store()
        self._log.close()
        if self._owns_store:
            close_store(self._store)

    _close_in_thread = in_thread(close)

    async def aclose(self) -> None:
        await self._close_in_thread()
        if self._owns_store:
            await aclose_store(self._store)


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
