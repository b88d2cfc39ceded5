"""The decision service for holds: programs in any language reserve on their accounts, and settle."""

import json
import re
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from headgate import Policy
from headgate.gate.account_holds import AccountHold
from headgate.hub.api import hold_routes
from tests.support.tenant import ACCOUNTS, AGENTS, Tenant, hold, open_tenant, read_refusal
from tests.support.valkey import PATIENCE, wait_for


def test_a_denied_hold_has_the_address_of_the_agent_that_asked(tenant: Tenant) -> None:
    def addresses(agent: str) -> list[str]:
        return [one["address"] for one in tenant.admin.get(f"/api/admin/agents/{agent}").json()["denials"]]

    for more in ({}, {"timeout": 0.01}):
        assert tenant.planner.post("/v1/holds", json={"costs": {"usd": "6"}, **more}).status_code == 429
    assert addresses("planner") == ["127.0.0.1", "127.0.0.1"]
    denied = tenant.admin.post("/v1/holds", json={"costs": {"usd": "6"}, "agent": "writer"})
    assert denied.status_code == 429
    assert not tenant.hub.hub.gate.hold("writer", {"usd": "6"})
    assert addresses("writer") == ["", ""], "an admin's address isn't the agent's"


@pytest.mark.parametrize("number", ["1e400", "1e-400", "0." + "0" * 400 + "1"])
def test_a_number_beyond_all_doubles_is_refused_not_rounded(tenant: Tenant, number: str) -> None:
    held = hold(tenant.planner, {"usd": "0.5"}, id="one")
    for path, field in (
        ("", "costs"), ("/one/settle", "costs"), ("/one/extend", "total"), ("/one/extend", "costs"),
    ):  # fmt: skip
        answer = tenant.planner.post(f"/v1/holds{path}", content=f'{{"{field}": {{"usd": {number}}}}}')
        expected = f"body: Number out of range - at `$.{field}[...]`; expected 0, or a number whose size is from"
        assert read_refusal(answer) == (400, "invalid", f"{expected} 5e-324 to 1.7e308")
    answer = tenant.planner.post("/v1/holds/one/extend", content=f'{{"lease": {number}}}')
    assert (answer.status_code, answer.json()["detail"][:37]) == (400, "body: Number out of range - at `$.lea")
    assert tenant.planner.get("/v1/holds/one").json() == held


# The verbs ------------------------------------------------------------------------------------------------------------


def test_a_hold_reserves_on_all_accounts_and_is_settled_with_what_was_used(tenant: Tenant) -> None:
    held = hold(tenant.planner, {"tokens": 800, "usd": "0.5"}, session="run-1", tool="web", id="one")
    assert held == {
        "id": "one",
        "agent": "planner",
        "account": "acme/search/planner",
        "session": "run-1",
        "tool": "web",
        "state": "open",
        "costs": {"requests": "1", "tokens": "800", "usd": "0.500000"},
        "lease_left": 60.0,
        "outcome": "allow",
        "bound": {"account": "acme/search/planner", "resource": "tokens", "tool": ""},
        "degraded": False,
    }
    assert tenant.left("acme") == {"usd": "9.500000"}
    assert tenant.left("acme/search/planner") == {"slots": "2", "tokens": "200"}
    assert tenant.left("acme/search/planner/run-1") == {"usd": "1.500000"}
    tenant.hub.clock.advance(10)
    assert tenant.planner.get("/v1/holds/one").json()["lease_left"] == 50.0
    settled = tenant.planner.post("/v1/holds/one/settle", json={"costs": {"usd": 0.0312}})
    assert settled.status_code == 200
    assert (settled.json()["state"], settled.json()["lease_left"]) == ("settled", 0.0)
    assert settled.json()["costs"] == {"requests": "1", "tokens": "800", "usd": "0.031200"}
    assert tenant.planner.get("/v1/holds/one").json()["state"] == "settled"
    assert tenant.left("acme") == {"usd": "9.968800"}
    assert tenant.left("acme/search") == {"usd": "4.968800"}


