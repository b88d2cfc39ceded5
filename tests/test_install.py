"""The commands of docs/install.md do what the page says, in other directories."""

import os
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from headgate._version import VERSION
from tests.support.hub_process import RAISED, HubProcess, hub_process
from tests.support.valkey import PATIENCE, wait_for

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")


def section_commands(title: str) -> list[str]:
    """The shell commands of a section, block by block."""
    (section,) = re.findall(rf"^## {title}$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return re.findall(r"```sh\n(.*?)```", section, re.DOTALL)


def run(text: str, cwd: Path, **variables: str | None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in {**os.environ, **variables}.items() if value is not None}
    done = subprocess.run(["bash", "-euc", text], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)  # for the report of a test that fails
    return done


class Publisher:
    """An agent that publishes without a pause, and counts what was acknowledged."""

    def __init__(self, hub: HubProcess, token: str) -> None:
        self.acknowledged = 0
        self._stopped = False
        self._hub, self._token = hub, token
        self._thread = threading.Thread(target=self._publish)
        self._thread.start()

    def _publish(self) -> None:
        with self._hub.http(self._token) as http:
            while not self._stopped:
                body = self.acknowledged + 1
                http.post("/api/channels/general/publish", json={"body": body}).raise_for_status()
                self.acknowledged = body

    def stop(self) -> None:
        self._stopped = True
        self._thread.join(PATIENCE)


@contextmanager
def running_publisher(hub: HubProcess) -> Iterator[Publisher]:
    publisher = Publisher(hub, hub.register("publisher"))
    try:
        wait_for(lambda: publisher.acknowledged > 10, "some messages")
        yield publisher
    finally:
        publisher.stop()


def fill_hub(hub: HubProcess) -> dict[str, str]:
    """Make some of everything that a hub stores; the tokens of its agents."""
    tokens = {name: hub.register(name) for name in ("planner", "reader")}
    with hub.http() as admin, hub.http(tokens["planner"]) as planner:
        for answer in (
            admin.put("/api/admin/rate-limits/planner", json={"heavy": "77/minute"}),
            admin.put("/api/admin/rate-limits/defaults", json={"normal": "1234567/second"}),
            admin.post("/api/admin/rate-limits/whitelist", json={"agent_id": "reader"}),
            planner.post("/api/messages", json={"to": "reader", "body": "hello"}),
            planner.post("/api/channels", json={"name": "plans"}),
            planner.post("/api/channels/plans/publish", json={"body": "later"}),
            planner.post("/api/tasks", json={"payload": {"dig": "here"}}),
            planner.post("/v1/holds", json={"costs": {"tokens": 5}, "id": "kept", "lease": 3600}),
        ):
            answer.raise_for_status()
    return tokens


def read_stored(hub: HubProcess, tokens: dict[str, str]) -> dict[str, Any]:
    """What a hub has stored."""
    with hub.http() as admin, hub.http(tokens["reader"]) as reader, hub.http(tokens["planner"]) as planner:
        limits, agents = "/api/admin/rate-limits", admin.get("/api/admin/agents").raise_for_status().json()
        paths = (limits, f"{limits}/whitelist", "/api/admin/changes", "/api/admin/tasks")
        found = {path: admin.get(path).raise_for_status().json() for path in paths}
        found["agents"] = [agent["agent_id"] for agent in agents["agents"]]
        found["mail"] = reader.get("/api/mailbox").raise_for_status().json()
        hold = planner.get("/v1/holds/kept").raise_for_status().json()
        found["hold"] = hold["state"], hold["costs"]
        found["plans"] = planner.get("/api/channels/plans/messages").raise_for_status().json()
    return found


@pytest.mark.long
def test_a_backup_of_a_busy_hub_is_complete(tmp_path: Path) -> None:
    config, data, backups = tmp_path / "headgate.toml", tmp_path / "lib" / "headgate", tmp_path / "backups"
    config.write_text(f"{RAISED}\n[hub]\nmax_history = 1000000\n")
    backup, restore = section_commands("Back up")[0], section_commands("Restore")[0]
    with hub_process(data, "--config", str(config)) as hub:
        tokens = fill_hub(hub)
        with running_publisher(hub) as publisher:
            before = read_stored(hub, tokens)
            published = publisher.acknowledged
            text = backup.replace("/var/lib/headgate", str(data)).replace("/var/backups/headgate", str(backups))
            done = run(text, tmp_path)
            assert (done.returncode, done.stderr) == (0, "")
            wait_for(lambda: publisher.acknowledged > published + 10, "more messages")  # nobody was stopped
        (made,) = backups.iterdir()
        again = re.sub(r"\$\(date [^)]*\)", made.name, text)
        assert run(again, tmp_path).returncode != 0, "it is there already"
        hub.register("late")
    files = sorted(made.iterdir())
    assert [(file.name, stat.S_IMODE(file.stat().st_mode)) for file in files] == [
        ("changes.db", 0o600),
        ("hub.db", 0o600),
        ("limits.db", 0o600),
    ]
    for file in files:
        with closing(sqlite3.connect(file)) as db:
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]

    text = re.sub(r"/var/backups/headgate/\S+", str(made), restore).replace("/var/lib/headgate", str(data))
    assert run(text, tmp_path).returncode == 0
    with hub_process(data, "--config", str(config)) as hub:
        assert read_stored(hub, tokens) == before
        with hub.http(tokens["planner"]) as planner:
            messages = planner.get("/api/channels/general/messages?limit=100").raise_for_status().json()["messages"]
        bodies = [message["body"] for message in messages]
        assert bodies == list(range(bodies[0], bodies[-1] + 1))
        assert bodies[-1] >= published
    assert (data.parent / "headgate.before" / "hub.db").exists()


@pytest.mark.long
def test_the_commands_install_a_hub_with_its_token_and_settings(tmp_path: Path) -> None:
    """As plain Python: that the wheel compiles is for other tests."""
    packages, settings, unit = section_commands("With systemd")
    for name in ("opt", "etc"):
        (tmp_path / name).mkdir()
    text = (packages + settings).replace("/opt/headgate", f"{tmp_path}/opt/headgate")
    text = text.replace("/etc/headgate", f"{tmp_path}/etc/headgate").replace("python3 ", f"{sys.executable} ")
    checkout = tmp_path / "checkout"  # builds leave files there
    shutil.copytree(ROOT / "docs", checkout / "docs")
    shutil.copytree(ROOT / "src", checkout / "src", ignore=shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "setup.py", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    done = run(text, checkout, HEADGATE_PURE="1", PYTHONPATH=None)
    assert done.returncode == 0
    assert f"headgate {VERSION} (plain Python: not compiled)\n" in done.stdout
    token = tmp_path / "etc" / "headgate" / "admin-token"
    assert re.fullmatch(r"hga_\S{43}\n", token.read_text())
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert [line.split()[0] for line in unit.splitlines()] == ["install", "systemctl", "systemctl"]
    assert (ROOT / unit.split()[3]).is_file()
