"""`headgate top`: what it shows and what its keys do, by textual's own pilot."""

import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from rich.text import Text
from structlog.testing import capture_logs
from textual.pilot import Pilot
from textual.widgets import DataTable, Input, Static

from headgate import Policy
from headgate.cli.hub_api import HubApi
from headgate.cli.poller import Poller
from headgate.cli.top_accounts import AccountsScreen
from headgate.cli.top_app import ConfirmScreen, HelpScreen, TopApp
from tests.support import event_loop
from tests.support.hub import ADMIN, VIEWER, HubServer, hub_server
from tests.support.ports import unused_port
from tests.support.scripted_server import scripted_server
from tests.support.valkey import PATIENCE, wait_for

pytestmark = [pytest.mark.long, pytest.mark.once]

POLICY = Policy(limits={"light": "10/minute"}, exempt=["monitor"], agents={"writer": {"http": {"light": "20/minute"}}})
SPENT = {"planner": 12, "writer": 13, "half": 5, "low": 4, "most": 8, "[red]x[/red]": 1}
"""How often each agent asks, of the ten that may pass."""


@pytest.fixture(scope="module")
def shared_hub() -> Iterator[HubServer]:
    """A hub that tests only look at."""
    with busy_hub() as hub:
        yield hub


@contextmanager
def busy_hub() -> Iterator[HubServer]:
    """A hub whose agents have asked for something."""
    with capture_logs(), hub_server(POLICY) as hub, hub.agent("half"):
        for agent, times in SPENT.items():
            for _ in range(times):
                hub.run(hub.hub.stats.check(agent, "http", "light"))
        yield hub


def view(hub: object, token: str = ADMIN, every: float = 0.1) -> TopApp:
    return TopApp(HubApi(f"http://{hub}", token, "a variable", timeout=PATIENCE), every)


def table(app: TopApp) -> list[list[str]]:
    """The cells of the table, as they are shown."""
    shown = app.screen_stack[0].query_one(DataTable)
    return [[cell.plain.strip() for cell in shown.get_row_at(row)] for row in range(shown.row_count)]


def names(app: TopApp) -> list[str]:
    return [row[1] for row in table(app)]


def header_text(app: TopApp) -> str:
    shown = app.screen_stack[0].query_one("#head", Static).content
    assert isinstance(shown, Text)
    return shown.plain


