"""The hub over HTTP: the gate after authentication, limits by address, and invalid requests."""

import json
from collections.abc import Iterator

import httpx

from headgate import Policy
from headgate.gate.policy import BUILT_IN_TIERS
from headgate.http import QuotaPolicy, ServiceLimit, read_headers
from tests.support.agent_connections import BEHIND_A_PROXY, empty_bucket, read_metrics, remaining_by_tier
from tests.support.hub import ADMIN, VIEWER, hub_server

PROBES = ("/health", "/api/health", "/live", "/ready")
OPEN = ("/api/agents", "/api/channels", "/api/metrics", "/api/schemas", "/openapi.json")
"""What anyone may ask."""

TABLE = """
light GET /api/agents
light GET /api/channels
light GET /api/tasks
light GET /api/metrics
light GET /api/mailbox
light GET /api/schemas
light GET /api/dashboard/state
normal POST /api/messages
normal POST /api/channels/general/publish
normal POST /api/mailbox/ack
normal GET /api/channels/general/messages
normal GET /api/tasks/1
normal GET /api/channels/general
heavy POST /api/tasks
heavy POST /api/channels
heavy POST /api/admin/tasks
heavy POST /api/onboard/register
"""
"""The table of A8, without the probe."""


def statuses(http: httpx.Client, path: str, times: int) -> list[int]:
    return [http.get(path).status_code for _ in range(times)]


# B3: agents ----------------------------------------------------------------------------------------------------------


def test_b3_a_denied_request_gets_a_retry_time_and_is_not_handled() -> None:
    with hub_server(Policy(limits={"normal": "2/minute"})) as hub, hub.http(hub.register("planner")) as http:
        hub.register("friend")
        for _ in range(2):
            assert http.post("/api/messages", json={"to": "friend", "body": 1}).status_code == 200
        answer = http.post("/api/messages", json={"to": "friend", "body": 1})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "30")
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json() == {
            "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
            "title": "Too many requests",
            "status": 429,
            "detail": "too many requests of the tier normal; try again in 30 s",
            "violated-policies": ["normal"],
            "error": "rate_limited",
            "retry_after_ms": 30_000,
            "tier": "normal",
        }
        assert hub.hub.messages.accepted == 2
        hub.clock.advance(30)
        assert http.post("/api/messages", json={"to": "friend", "body": 1}).status_code == 200


def test_b3_retry_after_is_rounded_up_to_whole_seconds_and_never_below_one() -> None:
    policy = Policy(limits={"light": "7/minute", "normal": "1000/second burst 1"}, backoff={"steps": [0.001]})
    with hub_server(policy) as hub, hub.http(hub.register("planner")) as http:

        def wait(path: str) -> tuple[str, int]:
            answer = http.get(path)
            return answer.headers["retry-after"], answer.json()["retry_after_ms"]

        empty_bucket(hub, "planner", "light", "http")
        assert wait("/api/mailbox") == ("9", 9000), "60 / 7 seconds"
        hub.clock.advance(0.571)
        assert wait("/api/mailbox") == ("9", 9000), "8.0004 seconds"
        hub.clock.advance(0.001)
        assert wait("/api/mailbox") == ("8", 8000)
        empty_bucket(hub, "planner", "normal", "http")
        assert wait("/api/channels/general") == ("1", 1000), "a millisecond"


def test_responses_have_rate_limit_headers() -> None:
    policy = Policy(limits={"light": "5/minute", "normal": "2/minute; 60/hour"}, exempt=["vip"])
    with hub_server(policy) as hub, hub.http(hub.register("planner")) as http:
        told = [read_headers(http.get("/api/mailbox").headers) for _ in range(6)]
        assert [of.policies for of in told] == [(QuotaPolicy("light", 5, 60),)] * 6
        assert [of.limits[0] for of in told[:2]] == [ServiceLimit("light", 4, 12), ServiceLimit("light", 3, 24)]
        assert [of.limits[0].reset for of in told[4:]] == [12, 12]
        assert [of.retry_after for of in told] == [None] * 5 + [12]
        assert read_headers(http.get("/api/channels/general").headers).limits == (ServiceLimit("2/minute", 1, 30),)
        assert "ratelimit" not in http.get("/api/nothing", headers={"Authorization": "Bearer wrong"}).headers
        assert "ratelimit" not in http.post("/api/onboard/register", json={"agent_id": "other"}).headers
        with hub.http(hub.register("vip")) as vip, hub.http() as admin:
            assert "ratelimit" not in vip.get("/api/mailbox").headers
            assert "ratelimit" not in admin.get("/api/admin/agents").headers


