"""Authorization: every route of the route table, and the sockets."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from hashlib import sha256
from inspect import getsource
from pathlib import Path
from typing import SupportsIndex
from urllib.parse import quote

import httpx
import pytest

from headgate import Decision, Gate, Policy
from headgate.hub.agents.registry import LONGEST_TOKEN, DatabaseAgents
from headgate.hub.agents.tokens import Tokens
from headgate.hub.api import dashboard_routes
from headgate.hub.api.routes import ROUTES
from headgate.hub.api.routing import Access, Route
from headgate.proto import envelope_pb2 as wire
from headgate.stores.redis.agents import RedisAgents
from tests.support.agent_connections import read_close, rejected_handshake, send_hello
from tests.support.example_requests import build_scene, stored_state
from tests.support.hub import ADMIN, VIEWER, HubServer, hub_server

MANY = "1000000/minute"
ROOMY = Policy(
    limits=dict.fromkeys(("light", "normal", "heavy"), MANY),
    addresses=dict.fromkeys(("limit", "registration", "connection", "authentication"), MANY),
    accounts={"plans": {"pro": {}}},
)
OPEN = (Access.PROBE, Access.ANYONE)
NOBODY = "hg_this-is-a-token-that-nobody-has"


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with hub_server(ROOMY) as hub:
        yield hub


@pytest.fixture(scope="module")
def client(hub: HubServer) -> Iterator[httpx.Client]:
    """A client without a token."""
    with hub.http() as client:
        yield client


def parametrize_routes(*access: Access) -> pytest.MarkDecorator:
    """A test for each route that these may use."""
    chosen = [route for route in ROUTES if route.access in access]
    return pytest.mark.parametrize("route", chosen, ids=[f"{route.method} {route.path}" for route in chosen])


class RouteCaller:
    """Makes the good request for a route, of a scene of its own, with whichever token."""

    def __init__(self, hub: HubServer, client: httpx.Client, route: Route) -> None:
        self._hub, self._client, self._route = hub, client, route
        self.scene = hub.run(build_scene(hub.hub))

    def status(self, header: str | None) -> tuple[int, str | None]:
        """The status of the answer, and its error if it is one."""
        path, body = self.scene.request(self._route)
        headers = {} if header is None else {"Authorization": header}
        answer = self._client.request(self._route.method, path, json=body, headers=headers)
        assert (answer.status_code == 401) == ("WWW-Authenticate" in answer.headers)
        if answer.status_code == self._route.status:
            return answer.status_code, None
        assert set(answer.json()) == {"error", "detail"}
        if header is not None and len(header) > 20:
            assert header.split(" ")[-1] not in answer.text
        return answer.status_code, answer.json()["error"]

    def refused(self, *headers: str | None) -> set[tuple[int, str | None]]:
        """How the request is refused with each of these headers, without anything having changed."""
        before = self._hub.run(stored_state(self._hub.hub, self.scene))
        found = {self.status(header) for header in headers}
        assert self._hub.run(stored_state(self._hub.hub, self.scene)) == before
        return found


@pytest.fixture
def route_caller(hub: HubServer, client: httpx.Client, route: Route) -> RouteCaller:
    return RouteCaller(hub, client, route)


@parametrize_routes(*Access)
def test_the_right_token_passes(hub: HubServer, client: httpx.Client, route: Route) -> None:
    rightful: dict[Access, list[str | None]] = {
        Access.PROBE: [None, NOBODY, "agent", ADMIN, VIEWER],
        Access.ANYONE: [None, "agent", ADMIN, VIEWER],
        Access.AGENT: ["agent"],
        Access.PROGRAM: ["agent", ADMIN],
        Access.VIEWER: [VIEWER, ADMIN],
        Access.ADMIN: [ADMIN],
    }
    no_file = (409, "no_config")
    for token in rightful[route.access]:
        asking = RouteCaller(hub, client, route)
        whose = asking.scene.token if token == "agent" else token
        status = asking.status(whose and f"Bearer {whose}")
        assert status == (no_file if route.path == "/api/admin/reload" else (route.status, None))


@parametrize_routes(Access.AGENT, Access.PROGRAM, Access.VIEWER, Access.ADMIN)
def test_invalid_tokens_are_refused_and_change_nothing(hub: HubServer, route: Route, route_caller: RouteCaller) -> None:
    revoked, replaced = hub.register(route_caller.scene.newcomer), hub.register(route_caller.scene.channel)
    hub.run(hub.hub.registry.revoke(route_caller.scene.newcomer))
    hub.run(hub.hub.registry.rotate(route_caller.scene.channel))
    good = route_caller.scene.token if route.access in (Access.AGENT, Access.PROGRAM) else ADMIN
    assert route_caller.refused(
        None,
        "",
        "Bearer",
        f"Bearer {NOBODY}",
        f"Basic {good}",
        good,
        f"Bearer{good}",
        f"Bearer {good[:-1]}",
        f"Bearer {good}x",
        f"Bearer {good.upper()}",
        f"Bearer {route_caller.scene.agent}",
        f"Bearer {revoked}",
        f"Bearer {replaced}",
        f"Bearer {hub.run(hub.hub.registry.invite())}",
        f"Bearer {sha256(good.encode()).hexdigest()}",
        f"Bearer {'x' * (LONGEST_TOKEN + 1)}",
    ) == {(401, "unauthorized")}


@parametrize_routes(Access.ANYONE)
def test_open_routes_need_no_token_but_refuse_a_wrong_one(route: Route, route_caller: RouteCaller) -> None:
    assert route_caller.refused(f"Bearer {NOBODY}", f"Basic {route_caller.scene.token}", "") == {(401, "unauthorized")}
    assert route_caller.status(None) == (route.status, None)


@parametrize_routes(Access.ADMIN, Access.VIEWER)
def test_b6_an_agent_is_neither_admin_nor_viewer(hub: HubServer, route_caller: RouteCaller) -> None:
    whom_it_is_about = hub.run(hub.hub.registry.rotate(route_caller.scene.other))
    tried = route_caller.refused(f"Bearer {route_caller.scene.token}", f"Bearer {whom_it_is_about}")
    assert tried == {(403, "forbidden")}


@parametrize_routes(Access.ADMIN, Access.AGENT, Access.PROGRAM)
def test_a_viewer_only_looks_at_the_dashboard(route_caller: RouteCaller) -> None:
    assert route_caller.refused(f"Bearer {VIEWER}") == {(403, "forbidden")}


@parametrize_routes(Access.AGENT)
def test_the_admin_is_not_an_agent(route_caller: RouteCaller) -> None:
    assert route_caller.refused(f"Bearer {ADMIN}") == {(403, "forbidden")}


def test_routes_are_open_to_those_the_requirements_name() -> None:
    """A route that isn't meant for everybody has to be in one of the tests above."""
    found = {who: {route.path for route in ROUTES if route.access is who} for who in Access}
    page = {route.path for route in dashboard_routes.ROUTES if route.action == "get_dashboard"}
    assert all(re.fullmatch(r"/(dashboard(/(\w+\.(js|css|svg))?)?)?", path) for path in page)
    assert found[Access.PROBE] == {"/health", "/api/health", "/live", "/ready"} | page
    assert found[Access.ANYONE] == {
        "/openapi.json", "/api/schemas", "/api/agents", "/api/channels", "/api/metrics", "/api/onboard/register",
        "/metrics",
    }  # fmt: skip
    assert [(route.method, route.path) for route in ROUTES if route.access is Access.VIEWER] == [
        ("GET", "/api/admin/agents/{agent}"),
        ("GET", "/api/dashboard/state"),
        ("GET", "/api/admin/alerts"),
        ("GET", "/api/admin/addresses"),
    ]
    assert {route.path for route in ROUTES if "/admin" in route.path} <= found[Access.ADMIN] | found[Access.VIEWER]
    assert {path for path in found[Access.PROGRAM] if not path.startswith("/v1/")} == {"/api/channels/{name}"}


