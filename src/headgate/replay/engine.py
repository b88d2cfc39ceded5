"""The engine of a replay: decides each request of a log under a policy, and counts the outcomes.

The decisions are those of `Gate.check`, on a store whose clock shows the log's time. Asking the gate costs more than
parsing the line, so an ordinary token bucket is counted here: `TierReplay` keeps, for each agent, the moment at which
its bucket is full again. The gate decides the rest: other limits, agents with limits or exemptions of their own, and
an enforced backoff. docs/decisions/0012-replay.md has the figures; a property test compares every decision.

Memory follows the active agents: full buckets are dropped, and `AgentTable` is bounded.
"""

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from headgate.errors import refuse
from headgate.gate._hot import GateChecks
from headgate.gate.effective import effective
from headgate.gate.lookup import AGENTS, Lookup
from headgate.gate.policy import UNKNOWN_TIER, ChannelTier, Policy
from headgate.limits.decision import Decision, Outcome
from headgate.limits.token_bucket import TokenBucket
from headgate.replay.accounts import AccountReplay, LoggedHold, has_accounts
from headgate.stores.base import Offence
from headgate.stores.memory import MemoryStore

ALLOWED: Final = 0
WARNED: Final = 1
DENIED: Final = 2
EXEMPT: Final = 3
SHADOWED: Final = 4
"""Allowed because the limit is in shadow mode; otherwise denied."""
OUTCOMES: Final = ("allowed", "warned", "denied", "exempt", "shadowed")

Counts: TypeAlias = list[int]
"""A count for each of the `OUTCOMES`."""
TierReplays: TypeAlias = "tuple[TierReplay, ...]"
"""The tier of a request, under each policy."""

MOST_AGENTS: Final = 50_000
"""Agents in an `AgentTable`."""

_ASK_GATE: Final = 1 << 200  # later than any moment, in any limit's units: the bucket of an agent the gate decides for
_MIN_BUCKETS: Final = 1024  # below this number, full buckets are not worth looking for
_MAX_CLASSIFIED: Final = 10_000
_MAX_ACTION: Final = 100  # characters of an action's name
_MAX_UNKNOWN: Final = 20  # unknown actions in the report
_MAX_ALERTS: Final = 100  # alerts in the report

_DENY: Final = Outcome.DENY
_PASSED: Final = {Outcome.ALLOW: ALLOWED, Outcome.WARN: WARNED, Outcome.EXEMPT: EXEMPT}


def add_counts(total: Counts, more: Counts) -> None:
    for outcome, count in enumerate(more):
        total[outcome] += count


class _LogClock:
    """A clock that shows the time of the log."""

    time = 0

    def now(self) -> int:
        return self.time

    def alarm(self, when: int, ring: Callable[[], None]) -> float | None:
        raise NotImplementedError("a replay never waits")

    def wall(self) -> float:
        return self.time / 1_000_000


class AgentStats:
    """The outcomes of one agent's requests."""

    __slots__ = ("alerts", "counts", "first_denied", "last_denied")

    def __init__(self) -> None:
        self.counts: Final[Counts] = [0] * len(OUTCOMES)
        self.alerts = 0
        self.first_denied = 0
        self.last_denied = 0

    @property
    def denials(self) -> int:
        """Denials, including those of shadow mode."""
        return self.counts[DENIED] + self.counts[SHADOWED]


