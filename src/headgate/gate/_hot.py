"""The hot path of `Gate`, compiled: from a request to the store and back, with its violation and its events.

`Gate` adds the rest in plain Python (see `headgate._limiter_hot`).
"""

from typing import Final, SupportsIndex

from headgate._limiter_hot import id_of
from headgate._native import Text, i64, mypyc_attr
from headgate.events import Alerted, Checked, Event, Listener, Violated, emit
from headgate.gate.lookup import AGENTS, Lookup, Meter
from headgate.gate.policy import MAX_AGENT, check_agent
from headgate.limits.decision import Decision, Outcome, Violation
from headgate.limits.fixed import UNLIMITED
from headgate.limits.numbers import LARGEST, cost_of
from headgate.stores.base import Ask, Offence, Store, Verb
from headgate.stores.memory import in_process

EXEMPT: Final = Decision(Outcome.EXEMPT, UNLIMITED, LARGEST, 0, 0, -1)


@mypyc_attr(allow_interpreted_subclasses=True)
class GateChecks:
    """A plan, where it is counted, and who listens."""

    def __init__(self, store: Store, plan: Lookup) -> None:
        self._store: Final = store
        self._memory: Final = in_process(store) is not None
        self._lookup = plan
        self._listeners: dict[type[Event], tuple[Listener, ...]] = {}
        self._watched = False  # whether somebody listens to every check
        self._heeded = False  # whether somebody listens to violations

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
        plan = self._lookup
        if type(agent) is not str or not 0 < len(agent) <= MAX_AGENT:
            agent = check_agent(agent)
        name: str = agent
        meter = plan.meter(name, channel, tier, action)
        number = _cost(cost)
        if plan.any_exempt and name in plan.exempt:
            decision = EXEMPT
        else:
            if meter.buckets is not None and request_id is None:
                decision = meter.buckets.check(name, number, plan.low, None if meter.shadow else plan.offenders)
            else:
                ask = Ask(meter.name, check_agent(name), meter.limit, number)
                offence = self._offence(plan, name, meter)
                decision = self._store.apply(Verb.CHECK, [ask], plan.low, offence, id_of(request_id))
            if meter.shadow:
                decision = decision.as_shadow()
        if self._watched or (self._heeded and decision.violation is not None):
            self._tell(name, meter, decision)
        return decision

    def tier_of(self, channel: Text, action: Text) -> str:
        """The tier that an action is classified into; one that nobody has classified is normal, and is logged once."""
        return self._lookup.meter("", channel, None, action).tier

    def _offence(self, plan: Lookup, agent: str, meter: Meter) -> Offence | None:
        return None if meter.shadow else Offence(AGENTS, agent, plan.backoff)

    def _tell(self, agent: str, meter: Meter, decision: Decision) -> None:
        if self._watched:
            self._emit(Checked(agent, meter.channel, meter.tier, decision))
        if decision.violation is not None:
            self._tell_violation(agent, meter.channel, meter.tier, decision.violation)

    def _tell_violation(self, agent: str, channel: str, tier: str, violation: Violation) -> None:
        self._emit(Violated(agent, channel, tier, violation.count, violation.advised))
        if violation.alert:
            backoff = self._lookup.backoff
            self._emit(Alerted(agent, backoff.alert_after, backoff.alert_window))

    def _emit(self, event: Event) -> None:
        listeners = self._listeners.get(type(event))
        if listeners:
            emit(listeners, event)


def _cost(cost: object) -> i64:
    if type(cost) is int and 0 < cost <= LARGEST:
        return cost
    return cost_of(cost)
