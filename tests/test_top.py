"""`headgate top`: what it shows and what its keys do, by textual's own pilot, and once in a real terminal."""

import asyncio
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hubs import ADMIN, VIEWER, Running, running
from impostor import impostor
from programs import program
from rich.text import Text
from servers import PATIENCE, free_port, wait_for
from structlog.testing import capture_logs
from test_cli import DEADLINE, MODULE, Terminal, surroundings
from textual.pilot import Pilot
from textual.widgets import DataTable, Static
from websockets.sync.client import connect

from headgate import Policy
from headgate.cli.remote import Hub
from headgate.cli.top import Confirm, Help, Top

pytestmark = pytest.mark.once

POLICY = Policy(limits={"light": "10/minute"}, exempt=["monitor"], agents={"writer": {"http": {"light": "20/minute"}}})
SPENT = {"planner": 12, "writer": 13, "half": 5, "low": 4, "most": 8, "[red]x[/red]": 1}
"""How often each agent asks, of the ten that may pass."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    """A hub that tests only look at."""
    with at_work() as hub:
        yield hub


@contextmanager
def at_work() -> Iterator[Running]:
    """A hub whose agents have asked for something."""
    with capture_logs(), running(POLICY) as hub, hub.agent("half"):
        for agent, times in SPENT.items():
            for _ in range(times):
                hub.run(hub.hub.check(agent, "http", "light"))
        yield hub


def view(hub: object, token: str = ADMIN, every: float = 0.1) -> Top:
    return Top(Hub(f"http://{hub}", token, "a variable", within=PATIENCE), every)


def table(app: Top) -> list[list[str]]:
    """The cells of the table, as they are shown."""
    shown = app.screen_stack[0].query_one(DataTable)
    return [[cell.plain.strip() for cell in shown.get_row_at(row)] for row in range(shown.row_count)]


def names(app: Top) -> list[str]:
    return [row[1] for row in table(app)]


def head(app: Top) -> str:
    shown = app.screen_stack[0].query_one("#head", Static).content
    assert isinstance(shown, Text)
    return shown.plain


async def until(condition: Callable[[], object], pilot: Pilot[Any]) -> None:
    """Let the view work until something holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, (head(pilot.app), table(pilot.app))  # type: ignore[arg-type]
        await pilot.pause(0.005)


def drive(app: Top, play: Callable[[Pilot[int]], Awaitable[None]], size: tuple[int, int] = (80, 24)) -> None:
    """Run the view, let a test play on it once there are agents, and quit."""

    async def work() -> None:
        async with app.run_test(size=size, notifications=True) as pilot:
            await until(lambda: table(app), pilot)
            await play(pilot)

    asyncio.run(work())


# What it shows --------------------------------------------------------------------------------------------------------


def test_b7_each_agent_is_a_row_with_the_bucket_nearest_to_its_limit(shared: Running) -> None:
    app = view(shared, VIEWER)

    async def play(_: Pilot[int]) -> None:
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

    drive(app, play)


def test_b7_the_summary_stands_above(shared: Running) -> None:
    app = view(shared)
    with shared.http(VIEWER) as viewer:
        summary = viewer.get("/api/dashboard/state").json()["summary"]

    share = summary["denied_share"]

    async def play(_: Pilot[int]) -> None:
        assert head(app).splitlines() == [
            f"headgate top http://{shared}  live  7 of 7 agents",
            f"{summary['checks_per_second']:,.1f} checks/s, {share:.1%} denied; 1 exempt; store: memory",
            "2 violations in the last hour: planner 2",
        ]
        assert summary["checks_per_second"] > 0
        assert 0 < share < 1

    drive(app, play)


def test_it_follows_what_happens() -> None:
    with at_work() as hub:
        app = view(hub)

        async def play(pilot: Pilot[int]) -> None:
            hub.run(hub.hub.check("newcomer", "http", "light", cost=9))
            await until(lambda: names(app)[:2] == ["planner", "newcomer"], pilot)
            hub.clock.advance(6)
            await until(lambda: table(app)[0][2] == "█████████░  90%", pilot)
            hub.hub.gate.remove_exemption("monitor")
            await until(lambda: "monitor" not in names(app), pilot)

        drive(app, play)


