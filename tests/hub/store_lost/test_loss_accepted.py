"""The end of a loss: the data is back, or an admin accepts that it is gone."""

import asyncio
import json
import os
import re
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socket import SHUT_RDWR
from textwrap import dedent
from typing import Any, Final
from uuid import uuid4

import pytest
from msgspec import Raw
from websockets.exceptions import ConnectionClosed

from headgate.cli import main
from headgate.errors import StoreAway, StoreLost
from headgate.hub.api import admin_hub_routes
from headgate.hub.sockets.frames import Message
from tests.support.hub import ADMIN, HubServer, hub_server
from tests.support.lost_store import (
    LOST,
    accept_loss,
    dump_keys,
    flush_server,
    hub_on,
    limit_of_planner,
    lose_and_accept,
    lose_data,
    read_health,
    restore_keys,
    set_override,
    try_to_register,
    wait_until_store_is,
)
from tests.support.valkey import PATIENCE, ValkeyServer, wait_for

pytestmark = pytest.mark.long


def test_a_store_that_has_its_data_again_needs_nothing_else(
    own_server: ValkeyServer, hub: HubServer, logged: list[Any]
) -> None:
    token = hub.register("bank")
    assert set_override(hub) == 200
    saved = dump_keys(own_server)
    lose_data(own_server, hub)
    restore_keys(own_server, saved)
    wait_until_store_is(hub, "ok")
    assert hub.run(hub.hub.registry.verify("bank", token))
    assert try_to_register(hub, "bank") == (409, "exists")
    assert set_override(hub, "8/minute") == 200
    assert limit_of_planner(hub) == "8/minute"
    assert [line for line in logged if line["event"] == "the store has its data again"]


def test_accepting_lets_agents_register_again_and_closes_the_old_connections(
    own_server: ValkeyServer, tmp_path: Path
) -> None:
    with hub_on(own_server, tmp_path) as hub:
        assert set_override(hub) == 200
        old = hub.register("bank")
        with hub.agent("bank", old) as bank, hub.agent("clerk") as clerk:
            lose_data(own_server, hub)
            assert accept_loss(hub, "keep") == (200, {"accepted": True, "store": "ok", "problems": []})
            for agent in (bank, clerk):
                with pytest.raises(ConnectionClosed, match="1008"):
                    agent.hear()
        assert not hub.run(hub.hub.registry.verify("bank", old))
        assert try_to_register(hub, "bank") == (201, "")
        assert limit_of_planner(hub) == "10/minute", "the store has no overrides"
        assert set_override(hub) == 200
    with hub_on(own_server, tmp_path) as hub:
        assert read_health(hub)["store"] == "ok", "the new generation was saved"


@pytest.mark.parametrize("choice", ["keep", "drop"])
def test_data_of_agents_is_kept_or_dropped_as_the_admin_says(
    own_server: ValkeyServer, hub: HubServer, choice: str
) -> None:
    bank = hub.register("bank")
    signal = {"type": "a", "entity": "b", "weight": 1, "timestamp": 1}
    with hub.http(ADMIN) as admin, hub.http(bank) as http, hub.agent("clerk") as clerk:
        assert clerk.ask("message", to="bank", body="secret")["delivered"] is False
        admin.post("/api/admin/signals", json={"agent_id": "bank", "session": "s", "signal": signal})
        task = http.post("/api/tasks", json={"payload": "secret"}).json()["task_id"]
        lose_and_accept(own_server, hub, choice)
        token = admin.post("/api/admin/agents", json={"agent_id": "bank"}).json()["token"]
        with hub.http(token) as stranger:
            found = [
                len(stranger.get("/api/mailbox").json()["messages"]),
                len(stranger.get("/api/sessions/s/signals").json()["signals"]),
                len(stranger.get("/api/tasks").json()["tasks"]),
            ]
        assert found == ([1, 1, 1] if choice == "keep" else [0, 0, 0])
        assert [one["task_id"] for one in admin.get("/api/admin/tasks").json()["tasks"]] == [task], "not the work"


