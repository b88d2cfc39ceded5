"""Admin routes on the hub itself: connections, the log level, and a reload that waits for a restart."""

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from headgate import Gate, Policy
from headgate.gate.reload import PolicyWatcher
from headgate.hub.app import Hub
from headgate.hub.config_file import ConfigFile
from headgate.hub.settings import LOG_LEVELS
from tests.support.admin import LIMITS, direct_client
from tests.support.agent_connections import read_close, relay_connection
from tests.support.files import replace_file
from tests.support.hub import ADMIN, hub_server, hub_settings
from tests.support.hub_process import hub_process
from tests.support.valkey import wait_for

DISCONNECTED = (1008, "disconnected by an operator")


# Disconnect -----------------------------------------------------------------------------------------------------------


def test_b6_an_agent_is_disconnected_everywhere_and_may_come_back(logged: list[Any]) -> None:
    with hub_server() as hub, hub.http(ADMIN) as admin:
        token = hub.register("planner")
        connections = hub.agent("planner", token), hub.agent("planner", token), relay_connection(hub, "planner", token)
        with connections[0] as one, connections[1] as two, connections[2] as relay, hub.agent("other") as other:
            answer = admin.post("/api/admin/agents/planner/disconnect")
            assert (answer.status_code, answer.json()) == (200, {"agent_id": "planner", "connections": 3})
            assert read_close(one) == read_close(two) == read_close(relay) == DISCONNECTED
            assert other.ask("ping")["type"] == "pong"
        wait_for(lambda: not hub.hub.presence.is_connected("planner"), "that it has left")
        assert admin.post("/api/admin/agents/planner/disconnect").json()["connections"] == 0
        with hub.agent("planner", token) as again:
            assert again.ask("ping")["type"] == "pong"
    (line, _) = [line for line in logged if line["event"] == "agent disconnected by an operator"]
    assert (line["agent"], line["connections"], line["by"]) == ("planner", 3, "admin at 127.0.0.1")


def test_the_log_says_who_gives_and_takes_tokens(logged: list[Any]) -> None:
    with hub_server() as hub, hub.http(ADMIN) as admin:
        secrets = [
            admin.post("/api/admin/agents", json={"agent_id": "planner"}).json()["token"],
            admin.post("/api/admin/agents/planner/token").json()["token"],
            admin.post("/api/admin/invitations").json()["invitation"],
        ]
        admin.delete("/api/admin/agents/planner/token")
    told = [(line["event"], line.get("agent"), line["by"]) for line in logged if "by" in line]
    who = "admin at 127.0.0.1"
    assert told == [
        ("agent registered", "planner", who),
        ("token rotated", "planner", who),
        ("invitation created", None, who),
        ("token revoked", "planner", who),
    ]
    assert not any(secret in str(logged) for secret in secrets)


# The log level --------------------------------------------------------------------------------------------------------


def test_b6_the_log_level_is_changed_while_running(logged: list[Any]) -> None:
    with hub_server() as hub, hub.http(ADMIN) as admin:
        for name in LOG_LEVELS:
            answer = admin.put("/api/admin/log-level", json={"level": name})
            assert (answer.status_code, answer.json()) == (200, {"level": name})
            assert logging.getLogger("headgate").level == getattr(logging, name.upper())
        for wrong in ("loud", "DEBUG", ""):
            answer = admin.put("/api/admin/log-level", json={"level": wrong})
            assert (answer.status_code, answer.json()["error"]) == (400, "invalid")
            assert answer.json()["detail"] == f"level: expected one of debug, info, warning, error, got {wrong!r}"
        assert admin.put("/api/admin/log-level", json={"level": 10}).status_code == 400
        assert logging.getLogger("headgate").level == logging.ERROR
    told = [(line["to"], line["by"]) for line in logged if line["event"] == "log level changed"]
    assert told == [(name, "admin at 127.0.0.1") for name in LOG_LEVELS]


def test_b6_a_changed_log_level_shows_in_the_log(tmp_path: Path) -> None:
    with hub_process(tmp_path, "--log-level", "error") as hub, hub.http() as admin:

        def told(text: str) -> int:
            return sum(text in line for line in hub.err)

        hub.register("quiet")
        admin.put("/api/admin/log-level", json={"level": "info"}).raise_for_status()
        hub.register("heard")
        wait_for(lambda: told("agent=heard"), "the line")
        admin.put("/api/admin/log-level", json={"level": "error"}).raise_for_status()
        hub.register("quiet again")
        assert hub.stop() == 0
        assert (told("agent registered"), told("log level changed"), told("to=error")) == (1, 2, 1)