def test_in_a_large_terminal_long_names_have_room_and_in_a_small_one_all_columns(shared: Running) -> None:
    long = "漢" * 60
    shared.run(shared.hub.check(long, "ws", "heavy"))
    app = view(shared)

    def shown() -> str:
        return next(name for name in names(app) if name.startswith("漢"))

    async def play(pilot: Pilot[int]) -> None:
        assert shown() == "漢" * 9 + "…"
        lines = screen(app).splitlines()
        assert max(map(len, lines)) <= 80
        assert any(re.search(r"writer .* 65% 7/20 +http light +0 +0 +O", line) for line in lines)
        await pilot.resize_terminal(200, 50)
        await until(lambda: shown() == long, pilot)
        await pilot.resize_terminal(20, 5)
        await until(lambda: len(shown()) < 10, pilot)

    drive(app, play)


def screen(app: Top) -> str:
    """The whole screen, as text."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip) for strip in strips)


def said(app: Top) -> str:
    """What is on the screen, in one line: what is told in a corner may be broken into several."""
    return " ".join(screen(app).replace("▌", " ").split())


def test_names_can_do_no_harm(shared: Running) -> None:
    evil = "[b]x\x1b[2J\n\u202e"
    usage = {"channel": "[red]", "tier": "\x1b[", "used": 7.5, "remaining": 1, "capacity": 2}
    card = {"agent_id": evil, "connected": True, "usage": usage, "violations": 0, "violations_last_hour": 0}
    card |= {"wait_left_ms": 0, "exempt": False, "override": False}
    summary = {"violations_last_hour": 1, "worst_offenders": [{"agent_id": evil, "violations": 1}], "exempt": 0}
    summary |= {"checks_per_second": 0, "denied_share": 0, "store": "\x1b[2J"}
    with impostor({"agents": [card], "summary": summary}) as one:
        app = view(one)

        async def play(pilot: Pilot[int]) -> None:
            assert names(app) == ["[b]x\\x1b[2J\\n\\u202e"]
            assert head(app).endswith("in the last hour: [b]x\\x1b[2J\\n\\u202e 1")
            assert "store: \\x1b[2J" in head(app)
            await pilot.press("e")
            await until(lambda: isinstance(app.screen, Confirm), pilot)
            assert "Exempt [b]x\\x1b[2J\\n\\u202e, so" in screen(app)
            await pilot.press("y")
            await until(lambda: "[b]x\\x1b[2J\\n\\u202e is exempt" in said(app), pilot)
            assert all(line.isprintable() for line in screen(app).splitlines())

        drive(app, play)


# Keys -----------------------------------------------------------------------------------------------------------------


def test_keys_sort_and_sort_the_other_way_round(shared: Running) -> None:
    app = view(shared)

    def titles() -> list[str]:
        return [column.label.plain for column in app.query_one(DataTable).ordered_columns]

    async def play(pilot: Pilot[int]) -> None:
        everybody = sorted(names(app))
        assert titles()[2] == "used ▼"
        await pilot.press("u")
        assert names(app)[-1] == "planner"
        assert titles()[2] == "used ▲"
        await pilot.press("n")
        assert names(app) == everybody
        assert (titles()[1], titles()[2]) == ("agent ▲", "used ")
        await pilot.press("n")
        assert names(app) == everybody[::-1]
        for key, title in (("v", "viol▼"), ("h", "hour▼"), ("w", "wait▼")):
            await pilot.press(key)
            assert names(app) == ["planner", *[name for name in everybody if name != "planner"]]
            assert title in titles()
            await pilot.press(key)
            assert names(app)[-1] == "planner"
        await pilot.click(DataTable, offset=(5, 0))
        assert names(app) == everybody
        await pilot.click(DataTable, offset=(0, 0))  # which nothing is sorted by
        assert names(app) == everybody
        await pilot.press("slash", *"low", "enter", "w")
        assert "wait▼" in screen(app)  # drawn anew, though no row has changed

    drive(app, play)


def test_what_is_typed_after_a_slash_filters(shared: Running) -> None:
    app = view(shared)

    async def play(pilot: Pilot[int]) -> None:
        everybody = names(app)
        await pilot.press("slash", *"L")
        assert names(app) == ["planner", "half", "low"]
        assert f"3 of {len(everybody)} agents" in head(app)
        await pilot.press("o", "q")  # which doesn't quit here
        assert names(app) == []
        await pilot.press("backspace", "enter", "n")  # which sorts again
        assert names(app) == ["low"]
        await pilot.press("escape")
        assert sorted(names(app)) == sorted(everybody)
        await pilot.press("slash", *"[r")
        assert names(app) == ["[red]x[/red]"]

    drive(app, play)


def test_the_cursor_stays_on_its_agent(shared: Running) -> None:
    app = view(shared)

    def chosen() -> str:
        return names(app)[app.query_one(DataTable).cursor_row]

    async def play(pilot: Pilot[int]) -> None:
        await pilot.press("down", "down")
        assert chosen() == "writer"
        await pilot.press("n")
        assert chosen() == "writer"
        await pilot.resize_terminal(100, 30)
        assert chosen() == "writer"
        await pilot.press("u", "home")
        assert chosen() == names(app)[0] == "planner"
        await pilot.press("u")
        assert chosen() == names(app)[0] != "planner"  # on the first row it stays there

    drive(app, play)


def test_an_agent_is_exempted_and_held_to_its_limits_again_after_a_question() -> None:
    with at_work() as hub:
        app, gate = view(hub), hub.hub.gate

        async def play(pilot: Pilot[int]) -> None:
            await pilot.press("e")
            assert "Exempt planner, so that it always passes?" in screen(app)
            await pilot.press("n")
            await pilot.press("e", "escape")
            assert not isinstance(app.screen, Confirm)
            assert not gate.is_exempt("planner")
            await pilot.press("e", "y")
            await until(lambda: gate.is_exempt("planner"), pilot)
            await until(lambda: "planner is exempt" in said(app), pilot)
            await until(lambda: ["○", "planner", "no limit", "", "", "2", "2", "2s", "E"] in table(app), pilot)
            await pilot.press("slash", *"planner", "enter", "e")
            assert "Hold planner to its limits again?" in screen(app)
            await pilot.press("y")
            await until(lambda: not gate.is_exempt("planner"), pilot)

        drive(app, play)


def test_violations_are_forgotten_after_a_question() -> None:
    with at_work() as hub:
        app, gate = view(hub), hub.hub.gate

        async def play(pilot: Pilot[int]) -> None:
            await pilot.press("r")
            assert "Forget the violations of planner?" in screen(app)
            await pilot.press("n")
            assert gate.is_rate_limited("planner")
            await pilot.press("r", "y")
            await until(lambda: not gate.is_rate_limited("planner"), pilot)
            await until(lambda: table(app)[0][5:8] == ["0", "0", ""], pilot)

        drive(app, play)


def test_without_agents_the_keys_do_nothing() -> None:
    with capture_logs(), running() as hub:
        app = view(hub)

        async def play() -> None:
            async with app.run_test() as pilot:
                await until(lambda: "0 of 0 agents" in head(app), pilot)
                await pilot.press("e", "r", "down", "n", "slash", "a", "escape")
                assert not isinstance(app.screen, Confirm)

        asyncio.run(play())


def test_a_viewer_is_told_that_only_the_admin_may(shared: Running) -> None:
    app = view(shared, VIEWER)

    async def play(pilot: Pilot[int]) -> None:
        await pilot.press("r", "y")
        await until(lambda: "this needs the token of the admin" in said(app), pilot)
        assert shared.hub.gate.is_rate_limited("planner")

    drive(app, play)


class Counting(Top):
    """Counts how often it has heard from its hub."""

    heard = 0

    def on_heard(self, _: object) -> None:  # beside that of Top: textual calls both
        self.heard += 1


def test_a_pause_holds_the_picture() -> None:
    with at_work() as hub:
        app = Counting(Hub(f"http://{hub}", ADMIN, "", within=PATIENCE), 0.1)

        async def play(pilot: Pilot[int]) -> None:
            await pilot.press("p")
            assert "paused" in head(app)
            before = table(app)
            hub.run(hub.hub.check("newcomer", "http", "light"))
            with hub.http(ADMIN) as admin:
                assert "newcomer" in admin.get("/api/dashboard/state").text
            heard = app.heard
            await until(lambda: app.heard >= heard + 2, pilot)  # one that was asked for before, and one after
            assert table(app) == before
            await pilot.press("p")
            await until(lambda: "newcomer" in names(app), pilot)
            assert "live" in head(app)

        drive(app, play)


def test_a_pause_holds_the_picture_while_the_hub_is_away_too(shared: Running) -> None:
    port = free_port()
    with shared.http(VIEWER) as viewer:
        state = viewer.get("/api/dashboard/state").json()
    fewer = {**state, "agents": state["agents"][:2]}
    app = view(f"127.0.0.1:{port}")

    async def work() -> None:
        async with app.run_test(size=(80, 24)) as pilot:
            with impostor(state, port=port):
                await until(lambda: len(names(app)) == len(state["agents"]), pilot)
                await pilot.press("p")
            await until(lambda: "what is shown is old" in head(app), pilot)
            with impostor(fewer, port=port):
                await until(lambda: "paused" in head(app), pilot)
                assert len(names(app)) == len(state["agents"])
                await pilot.press("p")
                await until(lambda: len(names(app)) == 2, pilot)

    asyncio.run(work())


def test_the_help_names_every_key(shared: Running) -> None:
    app = view(shared)

    async def play(pilot: Pilot[int]) -> None:
        await pilot.press("question_mark")
        assert isinstance(app.screen, Help)
        text = screen(app)
        assert all(re.search(rf"^ *[●○]?.*│ .*\b{key}\b", text, re.MULTILINE) for key in "nuvhwerpq")
        assert "Any key closes this." in text
        await pilot.press("x")
        assert not isinstance(app.screen, Help)

    drive(app, play)


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
def test_it_quits(shared: Running, key: str) -> None:
    app = view(shared)

    async def play(pilot: Pilot[int]) -> None:
        await pilot.press(key)

    drive(app, play)
    assert (app.return_value, app.return_code) == (0, 0)


# A hub that is away ---------------------------------------------------------------------------------------------------


def test_a_hub_that_is_away_is_waited_for(shared: Running) -> None:
    port = free_port()
    with shared.http(VIEWER) as viewer:
        state = viewer.get("/api/dashboard/state").json()
    app = view(f"127.0.0.1:{port}")

    async def work() -> None:
        async with app.run_test(size=(80, 24)) as pilot:
            await until(lambda: "away for 0 s; asking again each second" in head(app), pilot)
            assert "got: Connection refused; is it running?" in head(app)
            assert "what is shown is old" not in head(app)
            await pilot.press("e", "n")
            for _ in range(2):
                with impostor(state, port=port):
                    await until(lambda: "live" in head(app), pilot)
                    assert len(names(app)) == len(state["agents"])
                await until(lambda: "what is shown is old" in head(app), pilot)
                assert len(names(app)) == len(state["agents"])

    asyncio.run(work())


# The program ----------------------------------------------------------------------------------------------------------


def test_a_hub_that_refuses_is_a_plain_error(shared: Running) -> None:
    terminal = Terminal()
    more = {"HEADGATE_HUB": f"http://{shared}", "HEADGATE_ADMIN_TOKEN": "wrong" * 5}
    command, environment = [*MODULE, "top"], surroundings() | more
    done = subprocess.run(
        command, env=environment, stdin=terminal.slave, stdout=terminal.slave, stderr=subprocess.PIPE, text=True,
        timeout=DEADLINE, check=False,
    )  # fmt: skip
    assert done.stderr == f"http://{shared}: it doesn't know the token in HEADGATE_ADMIN_TOKEN\n"
    assert done.returncode == 1
    terminal.close()


@pytest.mark.parametrize("how", ["a pipe", "dumb"])
def test_without_a_terminal_it_says_what_else_there_is(how: str) -> None:
    terminal = Terminal()
    out = subprocess.PIPE if how == "a pipe" else terminal.slave
    done = subprocess.run(
        [*MODULE, "top"], env=surroundings() | {"TERM": "dumb" if how == "dumb" else "xterm"}, stdin=terminal.slave,
        stdout=out, stderr=subprocess.PIPE, text=True, timeout=DEADLINE, check=False,
    )  # fmt: skip
    text = "top: expected a terminal that it can draw on; headgate agents prints the same as lines\n"
    assert (done.returncode, done.stderr) == (1, text)
    terminal.close()


# A real terminal ------------------------------------------------------------------------------------------------------


class Tmux:
    """A terminal of 100 columns and 30 rows in which a command runs."""

    def __init__(self, command: str, environment: dict[str, str]) -> None:
        assert shutil.which("tmux"), "expected tmux, which this test drives headgate top in: apt install tmux"
        self._name = f"headgate-test-{uuid4().hex[:8]}"
        self._environment = {name: value for name, value in environment.items() if name not in ("TMUX", "TMUX_PANE")}
        self("-f", "/dev/null", "new-session", "-d", "-x", "100", "-y", "30", command)

    def __call__(self, *arguments: str) -> str:
        done = subprocess.run(
            ["tmux", "-L", self._name, *arguments], env=self._environment, capture_output=True, text=True, check=True,
            timeout=DEADLINE,
        )  # fmt: skip
        return done.stdout

    def press(self, *keys: str) -> None:
        self("send-keys", *keys)

    def screen(self, *how: str) -> str:
        return self("capture-pane", "-p", *how)

    def wait_for(self, text: str) -> str:
        """Wait until some text, a regular expression, is on the screen; return the screen."""
        found: list[str] = []

        def look() -> bool:
            found[:] = [self.screen()]
            return bool(re.search(text, found[0], re.MULTILINE))

        try:
            wait_for(look, f"{text} on the screen", DEADLINE)
        except TimeoutError as late:
            raise AssertionError(f"{late}\n{found[0]}") from None
        return found[0]

    def close(self) -> None:
        subprocess.run(["tmux", "-L", self._name, "kill-server"], capture_output=True, check=False)


@pytest.mark.long
def test_top_in_a_real_terminal(tmp_path: Path) -> None:
    port, data = free_port(), tmp_path / "data"
    config = tmp_path / "headgate.toml"
    config.write_text('[limits]\nlight = "10/minute"\n')
    options = ("--port", str(port), "--config", str(config))
    command = f"{shlex.join([*MODULE, 'top', '--hub', f'http://127.0.0.1:{port}'])}; echo the exit code is $?; cat"
    with ExitStack() as things:
        hub = things.enter_context(program(data, *options))
        with hub.http() as admin:
            tokens = {
                name: admin.post("/api/admin/agents", json={"agent_id": name}).json()["token"]
                for name in ("planner", "[red]x[/red]", "漢字")
            }
            admin.post("/api/admin/rate-limits/whitelist", json={"agent_id": "monitor"})
        environment = surroundings() | {"HEADGATE_ADMIN_TOKEN": ADMIN, "TERM": "xterm-256color"}
        tmux = Tmux(command, environment)
        things.callback(tmux.close)
        first = tmux.wait_for(r"live  1 of 1 agents")
        assert re.search(r"^○ monitor +no limit .* E$", first, re.MULTILINE)
        for name, times in (("planner", 14), ("漢字", 6), ("[red]x[/red]", 1)):
            socket = things.enter_context(connect(f"ws://{hub}/ws", proxy=None))
            socket.send(f'{{"type": "identify", "agent_id": "{name}", "token": "{tokens[name]}"}}')
            for _ in range(times):
                socket.send('{"type": "ping"}')
        shown = tmux.wait_for(r"4 violations in the last hour: planner 4$")
        shown = tmux.wait_for(r"live  4 of 4 agents")
        rows = [line.split()[1] for line in shown.splitlines() if line[:1] in ("●", "○")]
        assert rows == ["planner", "漢字", "[red]x[/red]", "monitor"]
        assert re.search(r"^● planner +██████████ 100% 0/10 +ws light +4 +4 +[\d.]+s", shown, re.MULTILINE)
        assert re.search(r"^● \[red\]x\[/red\] ", shown, re.MULTILINE)
        coloured = next(line for line in tmux.screen("-e").splitlines() if "planner" in line and "█" in line)
        assert re.search(r"\x1b\[38;5;\d+m█{10} 100%\x1b\[", coloured), coloured
        tmux.press("n")
        tmux.wait_for(r"agent ▲")
        tmux.press("/")
        tmux.press("plan", "Enter")
        tmux.wait_for(r"1 of 4 agents")
        tmux.press("r")
        tmux.wait_for(r"Forget the violations of planner\?")
        tmux.press("y")
        tmux.wait_for(r"^● planner .* 0 +0 *$")
        tmux.press("e")
        tmux.wait_for(r"Exempt planner, so that it always passes\?")
        tmux.press("y")
        tmux.wait_for(r"^● planner +no limit .* E *$")
        with hub.http() as admin:
            assert admin.get("/api/admin/rate-limits/whitelist").json() == {"agents": ["monitor", "planner"]}
        tmux.press("Escape")
        tmux.wait_for(r"4 of 4 agents")
        tmux.press("?")
        tmux.wait_for(r"Any key closes this\.")
        tmux.press("x")
        hub.stop()
        away = tmux.wait_for(r"away for [1-9]\d* s; asking again each second")
        assert "is it running? (--hub, HEADGATE_HUB)" in " ".join(away.split())
        assert "planner" in away
        with program(data, *options):
            tmux.wait_for(r"live  2 of 2 agents")  # the exempt: nobody has come back yet
            tmux("resize-window", "-x", "80", "-y", "24")
            tmux.wait_for(r"^○ planner +no limit .* E *$")
            tmux.press("q")
            ended = tmux.wait_for(r"the exit code is 0")
        assert "headgate top" not in ended  # the terminal is as it was before
