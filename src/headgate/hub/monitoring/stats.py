"""Statistics of the gate for operators: checks, violations by agent, and the traffic of the last minutes."""

from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import perf_counter_ns
from typing import Final

from msgspec import Struct

from headgate.events import AddressChecked, Degraded, Event, HoldChecked, Violated
from headgate.gate import Gate
from headgate.gate.accounts import level_of
from headgate.gate.lookup import ActiveLimit
from headgate.hub.monitoring.denials import DenialLog
from headgate.hub.monitoring.recent_counts import RecentCounts, renew
from headgate.limits.clock import Clock
from headgate.limits.decision import Decision, Outcome
from headgate.limits.numbers import microseconds

SLOT: Final = 5
"""Seconds that one point of a timeline spans."""
FLEET_SLOTS: Final = 180
AGENT_SLOTS: Final = 60
BOUNDS: Final = tuple(round(digit * 10**power) for power in range(3, 9) for digit in (1, 2.5, 5))
"""The upper bounds of the histogram of decision times, in nanoseconds: from a microsecond to half a second."""

_MAX_OFFENDERS: Final = 10_000  # agents whose violations are remembered, the latest
_SLOT_US: Final = SLOT * 1_000_000
_OUTCOMES: Final = (Outcome.ALLOW, Outcome.WARN, Outcome.DENY, Outcome.EXEMPT)

NO_LIMIT: Final = "none"
"""Stands for the resource and the level of a hold that no limit decided on."""

Point = tuple[int, int, int]
"""The numbers of allowed, warned and denied requests in one slot."""


_hold_address: Final = ContextVar("hold_address", default="")


@contextmanager
def holds_from(address: str) -> Iterator[None]:
    """The holds that are asked for in this block come from an address."""
    before = _hold_address.set(address)
    try:
        yield
    finally:
        _hold_address.reset(before)


class Offender(Struct):
    """An agent, and its violations in the last hour."""

    agent_id: str
    violations: int


class _Violations:
    """The violations of one agent."""

    __slots__ = ("counts", "last")

    def __init__(self, now: int) -> None:
        self.counts = RecentCounts(now)
        self.last = now  # microseconds


class TrafficHistory:
    """The numbers of allowed, warned and denied requests in each of the newest slots."""

    __slots__ = ("_counts", "_slots", "slot")

    def __init__(self, slots: int, slot: int) -> None:
        self.slot = slot
        """The newest slot."""
        self._slots = slots
        self._counts = array("I", bytes(4 * 3 * slots))

    def add(self, slot: int, kind: int) -> None:
        if slot > self.slot:
            self._advance(slot)
        self._counts[slot % self._slots * 3 + kind] += 1

    def _advance(self, slot: int) -> None:
        for old in range(max(self.slot + 1, slot - self._slots + 1), slot + 1):
            place = old % self._slots * 3
            self._counts[place : place + 3] = array("I", (0, 0, 0))
        self.slot = slot

    def at(self, slot: int) -> Point:
        """The numbers of one slot: zeros for a slot that is not remembered."""
        if not self.slot - self._slots < slot <= self.slot:
            return 0, 0, 0
        place = slot % self._slots * 3
        allowed, warned, denied = self._counts[place : place + 3]
        return allowed, warned, denied


