"""Routes of the decision service for holds: a program in any language reserves on its accounts, and settles.

A caller acts for itself and sees the accounts on its own path; an admin acts for any agent and sees every account.
Nobody renews a lease here: the program extends it.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import asdict

from headgate.errors import HoldError, StoreError, refuse
from headgate.gate import Gate
from headgate.gate.account_holds import AccountHold
from headgate.gate.account_status import AccountHoldSummary, LimitStatus
from headgate.gate.accounts import NO_ACCOUNT, is_within, split_path
from headgate.gate.policy import check_agent
from headgate.holds import PendingHold
from headgate.http import PROBLEM_JSON
from headgate.http.problem import describe_bound, describe_denial
from headgate.hub.agents.store_guard import StoreGuard
from headgate.hub.api.responses import ApiResponse, DeniedBody, encode_headers
from headgate.hub.api.routing import Access, Body, Call, Route
from headgate.hub.errors import BLOCKED_BY_OPERATOR, RequestError, stopping_error
from headgate.hub.monitoring.health import Health
from headgate.hub.monitoring.stats import holds_from
from headgate.hub.sockets.frames import AMOUNT_PATTERN, HOLD_ID_PATTERN, AgentId, SessionId
from headgate.limits.decision import Decision
from headgate.limits.numbers import LARGEST
from headgate.limits.units import amount_text

MAX_TIMEOUT: Final = 30
"""Seconds for which the hub lets a hold wait."""
MAX_RESOURCES: Final = 64
"""In the costs of one request."""
MAX_LISTED: Final = 100
"""Holds in one answer."""
_LOOK_AGAIN: Final = 0.25  # seconds after which a hold that waits looks whether its caller may go on
_EXACT_DIGITS: Final = 15  # significant digits of a decimal that every double keeps

# Bodies and answers ---------------------------------------------------------------------------------------------------

_Text: TypeAlias = Annotated[str, Meta(pattern=AMOUNT_PATTERN)]
Amount: TypeAlias = _Text | Annotated[int, Meta(ge=0, le=LARGEST)] | Annotated[float, Meta(ge=0, le=LARGEST)]
Costs: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Amount],
    Meta(
        max_length=MAX_RESOURCES,
        description="by resource: whole numbers, or texts such as '0.0312' with as many decimals as the unit has",
    ),
]
Lease: TypeAlias = Annotated[float, Meta(ge=0, description="seconds, up to accounts.max_lease of the policy")]
HoldId: TypeAlias = Annotated[
    str,
    Meta(
        pattern=HOLD_ID_PATTERN,
        max_length=200,
        description="letters, digits, and - _ ~ : .; the same id again is the same hold",
    ),
]
_Tool: TypeAlias = Annotated[str, Meta(max_length=128)]


class NewHold(Body):
    """The costs to reserve, beside one request and one slot of each account that limits them."""

    costs: Costs = msgspec.field(default_factory=dict)
    agent: AgentId | None = None
    """For admins: the agent that holds."""
    session: SessionId | None = None
    tool: _Tool | None = None
    lease: Lease | None = None
    """60 seconds unless it is given, or `accounts.max_lease` of the policy if that is less."""
    timeout: Annotated[float, Meta(ge=0, le=MAX_TIMEOUT, description="seconds to wait if it is denied")] = 0
    id: HoldId | None = None


class HoldSettlement(Body):
    """The used costs. A resource that isn't named costs its reservation."""

    costs: Costs | None = None


class Extension(Body):
    """The costs to reserve in addition or in total, and the end of the lease."""

    costs: Costs | None = None
    """To be added. Repeated, it is added once more."""
    total: Costs | None = None
    """To be reserved in all. It can be repeated after a lost answer."""
    lease: Lease | None = None
    """Seconds from now; a shorter lease than the present one changes nothing, and 0 ends it."""


class ForAgent(Body):
    agent: AgentId | None = None
    """For admins: the agent that holds."""


class AccountQuery(Body):
    holds: Annotated[int, Meta(ge=0, le=MAX_LISTED, description="open holds to list")] = 0


class HoldBound(Struct):
    """The deciding limit: with the longest wait, or else the smallest share left."""

    account: str
    resource: str
    tool: str


class HoldEntry(Struct):
    """A hold in a list."""

    id: str
    agent: str
    account: str
    """The path of the agent when the hold was made."""
    session: str
    tool: str
    state: str
    """ "open", "settled", "cancelled" or "expired"."""
    costs: dict[str, str]
    """The reserved or settled costs."""
    lease_left: float
    """Seconds; 0 if it isn't open."""


class HoldDetail(HoldEntry):
    outcome: str
    bound: HoldBound | None
    degraded: bool
    """Whether the store was away."""


