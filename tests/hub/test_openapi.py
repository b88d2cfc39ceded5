"""The OpenAPI document: complete, valid, and consistent with the hub's responses."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import msgspec
import pytest
import schemathesis

from headgate import ManualClock, MemoryStore, Policy
from headgate._version import VERSION
from headgate.hub.api.hold_routes import CallerAccount, HoldDetail
from headgate.hub.api.responses import ApiResponse
from headgate.hub.api.routes import ROUTES
from headgate.hub.api.routing import Access, Call, Route, admin_route
from headgate.hub.app import Hub
from headgate.hub.config_file import ConfigFile
from tests.support.example_requests import Scene, build_scene
from tests.support.hub import ADMIN, VIEWER, hub_server, hub_settings


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """As it is served."""
    with hub_server() as hub, hub.http() as client:
        found: dict[str, Any] = client.get("/openapi.json").json()
    return found


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def references(thing: Any) -> Iterator[str]:
    if isinstance(thing, dict):
        if isinstance(thing.get("$ref"), str):
            yield thing["$ref"]
        for value in thing.values():
            yield from references(value)
    elif isinstance(thing, list):
        for value in thing:
            yield from references(value)


def test_the_document_has_every_route_and_no_other(document: dict[str, Any]) -> None:
    found = sorted((method, path) for method, path, _ in operations(document))
    assert found == sorted((route.method, route.path) for route in ROUTES)


def test_each_operation_has_a_unique_name_and_a_description(document: dict[str, Any]) -> None:
    names = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(set(names)) == len(names)
    for _, path, operation in operations(document):
        assert operation["summary"], path
        assert operation["description"], path
        assert all(response["description"] for response in operation["responses"].values())
    assert len({operation["summary"] for _, _, operation in operations(document)}) >= len(ROUTES) - 1  # /health twice


def test_every_reference_resolves_and_every_schema_is_valid(document: dict[str, Any]) -> None:
    found = set(references(document))
    assert found
    for reference in found:
        place: Any = document
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]
        assert isinstance(place, dict)
    assert {reference.rpartition("/")[2] for reference in found} <= set(document["components"]["schemas"])
    for schema in document["components"]["schemas"].values():
        jsonschema_rs.Draft202012Validator({**schema, "components": document["components"]})


def test_the_document_is_valid(document: dict[str, Any]) -> None:
    assert (document["openapi"], document["info"]["version"]) == ("3.1.0", VERSION)
    schema = schemathesis.openapi.from_dict(document)
    schema.validate()
    assert [type(operation).__name__ for operation in schema.get_all_operations()] == ["Ok"] * len(ROUTES)
    broken = copy.deepcopy(document)
    del broken["paths"]["/v1/check"]["post"]["requestBody"]["content"]
    with pytest.raises(jsonschema_rs.ValidationError):
        schemathesis.openapi.from_dict(broken).validate()


@pytest.mark.parametrize("route", ROUTES, ids=[f"{route.method} {route.path}" for route in ROUTES])
def test_an_operation_matches_its_route(document: dict[str, Any], route: Route) -> None:
    operation = document["paths"][route.path][route.method.lower()]
    assert route.access.value in operation["description"]
    assert f"`{route.action}`" in operation["description"]
    assert ("requestBody" in operation) == (route.body is not None)
    assert operation.get("security") == (None if route.access in (Access.PROBE, Access.ANYONE) else [{"token": []}])
    assert ("429" in operation["responses"]) == (route.access is not Access.PROBE)
    in_path = [parameter["name"] for parameter in operation["parameters"] if parameter["in"] == "path"]
    in_query = [parameter["name"] for parameter in operation["parameters"] if parameter["in"] == "query"]
    assert in_path == route.parts
    assert in_query == [field.encode_name for field in msgspec.structs.fields(route.query)]


# What it says is true -------------------------------------------------------------------------------------------------


def validator(document: dict[str, Any], operation: dict[str, Any], status: int) -> jsonschema_rs.Draft202012Validator:
    assert str(status) in operation["responses"], f"the document doesn't know {status}"
    (content,) = operation["responses"][str(status)]["content"].values()
    schema = content["schema"]
    return jsonschema_rs.Draft202012Validator({**schema, "components": document["components"]})


def token_for(route: Route, where: Scene) -> str:
    return {Access.AGENT: where.token, Access.PROGRAM: where.token, Access.VIEWER: VIEWER}.get(route.access, ADMIN)


async def test_responses_match_the_document(document: dict[str, Any], tmp_path: Path) -> None:
    """The good request of every route, then one without a token, then one with a body that isn't JSON."""
    file = tmp_path / "headgate.toml"
    file.write_text("")
    store = MemoryStore(clock=ManualClock(start=1000))
    policy = Policy(addresses={"limit": "1000/minute"}, accounts={"plans": {"pro": {}}})
    hub = Hub(hub_settings(), policy, store=store, config=ConfigFile(file))
    transport = httpx.ASGITransport(hub)
    async with hub, httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for route in ROUTES:
            operation = document["paths"][route.path][route.method.lower()]
            where = await build_scene(hub)
            path, body = where.request(route)
            own = {"Authorization": f"Bearer {token_for(route, where)}"}
            good = await client.request(route.method, path, json=body, headers=own)
            assert good.status_code == route.status, (path, good.text)
            assert good.headers["content-type"] == route.media
            if route.media == "application/json":
                validator(document, operation, route.status).validate(good.json())
            elif route.access in (Access.PROBE, Access.ANYONE):
                assert route.media in operation["responses"][str(route.status)]["content"]
                continue
            stranger = await client.request(route.method, path, json=body)
            validator(document, operation, stranger.status_code).validate(stranger.json())
            if route.body is not None:
                headers = {"Authorization": f"Bearer {token_for(route, await build_scene(hub))}"}
                bad = await client.request(route.method, path, content=b"{", headers=headers)
                assert bad.status_code == 400
                validator(document, operation, 400).validate(bad.json())


