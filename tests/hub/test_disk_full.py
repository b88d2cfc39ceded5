"""A disk that takes no more: whatever has to be written is `unavailable`, nothing is half done, and health tells."""

import json
import resource
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from headgate import MemoryStore, RedisStore
from headgate.gate.changes import override
from headgate.hub.api.routes import ROUTES
from headgate.stores.base import Change, DataVersion
from headgate.stores.sqlite import ChangeLogError, SqliteChangeLog
from tests.support.hub import agent_connection, hub_server
from tests.support.hub_process import ADMIN, RAISED, HubProcess, hub_process
from tests.support.valkey import PATIENCE, ValkeyServer, wait_for

pytestmark = pytest.mark.long

SIGNAL = {"type": "a", "entity": "b", "weight": 1, "timestamp": 1}
NOT_WRITING = {
    ("POST", "/api/admin/check"): "counted in memory",
    ("DELETE", "/api/admin/violations/{agent}"): "counted in memory",
    ("POST", "/v1/check"): "counted in memory",
    ("DELETE", "/v1/counters/{key}"): "counted in memory",
    ("POST", "/api/admin/reload"): "reads only",
    ("POST", "/api/admin/store/accept"): "only for a shared store",
    ("PUT", "/api/admin/log-level"): "in memory",
    ("POST", "/api/admin/agents/{agent}/disconnect"): "in memory",
}


