"""Admin routes: violations, single checks, agents and reloads. Limits: test_admin_limits.py."""

import time
from pathlib import Path
from typing import Any

import pytest

from headgate import Outcome, Policy
from headgate.hub.app import Hub
from headgate.hub.config_file import ConfigFile
from tests.support.admin import FEW, LIMITS, direct_client, exhaust_limit, ping
from tests.support.hub import ADMIN, HubServer, hub_server, hub_settings
from tests.support.hub_answers import verdict

# Violations -----------------------------------------------------------------------------------------------------------


def test_violations_are_listed_the_worst_first_and_reset() -> None:
    with hub_server(FEW) as hub, hub.http(ADMIN) as admin, hub.agent("worst") as worst, hub.agent("bad") as bad:
        assert admin.get("/api/admin/violations").json() == {"agents": []}
        exhaust_limit(bad)
        exhaust_limit(worst)
        assert ping(worst, 2) == ["rate_limited"] * 2
        found = admin.get("/api/admin/violations").json()["agents"]
        assert [(card["agent_id"], card["violations"], card["violations_last_hour"]) for card in found] == [
            ("worst", 3, 3),
            ("bad", 1, 1),
        ]
        usage = {"channel": "ws", "tier": "light", "used": 1.0, "remaining": 0, "capacity": 2}
        assert found[0] == {
            "agent_id": "worst",
            "connected": True,
            "usage": usage,
            "violations": 3,
            "violations_last_hour": 3,
            "wait_left_ms": 5000,
            "rate_limited": True,
            "denied_by_account": False,
            "exempt": False,
            "override": False,
            "blocked": False,
            "denied_per_minute": 3,
            "role": "",
        }
        detail = admin.get("/api/admin/agents/worst").json()
        assert {**detail, "override": False}.items() >= found[0].items()
        assert admin.delete("/api/admin/violations/worst").json() == {"agent_id": "worst", "reset": True}
        assert admin.delete("/api/admin/violations/worst").json() == {"agent_id": "worst", "reset": False}
        assert [card["agent_id"] for card in admin.get("/api/admin/violations").json()["agents"]] == ["bad"]
        assert admin.get("/api/admin/agents/worst").json()["rate_limited"] is False
        assert ping(worst) == ["rate_limited"]  # its bucket is as empty as before


# One decision ---------------------------------------------------------------------------------------------------------


def test_a_check_counts_as_if_the_agent_had_asked() -> None:
    with hub_server(FEW) as hub, hub.http(ADMIN) as admin, hub.agent("planner") as wire:

        def check(**body: Any) -> Any:
            answer = admin.post("/api/admin/check", json={"agent_id": "planner", "channel": "ws", **body})
            assert answer.status_code == 200, answer.text
            return answer.json()

        assert check(tier="light", peek=True) == verdict(remaining=2)
        assert check(tier="light") == verdict()
        assert ping(wire) == ["pong"]
        assert check(action="ping") == verdict(outcome="deny", remaining=0, retry_after_ms=30_000, violations=1)
        hub.clock.advance(0.0001)
        looked = check(action="ping", peek=True)
        assert (looked["outcome"], looked["retry_after_ms"], looked["violations"]) == ("deny", 30_000, 0)
        assert check(tier="light", cost=3) == verdict(outcome="deny", remaining=0, retry_after_ms=None, violations=2)
        assert ping(wire) == ["rate_limited"]
        assert wire.ask("list_agents")["type"] == "rate_limited"
        assert check(channel="http", tier="light", cost=2) == verdict(channel="http", outcome="warn", remaining=0)
        assert admin.get("/api/admin/agents/planner").json()["violations"] == 4
        assert hub.hub.stats.outcomes() == {"allow": 1, "warn": 2, "deny": 4, "exempt": 0}
        assert hub.hub.stats.checks["ws", "light", Outcome.DENY] == 4
        unknown = check(action="something new")
        assert (unknown["tier"], unknown["remaining"]) == ("normal", 59)


