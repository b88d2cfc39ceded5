"""The player: one pass over some logs, under one or several policies."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, Self, TypeAlias

from headgate.errors import InvalidInput
from headgate.replay.engine import DENIED, Classifier, Counts, PolicyReplay, add_counts
from headgate.replay.formats import LoggedRequest, LogParser, UnusedLines, choose_parser
from headgate.replay.logfile import STDIN, LogFile, ReplayError
from headgate.replay.options import LogOptions
from headgate.replay.timeline import Timeline

OnProgress: TypeAlias = Callable[[int, int | None, int], None]
"""Called with the bytes read so far, all bytes if their number is known, and the lines read so far."""


@dataclass
class OpenLog:
    """A log that is being read."""

    file: LogFile
    parser: LogParser
    blocks: Iterable[list[str]]
    used: int = 0


class LogSet:
    """Logs that are read one after the other, in the order of their first requests.

    With `again` they can be read several times, standard input too: it is copied.
    """

    def __init__(self, names: Sequence[str], options: LogOptions, *, again: bool = False) -> None:
        if names.count(STDIN) > 1:
            raise ReplayError("standard input: expected once among the logs, got it twice")
        self.options: Final = options
        self.files: Final[list[LogFile]] = []
        self._read = False
        try:
            for name in names:
                self.files.append(LogFile(name, again=again))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for file in self.files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, classifier: Classifier, unused: UnusedLines) -> list[OpenLog]:
        """Open the logs at their beginning, in order, without the empty ones."""
        self._check_options(classifier)
        found: list[tuple[int, OpenLog]] = []
        for file in self.files:
            if self._read:
                file.rewind()
            blocks = file.lines()
            first = next(blocks, [])
            if not first and file.damage:
                raise ReplayError(f"{file.name}: expected a readable log, got {file.damage}")
            if not first:
                continue
            parser = choose_parser(file.name, first, self.options)
            trial = parser(file.name, self.options, classifier, UnusedLines())
            begin = next((request[0] for request in trial.requests(first)), 0)
            log = OpenLog(file, parser(file.name, self.options, classifier, unused), chain([first], blocks))
            found.append((begin, log))
        self._read = True
        return [log for _, log in sorted(found, key=lambda one: one[0])]

    def _check_options(self, classifier: Classifier) -> None:
        """Refuse a channel or a tier that a policy lacks, or an action that none knows, before anything is read."""
        channel = self.options.channel
        classifier.classify(channel, self.options.tier, None)
        for route in self.options.routes:
            where = f"route '{route.method} {route.path}'"
            tier, action = classifier.tier_or_action(route.kind)
            if action is None:
                try:
                    classifier.classify(channel, tier, None)
                except InvalidInput as error:
                    raise InvalidInput(f"{where}: {error}") from None
            elif not classifier.knows(channel, action):
                raise InvalidInput(
                    f"{where}: expected a tier or an action of the policy for channel {channel}, got {action!r}"
                )

    def report(self, on_progress: OnProgress | None, lines: int) -> None:
        if on_progress is not None:
            sizes = [file.size for file in self.files]
            total = None if None in sizes else sum([size or 0 for size in sizes])
            on_progress(sum([file.done for file in self.files]), total, lines)


class Player:
    """One pass over some logs, and its results."""

    def __init__(self, logs: LogSet, policies: Sequence[PolicyReplay], on_progress: OnProgress | None = None) -> None:
        self.policies: Final = policies
        self.unused: Final = UnusedLines()
        self.classifier: Final = Classifier(policies)
        self.timeline: Final = Timeline(len(policies))
        self.first = -1
        """The time of the first request, in microseconds since 1970; below 0 if there is none."""
        self.now = -1
        """The latest time so far."""
        self.late = 0
        """Lines with a time before that of an earlier line. They count as if they had that line's time."""
        self.late_by = 0
        self._interval_end = 0
        self._interval: list[Counts] = []
        self.logs: Final = logs.open(self.classifier, self.unused)
        lines = 0
        for log in self.logs:
            for block in log.blocks:
                log.used += self._play(log.parser.requests(block))
                lines += len(block)
                logs.report(on_progress, lines)
            self._check_used(log)
        if self.first < 0:
            raise ReplayError(f"{', '.join([file.name for file in logs.files])}: expected requests, got an empty log")

    def _play(self, requests: Iterator[LoggedRequest]) -> int:
        """Decide some requests, and return their number."""
        now, interval_end = self.now, self._interval_end
        used = 0
        for at, agent, tiers, cost, hold in requests:
            if at > now:
                now = at
                if at >= interval_end:
                    used += self._flush()
                    self.first = at if self.first < 0 else self.first
                    self._interval, interval_end = self.timeline.interval(at)
            elif at < now:
                self.late += 1
                self.late_by = max(self.late_by, now - at)
            for tier in tiers:
                outcome = tier.decide(agent, now, cost)
                stats = tier.agents.get(agent)
                if stats is None:
                    stats = tier.agents.add(agent)
                stats.counts[outcome] += 1
                if outcome == DENIED:
                    tier.policy.record_denial(stats, agent, now, tier.alert)
                elif hold is not None:  # a request that its tier denies holds nothing
                    tier.policy.hold(stats, agent, now, hold)
        self.now, self._interval_end = now, interval_end
        for policy in self.policies:
            policy.drop_full(now)
        return used + self._flush()

    def _flush(self) -> int:
        """Add the last outcomes to their interval, and return the number of requests."""
        requests = 0
        for policy, counts in zip(self.policies, self._interval, strict=False):
            taken = policy.take_counts()
            requests = sum(taken)
            add_counts(counts, taken)
        return requests

    def _check_used(self, log: OpenLog) -> None:
        if log.used == 0 and log.parser.count:
            name, parser = log.file.name, log.parser
            lines = [f"{name}: expected requests, got none in {parser.count:,} lines read as {parser.format}"]
            lines += [f"  line {one.line}: {one.reason}: {one.text}" for one in self.unused.first if one.log == name]
            lines.append("  --format sets the log format, --field the names of its fields, --key the agent's identity")
            raise ReplayError("\n".join(lines))