PLAN = """
[accounts.plans.pro]
usd = "5/calendar day"
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubProcess]:
    policy = tmp_path / "headgate.toml"
    policy.write_text(RAISED + PLAN)
    with hub_process(tmp_path / "data", "--config", str(policy)) as hub:
        yield hub


@contextmanager
def full_disk(hub: HubProcess) -> Iterator[None]:
    """No file of the hub can be written meanwhile."""
    soft, hard = resource.prlimit(hub.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(hub.pid, resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.prlimit(hub.pid, resource.RLIMIT_FSIZE, (soft, hard))


def register(hub: HubProcess, name: str) -> str:
    with hub.http() as admin:
        token: str = admin.post("/api/admin/agents", json={"agent_id": name}).json()["token"]
        return token


def health(hub: HubProcess) -> tuple[str, str, list[str]]:
    with hub.http("") as anyone:
        answer = anyone.get("/health")
        assert answer.status_code == 200
        found = answer.json()
        return found["status"], found["disk"], found["problems"]


def calls(hub: HubProcess, token: str) -> list[tuple[tuple[str, str], httpx.Request]]:
    """One call for each route that writes, with the path in the table."""
    limits = "/api/admin/rate-limits"
    found: list[tuple[str, str, str, Any]] = [
        ("", "POST", "/api/onboard/register", {"agent_id": "new"}),
        (token, "POST", "/api/messages", {"to": "bank", "body": 1}),
        (token, "POST", "/api/mailbox/ack", {"numbers": [1]}),
        (token, "POST", "/api/channels", {"name": "room"}),
        (token, "POST", "/api/channels/{name}/publish", {"body": 1}),
        (token, "DELETE", "/api/channels/{name}", None),
        (token, "POST", "/api/tasks", {"payload": 1}),
        (ADMIN, "PUT", f"{limits}/defaults", {"light": "100000/second"}),
        (ADMIN, "DELETE", f"{limits}/defaults", None),
        (ADMIN, "DELETE", f"{limits}/defaults/{{tier}}", None),
        (ADMIN, "PUT", f"{limits}/{{agent}}", {"light": "200000/second"}),
        (ADMIN, "DELETE", f"{limits}/{{agent}}", None),
        (ADMIN, "PUT", f"{limits}/whitelist", {"agents": ["bank"]}),
        (ADMIN, "POST", f"{limits}/whitelist", {"agent_id": "bank"}),
        (ADMIN, "DELETE", f"{limits}/whitelist/{{agent}}", None),
        (ADMIN, "POST", "/api/admin/agents", {"agent_id": "new"}),
        (ADMIN, "DELETE", "/api/admin/agents/{agent}/role", None),
        (ADMIN, "PUT", "/api/admin/agents/{agent}/role", {"role": "admin"}),
        (ADMIN, "POST", "/api/admin/admins", {"name": "new", "role": "viewer"}),
        (ADMIN, "DELETE", "/api/admin/admins/{agent}", None),
        (ADMIN, "POST", "/api/admin/agents/{agent}/token", None),
        (ADMIN, "DELETE", "/api/admin/agents/{agent}/token", None),
        (ADMIN, "PUT", "/api/admin/agents/{agent}/block", {}),
        (ADMIN, "DELETE", "/api/admin/agents/{agent}/block", None),
        (ADMIN, "PUT", "/api/admin/accounts/{account}", {"usd": "5/calendar day"}),
        (ADMIN, "DELETE", "/api/admin/accounts/{account}", None),
        (ADMIN, "PUT", "/api/admin/account-defaults/levels/{level}", {"usd": "5/calendar day"}),
        (ADMIN, "DELETE", "/api/admin/account-defaults/levels/{level}", None),
        (ADMIN, "PUT", "/api/admin/account-defaults/plans/{plan}", {"usd": "6/calendar day"}),
        (ADMIN, "DELETE", "/api/admin/account-defaults/plans/{plan}", None),
        (ADMIN, "PUT", "/api/admin/agents/{agent}/account", {"account": "acme/search"}),
        (ADMIN, "POST", "/api/admin/invitations", None),
        (ADMIN, "POST", "/api/admin/tasks", {"payload": 1}),
        (ADMIN, "POST", "/api/admin/signals", {"agent_id": "bank", "session": "s", "signal": SIGNAL}),
        (token, "POST", "/v1/holds", {"costs": {"tokens": 1}, "id": "new"}),
        (token, "POST", "/v1/holds/{id}/extend", {"total": {"tokens": 2}}),
        (token, "POST", "/v1/holds/{id}/settle", {"costs": {"tokens": 3}}),
        (token, "POST", "/v1/holds/{id}/cancel", None),
        (token, "POST", "/api/onboard/rotate", None),
        (token, "POST", "/api/onboard/revoke", None),
    ]
    requests = []
    for secret, method, path, body in found:
        url = f"http://{hub}" + path.replace("{agent}", "exempt").replace("{name}", "plans").replace("{tier}", "heavy")
        url = url.replace("{account}", "acme").replace("{level}", "team").replace("{plan}", "pro")
        url = url.replace("{id}", "cancelled" if path.endswith("cancel") else "held")
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        requests.append(((method, path), httpx.Request(method, url, json=body, headers=headers)))
    return requests


def test_every_route_that_writes_is_unavailable_and_changes_nothing(hub: HubProcess, tmp_path: Path) -> None:
    token = register(hub, "planner")
    for name in ("bank", "exempt"):
        register(hub, name)
    with hub.http() as admin:
        admin.post("/api/admin/rate-limits/whitelist", json={"agent_id": "exempt"})
        admin.put("/api/admin/rate-limits/exempt", json={"heavy": "5/second"})
        admin.put("/api/admin/agents/exempt/block", json={})
        admin.put("/api/admin/agents/exempt/role", json={"role": "viewer"})
        for path in ("accounts/acme", "account-defaults/levels/team", "account-defaults/plans/pro"):
            assert admin.put(f"/api/admin/{path}", json={"usd": "4/calendar day"}).status_code == 200
    with agent_connection(hub, "bank", rotated_log(hub, "bank")) as bank:
        bank.ask("message", to="planner", body="for the mailbox")
    with hub.http(token) as planner:
        assert planner.post("/api/channels", json={"name": "plans"}).status_code == 201
        for name in ("held", "cancelled"):
            assert planner.post("/v1/holds", json={"costs": {"tokens": 1}, "id": name}).status_code == 201
    before = content(tmp_path)
    every = calls(hub, token)
    covered = {*NOT_WRITING, *[where for where, _ in every]}
    assert covered == {(route.method, route.path) for route in ROUTES if route.method != "GET"}
    with httpx.Client(timeout=PATIENCE, trust_env=False) as client:
        with full_disk(hub):
            for where, request in every:
                answer = client.send(request)
                assert (where, answer.status_code, answer.json()["error"]) == (where, 503, "unavailable")
            assert content(tmp_path) == before
            status, disk, problems = health(hub)
            assert (status, disk) == ("degraded", "failing")
            assert problems == ["the disk can't be written: disk I/O error"]
        assert every[-1][0] == ("POST", "/api/onboard/revoke")
        for where, request in every[:-1]:  # the one before has replaced its token
            answer = client.send(request)
            assert (where, answer.status_code < 300 or answer.json()["error"] == "exists") == (where, True)
        wait_for(lambda: health(hub) == ("ok", "ok", []), "a disk that can be written")
    assert "Traceback" not in "".join(hub.err)


def rotated_log(hub: HubProcess, name: str) -> str:
    with hub.http() as admin:
        token: str = admin.post(f"/api/admin/agents/{name}/token").json()["token"]
        return token


def content(folder: Path) -> dict[str, list[Any]]:
    """All rows of all tables."""
    found = {}
    for file in ("hub.db", "changes.db", "limits.db"):
        with sqlite3.connect(f"file:{folder / 'data' / file}?mode=ro", uri=True) as db:
            tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            for table in tables:
                rows = db.execute(f"SELECT * FROM {table}").fetchall()
                found[f"{file} {table}"] = [row for row in rows if row[0] != "probed"]
        db.close()
    return found


def test_every_frame_that_writes_is_unavailable_and_changes_nothing(hub: HubProcess) -> None:
    planner, _bank = register(hub, "planner"), register(hub, "bank")
    with agent_connection(hub, "planner", planner) as wire, hub.http() as admin:
        assert wire.ask("session_open", session="s")["type"] == "session_opened"
        task = admin.post("/api/admin/tasks", json={"payload": 1}).json()["task_id"]
        assert wire.hear()["task_id"] == task
        frames: list[tuple[str, dict[str, Any]]] = [
            ("message", {"to": "bank", "body": 1}),
            ("channel_publish", {"channel": "general", "body": 1}),
            ("task_accepted", {"task_id": task}),
            ("task_progress", {"task_id": task, "progress": 0.5}),
            ("task_recovering", {"task_id": task}),
            ("task_failed", {"task_id": task, "error": "no", "retry": True}),
            ("task_complete", {"task_id": task}),
            ("session_open", {"session": "t"}),
            ("session_signal", {"session": "s", "signal": SIGNAL}),
            ("session_close", {"session": "s"}),
        ]
        with full_disk(hub):
            for kind, fields in frames:
                answer = wire.ask(kind, **fields)
                assert (kind, answer.get("error")) == (kind, "unavailable"), answer
            for kind in ("ping", "status", "list_agents", "list_channels"):
                assert wire.ask(kind)["type"] != "error"
            assert health(hub)[1] == "failing"
            assert admin.get("/api/admin/tasks").json()["tasks"][0]["state"] == "assigned"
        wanted = [
            "message_sent", "published", "task_updated", "task_updated", "task_updated", "task_updated", "task_updated",
            "session_opened", "signal_logged", "session_closed",
        ]  # fmt: skip
        done = []
        for kind, fields in frames:
            if kind == "task_failed":
                continue  # it would end the attempt
            done.append(wire.ask(kind, **fields)["type"])
        wanted.remove("task_updated")
        assert done == wanted
        assert health(hub) == ("ok", "ok", [])


def test_health_recovers_by_itself_though_nobody_writes(hub: HubProcess) -> None:
    with full_disk(hub), hub.http() as admin:
        assert admin.post("/api/admin/tasks", json={"payload": 1}).status_code == 503
        limits = admin.put("/api/admin/rate-limits/planner", json={"light": "1/minute"})
        assert (limits.status_code, limits.json()["error"]) == (503, "unavailable")
        assert health(hub)[1] == "failing"
    wait_for(lambda: health(hub) == ("ok", "ok", []), "the probe of the disk")


def test_the_file_of_a_store_that_the_program_has_made_is_watched_too(tmp_path: Path) -> None:
    with MemoryStore(remember=tmp_path / "limits.db") as store, hub_server(store=store) as hub, hub.http("") as anyone:
        assert store.file is not None
        store.file.failure = "disk full"
        assert anyone.get("/health").json()["problems"] == ["the disk can't be written: disk full"]
        wait_for(lambda: not anyone.get("/health").json()["problems"], "the probe of the file")


def test_a_probe_that_fails_again_and_again_is_logged_once(tmp_path: Path, logged: list[Any]) -> None:
    def lines() -> list[str]:
        return [line["reason"] for line in logged if line["event"] == "probe failed"]

    def fail_twice() -> None:
        """The id of the store's data has to be saved, and the database can't be written."""
        shared.hub.store_guard._saved = "", DataVersion()
        with closing(sqlite3.connect(tmp_path / "hub.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            for _ in range(2):
                shared.run(shared.hub._probe_once())

    with (
        ValkeyServer() as server,
        RedisStore(server.url, timeout=PATIENCE) as store,
        hub_server(store=store, data=tmp_path) as shared,
    ):
        shared.run(shared.hub._background.cancel())  # the hub's own probe, which would come in between
        shared.run(shared.hub.database.run(lambda db: db.execute("PRAGMA busy_timeout=0").close()))
        fail_twice()
        assert lines() == [f"{tmp_path / 'hub.db'}: nothing was written: database is locked"]
        shared.run(shared.hub._probe_once())
        fail_twice()
        assert len(lines()) == 2, "again after it had succeeded"


def test_an_unforeseen_failure_does_not_end_the_probes(logged: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([RuntimeError("can't start new thread"), ZeroDivisionError()])
    succeeded = threading.Event()

    async def probe() -> None:
        for error in failures:
            raise error
        succeeded.set()

    monkeypatch.setattr("headgate.hub.app._PROBE_INTERVAL", 0.01)
    with hub_server() as hub:
        monkeypatch.setattr(hub.hub.store_guard, "probe", probe)
        assert succeeded.wait(PATIENCE)
    failed = [line["reason"] for line in logged if line["event"] == "probe failed"]
    assert failed == ["can't start new thread", "ZeroDivisionError()"]


def test_the_change_log_remembers_a_full_disk_until_it_can_be_written(tmp_path: Path) -> None:
    log = SqliteChangeLog(tmp_path / "changes.db")
    (pages,) = log._file.execute("PRAGMA page_count").fetchone()
    log._file.execute(f"PRAGMA max_page_count={pages + 1}")
    with pytest.raises(ChangeLogError, match="can't be recorded: database or disk is full"):
        log.write(Change((override("a", "light", "1/minute"),), by="x" * 1_000_000))
    assert log.failure == "database or disk is full"
    log.read()
    assert log.failure, "reading says nothing about writing"
    log.probe()
    assert log.failure == ""
    assert log.write(Change((override("a", "light", "1/minute"),))) == 1
    log.close()


# Permissions ----------------------------------------------------------------------------------------------------------


def modes(folder: Path) -> dict[str, str]:
    return {path.name: oct(path.stat().st_mode & 0o777) for path in sorted(folder.iterdir())}


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    data = tmp_path / "deep" / "data"
    names = [name + end for name in ("changes.db", "hub.db") for end in ("", "-shm", "-wal")]
    names += ["limits.db", "lock"]  # nothing is written for plain buckets
    with hub_process(data) as hub:
        assert "other users" not in "".join(hub.err), "they never had access"
        assert modes(data) == dict.fromkeys(names, "0o600")
        assert oct(data.stat().st_mode & 0o777) == "0o700"


def test_a_directory_that_others_can_write_to_is_logged_once_and_left_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o775)
    with hub_process(tmp_path, "--log-format", "json") as hub:
        lines = [json.loads(line) for line in hub.err]
    (told,) = [line for line in lines if line["event"].startswith("other users can write to the data directory")]
    assert (told["directory"], told["mode"], told["level"]) == (str(tmp_path), "0o775", "warning")
    assert oct(tmp_path.stat().st_mode & 0o777) == "0o775", "it may be shared on purpose"


def test_files_that_others_could_read_are_closed_to_them_and_it_is_logged(tmp_path: Path) -> None:
    with hub_process(tmp_path) as hub:
        register(hub, "planner")
        hub.kill()
    for path in tmp_path.iterdir():
        path.chmod(0o644)
    with hub_process(tmp_path, "--log-format", "json") as hub:
        assert set(modes(tmp_path).values()) == {"0o600"}
        lines = [json.loads(line) for line in hub.err]
        told = [Path(line["file"]).name for line in lines if line["event"].startswith("other users had access")]
        assert {"hub.db", "hub.db-wal", "changes.db"} <= set(told)
