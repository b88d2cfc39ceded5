"""A row that can't be read is skipped and logged. It never stops the hub, and never frees what it stood for."""

import json
import logging
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from headgate import Gate, MemoryStore, Policy
from headgate.gate.changes import exemption, override
from headgate.hub.agents.registry import Grant
from tests.support.account_alerts import dashboard_alerts, spend, wait_until_idle
from tests.support.hub import ADMIN, AgentConnection, HubServer, hub_server

SIGNAL = {"type": "seen", "entity": "door", "weight": 1, "timestamp": 1}
NOT_TEXT = "CAST(x'c328' AS TEXT)"
DAMAGES: dict[str, str] = {
    "a blob": "x'00ff'",
    "text that is not UTF-8": NOT_TEXT,
    "other text": "'{not: what it was'",
    "an infinity": "9e999",
    "a negative number": "-9e300",
    "a huge number": "9223372036854775807",
}


def tables(path: Path) -> dict[str, list[str]]:
    """The columns of every table, and how each is declared, from the schema itself."""
    with closing(sqlite3.connect(path)) as db:
        names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {
            name: [column[1] for column in db.execute(f"PRAGMA table_info({name})")]
            for name in names
            if not name.startswith("sqlite_")
        }


def first_keys(path: Path, table: str) -> list[str]:
    with closing(sqlite3.connect(path)) as db:
        return [column[1] for column in db.execute(f"PRAGMA table_info({table})") if column[5]]


def overwrite_first_row(path: Path, table: str, columns: list[str], value: str) -> int:
    """Write a value into columns of a table's first row; how many rows were changed."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        where = "rowid = (SELECT min(rowid) FROM {0})"
        keys = first_keys(path, table)
        without_rowid = (
            "WITHOUT ROWID" in db.execute("SELECT sql FROM sqlite_master WHERE name = ?", (table,)).fetchone()[0]
        )
        if without_rowid:
            where = f"({', '.join(keys)}) = (SELECT {', '.join(keys)} FROM {{0}} LIMIT 1)"
        if not columns:
            return 0
        changed = ", ".join(f"{column} = {value}" for column in columns)
        return db.execute(f"UPDATE OR IGNORE {table} SET {changed} WHERE {where.format(table)}").rowcount


@contextmanager
def persistent_hub(data: Path, **changes: Any) -> Iterator[HubServer]:
    with hub_server(Policy(exempt=["planner", "other"]), data=data, **changes) as hub:
        yield hub


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The data of a hub that has a row in every table, and the tokens of its agents."""
    data = tmp_path_factory.mktemp("data")
    with persistent_hub(data, admin_token="") as hub:
        tokens = {name: hub.register(name) for name in ("planner", "other", "a")}
        hub.run(hub.hub.registry.invite(Grant(account="acme")))
        hub.run(hub.hub.gate.achange([override("x", "heavy", "blocked")], by="me"))
        with hub.agent("planner", tokens["planner"]) as wire:
            fill(wire)
            for _ in range(2):
                hub.run(hub.hub.scheduler.add("planner", b'{"do": 1}'))
            hub.run(hub.hub.messages.create_chat_channel("a", "planner", "the first by name"))
        tokens["admin"] = hub.hub.tokens.created
    return data, tokens


def fill(wire: AgentConnection) -> None:
    wire.ask("status", status="busy")
    wire.ask("message", to="other", body="hello")
    wire.ask("message", to="other", body="hello again")
    wire.ask("channel_publish", channel="general", body="hi")
    wire.ask("channel_publish", channel="general", body="hi again")
    for session in ("a", "b"):
        wire.ask("session_open", session=session, rate=1 / 3, burst=5)
        assert wire.ask("session_signal", session=session, signal=SIGNAL)["type"] == "signal_logged"
    wire.ask("session_signal", session="a", signal=SIGNAL)


def copy_of(data: Path, to: Path) -> Path:
    to.mkdir()
    for name in ("hub.db", "changes.db"):
        with closing(sqlite3.connect(data / name)) as old, closing(sqlite3.connect(to / name)) as new:
            old.backup(new)
    return to


@pytest.fixture
def tokens(written: tuple[Path, dict[str, str]]) -> dict[str, str]:
    return written[1]


@pytest.fixture
def place(written: tuple[Path, dict[str, str]], tmp_path: Path) -> Path:
    """A copy of the data, to be damaged."""
    return copy_of(written[0], tmp_path / "data")


def execute(place: Path, *statements: str) -> None:
    with closing(sqlite3.connect(place / "hub.db", isolation_level=None)) as db:
        for statement in statements:
            db.execute(statement)


