"""The decision service for holds: programs in any language reserve on their accounts, and settle."""

import asyncio
import json
import re
import socket
import sqlite3
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import httpx
import pytest

from headgate import Gate, ManualClock, Policy, RedisStore
from headgate.gate.account_holds import AccountHold
from headgate.hub.api import hold_routes
from headgate.hub.app import Hub
from tests.support.hub import ADMIN, HubServer, hub_server, hub_settings
from tests.support.hub_process import HubProcess, hub_process
from tests.support.valkey import PATIENCE, ValkeyServer, wait_for

ACCOUNTS: dict[str, Any] = {
    "default": {"agent": {"tokens": "1000/minute", "slots": "3 in flight"}, "session": {"usd": "2 in all"}},
    "tools": ["web"],
    "max_lease": 600,
    "at": {
        "acme": {"usd": "10/calendar month"},
        "acme/search": {"usd": "5/calendar day"},
        "acme/ops": {"usd": "9 in all"},
    },
}
AGENTS: dict[str, Any] = {
    "planner": {"account": "acme/search"},
    "writer": {"account": "acme/search"},
    "cook": {"account": "acme/ops"},
}
POLICY = Policy(limits={"light": "100000/minute", "normal": "100000/minute"}, accounts=ACCOUNTS, agents=AGENTS)


class Tenant:
    """Agents of a hub of their own, and an admin."""

    def __init__(self, hub: HubServer) -> None:
        self.hub = hub
        self.admin = hub.http(ADMIN)
        names = ("planner", "writer", "cook", "stranger")
        self.planner, self.writer, self.cook, self.stranger = [hub.http(hub.register(name)) for name in names]

    def left(self, path: str) -> dict[str, str]:
        answer = self.admin.get(f"/v1/accounts/{quote(path, safe='')}")
        assert answer.status_code == 200, answer.text
        return {limit["resource"]: limit["left"] for limit in answer.json()["limits"]}

    def close(self) -> None:
        for client in (self.admin, self.planner, self.writer, self.cook, self.stranger):
            client.close()


@contextmanager
def tenant_of(policy: Policy = POLICY, **more: Any) -> Iterator[Tenant]:
    with hub_server(policy, **more) as hub:
        tenant = Tenant(hub)
        try:
            yield tenant
        finally:
            tenant.close()


@pytest.fixture
def tenant() -> Iterator[Tenant]:
    with tenant_of() as tenant:
        yield tenant


def hold(client: httpx.Client, costs: dict[str, Any], **more: Any) -> dict[str, Any]:
    answer = client.post("/v1/holds", json={"costs": costs, **more})
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


def refused(answer: httpx.Response) -> tuple[int, str, str]:
    found = answer.json()
    return answer.status_code, found["error"], found["detail"]


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
    assert refused(again)[:2] == (409, "hold_error")
    assert tenant.left("acme") == {"usd": "9.000000"}


def test_the_same_id_is_the_same_hold(tenant: Tenant) -> None:
    for _ in range(3):
        assert hold(tenant.planner, {"usd": "1"}, id="a:1.b~c_d-e")["state"] == "open"
    assert tenant.left("acme") == {"usd": "9.000000"}
    other = tenant.planner.post("/v1/holds", json={"costs": {"usd": "2"}, "id": "a:1.b~c_d-e"})
    assert refused(other)[:2] == (409, "hold_error")
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
    assert refused(tenant.planner.post(f"/v1/holds/{held['id']}/extend", json={"lease": 5}))[:2] == (409, "hold_error")


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
    assert re.fullmatch(r"not enough usd left in acme/search; try again in \d+ (s|minutes|hours)", found["detail"])
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
    assert refused(again)[:2] == (401, "unauthorized")
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
        assert refused(waiting.answer())[:2] == (503, "stopping")


def test_exempt_agents_are_counted_and_never_denied() -> None:
    policy = Policy(accounts=ACCOUNTS, agents=AGENTS, exempt=["planner"])
    with tenant_of(policy) as tenant:
        held = hold(tenant.planner, {"usd": "50"})
        assert held["outcome"] == "exempt"
        more = tenant.planner.post(f"/v1/holds/{held['id']}/extend", json={"costs": {"usd": "50"}})
        assert (more.status_code, more.json()["costs"]["usd"]) == (200, "100.000000")


