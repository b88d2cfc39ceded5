"""Agents' tokens: in a ledger and in a real server by the same tests, then what each has of its own."""

import asyncio
import hashlib
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

import pytest
from servers import Server, cluster

from headgate import StoreAway
from headgate.hub.ledger import Ledger
from headgate.hub.refusing import Refused
from headgate.hub.registry import LONGEST_TOKEN, LedgerRoll, Registry
from headgate.stores.redis import registry as module
from headgate.stores.redis.connecting import Clients
from headgate.stores.redis.registry import RedisRoll

PATIENT = 5.0  # the timeout where the machine's slowness isn't the question

Open: TypeAlias = Callable[..., Any]


@asynccontextmanager
async def in_redis(url: str, prefix: str, timeout: float = PATIENT, **options: Any) -> AsyncIterator[Registry]:
    clients = Clients(url, timeout)
    registry = Registry(RedisRoll(clients, prefix), **options)
    await registry.start()
    try:
        yield registry
    finally:
        await registry.close()
        await clients.aclose()


@asynccontextmanager
async def in_ledger(path: Path, **options: Any) -> AsyncIterator[Registry]:
    ledger = Ledger(path)
    registry = Registry(LedgerRoll(ledger), **options)
    await registry.start()
    try:
        yield registry
    finally:
        await registry.close()
        ledger.close()