def use(hub: HubServer, tokens: dict[str, str]) -> None:
    """Read from every table, with every means that there is. Nothing fails, and every answer is JSON."""
    with hub.http(ADMIN) as admin:
        for path in ("agents", "tasks", "rate-limits", "changes"):
            answer = admin.get(f"/api/admin/{path}")
            assert answer.status_code == 200, answer.text
            json.loads(answer.content.decode())
    for name in ("planner", "other"):
        with hub.http(tokens[name]) as http:
            for path in (
                "mailbox", "channels/general/messages", "tasks", "sessions/a/signals", "sessions/b/signals", "channels",
            ):  # fmt: skip
                answer = http.get(f"/api/{path}")
                assert answer.status_code == 200, answer.text
                json.loads(answer.content.decode())
            assert len(http.get("/api/mailbox").json()["messages"]) in ((1, 2) if name == "other" else (0,))
            assert len(http.get("/api/tasks").json()["tasks"]) in ((1, 2) if name == "planner" else (0,))
            for task in http.get("/api/tasks").json()["tasks"]:
                answer = http.get(f"/api/tasks/{task['task_id']}")
                assert answer.status_code in (200, 404), "404: its payload is unreadable, its summary is not"
                json.loads(answer.content.decode())


def every_table(written: tuple[Path, dict[str, str]]) -> list[tuple[str, str, list[str]]]:
    return [
        (name, table, columns)
        for name in ("hub.db", "changes.db")
        for table, columns in tables(written[0] / name).items()
    ]


@pytest.mark.long
@pytest.mark.parametrize("how", DAMAGES)
def test_the_hub_starts_with_a_damaged_row_in_every_table(
    written: tuple[Path, dict[str, str]], how: str, tmp_path: Path
) -> None:
    """All columns at once, then every column for itself. In both, the other rows of the table stay readable."""
    data, tokens = written
    found = every_table(written)
    for number in [None, *range(max(len(columns) for _, _, columns in found))]:
        place = copy_of(data, tmp_path / f"data-{number}")
        for name, table, columns in found:
            chosen = columns if number is None else columns[number : number + 1]
            overwrite_first_row(
                place / name, table, [one for one in chosen if one != "number"], DAMAGES[how]
            )  # a rowid is an int
        with persistent_hub(place) as hub:
            use(hub, tokens)


def test_the_data_has_a_row_in_every_table(written: tuple[Path, dict[str, str]]) -> None:
    """A new table has to be filled above, or the test would not see it."""
    for name, table, _ in every_table(written):
        with closing(sqlite3.connect(written[0] / name)) as db:
            assert db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] > 0, table


READERS: dict[str, tuple[str, str] | None] = {
    **dict.fromkeys(("settings", "agents", "channels", "sessions", "tasks")),  # read at the start
    "mail": ("other", "mailbox"),
    "posts": ("other", "channels/general/messages"),
    "signals": ("planner", "sessions/a/signals"),
}