async def wait_until(condition: Callable[[], object], pilot: Pilot[Any]) -> None:
    """Let the view work until something holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, (header_text(pilot.app), table(pilot.app))  # type: ignore[arg-type]
        await pilot.pause(0.005)


async def press(pilot: Pilot[Any], *keys: str, then: Callable[[], object]) -> None:
    """Press keys, and let the view work until what comes of them is there: the pilot itself only guesses when it is."""
    await pilot.press(*keys)
    await wait_until(then, pilot)


async def type_filter(pilot: Pilot[Any], text: str, then: Callable[[], object]) -> None:
    """Write something behind a slash."""
    await press(pilot, "slash", then=lambda: isinstance(pilot.app.focused, Input))
    await press(pilot, *text, then=then)


@asynccontextmanager
async def running_view(app: TopApp) -> AsyncIterator[Pilot[int]]:
    """Run the view; the block plays on it once there are agents."""
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await wait_until(lambda: table(app), pilot)
        yield pilot


# What it shows --------------------------------------------------------------------------------------------------------


async def test_b7_each_agent_is_a_row_with_the_bucket_nearest_to_its_limit(shared_hub: HubServer) -> None:
    app = view(shared_hub, VIEWER)
    async with running_view(app):
        assert table(app) == [
            ["○", "planner", "██████████ 100%", "0/10", "http light", "2", "2", "2s", ""],
            ["○", "most", "████████░░  80%", "2/10", "http light", "0", "0", "", ""],
            ["○", "writer", "██████░░░░  65%", "7/20", "http light", "0", "0", "", "O"],
            ["●", "half", "█████░░░░░  50%", "5/10", "http light", "0", "0", "", ""],
            ["○", "low", "████░░░░░░  40%", "6/10", "http light", "0", "0", "", ""],
            ["○", "[red]x[/red]", "█░░░░░░░░░  10%", "9/10", "http light", "0", "0", "", ""],
            ["○", "monitor", "no limit", "", "", "0", "0", "", "E"],
        ]
        rows = [app.query_one(DataTable).get_row_at(number) for number in range(6)]
        assert [row[5].style for row in rows] == [row[6].style for row in rows] == ["red"] + ["dim"] * 5
        colours = {row[1].plain: row[2].style for row in rows}
        assert colours == {
            "planner": "red", "most": "yellow", "writer": "yellow", "half": "yellow", "low": "green",
            "[red]x[/red]": "green",
        }  # fmt: skip


async def test_b7_the_summary_stands_above(shared_hub: HubServer) -> None:
    app = view(shared_hub)
    with shared_hub.http(VIEWER) as viewer:
        summary = viewer.get("/api/dashboard/state").json()["summary"]

    share = summary["denied_share"]
    async with running_view(app):
        assert header_text(app).splitlines() == [
            f"headgate top http://{shared_hub}  live  7 of 7 agents",
            f"{summary['checks_per_second']:,.1f} checks/s, {share:.1%} denied; 1 exempt; 0 blocked; store: memory",
            "2 violations in the last hour: planner 2; open alerts: 0",
        ]
        assert summary["checks_per_second"] > 0
        assert 0 < share < 1


async def test_b2_open_alerts_blocked_agents_and_denied_addresses_stand_above() -> None:
    with hub_server(Policy(addresses={"limit": "1/hour"})) as hub, hub.http() as anybody:
        hub.call(hub.hub.gate.block, "planner")
        for _ in range(10):
            hub.call(hub.hub.gate.record_violation, "writer")
        wait_for(lambda: hub.hub.alerts.open, "the alert")
        assert [anybody.get("/api/agents").status_code for _ in range(3)] == [200, 429, 429]
        app = view(hub)
        async with running_view(app):
            assert header_text(app).splitlines()[1:] == [
                "0.0 checks/s, 0.0% denied; 0 exempt; 1 blocked; store: memory",
                "10 violations in the last hour: writer 10; open alerts: 1",
                "2 denials by address in the last hour: 127.0.0.1 request 2",
            ]


async def test_changes_are_shown_live() -> None:
    with busy_hub() as hub:
        app = view(hub)
        async with running_view(app) as pilot:
            hub.run(hub.hub.stats.check("newcomer", "http", "light", cost=9))
            await wait_until(lambda: names(app)[:2] == ["planner", "newcomer"], pilot)
            hub.clock.advance(6)
            await wait_until(lambda: table(app)[0][2] == "█████████░  90%", pilot)
            hub.hub.gate.remove_exemption("monitor")
            await wait_until(lambda: "monitor" not in names(app), pilot)


async def test_in_a_large_terminal_long_names_have_room_and_in_a_small_one_all_columns(shared_hub: HubServer) -> None:
    long = "漢" * 60
    shared_hub.run(shared_hub.hub.stats.check(long, "ws", "heavy"))
    app = view(shared_hub)

    def shown() -> str:
        return next(name for name in names(app) if name.startswith("漢"))

    async with running_view(app) as pilot:
        assert shown() == "漢" * 9 + "…"
        await wait_until(lambda: re.search(r"writer .* 65% 7/20 +http light +0 +0 +O", screen(app)), pilot)
        assert max(map(len, screen(app).splitlines())) <= 80
        await pilot.resize_terminal(200, 50)
        await wait_until(lambda: shown() == long, pilot)
        assert "needs 80 columns" not in header_text(app)
        await pilot.resize_terminal(79, 24)
        await wait_until(lambda: "\nneeds 80 columns, not 79\n" in header_text(app), pilot)
        await pilot.resize_terminal(20, 5)
        await wait_until(lambda: len(shown()) < 10, pilot)


def screen(app: TopApp) -> str:
    """The whole screen, as text."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip) for strip in strips)


def screen_text(app: TopApp) -> str:
    """What is on the screen, in one line: what is told in a corner may be broken into several."""
    return " ".join(screen(app).replace("▌", " ").split())