class DeniedHoldBody(DeniedBody):
    """A denial, with what decided; without it, the caller's own requests are too many, or it is blocked."""

    account: str = ""
    resource: str = ""
    tool: str = ""


class LimitEntry(Struct):
    """A limit of an account, and what is left of it. Amounts are texts, to be exact."""

    resource: str
    tool: str
    limit: str
    amount: str
    spent: str
    held: str
    left: str
    resets_after: float | None
    """Seconds until all that was spent has come back; null if it never does by itself."""


class CallerAccount(Struct):
    """An account as a program sees it."""

    path: str
    level: str
    plan: str
    limits: list[LimitEntry]
    holds: list[HoldEntry]
    """An agent is shown its own."""


# Costs ----------------------------------------------------------------------------------------------------------------


def read_costs(costs: Mapping[str, str | float]) -> dict[str, Any]:
    """Costs from JSON, for a gate. A number that may not be exact is refused."""
    return {resource: _read_amount(f"costs.{resource}", amount) for resource, amount in costs.items()}


def _read_amount(where: str, amount: str | float) -> int | str:
    if isinstance(amount, int):
        return amount
    number = Decimal(amount if isinstance(amount, str) else repr(amount))
    if isinstance(amount, float) and len(number.normalize().as_tuple().digits) > _EXACT_DIGITS:
        refuse(where, f"a text such as '0.0312', or a number of at most {_EXACT_DIGITS} digits, to be exact", amount)
    return int(number) if number == number.to_integral_value() else amount_text(number)


def cost_texts(costs: Mapping[str, Decimal]) -> dict[str, str]:
    """Costs by resource, for JSON."""
    return {resource: amount_text(amount) for resource, amount in costs.items()}


# Answers --------------------------------------------------------------------------------------------------------------


def _answer(hold: AccountHold) -> HoldDetail:
    decision, bound = hold.decision, None if hold.bound is None else HoldBound(*hold.bound)
    fields = asdict(hold_entry(hold))
    return HoldDetail(**fields, outcome=decision.outcome.value, bound=bound, degraded=decision.degraded)


def _denial(gate: Gate, hold: AccountHold, decision: Decision) -> ApiResponse:
    """The response to a hold that is denied, or can't reserve more."""
    bound = hold.bound
    told = describe_denial(decision, "hold" if bound is None else bound.resource)
    if bound is not None:
        told = describe_bound(told, hold.denial())
    elif gate.is_blocked(hold.agent):
        told = told._replace(detail=BLOCKED_BY_OPERATOR)
    return ApiResponse(told.status, told.encode(), encode_headers(told.retry_headers), PROBLEM_JSON)


def limit_entry(status: LimitStatus) -> LimitEntry:
    amount, spent, held, left = map(amount_text, (status.amount, status.spent, status.held, status.left))
    return LimitEntry(status.resource, status.tool, status.limit, amount, spent, held, left, status.resets_after)


def hold_entry(hold: AccountHold | AccountHoldSummary) -> HoldEntry:
    who = hold.id, hold.agent, hold.account, hold.session, hold.tool, hold.state
    return HoldEntry(*who, cost_texts(hold.costs), hold.lease_left)


# Handlers -------------------------------------------------------------------------------------------------------------


def _agent(call: Call, given: str | None) -> str:
    """The agent that a caller acts for."""
    if given is None or given == call.agent:
        if not call.agent:
            raise RequestError(
                400, "invalid", "agent: expected the agent to act for, got none; an admin has to name it"
            )
        return call.agent
    if not call.admin:
        raise RequestError(403, "forbidden", "agent: only an admin may act for another agent")
    return check_agent(given)


async def _hold(call: Call, gate: Gate, health: Health, guard: StoreGuard) -> HoldDetail | ApiResponse:
    guard.require_data()  # without it, what was spent of a budget isn't known
    body: NewHold = call.body
    agent, costs = _agent(call, body.agent), read_costs(body.costs)
    pending = gate.ahold(
        agent,
        costs,
        session=body.session,
        tool=body.tool,
        lease=body.lease,
        timeout=body.timeout,
        hold_id=body.id,
    )
    with holds_from(call.address if agent == call.agent else ""):  # an admin's address isn't the agent's
        hold = await _wait_in_line(call, health, guard, pending) if body.timeout else await pending
    return _answer(hold) if hold else _denial(gate, hold, hold.decision)


