"""A mistake in a program is no outage of the server, and a server that answers nonsense is."""

import logging
import socketserver
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from headgate import Decision, Limiter, per_day
from headgate.stores import traffic
from headgate.stores.redis import RedisStore, batching
from tests.support.redis_store import POLICIES
from tests.support.valkey import PATIENCE, ValkeyServer

pytestmark = pytest.mark.once


async def check(limiter: Limiter, kind: str) -> Decision:
    return await limiter.acheck("a") if kind == "tasks" else limiter.check("a")


@pytest.mark.parametrize("error", [AttributeError, IndexError, RuntimeError, TypeError])
async def test_a_mistake_is_logged_once_and_only_its_requests_are_decided_here(
    server: ValkeyServer,
    kind: str,
    error: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def mistaken(*_: Any) -> None:
        raise error("a bug")

    async with RedisStore(server.url, timeout=PATIENCE) as store:
        limiter, events = Limiter(per_day(100), store=store), list[object]()
        store.subscribe(events.append)
        assert not (await check(limiter, kind)).degraded
        with monkeypatch.context() as patch:
            patch.setattr(batching, "read_all", mistaken)
            decisions = [await check(limiter, kind) for _ in range(3)]
        assert [(decision.degraded, bool(decision)) for decision in decisions] == [(True, True)] * 3
        assert not store.degraded
        assert (await check(limiter, kind)).remaining == 95, "the server has counted all, and is asked again"
        assert events == []
        assert (store.traffic.errors, store.traffic.requests) == (3, 5)
        assert store.traffic.recent_mistake == error.__name__
        monkeypatch.setattr(traffic, "_RECENT", 0.0)
        assert store.traffic.recent_mistake == "", "after a while"
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage() == f"decisions are degraded by a mistake: {error.__name__}: a bug"
    assert record.exc_info is not None
    assert record.exc_info[0] is error


@pytest.fixture
def nonsense_server_port() -> Iterator[int]:
    """The port of a server that has the same answer to everything."""

    class NonsenseHandler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while words := self.request.recv(65_536).count(b"\r\n*") + 1 if self.request.recv(1, 2) else 0:
                self.request.sendall(b"+OK\r\n" * words)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), NonsenseHandler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_server_that_answers_nonsense_is_away(
    nonsense_server_port: int, policy: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with RedisStore(f"redis://127.0.0.1:{nonsense_server_port}", on_failure=policy, timeout=PATIENCE) as store:
        limiter = Limiter(per_day(2), store=store)
        decisions = [await check(limiter, kind) for _ in range(3)]
        assert all(decision.degraded for decision in decisions)
        assert sum(map(bool, decisions)) == {"open": 3, "closed": 0, "local": 2}[policy]
        assert store.degraded
    assert "InvalidResponse: expected an answer of the script, got b'OK'" in caplog.text
