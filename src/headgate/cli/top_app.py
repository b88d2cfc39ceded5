"""The live view of `headgate top`, built with textual."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.coordinate import Coordinate
from textual.events import Resize
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from headgate.cli.answers import seconds
from headgate.cli.hub_api import AgentSummary, HubApi, HubError, HubStatus
from headgate.cli.poller import Poller
from headgate.cli.terminal import truncate
from headgate.cli.top_accounts import USAGE_WIDTH, AccountsScreen, narrow_notice, usage_bar
from headgate.errors import printable

_TITLES: Final = {
    "connected": "", "name": "agent ", "used": "used ", "left": "left", "bucket": "bucket", "violations": "viol",
    "hour": "hour", "wait": "wait", "marks": "",
}  # fmt: skip
_WIDTHS: Final = (2, 0, USAGE_WIDTH, 10, 12, 5, 5, 6, 2)  # of the columns; the name takes the rest
_NARROWEST: Final = 12

SORT_KEYS: Final[dict[str, Callable[[AgentSummary], Any]]] = {
    "name": lambda agent: agent.name,
    "used": lambda agent: -1.0 if agent.used is None else agent.used,
    "violations": lambda agent: agent.violations,
    "hour": lambda agent: agent.last_hour,
    "wait": lambda agent: agent.wait_ms,
}
"""The columns that rows can be sorted by."""

HELP: Final = """\
n u v h w  sort by name, usage, violations in a row, violations
           of the last hour, wait; again: reverse the order
/          filter agents by name; Esc shows all
e          exempt the agent, or end its exemption
r          reset the agent's violations
a          show accounts, the worst first; again: agents
p          pause or resume
↑ ↓        select an agent
q          quit

● is connected, ○ is not. The bar is the bucket nearest to its
limit: green below 50 %, yellow up to 80 %, red above. The wait
is advised; it is enforced only with backoff.enforce.
B: blocked. A: an account denied its last hold. E: exempt.
O: override. Keys e, r and a require the admin token.

Press any key to close."""


@dataclass
class StatusPolled(Message):
    """The status of the hub, or the reason why there is none."""

    result: HubStatus | HubError


@dataclass
class ActionFinished(Message):
    """The result of an action at the hub."""

    text: str
    success: bool


class ConfirmScreen(ModalScreen[bool]):
    """Asks a yes-or-no question."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes"),
        Binding("n,escape,q", "answer(False)", "no"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        yield Vertical(Static(Text(self._question)), Static(Text("\ny: yes    n: no")), id="box")

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)


class HelpScreen(ModalScreen[None]):
    """Lists the keys."""

    def compose(self) -> ComposeResult:
        yield Vertical(Static(Text(HELP)), id="box")

    def on_key(self) -> None:
        self.dismiss(None)