async def test_names_are_shown_escaped(shared_hub: HubServer) -> None:
    evil = "[b]x\x1b[2J\n\u202e"
    usage = {"channel": "[red]", "tier": "\x1b[", "used": 7.5, "remaining": 1, "capacity": 2}
    card = {"agent_id": evil, "connected": True, "usage": usage, "violations": 0, "violations_last_hour": 0}
    card |= {"wait_left_ms": 1_022_911_000, "exempt": False, "override": False, "blocked": True}
    summary = {"violations_last_hour": 1, "worst_offenders": [{"agent_id": evil, "violations": 1}], "exempt": 0}
    summary |= {"checks_per_second": 0, "denied_share": 0, "store": "\x1b[2J", "address_denials": 3}
    summary["denied_addresses"] = [{"address": "\x1b[2J", "purpose": "[red]", "denials": 3, "last_at": 1.0}]
    with scripted_server({"agents": [card], "summary": summary}) as one:
        app = view(one)
        async with running_view(app) as pilot:
            assert names(app) == ["[b]x\\x1b[2J\\n\\u202e"]
            assert " 11d " in screen(app)
            assert "in the last hour: [b]x\\x1b[2J\\n\\u202e 1; open alerts: 0" in header_text(app)
            assert header_text(app).endswith("3 denials by address in the last hour: \\x1b[2J [red] 3")
            assert [str(cell) for cell in app._table.get_row_at(0)][-1] == "B"
            assert "store: \\x1b[2J" in header_text(app)
            await press(pilot, "e", then=lambda: "Exempt [b]x\\x1b[2J\\n\\u202e from" in screen(app))
            await press(pilot, "y", then=lambda: "[b]x\\x1b[2J\\n\\u202e is exempt" in screen_text(app))
            assert all(line.isprintable() for line in screen(app).splitlines())


async def test_an_agent_whose_account_denies_has_a_letter(shared_hub: HubServer) -> None:
    card = {"agent_id": "a", "connected": True, "usage": None, "violations": 0, "violations_last_hour": 0}
    card |= {"wait_left_ms": 0, "exempt": False, "override": True, "blocked": False, "denied_by_account": True}
    summary = {"violations_last_hour": 0, "worst_offenders": [], "exempt": 0, "checks_per_second": 0}
    summary |= {"denied_share": 0, "store": "memory", "address_denials": 0, "denied_addresses": []}
    with scripted_server({"agents": [card], "summary": summary}) as one:
        app = view(one)
        async with running_view(app):
            assert [str(cell) for cell in app._table.get_row_at(0)][-1] == "AO"


# Keys -----------------------------------------------------------------------------------------------------------------


async def test_keys_sort_and_sort_the_other_way_round(shared_hub: HubServer) -> None:
    app = view(shared_hub)

    def titles() -> list[str]:
        return [column.label.plain for column in app.query_one(DataTable).ordered_columns]

    def shows(place: int, title: str) -> bool:
        return titles()[place] == title

    async with running_view(app) as pilot:
        everybody = sorted(names(app))
        last = ["planner", *[name for name in everybody if name != "planner"]]
        assert titles()[2] == "used ▼"
        await press(pilot, "u", then=lambda: titles()[2] == "used ▲")
        assert names(app)[-1] == "planner"
        await press(pilot, "n", then=lambda: (titles()[1], titles()[2]) == ("agent ▲", "used "))
        assert names(app) == everybody
        await press(pilot, "n", then=lambda: titles()[1] == "agent ▼")
        assert names(app) == everybody[::-1]
        for key, place, title in (("v", 5, "viol"), ("h", 6, "hour"), ("w", 7, "wait")):
            await press(pilot, key, then=partial(shows, place, f"{title}▼"))
            assert names(app) == last
            await press(pilot, key, then=partial(shows, place, f"{title}▲"))
            assert names(app)[-1] == "planner"
        await pilot.click(DataTable, offset=(5, 0))
        await wait_until(lambda: titles()[1] == "agent ▲", pilot)
        assert names(app) == everybody
        await pilot.click(DataTable, offset=(0, 0))  # which nothing is sorted by
        assert names(app) == everybody
        await type_filter(pilot, "low", then=lambda: names(app) == ["low"])
        await press(pilot, "enter", then=lambda: isinstance(app.focused, DataTable))
        await press(pilot, "w", then=lambda: "wait▼" in screen(app))  # drawn anew, though no row has changed


