"""Checks every answer of a hub against its schemas."""

import json
from collections import Counter
from typing import Any

import jsonschema_rs
from google.protobuf.message import DecodeError

from headgate.hub.api.routes import ROUTES
from headgate.proto import envelope_pb2 as wire
from tests.support.fuzzer import FRAMES, GOOD, OPENAPI, FuzzedRequest

PAGES = {route.media for route in ROUTES} - {"application/json"}
BY_THE_HUB = {1002, 1007, 1008, 1009}
"""The codes with which a hub closes connections that sent something unusable."""
LEAKS = (b"Traceback (most recent", b"site-packages", b'File \\"', b"/headgate/hub/", b"sqlite3.", b"msgspec.")


def read(text: bytes) -> Any:
    """JSON that has to be valid; of numbers that are passed on from agents, only those that Python reads."""

    def refuse(text: str) -> None:
        raise ValueError(f"{text} isn't JSON")

    return json.loads(text, parse_constant=refuse, parse_int=lambda digits: int(digits) if len(digits) < 4000 else 0)


class ResponseChecker:
    """Looks at every answer. Keeps what is wrong, and counts what was sent and what came back."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        self.sent: Counter[tuple[str, str]] = Counter()
        """Inputs by entrance and how good they were: those that were answered, or ended the connection."""
        self.seen: Counter[str] = Counter()
        self._answers: dict[tuple[str, str, int], jsonschema_rs.Draft202012Validator] = {}
        self._frames = {
            kind: jsonschema_rs.Draft202012Validator({**schema, "$defs": FRAMES["$defs"]})
            for kind, schema in FRAMES["from_the_hub"].items()
        }

    @property
    def total(self) -> int:
        return sum(self.sent.values())

    def blame(self, what: str, sent: object, answer: object) -> None:
        self.problems.append(f"{what}\n  sent: {str(sent)[:700]}\n  answer: {str(answer)[:700]}")

    def frame(self, payload: bytes, sent: object) -> dict[str, Any]:
        """What a text frame of the hub says."""
        self._leak(payload, sent)
        heard: dict[str, Any] = read(payload)
        kind = heard.get("type", "")
        self.seen[f"ws {kind}"] += 1
        try:
            self._frames[kind].validate(heard)
        except (KeyError, jsonschema_rs.ValidationError) as error:
            self.blame(f"a frame that isn't in the schemas: {error}", sent, payload)
        if kind == "error":
            self.seen[f"ws error {heard['error']}"] += 1
            if heard["error"] in ("internal", "unavailable"):
                self.blame("the hub made a mistake", sent, payload)
        return heard

    def envelope(self, payload: bytes, sent: object) -> wire.Envelope:
        self._leak(payload, sent)
        try:
            heard = wire.Envelope.FromString(payload)
        except DecodeError:
            self.blame("not an envelope", sent, payload)
            return wire.Envelope()
        self.seen[f"relay {wire.MessageType.Name(heard.type)} {heard.error.code}".strip()] += 1
        return heard

    def response(self, status: int, headers: dict[str, str], body: bytes, request: FuzzedRequest) -> None:
        self._leak(body, request)
        route = request.route
        self.seen[f"http {status}"] += 1
        if status >= 500 and b'"queue_full"' not in body:
            self.blame(f"status {status}", request, body)
        if request.quality == GOOD and route is not None and status == route.status:
            self.seen[f"{route.method} {route.path}"] += 1
        media = headers.get("content-type")
        if status in (200, 307) and media in PAGES:
            return
        if media not in ("application/json", "application/problem+json"):
            if (status, body) not in ((400, b"Invalid HTTP request received."), (431, b"")):
                self.blame("not JSON", request, (status, headers, body))
            return
        if request.method == "HEAD":
            return
        told = read(body)
        if status >= 400:
            self.seen[f"http error {told['error']}"] += 1
        if request.quality == GOOD and route is not None:
            self._as_documented(route.method, route.path, status, told, request)

    def _as_documented(self, method: str, path: str, status: int, told: object, request: FuzzedRequest) -> None:
        which = (method, path, status)
        if which not in self._answers:
            found = OPENAPI["paths"][path][method.lower()]["responses"].get(str(status))
            if found is None:
                self.blame(f"{method} {path}: status {status} isn't documented", request, told)
                return
            (content,) = found["content"].values()
            schema = content["schema"]
            self._answers[which] = jsonschema_rs.Draft202012Validator({**schema, "components": OPENAPI["components"]})
        try:
            self._answers[which].validate(told)
        except jsonschema_rs.ValidationError as error:
            self.blame(f"{method} {path}: not as documented: {error}", request, told)

    def closed(self, code: int, sent: object, *, otherwise: tuple[int, ...] = ()) -> None:
        self.seen[f"closed {code}"] += 1
        if code not in BY_THE_HUB and code not in otherwise:
            self.blame(f"closed with {code}", sent, "")

    def _leak(self, answer: bytes, sent: object) -> None:
        for leak in LEAKS:
            if leak in answer:
                self.blame(f"{leak!r} in an answer", sent, answer)