class AgentDataTable(DataTable[Text]):
    """The table of agents. Home and End select the first and the last row."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("home", "scroll_top", "first", show=False),
        Binding("end", "scroll_bottom", "last", show=False),
    ]


class TopApp(App[int]):
    """The live view."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: auto; padding: 0 1; }
    #table { height: 1fr; scrollbar-size-vertical: 1; overflow-x: hidden; }
    #table > .datatable--cursor { background: $primary 30%; text-style: bold; }
    #filter { display: none; height: 1; border: none; padding: 0 1; }
    #filter.shown { display: block; }
    ConfirmScreen, HelpScreen { align: center middle; }
    #box { width: auto; max-width: 100%; height: auto; max-height: 100%; padding: 1 2; border: solid $primary;
           background: $surface; }
    #box Static { width: auto; max-width: 100%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "order('name')", "name", show=False),
        Binding("u", "order('used')", "used", show=False),
        Binding("v", "order('violations')", "violations", show=False),
        Binding("h", "order('hour')", "last hour", show=False),
        Binding("w", "order('wait')", "wait", show=False),
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("escape", "show_all", "all", show=False),
        Binding("e", "exempt", "exempt"),
        Binding("r", "reset", "reset"),
        Binding("a", "accounts", "accounts"),
        Binding("p", "pause", "pause"),
        Binding("question_mark", "help", "help", key_display="?"),
        Binding("q", "end", "quit"),
        Binding("ctrl+c", "end", "quit", show=False, priority=True),
    ]

    def __init__(self, hub: HubApi, interval: float = 1.0) -> None:
        super().__init__()
        self._hub, self._interval = hub, interval
        self._poller = Poller(hub.url, interval, hub.status, lambda result: self.post_message(StatusPolled(result)))
        self._status: HubStatus | None = None
        self._shown: list[AgentSummary] = []
        self._filter = ""
        self._order, self._descending = "used", True
        self._paused = False
        self._error = ""
        self._error_since = 0.0

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        # The selected row keeps its colours.
        yield AgentDataTable(id="table", cursor_type="row", cell_padding=0, cursor_foreground_priority="renderable")
        yield Input(id="filter", placeholder="part of a name")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self._head = self.query_one("#head", Static)
        self._table = self.query_one("#table", AgentDataTable)
        self._field = self.query_one("#filter", Input)
        self._table.focus()
        self._lay_out(self.size.width)
        self._poller.start()

    def on_unmount(self) -> None:
        self._poller.stop()

    def on_resize(self, event: Resize) -> None:
        if self._poller.is_alive():
            self._lay_out(event.size.width)

    def _lay_out(self, width: int) -> None:
        """Rebuild the table for the width of the terminal."""
        self._width, self._room = width, max(width - sum(_WIDTHS) - 1, _NARROWEST)  # 1: the scroll bar
        selected = self._selected()
        self._table.clear(columns=True)
        for title, wide in zip(self._titles(), _WIDTHS, strict=True):
            self._table.add_column(title, width=wide or self._room)
        self._shown = []
        self._show()
        self._select(selected)

    # Messages --------------------------------------------------------------------------------------------------------

    def on_status_polled(self, message: StatusPolled) -> None:
        result = message.result
        if isinstance(result, HubError):
            if not self._error:
                self._error_since = time.monotonic()
            self._error = str(result)
        else:
            update = self._status is None or not self._paused
            if not self._error and (not update or result == self._status):
                return  # nothing has changed
            self._error = ""
            if update:
                self._status = result
        self._show()

    def on_action_finished(self, message: ActionFinished) -> None:
        self.notify(message.text, severity="information" if message.success else "error", markup=False)
        self._poller.poll_now()

    # Display ---------------------------------------------------------------------------------------------------------

    def _show(self) -> None:
        """Redraw everything; of the table, only the rows that have changed."""
        table, before, selected = self._table, self._shown, self._selected()
        for column, title in zip(table.ordered_columns, self._titles(), strict=True):
            if column.label != title:
                column.label = title
                table.sort(key=lambda _: 0)  # keeps the order of the rows, and redraws the titles
        rows = self._rows()
        for number, agent in enumerate(rows):
            if number >= len(before):
                table.add_row(*_cells(agent, self._room))
            elif agent != before[number]:
                for place, cell in enumerate(_cells(agent, self._room)):
                    table.update_cell_at(Coordinate(number, place), cell)
        for number in range(len(before) - 1, len(rows) - 1, -1):
            table.remove_row(table.coordinate_to_cell_key(Coordinate(number, 0)).row_key)
        self._shown = rows
        if table.cursor_row > 0:  # the cursor follows its agent, except on the first row
            self._select(selected)
        self._head.update(self._summary())

    def _titles(self) -> list[Text]:
        arrow = "▼" if self._descending else "▲"
        return [Text(title + arrow if name == self._order else title) for name, title in _TITLES.items()]

    def _rows(self) -> list[AgentSummary]:
        agents = [] if self._status is None else self._status.agents
        found = sorted([one for one in agents if self._filter in one.name.casefold()], key=lambda one: one.name)
        return sorted(found, key=SORT_KEYS[self._order], reverse=self._descending)

    def _summary(self) -> Text:
        status, head = self._status, Text()
        head.append("headgate top ", "bold").append(f"{self._hub.url}  ")
        if self._error:
            head.append(f"away for {time.monotonic() - self._error_since:.0f} s; retrying every second\n", "bold red")
            head.append(self._error, "red")
            return head if status is None else head.append("\nshowing old data")
        if status is None:
            return head.append("connecting …\n\n")
        head.append("paused" if self._paused else "live", "bold yellow" if self._paused else "bold green")
        head.append(f"  {len(self._shown):,} of {len(status.agents):,} agents")
        head.append(narrow_notice(self._width))
        head.append(f"\n{status.rate:,.1f} checks/s, {status.denied:.1%} denied; {status.exempt:,} exempt; ")
        head.append(f"{status.blocked:,} blocked", "bold red" if status.blocked else "").append("; store: ")
        head.append(printable(status.store), "bold red" if status.store in ("away", "lost") else "")
        head.append(f"\n{status.violations:,} violations in the last hour")
        worst = [f"{truncate(printable(name), 20)} {count:,}" for name, count in status.worst]
        head.append(f": {', '.join(worst)}" if worst else "").append("; open alerts: ")
        head.append(f"{status.alerts:,}", "bold red" if status.alerts else "")
        if status.address_denials:
            head.append(f"\n{status.address_denials:,} denials by address in the last hour", "yellow")
            denied = [
                f"{truncate(printable(address), 24)} {truncate(printable(purpose), 14)} {count:,}"
                for address, purpose, count in status.denied_addresses
            ]
            head.append(f": {', '.join(denied)}" if denied else "")
        return head

    def _selected(self) -> AgentSummary | None:
        row = self._table.cursor_row
        return self._shown[row] if 0 <= row < len(self._shown) else None

    def _select(self, agent: AgentSummary | None) -> None:
        names = [one.name for one in self._shown]
        if agent is not None and agent.name in names:
            self._table.move_cursor(row=names.index(agent.name))

    # Keys ------------------------------------------------------------------------------------------------------------

    def action_order(self, order: str) -> None:
        self._descending = not self._descending if order == self._order else order != "name"
        self._order = order
        self._show()

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        order = list(_TITLES)[event.column_index]
        if order in SORT_KEYS:
            self.action_order(order)

    def action_filter(self) -> None:
        self._field.add_class("shown")
        self._field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._filter = event.value.casefold()
        self._show()

    def on_input_submitted(self) -> None:
        self._table.focus()

    def action_show_all(self) -> None:
        self._field.value = ""
        self._field.remove_class("shown")
        self._table.focus()

    def action_pause(self) -> None:
        self._paused = not self._paused
        if not self._paused:
            self._poller.poll_now()
        self._show()

    def action_help(self) -> None:
        self.push_screen(HelpScreen())

    def action_accounts(self) -> None:
        self.push_screen(AccountsScreen(self._hub, self._interval))

    def action_end(self) -> None:
        self.exit(0)

    def action_exempt(self) -> None:
        agent, hub = self._selected(), self._hub
        if agent is None:
            return
        name = printable(agent.name)
        if agent.exempt:
            self._ask(f"End the exemption of {name}?", hub.remove_exemption, agent, f"{name} is no longer exempt")
        else:
            self._ask(f"Exempt {name} from all limits?", hub.add_exemption, agent, f"{name} is exempt")

    def action_reset(self) -> None:
        agent = self._selected()
        if agent is not None:
            name = printable(agent.name)
            question, done = f"Reset the violations of {name}?", f"violations of {name} reset"
            self._ask(question, self._hub.reset_violations, agent, done)

    def _ask(self, question: str, action: Callable[[str], object], agent: AgentSummary, done: str) -> None:
        """Run an action for an agent in a thread, if the answer is yes."""

        def answered(yes: bool | None) -> None:
            if yes:
                threading.Thread(target=self._act, args=(action, agent.name, done), daemon=True).start()

        self.push_screen(ConfirmScreen(question), answered)

    def _act(self, action: Callable[[str], object], agent: str, done: str) -> None:
        try:
            action(agent)
        except Exception as error:  # noqa: BLE001 - whatever it was, it is shown
            self.post_message(ActionFinished(str(error) or repr(error), False))
        else:
            self.post_message(ActionFinished(done, True))


def _cells(agent: AgentSummary, room: int) -> list[Text]:
    unlimited = Text("-" if not agent.exempt else "no limit")
    wait = "".join(seconds(agent.wait_ms).split()[:2]) if agent.wait_ms else ""  # its largest unit
    return [
        Text("● " if agent.connected else "○ ", "green" if agent.connected else "dim"),
        Text(truncate(printable(agent.name), room - 1)),
        unlimited if agent.used is None else usage_bar(agent.used),
        Text(truncate(agent.left, 9)),
        Text(truncate(printable(agent.bucket), 11)),
        Text(f"{agent.violations:>4}", "red" if agent.violations else "dim"),
        Text(f"{agent.last_hour:>4}", "red" if agent.last_hour else "dim"),
        Text(f"{wait:>5}"),
        Text("B" if agent.blocked else _letters(agent), "bold"),
    ]


def _letters(agent: AgentSummary) -> str:
    marks = ("A", agent.denied_by_account), ("E", agent.exempt), ("O", agent.override)
    return "".join([letter for letter, is_set in marks if is_set])
