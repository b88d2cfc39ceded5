"""Costs with decimals at the edges: dollars, as far as a limit counts them."""

from decimal import Decimal
from typing import Any

import httpx
import pytest

from headgate import Gate, InvalidInput, Limiter, ManualClock, MemoryStore, Policy, RateLimited
from headgate.edges.asgi import RateLimitMiddleware
from headgate.edges.decorator import rate_limited
from headgate.edges.wsgi import RateLimitMiddleware as WsgiMiddleware
from tests.support.http_edges import AsgiEdge, Edge, WsgiEdge, client_of, every_edge
from tests.support.wrapped_store import WrappedHoldStore, WrappedStore

pytestmark = pytest.mark.once

BUDGET = "1 usd/calendar month"
KEY = "agent-7"
STORES = [MemoryStore, WrappedHoldStore, WrappedStore]  # the last one can't hold
middlewares = pytest.mark.parametrize("edge", [AsgiEdge, WsgiEdge])


@pytest.fixture(params=STORES)
def budget(request: pytest.FixtureRequest, clock: ManualClock) -> Limiter:
    return Limiter(BUDGET, store=request.param(clock=clock), name="budget")


def left(limiter: Limiter) -> Decimal:
    return limiter.peek(KEY).left


def known(request: Any) -> str:
    return KEY


