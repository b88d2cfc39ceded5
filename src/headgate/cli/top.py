"""`headgate top`: the agents of a hub, live in the terminal."""

import threading
import time
from collections.abc import Callable
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

from headgate.cli.hub_api import Card, Fleet, Hub, HubError, of_agent
from headgate.cli.terminal import GREEN, RED, YELLOW, cut, harmless, heat
from headgate.errors import HeadgateError

_BAR: Final = 10  # columns
_STYLES: Final = {GREEN: "green", YELLOW: "yellow", RED: "red"}
_TITLES: Final = {
    "connected": "", "name": "agent ", "used": "used ", "left": "left", "bucket": "bucket", "violations": "viol",
    "hour": "hour", "wait": "wait", "marks": "",
}  # fmt: skip
_WIDTHS: Final = (2, 0, _BAR + 6, 10, 12, 5, 5, 6, 2)  # of the columns; the name has what is left
_NARROWEST: Final = 12

ORDERS: Final[dict[str, Callable[[Card], Any]]] = {
    "name": lambda card: card.name,
    "used": lambda card: -1.0 if card.used is None else card.used,
    "violations": lambda card: card.violations,
    "hour": lambda card: card.last_hour,
    "wait": lambda card: card.wait_ms,
}
"""What the rows can be sorted by."""

HELP: Final = """\
n u v h w  sort by name, usage, violations in a row, those of
           the last hour, wait; again: the other way round
/          show agents with this in their name; Esc shows all
e          exempt the agent, or hold it to its limits again
r          forget the agent's violations
p          pause, and go on
↑ ↓        choose an agent
q          quit

● is connected, ○ is not. The bar is the bucket nearest to its
limit: green below a half, yellow up to 80 %, red above.
E: exempt. O: has limits of its own. To exempt and to reset,
the token has to be the admin's.

Any key closes this."""


class Heard(Message):
    """What a hub has said, or why it hasn't."""

    def __init__(self, found: Fleet | HubError) -> None:
        super().__init__()
        self.found: Final = found


class Done(Message):
    """Something was done at the hub, or wasn't."""

    def __init__(self, said: str, good: bool) -> None:
        super().__init__()
        self.said: Final = said
        self.good: Final = good


class Watch(threading.Thread):
    """Asks a hub how the agents stand, again and again, and hands on what it hears."""

    def __init__(self, hub: Hub, every: float, tell: Callable[[Heard], object]) -> None:
        super().__init__(daemon=True)  # whoever quits doesn't wait for a hub that doesn't answer
        self._hub, self._every, self._tell = hub, every, tell
        self._now = threading.Event()
        self._ended = False

    def run(self) -> None:
        while not self._ended:
            self._now.clear()
            found: Fleet | HubError
            try:
                found = self._hub.fleet()
            except HubError as error:
                found = error
            self._tell(Heard(found))
            self._now.wait(self._every)

    def hurry(self) -> None:
        """Ask now."""
        self._now.set()

    def end(self) -> None:
        self._ended = True
        self._now.set()


class Confirm(ModalScreen[bool]):
    """Asks whether to do something."""

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


class Help(ModalScreen[None]):
    """Says what the keys do."""

    def compose(self) -> ComposeResult:
        yield Vertical(Static(Text(HELP)), id="box")

    def on_key(self) -> None:
        self.dismiss(None)


