"""What came of a replay, as one value: `asdict` of it is the JSON document, and the other reports are made from it.

Times are ISO 8601 in UTC. Where two policies were compared, the first is the one that was, the second the other.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import nsmallest

from headgate.gate.policy import Policy
from headgate.replay.engine import ALLOWED, DENIED, EXEMPT, SHADOWED, WARNED, Account, Counts, Run
from headgate.replay.options import Reading
from headgate.replay.player import Play, Progress, Tape
from headgate.replay.suggest import HIGHEST, Suggestion, suggest
from headgate.replay.timestamps import text_of


@dataclass(frozen=True)
class Outcomes:
    """What came of some requests. Each is counted once: `requests` is the sum of the others."""

    requests: int
    allowed: int
    warned: int
    denied: int
    exempt: int
    shadowed: int

    @classmethod
    def of(cls, counts: Counts) -> "Outcomes":
        return cls(
            sum(counts), counts[ALLOWED], counts[WARNED], counts[DENIED], counts[EXEMPT], counts[SHADOWED]
        )  # fmt: skip

    def share(self, count: int) -> float:
        """A count as a share of the requests."""
        return count / self.requests if self.requests else 0.0


@dataclass(frozen=True)
class OfTier:
    """A channel and tier, its limit, and what came of its requests."""

    channel: str
    tier: str
    limit: str
    outcomes: Outcomes


@dataclass(frozen=True)
class OfAgent:
    """An agent that was denied, or would have been."""

    agent: str
    outcomes: Outcomes
    alerts: int
    first_denied: str | None
    last_denied: str | None


@dataclass(frozen=True)
class OfInterval:
    """An interval of the timeline."""

    start: str
    outcomes: Outcomes


@dataclass(frozen=True)
class Alert:
    """An alert that would have been raised."""

    time: str
    agent: str


@dataclass(frozen=True)
class OfPolicy:
    """What came of all requests under one policy."""

    policy: str
    outcomes: Outcomes
    tiers: list[OfTier]
    agents_denied: int
    """Agents that were denied, or would have been."""
    agents_short_by: int
    """0: the counts of denials in `worst` are exact. Otherwise they may be short by so many."""
    worst: list[OfAgent]
    timeline: list[OfInterval]
    alerts: int
    first_alerts: list[Alert]


@dataclass(frozen=True)
class Changed:
    """An agent's denials under the first policy and under the second."""

    agent: str
    before: int
    after: int


@dataclass(frozen=True)
class Difference:
    """Who is denied under one of two policies only."""

    newly_denied: int
    no_longer_denied: int
    worst_newly_denied: list[Changed]
    worst_no_longer_denied: list[Changed]


@dataclass(frozen=True)
class OfLog:
    """A log, and how much of it could be used."""

    name: str
    format: str
    lines: int
    used: int
    damage: str


@dataclass(frozen=True)
class Malformed:
    """A line that couldn't be used."""

    log: str
    line: int
    reason: str
    text: str


@dataclass(frozen=True)
class Lines:
    """What became of all lines. `read` is the sum of `used`, `blank`, `skipped`, `malformed` and headers of CSV."""

    read: int
    used: int
    blank: int
    skipped: int
    malformed: int
    late: int
    late_by: float
    """Seconds: the most that a line's time was behind that of a line before it."""


@dataclass(frozen=True)
class Report:
    """What came of a replay."""

    logs: list[OfLog]
    lines: Lines
    reasons: dict[str, int]
    first_malformed: list[Malformed]
    first: str
    last: str
    seconds: float
    agents: int
    agents_complete: bool
    """Whether all agents are counted in `agents`, and each with all of its requests in `worst`."""
    unknown_actions: list[str]
    interval: float
    """Seconds of an interval of the timeline."""
    policies: list[OfPolicy]
    difference: Difference | None
    share: float | None
    """The share of requests that the suggestions may deny."""
    suggestions: list[Suggestion] | None

    def toml(self) -> str:
        """The suggested limits, as a piece of a policy."""
        lines = [f"# Denies at most {(self.share or 0) * 100:.6g}% of the requests of each tier.", "[limits]"]
        for one in self.suggestions or ():
            if one.limit is None:
                lines.append(f"# {one.tier}: no limit up to {HIGHEST:,}/minute would do")
                continue
            said = f"denies {one.denied:,} of {one.requests:,} requests"
            if one.denied_one_less is not None:
                said += f"; one less a minute would deny {one.denied_one_less:,}"
            if not one.lowest:
                said += "; costs differ, so that a lower one may do by chance"
            lines.append(f'{one.tier} = "{one.limit}/minute"  # {said}')
        return "\n".join(lines) + "\n"


