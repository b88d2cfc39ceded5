"""Wrong tokens and connects, limited by network address."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from structlog.testing import capture_logs

from headgate import Gate, ManualClock, MemoryStore, Policy
from headgate.errors import StoreAway
from headgate.hub.agents import authentication
from headgate.hub.agents.authentication import Authentication
from headgate.hub.monitoring.address_log import MAX_LINES, AddressLog
from headgate.hub.sockets.agent_socket import MAX_STRANGERS_FRAME
from headgate.limits.decision import Decision
from tests.support.agent_connections import rejected_handshake
from tests.support.hub import ADMIN, VIEWER, HubServer, hub_server

GUESSES = Policy(addresses={"authentication": "3/minute"})
ADDRESS = "192.0.2.1"


class Tokens:
    """Counts the tokens that were looked at."""

    def __init__(self) -> None:
        self.looked_at = 0

    async def right(self) -> str | None:
        self.looked_at += 1
        return "planner"

    async def wrong(self) -> str | None:
        self.looked_at += 1
        return None


@pytest.fixture
def gate(clock: ManualClock) -> Iterator[Gate]:
    with Gate(GUESSES, store=MemoryStore(clock=clock)) as gate:
        yield gate


async def test_b3_once_the_allowance_is_used_up_no_token_is_looked_at(gate: Gate, clock: ManualClock) -> None:
    guard, tokens = Authentication(gate), Tokens()
    answers = [await guard.attempt(ADDRESS, "wrong", tokens.wrong) for _ in range(5)]
    assert [bool(answer) for answer in answers] == [True] * 3 + [False] * 2
    assert not await guard.attempt(ADDRESS, "right", tokens.right)
    assert tokens.looked_at == 3
    assert await guard.attempt("192.0.2.2", "right", tokens.right) == "planner", "another address is not concerned"
    clock.advance(20)
    assert await guard.attempt(ADDRESS, "right", tokens.right) == "planner"
    assert await guard.attempt(ADDRESS, "right", tokens.right) == "planner", "a valid token costs nothing in the end"
    assert isinstance(await guard.attempt(ADDRESS, "wrong", tokens.wrong), Decision)
    assert not await guard.attempt(ADDRESS, "another", tokens.right)


async def test_b3_b7_a_token_that_was_valid_before_from_an_address_is_no_guess(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard, tokens = Authentication(gate), Tokens()
    assert await guard.attempt(ADDRESS, "right", tokens.right) == "planner"
    for _ in range(9):
        await guard.attempt(ADDRESS, "wrong", tokens.wrong)
    assert [await guard.attempt(ADDRESS, "right", tokens.right) for _ in range(9)] == ["planner"] * 9
    assert not await guard.attempt(ADDRESS, "unseen", tokens.right), "one that was not seen there waits"
    for _ in range(9):
        await guard.attempt("192.0.2.2", "wrong", tokens.wrong)
    assert not await guard.attempt("192.0.2.2", "right", tokens.right), "nor one that was seen elsewhere"
    looked_at = tokens.looked_at
    assert not await guard.attempt(ADDRESS, "right", tokens.wrong), "it was revoked"
    assert not await guard.attempt(ADDRESS, "right", tokens.right)
    assert tokens.looked_at == looked_at + 1
    monkeypatch.setattr(authentication, "MAX_KNOWN", 2)
    for token in ("a", "b", "a", "c"):
        assert await guard.attempt("192.0.2.3", token, tokens.right) == "planner"
    for _ in range(9):
        await guard.attempt("192.0.2.3", "wrong", tokens.wrong)
    found = [await guard.attempt("192.0.2.3", token, tokens.right) for token in ("a", "b", "c")]
    assert [one == "planner" for one in found] == [True, False, True]


async def test_b3_b7_a_token_from_many_addresses_displaces_no_other(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authentication, "MAX_KNOWN", 10)
    guard, tokens = Authentication(gate), Tokens()
    assert await guard.attempt(ADDRESS, "admin", tokens.right) == "planner"
    homes = [f"198.51.100.{number}" for number in range(100)]
    for home in (*homes, homes[-8]):
        assert await guard.attempt(home, "roams", tokens.right) == "planner"
    assert sum(len(addresses) for addresses in guard._known.values()) == 9
    for address in (ADDRESS, *homes, "198.51.100.200"):
        for _ in range(9):
            await guard.attempt(address, "wrong", tokens.wrong)
    assert await guard.attempt(ADDRESS, "admin", tokens.right) == "planner"
    assert await guard.attempt("198.51.100.200", "roams", tokens.right) != "planner"
    found = [home for home in homes if await guard.attempt(home, "roams", tokens.right) == "planner"]
    assert found == homes[-8:], "it is known where it was used last"


async def test_b2_any_number_of_agents_authenticate_at_once_from_one_address(gate: Gate) -> None:
    guard, tokens = Authentication(gate), Tokens()
    found = await asyncio.gather(*(guard.attempt(ADDRESS, "right", tokens.right) for _ in range(300)))
    assert found == ["planner"] * 300
    assert gate.check_address(ADDRESS, "authentication").remaining == 2, "nothing was charged"


async def test_b3_guesses_are_limited_while_the_store_is_away(gate: Gate) -> None:
    async def away() -> str | None:
        raise StoreAway("the server is away")

    guard, tokens = Authentication(gate), Tokens()
    for _ in range(3):
        with pytest.raises(StoreAway):
            await guard.attempt(ADDRESS, "away", away)
    assert not await guard.attempt(ADDRESS, "away", away)
    assert not await guard.attempt(ADDRESS, "right", tokens.right)


def test_a_strangers_frame_is_refused_unread_if_it_is_large() -> None:
    with hub_server() as hub, hub.agent("planner") as agent:
        large = {"channel": "general", "body": "x" * MAX_STRANGERS_FRAME}
        assert agent.ask("channel_publish", **large)["type"] == "published"
        with hub.socket() as stranger:
            assert stranger.ask("channel_publish", **large)["error"] == "too_large"


async def test_the_remembered_addresses_are_bounded(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "MAX_SUSPECTS", 10)
    guard, tokens = Authentication(gate), Tokens()
    for number in range(50):
        for _ in range(3):
            await guard.attempt(f"192.0.2.{number}", "wrong", tokens.wrong)
    assert len(guard._suspects) == 10


def test_b3_tokens_are_guessed_at_the_dashboard_at_the_addresses_rate_and_no_faster() -> None:
    with hub_server(GUESSES) as hub:

        def watch(token: str) -> str:
            with hub.socket("/ws/dashboard") as board:
                answer = board.ask("watch", token=token)
                return str(answer.get("error", answer["type"]))

        assert [watch("a-guess-of-the-token") for _ in range(3)] == ["unauthorized"] * 3
        assert [watch(token) for token in ("a-guess-of-the-token", VIEWER, ADMIN)] == ["rate_limited"] * 3
        hub.clock.advance(60)
        assert watch(VIEWER) == "snapshot"


def test_b7_a_public_dashboards_state_is_not_limited() -> None:
    policy = Policy(addresses={"limit": "1/minute"}, limits={"light": "1/minute"})
    with hub_server(policy, public_dashboard=True) as hub, hub.http() as anyone, hub.http(hub.register("a")) as agent:
        for client in (anyone, agent):
            assert [client.get("/api/dashboard/state").status_code for _ in range(5)] == [200] * 5


# Connects ------------------------------------------------------------------------------------------------------------


def identify(hub: HubServer, agent: str, token: str) -> None:
    with hub.agent(agent, token):
        pass


def test_b2_300_agents_behind_one_address_connect_within_a_minute() -> None:
    with hub_server() as hub, ExitStack() as stack:
        for number in range(300):
            stack.enter_context(hub.agent(f"agent-{number}"))
        assert len(hub.hub.presence.agents()) == 300


def test_b2_a_connect_is_given_back_to_an_agent_that_identifies() -> None:
    policy = Policy(addresses={"connection": "2/minute"})
    with hub_server(policy) as hub:
        token = hub.register("planner")
        for _ in range(5):
            identify(hub, "planner", token)
        for _ in range(2):
            with hub.socket():
                pass
        assert rejected_handshake(hub).status_code == 429


def test_b2_each_purpose_has_a_bucket_of_its_own() -> None:
    policy = Policy(addresses=dict.fromkeys(("limit", "registration", "connection", "authentication"), "1/minute"))
    with hub_server(policy) as hub, hub.http() as http:

        def register(name: str) -> int:
            return http.post("/api/onboard/register", json={"agent_id": name}).status_code

        guess = {"Authorization": "Bearer guess"}
        assert [register("a"), register("b")] == [201, 429]
        assert [http.get("/api/agents").status_code for _ in range(2)] == [200, 429]
        assert [http.get("/api/agents", headers=guess).status_code for _ in range(2)] == [401, 429]
        with hub.socket():
            pass
        assert rejected_handshake(hub).status_code == 429


# The log --------------------------------------------------------------------------------------------------------------


def test_b2_denials_by_address_are_logged_once_a_minute_each(clock: ManualClock) -> None:
    policy = Policy(addresses={"limit": "blocked"})
    with Gate(policy, store=MemoryStore(clock=clock)) as gate, capture_logs() as lines:
        log = AddressLog(gate, clock)
        for number in range(MAX_LINES + 5):
            for _ in range(3):
                gate.check_address(f"10.0.0.{number}")
        assert len(lines) == MAX_LINES
        first = {"event": "address denied", "address": "10.0.0.0", "purpose": "request", "log_level": "warning"}
        assert lines[0] == first
        clock.advance(60)
        gate.check_address("10.0.0.0")
        summary = {"denials": 2 * MAX_LINES + 15, "of_further_addresses": 15, "log_level": "warning"}
        assert lines[MAX_LINES:] == [{"event": "addresses denied again", **summary}, first]
        gate.check_address("10.0.0.0")
        log.stop()
        gate.check_address("10.0.0.99")
        assert [line.get("denials") for line in lines[MAX_LINES + 2 :]] == [1], "the last are summed up at the end"