@pytest.fixture(params=["ledger", "redis"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens a registry, the same one every time."""
    if request.param == "ledger":
        return lambda **options: in_ledger(tmp_path / "hub.db", **options)
    server: Server = request.getfixturevalue("redis_server")
    prefix = f"test-{uuid4().hex}:"
    return lambda **options: in_redis(server.url, prefix, **options)


async def refused(work: Awaitable[object]) -> tuple[int, str]:
    with pytest.raises(Refused) as caught:
        await work
    return caught.value.status, caught.value.error


async def until(condition: Callable[[], Awaitable[bool]] | Callable[[], bool], what: str) -> None:
    """Let the loop go on until something holds."""
    async with asyncio.timeout(20):
        while True:
            found = condition()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.005)
    raise AssertionError(what)


# Both -----------------------------------------------------------------------------------------------------------------


def test_a_token_is_its_agents_and_nobody_elses(opened: Open) -> None:
    async def walk() -> None:
        async with opened() as registry:
            first, second = await registry.register("first"), await registry.register("second é\u4e2d")
            assert first.startswith("hg_")
            assert len(first) > 40
            assert await registry.verify("first", first)
            assert await registry.verify("second é\u4e2d", second)
            assert not await registry.verify("first", second)
            assert not await registry.verify("nobody", first)
            assert (await registry.owner(first), await registry.owner(second)) == ("first", "second é\u4e2d")
            assert await registry.knows("first")
            assert not await registry.knows("nobody")

    asyncio.run(walk())


def test_what_is_presented_may_be_anything(opened: Open) -> None:
    async def walk() -> None:
        async with opened() as registry:
            token = await registry.register("a")
            for wrong in (
                "",
                " ",
                token[:-1],
                token + "=",
                token.upper(),
                "\ud800",
                "\0",
                "é",
                "x" * 10_000_000,
                "hg_",
            ):
                assert not await registry.verify("a", wrong)
                assert await registry.owner(wrong) is None
            for nobody in ("", "\ud800", "\0", "x" * 100_000, "a\n"):
                assert not await registry.verify(nobody, token)
                assert not await registry.knows(nobody)
                assert await refused(registry.rotate(nobody)) == (404, "unknown_agent")
                assert await refused(registry.revoke(nobody)) == (404, "unknown_agent")
                assert isinstance(await registry.agents(nobody), list)
            assert await registry.verify("a", token)

    asyncio.run(walk())


def test_a_long_token_is_not_even_looked_at(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    async def walk() -> None:
        async with opened() as registry:
            await registry.register("a")
            monkeypatch.setattr(hashlib, "sha256", None)
            assert not await registry.verify("a", "x" * (LONGEST_TOKEN + 1))
            assert await registry.owner("x" * (LONGEST_TOKEN + 1)) is None

    asyncio.run(walk())


def test_an_id_that_exists_is_refused_and_its_token_goes_on(opened: Open) -> None:
    async def walk() -> None:
        async with opened() as registry:
            token = await registry.register("a")
            assert await refused(registry.register("a")) == (409, "exists")
            assert await refused(registry.register("a", by_admin=True)) == (409, "exists")
            assert await registry.verify("a", token)

    asyncio.run(walk())


def test_of_fifty_that_want_one_id_at_once_one_gets_it(opened: Open) -> None:
    async def walk() -> None:
        async with opened() as registry:
            results = await asyncio.gather(*[registry.register("a") for _ in range(50)], return_exceptions=True)
            tokens = [result for result in results if isinstance(result, str)]
            assert len(tokens) == 1
            assert {result.status for result in results if isinstance(result, Refused)} == {409}
            assert await registry.verify("a", tokens[0])
            others = await asyncio.gather(*[registry.register(f"agent-{number}") for number in range(50)])
            assert [await registry.owner(token) for token in others] == [f"agent-{number}" for number in range(50)]

    asyncio.run(walk())


def test_names_are_checked(opened: Open) -> None:
    async def walk() -> None:
        async with opened(reserved=frozenset({"whitelist"})) as registry:
            for bad in ("", "a\n", "x" * 129, "\ud800", "\u200b"):
                assert await refused(registry.register(bad)) == (400, "bad_agent")
                assert await refused(registry.register(bad, by_admin=True)) == (400, "bad_agent")
            with pytest.raises(Refused) as caught:
                await registry.register("whitelist", by_admin=True)
            assert (caught.value.status, caught.value.error) == (400, "reserved")
            assert caught.value.detail == "agent: expected an id that the hub doesn't use itself, got 'whitelist'"
            assert await registry.agents() == []
            await registry.register("x" * 128)

    asyncio.run(walk())


def test_a_rotated_token_takes_the_place_of_the_old_one(opened: Open) -> None:
    async def walk() -> None:
        told: list[str] = []
        async with opened() as registry:
            registry.follow(told.append)
            old = await registry.register("a")
            assert told == []
            new = await registry.rotate("a")
            assert told == ["a"]
            assert new != old
            assert (await registry.verify("a", old), await registry.owner(old)) == (False, None)
            assert (await registry.verify("a", new), await registry.owner(new)) == (True, "a")
            assert await refused(registry.rotate("b")) == (404, "unknown_agent")

    asyncio.run(walk())


def test_a_revoked_token_is_worth_nothing_and_the_id_stays_taken(opened: Open) -> None:
    async def walk() -> None:
        told: list[str] = []
        async with opened() as registry:
            registry.follow(told.append)
            token = await registry.register("a")
            assert await registry.revoke("a")
            assert told == ["a"]
            assert not await registry.revoke("a")
            assert told == ["a"]
            assert (await registry.verify("a", token), await registry.owner(token)) == (False, None)
            assert not await registry.knows("a")
            assert await refused(registry.register("a", by_admin=True)) == (409, "exists")
            assert await refused(registry.rotate("a")) == (403, "revoked")
            again = await registry.rotate("a", by_admin=True)
            assert await registry.verify("a", again)
            assert not await registry.verify("a", token)
            assert await refused(registry.revoke("b")) == (404, "unknown_agent")

    asyncio.run(walk())


def test_agents_are_listed_page_by_page(opened: Open) -> None:
    async def walk() -> None:
        async with opened() as registry:
            names = ["a", "B", "é", "z z", "\U0001f600", "(", "-", "+", "[", "10", "9", "\uffee"]
            for name in names:
                await registry.register(name)
            await registry.revoke("é")
            everything = await registry.agents()
            assert [one.agent for one in everything] == sorted(names)
            assert [one.agent for one in everything if one.revoked] == ["é"]
            assert all(1.6e9 < one.at < 1e11 for one in everything)
            pages, after = [], ""
            while page := await registry.agents(after, 5):
                pages.append(len(page))
                assert page == everything[sum(pages) - len(page) : sum(pages)]
                after = page[-1].agent
            assert pages == [5, 5, 2]

    asyncio.run(walk())


def test_who_may_register_is_decided_by_the_mode(opened: Open) -> None:
    async def walk() -> None:
        async with opened(mode="closed") as registry:
            code = await registry.invite()
            assert await refused(registry.register("a")) == (403, "registration_closed")
            assert await refused(registry.register("a", code)) == (403, "registration_closed")
            await registry.register("a", by_admin=True)
        async with opened(mode="invitation") as registry:
            assert await refused(registry.register("b")) == (403, "invitation_required")
            await registry.register("b", by_admin=True)
            for wrong in ("", "x", code[:-1], "\ud800", "x" * 1_000_000):
                assert await refused(registry.register("c", wrong)) == (403, "invitation_unknown")
        async with opened(mode="open") as registry:
            await registry.register("c")
            await registry.register("d", code)
        async with opened(mode="invitation") as registry:
            await registry.register("e", code)  # where none was needed it was not used up
        async with opened(mode="mistyped") as registry:
            assert await refused(registry.register("f")) == (403, "registration_closed")

    asyncio.run(walk())


def test_an_invitation_is_good_for_one_registration_that_succeeds(opened: Open) -> None:
    async def walk() -> None:
        async with opened(mode="invitation") as registry:
            code, other = await registry.invite(), await registry.invite()
            token = await registry.register("a", code)
            assert await registry.verify("a", token)
            assert await registry.owner(code) is None
            assert await refused(registry.register("b", code)) == (403, "invitation_unknown")
            assert await refused(registry.register("a", code)) == (403, "invitation_unknown")
            assert await refused(registry.register("a", other)) == (409, "exists")
            assert await refused(registry.register("", other)) == (400, "bad_agent")
            wanted = [registry.register(f"agent-{number}", other) for number in range(20)]
            results = await asyncio.gather(*wanted, return_exceptions=True)
            assert sum(isinstance(result, str) for result in results) == 1

    asyncio.run(walk())


def test_everything_is_there_after_a_restart(opened: Open) -> None:
    async def walk() -> None:
        async with opened(mode="invitation") as registry:
            tokens = {
                f"agent-{number}": await registry.register(f"agent-{number}", by_admin=True) for number in range(20)
            }
            old = tokens["agent-0"]
            tokens["agent-0"] = await registry.rotate("agent-0")
            await registry.revoke("agent-1")
            spent, code = await registry.invite(), await registry.invite()
            await registry.register("last", spent)
            before = await registry.agents()
        told: list[str] = []
        async with opened(mode="invitation") as registry:
            registry.follow(told.append)
            assert await registry.agents() == before
            assert [name for name, token in tokens.items() if not await registry.verify(name, token)] == ["agent-1"]
            assert not await registry.verify("agent-0", old)
            assert await refused(registry.register("agent-1", by_admin=True)) == (409, "exists")
            assert await refused(registry.register("b", spent)) == (403, "invitation_unknown")
            await registry.register("b", code)
            assert told == []

    asyncio.run(walk())


def test_what_was_stored_is_told_even_if_nobody_waits_for_it(opened: Open) -> None:
    """A client that hangs up while its request is carried out must not leave a token that works after all."""

    async def walk() -> None:
        told: list[str] = []
        async with opened() as registry:
            registry.follow(told.append)
            token = await registry.register("a")
            request = asyncio.create_task(registry.revoke("a"))
            await asyncio.sleep(0)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            assert request.cancelled()
            await until(lambda: told == ["a"], "the revocation")
            assert not await registry.verify("a", token)

    asyncio.run(walk())


def test_a_listener_that_fails_does_not_keep_the_others_from_hearing(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(agent: str) -> None:
        raise ValueError(agent)

    async def walk() -> None:
        told: list[str] = []
        async with opened() as registry:
            registry.follow(fail)
            registry.follow(told.append)
            await registry.register("a")
            await registry.rotate("a")
            assert told == ["a"]

    asyncio.run(walk())
    assert "that a token has changed could not be taken over" in caplog.text


def test_tokens_are_in_no_file_no_log_and_no_error(
    opened: Open, tmp_path: Path, redis_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    async def walk() -> tuple[list[str], list[str]]:
        async with opened(mode="invitation") as registry:
            code = await registry.invite()
            token = await registry.register("secret-agent", code)
            secrets = [token, code, await registry.rotate("secret-agent"), await registry.invite()]
            shown = [repr(registry), repr(vars(registry)), repr(vars(registry._roll)), repr(await registry.agents())]
            for attempt in (registry.register("secret-agent", code), registry.register("b", code)):
                with pytest.raises(Refused) as caught:
                    await attempt
                shown += [repr(caught.value), str(caught.value)]
            return secrets, shown

    with caplog.at_level(logging.DEBUG):
        secrets, shown = asyncio.run(walk())
    stored = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    with redis_server.client() as client:
        for key in client.keys("*-admin:*"):
            read = {b"hash": client.hgetall, b"zset": lambda key: client.zrange(key, 0, -1), b"list": lambda _key: ""}
            stored += repr(read[client.type(key)](key)).encode()
            assert client.ttl(key) == -1
    assert b"secret-agent" in stored
    for secret in secrets:
        assert secret not in caplog.text + "".join(shown)
        assert secret.encode() not in stored
        assert secret[4:].encode() not in stored


# Several hubs over one server -----------------------------------------------------------------------------------------


def test_two_hubs_know_the_same_agents_and_hear_of_each_others_changes(redis_server: Server) -> None:
    async def walk() -> None:
        prefix = f"test-{uuid4().hex}:"
        async with in_redis(redis_server.url, prefix) as one, in_redis(redis_server.url, prefix) as other:
            heard: dict[str, list[str]] = {"one": [], "other": []}
            one.follow(heard["one"].append)
            other.follow(heard["other"].append)
            token = await one.register("a")
            assert await other.verify("a", token)
            assert await other.owner(token) == "a"
            assert await refused(other.register("a")) == (409, "exists")
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
            await until(lambda: heard["one"] == ["a", "a", "b"], "what the one hears")
            await until(lambda: heard["other"] == ["a", "a", "b"], "what the other hears")

    asyncio.run(walk())


def test_hubs_under_other_prefixes_have_other_agents(redis_server: Server) -> None:
    async def walk() -> None:
        prefix = f"test-{uuid4().hex}:"
        async with in_redis(redis_server.url, prefix) as one, in_redis(redis_server.url, prefix + "x") as other:
            token = await one.register("a")
            assert not await other.verify("a", token)
            await other.register("a")

    asyncio.run(walk())


def test_what_was_missed_while_deaf_is_heard_of_once(redis_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAGE", 2)
    monkeypatch.setattr(module, "_LOOK", 3600)

    async def walk() -> None:
        prefix = f"test-{uuid4().hex}:"
        async with in_redis(redis_server.url, prefix) as one, in_redis(redis_server.url, prefix) as other:
            heard: list[str] = []
            one.follow(heard.append)
            for name in "abcdef":
                await other.register(name)
            await other.revoke("a")
            await until(lambda: heard == ["a"], "the first revocation")
            roll: Any = one._roll
            roll._follower.cancel()
            await asyncio.gather(roll._follower, return_exceptions=True)
            for name in "bcdef":
                await other.rotate(name)
            await other.rotate("b")
            await one.rotate("c")  # one's own is told at once
            assert heard == ["a", "c"]
            roll._follower = asyncio.create_task(roll._follow())
            await until(lambda: len(heard) == 6, "what was missed")
            await other.revoke("f")
            await until(lambda: len(heard) == 7, "what comes after it")
            assert heard == ["a", "c", "d", "e", "f", "b", "f"]

    asyncio.run(walk())


def test_news_are_looked_for_where_a_connection_has_died_in_silence(
    redis_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOOK", 0.05)

    async def walk() -> None:
        prefix = f"test-{uuid4().hex}:"
        async with in_redis(redis_server.url, prefix) as one:
            heard: list[str] = []
            one.follow(heard.append)
            await one.register("a")
            with redis_server.client() as client:  # a change of which no message comes
                client.zadd(f"{prefix.rstrip(':')}-admin:{{agents}}1:changes", {"a": 5e15})
            await until(lambda: heard == ["a"], "what nobody said")

    asyncio.run(walk())


def test_a_token_that_is_revoked_while_it_is_looked_up_is_not_good(redis_server: Server) -> None:
    """The news may come before the answer: whoever relied on that would have missed them."""

    async def walk() -> None:
        async with in_redis(redis_server.url, f"test-{uuid4().hex}:") as registry:
            roll: Any = registry._roll
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

    asyncio.run(walk())


def test_closing_ends_the_follower_wherever_it_is(redis_server: Server) -> None:
    async def walk(turns: int) -> None:
        async with in_redis(redis_server.url, f"test-{uuid4().hex}:") as registry:
            for _ in range(turns):
                await asyncio.sleep(0)
        roll: Any = registry._roll
        assert roll._follower.done()

    for turns in range(24):
        asyncio.run(walk(turns))


def test_in_a_cluster() -> None:
    async def walk(nodes: list[Server]) -> None:
        url = f"redis+cluster://127.0.0.1:{nodes[0].port},127.0.0.1:{nodes[1].port}"
        async with in_redis(url, "hubs:") as one, in_redis(url, "hubs:") as other:
            heard: list[str] = []
            one.follow(heard.append)
            token = await one.register("a")
            assert await other.verify("a", token)
            assert await other.owner(token) == "a"
            assert [registered.agent for registered in await other.agents()] == ["a"]
            await other.revoke("a")
            await until(lambda: heard == ["a"], "the revocation")

    with cluster() as nodes:
        asyncio.run(walk(nodes))


# The server is away ---------------------------------------------------------------------------------------------------


def test_known_agents_go_on_while_the_server_is_away_and_nothing_else_does() -> None:
    async def walk(server: Server) -> None:
        async with in_redis(server.url, "hubs:") as one, in_redis(server.url, "hubs:") as other:
            heard: list[str] = []
            one.follow(heard.append)
            known, unseen = await one.register("known"), await one.register("unseen")
            rotated, revoked = await one.register("rotated"), await one.register("revoked")
            by_token = await one.register("by-token")
            for name, token in (("known", known), ("rotated", rotated), ("revoked", revoked)):
                assert await one.verify(name, token)
            assert await one.owner(by_token) == "by-token"
            await other.rotate("rotated")
            await other.revoke("revoked")
            await until(lambda: heard == ["rotated", "revoked"], "the news")
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
            await until(lambda: _back(one, "known", known), "the server")
            assert not await one.verify("revoked", revoked)
            assert await one.verify("unseen", unseen)
            await until(lambda: _back(other, "known", known), "the server")
            heard.clear()
            await other.revoke("known")
            await until(lambda: heard == ["known"], "the news, over another connection")
            assert not await one.verify("known", known)

    with Server("--appendonly", "yes", "--appendfsync", "always") as server:
        asyncio.run(walk(server))


async def _back(registry: Registry, agent: str, token: str) -> bool:
    """Whether the server answers again."""
    try:
        return [one.agent for one in await registry.agents()] != [] and await registry.verify(agent, token)
    except StoreAway:
        return False


def test_a_token_that_was_refused_is_not_known_later_when_the_server_is_away() -> None:
    async def walk(server: Server) -> None:
        async with in_redis(server.url, "hubs:") as registry:
            roll: Any = registry._roll
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

    with Server() as server:
        asyncio.run(walk(server))


def test_what_is_remembered_is_bounded_to_those_seen_last(
    redis_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_REMEMBERED", 3)

    async def walk() -> None:
        async with in_redis(redis_server.url, f"test-{uuid4().hex}:") as registry:
            roll: Any = registry._roll
            tokens = {name: await registry.register(name) for name in "abcde"}
            for name in "abcade":
                assert await registry.verify(name, tokens[name])
            assert list(roll._verified._digests) == ["a", "d", "e"]
            assert sorted(roll._verified._owners.values()) == ["a", "d", "e"]
            for name in "abcde":
                await registry.rotate(name)
            assert list(roll._told) == ["c", "d", "e"]
            assert (len(roll._verified._digests), len(roll._verified._owners)) == (0, 0)

    asyncio.run(walk())


def test_a_server_that_hangs_is_waited_for_once_and_not_by_everybody() -> None:
    async def walk(server: Server) -> None:
        loop = asyncio.get_running_loop()
        async with in_redis(server.url, "hubs:", timeout=0.25) as registry:
            token = await registry.register("a")
            assert await registry.verify("a", token)
            server.signal(signal.SIGSTOP)
            before = loop.time()
            answers = await asyncio.gather(*[registry.verify("a", token) for _ in range(500)])
            assert answers == [True] * 500
            assert loop.time() - before < 5  # one after the other it would be minutes
            server.signal(signal.SIGCONT)
            await until(lambda: _back(registry, "a", token), "the server")

    with Server() as server:
        asyncio.run(walk(server))


def test_a_crowd_needs_few_connections() -> None:
    async def walk(server: Server) -> None:
        async with in_redis(server.url, "hubs:") as registry:
            token = await registry.register("a")
            assert all(await asyncio.gather(*[registry.verify("a", token) for _ in range(500)]))
            with server.client() as client:
                assert client.info()["connected_clients"] < 25

    with Server() as server:
        asyncio.run(walk(server))


def test_a_hub_that_starts_without_the_server_follows_when_it_comes() -> None:
    async def walk(server: Server) -> None:
        async with in_redis(server.url, "hubs:") as early:
            token = await early.register("a")
        server.kill()
        async with in_redis(server.url, "hubs:") as registry:
            heard: list[str] = []
            registry.follow(heard.append)
            with pytest.raises(StoreAway):
                await registry.verify("a", token)
            server.start()
            await until(lambda: _back(registry, "a", token), "the server")
            async with in_redis(server.url, "hubs:") as other:
                await other.revoke("a")
            await until(lambda: heard == ["a"], "the revocation")

    with Server("--appendonly", "yes", "--appendfsync", "always") as server:
        asyncio.run(walk(server))


def test_a_change_that_was_made_though_no_answer_came_is_heard_of() -> None:
    async def walk(server: Server) -> None:
        async with in_redis(server.url, "hubs:", timeout=0.25) as registry:
            heard: list[str] = []
            registry.follow(heard.append)
            token = await registry.register("a")
            assert await registry.verify("a", token)
            server.signal(signal.SIGSTOP)
            with pytest.raises(StoreAway):
                await registry.revoke("a")  # which waits in the server's socket, and is carried out later
            server.signal(signal.SIGCONT)
            await until(lambda: heard == ["a"], "the revocation")
            await until(lambda: _gone(registry, token), "the token")

    with Server() as server:
        asyncio.run(walk(server))


async def _gone(registry: Registry, token: str) -> bool:
    try:
        return await registry.owner(token) is None
    except StoreAway:
        return False
