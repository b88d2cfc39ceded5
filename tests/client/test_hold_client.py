"""The clients of the decision service for holds, against a real hub."""

import asyncio
import logging
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import httpx
import pytest

from headgate import HoldError, InvalidInput, ManualClock, Policy, UnknownHold
from headgate.client import HoldClient, HoldDenied, HubUnavailable, Refused, SyncClientHold, SyncHoldClient
from headgate.flow import Flow, adrive, drive
from headgate.gate.accounts import Bound
from tests.support.event_loop import take_turns, wait_until
from tests.support.hub import ADMIN, HubServer, hub_server
from tests.support.threads import run_together
from tests.support.valkey import PATIENCE, wait_for

POLICY = Policy(
    limits={"light": "100000/minute", "normal": "100000/minute"},
    accounts={"tools": ["web"], "default": {"agent": {"slots": "2 in flight"}}, "at": {"acme": {"usd": "10 in all"}}},
    agents={"planner": {"account": "acme"}},
)


class SkippingClock(ManualClock):
    """A clock on which every pause is over at once; `pauses` has their seconds."""

    def __init__(self) -> None:
        super().__init__(1000)
        self.pauses: list[float] = []

    def alarm(self, when: int, wake: Callable[[], None]) -> float | None:
        self.pauses.append((when - self.now()) / 1_000_000)
        self.advance(self.pauses[-1])
        return 0.0


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with hub_server(POLICY) as hub:
        yield hub


@pytest.fixture
def token(hub: HubServer) -> str:
    return hub.register("planner")


def left(hub: HubServer) -> str:
    """What is left of the account's money, and of the agent's slots."""
    usd, slots = [hub.hub.gate.account(path).limits[0].left for path in ("acme", "acme/-/planner")]
    return f"{usd:.2f} {slots}"


def state(hub: HubServer, hold_id: str) -> str:
    return hub.hub.gate.find_hold("planner", hold_id).state


class LossyTransport(httpx.AsyncBaseTransport, httpx.BaseTransport):
    """Loses requests or answers, as the script says: "request", "answer", a status, or "" for neither."""

    def __init__(self, *script: str | int) -> None:
        self.script = list(script)
        self.seen: list[str] = []
        self._sync, self._async = httpx.HTTPTransport(), httpx.AsyncHTTPTransport()

    def _flow(self, request: httpx.Request) -> Flow[httpx.Request, httpx.Response]:
        self.seen.append(f"{request.method} {request.url.path.rpartition('/')[2]}")
        fault = self.script.pop(0) if self.script else ""
        if fault == "request":
            raise httpx.ConnectError("refused")
        if isinstance(fault, int):
            return httpx.Response(fault, json={"error": "unavailable", "detail": "away"}, headers={"retry-after": "2"})
        response: httpx.Response = yield request
        if fault == "answer":
            raise httpx.ReadError("reset")
        return response

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return drive(self._flow(request), self._sync.handle_request)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await adrive(self._flow(request), self._async.handle_async_request)

    def close(self) -> None:
        self._sync.close()

    async def aclose(self) -> None:
        await self._async.aclose()


async def test_a_block_is_settled_with_what_was_used(hub: HubServer, token: str) -> None:
    async with HoldClient(f"http://{hub}", token) as client:
        async with client.hold({"usd": "3"}, session="run-42", tool="web") as hold:
            assert (hold.state, hold.account, hold.costs["usd"]) == ("open", "acme/-/planner", Decimal(3))
            assert left(hub) == "7.00 1"
            hold.use({"usd": 0.1})
            hold.use({"usd": 0.2})  # exact: 0.3
        assert (hold.state, hold.costs["usd"], left(hub)) == ("settled", Decimal("0.3"), "9.70 2")
        async with client.hold({"usd": "1"}):
            pass
        assert left(hub) == "8.70 2"


