"""Requests that other web sites make through somebody's browser."""

from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from headgate.hub.api.allowed_hosts import AllowedHosts
from headgate.hub.api.routes import ROUTES
from headgate.hub.errors import RequestError
from tests.support.hub import ADMIN, HubServer, hub_server
from tests.support.valkey import PATIENCE

SOCKETS = ("/ws", "/relay", "/ws/dashboard")
PROBES = ("/live", "/ready", "/health", "/api/health")
WRITING = sorted({route.method for route in ROUTES} - {"GET"})


def handshake(hub: HubServer, path: str, *, host: str | None = None, origin: str | None = None) -> int:
    """The status of the answer to a handshake."""
    headers = {} if host is None else {"Host": host}
    try:
        with connect(
            f"ws://{hub}{path}",
            compression=None,
            proxy=None,
            open_timeout=PATIENCE,
            origin=origin,  # type: ignore[arg-type]
            additional_headers=headers,
        ):
            return 101
    except InvalidStatus as error:
        return error.response.status_code


# Host -----------------------------------------------------------------------------------------------------------------


def test_a_page_whose_name_was_pointed_at_the_hub_reads_nothing() -> None:
    with hub_server(public_dashboard=True) as hub, hub.http() as http:
        for path in ("/api/dashboard/state", "/dashboard", "/api/agents", "/openapi.json", "/nowhere"):
            answer = http.get(path, headers={"Host": "evil.example"})
            assert (answer.status_code, answer.json()["error"]) == (421, "unknown_host"), path
            assert "'evil.example'; list it with --allowed-hosts" in answer.json()["detail"]
        assert [http.get(path, headers={"Host": "evil.example"}).status_code for path in PROBES] == [200] * 4


def test_a_request_to_an_unknown_host_changes_nothing_and_counts_nothing() -> None:
    with hub_server() as hub, hub.http(ADMIN) as http:
        answer = http.post("/api/onboard/register", json={"agent_id": "planner"}, headers={"Host": "evil.example"})
        assert answer.status_code == 421
        assert http.get("/api/admin/agents").json()["agents"] == []
        assert hub.hub.stats.addresses.total() == 0


@pytest.mark.parametrize("path", SOCKETS)
def test_sockets_ask_for_a_known_host_too(path: str) -> None:
    with hub_server(public_dashboard=True) as hub:
        assert handshake(hub, path, host="evil.example") == 421
        assert handshake(hub, path, host=f"localhost:{hub.port}") == 101


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:80",
        "a.localhost",
        "127.0.0.1:9",
        "192.0.2.1",
        "[::1]:8080",
        "hub.example",
        "hub.example.",
    ],
)
def test_loopback_names_ip_addresses_and_listed_hosts_are_known(host: str) -> None:
    AllowedHosts(("hub.example",)).check_host([(b"host", host.encode())])


@pytest.mark.parametrize("host", ["", "evil.example", "hub.example.evil.example", "xhub.example", "127.0.0.1.a"])
def test_other_hosts_are_unknown(host: str) -> None:
    with pytest.raises(RequestError, match="expected a host that the hub knows"):
        AllowedHosts(("hub.example",)).check_host([(b"host", host.encode())])


def test_a_second_host_header_does_not_hide_the_first() -> None:
    for hosts in ((b"evil.example", b"localhost"), (b"localhost", b"evil.example")):
        with pytest.raises(RequestError):
            AllowedHosts(()).check_host([(b"host", host) for host in hosts])


def test_a_wildcard_lists_all_hosts_below_a_domain_and_a_star_any() -> None:
    below = AllowedHosts(("*.hub.example",))
    below.check_host([(b"host", b"a.b.hub.example")])
    with pytest.raises(RequestError):
        below.check_host([(b"host", b"evilhub.example")])
    AllowedHosts(("*",)).check_host([(b"host", b"evil.example")])


def test_a_client_without_a_host_is_no_browser() -> None:
    AllowedHosts(()).check_host([])


# Origin ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SOCKETS)
@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:1", "http://127.0.0.1"])
def test_no_page_of_another_site_opens_a_socket(path: str, origin: str) -> None:
    with hub_server(public_dashboard=True) as hub:
        assert handshake(hub, path, origin=origin) == 403
        assert handshake(hub, path, origin=f"http://{hub}") == handshake(hub, path) == 101


@pytest.mark.parametrize("method", WRITING)
@pytest.mark.parametrize("media", ["application/json", "text/plain", "application/x-www-form-urlencoded", None])
def test_no_page_of_another_site_writes(method: str, media: str | None) -> None:
    headers = {"Origin": "https://evil.example"} | ({} if media is None else {"Content-Type": media})
    with hub_server() as hub, hub.http(ADMIN) as http:
        for route in (route for route in ROUTES if route.method == method):
            answer = http.request(method, route.path.replace("{", "").replace("}", ""), headers=headers, content=b"{}")
            assert (answer.status_code, answer.json()["error"]) == (403, "foreign_origin"), route.path
        assert hub.hub.stats.checks.total() == 0


def test_a_cross_site_form_registers_no_agent_while_curl_does() -> None:
    body = b'{"agent_id": "planner"}'
    with hub_server() as hub, hub.http() as http:

        def register(**headers: str) -> int:
            found: httpx.Response = http.post("/api/onboard/register", content=body, headers=headers)
            return found.status_code

        form = {"Content-Type": "text/plain"}
        assert register(**form, Origin="https://evil.example") == 403
        assert register(**form, **{"Sec-Fetch-Site": "cross-site"}) == 403
        assert register(**form, **{"Sec-Fetch-Site": "same-site"}) == 403
        assert register(**{"Content-Type": "application/x-www-form-urlencoded"}) == 201, "as curl -d does"


def test_the_hubs_own_page_writes_and_so_does_one_of_a_listed_host() -> None:
    with hub_server(allowed_hosts=("hub.example",)) as hub, hub.http(ADMIN) as http:
        for origin in (f"http://{hub}", "https://hub.example", "https://hub.example:8443"):
            answer = http.post(
                "/api/admin/rate-limits/whitelist", json={"agent_id": "monitor"}, headers={"Origin": origin}
            )
            assert answer.status_code == 200, origin
            assert handshake(hub, "/ws/dashboard", origin=origin) == 101


# What an operator is told -------------------------------------------------------------------------------


def test_an_unknown_host_is_logged_once_and_ten_of_them_at_most() -> None:
    with capture_logs() as lines:
        hosts = AllowedHosts(())
        for _ in range(2):
            for number in range(20):
                with pytest.raises(RequestError):
                    hosts.check_host([(b"host", b"host-%d" % number)])
    assert [line["host"] for line in lines] == [f"host-{number}" for number in range(10)]


def test_an_ignored_forwarded_address_is_logged_once(logged: list[Any]) -> None:
    with hub_server() as hub, hub.http() as http:
        for _ in range(2):
            http.get("/api/agents", headers={"X-Forwarded-For": "192.0.2.1"})
    lines = [line for line in logged if "X-Forwarded-For is ignored" in line["event"]]
    assert [line["sender"] for line in lines] == ["127.0.0.1"]
