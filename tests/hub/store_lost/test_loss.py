"""A shared store that comes back empty, or is another one: nobody gets the identity of another."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from headgate import Policy, RedisStore
from headgate.errors import StoreAway
from headgate.gate.reload import reload_file
from tests.support.agent_connections import send_hello
from tests.support.hub import ADMIN, HubServer, hub_server
from tests.support.lost_store import (
    LOST,
    OVERRIDE,
    accept_loss,
    flush_server,
    hub_on,
    limit_of_planner,
    lose_data,
    read_health,
    set_override,
    try_to_register,
    wait_until_store_is,
)
from tests.support.valkey import DURABLE, PATIENCE, ValkeyServer, wait_for

pytestmark = pytest.mark.long


# The loss -------------------------------------------------------------------------------------------------------------


def test_a_stranger_cannot_take_a_name_right_after_a_flush(own_server: ValkeyServer, hub: HubServer) -> None:
    """No probe has noticed anything yet: the script itself compares the generations."""
    hub.register("bank")
    flush_server(own_server)
    assert try_to_register(hub, "bank") == (503, "store_lost")
    with own_server.client() as client:
        assert not client.keys("*agents*")


def test_a_token_is_not_called_wrong_right_after_a_flush(own_server: ValkeyServer, hub: HubServer) -> None:
    """A client would give up a token that is nobody's; this one may be good again after a restore."""
    with hub.http(hub.register("bank")) as bank:
        flush_server(own_server)
        assert bank.get("/api/mailbox").json()["error"] == "store_lost"


def test_nothing_of_the_admin_part_is_written_after_a_flush(own_server: ValkeyServer, hub: HubServer) -> None:
    with hub.http(ADMIN) as admin:
        hub.register("bank")
        flush_server(own_server)
        calls = [
            ("POST", "/api/admin/agents", {"agent_id": "bank"}),
            ("POST", "/api/admin/agents/bank/token", None),
            ("DELETE", "/api/admin/agents/bank/token", None),
            ("POST", "/api/admin/invitations", None),
            ("GET", "/api/admin/agents", None),
            ("PUT", OVERRIDE, {"heavy": "1/minute"}),
            ("PUT", "/api/admin/rate-limits/defaults", {"heavy": "1/minute"}),
            ("POST", "/api/admin/rate-limits/whitelist", {"agent_id": "bank"}),
            ("GET", "/api/admin/changes", None),
        ]
        for method, path, body in calls:
            answer = admin.request(method, path, json=body)
            assert (path, answer.status_code, answer.json()["error"]) == (path, 503, "store_lost")
        with own_server.client() as client:
            assert not client.keys("*admin*")


def test_health_the_dashboard_and_metrics_tell_of_the_loss(
    own_server: ValkeyServer, hub: HubServer, logged: list[Any]
) -> None:
    assert (read_health(hub)["status"], read_health(hub)["problems"]) == ("ok", [])
    lose_data(own_server, hub)
    problem = f"{LOST}: nobody can register or hold, and limits can't be changed"
    assert (read_health(hub)["status"], read_health(hub)["problems"]) == ("degraded", [problem])
    with hub.http(ADMIN) as admin:
        assert admin.get("/ready").status_code == 200, "it still decides"
        summary = admin.get("/api/dashboard/state").json()["summary"]
        assert (summary["store"], summary["problems"]) == ("lost", [problem])
        assert admin.get("/api/admin/store").json() == {"store": "lost", "problems": [problem], "address": ""}
        assert "headgate_store_lost 1.0" in admin.get("/metrics").text
    hub.run(hub.hub.store_guard.probe())
    lines = [line for line in logged if line["event"].startswith("the store is lost")]
    assert [(line["log_level"], line["reason"]) for line in lines] == [("error", LOST)], "logged once"


