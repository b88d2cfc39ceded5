"""The checks of limiters and gates: what stands between a request and the store, compiled.

`Limiter` and `Gate` add everything else to these, uncompiled. Their async twins have to be: a compiled coroutine that
is cancelled throws into what it waits for in a way that Python 3.12 warns of.
"""

from collections.abc import Callable
from typing import Final, SupportsIndex

from headgate._native import Text, i64, mypyc_attr
from headgate.core import Decision, Limit, Outcome, Violation
from headgate.events import Alerted, Checked, Event, Listener, Violated, emit
from headgate.inputs import LARGEST, cost_of, refuse
from headgate.limits import UNLIMITED
from headgate.plan import AGENTS, Meter, Plan
from headgate.policy import MAX_AGENT, check_agent
from headgate.stores import Ask, Offence, Spare, Store, Verb
from headgate.stores.memory import Buckets, MemoryStore

_LONGEST_ID: Final = 200

EXEMPT: Final = Decision(Outcome.EXEMPT, UNLIMITED, LARGEST, 0, 0, -1)


@mypyc_attr(allow_interpreted_subclasses=True)
class LimiterChecks:
    """A limit, and where it is counted."""

    def __init__(self, limit: Limit, store: Store, name: str, low: i64) -> None:
        self._limit: Final = limit
        self._store: Final = store
        self._name: Final = name
        self._low: Final = low
        self._table: Final[Buckets | None] = store.buckets(name, limit) if isinstance(store, MemoryStore) else None
        spare: Callable[[str, Limit], Spare | None] | None = getattr(store, "spare", None)
        self._spare: Final = None if spare is None else spare(name, limit)

    def check(self, key: Text, cost: SupportsIndex = 1, *, request_id: Text | None = None) -> Decision:
        """Let a request of this cost pass and count it, or deny it and count nothing.

        With a `request_id` it is counted once, however often it is asked within a minute.
        """
        table = self._table
        if table is not None and request_id is None and type(key) is str and type(cost) is int and 0 < cost <= LARGEST:
            return table.take(key, cost, self._low, None)
        if self._spare is not None and request_id is None:
            served = self._spare.serve(key_of(key), cost_of(cost), self._low, None)
            if served is not None:
                return served
        return self._apply(Verb.CHECK, key, cost, request_id)

    def _apply(self, verb: Verb, key: object, cost: object, request_id: object = None) -> Decision:
        return self._store.apply(verb, [self._ask(key, cost)], self._low, None, id_of(request_id))

    def _ask(self, key: object, cost: object) -> Ask:
        return Ask(self._name, key_of(key), self._limit, cost_of(cost))


def key_of(key: object) -> str:
    """A key: any string."""
    if not isinstance(key, str):
        refuse("key", "a string", key)
    return str.__str__(key)  # of a subclass, the plain string: its own hash and equality don't count


def id_of(request_id: object) -> str:
    """A request's id, or "" if it has none."""
    if request_id is None:
        return ""
    if not isinstance(request_id, str) or not 0 < len(request_id) <= _LONGEST_ID:
        refuse("request_id", f"1 to {_LONGEST_ID} characters", request_id)
    return request_id


@mypyc_attr(allow_interpreted_subclasses=True)
class GateChecks:
    """A plan, where it is counted, and who listens."""

    def __init__(self, store: Store, plan: Plan) -> None:
        self._store: Final = store
        self._memory: Final = isinstance(store, MemoryStore)
        self._plan = plan
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
        plan = self._plan
        if type(agent) is not str or not 0 < len(agent) <= MAX_AGENT:
            agent = check_agent(agent)
        name: str = agent
        meter = plan.meter(name, channel, tier, action)
        number = _cost(cost)
        if plan.any_exempt and name in plan.exempt:
            decision = EXEMPT
        else:
            if meter.buckets is not None and request_id is None:
                decision = meter.buckets.take(name, number, plan.low, None if meter.watched else plan.offenders)
            else:
                ask = Ask(meter.name, check_agent(name), meter.limit, number)
                offence = self._offence(plan, name, meter)
                decision = self._store.apply(Verb.CHECK, [ask], plan.low, offence, id_of(request_id))
            if meter.watched:
                decision = decision.watched()
        if self._watched or (self._heeded and decision.violation is not None):
            self._tell(name, meter, decision)
        return decision

    def tier_of(self, channel: Text, action: Text) -> str:
        """The tier that an action is classified into; one that nobody has classified is normal, and is logged once."""
        return self._plan.meter("", channel, None, action).tier

    def _offence(self, plan: Plan, agent: str, meter: Meter) -> Offence | None:
        return None if meter.watched else Offence(AGENTS, agent, plan.backoff)

    def _tell(self, agent: str, meter: Meter, decision: Decision) -> None:
        if self._watched:
            self._emit(Checked(agent, meter.channel, meter.tier, decision))
        if decision.violation is not None:
            self._tell_violation(agent, meter.channel, meter.tier, decision.violation)

    def _tell_violation(self, agent: str, channel: str, tier: str, violation: Violation) -> None:
        self._emit(Violated(agent, channel, tier, violation.count, violation.advised))
        if violation.alert:
            backoff = self._plan.backoff
            self._emit(Alerted(agent, backoff.alert_after, backoff.alert_window))

    def _emit(self, event: Event) -> None:
        listeners = self._listeners.get(type(event))
        if listeners:
            emit(listeners, event)


def _cost(cost: object) -> i64:
    if type(cost) is int and 0 < cost <= LARGEST:
        return cost
    return cost_of(cost)
