"""`headgate replay`: what a policy would have done to the traffic in a log."""

import argparse
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from headgate.cli.parser import Commands, add_command, whole_number
from headgate.cli.terminal import (
    BOLD,
    GREEN,
    RED,
    YELLOW,
    Cell,
    Column,
    ProgressLine,
    coloured,
    print_json,
    print_table,
    print_text,
    terminal_width,
    wrap,
)
from headgate.errors import HeadgateError, InvalidInput
from headgate.gate.policy import UNKNOWN_TIER, Policy
from headgate.replay.options import FIELDS, FORMATS, KEYS, LogOptions, RouteRule

if TYPE_CHECKING:
    from headgate.replay.report import AgentChange, OutcomeCounts, PolicyReport, Report

_DEFAULTS: Final = "the default policy"
_SHARE: Final = "0.1%"
_SHORT_NUMBER: Final = re.compile(r"[0-9./]{1,40}(e-?[0-9]{1,2})?", re.IGNORECASE)  # a fraction is exact at any size
_BARS: Final = " ▁▂▃▄▅▆▇█"
_PLAIN_BARS: Final = " .:-=+*#@"
_COLUMNS: Final = 60  # of the timeline, at most
_NAME: Final = 9  # columns of the names beside it
_SHOWN_ALERTS: Final = 5
_SHOWN_SPENT: Final = 50


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "replay",
        _run,
        "replay a traffic log under a policy",
        "Replay a traffic log under a policy, at the times in the log, and report which requests would have been "
        "allowed, warned and denied, by agent and over time. Reads access logs (common and combined), JSON lines, and "
        "CSV with a header, plain or compressed with gzip.",
        "headgate replay access.log --policy headgate.toml",
        "headgate replay access.log --route 'POST /api/tasks=heavy' --route 'GET *=light'",
        "zcat old/*.gz | headgate replay - --policy now.toml --compare next.toml --html report.html",
        "headgate replay traffic.jsonl --field agent=user_id --field time=ts --suggest 0.1%",
        json=True,
    )
    parser.add_argument("logs", nargs="+", metavar="LOG", help="log files in any order; - for standard input")
    parser.add_argument("--policy", metavar="FILE", help="policy file in TOML (default: the default policy)")
    parser.add_argument("--compare", metavar="FILE", help="second policy file, to show what would change")
    parser.add_argument(
        "--suggest",
        nargs="?",
        const=_share(_SHARE),
        type=_share,
        metavar="SHARE",
        help=f"suggest the lowest limits that deny at most this share of requests (default: {_SHARE})".replace(
            "%", "%%"
        ),
    )
    parser.add_argument("--html", metavar="FILE", help="also write the report as an HTML page with plots")
    worst = whole_number(1, 1000)
    parser.add_argument("--worst", type=worst, default=10, metavar="N", help="agents in each list (default: 10)")
    _add_log_options(parser)