def test_the_programs_own_requests_are_limited_and_settling_is_apart_from_holding() -> None:
    policy = Policy(limits={"normal": "2/minute", "light": "2/minute"}, accounts=ACCOUNTS, agents=AGENTS)
    with tenant_of(policy) as tenant:
        held = [hold(tenant.planner, {"usd": "1"})["id"] for _ in range(2)]
        denied = tenant.planner.post("/v1/holds", json={"costs": {"usd": "1"}})
        assert (denied.status_code, denied.json()["tier"]) == (429, "normal")
        assert "account" not in denied.json()
        for one, verb in zip(held, ("settle", "cancel"), strict=True):
            assert tenant.planner.post(f"/v1/holds/{one}/{verb}").status_code == 200
        assert tenant.left("acme") == {"usd": "9.000000"}


# Who may do what ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["writer", "cook", "stranger"])
def test_another_agents_hold_is_unknown(tenant: Tenant, other: str) -> None:
    held = hold(tenant.planner, {"usd": "1"}, id="mine")
    client: httpx.Client = getattr(tenant, other)
    expected = refused(client.get("/v1/holds/mine-not"))
    assert expected[:2] == (404, "unknown_hold")
    calls = [client.get("/v1/holds/mine"), client.post("/v1/holds/mine/settle", json={"costs": {"usd": "0"}})]
    calls += [client.post("/v1/holds/mine/extend", json={"lease": 0}), client.post("/v1/holds/mine/cancel")]
    for answer in calls:
        assert refused(answer) == (404, "unknown_hold", expected[2].replace("mine-not", "mine"))
    assert tenant.planner.get("/v1/holds/mine").json() == held


def test_an_agent_acts_for_itself_alone(tenant: Tenant) -> None:
    hold(tenant.planner, {"usd": "1"}, id="mine")
    forbidden = (403, "forbidden", "agent: only an admin may act for another agent")
    assert refused(tenant.writer.post("/v1/holds", json={"costs": {"usd": 1}, "agent": "planner"})) == forbidden
    for method, path in [("GET", ""), ("POST", "/settle"), ("POST", "/cancel")]:
        assert refused(tenant.writer.request(method, f"/v1/holds/mine{path}?agent=planner")) == forbidden
    assert hold(tenant.writer, {"usd": 1}, agent="writer")["agent"] == "writer"
    assert tenant.left("acme") == {"usd": "8.000000"}


def test_an_admin_acts_for_any_agent_and_has_to_name_it(tenant: Tenant) -> None:
    nobody = (400, "invalid", "agent: expected the agent to act for, got none; an admin has to name it")
    assert refused(tenant.admin.post("/v1/holds", json={"costs": {"usd": 1}})) == nobody
    assert refused(tenant.admin.get("/v1/holds/x")) == nobody
    held = hold(tenant.admin, {"usd": 1}, agent="planner", id="for-planner")
    assert held["account"] == "acme/search/planner"
    assert tenant.planner.get("/v1/holds/for-planner").json()["state"] == "open"
    query = {"agent": "planner"}
    assert tenant.admin.get("/v1/holds/for-planner", params=query).json()["state"] == "open"
    assert tenant.admin.post("/v1/holds/for-planner/extend", params=query, json={"lease": 90}).status_code == 200
    assert tenant.admin.post("/v1/holds/for-planner/settle", params=query).json()["state"] == "settled"
    assert refused(tenant.admin.get("/v1/holds/for-planner", params={"agent": "writer"}))[:2] == (404, "unknown_hold")


def test_an_agent_sees_the_accounts_on_its_path_and_no_other(tenant: Tenant) -> None:
    def status(client: httpx.Client, path: str) -> int:
        return client.get(f"/v1/accounts/{quote(path, safe='')}").status_code

    own = ["acme", "acme/search", "acme/search/planner", "acme/search/planner/run-1"]
    assert [status(tenant.planner, path) for path in own] == [200] * 4
    others = [
        "acme/ops", "acme/search/writer", "acme/search/writer/run-1", "acme/ops/cook", "acme/searc", "acme/search/plan",
        "other", "other/search", "acm", "acme/", "/acme", "-", "-/-", "-/-/stranger", "planner", "acme/search/planner2",
        "acme%2Fsearch", "ACME", "acme/search/planner\0", "acme//planner", "..", "acme/-/planner",
    ]  # fmt: skip
    unknown = (404, "unknown_account", "there is no such account, or it is none of yours")
    for path in others:
        answer = tenant.planner.get(f"/v1/accounts/{quote(path, safe='')}".replace("..", "%2e%2e"))
        if path != "..":
            assert refused(answer) == unknown, path
        assert answer.status_code == 404
    assert [status(tenant.stranger, path) for path in (*own, "-", "-/-", "-/-/planner")] == [404] * 7
    assert status(tenant.stranger, "-/-/stranger") == 200
    assert [status(tenant.admin, path) for path in (*own, "acme/ops", "-/-/stranger", "unheard/of")] == [200] * 7
    assert refused(tenant.planner.get("/v1/accounts/acme%2Fsearch%2Fplanner%2Fa%2Fb"))[:2] == (400, "invalid")
    assert refused(tenant.admin.get("/v1/accounts/a%2Fb%2Fc%2Fd%2Fe"))[:2] == (400, "invalid")


