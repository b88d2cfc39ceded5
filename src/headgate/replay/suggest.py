"""Suggested limits: the lowest that deny next to nothing.

For each tier the search finds a whole number n such that a limit of n per minute, with a burst of n, denies at most the
given share of the tier's requests, while n - 1 per minute denies more. Both are verified by replaying the whole log.

Where all requests cost the same, n is the lowest such number: at any moment a bucket has let as many of them pass as
its limit permits (one that passes now costs at most one later), and traffic that conforms to a limit conforms to a
higher one, so a higher limit never denies more. Where costs differ it can: a large request that passes leaves less for
small ones. The statements about n and n - 1 still hold, but a lower number may do by chance.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from headgate.gate.policy import ChannelTier, Policy
from headgate.replay.engine import DENIED, EXEMPT, Classifier, PolicyReplay, TierReplays
from headgate.replay.formats import UnusedLines
from headgate.replay.player import LogSet, OnProgress

_AT_ONCE: Final = 4  # limits tried for each tier in one pass over the log
_GROWTH: Final = 8
HIGHEST: Final = _GROWTH**9
"""The highest limit tried, in requests per minute."""


@dataclass(frozen=True)
class Suggestion:
    """A limit for a tier, and its effect."""

    tier: str
    limit: int | None
    """Requests per minute, and burst; None if no limit up to `HIGHEST` is high enough."""
    requests: int
    """Requests under this limit: without those of exempt agents and of agents with an override."""
    denied: int
    denied_one_less: int | None
    """Denials under a limit of one less per minute; None if the limit is 1."""
    lowest: bool
    """Whether it is certain that no lower limit would do: if all requests cost the same."""


class _Search:
    """The search for one tier's limit."""

    def __init__(self, share: Fraction) -> None:
        self._share: Final = share
        self._low = 0  # a limit that denies too much
        self._high = 0  # a limit that doesn't; 0 if none is known yet
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

    def record(self, denied: dict[int, int], requests: int) -> None:
        """Record how many requests each limit of the last pass denied."""
        self._denied.update(denied)
        self.requests = requests
        for limit in self.tries:
            if denied[limit] <= self._share * requests:
                self._high = limit
                break
            self._low = limit
        self.tries = self._next() if requests else []

    def suggestion(self, tier: str) -> Suggestion:
        limit = self._high or None
        return Suggestion(
            tier=tier,
            limit=limit,
            requests=self.requests,
            denied=self._denied[limit or self._low],
            denied_one_less=self._denied.get(self._low) if limit else None,
            lowest=len(self.costs) == 1,
        )


class _Trials(Classifier):
    """Sends each request to the limits that are tried for its tier."""

    def __init__(self, policy: Policy, tries: Mapping[str, list[int]]) -> None:
        super().__init__([PolicyReplay("", policy)])
        self.policies: Final = {tier: [_trial(policy, limit) for limit in limits] for tier, limits in tries.items()}
        self._trials: Final = {
            place: tuple([trial.tiers[place] for trial in self.policies[place[1]]]) for place in policy.limits
        }  # fmt: skip

    def classify(self, channel: str, tier: str | None, action: str | None) -> TierReplays:
        (found,) = super().classify(channel, tier, action)
        return self._trials[found.channel, found.tier]


def suggest(logs: LogSet, policy: Policy, share: Fraction, on_progress: OnProgress | None = None) -> list[Suggestion]:
    """Suggest a limit for each tier with requests, in as many passes over the logs as it takes.

    Each limit is tried alone: without an enforced backoff and without shadow mode. Agents that are exempt, or have an
    override for that channel and tier, are left out: the limit doesn't apply to them.
    """
    searches = {tier: _Search(share) for tier in policy.tiers}
    while any([search.tries for search in searches.values()]):
        trials = _Trials(policy, {tier: search.tries for tier, search in searches.items()})
        _try(logs, trials, {tier: search.costs for tier, search in searches.items()}, on_progress)
        for tier, search in searches.items():
            if search.tries:
                totals = [trial.take_counts() for trial in trials.policies[tier]]
                denied = [total[DENIED] for total in totals]
                search.record(dict(zip(search.tries, denied, strict=True)), sum(totals[0]) - totals[0][EXEMPT])
    return [search.suggestion(tier) for tier, search in searches.items() if search.requests]


def _try(logs: LogSet, trials: _Trials, costs: Mapping[str, set[int]], on_progress: OnProgress | None) -> None:
    """One pass over the logs."""
    now = lines = 0
    for log in logs.open(trials, UnusedLines()):
        for block in log.blocks:
            for at, agent, tiers, cost, _ in log.parser.requests(block):
                now = max(now, at)
                for tier in tiers:
                    if tier.decide(agent, now, cost) != EXEMPT and len(costs[tier.tier]) < 2:
                        costs[tier.tier].add(cost)
            for policies in trials.policies.values():
                for policy in policies:
                    policy.drop_full(now)
            lines += len(block)
            logs.report(on_progress, lines)


def _trial(policy: Policy, limit: int) -> PolicyReplay:
    """A replay of a policy that has this limit in every tier."""
    settings = policy.settings() | {"exempt": [], "agents": {}, "shadow": False, "warn_at": 1, "backoff": {}}
    settings["limits"] = dict.fromkeys(policy.tiers, f"{limit}/minute")

    def left_out(place: ChannelTier) -> frozenset[str]:
        return policy.exempt.union([agent for agent, own in policy.overrides.items() if place in own])

    return PolicyReplay("", Policy(**settings), left_out=left_out)
