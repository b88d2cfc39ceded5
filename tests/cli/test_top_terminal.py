"""`headgate top` as a program: what it says where it can't work, and all of it once in a real terminal."""

import re
import shlex
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import pytest
from structlog.testing import capture_logs

from tests.support.cli import MODULE, Terminal, command_environment, run_command
from tests.support.hub import ADMIN, agent_connection, hub_server
from tests.support.hub_process import hub_process
from tests.support.ports import unused_port
from tests.support.valkey import PATIENCE, wait_for

pytestmark = [pytest.mark.long, pytest.mark.once]


def test_a_hub_that_refuses_is_a_plain_error() -> None:
    terminal = Terminal()
    with capture_logs(), hub_server() as hub:
        more = {"HEADGATE_HUB": f"http://{hub}", "HEADGATE_ADMIN_TOKEN": "wrong" * 5}
        done = run_command("top", more=more, stdin=terminal.slave, stdout=terminal.slave)
    assert done.stderr == f"http://{hub}: unknown token, from HEADGATE_ADMIN_TOKEN\n"
    assert done.returncode == 1
    terminal.close()


@pytest.mark.parametrize("how", ["a pipe", "dumb"])
def test_without_a_terminal_top_names_an_alternative(how: str) -> None:
    terminal = Terminal()
    out = subprocess.PIPE if how == "a pipe" else terminal.slave
    done = run_command("top", more={"TERM": "dumb" if how == "dumb" else "xterm"}, stdin=terminal.slave, stdout=out)
    text = "top: expected an interactive terminal; headgate agents prints the same as lines\n"
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
            timeout=PATIENCE,
        )  # fmt: skip
        return done.stdout

    def press(self, *keys: str) -> None:
        self("send-keys", *keys)

    def screen(self, *how: str) -> str:
        return self("capture-pane", "-p", *how)

    def wait_for(self, *texts: str, how: tuple[str, ...] = ()) -> str:
        """Wait until all these texts, regular expressions, are on the screen at once; return the screen."""
        found: list[str] = []

        def look() -> bool:
            found[:] = [self.screen(*how)]
            return all(re.search(text, found[0], re.MULTILINE) for text in texts)

        try:
            wait_for(look, f"{texts} on the screen")
        except TimeoutError as late:
            raise AssertionError(f"{late}\n{found[0]}") from None
        return found[0]

    def close(self) -> None:
        subprocess.run(["tmux", "-L", self._name, "kill-server"], capture_output=True, check=False)


@pytest.mark.long
def test_top_in_a_real_terminal(tmp_path: Path) -> None:
    data, config = tmp_path / "data", tmp_path / "headgate.toml"
    config.write_text('[limits]\nlight = "10/day"\n[backoff]\nsteps = [500]\nquiet = 3600\n')  # nothing changes soon
    with ExitStack() as things:
        port = things.enter_context(unused_port())
        options = ("--port", str(port), "--config", str(config), "--identify-within", str(PATIENCE))
        command = f"{shlex.join([*MODULE, 'top', '--hub', f'http://127.0.0.1:{port}'])}; echo the exit code is $?; cat"
        hub = things.enter_context(hub_process(data, *options))
        with hub.http() as admin:
            admin.post("/api/admin/rate-limits/whitelist", json={"agent_id": "monitor"})
        environment = command_environment() | {"HEADGATE_ADMIN_TOKEN": ADMIN, "TERM": "xterm-256color"}
        tmux = Tmux(command, environment)
        things.callback(tmux.close)
        tmux.wait_for(r"live  1 of 1 agents", r"^○ monitor +no limit .* E$")
        for name, times in (("planner", 14), ("漢字", 6), ("[red]x[/red]", 1)):
            wire = things.enter_context(agent_connection(hub, name, hub.register(name)))
            for _ in range(times):
                wire.say("ping")
        shown = tmux.wait_for(
            r"live  4 of 4 agents",
            r"4 violations in the last hour: planner 4; open alerts: 0$",
            r"^● planner +██████████ 100% 0/10 +ws light +4 +4 +[\d.]+(?:s|min|h|d)",
            r"^● 漢字 +██████░░░░  60% ",
            r"^● \[red\]x\[/red\] +█░░░░░░░░░  10% ",
            r"^○ monitor +no limit ",
        )
        rows = [line.split()[1] for line in shown.splitlines() if line[:1] in ("●", "○")]
        assert rows == ["planner", "漢字", "[red]x[/red]", "monitor"]
        tmux.wait_for(r"planner .*\x1b\[38;5;\d+m█{10} 100%\x1b\[", how=("-e",))
        tmux.press("n")
        tmux.wait_for(r"agent ▲")
        tmux.press("/")
        tmux.press("plan", "Enter")
        tmux.wait_for(r"1 of 4 agents")
        tmux.press("r")
        tmux.wait_for(r"Reset the violations of planner\?")
        tmux.press("y")
        tmux.wait_for(r"^● planner .* 0 +0 *$")
        tmux.press("e")
        tmux.wait_for(r"Exempt planner from all limits\?")
        tmux.press("y")
        tmux.wait_for(r"^● planner +no limit .* E *$")
        with hub.http() as admin:
            assert admin.get("/api/admin/rate-limits/whitelist").json() == {"agents": ["monitor", "planner"]}
        tmux.press("Escape")
        tmux.wait_for(r"4 of 4 agents")
        tmux.press("?")
        tmux.wait_for(r"Press any key to close\.")
        tmux.press("x")
        hub.stop()
        away = r"is it running\? \(--hub, HEADGATE_HUB\)".replace(" ", r"\s+")  # it may be broken into lines
        tmux.wait_for(r"away for [1-9]\d* s; retrying every second", away, "^[●○] planner ")
        with hub_process(data, *options):
            tmux.wait_for(r"live  2 of 2 agents")  # the exempt: nobody has come back yet
            tmux("resize-window", "-x", "80", "-y", "24")
            tmux.wait_for(r"^○ planner +no limit .* E *$")
            tmux.press("q")
            ended = tmux.wait_for(r"the exit code is 0")
        assert "headgate top" not in ended  # the terminal is as it was before