def test_an_account_lists_holds_of_the_callers_own(tenant: Tenant) -> None:
    hold(tenant.planner, {"usd": "1"}, id="mine", session="s")
    hold(tenant.writer, {"usd": "1"}, id="other")

    def listed(client: httpx.Client, path: str, count: int) -> list[str]:
        answer = client.get(f"/v1/accounts/{quote(path, safe='')}", params={"holds": count})
        assert answer.status_code == 200, answer.text
        return sorted(one["id"] for one in answer.json()["holds"])

    assert listed(tenant.planner, "acme", 100) == listed(tenant.planner, "acme/search/planner/s", 100) == ["mine"]
    assert listed(tenant.planner, "acme/search/planner/other", 100) == []
    assert listed(tenant.admin, "acme", 100) == ["mine", "other"]
    assert len(listed(tenant.admin, "acme", 1)) == 1
    assert listed(tenant.admin, "acme", 0) == []
    too_many = tenant.admin.get("/v1/accounts/acme", params={"holds": 101})
    assert refused(too_many) == (400, "invalid", "query: Expected `int` <= 100 - at `$.holds`")


def test_what_was_spent_is_rounded_up_where_it_has_too_many_decimals(tenant: Tenant) -> None:
    held = hold(tenant.planner, {"usd": "1"})
    settled = tenant.planner.post(f"/v1/holds/{held['id']}/settle", json={"costs": {"usd": "0.30000000000000004"}})
    assert (settled.status_code, settled.json()["costs"]["usd"]) == (200, "0.300001")


def test_the_status_of_an_account_adds_up(tenant: Tenant) -> None:
    first = hold(tenant.planner, {"usd": "1"})
    hold(tenant.writer, {"usd": "2"})
    tenant.planner.post(f"/v1/holds/{first['id']}/settle", json={"costs": {"usd": "0.25"}})
    found = tenant.planner.get("/v1/accounts/acme").json()
    (usd,) = found["limits"]
    assert (found["path"], found["level"], found["plan"], found["holds"]) == ("acme", "org", "", [])
    expected = {"amount": "10", "spent": "0.250000", "held": "2.000000", "left": "7.750000", "tool": ""}
    assert {name: usd[name] for name in expected} == expected
    assert Decimal(usd["spent"]) + Decimal(usd["held"]) + Decimal(usd["left"]) == Decimal(usd["amount"])
    assert 0 < usd["resets_after"] <= 31 * 86_400


