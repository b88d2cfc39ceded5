"""Gate: the policy, applied. What an agent platform calls."""

import asyncio
import logging
import threading
from collections.abc import Callable
from os import PathLike
from typing import Final, SupportsIndex, get_args

from headgate._limiter_hot import id_of
from headgate.errors import StoreAway, refuse
from headgate.events import AddressChecked, Alerted, Checked, Degraded, Event, Listener, PolicyChanged, Violated
from headgate.gate._hot import EXEMPT, GateChecks
from headgate.gate.changes import Effective, MemoryChangeLog, apply_change, effective
from headgate.gate.lookup import ADDRESSES, AGENTS, Lookup, address_key, address_meter
from headgate.gate.policy import TIERS, Policy, check_agent
from headgate.gate.sessions import Session, Sessions
from headgate.lifecycle import Closable, after_fork
from headgate.limits.decision import Decision, Limit
from headgate.limits.fixed import UNLIMITED
from headgate.limits.notation import LimitLike, limit_of
from headgate.limits.numbers import cost_of
from headgate.limits.violations import Standing
from headgate.stores.base import (
    Ask,
    Change,
    ChangeLog,
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

_log = logging.getLogger("headgate")


class Gate(GateChecks, Closable):
    """Says whether an agent may do something, and keeps account of it.

    `store` is where it is counted: a store, the URL of a Redis or Valkey server, or None for this process's memory.
    `remember` is where changes made while running are kept: the path of a file, or None. Without a path they are kept
    in the server, where all gates share them, and in memory they are forgotten with the process.

    >>> from headgate import Gate, Policy
    >>> gate = Gate(Policy())
    >>> gate.check("agent-7", "ws", "heavy").remaining
    9
    >>> gate.check("agent-7", "http", action="post_task").remaining
    9

    Each verb that waits for the store or the disk has an async twin that begins with an "a".
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
        where = open_store(
            "Gate store", store, on_failure=rules.on_failure, timeout=rules.store_timeout, nodes=rules.nodes
        )
        self._opened: Final = isinstance(store, str)
        self._book: Final[ChangeLog] = _book(remember, where)
        self._changing = threading.RLock()
        after_fork(self)
        self._sessions: Final = Sessions(where)
        self._known = 0  # changes that are taken in
        self._shared: Final = isinstance(self._book, SharedChangeLog)
        super().__init__(where, Lookup(rules, effective(rules, self._changes()), where, set()))
        self._unsubscribe_store: Final = where.subscribe(self._hear) if isinstance(where, ObservableStore) else None
        if isinstance(self._book, SharedChangeLog):
            self._book.follow(self._take_over)

    def _after_fork(self) -> None:
        """In a process that was forked: whichever thread of the parent was changing something isn't here."""
        self._changing = threading.RLock()

    def _changes(self) -> list[Change]:
        """The changes that are remembered; none yet, if the server that remembers them is away."""
        try:
            changes = self._book.read()
        except StoreAway as away:
            _log.error("starting without the changes made while running, until they can be read: %s", away)
            return []
        self._known = len(changes)
        return changes

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
        plan = self._lookup
        name = check_agent(agent)
        if name in plan.exempt:
            return self.check(name, channel, tier, action=action, cost=cost, request_id=request_id)
        meter = plan.meter(name, channel, tier, action)
        ask, offence = Ask(meter.name, name, meter.limit, cost_of(cost)), self._offence(plan, name, meter)
        decision = await self._store.aapply(Verb.CHECK, [ask], plan.low, offence, id_of(request_id))
        if meter.shadow:
            decision = decision.as_shadow()
        if self._watched or (self._heeded and decision.violation is not None):
            self._tell(name, meter, decision)
        return decision

    def check_address(self, address: str, purpose: str = "request", *, cost: SupportsIndex = 1) -> Decision:
        """The check for somebody who isn't known yet, by address. `purpose` is "request" or "registration".

        An IPv6 address counts by its /64. Denials escalate the advised wait, but are nobody's violations.
        """
        plan, ask, offence = self._by_address(address, purpose, cost)
        if ask is None:
            return EXEMPT
        return self._told_address(purpose, ask, offence, self._store.apply(Verb.CHECK, [ask], plan.low, offence))

    async def acheck_address(self, address: str, purpose: str = "request", *, cost: SupportsIndex = 1) -> Decision:
        plan, ask, offence = self._by_address(address, purpose, cost)
        if ask is None:
            return EXEMPT
        decision = await self._store.aapply(Verb.CHECK, [ask], plan.low, offence)
        return self._told_address(purpose, ask, offence, decision)

    def _by_address(self, address: str, purpose: str, cost: object) -> tuple[Lookup, Ask | None, Offence | None]:
        """What to ask for an address, nothing if it is exempt, and against whom a denial is recorded."""
        plan = self._lookup
        key, meter, number = address_key(plan, address), address_meter(plan, purpose), cost_of(cost)
        if key is None:
            return plan, None, None
        offence = None if meter.shadow else Offence(ADDRESSES, key, plan.backoff)
        return plan, Ask(meter.name, key, meter.limit, number), offence

    def _told_address(self, purpose: str, ask: Ask, offence: Offence | None, decision: Decision) -> Decision:
        if offence is None:
            decision = decision.as_shadow()
        self._emit(AddressChecked(ask.key, purpose, decision))
        return decision

    def charge(self, agent: str, channel: str, tier: str, cost: SupportsIndex) -> Decision:
        """Count what an agent has spent already, even if that leaves a debt, which later refill pays off.

        Like `refund`, it answers as `peek` would right after it, and tells nobody.
        """
        return self._apply(Verb.CHARGE, agent, channel, tier, cost)

    async def acharge(self, agent: str, channel: str, tier: str, cost: SupportsIndex) -> Decision:
        return await self._aapply(Verb.CHARGE, agent, channel, tier, cost)

    def refund(self, agent: str, channel: str, tier: str, cost: SupportsIndex = 1) -> Decision:
        """Give an agent back what a check has counted and it hasn't used, up to the capacity."""
        return self._apply(Verb.REFUND, agent, channel, tier, cost)

    async def arefund(self, agent: str, channel: str, tier: str, cost: SupportsIndex = 1) -> Decision:
        return await self._aapply(Verb.REFUND, agent, channel, tier, cost)

    def charge_address(self, address: str, cost: SupportsIndex, purpose: str = "request") -> Decision:
        """`charge` for somebody who isn't known, by address."""
        return self._apply_address(Verb.CHARGE, address, purpose, cost)

    async def acharge_address(self, address: str, cost: SupportsIndex, purpose: str = "request") -> Decision:
        return await self._aapply_address(Verb.CHARGE, address, purpose, cost)

    def refund_address(self, address: str, cost: SupportsIndex = 1, purpose: str = "request") -> Decision:
        """`refund` for somebody who isn't known, by address."""
        return self._apply_address(Verb.REFUND, address, purpose, cost)

    async def arefund_address(self, address: str, cost: SupportsIndex = 1, purpose: str = "request") -> Decision:
        return await self._aapply_address(Verb.REFUND, address, purpose, cost)

    def _apply(self, verb: Verb, agent: str, channel: str, tier: str, cost: object) -> Decision:
        ask = self._by_agent(agent, channel, tier, cost)
        return EXEMPT if ask is None else self._store.apply(verb, [ask], self._lookup.low)

    async def _aapply(self, verb: Verb, agent: str, channel: str, tier: str, cost: object) -> Decision:
        ask = self._by_agent(agent, channel, tier, cost)
        return EXEMPT if ask is None else await self._store.aapply(verb, [ask], self._lookup.low)

    def _apply_address(self, verb: Verb, address: str, purpose: str, cost: object) -> Decision:
        plan, ask, _ = self._by_address(address, purpose, cost)
        return EXEMPT if ask is None else self._store.apply(verb, [ask], plan.low)

    async def _aapply_address(self, verb: Verb, address: str, purpose: str, cost: object) -> Decision:
        plan, ask, _ = self._by_address(address, purpose, cost)
        return EXEMPT if ask is None else await self._store.aapply(verb, [ask], plan.low)

    def _by_agent(self, agent: str, channel: str, tier: str, cost: object) -> Ask | None:
        """What to ask for an agent; nothing if it is exempt."""
        plan, name, number = self._lookup, check_agent(agent), cost_of(cost)
        meter = plan.meter(name, channel, tier, None)
        return None if name in plan.exempt else Ask(meter.name, name, meter.limit, number)

    def session(self, agent: str, session_id: str | int, limit: LimitLike = UNLIMITED) -> Session:
        """Open a session with a budget of its own: unlimited, unless a limit such as `limited(5, 20)` is given."""
        return self._sessions.open(agent, session_id, limit_of("session limit", limit))

    @property
    def active_buckets(self) -> int:
        """How many sessions have been used and not yet closed."""
        return self._sessions.active_buckets

    # Violations ------------------------------------------------------------------------------------------------------

    def record_violation(self, agent: str) -> float:
        """Record a denial that was made elsewhere, and return the advised wait in seconds."""
        name, plan = check_agent(agent), self._lookup
        if name in plan.exempt:
            return 0.0
        violation = self._store.record_violation(Offence(AGENTS, name, plan.backoff))
        self._tell_violation(name, "", "", violation)
        return violation.advised

    async def arecord_violation(self, agent: str) -> float:
        name, plan = check_agent(agent), self._lookup
        if name in plan.exempt:
            return 0.0
        violation = await self._store.arecord_violation(Offence(AGENTS, name, plan.backoff))
        self._tell_violation(name, "", "", violation)
        return violation.advised

    def standing(self, agent: str) -> Standing:
        """How an agent stands: its violations in a row, and how long they still count."""
        return self._store.standing(Offence(AGENTS, check_agent(agent), self._lookup.backoff))

    async def astanding(self, agent: str) -> Standing:
        return await self._store.astanding(Offence(AGENTS, check_agent(agent), self._lookup.backoff))

    def is_rate_limited(self, agent: str) -> bool:
        """Whether an agent has violations and the quiet period has not passed. One that is exempt is not."""
        return not self.is_exempt(agent) and bool(self.standing(agent))

    async def ais_rate_limited(self, agent: str) -> bool:
        return not self.is_exempt(agent) and bool(await self.astanding(agent))

    def reset_violations(self, agent: str) -> bool:
        """Forget an agent's violations, and say whether there were any."""
        return self._store.forget(AGENTS, check_agent(agent), self._lookup.backoff)

    async def areset_violations(self, agent: str) -> bool:
        return await self._store.aforget(AGENTS, check_agent(agent), self._lookup.backoff)

    # What holds ------------------------------------------------------------------------------------------------------

    @property
    def store(self) -> Store:
        """Where it is counted."""
        return self._store

    @property
    def policy(self) -> Policy:
        """The policy, without the changes made while running."""
        return self._lookup.policy

    @property
    def effective(self) -> Effective:
        """The limits, overrides and exemptions that hold now, with the changes."""
        return self._lookup.effective

    def is_exempt(self, agent: str) -> bool:
        """Whether an agent always passes."""
        return check_agent(agent) in self._lookup.exempt

    def limits_for(self, agent: str, channel: str, tier: str) -> Limit:
        """The limit that holds for an agent now: `UNLIMITED` if it is exempt."""
        plan, name = self._lookup, check_agent(agent)
        meter = plan.meter(name, channel, tier, None)
        return UNLIMITED if name in plan.exempt else meter.limit

    def capacity(self, agent: str, channel: str, tier: str) -> int:
        """How much an agent can do at once."""
        return self.limits_for(agent, channel, tier).capacity

    def peek(self, agent: str, channel: str, tier: str) -> Decision:
        """What a check would say, without counting anything."""
        return self._apply(Verb.PEEK, agent, channel, tier, 1)

    async def apeek(self, agent: str, channel: str, tier: str) -> Decision:
        return await self._aapply(Verb.PEEK, agent, channel, tier, 1)

    def drop_agent(self, agent: str) -> None:
        """Forget what an agent has spent, and its violations."""
        name, plan = check_agent(agent), self._lookup
        self._drop_buckets(plan, name)
        self._store.forget(AGENTS, name, plan.backoff)

    # Changes ---------------------------------------------------------------------------------------------------------

    def set_override(
        self, agent: str, tier: str, limit: LimitLike, channel: str | None = None, *, by: str = ""
    ) -> None:
        """Give an agent a limit of its own for a tier, on one channel or on all."""
        value = str(limit_of("override", limit))
        self._change(Change("override", check_agent(agent), self._channel(channel), self._tier(tier), value, _by(by)))

    def remove_override(self, agent: str, tier: str | None = None, *, by: str = "") -> None:
        """Put an agent back to the defaults, for a tier or for all."""
        self._change(
            Change("override", check_agent(agent), "", "" if tier is None else self._tier(tier), None, _by(by))
        )

    def add_exemption(self, agent: str, *, by: str = "") -> None:
        """Let an agent always pass."""
        self._change(Change("exemption", check_agent(agent), value="exempt", by=_by(by)))

    def remove_exemption(self, agent: str, *, by: str = "") -> None:
        """Hold an agent to its limits again."""
        self._change(Change("exemption", check_agent(agent), by=_by(by)))

    def set_default(self, tier: str, limit: LimitLike, channel: str | None = None, *, by: str = "") -> None:
        """Change the limit of a tier for every agent without an override."""
        value = str(limit_of("default", limit))
        self._change(Change("default", "", self._channel(channel), self._tier(tier), value, _by(by)))

    def history(self) -> list[Change]:
        """Every change that was made, with who made it and when, oldest first."""
        return self._book.read()

    def reload(self, policy: Policy, *, by: str = "") -> None:
        """Put another policy in the place of the one that holds; changes made while running stay on top of it.

        Buckets whose limit stays the same keep what they have counted; others begin full. Gates that share a server are
        reloaded one after the other, and the second must not fill up what the first has counted: there a limit that
        effective before goes on with what it has counted.
        """
        if not isinstance(policy, Policy):
            refuse("reload", "a Policy", policy)
        who = _by(by)
        with self._changing:
            before = self._lookup
            after = Lookup(policy, effective(policy, self._book.read()), self._store, before.unknown)
            if not self._shared:
                self._drop_changed(before, after)
            self._lookup = after
        self._emit(PolicyChanged("policy reloaded", who))

    def _drop_changed(self, before: Lookup, after: Lookup) -> None:
        """Let a new policy begin with full buckets wherever a limit has apply_change."""
        if after.backoff != before.backoff:
            self._store.clear(AGENTS, after.backoff)
            self._store.clear(ADDRESSES, after.backoff)
        for agent in {*before.own, *after.own}:
            self._drop_buckets(after, agent, before)
        for agent in before.exempt ^ after.exempt:
            self._drop_buckets(after, agent)
        for channel, of_channel in after.meters.items():
            for tier, meter in of_channel.items():
                elsewhere = before.meters.get(channel, {}).get(tier)
                if elsewhere is None or elsewhere.limit != meter.limit:
                    self._store.clear(meter.name, meter.limit)

    # A change waits for the disk and perhaps for a store: the twins do so in a thread, and leave the loop free.

    async def aset_override(
        self, agent: str, tier: str, limit: LimitLike, channel: str | None = None, *, by: str = ""
    ) -> None:
        await asyncio.to_thread(self.set_override, agent, tier, limit, channel, by=by)

    async def aremove_override(self, agent: str, tier: str | None = None, *, by: str = "") -> None:
        await asyncio.to_thread(self.remove_override, agent, tier, by=by)

    async def aadd_exemption(self, agent: str, *, by: str = "") -> None:
        await asyncio.to_thread(self.add_exemption, agent, by=by)

    async def aremove_exemption(self, agent: str, *, by: str = "") -> None:
        await asyncio.to_thread(self.remove_exemption, agent, by=by)

    async def aset_default(self, tier: str, limit: LimitLike, channel: str | None = None, *, by: str = "") -> None:
        await asyncio.to_thread(self.set_default, tier, limit, channel, by=by)

    async def areload(self, policy: Policy, *, by: str = "") -> None:
        await asyncio.to_thread(self.reload, policy, by=by)

    async def adrop_agent(self, agent: str) -> None:
        await asyncio.to_thread(self.drop_agent, agent)

    def _tier(self, tier: object) -> str:
        if not isinstance(tier, str) or tier not in TIERS:
            refuse("tier", f"one of {', '.join(TIERS)}", tier)
        return tier

    def _channel(self, channel: object) -> str:
        channels = self._lookup.policy.channels
        if channel is None:
            return ""
        if not isinstance(channel, str) or channel not in channels:
            refuse("channel", f"one of {', '.join(channels)}", channel)
        return channel

    def _change(self, change: Change) -> None:
        """Remember a change and let it hold: the one way in which anything is apply_change while running."""
        with self._changing:
            before = self._lookup
            after = Lookup(
                before.policy, apply_change(before.effective, before.policy, change), self._store, before.unknown
            )
            if change.agent:
                # First, so that whoever hears of the change finds them empty: they may be left from a time when that
                # limit effective before. No check uses them until the switch, save where a limit stays the same.
                self._drop_buckets(after, change.agent)
            self._book.write(change)
            if self._shared:
                self._take_over()
                return
            self._lookup = after
            self._known += 1
        self._emit(PolicyChanged(str(change), change.by))

    def _take_over(self) -> None:
        """Let the changes hold that are in a book which others write to as well."""
        with self._changing:
            changes = self._book.read()
            before, news = self._lookup, changes[self._known :]
            if len(changes) != self._known:
                self._lookup = Lookup(before.policy, effective(before.policy, changes), self._store, before.unknown)
                self._known = len(changes)
        for change in news:
            self._emit(PolicyChanged(str(change), change.by))

    def _drop_buckets(self, plan: Lookup, agent: str, other: Lookup | None = None) -> None:
        """Drop an agent's buckets under a plan, save those that are the same under another."""
        spared = set() if other is None else {meter.identity for meter in other.meters_of(agent)}
        for meter in plan.meters_of(agent):
            if meter.identity not in spared:
                self._store.forget(meter.name, agent, meter.limit)

    # Events ----------------------------------------------------------------------------------------------------------

    def subscribe(self, listener: Listener, *kinds: type[Event]) -> Callable[[], None]:
        """Call `listener` with every event from now on, or with those of some kinds; the function returned ends that.

        Who doesn't ask for `Checked` costs a check nothing.
        """
        wanted = kinds or get_args(Event)
        for kind in wanted:
            if kind not in get_args(Event):
                refuse("subscribe", f"one of {', '.join(known.__name__ for known in get_args(Event))}", kind)
        with self._changing:
            before = self._listeners
            self._listen(before | {kind: (*before.get(kind, ()), listener) for kind in wanted})
        return lambda: self._unsubscribe(listener)

    def _listen(self, listeners: dict[type[Event], tuple[Listener, ...]]) -> None:
        self._listeners = listeners
        self._watched = bool(listeners.get(Checked))
        self._heeded = bool(listeners.get(Violated) or listeners.get(Alerted))

    def _hear(self, event: Degraded | RecordedViolation) -> None:
        """Pass on what a store has to say."""
        if isinstance(event, Degraded):
            self._emit(event)
        elif event.violation.alert and event.offence.name == AGENTS:
            backoff = event.offence.backoff
            self._emit(Alerted(event.offence.key, backoff.alert_after, backoff.alert_window))

    def _unsubscribe(self, listener: Listener) -> None:
        with self._changing:
            left = {kind: [other for other in of if other is not listener] for kind, of in self._listeners.items()}
            self._listen({kind: tuple(of) for kind, of in left.items()})

    def close(self) -> None:
        """Let go of where changes are remembered, and of a store that the gate has opened itself.

        A `with` block does so at its end.
        """
        if self._unsubscribe_store is not None:
            self._unsubscribe_store()
        self._book.close()
        if self._opened:
            close_store(self._store)

    async def aclose(self) -> None:
        await asyncio.to_thread(self.close)
        if self._opened:
            await aclose_store(self._store)


def _by(by: object) -> str:
    if not isinstance(by, str):
        refuse("by", "a string", by)
    return by


def _book(remember: object, store: Store) -> ChangeLog:
    if remember is None:
        return store.change_log() if isinstance(store, SharedStore) else MemoryChangeLog()
    if isinstance(remember, (str, PathLike)):
        return SqliteChangeLog(remember)
    if isinstance(remember, ChangeLog):
        return remember
    return refuse("Gate remember", "a path, a book of changes, or None", remember)