def test_b3_a_request_at_the_warning_level_passes_unchanged() -> None:
    with hub_server(Policy(limits={"light": "5/minute"})) as hub, hub.http(hub.register("planner")) as http:
        answers = [http.get("/api/mailbox") for _ in range(5)]
        assert read_metrics(hub)["checks"] == {"allow": 4, "warn": 1, "deny": 0, "exempt": 0}
        assert [(answer.status_code, answer.json()) for answer in answers] == [(200, {"messages": []})] * 5
        assert len({frozenset(answer.headers) for answer in answers}) == 1


def test_b3_an_agent_is_counted_by_id_from_any_address() -> None:
    with hub_server(Policy(limits={"light": "2/minute"}), **BEHIND_A_PROXY) as hub:
        with hub.http(hub.register("planner")) as planner, hub.http(hub.register("other")) as other:
            from_everywhere = [{"X-Forwarded-For": f"192.0.2.{number}"} for number in range(3)]
            found = [planner.get("/api/mailbox", headers=headers).status_code for headers in from_everywhere]
            assert found == [200, 200, 429]
            assert statuses(other, "/api/agents", 3) == [200, 200, 429], "what anyone may ask is counted so too"
        assert not hub.hub.stats.addresses


def test_a8_every_route_is_counted_in_its_tier() -> None:
    policy = Policy(limits=dict.fromkeys(BUILT_IN_TIERS, "blocked"), addresses={"registration": "blocked"})
    with hub_server(policy) as hub, hub.http(hub.register("planner")) as http:
        for line in TABLE.split("\n")[1:-1]:
            tier, method, path = line.split()
            answer = http.request(method, path)
            assert (answer.status_code, answer.json()["tier"]) == (429, tier), line


def test_a8_every_action_over_http_is_classified() -> None:
    """None is taken for an unknown one, which would be logged."""
    with hub_server() as hub:
        actions = {route.action for route in hub.hub.router.routes}
    assert actions <= {action for channel, action in Policy().actions if channel == "http"}


def test_a8_unknown_routes_count_too() -> None:
    with hub_server(Policy(limits={"normal": "2/minute"})) as hub, hub.http(hub.register("planner")) as http:
        assert statuses(http, "/api/nothing", 3) == [404, 404, 429]


def test_a1_exempt_agents_and_addresses_always_pass() -> None:
    policy = Policy(
        limits=dict.fromkeys(BUILT_IN_TIERS, "blocked"),
        exempt=["monitor"],
        addresses={"limit": "blocked", "exempt": ["::1"]},
    )
    with hub_server(policy, **BEHIND_A_PROXY) as hub, hub.http(hub.register("monitor")) as agent, hub.http() as anyone:
        assert statuses(agent, "/api/mailbox", 3) == [200, 200, 200]
        assert anyone.get("/api/agents", headers={"X-Forwarded-For": "::1"}).status_code == 200
        assert anyone.get("/api/agents", headers={"X-Forwarded-For": "::2"}).status_code == 429


# B3: addresses -------------------------------------------------------------------------------------------------------


def test_b3_anonymous_requests_are_limited_to_sixty_a_minute_per_address() -> None:
    with hub_server() as hub, hub.http() as http:
        found = [http.get(OPEN[number % len(OPEN)]).status_code for number in range(60)]
        assert found == [200] * 60
        denied = http.get("/api/agents")
        assert (denied.status_code, denied.headers["retry-after"], denied.json()["tier"]) == (429, "1", "light")
        hub.clock.advance(1)
        assert statuses(http, "/api/agents", 2) == [200, 429]


