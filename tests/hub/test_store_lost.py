"""A shared store that comes back empty, or is another one: nobody gets the identity of another."""

import asyncio
import json
import os
import re
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from socket import SHUT_RDWR
from textwrap import dedent
from typing import Any, Final
from uuid import uuid4

import pytest
from msgspec import Raw
from websockets.exceptions import ConnectionClosed

from headgate import Policy, RedisStore
from headgate.cli import main
from headgate.errors import StoreAway, StoreLost
from headgate.gate.reload import reload_file
from headgate.hub.api import admin_hub_routes
from headgate.hub.sockets.frames import Message
from tests.support.agent_connections import send_hello
from tests.support.cluster import steady_cluster
from tests.support.hub import ADMIN, HubServer, hub_server
from tests.support.valkey import DURABLE, PATIENCE, ValkeyServer, wait_for

OVERRIDE = "/api/admin/rate-limits/planner"
OLDER = "the server's data is older than what this hub has seen, or a part of it is lost"
LOST = "the server has lost its data, or is another, empty one"

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _frequent_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let hubs notice a loss at once."""
    monkeypatch.setattr("headgate.hub.app._PROBE_INTERVAL", 0.05)


@contextmanager
def hub_on(server: ValkeyServer | str, data: Path | None = None, **settings: Any) -> Iterator[HubServer]:
    """A hub whose store is on a server."""
    url = server if isinstance(server, str) else server.url
    with RedisStore(url, timeout=PATIENCE) as store, hub_server(store=store, data=data, **settings) as hub:
        yield hub


@pytest.fixture
def hub(own_server: ValkeyServer, tmp_path: Path) -> Iterator[HubServer]:
    with hub_on(own_server, tmp_path) as hub:
        yield hub


def flush(server: ValkeyServer) -> None:
    with server.client() as client:
        client.flushall()


def health(hub: HubServer) -> dict[str, Any]:
    with hub.http() as anyone:
        found: dict[str, Any] = anyone.get("/health").json()
        return found


def wait_until_store_is(hub: HubServer, state: str) -> None:
    wait_for(lambda: health(hub)["store"] == state, f"a store that is {state}")


def lose_data(server: ValkeyServer, hub: HubServer) -> None:
    """Let a server lose everything, and the hub notice it."""
    flush(server)
    wait_until_store_is(hub, "lost")


def lose_and_accept(server: ValkeyServer, hub: HubServer, agent_data: str = "drop") -> None:
    lose_data(server, hub)
    assert accept(hub, agent_data)[0] == 200


def register(hub: HubServer, agent: str) -> tuple[int, str]:
    """Try to register as a stranger: the status, and the error if there is one."""
    with hub.http() as stranger:
        answer = stranger.post("/api/onboard/register", json={"agent_id": agent})
        return answer.status_code, answer.json().get("error", "")


def set_override(hub: HubServer, limit: str = "7/minute") -> int:
    with hub.http(ADMIN) as admin:
        return admin.put(OVERRIDE, json={"heavy": limit}).status_code


def limit_of_planner(hub: HubServer) -> str:
    return str(hub.hub.gate.limits_for("planner", "ws", "heavy"))


def accept(hub: HubServer, agent_data: str) -> tuple[int, dict[str, Any]]:
    with hub.http(ADMIN) as admin:
        answer = admin.post("/api/admin/store/accept", json={"agent_data": agent_data})
        return answer.status_code, answer.json()


# The loss -------------------------------------------------------------------------------------------------------------


def test_a_stranger_cannot_take_a_name_right_after_a_flush(own_server: ValkeyServer, hub: HubServer) -> None:
    """No probe has noticed anything yet: the script itself compares the generations."""
    hub.register("bank")
    flush(own_server)
    assert register(hub, "bank") == (503, "store_lost")
    with own_server.client() as client:
        assert not client.keys("*agents*")


def test_a_token_is_not_called_wrong_right_after_a_flush(own_server: ValkeyServer, hub: HubServer) -> None:
    """A client would give up a token that is nobody's; this one may be good again after a restore."""
    with hub.http(hub.register("bank")) as bank:
        flush(own_server)
        assert bank.get("/api/mailbox").json()["error"] == "store_lost"