def test_a_block_in_a_thread_is_settled_with_what_was_used(hub: HubServer, token: str) -> None:
    with SyncHoldClient(f"http://{hub}/", token) as client:
        with client.hold({"usd": "3"}, session="run-42") as hold:
            assert left(hub) == "7.00 1"
            hold.use({"usd": "0.25"})
        assert (hold.state, hold.costs["usd"], left(hub)) == ("settled", Decimal("0.25"), "9.75 2")
        assert client.account("acme").limits[0].left == Decimal("9.75")
        assert client.account("acme") == hub.hub.gate.account("acme")


@pytest.mark.usefixtures("_frequent_switches")
def test_threads_that_use_a_hold_at_the_same_time_add_up(hub: HubServer, token: str) -> None:
    def use_often(hold: SyncClientHold) -> None:
        for _ in range(50_000):
            hold.use({"usd": "0.000001"})

    with SyncHoldClient(f"http://{hub}", token) as client, client.hold({"usd": 1}) as hold:
        sys.setswitchinterval(1e-4)  # the fixture sets it back
        run_together(4, lambda _: use_often(hold))
    assert hold.costs["usd"] == Decimal("0.2")


async def test_the_verbs(hub: HubServer, token: str) -> None:
    async with HoldClient(f"http://{hub}", token) as client:
        hold = await client.hold({"usd": 1}, hold_id="one")
        await hold.extend({"usd": "0.5"}, lease=100)
        assert hold.costs["usd"] == Decimal("1.5")
        found = await client.find_hold("one")
        await found.settle({"usd": Decimal("0.75")})
        assert (found.state, left(hub)) == ("settled", "9.25 2")
        with pytest.raises(HoldError):
            await hold.settle({"usd": 1})
        other = await client.hold({"usd": 1})
        await other.cancel()
        assert (other.state, left(hub)) == ("cancelled", "9.25 2")
        with pytest.raises(UnknownHold, match="unknown hold 'none' of 'this agent'"):
            await client.find_hold("none")
        assert (await client.account("acme")).limits[0].spent == Decimal("0.75")


def test_the_verbs_in_a_thread(hub: HubServer, token: str) -> None:
    with SyncHoldClient(f"http://{hub}", token) as client:
        hold = client.hold({"usd": 1}, hold_id="one")
        hold.extend({"usd": "0.5"}, lease=100)
        client.find_hold("one").settle({"usd": "0.75"})
        assert left(hub) == "9.25 2"
        client.hold({"usd": 1}).cancel()
        assert left(hub) == "9.25 2"
        with pytest.raises(UnknownHold):
            client.find_hold("none")


async def test_a_hold_that_nobody_has_awaited_says_so(hub: HubServer, token: str) -> None:
    async with HoldClient(f"http://{hub}", token) as client:
        with pytest.raises(HoldError, match=r"^hold: expected `await` before it, or `async with`, got neither"):
            bool(client.hold({"usd": 1}))
        with pytest.raises(HoldError, match="`with`; `SyncHoldClient` is the one for threads"), client.hold({}):
            pytest.fail("the block runs without a hold")
        pending = client.hold({"usd": 1})
        async with pending:
            pass
        with pytest.raises(HoldError, match="expected one block for each call, got a second one; call `hold` again"):
            await pending.__aenter__()


async def test_an_admin_holds_for_an_agent(hub: HubServer) -> None:
    async with HoldClient(f"http://{hub}", ADMIN, agent="planner") as client:
        async with client.hold({"usd": 1}) as hold:
            assert hold.account == "acme/-/planner"
        assert left(hub) == "9.00 2"


async def test_a_denial_says_what_bound_and_is_not_repeated(hub: HubServer, token: str) -> None:
    lossy = LossyTransport()
    client = HoldClient(f"http://{hub}", token, http=httpx.AsyncClient(transport=lossy))
    async with client:
        with pytest.raises(HoldDenied) as denied:
            async with client.hold({"usd": "10.01"}):
                pytest.fail("the block must not run")
        assert denied.value.bound == Bound("acme", "usd", "")
        assert denied.value.retry_after_ms is None, "more than there is in all: no wait would help"
        hold = await client.hold({"usd": "9"})
        with pytest.raises(HoldDenied, match="not enough usd left in acme"):
            await hold.extend({"usd": "1.01"})
        assert (left(hub), len(lossy.seen)) == ("1.00 1", 3)