def test_b3_an_address_registers_five_agents_a_minute() -> None:
    with (
        hub_server() as hub,
        hub.http() as http,
        hub.http(hub.register("planner")) as planner,
        hub.http(ADMIN) as admin,
    ):

        def register(agent: str, client: httpx.Client = http) -> httpx.Response:
            return client.post("/api/onboard/register", json={"agent_id": agent})

        made = register("agent-0")
        assert (made.status_code, made.json()["agent_id"]) == (201, "agent-0")
        assert register("agent-0").status_code == 409
        assert [register(f"agent-{number}").status_code for number in range(2, 5)] == [201] * 3
        denied = [register("another", client) for client in (http, http, planner, http, http)]
        assert {answer.status_code for answer in denied} == {429}, "an agent can't register any faster"
        assert [answer.headers["retry-after"] for answer in denied] == ["12", "12", "12", "12", "30"]
        assert denied[0].json()["tier"] == "heavy"
        assert http.get("/api/agents").status_code == 200
        assert register("another", admin).status_code == 201
        with hub.http(made.json()["token"]) as agent:
            assert agent.get("/api/mailbox").status_code == 200


def test_b3_denials_by_address_escalate_but_belong_to_no_agent() -> None:
    """Not even of an agent that is called like the address."""
    with hub_server(Policy(addresses={"limit": "1/second"})) as hub, hub.http() as http, hub.http(ADMIN) as admin:
        hub.register("127.0.0.1")
        assert http.get("/api/agents").status_code == 200
        waits = [int(http.get("/api/agents").headers["retry-after"]) for _ in range(12)]
        assert waits == [1, 2, 5, 10] + [30] * 8
        counted = read_metrics(hub)
        assert (counted["violations"], counted["alerts"], counted["address_checks"]["deny"]) == (0, 0, 12)
        assert admin.get("/api/admin/violations").json() == {"agents": []}
        card = admin.get("/api/admin/agents/127.0.0.1").json()
        assert (card["violations"], card["violations_last_hour"], card["rate_limited"]) == (0, 0, False)
        state = admin.get("/api/dashboard/state").json()
        assert (state["agents"], state["summary"]["worst_offenders"]) == ([], [])
        assert state["summary"]["violations_last_hour"] == 0
        hub.clock.advance(60)
        assert [int(http.get("/api/agents").headers.get("retry-after", 0)) for _ in range(2)] == [0, 1]


def test_b3_the_keys_of_addresses_and_agents_do_not_collide() -> None:
    full = {"light": 120, "normal": 60, "heavy": 10}
    with hub_server(Policy(addresses={"limit": "2/minute"})) as hub, hub.http() as http:
        names = ("127.0.0.1", "address", "request", "::1", "address:request:127.0.0.1")
        tokens = {name: hub.register(name) for name in names}
        assert statuses(http, "/api/agents", 3) == [200, 200, 429]
        assert [remaining_by_tier(hub, name, "http") for name in names] == [full] * len(names)
        hub.clock.advance(60)
        for name in names:
            empty_bucket(hub, name, "light", "http")
            with hub.http(tokens[name]) as agent:
                assert agent.get("/api/mailbox").status_code == 429
        assert statuses(http, "/api/agents", 3) == [200, 200, 429]


def test_b3_ipv6_addresses_are_counted_by_their_64_bit_prefix() -> None:
    with hub_server(Policy(addresses={"limit": "2/minute"}), **BEHIND_A_PROXY) as hub, hub.http() as http:

        def ask(address: str) -> int:
            return http.get("/api/agents", headers={"X-Forwarded-For": address}).status_code

        assert [ask(f"2001:db8:0:1:{number}::1") for number in range(3)] == [200, 200, 429]
        assert [ask(f"2001:db8:0:{number}::1") for number in range(2, 5)] == [200, 200, 200]
        assert [ask(f"192.0.2.{number}") for number in range(3)] == [200, 200, 200]
        assert [ask("192.0.2.1"), ask("::ffff:192.0.2.1")] == [200, 429], "which is the same"