def _add_log_options(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("log format")
    how.add_argument("--format", choices=FORMATS, metavar="F", help=f"{', '.join(FORMATS)} (default: detected)")
    how.add_argument(
        "--key",
        choices=KEYS,
        default=KEYS[0],
        metavar="K",
        help="agent of an access log line: user, address, or auto: the user if there is one (default: auto)",
    )
    how.add_argument("--channel", default="http", metavar="C", help="channel of lines without one (default: http)")
    how.add_argument(
        "--tier",
        default=UNKNOWN_TIER,
        metavar="T",
        help=f"tier of lines without a tier or an action (default: {UNKNOWN_TIER})",
    )
    how.add_argument(
        "--route",
        action="append",
        default=[],
        type=_route,
        metavar="R",
        help="'METHOD PATH=TIER': tier or action of matching requests; * matches anything, the first match counts; "
        "repeatable",
    )
    how.add_argument(
        "--field",
        action="append",
        default=[],
        type=_field,
        metavar="NAME=FIELD",
        help=f"name of the field or column for {', '.join(FIELDS)}; repeatable",
    )


def _run(options: argparse.Namespace) -> int:
    from headgate.replay.html_report import render_page  # here, for a quick start of other commands
    from headgate.replay.logfile import STDIN
    from headgate.replay.report import replay

    policies = {options.policy or _DEFAULTS: Policy() if options.policy is None else Policy.load(options.policy)}
    if options.compare is not None:
        if options.compare in policies:
            raise HeadgateError(f"--compare: expected a policy other than {options.compare}, got the same")
        policies[options.compare] = Policy.load(options.compare)
    files = [one for one in (options.policy, options.compare) if one is not None]
    inputs = [*files, *[0 if log == STDIN else log for log in options.logs]]
    target = None if options.html is None else _target(options.html, inputs)
    log_options = LogOptions(
        options.format, options.key, options.channel, options.tier, tuple(options.route), dict(options.field)
    )
    with ProgressLine() as line:
        show = _ReplayProgress(line).show
        report = replay(
            options.logs, policies, log_options, share=options.suggest, worst=options.worst, on_progress=show
        )
    if target is not None:
        _write(target, render_page(report))
    if options.json:
        print_json(asdict(report))
    else:
        _print_summary(report)
    return 0


def _target(name: str, inputs: Sequence[str | int]) -> Path:
    """The file for the page: checked before the work begins, and never one of the inputs (names or open files)."""
    target = Path(os.path.realpath(name))  # a link stays one
    try:
        if target.is_dir() or not target.parent.is_dir():
            raise HeadgateError(f"--html: expected a file in an existing folder, got {name}")
        if not stat.S_ISREG(target.lstat().st_mode):  # a link is left only if it leads nowhere
            raise HeadgateError(f"--html: expected a file, got {name}, which is a device, a pipe or a circular link")
        if any([_is_same(target, one) for one in inputs]):
            raise HeadgateError(f"--html: expected a file other than the logs and policies, got {name}")
    except FileNotFoundError:
        pass
    except OSError as error:
        raise HeadgateError(f"--html: expected a file, got {name}: {error.strerror}") from error
    if not os.access(target.parent, os.W_OK | os.X_OK):  # the page is a new file there, which replaces the old one
        raise HeadgateError(f"--html: expected a file in a folder that may be written, got {name}")
    return target


def _is_same(target: Path, given: str | int) -> bool:
    """Whether an input is this file, by whatever name."""
    try:
        return os.path.samestat(target.stat(), os.stat(given))
    except OSError:  # it can't be read anyway
        return False


def _write(target: Path, page: str) -> None:
    """Write the page as a whole or not at all. What isn't UTF-8 in a name is escaped."""
    unfinished = target.with_name(f".headgate-{uuid4().hex}")
    try:
        with unfinished.open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(page)
        if target.exists():
            shutil.copymode(target, unfinished)
        unfinished.replace(target)
    except OSError as error:
        raise HeadgateError(f"{target}: can't write the page: {error.strerror}") from error
    finally:
        with suppress(OSError):
            unfinished.unlink()


def _print_summary(report: "Report") -> None:
    _print_facts(report)
    for policy in report.policies:
        _title(policy.policy)
        columns = [Column("channel"), Column("tier"), Column("limit")]
        names = ("requests", "allowed", "warned", "denied", "share", "exempt", "shadowed")
        columns += [Column(name, right=True) for name in names]
        rows = [[one.channel, one.tier, one.limit, *_cells(one.outcomes)] for one in policy.tiers]
        rows.append(["all", "", "", *_cells(policy.outcomes)])
        print_table(columns, rows)
        _print_timeline(policy, report.interval)
        _print_agents(policy)
        _print_alerts(policy)
        _print_accounts(policy)
    if report.difference is not None:
        difference = report.difference
        _print_difference(report)
        by = "" if report.hold_changes() is None else " by a tier"  # holds are not told by agent
        _print_changed(f"newly denied{by}", difference.newly_denied, difference.worst_newly_denied)
        _print_changed(f"no longer denied{by}", difference.no_longer_denied, difference.worst_no_longer_denied)
    if report.suggestions is not None:
        _title("suggested limits")
        _print_toml(report.toml())


def _print_facts(report: "Report") -> None:
    lines = report.lines
    for log in report.logs:
        print_text(f"{log.name}: {_many(log.lines, 'line')} read as {log.format}, {log.used:,} used")
        if log.damage:
            print_text(log.damage, YELLOW, indent="  ")
    agents = _many(report.agents, "agent")
    agents = agents if report.agents_complete else f"more than {agents}"
    print_text(f"from {report.first} to {report.last} ({_span(report.seconds)}), {agents}")
    if lines.late:
        late = f"{_many(lines.late, 'line')} out of order, by up to {_span(lines.late_by)}"
        print_text(f"{late}: counted at the time before")
    if lines.skipped:
        print_text(f"{_many(lines.skipped, 'line')} without a user skipped")
    if report.unknown_actions:
        names = ", ".join(report.unknown_actions)
        print_text(f"actions that the policy doesn't classify, counted as normal: {names}")
    if lines.malformed:
        print_text(f"{_many(lines.malformed, 'malformed line')}; the first:", YELLOW)
        for one in report.first_malformed:
            print_text(f"{one.log} line {one.line}: {one.reason}: {one.text}", indent="  ")


def _print_timeline(policy: "PolicyReport", interval: float) -> None:
    together = _together(policy)
    _title(f"requests per {_span(interval * together)}")
    for name, colour in (("allowed", GREEN), ("warned", YELLOW), ("denied", RED)):
        _print_bars(name, _joined(policy, name, together), colour)


def _together(policy: "PolicyReport") -> int:
    """Number of intervals per column: so many that the bars fit into the terminal, with what is beside them."""
    room, intervals = terminal_width(), len(policy.timeline)
    together = -(-intervals // _COLUMNS)
    if room is None:
        return together
    counts = [one.outcomes.requests for one in policy.timeline]
    while together < intervals:
        most = max(_sums(counts, together))
        if _NAME + -(-intervals // together) + len(_most(most)) <= room:
            break
        together += 1
    return together


def _joined(policy: "PolicyReport", outcome: str, together: int) -> list[int]:
    return _sums([getattr(one.outcomes, outcome) for one in policy.timeline], together)


def _sums(counts: Sequence[int], together: int) -> list[int]:
    return [sum(counts[place : place + together]) for place in range(0, len(counts), together)]


def _print_bars(name: str, counts: Sequence[int], colour: str) -> None:
    """Print a bar for each count, visible for every count above 0."""
    bars = _BARS if (sys.stdout.encoding or "").lower().startswith("utf") else _PLAIN_BARS
    most = max(counts)
    shown = "".join([bars[-(-count * (len(bars) - 1) // (most or 1))] for count in counts])
    print(f"{name:<{_NAME}}{coloured(shown, colour, sys.stdout)}{_most(most)}")


def _most(count: int) -> str:
    return f"  max {count:,}"


def _print_agents(policy: "PolicyReport") -> None:
    if not policy.worst:
        return
    how = "denied or shadowed" if policy.outcomes.shadowed else "denied"
    _title(f"{_many(policy.agents_denied, 'agent')} {how}; the worst:")
    if policy.agents_short_by:
        print_text(f"numbers of denials may be short by up to {policy.agents_short_by:,}")
    columns = [Column("agent", elastic=True)]
    columns += [Column(name, right=True) for name in ("requests", "denied", "share", "shadowed", "alerts")]
    columns += [Column("first denied"), Column("last denied")]
    rows: list[list[str | Cell]] = []
    for one in policy.worst:
        counts = one.outcomes
        denied = Cell(f"{counts.denied:,}", RED if counts.denied else "")
        rest = [f"{counts.shadowed:,}", f"{one.alerts:,}", one.first_denied or "-", one.last_denied or "-"]
        rows.append([one.agent, f"{counts.requests:,}", denied, counts.denied_share(), *rest])
    print_table(columns, rows)


def _print_alerts(policy: "PolicyReport") -> None:
    if policy.alerts:
        _title(_many(policy.alerts, "alert"))
        for alert in policy.first_alerts[:_SHOWN_ALERTS]:
            print_text(f"{alert.time}  {alert.agent}")
        if policy.alerts > _SHOWN_ALERTS:
            print(f"and {policy.alerts - _SHOWN_ALERTS:,} more")


def _print_accounts(policy: "PolicyReport") -> None:
    found = policy.accounts
    if found is None:
        return
    how = f"{found.denied:,} denied" + (f", {found.shadowed:,} shadowed" if found.shadowed else "")
    _title(f"{_many(found.holds, 'hold')}, {how}")
    if found.denials:
        denials: list[list[str | Cell]] = [
            [one.account, one.resource, one.tool or "-", Cell(f"{one.denied:,}", RED)] for one in found.denials
        ]
        print_table([Column("account"), Column("resource"), Column("tool"), Column("denied", right=True)], denials)
        if found.limits_denied > len(denials):
            print(f"and {_many(found.limits_denied - len(denials), 'more limit')}")
    if found.spent:
        _title(f"spent since {found.spent_from}")
        columns = [Column("account"), Column("resource"), Column("amount", right=True)]
        shown = found.spent[:_SHOWN_SPENT]
        print_table(columns, [[one.account or "-", one.resource, one.amount] for one in shown])
        if len(found.spent) > len(shown):
            print_text(f"and more, of {_many(found.accounts, 'account')} in all; --json has them")
    for reason, count in found.refused.items():
        print_text(f"{_many(count, 'hold')} not counted: {reason}", YELLOW)


def _print_difference(report: "Report") -> None:
    before, after = report.policies
    _title(f"from {before.policy} to {after.policy}")
    rows: list[list[str | Cell]] = [
        [one.channel, one.tier, *one.limits("-"), *_change(*one.denied())] for one in report.tier_changes()
    ]
    rows.append(["all", "", "", "", *_change(before.outcomes.denied, after.outcomes.denied)])
    holds = report.hold_changes()
    if holds is not None:
        rows.append(["holds", "", "", "", *_change(*holds)])
    columns = [Column("channel"), Column("tier"), Column("limit before"), Column("limit after")]
    columns += [Column(name, right=True) for name in ("denied before", "denied after", "difference")]
    print_table(columns, rows)
    together = _together(before)
    denied = [_joined(policy, "denied", together) for policy in (before, after)]
    changes = [later - earlier for earlier, later in zip(*denied, strict=True)]
    print()
    _print_bars("more", [max(change, 0) for change in changes], RED)
    _print_bars("fewer", [max(-change, 0) for change in changes], GREEN)


def _title(text: str) -> None:
    print()
    print_text(text, BOLD)


def _print_toml(text: str) -> None:
    """Print limits. A comment that doesn't fit beside its line into the terminal stands above it."""
    room = terminal_width()
    for line in text.splitlines():
        setting, mark, comment = line.partition("# ")
        if room is None or len(line) <= room or not mark:
            print(line)
            continue
        for part in wrap(comment, max(room - len(mark), 1)):
            print(mark + part)
        if setting:
            print(setting.rstrip())


def _cells(counts: "OutcomeCounts") -> list[str | Cell]:
    return [
        f"{counts.requests:,}",
        f"{counts.allowed:,}",
        Cell(f"{counts.warned:,}", YELLOW if counts.warned else ""),
        Cell(f"{counts.denied:,}", RED if counts.denied else ""),
        counts.denied_share(),
        f"{counts.exempt:,}",
        f"{counts.shadowed:,}",
    ]


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _change(old: int, new: int) -> list[str | Cell]:
    colour = RED if new > old else GREEN if new < old else ""
    return [f"{old:,}", f"{new:,}", Cell(f"{new - old:+,}", colour)]


def _print_changed(what: str, count: int, agents: "Sequence[AgentChange]") -> None:
    print(f"\n{_many(count, 'agent')} {what}")
    if agents:
        columns = [Column("agent", elastic=True)]
        columns += [Column(name, right=True) for name in ("denied before", "denied after")]
        print_table(columns, [[one.agent, f"{one.before:,}", f"{one.after:,}"] for one in agents])


def _span(seconds: float) -> str:
    """A duration such as "2 h 5 min"."""
    parts = []
    left = round(seconds)
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, left = divmod(left, length)
        if count:
            parts.append(f"{count:,} {unit}")
    return " ".join(parts[:2]) if seconds >= 10 else f"{seconds:g} s"


class _ReplayProgress:
    """Shows how much of the logs has been read."""

    def __init__(self, line: ProgressLine, now: Callable[[], float] = time.monotonic) -> None:
        self._line, self._now = line, now
        self._passes, self._done, self._begin = 1, 0, now()

    def show(self, done: int, total: int | None, lines: int) -> None:
        if done < self._done:  # the next pass has begun
            self._passes += 1
            self._begin = self._now()
        self._done = done
        self._line.show(lambda: self._text(total, lines))

    def _text(self, total: int | None, lines: int) -> str:
        taken = self._now() - self._begin
        shown = f"{lines:,} lines, {lines / max(taken, 0.001):,.0f}/s"
        if total:
            share = min(self._done / total, 1.0)
            filled = round(share * 30)
            left = taken * (1 - share) / max(share, 0.001)
            shown = f"{share:4.0%} {'█' * filled}{'░' * (30 - filled)} {shown}, {_span(left)} left"
        phase = "reading" if self._passes == 1 else f"searching limits, pass {self._passes - 1}"
        return f"{phase}: {shown}"


def _share(text: str) -> Fraction:
    number, percent = text.removesuffix("%"), text.endswith("%")
    try:
        share = Fraction(number if _SHORT_NUMBER.fullmatch(number) else "") / (100 if percent else 1)
    except (ValueError, ZeroDivisionError):
        share = Fraction(-1)
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(
            f"expected a share below 1, such as 0.1% or 0.001, got {text!r}; put logs before the options"
        )
    return share


def _route(text: str) -> RouteRule:
    try:
        return RouteRule.parse(text)
    except InvalidInput as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _field(text: str) -> tuple[str, str]:
    name, _, given = text.partition("=")
    if name not in FIELDS or not given:
        raise argparse.ArgumentTypeError(f"expected NAME=FIELD, NAME one of {', '.join(FIELDS)}, got {text!r}")
    return name, given
