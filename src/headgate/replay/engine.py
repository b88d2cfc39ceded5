"""What a policy says to each request of a log, and what is kept of it.

Every denial is the gate's own: `Gate.check`, on a store whose clock shows the log's time. But most requests of most
logs pass, and that one does can be seen by an addition and a comparison. So a `Lane` keeps, for each agent, the moment
at which its bucket is full again, and asks the gate only where a request isn't sure to pass. It then hands the bucket
over, in the limit's own exact units, and takes it back afterwards. Limits that aren't buckets, agents for whom
something else holds, and a backoff that is enforced are the gate's from the beginning.

What is kept follows the agents that are in use. A full bucket is the same as none. Of agents, the `Accounts` keep a
bounded number.
"""

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from headgate.errors import refuse
from headgate.gate._hot import GateChecks
from headgate.gate.changes import effective
from headgate.gate.lookup import Lookup
from headgate.gate.policy import TIERS, UNKNOWN_TIER, Policy
from headgate.gate.policy import ChannelTier as PolicyLane
from headgate.limits.decision import Decision, Outcome
from headgate.limits.token_bucket import BucketState, TokenBucket
from headgate.stores.memory import MemoryStore

ALLOWED: Final = 0
WARNED: Final = 1
DENIED: Final = 2
EXEMPT: Final = 3
SHADOWED: Final = 4
"""It passes, because its limit is only watched; otherwise it would have been denied."""
OUTCOMES: Final = ("allowed", "warned", "denied", "exempt", "shadowed")

Counts: TypeAlias = list[int]
"""How many of each of the `OUTCOMES`."""
Judges: TypeAlias = "tuple[Lane, ...]"
"""The lanes that a request is judged in: one for each policy."""

MOST_AGENTS: Final = 50_000
"""The agents of which an account is kept."""

_BEYOND: Final = 1 << 200  # later than any moment in any limit's units
_FEW: Final = 1024
_MOST_KINDS: Final = 10_000
_LONG: Final = 100  # characters of an action's name that are worth keeping
_UNKNOWN: Final = 20  # names of unknown actions that are told
_ALERTS: Final = 100  # alerts that are told one by one

_DENY: Final = Outcome.DENY
_WARN: Final = Outcome.WARN
_EXEMPT: Final = Outcome.EXEMPT


class _LogClock:
    """Shows the time of the log."""

    at = 0

    def now(self) -> int:
        return self.at

    def alarm(self, when: int, ring: Callable[[], None]) -> float | None:
        raise NotImplementedError  # nobody waits in a log


class Account:
    """What came of one agent's requests."""

    __slots__ = ("alerts", "counts", "first_denied", "last_denied")

    def __init__(self) -> None:
        self.counts: Final[Counts] = [0] * len(OUTCOMES)
        self.alerts = 0
        self.first_denied = 0
        self.last_denied = 0

    @property
    def trouble(self) -> int:
        """How often it was denied, or would have been."""
        return self.counts[DENIED] + self.counts[SHADOWED]


