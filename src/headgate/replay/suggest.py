"""The lowest limits that would have denied next to nothing.

For each tier the search looks for a whole number n such that a limit of n a minute, with a burst of n, denies no more
than the given share of the tier's requests, while n - 1 a minute denies more. Both are found by judging the whole log
by them. Where every request costs 1, n is the lowest such number: of requests that cost the same a bucket lets as many
pass as its limit can let pass at all, up to any moment (to let one pass when it can never costs more than one later),
and what conforms to a limit conforms to a higher one; so a higher limit never denies more. Where costs differ it can: a
large request that passes leaves less for small ones. There n is right, and so is n - 1, but a number below both may be
right by chance.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from headgate.gate.policy import TIERS, ChannelTier, Policy
from headgate.replay.engine import DENIED, EXEMPT, Judges, Kinds, Run
from headgate.replay.formats import Unused
from headgate.replay.player import Progress, Tape

_AT_ONCE: Final = 4  # limits that one pass over the log tries for each tier
_GROWTH: Final = 8
HIGHEST: Final = _GROWTH**9
"""Requests a minute: no higher limit is looked for."""


@dataclass(frozen=True)
class Suggestion:
    """A limit for a tier, and how it does."""

    tier: str
    limit: int | None
    """So many a minute, and at once; None if none up to `HIGHEST` would do."""
    requests: int
    """Those that the limit is for: not those of agents that are exempt or have a limit of their own."""
    denied: int
    denied_one_less: int | None
    """How many a limit of one less a minute would deny; None if the limit is 1."""
    lowest: bool
    """Whether no lower limit would do: certain if every request costs the same."""


class _Search:
    """The search for one tier's limit."""

    def __init__(self, share: Fraction) -> None:
        self._share: Final = share
        self._low = 0  # denies too much
        self._high = 0  # doesn't; 0 as long as none is known
        self._denied: Final[dict[int, int]] = {}
        self.requests = 0
        self.costs: Final[set[int]] = set()
        self.tries = self._next()

    def _next(self) -> list[int]:
        if not self._high:
            known = max(self._low, 1)
            return [n for n in [known * _GROWTH**power for power in range(1, _AT_ONCE + 1)] if n <= HIGHEST]
        gap = self._high - self._low
        return sorted({self._low + gap * part // (_AT_ONCE + 1) for part in range(1, _AT_ONCE + 1)} - {self._low})

    def learn(self, denied: dict[int, int], requests: int) -> None:
        """Take in how many requests each of the limits that were tried denies."""
        self._denied.update(denied)
        self.requests = requests
        for limit in self.tries:
            if denied[limit] <= self._share * requests:
                self._high = limit
                break
            self._low = limit
        self.tries = self._next() if requests else []

    def found(self, tier: str) -> Suggestion:
        limit = self._high or None
        return Suggestion(
            tier=tier,
            limit=limit,
            requests=self.requests,
            denied=self._denied[limit or self._low],
            denied_one_less=self._denied.get(self._low) if limit else None,
            lowest=len(self.costs) == 1,
        )


class _Trials(Kinds):
    """Judges each request by the limits that are tried for its tier."""

    def __init__(self, policy: Policy, tries: Mapping[str, list[int]]) -> None:
        super().__init__([Run("", policy)])
        self.runs: Final = {tier: [_trial(policy, limit) for limit in limits] for tier, limits in tries.items()}
        self._trials: Final = {
            lane: tuple([run.lanes[lane] for run in self.runs[lane[1]]]) for lane in policy.limits
        }  # fmt: skip

    def find(self, channel: str, tier: str | None, action: str | None) -> Judges:
        (lane,) = super().find(channel, tier, action)
        return self._trials[lane.channel, lane.tier]


def suggest(tape: Tape, policy: Policy, share: Fraction, progress: Progress | None = None) -> list[Suggestion]:
    """A limit for each tier that has requests, by as many passes over the logs as it takes.

    Each limit is judged by itself: no backoff is enforced, and nothing is only watched. Agents that are exempt, or have
    a limit of their own for that channel and tier, are left out: the limit isn't theirs.
    """
    searches = {tier: _Search(share) for tier in TIERS}
    while any([search.tries for search in searches.values()]):
        trials = _Trials(policy, {tier: search.tries for tier, search in searches.items()})
        _judge(tape, trials, {tier: search.costs for tier, search in searches.items()}, progress)
        for tier, search in searches.items():
            if search.tries:
                totals = [run.taken() for run in trials.runs[tier]]
                denied = [total[DENIED] for total in totals]
                search.learn(dict(zip(search.tries, denied, strict=True)), sum(totals[0]) - totals[0][EXEMPT])
    return [search.found(tier) for tier, search in searches.items() if search.requests]


def _judge(tape: Tape, trials: _Trials, costs: Mapping[str, set[int]], progress: Progress | None) -> None:
    """One pass over the logs."""
    now = lines = 0
    for source in tape.sources(trials, Unused()):
        for block in source.blocks:
            for at, agent, judges, cost in source.parser.events(block):
                now = max(now, at)
                for lane in judges:
                    if lane.judge(agent, now, cost) != EXEMPT and len(costs[lane.tier]) < 2:
                        costs[lane.tier].add(cost)
            for runs in trials.runs.values():
                for run in runs:
                    run.tidy(now)
            lines += len(block)
            tape.report(progress, lines)


def _trial(policy: Policy, limit: int) -> Run:
    """A policy that differs from another in nothing but its limits."""
    settings = policy.settings() | {"exempt": [], "agents": {}, "shadow": False, "warn_at": 1, "backoff": {}}
    settings["limits"] = dict.fromkeys(TIERS, f"{limit}/minute")

    def spared(lane: ChannelTier) -> frozenset[str]:
        return policy.exempt.union([agent for agent, own in policy.overrides.items() if lane in own])

    return Run("", Policy(**settings), spared=spared)
