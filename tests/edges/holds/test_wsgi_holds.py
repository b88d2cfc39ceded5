"""Slots behind the middleware for WSGI: taken until a body is closed, however it ends."""

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from io import BytesIO
from typing import Any
from wsgiref.util import FileWrapper

import httpx
import pytest

from headgate import Limiter, ManualClock, MemoryStore
from headgate.client import ObeyingTransport, WaitNotice
from headgate.edges.wsgi import RateLimitMiddleware as WsgiMiddleware
from tests.support.edge_holds import ADDRESS, call_wsgi, used_slots
from tests.support.http_edges import HandlerError
from tests.support.obeying_transports import SimulatedClock
from tests.support.valkey import wait_for

pytestmark = pytest.mark.once


def test_a_request_that_is_lost_without_an_end_keeps_its_slot_for_one_lease(
    memory_slots: Limiter, clock: ManualClock
) -> None:
    def iterate(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [])
        yield b"part"
        yield b"part"

    app, other = WsgiMiddleware(iterate, memory_slots), "10.0.0.2"
    lost, alive = call_wsgi(app), call_wsgi(app, REMOTE_ADDR=other)
    assert [next(lost), next(alive)] == [b"part", b"part"]
    del lost  # by a server that doesn't close it
    gc.collect()
    for seconds, taken in ((25, 1), (25, 1), (25, 0)):
        clock.advance(seconds)
        wait_for(lambda: memory_slots.list_holds(other)[0].lease_left > 55, "the renewal")
        assert (used_slots(memory_slots), used_slots(memory_slots, other)) == (taken, 1)
    alive.close()
    assert used_slots(memory_slots, other) == 0


@pytest.mark.parametrize("raised", [False, True])
def test_an_obeying_client_looks_every_second_whether_a_slot_is_free(raised: bool) -> None:
    """However long the lease of the slot is. A denial of the application's own hold is no different."""
    clock, waits = SimulatedClock(), []
    slots = Limiter("1 in flight", store=MemoryStore(clock=clock))
    held = slots.hold(ADDRESS)

    def app(environ: Any, start_response: Any) -> list[bytes]:
        with slots.hold(ADDRESS) if raised else nullcontext():
            start_response("200 OK", [])
            return [b"answer"]

    def waited(notice: WaitNotice) -> None:
        waits.append(notice.seconds)
        if len(waits) == 3:
            held.settle()

    limited = WsgiMiddleware(app, "unlimited" if raised else slots)
    sender = httpx.WSGITransport(limited, remote_addr=ADDRESS)
    transport = ObeyingTransport(sender, clock=clock, jitter=0, on_wait=waited)
    with httpx.Client(transport=transport) as client:
        assert client.get("http://example.org").text == "answer"
    assert waits == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("ending", ["is read", "is closed early", "raises"])
def test_a_wsgi_response_has_its_slot_until_it_ends(memory_slots: Limiter, ending: str) -> None:
    seen: list[int] = []

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        seen.append(used_slots(memory_slots))
        start_response("200 OK", [])
        yield b"part"
        if ending == "raises":
            raise HandlerError
        yield b"part"
        seen.append(used_slots(memory_slots))

    parts = call_wsgi(WsgiMiddleware(app, memory_slots))
    assert used_slots(memory_slots) == 1
    assert (next(parts), seen, used_slots(memory_slots)) == (b"part", [1], 1)
    if ending == "raises":
        with pytest.raises(HandlerError):
            next(parts)
    elif ending == "is read":
        assert [*parts] == [b"part"]
        assert (seen, used_slots(memory_slots)) == ([1, 1], 0)
    parts.close()
    assert used_slots(memory_slots) == 0


def test_a_complete_wsgi_body_keeps_its_slot_and_its_length_until_it_is_closed(memory_slots: Limiter) -> None:
    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [])
        return [b"hello"]

    limited = WsgiMiddleware(app, memory_slots)
    bodies = [call_wsgi(limited), call_wsgi(limited)]
    assert (len(bodies[0]), bodies[0], used_slots(memory_slots)) == (1, [b"hello"], 2)
    statuses: list[str] = []
    denied = call_wsgi(limited, statuses)
    assert (statuses, used_slots(memory_slots)) == (["429 Too Many Requests"], 2)
    assert b"quota-exceeded" in denied[0]
    for body in bodies:
        body.close()
    assert used_slots(memory_slots) == 0


@pytest.mark.parametrize("patched", [True, False])
def test_a_file_that_the_wsgi_server_sends_has_its_slot_until_it_is_closed(
    memory_slots: Limiter, patched: bool
) -> None:
    class SlottedWrapper(FileWrapper):
        """One that takes no other `close`."""

        def __setattr__(self, name: str, value: object) -> None:
            if name == "close" and "close" in self.__dict__:
                raise AttributeError(name)
            super().__setattr__(name, value)

    wrapper, file = FileWrapper if patched else SlottedWrapper, BytesIO(b"hello")

    def app(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [])
        return environ["wsgi.file_wrapper"](file)

    body = call_wsgi(WsgiMiddleware(app, memory_slots), None, **{"wsgi.file_wrapper": wrapper})
    assert isinstance(body, FileWrapper) is patched
    assert b"".join(body) == b"hello"
    assert used_slots(memory_slots) == (1 if patched else 0)
    body.close()
    assert (used_slots(memory_slots), file.closed) == (0, True)


@pytest.mark.parametrize("error", [HandlerError, SystemExit])
@pytest.mark.parametrize("started", [False, True])
def test_a_wsgi_application_that_raises_frees_its_slot(
    memory_slots: Limiter, error: type[BaseException], started: bool
) -> None:
    def app(environ: Any, start_response: Any) -> Any:
        assert used_slots(memory_slots) == 1
        if started:
            start_response("200 OK", [])
        raise error

    with pytest.raises(error):
        call_wsgi(WsgiMiddleware(app, memory_slots))
    assert used_slots(memory_slots) == 0


def test_memory_of_settled_requests_stays_small(memory_slots: Limiter) -> None:
    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [])
        return [b"hello"]

    limited = WsgiMiddleware(app, memory_slots)
    for _ in range(50):
        call_wsgi(limited).close()
    wait_for(lambda: len(memory_slots.list_holds(ADDRESS)) == 0, "nothing to be remembered")
    assert len(memory_slots.store.holds) <= 3  # type: ignore[attr-defined]