def test_nothing_of_the_admin_part_is_written_after_a_flush(own_server: ValkeyServer, hub: HubServer) -> None:
    with hub.http(ADMIN) as admin:
        hub.register("bank")
        flush(own_server)
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
    assert (health(hub)["status"], health(hub)["problems"]) == ("ok", [])
    lose_data(own_server, hub)
    problem = f"{LOST}: nobody can register or hold, and limits can't be changed"
    assert (health(hub)["status"], health(hub)["problems"]) == ("degraded", [problem])
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
            flush(own_server)
            assert hold("three") == (503, "store_lost")
            assert change("extend", lease=60) == change("extend", costs={"usd": 1}) == (503, "store_lost")
            assert change("extend", lease=0) == change("settle") == change("cancel") == (404, "unknown_hold")
            assert not hub.hub.gate.list_holds("acme")
        assert accept(hub, "keep")[0] == 200
        with hub.http(hub.register("planner")) as planner:
            assert planner.post("/v1/holds", json={"costs": {"usd": 6}}).status_code == 201


def test_overrides_stay_in_effect_after_a_flush(own_server: ValkeyServer, hub: HubServer) -> None:
    assert set_override(hub) == 200
    flush(own_server)
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
    assert register(hub, "bank") == (503, "store_lost")
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
    flush(own_server)
    with hub_on(own_server, tmp_path) as hub:
        assert health(hub)["store"] == "lost"
        assert register(hub, "bank") == (503, "store_lost")


def test_another_store_is_not_the_one_that_the_hub_knows(own_server: ValkeyServer, tmp_path: Path) -> None:
    with ValkeyServer() as other, hub_on(other) as of_others:
        token = of_others.register("bank")
        assert set_override(of_others) == 200
        with hub_on(own_server, tmp_path):
            pass
        with hub_on(other, tmp_path) as hub:
            (problem,) = health(hub)["problems"]
            assert problem.startswith("the server has the data of other hubs: it is another one, or its data was repl")
            assert register(hub, "clerk") == (503, "store_lost")
            assert limit_of_planner(hub) == "10/minute", "changes of others are not taken over"
            with hub.http(token) as caller:
                assert caller.get("/api/mailbox").json()["error"] == "store_lost", "nor are their agents"


def test_a_hub_without_a_data_directory_knows_its_store_while_it_runs(own_server: ValkeyServer) -> None:
    with hub_on(own_server) as hub:
        flush(own_server)
        assert register(hub, "bank") == (503, "store_lost")
    with hub_on(own_server) as hub:
        assert register(hub, "bank") == (201, "")


def test_a_server_that_was_away_at_the_start_is_known_when_it_comes(own_server: ValkeyServer, tmp_path: Path) -> None:
    own_server.kill()
    with RedisStore(own_server.url) as store, hub_server(store=store, data=tmp_path) as hub:
        own_server.start()
        wait_for(lambda: store.generation.expected, "the generation")
        flush(own_server)
        assert register(hub, "bank") == (503, "store_lost")


def test_the_relay_refuses_unknown_agents_and_ends_the_others_when_the_store_is_accepted(
    own_server: ValkeyServer,
) -> None:
    with hub_on(own_server) as hub, hub.socket("/relay") as known, hub.socket("/relay") as unknown:
        token, other = hub.register("known"), hub.register("unknown")
        assert send_hello(known, "known", token).WhichOneof("payload") == "welcome"
        lose_data(own_server, hub)
        assert send_hello(unknown, "unknown", other).error.code == "store_lost"
        assert accept(hub, "keep")[0] == 200
        with pytest.raises(ConnectionClosed, match="1008"):
            known.socket.recv(PATIENCE)


def test_a_policy_is_not_reloaded_without_the_changes_to_it(own_server: ValkeyServer, tmp_path: Path) -> None:
    file = tmp_path / "headgate.toml"
    file.write_text('[limits]\nheavy = "3/minute"\n')
    with hub_on(own_server) as hub:
        assert set_override(hub) == 200
        flush(own_server)
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
            assert register(hub, "ada") == (503, "unavailable")
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
    assert first_answer(lambda: register(hub, "ada")[0]) == 409


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
        assert register(hub, "eve") == (503, "unavailable")
        with hub.socket("/relay") as relay:
            assert send_hello(relay, "planner", token).error.code == "unavailable"
        assert admin.post("/api/admin/agents", json={"agent_id": "ada"}).status_code == 503
        assert admin.get("/api/admin/rate-limits").status_code == 200  # the built-in admin is known
    assert first_answer(lambda: register(hub, "eve")[0]) == 201
    assert hub.run(hub.hub.registry.verify("planner", token))


# Older data, and missing parts ----------------------------------------------------------------------------------------


def dump(server: ValkeyServer) -> dict[bytes, bytes]:
    """A backup."""
    with server.client() as client:
        return {key: client.dump(key) for key in client.keys("*admin*")}


def restore(server: ValkeyServer, backup: dict[bytes, bytes]) -> None:
    with server.client() as client:
        for key, value in backup.items():
            client.restore(key, 0, value, replace=True)


