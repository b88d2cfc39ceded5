"""Gate: the policy, applied. What an agent platform calls."""

import logging
from collections.abc import Callable
from os import PathLike
from typing import Final, Never, SupportsIndex, get_args

from headgate.callables import is_async, is_generator
from headgate.errors import refuse, refuse_option
from headgate.events import Alerted, Checked, Degraded, Event, Listener, Violated, ViolationsReset
from headgate.flow import in_thread
from headgate.gate._hot import CHECK, EXEMPT, store_request
from headgate.gate.effective import Effective
from headgate.gate.gate_accounts import GateAccounts
from headgate.gate.lookup import AGENTS, ActiveLimit
from headgate.gate.policy import Policy, check_agent
from headgate.gate.sessions import Session, Sessions
from headgate.lifecycle import Closable
from headgate.limits.decision import Decision, Limit, Violation
from headgate.limits.fixed import UNLIMITED
from headgate.limits.notation import LimitLike, rate_limit_of
from headgate.limits.violations import Standing
from headgate.stores.base import Block, ChangeLog, ObservableStore, Offence, RecordedViolation, Store, Verb
from headgate.stores.memory import in_process
from headgate.stores.urls import aclose_store, close_store, is_memory, open_store

_log = logging.getLogger("headgate")


class Gate(GateAccounts, Closable):
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
        **unknown: Never,
    ) -> None:
        for option in unknown:
            refuse_option("Gate", ("policy", "store", "remember"), option, see="help(headgate.Gate)")
        rules = Policy() if policy is None else policy
        if not isinstance(rules, Policy):
            refuse("Gate policy", "a Policy (Policy.load reads a file)", rules)
        opened = open_store("Gate store", store, **rules.store_options)
        self._owns_store: Final = isinstance(store, str)
        self.private = store is None or is_memory(store)
        """Whether it counts in a memory of its own, because no store was given, or memory://."""
        self._sessions: Final = Sessions(opened, lambda: self._lookup, self._session_violated, self._session_asks)
        super().__init__(rules, opened, remember)
        memory = in_process(opened)
        if remember is not None and memory is not None and memory.file is None and rules.accounts.has_budgets:
            _log.warning(
                "Gate remember: changes are remembered, but not the spending of budgets: for that, pass"
                " store=MemoryStore(remember=…) with a file of its own"
            )
        self._unsubscribe_store: Final = (
            opened.subscribe(self._on_store_event) if isinstance(opened, ObservableStore) else None
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

    async def acheck_limit(self, active: ActiveLimit, agent: str, cost: SupportsIndex = 1) -> Decision:
        if self._memory:
            return self.check_limit(active, agent, cost)
        return await self._aapply(CHECK, active, check_agent(agent), cost)

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

        Like `refund`, it answers as `peek` would right after it, and emits no event. A block changes neither of them.
        """
        return self._apply(Verb.CHARGE, *self._counted(agent, channel, tier), cost)

    async def acharge(self, agent: str, channel: str, tier: str, cost: SupportsIndex) -> Decision:
        return await self._aapply(Verb.CHARGE, *self._counted(agent, channel, tier), cost)

    def refund(self, agent: str, channel: str, tier: str, cost: SupportsIndex = 1) -> Decision:
        """Give an agent back a counted cost that it hasn't used, up to the capacity."""
        return self._apply(Verb.REFUND, *self._counted(agent, channel, tier), cost)

    async def arefund(self, agent: str, channel: str, tier: str, cost: SupportsIndex = 1) -> Decision:
        return await self._aapply(Verb.REFUND, *self._counted(agent, channel, tier), cost)

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

    def _counted(self, agent: object, channel: object, tier: object) -> tuple[ActiveLimit, str]:
        """The limit that an agent's costs are counted under, blocked or not, and the key."""
        name = check_agent(agent)
        return self._lookup.find_counted(name, channel, tier), name

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
        return self._sessions.open(agent, session_id, rate_limit_of("session limit", limit))

    def _session_violated(self, agent: str, violation: Violation) -> None:
        self._emit_violation(agent, "session", "", violation)

    @property
    def active_buckets(self) -> int:
        """How many sessions have been used and not yet closed."""
        return self._sessions.active_buckets

    # Violations ------------------------------------------------------------------------------------------------------

    def record_violation(self, agent: str) -> float:
        """Record a denial that was made elsewhere, and return the advised wait in seconds."""
        if self.always_passes(agent):
            return 0.0
        return self._recorded(agent, self._store.record_violation(self._offence(agent)))

    async def arecord_violation(self, agent: str) -> float:
        if self.always_passes(agent):
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
        """Whether an agent has violations and the quiet period has not passed, or is blocked.

        One that is exempt, and not blocked, is not.
        """
        return self.is_blocked(agent) or (not self.always_passes(agent) and bool(self.standing(agent)))

    async def ais_rate_limited(self, agent: str) -> bool:
        return self.is_blocked(agent) or (not self.always_passes(agent) and bool(await self.astanding(agent)))

    def always_passes(self, agent: str) -> bool:
        """Whether an agent is exempt, and not blocked: everything passes, and no violation is recorded."""
        return self.is_exempt(agent) and not self.is_blocked(agent)

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
        """Whether an agent is exempt: it always passes, unless it is blocked."""
        return self._lookup.effective.is_exempt(check_agent(agent))

    def block_of(self, agent: str) -> Block | None:
        """The block of an agent, with its end and reason; None if there is none, or it has ended."""
        return self._lookup.block_of(check_agent(agent))

    def is_blocked(self, agent: str) -> bool:
        """Whether nothing of an agent passes, since it was blocked and the block has not ended."""
        return self.block_of(agent) is not None

    def role_of(self, agent: str) -> str:
        """The role that an agent was given; "" for none."""
        return self._lookup.effective.rules_of(check_agent(agent)).role

    def limits_for(self, agent: str, channel: str, tier: str | None = None, *, action: str | None = None) -> Limit:
        """The limit in effect for an agent now, by tier or by action.

        It is `BLOCKED` if the agent is blocked, and `UNLIMITED` if it is exempt.
        """
        active, _ = self._agent(agent, channel, tier, action)
        return active.limit

    def capacity(self, agent: str, channel: str, tier: str) -> int:
        """How much an agent can do at once."""
        return self.limits_for(agent, channel, tier).capacity

    def drop_agent(self, agent: str) -> None:
        """Forget an agent's counts and its violations."""
        self._drop_buckets(self._lookup, check_agent(agent))
        self.reset_violations(agent)

    adrop_agent = in_thread(drop_agent)

    # Events ----------------------------------------------------------------------------------------------------------

    def subscribe(self, listener: Listener, *kinds: type[Event]) -> Callable[[], None]:
        """Call `listener` with every event, or with those of some kinds, until the returned function is called.

        Listeners that skip `Checked` add no cost per check. An `async def` listener is refused: it would never run.
        """
        _check_listener(listener)
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


def _check_listener(given: object) -> None:
    if not callable(given) or is_async(given) or is_generator(given):
        tasks = "asyncio.create_task, or asyncio.run_coroutine_threadsafe where it may be called in another thread"
        refuse("subscribe", f"a plain function; for a coroutine, let it call {tasks}", given)