@pytest.mark.parametrize("choice", ["keep", "drop"])
def test_sessions_and_chat_channels_are_kept_or_dropped_as_the_admin_says(
    own_server: ValkeyServer, tmp_path: Path, choice: str
) -> None:
    with hub_on(own_server, tmp_path) as hub:
        bank = hub.register("bank")
        with hub.http(bank) as http, hub.agent("bank", bank) as agent:
            assert http.post("/api/channels", json={"name": "plans"}).status_code == 201
            assert agent.ask("session_open", session="s", rate=1, burst=5)["type"] == "session_opened"
            lose_and_accept(own_server, hub, choice)
        assert use_old_session_and_channel(hub) == (
            ["signal_logged", "plans"] if choice == "keep" else ["session_closed", "forbidden"]
        )
        assert hub.hub.sessions.open_sessions == (choice == "keep")
    with hub_on(own_server, tmp_path) as hub:
        assert hub.hub.sessions.open_sessions == (choice == "keep"), "after a restart as well"
        channels, _ = hub.hub.messages.chat_channels(10)
        assert [(one.name, one.creator) for one in channels][1:] == ([] if choice == "keep" else [("plans", "")])


def use_old_session_and_channel(hub: HubServer) -> list[str]:
    """What becomes of a signal in the session of the old bank, and of a deletion of its chat channel."""
    signal = {"type": "a", "entity": "b", "weight": 1, "timestamp": 1}
    with hub.http(ADMIN) as admin:
        token = admin.post("/api/admin/agents", json={"agent_id": "bank"}).json()["token"]
    with hub.http(token) as http, hub.agent("bank", token) as agent:
        logged = agent.ask("session_signal", session="s", signal=signal)
        deleted = http.delete("/api/channels/plans").json()
        return [logged.get("error", logged["type"]), deleted.get("error", deleted.get("name"))]


def test_the_next_owner_of_a_name_has_not_held_the_tasks_of_the_last(own_server: ValkeyServer, hub: HubServer) -> None:
    with hub.http(ADMIN) as admin, hub.agent("bank") as bank:
        task = admin.post("/api/admin/tasks", json={"payload": 1}).json()["task_id"]
        assert bank.hear()["task_id"] == task
        bank.ask("task_accepted", task_id=task)
        lose_and_accept(own_server, hub)
        wait_for(lambda: hub.hub.scheduler.counts()["queued"], "the task")
        assert hub.hub.scheduler._open[task].holder is None
        query = "SELECT creator, agent FROM tasks"
        assert hub.run(hub.hub.database.run(lambda db: db.execute(query).fetchall())) == [("", None)]


def test_the_next_owner_of_a_name_has_the_whole_share_of_an_agent(own_server: ValkeyServer) -> None:
    with hub_on(own_server, max_counters=1, max_tasks_per_agent=1) as hub:

        def use_up(token: str, keys: str) -> list[int]:
            with hub.http(token) as http:
                checks = [http.post("/v1/check", json={"key": key, "window_ms": 31_536_000_000}) for key in keys]
                return [answer.status_code for answer in checks] + [
                    http.post("/api/tasks", json={"payload": 1}).status_code for _ in range(2)
                ]

        assert use_up(hub.register("bank"), "ab") == [200, 409, 201, 409]
        lose_and_accept(own_server, hub)
        assert use_up(hub.register("bank"), "cd") == [200, 409, 201, 409]


def test_undelivered_messages_in_memory_are_dropped_too(own_server: ValkeyServer, hub: HubServer) -> None:
    """The disk was full when a connection ended, so its messages wait for the disk."""
    hub.register("bank")
    messages = hub.hub.messages
    messages._unwritten["bank"] = [Message(sender="clerk", body=Raw(b'"secret"'), at=1.0)]
    lose_and_accept(own_server, hub)
    hub.run(messages._flush())
    assert hub.run(messages.waiting("bank")) == 0