def test_a8_every_route_of_the_requirements_exists() -> None:
    page = (Path(__file__).parents[2] / "docs" / "requirements.md").read_text(encoding="utf-8")
    named = {"anyone": Access.ANYONE, "viewer": Access.VIEWER, "admin": Access.ADMIN, "": Access.AGENT}
    found = set()
    for row in re.findall(r"^\| (?:light|normal|heavy) \| .*? \| (.*?) \|$", page, re.MULTILINE):
        for action, method, paths, who in re.findall(r"(\w+): (\w+) (/[^(·]*[^(· ])(?: \((.*?)\))?", row):
            whose = Access.PROBE if "probe" in who else named[who.partition(";")[0]]
            found |= {(method, path, action, whose) for path in paths.split(", ")}
    assert len(found) == 19
    assert found <= {(route.method, route.path, route.action, route.access) for route in ROUTES}


def test_odd_paths_and_methods_open_nothing(client: httpx.Client) -> None:
    for path in (
        "//api/admin/changes",
        "/api//admin/changes",
        "/api/admin/changes/",
        "/api/%61dmin/changes",
        "/api/admin%2Fchanges",
        "/api/x/../admin/changes",
        f"/api/admin/changes?token={ADMIN}",
    ):
        assert client.get(path).status_code in (401, 404), path
    for method, status in (("HEAD", 401), ("OPTIONS", 405), ("TRACE", 405), ("PATCH", 405)):
        assert client.request(method, "/api/admin/changes").status_code == status


