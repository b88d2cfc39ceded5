"""The report of a replay. `asdict` makes the JSON document of it; the summary and the HTML page are made from it too.

Times are ISO 8601 in UTC. Where two policies are compared, the first one is "before" and the second one "after".
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import nsmallest
from typing import Final, NamedTuple

from headgate.gate.policy import Policy
from headgate.limits.units import amount_text
from headgate.replay.engine import DENIED, AgentStats, Counts, PolicyReplay
from headgate.replay.formats import MalformedLine
from headgate.replay.options import LogOptions
from headgate.replay.player import LogSet, OnProgress, Player
from headgate.replay.suggest import HIGHEST, Suggestion, suggest
from headgate.replay.timestamps import format_timestamp

_MOST_SPENT: Final = 1000  # amounts in the report


@dataclass(frozen=True)
class OutcomeCounts:
    """Requests by outcome, in the order of `OUTCOMES`. Each counts once: `requests` is the sum of the others."""

    requests: int
    allowed: int
    warned: int
    denied: int
    exempt: int
    shadowed: int

    @classmethod
    def of(cls, counts: Counts) -> "OutcomeCounts":
        return cls(sum(counts), *counts)

    def denied_share(self) -> str:
        """The denied requests as a percentage of all."""
        return f"{self.denied / self.requests if self.requests else 0.0:.2%}"


@dataclass(frozen=True)
class TierReport:
    """A channel and tier, its limit, and the outcomes of its requests."""

    channel: str
    tier: str
    limit: str
    outcomes: OutcomeCounts


@dataclass(frozen=True)
class AgentReport:
    """An agent with denials, including those of shadow mode."""

    agent: str
    outcomes: OutcomeCounts
    alerts: int
    first_denied: str | None
    last_denied: str | None


@dataclass(frozen=True)
class IntervalReport:
    """An interval of the timeline."""

    start: str
    outcomes: OutcomeCounts


@dataclass(frozen=True)
class AlertReport:
    """An alert that would have been raised."""

    time: str
    agent: str


@dataclass(frozen=True)
class AccountDenials:
    """Holds that a limit of an account would have denied, those of shadow mode included."""

    account: str
    """A path. That of a session ends in `*`, which stands for all sessions of the agent."""
    resource: str
    tool: str
    denied: int


@dataclass(frozen=True)
class AccountSpent:
    """The spending that an account would have had."""

    account: str
    """"" for agents without an account."""
    resource: str
    amount: str


@dataclass(frozen=True)
class AccountsReport:
    """The holds of lines with costs under one policy."""

    holds: int
    granted: int
    denied: int
    exempt: int
    shadowed: int
    denials: list[AccountDenials]
    """The worst limits."""
    limits_denied: int
    """How many limits have denied something."""
    refused: dict[str, int]
    """Holds that the policy can't count, by reason."""
    spent_from: str
    """The first day that is counted in `spent`."""
    spent: list[AccountSpent]
    accounts: int
    """How many accounts have spent something; `spent` has the first thousand amounts."""


@dataclass(frozen=True)
class PolicyReport:
    """The outcomes of all requests under one policy."""

    policy: str
    outcomes: OutcomeCounts
    tiers: list[TierReport]
    agents_denied: int
    """Agents with denials, including those of shadow mode."""
    agents_short_by: int
    """By how much the numbers of denials in `worst` may be short; 0 if they are exact."""
    worst: list[AgentReport]
    timeline: list[IntervalReport]
    alerts: int
    first_alerts: list[AlertReport]
    accounts: AccountsReport | None
    """None for a policy without accounts, or a log without costs."""


@dataclass(frozen=True)
class AgentChange:
    """An agent's denials under the first policy and under the second."""

    agent: str
    before: int
    after: int


class TierChange(NamedTuple):
    """A channel and tier under the first policy and under the second; None where it has no requests."""

    channel: str
    tier: str
    before: TierReport | None
    after: TierReport | None

    def limits(self, absent: str) -> list[str]:
        return [absent if one is None else one.limit for one in (self.before, self.after)]

    def denied(self) -> list[int]:
        return [0 if one is None else one.outcomes.denied for one in (self.before, self.after)]