def test_b3_failed_authentications_are_limited_by_address() -> None:
    with hub_server(Policy(addresses={"authentication": "5/minute"})) as hub, hub.http() as http:
        token = hub.register("planner")
        wrong = ["Bearer guess", "bearer another", "Basic cGxhbm5lcjp4", "Bearer", f"Bearer {token}x"]
        for header in wrong:
            answer = http.get("/api/mailbox", headers={"Authorization": header})
            assert (answer.status_code, answer.json()["error"]) == (401, "unauthorized")
            assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/api/mailbox", "/api/admin/rate-limits", "/api/agents", "/api/nothing"):
            denied = http.get(path, headers={"Authorization": "Bearer guess"})
            assert (denied.status_code, "perhaps by somebody else" in denied.json()["detail"]) == (429, True)
            assert http.get(path).status_code in (200, 401, 404), "without a token another bucket is asked"
        right = [{"Authorization": f"Bearer {token}"} for token in (token, ADMIN)]
        assert [http.get("/api/tasks", headers=header).status_code for header in right] == [429, 429]
        hub.clock.advance(60)
        assert [http.get("/api/tasks", headers=header).status_code for header in right] == [200, 403]


def test_b3_a_missing_token_is_an_anonymous_request() -> None:
    with hub_server(Policy(addresses={"limit": "2/minute"})) as hub, hub.http() as http:
        assert statuses(http, "/api/mailbox", 3) == [401, 401, 429]


def test_b3_probes_are_not_limited() -> None:
    blocked = {"limit": "blocked", "authentication": "blocked"}
    with hub_server(Policy(addresses=blocked, limits={"light": "blocked"})) as hub:
        token = hub.register("planner")
        for headers in ({}, {"Authorization": f"Bearer {token}"}, {"Authorization": "Bearer guess"}):
            with hub.http() as http:
                assert http.get("/api/agents", headers=headers).status_code == 429
                assert [http.get(path, headers=headers).status_code for path in PROBES * 20] == [200] * 80
        assert hub.hub.stats.checks.total() == 1, "the agent's one request"
        assert hub.hub.stats.addresses.total() == 2


def test_b3_admins_and_viewers_are_not_limited() -> None:
    nothing = dict.fromkeys(BUILT_IN_TIERS, "blocked")
    with hub_server(Policy(limits=nothing, addresses={"limit": "blocked", "registration": "blocked"})) as hub:
        with hub.http(ADMIN) as admin, hub.http(VIEWER) as viewer:
            assert statuses(admin, "/api/admin/rate-limits", 100) == [200] * 100
            assert [admin.get(path).status_code for path in OPEN] == [200] * len(OPEN)
            assert admin.post("/api/onboard/register", json={"agent_id": "new"}).status_code == 201
            assert admin.post("/api/admin/tasks", json={"payload": 1}).status_code == 201
            assert admin.get("/api/nothing").status_code == 404
            assert statuses(viewer, "/api/dashboard/state", 100) == [200] * 100
            counted = read_metrics(hub)
        assert sum(counted["checks"].values()) == sum(counted["address_checks"].values()) == 0


# What goes wrong -----------------------------------------------------------------------------------------------------


def test_an_account_with_plain_slashes_is_told_how_to_write_them() -> None:
    with hub_server() as hub, hub.http(hub.register("planner")) as http:
        for path in ("/v1/accounts/acme/search", "/api/admin/accounts/acme/search/planner"):
            answer = http.get(path)
            assert answer.status_code == 404
            assert answer.json()["detail"] == (
                "there is no such route; the slashes in the path of an account are written as %2F"
            )


