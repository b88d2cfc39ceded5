"""The OpenAPI document, made from the table of routes."""

from typing import Any, Final

import msgspec

from headgate.http import PROBLEM_JSON
from headgate.hub.api.http import DeniedBody, ErrorBody
from headgate.hub.api.routing import Route, Router, Who

_PROBLEMS: Final = {
    400: "what was sent can't be used",
    401: "a token is missing, or nobody's",
    403: "not with this token",
    404: "there is no such thing",
    408: "the body came too slowly",
    409: "not as things stand",
    413: "the body is too large",
    503: "not at the moment",
}


def document(router: Router, version: str) -> dict[str, Any]:
    """An OpenAPI 3.1 document of all routes."""
    bodies = [route.body for route in router.routes if route.body is not None]
    kinds = [*bodies, *(route.answer for route in router.routes), *(route.query for route in router.routes)]
    found, parts = msgspec.json.schema_components(
        [*kinds, ErrorBody, DeniedBody], ref_template="#/components/schemas/{name}"
    )
    schemas = list(zip([*kinds, ErrorBody, DeniedBody], found, strict=True))
    paths: dict[str, Any] = {}
    for route in router.routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas, parts)
    return {
        "openapi": "3.1.0",
        "info": {"title": "headgate hub", "version": version, "description": "Rate limiting for agents: the hub."},
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
        "description": f"For {route.who.value}. Counted as the action `{route.action}`.",
        "parameters": [_in_path(name) for name in route.parts] + _in_query(schema(route.query), parts),
        "responses": {str(route.status): _response("done", schema(route.answer), route.media)},
    }
    if route.who is not Who.PROBE:
        retry_after = {"schema": {"type": "integer"}, "description": "seconds to wait"}
        denied = _response("too many requests", schema(DeniedBody), PROBLEM_JSON)
        operation["responses"]["429"] = {**denied, "headers": {"Retry-After": retry_after}}
    for status, about in _PROBLEMS.items():
        operation["responses"][str(status)] = _response(about, schema(ErrorBody))
    operation["responses"]["503"]["content"] |= _response("", schema(DeniedBody), PROBLEM_JSON)["content"]
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema(route.body)}}}
    if route.who not in (Who.PROBE, Who.ANYONE):
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
