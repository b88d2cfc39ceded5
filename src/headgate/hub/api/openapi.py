"""The OpenAPI document, made from the route table, and the JSON Schemas of the frames."""

from functools import cache
from typing import Any, Final

import msgspec

from headgate._version import VERSION
from headgate.http import PROBLEM_JSON
from headgate.hub.api.responses import DeniedBody, ErrorBody
from headgate.hub.api.routing import Access, Call, Route, Router
from headgate.hub.sockets.frames import schemas as frame_schemas

_PROBLEMS: Final = {
    400: "the request is invalid",
    401: "the token is missing or unknown",
    403: "the token does not allow this",
    404: "not found",
    408: "the body arrived too slowly",
    409: "not possible in the present state",
    413: "the body is too large",
    503: "not available at the moment",
}


@cache
def document(router: Router) -> dict[str, Any]:
    """The OpenAPI 3.1 document of all routes."""
    bodies = [kind for route in router.routes for kind in (route.body, route.denial) if kind is not None]
    kinds = [*bodies, *(route.answer for route in router.routes), *(route.query for route in router.routes)]
    kinds += [ErrorBody, DeniedBody]
    found, parts = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schemas = list(zip(kinds, found, strict=True))
    paths: dict[str, Any] = {}
    for route in router.routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas, parts)
    return {
        "openapi": "3.1.0",
        "info": {"title": "headgate hub", "version": VERSION, "description": "Rate limiting for agents: the hub."},
        "paths": paths,
        "components": {
            "schemas": parts,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, schemas: list[tuple[Any, dict[str, Any]]], parts: dict[str, Any]) -> dict[str, Any]:
    def schema(kind: Any) -> dict[str, Any]:
        return next(found for one, found in schemas if one is kind or one == kind)

    operation: dict[str, Any] = {
        "operationId": f"{route.method.lower()}{route.path.replace('/', '_').replace('{', '').replace('}', '')}",
        "summary": route.about,
        "description": f"For {route.access.value}. Counted as the action `{route.action}`.",
        "parameters": [_in_path(name) for name in route.parts] + _in_query(schema(route.query), parts),
        "responses": {str(route.status): _response("done", schema(route.answer), route.media)},
    }
    denied = _response("too many requests", schema(route.denial or DeniedBody), PROBLEM_JSON)
    if route.access is not Access.PROBE:
        retry_after = {"schema": {"type": "integer"}, "description": "seconds to wait"}
        operation["responses"]["429"] = {**denied, "headers": {"Retry-After": retry_after}}
    for status, about in _PROBLEMS.items():
        operation["responses"][str(status)] = _response(about, schema(ErrorBody))
    operation["responses"]["503"]["content"] |= denied["content"]
    if route.body is not None:
        content = {"application/json": {"schema": schema(route.body)}}
        operation["requestBody"] = {"required": route.body_required, "content": content}
    if route.access not in (Access.PROBE, Access.ANYONE):
        operation["security"] = [{"token": []}]
    return operation


def _response(about: str, schema: dict[str, Any], media: str = "application/json") -> dict[str, Any]:
    return {"description": about, "content": {media: {"schema": schema}}}


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _in_query(schema: dict[str, Any], parts: dict[str, Any]) -> list[dict[str, Any]]:
    found = parts[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    required = found.get("required", [])
    return [
        {"name": name, "in": "query", "required": name in required, "schema": of}
        for name, of in found.get("properties", {}).items()
    ]


async def _openapi(_call: Call, router: Router) -> dict[str, Any]:
    return document(router)


async def _schemas(_call: Call) -> dict[str, Any]:
    return frame_schemas()


ROUTES: Final = (
    Route("GET", "/openapi.json", "get_schemas", Access.ANYONE, _openapi, "this document"),
    Route("GET", "/api/schemas", "get_schemas", Access.ANYONE, _schemas, "JSON Schemas of all frames"),
)
