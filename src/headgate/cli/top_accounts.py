"""The accounts in the live view of `headgate top`: every limit, the worst first."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.message import Message
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Static

from headgate.cli.account_limits import amount, resource_text
from headgate.cli.answers import duration_text, number, shown
from headgate.cli.hub_api import HubApi, HubError
from headgate.cli.poller import Poller
from headgate.cli.terminal import GREEN, RED, YELLOW, display_width, truncate, usage_colour

MOST_ACCOUNTS: Final = 300
"""Accounts that are shown."""
_BAR: Final = 10  # columns
USAGE_WIDTH: Final = _BAR + 6
"""Columns of a `usage_bar`, and a gap."""
_STYLES: Final = {GREEN: "green", YELLOW: "yellow", RED: "red"}
_COLUMNS: Final = (("used", USAGE_WIDTH), ("left", 12), ("of", 10), ("resets", 11))
"""The columns beside the account and the resource, which share the rest."""
_NARROWEST: Final = 12
_RESOURCE: Final = 14  # the least columns of a resource
NEEDED: Final = 80
"""Columns that a terminal needs: on a narrower one, something isn't shown."""


def usage_bar(used: float) -> Text:
    """The share used of a bucket or a limit, as a bar and a percentage."""
    filled, style = min(max(round(used * _BAR), 0), _BAR), _STYLES[usage_colour(used)]
    return Text("█" * filled, style).append("░" * (_BAR - filled), "dim").append(f"{used:>5.0%}", style)


def narrow_notice(width: int) -> Text:
    """The note on a terminal of so many columns, if they don't suffice."""
    return Text(f"\nneeds {NEEDED} columns, not {width}" if width < NEEDED else "", "bold red")


@dataclass(frozen=True)
class AccountRow:
    """One limit of an account."""

    account: str
    resource: str
    used: float
    left: str
    amount: str
    resets: str

    @classmethod
    def parse(cls, path: str, data: Mapping[str, Any]) -> "AccountRow":
        return cls(
            account=path,
            resource=resource_text(data["resource"], data["tool"]),
            used=number(data["used"]),
            left=amount(data["left"]),
            amount=amount(data["amount"]),
            resets=duration_text(data["resets_after"]),
        )


@dataclass
class AccountsPolled(Message):
    """The limits of accounts, the worst first, or the reason why there are none."""

    result: list[AccountRow] | HubError


def account_rows(hub: HubApi) -> list[AccountRow]:
    """The limits of a hub's accounts, the worst first."""
    found = hub.accounts(most=MOST_ACCOUNTS)
    rows = hub.parse(lambda: [AccountRow.parse(shown(one["path"]), limit) for one in found for limit in one["limits"]])
    return sorted(rows, key=lambda row: (-row.used, row.account, row.resource))


class AccountsScreen(Screen[None]):
    """A table of accounts."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("a", "back", "agents"),
        Binding("escape", "back", "agents", show=False),
        Binding("q", "app.end", "quit"),
    ]

    def __init__(self, hub: HubApi, interval: float) -> None:
        super().__init__()
        self._hub = hub
        self._poller = Poller(
            hub.url, interval, partial(account_rows, hub), lambda result: self.post_message(AccountsPolled(result))
        )
        self._rows: list[AccountRow] = []
        self._width = NEEDED

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield DataTable[Text](id="table", cursor_type="row", cell_padding=0, cursor_foreground_priority="renderable")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self._width = self.app.size.width
        self._table = self.query_one(DataTable)
        self._head = self.query_one("#head", Static)
        self._head.update(Text("headgate top ", "bold").append(f"{self._hub.url}  accounts …"))
        self._table.focus()
        self._poller.start()

    def on_unmount(self) -> None:
        self._poller.stop()

    def on_resize(self, event: Resize) -> None:
        self._width = event.size.width
        if self._rows:
            self._show()

    def on_accounts_polled(self, message: AccountsPolled) -> None:
        head = Text("headgate top ", "bold").append(f"{self._hub.url}  ")
        if isinstance(message.result, HubError):
            self._head.update(head.append(f"accounts\n{message.result}", "red"))
            return
        accounts = len({row.account for row in message.result})
        head.append("accounts", "bold green").append(f"  {accounts:,} with limits, the worst first")
        self._head.update(head.append(narrow_notice(self._width)))
        if message.result != self._rows or not self._table.columns:
            self._rows = message.result
            self._show()

    def _show(self) -> None:
        table, selected = self._table, self._table.cursor_row
        room = max(self._width - sum([wide for _, wide in _COLUMNS]) - 1, _NARROWEST + _RESOURCE)  # 1: scroll bar
        account, resource = [
            1 + max([display_width(text) for text in texts], default=0)
            for texts in ([row.account for row in self._rows], [row.resource for row in self._rows])
        ]
        resource = max(min(resource, room - account), _RESOURCE)
        table.clear(columns=True)
        for title, wide in (("account", room - resource), ("resource", resource), *_COLUMNS):
            table.add_column(title, width=wide)
        for row in self._rows:
            table.add_row(*_cells(row, room - resource, resource))
        table.move_cursor(row=min(selected, max(len(self._rows) - 1, 0)))

    def action_back(self) -> None:
        self.dismiss(None)


def _cells(row: AccountRow, account: int, resource: int) -> list[Text]:
    return [
        Text(truncate(row.account, account - 1)),
        Text(truncate(row.resource, resource - 1)),
        usage_bar(row.used),
        Text(truncate(row.left, 11)),
        Text(truncate(row.amount, 9)),
        Text(row.resets),
    ]