@dataclass(frozen=True)
class PolicyDifference:
    """The agents that only one of two policies denies."""

    newly_denied: int
    no_longer_denied: int
    worst_newly_denied: list[AgentChange]
    worst_no_longer_denied: list[AgentChange]


@dataclass(frozen=True)
class LogReport:
    """A log, and how much of it was used."""

    name: str
    format: str
    lines: int
    used: int
    damage: str


@dataclass(frozen=True)
class LineCounts:
    """Lines by use. `read` is the sum of `used`, `blank`, `skipped`, `malformed` and CSV headers."""

    read: int
    used: int
    blank: int
    skipped: int
    malformed: int
    late: int
    late_by: float
    """The longest delay of a late line, in seconds."""


@dataclass(frozen=True)
class Report:
    """The results of a replay."""

    logs: list[LogReport]
    lines: LineCounts
    reasons: dict[str, int]
    first_malformed: list[MalformedLine]
    first: str
    last: str
    seconds: float
    agents: int
    agents_complete: bool
    """Whether `agents` counts all agents, and `worst` all requests of each."""
    unknown_actions: list[str]
    interval: float
    """Seconds per interval of the timeline."""
    policies: list[PolicyReport]
    difference: PolicyDifference | None
    share: float | None
    """The share of requests that suggested limits may deny."""
    suggestions: list[Suggestion] | None

    def tier_changes(self) -> list[TierChange]:
        """The tiers under two policies, side by side."""
        old, new = [{(one.channel, one.tier): one for one in policy.tiers} for policy in self.policies]
        return [TierChange(*place, old.get(place), new.get(place)) for place in old | new]

    def hold_changes(self) -> tuple[int, int] | None:
        """How many holds each of two policies denies; None where none were made."""
        found = [one.accounts for one in self.policies]
        if not any(found):
            return None
        before, after = [0 if one is None else one.denied for one in found]
        return before, after

    def toml(self) -> str:
        """The suggested limits, in the form of a policy file."""
        lines = [f"# Denies at most {(self.share or 0) * 100:.6g}% of the requests of each tier.", "[limits]"]
        for one in self.suggestions or ():
            if one.limit is None:
                lines.append(f"# {one.tier}: no limit up to {HIGHEST:,}/minute is high enough")
                continue
            comment = f"denies {one.denied:,} of {one.requests:,} requests"
            if one.denied_one_less is not None:
                comment += f"; one less a minute would deny {one.denied_one_less:,}"
            if not one.lowest:
                comment += "; costs differ, so a lower limit may do by chance"
            lines.append(f'{one.tier} = "{one.limit}/minute"  # {comment}')
        return "\n".join(lines) + "\n"


def replay(
    logs: Sequence[str],
    policies: Mapping[str, Policy],
    options: LogOptions | None = None,
    *,
    share: Fraction | None = None,
    worst: int = 10,
    on_progress: OnProgress | None = None,
) -> Report:
    """Replay logs under a policy, or under two to compare them.

    `logs` are paths, or "-" for standard input; `policies` are given by name. With a `share`, the report suggests
    limits that deny at most this share of requests under the first policy. `worst` is the maximum length of each
    list of agents.
    """
    with LogSet(logs, options or LogOptions(), again=share is not None) as found:
        player = Player(found, [PolicyReplay(name, policy) for name, policy in policies.items()], on_progress)
        suggestions = None if share is None else suggest(found, player.policies[0].policy, share, on_progress)
    return _report(player, worst, share, suggestions)