async def test_typing_after_a_slash_filters(shared_hub: HubServer) -> None:
    app = view(shared_hub)
    async with running_view(app) as pilot:
        everybody = names(app)
        await type_filter(pilot, "L", then=lambda: names(app) == ["planner", "half", "low"])
        await wait_until(lambda: f"3 of {len(everybody)} agents" in header_text(app), pilot)
        await press(pilot, "o", then=lambda: names(app) == ["low"])
        await press(pilot, "q", then=lambda: names(app) == [])  # which doesn't quit here
        await press(pilot, "backspace", then=lambda: names(app) == ["low"])
        await press(pilot, "enter", then=lambda: isinstance(app.focused, DataTable))
        await press(pilot, "n", then=lambda: "agent ▲" in screen(app))  # which sorts again
        assert names(app) == ["low"]
        await press(pilot, "escape", then=lambda: sorted(names(app)) == sorted(everybody))
        await type_filter(pilot, "[r", then=lambda: names(app) == ["[red]x[/red]"])


async def test_the_cursor_stays_on_its_agent(shared_hub: HubServer) -> None:
    app = view(shared_hub)

    def chosen() -> str:
        return names(app)[app.query_one(DataTable).cursor_row]

    def wide() -> int:
        return app.query_one(DataTable).ordered_columns[1].width

    async with running_view(app) as pilot:
        await press(pilot, "down", "down", then=lambda: chosen() == "writer")
        await press(pilot, "n", then=lambda: names(app) == sorted(names(app)))
        assert chosen() == "writer"
        before = wide()
        await pilot.resize_terminal(100, 30)
        await wait_until(lambda: wide() > before, pilot)
        assert chosen() == "writer"
        await press(pilot, "u", then=lambda: names(app)[0] == "planner")
        await press(pilot, "home", then=lambda: chosen() == "planner")
        await press(pilot, "u", then=lambda: names(app)[0] != "planner")
        assert chosen() == names(app)[0]  # on the first row it stays there


async def test_an_agent_is_exempted_and_held_to_its_limits_again_after_a_question() -> None:
    with busy_hub() as hub:
        app, gate = view(hub), hub.hub.gate
        async with running_view(app) as pilot:
            question = "Exempt planner from all limits?"
            for no in ("n", "escape"):
                await press(pilot, "e", then=lambda: question in screen(app))
                await press(pilot, no, then=lambda: not isinstance(app.screen, ConfirmScreen))
                assert not gate.is_exempt("planner")
            await press(pilot, "e", then=lambda: question in screen(app))
            await press(pilot, "y", then=lambda: gate.is_exempt("planner"))
            await wait_until(lambda: "planner is exempt" in screen_text(app), pilot)
            await wait_until(lambda: ["○", "planner", "no limit", "", "", "2", "2", "2s", "E"] in table(app), pilot)
            await type_filter(pilot, "planner", then=lambda: names(app) == ["planner"])
            await press(pilot, "enter", then=lambda: isinstance(app.focused, DataTable))
            await press(pilot, "e", then=lambda: "End the exemption of planner?" in screen(app))
            await press(pilot, "y", then=lambda: not gate.is_exempt("planner"))


async def test_violations_are_forgotten_after_a_question() -> None:
    with busy_hub() as hub:
        app, gate = view(hub), hub.hub.gate
        async with running_view(app) as pilot:
            question = "Reset the violations of planner?"
            await press(pilot, "r", then=lambda: question in screen(app))
            await press(pilot, "n", then=lambda: not isinstance(app.screen, ConfirmScreen))
            assert gate.is_rate_limited("planner")
            await press(pilot, "r", then=lambda: question in screen(app))
            await press(pilot, "y", then=lambda: not gate.is_rate_limited("planner"))
            await wait_until(lambda: table(app)[0][5:8] == ["0", "0", ""], pilot)