def test_a_budget_is_not_granted_again_until_the_loss_is_accepted(own_server: ValkeyServer, tmp_path: Path) -> None:
    accounts = {"at": {"acme": {"usd": "10/calendar month"}}}
    with hub_on(own_server, tmp_path, policy=Policy(accounts=accounts, agents={"planner": {"account": "acme"}})) as hub:
        with hub.http(hub.register("planner")) as planner, ThreadPoolExecutor() as pool:

            def hold(hold_id: str, **options: Any) -> tuple[int, str]:
                answer = planner.post("/v1/holds", json={"id": hold_id, "costs": {"usd": 6}, **options})
                return answer.status_code, answer.json().get("error", "")

            def change(verb: str, **body: Any) -> tuple[int, str]:
                answer = planner.post(f"/v1/holds/one/{verb}", json=body or None)
                return answer.status_code, answer.json().get("error", "")

            assert hold("one") == (201, "")
            waiting = pool.submit(hold, "two", timeout=30)
            wait_for(lambda: hub.hub.gate._hold_queues.queues, "the second hold to wait")
            with own_server.client() as client:
                client.delete(*client.keys("*:generation"))
            wait_until_store_is(hub, "lost")
            assert waiting.result(PATIENCE) == (503, "store_lost")
            assert change("settle", costs={"usd": 5}) == (200, "")
            flush_server(own_server)
            assert hold("three") == (503, "store_lost")
            assert change("extend", lease=60) == change("extend", costs={"usd": 1}) == (503, "store_lost")
            assert change("extend", lease=0) == change("settle") == change("cancel") == (404, "unknown_hold")
            assert not hub.hub.gate.list_holds("acme")
        assert accept_loss(hub, "keep")[0] == 200
        with hub.http(hub.register("planner")) as planner:
            assert planner.post("/v1/holds", json={"costs": {"usd": 6}}).status_code == 201


def test_overrides_stay_in_effect_after_a_flush(own_server: ValkeyServer, hub: HubServer) -> None:
    assert set_override(hub) == 200
    flush_server(own_server)
    assert set_override(hub, "8/minute") == 503
    assert limit_of_planner(hub) == "7/minute"


@pytest.mark.long
def test_overrides_stay_in_effect_after_a_restart_without_persistence(own_server: ValkeyServer, hub: HubServer) -> None:
    assert set_override(hub) == 200
    own_server.restart()
    wait_until_store_is(hub, "lost")
    with own_server.client() as client:  # the hub listens again, and has asked for the changes that it may have missed
        wait_for(lambda: client.pubsub_numsub("headgate-admin:changes")[0][1], "the follower")
    assert set_override(hub, "8/minute") == 503
    assert try_to_register(hub, "bank") == (503, "store_lost")
    assert limit_of_planner(hub) == "7/minute"


def test_agents_that_the_hub_has_verified_go_on_and_others_are_refused(
    own_server: ValkeyServer, hub: HubServer
) -> None:
    known, unknown = hub.register("known"), hub.register("unknown")
    with hub.agent("known", known) as agent:
        lose_data(own_server, hub)
        assert agent.ask("ping")["type"] == "pong"
        with hub.agent("known", known) as again:
            assert again.ask("ping")["type"] == "pong"
        with hub.socket() as socket:
            assert socket.ask("identify", agent_id="unknown", token=unknown)["error"] == "store_lost"
        with hub.http(unknown) as caller:
            assert caller.get("/api/mailbox").json()["error"] == "store_lost"
        with hub.http(known) as caller:
            assert caller.get("/api/mailbox").status_code == 200
        with hub.http("hg_wrong") as caller:
            assert caller.get("/api/mailbox").json()["error"] == "store_lost"


def test_a_hub_that_starts_on_a_lost_store_says_so(own_server: ValkeyServer, tmp_path: Path) -> None:
    with hub_on(own_server, tmp_path) as hub:
        hub.register("bank")
    flush_server(own_server)
    with hub_on(own_server, tmp_path) as hub:
        assert read_health(hub)["store"] == "lost"
        assert try_to_register(hub, "bank") == (503, "store_lost")


def test_another_store_is_not_the_one_that_the_hub_knows(own_server: ValkeyServer, tmp_path: Path) -> None:
    with ValkeyServer() as other, hub_on(other) as of_others:
        token = of_others.register("bank")
        assert set_override(of_others) == 200
        with hub_on(own_server, tmp_path):
            pass
        with hub_on(other, tmp_path) as hub:
            (problem,) = read_health(hub)["problems"]
            assert problem.startswith("the server has the data of other hubs: it is another one, or its data was repl")
            assert try_to_register(hub, "clerk") == (503, "store_lost")
            assert limit_of_planner(hub) == "10/minute", "changes of others are not taken over"
            with hub.http(token) as caller:
                assert caller.get("/api/mailbox").json()["error"] == "store_lost", "nor are their agents"


