"""Inputs of every kind for a hub, from a seed: good ones made from its schemas, almost good ones, and noise."""

import json
import string
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any
from urllib.parse import quote

from headgate.hub.api.openapi import document
from headgate.hub.api.routes import ROUTES
from headgate.hub.api.routing import Access, Route, Router
from headgate.hub.sockets.frames import schemas
from headgate.proto import envelope_pb2 as wire
from tests.support.fuzz_inputs import ESCAPES, HEADERS, ILL_HEADS, METHODS, NUMBERS, RAW, STRINGS

Json = Any
GOOD, ALMOST, NOISE = "good", "almost", "noise"
LARGEST = 65_536
"""Bytes of a frame or body that the hub takes."""

OPENAPI = document(Router(ROUTES))
FRAMES = schemas()
GIVING_UP = ("post_onboard_rotate", "post_onboard_revoke")
"""The routes by which agents lose their tokens."""


def websocket_frame(opcode: int, payload: bytes, *, fin: bool = True, mask: int = 0, more: int = 0) -> bytes:
    """A frame of a client; `more` has bits that are reserved."""
    size = len(payload)
    if size < 126:
        length = bytes([0x80 | size])
    else:
        length = b"\xfe" + size.to_bytes(2, "big") if size < 65_536 else b"\xff" + size.to_bytes(8, "big")
    key = mask.to_bytes(4, "big")
    if mask:
        pad = (key * (size // 4 + 1))[:size]
        payload = (int.from_bytes(payload, "big") ^ int.from_bytes(pad, "big")).to_bytes(size, "big")
    return bytes([0x80 * fin | more | opcode]) + length + key + payload


@dataclass(frozen=True)
class FuzzedRequest:
    """An HTTP request as bytes."""

    raw: bytes
    method: str
    route: Route | None
    """The one that it was made for; it may have become another."""
    agent: str
    quality: str
    last: bool = False
    """Whether nothing can follow it, and perhaps no answer comes."""

    def __str__(self) -> str:
        return str(self.raw)


class Fuzzer:
    """Makes inputs, among them changes of limits to `limits`.

    `known` holds values that mean something to the hub, by the names of the fields that they stand in.
    """

    def __init__(self, seed: int, tokens: Mapping[str, str], admin: str, viewer: str, limits: list[Json]) -> None:
        self.random = Random(seed)
        self.tokens = dict(tokens)
        """Of agents that keep them."""
        self.spare: deque[str] = deque(maxlen=200)
        """Tokens of agents that may lose them."""
        self.admin, self.viewer = admin, viewer
        names = [*tokens, "nobody"]
        self.known: dict[str, Any] = {
            "to": names,
            "agent_id": names,
            "token": [*tokens.values(), admin, viewer],
            "agent": deque(["victim-1", "victim-2"], maxlen=100),
            "channel": ["general", "plans", "ws", "http"],
            "tier": ["light", "heavy", None],
            "action": ["message", None],
            "name": ["general", "plans"],
            "task_id": deque(["none"], maxlen=200),
            "hold_id": deque(["none"], maxlen=50),
            "path": [f"-/-/{name}" for name in tokens],
            "account": ["acme", "acme/search", *[f"-/-/{name}" for name in tokens]],
            "level": ["org", "team", "agent", "session"],
            "lease": [1, 60.5],
            "timeout": [0],
            "tool": ["", None],
            "session": ["0", "1", "2", 3, 4],
            "key": ["a", "b", "a key/with a slash"],
        }
        self._limits = limits

    # Values of schemas -----------------------------------------------------------------------------------------------

    def value(self, schema: Mapping[str, Any], root: Mapping[str, Any], name: str = "") -> Json:
        """Something that a schema allows, known to the hub where it can be."""
        random = self.random
        if "$ref" in schema:
            place: Any = root
            for part in schema["$ref"].removeprefix("#/").split("/"):
                place = place[part]
            return self.value(place, root, name)
        if name in self.known and "object" not in str(schema.get("type")) and random.random() < 0.9:
            return random.choice(self.known[name])
        if "anyOf" in schema:
            return self.value(random.choice(schema["anyOf"]), root, name)
        if "enum" in schema:
            return random.choice(schema["enum"])
        kinds: dict[str, Callable[[], Json]] = {
            "string": lambda: self._string(schema),
            "integer": lambda: random.randint(*self._range(schema)),
            "number": lambda: random.uniform(*self._range(schema)),
            "boolean": lambda: random.random() < 0.5,
            "null": lambda: None,
            "array": lambda: self._array(schema, root),
            "object": lambda: self._object(schema, root),
        }
        return kinds[schema["type"]]() if "type" in schema else self.anything()

    def _string(self, schema: Mapping[str, Any]) -> str:
        low, high = schema.get("minLength", 0), schema.get("maxLength", 40)
        size = self.random.choice((low, high, self.random.randint(low, min(high, low + 12))))
        if "pattern" in schema:
            return self.letters(max(size, 1))
        return "".join(self.random.choices(string.printable[:95] + "äλ漢💥", k=size))

    def _range(self, schema: Mapping[str, Any]) -> tuple[int, int]:
        low = schema.get("minimum", schema.get("exclusiveMinimum", -(10**6)))
        high = schema.get("maximum", 10**6)
        low = int(low) + ("exclusiveMinimum" in schema)
        return self.random.choice(((low, int(high)), (low, min(low + 5, int(high)))))

    def _array(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Json]:
        low = schema.get("minItems", 0)
        return [self.value(schema["items"], root) for _ in range(low + self.random.randrange(4))]

    def _object(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Json]:
        made = {
            name: self.value(of, root, name)
            for name, of in schema.get("properties", {}).items()
            if name in schema.get("required", ()) or self.random.random() < 0.5
        }
        if isinstance(schema.get("additionalProperties"), dict):  # limits by tier, or below a channel
            limits = {tier: self.random.choice(self._limits) for tier in self._some(("light", "normal", "heavy"))}
            made.update(limits if self.random.random() < 0.7 else {self.random.choice(("ws", "http")): limits})
        return made

    def anything(self, depth: int = 0) -> Json:
        """Any JSON at all, odd strings and numbers among it."""
        kind = self.random.randrange(8 if depth < 3 else 5)
        if kind < 2:
            return self.letters(self.random.randrange(20))
        if kind < 5:
            return self.random.choice((None, True, self.random.random(), self.random.choice(NUMBERS[:13])))
        if kind == 5:
            return [self.anything(depth + 1) for _ in range(self.random.randrange(4))]
        return {self.letters(3): self.anything(depth + 1) for _ in range(self.random.randrange(4))}

    def letters(self, size: int) -> str:
        return "".join(self.random.choices("abcXYZ012._-", k=size))

    def _some(self, choices: Iterable[str]) -> list[str]:
        found = list(choices)
        return self.random.sample(found, self.random.randint(1, len(found)))

    # Spoiling --------------------------------------------------------------------------------------------------------

    def spoiled(self, value: Json) -> bytes:
        """JSON text that is almost that of a value."""
        text = self._rewritten(self._bent(value)) if self.random.random() < 0.7 else json.dumps(value)
        data = text.encode("utf-8", "surrogatepass")
        return self.broken(data) if self.random.random() < 0.4 else data

    def _bent(self, value: Json) -> Json:
        """The value with one of its parts left out, added to, or replaced by something odd; "@@" for raw text."""
        random = self.random
        if isinstance(value, dict) and value and random.random() < 0.9:
            name, how = random.choice(list(value)), random.randrange(5)
            if how == 0:
                return {key: kept for key, kept in value.items() if key != name}
            if how == 1:
                return {**value, random.choice((*STRINGS, *value)): self._odd()}
            if how == 2:
                return {random.choice(STRINGS) if key == name else key: kept for key, kept in value.items()}
            return {**value, name: self._bent(value[name])}
        return self._odd()

    def _odd(self) -> Json:
        return self.random.choice((*STRINGS, *NUMBERS, *["@@"] * 30, None, [], {}, [[]], {"": {}}, [None] * 50))

    def _rewritten(self, value: Json) -> str:
        random = self.random
        text = json.dumps(value, ensure_ascii=random.random() < 0.5, indent=random.choice((None, None, None, 3)))
        text = text.replace('"@@"', random.choice(RAW))
        if random.random() < 0.1 and text.startswith("{") and len(text) > 2:  # every field twice
            text = "{" + text[1:-1] + "," + text[1:]
        return text

    def broken(self, data: bytes) -> bytes:
        """Bytes with some changed, left out or added."""
        random, changed = self.random, bytearray(data or b"x")
        for _ in range(random.randint(1, 4)):
            at = random.randrange(len(changed) + 1)
            how = random.randrange(5)
            if how == 0:
                changed[at : at + 1] = random.randbytes(1)
            elif how == 1:
                changed[at:at] = random.randbytes(random.randint(1, 8))
            elif how == 2:
                del changed[at : at + random.randint(1, 10)]
            elif how == 3:
                del changed[at:]
            else:
                changed[at:at] = changed[: random.randint(0, 40)]
        return bytes(changed)

    def quality(self) -> str:
        return self.random.choices((GOOD, ALMOST, NOISE), (10, 8, 2))[0]

    # Frames of /ws ---------------------------------------------------------------------------------------------------

    def frame(self, own_tasks: Iterable[str] = ()) -> tuple[str, bytes, str]:
        """The text of a frame, how good it is, and its type."""
        quality, tasks = self.quality(), list(own_tasks)
        kind = self.random.choice(list(FRAMES["from_agents"]))
        if tasks and self.random.random() < 0.3:
            kind = self.random.choice(
                ("task_accepted", "task_progress", "task_complete", "task_failed", "task_recovering")
            )
        if quality == NOISE:
            return quality, self._noise(), ""
        value = self.value(FRAMES["from_agents"][kind], FRAMES)
        if tasks and "task_id" in value and self.random.random() < 0.8:
            value["task_id"] = self.random.choice(tasks)
        if kind == "session_signal" and self.random.random() < 0.8:
            value["signal"] = self.value(FRAMES["signal"], FRAMES)
        if quality == GOOD:
            return quality, json.dumps(value).encode(), kind
        return quality, self.spoiled(value), kind

    def _noise(self) -> bytes:
        if self.random.random() < 0.05:
            return b'{"type":"ping","id":"' + b"x" * self.random.choice((LARGEST, LARGEST * 2, LARGEST * 3)) + b'"}'
        if self.random.random() < 0.5:
            return self.random.choice(RAW).encode()
        return json.dumps(self.anything()).encode()

    def message(self, text: bytes) -> bytes:
        """A WebSocket message of a client: whole or in fragments, with a ping of the protocol between them."""
        random = self.random
        opcode = 1 if random.random() < 0.97 else 2
        if random.random() < 0.9 or len(text) < 3:
            return websocket_frame(opcode, text, mask=random.choice((0, 0, random.getrandbits(32))))
        cut = random.randrange(len(text))
        parts = [websocket_frame(opcode, text[:cut], fin=False), websocket_frame(0, text[cut:])]
        return websocket_frame(9, b"are you there?").join(parts)

    def ill_message(self) -> bytes:
        """What breaks the rules of the WebSocket protocol."""
        return self.random.choice(
            (
                b"\x81\x02{}",  # not masked
                websocket_frame(3, b"reserved"),
                websocket_frame(11, b""),
                websocket_frame(0, b"continues nothing"),
                websocket_frame(1, b"a", fin=False) + websocket_frame(1, b"b"),
                websocket_frame(9, b"long ping" * 20),
                websocket_frame(9, b"", fin=False),
                websocket_frame(1, b'"\xff\xfe"'),
                websocket_frame(1, b'"\xed\xa0\x80"'),
                websocket_frame(1, b'"\xc3', fin=False) + websocket_frame(0, b'("'),
                websocket_frame(8, b"x"),
                websocket_frame(8, (1005).to_bytes(2, "big")),
                websocket_frame(8, (99).to_bytes(2, "big")),
                websocket_frame(8, (1000).to_bytes(2, "big") + b"\xff\xfe"),
                websocket_frame(1, b"rsv", more=0x40),
                websocket_frame(1, b"x" * (LARGEST * 4 + 1)),
                websocket_frame(2, b"x" * LARGEST, fin=False) * 2,
                b"\x81\xff" + b"\xff" * 8,  # of so many bytes
                b"\x81\xff" + b"\0" * 8 + b"\0\0\0\0",  # a long length that is short
                b"\x81\xfe\x00\x02\0\0\0\0{}",
                self.random.randbytes(self.random.randint(1, 100)),
                b"GET / HTTP/1.1\r\n\r\n",
            )
        )

    def handshake(self) -> bytes:
        """Almost the beginning of a WebSocket."""
        random = self.random
        path = random.choice(
            ("/ws", "/ws", "/relay", "/ws/", "/", "/api/health", "/ws?token=x", "/%77s", "//ws", "/ws%00", "/x" * 5000)
        )
        headers = {
            "Host": "hub",
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        }
        name = random.choice(list(headers))
        odd = ["", "x", "8", "13, 8", "websocket, h2c", "keep-alive, Upgrade", "dGhlIHNhbXBsZQ==", "é", "=" * 24]
        odd.append("x" * 9000)
        how = random.randrange(4)
        if how == 0:
            del headers[name]
        elif how == 1:
            headers[name] = random.choice(odd)
        elif how == 2:
            more = ("Sec-WebSocket-Protocol", "Sec-WebSocket-Extensions", "Origin", "Authorization", "X")
            headers[random.choice(more)] = random.choice(
                (*odd, "permessage-deflate; client_max_window_bits=99", "0", "3")
            )
        else:
            headers.update({f"X-{number}": "y" for number in range(random.choice((50, 150, 500)))})
        method = random.choice(("GET", "GET", "GET", "POST", "HEAD"))
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        return "\r\n".join(lines).encode("latin-1")

    # Envelopes of /relay ---------------------------------------------------------------------------------------------

    def envelope(self) -> tuple[str, bytes]:
        """The bytes of an envelope, and how good it is."""
        quality, random = self.quality(), self.random
        if quality == NOISE:
            return quality, random.randbytes(random.choice((0, 1, 10, 200, LARGEST + 1)))
        data = wire.Data(body=random.randbytes(random.randrange(200)), content_type=self.letters(5))
        made = wire.Envelope(id=self.letters(random.randint(1, 128)), type=wire.MESSAGE_TYPE_DATA, data=data)
        made.to = random.choice(self.known["to"])
        setattr(made, "from", random.choice(self.known["to"]))
        made.in_reply_to = self.letters(random.randrange(3))
        if quality == GOOD:
            return quality, made.SerializeToString()
        how = random.randrange(4)
        if how == 0:
            made.id = random.choice(("", "x" * 129, "\0"))
        elif how == 1:
            made.type = random.randrange(30)  # type: ignore[assignment]
        elif how == 2:
            made.hello.CopyFrom(wire.Hello(address=random.choice(self.known["to"]), token=self.letters(40)))
        raw: bytes = made.SerializeToString()
        return quality, self.broken(raw) if how == 3 else raw

    def greeting(self, agent: str) -> tuple[str, bytes]:
        """A HELLO that may not be the agent's own."""
        token = self.random.choice((self.tokens[agent], self.letters(43), "", self.admin, "\0", "💥" * 300))
        address = self.random.choice((agent, agent, "", "\0", "x" * 129, "nobody"))
        hello = wire.Envelope(id="h", type=wire.MESSAGE_TYPE_HELLO, hello=wire.Hello(address=address, token=token))
        raw: bytes = hello.SerializeToString()
        return ALMOST, self.broken(raw) if self.random.random() < 0.3 else raw

    # HTTP ------------------------------------------------------------------------------------------------------------

    def request(self) -> FuzzedRequest:
        """A request for some route, or almost one."""
        quality, route, random = self.quality(), self.random.choice(ROUTES), self.random
        if quality == NOISE:
            return self._ill_request()
        agent, token = self._owner(route)
        operation = OPENAPI["paths"][route.path][route.method.lower()]
        path, body, method, headers = self._path(route, operation), b"", route.method, [b"Host: localhost"]
        if route.body is not None:
            body = self._body(operation, good=True)
        parts = ("path", "query", "method", "headers", "token", "body")
        spoil = set() if quality == GOOD else set(self._some(parts)[:2])
        if "path" in spoil:
            path = self._bent_path(path)
        if "query" in spoil:
            path += random.choice("?&") + self._odd_query()
        if "method" in spoil:
            method = random.choice(METHODS)
        if "headers" in spoil:
            headers += random.sample(HEADERS, random.randint(1, 4))
        if "token" in spoil:
            kept = () if route.action in GIVING_UP else self.tokens.values()
            agent, token = "", random.choice((*kept, self.admin, self.viewer, "", *STRINGS))
        if "body" in spoil:
            body = self._body(operation, good=False)
        if token:
            scheme = "Bearer" if quality == GOOD else random.choice(("Bearer", "bearer", "Basic", ""))
            value = " ".join(token.encode("latin-1", "replace").decode("latin-1").replace("\0", "").split()) or "x"
            headers.append(f"Authorization: {scheme} {value}".encode("latin-1", "replace"))
        headers = [header for header in headers if b"\x1b" not in header and b"\x7f" not in header]
        raw, last = self._framed(method, path, headers, body, good="body" not in spoil)
        return FuzzedRequest(raw, method, route, agent, quality, last)

    def _owner(self, route: Route) -> tuple[str, str]:
        """Who may use a route, and its token."""
        if route.action in GIVING_UP:
            return "", self.spare.popleft() if self.spare else ""
        if route.access in (Access.AGENT, Access.PROGRAM):
            return self.random.choice(list(self.tokens.items()))
        return "", {Access.VIEWER: self.viewer, Access.ADMIN: self.admin}.get(route.access, "")

    def _path(self, route: Route, operation: Mapping[str, Any]) -> str:
        of_id = "hold_id" if route.path.startswith("/v1/holds") else "task_id"
        named = {name: of_id if name == "id" else name for name in route.parts}
        parts = {name: self.value({"type": "string", "minLength": 1}, {}, known) for name, known in named.items()}
        path = route.path.format(**{name: quote(str(value), safe="") for name, value in parts.items()})
        query = [
            f"{one['name']}={quote(str(self.value(one['schema'], OPENAPI)))}"
            for one in operation["parameters"]
            if one["in"] == "query" and self.random.random() < 0.4
        ]
        return path + ("?" + "&".join(query).replace("=None", "=") if query else "")

    def _bent_path(self, path: str) -> str:
        at = self.random.randrange(1, len(path) + 1)
        if self.random.random() < 0.3:  # a part of its own
            odd = self.random.choice(STRINGS).encode("utf-8", "surrogatepass")
            return path.rpartition("/")[0] + "/" + quote(odd, safe="")
        return path[:at] + self.random.choice(ESCAPES) + path[at:]

    def _odd_query(self) -> str:
        names = ("limit", "before", "after", "state", "window_ms", "x", "", "%ff", "limit[]")
        values = (*STRINGS, *map(str, NUMBERS[:13]), "%ff", "%00", "%zz", "9" * 5000)
        pairs = [(self.random.choice(names), self.random.choice(values)) for _ in range(self.random.randint(1, 3))]
        text = "&".join(f"{name}={quote(value.encode('utf-8', 'surrogatepass'))}" for name, value in pairs)
        return text if self.random.random() < 0.9 else self.letters(10) + "&&==&%"

    def _body(self, operation: Mapping[str, Any], *, good: bool) -> bytes:
        if "requestBody" not in operation:
            return b"" if good else self._noise()
        value = self.value(operation["requestBody"]["content"]["application/json"]["schema"], OPENAPI)
        if isinstance(value, dict) and isinstance(value.get("agent_id"), str):
            value["agent_id"] = self.random.choice((f"new-{self.random.getrandbits(40)}", value["agent_id"]))
        if good:
            return json.dumps(value).encode()
        return self.spoiled(value) if self.random.random() < 0.8 else self._noise()

    def _framed(self, method: str, path: str, headers: list[bytes], body: bytes, *, good: bool) -> tuple[bytes, bool]:
        """The bytes of a request, and whether nothing can follow it."""
        head = [f"{method} {path} HTTP/1.1".encode(), *headers]
        how = self.random.random()
        if not good and how < 0.05:  # it ends early
            head.append(b"Content-Length: " + str(len(body) + self.random.randint(1, 100_000)).encode())
            return b"\r\n".join([*head, b"", body]), True
        if body and how < 0.25:
            head.append(b"Transfer-Encoding: chunked")
            cuts = sorted(self.random.randrange(len(body) + 1) for _ in range(3))
            pieces = [piece for piece in (body[: cuts[0]], body[cuts[0] : cuts[2]], body[cuts[2] :]) if piece]
            chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
            return b"\r\n".join([*head, b"", chunks + b"0\r\n\r\n"]), False
        if body or method not in ("GET", "DELETE"):
            head.append(b"Content-Length: " + str(len(body)).encode())
        return b"\r\n".join([*head, b"", body]), False

    def _ill_request(self) -> FuzzedRequest:
        raw = self.random.choice(ILL_HEADS)
        if self.random.random() < 0.3:
            raw = self.broken(raw[:2000])
        elif self.random.random() < 0.2:
            raw = self.random.randbytes(self.random.randint(1, 300))
        return FuzzedRequest(raw, "", None, "", NOISE, last=True)