def test_a_wrong_method_is_answered_with_the_allowed_ones(client: httpx.Client) -> None:
    answer = client.patch("/api/admin/rate-limits/whitelist")
    assert (answer.status_code, answer.headers["Allow"]) == (405, "GET, POST, PUT")
    assert answer.json() == {"error": "wrong_method", "detail": "expected GET or POST or PUT, got PATCH"}


def test_of_two_tokens_the_first_counts(hub: HubServer, client: httpx.Client) -> None:
    token = hub.register("has two")
    for first, second, status in ((token, ADMIN, 403), (ADMIN, token, 200), (NOBODY, ADMIN, 401)):
        headers = [("Authorization", f"Bearer {first}"), ("Authorization", f"Bearer {second}")]
        assert client.get("/api/admin/changes", headers=headers).status_code == status


def test_without_a_viewer_token_nobody_is_a_viewer() -> None:
    with hub_server(viewer_token="") as hub, hub.http() as client:
        for header in ("", "Bearer", f"Bearer {NOBODY}", f"Bearer {VIEWER}"):
            assert client.get("/api/dashboard/state", headers={"Authorization": header}).status_code == 401


# What is another agent's ----------------------------------------------------------------------------------------------


def test_an_agent_sees_nothing_of_another_agent(hub: HubServer) -> None:
    where = hub.run(build_scene(hub.hub))
    stranger = hub.register("a stranger")
    with hub.http(stranger) as client:
        assert client.get(f"/api/tasks/{where.task}").json()["error"] == "unknown_task"
        assert client.get("/api/tasks").json() == {"tasks": []}
        assert client.get("/api/mailbox").json() == {"messages": []}
        assert client.post("/api/mailbox/ack", json={"numbers": [where.mail]}).json() == {"acknowledged": 0}
        assert client.get("/api/sessions/42/signals").json() == {"signals": []}
        assert client.post("/v1/check", json={"key": "mine"}).json()["current_count"] == 1
    with hub.http(where.token) as client:
        assert client.get(f"/api/tasks/{where.task}").json()["creator"] == where.agent
        assert len(client.get("/api/tasks").json()["tasks"]) == 1
        assert [mail["number"] for mail in client.get("/api/mailbox").json()["messages"]] == [where.mail]
        assert len(client.get("/api/sessions/42/signals").json()["signals"]) == 1
        assert client.get("/v1/counters/mine").json() == {"key": "mine", "current_count": 0}


