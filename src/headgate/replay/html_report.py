"""The report of a replay as one HTML page: self-contained, without scripts and without requests to other hosts."""

import re
from collections.abc import Sequence
from html import escape
from typing import Final

from headgate.replay.engine import OUTCOMES
from headgate.replay.report import AgentChange, OutcomeCounts, PolicyDifference, PolicyReport, Report

_WIDTH: Final = 960
_HEIGHT: Final = 200
_STACK: Final = ("exempt", "allowed", "shadowed", "warned", "denied")  # from the bottom

_NUMBER: Final = re.compile(r"[+-]?\d[\d,]*(\.\d+)?%?")

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #59636f; --paper: #ffffff; --line: #d5dae0;
  --allowed: #3b78b8; --warned: #b87a00; --denied: #b3261e; --exempt: #7b8794; --shadowed: #7a4fb5; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ecf1; --soft: #a9b4c0; --paper: #12171e; --line: #39434f;
  --allowed: #6fa8e0; --warned: #e3ab3c; --denied: #ff7a70; --exempt: #98a4b1; --shadowed: #b794f0; } }
body { margin: 2rem auto; max-width: 70rem; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1, h2, h3 { line-height: 1.2; } h2 { margin-top: 2.5rem; }
p, figcaption { color: var(--soft); } code, .name { font-family: ui-monospace, monospace; overflow-wrap: anywhere; }
dl.sum { display: flex; flex-wrap: wrap; gap: 1rem 2.5rem; margin: 1rem 0; }
dl.sum dt { color: var(--soft); } dl.sum dd { margin: 0; font-size: 1.6rem; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
td, th { white-space: nowrap; } td.name { min-width: 10rem; white-space: normal; }
.n { text-align: right; font-variant-numeric: tabular-nums; }
figure { margin: 1rem 0; } svg { width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 13px; }
svg .grid { stroke: var(--line); } td svg { width: 8rem; height: .8rem; vertical-align: middle; }
.allowed { fill: var(--allowed); } .warned { fill: var(--warned); } .denied { fill: var(--denied); }
.exempt { fill: var(--exempt); } .shadowed { fill: var(--shadowed); }
ul.key { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: 0; }
ul.key svg { width: .9rem; height: .9rem; vertical-align: -.1rem; margin-right: .4rem; }
pre { padding: 1rem; border: 1px solid var(--line); overflow-x: auto; }
"""


def render_page(report: Report) -> str:
    """Render a report as an HTML page."""
    title = "Replay of " + ", ".join([log.name for log in report.logs])
    parts = [f"<h1>{escape(title)}</h1>", _facts(report)]
    if report.difference is not None:
        parts.append(_compared(report, report.difference))
    most = max([one.outcomes.requests for policy in report.policies for one in policy.timeline], default=0)
    for policy in report.policies:
        parts += [_policy(report, policy, most)]
    if report.suggestions is not None:
        parts.append(f"<h2>Suggested limits</h2>\n<pre tabindex='0'>{escape(report.toml())}</pre>")
    parts.append(_unused(report))
    return (
        "<!DOCTYPE html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join([part for part in parts if part])
        + "\n</main>\n</body>\n</html>\n"
    )


def _facts(report: Report) -> str:
    lines = report.lines
    agents = f"{report.agents:,}" if report.agents_complete else f"more than {report.agents:,}"
    sentences = [
        f"{lines.used:,} requests of {agents} agents, from {report.first} to {report.last}.",
        f"{lines.malformed:,} of {lines.read:,} lines are malformed." if lines.malformed else "",
        f"{lines.skipped:,} lines without a user were left out." if lines.skipped else "",
        f"{lines.late:,} lines are out of order, by up to {lines.late_by:,g} s: they count at the time of the "
        "line before." if lines.late else "",
        *[f"{log.name}: {log.damage}." for log in report.logs if log.damage],
    ]  # fmt: skip
    if report.unknown_actions:
        sentences.append(
            f"Actions that the policy doesn't classify, counted as normal: {', '.join(report.unknown_actions)}."
        )
    return f"<p>{escape(' '.join([one for one in sentences if one]))}</p>"


def _policy(report: Report, policy: PolicyReport, most: int) -> str:
    total = policy.outcomes
    shown = [(name, getattr(total, name)) for name in ("requests", *OUTCOMES)]
    sums = [(name, f"{count:,}") for name, count in shown if count or name in ("requests", "denied")]
    sums += [("denied share", total.denied_share()), ("alerts", f"{policy.alerts:,}")]
    facts = "".join([f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in sums])
    return "\n".join([
        f"<h2>Under <span class='name'>{escape(policy.policy)}</span></h2>",
        f"<dl class='sum'>{facts}</dl>",
        "<h3>When</h3>",
        _timeline(report, policy, most),
        "<h3>By tier</h3>",
        _tiers(policy),
        "<h3>Worst agents</h3>",
        _agents(policy),
        _alerts(policy),
        _accounts(policy),
    ])  # fmt: skip


def _timeline(report: Report, policy: PolicyReport, most: int) -> str:
    step = _WIDTH / max(len(policy.timeline), 1)
    bars = []
    for place, one in enumerate(policy.timeline):
        label = ", ".join([f"{getattr(one.outcomes, name):,} {name}" for name in _STACK[::-1]])
        bottom = float(_HEIGHT)
        rects = []
        for name in _STACK:
            height = getattr(one.outcomes, name) / most * _HEIGHT
            bottom -= height
            if height:
                rects.append(f"<rect class='{name}' {_column(place, step, bottom, height)}/>")
        if rects:
            bars.append(f"<g><title>{one.start}: {label}</title>{''.join(rects)}</g>")
    total = policy.outcomes
    label = f"{total.allowed:,} allowed, {total.warned:,} warned and {total.denied:,} denied, by time"
    rows = [
        [one.start, *[f"{getattr(one.outcomes, name):,}" for name in _STACK[::-1]]]
        for one in policy.timeline
        if one.outcomes.requests
    ]
    return (
        f"<figure><svg viewBox='0 -24 {_WIDTH} {_HEIGHT + 48}' role='img' aria-label='{label}'>"
        f"<line class='grid' x1='0' x2='{_WIDTH}' y1='0' y2='0'/>"
        f"<line class='grid' x1='0' x2='{_WIDTH}' y1='{_HEIGHT}' y2='{_HEIGHT}'/>{''.join(bars)}"
        f"<text x='0' y='-6'>{most:,}</text><text x='0' y='{_HEIGHT + 18}'>{report.first}</text>"
        f"<text x='{_WIDTH}' y='{_HEIGHT + 18}' text-anchor='end'>{report.last}</text></svg>"
        f"<figcaption>Requests per {report.interval:,g} s.</figcaption></figure>{_key(total)}"
        f"<details><summary>The same as a table</summary>{_table(['from', *_STACK[::-1]], rows)}</details>"
    )


def _column(place: int, step: float, top: float, height: float) -> str:
    return f"x='{place * step:.2f}' y='{top:.2f}' width='{max(step - 0.6, 0.4):.2f}' height='{height:.2f}'"


def _key(total: OutcomeCounts) -> str:
    square = "<svg viewBox='0 0 10 10' aria-hidden='true'><rect class='{0}' width='10' height='10'/></svg>"
    items = [f"<li>{square.format(name)}{name}</li>" for name in _STACK[::-1] if getattr(total, name)]
    return f"<ul class='key'>{''.join(items)}</ul>"


def _tiers(policy: PolicyReport) -> str:
    kinds = _seen(policy.outcomes)
    rows = []
    for one in policy.tiers:
        counts = one.outcomes
        numbers = [f"{getattr(counts, name):,}" for name in kinds]
        cells = [one.channel, one.tier, one.limit, _Bar(_parts(counts, counts.requests)), f"{counts.requests:,}"]
        rows.append([*cells, *numbers, counts.denied_share()])
    return _table(["channel", "tier", "limit", "", "requests", *kinds, "denied share"], rows)


def _seen(total: OutcomeCounts) -> list[str]:
    """The outcomes to show: the usual ones, and others that occurred."""
    return [name for name in OUTCOMES if name in ("allowed", "warned", "denied") or getattr(total, name)]


def _agents(policy: PolicyReport) -> str:
    if not policy.worst:
        return "<p>Nobody was denied.</p>"
    kinds, most = _seen(policy.outcomes), max([one.outcomes.requests for one in policy.worst])
    rows = []
    for one in policy.worst:
        counts = one.outcomes
        numbers = [
            f"{number:,}" for number in [counts.requests, *[getattr(counts, name) for name in kinds], one.alerts]
        ]
        cells = [_Name(one.agent), _Bar(_parts(counts, most)), *numbers, counts.denied_share()]
        rows.append([*cells, one.first_denied or "-", one.last_denied or "-"])
    head = ["agent", "", "requests", *kinds, "alerts", "denied share", "first denied", "last denied"]
    short = f" Numbers of denials may be short by up to {policy.agents_short_by:,}." if policy.agents_short_by else ""
    intro = f"Agents with denials, including those of shadow mode: {policy.agents_denied:,}. The worst:{short}"
    return f"<p>{intro}</p>{_table(head, rows)}"


def _alerts(policy: PolicyReport) -> str:
    if not policy.alerts:
        return ""
    rows = [[one.time, _Name(one.agent)] for one in policy.first_alerts]
    table = _table(["time", "agent"], rows)
    return f"<h3>Alerts</h3><p>Alerts that the policy would have raised: {policy.alerts:,}.</p>{table}"


def _accounts(policy: PolicyReport) -> str:
    found = policy.accounts
    if found is None:
        return ""
    shadowed = f", {found.shadowed:,} shadowed" if found.shadowed else ""
    intro = f"Holds: {found.holds:,}, of which {found.denied:,} denied{shadowed}."
    parts = [f"<h3>Accounts</h3><p>{intro} Limits that denied some: {found.limits_denied:,}.</p>"]
    if found.denials:
        rows = [[_Name(one.account), one.resource, one.tool or "-", f"{one.denied:,}"] for one in found.denials]
        parts.append(_table(["account", "resource", "tool", "denied"], rows))
    if found.spent:
        amounts = [[_Name(one.account or "(none)"), one.resource, one.amount] for one in found.spent]
        parts.append(f"<p>Spent since {found.spent_from}:</p>{_table(['account', 'resource', 'amount'], amounts)}")
    if found.refused:
        reasons = [[_Name(reason), f"{count:,}"] for reason, count in found.refused.items()]
        parts.append(f"<p>Holds that the policy can't count:</p>{_table(['reason', 'lines'], reasons)}")
    return "\n".join(parts)


def _compared(report: Report, difference: PolicyDifference) -> str:
    before, after = report.policies
    rows = [["all", "", "", *_change(before.outcomes.denied, after.outcomes.denied)]]
    rows += [[f"{one.channel} {one.tier}", *one.limits(""), *_change(*one.denied())] for one in report.tier_changes()]
    holds = report.hold_changes()
    if holds is not None:
        rows.append(["holds", "", "", *_change(*holds)])
    by = "" if holds is None else " by a tier"
    head = ["", "limit before", "limit after", "denied before", "denied after", "difference"]
    names = [f"<span class='name'>{escape(one.policy)}</span>" for one in report.policies]
    return "\n".join([
        f"<h2>From {names[0]} to {names[1]}</h2>",
        _table(head, rows),
        "<h3>When denials differ</h3>",
        _differences(before, after),
        _changed(f"Newly denied{by}", difference.newly_denied, difference.worst_newly_denied),
        _changed(f"No longer denied{by}", difference.no_longer_denied, difference.worst_no_longer_denied),
    ])  # fmt: skip


def _change(old: int, new: int) -> list[str]:
    return [f"{old:,}", f"{new:,}", f"{new - old:+,}"]


def _differences(before: PolicyReport, after: PolicyReport) -> str:
    """Additional denials above the line, avoided ones below it."""
    changes = [
        (one.start, other.outcomes.denied - one.outcomes.denied)
        for one, other in zip(before.timeline, after.timeline, strict=True)
    ]
    most = max([abs(change) for _, change in changes], default=0) or 1
    step, middle = _WIDTH / max(len(changes), 1), _HEIGHT / 2
    bars = []
    for place, (start, change) in enumerate(changes):
        height = abs(change) / most * middle
        if height:
            top, kind = (middle - height, "denied") if change > 0 else (middle, "allowed")
            at = _column(place, step, top, height)
            bars.append(f"<rect class='{kind}' {at}><title>{start}: {change:+,} denied</title></rect>")
    return (
        f"<figure><svg viewBox='0 -8 {_WIDTH} {_HEIGHT + 16}' role='img' aria-label='Difference in denials by time'>"
        f"<line class='grid' x1='0' x2='{_WIDTH}' y1='{middle}' y2='{middle}'/>{''.join(bars)}"
        f"<text x='0' y='14'>+{most:,}</text><text x='0' y='{_HEIGHT}'>-{most:,}</text></svg>"
        "<figcaption>Above the line: more denials than before. Below it: fewer.</figcaption></figure>"
    )


def _changed(title: str, count: int, agents: Sequence[AgentChange]) -> str:
    rows = [[_Name(one.agent), f"{one.before:,}", f"{one.after:,}"] for one in agents]
    table = _table(["agent", "denied before", "denied after"], rows) if rows else ""
    return f"<h3>{title}</h3><p>Agents: {count:,}.</p>{table}"


def _unused(report: Report) -> str:
    if not report.first_malformed:
        return ""
    rows = [[_Name(one.log), f"{one.line:,}", one.reason, _Name(one.text)] for one in report.first_malformed]
    return f"<h2>Malformed lines</h2>{_table(['log', 'line', 'reason', 'begins'], rows)}"


class _Name(str):
    """Text from a log or a file."""

    __slots__ = ()


class _Bar(str):
    """An SVG bar, which is not escaped."""

    __slots__ = ()


def _parts(counts: OutcomeCounts, whole: int) -> str:
    """A bar of 100 by 10: denied first, as long as its share of the whole."""
    at, rects = 0.0, []
    for name in _STACK[::-1]:
        length = getattr(counts, name) / whole * 100
        rects.append(f"<rect class='{name}' x='{at:.2f}' width='{length:.2f}' height='10'/>" if length else "")
        at += length
    return f"<svg viewBox='0 0 100 10' preserveAspectRatio='none' aria-hidden='true'>{''.join(rects)}</svg>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    kinds = [_kind(cell) for cell in rows[0]] if rows else [""] * len(head)
    titles = "".join([
        f"<th scope='col'{kind}>{escape(title)}</th>" if title else "<td></td>"
        for title, kind in zip(head, kinds, strict=True)
    ])  # fmt: skip
    lines = [f"<tr>{''.join([_cell(cell) for cell in row])}</tr>" for row in rows]
    table = f"<table><thead><tr>{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f"<div class='wide' tabindex='0'>{table}</div>"


def _cell(cell: str) -> str:
    return f"<td{_kind(cell)}>{cell if isinstance(cell, _Bar) else escape(cell)}</td>"


def _kind(cell: str) -> str:
    if isinstance(cell, _Name):
        return " class='name'"
    return " class='n'" if _NUMBER.fullmatch(cell) else ""