# Reload and restart ---------------------------------------------------------------------------------------------------


async def test_a_reload_says_what_waits_for_a_restart(
    tmp_path: Path, logged: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADGATE_MAX_MAIL", "7")
    file = tmp_path / "headgate.toml"
    file.write_text("[hub]\nport = 1\nmax_tasks = 5\nwebhooks = []\n")
    config = ConfigFile(file, {"host": "::1"})
    async with Hub(hub_settings(), Policy.load(file), config=config) as hub, direct_client(hub) as admin:

        async def reload() -> Any:
            answer = await admin.post("/api/admin/reload")
            return answer.json().get("waits_for_restart", answer.json())

        async def light() -> Any:
            return (await admin.get(LIMITS)).json()["defaults"]["ws"]["light"]

        assert await reload() == []
        limits = '[limits]\nlight = "9/minute"\n'
        file.write_text(f'{limits}[hub]\nport = 2\nmax_tasks = 5\nviewer_token = "0123456789abcdef"\n')
        assert await reload() == ["hub.port", "hub.viewer_token"]
        (line,) = [line for line in logged if line["event"] == "changed settings wait for a restart of the hub"]
        assert line["settings"] == ["hub.port", "hub.viewer_token"]
        assert "0123456789abcdef" not in str(logged)
        file.write_text('[hub]\nport = "1"\nmax_tasks = 5\nmax_mail = 8\nhost = "0.0.0.0"\n')
        assert await reload() == []  # the same in other words, or not decided by the file
        assert await light() == "120/minute"
        file.write_text('[limits]\nlight = "8/minute"\n[hub]\nport = 99999\nprot = 1\n')
        refused = await reload()
        assert refused["error"] == "invalid"
        assert "hub.port: expected a whole number from 0 to 65535, got '99999'" in refused["detail"]
        assert "hub.prot: expected one of port, host, " in refused["detail"]
        file.write_text("warn_at = 5\n[hub]\nport = 99999\n")
        detail = (await reload())["detail"]
        assert "warn_at: expected a number" in detail
        assert "hub.port: expected a whole number" in detail
        assert await light() == "120/minute"
        file.write_text("hub = 5\n")
        assert "hub: expected a table" in (await reload())["detail"]


@pytest.mark.parametrize("way", ["signal", "file"])
def test_a_reload_without_a_request_reports_all_mistakes_too(
    tmp_path: Path, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "headgate.toml"
    file.write_text("")
    config, gate = ConfigFile(file), Gate(Policy.load(file))
    with PolicyWatcher(gate, file, interval=0.01 if way == "file" else 1000, sighup=True, read=config.read):
        replace_file(file, "warn_at = 5\n[hub]\nport = 99999\n")
        if way == "signal":
            os.kill(os.getpid(), signal.SIGHUP)
        wait_for(lambda: "policy not reloaded" in caplog.text, "the refusal")
    assert f"{file} and settings of the hub: 2 mistakes\n  warn_at: " in caplog.text
    assert "hub.port: expected a whole number from 0 to 65535, got '99999'" in caplog.text


@pytest.mark.long
def test_a_reload_by_signal_or_by_a_changed_file_logs_the_same(tmp_path: Path) -> None:
    file = tmp_path / "headgate.toml"
    file.write_text("[hub]\nmax_tasks = 5\n")
    with hub_process(tmp_path / "data", "--config", str(file)) as hub, hub.http() as admin:

        def told(text: str) -> int:
            return sum(text in line for line in hub.err)

        replace_file(file, "[hub]\nmax_tasks = 6\nport = 1\n")  # which --port decides
        wait_for(lambda: told("settings=['hub.max_tasks']"), "that the file is read again")
        os.kill(hub.pid, signal.SIGHUP)
        wait_for(lambda: told("settings=['hub.max_tasks']") == 2, "the reload by the signal")
        replace_file(file, '[limits]\nlight = "3/minute"\n[hub]\nmax_tasks = "many"\n')
        os.kill(hub.pid, signal.SIGHUP)
        wait_for(lambda: told("policy not reloaded, the old one stays in effect: settings of the hub"), "the refusal")
        assert told("hub.max_tasks: expected a whole number")
        assert admin.get(LIMITS).json()["defaults"]["ws"]["light"] == "120/minute"
        assert hub.stop() == 0