def test_the_agent_itself_and_the_admin_rotate_and_revoke_its_token(hub: HubServer) -> None:
    first, bystander = hub.register("turns"), hub.register("bystander")
    with hub.http(first) as client:
        second = client.post("/api/onboard/rotate").json()
        assert second["agent_id"] == "turns"
        assert client.post("/api/onboard/rotate").status_code == 401
    with hub.http(second["token"]) as client:
        assert client.post("/api/onboard/revoke").json() == {"agent_id": "turns", "revoked": True}
        assert client.get("/api/tasks").status_code == 401
    with hub.http(bystander) as client:
        assert client.get("/api/tasks").status_code == 200
        again = client.post("/api/onboard/register", json={"agent_id": "turns"})
        assert (again.status_code, again.json()["error"]) == (409, "exists")
    with hub.http(ADMIN) as client:
        third = client.post("/api/admin/agents/turns/token").json()["token"]
    with hub.http(third) as client:
        assert client.get("/api/tasks").status_code == 200


def test_of_concurrent_rotations_with_one_token_one_succeeds(hub: HubServer) -> None:
    token = hub.register("rotates")

    def rotate(_: int) -> httpx.Response:
        with hub.http(token) as client:
            return client.post("/api/onboard/rotate")

    with ThreadPoolExecutor(10) as threads:
        answers = list(threads.map(rotate, range(10)))
    assert sorted(answer.status_code for answer in answers) == [200] + [401] * 9
    (new,) = [answer.json()["token"] for answer in answers if answer.status_code == 200]
    assert hub.run(hub.hub.registry.owner(new)) == "rotates"


@pytest.mark.parametrize("how", ["rotate", "revoke"])
def test_a_token_that_becomes_invalid_before_the_body_is_complete_does_nothing(hub: HubServer, how: str) -> None:
    agent = f"slow: {how}"
    token, other = hub.register(agent), hub.register(f"{agent}, other")
    path = f"/api/admin/agents/{quote(agent, safe='')}/token"
    bodies = {"/api/messages": {"to": agent, "body": 1}, "/api/tasks": {"payload": 1}, "/v1/check": {"key": "k"}}
    with ExitStack() as stack, hub.http(ADMIN) as admin:
        begun = [stack.enter_context(hub.unfinished_post(token, *request)) for request in bodies.items()]
        bystander = stack.enter_context(hub.unfinished_post(other, "/v1/check", {"key": "k"}))
        answer = admin.request("POST" if how == "rotate" else "DELETE", path)
        assert [request.finish() for request in begun] == [401] * len(begun)
        assert bystander.finish() == 200
        token = answer.json()["token"] if how == "rotate" else admin.post(path).json()["token"]
    with hub.http(token) as client:
        assert (client.get("/api/mailbox").json(), client.get("/api/tasks").json()) == ({"messages": []}, {"tasks": []})
        assert client.get("/v1/counters/k").json()["current_count"] == 0


# Sockets --------------------------------------------------------------------------------------------------------------


def test_an_agent_identifies_only_with_its_own_token(hub: HubServer) -> None:
    mine, others = hub.register("mine"), hub.register("others")
    for agent, token in (("mine", others), ("mine", ADMIN), ("mine", VIEWER), ("mine", NOBODY), ("none", mine),
                         ("MINE", mine), ("mine", mine[:-1]), ("mine", sha256(mine.encode()).hexdigest())):  # fmt: skip
        with hub.socket() as stranger:
            answer = stranger.ask("identify", agent_id=agent, token=token, id=7)
            expected = {"error": "unauthorized", "detail": "there is no such agent with such a token"}
            assert answer == {"type": "error", "id": 7, **expected}
            assert stranger.ask("ping")["error"] == "not_identified"
            assert stranger.ask("identify", agent_id="mine", token=mine)["type"] == "identified"