def _report(player: Player, worst: int, share: Fraction | None, suggestions: list[Suggestion] | None) -> Report:
    unused, agents = player.unused, player.policies[0].agents
    logs = [
        LogReport(log.file.name, log.parser.format, log.parser.count, log.used, log.file.damage) for log in player.logs
    ]  # fmt: skip
    lines = LineCounts(
        read=sum([log.lines for log in logs]),
        used=sum([log.used for log in logs]),
        blank=unused.blank,
        skipped=unused.skipped,
        malformed=unused.malformed,
        late=player.late,
        late_by=player.late_by / 1_000_000,
    )
    return Report(
        logs=logs,
        lines=lines,
        reasons=dict(unused.reasons.most_common()),
        first_malformed=unused.first,
        first=format_timestamp(player.first),
        last=format_timestamp(player.now),
        seconds=(player.now - player.first) / 1_000_000,
        agents=len(agents),
        agents_complete=agents.complete,
        unknown_actions=list(player.classifier.unknown_actions),
        interval=player.timeline.width / 1_000_000,
        policies=[_policy_report(player, number, worst) for number in range(len(player.policies))],
        difference=_difference(player.policies, worst) if len(player.policies) == 2 else None,
        share=None if share is None else float(share),
        suggestions=suggestions,
    )


def _policy_report(player: Player, number: int, worst: int) -> PolicyReport:
    policy = player.policies[number]
    tiers = [
        TierReport(tier.channel, tier.tier, str(tier.limit), OutcomeCounts.of(tier.total))
        for tier in policy.tiers.values()
        if any(tier.total)
    ]
    denied = [(agent, stats) for agent, stats in policy.agents.items() if stats.denials]
    first = nsmallest(worst, denied, key=lambda one: (-one[1].counts[DENIED], -one[1].denials, one[0]))
    return PolicyReport(
        policy=policy.name,
        outcomes=OutcomeCounts.of(
            [sum(counts) for counts in zip(*[tier.total for tier in policy.tiers.values()], strict=True)]
        ),
        tiers=tiers,
        agents_denied=len(denied),
        agents_short_by=policy.agents.short_by,
        worst=[_agent_report(agent, stats) for agent, stats in first],
        timeline=[
            IntervalReport(format_timestamp(one.start), OutcomeCounts.of(one.counts[number]))
            for one in player.timeline.intervals()
        ],
        alerts=policy.alert_count,
        first_alerts=[AlertReport(format_timestamp(at), agent) for at, agent in policy.alerts],
        accounts=_accounts_report(policy, player.first, worst),
    )


def _accounts_report(policy: PolicyReplay, first: int, worst: int) -> AccountsReport | None:
    found = policy.accounts
    holds = 0 if found is None else found.granted + found.denied + found.exempt + found.shadowed
    if found is None or not (holds or found.refused):
        return None
    denials = nsmallest(worst, found.denials.items(), key=lambda one: (-one[1], one[0]))
    kept, spent = found.spent()
    begun = format_timestamp(first)[:10]
    amounts = [AccountSpent(*key, amount_text(amount)) for key, amount in spent.items()]
    return AccountsReport(
        holds=holds,
        granted=found.granted,
        denied=found.denied,
        exempt=found.exempt,
        shadowed=found.shadowed,
        denials=[AccountDenials(*bound, count) for bound, count in denials],
        limits_denied=len(found.denials),
        refused=dict(found.refused),
        spent_from=max(kept.isoformat(), begun),
        spent=amounts[:_MOST_SPENT],
        accounts=len({account for account, _ in spent}),
    )


def _agent_report(agent: str, stats: AgentStats) -> AgentReport:
    denied = stats.counts[DENIED] > 0
    return AgentReport(
        agent,
        OutcomeCounts.of(stats.counts),
        stats.alerts,
        format_timestamp(stats.first_denied) if denied else None,
        format_timestamp(stats.last_denied) if denied else None,
    )


def _difference(policies: Sequence[PolicyReplay], worst: int) -> PolicyDifference:
    before, after = [{agent: one.counts[DENIED] for agent, one in policy.agents.items()} for policy in policies]
    newly = [AgentChange(agent, 0, count) for agent, count in after.items() if count and not before.get(agent)]
    no_longer = [AgentChange(agent, count, 0) for agent, count in before.items() if count and not after.get(agent)]
    return PolicyDifference(len(newly), len(no_longer), _most(newly, worst), _most(no_longer, worst))


def _most(changed: Iterable[AgentChange], worst: int) -> list[AgentChange]:
    return nsmallest(worst, changed, key=lambda one: (-(one.before + one.after), one.agent))
