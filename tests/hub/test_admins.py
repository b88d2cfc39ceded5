# ruff: noqa: RUF001 - lookalikes are among the subjects
"""Operators: the built-in admin and viewer, and agents with a role. Who may do what, and who is left."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed

from headgate import Policy
from headgate.errors import HeadgateError, StoreAway
from headgate.hub.agents.operators import Holder
from tests.support.admin import LIMITS
from tests.support.hub import ADMIN, VIEWER, AgentConnection, HubServer, hub_server
from tests.support.hub_fleet import HubFleet
from tests.support.operators import ADMINS, add_operator, operators, status_and_error
from tests.support.valkey import wait_for

LIKE_BUILT_IN = [
    "admin", "viewer", "Admin", "VIEWER", "admın", "ADMİN", "vıewer", "ádmin", "vïewer", "adm1n", "admln", "adrnin",
    "vievver", "ađmin", "admiŋ",
]  # fmt: skip
FEW = Policy(limits={"light": "2/minute", "normal": "2/minute", "heavy": "2/minute"})


@contextmanager
def hub_with_created_token(data: Path, **changes: Any) -> Iterator[tuple[HubServer, httpx.Client]]:
    """A hub whose admin has the token of the first start."""
    settings = {"admin_token": "", "viewer_token": "", **changes}
    with hub_server(data=data, **settings) as hub, hub.http(hub.hub.tokens.created) as admin:
        yield hub, admin


@contextmanager
def open_dashboard(hub: HubServer, token: str) -> Iterator[AgentConnection]:
    """A dashboard that has its snapshot."""
    with hub.socket("/ws/dashboard") as wire:
        assert wire.ask("watch", token=token)["type"] == "snapshot"
        yield wire


def read_dashboard_close(dashboard: AgentConnection) -> tuple[int, str]:
    """How the hub has closed a dashboard, soon: a few updates may come before."""
    with suppress(ConnectionClosed):
        for _ in range(5):
            dashboard.hear()
        pytest.fail("it goes on")
    assert dashboard.socket.close_code is not None
    return dashboard.socket.close_code, dashboard.socket.close_reason or ""


# Made, listed and removed ---------------------------------------------------------------------------------------------


def test_b6_admins_have_names_and_the_record_names_them(logged: list[Any]) -> None:
    with hub_server() as hub, operators(hub, "ada") as (ada,):
        grace = add_operator(ada, "grace", "viewer")
        ada.put(f"{LIMITS}/planner", json={"light": "7/minute"}).raise_for_status()
        changes = ada.get("/api/admin/changes").json()["changes"]
        assert [(change["what"], change["by"]) for change in changes] == [
            ("override of 'planner' for light set to 7/minute", "ada at 127.0.0.1"),
            ("role of 'grace' set to viewer", "ada at 127.0.0.1"),
            ("role of 'ada' set to admin", "admin at 127.0.0.1"),
        ]
        listed = ada.get(ADMINS).json()["admins"]
        assert [tuple(one.values())[:4] for one in listed] == [
            ("admin", "admin", "settings", ""),
            ("viewer", "viewer", "settings", ""),
            ("ada", "admin", "agent", "admin at 127.0.0.1"),
            ("grace", "viewer", "agent", "ada at 127.0.0.1"),
        ]
        assert [one["at"] for one in listed] == [None, None, changes[2]["at"], changes[1]["at"]]
        removed = ada.delete(f"{ADMINS}/grace")
        assert (removed.status_code, removed.json()) == (200, {"name": "grace", "revoked": True})
        with hub.http(grace) as gone:
            assert gone.get("/api/dashboard/state").status_code == 401
        assert status_and_error(ada.delete(f"{ADMINS}/grace")) == (404, "unknown_agent")
    told = [(line["what"], line["by"]) for line in logged if line["event"] == "limits changed"]
    assert ("role of 'grace' removed", "ada at 127.0.0.1") in told
    assert grace not in str(logged)


def test_b6_an_agent_is_given_a_role_and_loses_it() -> None:
    with hub_server() as hub, hub.http(ADMIN) as admin, hub.http(hub.register("ada")) as ada:
        role = "/api/admin/agents/ada/role"
        assert status_and_error(ada.get("/api/admin/changes")) == (403, "forbidden")
        assert admin.put(role, json={"role": "viewer"}).json() == {"agent_id": "ada", "role": "viewer"}
        assert ada.get("/api/dashboard/state").status_code == 200
        assert status_and_error(ada.get("/api/admin/changes")) == (403, "forbidden")
        assert admin.put(role, json={"role": "admin"}).json() == {"agent_id": "ada", "role": "admin"}
        assert ada.get("/api/admin/changes").status_code == ada.get("/api/tasks").status_code == 200
        for _ in range(2):
            assert admin.delete(role).json() == {"agent_id": "ada", "role": ""}
            assert status_and_error(ada.get("/api/admin/changes")) == (403, "forbidden")
            assert status_and_error(ada.get("/api/dashboard/state")) == (403, "forbidden")
        assert ada.get("/api/tasks").status_code == 200  # it is an agent as before
        assert len(admin.get("/api/admin/changes").json()["changes"]) == 3  # what changes nothing is no change


def test_b6_an_admin_is_not_limited_and_a_viewer_only_as_an_agent() -> None:
    with hub_server(FEW) as hub, hub.http(ADMIN) as admin:
        clients = [
            hub.http(add_operator(admin, name, name.partition(" ")[0])) for name in ("admin of them", "viewer of them")
        ]
        with clients[0] as ada, clients[1] as grace:
            for path in ("/api/admin/changes", "/api/tasks", "/api/agents"):
                assert {ada.get(path).status_code for _ in range(5)} == {200}
            assert {grace.get("/api/dashboard/state").status_code for _ in range(5)} == {200}
            assert {grace.get("/api/agents").status_code for _ in range(5)} == {200}
            assert [grace.get("/api/tasks").status_code for _ in range(3)] == [200, 200, 429]
            new = [grace.post("/api/onboard/register", json={"agent_id": f"new {n}"}).status_code for n in range(6)]
            assert new == [201] * 5 + [429]


# Bad input ------------------------------------------------------------------------------------------------------------


def test_b6_bad_requests_about_operators_change_nothing() -> None:
    with hub_server() as hub, operators(hub, "ada") as (ada,):
        hub.register("planner")
        before = ada.get("/api/admin/changes").json()
        expected: list[tuple[str, str, Any, tuple[int, str]]] = [
            ("POST", ADMINS, {"name": "eve", "role": "root"}, (400, "invalid")),
            ("POST", ADMINS, {"name": "eve", "role": ""}, (400, "invalid")),
            ("POST", ADMINS, {"name": "eve"}, (400, "invalid")),
            ("POST", ADMINS, {"name": "planner", "role": "admin"}, (409, "exists")),
            ("POST", ADMINS, {"name": "admin", "role": "admin"}, (400, "reserved")),
            ("POST", ADMINS, {"name": "Viewer", "role": "admin"}, (400, "reserved")),
            ("POST", ADMINS, {"name": "a\u0430", "role": "admin"}, (400, "bad_agent")),
            ("PUT", "/api/admin/agents/planner/role", {"role": "owner"}, (400, "invalid")),
            ("PUT", "/api/admin/agents/nobody/role", {"role": "admin"}, (404, "unknown_agent")),
            ("DELETE", f"{ADMINS}/planner", None, (404, "unknown_agent")),
            ("DELETE", f"{ADMINS}/nobody", None, (404, "unknown_agent")),
            ("DELETE", f"{ADMINS}/admin", None, (409, "from_settings")),
            ("DELETE", f"{ADMINS}/viewer", None, (409, "from_settings")),
            ("PUT", "/api/admin/agents/ada/role", {"role": "viewer"}, (409, "own_account")),
            ("DELETE", "/api/admin/agents/ada/role", None, (409, "own_account")),
            ("DELETE", "/api/admin/agents/ada/token", None, (409, "own_account")),
            ("DELETE", f"{ADMINS}/ada", None, (409, "own_account")),
            ("PUT", "/api/admin/agents/ada/block", {}, (409, "own_account")),
            ("DELETE", "/api/admin/agents/ada/block", None, (409, "own_account")),
        ]
        for method, path, body, error in expected:
            assert status_and_error(ada.request(method, path, json=body)) == error, (method, path, body)
        assert ada.get("/api/admin/changes").json() == before
        assert hub.run(hub.hub.registry.find("eve")) is None
        wrong = ada.post(ADMINS, json={"name": "eve", "role": "root"}).json()
        assert wrong["detail"] == "role: expected one of admin, viewer, got 'root'"


@pytest.mark.parametrize("name", LIKE_BUILT_IN)
def test_b6_nobody_registers_the_name_of_a_built_in_operator(name: str) -> None:
    with hub_server() as hub, hub.http(ADMIN) as admin, hub.http() as stranger:
        for client, path in ((stranger, "/api/onboard/register"), (admin, "/api/admin/agents")):
            answer = client.post(path, json={"agent_id": name})
            assert status_and_error(answer) == (400, "reserved")
            assert answer.json()["detail"] == (
                f"agent: expected an id that can't pass for admin and viewer, the hub's own, got {name!a}"
            )


@pytest.mark.parametrize(
    "name", ["administrator", "admin-2", "reviewer", "viewers", "kırmızı", "Đorđe", "add-min", "wiewer"]
)
def test_other_names_can_be_registered(name: str) -> None:
    with hub_server() as hub, hub.http() as stranger:
        assert stranger.post("/api/onboard/register", json={"agent_id": name}).status_code == 201


def test_b6_an_agent_that_passes_for_a_built_in_operator_gets_no_role(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_server() as hub, hub.http(ADMIN) as admin:
        with monkeypatch.context() as before:
            before.setattr("headgate.hub.agents.registry.looks_built_in", lambda _: False)
            hub.register("admın")
        assert status_and_error(admin.put("/api/admin/agents/admın/role", json={"role": "admin"})) == (400, "reserved")


# Attacks --------------------------------------------------------------------------------------------------------------


def test_b6_no_agent_and_no_viewer_gives_itself_a_role() -> None:
    with hub_server() as hub, operators(hub, "grace", role="viewer") as (grace,), hub.http(hub.register("eve")) as eve:
        for client, name in ((grace, "grace"), (eve, "eve")):
            for method, path, body in (
                ("PUT", f"/api/admin/agents/{name}/role", {"role": "admin"}),
                ("POST", ADMINS, {"name": f"{name} again", "role": "admin"}),
                ("GET", ADMINS, None),
                ("DELETE", f"{ADMINS}/admin", None),
                ("PUT", "/api/admin/agents/planner/block", {}),
                ("PUT", "/api/admin/log-level", {"level": "error"}),
            ):
                assert status_and_error(client.request(method, path, json=body)) == (403, "forbidden")
        assert hub.hub.gate.effective.roles == {"grace": "viewer"}


def test_b6_a_role_that_is_left_from_lost_data_is_nobodys() -> None:
    with hub_server() as hub, hub.http(ADMIN) as admin, hub.http() as stranger:
        hub.hub.gate.set_role("ada", "admin")  # as if hub.db was lost, and changes.db was not
        assert status_and_error(stranger.post("/api/onboard/register", json={"agent_id": "ada"})) == (409, "exists")
        assert status_and_error(admin.post("/api/admin/agents", json={"agent_id": "ada", "plan": "gold"})) == (
            400,
            "invalid",
        )
        assert hub.hub.gate.effective.roles == {"ada": "admin"}, "nothing has come of it"
        token = admin.post("/api/admin/agents", json={"agent_id": "ada"}).json()["token"]
        with hub.http(token) as ada:
            assert status_and_error(ada.get(ADMINS)) == (403, "forbidden")
        assert hub.hub.gate.effective.roles == {}
        assert status_and_error(admin.post("/api/admin/agents", json={"agent_id": "ada"})) == (409, "exists")
        hub.hub.gate.set_role("ada", "viewer")
        assert status_and_error(admin.post("/api/admin/agents", json={"agent_id": "ada"})) == (409, "exists")
        assert hub.hub.gate.effective.roles == {"ada": "viewer"}  # that of a registered agent stays
        hub.hub.gate.set_role("grace", "admin")
        assert admin.delete(f"{ADMINS}/grace").json() == {"name": "grace", "revoked": False}


@pytest.mark.parametrize("step", ["role", "token", "admins", "block"])
def test_b6_rights_end_before_a_request_whose_body_is_on_its_way(step: str) -> None:
    with hub_server() as hub, hub.http(ADMIN) as admin:
        token = add_operator(admin, "ada")
        with hub.unfinished_post(token, ADMINS, {"name": "eve", "role": "admin"}) as request:
            if step == "block":
                admin.put("/api/admin/agents/ada/block", json={}).raise_for_status()
            else:
                path = f"{ADMINS}/ada" if step == "admins" else f"/api/admin/agents/ada/{step}"
                admin.delete(path).raise_for_status()
            assert request.finish() == {"role": 403, "token": 401, "admins": 401, "block": 429}[step]
        assert hub.run(hub.hub.registry.find("eve")) is None


def test_b6_the_token_of_the_first_start_ends_for_a_body_on_its_way(tmp_path: Path) -> None:
    body = {"name": "eve", "role": "admin"}
    with (
        hub_with_created_token(tmp_path) as (hub, admin),
        hub.http(add_operator(admin, "ada")) as ada,
        hub.unfinished_post(hub.hub.tokens.created, ADMINS, body) as request,
    ):
        ada.delete(f"{ADMINS}/admin").raise_for_status()
        assert request.finish() == 401


def test_b6_a_revoked_operator_has_no_role_with_its_next_token() -> None:
    with hub_server() as hub, hub.http(ADMIN) as admin:
        add_operator(admin, "ada")
        assert admin.delete("/api/admin/agents/ada/token").json() == {"agent_id": "ada", "revoked": True}
        assert [one["name"] for one in admin.get(ADMINS).json()["admins"]] == ["admin", "viewer"]
        with hub.http(admin.post("/api/admin/agents/ada/token").json()["token"]) as ada:
            assert status_and_error(ada.get(ADMINS)) == (403, "forbidden")


def test_b6_a_rotated_operator_keeps_its_role_with_the_new_token_only() -> None:
    with hub_server() as hub, operators(hub, "ada") as (ada,):
        with hub.http(ada.post("/api/onboard/rotate").json()["token"]) as again:
            assert again.get(ADMINS).status_code == 200
        assert ada.get(ADMINS).status_code == 401


# Dashboards -----------------------------------------------------------------------------------------------------------


def test_b6_a_dashboard_says_who_is_signed_in() -> None:
    with hub_server(public_dashboard=True) as hub, hub.http(ADMIN) as admin:
        expected = {
            ADMIN: ("admin", True),
            VIEWER: ("viewer", False),
            hub.hub.tokens.link: ("", True),
            add_operator(admin, "ada"): ("ada", True),
            add_operator(admin, "grace", "viewer"): ("grace", False),
        }
        for token, (name, may_change) in expected.items():
            with hub.socket("/ws/dashboard") as wire:
                snapshot = wire.ask("watch", token=token)
                assert (snapshot["name"], snapshot["admin"]) == (name, may_change)
        with hub.socket("/ws/dashboard") as wire:
            assert wire.ask("watch")["name"] == ""


@pytest.mark.parametrize(
    ("method", "path", "body", "reason"),
    [
        ("DELETE", "/api/admin/agents/ada/role", None, "the role of this operator has changed"),
        ("PUT", "/api/admin/agents/ada/role", {"role": "viewer"}, "the role of this operator has changed"),
        ("PUT", "/api/admin/agents/ada/block", {}, "the role of this operator has changed"),
        ("POST", "/api/admin/agents/ada/token", None, "the token of this agent was revoked or replaced"),
    ],
    ids=["taken", "lowered", "blocked", "rotated"],
)
def test_b6_rights_that_end_close_the_dashboard_at_once(method: str, path: str, body: Any, reason: str) -> None:
    with hub_server() as hub, hub.http(ADMIN) as admin:
        token = add_operator(admin, "ada")
        with (
            open_dashboard(hub, token) as wire,
            open_dashboard(hub, add_operator(admin, "grace")) as other,
            open_dashboard(hub, ADMIN) as own,
        ):
            admin.request(method, path, json=body).raise_for_status()
            assert read_dashboard_close(wire) == (1008, reason)
            for still_open in (other, own):
                assert still_open.hear()["type"] == "update"
            assert len(hub.hub.dashboard.sockets) == 2
        with hub.socket("/ws/dashboard") as wire:
            lowered = body == {"role": "viewer"}
            assert wire.ask("watch", token=token)["type"] == ("snapshot" if lowered else "error")


def test_b6_a_token_that_is_revoked_while_a_dashboard_opens_opens_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_server() as hub, hub.http(ADMIN) as admin:
        token, feed = add_operator(admin, "ada"), hub.hub.dashboard
        attempt = feed._authentication.attempt

        async def slow(address: str, token: str, look_up: Callable[[], Any]) -> Any:
            found = await attempt(address, token, look_up)
            if isinstance(found, Holder):  # the token was valid a moment ago
                await hub.hub.registry.revoke("ada")
            return found

        monkeypatch.setattr(feed._authentication, "attempt", slow)
        with hub.socket("/ws/dashboard") as wire:
            assert wire.ask("watch", token=token)["error"] == "unauthorized"


# Somebody is left -----------------------------------------------------------------------------------------------------


def test_b6_the_token_of_the_first_start_is_revoked_for_good(tmp_path: Path, logged: list[Any]) -> None:
    with hub_with_created_token(tmp_path) as (hub, admin):
        first = hub.hub.tokens.created
        assert [one["kind"] for one in admin.get(ADMINS).json()["admins"]] == ["first_start"]
        assert status_and_error(admin.delete(f"{ADMINS}/admin")) == (409, "own_account")
        ada_token = add_operator(admin, "ada")
        with hub.http(ada_token) as ada, open_dashboard(hub, first) as wire, open_dashboard(hub, ada_token) as other:
            removed = ada.delete(f"{ADMINS}/admin")
            assert (removed.status_code, removed.json()) == (200, {"name": "admin", "revoked": True})
            assert read_dashboard_close(wire) == (1008, "the role of this operator has changed")
            assert other.hear()["type"] == "update"
            assert admin.get(ADMINS).status_code == 401
            assert [one["name"] for one in ada.get(ADMINS).json()["admins"]] == ["ada"]
            assert status_and_error(ada.delete(f"{ADMINS}/admin")) == (404, "unknown_agent")
    (line,) = [line for line in logged if line["event"] == "token of the first start revoked"]
    assert line["by"] == "ada at 127.0.0.1"
    with hub_with_created_token(tmp_path) as (hub, _):
        assert hub.hub.tokens.created == ""
        with hub.http(first) as old, hub.http(ada_token) as ada:
            assert (old.get(ADMINS).status_code, ada.get(ADMINS).status_code) == (401, 200)
    with hub_server(data=tmp_path) as hub, hub.http(ADMIN) as back:  # HEADGATE_ADMIN_TOKEN is the way back in
        assert back.get(ADMINS).status_code == 200


def test_b6_the_token_of_an_agent_is_refused_as_the_hubs_admin_token(tmp_path: Path) -> None:
    with hub_server(data=tmp_path) as hub, operators(hub, "vic", role="viewer") as (viewer,):
        token = viewer.headers["Authorization"].removeprefix("Bearer ")
    with pytest.raises(HeadgateError, match="expected one that belongs to nobody else, got the token of agent 'vic'"):
        hub_server(data=tmp_path, admin_token=token).__enter__()
    with hub_server(data=tmp_path) as hub, hub.http(token) as viewer:
        assert status_and_error(viewer.get(ADMINS)) == (403, "forbidden")


def test_b6_a_hub_that_nobody_can_administer_says_how_to_get_in(tmp_path: Path, logged: list[Any]) -> None:
    def warned() -> int:
        return sum("set HEADGATE_ADMIN_TOKEN to get in" in line["event"] for line in logged)

    with hub_with_created_token(tmp_path) as (hub, admin), hub.http(add_operator(admin, "ada")) as ada:
        ada.delete(f"{ADMINS}/admin").raise_for_status()
    with hub_with_created_token(tmp_path):
        assert warned() == 0
    for file in tmp_path.glob("changes.db*"):
        file.unlink()
    with hub_with_created_token(tmp_path):
        assert warned() == 1


@pytest.fixture
def hub_with_one_admin(tmp_path: Path) -> Iterator[tuple[HubServer, httpx.Client]]:
    """A hub whose only admin is ada."""
    with (
        hub_with_created_token(tmp_path, dashboard_link="admin") as (hub, admin),
        hub.http(add_operator(admin, "ada")) as ada,
    ):
        ada.delete(f"{ADMINS}/admin").raise_for_status()
        yield hub, ada


def test_b6_the_last_admin_stays(hub_with_one_admin: tuple[HubServer, httpx.Client]) -> None:
    hub, ada = hub_with_one_admin
    with hub.http(hub.hub.tokens.link) as link:  # which is an admin, but only as long as the hub runs
        for method, path, body in (
            ("DELETE", f"{ADMINS}/ada", None),
            ("DELETE", "/api/admin/agents/ada/role", None),
            ("PUT", "/api/admin/agents/ada/role", {"role": "viewer"}),
            ("DELETE", "/api/admin/agents/ada/token", None),
            ("PUT", "/api/admin/agents/ada/block", {"reason": "a mistake"}),
            ("POST", "/api/admin/store/accept", {"agent_data": "keep"}),
        ):
            before = link.get("/api/admin/changes").json()
            assert status_and_error(link.request(method, path, json=body)) == (409, "last_admin"), path
            assert link.get("/api/admin/changes").json() == before  # not even for a moment
        assert status_and_error(ada.post("/api/onboard/revoke")) == (409, "last_admin")
        assert ada.get(ADMINS).status_code == 200
        add_operator(link, "grace", "viewer")
        hub.register("hopper")
        link.put("/api/admin/agents/hopper/role", json={"role": "admin"}).raise_for_status()
        hub.run(hub.hub.registry.revoke("hopper"))  # one without a token doesn't count
        assert status_and_error(link.delete(f"{ADMINS}/ada")) == (409, "last_admin")
        lovelace = add_operator(link, "lovelace")
        link.put("/api/admin/agents/lovelace/block", json={}).raise_for_status()  # nor does one that is blocked
        assert status_and_error(link.delete(f"{ADMINS}/ada")) == (409, "last_admin")
        link.delete("/api/admin/agents/lovelace/block").raise_for_status()
        assert ada.post("/api/onboard/revoke").json() == {"agent_id": "ada", "revoked": True}
        with hub.http(lovelace) as other:
            names = [one["name"] for one in other.get(ADMINS).json()["admins"]]
            assert names == ["grace", "hopper", "lovelace"]


@pytest.mark.parametrize("step", ["role", "token", "block", "admins"])
def test_b6_of_two_admins_who_remove_each_other_one_is_left(tmp_path: Path, step: str) -> None:
    with (
        hub_with_created_token(tmp_path, dashboard_link="none") as (hub, _),
        operators(hub, "ada", "eve") as (ada, eve),
        ThreadPoolExecutor(2) as pool,
    ):
        ada.delete(f"{ADMINS}/admin").raise_for_status()

        def remove(client: httpx.Client, name: str) -> int:
            path = f"{ADMINS}/{name}" if step == "admins" else f"/api/admin/agents/{name}/{step}"
            return (client.put(path, json={}) if step == "block" else client.delete(path)).status_code

        for _ in range(10):
            answers = sorted(pool.map(remove, (ada, eve), ("eve", "ada")))
            assert answers[0] == 200
            assert answers[1] in (401, 403, 409, 429)
            (left,) = [client for client in (ada, eve) if client.get(ADMINS).status_code == 200]
            other = "eve" if left is ada else "ada"
            if step == "block":
                left.delete(f"/api/admin/agents/{other}/block").raise_for_status()
            elif step == "role":
                left.put(f"/api/admin/agents/{other}/role", json={"role": "admin"}).raise_for_status()
            else:
                break


def test_b6_the_second_of_two_hubs_that_leave_nobody_undoes_its_change(
    fleet: HubFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"admin_token": "", "viewer_token": "", "dashboard_link": "none"}
    with fleet.hub(**settings) as one, fleet.hub(**settings) as two, operators(one, "ada", "eve") as (ada, eve):
        ada.delete(f"{ADMINS}/admin").raise_for_status()
        wait_for(
            lambda: two.hub.gate.effective.roles == {"ada": "admin", "eve": "admin"}, "both roles on the other hub"
        )
        with two.http(eve.headers["Authorization"].removeprefix("Bearer ")) as eve_elsewhere:
            two.run(two.hub.tokens.revoke_admin())
            set_role = two.hub.gate.aset_role

            async def after_the_other(*arguments: Any, **by: Any) -> None:
                monkeypatch.setattr(two.hub.gate, "aset_role", set_role)
                demoted = await asyncio.to_thread(ada.delete, "/api/admin/agents/eve/role")
                assert demoted.status_code == 200
                await set_role(*arguments, **by)

            monkeypatch.setattr(two.hub.gate, "aset_role", after_the_other)
            assert status_and_error(eve_elsewhere.delete("/api/admin/agents/ada/role")) == (409, "last_admin")
            for hub in (one, two):
                wait_for(lambda: hub.hub.gate.effective.roles == {"ada": "admin"}, "that ada is left")  # noqa: B023
            assert ada.get(ADMINS).status_code == 200


def test_b6_roles_hold_on_every_hub_of_a_store(fleet: HubFleet) -> None:
    with fleet.hub() as one, fleet.hub() as two, one.http(ADMIN) as admin:
        token = add_operator(admin, "ada")
        wait_for(lambda: two.hub.gate.role_of("ada") == "admin", "the role on the other hub")
        with two.http(token) as ada, open_dashboard(two, token) as wire:
            assert ada.get(ADMINS).status_code == 200
            admin.delete("/api/admin/agents/ada/role").raise_for_status()
            assert read_dashboard_close(wire) == (1008, "the role of this operator has changed")
            assert status_and_error(ada.get(ADMINS)) == (403, "forbidden")


def test_b6_while_the_store_is_away_operators_are_known_as_agents_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_server() as hub, hub.http(ADMIN) as admin, hub.http(add_operator(admin, "ada")) as ada:
        owner = hub.hub.registry.owner

        async def away(token: str) -> str | None:
            if token == ada.headers["Authorization"].removeprefix("Bearer "):
                return await owner(token)  # verified here before
            raise StoreAway("the server is away")

        grace = add_operator(admin, "grace")
        monkeypatch.setattr(hub.hub.registry, "owner", away)
        with hub.http(grace) as other:
            assert status_and_error(other.get(ADMINS)) == (503, "unavailable")
            assert ada.get(ADMINS).status_code == admin.get(ADMINS).status_code == 200
        with hub.socket("/ws/dashboard") as wire:
            wire.say("watch", token=grace)
            assert read_dashboard_close(wire) == (
                1013,
                "the hub can't do this at the moment; try again",
            )  # and not a wrong token