def test_a_check_applies_exemptions_shadow_mode_and_overrides() -> None:
    policy = Policy(limits={"light": "2/minute"}, exempt=["monitor"], shadow=["heavy"])
    with hub_server(policy) as hub, hub.http(ADMIN) as admin:

        def check(agent: str, tier: str, **body: Any) -> Any:
            body |= {"agent_id": agent, "channel": "http", "tier": tier}
            return admin.post("/api/admin/check", json=body).json()

        exempt = check("monitor", "light")
        assert (exempt["outcome"], exempt["exempt"], exempt["limit"]) == ("exempt", True, "unlimited")
        assert check("monitor", "light", peek=True) == exempt
        watched = check("planner", "heavy", cost=11)
        assert (watched["outcome"], watched["would_be"], watched["violations"]) == ("allow", "deny", 0)
        admin.put(f"{LIMITS}/planner", json={"light": "9/minute"})
        assert check("planner", "light")["remaining"] == 8
        assert check("a/b 🙂", "light")["agent_id"] == "a/b 🙂"  # whether or not it is registered


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ({}, "body: expected a tier or an action, and not both"),
        ({"tier": "light", "action": "ping"}, "body: expected a tier or an action, and not both"),
        ({"tier": "lite"}, "tier: expected one of light, normal, heavy, got 'lite'"),
        ({"tier": "lite", "peek": True}, "tier: expected one of light, normal, heavy, got 'lite'"),
        ({"tier": "light", "channel": "fax"}, "channel: expected one of ws, http, got 'fax'"),
        ({"action": "ping", "channel": "fax"}, "channel: expected one of ws, http, got 'fax'"),
        ({"tier": "light", "cost": 2, "peek": True},
         "cost: expected 1 with peek, which says how much is left for any cost, got 2"),
        ({"tier": "light", "cost": 0}, "body: Expected `int` >= 1 - at `$.cost`"),
        ({"tier": "light", "cost": "1"}, "body: Expected `int`, got `str` - at `$.cost`"),
        ({"tier": "light", "agent_id": "a\nb"}, "agent: expected 1 to 128 printable characters, got 'a\\nb'"),
        ({"tier": "light", "agent_id": "a\nb", "peek": True},
         "agent: expected 1 to 128 printable characters, got 'a\\nb'"),
        ({"action": ""}, "body: Expected `str` of length >= 1 - at `$.action`"),
        (
            {"tier": "light", "by": "me"},
            "body: Object contains unknown field `by`; the fields are agent_id, channel, tier, action, cost, peek",
        ),
    ],
)  # fmt: skip
async def test_an_invalid_check_counts_nothing(body: Any, detail: str) -> None:
    async with Hub(hub_settings()) as hub, direct_client(hub) as admin:
        answer = await admin.post("/api/admin/check", json={"agent_id": "planner", "channel": "ws", **body})
        assert (answer.status_code, answer.json()) == (400, {"error": "invalid", "detail": detail})
        assert hub.stats.outcomes() == {"allow": 0, "warn": 0, "deny": 0, "exempt": 0}


# Agents ---------------------------------------------------------------------------------------------------------------


def test_agents_are_listed_page_by_page() -> None:
    with hub_server() as hub, hub.http(ADMIN) as admin, hub.agent("b") as _:
        before = time.time()
        for agent in ("d", "a", "c"):
            answer = admin.post("/api/admin/agents", json={"agent_id": agent})
            assert (answer.status_code, answer.json()["agent_id"]) == (201, agent)
        admin.delete("/api/admin/agents/c/token")
        found = admin.get("/api/admin/agents").json()["agents"]
        assert [(one["agent_id"], one["revoked"], one["connected"]) for one in found] == [
            ("a", False, False),
            ("b", False, True),
            ("c", True, False),
            ("d", False, False),
        ]
        assert before <= found[0]["registered_at"] <= time.time()
        assert admin.get("/api/admin/agents?limit=2").json()["agents"] == found[:2]
        assert admin.get("/api/admin/agents?limit=2&after=b").json()["agents"] == found[2:]
        assert admin.get("/api/admin/agents?after=d").json()["agents"] == []
        assert admin.get("/api/admin/agents?limit=101").status_code == 400


def test_tokens_are_rotated_revoked_and_reissued(tmp_path: Path) -> None:
    def works(hub: HubServer, token: str) -> bool:
        with hub.http(token) as client:
            return client.get("/api/tasks").status_code == 200

    with hub_server(data=tmp_path) as hub, hub.http(ADMIN) as admin:
        first = admin.post("/api/admin/agents", json={"agent_id": "planner"}).json()["token"]
        assert admin.post("/api/admin/agents", json={"agent_id": "planner"}).json()["error"] == "exists"
        second = admin.post("/api/admin/agents/planner/token").json()["token"]
        assert [works(hub, token) for token in (first, second)] == [False, True]
        assert admin.delete("/api/admin/agents/planner/token").json() == {"agent_id": "planner", "revoked": True}
        assert admin.delete("/api/admin/agents/planner/token").json() == {"agent_id": "planner", "revoked": False}
        assert not works(hub, second)
        detail = admin.get("/api/admin/agents/planner").json()
        assert (detail["registered"], detail["revoked"]) == (True, True)
    with hub_server(data=tmp_path) as hub, hub.http(ADMIN) as admin:
        assert not works(hub, second)
        third = admin.post("/api/admin/agents/planner/token").json()["token"]
        assert works(hub, third)
        assert admin.get("/api/admin/agents/planner").json()["revoked"] is False
        for method in ("POST", "DELETE"):
            answer = admin.request(method, "/api/admin/agents/nobody/token")
            assert (answer.status_code, answer.json()["error"]) == (404, "unknown_agent")
    with hub_server(data=tmp_path) as hub:
        assert [works(hub, token) for token in (first, second, third)] == [False, False, True]


