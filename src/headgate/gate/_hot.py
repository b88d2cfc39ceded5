"""The hot path of `Gate`, compiled: from a request to the store and back, with its violation and its events.

`Gate` adds the rest in plain Python (see `headgate._limiter_hot`).
"""

from typing import Final, SupportsIndex

from headgate._limiter_hot import id_of
from headgate._native import Text, i64, mypyc_attr
from headgate.events import AddressChecked, Alerted, Checked, Event, Listener, Violated, emit
from headgate.gate.lookup import AGENTS, ActiveLimit, Lookup
from headgate.gate.policy import MAX_AGENT, check_agent
from headgate.limits.decision import Decision, Outcome, Violation
from headgate.limits.fixed import UNLIMITED
from headgate.limits.numbers import LARGEST, cost_of
from headgate.stores.base import Ask, Offence, Store, Verb
from headgate.stores.memory import in_process

EXEMPT: Final = Decision(Outcome.EXEMPT, UNLIMITED, LARGEST, 0, 0, -1)
CHECK: Final = Verb.CHECK


@mypyc_attr(allow_interpreted_subclasses=True)
class GateChecks:
    """Limits, the store that counts, and listeners."""

    def __init__(self, store: Store, lookup: Lookup) -> None:
        self._store: Final = store
        self._memory: Final = in_process(store) is not None
        self._lookup = lookup
        self._listeners: dict[type[Event], tuple[Listener, ...]] = {}
        self._emits_checks = False  # whether there is a listener for every check
        self._emits_violations = False  # whether there is a listener for violations

    def check(
        self,
        agent: Text,
        channel: Text,
        tier: Text | None = None,
        *,
        action: Text | None = None,
        cost: SupportsIndex = 1,
        request_id: Text | None = None,
    ) -> Decision:
        """Let an agent's request pass and count it, or deny it, count nothing, and record a violation.

        Name the tier, or the action that the policy classifies into one. With a `request_id` it is counted once,
        however often it is asked within a minute.
        """
        if type(agent) is not str or not 0 < len(agent) <= MAX_AGENT:
            agent = check_agent(agent)
        return _check(self, self._lookup.find(agent, channel, tier, action), agent, cost, request_id)

    def find_limit(
        self, agent: str, channel: Text, tier: Text | None = None, *, action: Text | None = None
    ) -> ActiveLimit:
        """The limit of a check, for a caller that needs its tier as well. It is checked at once, by `check_limit`."""
        return self._lookup.find(agent, channel, tier, action)

    def check_limit(self, active: ActiveLimit, agent: str, cost: SupportsIndex = 1) -> Decision:
        """`check` under a limit that was found for the same agent."""
        return _check(self, active, agent, cost, None)

    def tier_of(self, channel: Text, action: Text) -> str:
        """The tier that an action is classified into; an unknown action is normal, and is logged once."""
        return self._lookup.find("", channel, None, action).tier

    # A key under a limit, whether it is an agent's or an address's ----------------------------------------------------

    def _apply(self, verb: Verb, active: ActiveLimit, key: str, cost: object, request_id: object = None) -> Decision:
        request = store_request(verb, active, key, cost, request_id)
        return self._report(verb, active, key, EXEMPT if active.exempt else self._store.apply(*request))

    def _report(self, verb: Verb, active: ActiveLimit, key: str, decision: Decision) -> Decision:
        """Emit the events of a check, and return the decision that the caller gets."""
        if verb is not CHECK:
            return decision
        if active.shadow:
            decision = decision.as_shadow()
        if active.group == AGENTS:
            if self._emits_checks:
                self._emit(Checked(key, active.channel, active.tier, decision))
            if decision.violation is not None:
                self._emit_violation(key, active.channel, active.tier, decision.violation)
        elif not active.exempt:
            self._emit(AddressChecked(key, active.tier, decision))
        return decision

    def _emit_violation(self, agent: str, channel: str, tier: str, violation: Violation) -> None:
        self._emit(Violated(agent, channel, tier, violation.count, violation.advised))
        if violation.alert:
            backoff = self._lookup.backoff
            self._emit(Alerted(agent, backoff.alert_after, backoff.alert_window))

    def _emit(self, event: Event) -> None:
        listeners = self._listeners.get(type(event))
        if listeners:
            emit(listeners, event)


def store_request(
    verb: Verb, active: ActiveLimit, key: str, cost: object, request_id: object
) -> tuple[Verb, list[Ask], int, Offence | None, str]:
    """The arguments of `Store.apply`. A denied check is recorded as a violation, unless the limit is in shadow mode."""
    offence = Offence(active.group, key, active.backoff) if verb is CHECK and not active.shadow else None
    return verb, [Ask(active.name, key, active.limit, cost_of(cost))], active.low, offence, id_of(request_id)


# A function, since calls of methods that plain Python may override are slow.
def _check(gate: GateChecks, active: ActiveLimit, key: str, cost: SupportsIndex, request_id: Text | None) -> Decision:
    number: i64 = cost if type(cost) is int and 0 < cost <= LARGEST else cost_of(cost)
    if active.exempt:
        decision = EXEMPT
    elif active.buckets is not None and request_id is None:
        decision = active.buckets.check(key, number, active.low, active.offenders)
    else:
        return gate._apply(CHECK, active, check_agent(key), number, request_id)
    if active.shadow or gate._emits_checks or (gate._emits_violations and decision.violation is not None):
        return gate._report(CHECK, active, key, decision)
    return decision
