"""`headgate usage`: what accounts have used."""

import argparse
import re
from calendar import monthrange
from datetime import date
from typing import Any

from headgate.cli.account_limits import amount
from headgate.cli.answers import shown
from headgate.cli.hub_commands import note_unknown_account, print_answer
from headgate.cli.hub_options import add_hub_options, hub_from
from headgate.cli.parser import Commands, UsageError, add_command
from headgate.cli.terminal import Column, table_text
from headgate.errors import printable


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "usage",
        _run,
        "show the usage of accounts",
        "Show the usage of one account, or of all, by resource and by the groups of --by: day or month; "
        "account, or a level above the agents, such as team; agent; tool. Usage is kept for 13 months.",
        "headgate usage",
        "headgate usage acme --from 2026-11-01 --by day,agent",
        "headgate usage --month 2026-10 --by month,team --csv > bill.csv",
        json=True,
    )
    parser.add_argument("path", nargs="?", metavar="PATH", help="path of an account or an agent (default: all)")
    parser.add_argument("--from", dest="first", type=_day, metavar="DAY", help="first day, such as 2026-11-01")
    parser.add_argument("--to", dest="last", type=_day, metavar="DAY", help="last day (default: today)")
    parser.add_argument("--month", type=_month, metavar="MONTH", help="one month, such as 2026-10, instead of days")
    parser.add_argument("--by", metavar="GROUPS", help="groups with commas between them (default: month,resource)")
    parser.add_argument("--csv", action="store_true", help="print CSV, for a spreadsheet")
    add_hub_options(parser)


def _day(text: str) -> str:
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a day such as 2026-11-01, got {text!r}") from None


def _month(text: str) -> tuple[str, str]:
    """The first and the last day of a month."""
    try:
        if not re.fullmatch(r"\d{4}-\d\d", text, re.ASCII):
            raise ValueError
        first = date.fromisoformat(f"{text}-01")
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a month such as 2026-10, got {text!r}") from None
    return first.isoformat(), first.replace(day=monthrange(first.year, first.month)[1]).isoformat()


def _run(options: argparse.Namespace) -> int:
    if options.csv and options.json:
        raise UsageError("--csv: expected it without --json")
    if options.month is not None:
        if options.first is not None or options.last is not None:
            raise UsageError("--month: expected it without --from and --to")
        options.first, options.last = options.month
    given = {"account": options.path, "from": options.first, "to": options.last, "by": options.by}
    query = {name: value for name, value in given.items() if value is not None}
    hub = hub_from(options)
    if options.csv:
        for line in hub.usage_csv(query).splitlines():
            print(printable(line))
        return 0
    answer = hub.usage(query)
    code = print_answer(options, hub, answer, lambda: _text(answer))
    if not options.json and not answer["totals"] and options.path is not None:
        note_unknown_account(hub, options.path)
    return code


def _text(answer: dict[str, Any]) -> str:
    by = [shown(group) for group in answer["by"]]
    columns = [*map(Column, by), Column("amount", right=True)]
    rows = [
        [*[shown(one["group"][group]) or "-" for group in answer["by"]], amount(one["amount"])]
        for one in answer["totals"]
    ]
    nothing = f"nothing was used from {shown(answer['from'])} to {shown(answer['to'])}"
    return table_text(columns, rows) if rows else nothing
