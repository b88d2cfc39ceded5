"""Accounts at registration: an admin names the account and the plan of a new agent, or an invitation does."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import httpx
import pytest

from headgate import ManualClock, Policy, RedisStore
from headgate.errors import StoreAway
from tests.support.hub import ADMIN, HubServer, hub_server
from tests.support.valkey import PATIENCE, ValkeyServer

POLICY = Policy(
    addresses={"registration": "1000/minute"},
    accounts={"plans": {"free": {"tokens": "10/minute"}, "pro": {"tokens": "1000/minute"}}},
    agents={"filed": {"account": "acme/filed"}},
)


@contextmanager
def hub_with(kind: str, request: pytest.FixtureRequest, **settings: Any) -> Iterator[HubServer]:
    store = None
    if kind == "valkey":
        server: ValkeyServer = request.getfixturevalue("redis_server")
        clock = ManualClock(start=1000)
        store = RedisStore(server.url, prefix=f"test-{uuid4().hex}:", timeout=PATIENCE, clock=clock)
    with hub_server(POLICY, store=store, **settings) as hub:
        yield hub


@pytest.fixture(params=["memory", "valkey"])
def hub(request: pytest.FixtureRequest) -> Iterator[HubServer]:
    with hub_with(request.param, request, registration="invitation") as hub:
        yield hub


@pytest.fixture
def admin(hub: HubServer) -> Iterator[httpx.Client]:
    with hub.http(ADMIN) as client:
        yield client


@pytest.fixture
def anyone(hub: HubServer) -> Iterator[httpx.Client]:
    with hub.http() as client:
        yield client


def belongs(hub: HubServer, agent: str) -> tuple[str, str]:
    rules = hub.hub.gate.effective.agents.get(agent)
    return hub.hub.gate.path_of(agent), "" if rules is None else rules.plan


def recorded(hub: HubServer, agent: str) -> list[tuple[list[str], str]]:
    """The changes to an agent: the kinds of their edits, and who made them."""
    found = [[edit for edit in change.edits if edit.agent == agent] for change in hub.hub.gate.history()]
    by = [change.by for change in hub.hub.gate.history()]
    return [([edit.kind for edit in edits], who) for edits, who in zip(found, by, strict=True) if edits]


@pytest.mark.parametrize("path", ["/api/admin/agents", "/api/onboard/register"])
def test_an_admin_registers_an_agent_for_an_account(hub: HubServer, admin: httpx.Client, path: str) -> None:
    body = {"agent_id": "planner", "account": "acme/search", "plan": "pro"}
    answer = admin.post(path, json=body)
    assert answer.status_code == 201, answer.text
    assert belongs(hub, "planner") == ("acme/search/planner", "pro")
    assert recorded(hub, "planner") == [(["account", "agent_plan"], "admin at 127.0.0.1")]
    with hub.http(answer.json()["token"]) as planner:
        assert planner.get("/v1/accounts/acme%2Fsearch").status_code == 200
    assert admin.post(path, json={"agent_id": "filed"}).status_code == 201
    assert belongs(hub, "filed") == ("acme/filed/filed", "")
    assert admin.post(path, json={"agent_id": "free", "plan": "free"}).status_code == 201
    assert belongs(hub, "free") == ("-/-/free", "free")


def test_an_invitation_carries_the_account_and_is_recorded_by_its_maker(
    hub: HubServer, admin: httpx.Client, anyone: httpx.Client
) -> None:
    code = admin.post("/api/admin/invitations", json={"account": "acme/search", "plan": "free"}).json()["invitation"]
    assert anyone.post("/api/onboard/register", json={"agent_id": "guest", "invitation": code}).status_code == 201
    assert belongs(hub, "guest") == ("acme/search/guest", "free")
    assert recorded(hub, "guest") == [(["account", "agent_plan"], "admin at 127.0.0.1")]
    again = anyone.post("/api/onboard/register", json={"agent_id": "second", "invitation": code})
    assert (again.status_code, again.json()["error"]) == (403, "invitation_unknown")
    assert belongs(hub, "second") == ("-/-/second", "")
    for name, sent in [("no body", b""), ("an empty one", b"{}")]:
        plain = admin.post("/api/admin/invitations", content=sent).json()["invitation"]
        assert anyone.post("/api/onboard/register", json={"agent_id": name, "invitation": plain}).status_code == 201
        assert recorded(hub, name) == []


def test_an_invitation_is_not_used_up_by_a_name_that_is_taken(
    hub: HubServer, admin: httpx.Client, anyone: httpx.Client
) -> None:
    hub.register("planner")
    code = admin.post("/api/admin/invitations", json={"account": "acme/search"}).json()["invitation"]
    taken = anyone.post("/api/onboard/register", json={"agent_id": "planner", "invitation": code})
    assert (taken.status_code, taken.json()["error"]) == (409, "exists")
    assert belongs(hub, "planner") == ("-/-/planner", "")  # nobody moves another's agent
    assert anyone.post("/api/onboard/register", json={"agent_id": "guest", "invitation": code}).status_code == 201
    assert belongs(hub, "guest") == ("acme/search/guest", "")


@pytest.mark.parametrize("named", [{"account": "acme/search"}, {"plan": "pro"}, {"account": ""}])
def test_nobody_else_names_an_account(
    hub: HubServer, admin: httpx.Client, anyone: httpx.Client, named: dict[str, str]
) -> None:
    code = admin.post("/api/admin/invitations").json()["invitation"]
    body = {"agent_id": "sly", "invitation": code, **named}
    with hub.http(hub.register("agent")) as agent:
        for client in (anyone, agent):
            answer = client.post("/api/onboard/register", json=body)
            assert (answer.status_code, answer.json()["error"]) == (403, "forbidden")
    assert hub.run(hub.hub.registry.find("sly")) is None
    assert recorded(hub, "sly") == []
    assert anyone.post("/api/onboard/register", json={"agent_id": "sly", "invitation": code}).status_code == 201


@pytest.mark.parametrize(
    ("named", "detail"),
    [
        ({"account": "acme/search/planner"}, "account: expected the path of an account above the agents (ORG/TEAM)"),
        ({"account": "acme//x"}, "account: expected the path of an account"),
        ({"account": "-"}, "account: expected the path of an account above the agents"),
        ({"plan": "gold"}, "plan: expected a plan of the policy (free, pro), got 'gold'"),
        ({"plan": ""}, "plan: expected a plan of the policy (free, pro), got ''"),
        ({"account": 5}, "body: Expected `str | null`, got `int` - at `$.account`"),
    ],
)
def test_a_wrong_account_registers_nobody(hub: HubServer, admin: httpx.Client, named: Any, detail: str) -> None:
    for path in ("/api/admin/agents", "/api/onboard/register"):
        answer = admin.post(path, json={"agent_id": "planner", **named})
        assert (answer.status_code, answer.json()["error"]) == (400, "invalid")
        assert answer.json()["detail"].startswith(detail)
    invited = admin.post("/api/admin/invitations", json=named)
    assert (invited.status_code, invited.json()["detail"].startswith(detail)) == (400, True)
    assert hub.run(hub.hub.registry.find("planner")) is None
    assert hub.hub.gate.history() == []


def test_an_invitation_counts_where_anybody_may_register(request: pytest.FixtureRequest) -> None:
    with hub_with("memory", request) as hub, hub.http(ADMIN) as admin, hub.http() as anyone:
        code = admin.post("/api/admin/invitations", json={"account": "acme/search"}).json()["invitation"]
        for name, invitation in [("guest", code), ("other", code), ("third", "a guess")]:
            body = {"agent_id": name, "invitation": invitation}
            assert anyone.post("/api/onboard/register", json=body).status_code == 201
        assert [belongs(hub, name)[0] for name in ("guest", "other", "third")] == [
            "acme/search/guest",
            "-/-/other",
            "-/-/third",
        ]


def test_an_agent_whose_account_cannot_be_set_gets_no_token(hub: HubServer, admin: httpx.Client) -> None:
    def away(*_: object, **__: object) -> None:
        raise StoreAway("gone")

    before = hub.hub.gate.change
    hub.hub.gate.change = away  # type: ignore[method-assign]
    try:
        answer = admin.post("/api/admin/agents", json={"agent_id": "planner", "account": "acme/search"})
    finally:
        hub.hub.gate.change = before  # type: ignore[method-assign]
    assert (answer.status_code, answer.json()["error"]) == (503, "unavailable")
    assert "token" not in answer.json()