async def _wait_in_line(
    call: Call, health: Health, guard: StoreGuard, pending: PendingHold[AccountHold]
) -> AccountHold:
    """A hold that may have to wait, as long as its caller listens and is admitted, and the hub goes on.

    What is granted to a caller that isn't told is cancelled, unless it hung up and may ask again by its own id.
    """
    making, leaving, kept = asyncio.ensure_future(pending), asyncio.ensure_future(call.hung_up()), False
    try:
        while not (making.done() or leaving.done()):
            await asyncio.wait((making, leaving), timeout=_LOOK_AGAIN, return_when=asyncio.FIRST_COMPLETED)
            if not making.done() or _is_granted(making):  # a denial is told by whoever has denied it
                await call.admit_again()
                guard.require_data()
            if health.stopping and not making.done():
                raise stopping_error()
        kept = not leaving.done() or call.body.id is not None
    finally:
        leaving.cancel()
        making.cancel()  # it does nothing to one that is done
        await asyncio.wait((making,))  # it may have something to give back
        if not kept and _is_granted(making) and not making.result().repeated:
            with suppress(HoldError, StoreError):  # the caller is told why it isn't admitted
                await making.result().acancel()
    if making.cancelled():
        raise RequestError(400, "invalid", "the caller hung up while it waited")
    return making.result()


def _is_granted(making: asyncio.Future[AccountHold]) -> bool:
    return not making.cancelled() and making.exception() is None and bool(making.result())


async def _find(call: Call, gate: Gate) -> AccountHold:
    return await gate.afind_hold(_agent(call, call.query.agent), call.parts["id"])


async def _get(call: Call, gate: Gate) -> HoldDetail:
    return _answer(await _find(call, gate))


async def _settle(call: Call, gate: Gate) -> HoldDetail:
    body: HoldSettlement = call.body
    costs = None if body.costs is None else read_costs(body.costs)
    hold = await _find(call, gate)
    await hold.asettle(costs)
    return _answer(hold)


async def _extend(call: Call, gate: Gate, guard: StoreGuard) -> HoldDetail | ApiResponse:
    body: Extension = call.body
    if body.costs is not None and body.total is not None:
        refuse("body", "costs to be added, or the total", "both")
    more = None if body.costs is None else read_costs(body.costs)
    total = None if body.total is None else read_costs(body.total)
    if body.lease != 0:
        guard.require_data()
    hold = await _find(call, gate)
    if body.lease == 0:
        if more is not None or total is not None:
            refuse("lease", "a time above 0 for a hold that reserves more", body.lease)
        await hold.aexpire()
        return _answer(hold)
    before = hold.costs
    if total is not None:
        more = hold.missing_to(total)
    decision = await hold.aextend(more, lease=body.lease)
    if not decision and hold.costs == before:  # else it is counted and never denied
        return _denial(gate, hold, decision)
    return _answer(hold)


async def _cancel(call: Call, gate: Gate) -> HoldDetail:
    hold = await _find(call, gate)
    await hold.acancel()
    return _answer(hold)


async def _account(call: Call, gate: Gate) -> CallerAccount:
    path = listed = call.parts["path"]
    if not call.admin:
        own = gate.path_of(call.agent)
        above = is_within(own, path) and NO_ACCOUNT not in split_path(path)
        if not (above or is_within(path, own)):
            raise RequestError(404, "unknown_account", "there is no such account, or it isn't yours")
        listed = path if is_within(path, own) else own
    account = await gate.aaccount(path)
    count = call.query.holds
    holds = await gate.alist_holds(listed, count) if count else []
    limits = [limit_entry(limit) for limit in account.limits]
    return CallerAccount(account.path, account.level, account.plan, limits, [hold_entry(hold) for hold in holds])


_PATH: Final = "/v1/holds/{id}"
ROUTES: Final = (
    Route(
        "POST", "/v1/holds", "post_hold", Access.PROGRAM, _hold,
        "reserve on all accounts above an agent, or nowhere", body=NewHold, status=201, denial=DeniedHoldBody,
    ),
    Route(
        "GET", _PATH, "get_hold", Access.PROGRAM, _get, "a hold of the caller", query=ForAgent, denial=DeniedHoldBody,
    ),
    Route(
        "POST", f"{_PATH}/settle", "post_hold_settle", Access.PROGRAM, _settle,
        "end a hold, and count the used costs", body=HoldSettlement, query=ForAgent, denial=DeniedHoldBody,
        body_required=False,
    ),
    Route(
        "POST", f"{_PATH}/extend", "post_hold_extend", Access.PROGRAM, _extend,
        "reserve more, or let the lease end later", body=Extension, query=ForAgent, denial=DeniedHoldBody,
    ),
    Route(
        "POST", f"{_PATH}/cancel", "post_hold_cancel", Access.PROGRAM, _cancel,
        "end a hold, and give back its reservation", query=ForAgent, denial=DeniedHoldBody,
    ),
    Route(
        "GET", "/v1/accounts/{path}", "get_account", Access.PROGRAM, _account,
        "an account on the caller's path: its limits, with amounts spent, held and left", query=AccountQuery,
    ),
)  # fmt: skip
