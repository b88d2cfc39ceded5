"""Agents' tokens, in a database and in a real server alike."""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

import pytest

from headgate.hub.agents.registry import LONGEST_TOKEN, Registry
from headgate.hub.errors import RequestError
from tests.support.event_loop import wait_until
from tests.support.refusals import request_error
from tests.support.registry import database_registry, redis_registry, revocations
from tests.support.valkey import ValkeyServer

Open: TypeAlias = Callable[..., Any]


@pytest.fixture(params=["database", "redis"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens a registry, the same one every time."""
    if request.param == "database":
        return lambda **options: database_registry(tmp_path / "hub.db", **options)
    server: ValkeyServer = request.getfixturevalue("redis_server")
    prefix = f"test-{uuid4().hex}:"
    return lambda **options: redis_registry(server.url, prefix, **options)


@pytest.fixture
def registry(opened: Open, runner: asyncio.Runner) -> Iterator[Registry]:
    opening = opened()
    yield runner.run(opening.__aenter__())
    runner.run(opening.__aexit__(None, None, None))


async def test_a_token_belongs_to_one_agent(registry: Registry) -> None:
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


async def test_any_text_may_be_presented_as_a_token(registry: Registry) -> None:
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
        assert await request_error(registry.rotate(nobody)) == (404, "unknown_agent")
        assert await request_error(registry.revoke(nobody)) == (404, "unknown_agent")
        assert isinstance(await registry.agents(nobody), list)
    assert await registry.verify("a", token)


async def test_an_overlong_token_is_not_hashed(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    await registry.register("a")
    monkeypatch.setattr(hashlib, "sha256", None)
    assert not await registry.verify("a", "x" * (LONGEST_TOKEN + 1))
    assert await registry.owner("x" * (LONGEST_TOKEN + 1)) is None


async def test_a_taken_id_is_refused_and_its_token_stays_valid(registry: Registry) -> None:
    token = await registry.register("a")
    assert await request_error(registry.register("a")) == (409, "exists")
    assert await request_error(registry.register("a", by_admin=True)) == (409, "exists")
    assert await registry.verify("a", token)


async def test_one_of_fifty_concurrent_registrations_of_an_id_succeeds(registry: Registry) -> None:
    results = await asyncio.gather(*[registry.register("a") for _ in range(50)], return_exceptions=True)
    tokens = [result for result in results if isinstance(result, str)]
    assert len(tokens) == 1
    assert {result.status for result in results if isinstance(result, RequestError)} == {409}
    assert await registry.verify("a", tokens[0])
    others = await asyncio.gather(*[registry.register(f"agent-{number}") for number in range(50)])
    assert [await registry.owner(token) for token in others] == [f"agent-{number}" for number in range(50)]


async def test_names_are_checked(opened: Open) -> None:
    async with opened(reserved=frozenset({"whitelist"})) as registry:
        for bad in ("", "a\n", "x" * 129, "\ud800", "\u200b"):
            assert await request_error(registry.register(bad)) == (400, "bad_agent")
            assert await request_error(registry.register(bad, by_admin=True)) == (400, "bad_agent")
        with pytest.raises(RequestError) as caught:
            await registry.register("whitelist", by_admin=True)
        assert (caught.value.status, caught.value.error) == (400, "reserved")
        assert caught.value.detail == "agent: expected an id that the hub doesn't use itself, got 'whitelist'"
        assert await registry.agents() == []
        await registry.register("x" * 128)


async def test_a_rotated_token_replaces_the_old_one(registry: Registry) -> None:
    told = revocations(registry)
    old = await registry.register("a")
    assert told == []
    new = await registry.rotate("a")
    assert told == ["a"]
    assert new != old
    assert (await registry.verify("a", old), await registry.owner(old)) == (False, None)
    assert (await registry.verify("a", new), await registry.owner(new)) == (True, "a")
    assert await request_error(registry.rotate("b")) == (404, "unknown_agent")


async def test_a_token_replaces_itself_once(registry: Registry) -> None:
    old = await registry.register("a")
    rotations = await asyncio.gather(*[registry.rotate("a", old) for _ in range(20)], return_exceptions=True)
    (new,) = [token for token in rotations if isinstance(token, str)]
    errors = {(error.status, error.error) for error in rotations if isinstance(error, RequestError)}
    assert (errors, await registry.owner(new)) == ({(401, "unauthorized")}, "a")
    assert await request_error(registry.revoke("a", old)) == (401, "unauthorized")
    assert await registry.verify("a", new)
    assert await registry.revoke("a", new)


async def test_a_revoked_token_is_invalid_and_the_id_stays_taken(registry: Registry) -> None:
    told = revocations(registry)
    token = await registry.register("a")
    assert await registry.revoke("a")
    assert told == ["a"]
    assert not await registry.revoke("a")
    assert told == ["a"]
    assert (await registry.verify("a", token), await registry.owner(token)) == (False, None)
    assert not await registry.knows("a")
    assert await request_error(registry.register("a", by_admin=True)) == (409, "exists")
    assert await request_error(registry.rotate("a", token)) == (403, "revoked")
    assert not await registry.revoke("a", token)
    again = await registry.rotate("a")
    assert await registry.verify("a", again)
    assert not await registry.verify("a", token)
    assert await request_error(registry.revoke("b")) == (404, "unknown_agent")


async def test_agents_are_listed_page_by_page(registry: Registry) -> None:
    names = ["a", "B", "é", "z z", "\U00020000", "(", "--", "+", "[", "10", "9", "\ufa0e"]
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


async def test_the_mode_decides_who_may_register(opened: Open) -> None:
    async with opened(mode="closed") as registry:
        code = await registry.invite()
        assert await request_error(registry.register("a")) == (403, "registration_closed")
        assert await request_error(registry.register("a", code)) == (403, "registration_closed")
        await registry.register("a", by_admin=True)
    async with opened(mode="invitation") as registry:
        assert await request_error(registry.register("b")) == (403, "invitation_required")
        await registry.register("b", by_admin=True)
        for wrong in ("", "x", code[:-1], "\ud800", "x" * 1_000_000):
            assert await request_error(registry.register("c", wrong)) == (403, "invitation_unknown")
    async with opened(mode="open") as registry:
        await registry.register("c")
        await registry.register("d", code)
    async with opened(mode="invitation") as registry:
        await registry.register("e", code)  # where none was needed it was not used up
    async with opened(mode="mistyped") as registry:
        assert await request_error(registry.register("f")) == (403, "registration_closed")


async def test_an_invitation_is_good_for_one_registration_that_succeeds(opened: Open) -> None:
    async with opened(mode="invitation") as registry:
        code, other = await registry.invite(), await registry.invite()
        token = await registry.register("a", code)
        assert await registry.verify("a", token)
        assert await registry.owner(code) is None
        assert await request_error(registry.register("b", code)) == (403, "invitation_unknown")
        assert await request_error(registry.register("a", code)) == (403, "invitation_unknown")
        assert await request_error(registry.register("a", other)) == (409, "exists")
        assert await request_error(registry.register("", other)) == (400, "bad_agent")
        wanted = [registry.register(f"agent-{number}", other) for number in range(20)]
        results = await asyncio.gather(*wanted, return_exceptions=True)
        assert sum(isinstance(result, str) for result in results) == 1


async def test_agents_and_invitations_survive_a_restart(opened: Open) -> None:
    async with opened(mode="invitation") as registry:
        tokens = {f"agent-{number}": await registry.register(f"agent-{number}", by_admin=True) for number in range(20)}
        old = tokens["agent-0"]
        tokens["agent-0"] = await registry.rotate("agent-0")
        await registry.revoke("agent-1")
        spent, code = await registry.invite(), await registry.invite()
        await registry.register("last", spent)
        before = await registry.agents()
    async with opened(mode="invitation") as registry:
        told = revocations(registry)
        assert await registry.agents() == before
        assert [name for name, token in tokens.items() if not await registry.verify(name, token)] == ["agent-1"]
        assert not await registry.verify("agent-0", old)
        assert await request_error(registry.register("agent-1", by_admin=True)) == (409, "exists")
        assert await request_error(registry.register("b", spent)) == (403, "invitation_unknown")
        await registry.register("b", code)
        assert told == []


async def test_a_revocation_is_announced_even_if_its_caller_is_cancelled(registry: Registry) -> None:
    """A client that hangs up while its request is carried out must not leave a token that works after all."""
    told = revocations(registry)
    token = await registry.register("a")
    request = asyncio.create_task(registry.revoke("a"))
    await asyncio.sleep(0)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    assert request.cancelled()
    await wait_until(lambda: told == ["a"], "the revocation")
    assert not await registry.verify("a", token)


async def test_a_failing_listener_does_not_affect_others(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    def fail(agent: str) -> None:
        raise ValueError(agent)

    told: list[str] = []
    async with opened() as registry:
        registry.on_revocation(fail)
        registry.on_revocation(told.append)
        await registry.register("a")
        await registry.rotate("a")
        assert told == ["a"]
    assert "a listener failed after the revocation of a token" in caplog.text


def in_files(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.iterdir())


async def test_tokens_are_in_no_file_no_log_and_no_error(
    opened: Open, tmp_path: Path, redis_server: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        async with opened(mode="invitation") as registry:
            code = await registry.invite()
            token = await registry.register("secret-agent", code)
            secrets = [token, code, await registry.rotate("secret-agent"), await registry.invite()]
            shown = [repr(registry), repr(vars(registry)), repr(vars(registry._store)), repr(await registry.agents())]
            for attempt in (registry.register("secret-agent", code), registry.register("b", code)):
                with pytest.raises(RequestError) as caught:
                    await attempt
                shown += [repr(caught.value), str(caught.value)]
    stored = in_files(tmp_path)
    with redis_server.client() as client:
        for key in client.keys("*-admin:*"):
            read = {
                b"hash": client.hgetall,
                b"zset": lambda key: client.zrange(key, 0, -1),
                b"list": lambda _key: "",
                b"string": client.get,
            }
            stored += repr(read[client.type(key)](key)).encode()
            assert client.ttl(key) == -1
    assert b"secret-agent" in stored
    for secret in secrets:
        assert secret not in caplog.text + "".join(shown)
        assert secret.encode() not in stored
        assert secret[4:].encode() not in stored


async def test_the_number_of_agents_is_bounded_except_for_the_admin(opened: Open) -> None:
    async with opened(mode="invitation", most=2) as registry:
        codes = [await registry.invite() for _ in range(3)]
        await registry.register("a", codes[0])
        await registry.register("b", codes[1])
        await registry.revoke("a")
        with pytest.raises(RequestError, match="2 agents are registered; only the admin can add more") as caught:
            await registry.register("c", codes[2])
        assert (caught.value.status, caught.value.error) == (409, "too_many_agents")
        await registry.register("c", by_admin=True)
    async with opened(mode="invitation", most=4) as registry:
        await registry.register("d", codes[2])  # which was not used up


async def test_one_agent_is_found_by_its_name(registry: Registry) -> None:
    await registry.register("first")
    await registry.register("second")
    await registry.revoke("second")
    first, second = await registry.find("first"), await registry.find("second")
    assert [first, second] == await registry.agents()
    assert [one is not None and one.revoked for one in (first, second)] == [False, True]
    for nobody in ("fir", "First", "", "\ud800", "x" * 1000, "*"):
        assert await registry.find(nobody) is None