async def test_without_agents_the_keys_do_nothing() -> None:
    with capture_logs(), hub_server() as hub:
        app = view(hub)
        async with app.run_test() as pilot:
            await wait_until(lambda: "0 of 0 agents" in header_text(app), pilot)
            await press(pilot, "e", "r", "down", "n", then=lambda: "agent ▲" in screen(app))
            await type_filter(pilot, "a", then=lambda: app.query_one(Input).value == "a")
            await press(pilot, "escape", then=lambda: isinstance(app.focused, DataTable))
            assert not isinstance(app.screen, ConfirmScreen)


async def test_a_viewer_is_told_that_the_admin_token_is_needed(shared_hub: HubServer) -> None:
    app = view(shared_hub, VIEWER)
    async with running_view(app) as pilot:
        await press(pilot, "r", then=lambda: isinstance(app.screen, ConfirmScreen))
        await press(pilot, "y", then=lambda: "this needs the token of the admin" in screen_text(app))
        assert shared_hub.hub.gate.is_rate_limited("planner")


class CountingApp(TopApp):
    """Counts the answers of its hub."""

    polled = 0

    def on_status_polled(self, _: object) -> None:  # beside that of TopApp: textual calls both
        self.polled += 1


async def test_a_pause_holds_the_picture() -> None:
    with busy_hub() as hub:
        app = CountingApp(HubApi(f"http://{hub}", ADMIN, "", timeout=PATIENCE), 0.1)
        async with running_view(app) as pilot:
            await press(pilot, "p", then=lambda: "paused" in header_text(app))
            before = table(app)
            hub.run(hub.hub.stats.check("newcomer", "http", "light"))
            with hub.http(ADMIN) as admin:
                assert "newcomer" in admin.get("/api/dashboard/state").text
            polled = app.polled
            await wait_until(lambda: app.polled >= polled + 2, pilot)  # one that was asked for before, and one after
            assert table(app) == before
            await press(pilot, "p", then=lambda: "newcomer" in names(app))
            assert "live" in header_text(app)


async def test_a_pause_holds_the_picture_while_the_hub_is_away_too(shared_hub: HubServer) -> None:
    with shared_hub.http(VIEWER) as viewer:
        state = viewer.get("/api/dashboard/state").json()
    fewer = {**state, "agents": state["agents"][:2]}
    with unused_port() as port:
        app = view(f"127.0.0.1:{port}")
        async with app.run_test(size=(80, 24)) as pilot:
            with scripted_server(state, port=port):
                await wait_until(lambda: len(names(app)) == len(state["agents"]), pilot)
                await press(pilot, "p", then=lambda: "paused" in header_text(app))
            await wait_until(lambda: "showing old data" in header_text(app), pilot)
            with scripted_server(fewer, port=port):
                await wait_until(lambda: "paused" in header_text(app), pilot)
                assert len(names(app)) == len(state["agents"])
                await press(pilot, "p", then=lambda: len(names(app)) == 2)


async def test_the_help_names_every_key(shared_hub: HubServer) -> None:
    app = view(shared_hub)
    async with running_view(app) as pilot:
        await press(pilot, "question_mark", then=lambda: "Press any key to close." in screen(app))
        assert isinstance(app.screen, HelpScreen)
        text = screen(app)
        assert all(re.search(rf"^ *[●○]?.*│ .*\b{key}\b", text, re.MULTILINE) for key in "nuvhwerpq")
        await press(pilot, "x", then=lambda: not isinstance(app.screen, HelpScreen))


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
async def test_quit_keys_end_top(shared_hub: HubServer, key: str) -> None:
    app = view(shared_hub)
    async with running_view(app) as pilot:
        await pilot.press(key)
        await event_loop.wait_until(lambda: app.return_value is not None, "the end of the view")
    assert (app.return_value, app.return_code) == (0, 0)


# A hub that is away ---------------------------------------------------------------------------------------------------


