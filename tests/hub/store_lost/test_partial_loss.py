"""A shared store with older data, or without a part of it, and hubs that share one."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from headgate import RedisStore
from headgate.errors import StoreLost
from tests.support.cluster import steady_cluster
from tests.support.lost_store import (
    OLDER,
    accept_loss,
    dump_keys,
    flush_server,
    hub_on,
    limit_of_planner,
    read_health,
    restore_keys,
    set_override,
    try_to_register,
    wait_until_store_is,
)
from tests.support.valkey import PATIENCE, ValkeyServer, wait_for

pytestmark = pytest.mark.long


# Older data, and missing parts ----------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("change", ["register", "rotate", "revoke", "override"])
def test_a_store_from_an_older_backup_is_lost(own_server: ValkeyServer, tmp_path: Path, change: str) -> None:
    """A stranger could register a name that was taken since, a replaced token would be valid, a limit would be gone."""
    with hub_on(own_server, tmp_path) as hub:
        old = hub.register("eve")
        older = dump_keys(own_server)
        if change == "register":
            hub.register("bank")
        elif change == "rotate":
            hub.run(hub.hub.registry.rotate("eve"))
        elif change == "revoke":
            hub.run(hub.hub.registry.revoke("eve"))
        else:
            assert set_override(hub) == 200
        newer = dump_keys(own_server)
        flush_server(own_server)
        restore_keys(own_server, older)
        wait_until_store_is(hub, "lost")
        wait_for(lambda: read_health(hub)["problems"][0].startswith(OLDER), "the probe")
        assert (try_to_register(hub, "bank"), set_override(hub, "8/minute")) == ((503, "store_lost"), 503)
        with hub.http(old) as caller:
            assert caller.get("/api/mailbox").json()["error"] == "store_lost"
        assert limit_of_planner(hub) == ("7/minute" if change == "override" else "10/minute")
    with hub_on(own_server, tmp_path) as hub:
        assert read_health(hub)["store"] == "lost", "after a restart as well"
        restore_keys(own_server, newer)
        wait_until_store_is(hub, "ok")


def test_what_was_seen_right_before_a_stop_counts_too(
    own_server: ValkeyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.hub.app._PROBE_INTERVAL", 3600.0)
    with hub_on(own_server, tmp_path) as hub:
        older = dump_keys(own_server)
        hub.register("bank")
    flush_server(own_server)
    restore_keys(own_server, older)
    with hub_on(own_server, tmp_path) as hub:
        assert try_to_register(hub, "bank") == (503, "store_lost")


@pytest.mark.long
@pytest.mark.parametrize("part", ["{agents}1:tokens", "{agents}1:names", "{agents}1:changes", "changes"])
def test_a_part_of_the_data_that_is_missing_is_noticed(own_server: ValkeyServer, tmp_path: Path, part: str) -> None:
    with hub_on(own_server, tmp_path) as hub:
        hub.register("bank")
        hub.run(hub.hub.registry.rotate("bank"))
        assert set_override(hub) == 200
        with own_server.client() as client:
            assert client.delete(f"headgate-admin:{part}") == 1
        changed = set_override(hub, "8/minute") if part == "changes" else try_to_register(hub, "bank")[0]
        assert changed == 503, "before the next probe"
        wait_until_store_is(hub, "lost")
        wait_for(lambda: read_health(hub)["problems"][0].startswith(OLDER), "the probe")
    with hub_on(own_server, tmp_path) as hub:
        assert read_health(hub)["store"] == "lost"


def test_an_older_store_can_be_accepted(own_server: ValkeyServer, tmp_path: Path) -> None:
    with hub_on(own_server, tmp_path / "one") as one, hub_on(own_server, tmp_path / "two") as two:
        old = one.register("eve")
        older = dump_keys(own_server)
        one.register("bank")
        for hub in (one, two):
            wait_for(lambda hub=hub: hub.hub.store_guard._saved[1].agents == 2, "the probe")  # type: ignore[misc]
        restore_keys(own_server, older)
        for hub in (one, two):
            wait_until_store_is(hub, "lost")
        with ThreadPoolExecutor() as admins:
            answers = list(admins.map(lambda hub: accept_loss(hub, "drop"), [one, two, one, two]))
        assert sum(answer["accepted"] for _, answer in answers) == 2
        for hub in (one, two):
            assert hub.run(hub.hub.registry.verify("eve", old)), "it has the agents of the backup"
        assert try_to_register(two, "bank") == (201, "")
        assert one.hub.store_guard._saved[0] == two.hub.store_guard._saved[0]


def test_numbers_that_cannot_be_read_are_seen_anew(own_server: ValkeyServer, tmp_path: Path) -> None:
    with hub_on(own_server, tmp_path) as hub:
        hub.register("bank")
        change = "UPDATE settings SET value = 'many' WHERE name = 'store_seen'"
        wait_for(lambda: hub.hub.store_guard._saved[1].agents == 1, "the probe")
        assert hub.run(hub.hub.database.run(lambda db: db.execute(change).rowcount)) == 1
    with hub_on(own_server, tmp_path) as hub:
        assert read_health(hub)["store"] == "ok"
        wait_for(lambda: hub.hub.store_guard._saved[1].agents == 1, "the probe")


# Several hubs ---------------------------------------------------------------------------------------------------------


def test_hubs_adopt_the_generation_of_the_first(own_server: ValkeyServer, tmp_path: Path) -> None:
    with hub_on(own_server, tmp_path / "one") as one, hub_on(own_server, tmp_path / "two") as two:
        token = one.register("bank")
        assert two.run(two.hub.registry.verify("bank", token))
        flush_server(own_server)
        assert try_to_register(one, "bank") == (503, "store_lost")
        assert try_to_register(two, "bank") == (503, "store_lost")
        assert accept_loss(one, "drop")[0] == 200
        assert try_to_register(one, "bank") == (201, "")
        wait_until_store_is(two, "lost")
        assert try_to_register(two, "clerk") == (503, "store_lost"), "until it is accepted there as well"
        assert accept_loss(two, "drop")[0] == 200
        assert read_health(one)["store"] == read_health(two)["store"] == "ok"
        assert try_to_register(two, "clerk") == (201, "")
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
        assert try_to_register(hub, "bank") == (503, "store_lost")
        assert accept_loss(hub, "drop")[0] == 200
        wait_until_store_is(hub, "ok")
        assert try_to_register(hub, "bank") == (201, "")


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
            wait_for(lambda: read_health(hub)["problems"] == [part], "the probe")
            assert try_to_register(hub, "clerk") == (503, "store_lost")
            assert limit_of_planner(hub) == "7/minute"
            assert accept_loss(hub, "keep")[0] == 200
            assert set_override(hub, "8/minute") == 200