class AgentTable(dict[str, AgentStats]):
    """The statistics of at most `most` agents.

    When the table is full, the agents with the fewest denials are evicted. So every denied agent is listed, with the
    exact number of denials, as long as at most half as many agents are denied at all. Beyond that, each number is
    short by at most `short_by`.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most: Final = most
        self.complete = True
        """Whether no agent was ever evicted."""
        self.short_by = 0

    def add(self, agent: str) -> AgentStats:
        if len(self) >= self.most:
            self._evict()
        stats = self[agent] = AgentStats()
        return stats

    def _evict(self) -> None:
        self.complete = False
        worst = sorted(self.items(), key=lambda item: item[1].denials, reverse=True)
        kept = worst[: self.most // 2]
        self.short_by += worst[len(kept)][1].denials
        self.clear()
        self.update([(agent, stats) for agent, stats in kept if stats.denials])


class PolicyReplay:
    """A replay under one policy. `left_out` names the agents to leave out of a channel and tier, as if exempt."""

    def __init__(
        self,
        name: str,
        policy: Policy,
        *,
        left_out: Callable[[ChannelTier], frozenset[str]] | None = None,
        most_agents: int = MOST_AGENTS,
    ) -> None:
        self.name: Final = name
        self.policy: Final = policy
        self.agents: Final = AgentTable(most_agents)
        self.alerts: Final[list[tuple[int, str]]] = []
        """Time and agent of the first hundred alerts."""
        self.alert_count = 0
        self.clock: Final = _LogClock()
        self.store: Final = MemoryStore(clock=self.clock)
        self.lookup: Final = Lookup(policy, effective(policy), self.store)
        self.gate: Final = GateChecks(self.store, self.lookup)
        self.accounts: Final = AccountReplay(policy, self.store) if has_accounts(policy) else None
        """The holds of lines with costs; None for a policy without accounts."""
        self.tiers: Final = {
            place: TierReplay(self, *place, left_out(place) if left_out else frozenset()) for place in policy.limits
        }

    def tier(self, channel: str, tier: str | None, action: str | None) -> "TierReplay":
        """Find a request's tier, given by name or as the policy classifies its action."""
        if channel not in self.policy.channels:
            refuse("channel", f"one of {', '.join(self.policy.channels)}", channel)
        if tier is None:
            tier = self.policy.tier_of(channel, action or "") or UNKNOWN_TIER
        elif tier not in self.policy.tiers:
            refuse("tier", f"one of {', '.join(self.policy.tiers)}", tier)
        return self.tiers[channel, tier]

    def take_counts(self) -> Counts:
        """The outcomes since the last call."""
        counts = [0] * len(OUTCOMES)
        for tier in self.tiers.values():
            add_counts(counts, tier.take_counts())
        return counts

    def drop_full(self, at: int) -> None:
        """Drop the buckets that are full by now, if there are many."""
        for tier in self.tiers.values():
            tier.drop_full(at)

    def record_denial(self, stats: AgentStats, agent: str, at: int, alert: bool) -> None:
        if stats.counts[DENIED] == 1:
            stats.first_denied = at
        stats.last_denied = at
        if alert:
            self._record_alert(stats, agent, at)

    def hold(self, stats: AgentStats, agent: str, at: int, hold: LoggedHold) -> None:
        """Hold and settle what a line costs."""
        if self.accounts is not None:
            self.clock.time = at
            violation = self.accounts.hold(agent, hold)
            if violation is not None and violation.alert:
                self._record_alert(stats, agent, at)

    def _record_alert(self, stats: AgentStats, agent: str, at: int) -> None:
        stats.alerts += 1
        self.alert_count += 1
        if len(self.alerts) < _MAX_ALERTS:
            self.alerts.append((at, agent))


