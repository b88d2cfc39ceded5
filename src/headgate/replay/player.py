"""Logs, played through one or several policies in one pass."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Final, TypeAlias

from headgate.errors import InvalidInput
from headgate.lifecycle import Closable
from headgate.replay.engine import DENIED, Counts, Kinds, Run
from headgate.replay.formats import Event, Parser, Unused, parser_of
from headgate.replay.logfile import STDIN, Log, ReplayError
from headgate.replay.options import Reading
from headgate.replay.timeline import Timeline

Progress: TypeAlias = Callable[[int, int | None, int], None]
"""Is told how many bytes have been read, of how many if that is known, and how many lines they were."""


class Source:
    """A log that is being read."""

    def __init__(self, log: Log, parser: Parser, blocks: Iterable[list[str]]) -> None:
        self.log: Final = log
        self.parser: Final = parser
        self.blocks: Final = blocks
        self.used = 0


class Tape(Closable):
    """Some logs. They are read one after the other, in the order of their first requests.

    With `again` they can be read several times, even where standard input is among them: it is copied then.
    """

    def __init__(self, names: Sequence[str], reading: Reading, *, again: bool = False) -> None:
        if names.count(STDIN) > 1:
            raise ReplayError("standard input: expected once among the logs, got it twice")
        self.reading: Final = reading
        self.logs: Final[list[Log]] = []
        self._read = False
        try:
            for name in names:
                self.logs.append(Log(name, again=again))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for log in self.logs:
            log.close()

    def sources(self, kinds: Kinds, unused: Unused) -> list[Source]:
        """The logs from their beginning, save those that are empty, in order."""
        self._refuse_unknown(kinds)
        found: list[tuple[int, Source]] = []
        for log in self.logs:
            if self._read:
                log.rewind()
            blocks = log.lines()
            first = next(blocks, [])
            if not first and log.damage:
                raise ReplayError(f"{log.name}: no line of it can be read: {log.damage}")
            if not first:
                continue
            parser = parser_of(log.name, first, self.reading)
            trial = parser(log.name, self.reading, kinds, Unused())
            begin = next((event[0] for event in trial.events(first)), 0)
            found.append((begin, Source(log, parser(log.name, self.reading, kinds, unused), chain([first], blocks))))
        self._read = True
        return [source for _, source in sorted(found, key=lambda one: one[0])]

    def _refuse_unknown(self, kinds: Kinds) -> None:
        """See that what the reading names is there before anything is read."""
        kinds.find(self.reading.channel, self.reading.tier, None)
        for route in self.reading.routes:
            if route.action is not None and not kinds.knows(self.reading.channel, route.action):
                raise InvalidInput(
                    f"route '{route.method} {route.path}': expected a tier or an action of the policy for channel "
                    f"{self.reading.channel}, got {route.action!r}"
                )

    def report(self, progress: Progress | None, lines: int) -> None:
        if progress is not None:
            sizes = [log.size for log in self.logs]
            total = None if None in sizes else sum([size or 0 for size in sizes])
            progress(sum([log.done for log in self.logs]), total, lines)


class Play:
    """One pass over some logs, and what came of it."""

    def __init__(self, tape: Tape, runs: Sequence[Run], progress: Progress | None = None) -> None:
        self.runs: Final = runs
        self.unused: Final = Unused()
        self.kinds: Final = Kinds(runs)
        self.timeline: Final = Timeline(len(runs))
        self.first = -1
        """The time of the first request, in microseconds since 1970; below 0 as long as there is none."""
        self.now = -1
        """The latest time so far."""
        self.late = 0
        """Lines whose time is before that of a line that came earlier. They count as if they had come with it."""
        self.late_by = 0
        self._edge = 0
        self._row: list[Counts] = []
        self.sources: Final = tape.sources(self.kinds, self.unused)
        lines = 0
        for source in self.sources:
            for block in source.blocks:
                source.used += self._play(source.parser.events(block))
                lines += len(block)
                tape.report(progress, lines)
            self._see_that_it_was_used(source)
        if self.first < 0:
            raise ReplayError(f"{', '.join([log.name for log in tape.logs])}: expected requests, got an empty log")

    def _play(self, events: Iterator[Event]) -> int:
        """Judge some requests, and say how many they were."""
        now, edge = self.now, self._edge
        used = 0
        for at, agent, judges, cost in events:
            if at > now:
                now = at
                if at >= edge:
                    used += self._settle()
                    self.first = at if self.first < 0 else self.first
                    self._row, edge = self.timeline.row(at)
            elif at < now:
                self.late += 1
                self.late_by = max(self.late_by, now - at)
            for lane in judges:
                outcome = lane.judge(agent, now, cost)
                account = lane.accounts.get(agent)
                if account is None:
                    account = lane.accounts.open(agent)
                account.counts[outcome] += 1
                if outcome == DENIED:
                    lane.run.note_denial(account, agent, now, lane.alert)
        self.now, self._edge = now, edge
        for run in self.runs:
            run.tidy(now)
        return used + self._settle()

    def _settle(self) -> int:
        """Put what came of the last requests where it belongs, and say how many they were."""
        settled = 0
        for run, counts in zip(self.runs, self._row, strict=False):
            taken = run.taken()
            settled = sum(taken)
            for outcome, count in enumerate(taken):
                counts[outcome] += count
        return settled

    def _see_that_it_was_used(self, source: Source) -> None:
        if source.used == 0 and source.parser.count:
            name, parser = source.log.name, source.parser
            lines = [f"{name}: expected requests, got none in {parser.count:,} lines read as {parser.format}"]
            lines += [f"  line {one.line}: {one.reason}: {one.text}" for one in self.unused.first if one.log == name]
            lines.append("  --format says what it is, --field what its fields are called, --key whom it counts")
            raise ReplayError("\n".join(lines))