@pytest.mark.long
def test_unsent_messages_do_not_reach_the_next_owner(own_server: ValkeyServer, tmp_path: Path) -> None:
    """They go into the mailbox when the connection of the old one ends, which is before the mailboxes are emptied."""
    body = Raw(b'"' + b"x" * 500_000 + b'"')
    with hub_on(own_server, tmp_path) as hub, hub.agent("bank") as bank:
        (socket,) = hub.hub.presence.sockets_of("bank")
        while hub.run(hub.hub.messages.waiting("bank")) < 20:  # the queue is full, since nobody reads
            hub.run(hub.hub.messages.send("clerk", "bank", body))
        assert socket.queued
        lose_and_accept(own_server, hub)
        assert hub.run(hub.hub.messages.waiting("bank")) == 0
        bank.socket.socket.shutdown(SHUT_RDWR)  # it would wait for the hub's close, behind all that it hasn't read


def test_a_store_is_not_accepted_while_a_connection_stays_open(
    own_server: ValkeyServer, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_hub_routes, "_LEAVE_WITHIN", 0.05)
    with hub.agent("clerk") as clerk:
        hub.register("bank")
        lose_data(own_server, hub)
        busy, release = threading.Event(), threading.Event()

        def work(_db: sqlite3.Connection) -> None:
            busy.set()
            release.wait(PATIENCE)

        async def keep_database_busy() -> None:
            hub.hub.messages._background.spawn(hub.hub.database.run(work))

        hub.run(keep_database_busy())
        assert busy.wait(PATIENCE)
        try:
            clerk.say("channel_publish", channel="general", body=1)
            wait_for(hub.hub.presence.sockets_of("clerk")[0].busy.locked, "the frame")
            status, answer = accept_loss(hub, "drop")
            assert (status, answer["error"]) == (503, "unavailable")
            assert answer["detail"] == "some agents' connections are still open; try again in a moment"
            assert read_health(hub)["store"] == "lost"
        finally:
            release.set()
        monkeypatch.undo()
        assert accept_loss(hub, "drop")[0] == 200


def test_admins_who_accept_at_the_same_time_start_one_generation(own_server: ValkeyServer, tmp_path: Path) -> None:
    with hub_on(own_server, tmp_path / "one") as one, hub_on(own_server, tmp_path / "two") as two:
        for _ in range(3):
            flush_server(own_server)
            for hub in (one, two):
                wait_until_store_is(hub, "lost")
            with ThreadPoolExecutor() as admins:
                answers = list(admins.map(lambda hub: accept_loss(hub, "drop"), [one, one, one, two, two]))
            assert [status for status, _ in answers] == [200] * 5
            accepted = [answer["accepted"] for _, answer in answers]
            assert (sum(accepted[:3]), sum(accepted[3:])) == (1, 1), "there was nothing left to accept for the others"
            assert one.hub.store_guard._saved[0] == two.hub.store_guard._saved[0]
            assert [try_to_register(hub, f"agent-{uuid4()}") for hub in (one, two)] == [(201, "")] * 2


class EventAtAcceptance:
    """Something happens while an acceptance waits until the agents have left."""

    def __init__(self, hub: HubServer, monkeypatch: pytest.MonkeyPatch, happen: Callable[[], object]) -> None:
        self._happen: Final = happen
        self._drop_all: Final = hub.hub.agent_sockets.drop_all
        monkeypatch.setattr(hub.hub.agent_sockets, "drop_all", self)

    async def __call__(self, within: float) -> bool:
        left = await self._drop_all(within)
        await asyncio.to_thread(self._happen)
        return left


