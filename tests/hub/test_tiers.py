"""Tiers that the policy adds, in the hub: frames, responses, the admin API, cards and metrics."""

from typing import Any

import pytest

from headgate import Policy
from headgate.hub.app import Hub
from headgate.hub.monitoring.metrics import exposition
from tests.support.admin import LIMITS, direct_client, list_changes, ping
from tests.support.hub import ADMIN, VIEWER, hub_server, hub_settings
from tests.support.prometheus import samples, value

BULK = Policy(
    tiers=["bulk"],
    limits={"bulk": "2/minute"},
    actions={"ws": {"ping": "bulk"}, "http": {"get_mailbox": "bulk"}},
)
TIERS = "light, normal, heavy, bulk"
EVERYWHERE = {"light": "120/minute", "normal": "60/minute", "heavy": "10/minute", "bulk": "2/minute"}


def test_b1_frames_and_responses_name_a_tier_of_the_policy() -> None:
    with hub_server(BULK) as hub, hub.agent_and_http("planner") as (wire, client):
        assert [wire.ask("ping")["type"], wire.ask("ping")["tier"]] == ["pong", "bulk"]
        assert wire.hear()["type"] == "pong"
        denied = wire.ask("ping")
        assert (denied["type"], denied["tier"]) == ("rate_limited", "bulk")
        assert wire.ask("status")["type"] != "rate_limited"
        answers = [client.get("/api/mailbox") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert answers[0].headers["ratelimit-policy"] == '"bulk";q=2;w=60'
        assert answers[2].json()["tier"] == "bulk"


def test_b6_limits_of_a_tier_of_the_policy_are_listed_and_changed_at_once() -> None:
    with hub_server(BULK) as hub, hub.http(ADMIN) as admin, hub.agent("planner") as wire:
        assert admin.get(LIMITS).json()["defaults"] == {"ws": EVERYWHERE, "http": EVERYWHERE}
        assert ping(wire, 3) == ["pong", "pong", "rate_limited"]
        answer = admin.put(f"{LIMITS}/planner", json={"ws": {"bulk": "3/minute"}, "bulk": "9/minute"}).json()
        assert answer["override"] == {"ws": {"bulk": "3/minute"}, "http": {"bulk": "9/minute"}}
        assert answer["limits"]["ws"] == {**EVERYWHERE, "bulk": "3/minute"}
        assert ping(wire, 4) == ["pong"] * 3 + ["rate_limited"]
        admin.put(f"{LIMITS}/defaults", json={"bulk": "5/minute"})
        assert admin.delete(f"{LIMITS}/planner").json()["limits"]["http"] == {**EVERYWHERE, "bulk": "5/minute"}
        assert ping(wire, 6) == ["pong"] * 5 + ["rate_limited"]
        both = "override of 'planner' for bulk set to 9/minute, override of 'planner' for ws bulk set to 3/minute"
        assert both in list_changes(admin)
        admin.post(f"{LIMITS}/whitelist", json={"agent_id": "planner"})
        answer = admin.put(f"{LIMITS}/planner", json={"bulk": "1/s"}).json()
        assert set(answer["limits"]["ws"].values()) == {"unlimited"}
        checked = admin.post("/api/admin/check", json={"agent_id": "b", "channel": "http", "tier": "bulk"}).json()
        assert (checked["tier"], checked["remaining"]) == ("bulk", 4)
        checked = admin.post("/api/admin/check", json={"agent_id": "b", "channel": "ws", "action": "ping"}).json()
        assert (checked["tier"], checked["remaining"]) == ("bulk", 4)


@pytest.mark.parametrize(
    ("path", "body", "detail"),
    [
        ("rate-limits/planner", {"bluk": "1/s"}, f"body: expected one of {TIERS}, ws, http, session, got 'bluk'"),
        ("rate-limits/planner", {"ws": {"bluk": "1/s"}}, f"ws: expected one of {TIERS}, got 'bluk'"),
        ("rate-limits/defaults", {}, f"body: expected limits for some of {TIERS}, got none"),
        ("check", {"agent_id": "a", "channel": "ws", "tier": "bluk"}, f"tier: expected one of {TIERS}, got 'bluk'"),
    ],
)
async def test_b6_an_unknown_tier_is_refused_by_a_text_that_lists_the_tiers(path: str, body: Any, detail: str) -> None:
    async with Hub(hub_settings(), BULK) as hub, direct_client(hub) as admin:
        method = "POST" if path == "check" else "PUT"
        answer = await admin.request(method, f"/api/admin/{path}", json=body)
        assert (answer.status_code, answer.json()) == (400, {"error": "invalid", "detail": detail})


def test_b7_a_card_shows_the_bucket_of_a_tier_of_the_policy() -> None:
    with hub_server(BULK) as hub, hub.http(VIEWER) as viewer, hub.agent("planner") as wire:
        wire.ask("ping")
        wire.ask("session_open", session="s")
        (card,) = viewer.get("/api/dashboard/state").json()["agents"]
        assert card["usage"] == {"channel": "ws", "tier": "bulk", "used": 0.5, "remaining": 1, "capacity": 2}


async def test_b7_a_tier_that_is_removed_while_a_card_is_made_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Hub(hub_settings(), BULK) as hub, direct_client(hub, VIEWER) as viewer:
        await hub.stats.check("a", "http", "light", 12)
        await hub.stats.check("a", "ws", "bulk")
        peek = hub.gate.apeek

        async def reload_first(agent: str, channel: str, tier: str) -> Any:
            if tier == "bulk" and hub.gate.policy == BULK:
                await hub.gate.areload(Policy())
            return await peek(agent, channel, tier)

        monkeypatch.setattr(hub.gate, "apeek", reload_first)
        (card,) = (await viewer.get("/api/dashboard/state")).json()["agents"]
        assert card["usage"] == {"channel": "http", "tier": "light", "used": 0.1, "remaining": 108, "capacity": 120}


@pytest.mark.parametrize("moment", ["find_limit", "acheck_limit"])
async def test_a_request_passes_while_its_tier_is_removed(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Hub(hub_settings(), BULK) as hub, direct_client(hub) as admin:
        registered = await admin.post("/api/admin/agents", json={"agent_id": "planner"})
        original = getattr(hub.gate, moment)

        def reload_after(*given: Any, **more: Any) -> Any:
            result = original(*given, **more)
            hub.gate.reload(Policy())
            return result

        async def areload_after(*given: Any, **more: Any) -> Any:
            result = await original(*given, **more)
            hub.gate.reload(Policy())
            return result

        monkeypatch.setattr(hub.gate, moment, areload_after if moment == "acheck_limit" else reload_after)
        async with direct_client(hub, registered.json()["token"]) as client:
            answer = await client.get("/api/mailbox")
        assert (answer.status_code, hub.gate.policy) == (200, Policy())
        assert "ratelimit" in answer.headers


async def test_the_series_of_checks_follow_the_tiers_of_the_policy() -> None:
    async with Hub(hub_settings(), BULK) as hub:
        labels = {"channel": "http", "tier": "bulk", "outcome": "allow"}
        assert value(samples(exposition(hub.metric_sources).decode()), "headgate_checks_total", **labels) == 0
        await hub.stats.check("a", "http", "bulk")
        for policy in (Policy(), BULK):
            await hub.gate.areload(policy)
            found = samples(exposition(hub.metric_sources).decode())
            assert value(found, "headgate_checks_total", **labels) == 1, "a counter never disappears"


def test_a_reload_adds_a_tier_for_open_connections_and_removes_it() -> None:
    with hub_server() as hub, hub.http(ADMIN) as admin, hub.agent("planner") as wire:
        hub.call(hub.hub.gate.reload, BULK)
        assert ping(wire, 3) == ["pong", "pong", "rate_limited"]
        admin.put(f"{LIMITS}/planner", json={"bulk": "4/minute"})
        hub.call(hub.hub.gate.reload, Policy())
        assert ping(wire, 5) == ["pong"] * 5
        assert admin.get(LIMITS).json()["overrides"] == {}
        assert admin.get("/api/dashboard/state").status_code == 200
        assert list_changes(admin) == ["override of 'planner' for bulk set to 4/minute"]
        hub.call(hub.hub.gate.reload, BULK)
        assert ping(wire, 5) == ["pong"] * 4 + ["rate_limited"]
