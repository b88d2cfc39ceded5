"""Connections to a hub: identification, limits by address, caps, and slow readers."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from headgate import Policy
from headgate.http import PROBLEM_JSON, ProblemDetails, read_denial
from headgate.hub.api.responses import USED_UP
from headgate.hub.connections.connection import GuardedConnection
from tests.support.agent_connections import (
    BEHIND_A_PROXY,
    VALID,
    overfill,
    proxied_connection,
    read_close,
    read_metrics,
    rejected_handshake,
    remaining_by_tier,
    slow_reader,
)
from tests.support.hub import AgentConnection, HubServer, hub_server
from tests.support.valkey import wait_for

# B2: who is it? ------------------------------------------------------------------------------------------------------


def test_b2_before_identify_nothing_else_is_accepted() -> None:
    with hub_server() as hub:
        token = hub.register("planner")
        for kind in [kind for kind in VALID if kind != "identify"]:
            with hub.socket() as wire:
                answer = wire.ask(kind, id=1, **VALID[kind])
                assert answer == {"type": "error", "id": 1, "error": "not_identified", "detail": "identify first"}
                assert wire.ask("identify", agent_id="planner", token=token)["type"] == "identified"
        counted = read_metrics(hub)
        assert (sum(counted["checks"].values()), counted["messages"], counted["open_sessions"]) == (0, 0, 0)


def test_b2_identify_is_not_charged_to_an_agent() -> None:
    full = {"light": 120, "normal": 60, "heavy": 10}
    with hub_server() as hub, hub.agent("planner"), hub.socket() as stranger:
        assert remaining_by_tier(hub, "planner") == full
        answer = stranger.ask("identify", agent_id="planner", token="guessed", id=1)
        assert answer == {
            "type": "error",
            "id": 1,
            "error": "unauthorized",
            "detail": "there is no such agent with such a token",
        }
        assert stranger.ask("identify", agent_id="nobody", token="guessed", id=1) == answer, "and tells no name"
        assert remaining_by_tier(hub, "planner") == full
        assert not hub.hub.gate.is_rate_limited("planner")


def test_b2_a_connection_that_does_not_identify_within_ten_seconds_is_closed() -> None:
    with hub_server() as hub, hub.socket() as wire:
        assert wire.ask("ping")["error"] == "not_identified"
        hub.clock.advance(9.999)
        assert wire.ask("ping")["error"] == "not_identified", "which gains no time"
        hub.clock.advance(0.001)
        assert read_close(wire) == (1008, "identify within 10 seconds")
        wait_for(lambda: not hub.hub.presence.sockets, "the socket to be gone")


def test_b2_failed_identifies_are_limited_by_address() -> None:
    with hub_server(Policy(addresses={"authentication": "3/minute"}), identify_within=60) as hub:
        token = hub.register("planner")
        with hub.socket() as wire:
            guesses = [wire.ask("identify", agent_id="planner", token="guess", id=n) for n in range(4)]
            assert [guess.get("error", guess["type"]) for guess in guesses] == ["unauthorized"] * 3 + ["rate_limited"]
            assert guesses[3] == {"type": "rate_limited", "tier": "heavy", "retry_after_ms": 20_000, "id": 3}
            assert wire.ask("identify", agent_id="planner", token=token)["type"] == "rate_limited"
            with hub.socket() as other:
                assert other.ask("identify", agent_id="planner", token=token)["type"] == "rate_limited"
            hub.clock.advance(20)
            assert wire.ask("identify", agent_id="planner", token=token)["type"] == "identified"
        assert not hub.hub.gate.is_rate_limited("planner"), "it is nobody's violation"


def test_b2_a_flood_of_connections_is_limited_by_address() -> None:
    with hub_server(Policy(addresses={"connection": "2/minute"})) as hub:
        for _ in range(2):
            with hub.socket():
                pass
        answer = rejected_handshake(hub)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "30")
        assert answer.headers["content-type"] == PROBLEM_JSON
        assert read_denial(answer.content) == ProblemDetails(
            429, "quota-exceeded", f"{USED_UP}; try again in 30 s", 30_000, "heavy", ("address",)
        )
        assert rejected_handshake(hub, "/relay").status_code == 429, "whichever socket it is"
        hub.clock.advance(30)
        with hub.agent("planner") as wire:
            assert wire.ask("ping") == {"type": "pong"}


def test_a11_exempt_addresses_connect_as_often_as_they_like() -> None:
    with hub_server(Policy(addresses={"connection": "1/hour", "exempt": ["127.0.0.0/8"]})) as hub:
        for _ in range(3):
            with hub.socket() as wire:
                assert wire.ask("ping")["error"] == "not_identified"


def test_b3_ipv6_connections_are_counted_by_their_64_bit_prefix() -> None:
    with hub_server(Policy(addresses={"connection": "2/minute"}), **BEHIND_A_PROXY) as hub:
        for address in ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2"):
            with proxied_connection(hub, address):
                pass
        assert rejected_handshake(hub, address="2001:db8:0:1::3").status_code == 429
        with (
            proxied_connection(hub, "2001:db8:0:2::1"),
            proxied_connection(hub, "192.0.2.1"),
            proxied_connection(hub, "::ffff:192.0.2.1"),
        ):
            pass
        assert rejected_handshake(hub, address="192.0.2.1").status_code == 429


def test_the_forwarded_address_is_taken_from_trusted_proxies_only() -> None:
    with hub_server(Policy(addresses={"connection": "1/minute"}), trusted_proxies=("192.0.2.9",)) as hub:
        with proxied_connection(hub, "192.0.2.1"):
            pass
        assert rejected_handshake(hub, address="192.0.2.2").status_code == 429


def test_a_forwarded_address_that_is_invalid_is_refused() -> None:
    with hub_server(**BEHIND_A_PROXY) as hub, hub.http() as http:
        for answer in (
            rejected_handshake(hub, address="unknown"),
            http.get("/api/agents", headers={"X-Forwarded-For": "unknown"}),
        ):
            assert answer.status_code == 400
            assert answer.json() == {"error": "invalid", "detail": "address: expected an IP address, got 'unknown'"}


def test_connections_of_one_address_are_capped() -> None:
    with hub_server(max_connections_per_address=2, **BEHIND_A_PROXY) as hub, ExitStack() as stack:
        for address in ("2001:db8::1", "2001:db8::2", "192.0.2.1"):
            stack.enter_context(proxied_connection(hub, address))
        answer = rejected_handshake(hub, address="2001:db8::3")
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "5")
        assert answer.json() == {
            "error": "too_many_connections",
            "detail": "expected at most 2 connections from 2001:db8::/64; close one, or raise "
            "max_connections_per_address",
        }
        with proxied_connection(hub, "192.0.2.1"):
            assert rejected_handshake(hub, address="192.0.2.1").status_code == 429
        wait_for(lambda: len(hub.hub.presence.sockets) == 3, "one to be gone")
        with proxied_connection(hub, "192.0.2.1") as wire:
            assert wire.ask("ping")["error"] == "not_identified"


def test_connections_of_one_agent_are_capped() -> None:
    with hub_server(max_connections_per_agent=2) as hub, hub.agent("other"):
        token = hub.register("planner")
        with hub.agent("planner", token), hub.agent("planner", token), hub.socket() as third:
            assert third.ask("identify", agent_id="planner", token=token, id=1) == {
                "type": "error",
                "id": 1,
                "error": "too_many_connections",
                "detail": "'planner' has 2 connections, and may have no more",
            }
            assert read_close(third) == (1013, "too many connections of this agent")
            assert len(hub.hub.presence.sockets_of("planner")) == 2
        wait_for(lambda: not hub.hub.presence.is_connected("planner"), "room")
        with hub.agent("planner", token) as wire:
            assert wire.ask("ping") == {"type": "pong"}


def test_total_connections_are_capped() -> None:
    with hub_server(max_connections=2, **BEHIND_A_PROXY) as hub:
        with proxied_connection(hub, "192.0.2.1"), proxied_connection(hub, "192.0.2.2"):
            answer = rejected_handshake(hub, address="192.0.2.3")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
            assert answer.json()["error"] == "too_many_connections"
        wait_for(lambda: not hub.hub.presence.sockets, "both to be gone")
        with proxied_connection(hub, "192.0.2.3") as wire:
            assert wire.ask("ping")["error"] == "not_identified"


# Who doesn't read ----------------------------------------------------------------------------------------------------


@contextmanager
def stuck_connection(hub: HubServer) -> Iterator[AgentConnection]:
    """A connection for which more waits than the kernel takes."""
    with hub.agent("boss") as boss, slow_reader(hub, "slow", hub.register("slow")) as slow:
        overfill(boss, slow)
        yield slow


def open_transports(hub: HubServer) -> int:
    assert hub.server is not None
    return len(hub.server.server_state.connections)


@pytest.mark.parametrize("closes", [False, True])
def test_a_connection_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch, closes: bool) -> None:
    with hub_server(Policy(exempt=["boss"]), max_waiting=2) as hub, stuck_connection(hub) as slow:
        monkeypatch.setattr(GuardedConnection, "write_within", 0.2)
        if closes:
            goodbye = b"\x88\x82" + bytes(4) + (1000).to_bytes(2, "big")
            slow.socket.socket.sendall(goodbye)
        wait_for(lambda: not hub.hub.presence.sockets_of("slow"), "it to be gone")
        wait_for(lambda: open_transports(hub) <= 1, "its socket to be closed")
