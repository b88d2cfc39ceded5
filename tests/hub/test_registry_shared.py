"""Agents' tokens in a server that several hubs share: changes by others, and outages."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest

from headgate import StoreAway
from headgate.hub.agents.registry import Registry
from headgate.stores.redis import agents as module
from tests.support.cluster import steady_cluster
from tests.support.event_loop import take_turns, wait_until
from tests.support.refusals import request_error
from tests.support.registry import redis_registry, revocations
from tests.support.valkey import DURABLE, ValkeyServer


@pytest.fixture
def prefix() -> str:
    return f"test-{uuid4().hex}:"


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    """A server of its own, to be killed or stopped, that forgets nothing."""
    with ValkeyServer(*DURABLE) as server:
        yield server


# Several hubs over one server -----------------------------------------------------------------------------------------


async def test_two_hubs_know_the_same_agents_and_hear_of_each_others_changes(
    redis_server: ValkeyServer, prefix: str
) -> None:
    async with redis_registry(redis_server.url, prefix) as one, redis_registry(redis_server.url, prefix) as other:
        heard = {"one": revocations(one), "other": revocations(other)}
        token = await one.register("a")
        assert await other.verify("a", token)
        assert await other.owner(token) == "a"
        assert await request_error(other.register("a")) == (409, "exists")
        both = await asyncio.gather(
            *[hub.register("b") for hub in (one, other) for _ in range(25)], return_exceptions=True
        )
        assert sum(isinstance(result, str) for result in both) == 1
        new = await one.rotate("a")
        assert not await other.verify("a", token)
        assert await other.verify("a", new)
        await other.revoke("a")
        assert not await one.verify("a", new)
        await one.revoke("b")
        await wait_until(lambda: heard["one"] == ["a", "a", "b"], "what the one hears")
        await wait_until(lambda: heard["other"] == ["a", "a", "b"], "what the other hears")


async def test_hubs_under_other_prefixes_have_other_agents(redis_server: ValkeyServer, prefix: str) -> None:
    async with redis_registry(redis_server.url, prefix) as one, redis_registry(redis_server.url, prefix + "x") as other:
        token = await one.register("a")
        assert not await other.verify("a", token)
        await other.register("a")


async def test_revocations_missed_while_disconnected_are_announced_once(
    redis_server: ValkeyServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PAGE", 2)
    monkeypatch.setattr(module, "_POLL_AFTER", 3600)
    async with redis_registry(redis_server.url, prefix) as one, redis_registry(redis_server.url, prefix) as other:
        heard = revocations(one)
        for name in "abcdef":
            await other.register(name)
        await other.revoke("a")
        await wait_until(lambda: heard == ["a"], "the first revocation")
        roll: Any = one._store
        await roll.close()  # it hears no more
        for name in "bcdef":
            await other.rotate(name)
        await other.rotate("b")
        await one.rotate("c")  # one's own is told at once
        assert heard == ["a", "c"]
        roll._follower = asyncio.create_task(roll._follow())
        await wait_until(lambda: len(heard) == 6, "what was missed")
        await other.revoke("f")
        await wait_until(lambda: len(heard) == 7, "what comes after it")
        assert heard == ["a", "c", "d", "e", "f", "b", "f"]


async def test_changes_are_polled_when_a_connection_dies_silently(
    redis_server: ValkeyServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_POLL_AFTER", 0.05)
    async with redis_registry(redis_server.url, prefix) as one:
        heard = revocations(one)
        await one.register("a")
        with redis_server.client() as client:  # a change of which no message comes
            client.zadd(f"{prefix.rstrip(':')}-admin:{{agents}}1:changes", {"a": 5e15})
        await wait_until(lambda: heard == ["a"], "what nobody said")


async def test_a_token_revoked_during_its_lookup_is_invalid(redis_server: ValkeyServer, prefix: str) -> None:
    """The news may come before the answer: whoever relied on that would have missed them."""
    async with redis_registry(redis_server.url, prefix) as registry:
        roll: Any = registry._store
        ask, revoke = roll._ask, registry.revoke
        for name, look_up in (("a", registry.verify), ("b", lambda _name, token: registry.owner(token))):
            token = await registry.register(name)

            async def ask_and_revoke(work: Any, name: str = name) -> Any:
                answer = await ask(work)
                roll._ask = ask
                await revoke(name)
                return answer

            roll._ask = ask_and_revoke
            assert not await look_up(name, token)


@pytest.mark.parametrize("turns", range(24))
async def test_closing_ends_the_follower_wherever_it_is(redis_server: ValkeyServer, prefix: str, turns: int) -> None:
    async with redis_registry(redis_server.url, prefix) as registry:
        await take_turns(turns)
    agents: Any = registry._store
    assert agents._follower.done()


@pytest.mark.long
async def test_agents_in_a_cluster() -> None:
    with steady_cluster() as nodes:
        url = f"redis+cluster://127.0.0.1:{nodes[0].port},127.0.0.1:{nodes[1].port}"
        async with redis_registry(url, "hubs:") as one, redis_registry(url, "hubs:") as other:
            heard = revocations(one)
            token = await one.register("a")
            assert await other.verify("a", token)
            assert await other.owner(token) == "a"
            assert [registered.agent for registered in await other.agents()] == ["a"]
            await other.revoke("a")
            await wait_until(lambda: heard == ["a"], "the revocation")


# The server is away ---------------------------------------------------------------------------------------------------


async def test_during_an_outage_only_known_agents_are_verified(server: ValkeyServer) -> None:
    async with redis_registry(server.url, "hubs:") as one, redis_registry(server.url, "hubs:") as other:
        heard = revocations(one)
        known, unseen = await one.register("known"), await one.register("unseen")
        rotated, revoked = await one.register("rotated"), await one.register("revoked")
        by_token = await one.register("by-token")
        for name, token in (("known", known), ("rotated", rotated), ("revoked", revoked)):
            assert await one.verify(name, token)
        assert await one.owner(by_token) == "by-token"
        await other.rotate("rotated")
        await other.revoke("revoked")
        await wait_until(lambda: heard == ["rotated", "revoked"], "the news")
        server.kill()
        assert await one.verify("known", known)
        assert (await one.owner(known), await one.owner(by_token)) == ("known", "by-token")
        assert await one.verify("by-token", by_token)
        assert await one.knows("known")
        for away in (
            one.verify("known", unseen),
            one.verify("unseen", unseen),
            one.verify("rotated", rotated),
            one.verify("revoked", revoked),
            one.owner(revoked),
            one.owner("nobody's"),
            one.knows("unseen"),
            one.register("new"),
            one.rotate("known"),
            one.revoke("known"),
            one.invite(),
            one.agents(),
        ):
            with pytest.raises(StoreAway):
                await away
        server.start()
        await wait_until(lambda: server_answers(one, "known", known), "the server")
        assert not await one.verify("revoked", revoked)
        assert await one.verify("unseen", unseen)
        await wait_until(lambda: server_answers(other, "known", known), "the server")
        heard.clear()
        await other.revoke("known")
        await wait_until(lambda: heard == ["known"], "the news, over another connection")
        assert not await one.verify("known", known)


async def server_answers(registry: Registry, agent: str, token: str) -> bool:
    """Whether the server answers again."""
    try:
        return [one.agent for one in await registry.agents()] != [] and await registry.verify(agent, token)
    except StoreAway:
        return False


async def test_a_refused_token_is_not_verified_during_an_outage(server: ValkeyServer) -> None:
    async with redis_registry(server.url, "hubs:") as registry:
        roll: Any = registry._store
        tokens = {name: await registry.register(name) for name in "ab"}
        for name, token in tokens.items():
            assert await registry.verify(name, token)
        assert not await registry.verify("a", tokens["b"])  # which harms neither
        assert roll._verified.digest_of("a") is not None
        with server.client() as client:  # a change that nobody hears of
            client.flushall()
        assert not await registry.verify("a", tokens["a"])
        assert roll._verified.digest_of("b") is not None
        assert await registry.owner(tokens["b"]) is None
        server.kill()
        for name, token in tokens.items():
            with pytest.raises(StoreAway):
                await registry.verify(name, token)


async def test_the_cache_is_bounded_to_the_latest_agents(
    redis_server: ValkeyServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_REMEMBERED", 3)
    async with redis_registry(redis_server.url, prefix) as registry:
        roll: Any = registry._store
        tokens = {name: await registry.register(name) for name in "abcde"}
        for name in "abcade":
            assert await registry.verify(name, tokens[name])
        assert list(roll._verified._digests) == ["a", "d", "e"]
        assert sorted(roll._verified._owners.values()) == ["a", "d", "e"]
        for name in "abcde":
            await registry.rotate(name)
        assert list(roll._reported) == ["c", "d", "e"]
        assert (len(roll._verified._digests), len(roll._verified._owners)) == (0, 0)


@asynccontextmanager
async def impatient_registry(server: ValkeyServer, agent: str) -> AsyncIterator[tuple[Registry, str]]:
    """A registry that doesn't wait long for the server, and has just verified an agent by the token."""
    async with redis_registry(server.url, "hubs:") as patient:
        token = await patient.register(agent)
    async with redis_registry(server.url, "hubs:", timeout=0.25) as registry:
        await wait_until(
            lambda: server_answers(registry, agent, token), "the server, as soon as the machine is quick enough"
        )
        yield registry, token


