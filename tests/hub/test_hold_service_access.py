"""The decision service for holds: who may do what, and requests that are refused."""

import json
from decimal import Decimal
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.support.tenant import Tenant, hold, read_refusal

# Who may do what ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["writer", "cook", "stranger"])
def test_another_agents_hold_is_unknown(tenant: Tenant, other: str) -> None:
    held = hold(tenant.planner, {"usd": "1"}, id="mine")
    client: httpx.Client = getattr(tenant, other)
    expected = read_refusal(client.get("/v1/holds/mine-not"))
    assert expected[:2] == (404, "unknown_hold")
    calls = [client.get("/v1/holds/mine"), client.post("/v1/holds/mine/settle", json={"costs": {"usd": "0"}})]
    calls += [client.post("/v1/holds/mine/extend", json={"lease": 0}), client.post("/v1/holds/mine/cancel")]
    for answer in calls:
        assert read_refusal(answer) == (404, "unknown_hold", expected[2].replace("mine-not", "mine"))
    assert tenant.planner.get("/v1/holds/mine").json() == held


def test_an_agent_acts_for_itself_alone(tenant: Tenant) -> None:
    hold(tenant.planner, {"usd": "1"}, id="mine")
    forbidden = (403, "forbidden", "agent: only an admin may act for another agent")
    assert read_refusal(tenant.writer.post("/v1/holds", json={"costs": {"usd": 1}, "agent": "planner"})) == forbidden
    for method, path in [("GET", ""), ("POST", "/settle"), ("POST", "/cancel")]:
        assert read_refusal(tenant.writer.request(method, f"/v1/holds/mine{path}?agent=planner")) == forbidden
    assert hold(tenant.writer, {"usd": 1}, agent="writer")["agent"] == "writer"
    assert tenant.left("acme") == {"usd": "8.000000"}


def test_an_admin_acts_for_any_agent_and_has_to_name_it(tenant: Tenant) -> None:
    nobody = (400, "invalid", "agent: expected the agent to act for, got none; an admin has to name it")
    assert read_refusal(tenant.admin.post("/v1/holds", json={"costs": {"usd": 1}})) == nobody
    assert read_refusal(tenant.admin.get("/v1/holds/x")) == nobody
    held = hold(tenant.admin, {"usd": 1}, agent="planner", id="for-planner")
    assert held["account"] == "acme/search/planner"
    assert tenant.planner.get("/v1/holds/for-planner").json()["state"] == "open"
    query = {"agent": "planner"}
    assert tenant.admin.get("/v1/holds/for-planner", params=query).json()["state"] == "open"
    assert tenant.admin.post("/v1/holds/for-planner/extend", params=query, json={"lease": 90}).status_code == 200
    assert tenant.admin.post("/v1/holds/for-planner/settle", params=query).json()["state"] == "settled"
    assert read_refusal(tenant.admin.get("/v1/holds/for-planner", params={"agent": "writer"}))[:2] == (
        404,
        "unknown_hold",
    )


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
    unknown = (404, "unknown_account", "there is no such account, or it isn't yours")
    for path in others:
        answer = tenant.planner.get(f"/v1/accounts/{quote(path, safe='')}".replace("..", "%2e%2e"))
        if path != "..":
            assert read_refusal(answer) == unknown, path
        assert answer.status_code == 404
    assert [status(tenant.stranger, path) for path in (*own, "-", "-/-", "-/-/planner")] == [404] * 7
    assert status(tenant.stranger, "-/-/stranger") == 200
    assert [status(tenant.admin, path) for path in (*own, "acme/ops", "-/-/stranger", "unheard/of")] == [200] * 7
    assert read_refusal(tenant.planner.get("/v1/accounts/acme%2Fsearch%2Fplanner%2Fa%2Fb"))[:2] == (400, "invalid")
    assert read_refusal(tenant.admin.get("/v1/accounts/a%2Fb%2Fc%2Fd%2Fe"))[:2] == (400, "invalid")


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
    assert read_refusal(too_many) == (400, "invalid", "query: Expected `int` <= 100 - at `$.holds`")


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
    assert read_refusal(answer)[:2] == (400, "invalid")
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
    assert read_refusal(tenant.planner.post("/v1/holds", content=body))[:2] == (413, "too_large")
    assert tenant.left("acme") == {"usd": "10.000000"}


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