# Errors charge nothing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ({"costs": {"usd": -1}}, 'body: Expected `int` >= 0 - at `$.costs`, "usd"'),
        ({"costs": {"tokens": 1, "usd": -1}}, 'body: Expected `int` >= 0 - at `$.costs`, "usd"'),
        (
            {"tokens": 1},
            "body: Object contains unknown field `tokens`; the fields are costs, agent, session, tool, lease, ",
        ),
        ({"costs": {"usd": "-1"}}, "body: Expected a number of 0 or more, such as '0.0312' - at `$.costs`, \"usd\""),
        ({"costs": {"usd": "1e3"}}, "body: Expected a number of 0 or more, such as '0.0312' - at `$.costs`, \"usd\""),
        ({"costs": {"usd": "NaN"}}, "body: Expected a number of 0 or more, such as '0.0312' - at `$.costs`, \"usd\""),
        ({"costs": {"usd": " 1"}}, "body: Expected a number of 0 or more, such as '0.0312' - at `$.costs`, \"usd\""),
        ({"costs": {"usd": "1\n"}}, "body: Expected a number of 0 or more, such as '0.0312' - at `$.costs`, \"usd\""),
        ({"costs": {"usd": True}}, "body: Expected `int | float | str`, got `bool`"),
        ({"costs": {"usd": None}}, "body: Expected `int | float | str`, got `null`"),
        ({"costs": {"usd": 2**53}}, "body: Expected `int` <= 9007199254740991"),
        ({"costs": {"usd": "0.0000001"}}, "cost of usd: expected a number with at most 6 decimals"),
        ({"costs": {"usd": 0.0000001}}, "cost of usd: expected a number with at most 6 decimals"),
        (
            {"costs": {"usd": 0.1 + 0.2}},
            "costs.usd: expected a text such as '0.0312', or a number of at most 15 digits",
        ),
        ({"costs": {"usd": "9999999999999999999999"}}, "cost of usd: expected at most"),
        ({"costs": {"tokens": 1.5}}, "cost of tokens: expected a whole number of at least 0, got '1.5'"),
        ({"costs": {"tokens": "1.5"}}, "cost of tokens: expected a whole number of at least 0, got '1.5'"),
        ({"costs": {"coins": 1}}, "cost: expected one of"),
        ({"costs": {f"r{n}": 1 for n in range(65)}}, "body: Expected `object` of length <= 64"),
        ({"costs": []}, "body: Expected `object`, got `array`"),
        ({"costs": {"usd": 1}, "tool": "shell"}, "tool: expected a tool that the policy names (web), got 'shell'"),
        ({"costs": {"usd": 1}, "session": ""}, "body: Expected `str` of length >= 1"),
        ({"costs": {"usd": 1}, "session": "a\nb"}, "session: expected 1 to 128 printable characters"),
        ({"costs": {"usd": 1}, "lease": 601}, "hold lease: expected at most 600 seconds (accounts.max_lease), got 601"),
        ({"costs": {"usd": 1}, "lease": 0}, "hold lease: expected 0.001 to 604800 seconds"),
        ({"costs": {"usd": 1}, "lease": -1}, "body: Expected `float` >= 0.0"),
        ({"costs": {"usd": 1}, "timeout": 31}, "body: Expected `float` <= 30.0"),
        ({"costs": {"usd": 1}, "timeout": None}, "body: Expected `float`, got `null`"),
        (
            {"costs": {"usd": 1}, "id": ".."},
            "body: Expected letters, digits, and - _ ~ : . but no dot first - at `$.id`",
        ),
        (
            {"costs": {"usd": 1}, "id": "a/b"},
            "body: Expected letters, digits, and - _ ~ : . but no dot first - at `$.id`",
        ),
        ({"costs": {"usd": 1}, "id": "x" * 201}, "body: Expected `str` of length <= 200"),
        ({"costs": {"usd": 1}, "cost": 1}, "body: Object contains unknown field `cost`"),
        ([], "body: Expected `object`, got `array`"),
    ],
)
def test_an_invalid_hold_charges_nothing(tenant: Tenant, body: Any, detail: str) -> None:
    answer = tenant.planner.post("/v1/holds", content=json.dumps(body))
    assert refused(answer)[:2] == (400, "invalid")
    assert answer.json()["detail"].startswith(detail), answer.json()["detail"]
    assert tenant.left("acme") == {"usd": "10.000000"}
    assert tenant.left("acme/search/planner") == {"slots": "3", "tokens": "1000"}


@pytest.mark.parametrize(
    ("verb", "body", "status"),
    [
        ("settle", {"costs": {"usd": 0.1 + 0.2}}, 400),
        ("settle", {"costs": {"tokens": "1.5"}}, 400),
        ("settle", {"costs": {"coins": 1}}, 400),
        ("settle", {"costs": 5}, 400),
        ("settle", {"lease": 5}, 400),
        ("extend", {"costs": {"usd": 0.1 + 0.2}}, 400),
        ("extend", {"costs": {"coins": 1}}, 400),
        ("extend", {"total": {"coins": 1}}, 400),
        ("extend", {"total": {"usd": "0.0000001"}}, 400),
        ("extend", {"costs": {"usd": 1}, "total": {"usd": 1}}, 400),
        ("extend", {"lease": 601}, 400),
        ("extend", {"lease": 0, "costs": {"usd": 1}}, 400),
        ("extend", {"costs": {"usd": "4.1"}}, 429),
        ("extend", None, 400),
    ],
)
def test_a_refused_verb_changes_nothing(tenant: Tenant, verb: str, body: Any, status: int) -> None:
    held = hold(tenant.planner, {"usd": "1"}, id="h")
    before = tenant.left("acme"), tenant.left("acme/search"), tenant.left("acme/search/planner")
    answer = tenant.planner.post(f"/v1/holds/h/{verb}", json=body)
    assert answer.status_code == status, answer.text
    assert tenant.planner.get("/v1/holds/h").json() == held
    assert (tenant.left("acme"), tenant.left("acme/search"), tenant.left("acme/search/planner")) == before


