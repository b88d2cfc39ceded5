"""What happened at the gate, added up for operators: checks, violations by agent, the traffic of the last minutes."""

from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from typing import Final

from msgspec import Struct

from headgate.events import AddressChecked, Degraded, Event, Violated
from headgate.gate import Gate
from headgate.limits.clock import Clock
from headgate.limits.decision import Outcome

SLOT: Final = 5
"""Seconds that are added up into one point of a timeline."""
FLEET_SLOTS: Final = 180
AGENT_SLOTS: Final = 60
BOUNDS: Final = tuple(round(digit * 10**power) for power in range(3, 9) for digit in (1, 2.5, 5))
"""Nanoseconds, from a microsecond to half a second: the upper ends of the histogram of decision times."""

_MINUTES: Final = 60  # that are remembered
_OFFENDERS: Final = 10_000  # agents whose violations are remembered, those with the latest
_SLOT_US: Final = SLOT * 1_000_000
_OUTCOMES: Final = (Outcome.ALLOW, Outcome.WARN, Outcome.DENY, Outcome.EXEMPT)

Point = tuple[int, int, int]
"""What was allowed, warned and denied within one slot."""


class Offender(Struct):
    agent_id: str
    violations: int


class Trace:
    """How much was allowed, warned and denied in each of the newest slots."""

    __slots__ = ("_counts", "_slots", "slot")

    def __init__(self, slots: int, slot: int) -> None:
        self.slot = slot
        """The newest."""
        self._slots = slots
        self._counts = array("I", bytes(4 * 3 * slots))

    def add(self, slot: int, kind: int) -> None:
        if slot > self.slot:
            self._turn(slot)
        self._counts[slot % self._slots * 3 + kind] += 1

    def _turn(self, slot: int) -> None:
        for old in range(max(self.slot + 1, slot - self._slots + 1), slot + 1):
            place = old % self._slots * 3
            self._counts[place : place + 3] = array("I", (0, 0, 0))
        self.slot = slot

    def at(self, slot: int) -> Point:
        """What came in one of the slots that are remembered."""
        if not self.slot - self._slots < slot <= self.slot:
            return 0, 0, 0
        place = slot % self._slots * 3
        allowed, warned, denied = self._counts[place : place + 3]
        return allowed, warned, denied


class Tally:
    """Listens to a gate, and is told of each check by whoever asks the gate: quicker than events."""

    def __init__(self, gate: Gate, clock: Clock) -> None:
        self._clock: Final = clock
        self._lanes: Final[dict[tuple[str, str], list[int]]] = {}
        self.times: Final = [0] * (len(BOUNDS) + 1)
        """How many decisions took at most as long as each of the `BOUNDS`, and longer than the one before it."""
        self.time = 0
        """Nanoseconds that all decisions took."""
        self.addresses: Final[Counter[tuple[str, str]]] = Counter()
        """Checks by address, by purpose and outcome."""
        self.violations = 0
        self.degraded_times = 0
        # Microseconds of the outages that are over, and when the present one began: one value, since threads tell.
        self._degraded: tuple[int, int | None] = (0, None)
        self.fleet: Final = Trace(FLEET_SLOTS, self.slot)
        self._traces: Final[dict[str, Trace]] = {}
        self._offenders: Final[OrderedDict[str, dict[int, int]]] = OrderedDict()
        self.stop: Final = gate.subscribe(self._hear, Violated, AddressChecked, Degraded)

    @property
    def slot(self) -> int:
        """The number of the slot that it is now."""
        return self._clock.now() // _SLOT_US

    @property
    def into_slot(self) -> float:
        """Seconds since that slot began."""
        return self._clock.now() % _SLOT_US / 1_000_000

    def checked(self, agent: str, channel: str, tier: str, outcome: Outcome, took: int) -> None:
        """An agent's request was decided upon, within so many nanoseconds."""
        # Compared one by one: an outcome is slow to look up, and this is done for every check.
        kind = 0 if outcome is Outcome.ALLOW else 1 if outcome is Outcome.WARN else 2 if outcome is Outcome.DENY else 3
        lane = self._lanes.get((channel, tier))
        if lane is None:
            lane = self._lanes[channel, tier] = [0] * len(_OUTCOMES)
        lane[kind] += 1
        self.times[bisect_left(BOUNDS, took)] += 1
        self.time += took
        slot, shown = self._clock.now() // _SLOT_US, kind % 3
        if slot > self.fleet.slot:
            self._prune(slot)
        self.fleet.add(slot, shown)
        trace = self._traces.get(agent)
        if trace is None:
            trace = self._traces[agent] = Trace(AGENT_SLOTS, slot)
        trace.add(slot, shown)

    @property
    def checks(self) -> Counter[tuple[str, str, Outcome]]:
        """Those of agents, by channel, tier and outcome."""
        lanes = self._lanes.items()
        return Counter({(*lane, one): times[kind] for lane, times in lanes for kind, one in enumerate(_OUTCOMES)})

    def _prune(self, slot: int) -> None:
        for agent in [agent for agent, trace in self._traces.items() if trace.slot <= slot - AGENT_SLOTS]:
            del self._traces[agent]

    def active(self, since: int) -> list[str]:
        """The agents that asked for something in a slot or later."""
        return [agent for agent, trace in self._traces.items() if trace.slot >= since]

    def trace(self, agent: str) -> Trace | None:
        """An agent's traffic, if it had any in the last minutes."""
        return self._traces.get(agent)

    def _hear(self, event: Event) -> None:
        if isinstance(event, Violated):
            self._violated(event.agent)
        elif isinstance(event, AddressChecked):
            self.addresses[event.purpose, event.decision.outcome.value] += 1
        elif isinstance(event, Degraded):
            self.degraded_times += event.degraded
            self._degraded = (self.degraded_for, self._clock.now() if event.degraded else None)

    @property
    def degraded_for(self) -> int:
        """Microseconds that the store was away, in the outage that it may be in included."""
        over, began = self._degraded
        return over if began is None else over + self._clock.now() - began

    def _violated(self, agent: str) -> None:
        self.violations += 1
        minute = self._minute()
        minutes = self._offenders.setdefault(agent, {})
        minutes[minute] = minutes.get(minute, 0) + 1
        if len(minutes) > _MINUTES:
            del minutes[min(minutes)]
        self._offenders.move_to_end(agent)
        if len(self._offenders) > _OFFENDERS:
            self._offenders.popitem(last=False)

    def offenders(self) -> list[Offender]:
        """The agents with violations in the last hour, the worst first."""
        oldest = self._minute() - _MINUTES
        found = []
        for agent, minutes in list(self._offenders.items()):
            count = sum(times for minute, times in minutes.items() if minute > oldest)
            if count:
                found.append(Offender(agent, count))
            else:
                del self._offenders[agent]
        return sorted(found, key=lambda one: (-one.violations, one.agent_id))

    def _minute(self) -> int:
        return self._clock.now() // 60_000_000

    def forget(self, agent: str) -> None:
        """An agent's violations were reset."""
        self._offenders.pop(agent, None)

    def outcomes(self) -> dict[str, int]:
        """Checks of agents by outcome."""
        counts = dict.fromkeys((outcome.value for outcome in Outcome), 0)
        for (_, _, outcome), times in self.checks.items():
            counts[outcome.value] += times
        return counts