async def test_a_block_that_raises_keeps_the_cost_and_frees_the_slot(hub: HubServer, token: str) -> None:
    async with HoldClient(f"http://{hub}", token) as client:
        for used, expected in [("0", "9.00 2"), ("1.5", "7.50 2")]:
            with pytest.raises(ZeroDivisionError):
                await _fail(client, used)
            assert left(hub) == expected
        entered = asyncio.Event()
        task = asyncio.create_task(_hold_for_ever(client, entered))
        await asyncio.wait_for(entered.wait(), PATIENCE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert left(hub) == "6.50 2"


async def _fail(client: HoldClient, used: str) -> None:
    async with client.hold({"usd": 1}) as hold:
        hold.use({"usd": used})
        raise ZeroDivisionError


async def _hold_for_ever(client: HoldClient, entered: asyncio.Event) -> None:
    async with client.hold({"usd": 1}, timeout=30):
        entered.set()
        await asyncio.Event().wait()


async def test_a_hold_that_nobody_waits_for_any_more_is_cancelled(hub: HubServer, token: str) -> None:
    async with HoldClient(f"http://{hub}", token) as client:
        others = [await client.hold({"usd": 1}) for _ in range(2)]  # all slots
        task = asyncio.create_task(_hold_for_ever(client, asyncio.Event()))
        queues = hub.hub.gate._hold_queues
        await asyncio.to_thread(wait_for, lambda: queues.queues, "the hold to wait")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(wait_for, lambda: not queues.queues, "it to hang up", 20)  # not after its 30 s
        await others[0].settle({"usd": 0})
    assert left(hub) == "9.00 1"


def test_a_block_in_a_thread_that_raises_keeps_the_cost(hub: HubServer, token: str) -> None:
    with SyncHoldClient(f"http://{hub}", token) as client:
        with pytest.raises(ZeroDivisionError), client.hold({"usd": 1}) as hold:
            raise ZeroDivisionError
        assert (hold.state, left(hub)) == ("expired", "9.00 2")


async def test_the_lease_is_renewed_while_the_block_runs(hub: HubServer, token: str) -> None:
    async with HoldClient(f"http://{hub}", token, clock=hub.clock) as client:
        async with client.hold({"usd": 1}, lease=60) as hold:
            for _ in range(6):
                await asyncio.sleep(0)  # the renewer goes to sleep
                await asyncio.to_thread(wait_for, lambda: hub.clock._alarms, "the pause of the renewer")
                hub.clock.advance(20)
                await asyncio.to_thread(_renewed, hub, hold.id)
            assert not hold.lost
        assert (hold.state, left(hub)) == ("settled", "9.00 2")


def _renewed(hub: HubServer, hold_id: str) -> None:
    wait_for(lambda: hub.hub.gate.find_hold("planner", hold_id).lease_left == 60, "the renewal")


def test_the_lease_is_renewed_in_a_thread(hub: HubServer, token: str) -> None:
    with SyncHoldClient(f"http://{hub}", token, clock=hub.clock) as client:
        with client.hold({"usd": 1}, lease=60) as hold:
            for _ in range(6):
                wait_for(lambda: hub.clock._alarms, "the pause of the renewer")
                hub.clock.advance(20)
                _renewed(hub, hold.id)
        assert (hold.state, left(hub)) == ("settled", "9.00 2")


async def test_a_lease_is_not_renewed_beyond_the_greatest_age(hub: HubServer, token: str) -> None:
    async with HoldClient(f"http://{hub}", token, clock=hub.clock) as client:
        async with client.hold({"usd": 1}, lease=60, max_age=20) as hold:
            await asyncio.to_thread(wait_for, lambda: hub.clock._alarms, "the pause of the renewer")
            hub.clock.advance(20)
            assert hold._renewer is not None
            await asyncio.wait([hold._renewer], timeout=PATIENCE)
            hub.clock.advance(60)
            assert state(hub, hold.id) == "expired"
        assert (hold.state, left(hub)) == ("settled", "9.00 2")  # late, but known


@pytest.mark.parametrize("fault", ["request", "answer", 503, 502])
async def test_lost_requests_and_answers_are_repeated_and_charge_once(
    hub: HubServer, token: str, fault: str | int
) -> None:
    clock, lossy = SkippingClock(), LossyTransport(fault, fault, "")
    http = httpx.AsyncClient(transport=lossy)
    async with HoldClient(f"http://{hub}", token, clock=clock, http=http) as client:
        hold = await client.hold({"usd": 1})
        assert left(hub) == "9.00 1"
        lossy.script = [fault, ""]
        await hold.extend({"usd": 1})
        assert left(hub) == "8.00 1"
        lossy.script = [fault, ""]
        await hold.settle({"usd": "0.5"})
        assert left(hub) == "9.50 2"
    assert lossy.seen == ["POST holds"] * 3 + ["POST extend"] * 2 + ["POST settle"] * 2
    least = 2 if isinstance(fault, int) else 0.25
    assert all(least <= pause <= 2.2 for pause in clock.pauses)


@pytest.mark.parametrize("fault", ["answer", 503])
def test_a_thread_repeats_lost_requests_too(hub: HubServer, token: str, fault: str | int) -> None:
    clock, lossy = SkippingClock(), LossyTransport(fault, "")
    with SyncHoldClient(f"http://{hub}", token, clock=clock, http=httpx.Client(transport=lossy)) as client:
        hold = client.hold({"usd": 1})
        lossy.script = [fault, ""]
        hold.settle({"usd": "0.5"})
    assert left(hub) == "9.50 2"


async def test_a_hub_that_stays_away_is_given_up_in_time() -> None:
    clock, lossy = SkippingClock(), LossyTransport(*["request"] * 1000)
    http = httpx.AsyncClient(transport=lossy)
    async with HoldClient("http://127.0.0.1:1", "token", clock=clock, retry_within=30, http=http) as client:
        with pytest.raises(HubUnavailable, match="refused"):
            await client.hold({"usd": 1})
    assert 15 <= sum(clock.pauses) <= 30
    assert len(lossy.seen) == len(clock.pauses) + 1 <= 12


class DrippingTransport(httpx.BaseTransport):
    """Answers a byte each second, and never ends."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(201, stream=Drops(self.clock))


class Drops(httpx.SyncByteStream):
    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock

    def __iter__(self) -> Iterator[bytes]:
        while self._clock.now() < 3600 * 1_000_000:
            self._clock.advance(1)
            yield b" "


def test_an_answer_that_drips_is_waited_for_no_longer_than_one_that_does_not_come() -> None:
    clock = SkippingClock()
    http = httpx.Client(transport=DrippingTransport(clock))
    client = SyncHoldClient("http://127.0.0.1:1", "token", clock=clock, answer_within=5, retry_within=20, http=http)
    with client, pytest.raises(HubUnavailable, match="no whole answer within 5 seconds"):
        client.hold({"usd": 1})
    assert 1020 <= clock.now() / 1_000_000 <= 1025


class HtmlTransport(httpx.BaseTransport):
    """A proxy that answers with a page of its own, piece by piece as from a socket."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=HtmlStream())


class HtmlStream(httpx.SyncByteStream):
    def __iter__(self) -> Iterator[bytes]:
        yield b"<html>"
        yield b"</html>"


def test_an_answer_that_is_none_of_a_hub_says_where_it_is_from() -> None:
    http = httpx.Client(transport=HtmlTransport())
    client = SyncHoldClient("http://127.0.0.1:1", "token", clock=SkippingClock(), retry_within=0, http=http)
    with (
        client,
        pytest.raises(HubUnavailable, match=r"http://127.0.0.1:1/v1/holds: expected the answer of a headgate hub"),
    ):
        client.hold({"usd": 1})


async def test_a_settlement_that_fails_does_not_hide_the_error_of_the_block(
    hub: HubServer, token: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock, lossy = SkippingClock(), LossyTransport()
    http = httpx.AsyncClient(transport=lossy)
    client = HoldClient(f"http://{hub}", token, clock=ManualClock(), retry_within=0, http=http)
    async with client:
        lossy.script = ["", *["request"] * 9]
        with caplog.at_level(logging.WARNING, "headgate.client"), pytest.raises(ZeroDivisionError):
            await _fail(client, "0")
        assert "was not ended" in caplog.text
        lossy.script = []
        lossy.script = ["", *["request"] * 9]
        with pytest.raises(HubUnavailable):
            async with client.hold({"usd": 1}):
                pass
    assert clock.pauses == []


async def test_the_programs_own_limit_is_waited_for(token: str) -> None:
    policy = Policy(limits={"normal": "1/second", "light": "100/minute"}, agents={"planner": {"account": "acme"}})
    with hub_server(policy) as hub:

        class HubAdvancingClock(SkippingClock):
            def alarm(self, when: int, wake: Callable[[], None]) -> float | None:
                hub.clock.advance((when - self.now()) / 1_000_000)
                return super().alarm(when, wake)

        clock = HubAdvancingClock()
        async with HoldClient(f"http://{hub}", hub.register("planner"), clock=clock) as client:
            for _ in range(3):
                await (await client.hold({"usd": 1})).settle()
            assert len(clock.pauses) == 2
            assert min(clock.pauses) >= 1
            short = HoldClient(f"http://{hub}", ADMIN, agent="planner", retry_within=0)
            await short.close()


@pytest.mark.parametrize(
    ("status", "body", "error", "text"),
    [
        (400, {"error": "invalid", "detail": "cost: no"}, Refused, "invalid: cost: no"),
        (401, {"error": "unauthorized", "detail": "who?"}, Refused, "unauthorized: who?"),
        (404, b"<html>", Refused, "status_404: "),
        (200, b"<html>", HubUnavailable, "expected the answer of a headgate hub"),
        (200, b"[]", HubUnavailable, "expected the answer of a headgate hub"),
        (201, {"id": "x"}, HubUnavailable, "expected the hold of a headgate hub"),
        (201, {"id": "x", "state": "open", "costs": {"usd": "x"}}, HubUnavailable, "expected the hold of a headgate"),
        (409, {"error": "hold_error", "detail": "other costs"}, HoldError, "other costs"),
        (429, {"error": "rate_limited", "detail": "no", "account": "a"}, HoldDenied, "rate limited: no"),
        (429, ["odd"], Refused, "status_429"),
        (302, {}, Refused, "status_302"),
    ],
)
async def test_what_a_hub_answers_is_an_error_of_its_own(
    status: int, body: Any, error: type[Exception], text: str
) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        given = {"content": body} if isinstance(body, bytes) else {"json": body}
        return httpx.Response(status, **given)

    http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    async with HoldClient("http://hub.example", "token", http=http, clock=SkippingClock()) as client:
        with pytest.raises(error, match=text):
            await client.hold({"usd": 1})


async def test_a_denial_after_which_no_wait_helps_is_not_repeated() -> None:
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        body = {"error": "rate_limited", "detail": "blocked by an operator", "retry_after_ms": 1000}
        return httpx.Response(429, json=body | {"no_wait_helps": True})

    http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    async with HoldClient("http://hub.example", "token", http=http, clock=SkippingClock()) as client:
        with pytest.raises(HoldDenied, match="blocked by an operator") as denied:
            await client.hold({"usd": 1})
    assert (denied.value.retry_after_ms, len(asked)) == (None, 1)


@pytest.mark.parametrize(
    ("costs", "text"),
    [
        (5, "costs: expected costs by resource"),
        ({"usd": -1}, "cost of usd: expected a number, 0 or more, got -1"),
        ({"usd": float("nan")}, "cost of usd: expected a number, 0 or more, got nan"),
        ({"usd": "x"}, "cost of usd: expected a number, got 'x'"),
        ({"usd": None}, "cost of usd: expected a number, got None"),
        ({"usd": True}, "cost of usd: expected a number, got True"),
    ],
)
def test_wrong_costs_are_refused_before_anything_is_sent(hub: HubServer, token: str, costs: Any, text: str) -> None:
    with SyncHoldClient(f"http://{hub}", token) as client:
        with pytest.raises(InvalidInput, match=text):
            client.hold(costs)
        hold = client.hold({"usd": 1})
        for verb in (hold.use, hold.settle, hold.extend):
            with pytest.raises(InvalidInput, match=text):
                verb(costs)
    assert left(hub) == "9.00 1"


@pytest.mark.parametrize("url", ["", "hub", "ws://hub", "http://", "http://a@b", "http://hub?x", 5])
def test_a_wrong_address_is_refused(url: Any) -> None:
    with pytest.raises(InvalidInput, match="url: expected the address of a hub"):
        SyncHoldClient(url, "token")
    with pytest.raises(InvalidInput, match="expected options among"):
        SyncHoldClient("http://hub", "token", most=5)  # type: ignore[call-arg]


def test_many_threads_share_a_client(hub: HubServer, token: str) -> None:
    with SyncHoldClient(f"http://{hub}", token) as client, ThreadPoolExecutor(8) as pool:

        def work(_: int) -> bool:
            try:
                with client.hold({"usd": "0.3"}, timeout=30) as hold:
                    hold.use({"usd": "0.3"})
            except HoldDenied:
                return False
            return True

        assert sum(pool.map(work, range(40))) == 33
    assert left(hub) == "0.10 2"


class SlowHub:
    """A hub that answers holds only when `answer` is set. `asked` has what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answer = asyncio.Event()

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.path)
        if request.url.path == "/v1/holds":
            await self.answer.wait()
        return httpx.Response(200, json={})

    def client(self, clock: ManualClock) -> HoldClient:
        return HoldClient(
            "http://hub", "token", http=httpx.AsyncClient(transport=httpx.MockTransport(self)), clock=clock
        )


async def test_a_hold_that_waits_hangs_up_and_is_cancelled_once_the_hub_has_surely_seen_it() -> None:
    hub, clock = SlowHub(), ManualClock(1000)
    async with hub.client(clock) as client:
        task = asyncio.create_task(_hold_for_ever(client, asyncio.Event()))
        await wait_until(lambda: hub.asked, "the hold")
        task.cancel()
        await wait_until(lambda: clock._alarms, "the pause")
        clock.advance(0.499)
        await take_turns(20)
        assert hub.asked == ["/v1/holds"]
        clock.advance(0.001)
        await wait_until(lambda: len(hub.asked) == 2, "the cancellation")
        assert re.fullmatch("/v1/holds/[0-9a-f]{32}/cancel", hub.asked[1])


async def test_a_hold_that_does_not_wait_is_cancelled_after_its_answer() -> None:
    hub, clock = SlowHub(), SkippingClock()
    async with hub.client(clock) as client:
        task = asyncio.ensure_future(client.hold({"usd": 1}, hold_id="one"))
        await wait_until(lambda: hub.asked, "the hold")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await take_turns(20)
        assert hub.asked == ["/v1/holds"]
        hub.answer.set()
        await wait_until(lambda: len(hub.asked) == 2, "the cancellation")
        assert (hub.asked[1], clock.pauses) == ("/v1/holds/one/cancel", [])