class TierReplay:
    """One channel and tier under one policy."""

    def __init__(self, policy: PolicyReplay, channel: str, tier: str, left_out: frozenset[str]) -> None:
        self.policy: Final = policy
        self.agents: Final = policy.agents
        self.channel: Final = channel
        self.tier: Final = tier
        self.counts: Counts = [0] * len(OUTCOMES)
        """The outcomes since the last `take_counts`."""
        self.total: Final[Counts] = [0] * len(OUTCOMES)
        self.alert = False
        """Whether the last denial raised an alert."""
        self.full_at: dict[str, int] = {}
        lookup = policy.lookup
        default = lookup.defaults[channel][tier]
        self.limit: Final = default.limit
        self._shadow: Final = default.shadow
        self._left_out: Final = left_out
        self._by_gate: Final = frozenset([*[agent for agent, _ in lookup.own.items()], *left_out])
        self._counted_here = False
        self._unit, self._gain, self._full, self._ample = 1, 0, -1, -1  # no request is sure to pass
        self._max_buckets = _MIN_BUCKETS
        # A coarse tick makes credit late, and an enforced backoff denies despite credit: left to the gate.
        if isinstance(self.limit, TokenBucket) and self.limit.integers()[3] == 1 and not lookup.backoff.enforce:
            self._counted_here = True
            _, self._unit, self._gain, _, self._full = self.limit.integers()
            low = 0 if self._shadow else lookup.low  # shadow mode gives no warnings
            self._ample = self._full * (1000 - low) // 1000
            self.full_at = dict.fromkeys(self._by_gate, _ASK_GATE)

    def decide(self, agent: str, at: int, cost: int) -> int:
        """Decide a request and count its outcome. Times never go back."""
        now = at * self._gain
        full_at = self.full_at.get(agent, 0)
        if full_at < now:
            full_at = now
        full_at += cost * self._unit
        if full_at - now <= self._ample:
            outcome = ALLOWED
            self.full_at[agent] = full_at
        elif full_at - now <= self._full:
            outcome = WARNED
            self.full_at[agent] = full_at
        elif not self._counted_here or agent in self._by_gate:
            outcome = self._ask_gate(agent, at, cost)
        elif self._shadow:
            outcome = SHADOWED
        else:
            outcome = DENIED
            self._record_violation(agent, at)
        self.counts[outcome] += 1
        return outcome

    def _record_violation(self, agent: str, at: int) -> None:
        policy = self.policy
        policy.clock.time = at
        self.alert = policy.store.record_violation(Offence(AGENTS, agent, policy.lookup.backoff)).alert

    def _ask_gate(self, agent: str, at: int, cost: int) -> int:
        if agent in self._left_out:
            return EXEMPT
        self.policy.clock.time = at
        decision: Decision = self.policy.gate.check(agent, self.channel, self.tier, cost=cost)
        if decision.would_be is _DENY:
            return SHADOWED
        if decision.outcome is _DENY:
            self.alert = decision.violation is not None and decision.violation.alert
            return DENIED
        return _PASSED[decision.outcome]

    def take_counts(self) -> Counts:
        counts, self.counts = self.counts, [0] * len(OUTCOMES)
        add_counts(self.total, counts)
        return counts

    def drop_full(self, at: int) -> None:
        if len(self.full_at) > self._max_buckets:
            now = at * self._gain
            self.full_at = {agent: full_at for agent, full_at in self.full_at.items() if full_at > now}
            self._max_buckets = max(2 * len(self.full_at), _MIN_BUCKETS)


class Classifier:
    """Finds the tier of a request under each policy, by its channel and its tier or action."""

    def __init__(self, policies: Sequence[PolicyReplay]) -> None:
        self._policies: Final = policies
        self._tiers: Final = {tier for policy in policies for tier in policy.policy.tiers}
        self._cache: Final[dict[tuple[str, str | None, str | None], TierReplays]] = {}
        self.unknown_actions: Final[dict[str, None]] = {}
        """The first few actions that the first policy doesn't classify."""

    def classify(self, channel: str, tier: str | None, action: str | None) -> TierReplays:
        """The tier under each policy; `InvalidInput` for an unknown channel or tier."""
        found = self._cache.get((channel, tier, action))
        if found is None:
            found = tuple([policy.tier(channel, tier, action) for policy in self._policies])
            unknown = action is not None and self._policies[0].policy.tier_of(channel, action) is None
            if action is not None and unknown and len(self.unknown_actions) < _MAX_UNKNOWN:
                self.unknown_actions[action[:_MAX_ACTION]] = None
            if len(self._cache) < _MAX_CLASSIFIED and len(action or "") <= _MAX_ACTION:
                self._cache[channel, tier, action] = found
        return found

    def tier_or_action(self, kind: str) -> tuple[str | None, str | None]:
        """A name as a tier, if any policy has such a tier, or as an action."""
        return (kind, None) if kind in self._tiers else (None, kind)

    def knows(self, channel: str, action: str) -> bool:
        """Whether any policy classifies an action."""
        return any([policy.policy.tier_of(channel, action) is not None for policy in self._policies])