async def test_a_server_that_hangs_does_not_delay_every_caller(server: ValkeyServer) -> None:
    async with impatient_registry(server, "a") as (registry, token):
        roll: Any = registry._store
        client, asked = roll._clients.aclient, []

        async def note_lookup() -> Any:
            asked.append(True)
            return await client()

        server.signal(signal.SIGSTOP)
        roll._clients.aclient = note_lookup
        answers = await asyncio.gather(*[registry.verify("a", token) for _ in range(500)])
        assert answers == [True] * 500
        assert 1 <= len(asked) < 100  # as many as ask at the same time, and now and then one more
        server.signal(signal.SIGCONT)
        await wait_until(lambda: server_answers(registry, "a", token), "the server")


async def test_many_concurrent_lookups_use_few_connections(server: ValkeyServer) -> None:
    async with redis_registry(server.url, "hubs:") as registry:
        token = await registry.register("a")
        assert all(await asyncio.gather(*[registry.verify("a", token) for _ in range(500)]))
        with server.client() as client:
            assert client.info()["connected_clients"] < 25


async def test_a_hub_started_during_an_outage_follows_changes_afterwards(server: ValkeyServer) -> None:
    async with redis_registry(server.url, "hubs:") as early:
        token = await early.register("a")
    server.kill()
    async with redis_registry(server.url, "hubs:") as registry:
        heard = revocations(registry)
        with pytest.raises(StoreAway):
            await registry.verify("a", token)
        server.start()
        await wait_until(lambda: server_answers(registry, "a", token), "the server")
        async with redis_registry(server.url, "hubs:") as other:
            await other.revoke("a")
        await wait_until(lambda: heard == ["a"], "the revocation")


@pytest.mark.long
async def test_a_change_whose_answer_timed_out_is_announced(server: ValkeyServer) -> None:
    async with impatient_registry(server, "a") as (registry, token):
        heard = revocations(registry)
        server.signal(signal.SIGSTOP)
        with pytest.raises(StoreAway):
            await registry.revoke("a")  # which waits in the server's socket, and is carried out later
        server.signal(signal.SIGCONT)
        await wait_until(lambda: heard == ["a"], "the revocation")
        await wait_until(lambda: is_revoked(registry, token), "the token")


async def is_revoked(registry: Registry, token: str) -> bool:
    try:
        return await registry.owner(token) is None
    except StoreAway:
        return False
