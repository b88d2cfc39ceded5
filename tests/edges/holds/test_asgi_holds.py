"""Requests in flight: a slot is taken exactly as long as a request lives, and costs are settled through its hold."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from headgate import Gate, InvalidInput, Limiter, ManualClock, MemoryStore, Policy
from headgate.edges import settlement
from headgate.edges.asgi import Message, RateLimitMiddleware, Receive, Scope, Send
from headgate.edges.decorator import rate_limited
from headgate.edges.websocket import WebSocketLimits
from headgate.edges.wsgi import RateLimitMiddleware as WsgiMiddleware
from headgate.lease_renewer import RENEWERS
from tests.support.edge_holds import ADDRESS, LAST, PART, SLOTS, START, RequestInProgress, middleware_with, used_slots
from tests.support.event_loop import wait_until
from tests.support.http_edges import HandlerError
from tests.support.wrapped_store import WrappedHoldStore, WrappedStore

pytestmark = pytest.mark.once


# HTTP ----------------------------------------------------------------------------------------------------------------


async def test_a_request_has_its_slot_until_its_last_byte(slots: Limiter) -> None:
    request = await RequestInProgress().begin(middleware_with(slots))
    assert used_slots(slots) == 1
    await request.receive({"type": "http.request", "body": b""})
    assert used_slots(slots) == 1
    await request.step(START, PART, PART)
    assert used_slots(slots) == 1
    await request.step(LAST)
    assert used_slots(slots) == 0
    await request.end()  # after its background tasks
    assert used_slots(slots) == 0
    assert request.headers == {
        "ratelimit-policy": '"default";q=2;qu="concurrent-requests"',
        "ratelimit": '"default";r=1',
    }


@pytest.mark.parametrize("how", ["returns", "raises", "cancelled"])
@pytest.mark.parametrize("sent", [[], [START], [START, PART]], ids=["nothing", "start", "part"])
async def test_a_slot_is_free_however_a_request_ends(slots: Limiter, sent: list[Message], how: str) -> None:
    request = await RequestInProgress().begin(middleware_with(slots))
    await request.step(*sent)
    assert used_slots(slots) == 1
    await request.end(how)
    assert used_slots(slots) == 0


async def test_a_client_that_leaves_frees_its_slot_when_the_application_ends(slots: Limiter) -> None:
    request = await RequestInProgress().begin(middleware_with(slots))
    await request.step(START, PART)
    await request.receive({"type": "http.disconnect"})
    assert used_slots(slots) == 1  # the application may still be at work
    await request.end()
    assert used_slots(slots) == 0


async def test_a_request_without_a_free_slot_is_denied_and_takes_nothing(slots: Limiter, clock: ManualClock) -> None:
    make = middleware_with(slots)
    first, second = await RequestInProgress().begin(make), await RequestInProgress().begin(make)
    clock.advance(20.5)
    denied = await RequestInProgress().begin(make)
    assert (denied.status, denied.headers["retry-after"], used_slots(slots)) == (429, "1", 2)
    assert denied.headers["ratelimit"] == '"default";r=0;t=1'
    await first.end()
    third = await RequestInProgress().begin(make)
    assert used_slots(slots) == 2
    await second.end()
    await third.end()
    assert used_slots(slots) == 0


async def test_keys_and_anonymous_callers_have_their_own_slots(slots: Limiter) -> None:
    make = middleware_with(slots, key=lambda request: request.headers.get("x-key"))
    named = [await RequestInProgress(headers=[(b"x-key", b"ann")]).begin(make) for _ in range(3)]
    anonymous = await RequestInProgress().begin(make)
    assert [one.begun.is_set() for one in (*named, anonymous)] == [True, True, False, True]
    assert (used_slots(slots, "ann"), used_slots(slots)) == (2, 0)  # addresses have a key space of their own
    for one in (*named[:2], anonymous):
        await one.end()
    assert used_slots(slots, "ann") == 0


async def test_a_rate_and_slots_hold_together(store: Any, clock: ManualClock) -> None:
    limiter = Limiter("3/minute; 2 in flight", store=store)
    make = middleware_with(limiter)
    requests = [await RequestInProgress().begin(make) for _ in range(3)]
    assert [one.begun.is_set() for one in requests] == [True, True, False]
    assert "violated-policies" in requests[2].sent[1]["body"].decode()
    assert '"2 in flight"' in requests[2].sent[1]["body"].decode()
    for one in requests[:2]:
        await one.end()
    last = await RequestInProgress().begin(make)  # a denial has counted nothing
    await last.end()
    denied = await RequestInProgress().begin(make)
    assert (denied.status, denied.headers["retry-after"]) == (429, "20")


async def test_a_limit_function_may_return_slots(store: Any) -> None:
    calls: list[str] = []

    def limit(request: Any) -> str:
        calls.append(request.path)
        return f"{SLOTS} in flight" if request.path == "/slow" else "100/minute"

    middleware: Any = None

    def make(app: Any) -> Any:
        nonlocal middleware
        middleware = middleware or RateLimitMiddleware(lambda *call: call[0]["app"](*call), limit, store=store)
        return lambda scope, receive, send: middleware({**scope, "app": app}, receive, send)

    limiter = Limiter(f"{SLOTS} in flight", store=store)
    for _ in range(2):  # the second time by the fast path, if there is one
        first, second, third = [await RequestInProgress("/slow").begin(make) for _ in range(3)]
        assert [one.begun.is_set() for one in (first, second, third)] == [True, True, False]
        assert (third.status, used_slots(limiter)) == (429, SLOTS)
        other = await RequestInProgress("/").begin(make)
        assert "ratelimit" not in other.headers if other.sent else other.begun.is_set()
        await first.step(START, LAST)
        assert used_slots(limiter) == SLOTS - 1
        for one in (first, second, other):
            await one.end()
        assert used_slots(limiter) == 0
    assert len(calls) == 8  # once for each request


# Leases --------------------------------------------------------------------------------------------------------------


async def test_the_lease_is_renewed_as_long_as_the_request_lives(slots: Limiter, clock: ManualClock) -> None:
    request = await RequestInProgress().begin(middleware_with(slots))
    for _ in range(6):
        clock.advance(25)
        await wait_until(lambda: slots.list_holds(ADDRESS)[0].lease_left > 55, "the renewal")
        assert used_slots(slots) == 1
    renewer = RENEWERS._running[id(slots.store)]
    assert renewer.renews()
    await request.end()
    assert used_slots(slots) == 0
    assert not renewer.renews()


async def test_a_hold_that_was_forgotten_is_charged_what_it_has_cost_more(
    store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    limiter = Limiter("100/hour", store=store)
    request = await RequestInProgress().begin(middleware_with(limiter, cost=10, settle=lambda request, response: 30))
    limiter.reset(ADDRESS)
    await request.step(START, LAST)
    assert limiter.peek(ADDRESS).remaining == 80
    await request.end()
    assert not caplog.records


# Costs ---------------------------------------------------------------------------------------------------------------


def count_passes(limiter: Limiter) -> int:
    """How many requests pass at once."""
    count = 0
    while limiter.check(ADDRESS):
        count += 1
    return count


@pytest.mark.parametrize(
    "options",
    [{"settle": lambda request, response: 0}, {"counts": "failures"}],
    ids=["settle", "counts"],
)
async def test_what_is_given_back_late_lets_no_more_through_than_the_limit(
    store: Any, clock: ManualClock, options: dict[str, Any]
) -> None:
    limiter = Limiter("60/minute burst 10", store=store)
    request = await RequestInProgress().begin(middleware_with(limiter, cost=5, **options))
    clock.advance(30)  # it is full again
    assert limiter.check(ADDRESS, 3)
    await request.step(START, LAST)
    assert count_passes(limiter) == 7
    await request.end()


async def test_what_is_given_back_at_once_is_given_back_in_full(store: Any) -> None:
    limiter = Limiter("60/minute burst 10", store=store)
    request = await RequestInProgress().begin(middleware_with(limiter, cost=5, settle=lambda request, response: 2))
    assert limiter.peek(ADDRESS).remaining == 5
    await request.step(START, LAST)
    assert limiter.peek(ADDRESS).remaining == 8
    await request.end()


async def test_a_higher_cost_is_charged_even_into_debt(store: Any) -> None:
    limiter = Limiter("60/minute; 2 in flight", store=store)
    request = await RequestInProgress().begin(middleware_with(limiter, cost=5, settle=lambda request, response: 65))
    await request.step(START, LAST)
    assert limiter.peek(ADDRESS).retry_after == 6.0
    await request.end()


@pytest.mark.parametrize("refund", [False, True])
async def test_a_crash_frees_the_slot_and_keeps_the_cost_unless_that_is_to_be_refunded(
    store: Any, refund: bool
) -> None:
    limiter = Limiter("60/minute; 100 in flight", store=store)
    request = await RequestInProgress().begin(middleware_with(limiter, cost=5, refund_crashes=refund))
    await request.end("raises")
    assert limiter.peek(ADDRESS).remaining == (60 if refund else 55)


@pytest.mark.parametrize("failure", ["raises", "returns no number", "takes too long"])
async def test_a_settlement_that_fails_frees_the_slot_and_keeps_the_cost(
    slots: Limiter, failure: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(settlement, "_SETTLE_SECONDS", 0.01)

    async def settle(request: Any, response: Any) -> Any:
        if failure == "raises":
            raise HandlerError
        if failure == "takes too long":
            assert used_slots(slots) == 1
            await asyncio.Event().wait()
        return "5"

    costs = Limiter("60/minute; 100 in flight", store=slots.store)
    make = middleware_with(slots, settle=settle)
    request = await RequestInProgress().begin(lambda app: make(RateLimitMiddleware(app, costs, cost=5, settle=settle)))
    with caplog.at_level(logging.CRITICAL, "headgate"):
        await request.step(START, LAST)
    assert (used_slots(slots), costs.peek(ADDRESS).remaining) == (0, 55)
    await request.end()


async def test_a_client_that_leaves_before_the_response_gets_nothing_back(store: Any) -> None:
    limiter = Limiter("60/minute; 100 in flight", store=store)
    request = await RequestInProgress().begin(middleware_with(limiter, cost=5, counts="failures"))
    await request.receive({"type": "http.disconnect"})
    await request.step(START, LAST)
    assert limiter.peek(ADDRESS).remaining == 55
    await request.end()


# Several limits ------------------------------------------------------------------------------------------------------


async def test_of_several_limits_all_have_a_slot_or_none(store: Any) -> None:
    default = Limiter(f"{SLOTS} in flight", store=store, name="default")
    login = Limiter("1 in flight", store=store, name="login")
    rate = Limiter("3/minute", store=WrappedStore(clock=ManualClock()), name="rate")
    make = middleware_with(default, routes={"/login": login, "/poll": rate})
    odd = await RequestInProgress("/login/").begin(make)  # it counts for the pattern and the default limit
    assert (used_slots(default), login.peek(ADDRESS).remaining) == (1, 0)
    denied = await RequestInProgress("/LOGIN").begin(make)
    assert (denied.status, used_slots(default)) == (429, 1)
    mixed = await RequestInProgress("/poll/").begin(make)
    assert (used_slots(default), rate.peek(ADDRESS).remaining) == (2, 2)
    denied = await RequestInProgress("/POLL").begin(make)
    assert (denied.status, rate.peek(ADDRESS).remaining) == (429, 2)
    for one in (odd, mixed):
        await one.end()
    assert (used_slots(default), login.peek(ADDRESS).remaining, rate.peek(ADDRESS).remaining) == (0, 1, 2)


@pytest.mark.parametrize("route_fails", [False, True])
async def test_a_store_that_fails_frees_the_slots_in_the_others(
    store: Any, route_fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = WrappedHoldStore(clock=ManualClock())

    async def fail(*arguments: object, **options: object) -> Any:
        raise HandlerError

    good, bad = Limiter(f"{SLOTS} in flight", store=store), Limiter("5 in flight", store=broken)
    default, route = (good, bad) if route_fails else (bad, good)
    make = middleware_with(default, routes={"/login": route})
    request = await RequestInProgress("/login/").begin(make)
    assert used_slots(good) == 1
    monkeypatch.setattr(broken, "asettle", fail)
    await request.end()
    assert used_slots(good) == 0
    monkeypatch.setattr(broken, "ahold", fail)
    refused = await RequestInProgress("/login/").begin(make)
    with pytest.raises(HandlerError):
        await refused.task
    assert used_slots(good) == 0


async def test_the_headers_tell_of_the_limit_that_lets_the_fewest_more_pass(slots: Limiter) -> None:
    rate = Limiter("30/minute", store=slots.store, name="rate")
    for told in ('"default";r=1', '"default";r=1', '"rate";r=0;t=2'):  # a slot is one request, whatever that costs
        request = await RequestInProgress().begin(
            lambda app: RateLimitMiddleware(RateLimitMiddleware(app, rate, cost=10), slots, cost=10)
        )
        await request.step(START, LAST)
        await request.end()
        assert request.headers["ratelimit"] == told


# WebSockets ----------------------------------------------------------------------------------------------------------

ACCEPT: Message = {"type": "websocket.accept"}


@pytest.mark.parametrize("how", ["returns", "raises", "cancelled"])
@pytest.mark.parametrize("answers", [[], [ACCEPT], [ACCEPT, {"type": "websocket.close"}]], ids=["none", "one", "both"])
@pytest.mark.parametrize("options", [{}, {"settle": lambda request, response: 1}], ids=["", "settle"])
async def test_a_websocket_has_its_slot_until_its_end(
    slots: Limiter, answers: list[Message], how: str, options: dict[str, Any]
) -> None:
    connection = await RequestInProgress("/", "websocket").begin(middleware_with(slots, **options))
    await connection.receive({"type": "websocket.connect"})
    assert used_slots(slots) == 1
    await connection.step(*answers)
    assert used_slots(slots) == 1
    await connection.receive({"type": "websocket.disconnect", "code": 1005})
    assert used_slots(slots) == 1
    await connection.end(how)
    assert used_slots(slots) == 0


async def test_a_connect_without_a_free_slot_is_denied(slots: Limiter) -> None:
    make = middleware_with(slots)
    connections = [await RequestInProgress("/", "websocket").begin(make) for _ in range(SLOTS)]
    denied = RequestInProgress("/", "websocket")
    denied.incoming.put_nowait({"type": "websocket.connect"})
    await denied.begin(make)
    assert denied.sent == [{"type": "websocket.close", "code": 1013, "reason": "rate limited; retry in 1000 ms"}]
    assert used_slots(slots) == SLOTS
    for one in connections:
        await one.end()
    assert used_slots(slots) == 0


async def test_a_connection_with_a_slot_is_settled_at_its_end(store: Any) -> None:
    limiter = Limiter("60/minute; 100 in flight", store=store)
    make = middleware_with(limiter, cost=10, counts="failures")
    connection = await RequestInProgress("/", "websocket").begin(make)
    await connection.step(ACCEPT)
    assert limiter.peek(ADDRESS).remaining == 50
    await connection.end()
    assert limiter.peek(ADDRESS).remaining == 60
    for refund, left in ((False, 50), (True, 50)):
        crashed = await RequestInProgress("/", "websocket").begin(
            middleware_with(limiter, cost=10, refund_crashes=refund)
        )
        await crashed.end("raises")
        assert limiter.peek(ADDRESS).remaining == left


async def test_a_connection_whose_limits_cant_be_found_out_has_no_slot(slots: Limiter) -> None:
    def fail(request: Any) -> str:
        raise HandlerError

    connection = await RequestInProgress("/", "websocket").begin(
        middleware_with(slots, websocket=WebSocketLimits(received=fail))
    )
    with pytest.raises(HandlerError):
        await connection.task
    assert used_slots(slots) == 0


# Mistakes ------------------------------------------------------------------------------------------------------------


async def hello(scope: Scope, receive: Receive, send: Send) -> None: ...


def test_slots_need_a_store_that_can_hold(clock: ManualClock) -> None:
    store, text = (
        WrappedStore(clock=clock),
        "expected a store that can hold slots, such as MemoryStore() or RedisStore(...), got",
    )
    made: list[Callable[[], object]] = [
        lambda: RateLimitMiddleware(hello, "5 in flight", store=store),
        lambda: RateLimitMiddleware(hello, "5/minute", store=store, routes={"/a": "5 in flight; 5/minute"}),
        lambda: WsgiMiddleware(hello, Limiter("5 in flight", store=store)),  # type: ignore[arg-type]
        lambda: rate_limited("5 in flight", store=store, name="work")(count_passes),
    ]
    for make in made:
        with pytest.raises(InvalidInput) as refused:
            make()
        assert text in str(refused.value)


def test_a_gate_has_no_slots() -> None:
    gate = Gate(Policy())
    for options in ({"tier": "5 in flight"}, {"routes": {"/a": "5 in flight"}}):
        with pytest.raises(
            InvalidInput, match="RateLimitMiddleware tier: expected one of light, normal, heavy, got '5 in"
        ):
            RateLimitMiddleware(hello, gate=gate, **options)


@pytest.mark.parametrize("name", ["received", "received_bytes", "sent", "sent_bytes"])
def test_messages_have_no_slots(name: str, free: Limiter) -> None:
    limits: Any = {name: "5 in flight"}
    with pytest.raises(InvalidInput, match=f"WebSocketLimits {name}: expected a limit of messages or bytes"):
        RateLimitMiddleware(hello, free, websocket=WebSocketLimits(**limits))


async def test_no_hold_is_made_where_nothing_is_settled(clock: ManualClock) -> None:
    limiter = Limiter("60/minute", store=MemoryStore(clock=clock))
    request = await RequestInProgress().begin(middleware_with(limiter))
    assert limiter.list_holds(ADDRESS) == []
    await request.end()