def test_d1_only_its_own_token_proves_an_address(hub: HubServer) -> None:
    mine, others = hub.register("sender"), hub.register("other sender")
    for address, token in (("sender", others), ("sender", ADMIN), ("sender", VIEWER), ("none", mine), ("sender", "")):
        with hub.socket("/relay") as stranger:
            answer = send_hello(stranger, address, token)
            assert (answer.type, answer.error.code) == (wire.MESSAGE_TYPE_ERROR, "unauthorized")
            answer = send_hello(stranger, "sender", mine)
            assert (answer.type, answer.welcome.address) == (wire.MESSAGE_TYPE_WELCOME, "sender")


@pytest.mark.parametrize("how", ["rotate", "revoke", "admin rotates", "admin revokes"])
def test_a_replaced_or_revoked_token_closes_its_sockets(hub: HubServer, how: str) -> None:
    agent = f"is closed: {how}"
    token = hub.register(agent)
    path = f"/api/admin/agents/{quote(agent, safe='')}/token"
    with (
        hub.agent(agent, token) as first,
        hub.agent(agent, token) as second,
        hub.socket("/relay") as third,
        hub.agent(f"stays open: {how}") as bystander,
    ):
        assert send_hello(third, agent, token).type == wire.MESSAGE_TYPE_WELCOME
        with hub.http(token if " " not in how else ADMIN) as client:
            if how.startswith("admin"):
                assert client.request("POST" if how == "admin rotates" else "DELETE", path).status_code == 200
            else:
                assert client.post(f"/api/onboard/{how}").status_code == 200
        for connection in (first, second, third):
            assert read_close(connection) == (1008, "the token of this agent was revoked or replaced")
        bystander.say("ping")
        while bystander.hear() != {"type": "pong"}:  # it may be assigned a task of another test
            pass
    with hub.socket() as stranger:
        assert stranger.ask("identify", agent_id=agent, token=token)["error"] == "unauthorized"


def test_a_token_revoked_while_its_address_is_refunded_lets_nobody_in() -> None:
    class RevokingGate(Gate):
        async def arefund_address(self, address: str, cost: SupportsIndex = 1, purpose: str = "request") -> Decision:
            if purpose == "authentication":
                await revoking.hub.registry.revoke("planner")
            return await super().arefund_address(address, cost, purpose)

    policy = Policy(addresses={"authentication": "1/second"})
    with hub_server(policy, gate=RevokingGate) as revoking, revoking.socket() as wire:
        token = revoking.register("planner")
        assert wire.ask("identify", agent_id="planner", token="wrong")["error"] == "unauthorized"
        revoking.clock.advance(1)
        assert wire.ask("identify", agent_id="planner", token=token)["type"] != "identified"
        assert not revoking.hub.presence.is_connected("planner")


@pytest.mark.parametrize("path", ["/", "/ws/", "/ws/dashboard/", "/dashboard", "/api/health", "/relay/x"])
def test_there_are_no_other_sockets(hub: HubServer, path: str, caplog: pytest.LogCaptureFixture) -> None:
    answer = rejected_handshake(hub, path)
    assert (answer.status_code, answer.json()["error"]) == (404, "unknown_route")
    assert caplog.records == []


# What can't be seen from outside --------------------------------------------------------------------------------------


def test_tokens_are_compared_in_constant_time() -> None:
    for function in (Tokens.recognize, DatabaseAgents.verify, RedisAgents.verify):
        assert "compare_digest(" in getsource(function)


def test_a_hub_keeps_no_token(hub: HubServer) -> None:
    token = hub.register("kept as a digest")
    code = hub.run(hub.hub.registry.invite())
    dump = hub.run(hub.hub.database.run(lambda db: "\n".join(db.iterdump())))
    assert "kept as a digest" in dump
    for secret in (token, code, ADMIN, VIEWER):
        assert secret not in dump
        assert secret not in repr(hub.hub.settings)