def test_a_body_that_is_too_large_is_refused(tenant: Tenant) -> None:
    body = json.dumps({"costs": {"usd": 1}, "tool": "x" * 70_000})
    assert refused(tenant.planner.post("/v1/holds", content=body))[:2] == (413, "too_large")
    assert tenant.left("acme") == {"usd": "10.000000"}


# Many at once, and a store of its own ---------------------------------------------------------------------------------


async def _twenty(tenant: Tenant) -> list[int]:
    """The statuses of holds that 20 tasks make, 5 each; those that are granted are settled."""
    headers = {"Authorization": tenant.planner.headers["authorization"]}
    base = f"http://{tenant.hub}"
    async with httpx.AsyncClient(base_url=base, headers=headers, timeout=PATIENCE, trust_env=False) as client:

        async def work(task: int) -> list[int]:
            found = []
            for number in range(5):
                name = f"{task}-{number}"
                answer = await client.post("/v1/holds", json={"costs": {"usd": "0.3"}, "id": name})
                found.append(answer.status_code)
                if answer.status_code == 201:
                    done = await client.post(f"/v1/holds/{name}/settle", json={"costs": {"usd": "0.3"}})
                    assert done.status_code == 200
            return found

        results = await asyncio.gather(*[work(task) for task in range(20)])
    return [status for result in results for status in result]


@pytest.mark.parametrize("kind", ["memory", "valkey"])
async def test_twenty_tasks_are_granted_exactly_as_much_as_fits(kind: str, request: pytest.FixtureRequest) -> None:
    accounts = {"at": {"acme/search": {"usd": "5 in all"}}}
    policy = Policy(limits={"normal": "100000/minute", "light": "100000/minute"}, accounts=accounts, agents=AGENTS)
    store = None
    if kind == "valkey":
        server: ValkeyServer = request.getfixturevalue("redis_server")
        prefix = f"test-{uuid4().hex}:"
        store = RedisStore(server.url, prefix=prefix, timeout=PATIENCE, clock=ManualClock(start=1000))
    with tenant_of(policy, store=store) as tenant:
        statuses = await _twenty(tenant)
        assert (statuses.count(201), statuses.count(429), len(statuses)) == (16, 84, 100)  # 16 * 0.3 <= 5 < 17 * 0.3
        assert tenant.left("acme/search") == {"usd": "0.200000"}


def test_a_store_that_is_away_is_a_503() -> None:
    policy = Policy(accounts=ACCOUNTS, agents=AGENTS, store={"on_failure": "closed"})
    with ValkeyServer() as server:
        store = RedisStore(server.url, timeout=PATIENCE, on_failure="closed", clock=ManualClock(start=1000))
        with tenant_of(policy, store=store) as tenant:
            hold(tenant.planner, {"usd": "1"}, id="before")
            server.kill()
            answers = [
                tenant.admin.post("/v1/holds", json={"agent": "planner"}),
                tenant.admin.get("/v1/holds/before?agent=planner"),
                tenant.admin.post("/v1/holds/before/settle?agent=planner"),
                tenant.admin.post("/v1/holds/before/cancel?agent=planner"),
                tenant.admin.get("/v1/accounts/acme"),
            ]
            assert [answer.status_code for answer in answers] == [503] * 5
            assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)


@pytest.mark.parametrize(("on_failure_holds", "granted"), [("closed", False), ("local", True)])
@pytest.mark.parametrize("opens", [Gate, Hub])
async def test_what_holds_do_in_an_outage_is_the_policys_choice(
    opens: type[Gate | Hub], on_failure_holds: str, granted: bool
) -> None:
    policy = Policy(accounts=ACCOUNTS, agents=AGENTS, store={"on_failure_holds": on_failure_holds})
    with ValkeyServer() as server:
        async with (
            Gate(policy, store=server.url) if opens is Gate else Hub(hub_settings(store=server.url), policy) as one
        ):
            gate = one if isinstance(one, Gate) else one.gate
            server.signal(SIGSTOP)
            hold = await gate.ahold("planner", {"usd": "2"})
            server.signal(SIGCONT)
            assert (bool(hold), hold.decision.degraded) == (granted, True)


