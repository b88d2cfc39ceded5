"""Rights that end while somebody waits: roles, revocations and blocks that meet, on one hub and on two."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.event_loop import wait_until
from tests.support.hub import ADMIN, hub_server
from tests.support.hub_fleet import HubFleet
from tests.support.operators import ADMINS, add_operator, operators, status_and_error
from tests.support.valkey import wait_for

# Revocations ----------------------------------------------------------------------------------------------------------


def test_b6_a_role_that_is_given_during_a_revocation_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_server() as hub, hub.http(ADMIN) as admin, hub.http(ADMIN) as other, ThreadPoolExecutor(1) as pool:
        hub.register("ada")
        lock, set_role = hub.hub.operators._changing, hub.hub.gate.aset_role
        revoked: list[Future[httpx.Response]] = []

        async def during_the_revocation(*arguments: Any, **by: Any) -> None:
            if not revoked:
                revoked.append(pool.submit(other.delete, "/api/admin/agents/ada/token"))
                await wait_until(lambda: bool(lock._waiters) or revoked[0].done(), "the revocation")
            await set_role(*arguments, **by)

        monkeypatch.setattr(hub.hub.gate, "aset_role", during_the_revocation)
        admin.put("/api/admin/agents/ada/role", json={"role": "admin"}).raise_for_status()
        assert revoked[0].result().json() == {"agent_id": "ada", "revoked": True}
        assert hub.hub.gate.effective.roles == {}


@pytest.mark.parametrize("own", [False, True], ids=["by an admin", "by itself"])
def test_b6_a_revocation_takes_away_a_role_that_another_hub_has_given(fleet: HubFleet, own: bool) -> None:
    with fleet.hub() as one, fleet.hub() as two, one.http(ADMIN) as admin, two.http(ADMIN) as elsewhere:
        with one.http(one.register("ada")) as ada:
            one.hub.gate._log._follower._on_change = lambda _everything: None  # type: ignore[attr-defined]
            elsewhere.put("/api/admin/agents/ada/role", json={"role": "admin"}).raise_for_status()
            assert one.hub.gate.role_of("ada") == ""
            answer = ada.post("/api/onboard/revoke") if own else admin.delete("/api/admin/agents/ada/token")
        assert answer.json() == {"agent_id": "ada", "revoked": True}
        assert one.hub.gate.effective.roles == {}
        wait_for(lambda: not two.hub.gate.effective.roles, "the end of the role on the other hub")


@pytest.mark.parametrize("own", [False, True], ids=["by an admin", "by itself"])
def test_b6_a_revocation_is_followed_by_another_look_at_the_role(monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    with hub_server() as hub, hub.http(ADMIN) as admin, hub.http(hub.register("ada")) as ada:
        revoke = hub.hub.registry.revoke

        async def beside_a_role(*arguments: Any) -> bool:
            hub.hub.gate.set_role("ada", "admin")  # as if another hub gave it
            return await revoke(*arguments)

        monkeypatch.setattr(hub.hub.registry, "revoke", beside_a_role)
        answer = ada.post("/api/onboard/revoke") if own else admin.delete("/api/admin/agents/ada/token")
        assert answer.json() == {"agent_id": "ada", "revoked": True}
        assert hub.hub.gate.effective.roles == {}


def test_b6_a_new_token_after_a_revocation_has_no_role_that_is_left() -> None:
    with hub_server() as hub, hub.http(ADMIN) as admin:
        add_operator(admin, "ada")
        hub.run(hub.hub.registry.revoke("ada"))  # as if another hub gave the role after that
        with hub.http(admin.post("/api/admin/agents/ada/token").json()["token"]) as ada:
            assert status_and_error(ada.get(ADMINS)) == (403, "forbidden")
        assert hub.hub.gate.effective.roles == {}


# Waiting for another admin --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["role", "token", "block"])
def test_b6_an_admin_who_waits_for_another_is_looked_at_again(lost: str) -> None:
    with hub_server() as hub, operators(hub, "ada", "eve") as (_, eve), ThreadPoolExecutor(1) as pool:
        lock, body = hub.hub.operators._changing, {"name": "mallory", "role": "admin"}
        hub.run(lock.acquire())
        answer = pool.submit(eve.post, ADMINS, json=body)
        wait_for(lambda: lock._waiters, "that the request has passed all other checks")
        if lost == "role":
            hub.hub.gate.set_role("eve", None)
        elif lost == "block":
            hub.hub.gate.block("eve")
        else:
            hub.run(hub.hub.registry.revoke("eve"))
        hub.call(lock.release)
        assert status_and_error(answer.result()) == ((401, "unauthorized") if lost == "token" else (403, "forbidden"))
        assert hub.run(hub.hub.registry.find("mallory")) is None


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("DELETE", "/api/admin/agents/eve/block", None),
        ("PUT", "/api/admin/agents/planner/block", {}),
        ("POST", "/api/admin/agents/eve/token", None),
        ("DELETE", "/api/admin/agents/planner/token", None),
        ("POST", "/api/admin/agents", {"agent_id": "mallory"}),
        ("POST", "/api/onboard/register", {"agent_id": "mallory"}),
        ("POST", "/api/admin/invitations", None),
    ],
    ids=["unblock", "block", "rotate", "revoke", "register", "onboard", "invite"],
)
def test_b6_an_admin_who_is_blocked_while_it_waits_changes_nothing(method: str, path: str, body: Any) -> None:
    with hub_server() as hub, operators(hub, "eve") as (eve,), ThreadPoolExecutor(1) as pool:
        hub.register("planner")
        lock = hub.hub.operators._changing
        hub.run(lock.acquire())
        answer = pool.submit(eve.request, method, path, json=body)
        wait_for(lambda: lock._waiters or answer.done(), "that the request has passed all other checks")
        hub.hub.gate.block("eve")
        hub.call(lock.release)
        assert status_and_error(answer.result()) == (403, "forbidden")
        assert list(hub.hub.gate.effective.blocks) == ["eve"]
        assert hub.run(hub.hub.registry.knows("planner"))
        assert hub.run(hub.hub.registry.find("mallory")) is None


def test_b6_a_role_that_ends_while_a_token_is_looked_up_again_ends_for_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with hub_server() as hub, hub.http(ADMIN) as admin:
        token, owner = add_operator(admin, "eve"), hub.hub.registry.owner
        with hub.unfinished_post(token, "/api/admin/tasks", {"payload": 1}) as request:

            async def slow(token: str) -> str | None:
                found = await owner(token)
                hub.hub.gate.set_role("eve", None)
                return found

            monkeypatch.setattr(hub.hub.registry, "owner", slow)
            hub.hub.registry.revocations += 1
            assert request.finish() == 403
