"""What must hold of a hub that was fuzzed or attacked: it works, has grown little, and has logged no mistake."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import connect

from tests.support.fuzz_campaign import AGENTS
from tests.support.hub import VIEWER
from tests.support.hub_process import ADMIN, ELSEWHERE, RAISED, HubProcess
from tests.support.valkey import PATIENCE

UNLIMITED = f"""{RAISED}
[hub]
max_connections_per_address = 2000
relay_rate_limit = "off"
shutdown_within = 30
"""
MOST_MEMORY = 100e6


@contextmanager
def fuzzed_hub(folder: Path, config: str) -> Iterator[tuple[HubProcess, dict[str, str], list[str]]]:
    """A hub, its agents, and a list for what is wrong.

    In the end nothing is, the hub still works, has grown little, has logged no mistake and no token, and stops.
    """
    file = folder / "headgate.toml"
    file.write_text(config)
    environment = {"HEADGATE_VIEWER_TOKEN": VIEWER}
    problems: list[str] = []
    hub = HubProcess(folder / "data", "--config", str(file), "--log-format", "json", environment=environment)
    try:
        with hub.http() as client:
            tokens = {name: register_agent(client, name) for name in (*AGENTS, "victim-1")}
        with hub.http(tokens[AGENTS[0]]) as client:
            assert client.post("/api/channels", json={"name": "plans"}).status_code == 201
        before = hub.memory()
        yield hub, {name: tokens[name] for name in AGENTS}, problems
        grown = hub.memory() - before
        if not problems:
            check_hub_works(hub)
    finally:
        code = hub.stop()
    problems += logged_mistakes(hub.err, (ADMIN, VIEWER, *tokens.values()))
    print(f"memory +{grown / 1e6:.1f} MB; {len(hub.err):,} lines of log")
    assert not problems, "\n".join(problems[:20])
    assert code == 0
    assert grown < MOST_MEMORY, f"{grown:,} bytes more"


def logged_mistakes(log: Iterable[str], secrets: Iterable[str] = ()) -> list[str]:
    """The lines of a hub's log, in JSON, that tell of a mistake of its own or contain a secret."""
    found = []
    for line in log:
        logged = json.loads(line)
        wrong = logged["level"] not in ("debug", "info", "warning") or "exception" in logged or "Traceback" in line
        if wrong or any(secret in line for secret in secrets):
            found.append(f"logged: {line[:3000]}")
    return found


def register_agent(client: httpx.Client, name: str) -> str:
    answer = client.post("/api/admin/agents", json={"agent_id": name})
    return str(answer.raise_for_status().json()["token"])


def check_hub_works(hub: HubProcess) -> None:
    """A new agent, at another address than those before it, can do what agents do."""
    with hub.http(address=ELSEWHERE) as client:
        health = client.get("/api/health").json()
        assert health["status"] == "ok", health
        name = channel = "fresh"
        token = register_agent(client, name)
        exempt = client.post("/api/admin/rate-limits/whitelist", json={"agent_id": name})  # from limits that were set
        assert exempt.is_success, exempt.text
        for _ in range(len(AGENTS) + 1):  # some may go to agents whose end the hub hasn't noticed yet
            assert client.post("/api/admin/tasks", json={"payload": None}).status_code == 201
    where, source = f"ws://{hub}/ws", (ELSEWHERE, 0)
    with (
        hub.http(token, ELSEWHERE) as client,
        connect(where, compression=None, proxy=None, open_timeout=PATIENCE, source_address=source) as socket,
    ):

        def ask(kind: str, expected: str, **fields: object) -> dict[str, Any]:
            socket.send(json.dumps({"type": kind, **fields}))
            return hear(expected)

        def hear(expected: str) -> dict[str, Any]:
            while True:
                heard: dict[str, Any] = json.loads(socket.recv(PATIENCE))
                if heard["type"] == expected:
                    return heard
                assert heard["type"] == "task_assigned", heard

        created = client.post("/api/channels", json={"name": channel})
        assert created.status_code == 201, created.text
        assert client.post("/api/messages", json={"to": name, "body": 1}).json()["delivered"] is False
        assert ask("identify", "identified", agent_id=name, token=token)["mail"] == 1
        task = hear("task_assigned")["task_id"]
        assert ask("task_complete", "task_updated", task_id=task)["state"] == "completed"
        ask("channel_subscribe", "subscribed", channel=channel)
        number = client.post(f"/api/channels/{channel}/publish", json={"body": "news"}).json()["number"]
        assert hear("channel_message")["number"] == number