def test_error_responses_match_the_document(document: dict[str, Any]) -> None:
    with hub_server(Policy(limits={"light": "1/minute"}), max_frame=1024) as hub, hub.http(hub.register("a")) as client:
        answers = [
            ("post", "/v1/check", client.post("/v1/check", json={"key": "k"})),
            ("post", "/v1/check", client.post("/v1/check", json={"key": "k"})),
            ("get", "/api/admin/changes", client.get("/api/admin/changes")),
            ("get", "/api/tasks/{id}", client.get("/api/tasks/none")),
            ("post", "/api/channels", client.post("/api/channels", json={"name": "general"})),
            ("post", "/api/messages", client.post("/api/messages", json={"to": "a", "body": "x" * 2000})),
        ]
    assert [answer.status_code for _, _, answer in answers] == [200, 429, 403, 404, 409, 413]
    for method, path, answer in answers:
        validator(document, document["paths"][path][method], answer.status_code).validate(answer.json())
    denied = answers[1][2]
    assert denied.headers["Retry-After"] == "60"


def test_body_schemas_accept_what_the_hub_accepts(document: dict[str, Any]) -> None:
    """A body that the schema refuses is refused, and one that it lets is let: on some that differ by little."""
    schema = document["paths"]["/v1/check"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    judge = jsonschema_rs.Draft202012Validator({**schema, "components": document["components"]})
    bodies: list[Any] = [
        {"key": "k"}, {"key": ""}, {"key": "k" * 512}, {"key": "k" * 513}, {"key": None}, {"key": 5}, {}, [], None, "k",
        {"key": "k", "limit": 1}, {"key": "k", "limit": 0}, {"key": "k", "limit": 1.5}, {"key": "k", "limit": None},
        {"key": "k", "limit": 1_000_001}, {"key": "k", "limit": "1"}, {"key": "k", "window_ms": 31_536_000_000},
        {"key": "k", "window_ms": 31_536_000_001}, {"key": "k", "window_ms": True}, {"key": "k", "more": 1},
    ]  # fmt: skip
    with hub_server() as hub, hub.http(ADMIN) as client:
        found = [client.post("/v1/check", json=body).status_code == 200 for body in bodies if body is not None]
    assert found == [judge.is_valid(body) for body in bodies if body is not None]
    assert 0 < sum(found) < len(found)


def test_a_route_has_one_type_of_body_beside_whole_responses() -> None:
    async def either(_call: Call) -> ApiResponse | HoldDetail:
        raise NotImplementedError

    async def response(_call: Call) -> ApiResponse:
        raise NotImplementedError

    async def two(_call: Call) -> HoldDetail | CallerAccount:
        raise NotImplementedError

    assert [admin_route("GET", "/x", handler, "").answer for handler in (either, response)] == [HoldDetail, str]
    with pytest.raises(TypeError, match="GET /x: expected one type of body, got "):
        _ = admin_route("GET", "/x", two, "").answer
