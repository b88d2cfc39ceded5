"""Admin routes for limits: effect on open connections, restarts, bad input, and odd agent names."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from headgate import Policy
from headgate.events import Event, PolicyChanged
from headgate.gate.change_log import MemoryChangeLog
from headgate.hub.api.routes import ROUTES
from headgate.hub.app import Hub
from headgate.hub.config_file import ConfigFile
from headgate.stores.sqlite import ChangeLogError
from tests.support.admin import FEW, LIMITS, direct_client, exhaust_limit, list_changes, ping
from tests.support.hub import ADMIN, HubServer, hub_server, hub_settings

EVERYWHERE = {"light": "2/minute", "normal": "60/minute", "heavy": "10/minute"}
ODD = [
    "a/b",
    "/",
    "a b",
    "~",
    "100%",
    "%2F",
    "%",
    "\U00020000 agent",
    'it\'s "quoted"',
    "a?b=c&d#e",
    "a+b;c",
    "...",
    "whitelists",
    "Defaults",
    "ß\u00e9漢",
    "x" * 128,
    "'; DROP TABLE agents; --",
    "\\",
    "<script>",
]


# The eight calls ------------------------------------------------------------------------------------------------------


def test_b6_the_limits_are_listed_with_every_override() -> None:
    policy = Policy(limits={"light": "2/minute"}, agents={"planner": {"ws": {"heavy": "5/second burst 9"}}})
    with hub_server(policy) as hub, hub.http(ADMIN) as admin:
        sessions = {"session": "unlimited", "session_overrides": {}}
        listed = {"defaults": {"ws": EVERYWHERE, "http": EVERYWHERE}, **sessions}
        overrides: dict[str, Any] = {"planner": {"ws": {"heavy": "5/second burst 9"}}}
        assert admin.get(LIMITS).json() == {**listed, "overrides": overrides}
        admin.put(f"{LIMITS}/writer", json={"normal": ["1/second", "5/minute"]})
        overrides["writer"] = {channel: {"normal": "1/second; 5/minute"} for channel in ("ws", "http")}
        assert admin.get(LIMITS).json() == {**listed, "overrides": overrides}


def test_b6_changed_defaults_apply_at_once_to_open_connections() -> None:
    with hub_server(FEW) as hub, hub.http(ADMIN) as admin, hub.agent("planner") as wire, hub.agent("own") as other:
        assert admin.put(f"{LIMITS}/own", json={"light": "2/minute"}).status_code == 200
        exhaust_limit(wire)
        exhaust_limit(other)
        answer = admin.put(f"{LIMITS}/defaults", json={"light": "5/minute"})
        assert answer.status_code == 200
        assert answer.json()["defaults"] == {channel: {**EVERYWHERE, "light": "5/minute"} for channel in ("ws", "http")}
        assert ping(wire, 6) == ["pong"] * 5 + ["rate_limited"]
        assert ping(other) == ["rate_limited"]  # which has an override
        admin.put(f"{LIMITS}/defaults", json={"ws": {"light": "1/minute"}, "heavy": "3/hour"})
        assert ping(wire, 2) == ["pong", "rate_limited"]
        now = admin.get(LIMITS).json()["defaults"]
        assert now["ws"] == {"light": "1/minute", "normal": "60/minute", "heavy": "3/hour"}
        assert now["http"] == {"light": "5/minute", "normal": "60/minute", "heavy": "3/hour"}


def test_b6_an_override_applies_at_once_to_open_connections_until_removed() -> None:
    with hub_server(FEW) as hub, hub.http(ADMIN) as admin, hub.agent("planner") as wire, hub.agent("other") as other:
        exhaust_limit(wire)
        exhaust_limit(other)
        answer = admin.put(f"{LIMITS}/planner", json={"light": "4/minute"})
        own = {channel: {"light": "4/minute"} for channel in ("ws", "http")}
        limits = {channel: {**EVERYWHERE, "light": "4/minute"} for channel in ("ws", "http")}
        sessions = {"session": "unlimited", "session_override": None}
        expected = {
            "agent_id": "planner",
            "limits": limits,
            "override": own,
            "exempt": False,
            "registered": True,
            **sessions,
        }
        assert (answer.status_code, answer.json()) == (200, expected)
        assert ping(wire, 5) == ["pong"] * 4 + ["rate_limited"]
        assert ping(other) == ["rate_limited"]
        answer = admin.delete(f"{LIMITS}/planner")
        ordinary = dict.fromkeys(("ws", "http"), EVERYWHERE)
        assert answer.json() == {**expected, "limits": ordinary, "override": {}}
        assert ping(wire, 3) == ["pong", "pong", "rate_limited"]
        assert admin.delete(f"{LIMITS}/planner").json() == answer.json()
        assert list_changes(admin) == [
            "override of 'planner' removed",
            "override of 'planner' for light set to 4/minute",
        ]


@pytest.mark.parametrize("body", [{"light": "1/s", "ws": {"light": "2/s"}}, {"ws": {"light": "2/s"}, "light": "1/s"}])
def test_b6_a_limit_for_one_channel_wins_there_in_any_order(body: dict[str, Any]) -> None:
    with hub_server() as hub, hub.http(ADMIN) as admin:
        limits = admin.put(f"{LIMITS}/planner", json=body).json()["override"]
        assert limits == {"ws": {"light": "2/second"}, "http": {"light": "1/second"}}


def test_b6_an_exemption_applies_at_once_to_open_connections_until_removed() -> None:
    with hub_server(FEW) as hub, hub.http(ADMIN) as admin, hub.agent("planner") as wire, hub.agent("other") as other:
        path = f"{LIMITS}/whitelist"
        assert admin.get(path).json() == {"agents": []}
        exhaust_limit(wire)
        exhaust_limit(other)
        assert admin.post(path, json={"agent_id": "planner"}).json()["agents"] == ["planner"]
        card = admin.get("/api/admin/agents/planner").json()
        assert (card["rate_limited"], card["exempt"], card["usage"]) == (False, True, None)
        assert wire.ask("status")["rate_limited"] is False
        assert ping(wire, 10) == ["pong"] * 10
        assert ping(other) == ["rate_limited"]
        assert admin.post(path, json={"agent_id": "planner"}).json()["agents"] == ["planner"]
        assert admin.put(path, json={"agents": ["other", "away", "other"]}).json()["agents"] == ["away", "other"]
        assert ping(other, 10) == ["pong"] * 10
        assert ping(wire, 3) == ["pong", "pong", "rate_limited"]  # as if it had spent nothing
        assert admin.get(path).json() == {"agents": ["away", "other"]}
        assert admin.delete(f"{path}/other").json() == {"agents": ["away"]}
        assert ping(other, 3) == ["pong", "pong", "rate_limited"]
        assert admin.delete(f"{path}/other").json() == {"agents": ["away"]}
        assert admin.put(path, json={"agents": []}).json()["agents"] == []
        assert list_changes(admin) == [
            "exemption of 'away' removed",
            "exemption of 'other' removed",
            "exemption of 'away' set to exempt, exemption of 'other' set to exempt, exemption of 'planner' removed",
            "exemption of 'planner' set to exempt",
        ]


def test_b6_changes_apply_to_http_too() -> None:
    with hub_server(FEW) as hub, hub.http(ADMIN) as admin, hub.http(hub.register("planner")) as client:

        def asked(times: int) -> list[int]:
            return [client.get("/api/tasks").status_code for _ in range(times)]

        assert asked(3) == [200, 200, 429]
        admin.put(f"{LIMITS}/defaults", json={"http": {"light": "3/minute"}})
        assert asked(4) == [200, 200, 200, 429]
        admin.put(f"{LIMITS}/planner", json={"http": {"light": "1/minute"}})
        assert asked(2) == [200, 429]
        admin.post(f"{LIMITS}/whitelist", json={"agent_id": "planner"})
        assert asked(9) == [200] * 9


def test_b6_limits_exemptions_and_changes_survive_a_restart(tmp_path: Path) -> None:
    with hub_server(FEW, data=tmp_path) as hub, hub.http(ADMIN) as admin:
        token = hub.register("planner")
        admin.put(f"{LIMITS}/defaults", json={"heavy": "3/minute"})
        admin.put(f"{LIMITS}/planner", json={"ws": {"light": "5/minute"}})
        admin.put(f"{LIMITS}/gone", json={"ws": {"light": "5/minute"}})
        admin.delete(f"{LIMITS}/gone")
        admin.put(f"{LIMITS}/whitelist", json={"agents": ["monitor", "other"]})
        admin.delete(f"{LIMITS}/whitelist/other")
        before = [admin.get(path).json() for path in (LIMITS, f"{LIMITS}/whitelist", "/api/admin/changes")]
        assert len(before[2]["changes"]) == 6
    with hub_server(FEW, data=tmp_path) as hub, hub.http(ADMIN) as admin:
        after = [admin.get(path).json() for path in (LIMITS, f"{LIMITS}/whitelist", "/api/admin/changes")]
        assert after == before
        with hub.agent("planner", token) as wire:
            assert ping(wire, 6) == ["pong"] * 5 + ["rate_limited"]
        with hub.agent("monitor") as wire:
            assert ping(wire, 9) == ["pong"] * 9


def test_b6_the_change_log_says_who_changed_what_and_when() -> None:
    with hub_server() as hub, hub.http(ADMIN) as admin:
        assert admin.get("/api/admin/changes").json() == {"changes": []}
        before = time.time()
        admin.put(f"{LIMITS}/planner", json={"light": "5/minute"})
        admin.put(f"{LIMITS}/defaults", json={"ws": {"heavy": "1/minute"}})
        admin.get(LIMITS)
        admin.put(f"{LIMITS}/planner", json={"light": "nonsense"})
        found = admin.get("/api/admin/changes").json()["changes"]
        assert [(change["what"], change["by"]) for change in found] == [
            ("default for ws heavy set to 1/minute", "admin at 127.0.0.1"),
            ("override of 'planner' for light set to 5/minute", "admin at 127.0.0.1"),
        ]
        assert before <= found[1]["at"] <= found[0]["at"] <= time.time()
        assert admin.get("/api/admin/changes?limit=1").json() == {"changes": found[:1]}


async def test_b6_a_put_of_several_limits_is_one_change() -> None:
    async with Hub(hub_settings()) as hub, direct_client(hub) as admin:
        events: list[Event] = []
        hub.gate.subscribe(events.append)
        body = {"light": "5/minute", "ws": {"light": "6/minute", "heavy": "1/minute"}}
        texts = ["light set to 5/minute", "ws light set to 6/minute", "ws heavy set to 1/minute"]
        expected = []
        for where, what in (("defaults", "default for"), ("planner", "override of 'planner' for")):
            assert (await admin.put(f"{LIMITS}/{where}", json=body)).status_code == 200
            expected.append(", ".join(f"{what} {text}" for text in texts))
        assert events == [PolicyChanged(what, "admin at 127.0.0.1") for what in expected]
        found = (await admin.get("/api/admin/changes")).json()["changes"]
        assert [change["what"] for change in found] == expected[::-1]
        await admin.put(f"{LIMITS}/whitelist", json={"agents": []})
        assert len(events) == 2, "nothing was different"


@pytest.mark.parametrize("where", ["planner", "defaults"])
async def test_b6_a_put_that_cannot_be_recorded_changes_nothing(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Hub(hub_settings()) as hub, direct_client(hub) as admin:
        before = hub.gate.effective

        def full(*_: object) -> int:
            raise ChangeLogError("the disk is full")

        monkeypatch.setattr(MemoryChangeLog, "write", full)
        answer = await admin.put(f"{LIMITS}/{where}", json={"light": "5/minute", "heavy": "1/minute"})
        assert answer.status_code >= 500
        assert hub.gate.effective == before


NOTHING = "TokenBucket refill: expected a number above 0, got 0; to let nothing pass, write 'blocked'"
A_LIMIT = "a limit such as '60/minute', or a list of 1 to 10"
A_RATE = "a rate such as '60/minute' (budgets and slots belong to a Limiter, or to [accounts] of a policy)"
BY_TIER = 'an object with limits by tier, such as {"light": "60/minute"}'
SYNTAX = (
    "'COUNT/UNIT' or 'COUNT per N UNITS', then perhaps 'burst N' or 'sliding' (such as '60/minute burst 10'; UNIT is "
    "ms, second, minute, hour, day, week, month or year)"
)


@pytest.mark.parametrize("where", ["planner", "defaults"])
@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ({}, "body: expected limits for some of light, normal, heavy, got none"),
        ({"ws": {}}, "body: expected limits for some of light, normal, heavy, got none"),
        ({"hevy": "1/s"}, "body: expected one of light, normal, heavy, ws, http, session, got 'hevy'"),
        ({"ws": {"hevy": "1/s"}}, "ws: expected one of light, normal, heavy, got 'hevy'"),
        ({"ws": "1/s"}, f"ws: expected {BY_TIER}, got '1/s'"),
        ({"ws": 240}, f"ws: expected {BY_TIER}, got 240"),
        ({"light": {"1/s": "1/s"}}, f"light: expected {A_LIMIT}, got {{'1/s': '1/s'}}"),
        ({"light": "x"}, f"light: limit: expected {SYNTAX}, got 'x'"),
        ({"light": "5/minute", "http": {"heavy": "x"}}, f"http.heavy: limit: expected {SYNTAX}, got 'x'"),
        ({"light": "0/minute"}, f"light: limit '0/minute': {NOTHING}"),
        ({"light": "5 in flight"}, f"light: limit: expected {A_RATE}, got '5 in flight'"),
        ({"ws": {"light": "9 usd in all"}}, f"ws.light: limit: expected {A_RATE}, got '9 usd in all'"),
        ({"light": 240}, "light: expected a limit such as '240/minute', or a list of 1 to 10, got 240"),
        ({"ws": {"light": 240}}, "ws.light: expected a limit such as '240/minute', or a list of 1 to 10, got 240"),
        ({"light": -1}, f"light: expected {A_LIMIT}, got -1"),
        ({"light": True}, f"light: expected {A_LIMIT}, got True"),
        ({"light": None}, f"light: expected {A_LIMIT}, got None"),
        ({"light": []}, f"light: expected {A_LIMIT}, got []"),
        ({"light": ["1/s", 5]}, f"light: expected {A_LIMIT}, got ['1/s', 5]"),
        ({"light": ["1/s"] * 11}, f"light: expected {A_LIMIT}, got {['1/s'] * 11!s}"),
        ({"light": "1/s;" * 51}, f"light: expected at most 200 characters for a limit, got '{'1/s;' * 24}..."),
        ([], "body: Expected `object`, got `array`"),
    ],
)  # fmt: skip
async def test_b6_invalid_limits_change_nothing(where: str, body: Any, detail: str) -> None:
    async with Hub(hub_settings()) as hub, direct_client(hub) as admin:
        answer = await admin.put(f"{LIMITS}/{where}", json=body)
        assert (answer.status_code, answer.json()) == (400, {"error": "invalid", "detail": detail})
        assert (await admin.get("/api/admin/changes")).json() == {"changes": []}


@pytest.mark.parametrize(
    ("method", "path", "body", "detail"),
    [
        ("PUT", "whitelist", {"agents": ["a", "b\n"]}, "agent: expected 1 to 128 printable characters, got 'b\\n'"),
        ("PUT", "whitelist", {"agents": ["a", ""]}, "body: Expected `str` of length >= 1 - at `$.agents[1]`"),
        ("PUT", "whitelist", {"agents": "a"}, "body: Expected `array`, got `str` - at `$.agents`"),
        ("PUT", "whitelist", {}, "body: Object missing required field `agents`"),
        ("POST", "whitelist", {"agent_id": "\0"}, "agent: expected 1 to 128 printable characters, got '\\x00'"),
        (
            "POST", "whitelist", {"agent_id": "a", "by": "me"},
            "body: Object contains unknown field `by`; the fields are agent_id",
        ),
        ("DELETE", "whitelist/%0A", None, "agent: expected 1 to 128 printable characters, got '\\n'"),
        ("DELETE", "%0A", None, "agent: expected 1 to 128 printable characters, got '\\n'"),
        ("PUT", "x" * 129, {"light": "1/s"},
         f"agent: expected 1 to 128 printable characters, got 'x{'x' * 95}..."),
    ],
)  # fmt: skip
async def test_b6_invalid_agent_names_change_nothing(method: str, path: str, body: Any, detail: str) -> None:
    async with Hub(hub_settings()) as hub, direct_client(hub) as admin:
        answer = await admin.request(method, f"{LIMITS}/{path}", json=body)
        assert (answer.status_code, answer.json()) == (400, {"error": "invalid", "detail": detail})
        assert (await admin.get("/api/admin/changes")).json() == {"changes": []}


# Names ----------------------------------------------------------------------------------------------------------------


def test_b6_no_agent_name_can_hide_a_route() -> None:
    below = f"{LIMITS}/"
    fixed = {route.path.removeprefix(below).split("/")[0] for route in ROUTES if route.path.startswith(below)}
    taken = {name for name in fixed if not name.startswith("{")} | {".", ".."}
    assert taken >= {"whitelist", "defaults", ".", ".."}
    with hub_server(Policy(addresses={"registration": "100/minute"})) as hub:
        for token in ("", ADMIN):
            with hub.http(token) as client:
                for name in sorted(taken):
                    answer = client.post("/api/onboard/register", json={"agent_id": name})
                    detail = f"agent: expected an id that the hub doesn't use itself, got {name!r}"
                    assert (answer.status_code, answer.json()) == (400, {"error": "reserved", "detail": detail})
        with hub.http(ADMIN) as admin:
            for name in sorted(taken):
                assert admin.post("/api/admin/agents", json={"agent_id": name}).json()["error"] == "reserved"
            assert admin.get("/api/admin/agents").json() == {"agents": []}


@pytest.fixture(scope="module")
def odd_hub() -> Iterator[tuple[HubServer, httpx.Client]]:
    with hub_server(FEW) as hub, hub.http(ADMIN) as admin:
        yield hub, admin


@pytest.mark.parametrize("name", ODD)
def test_b6_any_name_works_on_every_route(odd_hub: tuple[HubServer, httpx.Client], name: str) -> None:
    hub, admin = odd_hub
    todo = {(route.method, route.path) for route in ROUTES if "{agent}" in route.path}

    def ask(method: str, path: str, body: Any = None) -> Any:
        todo.discard((method, path))
        answer = admin.request(method, path.format(agent=quote(name, safe="")), json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    answer = admin.post("/api/onboard/register", json={"agent_id": name})
    assert (answer.status_code, answer.json()["agent_id"]) == (201, name)
    with hub.agent(name, answer.json()["token"]) as wire:
        exhaust_limit(wire)
        assert ask("GET", "/api/admin/agents/{agent}")["violations"] == 1
        assert ask("DELETE", "/api/admin/violations/{agent}") == {"agent_id": name, "reset": True}
        assert ask("PUT", f"{LIMITS}/{{agent}}", {"light": "4/minute"})["agent_id"] == name
        assert admin.get(LIMITS).json()["overrides"] == {name: {c: {"light": "4/minute"} for c in ("ws", "http")}}
        assert ping(wire, 5) == ["pong"] * 4 + ["rate_limited"]
        assert ask("DELETE", f"{LIMITS}/{{agent}}")["override"] == {}
        assert ping(wire, 3) == ["pong", "pong", "rate_limited"]
        added = admin.post(f"{LIMITS}/whitelist", json={"agent_id": name}).json()
        assert added == {"agents": [name], "unregistered": []}
        assert ping(wire, 3) == ["pong"] * 3
        assert ask("DELETE", f"{LIMITS}/whitelist/{{agent}}") == {"agents": []}
        assert list_changes(admin)[0] == f"exemption of {name!r} removed"
        assert ask("PUT", "/api/admin/agents/{agent}/block", {})["blocked"] is True
        assert ping(wire) == ["rate_limited"]
        assert ask("DELETE", "/api/admin/agents/{agent}/block")["blocked"] is False
        assert ask("PUT", "/api/admin/agents/{agent}/role", {"role": "viewer"}) == {"agent_id": name, "role": "viewer"}
        account = ask("PUT", "/api/admin/agents/{agent}/account", {"account": "acme/search"})
        assert (account["agent_id"], account["registered"]) == (name, True)
        assert ask("DELETE", "/api/admin/agents/{agent}/role") == {"agent_id": name, "role": ""}
        assert ask("POST", "/api/admin/agents/{agent}/disconnect") == {"agent_id": name, "connections": 1}
        admin.put(f"/api/admin/agents/{quote(name, safe='')}/role", json={"role": "admin"})
        assert ask("DELETE", "/api/admin/admins/{agent}") == {"name": name, "revoked": True}
        assert ask("POST", "/api/admin/agents/{agent}/token")["agent_id"] == name
        assert ask("DELETE", "/api/admin/agents/{agent}/token") == {"agent_id": name, "revoked": True}
    assert not todo, "a new route for an agent? try it here"


def test_b6_what_is_set_for_an_agent_that_is_not_registered_works_and_says_so() -> None:
    with hub_server() as hub, hub.http(ADMIN) as admin:
        hub.register("planner")
        hub.register("revoked")
        hub.run(hub.hub.registry.revoke("revoked"))
        for agent, registered in (("planner", True), ("revoked", True), ("typo", False)):
            answer = admin.put(f"{LIMITS}/{agent}", json={"light": "5/minute"}).json()
            assert (answer["registered"], answer["limits"]["ws"]["light"]) == (registered, "5/minute")
            assert admin.delete(f"{LIMITS}/{agent}").json()["registered"] is registered
        whitelist = f"{LIMITS}/whitelist"
        assert admin.post(whitelist, json={"agent_id": "planner"}).json() == {"agents": ["planner"], "unregistered": []}
        both = {"agents": ["planner", "typo"], "unregistered": ["typo"]}
        assert admin.post(whitelist, json={"agent_id": "typo"}).json() == both
        assert admin.post(whitelist, json={"agent_id": "typo"}).json() == both  # though nothing has changed
        assert admin.put(whitelist, json={"agents": ["x", "revoked", "a"]}).json() == {
            "agents": ["a", "revoked", "x"],
            "unregistered": ["a", "x"],
        }
        assert admin.get(whitelist).json() == {"agents": ["a", "revoked", "x"]}


# Defaults that are taken back, and where values come from -------------------------------------------------------------


def test_b6_changed_defaults_are_taken_back_at_once_and_for_good(tmp_path: Path) -> None:
    changed = {"light": "5/minute", "http": {"heavy": "3/hour"}, "session": "7/second"}
    with hub_server(FEW, data=tmp_path) as hub, hub.http(ADMIN) as admin, hub.agent("planner") as wire:
        first = admin.get(LIMITS).json()
        admin.put(f"{LIMITS}/own", json={"light": "9/minute"}).raise_for_status()
        with_override = admin.get(LIMITS).json()
        admin.put(f"{LIMITS}/defaults", json=changed).raise_for_status()
        assert ping(wire, 6) == ["pong"] * 5 + ["rate_limited"]
        answer = admin.delete(f"{LIMITS}/defaults/light")
        assert (answer.status_code, answer.json()) == (200, admin.get(LIMITS).json())
        assert {channel: limits["light"] for channel, limits in answer.json()["defaults"].items()} == {
            "ws": "2/minute",
            "http": "2/minute",
        }
        assert ping(wire, 3) == ["pong", "pong", "rate_limited"]  # with a full bucket
        assert answer.json()["defaults"]["http"]["heavy"] == "3/hour"
        assert admin.delete(f"{LIMITS}/defaults/session").json()["session"] == first["session"]
        admin.put(f"{LIMITS}/defaults", json=changed).raise_for_status()
        assert admin.delete(f"{LIMITS}/defaults").json() == with_override
    with hub_server(FEW, data=tmp_path) as hub, hub.http(ADMIN) as admin:
        assert admin.get(LIMITS).json() == with_override
        assert "default for light removed" in list_changes(admin)
        for wrong in ("hevy", "ws", "%20", "defaults"):
            refused = admin.delete(f"{LIMITS}/defaults/{wrong}")
            assert (refused.status_code, refused.json()["error"]) == (400, "invalid")
            assert refused.json()["detail"].startswith("tier: expected one of light, normal, heavy, session, got ")


async def test_b6_every_value_of_the_policy_tells_where_it_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "headgate.toml"
    file.write_text('[limits]\nlight = "2/minute"\n')
    async with Hub(hub_settings(), Policy.load(file), config=ConfigFile(file)) as hub, direct_client(hub) as admin:

        async def shown() -> dict[str, Any]:
            found: dict[str, Any] = (await admin.get("/api/admin/policy")).json()
            assert found["file"] == str(file)
            return {value["path"]: value for value in found["values"]} | {"overruled": found["overruled"]}

        before = await shown()
        assert (before["limits.ws.light"]["source"], before["limits.ws.heavy"]["source"]) == ("file", "default")
        assert before["overruled"] == []
        await admin.put(f"{LIMITS}/defaults", json={"ws": {"light": "5/minute"}})
        now = await shown()
        assert now["overruled"] == ["limits.ws.light"]
        light = now["limits.ws.light"]
        assert (light["source"], light["by"]) == ("change", "admin at 127.0.0.1")
        assert ("5/minute" in light["value"], "2/minute" in light["file_value"]) == (True, True)
        assert light["at"] == (await admin.get("/api/admin/changes")).json()["changes"][0]["at"]
        file.write_text('[limits]\nlight = "3/minute"\n')
        reloaded = (await admin.post("/api/admin/reload")).json()
        assert reloaded == {"reloaded": True, "waits_for_restart": [], "overruled": ["limits.ws.light"]}
        await admin.delete(f"{LIMITS}/defaults/light")
        after = await shown()
        assert (after["limits.ws.light"]["source"], after["overruled"]) == ("file", [])


def test_b6_the_policy_of_a_hub_without_a_file_is_shown() -> None:
    with hub_server() as hub, hub.http(ADMIN) as admin:
        found = admin.get("/api/admin/policy").json()
        assert (found["file"], found["overruled"]) == (None, [])
        assert {value["source"] for value in found["values"]} == {"default"}