@pytest.mark.parametrize(
    ("mode", "uninvited", "invited"), [("open", 201, 201), ("invitation", 403, 201), ("closed", 403, 403)]
)
def test_registration_is_open_by_invitation_or_closed(mode: str, uninvited: int, invited: int) -> None:
    policy = Policy(addresses={"registration": "100/minute"})
    with hub_server(policy, registration=mode) as hub, hub.http(ADMIN) as admin, hub.http() as client:
        answer = admin.post("/api/admin/invitations")
        assert answer.status_code == 201
        code = answer.json()["invitation"]

        def register(agent: str, **more: str) -> int:
            return client.post("/api/onboard/register", json={"agent_id": agent, **more}).status_code

        assert register("a") == uninvited
        assert register("b", invitation="a guess") == uninvited
        assert register("c", invitation=code) == invited
        if mode == "invitation":
            assert register("d", invitation=code) == 403  # it was good for one
        assert admin.post("/api/onboard/register", json={"agent_id": "by the admin"}).status_code == 201
        assert admin.post("/api/admin/agents", json={"agent_id": "too"}).status_code == 201


# The rest -------------------------------------------------------------------------------------------------------------


def test_the_admin_lists_all_tasks_and_adds_some() -> None:
    with hub_server() as hub, hub.http(ADMIN) as admin, hub.http(hub.register("planner")) as client:
        theirs = client.post("/api/tasks", json={"payload": 1}).json()
        own = admin.post("/api/admin/tasks", json={"payload": {"do": "it"}})
        assert (own.status_code, own.json()["creator"], own.json()["payload"]) == (201, "", {"do": "it"})
        summaries = [
            {k: v for k, v in task.items() if k not in ("payload", "outcome")} for task in (own.json(), theirs)
        ]
        assert admin.get("/api/admin/tasks").json() == {"tasks": summaries}
        assert admin.get("/api/admin/tasks?limit=1").json() == {"tasks": summaries[:1]}
        assert admin.get(f"/api/admin/tasks?before={own.json()['task_id']}").json() == {"tasks": summaries[1:]}
        assert admin.get("/api/admin/tasks?state=completed").json() == {"tasks": []}
        with hub.agent("worker") as wire:
            assert wire.hear()["type"] == "task_assigned"
            assert admin.get("/api/admin/tasks?state=assigned").json()["tasks"][0]["agent"] == "worker"


async def test_reload_reads_the_policy_file_again(tmp_path: Path) -> None:
    file = tmp_path / "headgate.toml"
    file.write_text('[limits]\nlight = "2/minute"\n')
    async with Hub(hub_settings(), Policy.load(file), config=ConfigFile(file)) as hub, direct_client(hub) as admin:

        async def light() -> str:
            limits: str = (await admin.get(LIMITS)).json()["defaults"]["ws"]["light"]
            return limits

        await admin.put(f"{LIMITS}/defaults", json={"heavy": "3/minute"})
        file.write_text('[limits]\nlight = "7/minute"\n[hub]\nport = 1\n')
        assert await light() == "2/minute"
        answer = await admin.post("/api/admin/reload")
        assert (answer.status_code, answer.json()) == (
            200,
            {"reloaded": True, "waits_for_restart": ["hub.port"], "overruled": []},
        )
        assert await light() == "7/minute"
        assert (await admin.get(LIMITS)).json()["defaults"]["ws"]["heavy"] == "3/minute"  # changes stay on top
        for broken, mistake in (
            ('[limits]\nlight = 5\nhevy = "1/s"\n', "2 mistakes\n  limits.hevy: expected one of heavy, light, normal"),
            ("[limits", "1 mistake\n  expected TOML, got: Expected ']'"),
            (None, "1 mistake\n  expected a readable file, got: No such file"),
        ):
            file.unlink() if broken is None else file.write_text(broken)
            answer = await admin.post("/api/admin/reload")
            assert (answer.status_code, answer.json()["error"]) == (400, "invalid")
            assert answer.json()["detail"].startswith(f"{file}: {mistake}")
            assert await light() == "7/minute"


def test_reload_without_a_policy_file_is_refused() -> None:
    with hub_server() as hub, hub.http(ADMIN) as admin:
        answer = admin.post("/api/admin/reload")
        detail = "the hub was started without --config, so there is no file to reload"
        assert (answer.status_code, answer.json()) == (409, {"error": "no_config", "detail": detail})