def test_unknown_routes_are_answered_with_404() -> None:
    with hub_server() as hub, hub.http(ADMIN) as http:
        for path in ("/index.html", "/api", "/api//agents", "/API/agents", "/api/agents/x/y", "/%ff", "/ws"):
            answer = http.get(path)
            assert (answer.status_code, answer.headers["content-type"]) == (404, "application/json"), path
            assert answer.json() == {
                "error": "unknown_route",
                "detail": "there is no such route; /openapi.json lists them",
            }


BAD_BODIES = [
    (b"", "body: Input data was truncated"),
    (b"{", "body: Input data was truncated"),
    (b"[]", "body: Expected `object`, got `array`"),
    (b"{}", "body: Object missing required field `to`"),
    (b'{"to": "x"}', "body: Object missing required field `body`"),
    (b'{"to": 1, "body": 1}', "body: Expected `str`, got `int` - at `$.to`"),
    (b'{"to": "", "body": 1}', "body: Expected `str` of length >= 1 - at `$.to`"),
    (b'{"to": "x", "body": 1, "cc": 2}', "body: Object contains unknown field `cc`"),
    (b'{"to": "x", "body": "\xff"}', "body: 'utf-8' codec can't decode byte 0xff in position 21"),
    (b'{"to": "x", "body": ' + b"[" * 30_000, "body: expected JSON nested at most 64 deep"),
]


def test_invalid_bodies_are_refused() -> None:
    with hub_server() as hub, hub.http(hub.register("planner")) as http:
        for body, detail in BAD_BODIES:
            answer = http.post("/api/messages", content=body)
            assert (answer.status_code, answer.json()["error"]) == (400, "invalid")
            assert answer.json()["detail"].startswith(detail)


def test_invalid_queries_and_names_are_refused() -> None:
    with hub_server() as hub, hub.http(hub.register("planner")) as http, hub.http(ADMIN) as admin:
        for client, path, detail in (
            (http, "/api/mailbox?limit=0", "query: Expected `int` >= 1 - at `$.limit`"),
            (http, "/api/mailbox?limit=x", "query: Expected `int`, got `str` - at `$.limit`"),
            (http, "/api/mailbox?limit=1e1", "query: Expected `int`, got `str` - at `$.limit`"),
            (http, "/v1/accounts/-?holds=1.0", "query: Expected `int`, got `str` - at `$.holds`"),
            (http, "/api/mailbox?page=2", "query: Object contains unknown field `page`"),
            (admin, "/api/admin/agents/a%0Ab", "agent: expected 1 to 128 printable characters, got 'a\\nb'"),
        ):
            answer = client.get(path)
            assert (answer.status_code, answer.json()) == (400, {"error": "invalid", "detail": detail})


def test_bodies_have_a_maximum_size() -> None:
    with hub_server() as hub, hub.http(hub.register("planner")) as http:
        hub.register("friend")
        most = json.dumps({"to": "friend", "body": ""}).replace('""', '"' + "x" * (65_536 - 28) + '"').encode()
        assert len(most) == 65_536

        def pieces(body: bytes) -> Iterator[bytes]:  # without a word of how many there will be
            yield from (body[start : start + 1000] for start in range(0, len(body), 1000))

        assert http.post("/api/messages", content=most).status_code == 200
        assert http.post("/api/messages", content=pieces(most)).status_code == 200
        for content in (most + b" ", pieces(most + b" "), b" " * 1_000_000):
            answer = http.post("/api/messages", content=content)
            assert (answer.status_code, answer.headers["content-type"]) == (413, "application/json")
            assert answer.json() == {"error": "too_large", "detail": "expected a body of at most 65536 bytes"}
        assert http.get("/api/mailbox?limit=1").status_code == 200, "the client goes on"


def test_a_body_announced_as_too_large_is_refused_at_once() -> None:
    with hub_server() as hub, hub.connect() as raw:
        head = f"Host: {hub}\r\nAuthorization: Bearer {hub.register('planner')}\r\nContent-Length: 65537\r\n\r\n"
        raw.sendall(f"POST /api/messages HTTP/1.1\r\n{head}".encode())
        assert raw.recv(100).startswith(b"HTTP/1.1 413 ")
