"""Rows in Redis that can't be read: each is skipped and logged, and the others keep their effect."""

import asyncio
import json
import logging
from typing import Any

import pytest

from headgate import Gate, RedisStore
from headgate.gate.changes import override
from headgate.stores.redis.agents import RedisAgents
from tests.support.valkey import PATIENCE, ValkeyServer

BAD_ROWS: list[Any] = [
    b"",
    b"\xff\xfe",
    b"[1, 2]",
    b"null",
    b'"text"',
    b"{",
    b"{}",
    b'{"kind": 5}',
    b'{"kind": "override", "agent": 7, "tier": "heavy", "value": "5/minute"}',
    b'{"kind": "override", "agent": "x", "channel": "", "tier": "heavy", "value": "5/fortnight"}',
    b'{"kind": "override", "agent": "x", "channel": "", "tier": "heavy", "value": ["5/minute"]}',
    b'{"kind": "default", "tier": "heavy", "value": "0.' + b"1" * 30 + b'/second"}',
    b'{"kind": "default", "tier": "heavy", "value": "5/minute", "generation": "many"}',
    b'{"a": ' * 2000 + b"1" + b"}" * 2000,
]
SNAPSHOT = b'{"kind": "snapshot", "position": "x", "rows": {}}'


def gate_on(server: ValkeyServer) -> Gate:
    return Gate(store=RedisStore(server.url, timeout=PATIENCE))


@pytest.mark.parametrize("first", [*BAD_ROWS[:5], SNAPSHOT], ids=repr)
def test_a_row_of_the_change_log_that_cannot_be_read_has_no_effect(
    server: ValkeyServer, raw: Any, first: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The script looks at the first row, too: it may be a snapshot."""
    with gate_on(server) as gate:
        gate.set_override("a", "heavy", "7/minute")
    (key,) = raw.keys("*changes")
    raw.lpush(key, first)
    raw.rpush(key, *BAD_ROWS)
    with caplog.at_level(logging.ERROR, "headgate"), gate_on(server) as gate:
        assert str(gate.limits_for("a", "ws", "heavy")) == "7/minute"
        assert str(gate.limits_for("b", "ws", "heavy")) == "10/minute"
        gate.change([override("b", "heavy", "8/minute")], by="me")
        gate.reload(gate.policy)
        assert [str(gate.limits_for(agent, "ws", "heavy")) for agent in "ab"] == ["7/minute", "8/minute"]
        assert str(gate.history()[-1]) == "override of 'b' for heavy set to 8/minute"
    assert len([one for one in caplog.records if "can't be read and have no effect" in one.getMessage()]) == 1


def test_a_log_with_rows_that_cannot_be_read_can_be_compacted(server: ValkeyServer, raw: Any) -> None:
    with gate_on(server) as gate:
        key = ""
        for number in range(5):
            gate.set_override(f"a{number}", "heavy", "7/minute")
            (key,) = raw.keys("*changes")
            raw.rpush(key, BAD_ROWS[number])
        log = gate._log
        kept = log.compact(2, lambda edits: [edit for edit in edits if edit.kind == "override"])
        assert kept == 2
        assert json.loads(raw.lindex(key, 0))["kind"] == "snapshot"
    with gate_on(server) as gate:
        for number in range(5):
            assert str(gate.limits_for(f"a{number}", "ws", "heavy")) == "7/minute"


@pytest.mark.parametrize("bad", [b"", b"\xff\xff", b"no digest", b"1.5 zz"], ids=repr)
def test_an_agent_whose_row_cannot_be_read_keeps_its_name(
    store: RedisStore, raw: Any, bad: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def walk() -> None:
        agents = store.agents()
        assert isinstance(agents, RedisAgents)
        await agents.start(lambda _agent: None)
        try:
            for name, digest in (("a", b"1" * 32), ("b", b"2" * 32)):
                assert await agents.add(name, digest, 5.0, None) == "done"
            (tokens,) = raw.keys("*:tokens")
            raw.hset(tokens, "a", bad)
            assert not await agents.verify("a", b"1" * 32)
            assert not await agents.knows("a")
            assert await agents.verify("b", b"2" * 32)
            assert await agents.page("", 10) == [("a", 0.0, True), ("b", 5.0, False)]
            assert await agents.add("a", b"3" * 32, 6.0, None) == "exists", "a stranger doesn't get it"
            assert await agents.replace("a", b"4" * 32, b"1" * 32) == "revoked", "only the admin rotates it"
            assert await agents.replace("a", b"4" * 32) == "done"
            assert await agents.verify("a", b"4" * 32)
        finally:
            await agents.close()

    with caplog.at_level(logging.ERROR, "headgate"):
        asyncio.run(walk())
    assert len([one for one in caplog.records if "row of agent 'a' can't be read" in one.getMessage()]) == 1