def replay(
    logs: Sequence[str],
    policies: Mapping[str, Policy],
    reading: Reading | None = None,
    *,
    share: Fraction | None = None,
    worst: int = 10,
    progress: Progress | None = None,
) -> Report:
    """Play logs through a policy, or through two to compare them, and report what came of it.

    `logs` are paths, or "-" for standard input; `policies` have names. With a `share`, limits are suggested that would
    have denied no more than it under the first policy. `worst` is how many agents each list has at the most.
    """
    with Tape(logs, reading or Reading(), again=share is not None) as tape:
        play = Play(tape, [Run(name, policy) for name, policy in policies.items()], progress)
        suggestions = None if share is None else suggest(tape, play.runs[0].policy, share, progress)
    return _report(play, worst, share, suggestions)


def _report(play: Play, worst: int, share: Fraction | None, suggestions: list[Suggestion] | None) -> Report:
    unused, accounts = play.unused, play.runs[0].accounts
    logs = [
        OfLog(one.log.name, one.parser.format, one.parser.count, one.used, one.log.damage) for one in play.sources
    ]  # fmt: skip
    lines = Lines(
        read=sum([log.lines for log in logs]),
        used=sum([log.used for log in logs]),
        blank=unused.blank,
        skipped=unused.skipped,
        malformed=unused.malformed,
        late=play.late,
        late_by=play.late_by / 1_000_000,
    )
    return Report(
        logs=logs,
        lines=lines,
        reasons=dict(unused.reasons.most_common()),
        first_malformed=[Malformed(*one) for one in unused.first],
        first=text_of(play.first),
        last=text_of(play.now),
        seconds=(play.now - play.first) / 1_000_000,
        agents=len(accounts),
        agents_complete=accounts.complete,
        unknown_actions=list(play.kinds.unknown),
        interval=play.timeline.width / 1_000_000,
        policies=[_of_policy(play, number, worst) for number in range(len(play.runs))],
        difference=_difference(play.runs, worst) if len(play.runs) == 2 else None,
        share=None if share is None else float(share),
        suggestions=suggestions,
    )


def _of_policy(play: Play, number: int, worst: int) -> OfPolicy:
    run = play.runs[number]
    tiers = [
        OfTier(lane.channel, lane.tier, str(lane.limit), Outcomes.of(lane.total))
        for lane in run.lanes.values()
        if any(lane.total)
    ]
    troubled = [(agent, account) for agent, account in run.accounts.items() if account.trouble]
    first = nsmallest(worst, troubled, key=lambda one: (-one[1].counts[DENIED], -one[1].trouble, one[0]))
    return OfPolicy(
        policy=run.name,
        outcomes=Outcomes.of(
            [sum(counts) for counts in zip(*[lane.total for lane in run.lanes.values()], strict=True)]
        ),
        tiers=tiers,
        agents_denied=len(troubled),
        agents_short_by=run.accounts.short_by,
        worst=[_of_agent(agent, account) for agent, account in first],
        timeline=[OfInterval(text_of(one.start), Outcomes.of(one.counts[number])) for one in play.timeline.intervals()],
        alerts=run.alert_count,
        first_alerts=[Alert(text_of(at), agent) for at, agent in run.alerts],
    )


def _of_agent(agent: str, account: Account) -> OfAgent:
    denied = account.counts[DENIED] > 0
    return OfAgent(
        agent,
        Outcomes.of(account.counts),
        account.alerts,
        text_of(account.first_denied) if denied else None,
        text_of(account.last_denied) if denied else None,
    )


def _difference(runs: Sequence[Run], worst: int) -> Difference:
    before, after = [{agent: one.counts[DENIED] for agent, one in run.accounts.items()} for run in runs]
    newly = [Changed(agent, 0, count) for agent, count in after.items() if count and not before.get(agent)]
    no_longer = [Changed(agent, count, 0) for agent, count in before.items() if count and not after.get(agent)]
    return Difference(len(newly), len(no_longer), _most(newly, worst), _most(no_longer, worst))


def _most(changed: Iterable[Changed], worst: int) -> list[Changed]:
    return nsmallest(worst, changed, key=lambda one: (-(one.before + one.after), one.agent))