@pytest.mark.long
@pytest.mark.parametrize("change", ["register", "rotate", "revoke", "override"])
def test_a_store_from_an_older_backup_is_lost(own_server: ValkeyServer, tmp_path: Path, change: str) -> None:
    """A stranger could register a name that was taken since, a replaced token would be valid, a limit would be gone."""
    with hub_on(own_server, tmp_path) as hub:
        old = hub.register("eve")
        older = dump(own_server)
        if change == "register":
            hub.register("bank")
        elif change == "rotate":
            hub.run(hub.hub.registry.rotate("eve"))
        elif change == "revoke":
            hub.run(hub.hub.registry.revoke("eve"))
        else:
            assert set_override(hub) == 200
        newer = dump(own_server)
        flush(own_server)
        restore(own_server, older)
        wait_until_store_is(hub, "lost")
        wait_for(lambda: health(hub)["problems"][0].startswith(OLDER), "the probe")
        assert (register(hub, "bank"), set_override(hub, "8/minute")) == ((503, "store_lost"), 503)
        with hub.http(old) as caller:
            assert caller.get("/api/mailbox").json()["error"] == "store_lost"
        assert limit_of_planner(hub) == ("7/minute" if change == "override" else "10/minute")
    with hub_on(own_server, tmp_path) as hub:
        assert health(hub)["store"] == "lost", "after a restart as well"
        restore(own_server, newer)
        wait_until_store_is(hub, "ok")


