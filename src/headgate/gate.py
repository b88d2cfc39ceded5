"""Gate: the policy, applied. What an agent platform calls."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable
from os import PathLike
from typing import Final, SupportsIndex

from headgate._native import Text, i64
from headgate.changes import Book, Change, Held, Notebook, changed, held
from headgate.core import Decision, Limit, Outcome, Violation
from headgate.events import AddressChecked, Alerted, Checked, Event, Listener, PolicyChanged, Violated, emit
from headgate.inputs import LARGEST, cost_of, refuse
from headgate.limits import UNLIMITED
from headgate.notation import LimitLike, limit_of
from headgate.plan import ADDRESSES, AGENTS, Meter, Plan, address_key, address_meter
from headgate.policy import MAX_AGENT, TIERS, UNKNOWN_TIER, Policy, check_agent
from headgate.sessions import Session, Sessions
from headgate.stores import Ask, Offence, Store, Verb
from headgate.stores.memory import MemoryStore
from headgate.stores.sqlite import SqliteBook
from headgate.violations import Backoff, Standing

_LOGGED: Final = 1000  # names of unknown actions that are logged at the most

_EXEMPT: Final = Decision(Outcome.EXEMPT, UNLIMITED, LARGEST, 0, 0, -1)
_log = logging.getLogger("headgate")


class Gate:
    """Says whether an agent may do something, and keeps account of it.

    `store` is where it is counted (None: this process's memory), `remember` where changes made while running are kept:
    the path of a file, or None to forget them with the process.

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
        store: Store | None = None,
        remember: str | PathLike[str] | Book | None = None,
    ) -> None:
        if store is not None and not callable(getattr(store, "apply", None)):
            refuse("Gate store", "a store such as MemoryStore()", store)
        self._store: Final[Store] = MemoryStore() if store is None else store
        self._memory: Final = isinstance(self._store, MemoryStore)
        self._book: Final[Book] = _book(remember)
        self._changing: Final = threading.RLock()
        self._listeners: tuple[Listener, ...] = ()
        self._unknown: Final[set[tuple[object, str]]] = set()
        self._sessions: Final = Sessions(self._store)
        rules = Policy() if policy is None else policy
        if not isinstance(rules, Policy):
            refuse("Gate policy", "a Policy", rules)
        self._plan = Plan(rules, held(rules, self._book.read()), self._store)

    # Checks ----------------------------------------------------------------------------------------------------------

    def check(
        self,
        agent: Text,
        channel: Text,
        tier: Text | None = None,
        *,
        action: Text | None = None,
        cost: SupportsIndex = 1,
    ) -> Decision:
        """Let an agent's request pass and count it, or deny it, count nothing, and record a violation.

        Name the tier, or the action that the policy classifies into one.
        """
        plan = self._plan
        if type(agent) is not str or not 0 < len(agent) <= MAX_AGENT:
            agent = check_agent(agent)
        name: str = agent
        meter = self._meter(plan, name, channel, tier, action)
        number = _cost(cost)
        if plan.any_exempt and name in plan.exempt:
            decision = _EXEMPT
        elif meter.buckets is not None:
            decision = meter.buckets.take(name, number, plan.low, None if meter.watched else plan.offenders)
            if meter.watched:
                decision = decision.watched()
        else:
            ask = Ask(meter.name, check_agent(name), meter.limit, number)
            decision = self._store.apply(Verb.CHECK, [ask], plan.low, self._offence(plan, name, meter))
            if meter.watched:
                decision = decision.watched()
        if self._listeners:
            self._tell(name, meter, decision)
        return decision

    async def acheck(
        self,
        agent: Text,
        channel: Text,
        tier: Text | None = None,
        *,
        action: Text | None = None,
        cost: SupportsIndex = 1,
    ) -> Decision:
        plan = self._plan
        name = check_agent(agent)
        if self._memory or name in plan.exempt:
            return self.check(name, channel, tier, action=action, cost=cost)
        meter = self._meter(plan, name, channel, tier, action)
        decision = await self._store.aapply(
            Verb.CHECK, [Ask(meter.name, name, meter.limit, _cost(cost))], plan.low, self._offence(plan, name, meter)
        )
        if meter.watched:
            decision = decision.watched()
        if self._listeners:
            self._tell(name, meter, decision)
        return decision

    def _meter(self, plan: Plan, agent: str, channel: object, tier: object, action: object) -> Meter:
        """The meter that a check runs under."""
        of_channel = plan.by_action.get(channel) if isinstance(channel, str) else None
        if of_channel is None:
            refuse("channel", f"one of {', '.join(plan.policy.channels)}", channel)
        if tier is None:
            meter = of_channel.get(action) if isinstance(action, str) else None
            if meter is None:
                meter = plan.meters[str(channel)][self._unclassified(channel, action)]
        elif action is not None:
            refuse("check", "a tier or an action, not both", (tier, action))
        else:
            found = plan.meters[str(channel)].get(tier) if isinstance(tier, str) else None
            if found is None:
                refuse("tier", f"one of {', '.join(TIERS)}", tier)
            meter = found
        if plan.own:
            own = plan.own.get(agent)
            if own is not None:
                return own[meter.channel][meter.tier]
        return meter

    def tier_of(self, channel: Text, action: Text) -> str:
        """The tier that an action is classified into; one that nobody has classified is normal, and is logged once."""
        return self._meter(self._plan, "", channel, None, action).tier

    def _unclassified(self, channel: object, action: object) -> str:
        if not isinstance(action, str):
            refuse("check", "a tier or an action", action)
        if len(self._unknown) < _LOGGED and (channel, action) not in self._unknown:
            self._unknown.add((channel, action))
            _log.warning("unknown action %.100r on channel %s: taken as %s", action, channel, UNKNOWN_TIER)
        return UNKNOWN_TIER

    def _offence(self, plan: Plan, agent: str, meter: Meter) -> Offence | None:
        return None if meter.watched else Offence(AGENTS, agent, plan.backoff)

    def check_address(self, address: Text, purpose: Text = "request", *, cost: SupportsIndex = 1) -> Decision:
        """The check for somebody who isn't known yet, by address. `purpose` is "request" or "registration".

        An IPv6 address counts by its /64. Denials escalate the advised wait, but are nobody's violations.
        """
        plan = self._plan
        key, meter = address_key(plan, address), address_meter(plan, purpose)
        if key is None:
            return _EXEMPT
        asks = [Ask(meter.name, key, meter.limit, _cost(cost))]
        offence = None if meter.watched else Offence(ADDRESSES, key, plan.backoff)
        return self._finish_address(key, purpose, meter, self._store.apply(Verb.CHECK, asks, plan.low, offence))

    async def acheck_address(self, address: Text, purpose: Text = "request", *, cost: SupportsIndex = 1) -> Decision:
        plan = self._plan
        key, meter = address_key(plan, address), address_meter(plan, purpose)
        if key is None:
            return _EXEMPT
        asks = [Ask(meter.name, key, meter.limit, _cost(cost))]
        offence = None if meter.watched else Offence(ADDRESSES, key, plan.backoff)
        return self._finish_address(key, purpose, meter, await self._store.aapply(Verb.CHECK, asks, plan.low, offence))

    def _finish_address(self, key: str, purpose: object, meter: Meter, decision: Decision) -> Decision:
        if meter.watched:
            decision = decision.watched()
        if self._listeners:
            emit(self._listeners, AddressChecked(key, str(purpose), decision))
        return decision

    def session(self, agent: Text, session_id: Text | int, limit: LimitLike = UNLIMITED) -> Session:
        """Open a session with a budget of its own: unlimited, unless a limit such as `limited(5, 20)` is given."""
        return self._sessions.open(agent, session_id, limit_of("session limit", limit))

    @property
    def active_buckets(self) -> int:
        """How many sessions have been used and not yet closed."""
        return self._sessions.active_buckets

    # Violations ------------------------------------------------------------------------------------------------------

    def record_violation(self, agent: Text) -> float:
        """Record a denial that was made elsewhere, and return the advised wait in seconds."""
        name, plan = check_agent(agent), self._plan
        if name in plan.exempt:
            return 0.0
        violation = self._store.offend(Offence(AGENTS, name, plan.backoff))
        self._tell_violation(name, "", "", violation)
        return violation.advised

    async def arecord_violation(self, agent: Text) -> float:
        name, plan = check_agent(agent), self._plan
        if name in plan.exempt:
            return 0.0
        violation = await self._store.aoffend(Offence(AGENTS, name, plan.backoff))
        self._tell_violation(name, "", "", violation)
        return violation.advised

    def standing(self, agent: Text) -> Standing:
        """How an agent stands: its violations in a row, and how long they still count."""
        return self._store.standing(Offence(AGENTS, check_agent(agent), self._plan.backoff))

    async def astanding(self, agent: Text) -> Standing:
        return await self._store.astanding(Offence(AGENTS, check_agent(agent), self._plan.backoff))

    def is_rate_limited(self, agent: Text) -> bool:
        """Whether an agent has violations and the quiet period has not passed. One that is exempt is not."""
        return not self.is_exempt(agent) and bool(self.standing(agent))

    async def ais_rate_limited(self, agent: Text) -> bool:
        return not self.is_exempt(agent) and bool(await self.astanding(agent))

    def reset_violations(self, agent: Text) -> bool:
        """Forget an agent's violations, and say whether there were any."""
        return self._store.forget(AGENTS, check_agent(agent), self._plan.backoff)

    async def areset_violations(self, agent: Text) -> bool:
        return await self._store.aforget(AGENTS, check_agent(agent), self._plan.backoff)

    # What holds ------------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """The policy, without the changes made while running."""
        return self._plan.policy

    @property
    def holds(self) -> Held:
        """The limits, overrides and exemptions that hold now, with the changes."""
        return self._plan.holds

    def is_exempt(self, agent: Text) -> bool:
        """Whether an agent always passes."""
        return check_agent(agent) in self._plan.exempt

    def limits_for(self, agent: Text, channel: Text, tier: Text) -> Limit:
        """The limit that holds for an agent now: `UNLIMITED` if it is exempt."""
        plan, name = self._plan, check_agent(agent)
        meter = self._meter(plan, name, channel, tier, None)
        return UNLIMITED if name in plan.exempt else meter.limit

    def capacity(self, agent: Text, channel: Text, tier: Text) -> int:
        """How much an agent can do at once."""
        return self.limits_for(agent, channel, tier).capacity

    def peek(self, agent: Text, channel: Text, tier: Text) -> Decision:
        """What a check would say, without counting anything."""
        plan, name = self._plan, check_agent(agent)
        meter = self._meter(plan, name, channel, tier, None)
        if name in plan.exempt:
            return _EXEMPT
        return self._store.apply(Verb.PEEK, [Ask(meter.name, name, meter.limit, 1)], plan.low)

    async def apeek(self, agent: Text, channel: Text, tier: Text) -> Decision:
        plan, name = self._plan, check_agent(agent)
        meter = self._meter(plan, name, channel, tier, None)
        if name in plan.exempt:
            return _EXEMPT
        return await self._store.aapply(Verb.PEEK, [Ask(meter.name, name, meter.limit, 1)], plan.low)

    def drop_agent(self, agent: Text) -> None:
        """Forget what an agent has spent, and its violations."""
        name, plan = check_agent(agent), self._plan
        self._drop_buckets(plan, name)
        self._store.forget(AGENTS, name, plan.backoff)

    # Changes ---------------------------------------------------------------------------------------------------------

    def set_override(
        self, agent: Text, tier: Text, limit: LimitLike, channel: Text | None = None, *, by: Text = ""
    ) -> None:
        """Give an agent a limit of its own for a tier, on one channel or on all."""
        value = str(limit_of("override", limit))
        self._change(Change("override", check_agent(agent), self._channel(channel), self._tier(tier), value, _by(by)))

    def remove_override(self, agent: Text, tier: Text | None = None, *, by: Text = "") -> None:
        """Put an agent back to the defaults, for a tier or for all."""
        self._change(
            Change("override", check_agent(agent), "", "" if tier is None else self._tier(tier), None, _by(by))
        )

    def add_exemption(self, agent: Text, *, by: Text = "") -> None:
        """Let an agent always pass."""
        self._change(Change("exemption", check_agent(agent), value="exempt", by=_by(by)))

    def remove_exemption(self, agent: Text, *, by: Text = "") -> None:
        """Hold an agent to its limits again."""
        self._change(Change("exemption", check_agent(agent), by=_by(by)))

    def set_default(self, tier: Text, limit: LimitLike, channel: Text | None = None, *, by: Text = "") -> None:
        """Change the limit of a tier for every agent without an override."""
        value = str(limit_of("default", limit))
        self._change(Change("default", "", self._channel(channel), self._tier(tier), value, _by(by)))

    def history(self) -> list[Change]:
        """Every change that was made, with who made it and when, oldest first."""
        return self._book.read()

    def reload(self, policy: Policy, *, by: Text = "") -> None:
        """Put another policy in the place of the one that holds; changes made while running stay on top of it.

        Buckets whose limit stays the same keep what they have counted.
        """
        if not isinstance(policy, Policy):
            refuse("reload", "a Policy", policy)
        who = _by(by)
        with self._changing:
            before = self._plan
            after = Plan(policy, held(policy, self._book.read()), self._store)
            if after.backoff != before.backoff:
                self._store.clear(AGENTS, after.backoff)
                self._store.clear(ADDRESSES, after.backoff)
            for agent in {*before.own, *after.own}:
                self._drop_buckets(after, agent, before)
            self._switch(before, after, before.exempt ^ after.exempt)
            for agent in {*before.own, *after.own}:
                self._drop_buckets(before, agent, after)
        self._emit(PolicyChanged("policy reloaded", who))

    # A change waits for the disk and perhaps for a store: the twins do so in a thread, and leave the loop free.

    async def aset_override(
        self, agent: Text, tier: Text, limit: LimitLike, channel: Text | None = None, *, by: Text = ""
    ) -> None:
        await asyncio.to_thread(self.set_override, agent, tier, limit, channel, by=by)

    async def aremove_override(self, agent: Text, tier: Text | None = None, *, by: Text = "") -> None:
        await asyncio.to_thread(self.remove_override, agent, tier, by=by)

    async def aadd_exemption(self, agent: Text, *, by: Text = "") -> None:
        await asyncio.to_thread(self.add_exemption, agent, by=by)

    async def aremove_exemption(self, agent: Text, *, by: Text = "") -> None:
        await asyncio.to_thread(self.remove_exemption, agent, by=by)

    async def aset_default(self, tier: Text, limit: LimitLike, channel: Text | None = None, *, by: Text = "") -> None:
        await asyncio.to_thread(self.set_default, tier, limit, channel, by=by)

    async def areload(self, policy: Policy, *, by: Text = "") -> None:
        await asyncio.to_thread(self.reload, policy, by=by)

    async def adrop_agent(self, agent: Text) -> None:
        await asyncio.to_thread(self.drop_agent, agent)

    def _tier(self, tier: object) -> str:
        if not isinstance(tier, str) or tier not in TIERS:
            refuse("tier", f"one of {', '.join(TIERS)}", tier)
        return tier

    def _channel(self, channel: object) -> str:
        channels = self._plan.policy.channels
        if channel is None:
            return ""
        if not isinstance(channel, str) or channel not in channels:
            refuse("channel", f"one of {', '.join(channels)}", channel)
        return channel

    def _change(self, change: Change) -> None:
        """Remember a change and let it hold: the one way in which anything is changed while running."""
        with self._changing:
            before = self._plan
            holds = changed(before.holds, before.policy, change)
            self._book.write(change)
            after = Plan(before.policy, holds, self._store)
            self._switch(before, after, {change.agent} if change.agent else set())
        self._emit(PolicyChanged(str(change), change.by))

    def _switch(self, before: Plan, after: Plan, agents: Iterable[str]) -> None:
        """Let a plan hold, and drop what these agents, or everybody under a changed default, have spent.

        What is dropped before the switch is not in use yet, what is dropped after it no longer is: so the first check
        under the new plan finds a full bucket, and no check fails.
        """
        for agent in agents:
            self._drop_buckets(after, agent)
        self._clear_defaults(after, before)
        self._plan = after
        for agent in agents:
            self._drop_buckets(before, agent)
        self._clear_defaults(before, after)

    def _drop_buckets(self, plan: Plan, agent: str, other: Plan | None = None) -> None:
        """Drop an agent's buckets under a plan, save those that are the same under another."""
        spared = set() if other is None else {meter.identity for meter in other.meters_of(agent)}
        for meter in plan.meters_of(agent):
            if meter.identity not in spared:
                self._store.forget(meter.name, agent, meter.limit)

    def _clear_defaults(self, plan: Plan, other: Plan) -> None:
        """Drop the buckets of each default that differs in another plan."""
        for channel, of_channel in plan.meters.items():
            for tier, meter in of_channel.items():
                elsewhere = other.meters.get(channel, {}).get(tier)
                if elsewhere is None or elsewhere.limit != meter.limit:
                    self._store.clear(meter.name, meter.limit)

    # Events ----------------------------------------------------------------------------------------------------------

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with every event from now on; the function returned ends that."""
        with self._changing:
            self._listeners = (*self._listeners, listener)
        return lambda: self._unsubscribe(listener)

    def _unsubscribe(self, listener: Listener) -> None:
        with self._changing:
            self._listeners = tuple([other for other in self._listeners if other is not listener])

    def _tell(self, agent: str, meter: Meter, decision: Decision) -> None:
        emit(self._listeners, Checked(agent, meter.channel, meter.tier, decision))
        if decision.violation is not None:
            self._tell_violation(agent, meter.channel, meter.tier, decision.violation)

    def _tell_violation(self, agent: str, channel: str, tier: str, violation: Violation) -> None:
        self._emit(Violated(agent, channel, tier, violation.count, violation.advised))
        if violation.alert:
            backoff: Backoff = self._plan.backoff
            self._emit(Alerted(agent, backoff.alert_after, backoff.alert_window))

    def _emit(self, event: Event) -> None:
        if self._listeners:
            emit(self._listeners, event)

    def close(self) -> None:
        """Let go of the file that changes are remembered in."""
        self._book.close()


def _by(by: object) -> str:
    if not isinstance(by, str):
        refuse("by", "a string", by)
    return by


def _cost(cost: object) -> i64:
    if type(cost) is int and 0 < cost <= LARGEST:
        return cost
    return cost_of(cost)


def _book(remember: object) -> Book:
    if remember is None:
        return Notebook()
    if isinstance(remember, (str, PathLike)):
        return SqliteBook(remember)
    if callable(getattr(remember, "write", None)) and callable(getattr(remember, "read", None)):
        return remember  # type: ignore[return-value]
    return refuse("Gate remember", "a path, a book of changes, or None", remember)