class Accounts(dict[str, Account]):
    """Accounts of agents, at most `most`.

    When there are more, those with the fewest denials go. So whoever was denied is there, with the exact count of
    denials, as long as no more than half as many agents are denied at all. Beyond that no count is short by more than
    `short_by`.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most: Final = most
        self.complete = True
        """Whether every agent has an account, from its first request on."""
        self.short_by = 0

    def open(self, agent: str) -> Account:
        if len(self) >= self.most:
            self._close_some()
        account = self[agent] = Account()
        return account

    def _close_some(self) -> None:
        self.complete = False
        worst = sorted(self.items(), key=lambda item: item[1].trouble, reverse=True)
        kept = worst[: self.most // 2]
        self.short_by += worst[len(kept)][1].trouble
        self.clear()
        self.update([(agent, account) for agent, account in kept if account.trouble])


class Run:
    """One policy at work. `spared` says who is left out of a channel and tier, as if exempt."""

    def __init__(
        self,
        name: str,
        policy: Policy,
        *,
        spared: Callable[[PolicyLane], frozenset[str]] | None = None,
        most_agents: int = MOST_AGENTS,
    ) -> None:
        self.name: Final = name
        self.policy: Final = policy
        self.accounts: Final = Accounts(most_agents)
        self.alerts: Final[list[tuple[int, str]]] = []
        """When an alert would have been raised, and for whom: the first hundred."""
        self.alert_count = 0
        clock = _LogClock()
        store = MemoryStore(clock=clock)
        plan = Lookup(policy, effective(policy), store)
        gate = GateChecks(store, plan)
        self.lanes: Final = {
            lane: Lane(self, gate, plan, clock, lane, spared(lane) if spared else frozenset()) for lane in policy.limits
        }

    def lane(self, channel: str, tier: str | None, action: str | None) -> "Lane":
        """Where a request is judged: by its tier, or by its action, as the policy classifies it."""
        if channel not in self.policy.channels:
            refuse("channel", f"one of {', '.join(self.policy.channels)}", channel)
        if tier is None:
            tier = self.policy.tier_of(channel, action or "") or UNKNOWN_TIER
        elif tier not in TIERS:
            refuse("tier", f"one of {', '.join(TIERS)}", tier)
        return self.lanes[channel, tier]

    def taken(self) -> Counts:
        """What came of the requests since this was last asked."""
        counts = [0] * len(OUTCOMES)
        for lane in self.lanes.values():
            for outcome, count in enumerate(lane.taken()):
                counts[outcome] += count
        return counts

    def tidy(self, at: int) -> None:
        """Forget the buckets that are full by now, if it is time to."""
        for lane in self.lanes.values():
            lane.tidy(at)

    def note_denial(self, account: Account, agent: str, at: int, alert: bool) -> None:
        if account.counts[DENIED] == 1:
            account.first_denied = at
        account.last_denied = at
        if alert:
            account.alerts += 1
            self.alert_count += 1
            if len(self.alerts) < _ALERTS:
                self.alerts.append((at, agent))


class Lane:
    """A channel and tier under one policy."""

    def __init__(
        self, run: Run, gate: GateChecks, plan: Lookup, clock: _LogClock, lane: PolicyLane, spared: frozenset[str]
    ) -> None:
        self.run: Final = run
        self.accounts: Final = run.accounts
        self.counts: Counts = [0] * len(OUTCOMES)
        """What came of the requests since the last `taken`."""
        self.total: Final[Counts] = [0] * len(OUTCOMES)
        self.alert = False
        """Whether the last denial raised an alert."""
        self.full_at: dict[str, int] = {}
        self.channel, self.tier = lane
        meter = plan.defaults[self.channel][self.tier]
        self.limit: Final = meter.limit
        self._check, self._clock, self._spared = gate.check, clock, spared
        self._special: Final = frozenset([*(agent for agent, _ in plan.own.items()), *spared])
        self._shadow: Final = meter.shadow or bool(plan.policy.shadow_agents)
        self._room = _FEW
        self._buckets = None
        self._unit, self._gain, self._full, self._safe = 1, 0, -1, -1  # nothing is sure to pass
        limit = meter.limit
        # A coarse tick makes credit late, and an enforced backoff denies whatever is in the bucket: the gate knows.
        if isinstance(limit, TokenBucket) and limit.counted()[3] == 1 and not plan.backoff.enforce:
            _, self._unit, self._gain, _, self._full = limit.counted()
            low = 0 if meter.shadow else plan.low  # what is only watched passes without a warning
            self._safe = self._full - -(-self._full * low // 1000)
            self._buckets = meter.buckets
            self.full_at = dict.fromkeys(self._special, _BEYOND)

    def judge(self, agent: str, at: int, cost: int) -> int:
        """What comes of a request, counted. Times never go back."""
        now = at * self._gain
        full_at = self.full_at.get(agent, 0)
        if full_at < now:
            full_at = now
        full_at += cost * self._unit
        if full_at - now <= self._safe:
            outcome = ALLOWED
            self.full_at[agent] = full_at
        elif full_at - now <= self._full:
            outcome = WARNED
            self.full_at[agent] = full_at
        else:
            outcome = self._ask(agent, at, cost)
        self.counts[outcome] += 1
        return outcome

    def _ask(self, agent: str, at: int, cost: int) -> int:
        if agent in self._spared:
            return EXEMPT
        self._clock.at = at
        if self._buckets is None or agent in self._special:
            return self._read(self._check(agent, self.channel, self.tier, cost=cost))
        now = at * self._gain
        spent = max(self.full_at.get(agent, 0) - now, 0)
        bucket = self._buckets.find(agent)
        if isinstance(bucket, BucketState):  # left from an earlier time
            bucket.level, bucket.stamp = self._full - spent, at
        elif spent:
            self._buckets.keep(agent, BucketState(self._full - spent, at))
        outcome = self._read(self._check(agent, self.channel, self.tier, cost=cost))
        bucket = self._buckets.find(agent)
        if isinstance(bucket, BucketState):
            self.full_at[agent] = now + self._full - bucket.level
        return outcome

    def _read(self, decision: Decision) -> int:
        outcome = decision.outcome
        if outcome is _DENY:
            violation = decision.violation
            self.alert = violation is not None and violation.alert
            return DENIED
        if outcome is _WARN:
            return WARNED
        if outcome is _EXEMPT:
            return EXEMPT
        return SHADOWED if self._shadow and decision.would_be is _DENY else ALLOWED

    def taken(self) -> Counts:
        counts, self.counts = self.counts, [0] * len(OUTCOMES)
        for outcome, count in enumerate(counts):
            self.total[outcome] += count
        return counts

    def tidy(self, at: int) -> None:
        if len(self.full_at) > self._room:
            now = at * self._gain
            self.full_at = {agent: full_at for agent, full_at in self.full_at.items() if full_at > now}
            self._room = max(2 * len(self.full_at), _FEW)


class Kinds:
    """Which lanes a request is judged in, by its channel and its tier or action."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs: Final = runs
        self._found: Final[dict[tuple[str, str | None, str | None], Judges]] = {}
        self.unknown: Final[dict[str, None]] = {}
        """Actions that the first policy doesn't classify; the first few."""

    def find(self, channel: str, tier: str | None, action: str | None) -> Judges:
        """The lanes, one for each policy; `InvalidInput` if there are none."""
        found = self._found.get((channel, tier, action))
        if found is None:
            found = tuple([run.lane(channel, tier, action) for run in self._runs])
            unknown = action is not None and self._runs[0].policy.tier_of(channel, action) is None
            if action is not None and unknown and len(self.unknown) < _UNKNOWN:
                self.unknown[action[:_LONG]] = None
            if len(self._found) < _MOST_KINDS and len(action or "") <= _LONG:
                self._found[channel, tier, action] = found
        return found

    def knows(self, channel: str, action: str) -> bool:
        """Whether one of the policies classifies an action."""
        return any([run.policy.tier_of(channel, action) is not None for run in self._runs])