async def test_a_hub_that_is_away_is_waited_for(shared_hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("headgate.cli.top_app.time", SimpleNamespace(monotonic=lambda: now))
    with shared_hub.http(VIEWER) as viewer:
        state = viewer.get("/api/dashboard/state").json()
    with unused_port() as port:
        app = view(f"127.0.0.1:{port}")
        async with app.run_test(size=(80, 24)) as pilot:
            await wait_until(lambda: "away for 0 s; retrying every second" in header_text(app), pilot)
            assert "got: Connection refused; is it running?" in header_text(app)
            assert "showing old data" not in header_text(app)
            now += 7
            await wait_until(lambda: "away for 7 s; retrying every second" in header_text(app), pilot)
            await pilot.press("e", "n")
            for _ in range(2):
                with scripted_server(state, port=port):
                    await wait_until(lambda: "live" in header_text(app), pilot)
                    assert len(names(app)) == len(state["agents"])
                await wait_until(lambda: "showing old data" in header_text(app), pilot)
                assert len(names(app)) == len(state["agents"])


def test_an_unforeseen_error_is_shown_and_the_polling_goes_on() -> None:
    def fail() -> None:
        raise KeyError("odd")

    results: list[Any] = []
    poller = Poller("http://127.0.0.1:1", 0.005, fail, results.append)
    poller.start()
    wait_for(lambda: len(results) > 2, "three results")
    poller.stop()
    poller.join(PATIENCE)
    assert str(results[0]) == "http://127.0.0.1:1: KeyError('odd')"


# Accounts -------------------------------------------------------------------------------------------------------------


async def test_f1_a_key_switches_to_the_accounts_the_worst_first_and_back() -> None:
    policy = Policy(
        accounts={
            "at": {"acme": {"usd": "100 in all"}, "acme/search": {"usd": "10 in all"}, "[b]x": {"usd": "9 in all"}}
        },
        agents={"planner": {"account": "acme/search"}},
    )
    with capture_logs(), hub_server(policy) as hub, hub.agent("planner"):
        hub.hub.gate.hold("planner", {"usd": "7.5"}).settle()
        app = view(hub)

        def shown() -> list[list[str]]:
            rows = app.screen.query_one(DataTable)
            return [[cell.plain.strip() for cell in rows.get_row_at(row)] for row in range(rows.row_count)]

        async with running_view(app) as pilot:
            await press(pilot, "a", then=lambda: isinstance(app.screen, AccountsScreen) and len(shown()) == 3)
            assert shown() == [
                ["acme/search", "usd", "████████░░  75%", "2.5", "10", "never"],
                ["acme", "usd", "█░░░░░░░░░   8%", "92.5", "100", "never"],
                ["[b]x", "usd", "░░░░░░░░░░   0%", "9", "9", "never"],
            ]
            hub.hub.gate.hold("planner", {"usd": "2.5"})
            await wait_until(lambda: shown()[0][2:4] == ["██████████ 100%", "0"], pilot)
            await press(pilot, "a", then=lambda: not isinstance(app.screen, AccountsScreen))
            assert names(app) == ["planner"]


async def test_f1_a_resource_has_the_room_that_accounts_leave() -> None:
    tool = "a-search-in-the-whole-web"
    policy = Policy(accounts={"at": {"acme": {"tools": {tool: {"requests": "100 in all"}}}}})
    with capture_logs(), hub_server(policy) as hub:
        app = view(hub)
        async with app.run_test(size=(120, 24)) as pilot:
            await press(pilot, "a", then=lambda: f" requests by {tool} ░" in screen(app))
            await pilot.resize_terminal(60, 24)
            await wait_until(lambda: "needs 80 columns, not 60" in screen(app), pilot)
            await wait_until(lambda: re.search(r" requests by a-[a-z-]+… ", screen(app)), pilot)


async def test_f1_a_viewer_is_told_that_accounts_need_the_admins_token(shared_hub: HubServer) -> None:
    app = view(shared_hub, VIEWER)
    async with running_view(app) as pilot:

        def told() -> bool:
            content = app.screen.query_one("#head", Static).content
            return isinstance(content, Text) and "this needs the token of the admin" in content.plain

        await press(pilot, "a", then=lambda: isinstance(app.screen, AccountsScreen) and told())
        await press(pilot, "escape", then=lambda: not isinstance(app.screen, AccountsScreen))