def test_a_store_that_has_its_data_again_meanwhile_is_not_accepted(
    own_server: ValkeyServer, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub.agent("clerk") as clerk:
        hub.register("bank")
        assert clerk.ask("message", to="bank", body="secret")["delivered"] is False
        saved = dump_keys(own_server)
        lose_data(own_server, hub)
        EventAtAcceptance(hub, monkeypatch, lambda: restore_keys(own_server, saved))
        assert accept_loss(hub, "drop") == (200, {"accepted": False, "store": "ok", "problems": []})
        assert hub.run(hub.hub.messages.waiting("bank")) == 1
        assert try_to_register(hub, "bank") == (409, "exists")


def test_nothing_is_dropped_if_the_store_cannot_be_accepted(
    own_server: ValkeyServer, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub.agent("clerk") as clerk:
        hub.register("bank")
        assert clerk.ask("message", to="bank", body="secret")["delivered"] is False
        lose_data(own_server, hub)
        with monkeypatch.context() as until_here:
            EventAtAcceptance(hub, until_here, own_server.kill)
            status, answer = accept_loss(hub, "drop")
        assert (status, answer["error"]) == (503, "unavailable")
        assert hub.run(hub.hub.messages.waiting("bank")) == 1
        own_server.start()
        wait_until_store_is(hub, "lost")
        assert accept_loss(hub, "drop")[1]["accepted"]
        assert hub.run(hub.hub.messages.waiting("bank")) == 0


@pytest.mark.parametrize("step", ["messages.drop_agent_data", "gate.areload"])
def test_a_store_stays_lost_until_every_step_of_the_acceptance_is_done(
    own_server: ValkeyServer, hub: HubServer, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Otherwise the admin couldn't accept it again, and a stranger could inherit, or old limits stay in effect."""
    assert set_override(hub) == 200
    lose_data(own_server, hub)

    async def fail(*_: object, **__: object) -> None:
        raise StoreAway("out of order")

    with monkeypatch.context() as until_here:
        part, name = step.split(".")
        until_here.setattr(getattr(hub.hub, part), name, fail)
        assert accept_loss(hub, "drop")[0] == 503
    assert try_to_register(hub, "bank") == (503, "store_lost")
    assert accept_loss(hub, "drop") == (200, {"accepted": True, "store": "ok", "problems": []})
    assert limit_of_planner(hub) == "10/minute"


def test_nobody_is_verified_from_memory_once_the_admin_wants_to_accept_the_store(own_server: ValkeyServer) -> None:
    """Otherwise the old agent could connect again until the store is accepted, and stay beside the next one."""
    with hub_on(own_server) as hub:
        token = hub.register("bank")
        assert hub.run(hub.hub.registry.verify("bank", token))
        flush_server(own_server)
        assert hub.run(hub.hub.registry.verify("bank", token))

        async def forget() -> None:
            hub.hub.registry.forget_verified()

        hub.run(forget())
        with pytest.raises(StoreLost):
            hub.run(hub.hub.registry.verify("bank", token))


def test_a_request_of_the_last_owner_is_not_carried_out_in_the_name_of_the_next(own_server: ValkeyServer) -> None:
    with hub_on(own_server) as hub:
        bank, clerk = hub.register("bank"), hub.register("clerk")
        with hub.unfinished_post(bank, "/api/messages", {"to": "clerk", "body": "pay the last owner"}) as request:
            lose_and_accept(own_server, hub)
            clerk = hub.register("clerk")
            assert request.finish() == 401
        with hub.http(clerk) as reader:
            assert reader.get("/api/mailbox").json() == {"messages": []}


def test_there_is_nothing_to_accept_unless_the_store_is_lost(hub: HubServer) -> None:
    with hub.agent("planner") as planner:
        wait_for(lambda: hub.hub.store_guard._saved[1].agents == 1, "the probe")
        before = hub.hub.store_guard._saved
        assert accept_loss(hub, "drop") == (200, {"accepted": False, "store": "ok", "problems": []})
        assert planner.ask("ping")["type"] == "pong"
        assert hub.hub.store_guard._saved == before
    with hub_server() as hub:
        assert accept_loss(hub, "drop") == (200, {"accepted": False, "store": "memory", "problems": []})
        with hub.http(ADMIN) as admin:
            assert admin.get("/api/admin/store").json() == {"store": "memory", "problems": [], "address": ""}
            refused = admin.post("/api/admin/store/accept", json={})
            assert refused.json()["detail"] == "body: Object missing required field `agent_data`"


def test_the_command_shows_and_resolves_the_loss(
    own_server: ValkeyServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    logged: list[Any],
) -> None:
    monkeypatch.setenv("HEADGATE_ADMIN_TOKEN", ADMIN)
    with hub_on(own_server, tmp_path) as hub:
        monkeypatch.setenv("HEADGATE_HUB", f"http://{hub}")
        assert main(["store"]) == 0
        assert capsys.readouterr().out == "the store has its data\n"
        lose_data(own_server, hub)
        assert main(["store"]) == 1
        problem = f"{LOST}: nobody can register or hold, and limits can't be changed"
        remedy = "restore it, or: headgate store accept --agent-data drop|keep (docs: A store that lost its data)"
        assert capsys.readouterr().out == f"the store is lost\n{problem}\n{remedy}\n"
        assert main(["store", "--json"]) == 1
        assert json.loads(capsys.readouterr().out) == {"store": "lost", "address": "", "problems": [problem]}
        with pytest.raises(SystemExit) as ended:
            main(["store", "accept"])
        assert ended.value.code == 2
        assert "--agent-data" in capsys.readouterr().err
        assert main(["store", "accept", "--agent-data", "drop", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"accepted": True, "store": "ok", "problems": []}
        assert main(["store", "accept", "--agent-data", "drop"]) == 0
        assert capsys.readouterr().out == "the store has its data: there was nothing to accept\n"


def test_the_script_of_the_docs_sets_saved_limits_again(own_server: ValkeyServer, tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "hub-shared-store.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^ +```python\n(.*?)^ +```$", page, re.DOTALL | re.MULTILINE)
    limits, exempt = "/api/admin/rate-limits", "/api/admin/rate-limits/whitelist"
    with hub_on(own_server, tmp_path / "data") as hub, hub.http(ADMIN) as admin:
        admin.put(f"{limits}/defaults", json={"heavy": "7/minute", "ws": {"light": "blocked"}, "session": "9/second"})
        admin.put(f"{limits}/a%2Fb", json={"normal": ["60/minute", "5/second burst 2"], "session": "unlimited"})
        admin.put(f"{limits}/na%C3%AFve", json={"http": {"light": "unlimited"}})
        admin.put(exempt, json={"agents": ["monitor", "a/b"]})
        saved = [admin.get(path).json() for path in (limits, exempt)]
        (tmp_path / "limits.json").write_text(json.dumps(saved[0]))
        (tmp_path / "exempt.json").write_text(json.dumps(saved[1]))
        lose_and_accept(own_server, hub, "keep")
        assert admin.get(limits).json() != saved[0]
        variables = os.environ | {"HEADGATE_HUB": f"http://{hub}", "HEADGATE_ADMIN_TOKEN": ADMIN, "no_proxy": "*"}
        command = [sys.executable, "-c", dedent(script)]
        subprocess.run(command, cwd=tmp_path, env=variables, timeout=PATIENCE, check=True)
        assert [admin.get(path).json() for path in (limits, exempt)] == saved


def test_a_revocation_counts_on_an_accepted_server_whose_clock_is_behind(
    own_server: ValkeyServer, hub: HubServer
) -> None:
    """Changes of tokens have times that only go forward, but only within one server's data."""
    with hub.http(ADMIN) as admin:
        hub.register("planner")
        with own_server.client() as client:  # once its clock was ahead, all later changes are
            (names,) = client.keys("*{agents}*:names")
            client.zadd(names.replace(b":names", b":changes"), {"writer": 2**52})
        admin.post("/api/admin/agents/planner/token").raise_for_status()
        lose_data(own_server, hub)
        assert accept_loss(hub, "keep")[1]["accepted"]
        with hub.agent("planner", hub.register("planner")) as wire:
            admin.delete("/api/admin/agents/planner/token").raise_for_status()
            with pytest.raises(ConnectionClosed, match="revoked or replaced"):
                wire.hear()