def test_settling_without_a_body_counts_what_is_reserved_and_may_be_repeated(tenant: Tenant) -> None:
    held = hold(tenant.planner, {"usd": "1"})
    for _ in range(2):
        assert tenant.planner.post(f"/v1/holds/{held['id']}/settle").json()["costs"]["usd"] == "1.000000"
    again = tenant.planner.post(f"/v1/holds/{held['id']}/settle", json={"costs": {"usd": "0.9"}})
    assert read_refusal(again)[:2] == (409, "hold_error")
    assert tenant.left("acme") == {"usd": "9.000000"}


def test_the_same_id_is_the_same_hold(tenant: Tenant) -> None:
    for _ in range(3):
        assert hold(tenant.planner, {"usd": "1"}, id="a:1.b~c_d-e")["state"] == "open"
    assert tenant.left("acme") == {"usd": "9.000000"}
    other = tenant.planner.post("/v1/holds", json={"costs": {"usd": "2"}, "id": "a:1.b~c_d-e"})
    assert read_refusal(other)[:2] == (409, "hold_error")
    assert hold(tenant.writer, {"usd": "1"}, id="a:1.b~c_d-e")["agent"] == "writer"  # ids are an agent's own


def test_cancelling_gives_back_everything(tenant: Tenant) -> None:
    held = hold(tenant.planner, {"usd": "1", "tokens": 100})
    for _ in range(2):
        assert tenant.planner.post(f"/v1/holds/{held['id']}/cancel").json()["state"] == "cancelled"
    assert tenant.left("acme") == {"usd": "10.000000"}
    assert tenant.left("acme/search/planner") == {"slots": "3", "tokens": "1000"}


def test_extending_reserves_more_and_lengthens_the_lease(tenant: Tenant) -> None:
    held = hold(tenant.planner, {"usd": "1"}, lease=10)
    path = f"/v1/holds/{held['id']}/extend"
    assert tenant.planner.post(path, json={"costs": {"usd": "0.5"}, "lease": 100}).json()["costs"]["usd"] == "1.500000"
    for _ in range(2):  # the total can be repeated after a lost answer
        more = tenant.planner.post(path, json={"total": {"usd": "2.25"}}).json()
        assert (more["costs"]["usd"], more["lease_left"]) == ("2.250000", 100.0)
    assert tenant.planner.post(path, json={"total": {"usd": 1}}).json()["costs"]["usd"] == "2.250000"
    assert tenant.planner.post(path, json={"total": {"tokens": 7}}).json()["costs"]["tokens"] == "7"
    denied = tenant.planner.post(path, json={"costs": {"usd": "2.750001"}, "lease": 500})
    assert denied.status_code == 429
    assert {name: denied.json()[name] for name in ("account", "resource")} == {
        "account": "acme/search",
        "resource": "usd",
    }
    assert tenant.planner.get(f"/v1/holds/{held['id']}").json()["lease_left"] == 100.0  # a denial changes nothing
    assert tenant.left("acme") == {"usd": "7.750000"}


def test_a_lease_that_is_set_to_0_ends_the_hold_and_keeps_the_cost(tenant: Tenant) -> None:
    held = hold(tenant.planner, {"usd": "1"})
    for _ in range(2):
        ended = tenant.planner.post(f"/v1/holds/{held['id']}/extend", json={"lease": 0})
        assert (ended.status_code, ended.json()["state"]) == (200, "expired")
    assert tenant.left("acme/search/planner")["slots"] == "3"
    assert tenant.left("acme") == {"usd": "9.000000"}
    late = tenant.planner.post(f"/v1/holds/{held['id']}/settle", json={"costs": {"usd": "0.25"}})
    assert late.json()["state"] == "settled"
    assert tenant.left("acme") == {"usd": "9.750000"}


def test_nobody_renews_a_lease(tenant: Tenant) -> None:
    held = hold(tenant.planner, {"usd": "1"}, lease=5)
    tenant.hub.clock.advance(5)
    assert tenant.planner.get(f"/v1/holds/{held['id']}").json()["state"] == "expired"
    assert tenant.left("acme/search/planner")["slots"] == "3"
    assert read_refusal(tenant.planner.post(f"/v1/holds/{held['id']}/extend", json={"lease": 5}))[:2] == (
        409,
        "hold_error",
    )


# Denials --------------------------------------------------------------------------------------------------------------


