"""Every command in a process of its own, against a real hub, and the routes that it really uses."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from headgate import MemoryStore, Policy
from headgate.hub.api.routes import ROUTES
from headgate.hub.api.routing import Router
from headgate.hub.app import Hub
from headgate.hub.config_file import ConfigFile
from tests.support.agent_connections import ping_until_denied
from tests.support.cli import run_command
from tests.support.command_steps import STEPS, routes_of_commands
from tests.support.hub import ADMIN, HubServer, hub_settings
from tests.support.log_files import write_csv

pytestmark = pytest.mark.once

POLICY = """\
[limits]
light = "2/minute"
[accounts]
tools = ["web"]
plans.pro.usd = "50/calendar day"
"""
PAGE = Path(__file__).parents[2] / "docs/cli.md"


class RecordingHub(HubServer):
    """A hub with a policy file that records the routes that are used."""

    def __init__(self, file: Path) -> None:
        self.used: list[str] = []
        super().__init__(hub_settings(), Policy.load(file), MemoryStore(), config=ConfigFile(file, {}))

    def mount(self, hub: Hub) -> Any:
        router = Router(ROUTES)

        async def record(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                routes, _ = router.find(scope["raw_path"])
                self.used.append(f"{scope['method']} {routes[scope['method']].path}")
            await hub(scope, receive, send)

        return record


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingHub]:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "headgate.toml"
    file.write_text(POLICY, encoding="utf-8")
    write_csv(tmp_path, [(0, "a", "light")], name="log.csv")
    with capture_logs():
        hub = RecordingHub(file)
        try:
            yield hub
        finally:
            hub.stop()


@pytest.mark.long
def test_every_command_in_a_process_of_its_own(hub: RecordingHub) -> None:
    more = {"HEADGATE_HUB": f"http://{hub}", "HEADGATE_ADMIN_TOKEN": ADMIN}
    used: dict[str, set[str]] = {}
    hub.register("away")
    with hub.agent("planner") as planner:
        hub.run(hub.hub.messages.create_chat_channel("news", "planner", "all news"))
        ping_until_denied(planner, 12)
        held = False
        for step in STEPS:
            if step.command == "holds list" and not held:
                held = bool(hub.hub.gate.hold("planner", {"usd": "0.03"}, tool="web", hold_id="first"))
                hub.hub.gate.hold("planner", {"usd": "0.5"}, tool="web").settle()
            hub.used.clear()
            done = run_command(*step.command.split(), *step.arguments, more=more)
            seen = (step, done.returncode, done.stdout, done.stderr)
            assert done.returncode == step.code, seen
            assert re.match(step.prints, done.stdout), seen
            assert bool(done.stdout) is bool(step.prints), seen
            assert re.fullmatch(step.notes, done.stderr), seen
            used.setdefault(step.command, set()).update(hub.used)
    listed = routes_of_commands(PAGE)
    assert used == {command: listed[command] for command in used}