def test_what_was_seen_right_before_a_stop_counts_too(
    own_server: ValkeyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.hub.app._PROBE_INTERVAL", 3600.0)
    with hub_on(own_server, tmp_path) as hub:
        older = dump(own_server)
        hub.register("bank")
    flush(own_server)
    restore(own_server, older)
    with hub_on(own_server, tmp_path) as hub:
        assert register(hub, "bank") == (503, "store_lost")


@pytest.mark.long
@pytest.mark.parametrize("part", ["{agents}1:tokens", "{agents}1:names", "{agents}1:changes", "changes"])
def test_a_part_of_the_data_that_is_missing_is_noticed(own_server: ValkeyServer, tmp_path: Path, part: str) -> None:
    with hub_on(own_server, tmp_path) as hub:
        hub.register("bank")
        hub.run(hub.hub.registry.rotate("bank"))
        assert set_override(hub) == 200
        with own_server.client() as client:
            assert client.delete(f"headgate-admin:{part}") == 1
        changed = set_override(hub, "8/minute") if part == "changes" else register(hub, "bank")[0]
        assert changed == 503, "before the next probe"
        wait_until_store_is(hub, "lost")
        wait_for(lambda: health(hub)["problems"][0].startswith(OLDER), "the probe")
    with hub_on(own_server, tmp_path) as hub:
        assert health(hub)["store"] == "lost"


def test_an_older_store_can_be_accepted(own_server: ValkeyServer, tmp_path: Path) -> None:
    with hub_on(own_server, tmp_path / "one") as one, hub_on(own_server, tmp_path / "two") as two:
        old = one.register("eve")
        older = dump(own_server)
        one.register("bank")
        for hub in (one, two):
            wait_for(lambda hub=hub: hub.hub.store_guard._saved[1].agents == 2, "the probe")  # type: ignore[misc]
        restore(own_server, older)
        for hub in (one, two):
            wait_until_store_is(hub, "lost")
        with ThreadPoolExecutor() as admins:
            answers = list(admins.map(lambda hub: accept(hub, "drop"), [one, two, one, two]))
        assert sum(answer["accepted"] for _, answer in answers) == 2
        for hub in (one, two):
            assert hub.run(hub.hub.registry.verify("eve", old)), "it has the agents of the backup"
        assert register(two, "bank") == (201, "")
        assert one.hub.store_guard._saved[0] == two.hub.store_guard._saved[0]


def test_numbers_that_cannot_be_read_are_seen_anew(own_server: ValkeyServer, tmp_path: Path) -> None:
    with hub_on(own_server, tmp_path) as hub:
        hub.register("bank")
        change = "UPDATE settings SET value = 'many' WHERE name = 'store_seen'"
        wait_for(lambda: hub.hub.store_guard._saved[1].agents == 1, "the probe")
        assert hub.run(hub.hub.database.run(lambda db: db.execute(change).rowcount)) == 1
    with hub_on(own_server, tmp_path) as hub:
        assert health(hub)["store"] == "ok"
        wait_for(lambda: hub.hub.store_guard._saved[1].agents == 1, "the probe")


# Several hubs ---------------------------------------------------------------------------------------------------------


def test_hubs_adopt_the_generation_of_the_first(own_server: ValkeyServer, tmp_path: Path) -> None:
    with hub_on(own_server, tmp_path / "one") as one, hub_on(own_server, tmp_path / "two") as two:
        token = one.register("bank")
        assert two.run(two.hub.registry.verify("bank", token))
        flush(own_server)
        assert register(one, "bank") == (503, "store_lost")
        assert register(two, "bank") == (503, "store_lost")
        assert accept(one, "drop")[0] == 200
        assert register(one, "bank") == (201, "")
        wait_until_store_is(two, "lost")
        assert register(two, "clerk") == (503, "store_lost"), "until it is accepted there as well"
        assert accept(two, "drop")[0] == 200
        assert health(one)["store"] == health(two)["store"] == "ok"
        assert register(two, "clerk") == (201, "")
        assert one.register("teller"), "both have the same generation"
        hub_knows = [hub.run(hub.hub.registry.knows(name)) for hub in (one, two) for name in ("bank", "clerk")]
        assert hub_knows == [True] * 4


@pytest.mark.long
@pytest.mark.parametrize(
    "kept", [(), ("beside_agents",), ("beside_changes",), ("beside_agents", "beside_changes")], ids=len
)
def test_hubs_that_accept_at_the_same_time_agree_on_the_generation(
    own_server: ValkeyServer, kept: tuple[str, ...]
) -> None:
    async def accept_all(stores: list[RedisStore]) -> None:
        generations = [store.generation for store in stores]
        for generation in generations:
            await generation.claim()
        for another in map(str, range(20)):
            with own_server.client() as client:
                old = client.get(generations[0].beside_changes)
                client.flushall()
                for name in kept:  # both: as they were, but by then they are another's
                    client.set(getattr(generations[0], name), another if len(kept) == 2 else old)
            accepted = await asyncio.gather(*[generation.accept() for generation in generations])
            assert len(set(accepted)) == 1
            for generation in generations:
                generation.expected = accepted[0]
                await generation.check()
                assert await generation.accept() == "", "it isn't lost any more"

    with ExitStack() as stack:
        asyncio.run(accept_all([stack.enter_context(RedisStore(own_server.url, timeout=PATIENCE)) for _ in range(4)]))


def test_an_acceptance_that_was_interrupted_is_completed_by_the_next(own_server: ValkeyServer) -> None:
    async def use(store: RedisStore) -> None:
        generation = store.generation
        await generation.claim()
        with own_server.client() as client:
            client.set(generation.beside_changes, "new:abc")
            with pytest.raises(StoreLost):
                await generation.check()
            assert await generation.accept() == "abc"
            assert client.get(generation.beside_changes) == client.get(generation.beside_agents) == b"abc"

    with RedisStore(own_server.url, timeout=PATIENCE) as store:
        asyncio.run(use(store))


def test_half_a_generation_is_lost_until_it_is_accepted(own_server: ValkeyServer, tmp_path: Path) -> None:
    """As a hub leaves it that is killed between its two writes."""
    with hub_on(own_server, tmp_path / "first"):
        pass
    with own_server.client() as client:
        client.delete("headgate-admin:{agents}1:generation")
    with hub_on(own_server, tmp_path / "second") as hub:
        wait_until_store_is(hub, "lost")
        assert register(hub, "bank") == (503, "store_lost")
        assert accept(hub, "drop")[0] == 200
        wait_until_store_is(hub, "ok")
        assert register(hub, "bank") == (201, "")


@pytest.mark.long
def test_a_part_of_a_cluster_that_is_lost_is_noticed(tmp_path: Path) -> None:
    with steady_cluster() as nodes:
        url = f"redis+cluster://127.0.0.1:{nodes[0].port}"
        with hub_on(url, tmp_path) as hub:
            hub.register("bank")
            assert set_override(hub) == 200
            for node in nodes:
                with node.client() as client:
                    if client.keys("*admin:changes"):
                        client.flushall()
            assert set_override(hub, "8/minute") == 503
            part = "a part of the server's data is lost: nobody can register or hold, and limits can't be changed"
            wait_for(lambda: health(hub)["problems"] == [part], "the probe")
            assert register(hub, "clerk") == (503, "store_lost")
            assert limit_of_planner(hub) == "7/minute"
            assert accept(hub, "keep")[0] == 200
            assert set_override(hub, "8/minute") == 200


# The end --------------------------------------------------------------------------------------------------------------


def test_a_store_that_has_its_data_again_needs_nothing_else(
    own_server: ValkeyServer, hub: HubServer, logged: list[Any]
) -> None:
    token = hub.register("bank")
    assert set_override(hub) == 200
    saved = dump(own_server)
    lose_data(own_server, hub)
    restore(own_server, saved)
    wait_until_store_is(hub, "ok")
    assert hub.run(hub.hub.registry.verify("bank", token))
    assert register(hub, "bank") == (409, "exists")
    assert set_override(hub, "8/minute") == 200
    assert limit_of_planner(hub) == "8/minute"
    assert [line for line in logged if line["event"] == "the store has its data again"]


def test_accepting_lets_agents_register_again_and_closes_the_old_connections(
    own_server: ValkeyServer, tmp_path: Path
) -> None:
    with hub_on(own_server, tmp_path) as hub:
        assert set_override(hub) == 200
        old = hub.register("bank")
        with hub.agent("bank", old) as bank, hub.agent("clerk") as clerk:
            lose_data(own_server, hub)
            assert accept(hub, "keep") == (200, {"accepted": True, "store": "ok", "problems": []})
            for agent in (bank, clerk):
                with pytest.raises(ConnectionClosed, match="1008"):
                    agent.hear()
        assert not hub.run(hub.hub.registry.verify("bank", old))
        assert register(hub, "bank") == (201, "")
        assert limit_of_planner(hub) == "10/minute", "the store has no overrides"
        assert set_override(hub) == 200
    with hub_on(own_server, tmp_path) as hub:
        assert health(hub)["store"] == "ok", "the new generation was saved"


@pytest.mark.parametrize("choice", ["keep", "drop"])
def test_data_of_agents_is_kept_or_dropped_as_the_admin_says(
    own_server: ValkeyServer, hub: HubServer, choice: str
) -> None:
    bank = hub.register("bank")
    signal = {"type": "a", "entity": "b", "weight": 1, "timestamp": 1}
    with hub.http(ADMIN) as admin, hub.http(bank) as http, hub.agent("clerk") as clerk:
        assert clerk.ask("message", to="bank", body="secret")["delivered"] is False
        admin.post("/api/admin/signals", json={"agent_id": "bank", "session": "s", "signal": signal})
        task = http.post("/api/tasks", json={"payload": "secret"}).json()["task_id"]
        lose_and_accept(own_server, hub, choice)
        token = admin.post("/api/admin/agents", json={"agent_id": "bank"}).json()["token"]
        with hub.http(token) as stranger:
            found = [
                len(stranger.get("/api/mailbox").json()["messages"]),
                len(stranger.get("/api/sessions/s/signals").json()["signals"]),
                len(stranger.get("/api/tasks").json()["tasks"]),
            ]
        assert found == ([1, 1, 1] if choice == "keep" else [0, 0, 0])
        assert [one["task_id"] for one in admin.get("/api/admin/tasks").json()["tasks"]] == [task], "not the work"


@pytest.mark.parametrize("choice", ["keep", "drop"])
def test_sessions_and_chat_channels_are_kept_or_dropped_as_the_admin_says(
    own_server: ValkeyServer, tmp_path: Path, choice: str
) -> None:
    with hub_on(own_server, tmp_path) as hub:
        bank = hub.register("bank")
        with hub.http(bank) as http, hub.agent("bank", bank) as agent:
            assert http.post("/api/channels", json={"name": "plans"}).status_code == 201
            assert agent.ask("session_open", session="s", rate=1, burst=5)["type"] == "session_opened"
            lose_and_accept(own_server, hub, choice)
        assert use_old_session_and_channel(hub) == (
            ["signal_logged", "plans"] if choice == "keep" else ["session_closed", "forbidden"]
        )
        assert hub.hub.sessions.open_sessions == (choice == "keep")
    with hub_on(own_server, tmp_path) as hub:
        assert hub.hub.sessions.open_sessions == (choice == "keep"), "after a restart as well"
        channels, _ = hub.hub.messages.chat_channels(10)
        assert [(one.name, one.creator) for one in channels][1:] == ([] if choice == "keep" else [("plans", "")])


def use_old_session_and_channel(hub: HubServer) -> list[str]:
    """What becomes of a signal in the session of the old bank, and of a deletion of its chat channel."""
    signal = {"type": "a", "entity": "b", "weight": 1, "timestamp": 1}
    with hub.http(ADMIN) as admin:
        token = admin.post("/api/admin/agents", json={"agent_id": "bank"}).json()["token"]
    with hub.http(token) as http, hub.agent("bank", token) as agent:
        logged = agent.ask("session_signal", session="s", signal=signal)
        deleted = http.delete("/api/channels/plans").json()
        return [logged.get("error", logged["type"]), deleted.get("error", deleted.get("name"))]


def test_the_next_owner_of_a_name_has_not_held_the_tasks_of_the_last(own_server: ValkeyServer, hub: HubServer) -> None:
    with hub.http(ADMIN) as admin, hub.agent("bank") as bank:
        task = admin.post("/api/admin/tasks", json={"payload": 1}).json()["task_id"]
        assert bank.hear()["task_id"] == task
        bank.ask("task_accepted", task_id=task)
        lose_and_accept(own_server, hub)
        wait_for(lambda: hub.hub.scheduler.counts()["queued"], "the task")
        assert hub.hub.scheduler._open[task].holder is None
        query = "SELECT creator, agent FROM tasks"
        assert hub.run(hub.hub.database.run(lambda db: db.execute(query).fetchall())) == [("", None)]


def test_the_next_owner_of_a_name_has_the_whole_share_of_an_agent(own_server: ValkeyServer) -> None:
    with hub_on(own_server, max_counters=1, max_tasks_per_agent=1) as hub:

        def use_up(token: str, keys: str) -> list[int]:
            with hub.http(token) as http:
                checks = [http.post("/v1/check", json={"key": key, "window_ms": 31_536_000_000}) for key in keys]
                return [answer.status_code for answer in checks] + [
                    http.post("/api/tasks", json={"payload": 1}).status_code for _ in range(2)
                ]

        assert use_up(hub.register("bank"), "ab") == [200, 409, 201, 409]
        lose_and_accept(own_server, hub)
        assert use_up(hub.register("bank"), "cd") == [200, 409, 201, 409]


def test_undelivered_messages_in_memory_are_dropped_too(own_server: ValkeyServer, hub: HubServer) -> None:
    """The disk was full when a connection ended, so its messages wait for the disk."""
    hub.register("bank")
    messages = hub.hub.messages
    messages._unwritten["bank"] = [Message(sender="clerk", body=Raw(b'"secret"'), at=1.0)]
    lose_and_accept(own_server, hub)
    hub.run(messages._flush())
    assert hub.run(messages.waiting("bank")) == 0


@pytest.mark.long
def test_unsent_messages_do_not_reach_the_next_owner(own_server: ValkeyServer, tmp_path: Path) -> None:
    """They go into the mailbox when the connection of the old one ends, which is before the mailboxes are emptied."""
    body = Raw(b'"' + b"x" * 500_000 + b'"')
    with hub_on(own_server, tmp_path) as hub, hub.agent("bank") as bank:
        (socket,) = hub.hub.presence.sockets_of("bank")
        while hub.run(hub.hub.messages.waiting("bank")) < 20:  # the queue is full, since nobody reads
            hub.run(hub.hub.messages.send("clerk", "bank", body))
        assert socket.queued
        lose_and_accept(own_server, hub)
        assert hub.run(hub.hub.messages.waiting("bank")) == 0
        bank.socket.socket.shutdown(SHUT_RDWR)  # it would wait for the hub's close, behind all that it hasn't read


def test_a_store_is_not_accepted_while_a_connection_stays_open(
    own_server: ValkeyServer, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_hub_routes, "_LEAVE_WITHIN", 0.05)
    with hub.agent("clerk") as clerk:
        hub.register("bank")
        lose_data(own_server, hub)
        busy, release = threading.Event(), threading.Event()

        def work(_db: sqlite3.Connection) -> None:
            busy.set()
            release.wait(PATIENCE)

        async def keep_database_busy() -> None:
            hub.hub.messages._background.spawn(hub.hub.database.run(work))

        hub.run(keep_database_busy())
        assert busy.wait(PATIENCE)
        try:
            clerk.say("channel_publish", channel="general", body=1)
            wait_for(hub.hub.presence.sockets_of("clerk")[0].busy.locked, "the frame")
            status, answer = accept(hub, "drop")
            assert (status, answer["error"]) == (503, "unavailable")
            assert answer["detail"] == "some agents' connections are still open; try again in a moment"
            assert health(hub)["store"] == "lost"
        finally:
            release.set()
        monkeypatch.undo()
        assert accept(hub, "drop")[0] == 200


def test_admins_who_accept_at_the_same_time_start_one_generation(own_server: ValkeyServer, tmp_path: Path) -> None:
    with hub_on(own_server, tmp_path / "one") as one, hub_on(own_server, tmp_path / "two") as two:
        for _ in range(3):
            flush(own_server)
            for hub in (one, two):
                wait_until_store_is(hub, "lost")
            with ThreadPoolExecutor() as admins:
                answers = list(admins.map(lambda hub: accept(hub, "drop"), [one, one, one, two, two]))
            assert [status for status, _ in answers] == [200] * 5
            accepted = [answer["accepted"] for _, answer in answers]
            assert (sum(accepted[:3]), sum(accepted[3:])) == (1, 1), "there was nothing left to accept for the others"
            assert one.hub.store_guard._saved[0] == two.hub.store_guard._saved[0]
            assert [register(hub, f"agent-{uuid4()}") for hub in (one, two)] == [(201, "")] * 2


class EventAtAcceptance:
    """Something happens while an acceptance waits until the agents have left."""

    def __init__(self, hub: HubServer, monkeypatch: pytest.MonkeyPatch, happen: Callable[[], object]) -> None:
        self._happen: Final = happen
        self._drop_all: Final = hub.hub.agent_sockets.drop_all
        monkeypatch.setattr(hub.hub.agent_sockets, "drop_all", self)

    async def __call__(self, within: float) -> bool:
        left = await self._drop_all(within)
        await asyncio.to_thread(self._happen)
        return left


def test_a_store_that_has_its_data_again_meanwhile_is_not_accepted(
    own_server: ValkeyServer, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub.agent("clerk") as clerk:
        hub.register("bank")
        assert clerk.ask("message", to="bank", body="secret")["delivered"] is False
        saved = dump(own_server)
        lose_data(own_server, hub)
        EventAtAcceptance(hub, monkeypatch, lambda: restore(own_server, saved))
        assert accept(hub, "drop") == (200, {"accepted": False, "store": "ok", "problems": []})
        assert hub.run(hub.hub.messages.waiting("bank")) == 1
        assert register(hub, "bank") == (409, "exists")


def test_nothing_is_dropped_if_the_store_cannot_be_accepted(
    own_server: ValkeyServer, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub.agent("clerk") as clerk:
        hub.register("bank")
        assert clerk.ask("message", to="bank", body="secret")["delivered"] is False
        lose_data(own_server, hub)
        with monkeypatch.context() as until_here:
            EventAtAcceptance(hub, until_here, own_server.kill)
            status, answer = accept(hub, "drop")
        assert (status, answer["error"]) == (503, "unavailable")
        assert hub.run(hub.hub.messages.waiting("bank")) == 1
        own_server.start()
        wait_until_store_is(hub, "lost")
        assert accept(hub, "drop")[1]["accepted"]
        assert hub.run(hub.hub.messages.waiting("bank")) == 0


@pytest.mark.parametrize("step", ["messages.drop_agent_data", "gate.areload"])
def test_a_store_stays_lost_until_every_step_of_the_acceptance_is_done(
    own_server: ValkeyServer, hub: HubServer, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Otherwise the admin couldn't accept it again, and a stranger could inherit, or old limits stay in effect."""
    assert set_override(hub) == 200
    lose_data(own_server, hub)

    async def fail(*_: object, **__: object) -> None:
        raise StoreAway("out of order")

    with monkeypatch.context() as until_here:
        part, name = step.split(".")
        until_here.setattr(getattr(hub.hub, part), name, fail)
        assert accept(hub, "drop")[0] == 503
    assert register(hub, "bank") == (503, "store_lost")
    assert accept(hub, "drop") == (200, {"accepted": True, "store": "ok", "problems": []})
    assert limit_of_planner(hub) == "10/minute"


def test_nobody_is_verified_from_memory_once_the_admin_wants_to_accept_the_store(own_server: ValkeyServer) -> None:
    """Otherwise the old agent could connect again until the store is accepted, and stay beside the next one."""
    with hub_on(own_server) as hub:
        token = hub.register("bank")
        assert hub.run(hub.hub.registry.verify("bank", token))
        flush(own_server)
        assert hub.run(hub.hub.registry.verify("bank", token))

        async def forget() -> None:
            hub.hub.registry.forget_verified()

        hub.run(forget())
        with pytest.raises(StoreLost):
            hub.run(hub.hub.registry.verify("bank", token))


def test_a_request_of_the_last_owner_is_not_carried_out_in_the_name_of_the_next(own_server: ValkeyServer) -> None:
    with hub_on(own_server) as hub:
        bank, clerk = hub.register("bank"), hub.register("clerk")
        with hub.unfinished_post(bank, "/api/messages", {"to": "clerk", "body": "pay the last owner"}) as request:
            lose_and_accept(own_server, hub)
            clerk = hub.register("clerk")
            assert request.finish() == 401
        with hub.http(clerk) as reader:
            assert reader.get("/api/mailbox").json() == {"messages": []}


def test_there_is_nothing_to_accept_unless_the_store_is_lost(hub: HubServer) -> None:
    with hub.agent("planner") as planner:
        wait_for(lambda: hub.hub.store_guard._saved[1].agents == 1, "the probe")
        before = hub.hub.store_guard._saved
        assert accept(hub, "drop") == (200, {"accepted": False, "store": "ok", "problems": []})
        assert planner.ask("ping")["type"] == "pong"
        assert hub.hub.store_guard._saved == before
    with hub_server() as hub:
        assert accept(hub, "drop") == (200, {"accepted": False, "store": "memory", "problems": []})
        with hub.http(ADMIN) as admin:
            assert admin.get("/api/admin/store").json() == {"store": "memory", "problems": [], "address": ""}
            refused = admin.post("/api/admin/store/accept", json={})
            assert refused.json()["detail"] == "body: Object missing required field `agent_data`"


def test_the_command_shows_and_resolves_the_loss(
    own_server: ValkeyServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    logged: list[Any],
) -> None:
    monkeypatch.setenv("HEADGATE_ADMIN_TOKEN", ADMIN)
    with hub_on(own_server, tmp_path) as hub:
        monkeypatch.setenv("HEADGATE_HUB", f"http://{hub}")
        assert main(["store"]) == 0
        assert capsys.readouterr().out == "the store has its data\n"
        lose_data(own_server, hub)
        assert main(["store"]) == 1
        problem = f"{LOST}: nobody can register or hold, and limits can't be changed"
        remedy = "restore it, or: headgate store accept --agent-data drop|keep (docs: A store that lost its data)"
        assert capsys.readouterr().out == f"the store is lost\n{problem}\n{remedy}\n"
        assert main(["store", "--json"]) == 1
        assert json.loads(capsys.readouterr().out) == {"store": "lost", "address": "", "problems": [problem]}
        with pytest.raises(SystemExit) as ended:
            main(["store", "accept"])
        assert ended.value.code == 2
        assert "--agent-data" in capsys.readouterr().err
        assert main(["store", "accept", "--agent-data", "drop", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"accepted": True, "store": "ok", "problems": []}
        assert main(["store", "accept", "--agent-data", "drop"]) == 0
        assert capsys.readouterr().out == "the store has its data: there was nothing to accept\n"


def test_the_script_of_the_docs_sets_saved_limits_again(own_server: ValkeyServer, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "hub-shared-store.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^ +```python\n(.*?)^ +```$", page, re.DOTALL | re.MULTILINE)
    limits, exempt = "/api/admin/rate-limits", "/api/admin/rate-limits/whitelist"
    with hub_on(own_server, tmp_path / "data") as hub, hub.http(ADMIN) as admin:
        admin.put(f"{limits}/defaults", json={"heavy": "7/minute", "ws": {"light": "blocked"}, "session": "9/second"})
        admin.put(f"{limits}/a%2Fb", json={"normal": ["60/minute", "5/second burst 2"], "session": "unlimited"})
        admin.put(f"{limits}/na%C3%AFve", json={"http": {"light": "unlimited"}})
        admin.put(exempt, json={"agents": ["monitor", "a/b"]})
        saved = [admin.get(path).json() for path in (limits, exempt)]
        (tmp_path / "limits.json").write_text(json.dumps(saved[0]))
        (tmp_path / "exempt.json").write_text(json.dumps(saved[1]))
        lose_and_accept(own_server, hub, "keep")
        assert admin.get(limits).json() != saved[0]
        variables = os.environ | {"HEADGATE_HUB": f"http://{hub}", "HEADGATE_ADMIN_TOKEN": ADMIN, "no_proxy": "*"}
        command = [sys.executable, "-c", dedent(script)]
        subprocess.run(command, cwd=tmp_path, env=variables, timeout=PATIENCE, check=True)
        assert [admin.get(path).json() for path in (limits, exempt)] == saved


def test_a_revocation_counts_on_an_accepted_server_whose_clock_is_behind(
    own_server: ValkeyServer, hub: HubServer
) -> None:
    """Changes of tokens have times that only go forward, but only within one server's data."""
    with hub.http(ADMIN) as admin:
        hub.register("planner")
        with own_server.client() as client:  # once its clock was ahead, all later changes are
            (names,) = client.keys("*{agents}*:names")
            client.zadd(names.replace(b":names", b":changes"), {"writer": 2**52})
        admin.post("/api/admin/agents/planner/token").raise_for_status()
        lose_data(own_server, hub)
        assert accept(hub, "keep")[1]["accepted"]
        with hub.agent("planner", hub.register("planner")) as wire:
            admin.delete("/api/admin/agents/planner/token").raise_for_status()
            with pytest.raises(ConnectionClosed, match="revoked or replaced"):
                wire.hear()