def test_a_denial_is_a_429_that_says_what_bound(tenant: Tenant) -> None:
    hold(tenant.writer, {"usd": "4.5"})
    answer = tenant.planner.post("/v1/holds", json={"costs": {"usd": "0.6"}, "session": 7})
    assert (answer.status_code, answer.headers["content-type"]) == (429, "application/problem+json")
    found = answer.json()
    wait = int(answer.headers["retry-after"])
    assert 1 <= wait <= 86_400
    assert found["retry_after_ms"] == wait * 1000
    assert {name: found[name] for name in ("error", "status", "account", "resource", "tool", "tier")} == {
        "error": "rate_limited",
        "status": 429,
        "account": "acme/search",
        "resource": "usd",
        "tool": "",
        "tier": "usd",
    }
    long = r"\d+ (s|minutes|hours( \d+ minutes?)?)"
    assert re.fullmatch(rf"not enough usd left in acme/search; try again in {long}", found["detail"])
    assert found["violated-policies"] == ["5 usd/calendar day (usd of acme/search)"]
    assert tenant.left("acme") == {"usd": "5.500000"}
    assert tenant.left("acme/search/planner") == {"slots": "3", "tokens": "1000"}


def test_a_denial_that_no_wait_helps_says_so(tenant: Tenant) -> None:
    answer = tenant.planner.post("/v1/holds", json={"costs": {"tokens": 1001}})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    expected = "not enough tokens left in acme/search/planner: no wait would help, only a lower cost or a higher limit"
    assert answer.json()["detail"] == expected
    assert answer.json()["no_wait_helps"] is True
    assert answer.headers["x-should-retry"] == "false"


def test_a_full_slot_is_worth_a_retry_in_a_second(tenant: Tenant) -> None:
    for _ in range(3):
        hold(tenant.planner, {})
    answer = tenant.planner.post("/v1/holds", json={})
    assert (answer.status_code, answer.headers["retry-after"], answer.json()["resource"]) == (429, "1", "slots")
    assert "no_wait_helps" not in answer.json()
    assert "x-should-retry" not in answer.headers


class WaitingHold:
    """A hold of the planner that waits for one of its slots, which all are taken."""

    def __init__(self, tenant: Tenant, answer: Future[httpx.Response], taken: str) -> None:
        self._tenant, self._answer, self._taken = tenant, answer, taken

    def free_slot(self) -> None:
        settled = self._tenant.admin.post(f"/v1/holds/{self._taken}/settle", params={"agent": "planner"})
        assert settled.status_code == 200

    def answer(self) -> httpx.Response:
        return self._answer.result(PATIENCE)


@contextmanager
def waiting_hold(tenant: Tenant, **more: Any) -> Iterator[WaitingHold]:
    taken = [hold(tenant.planner, {})["id"] for _ in range(3)]
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(tenant.planner.post, "/v1/holds", json={"timeout": 30, **more})
        wait_for(lambda: tenant.hub.hub.gate._hold_queues.queues, "the hold to wait")
        yield WaitingHold(tenant, answer, taken[0])


def test_a_hold_waits_for_its_turn_if_it_is_told_to(tenant: Tenant) -> None:
    with waiting_hold(tenant, id="waited") as waiting:
        assert tenant.admin.get("/v1/holds/waited?agent=planner").status_code == 404
        waiting.free_slot()
        assert waiting.answer().status_code == 201


def test_a_caller_that_hangs_up_leaves_the_line_and_takes_nothing(tenant: Tenant) -> None:
    held = [hold(tenant.planner, {})["id"] for _ in range(3)]
    queues, body = tenant.hub.hub.gate._hold_queues, json.dumps({"timeout": 30, "lease": 600})
    token = tenant.planner.headers["Authorization"]
    host, port = str(tenant.hub).split(":")
    for _ in range(3):
        with socket.create_connection((host, int(port)), PATIENCE) as connection:
            head = f"POST /v1/holds HTTP/1.1\r\nHost: {host}\r\nAuthorization: {token}\r\nContent-Length: {len(body)}"
            connection.sendall(f"{head}\r\n\r\n{body}".encode())
            wait_for(lambda: queues.queues, "the hold to wait")
        wait_for(lambda: not queues.queues, "it to leave the line")
    query = {"agent": "planner"}
    assert tenant.admin.post(f"/v1/holds/{held[0]}/settle", params=query).status_code == 200
    assert tenant.left("acme/search/planner")["slots"] == "1"