class Stats:
    """The statistics of one gate. Checks are counted where they are made, which is faster than events."""

    def __init__(self, gate: Gate, clock: Clock) -> None:
        self._gate, self._clock = gate, clock
        self._checks: Final[dict[tuple[str, str], list[int]]] = {}
        self.times: Final = [0] * (len(BOUNDS) + 1)
        """The number of decisions in each bucket of the histogram: up to each of the `BOUNDS`, and above the last."""
        self.time = 0
        """The total time of all decisions, in nanoseconds."""
        self.addresses: Final[Counter[tuple[str, str]]] = Counter()
        """Checks of addresses, by purpose and outcome."""
        self.holds: Final[Counter[tuple[str, str]]] = Counter()
        """Holds of agents, by the resource that decided and outcome."""
        self.hold_denials: Final[Counter[tuple[str, str]]] = Counter()
        """Denied holds, by the level of the account and the resource that decided."""
        self.denials: Final = DenialLog(clock)
        """The denials of agents."""
        self.violations = 0
        self.outages = 0
        # Microseconds of past outages, and when the present one began: one value, since other threads set it.
        self._outage: tuple[int, int | None] = (0, None)
        self.fleet: Final = TrafficHistory(FLEET_SLOTS, self.slot)
        self._traffic: Final[dict[str, TrafficHistory]] = {}
        # By agent; the one with the newest violation comes last.
        self._offenders: Final[OrderedDict[str, _Violations]] = OrderedDict()
        self.stop: Final = gate.subscribe(self._on_event, Violated, AddressChecked, Degraded, HoldChecked)

    @property
    def slot(self) -> int:
        """The number of the present slot."""
        return self._clock.now() // _SLOT_US

    @property
    def into_slot(self) -> float:
        """Seconds since the present slot began."""
        return self._clock.now() % _SLOT_US / 1_000_000

    async def check(
        self,
        agent: str,
        channel: str,
        tier: str | None = None,
        cost: int = 1,
        *,
        action: str | None = None,
        address: str = "",
    ) -> tuple[ActiveLimit, Decision]:
        """Check with the gate, and count the decision and its time; with the limit that decided, which has the tier.

        `address` is that of the request.
        """
        began = perf_counter_ns()
        active = self._gate.find_limit(agent, channel, tier, action=action)
        decision = await self._gate.acheck_limit(active, agent, cost)
        self.record(agent, channel, active.tier, decision.outcome, perf_counter_ns() - began)
        if decision.outcome is Outcome.DENY:
            self.denials.add(agent, channel, action or "", active.tier, address, decision)
        return active, decision

    def record(self, agent: str, channel: str, tier: str, outcome: Outcome, took: int) -> None:
        """Count a decision that took so many nanoseconds."""
        # Compared one by one: hashing an outcome is slow, and this is done for every check.
        kind = 0 if outcome is Outcome.ALLOW else 1 if outcome is Outcome.WARN else 2 if outcome is Outcome.DENY else 3
        counts = self._checks.get((channel, tier))
        if counts is None:
            counts = self._checks[channel, tier] = [0] * len(_OUTCOMES)
        counts[kind] += 1
        self.times[bisect_left(BOUNDS, took)] += 1
        self.time += took
        self._add_traffic(agent, kind % 3)

    def _add_traffic(self, agent: str, shown: int) -> None:
        """Count one allowed, warned or denied request of an agent."""
        slot = self._clock.now() // _SLOT_US
        if slot > self.fleet.slot:
            self._prune(slot)
        self.fleet.add(slot, shown)
        traffic = self._traffic.get(agent)
        if traffic is None:
            traffic = self._traffic[agent] = TrafficHistory(AGENT_SLOTS, slot)
        traffic.add(slot, shown)

    @property
    def checks(self) -> Counter[tuple[str, str, Outcome]]:
        """Checks of agents, by channel, tier and outcome."""
        return Counter(
            {
                (channel, tier, outcome): count
                for (channel, tier), counts in self._checks.items()
                for outcome, count in zip(_OUTCOMES, counts, strict=True)
            }
        )

    def _prune(self, slot: int) -> None:
        for agent in [agent for agent, traffic in self._traffic.items() if traffic.slot <= slot - AGENT_SLOTS]:
            del self._traffic[agent]

    def active(self, since: int) -> list[str]:
        """The agents that made a request in a slot or later."""
        return [agent for agent, traffic in self._traffic.items() if traffic.slot >= since]

    def traffic(self, agent: str) -> TrafficHistory | None:
        """An agent's traffic; None if it had none in the last minutes."""
        return self._traffic.get(agent)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Violated):
            self._violated(event.agent)
        elif isinstance(event, AddressChecked):
            self.addresses[event.purpose, event.decision.outcome.value] += 1
        elif isinstance(event, HoldChecked):
            self._held(event)
        elif isinstance(event, Degraded):
            self.outages += event.degraded
            self._outage = (self.outage_us, self._clock.now() if event.degraded else None)

    def _held(self, event: HoldChecked) -> None:
        resource, outcome = event.resource or NO_LIMIT, event.outcome
        self.holds[resource, outcome.value] += 1
        self._add_traffic(event.agent, _OUTCOMES.index(outcome) % 3)
        levels, depth = self._gate.effective.accounts.levels, level_of(event.account)
        above = bool(event.account) and depth < len(levels) - 2  # the last two are the agent and its session
        if outcome is Outcome.DENY:
            self.denials.add(event.agent, "hold", event.tool, resource, _hold_address.get(), event.decision)
            level = levels[depth] if event.account and depth < len(levels) else NO_LIMIT  # a reload may have removed it
            self.hold_denials[level, resource] += 1
        by_account = above and outcome is Outcome.DENY and not event.decision.degraded
        self.denials.hold_decided(event.agent, denied_by_account=by_account)

    @property
    def outage_us(self) -> int:
        """Microseconds that the store was away, including the present outage."""
        over, began = self._outage
        return over if began is None else over + self._clock.now() - began

    def _violated(self, agent: str) -> None:
        self.violations += 1
        now = self._clock.now()
        found = renew(self._offenders, agent, _MAX_OFFENDERS, _Violations, now)
        found.counts.add(now)
        found.last = now

    def violations_last_hour(self) -> dict[str, int]:
        """The agents with violations in the last hour, and how many."""
        now = self._clock.now()
        found = {agent: violations.counts.last_hour(now) for agent, violations in list(self._offenders.items())}
        for agent in [agent for agent, count in found.items() if not count]:
            del found[agent]
            self._offenders.pop(agent, None)
        return found

    def offenders(self) -> list[Offender]:
        """The agents with violations in the last hour, worst first."""
        found = [Offender(*one) for one in self.violations_last_hour().items()]
        return sorted(found, key=lambda one: (-one.violations, one.agent_id))

    def is_denied_by_account(self, agent: str) -> bool:
        """Whether an account above an agent has denied its last hold here, within the quiet period of violations."""
        return self.denials.is_denied_by_account(agent, microseconds("quiet", self._gate.policy.backoff.quiet))

    def limited(self) -> set[str]:
        """The agents that are rate limited now, as far as this hub knows: by violations here. Exempt ones are not."""
        earliest = self._clock.now() - microseconds("quiet", self._gate.policy.backoff.quiet)
        found = set()
        for agent, violations in list(reversed(self._offenders.items())):
            if violations.last <= earliest:
                break
            if not self._gate.always_passes(agent):
                found.add(agent)
        return found

    def forget(self, agent: str) -> None:
        """Forget an agent's violations."""
        self._offenders.pop(agent, None)

    def totals(self) -> tuple[int, int]:
        """The number of checks and holds of agents, and how many of them were denied."""
        counts = Counter(self.outcomes())
        for (_, outcome), times in self.holds.items():
            counts[outcome] += times
        return counts.total(), counts[Outcome.DENY.value]

    def outcomes(self) -> dict[str, int]:
        """Checks of agents by outcome."""
        counts = dict.fromkeys((outcome.value for outcome in Outcome), 0)
        for (_, _, outcome), times in self.checks.items():
            counts[outcome.value] += times
        return counts
