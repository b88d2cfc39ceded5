"""Tiers that a gate's policy adds, at the edges: `tier=`, `routes=`, and reloads that remove one."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from headgate import Gate, InvalidInput, ManualClock, MemoryStore, Policy, RedisStore
from headgate.edges.asgi import RateLimitMiddleware
from headgate.edges.websocket import WebSocketLimits
from tests.support.asgi_server import app_server
from tests.support.http_edges import AsgiEdge, Edge, FastapiEdge, WsgiEdge, client_of, edges
from tests.support.valkey import PATIENCE, ValkeyServer, wait_for
from tests.support.websocket_apps import Echo, client_name, denial_frame, exchange, websocket_client

pytestmark = pytest.mark.once

BULK = Policy(tiers=["bulk"], limits={"bulk": "2/minute", "normal": "5/minute"})
WITHOUT = Policy(limits={"normal": "5/minute"})
TIERS = "light, normal, heavy, bulk"


@pytest.fixture(params=["memory", "server"])
def gate(request: pytest.FixtureRequest) -> Iterator[Gate]:
    if request.param == "memory":
        with Gate(BULK, store=MemoryStore(clock=ManualClock())) as found:
            yield found
        return
    server: ValkeyServer = request.getfixturevalue("redis_server")
    clock = ManualClock(start=1000)
    store = RedisStore(server.url, prefix=f"{uuid4().hex}:", clock=clock, timeout=PATIENCE)
    with store, Gate(BULK, store=store) as found:
        yield found


@edges(AsgiEdge, WsgiEdge, FastapiEdge)
def test_the_tier_of_requests_may_be_one_of_the_policy(edge: type[Edge]) -> None:
    for tier in ("bulk", lambda request: "bulk"):
        gate = Gate(BULK, store=MemoryStore(clock=ManualClock()))
        with client_of(edge(gate=gate, key=lambda request: "a", tier=tier)) as client:
            answers = [client.get("/") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert answers[0].headers["ratelimit-policy"] == '"bulk";q=2;w=60'
        assert answers[2].json()["tier"] == "bulk"
        assert gate.peek("a", "http", "normal").remaining == 5


@pytest.mark.parametrize("options", [{"tier": "bluk"}, {"routes": {"/": "bluk"}}])
def test_an_unknown_tier_is_refused_by_a_text_that_lists_those_of_the_policy(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as caught:
        RateLimitMiddleware(Echo(), gate=Gate(BULK), **options)
    assert str(caught.value) == f"RateLimitMiddleware tier: expected one of {TIERS}, got 'bluk'"


@edges(AsgiEdge)
def test_a_function_may_return_a_tier_that_a_reload_has_added_and_no_unknown_one(
    edge: type[Edge], caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(WITHOUT, store=MemoryStore(clock=ManualClock()))
    with client_of(edge(gate=gate, key=lambda request: "a", tier=lambda request: "bulk")) as client:
        assert client.get("/").status_code == 500
        assert "tier: expected a function that returns one of light, normal, heavy, got 'bulk'" in caplog.text
        gate.reload(BULK)
        assert client.get("/").status_code == 200
    assert gate.peek("a", "http", "bulk").remaining == 1


@edges(AsgiEdge, WsgiEdge)
@pytest.mark.parametrize("by", ["tier", "function", "routes"])
def test_a_tier_that_a_reload_removes_counts_as_normal_until_it_is_back(
    edge: type[Edge], by: str, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"tier": "bulk", "function": lambda request: "bulk", "routes": {"/*": "bulk"}}
    app = edge(
        gate=gate,
        key=lambda request: "a",
        settle=lambda request, response: {404: 3, 400: 0}.get(response.status, 1),
        **{"routes" if by == "routes" else "tier": options[by]},
    )
    with client_of(app) as client:
        assert client.get("/").status_code == 200
        gate.reload(WITHOUT)
        answer = client.get("/")
        assert (answer.status_code, answer.headers["ratelimit-policy"]) == (200, '"bulk";q=5;w=60')
        assert gate.peek("a", "http", "normal").remaining == 4
        client.get("/404")
        wait_for(lambda: gate.peek("a", "http", "normal").remaining == 1, "the charge")
        client.get("/400")
        wait_for(lambda: gate.peek("a", "http", "normal").remaining == 1, "the refund")
        gate.reload(BULK)
        assert client.get("/").headers["ratelimit-policy"] == '"bulk";q=2;w=60'
    removed = "the policy no longer has the tier bulk: taken as normal"
    assert [record.getMessage() for record in caplog.records if record.name == "headgate"].count(removed) == 1


@edges(AsgiEdge, WsgiEdge)
def test_a_tier_may_be_removed_while_a_request_is_handled(edge: type[Edge], gate: Gate) -> None:
    def settle(request: Any, response: Any) -> int:
        gate.reload(WITHOUT)
        return 2

    with client_of(edge(gate=gate, key=lambda request: "a", tier="bulk", settle=settle)) as client:
        assert [client.get("/").status_code for _ in range(2)] == [200, 200]


def test_open_connections_outlive_the_tier_that_they_were_made_in(gate: Gate) -> None:
    app = RateLimitMiddleware(
        Echo(), gate=gate, key=client_name, tier="bulk", websocket=WebSocketLimits(received="gate", warn=False)
    )
    with app_server(app) as server, websocket_client(server, "a") as client:
        assert [exchange(client, "x") for _ in range(3)] == ["x", "x", denial_frame("bulk", 30_000)]
        gate.reload(WITHOUT)
        assert [exchange(client, "x") for _ in range(6)] == ["x"] * 5 + [denial_frame("bulk", 12_000)]
