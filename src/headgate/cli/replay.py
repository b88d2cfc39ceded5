"""`headgate replay`: what a policy would have said to the traffic in a log."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headgate.cli.parser import Commands, command
from headgate.cli.terminal import (
    BOLD,
    GREEN,
    RED,
    YELLOW,
    Cell,
    Column,
    Progress,
    harmless,
    painted,
    print_json,
    print_table,
)
from headgate.errors import HeadgateError, InvalidInput
from headgate.gate.policy import TIERS, UNKNOWN_TIER, Policy
from headgate.replay.options import FIELDS, FORMATS, KEYS, Reading, Route

if TYPE_CHECKING:
    from headgate.replay.report import Changed, OfPolicy, Outcomes, Report

_DEFAULTS: Final = "the default policy"
_SHARE: Final = "0.1%"
_BARS: Final = " ▁▂▃▄▅▆▇█"
_PLAIN_BARS: Final = " .:-=+*#@"
_COLUMNS: Final = 60  # of the timeline
_SHOWN_ALERTS: Final = 5


def add(commands: Commands) -> None:
    """Add the command."""
    parser = command(
        commands,
        "replay",
        _run,
        "see what a policy would have done to a log's traffic",
        "Play a traffic log through a policy on the log's own time, and say what would have been allowed, warned and "
        "denied, for whom and when. It reads access logs (common and combined), JSON lines, and CSV whose first line "
        "names the columns, packed with gzip or not.",
        "headgate replay access.log --policy headgate.toml",
        "headgate replay access.log --route 'POST /api/tasks=heavy' --route 'GET *=light'",
        "zcat old/*.gz | headgate replay - --policy now.toml --compare next.toml --html report.html",
        "headgate replay traffic.jsonl --field agent=user_id --field time=ts --suggest 0.1%",
        data=True,
    )
    parser.add_argument("logs", nargs="+", metavar="LOG", help="files, oldest first or not; - for standard input")
    parser.add_argument("--policy", metavar="FILE", help="a policy in TOML; without one, the defaults")
    parser.add_argument("--compare", metavar="FILE", help="another policy, to see what would change")
    parser.add_argument(
        "--suggest",
        nargs="?",
        const=_share(_SHARE),
        type=_share,
        metavar="SHARE",
        help=f"look for the lowest limits that deny no more than this share of requests ({_SHARE})".replace("%", "%%"),
    )
    parser.add_argument("--html", metavar="FILE", help="also write the report as a page with plots")
    parser.add_argument("--worst", type=_worst, default=10, metavar="N", help="agents in each list (10)")
    how = parser.add_argument_group("how lines are read")
    how.add_argument("--format", choices=FORMATS, metavar="F", help=f"{', '.join(FORMATS)}; else the first lines tell")
    how.add_argument(
        "--key",
        choices=KEYS,
        default=KEYS[0],
        metavar="K",
        help="whose an access log's request is: of its user, of its address, or (auto) of the user if there is one",
    )
    how.add_argument("--channel", default="http", metavar="C", help="the channel of lines that name none (http)")
    how.add_argument(
        "--tier",
        choices=TIERS,
        default=UNKNOWN_TIER,
        metavar="T",
        help=f"the tier of lines that name neither tier nor action ({UNKNOWN_TIER})",
    )
    how.add_argument(
        "--route",
        action="append",
        default=[],
        type=_route,
        metavar="R",
        help="'METHOD PATH=TIER': the tier, or action, of such requests; * stands for anything; the first that fits "
        "counts; can be given several times",
    )
    how.add_argument(
        "--field",
        action="append",
        default=[],
        type=_field,
        metavar="NAME=FIELD",
        help=f"which field or column is the {', '.join(FIELDS)}, if it is called otherwise; can be given several times",
    )


def _run(options: argparse.Namespace) -> int:
    from headgate.replay.page import page  # here, so that other commands don't wait for it
    from headgate.replay.report import replay

    policies = {options.policy or _DEFAULTS: Policy() if options.policy is None else Policy.load(options.policy)}
    if options.compare is not None:
        if options.compare in policies:
            raise HeadgateError(f"--compare: expected another policy than {options.compare}, got the same")
        policies[options.compare] = Policy.load(options.compare)
    target = None if options.html is None else _target(options.html, options.logs)
    reading = Reading(
        options.format, options.key, options.channel, options.tier, tuple(options.route), dict(options.field)
    )
    with Progress() as line:
        progress = _Reading(line).show
        report = replay(options.logs, policies, reading, share=options.suggest, worst=options.worst, progress=progress)
    if target is not None:
        _write(target, page(report))
    if options.json:
        print_json(asdict(report))
    else:
        _print_summary(report)
    return 0


def _target(name: str, logs: Sequence[str]) -> Path:
    """Where the page goes: seen to before the work begins, and never one of the logs."""
    target = Path(name)
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise HeadgateError(f"--html: expected a file in a folder that exists, got {name}")
    if target.exists() and any([Path(log).exists() and target.samefile(log) for log in logs]):
        raise HeadgateError(f"--html: expected another file than the log, got {name}")
    return target


def _write(target: Path, text: str) -> None:
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise HeadgateError(f"{target}: can't be written: {error.strerror}") from error


def _print_summary(report: "Report") -> None:
    _print_facts(report)
    for policy in report.policies:
        _title(policy.policy)
        columns = [Column("channel"), Column("tier"), Column("limit", elastic=True)]
        names = ("requests", "allowed", "warned", "denied", "share", "exempt", "shadowed")
        columns += [Column(name, right=True) for name in names]
        rows = [[one.channel, one.tier, one.limit, *_cells(one.outcomes)] for one in policy.tiers]
        rows.append(["all", "", "", *_cells(policy.outcomes)])
        print_table(columns, rows)
        _print_timeline(policy, report.interval)
        _print_agents(policy)
        _print_alerts(policy)
    if report.difference is not None:
        before, after = report.policies
        _print_difference(before, after)
        difference = report.difference
        _print_changed("newly denied", difference.newly_denied, difference.worst_newly_denied)
        _print_changed("no longer denied", difference.no_longer_denied, difference.worst_no_longer_denied)
    if report.suggestions is not None:
        _title("suggested limits")
        print(report.toml(), end="")


def _print_facts(report: "Report") -> None:
    lines = report.lines
    for log in report.logs:
        print(f"{harmless(log.name)}: {_many(log.lines, 'line')} read as {log.format}, {log.used:,} used")
        if log.damage:
            print(f"  {painted(log.damage, YELLOW, sys.stdout)}")
    agents = _many(report.agents, "agent")
    agents = agents if report.agents_complete else f"more than {agents}"
    print(f"from {report.first} to {report.last} ({_span(report.seconds)}), {agents}")
    if lines.late:
        print(f"{_many(lines.late, 'line')} came late, by up to {_span(lines.late_by)}: time stood still for them")
    if lines.skipped:
        print(f"{_many(lines.skipped, 'line')} without a user left out")
    if report.unknown_actions:
        names = ", ".join([harmless(action) for action in report.unknown_actions])
        print(f"actions that the policy doesn't classify, taken as normal: {names}")
    if lines.malformed:
        print(painted(f"{_many(lines.malformed, 'line')} can't be used; the first:", YELLOW, sys.stdout))
        for one in report.first_malformed:
            print(f"  {harmless(one.log)} line {one.line}: {one.reason}: {one.text}")


def _print_timeline(policy: "OfPolicy", interval: float) -> None:
    together = _together(policy)
    _title(f"requests in each {_span(interval * together)}")
    for name, colour in (("allowed", GREEN), ("warned", YELLOW), ("denied", RED)):
        _print_bars(name, _joined(policy, name, together), colour)


def _together(policy: "OfPolicy") -> int:
    """How many intervals share a column."""
    return -(-len(policy.timeline) // _COLUMNS)


def _joined(policy: "OfPolicy", outcome: str, together: int) -> list[int]:
    counts = [getattr(one.outcomes, outcome) for one in policy.timeline]
    return [sum(counts[place : place + together]) for place in range(0, len(counts), together)]


def _print_bars(name: str, counts: Sequence[int], colour: str) -> None:
    print(f"{name:<8} {painted(_bars(counts), colour, sys.stdout)}  at most {max(counts):,}")


def _print_agents(policy: "OfPolicy") -> None:
    if not policy.worst:
        return
    how = "denied or shadowed" if policy.outcomes.shadowed else "denied"
    _title(f"{_many(policy.agents_denied, 'agent')} {how}; the worst:")
    if policy.agents_short_by:
        print(f"their counts of denials may be short by up to {policy.agents_short_by:,}")
    columns = [Column("agent", elastic=True)]
    columns += [Column(name, right=True) for name in ("requests", "denied", "share", "shadowed", "alerts")]
    columns += [Column("first denied"), Column("last denied")]
    rows: list[list[str | Cell]] = []
    for one in policy.worst:
        counts = one.outcomes
        denied = Cell(f"{counts.denied:,}", RED if counts.denied else "")
        rest = [f"{counts.shadowed:,}", f"{one.alerts:,}", one.first_denied or "-", one.last_denied or "-"]
        rows.append([one.agent, f"{counts.requests:,}", denied, _percent(counts), *rest])
    print_table(columns, rows)


def _print_alerts(policy: "OfPolicy") -> None:
    if policy.alerts:
        _title(_many(policy.alerts, "alert"))
        for alert in policy.first_alerts[:_SHOWN_ALERTS]:
            print(f"{alert.time}  {harmless(alert.agent)}")
        if policy.alerts > _SHOWN_ALERTS:
            print(f"and {policy.alerts - _SHOWN_ALERTS:,} more")


def _print_difference(before: "OfPolicy", after: "OfPolicy") -> None:
    _title(f"from {before.policy} to {after.policy}")
    old, new = [{(one.channel, one.tier): one for one in policy.tiers} for policy in (before, after)]
    rows: list[list[str | Cell]] = []
    for lane in old | new:
        was, now = old.get(lane), new.get(lane)
        limits = [was.limit if was else "-", now.limit if now else "-"]
        rows.append([*lane, *limits, *_change(was.outcomes if was else None, now.outcomes if now else None)])
    rows.append(["all", "", "", "", *_change(before.outcomes, after.outcomes)])
    columns = [Column("channel"), Column("tier"), Column("limit before", elastic=True), Column("limit after")]
    columns += [Column(name, right=True) for name in ("denied before", "denied after", "difference")]
    print_table(columns, rows)
    together = _together(before)
    denied = [_joined(policy, "denied", together) for policy in (before, after)]
    changes = [later - earlier for earlier, later in zip(*denied, strict=True)]
    print()
    _print_bars("more", [max(change, 0) for change in changes], RED)
    _print_bars("fewer", [max(-change, 0) for change in changes], GREEN)


def _title(text: str) -> None:
    print(f"\n{painted(harmless(text), BOLD, sys.stdout)}")


def _cells(counts: "Outcomes") -> list[str | Cell]:
    return [
        f"{counts.requests:,}",
        f"{counts.allowed:,}",
        Cell(f"{counts.warned:,}", YELLOW if counts.warned else ""),
        Cell(f"{counts.denied:,}", RED if counts.denied else ""),
        _percent(counts),
        f"{counts.exempt:,}",
        f"{counts.shadowed:,}",
    ]


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _percent(counts: "Outcomes") -> str:
    return f"{counts.share(counts.denied):.2%}"


def _change(before: "Outcomes | None", after: "Outcomes | None") -> list[str | Cell]:
    old, new = before.denied if before else 0, after.denied if after else 0
    colour = RED if new > old else GREEN if new < old else ""
    return [f"{old:,}", f"{new:,}", Cell(f"{new - old:+,}", colour)]


def _print_changed(what: str, count: int, agents: "Sequence[Changed]") -> None:
    print(f"\n{_many(count, 'agent')} {what}")
    if agents:
        columns = [
            Column("agent", elastic=True),
            Column("denied before", right=True),
            Column("denied after", right=True),
        ]
        print_table(columns, [[one.agent, f"{one.before:,}", f"{one.after:,}"] for one in agents])


def _bars(counts: Sequence[int]) -> str:
    """A bar for each count; every count above 0 is seen."""
    bars = _BARS if (sys.stdout.encoding or "").lower().startswith("utf") else _PLAIN_BARS
    most = max(counts) or 1
    return "".join([bars[-(-count * (len(bars) - 1) // most)] for count in counts])


def _span(seconds: float) -> str:
    """Such as "2 h 5 min"."""
    parts = []
    left = round(seconds)
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, left = divmod(left, length)
        if count:
            parts.append(f"{count:,} {unit}")
    return " ".join(parts[:2]) if seconds >= 10 else f"{seconds:g} s"


class _Reading:
    """How far the reading is."""

    def __init__(self, line: Progress, now: Callable[[], float] = time.monotonic) -> None:
        self._line, self._now = line, now
        self._passes, self._done, self._begin = 1, 0, now()

    def show(self, done: int, total: int | None, lines: int) -> None:
        if done < self._done:  # it begins again
            self._passes += 1
            self._begin = self._now()
        self._done = done
        self._line.show(lambda: self._text(total, lines))

    def _text(self, total: int | None, lines: int) -> str:
        taken = self._now() - self._begin
        shown = f"{lines:,} lines, {lines / max(taken, 0.001):,.0f} a second"
        if total:
            share = min(self._done / total, 1.0)
            filled = round(share * 30)
            left = taken * (1 - share) / max(share, 0.001)
            shown = f"{share:4.0%} {'█' * filled}{'░' * (30 - filled)} {shown}, {_span(left)} left"
        which = "reading" if self._passes == 1 else f"looking for limits, pass {self._passes - 1}"
        return f"{which}: {shown}"


def _share(text: str) -> Fraction:
    number, percent = text.removesuffix("%"), text.endswith("%")
    try:
        share = Fraction(number) / (100 if percent else 1)
    except (ValueError, ZeroDivisionError):
        share = Fraction(-1)
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(
            f"expected a share below 1, such as 0.1% or 0.001, got {text!r}; logs that follow it go before the options"
        )
    return share


def _worst(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to 1000, got {text!r}")
    return int(text)


def _route(text: str) -> Route:
    try:
        return Route.read(text)
    except InvalidInput as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _field(text: str) -> tuple[str, str]:
    name, _, given = text.partition("=")
    if name not in FIELDS or not given:
        raise argparse.ArgumentTypeError(f"expected NAME=FIELD with a NAME of {', '.join(FIELDS)}, got {text!r}")
    return name, given