@pytest.mark.parametrize("table", READERS)
def test_what_was_skipped_is_logged_once_and_without_secrets(
    place: Path, tokens: dict[str, str], table: str, caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    columns = {"settings": "value", "agents": "digest", "sessions": "limited", "signals": "signal", "tasks": "payload"}
    column = columns.get(table, "at")
    with closing(sqlite3.connect(place / "hub.db", isolation_level=None)) as db:
        secrets = [row[0] for row in db.execute("SELECT value FROM settings")]
        secrets += [row[0].hex() for row in db.execute("SELECT digest FROM agents")]
        db.execute(f"UPDATE {table} SET {column} = {column} || '!'")
        count = db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
    with persistent_hub(place, admin_token="" if table == "settings" else ADMIN) as hub:
        agent, path = READERS[table] or ("other", "tasks")
        with hub.http(tokens[agent]) as http:
            for _ in range(3):
                http.get(f"/api/{path}")
    text = caplog.text + "".join(capsys.readouterr())
    lines = [line for line in text.splitlines() if "unreadable rows skipped" in line and table in line]
    assert len(lines) == 1, text
    assert re.search(r"count\W+\d", lines[0])
    assert count >= 1
    assert not [secret for secret in secrets if secret in text]


def test_the_name_of_an_unreadable_agent_stays_taken(place: Path, tokens: dict[str, str]) -> None:
    execute(place, "UPDATE agents SET digest = 'gone' WHERE agent = 'planner'", "DELETE FROM tasks")
    with (
        persistent_hub(place) as hub,
        hub.http() as stranger,
        hub.http(ADMIN) as admin,
        hub.http(tokens["planner"]) as own,
    ):
        assert stranger.post("/api/onboard/register", json={"agent_id": "planner"}).status_code == 409
        assert own.get("/api/mailbox").status_code == 401
        token = admin.post("/api/admin/agents/planner/token").json()["token"]
        with hub.agent("planner", token) as wire:
            assert wire.ask("session_signal", session="b", signal=SIGNAL)["type"] == "signal_logged"


def test_nobody_registers_while_an_agents_name_cannot_be_read(place: Path, tokens: dict[str, str]) -> None:
    """The free id that a stranger asks for may be the one that was lost."""
    execute(place, f"UPDATE agents SET agent = {NOT_TEXT} WHERE agent = 'planner'")
    with persistent_hub(place) as hub, hub.http() as stranger, hub.http(tokens["other"]) as other:
        answer = stranger.post("/api/onboard/register", json={"agent_id": "planner"})
        assert (answer.status_code, answer.json()["error"]) == (503, "unavailable")
        assert other.get("/api/mailbox").status_code == 200, "known agents go on"


def test_a_damaged_name_of_an_agent_stops_no_alert_of_an_account(tmp_path: Path) -> None:
    policy = Policy(accounts={"default": {"agent": {"usd": "10 in all"}}})
    for start in ("first", "again"):
        with (
            MemoryStore(remember=tmp_path / "limits.db") as store,
            hub_server(policy, store=store, data=tmp_path) as hub,
        ):
            if start == "first":
                hub.register("planner")
                hub.register("writer")
                execute(tmp_path, "INSERT INTO agents VALUES ('bad' || char(10) || 'name', zeroblob(32), 1)")
            assert spend(hub, "8", "planner" if start == "first" else "writer")
            wait_until_idle(hub)
            found = {alert["account"] for alert in dashboard_alerts(hub)}
            assert found == ({"-/-/planner"} if start == "first" else {"-/-/planner", "-/-/writer"})


def test_the_admin_gets_a_new_token_if_the_old_one_cannot_be_read(place: Path, tokens: dict[str, str]) -> None:
    assert overwrite_first_row(place / "hub.db", "settings", ["value"], "'00ff'") == 1
    token = ""
    for start in ("created", "known"):
        with persistent_hub(place, admin_token="") as hub:
            created = hub.hub.tokens.created
            assert bool(created) is (start == "created")
            token = created or token
            assert hub.hub.tokens.recognize(tokens["admin"]) == ("", "")
            assert hub.hub.tokens.recognize(token) == ("admin", "admin")


def test_an_open_session_whose_limit_cannot_be_read_is_closed_and_not_unlimited(
    place: Path, tokens: dict[str, str]
) -> None:
    execute(place, "UPDATE sessions SET limited = '1/fortnight' WHERE session = 'a'", "DELETE FROM tasks")
    with persistent_hub(place) as hub, hub.agent("planner", tokens["planner"]) as wire:
        assert wire.ask("session_signal", session="a", signal=SIGNAL)["error"] == "session_closed"
        assert wire.ask("session_signal", session="b", signal=SIGNAL)["type"] == "signal_logged"
        assert wire.ask("session_open", session="a", rate=1, burst=1)["type"] == "session_opened"


def test_a_session_of_any_rate_survives_a_restart(tmp_path: Path) -> None:
    with persistent_hub(tmp_path) as hub:
        token = hub.register("planner")
        with hub.agent("planner", token) as wire:
            limit = wire.ask("session_open", session="s", rate=2**-20, burst=1)["limit"]
    with persistent_hub(tmp_path) as hub, hub.agent("planner", token) as wire:
        assert wire.ask("session_open", session="s", rate=2**-20, burst=1)["limit"] == limit


def test_an_unreadable_change_has_no_effect_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "changes.db"
    with Gate(remember=path) as gate:
        gate.change([override("a", "heavy", "blocked"), exemption("b")], by="me")
        gate.change([override("c", "heavy", "7/minute")], by="me")
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("UPDATE changes SET value = 'blokced' WHERE agent = 'a'")
    with caplog.at_level(logging.ERROR), Gate(remember=path) as gate:
        assert str(gate.limits_for("a", "ws", "heavy")) == "10/minute"
        assert str(gate.limits_for("c", "ws", "heavy")) == "7/minute"
        assert gate.is_exempt("b")
        assert len(gate.history()) == 2
        gate.set_override("a", "heavy", "blocked")
        assert str(gate.limits_for("a", "ws", "heavy")) == "blocked"
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert told[0].startswith("1 changes to the limits can't be read and have no effect (the last: unreadable of 'a'")
    with Gate(remember=path) as gate:
        assert str(gate.limits_for("a", "ws", "heavy")) == "blocked"
