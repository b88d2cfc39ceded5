"""The page of one agent in the terminal, for `headgate agents AGENT`: its state, its buckets, and what was denied."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from headgate.cli.account_limits import amount, resource_text
from headgate.cli.answers import local_time, number, seconds, shown, whole
from headgate.cli.hub_api import AgentSummary
from headgate.cli.hub_commands import Rows
from headgate.cli.terminal import Column, table_text, usage_cell
from headgate.gate.accounts import NO_ACCOUNT

_LABEL: Final = 14  # columns

_BUCKETS: Final = [
    Column("bucket"), Column("used", right=True), Column("left", right=True), Column("limit"), Column("own"),
]  # fmt: skip
_ACTIONS: Final = [
    Column("denied action"), Column("tier"), Column("last minute", right=True),
    Column("last hour", right=True),
]  # fmt: skip
_ACCOUNTS: Final = [
    Column("account"), Column("resource"), Column("limit"), Column("held", right=True),
    Column("left", right=True), Column("used", right=True),
]  # fmt: skip
_DENIALS: Final = [
    Column("last denials"), Column("action"), Column("tier"), Column("address"),
    Column("wait", right=True), Column("times", right=True),
]  # fmt: skip


def page_text(data: dict[str, Any]) -> str:
    """The facts of an answer about one agent, and below them the tables that aren't empty. All is fit to be printed."""
    facts = [f"{label:<{_LABEL}}{text}" for label, text in _facts(data, AgentSummary.parse(data))]
    tables = (
        (_BUCKETS, _buckets(data)),
        (_ACCOUNTS, _accounts(data)),
        (_ACTIONS, _actions(data)),
        (_DENIALS, _denials(data)),
    )
    return "\n".join([*facts, *[f"\n{table_text(columns, rows)}" for columns, rows in tables if rows]])


def _facts(data: dict[str, Any], agent: AgentSummary) -> Iterator[tuple[str, str]]:
    yield "agent", shown(agent.name)
    state = ["connected" if agent.connected else "not connected"]
    if data["rate_limited"]:
        count = "1 violation" if agent.violations == 1 else f"{agent.violations} violations"
        quiet = f" for {seconds(whole(data['quiet_left_ms']))}" if "quiet_left_ms" in data else ""  # of an older hub
        state.append(f"gets no new tasks{quiet} ({count})")
        state += [f"advised wait {agent.wait}"] if agent.wait_ms else []
    state += ["an account above it denied its last hold"] if agent.denied_by_account else []
    state += ["exempt from all limits"] if agent.exempt else []
    yield "state", "; ".join(state)
    if data["blocked"]:
        until = data["blocked_until"]
        reason = shown(data["blocked_reason"])
        end = "until it is unblocked" if until is None else f"until {local_time(until)}"
        yield "blocked", f"{end}: {reason}" if reason else end
    at = "" if data["registered_at"] is None else local_time(data["registered_at"])
    registered = at or ("yes" if data["registered"] else "no")
    yield "registered", registered + ("; its token is revoked" if data["revoked"] else "")
    if data["role"]:
        yield "role", shown(data["role"])
    minute, hour = [sum([whole(one[key]) for one in data["denied_actions"]]) for key in ("last_minute", "last_hour")]
    yield "denied", f"{minute} in the last minute, {hour} in the last hour"
    yield "violations", f"{agent.last_hour} in the last hour, {agent.violations} in a row"
    yield "override", _override(data) or "none"
    path = shown(data["account"])
    if path and not path.startswith(f"{NO_ACCOUNT}/"):
        yield "account", path.rpartition("/")[0]
    if data["holds"]:
        states = [shown(one["state"]) for one in data["holds"]]
        expired = f", {states.count('expired')} expired" if "expired" in states else ""
        yield "holds", f"{states.count('open')} open{expired}, see headgate holds list {path}"
    yield "sessions", f"{whole(data['sessions'])} open, signals of each: {shown(data['session_limit'])}"
    held = data["tasks"]["held"]
    created = whole(data["tasks"]["created"])
    yield "tasks", f"{'holds none' if held is None else f'holds {shown(held)}'}, created {created} unfinished"
    for one in data["connections"]:
        yield "connection", f"{shown(one['kind'])} from {shown(one['address'])} since {local_time(one['since'])}"


def _override(data: dict[str, Any]) -> str:
    own = [
        f"{shown(channel)} {shown(tier)}={shown(limit)}"
        for channel, tiers in data["override"].items()
        for tier, limit in tiers.items()
    ]
    session = data["session_override"]
    return ", ".join(own if session is None else [*own, f"session={shown(session)}"])


def _buckets(data: dict[str, Any]) -> Rows:
    return [
        [
            f"{shown(one['channel'])} {shown(one['tier'])}",
            usage_cell(number(one["used"])),
            f"{whole(one['remaining'])}/{whole(one['capacity'])}",
            shown(one["limit"]),
            "override" if one["own"] else "",
        ]
        for one in data["buckets"]
    ]


def _accounts(data: dict[str, Any]) -> Rows:
    return [
        [
            shown(one["account"]),
            resource_text(one["resource"], one["tool"]),
            shown(one["limit"]),
            amount(one["held"]),
            amount(one["left"]),
            usage_cell(number(one["used"])),
        ]
        for one in data["account_limits"]
    ]


def _actions(data: dict[str, Any]) -> Rows:
    return [
        [
            f"{shown(one['channel'])} {shown(one['action'])}",
            shown(one["tier"]) or "-",
            str(whole(one["last_minute"])),
            str(whole(one["last_hour"])),
        ]
        for one in data["denied_actions"]
    ]


def _denials(data: dict[str, Any]) -> Rows:
    """The last denials; those that look the same are one row."""
    rows = [
        (
            local_time(one["at"]),
            f"{shown(one['channel'])} {shown(one['action'])}",
            shown(one["tier"]) or "-",
            shown(one["address"]) or "-",
            seconds(whole(one["retry_after_ms"])),
        )
        for one in data["denials"]
    ]
    return [[*row, str(times)] for row, times in Counter(rows).items()]