def test_a_token_that_is_revoked_while_its_hold_waits_gets_nothing(tenant: Tenant) -> None:
    with waiting_hold(tenant, id="waited") as waiting:
        assert tenant.admin.delete("/api/admin/agents/planner/token").status_code == 200
        assert waiting.answer().status_code == 401
    assert not tenant.hub.hub.gate._hold_queues.queues
    waiting.free_slot()
    assert tenant.admin.get("/v1/holds/waited?agent=planner").status_code == 404


@pytest.mark.parametrize("given", [{"id": "waited"}, {}], ids=["own id", "no id"])
def test_a_hold_that_is_granted_after_its_token_was_revoked_is_given_back(
    tenant: Tenant, monkeypatch: pytest.MonkeyPatch, given: dict[str, str]
) -> None:
    monkeypatch.setattr(hold_routes, "_LOOK_AGAIN", 3600)  # it is granted before the hub looks
    with waiting_hold(tenant, **given) as waiting:
        assert tenant.admin.delete("/api/admin/agents/planner/token").status_code == 200
        waiting.free_slot()
        assert waiting.answer().status_code == 401
    assert tenant.left("acme/search/planner")["slots"] == "1"


def test_an_older_hold_that_is_asked_for_again_after_a_revocation_stays(
    tenant: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = tenant.hub.hub
    ahold = hub.gate.ahold

    async def after_a_revocation(*costs: Any, **more: Any) -> AccountHold:
        await hub.registry.revoke("planner")
        return await ahold(*costs, **more)

    held = hold(tenant.planner, {"usd": "1"}, id="older")
    monkeypatch.setattr(hub.gate, "ahold", after_a_revocation)
    again = tenant.planner.post("/v1/holds", json={"costs": {"usd": "1"}, "id": "older", "timeout": 30})
    assert read_refusal(again)[:2] == (401, "unauthorized")
    assert tenant.admin.get("/v1/holds/older?agent=planner").json() == held


def test_the_store_is_asked_once_for_a_hold_that_waits_after_a_revocation(
    tenant: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, calls = tenant.hub.hub, Counter[str]()

    def count(part: object, name: str) -> None:
        method = getattr(part, name)
        monkeypatch.setattr(part, name, lambda *given: (calls.update([name]), method(*given))[1])

    with waiting_hold(tenant) as waiting:
        assert tenant.admin.delete("/api/admin/agents/stranger/token").status_code == 200
        count(hub.operators, "present")
        count(hub.registry, "owner")
        wait_for(lambda: calls["present"] >= 3, "it to be admitted again and again")
        assert calls["owner"] <= 1
        waiting.free_slot()
        assert waiting.answer().status_code == 201


def test_a_hub_that_stops_answers_those_who_wait(tenant: Tenant) -> None:
    with waiting_hold(tenant) as waiting:
        tenant.hub.hub.health.stopping = True
        assert read_refusal(waiting.answer())[:2] == (503, "stopping")


def test_exempt_agents_are_counted_and_never_denied() -> None:
    policy = Policy(accounts=ACCOUNTS, agents=AGENTS, exempt=["planner"])
    with open_tenant(policy) as tenant:
        held = hold(tenant.planner, {"usd": "50"})
        assert held["outcome"] == "exempt"
        more = tenant.planner.post(f"/v1/holds/{held['id']}/extend", json={"costs": {"usd": "50"}})
        assert (more.status_code, more.json()["costs"]["usd"]) == (200, "100.000000")


def test_the_programs_own_requests_are_limited_and_settling_is_apart_from_holding() -> None:
    policy = Policy(limits={"normal": "2/minute", "light": "2/minute"}, accounts=ACCOUNTS, agents=AGENTS)
    with open_tenant(policy) as tenant:
        held = [hold(tenant.planner, {"usd": "1"})["id"] for _ in range(2)]
        denied = tenant.planner.post("/v1/holds", json={"costs": {"usd": "1"}})
        assert (denied.status_code, denied.json()["tier"]) == (429, "normal")
        assert "account" not in denied.json()
        for one, verb in zip(held, ("settle", "cancel"), strict=True):
            assert tenant.planner.post(f"/v1/holds/{one}/{verb}").status_code == 200
        assert tenant.left("acme") == {"usd": "9.000000"}