@every_edge
@pytest.mark.parametrize("cost", ["0.4", 0.4, Decimal("0.40"), lambda request: "0.4"])
def test_a_request_costs_a_part_of_a_dollar(edge: type[Edge], budget: Limiter, cost: Any) -> None:
    with client_of(edge(limiter=budget, key=known, cost=cost)) as client:
        answers = [client.get("/") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert [answer.headers["ratelimit"].partition(";t")[0] for answer in answers] == ['"budget";r=0'] * 3
    assert left(budget) == Decimal("0.2")


@every_edge
def test_a_cost_is_one_dollar_by_default(edge: type[Edge], budget: Limiter) -> None:
    with client_of(edge(limiter=budget, key=known)) as client:
        assert [client.get("/").status_code for _ in range(2)] == [200, 429]


@middlewares
@pytest.mark.parametrize(
    ("actual", "charged"),
    [
        ("0.25", "0.25"),
        (0.1, "0.1"),
        (Decimal("0.9"), "0.9"),
        (0, "0"),
        ("0.0000001", "0.000001"),  # finer than a millionth of a dollar: rounded up
        (1 / 3, "0.333334"),
        (0.1 + 0.2, "0.300001"),
    ],
)
def test_a_response_is_settled_with_what_it_did_cost(
    edge: type[Edge], budget: Limiter, actual: Any, charged: str
) -> None:
    with client_of(edge(limiter=budget, key=known, cost="0.5", settle=lambda request, response: actual)) as client:
        assert client.get("/").status_code == 200
    assert left(budget) == 1 - Decimal(charged)


@middlewares
@pytest.mark.parametrize("actual", ["-1", "much", float("nan"), None, True])
def test_a_settlement_that_is_no_number_keeps_the_reserved_cost(
    edge: type[Edge], clock: ManualClock, caplog: pytest.LogCaptureFixture, actual: Any
) -> None:
    budget = Limiter(BUDGET, store=MemoryStore(clock=clock))
    with client_of(edge(limiter=budget, key=known, cost="0.5", settle=lambda request, response: actual)) as client:
        assert client.get("/").status_code == 200
    assert left(budget) == Decimal("0.5")
    assert "RateLimitMiddleware settle: expected a number, 0 or more, got" in caplog.text


@middlewares
def test_a_cost_that_is_too_fine_is_refused_before_anything_counts(edge: type[Edge], budget: Limiter) -> None:
    text = r"RateLimitMiddleware cost: expected a number with at most 6 decimals \(round it, if it was computed\), got"
    with pytest.raises(InvalidInput, match=f"^{text} '0.0000001'$"):
        edge(limiter=budget, cost="0.0000001").serve().__enter__()
    app = edge(limiter=budget, key=known, cost=lambda request: 0.1 + 0.2)
    with client_of(app) as client:
        assert client.get("/").status_code == 500
    assert left(budget) == 1


@pytest.mark.parametrize("make", [RateLimitMiddleware, WsgiMiddleware])
@pytest.mark.parametrize("limits", [{"limiter": "60/minute"}, {"gate": Gate(Policy())}, {"limiter": "5 in flight"}])
def test_what_counts_whole_numbers_takes_no_others(make: Any, limits: Any) -> None:
    with pytest.raises(
        InvalidInput, match=r"^\w+ cost: expected a whole number, 0 or more, or a function .*, got '1'$"
    ):
        make(None, **limits, cost="1")
    with pytest.raises(
        InvalidInput, match=r"^\w+ cost: expected a whole number, 0 or more, or a function .*, got 0.5$"
    ):
        make(None, **limits, cost=0.5)


@pytest.mark.parametrize("cost", ["-1", "much", True, None])
def test_a_cost_that_no_limit_could_count_is_refused_whatever_the_limit(cost: Any) -> None:
    for limit in (BUDGET, "unlimited", lambda request: BUDGET):
        with pytest.raises(InvalidInput, match=r"^RateLimitMiddleware cost: expected a number, 0 or more, got "):
            RateLimitMiddleware(None, limit, cost=cost)  # type: ignore[arg-type]


@pytest.mark.parametrize("cost", ["0", 0.0, Decimal(0), lambda request: "0.00"])
def test_a_request_that_costs_nothing_is_not_counted(budget: Limiter, cost: Any) -> None:
    with client_of(AsgiEdge(limiter=budget, key=known, cost=cost)) as client:
        assert [client.get("/").headers.get("ratelimit") for _ in range(2)] == [None, None]
    assert left(budget) == 1


@middlewares
def test_of_several_limits_those_without_decimals_count_a_cost_rounded_up(edge: type[Edge], budget: Limiter) -> None:
    """A path that a framework may take for another counts for both."""
    requests = Limiter("10/minute", store=budget.store, name="requests")
    options: Any = {"key": known, "settle": lambda request, response: "2.5"}
    app = edge(limiter=requests, routes={"/chat": budget}, cost=lambda request: "0.4", **options)
    with client_of(app) as client:
        assert client.get("/chat/").status_code == 200
    assert requests.peek(KEY).remaining == 10 - 3
    assert not budget.peek(KEY, "0.000001")  # in debt
    with client_of(app) as client:
        assert client.get("/").status_code == 500  # here nothing counts parts
    assert requests.peek(KEY).remaining == 10 - 3


@every_edge
def test_a_limit_function_may_return_budgets_and_unlimited(edge: type[Edge]) -> None:
    def limit(request: Any) -> str:
        return request.headers.get("x-limit", "unlimited")  # type: ignore[no-any-return]

    with client_of(edge(limiter=limit, cost="0.5")) as client:
        for text, statuses in (("unlimited", [200, 200, 200]), (BUDGET, [200, 200, 429]), ("blocked", [429] * 3)):
            assert [client.get("/", headers={"x-limit": text}).status_code for _ in range(3)] == statuses


async def test_the_headers_are_those_of_the_limit_that_lets_fewer_more_requests_pass(clock: ManualClock) -> None:
    """0.9 dollars let 18 more requests pass that cost 0.05 each, not none."""
    for cost, binds in (("0.05", "requests"), ("0.5", "budget")):
        store = MemoryStore(clock=clock)
        inner = RateLimitMiddleware(AsgiEdge().app(), Limiter("5/minute", store=store, name="requests"))
        app = RateLimitMiddleware(inner, Limiter(BUDGET, store=store, name="budget"), cost=cost)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://example.org") as client:
            await client.get("/")
            answer = await client.get("/")
        assert answer.headers["ratelimit"].startswith(f'"{binds}"')


@pytest.mark.parametrize("cost", ["0.4", 0.4, Decimal("0.4"), lambda: "0.4"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_call_costs_a_part_of_a_dollar(cost: Any, dynamic: bool) -> None:
    given: Any = {"limit": lambda: BUDGET} if dynamic else {}

    @rate_limited(*() if dynamic else (BUDGET,), **given, cost=cost)
    def call() -> str:
        return "done"

    assert [call(), call()] == ["done", "done"]
    with pytest.raises(RateLimited, match=BUDGET):
        call()


async def test_a_call_costs_whole_numbers_under_other_limits() -> None:
    with pytest.raises(InvalidInput, match=r"^cost: expected a whole number of at least 1, got '0.5'$"):
        rate_limited("5/minute", cost="0.5")(print)
    with pytest.raises(InvalidInput, match=r"^cost: expected a number with at most 6 decimals"):
        rate_limited(BUDGET, cost="0.0000001")(print)
    with pytest.raises(InvalidInput, match=r"^cost: expected a number above 0, got 'much'$"):
        rate_limited(limit=lambda: BUDGET, cost="much")(print)

    @rate_limited(limit=lambda text: text, cost="0.5")
    async def call(text: str) -> str:
        return text

    for limit in ("unlimited", "unlimited", BUDGET):
        assert await call(limit) == limit
    with pytest.raises(InvalidInput, match=r"^cost: expected a whole number of at least 1, got '0.5'$"):
        await call("5/minute")
    assert rate_limited("unlimited", cost="0.5")(lambda: "done")() == "done"