class Rows(DataTable[Text]):
    """The table of agents. Home and End go to the first and the last."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("home", "scroll_top", "first", show=False),
        Binding("end", "scroll_bottom", "last", show=False),
    ]


class Top(App[int]):
    """The live view."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: auto; padding: 0 1; }
    #table { height: 1fr; scrollbar-size-vertical: 1; overflow-x: hidden; }
    #table > .datatable--cursor { background: $primary 30%; text-style: bold; }
    #filter { display: none; height: 1; border: none; padding: 0 1; }
    #filter.shown { display: block; }
    Confirm, Help { align: center middle; }
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
        Binding("p", "pause", "pause"),
        Binding("question_mark", "help", "help", key_display="?"),
        Binding("q", "end", "quit"),
        Binding("ctrl+c", "end", "quit", show=False, priority=True),
    ]

    def __init__(self, hub: Hub, every: float = 1.0) -> None:
        super().__init__()
        self._hub = hub
        self._watch = Watch(hub, every, self.post_message)
        self._fleet: Fleet | None = None
        self._shown: list[Card] = []
        self._wanted = ""
        self._order, self._falling = "used", True
        self._paused = False
        self._trouble = ""
        self._since = 0.0

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        # The chosen row, which at first is the worst, keeps its colours.
        yield Rows(id="table", cursor_type="row", cell_padding=0, cursor_foreground_priority="renderable")
        yield Input(id="filter", placeholder="part of a name")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self._head = self.query_one("#head", Static)
        self._table = self.query_one("#table", Rows)
        self._field = self.query_one("#filter", Input)
        self._table.focus()
        self._lay_out(self.size.width)
        self._watch.start()

    def on_unmount(self) -> None:
        self._watch.end()

    def on_resize(self, event: Resize) -> None:
        if self._watch.is_alive():
            self._lay_out(event.size.width)

    def _lay_out(self, width: int) -> None:
        """Begin a table that is as wide as the terminal."""
        chosen, self._room = self._chosen(), max(width - sum(_WIDTHS) - 1, _NARROWEST)  # 1: the scroll bar
        self._table.clear(columns=True)
        for title, wide in zip(self._titles(), _WIDTHS, strict=True):
            self._table.add_column(title, width=wide or self._room)
        self._shown = []
        self._show()
        self._choose(chosen)

    # What the hub says -----------------------------------------------------------------------------------------------

    def on_heard(self, news: Heard) -> None:
        if isinstance(news.found, HubError):
            if not self._trouble:
                self._since = time.monotonic()
            self._trouble = str(news.found)
        else:
            wanted = self._fleet is None or not self._paused
            if not self._trouble and (not wanted or news.found == self._fleet):
                return  # nothing has changed
            self._trouble = ""
            if wanted:
                self._fleet = news.found
        self._show()

    def on_done(self, news: Done) -> None:
        self.notify(news.said, severity="information" if news.good else "error", markup=False)
        self._watch.hurry()

    # What is shown ---------------------------------------------------------------------------------------------------

    def _show(self) -> None:
        """Draw everything anew; of the table, the rows that have changed."""
        table, before, chosen = self._table, self._shown, self._chosen()
        for column, title in zip(table.ordered_columns, self._titles(), strict=True):
            if column.label != title:
                column.label = title
                table.sort(key=lambda _: 0)  # leaves the rows as they are, and makes it draw the titles anew
        rows = self._rows()
        for number, card in enumerate(rows):
            if number >= len(before):
                table.add_row(*_cells(card, self._room))
            elif card != before[number]:
                for place, cell in enumerate(_cells(card, self._room)):
                    table.update_cell_at(Coordinate(number, place), cell)
        for number in range(len(before) - 1, len(rows) - 1, -1):
            table.remove_row(table.coordinate_to_cell_key(Coordinate(number, 0)).row_key)
        self._shown = rows
        if table.cursor_row > 0:  # it stays on the agent, or else on the first row
            self._choose(chosen)
        self._head.update(self._summary())

    def _titles(self) -> list[Text]:
        arrow = "▼" if self._falling else "▲"
        return [Text(title + arrow if what == self._order else title) for what, title in _TITLES.items()]

    def _rows(self) -> list[Card]:
        cards = [] if self._fleet is None else self._fleet.cards
        found = sorted([card for card in cards if self._wanted in card.name.casefold()], key=lambda card: card.name)
        return sorted(found, key=ORDERS[self._order], reverse=self._falling)

    def _summary(self) -> Text:
        fleet, head = self._fleet, Text()
        head.append("headgate top ", "bold").append(f"{self._hub.url}  ")
        if self._trouble:
            head.append(f"away for {time.monotonic() - self._since:.0f} s; asking again each second\n", "bold red")
            head.append(self._trouble, "red")
            return head if fleet is None else head.append("\nwhat is shown is old")
        if fleet is None:
            return head.append("asking …\n\n")
        head.append("paused" if self._paused else "live", "bold yellow" if self._paused else "bold green")
        head.append(f"  {len(self._shown):,} of {len(fleet.cards):,} agents")
        head.append(f"\n{fleet.rate:,.1f} checks/s, {fleet.denied:.1%} denied; {fleet.exempt:,} exempt; store: ")
        head.append(harmless(fleet.store), "bold red" if fleet.store == "away" else "")
        head.append(f"\n{fleet.violations:,} violations in the last hour")
        worst = [f"{cut(harmless(name), 20)} {count:,}" for name, count in fleet.worst]
        return head.append(f": {', '.join(worst)}" if worst else "")

    def _chosen(self) -> Card | None:
        row = self._table.cursor_row
        return self._shown[row] if 0 <= row < len(self._shown) else None

    def _choose(self, card: Card | None) -> None:
        names = [one.name for one in self._shown]
        if card is not None and card.name in names:
            self._table.move_cursor(row=names.index(card.name))

    # Keys ------------------------------------------------------------------------------------------------------------

    def action_order(self, order: str) -> None:
        self._falling = not self._falling if order == self._order else order != "name"
        self._order = order
        self._show()

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        order = list(_TITLES)[event.column_index]
        if order in ORDERS:
            self.action_order(order)

    def action_filter(self) -> None:
        self._field.add_class("shown")
        self._field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._wanted = event.value.casefold()
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
            self._watch.hurry()
        self._show()

    def action_help(self) -> None:
        self.push_screen(Help())

    def action_end(self) -> None:
        self.exit(0)

    def action_exempt(self) -> None:
        card = self._chosen()
        if card is None:
            return
        name, path = harmless(card.name), "/api/admin/rate-limits/whitelist"
        if card.exempt:
            self._ask(
                f"Hold {name} to its limits again?", "DELETE", of_agent(path, card.name), f"{name} has limits again"
            )
        else:
            body = {"agent_id": card.name}
            self._ask(f"Exempt {name}, so that it always passes?", "POST", path, f"{name} is exempt", body)

    def action_reset(self) -> None:
        card = self._chosen()
        if card is not None:
            name, path = harmless(card.name), of_agent("/api/admin/violations", card.name)
            self._ask(f"Forget the violations of {name}?", "DELETE", path, f"the violations of {name} are forgotten")

    def _ask(self, question: str, method: str, path: str, done: str, body: object = None) -> None:
        """Do something at the hub, if the answer is yes."""

        def answered(yes: bool | None) -> None:
            if yes:
                threading.Thread(target=self._do, args=(method, path, done, body), daemon=True).start()

        self.push_screen(Confirm(question), answered)

    def _do(self, method: str, path: str, done: str, body: object) -> None:
        try:
            self._hub.ask(method, path, body)
        except HeadgateError as error:
            self.post_message(Done(str(error), False))
        else:
            self.post_message(Done(done, True))


def run(hub: Hub) -> int:
    """Show it until somebody quits."""
    return Top(hub).run() or 0


def _cells(card: Card, room: int) -> list[Text]:
    if card.used is None:
        used = Text("-" if not card.exempt else "no limit")
    else:
        filled = min(max(round(card.used * _BAR), 0), _BAR)
        used = Text("█" * filled, _STYLES[heat(card.used)]).append("░" * (_BAR - filled), "dim")
        used.append(f"{card.used:>5.0%}", _STYLES[heat(card.used)])
    wait = f"{card.wait_ms / 1000:.3g}s" if card.wait_ms else ""
    return [
        Text("● " if card.connected else "○ ", "green" if card.connected else "dim"),
        Text(cut(harmless(card.name), room - 1)),
        used,
        Text(cut(card.left, 9)),
        Text(cut(harmless(card.bucket), 11)),
        Text(f"{card.violations:>4}", "red" if card.violations else "dim"),
        Text(f"{card.last_hour:>4}", "red" if card.last_hour else "dim"),
        Text(f"{wait:>5}"),
        Text(("E" if card.exempt else "") + ("O" if card.override else ""), "bold"),
    ]