# A hub that is restarted ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["", "memory://"])
async def test_a_hub_without_a_server_remembers_budgets_and_holds(tmp_path: Path, store: str) -> None:
    settings = hub_settings(data=tmp_path, store=store)
    async with Hub(settings, POLICY) as hub:
        await hub.gate.ahold("planner", {"usd": "3"}, hold_id="open", lease=600)
        await (await hub.gate.ahold("planner", {"usd": "1"})).asettle({"usd": "0.5"})
        assert hub.health.disk == "ok"
    async with Hub(settings, POLICY) as hub:
        hold = await hub.gate.afind_hold("planner", "open")
        assert (hold.state, hold.costs["usd"]) == ("open", Decimal(3))
        await hold.asettle({"usd": "2"})
        today = datetime.now(UTC).date()
        usage = await hub.gate.ausage(today - timedelta(days=1), today, "acme")
        assert sum(one.amount for one in usage if one.resource == "usd") == Decimal("2.5")


def _make_old(data: Path) -> None:
    for file in data.glob("limits.db*"):
        file.unlink()
    with closing(sqlite3.connect(data / "hub.db")) as db:
        db.execute("DROP TABLE invitation_notes")


async def test_the_data_of_an_older_hub_is_used(tmp_path: Path) -> None:
    settings = hub_settings(data=tmp_path, registration="invitation")
    async with Hub(settings, POLICY) as hub:
        token, code = await hub.registry.register("planner", by_admin=True), await hub.registry.invite()
    _make_old(tmp_path)
    async with Hub(settings, POLICY) as hub:
        assert await hub.registry.owner(token) == "planner"
        assert await hub.registry.register("guest", code)
        assert await hub.gate.ahold("planner", {"usd": "3"})


async def test_nothing_is_written_for_plain_buckets(tmp_path: Path) -> None:
    async with Hub(hub_settings(data=tmp_path), POLICY) as hub:
        for _ in range(10):
            await hub.gate.acheck("planner", "http", "light")
        assert not (tmp_path / "limits.db-wal").exists()
        await hub.gate.ahold("planner", {"usd": "3"})
        assert (tmp_path / "limits.db-wal").exists()


# A hub that is killed -------------------------------------------------------------------------------------------------

KILLED = """
[accounts.at.acme]
usd = "10 in all"
[agents.planner]
account = "acme"
"""


def _left(hub: HubProcess) -> str:
    with hub.http() as admin:
        (limit,) = admin.get("/v1/accounts/acme").json()["limits"]
        left: str = limit["left"]
        return left


@pytest.mark.long
def test_what_is_held_survives_kill_9_and_can_be_settled(tmp_path: Path) -> None:
    file, data = tmp_path / "headgate.toml", tmp_path / "data"
    file.write_text(KILLED)
    with hub_process(data, "--config", str(file)) as hub:
        with hub.http() as admin:
            token = admin.post("/api/admin/agents", json={"agent_id": "planner"}).json()["token"]
        with hub.http(token) as planner:
            hold(planner, {"usd": "4"}, id="open", lease=600)
            hold(planner, {"usd": "1"}, id="done")
            assert planner.post("/v1/holds/done/settle", json={"costs": {"usd": "0.5"}}).status_code == 200
        hub.kill()
    with hub_process(data, "--config", str(file)) as hub, hub.http(token) as planner:
        assert _left(hub) == "5.500000"
        assert planner.get("/v1/holds/open").json()["state"] == "open"
        assert planner.post("/v1/holds", json={"costs": {"usd": "5.6"}}).status_code == 429
        assert hold(planner, {"usd": "4"}, id="open", lease=600)["state"] == "open"  # a retry after the lost answer
        assert planner.post("/v1/holds/open/settle", json={"costs": {"usd": "1.25"}}).status_code == 200
        assert _left(hub) == "8.250000"
        hub.kill()
    with hub_process(data, "--config", str(file)) as hub:
        assert _left(hub) == "8.250000"
    assert (data / "limits.db").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "body",
    [
        '{"costs": {"usd": "x"}, "costs": [1]}',
        '{"costs": {"usd": "x"}, "lease": [[[',
        '{"costs": {"usd": "x"}, "costs": {}}',
    ],
)
def test_a_body_that_changes_or_breaks_off_behind_a_mistake_is_refused_like_others(tenant: Tenant, body: str) -> None:
    answer = tenant.planner.post("/v1/holds", content=body)
    assert (answer.status_code, answer.json()["error"]) == (400, "invalid")
