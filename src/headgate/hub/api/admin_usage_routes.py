"""Admin routes: what was used, as JSON and as CSV."""

from datetime import date
from typing import Annotated, Final

from msgspec import Meta, Struct, field

from headgate.errors import refuse
from headgate.gate import Gate
from headgate.gate.usage import DEFAULT_GROUPS, UsageTotal, usage_csv, usage_groups
from headgate.hub.api.agent_routes import AccountPath
from headgate.hub.api.responses import ApiResponse
from headgate.hub.api.routing import Body, Call, admin_route
from headgate.limits.units import amount_text

MAX_TOTALS: Final = 10_000
"""Totals of usage in one answer."""
_MONTHS: Final = 13  # that are shown unless the query names the first day
_CSV: Final = "text/csv; charset=utf-8"


class UsageQuery(Body):
    first: date | None = field(name="from", default=None)
    """The first day; by default that of the oldest of 13 months."""
    last: date | None = field(name="to", default=None)
    """The last day; by default today."""
    account: AccountPath = ""
    by: Annotated[str, Meta(max_length=500)] = ",".join(DEFAULT_GROUPS)
    """day or month; account or a level above the agents; agent; tool; resource; several with commas."""


class GroupTotal(Struct):
    group: dict[str, str]
    amount: str


class UsageTotals(Struct):
    first: date = field(name="from")
    last: date = field(name="to")
    zone: str
    by: list[str]
    totals: list[GroupTotal]


async def _usage(call: Call, gate: Gate) -> UsageTotals:
    first, last, by, totals = await _totals(call, gate)
    found = [GroupTotal(dict(zip(by, one.group, strict=True)), amount_text(one.amount)) for one in totals]
    return UsageTotals(first, last, gate.effective.accounts.zone, list(by), found)


async def _usage_csv(call: Call, gate: Gate) -> ApiResponse:
    _, _, by, totals = await _totals(call, gate)
    name = [(b"content-disposition", b'attachment; filename="usage.csv"')]
    return ApiResponse(200, usage_csv(by, totals).encode(), name, _CSV)


async def _totals(call: Call, gate: Gate) -> tuple[date, date, tuple[str, ...], list[UsageTotal]]:
    query, accounts = call.query, gate.effective.accounts
    kept, today = gate.usage_days()
    month = today.year * 12 + today.month - _MONTHS
    first = max(date(month // 12, month % 12 + 1, 1), kept) if query.first is None else query.first
    last = max(today, first) if query.last is None else query.last
    by = usage_groups(query.by.split(","), accounts)
    if not kept <= first <= last:
        refuse("from", f"a day from {kept}, the first that is kept, to {last}", str(first))
    if last.year > today.year + 1:
        refuse("to", f"a day up to the end of {today.year + 1}", str(last))
    totals = await gate.ausage_totals(first, last, query.account or None, by)
    if len(totals) > MAX_TOTALS:
        refuse(
            "usage",
            f"at most {MAX_TOTALS:,} totals: choose an account, fewer days, or fewer groups",
            f"{len(totals):,}",
        )
    return first, last, by, totals


ROUTES: Final = (
    admin_route(
        "GET", "/api/admin/usage", _usage,
        "usage, added up by resource and other groups", query=UsageQuery,
    ),
    admin_route("GET", "/api/admin/usage.csv", _usage_csv, "the same as CSV", query=UsageQuery, media=_CSV),
)  # fmt: skip
