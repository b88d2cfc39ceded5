"""Output of commands: on a terminal, in a pipe, in any encoding, and during a wait."""

import io
import os
import sys
import threading
from collections.abc import Iterator, Sequence

import pytest
from structlog.testing import capture_logs

from headgate import Policy
from headgate.cli import main, terminal
from headgate.cli.account_limits import COLUMNS
from headgate.cli.terminal import Cell, Column, display_width, print_text, table_text, truncate, wrap
from headgate.errors import printable
from tests.support.cli import Terminal, run_command, run_on_terminal
from tests.support.hub import ADMIN, HubServer, hub_server
from tests.support.scripted_server import scripted_server
from tests.support.valkey import PATIENCE

pytestmark = pytest.mark.once

LONG = "a" * 100
TITLES = ["agent", "here", "used", "left", "bucket", "in", "a", "row", "hour", "wait", "marks"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("planner", "planner"),
        ("a b/ç漢🙂", "a b/ç漢🙂"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\nb\r\tc", "a\\nb\\r\\tc"),
        ("\x9b1m\x07\x00\x7f", "\\x9b1m\\x07\\x00\\x7f"),
        ("\u202eabc\u2066\u200b\ufeff", "\\u202eabc\\u2066\\u200b\\ufeff"),
        ("\u2028\u2029\x85\x0b\x0c", "\\u2028\\u2029\\x85\\x0b\\x0c"),
        ("\udcff\U000e0001", "\\udcff\\U000e0001"),
        ("[red]a[/red]", "[red]a[/red]"),
    ],
)
def test_unprintable_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(text).isprintable()


@pytest.mark.parametrize(
    ("text", "columns", "short"),
    [
        ("planner", 7, "planner"),
        ("planner", 6, "plann…"),
        ("planner", 1, "…"),
        ("漢字漢字", 8, "漢字漢字"),
        ("漢字漢字", 7, "漢字漢…"),
        ("漢字漢字", 6, "漢字…"),
        ("e\u0301e\u0301e\u0301", 3, "e\u0301e\u0301e\u0301"),
        ("e\u0301e\u0301e\u0301", 2, "e\u0301…"),
        ("\uff46\uff55\uff4c\uff4c", 4, "\uff46…"),
    ],
)
def test_text_is_measured_and_cut_by_the_columns_that_it_takes(text: str, columns: int, short: str) -> None:
    assert truncate(text, columns) == short
    assert display_width(short) <= columns


@pytest.mark.parametrize(
    ("text", "columns", "lines"),
    [
        ("planner", 7, ["planner"]),
        ("50 usd/calendar day", 12, ["50 usd/", "calendar day"]),
        ("acme/search/planner", 11, ["acme/", "search/", "planner"]),
        ("acme/search/planner", 12, ["acme/search/", "planner"]),
        ("100000", 4, ["1000", "00"]),
        ("漢字漢字", 5, ["漢字", "漢字"]),
        ("漢字", 1, ["漢", "字"]),
        ("a  b", 3, ["a", "b"]),
        ("2026-11-17T10:02:51Z", 12, ["2026-11-17T", "10:02:51Z"]),
        ("", 3, [""]),
    ],
)
def test_text_wraps_at_spaces_behind_slashes_and_in_dates(text: str, columns: int, lines: list[str]) -> None:
    assert wrap(text, columns) == lines


class Screen(io.StringIO):
    """A terminal in this process."""

    def isatty(self) -> bool:
        return True


BUDGETS: list[list[str | Cell]] = [
    ["acme", "pro", "usd", "500 usd/calendar month", "12.49", "0.30", "487.21", "2%", "12 d"],
    ["acme/search/planner", "", "tokens", "1000000 tokens/calendar day", "830", "0", "999170", "0%", "4 h"],
]
ALERTS: list[list[str | Cell]] = [
    ["2026-11-17 10:02:51", "acme/search", "open", "-", "80 % of 500 usd/calendar month", "-"],
    ["2026-11-17 09:12:40", "writer", "resolved 2026-11-17 09:14:02", "12", "ws message, ws status", "10.0.0.9"],
]
ALERT_COLUMNS = [
    *map(Column, ("raised", "who", "state")), Column("violations", right=True), *map(Column, ("what", "address")),
]  # fmt: skip