def test_a_hub_without_a_data_directory_knows_its_store_while_it_runs(own_server: ValkeyServer) -> None:
    with hub_on(own_server) as hub:
        flush_server(own_server)
        assert try_to_register(hub, "bank") == (503, "store_lost")
    with hub_on(own_server) as hub:
        assert try_to_register(hub, "bank") == (201, "")


def test_a_server_that_was_away_at_the_start_is_known_when_it_comes(own_server: ValkeyServer, tmp_path: Path) -> None:
    own_server.kill()
    with RedisStore(own_server.url) as store, hub_server(store=store, data=tmp_path) as hub:
        own_server.start()
        wait_for(lambda: store.generation.expected, "the generation")
        flush_server(own_server)
        assert try_to_register(hub, "bank") == (503, "store_lost")


def test_the_relay_refuses_unknown_agents_and_ends_the_others_when_the_store_is_accepted(
    own_server: ValkeyServer,
) -> None:
    with hub_on(own_server) as hub, hub.socket("/relay") as known, hub.socket("/relay") as unknown:
        token, other = hub.register("known"), hub.register("unknown")
        assert send_hello(known, "known", token).WhichOneof("payload") == "welcome"
        lose_data(own_server, hub)
        assert send_hello(unknown, "unknown", other).error.code == "store_lost"
        assert accept_loss(hub, "keep")[0] == 200
        with pytest.raises(ConnectionClosed, match="1008"):
            known.socket.recv(PATIENCE)


def test_a_policy_is_not_reloaded_without_the_changes_to_it(own_server: ValkeyServer, tmp_path: Path) -> None:
    file = tmp_path / "headgate.toml"
    file.write_text('[limits]\nheavy = "3/minute"\n')
    with hub_on(own_server) as hub:
        assert set_override(hub) == 200
        flush_server(own_server)
        assert not reload_file(hub.hub.gate, file), "it is logged, and the watcher of the file goes on"
        assert limit_of_planner(hub) == "7/minute"


# Away at the start ----------------------------------------------------------------------------------------------------


@pytest.fixture
def away_at_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[ValkeyServer, HubServer, str]]:
    """A hub that was started without its server, which has a role of ada, and planner, who is blocked; its token."""
    monkeypatch.setattr("headgate.stores.redis.changelog._RETRY", PATIENCE)  # the follower comes too late
    with ValkeyServer(*DURABLE) as server:
        with hub_on(server, tmp_path) as hub:
            token = hub.register("planner")
            hub.hub.gate.set_role("ada", "admin")  # as if the agents were lost, and the changes were not
            hub.hub.gate.block("planner")
        server.kill()
        with hub_on(server, tmp_path) as hub:
            assert not hub.hub.gate.changes_read
            assert try_to_register(hub, "ada") == (503, "unavailable")
            yield server, hub, token


def first_answer(ask: Callable[[], int]) -> int:
    """The first status that isn't 503, when the store is back."""
    found = [503]

    def answered() -> bool:
        found.append(ask())
        return found[-1] != 503

    wait_for(answered, "an answer")
    return found[-1]


def test_b6_blocks_and_roles_hold_from_the_first_request_after_a_start_without_the_store(
    away_at_the_start: tuple[ValkeyServer, HubServer, str],
) -> None:
    server, hub, token = away_at_the_start
    server.start()
    with hub.http(token) as planner:
        assert first_answer(lambda: planner.get("/api/tasks").status_code) == 429
    assert first_answer(lambda: try_to_register(hub, "ada")[0]) == 409


def test_b6_nobody_is_known_until_the_changes_were_read(
    away_at_the_start: tuple[ValkeyServer, HubServer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, hub, token = away_at_the_start
    server.start()

    def away(_after: int = 0) -> Any:
        raise StoreAway("the changes can't be read")

    with monkeypatch.context() as patch, hub.http(token) as planner, hub.http(ADMIN) as admin:
        patch.setattr(hub.hub.gate._log, "read", away)
        for path in ("/api/tasks", "/api/mailbox"):
            assert planner.get(path).json()["error"] == "unavailable"
        assert try_to_register(hub, "eve") == (503, "unavailable")
        with hub.socket("/relay") as relay:
            assert send_hello(relay, "planner", token).error.code == "unavailable"
        assert admin.post("/api/admin/agents", json={"agent_id": "ada"}).status_code == 503
        assert admin.get("/api/admin/rate-limits").status_code == 200  # the built-in admin is known
    assert first_answer(lambda: try_to_register(hub, "eve")[0]) == 201
    assert hub.run(hub.hub.registry.verify("planner", token))
