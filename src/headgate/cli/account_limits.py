"""Limits of accounts: as arguments, such as usd='500/calendar month', and as rows of a table."""

import argparse
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from headgate.cli.answers import duration_text, number, shown
from headgate.cli.hub_commands import Rows
from headgate.cli.parser import UsageError
from headgate.cli.terminal import Cell, Column, usage_cell
from headgate.limits.units import amount_text

COLUMNS: Final = (
    Column("account"), Column("plan"), Column("resource"), Column("limit"), Column("spent", right=True),
    Column("held", right=True), Column("left", right=True), Column("used", right=True), Column("resets", right=True),
)  # fmt: skip


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the arguments RESOURCE=LIMIT, and the option --tool."""
    parser.add_argument(
        "limits",
        type=_limit,
        nargs="+",
        metavar="RESOURCE=LIMIT",
        help="resource, such as usd, tokens, requests or slots, and its limit as in the policy",
    )
    _add_tool(parser)


def add_resources(parser: argparse.ArgumentParser) -> None:
    """Add the arguments RESOURCE, and the option --tool."""
    parser.add_argument("resources", nargs="*", metavar="RESOURCE", help="resource, such as usd (default: all of it)")
    _add_tool(parser)


def _add_tool(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tool", metavar="TOOL", help="limit one tool only")


def given_limits(options: argparse.Namespace) -> dict[str, Any]:
    """The limits as the hub takes them."""
    limits = dict(options.limits)
    if len(limits) < len(options.limits):
        names = " ".join([one[0] for one in options.limits])
        raise UsageError(f"RESOURCE=LIMIT: expected each resource once, got {names}")
    return _of_tool(limits, options.tool)


def removed_limits(options: argparse.Namespace) -> dict[str, Any]:
    """The limits to take back, as the hub takes them; none for all."""
    if options.tool is not None and not options.resources:
        raise UsageError("--tool: expected the resources of the tool, got none")
    return _of_tool(dict.fromkeys(options.resources), options.tool) if options.resources else {}


def _of_tool(limits: Mapping[str, Any], tool: str | None) -> dict[str, Any]:
    return dict(limits) if tool is None else {"tools": {tool: dict(limits)}}


def _limit(text: str) -> tuple[str, str]:
    resource, equals, limit = text.partition("=")
    if not equals or not resource.isidentifier() or not limit.strip():  # the hub knows the resources of its policy
        raise argparse.ArgumentTypeError(
            f"expected a resource and a limit, such as usd='500/calendar month', got {text!r}"
        )
    return resource, limit


def amount(value: Any) -> str:
    """An amount of an answer, without zeros at its end."""
    text = shown(value)
    try:
        found = Decimal(text)
    except InvalidOperation:
        raise ValueError from None
    if not found.is_finite() or len(text) > 60:
        raise ValueError
    digits = amount_text(found)
    return digits.rstrip("0").rstrip(".") if "." in text else digits


def resource_text(resource: Any, tool: Any = "") -> str:
    """A resource of an answer, and the tool for which it is limited."""
    by = shown(tool)
    return f"{shown(resource)} by {by}" if by else shown(resource)


def limit_rows(account: Mapping[str, Any]) -> Rows:
    """The limits of an account, a row each; one row if it has none."""
    path, plan = shown(account["path"]), shown(account["plan"]) or "-"
    rows: Rows = [[path, plan, *_cells(one)] for one in account["limits"]]
    return rows or [[path, plan, "-", "unlimited", "", "", "", "", ""]]


def _cells(one: Mapping[str, Any]) -> Iterator[str | Cell]:
    yield resource_text(one["resource"], one["tool"])
    yield shown(one["limit"])
    yield from [amount(one[name]) for name in ("spent", "held", "left")]
    yield usage_cell(number(one["used"]))
    yield duration_text(one["resets_after"])


def table_rows(tables: Mapping[str, Any]) -> Rows:
    """Limits by name, as a policy has them: a row each."""
    return [
        [shown(name), resource, shown(limit)] for name, table in tables.items() for resource, limit in _limits(table)
    ]


def _limits(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for resource, limit in table.items():
        if resource == "tools":
            yield from [
                (resource_text(one, tool), text) for tool, limits in limit.items() for one, text in limits.items()
            ]
        else:
            yield resource_text(resource), limit