def set_width(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "dumb")  # no colours
    monkeypatch.setattr(sys, "stdout", Screen())


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
@pytest.mark.parametrize(("titles", "rows"), [(COLUMNS, BUDGETS), (ALERT_COLUMNS, ALERTS)], ids=["accounts", "alerts"])
def test_a_table_fits_every_terminal_and_loses_nothing(
    titles: Sequence[Column], rows: list[list[str | Cell]], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_width(columns, monkeypatch)
    text = table_text(titles, rows)
    assert max(map(len, text.splitlines())) <= columns
    values = [(column, str(value)) for row in rows for column, value in zip(titles, row, strict=True)]
    assert [value for column, value in values if column.right and value not in text] == []  # numbers aren't broken
    assert [piece for _, value in values for piece in value.replace("/", "/ ").split() if piece not in text] == []


def test_a_text_wraps_on_a_terminal_only(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = "line 1: not an access log line: a\x1b[2J"
    with capsys.disabled(), monkeypatch.context() as patch:
        set_width(20, patch)
        print_text(text, indent="  ")
        print_text("it fits into 20, all")
        assert isinstance(sys.stdout, Screen)
        shown = sys.stdout.getvalue()
    assert shown == "  line 1: not an\n    access log line:\n    a\\x1b[2J\nit fits into 20, all\n"
    print_text(text, indent="  ")
    assert capsys.readouterr().out == "  line 1: not an access log line: a\\x1b[2J\n"


def test_a_table_wraps_moves_together_and_becomes_blocks_on_narrower_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    set_width(120, monkeypatch)
    assert table_text(COLUMNS, BUDGETS) == (
        "account              plan  resource  limit                        spent  held    left  used  resets\n"
        "acme                 pro   usd       500 usd/calendar month       12.49  0.30  487.21    2%    12 d\n"
        "acme/search/planner        tokens    1000000 tokens/calendar day    830     0  999170    0%     4 h"
    )
    set_width(80, monkeypatch)
    assert table_text(COLUMNS, BUDGETS) == (
        "account        plan  resource  limit           spent  held    left  used  resets\n"
        "acme           pro   usd       500 usd/        12.49  0.30  487.21    2%    12 d\n"
        "                               calendar month\n"
        "acme/search/         tokens    1000000           830     0  999170    0%     4 h\n"
        "planner                        tokens/\n"
        "                               calendar day"
    )
    set_width(60, monkeypatch)
    assert table_text(COLUMNS, BUDGETS) == (
        "account plan resource limit    spent held   left used resets\n"
        "acme    pro  usd      500 usd/ 12.49 0.30 487.21   2%   12 d\n"
        "                      calendar\n"
        "                      month\n"
        "acme/        tokens   1000000    830    0 999170   0%    4 h\n"
        "search/               tokens/\n"
        "planner               calendar\n"
        "                      day"
    )
    set_width(59, monkeypatch)
    block = (
        "account   acme/search/planner\n"
        "resource  tokens\n"
        "limit     1000000 tokens/calendar day\n"
        "spent     830\n"
        "held      0\n"
        "left      999170\n"
        "used      0%\n"
        "resets    4 h"
    )
    assert table_text(COLUMNS, [BUDGETS[1]] * 2) == f"{block}\n\n{block}"


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    policy = Policy(limits={"light": "10/minute"})
    with capture_logs(), hub_server(policy) as hub:
        for agent, cost in (("low", 4), ("half", 5), ("most", 8), ("all", 9), (LONG, 1), ("漢字", 1)):
            hub.run(hub.hub.stats.check(agent, "http", "light", cost=cost))
            hub.register(agent)
        yield hub


def set_hub(hub: HubServer) -> dict[str, str]:
    return {"HEADGATE_HUB": f"http://{hub}", "HEADGATE_ADMIN_TOKEN": ADMIN, "no_proxy": "127.0.0.1"}


def test_on_a_terminal_the_usage_has_its_colour_and_the_rows_fit(hub: HubServer) -> None:
    text = run_on_terminal("agents", columns=80, more=set_hub(hub))
    lines = text.splitlines()
    head, rows = lines[0], {line.split()[0]: line for line in lines[1:]}
    assert head.replace("\x1b[1m", "").replace("\x1b[0m", "").split() == TITLES
    for agent, colour, used in (("low", 32, "40%"), ("half", 33, "50%"), ("most", 33, "80%"), ("all", 31, "90%")):
        assert f"\x1b[{colour}m{used}\x1b[0m" in rows[agent]
    plain = [line.replace("\x1b[1m", "").replace("\x1b[0m", "").replace("\x1b[32m", "") for line in lines]
    assert max(display_width(line) for line in plain if "\x1b" not in line) <= 80
    (cut_off,) = [line for line in plain if line.startswith("aaa")]
    assert "a…" in cut_off
    places = {
        display_width(line[: line.index("http light")]) for line in plain if "\x1b" not in line and "http light" in line
    }
    assert len(places) == 1


@pytest.mark.parametrize("more", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=["NO_COLOR", "dumb"])
def test_colours_can_be_refused(hub: HubServer, more: dict[str, str]) -> None:
    text = run_on_terminal("agents", columns=80, more=set_hub(hub) | more)
    assert "\x1b" not in text
    assert "a…" in text


def test_in_a_pipe_nothing_is_coloured_or_cut(hub: HubServer) -> None:
    result = run_command("agents", more=set_hub(hub))
    assert (result.returncode, result.stderr) == (0, "")
    assert "\x1b" not in result.stdout
    assert LONG in result.stdout


def test_a_terminal_that_cannot_show_a_name_is_shown_its_code(hub: HubServer) -> None:
    result = run_command("agents", more=set_hub(hub) | {"PYTHONIOENCODING": "ascii"})
    assert (result.returncode, result.stderr) == (0, "")
    assert "\\u6f22\\u5b57" in result.stdout


def test_a_denial_keeps_its_exit_code_when_nobody_reads_it(hub: HubServer) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = run_command("check", "x", "--tier", "light", "--cost", "11", more=set_hub(hub), stdout=writer)
    finally:
        os.close(writer)
    assert (result.returncode, result.stderr) == (1, "")


def test_a_wait_at_a_terminal_is_explained() -> None:
    released = threading.Event()
    shown = Terminal()
    with scripted_server({"agents": []}, before=lambda _: released.wait(PATIENCE)) as one:
        more = {"HEADGATE_HUB": f"http://{one}", "HEADGATE_ADMIN_TOKEN": ADMIN}
        with shown.process("exempt", "list", more=more):
            shown.wait_until(lambda text: "…" in text)
            released.set()
    assert shown.text == f"waiting for http://{one} …\r\x1b[Kno agent is exempt\n"


def test_short_work_shows_only_its_result(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert terminal._SOON == 1.0
    monkeypatch.setattr(terminal, "_SOON", PATIENCE)  # whatever takes less is short, on a slow machine too
    for name, value in (set_hub(hub) | {"TERM": "xterm"}).items():
        monkeypatch.setenv(name, value)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Screen())
    assert main(["agents", "--all"]) == 0
    out, errors = sys.stdout, sys.stderr
    assert isinstance(out, Screen)
    assert isinstance(errors, Screen)
    assert "low" in out.getvalue()
    assert "\r" not in out.getvalue()
    assert errors.getvalue() == ""


def test_long_work_shows_how_far_it_is() -> None:
    text = run_on_terminal("bench", "--seconds", "1.5")
    shown, _, table = text.rpartition("\r\x1b[K")
    assert "\rmeasuring: 5 of 5\x1b[K" in shown
    assert "\r" not in table
    assert "measuring" not in table


def test_offline_commands_load_no_network_modules() -> None:
    program = """
import sys
from headgate.cli import main
main(["policy", "show"])
slow = ["urllib.request", "textual", "rich", "shtab", "redis", "msgspec", "uvicorn"]
slow += ["headgate.hub.app", "headgate.cli.top_app"]
print([name for name in slow if name in sys.modules])
"""
    result = run_command("-c", program, command=[sys.executable])
    assert result.stdout.splitlines()[-1] == "[]"


def test_blanks_that_are_too_wide_are_a_line() -> None:
    assert wrap(" " * 9, 4) == [""]
